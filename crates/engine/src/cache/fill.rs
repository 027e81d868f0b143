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
        // A power failure may take from the backing device what went past the cache and no flush has covered.
        let kind = if self.has_unflushed_bypass() { RecordKind::WriteThrough } else { RecordKind::Fill };
        if self.record_clean(&mut state, kind, miss.range, data) {
            state.count_filled(miss.range.len());
        }
    }

    /// Records data that the backing device has. Returns `false` if there was no space.
    pub(super) fn record_clean(
        &self,
        lane: &mut LaneState,
        kind: RecordKind,
        range: ByteRange,
        data: &[u8],
    ) -> bool {
        if blocks_in(range) <= FEW_BLOCKS {
            self.commit_clean::<FEW_BLOCKS>(lane, kind, range, data)
        } else {
            self.commit_clean::<MANY_BLOCKS>(lane, kind, range, data)
        }
    }

    fn commit_clean<const BLOCKS: usize>(
        &self,
        lane: &mut LaneState,
        kind: RecordKind,
        range: ByteRange,
        data: &[u8],
    ) -> bool {
        lane.commit::<E, BLOCKS>(self.base(), kind, range, data, Requester::Optional, None).is_ok()
    }

    /// Cancels a fill: the read failed, or its data is not needed any more.
    pub fn cancel_fill(&self, miss: Miss) {
        self.lane(miss.lane).lock().end_fill(miss.id);
    }
}
