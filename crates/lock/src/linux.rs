//! The lock on Linux: futexes, and barriers by `membarrier`.
//!
//! Always true here: once the process has registered, the light barrier binds the compiler alone and the heavy one reaches all threads; if the system takes that
//! away later, a sleeper looks again every millisecond. Before, and where the system refuses at once, the light barrier is a full one.

use crate::protocol::Platform;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering, compiler_fence, fence};
use rustix::thread::futex::{Flags, Timespec};
use rustix::thread::{MembarrierCommand, futex, membarrier};

/// Nobody has asked the system yet.
const UNKNOWN: u8 = 0;
/// Heavy barriers reach all threads.
const REGISTERED: u8 = 1;
/// The system has no such barrier, or forbids it.
const REFUSED: u8 = 2;

/// Which of them; it changes once.
static WAY: AtomicU8 = AtomicU8::new(UNKNOWN);

/// How long who could not make others pass a barrier sleeps before it looks again.
const SHORT: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
/// How long anybody sleeps: a system that says that all threads have passed a barrier may be wrong (an emulator, a sandbox).
const LONG: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

#[derive(Debug)]
pub(crate) struct Linux;

impl Linux {
    /// A word that is 0.
    #[allow(clippy::declare_interior_mutable_const)]
    pub(crate) const FREE: AtomicU32 = AtomicU32::new(0);
}

/// Asks the system for barriers that reach all threads, which makes letting go cheap. A process calls it once, early; who sleeps for a lock does
/// it otherwise.
pub fn prepare() {
    way();
}

fn way() -> u8 {
    match WAY.load(Ordering::SeqCst) {
        UNKNOWN => {
            let way = if register() { REGISTERED } else { REFUSED };
            // Threads that ask at the same time get the same answer.
            match WAY.compare_exchange(UNKNOWN, way, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => way,
                Err(found) => found,
            }
        }
        found => found,
    }
}

/// Whether who lets go has to pass a barrier, since nobody else can make it.
const fn light_is_full(way: u8) -> bool {
    way != REGISTERED
}

fn register() -> bool {
    membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
}

fn reach_all() -> bool {
    membarrier(MembarrierCommand::PrivateExpedited).is_ok()
}

impl Platform for Linux {
    type Word = AtomicU32;

    // A few microseconds; a lane has looks of its own.
    const LOOKS: u32 = 100;

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
    fn take(word: &AtomicU32) -> bool {
        word.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    fn light_barrier() {
        if light_is_full(WAY.load(Ordering::Relaxed)) {
            fence(Ordering::SeqCst);
        } else {
            compiler_fence(Ordering::SeqCst);
        }
    }

    fn heavy_barrier() -> bool {
        fence(Ordering::SeqCst);
        // A child that was forked may begin without its parent's registration.
        way() == REFUSED || reach_all() || (register() && reach_all())
    }

    fn sleep(word: &AtomicU32, has_barrier: bool) {
        // Woken, interrupted, late or not asleep at all: the caller looks again.
        let _ = futex::wait(word, Flags::PRIVATE, 1, Some(if has_barrier { &LONG } else { &SHORT }));
    }

    #[cold]
    fn wake(word: &AtomicU32) {
        // Fails only for an address that is none.
        let _ = futex::wake(word, Flags::PRIVATE, 1);
    }

    fn pause() {
        // `sched_yield` would give the processor to whoever else wants it, for milliseconds; who sleeps is back sooner.
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
    fn the_light_barrier_is_full_unless_heavy_ones_reach_all_and_a_heavy_one_that_is_refused_is_told() {
        assert!(light_is_full(UNKNOWN) && light_is_full(REFUSED) && !light_is_full(REGISTERED));
        let has_barriers = register();
        prepare();
        assert_eq!(WAY.load(Ordering::SeqCst), if has_barriers { REGISTERED } else { REFUSED });
        assert!(Linux::heavy_barrier());
        let refused = std::thread::spawn(|| {
            forbid::forbid(libc::SYS_membarrier);
            Linux::heavy_barrier()
        });
        // Where there never were any, nobody counts on them.
        assert_eq!(refused.join().expect("no panic"), !has_barriers);
    }

    #[test]
    fn a_sleeper_is_woken_and_does_not_wait_until_it_looks_again_by_itself() {
        // Long enough for the other thread to sleep; where it has not, another round sees it.
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
        assert!(taken < Duration::from_secs(u64::from(ROUNDS - 1)), "{taken:?}: nobody was woken");
    }
}
