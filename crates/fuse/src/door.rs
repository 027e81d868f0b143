//! Serving through `/dev/fuse`: each thread reads messages from its own channel to the connection and writes
//! replies to it.
//!
//! Invariants: a thread that ends, for whatever reason, first closes its channel, so that the kernel answers
//! the remaining requests with an error; the last thread ends the connection. A thread completes every
//! message that it has read before it ends. At most [`IN_FLIGHT_MAX`] requests are in flight per thread; the
//! kernel keeps the others.
//!
//! Elsewhere: the meaning of a message ([`crate::worker`]).

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

/// Requests that one thread has in flight at most.
const IN_FLIGHT_MAX: usize = 256;
/// Messages read before the events of the device's queue are checked again.
const BURST_MAX: usize = 32;
/// Number of rounds with one message after which the thread checks again whether a second one is queued.
const SECOND_TRY_INTERVAL: u32 = 16;

/// Bytes of buffers that a thread keeps for later requests.
const SPARE_BYTES: usize = 32 * TRANSFER_BYTES_MAX;
/// After this time without a request the kept buffers are freed.
const IDLE_MS: i32 = 250;
/// Data up to this size is copied out of its receive buffer when the write may be in flight for long.
const SMALL_BYTES_MAX: usize = 128 << 10;

/// [`Poller`]'s number of the connection.
const CONNECTION: u64 = 0;
/// Its number of the stop pipe.
const STOP: u64 = 1;
/// Its number of the event that the connection has ended.
const DESERTED: u64 = 2;
/// Its number of the device queue's descriptors.
const QUEUE: u64 = 3;

/// Whether the connection can still take replies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Connection {
    /// It can.
    Alive,
    /// Unmounted or aborted: requests in flight are completed without a reply.
    Gone,
}

/// The result of one read: no message, one message, or a malformed one.
type Received = Option<std::result::Result<(InHeader, Call), Malformed>>;

/// A channel to the connection, and the buffers of the thread that it belongs to. A reply is addressed by the
/// number of its message.
pub struct Door {
    connection: File,
    life: Arc<Life>,
    pool: SpareBuffers,
    receive: AlignedBuffer,
    state: Connection,
}

impl Door {
    /// Takes a non-blocking channel.
    pub fn new(connection: File, life: Arc<Life>) -> Self {
        Self {
            connection,
            life,
            pool: SpareBuffers::new(SPARE_BYTES),
            receive: AlignedBuffer::default(),
            state: Connection::Alive,
        }
    }

    /// The descriptor to wait on.
    pub fn descriptor(&self) -> RawFd {
        self.connection.as_raw_fd()
    }

    /// Whether the connection is alive.
    pub const fn state(&self) -> Connection {
        self.state
    }

    /// Reads one message, if one is queued.
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

    /// Whether memory is kept for later messages.
    fn keeps_memory(&self) -> bool {
        !self.receive.is_empty() || self.pool.held() > 0
    }

    /// Frees the memory that is kept for later messages.
    fn trim(&mut self) {
        self.receive = AlignedBuffer::default();
        self.pool.trim();
    }

    fn no_message(&mut self, error: &io::Error) -> Result<()> {
        match error.raw_os_error() {
            // Another thread read the message first, or the kernel withdrew it.
            Some(libc::EAGAIN | libc::EINTR | libc::ENOENT) => Ok(()),
            Some(libc::ENODEV | libc::ECONNABORTED) => {
                self.state = Connection::Gone;
                Ok(())
            }
            _ => Err(system_error("/dev/fuse cannot be read", error)),
        }
    }

    fn reply(&mut self, unique: u64, errno: i32, bytes: &[u8]) {
        // Replies also after the connection has reported its end: requests that were read before are
        // answered. A closed connection refuses the reply itself.
        let len = size_of::<OutHeader>() + bytes.len();
        let header = OutHeader { len: len as u32, error: -errno, unique };
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(bytes)];
        // The kernel takes a reply completely or not at all.
        let Err(error) = (&self.connection).write_vectored(&parts) else { return };
        match error.raw_os_error() {
            // The requester no longer waits.
            Some(libc::ENOENT) => {}
            Some(libc::ENODEV | libc::ECONNABORTED | libc::EPERM) => self.state = Connection::Gone,
            _ => {
                self.life.change(|state| state.refused_answers += 1);
                // An error reply, so that the requester does not wait forever for the refused one.
                if !bytes.is_empty() {
                    self.reply(unique, libc::EIO, &[]);
                }
            }
        }
    }
}

impl Carrier for Door {
    type Asker = u64;

    /// A write is executed in the buffer that it was received into, without a copy. If other requests are in
    /// flight, a small write is copied: it may stay in flight for long too, and would hold a large buffer
    /// meanwhile.
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

/// A thread's wait for messages, for events of its queue, and for the stop request.
struct Waiting {
    serving: Serving<Door>,
    poller: Poller,
    /// Whether the connection is in the poll set.
    listening: bool,
    stopping: bool,
    rounds: u32,
    crowded: bool,
}

/// Serves until the connection ends or a stop is requested, and until all requests in flight are completed.
///
/// # Errors
/// When a system call fails that serving needs.
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

    /// Keeps the connection in the poll set only while the thread can take more messages.
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

    /// Reads the queued messages. At low load a second message is rarely queued and the check costs a system
    /// call, so the thread checks for one only if there was one the last time, and once per
    /// [`SECOND_TRY_INTERVAL`].
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
        // Messages that were read before an error are executed as well.
        self.serving.unplug();
        ended?;
        if further {
            self.crowded = taken > 1;
        }
        Ok(())
    }
}

/// Reads one message and executes it; returns whether there was one.
fn take_message(serving: &mut Serving<Door>) -> Result<bool> {
    match serving.carrier.receive(serving.worker.filesystem.name.as_bytes())? {
        None => return Ok(false),
        Some(Ok((header, call))) => serving.act(header.unique, &header, call),
        Some(Err(Malformed { unique: Some(unique) })) => serving.carrier.reply(unique, libc::EIO, &[]),
        Some(Err(Malformed { unique: None })) => {}
    }
    Ok(true)
}
