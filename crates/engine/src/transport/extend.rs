//! Regions that grow while they are in use.
//!
//! The memory has become larger, by a file that was extended or a device. The superblock in the first page is the commit point: before
//! it, the region has its former size, and what is behind that is not used; from it on, the new segments are free segments. The steps
//! are numbered here and in `superblocks`.
//!
//! Invariants: a region grows to the end of its memory, so that its second superblock is found without the first; nothing that was
//! there moves, and no superblock refers to a segment table that is not blank or written by rows. The new segments have no headers.
//!
//! Elsewhere: making the memory larger (`cbd-pmem`), the offsets of the new space (`cbd-format`), how a cache gets new segments
//! (`resize`).

use super::Transport;
use crate::{Environment, slots::TwoSlots};
use alloc::vec;
use cbd_format::{Layout, PAGE, SegmentHeader};
use cbd_types::{Error, ErrorKind, InFlight, MutationPoint, Result, SegmentId};

/// Bytes of the new segment table that are blanked at a time.
const BLANK: u64 = 64 * PAGE;

impl<E: Environment> Transport<E> {
    /// Checks whether the region can grow to `size` bytes, before its memory is made larger: returns its layout then. A second
    /// superblock that is damaged is stored again.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a size that is not larger; [`ErrorKind::NoSpace`] for one that has no room for a segment;
    /// [`ErrorKind::Unsupported`] for a region that has grown too often; [`ErrorKind::Media`] if a superblock cannot be read or stores
    /// to the region have failed; system errors of the disk.
    pub fn check_growth(&self, size: u64) -> Result<Layout> {
        let mut tables = self.tables.lock();
        let layout = tables.superblocks.layout().grown_to(size)?;
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        tables.superblocks.restore(&self.region)?;
        Ok(layout)
    }

    /// Uses the region's memory to its present end. Its new segments are free then. If this fails, it can be repeated.
    ///
    /// # Errors
    /// As [`check_growth`](Self::check_growth); [`ErrorKind::System`] without memory.
    pub fn grow_region(&self) -> Result<Layout> {
        let mut tables = self.tables.lock();
        let before = tables.superblocks.layout();
        let layout = before.grown_to(self.region.size())?;
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        tables.superblocks.restore(&self.region)?;
        let new = (layout.segment_count - before.segment_count) as usize;
        tables.segments.try_reserve_exact(new).map_err(|_| {
            Error::new(ErrorKind::System, "no memory for the rows of the segments that the region gets")
        })?;
        // 1. A blank segment table, and segments without headers.
        self.blank_table(&layout, SegmentId(before.segment_count))?;
        // 2 to 4. The superblocks.
        let grown = tables.superblocks.grow(&self.region, &layout);
        if tables.superblocks.layout() == layout {
            let rows = (before.segment_count..layout.segment_count).map(SegmentId);
            tables.segments.extend(rows.map(|id| TwoSlots::empty(layout.segment_slots(id), u64::from(id.0))));
            **self.layout.lock() = layout;
        }
        grown.map(|()| layout)
    }

    /// Blanks the segment table of the extent that begins with a segment, and the headers of its segments, durably.
    #[inline(never)]
    fn blank_table(&self, layout: &Layout, first: SegmentId) -> Result<()> {
        let extent = layout.extent_of(first);
        let blank = vec![0; BLANK as usize];
        let mut stored = self.region.nothing_in_flight();
        let mut at = extent.segment_table;
        while at < extent.segment_area {
            let length = BLANK.min(extent.segment_area - at);
            stored = stored.and(self.region.store(at, &blank[..length as usize]));
            at += length;
        }
        let mut length = extent.table_length();
        for id in (extent.first..extent.end()).map(SegmentId) {
            if let Some(erased) = self.erase_headers(layout, id) {
                stored = stored.and(erased);
                length = layout.segment_base(id) + layout.segment_size - extent.segment_table;
            }
        }
        self.region.fence(MutationPoint::RegionTableFence, stored);
        self.region.check_stores(MutationPoint::TableStoreCheck)?;
        self.region.sync(MutationPoint::RegionTableSync, extent.segment_table, length)
    }

    /// Erases the headers in a new segment. If the region was restored from a copy of the time before it grew, they are of a later
    /// state: a cache that gets the segment would take it for the continuation of its log. In flight until the caller fences; `None`
    /// without a header.
    #[inline(never)]
    fn erase_headers(&self, layout: &Layout, segment: SegmentId) -> Option<InFlight> {
        let base = layout.segment_base(segment);
        let mut stored = None;
        for at in [base, base + layout.segment_shape().header_copy()] {
            let mut bytes = [0; size_of::<SegmentHeader>()];
            let is_header = self.region.load(at, &mut bytes).is_ok()
                && SegmentHeader::decode(&bytes).is_some_and(|found| found.is_ours());
            if is_header {
                let erased = self.region.store(at, &[0; size_of::<SegmentHeader>()]);
                stored = Some(match stored {
                    Some(stored) => erased.and(stored),
                    None => erased,
                });
            }
        }
        stored
    }
}
