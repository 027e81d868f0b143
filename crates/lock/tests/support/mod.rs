//! Threads that contend for one lock.
#![allow(unsafe_code, missing_docs)]

#[path = "../../../backing/tests/common/forbid.rs"]
mod forbid;

use cbd_lock::Lock;
pub use forbid::forbid;
use std::sync::{Arc, mpsc};
use std::time::Duration;

type Mutex<T> = lock_api::Mutex<Lock, T>;

const THREADS: u64 = 4;
const ROUNDS: u64 = 3000;

/// Increments a number under one lock in several threads; occasionally one sleeps with the lock held, so that the
/// others have to sleep for it. A thread that is the ancestor of all of them runs `first`. Fails after a minute if a
/// thread is not woken.
pub fn increment_from_threads(first: impl FnOnce() + Send + 'static) {
    let (ended, end) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        first();
        let sum = Arc::new(Mutex::new(0));
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let sum = Arc::clone(&sum);
                std::thread::spawn(move || {
                    for round in 0..ROUNDS {
                        let mut sum = sum.lock();
                        // Read before and written after a pause, so that a second holder would be noticed.
                        let before = *sum;
                        if (round + thread).is_multiple_of(50) {
                            std::thread::sleep(Duration::from_micros(200));
                        }
                        *sum = before + 1;
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        assert_eq!(*sum.lock(), THREADS * ROUNDS);
        assert!(!sum.is_locked() && sum.try_lock().is_some());
        // The receiver is gone only when the test has failed.
        let _ = ended.send(());
    });
    match end.recv_timeout(Duration::from_secs(60)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("a sleeper was not woken"),
        Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => thread.join().expect("the test passed"),
    }
}
