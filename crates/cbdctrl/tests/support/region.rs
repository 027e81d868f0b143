//! The bytes of a region, located by the format's own decoders, and functions that damage them.
//!
//! Invariants: the file is the one that the daemon has mapped, so damage is effective immediately, as if the memory had
//! changed.

use cbd_format::{
    BackendEntry, BlkdevEntry, HostEntry, LINE, Layout, PAGE, Record, RecordKind, RecordPlace, SegmentEntry,
    SegmentHeader, Slot, SlotContent, StateShape, Superblock,
};
use cbd_types::{ByteRange, LaneId, SegmentId};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// A region in a file.
pub struct RegionFile {
    file: File,
    pub layout: Layout,
}

/// A segment of the log of backend 0.
#[derive(Clone, Copy, Debug)]
pub struct Log {
    pub base: u64,
    header: SegmentHeader,
}

/// A record, and the offsets of its copies and its data in the region.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    pub record: Record,
    pub copies: [u64; 2],
    pub data: u64,
}

impl RegionFile {
    #[track_caller]
    pub fn open(path: &str) -> Self {
        let file = File::options().read(true).write(true).open(path).expect("the region");
        let size = file.metadata().expect("the region").len();
        let mut bytes = vec![0; PAGE as usize];
        file.read_exact_at(&mut bytes, 0).expect("the superblock");
        let superblock = Superblock::decode(&bytes).expect("a superblock");
        let (_, layout) = *superblock.verify(size).expect("a sound superblock");
        Self { file, layout }
    }

    fn bytes(&self, at: u64, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        self.file.read_exact_at(&mut bytes, at).expect("inside the region");
        bytes
    }

    /// Changes every byte of a range.
    pub fn damage(&self, at: u64, length: u64) {
        let damaged: Vec<u8> = self.bytes(at, length).iter().map(|byte| byte ^ 0x5a).collect();
        self.file.write_all_at(&damaged, at).expect("inside the region");
    }

    /// Row 0 of the backend table.
    pub fn backend(&self) -> BackendEntry {
        let length = size_of::<BackendEntry>() as u64 + 16;
        let slots = self.slots::<BackendEntry>(self.layout.backend_area, self.layout.backend_rows, 0);
        let [first, second] = slots.map(|at| Slot::<BackendEntry>::decode(0, &self.bytes(at, length)));
        Slot::newest(first, second).expect("backend 0").1.content
    }

    fn slots<T: SlotContent>(&self, area: u64, rows: u32, row: u32) -> [u64; 2] {
        Layout::slots::<T>(area, rows, row)
    }

    /// The offsets of both copies of every duplicated structure of a region with backend 0 and its device, except
    /// records.
    pub fn pairs(&self) -> Vec<(&'static str, [u64; 2], u64)> {
        let layout = &self.layout;
        let state = layout.segment_base(SegmentId(self.backend().state_segment.get()));
        let shape = StateShape { lanes: self.backend().lanes.get() };
        let header_copy = layout.segment_shape().header_copy();
        let of_state = |slots: [u64; 2]| slots.map(|at| state + at);
        let log = self.logs()[0].base;
        vec![
            ("superblock", [0, Layout::second_superblock(layout.region_size)], PAGE),
            ("row of the host", self.slots::<HostEntry>(layout.host_area, layout.host_rows, 0), 256),
            (
                "row of the backend",
                self.slots::<BackendEntry>(layout.backend_area, layout.backend_rows, 0),
                1024,
            ),
            (
                "row of the block device",
                self.slots::<BlkdevEntry>(layout.blkdev_area, layout.blkdev_rows, 0),
                512,
            ),
            (
                "segment table",
                self.slots::<SegmentEntry>(layout.segment_table, layout.segment_count, 0),
                PAGE,
            ),
            ("header of the state", [state, state + header_copy], PAGE),
            ("drained", of_state(shape.drained()), PAGE),
            ("tail", of_state(shape.tail(LaneId(0))), LINE),
            ("mark", of_state(shape.mark(LaneId(0))), LINE),
            ("header of a segment", [log, log + header_copy], PAGE),
            ("page of records", [log + PAGE, log + 2 * PAGE], PAGE),
        ]
    }

    /// The segments of the log of backend 0, the oldest first; it has one lane.
    pub fn logs(&self) -> Vec<Log> {
        let backend = self.backend();
        assert_eq!(backend.lanes.get(), 1, "a small cache has one lane");
        let mut logs: Vec<Log> = (0..self.layout.segment_count)
            .map(SegmentId)
            .filter_map(|segment| {
                let base = self.layout.segment_base(segment);
                let header = SegmentHeader::decode(&self.bytes(base, 128))?;
                let header = header.verify(segment, backend.cache_id.get(), 1)?;
                (header.magic.get() == cbd_format::segment::LOG_MAGIC).then_some(Log { base, header })
            })
            .collect();
        logs.sort_by_key(|log| log.header.ordinal.get());
        logs
    }

    fn records(&self, log: &Log) -> Vec<Found> {
        let shape = self.layout.segment_shape();
        let mut found = Vec::new();
        let mut slot = 0;
        while slot < shape.slots_max() {
            let fixture = RecordPlace {
                salt: log.header.salt.get(),
                segment: SegmentId(log.header.segment.get()),
                slot,
            };
            let copies = shape.slot(slot).map(|at| log.base + at);
            let line: [u8; 64] = self.bytes(copies[0], LINE).try_into().expect("a line");
            let record = Record::decode(&line).verify(&fixture, log.header.generation.get(), shape.size);
            let Some(record) = record else { break };
            slot += record.slots();
            found.push(Found { record, copies, data: log.base + u64::from(record.data_offset.get()) });
        }
        found
    }

    /// The newest record of a write that covers the byte `at` of the device.
    #[track_caller]
    pub fn newest(&self, at: u64) -> Found {
        let all = self.logs().into_iter().flat_map(|log| self.records(&log));
        let mut holding: Vec<Found> = all
            .filter(|found| found.record.kind() == RecordKind::Write)
            .filter(|found| found.record.range().contains(&ByteRange::at(at, 1)))
            .collect();
        holding.sort_by_key(|found| found.record.sequence.get());
        holding.pop().expect("a record of it")
    }

    /// Changes one byte of the newest data of the byte `at` of the device.
    #[track_caller]
    pub fn damage_data(&self, at: u64) {
        let found = self.newest(at);
        self.damage(found.data + at - found.record.range().start, 1);
    }

    /// Changes both copies of the newest record of the byte `at` of the device.
    #[track_caller]
    pub fn lose_record(&self, at: u64) {
        self.newest(at).copies.into_iter().for_each(|copy| self.damage(copy, LINE));
    }
}
