//! Requests that the cache executes: lookups, writes and zeroes, piece by piece.
//!
//! Invariants: a request that finds no space continues where it stopped.

use super::Queue;
use crate::{
    figures::{Outcome, WaitFor},
    parked::Progress,
};
use alloc::{sync::Arc, vec::Vec};
use cbd_engine::{Admission, Cache, Environment, Miss, ZeroProgress};
use cbd_types::{BackingQueue, ByteRange, Class, Completion, Operation, Request, Result};
use core::task::Waker;

/// A request that changes the device; its bytes are in its own buffer or in the caller's memory.
pub(super) struct Change<'a> {
    pub(super) operation: Operation,
    pub(super) range: ByteRange,
    pub(super) data: &'a [u8],
    pub(super) fua: bool,
    pub(super) class: Class,
}

impl<'a> Change<'a> {
    pub(super) fn of(request: &'a Request) -> Self {
        let (operation, range, fua, class) = (request.operation, request.range, request.fua, request.class);
        Self { operation, range, data: &request.buffer, fua, class }
    }
}

impl<E: Environment, Q: BackingQueue, const COUNTS: bool> Queue<E, Q, COUNTS> {
    /// Submits a request to a blkdev with a cache.
    pub(super) fn submit_cached(
        &mut self,
        cache: &Arc<Cache<E>>,
        request: Request,
        done: &mut Vec<Completion>,
    ) {
        self.note_sample(request.operation, request.range);
        match request.operation {
            Operation::Flush => return self.flush(cache, request, done),
            Operation::Read => return self.read(cache, request, done),
            _ if cache.caches_writes() => {}
            operation => {
                let is_write = operation == Operation::Write;
                let reason = if is_write { self.bypass_reason(cache, &request) } else { None };
                if reason.is_some() || !cache.is_writeback() {
                    return self.submit_around(cache, request, reason, done);
                }
            }
        }
        self.change_cached(cache, request, done);
    }

    /// Notes a request of a client for the sample.
    #[inline]
    pub(super) fn note_sample(&self, operation: Operation, range: ByteRange) {
        if COUNTS {
            self.device.sample.note(operation, range);
        }
    }

    /// Executes a change in the cache.
    pub(super) fn change_cached(
        &mut self,
        cache: &Arc<Cache<E>>,
        request: Request,
        done: &mut Vec<Completion>,
    ) {
        let mut progress = match request.operation {
            Operation::Discard | Operation::WriteZeroes => Progress::Zeroed(ZeroProgress::default()),
            _ => Progress::Written(request.range.start),
        };
        let begun = self.meter.begin(request.operation);
        let begun_us = cache.begin_measured_write();
        let result = advance(cache, &Change::of(&request), &mut progress, &self.waker);
        // A wait for space or for a bypass says nothing about the cache.
        cache.end_measured_write(begun_us.filter(|_| result.is_some()));
        match result {
            Some(result) => self.end(request, result, begun, done),
            None => self.wait_for_space(request, progress, begun),
        }
    }

    pub(super) fn wait_for_space(&mut self, request: Request, progress: Progress, begun: u64) {
        let place = self.park(request, progress, begun, (Outcome::Cached, 0));
        self.wait(place, WaitFor::Space);
    }

    /// Lets a parked request wait until [`poll`](Self::poll) continues it.
    pub(crate) fn wait(&mut self, place: usize, what: WaitFor) {
        if let Some(parked) = self.parked.get_mut(place) {
            self.meter.begin_wait(&mut parked.tally, what);
        }
        self.waiting.push_back(place);
    }
}

/// Reads the part of `range` that the cache holds, and adds the rest to `misses`, which is empty after an error.
pub(super) fn look_up<E: Environment>(
    cache: &Cache<E>,
    range: ByteRange,
    out: &mut [u8],
    misses: &mut Vec<Miss>,
) -> Result<()> {
    for piece in cache.pieces(range) {
        let out = &mut out[(piece.start - range.start) as usize..(piece.end - range.start) as usize];
        if let Err(error) = cache.read(piece, out, misses) {
            misses.drain(..).for_each(|miss| cache.cancel_fill(miss));
            return Err(error);
        }
    }
    Ok(())
}

/// Executes a write, a discard or zeroing as far as space permits. `None` if it has to wait for space; its waker is then
/// registered.
pub(super) fn advance<E: Environment>(
    cache: &Cache<E>,
    change: &Change<'_>,
    progress: &mut Progress,
    waker: &Waker,
) -> Option<Result<()>> {
    let range = change.range;
    match progress {
        Progress::Written(written) => {
            for piece in cache.pieces(ByteRange { start: *written, end: range.end }) {
                let at = (piece.start - range.start) as usize;
                let data = &change.data[at..at + piece.len() as usize];
                match cache.write_marked(change.class, piece, data, waker) {
                    Ok(Admission::Done(_)) => *written = piece.end,
                    Ok(Admission::Full) => return None,
                    Err(error) => return Some(Err(error)),
                }
            }
        }
        Progress::Zeroed(zeroed) => {
            let discard = change.operation == Operation::Discard;
            match cache.zero(range, discard, zeroed, waker) {
                Ok(Admission::Done(_)) => {}
                Ok(Admission::Full) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
        Progress::Reading | Progress::Forcing | Progress::Around(_) | Progress::Flushing(_) => {}
    }
    Some(if change.fua { cache.force_unit_access(&[range]) } else { Ok(()) })
}
