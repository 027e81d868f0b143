//! The requests of a connection that the device has, each with a number.
//!
//! Always true here: a number is that of one request, from [`Slots::insert`] until [`Slots::free`].
//!
//! Left to others: what a request is answered with (`connection`).

use cbd_types::ByteRange;

/// A request that the device has.
pub(super) struct Slot {
    pub(super) cookie: u64,
    pub(super) kind: Kind,
    /// Bytes that it counts for.
    pub(super) cost: usize,
}

#[derive(Clone, Copy)]
pub(super) enum Kind {
    Read(ByteRange),
    /// A reply without data.
    Plain,
    /// What is left to be read and dropped.
    Cache(ByteRange),
    /// A part of the request that goes on in parts.
    Part(ByteRange),
}

/// The requests, by their numbers.
#[derive(Default)]
pub(super) struct Slots {
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
}

impl Slots {
    /// Requests that the device has.
    pub(super) const fn parked(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Takes a request in; its number.
    pub(super) fn insert(&mut self, slot: Slot) -> usize {
        match self.free.pop() {
            Some(place) => {
                self.slots[place] = Some(slot);
                place
            }
            None => {
                self.slots.push(Some(slot));
                self.slots.len() - 1
            }
        }
    }

    pub(super) fn get_mut(&mut self, place: usize) -> Option<&mut Slot> {
        self.slots.get_mut(place)?.as_mut()
    }

    /// Takes a request out; it keeps its number until that is freed.
    pub(super) fn take(&mut self, place: usize) -> Option<Slot> {
        self.slots.get_mut(place)?.take()
    }

    /// Puts back what was taken out: the device gets more of it.
    pub(super) fn put_back(&mut self, place: usize, slot: Slot) {
        self.slots[place] = Some(slot);
    }

    /// The number of what was taken out can be another's.
    pub(super) fn free(&mut self, place: usize) {
        self.free.push(place);
    }
}
