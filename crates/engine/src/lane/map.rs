//! A sample of the blocks of a lane, for the map of a cache.
//!
//! Invariants: one call visits as many buckets of the index as it is told to, and changes nothing.
//!
//! Elsewhere: what the blocks add up to (`cache::map`).

use super::{LaneState, index::Found};
use crate::{
    Environment,
    base::Base,
    position::{Location, NONE},
};
use alloc::vec::Vec;
use cbd_types::{CHECKSUM_BLOCK, SECTOR};

/// A block, or the parts of one that the same record holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sampled {
    /// The first byte of the block on the device.
    pub at: u64,
    /// Bytes that the record holds of it.
    pub bytes: u64,
    /// The record.
    pub location: Location,
    /// The block was read since it was written.
    pub was_read: bool,
}

impl LaneState {
    /// The number of buckets of its index.
    pub(crate) fn index_buckets(&self) -> usize {
        self.index.buckets()
    }

    /// Adds the blocks of the `buckets` of the index to `sampled`; false if there is no memory for them.
    pub(crate) fn sample<E: Environment>(
        &self,
        base: &Base<E>,
        buckets: impl Iterator<Item = usize>,
        sampled: &mut Vec<Sampled>,
    ) -> bool {
        for (key, found, was_read) in buckets.flat_map(|bucket| self.index.blocks_of(bucket)) {
            let at = base.identity().lanes.offset_of(self.id, key);
            let of = |bytes, location| Sampled { at, bytes, location, was_read };
            // A block has no more parts than sectors.
            if sampled.try_reserve((CHECKSUM_BLOCK / SECTOR) as usize).is_err() {
                return false;
            }
            match found {
                Found::Whole(location) => sampled.push(of(CHECKSUM_BLOCK, location)),
                Found::Parts(parts) => {
                    for run in parts.chunk_by(|first, second| first == second) {
                        if run[0] != NONE {
                            sampled.push(of(run.len() as u64 * SECTOR, run[0]));
                        }
                    }
                }
            }
        }
        true
    }

    /// Sets `segments` to those that may hold dirty or parked data, in order; false if there is no memory for them.
    pub(crate) fn list_unwritten(&self, drained: u64, segments: &mut Vec<u32>) -> bool {
        let unwritten = self.segments().filter(|segment| segment.last_dirty_epoch > drained);
        segments.clear();
        if segments.try_reserve(self.segments().count() + self.parked.iter().count()).is_err() {
            return false;
        }
        segments.extend(unwritten.map(|segment| segment.segment));
        segments.extend(self.parked.iter().map(|(_, parked)| parked.location.segment));
        segments.sort_unstable();
        true
    }
}
