//! One connection after the handshake: receives requests and sends replies, on one thread with its own request queue.
//!
//! A request that the device completes at once is answered at once; one that it parks is answered when it completes,
//! possibly out of order. One wait set covers the socket, the queue and the stop event.
//!
//! Invariants:
//! - each request that was read completely gets exactly one reply, unless the client disconnected or the stop timed
//!   out;
//! - requests that were read and not answered are bounded in number and bytes (`memory`); beyond that the socket is not
//!   read, so a client that sends without reading its replies blocks only its own connection;
//! - a request that waits for memory waits for requests of its own connection, never for another client;
//! - after the client's last request, the requests in the device are completed before the queue is closed; requests
//!   that have not begun are given up if the client has disconnected, or if a new client waits for the end of this one.

use super::Limits;
use super::client_entry::ClientEntry;
use super::ending::Ending;
use super::handshake::Negotiated;
use super::incoming::{Incoming, Payload};
use super::memory::{Memory, RESERVED, cost_of};
use super::parts::{Direction, Framing, Next, PART, Parts};
use super::receive::{Received, Receiver};
use super::reply::{Output, Reply, Sent};
use super::request::{CACHE_PIECE, Rules, Task};
use super::slots::{Kind, Slot, Slots};
use super::status;
use super::verify::{StatusRequest, Verifications};
use super::waits::Waits;
use crate::protocol::{RequestHeader, command};
use cbd_export::clients::is_settled;
use cbd_export::{BlockDevice, RequestQueue};
use cbd_types::{AlignedBuffer, ByteRange, Completion, Error, ErrorKind, Operation, Request, Result};
use socket2::Socket;
use std::collections::VecDeque;
use std::mem;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Replies are sent when this many bytes of them are queued, even if more requests were received.
const SEND_THRESHOLD: usize = 64 << 10;
/// After this time without a request, spare buffers are freed.
const IDLE: Duration = Duration::from_secs(1);

pub(super) struct Connection<'a> {
    socket: &'a Socket,
    device: &'a dyn BlockDevice,
    queue: Box<dyn RequestQueue>,
    rules: Rules,
    negotiated: Negotiated,
    limits: Limits,
    receiver: Receiver,
    incoming: Incoming,
    output: Output,
    memory: Memory,
    /// The request that is executed in parts.
    parts: Option<Parts>,
    slots: Slots,
    /// Requests that were read and whose replies are not sent.
    unanswered: usize,
    /// CACHE commands that are not finished, and their buffers.
    cache_commands: VecDeque<(usize, AlignedBuffer)>,
    verifications: Verifications,
    done: Vec<Completion>,
    ending: Option<Ending>,
    /// Set when the server stops: the time at which parked requests are given up.
    stop_until: Option<Instant>,
    fault: Option<Error>,
    waits: Waits,
    /// Declared after the queue, so that it is dropped after it.
    client_entry: ClientEntry,
}

impl<'a> Connection<'a> {
    pub(super) fn new(
        socket: &'a Socket,
        device: &'a dyn BlockDevice,
        rules: Rules,
        negotiated: Negotiated,
        limits: Limits,
        memory: Memory,
        client_entry: ClientEntry,
    ) -> Result<Self> {
        let queue = device.open_queue()?;
        let (stop, awaited) = (limits.stop_descriptor, client_entry.descriptor());
        let waits = Waits::new(socket.as_raw_fd(), stop, awaited, &queue.wait_descriptors());
        Ok(Self {
            socket,
            device,
            queue,
            rules: rules.with_contexts(negotiated.contexts),
            negotiated,
            limits,
            receiver: Receiver::new(),
            incoming: Incoming::Head,
            output: Output::default(),
            memory,
            parts: None,
            slots: Slots::default(),
            unanswered: 0,
            cache_commands: VecDeque::new(),
            verifications: Verifications::default(),
            done: Vec::new(),
            ending: None,
            stop_until: None,
            fault: None,
            waits,
            client_entry,
        })
    }

    /// Serves until the client disconnects, violates the protocol, or the server stops.
    ///
    /// # Errors
    /// The reason for the log; the connection ends in any case.
    pub(super) fn serve(mut self) -> Result<()> {
        loop {
            self.take_requests();
            self.submit_cache_piece();
            self.verify_further();
            self.read_next_part();
            // Parked requests continue when the descriptors of the queue are readable (`wait`).
            self.queue.unplug(&mut self.done);
            self.answer_completed();
            self.send();
            self.give_up();
            if self.is_over() {
                return self.fault.map_or(Ok(()), Err);
            }
            if !self.has_input() && !self.can_read_next_part() {
                self.wait()?;
            }
        }
    }

    // -- in ---------------------------------------------------------------------------------------------------

    /// Whether received bytes can be processed now.
    fn has_input(&self) -> bool {
        self.ending.is_none()
            && match &self.incoming {
                Incoming::Head => match self.receiver.peek() {
                    Ok(Some(header)) => self.admits(&header),
                    Ok(None) => false,
                    Err(_) => true,
                },
                Incoming::Payload(_) | Incoming::Refused { .. } => self.receiver.len() > 0,
                Incoming::Part => self.parts.as_ref().is_some_and(|parts| self.has_memory_for_part(parts)),
            }
    }

    /// Whether more bytes must be received before processing continues.
    fn wants_bytes(&self) -> bool {
        self.ending.is_none() && self.incoming.wants_bytes(self.receiver.len())
    }

    /// Whether the number of requests and their memory allow one more.
    fn admits(&self, header: &RequestHeader) -> bool {
        self.unanswered < self.limits.requests
            && !self.parts.as_ref().is_some_and(Parts::blocks_requests)
            && (self.memory.has(self.rules.cost(header)) || self.can_begin_in_parts(header))
    }

    /// Whether a request that exceeds the free memory can begin with its first part.
    fn can_begin_in_parts(&self, header: &RequestHeader) -> bool {
        let is_alone = header.command == command::READ && self.negotiated.framing(header) == Framing::OneHead;
        self.parts.is_none()
            && matches!(header.command, command::READ | command::WRITE)
            && self.rules.cost(header) > RESERVED
            && (!is_alone || self.memory.is_unused())
            && self.memory.has(cost_of(PART as usize))
    }

    fn has_memory_for_part(&self, parts: &Parts) -> bool {
        parts.has_next() && self.memory.has(cost_of(parts.next_length()))
    }

    /// Processes received bytes until more are needed, a bound is reached, or replies should be sent first.
    fn take_requests(&mut self) {
        while self.has_input() {
            match mem::replace(&mut self.incoming, Incoming::Head) {
                Incoming::Head => match self.receiver.peek() {
                    Ok(Some(header)) => {
                        if !self.begin(&header) {
                            // Another connection took the memory meanwhile.
                            break;
                        }
                    }
                    Ok(None) => {}
                    Err(error) => self.end(Some(error), true),
                },
                Incoming::Payload(mut payload) => {
                    payload.filled += self.receiver.take(&mut payload.buffer[payload.filled..]);
                    self.payload(payload);
                }
                Incoming::Part => {
                    if !self.receive_next_part() {
                        break;
                    }
                }
                Incoming::Refused { cookie, left, error } => self.skip(cookie, left, error),
            }
            if self.output.waiting() >= SEND_THRESHOLD {
                break;
            }
        }
    }

    /// Begins a request; false if there is no memory for it: it remains in the receive buffer.
    fn begin(&mut self, header: &RequestHeader) -> bool {
        let cookie = header.cookie;
        if header.command == command::DISC {
            self.receiver.consume(RequestHeader::SIZE);
            self.end(None, true);
            self.ending.iter_mut().for_each(|ending| ending.announced = true);
            return true;
        }
        let task = self.rules.validate(header, &self.negotiated);
        let cost = if task.is_ok() { self.rules.cost(header) } else { 0 };
        let is_whole = self.memory.take(cost);
        if !is_whole && !self.can_begin_in_parts(header) {
            return false;
        }
        self.receiver.consume(RequestHeader::SIZE);
        self.unanswered += 1;
        match task {
            Err(error) if header.command == command::WRITE => {
                self.skip(cookie, header.length as usize, error);
            }
            Err(error) => self.refuse(cookie, &error),
            Ok(Task::Device { operation, range, fua }) if !is_whole => {
                self.begin_in_parts(header, operation, range, fua);
            }
            Ok(Task::Device { operation: Operation::Write, range, fua }) => {
                let mut buffer = self.memory.buffer(header.length as usize);
                let filled = self.receiver.take(&mut buffer);
                let task = (Operation::Write, range, fua);
                self.payload(Payload { cookie, kind: Kind::Plain, task, buffer, filled });
            }
            Ok(Task::Device { operation: Operation::Read, range, fua }) => {
                let buffer = self.memory.buffer(header.length as usize);
                self.start(cookie, Kind::Read(range), (Operation::Read, range, fua), buffer);
            }
            Ok(Task::Device { operation, range, fua }) => {
                self.start(cookie, Kind::Plain, (operation, range, fua), AlignedBuffer::default());
            }
            Ok(Task::Cache(range)) => {
                let buffer = self.memory.buffer(range.len().min(CACHE_PIECE) as usize);
                let number = self.slots.insert(Slot { cookie, kind: Kind::Cache(range), cost });
                self.cache_commands.push_back((number, buffer));
            }
            Ok(Task::Status { range, one }) => {
                let request = StatusRequest { cookie, range, one, cost };
                if self.negotiated.contexts.verify {
                    self.verifications.add(request);
                } else {
                    self.reply_status(&request, Ok(None));
                }
            }
        }
        true
    }

    // -- requests in parts ------------------------------------------------------------------------------------

    fn begin_in_parts(&mut self, header: &RequestHeader, operation: Operation, range: ByteRange, fua: bool) {
        let structured = self.negotiated.structured;
        let direction = match operation {
            Operation::Write => Direction::Write { fua },
            _ => Direction::Read(self.negotiated.framing(header)),
        };
        self.parts = Some(Parts::new(header.cookie, structured, direction, range));
        if operation == Operation::Write {
            self.incoming = Incoming::Part;
        }
    }

    /// Begins to receive the next part of a write; false if there is no memory for it.
    fn receive_next_part(&mut self) -> bool {
        self.incoming = Incoming::Part;
        let Some(parts) = self.parts.as_mut().filter(|parts| parts.has_next()) else { return false };
        let Direction::Write { fua } = parts.direction else { return false };
        let length = parts.next_length();
        if !self.memory.take(cost_of(length)) {
            return false;
        }
        let (cookie, range) = (parts.cookie, parts.begin());
        let mut buffer = self.memory.buffer(length);
        let filled = self.receiver.take(&mut buffer);
        let task = (Operation::Write, range, fua);
        self.incoming = Incoming::Head;
        self.payload(Payload { cookie, kind: Kind::Part(range), task, buffer, filled });
        true
    }

    fn can_read_next_part(&self) -> bool {
        let sending = self.ending.as_ref().is_none_or(|ending| ending.sending);
        self.parts.as_ref().is_some_and(|parts| sending && parts.is_read() && self.has_memory_for_part(parts))
    }

    /// Submits the next part of a read, if there is memory for it.
    fn read_next_part(&mut self) {
        if !self.can_read_next_part() {
            return;
        }
        let Some(parts) = &mut self.parts else { return };
        let length = parts.next_length();
        if !self.memory.take(cost_of(length)) {
            return;
        }
        let (cookie, range) = (parts.cookie, parts.begin());
        let buffer = self.memory.buffer(length);
        self.start(cookie, Kind::Part(range), (Operation::Read, range, false), buffer);
    }

    /// The device completed a part.
    fn part_done(&mut self, part: ByteRange, cost: usize, result: Result<()>, buffer: AlignedBuffer) {
        let Some(parts) = &mut self.parts else {
            self.memory.give(cost);
            return;
        };
        match parts.done(part, result, buffer) {
            Next::Wait(buffer) => {
                self.memory.keep_spare(buffer);
                self.memory.give(cost);
            }
            Next::Send(reply) => self.output.push(reply),
            Next::End(reply) => {
                let has_buffer = reply.has_buffer();
                self.output.push(reply);
                self.parts = None;
                self.output.release();
                if !has_buffer {
                    self.memory.give(cost);
                }
            }
            Next::Broken(error) => {
                self.parts = None;
                self.memory.give(cost);
                self.end(Some(error), false);
            }
        }
    }

    /// Queues a reply; it is held back while only parts of a read with one head may be sent.
    fn push(&mut self, reply: Reply) {
        if self.parts.as_ref().is_some_and(Parts::excludes_replies) {
            self.output.hold(reply);
        } else {
            self.output.push(reply);
        }
    }

    /// Bytes of a write's payload were received: starts the write if the payload is complete.
    fn payload(&mut self, payload: Payload) {
        if payload.filled < payload.buffer.len() {
            self.incoming = Incoming::Payload(payload);
            return;
        }
        let Payload { cookie, kind, task, buffer, .. } = payload;
        self.start(cookie, kind, task, buffer);
        if matches!(kind, Kind::Part(_)) && self.parts.as_ref().is_some_and(Parts::has_next) {
            self.incoming = Incoming::Part;
        }
    }

    /// Discards the `left` remaining payload bytes of a write that was refused, then replies with the error.
    fn skip(&mut self, cookie: u64, left: usize, error: Error) {
        let left = left - self.receiver.consume(left);
        if left == 0 {
            self.refuse(cookie, &error);
        } else {
            self.incoming = Incoming::Refused { cookie, left, error };
        }
    }

    fn refuse(&mut self, cookie: u64, error: &Error) {
        self.push(Reply::error(cookie, self.negotiated.structured, error));
    }

    fn receive(&mut self) {
        match self.incoming.receive(&mut self.receiver, self.socket) {
            // A write whose payload is complete starts even if no further bytes were received.
            Ok(Received::Bytes(_)) => {
                if let Some(payload) = self.incoming.take_complete() {
                    self.payload(payload);
                }
            }
            Ok(Received::Nothing) => {}
            // A client may shut down its sending half and still wait for its replies.
            Ok(Received::End) => self.end(None, !self.waits.is_hung_up()),
            Err(error) => {
                let text = format!("the connection of an NBD client failed: {error}");
                self.end(Some(Error::new(ErrorKind::Stopped, text)), false);
            }
        }
    }

    // -- the device -------------------------------------------------------------------------------------------

    fn start(&mut self, cookie: u64, kind: Kind, task: (Operation, ByteRange, bool), buffer: AlignedBuffer) {
        let (operation, range, fua) = task;
        let is_alone = self.slots.parked() == 0 && self.receiver.len() == 0;
        let number = self.slots.insert(Slot { cookie, kind, cost: cost_of(buffer.len()) });
        let request = Request::unmarked(number as u64, operation, range, fua, buffer);
        if is_alone {
            self.queue.submit(request, &mut self.done);
        } else {
            self.queue.submit_plugged(request, &mut self.done);
        }
        self.answer_completed();
    }

    /// Submits one piece of one CACHE command, so that a long command does not delay other requests.
    fn submit_cache_piece(&mut self) {
        let Some((number, mut buffer)) = self.cache_commands.pop_front() else { return };
        let Some(Slot { kind: Kind::Cache(left), .. }) = self.slots.get_mut(number) else { return };
        let range = ByteRange { start: left.start, end: left.end.min(left.start + CACHE_PIECE) };
        left.start = range.end;
        buffer.resize(range.len() as usize);
        let request = Request::unmarked(number as u64, Operation::Read, range, false, buffer);
        self.queue.submit(request, &mut self.done);
        self.answer_completed();
    }

    /// Takes the steps of verifications that have returned, and submits one more.
    fn verify_further(&mut self) {
        let has_ended = self.ending.as_ref().is_some_and(|ending| !ending.sending || ending.gave_up);
        let is_wanted = !has_ended && self.stop_until.is_none();
        for (request, result) in self.verifications.further(&mut *self.queue, is_wanted) {
            self.reply_status(&request, result.map(Some));
        }
    }

    fn reply_status(&mut self, request: &StatusRequest, verified: Result<Option<Vec<(u32, u32)>>>) {
        let StatusRequest { cookie, range, one, cost } = *request;
        let contexts = self.negotiated.contexts;
        match verified.and_then(|verified| status::describe(self.device, range, one, contexts, verified)) {
            Ok(contexts) => self.push(Reply::status(cookie, &contexts, cost)),
            Err(error) => {
                self.memory.give(cost);
                self.refuse(cookie, &error);
            }
        }
    }

    /// Answers the requests that the device has completed.
    fn answer_completed(&mut self) {
        let mut done = mem::take(&mut self.done);
        for completion in done.drain(..) {
            self.answer(completion);
        }
        self.done = done;
    }

    fn answer(&mut self, completion: Completion) {
        let Completion { id, result, buffer } = completion;
        let number = usize::try_from(id).unwrap_or(usize::MAX);
        let Some(slot) = self.slots.take(number) else {
            debug_assert!(false, "the device completed request {id}, which it does not have");
            return;
        };
        if let (Kind::Cache(left), Ok(())) = (slot.kind, &result)
            && !left.is_empty()
            && self.ending.is_none()
        {
            self.slots.put_back(number, slot);
            self.cache_commands.push_back((number, buffer));
            return;
        }
        self.slots.free(number);
        if let Kind::Part(part) = slot.kind {
            self.part_done(part, slot.cost, result, buffer);
            return;
        }
        let (reply, buffer) = slot.reply(self.negotiated.structured, result, buffer);
        self.push(reply);
        // A buffer that is sent with the reply remains accounted until then.
        if let Some(buffer) = buffer {
            self.memory.keep_spare(buffer);
            self.memory.give(slot.cost);
        }
    }

    // -- out --------------------------------------------------------------------------------------------------

    fn send(&mut self) {
        if self.output.is_empty() || self.ending.as_ref().is_some_and(|ending| !ending.sending) {
            return;
        }
        let (unanswered, memory) = (&mut self.unanswered, &mut self.memory);
        let sent = self.output.send(self.socket, |Sent { ends, cost, buffer }| {
            *unanswered -= usize::from(ends);
            if let Some(buffer) = buffer {
                memory.keep_spare(buffer);
            }
            memory.give(cost);
        });
        if let Err(error) = sent {
            let text = format!("an NBD client disconnected without waiting for its replies: {error}");
            self.end(Some(Error::new(ErrorKind::Stopped, text)), false);
        }
    }

    // -- the end ----------------------------------------------------------------------------------------------

    /// Stops taking requests. `sending` states whether the client can still receive replies.
    fn end(&mut self, fault: Option<Error>, sending: bool) {
        if self.fault.is_none() {
            self.fault = fault;
        }
        match &mut self.ending {
            Some(ending) => ending.sending &= sending,
            None => {
                self.ending = Some(Ending::new(sending, self.limits.stop));
                self.client_entry.leave();
            }
        }
    }

    /// Gives up requests that have not begun, if the connection is broken or a new client waits for its end; reports to
    /// `client_entry` when no request of this connection can change the device any more.
    fn give_up(&mut self) {
        let Some(ending) = &mut self.ending else { return };
        if !ending.gave_up && (ending.is_broken() || self.client_entry.is_awaited()) {
            ending.gave_up = true;
            self.queue.give_up(&mut self.done);
            self.answer_completed();
            self.verify_further();
            self.send();
        }
        if is_settled(self.queue.changes()) {
            self.client_entry.settled();
        }
    }

    /// Whether requests are in the device, or are to be.
    fn is_in_device(&self) -> bool {
        self.slots.parked() > 0 || !self.verifications.is_empty()
    }

    fn is_over(&mut self) -> bool {
        let is_in_device = self.is_in_device();
        let Some(ending) = &mut self.ending else { return false };
        let now = Instant::now();
        if self.stop_until.is_some_and(|until| now >= until) {
            return true;
        }
        if is_in_device {
            // The device still has parked requests; the timeout for sending begins after them.
            ending.until = now + self.limits.stop;
            return false;
        }
        let is_reading = self.parts.as_ref().is_some_and(Parts::is_read);
        (self.output.is_empty() && !is_reading) || !ending.sending || now >= ending.until
    }

    // -- waiting ----------------------------------------------------------------------------------------------

    fn wait(&mut self) -> Result<()> {
        let input = self.wants_bytes();
        let sending = self.ending.as_ref().is_none_or(|ending| ending.sending);
        let output = sending && !self.output.is_empty();
        self.waits.wait(input, output, sending, self.stop_until.is_some(), self.timeout())?;

        if self.waits.is_stopped() {
            self.stop_until = Some(Instant::now() + self.limits.stop);
            self.end(None, true);
        }
        if self.waits.is_awaited() && self.client_entry.is_awaited() {
            self.end(None, true);
        }
        if self.waits.has_queue() {
            self.queue.poll(&mut self.done);
            self.answer_completed();
        }
        if input && self.waits.has_bytes() {
            if self.ending.is_none() {
                self.receive();
            }
        } else if !input && self.waits.is_hung_up() {
            self.end(None, false);
        } else if self.unanswered == 0 && self.memory.is_idle() && self.waits.none_ready() {
            self.memory.trim();
            self.queue.trim();
        }
        Ok(())
    }

    fn timeout(&self) -> Option<Duration> {
        if !self.cache_commands.is_empty() || self.verifications.can_begin() {
            return Some(Duration::ZERO);
        }
        let sending = self.ending.as_ref().filter(|_| !self.is_in_device()).map(|ending| ending.until);
        let until = [self.stop_until, sending].into_iter().flatten().min();
        match until {
            Some(until) => Some(until.saturating_duration_since(Instant::now())),
            None => (self.unanswered == 0 && self.memory.is_idle()).then_some(IDLE),
        }
    }
}
