//! The log as recovery left it, for tools that inspect it: `check`, `dump`, `repair`.
//!
//! Invariants: nothing is stored and nothing changes; the results come from the engine's own readers, so a tool that runs
//! recovery on a private copy of a region sees what a daemon would see.
//!
//! Elsewhere: the bytes themselves and their copies (`cbd-format`), messages for users (the tools).

use super::Cache;
use crate::{
    Environment,
    lane::{LogSegment, Source},
    position::Location,
};
use alloc::{vec, vec::Vec};
use cbd_format::{Record, RecordPlace, SegmentShape, record::blocks_in};
use cbd_types::{ByteRange, CHUNK, Error, LaneId, Ordinal, SegmentId, Sequence};

/// A segment of a lane's log as recovery left it.
#[derive(Clone, Copy, Debug)]
pub struct LogSegmentView {
    /// The lane that it belongs to.
    pub lane: LaneId,
    /// Its number on the transport.
    pub segment: SegmentId,
    /// Its first byte in the region.
    pub base: u64,
    /// Its position in the history of the lane.
    pub ordinal: Ordinal,
    /// Sequence number of its first record.
    pub first_sequence: Sequence,
    /// Slots in use; later slots are not part of the log.
    pub slots: u32,
    /// Generation of its records.
    pub generation: u32,
    /// The last epoch of a record in the segment that needs writeback; 0 if there is none.
    pub last_dirty_epoch: u64,
    /// The cache's own number of the segment.
    number: u32,
}

/// The content of a slot of a log.
#[derive(Clone, Copy, Debug)]
pub enum LogEntry {
    /// A record.
    Record(Record),
    /// Both copies of the records from here up to the slot `end` are damaged.
    Lost {
        /// The first slot behind the damaged ones.
        end: u32,
    },
}

impl<E: Environment> Cache<E> {
    /// Number of lanes.
    pub const fn lane_count(&self) -> u32 {
        self.base().identity().lanes.lanes
    }

    /// The log, for tools.
    pub const fn log(&self) -> LogView<'_, E> {
        LogView(self)
    }
}

/// The log of a cache, for tools.
#[derive(Debug)]
pub struct LogView<'a, E: Environment>(&'a Cache<E>);

impl<E: Environment> Clone for LogView<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E: Environment> Copy for LogView<'_, E> {}

impl<E: Environment> LogView<'_, E> {
    /// The shape of its segments.
    pub fn shape(self) -> SegmentShape {
        self.0.base().shape()
    }

    /// The log of a lane from tail to head.
    ///
    /// # Panics
    /// If the lane does not exist.
    pub fn segments(&self, lane: LaneId) -> Vec<LogSegmentView> {
        let state = self.0.lane(lane).lock();
        state.segments().map(|segment| self.view_of(lane, segment)).collect()
    }

    fn view_of(&self, lane: LaneId, segment: &LogSegment) -> LogSegmentView {
        let runtime = self.0.base().segment(segment.segment);
        LogSegmentView {
            lane,
            segment: runtime.id(),
            base: runtime.base(),
            ordinal: Ordinal(segment.ordinal),
            first_sequence: Sequence(segment.first_sequence),
            slots: segment.slots,
            generation: runtime.generation(),
            last_dirty_epoch: segment.last_dirty_epoch,
            number: segment.segment,
        }
    }

    /// The sequence number that the next record of a lane will have.
    ///
    /// # Panics
    /// If the lane does not exist.
    pub fn next_sequence(&self, lane: LaneId) -> Sequence {
        Sequence(self.0.lane(lane).lock().next_sequence())
    }

    /// The number of misses in a lane whose fills were neither completed nor cancelled.
    ///
    /// # Panics
    /// If the lane does not exist.
    pub fn pending_fills(&self, lane: LaneId) -> usize {
        self.0.lane(lane).lock().pending_fills()
    }

    /// The number of reads that have pinned the segment: it is not reused before they end.
    pub fn readers(&self, segment: &LogSegmentView) -> u32 {
        self.0.base().segment(segment.number).readers()
    }

    /// The seed of the checksum of a line in `slot`.
    pub fn place(&self, segment: &LogSegmentView, slot: u32) -> RecordPlace {
        self.0.base().segment(segment.number).place(slot)
    }

    /// The record in `slot`, from either valid copy. A slot behind the segment's last one returns a record that recovery dropped,
    /// if the slot holds one.
    pub fn record(&self, segment: &LogSegmentView, slot: u32) -> Option<Record> {
        if slot >= self.0.base().shape().slots_max() {
            return None;
        }
        self.0.base().find_record(Location { segment: segment.number, slot })
    }

    /// Whether the range of `record` lies on the device and belongs to the segment's lane: the check that the engine makes of
    /// every record that it reads.
    pub fn accepts(&self, segment: &LogSegmentView, record: &Record) -> bool {
        let base = self.0.base();
        base.accepts(base.segment(segment.number).lane(), record)
    }

    /// Calls `give` for each slot of a segment at which a record or a gap begins, in order.
    pub fn visit(&self, segment: &LogSegmentView, give: &mut dyn FnMut(u32, LogEntry)) {
        let mut slot = 0;
        while slot < segment.slots {
            let location = Location { segment: segment.number, slot };
            let entry = match self.0.base().find_record(location) {
                Some(record) => LogEntry::Record(record),
                None => LogEntry::Lost { end: self.0.base().next_readable(location, segment.slots) },
            };
            give(slot, entry);
            slot = match entry {
                LogEntry::Record(record) => slot + record.slots(),
                LogEntry::Lost { end } => end,
            };
        }
    }

    /// The damaged checksum blocks of a record's data, each with its error.
    pub fn damaged_blocks(
        &self,
        segment: &LogSegmentView,
        slot: u32,
        record: &Record,
    ) -> Vec<(ByteRange, Error)> {
        if !record.kind().has_data() {
            return Vec::new();
        }
        let location = Location { segment: segment.number, slot };
        let mut scratch = vec![0; cbd_types::CHECKSUM_BLOCK as usize];
        let blocks = (0..blocks_in(record.range())).map(|block| record.block_range(block));
        blocks
            .filter_map(|block| {
                let into = scratch.get_mut(..block.len() as usize)?;
                let damage = self.0.base().load_data(location, record, block, into).err()?;
                Some((block, damage.error))
            })
            .collect()
    }

    /// The parts of `range` whose newest bytes are in the record in `slot`.
    pub fn newest_parts(&self, segment: &LogSegmentView, slot: u32, range: ByteRange) -> Vec<ByteRange> {
        let location = Location { segment: segment.number, slot };
        let mut parts = Vec::new();
        for chunk in range.split_at_multiples(CHUNK) {
            let state = self.0.lane_of(chunk.start).lock();
            state.look_up(self.0.base(), chunk, &mut |part, source| {
                if source == Source::Record(location) {
                    parts.push(part);
                }
            });
        }
        parts
    }

    /// Whether the backing device has the content of the record in `slot`: the record was drained, and is not parked.
    pub fn is_on_backing(&self, segment: &LogSegmentView, slot: u32, record: &Record) -> bool {
        let location = Location { segment: segment.number, slot };
        let state = self.0.lane(segment.lane).lock();
        !state.is_parked_at(record.range(), location) && self.0.base().is_clean(record)
    }
}
