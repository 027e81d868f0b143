//! The engine's lock under the scheduler: a thread that waits for it is not runnable, so a deadlock is
//! detected.
//!
//! Invariants: locking and unlocking are switch points; the scheduler chooses the next owner.

use shuttle::future::batch_semaphore::{BatchSemaphore, Fairness};

/// A lock for [`lock_api::Mutex`].
#[derive(Debug)]
pub struct ModelLock(BatchSemaphore);

// SAFETY: the semaphore has one permit. `lock` returns, and `try_lock` returns true, only with that permit. Only
// `unlock` releases it, and the contract restricts `unlock` to the thread that holds the lock. A closed semaphore
// refuses permits, and no code closes it.
unsafe impl lock_api::RawMutex for ModelLock {
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: Self = Self(BatchSemaphore::const_new(1, Fairness::Unfair));

    type GuardMarker = lock_api::GuardNoSend;

    fn lock(&self) {
        let taken = self.0.acquire_blocking(1);
        assert!(taken.is_ok(), "the execution that the lock belongs to has ended");
    }

    fn try_lock(&self) -> bool {
        self.0.try_acquire(1).is_ok()
    }

    unsafe fn unlock(&self) {
        self.0.release(1);
    }
}
