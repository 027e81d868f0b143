//! Recovery: from the bytes of a region to a cache that serves requests.
//!
//! Invariants: before the cache serves a request, every line that recovery relied on and that may be only in a processor's
//! cache is written back and fenced. This changes no byte, so recovery can crash and run again. Only afterwards does recovery
//! restore the second copies of which the crash left one, and note losses that no quarantine on media notes yet.
//!
//! Elsewhere: the records of one lane (`lane::replay`).

use crate::{
    Cache, Environment, Mutex, Settings,
    base::{Base, Segment, claimed_generation},
    cache::index_blocks_per_lane,
    context::{Context, Identity},
    epochs::Epochs,
    lane::{CaughtUp, ChainSegment, Lane, LogSegment, Marked, Replayed, SLOTS_MAX_OF_RECORD, Tail},
    position::Location,
    slots::TwoSlots,
};
use alloc::{boxed::Box, format, sync::Arc, vec, vec::Vec};
use cbd_format::{
    COUNTER_END, Drained, LaneMark, LaneTail, Layout, PAGE, Record, SegmentHeader, SegmentShape, StateShape,
    record::bytes_of, segment::LOG_MAGIC,
};
use cbd_types::{Error, ErrorKind, LaneId, MutationPoint, Region, Result, SegmentId, heap_sort_by_key};

/// The content of the transport's tables for a cache that is to be opened.
pub(crate) struct Opening<E: Environment> {
    pub environment: Arc<E>,
    pub region: Arc<Region<E::Memory>>,
    pub layout: Box<Layout>,
    pub identity: Identity,
    /// The cache's segments without the state segment.
    pub segments: Vec<SegmentId>,
    pub settings: Settings,
}

/// The content of the slots of the state segment.
struct StateSlots {
    drained: TwoSlots<Drained>,
    tails: Vec<TwoSlots<LaneTail>>,
    marks: Vec<TwoSlots<LaneMark>>,
}

/// What these slots prove about the logs.
struct Proved {
    caught_up: CaughtUp,
    is_drained_known: bool,
    /// Of each lane.
    marked: Vec<Marked>,
    /// The highest epoch that a slot proves to have been used.
    epoch: u64,
}

/// The segments of a cache as their headers describe them.
struct SegmentsFound<E> {
    /// Of the whole region.
    segments: Vec<Segment<E>>,
    /// Of each lane, in the order of its log.
    chains: Vec<Vec<ChainSegment>>,
    /// Segments that hold no part of a log.
    free: Vec<u32>,
}

/// Opens the cache and recovers what its log holds, in five stages: read the state segment, read the headers of segments, replay
/// the lanes, resume the counters and the pool, and make durable what the first stages relied on. The stages are not inlined:
/// their frames would be on the stack during the replay.
pub(crate) fn recover<E: Environment>(opening: Opening<E>) -> Result<Arc<Cache<E>>> {
    // Read the clock before the region: everything that recovery finds completed earlier, unless the clock was set back since.
    let opened_ms = opening.environment.wall_ms();
    let slots = StateSlots::read(&opening);
    let proved = slots.proved();
    let SegmentsFound { segments, chains, free } = SegmentsFound::read(&opening, &slots.tails);
    let cache = with_empty_lanes(opening, segments, slots);
    let epoch = replay_lanes(&cache, &chains, &proved)?;
    resume(&cache, &chains, free, epoch, proved.caught_up, opened_ms);
    persist_what_was_relied_on(&cache, &chains);
    complete_copies(&cache, &chains);
    note_what_was_found(&cache, proved.is_drained_known, opened_ms);
    Ok(cache)
}

/// The state before replay: a cache whose lanes are empty and whose pool has no segment.
#[inline(never)]
fn with_empty_lanes<E: Environment>(
    opening: Opening<E>,
    segments: Vec<Segment<E>>,
    slots: StateSlots,
) -> Arc<Cache<E>> {
    let lanes = u64::from(opening.identity.lanes.lanes);
    let blocks_per_lane =
        index_blocks_per_lane(opening.segments.len() as u64, opening.layout.segment_size, lanes);
    let seed = opening.environment.random() as u32;
    let empty = empty_lanes(&opening.identity, blocks_per_lane, seed);
    Cache::new(base(opening, segments, slots.drained, slots.marks), empty, slots.tails)
}

#[inline(never)]
fn base<E: Environment>(
    opening: Opening<E>,
    segments: Vec<Segment<E>>,
    drained: TwoSlots<Drained>,
    marks: Vec<TwoSlots<LaneMark>>,
) -> Base<E> {
    let Opening { environment, region, layout, identity, segments: owned, settings } = opening;
    let epochs = Epochs::new(drained, marks, environment.monotonic_ms());
    let context = Context::new(environment, region, layout.segment_shape(), identity);
    Base::new(context, segments, owned.len() as u32, epochs, settings)
}

/// Pushed one by one: a lane is large, and the closure of an iterator keeps it on the stack twice.
#[inline(never)]
fn empty_lanes<E: Environment>(identity: &Identity, blocks: usize, seed: u32) -> Vec<Lane<E>> {
    let mut empty = Vec::with_capacity(identity.lanes.lanes as usize);
    for lane in lanes(identity) {
        empty.push(Lane::empty(lane, blocks, seed));
    }
    empty
}

/// The third stage: the records of each lane become its index, overlay and parked ranges. Lanes share nothing, so many are
/// replayed at once. Returns the highest epoch that a slot or a record proves to have been used, dropped records included.
///
/// # Errors
/// [`ErrorKind::Damaged`] for a counter value that no log can have reached.
#[inline(never)]
fn replay_lanes<E: Environment>(
    cache: &Cache<E>,
    chains: &[Vec<ChainSegment>],
    proved: &Proved,
) -> Result<u64> {
    let base = cache.base();
    let outcomes: Vec<Mutex<E, Option<Replayed>>> =
        lanes(base.identity()).map(|_| Mutex::<E, _>::new(None)).collect();
    base.environment().each(outcomes.len(), &|lane| {
        let id = LaneId(lane as u32);
        let tail = cache
            .stored_tail(id)
            .map(|tail| Tail { ordinal: tail.ordinal.get(), first_sequence: tail.first_sequence.get() });
        let mut state = cache.lane(id).lock();
        let outcome = state.replay(base, &chains[lane], tail, proved.marked[lane], proved.caught_up);
        drop(state);
        *outcomes[lane].lock() = Some(outcome);
    });
    let mut epoch = proved.epoch;
    for (lane, outcome) in lanes(base.identity()).zip(outcomes) {
        let Some(outcome) = outcome.into_inner() else { continue };
        epoch = epoch.max(outcome.epoch);
        cache.start_writeback_at(lane, outcome.cursor);
    }
    for ((id, lane), marked) in lanes(base.identity()).zip(cache.lanes()).zip(&proved.marked) {
        let state = lane.lock();
        if state.reached().lane_sequence > marked.sequence {
            // The next pass stores the mark that the last process did not store.
            lane.touch();
        }
        let highest = epoch.max(state.highest_counter());
        if highest >= COUNTER_END / 2 {
            // Forged: continuing from here would soon write values that no recovery accepts.
            return Err(Error::new(
                ErrorKind::Damaged,
                format!("lane {id} of the cache has counted to {highest}, which is not possible"),
            ));
        }
    }
    Ok(epoch)
}

/// The fourth stage: the pool gets the `free` segments. The epochs continue above drained and above `epoch`, the highest one
/// that was seen.
fn resume<E: Environment>(
    cache: &Cache<E>,
    chains: &[Vec<ChainSegment>],
    free: Vec<u32>,
    epoch: u64,
    caught_up: CaughtUp,
    opened_ms: u64,
) {
    for segment in free {
        cache.base().pool().release(segment);
    }
    reopen_if_nothing_is_free(cache, chains);
    let dirty = cache.lanes().iter().map(|lane| lane.lock().last_dirty_epoch()).max();
    let last = dirty.unwrap_or(0).max(caught_up.drained);
    cache.base().epochs().resume(epoch, last, opened_ms);
}

/// The end of the fifth stage, once everything that recovery relied on is durable: notes losses, a clock that was set back, and
/// that the backing device is not crash-consistent.
fn note_what_was_found<E: Environment>(cache: &Cache<E>, is_drained_known: bool, opened_ms: u64) {
    // If there is no room to note a loss, or the memory takes no stores, the lane keeps the loss. It is noted when there is
    // room, and by reclaim before the tail passes it. Until then each recovery finds it again, and the backing device is not
    // crash-consistent.
    cache.note_lost();
    if opened_ms < cache.base().epochs().dated_ms() {
        // The clock was set back: writes that complete from now on would appear older than the recovery point.
        cache.base().epochs().set_back(cache.base().context(), opened_ms);
    }
    if cache.has_damage() || !is_drained_known {
        // The backing device lacks damaged data, even once it is overwritten, until the overwrite is drained. And if drained is
        // not known, old epochs will be written over newer ones.
        cache.base().epochs().void_until_now(cache.base().context());
    }
}

/// Reopens the last segment of each lane, in the run that it belongs to, if the reserve of the pool is incomplete. A quarantine
/// may have taken the last free segment before the crash. That segment is sealed now, and reclaim could not carry a quarantine
/// out of a tail: no segment would ever become free again.
///
/// A record that was dropped may be in the next slot. A record with the same sequence number overwrites both its copies; if a
/// power failure tears that store, the next recovery finds the dropped record as torn as before, since its data was not
/// touched. Data could complete it, so the lane erases it before it takes data.
fn reopen_if_nothing_is_free<E: Environment>(cache: &Cache<E>, chains: &[Vec<ChainSegment>]) {
    let is_short = cache.base().pool().free() < cache.base().pool().reserve();
    if !is_short {
        return;
    }
    for (lane, chain) in cache.lanes().iter().zip(chains) {
        if let Some(last) = chain.last() {
            lane.lock().reopen(last);
        }
    }
}

/// After a crash of the process alone, the last stores of each lane may be only in a processor's cache: a power failure now
/// would undo what was recovered. Writes them back and fences.
#[inline(never)]
fn persist_what_was_relied_on<E: Environment>(cache: &Cache<E>, chains: &[Vec<ChainSegment>]) {
    let base = cache.base();
    let region = base.region();
    let state = StateShape { lanes: base.identity().lanes.lanes };
    let mut stored = region.nothing_in_flight();
    let state_slots = |lane: LaneId| {
        [
            (MutationPoint::RecoveryTailWriteBack, state.tail(lane)),
            (MutationPoint::RecoveryMarkWriteBack, state.mark(lane)),
        ]
    };
    for (point, slots) in lanes(base.identity())
        .flat_map(state_slots)
        .chain([(MutationPoint::RecoveryDrainedWriteBack, state.drained())])
    {
        for at in slots {
            stored = stored.and(region.write_back(point, base.identity().state_base + at, 64));
        }
    }
    for (lane, chain) in cache.lanes().iter().zip(chains) {
        for segment in chain {
            let at = base.segment(segment.segment).base();
            let header = size_of::<SegmentHeader>() as u64;
            let copy = at + base.shape().header_copy();
            stored = stored
                .and(region.write_back(MutationPoint::RecoveryHeaderWriteBack, at, header))
                .and(region.write_back(MutationPoint::RecoveryHeaderCopyWriteBack, copy, header));
        }
        // The last record that was accepted, its continuation lines and its data; and the records before it that may occupy as
        // many slots, since the slot in which the last one begins is not known.
        let Some(last) = lane.lock().last_with_records() else { continue };
        let start = base.segment(last.segment).base();
        let first = last.slots.saturating_sub(SLOTS_MAX_OF_RECORD);
        // Read before the write-backs: recovery must not rely on lines in flight.
        let data_end = (first..last.slots)
            .filter_map(|slot| base.find_record(Location { segment: last.segment, slot }))
            .filter(|record| record.kind().has_data())
            .map(|record| u64::from(record.data_offset.get()) + record.length.get())
            .max();
        for slot in first..last.slots {
            for at in base.shape().slot(slot) {
                stored =
                    stored.and(region.write_back(MutationPoint::RecoveryRecordWriteBack, start + at, 64));
            }
        }
        if let Some(end) = data_end {
            let length = end.saturating_sub(last.data_low).min(u64::from(base.shape().atomic_unit()) + PAGE);
            let at = start + last.data_low;
            stored = stored.and(region.write_back(MutationPoint::RecoveryDataWriteBack, at, length));
        }
    }
    region.fence(MutationPoint::RecoveryFence, stored);
}

/// A crash can leave one good copy of a header, of a lane's last record or of a state slot. That copy is durable now. The other
/// is stored again, so that a failed page costs nothing afterwards either. A copy that cannot be read is left unchanged: a
/// store to failed memory may fail as well.
#[inline(never)]
fn complete_copies<E: Environment>(cache: &Cache<E>, chains: &[Vec<ChainSegment>]) {
    let base = cache.base();
    let region = base.region();
    let mut stored = base.epochs().complete_slots(base.context()).and(cache.complete_tails());
    for segment in chains.iter().flatten() {
        let start = base.segment(segment.segment).base();
        for at in [start, start + base.shape().header_copy()] {
            let mut copy = [0; size_of::<SegmentHeader>()];
            if region.load(at, &mut copy).is_ok() && copy != *bytes_of(&segment.header) {
                stored = stored.and(region.store(at, bytes_of(&segment.header)));
            }
        }
    }
    for last in cache.lanes().iter().filter_map(|lane| lane.lock().last_with_records()) {
        if let Some((location, record)) = last_record(base, &last) {
            stored = stored.and(base.complete_record(location, &record));
        }
    }
    region.fence(MutationPoint::RecoveryWholeFence, stored);
}

/// The last record of a segment.
fn last_record<E: Environment>(base: &Base<E>, segment: &LogSegment) -> Option<(Location, Record)> {
    let first = segment.slots.saturating_sub(SLOTS_MAX_OF_RECORD);
    (first..segment.slots).find_map(|slot| {
        let location = Location { segment: segment.segment, slot };
        let record = base.load_record(location).ok()?;
        (slot + record.slots() == segment.slots).then_some((location, record))
    })
}

impl StateSlots {
    /// The first stage: reads the slots of the state segment.
    fn read<E: Environment>(opening: &Opening<E>) -> Self {
        let Opening { region, identity, .. } = opening;
        let state = StateShape { lanes: identity.lanes.lanes };
        let absolute = |[a, b]: [u64; 2]| [identity.state_base + a, identity.state_base + b];
        Self {
            drained: TwoSlots::read(region, absolute(state.drained()), 0),
            tails: lanes(identity)
                .map(|lane| TwoSlots::read(region, absolute(state.tail(lane)), u64::from(lane.0)))
                .collect(),
            marks: lanes(identity)
                .map(|lane| TwoSlots::read(region, absolute(state.mark(lane)), u64::from(lane.0)))
                .collect(),
        }
    }

    fn proved(&self) -> Proved {
        let drained = self.drained.content();
        let caught_up = CaughtUp::new(drained);
        let void_until = drained.map_or(0, |drained| drained.void_until.get());
        let marked =
            self.marks.iter().filter_map(TwoSlots::content).map(|mark| mark.epoch.get()).max().unwrap_or(0);
        Proved {
            caught_up,
            is_drained_known: drained.is_some(),
            marked: self.marks.iter().map(|mark| Marked::by(mark.content())).collect(),
            // The counter continues above every epoch that was ever used.
            epoch: caught_up.drained.max(void_until).max(marked),
        }
    }
}

impl<E: Environment> SegmentsFound<E> {
    /// The second stage: reads the headers of all segments and groups the segments by lane.
    #[inline(never)]
    fn read(opening: &Opening<E>, tails: &[TwoSlots<LaneTail>]) -> Self {
        let Opening { region, layout, identity, .. } = opening;
        let all = (0..layout.segment_count).map(SegmentId);
        let segments: Vec<Segment<E>> = all.map(|id| Segment::new(id, layout.segment_base(id))).collect();
        let mut chains: Vec<Vec<ChainSegment>> = vec![Vec::new(); identity.lanes.lanes as usize];
        let mut free = Vec::new();
        for id in &opening.segments {
            let segment = &segments[id.index()];
            let header = read_header(region, layout.segment_shape(), segment, identity);
            let live = header.filter(|header| {
                let tail = tails[header.lane.get() as usize].content().map_or(0, |tail| tail.ordinal.get());
                header.ordinal.get() >= tail.max(1)
            });
            match live {
                Some(header) => {
                    let lane = LaneId(header.lane.get());
                    segment.begin(lane, header.generation.get(), header.salt.get(), header.ordinal.get());
                    chains[lane.index()].push(ChainSegment { segment: id.0, header });
                }
                None => free.push(id.0),
            }
        }
        free.extend(chains.iter_mut().flat_map(order_chain));
        Self { segments, chains, free }
    }
}

/// The lanes of a cache.
fn lanes(identity: &Identity) -> impl Iterator<Item = LaneId> + use<> {
    (0..identity.lanes.lanes).map(LaneId)
}

/// The valid header of a segment, from its second copy if the first is damaged; the later generation if they differ.
/// Notes the highest generation that any header claims, so that the next use of the segment gets a higher one. Not
/// inlined: its buffers would be in the frame of its caller.
#[inline(never)]
fn read_header<E: Environment>(
    region: &Region<E::Memory>,
    shape: SegmentShape,
    segment: &Segment<E>,
    identity: &Identity,
) -> Option<SegmentHeader> {
    let mut newest: Option<SegmentHeader> = None;
    for at in [segment.base(), segment.base() + shape.header_copy()] {
        let mut bytes = [0; size_of::<SegmentHeader>()];
        if region.load(at, &mut bytes).is_err() {
            continue;
        }
        let Some(header) = SegmentHeader::decode(&bytes) else { continue };
        let Some(header) = header.verify(segment.id(), identity.cache_id, identity.lanes.lanes) else {
            continue;
        };
        if header.magic.get() == LOG_MAGIC
            && newest.is_none_or(|known| known.generation.get() < header.generation.get())
        {
            newest = Some(header);
        }
    }
    segment.set_claimed_generation(claimed_generation(region, shape, segment.base()));
    newest
}

/// Sorts a lane's segments by ordinal. Of two with the same ordinal only one can be part of the log: the one of the later run.
/// Returns the others.
fn order_chain(chain: &mut Vec<ChainSegment>) -> Vec<u32> {
    heap_sort_by_key(chain, |segment| {
        let run = segment.header.run.get();
        let later_first = core::cmp::Reverse((run, segment.header.generation.get()));
        (segment.header.ordinal.get(), later_first, segment.segment)
    });
    let mut others = Vec::new();
    let mut last = None;
    chain.retain(|segment| {
        let ordinal = segment.header.ordinal.get();
        if last == Some(ordinal) {
            others.push(segment.segment);
            return false;
        }
        last = Some(ordinal);
        true
    });
    others
}

#[cfg(test)]
mod tests;
