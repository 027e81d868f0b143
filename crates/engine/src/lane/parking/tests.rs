//! Parked ranges: the records that stand for them, the space that they need, and what a recovery makes of them.

use super::*;
use crate::tests::Op;
use crate::tests::rig::{Options, Rig, SECTOR};
use crate::{OnWriteError, Settings};
use alloc::vec;
use cbd_types::LaneId;

const LANE: LaneId = LaneId(0);
const BLOCK: u64 = 4096;

fn block(number: u64) -> ByteRange {
    ByteRange::at(number * BLOCK, BLOCK)
}

/// Ten blocks, of which five are parked, two of them zeroes.
fn parked() -> Rig {
    let settings =
        Settings { on_write_error: OnWriteError::Park, write_error_after_s: 0, ..Settings::default() };
    let rig = Rig::new(Options { settings, ..Options::default() });
    (0..10).for_each(|number| assert!(rig.write(block(number), 1 + number as u8)));
    assert!(rig.zero(block(4), false) && rig.zero(block(7), true));
    let mut state = rig.cache.lane(LANE).lock();
    for range in [2, 3, 4, 6, 7].map(block) {
        let mut refused = Refused::Zeroes;
        state.look_up(rig.cache.base(), range, &mut |_, source| {
            if let Source::Record(location) = source {
                refused = Refused::Data(location);
            }
        });
        assert_eq!(state.park(rig.cache.base(), range, refused, Requester::Essential, || ()), Outcome::Done);
    }
    drop(state);
    assert_eq!(ranges(&rig), [2, 3, 4, 6, 7].map(|number| (block(number), number == 4 || number == 7)));
    rig
}

fn all(rig: &Rig) -> Vec<(ByteRange, Parked)> {
    rig.cache.lane(LANE).lock().parked_ranges().collect()
}

/// The parked ranges, and whether each is zeroes.
fn ranges(rig: &Rig) -> Vec<(ByteRange, bool)> {
    all(rig).into_iter().map(|(range, parked)| (range, parked.zeroes)).collect()
}

/// The next process, which finds the same parked ranges.
fn same_recovered(rig: &Rig) -> Rig {
    let next = rig.in_memory(rig.memory());
    assert_eq!(all(&next), all(rig));
    next
}

#[test]
fn a_parked_range_names_its_record_now_and_in_the_next_process() {
    let rig = parked();
    let next = same_recovered(&rig);
    for (range, parked) in all(&rig) {
        let record = rig.cache.base().load_record(parked.location).expect("it is good");
        assert_eq!((record.sequence.get(), record.range()), (parked.sequence, range));
        assert_eq!(record.kind().is_zeroes(), parked.zeroes);
    }
    for number in 0..10 {
        let value = if number == 4 || number == 7 { 0 } else { 1 + number as u8 };
        assert_eq!(next.read(block(number)), vec![value; BLOCK as usize]);
    }
}

#[test]
fn newer_content_ends_the_parking_of_what_it_covers_for_the_next_process_too() {
    let rig = parked();
    assert!(rig.write(ByteRange::at(2 * BLOCK + SECTOR, SECTOR), 99));
    assert!(rig.zero(ByteRange { start: 6 * BLOCK - SECTOR, end: 6 * BLOCK + SECTOR }, false));
    assert!(rig.write(block(7), 98));
    let expected = [
        (ByteRange::at(2 * BLOCK, SECTOR), false),
        (ByteRange { start: 2 * BLOCK + 2 * SECTOR, end: 3 * BLOCK }, false),
        (block(3), false),
        (block(4), true),
        (ByteRange { start: 6 * BLOCK + SECTOR, end: 7 * BLOCK }, false),
    ];
    assert_eq!(ranges(&rig), expected);
    same_recovered(&rig);
}

#[test]
fn a_note_of_damage_ends_the_parking_of_the_damaged_record_and_of_no_later_one() {
    let rig = parked();
    // The twelve requests are damaged: what was parked since is newer.
    let older = ByteRange { start: 0, end: 10 * BLOCK };
    let mut state = rig.cache.lane(LANE).lock();
    assert!(state.quarantine(rig.cache.base(), older, 12, (1, 11), Requester::Essential));
    drop(state);
    assert_eq!(all(&rig).len(), 5);
    same_recovered(&rig);
    let (range, record) = all(&rig)[1];
    let mut state = rig.cache.lane(LANE).lock();
    let (sequence, place) = (record.sequence, rig.cache.base().place_of(record.location));
    assert!(state.quarantine(rig.cache.base(), range, sequence, place, Requester::Essential));
    drop(state);
    assert_eq!(ranges(&rig).len(), 4);
    assert!(ranges(&rig).iter().all(|(range, _)| *range != block(3)));
    same_recovered(&rig);
}

#[test]
fn a_lost_record_ends_the_parking_of_what_is_older() {
    let rig = parked();
    assert!(rig.write(block(20), 1) && rig.write(block(21), 1));
    rig.lose_record(20 * BLOCK);
    let next = rig.in_memory(rig.memory());
    assert_eq!((all(&next).len(), next.cache.status().parked_bytes), (0, 0));
    assert_eq!(next.cache.quarantined_bytes(), rig.options.device - BLOCK);
}

#[test]
fn parked_zeroes_are_durable_and_cancel_the_fills_that_they_overlap() {
    let rig = Rig::new(Options::default());
    let mut state = rig.cache.lane(LANE).lock();
    let fills = [block(0), block(1)].map(|range| state.register_fill(range));
    rig.transport.region().memory().take_ops();
    assert_eq!(state.append_parked_zeroes(rig.cache.base(), block(1), Requester::Essential), Outcome::Done);
    assert_eq!(rig.transport.region().memory().take_ops().last(), Some(&Op::Fence));
    assert_eq!(fills.map(|fill| state.end_fill(fill)), [true, false]);
}

#[test]
fn nothing_is_parked_without_a_slot_and_as_long_as_there_is_one_zeroes_are() {
    let rig = Rig::new(Options::default());
    let data = rig.fill_up() - 1;
    let (_, _, record) = rig.newest(data * SECTOR);
    let zeroed = ByteRange { start: rig.options.device - SECTOR, end: rig.options.device };
    let taken = rig.take_reserve();
    let base = rig.cache.base();
    let mut state = rig.cache.lane(LANE).lock();
    let mut location = None;
    state.look_up(base, record.range(), &mut |_, source| location = Some(source));
    let Some(Source::Record(location)) = location else { panic!("a record holds it") };
    let free = |number: u64| ByteRange::at(rig.options.device / 2 + number * SECTOR, SECTOR);
    let count = (0..1000)
        .take_while(|number| {
            state.append_parked_zeroes(base, free(*number), Requester::Essential) == Outcome::Done
        })
        .count();
    let open = state.segments().last().copied().expect("there is one");
    assert!(count < 1000 && !base.shape().fits(open.slots, open.data_low, 1, 0));
    assert!(base.shape().fits(open.slots - 1, open.data_low, 1, 0) && open.slots <= base.shape().slots_max());
    let before = state.parked_bytes();
    assert_eq!(before, count as u64 * SECTOR);
    for (range, refused) in [(zeroed, Refused::Zeroes), (record.range(), Refused::Data(location))] {
        assert_eq!(
            state.park(base, range, refused, Requester::Essential, || panic!("nothing is parked")),
            Outcome::NoSpace
        );
    }
    assert_eq!(state.parked_bytes(), before);
    drop(state);
    rig.give_space(taken);
}

#[test]
fn zeroes_are_parked_in_the_last_slot_of_a_segment() {
    let rig = Rig::new(Options::default());
    assert!(rig.zero(block(0), false));
    let taken = rig.take_reserve();
    let base = rig.cache.base();
    let mut state = rig.cache.lane(LANE).lock();
    for number in 1..base.shape().slots_max() {
        let range = ByteRange::at((100 + 2 * u64::from(number)) * SECTOR, SECTOR);
        assert_eq!(
            state.append_parked_zeroes(base, range, Requester::Essential),
            Outcome::Done,
            "slot {number}"
        );
    }
    assert_eq!(state.append_parked_zeroes(base, block(1), Requester::Essential), Outcome::NoSpace);
    let open = state.segments().last().copied().expect("there is one");
    assert_eq!((open.ordinal, open.slots), (1, base.shape().slots_max()));
    drop(state);
    rig.give_space(taken);
}
