//! Short writes that a client submits together: held back, then executed as a batch that shares a fence.
//!
//! Invariants: a write is held back only until the client says that no more follow, the queue is polled, or the batch is full.
//!
//! Elsewhere: the batch itself (`cbd-engine`).

use super::{Queue, ending::complete, integrity::has_other_data};
use crate::parked::Progress;
use alloc::{sync::Arc, vec::Vec};
use cbd_engine::{Admission, BatchedWrite, Cache, Environment, TOGETHER};
use cbd_types::{BackingQueue, ByteRange, Class, Completion, Error, Operation, Request, Result};

/// The longest write that is held back for a batch: for longer writes the cost of a fence is relatively small.
pub(super) const PLUGGED_BYTES_MAX: u64 = 16 << 10;

impl<E: Environment, Q: BackingQueue, const COUNTS: bool> Queue<E, Q, COUNTS> {
    /// As [`submit`](Self::submit), for a request that is followed by more requests of the client: a write may be held back
    /// until [`unplug`](Self::unplug), to be executed in a batch.
    pub fn submit_plugged(&mut self, mut request: Request, done: &mut Vec<Completion>) {
        if !self.is_short(&request) {
            self.unplug(done);
            return self.submit(request, done);
        }
        if self.is_held(done) {
            return self.hold(request);
        }
        request.class = self.class_of(request.class);
        // Borrowed until it is needed: the count of an `Arc` is an atomic operation, and would wait for earlier stores.
        let caching = self.cache.as_ref().as_ref().filter(|cache| !cache.caches_writes());
        let around =
            caching.and_then(|cache| Some((Arc::clone(cache), self.bypass_reason(cache, &request)?)));
        if let Some((cache, reason)) = around {
            self.unplug(done);
            if has_other_data(&mut request) {
                return self.refuse_other_data(request, done);
            }
            return self.submit_around(&cache, request, Some(reason), done);
        }
        self.note_sample(request.operation, request.range);
        self.plugged.push(request);
        if self.plugged.len() == TOGETHER {
            self.unplug(done);
        }
    }

    /// Executes the writes that were held back.
    pub fn unplug(&mut self, done: &mut Vec<Completion>) {
        if self.plugged.is_empty() {
            return;
        }
        let mut plugged = core::mem::take(&mut self.plugged);
        let cache = Arc::clone(&self.cache);
        match &*cache {
            Some(cache) if plugged.len() > 1 => self.write_together(cache, &mut plugged, done),
            Some(cache) => self.write_alone(cache, &mut plugged, done),
            None => plugged.drain(..).for_each(|request| self.submit(request, done)),
        }
        self.plugged = plugged;
    }

    /// Whether the request is a short write without a class that the engine executes as one piece.
    fn is_short(&self, request: &Request) -> bool {
        request.operation == Operation::Write
            && request.class == Class::Unmarked
            && !request.range.is_empty()
            && request.range.len() <= PLUGGED_BYTES_MAX
            && self.check(request.operation, request.range, request.buffer.len()).is_ok()
            && self
                .cache
                .as_ref()
                .as_ref()
                .is_some_and(|cache| cache.is_writeback() && cache.pieces(request.range).nth(1).is_none())
    }

    #[inline(never)]
    fn write_alone(
        &mut self,
        cache: &Arc<Cache<E>>,
        requests: &mut Vec<Request>,
        done: &mut Vec<Completion>,
    ) {
        for mut request in requests.drain(..) {
            if has_other_data(&mut request) {
                self.refuse_other_data(request, done);
            } else {
                self.change_cached(cache, request, done);
            }
        }
    }

    // Out of line: for a single request `unplug` calls `submit`, which needs more stack.
    #[inline(never)]
    fn write_together(
        &mut self,
        cache: &Arc<Cache<E>>,
        requests: &mut Vec<Request>,
        done: &mut Vec<Completion>,
    ) {
        let mut writes = [BatchedWrite::EMPTY; TOGETHER];
        let mut results = core::mem::take(&mut self.results);
        results.resize_with(requests.len(), || None);
        for (write, request) in writes.iter_mut().zip(&*requests) {
            *write = BatchedWrite { data_crc: request.data_crc, ..(request.range, &*request.buffer).into() };
        }
        let begun = self.meter.begin_together(Operation::Write, requests.len() as u32);
        let begun_us = cache.begin_measured_write();
        let class = self.class.get();
        cache.write_together(class, &writes[..requests.len()], &self.waker, |number, result| {
            results[number] = Some(result);
        });
        cache.end_measured_write(begun_us);
        let forced = force_unit_access(cache, requests, &results);
        let (mut cached, mut bytes) = (0, 0);
        for (mut request, result) in requests.drain(..).zip(results.drain(..)) {
            match result {
                Some(Ok(Admission::Done(_))) => {
                    let forced = match &forced {
                        Err(error) if request.fua => Err(Error::new(error.kind(), error.line())),
                        _ => Ok(()),
                    };
                    if forced.is_ok() {
                        cached += 1;
                        bytes += request.range.len();
                    } else {
                        self.meter.count_failed(request.operation);
                    }
                    complete(request, forced, done);
                }
                Some(Err(error)) => self.end(request, Err(error), 0, done),
                Some(Ok(Admission::Full)) | None => {
                    // It is not known yet whether its data is what was sent.
                    if has_other_data(&mut request) {
                        self.refuse_other_data(request, done);
                    } else {
                        let progress = Progress::Written(request.range.start);
                        self.wait_for_space(request, progress, begun);
                    }
                }
            }
        }
        self.meter.count_together(Operation::Write, bytes, cached, begun);
        self.results = results;
    }
}

/// Does for the FUA writes of a batch that were stored what is to follow their stores.
#[inline(never)]
fn force_unit_access<E: Environment>(
    cache: &Cache<E>,
    requests: &[Request],
    results: &[Option<Result<Admission>>],
) -> Result<()> {
    let is_forced = |(request, result): &(&Request, &Option<Result<Admission>>)| {
        request.fua && matches!(result, Some(Ok(Admission::Done(_))))
    };
    let mut ranges = [ByteRange { start: 0, end: 0 }; TOGETHER];
    let mut count = 0;
    for (request, _) in requests.iter().zip(results).filter(is_forced) {
        ranges[count] = request.range;
        count += 1;
    }
    if count == 0 { Ok(()) } else { cache.force_unit_access(&ranges[..count]) }
}
