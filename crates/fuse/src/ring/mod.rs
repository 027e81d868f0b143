//! Serving by io_uring: the kernel has a queue for each processor, and delivers a request on the queue of the
//! processor on which it was made, into registered memory. One system call answers a request and waits for
//! the next one.
//!
//! Invariants: a message is answered on the queue on which it was delivered. A slot that waits for the device
//! delays no other slot. A thread completes its requests before it ends; then its queues have no server, so
//! the other threads end too, and with the last one the connection. Messages that are not delivered through
//! the ring (FORGET and INTERRUPT) are read from the channel of the first thread.
//!
//! Elsewhere: the meaning of a message ([`crate::worker`]); the decision to use this transport only if all of
//! it works ([`crate::service`]).

pub mod processors;
pub mod raw;

use crate::call::{self, Call, Malformed};
use crate::door::{Connection, Door};
use crate::errors::system_error;
use crate::filesystem::TRANSFER_BYTES_MAX;
use crate::life::Life;
use crate::wire::{InHeader, OutHeader};
use crate::worker::{Carrier, Serving, Worker};
use cbd_types::{AlignedBuffer, Error, ErrorKind, Operation, Result};
use raw::{Event, Lent, RawRing};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// The size of a slot's payload: the largest transfer, with the surrounding sectors of an unaligned read.
const PAYLOAD_BYTES: usize = TRANSFER_BYTES_MAX + 2 * 4096;
/// Replies that wait for the next submission at most.
const UNSUBMITTED_MAX: usize = 4;

/// The ring's number of the stop pipe.
const STOP: u32 = 0;
/// Its number of the channel.
const DOOR: u32 = 1;
/// Its number of the event that the connection has ended.
const DESERTED: u32 = 2;
/// Its first number of the device queue's descriptors.
const QUEUE: u32 = 3;

/// The addressee of a reply.
#[derive(Clone, Copy)]
pub enum Asker {
    /// The requester of the request in this slot.
    Slot(usize),
    /// The sender of the message with this number, which was read from the channel.
    Message(u64),
}

/// The registered slots of a thread.
pub struct Rings {
    raw: RawRing,
    connection: File,
    door: Option<Door>,
    /// Events before the thread began to wait.
    early: Vec<Event>,
    state: Connection,
    /// Why the thread cannot continue.
    broken: Option<Error>,
}

impl Rings {
    /// Allocates slots for the queue of each entry in `queues`, one per entry, and registers them with the
    /// kernel. `watches` is the number of descriptors of the device's queue.
    ///
    /// # Errors
    /// When the system refuses a ring, or the kernel a slot.
    pub fn register(
        connection: File,
        queues: &[u16],
        watches: usize,
        life: Option<&Arc<Life>>,
    ) -> Result<Self> {
        let refused = |error: &io::Error| system_error("a queue of FUSE over io_uring cannot be had", error);
        let raw =
            RawRing::new(queues, PAYLOAD_BYTES, watches + QUEUE as usize).map_err(|error| refused(&error))?;
        let door = match life {
            Some(life) => {
                Some(Door::new(connection.try_clone().map_err(|error| refused(&error))?, Arc::clone(life)))
            }
            None => None,
        };
        let (early, state) = (Vec::new(), Connection::Alive);
        let mut rings = Self { raw, connection, door, early, state, broken: None };
        rings.raw.register(rings.connection.as_raw_fd()).map_err(|error| refused(&error))?;
        rings.raw.look(&mut rings.early);
        match rings
            .early
            .iter()
            .find_map(|event| if let Event::Slot(_, Err(errno)) = event { Some(*errno) } else { None })
        {
            Some(errno) => Err(refused(&io::Error::from_raw_os_error(errno))),
            None => Ok(rings),
        }
    }

    /// Decodes the message in a slot.
    fn receive(&self, slot: usize, name: &[u8]) -> std::result::Result<(InHeader, Call), Malformed> {
        let nothing = Malformed { unique: None };
        let header = self.raw.header(slot).ok_or(nothing)?;
        let payload = self.raw.payload(slot).ok_or(nothing)?;
        let (in_header, _) = header.in_out.as_bytes().split_at(size_of::<InHeader>());
        let length = in_header.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes)) as usize;
        let payload = payload.get(..header.payload_sz as usize).ok_or(nothing)?;
        // The header states the length of all three parts, the slot that of the third.
        let arguments = length.checked_sub(in_header.len() + payload.len()).ok_or(nothing)?;
        let arguments = header.op_in.as_bytes().get(..arguments).ok_or(nothing)?;
        call::decode(in_header, arguments, payload, name)
    }

    /// Answers the request in a slot.
    fn reply(&mut self, slot: usize, errno: i32, payload_bytes: usize, fill: impl FnOnce(&mut [u8])) {
        if self.state == Connection::Gone {
            return;
        }
        let Some(unique) = self.raw.header(slot).map(|header| header.commit_id) else { return };
        let len = size_of::<OutHeader>() + payload_bytes;
        let header = OutHeader { len: len as u32, error: -errno, unique };
        let connection = self.connection.as_raw_fd();
        if let Err(error) = self.raw.answer(connection, slot, header.as_bytes(), payload_bytes, fill) {
            let text = "a request that came by io_uring cannot be answered";
            self.broken.get_or_insert(system_error(text, &error));
        }
    }
}

impl Carrier for Rings {
    type Asker = Asker;

    /// The device works directly on the buffer that the kernel has filled or will read.
    fn lend(
        &mut self,
        asker: Asker,
        operation: Operation,
        length: usize,
        crowded: bool,
    ) -> Option<AlignedBuffer> {
        match asker {
            Asker::Slot(slot) => self.raw.take_payload(slot, length),
            Asker::Message(unique) => self.door.as_mut()?.lend(unique, operation, length, crowded),
        }
    }

    fn take_back(&mut self, asker: Asker, buffer: AlignedBuffer) {
        match (asker, &mut self.door) {
            (Asker::Slot(slot), _) => self.raw.put_payload(slot, buffer),
            (Asker::Message(unique), Some(door)) => door.take_back(unique, buffer),
            (Asker::Message(_), None) => {}
        }
    }

    fn answer(&mut self, asker: Asker, errno: i32, bytes: &[u8]) {
        match (asker, &mut self.door) {
            (Asker::Slot(slot), _) => {
                self.reply(slot, errno, bytes.len(), |payload| payload.copy_from_slice(bytes));
            }
            (Asker::Message(unique), Some(door)) => door.answer(unique, errno, bytes),
            (Asker::Message(_), None) => {}
        }
    }

    fn answer_with(&mut self, asker: Asker, mut buffer: AlignedBuffer, part: Range<usize>) {
        match (asker, &mut self.door) {
            (Asker::Slot(slot), _) => {
                let length = part.len();
                if part.start > 0 {
                    buffer.copy_within(part, 0);
                }
                self.raw.put_payload(slot, buffer);
                self.reply(slot, 0, length, |_| {});
            }
            (Asker::Message(unique), Some(door)) => door.answer_with(unique, buffer, part),
            (Asker::Message(_), None) => {}
        }
    }

    /// Only a reply returns a slot to its queue.
    fn let_go(&mut self, asker: Asker) {
        if let Asker::Slot(slot) = asker {
            self.reply(slot, libc::ENOSYS, 0, |_| {});
        }
    }
}

/// Serves until the connection ends or a stop is requested, and until all requests in flight are completed.
/// The returned memory may be freed when the thread has ended.
pub fn serve(worker: Worker, mut rings: Rings) -> (Result<()>, Lent) {
    let descriptors = worker.queue.wait_descriptors();
    let early = std::mem::take(&mut rings.early);
    let serving = Serving::new(worker, rings);
    let mut waiting = Waiting { serving, descriptors, stopping: false, deserted: false };
    let served = waiting.run(early);
    (served, waiting.serving.carrier.raw.into_lent())
}

/// A thread's wait for its slots, for its queue, and for the stop request.
struct Waiting {
    serving: Serving<Rings>,
    /// Those of the device's queue.
    descriptors: Vec<RawFd>,
    stopping: bool,
    deserted: bool,
}

impl Waiting {
    fn run(&mut self, mut events: Vec<Event>) -> Result<()> {
        let failed = |error: io::Error| system_error("a FUSE thread cannot wait for its ring", &error);
        let door = self.serving.carrier.door.is_some().then_some(DOOR);
        let queue = (QUEUE..).take(self.descriptors.len());
        for watch in [Some(STOP), Some(DESERTED), door].into_iter().flatten().chain(queue) {
            self.watch(watch)?;
        }
        loop {
            self.handle(&events)?;
            events.clear();
            if let Some(error) = self.serving.carrier.broken.take() {
                return Err(error);
            }
            if self.finished() {
                break;
            }
            self.serving.carrier.raw.wait(&mut events).map_err(failed)?;
        }
        self.serving.carrier.raw.submit_all().map_err(failed)
    }

    fn finished(&self) -> bool {
        let gone = self.serving.carrier.state == Connection::Gone;
        (self.stopping || gone) && self.serving.parked() == 0
    }

    fn handle(&mut self, events: &[Event]) -> Result<()> {
        let acted = self.act(events);
        // Requests that were read before an error are executed as well, and answered before any step that
        // takes long.
        self.serving.unplug();
        self.submit_if_many()?;
        if acted? {
            self.serving.poll();
        }
        if self.deserted || self.serving.carrier.state == Connection::Gone {
            self.serving.give_up();
        }
        for &event in events {
            if let Event::Watch(watch) = event {
                self.watch(watch)?;
            }
        }
        Ok(())
    }

    /// Executes the requests of the events, or begins to; returns whether the device's queue has completions.
    fn act(&mut self, events: &[Event]) -> Result<bool> {
        let mut completions = false;
        for &event in events {
            match event {
                Event::Slot(slot, Ok(())) => self.take(slot),
                Event::Slot(_, Err(errno)) => self.lose(errno),
                Event::Watch(STOP) => self.stopping = true,
                Event::Watch(DESERTED) => self.deserted = true,
                Event::Watch(DOOR) => self.take_from_door()?,
                Event::Watch(_) => completions = true,
            }
            self.submit_if_many()?;
        }
        Ok(completions)
    }

    /// Submits the replies when several have accumulated.
    fn submit_if_many(&mut self) -> Result<()> {
        let raw = &mut self.serving.carrier.raw;
        if raw.unsubmitted() < UNSUBMITTED_MAX {
            return Ok(());
        }
        raw.submit_all().map_err(|error| system_error("a FUSE thread cannot answer", &error))
    }

    /// Arms the poll of a descriptor again. A stop request stays signalled, and the channel of an ended
    /// connection too, so both are armed only once.
    fn watch(&mut self, watch: u32) -> Result<()> {
        let carrier = &mut self.serving.carrier;
        let descriptor = match watch {
            STOP if self.stopping => return Ok(()),
            STOP => Some(self.serving.worker.stop.as_raw_fd()),
            DESERTED if self.deserted => return Ok(()),
            DESERTED => Some(self.serving.worker.life.deserted()),
            DOOR if carrier.state == Connection::Gone => return Ok(()),
            DOOR => carrier.door.as_ref().map(Door::descriptor),
            queue => self.descriptors.get((queue - QUEUE) as usize).copied(),
        };
        let Some(descriptor) = descriptor else { return Ok(()) };
        carrier
            .raw
            .watch(descriptor, watch)
            .map_err(|error| system_error("a FUSE thread cannot wait for its descriptors", &error))
    }

    /// Takes a delivered request. After the stop request it stays in its slot: the kernel answers it with an
    /// error when the connection ends.
    fn take(&mut self, slot: usize) {
        if self.stopping || self.serving.carrier.state == Connection::Gone {
            return;
        }
        match self.serving.carrier.receive(slot, self.serving.worker.filesystem.name.as_bytes()) {
            Ok((header, call)) => self.serving.act(Asker::Slot(slot), &header, call),
            Err(_) => self.serving.carrier.reply(slot, libc::EIO, 0, |_| {}),
        }
    }

    /// A slot receives no more requests: the connection has ended, or this thread and the kernel disagree
    /// about the protocol.
    fn lose(&mut self, errno: i32) {
        let carrier = &mut self.serving.carrier;
        // The last one: answered while the connection was ending.
        let expected = [libc::ENOTCONN, libc::ECONNABORTED, libc::ENODEV, libc::ECANCELED, libc::ENOENT];
        if carrier.state == Connection::Alive && !expected.contains(&errno) {
            let text = format!(
                "the kernel did not take an answer by io_uring: {}",
                io::Error::from_raw_os_error(errno)
            );
            carrier.broken.get_or_insert(Error::new(ErrorKind::System, text));
        }
        carrier.state = Connection::Gone;
    }

    /// Reads the messages that are not delivered through the ring.
    fn take_from_door(&mut self) -> Result<()> {
        while let Some(door) = &mut self.serving.carrier.door {
            if self.stopping || self.serving.carrier.state == Connection::Gone {
                break;
            }
            let received = door.receive(self.serving.worker.filesystem.name.as_bytes())?;
            if door.state() == Connection::Gone {
                self.serving.carrier.state = Connection::Gone;
            }
            match received {
                None => break,
                Some(Ok((header, call))) => self.serving.act(Asker::Message(header.unique), &header, call),
                Some(Err(Malformed { unique: Some(unique) })) => {
                    self.serving.carrier.answer(Asker::Message(unique), libc::EIO, &[]);
                }
                Some(Err(Malformed { unique: None })) => {}
            }
        }
        Ok(())
    }
}
