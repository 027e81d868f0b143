//! The work of a thread that serves the file, whatever the transport: executes each message through the
//! thread's own queue of the device, and answers it.
//!
//! Invariants: a message is answered exactly once, or not at all if it expects no reply; each buffer that a
//! carrier lent for a transfer is returned to it before the reply or with it.
//!
//! Elsewhere: the transport of messages and replies, and its timing ([`crate::door`]); starting and stopping
//! threads ([`crate::service`]).

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

/// The parameters of a thread.
pub struct Worker {
    /// The file system that it serves.
    pub filesystem: Arc<Filesystem>,
    /// Its queue.
    pub queue: Box<dyn RequestQueue>,
    /// Reports its end when the thread must read no more messages.
    pub stop: Arc<PipeReader>,
    /// The state that the threads share.
    pub life: Arc<Life>,
}

/// The transport of messages and replies.
pub trait Carrier {
    /// The addressee of a reply.
    type Asker: Copy;

    /// A buffer of `length` bytes for an operation of the device: for a write, with the received data.
    /// `crowded` states that the operation may stay in flight for long. `None` if the message came without
    /// the data.
    fn lend(
        &mut self,
        asker: Self::Asker,
        operation: Operation,
        length: usize,
        crowded: bool,
    ) -> Option<AlignedBuffer>;

    /// Returns a buffer that holds no data of a reply.
    fn take_back(&mut self, asker: Self::Asker, buffer: AlignedBuffer);

    /// Replies with an errno, 0 for success, and bytes.
    fn answer(&mut self, asker: Self::Asker, errno: i32, bytes: &[u8]);

    /// Replies with a part of a lent buffer; `part` lies in it.
    fn answer_with(&mut self, asker: Self::Asker, buffer: AlignedBuffer, part: Range<usize>);

    /// Ends a message that expects no reply.
    fn let_go(&mut self, asker: Self::Asker);
}

/// A request that the device executes.
#[derive(Clone, Copy)]
struct Pending<A> {
    asker: A,
    operation: Operation,
    skip: usize,
    length: usize,
}

/// The work of a thread, except for waiting.
pub struct Serving<C: Carrier> {
    /// The transport.
    pub carrier: C,
    /// The parameters of the thread.
    pub worker: Worker,
    pending: Vec<Option<Pending<C::Asker>>>,
    free: Vec<usize>,
    done: Vec<Completion>,
}

impl<C: Carrier> Serving<C> {
    /// A value without work.
    pub const fn new(worker: Worker, carrier: C) -> Self {
        Self { carrier, worker, pending: Vec::new(), free: Vec::new(), done: Vec::new() }
    }

    /// Requests that the device has in flight.
    pub fn parked(&self) -> usize {
        self.worker.queue.parked()
    }

    /// Makes progress with the requests in flight, and answers the completed ones.
    pub fn poll(&mut self) {
        self.worker.queue.poll(&mut self.done);
        self.answer_done();
    }

    /// The connection has ended and no client waits for replies: cancels the requests that the device has not
    /// begun.
    pub fn give_up(&mut self) {
        self.worker.queue.give_up(&mut self.done);
        self.answer_done();
    }

    /// Call it when no more messages are queued: the device executes the requests that it has held back for a
    /// batch.
    pub fn unplug(&mut self) {
        self.worker.queue.unplug(&mut self.done);
        self.answer_done();
    }

    /// Executes a message, or begins to; the device may hold the request back until [`unplug`](Self::unplug).
    pub fn act(&mut self, asker: C::Asker, header: &InHeader, call: Call) {
        match self.worker.filesystem.answer(header, call) {
            Answer::Silent => self.carrier.let_go(asker),
            Answer::Error(errno) => self.carrier.answer(asker, errno, &[]),
            Answer::Bytes(bytes) => self.carrier.answer(asker, 0, &bytes),
            Answer::Opened(bytes) => {
                // Before the reply: a client that has opened the file must be counted.
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
