//! Which records are given, and which lines are loaded for them.

use super::*;
use crate::tests::rig::{Options, Rig, SECTOR};
use alloc::vec;
use cbd_types::ByteRange;

const COUNT: u32 = 40;

/// A segment with a record of one sector in each of its first slots; the number of the segment and its first byte.
fn rig() -> (Rig, u32, u64) {
    let rig = Rig::new(Options::default());
    for number in 0..u64::from(COUNT) {
        assert!(rig.write(ByteRange::at(number * SECTOR, SECTOR), 1));
    }
    let state = rig.cache.lanes()[0].lock();
    let segment = state.segments().next().expect("there is one").segment;
    drop(state);
    let base = rig.cache.base().segment(segment).base();
    (rig, segment, base)
}

/// The first copy of a slot of the first page.
fn line(base: u64, slot: u64) -> u64 {
    base + PAGE + slot * 64
}

fn starts(rig: &Rig, segment: u32, slots: Range<u32>) -> Vec<u64> {
    let mut records = rig.cache.base().records_of(segment, COUNT);
    let read =
        |slot| rig.cache.base().record_of(&mut records, slot).expect("it is there").range().start / SECTOR;
    slots.map(read).collect()
}

#[test]
fn who_goes_on_loads_more_lines_at_once_and_none_behind_the_end() {
    let (rig, segment, base) = rig();
    let memory = rig.transport.region().memory();
    memory.take_loads();
    assert_eq!(starts(&rig, segment, 0..COUNT), (0..u64::from(COUNT)).collect::<Vec<_>>());
    let expected = [(0, 1), (1, 4), (5, 16), (21, 19)].map(|(slot, lines)| (line(base, slot), lines * 64));
    assert_eq!(memory.take_loads(), expected);
    let mut records = rig.cache.base().records_of(segment, 3);
    assert!(rig.cache.base().record_of(&mut records, 3).is_none() && memory.take_loads().is_empty());
    assert!(
        rig.cache
            .base()
            .record_of(&mut rig.cache.base().records_of(segment, u32::MAX), u32::MAX - 1)
            .is_none()
    );
}

#[test]
fn a_record_whose_first_copy_is_damaged_is_read_from_the_second() {
    let (rig, segment, base) = rig();
    let _ = rig.transport.region().store(line(base, 3), &[0xff; 8]);
    assert_eq!(starts(&rig, segment, 0..COUNT), (0..u64::from(COUNT)).collect::<Vec<_>>());
}

#[test]
fn lines_behind_failed_memory_are_loaded_one_by_one_again() {
    let (rig, segment, base) = rig();
    let memory = rig.transport.region().memory();
    memory.fail(ByteRange::at(line(base, 7), 64));
    memory.take_loads();
    assert_eq!(starts(&rig, segment, 5..12), (5..12).collect::<Vec<_>>());
    let loads = memory.take_loads();
    assert_eq!(loads[..2], [(line(base, 5), 64), (line(base, 6), 256)], "the second load fails");
    let single = loads[2..].iter().filter(|(_, length)| *length == 64).count();
    assert!(single >= 3 && loads.last().is_some_and(|(_, length)| *length > 64), "{loads:?}");
}

#[test]
fn good_records_end_where_a_first_copy_is_damaged_or_the_page_ends() {
    let (rig, segment, base) = rig();
    let good = |from: u32| -> Vec<u32> {
        let mut records = rig.cache.base().records_of(segment, COUNT);
        let found = core::cell::Cell::new(0);
        let good = rig.cache.base().good_records(&mut records, from, |_| found.set(found.get() + 1));
        assert_eq!(found.get(), good.len());
        assert!(good.iter().all(|(slot, record)| record.range().start == u64::from(*slot) * SECTOR));
        good.iter().map(|(slot, _)| *slot).collect()
    };
    assert_eq!(good(0), (0..COUNT).collect::<Vec<_>>());
    assert_eq!(good(39), [39]);
    assert_eq!((good(40), good(41)), (vec![], vec![]));
    let _ = rig.transport.region().store(line(base, 3), &[0xff; 8]);
    assert_eq!((good(0), good(3), good(4)), (vec![0, 1, 2], vec![], (4..COUNT).collect()));
    for number in u64::from(COUNT)..70 {
        assert!(rig.write(ByteRange::at(number * SECTOR, SECTOR), 1));
    }
    let mut records = rig.cache.base().records_of(segment, 70);
    let last = rig.cache.base().good_records(&mut records, 4, |_| {}).last().map(|(slot, _)| *slot);
    assert_eq!(last, Some(63));
}
