//! The end of requests: each is counted, and completed.
//!
//! Invariants: a request is counted once, before its completion is in the list.
//!
//! Elsewhere: what is counted (`figures`).

use super::Queue;
use crate::{
    figures::{Outcome, Tally},
    parked::{Parked, Progress},
};
use alloc::vec::Vec;
use cbd_engine::Environment;
use cbd_types::{BackingQueue, Completion, Request, Result};

impl<E: Environment, Q: BackingQueue, const COUNTS: bool> Queue<E, Q, COUNTS> {
    /// Parks a request. `begun`: when it began, if that is known. `elsewhere`: the bytes that have had the outcome so far.
    pub(crate) fn park(
        &mut self,
        request: Request,
        progress: Progress,
        begun: u64,
        (outcome, elsewhere): (Outcome, u64),
    ) -> usize {
        let begun = if begun == 0 { self.meter.now() } else { begun };
        let tally = Tally::new(begun, outcome, elsewhere);
        self.parked.insert(Parked { request, outstanding: 0, error: None, progress, tally })
    }

    /// Ends a request at once, within the cache; it has begun at this time if it is timed.
    #[inline]
    pub(crate) fn end(
        &mut self,
        request: Request,
        result: Result<()>,
        begun: u64,
        done: &mut Vec<Completion>,
    ) {
        match &result {
            Ok(()) => self.meter.count_at_once(request.operation, request.range.len(), begun),
            Err(_) => self.meter.count_failed(request.operation),
        }
        complete(request, result, done);
    }

    /// Ends a request that is parked, with this result or with that of its operations, which have all returned.
    pub(crate) fn end_parked(
        &mut self,
        place: usize,
        result: Option<Result<()>>,
        done: &mut Vec<Completion>,
    ) {
        let Some(Parked { request, error, tally, .. }) = self.parked.remove(place) else { return };
        let result = result.unwrap_or(error.map_or(Ok(()), Err));
        self.meter.count_parked(request.operation, request.range.len(), tally, result.is_ok());
        complete(request, result, done);
    }
}

pub(super) fn complete(request: Request, result: Result<()>, done: &mut Vec<Completion>) {
    done.push(Completion { id: request.id, result, buffer: request.buffer });
}
