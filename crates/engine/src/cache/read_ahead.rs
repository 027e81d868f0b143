//! Reads of the backing device that go beyond what a client asked for: readahead, and misses in whole blocks.
//!
//! Invariants: only what the cache does not hold is read; data that was read ahead may be used only while its fill is pending,
//! since a commit or discard that overlaps it cancels the fill under the lane's lock.
//!
//! Elsewhere: which ranges are read ahead, and who holds the data (`cbd-device`).

use super::{Cache, Miss};
use crate::{
    Environment,
    lane::{LaneState, Source},
    rare,
};
use alloc::vec::Vec;
use cbd_types::{ByteRange, CHECKSUM_BLOCK};

impl<E: Environment> Cache<E> {
    /// Adds the parts of `range`, which lies in one chunk, that the cache does not hold to `misses`, as [`read`](Self::read) does.
    /// No client has asked for them: they count neither as reads nor as misses. Without memory they are not added.
    pub fn read_ahead(&self, range: ByteRange, misses: &mut Vec<Miss>) {
        if self.base().gate().check_running().is_err() {
            return;
        }
        let id = self.base().identity().lanes.lane_of(range.start);
        let mut state = self.lane(id).lock();
        let mut missing = Vec::new();
        state.look_up(self.base(), range, &mut |piece, source| {
            if source == Source::Backing && missing.try_reserve(1).is_ok() {
                missing.push(piece);
            }
        });
        if misses.try_reserve(missing.len()).is_ok() {
            misses.extend(missing.into_iter().map(|piece| Miss::new(piece, id, state.register_fill(piece))));
        }
    }

    /// Whether what was read ahead for `miss` is the newest data, and may be given to a client: nothing was written to its range
    /// since the miss was registered.
    pub fn may_use(&self, miss: &Miss) -> bool {
        let is_current = self.lane(miss.lane()).lock().is_pending(miss.id());
        let rare = self.base().rare();
        rare::count(if is_current { &rare.read_ahead_used } else { &rare.read_ahead_stale });
        is_current
    }

    /// Extends a miss at the first or last byte of the request `asked` to whole checksum blocks, as far as the cache does not hold
    /// the rest of them: a record of a whole block serves every later read of it. A miss does not become longer than a record may be.
    pub fn widen_to_blocks(&self, miss: &mut Miss, asked: ByteRange) {
        let (base, before) = (self.base(), miss.range);
        let mut wide = before;
        let mut state = self.lane(miss.lane()).lock();
        if before.start == asked.start {
            let head = ByteRange { start: before.start / CHECKSUM_BLOCK * CHECKSUM_BLOCK, end: before.start };
            let held = last_held(&state, self, head);
            wide.start = held.unwrap_or(head.start);
        }
        if before.end == asked.end {
            let end = before.end.next_multiple_of(CHECKSUM_BLOCK).min(base.size());
            let tail = ByteRange { start: before.end, end };
            wide.end = first_held(&state, self, tail).unwrap_or(tail.end);
        }
        let fits = wide.len() <= u64::from(base.shape().atomic_unit());
        // No fill may begin where the backing device is being changed.
        let is_quiet = !state.is_being_bypassed(wide);
        if wide != before && fits && is_quiet && state.resize_fill(miss.id(), wide) {
            miss.range = wide;
        }
    }

    /// Shortens a miss to the bytes from `start` on: the client has the first ones.
    pub fn narrow(&self, miss: &mut Miss, start: u64) {
        miss.range.start = start;
        self.lane(miss.lane()).lock().resize_fill(miss.id(), miss.range);
    }
}

/// The end of the last part of `range` that the cache holds.
fn last_held<E: Environment>(lane: &LaneState, cache: &Cache<E>, range: ByteRange) -> Option<u64> {
    let mut held = None;
    lane.look_up(cache.base(), range, &mut |piece, source| {
        if source != Source::Backing {
            held = Some(piece.end);
        }
    });
    held
}

/// The start of the first part of `range` that the cache holds.
fn first_held<E: Environment>(lane: &LaneState, cache: &Cache<E>, range: ByteRange) -> Option<u64> {
    let mut held = None;
    lane.look_up(cache.base(), range, &mut |piece, source| {
        if source != Source::Backing && held.is_none() {
            held = Some(piece.start);
        }
    });
    held
}
