//! The work of a thread that serves a queue: it takes requests from its slots, executes them through its own queue of
//! the device, and answers them.
//!
//! Invariants: a request is answered once, through its slot, or left to the next server completely; a slot that waits
//! for the device delays no other slot; nothing is allocated for a request, and one system call submits replies and
//! waits for requests. An invalid description is an error of that request.
//!
//! Elsewhere: the start and end of the thread ([`crate::service`]).

use crate::request::{self, Task};
use crate::ring::{Event, Ring};
use crate::thread_control::{Order, ThreadControl};
use cbd_export::{RequestQueue, system_error};
use cbd_types::{AlignedBuffer, Completion, Error, ErrorKind, Geometry, Operation, Request, Result};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

/// Requests that are taken before completed ones are answered.
const BATCH: usize = 16;

/// The watch number of the next order.
const ORDER: u32 = 0;
/// The first watch number of the device queue's descriptors.
const QUEUE: u32 = 1;
/// Descriptors that are watched besides those of the device's queue.
pub const WATCHES: usize = QUEUE as usize;

/// The state of a slot that this thread owns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Slot {
    /// No request, or the kernel owns the slot.
    Idle,
    /// The device executes its request.
    Busy(Operation, i32),
    /// The device executes its request, which was already answered with an error.
    GivenUp,
    /// The kernel has ended it.
    Ended,
}

/// The work of a thread.
pub struct Worker {
    ring: Ring,
    queue: Box<dyn RequestQueue>,
    geometry: Geometry,
    read_only: bool,
    thread_control: Arc<ThreadControl>,
    /// The last order that was read.
    order: Order,
    slots: Vec<Slot>,
    ended: usize,
    events: Vec<Event>,
    done: Vec<Completion>,
    descriptors: Vec<RawFd>,
}

impl Worker {
    /// The work on a ring whose slots are offered.
    pub fn new(
        ring: Ring,
        queue: Box<dyn RequestQueue>,
        geometry: Geometry,
        read_only: bool,
        thread_control: Arc<ThreadControl>,
    ) -> Self {
        let depth = ring.depth();
        Self {
            ring,
            descriptors: queue.wait_descriptors(),
            queue,
            geometry,
            read_only,
            thread_control,
            order: Order::Serve,
            slots: vec![Slot::Idle; depth],
            ended: 0,
            events: Vec::with_capacity(depth + WATCHES),
            done: Vec::with_capacity(depth),
        }
    }

    /// The memory that may be freed when the thread has ended.
    pub fn into_ring(self) -> Ring {
        self.ring
    }

    /// Serves until all slots have ended, or until it was ordered to leave and the device has no request in flight.
    ///
    /// # Errors
    /// When the kernel and this thread disagree about the protocol.
    pub fn serve(&mut self) -> Result<()> {
        let failed =
            |error: io::Error| system_error("a thread of a ublk device cannot wait for its ring", &error);
        for watch in (ORDER..).take(WATCHES + self.descriptors.len()) {
            self.watch(watch)?;
        }
        let mut events = std::mem::take(&mut self.events);
        loop {
            self.ring.wait(&mut events).map_err(failed)?;
            self.handle(&events)?;
            events.clear();
            if self.is_finished() {
                break;
            }
        }
        self.ring.submit().map_err(failed)
    }

    fn is_finished(&self) -> bool {
        let no_more_requests = self.ended == self.slots.len() || self.order == Order::Leave;
        no_more_requests && self.queue.parked() == 0
    }

    fn handle(&mut self, events: &[Event]) -> Result<()> {
        let mut has_progress = false;
        for some in events.chunks(BATCH) {
            for &event in some {
                match event {
                    Event::Slot(slot, 0) => self.take(slot, some.len() > 1)?,
                    Event::Slot(slot, result) => self.end(slot, result)?,
                    Event::Watch(ORDER) => self.read_order()?,
                    Event::Watch(_) => has_progress = true,
                }
            }
            self.queue.unplug(&mut self.done);
            self.answer_completed()?;
            if events.len() > BATCH {
                self.ring.submit().map_err(|error| cannot_answer(&error))?;
            }
        }
        if has_progress {
            self.queue.poll(&mut self.done);
            self.answer_completed()?;
        }
        for &event in events {
            if let Event::Watch(watch) = event {
                self.watch(watch)?;
            }
        }
        Ok(())
    }

    /// Arms the poll of a descriptor again.
    fn watch(&mut self, watch: u32) -> Result<()> {
        let descriptor = match watch {
            ORDER => self.thread_control.later_order(self.order),
            queue => self.descriptors.get((queue - QUEUE) as usize).copied(),
        };
        let Some(descriptor) = descriptor else { return Ok(()) };
        self.ring.watch(descriptor, watch).map_err(|error| {
            system_error("a thread of a ublk device cannot wait for its descriptors", &error)
        })
    }

    // -- in ------------------------------------------------------------------------------------------

    /// Takes a request; with `plugged` the device may hold it back until the whole batch is taken.
    fn take(&mut self, slot: usize, plugged: bool) -> Result<()> {
        match self.order {
            Order::Serve => {}
            // The next server receives it.
            Order::Leave => return Ok(()),
            // The device may still execute the slot's earlier request.
            Order::Fail => return self.offer_again(slot, -libc::EIO),
        }
        let Some(description) = self.ring.description(slot) else { return Ok(()) };
        self.geometry.size = self.thread_control.size(self.geometry.size);
        match request::parse(&description, &self.geometry, self.read_only, self.ring.capacity()) {
            Ok(task) => self.submit(slot, task, plugged),
            Err(errno) => self.answer(slot, -errno),
        }
    }

    fn submit(&mut self, slot: usize, task: Task, plugged: bool) -> Result<()> {
        let length = task.data_bytes();
        let buffer =
            if length == 0 { Some(AlignedBuffer::default()) } else { self.ring.take_buffer(slot, length) };
        let Some(buffer) = buffer else { return self.answer(slot, -libc::EIO) };
        // The capacity of a buffer fits a positive 32-bit number.
        self.slots[slot] = Slot::Busy(task.operation, length as i32);
        let Task { operation, range, fua, class } = task;
        let request = Request { id: slot as u64, operation, range, fua, class, data_crc: None, buffer };
        if plugged {
            self.queue.submit_plugged(request, &mut self.done);
        } else {
            self.queue.submit(request, &mut self.done);
        }
        Ok(())
    }

    /// Handles a slot that the kernel has ended, or whose reply it refused.
    fn end(&mut self, slot: usize, result: i32) -> Result<()> {
        if self.slots[slot] != Slot::Ended {
            self.slots[slot] = Slot::Ended;
            self.ended += 1;
        }
        match -result {
            libc::ENODEV | libc::ECANCELED => Ok(()),
            errno => Err(Error::new(
                ErrorKind::System,
                format!(
                    "the kernel's ublk driver ended slot {slot} with an error: {}",
                    io::Error::from_raw_os_error(errno)
                ),
            )),
        }
    }

    /// Reads a new order.
    fn read_order(&mut self) -> Result<()> {
        self.order = self.thread_control.ordered();
        if self.order == Order::Fail {
            for slot in 0..self.slots.len() {
                if let Slot::Busy(..) = self.slots[slot] {
                    self.slots[slot] = Slot::GivenUp;
                    self.offer_again(slot, -libc::EIO)?;
                }
            }
            // The clients have received errors: a write that waits for space must not be executed later.
            self.queue.give_up(&mut self.done);
            self.answer_completed()?;
        }
        Ok(())
    }

    // -- out -----------------------------------------------------------------------------------------

    /// Answers the completed requests.
    fn answer_completed(&mut self) -> Result<()> {
        while let Some(Completion { id, result, buffer }) = self.done.pop() {
            let slot = usize::try_from(id).unwrap_or(usize::MAX);
            match self.slots.get(slot) {
                Some(&Slot::Busy(operation, length)) => {
                    let has_data = matches!(operation, Operation::Read | Operation::Write);
                    if has_data {
                        self.ring.put_buffer(slot, buffer);
                    }
                    self.answer(slot, result.map_or_else(|error| -error.errno(), |()| length))?;
                }
                // Its slot may already have a new request, in another buffer.
                Some(Slot::GivenUp) => self.slots[slot] = Slot::Idle,
                Some(Slot::Ended) => {}
                Some(Slot::Idle) | None => {
                    debug_assert!(false, "the device completed request {id}, which it does not have");
                }
            }
        }
        Ok(())
    }

    fn answer(&mut self, slot: usize, result: i32) -> Result<()> {
        self.slots[slot] = Slot::Idle;
        self.offer_again(slot, result)
    }

    fn offer_again(&mut self, slot: usize, result: i32) -> Result<()> {
        self.ring.answer(slot, result).map_err(|error| cannot_answer(&error))
    }
}

fn cannot_answer(error: &io::Error) -> Error {
    system_error("a thread of a ublk device cannot answer", error)
}
