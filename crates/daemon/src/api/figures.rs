//! Figures of the status: requests by outcome, histograms of durations, waits.
//!
//! Whoever shows a percentile, a ratio or a difference of two states takes it from here, so that all of them agree.
//!
//! Invariants: counters begin at 0 when the backend is opened and never decrease while it is served.
//!
//! Elsewhere: how they are counted (`cbd-device`, `cbd-backing`).

use cbd_types::figures::{HistogramCounts, bucket_of, shortest_of};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A bucket of a histogram.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Bucket {
    /// The exclusive upper bound of the durations in it, in nanoseconds. It is an eighth of a power of two above the lower
    /// bound. The bucket with the bound 2^40 has all longer durations, too.
    pub upper_ns: u64,
    /// Durations in it.
    pub count: u64,
}

/// Durations, counted in buckets of an eighth of a power of two.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Histogram {
    /// Number of durations.
    pub count: u64,
    /// Their sum in nanoseconds.
    pub sum_ns: u64,
    /// The buckets that are not empty, the shortest durations first.
    pub buckets: Vec<Bucket>,
}

impl From<&HistogramCounts> for Histogram {
    fn from(counts: &HistogramCounts) -> Self {
        let counted = counts.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
        let buckets: Vec<Bucket> =
            counted.map(|(bucket, &count)| Bucket { upper_ns: shortest_of(bucket + 1), count }).collect();
        Self { count: buckets.iter().map(|bucket| bucket.count).sum(), sum_ns: counts.sum_ns, buckets }
    }
}

impl Histogram {
    /// The duration in nanoseconds that the share `q`, 0 to 1, of all durations does not exceed, within a sixteenth: the
    /// middle of its bucket. `None` if no duration was counted.
    #[must_use]
    pub fn percentile(&self, q: f64) -> Option<u64> {
        #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let rank = ((q.clamp(0.0, 1.0) * self.count as f64).ceil() as u64).max(1);
        let mut counted = 0_u64;
        let found = self.buckets.iter().find(|bucket| {
            counted = counted.saturating_add(bucket.count);
            counted >= rank
        });
        found.or(self.buckets.last()).map(|bucket| {
            let last = bucket.upper_ns.saturating_sub(1);
            u64::midpoint(shortest_of(bucket_of(last)), last)
        })
    }

    /// The mean in nanoseconds; `None` if no duration was counted.
    #[must_use]
    pub const fn mean(&self) -> Option<u64> {
        self.sum_ns.checked_div(self.count)
    }

    /// Adds the durations of another histogram.
    pub fn merge(&mut self, other: &Self) {
        self.combine(other, u64::saturating_add);
    }

    /// What was counted since `earlier`, a former state of the same histogram. If it was not, because the daemon has begun
    /// again meanwhile, a bucket that has fewer than then is empty.
    #[must_use]
    pub fn minus(&self, earlier: &Self) -> Self {
        let mut since = self.clone();
        since.combine(earlier, u64::saturating_sub);
        since
    }

    fn combine(&mut self, other: &Self, with: fn(u64, u64) -> u64) {
        let mut counts: BTreeMap<u64, u64> =
            self.buckets.iter().map(|bucket| (bucket.upper_ns, bucket.count)).collect();
        for bucket in &other.buckets {
            let count = counts.entry(bucket.upper_ns).or_default();
            *count = with(*count, bucket.count);
        }
        self.buckets = counts
            .into_iter()
            .filter(|&(_, count)| count > 0)
            .map(|(upper_ns, count)| Bucket { upper_ns, count })
            .collect();
        self.count = self.buckets.iter().map(|bucket| bucket.count).sum();
        self.sum_ns = with(self.sum_ns, other.sum_ns);
    }
}

/// Requests with the same outcome.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Outcome {
    /// Requests. One that has several outcomes is counted with the one that took it to the disk.
    pub requests: u64,
    /// Bytes, each with its own outcome.
    pub bytes: u64,
}

/// The requests of clients with the same operation.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct OperationFigures {
    /// Requests that have ended, failed ones included.
    pub requests: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Those that succeeded, by outcome: of reads `hit`, `miss` and `past-` with the reason; of changes `cached` and `past-`
    /// with the reason; of flushes `cached` and `disk`, if the disk was flushed; `uncached` without a cache; `remote` of a block device
    /// on a backend of another host.
    pub outcomes: BTreeMap<String, Outcome>,
    /// The latency of those that succeeded. Not all that end at once are timed, and one that is counts for those before it: the
    /// count may be smaller by up to 1023 for each queue.
    pub latency: Histogram,
}

impl OperationFigures {
    /// The share of the bytes that had this outcome, 0 to 1; `None` if there were none.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub fn share_of(&self, outcome: &str) -> Option<f64> {
        let bytes = self.outcomes.get(outcome).map_or(0, |outcome| outcome.bytes);
        (self.bytes > 0).then(|| bytes as f64 / self.bytes as f64)
    }

    /// Adds the figures of another device.
    pub fn merge(&mut self, other: &Self) {
        self.combine(other, u64::saturating_add);
        self.latency.merge(&other.latency);
    }

    /// What was counted since `earlier`; see [`Histogram::minus`].
    #[must_use]
    pub fn minus(&self, earlier: &Self) -> Self {
        let mut since = self.clone();
        since.combine(earlier, u64::saturating_sub);
        since.latency = self.latency.minus(&earlier.latency);
        since
    }

    fn combine(&mut self, other: &Self, with: fn(u64, u64) -> u64) {
        self.requests = with(self.requests, other.requests);
        self.bytes = with(self.bytes, other.bytes);
        self.failed = with(self.failed, other.failed);
        for (name, other) in &other.outcomes {
            let outcome = self.outcomes.entry(name.clone()).or_default();
            outcome.requests = with(outcome.requests, other.requests);
            outcome.bytes = with(outcome.bytes, other.bytes);
        }
    }
}

/// Operations of the disk with the same name and the same origin.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DiskOrigin {
    /// Operations that have ended, failed ones included.
    pub operations: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
}

/// The operations of the disk with the same name, those of clients, of writeback and of scrubs together.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DiskFigures {
    /// Operations that have ended, failed ones included.
    pub operations: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
    /// Operations that failed.
    pub failed: u64,
    /// The same operations by origin, those that have occurred: `client`, a read that missed or what went past the cache;
    /// `readahead`; `writeback`; `verify`, a scrub or a verification.
    #[serde(default)]
    pub origins: BTreeMap<String, DiskOrigin>,
    /// Time from the submission of each to its end, as the submitting thread saw it.
    pub latency: Histogram,
}

impl DiskFigures {
    /// Adds the figures of another operation or disk.
    pub fn merge(&mut self, other: &Self) {
        self.combine(other, u64::saturating_add);
        self.latency.merge(&other.latency);
    }

    /// What was counted since `earlier`; see [`Histogram::minus`].
    #[must_use]
    pub fn minus(&self, earlier: &Self) -> Self {
        let mut since = self.clone();
        since.combine(earlier, u64::saturating_sub);
        since.latency = self.latency.minus(&earlier.latency);
        since
    }

    fn combine(&mut self, other: &Self, with: fn(u64, u64) -> u64) {
        self.operations = with(self.operations, other.operations);
        self.bytes = with(self.bytes, other.bytes);
        self.failed = with(self.failed, other.failed);
        for (name, other) in &other.origins {
            let origin = self.origins.entry(name.clone()).or_default();
            origin.operations = with(origin.operations, other.operations);
            origin.bytes = with(origin.bytes, other.bytes);
        }
    }
}

/// Waits of requests for the same thing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Wait {
    /// Waits that have ended.
    pub count: u64,
    /// Their time in nanoseconds.
    pub total_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_types::figures::Histogram as Cells;

    fn of(durations: impl IntoIterator<Item = u64>) -> Histogram {
        let (cells, mut counts) = (Cells::default(), HistogramCounts::default());
        durations.into_iter().for_each(|ns| cells.count(ns, 1));
        cells.read(&mut counts);
        Histogram::from(&counts)
    }

    #[test]
    fn a_percentile_is_within_an_eighth() {
        assert_eq!(Histogram::default().percentile(0.5), None);
        let histogram = of((1..=100_000).map(|number| number * 17));
        for (q, exact) in [(0.0, 17), (0.5, 850_000), (0.99, 1_683_000), (0.999, 1_698_300), (1.0, 1_700_000)]
        {
            let found = histogram.percentile(q).unwrap();
            assert!(found.abs_diff(exact) * 8 <= exact, "{q}: {found} instead of {exact}");
        }
        assert_eq!(histogram.mean(), Some(17 * 50_000 + 8));
    }

    #[test]
    fn a_difference_has_what_came_after() {
        let earlier = of([100, 100, 5000]);
        let mut later = earlier.clone();
        let since = of([100, 900_000]);
        later.merge(&since);
        assert_eq!(later.count, 5);
        assert_eq!(later.minus(&earlier), since);
        assert_eq!(earlier.minus(&later), Histogram::default(), "a daemon that has begun again");
    }
}
