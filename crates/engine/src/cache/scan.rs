//! Scans the log of a lane, past damaged records.

use super::Cache;
use crate::{
    Environment,
    position::{Cursor, Location, Place},
};
use alloc::vec::Vec;
use cbd_format::Record;
use cbd_types::LaneId;
use core::ops::ControlFlow;

/// What a scan finds at a position.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Met<'a> {
    Record(&'a Record),
    /// Both copies of one or more records are damaged.
    Lost {
        /// Sequence number of the last of them.
        last_sequence: u64,
    },
}

/// The callback for each record of a log, and for each gap.
type Visit<'a> = dyn FnMut(Location, Met<'_>, Place) -> ControlFlow<()> + 'a;

impl<E: Environment> Cache<E> {
    /// Calls `visit` for the records of a lane's log from `cursor` on, and moves the cursor behind the last one for which `visit`
    /// returned `Continue`.
    pub(crate) fn scan_log(&self, lane: LaneId, cursor: &mut Cursor, visit: &mut Visit<'_>) {
        let base = self.base();
        let drained = base.drained_epoch().0;
        let (segments, next_sequence): (Vec<_>, u64) = {
            let state = self.lane(lane).lock();
            let segments = state.segments().filter(|segment| segment.ordinal >= cursor.ordinal);
            (segments.copied().collect(), state.next_sequence())
        };
        for (number, segment) in segments.iter().enumerate() {
            if segment.ordinal > cursor.ordinal {
                *cursor = Cursor { ordinal: segment.ordinal, slot: 0 };
            }
            if segment.last_dirty_epoch <= drained {
                // The segment has only fills, and records that the backing device has.
                cursor.slot = cursor.slot.max(segment.slots);
                continue;
            }
            let mut records = base.records_of(segment.segment, segment.slots);
            while cursor.slot < segment.slots {
                let location = Location { segment: segment.segment, slot: cursor.slot };
                let next = if let Some(record) = base.record_of(&mut records, cursor.slot) {
                    let place = (segment.ordinal, cursor.slot);
                    if visit(location, Met::Record(&record), place).is_break() {
                        return;
                    }
                    cursor.slot + record.slots()
                } else {
                    let next = base.next_readable(location, segment.slots);
                    // The sequence number of the next record shows where the gap ends, however often the log is scanned.
                    let behind = base.find_record(Location { slot: next, ..location });
                    let behind = behind.filter(|_| next < segment.slots).map(|record| record.sequence.get());
                    let end = behind
                        .or_else(|| Some(segments.get(number + 1)?.first_sequence))
                        .unwrap_or(next_sequence);
                    // Several records may be lost together: a quarantine at the position of the last one marks all of them bad,
                    // and no later record.
                    let place = (segment.ordinal, next - 1);
                    if visit(location, Met::Lost { last_sequence: end - 1 }, place).is_break() {
                        return;
                    }
                    next
                };
                cursor.slot = next;
            }
        }
    }
}
