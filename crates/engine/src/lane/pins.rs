//! Pins of a lane, the ranges that reclaim appends again although no client read them, and with them its metadata that is kept.
//!
//! Invariants: pins change only which data the lane keeps; they are looked at for misses of a full cache, for changes that would
//! go past the cache, and at reclaim, and by no other request.
//!
//! Elsewhere: how much may be pinned (`cache::pins`), and why writers go on (`worker::reclaim`).

use super::{LaneState, OfMetadata};
use crate::{Environment, base::Base, pins::PinnedRanges};
use alloc::sync::Arc;
use cbd_types::{ByteRange, CHECKSUM_BLOCK};

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

    /// Bytes of whole blocks of metadata.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        u64::from(self.index.metadata()) * CHECKSUM_BLOCK
    }

    /// Bytes that one pass of reclaim through the lane appends again in any case.
    fn kept_bytes(&self, of_metadata: OfMetadata) -> u64 {
        self.pins.bytes + self.metadata_bytes().saturating_sub(of_metadata.above)
    }

    /// Bytes of the lane's sealed segments that are left if all that is kept is in them once: so much, at least, one pass of
    /// reclaim through the log frees.
    pub(crate) fn bytes_to_free<E: Environment>(&self, base: &Base<E>, of_metadata: OfMetadata) -> u64 {
        (self.sealed.len() as u64 * base.blocks_bytes_per_segment())
            .saturating_sub(self.kept_bytes(of_metadata))
    }

    /// Whether what is kept may take so much of the lane's log that reclaim frees no space there.
    pub(crate) fn is_full_of_kept<E: Environment>(&self, base: &Base<E>, of_metadata: OfMetadata) -> bool {
        self.kept_bytes(of_metadata) > 0
            && self.bytes_to_free(base, of_metadata) < 2 * base.blocks_bytes_per_segment()
    }
}
