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
mod bypass;
mod curve;
mod damage;
mod fills;
mod index;
mod log;
mod look_up;
mod map;
mod notes;
mod overlay;
mod parking;
mod pins;
mod reclaim;
mod replay;
mod report;
mod resize;
mod store;

use crate::{
    Environment, Mutex,
    base::Base,
    lane_map::LaneMap,
    position::{Cursor, Reached},
    sync::{SharedBool, SharedU64},
};
use admission::Admission;
use alloc::{boxed::Box, collections::VecDeque, vec::Vec};
use bypass::Bypasses;
use cbd_types::{ByteRange, CHECKSUM_BLOCK, LaneId};
use core::sync::atomic::Ordering;
use index::{Index, RESERVED_MAX, SharedLines, no_memory};
use lock_api::MutexGuard;
use overlay::Overlay;
use parking::Parking;
use replay::Lost;

pub(crate) use bypass::{BypassId, Obstacle};
pub(crate) use curve::Curve;
pub use curve::{HitCurve, RANKS};
pub(crate) use fills::FillId;
pub(crate) use index::{Stepped, blocks};
pub(crate) use log::SLOTS_MAX_OF_RECORD;
pub(crate) use look_up::{PinnedBlock, Source};
pub(crate) use map::Sampled;
pub(crate) use parking::{Outcome, Parked, Refused};
pub(crate) use reclaim::{Chance, Chances, OfMetadata};
pub(crate) use replay::{CaughtUp, ChainSegment, Marked, Outcome as Replayed, Tail};
pub(crate) use report::LaneReport;
pub(crate) use resize::Resize;
use store::Indexed;
pub(crate) use store::{Content, FEW_BLOCKS, MANY_BLOCKS};

/// Bytes of a range whose index lines are prefetched before the lane is locked.
const PREFETCHED: u64 = 16 * CHECKSUM_BLOCK;
const _: () = assert!(MANY_BLOCKS <= RESERVED_MAX);

/// A segment of a lane's log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogSegment {
    /// Number of the segment within the cache.
    pub segment: u32,
    pub ordinal: u64,
    /// Sequence number of its first record.
    pub first_sequence: u64,
    /// The run that opened it.
    pub run: u64,
    /// Slots in use.
    pub slots: u32,
    /// Lowest offset of the data, which grows down, in bytes from the segment's base.
    pub data_low: u64,
    /// Epochs of the first and of the last record that must be written back; 0 if there is none.
    pub first_unwritten_epoch: u64,
    pub last_unwritten_epoch: u64,
    /// Epoch of the last record that a flush of the backing device must cover; 0 if there is none.
    pub last_dirty_epoch: u64,
    /// Recovery reopened the segment: its next slot may hold a dropped record.
    pub holds_dropped: bool,
}

impl LogSegment {
    /// Notes that a record of `epoch` must be written back.
    const fn note_unwritten(&mut self, epoch: u64) {
        if self.first_unwritten_epoch == 0 {
            self.first_unwritten_epoch = epoch;
        }
        self.last_unwritten_epoch = epoch;
    }
}

/// The counters of a lane, in bytes unless stated otherwise.
#[derive(Clone, Copy, Default, Debug)]
struct Counters {
    written: u64,
    read_hit: u64,
    read_missed: u64,
    filled: u64,
    /// Data of all dirty records ever appended; the share that writeback has made clean is counted elsewhere and subtracted.
    dirtied: u64,
    /// Dirty records ever appended.
    dirty_records: u64,
    /// All bytes stored into the region for records and data.
    stored: u64,
}

/// The state that the lane's lock protects.
pub(crate) struct LaneState {
    id: LaneId,
    index: Index,
    admission: Admission,
    curve: Curve,
    overlay: Overlay,
    parked: Parking,
    pins: pins::LanePins,
    /// The number of pending fills.
    filling: u32,
    /// The number of bypasses on their way.
    bypassing: u32,
    /// Boxed: lanes are moved as values when a cache is opened.
    bypass: Box<Bypasses>,
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
    /// Losses that recovery found and that no record notes yet, in the order of the log.
    lost: Vec<Lost>,
    /// Everything before this position is flushed to the backing device, or noted as damaged or parked, whatever the value of
    /// *drained*.
    settled: Cursor,
    counters: Counters,
    /// Scratch buffer for the checksums of a long write.
    checksums: Vec<u32>,
}

impl LaneState {
    /// An empty lane.
    #[inline]
    fn new(id: LaneId, index: Index, admission: Admission) -> Self {
        Self {
            id,
            index,
            admission,
            curve: Curve::none(),
            overlay: Overlay::default(),
            parked: Parking::default(),
            pins: pins::LanePins::default(),
            filling: 0,
            bypassing: 0,
            bypass: Box::default(),
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

    /// Ensures that the checksum scratch buffer has its full length: a thread that panicked during a long write has not
    /// returned it. `None` if the allocation fails.
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

    /// Takes the scratch buffer for the checksums of a long write, until [`return_checksums`](Self::return_checksums).
    fn take_checksums(&mut self) -> Vec<u32> {
        core::mem::take(&mut self.checksums)
    }

    /// Returns the scratch buffer for the next write.
    fn return_checksums(&mut self, checksums: Vec<u32>) {
        self.checksums = checksums;
    }

    /// Segments of the log from tail to head, the open one last.
    pub(crate) fn segments(&self) -> impl Iterator<Item = &LogSegment> {
        self.sealed.iter().chain(&self.open)
    }

    /// The first segment of the log whose ordinal is not below `ordinal`.
    pub(crate) fn segment_from(&self, ordinal: u64) -> Option<LogSegment> {
        let at = self.sealed.partition_point(|segment| segment.ordinal < ordinal);
        let open = self.open.as_ref().filter(|open| open.ordinal >= ordinal);
        self.sealed.get(at).or(open).copied()
    }

    /// The ordinal of the next segment.
    pub(crate) const fn next_ordinal(&self) -> u64 {
        self.next_ordinal
    }

    /// Whether the backing device has all of the segment except what is noted, even if its epochs are not drained.
    pub(crate) fn is_settled(&self, segment: &LogSegment) -> bool {
        Cursor { ordinal: segment.ordinal, slot: segment.slots } <= self.settled
    }

    /// Resets the lane to its state before replay.
    fn reset(&mut self) {
        self.index.clear();
        self.overlay = Overlay::default();
        self.parked = Parking::default();
        self.sealed.clear();
        self.lost.clear();
        self.bypass.reset();
        self.open = None;
        self.counters = Counters::default();
    }

    /// Prefetches the index lines of `range`, which lies in one chunk.
    #[inline]
    pub(crate) fn prefetch<E: Environment>(&self, base: &Base<E>, range: ByteRange) {
        let keys = base.identity().lanes.keys(range);
        self.index.prefetch::<E>(self.index.start(*keys.start()), keys);
    }

    /// The sequence number up to which the lane is complete, and its run.
    pub(crate) fn reached(&self) -> Reached {
        // The run of the segment with the last record: the lane may have stored nothing in the run that recovery started.
        let run = self.open.as_ref().or(self.sealed.back()).map_or(0, |segment| segment.run);
        Reached { lane_sequence: self.next_sequence - 1, run }
    }

    /// The sequence number of the next record.
    pub(crate) const fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// The highest value of the lane's counters.
    pub(crate) fn highest_counter(&self) -> u64 {
        self.next_sequence.max(self.next_ordinal).max(self.run)
    }

    /// Epoch of the last record that a flush of the backing device must cover; 0 if there is none.
    pub(crate) fn last_dirty_epoch(&self) -> u64 {
        self.segments().map(|segment| segment.last_dirty_epoch).max().unwrap_or(0)
    }

    /// The last segment that holds records.
    pub(crate) fn last_with_records(&self) -> Option<LogSegment> {
        self.segments().filter(|segment| segment.slots > 0).last().copied()
    }

    /// Notes that everything before `cursor` is on the backing device, or noted as damaged or parked.
    pub(crate) fn settle(&mut self, cursor: Cursor) {
        self.settled = self.settled.max(cursor);
    }

    /// Whether recovery found losses that no record notes yet.
    pub(crate) fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Reopens the last sealed segment, if it is `last`, in the run that it belongs to; see `recovery`. Its next slot may hold
    /// a dropped record.
    pub(crate) fn reopen(&mut self, last: &ChainSegment) {
        if self.sealed.back().is_none_or(|sealed| sealed.segment != last.segment) {
            return;
        }
        self.open = self.sealed.pop_back().map(|segment| LogSegment { holds_dropped: true, ..segment });
        self.run = last.header.run.get();
        self.cut = last.header.cut.get();
    }
}

/// A lane. Aligned to 128 bytes because other threads write the neighbouring lanes, and processors fetch cache lines in pairs.
#[repr(align(128))]
pub(crate) struct Lane<E: Environment> {
    /// Set by a writer before it stores; see the module's invariants.
    touched: SharedBool<E>,
    /// Addresses of the cache lines of the state's index. A resize changes them under the lock, and any thread loads them.
    lines: SharedLines<E>,
    state: Mutex<E, LaneState>,
    /// The parts of [`Counters::dirtied`] and [`Counters::dirty_records`] that writeback has made clean.
    cleaned_bytes: SharedU64<E>,
    cleaned_records: SharedU64<E>,
}

/// A locked lane.
pub(crate) type LaneGuard<'a, E> = MutexGuard<'a, <E as Environment>::Lock, LaneState>;

impl<E: Environment> Lane<E> {
    /// An empty lane, with an index for `blocks` blocks. Not inlined: it has a large frame.
    #[inline(never)]
    pub(crate) fn empty(id: LaneId, blocks: usize, seed: u32) -> Self {
        let index = Index::new(blocks, seed);
        let admission = Admission::new(blocks).unwrap_or_else(no_memory::<Admission, _>);
        Self {
            touched: SharedBool::new(false),
            lines: SharedLines::new(index.lines()),
            state: Mutex::<E, _>::new(LaneState::new(id, index, admission)),
            cleaned_bytes: SharedU64::new(0),
            cleaned_records: SharedU64::new(0),
        }
    }

    /// Locks the lane for a client's request. Spins first: other threads hold the lock for a few microseconds, but a thread
    /// that sleeps is woken only tens of microseconds later. Waits are counted where the environment spins.
    #[inline]
    pub(crate) fn lock_for_request(&self, base: &Base<E>) -> LaneGuard<'_, E> {
        if E::SPINS == 0 {
            return self.state.lock();
        }
        match self.state.try_lock() {
            Some(state) => state,
            None => self.lock_contended(base),
        }
    }

    /// Locks the lane for a request that found it locked, and counts the wait.
    #[cold]
    #[inline(never)]
    fn lock_contended(&self, base: &Base<E>) -> LaneGuard<'_, E> {
        let begun_ns = base.environment().monotonic_ns();
        let mut spins = 1..E::SPINS;
        let spun = spins.find_map(|_| {
            core::hint::spin_loop();
            if self.state.is_locked() { None } else { self.state.try_lock() }
        });
        let state = spun.unwrap_or_else(|| {
            core::hint::spin_loop();
            self.state.lock()
        });
        base.lane_waits().count(base.environment().monotonic_ns().saturating_sub(begun_ns));
        state
    }

    /// Locks the lane.
    #[inline]
    pub(crate) fn lock(&self) -> LaneGuard<'_, E> {
        self.state.lock()
    }

    /// Locks the lane if it is unlocked; never waits. Also returns `None` if the caller itself holds the lock.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<LaneGuard<'_, E>> {
        self.state.try_lock()
    }

    /// Prefetches the index lines of `range`, so that they arrive while the thread locks the lane.
    #[inline]
    pub(crate) fn prefetch(&self, map: LaneMap, range: ByteRange) {
        self.lines.load().prefetch::<E>(map.keys(ByteRange::at(range.start, range.len().min(PREFETCHED))));
    }

    /// Sets the touched bit for a record that follows. Wakes the background worker if it sleeps: the first write after an idle
    /// period starts the timer of writeback. See [`touch`](Self::touch).
    #[inline]
    pub(crate) fn announce(&self, base: &Base<E>) {
        if self.touch() {
            base.wakeups().wake_if_asleep();
        }
    }

    /// Sets the touched bit; returns whether it was clear. Must precede the first store of the record's data: the atomic
    /// exchange would drain these stores. Must precede the load of the record's epoch: a flush that closes an epoch and then
    /// finds the bit clear can rely on this record getting a later epoch.
    #[inline]
    pub(crate) fn touch(&self) -> bool {
        !self.touched.load(Ordering::Relaxed) && !self.touched.swap(true, Ordering::SeqCst)
    }

    /// Whether a record may have been stored since the last pass.
    pub(crate) fn is_touched(&self) -> bool {
        self.touched.load(Ordering::SeqCst)
    }

    /// Clears the touched bit, for a flush's pass, under the lane's lock.
    pub(crate) fn clear_touched(&self) {
        self.touched.store(false, Ordering::SeqCst);
    }

    /// Counts `bytes` of data and `records` records that a batch has made clean.
    pub(crate) fn count_cleaned(&self, bytes: u64, records: u64) {
        self.cleaned_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.cleaned_records.fetch_add(records, Ordering::Relaxed);
    }

    /// Bytes of data that records have dirtied and no batch has made clean.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirtied_and_dirty().1
    }

    /// Bytes of data that records have ever dirtied, and those of them that no batch has made clean.
    pub(crate) fn dirtied_and_dirty(&self) -> (u64, u64) {
        let dirtied = self.lock().counters.dirtied;
        (dirtied, dirtied.saturating_sub(self.cleaned_bytes.load(Ordering::Relaxed)))
    }

    /// If no record is dirty, counts all as clean: records that were counted and then lost would otherwise stay counted
    /// forever.
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
