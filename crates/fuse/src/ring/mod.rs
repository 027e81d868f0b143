//! Serving by io_uring: the kernel has a queue for each processor, and hands a request over on the queue of the processor on
//! which it was made, into memory that was registered for that. One system call answers a request and waits for the next.
//!
//! Always true here: a message is answered where it was handed over. A slot that waits for the device holds up no other slot. What
//! a thread has taken it completes before it ends; then its queues are nobody's, so the others end too, and with the last the
//! connection. What is not handed over by the ring (that somebody forgets a node, that somebody is impatient) is read from the
//! door of the first thread.
//!
//! Left to others: what a message asks for ([`crate::worker`]); taking the whole path only where all of it works
//! ([`crate::service`]).

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

/// What one slot holds: the largest transfer, with the sectors around it that an unaligned read takes along.
const PAYLOAD_BYTES: usize = TRANSFER_BYTES_MAX + 2 * 4096;
/// Answers that wait for the next entry into the kernel at most.
const UNSUBMITTED_MAX: usize = 4;

/// What the ring calls the wish to stop.
const STOP: u32 = 0;
/// What it calls the door.
const DOOR: u32 = 1;
/// What it calls the end of the connection.
const DESERTED: u32 = 2;
/// What it calls the first of the queue's descriptors.
const QUEUE: u32 = 3;

/// Whom an answer goes to.
#[derive(Clone, Copy)]
pub enum Asker {
    /// Whoever's request is in this slot.
    Slot(usize),
    /// The sender of the message with this number, which came through the door.
    Message(u64),
}

/// The slots of a thread, registered.
pub struct Rings {
    raw: RawRing,
    connection: File,
    door: Option<Door>,
    /// What happened before the thread began to wait.
    early: Vec<Event>,
    state: Connection,
    /// Why the thread can't go on.
    broken: Option<Error>,
}

impl Rings {
    /// Makes slots for the queue of each in `queues`, as often as it is named, and gives them to the kernel. `watches` is
    /// how many descriptors the device's queue has.
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

    /// Takes the message in a slot apart.
    fn receive(&self, slot: usize, name: &[u8]) -> std::result::Result<(InHeader, Call), Malformed> {
        let nothing = Malformed { unique: None };
        let header = self.raw.header(slot).ok_or(nothing)?;
        let payload = self.raw.payload(slot).ok_or(nothing)?;
        let (in_header, _) = header.in_out.as_bytes().split_at(size_of::<InHeader>());
        let length = in_header.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes)) as usize;
        let payload = payload.get(..header.payload_sz as usize).ok_or(nothing)?;
        // The header says how long all three parts are, the slot how long the third is.
        let arguments = length.checked_sub(in_header.len() + payload.len()).ok_or(nothing)?;
        let arguments = header.op_in.as_bytes().get(..arguments).ok_or(nothing)?;
        call::decode(in_header, arguments, payload, name)
    }

    /// Answers what is in a slot.
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

    /// The device works on the very buffer that the kernel filled or is to read.
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

    /// A slot is given back to its queue by an answer only.
    fn let_go(&mut self, asker: Asker) {
        if let Asker::Slot(slot) = asker {
            self.reply(slot, libc::ENOSYS, 0, |_| {});
        }
    }
}

/// Serves until the connection ends or a stop is wished, and what was taken is completed. What is given back may be freed when the
/// thread is gone.
pub fn serve(worker: Worker, mut rings: Rings) -> (Result<()>, Lent) {
    let descriptors = worker.queue.wait_descriptors();
    let early = std::mem::take(&mut rings.early);
    let serving = Serving::new(worker, rings);
    let mut waiting = Waiting { serving, descriptors, stopping: false, deserted: false };
    let served = waiting.run(early);
    (served, waiting.serving.carrier.raw.into_lent())
}

/// A thread's wait for its slots, for its queue, and for the wish to stop.
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
        // What was taken before an error is done as well, and answered before anything that takes long.
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

    /// Does what the events ask for, or begins to; whether the device has something to go on with.
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

    /// Lets the kernel have answers when some have come together.
    fn submit_if_many(&mut self) -> Result<()> {
        let raw = &mut self.serving.carrier.raw;
        if raw.unsubmitted() < UNSUBMITTED_MAX {
            return Ok(());
        }
        raw.submit_all().map_err(|error| system_error("a FUSE thread cannot answer", &error))
    }

    /// Waits for a descriptor, once more. The wish to stop is told for good, and a door without a connection too.
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

    /// Takes what was handed over. After the wish to stop it stays where it is: it is answered with an error when the
    /// connection ends.
    fn take(&mut self, slot: usize) {
        if self.stopping || self.serving.carrier.state == Connection::Gone {
            return;
        }
        match self.serving.carrier.receive(slot, self.serving.worker.filesystem.name.as_bytes()) {
            Ok((header, call)) => self.serving.act(Asker::Slot(slot), &header, call),
            Err(_) => self.serving.carrier.reply(slot, libc::EIO, 0, |_| {}),
        }
    }

    /// A slot will have no request any more: the connection has ended, or this thread and the kernel do not understand each
    /// other.
    fn lose(&mut self, errno: i32) {
        let carrier = &mut self.serving.carrier;
        // The last: answered while the connection was ending.
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

    /// Takes what is not handed over by the ring.
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
