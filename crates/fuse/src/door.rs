//! Serving through `/dev/fuse`: each thread reads messages from its own door to the connection and writes answers to it.
//!
//! Always true here: a thread that ends for whatever reason first lets go of its door, so that the kernel answers what is left
//! with an error, and the last one ends the connection; what a thread has taken it completes before it ends. At most
//! [`IN_FLIGHT_MAX`] requests are parked at a time, the kernel keeps the others.
//!
//! Left to others: what a message asks for ([`crate::worker`]).

use crate::call::{self, Call, Malformed};
use crate::errors::system_error;
use crate::filesystem::TRANSFER_BYTES_MAX;
use crate::life::Life;
use crate::system::Poller;
use crate::wire::{HEAD, InHeader, OutHeader};
use crate::worker::{Carrier, Serving, Worker};
use cbd_types::{AlignedBuffer, Operation, Result, SpareBuffers};
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Requests that one thread has parked at most.
const IN_FLIGHT_MAX: usize = 256;
/// Messages taken before the queue's own events are looked at again.
const BURST_MAX: usize = 32;
/// After how many rounds with one message it is tried again whether a second waits.
const SECOND_TRY_INTERVAL: u32 = 16;

/// Bytes of buffers that a thread keeps for the next requests.
const SPARE_BYTES: usize = 32 * TRANSFER_BYTES_MAX;
/// After so long without a request they are given up.
const IDLE_MS: i32 = 250;
/// What is copied out of the buffer that it was received into, when it may be out for long.
const SMALL_BYTES_MAX: usize = 128 << 10;

/// What [`Poller`] calls the connection.
const CONNECTION: u64 = 0;
/// What it calls the wish to stop.
const STOP: u64 = 1;
/// What it calls the end of the connection.
const DESERTED: u64 = 2;
/// What it calls the queue's descriptors.
const QUEUE: u64 = 3;

/// Whether there is a connection to answer on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Connection {
    /// There is.
    Alive,
    /// Unmounted or aborted: what is parked is completed, and nobody is told.
    Gone,
}

/// What came of asking for a message: none, one, or one that contradicts itself.
type Received = Option<std::result::Result<(InHeader, Call), Malformed>>;

/// A door to the connection, and the buffers of the thread that it belongs to. Whom an answer goes to is the number of his
/// message.
pub struct Door {
    connection: File,
    life: Arc<Life>,
    pool: SpareBuffers,
    receive: AlignedBuffer,
    state: Connection,
}

impl Door {
    /// A door that is not to block.
    pub fn new(connection: File, life: Arc<Life>) -> Self {
        Self {
            connection,
            life,
            pool: SpareBuffers::new(SPARE_BYTES),
            receive: AlignedBuffer::default(),
            state: Connection::Alive,
        }
    }

    /// What to wait on.
    pub fn descriptor(&self) -> RawFd {
        self.connection.as_raw_fd()
    }

    /// Whether the connection is still there.
    pub const fn state(&self) -> Connection {
        self.state
    }

    /// Takes one message, if there is one.
    ///
    /// # Errors
    /// When the connection cannot be read.
    pub fn receive(&mut self, name: &[u8]) -> Result<Received> {
        if self.receive.is_empty() {
            self.receive = self.pool.take(TRANSFER_BYTES_MAX);
        }
        let mut head = [0; HEAD];
        let mut parts = [IoSliceMut::new(&mut head), IoSliceMut::new(&mut self.receive)];
        let received = match (&self.connection).read_vectored(&mut parts) {
            Ok(received) => received,
            Err(error) => return self.no_message(&error).map(|()| None),
        };
        if received == 0 {
            self.state = Connection::Gone;
            return Ok(None);
        }
        let head = head.get(..received).unwrap_or(&head);
        let (header, arguments) = head.split_at(head.len().min(size_of::<InHeader>()));
        let payload = self.receive.get(..received.saturating_sub(HEAD)).unwrap_or_default();
        Ok(Some(call::decode(header, arguments, payload, name)))
    }

    /// Whether memory is kept for the next messages.
    fn keeps_memory(&self) -> bool {
        !self.receive.is_empty() || self.pool.held() > 0
    }

    /// Gives up memory that is kept for the next messages.
    fn trim(&mut self) {
        self.receive = AlignedBuffer::default();
        self.pool.trim();
    }

    fn no_message(&mut self, error: &io::Error) -> Result<()> {
        match error.raw_os_error() {
            // Another thread was faster, or the sender took it back.
            Some(libc::EAGAIN | libc::EINTR | libc::ENOENT) => Ok(()),
            Some(libc::ENODEV | libc::ECONNABORTED) => {
                self.state = Connection::Gone;
                Ok(())
            }
            _ => Err(system_error("/dev/fuse cannot be read", error)),
        }
    }

    fn reply(&mut self, unique: u64, errno: i32, bytes: &[u8]) {
        // Also where the connection has said its end: what was taken before that is answered, and one that is gone refuses it by itself.
        let len = size_of::<OutHeader>() + bytes.len();
        let header = OutHeader { len: len as u32, error: -errno, unique };
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(bytes)];
        // The kernel takes an answer whole or not at all.
        let Err(error) = (&self.connection).write_vectored(&parts) else { return };
        match error.raw_os_error() {
            // Whoever asked does not wait any more.
            Some(libc::ENOENT) => {}
            Some(libc::ENODEV | libc::ECONNABORTED | libc::EPERM) => self.state = Connection::Gone,
            _ => {
                self.life.change(|state| state.refused_answers += 1);
                // So that whoever asked does not wait for ever for an answer that was not taken.
                if !bytes.is_empty() {
                    self.reply(unique, libc::EIO, &[]);
                }
            }
        }
    }
}

impl Carrier for Door {
    type Asker = u64;

    /// A write goes on in the buffer that it was received into, with no copy, unless others are parked: then
    /// it may be soon, too, and a small one would hold a large buffer for long.
    fn lend(&mut self, _: u64, operation: Operation, length: usize, crowded: bool) -> Option<AlignedBuffer> {
        if operation != Operation::Write {
            return Some(self.pool.take(length));
        }
        if crowded && length <= SMALL_BYTES_MAX {
            let mut buffer = self.pool.take(length);
            buffer.copy_from_slice(self.receive.get(..length)?);
            return Some(buffer);
        }
        let mut buffer = std::mem::take(&mut self.receive);
        buffer.resize(length);
        Some(buffer)
    }

    fn take_back(&mut self, _: u64, buffer: AlignedBuffer) {
        self.pool.give(buffer);
    }

    fn answer(&mut self, unique: u64, errno: i32, bytes: &[u8]) {
        self.reply(unique, errno, bytes);
    }

    fn answer_with(&mut self, unique: u64, buffer: AlignedBuffer, part: Range<usize>) {
        match buffer.get(part) {
            Some(bytes) => self.reply(unique, 0, bytes),
            None => self.reply(unique, libc::EIO, &[]),
        }
        self.pool.give(buffer);
    }

    fn let_go(&mut self, _: u64) {}
}

/// A thread's wait for messages, for its queue, and for the wish to stop.
struct Waiting {
    serving: Serving<Door>,
    poller: Poller,
    /// Whether the connection is waited for.
    listening: bool,
    stopping: bool,
    rounds: u32,
    crowded: bool,
}

/// Serves until the connection ends or a stop is wished, and what was taken is completed.
///
/// # Errors
/// When the system refuses what serving needs.
pub fn serve(worker: Worker, connection: File) -> Result<()> {
    let poller =
        Poller::new().map_err(|error| system_error("a FUSE thread cannot wait for events", &error))?;
    let add = |descriptor, number, exclusive| {
        poller
            .add(descriptor, number, exclusive)
            .map_err(|error| system_error("a FUSE thread cannot wait for its descriptors", &error))
    };
    add(connection.as_raw_fd(), CONNECTION, true)?;
    add(worker.stop.as_raw_fd(), STOP, false)?;
    add(worker.life.deserted(), DESERTED, false)?;
    for descriptor in worker.queue.wait_descriptors() {
        add(descriptor, QUEUE, false)?;
    }
    let door = Door::new(connection, Arc::clone(&worker.life));
    let serving = Serving::new(worker, door);
    Waiting { serving, poller, listening: true, stopping: false, rounds: 0, crowded: false }.run()
}

impl Waiting {
    fn run(&mut self) -> Result<()> {
        while !self.finished() {
            let (mut messages, mut completions, mut stop, mut deserted) = (false, false, false, false);
            let may_trim = self.serving.parked() == 0 && self.serving.carrier.keeps_memory();
            self.poller
                .wait(if may_trim { IDLE_MS } else { -1 }, |number| match number {
                    CONNECTION => messages = true,
                    STOP => stop = true,
                    DESERTED => deserted = true,
                    _ => completions = true,
                })
                .map_err(|error| system_error("a FUSE thread cannot wait for events", &error))?;
            if may_trim && !(messages || completions || stop || deserted) {
                self.serving.carrier.trim();
                self.serving.worker.queue.trim();
            }
            if stop && !self.stopping {
                self.stopping = true;
                self.ignore(self.serving.worker.stop.as_raw_fd())?;
            }
            if completions {
                self.serving.poll();
            }
            if messages && self.listening && !self.stopping {
                self.take_messages()?;
            }
            if deserted {
                self.ignore(self.serving.worker.life.deserted())?;
            }
            if deserted || !self.alive() {
                self.serving.give_up();
            }
            self.listen_or_not()?;
        }
        Ok(())
    }

    fn alive(&self) -> bool {
        self.serving.carrier.state() == Connection::Alive
    }

    fn finished(&self) -> bool {
        (self.stopping || !self.alive()) && self.serving.parked() == 0
    }

    fn ignore(&self, descriptor: RawFd) -> Result<()> {
        self.poller
            .remove(descriptor)
            .map_err(|error| system_error("a FUSE thread cannot stop waiting for a descriptor", &error))
    }

    /// Waits for messages only while more of them can be taken.
    fn listen_or_not(&mut self) -> Result<()> {
        let room = self.serving.parked() < IN_FLIGHT_MAX;
        let wanted = room && !self.stopping && self.alive();
        if wanted == self.listening {
            return Ok(());
        }
        self.listening = wanted;
        let connection = self.serving.carrier.descriptor();
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
        let ended = loop {
            if taken == bound || self.serving.parked() >= IN_FLIGHT_MAX {
                break Ok(());
            }
            match take_message(&mut self.serving) {
                Ok(true) => taken += 1,
                Ok(false) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        // What was taken before an error is done as well.
        self.serving.unplug();
        ended?;
        if further {
            self.crowded = taken > 1;
        }
        Ok(())
    }
}

/// Takes one message and has it done; whether there was one.
fn take_message(serving: &mut Serving<Door>) -> Result<bool> {
    match serving.carrier.receive(serving.worker.filesystem.name.as_bytes())? {
        None => return Ok(false),
        Some(Ok((header, call))) => serving.act(header.unique, &header, call),
        Some(Err(Malformed { unique: Some(unique) })) => serving.carrier.reply(unique, libc::EIO, &[]),
        Some(Err(Malformed { unique: None })) => {}
    }
    Ok(true)
}
