//! What a thread that serves the file does with a message, however it came: has it done by the thread's own queue of the
//! device, and answers.
//!
//! Always true here: a message is answered exactly once, or not at all if it wants no answer; each buffer that a carrier
//! lent for a transfer is handed to it again before the answer or with it.
//!
//! Left to others: how messages come and answers go, and when ([`crate::door`]); who starts and stops threads
//! ([`crate::service`]).

use crate::call::Call;
use crate::filesystem::{Answer, Filesystem, Transfer};
use crate::life::Life;
use crate::wire::{InHeader, WriteOut};
use cbd_export::RequestQueue;
use cbd_types::{AlignedBuffer, Completion, Operation, Request, Result};
use std::io::PipeReader;
use std::ops::Range;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// What a thread is given.
pub struct Worker {
    /// What is answered.
    pub filesystem: Arc<Filesystem>,
    /// Its queue.
    pub queue: Box<dyn RequestQueue>,
    /// Ends when the thread shall take nothing more.
    pub stop: Arc<PipeReader>,
    /// What the threads tell each other.
    pub life: Arc<Life>,
}

/// How messages come to a thread and answers go from it.
pub trait Carrier {
    /// Whom an answer goes to.
    type Asker: Copy;

    /// A buffer of `length` bytes for what the device does: for a write, with the data that came. `crowded` says that it may
    /// be out for long. None where the message came without it.
    fn lend(
        &mut self,
        asker: Self::Asker,
        operation: Operation,
        length: usize,
        crowded: bool,
    ) -> Option<AlignedBuffer>;

    /// Takes a buffer back that holds nothing for the asker.
    fn take_back(&mut self, asker: Self::Asker, buffer: AlignedBuffer);

    /// Answers with an errno, 0 for success, and bytes.
    fn answer(&mut self, asker: Self::Asker, errno: i32, bytes: &[u8]);

    /// Answers with a part of a buffer that was lent; `part` lies in it.
    fn answer_with(&mut self, asker: Self::Asker, buffer: AlignedBuffer, part: Range<usize>);

    /// A message that wants no answer is done with.
    fn let_go(&mut self, asker: Self::Asker);
}

/// A request that the device has.
#[derive(Clone, Copy)]
struct Pending<A> {
    asker: A,
    operation: Operation,
    skip: usize,
    length: usize,
}

/// A thread's work, apart from waiting for it.
pub struct Serving<C: Carrier> {
    /// How messages come and answers go.
    pub carrier: C,
    /// What the thread was given.
    pub worker: Worker,
    pending: Vec<Option<Pending<C::Asker>>>,
    free: Vec<usize>,
    done: Vec<Completion>,
}

impl<C: Carrier> Serving<C> {
    /// One that has no work yet.
    pub const fn new(worker: Worker, carrier: C) -> Self {
        Self { carrier, worker, pending: Vec::new(), free: Vec::new(), done: Vec::new() }
    }

    /// Requests that the device has.
    pub fn parked(&self) -> usize {
        self.worker.queue.parked()
    }

    /// Moves on what the device has, and answers what it has done.
    pub fn poll(&mut self) {
        self.worker.queue.poll(&mut self.done);
        self.answer_done();
    }

    /// The connection has ended and nobody waits for answers: gives up what the device has not begun.
    pub fn give_up(&mut self) {
        self.worker.queue.give_up(&mut self.done);
        self.answer_done();
    }

    /// To be called when no more messages are there to act on: the device takes what it kept back of them.
    pub fn unplug(&mut self) {
        self.worker.queue.unplug(&mut self.done);
        self.answer_done();
    }

    /// Does what a message asks for, or begins to; the device may keep it back until [`unplug`](Self::unplug).
    pub fn act(&mut self, asker: C::Asker, header: &InHeader, call: Call) {
        match self.worker.filesystem.answer(header, call) {
            Answer::Silent => self.carrier.let_go(asker),
            Answer::Error(errno) => self.carrier.answer(asker, errno, &[]),
            Answer::Bytes(bytes) => self.carrier.answer(asker, 0, &bytes),
            Answer::Opened(bytes) => {
                // Before the answer: whoever sees the file open must find it counted.
                self.worker.life.change(|state| state.open_files += 1);
                self.carrier.answer(asker, 0, &bytes);
            }
            Answer::Released => {
                self.worker.life.change(|state| state.open_files = state.open_files.saturating_sub(1));
                self.carrier.answer(asker, 0, &[]);
            }
            Answer::Device(transfer) => self.submit(asker, transfer),
        }
    }

    fn submit(&mut self, asker: C::Asker, transfer: Transfer) {
        let Transfer { operation, range, fua, skip, length } = transfer;
        let crowded = self.parked() > 0;
        let buffer = match operation {
            Operation::Read => self.carrier.lend(asker, operation, range.len() as usize, crowded),
            Operation::Write => self.carrier.lend(asker, operation, length, crowded),
            Operation::Flush | Operation::Discard | Operation::WriteZeroes => Some(AlignedBuffer::default()),
        };
        let Some(buffer) = buffer else { return self.carrier.answer(asker, libc::EIO, &[]) };
        let pending = Some(Pending { asker, operation, skip, length });
        let slot = self.free.pop().unwrap_or(self.pending.len());
        match self.pending.get_mut(slot) {
            Some(place) => *place = pending,
            None => self.pending.push(pending),
        }
        let request = Request { id: slot as u64, operation, range, fua, buffer };
        self.worker.queue.submit_plugged(request, &mut self.done);
        self.answer_done();
    }

    fn answer_done(&mut self) {
        let mut done = std::mem::take(&mut self.done);
        for Completion { id, result, buffer } in done.drain(..) {
            let slot = id as usize;
            if let Some(pending) = self.pending.get_mut(slot).and_then(Option::take) {
                self.free.push(slot);
                self.complete(pending, &result, buffer);
            }
        }
        self.done = done;
    }

    fn complete(&mut self, pending: Pending<C::Asker>, result: &Result<()>, buffer: AlignedBuffer) {
        let Pending { asker, operation, skip, length } = pending;
        let errno = result.as_ref().map_or_else(cbd_types::Error::errno, |()| 0);
        match operation {
            Operation::Read if errno == 0 && skip + length <= buffer.len() => {
                self.carrier.answer_with(asker, buffer, skip..skip + length);
            }
            Operation::Read => {
                self.carrier.take_back(asker, buffer);
                self.carrier.answer(asker, if errno == 0 { libc::EIO } else { errno }, &[]);
            }
            Operation::Write => {
                self.carrier.take_back(asker, buffer);
                let written = WriteOut { size: length as u32, padding: 0 };
                self.carrier.answer(asker, errno, if errno == 0 { written.as_bytes() } else { &[] });
            }
            Operation::Flush | Operation::Discard | Operation::WriteZeroes => {
                self.carrier.answer(asker, errno, &[]);
            }
        }
    }
}
