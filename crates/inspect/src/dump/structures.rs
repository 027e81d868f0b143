//! Superblocks, tables, segments and lanes.

use super::{Dump, Field, Item, Sink, superblock_places};
use crate::Bytes;
use crate::check::{PrivateCache, StateLocation, header_copies, header_of, read_two_slots};
use cbd_format::{
    BackendEntry, BlkdevEntry, Drained, FormerDisk, HostEntry, LaneMark, LaneTail, Layout, SegmentHeader,
    SlotContent, StateShape, StructLayout, Superblock, segment::LOG_MAGIC, slot::SlotHeader,
};
use cbd_types::{BackendId, LaneId, SegmentId};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

pub(super) fn superblocks(bytes: &dyn Bytes, sink: &mut Sink<'_>) -> ControlFlow<()> {
    for at in superblock_places(bytes.len()) {
        let mut block = vec![0; size_of::<Superblock>()];
        let read = bytes.load(at, &mut block).is_ok();
        let verdict = Superblock::decode(&block).map(|block| block.verify(bytes.len()));
        let mut item = Item::new("superblock")
            .number("at", at)
            .with("valid", Field::Bool(read && matches!(verdict, Some(Ok(_)))));
        if let Some(Err(error)) = verdict {
            item = item.with("error", Field::Text(error.line()));
        }
        sink(item.raw(&Superblock::layout(), &block))?;
    }
    ControlFlow::Continue(())
}

/// One of the tables.
struct Table {
    structure: &'static str,
    area: u64,
    rows: u32,
    layout: StructLayout,
}

impl Dump<'_> {
    pub(super) fn tables(&self, sink: &mut Sink<'_>) -> ControlFlow<()> {
        let table = |structure, area, rows, layout| Table { structure, area, rows, layout };
        let layout = self.layout;
        let hosts = table("host", layout.host_area, layout.host_rows, HostEntry::layout());
        self.table::<HostEntry>(&hosts, sink)?;
        let backends = table("backend", layout.backend_area, layout.backend_rows, BackendEntry::layout());
        self.table::<BackendEntry>(&backends, sink)?;
        let blkdevs = table("blkdev", layout.blkdev_area, layout.blkdev_rows, BlkdevEntry::layout());
        self.table::<BlkdevEntry>(&blkdevs, sink)
    }

    /// Both slots of every row that was ever used.
    fn table<T: SlotContent>(&self, table: &Table, sink: &mut Sink<'_>) -> ControlFlow<()> {
        for row in 0..table.rows {
            let at = Layout::slots::<T>(table.area, table.rows, row);
            let item = Item::new(table.structure).number("row", row);
            self.slots::<T>(at, u64::from(row), &table.layout, &item, sink)?;
        }
        ControlFlow::Continue(())
    }

    /// Both slots of an object, unless it was never written.
    fn slots<T: SlotContent>(
        &self,
        at: [u64; 2],
        seed: u64,
        layout: &StructLayout,
        item: &Item,
        sink: &mut Sink<'_>,
    ) -> ControlFlow<()> {
        let found = read_two_slots::<T>(self.bytes, at, seed);
        if found.is_unused() {
            return ControlFlow::Continue(());
        }
        let newest = found.newest().map(|slot| slot.sequence);
        for number in 0..2 {
            let mut bytes = vec![0; T::SLOT_SIZE];
            let _ = self.bytes.load(found.at[number], &mut bytes);
            let valid = found.slots[number];
            let (header, content) = bytes.split_at(size_of::<SlotHeader>());
            let update =
                header.get(8..16).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes);
            sink(
                item.clone()
                    .number("slot", number as u64)
                    .number("at", found.at[number])
                    .with("valid", Field::Bool(valid.is_some()))
                    .with("newest", Field::Bool(valid.is_some_and(|slot| Some(slot.sequence) == newest)))
                    .number("update", update)
                    .raw(layout, content),
            )?;
        }
        ControlFlow::Continue(())
    }

    pub(super) fn segments(&self, sink: &mut Sink<'_>) -> ControlFlow<()> {
        let mut in_use = BTreeMap::new();
        let mut owners = BTreeMap::new();
        for (id, row) in self.backends() {
            owners.extend(self.transport.segments_of(id).into_iter().map(|segment| (segment.0, (id, row))));
            let Ok(cache) = self.cache(id) else { continue };
            for segment in self.log_of(&cache, &row) {
                in_use.insert(segment.segment.0, segment.slots);
            }
        }
        for number in 0..self.layout.segment_count {
            if self.filter.segment.is_some_and(|only| only != number) {
                continue;
            }
            let owner = owners.get(&number);
            if self.filter.backend.is_some() && owner.is_none() {
                continue;
            }
            let item = self.segment(number, owner.copied(), in_use.get(&number).copied());
            let lane = item.fields.iter().find(|(name, _)| *name == "lane").map(|(_, lane)| lane.clone());
            if self.filter.lane.is_some_and(|only| lane != Some(Field::Number(u64::from(only)))) {
                continue;
            }
            sink(item)?;
        }
        ControlFlow::Continue(())
    }

    /// The log segments of a cache that are on the medium, lane by lane.
    fn log_of(&self, cache: &PrivateCache, row: &BackendEntry) -> Vec<cbd_engine::LogSegmentView> {
        let all = (0..cache.lane_count()).map(LaneId).flat_map(|lane| cache.log().segments(lane));
        all.filter(|segment| {
            let copies = header_copies(self.bytes, self.layout, row, segment);
            copies.iter().any(Option::is_some)
        })
        .collect()
    }

    fn segment(&self, number: u32, owner: Option<(BackendId, BackendEntry)>, slots: Option<u32>) -> Item {
        let (id, base) = (SegmentId(number), self.layout.segment_base(SegmentId(number)));
        let item = Item::new("segment").number("segment", number).number("at", base);
        let Some((backend, row)) = owner else { return item.with("use", Field::Text("none".to_owned())) };
        let role = match slots {
            _ if row.state_segment.get() == number => "state",
            Some(_) => "log",
            None => "free",
        };
        let copies = [base, base + self.layout.segment_shape().header_copy()].map(|at| {
            let mut bytes = vec![0; size_of::<SegmentHeader>()];
            let read = self.bytes.load(at, &mut bytes).is_ok();
            (header_of(&row, id, &bytes).filter(|_| read), bytes)
        });
        let shown = copies.iter().find(|(header, _)| header.is_some()).unwrap_or(&copies[0]);
        let mut item = item
            .number("backend", backend.0)
            .with("use", Field::Text(role.to_owned()))
            .with("header_valid", Field::Bool(copies[0].0.is_some()))
            .with("copy_valid", Field::Bool(copies[1].0.is_some()));
        if let Some(slots) = slots {
            item = item.number("slots", slots);
        }
        // The header of a free segment is that of its last use, if it was ever used.
        let was_used = shown.0.is_some_and(|header| header.magic.get() == LOG_MAGIC || role == "state");
        if was_used || role != "free" { item.raw(&SegmentHeader::layout(), &shown.1) } else { item }
    }

    pub(super) fn lanes(&self, sink: &mut Sink<'_>) -> ControlFlow<()> {
        for (id, row) in self.backends() {
            if let Some(state) = StateLocation::of(&row, self.layout) {
                // The content is shown even if recovery refuses it.
                self.backend_lanes(id, &row, &state, self.cache(id).ok().as_ref(), sink)?;
            }
        }
        ControlFlow::Continue(())
    }

    fn backend_lanes(
        &self,
        id: BackendId,
        row: &BackendEntry,
        state: &StateLocation,
        cache: Option<&Arc<PrivateCache>>,
        sink: &mut Sink<'_>,
    ) -> ControlFlow<()> {
        let item = Item::new("drained").number("backend", id.0);
        self.slots::<Drained>(state.drained(), 0, &Drained::layout(), &item, sink)?;
        for index in 0..StateShape::FORMER_DISKS {
            let (at, seed) = (state.former(index), row.cache_id.get());
            if read_two_slots::<FormerDisk>(self.bytes, at, seed).newest().is_some() {
                let item = Item::new("former_disk").number("backend", id.0);
                self.slots::<FormerDisk>(at, seed, &FormerDisk::layout(), &item, sink)?;
            }
        }
        let logs = cache.map(|cache| self.log_of(cache, row)).unwrap_or_default();
        for lane in
            (0..state.lanes()).filter(|lane| self.filter.lane.is_none_or(|only| only == *lane)).map(LaneId)
        {
            let named = |structure| Item::new(structure).number("backend", id.0).number("lane", lane.0);
            let seed = u64::from(lane.0);
            self.slots::<LaneTail>(state.tail(lane), seed, &LaneTail::layout(), &named("tail"), sink)?;
            self.slots::<LaneMark>(state.mark(lane), seed, &LaneMark::layout(), &named("mark"), sink)?;
            let Some(cache) = cache else { continue };
            let chain: Vec<_> = logs.iter().filter(|segment| segment.lane == lane).collect();
            let list = chain.iter().map(|segment| Field::Number(u64::from(segment.segment.0))).collect();
            sink(
                named("log")
                    .number("segments", chain.len() as u64)
                    .number("first_ordinal", chain.first().map_or(0, |segment| segment.ordinal.0))
                    .number("first_sequence", chain.first().map_or(0, |segment| segment.first_sequence.0))
                    .number("next_sequence", cache.log().next_sequence(lane).0)
                    .with("chain", Field::List(list)),
            )?;
        }
        ControlFlow::Continue(())
    }
}
