//! How often ranges were parked and tried again: for status, and for reclaim.
//!
//! Invariants: both totals only rise.

use crate::{Environment, Mutex, sync::SharedU64};
use alloc::string::String;
use cbd_types::Error;
use core::sync::atomic::Ordering;

/// What is counted of parking.
pub(crate) struct ParkedCounters<E: Environment> {
    parked: SharedU64<E>,
    unparked: SharedU64<E>,
    /// How often what is parked was tried again.
    attempts: SharedU64<E>,
    /// The error of the last attempt, while something is parked.
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

    /// Counts a range that the backing device has taken.
    pub(crate) fn count_unparked(&self) {
        self.unparked.fetch_add(1, Ordering::Relaxed);
    }

    /// Ranges that the backing device has taken since the cache was opened.
    pub(crate) fn unparked(&self) -> u64 {
        self.unparked.load(Ordering::Relaxed)
    }

    /// Counts an attempt.
    pub(crate) fn count_attempt(&self) {
        self.attempts.fetch_add(1, Ordering::Relaxed);
    }

    /// What is parked was refused again.
    pub(crate) fn note_refusal(&self, error: &Error) {
        *self.error.lock() = Some(error.line());
    }

    /// Nothing is parked any more.
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
