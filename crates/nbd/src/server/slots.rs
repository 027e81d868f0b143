//! The requests of a connection that are in the device, each with a number.
//!
//! Invariants: a number belongs to one request from [`Slots::insert`] until [`Slots::free`].

use super::reply::Reply;
use cbd_types::{AlignedBuffer, ByteRange, Error, ErrorKind, Result};

/// A request in the device.
pub(super) struct Slot {
    pub(super) cookie: u64,
    pub(super) kind: Kind,
    /// Bytes that are counted for it.
    pub(super) cost: usize,
}

#[derive(Clone, Copy)]
pub(super) enum Kind {
    Read(ByteRange),
    /// A reply without data.
    Plain,
    /// The range that remains to be read and discarded.
    Cache(ByteRange),
    /// A part of the request that is executed in parts.
    Part(ByteRange),
}

impl Slot {
    /// The reply to the request, which the device has completed, and the buffer if it is not sent with the reply.
    pub(super) fn reply(
        &self,
        structured: bool,
        result: Result<()>,
        buffer: AlignedBuffer,
    ) -> (Reply, Option<AlignedBuffer>) {
        let reply = match (result, self.kind) {
            (Ok(()), Kind::Read(range)) if buffer.len() as u64 == range.len() => {
                return (Reply::data(self.cookie, structured, range.start, buffer), None);
            }
            (Ok(()), Kind::Read(_)) => {
                let error = Error::new(ErrorKind::System, "the device returned a read of another length");
                Reply::error(self.cookie, structured, &error)
            }
            (Ok(()), Kind::Plain | Kind::Cache(_) | Kind::Part(_)) => Reply::done(self.cookie),
            (Err(error), _) => Reply::error(self.cookie, structured, &error),
        };
        (reply, Some(buffer))
    }
}

/// The requests, by their numbers.
#[derive(Default)]
pub(super) struct Slots {
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
}

impl Slots {
    /// Number of requests in the device.
    pub(super) const fn parked(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Adds a request and returns its number.
    pub(super) fn insert(&mut self, slot: Slot) -> usize {
        match self.free.pop() {
            Some(number) => {
                self.slots[number] = Some(slot);
                number
            }
            None => {
                self.slots.push(Some(slot));
                self.slots.len() - 1
            }
        }
    }

    pub(super) fn get_mut(&mut self, number: usize) -> Option<&mut Slot> {
        self.slots.get_mut(number)?.as_mut()
    }

    /// Removes a request; its number stays in use until [`free`](Self::free).
    pub(super) fn take(&mut self, number: usize) -> Option<Slot> {
        self.slots.get_mut(number)?.take()
    }

    /// Puts back a request that [`take`](Self::take) removed: the device gets a further piece of it.
    pub(super) fn put_back(&mut self, number: usize, slot: Slot) {
        self.slots[number] = Some(slot);
    }

    /// Frees the number of a removed request.
    pub(super) fn free(&mut self, number: usize) {
        self.free.push(number);
    }
}
