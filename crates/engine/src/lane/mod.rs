//! A lane: a slice of a cache with its own lock, log and index.
//!
//! Invariants:
//! - a lane's lock is taken in this file only, and its state is changed by this module only;
//! - records of a lane are committed in the order of their sequence numbers, and their epochs never fall;
//! - every record is fenced before the lane is unlocked, so at most the last one can be torn;
//! - the *touched* bit is set before the first store of a record and cleared only by a flush's pass under the lock.
//!
//! Elsewhere: what lanes share (`base`), requests that lock lanes (`cache`), the background worker (`worker`).

mod admission;
mod damage;
mod fills;
mod index;
mod log;
mod look_up;
mod notes;
mod overlay;
mod parking;
mod reclaim;
mod replay;
mod report;
mod store;

use crate::{
    Environment, Mutex,
    base::Base,
    lane_map::LaneMap,
    position::{Cursor, Reached},
    sync::{SharedBool, SharedU64},
};
use admission::Admission;
use alloc::{collections::VecDeque, vec::Vec};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, LaneId};
use core::sync::atomic::Ordering;
use fills::PendingFill;
use index::{Index, Lines};
use lock_api::MutexGuard;
use overlay::Overlay;
use parking::Parking;
use replay::Lost;

pub(crate) use fills::FillId;
pub(crate) use index::blocks;
pub(crate) use log::SLOTS_MAX_OF_RECORD;
pub(crate) use look_up::{PinnedBlock, Source};
pub(crate) use parking::{Outcome, Parked, Refused, space_of};
pub(crate) use reclaim::Chance;
pub(crate) use replay::{CaughtUp, ChainSegment, Marked, Outcome as Replayed, Tail};
pub(crate) use report::LaneReport;
pub(crate) use store::{FEW_BLOCKS, Lack, MANY_BLOCKS};

/// Bytes of a range whose index lines are prefetched before the lane is locked.
const PREFETCHED: u64 = 16 * CHECKSUM_BLOCK;

/// A segment of a lane's log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogSegment {
    /// The cache's own number of the segment.
    pub segment: u32,
    pub ordinal: u64,
    /// Sequence number of its first record.
    pub first_sequence: u64,
    /// The run that opened it.
    pub run: u64,
    /// Slots in use.
    pub slots: u32,
    /// Where the data that grows down has come to, in bytes from the segment's base.
    pub data_low: u64,
    /// The last epoch of a record that the backing device must learn of; 0 when there is none.
    pub last_dirty_epoch: u64,
    /// Opened again by recovery: a record that was dropped may stand in its next slot.
    pub holds_dropped: bool,
}

/// What a lane counts, in bytes unless it says otherwise.
#[derive(Clone, Copy, Default, Debug)]
struct Counters {
    written: u64,
    read_hit: u64,
    read_missed: u64,
    filled: u64,
    /// Data of dirty records ever appended; what writeback has collected is subtracted elsewhere.
    dirtied: u64,
    /// Dirty records ever appended.
    dirty_records: u64,
    /// Everything stored into the region for records and data.
    stored: u64,
}

/// What the lane's lock protects.
pub(crate) struct LaneState {
    id: LaneId,
    index: Index,
    admission: Admission,
    overlay: Overlay,
    parked: Parking,
    fills: Vec<PendingFill>,
    next_fill: u64,
    /// Sequence number of the next record.
    next_sequence: u64,
    /// Ordinal of the next segment.
    next_ordinal: u64,
    /// The run that this recovery began, and the last sequence number it accepted.
    run: u64,
    cut: u64,
    open: Option<LogSegment>,
    /// From tail to head.
    sealed: VecDeque<LogSegment>,
    /// What recovery has found lost and could not note yet, in the order of the log.
    lost: Vec<Lost>,
    /// Everything before this place is on the backing device, flushed, or noted as damaged or parked, whatever *drained* says.
    settled: Cursor,
    counters: Counters,
    /// Scratch for the checksums of a long write.
    checksums: Vec<u32>,
}

impl LaneState {
    /// A lane that holds nothing.
    fn new(id: LaneId, index: Index, admission: Admission) -> Self {
        Self {
            id,
            index,
            admission,
            overlay: Overlay::default(),
            parked: Parking::default(),
            fills: Vec::new(),
            next_fill: 0,
            next_sequence: 1,
            next_ordinal: 1,
            run: 1,
            cut: 0,
            open: None,
            sealed: VecDeque::new(),
            lost: Vec::new(),
            settled: Cursor::default(),
            counters: Counters::default(),
            checksums: alloc::vec![0; MANY_BLOCKS],
        }
    }

    /// Makes the scratch for the checksums of a long write complete: a thread that panicked during such a write has not
    /// returned it. `None` if there is no memory.
    #[inline]
    fn ensure_checksums(&mut self) -> Option<()> {
        if self.checksums.len() == MANY_BLOCKS { Some(()) } else { self.replace_checksums() }
    }

    #[cold]
    #[inline(never)]
    fn replace_checksums(&mut self) -> Option<()> {
        self.checksums = Vec::new();
        self.checksums.try_reserve_exact(MANY_BLOCKS).ok()?;
        self.checksums.resize(MANY_BLOCKS, 0);
        Some(())
    }

    /// The scratch for the checksums of a long write, until [`return_checksums`](Self::return_checksums).
    fn take_checksums(&mut self) -> Vec<u32> {
        core::mem::take(&mut self.checksums)
    }

    /// Returns the scratch for the next write.
    fn return_checksums(&mut self, checksums: Vec<u32>) {
        self.checksums = checksums;
    }

    /// Segments of the log from tail to head, the open one last.
    pub(crate) fn segments(&self) -> impl Iterator<Item = &LogSegment> {
        self.sealed.iter().chain(&self.open)
    }

    /// Whether the backing device lacks nothing of the segment but what is noted, although its epochs may not be drained.
    pub(crate) fn is_settled(&self, segment: &LogSegment) -> bool {
        Cursor { ordinal: segment.ordinal, slot: segment.slots } <= self.settled
    }

    /// As before any record was replayed.
    fn reset(&mut self) {
        self.index.clear();
        self.overlay = Overlay::default();
        self.parked = Parking::default();
        self.sealed.clear();
        self.lost.clear();
        self.open = None;
        self.counters = Counters::default();
    }

    /// Prefetches the index lines of `range`, which lies in one chunk.
    #[inline]
    pub(crate) fn prefetch<E: Environment>(&self, base: &Base<E>, range: ByteRange) {
        self.index.prefetch::<E>(base.identity().lanes.keys(range));
    }

    /// How far the lane is complete.
    pub(crate) fn reached(&self) -> Reached {
        // Of the segment with the last record: recovery begins a run, and the lane may have written nothing since.
        let run = self.open.as_ref().or(self.sealed.back()).map_or(0, |segment| segment.run);
        Reached { lane_sequence: self.next_sequence - 1, run }
    }

    /// The sequence number of the next record.
    pub(crate) const fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// The highest number that the lane has counted to.
    pub(crate) fn highest_counter(&self) -> u64 {
        self.next_sequence.max(self.next_ordinal).max(self.run)
    }

    /// The last epoch of a record that the backing device must learn of; 0 when there is none.
    pub(crate) fn last_dirty_epoch(&self) -> u64 {
        self.segments().map(|segment| segment.last_dirty_epoch).max().unwrap_or(0)
    }

    /// The last segment that holds records.
    pub(crate) fn last_with_records(&self) -> Option<LogSegment> {
        self.segments().filter(|segment| segment.slots > 0).last().copied()
    }

    /// Everything before `cursor` is on the backing device, or noted as damaged or parked.
    pub(crate) fn settle(&mut self, cursor: Cursor) {
        self.settled = self.settled.max(cursor);
    }

    /// Whether recovery has found losses that could not be noted yet.
    pub(crate) fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Continues in the last sealed segment, which is `last`, in the run that it belongs to; see `recovery`. A record that was dropped
    /// may stand in its next slot.
    pub(crate) fn reopen(&mut self, last: &ChainSegment) {
        if self.sealed.back().is_none_or(|sealed| sealed.segment != last.segment) {
            return;
        }
        self.open = self.sealed.pop_back().map(|segment| LogSegment { holds_dropped: true, ..segment });
        self.run = last.header.run.get();
        self.cut = last.header.cut.get();
    }
}

/// A lane. With lines of its own: neighbours are written by other threads, and processors fetch lines in pairs.
#[repr(align(128))]
pub(crate) struct Lane<E: Environment> {
    /// Set by a writer before it stores; see the module's invariants.
    touched: SharedBool<E>,
    /// Where the index of the state has its lines.
    lines: Lines,
    state: Mutex<E, LaneState>,
    /// What writeback has made clean of [`Counters::dirtied`] and [`Counters::dirty_records`].
    cleaned_bytes: SharedU64<E>,
    cleaned_records: SharedU64<E>,
}

/// A locked lane.
pub(crate) type LaneGuard<'a, E> = MutexGuard<'a, <E as Environment>::Lock, LaneState>;

impl<E: Environment> Lane<E> {
    /// A lane that holds nothing, with an index for `blocks` blocks. Not inlined: it has a large frame.
    #[inline(never)]
    pub(crate) fn empty(id: LaneId, blocks: usize, seed: u32) -> Self {
        let state = LaneState::new(id, Index::new(blocks, seed), Admission::new(blocks));
        Self {
            touched: SharedBool::new(false),
            lines: state.index.lines(),
            state: Mutex::<E, _>::new(state),
            cleaned_bytes: SharedU64::new(0),
            cleaned_records: SharedU64::new(0),
        }
    }

    /// Locks the lane for a client's request. Other threads hold it for a few microseconds, and a thread that sleeps for it is woken
    /// tens of them later, so this one spins first.
    #[inline]
    pub(crate) fn lock_for_request(&self) -> LaneGuard<'_, E> {
        for spin in 0..E::SPINS {
            if (spin == 0 || !self.state.is_locked())
                && let Some(state) = self.state.try_lock()
            {
                return state;
            }
            core::hint::spin_loop();
        }
        self.state.lock()
    }

    /// Locks the lane.
    #[inline]
    pub(crate) fn lock(&self) -> LaneGuard<'_, E> {
        self.state.lock()
    }

    /// Locks the lane if that is possible without a wait. A lane that the caller holds is refused as well.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<LaneGuard<'_, E>> {
        self.state.try_lock()
    }

    /// Prefetches the index lines of `range`, so that they come while the lane is locked.
    #[inline]
    pub(crate) fn prefetch(&self, map: LaneMap, range: ByteRange) {
        self.lines.prefetch::<E>(map.keys(ByteRange::at(range.start, range.len().min(PREFETCHED))));
    }

    /// Sets the touched bit for a record that follows, and wakes the background worker if it sleeps: the first write after a rest
    /// begins the clock of writeback. See [`touch`](Self::touch).
    #[inline]
    pub(crate) fn announce(&self, base: &Base<E>) {
        if self.touch() {
            base.wakeups().wake_if_asleep();
        }
    }

    /// Sets the touched bit. Before the first store of the record's data: the locked instruction would drain the stores otherwise.
    /// Before its epoch is loaded: a flush that closes an epoch and then sees the bit clear knows that this record will have a later
    /// one. Returns whether the bit was clear.
    #[inline]
    pub(crate) fn touch(&self) -> bool {
        !self.touched.load(Ordering::Relaxed) && !self.touched.swap(true, Ordering::SeqCst)
    }

    /// Whether a record may have been stored since the last pass.
    pub(crate) fn is_touched(&self) -> bool {
        self.touched.load(Ordering::SeqCst)
    }

    /// For a flush's pass, under the lane's lock.
    pub(crate) fn clear_touched(&self) {
        self.touched.store(false, Ordering::SeqCst);
    }

    /// A batch has made `bytes` of data and `records` records clean.
    pub(crate) fn count_cleaned(&self, bytes: u64, records: u64) {
        self.cleaned_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.cleaned_records.fetch_add(records, Ordering::Relaxed);
    }

    /// Bytes of data that records have dirtied and no batch has cleaned.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        let dirtied = self.lock().counters.dirtied;
        dirtied.saturating_sub(self.cleaned_bytes.load(Ordering::Relaxed))
    }

    /// Where nothing is dirty: records that were counted and then lost are not counted for ever.
    pub(crate) fn forget_dirty_that_was_lost(&self, drained: u64) {
        let state = self.lock();
        if state.last_dirty_epoch() <= drained {
            self.cleaned_bytes.store(state.counters.dirtied, Ordering::Relaxed);
            self.cleaned_records.store(state.counters.dirty_records, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests;
