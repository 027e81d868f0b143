//! Each decoder of the format, on arbitrary bytes and on the same bytes under a valid checksum.
//!
//! Invariants: a decoded value contains no more information than its bytes (an encoded value decodes to itself), and
//! its offsets lie inside the structure that it describes.

use crate::input::Input;
use cbd_format::record::{RecordKind, blocks_in, bytes_of, checksum_lines, line_at, map_lines};
use cbd_format::tables::decode_text;
use cbd_format::{
    BackendEntry, BlkdevEntry, ChecksumLine, Drained, HostEntry, LaneMark, LaneTail, Layout,
    MAX_CHECKSUM_LINES, Record, RecordPlace, SegmentEntry, SegmentHeader, SegmentShape, Slot, SlotContent,
    StateShape, Superblock, crc32c,
};
use cbd_types::{ErrorKind, LaneId, SegmentId};
use std::fmt::Debug;
use zerocopy::FromBytes;

/// The decoders. The first byte of the input selects one.
const DECODERS: [fn(&mut Input<'_>); 11] = [
    superblock,
    layout,
    slot::<HostEntry>,
    slot::<BackendEntry>,
    slot::<BlkdevEntry>,
    slot::<SegmentEntry>,
    slot::<Drained>,
    slot::<LaneTail>,
    slot::<LaneMark>,
    header,
    record,
];

/// Runs one decoder on one input.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let choice = usize::from(input.u8());
    DECODERS[choice % DECODERS.len()](&mut input);
}

/// Inputs from which mutations are productive: each decoder with a valid value.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let layout = Layout::new(8 << 20, 64 << 10, 4, 4, 4).map(|layout| Superblock::new(&layout, [7; 16], 5));
    let superblock = layout.as_ref().map_or(&[][..], |block| bytes_of(block));
    let grown = Layout::new(4 << 20, 64 << 10, 4, 4, 4)
        .and_then(|layout| Ok(Superblock::new(&layout, [7; 16], 5).grown(&layout.grown_to(8 << 20)?)));
    let grown = grown.as_ref().map_or(&[][..], |block| bytes_of(block));
    let mut seeds = vec![[&[0, 23], superblock].concat(), [&[0, 23], grown].concat()];
    for decoder in 1..DECODERS.len() as u8 {
        for fill in [0, 1, 0x40] {
            seeds.push([vec![decoder], vec![fill; 200]].concat());
        }
    }
    seeds
}

fn superblock(input: &mut Input<'_>) {
    let mapped = 1_u64.checked_shl(u32::from(input.u8())).unwrap_or(u64::MAX);
    let mut bytes = input.rest().to_vec();
    let check = |bytes: &[u8]| {
        let Some(unverified) = Superblock::decode(bytes) else { return };
        match unverified.verify(mapped) {
            Ok(valid) => {
                let (block, layout) = *valid;
                assert!(layout.region_size <= mapped, "a region larger than its memory");
                check_layout(&layout);
                assert_eq!(bytes_of(&block), &bytes[..size_of::<Superblock>()]);
            }
            Err(error) => assert_eq!(error.kind() == ErrorKind::Foreign, !unverified.is_ours()),
        }
    };
    check(&bytes);
    if bytes.len() >= size_of::<Superblock>() {
        bytes[..8].copy_from_slice(&cbd_format::superblock::MAGIC.to_le_bytes());
        let sum = crc32c(&bytes[12..size_of::<Superblock>()]);
        bytes[8..12].copy_from_slice(&sum.to_le_bytes());
        check(&bytes);
    }
}

/// The layout of a region of any size that a file can have.
fn layout(input: &mut Input<'_>) {
    let size = input.u64() & (u64::MAX >> 1) >> (input.u8() % 63);
    let segment = if input.u8() & 1 == 0 { 1 << (input.u8() % 64) } else { input.u64() };
    let rows = [input.u16(), input.u16(), input.u16()].map(|rows| u32::from(rows) & 0x1fff);
    if let Ok(layout) = Layout::new(size, segment, rows[0], rows[1], rows[2]) {
        check_layout(&layout);
    }
}

fn check_layout(layout: &Layout) {
    let ends = layout.grown_from().chain([layout.region_size]);
    let mut number = 0;
    for (extent, end) in layout.extents().zip(ends) {
        let area_end = extent.segment_area + u64::from(extent.segments) * layout.segment_size;
        assert!(extent.segments > 0 && extent.first == number && area_end <= Layout::second_superblock(end));
        number = extent.end();
        assert_eq!(layout.segment_base(SegmentId(number - 1)) + layout.segment_size, area_end);
    }
    assert_eq!(number, layout.segment_count);
    let last = |area, rows: u32, slot: usize, next: u64, slots: [u64; 2]| {
        assert!(area <= slots[0] && slots[0] + slot as u64 <= slots[1], "{rows} rows: the slots overlap");
        assert!(slots[1] + slot as u64 <= next, "{rows} rows reach into what follows");
    };
    fn slots<T: SlotContent>(area: u64, rows: u32) -> (usize, [u64; 2]) {
        (T::SLOT_SIZE, Layout::slots::<T>(area, rows, rows - 1))
    }
    let (size, at) = slots::<HostEntry>(layout.host_area, layout.host_rows);
    last(layout.host_area, layout.host_rows, size, layout.backend_area, at);
    let (size, at) = slots::<BackendEntry>(layout.backend_area, layout.backend_rows);
    last(layout.backend_area, layout.backend_rows, size, layout.blkdev_area, at);
    let (size, at) = slots::<BlkdevEntry>(layout.blkdev_area, layout.blkdev_rows);
    last(layout.blkdev_area, layout.blkdev_rows, size, layout.segment_table, at);
    for extent in layout.extents() {
        let at = layout.segment_slots(SegmentId(extent.end() - 1));
        last(extent.segment_table, extent.segments, SegmentEntry::SLOT_SIZE, extent.segment_area, at);
    }
    check_shape(layout.segment_shape());
}

fn check_shape(shape: SegmentShape) {
    let last = shape.slot(shape.slots_max() - 1);
    assert!(last[1] + 64 <= shape.header_copy() && last[0] < last[1]);
    assert!(u64::from(shape.atomic_unit()) <= shape.size / 4);
    let lanes = (0..16).map(|power| 1 << power).take_while(|&lanes| StateShape { lanes }.fits(shape.size));
    if let Some(lanes) = lanes.last() {
        let state = StateShape { lanes };
        let lane = LaneId(lanes - 1);
        let places = [state.drained()[1], state.tail(lane)[0], state.tail(lane)[1], state.mark(lane)[0]];
        assert!(places.is_sorted() && state.mark(lane)[1] + 64 <= shape.header_copy());
    }
}

fn slot<T: SlotContent + Debug + PartialEq>(input: &mut Input<'_>) {
    let place = input.u64();
    let sequence = input.u64();
    let bytes = input.rest();
    if let Some(slot) = Slot::<T>::decode(place, bytes) {
        assert_eq!(Slot::decode(place, &slot.encode(place)), Some(slot));
    }
    let mut content = vec![0; size_of::<T>()];
    let length = bytes.len().min(content.len());
    content[..length].copy_from_slice(&bytes[..length]);
    let Ok(content) = T::read_from_bytes(&content) else { return };
    let sealed = Slot { sequence, content }.encode(place);
    let decoded = Slot::<T>::decode(place, &sealed);
    assert!(decoded.is_none_or(|decoded| decoded == Slot { sequence, content }));
    assert_eq!(Slot::<T>::decode(place ^ 1, &sealed), None, "a slot of another row");
    // Only the text fields of tables have a decoder of their own.
    let (length, field) = sealed.split_at(4.min(sealed.len()));
    if let Ok(length) = cbd_format_u32(length) {
        let _ = decode_text("field", length.into(), field);
    }
}

fn cbd_format_u32(bytes: &[u8]) -> Result<u32, std::array::TryFromSliceError> {
    Ok(u32::from_le_bytes(bytes.try_into()?) & 0xfff)
}

fn header(input: &mut Input<'_>) {
    let (segment, lanes) = (SegmentId(u32::from(input.u8())), u32::from(input.u8()));
    let bytes = input.rest();
    let Some(unverified) = SegmentHeader::decode(bytes) else { return };
    let _ = unverified.claimed_generation();
    let cache = u64::from(bytes[8]);
    let _ = unverified.verify(segment, cache, lanes);
    let Ok((mut forged, _)) = SegmentHeader::read_from_prefix(bytes) else { return };
    forged.magic = cbd_format::segment::LOG_MAGIC.into();
    forged.segment = segment.0.into();
    forged.cache_id = cache.into();
    forged.lanes = lanes.into();
    let forged = forged.sealed();
    let verified = SegmentHeader::decode(bytes_of(&forged))
        .and_then(|unverified| unverified.verify(segment, cache, lanes));
    if let Some(header) = verified {
        assert_eq!(header, forged);
        assert!(header.lane.get() < lanes);
    }
}

/// A page of records: each line unchanged, and sealed for its slot.
fn record(input: &mut Input<'_>) {
    let shape = SegmentShape { size: 64 << (10 + input.u8() % 11) };
    let salt = input.u64();
    let page = input.rest();
    for index in 0.. {
        let Some(line) = line_at(page, index) else { break };
        let place = RecordPlace { salt, segment: SegmentId(3), slot: index as u32 };
        let generation = u32::from_le_bytes([line[40], line[41], line[42], line[43]]);
        let _ = Record::decode(line).verify(&place, generation, shape.size);
        let _ = ChecksumLine::decode(line).verify(&place, line[5], u64::from(line[8]));
        let Ok(record) = Record::read_from_bytes(line) else { break };
        if let Some(record) = Record::decode(&record.encode(&place)).verify(&place, generation, shape.size) {
            check_record(&record, shape);
        }
        let Ok(checksums) = ChecksumLine::read_from_bytes(line) else { break };
        if let Some(checksums) = ChecksumLine::decode(&checksums.encode(&place)).verify(
            &place,
            checksums.index,
            checksums.sequence.get(),
        ) {
            assert!(usize::from(checksums.count) <= cbd_format::CHECKSUMS_PER_LINE);
        }
    }
}

fn check_record(record: &Record, shape: SegmentShape) {
    let range = record.range();
    assert!(!range.is_empty() && range.end > range.start);
    if !record.kind().has_data() {
        // A quarantine may have a map of its damaged sectors; no other record without data has continuation lines.
        let map = if record.kind() == RecordKind::Quarantine { map_lines(range) } else { 0 };
        assert!(record.slots() == 1 || record.slots() == 1 + map && map <= MAX_CHECKSUM_LINES);
        return;
    }
    let data_end = u64::from(record.data_offset.get()) + range.len();
    assert!(u64::from(record.data_offset.get()) >= cbd_format::PAGE && data_end <= shape.data_top());
    if record.has_checksums() {
        assert!(checksum_lines(range) <= MAX_CHECKSUM_LINES && record.slots() == 1 + checksum_lines(range));
        let blocks = blocks_in(range);
        let mut at = range.start;
        for block in 0..blocks {
            let covered = record.block_range(block);
            assert!(covered.start == at && covered.end > at && record.block_of(at) == block);
            at = covered.end;
        }
        assert_eq!(at, range.end);
    }
}
