//! The figures of backends for the status: what their queues have counted, and the times that follow from it.
//!
//! Invariants: a [`Trend`] holds a bounded number of samples; it is sampled once a second.
//!
//! Elsewhere: counting (`cbd-device`, `cbd-backing`), percentiles (`crate::api`).

use crate::api::{DiskFigures, DiskOrigin, OperationFigures, Outcome, RequestSample, Wait};
use cbd_device::{Counted, Sampled};
use cbd_engine::{CacheStatus, PaceReason};
use cbd_pmem::Mapping;
use cbd_remote::RemoteDevice;
use cbd_runtime::sampled::{Moment, Moments, earlier::Earlier};
use cbd_runtime::{ProcessEnvironment, RunningBackend, ServedDevice};
use cbd_types::{BackendId, Operation};
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Samples of a trend: those of some five seconds.
const SAMPLES: usize = 6;
/// A cache that holds less than this part of its size has begun empty, as far as advice is concerned.
const EMPTY_PART: u32 = 8;
/// A shorter time says nothing about a rate.
const SHORTEST: Duration = Duration::from_millis(900);

const fn name(operation: Operation) -> &'static str {
    match operation {
        Operation::Read => "read",
        Operation::Write => "write",
        Operation::Flush => "flush",
        Operation::Discard => "discard",
        Operation::WriteZeroes => "write_zeroes",
    }
}

/// The requests of the clients of a block device, or of all on a backend, by operation. Outcomes that have not occurred are absent.
pub(super) fn operations(device: &ServedDevice<ProcessEnvironment>) -> BTreeMap<String, OperationFigures> {
    let figures = device.figures();
    let of_operation = |(operation, counted): (Operation, &cbd_device::OperationFigures)| {
        let total = counted.total();
        let outcomes = counted.outcomes().filter(|(_, counted)| counted.count > 0 || counted.sum > 0);
        let outcomes = outcomes.map(|(outcome, counted)| {
            let name = outcome.name(operation).into_owned();
            (name, Outcome { requests: counted.count, bytes: counted.sum })
        });
        let figures = OperationFigures {
            requests: total.count + counted.failed,
            bytes: total.sum,
            failed: counted.failed,
            outcomes: outcomes.collect(),
            latency: (&counted.latency).into(),
        };
        (name(operation).to_owned(), figures)
    };
    figures.operations().map(of_operation).collect()
}

/// The requests of the clients of a block device on a backend of another host, by operation.
pub(super) fn remote_operations(device: &RemoteDevice<Mapping>) -> BTreeMap<String, OperationFigures> {
    let of_operation = |(operation, counted): (Operation, cbd_remote::OperationFigures)| {
        let cbd_remote::OperationFigures { succeeded, bytes, failed, latency } = counted;
        let outcome = (succeeded > 0).then(|| ("remote".to_owned(), Outcome { requests: succeeded, bytes }));
        let figures = OperationFigures {
            requests: succeeded + failed,
            bytes,
            failed,
            outcomes: outcome.into_iter().collect(),
            latency: (&latency).into(),
        };
        (name(operation).to_owned(), figures)
    };
    device.figures().into_iter().map(of_operation).collect()
}

/// The operations of the backing device, by name.
pub(super) fn disk(run: &RunningBackend) -> BTreeMap<String, DiskFigures> {
    let figures = |ended: cbd_backing::Ended| {
        let origins = ended.origins().filter(|(_, of)| of.operations > 0);
        let origins = origins.map(|(origin, of)| {
            (origin.name().to_owned(), DiskOrigin { operations: of.operations, bytes: of.bytes })
        });
        DiskFigures {
            operations: ended.operations,
            bytes: ended.bytes,
            failed: ended.failed,
            origins: origins.collect(),
            latency: (&ended.latency).into(),
        }
    };
    run.ended_operations().into_iter().map(|(name, ended)| (name.to_owned(), figures(ended))).collect()
}

/// What requests have waited for.
pub(super) fn waits(run: &RunningBackend, status: Option<&CacheStatus>) -> BTreeMap<String, Wait> {
    let figures = run.device().figures();
    let of_queues = figures.waits().map(|(what, counted)| {
        (what.name().to_owned(), Wait { count: counted.count, total_ns: counted.sum })
    });
    let of_lanes = status.map(|status| {
        ("lane".to_owned(), Wait { count: status.lane_waits, total_ns: status.lane_waited_ns })
    });
    of_queues.chain(of_lanes).collect()
}

/// What clients have read by now.
fn moment(run: &RunningBackend, status: &CacheStatus) -> Moment {
    let sampled = run.device().sampled_count();
    let figures = run.device().figures();
    let read_bytes = figures.of(Operation::Read).map_or(0, |read| read.total().sum);
    Moment { sampled, read_bytes, hit_bytes: status.read_hit_bytes }
}

/// The reads and writes of a backend.
fn totals(run: &RunningBackend) -> Counted {
    let figures = run.device().figures();
    let mut both = Counted::default();
    for counted in
        [Operation::Read, Operation::Write].into_iter().filter_map(|operation| figures.of(operation))
    {
        let total = counted.total();
        (both.count, both.sum) = (both.count + total.count, both.sum + total.sum);
    }
    both
}

/// What a trend needs of the status of a cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    dirty_bytes: u64,
    capacity: u64,
}

impl From<&CacheStatus> for Seen {
    fn from(status: &CacheStatus) -> Self {
        Self { dirty_bytes: status.dirty_bytes, capacity: status.capacity }
    }
}

/// A trend that the placeholder of a backend shares with it.
pub(super) type SharedTrend = Arc<Mutex<Trend>>;

/// The dirty data of a cache in the last seconds, and what the sample of its requests does not keep.
#[derive(Default, Debug)]
pub(super) struct Trend {
    dirty: VecDeque<(Instant, u64)>,
    moments: Moments,
    earlier: Earlier,
}

impl Trend {
    /// Notes the present state.
    pub(super) fn sample(&mut self, seen: &Seen, now: Instant) {
        if self.dirty.len() == SAMPLES {
            self.dirty.pop_front();
        }
        self.dirty.push_back((now, seen.dirty_bytes));
    }

    /// Notes what clients have read, and lets the device note a sample for a cache of this size.
    pub(super) fn note_reads(&mut self, run: &RunningBackend, status: &CacheStatus) {
        let device = run.device();
        device.sample_for(status.capacity);
        let now = moment(run, status);
        self.moments.note(now);
        // Each lane has a segment to write to from the beginning.
        let used = status.segments.saturating_sub(status.free_segments);
        let is_empty = used <= status.lanes + status.segments / EMPTY_PART;
        self.earlier.take(now.sampled, is_empty, |numbers, each| device.visit_sampled(numbers, each));
    }

    /// The sample of the requests of a backend.
    pub(super) fn request_sample(
        &self,
        id: BackendId,
        run: &RunningBackend,
        status: &CacheStatus,
    ) -> RequestSample {
        let last = run.device().last_sampled(self.earlier.end());
        let (count, now) = (last.requests.len() as u64, moment(run, status));
        // Without a moment in the second half nothing counts.
        let from = self.moments.behind_middle(last.first, last.first + count);
        let from = from.unwrap_or(Moment { sampled: last.first + count, ..now });
        let (total, since) = (totals(run), now.since(from));
        RequestSample {
            backend_id: id.0,
            one_of: last.one_of,
            earlier_groups: self.earlier.requests().map(|request| request.group).collect(),
            earlier_writes: self.earlier.requests().map(|request| request.is_write).collect(),
            earlier_is_all: self.earlier.is_all(),
            period_ms: Sampled::PERIOD_MS,
            times_ms: last.requests.iter().map(|request| request.ms).collect(),
            writes: last.requests.iter().map(|request| request.is_write).collect(),
            groups: last.requests.iter().map(|request| request.group).collect(),
            counted_from: from.sampled - last.first,
            read_bytes: since.read_bytes,
            hit_bytes: since.hit_bytes,
            request_bytes: total.sum / total.count.max(1),
        }
    }

    /// Seconds until the cache is full of dirty data, if it goes on as in the last seconds.
    pub(super) fn time_to_full_s(&self, seen: &Seen, now: Instant) -> Option<u64> {
        let (since, before) = self.dirty.front()?;
        let elapsed = now.saturating_duration_since(*since);
        let grown = seen.dirty_bytes.saturating_sub(*before);
        if elapsed < SHORTEST || grown == 0 {
            return None;
        }
        let free = u128::from(seen.capacity.saturating_sub(seen.dirty_bytes));
        u64::try_from(free * elapsed.as_millis() / u128::from(grown) / 1000).ok()
    }
}

/// Seconds until nothing is dirty, if writeback goes on as at present and no client writes. What is parked stays dirty.
pub(super) fn time_to_empty_s(status: &CacheStatus) -> Option<u64> {
    match status.dirty_bytes.saturating_sub(status.parked_bytes) {
        0 => Some(0),
        // The rate is that of the last seconds.
        _ if status.pace.reason == PaceReason::Paused => None,
        dirty => dirty.checked_div(status.pace.rate),
    }
}

#[cfg(test)]
mod tests;
