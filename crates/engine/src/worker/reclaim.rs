//! Reclaim: frees the oldest segment of a lane once the backing device has all of its data, except for data recorded as damaged.
//!
//! Invariants:
//! - records leave the index in log order, so a read never finds the older content that a removed record had replaced;
//! - a parked range is recorded again at the head, durably, before its old record leaves the index;
//! - the new tail is durable before the segment returns to the pool, so a reclaimed newer record can never uncover an older one;
//! - a lane's lock is held for a bounded number of records.
//!
//! Blocks that are kept, pinned ones and metadata of which the cache has no more than its minimum, are appended again however many a
//! segment has of them, so a single segment may free nothing. Writers go on all the same: the lane whose log is longest without
//! what is kept is chosen, blocks are kept only in a lane that has two segments more than they take, and one pass through its log
//! frees those. The limit of what may be kept leaves so much in some lane (`cache::pins`), so a lane without it waits until
//! writeback has made that one clean. If writeback cannot, or an append finds no space, kept blocks are dropped: only speed
//! depends on them.

use crate::{
    Cache, Environment,
    base::{Records, Requester},
    lane::{Chance, Chances, Content, LogSegment},
    position::Location,
    rare,
    slots::InBoth,
};
use alloc::{collections::BTreeSet, vec::Vec};
use cbd_format::{LaneTail, Record, RecordKind};
use cbd_types::{AlignedBuffer, LaneId, MutationPoint};

/// Records that leave the index while the lane's lock is held once. They are so few that a writer waits about as long as for
/// another writer, and does not sleep. The next records are read while the lane is unlocked, so that the writer can lock it.
const RECORDS_PER_HOLD: usize = 8;
/// Number of times that one step locks the lane.
const HOLDS_PER_STEP: usize = 4;

struct Victim {
    lane: LaneId,
    segment: LogSegment,
    records: Records,
    slot: u32,
    /// What may still be appended again.
    chances: Chances,
    /// All parked ranges of the segment were carried forward.
    has_carried: bool,
    /// The new tail relies on a parked record or a quarantine at the head.
    needs_mark: bool,
}

/// The state of reclaim; the background worker's thread owns it.
#[derive(Default)]
pub(crate) struct Reclaim {
    victim: Option<Victim>,
    /// Lanes whose victim has damage or parked data that found no space at the head. They are skipped until a segment is released
    /// or a range is unparked.
    stuck: BTreeSet<LaneId>,
    /// Free segments when the last lane was added to `stuck`. A reader may release a segment, too.
    free_when_stuck: u32,
    /// The value of [`ParkedCounters::unparked`](crate::cache::ParkedCounters::unparked) at the last step.
    unparked: u64,
    scratch: AlignedBuffer,
}

impl Reclaim {
    /// Does one bounded step. Returns `false` if there is nothing to reclaim.
    pub(crate) fn step<E: Environment>(&mut self, cache: &Cache<E>) -> bool {
        let unparked = cache.parked_counters().unparked();
        if self.unparked != unparked {
            self.unparked = unparked;
            self.stuck.clear();
        }
        if cache.base().pool().free() > self.free_when_stuck {
            self.stuck.clear();
        }
        let Some(victim) = &mut self.victim else {
            self.victim = (cache.base().is_above_gc() || cache.base().pool().has_waiters())
                .then(|| choose(cache, &self.stuck))
                .flatten();
            return self.victim.is_some();
        };
        if !victim.has_carried {
            if !victim.carry_parked(cache) {
                let lane = victim.lane;
                self.victim = None;
                self.skip(cache, lane);
            }
            return true;
        }
        if victim.slot < victim.segment.slots {
            for _ in 0..HOLDS_PER_STEP {
                if victim.slot < victim.segment.slots {
                    victim.remove_records(cache, &mut self.scratch);
                }
            }
            return true;
        }
        if let Some(victim) = self.victim.take() {
            let lane = victim.lane;
            if victim.finish(cache) {
                self.stuck.clear();
            } else {
                self.skip(cache, lane);
            }
        }
        true
    }

    /// Skips a lane that found no space, until there may be some.
    fn skip<E: Environment>(&mut self, cache: &Cache<E>, lane: LaneId) {
        self.stuck.insert(lane);
        self.free_when_stuck = cache.base().pool().free();
    }
}

/// Chooses the lane with the longest log, what is kept left out, among those whose tail segment is clean: it has the oldest data
/// for its share of the traffic. A lane that is full of kept blocks is chosen only if no lane can free space in another way.
fn choose<E: Environment>(cache: &Cache<E>, stuck: &BTreeSet<LaneId>) -> Option<Victim> {
    let base = cache.base();
    let drained = base.drained_epoch().0;
    // Data copied to the head frees no space: copy less of it while segments are taken faster than they are released.
    let quarters = if base.is_reclaim_at_ease() { 3 } else { 2 };
    let mut best: Option<(u64, LaneId, LogSegment)> = None;
    let of_metadata = cache.reclaim_of_metadata();
    let mut full_of_kept: Option<(LaneId, LogSegment)> = None;
    // Another lane frees space when it is clean.
    let mut waits_for_writeback = false;
    for (id, lane) in (0..).map(LaneId).zip(cache.lanes()).filter(|(id, _)| !stuck.contains(id)) {
        let state = lane.lock();
        let is_full = state.is_full_of_kept(base, of_metadata);
        let to_free = state.bytes_to_free(base, of_metadata);
        match state.reclaimable(drained) {
            None => waits_for_writeback |= !is_full && to_free >= 2 * base.blocks_bytes_per_segment(),
            Some((tail, _)) if is_full => full_of_kept = full_of_kept.or(Some((id, tail))),
            Some((tail, _)) if best.as_ref().is_none_or(|(longest, ..)| to_free > *longest) => {
                best = Some((to_free, id, tail));
            }
            Some(_) => {}
        }
    }
    waits_for_writeback &= cache.can_write_back();
    let of_kept = best.is_some();
    let best = best.map(|(_, lane, tail)| (lane, tail));
    best.or(full_of_kept.filter(|_| !waits_for_writeback)).map(|(lane, segment)| Victim {
        lane,
        segment,
        records: base.records_of(segment.segment, segment.slots),
        slot: 0,
        chances: Chances {
            left: (base.shape().data_top() - segment.data_low) / 4 * quarters,
            of_read: true,
            of_kept,
            of_metadata,
        },
        has_carried: false,
        needs_mark: false,
    })
}

impl Victim {
    /// Records the parked ranges of the segment again at the head, before any record leaves the index. Returns `false` if there
    /// is no space: the segment stays unchanged.
    fn carry_parked<E: Environment>(&mut self, cache: &Cache<E>) -> bool {
        let parked = cache.lane(self.lane).lock().parked_in_segment(self.segment.segment, RECORDS_PER_HOLD);
        self.has_carried = parked.is_empty();
        self.needs_mark |= !parked.is_empty();
        parked.into_iter().all(|(range, parked)| cache.carry_parked(self.lane, range, parked))
    }

    fn remove_records<E: Environment>(&mut self, cache: &Cache<E>, scratch: &mut AlignedBuffer) {
        // The segment is clean and not in the pool, so its records can be read without the lock.
        let mut records: Vec<(Location, Record)> = Vec::with_capacity(RECORDS_PER_HOLD);
        while self.slot < self.segment.slots && records.len() < RECORDS_PER_HOLD {
            let location = Location { segment: self.segment.segment, slot: self.slot };
            match cache.base().record_of(&mut self.records, self.slot) {
                Some(record) => {
                    self.slot += record.slots();
                    records.push((location, record));
                }
                None => return self.remove_all(cache),
            }
        }
        let base = cache.base();
        let mut chances = Vec::new();
        self.chances.of_read = !base.pool().has_waiters();
        let mut state = cache.lane(self.lane).lock();
        state.load_index_lines(base, &records);
        for (location, record) in &records {
            if record.kind().has_data() {
                state.add_chances(base, *location, record, &mut self.chances, &mut chances);
            }
        }
        if !chances.is_empty() {
            drop(state);
            // A recently read or kept block is appended again before its old record is removed: a read always finds it.
            for chance in &chances {
                if !self.append_again(cache, chance, scratch) {
                    // There is less space for blocks that were read than for kept ones.
                    self.chances.left = 0;
                    if chance.is_kept {
                        break;
                    }
                }
            }
            state = cache.lane(self.lane).lock();
        }
        for (location, record) in &records {
            state.take_out(base, self.segment.ordinal, *location, record);
        }
    }

    /// Removes all entries of this segment from the index while the lock is held once. A record is unreadable, so its range is
    /// unknown, and the record must disappear together with the older content that it hides and the newer records that hide it.
    /// The segment is clean: the backing device has its data, or a quarantine records the damage.
    fn remove_all<E: Environment>(&mut self, cache: &Cache<E>) {
        self.slot = self.segment.slots;
        cache.lane(self.lane).lock().take_out_all(&self.segment);
    }

    /// Appends a block or adjacent kept blocks again. Returns `false` if there is no space.
    fn append_again<E: Environment>(
        &self,
        cache: &Cache<E>,
        chance: &Chance,
        scratch: &mut AlignedBuffer,
    ) -> bool {
        let Chance { location, record, range, is_kept, class } = chance;
        let base = cache.base();
        scratch.resize(range.len() as usize);
        if base.load_data(*location, record, *range, scratch).is_err() {
            // The damaged data is clean: the backing device has it. What is kept is cached again when it is read.
            return true;
        }
        let lane = cache.lane(self.lane);
        let mut state = lane.lock();
        lane.announce(base);
        let content = Content { class: *class, ..RecordKind::Fill.into() };
        if *is_kept {
            // A write may have replaced some of the blocks while they were copied.
            let mut at = *range;
            while let Some(run) = state.first_current(base, at, *location) {
                let data = &scratch[(run.start - range.start) as usize..(run.end - range.start) as usize];
                if !cache.record_clean(&mut state, content, run, data, Requester::Kept) {
                    return false;
                }
                at.start = run.end;
            }
            return true;
        }
        // A write may have replaced the block while it was copied.
        if !state.is_current(base, *range, *location) {
            return true;
        }
        let appended = state.commit::<E, 2>(base, content, *range, scratch, Requester::Optional, None);
        if appended.is_ok() {
            state.note_chance(base, *range);
            rare::count(&base.rare().second_chances);
        }
        appended.is_ok()
    }

    /// Completes the reclaim of the segment. Returns `false` if its quarantines found no space at the head: the segment stays,
    /// and is retried.
    fn finish<E: Environment>(mut self, cache: &Cache<E>) -> bool {
        if !self.carry_quarantines(cache) {
            return false;
        }
        if self.needs_mark {
            // As in writeback: without a mark, recovery would take a carried record for a write that was never acknowledged.
            cache.close_epoch();
        }
        // Sequence numbers continue from here even if the lane has no other segment.
        let first_sequence = cache.lane(self.lane).lock().first_sequence_behind_tail();
        if cache.base().region().check_stores(MutationPoint::TailStoreCheck).is_err() {
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
            ownership: cache.base().identity().ownership.into(),
            first_sequence: first_sequence.into(),
            reserved: [0; 24],
        };
        cache.store_tail(self.lane, names, tail);
        if cache.base().region().check_stores(MutationPoint::TailStoreCheck).is_err() {
            return false;
        }
        // 2. The segment leaves the lane, and returns to the pool when its last reader unpins it.
        self.release(cache);
        rare::count(&cache.base().rare().segments_reclaimed);
        true
    }

    fn release<E: Environment>(&self, cache: &Cache<E>) {
        cache.lane(self.lane).lock().remove_tail();
        cache.base().retire(self.segment.segment);
    }

    /// Records again at the head the ranges that the victim's quarantines record and that are still damaged. Returns `false` if
    /// there is no space.
    fn carry_quarantines<E: Environment>(&mut self, cache: &Cache<E>) -> bool {
        let relies = cache.carry_damage(self.lane, self.segment.ordinal);
        self.needs_mark |= relies == Some(true);
        relies.is_some()
    }
}
