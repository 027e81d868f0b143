//! Queries of the tables by tools.

use super::Transport;
use crate::{Environment, slots::TwoSlots};
use cbd_format::{BackendEntry as BackendRow, Drained, PAGE, StateShape, crc32c};
use cbd_types::{BackendId, Epoch, SegmentId};

impl<E: Environment> Transport<E> {
    /// The segments that belong to a backend, including its state segment; empty if the backend has no cache.
    pub fn segments_of(&self, id: BackendId) -> alloc::vec::Vec<SegmentId> {
        let tables = self.tables.lock();
        let row = tables.backends.get(id.index()).and_then(|row| row.content());
        row.map_or_else(alloc::vec::Vec::new, |_| tables.segments_of(id))
    }

    /// The drained epoch that a backend's state block records, and its recovery point in milliseconds since 1970 UTC, 0 if it
    /// is not known. `None` without a cache, or if neither copy can be read. The cache is not opened.
    pub fn drained(&self, id: BackendId) -> Option<(Epoch, u64)> {
        let row = self.backend_row(id).filter(|row| row.cache_id.get() != 0)?;
        let segment = row.state_segment.get();
        if segment >= self.segment_count() {
            return None;
        }
        let base = self.segment_base(SegmentId(segment));
        let at = (StateShape { lanes: row.lanes.get() }).drained().map(|at| base + at);
        let slots = TwoSlots::<Drained>::read(&self.region, at, 0);
        slots.content().map(|drained| (Epoch(drained.epoch.get()), drained.closed_ms.get()))
    }

    /// A checksum of all that the state block of a backend's cache holds but its pins. It changes with each use of the cache
    /// that writes to it or to the backing device and ends as it should. `None` without a cache, and where it cannot be read. The
    /// cache is not opened.
    pub fn state_sum(&self, id: BackendId) -> Option<u64> {
        let row = self.backend_row(id).filter(|row| row.cache_id.get() != 0)?;
        let segment = row.state_segment.get();
        if segment >= self.segment_count() {
            return None;
        }
        let base = self.segment_base(SegmentId(segment));
        let [start, end] = (StateShape { lanes: row.lanes.get() }).all_slots();
        let size = self.info().layout.segment_size;
        let mut sum = row.cache_id.get();
        let mut page = alloc::vec![0; usize::try_from(PAGE).ok()?];
        let mut at = start;
        while at < end.min(size) {
            self.region.load(base + at, &mut page).ok()?;
            sum = sum.rotate_left(7) ^ u64::from(crc32c(&page)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            at += PAGE;
        }
        Some(sum)
    }

    /// The row of a backend as it is stored on the medium, if it can be read, even if its values are impossible.
    pub fn backend_row(&self, id: BackendId) -> Option<BackendRow> {
        self.tables.lock().backends.get(id.index())?.content().copied()
    }
}
