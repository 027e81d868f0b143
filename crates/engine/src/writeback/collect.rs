//! What of a batch is to be done: the logs are scanned for what the backing device lacks.
//!
//! Always true here:
//! - a scan moves a lane's cursor only past what is in the batch, is clean, or stays marked bad or parked;
//! - only the newest version of each block within a part is kept, so nothing of a part overlaps;
//! - a record that cannot be read is quarantined, durably, before the scan counts as having passed it.
//!
//! Left to others: when a batch begins, and up to which epoch (`writeback`).

use super::{Content, Writeback, newest::Found};
use crate::{Cache, Environment, drained::void_until_now, logscan::Met, overlay::Place, pool::Asker};
use alloc::vec::Vec;
use cbd_format::RecordKind;
use cbd_types::{ByteRange, LaneId, MutationPoint};
use core::ops::ControlFlow;

/// Most records that one part of a batch is made of; bounds the memory that a batch takes.
const PART_RECORDS_MAX: usize = 128 << 10;

impl Writeback {
    /// The oldest epoch that the backing device must still learn of.
    pub(super) fn oldest_epoch<E: Environment>(&mut self, cache: &Cache<E>) -> Option<u64> {
        let mut oldest = None;
        for lane in (0..cache.lanes.len() as u32).map(LaneId) {
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
            cache.forget_dirty_that_was_lost();
        }
        oldest
    }

    /// Who asks for room for what this batch finds damaged: while it does not go segment by segment, it leaves what is kept back.
    pub(super) fn asker_of_notes(&self) -> Asker {
        let is_of_parked = self.batch.as_ref().is_some_and(|batch| batch.target.is_none());
        if self.by_segment.is_some() || is_of_parked || !MutationPoint::WritebackSettles.is_active() {
            Asker::Essential
        } else {
            Asker::Frugal
        }
    }

    /// Collects the next part of the batch from the logs: only the newest version of each block within it.
    pub(super) fn collect<E: Environment>(&mut self, cache: &Cache<E>) {
        let asker = self.asker_of_notes();
        let by_segment = self.by_segment.is_some();
        let Some(batch) = &mut self.batch else { return };
        let Some(target) = batch.target else { return };
        let mut found = Found::default();
        let mut records = 0;
        batch.complete = true;
        batch.settled = false;
        for lane in (0..cache.lanes.len() as u32).map(LaneId) {
            let cleaned = &mut batch.cleaned[lane.index()];
            let mut cursor = self.cursors[lane.index()];
            let mut full = false;
            // The only segment of the part, where it goes segment by segment.
            let mut only = None;
            // Lost records, with the last sequence number of each gap.
            let mut lost: Vec<(u64, Place)> = Vec::new();
            cache.scan_log(lane, &mut cursor, &mut |location, met, place| {
                if by_segment && *only.get_or_insert(place.0) != place.0 {
                    full = true;
                    return ControlFlow::Break(());
                }
                let record = match met {
                    Met::Record(record) => record,
                    Met::Lost { last_sequence } => {
                        lost.push((last_sequence, place));
                        return ControlFlow::Continue(());
                    }
                };
                let sequence = record.sequence.get();
                if !MutationPoint::WritebackTarget.holds(record.epoch.get() <= target) {
                    return ControlFlow::Break(());
                }
                let range = record.range();
                let content = match record.kind() {
                    RecordKind::Write => Content::Data { location, lane, sequence },
                    RecordKind::WriteZeroes => Content::Zeroes,
                    RecordKind::Discard => Content::Discard,
                    RecordKind::Fill
                    | RecordKind::Quarantine
                    | RecordKind::ParkedWrite
                    | RecordKind::ParkedZeroes => return ControlFlow::Continue(()),
                };
                if records >= PART_RECORDS_MAX {
                    full = true;
                    return ControlFlow::Break(());
                }
                cleaned.1 += 1;
                if let Content::Data { .. } = content {
                    cleaned.0 += range.len();
                    records += 1;
                    found.add(range, content);
                } else {
                    for part in cache.identity.lanes.of_lane(lane, range) {
                        records += 1;
                        found.add(part, content);
                    }
                }
                ControlFlow::Continue(())
            });
            self.cursors[lane.index()] = cursor;
            let whole = ByteRange { start: 0, end: cache.identity.size };
            let mut noted = true;
            // The last one first: it marks bad all that those before it do, and is the only one that takes room.
            for (sequence, place) in lost.into_iter().rev() {
                batch.lacks_something = true;
                if MutationPoint::WritebackLost.is_active() {
                    noted &= cache.quarantine(lane, whole, sequence, place, asker);
                }
                if MutationPoint::WritebackDamageVoid.is_active() {
                    void_until_now(cache);
                }
            }
            if !MutationPoint::WritebackGiveUp.holds(noted) {
                return self.give_up(cache);
            }
            if full {
                batch.complete = false;
                break;
            }
        }
        let newest = found.newest();
        if self.failing.knows_any() {
            batch.pieces.extend(newest.into_iter().flat_map(|piece| self.failing.cut_at_known(piece)));
        } else {
            batch.pieces.extend(newest);
        }
    }
}
