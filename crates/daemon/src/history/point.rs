//! A point of a history: what happened in a second or in a minute, in few bytes.
//!
//! Invariants: a value that is not known is marked, and never 0. Bytes of requests are exact: they are whole sectors. A
//! percentile is the bucket of its histogram, so it is the same number that the status would give for this interval.

use cbd_types::SECTOR;
use cbd_types::figures::{bucket_of, shortest_of};

/// How the seconds of a minute become one value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fold {
    Sum,
    Max,
}

/// A value of a point that is a number.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// Its name in answers, the unit last.
    pub name: &'static str,
    /// What it counts in.
    unit: u64,
    pub(super) fold: Fold,
}

const fn sum(name: &'static str, unit: u64) -> Column {
    Column { name, unit, fold: Fold::Sum }
}

/// What gauges of bytes count in.
const BLOCK: u64 = 4096;

/// How many values are numbers.
pub(super) const NUMBERS: usize = 11;
/// How many are latencies.
pub(super) const DURATIONS: usize = 6;

/// The values that are numbers: those of requests are totals of the interval, the others the largest of it.
pub const COLUMNS: [Column; NUMBERS] = [
    sum("reads", 1),
    sum("writes", 1),
    sum("failed", 1),
    sum("read_bytes", SECTOR),
    sum("written_bytes", SECTOR),
    sum("read_hit_bytes", SECTOR),
    sum("disk_read_bytes", SECTOR),
    sum("disk_written_bytes", SECTOR),
    sum("written_back_bytes", SECTOR),
    Column { name: "dirty_bytes", unit: BLOCK, fold: Fold::Max },
    Column { name: "recovery_point_age_ms", unit: 1, fold: Fold::Max },
];

/// The values that are latencies.
pub const LATENCIES: [&str; DURATIONS] =
    ["read_p50_ns", "read_p99_ns", "read_p999_ns", "write_p50_ns", "write_p99_ns", "write_p999_ns"];

/// The values of a point by name.
pub type Values = std::collections::BTreeMap<&'static str, Option<u64>>;

/// What is not known.
const UNKNOWN: u32 = u32::MAX;
/// The largest number.
const LARGEST: u64 = UNKNOWN as u64 - 1;
/// No latency was counted.
const NONE: u16 = u16::MAX;

/// A point; the default is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Point {
    /// The number of its second or minute, from 1 on.
    pub(super) tick: u32,
    /// The time that was sampled in it, in milliseconds.
    span_ms: u32,
    numbers: [u32; NUMBERS],
    latencies: [u16; DURATIONS],
}

impl Point {
    pub(super) fn new(
        tick: u32,
        span_ms: u64,
        numbers: &[Option<u64>; NUMBERS],
        latencies_ns: &[Option<u64>; DURATIONS],
    ) -> Self {
        let number = |(value, column): (&Option<u64>, Column)| {
            // Both are below 2^32.
            value.map_or(UNKNOWN, |value| (value.div_ceil(column.unit)).min(LARGEST) as u32)
        };
        let mut point = Self { tick, span_ms: span_ms.min(LARGEST) as u32, ..Self::default() };
        for (kept, given) in point.numbers.iter_mut().zip(numbers.iter().zip(COLUMNS)) {
            *kept = number(given);
        }
        for (kept, given) in point.latencies.iter_mut().zip(latencies_ns) {
            *kept = given.map_or(NONE, |ns| bucket_of(ns) as u16);
        }
        point
    }

    /// The time that was sampled in it, in milliseconds.
    pub(super) const fn span_ms(&self) -> u64 {
        self.span_ms as u64
    }

    /// The value of a column.
    pub(super) fn number(&self, column: usize) -> Option<u64> {
        let (kept, unit) = (self.numbers[column], COLUMNS[column].unit);
        (kept != UNKNOWN).then(|| u64::from(kept) * unit)
    }

    /// A latency in nanoseconds: the middle of its bucket, as [`crate::api::Histogram::percentile`] has it.
    pub(super) fn latency_ns(&self, column: usize) -> Option<u64> {
        let bucket = usize::from(self.latencies[column]);
        (self.latencies[column] != NONE)
            .then(|| u64::midpoint(shortest_of(bucket), shortest_of(bucket + 1).saturating_sub(1)))
    }

    /// All values by name.
    pub(super) fn values(&self) -> Values {
        let numbers = COLUMNS.iter().enumerate().map(|(at, column)| (column.name, self.number(at)));
        let latencies = LATENCIES.iter().enumerate().map(|(at, name)| (*name, self.latency_ns(at)));
        numbers.chain(latencies).chain([("span_ms", Some(self.span_ms()))]).collect()
    }
}
