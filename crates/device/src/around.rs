//! Changes that go past the cache, and the flushes of the backing device that they need.
//!
//! Invariants: a step of a change is submitted to the backing device only after the cache has begun its bypass, and the bypass ends
//! only when the backing device has returned the step; a request that waits may have steps in flight, which end by themselves, so no
//! cycle of waits can form. A change that goes past the cache by choice fails only where the cache would fail it, too: what the
//! backing device refuses is cached.

use crate::{
    Queue,
    figures::{Outcome, WaitFor},
    parked::{Around, InFlightOp, Progress},
    queue::given_up,
};
use alloc::{sync::Arc, vec::Vec};
use cbd_engine::{
    Admission, BYPASS_MAX, Bypass, BypassReason, Cache, Environment, FlushTicket, WhenFull, ZeroProgress,
};
use cbd_types::{BackingOp, BackingQueue, ByteRange, Class, Completion, Operation, Request, Result};

impl<E: Environment, Q: BackingQueue, const COUNTS: bool> Queue<E, Q, COUNTS> {
    /// Flushes the cache, and the backing device if something went past the cache. Out of line: the rest needs less stack.
    #[inline(never)]
    pub(crate) fn flush(&mut self, cache: &Arc<Cache<E>>, request: Request, done: &mut Vec<Completion>) {
        let begun = self.meter.begin(request.operation);
        match cache.flush_through(&mut self.reported_failures) {
            Err(error) => self.end(request, Err(error), begun, done),
            Ok(None) => self.end(request, Ok(()), begun, done),
            Ok(Some(ticket)) => {
                let progress = Progress::Flushing(ticket);
                let place = self.park(request, progress, begun, (Outcome::Disk, 0));
                self.await_flush(cache, place, ticket, done);
            }
        }
    }

    /// Completes a request if the flush of the backing device that it waits for has ended.
    pub(crate) fn await_flush(
        &mut self,
        cache: &Arc<Cache<E>>,
        place: usize,
        ticket: FlushTicket,
        done: &mut Vec<Completion>,
    ) {
        let Some(result) = cache.flushed(ticket, &self.waker) else {
            return self.wait(place, WaitFor::Flush);
        };
        if result.is_err() {
            // This request reports the failure.
            self.reported_failures = cache.reported_failures();
        }
        if let (Some(parked), Err(error)) = (self.parked.get_mut(place), result) {
            parked.error.get_or_insert(error);
        }
        self.end_parked(place, None, done);
    }

    /// Why a write is to go past the cache, whatever the mode; called once for each write. What is pinned does not, and metadata
    /// only where there is no space.
    pub(crate) fn bypass_reason(&self, cache: &Cache<E>, request: &Request) -> Option<BypassReason> {
        self.bypass_reason_of(cache, request.range, request.fua, request.class)
    }

    /// As [`bypass_reason`](Self::bypass_reason), for a write that is no request.
    #[inline(never)]
    pub(crate) fn bypass_reason_of(
        &self,
        cache: &Cache<E>,
        range: ByteRange,
        fua: bool,
        class: Class,
    ) -> Option<BypassReason> {
        let reason = self.reason_to_bypass(cache, range, fua)?;
        let stays = class == Class::Metadata && reason != BypassReason::Full;
        (!stays && !cache.is_pinned(range)).then_some(reason)
    }

    fn reason_to_bypass(&self, cache: &Cache<E>, range: ByteRange, fua: bool) -> Option<BypassReason> {
        let settings = cache.settings();
        if settings.sequential_write_cutoff > 0 {
            let followed =
                self.device.write_streams.lock().follow(self.membership.number(), range.start, range, 0);
            // Past the cache a FUA write would wait for a flush of the backing device.
            if followed.advances && followed.before >= settings.sequential_write_cutoff && !fua {
                return Some(BypassReason::Sequential);
            }
        }
        if cache.are_writes_congested(&settings) && !fua {
            return Some(BypassReason::Congested);
        }
        let is_full = settings.when_full == WhenFull::Around && is_sooner_around(cache, range);
        is_full.then_some(BypassReason::Full)
    }

    /// The progress with which a change that the cache was to execute continues past it, if it is to: the mode has changed, or the
    /// cache is full. Part of it may be cached.
    pub(crate) fn past_instead(&mut self, cache: &Cache<E>, place: usize) -> Option<Around> {
        if cache.caches_writes() {
            return None;
        }
        let parked = self.parked.get_mut(place)?;
        let ByteRange { start, end } = parked.request.range;
        let next = match parked.progress {
            Progress::Written(next) => next,
            Progress::Zeroed(_) if !cache.is_writeback() => start,
            _ => return None,
        };
        if !cache.is_writeback() {
            return Some(Around { cached: true, ..Around::from(next, None) });
        }
        let is_full = cache.settings().when_full == WhenFull::Around
            && is_sooner_around(cache, ByteRange { start: next, end });
        is_full.then(|| Around { cached: next > start, ..Around::from(next, Some(BypassReason::Full)) })
    }

    /// A change that waited continues with this progress.
    pub(crate) fn continue_past(
        &mut self,
        cache: &Arc<Cache<E>>,
        place: usize,
        around: Around,
        done: &mut Vec<Completion>,
    ) {
        if let Some(parked) = self.parked.get_mut(place) {
            parked.progress = Progress::Around(around);
        }
        self.go_around(cache, place, done);
    }

    /// Submits a change that may go past the cache: because of the mode, or for another reason.
    #[inline(never)]
    pub(crate) fn submit_around(
        &mut self,
        cache: &Arc<Cache<E>>,
        request: Request,
        reason: Option<BypassReason>,
        done: &mut Vec<Completion>,
    ) {
        let progress = Progress::Around(Around::from(request.range.start, reason));
        let place = self.park(request, progress, 0, (Outcome::Cached, 0));
        self.go_around(cache, place, done);
    }

    /// Continues a change, as far as it does not have to wait.
    #[inline(never)]
    pub(crate) fn go_around(&mut self, cache: &Arc<Cache<E>>, place: usize, done: &mut Vec<Completion>) {
        loop {
            let Some(parked) = self.parked.get_mut(place) else { return };
            let Progress::Around(around) = &mut parked.progress else { return };
            let range = parked.request.range;
            if parked.error.is_some() {
                around.next = range.end;
            }
            if around.next >= range.end {
                break;
            }
            match self.step_around(cache, place) {
                Ok(None) => self.wait_no_longer(place),
                Ok(Some(what)) => return self.wait(place, what),
                Err(error) => {
                    if let Some(parked) = self.parked.get_mut(place) {
                        parked.error.get_or_insert(error);
                    }
                }
            }
        }
        self.end_around(cache, place, done);
    }

    /// Does one step of a change. Returns what it has to wait for; its waker is then registered.
    fn step_around(&mut self, cache: &Arc<Cache<E>>, place: usize) -> Result<Option<WaitFor>> {
        let Some(parked) = self.parked.get_mut(place) else { return Ok(None) };
        let Progress::Around(around) = &mut parked.progress else { return Ok(None) };
        let Request { operation, range, buffer, class, .. } = &parked.request;
        let rest = ByteRange { start: around.next, end: range.end };
        let step = match operation {
            Operation::Write => cache.pieces(rest).next().unwrap_or(rest),
            _ => ByteRange { start: rest.start, end: rest.end.min(rest.start + BYPASS_MAX) },
        };
        let data = match operation {
            Operation::Write => {
                let at = (step.start - range.start) as usize;
                &buffer[at..at + step.len() as usize]
            }
            _ => &[],
        };
        let reason = around.reason_now(cache, step);
        let bypass = match reason {
            Some(reason) => cache.begin_bypass(step, reason, &self.waker)?,
            None => Bypass::Cached,
        };
        let ticket = match bypass {
            Bypass::Wait => return Ok(Some(WaitFor::Order)),
            Bypass::Cached => {
                let admission = match operation {
                    Operation::Write => cache.write_marked(*class, step, data, &self.waker)?,
                    _ => {
                        let is_discard = *operation == Operation::Discard;
                        cache.zero(step, is_discard, &mut around.zeroed, &self.waker)?
                    }
                };
                if matches!(admission, Admission::Full) {
                    return Ok(Some(WaitFor::Space));
                }
                if reason.is_some() && cache.is_writeback() {
                    cache.count_refused_bypass(step.len());
                }
                around.cached = true;
                (around.next, around.zeroed) = (step.end, ZeroProgress::default());
                return Ok(None);
            }
            Bypass::Begun(ticket) => ticket,
        };
        let op = match operation {
            Operation::Write => {
                // The backing device and the cache get the same bytes, which no client can change meanwhile.
                let mut buffer = self.spare.take(data.len());
                buffer.copy_from_slice(data);
                BackingOp::Write { offset: step.start, buffer }
            }
            Operation::Discard if self.device.backing.discard_zeroes => BackingOp::Discard { range: step },
            _ => BackingOp::WriteZeroes { range: step },
        };
        around.went_past = true;
        parked.tally.elsewhere += step.len();
        if let Some(reason) = reason {
            parked.tally.outcome = Outcome::Past(reason);
        }
        (around.next, around.zeroed) = (step.end, ZeroProgress::default());
        self.send(InFlightOp { bypass: Some(ticket), ..InFlightOp::without_misses(place, step) }, op);
        Ok(None)
    }

    fn wait_no_longer(&mut self, place: usize) {
        if let Some(parked) = self.parked.get_mut(place) {
            self.meter.end_wait(&mut parked.tally);
        }
    }

    /// The backing device has refused a step that went past the cache by choice: it is cached instead.
    #[inline(never)]
    pub(crate) fn cache_instead(&mut self, place: usize, step: ByteRange) {
        let Some(parked) = self.parked.get_mut(place) else { return };
        let Progress::Around(around) = &mut parked.progress else { return };
        if around.given_up {
            parked.error.get_or_insert(given_up());
            return;
        }
        (around.next, around.reason) = (around.next.min(step.start), None);
        around.zeroed = ZeroProgress::default();
        parked.tally.elsewhere = parked.tally.elsewhere.saturating_sub(step.len());
        if parked.tally.elsewhere == 0 {
            parked.tally.outcome = Outcome::Cached;
        }
        if !self.waiting.contains(&place) {
            self.waiting.push_back(place);
            self.waker.wake_by_ref();
        }
    }

    /// Completes a change whose steps have all returned; a FUA change first gets its flush.
    pub(crate) fn end_around(&mut self, cache: &Arc<Cache<E>>, place: usize, done: &mut Vec<Completion>) {
        let Some(parked) = self.parked.get_mut(place) else { return };
        let Progress::Around(around) = parked.progress else { return };
        if parked.outstanding > 0 || around.next < parked.request.range.end {
            return;
        }
        let fua = parked.request.fua && parked.error.is_none();
        if fua && around.cached {
            parked.error = cache.force_unit_access(&[parked.request.range]).err();
        }
        if fua && around.went_past && parked.error.is_none() {
            let ticket = cache.request_backing_flush();
            parked.progress = Progress::Flushing(ticket);
            return self.await_flush(cache, place, ticket, done);
        }
        self.end_parked(place, None, done);
    }

    /// Waits until the backing device has returned everything that goes past the cache, before the queue is dropped: until then, no
    /// other request may change these ranges.
    pub(crate) fn wait_for_bypasses(&mut self) {
        while self.ops.iter().any(|op| op.bypass.is_some()) {
            let mut finished = core::mem::take(&mut self.finished);
            self.backing.wait(&mut finished);
            let is_stuck = finished.is_empty();
            for op in finished.drain(..) {
                self.finish(op, &mut Vec::new());
            }
            self.finished = finished;
            if is_stuck {
                break;
            }
        }
    }
}

/// Whether the first piece of `range` is to go around a full cache.
fn is_sooner_around<E: Environment>(cache: &Cache<E>, range: ByteRange) -> bool {
    !cache.is_pinned(range)
        && cache.is_writeback()
        && cache.pieces(range).next().is_some_and(|piece| cache.is_sooner_around(piece))
}

impl Around {
    /// Why the next step is to go past the cache at this moment, if it is.
    fn reason_now<E: Environment>(&self, cache: &Cache<E>, step: ByteRange) -> Option<BypassReason> {
        if !cache.is_writeback() {
            return Some(self.reason.unwrap_or(BypassReason::Mode));
        }
        self.reason.filter(|reason| match reason {
            // The mode has changed.
            BypassReason::Mode => false,
            BypassReason::Full => cache.is_sooner_around(step),
            _ => true,
        })
    }
}
