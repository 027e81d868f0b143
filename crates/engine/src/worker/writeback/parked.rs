//! Retries of parked ranges, and parking of ranges that the backing device refuses.
//!
//! Invariants:
//! - parked ranges are retried while no other operation of writeback is in flight, and only those that are still the newest;
//! - a range stays parked until the backing device has accepted and flushed it;
//! - retries store nothing into the region, so an idle cache with parked ranges changes nothing on media.
//!
//! Elsewhere: the parked records (`parking`), which ranges count as refused (`failing`).

use super::{Batch, Content, NO_SPACE_TO_PARK, Piece, REQUEST_MAX, Writeback};
use crate::{Cache, Environment, lane::Outcome};
use alloc::{collections::VecDeque, vec::Vec};
use cbd_types::{CHECKSUM_BLOCK, CHUNK, Error, heap_sort_by_key};

/// The delay before parked ranges are retried, doubled each time that the device accepts none of them, up to the limit.
const RETRY_FIRST_MS: u64 = 30_000;
const RETRY_MAX_MS: u64 = 600_000;
/// When a client requests a drain, parked ranges are retried at once, but at the earliest after this time since the last retry.
const RETRY_REQUESTED_MS: u64 = 1000;
/// A retry ends after this number of refusals if the device has accepted nothing.
const REFUSALS_MAX: usize = 8;

/// The schedule of retries of parked ranges.
pub(super) struct Attempts {
    due_ms: u64,
    delay_ms: u64,
    tried_ms: u64,
    /// Refusals in the current retry. `turn` counts those of all retries.
    refusals: usize,
    turn: usize,
    /// The last requested drain, and whether the current retry is for it.
    requested: u64,
    is_requested: bool,
}

impl Attempts {
    pub(super) const fn new(now_ms: u64) -> Self {
        Self {
            due_ms: now_ms,
            delay_ms: RETRY_FIRST_MS,
            tried_ms: now_ms,
            refusals: 0,
            turn: 0,
            requested: 0,
            is_requested: false,
        }
    }

    /// When parked ranges are retried next.
    pub(super) const fn due_ms(&self) -> u64 {
        self.due_ms
    }

    /// The whole retry failed: the next one is due after the current delay.
    pub(super) const fn postpone(&mut self, now_ms: u64) {
        self.due_ms = now_ms + self.delay_ms;
    }
}

impl Writeback {
    /// Begins a retry of parked ranges if one is due.
    pub(super) fn begin_parked<E: Environment>(&mut self, cache: &Cache<E>, now: u64) -> bool {
        let requested = cache.base().epochs().requested();
        if requested > self.parked.requested {
            self.parked.requested = requested;
            self.parked.is_requested = true;
            self.parked.due_ms = self.parked.due_ms.min(self.parked.tried_ms + RETRY_REQUESTED_MS);
        }
        if now < self.parked.due_ms {
            return false;
        }
        let mut pieces: Vec<Piece> = cache
            .parked()
            .into_iter()
            .map(|(range, parked)| match parked.zeroes {
                true => (range, Content::Zeroes),
                false => {
                    let lane = cache.base().identity().lanes.lane_of(range.start);
                    (range, Content::Data { location: parked.location, lane, sequence: parked.sequence })
                }
            })
            .collect();
        if pieces.is_empty() {
            return false;
        }
        heap_sort_by_key(&mut pieces, |(range, _)| range.start);
        // Each retry begins with another range, since few are tried if the device accepts none.
        let turn = self.parked.turn % pieces.len();
        pieces.rotate_left(turn);
        self.parked.refusals = 0;
        self.batch = Some(Batch { pieces: pieces.into(), complete: true, ..Batch::new(cache, None) });
        self.parked.tried_ms = now;
        true
    }

    /// Parks the sectors that the device refused one by one, once the rest of the part is written, so that the batch can be
    /// drained. Returns `false` if there are none.
    pub(super) fn park_refused<E: Environment>(&mut self, cache: &Cache<E>, now: u64) -> bool {
        if self.failing.refused().is_empty() {
            return false;
        }
        let refused = self.failing.refused().iter().map(|(range, content)| (*range, content.refused()));
        if !cache.can_park(refused) {
            self.failing.too_much(now, REQUEST_MAX);
            return true;
        }
        if let Some(batch) = &mut self.batch {
            // Also if newer data covers the range: the backing device never gets this version.
            batch.lacks_something = true;
        }
        let requester = self.requester_of_notes();
        let mut refused: VecDeque<Piece> = join_adjacent(self.failing.take_refused()).into();
        while let Some((range, content)) = refused.pop_front() {
            match cache.park(range, content.refused(), requester) {
                Outcome::Done => self.failing.parked(range),
                // The range is loaded again, and quarantined.
                Outcome::Damaged => {
                    if let Some(batch) = &mut self.batch {
                        batch.pieces.push_front((range, content));
                    }
                }
                Outcome::NoSpace => {
                    self.give_up(cache, NO_SPACE_TO_PARK);
                    break;
                }
            }
        }
        true
    }

    /// Ends a retry of parked ranges: unparks those that the device has accepted and flushed.
    pub(super) fn finish_parked<E: Environment>(&mut self, cache: &Cache<E>, now: u64) {
        let Some(batch) = self.batch.take() else { return };
        self.parked.delay_ms = if batch.taken.is_empty() {
            (self.parked.delay_ms * 2).min(RETRY_MAX_MS)
        } else {
            RETRY_FIRST_MS
        };
        self.parked.due_ms = now + self.parked.delay_ms;
        self.parked.is_requested = false;
        cache.parked_counters().count_attempt();
        if !batch.taken.is_empty() && self.failing.flush_worked() {
            cache.backing().end_trouble();
        }
        for (range, content) in batch.taken {
            cache.unpark(range, content.refused());
        }
        if !cache.has_parked() {
            cache.parked_counters().forget_refusal();
        }
    }

    /// Counts a refusal of a retry, and ends the retry after too many.
    pub(super) fn stays_parked<E: Environment>(&mut self, cache: &Cache<E>, error: &Error) {
        cache.parked_counters().note_refusal(error);
        self.parked.turn = self.parked.turn.wrapping_add(1);
        self.parked.refusals += 1;
        if let Some(batch) = &mut self.batch
            && batch.taken.is_empty()
            && !self.parked.is_requested
            && self.parked.refusals >= REFUSALS_MAX
        {
            // A device can take half a minute to refuse a sector, and the rest of writeback waits for it.
            batch.pieces.clear();
        }
    }
}

/// Joins adjacent sectors of one content up to the range of one parked record: for data, at most a checksum block.
fn join_adjacent(refused: Vec<Piece>) -> Vec<Piece> {
    let mut joined: Vec<Piece> = Vec::new();
    for (range, content) in refused {
        let unit = if matches!(content, Content::Data { .. }) { CHECKSUM_BLOCK } else { CHUNK };
        match joined.last_mut() {
            Some((last, same))
                if last.end == range.start && *same == content && last.start / unit == range.start / unit =>
            {
                last.end = range.end;
            }
            _ => joined.push((range, content)),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::position::Location;
    use cbd_types::{ByteRange, LaneId};

    const SECTOR: u64 = 512;

    fn data(sequence: u64) -> Content {
        Content::Data { location: Location { segment: 0, slot: sequence as u32 }, lane: LaneId(0), sequence }
    }

    /// The ranges that become of these, by their first and their last sector.
    fn joined(refused: &[(u64, u64, Content)]) -> Vec<(u64, u64)> {
        let range = |start, end| ByteRange { start: start * SECTOR, end: end * SECTOR };
        let pieces = refused.iter().map(|(start, end, content)| (range(*start, *end), *content)).collect();
        join_adjacent(pieces).iter().map(|(range, _)| (range.start / SECTOR, range.end / SECTOR)).collect()
    }

    #[test]
    fn refused_sectors_of_one_content_are_parked_together_as_far_as_one_record_can_hold_them() {
        let zeroes = Content::Zeroes;
        assert_eq!(joined(&[(1, 2, data(1)), (2, 3, data(1)), (3, 8, data(1))]), [(1, 8)]);
        assert_eq!(joined(&[(1, 2, data(1)), (2, 3, data(2))]), [(1, 2), (2, 3)], "other records");
        assert_eq!(joined(&[(1, 2, data(1)), (3, 4, data(1))]), [(1, 2), (3, 4)], "not adjacent");
        assert_eq!(joined(&[(1, 2, zeroes), (3, 4, zeroes)]), [(1, 2), (3, 4)], "not adjacent");
        assert_eq!(joined(&[(7, 8, zeroes), (8, 9, zeroes)]), [(7, 9)], "zeroes of two blocks");
        assert_eq!(joined(&[(1, 2, zeroes), (2, 3, Content::Discard)]), [(1, 2), (2, 3)]);
        // Data of one checksum block, zeroes of one chunk, near the begin of the device and far from it.
        let chunk = CHUNK / SECTOR;
        for far in [0, 8000 * chunk] {
            let piece = |start, content| (far + start, far + start + 1, content);
            let both = |start, content| joined(&[piece(start, content), piece(start + 1, content)]).len();
            assert_eq!([6, 7, 8].map(|start| both(start, data(1))), [1, 2, 1], "blocks");
            assert_eq!([chunk - 2, chunk - 1, chunk].map(|start| both(start, zeroes)), [1, 2, 1], "chunks");
        }
    }
}
