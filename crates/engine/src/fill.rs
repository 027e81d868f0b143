//! Fills: what was read from the backing device becomes a clean record.
//!
//! Always true here: a pending fill that any commit or discard overlaps is cancelled in the same hold of the lane's
//! lock, so data that was read before a write can never be recorded after it; a fill never waits for space.

use crate::{
    Cache, Environment, index::blocks, lane::LaneState, lane::PendingFill, pool::Asker, write::FEW_BLOCKS,
    write::MANY_BLOCKS,
};
use cbd_format::{RecordKind, record::blocks_in};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, LaneId, MutationPoint};

/// A range that must be read from the backing device.
#[derive(Debug)]
#[must_use = "a fill that is neither completed nor cancelled stays registered"]
pub struct Miss {
    /// What to read.
    pub range: ByteRange,
    lane: LaneId,
    id: u64,
}

impl<E: Environment> Cache<E> {
    pub(crate) fn register_fill(&self, lane: &mut LaneState, range: ByteRange) -> Miss {
        let id = lane.next_fill;
        lane.next_fill += 1;
        lane.fills.push(PendingFill { id, range });
        Miss { range, lane: lane.id, id }
    }

    /// Caches what was read, unless something overlapped it meanwhile, space is short, or the cache is full of what is worth
    /// more. `data` is memory that no client can reach.
    pub fn complete_fill(&self, miss: Miss, data: &[u8]) {
        debug_assert_eq!(miss.range.len(), data.len() as u64);
        let lane = &self.lanes[miss.lane.index()];
        let mut state = lane.state.lock();
        match state.fills.iter().position(|fill| fill.id == miss.id) {
            Some(at) => drop(state.fills.swap_remove(at)),
            None if MutationPoint::FillCancelled.is_active() => return,
            None => {}
        }
        // Filling up the pool would only make writers wait for reclaim.
        if self.check_running().is_err()
            || self.region().check_stores(MutationPoint::RecordAfterFailure).is_err()
            || self.pool.has_waiters()
        {
            return;
        }
        if self.is_full() && !self.is_worth_a_place(&mut state, miss.range) {
            return;
        }
        self.announce(lane);
        // Without space it is simply not cached.
        let _ = if blocks_in(miss.range) <= FEW_BLOCKS {
            self.commit_locked::<FEW_BLOCKS>(
                &mut state,
                RecordKind::Fill,
                miss.range,
                data,
                Asker::Optional,
                None,
            )
        } else {
            self.commit_locked::<MANY_BLOCKS>(
                &mut state,
                RecordKind::Fill,
                miss.range,
                data,
                Asker::Optional,
                None,
            )
        };
    }

    /// Whether at least half of the blocks of `range` are. What the lane holds already, in parts or damaged, always is.
    fn is_worth_a_place(&self, lane: &mut LaneState, range: ByteRange) -> bool {
        let is_worth = |(block, _, _): &(u64, usize, usize)| {
            let key = self.identity().lanes.key(block * CHECKSUM_BLOCK);
            lane.index.get(key).is_some() || lane.admission.is_worth(key)
        };
        2 * blocks(range).filter(is_worth).count() >= blocks_in(range)
    }

    /// The read failed, or nobody wants it any more.
    pub fn cancel_fill(&self, miss: Miss) {
        self.lanes[miss.lane.index()].state.lock().fills.retain(|fill| fill.id != miss.id);
    }
}
