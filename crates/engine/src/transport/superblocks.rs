//! The two superblocks of a transport, and the features that it gets after it was formatted.
//!
//! Invariants:
//! - at any moment of a change one copy is whole and durable, and on the disk of an ordinary file;
//! - when a feature was required, every copy that a program can open the region by names it, durably; so an earlier program refuses
//!   the region before it finds anything in it that it does not understand;
//! - a feature is never taken away.
//!
//! Elsewhere: what a superblock says and which copy counts (`cbd-format`), who requires what (the users of a feature).

use super::Transport;
use crate::Environment;
use alloc::format;
use cbd_format::{
    Layout, PAGE, Superblock,
    record::bytes_of,
    superblock::{INCOMPATIBLE_KNOWN, of_both_copies},
};
use cbd_types::{Error, ErrorKind, InFlight, MutationPoint, Pmem, Region, Result};

/// What stands in the place of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Copy {
    /// The superblock of the transport with all its features.
    Current,
    /// Something else: an older superblock, or a damaged one.
    Other,
    /// Memory that cannot be read.
    Unreadable,
}

/// Both superblocks.
#[derive(Debug)]
pub(super) struct Superblocks {
    /// What they say together.
    block: Superblock,
    layout: Layout,
    at: [u64; 2],
    copies: [Copy; 2],
    /// A copy that is whole and durable for certain.
    whole: usize,
}

impl Superblocks {
    /// Reads both.
    ///
    /// # Errors
    /// [`ErrorKind::Foreign`], [`ErrorKind::Damaged`] or [`ErrorKind::Unsupported`] with what is wrong with them.
    pub(super) fn read<P: Pmem>(region: &Region<P>) -> Result<Self> {
        let size = region.size();
        let first = verify(region, 0);
        // The second is found by the size of what is mapped; where that has grown, only the first says where it is.
        let used = first.as_ref().map_or(size, |(_, layout)| layout.region_size);
        let second = if used < 2 * PAGE || !MutationPoint::SuperblockSecondRead.is_active() {
            Err(Error::new(ErrorKind::Foreign, "the region is too small for a second superblock"))
        } else {
            verify(region, Layout::second_superblock(used))
        };
        let whole = usize::from(first.is_err());
        let (block, layout) = of_both_copies(first, second)?;
        let at = [0, Layout::second_superblock(layout.region_size)];
        let copy = |at| {
            let mut bytes = [0; size_of::<Superblock>()];
            match region.load(at, &mut bytes) {
                Err(_) => Copy::Unreadable,
                Ok(()) if bytes == bytes_of(&block) => Copy::Current,
                Ok(()) => Copy::Other,
            }
        };
        Ok(Self { block, layout, at, copies: at.map(copy), whole })
    }

    /// What they say together.
    pub(super) const fn block(&self) -> &Superblock {
        &self.block
    }

    /// Where everything lies.
    pub(super) const fn layout(&self) -> Layout {
        self.layout
    }

    /// Writes back what was read: after a mere process crash it may be only in a processor's cache. In flight until the caller
    /// fences.
    pub(super) fn write_back<P: Pmem>(&self, region: &Region<P>) -> InFlight {
        let [first, second] = self.at;
        region.write_back(MutationPoint::OpenSuperblockWriteBack, first, PAGE).and(region.write_back(
            MutationPoint::OpenSuperblockWriteBack,
            second,
            PAGE,
        ))
    }

    /// Brings both copies to the disk of an ordinary file as they were read: a predecessor may have been killed between a store and its
    /// sync. Only then is the disk writing neither while the other one changes, and has what was read.
    ///
    /// # Errors
    /// What the system says of the disk.
    pub(super) fn sync<P: Pmem>(&self, region: &Region<P>) -> Result<()> {
        for at in self.at {
            let stored = region.touch_pages(MutationPoint::SyncAgain, at, PAGE);
            region.fence(MutationPoint::OpenFence, stored);
            region.sync(MutationPoint::OpenSuperblockSync, at, PAGE)?;
        }
        Ok(())
    }

    /// Sees to it that the transport has these incompatible features: when it returns, earlier programs refuse the region, also after
    /// any crash. It costs nothing where that is so already.
    ///
    /// # Errors
    /// [`ErrorKind::Media`] where a copy cannot be read or the region takes no stores, and what the system says of the disk. Then
    /// nothing that needs the features may be stored.
    pub(super) fn require<P: Pmem>(&mut self, region: &Region<P>, features: u64) -> Result<()> {
        if !MutationPoint::FeatureRequired.is_active() {
            return Ok(());
        }
        let has_it = self.block.has_incompatible(features);
        if has_it && !self.copies.contains(&Copy::Other) {
            return Ok(());
        }
        let is_unreadable = |at: usize| self.copies[at] == Copy::Unreadable;
        if let Some(unreadable) = (0..2).find(|at| is_unreadable(*at))
            && !has_it
            && MutationPoint::FeatureUnreadable.is_active()
        {
            return Err(unreadable_copy(self.at[unreadable]));
        }
        let wanted = self.block.with_incompatible(features);
        // 1. The copy of which it is not certain that it is whole, durably. 2. The other one.
        let last = if MutationPoint::FeatureOtherFirst.is_active() { self.whole } else { 1 - self.whole };
        let names = [
            (1 - last, MutationPoint::FeatureFirstFence, MutationPoint::FeatureFirstSync),
            (last, MutationPoint::FeatureFence, MutationPoint::FeatureSync),
        ];
        for (number, (copy, fence, sync)) in names.into_iter().enumerate() {
            let is_there = has_it && self.copies[copy] == Copy::Current;
            if is_there || (number == 1 && !MutationPoint::FeatureBoth.is_active()) {
                continue;
            }
            // What stands there is not known until all of this has succeeded.
            self.copies[copy] = Copy::Other;
            let stored = region.store(self.at[copy], bytes_of(&wanted));
            region.fence(fence, stored);
            region.check_stores(MutationPoint::TableStoreCheck)?;
            region.sync(sync, self.at[copy], PAGE)?;
            self.copies[copy] = Copy::Current;
            self.whole = copy;
        }
        self.block = wanted;
        Ok(())
    }
}

impl<E: Environment> Transport<E> {
    /// Sees to it that the transport has these incompatible features (bits of [`cbd_format::superblock`]) before its caller stores what
    /// only programs that know them understand: when it returns, other programs refuse the region, also after any crash.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a feature that this program does not know; [`ErrorKind::Media`] where a superblock cannot be read
    /// or the region takes no stores, and what the system says of the disk. Then nothing that needs the features may be stored.
    pub fn require_feature(&self, features: u64) -> Result<()> {
        let unknown = features & !INCOMPATIBLE_KNOWN;
        if unknown != 0 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("this program does not know the features {unknown:#x}"),
            ));
        }
        self.tables.lock().superblocks.require(&self.region, features)
    }
}

fn verify<P: Pmem>(region: &Region<P>, at: u64) -> Result<(Superblock, Layout)> {
    let mut bytes = [0; size_of::<Superblock>()];
    region.load(at, &mut bytes)?;
    Superblock::decode(&bytes)
        .ok_or_else(|| Error::new(ErrorKind::Foreign, "the region is too small for a superblock"))?
        .verify(region.size())
}

fn unreadable_copy(at: u64) -> Error {
    Error::new(
        ErrorKind::Media,
        format!(
            "the superblock at byte {at} cannot be read, and this program has to change both superblocks before it uses the region: \
             copy the region to good memory, run cbdctrl repair on the copy, and use that"
        ),
    )
}
