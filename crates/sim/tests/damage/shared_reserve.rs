//! The reserve of a cache with many lanes: far fewer segments than lanes, and every lane needs one at once. Whatever
//! must be recorded is recorded, whenever the cache is opened again, and clients get space afterwards.

use crate::rig::{BLOCK, Log, PAGE, Rig, SECTOR, Shape};
use cbd_engine::{OnWriteError, Settings, Step};
use cbd_sim::DiskFaults;
use cbd_types::{ByteRange, CHUNK};

const LANES: u64 = 8;
/// Segments that are reserved for all lanes together.
const RESERVE: u32 = 2;
/// Steps within which all is written back, in a cache that makes progress.
const STEPS_MAX: usize = 30_000;

fn empty() -> Rig {
    let shape =
        Shape { device: LANES * CHUNK, lanes_max: LANES as u32, segments: 1 + LANES * 8, ..Shape::default() };
    let rig = Rig::of(shape);
    assert_eq!(u64::from(rig.cache.status().lanes), LANES);
    rig
}

/// A cache of eight lanes, full of sectors of one epoch, in all lanes. `order` gives the offset in its chunk of each
/// write to it.
fn full_in(order: impl Fn(u64) -> u64) -> Rig {
    let rig = empty();
    // Short writes: the notes of a damaged segment need more room than a segment has left behind its data.
    let mut has_space = [true; LANES as usize];
    let mut number = 0;
    while has_space.contains(&true) {
        for chunk in 0..LANES {
            has_space[chunk as usize] &= rig.try_write(chunk * CHUNK + order(number), SECTOR, 9);
        }
        number += 1;
    }
    leave_no_room(&rig, LANES);
    rig
}

/// Fills what is left of the open segments of the first `lanes` chunks with records that need no data.
fn leave_no_room(rig: &Rig, lanes: u64) {
    for chunk in 0..lanes {
        while rig.try_zero(ByteRange::at((chunk + 1) * CHUNK - SECTOR, SECTOR)) {}
    }
    assert_eq!(rig.cache.status().free_segments, RESERVE, "for {LANES} lanes");
}

fn full() -> Rig {
    full_in(|number| number * 2 * SECTOR)
}

/// The number of the lane that a log segment belongs to.
fn lane_of(rig: &Rig, log: Log) -> u64 {
    u64::from(rig.memory.image()[log.base as usize + 32])
}

fn lose_data_of(rig: &Rig, is_lost: impl Fn(u64) -> bool) {
    rig.logs().into_iter().filter(|log| is_lost(lane_of(rig, *log))).for_each(|log| rig.lose_data(log, 2));
}

/// Every byte of data of every lane is lost.
fn full_of_damage() -> Rig {
    let rig = full();
    lose_data_of(&rig, |_| true);
    rig.cache.request_drain();
    rig
}

/// The disk refuses a sector in each of the first blocks of every chunk.
fn full_of_what_is_refused() -> Rig {
    let rig = full();
    parks(&rig);
    let unwritable = (0..LANES)
        .flat_map(|chunk| (0..16).map(move |number| ByteRange::at(chunk * CHUNK + number * BLOCK, SECTOR)))
        .collect();
    rig.disk.set_faults(DiskFaults { unwritable, ..DiskFaults::default() });
    rig.cache.request_drain();
    rig
}

/// Parks what the disk refuses, at once. A restart of the cache forgets this setting: the row of the backend has the
/// default.
fn parks(rig: &Rig) {
    let settings =
        Settings { on_write_error: OnWriteError::Park, write_error_after_s: 0, ..rig.cache.settings() };
    rig.cache.set_settings(settings).unwrap();
}

fn restarted(rig: Rig) -> Rig {
    let rig = rig.restart();
    parks(&rig);
    rig.cache.request_drain();
    rig
}

/// Writes back until nothing is dirty but what is parked.
fn write_back(rig: &mut Rig, context: &str) {
    for _ in 0..STEPS_MAX {
        let status = rig.cache.status();
        if status.dirty_bytes == status.parked_bytes {
            return;
        }
        rig.step();
    }
    panic!("{context}: writeback makes no progress: {:?}", rig.cache.status());
}

fn expect_space(rig: &mut Rig, context: &str) {
    for chunk in 0..LANES {
        let at = (chunk + 1) * CHUNK - PAGE;
        let has_space = (0..STEPS_MAX).any(|_| {
            let is_done = rig.try_write(at, BLOCK, 1);
            if !is_done {
                rig.step();
            }
            is_done
        });
        assert!(has_space, "{context}: a writer to chunk {chunk} waits for ever: {:?}", rig.cache.status());
    }
}

/// The number of steps until nothing is dirty, and how few segments were free.
fn steps_of(mut rig: Rig) -> (usize, u32) {
    let mut free = u32::MAX;
    for step in 0..STEPS_MAX {
        let status = rig.cache.status();
        if status.dirty_bytes == status.parked_bytes {
            return (step, free);
        }
        free = free.min(status.free_segments);
        rig.step();
    }
    panic!("writeback makes no progress: {:?}", rig.cache.status());
}

#[test]
fn damage_in_all_lanes_is_recorded_although_few_segments_are_reserved() {
    let mut rig = full_of_damage();
    let (_, free) = steps_of(full_of_damage());
    assert!(free < 2, "the reserve was used: {free}");
    write_back(&mut rig, "damage");
    let status = rig.cache.status();
    assert!(status.quarantined_bytes > 0 && status.backing_trouble.is_none(), "{status:?}");
    let quarantined = status.quarantined_bytes;
    expect_space(&mut rig, "damage");
    let mut rig = restarted(rig);
    assert!(rig.cache.status().quarantined_bytes <= quarantined, "what was written since has healed");
    assert!(rig.cache.status().quarantined_bytes >= quarantined - LANES * BLOCK);
    expect_space(&mut rig, "damage, after a restart");
}

#[test]
fn what_the_disk_refuses_in_all_lanes_is_parked_although_few_segments_are_reserved() {
    let mut rig = full_of_what_is_refused();
    write_back(&mut rig, "refused");
    assert_eq!(rig.cache.status().parked_bytes, LANES * 16 * SECTOR);
    expect_space(&mut rig, "refused");
    let mut rig = restarted(rig);
    assert_eq!(rig.cache.status().parked_bytes, LANES * 16 * SECTOR);
    expect_space(&mut rig, "refused, after a restart");
}

/// Restarts after every few steps, again and again, until the cache has room for all lanes.
fn survive_restarts(make: fn() -> Rig, context: &str) {
    let (steps, _) = steps_of(make());
    for pause in [1, 3, 7, steps / 16, steps / 5, steps / 2] {
        let mut rig = make();
        for _ in 0..12 {
            for _ in 0..pause {
                rig.step();
            }
            rig = restarted(rig);
        }
        let context = format!("{context}, restarted every {pause} of {steps} steps");
        write_back(&mut rig, &context);
        expect_space(&mut rig, &context);
    }
}

#[test]
fn damage_in_all_lanes_is_recorded_through_restarts() {
    survive_restarts(full_of_damage, "damage");
}

#[test]
fn what_the_disk_refuses_in_all_lanes_is_parked_through_restarts() {
    survive_restarts(full_of_what_is_refused, "refused");
}

#[test]
fn damage_that_appears_in_one_lane_after_the_other_between_restarts_is_recorded() {
    for backwards in [false, true] {
        let mut rig = full();
        rig.cache.request_drain();
        for number in 0..LANES {
            let lane = if backwards { LANES - 1 - number } else { number };
            lose_data_of(&rig, |of| of == lane);
            for _ in 0..40 {
                if rig.step() == (Step::Idle { until_ms: None }) || rig.cache.status().free_segments == 0 {
                    break;
                }
            }
            rig = restarted(rig);
        }
        let context = format!("lane after lane, backwards: {backwards}");
        write_back(&mut rig, &context);
        expect_space(&mut rig, &context);
    }
}

/// The last records of the last two lanes are lost, and recovery records that, each in a segment of the reserve.
/// The data of all lanes is lost as well.
fn reserve_taken_by_recovery(order: impl Fn(u64) -> u64) -> Rig {
    let mut rig = full_in(order);
    rig.cache.flush().unwrap();
    lose_data_of(&rig, |_| true);
    for lane in [LANES - 2, LANES - 1] {
        let last = rig.logs().into_iter().rfind(|log| lane_of(&rig, *log) == lane).unwrap();
        rig.lose_pair(last, 1);
    }
    rig = restarted(rig);
    assert_eq!(rig.cache.status().free_segments, 0, "{:?}", rig.cache.status());
    rig
}

#[test]
fn lanes_that_hold_the_reserve_continue_while_lanes_before_them_have_no_room() {
    for is_upward in [true, false] {
        // Writeback meets the damage of low addresses first, and the reclaim of each lane waits for that of its oldest.
        let order = |number| if is_upward { number * 2 * SECTOR } else { CHUNK / 2 - number * 2 * SECTOR };
        let mut rig = reserve_taken_by_recovery(order);
        let context = format!("the last lanes hold the reserve, upward: {is_upward}");
        write_back(&mut rig, &context);
        expect_space(&mut rig, &context);
    }
}

#[test]
fn lanes_of_one_segment_each_that_are_all_damaged_are_written_one_by_one() {
    let mut rig = empty();
    // One segment for each lane but the last, which has all others.
    for chunk in 0..LANES - 1 {
        let before = rig.cache.status().free_segments;
        for number in 0..60 {
            assert!(rig.try_write(chunk * CHUNK + number * 2 * SECTOR, SECTOR, 9));
        }
        assert_eq!(rig.cache.status().free_segments, before - 1);
    }
    let mut number = 0;
    while rig.try_write((LANES - 1) * CHUNK + number * 2 * SECTOR, SECTOR, 9) {
        number += 1;
    }
    leave_no_room(&rig, LANES);
    lose_data_of(&rig, |_| true);
    rig.cache.request_drain();
    write_back(&mut rig, "short logs");
    expect_space(&mut rig, "short logs");
}
