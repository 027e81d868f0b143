//! All executions of a few threads, under the memory model of the language: with full barriers on both sides, as on a
//! system without heavy barriers.

mod steps;

use super::*;
use loom::sync::atomic::{AtomicU32, fence};
use loom::sync::{Condvar, Mutex};
use std::rc::Rc;

/// A word and its futex queue: a sleeping thread checks the word under the same lock under which another one wakes it.
struct Word {
    value: AtomicU32,
    queue: Mutex<()>,
    wakeup: Condvar,
}

fn word() -> Word {
    Word { value: AtomicU32::new(0), queue: Mutex::new(()), wakeup: Condvar::new() }
}

/// The platform of the model; `LIGHT` and `HEAVY` determine whether the barriers have an effect.
struct Model<const LIGHT: bool, const HEAVY: bool>;

impl<const LIGHT: bool, const HEAVY: bool> Platform for Model<LIGHT, HEAVY> {
    type Word = Word;

    const SPINS: u32 = 0;

    fn load(word: &Word, order: Ordering) -> u32 {
        word.value.load(order)
    }

    fn store(word: &Word, value: u32, order: Ordering) {
        word.value.store(value, order);
    }

    fn add(word: &Word, value: u32) {
        word.value.fetch_add(value, Ordering::Relaxed);
    }

    fn try_acquire(word: &Word) -> bool {
        word.value.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    fn light_barrier() {
        if LIGHT {
            fence(Ordering::SeqCst);
        }
    }

    fn heavy_barrier() -> bool {
        if HEAVY {
            fence(Ordering::SeqCst);
        }
        true
    }

    fn sleep(word: &Word, _has_barrier: bool) {
        let queue = word.queue.lock().expect("no panic");
        if word.value.load(Ordering::Relaxed) == 1 {
            drop(word.wakeup.wait(queue).expect("no panic"));
        }
    }

    fn wake(word: &Word) {
        let _queue = word.queue.lock().expect("no panic");
        word.wakeup.notify_one();
    }

    fn pause() {}
}

/// Threads that each acquire the lock and increment the number that it protects; a thread that is never woken
/// is a deadlock, which fails the execution.
fn increment_from_threads<const LIGHT: bool, const HEAVY: bool>(threads: usize, preemptions: Option<usize>) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(move || {
        // The threads of the model are coroutines of one thread.
        let shared =
            Rc::new((Protocol::<Model<LIGHT, HEAVY>>::new(word(), word()), loom::cell::UnsafeCell::new(0)));
        let work = |shared: &(Protocol<Model<LIGHT, HEAVY>>, loom::cell::UnsafeCell<usize>)| {
            shared.0.lock();
            // SAFETY: the lock is held; the model checks that no other thread accesses the number, and that all earlier
            // changes are visible.
            #[allow(unsafe_code)]
            shared.1.with_mut(|number| unsafe { *number += 1 });
            shared.0.unlock();
        };
        let others: Vec<_> = (1..threads)
            .map(|_| {
                let shared = Rc::clone(&shared);
                loom::thread::spawn(move || work(&shared))
            })
            .collect();
        work(&shared);
        others.into_iter().for_each(|thread| thread.join().expect("no panic"));
        // SAFETY: all other threads have ended.
        #[allow(unsafe_code)]
        shared.1.with(|number| assert_eq!(unsafe { *number }, threads));
    });
}

#[test]
fn two_threads_exclude_each_other_and_both_end() {
    increment_from_threads::<true, true>(2, None);
}

#[test]
fn three_threads_exclude_each_other_and_all_end() {
    increment_from_threads::<true, true>(3, Some(3));
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_barrier_of_the_unlock_a_wakeup_is_lost() {
    increment_from_threads::<false, true>(2, None);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_barrier_of_the_sleeper_a_wakeup_is_lost() {
    increment_from_threads::<true, false>(2, None);
}
