//! Objects in two slots of a region: read the newest valid one, write the other.
//!
//! Invariants: a store never overwrites the slot that holds the newest valid content. Contents are on the heap and change in
//! place: the largest has about a kibibyte, too much for a small stack.

mod whole;

use alloc::{boxed::Box, vec::Vec};
use cbd_format::{Slot, SlotContent, record::bytes_of};
use cbd_types::{InFlight, MutationPoint, Pmem, Region, Result};
pub(crate) use whole::{Found, Object, SLOT_BYTES_MAX, check_repairs};

/// The mutation points of a store into both slots.
#[derive(Clone, Copy)]
pub(crate) struct InBoth {
    /// The fence that makes the first slot durable before the second one is touched.
    pub first_fence: MutationPoint,
    /// The store into the second slot.
    pub second: MutationPoint,
    /// The fence that makes both slots durable.
    pub fence: MutationPoint,
}

/// One object in two slots, with its newest content.
#[derive(Clone, Debug)]
pub struct TwoSlots<T> {
    /// Offsets of the two slots in the region.
    at: [u64; 2],
    /// The seed of the checksum: row or lane.
    place: u64,
    /// The slot that holds the newest content, and its sequence number; `None` if neither slot is valid.
    newest: Option<(usize, u64)>,
    /// The newest content; zero if neither slot is valid.
    content: Box<T>,
    /// The other slot can be read and holds other content.
    is_behind: bool,
    /// The other slot can be read, is not blank and not valid: a crash tore its last store, or it is damaged.
    is_torn: bool,
    /// Neither slot is valid and neither is blank: there was content, and both its copies are lost.
    is_lost: bool,
}

impl<T: SlotContent> TwoSlots<T> {
    /// Reads both slots. Memory that fails counts as an invalid slot.
    pub fn read<P: Pmem>(region: &Region<P>, at: [u64; 2], place: u64) -> Self {
        let bytes = at.map(|at| {
            let mut bytes = alloc::vec![0; T::SLOT_SIZE];
            region.load(at, &mut bytes).is_ok().then_some(bytes)
        });
        let [first, second] = bytes.each_ref().map(|bytes| match bytes {
            Some(bytes) => Slot::<T>::decode_in_place(place, bytes),
            None => None,
        });
        // A first store that was torn leaves the other slot blank: then nothing is lost.
        let is_blank =
            |bytes: &Option<Vec<u8>>| bytes.as_ref().is_some_and(|bytes| bytes.iter().all(|byte| *byte == 0));
        let is_lost = first.is_none() && second.is_none() && !bytes.iter().any(is_blank);
        let mut slots = Self { is_lost, ..Self::empty(at, place) };
        if let Some((which, newest)) = Slot::newest(first, second) {
            let other = if which == 0 { second } else { first };
            slots.is_torn = other.is_none() && bytes[1 - which].is_some() && !is_blank(&bytes[1 - which]);
            slots.is_behind = bytes[1 - which].is_some()
                && other.is_none_or(|other| bytes_of(other.content) != bytes_of(newest.content));
            slots.newest = Some((which, newest.sequence));
            *slots.content = *newest.content;
        }
        slots
    }

    /// Both slots in the state of fresh memory: invalid.
    pub(crate) fn empty(at: [u64; 2], place: u64) -> Self {
        Self {
            at,
            place,
            newest: None,
            content: cbd_format::zeroed(),
            is_behind: false,
            is_torn: false,
            is_lost: false,
        }
    }

    /// The newest content.
    pub fn content(&self) -> Option<&T> {
        self.newest.is_some().then_some(&*self.content)
    }

    /// Whether there was content of which both copies are lost.
    pub(crate) const fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Whether the other slot can be read and holds other content.
    pub(crate) const fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// Writes back both slots: after a crash of the process alone, what was read may be only in a processor's cache. In flight
    /// until the caller fences.
    pub(crate) fn write_back<P: Pmem>(&self, region: &Region<P>, point: MutationPoint) -> InFlight {
        if self.newest.is_none() {
            return region.nothing_in_flight();
        }
        let [a, b] = self.at;
        let length = T::SLOT_SIZE as u64;
        region.write_back(point, a, length).and(region.write_back(point, b, length))
    }

    /// Stores `content` into the older slot. In flight until the caller fences. A second store before that fence would
    /// overwrite the slot that is still the only durable one, so callers fence after every store.
    pub(crate) fn store<P: Pmem>(&mut self, region: &Region<P>, content: T) -> InFlight {
        *self.content = content;
        self.store_content(region)
    }

    /// As [`store`](Self::store), for a content that is too large for the stack: `change` changes it in place, from zeroes if
    /// there is none.
    pub(crate) fn change<P: Pmem>(&mut self, region: &Region<P>, change: impl FnOnce(&mut T)) -> InFlight {
        change(&mut self.content);
        self.store_content(region)
    }

    /// Stores the present content into the older slot. In flight until the caller fences.
    fn store_content<P: Pmem>(&mut self, region: &Region<P>) -> InFlight {
        let (which, sequence) = match self.newest {
            Some((newest, sequence)) => (1 - newest, sequence + 1),
            None => (0, 1),
        };
        self.newest = Some((which, sequence));
        (self.is_behind, self.is_torn, self.is_lost) = (false, false, false);
        if T::SLOT_SIZE == 64 {
            // Marks are stored on the flush path: a whole line, no allocation.
            region
                .store_line(self.at[which], &Slot::encode_content_line(sequence, &*self.content, self.place))
        } else {
            region.store(self.at[which], &Slot::encode_content(sequence, &*self.content, self.place))
        }
    }

    /// Stores `content` durably into both slots, the older one first: afterwards one failed page neither loses it nor brings
    /// back the content that it replaced.
    pub(crate) fn store_in_both<P: Pmem>(&mut self, region: &Region<P>, names: InBoth, content: T) {
        let stored = self.store(region, content);
        region.fence(names.first_fence, stored);
        if names.second.is_active() {
            let stored = self.store_content(region);
            region.fence(names.fence, stored);
        }
    }

    /// As [`store_in_both`](Self::store_in_both), for the content that `change` makes of the present one, in place; there are
    /// zeroes if there is none. On a region where a crash of the machine mixes old and new pages, each slot is also on the disk
    /// before the other one changes, and both are at the end.
    ///
    /// # Errors
    /// The system's error of the sync. The changed content may still count in this process, unless an earlier sync had failed
    /// and its repetition failed as well: then nothing has changed.
    pub(crate) fn keep_in_both<P: Pmem>(
        &mut self,
        region: &Region<P>,
        names: InBoth,
        change: impl FnOnce(&mut T),
    ) -> Result<()> {
        if region.has_sync_failed() {
            // The newest slot may be in memory only, and the other slot may be the only one on the disk.
            self.touch_newest(region, names.first_fence);
            self.sync_newest(region, MutationPoint::RowFirstSync)?;
        }
        let stored = self.change(region, change);
        region.fence(names.first_fence, stored);
        self.sync_newest(region, MutationPoint::RowFirstSync)?;
        if names.second.is_active() {
            let stored = self.store_content(region);
            region.fence(names.fence, stored);
        }
        self.sync_newest(region, MutationPoint::RowSync)
    }

    /// Dirties the page of the newest slot, so that the kernel writes it again.
    fn touch_newest<P: Pmem>(&self, region: &Region<P>, fence: MutationPoint) {
        if let Some((newest, _)) = self.newest {
            let stored = region.touch_pages(MutationPoint::SyncAgain, self.at[newest], T::SLOT_SIZE as u64);
            region.fence(fence, stored);
        }
    }

    fn sync_newest<P: Pmem>(&self, region: &Region<P>, point: MutationPoint) -> Result<()> {
        let Some((newest, _)) = self.newest else { return Ok(()) };
        region.sync(point, self.at[newest], T::SLOT_SIZE as u64)
    }

    /// Completes a [`store_in_both`](Self::store_in_both) that a crash interrupted between its two stores: stores the newest
    /// content into the other slot, so that a page that fails later does not bring back the content that it replaced. The
    /// caller has written back and fenced what was read. In flight until the caller fences.
    pub(crate) fn complete<P: Pmem>(&mut self, region: &Region<P>) -> InFlight {
        if self.is_behind { self.store_content(region) } else { region.nothing_in_flight() }
    }

    /// As [`complete`](Self::complete), for an object whose slots hold different contents: only a slot that is not valid is stored.
    pub(crate) fn complete_torn<P: Pmem>(&mut self, region: &Region<P>) -> InFlight {
        if self.is_torn { self.store_content(region) } else { region.nothing_in_flight() }
    }

    /// Stores the content of the newest slot durably into the other one, whose content was damaged or older. `false` if neither
    /// slot has content.
    pub fn store_again<P: Pmem>(&mut self, region: &Region<P>) -> bool {
        if self.newest.is_none() {
            return false;
        }
        let stored = self.store_content(region);
        region.fence(MutationPoint::RepairSlotFence, stored);
        true
    }

    /// Stores the content that `change` makes of the present one into both slots of an object on which nothing relies before a
    /// later fence: a crash may leave neither slot valid. In flight until the caller fences.
    pub(crate) fn fill<P: Pmem>(
        &mut self,
        region: &Region<P>,
        second: MutationPoint,
        change: impl FnOnce(&mut T),
    ) -> InFlight {
        let stored = self.change(region, change);
        if second.is_active() { stored.and(self.store_content(region)) } else { stored }
    }

    /// Makes both slots invalid. In flight until the caller fences.
    pub(crate) fn clear<P: Pmem>(&mut self, region: &Region<P>) -> InFlight {
        let zeroes = alloc::vec![0; T::SLOT_SIZE];
        self.newest = None;
        self.content.clear();
        region.store(self.at[0], &zeroes).and(region.store(self.at[1], &zeroes))
    }
}

#[cfg(test)]
mod tests;
