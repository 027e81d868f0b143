//! Who takes, who lets go, who sleeps.
//!
//! Two words: whether the lock is held, and how many sleep for it or are about to. The one danger is that a holder lets go and sees no
//! sleeper, while that sleeper sees the lock held and goes to sleep for good. Each of the two stores one word and then loads the other:
//!
//! ```text
//! lets go                     sleeps
//!   held = 0                    sleepers += 1
//!   light barrier               heavy barrier
//!   sleepers == 0? done         held == 1? sleep, until somebody wakes
//! ```
//!
//! With a full barrier on both sides one of them sees what the other stored. A heavy barrier is one, and it puts one into every other thread of the
//! process, wherever that is; so the light one has to keep but the compiler from changing the order. Where the system has no such thing the
//! light one is a full barrier as well, and this is what the tests run through all executions.
//!
//! Always true here: what a holder did is before what the next one does (`Release` and `Acquire` of `held`); a sleeper is
//! counted until it holds the lock, so whoever took the lock since sees it.

use core::sync::atomic::Ordering;

/// What is under the protocol: memory that threads share, barriers, and sleep.
pub(crate) trait Platform {
    /// A number that threads share.
    type Word;

    /// How often who finds the lock held looks again before it sleeps.
    const LOOKS: u32;

    fn load(word: &Self::Word, order: Ordering) -> u32;
    fn store(word: &Self::Word, value: u32, order: Ordering);
    /// Adds `value`, which wraps.
    fn add(word: &Self::Word, value: u32);
    /// Whether `word` was 0 and is 1 now; then all that was before the store of 0 is seen.
    fn take(word: &Self::Word) -> bool;
    /// Between the store and the load of who lets go.
    fn light_barrier();
    /// Between the store and the load of who sleeps. False where the system refused it.
    fn heavy_barrier() -> bool;
    /// Sleeps if `word` is 1, until woken; may wake without reason, and does so soon where the heavy barrier was refused.
    fn sleep(word: &Self::Word, has_barrier: bool);
    /// Wakes one that sleeps on `word`.
    fn wake(word: &Self::Word);
    /// The thread makes a pause.
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
        P::take(&self.held)
    }

    #[inline]
    pub(crate) fn is_locked(&self) -> bool {
        P::load(&self.held, Ordering::Relaxed) != 0
    }

    #[inline]
    pub(crate) fn lock(&self) {
        if !self.try_lock() && !self.look() {
            self.sleep();
        }
    }

    /// Lets go; the caller holds the lock.
    #[inline]
    pub(crate) fn unlock(&self) {
        P::store(&self.held, 0, Ordering::Release);
        P::light_barrier();
        if P::load(&self.sleepers, Ordering::Relaxed) != 0 {
            P::wake(&self.held);
        }
    }

    /// Looks for a while whether the lock becomes free; true when it was taken.
    fn look(&self) -> bool {
        for _ in 0..P::LOOKS {
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
        while !self.try_lock() && !self.look() {
            P::sleep(&self.held, has_barrier);
        }
        P::add(&self.sleepers, u32::MAX);
    }
}

#[cfg(test)]
mod tests;
