//! The records of one segment in the order of its slots, for whoever reads many: their lines are loaded together.
//!
//! Always true here: what is given is what [`Base::find_record`] gives; no line from `end` on is loaded, since somebody may be
//! storing there.
//!
//! Left to others: what the records mean.

use super::Base;
use crate::{Environment, position::Location};
use alloc::vec::Vec;
use cbd_format::{PAGE, Record, RecordPlace, SegmentShape, record::line_at};
use core::ops::Range;

/// Lines in a page.
const LINES: u32 = SegmentShape::SLOTS_PER_PAGE;

/// A reader of a segment's records.
pub(crate) struct Records {
    segment: u32,
    base: u64,
    /// Where the lines stand, but for the slot.
    place: RecordPlace,
    generation: u32,
    /// The first slot that does not count.
    end: u32,
    /// Slots whose first copies are in `lines`.
    loaded: Range<u32>,
    /// How many are loaded next. Who wants one record loads one line; who goes on loads pages.
    ahead: u32,
    /// A page once it is needed; empty where the memory for one was refused.
    lines: Vec<u8>,
}

impl<E: Environment> Base<E> {
    /// A reader of the records in the slots of `segment` before `end`, which nobody stores into.
    pub(crate) fn records_of(&self, segment: u32, end: u32) -> Records {
        let runtime = self.segment(segment);
        Records {
            segment,
            base: runtime.base(),
            place: runtime.place(0),
            generation: runtime.generation(),
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

    /// Records from `slot` on whose first copies stand in one page and are good, each with its slot. They end where one is not:
    /// it may have a second copy. `found` is called for each before the next is looked at.
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

    /// The slot of the next record behind `lost` that can be read, however far: a failed page pair takes 64 slots at once.
    /// `end` where there is none.
    pub(crate) fn next_readable(&self, lost: Location, end: u32) -> u32 {
        (lost.slot + 1..end)
            .find(|slot| self.find_record(Location { slot: *slot, ..lost }).is_some())
            .unwrap_or(end)
    }

    /// The record in `slot`, if its first copy is loaded and good.
    fn first_copy<'a>(&self, records: &'a Records, slot: u32) -> Option<&'a Record> {
        if !records.loaded.contains(&slot) {
            return None;
        }
        let line = line_at(&records.lines, (slot - records.loaded.start) as usize)?;
        let place = RecordPlace { slot, ..records.place };
        let record = Record::decode_in_place(line).verify(&place, records.generation, self.shape().size)?;
        self.accepts(record).then_some(record)
    }

    fn load_lines(&self, records: &mut Records, slot: u32) {
        if records.lines.is_empty() {
            if records.lines.try_reserve_exact(PAGE as usize).is_err() {
                // The records are read one by one.
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
            // One by one past the failed ones.
            records.loaded = 0..0;
            records.ahead = 1;
        }
    }
}

#[cfg(test)]
mod tests;
