//! The gate: refuses requests while a cache must not serve them, and holds writes up for a moment.
//!
//! Invariants:
//! - a stopped cache accepts no request again;
//! - the first request that makes data dirty passes only after the callback has recorded durably, outside the cache, that the cache
//!   is about to hold dirty data;
//! - while the gate is closed, no request that makes data dirty passes: it waits until the thread that closed the gate opens it, a
//!   few microseconds later. A request that passed before takes its epoch whenever it comes to it.
//!
//! Elsewhere: why the gates of several caches are closed (`cache::moment`).

use crate::{
    Environment, Mutex,
    sync::{SharedBool, SharedU32},
};
use alloc::boxed::Box;
use cbd_types::{Error, ErrorKind, Result};
use core::sync::atomic::Ordering;
use lock_api::MutexGuard;

/// Bit of [`Gate::bits`]: the cache accepts no more requests.
const STOPPED: u32 = 1;

/// Bit of [`Gate::bits`]: nothing was dirty when the cache was opened, and no first write has been recorded yet.
const UNNOTED: u32 = 2;

/// Bit of [`Gate::bits`]: the gate is closed for a moment.
const CLOSED: u32 = 4;

/// Records durably that the cache is about to hold dirty data.
pub(crate) type FirstWrite = Box<dyn Fn() -> Result<()> + Send + Sync>;

/// The state that decides whether requests are accepted.
pub(crate) struct Gate<E: Environment> {
    /// [`STOPPED`], [`UNNOTED`] and [`CLOSED`]. Every request reads it; it is rarely written.
    bits: SharedU32<E>,
    abandoned: SharedBool<E>,
    /// The callback that runs before the first write; see [`UNNOTED`].
    first_write: Mutex<E, Option<FirstWrite>>,
    /// Locked while the gate is closed.
    closing: Mutex<E, ()>,
}

/// A closed gate; dropping it opens the gate.
pub(crate) struct ClosedGate<'a, E: Environment> {
    gate: &'a Gate<E>,
    /// Requests that wait continue when it is dropped, which is after the gate is open.
    _waiting: MutexGuard<'a, E::Lock, ()>,
}

impl<E: Environment> Drop for ClosedGate<'_, E> {
    fn drop(&mut self) {
        self.gate.bits.fetch_and(!CLOSED, Ordering::SeqCst);
    }
}

impl<E: Environment> Gate<E> {
    /// An open gate.
    pub(crate) fn new() -> Self {
        Self {
            bits: SharedU32::new(0),
            abandoned: SharedBool::new(false),
            first_write: Mutex::<E, _>::new(None),
            closing: Mutex::<E, _>::new(()),
        }
    }

    /// # Errors
    /// [`ErrorKind::Stopped`] after [`stop`](Self::stop).
    #[inline]
    pub(crate) fn check_running(&self) -> Result<()> {
        if self.bits.load(Ordering::SeqCst) & STOPPED == 0 { Ok(()) } else { Err(was_stopped()) }
    }

    /// As [`check_running`](Self::check_running), for a request that makes data dirty, before it locks a lane.
    ///
    /// # Errors
    /// As [`check_running`](Self::check_running), and the error of recording the first write.
    #[inline]
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.bits.load(Ordering::SeqCst) == 0 { Ok(()) } else { self.pass() }
    }

    #[cold]
    fn pass(&self) -> Result<()> {
        if self.bits.load(Ordering::SeqCst) & CLOSED != 0 {
            // Waits until the gate is open. If it is closed again at once, this request has passed before that.
            drop(self.closing.lock());
        }
        self.check_running()?;
        // A concurrent request waits here until the first write is recorded.
        let mut first_write = self.first_write.lock();
        if let Some(note) = first_write.as_ref() {
            note()?;
        }
        *first_write = None;
        self.bits.fetch_and(!UNNOTED, Ordering::SeqCst);
        Ok(())
    }

    /// Sets the callback that runs before the first request that makes data dirty. Call it before the cache is used.
    pub(crate) fn before_first_write(&self, note: FirstWrite) {
        *self.first_write.lock() = Some(note);
        self.bits.fetch_or(UNNOTED, Ordering::SeqCst);
    }

    /// Holds up requests that make data dirty, until the result is dropped. The caller does nothing meanwhile that waits.
    pub(crate) fn close(&self) -> ClosedGate<'_, E> {
        let waiting = self.closing.lock();
        self.bits.fetch_or(CLOSED, Ordering::SeqCst);
        ClosedGate { gate: self, _waiting: waiting }
    }

    /// Refuses all further requests.
    pub(crate) fn stop(&self) {
        self.bits.fetch_or(STOPPED, Ordering::SeqCst);
    }

    /// As [`stop`](Self::stop); in addition, no lane is marked any more.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
        self.stop();
    }

    /// Whether [`abandon`](Self::abandon) was called.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }
}

fn was_stopped() -> Error {
    Error::new(ErrorKind::Stopped, "the cache was stopped")
}

#[cfg(test)]
mod tests;
