//! Valid structures that do not belong where they are: from an earlier use of the segment, of another kind,
//! or from a client's data.

use crate::rig::{BLOCK, Log, PAGE, Rig, SECTOR, SLOTS_PER_PAIR, Shape, value_of};
use cbd_format::{Record, RecordKind, RecordPlace, SegmentHeader, record::bytes_of, segment::STATE_MAGIC};
use cbd_types::{ByteRange, CHUNK, SegmentId};
use std::task::Waker;

fn header_of(rig: &Rig, log: Log) -> SegmentHeader {
    let bytes = rig.memory.image()[log.base as usize..][..128].to_vec();
    let number = u32::from_le_bytes(bytes[16..20].try_into().expect("four bytes"));
    let cache = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
    SegmentHeader::decode(&bytes)
        .and_then(|header| header.verify(SegmentId(number), cache, 1))
        .expect("it is its own")
}

/// Writes and reclaims until `log` is the newest segment again, in another use.
fn live_again(rig: &mut Rig, log: Log) {
    let before = header_of(rig, log);
    for _ in 0..20 {
        rig.leave_the_segment(1 << 20);
        rig.reclaim_everything();
        if rig.logs().last().expect("there are segments").base == log.base {
            assert!(header_of(rig, log) != before);
            return;
        }
    }
    panic!("a segment is never reused");
}

/// The first of two headers is from an earlier use: the medium lost the store of the last one. The copy is valid, and
/// recovery repairs the first header from it, because the copy may fail later.
#[test]
fn a_header_that_a_medium_forgot_to_store_does_not_take_the_segment() {
    for is_restarted in [false, true] {
        let mut rig = Rig::new();
        rig.write_sectors(0, 3);
        let log = rig.first_log();
        live_again(&mut rig, log);
        let before = header_of(&rig, log);
        if is_restarted {
            // Only the headers contain the generation of the next use.
            rig.leave_the_segment(1 << 20);
            rig.reclaim_everything();
            rig = rig.restart();
        }
        live_again(&mut rig, log);
        rig.write_sectors(0, 10);
        rig.cache.flush().unwrap();
        rig.overwrite(log.base, bytes_of(&before));
        for failed in [None, Some(log.base + log.size - PAGE)] {
            failed.into_iter().for_each(|at| rig.poison(at, PAGE));
            rig = rig.restart();
            (0..10).for_each(|sector| rig.expect_value(sector * SECTOR, value_of(sector)));
            assert_eq!(rig.cache.status().damaged, []);
        }
    }
}

/// A segment and the numbers of its next record. The second use of the segment has filled only the first pair of
/// pages with records. In the first use, client data was stored at the offset of that record, and each block of it
/// began with `forged`.
fn with_forged_data(forged: &[u8; 64]) -> (Rig, SegmentHeader, u64, u64) {
    let mut rig = Rig::new();
    let mut block = [0; BLOCK as usize];
    block[..64].copy_from_slice(forged);
    rig.write(0, BLOCK, 1);
    let log = rig.first_log();
    for number in 300..311 {
        rig.cache.write(ByteRange::at(number * BLOCK, BLOCK), &block, Waker::noop()).unwrap();
    }
    assert_eq!(rig.logs().len(), 1, "one segment has all of it");
    let next = [0, 1].map(|page| log.base as usize + (3 + page) * PAGE as usize);
    assert!(next.iter().all(|at| rig.memory.image()[*at..][..64] == *forged));
    live_again(&mut rig, log);
    rig.write_sectors(0, SLOTS_PER_PAIR - 1);
    assert!(next.iter().all(|at| rig.memory.image()[*at..][..64] == *forged), "nothing was stored over it");
    let last = log.slot(SLOTS_PER_PAIR - 1)[0] as usize;
    let image = rig.memory.image();
    let number = |at: usize| u64::from_le_bytes(image[at..at + 8].try_into().expect("eight bytes"));
    let (sequence, epoch) = (number(last + 8), number(last + 32));
    let header = header_of(&rig, log);
    (rig, header, sequence + 1, epoch)
}

/// A client that writes blocks that look like records does not know the salt.
#[test]
fn a_record_that_a_client_forged_in_its_data_is_not_replayed() {
    let (_, header, sequence, epoch) = with_forged_data(&[7; 64]);
    let mut record = Record::new(RecordKind::WriteZeroes, ByteRange::at(0, BLOCK));
    record.sequence = sequence.into();
    record.epoch = epoch.into();
    record.generation = header.generation;
    let place =
        RecordPlace { salt: 0, segment: SegmentId(header.segment.get()), slot: SLOTS_PER_PAIR as u32 };
    let (rig, ..) = with_forged_data(&record.encode(&place));
    let rig = rig.restart();
    for sector in 0..SLOTS_PER_PAIR - 1 {
        rig.expect_value(sector * SECTOR, value_of(sector));
    }
}

#[test]
fn a_record_that_is_impossible_at_its_place_counts_as_lost() {
    let shape = Shape { device: 8 << 20, ..Shape::default() };
    let (size, unit) = (shape.device, u64::from(Rig::of(shape).cache.atomic_unit()));
    let cases = [
        // Ranges that no device has.
        (2, RecordKind::WriteZeroes, ByteRange::at(size, SECTOR)),
        (2, RecordKind::WriteZeroes, ByteRange::at(size - SECTOR, 2 * SECTOR)),
        (2, RecordKind::WriteZeroes, ByteRange::at(100, 7)),
        // Data lies in one chunk, and is at most an atomic unit long.
        (2, RecordKind::Write, ByteRange::at(CHUNK - SECTOR, 2 * SECTOR)),
        (2, RecordKind::Write, ByteRange::at(1 << 20, unit + SECTOR)),
        // Another record is the next one.
        (1, RecordKind::WriteZeroes, ByteRange::at(0, SECTOR)),
        (3, RecordKind::WriteZeroes, ByteRange::at(0, SECTOR)),
    ];
    for (sequence, kind, range) in cases {
        let rig = Rig::of(shape);
        rig.write_sectors(0, 3);
        rig.cache.flush().unwrap();
        let log = rig.first_log();
        let header = header_of(&rig, log);
        let mut record = Record::new(kind, range);
        record.data_offset = if kind.has_data() { (PAGE as u32 * 4).into() } else { 0.into() };
        record.sequence = sequence.into();
        record.epoch = 1.into();
        record.generation = header.generation;
        let segment = SegmentId(header.segment.get());
        let line = record.encode(&RecordPlace { salt: header.salt.get(), segment, slot: 1 });
        log.slot(1).into_iter().for_each(|at| rig.overwrite(at, &line));
        let rig = rig.restart();
        rig.expect_lost(0);
        rig.expect_lost(SECTOR);
        rig.expect_value(2 * SECTOR, value_of(2));
        rig.expect_that_overwriting_heals();
    }
}

/// An attacker who knows the salt replaces a record under the running cache.
#[test]
fn a_record_that_is_not_what_the_index_knows_is_not_read() {
    let rig = Rig::new();
    rig.write_sectors(0, 1);
    let log = rig.first_log();
    let header = header_of(&rig, log);
    let image = rig.memory.image();
    let at = log.slot(0)[0] as usize;
    let number = |from: usize| u32::from_le_bytes(image[at + from..][..4].try_into().expect("four bytes"));
    let mut record = Record::new(RecordKind::Write, ByteRange::at(100 * SECTOR, SECTOR));
    record.flags = image[at + 5];
    record.sequence = 1.into();
    record.epoch = 1.into();
    record.generation = header.generation;
    (record.data_offset, record.first_sum) = (number(44).into(), number(48).into());
    let segment = SegmentId(header.segment.get());
    let line = record.encode(&RecordPlace { salt: header.salt.get(), segment, slot: 0 });
    log.slot(0).into_iter().for_each(|at| rig.overwrite(at, &line));
    let mut bytes = vec![0xee; SECTOR as usize];
    let error = rig.cache.read(ByteRange::at(0, SECTOR), &mut bytes, &mut Vec::new()).unwrap_err();
    assert!(error.line().contains("disagree"), "{}", error.line());
    assert!(bytes.iter().all(|byte| *byte != value_of(0)));
}

#[test]
fn a_segment_that_says_it_is_a_state_is_not_replayed() {
    let rig = Rig::new();
    rig.write_sectors(0, 10);
    rig.cache.flush().unwrap();
    let log = rig.first_log();
    let forged = SegmentHeader { magic: STATE_MAGIC.into(), ..header_of(&rig, log) }.sealed();
    for at in [log.base, log.base + log.size - PAGE] {
        rig.overwrite(at, bytes_of(&forged));
    }
    let rig = rig.restart();
    for sector in 0..10 {
        rig.expect_lost(sector * SECTOR);
    }
    assert!(rig.try_write(8 * BLOCK, BLOCK, 3));
    rig.expect_that_overwriting_heals();
}

/// Recovery ignored a segment, and another segment in a later run now has its ordinal. The ignored segment also has a
/// higher generation than the other one.
#[test]
fn a_segment_that_can_be_read_again_does_not_take_the_place_of_its_successor() {
    let mut rig = Rig::new();
    for _ in 0..3 {
        rig.leave_the_segment(1 << 20);
    }
    rig.reclaim_everything();
    rig.leave_the_segment(1 << 20);
    let lost = *rig.logs().last().expect("it was written to");
    let header = header_of(&rig, lost);
    let store = |rig: &Rig, header: &SegmentHeader| {
        [lost.base, lost.base + lost.size - PAGE]
            .into_iter()
            .for_each(|at| rig.overwrite(at, bytes_of(header)));
    };
    store(&rig, &SegmentHeader { magic: 0.into(), ..header });
    let rig = rig.restart();
    rig.write_sectors(100, 10);
    rig.cache.flush().unwrap();
    let takes_its_place = |log: &Log| log.ordinal == lost.ordinal && log.base != lost.base;
    assert!(rig.logs().iter().any(takes_its_place), "{:?} after {lost:?}", rig.logs());
    store(&rig, &SegmentHeader { generation: (header.generation.get() + 5).into(), ..header }.sealed());
    let rig = rig.restart();
    for sector in 100..110 {
        rig.expect_value(sector * SECTOR, value_of(sector));
    }
    assert_eq!(rig.cache.status().damaged, []);
}
