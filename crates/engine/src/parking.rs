//! Parked ranges: what the backing device does not take is kept in the cache, as dirty, while everything else goes on.
//!
//! A parked range is a record of its own with the data in it. It is no part of the order in which *drained* moves: it stays
//! dirty when that passes its epoch, as a quarantine stays damage.
//!
//! Always true here:
//! - only what is the newest of its range is parked, and whatever is written, zeroed or marked bad there later ends it; so
//!   parked data never covers newer data, neither in reads nor on the backing device;
//! - the record is durable before *drained* passes the one that it stands for, and it is carried forward, durably, before
//!   its segment is reclaimed;
//! - what a lane has parked takes at most a quarter of a segment, so that the one segment that is kept back for each lane
//!   holds all of it when it is carried.
//!
//! Left to others: what is to be parked, and trying it again (`writeback`, `failing`).

mod counters;

use crate::{
    Cache, Environment,
    index::Location,
    lane::LaneState,
    log::Damage,
    overlay::{Meaning, Place},
    pool::Asker,
    rangemap::RangeMap,
    read::Source,
    status::LISTED_MAX,
};
use alloc::vec::Vec;
use cbd_format::{Record, RecordKind, SegmentShape};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, LaneId, MutationPoint, heap_sort_by_key};

pub(crate) use counters::ParkedCounters;

/// Bytes that a record takes with its mirror.
const RECORD_BYTES: u64 = 128;

/// What stands for a parked range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Parked {
    /// Its record, and the sequence number of that.
    pub(crate) location: Location,
    pub(crate) sequence: u64,
    /// The range reads as zeroes: the record has no data.
    pub(crate) zeroes: bool,
}

impl Parked {
    fn is(&self, what: Refused) -> bool {
        match what {
            Refused::Data(location) => !self.zeroes && self.location == location,
            Refused::Zeroes => self.zeroes,
        }
    }
}

/// The parked ranges of one lane.
#[derive(Default)]
pub(crate) struct Parking {
    ranges: RangeMap<Parked>,
}

impl Parking {
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(crate) fn insert(&mut self, range: ByteRange, parked: Parked) {
        self.ranges.insert(range, parked, |_| false);
    }

    /// Something newer covers `range`.
    pub(crate) fn forget(&mut self, range: ByteRange) {
        self.ranges.remove(range, |_| true);
    }

    fn forget_where(&mut self, range: ByteRange, goes: impl Fn(&Parked) -> bool) {
        self.ranges.remove(range, goes);
    }

    /// Parts of `range` that are parked.
    pub(crate) fn touching(&self, range: ByteRange) -> impl Iterator<Item = (ByteRange, Parked)> + '_ {
        self.ranges.touching(range)
    }

    /// Whether the record at `location` stands for a parked part of `range`.
    pub(crate) fn holds(&self, range: ByteRange, location: Location) -> bool {
        self.touching(range).any(|(_, parked)| parked.location == location)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ByteRange, Parked)> + '_ {
        self.ranges.iter()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.iter().map(|(range, _)| range.len()).sum()
    }

    /// Bytes of a segment that carrying all of it takes.
    fn space(&self) -> u64 {
        self.iter().map(|(range, parked)| space_of(range, parked.zeroes)).sum()
    }
}

/// Bytes of a segment that a parked range takes.
const fn space_of(range: ByteRange, zeroes: bool) -> u64 {
    RECORD_BYTES + if zeroes { 0 } else { SegmentShape::data_bytes(range.len()) }
}

/// What is to be parked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    /// The data of the record there.
    Data(Location),
    /// Zeroes.
    Zeroes,
}

/// What became of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// It is parked, durably, as far as nothing newer covers it.
    Done,
    /// There is no space for it.
    NoSpace,
    /// Its data is damaged.
    Damaged,
}

impl<E: Environment> Cache<E> {
    /// Parks `range`, which lies in one checksum block or is zeroes of one chunk, as far as what the backing device refused is
    /// still its newest content: newer content is in the log behind it, and comes to the backing device in its turn.
    pub(crate) fn park(&self, range: ByteRange, refused: Refused) -> Outcome {
        let lane = self.lane(range.start);
        let mut state = lane.state.lock();
        self.announce(lane);
        let mut newest = Vec::new();
        self.look_up(&state, range, &mut |part, source| {
            let is_newest = match refused {
                Refused::Data(location) => source == Source::Record(location),
                Refused::Zeroes => source == Source::Zeroes,
            };
            if MutationPoint::ParkedNewest.holds(is_newest) {
                newest.push(part);
            }
        });
        if refused == Refused::Zeroes && MutationPoint::ParkedZeroesOnce.is_active() {
            // A batch that is tried again meets zeroes that are parked already: they look as those that it holds.
            let mut others = RangeMap::default();
            newest.iter().for_each(|part| others.insert(*part, (), |()| false));
            for (part, _) in state.parked.touching(range).filter(|(_, parked)| parked.zeroes) {
                others.remove(part, |()| true);
            }
            newest = others.iter().map(|(part, ())| part).collect();
        }
        for part in newest {
            let outcome = match refused {
                Refused::Zeroes => self.append_parked_zeroes(&mut state, part),
                Refused::Data(location) => match self.append_parked(&mut state, part, location) {
                    Ok(outcome) => outcome,
                    Err(_) => Outcome::Damaged,
                },
            };
            if outcome != Outcome::Done {
                return outcome;
            }
            self.parked_counters().count_parked();
        }
        Outcome::Done
    }

    /// Carries a parked range forward: its segment is to be reclaimed. What turns out to be damaged is quarantined. `false`
    /// when there is no space.
    pub(crate) fn carry_parked(&self, id: LaneId, range: ByteRange, parked: Parked) -> bool {
        for piece in range.split_at_multiples(CHECKSUM_BLOCK) {
            let appended = {
                let lane = &self.lanes[id.index()];
                let mut state = lane.state.lock();
                self.announce(lane);
                // Somebody may have written it meanwhile.
                let still: Vec<_> = state.parked.touching(piece).filter(|(_, now)| *now == parked).collect();
                still.into_iter().try_for_each(|(part, _)| match parked.zeroes {
                    true => match self.append_parked_zeroes(&mut state, part) {
                        Outcome::NoSpace => Err(None),
                        _ => Ok(()),
                    },
                    false => match self.append_parked(&mut state, part, parked.location) {
                        Ok(Outcome::NoSpace) => Err(None),
                        Ok(_) => Ok(()),
                        Err(damage) => Err(Some(damage)),
                    },
                })
            };
            match appended {
                Ok(()) => {}
                Err(None) => return false,
                Err(Some(damage)) => {
                    let place = self.place_of(parked.location);
                    if !self.quarantine(id, damage.range, parked.sequence, place, Asker::Essential) {
                        return false;
                    }
                }
            }
        }
        true
    }

    /// Appends the data of the record at `location` as parked.
    fn append_parked(
        &self,
        state: &mut LaneState,
        range: ByteRange,
        location: Location,
    ) -> Result<Outcome, Damage> {
        let record = self.load_record(location).map_err(|error| Damage { range, error })?;
        let mut data = Vec::new();
        if data.try_reserve_exact(range.len() as usize).is_err() {
            return Ok(Outcome::NoSpace);
        }
        data.resize(range.len() as usize, 0);
        self.load_data(location, &record, range, &mut data)?;
        let kind = RecordKind::ParkedWrite;
        let committed = self.commit_locked::<2>(state, kind, range, &data, Asker::Essential, None);
        Ok(if committed.is_some() { Outcome::Done } else { Outcome::NoSpace })
    }

    fn append_parked_zeroes(&self, state: &mut LaneState, range: ByteRange) -> Outcome {
        if !self.make_room(state, 1, 0, Asker::Essential, None) {
            return Outcome::NoSpace;
        }
        let (location, stored) = self.append(state, Record::new(RecordKind::ParkedZeroes, range), &[]);
        state.overlay.insert(range, Meaning::Zeroes, self.place_of(location));
        state.parked.insert(range, Parked { location, sequence: state.next_sequence - 1, zeroes: true });
        state.cancel_fills(range);
        self.region().fence(MutationPoint::ParkedFence, stored);
        Outcome::Done
    }

    /// The backing device has taken a parked range, and flushed it. Recovery does not know that: it tries once more what is
    /// still the newest then, which changes nothing.
    pub(crate) fn unpark(&self, range: ByteRange, taken: Refused) {
        self.lane(range.start).state.lock().parked.forget_where(range, |now| now.is(taken));
        self.parked_counters().count_unparked();
    }

    /// Whether just this is still parked.
    pub(crate) fn is_still_parked(&self, range: ByteRange, what: Refused) -> bool {
        let state = self.lane(range.start).state.lock();
        let is_parked = state.parked.touching(range).any(|(part, now)| part == range && now.is(what));
        MutationPoint::ParkedStill.holds(is_parked)
    }

    /// Whether anything is parked.
    pub(crate) fn has_parked(&self) -> bool {
        self.lanes.iter().any(|lane| !lane.state.lock().parked.is_empty())
    }

    /// All that is parked.
    pub(crate) fn parked(&self) -> Vec<(ByteRange, Parked)> {
        self.lanes.iter().flat_map(|lane| lane.state.lock().parked.iter().collect::<Vec<_>>()).collect()
    }

    /// Bytes that are parked.
    pub fn parked_bytes(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.state.lock().parked.bytes()).sum()
    }

    /// The parked ranges in the order of the device, neighbours together; at most some of very many.
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

    /// Whether the lanes have room for all of `refused` beside what they have parked.
    pub(crate) fn can_park(&self, refused: impl Iterator<Item = (ByteRange, Refused)>) -> bool {
        let mut wanted = alloc::vec![0; self.lanes.len()];
        for (range, what) in refused {
            wanted[self.identity().lanes.lane_of(range.start).index()] +=
                space_of(range, what == Refused::Zeroes);
        }
        let limit = self.shape().size / 4;
        self.lanes
            .iter()
            .zip(wanted)
            .all(|(lane, wanted)| wanted == 0 || lane.state.lock().parked.space() + wanted <= limit)
    }

    /// A record at `place` or before it no longer stands for `range`: it was marked bad.
    pub(crate) fn forget_parked_up_to(&self, state: &mut LaneState, range: ByteRange, place: Place) {
        if !state.parked.is_empty() {
            state.parked.forget_where(range, |parked| self.place_of(parked.location) <= place);
        }
    }
}
