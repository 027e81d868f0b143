//! Looks at both slots of objects in use, and makes damaged ones whole again.
//!
//! Invariants:
//! - the caller has the lock of the object's writer, so neither slot changes meanwhile, and the content in memory is the newest one;
//! - a slot is damaged if its checksum fails or if it is not what was stored there last. One that is older than the newest on purpose
//!   is not;
//! - a slot that holds what it should is overwritten only once the other one holds it, too, or cannot be read.
//!
//! Elsewhere: which objects there are (`cache::metadata`, `transport::metadata`).

use super::TwoSlots;
use cbd_format::{Slot, SlotContent, record::bytes_of};
use cbd_types::{
    DamagedCopy, Error, InFlight, MutationPoint, Pmem, Region, Result, Structure, VerifiedMetadata,
};

/// Bytes of the largest slot.
pub(crate) const SLOT_BYTES_MAX: usize = 1024;

/// What is at the place of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// What should be there.
    Whole,
    /// Something else.
    Damaged,
    /// Memory that fails. It is left as it is: a store may fail, too, and with it everything on the region.
    Unreadable,
}

/// An object that is looked at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Object {
    pub structure: Structure,
    /// Its row, lane or index.
    pub number: u64,
    /// Where a crash of the machine mixes pages, each change of the object is on the disk before it is relied on.
    pub is_synced: bool,
}

impl Object {
    /// Adds one of its copies, which was not [whole](Found::Whole), to a result.
    pub(crate) fn note(&self, found: &mut VerifiedMetadata, at: u64, what: Found, is_repaired: bool) {
        let Self { structure, number, .. } = *self;
        let is_readable = what != Found::Unreadable;
        found.add(DamagedCopy { structure, number, at, is_readable, is_repaired });
    }
}

/// Whether copies may be stored again. Once a store has failed, the content in memory may rely on it; once a sync has failed, the
/// copies on the disk may be others than those in memory.
///
/// # Errors
/// The reason.
pub(crate) fn check_repairs<P: Pmem>(region: &Region<P>) -> Result<()> {
    region.check_stores(MutationPoint::VerifyStoreCheck)?;
    if region.has_sync_failed() {
        let text = "a sync of the region has failed: its metadata is not repaired before it is opened again";
        return Err(Error::new(cbd_types::ErrorKind::System, text));
    }
    Ok(())
}

impl<T: SlotContent> TwoSlots<T> {
    /// Looks at both slots, and durably stores again what is damaged. `scratch` has [`SLOT_BYTES_MAX`] bytes.
    pub(crate) fn verify<P: Pmem>(
        &mut self,
        region: &Region<P>,
        object: Object,
        scratch: &mut [u8],
        found: &mut VerifiedMetadata,
    ) {
        found.structures += 1;
        let Some((newest, _)) = self.newest else {
            if self.is_lost {
                for at in self.at {
                    let is_readable = region.load(at, &mut scratch[..T::SLOT_SIZE]).is_ok();
                    let what = if is_readable { Found::Damaged } else { Found::Unreadable };
                    object.note(found, at, what, false);
                }
            }
            return;
        };
        let slots = [0, 1].map(|which| self.look(region, which, scratch));
        if slots == [Found::Whole; 2] {
            return;
        }
        // The newest one first: it gets the bytes that it had, and the other one, which may be the only one, stays untouched.
        for which in [newest, 1 - newest] {
            let what = slots[which];
            if what == Found::Whole {
                continue;
            }
            let mut is_repaired = false;
            if what == Found::Damaged {
                match self.restore(region, which, object.is_synced, scratch) {
                    Ok(()) => is_repaired = true,
                    Err(error) => drop(found.error.get_or_insert(error)),
                }
            }
            object.note(found, self.at[which], what, is_repaired);
        }
    }

    fn look<P: Pmem>(&self, region: &Region<P>, which: usize, scratch: &mut [u8]) -> Found {
        let Some((newest, sequence)) = self.newest else { return Found::Whole };
        let bytes = &mut scratch[..T::SLOT_SIZE];
        if region.load(self.at[which], bytes).is_err() {
            return Found::Unreadable;
        }
        let is_whole = match Slot::<T>::decode_in_place(self.place, bytes) {
            Some(slot) if which == newest => {
                slot.sequence == sequence && bytes_of(slot.content) == bytes_of(&*self.content)
            }
            Some(slot) => slot.sequence < sequence,
            // The first update stores one slot.
            None => which != newest && sequence == 1 && bytes.iter().all(|byte| *byte == 0),
        };
        if is_whole { Found::Whole } else { Found::Damaged }
    }

    /// Durably stores the content into a damaged slot: the newest one gets the bytes that it had, the other one becomes the newest.
    fn restore<P: Pmem>(
        &mut self,
        region: &Region<P>,
        which: usize,
        is_synced: bool,
        scratch: &mut [u8],
    ) -> Result<()> {
        check_repairs(region)?;
        let stored = self.store_into(region, which, scratch);
        region.fence(MutationPoint::VerifySlotFence, stored);
        region.check_stores(MutationPoint::VerifyStoreCheck)?;
        if is_synced {
            region.sync(MutationPoint::VerifySlotSync, self.at[which], T::SLOT_SIZE as u64)?;
        }
        Ok(())
    }

    fn store_into<P: Pmem>(&mut self, region: &Region<P>, which: usize, scratch: &mut [u8]) -> InFlight {
        let Some((newest, sequence)) = self.newest else { return region.nothing_in_flight() };
        let sequence = if which == newest { sequence } else { sequence + 1 };
        self.newest = Some((which, sequence));
        (self.is_behind, self.is_torn) = (false, false);
        let bytes = &mut scratch[..T::SLOT_SIZE];
        Slot::encode_into(sequence, &*self.content, self.place, bytes);
        match <&[u8; 64]>::try_from(&*bytes) {
            Ok(line) => region.store_line(self.at[which], line),
            Err(_) => region.store(self.at[which], bytes),
        }
    }
}
