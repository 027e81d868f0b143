//! The gate: what keeps requests out of a cache.
//!
//! Invariants: a cache that was stopped takes no request again; the first request that makes something dirty passes only after it
//! was noted outside that this is going to happen.

use crate::{
    Environment, Mutex,
    sync::{SharedBool, SharedU32},
};
use alloc::boxed::Box;
use cbd_types::{Error, ErrorKind, Result};
use core::sync::atomic::Ordering;

/// Bit of [`Gate::bits`]: no request is taken any more.
const STOPPED: u32 = 1;

/// Bit of [`Gate::bits`]: nothing was dirty when the cache was opened, and that this is going to change was not noted yet.
const UNNOTED: u32 = 2;

/// Notes durably that the cache is about to hold dirty data.
pub(crate) type FirstWrite = Box<dyn Fn() -> Result<()> + Send + Sync>;

/// What keeps requests out.
pub(crate) struct Gate<E: Environment> {
    /// [`STOPPED`] and [`UNNOTED`]. Every request reads it, and hardly anything writes it.
    bits: SharedU32<E>,
    abandoned: SharedBool<E>,
    /// What has to be noted outside before the first write; see [`UNNOTED`].
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

    /// As [`check_running`](Self::check_running), for a request that makes something dirty, before it takes a lane.
    ///
    /// # Errors
    /// As [`check_running`](Self::check_running), and what kept the first write from being noted.
    #[inline]
    pub(crate) fn check_writable(&self) -> Result<()> {
        if self.bits.load(Ordering::SeqCst) == 0 { Ok(()) } else { self.pass() }
    }

    #[cold]
    fn pass(&self) -> Result<()> {
        self.check_running()?;
        // A request that comes meanwhile waits here for the one that notes it.
        let mut first_write = self.first_write.lock();
        if let Some(note) = first_write.as_ref() {
            note()?;
        }
        *first_write = None;
        self.bits.fetch_and(!UNNOTED, Ordering::SeqCst);
        Ok(())
    }

    /// Has `note` called before the first request that makes something dirty. Before the cache is used.
    pub(crate) fn before_first_write(&self, note: FirstWrite) {
        *self.first_write.lock() = Some(note);
        self.bits.fetch_or(UNNOTED, Ordering::SeqCst);
    }

    /// Refuses all further requests.
    pub(crate) fn stop(&self) {
        self.bits.fetch_or(STOPPED, Ordering::SeqCst);
    }

    /// As [`stop`](Self::stop), and nothing is marked any more.
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
