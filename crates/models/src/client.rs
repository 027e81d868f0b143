//! A client: a scheduled thread with a queue of its own to the device, which sleeps while its request waits.
//!
//! Invariants: the oracle records a request before the device gets it, and its completion afterwards; overlapping
//! changes are never in flight together.

use crate::bell::Bell;
use crate::points::spin;
use crate::ports::{ModelEnvironment, ModelQueue};
use crate::stage::Stage;
use cbd_device::Queue;
use cbd_sim::{Content, OpenChange};
use cbd_types::{AlignedBuffer, ByteRange, Completion, Operation, Request, Result};
use std::sync::Arc;

/// A request that a client waits for.
struct PendingRequest {
    operation: Operation,
    range: ByteRange,
    fua: bool,
    change: Option<OpenChange>,
    content: Option<Content>,
    submitted: u64,
}

/// A client.
pub struct Client {
    stage: Arc<Stage>,
    queue: Queue<ModelEnvironment, ModelQueue>,
    disk_queue: u64,
    bell: Arc<Bell>,
}

impl Client {
    /// A client of the stage's device.
    pub(crate) fn new(stage: &Arc<Stage>) -> Self {
        let bell = Bell::new();
        let queue = stage.disk.queue(4);
        let disk_queue = queue.number();
        let queue = Queue::new(Arc::clone(&stage.device), ModelQueue(queue), bell.waker());
        Self { stage: Arc::clone(stage), queue, disk_queue, bell }
    }

    /// Writes a range with a unique content.
    pub fn write(&mut self, range: ByteRange) -> Result<()> {
        self.ask(Operation::Write, range, false)
    }

    /// Reads a range, and compares the result with the oracle.
    pub fn read(&mut self, range: ByteRange) -> Result<()> {
        self.ask(Operation::Read, range, false)
    }

    /// Flushes.
    pub fn flush(&mut self) -> Result<()> {
        self.ask(Operation::Flush, ByteRange::at(0, 0), false)
    }

    /// Writes ranges, all submitted at once, some with FUA.
    pub fn write_at_once(&mut self, writes: &[(ByteRange, bool)]) -> Result<()> {
        let mut asked = Vec::new();
        let mut done = Vec::new();
        for &(range, fua) in writes {
            let Some((pending, request)) = self.prepare(Operation::Write, range, fua) else { continue };
            asked.push(pending);
            self.queue.submit_plugged(Request { id: asked.len() as u64, ..request }, &mut done);
        }
        self.queue.unplug(&mut done);
        for _ in 0..asked.len() {
            let completion = self.next(&mut done);
            let pending = &asked[completion.id as usize - 1];
            self.answered(pending, completion)?;
        }
        Ok(())
    }

    /// Executes a request from its submission to its completion. Skips a change that would overlap one in flight.
    pub fn ask(&mut self, operation: Operation, range: ByteRange, fua: bool) -> Result<()> {
        let Some((pending, request)) = self.prepare(operation, range, fua) else { return Ok(()) };
        let mut done = Vec::new();
        self.queue.submit(request, &mut done);
        let completion = self.next(&mut done);
        self.answered(&pending, completion)
    }

    /// Registers a request with the oracle, and builds it for the device; `None` if it would overlap a change in
    /// flight.
    fn prepare(
        &self,
        operation: Operation,
        range: ByteRange,
        fua: bool,
    ) -> Option<(PendingRequest, Request)> {
        let mut oracle = self.stage.oracle();
        let changes = !matches!(operation, Operation::Read | Operation::Flush);
        if changes && oracle.overlaps_open(range) {
            return None;
        }
        let (buffer, change, content) = match operation {
            Operation::Write => {
                let content = oracle.fresh_content();
                let payload = AlignedBuffer::from_slice(&oracle.payload(range, content));
                (payload, Some(oracle.submit(range, content)), Some(content))
            }
            Operation::Discard | Operation::WriteZeroes => {
                (AlignedBuffer::default(), Some(oracle.submit(range, Content::ZEROES)), None)
            }
            Operation::Read => (AlignedBuffer::zeroed(range.len() as usize), None, None),
            Operation::Flush => (AlignedBuffer::default(), None, None),
        };
        let pending = PendingRequest { operation, range, fua, change, content, submitted: oracle.now() };
        Some((pending, Request::unmarked(1, operation, range, fua, buffer)))
    }

    /// Reports the completion of a request to the oracle, which checks the data of a read.
    fn answered(&self, pending: &PendingRequest, completion: Completion) -> Result<()> {
        completion.result?;
        let mut oracle = self.stage.oracle();
        match (pending.operation, pending.change) {
            (_, Some(change)) => {
                oracle.complete(change, pending.fua);
                let now = oracle.now();
                drop(oracle);
                if let Some(content) = pending.content {
                    self.stage.note_written(now, (pending.range, content), pending.fua);
                }
            }
            (Operation::Read, _) => {
                let verdict = oracle.check_read(pending.range, pending.submitted, &completion.buffer);
                if let Err(violation) = verdict {
                    drop(oracle);
                    panic!("{violation}");
                }
            }
            _ => {
                oracle.flushed(pending.submitted);
                drop(oracle);
                self.stage.note_flushed(pending.submitted);
            }
        }
        Ok(())
    }

    /// Waits for a completion.
    fn next(&mut self, done: &mut Vec<Completion>) -> Completion {
        loop {
            if let Some(completion) = done.pop() {
                return completion;
            }
            if self.stage.disk.in_flight_of(self.disk_queue) > 0 {
                spin();
            } else {
                self.bell.wait();
            }
            self.queue.poll(done);
        }
    }

    /// Executes the work that remains after the answers: caches the data that was read.
    pub fn rest(&mut self) {
        while self.bell.take() {
            self.queue.poll(&mut Vec::new());
        }
    }
}
