//! The map of a cache: how much of each part of the device it holds, how much of that is dirty, and how much is read.
//!
//! The index knows which blocks are cached, and of each whether a client has read it since it was written: what reclaim asks when
//! it chooses the blocks that stay. The map adds this up over equal parts of the device. Of a large index it visits a sample.
//!
//! Invariants: a map visits at most [`BUCKETS_MAX`] buckets of the index and one for each lane, whatever the size of the cache;
//! it locks a lane for [`BUCKETS_PER_HOLD`] of them at a time, and holds no lock while it looks at records. It changes nothing.

use super::Cache;
use crate::{
    Environment,
    lane::{Lane, Sampled},
};
use alloc::vec::Vec;
use cbd_types::{ByteRange, CHECKSUM_BLOCK, Epoch, Error, ErrorKind, Result};

/// Most cells of a map.
pub const MAP_CELLS_MAX: usize = 256;
/// Buckets of the index that a map visits at most: those of some 192 MiB of cached data.
const BUCKETS_MAX: usize = 1 << 14;
/// Buckets that are visited while a lane is locked once: some microseconds.
const BUCKETS_PER_HOLD: usize = 32;

/// What a cache holds of one part of the device, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct MapCell {
    /// Data in the cache.
    pub cached_bytes: u64,
    /// The part of it that the backing device does not have yet.
    pub dirty_bytes: u64,
    /// The part of it that was read since it was written into the cache.
    pub read_bytes: u64,
}

/// What a cache holds, by equal parts of the device.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct CacheMap {
    /// Bytes of the device that a cell stands for; the last cell may have fewer.
    pub cell_bytes: u64,
    /// One block in so many was looked at and stands for the others; 1 for a map without an error.
    pub sampled_one_of: u64,
    /// The cells, in the order of the device.
    pub cells: Vec<MapCell>,
}

impl CacheMap {
    /// An empty map of a device of `size` bytes; `None` if there is no memory for it.
    fn new(size: u64, cells: usize) -> Option<Self> {
        let cells = cells.clamp(1, MAP_CELLS_MAX) as u64;
        let cell_bytes = size.div_ceil(cells).next_multiple_of(CHECKSUM_BLOCK).max(CHECKSUM_BLOCK);
        let count = size.div_ceil(cell_bytes) as usize;
        let mut cells = Vec::new();
        cells.try_reserve_exact(count).ok()?;
        cells.resize(count, MapCell::default());
        Some(Self { cell_bytes, sampled_one_of: 1, cells })
    }

    fn add(&mut self, block: &Sampled, is_dirty: bool) {
        let Some(cell) = self.cells.get_mut((block.at / self.cell_bytes) as usize) else { return };
        cell.cached_bytes += block.bytes;
        cell.dirty_bytes += if is_dirty { block.bytes } else { 0 };
        cell.read_bytes += if block.was_read { block.bytes } else { 0 };
    }

    /// Counts each block for those that were not looked at; no cell holds more than its part of the device.
    fn scale(&mut self, size: u64) {
        for (cell, start) in self.cells.iter_mut().zip((0..).step_by(self.cell_bytes as usize)) {
            let whole = self.cell_bytes.min(size.saturating_sub(start));
            for bytes in [&mut cell.cached_bytes, &mut cell.dirty_bytes, &mut cell.read_bytes] {
                *bytes = bytes.saturating_mul(self.sampled_one_of).min(whole);
            }
        }
    }
}

impl<E: Environment> Cache<E> {
    /// The map of the device in at most `cells` cells, of which there are at most [`MAP_CELLS_MAX`]. It takes some milliseconds.
    /// Requests change the cache meanwhile: a block may be missing or counted twice.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if there is no memory for it.
    pub fn map(&self, cells: usize) -> Result<CacheMap> {
        let no_memory = || Error::new(ErrorKind::System, "there is no memory for the map of the device");
        let mut map = CacheMap::new(self.size(), cells).ok_or_else(no_memory)?;
        let buckets: usize = self.lanes().iter().map(|lane| lane.lock().index_buckets()).sum();
        let step = buckets.div_ceil(BUCKETS_MAX).max(1);
        map.sampled_one_of = step as u64;
        let is_whole = self.lanes().iter().all(|lane| self.add_lane(lane, step, &mut map));
        map.scale(self.size());
        is_whole.then_some(map).ok_or_else(no_memory)
    }

    /// Adds the blocks of a lane; false if there is no memory for them.
    fn add_lane(&self, lane: &Lane<E>, step: usize, map: &mut CacheMap) -> bool {
        let base = self.base();
        let drained = self.drained_epoch();
        let (mut unwritten, mut sampled) = (Vec::new(), Vec::new());
        let count = {
            let state = lane.lock();
            if !state.list_unwritten(drained.0, &mut unwritten) {
                return false;
            }
            state.index_buckets()
        };
        let hold = step * BUCKETS_PER_HOLD;
        for first in (0..count).step_by(hold) {
            sampled.clear();
            let buckets = (first..count.min(first + hold)).step_by(step);
            if !lane.lock().sample(base, buckets, &mut sampled) {
                return false;
            }
            for block in &sampled {
                let may_be_dirty = unwritten.binary_search(&block.location.segment).is_ok();
                map.add(block, may_be_dirty && self.is_dirty(block, drained));
            }
        }
        true
    }

    /// Whether the backing device does not have a block yet. Its segment may have been reused meanwhile: then its record is of
    /// something else.
    fn is_dirty(&self, block: &Sampled, drained: Epoch) -> bool {
        let range = ByteRange::at(block.at, CHECKSUM_BLOCK);
        self.base().find_record(block.location).is_some_and(|record| {
            let is_dirty = record.kind().is_dirty() && Epoch(record.epoch.get()) > drained;
            record.range().overlaps(&range) && (is_dirty || record.kind().is_parked())
        })
    }
}
