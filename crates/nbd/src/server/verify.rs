//! Block status that is verified: requests in the context `cbd:verify`.
//!
//! A request is verified in steps, each a verification in the queue of the device. Steps of a few requests are in the device
//! at a time, so that a client with many requests has no more memory and no more of the disk than that.
//!
//! Invariants: a reply covers the request from its start, [`COVERED_MAX`] bytes at most; an error is the reply only if
//! nothing was covered before it. Nothing is submitted for a client that has disconnected.
//!
//! Elsewhere: how a range is verified (the device); other contexts, and the descriptors (`status`).

use super::status::{Runs, descriptors_max};
use crate::protocol::status_flag;
use cbd_export::RequestQueue;
use cbd_types::{ByteRange, Error, ErrorKind, Flaw, Result, Verified, Verify, VerifyLevel};
use std::collections::VecDeque;

/// Bytes of a step; the device verifies no more at a time.
const STEP: u64 = 4 << 20;
/// Most bytes that a reply covers.
const COVERED_MAX: u64 = 16 << 20;
/// Steps of a connection in the device: while one waits for the disk, the other is prepared.
const IN_DEVICE_MAX: usize = 2;

/// A request for block status.
#[derive(Debug)]
pub(super) struct StatusRequest {
    pub(super) cookie: u64,
    pub(super) range: ByteRange,
    /// Whether only the first extent of each context is wanted.
    pub(super) one: bool,
    /// Bytes that are counted for it.
    pub(super) cost: usize,
}

/// A request that is complete, with its descriptors.
type Complete = (StatusRequest, Result<Vec<(u32, u32)>>);

struct Job {
    request: StatusRequest,
    /// Its place in the order of the requests.
    place: u64,
    /// The end of what was verified.
    at: u64,
    /// The end of what the reply may cover.
    end: u64,
    runs: Runs,
}

impl Job {
    fn step(&self) -> ByteRange {
        ByteRange { start: self.at, end: (self.at / STEP * STEP + STEP).min(self.end) }
    }

    fn complete(self, result: Result<()>) -> Complete {
        let result = if self.at > self.request.range.start { Ok(()) } else { result };
        (self.request, result.map(|()| self.runs.into_found()))
    }
}

/// The requests of a connection that are verified.
#[derive(Default)]
pub(super) struct Verifications {
    /// Requests whose next step is not in the device, in order.
    waiting: VecDeque<Job>,
    /// Requests with a step in the device, by its number.
    in_device: Vec<(u64, Job)>,
    next_number: u64,
    next_place: u64,
}

impl Verifications {
    /// Whether there are no requests.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.in_device.is_empty()
    }

    /// Whether a step can be submitted.
    pub(super) fn can_begin(&self) -> bool {
        !self.waiting.is_empty() && self.in_device.len() < IN_DEVICE_MAX
    }

    pub(super) fn add(&mut self, request: StatusRequest) {
        let range = request.range;
        let runs = Runs::new(descriptors_max(request.one));
        let end = range.end.min(range.start + COVERED_MAX);
        self.waiting.push_back(Job { request, place: self.next_place, at: range.start, end, runs });
        self.next_place += 1;
    }

    /// Takes the steps that have returned, and submits one more if the replies are still wanted; returns the requests that are
    /// complete.
    pub(super) fn further(&mut self, queue: &mut dyn RequestQueue, is_wanted: bool) -> Vec<Complete> {
        let mut complete = Vec::new();
        if !self.in_device.is_empty() {
            let returned = queue.take_verified().into_iter();
            complete.extend(returned.filter_map(|(number, result)| self.step_done(number, result)));
        }
        if is_wanted {
            complete.extend(self.begin(queue));
        } else {
            complete.extend(std::iter::from_fn(|| self.cut_short()));
        }
        complete
    }

    /// Submits a step of the first request that waits, if there is room for it. Returns the request if the queue refuses
    /// it.
    fn begin(&mut self, queue: &mut dyn RequestQueue) -> Option<Complete> {
        if !self.can_begin() {
            return None;
        }
        let job = self.waiting.pop_front()?;
        let number = self.next_number;
        self.next_number += 1;
        let verify = Verify { range: job.step(), level: VerifyLevel::Newest, repair: false };
        match queue.verify(number, verify) {
            Ok(()) => self.in_device.push((number, job)),
            Err(error) => return Some(job.complete(Err(error))),
        }
        None
    }

    /// A step has returned. Returns its request if that is complete; otherwise it waits again, before those that came later.
    fn step_done(&mut self, number: u64, result: Result<Verified>) -> Option<Complete> {
        let at = self.in_device.iter().position(|(known, _)| *known == number)?;
        let (_, mut job) = self.in_device.swap_remove(at);
        let verified = match result {
            Ok(Verified { error: Some(error), .. }) | Err(error) => return Some(job.complete(Err(error))),
            Ok(verified) => verified,
        };
        let step = job.step();
        add(&mut job.runs, step, &verified);
        job.at = step.end;
        if job.at == job.end || job.runs.is_full() {
            return Some(job.complete(Ok(())));
        }
        let before = self.waiting.partition_point(|waiting| waiting.place < job.place);
        self.waiting.insert(before, job);
        None
    }

    /// Ends a request that waits, with what was verified of it: no further steps may be submitted.
    fn cut_short(&mut self) -> Option<Complete> {
        let job = self.waiting.pop_front()?;
        Some(job.complete(Err(Error::new(
            ErrorKind::Stopped,
            "the verification was not continued: the server stops",
        ))))
    }
}

/// Adds what was found in `step`.
fn add(runs: &mut Runs, step: ByteRange, verified: &Verified) {
    let flawed = verified.findings.iter().filter_map(|found| Some((found.range, flags_of(found.flaw)?)));
    let mut marked: Vec<_> = flawed.chain(verified.changed.iter().map(|range| (*range, 0))).collect();
    marked.sort_by_key(|(range, _)| range.start);
    let mut at = step.start;
    for (range, flags) in marked {
        let Some(range) = range.intersection(&ByteRange { start: at, end: step.end }) else { continue };
        runs.add(range.start - at, status_flag::CHECKED);
        runs.add(range.len(), flags);
        at = range.end;
    }
    runs.add(step.end - at, status_flag::CHECKED);
}

/// The flags for a flaw; `None` if the newest data is right nevertheless.
const fn flags_of(flaw: Flaw) -> Option<u32> {
    match flaw {
        Flaw::Unreadable => Some(status_flag::CHECKED | status_flag::UNREADABLE),
        _ if flaw.is_lost() => Some(status_flag::CHECKED | status_flag::DAMAGED),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_types::{Completion, Finding, Request};
    use std::os::fd::RawFd;

    const MIB: u64 = 1 << 20;

    /// Notes what is submitted.
    #[derive(Default)]
    struct Queue(Vec<(u64, Verify)>);

    impl RequestQueue for Queue {
        fn submit(&mut self, _: Request, _: &mut Vec<Completion>) {
            unreachable!("a verification is no request")
        }

        fn poll(&mut self, _: &mut Vec<Completion>) {}

        fn verify(&mut self, id: u64, verify: Verify) -> Result<()> {
            self.0.push((id, verify));
            Ok(())
        }

        fn parked(&self) -> usize {
            0
        }

        fn wait_descriptors(&self) -> Vec<RawFd> {
            Vec::new()
        }
    }

    fn request(cookie: u64, range: ByteRange, one: bool) -> StatusRequest {
        StatusRequest { cookie, range, one, cost: 1 }
    }

    fn found(start: u64, length: u64, flaw: Flaw) -> Finding {
        Finding { range: ByteRange::at(start, length), flaw, repaired: false }
    }

    fn only(findings: Vec<Finding>) -> Result<Verified> {
        Ok(Verified { findings, ..Verified::default() })
    }

    /// The steps of one request, whose results are those of `result_of`, and its descriptors.
    fn run(
        request: StatusRequest,
        result_of: impl Fn(ByteRange) -> Result<Verified>,
    ) -> (Vec<ByteRange>, Result<Vec<(u32, u32)>>) {
        let (mut verifications, mut queue) = (Verifications::default(), Queue::default());
        verifications.add(request);
        loop {
            assert!(verifications.begin(&mut queue).is_none());
            let (number, verify) = *queue.0.last().expect("a step");
            assert_eq!((verify.level, verify.repair), (VerifyLevel::Newest, false));
            if let Some((_, result)) = verifications.step_done(number, result_of(verify.range)) {
                assert!(verifications.is_empty());
                return (queue.0.into_iter().map(|(_, verify)| verify.range).collect(), result);
            }
        }
    }

    #[test]
    fn each_flaw_of_the_newest_data_has_its_flag_and_others_have_none() {
        let range = ByteRange::at(4096, 9 * 8192);
        let findings: Vec<_> =
            (0..).zip(Flaw::ALL).map(|(at, flaw)| found(4096 + at * 8192, 512, flaw)).collect();
        let (_, result) = run(request(0, range, false), |_| only(findings.clone()));
        let flagged: Vec<_> =
            result.expect("verified").into_iter().filter(|(_, flags)| *flags != 1).collect();
        // Unreadable, damaged dirty, both damaged, quarantined.
        assert_eq!(flagged, [(512, 5), (512, 3), (512, 3), (512, 3)]);
    }

    #[test]
    fn nothing_is_said_about_what_clients_changed_meanwhile() {
        let result = Verified {
            findings: vec![found(8192, 512, Flaw::Quarantined)],
            changed: vec![ByteRange::at(12288, 4096), ByteRange::at(0, 4096)],
            ..Verified::default()
        };
        let mut runs = Runs::new(9);
        add(&mut runs, ByteRange::at(0, 20480), &result);
        assert_eq!(runs.into_found(), [(4096, 0), (4096, 1), (512, 3), (3584, 1), (4096, 0), (4096, 1)]);
    }

    #[test]
    fn a_long_request_is_verified_in_steps_and_its_reply_covers_a_part_of_it() {
        let (steps, result) = run(request(0, ByteRange::at(MIB, 1 << 31), false), |step| {
            only(vec![found(step.start + 512, 512, Flaw::Unreadable)])
        });
        let borders: Vec<_> = steps.iter().map(|step| step.start / MIB).collect();
        assert_eq!((borders, steps.last().expect("steps").end), (vec![1, 4, 8, 12, 16], MIB + COVERED_MAX));
        let descriptors = result.expect("verified");
        assert_eq!(descriptors.len(), 11);
        assert_eq!(descriptors[2], (3 * MIB as u32 - 1024 + 512, 1), "a run across steps is one descriptor");
        assert_eq!(descriptors.iter().map(|(length, _)| u64::from(*length)).sum::<u64>(), COVERED_MAX);
    }

    #[test]
    fn a_request_for_one_extent_ends_with_the_step_in_which_it_ends() {
        let flaw = || found(5 * MIB, 512, Flaw::Unreadable);
        let (steps, result) = run(request(0, ByteRange::at(0, 12 * MIB), true), |_| only(vec![flaw()]));
        assert_eq!((steps.len(), result.expect("verified")), (2, vec![(5 * MIB as u32, 1)]));
    }

    #[test]
    fn an_error_is_the_reply_only_if_nothing_was_verified_before() {
        let error = || Error::new(ErrorKind::Stopped, "the disk has gone");
        let range = ByteRange::at(0, 12 * MIB);
        let (_, result) = run(request(0, range, false), |_| Err(error()));
        assert_eq!(result.expect_err("it failed").kind(), ErrorKind::Stopped);
        let (_, result) =
            run(request(0, range, false), |step| if step.start == 0 { only(vec![]) } else { Err(error()) });
        assert_eq!(result.expect("a part"), [(STEP as u32, 1)]);
        let (_, result) =
            run(request(0, range, false), |_| Ok(Verified { error: Some(error()), ..Verified::default() }));
        assert_eq!(result.expect_err("a part was not inspected").kind(), ErrorKind::Stopped);
    }

    #[test]
    fn few_steps_are_in_the_device_and_the_first_requests_end_first() {
        let (mut verifications, mut queue) = (Verifications::default(), Queue::default());
        for cookie in 0..1000 {
            verifications.add(request(cookie, ByteRange::at(0, 2 * STEP), false));
        }
        let mut order = Vec::new();
        let mut done = 0;
        while !verifications.is_empty() {
            while verifications.can_begin() {
                assert!(verifications.begin(&mut queue).is_none());
            }
            assert!(queue.0.len() - done <= IN_DEVICE_MAX);
            let (number, _) = queue.0[done];
            done += 1;
            let complete = verifications.step_done(number, only(vec![]));
            order.extend(complete.map(|(request, _)| request.cookie));
        }
        assert_eq!(order, (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn a_request_that_is_cut_short_has_what_was_verified() {
        let (mut verifications, mut queue) = (Verifications::default(), Queue::default());
        verifications.add(request(1, ByteRange::at(0, 2 * STEP), false));
        verifications.add(request(2, ByteRange::at(0, STEP), false));
        assert!(verifications.begin(&mut queue).is_none());
        assert!(verifications.step_done(0, only(vec![])).is_none());
        let mut cut: Vec<_> = std::iter::from_fn(|| verifications.cut_short()).collect();
        let (second, first) = (cut.pop().expect("two"), cut.pop().expect("two"));
        assert_eq!((first.0.cookie, first.1.expect("a step of it")), (1, vec![(STEP as u32, 1)]));
        assert_eq!((second.0.cookie, second.1.expect_err("nothing").kind()), (2, ErrorKind::Stopped));
        assert!(verifications.is_empty());
    }
}
