//! What of a batch is to be done: the logs are scanned for what the backing device lacks.
//!
//! Always true here:
//! - a scan moves a lane's cursor only past what is in the batch, is clean, or stays marked bad or parked;
//! - only the newest version of each block within a part is kept, so nothing of a part overlaps;
//! - a record that cannot be read is quarantined, durably, before the scan counts as having passed it.
//!
//! Left to others: when a batch begins, and up to which epoch (`writeback`).

use super::{Content, Writeback, newest::Found};
use crate::{
    Cache, Environment,
    base::Asker,
    cache::Met,
    position::{Cursor, Location, Place},
};
use alloc::vec::Vec;
use cbd_format::{Record, RecordKind};
use cbd_types::{ByteRange, LaneId};
use core::ops::ControlFlow;

/// Most records that one part of a batch is made of; bounds the memory that a batch takes.
const PART_RECORDS_MAX: usize = 128 << 10;

impl Writeback {
    /// The oldest epoch that the backing device must still learn of.
    pub(super) fn oldest_epoch<E: Environment>(&mut self, cache: &Cache<E>) -> Option<u64> {
        let mut oldest = None;
        for lane in (0..cache.lanes().len() as u32).map(LaneId) {
            let mut cursor = self.cursors[lane.index()];
            cache.scan_log(lane, &mut cursor, &mut |_, met, _| {
                let epoch = match met {
                    Met::Record(record) if !record.kind().is_dirty() => return ControlFlow::Continue(()),
                    Met::Record(record) => record.epoch.get(),
                    // What cannot be read is dealt with when it is collected, with the oldest epoch there is.
                    Met::Lost { .. } => cache.drained_epoch().0 + 1,
                };
                oldest = Some(oldest.map_or(epoch, |known: u64| known.min(epoch)));
                ControlFlow::Break(())
            });
            self.cursors[lane.index()] = cursor;
        }
        if oldest.is_none() {
            self.safe.clone_from(&self.cursors);
            let drained = cache.drained_epoch().0;
            cache.lanes().iter().for_each(|lane| lane.forget_dirty_that_was_lost(drained));
        }
        oldest
    }

    /// Who asks for room for what this batch finds damaged: while it does not go segment by segment, it leaves what is kept back.
    pub(super) fn asker_of_notes(&self) -> Asker {
        let is_of_parked = self.batch.as_ref().is_some_and(|batch| batch.target.is_none());
        if self.by_segment.is_some() || is_of_parked { Asker::Essential } else { Asker::Frugal }
    }

    /// Collects the next part of the batch from the logs: only the newest version of each block within it.
    pub(super) fn collect<E: Environment>(&mut self, cache: &Cache<E>) {
        let asker = self.asker_of_notes();
        let Some(batch) = &mut self.batch else { return };
        let Some(target) = batch.target else { return };
        let mut part =
            Part { target, by_segment: self.by_segment.is_some(), found: Found::default(), records: 0 };
        batch.complete = true;
        batch.settled = false;
        for lane in (0..cache.lanes().len() as u32).map(LaneId) {
            let cleaned = &mut batch.cleaned[lane.index()];
            let scanned = part.scan_lane(cache, lane, &mut self.cursors[lane.index()], cleaned);
            batch.lacks_something |= !scanned.lost.is_empty();
            if !note_gaps(cache, lane, scanned.lost, asker) {
                return self.give_up(cache);
            }
            if scanned.is_full {
                batch.complete = false;
                break;
            }
        }
        let newest = part.found.newest();
        if self.failing.knows_any() {
            batch.pieces.extend(newest.into_iter().flat_map(|piece| self.failing.cut_at_known(piece)));
        } else {
            batch.pieces.extend(newest);
        }
    }
}

/// A part of a batch while it is collected.
struct Part {
    /// The last epoch of the batch.
    target: u64,
    /// The part has one segment only.
    by_segment: bool,
    found: Found,
    /// Records in `found`.
    records: usize,
}

/// What the scan of one lane came to.
struct Scanned {
    /// The part takes no more records; the lane may have some.
    is_full: bool,
    /// Lost records, with the last sequence number of each gap.
    lost: Vec<(u64, Place)>,
}

impl Part {
    /// Adds what a lane's log holds from `cursor` on, as far as the part has room, and moves the cursor behind it. `cleaned`: the
    /// bytes and records of the lane that become clean with the batch.
    fn scan_lane<E: Environment>(
        &mut self,
        cache: &Cache<E>,
        lane: LaneId,
        cursor: &mut Cursor,
        cleaned: &mut (u64, u64),
    ) -> Scanned {
        let mut scanned = Scanned { is_full: false, lost: Vec::new() };
        // The only segment of the part, where it goes segment by segment.
        let mut only = None;
        cache.scan_log(lane, cursor, &mut |location, met, place| {
            if self.by_segment && *only.get_or_insert(place.0) != place.0 {
                scanned.is_full = true;
                return ControlFlow::Break(());
            }
            let record = match met {
                Met::Record(record) => record,
                Met::Lost { last_sequence } => {
                    scanned.lost.push((last_sequence, place));
                    return ControlFlow::Continue(());
                }
            };
            if record.epoch.get() > self.target {
                return ControlFlow::Break(());
            }
            let Some(content) = content_of(record, location, lane) else { return ControlFlow::Continue(()) };
            if self.records >= PART_RECORDS_MAX {
                scanned.is_full = true;
                return ControlFlow::Break(());
            }
            self.add(cache, lane, record.range(), content, cleaned);
            ControlFlow::Continue(())
        });
        scanned
    }

    fn add<E: Environment>(
        &mut self,
        cache: &Cache<E>,
        lane: LaneId,
        range: ByteRange,
        content: Content,
        cleaned: &mut (u64, u64),
    ) {
        cleaned.1 += 1;
        if let Content::Data { .. } = content {
            cleaned.0 += range.len();
            self.records += 1;
            self.found.add(range, content);
        } else {
            for part in cache.base().identity().lanes.of_lane(lane, range) {
                self.records += 1;
                self.found.add(part, content);
            }
        }
    }
}

/// What a record of a lane becomes on the backing device; `None` where the device needs nothing of it.
fn content_of(record: &Record, location: Location, lane: LaneId) -> Option<Content> {
    match record.kind() {
        RecordKind::Write => Some(Content::Data { location, lane, sequence: record.sequence.get() }),
        RecordKind::WriteZeroes => Some(Content::Zeroes),
        RecordKind::Discard => Some(Content::Discard),
        RecordKind::Fill | RecordKind::Quarantine | RecordKind::ParkedWrite | RecordKind::ParkedZeroes => {
            None
        }
    }
}

/// Quarantines the gaps of a lane, durably. `false` when one of them found no room.
fn note_gaps<E: Environment>(cache: &Cache<E>, lane: LaneId, lost: Vec<(u64, Place)>, asker: Asker) -> bool {
    let whole = ByteRange { start: 0, end: cache.base().identity().size };
    let mut noted = true;
    // The last one first: it marks bad all that those before it do, and is the only one that takes room.
    for (sequence, place) in lost.into_iter().rev() {
        noted &= cache.quarantine(lane, whole, sequence, place, asker);
        cache.base().epochs().void_until_now(cache.base().context());
    }
    noted
}
