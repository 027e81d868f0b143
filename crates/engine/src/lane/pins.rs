//! Pins of a lane: the ranges that reclaim appends again although no client read them.
//!
//! Invariants: pins change only which data the lane keeps; they are looked at for misses of a full cache, for changes that would
//! go past the cache, and at reclaim, and by no other request.
//!
//! Elsewhere: how much may be pinned (`cache::pins`), and why writers go on (`worker::reclaim`).

use super::LaneState;
use crate::{Environment, base::Base, pins::PinnedRanges};
use alloc::sync::Arc;
use cbd_types::ByteRange;

/// The pins of a lane.
#[derive(Default)]
pub(super) struct LanePins {
    /// The pins of the whole cache; none if nothing is pinned.
    ranges: Option<Arc<PinnedRanges>>,
    /// Bytes of the lane's chunks that are pinned.
    bytes: u64,
}

impl LaneState {
    /// Pins `ranges` and nothing else; `bytes` of them belong to the lane. Returns what was pinned, to be dropped without the
    /// lane's lock.
    pub(crate) fn set_pins(
        &mut self,
        ranges: Option<Arc<PinnedRanges>>,
        bytes: u64,
    ) -> Option<Arc<PinnedRanges>> {
        self.pins.bytes = bytes;
        core::mem::replace(&mut self.pins.ranges, ranges)
    }

    /// Whether some of `range` is pinned.
    #[inline]
    pub(crate) fn is_pinned(&self, range: ByteRange) -> bool {
        self.pins.ranges.as_ref().is_some_and(|pins| pins.touches(range))
    }

    /// Bytes of the lane's sealed segments that are left if all its pins are in them once: so much, at least, one pass of reclaim
    /// through the log frees.
    pub(crate) fn unpinned_bytes<E: Environment>(&self, base: &Base<E>) -> u64 {
        (self.sealed.len() as u64 * base.blocks_bytes_per_segment()).saturating_sub(self.pins.bytes)
    }

    /// Whether its pins may take so much of the lane's log that reclaim frees no space there.
    pub(crate) fn is_full_of_pins<E: Environment>(&self, base: &Base<E>) -> bool {
        self.pins.bytes > 0 && self.unpinned_bytes(base) < 2 * base.blocks_bytes_per_segment()
    }
}
