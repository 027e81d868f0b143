//! What a device has counted of its requests, by operation: from the call that submitted one until its completion was seen here.
//!
//! Invariants: a request is counted once, when it ends; no counter decreases; whoever counts has the lock of the channel.
//!
//! Elsewhere: the buckets of latencies (`cbd-types`), the names of operations (`cbd-daemon`).

use cbd_types::Operation;
use cbd_types::figures::{Histogram, HistogramCounts};
use std::time::{Duration, Instant};

/// The requests of one operation that have ended.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct OperationFigures {
    /// Requests that succeeded.
    pub succeeded: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Requests that failed.
    pub failed: u64,
    /// The latency of those that succeeded.
    pub latency: HistogramCounts,
}

#[derive(Default)]
struct OfOperation {
    succeeded: u64,
    bytes: u64,
    failed: u64,
    latency: Histogram,
}

/// A request in flight, as it is counted later.
#[derive(Clone, Copy)]
pub(crate) struct Begun {
    operation: Operation,
    bytes: u64,
    at: Instant,
}

impl Begun {
    pub(crate) fn now(operation: Operation, bytes: u64) -> Self {
        Self { operation, bytes, at: Instant::now() }
    }

    /// Whether the request changes the device.
    pub(crate) const fn is_change(&self) -> bool {
        !matches!(self.operation, Operation::Read | Operation::Flush)
    }
}

/// The counters of a device.
#[derive(Default)]
pub(crate) struct Figures([OfOperation; Operation::ALL.len()]);

impl Figures {
    /// A request has ended.
    pub(crate) fn count(&mut self, begun: Begun, is_good: bool) {
        let of = &mut self.0[begun.operation as usize];
        if !is_good {
            of.failed += 1;
            return;
        }
        (of.succeeded, of.bytes) = (of.succeeded + 1, of.bytes + begun.bytes);
        of.latency.count(nanoseconds(begun.at.elapsed()), 1);
    }

    pub(crate) fn read(&self) -> Vec<(Operation, OperationFigures)> {
        let of_one = |(operation, of): (Operation, &OfOperation)| {
            let mut latency = HistogramCounts::default();
            of.latency.read(&mut latency);
            let OfOperation { succeeded, bytes, failed, .. } = *of;
            (operation, OperationFigures { succeeded, bytes, failed, latency })
        };
        Operation::ALL.into_iter().zip(&self.0).map(of_one).collect()
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
