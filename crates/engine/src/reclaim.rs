//! Reclaim: the oldest segment of a lane, once the backing device has all of it, goes back to the pool.
//!
//! Always true here:
//! - records leave the index in the order of the log, so what an older record held is never seen again;
//! - the new tail is durable before the segment returns to the pool, so a reclaimed newer record can never uncover an
//!   older one;
//! - a lane's lock is held for a bounded number of records.

use crate::{
    Cache, Environment,
    index::{Found, Location, PARTS, blocks},
    lane::{LaneState, LogSegment},
    pool::Asker,
};
use alloc::vec::Vec;
use cbd_format::{LaneTail, Record, RecordKind};
use cbd_types::{AlignedBuffer, ByteRange, CHECKSUM_BLOCK, LaneId};

/// Records that leave the index in one hold of the lane's lock.
const RECORDS_PER_HOLD: usize = 32;

struct Victim {
    lane: LaneId,
    segment: LogSegment,
    slot: u32,
    /// Bytes that may still be given a second chance.
    second_chance: u64,
}

/// The state of reclaim; the maintainer's thread owns it.
#[derive(Default)]
pub(crate) struct Reclaim {
    victim: Option<Victim>,
    scratch: AlignedBuffer,
}

impl Reclaim {
    /// One bounded step. `false` when there is nothing to reclaim.
    pub(crate) fn step<E: Environment>(&mut self, cache: &Cache<E>) -> bool {
        let Some(victim) = &mut self.victim else {
            self.victim = (cache.is_above_gc() || cache.pool.has_waiters()).then(|| choose(cache)).flatten();
            return self.victim.is_some();
        };
        if victim.slot < victim.segment.slots {
            victim.take_out_some(cache, &mut self.scratch);
            return true;
        }
        if let Some(victim) = self.victim.take() {
            victim.give_back(cache);
        }
        true
    }
}

/// The clean segment at a tail that was begun in the oldest epoch.
fn choose<E: Environment>(cache: &Cache<E>) -> Option<Victim> {
    let drained = cache.drained_epoch().0;
    let mut best: Option<(usize, Victim)> = None;
    for (number, lane) in cache.lanes.iter().enumerate() {
        let state = lane.state.lock();
        let Some(tail) = state.sealed.front() else { continue };
        if tail.last_dirty_epoch > drained {
            continue;
        }
        // The last segment proves how far the sequence numbers go until a mark does.
        if state.sealed.len() == 1 && state.open.is_none() && lane.is_touched() {
            continue;
        }
        // The lane with the longest log gives first: it has the oldest data for its share of the traffic.
        if best.as_ref().is_none_or(|(length, _)| state.sealed.len() > *length) {
            best = Some((
                state.sealed.len(),
                Victim {
                    lane: LaneId(number as u32),
                    segment: *tail,
                    slot: 0,
                    second_chance: cache.shape().size / 2,
                },
            ));
        }
    }
    best.map(|(_, victim)| victim)
}

impl Victim {
    fn take_out_some<E: Environment>(&mut self, cache: &Cache<E>, scratch: &mut AlignedBuffer) {
        // The segment is clean and not in the pool, so its records can be read without the lock.
        let mut records: Vec<(Location, Record)> = Vec::with_capacity(RECORDS_PER_HOLD);
        while self.slot < self.segment.slots && records.len() < RECORDS_PER_HOLD {
            let location = Location { segment: self.segment.segment, slot: self.slot };
            match cache.load_record(location) {
                Ok(record) => {
                    self.slot += record.slots();
                    records.push((location, record));
                }
                // Its range is unknown; a quarantine says so. Its nodes in the index lead to an error.
                Err(_) => self.slot += 1,
            }
        }
        let mut chances = Vec::new();
        {
            let state = cache.lanes[self.lane.index()].state.lock();
            for (location, record) in &records {
                if record.kind().has_data() && self.second_chance > 0 && !cache.pool.has_waiters() {
                    self.note_chances(cache, &state, *location, record, &mut chances);
                }
            }
        }
        // What was read lately is appended again before it is taken out: it is always found.
        for (location, record, block) in chances {
            if !self.append_again(cache, location, &record, block, scratch) {
                self.second_chance = 0;
                break;
            }
        }
        let mut state = cache.lanes[self.lane.index()].state.lock();
        for (location, record) in &records {
            self.take_out(cache, &mut state, *location, record);
        }
    }

    /// Whole blocks of the record that were read since and that it still holds.
    fn note_chances<E: Environment>(
        &mut self,
        cache: &Cache<E>,
        state: &LaneState,
        location: Location,
        record: &Record,
        chances: &mut Vec<(Location, Record, ByteRange)>,
    ) {
        for (block, first, end) in blocks(record.range()) {
            let range = ByteRange::at(block * CHECKSUM_BLOCK, CHECKSUM_BLOCK);
            let key = cache.identity.lanes.key(range.start);
            if (first, end) == (0, PARTS)
                && self.second_chance >= CHECKSUM_BLOCK
                && is_current(cache, state, range, location)
                && state.index.was_read(key)
            {
                self.second_chance -= CHECKSUM_BLOCK;
                chances.push((location, *record, range));
            }
        }
    }

    fn append_again<E: Environment>(
        &self,
        cache: &Cache<E>,
        location: Location,
        record: &Record,
        block: ByteRange,
        scratch: &mut AlignedBuffer,
    ) -> bool {
        scratch.resize(CHECKSUM_BLOCK as usize);
        if cache.load_data(location, record, block, scratch).is_err() {
            // Clean data that is damaged: the backing device has it.
            return true;
        }
        let lane = &cache.lanes[self.lane.index()];
        let mut state = lane.state.lock();
        cache.announce(lane);
        // It may have been overwritten while it was copied.
        if !is_current(cache, &state, block, location) {
            return true;
        }
        cache
            .commit_locked::<2>(&mut state, RecordKind::Fill, block, scratch, Asker::Optional, None)
            .is_some()
    }

    fn take_out<E: Environment>(
        &self,
        cache: &Cache<E>,
        state: &mut LaneState,
        location: Location,
        record: &Record,
    ) {
        let range = record.range();
        match record.kind() {
            RecordKind::Write | RecordKind::Fill => {
                for (block, _, _) in blocks(range) {
                    state.index.remove_at(cache.identity.lanes.key(block * CHECKSUM_BLOCK), location);
                }
            }
            RecordKind::WriteZeroes | RecordKind::Discard => {
                state.overlay.forget_zeroes(range, (self.segment.ordinal, location.slot));
            }
            // Carried forward in `give_back`, when all of the segment has been seen.
            RecordKind::Quarantine => {}
        }
    }

    fn give_back<E: Environment>(self, cache: &Cache<E>) {
        if !self.carry_quarantines(cache) {
            // No space for them now: the segment stays, and is tried again.
            return;
        }
        // 1. The new tail is durable.
        {
            let mut tails = cache.tails.lock();
            let stored = tails[self.lane.index()].store(
                cache.region(),
                LaneTail {
                    ordinal: (self.segment.ordinal + 1).into(),
                    ownership: cache.identity.ownership.into(),
                    reserved: [0; 32],
                },
            );
            cache.region().fence(stored);
        }
        // 2. The segment leaves the lane, and goes to the pool when its last reader is done.
        cache.lanes[self.lane.index()].state.lock().sealed.pop_front();
        cache.retire(self.segment.segment);
    }

    /// What is still damaged of the victim's quarantines is recorded again at the head. `false` when there is no space.
    fn carry_quarantines<E: Environment>(&self, cache: &Cache<E>) -> bool {
        let mut slot = 0;
        while slot < self.segment.slots {
            let Ok(record) = cache.load_record(Location { segment: self.segment.segment, slot }) else {
                slot += 1;
                continue;
            };
            slot += record.slots();
            if record.kind() != RecordKind::Quarantine {
                continue;
            }
            let damaged: Vec<_> = {
                let state = cache.lanes[self.lane.index()].state.lock();
                state
                    .overlay
                    .damaged()
                    .filter_map(|(range, place)| Some((range.intersection(&record.range())?, place)))
                    .collect()
            };
            for (range, place) in damaged {
                if !cache.quarantine(self.lane, range, record.reference.get(), place) {
                    return false;
                }
            }
        }
        true
    }
}

/// Whether all of a block is at `location`, and nothing was zeroed or damaged since.
fn is_current<E: Environment>(
    cache: &Cache<E>,
    state: &LaneState,
    block: ByteRange,
    location: Location,
) -> bool {
    state.index.get(cache.identity.lanes.key(block.start)) == Some(Found::Whole(location))
        && (state.overlay.is_empty()
            || state.overlay.later_than(block, Some(cache.place_of(location))).next().is_none())
}
