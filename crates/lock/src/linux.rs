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
            let barriers = barriers_after(register());
            // Concurrent registrations get the same result.
            match BARRIERS.compare_exchange(UNKNOWN, barriers, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => barriers,
                Err(found) => found,
            }
        }
        found => found,
    }
}

/// The kind of barriers after an attempt to register.
const fn barriers_after(is_registered: bool) -> u8 {
    if is_registered { REGISTERED } else { REFUSED }
}

/// Whether the unlocking thread must execute a full barrier, since no other thread can cause one in it.
const fn light_is_full(barriers: u8) -> bool {
    barriers != REGISTERED
}

fn register() -> bool {
    membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
}

/// Whether a heavy barrier has reached all threads that may rely on it.
fn is_reached(barriers: u8, reach_all: impl Fn() -> bool, register: impl Fn() -> bool) -> bool {
    // A forked child may start without its parent's registration, so it may have to register again.
    barriers == REFUSED || reach_all() || (register() && reach_all())
}

fn reach_all() -> bool {
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
        is_reached(barriers(), reach_all, register)
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
        let has_barriers = membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok();
        assert_eq!(register(), has_barriers);
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
    fn a_registration_counts_and_without_one_no_thread_relies_on_heavy_barriers() {
        assert_eq!([barriers_after(true), barriers_after(false)], [REGISTERED, REFUSED]);
        let (yes, no) = (|| true, || false);
        assert!(is_reached(REFUSED, no, no) && is_reached(REGISTERED, yes, no));
        assert!(!is_reached(REGISTERED, no, no) && !is_reached(REGISTERED, no, yes));
        // The first attempt of a forked child fails, the one behind its registration does not.
        let attempts = core::cell::Cell::new(0);
        let second = || attempts.replace(attempts.get() + 1) > 0;
        assert!(is_reached(REGISTERED, second, yes));
    }

    #[test]
    fn a_sleep_ends_soon_where_no_barrier_was_reached_and_lasts_otherwise() {
        let word = AtomicU32::new(1);
        let begun = Instant::now();
        Linux::sleep(&word, false);
        assert!(begun.elapsed() < Duration::from_millis(500));
        // A thread that sleeps returns rarely, until it is woken.
        let word = Arc::new(AtomicU32::new(1));
        let sleeper = std::thread::spawn({
            let word = Arc::clone(&word);
            move || {
                let mut sleeps = 0;
                while Linux::load(&word, Ordering::SeqCst) == 1 {
                    Linux::sleep(&word, true);
                    sleeps += 1;
                }
                sleeps
            }
        });
        std::thread::sleep(Duration::from_millis(60));
        Linux::store(&word, 0, Ordering::SeqCst);
        Linux::wake(&word);
        assert!(sleeper.join().expect("no panic") <= 5);
    }

    #[test]
    fn words_are_added_to_and_taken_once() {
        let word = AtomicU32::new(0);
        assert!(Linux::try_acquire(&word) && !Linux::try_acquire(&word));
        assert_eq!(Linux::load(&word, Ordering::SeqCst), 1);
        Linux::store(&word, 0, Ordering::SeqCst);
        assert!(Linux::try_acquire(&word));
        Linux::add(&word, 2);
        Linux::add(&word, u32::MAX);
        assert_eq!(Linux::load(&word, Ordering::SeqCst), 2);
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
