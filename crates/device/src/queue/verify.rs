//! Verification of a range: the copies in the cache where they are, those on the backing device by its own operations.
//!
//! A request is verified window by window. What the cache holds of a window decides what the backing device is asked: to read the
//! window in itself, or for its data where that is compared. Where it cannot read, the range is halved until one sector is left.
//!
//! Invariants: a verification changes nothing that a client sees, except that reads of data of which no good copy is left fail; a
//! part that changed is inspected again, at most [`LOOKS_MAX`] times.
//!
//! Elsewhere: what the cache holds (`cbd_engine::Part`), and when a device is verified (its users).

use super::{Queue, given_up};
use alloc::{collections::VecDeque, format, sync::Arc, vec::Vec};
use cbd_engine::{Cache, Comparison, Environment, Holding, Miss, Part, Repair};
use cbd_types::{
    AlignedBuffer, BackingOp, BackingQueue, ByteRange, Error, Finding, Flaw, OpToken, Origin, Result,
    Verified, Verify, VerifyLevel, backing::BackingDone,
};

/// Bytes that are inspected at a time; a chunk has whole windows.
const WINDOW: u64 = 1 << 20;
/// A longer request is legal, but reports only at its end.
pub const VERIFY_MAX: u64 = 4 << 20;
/// Operations of the backing device that verifications have in flight.
const IN_FLIGHT_MAX: usize = 4;
/// How often a part that changes is inspected.
const LOOKS_MAX: u8 = 4;
/// The tokens of operations for verifications, in the queue of the backing device.
pub(crate) const VERIFY_TOKENS: u64 = 1 << 62;

/// A request that is not complete.
struct Request {
    id: u64,
    verify: Verify,
    /// Everything before this offset has been inspected.
    next: u64,
    /// Probes and repairs of it that have not ended.
    outstanding: usize,
    report: Verified,
}

/// A question to the backing device.
struct Probe {
    /// The number of its request.
    request: u64,
    range: ByteRange,
    /// The parts of the range, in order.
    parts: Vec<Part>,
    /// The read that repairs the only part.
    miss: Option<Miss>,
    /// How often the range was inspected before.
    looks: u8,
}

/// A part of the backing device that is to be written again.
struct Rewrite {
    request: u64,
    part: Part,
    flaw: Flaw,
}

/// The verifications of one queue.
#[derive(Default)]
pub(super) struct Verifications {
    next_request: u64,
    next_token: u64,
    requests: VecDeque<(u64, Request)>,
    probes: VecDeque<Probe>,
    in_flight: Vec<(u64, Probe)>,
    /// Ranges that changed and are to be inspected again: the number of the request, the range, and how often it was inspected.
    again: VecDeque<(u64, ByteRange, u8)>,
    /// Rewrites that wait for space.
    rewrites: VecDeque<Rewrite>,
    ended: Vec<(u64, Result<Verified>)>,
    scratch: AlignedBuffer,
    parts: Vec<Part>,
}

impl Verifications {
    /// Whether nothing is in progress. Completed requests may wait to be taken.
    pub(super) fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.in_flight.is_empty()
    }

    /// Whether the backing device or the cache works for a verification.
    pub(super) fn is_quiet(&self) -> bool {
        self.in_flight.is_empty()
            && self.probes.is_empty()
            && self.again.is_empty()
            && self.rewrites.is_empty()
    }

    /// The reads that are to repair the cache.
    pub(super) fn drain_misses(&mut self) -> impl Iterator<Item = Miss> {
        let in_flight = self.in_flight.drain(..).map(|(_, probe)| probe);
        in_flight.chain(self.probes.drain(..)).filter_map(|probe| probe.miss)
    }

    fn request(&mut self, number: u64) -> Option<&mut Request> {
        self.requests.iter_mut().find(|(known, _)| *known == number).map(|(_, request)| request)
    }

    fn note(&mut self, number: u64, range: ByteRange, flaw: Flaw, repaired: bool) {
        if let Some(request) = self.request(number) {
            request.report.findings.push(Finding { range, flaw, repaired });
        }
    }

    fn note_changed(&mut self, number: u64, range: ByteRange) {
        if let Some(request) = self.request(number) {
            request.report.changed_bytes += range.len();
            request.report.changed.push(range);
        }
    }

    fn fail(&mut self, number: u64, error: Error) {
        if let Some(request) = self.request(number) {
            request.report.error.get_or_insert(error);
        }
    }

    fn add_outstanding(&mut self, number: u64) {
        if let Some(request) = self.request(number) {
            request.outstanding += 1;
        }
    }

    fn end_outstanding(&mut self, number: u64) {
        if let Some(request) = self.request(number) {
            request.outstanding -= 1;
        }
    }

    fn probe(&mut self, probe: Probe) {
        self.add_outstanding(probe.request);
        self.probes.push_back(probe);
    }

    /// Moves the requests that are complete to those that can be taken.
    fn complete(&mut self) {
        let is_complete =
            |request: &Request| request.next >= request.verify.range.end && request.outstanding == 0;
        while let Some(at) = self.requests.iter().position(|(_, request)| is_complete(request)) {
            if let Some((_, mut request)) = self.requests.remove(at) {
                merge(&mut request.report.findings);
                self.ended.push((request.id, Ok(request.report)));
            }
        }
    }
}

/// Sorts findings, and merges adjacent ones of the same kind.
fn merge(findings: &mut Vec<Finding>) {
    cbd_types::heap_sort_by_key(findings, |finding| finding.range.start);
    findings.dedup_by(|next, before| {
        let joins = (next.flaw, next.repaired) == (before.flaw, before.repaired)
            && before.range.end >= next.range.start;
        if joins {
            before.range.end = before.range.end.max(next.range.end);
        }
        joins
    });
}

impl<E: Environment, Q: BackingQueue, const COUNTS: bool> Queue<E, Q, COUNTS> {
    /// Submits a verification as request `id`. It yields to other requests, and continues in [`poll`](Self::poll), a window at a
    /// time; [`take_verified`](Self::take_verified) returns its result. [`give_up`](Self::give_up) cancels it.
    pub fn verify(&mut self, id: u64, verify: Verify) {
        if let Err(error) = self.check(cbd_types::Operation::Flush, verify.range, 0) {
            self.verifications.ended.push((id, Err(error)));
            return;
        }
        let number = self.verifications.next_request;
        self.verifications.next_request += 1;
        let request =
            Request { id, verify, next: verify.range.start, outstanding: 0, report: Verified::default() };
        self.verifications.requests.push_back((number, request));
        self.waker.wake_by_ref();
    }

    /// The results of the verifications that have completed, with the identifiers of their requests.
    pub fn take_verified(&mut self) -> Vec<(u64, Result<Verified>)> {
        core::mem::take(&mut self.verifications.ended)
    }

    /// Cancels all verifications; those that the backing device works for complete when it has returned.
    pub(super) fn give_up_verifications(&mut self) {
        let verifications = &mut self.verifications;
        let probes = core::mem::take(&mut verifications.probes);
        for Probe { miss, .. } in probes {
            if let (Some(miss), Some(cache)) = (miss, &*self.cache) {
                cache.cancel_fill(miss);
            }
        }
        verifications.again.clear();
        verifications.rewrites.clear();
        for (_, request) in core::mem::take(&mut verifications.requests) {
            verifications.ended.push((request.id, Err(given_up())));
        }
    }

    /// Makes progress with verifications, by a bounded step: other requests of the thread come between. While the route is held only what
    /// has begun goes on. Out of line: clients' requests need less stack.
    #[inline(never)]
    pub(super) fn verify_further(&mut self) {
        for _ in 0..self.verifications.rewrites.len() {
            if let Some(rewrite) = self.verifications.rewrites.pop_front() {
                self.write_again(rewrite);
            }
        }
        let follows_route = self.follows_route();
        if self.verifications.probes.is_empty() || !follows_route {
            self.inspect_next(follows_route);
        }
        while self.verifications.in_flight.len() < IN_FLIGHT_MAX
            && let Some(probe) = self.verifications.probes.pop_front()
        {
            self.send_probe(probe);
        }
        self.verifications.complete();
        let verifications = &self.verifications;
        let has_more = !verifications.requests.is_empty()
            && verifications.in_flight.len() < IN_FLIGHT_MAX
            && follows_route;
        if !verifications.ended.is_empty() || (has_more && verifications.rewrites.is_empty()) {
            self.waker.wake_by_ref();
        }
    }

    /// Inspects a range that has changed, or else the next window of the first request that is not inspected in full. While the route is
    /// held, ranges that have changed are counted.
    fn inspect_next(&mut self, follows_route: bool) {
        while let Some((number, range, looks)) = self.verifications.again.pop_front() {
            if looks < LOOKS_MAX && follows_route {
                self.inspect(number, range, looks);
                return self.verifications.end_outstanding(number);
            }
            self.verifications.note_changed(number, range);
            self.verifications.end_outstanding(number);
        }
        if !follows_route {
            return;
        }
        let next = self.verifications.requests.iter_mut().find_map(|(number, request)| {
            let range = request.verify.range;
            let window = ByteRange { start: request.next, end: (request.next / WINDOW + 1) * WINDOW };
            let window = window.intersection(&range).filter(|window| !window.is_empty())?;
            request.next = window.end;
            Some((*number, window))
        });
        if let Some((number, window)) = next {
            self.inspect(number, window, 0);
        }
    }

    fn inspect(&mut self, number: u64, window: ByteRange, looks: u8) {
        let mut parts = core::mem::take(&mut self.verifications.parts);
        parts.clear();
        let mut scratch = core::mem::take(&mut self.verifications.scratch);
        scratch.resize(WINDOW as usize);
        let cache = Arc::clone(&self.cache);
        match &*cache {
            Some(cache) => {
                if let Err(error) = cache.inspect(window, &mut scratch, &mut parts) {
                    self.verifications.fail(number, error);
                }
                self.decide(cache, number, &parts, looks);
            }
            None => {
                let probe = Probe { request: number, range: window, parts: Vec::new(), miss: None, looks: 0 };
                self.verifications.probe(probe);
            }
        }
        (self.verifications.parts, self.verifications.scratch) = (parts, scratch);
    }

    /// Notes what is known of the parts, and asks the backing device for the rest.
    fn decide(&mut self, cache: &Arc<Cache<E>>, number: u64, parts: &[Part], looks: u8) {
        let Some(level) = self.verifications.request(number).map(|request| request.verify.level) else {
            return;
        };
        let mut probe: Option<Probe> = None;
        for part in parts {
            self.note_part(cache, number, part, looks);
            let is_asked = match part.holding {
                Holding::Nothing => true,
                Holding::Clean => level > VerifyLevel::Newest,
                _ => false,
            };
            if !is_asked {
                continue;
            }
            match &mut probe {
                Some(probe) if probe.range.end == part.range.start => {
                    probe.range.end = part.range.end;
                    probe.parts.push(*part);
                }
                _ => {
                    let next = Probe {
                        request: number,
                        range: part.range,
                        parts: alloc::vec![*part],
                        miss: None,
                        looks,
                    };
                    probe.replace(next).into_iter().for_each(|probe| self.verifications.probe(probe));
                }
            }
        }
        probe.into_iter().for_each(|probe| self.verifications.probe(probe));
    }

    fn note_part(&mut self, cache: &Arc<Cache<E>>, number: u64, part: &Part, looks: u8) {
        let verifications = &mut self.verifications;
        if part.holding != Holding::Nothing
            && looks == 0
            && let Some(request) = verifications.request(number)
        {
            request.report.cache_bytes += part.range.len();
        }
        if part.repaired_record {
            verifications.note(number, part.range, Flaw::RecordCopy, true);
        }
        match part.holding {
            Holding::Nothing | Holding::Clean | Holding::Dirty => {}
            Holding::DirtyDamaged => verifications.note(number, part.range, Flaw::DirtyDamaged, false),
            Holding::Quarantined => verifications.note(number, part.range, Flaw::Quarantined, false),
            Holding::Changed => self.look_again(number, part.range, looks),
            Holding::CleanDamaged => match cache.begin_repair(part) {
                Some(miss) => verifications.probe(Probe {
                    request: number,
                    range: part.range,
                    parts: alloc::vec![*part],
                    miss: Some(miss),
                    looks,
                }),
                None => self.look_again(number, part.range, looks),
            },
        }
    }

    /// Inspects a range again later, because it changed.
    fn look_again(&mut self, number: u64, range: ByteRange, looks: u8) {
        self.verifications.add_outstanding(number);
        self.verifications.again.push_back((number, range, looks + 1));
    }

    fn send_probe(&mut self, probe: Probe) {
        let range = probe.range;
        let level = self.verifications.request(probe.request).map(|request| request.verify.level);
        let compares = probe.parts.iter().any(|part| part.holding == Holding::Clean);
        let reads = probe.miss.is_some() || (compares && level == Some(VerifyLevel::Agree));
        let op = if reads {
            BackingOp::Read { offset: range.start, buffer: self.spare.take(range.len() as usize) }
        } else {
            BackingOp::Verify { range }
        };
        let token = VERIFY_TOKENS | self.verifications.next_token;
        self.verifications.next_token = (self.verifications.next_token + 1) % VERIFY_TOKENS;
        self.verifications.in_flight.push((token, probe));
        self.backing.set_origin(Origin::Verify);
        self.backing.submit(OpToken(token), op);
    }

    /// Processes what the backing device has returned for a verification.
    #[inline(never)]
    pub(super) fn probe_finished(&mut self, finished: BackingDone) {
        let in_flight = &mut self.verifications.in_flight;
        let Some(at) = in_flight.iter().position(|(token, _)| *token == finished.token.0) else { return };
        let (_, probe) = in_flight.swap_remove(at);
        let number = probe.request;
        let is_readable = finished.result.is_ok();
        let buffer = match finished.op {
            BackingOp::Read { buffer, .. } => Some(buffer),
            _ => None,
        };
        if is_readable && let Some(request) = self.verifications.request(number) {
            request.report.backing_bytes += probe.range.len();
        }
        let found = buffer.as_deref().filter(|_| is_readable);
        let mut scratch = core::mem::take(&mut self.verifications.scratch);
        scratch.resize(WINDOW as usize);
        let cache = Arc::clone(&self.cache);
        match (&*cache, finished.result) {
            (Some(cache), _) if probe.miss.is_some() => self.repair(cache, probe, found, &mut scratch),
            (Some(cache), Ok(())) => {
                if let Some(found) = found {
                    self.compare(cache, &probe, found, &mut scratch);
                }
            }
            (None, Ok(())) => {}
            (_, Err(error)) => self.unreadable(probe, error),
        }
        self.verifications.scratch = scratch;
        buffer.into_iter().for_each(|buffer| self.spare.give(buffer));
        self.verifications.end_outstanding(number);
    }

    /// Compares the clean parts of a probe with what was read.
    fn compare(&mut self, cache: &Arc<Cache<E>>, probe: &Probe, found: &[u8], scratch: &mut [u8]) {
        for part in probe.parts.iter().filter(|part| part.holding == Holding::Clean) {
            let at = (part.range.start - probe.range.start) as usize;
            let found = &found[at..at + part.range.len() as usize];
            match cache.compare(part, found, scratch) {
                Comparison::Same => {}
                Comparison::Changed => self.look_again(probe.request, part.range, probe.looks),
                // What was in flight when it was read first has returned then.
                Comparison::Differs(_) if probe.looks == 0 => self.look_again(probe.request, part.range, 0),
                Comparison::Differs(range) => {
                    let flaw = if part.is_written() { Flaw::BackingDiffers } else { Flaw::BackingChanged };
                    self.found_on_backing(probe.request, part.narrowed(range), flaw);
                }
            }
        }
    }

    /// The backing device cannot read a range: it is halved, until one sector is left.
    fn unreadable(&mut self, probe: Probe, error: Error) {
        let sector = u64::from(self.device.geometry().sector);
        if probe.range.len() > sector {
            let middle = probe.range.start + (probe.range.len() / 2).next_multiple_of(sector);
            let (first, second) = (
                ByteRange { start: probe.range.start, end: middle },
                ByteRange { start: middle, end: probe.range.end },
            );
            for range in [first, second] {
                let narrow = |part: &Part| Some(part.narrowed(part.range.intersection(&range)?));
                let parts = probe.parts.iter().filter_map(narrow).collect();
                self.verifications.probe(Probe { range, parts, miss: None, ..probe });
            }
            return;
        }
        let cache = Arc::clone(&self.cache);
        match (&*cache, probe.parts.first()) {
            (Some(cache), Some(part)) if !cache.is_unchanged(part) => {
                self.look_again(probe.request, probe.range, probe.looks);
            }
            (Some(_), Some(part)) if part.holding == Holding::Clean => {
                self.found_on_backing(probe.request, *part, Flaw::BackingUnreadable);
            }
            _ if error.kind() == cbd_types::ErrorKind::Stopped => {
                self.verifications.fail(probe.request, error)
            }
            _ => self.verifications.note(probe.request, probe.range, Flaw::Unreadable, false),
        }
    }

    /// The backing device has not what the cache holds undamaged.
    fn found_on_backing(&mut self, number: u64, part: Part, flaw: Flaw) {
        let repairs = self.verifications.request(number).is_some_and(|request| request.verify.repair);
        // What another program has written is never overwritten by a verification.
        if !repairs || flaw == Flaw::BackingChanged {
            return self.verifications.note(number, part.range, flaw, false);
        }
        self.verifications.add_outstanding(number);
        self.verifications.rewrites.push_back(Rewrite { request: number, part, flaw });
        self.waker.wake_by_ref();
    }

    fn write_again(&mut self, rewrite: Rewrite) {
        let cache = Arc::clone(&self.cache);
        let Rewrite { request, part, flaw } = rewrite;
        let mut scratch = core::mem::take(&mut self.verifications.scratch);
        scratch.resize(WINDOW as usize);
        let result = match &*cache {
            Some(cache) => cache.write_again(&part, &mut scratch, &self.waker),
            None => Ok(Repair::Changed),
        };
        self.verifications.scratch = scratch;
        match result {
            Ok(Repair::Full) if self.follows_route() => {
                return self.verifications.rewrites.push_back(rewrite);
            }
            Ok(Repair::Full) => self.verifications.note(request, part.range, flaw, false),
            Ok(Repair::Done) => self.verifications.note(request, part.range, flaw, true),
            Ok(Repair::Changed | Repair::Lost) => self.verifications.note_changed(request, part.range),
            Err(error) => {
                self.verifications.note(request, part.range, flaw, false);
                let text = format!("{} was not repaired", part.range);
                self.verifications.fail(request, error.while_doing(text));
            }
        }
        self.verifications.end_outstanding(request);
    }

    /// Repairs the copy in the cache with what was read; `None` if it cannot be read.
    fn repair(&mut self, cache: &Arc<Cache<E>>, probe: Probe, found: Option<&[u8]>, scratch: &mut [u8]) {
        let (Some(miss), Some(part)) = (probe.miss, probe.parts.first()) else { return };
        let number = probe.request;
        match cache.end_repair(part, miss, found, probe.looks > 0, scratch) {
            Repair::Done => self.verifications.note(number, part.range, Flaw::CacheDamaged, true),
            Repair::Full => self.verifications.note(number, part.range, Flaw::CacheDamaged, false),
            Repair::Lost => self.verifications.note(number, part.range, Flaw::BothDamaged, false),
            Repair::Changed => self.look_again(number, part.range, probe.looks),
        }
    }
}
