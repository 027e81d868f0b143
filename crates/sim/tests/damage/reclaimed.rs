//! Damage in segments that are reclaimed: nothing is freed twice, no old data returns, and no damage is
//! forgotten.

use crate::outside::RigEnvironment;
use crate::rig::{BLOCK, Log, PAGE, Rig, SECTOR, Seen, Shape, value_of};
use cbd_engine::{Cache, Step};
use cbd_sim::{CrashMemory, DiskFaults, Keep};
use cbd_types::{ByteRange, CHUNK, ErrorKind};

/// One clean block at 0 whose record is lost, in a reclaimed segment.
fn reclaimed_with_a_lost_record() -> Rig {
    let mut rig = Rig::new();
    assert!(rig.try_write(0, BLOCK, 7));
    rig.drain();
    rig.lose_pair(rig.first_log(), 0);
    rig.leave_the_segment(BLOCK);
    rig.reclaim_everything();
    rig
}

#[test]
fn reads_of_a_lost_record_free_no_segment_twice() {
    let rig = reclaimed_with_a_lost_record();
    let free = rig.cache.status().free_segments;
    assert_eq!(free, rig.cache.status().segments - 1, "all but the open one");
    for _ in 0..4 {
        rig.see(0);
        assert_eq!(rig.cache.status().free_segments, free);
    }
}

#[test]
fn a_clean_block_whose_record_was_lost_is_read_from_the_backing_device_once_it_is_reclaimed() {
    reclaimed_with_a_lost_record().expect_value(0, 7);
}

#[test]
fn a_clean_block_whose_record_was_lost_and_reclaimed_survives_a_restart() {
    let rig = reclaimed_with_a_lost_record().restart();
    rig.expect_value(0, 7);
    assert_eq!(rig.cache.status().damaged, []);
}

#[test]
fn a_clean_block_whose_record_was_lost_is_read_from_the_backing_device_before_it_is_reclaimed() {
    let mut rig = Rig::of(Shape::default());
    assert!(rig.try_write(0, BLOCK, 7));
    rig.drain();
    rig.lose_pair(rig.first_log(), 0);
    assert_eq!(rig.see_by_record(0), Seen::All(7));
    assert_eq!(rig.cache.status().damaged, []);
    assert!(rig.cache.status().damage_healed > 0);
}

#[test]
fn a_dirty_block_whose_record_was_lost_is_not_read_from_the_backing_device() {
    let rig = Rig::of(Shape::default());
    assert!(rig.try_write(0, BLOCK, 7));
    rig.lose_pair(rig.first_log(), 0);
    assert_eq!(rig.see_by_record(0), Seen::Media);
    assert!(rig.is_listed(0));
}

#[test]
fn a_segment_with_a_lost_record_is_reused_by_one_writer_only() {
    let mut rig = Rig::of(Shape { device: 16 << 20, lanes_max: 2, segments: 17, ..Shape::default() });
    // Chunks 0 and 1 belong to different lanes.
    assert_eq!(rig.cache.status().lanes, 2);
    assert!(rig.try_write(0, BLOCK, 7));
    rig.drain();
    rig.lose_pair(rig.first_log(), 0);
    rig.leave_the_segment(BLOCK);
    rig.reclaim_everything();
    for _ in 0..10 {
        rig.see(0);
    }
    for round in 0..3 {
        for block in 0..200 {
            let at = block / 2 * BLOCK + block % 2 * (4 << 20);
            rig.write(at, BLOCK, value_of(block + round));
        }
        for block in 0..200 {
            rig.expect_value(block / 2 * BLOCK + block % 2 * (4 << 20), value_of(block + round));
        }
    }
    let status = rig.cache.status();
    assert!(status.free_segments <= status.segments);
    assert_eq!(status.damaged, []);
}

#[test]
fn zeroes_of_a_lost_record_do_not_cover_newer_data_when_both_are_reclaimed() {
    let mut rig = Rig::new();
    rig.zero(ByteRange::at(0, 2 * BLOCK));
    rig.drain();
    rig.lose_pair(rig.first_log(), 0);
    rig.leave_the_segment(1 << 20);
    assert!(rig.try_write(0, BLOCK, 8));
    rig.leave_the_segment(1 << 20);
    rig.reclaim_everything();
    for restarted in [false, true] {
        rig.expect_value(0, 8);
        rig.expect_value(BLOCK, 0);
        if !restarted {
            rig = rig.restart();
        }
    }
}

/// A block at 0 whose data is damaged, and whose quarantine has lost both copies since.
fn with_a_lost_quarantine() -> Rig {
    let mut rig = Rig::new();
    assert!(rig.try_write(0, BLOCK, 7));
    let log = rig.first_log();
    rig.lose_data(log, 1);
    rig.drain();
    rig.expect_lost(0);
    rig.lose_slots(log, &[1]);
    rig.leave_the_segment(1 << 20);
    rig
}

#[test]
fn damage_whose_quarantine_was_lost_outlives_reclaim_and_a_restart() {
    let mut rig = with_a_lost_quarantine();
    rig.reclaim_everything();
    rig.expect_lost(0);
    let mut rig = rig.restart();
    rig.expect_lost(0);
    // The next reclaim carries a carried quarantine again.
    rig.leave_the_segment(1 << 20);
    rig.reclaim_everything();
    rig.restart().expect_lost(0);
}

#[test]
fn a_lost_quarantine_costs_no_more_than_the_damage_when_it_is_reclaimed() {
    let mut rig = with_a_lost_quarantine();
    rig.reclaim_everything();
    let rig = rig.restart();
    assert_eq!(rig.see(BLOCK), Seen::Initial);
    rig.expect_value(1 << 20, 99);
    rig.expect_that_overwriting_heals();
}

#[test]
fn a_quarantine_outlives_any_number_of_reclaims() {
    let mut rig = Rig::new();
    assert!(rig.try_write(0, BLOCK, 7));
    rig.lose_data(rig.first_log(), 1);
    rig.drain();
    for _ in 0..5 {
        rig.leave_the_segment(1 << 20);
        rig.reclaim_everything();
        rig.expect_lost(0);
        rig = rig.restart();
        rig.expect_lost(0);
        assert_eq!(rig.see(BLOCK), Seen::Initial);
    }
    rig.expect_that_overwriting_heals();
}

/// Reclaim records a quarantine again. It is then the last record of its lane for a moment, and is marked soon after.
#[test]
fn a_power_cut_while_a_quarantine_is_carried_costs_nothing_else() {
    let mut rig = Rig::new();
    assert!(rig.try_write(0, BLOCK, 7));
    rig.lose_data(rig.first_log(), 1);
    rig.drain();
    rig.leave_the_segment(1 << 20);
    assert!(rig.try_write(BLOCK, BLOCK, 8));
    let moments = rig.moments_of(Rig::reclaim_everything);
    assert!(moments.len() > 5, "{} moments", moments.len());
    for (number, moment) in moments.iter().enumerate() {
        for fate in 0..40 {
            let memory = moment.fork().power_cut(fate, Keep::Random);
            let cache = rig.opened(&memory);
            let case = format!("moment {number}, fate {fate}");
            let (mut bytes, mut misses) = (vec![0; BLOCK as usize], Vec::new());
            let damaged = cache.read(ByteRange::at(0, BLOCK), &mut bytes, &mut misses);
            assert_eq!(damaged.map_err(|error| error.kind()), Err(ErrorKind::Media), "{case}: forgotten");
            cache.read(ByteRange::at(BLOCK, BLOCK), &mut bytes, &mut misses).expect(&case);
            assert!(misses.is_empty() && bytes.iter().all(|byte| *byte == 8), "{case}");
        }
    }
}

/// Reclaims repeatedly beside damage that stays, and restarts, so that segments are used in any order. Calls
/// `at_each_tail` with the memory at every moment.
fn reclaim_beside_damage(mut at_each_tail: impl FnMut(&Rig, CrashMemory)) {
    let mut rig = Rig::new();
    assert!(rig.try_write(0, BLOCK, 7));
    rig.lose_data(rig.first_log(), 1);
    rig.drain();
    for round in 0..12 {
        rig.leave_the_segment(1 << 20);
        let moments = rig.moments_of(Rig::reclaim_everything);
        moments.into_iter().for_each(|memory| at_each_tail(&rig, memory));
        if round % 3 == 2 {
            rig = rig.restart();
        }
    }
}

/// Expects that the damage is known, and that no other data counts as damaged.
fn expect_one_damaged_block(cache: &Cache<RigEnvironment>, what: &str) {
    let read = |at: u64| {
        let (mut bytes, mut misses) = (vec![0; BLOCK as usize], Vec::new());
        let read = cache.read(ByteRange::at(at, BLOCK), &mut bytes, &mut misses);
        misses.into_iter().for_each(|miss| cache.cancel_fill(miss));
        read.map_err(|error| error.kind())
    };
    assert_eq!(read(0), Err(ErrorKind::Media), "{what}");
    assert_eq!((read(1 << 20), read(2 << 20)), (Ok(()), Ok(())), "{what}");
}

#[test]
fn a_power_cut_while_a_tail_moves_leaves_one_slot_of_it() {
    reclaim_beside_damage(|rig, memory| {
        for fate in 0..30 {
            let cache = rig.opened(&memory.fork().power_cut(fate, Keep::Random));
            expect_one_damaged_block(&cache, &format!("fate {fate}"));
        }
    });
}

/// The lane of a log segment according to its header.
fn lane_of(rig: &Rig, log: Log) -> u32 {
    let at = log.base as usize + 32;
    rig.memory.image()[at..at + 4].try_into().map(u32::from_le_bytes).unwrap()
}

#[test]
fn a_quarantine_for_which_there_is_no_space_keeps_its_segment() {
    let mut rig = Rig::of(Shape { device: 8 << 20, lanes_max: 2, segments: 17, ..Shape::default() });
    // The oldest segment of one lane has a quarantine, and is clean.
    let lost = (3 << 20) + BLOCK;
    assert!(rig.try_write(lost, BLOCK, 7));
    rig.lose_data(rig.first_log(), 1);
    rig.reclaim_at(90);
    rig.drain();
    rig.leave_the_segment(2 << 20);
    rig.drain();
    let lane = lane_of(&rig, rig.first_log());
    // The rest of the cache is full of dirty data.
    rig.disk.set_faults(DiskFaults { flush_permille: 1000, ..DiskFaults::default() });
    let mut sector = 0;
    while [0, 4 << 20].map(|lane| rig.try_write(lane + sector * SECTOR, SECTOR, 9)).contains(&true) {
        sector += 2;
    }
    // Up to the last slot.
    for lane in [0, 4 << 20] {
        while rig.try_zero(ByteRange::at(lane, SECTOR)) {}
    }
    rig.cache.flush().unwrap();
    // The other lane notes losses until no segment is free.
    let mut slot = 0;
    while rig.cache.status().free_segments > 0 || slot < 60 {
        let log = rig.logs().into_iter().find(|log| lane_of(&rig, *log) != lane).expect("it has one");
        rig.lose_slots(log, &[slot]);
        rig = rig.restart();
        slot += 1;
        assert!(slot < 80, "{:?}", rig.cache.status());
    }
    let before = rig.cache.status().rare.quarantine_records;
    rig.reclaim_at(0);
    for _ in 0..1000 {
        rig.step();
    }
    assert_eq!(rig.cache.status().rare.quarantine_records, before, "there is space for one quarantine more");
    assert_eq!(rig.see(lost), Seen::Media);
    assert_eq!(rig.restart().see(lost), Seen::Media);
}

/// The newest segment of a lane.
fn newest_of(rig: &Rig, lane: u32) -> Option<Log> {
    rig.logs().into_iter().rfind(|log| lane_of(rig, *log) == lane)
}

/// Writes blocks to a lane until it opens a segment, which holds the last of them. Returns the number of blocks that
/// were written before that one.
fn fill_until_next_segment(rig: &Rig, lane: u32) -> u64 {
    let ordinal = || newest_of(rig, lane).map(|log| log.ordinal);
    let before = ordinal();
    let opens_another = |_: &u64| {
        assert!(rig.try_write(u64::from(lane) * CHUNK, BLOCK, 99), "there is space");
        ordinal() != before
    };
    (0..64).find(opens_another).expect("a segment is full at some time")
}

/// The slots of a tail are in two pages. If one slot still named a segment as the start of the log that was released
/// and is in use again, the failure of the other page would make the lane appear to lack that segment. Then all of
/// the lane would count as damaged, because the successor of that segment is not drained.
#[test]
fn the_failure_of_either_page_with_a_tail_brings_no_reused_segment_back() {
    let mut rig = Rig::of(Shape { device: 2 * CHUNK, lanes_max: 2, segments: 17, ..Shape::default() });
    // The lane of chunk 0 has a tail already, and its open segment has space for one block.
    fill_until_next_segment(&rig, 0);
    let blocks = fill_until_next_segment(&rig, 0);
    rig.reclaim_everything();
    let reused = newest_of(&rig, 0).expect("it is open");
    (1..blocks).for_each(|_| assert!(rig.try_write(0, BLOCK, 7)));
    // The lane of chunk 1 has two segments that can be released afterwards.
    for _ in 0..3 {
        fill_until_next_segment(&rig, 1);
    }
    rig.drain();
    assert_eq!(
        newest_of(&rig, 0).map(|log| log.ordinal),
        Some(reused.ordinal),
        "it is still open, and clean"
    );
    // No data is drained from here on.
    rig.disk.set_faults(DiskFaults { flush_permille: 1000, ..DiskFaults::default() });
    assert!(rig.try_write(0, 2 * BLOCK, 8));
    assert_eq!(newest_of(&rig, 0).map(|log| log.ordinal), Some(reused.ordinal + 1));
    // Reclaim begins with the longest log.
    for _ in 0..3 {
        fill_until_next_segment(&rig, 0);
    }
    let released = |rig: &Rig| rig.cache.status().rare.segments_reclaimed;
    let wanted = released(&rig) + 3;
    rig.reclaim_at(0);
    for _ in 0..1000 {
        if released(&rig) == wanted {
            break;
        }
        rig.step();
    }
    assert_eq!(released(&rig), wanted, "{:?}", rig.cache.status());
    // The segment that was released first is used again first, and the two others are reserved.
    while rig.try_write(0, BLOCK, 9) {}
    let used_by = rig.logs().into_iter().find(|log| log.base == reused.base).map(|log| log.ordinal);
    assert!(used_by > Some(reused.ordinal), "it is not in use again");
    rig.cache.flush().unwrap();
    for page in [3, 4] {
        let memory = rig.memory.fork().power_cut(1, Keep::Nothing);
        memory.poison(ByteRange::at(rig.segment(0) + page * PAGE, PAGE));
        let cache = rig.opened(&memory);
        let (mut bytes, mut misses) = (vec![0; BLOCK as usize], Vec::new());
        let read = cache.read(ByteRange::at(900 * BLOCK, BLOCK), &mut bytes, &mut misses);
        assert!(read.is_ok(), "page {page}: a block without a write is taken for damaged");
        misses.into_iter().for_each(|miss| cache.cancel_fill(miss));
        assert_eq!(cache.status().damaged, [], "page {page}");
    }
}

/// A full cache whose tail holds 39 quarantines, and everything behind it damaged and dirty.
fn full_of_rot() -> Rig {
    let mut rig = Rig::new();
    for block in 0..39 {
        assert!(rig.try_write(block * BLOCK, BLOCK, 7));
    }
    rig.logs().into_iter().for_each(|log| rig.lose_data(log, 1));
    rig.reclaim_at(0);
    rig.drain();
    rig.reclaim_at(90);
    let before = rig.logs().last().map_or(0, |log| log.ordinal);
    let mut block = 100;
    while rig.try_write(block * BLOCK, BLOCK, 9) {
        block += 1;
    }
    rig.logs().into_iter().filter(|log| log.ordinal > before).for_each(|log| rig.lose_data(log, 1));
    rig
}

#[test]
fn quarantines_in_a_full_cache_find_space_and_writers_continue() {
    let mut rig = full_of_rot();
    let (mut written, mut busy) = (0, 0);
    for _ in 0..2000 {
        busy = if rig.step() == Step::Busy { busy + 1 } else { 0 };
        assert!(busy < 1000, "busy without end: {:?}", rig.cache.status());
        // Clients write whatever the cache accepts.
        while written < 2000 && rig.try_write((600 + written % 300) * BLOCK, SECTOR, 9) {
            written += 1;
        }
    }
    assert_eq!(written, 2000, "{:?}", rig.cache.status());
    rig.drain();
    for block in (0..39).chain([130, 140]) {
        rig.expect_lost(block * BLOCK);
    }
    rig.expect_value(600 * BLOCK, 9);
}

/// What was acknowledged, and what was lost, when a full cache of damage crashed after `steps` steps.
fn full_of_damage_crashed_after(steps: usize) -> Rig {
    let mut rig = full_of_rot();
    for _ in 0..steps {
        rig.step();
        for block in 0..50 {
            rig.try_write((600 + block) * BLOCK, SECTOR, 9);
        }
    }
    rig.restart()
}

#[test]
fn a_full_cache_with_quarantines_opens_again_at_any_moment_and_forgets_none() {
    for steps in [0, 1, 5, 20, 100] {
        let mut rig = full_of_damage_crashed_after(steps);
        for drained in [false, true] {
            for block in 0..39 {
                rig.expect_lost(block * BLOCK);
            }
            for block in [130, 140] {
                assert_eq!(rig.see(block * BLOCK), Seen::Media, "after {steps} steps, drained: {drained}");
            }
            rig.drain();
        }
    }
}

#[test]
fn writers_of_a_full_cache_with_quarantines_continue_after_a_crash_at_any_moment() {
    for steps in [0, 1, 5, 20, 100] {
        let mut rig = full_of_damage_crashed_after(steps);
        rig.write(700 * BLOCK, BLOCK, 11);
        rig.drain();
        assert_eq!(rig.on_disk(700 * BLOCK), Seen::All(11));
    }
}

/// Reads a block as a blkdev does: a miss is filled and offered to the cache. Returns whether there was a
/// miss.
fn read_and_record(rig: &Rig, at: u64) -> bool {
    let (mut bytes, mut misses) = (vec![0; BLOCK as usize], Vec::new());
    rig.cache.read(ByteRange::at(at, BLOCK), &mut bytes, &mut misses).unwrap();
    let is_missed = !misses.is_empty();
    misses.into_iter().for_each(|miss| rig.cache.complete_fill(miss, &bytes));
    is_missed
}

#[test]
fn clean_damage_is_recorded_again_though_the_cache_is_full() {
    let mut rig = Rig::new();
    assert!(rig.try_write(0, BLOCK, 7));
    for block in 1..4 {
        rig.leave_the_segment(block * BLOCK);
    }
    rig.drain();
    assert!(read_and_record(&rig, 100 * BLOCK));
    assert!(read_and_record(&rig, 100 * BLOCK), "the cache is full: once is not enough");
    rig.lose_data(rig.first_log(), 1);
    assert!(read_and_record(&rig, 0), "it is read from the disk");
    assert!(!read_and_record(&rig, 0), "and recorded again");
    let status = rig.cache.status();
    assert_eq!((status.damage_found, status.damage_healed, status.damaged.len()), (1, 1, 0));
}
