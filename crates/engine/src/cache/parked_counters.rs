//! Counts how often ranges were parked and retried: for status, and for reclaim.
//!
//! Invariants: both totals only rise.

use crate::{Environment, Mutex, sync::SharedU64};
use alloc::string::String;
use cbd_types::Error;
use core::sync::atomic::Ordering;

/// The counters of parking.
pub(crate) struct ParkedCounters<E: Environment> {
    parked: SharedU64<E>,
    unparked: SharedU64<E>,
    /// How often parked ranges were retried.
    attempts: SharedU64<E>,
    /// The error of the last retry, while a range is parked.
    error: Mutex<E, Option<String>>,
}

/// The same for status.
#[derive(Debug)]
pub(crate) struct ParkedReport {
    pub parked: u64,
    pub unparked: u64,
    pub attempts: u64,
    pub error: Option<String>,
}

impl<E: Environment> ParkedCounters<E> {
    pub(crate) fn new() -> Self {
        Self {
            parked: SharedU64::new(0),
            unparked: SharedU64::new(0),
            attempts: SharedU64::new(0),
            error: Mutex::<E, _>::new(None),
        }
    }

    /// Counts a range that was parked.
    pub(crate) fn count_parked(&self) {
        self.parked.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a parked range that the backing device has accepted.
    pub(crate) fn count_unparked(&self) {
        self.unparked.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of parked ranges that the backing device has accepted since the cache was opened.
    pub(crate) fn unparked(&self) -> u64 {
        self.unparked.load(Ordering::Relaxed)
    }

    /// Counts a retry.
    pub(crate) fn count_attempt(&self) {
        self.attempts.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that the backing device has refused a parked range again.
    pub(crate) fn note_refusal(&self, error: &Error) {
        *self.error.lock() = Some(error.line());
    }

    /// Drops the error: no range is parked any more.
    pub(crate) fn forget_refusal(&self) {
        *self.error.lock() = None;
    }

    /// For status.
    pub(crate) fn report(&self) -> ParkedReport {
        ParkedReport {
            parked: self.parked.load(Ordering::Relaxed),
            unparked: self.unparked.load(Ordering::Relaxed),
            attempts: self.attempts.load(Ordering::Relaxed),
            error: self.error.lock().clone(),
        }
    }
}

#[cfg(test)]
mod tests;
