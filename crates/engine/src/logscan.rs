//! Walks through the log of a lane, past what is damaged.

use crate::{Cache, Environment, index::Location, overlay::Place};
use alloc::vec::Vec;
use cbd_format::Record;
use cbd_types::LaneId;
use core::ops::ControlFlow;

/// What is called for each record of a log; a record of which both copies are damaged is `None`.
type Visit<'a> = dyn FnMut(Location, Option<&Record>, Place) -> ControlFlow<()> + 'a;

/// A place in a lane's log: where collecting goes on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(crate) struct Cursor {
    pub(crate) ordinal: u64,
    pub(crate) slot: u32,
}

impl<E: Environment> Cache<E> {
    /// Visits the records of a lane's log from `cursor` on, and moves it behind the last one for which `visit` went on. A
    /// record of which both copies are damaged is given as `None`.
    pub(crate) fn scan_log(&self, lane: LaneId, cursor: &mut Cursor, visit: &mut Visit<'_>) {
        let drained = self.drained_epoch().0;
        let segments: Vec<_> = {
            let state = self.lanes[lane.index()].state.lock();
            state.segments().filter(|segment| segment.ordinal >= cursor.ordinal).copied().collect()
        };
        for segment in segments {
            if segment.ordinal > cursor.ordinal {
                *cursor = Cursor { ordinal: segment.ordinal, slot: 0 };
            }
            if segment.last_dirty_epoch <= drained {
                // Only fills, and what the backing device has.
                cursor.slot = cursor.slot.max(segment.slots);
                continue;
            }
            let mut records = self.records_of(segment.segment, segment.slots);
            while cursor.slot < segment.slots {
                let location = Location { segment: segment.segment, slot: cursor.slot };
                let record = self.record_of(&mut records, cursor.slot);
                let next = match &record {
                    Some(record) => cursor.slot + record.slots(),
                    None => self.next_readable(location, segment.slots),
                };
                // Several records may be lost together: what is condemned at the last of their places is all of
                // them, and nothing behind.
                let place = (segment.ordinal, if record.is_some() { cursor.slot } else { next - 1 });
                if visit(location, record.as_ref(), place).is_break() {
                    return;
                }
                cursor.slot = next;
            }
        }
    }

    /// The slot of the next record behind `lost` that can be read, however far: a failed page pair takes 64 slots at once.
    /// `end` where there is none.
    pub(crate) fn next_readable(&self, lost: Location, end: u32) -> u32 {
        (lost.slot + 1..end)
            .find(|slot| self.find_record(Location { slot: *slot, ..lost }).is_some())
            .unwrap_or(end)
    }
}
