//! Waits of requests for the lock of a lane.
//!
//! Invariants: only a request that has found a lane locked counts here, so an uncontended lock costs nothing. Nothing depends on
//! the counters, so a model that schedules threads need not know them.

use core::sync::atomic::{AtomicU64, Ordering};

/// The waits of a cache's requests for its lanes.
#[derive(Default)]
pub(crate) struct LaneWaits {
    count: AtomicU64,
    total_ns: AtomicU64,
}

impl LaneWaits {
    /// Counts a wait of so many nanoseconds.
    pub(crate) fn count(&self, ns: u64) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.total_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// The number of waits, and the sum of their nanoseconds.
    pub(crate) fn read(&self) -> (u64, u64) {
        (self.count.load(Ordering::Relaxed), self.total_ns.load(Ordering::Relaxed))
    }
}
