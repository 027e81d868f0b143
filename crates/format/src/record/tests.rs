//! Tests of records: the position, numbers and lines with which a record is valid.

use super::*;
use alloc::vec::Vec;

const PLACE: RecordPlace = RecordPlace { salt: 99, segment: SegmentId(3), slot: 17 };
const SIZE: u64 = 64 << 10;

fn write() -> Record {
    let mut record = Record::new(RecordKind::Write, ByteRange::at(512, 8192));
    record.flags = FLAG_DATA_CRC;
    record.lines = 1;
    record.generation = U32::new(5);
    record.data_offset = U32::new(8192);
    record
}

#[test]
fn a_class_is_read_back_and_leaves_other_flags() {
    let record = Record::new(RecordKind::Write, ByteRange::at(0, 4096));
    for flags in [0, FLAG_DATA_CRC, 0xf8] {
        for class in [RecordClass::Unmarked, RecordClass::Metadata, RecordClass::MetadataAgain] {
            let marked = Record { flags, ..record }.with_class(RecordClass::MetadataAgain).with_class(class);
            assert_eq!((marked.class(), marked.flags & !FLAGS_CLASS), (class, flags));
        }
    }
    assert_eq!(Record { flags: FLAGS_CLASS, ..record }.class(), RecordClass::Unmarked);
}

#[test]
fn a_record_counts_only_at_its_place_with_its_generation_and_every_bit() {
    let line = write().encode(&PLACE);
    let verify = |line: &[u8; 64], place: &RecordPlace, generation| {
        Record::decode(line).verify(place, generation, SIZE)
    };
    let read = verify(&line, &PLACE, 5).expect("valid");
    assert_eq!(read.range(), ByteRange::at(512, 8192));
    assert!(verify(&line, &PLACE, 6).is_none());
    assert!(verify(&line, &RecordPlace { slot: 18, ..PLACE }, 5).is_none());
    assert!(verify(&line, &RecordPlace { salt: 98, ..PLACE }, 5).is_none());
    assert!(verify(&line, &RecordPlace { segment: SegmentId(4), ..PLACE }, 5).is_none());
    for bit in 0..512 {
        let mut damaged = line;
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(verify(&damaged, &PLACE, 5).is_none(), "bit {bit}");
    }
}

#[test]
fn a_record_that_contradicts_itself_does_not_count() {
    let damaged: [fn(&mut Record); 11] = [
        |r| r.reserved = 1,
        |r| r.data_offset = U32::new(crate::PAGE as u32 - 64),
        |r| r.data_offset = U32::new(u32::MAX),
        |r| r.kind = 0,
        |r| r.length = U64::new(u64::MAX),
        |r| r.length = U64::ZERO,
        |r| r.lines = 2,
        |r| r.data_offset = U32::new(SIZE as u32 - 4096),
        |r| r.kind = 77,
        |r| r.sequence = U64::new(u64::MAX),
        |r| r.epoch = U64::new(u64::MAX),
    ];
    for damage in damaged {
        let mut record = write();
        damage(&mut record);
        assert!(Record::decode(&record.encode(&PLACE)).verify(&PLACE, 5, SIZE).is_none());
    }
}

#[test]
fn a_record_counts_up_to_the_last_number_and_the_last_byte_of_its_segment() {
    let counts = |change: fn(&mut Record)| {
        let mut record = write();
        change(&mut record);
        Record::decode(&record.encode(&PLACE)).verify(&PLACE, 5, SIZE).is_some()
    };
    assert!(counts(|record| record.sequence = U64::new(crate::COUNTER_END - 1)));
    assert!(!counts(|record| record.sequence = U64::new(crate::COUNTER_END)));
    assert!(counts(|record| record.epoch = U64::new(crate::COUNTER_END - 1)));
    assert!(!counts(|record| record.epoch = U64::new(crate::COUNTER_END)));
    assert!(counts(|record| record.data_offset = U32::new(crate::PAGE as u32)));
    assert!(!counts(|record| record.data_offset = U32::new(crate::PAGE as u32 - 1)));
    assert!(counts(|record| record.data_offset = U32::new((SIZE - crate::PAGE) as u32 - 8192)));
    assert!(!counts(|record| record.data_offset = U32::new((SIZE - crate::PAGE) as u32 - 8191)));
}

#[test]
fn a_record_has_as_many_lines_as_its_blocks_need_and_not_more_than_any_may_have() {
    const LARGE: u64 = 64 << 20;
    let counts = |blocks: u64, lines: u32| {
        let mut record = write();
        (record.offset, record.length) = (U64::ZERO, U64::new(blocks * CHECKSUM_BLOCK));
        record.lines = lines as u8;
        Record::decode(&record.encode(&PLACE)).verify(&PLACE, 5, LARGE).is_some()
    };
    let most = 1 + u64::from(MAX_CHECKSUM_LINES) * CHECKSUMS_PER_LINE as u64;
    assert!(counts(1, 0) && !counts(1, 1) && !counts(2, 0) && counts(2, 1));
    assert!(counts(13, 1) && !counts(14, 1) && counts(14, 2));
    assert!(counts(most, MAX_CHECKSUM_LINES) && !counts(most + 1, MAX_CHECKSUM_LINES + 1));
}

#[test]
fn a_line_is_found_by_its_slot_in_a_page() {
    let mut page = [0_u8; 4096];
    for (slot, line) in page.chunks_exact_mut(64).enumerate() {
        line.fill(slot as u8);
    }
    for slot in [0, 1, 62, 63] {
        assert_eq!(line_at(&page, slot), Some(&[slot as u8; 64]));
    }
    assert_eq!(line_at(&page, 64), None);
    assert_eq!(line_at(&page[..4095], 63), None);
}

#[test]
fn a_continuation_line_has_its_checksums_in_order_and_at_most_twelve() {
    let words: Vec<u32> = (1..=12).collect();
    for count in [0, 1, 12] {
        let line = ChecksumLine::new(2, 9, &words[..count]);
        let read = ChecksumLine::decode(&line.encode(&PLACE)).verify(&PLACE, 2, 9).expect("it counts");
        assert_eq!(usize::from(read.count), count);
        let expected = words[..count].iter().copied().chain(core::iter::repeat(0)).take(12);
        assert!(read.checksums.iter().map(|word| word.get()).eq(expected));
    }
}

#[test]
fn a_quarantine_has_a_map_of_its_range_or_none() {
    let mut record = Record::new(RecordKind::Quarantine, ByteRange::at(512, 400 * 512));
    let counts = |record: &Record| Record::decode(&record.encode(&PLACE)).verify(&PLACE, 0, SIZE).is_some();
    for (lines, expected) in [(0, true), (1, false), (2, true), (3, false)] {
        record.lines = lines;
        assert_eq!(counts(&record), expected, "{lines} lines");
    }
    record.length = U64::new(512);
    for (lines, expected) in [(0, true), (1, true), (2, false)] {
        record.lines = lines;
        assert_eq!(counts(&record), expected, "{lines} lines for a sector");
    }
    assert_eq!(map_lines(ByteRange::at(0, cbd_types::CHUNK)), MAX_CHECKSUM_LINES);
    assert!(map_lines(ByteRange::at(0, u64::MAX)) > MAX_CHECKSUM_LINES);
    let line = ChecksumLine::map(0, 9, &[1, 2]);
    let read = ChecksumLine::decode(&line.encode(&PLACE));
    assert!(read.verify(&PLACE, 0, 9).is_none(), "a map is no line of checksums");
    assert_eq!(read.verify_map(&PLACE, 0, 9).map(|line| line.checksums), Some(line.checksums));
}

#[test]
fn zeroes_of_nothing_and_zeroes_that_wrap_do_not_count() {
    for (start, length) in [(4096, 0), (4096, u64::MAX), (u64::MAX, 1)] {
        let mut record = Record::new(RecordKind::Discard, ByteRange::at(0, 512));
        (record.offset, record.length) = (U64::new(start), U64::new(length));
        assert!(Record::decode(&record.encode(&PLACE)).verify(&PLACE, 0, SIZE).is_none());
    }
}

#[test]
fn a_record_without_data_has_no_continuation_lines() {
    let mut record = Record::new(RecordKind::Discard, ByteRange::at(0, 4096));
    let counts = |record: &Record| Record::decode(&record.encode(&PLACE)).verify(&PLACE, 0, SIZE).is_some();
    assert!(counts(&record));
    record.lines = 1;
    assert!(!counts(&record));
}

#[test]
fn a_line_of_checksums_counts_only_as_itself_and_with_every_bit() {
    let line = ChecksumLine::new(1, 77, &[1, 2, 3]);
    let counts = |line: &[u8; 64], index, sequence| {
        ChecksumLine::decode(line).verify(&PLACE, index, sequence).is_some()
    };
    let bytes = line.encode(&PLACE);
    assert!(counts(&bytes, 1, 77));
    assert!(!counts(&bytes, 0, 77), "another place among the lines");
    assert!(!counts(&bytes, 1, 78), "another record");
    for bit in 0..512 {
        let mut damaged = bytes;
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(!counts(&damaged, 1, 77), "bit {bit}");
    }
    assert!(!counts(&ChecksumLine { kind: 1, ..line }.encode(&PLACE), 1, 77), "a record");
    assert!(!counts(&ChecksumLine { count: 13, ..line }.encode(&PLACE), 1, 77), "more than there are places");
}

#[test]
fn a_block_at_the_largest_offset_has_an_end() {
    let range = ByteRange { start: u64::MAX - 512, end: u64::MAX };
    let record = Record::new(RecordKind::Write, range);
    assert_eq!(record.block_range(0), range);
}

#[test]
fn blocks_are_aligned_as_the_device_is() {
    let record = write();
    assert_eq!(blocks_in(record.range()), 3);
    assert_eq!(record.block_range(0), ByteRange { start: 512, end: 4096 });
    assert_eq!(record.block_range(2), ByteRange { start: 8192, end: 8704 });
    assert_eq!(record.block_of(8192), 2);
    assert_eq!(checksum_lines(ByteRange::at(0, 4096)), 0);
    assert_eq!(checksum_lines(ByteRange::at(512, 1 << 20)), MAX_CHECKSUM_LINES);
}

#[test]
fn a_new_record_is_zero_but_for_its_kind_and_range() {
    let mut expected = [0; 64];
    expected[4] = 3;
    expected[16..24].copy_from_slice(&0x1234_u64.to_le_bytes());
    expected[24..32].copy_from_slice(&0x5678_u64.to_le_bytes());
    let record = Record::new(RecordKind::Discard, ByteRange::at(0x1234, 0x5678));
    assert_eq!(bytes_of(&record), expected);
    let line = ChecksumLine::new(0, 0, &[]);
    assert_eq!((line.crc.get(), line.reserved), (0, 0));
}

#[test]
fn the_blocks_of_a_record_are_numbered_from_its_first() {
    const FIRST: u64 = 5000;
    let record =
        Record::new(RecordKind::Write, ByteRange::at(FIRST * CHECKSUM_BLOCK + 512, 3 * CHECKSUM_BLOCK));
    for block in 0..4 {
        let begin = (FIRST + block) * CHECKSUM_BLOCK;
        assert_eq!(record.block_of(begin), block as usize);
        assert_eq!(record.block_of(begin + CHECKSUM_BLOCK - 1), block as usize);
    }
}

#[test]
fn one_byte_counts_and_a_flag_for_checksums_asks_for_no_line_without_data() {
    let counts = |record: &Record| Record::decode(&record.encode(&PLACE)).verify(&PLACE, 0, SIZE).is_some();
    let mut record = Record::new(RecordKind::Discard, ByteRange::at(4096, 1));
    assert!(counts(&record));
    (record.length, record.flags) = (U64::new(8192), FLAG_DATA_CRC);
    assert!(counts(&record));
}

#[test]
fn a_continuation_line_is_read_as_what_its_record_has_it_for() {
    let quarantine = Record::new(RecordKind::Quarantine, ByteRange::at(0, 512));
    let write = Record::new(RecordKind::Write, ByteRange::at(0, 512));
    let read = |line: ChecksumLine, record: &Record| {
        ChecksumLine::decode(&line.encode(&PLACE)).verify_of(record, &PLACE, 1).is_some()
    };
    let (map, checksums) = (ChecksumLine::map(1, 0, &[7]), ChecksumLine::new(1, 0, &[7]));
    assert!(read(map, &quarantine) && !read(map, &write));
    assert!(read(checksums, &write) && !read(checksums, &quarantine));
}
