//! What the background worker reclaims, and what it does with a region that failed.

use crate::tests::rig::{Options, Rig, SECTOR};
use crate::{OnWriteError, Settings, Step};
use alloc::{vec, vec::Vec};
use cbd_format::RecordKind;
use cbd_types::{ByteRange, CHUNK, LaneId};

const BLOCK: u64 = 4096;

fn block(number: u64) -> ByteRange {
    ByteRange::at(number * BLOCK, BLOCK)
}

fn half_full(on_write_error: OnWriteError) -> Options {
    let settings = Settings { gc_percent: 50, on_write_error, write_error_after_s: 0, ..Settings::default() };
    Options { segments: 17, settings, ..Options::default() }
}

/// Steps until `count` segments are reclaimed.
fn reclaim(rig: &mut Rig, count: u64) {
    for _ in 0..10_000 {
        if rig.cache.status().rare.segments_reclaimed >= count {
            return;
        }
        rig.step();
    }
    panic!("it reclaims no more: {:?}", rig.cache.status());
}

/// Writes blocks, one record each, until `count` segments are in use. Returns the number of blocks in each segment.
fn write_segments(rig: &Rig, count: u32) -> u64 {
    let mut number = 0;
    while rig.cache.status().used_segments() < count {
        assert!(rig.write(block(number), 1));
        number += 1;
    }
    (number - 1) / u64::from(count - 1)
}

#[test]
fn of_what_was_read_three_quarters_of_a_segment_stay_at_most_and_half_of_it_where_space_is_short() {
    // 8 of 16 segments are to be free.
    for (used, stay_of_four) in [(9, 3), (10, 3), (11, 2), (12, 2)] {
        let mut rig = Rig::new(half_full(OnWriteError::Stop));
        let blocks = write_segments(&rig, used);
        (0..blocks).for_each(|number| assert_eq!(rig.read(block(number)), [1; BLOCK as usize]));
        rig.cache.request_drain();
        reclaim(&mut rig, 1);
        let stay = blocks * BLOCK / 4 * stay_of_four / BLOCK;
        assert_eq!(
            rig.cache.status().rare.second_chances,
            stay,
            "{used} segments in use, {blocks} blocks each"
        );
        let cached: Vec<u64> =
            (0..blocks).filter(|number| rig.cache.extents(block(*number))[0].cached).collect();
        assert_eq!(cached, (0..stay).collect::<Vec<_>>());
    }
}

#[test]
fn what_reclaim_appends_again_is_marked_by_the_next_pass() {
    let mut rig = Rig::new(half_full(OnWriteError::Stop));
    write_segments(&rig, 9);
    rig.read(block(0));
    rig.cache.request_drain();
    while rig.cache.status().rare.second_chances == 0 {
        assert!(rig.step() != (Step::Idle { until_ms: None }), "it has work");
    }
    assert!(rig.cache.lanes()[0].is_touched());
}

#[test]
fn reclaim_ends_before_the_worker_sleeps_however_many_records_a_segment_has() {
    let settings = Settings { gc_percent: 0, ..Settings::default() };
    let mut rig = Rig::new(Options { settings, ..Options::default() });
    let mut number = 0;
    while rig.write(ByteRange::at(number * SECTOR, SECTOR), 1) {
        number += 1;
    }
    rig.drain_without_clock();
    let status = rig.cache.status();
    assert_eq!((status.used_segments(), status.dirty_bytes), (1, 0), "all but the open segment");
}

#[test]
fn the_lane_with_the_longest_log_is_reclaimed_first() {
    let settings = Settings { gc_percent: 55, ..Settings::default() };
    let options = Options { device: 2 * CHUNK, lanes: 2, segments: 21, settings, ..Options::default() };
    for (short, long) in [(0, CHUNK), (CHUNK, 0)] {
        let mut rig = Rig::new(options);
        let fill = |chunk: u64, segments: usize| {
            let lane = rig.cache.base().identity().lanes.lane_of(chunk);
            let mut at = chunk;
            while rig.cache.log().segments(lane).len() < segments {
                assert!(rig.write(ByteRange::at(at, BLOCK), 1));
                at += BLOCK;
            }
            lane
        };
        // 11 of 20 may be in use, and 12 are if the two open ones count by half.
        let (short, long) = (fill(short, 6), fill(long, 8));
        rig.drain();
        assert_eq!(rig.cache.status().used_segments(), 12);
        assert_eq!([short, long].map(|lane| rig.cache.log().segments(lane).len()), [6, 6]);
    }
}

#[test]
fn a_segment_without_parked_ranges_and_damage_is_reclaimed_without_a_mark() {
    let mut rig = Rig::new(half_full(OnWriteError::Stop));
    write_segments(&rig, 10);
    rig.run();
    let epoch = rig.cache.status().epoch.0;
    rig.drain();
    let status = rig.cache.status();
    assert_eq!((status.rare.segments_reclaimed, status.epoch.0), (2, epoch + 1));
}

#[test]
fn what_is_parked_or_damaged_moves_to_the_head_and_is_marked_before_its_segment_is_free() {
    for kind in [RecordKind::ParkedWrite, RecordKind::ParkedZeroes, RecordKind::Quarantine] {
        let mut rig = Rig::new(half_full(OnWriteError::Park));
        let bad: Vec<ByteRange> = (0..20).map(|number| ByteRange::at(number * BLOCK, SECTOR)).collect();
        if kind == RecordKind::ParkedZeroes {
            assert!(bad.iter().all(|range| rig.zero(*range, false)));
        } else {
            assert!(bad.iter().all(|range| rig.write(*range, 1)));
        }
        if kind == RecordKind::Quarantine {
            bad.iter().for_each(|range| rig.damage(range.start));
        } else {
            rig.disk.with(|state| state.unwritable = bad.clone());
        }
        rig.drain_without_clock();
        let mut number = 100;
        while rig.cache.status().used_segments() < 10 {
            assert!(rig.write(block(number), 2));
            number += 1;
        }
        rig.cache.request_drain();
        reclaim(&mut rig, 1);
        let moved: Vec<_> =
            rig.records_of(LaneId(0)).into_iter().filter(|(.., record)| record.kind() == kind).collect();
        let last = moved.last().map_or(0, |(.., record)| record.sequence.get());
        assert!(!moved.is_empty() && crate::tests::marked(&rig.cache, LaneId(0)) >= last, "{kind:?}");
        for cache in [rig.cache.status(), rig.recovered().status()] {
            let is_parked = kind != RecordKind::Quarantine;
            let (parked, damaged) = if is_parked { (20 * SECTOR, 0) } else { (0, 20 * SECTOR) };
            assert_eq!((cache.parked_bytes, cache.quarantined_bytes), (parked, damaged), "{kind:?}");
        }
        // Once more round the log.
        reclaim_all(&mut rig, number);
        rig.disk.with(|state| state.unwritable = Vec::new());
        rig.drain();
        let lost = if kind == RecordKind::Quarantine { 20 * SECTOR } else { 0 };
        assert_eq!((rig.cache.parked_bytes(), rig.cache.quarantined_bytes()), (0, lost));
        let value = if kind == RecordKind::ParkedWrite { 1 } else { 0 };
        if lost == 0 {
            assert!(
                bad.iter().all(|range| rig.disk.with(|state| state.bytes[range.start as usize]) == value)
            );
        }
    }
}

/// Writes as much as the cache holds.
fn reclaim_all(rig: &mut Rig, first: u64) {
    let segments = rig.cache.status().rare.segments_reclaimed + 16;
    let mut number = first;
    while rig.cache.status().rare.segments_reclaimed < segments {
        if !rig.write(block(number % 900 + 100), 3) {
            rig.cache.request_drain();
            (0..20).for_each(|_| {
                rig.step();
            });
        }
        number += 1;
    }
}

#[test]
fn damaged_data_gets_no_second_chance_and_what_stands_beside_it_does() {
    let mut rig = Rig::new(half_full(OnWriteError::Stop));
    write_segments(&rig, 9);
    rig.drain();
    let reclaimed = rig.cache.status().rare.segments_reclaimed;
    let tail = rig.records_of(LaneId(0))[0].2.range().start / BLOCK;
    (tail..tail + 3).for_each(|number| drop(rig.read(block(number))));
    rig.damage((tail + 1) * BLOCK);
    let chances = rig.cache.status().rare.second_chances;
    let mut number = 500;
    while rig.cache.status().used_segments() < 9 {
        assert!(rig.write(block(number), 1));
        number += 1;
    }
    rig.cache.request_drain();
    reclaim(&mut rig, reclaimed + 1);
    assert_eq!(rig.cache.status().rare.second_chances, chances + 2);
    let cached = |number| rig.cache.extents(block(number))[0].cached;
    assert_eq!([0, 1, 2].map(|number| cached(tail + number)), [true, false, true]);
    assert_eq!(rig.read(block(tail + 1)), [1; BLOCK as usize], "the disk has it");
}

#[test]
fn after_a_failed_store_the_worker_does_nothing() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(block(0), 1));
    rig.cache.request_drain();
    rig.transport.region().memory().fail_stores_after(0);
    let _ = rig.transport.region().store(0, &[0]);
    rig.transport.region().memory().take_ops();
    assert_eq!(rig.worker.step(), Step::Idle { until_ms: None });
    assert_eq!((rig.disk.take_asked(), rig.transport.region().memory().take_ops()), (vec![], vec![]));
}

#[test]
fn of_an_abandoned_cache_nothing_is_written_back() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(block(0), 1));
    rig.cache.request_drain();
    rig.cache.abandon();
    rig.transport.region().memory().take_ops();
    assert_eq!(rig.worker.step(), Step::Idle { until_ms: None });
    assert_eq!((rig.disk.take_asked(), rig.transport.region().memory().take_ops()), (vec![], vec![]));
}

#[test]
fn a_segment_whose_parked_data_finds_no_room_is_left_until_there_is_some_or_a_range_is_unparked() {
    for gets_room in [true, false] {
        reclaim_beside_parked_data_without_room(gets_room);
    }
}

fn reclaim_beside_parked_data_without_room(gets_room: bool) {
    let mut rig = Rig::new(half_full(OnWriteError::Park));
    rig.disk.with(|state| state.unwritable = vec![ByteRange::at(0, SECTOR)]);
    assert!(rig.write(ByteRange::at(0, SECTOR), 1));
    rig.drain_without_clock();
    rig.fill_up_from(1);
    let taken = rig.take_reserve();
    rig.cache.request_drain();
    rig.environment.set_monotonic(250);
    rig.run();
    let status = rig.cache.status();
    assert_eq!(
        (status.rare.segments_reclaimed, status.parked_bytes, status.dirty_bytes),
        (0, SECTOR, SECTOR)
    );
    if gets_room {
        // As by the last reader of a segment.
        rig.give_space(taken);
        rig.environment.set_monotonic(400);
        rig.run();
        let status = rig.cache.status();
        assert!(status.rare.segments_reclaimed >= 7, "{:?}", status.rare);
        assert_eq!(status.parked_bytes, SECTOR);
        return;
    }
    rig.disk.with(|state| state.unwritable.clear());
    rig.environment.set_monotonic(600_000);
    rig.run();
    assert_eq!(rig.cache.status().parked_bytes, 0);
    assert!(rig.cache.status().rare.segments_reclaimed >= 7, "{:?}", rig.cache.status().rare);
}

#[test]
fn a_segment_whose_damage_finds_no_room_keeps_it() {
    let mut rig = Rig::new(half_full(OnWriteError::Stop));
    assert!(rig.write(block(0), 1));
    rig.damage(0);
    rig.drain_without_clock();
    rig.fill_up_from(8);
    let taken = rig.take_reserve();
    rig.cache.request_drain();
    rig.run();
    assert_eq!(rig.cache.status().rare.segments_reclaimed, 0);
    assert_eq!((rig.cache.quarantined_bytes(), rig.recovered().quarantined_bytes()), (BLOCK, BLOCK));
    assert_eq!(taken.len(), 1);
}

#[test]
fn each_block_of_a_long_read_gets_a_second_chance() {
    let mut rig = Rig::new(half_full(OnWriteError::Stop));
    write_segments(&rig, 9);
    rig.read(ByteRange::at(BLOCK, 2 * BLOCK));
    rig.cache.request_drain();
    reclaim(&mut rig, 1);
    let cached = |number| rig.cache.extents(block(number))[0].cached;
    assert_eq!([0, 1, 2, 3].map(cached), [false, true, true, false]);
}

#[test]
fn a_block_that_is_dropped_after_a_second_chance_is_recorded_at_its_next_miss() {
    let mut rig = Rig::new(half_full(OnWriteError::Stop));
    write_segments(&rig, 9);
    rig.read(block(1));
    rig.cache.request_drain();
    reclaim(&mut rig, 1);
    let is_cached = |rig: &Rig, number| rig.cache.extents(block(number))[0].cached;
    assert_eq!([0, 1].map(|number| is_cached(&rig, number)), [false, true]);
    rig.cache.set_settings(Settings { gc_percent: 0, ..rig.cache.settings() }).expect("valid");
    rig.drain();
    // Its second place is in the open segment, which more writes seal.
    let mut number = 500;
    while is_cached(&rig, 1) {
        assert!(rig.write(block(number), 2));
        number += 1;
        rig.drain();
    }
    let base = rig.cache.base();
    let mut state = rig.cache.lane(LaneId(0)).lock();
    assert_eq!([0, 1].map(|number| state.admits(base, block(number))), [false, true]);
}

#[test]
fn parked_data_that_is_found_damaged_when_it_moves_is_quarantined() {
    let mut rig = Rig::new(half_full(OnWriteError::Park));
    rig.disk.with(|state| state.unwritable = vec![ByteRange::at(0, SECTOR)]);
    assert!(rig.write(ByteRange::at(0, SECTOR), 1));
    rig.drain_without_clock();
    assert_eq!(rig.cache.parked_bytes(), SECTOR);
    rig.damage(0);
    let mut number = 1;
    while rig.cache.status().used_segments() < 10 {
        assert!(rig.write(block(number), 2));
        number += 1;
    }
    rig.cache.request_drain();
    rig.environment.set_monotonic(250);
    rig.run();
    let status = rig.cache.status();
    assert!(status.rare.segments_reclaimed > 0 && status.parked_attempts < 2, "before it is tried again");
    assert_eq!((status.parked_bytes, status.quarantined_bytes, status.dirty_bytes), (0, SECTOR, 0));
    assert_eq!(rig.recovered().quarantined_bytes(), SECTOR);
}

#[test]
fn a_flush_of_the_backing_device_that_fails_while_the_worker_ends_is_noted() {
    for fails in [false, true] {
        let mut rig = Rig::new(Options::default());
        rig.cache.note_unflushed();
        let _ = rig.cache.request_backing_flush();
        rig.disk.with(|state| state.is_slow = true);
        rig.step();
        assert_eq!(cbd_types::BackingQueue::in_flight(rig.worker.queue()), 1);
        rig.disk.with(|state| (state.is_slow, state.refuses_flushes) = (false, fails));
        let Rig { worker, cache, .. } = rig;
        drop(worker);
        assert_eq!(cache.reported_failures(), u64::from(fails));
    }
}
