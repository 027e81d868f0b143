//! Reclaim of a lane's oldest segment: its records are removed from the index.
//!
//! Invariants: records are removed in the order of the log, so the content of an older record never becomes visible again.
//!
//! Elsewhere: which segment is reclaimed, and the new tail (`worker::reclaim`).

use super::{
    LaneState, LogSegment, blocks,
    index::{Found, PARTS},
};
use crate::{Environment, base::Base, position::Location};
use alloc::vec::Vec;
use cbd_format::{Record, RecordClass, RecordKind};
use cbd_types::{ByteRange, CHECKSUM_BLOCK};

/// A block that was read since it was written, or adjacent blocks of a record that are kept: reclaim appends them again.
pub(crate) struct Chance {
    pub location: Location,
    pub record: Record,
    pub range: ByteRange,
    /// It stays whether it was read or not: it is pinned, or the cache has no more metadata than it keeps.
    pub is_kept: bool,
    /// The class with which they are appended.
    pub class: RecordClass,
}

/// Kept blocks that are appended again in one record.
const KEPT_MAX: u64 = 16 * CHECKSUM_BLOCK;

/// What reclaim may append again of a segment.
pub(crate) struct Chances {
    /// Bytes of them.
    pub left: u64,
    /// Whether blocks that were read, and metadata, get a chance at this moment.
    pub of_read: bool,
    /// Whether pinned blocks, and metadata that the cache keeps, get one.
    pub of_kept: bool,
    /// What of the metadata gets one.
    pub of_metadata: OfMetadata,
}

/// What reclaim may append again of the metadata in a segment.
#[derive(Clone, Copy)]
pub(crate) struct OfMetadata {
    /// Bytes that may leave the cache, which has so much more than its minimum; all without a minimum.
    pub above: u64,
    /// Whether those get a chance as other data does, and one pass more if no client has read them: the cache has at most its
    /// maximum.
    pub has_chances: bool,
}

impl OfMetadata {
    /// Whether a block of metadata stays in any case. If not, it may leave the cache, and is counted.
    fn keeps_block(&mut self) -> bool {
        if self.above < CHECKSUM_BLOCK {
            return true;
        }
        self.above -= CHECKSUM_BLOCK;
        false
    }
}

impl LaneState {
    /// The oldest sealed segment, if the backing device has all of it except what is noted, and the number of sealed segments.
    pub(crate) fn reclaimable(&self, drained: u64) -> Option<(LogSegment, usize)> {
        let tail = self.sealed.front()?;
        let is_clean = tail.last_dirty_epoch <= drained || self.is_settled(tail);
        is_clean.then_some((*tail, self.sealed.len()))
    }

    /// Parked ranges whose records are in `segment`, at most `count`.
    pub(crate) fn parked_in_segment(&self, segment: u32, count: usize) -> Vec<(ByteRange, super::Parked)> {
        self.parked.iter().filter(|(_, parked)| parked.location.segment == segment).take(count).collect()
    }

    /// Loads the index lines of `records`: otherwise each record would wait for its own line.
    pub(crate) fn load_index_lines<E: Environment>(&self, base: &Base<E>, records: &[(Location, Record)]) {
        let keys = records.iter().map(|(_, record)| base.identity().lanes.key(record.range().start));
        core::hint::black_box(self.index.touch_all(keys));
    }

    /// Adds the whole blocks that the record still holds and that are kept, and those that were read since it was written, as
    /// long as `left` suffices, and with them metadata that no client has read. Kept blocks take from it, too.
    pub(crate) fn add_chances<E: Environment>(
        &self,
        base: &Base<E>,
        location: Location,
        record: &Record,
        may: &mut Chances,
        chances: &mut Vec<Chance>,
    ) {
        let is_metadata = record.class().is_metadata();
        let holds_pinned = may.of_kept && self.is_pinned(record.range());
        let may_keep_metadata = may.of_kept && is_metadata;
        if !holds_pinned && !may_keep_metadata && !may.of_read {
            return;
        }
        for (block, first, end) in blocks(record.range()) {
            let range = ByteRange::at(block * CHECKSUM_BLOCK, CHECKSUM_BLOCK);
            let key = base.identity().lanes.key(range.start);
            if (first, end) != (0, PARTS) || !self.is_current(base, range, location) {
                continue;
            }
            let is_kept = (holds_pinned && self.is_pinned(range))
                || (may_keep_metadata && may.of_metadata.keeps_block());
            let was_read = self.index.was_read(key);
            let is_worth = (was_read || record.class() == RecordClass::Metadata)
                && (!is_metadata || may.of_metadata.has_chances);
            let has_chance = may.of_read && may.left >= CHECKSUM_BLOCK && is_worth;
            if !is_kept && !has_chance {
                continue;
            }
            // Metadata that no client reads stays for one pass more than other data.
            let class = match record.class() {
                RecordClass::Metadata if !was_read && !is_kept => RecordClass::MetadataAgain,
                RecordClass::MetadataAgain if was_read => RecordClass::Metadata,
                class => class,
            };
            may.left = may.left.saturating_sub(CHECKSUM_BLOCK);
            match chances.last_mut() {
                Some(last)
                    if is_kept
                        && last.is_kept
                        && last.location == location
                        && last.class == class
                        && last.range.end == range.start
                        && last.range.len() < KEPT_MAX =>
                {
                    last.range.end = range.end;
                }
                _ => chances.push(Chance { location, record: *record, range, is_kept, class }),
            }
        }
    }

    /// Notes that `block` was appended again.
    pub(crate) fn note_chance<E: Environment>(&mut self, base: &Base<E>, block: ByteRange) {
        self.index.note_chance(base.identity().lanes.key(block.start));
    }

    /// The first adjacent blocks of `range` for which [`is_current`](Self::is_current) holds.
    pub(crate) fn first_current<E: Environment>(
        &self,
        base: &Base<E>,
        range: ByteRange,
        location: Location,
    ) -> Option<ByteRange> {
        let is_current = |block: &ByteRange| self.is_current(base, *block, location);
        let mut blocks = range.split_at_multiples(CHECKSUM_BLOCK).skip_while(|block| !is_current(block));
        let first = blocks.next()?;
        let end = blocks.take_while(is_current).last().map_or(first.end, |last| last.end);
        Some(ByteRange { start: first.start, end })
    }

    /// Whether all of a block is at `location`, and nothing was zeroed or damaged since.
    pub(crate) fn is_current<E: Environment>(
        &self,
        base: &Base<E>,
        block: ByteRange,
        location: Location,
    ) -> bool {
        self.index.get(base.identity().lanes.key(block.start)) == Some(Found::Whole(location))
            && (self.overlay.is_empty()
                || self.overlay.later_than(block, Some(base.place_of(location))).next().is_none())
    }

    /// Removes a record of the segment `ordinal` from index and overlay.
    pub(crate) fn take_out<E: Environment>(
        &mut self,
        base: &Base<E>,
        ordinal: u64,
        location: Location,
        record: &Record,
    ) {
        let range = record.range();
        match record.kind() {
            RecordKind::Write | RecordKind::Fill | RecordKind::ParkedWrite | RecordKind::WriteThrough => {
                for (block, _, _) in blocks(range) {
                    let key = base.identity().lanes.key(block * CHECKSUM_BLOCK);
                    if self.index.remove_at(key, location) {
                        // It was read again and again before: it is worth its place at its next miss.
                        self.admission.note_eviction(key);
                    }
                }
            }
            RecordKind::WriteZeroes | RecordKind::Discard | RecordKind::ParkedZeroes => {
                self.overlay.forget_zeroes(range, (ordinal, location.slot));
            }
            // A quarantine is carried forward once all records of the segment are processed. What an invalidation removed has left
            // the index, and the log: it was older.
            RecordKind::Quarantine | RecordKind::Invalidate => {}
        }
    }

    /// Removes everything of a segment from index and overlay at once.
    pub(crate) fn take_out_all(&mut self, segment: &LogSegment) {
        self.index.remove_segment(segment.segment);
        self.overlay.forget_segment(segment.ordinal);
    }

    /// The first sequence number of the log once its oldest segment is removed.
    pub(crate) fn first_sequence_behind_tail(&self) -> u64 {
        self.segments().nth(1).map_or(self.next_sequence, |next| next.first_sequence)
    }

    /// Removes the oldest sealed segment from the lane.
    pub(crate) fn remove_tail(&mut self) {
        self.sealed.pop_front();
    }
}
