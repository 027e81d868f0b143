//! The two superblocks of a transport, and features that are added after the format.
//!
//! Invariants:
//! - at any moment of a change one copy is complete and durable, including on the disk of an ordinary file;
//! - once a feature was required, every copy from which a program can open the region names it, durably. So an earlier
//!   program refuses the region before it reads anything that it does not support;
//! - a feature is never removed;
//! - a region that grows has the new superblocks before it uses the new space.
//!
//! Elsewhere: the content of a superblock and the choice of the valid copy (`cbd-format`), the decision to require a feature
//! (the modules that use it).

use super::{Transport, remnants};
use crate::{
    Environment,
    slots::{Found, Object, check_repairs},
};
use alloc::{boxed::Box, format, vec};
use cbd_format::{
    Layout, PAGE, Superblock, Unverified,
    record::bytes_of,
    superblock::{INCOMPATIBLE_KNOWN, of_both_copies},
};
use cbd_types::{
    Error, ErrorKind, InFlight, MutationPoint, Pmem, Region, Result, Structure, VerifiedMetadata,
};

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
        let mut second = if used < 2 * PAGE {
            Err(Error::new(ErrorKind::Foreign, "the region is too small for a second superblock"))
        } else {
            verify(region, Layout::second_superblock(used))
        };
        if first.is_err()
            && second.is_err()
            && let Some(found) = before_zeroes(region)
        {
            second = Ok(found);
        }
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

    /// Uses the tables of a host of a shared region, whose layout this is.
    pub(super) const fn use_tables_of(&mut self, layout: Layout) {
        self.layout = layout;
    }

    /// Offset and length of the areas that have tables: all tables of the first size, and the segment table of each growth.
    pub(super) fn tables(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.layout.extents().map(|extent| {
            let at = if extent.first == 0 { self.layout.host_area } else { extent.segment_table };
            (at, extent.segment_area - at)
        })
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

    /// Stores the superblock of the region after it has grown to `layout`, whose new segment table is blank, durably. When this
    /// returns without an error, or fails in its last step, [`layout`](Self::layout) is the new one; after another error the region
    /// has not grown, or grows when it is opened again: nothing uses the new space then.
    ///
    /// # Errors
    /// As [`require`](Self::require).
    pub(super) fn grow<P: Pmem>(&mut self, region: &Region<P>, layout: &Layout) -> Result<()> {
        let wanted = self.block.grown(layout);
        let [_, former] = self.at;
        let last = Layout::second_superblock(layout.region_size);
        // 2. Behind the new space. If the next step is torn, it is found there.
        store(region, last, &wanted, MutationPoint::RegionLastFence, MutationPoint::RegionLastSync)?;
        // 3. In the first page: from here on the region has grown. Until this has succeeded the copy at the former end is the one
        // that is known to be whole.
        (self.copies[0], self.whole) = (Copy::Other, 1);
        store(region, 0, &wanted, MutationPoint::RegionFirstFence, MutationPoint::RegionFirstSync)?;
        *self = Self { block: wanted, layout: *layout, at: [0, last], copies: [Copy::Current; 2], whole: 0 };
        // 4. The former copy would describe a region of the former size.
        erase(region, former)
    }

    /// Prepares a growth: both copies are there, durably, and known to be.
    ///
    /// # Errors
    /// [`ErrorKind::Media`] if one cannot be read; as [`require`](Self::require).
    pub(super) fn restore<P: Pmem>(&mut self, region: &Region<P>) -> Result<()> {
        self.copies = self.at.map(|at| Copy::read(region, at, &self.block));
        if let Some(unreadable) = self.copies.iter().position(|copy| *copy == Copy::Unreadable) {
            return Err(unreadable_copy(self.at[unreadable]));
        }
        self.require(region, self.block.incompatible.get())
    }

    /// Durably stores the copies that are not there, one after the other. Memory that cannot be read is left as it is.
    fn store_damaged<P: Pmem>(&mut self, region: &Region<P>) -> Result<()> {
        for number in [1 - self.whole, self.whole] {
            if self.copies[number] == Copy::Other {
                let (fence, sync) =
                    (MutationPoint::VerifySuperblockFence, MutationPoint::VerifySuperblockSync);
                store(region, self.at[number], &self.block, fence, sync)?;
                (self.copies[number], self.whole) = (Copy::Current, number);
            }
        }
        Ok(())
    }

    /// Looks at both copies, and stores damaged ones again. One that is valid and another than [`block`](Self::block) is of a
    /// change that did not end, or of a newer program: it stays.
    #[inline(never)]
    pub(super) fn verify<P: Pmem>(&mut self, region: &Region<P>, found: &mut VerifiedMetadata) {
        found.structures += 1;
        let copies = self.at.map(|at| Copy::read(region, at, &self.block));
        let is_damaged = |number: usize| {
            let kind = verify(region, self.at[number]).err().map(|error| error.kind());
            copies[number] == Copy::Other && matches!(kind, Some(ErrorKind::Damaged | ErrorKind::Foreign))
        };
        let damaged = [is_damaged(0), is_damaged(1)];
        // Only the bytes that are known to be stored: both copies are to be equal afterwards.
        let is_changing = (0..2).any(|number| copies[number] == Copy::Other && !damaged[number]);
        let mut is_repaired = false;
        if damaged != [false; 2] && !is_changing {
            self.copies = copies;
            match check_repairs(region).and_then(|()| self.store_damaged(region)) {
                Ok(()) => is_repaired = true,
                Err(error) => drop(found.error.get_or_insert(error)),
            }
        }
        let object = Object { structure: Structure::Superblock, number: 0, is_synced: true };
        for (number, at) in self.at.into_iter().enumerate() {
            if damaged[number] {
                object.note(found, at, Found::Damaged, is_repaired);
            } else if copies[number] == Copy::Unreadable {
                object.note(found, at, Found::Unreadable, false);
            }
        }
    }

    /// Erases superblocks of this transport that do not count: at the former end, if a crash came between the last steps of a
    /// growth; in the last page that is mapped, if it came before the first page was stored.
    ///
    /// # Errors
    /// The system error.
    pub(super) fn erase_former<P: Pmem>(&self, region: &Region<P>) -> Result<()> {
        let former = self.layout.grown_from().next_back();
        for size in former.into_iter().chain([region.size()]) {
            let at = Layout::second_superblock(size);
            let is_ours = at != self.at[1]
                && load(region, at)
                    .is_ok_and(|found| found.is_some_and(|found| found.is_of(&self.block.uuid)));
            if is_ours {
                erase(region, at)?;
            }
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

/// Stores a superblock durably, including on the disk of an ordinary file.
fn store<P: Pmem>(
    region: &Region<P>,
    at: u64,
    block: &Superblock,
    fence: MutationPoint,
    sync: MutationPoint,
) -> Result<()> {
    let stored = region.store(at, bytes_of(block));
    region.fence(fence, stored);
    region.check_stores(MutationPoint::TableStoreCheck)?;
    region.sync(sync, at, PAGE)
}

/// Erases the superblock in a page, durably, including on the disk of an ordinary file.
fn erase<P: Pmem>(region: &Region<P>, at: u64) -> Result<()> {
    let stored = region.store(at, &[0; size_of::<Superblock>()]);
    region.fence(MutationPoint::RegionFirstFence, stored);
    region.check_stores(MutationPoint::TableStoreCheck)?;
    region.sync(MutationPoint::RegionFirstSync, at, PAGE)
}

fn load<P: Pmem>(region: &Region<P>, at: u64) -> Result<Option<Unverified<Superblock>>> {
    let mut bytes = [0; size_of::<Superblock>()];
    region.load(at, &mut bytes)?;
    Ok(Superblock::decode(&bytes))
}

fn verify<P: Pmem>(region: &Region<P>, at: u64) -> Result<Box<(Superblock, Layout)>> {
    load(region, at)?
        .ok_or_else(|| Error::new(ErrorKind::Foreign, "the region is too small for a superblock"))?
        .verify(region.size())
}

/// The second superblock of a region whose file was extended by zeroes, before a growth of the region got so far that it stored
/// anything: in the last page that is not zero. Only where a superblock is missing: this reads all that is zero.
#[cold]
#[inline(never)]
fn before_zeroes<P: Pmem>(region: &Region<P>) -> Option<Box<(Superblock, Layout)>> {
    if !remnants::holds_rows(region) {
        return None;
    }
    let mut page = vec![0; PAGE as usize];
    let mut end = region.size() / PAGE * PAGE;
    while end > 0 {
        region.load(end - PAGE, &mut page).ok()?;
        if page.iter().any(|byte| *byte != 0) {
            break;
        }
        end -= PAGE;
    }
    let found = verify(region, end.checked_sub(PAGE)?).ok()?;
    (found.1.region_size == end).then_some(found)
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
