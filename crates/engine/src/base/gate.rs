//! The gate: refuses requests while a cache must not serve them.
//!
//! Invariants: a stopped cache accepts no request again; the first request that makes data dirty passes only after the callback
//! has recorded durably, outside the cache, that the cache is about to hold dirty data.

use crate::{
    Environment, Mutex,
    sync::{SharedBool, SharedU32},
};
use alloc::boxed::Box;
use cbd_types::{Error, ErrorKind, Result};
use core::sync::atomic::Ordering;

/// Bit of [`Gate::bits`]: the cache accepts no more requests.
const STOPPED: u32 = 1;

/// Bit of [`Gate::bits`]: nothing was dirty when the cache was opened, and no first write has been recorded yet.
const UNNOTED: u32 = 2;

/// Records durably that the cache is about to hold dirty data.
pub(crate) type FirstWrite = Box<dyn Fn() -> Result<()> + Send + Sync>;

/// The state that decides whether requests are accepted.
pub(crate) struct Gate<E: Environment> {
    /// [`STOPPED`] and [`UNNOTED`]. Every request reads it; it is rarely written.
    bits: SharedU32<E>,
    abandoned: SharedBool<E>,
    /// The callback that runs before the first write; see [`UNNOTED`].
    first_write: Mutex<E, Option<FirstWrite>>,
}

impl<E: Environment> Gate<E> {
    /// An open gate.
    pub(crate) fn new() -> Self {
        Self {
            bits: SharedU32::new(0),
            abandoned: SharedBool::new(false),
            first_write: Mutex::<E, _>::new(None),
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
