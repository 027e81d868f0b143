//! Counters of writeback and the health of the backing device: for status, and for requests that find no space.
//!
//! Invariants: only the background worker changes this state. Each lock here is a leaf.

use crate::{
    BackingTrouble, Environment, Mutex,
    sync::{SharedBool, SharedU64},
};
use alloc::{format, string::String};
use cbd_types::{Error, ErrorKind, Result};
use core::sync::atomic::{AtomicU64, Ordering};

/// The counters of writeback, and the health of the backing device.
pub(crate) struct BackingHealth<E: Environment> {
    /// The backing device has long refused writes that must complete before any others: requests without space fail.
    stalled: SharedBool<E>,
    /// The present trouble, if any.
    trouble: Mutex<E, Option<BackingTrouble>>,
    /// Failed attempts, and the error of the last one; later successes reset neither. Nothing depends on them.
    failures: AtomicU64,
    last_failure: Mutex<E, Option<String>>,
    written_back: SharedU64<E>,
    flushes: SharedU64<E>,
}

/// The same for status.
#[derive(Debug)]
pub(crate) struct BackingReport {
    pub is_stalled: bool,
    pub trouble: Option<BackingTrouble>,
    pub failures: u64,
    pub last_failure: Option<String>,
    pub written_back_bytes: u64,
    pub flushes: u64,
}

impl<E: Environment> BackingHealth<E> {
    pub(crate) fn new() -> Self {
        Self {
            stalled: SharedBool::new(false),
            trouble: Mutex::<E, _>::new(None),
            failures: AtomicU64::new(0),
            last_failure: Mutex::<E, _>::new(None),
            written_back: SharedU64::new(0),
            flushes: SharedU64::new(0),
        }
    }

    /// Counts `bytes` that the backing device has accepted.
    pub(crate) fn count_written(&self, bytes: u64) {
        self.written_back.fetch_add(bytes, Ordering::SeqCst);
    }

    /// Bytes that the backing device has accepted.
    pub(crate) fn written_back_bytes(&self) -> u64 {
        self.written_back.load(Ordering::SeqCst)
    }

    /// Counts a flush of the backing device.
    pub(crate) fn count_flush(&self) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
    }

    /// Records a failed attempt. The first one since the last success dates the trouble.
    pub(crate) fn note_failure(&self, environment: &E, error: &Error) {
        crate::rare::count(&self.failures);
        *self.last_failure.lock() = Some(error.line());
        let mut trouble = self.trouble.lock();
        let since_wall_ms =
            trouble.as_ref().map_or_else(|| environment.wall_ms(), |trouble| trouble.since_wall_ms);
        let attempts = trouble.as_ref().map_or(0, |trouble| trouble.attempts) + 1;
        *trouble = Some(BackingTrouble { error: error.line(), since_wall_ms, attempts });
    }

    /// Whether the backing device has failed since its last success.
    pub(crate) fn is_in_trouble(&self) -> bool {
        self.trouble.lock().is_some()
    }

    /// The backing device accepts writes again.
    pub(crate) fn end_trouble(&self) {
        *self.trouble.lock() = None;
    }

    /// Sets whether requests without space fail from now on, or wait. Returns true if failing begins: the caller must wake the
    /// requests that wait.
    pub(crate) fn set_stalled(&self, stalled: bool) -> bool {
        // Requests without space read the flag: it is stored only if it changes.
        self.stalled.load(Ordering::SeqCst) != stalled
            && self.stalled.swap(stalled, Ordering::SeqCst) != stalled
            && stalled
    }

    /// # Errors
    /// [`ErrorKind::Backing`] while the backing device has refused writes for longer than the settings allow. For requests that
    /// were just put on the wait list: requests on the list when failing begins are woken.
    pub(crate) fn check_not_stalled(&self) -> Result<()> {
        if self.stalled.load(Ordering::SeqCst) {
            let cause = self.trouble.lock().as_ref().map(|trouble| trouble.error.clone()).unwrap_or_default();
            return Err(Error::new(
                ErrorKind::Backing,
                format!(
                    "the cache is full, and the backing device has refused writes for long ({cause}): put it right, or set on_write_error to park"
                ),
            ));
        }
        Ok(())
    }

    /// For status.
    pub(crate) fn report(&self) -> BackingReport {
        BackingReport {
            is_stalled: self.stalled.load(Ordering::Relaxed),
            trouble: self.trouble.lock().clone(),
            failures: self.failures.load(Ordering::Relaxed),
            last_failure: self.last_failure.lock().clone(),
            written_back_bytes: self.written_back_bytes(),
            flushes: self.flushes.load(Ordering::Relaxed),
        }
    }
}

#[cfg(test)]
mod tests;
