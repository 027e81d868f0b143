//! One thread's queue of requests to a blkdev.

mod cached;
mod cancel;
mod ending;
mod held;
mod integrity;
mod misses;
mod plugged;
mod uncached;
mod verify;

use crate::{
    BlkdevClass, Device,
    figures::{Cells, Meter, WaitFor},
    parked::{InFlightOp, Parked, Progress, Slab},
    readahead::{Fill, ReadAhead, TOKENS},
    route::Membership,
};
use alloc::{collections::VecDeque, format, sync::Arc, vec::Vec};
use cached::{Change, advance, look_up};
pub(crate) use cancel::given_up;
use cbd_engine::{Admission, Cache, Environment, Miss, TOGETHER};
use cbd_types::{
    AlignedBuffer, BackingOp, BackingQueue, BlkdevId, ByteRange, Class, Completion, Error, ErrorKind,
    OpToken, Operation, Origin, Request, Result, SpareBuffers, backing::BackingDone,
};
use core::task::Waker;
use integrity::has_other_data;
use misses::note_hit;
pub use verify::VERIFY_MAX;
use verify::{VERIFY_TOKENS, Verifications};

/// Bytes of buffers kept for later reads of the backing device.
const SPARE_BYTES: usize = 16 << 20;

/// A queue: used by one thread, with its own queue of the backing device. `COUNTS`: whether it counts its requests; one that does
/// not is for the measurement of what counting costs.
pub struct Queue<E: Environment, Q: BackingQueue, const COUNTS: bool = true> {
    pub(crate) device: Arc<Device<E>>,
    /// The cache, if requests go through one. In an `Arc` that is the queue's alone: no other thread changes its counter.
    cache: Arc<Option<Arc<Cache<E>>>>,
    /// The number of the route that the queue follows.
    route: u64,
    /// Requests that arrived while the route was held.
    held: VecDeque<Request>,
    pub(crate) backing: Q,
    pub(crate) waker: Waker,
    pub(crate) parked: Slab<Parked>,
    pub(crate) ops: Slab<InFlightOp>,
    /// Requests that wait for space, or for what precedes them, in order of submission.
    pub(crate) waiting: VecDeque<usize>,
    /// Data that was read for a completed request; it is cached after the completions have been sent.
    fills: Vec<Fill>,
    /// Data that was read before it was asked for.
    ahead: ReadAhead,
    /// The adjacent ranges that were read last without a miss.
    hits: ByteRange,
    pub(crate) spare: SpareBuffers,
    misses: Vec<Miss>,
    pub(crate) finished: Vec<BackingDone>,
    /// Short writes that are held back, to be executed as a batch when no more requests arrive.
    plugged: Vec<Request>,
    class: Arc<BlkdevClass>,
    /// The results of the present batch; empty between batches.
    results: Vec<Option<Result<Admission>>>,
    /// The failed flushes of the backing device that this queue has reported.
    pub(crate) reported_failures: u64,
    /// A flush of the backing device failed for a cache that the route has left, and this queue has not reported it.
    owes_failure: bool,
    verifications: Verifications,
    pub(crate) meter: Meter<COUNTS>,
    /// Declared last: it ends when the queue of the backing device is closed.
    pub(crate) membership: Membership<E>,
}

impl<E: Environment, Q: BackingQueue> Queue<E, Q> {
    /// A queue of `device` with `backing` as its queue of the backing device. `waker` is called, from any
    /// thread, when [`poll`](Self::poll) may make progress with a waiting request. No other queue has the same waker: when this
    /// queue gives up its requests, the cache removes the waker from its wait lists.
    pub fn new(device: Arc<Device<E>>, backing: Q, waker: Waker) -> Self {
        Self::create(device, backing, waker)
    }
}

impl<E: Environment, Q: BackingQueue> Queue<E, Q, false> {
    /// As [`new`](Queue::new), but the queue counts nothing.
    pub fn uncounted(device: Arc<Device<E>>, backing: Q, waker: Waker) -> Self {
        Self::create(device, backing, waker)
    }
}

impl<E: Environment, Q: BackingQueue, const COUNTS: bool> Queue<E, Q, COUNTS> {
    fn create(device: Arc<Device<E>>, backing: Q, waker: Waker) -> Self {
        let cells = Arc::new(Cells::new());
        let membership = Membership::new(&device, &waker, &cells);
        let meter = Meter::new(cells, device.clock, membership.number());
        let mut queue = Self {
            reported_failures: 0,
            owes_failure: false,
            device,
            cache: Arc::new(None),
            // No route has this number: a queue that is created while the route is held asks again.
            route: u64::MAX,
            held: VecDeque::new(),
            backing,
            waker,
            parked: Slab::default(),
            ops: Slab::default(),
            waiting: VecDeque::new(),
            fills: Vec::new(),
            ahead: ReadAhead::default(),
            hits: ByteRange { start: 0, end: 0 },
            spare: SpareBuffers::new(SPARE_BYTES),
            misses: Vec::new(),
            finished: Vec::new(),
            plugged: Vec::with_capacity(TOGETHER),
            class: Arc::default(),
            results: Vec::with_capacity(TOGETHER),
            verifications: Verifications::default(),
            meter,
            membership,
        };
        queue.ask_for_route(&mut Vec::new());
        queue
    }

    /// The same for a blkdev whose requests without a class have this one.
    #[must_use]
    pub fn of_class(mut self, class: Arc<BlkdevClass>) -> Self {
        self.class = class;
        self
    }

    /// The same for the clients of a blkdev: what it counts is counted for that.
    #[must_use]
    pub fn of_blkdev(self, blkdev: BlkdevId) -> Self {
        self.membership.set_blkdev(blkdev);
        self
    }

    /// The queue of the backing device, so that the caller can wait on it.
    pub const fn backing(&self) -> &Q {
        &self.backing
    }

    /// Frees memory that is kept for later requests.
    pub fn trim(&mut self) {
        if let Some(cache) = &*self.cache {
            self.ahead.clear(cache);
        }
        self.spare.trim();
    }

    /// Requests submitted and not completed.
    pub fn parked(&self) -> usize {
        self.parked.len() + self.plugged.len() + self.held.len()
    }

    /// Requests submitted and not completed that can still change the device.
    pub fn changes(&self) -> usize {
        let is_change = |operation| !matches!(operation, Operation::Read | Operation::Flush);
        let parked = self.parked.iter().map(|parked| &parked.request);
        let unfinished = parked.chain(&self.held).filter(|request| is_change(request.operation)).count();
        unfinished + self.plugged.len()
    }

    /// Submits a request. If it completes at once, its completion is in `done` when this returns.
    pub fn submit(&mut self, mut request: Request, done: &mut Vec<Completion>) {
        if has_other_data(&mut request) {
            return self.refuse_other_data(request, done);
        }
        if let Err(error) = self.check(request.operation, request.range, request.buffer.len()) {
            return self.end(request, Err(error), 0, done);
        }
        if request.range.is_empty() && request.operation != Operation::Flush {
            return self.end(request, Ok(()), 0, done);
        }
        if self.is_held(done) {
            return self.hold(request);
        }
        if request.operation == Operation::Flush && core::mem::take(&mut self.owes_failure) {
            return self.end(request, Err(flush_failed()), 0, done);
        }
        request.class = self.class_of(request.class);
        let cache = Arc::clone(&self.cache);
        match &*cache {
            Some(cache) => self.submit_cached(cache, request, done),
            None => self.submit_uncached(request),
        }
    }

    /// Writes the caller's bytes, without an intermediate copy if the write need not wait: the result is then returned at
    /// once. Otherwise a copy of the bytes is parked as request `id`, and [`poll`](Self::poll) completes it.
    pub fn write_from(&mut self, id: u64, range: ByteRange, data: &[u8], fua: bool) -> Option<Result<()>> {
        if let Err(error) = self.check(Operation::Write, range, data.len()) {
            self.meter.count_failed(Operation::Write);
            return Some(Err(error));
        }
        if range.is_empty() {
            self.meter.count_at_once(Operation::Write, 0, 0);
            return Some(Ok(()));
        }
        let (operation, class) = (Operation::Write, self.class.get());
        let parked = |data| Request {
            id,
            operation,
            range,
            fua,
            class,
            data_crc: None,
            buffer: AlignedBuffer::from_slice(data),
        };
        // Borrowed: the count of an `Arc` is an atomic operation, and would wait for the stores of this write.
        let cache = match &*self.cache {
            Some(cache) if self.follows_route() => cache,
            _ => {
                self.submit_to_disk(parked(data));
                return None;
            }
        };
        self.note_sample(operation, range);
        let begun = self.meter.begin(operation);
        let mut begun_us = None;
        if !cache.caches_writes() {
            let reason = self.bypass_reason_of(cache, range, fua, class);
            if reason.is_some() || !cache.is_writeback() {
                let (cache, mut done) = (Arc::clone(cache), Vec::new());
                self.submit_around(&cache, parked(data), reason, &mut done);
                return done.pop().map(|completion| completion.result);
            }
            begun_us = cache.begin_measured_write();
        }
        let mut progress = Progress::Written(range.start);
        let result =
            advance(cache, &Change { operation, range, data, fua, class }, &mut progress, &self.waker);
        cache.end_measured_write(begun_us.filter(|_| result.is_some()));
        match &result {
            Some(Ok(())) => self.meter.count_at_once(operation, range.len(), begun),
            Some(Err(_)) => self.meter.count_failed(operation),
            None => self.wait_for_space(parked(data), progress, begun),
        }
        result
    }

    /// Reads into the caller's memory, without an intermediate copy if the whole range is in the cache: the result is then
    /// returned at once. Otherwise request `id` is parked, and [`poll`](Self::poll) completes it with a buffer that holds all
    /// bytes.
    pub fn read_into(&mut self, id: u64, range: ByteRange, out: &mut [u8]) -> Option<Result<()>> {
        if let Err(error) = self.check(Operation::Read, range, out.len()) {
            self.meter.count_failed(Operation::Read);
            return Some(Err(error));
        }
        if range.is_empty() {
            self.meter.count_at_once(Operation::Read, 0, 0);
            return Some(Ok(()));
        }
        let operation = Operation::Read;
        let parked = |buffer| Request::unmarked(id, operation, range, false, buffer);
        let cache = match &*self.cache {
            Some(cache) if self.follows_route() => cache,
            _ => {
                self.submit_to_disk(parked(AlignedBuffer::zeroed(out.len())));
                return None;
            }
        };
        cache.prefetch(range.start);
        self.note_sample(operation, range);
        let begun = self.meter.begin(operation);
        let begun_us = cache.begin_measured_read();
        let found = look_up(cache, range, out, &mut self.misses);
        cache.end_measured_read(begun_us);
        if found.is_err() || self.misses.is_empty() {
            note_hit(&mut self.hits, range);
            match &found {
                Ok(()) => self.meter.count_at_once(operation, range.len(), begun),
                Err(_) => self.meter.count_failed(operation),
            }
            return Some(found);
        }
        let cache = Arc::clone(cache);
        let missed = self.begin_misses(&cache, range, out);
        let is_complete = self.misses.is_empty();
        if is_complete {
            self.meter.count_partly(operation, (range.len(), missed.bytes), missed.outcome, begun);
        } else {
            self.fetch_misses(&cache, parked(AlignedBuffer::from_slice(out)), &missed, begun);
        }
        self.read_ahead(&cache, &missed);
        is_complete.then_some(Ok(()))
    }

    /// Makes progress with parked requests, without blocking.
    pub fn poll(&mut self, done: &mut Vec<Completion>) {
        self.unplug(done);
        let cache = Arc::clone(&self.cache);
        if let Some(cache) = &*cache {
            self.complete_fills(cache);
        }
        self.take_finished(done);
        if let Some(cache) = &*cache {
            for _ in 0..self.waiting.len() {
                let Some(place) = self.waiting.pop_front() else { break };
                self.go_on(cache, place, done);
            }
        }
        if !self.fills.is_empty() {
            // The completions are sent first; the wakeup makes the thread poll again.
            self.waker.wake_by_ref();
        }
        if !self.verifications.is_idle() {
            self.verify_further();
        }
        let route = self.route;
        if !self.is_held(done) && self.route != route && !self.verifications.is_idle() {
            self.waker.wake_by_ref();
        }
    }

    /// Processes operations that the backing device has completed. Out of line as [`complete_fills`](Self::complete_fills).
    #[inline(never)]
    fn take_finished(&mut self, done: &mut Vec<Completion>) {
        let mut finished = core::mem::take(&mut self.finished);
        self.backing.poll(&mut finished);
        finished.drain(..).for_each(|op| self.finish(op, done));
        self.finished = finished;
    }

    pub(crate) fn finish(&mut self, op: BackingDone, done: &mut Vec<Completion>) {
        if op.token.0 & (TOKENS | VERIFY_TOKENS) == 0 {
            self.op_finished(op, done);
        } else if op.token.0 & TOKENS == 0 {
            self.probe_finished(op);
        } else {
            self.readahead_finished(op, done);
        }
    }

    /// The class of a request: its own, else that of the blkdev.
    #[inline]
    fn class_of(&self, class: Class) -> Class {
        if class == Class::Unmarked { self.class.get() } else { class }
    }

    fn check(&self, operation: Operation, range: ByteRange, length: usize) -> Result<()> {
        let geometry = self.device.geometry();
        let sector = u64::from(geometry.sector);
        if range.end > geometry.size || range.start > range.end {
            return Err(Error::new(
                ErrorKind::OutOfRange,
                format!("{range} reaches past the end of the device at {}", geometry.size),
            ));
        }
        if !range.start.is_multiple_of(sector) || !range.end.is_multiple_of(sector) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("{range} is not whole sectors of {sector} bytes"),
            ));
        }
        let wanted = match operation {
            Operation::Read | Operation::Write => range.len(),
            Operation::Flush | Operation::Discard | Operation::WriteZeroes => 0,
        };
        if length as u64 != wanted {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("a buffer of {length} bytes for {range}"),
            ));
        }
        Ok(())
    }

    /// Continues a request that waited for space. Out of line as [`complete_fills`](Self::complete_fills).
    #[inline(never)]
    fn go_on(&mut self, cache: &Arc<Cache<E>>, place: usize, done: &mut Vec<Completion>) {
        let Some(parked) = self.parked.get_mut(place) else { return };
        match parked.progress {
            Progress::Around(_) => return self.go_around(cache, place, done),
            Progress::Flushing(ticket) => return self.await_flush(cache, place, ticket, done),
            _ => {}
        }
        match advance(cache, &Change::of(&parked.request), &mut parked.progress, &self.waker) {
            Some(result) => self.end_parked(place, Some(result), done),
            None => match self.past_instead(cache, place) {
                Some(around) => self.continue_past(cache, place, around, done),
                None => self.waiting.push_back(place),
            },
        }
    }

    fn read(&mut self, cache: &Arc<Cache<E>>, mut request: Request, done: &mut Vec<Completion>) {
        let begun = self.meter.begin(request.operation);
        let begun_us = cache.begin_measured_read();
        let found = look_up(cache, request.range, &mut request.buffer, &mut self.misses);
        cache.end_measured_read(begun_us);
        if found.is_err() || self.misses.is_empty() {
            note_hit(&mut self.hits, request.range);
            return self.end(request, found, begun, done);
        }
        self.read_misses(cache, request, begun, done);
    }

    pub(crate) fn send(&mut self, mut op: InFlightOp, backing_op: BackingOp) {
        if let Some(parked) = self.parked.get_mut(op.parked) {
            parked.outstanding += 1;
        }
        if !op.misses.is_empty()
            && let Some(cache) = &*self.cache
        {
            op.begun_us = cache.monotonic_us();
        }
        let token = self.ops.insert(op);
        self.backing.set_origin(Origin::Client);
        self.backing.submit(OpToken(token as u64), backing_op);
    }

    pub(crate) fn op_finished(&mut self, mut finished: BackingDone, done: &mut Vec<Completion>) {
        let Some(mut op) = self.ops.remove(finished.token.0 as usize) else { return };
        let is_good = finished.result.is_ok();
        let cache = Arc::clone(&self.cache);
        let cache = cache.as_ref().as_ref();
        if let (Some(cache), Some(ticket)) = (cache, op.bypass.take()) {
            let data = match &finished.op {
                BackingOp::Write { buffer, .. } => Some(&**buffer),
                _ => None,
            };
            let by_choice = ticket.is_by_choice();
            cache.end_bypass(ticket, data, is_good);
            if !is_good && by_choice {
                finished.result = Ok(());
                self.cache_instead(op.parked, op.range);
            }
        }
        let Some(parked) = self.parked.get_mut(op.parked) else { return };
        parked.outstanding -= 1;
        if let Err(error) = finished.result {
            parked.error.get_or_insert(error);
        }
        match finished.op {
            BackingOp::Read { buffer, .. } if cache.is_some() => {
                if is_good {
                    let bytes = buffer.len() as u64;
                    cache.into_iter().for_each(|cache| cache.note_backing_read(bytes, op.begun_us));
                    // Misses are whole blocks, which may begin before the request and end behind it.
                    if let Some(asked) = op.range.intersection(&parked.request.range) {
                        let (from, to) =
                            (asked.start - op.range.start, asked.start - parked.request.range.start);
                        parked.request.buffer[to as usize..][..asked.len() as usize]
                            .copy_from_slice(&buffer[from as usize..][..asked.len() as usize]);
                    }
                    let InFlightOp { misses, range, is_behind_cutoff, .. } = op;
                    self.fills.push(Fill { misses, range, buffer, is_behind_cutoff });
                } else if let Some(cache) = cache {
                    op.misses.into_iter().for_each(|miss| cache.cancel_fill(miss));
                    self.spare.give(buffer);
                }
            }
            BackingOp::Write { buffer, .. } if cache.is_some() => self.spare.give(buffer),
            BackingOp::Read { buffer, .. } | BackingOp::Write { buffer, .. } => {
                parked.request.buffer = buffer
            }
            _ => {}
        }
        if parked.outstanding > 0 {
            return;
        }
        if let (Some(cache), Progress::Around(_)) = (cache, parked.progress) {
            return self.end_around(cache, op.parked, done);
        }
        let forces = cache.is_none()
            && parked.request.fua
            && parked.error.is_none()
            && matches!(parked.progress, Progress::Reading)
            && !matches!(parked.request.operation, Operation::Flush | Operation::Read);
        if forces {
            parked.progress = Progress::Forcing;
            self.meter.begin_wait(&mut parked.tally, WaitFor::Flush);
            return self.send(InFlightOp::without_misses(op.parked, op.range), BackingOp::Flush);
        }
        self.end_parked(op.parked, None, done);
    }
}

impl<E: Environment, Q: BackingQueue, const COUNTS: bool> Drop for Queue<E, Q, COUNTS> {
    fn drop(&mut self) {
        let cache = Arc::clone(&self.cache);
        let Some(cache) = &*cache else { return };
        cache.stop_waiting(&self.waker);
        self.wait_for_bypasses();
        self.ahead.clear(cache);
        self.verifications.drain_misses().for_each(|miss| cache.cancel_fill(miss));
        // The operations themselves are dropped with the queue of the backing device.
        for place in 0.. {
            if self.ops.len() == 0 {
                break;
            }
            if let Some(op) = self.ops.remove(place) {
                op.misses.into_iter().for_each(|miss| cache.cancel_fill(miss));
            }
        }
        for Fill { misses, .. } in self.fills.drain(..) {
            misses.into_iter().for_each(|miss| cache.cancel_fill(miss));
        }
    }
}

#[cold]
fn flush_failed() -> Error {
    let text = "a flush of the backing device failed while the device had a cache: writes since the flush before may be lost";
    Error::new(ErrorKind::Backing, text)
}

#[cfg(test)]
mod tests;
