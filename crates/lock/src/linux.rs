//! The lock on Linux: futexes, and barriers by `membarrier`.
//!
//! Invariants: once the process has registered, the light barrier is a compiler barrier only, and the heavy one reaches
//! all threads. If the system later refuses the heavy barrier, a sleeping thread checks the lock every millisecond.
//! Before the registration, and if the system refuses it from the beginning, the light barrier is a full one.

use crate::protocol::Platform;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering, compiler_fence, fence};
use rustix::thread::futex::{Flags, Timespec};
use rustix::thread::{MembarrierCommand, futex, membarrier};

/// The process has not tried to register yet.
const UNKNOWN: u8 = 0;
/// Heavy barriers reach all threads.
const REGISTERED: u8 = 1;
/// The system has no such barrier, or does not permit it.
const REFUSED: u8 = 2;

/// Whether the process is registered for heavy barriers; it changes once.
static BARRIERS: AtomicU8 = AtomicU8::new(UNKNOWN);

/// Timeout of a sleep after a refused heavy barrier; the thread then checks the lock again.
const CHECK_TIMEOUT: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
/// Timeout of any other sleep: a system that reports that all threads have passed a barrier may be wrong (an emulator,
/// a sandbox).
const SLEEP_TIMEOUT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

#[derive(Debug)]
pub(crate) struct Linux;

impl Linux {
    /// A word that is 0.
    #[allow(clippy::declare_interior_mutable_const)]
    pub(crate) const FREE: AtomicU32 = AtomicU32::new(0);
}

/// Registers the process for barriers that reach all threads, which makes an unlock inexpensive. A process should call
/// it once, early; otherwise the first thread that sleeps on a lock registers.
pub fn prepare() {
    barriers();
}

fn barriers() -> u8 {
    match BARRIERS.load(Ordering::SeqCst) {
        UNKNOWN => {
            let barriers = if register() { REGISTERED } else { REFUSED };
            // Concurrent registrations get the same result.
            match BARRIERS.compare_exchange(UNKNOWN, barriers, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => barriers,
                Err(found) => found,
            }
        }
        found => found,
    }
}

/// Whether the unlocking thread must execute a full barrier, since no other thread can cause one in it.
const fn light_is_full(barriers: u8) -> bool {
    barriers != REGISTERED
}

fn register() -> bool {
    membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
}

fn barrier_in_all_threads() -> bool {
    membarrier(MembarrierCommand::PrivateExpedited).is_ok()
}

impl Platform for Linux {
    type Word = AtomicU32;

    // A few microseconds; a lane spins before this itself.
    const SPINS: u32 = 100;

    #[inline]
    fn load(word: &AtomicU32, order: Ordering) -> u32 {
        word.load(order)
    }

    #[inline]
    fn store(word: &AtomicU32, value: u32, order: Ordering) {
        word.store(value, order);
    }

    fn add(word: &AtomicU32, value: u32) {
        word.fetch_add(value, Ordering::Relaxed);
    }

    #[inline]
    fn try_acquire(word: &AtomicU32) -> bool {
        word.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    fn light_barrier() {
        if light_is_full(BARRIERS.load(Ordering::Relaxed)) {
            fence(Ordering::SeqCst);
        } else {
            compiler_fence(Ordering::SeqCst);
        }
    }

    fn heavy_barrier() -> bool {
        fence(Ordering::SeqCst);
        // A forked child may start without its parent's registration, so it may have to register again.
        barriers() == REFUSED || barrier_in_all_threads() || (register() && barrier_in_all_threads())
    }

    fn sleep(word: &AtomicU32, has_barrier: bool) {
        // Woken, interrupted, timed out, or not put to sleep at all: in each case the caller checks again.
        let _ = futex::wait(
            word,
            Flags::PRIVATE,
            1,
            Some(if has_barrier { &SLEEP_TIMEOUT } else { &CHECK_TIMEOUT }),
        );
    }

    #[cold]
    fn wake(word: &AtomicU32) {
        // An error is possible only for an invalid address.
        let _ = futex::wake(word, Flags::PRIVATE, 1);
    }

    fn pause() {
        // `sched_yield` would give the processor to another runnable thread, for milliseconds; a sleeping thread
        // resumes sooner.
        core::hint::spin_loop();
    }
}

#[cfg(test)]
#[allow(unsafe_code, missing_docs)]
#[path = "../../backing/tests/common/forbid.rs"]
mod forbid;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    #[test]
    fn the_light_barrier_is_full_without_heavy_ones_and_a_refused_heavy_one_is_reported() {
        assert!(light_is_full(UNKNOWN) && light_is_full(REFUSED) && !light_is_full(REGISTERED));
        let has_barriers = register();
        prepare();
        assert_eq!(BARRIERS.load(Ordering::SeqCst), if has_barriers { REGISTERED } else { REFUSED });
        assert!(Linux::heavy_barrier());
        let refused = std::thread::spawn(|| {
            forbid::forbid(libc::SYS_membarrier);
            Linux::heavy_barrier()
        });
        // If the system never had heavy barriers, no thread relies on them.
        assert_eq!(refused.join().expect("no panic"), !has_barriers);
    }

    #[test]
    fn a_sleeping_thread_is_woken_before_its_timeout() {
        // Long enough for the other thread to sleep; if it has not slept in one round, another round covers this.
        const ROUNDS: u32 = 5;
        let begun = Instant::now();
        for _ in 0..ROUNDS {
            let word = Arc::new(AtomicU32::new(1));
            let sleeper = std::thread::spawn({
                let word = Arc::clone(&word);
                move || {
                    while Linux::load(&word, Ordering::SeqCst) == 1 {
                        Linux::sleep(&word, true);
                    }
                }
            });
            std::thread::sleep(Duration::from_millis(20));
            Linux::store(&word, 0, Ordering::SeqCst);
            Linux::wake(&word);
            sleeper.join().expect("no panic");
        }
        let taken = begun.elapsed();
        assert!(taken < Duration::from_secs(u64::from(ROUNDS - 1)), "{taken:?}: no thread was woken");
    }
}
