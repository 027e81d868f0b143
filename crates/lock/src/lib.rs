//! The lock of an engine that runs in a process: its unlock is a plain store.
//!
//! A lane is unlocked immediately after the fence of a record, while the last lines of the record are in
//! flight to memory. A conventional mutex unlocks with an atomic read-modify-write to detect waiters, and on
//! x86 that instruction waits until those lines have arrived. After a plain store the processor continues
//! with the next request meanwhile: this saves a quarter of the overhead over the bare copy of 4 KiB.
//!
//! A thread that has to sleep pays the cost: it first makes every thread of the process execute a barrier
//! (`membarrier`), which takes some microseconds.
//!
//! Invariants: the lock has one holder at a time, to which all changes of earlier holders are visible; a sleeping
//! thread is woken (`protocol`).
//!
//! Not provided: fairness. A running thread can acquire the lock before a sleeping one. While a woken thread has not
//! yet acquired the lock, each unlock wakes it again (a system call).

mod linux;
mod protocol;

use lock_api::{GuardSend, RawMutex};
use protocol::Protocol;

pub use linux::prepare;

/// The lock, for [`lock_api::Mutex`].
#[derive(Debug)]
pub struct Lock(Protocol<linux::Linux>);

// SAFETY: the protocol has one holder at a time: `lock` returns, and `try_lock` answers true, only to the thread that
// changed the word from free to held, and only `unlock`, which the contract restricts to the holder, changes it back.
#[allow(unsafe_code)]
unsafe impl RawMutex for Lock {
    // An initial value, copied into each new mutex.
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: Self = Self(Protocol::new(linux::Linux::FREE, linux::Linux::FREE));

    type GuardMarker = GuardSend;

    #[inline]
    fn lock(&self) {
        self.0.lock();
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.0.try_lock()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.0.unlock();
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.0.is_locked()
    }
}
