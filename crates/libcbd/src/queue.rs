//! Queues: many requests at a time from one thread.
//!
//! Invariants: a request whose data is in the cache is complete when its submission returns; the other requests make progress in
//! `poll` and `wait`. A request completes once. Dropping a queue cancels the requests in flight: a write may or may not have
//! happened, as after a crash.
//!
//! Elsewhere: the execution of requests (`cbd-device`).

use crate::device::{Running, range_at};
use crate::verify::check_queued;
use cbd_export::RequestQueue;
use cbd_export::wake::{Interest, WaitSet};
use cbd_runtime::{DeviceQueue, ProcessEnvironment};
use cbd_types::{AlignedBuffer, Completion, Request, Result, Verified, Verify};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A queue of the device with the descriptors to wait on.
pub(crate) struct Waiting {
    pub(crate) queue: DeviceQueue<ProcessEnvironment>,
    done: Vec<Completion>,
    /// Verifications in the queue.
    verifying: usize,
    verified: Vec<(u64, Result<Verified>)>,
    set: WaitSet,
}

impl Waiting {
    pub(crate) fn new(running: &Running) -> Result<Self> {
        let queue = running.run.device().device_queue()?;
        let mut set = WaitSet::new();
        for descriptor in queue.wait_descriptors() {
            set.add(descriptor, Interest::Read);
        }
        Ok(Self { queue, done: Vec::new(), verifying: 0, verified: Vec::new(), set })
    }

    pub(crate) fn submit(&mut self, request: Request) {
        self.queue.submit(request, &mut self.done);
    }

    /// Waits for the only request in flight.
    pub(crate) fn complete_one(&mut self) -> Result<AlignedBuffer> {
        loop {
            if let Some(done) = self.done.pop() {
                return done.result.map(|()| done.buffer);
            }
            self.queue.poll(&mut self.done);
            if self.done.is_empty() {
                self.set.wait(None)?;
            }
        }
    }

    /// Whether requests are in the queue.
    fn is_busy(&self) -> bool {
        self.queue.parked() > 0 || self.verifying > 0
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.queue.parked() == 0 && self.done.is_empty()
    }
}

/// A queue to a device. It may move between threads; one thread at a time may use it.
pub struct Queue {
    waiting: Waiting,
    // Declared last: the device ends with its last queue.
    running: Arc<Running>,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Queue({} in flight)", self.in_flight())
    }
}

impl Queue {
    pub(crate) fn new(waiting: Waiting, running: Arc<Running>) -> Self {
        Self { waiting, running }
    }

    /// Submits a request. Its completion comes from [`poll`](Self::poll), even after a failure.
    ///
    /// # Errors
    /// Only when the device has failed and refuses every request.
    pub fn submit(&mut self, request: Request) -> Result<()> {
        let waiting = &mut self.waiting;
        self.running.guarded(|| {
            waiting.submit(request);
            Ok(())
        })
    }

    /// Writes `data` to `offset`, without an intermediate copy if the cache has space at once. The completion comes from
    /// [`poll`](Self::poll); in that case its buffer is empty.
    ///
    /// # Errors
    /// As [`submit`](Self::submit), and for a range past the end of any device.
    pub fn write_at(&mut self, id: u64, data: &[u8], offset: u64, fua: bool) -> Result<()> {
        let range = range_at(offset, data.len())?;
        let waiting = &mut self.waiting;
        self.running.guarded(|| {
            if let Some(result) = waiting.queue.write_from(id, range, data, fua) {
                waiting.done.push(Completion { id, result, buffer: AlignedBuffer::default() });
            }
            Ok(())
        })
    }

    /// Reads into `buffer` if all data is in the cache; the completion then has no buffer. Otherwise the buffer of the completion
    /// holds the data.
    pub(crate) fn read_at(&mut self, id: u64, buffer: &mut [u8], offset: u64) -> Result<()> {
        let range = range_at(offset, buffer.len())?;
        let waiting = &mut self.waiting;
        self.running.guarded(|| {
            if let Some(result) = waiting.queue.read_into(id, range, buffer) {
                waiting.done.push(Completion { id, result, buffer: AlignedBuffer::default() });
            }
            Ok(())
        })
    }

    /// Submits a verification of [`QUEUED_VERIFY_MAX`](crate::QUEUED_VERIFY_MAX) bytes at most. It yields to the other requests of
    /// the queue and makes progress in [`poll`](Self::poll); its result comes from [`take_verified`](Self::take_verified).
    /// [`Device::verify`](crate::Device::verify) verifies longer ranges.
    ///
    /// # Errors
    /// As [`submit`](Self::submit), and for a longer range.
    pub fn verify(&mut self, id: u64, verify: Verify) -> Result<()> {
        check_queued(verify.range)?;
        let waiting = &mut self.waiting;
        self.running.guarded(|| {
            waiting.queue.verify(id, verify)?;
            waiting.verifying += 1;
            Ok(())
        })
    }

    /// The results of verifications, with the values of `id`: of those that a [`poll`](Self::poll) or [`wait`](Self::wait) found
    /// complete, and that were not taken before.
    pub fn take_verified(&mut self) -> Vec<(u64, Result<Verified>)> {
        std::mem::take(&mut self.waiting.verified)
    }

    /// Moves completions to `done`; does not block.
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn poll(&mut self, done: &mut Vec<Completion>) -> Result<()> {
        let waiting = &mut self.waiting;
        self.running.guarded(|| {
            if waiting.is_busy() {
                waiting.queue.poll(&mut waiting.done);
            }
            if waiting.verifying > 0 {
                let verified = waiting.queue.take_verified();
                waiting.verifying -= verified.len();
                waiting.verified.extend(verified);
            }
            done.append(&mut waiting.done);
            Ok(())
        })
    }

    /// As [`poll`](Self::poll), but waits until at least `least` requests have completed, or all that are in
    /// flight, or until the timeout. Results of verifications that were not taken count as completed.
    ///
    /// # Errors
    /// As [`submit`](Self::submit), and when the system refuses to wait.
    pub fn wait(
        &mut self,
        done: &mut Vec<Completion>,
        least: usize,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let end = timeout.map(|timeout| Instant::now() + timeout);
        let begun_with = done.len();
        loop {
            self.poll(done)?;
            let completed = done.len() - begun_with + self.waiting.verified.len();
            if completed >= least || !self.waiting.is_busy() {
                return Ok(());
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(());
            }
            self.waiting.set.wait(left)?;
        }
    }

    /// Submitted requests whose completion was not returned yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        let waiting = &self.waiting;
        waiting.queue.parked() + waiting.done.len() + waiting.verifying + waiting.verified.len()
    }

    /// Descriptors for the program's own event loop: one of them is readable when [`poll`](Self::poll) may
    /// have completions. A request that completes at its submission is not signalled: poll once after
    /// submitting.
    #[must_use]
    pub fn wait_descriptors(&self) -> Vec<RawFd> {
        self.waiting.queue.wait_descriptors()
    }
}
