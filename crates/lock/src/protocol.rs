//! Locking, unlocking, sleeping.
//!
//! The lock has two words: whether it is held, and the number of threads that sleep on it or are about to. The only
//! hazard is a lost wakeup: the holder unlocks and reads no sleeper, while a sleeper reads that the lock is held and
//! sleeps forever. Each of the two stores one word and then loads the other:
//!
//! ```text
//! unlock                      sleep
//!   held = 0                    sleepers += 1
//!   light barrier               heavy barrier
//!   sleepers == 0? done         held == 1? sleep, until woken
//! ```
//!
//! With a full barrier on both sides, at least one of them reads the other's store. A heavy barrier is a full one, and
//! it causes one in every other thread of the process, whatever that thread executes; so the light one only has to
//! prevent reordering by the compiler. On a system without heavy barriers the light one is a full barrier as well; the
//! tests explore all executions of this variant.
//!
//! Invariants: the changes of a holder happen before those of the next one (`Release` and `Acquire` of `held`); a
//! sleeper is counted until it holds the lock, so its count is visible to every thread that acquires the lock
//! meanwhile.

use core::sync::atomic::Ordering;

/// The primitives of the protocol: shared memory, barriers, and sleep.
pub(crate) trait Platform {
    /// A number that threads share.
    type Word;

    /// Number of checks by a thread that finds the lock held, before it sleeps.
    const SPINS: u32;

    fn load(word: &Self::Word, order: Ordering) -> u32;
    fn store(word: &Self::Word, value: u32, order: Ordering);
    /// Adds `value`, with wrapping.
    fn add(word: &Self::Word, value: u32);
    /// Sets `word` from 0 to 1; returns whether it did. If so, everything before the store of 0 is visible.
    fn try_acquire(word: &Self::Word) -> bool;
    /// The barrier between the store and the load of an unlock.
    fn light_barrier();
    /// The barrier between the store and the load of a sleep. False if the system refused it.
    fn heavy_barrier() -> bool;
    /// Sleeps if `word` is 1, until woken; may return spuriously, and returns after a short time if the
    /// heavy barrier was refused.
    fn sleep(word: &Self::Word, has_barrier: bool);
    /// Wakes one thread that sleeps on `word`.
    fn wake(word: &Self::Word);
    /// A pause while spinning.
    fn pause();
}

/// The lock over a platform.
#[derive(Debug)]
pub(crate) struct Protocol<P: Platform> {
    held: P::Word,
    sleepers: P::Word,
}

impl<P: Platform> Protocol<P> {
    /// A free lock, of two words that are 0.
    pub(crate) const fn new(held: P::Word, sleepers: P::Word) -> Self {
        Self { held, sleepers }
    }

    #[inline]
    pub(crate) fn try_lock(&self) -> bool {
        P::try_acquire(&self.held)
    }

    #[inline]
    pub(crate) fn is_locked(&self) -> bool {
        P::load(&self.held, Ordering::Relaxed) != 0
    }

    #[inline]
    pub(crate) fn lock(&self) {
        if !self.try_lock() && !self.spin() {
            self.sleep();
        }
    }

    /// Unlocks; the caller holds the lock.
    #[inline]
    pub(crate) fn unlock(&self) {
        P::store(&self.held, 0, Ordering::Release);
        P::light_barrier();
        if P::load(&self.sleepers, Ordering::Relaxed) != 0 {
            P::wake(&self.held);
        }
    }

    /// Spins until the lock becomes free; true if it was acquired.
    fn spin(&self) -> bool {
        for _ in 0..P::SPINS {
            if !self.is_locked() && self.try_lock() {
                return true;
            }
            P::pause();
        }
        false
    }

    #[cold]
    fn sleep(&self) {
        P::add(&self.sleepers, 1);
        let has_barrier = P::heavy_barrier();
        while !self.try_lock() && !self.spin() {
            P::sleep(&self.held, has_barrier);
        }
        P::add(&self.sleepers, u32::MAX);
    }
}

#[cfg(test)]
mod tests;
