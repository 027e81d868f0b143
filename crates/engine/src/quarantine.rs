//! Damage: found once, never returned, never written back, never forgotten, healed by an overwrite.
//!
//! A quarantine is a record of its own. It names the sequence number of the record that it marks bad and has effect
//! at that record's place in the history: what is newer is not covered by it.
//!
//! Always true here: damage that is noted is not noted again, so a batch that is tried again and again takes no space by it.

use crate::{
    Cache, Environment,
    index::{Found, Location, NONE, blocks},
    lane::LaneState,
    notes,
    overlay::{Damage, Meaning, Place},
    pool::Asker,
    rare,
    read::Source,
    replay::Lost,
    status::LISTED_MAX,
};
use alloc::{string::String, vec, vec::Vec};
use cbd_format::record::{Record, RecordKind};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, CHUNK, Error, LaneId, MutationPoint, SECTOR};
use core::sync::atomic::Ordering;

/// What reads and writeback found.
#[derive(Default)]
pub(crate) struct DamageLog {
    /// Damage that reads have met, with the record that held it.
    pub(crate) listed: Vec<(ByteRange, Location, String)>,
    /// Damaged records that reads and writeback have found since the cache was opened. A dirty one counts once, a clean one
    /// at each read that meets it.
    pub(crate) found: u64,
    /// The number of them that were clean, and were read from the backing device instead.
    pub(crate) healed: u64,
}

impl<E: Environment> Cache<E> {
    /// A read found damage and failed. Not inlined, as [`count_healed`](Self::count_healed).
    #[inline(never)]
    pub(crate) fn note_damage(&self, range: ByteRange, location: Location, error: &Error) {
        let mut log = self.damage.lock();
        if log.listed.iter().any(|(known, at, _)| *known == range && *at == location) {
            return;
        }
        // What no longer fits the list is counted when writeback finds it: each read would count it again.
        if log.listed.len() < LISTED_MAX {
            log.found += u64::from(!log.listed.iter().any(|(_, at, _)| *at == location));
            log.listed.push((range, location, error.line()));
        }
    }

    /// The damage that reads have met and that nothing has replaced since.
    pub(crate) fn damage_met(&self) -> Vec<(ByteRange, String)> {
        // The list stays complete meanwhile: a read and another status may use it at the same time. A lane's lock is not
        // taken under the list's.
        let listed: Vec<(ByteRange, Location)> =
            self.damage.lock().listed.iter().map(|(range, location, _)| (*range, *location)).collect();
        let is_replaced = |(range, location): &(ByteRange, Location)| {
            !range.split_at_multiples(CHUNK).any(|piece| {
                let mut is_there = false;
                let state = self.lane(piece.start).state.lock();
                self.look_up(&state, piece, &mut |_, source| is_there |= source == Source::Record(*location));
                is_there
            })
        };
        let replaced: Vec<(ByteRange, Location)> = listed.into_iter().filter(is_replaced).collect();
        let mut log = self.damage.lock();
        log.listed.retain(|(range, location, _)| !replaced.contains(&(*range, *location)));
        log.listed.iter().map(|(range, _, reason)| (*range, reason.clone())).collect()
    }

    /// Makes damage of `range`, which the record `sequence` at `place` held, durable: from now on reads of it fail, as
    /// far as nothing newer covers it. `false` when there is no room for a record that `asker` may use, or the region takes no
    /// stores any more; nothing may be declared clean then. What was noted until then stays noted.
    pub(crate) fn quarantine(
        &self,
        id: LaneId,
        range: ByteRange,
        sequence: u64,
        place: Place,
        asker: Asker,
    ) -> bool {
        let lane = &self.lanes[id.index()];
        let mut state = lane.state.lock();
        self.announce(lane);
        self.count_damage(&state, range, place);
        state.overlay.insert(range, Meaning::Damaged, place);
        self.forget_parked_up_to(&mut state, range, place);
        if MutationPoint::QuarantineNewer.is_active() {
            self.heal_what_is_newer(&mut state, range, place);
        }
        if MutationPoint::QuarantineCancelsFills.is_active() {
            state.cancel_fills(range);
        }
        self.record_new_damage(&mut state, range, sequence, place, asker)
    }

    /// Counts damaged records that were clean. Not inlined: its frame would be one of the deepest chain of calls.
    #[inline(never)]
    pub(crate) fn count_healed(&self, healed: u64) {
        let mut log = self.damage.lock();
        log.found += healed;
        log.healed += healed;
    }

    /// Counts a damaged record, in whatever parts reads and retries of writeback find its damage.
    fn count_damage(&self, state: &LaneState, range: ByteRange, place: Place) {
        let start = range.start / CHUNK * CHUNK;
        let chunks = ByteRange { start, end: range.end.next_multiple_of(CHUNK) };
        if self.damage_in(state, chunks).any(|(_, damage)| damage.place == place) {
            return;
        }
        let mut log = self.damage.lock();
        if !log.listed.iter().any(|(_, at, _)| self.place_of(*at) == place) {
            log.found += 1;
        }
    }

    /// Notes what recovery has found lost and had no room to note. `false` as for [`quarantine`](Self::quarantine).
    pub(crate) fn note_lost(&self) -> bool {
        self.lanes.iter().all(|lane| {
            let mut state = lane.state.lock();
            // The last one first: it marks bad all that those before it do.
            while let Some(Lost { sequence, place }) = state.lost.last().copied() {
                self.announce(lane);
                let everything = ByteRange { start: 0, end: u64::MAX };
                if !self.record_new_damage(&mut state, everything, sequence, place, Asker::Essential) {
                    return false;
                }
                state.lost.pop();
            }
            true
        })
    }

    /// Notes again the damage of the segment `ordinal` of the lane and of those before it that no later segment notes: the
    /// segment is to be reclaimed. All that is left then is newer, so it is marked bad as older than that. Returns whether
    /// the tail will rely on a quarantine; `None` when there is no room, as for [`quarantine`](Self::quarantine).
    pub(crate) fn carry_damage(&self, id: LaneId, ordinal: u64) -> Option<bool> {
        let lane = &self.lanes[id.index()];
        let mut state = lane.state.lock();
        let goes = |damage: Damage| {
            damage.place.0 <= ordinal && MutationPoint::ReclaimCarryOnce.holds(damage.noted <= ordinal)
        };
        let mut relies = false;
        let mut left: Vec<ByteRange> = Vec::new();
        for (part, damage) in self.damage_of(&state) {
            relies |= damage.place.0 <= ordinal;
            match left.last_mut() {
                _ if !goes(damage) => {}
                Some(last) if last.end == part.start => last.end = part.end,
                _ => left.push(part),
            }
        }
        if left.is_empty() {
            return Some(relies);
        }
        self.announce(lane);
        self.record_damage(&mut state, &left, 0, Asker::Essential, goes).then_some(true)
    }

    /// Records the damage of `range` that the record `sequence` at `place` held and that no record notes yet. `false` as for
    /// [`quarantine`](Self::quarantine).
    fn record_new_damage(
        &self,
        state: &mut LaneState,
        range: ByteRange,
        sequence: u64,
        place: Place,
        asker: Asker,
    ) -> bool {
        let left: Vec<ByteRange> = self
            .damage_in(state, range)
            .filter(|(_, damage)| {
                damage.place == place && MutationPoint::QuarantineOnlyNew.holds(damage.noted == 0)
            })
            .map(|(part, _)| part)
            .collect();
        // What is noted already stays with its own record: this one may span it without naming it.
        let is_new = |damage: Damage| {
            damage.place == place && MutationPoint::QuarantineKeepsNote.holds(damage.noted == 0)
        };
        self.record_damage(state, &left, sequence, asker, is_new)
    }

    /// Records that `left`, in order, is damaged by what the sequence number marks bad. `which` selects that damage in the
    /// overlay.
    fn record_damage(
        &self,
        state: &mut LaneState,
        left: &[ByteRange],
        sequence: u64,
        asker: Asker,
        which: impl Fn(Damage) -> bool,
    ) -> bool {
        // All of it finds room in the one segment that is kept back for each lane, beside what is parked.
        for note in notes::of(left, self.shape().slots_max() / 4) {
            if self.region().check_stores(MutationPoint::RecordAfterFailure).is_err()
                || !self.make_room(state, note.slots(), 0, asker, None)
            {
                return false;
            }
            let mut record = Record::new(RecordKind::Quarantine, note.range);
            record.reference = sequence.into();
            let (location, stored) = self.append_quarantine(state, record, &note.map);
            self.region().fence(MutationPoint::QuarantineFence, stored);
            let (ordinal, _) = self.place_of(location);
            state.overlay.note(note.range, ordinal, &which);
            rare::count(&self.rare.quarantine_records);
        }
        true
    }

    /// What a quarantine marks bad: the sectors of its map, or all of its range if it has none or a line of it is lost.
    pub(crate) fn marked_bad_by(&self, location: Location, record: &Record) -> Vec<ByteRange> {
        match self.load_map(location, record) {
            Ok(map) if !map.is_empty() => notes::parts_of(record.range(), &map),
            _ => vec![record.range()],
        }
    }

    /// The damage of a lane, with its place, where it has any of the lane's own chunks: what a lane has lost may have been
    /// anywhere on the device, but others' chunks are none of its business.
    pub(crate) fn damage_of<'a>(
        &'a self,
        state: &'a LaneState,
    ) -> impl Iterator<Item = (ByteRange, Damage)> + 'a {
        let map = self.identity().lanes;
        state.overlay.damaged().filter(move |(range, _)| {
            MutationPoint::DamageOwnChunks.holds(map.of_lane(state.id, *range).next().is_some())
        })
    }

    /// The same for a part of the device.
    fn damage_in<'a>(
        &'a self,
        state: &'a LaneState,
        range: ByteRange,
    ) -> impl Iterator<Item = (ByteRange, Damage)> + 'a {
        let map = self.identity().lanes;
        state.overlay.damaged_in(range).filter(move |(range, _)| {
            MutationPoint::DamageOwnChunks.holds(map.of_lane(state.id, *range).next().is_some())
        })
    }

    /// Whether anything is quarantined that nothing has healed.
    pub(crate) fn has_damage(&self) -> bool {
        self.lanes.iter().any(|lane| self.damage_of(&lane.state.lock()).next().is_some())
    }

    /// Bytes that are quarantined and that nothing has healed. What clients wrote there last is nowhere, so the backing device is
    /// not complete without them, however far it is drained.
    pub fn quarantined_bytes(&self) -> u64 {
        if !MutationPoint::DrainQuarantined.is_active() {
            return 0;
        }
        let map = self.identity().lanes;
        let of_lane = |lane: &crate::lane::Lane<E>| {
            let state = lane.state.lock();
            let damaged = state.overlay.damaged();
            damaged.map(|(range, _)| map.bytes_of(state.id, range)).sum::<u64>()
        };
        self.lanes.iter().map(of_lane).sum()
    }

    /// Takes out of the damage what records behind `place` have overwritten.
    fn heal_what_is_newer(&self, state: &mut LaneState, range: ByteRange, place: Place) {
        let map = self.identity().lanes;
        let mut newer = Vec::new();
        let mut look = |base: u64, found: Found<'_>| {
            let is_newer = |at: &Location| *at != NONE && self.place_of(*at) > place;
            match found {
                Found::Whole(at) if is_newer(&at) => newer.push(ByteRange::at(base, CHECKSUM_BLOCK)),
                Found::Whole(_) => {}
                Found::Parts(parts) => newer.extend(
                    (0u64..)
                        .zip(parts)
                        .filter(|(_, at)| is_newer(at))
                        .map(|(part, _)| ByteRange::at(base + part * SECTOR, SECTOR)),
                ),
            }
        };
        if range.len() <= CHUNK {
            for (block, _, _) in blocks(range) {
                let base = block * CHECKSUM_BLOCK;
                if let Some(found) = state.index.get(map.key(base)) {
                    look(base, found);
                }
            }
        } else {
            state.index.iter().for_each(|(key, found)| look(map.offset_of(state.id, key), found));
        }
        for part in newer {
            if let Some(part) = part.intersection(&range) {
                state.overlay.heal_at(part, place);
            }
        }
    }

    /// The place of a record in the history of its lane.
    pub(crate) fn place_of(&self, location: Location) -> Place {
        (self.segments[location.segment as usize].ordinal.load(Ordering::Relaxed), location.slot)
    }
}
