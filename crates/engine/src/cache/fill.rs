//! Fills: data read from the backing device becomes a clean record.
//!
//! Invariants: a commit or discard that overlaps a pending fill cancels it while it holds the lane's lock, so data that was read
//! before a write can never be recorded after it; a fill never waits for space.

use super::Cache;
use crate::{
    Environment,
    base::Requester,
    lane::{FEW_BLOCKS, FillId, LaneState, MANY_BLOCKS},
};
use cbd_format::{RecordKind, record::blocks_in};
use cbd_types::{ByteRange, LaneId, MutationPoint};

/// A range that the caller must read from the backing device.
#[derive(Debug)]
#[must_use = "a fill that is neither completed nor cancelled stays registered"]
pub struct Miss {
    /// The bytes to read.
    pub range: ByteRange,
    lane: LaneId,
    id: FillId,
}

impl Miss {
    /// A range of `lane` that a read has missed, registered as `id`.
    pub(super) const fn new(range: ByteRange, lane: LaneId, id: FillId) -> Self {
        Self { range, lane, id }
    }
}

impl<E: Environment> Cache<E> {
    /// Caches the data that was read, unless a write or discard overlapped it meanwhile, space is short, or the full cache holds
    /// data of more value. `data` is memory that no client can access.
    pub fn complete_fill(&self, miss: Miss, data: &[u8]) {
        debug_assert_eq!(miss.range.len(), data.len() as u64);
        let (base, lane) = (self.base(), self.lane(miss.lane));
        let mut state = lane.lock();
        if !state.end_fill(miss.id) {
            return;
        }
        // Taking the last free segments would only make writers wait for reclaim.
        if base.gate().check_running().is_err()
            || base.region().check_stores(MutationPoint::RecordAfterFailure).is_err()
            || base.pool().has_waiters()
        {
            return;
        }
        if base.is_full() && !state.admits(base, miss.range) {
            return;
        }
        lane.announce(base);
        // Without space the data is not cached.
        if blocks_in(miss.range) <= FEW_BLOCKS {
            self.commit_fill::<FEW_BLOCKS>(&mut state, miss.range, data);
        } else {
            self.commit_fill::<MANY_BLOCKS>(&mut state, miss.range, data);
        }
    }

    fn commit_fill<const BLOCKS: usize>(&self, lane: &mut LaneState, range: ByteRange, data: &[u8]) {
        let (kind, requester) = (RecordKind::Fill, Requester::Optional);
        let _ = lane.commit::<E, BLOCKS>(self.base(), kind, range, data, requester, None);
    }

    /// Cancels a fill: the read failed, or its data is not needed any more.
    pub fn cancel_fill(&self, miss: Miss) {
        self.lane(miss.lane).lock().end_fill(miss.id);
    }
}
