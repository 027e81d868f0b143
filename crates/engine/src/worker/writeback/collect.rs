//! Collects a part of a batch: scans the logs for data that the backing device lacks.
//!
//! Invariants:
//! - a scan advances a lane's cursor only past records that are in the batch, are clean, or stay marked bad or parked;
//! - only the newest version of each block in a part is kept, so no two ranges of a part overlap;
//! - an unreadable record is quarantined, durably, before the scan counts as having passed it.
//!
//! Elsewhere: when a batch begins, and up to which epoch (`writeback`).

use super::{Content, NO_SPACE_TO_NOTE, Writeback, newest::Found, requests::ZERO_MAX};
use crate::{
    Cache, Environment,
    base::Requester,
    cache::Met,
    position::{Cursor, Location, Place},
};
use alloc::vec::Vec;
use cbd_format::{Record, RecordKind};
use cbd_types::{ByteRange, LaneId};
use core::ops::ControlFlow;

/// Most records in one part of a batch; bounds the memory that a batch uses.
const PART_RECORDS_MAX: usize = 128 << 10;

impl Writeback {
    /// The oldest epoch of a dirty record.
    pub(super) fn oldest_epoch<E: Environment>(&mut self, cache: &Cache<E>) -> Option<u64> {
        let mut oldest = None;
        for lane in (0..cache.lanes().len() as u32).map(LaneId) {
            let mut cursor = self.cursors[lane.index()];
            cache.scan_log(lane, &mut cursor, &mut |_, met, _| {
                let epoch = match met {
                    Met::Record(record) if !record.kind().awaits_flush() => return ControlFlow::Continue(()),
                    Met::Record(record) => record.epoch.get(),
                    // An unreadable record is handled when it is collected; it counts as being of the oldest possible epoch.
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

    /// The priority with which this batch allocates space for quarantines and parked ranges. Unless it is written
    /// segment by segment or retries parked ranges, it leaves the reserve.
    pub(super) fn requester_of_notes(&self) -> Requester {
        let is_of_parked = self.batch.as_ref().is_some_and(|batch| batch.target.is_none());
        if self.by_segment.is_some() || is_of_parked { Requester::Essential } else { Requester::Frugal }
    }

    /// Collects the next part of the batch from the logs: only the newest version of each block in it.
    pub(super) fn collect<E: Environment>(&mut self, cache: &Cache<E>) {
        let requester = self.requester_of_notes();
        let Some(batch) = &mut self.batch else { return };
        let Some(target) = batch.target else { return };
        let mut part =
            Part { target, by_segment: self.by_segment.is_some(), found: Found::default(), records: 0 };
        batch.complete = true;
        batch.settled = false;
        let lanes = cache.lanes().len() as u32;
        let first = if part.by_segment { self.lane_first } else { 0 };
        for number in 0..lanes {
            let lane = LaneId((first + number) % lanes);
            let cleaned = &mut batch.cleaned[lane.index()];
            let scanned = part.scan_lane(cache, lane, &mut self.cursors[lane.index()], cleaned);
            let has_lost = !scanned.lost.is_empty();
            batch.lacks_something |= has_lost;
            // The lanes share the reserve, so a part that may use it needs room in one lane only.
            let is_only_lane = part.by_segment && (part.records > 0 || has_lost);
            if is_only_lane {
                self.lane_first = lane.0;
            }
            if !quarantine_gaps(cache, lane, scanned.lost, requester) {
                return self.give_up(cache, NO_SPACE_TO_NOTE);
            }
            if scanned.is_full || (is_only_lane && number + 1 < lanes) {
                batch.complete = false;
                break;
            }
        }
        let newest = part.found.newest();
        if self.failing.has_known() {
            batch.pieces.extend(newest.into_iter().flat_map(|piece| self.failing.cut_at_known(piece)));
        } else {
            batch.pieces.extend(newest);
        }
    }
}

/// A part of a batch while it is being collected.
struct Part {
    /// The last epoch of the batch.
    target: u64,
    /// The part consists of a single segment of one lane.
    by_segment: bool,
    found: Found,
    /// Number of records in `found`.
    records: usize,
}

/// The result of scanning one lane.
struct Scanned {
    /// The part accepts no more records; the lane may have more.
    is_full: bool,
    /// Lost records, with the last sequence number of each gap.
    lost: Vec<(u64, Place)>,
}

impl Part {
    /// Adds the records of a lane's log from `cursor` on, as far as the part has space, and moves the cursor behind them.
    /// `cleaned`: the bytes and records of the lane that become clean with the batch.
    fn scan_lane<E: Environment>(
        &mut self,
        cache: &Cache<E>,
        lane: LaneId,
        cursor: &mut Cursor,
        cleaned: &mut (u64, u64),
    ) -> Scanned {
        let mut scanned = Scanned { is_full: false, lost: Vec::new() };
        // The only segment of the part, if the batch is written segment by segment.
        let mut only = None;
        let has_superseded = cache.lane(lane).lock().has_superseded();
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
            if record.kind() == RecordKind::WriteThrough && cache.lane(lane).lock().is_written_through(record)
            {
                // The flush of the batch covers it.
                return ControlFlow::Continue(());
            }
            if self.records >= PART_RECORDS_MAX {
                scanned.is_full = true;
                return ControlFlow::Break(());
            }
            if record.kind().is_dirty() {
                cleaned.1 += 1;
                cleaned.0 += if record.kind().has_data() { record.length.get() } else { 0 };
            }
            if has_superseded {
                let parts = cache.lane(lane).lock().not_superseded(record);
                parts.into_iter().for_each(|part| self.add(cache, lane, part, content));
            } else {
                self.add(cache, lane, record.range(), content);
            }
            ControlFlow::Continue(())
        });
        scanned
    }

    fn add<E: Environment>(&mut self, cache: &Cache<E>, lane: LaneId, range: ByteRange, content: Content) {
        if let Content::Data { .. } = content {
            self.records += 1;
            self.found.add(range, content);
        } else {
            let parts = cache.base().identity().lanes.of_lane(lane, range);
            for part in parts.flat_map(|part| part.split_at_multiples(ZERO_MAX)) {
                self.records += 1;
                self.found.add(part, content);
            }
        }
    }
}

/// The content that a record of a lane gives its range on the backing device; `None` if the record needs no writeback.
fn content_of(record: &Record, location: Location, lane: LaneId) -> Option<Content> {
    match record.kind() {
        RecordKind::Write | RecordKind::WriteThrough => {
            Some(Content::Data { location, lane, sequence: record.sequence.get() })
        }
        RecordKind::WriteZeroes => Some(Content::Zeroes),
        RecordKind::Discard => Some(Content::Discard),
        RecordKind::Fill
        | RecordKind::Quarantine
        | RecordKind::ParkedWrite
        | RecordKind::ParkedZeroes
        | RecordKind::Invalidate => None,
    }
}

/// Quarantines the gaps of a lane, durably. Returns `false` if there was no space for one of them.
fn quarantine_gaps<E: Environment>(
    cache: &Cache<E>,
    lane: LaneId,
    lost: Vec<(u64, Place)>,
    requester: Requester,
) -> bool {
    let whole = ByteRange { start: 0, end: cache.base().size() };
    let mut noted = true;
    // The last gap first: its quarantine also marks all earlier gaps bad, so only this one takes space.
    for (sequence, place) in lost.into_iter().rev() {
        noted &= cache.quarantine(lane, whole, sequence, place, requester);
        cache.base().epochs().void_until_now(cache.base().context());
    }
    noted
}
