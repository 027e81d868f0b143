//! Requests to a blkdev without a cache: each is one operation of the backing device.
//!
//! Elsewhere: the flush that follows a FUA request (`queue`).

use super::Queue;
use crate::{
    figures::Outcome,
    parked::{InFlightOp, Progress},
};
use cbd_engine::Environment;
use cbd_types::{BackingOp, BackingQueue, Operation, Request};
use core::sync::atomic::Ordering;

impl<E: Environment, Q: BackingQueue, const COUNTS: bool> Queue<E, Q, COUNTS> {
    /// Submits a request to the backing device.
    pub(super) fn submit_uncached(&mut self, mut request: Request) {
        self.device.uncached.fetch_add(1, Ordering::Relaxed);
        let range = request.range;
        let buffer = core::mem::take(&mut request.buffer);
        let op = match request.operation {
            Operation::Read => BackingOp::Read { offset: range.start, buffer },
            Operation::Write => BackingOp::Write { offset: range.start, buffer },
            Operation::Flush => BackingOp::Flush,
            Operation::Discard if self.device.geometry().discard => BackingOp::Discard { range },
            Operation::Discard | Operation::WriteZeroes => BackingOp::WriteZeroes { range },
        };
        let place = self.park(request, Progress::Reading, 0, (Outcome::Uncached, range.len()));
        self.send(InFlightOp::without_misses(place, range), op);
    }
}
