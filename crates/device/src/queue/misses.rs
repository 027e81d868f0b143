//! Reads that miss: what was read ahead is copied, the rest is read from the backing device, and streams are read ahead.
//!
//! Invariants: what a client asked for is submitted before anything is read ahead; data that was read ahead reaches a client only
//! if its fill is pending at that moment.
//!
//! Elsewhere: streams (`streams`), the data (`readahead`), fills (`cbd-engine`).

use super::{Queue, ending::complete};
use crate::{
    figures::Outcome,
    parked::{InFlightOp, Progress},
    readahead::{Fill, Waiting, may_read_ahead},
    streams::{Followed, STEP_MAX},
};
use alloc::{sync::Arc, vec::Vec};
use cbd_engine::{BypassReason, Cache, Environment, Miss, Readahead};
use cbd_types::{
    BackingOp, BackingQueue, ByteRange, Class, Completion, Request, backing::BackingDone, heap_sort_by_key,
};

/// Adjacent misses are read from the backing device in one operation of at most this many bytes.
pub(super) const READ_MAX: u64 = 1 << 20;

/// A request that missed.
pub(super) struct Missed {
    followed: Followed,
    /// The cutoff of streams; `u64::MAX` if there is none.
    cutoff: u64,
    /// The bytes that the cache did not have, and what that counts as.
    pub(super) bytes: u64,
    pub(super) outcome: Outcome,
}

/// Notes a read without a miss in the adjacent `hits`: those before a miss belong to its stream.
#[inline]
pub(super) const fn note_hit(hits: &mut ByteRange, range: ByteRange) {
    if hits.end != range.start {
        hits.start = range.start;
    }
    hits.end = range.end;
}

impl<E: Environment, Q: BackingQueue, const COUNTS: bool> Queue<E, Q, COUNTS> {
    /// Continues a read with misses. Out of line: hits need less stack.
    #[inline(never)]
    pub(super) fn read_misses(
        &mut self,
        cache: &Arc<Cache<E>>,
        mut request: Request,
        begun: u64,
        done: &mut Vec<Completion>,
    ) {
        let missed = self.begin_misses(cache, request.range, &mut request.buffer);
        if self.misses.is_empty() {
            let bytes = (request.range.len(), missed.bytes);
            self.meter.count_partly(request.operation, bytes, missed.outcome, begun);
            complete(request, Ok(()), done);
        } else {
            self.fetch_misses(cache, request, &missed, begun);
        }
        self.read_ahead(cache, &missed);
    }

    /// Follows the stream of a request that missed, and copies what was read ahead for it to `into`. Misses that are left must
    /// be read.
    #[inline(never)]
    pub(super) fn begin_misses(
        &mut self,
        cache: &Arc<Cache<E>>,
        range: ByteRange,
        into: &mut [u8],
    ) -> Missed {
        let bytes = self.misses.iter().map(|miss| miss.range.len()).sum();
        let is_past = cache.is_passthrough();
        let outcome = if is_past { Outcome::Past(BypassReason::Mode) } else { Outcome::Disk };
        let settings = cache.settings();
        let is_auto = settings.readahead == Readahead::Auto;
        let cutoff = match settings.sequential_read_cutoff {
            0 => u64::MAX,
            cutoff => cutoff,
        };
        let run_start = if self.hits.end == range.start { self.hits.start } else { range.start };
        self.hits = ByteRange { start: range.end, end: range.end };
        self.ahead.count_miss();
        let mut followed = Followed::default();
        if is_auto || cutoff != u64::MAX {
            let limit = if is_auto && may_read_ahead(&self.backing) { cache.size() } else { 0 };
            followed = self.device.streams.lock().follow(self.membership.number(), run_start, range, limit);
        }
        let mut number = 0;
        while let Some(miss) = self.misses.get_mut(number) {
            let (wanted, at) = (miss.range, (miss.range.start - range.start) as usize);
            let out = &mut into[at..at + wanted.len() as usize];
            let end = self.ahead.take(cache, wanted, out, &mut self.fills);
            if end == wanted.end {
                // In order: the last bytes of a window end it.
                cache.cancel_fill(self.misses.remove(number));
                continue;
            }
            if end > wanted.start {
                cache.narrow(miss, end);
            }
            number += 1;
        }
        if !self.fills.is_empty() {
            self.waker.wake_by_ref();
        }
        Missed { followed, cutoff, bytes, outcome }
    }

    /// Reads the misses of a lookup from the backing device.
    #[inline(never)]
    pub(super) fn fetch_misses(
        &mut self,
        cache: &Arc<Cache<E>>,
        request: Request,
        missed: &Missed,
        begun: u64,
    ) {
        let is_behind_cutoff = missed.followed.before >= missed.cutoff;
        let asked = request.range;
        let mut misses = core::mem::take(&mut self.misses);
        let class = self.class_of(request.class);
        misses.iter_mut().for_each(|miss| miss.set_class(class));
        heap_sort_by_key(&mut misses, |miss| miss.range.start);
        let place = self.park(request, Progress::Reading, begun, (missed.outcome, missed.bytes));
        // Adjacent misses are read in one operation.
        let mut run: Vec<Miss> = Vec::new();
        for mut miss in misses.drain(..) {
            let (end, waits) = self.ahead.wait(place, miss.range);
            if let Some(parked) = self.parked.get_mut(place) {
                parked.outstanding += waits;
            }
            if end == miss.range.end {
                cache.cancel_fill(miss);
                continue;
            }
            if end > miss.range.start {
                cache.narrow(&mut miss, end);
            }
            if miss.range.start == asked.start || miss.range.end == asked.end {
                cache.widen_to_blocks(&mut miss, asked);
            }
            let joins = run.first().zip(run.last()).is_some_and(|(first, last)| {
                last.range.end == miss.range.start && miss.range.end - first.range.start <= READ_MAX
            });
            if !joins && !run.is_empty() {
                self.read_backing(place, core::mem::take(&mut run), is_behind_cutoff);
            }
            run.push(miss);
        }
        self.read_backing(place, run, is_behind_cutoff);
        self.misses = misses;
    }

    /// Passes data that was read for completed misses to the cache. Out of line: the rest of `poll` needs more stack.
    #[inline(never)]
    pub(super) fn complete_fills(&mut self, cache: &Arc<Cache<E>>) {
        let is_congested = cache.are_reads_congested();
        for Fill { misses, range, buffer, is_behind_cutoff } in core::mem::take(&mut self.fills) {
            for mut miss in misses {
                // What was read ahead has the class of the blkdev.
                miss.set_class(self.class_of(miss.class()));
                let at = (miss.range.start - range.start) as usize;
                let data = &buffer[at..at + miss.range.len() as usize];
                let is_kept = miss.class() == Class::Metadata || cache.is_pinned(miss.range);
                if is_congested && !is_kept {
                    cache.bypass_fill(miss, BypassReason::Congested);
                } else if is_behind_cutoff {
                    cache.complete_fill_behind_cutoff(miss, data);
                } else {
                    cache.complete_fill(miss, data);
                }
            }
            self.spare.give(buffer);
        }
    }

    fn read_backing(&mut self, parked: usize, misses: Vec<Miss>, is_behind_cutoff: bool) {
        let (Some(first), Some(last)) = (misses.first(), misses.last()) else { return };
        let range = ByteRange { start: first.range.start, end: last.range.end };
        // The data is read into a buffer of the queue: no client can change data that becomes a record.
        let buffer = self.spare.take(range.len() as usize);
        let op = InFlightOp { misses, is_behind_cutoff, ..InFlightOp::without_misses(parked, range) };
        self.send(op, BackingOp::Read { offset: range.start, buffer });
    }

    /// Reads ahead, if the stream of a request has come to its next step. What the request asked for is submitted already.
    #[inline(never)]
    pub(super) fn read_ahead(&mut self, cache: &Arc<Cache<E>>, missed: &Missed) {
        let Some((range, before)) = missed.followed.step else { return };
        debug_assert!(range.len() <= STEP_MAX);
        let is_behind_cutoff = before >= missed.cutoff;
        self.ahead.read(cache, &mut self.backing, &mut self.spare, range, is_behind_cutoff);
    }

    /// Processes the end of an operation of readahead. An error is not reported: if a client wants the data, it is read again.
    #[inline(never)]
    pub(super) fn readahead_finished(&mut self, finished: BackingDone, done: &mut Vec<Completion>) {
        let cache = Arc::clone(&self.cache);
        let Some(cache) = &*cache else { return };
        let buffer = match (finished.op, finished.result) {
            (BackingOp::Read { buffer, .. }, Ok(())) => Some(buffer),
            _ => None,
        };
        for Waiting { parked: place, range } in self.ahead.finished(cache, finished.token, buffer) {
            let Some(parked) = self.parked.get_mut(place) else { continue };
            parked.outstanding -= 1;
            let at = (range.start - parked.request.range.start) as usize;
            let into = &mut parked.request.buffer[at..at + range.len() as usize];
            let start = self.ahead.take(cache, range, into, &mut self.fills);
            if start < range.end {
                let rest = ByteRange { start, end: range.end };
                let buffer = self.spare.take(rest.len() as usize);
                let op = InFlightOp::without_misses(place, rest);
                self.send(op, BackingOp::Read { offset: rest.start, buffer });
            } else if parked.outstanding == 0 {
                self.end_parked(place, None, done);
            }
        }
    }
}
