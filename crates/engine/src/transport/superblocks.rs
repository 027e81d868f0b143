//! The two superblocks of a transport, and features that are added after the format.
//!
//! Invariants:
//! - at any moment of a change one copy is complete and durable, including on the disk of an ordinary file;
//! - once a feature was required, every copy from which a program can open the region names it, durably. So an earlier
//!   program refuses the region before it reads anything that it does not support;
//! - a feature is never removed.
//!
//! Elsewhere: the content of a superblock and the choice of the valid copy (`cbd-format`), the decision to require a feature
//! (the modules that use it).

use super::Transport;
use crate::Environment;
use alloc::{boxed::Box, format};
use cbd_format::{
    Layout, PAGE, Superblock,
    record::bytes_of,
    superblock::{INCOMPATIBLE_KNOWN, of_both_copies},
};
use cbd_types::{Error, ErrorKind, InFlight, MutationPoint, Pmem, Region, Result};

/// The content of the page of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Copy {
    /// The superblock of the transport with all its features.
    Current,
    /// Something else: an older superblock, or a damaged one.
    Other,
    /// Memory that cannot be read.
    Unreadable,
}

impl Copy {
    /// Compares the copy at an offset with the merged content.
    #[inline(never)]
    fn read<P: Pmem>(region: &Region<P>, at: u64, block: &Superblock) -> Self {
        let mut bytes = [0; size_of::<Superblock>()];
        match region.load(at, &mut bytes) {
            Err(_) => Self::Unreadable,
            Ok(()) if bytes == bytes_of(block) => Self::Current,
            Ok(()) => Self::Other,
        }
    }
}

/// Both superblocks, and their offsets.
#[derive(Debug)]
pub(super) struct Superblocks {
    /// The merged content of both.
    block: Superblock,
    layout: Layout,
    at: [u64; 2],
    copies: [Copy; 2],
    /// Index of a copy that is known to be complete and durable.
    whole: usize,
}

impl Superblocks {
    /// Reads both copies.
    ///
    /// # Errors
    /// [`ErrorKind::Foreign`], [`ErrorKind::Damaged`] or [`ErrorKind::Unsupported`] with the errors of both.
    pub(super) fn read<P: Pmem>(region: &Region<P>) -> Result<Self> {
        let size = region.size();
        let first = verify(region, 0);
        // The mapped size determines the offset of the second copy. If the mapping has grown since, only the first copy has
        // the original size.
        let used = first.as_ref().map_or(size, |found| found.1.region_size);
        let second = if used < 2 * PAGE {
            Err(Error::new(ErrorKind::Foreign, "the region is too small for a second superblock"))
        } else {
            verify(region, Layout::second_superblock(used))
        };
        let whole = usize::from(first.is_err());
        let (block, layout) = *of_both_copies(first, second)?;
        let at = [0, Layout::second_superblock(layout.region_size)];
        let copies = at.map(|at| Copy::read(region, at, &block));
        Ok(Self { block, layout, at, copies, whole })
    }

    /// The merged content of both copies.
    pub(super) const fn block(&self) -> &Superblock {
        &self.block
    }

    /// The layout that the superblocks describe.
    pub(super) const fn layout(&self) -> Layout {
        self.layout
    }

    /// Writes back the copies that were read: after a mere process crash they may be only in a processor's cache. In flight
    /// until the caller fences.
    pub(super) fn write_back<P: Pmem>(&self, region: &Region<P>) -> InFlight {
        let [first, second] = self.at;
        region.write_back(MutationPoint::OpenSuperblockWriteBack, first, PAGE).and(region.write_back(
            MutationPoint::OpenSuperblockWriteBack,
            second,
            PAGE,
        ))
    }

    /// Syncs both copies to the disk of an ordinary file, unchanged: an earlier process may have been killed between a store
    /// and its sync. Only after this the disk has the content that was read, and is writing neither copy when the other one
    /// changes.
    ///
    /// # Errors
    /// The system error.
    pub(super) fn sync<P: Pmem>(&self, region: &Region<P>) -> Result<()> {
        for at in self.at {
            let stored = region.touch_pages(MutationPoint::SyncAgain, at, PAGE);
            region.fence(MutationPoint::OpenFence, stored);
            region.sync(MutationPoint::OpenSuperblockSync, at, PAGE)?;
        }
        Ok(())
    }

    /// Ensures that the transport has these incompatible features: when this returns, earlier programs refuse the region,
    /// even after a crash. It costs nothing if the transport has them already.
    ///
    /// # Errors
    /// [`ErrorKind::Media`] if a copy cannot be read or stores to the region have failed, and system errors of the disk. Then
    /// the caller must not store anything that needs the features.
    pub(super) fn require<P: Pmem>(&mut self, region: &Region<P>, features: u64) -> Result<()> {
        let has_it = self.block.has_incompatible(features);
        if has_it && !self.copies.contains(&Copy::Other) {
            return Ok(());
        }
        let is_unreadable = |at: usize| self.copies[at] == Copy::Unreadable;
        if let Some(unreadable) = (0..2).find(|at| is_unreadable(*at))
            && !has_it
        {
            return Err(unreadable_copy(self.at[unreadable]));
        }
        let wanted = self.block.with_incompatible(features);
        // 1. The copy that is not known to be complete, durably. 2. The other one.
        let last = self.whole;
        let names = [
            (1 - last, MutationPoint::FeatureFirstFence, MutationPoint::FeatureFirstSync),
            (last, MutationPoint::FeatureFence, MutationPoint::FeatureSync),
        ];
        for (copy, fence, sync) in names {
            let is_there = has_it && self.copies[copy] == Copy::Current;
            if is_there {
                continue;
            }
            // The content of this copy is unknown until all steps have succeeded.
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
    /// Ensures that the transport has these incompatible features (bits of [`cbd_format::superblock`]). The caller calls this
    /// before it stores data that only programs with support for them understand: when this returns, other programs refuse
    /// the region, even after a crash.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for a feature that this program does not support; [`ErrorKind::Media`] if a superblock
    /// cannot be read or stores to the region have failed, and system errors of the disk. Then the caller must not store
    /// anything that needs the features.
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

fn verify<P: Pmem>(region: &Region<P>, at: u64) -> Result<Box<(Superblock, Layout)>> {
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
