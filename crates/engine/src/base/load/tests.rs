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
