//! A lane: a slice of a cache with its own lock, log and index.
//!
//! Always true here:
//! - records of a lane are committed in the order of their sequence numbers, and their epochs never fall;
//! - every record is fenced before the lane's lock is let go, so at most the last one can be torn;
//! - the *touched* bit is set before the first store of a record and cleared only by a flush's pass under the lock.

use crate::{
    Environment, Mutex,
    admission::Admission,
    index::{Index, Lines},
    logscan::Cursor,
    overlay::Overlay,
    parking::Parking,
    replay::Lost,
    sync::{SharedBool, SharedU64},
    write::MANY_BLOCKS,
};
use alloc::{collections::VecDeque, vec::Vec};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, CHUNK, LaneId};
use core::sync::atomic::Ordering;

/// A segment of a lane's log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogSegment {
    /// The cache's own number of the segment.
    pub(crate) segment: u32,
    pub(crate) ordinal: u64,
    /// Sequence number of its first record.
    pub(crate) first_sequence: u64,
    /// The run that opened it.
    pub(crate) run: u64,
    /// Slots in use.
    pub(crate) slots: u32,
    /// Where the data that grows down has come to, in bytes from the segment's base.
    pub(crate) data_low: u64,
    /// The last epoch of a record that the backing device must learn of; 0 when there is none.
    pub(crate) last_dirty_epoch: u64,
    /// Opened again by recovery: a record that was dropped may stand in its next slot.
    pub(crate) holds_dropped: bool,
}

/// A read of the backing device whose data may become a record.
#[derive(Debug)]
pub(crate) struct PendingFill {
    pub(crate) id: u64,
    pub(crate) range: ByteRange,
}

/// What a lane counts, in bytes unless it says otherwise.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Counters {
    pub(crate) written: u64,
    pub(crate) read_hit: u64,
    pub(crate) read_missed: u64,
    pub(crate) filled: u64,
    /// Data of dirty records ever appended; what writeback has collected is subtracted elsewhere.
    pub(crate) dirtied: u64,
    /// Dirty records ever appended.
    pub(crate) dirty_records: u64,
    /// Everything stored into the region for records and data.
    pub(crate) stored: u64,
}

/// What the lane's lock protects.
pub(crate) struct LaneState {
    pub(crate) id: LaneId,
    pub(crate) index: Index,
    pub(crate) admission: Admission,
    pub(crate) overlay: Overlay,
    pub(crate) parked: Parking,
    pub(crate) fills: Vec<PendingFill>,
    pub(crate) next_fill: u64,
    /// Sequence number of the next record.
    pub(crate) next_sequence: u64,
    /// Ordinal of the next segment.
    pub(crate) next_ordinal: u64,
    /// The run that this recovery began, and the last sequence number it accepted.
    pub(crate) run: u64,
    pub(crate) cut: u64,
    pub(crate) open: Option<LogSegment>,
    /// From tail to head.
    pub(crate) sealed: VecDeque<LogSegment>,
    /// What recovery has found lost and could not note yet, in the order of the log.
    pub(crate) lost: Vec<Lost>,
    /// Everything before this place is on the backing device, flushed, or noted as damaged or parked, whatever *drained* says.
    pub(crate) settled: Cursor,
    pub(crate) counters: Counters,
    /// Scratch for the checksums of a long write.
    checksums: Vec<u32>,
}

impl LaneState {
    /// A lane that holds nothing.
    pub(crate) fn new(id: LaneId, index: Index, admission: Admission) -> Self {
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
    pub(crate) fn ensure_checksums(&mut self) -> Option<()> {
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
    pub(crate) fn take_checksums(&mut self) -> Vec<u32> {
        core::mem::take(&mut self.checksums)
    }

    /// Returns the scratch for the next write.
    pub(crate) fn return_checksums(&mut self, checksums: Vec<u32>) {
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
    pub(crate) fn reset(&mut self) {
        self.index.clear();
        self.overlay = Overlay::default();
        self.parked = Parking::default();
        self.sealed.clear();
        self.lost.clear();
        self.open = None;
        self.counters = Counters::default();
    }

    /// A commit to `range`: reads of the backing device that are under way must not become records.
    pub(crate) fn cancel_fills(&mut self, range: ByteRange) {
        if !self.fills.is_empty() {
            self.fills.retain(|fill| !fill.range.overlaps(&range));
        }
    }
}

/// A lane. With lines of its own: neighbours are written by other threads, and processors fetch lines in pairs.
#[repr(align(128))]
pub(crate) struct Lane<E: Environment> {
    /// Set by a writer before it stores; see the module's invariants.
    touched: SharedBool<E>,
    /// Where the index of the state has its lines.
    pub(crate) lines: Lines,
    pub(crate) state: Mutex<E, LaneState>,
    /// What writeback has made clean of [`Counters::dirtied`] and [`Counters::dirty_records`].
    pub(crate) cleaned_bytes: SharedU64<E>,
    pub(crate) cleaned_records: SharedU64<E>,
}

impl<E: Environment> Lane<E> {
    pub(crate) fn new(state: LaneState) -> Self {
        Self {
            touched: SharedBool::new(false),
            lines: state.index.lines(),
            state: Mutex::<E, _>::new(state),
            cleaned_bytes: SharedU64::new(0),
            cleaned_records: SharedU64::new(0),
        }
    }

    /// Takes the state for a client's request. Others hold it for a few microseconds, and who sleeps for it is woken tens of them later: so
    /// this looks for a while first.
    #[inline]
    pub(crate) fn lock(&self) -> lock_api::MutexGuard<'_, E::Lock, LaneState> {
        for look in 0..E::LOOKS {
            if (look == 0 || !self.state.is_locked())
                && let Some(state) = self.state.try_lock()
            {
                return state;
            }
            core::hint::spin_loop();
        }
        self.state.lock()
    }

    /// Says that a record is coming. Before the first store of its data: the locked instruction would drain
    /// the stores otherwise. Before its epoch is loaded: a flush that closes an epoch and then sees the bit
    /// clear knows that this record will have a later one. Returns whether the bit was clear.
    pub(crate) fn touch(&self) -> bool {
        !self.touched.load(Ordering::Relaxed) && !self.touched.swap(true, Ordering::SeqCst)
    }

    pub(crate) fn is_touched(&self) -> bool {
        self.touched.load(Ordering::SeqCst)
    }

    /// For a flush's pass, under the lane's lock.
    pub(crate) fn clear_touched(&self) {
        self.touched.store(false, Ordering::SeqCst);
    }
}

/// Which lane a byte of the device belongs to, and the number of its block there.
///
/// Chunks go round the lanes in rows; each row begins at another lane, so that equal strides do not all meet in one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneMap {
    /// A power of two: every request divides by it, and shifts where it can.
    pub(crate) lanes: u32,
}

const BLOCKS_PER_CHUNK: u64 = CHUNK / CHECKSUM_BLOCK;

impl LaneMap {
    /// The largest device that the block numbers of this many lanes reach, in bytes.
    pub(crate) const fn device_max(&self) -> u64 {
        (u32::MAX as u64 / BLOCKS_PER_CHUNK) * CHUNK * self.lanes as u64
    }

    pub(crate) const fn lane_of(&self, at: u64) -> LaneId {
        let chunk = at / CHUNK;
        LaneId(self.column(chunk + Self::turn(self.row(chunk))) as u32)
    }

    const fn row(&self, chunk: u64) -> u64 {
        chunk >> self.lanes.trailing_zeros()
    }

    const fn column(&self, number: u64) -> u64 {
        number & (self.lanes as u64 - 1)
    }

    /// Number of the block in its lane.
    pub(crate) const fn key(&self, at: u64) -> u32 {
        let row = self.row(at / CHUNK);
        (row * BLOCKS_PER_CHUNK + at % CHUNK / CHECKSUM_BLOCK) as u32
    }

    /// The first byte of a lane's block: the inverse of [`key`](Self::key).
    pub(crate) const fn offset_of(&self, lane: LaneId, key: u32) -> u64 {
        let lanes = self.lanes as u64;
        let row = key as u64 / BLOCKS_PER_CHUNK;
        let column = (lane.0 as u64 + lanes - Self::turn(row) % lanes) % lanes;
        (row * lanes + column) * CHUNK + key as u64 % BLOCKS_PER_CHUNK * CHECKSUM_BLOCK
    }

    /// The parts of `range` that belong to `lane`, in order.
    pub(crate) fn of_lane(self, lane: LaneId, range: ByteRange) -> impl Iterator<Item = ByteRange> {
        let lanes = u64::from(self.lanes);
        let row_bytes = lanes * CHUNK;
        let rows = if range.is_empty() || lanes == 1 {
            0..0
        } else {
            range.start / row_bytes..(range.end - 1) / row_bytes + 1
        };
        // An only lane has all of it, in one part.
        let whole = (lanes == 1 && !range.is_empty()).then_some(range);
        whole.into_iter().chain(rows.filter_map(move |row| {
            let column = (u64::from(lane.0) + lanes - Self::turn(row) % lanes) % lanes;
            ByteRange::at((row * lanes + column) * CHUNK, CHUNK).intersection(&range)
        }))
    }

    /// How many bytes of `range` belong to `lane`.
    pub(crate) fn bytes_of(self, lane: LaneId, range: ByteRange) -> u64 {
        let row_bytes = u64::from(self.lanes) * CHUNK;
        let (first, end) = (range.start.div_ceil(row_bytes), range.end / row_bytes);
        let counted = |part: ByteRange| self.of_lane(lane, part).map(|part| part.len()).sum::<u64>();
        if first >= end {
            return counted(range);
        }
        // Each whole row has one chunk of each lane: a device can have millions of rows.
        let head = ByteRange { start: range.start, end: first * row_bytes };
        let rest = ByteRange { start: end * row_bytes, end: range.end };
        (end - first) * CHUNK + counted(head) + counted(rest)
    }

    /// The lanes that `range` touches, each once, in order of their numbers from `from` on.
    pub(crate) fn touched_by(self, range: ByteRange, from: u32) -> impl Iterator<Item = LaneId> {
        (from..self.lanes).map(LaneId).filter(move |lane| self.of_lane(*lane, range).next().is_some())
    }

    const fn turn(row: u64) -> u64 {
        (row.wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> 40
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    #[test]
    fn each_block_has_one_lane_and_a_number_of_its_own_there() {
        for lanes in [1, 2, 16] {
            let map = LaneMap { lanes };
            let mut seen = BTreeSet::new();
            for chunk in 0..300u64 {
                for block in [0, 1, BLOCKS_PER_CHUNK - 1] {
                    let at = chunk * CHUNK + block * CHECKSUM_BLOCK;
                    assert!(map.lane_of(at).0 < lanes);
                    assert!(seen.insert((map.lane_of(at), map.key(at))));
                    assert_eq!(map.offset_of(map.lane_of(at), map.key(at)), at);
                }
            }
        }
    }

    #[test]
    fn the_parts_of_all_lanes_make_up_the_range() {
        let map = LaneMap { lanes: 8 };
        let range = ByteRange { start: 5 * CHUNK + 512, end: 77 * CHUNK + 1024 };
        let mut parts: Vec<_> =
            (0..8).flat_map(|lane| map.of_lane(LaneId(lane), range).collect::<Vec<_>>()).collect();
        parts.sort();
        assert_eq!(parts, range.split_at_multiples(CHUNK).collect::<Vec<_>>());
        for end in [range.start, range.start + 1, 8 * CHUNK, 9 * CHUNK, 16 * CHUNK, range.end] {
            let range = ByteRange { end, ..range };
            for lane in (0..8).map(LaneId) {
                let bytes = map.of_lane(lane, range).map(|part| part.len()).sum::<u64>();
                assert_eq!(map.bytes_of(lane, range), bytes, "{range} in lane {lane}");
            }
        }
        for lane in 0..8 {
            for part in map.of_lane(LaneId(lane), range) {
                assert_eq!(map.lane_of(part.start), LaneId(lane));
            }
        }
    }
}

#[cfg(test)]
mod map_tests;
#[cfg(test)]
mod state_tests;
