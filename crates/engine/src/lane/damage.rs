//! Damage of a lane: quarantined, carried by reclaim, healed by an overwrite.
//!
//! A quarantine is a record of its own. It names the sequence number of the record that it marks bad and takes effect at that
//! record's position in the history: it does not cover newer data.
//!
//! Invariants: damage that is noted is not noted again, so a batch that is retried takes no space for it.

use super::{
    LaneState, blocks,
    index::Found,
    notes,
    overlay::{Damage, Meaning},
    replay::Lost,
};
use crate::{
    Environment,
    base::{Base, Requester},
    position::{Location, NONE, Place},
    rare,
};
use alloc::{vec, vec::Vec};
use cbd_format::record::{Record, RecordKind};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, CHUNK, MutationPoint, SECTOR};

impl LaneState {
    /// Notes damage of `range`, which the record `sequence` at `place` held, durably: from now on reads of it fail, except
    /// where newer data covers it. The caller has set the lane's touched bit. `false` if there is no room for a record that
    /// `requester` may use, or the region takes no stores any more; the caller must declare nothing clean then. Damage noted up to
    /// that point stays noted.
    pub(crate) fn quarantine<E: Environment>(
        &mut self,
        base: &Base<E>,
        range: ByteRange,
        sequence: u64,
        place: Place,
        requester: Requester,
    ) -> bool {
        self.overlay.insert(range, Meaning::Damaged, place);
        self.forget_parked_up_to(base, range, place);
        self.heal_what_is_newer(base, range, place);
        self.cancel_fills(range);
        self.record_new_damage(base, range, sequence, place, requester)
    }

    /// Whether the overlay has damage of the record at `place` in the chunks of `range`.
    pub(crate) fn knows_damage<E: Environment>(
        &self,
        base: &Base<E>,
        range: ByteRange,
        place: Place,
    ) -> bool {
        let start = range.start / CHUNK * CHUNK;
        let chunks = ByteRange { start, end: range.end.next_multiple_of(CHUNK) };
        self.damage_in(base, chunks).any(|(_, damage)| damage.place == place)
    }

    /// Notes the last loss that recovery found and had no room to note. The caller has set the lane's touched bit. `false` as
    /// for [`quarantine`](Self::quarantine).
    pub(crate) fn note_last_lost<E: Environment>(&mut self, base: &Base<E>) -> bool {
        // Start with the last loss: it marks bad everything that the earlier ones do.
        let Some(Lost { sequence, place }) = self.lost.last().copied() else { return true };
        let everything = ByteRange { start: 0, end: u64::MAX };
        let is_noted = self.record_new_damage(base, everything, sequence, place, Requester::Essential);
        if is_noted {
            self.lost.pop();
        }
        is_noted
    }

    /// The damage of the segment `ordinal` and of earlier segments that no later segment notes, in order, and whether the tail
    /// will depend on a quarantine once that segment is reclaimed.
    pub(crate) fn damage_to_carry<E: Environment>(
        &self,
        base: &Base<E>,
        ordinal: u64,
    ) -> (Vec<ByteRange>, bool) {
        let mut relies = false;
        let mut left: Vec<ByteRange> = Vec::new();
        for (part, damage) in self.damage_of(base) {
            relies |= damage.place.0 <= ordinal;
            match left.last_mut() {
                _ if !goes_with(ordinal, damage) => {}
                Some(last) if last.end == part.start => last.end = part.end,
                _ => left.push(part),
            }
        }
        (left, relies)
    }

    /// Notes `left`, the [`damage_to_carry`](Self::damage_to_carry), again. Everything that remains when the segment is
    /// reclaimed is newer, so `left` is marked bad as older than all of that. The caller has set the lane's touched bit.
    /// `false` as for [`quarantine`](Self::quarantine).
    pub(crate) fn carry_damage<E: Environment>(
        &mut self,
        base: &Base<E>,
        left: &[ByteRange],
        ordinal: u64,
    ) -> bool {
        self.record_damage(base, left, 0, Requester::Essential, |damage| goes_with(ordinal, damage))
    }

    /// Records the damage of `range` that the record `sequence` at `place` held and that no record notes yet. `false` as for
    /// [`quarantine`](Self::quarantine).
    fn record_new_damage<E: Environment>(
        &mut self,
        base: &Base<E>,
        range: ByteRange,
        sequence: u64,
        place: Place,
        requester: Requester,
    ) -> bool {
        let left: Vec<ByteRange> = self
            .damage_in(base, range)
            .filter(|(_, damage)| damage.place == place && damage.noted == 0)
            .map(|(part, _)| part)
            .collect();
        // Damage that is already noted stays with its own record: the new record may span it without naming it.
        let is_new = |damage: Damage| damage.place == place && damage.noted == 0;
        self.record_damage(base, &left, sequence, requester, is_new)
    }

    /// Records that `left`, which is in order, is damage of the record with this sequence number. `which` selects that damage
    /// in the overlay.
    fn record_damage<E: Environment>(
        &mut self,
        base: &Base<E>,
        left: &[ByteRange],
        sequence: u64,
        requester: Requester,
        which: impl Fn(Damage) -> bool,
    ) -> bool {
        // All of it fits into one segment, beside the parked ranges: see `base::pool`.
        for note in notes::of(left, base.shape().slots_max() / 4) {
            if base.region().check_stores(MutationPoint::RecordAfterFailure).is_err()
                || self.make_room(base, note.slots(), 0, requester, None).is_err()
            {
                return false;
            }
            let mut record = Record::new(RecordKind::Quarantine, note.range);
            record.reference = sequence.into();
            let (location, stored) = self.append_quarantine(base, record, &note.map);
            base.region().fence(MutationPoint::QuarantineFence, stored);
            let (ordinal, _) = base.place_of(location);
            self.overlay.note(note.range, ordinal, &which);
            rare::count(&base.rare().quarantine_records);
        }
        true
    }

    /// The damaged ranges that contain any of the lane's own chunks. A loss of the lane may have been anywhere on the device,
    /// so a damaged range can also contain chunks of other lanes, which do not concern this lane.
    fn damage_of<'a, E: Environment>(
        &'a self,
        base: &'a Base<E>,
    ) -> impl Iterator<Item = (ByteRange, Damage)> + 'a {
        let map = base.identity().lanes;
        self.overlay.damaged().filter(move |(range, _)| map.of_lane(self.id, *range).next().is_some())
    }

    /// As [`damage_of`](Self::damage_of), for a part of the device.
    fn damage_in<'a, E: Environment>(
        &'a self,
        base: &'a Base<E>,
        range: ByteRange,
    ) -> impl Iterator<Item = (ByteRange, Damage)> + 'a {
        let map = base.identity().lanes;
        self.overlay.damaged_in(range).filter(move |(range, _)| map.of_lane(self.id, *range).next().is_some())
    }

    /// Whether any range is quarantined and not healed.
    pub(crate) fn has_damage<E: Environment>(&self, base: &Base<E>) -> bool {
        self.damage_of(base).next().is_some()
    }

    /// Bytes of the lane's own chunks that are quarantined and not healed.
    pub(crate) fn quarantined_bytes<E: Environment>(&self, base: &Base<E>) -> u64 {
        let map = base.identity().lanes;
        self.overlay.damaged().map(|(range, _)| map.bytes_of(self.id, range)).sum()
    }

    /// Removes from the damage what records after `place` have overwritten.
    fn heal_what_is_newer<E: Environment>(&mut self, base: &Base<E>, range: ByteRange, place: Place) {
        let map = base.identity().lanes;
        let mut newer = Vec::new();
        let mut look = |start: u64, found: Found<'_>| {
            let is_newer = |at: &Location| *at != NONE && base.place_of(*at) > place;
            match found {
                Found::Whole(at) if is_newer(&at) => newer.push(ByteRange::at(start, CHECKSUM_BLOCK)),
                Found::Whole(_) => {}
                Found::Parts(parts) => newer.extend(
                    (0u64..)
                        .zip(parts)
                        .filter(|(_, at)| is_newer(at))
                        .map(|(part, _)| ByteRange::at(start + part * SECTOR, SECTOR)),
                ),
            }
        };
        if range.len() <= CHUNK {
            for (block, _, _) in blocks(range) {
                let start = block * CHECKSUM_BLOCK;
                if let Some(found) = self.index.get(map.key(start)) {
                    look(start, found);
                }
            }
        } else {
            self.index.iter().for_each(|(key, found)| look(map.offset_of(self.id, key), found));
        }
        for part in newer {
            if let Some(part) = part.intersection(&range) {
                self.overlay.heal_at(part, place);
            }
        }
    }
}

/// The ranges that a quarantine marks bad: the sectors of its map, or all of its range if it has no map or a line of the map is
/// lost.
pub(super) fn marked_bad_by<E: Environment>(
    base: &Base<E>,
    location: Location,
    record: &Record,
) -> Vec<ByteRange> {
    match base.load_map(location, record) {
        Ok(map) if !map.is_empty() => notes::parts_of(record.range(), &map),
        _ => vec![record.range()],
    }
}

/// Whether the note of this damage is lost when the segment `ordinal` is reclaimed.
fn goes_with(ordinal: u64, damage: Damage) -> bool {
    damage.place.0 <= ordinal && damage.noted <= ordinal
}

#[cfg(test)]
mod tests;
