//! The lock of an engine that runs in a process: it is let go with a plain store.
//!
//! A lane is let go right behind the fence of a record, while the last lines of the record are on their way to memory. Other mutexes have a
//! locked instruction there, to see whether somebody sleeps for them, and on x86 it waits until those lines have arrived. Behind a
//! plain store the processor goes on with the next request meanwhile: a quarter less on top of the bare copy of 4 KiB.
//!
//! The price is paid by who has to sleep: it makes every thread of the process pass a barrier first (`membarrier`), some microseconds.
//!
//! Always true here: one holder at a time, who sees all that earlier holders did; who sleeps is woken (`protocol`).
//!
//! Left to others: fairness. Who comes at the right moment overtakes who sleeps, and as long as a sleeper is on its way each unlock wakes for it anew (a
//! system call).

mod linux;
mod protocol;

use lock_api::{GuardSend, RawMutex};
use protocol::Protocol;

pub use linux::prepare;

/// The lock, for [`lock_api::Mutex`].
#[derive(Debug)]
pub struct Lock(Protocol<linux::Linux>);

// SAFETY: the protocol has one holder at a time: `lock` returns, and `try_lock` answers true, only to who changed the word from free to
// held, and only `unlock`, which the contract restricts to the holder, changes it back.
#[allow(unsafe_code)]
unsafe impl RawMutex for Lock {
    // A value to begin with, copied into each new mutex.
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
