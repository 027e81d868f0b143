//! A thread that serves the file: reads messages from its own channel, executes each through its own queue of
//! the device, and answers it.
//!
//! Invariants: a message is answered exactly once, or not at all if it expects no reply. A thread that ends,
//! for whatever reason, first closes its channel, so that the kernel answers the remaining requests with an
//! error; the last thread ends the connection. A thread completes every message that it has read before it
//! ends. At most [`IN_FLIGHT_MAX`] requests are in flight per thread; the kernel keeps the others.
//!
//! Elsewhere: the form of messages and replies ([`crate::channel`]), and the start and stop of threads
//! ([`crate::service`]).

use crate::call::{Call, Malformed};
use crate::channel::Channel;
use crate::filesystem::{Answer, Filesystem, Transfer};
use crate::shared::Shared;
use crate::wire::{InHeader, WriteOut};
use cbd_export::{RequestQueue, system_error};
use cbd_sys::event::Poller;
use cbd_types::{AlignedBuffer, Completion, Operation, Request, Result};
use std::fs::File;
use std::os::fd::RawFd;
use std::sync::Arc;
use zerocopy::IntoBytes;

/// Requests that one thread has in flight at most.
const IN_FLIGHT_MAX: usize = 256;
/// Messages read before the events of the device's queue are checked again.
const BURST_MAX: usize = 32;
/// Number of rounds with one message after which the thread checks again whether a second one is queued.
const SECOND_TRY_INTERVAL: u32 = 16;
/// After this time without a request the thread frees the memory that it keeps for later ones.
const IDLE_MS: i32 = 250;

/// [`Poller`]'s number of the channel.
const CHANNEL: u64 = 0;
/// Its number of the request to stop.
const STOP: u64 = 1;
/// Its number of the event that the connection has ended.
const DISCONNECTED: u64 = 2;
/// Its number of the device queue's descriptors.
const QUEUE: u64 = 3;

/// A request that the device executes.
#[derive(Clone, Copy)]
struct Pending {
    /// The number of its message.
    unique: u64,
    operation: Operation,
    skip: usize,
    length: usize,
}

/// The work of a thread.
pub struct Worker {
    filesystem: Arc<Filesystem>,
    // Before the queue, so that the channel is closed first.
    channel: Channel,
    queue: Box<dyn RequestQueue>,
    shared: Arc<Shared>,
    poller: Poller,
    pending: Vec<Option<Pending>>,
    free: Vec<usize>,
    done: Vec<Completion>,
    /// Whether the channel is in the poll set.
    is_polled: bool,
    stopping: bool,
    rounds: u32,
    /// Whether the last burst had more than one message.
    had_second_message: bool,
}

impl Worker {
    /// A thread's work on a non-blocking `channel`.
    ///
    /// # Errors
    /// When a system call fails that waiting needs.
    pub fn new(
        filesystem: Arc<Filesystem>,
        channel: File,
        queue: Box<dyn RequestQueue>,
        shared: Arc<Shared>,
    ) -> Result<Self> {
        let poller =
            Poller::new().map_err(|error| system_error("a FUSE thread cannot wait for events", &error))?;
        let channel = Channel::new(channel);
        let add = |descriptor, number, exclusive| {
            poller
                .add(descriptor, number, exclusive)
                .map_err(|error| system_error("a FUSE thread cannot wait for its descriptors", &error))
        };
        add(channel.descriptor(), CHANNEL, true)?;
        add(shared.stop_descriptor(), STOP, false)?;
        add(shared.disconnected_descriptor(), DISCONNECTED, false)?;
        for descriptor in queue.wait_descriptors() {
            add(descriptor, QUEUE, false)?;
        }
        Ok(Self {
            filesystem,
            channel,
            queue,
            shared,
            poller,
            pending: Vec::new(),
            free: Vec::new(),
            done: Vec::new(),
            is_polled: true,
            stopping: false,
            rounds: 0,
            had_second_message: false,
        })
    }

    /// Serves until the connection ends or a stop is requested, and until all requests in flight are
    /// completed.
    ///
    /// # Errors
    /// When a system call fails that serving needs.
    pub fn serve(mut self) -> Result<()> {
        while !self.is_finished() {
            let (mut messages, mut completions, mut stop, mut disconnected) = (false, false, false, false);
            let may_trim = self.queue.parked() == 0 && self.channel.holds_memory();
            self.poller
                .wait(if may_trim { IDLE_MS } else { -1 }, |number| match number {
                    CHANNEL => messages = true,
                    STOP => stop = true,
                    DISCONNECTED => disconnected = true,
                    _ => completions = true,
                })
                .map_err(|error| system_error("a FUSE thread cannot wait for events", &error))?;
            if may_trim && !(messages || completions || stop || disconnected) {
                self.channel.trim();
                self.queue.trim();
            }
            if stop && !self.stopping {
                self.stopping = true;
                self.ignore(self.shared.stop_descriptor())?;
            }
            if completions {
                self.queue.poll(&mut self.done);
                self.reply_completed();
            }
            if messages && self.is_polled && !self.stopping {
                self.take_messages()?;
            }
            if disconnected {
                self.ignore(self.shared.disconnected_descriptor())?;
            }
            if disconnected || !self.channel.is_connected() {
                // No client waits for replies: requests that the device has not begun are cancelled.
                self.queue.give_up(&mut self.done);
                self.reply_completed();
            }
            self.update_poll_set()?;
        }
        Ok(())
    }

    fn is_finished(&self) -> bool {
        (self.stopping || !self.channel.is_connected()) && self.queue.parked() == 0
    }

    fn ignore(&self, descriptor: RawFd) -> Result<()> {
        self.poller
            .remove(descriptor)
            .map_err(|error| system_error("a FUSE thread cannot stop waiting for a descriptor", &error))
    }

    /// Keeps the channel in the poll set only while the thread can take more messages.
    fn update_poll_set(&mut self) -> Result<()> {
        let has_room = self.queue.parked() < IN_FLIGHT_MAX;
        let wanted = has_room && !self.stopping && self.channel.is_connected();
        if wanted == self.is_polled {
            return Ok(());
        }
        self.is_polled = wanted;
        if !wanted {
            return self.ignore(self.channel.descriptor());
        }
        self.poller
            .add(self.channel.descriptor(), CHANNEL, true)
            .map_err(|error| system_error("a FUSE thread cannot wait for its channel", &error))
    }

    /// Reads the queued messages. At low load a second message is rarely queued and the check costs a system
    /// call, so the thread checks for one only if there was one the last time, and once per
    /// [`SECOND_TRY_INTERVAL`].
    fn take_messages(&mut self) -> Result<()> {
        self.rounds = self.rounds.wrapping_add(1);
        let checks = self.had_second_message || self.rounds.is_multiple_of(SECOND_TRY_INTERVAL);
        let bound = if checks { BURST_MAX } else { 1 };
        let mut taken = 0;
        let ended = loop {
            if taken == bound || self.queue.parked() >= IN_FLIGHT_MAX {
                break Ok(());
            }
            match self.take_message() {
                Ok(true) => taken += 1,
                Ok(false) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        // No more messages are queued: the device executes the requests that it has held back for a batch.
        // Messages that were read before an error are executed as well.
        self.queue.unplug(&mut self.done);
        self.reply_completed();
        ended?;
        if checks {
            self.had_second_message = taken > 1;
        }
        Ok(())
    }

    /// Reads one message and executes it; returns whether there was one.
    fn take_message(&mut self) -> Result<bool> {
        match self.channel.receive(self.filesystem.name.as_bytes())? {
            None => return Ok(false),
            Some(Ok((header, call))) => self.execute(&header, call),
            Some(Err(Malformed { unique: Some(unique) })) => self.channel.reply(unique, libc::EIO, &[]),
            Some(Err(Malformed { unique: None })) => {}
        }
        Ok(true)
    }

    /// Executes a message, or begins to; the device may hold the request back until it is unplugged.
    fn execute(&mut self, header: &InHeader, call: Call) {
        let unique = header.unique;
        match self.filesystem.answer(header, call) {
            Answer::NoReply => {}
            Answer::Error(errno) => self.channel.reply(unique, errno, &[]),
            Answer::Bytes(bytes) => self.channel.reply(unique, 0, &bytes),
            Answer::Opened(bytes) => {
                // Before the reply: a client that has opened the file must be counted.
                self.shared.change(|state| state.open_files += 1);
                self.channel.reply(unique, 0, &bytes);
            }
            Answer::Released => {
                self.shared.change(|state| state.open_files = state.open_files.saturating_sub(1));
                self.channel.reply(unique, 0, &[]);
            }
            Answer::Device(transfer) => self.submit(unique, transfer),
        }
    }

    fn submit(&mut self, unique: u64, transfer: Transfer) {
        let Transfer { operation, range, fua, skip, length } = transfer;
        let buffer = match operation {
            Operation::Read => self.channel.buffer(range.len() as usize),
            Operation::Write => self.channel.take_data(length, self.queue.parked() > 0),
            Operation::Flush | Operation::Discard | Operation::WriteZeroes => AlignedBuffer::default(),
        };
        let pending = Some(Pending { unique, operation, skip, length });
        let slot = self.free.pop().unwrap_or(self.pending.len());
        match self.pending.get_mut(slot) {
            Some(free) => *free = pending,
            None => self.pending.push(pending),
        }
        let request = Request::unmarked(slot as u64, operation, range, fua, buffer);
        self.queue.submit_plugged(request, &mut self.done);
        self.reply_completed();
    }

    fn reply_completed(&mut self) {
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

    fn complete(&mut self, pending: Pending, result: &Result<()>, buffer: AlignedBuffer) {
        let Pending { unique, operation, skip, length } = pending;
        let errno = result.as_ref().map_or_else(cbd_types::Error::errno, |()| 0);
        match operation {
            Operation::Read if errno == 0 => self.channel.reply_with(unique, buffer, skip..skip + length),
            Operation::Read => {
                self.channel.free(buffer);
                self.channel.reply(unique, errno, &[]);
            }
            Operation::Write => {
                self.channel.free(buffer);
                let written = WriteOut { size: length as u32, padding: 0 };
                self.channel.reply(unique, errno, if errno == 0 { written.as_bytes() } else { &[] });
            }
            Operation::Flush | Operation::Discard | Operation::WriteZeroes => {
                self.channel.reply(unique, errno, &[]);
            }
        }
    }
}
