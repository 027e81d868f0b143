//! Fills: what was read from the backing device becomes a clean record.
//!
//! Always true here: a pending fill that any commit or discard overlaps is cancelled in the same hold of the lane's
//! lock, so data that was read before a write can never be recorded after it; a fill never waits for space.

use super::Cache;
use crate::{
    Environment,
    base::Asker,
    lane::{FEW_BLOCKS, FillId, LaneState, MANY_BLOCKS},
};
use cbd_format::{RecordKind, record::blocks_in};
use cbd_types::{ByteRange, LaneId, MutationPoint};

/// A range that must be read from the backing device.
#[derive(Debug)]
#[must_use = "a fill that is neither completed nor cancelled stays registered"]
pub struct Miss {
    /// What to read.
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
    /// Caches what was read, unless something overlapped it meanwhile, space is short, or the cache is full of what is worth
    /// more. `data` is memory that no client can reach.
    pub fn complete_fill(&self, miss: Miss, data: &[u8]) {
        debug_assert_eq!(miss.range.len(), data.len() as u64);
        let (base, lane) = (self.base(), self.lane(miss.lane));
        let mut state = lane.lock();
        if !state.end_fill(miss.id) {
            return;
        }
        // Filling up the pool would only make writers wait for reclaim.
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
        // Without space it is not cached.
        if blocks_in(miss.range) <= FEW_BLOCKS {
            self.commit_fill::<FEW_BLOCKS>(&mut state, miss.range, data);
        } else {
            self.commit_fill::<MANY_BLOCKS>(&mut state, miss.range, data);
        }
    }

    fn commit_fill<const BLOCKS: usize>(&self, lane: &mut LaneState, range: ByteRange, data: &[u8]) {
        let (kind, asker) = (RecordKind::Fill, Asker::Optional);
        let _ = lane.commit::<E, BLOCKS>(self.base(), kind, range, data, asker, None);
    }

    /// The read failed, or its data are not wanted any more.
    pub fn cancel_fill(&self, miss: Miss) {
        self.lane(miss.lane).lock().end_fill(miss.id);
    }
}
