//! What of the damage of a lane is known, noted and carried.

use super::*;
use crate::tests::Op;
use crate::tests::rig::{Options, Rig};
use cbd_types::LaneId;

const LANE: LaneId = LaneId(0);

fn sector(number: u64) -> ByteRange {
    ByteRange::at(number * SECTOR, SECTOR)
}

fn rig() -> Rig {
    Rig::new(Options::default())
}

/// The quarantines of the lane, each with its range and the record that it marks bad.
fn quarantines(rig: &Rig) -> Vec<(ByteRange, u64)> {
    let records = rig.records_of(LANE).into_iter().map(|(.., record)| record);
    let quarantines = records.filter(|record| record.kind() == RecordKind::Quarantine);
    quarantines.map(|record| (record.range(), record.reference.get())).collect()
}

#[test]
fn damage_is_known_in_the_whole_chunks_of_a_range_and_in_no_other() {
    let rig = rig();
    let mut state = rig.cache.lane(LANE).lock();
    let chunk = ByteRange::at(600 * CHUNK, CHUNK);
    let (first, last) = (ByteRange::at(chunk.start, SECTOR), ByteRange::at(chunk.end - SECTOR, SECTOR));
    let (before, behind) = (ByteRange::at(chunk.start - SECTOR, SECTOR), ByteRange::at(chunk.end, SECTOR));
    for damaged in [first, last, before, behind] {
        state.overlay = Default::default();
        state.overlay.insert(damaged, Meaning::Damaged, (2, 3));
        for range in [first, last, chunk] {
            let knows = state.knows_damage(rig.cache.base(), range, (2, 3));
            assert_eq!(knows, chunk.contains(&damaged), "{damaged} {range}");
            assert!(!state.knows_damage(rig.cache.base(), range, (2, 4)));
        }
    }
}

#[test]
fn damage_goes_with_the_last_segment_that_notes_it_and_the_tail_relies_on_it_before() {
    let rig = rig();
    let mut state = rig.cache.lane(LANE).lock();
    let carried = |state: &LaneState, ordinal| state.damage_to_carry(rig.cache.base(), ordinal);
    assert_eq!(carried(&state, 9), (vec![], false));
    state.overlay.insert_noted(sector(0), (2, 0), 2);
    state.overlay.insert_noted(sector(1), (1, 5), 2);
    state.overlay.insert_noted(sector(2), (2, 1), 4);
    state.overlay.insert_noted(sector(3), (5, 0), 5);
    state.overlay.insert_noted(sector(5), (2, 2), 1);
    assert_eq!(carried(&state, 0), (vec![], false));
    assert_eq!(carried(&state, 1), (vec![], true));
    assert_eq!(carried(&state, 2), (vec![ByteRange { start: 0, end: 2 * SECTOR }, sector(5)], true));
    let all = ByteRange { start: 0, end: 4 * SECTOR };
    assert_eq!(carried(&state, 5), (vec![all, sector(5)], true));
    state.overlay = Default::default();
    state.overlay.insert_noted(sector(0), (2, 0), 2);
    assert_eq!(carried(&state, 2), (vec![sector(0)], true));
    state.overlay.insert_noted(sector(1), (3, 0), 3);
    assert_eq!(carried(&state, 2), (vec![sector(0)], true), "later damage does not change it");
}

#[test]
fn damage_that_is_carried_is_older_than_all_that_is_left() {
    let rig = rig();
    let left = [sector(0), sector(4)];
    let mut state = rig.cache.lane(LANE).lock();
    left.iter().for_each(|part| state.overlay.insert_noted(*part, (1, 0), 1));
    state.overlay.insert_noted(sector(2), (3, 0), 3);
    rig.transport.region().memory().take_ops();
    assert!(state.carry_damage(rig.cache.base(), &left, 1));
    assert_eq!(rig.transport.region().memory().take_ops().last(), Some(&Op::Fence));
    drop(state);
    assert_eq!(quarantines(&rig), left.map(|part| (part, 0)));
}

#[test]
fn a_note_that_spans_other_damage_does_not_note_it() {
    let rig = rig();
    let mut state = rig.cache.lane(LANE).lock();
    for number in 0..20 {
        // Damage of a later record, and of the same one that is noted already.
        match number % 4 {
            1 => state.overlay.insert(sector(number), Meaning::Damaged, (1, 1)),
            3 => state.overlay.insert_noted(sector(number), (1, 0), 7),
            _ => {}
        }
    }
    let range = ByteRange { start: 0, end: 20 * SECTOR };
    assert!(state.quarantine(rig.cache.base(), range, 5, (1, 0), Requester::Essential));
    for (part, damage) in state.overlay.damaged() {
        let expected = match part.start / SECTOR % 4 {
            1 => Damage { place: (1, 1), noted: 0 },
            3 => Damage { place: (1, 0), noted: 7 },
            _ => Damage { place: (1, 0), noted: 1 },
        };
        assert_eq!(damage, expected, "{part}");
    }
    drop(state);
    assert_eq!(quarantines(&rig), [(ByteRange { start: 0, end: 19 * SECTOR }, 5)]);
}

#[test]
fn while_the_reserve_is_incomplete_the_rest_of_a_segment_is_for_what_must_make_progress() {
    let rig = rig();
    let mut state = rig.cache.lane(LANE).lock();
    let base = rig.cache.base();
    assert!(state.quarantine(base, sector(0), 1, (1, 0), Requester::Essential), "it opens a segment");
    let taken = rig.take_reserve();
    assert!(!state.quarantine(base, sector(2), 2, (1, 1), Requester::Frugal));
    assert!(state.quarantine(base, sector(2), 2, (1, 1), Requester::Essential));
    rig.give_space(taken);
    assert!(state.quarantine(base, sector(4), 3, (1, 2), Requester::Frugal));
}

#[test]
fn notes_take_a_quarter_of_the_slots_of_a_segment_at_most() {
    for (count, records) in [(111, 111), (112, 112), (113, 112), (200, 112)] {
        let rig = rig();
        let mut state = rig.cache.lane(LANE).lock();
        assert_eq!(rig.cache.base().shape().slots_max() / 4, 112);
        // In the same chunk, parts would share a map.
        let parts: Vec<_> = (0..count).map(|number| ByteRange::at(number * CHUNK, SECTOR)).collect();
        parts.iter().for_each(|part| state.overlay.insert_noted(*part, (1, 0), 1));
        assert!(state.carry_damage(rig.cache.base(), &parts, 1));
        assert_eq!(state.segments().map(|log| log.slots).sum::<u32>(), records);
    }
}

#[test]
fn a_loss_that_cannot_be_noted_is_kept() {
    let rig = rig();
    let mut state = rig.cache.lane(LANE).lock();
    assert!(state.note_last_lost(rig.cache.base()), "nothing is left to be noted");
    state.set_lost(sector(0), 1, (1, 0));
    state.set_lost(sector(1), 2, (1, 1));
    assert!(state.note_last_lost(rig.cache.base()) && state.has_lost());
    rig.transport.region().memory().fail_stores_after(0);
    let _ = rig.transport.region().store(0, &[0; 64]);
    assert!(!state.note_last_lost(rig.cache.base()) && state.has_lost());
}
