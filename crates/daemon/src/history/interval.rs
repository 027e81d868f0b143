//! What happened to a backend between two samples, or in a minute of them.
//!
//! Invariants: percentiles of a minute come from the durations of all its seconds, not from their percentiles.

use super::point::{COLUMNS, DURATIONS, Fold, NUMBERS, Point};
use crate::api::{BackendStatus, DiskFigures, Histogram, OperationFigures, have_fallen, since};
use std::collections::BTreeMap;
use std::time::Duration;

/// The counters of a backend in a sample.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    is_served: bool,
    /// Empty until a client has opened a block device; `None` where there is none and was none.
    operations: Option<BTreeMap<String, OperationFigures>>,
    disk: BTreeMap<String, DiskFigures>,
    written_back_bytes: Option<u64>,
}

impl From<&BackendStatus> for Seen {
    fn from(backend: &BackendStatus) -> Self {
        Self {
            is_served: backend.info.alive,
            operations: (!backend.info.blkdevs.is_empty() || !backend.operations.is_empty())
                .then(|| backend.operations.clone()),
            disk: backend.disk.clone(),
            written_back_bytes: backend.cache.as_ref().map(|cache| cache.written_back_bytes),
        }
    }
}

impl Seen {
    /// Whether the counters go on from those of `earlier`.
    fn follows(&self, earlier: &Self) -> bool {
        let operations = earlier.operations.as_ref().zip(self.operations.as_ref());
        self.is_served
            && earlier.is_served
            && !operations.is_some_and(|(earlier, now)| have_fallen(earlier, now))
            && !have_fallen(&earlier.disk, &self.disk)
            && earlier.written_back_bytes.unwrap_or(0) <= self.written_back_bytes.unwrap_or(0)
    }
}

/// The histograms of an interval: reads and writes of clients.
type Histograms = [Histogram; 2];

/// Which histogram, and the share, of each latency of a point.
const PERCENTILES: [(usize, f64); DURATIONS] =
    [(0, 0.5), (0, 0.99), (0, 0.999), (1, 0.5), (1, 0.99), (1, 0.999)];

/// What happened in an interval, and the state at its end.
#[derive(Clone, Debug, Default)]
pub(super) struct Interval {
    span_ms: u64,
    numbers: [Option<u64>; NUMBERS],
    histograms: Histograms,
}

impl Interval {
    /// What happened from `before` to `now`, which is that of `backend`.
    pub(super) fn between(before: &Seen, now: &Seen, backend: &BackendStatus, span: Duration) -> Self {
        let mut numbers = [None; NUMBERS];
        let mut histograms = Histograms::default();
        let mut set = |name: &str, value: Option<u64>| {
            if let Some(at) = COLUMNS.iter().position(|column| column.name == name) {
                numbers[at] = value;
            }
        };
        if now.follows(before) {
            if let (Some(before), Some(now)) = (&before.operations, &now.operations) {
                let done = since(before, now);
                let [reads, writes] =
                    ["read", "write"].map(|name| done.get(name).cloned().unwrap_or_default());
                set("reads", Some(reads.requests));
                set("writes", Some(writes.requests));
                set("failed", Some(done.values().map(|it| it.failed).sum()));
                set("read_bytes", Some(reads.bytes));
                set("written_bytes", Some(writes.bytes));
                set("read_hit_bytes", Some(reads.outcomes.get("hit").map_or(0, |hit| hit.bytes)));
                (histograms[0], histograms[1]) = (reads.latency, writes.latency);
            }
            let disk = since(&before.disk, &now.disk);
            let [reads, writes] = ["read", "write"].map(|name| disk.get(name).cloned().unwrap_or_default());
            set("disk_read_bytes", Some(reads.bytes));
            set("disk_written_bytes", Some(writes.bytes));
            let written_back = now.written_back_bytes.zip(before.written_back_bytes);
            set("written_back_bytes", written_back.map(|(now, before)| now - before));
        }
        set("dirty_bytes", backend.cache.as_ref().map(|cache| cache.dirty_bytes));
        set("recovery_point_age_ms", backend.recovery_point_age_ms);
        Self { span_ms: u64::try_from(span.as_millis()).unwrap_or(u64::MAX), numbers, histograms }
    }

    /// Adds the interval after this one.
    pub(super) fn add(&mut self, later: &Self) {
        self.span_ms = self.span_ms.saturating_add(later.span_ms);
        for ((value, later), column) in self.numbers.iter_mut().zip(&later.numbers).zip(COLUMNS) {
            *value = match (column.fold, *value, *later) {
                (Fold::Sum, Some(value), Some(later)) => Some(value.saturating_add(later)),
                (Fold::Max, Some(value), Some(later)) => Some(value.max(later)),
                (_, value, later) => value.or(later),
            };
        }
        for (histogram, later) in self.histograms.iter_mut().zip(&later.histograms) {
            if later.count > 0 {
                histogram.merge(later);
            }
        }
    }

    pub(super) fn point(&self, tick: u32) -> Point {
        let latencies = PERCENTILES.map(|(of, share)| self.histograms[of].percentile(share));
        Point::new(tick, self.span_ms, &self.numbers, &latencies)
    }
}
