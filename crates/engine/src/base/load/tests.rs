//! Which records count, and what is read of them.

use super::*;
use crate::tests::rig::{Options, Rig, SECTOR};
use cbd_format::RecordKind;
use cbd_types::CHUNK;

const BLOCK: u64 = 4096;

/// A cache of two lanes, and for each lane its first chunk.
fn two_lanes() -> (Rig, [u64; 2]) {
    let rig = Rig::new(Options { device: 3 * CHUNK + BLOCK, lanes: 2, segments: 19, ..Options::default() });
    let map = rig.cache.base().identity().lanes;
    let first = |lane| [0, CHUNK].into_iter().find(|at| map.lane_of(*at) == LaneId(lane));
    let firsts = [0, 1].map(|lane| first(lane).expect("each lane has a chunk of each row"));
    (rig, firsts)
}

#[test]
fn a_record_lies_on_the_device_in_whole_sectors_and_in_the_lane_whose_log_holds_it() {
    let (rig, [own, other]) = two_lanes();
    let unit = u64::from(rig.cache.base().shape().atomic_unit());
    let end = 3 * CHUNK + BLOCK;
    let last = rig.cache.base().identity().lanes.lane_of(end - BLOCK);
    let accepts = |lane, kind, range| rig.cache.base().accepts(lane, &Record::new(kind, range));
    for kind in [RecordKind::Write, RecordKind::Fill, RecordKind::ParkedWrite] {
        let accepts = |range| accepts(LaneId(0), kind, range);
        assert!(accepts(ByteRange::at(own, SECTOR)) && accepts(ByteRange::at(own + CHUNK - unit, unit)));
        assert!(!accepts(ByteRange::at(own, unit + SECTOR)), "it is longer than a request may be");
        assert!(!accepts(ByteRange::at(own + CHUNK - SECTOR, 2 * SECTOR)), "it is in two chunks");
        assert!(!accepts(ByteRange::at(other, SECTOR)), "it is of the other lane");
    }
    for kind in
        [RecordKind::WriteZeroes, RecordKind::Discard, RecordKind::ParkedZeroes, RecordKind::Quarantine]
    {
        let accepts = |range| accepts(LaneId(0), kind, range);
        assert!(accepts(ByteRange::at(own, SECTOR)) && accepts(ByteRange { start: 0, end }));
        assert!(!accepts(ByteRange::at(other, CHUNK)), "none of it is of the lane");
    }
    for kind in [RecordKind::Write, RecordKind::Discard] {
        assert!(accepts(last, kind, ByteRange { start: end - SECTOR, end }));
        for (start, end) in [(end, end + SECTOR), (end - SECTOR, end + SECTOR), (1 << 62, u64::MAX - 511)] {
            assert!(!accepts(last, kind, ByteRange { start, end }), "it is behind the end of the device");
        }
        assert!(!accepts(LaneId(0), kind, ByteRange { start: own + 1, end: own + SECTOR }));
        assert!(!accepts(LaneId(0), kind, ByteRange { start: own, end: own + SECTOR - 1 }));
    }
}

#[test]
fn an_invalidation_that_is_longer_than_a_bypass_may_be_is_not_accepted() {
    let rig = Rig::new(Options { device: 2 * INVALIDATE_MAX, ..Options::default() });
    let accepts = |length| {
        let record = Record::new(RecordKind::Invalidate, ByteRange::at(0, length));
        rig.cache.base().accepts(LaneId(0), &record)
    };
    assert!(accepts(SECTOR) && accepts(INVALIDATE_MAX));
    assert!(!accepts(INVALIDATE_MAX + SECTOR));
}

#[test]
fn recovery_ends_before_a_record_that_a_forged_log_has_of_another_lane() {
    let (rig, [own, other]) = two_lanes();
    assert!(rig.write(ByteRange::at(own, BLOCK), 1));
    let base = rig.cache.base();
    let segment = rig.cache.lane(LaneId(0)).lock().segments().next().expect("there is one").segment;
    let first = base.load_record(Location { segment, slot: 0 }).expect("it is good");
    let forge = |range: ByteRange| {
        let mut record = first;
        record.sequence = 2.into();
        record.offset = range.start.into();
        let location = Location { segment, slot: 1 };
        let _ = base.complete_record(location, &record);
        (base.find_record(location).is_some(), rig.recovered().log().next_sequence(LaneId(0)).0)
    };
    assert_eq!(forge(ByteRange::at(other, BLOCK)), (false, 2));
    assert_eq!(forge(ByteRange::at(own + BLOCK, BLOCK)), (true, 3));
}

#[test]
fn each_block_of_a_long_record_has_a_checksum_of_its_own_in_two_lines() {
    use crate::tests::{Ram, Still};
    use crate::{Admission, BackendSpec, FormatOptions, Settings, Transport};
    const SIZE: u64 = 256 << 10;
    let format = FormatOptions { segment_size: Some(SIZE), force: true, ..FormatOptions::default() };
    let transport =
        Transport::format(alloc::sync::Arc::new(Still::default()), Ram::region(16 * SIZE as usize), &format);
    let transport = transport.expect("there is room");
    let host = transport.register_host("host", None).expect("there is room");
    let spec = BackendSpec {
        host,
        path: "/dev/vector".into(),
        identity: "vector".into(),
        size: CHUNK,
        sector: 512,
        cache_bytes: Some(9 * SIZE),
        lanes_max: 1,
        handlers: 1,
        data_crc: true,
        settings: Settings::default(),
    };
    let id = transport.create_backend(&spec).expect("there is room");
    let cache = transport.open_cache(id).expect("it opens");
    // Begins and ends within a block: 16 blocks, of which 15 have their checksums in lines of 12.
    let range = ByteRange { start: 3 * SECTOR, end: 15 * BLOCK + 5 * SECTOR };
    let data: Vec<u8> = (0..range.len()).map(|at| (at / SECTOR) as u8).collect();
    let written = cache.write(range, &data, core::task::Waker::noop()).expect("it runs");
    assert!(matches!(written, Admission::Done(_)));
    let base = cache.base();
    let segment = cache.lane(LaneId(0)).lock().segments().next().expect("there is one").segment;
    let location = Location { segment, slot: 0 };
    let record = base.load_record(location).expect("it is good");
    assert_eq!((record.lines, cache.log().segments(LaneId(0))[0].slots), (2, 3));
    let at = base.segment(segment).base() + u64::from(record.data_offset.get());
    let read = |wanted: ByteRange| {
        let mut out = alloc::vec![0xee; wanted.len() as usize];
        let result = base.load_data(location, &record, wanted, &mut out).map_err(|damage| damage.range);
        let (start, end) = (wanted.start - range.start, wanted.end - range.start);
        assert!(result.is_err() || out[..] == data[start as usize..end as usize], "{wanted}");
        result
    };
    assert_eq!(read(range), Ok(()));
    for block in range.split_at_multiples(BLOCK) {
        let byte = at + (block.end - 1 - range.start);
        let mut good = [0];
        base.region().load(byte, &mut good).expect("it can be read");
        let _ = base.region().store(byte, &[!good[0]]);
        for other in range.split_at_multiples(BLOCK) {
            let expected = if other == block { Err(block) } else { Ok(()) };
            assert_eq!(read(other), expected);
            assert_eq!(read(ByteRange::at(other.start, SECTOR)), expected, "its first sector");
            assert_eq!(read(ByteRange::at(other.end - SECTOR, SECTOR)), expected, "its last sector");
        }
        assert_eq!(read(range), Err(block));
        let _ = base.region().store(byte, &good);
    }
    // Either copy of each line suffices, and recovery completes the other one.
    for slot in 0..3 {
        for copy in base.shape().slot(slot).map(|at| base.segment(segment).base() + at) {
            let mut good = [0; 64];
            base.region().load(copy, &mut good).expect("it can be read");
            let _ = base.region().store(copy, &[0xa5; 64]);
            assert_eq!(read(range), Ok(()));
            let _ = base.complete_record(location, &record);
            let mut completed = [0; 64];
            base.region().load(copy, &mut completed).expect("it can be read");
            assert_eq!(completed, good);
        }
    }
}
