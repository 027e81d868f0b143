//! Histograms of durations: the buckets, and the cells in which one thread counts while others read.
//!
//! A bucket is an eighth of a power of two of nanoseconds, so that a duration is known within an eighth of itself. Below 8 ns
//! each nanosecond has a bucket.
//!
//! Invariants: one thread writes a [`Histogram`], with plain loads and stores; a cell never decreases; readers see each cell
//! at some moment of the past, not all at the same one.
//!
//! Elsewhere: what is counted (`cbd-device`, `cbd-backing`), percentiles (the control interface).

use alloc::{boxed::Box, vec::Vec};
use core::sync::atomic::{AtomicU64, Ordering};

/// Bits of a duration that are kept below its highest one.
const BITS: u32 = 3;
/// Durations from 2 to the power of this on, in nanoseconds, are counted in the last bucket: 18 minutes.
const LONGEST: u32 = 40;
/// Number of buckets of a histogram.
pub const BUCKETS: usize = ((LONGEST - BITS + 1) << BITS) as usize;

/// The bucket of a duration in nanoseconds.
#[inline]
#[must_use]
pub const fn bucket_of(ns: u64) -> usize {
    if ns < 1 << BITS {
        return ns as usize;
    }
    let octave = ns.ilog2() - BITS;
    let bucket = ((octave as usize) << BITS) + (ns >> octave) as usize;
    if bucket < BUCKETS { bucket } else { BUCKETS - 1 }
}

/// The shortest duration of a bucket in nanoseconds. That of the bucket after the last one is the bound of the last one.
#[must_use]
pub const fn shortest_of(bucket: usize) -> u64 {
    if bucket < 1 << BITS {
        return bucket as u64;
    }
    let octave = (bucket >> BITS) as u32 - 1;
    ((bucket as u64 & ((1 << BITS) - 1)) | (1 << BITS)) << octave
}

/// Adds to a counter that no other thread writes.
#[inline]
pub fn add(cell: &AtomicU64, amount: u64) {
    cell.store(cell.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
}

/// The cells of a histogram: the sum in nanoseconds, then the buckets.
#[derive(Debug)]
pub struct Histogram(Box<[AtomicU64]>);

impl Default for Histogram {
    fn default() -> Self {
        Self((0..=BUCKETS).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Histogram {
    /// Counts `weight` durations of `ns` nanoseconds. Called by one thread alone.
    #[inline]
    pub fn count(&self, ns: u64, weight: u64) {
        add(&self.0[0], ns.saturating_mul(weight));
        add(&self.0[1 + bucket_of(ns)], weight);
    }

    /// Adds all that is counted in `other`. Called by one thread alone.
    pub fn add(&self, other: &Self) {
        for (cell, other) in self.0.iter().zip(&other.0) {
            add(cell, other.load(Ordering::Relaxed));
        }
    }

    /// Adds what is counted to `counts`.
    pub fn read(&self, counts: &mut HistogramCounts) {
        counts.sum_ns = counts.sum_ns.wrapping_add(self.0[0].load(Ordering::Relaxed));
        counts.buckets.resize(BUCKETS, 0);
        for (count, cell) in counts.buckets.iter_mut().zip(&self.0[1..]) {
            *count += cell.load(Ordering::Relaxed);
        }
    }
}

/// What histograms have counted.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct HistogramCounts {
    /// The sum of all durations in nanoseconds.
    pub sum_ns: u64,
    /// The number of durations in each bucket, [`BUCKETS`] of them; empty if no histogram was read.
    pub buckets: Vec<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_duration_is_within_its_bucket_and_known_within_an_eighth() {
        let mut last = 0;
        for ns in
            (0..4096).chain((12..LONGEST).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) * 9 / 8 - 1]))
        {
            let bucket = bucket_of(ns);
            let (shortest, bound) = (shortest_of(bucket), shortest_of(bucket + 1));
            assert!(shortest <= ns && ns < bound, "{ns} is in {shortest}..{bound}");
            assert!(bound - shortest <= (shortest / 8).max(1), "{shortest}..{bound} is wider than an eighth");
            assert!(bucket >= last, "{ns} is in an earlier bucket than what is shorter");
            last = bucket;
        }
        assert_eq!(bucket_of((1 << LONGEST) - 1), BUCKETS - 1);
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert_eq!(shortest_of(BUCKETS), 1 << LONGEST);
    }

    #[test]
    fn histograms_add_up() {
        let (first, second) = (Histogram::default(), Histogram::default());
        first.count(100, 3);
        second.count(100, 1);
        second.count(5_000_000, 2);
        first.add(&second);
        let mut counts = HistogramCounts::default();
        first.read(&mut counts);
        assert_eq!(counts.sum_ns, 10_000_400);
        assert_eq!(counts.buckets.iter().sum::<u64>(), 6);
        assert_eq!(counts.buckets[bucket_of(100)], 4);
    }
}
