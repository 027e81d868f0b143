//! Damage: found once, never returned to a client, never written back, never forgotten, healed by an overwrite.
//!
//! Invariants: each damaged dirty record is counted once.
//!
//! Elsewhere: the quarantine of a lane (`lane::damage`).

use super::{Cache, status::LISTED_MAX};
use crate::{
    Environment, Mutex,
    base::Requester,
    lane::Source,
    position::{Location, Place},
};
use alloc::{string::String, vec::Vec};
use cbd_types::{ByteRange, Error, LaneId};

/// The damage that reads and writeback have found.
#[derive(Default)]
struct Found {
    /// Damage that reads have found, with the record that held it.
    listed: Vec<(ByteRange, Location, String)>,
    /// Damaged records that reads and writeback have found since the cache was opened. A dirty one counts once, a clean one at
    /// each read of it.
    found: u64,
    /// The number of them that were clean, and were read from the backing device instead.
    healed: u64,
}

/// The list and the counters of damage.
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

    /// Records damage that made a read fail. Not inlined, as [`count_healed`](Self::count_healed).
    #[inline(never)]
    pub(super) fn note(&self, range: ByteRange, location: Location, error: &Error) {
        let mut log = self.0.lock();
        if log.listed.iter().any(|(known, at, _)| *known == range && *at == location) {
            return;
        }
        // Damage that does not fit the list is counted when writeback finds it: otherwise each read would count it again.
        if log.listed.len() < LISTED_MAX {
            log.found += u64::from(!log.listed.iter().any(|(_, at, _)| *at == location));
            log.listed.push((range, location, error.line()));
        }
    }

    /// Counts a damaged record, unless a read has listed it, which `is_it` decides by its location.
    fn count_once(&self, is_it: impl Fn(Location) -> bool) {
        let mut log = self.0.lock();
        if !log.listed.iter().any(|(_, at, _)| is_it(*at)) {
            log.found += 1;
        }
    }

    fn listed(&self) -> Vec<(ByteRange, Location)> {
        self.0.lock().listed.iter().map(|(range, location, _)| (*range, *location)).collect()
    }

    /// Removes `replaced` from the list, and returns the remaining entries.
    fn retain(&self, replaced: &[(ByteRange, Location)]) -> Vec<(ByteRange, String)> {
        let mut log = self.0.lock();
        log.listed.retain(|(range, location, _)| !replaced.contains(&(*range, *location)));
        log.listed.iter().map(|(range, _, reason)| (*range, reason.clone())).collect()
    }
}

impl<E: Environment> Cache<E> {
    /// The damage that reads have found and that no write has replaced since.
    pub(crate) fn damage_met(&self) -> Vec<(ByteRange, String)> {
        // The list stays complete meanwhile: a read and another status request may use it at the same time. A lane's lock is not
        // taken under the lock of the list.
        let is_replaced = |(range, location): &(ByteRange, Location)| {
            // What a record holds lies in one chunk.
            let mut is_there = false;
            let state = self.lane_of(range.start).lock();
            state.look_up(self.base(), *range, &mut |_, source| {
                is_there |= source == Source::Record(*location);
            });
            !is_there
        };
        let replaced: Vec<_> = self.damage_log().listed().into_iter().filter(is_replaced).collect();
        self.damage_log().retain(&replaced)
    }

    /// Records durably that `range` of the record `sequence` at `place` is damaged; see
    /// [`LaneState::quarantine`](crate::lane::LaneState::quarantine).
    pub(crate) fn quarantine(
        &self,
        id: LaneId,
        range: ByteRange,
        sequence: u64,
        place: Place,
        requester: Requester,
    ) -> bool {
        let (base, lane) = (self.base(), self.lane(id));
        let mut state = lane.lock();
        lane.announce(base);
        // A record is counted once, even if reads and retries of writeback find its damage in several parts.
        if !state.knows_damage(base, range, place) {
            self.damage_log().count_once(|at| base.place_of(at) == place);
        }
        state.quarantine(base, range, sequence, place, requester)
    }

    /// Records losses that recovery found and had no space to record. Returns `false` as [`quarantine`](Self::quarantine) does.
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

    /// Records again the damage of the segment `ordinal` of the lane, and of earlier segments, that no later segment records: the
    /// segment is to be reclaimed. Returns whether the tail relies on a quarantine; `None` if there is no space, as for
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

    /// Whether a quarantined range exists that no overwrite has healed.
    pub(crate) fn has_damage(&self) -> bool {
        self.lanes().iter().any(|lane| lane.lock().has_damage(self.base()))
    }

    /// Bytes that are quarantined and that no overwrite has healed. No copy of the clients' last writes to them exists, so the
    /// backing device is not complete without them, even if everything is drained.
    pub fn quarantined_bytes(&self) -> u64 {
        self.lanes().iter().map(|lane| lane.lock().quarantined_bytes(self.base())).sum()
    }
}
