//! Reclaim: the oldest segment of a lane, once the backing device has all of it but what is noted as damaged, goes back to the pool.
//!
//! Always true here:
//! - records leave the index in the order of the log, so what an older record held is never seen again;
//! - what is parked is recorded again at the head, durably, before its record leaves the index;
//! - the new tail is durable before the segment returns to the pool, so a reclaimed newer record can never uncover an
//!   older one;
//! - a lane's lock is held for a bounded number of records.

use crate::{
    Cache, Environment,
    index::{Found, Location, PARTS, blocks},
    lane::{LaneState, LogSegment},
    parking::Parked,
    pool::Asker,
    rare,
    records::Records,
    slots::InBoth,
};
use alloc::{collections::BTreeSet, vec::Vec};
use cbd_format::{LaneTail, Record, RecordKind};
use cbd_types::{AlignedBuffer, ByteRange, CHECKSUM_BLOCK, LaneId, MutationPoint};

/// Records that leave the index in one hold of the lane's lock: so few that a writer who meets it waits about as long as for
/// another writer, and does not go to sleep. Between two holds the next records are read, so that the writer comes in.
const RECORDS_PER_HOLD: usize = 8;
/// Holds of the lane's lock in one step.
const HOLDS_PER_STEP: usize = 4;

struct Victim {
    lane: LaneId,
    segment: LogSegment,
    records: Records,
    slot: u32,
    /// Bytes that may still be given a second chance.
    second_chance: u64,
    /// Nothing that is parked is left in it.
    has_carried: bool,
    /// The tail will rely on a parked record or a quarantine at the head.
    needs_mark: bool,
}

/// The state of reclaim; the background worker's thread owns it.
#[derive(Default)]
pub(crate) struct Reclaim {
    victim: Option<Victim>,
    /// Lanes whose victim holds what found no space at the head, damage or parked data; left alone until a segment came back
    /// or something is parked no longer.
    stuck: BTreeSet<LaneId>,
    /// What [`ParkedCounters::unparked`](crate::parking::ParkedCounters::unparked) was then.
    unparked: u64,
    scratch: AlignedBuffer,
}

impl Reclaim {
    /// One bounded step. `false` when there is nothing to reclaim.
    pub(crate) fn step<E: Environment>(&mut self, cache: &Cache<E>) -> bool {
        let unparked = cache.parked_counters().unparked();
        if self.unparked != unparked {
            self.unparked = unparked;
            self.stuck.clear();
        }
        let Some(victim) = &mut self.victim else {
            self.victim = (cache.is_above_gc() || cache.pool.has_waiters())
                .then(|| choose(cache, &self.stuck))
                .flatten();
            return self.victim.is_some();
        };
        if !victim.has_carried && MutationPoint::ReclaimCarryParked.is_active() {
            if !MutationPoint::ReclaimStuck.holds(victim.carry_parked(cache)) {
                self.stuck.insert(victim.lane);
                self.victim = None;
            }
            return true;
        }
        if victim.slot < victim.segment.slots {
            for _ in 0..HOLDS_PER_STEP {
                if victim.slot < victim.segment.slots {
                    victim.take_out_some(cache, &mut self.scratch);
                }
            }
            return true;
        }
        if let Some(victim) = self.victim.take() {
            let lane = victim.lane;
            if victim.give_back(cache) {
                self.stuck.clear();
            } else {
                self.stuck.insert(lane);
            }
        }
        true
    }
}

/// The tail of the lane with the longest log among those whose tail is clean: it has the oldest data for its share of the traffic.
fn choose<E: Environment>(cache: &Cache<E>, stuck: &BTreeSet<LaneId>) -> Option<Victim> {
    let drained = cache.drained_epoch().0;
    // What is copied to the head makes no space: less of it while segments go faster than they come back.
    let quarters = if cache.is_reclaim_at_ease() { 3 } else { 2 };
    let mut best: Option<(usize, LaneId, LogSegment)> = None;
    for (number, lane) in cache.lanes.iter().enumerate() {
        let state = lane.state.lock();
        let Some(tail) = state.sealed.front() else { continue };
        if !MutationPoint::ReclaimClean.holds(tail.last_dirty_epoch <= drained || state.is_settled(tail))
            || stuck.contains(&LaneId(number as u32))
        {
            continue;
        }
        if best.as_ref().is_none_or(|(length, ..)| state.sealed.len() > *length) {
            best = Some((state.sealed.len(), LaneId(number as u32), *tail));
        }
    }
    best.map(|(_, lane, segment)| Victim {
        lane,
        segment,
        records: cache.records_of(segment.segment, segment.slots),
        slot: 0,
        second_chance: (cache.shape().data_top() - segment.data_low) / 4 * quarters,
        has_carried: false,
        needs_mark: false,
    })
}

impl Victim {
    /// Parked ranges whose records stand in the segment are recorded again at the head, before anything leaves the index.
    /// `false` when there is no space: the segment stays as it is.
    fn carry_parked<E: Environment>(&mut self, cache: &Cache<E>) -> bool {
        let parked: Vec<_> = {
            let state = cache.lanes[self.lane.index()].state.lock();
            let is_here = |(_, parked): &(_, Parked)| parked.location.segment == self.segment.segment;
            state.parked.iter().filter(is_here).take(RECORDS_PER_HOLD).collect()
        };
        self.has_carried = parked.is_empty();
        self.needs_mark |= !parked.is_empty() && MutationPoint::ParkedMark.is_active();
        parked.into_iter().all(|(range, parked)| cache.carry_parked(self.lane, range, parked))
    }

    fn take_out_some<E: Environment>(&mut self, cache: &Cache<E>, scratch: &mut AlignedBuffer) {
        // The segment is clean and not in the pool, so its records can be read without the lock.
        let mut records: Vec<(Location, Record)> = Vec::with_capacity(RECORDS_PER_HOLD);
        while self.slot < self.segment.slots && records.len() < RECORDS_PER_HOLD {
            let location = Location { segment: self.segment.segment, slot: self.slot };
            match cache.record_of(&mut self.records, self.slot) {
                Some(record) => {
                    self.slot += record.slots();
                    records.push((location, record));
                }
                None => return self.take_out_all(cache),
            }
        }
        let mut chances = Vec::new();
        let mut state = cache.lanes[self.lane.index()].state.lock();
        let keys = records.iter().map(|(_, record)| cache.identity().lanes.key(record.range().start));
        core::hint::black_box(state.index.touch_all(keys));
        for (location, record) in &records {
            if record.kind().has_data() && self.second_chance > 0 && !cache.pool.has_waiters() {
                self.note_chances(cache, &state, *location, record, &mut chances);
            }
        }
        if chances.is_empty() {
            for (location, record) in &records {
                self.take_out(cache, &mut state, *location, record);
            }
            return;
        }
        drop(state);
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

    /// A record cannot be read, so its range is not known: everything that the lane has of this segment goes at once, in one
    /// hold, since what the record hides and what hides the record must disappear together. The segment is clean: the
    /// backing device has it, or a quarantine says otherwise.
    fn take_out_all<E: Environment>(&mut self, cache: &Cache<E>) {
        self.slot = self.segment.slots;
        let mut state = cache.lanes[self.lane.index()].state.lock();
        state.index.remove_segment(self.segment.segment);
        state.overlay.forget_segment(self.segment.ordinal);
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
            let key = cache.identity().lanes.key(range.start);
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
        if !MutationPoint::ChanceStillCurrent.holds(is_current(cache, &state, block, location)) {
            return true;
        }
        let appended =
            cache.commit_locked::<2>(&mut state, RecordKind::Fill, block, scratch, Asker::Optional, None);
        if appended.is_some() {
            rare::count(&cache.rare.second_chances);
        }
        appended.is_some()
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
            RecordKind::Write | RecordKind::Fill | RecordKind::ParkedWrite => {
                for (block, _, _) in blocks(range) {
                    state.index.remove_at(cache.identity().lanes.key(block * CHECKSUM_BLOCK), location);
                }
            }
            RecordKind::WriteZeroes | RecordKind::Discard | RecordKind::ParkedZeroes => {
                state.overlay.forget_zeroes(range, (self.segment.ordinal, location.slot));
            }
            // Carried forward in `give_back`, when all of the segment has been seen.
            RecordKind::Quarantine => {}
        }
    }

    /// `false` when its quarantines found no space at the head: the segment stays, and is tried again.
    fn give_back<E: Environment>(mut self, cache: &Cache<E>) -> bool {
        if MutationPoint::ReclaimCarry.is_active()
            && !MutationPoint::ReclaimStuck.holds(self.carry_quarantines(cache))
        {
            return false;
        }
        if self.needs_mark {
            // As in writeback: what was carried must not look like a write that was never acknowledged.
            cache.close_epoch();
        }
        if !MutationPoint::TailBeforeRelease.is_active() {
            cache.lanes[self.lane.index()].state.lock().sealed.pop_front();
            cache.retire(self.segment.segment);
        }
        // Sequence numbers go on from here even if the lane has no other segment.
        let first_sequence = {
            let state = cache.lanes[self.lane.index()].state.lock();
            let next = state.segments().nth(1).map_or(state.next_sequence, |next| next.first_sequence);
            if MutationPoint::TailSequence.is_active() { next } else { self.segment.first_sequence }
        };
        if cache.region().check_stores(MutationPoint::TailStoreCheck).is_err() {
            return false;
        }
        // 1. The new tail is durable, in both slots: an older one would name a segment that is reused.
        let names = InBoth {
            first_fence: MutationPoint::TailFirstFence,
            second: MutationPoint::TailSecond,
            fence: MutationPoint::TailFence,
        };
        let tail = LaneTail {
            ordinal: (self.segment.ordinal + 1).into(),
            ownership: cache.identity().ownership.into(),
            first_sequence: first_sequence.into(),
            reserved: [0; 24],
        };
        cache.tails.lock()[self.lane.index()].store_in_both(cache.region(), names, tail);
        if cache.region().check_stores(MutationPoint::TailStoreCheck).is_err() {
            return false;
        }
        // 2. The segment leaves the lane, and goes to the pool when its last reader is done.
        if MutationPoint::TailBeforeRelease.is_active() {
            cache.lanes[self.lane.index()].state.lock().sealed.pop_front();
            cache.retire(self.segment.segment);
        }
        rare::count(&cache.rare.segments_reclaimed);
        true
    }

    /// What is still damaged of what the victim's quarantines note is recorded again at the head. `false` when there is no
    /// space.
    fn carry_quarantines<E: Environment>(&mut self, cache: &Cache<E>) -> bool {
        let relies = cache.carry_damage(self.lane, self.segment.ordinal);
        self.needs_mark |= relies == Some(true) && MutationPoint::QuarantineMark.is_active();
        relies.is_some()
    }
}

/// Whether all of a block is at `location`, and nothing was zeroed or damaged since.
fn is_current<E: Environment>(
    cache: &Cache<E>,
    state: &LaneState,
    block: ByteRange,
    location: Location,
) -> bool {
    state.index.get(cache.identity().lanes.key(block.start)) == Some(Found::Whole(location))
        && (state.overlay.is_empty()
            || state.overlay.later_than(block, Some(cache.place_of(location))).next().is_none())
}
