//! Reads the records of one segment in slot order. Loads several lines at a time, for callers that read many.
//!
//! Invariants: a returned record is the one that [`Base::find_record`] returns; no line from `end` on is loaded, since a thread
//! may be storing there.
//!
//! Elsewhere: the meaning of the records.

use super::Base;
use crate::{Environment, position::Location};
use alloc::vec::Vec;
use cbd_format::{PAGE, Record, RecordPlace, SegmentShape, record::line_at};
use cbd_types::LaneId;
use core::ops::Range;

/// Number of lines in a page.
const LINES: u32 = SegmentShape::SLOTS_PER_PAGE;

/// A reader of a segment's records.
pub(crate) struct Records {
    segment: u32,
    base: u64,
    /// The place of the lines, except for the slot.
    place: RecordPlace,
    generation: u32,
    /// The lane whose log holds the segment.
    lane: LaneId,
    /// The first slot that is not read.
    end: u32,
    /// Slots whose first copies are in `lines`.
    loaded: Range<u32>,
    /// Number of lines to load next. A caller that reads one record loads one line; a caller that continues loads pages.
    ahead: u32,
    /// One page, allocated on first use; empty if the allocation failed.
    lines: Vec<u8>,
}

impl<E: Environment> Base<E> {
    /// A reader of the records in the slots of `segment` before `end`, into which no thread stores.
    pub(crate) fn records_of(&self, segment: u32, end: u32) -> Records {
        let runtime = self.segment(segment);
        Records {
            segment,
            base: runtime.base(),
            place: runtime.place(0),
            generation: runtime.generation(),
            lane: runtime.lane(),
            end: end.min(self.shape().slots_max()),
            loaded: 0..0,
            ahead: 1,
            lines: Vec::new(),
        }
    }

    /// The record in `slot`, if there is one.
    pub(crate) fn record_of(&self, records: &mut Records, slot: u32) -> Option<Record> {
        if slot >= records.end {
            return None;
        }
        if !records.loaded.contains(&slot) {
            self.load_lines(records, slot);
        }
        if records.ahead == LINES && slot + LINES < records.end {
            let [next, _] = self.shape().slot(slot + LINES);
            self.region().prefetch(records.base + next);
        }
        match self.first_copy(records, slot) {
            Some(record) => Some(*record),
            None => self.find_record(Location { segment: records.segment, slot }),
        }
    }

    /// The valid records from `slot` on whose first copies are in one page, each with its slot. Stops at the first copy that is
    /// not valid: the record may have a second copy. Calls `found` for each record before it verifies the next.
    pub(crate) fn good_records<'a>(
        &self,
        records: &'a mut Records,
        slot: u32,
        found: impl Fn(&Record),
    ) -> Vec<(u32, &'a Record)> {
        let mut good = Vec::with_capacity(LINES as usize);
        if slot >= records.end {
            return good;
        }
        records.ahead = LINES;
        self.load_lines(records, slot);
        let records = &*records;
        let mut slot = slot;
        while let Some(record) = self.first_copy(records, slot) {
            found(record);
            good.push((slot, record));
            slot += record.slots();
        }
        good
    }

    /// The slot of the next readable record behind `lost`, at any distance: a failed page pair takes 64 slots at once. `end` if
    /// there is none.
    pub(crate) fn next_readable(&self, lost: Location, end: u32) -> u32 {
        (lost.slot + 1..end)
            .find(|slot| self.find_record(Location { slot: *slot, ..lost }).is_some())
            .unwrap_or(end)
    }

    /// The record in `slot`, if its first copy is loaded and valid.
    fn first_copy<'a>(&self, records: &'a Records, slot: u32) -> Option<&'a Record> {
        if !records.loaded.contains(&slot) {
            return None;
        }
        let line = line_at(&records.lines, (slot - records.loaded.start) as usize)?;
        let place = RecordPlace { slot, ..records.place };
        let record = Record::decode_in_place(line).verify(&place, records.generation, self.shape().size)?;
        self.accepts(records.lane, record).then_some(record)
    }

    fn load_lines(&self, records: &mut Records, slot: u32) {
        if records.lines.is_empty() {
            if records.lines.try_reserve_exact(PAGE as usize).is_err() {
                // The records are read one at a time.
                return;
            }
            records.lines.resize(PAGE as usize, 0);
        }
        let in_page = LINES - slot % LINES;
        let count = records.ahead.min(in_page).min(records.end - slot);
        let [first, _] = self.shape().slot(slot);
        let into = &mut records.lines[..count as usize * 64];
        if self.region().load(records.base + first, into).is_ok() {
            records.loaded = slot..slot + count;
            records.ahead = (records.ahead * 4).min(LINES);
        } else {
            // Read one line at a time past the failed ones.
            records.loaded = 0..0;
            records.ahead = 1;
        }
    }
}

#[cfg(test)]
mod tests;
