//! A thread that serves the file: takes messages from its own door to the connection, has its own queue of the
//! device do them, and answers.
//!
//! Always true here: a message is answered exactly once or not at all if it wants no answer; a thread that ends for
//! whatever reason first lets go of its door, so that the kernel answers what is left with an error, and the last
//! one ends the connection; what a thread has taken it completes before it ends. At most [`IN_FLIGHT_MAX`]
//! requests are parked at a time, the kernel keeps the others.
//!
//! Left to others: mounting, and who starts and stops threads ([`crate::export`]).

use crate::call::{self, Call};
use crate::errors::system_error;
use crate::filesystem::{Answer, Filesystem, Transfer};
use crate::life::Life;
use crate::pool::{Pool, SMALL_BYTES_MAX};
use crate::system::Poller;
use crate::wire::{HEAD, InHeader, OutHeader, WriteOut};
use cbd_export::RequestQueue;
use cbd_types::{AlignedBuffer, ByteRange, Completion, Error, ErrorKind, Operation, Request, Result};
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, PipeReader, Read, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Requests that one thread has parked at most.
const IN_FLIGHT_MAX: usize = 256;
/// Messages taken before the queue's own events are looked at again.
const BURST_MAX: usize = 32;
/// After how many rounds with one message it is tried again whether a second waits.
const SECOND_TRY_INTERVAL: u32 = 16;

/// What [`Poller`] calls the connection.
const CONNECTION: u64 = 0;
/// What it calls the wish to stop.
const STOP: u64 = 1;
/// What it calls the queue's descriptors.
const QUEUE: u64 = 2;

/// What a thread is given.
pub struct Worker {
    /// Its door to the connection, not blocking.
    pub connection: File,
    /// What is answered.
    pub filesystem: Arc<Filesystem>,
    /// Its queue.
    pub queue: Box<dyn RequestQueue>,
    /// Ends when the thread shall take nothing more.
    pub stop: Arc<PipeReader>,
    /// What the threads tell each other.
    pub life: Arc<Life>,
}

/// A request that the device has.
#[derive(Clone, Copy)]
struct Pending {
    unique: u64,
    operation: Operation,
    skip: usize,
    length: usize,
}

/// Whether there is a connection to answer on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Connection {
    Alive,
    /// Unmounted or aborted: what is parked is completed, and nobody is told.
    Gone,
}

struct Serving {
    worker: Worker,
    poller: Poller,
    pool: Pool,
    receive: AlignedBuffer,
    pending: Vec<Option<Pending>>,
    free: Vec<usize>,
    done: Vec<Completion>,
    state: Connection,
    /// Whether the connection is waited for.
    listening: bool,
    stopping: bool,
    rounds: u32,
    crowded: bool,
}

impl Worker {
    /// Serves until the connection ends or a stop is wished, and what was taken is completed.
    ///
    /// # Errors
    /// When the system refuses what serving needs.
    pub fn serve(self) -> Result<()> {
        let poller =
            Poller::new().map_err(|error| system_error("a FUSE thread cannot wait for events", &error))?;
        let add = |descriptor, number, exclusive| {
            poller
                .add(descriptor, number, exclusive)
                .map_err(|error| system_error("a FUSE thread cannot wait for its descriptors", &error))
        };
        add(self.connection.as_raw_fd(), CONNECTION, true)?;
        add(self.stop.as_raw_fd(), STOP, false)?;
        for descriptor in self.queue.wait_descriptors() {
            add(descriptor, QUEUE, false)?;
        }
        let mut pool = Pool::default();
        let receive = pool.take_large();
        let mut serving = Serving {
            worker: self,
            poller,
            pool,
            receive,
            pending: Vec::new(),
            free: Vec::new(),
            done: Vec::new(),
            state: Connection::Alive,
            listening: true,
            stopping: false,
            rounds: 0,
            crowded: false,
        };
        serving.run()
    }
}

impl Serving {
    fn run(&mut self) -> Result<()> {
        while !self.finished() {
            let (mut messages, mut completions, mut stop) = (false, false, false);
            self.poller
                .wait(-1, |number| match number {
                    CONNECTION => messages = true,
                    STOP => stop = true,
                    _ => completions = true,
                })
                .map_err(|error| system_error("a FUSE thread cannot wait for events", &error))?;
            if stop && !self.stopping {
                self.stopping = true;
                self.ignore(self.worker.stop.as_raw_fd())?;
            }
            if completions {
                self.worker.queue.poll(&mut self.done);
                self.answer_done();
            }
            if messages && self.listening && !self.stopping {
                self.take_messages()?;
            }
            self.listen_or_not()?;
        }
        Ok(())
    }

    fn finished(&self) -> bool {
        (self.stopping || self.state == Connection::Gone) && self.worker.queue.parked() == 0
    }

    fn ignore(&self, descriptor: i32) -> Result<()> {
        self.poller
            .remove(descriptor)
            .map_err(|error| system_error("a FUSE thread cannot stop waiting for a descriptor", &error))
    }

    /// Waits for messages only while more of them can be taken.
    fn listen_or_not(&mut self) -> Result<()> {
        let room = self.worker.queue.parked() < IN_FLIGHT_MAX;
        let wanted = room && !self.stopping && self.state == Connection::Alive;
        if wanted == self.listening {
            return Ok(());
        }
        self.listening = wanted;
        let connection = self.worker.connection.as_raw_fd();
        if !wanted {
            return self.ignore(connection);
        }
        self.poller
            .add(connection, CONNECTION, true)
            .map_err(|error| system_error("a FUSE thread cannot wait for its connection", &error))
    }

    /// Takes what is there. At low load a second message rarely waits, and asking costs a system call: so it is
    /// asked for only after it was there the last time, or once in a while.
    fn take_messages(&mut self) -> Result<()> {
        self.rounds = self.rounds.wrapping_add(1);
        let further = self.crowded || self.rounds.is_multiple_of(SECOND_TRY_INTERVAL);
        let bound = if further { BURST_MAX } else { 1 };
        let mut taken = 0;
        while taken < bound && self.worker.queue.parked() < IN_FLIGHT_MAX && self.take_message()? {
            taken += 1;
        }
        if further {
            self.crowded = taken > 1;
        }
        Ok(())
    }

    /// Takes one message and has it done; whether there was one.
    fn take_message(&mut self) -> Result<bool> {
        let mut head = [0; HEAD];
        let mut parts = [IoSliceMut::new(&mut head), IoSliceMut::new(&mut self.receive)];
        let received = match (&self.worker.connection).read_vectored(&mut parts) {
            Ok(received) => received,
            Err(error) => return self.no_message(&error),
        };
        if received == 0 {
            self.state = Connection::Gone;
            return Ok(false);
        }
        let head = head.get(..received.min(HEAD)).unwrap_or_default();
        let payload = self.receive.get(..received.saturating_sub(HEAD)).unwrap_or_default();
        match call::decode(head, payload, self.worker.filesystem.name.as_bytes()) {
            Ok((header, call)) => self.act(&header, call),
            Err(malformed) => {
                if let Some(unique) = malformed.unique {
                    self.reply_error(unique, libc::EIO);
                }
            }
        }
        Ok(true)
    }

    fn no_message(&mut self, error: &io::Error) -> Result<bool> {
        match error.raw_os_error() {
            // Another thread was faster, or the sender took it back.
            Some(libc::EAGAIN | libc::EINTR | libc::ENOENT) => Ok(false),
            Some(libc::ENODEV | libc::ECONNABORTED) => {
                self.state = Connection::Gone;
                Ok(false)
            }
            _ => Err(system_error("/dev/fuse cannot be read", error)),
        }
    }

    fn act(&mut self, header: &InHeader, call: Call) {
        match self.worker.filesystem.answer(header, call) {
            Answer::Silent => {}
            Answer::Error(errno) => self.reply_error(header.unique, errno),
            Answer::Bytes(bytes) => self.reply(header.unique, 0, &bytes),
            Answer::Opened(bytes) => {
                // Before the answer: whoever sees the file open must find it counted.
                self.worker.life.change(|state| state.open_files += 1);
                self.reply(header.unique, 0, &bytes);
            }
            Answer::Released => {
                self.worker.life.change(|state| state.open_files = state.open_files.saturating_sub(1));
                self.reply(header.unique, 0, &[]);
            }
            Answer::Device(transfer) => self.submit(header.unique, transfer),
        }
    }

    fn submit(&mut self, unique: u64, transfer: Transfer) {
        let Transfer { operation, range, fua, skip, length } = transfer;
        let buffer = self.buffer_for(operation, range, length);
        let pending = Some(Pending { unique, operation, skip, length });
        let slot = self.free.pop().unwrap_or(self.pending.len());
        match self.pending.get_mut(slot) {
            Some(place) => *place = pending,
            None => self.pending.push(pending),
        }
        let request = Request { id: slot as u64, operation, range, fua, buffer };
        self.worker.queue.submit(request, &mut self.done);
        self.answer_done();
    }

    /// A write goes on in the buffer that it was received into, with no copy, unless others are parked: then
    /// it may be soon, too, and a small one would hold a large buffer for long.
    fn buffer_for(&mut self, operation: Operation, range: ByteRange, length: usize) -> AlignedBuffer {
        let crowded = self.worker.queue.parked() > 0;
        match operation {
            Operation::Read => self.pool.take(range.len() as usize, crowded),
            Operation::Write if crowded && length <= SMALL_BYTES_MAX => {
                let mut buffer = self.pool.take(length, true);
                buffer.copy_from_slice(self.receive.get(..length).unwrap_or_default());
                buffer
            }
            Operation::Write => {
                let mut buffer = std::mem::take(&mut self.receive);
                buffer.resize(length);
                buffer
            }
            Operation::Flush | Operation::Discard | Operation::WriteZeroes => AlignedBuffer::default(),
        }
    }

    fn answer_done(&mut self) {
        let mut done = std::mem::take(&mut self.done);
        for completion in done.drain(..) {
            let Completion { id, result, buffer } = completion;
            let slot = id as usize;
            if let Some(pending) = self.pending.get_mut(slot).and_then(Option::take) {
                self.free.push(slot);
                self.complete(pending, &result, &buffer);
            }
            self.pool.give(buffer);
        }
        self.done = done;
        if self.receive.is_empty() {
            self.receive = self.pool.take_large();
        }
    }

    fn complete(&mut self, pending: Pending, result: &Result<()>, buffer: &[u8]) {
        let Pending { unique, operation, skip, length } = pending;
        match (result, operation) {
            (Err(error), _) => self.reply_error(unique, error.errno()),
            (Ok(()), Operation::Read) => match buffer.get(skip..skip + length) {
                Some(bytes) => self.reply(unique, 0, bytes),
                None => self.reply_error(unique, libc::EIO),
            },
            (Ok(()), Operation::Write) => {
                let written = WriteOut { size: length as u32, padding: 0 };
                self.reply(unique, 0, written.as_bytes());
            }
            (Ok(()), Operation::Flush | Operation::Discard | Operation::WriteZeroes) => {
                self.reply(unique, 0, &[]);
            }
        }
    }

    fn reply_error(&mut self, unique: u64, errno: i32) {
        self.reply(unique, errno, &[]);
    }

    fn reply(&mut self, unique: u64, errno: i32, bytes: &[u8]) {
        if self.state == Connection::Gone {
            return;
        }
        let len = size_of::<OutHeader>() + bytes.len();
        let header = OutHeader { len: len as u32, error: -errno, unique };
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(bytes)];
        // The kernel takes an answer whole or not at all.
        let Err(error) = (&self.worker.connection).write_vectored(&parts) else { return };
        match error.raw_os_error() {
            // Whoever asked does not wait any more.
            Some(libc::ENOENT) => {}
            Some(libc::ENODEV | libc::ECONNABORTED | libc::EPERM) => self.state = Connection::Gone,
            _ => {
                self.worker.life.change(|state| state.refused_answers += 1);
                // So that whoever asked does not wait for ever for an answer that was not taken.
                if !bytes.is_empty() {
                    self.reply_error(unique, libc::EIO);
                }
            }
        }
    }
}

/// Says that a thread has let go of its connection, however it ended.
pub struct Leaving(pub Arc<Life>);

impl Drop for Leaving {
    fn drop(&mut self) {
        let panicked = std::thread::panicking();
        self.0.change(|state| {
            state.serving = state.serving.saturating_sub(1);
            if panicked && state.failure.is_none() {
                state.failure =
                    Some(Error::new(ErrorKind::System, "a thread that serves a FUSE file panicked"));
            }
        });
    }
}
