//! Parked ranges of all lanes: data that the backing device refuses stays in the cache, as dirty, while everything else
//! continues.
//!
//! Elsewhere: the parked ranges of a lane (`lane::parking`), the schedule of retries (`worker::writeback`).

use super::{Cache, status::LISTED_MAX};
use crate::{
    Environment,
    base::Requester,
    lane::{Outcome, Parked, Refused},
};
use alloc::vec::Vec;
use cbd_types::{ByteRange, CHECKSUM_BLOCK, LaneId, heap_sort_by_key};

impl<E: Environment> Cache<E> {
    /// Parks `range`, which lies in one checksum block or is zeroes of one chunk, as far as the refused content is still its
    /// newest: newer content is behind it in the log, and writeback writes that later. `requester` allocates the space.
    pub(crate) fn park(&self, range: ByteRange, refused: Refused, requester: Requester) -> Outcome {
        let lane = self.lane_of(range.start);
        let mut state = lane.lock();
        lane.announce(self.base());
        state.park(self.base(), range, refused, requester, || self.parked_counters().count_parked())
    }

    /// Carries a parked range forward: its segment is to be reclaimed. A part that is found damaged is quarantined. Returns
    /// `false` if there is no space.
    pub(crate) fn carry_parked(&self, id: LaneId, range: ByteRange, parked: Parked) -> bool {
        for piece in range.split_at_multiples(CHECKSUM_BLOCK) {
            let carried = {
                let lane = self.lane(id);
                let mut state = lane.lock();
                lane.announce(self.base());
                state.carry_parked(self.base(), piece, parked)
            };
            match carried {
                Ok(()) => {}
                Err(None) => return false,
                Err(Some(damage)) => {
                    let place = self.base().place_of(parked.location);
                    if !self.quarantine(id, damage.range, parked.sequence, place, Requester::Essential) {
                        return false;
                    }
                }
            }
        }
        true
    }

    /// Unparks a range that the backing device has accepted and flushed. Recovery does not know this: it retries a range that is
    /// still the newest then, which changes nothing.
    pub(crate) fn unpark(&self, range: ByteRange, taken: Refused) {
        self.lane_of(range.start).lock().unpark(range, taken);
        self.parked_counters().count_unparked();
    }

    /// Whether exactly this range with this content is still parked.
    pub(crate) fn is_still_parked(&self, range: ByteRange, what: Refused) -> bool {
        let state = self.lane_of(range.start).lock();
        state.parked_in(range).any(|(part, now)| part == range && now.is(what))
    }

    /// Whether any range is parked.
    pub(crate) fn has_parked(&self) -> bool {
        self.lanes().iter().any(|lane| lane.lock().has_parked())
    }

    /// All parked ranges.
    pub(crate) fn parked(&self) -> Vec<(ByteRange, Parked)> {
        self.lanes().iter().flat_map(|lane| lane.lock().parked_ranges().collect::<Vec<_>>()).collect()
    }

    /// Bytes that are parked.
    pub fn parked_bytes(&self) -> u64 {
        self.lanes().iter().map(|lane| lane.lock().parked_bytes()).sum()
    }

    /// The parked ranges by address, adjacent ones joined; only some if there are very many.
    pub(crate) fn parked_ranges(&self) -> Vec<ByteRange> {
        let mut all: Vec<ByteRange> = self.parked().into_iter().map(|(range, _)| range).collect();
        heap_sort_by_key(&mut all, |range| *range);
        let mut listed: Vec<ByteRange> = Vec::new();
        for range in all {
            match listed.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => listed.push(range),
            }
        }
        listed.truncate(LISTED_MAX);
        listed
    }

    /// Whether the lanes have space for all of `refused` beside the ranges that they have parked. What is parked
    /// already, or overwritten, needs none: a batch that begins again meets it again.
    pub(crate) fn can_park(&self, refused: impl Iterator<Item = (ByteRange, Refused)>) -> bool {
        let mut wanted = alloc::vec![0; self.lanes().len()];
        for (range, what) in refused {
            let lane = self.base().identity().lanes.lane_of(range.start);
            wanted[lane.index()] += self.lane(lane).lock().space_to_park(self.base(), range, what);
        }
        let limit = self.base().shape().size / 4;
        self.lanes()
            .iter()
            .zip(wanted)
            .all(|(lane, wanted)| wanted == 0 || lane.lock().parked_space() + wanted <= limit)
    }
}
