//! Records.

use super::{Dump, Field, Filter, Item, Sink};
use crate::check::{PrivateCache, valid_copies};
use cbd_engine::{LogEntry, LogSegmentView};
use cbd_format::{Record, RecordKind};
use cbd_types::{BackendId, LaneId, Result};
use std::ops::ControlFlow;

/// The kinds of records with their names.
pub const KINDS: [(RecordKind, &str); 9] = [
    (RecordKind::Write, "write"),
    (RecordKind::WriteZeroes, "write-zeroes"),
    (RecordKind::Discard, "discard"),
    (RecordKind::Fill, "fill"),
    (RecordKind::ParkedWrite, "parked-write"),
    (RecordKind::ParkedZeroes, "parked-zeroes"),
    (RecordKind::Quarantine, "quarantine"),
    (RecordKind::Invalidate, "invalidate"),
    (RecordKind::WriteThrough, "write-through"),
];

fn name_of(kind: RecordKind) -> &'static str {
    KINDS.iter().find(|(known, _)| *known == kind).map_or("other", |(_, name)| name)
}

impl Filter {
    fn selects_segment(&self, segment: &LogSegmentView) -> bool {
        self.lane.is_none_or(|lane| lane == segment.lane.0)
            && self.segment.is_none_or(|number| number == segment.segment.0)
    }

    fn selects_record(
        &self,
        cache: &PrivateCache,
        segment: &LogSegmentView,
        slot: u32,
        record: &Record,
    ) -> bool {
        self.sequence.as_ref().is_none_or(|range| range.contains(&record.sequence.get()))
            && self.range.is_none_or(|range| range.overlaps(&record.range()))
            && self.kind.is_none_or(|kind| kind == record.kind())
            && (!self.dirty || !cache.log().is_on_backing(segment, slot, record))
    }

    /// Whether the filter uses properties that only a readable record has.
    const fn needs_content(&self) -> bool {
        self.range.is_some() || self.kind.is_some() || self.dirty || self.sequence.is_some()
    }
}

impl Dump<'_> {
    pub(super) fn records(&self, sink: &mut Sink<'_>) -> Result<ControlFlow<()>> {
        for (id, _) in self.backends() {
            let cache = self.cache(id)?;
            for lane in (0..cache.lane_count()).map(LaneId) {
                for segment in
                    cache.log().segments(lane).iter().filter(|segment| self.filter.selects_segment(segment))
                {
                    if self.records_of(id, &cache, segment, sink).is_break() {
                        return Ok(ControlFlow::Break(()));
                    }
                }
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn records_of(
        &self,
        id: BackendId,
        cache: &PrivateCache,
        segment: &LogSegmentView,
        sink: &mut Sink<'_>,
    ) -> ControlFlow<()> {
        let mut entries = Vec::new();
        cache.log().visit(segment, &mut |slot, entry| entries.push((slot, entry)));
        for (slot, entry) in entries {
            let at = segment.base + self.layout.segment_shape().slot(slot)[0];
            let item = |structure| {
                Item::new(structure)
                    .number("backend", id.0)
                    .number("lane", segment.lane.0)
                    .number("segment", segment.segment.0)
                    .number("slot", slot)
                    .number("at", at)
            };
            match entry {
                LogEntry::Lost { end } if !self.filter.needs_content() => {
                    sink(item("lost").number("slots", end - slot))?;
                }
                // A record that recovery would add to record a loss is not on the medium.
                LogEntry::Record(record)
                    if self.filter.selects_record(cache, segment, slot, &record)
                        && valid_copies(self.bytes, cache, segment, &record, (slot, 0)) != [None; 2] =>
                {
                    if let Some(item) = self.record(cache, segment, slot, &record, item("record")) {
                        sink(item)?;
                    }
                }
                _ => {}
            }
        }
        ControlFlow::Continue(())
    }

    /// A record; `None` if only damaged ones are selected and it is not damaged.
    fn record(
        &self,
        cache: &PrivateCache,
        segment: &LogSegmentView,
        slot: u32,
        record: &Record,
        item: Item,
    ) -> Option<Item> {
        let mut good = [true; 2];
        for number in 0..record.slots() {
            let copies = valid_copies(self.bytes, cache, segment, record, (slot + number, number));
            good = [good[0] && copies[0].is_some(), good[1] && copies[1].is_some()];
        }
        let range = record.range();
        let mut item = item
            .number("sequence", record.sequence.get())
            .with("kind", Field::Text(name_of(record.kind()).to_owned()))
            .number("offset", range.start)
            .number("length", range.len())
            .number("epoch", record.epoch.get())
            .number("generation", record.generation.get())
            .number("lines", record.lines)
            .with("dirty", Field::Bool(!cache.log().is_on_backing(segment, slot, record)))
            .with("primary_valid", Field::Bool(good[0]))
            .with("mirror_valid", Field::Bool(good[1]));
        if record.kind().has_data() {
            item = item
                .number("data_at", segment.base + u64::from(record.data_offset.get()))
                .with("checksums", Field::Bool(record.has_checksums()));
        }
        if record.kind() == RecordKind::Quarantine {
            item = item.number("marks_bad", record.reference.get());
        }
        if !self.filter.damaged {
            return Some(item);
        }
        let blocks = cache.log().damaged_blocks(segment, slot, record);
        if blocks.is_empty() && good == [true; 2] {
            return None;
        }
        let blocks =
            blocks.into_iter().map(|(block, _)| Field::Text(format!("{}+{}", block.start, block.len())));
        Some(item.with("damaged_blocks", Field::List(blocks.collect())))
    }
}
