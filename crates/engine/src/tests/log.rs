//! The log of a lane: what fits a segment, what a reopened segment erases, and how far recovery searches for its end.

use super::Op;
use super::rig::{Options, Rig, SECTOR, SEGMENT};
use crate::lane::ChainSegment;
use alloc::{vec, vec::Vec};
use cbd_format::{PAGE, SegmentHeader};
use cbd_types::{ByteRange, LaneId, Region};

const LANE: LaneId = LaneId(0);
const LONG: u64 = 16 << 10;

/// The slots in use of each segment.
fn slots(rig: &Rig) -> Vec<u32> {
    rig.cache.log().segments(LANE).iter().map(|segment| segment.slots).collect()
}

/// Zeroes one sector after the other, one record in one slot each.
fn zero(rig: &Rig, count: u64) {
    assert!((0..count).all(|number| rig.zero(ByteRange::at(number * SECTOR, SECTOR), false)));
}

#[test]
fn a_segment_is_filled_to_its_last_slot_and_its_last_byte_of_data() {
    // Three writes of 16 KiB are all the data of a segment of 64 KiB: beside them are two headers and a pair of pages.
    let rig = Rig::new(Options::default());
    assert!((0..4).all(|number| rig.write(ByteRange::at(number * LONG, LONG), 1)));
    assert_eq!(slots(&rig), [6, 2]);
    // Beside 32 KiB of data are three pairs of pages, of 64 slots each.
    let rig = Rig::new(Options::default());
    assert!((0..2).all(|number| rig.write(ByteRange::at(number * LONG, LONG), 1)));
    zero(&rig, 188);
    assert_eq!(slots(&rig), [192]);
    zero(&rig, 1);
    assert_eq!(slots(&rig), [192, 1]);
    // A write needs slots for its record and its checksums.
    for (data_crc, zeroes, expected) in [
        (true, 188, vec![192]),
        (true, 189, vec![191, 2]),
        (false, 190, vec![192]),
        (false, 191, vec![192, 1]),
    ] {
        let rig = Rig::new(Options { data_crc, ..Options::default() });
        assert!(rig.write(ByteRange::at(0, LONG), 1));
        zero(&rig, zeroes);
        assert!(rig.write(ByteRange::at(LONG, LONG), 1));
        assert_eq!(slots(&rig), expected, "{zeroes} records between two writes");
        assert_eq!(rig.recovered().log().segments(LANE).len(), expected.len());
    }
}

#[test]
fn a_reopened_segment_erases_a_dropped_record_before_it_takes_data_and_only_once() {
    let rig = Rig::new(Options::default());
    assert!((0..2).all(|number| rig.write(ByteRange::at(number * SECTOR, SECTOR), 1)));
    let base = rig.cache.log().segments(LANE)[0].base;
    // The last record is torn, and recovery drops it.
    let region = Region::new(rig.memory());
    let data = base + SEGMENT - PAGE - 2 * SECTOR;
    let _ = region.store(data, &[9]);
    let rig = rig.in_memory(region.memory().copy());
    assert_eq!(slots(&rig), [1]);
    let mut bytes = [0; 128];
    rig.transport.region().load(base, &mut bytes).expect("it can be read");
    let id = rig.cache.log().segments(LANE)[0].segment;
    let cache_id = rig.cache.base().identity().cache_id;
    let header = SegmentHeader::decode(&bytes).expect("long enough").verify(id, cache_id, 1).expect("good");
    let mut state = rig.cache.lane(LANE).lock();
    let segment = state.segments().next().expect("there is one").segment;
    state.reopen(&ChainSegment { segment: segment + 1, header });
    assert_eq!((state.recovered().0, state.recovered().1), (2, 1), "it is another segment");
    state.reopen(&ChainSegment { segment, header });
    assert_eq!((state.recovered().0, state.recovered().1), (1, 0), "it goes on in the run of the segment");
    drop(state);
    rig.transport.region().memory().take_ops();
    let line = |slot: u64| [PAGE, 2 * PAGE].map(|page| Op::Store(base + page + slot * 64, 64));
    // A record without data replaces the dropped one as it is.
    zero(&rig, 1);
    let ops = rig.transport.region().memory().take_ops();
    assert_eq!(ops[ops.len() - 3..], [line(1).as_slice(), &[Op::Fence]].concat());
    assert!(!ops.contains(&line(2)[0]));
    for (slot, data, is_erased) in [(2, data, true), (3, data - SECTOR, false)] {
        assert!(rig.write(ByteRange::at(0, SECTOR), 5));
        let erase = [line(slot).as_slice(), &[Op::Fence]].concat();
        let write = [&[Op::Store(data, SECTOR)], line(slot).as_slice(), &[Op::Fence]].concat();
        let expected = if is_erased { [erase, write].concat() } else { write };
        assert_eq!(rig.transport.region().memory().take_ops(), expected);
    }
    assert_eq!(slots(&rig), [4]);
    assert_eq!(rig.recovered().log().next_sequence(LANE).0, 5);
}

#[test]
fn records_behind_a_failed_pair_of_pages_and_a_long_record_on_either_side_are_found_and_all_if_a_mark_proves_them()
 {
    // Slot 10 is the first that cannot be read. Recovery looks at 174 slots behind it.
    for (count, is_marked, is_found) in
        [(174, false, true), (175, false, false), (175, true, true), (260, true, true)]
    {
        let rig = Rig::new(Options::default());
        zero(&rig, 300);
        if is_marked {
            rig.cache.flush().expect("it runs");
        }
        let base = rig.cache.log().segments(LANE)[0].base;
        let shape = rig.cache.base().shape();
        let region = Region::new(rig.memory());
        for at in (10..10 + count).flat_map(|slot| shape.slot(slot)) {
            let _ = region.store(base + at, &[0xa5; 64]);
        }
        let recovered = rig.in_memory(region.memory().copy());
        let cut = recovered.cache.lane(LANE).lock().recovered().1;
        assert_eq!(cut, if is_found { 300 } else { 10 }, "{count} slots");
        assert_eq!(recovered.cache.status().quarantined_bytes > 0, is_found);
    }
}
