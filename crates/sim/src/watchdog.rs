//! Ends a test that hangs: a simulated world without progress must fail with its seed, and not block a build.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Aborts the process if it still exists when the time limit is reached.
#[derive(Debug)]
pub struct Watchdog(Arc<AtomicBool>);

impl Watchdog {
    /// Aborts the process after `limit`, and prints `what` as the operation in progress.
    #[must_use]
    pub fn new(limit: Duration, what: impl Into<String>) -> Self {
        let (done, what) = (Arc::new(AtomicBool::new(false)), what.into());
        let watched = Arc::clone(&done);
        let end = Instant::now() + limit;
        std::thread::spawn(move || {
            while !watched.load(Ordering::Relaxed) {
                if Instant::now() >= end {
                    eprintln!("hangs for more than {limit:?}: {what}");
                    std::process::abort();
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        Self(done)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
