//! How large a cache and its device are: input to the decisions of reclaim, admission and writeback.
//!
//! Invariants: but for the size of the device, what is read here changes only decisions, never correctness; the number of segments
//! changes with the pool (`cache::resize`).

use super::Base;
use crate::Environment;
use cbd_format::{LINE, PAGE};
use cbd_types::CHECKSUM_BLOCK;
use core::sync::atomic::Ordering;

impl<E: Environment> Base<E> {
    /// The size of the device in bytes. No record reaches beyond it.
    pub(crate) fn size(&self) -> u64 {
        // Whoever sees a record that reaches beyond a former size sees the size that was raised before it.
        self.size.load(Ordering::Acquire)
    }

    /// Raises the size of the device, which the row of the backend has durably.
    pub(crate) fn grow(&self, size: u64) {
        self.size.fetch_max(size, Ordering::AcqRel);
    }

    /// The number of log segments.
    pub(crate) fn segment_count(&self) -> u32 {
        self.owned.load(Ordering::Relaxed)
    }

    /// The cache has got `segments` log segments more.
    pub(crate) fn count_more_segments(&self, segments: u32) {
        self.owned.fetch_add(segments, Ordering::Relaxed);
    }

    /// The cache has `segments` log segments fewer.
    pub(crate) fn count_fewer_segments(&self, segments: u32) {
        self.owned.fetch_sub(segments, Ordering::Relaxed);
    }

    /// Bytes of all log segments.
    pub(crate) fn capacity(&self) -> u64 {
        u64::from(self.segment_count()) * self.shape().size
    }

    /// Bytes of blocks that a segment holds if each block has a record of its own.
    pub(crate) fn blocks_bytes_per_segment(&self) -> u64 {
        let shape = self.shape();
        // A record of one block has two lines and the block; the last pair of pages of records may be used in part.
        let mut blocks = ((shape.size - 2 * PAGE) / (CHECKSUM_BLOCK + 2 * LINE)) as u32;
        while blocks > 1 && !shape.fits(0, shape.data_top(), blocks, u64::from(blocks) * CHECKSUM_BLOCK) {
            blocks -= 1;
        }
        u64::from(blocks) * CHECKSUM_BLOCK
    }

    /// Bytes that are pinned.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Notes the bytes that are pinned.
    pub(crate) fn note_pinned(&self, bytes: u64) {
        self.pinned.store(bytes, Ordering::Relaxed);
    }

    /// Bytes of metadata, as last counted, and what was recorded since.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        self.metadata.load(Ordering::Relaxed)
    }

    /// Notes the bytes of metadata.
    pub(crate) fn note_metadata(&self, bytes: u64) {
        self.metadata.store(bytes, Ordering::Relaxed);
    }

    /// Notes bytes of metadata that were recorded.
    pub(crate) fn note_more_metadata(&self, bytes: u64) {
        self.metadata.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Whether so many segments are in use that reclaim should run.
    pub(crate) fn is_above_gc(&self) -> bool {
        self.pool.free() < self.free_wanted()
    }

    /// The number of free segments at which reclaim ends.
    fn free_wanted(&self) -> u32 {
        let total = u64::from(self.segment_count());
        let used = u64::from(self.settings().gc_percent) * total / 100;
        // On average half of the open segment of each lane is free for writers, too.
        let free_in_open = self.identity().lanes.lanes / 2;
        // Slightly more than fills leave, so that fills and second chances find space while reclaim runs.
        ((total - used) as u32)
            .saturating_sub(free_in_open)
            .max(self.pool.left_to_writers() + self.pool.spare())
            + self.pool.owed()
    }

    /// Whether the cache is full, so that data read now replaces other data.
    pub(crate) fn is_full(&self) -> bool {
        // Reclaim ends with a few segments more than its target.
        self.pool.free() < self.free_wanted() + (self.segment_count() / 32).max(2)
    }

    /// Whether reclaim frees segments as fast as they are taken.
    pub(crate) fn is_reclaim_at_ease(&self) -> bool {
        self.pool.free() + self.pool.spare().max(2) >= self.free_wanted()
    }
}

#[cfg(test)]
mod tests;
