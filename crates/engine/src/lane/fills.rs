//! Fills: reads of the backing device whose data may become clean records.
//!
//! Invariants: a commit or discard cancels the pending fills that it overlaps in the same hold of the lane's lock, so data that
//! was read before a write is never recorded after it.

use super::{LaneState, blocks};
use crate::{Environment, base::Base};
use cbd_format::record::blocks_in;
use cbd_types::{ByteRange, CHECKSUM_BLOCK};

/// The number of a fill in its lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FillId(u64);

/// A read of the backing device whose data may become a record.
#[derive(Debug)]
pub(super) struct PendingFill {
    id: FillId,
    range: ByteRange,
}

impl LaneState {
    /// Registers a read of `range` from the backing device.
    pub(crate) fn register_fill(&mut self, range: ByteRange) -> FillId {
        let id = FillId(self.bypass.next_fill);
        self.bypass.next_fill += 1;
        // If the allocation fails, or the backing device may change the range meanwhile, the fill is not registered: its data is
        // not recorded.
        if !self.is_being_bypassed(range) && self.bypass.fills.try_reserve(1).is_ok() {
            self.bypass.fills.push(PendingFill { id, range });
            self.filling += 1;
        }
        id
    }

    /// As [`register_fill`](Self::register_fill), for a range that a read missed.
    pub(crate) fn register_miss(&mut self, range: ByteRange) -> FillId {
        self.counters.read_missed += range.len();
        self.register_fill(range)
    }

    /// A range that a read takes from the backing device, and whose data is not recorded.
    pub(crate) fn unrecorded_miss(&mut self, range: ByteRange) -> FillId {
        self.counters.read_missed += range.len();
        let id = FillId(self.bypass.next_fill);
        self.bypass.next_fill += 1;
        id
    }

    /// Ends a fill. `false` if it was cancelled.
    pub(crate) fn end_fill(&mut self, id: FillId) -> bool {
        match self.bypass.fills.iter().position(|fill| fill.id == id) {
            Some(at) => {
                self.bypass.fills.swap_remove(at);
                self.filling -= 1;
                true
            }
            None => false,
        }
    }

    /// Whether a fill has neither ended nor been cancelled: what was or will be read for it is the newest data.
    pub(crate) fn is_pending(&self, id: FillId) -> bool {
        self.bypass.fills.iter().any(|fill| fill.id == id)
    }

    /// Changes the range of a fill. `false` if it was cancelled.
    pub(crate) fn resize_fill(&mut self, id: FillId, range: ByteRange) -> bool {
        let fill = self.bypass.fills.iter_mut().find(|fill| fill.id == id);
        fill.map(|fill| fill.range = range).is_some()
    }

    /// The number of fills that have neither ended nor been cancelled.
    pub(crate) fn pending_fills(&self) -> usize {
        self.bypass.fills.len()
    }

    /// Cancels the fills that a commit to `range` overlaps: their reads of the backing device must not become records.
    pub(super) fn cancel_fills(&mut self, range: ByteRange) {
        if self.filling > 0 {
            self.bypass.fills.retain(|fill| !fill.range.overlaps(&range));
            self.filling = self.bypass.fills.len() as u32;
        }
    }

    /// Cancels all fills.
    pub(crate) fn cancel_all_fills(&mut self) {
        self.bypass.fills.clear();
        self.filling = 0;
    }

    /// Counts `bytes` that were recorded after a miss.
    pub(crate) fn count_filled(&mut self, bytes: u64) {
        self.counters.filled += bytes;
    }

    /// Whether admission grants space in a full cache to at least half of the blocks of `range`. Blocks that the lane holds
    /// already, in parts or damaged, are always granted it.
    pub(crate) fn admits<E: Environment>(&mut self, base: &Base<E>, range: ByteRange) -> bool {
        let is_worth = |(block, _, _): &(u64, usize, usize)| {
            let key = base.identity().lanes.key(block * CHECKSUM_BLOCK);
            self.index.get(key).is_some() || self.admission.is_worth(key)
        };
        2 * blocks(range).filter(is_worth).count() >= blocks_in(range)
    }
}
