//! A client: a scheduled thread with a queue of its own to the device, which sleeps while its request waits.
//!
//! Always true here: the oracle learns of a request before the device does, and of its completion afterwards; changes that
//! overlap are never under way together.

use crate::bell::Bell;
use crate::points::spin;
use crate::ports::{ModelEnvironment, ModelQueue};
use crate::stage::Stage;
use cbd_device::Queue;
use cbd_sim::Content;
use cbd_types::{AlignedBuffer, ByteRange, Completion, Operation, Request, Result};
use std::sync::Arc;

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

    /// Writes a range, with a content that no other write has.
    pub fn write(&mut self, range: ByteRange) -> Result<()> {
        self.ask(Operation::Write, range, false)
    }

    /// Reads a range; what is there is held against the oracle.
    pub fn read(&mut self, range: ByteRange) -> Result<()> {
        self.ask(Operation::Read, range, false)
    }

    /// Flushes.
    pub fn flush(&mut self) -> Result<()> {
        self.ask(Operation::Flush, ByteRange::at(0, 0), false)
    }

    /// A request, from its submission until it has completed. A change that would overlap one that is under way is left out.
    pub fn ask(&mut self, operation: Operation, range: ByteRange, fua: bool) -> Result<()> {
        let (buffer, change, content, submitted) = {
            let mut oracle = self.stage.oracle();
            let changes = !matches!(operation, Operation::Read | Operation::Flush);
            if changes && oracle.overlaps_open(range) {
                return Ok(());
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
            (buffer, change, content, oracle.now())
        };
        let Completion { result, buffer, .. } = self.run(Request { id: 1, operation, range, fua, buffer });
        result?;
        let mut oracle = self.stage.oracle();
        match (operation, change) {
            (_, Some(change)) => {
                oracle.complete(change, fua);
                let now = oracle.now();
                drop(oracle);
                if let Some(content) = content {
                    self.stage.note_written(now, (range, content), fua);
                }
            }
            (Operation::Read, _) => {
                if let Err(violation) = oracle.check_read(range, submitted, &buffer) {
                    drop(oracle);
                    panic!("{violation}");
                }
            }
            _ => {
                oracle.flushed(submitted);
                drop(oracle);
                self.stage.note_flushed(submitted);
            }
        }
        Ok(())
    }

    fn run(&mut self, request: Request) -> Completion {
        let mut done: Vec<Completion> = Vec::new();
        self.queue.submit(request, &mut done);
        loop {
            if let Some(completion) = done.pop() {
                return completion;
            }
            if self.stage.disk.in_flight_of(self.disk_queue) > 0 {
                spin();
            } else {
                self.bell.wait();
            }
            self.queue.poll(&mut done);
        }
    }

    /// Does what is left to do when the answers are out: what was read is cached.
    pub fn rest(&mut self) {
        while self.bell.take() {
            self.queue.poll(&mut Vec::new());
        }
    }
}
