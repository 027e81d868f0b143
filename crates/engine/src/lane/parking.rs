//! Parked ranges: dirty data that the backing device refuses stays in the cache while everything else continues.
//!
//! A parked range is a record of its own that holds the data. It is not part of the order in which *drained* advances: it stays
//! dirty when drained passes its epoch, as a quarantine stays damage.
//!
//! Invariants:
//! - only the newest content of a range is parked, and any later write, zeroing or quarantine of the range ends it; so parked
//!   data never covers newer data, neither in reads nor on the backing device;
//! - the record is durable before *drained* passes the record that it stands for, and it is carried forward, durably, before
//!   its segment is reclaimed;
//! - the parked ranges of a lane take at most a quarter of a segment, so that one segment holds all of them when they
//!   are carried (`base::pool`).
//!
//! Elsewhere: which ranges are parked, and their retries (`worker::writeback`).

use super::{LaneState, Source, overlay::Meaning};
use crate::{
    Environment,
    base::{Base, Damage, Requester},
    position::{Location, Place},
    rangemap::RangeMap,
};
use alloc::vec::Vec;
use cbd_format::{Record, RecordKind, SegmentShape};
use cbd_types::{ByteRange, MutationPoint};

/// Bytes that a record takes with its mirror.
const RECORD_BYTES: u64 = 128;

/// The record that stands for a parked range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Parked {
    /// Location of the record, and its sequence number.
    pub location: Location,
    pub sequence: u64,
    /// The range reads as zeroes: the record has no data.
    pub zeroes: bool,
}

impl Parked {
    pub(crate) fn is(&self, what: Refused) -> bool {
        match what {
            Refused::Data(location) => !self.zeroes && self.location == location,
            Refused::Zeroes => self.zeroes,
        }
    }
}

/// The parked ranges of one lane.
#[derive(Default)]
pub(super) struct Parking {
    ranges: RangeMap<Parked>,
}

impl Parking {
    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Reserves memory for one change of `range`. `None` if there is none.
    pub(super) fn reserve(&mut self, range: ByteRange) -> Option<()> {
        self.ranges.reserve(range)
    }

    pub(super) fn insert(&mut self, range: ByteRange, parked: Parked) {
        self.ranges.insert(range, parked, |_| false);
    }

    /// Removes `range`, which newer content covers.
    pub(super) fn forget(&mut self, range: ByteRange) {
        self.ranges.remove(range, |_| true);
    }

    fn forget_where(&mut self, range: ByteRange, goes: impl Fn(&Parked) -> bool) {
        self.ranges.remove(range, goes);
    }

    /// Parts of `range` that are parked.
    pub(super) fn touching(&self, range: ByteRange) -> impl Iterator<Item = (ByteRange, Parked)> + '_ {
        self.ranges.touching(range)
    }

    /// Whether the record at `location` stands for a parked part of `range`.
    pub(super) fn holds(&self, range: ByteRange, location: Location) -> bool {
        self.touching(range).any(|(_, parked)| parked.location == location)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ByteRange, Parked)> + '_ {
        self.ranges.iter()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.iter().map(|(range, _)| range.len()).sum()
    }

    /// Bytes of a segment that carrying all ranges takes.
    fn space(&self) -> u64 {
        self.iter().map(|(range, parked)| space_of(range, parked.zeroes)).sum()
    }
}

/// Bytes of a segment that a parked range takes.
const fn space_of(range: ByteRange, zeroes: bool) -> u64 {
    RECORD_BYTES + if zeroes { 0 } else { SegmentShape::data_bytes(range.len()) }
}

/// The content that is to be parked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    /// The data of the record at this location.
    Data(Location),
    /// Zeroes.
    Zeroes,
}

/// The outcome of parking a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// The range is parked, durably, except where newer content covers it.
    Done,
    /// There is no space for the record.
    NoSpace,
    /// The data is damaged.
    Damaged,
}

impl LaneState {
    /// Parks the parts of `range` whose newest content is still what the backing device refused. The caller has set the lane's
    /// touched bit. Calls `parked` for each range that is parked.
    pub(crate) fn park<E: Environment>(
        &mut self,
        base: &Base<E>,
        range: ByteRange,
        refused: Refused,
        requester: Requester,
        parked: impl Fn(),
    ) -> Outcome {
        for part in self.still_refused(base, range, refused) {
            let outcome = match refused {
                Refused::Zeroes => self.append_parked_zeroes(base, part, requester),
                Refused::Data(location) => match self.append_parked(base, part, location, requester) {
                    Ok(outcome) => outcome,
                    Err(_) => Outcome::Damaged,
                },
            };
            if outcome != Outcome::Done {
                return outcome;
            }
            parked();
        }
        Outcome::Done
    }

    /// Bytes of a segment that [`park`](Self::park) of `range` takes.
    pub(crate) fn space_to_park<E: Environment>(
        &self,
        base: &Base<E>,
        range: ByteRange,
        refused: Refused,
    ) -> u64 {
        let parts = self.still_refused(base, range, refused);
        parts.into_iter().map(|part| space_of(part, refused == Refused::Zeroes)).sum()
    }

    /// The parts of `range` whose newest content is what the backing device refused, and which are not parked yet.
    fn still_refused<E: Environment>(
        &self,
        base: &Base<E>,
        range: ByteRange,
        refused: Refused,
    ) -> Vec<ByteRange> {
        let mut newest = Vec::new();
        self.look_up(base, range, &mut |part, source| {
            let is_newest = match refused {
                Refused::Data(location) => source == Source::Record(location),
                Refused::Zeroes => source == Source::Zeroes,
            };
            if is_newest {
                newest.push(part);
            }
        });
        if refused == Refused::Zeroes {
            // A retried batch finds zeroes that are parked already: a lookup cannot tell them from the zeroes of the batch.
            let mut others = RangeMap::default();
            newest.iter().for_each(|part| others.insert(*part, (), |()| false));
            for (part, _) in self.parked.touching(range).filter(|(_, parked)| parked.zeroes) {
                others.remove(part, |()| true);
            }
            newest = others.iter().map(|(part, ())| part).collect();
        }
        newest
    }

    /// Appends what is still `parked` of `piece`, which lies in one checksum block, again at the head of the log. The caller
    /// has set the lane's touched bit.
    ///
    /// # Errors
    /// Damage of the data; `None` if there is no space.
    pub(crate) fn carry_parked<E: Environment>(
        &mut self,
        base: &Base<E>,
        piece: ByteRange,
        parked: Parked,
    ) -> Result<(), Option<Damage>> {
        // A client may have written it in the meantime.
        let still: Vec<_> = self.parked.touching(piece).filter(|(_, now)| *now == parked).collect();
        still.into_iter().try_for_each(|(part, _)| match parked.zeroes {
            true => match self.append_parked_zeroes(base, part, Requester::Essential) {
                Outcome::NoSpace => Err(None),
                _ => Ok(()),
            },
            false => match self.append_parked(base, part, parked.location, Requester::Essential) {
                Ok(Outcome::NoSpace) => Err(None),
                Ok(_) => Ok(()),
                Err(damage) => Err(Some(damage)),
            },
        })
    }

    /// Appends the data of the record at `location` as a parked write.
    fn append_parked<E: Environment>(
        &mut self,
        base: &Base<E>,
        range: ByteRange,
        location: Location,
        requester: Requester,
    ) -> Result<Outcome, Damage> {
        let record = base.load_record(location).map_err(|error| Damage { range, error })?;
        let mut data = Vec::new();
        if data.try_reserve_exact(range.len() as usize).is_err() {
            return Ok(Outcome::NoSpace);
        }
        data.resize(range.len() as usize, 0);
        base.load_data(location, &record, range, &mut data)?;
        let kind = RecordKind::ParkedWrite;
        let committed = self.commit::<E, 2>(base, kind.into(), range, &data, requester, None);
        Ok(if committed.is_ok() { Outcome::Done } else { Outcome::NoSpace })
    }

    fn append_parked_zeroes<E: Environment>(
        &mut self,
        base: &Base<E>,
        range: ByteRange,
        requester: Requester,
    ) -> Outcome {
        if self.make_room(base, 1, 0, requester, None).is_err() {
            return Outcome::NoSpace;
        }
        let (location, stored) = self.append(base, Record::new(RecordKind::ParkedZeroes, range), &[]);
        self.overlay.insert(range, Meaning::Zeroes, base.place_of(location));
        self.parked.insert(range, Parked { location, sequence: self.next_sequence - 1, zeroes: true });
        self.cancel_fills(range);
        base.region().fence(MutationPoint::ParkedFence, stored);
        Outcome::Done
    }

    /// Ends the parking of `range`: the backing device has written and flushed it.
    pub(crate) fn unpark(&mut self, range: ByteRange, taken: Refused) {
        self.parked.forget_where(range, |now| now.is(taken));
    }

    /// Whether anything is parked.
    pub(crate) fn has_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// The parked ranges, in order.
    pub(crate) fn parked_ranges(&self) -> impl Iterator<Item = (ByteRange, Parked)> + '_ {
        self.parked.iter()
    }

    /// The parked parts of `range`.
    pub(crate) fn parked_in(&self, range: ByteRange) -> impl Iterator<Item = (ByteRange, Parked)> + '_ {
        self.parked.touching(range)
    }

    /// Whether the record at `location` stands for a parked part of `range`.
    pub(crate) fn is_parked_at(&self, range: ByteRange, location: Location) -> bool {
        self.parked.holds(range, location)
    }

    /// Bytes that are parked.
    pub(crate) fn parked_bytes(&self) -> u64 {
        self.parked.bytes()
    }

    /// Bytes of a segment that carrying all parked ranges takes.
    pub(crate) fn parked_space(&self) -> u64 {
        self.parked.space()
    }

    /// Removes what records at `place` or before it have parked in `range`: it was marked bad.
    pub(super) fn forget_parked_up_to<E: Environment>(
        &mut self,
        base: &Base<E>,
        range: ByteRange,
        place: Place,
    ) {
        if !self.parked.is_empty() {
            self.parked.forget_where(range, |parked| base.place_of(parked.location) <= place);
        }
    }
}

#[cfg(test)]
mod tests;
