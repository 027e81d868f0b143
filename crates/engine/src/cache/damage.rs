//! Damage: found once, never returned, never written back, never forgotten, healed by an overwrite.
//!
//! Invariants: each damaged dirty record is counted once.
//!
//! Elsewhere: the quarantine of a lane (`lane::damage`).

use super::{Cache, status::LISTED_MAX};
use crate::{
    Environment, Mutex,
    base::Asker,
    lane::Source,
    position::{Location, Place},
};
use alloc::{string::String, vec::Vec};
use cbd_types::{ByteRange, CHUNK, Error, LaneId};

/// What reads and writeback have found.
#[derive(Default)]
struct Found {
    /// Damage that reads have met, with the record that held it.
    listed: Vec<(ByteRange, Location, String)>,
    /// Damaged records that reads and writeback have found since the cache was opened. A dirty one counts once, a clean one
    /// at each read that meets it.
    found: u64,
    /// The number of them that were clean, and were read from the backing device instead.
    healed: u64,
}

/// The list and the figures of damage.
pub(crate) struct DamageLog<E: Environment>(Mutex<E, Found>);

impl<E: Environment> DamageLog<E> {
    pub(super) fn new() -> Self {
        Self(Mutex::<E, _>::new(Found::default()))
    }

    /// Damaged records found, and the number of them that were clean.
    pub(super) fn counted(&self) -> (u64, u64) {
        let log = self.0.lock();
        (log.found, log.healed)
    }

    /// Counts damaged records that were clean. Not inlined: its frame would be one of the deepest chain of calls.
    #[inline(never)]
    pub(super) fn count_healed(&self, healed: u64) {
        let mut log = self.0.lock();
        log.found += healed;
        log.healed += healed;
    }

    /// A read found damage and failed. Not inlined, as [`count_healed`](Self::count_healed).
    #[inline(never)]
    pub(super) fn note(&self, range: ByteRange, location: Location, error: &Error) {
        let mut log = self.0.lock();
        if log.listed.iter().any(|(known, at, _)| *known == range && *at == location) {
            return;
        }
        // What no longer fits the list is counted when writeback finds it: each read would count it again.
        if log.listed.len() < LISTED_MAX {
            log.found += u64::from(!log.listed.iter().any(|(_, at, _)| *at == location));
            log.listed.push((range, location, error.line()));
        }
    }

    /// Counts a damaged record, unless a read has met it, which `is_it` tells by its location.
    fn count_once(&self, is_it: impl Fn(Location) -> bool) {
        let mut log = self.0.lock();
        if !log.listed.iter().any(|(_, at, _)| is_it(*at)) {
            log.found += 1;
        }
    }

    fn listed(&self) -> Vec<(ByteRange, Location)> {
        self.0.lock().listed.iter().map(|(range, location, _)| (*range, *location)).collect()
    }

    /// Removes `replaced` from the list, and returns what is left.
    fn retain(&self, replaced: &[(ByteRange, Location)]) -> Vec<(ByteRange, String)> {
        let mut log = self.0.lock();
        log.listed.retain(|(range, location, _)| !replaced.contains(&(*range, *location)));
        log.listed.iter().map(|(range, _, reason)| (*range, reason.clone())).collect()
    }
}

impl<E: Environment> Cache<E> {
    /// The damage that reads have met and that nothing has replaced since.
    pub(crate) fn damage_met(&self) -> Vec<(ByteRange, String)> {
        // The list stays complete meanwhile: a read and another status may use it at the same time. A lane's lock is not
        // taken under the list's.
        let is_replaced = |(range, location): &(ByteRange, Location)| {
            !range.split_at_multiples(CHUNK).any(|piece| {
                let mut is_there = false;
                let state = self.lane_of(piece.start).lock();
                state.look_up(self.base(), piece, &mut |_, source| {
                    is_there |= source == Source::Record(*location);
                });
                is_there
            })
        };
        let replaced: Vec<_> = self.damage_log().listed().into_iter().filter(is_replaced).collect();
        self.damage_log().retain(&replaced)
    }

    /// Makes damage of `range`, which the record `sequence` at `place` held, durable; see
    /// [`LaneState::quarantine`](crate::lane::LaneState::quarantine).
    pub(crate) fn quarantine(
        &self,
        id: LaneId,
        range: ByteRange,
        sequence: u64,
        place: Place,
        asker: Asker,
    ) -> bool {
        let (base, lane) = (self.base(), self.lane(id));
        let mut state = lane.lock();
        lane.announce(base);
        // Counted once, in whatever parts reads and retries of writeback find its damage.
        if !state.knows_damage(base, range, place) {
            self.damage_log().count_once(|at| base.place_of(at) == place);
        }
        state.quarantine(base, range, sequence, place, asker)
    }

    /// Notes what recovery has found lost and had no room to note. `false` as for [`quarantine`](Self::quarantine).
    pub(crate) fn note_lost(&self) -> bool {
        self.lanes().iter().all(|lane| {
            let mut state = lane.lock();
            while state.has_lost() {
                lane.announce(self.base());
                if !state.note_last_lost(self.base()) {
                    return false;
                }
            }
            true
        })
    }

    /// Notes again the damage of the segment `ordinal` of the lane and of those before it that no later segment notes: the
    /// segment is to be reclaimed. Returns whether the tail will rely on a quarantine; `None` when there is no room, as for
    /// [`quarantine`](Self::quarantine).
    pub(crate) fn carry_damage(&self, id: LaneId, ordinal: u64) -> Option<bool> {
        let (base, lane) = (self.base(), self.lane(id));
        let mut state = lane.lock();
        let (left, relies) = state.damage_to_carry(base, ordinal);
        if left.is_empty() {
            return Some(relies);
        }
        lane.announce(base);
        state.carry_damage(base, &left, ordinal).then_some(true)
    }

    /// Whether anything is quarantined that nothing has healed.
    pub(crate) fn has_damage(&self) -> bool {
        self.lanes().iter().any(|lane| lane.lock().has_damage(self.base()))
    }

    /// Bytes that are quarantined and that nothing has healed. No copy of what clients wrote there last exists, so the backing device
    /// is not complete without them, however far it is drained.
    pub fn quarantined_bytes(&self) -> u64 {
        self.lanes().iter().map(|lane| lane.lock().quarantined_bytes(self.base())).sum()
    }
}
