//! The state after recovery: evidence of the records that recovery found, repaired second copies, and no guarantee
//! that the backing device does not fulfil.

use crate::rig::{BLOCK, PAGE, Rig, SECTOR, Seen, Shape, value_of};
use cbd_engine::Transport;
use cbd_sim::{CrashMemory, Keep, until_crash};
use cbd_types::{ByteRange, CHUNK, ErrorKind, Region};
use std::sync::Arc;

fn two_lanes() -> Rig {
    let rig = Rig::of(Shape { device: 4 * CHUNK, lanes_max: 2, segments: 17, ..Shape::default() });
    assert_eq!(rig.cache.status().lanes, 2);
    rig
}

#[test]
fn a_flush_after_a_restart_proves_the_last_record_that_recovery_found() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 1);
    rig = rig.restart();
    rig.cache.flush().unwrap();
    rig.lose_slots(rig.first_log(), &[0]);
    rig.restart().expect_lost(0);
}

#[test]
fn a_backing_device_is_not_called_consistent_when_it_is_not_known_how_far_it_is_drained() {
    let mut rig = Rig::new();
    for value in 1..4 {
        assert!(rig.try_write(0, BLOCK, value) && rig.try_write(u64::from(value) * BLOCK, BLOCK, value));
        rig.cache.flush().unwrap();
    }
    rig.drain();
    assert_eq!(rig.on_disk(0), Seen::All(3));
    // The drained epoch is unknown, so writeback will write old epochs over newer ones.
    rig.poison(rig.segment(0) + PAGE, 2 * PAGE);
    let mut rig = rig.restart();
    assert!(!rig.cache.status().backing_is_consistent);
    rig.drain();
    assert!(rig.cache.status().backing_is_consistent, "{:?}", rig.cache.status().void_reason);
    assert_eq!(rig.on_disk(0), Seen::All(3));
}

#[test]
fn the_damage_of_one_lane_is_healed_by_overwriting_its_own_chunks() {
    let rig = two_lanes();
    rig.write_sectors(0, 3);
    rig.cache.flush().unwrap();
    rig.lose_slots(rig.first_log(), &[1]);
    let mut rig = rig.restart();
    rig.expect_lost(SECTOR);
    for chunk in 0..4 {
        let at = chunk * CHUNK;
        let seen = rig.see(at + BLOCK);
        assert_eq!(rig.is_listed(at + BLOCK), seen == Seen::Media, "chunk {chunk} shows {seen:?}");
        rig.zero(ByteRange::at(at, CHUNK));
    }
    assert_eq!(rig.cache.status().damaged, []);
    rig.drain();
    assert!(rig.cache.status().backing_is_consistent, "{:?}", rig.cache.status().void_reason);
    let rig = rig.restart();
    assert_eq!(rig.cache.status().damaged, []);
}

#[test]
fn a_loss_in_recovery_makes_the_backing_device_inconsistent_until_its_overwrite_is_drained() {
    let rig = Rig::new();
    rig.write_sectors(0, 2);
    rig.cache.flush().unwrap();
    rig.lose_slots(rig.first_log(), &[1]);
    let mut rig = rig.restart();
    rig.expect_lost(SECTOR);
    // The data is overwritten before writeback has read the damage.
    rig.zero(ByteRange { start: 0, end: rig.cache.size() });
    rig.cache.flush().unwrap();
    assert_eq!(rig.cache.status().damaged, []);
    let healed = rig.cache.request_drain();
    while !rig.cache.is_drained(healed) {
        assert!(!rig.cache.status().backing_is_consistent, "flushed writes are missing on the disk");
        rig.step();
    }
    rig.drain();
    assert!(rig.cache.status().backing_is_consistent, "{:?}", rig.cache.status().void_reason);
}

/// Damages the second copy of a structure, as a crash can tear it, restarts, and fails the first copy. The restart
/// must have repaired the second copy.
fn expect_that_a_restart_repairs(first: impl Fn(&Rig) -> u64, second: impl Fn(&Rig) -> u64) {
    let rig = Rig::new();
    rig.write_sectors(0, 3);
    rig.cache.flush().unwrap();
    rig.memory.flip(second(&rig) + 20, 3);
    let mut rig = rig.restart();
    let failed = first(&rig);
    rig.poison(failed, 64);
    rig = rig.restart();
    assert_eq!(rig.cache.status().damaged, []);
    for sector in 0..3 {
        rig.expect_value(sector * SECTOR, value_of(sector));
    }
    assert_eq!(rig.see(BLOCK), Seen::Initial);
}

#[test]
fn a_torn_copy_of_the_last_record_is_repaired_by_a_restart() {
    expect_that_a_restart_repairs(|rig| rig.first_log().slot(2)[0], |rig| rig.first_log().slot(2)[1]);
    expect_that_a_restart_repairs(|rig| rig.first_log().slot(2)[1], |rig| rig.first_log().slot(2)[0]);
}

#[test]
fn a_torn_copy_of_a_header_is_repaired_by_a_restart() {
    let ends = |rig: &Rig| [rig.first_log().base, rig.first_log().base + rig.first_log().size - PAGE];
    let base = std::cell::Cell::new(0);
    // The rig locates a log by the first copy.
    let first = |rig: &Rig| {
        base.set(rig.first_log().base);
        ends(rig)[0]
    };
    expect_that_a_restart_repairs(first, |rig| ends(rig)[1]);
    expect_that_a_restart_repairs(|rig| ends(rig)[1], |rig| ends(rig)[0]);
}

#[test]
fn a_torn_slot_of_the_state_is_repaired_by_a_restart() {
    // Pages 1 and 2: drained; 3 and 4: tails.
    for [a, b] in [[1, 2], [3, 4]] {
        let page = |page: u64| move |rig: &Rig| rig.segment(0) + page * PAGE;
        expect_that_a_restart_repairs(page(a), page(b));
        expect_that_a_restart_repairs(page(b), page(a));
    }
}

#[test]
fn a_torn_slot_of_a_row_is_repaired_by_a_restart() {
    let layout = |rig: &Rig| rig.transport.info().layout;
    // The backend table has four rows of 1 KiB; the segment table has rows of 64 bytes.
    expect_that_a_restart_repairs(|rig| layout(rig).backend_area, |rig| layout(rig).backend_area + 4 * 1024);
    expect_that_a_restart_repairs(|rig| layout(rig).backend_area + 4 * 1024, |rig| layout(rig).backend_area);
    let copy = |rig: &Rig| (u64::from(layout(rig).segment_count) * 64).next_multiple_of(PAGE);
    expect_that_a_restart_repairs(
        |rig| layout(rig).segment_table + 64,
        |rig| layout(rig).segment_table + 64 + copy(rig),
    );
}

#[test]
fn a_torn_slot_of_a_row_is_durably_repaired_when_the_tables_are_open() {
    let rig = Rig::new();
    let layout = rig.transport.info().layout;
    rig.memory.flip(layout.backend_area + 20, 3);
    // Twice: only the tables are opened, and the power fails.
    let mut memory = rig.memory.power_cut(1, Keep::Nothing);
    for _ in 0..2 {
        let transport = Transport::open(Arc::clone(&rig.environment), Region::new(memory.clone())).unwrap();
        assert_eq!(transport.backends().unwrap().len(), 1);
        drop(transport);
        memory = memory.power_cut(1, Keep::Nothing);
        memory.poison(ByteRange::at(layout.backend_area + 4 * 1024, PAGE));
    }
}

/// Drains and reclaims, crashes in the `crash`-th store or fence of these, restarts, fails one page of the state, and
/// restarts again. Returns whether the crash occurred.
fn crash_while_the_state_changes(crash: u64, page: u64) -> bool {
    let mut rig = Rig::new();
    rig.write(0, BLOCK, 7);
    rig.leave_the_segment(1 << 20);
    rig.reclaim_at(0);
    rig.memory.crash_after(crash, 3);
    let crashed = until_crash(|| rig.drain()).is_err();
    rig.memory.never_crash();
    let mut rig = rig.restart();
    let drained = rig.cache.status().drained_epoch;
    rig.poison(rig.segment(0) + page * PAGE, PAGE);
    rig = rig.restart();
    let status = rig.cache.status();
    assert_eq!(status.damaged, [], "a crash at {crash}, then page {page} failed");
    assert!(status.drained_epoch >= drained, "a crash at {crash}, then page {page} failed: drained fell");
    assert_eq!(rig.see(2 * BLOCK), Seen::Initial, "a crash at {crash}, then page {page} failed");
    rig.expect_value(0, 7);
    crashed
}

#[test]
fn a_crash_between_the_two_slots_of_the_state_costs_nothing_when_a_page_fails_later() {
    // Pages 1 and 2 hold drained, 3 and 4 the tails.
    for page in 1..=4 {
        let crashes = (1..).take_while(|crash| crash_while_the_state_changes(*crash, page)).count();
        assert!(crashes >= 8, "drained and a tail are stored twice each, with a fence behind each");
    }
}

/// The status of the cache, and the data at the offsets that the test reads.
fn seen_of(rig: &Rig, memory: &CrashMemory) -> String {
    let cache = rig.opened(memory);
    let values: Vec<_> = [0, BLOCK, 1 << 20]
        .into_iter()
        .map(|at| {
            let (mut sector, mut misses) = (vec![0; SECTOR as usize], Vec::new());
            let read = cache.read(ByteRange::at(at, SECTOR), &mut sector, &mut misses);
            let is_missed = !misses.is_empty();
            misses.into_iter().for_each(|miss| cache.cancel_fill(miss));
            (read.is_ok(), is_missed, sector[0])
        })
        .collect();
    let status = cache.status();
    format!("drained {:?}, {} free, {values:?}", status.drained_epoch, status.free_segments)
}

/// The memory at every store and fence of `work`, as a process that dies at that moment leaves it.
fn crashes_of(rig: &mut Rig, work: impl FnOnce(&mut Rig)) -> Vec<CrashMemory> {
    rig.moments_of(work).iter().map(CrashMemory::process_crash).collect()
}

/// A process dies at any moment in `work`, the next one recovers, and then the power and one page fail. The first
/// recovery and the next one find the same contents, whether the page failed before the first recovery or after it.
fn expect_that_what_was_found_stays(rig: &mut Rig, pages: &[u64], work: impl FnOnce(&mut Rig)) {
    for (number, crashed) in crashes_of(rig, work).into_iter().enumerate() {
        for at in pages {
            for fails_before in [false, true] {
                let memory = crashed.fork();
                if fails_before {
                    memory.poison(ByteRange::at(*at, PAGE));
                }
                let found = seen_of(rig, &memory);
                let memory = memory.power_cut(1, Keep::Nothing);
                memory.poison(ByteRange::at(*at, PAGE));
                let again = seen_of(rig, &memory);
                assert_eq!(again, found, "moment {number}, page {at}, failed before: {fails_before}");
            }
        }
    }
}

#[test]
fn how_far_a_dead_process_drained_and_reclaimed_outlives_a_power_cut_and_a_failed_page() {
    let mut rig = Rig::new();
    rig.write(0, BLOCK, 7);
    rig.leave_the_segment(1 << 20);
    // Pages 1 and 2 hold drained, 3 and 4 the tails.
    let pages: Vec<u64> = (1..=4).map(|page| rig.segment(0) + page * PAGE).collect();
    expect_that_what_was_found_stays(&mut rig, &pages, Rig::reclaim_everything);
}

/// Recovery repairs the older one of two slots. Before that, it makes stores durable that a dead process left in a
/// processor's cache.
#[test]
fn a_power_cut_while_the_state_is_repaired_leaves_one_valid_slot() {
    let mut rig = Rig::new();
    rig.write(0, BLOCK, 7);
    rig.drain();
    let drained = rig.cache.status().drained_epoch;
    rig.write(0, BLOCK, 8);
    for (number, crashed) in crashes_of(&mut rig, Rig::drain).into_iter().enumerate() {
        for step in 1.. {
            let memory = crashed.fork();
            memory.crash_after(step, step);
            if until_crash(|| rig.opened(&memory)).is_ok() {
                break;
            }
            for fate in 0..100 {
                let memory = memory.fork().power_cut(fate, Keep::Random);
                let status = rig.opened(&memory).status();
                assert!(status.drained_epoch >= drained, "moment {number}, step {step}, fate {fate}");
            }
        }
    }
}

#[test]
fn what_a_dead_process_wrote_and_another_showed_outlives_a_power_cut_and_a_failed_page() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 1);
    rig.leave_the_segment(1 << 20);
    rig.leave_the_segment(1 << 20);
    // The write begins a segment: its header with the copy, its first records and their mirrors.
    while rig.logs().len() < 4 {
        let log = *rig.logs().last().expect("there are segments");
        let next = log.base + log.size;
        let pages = [next, next + log.size - PAGE, next + PAGE, next + 2 * PAGE, log.base + PAGE];
        expect_that_what_was_found_stays(&mut rig, &pages, |rig| rig.write(BLOCK, BLOCK, 8));
    }
}

/// A flush that relies on the mark of a dead process stores no other mark: it makes that mark durable.
#[test]
fn a_mark_of_a_dead_process_that_a_flush_relied_on_outlives_a_power_cut() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 3);
    let log = rig.first_log();
    let marks = [5, 6].map(|page| rig.segment(0) + page * PAGE);
    for crashed in crashes_of(&mut rig, |rig| rig.cache.flush().unwrap()) {
        for failed in marks {
            let memory = crashed.fork();
            memory.poison(ByteRange::at(failed, PAGE));
            rig.opened(&memory).flush().unwrap();
            let memory = memory.power_cut(1, Keep::Nothing);
            log.slot(2).into_iter().for_each(|at| memory.poison(ByteRange::at(at, 64)));
            let cache = rig.opened(&memory);
            let read =
                cache.read(ByteRange::at(2 * SECTOR, SECTOR), &mut vec![0; SECTOR as usize], &mut Vec::new());
            assert_eq!(read.map_err(|error| error.kind()), Err(ErrorKind::Media), "it was flushed");
        }
    }
}

#[test]
fn new_epochs_are_above_drained_when_nothing_else_tells_of_old_ones() {
    let mut rig = Rig::new();
    rig.write(0, BLOCK, 7);
    rig.drain();
    let mut rig = rig.restart();
    rig.reclaim_everything();
    assert_eq!(rig.cache.status().free_segments, rig.cache.status().segments, "no record is left");
    for page in [5, 6] {
        rig.poison(rig.segment(0) + page * PAGE, PAGE);
    }
    let mut rig = rig.restart();
    rig.write(0, BLOCK, 8);
    rig.drain();
    assert_eq!(rig.on_disk(0), Seen::All(8));
}

#[test]
fn new_epochs_are_above_the_mark_of_a_flush_when_nothing_else_tells_of_old_ones() {
    let mut rig = Rig::new();
    for value in 1..=9 {
        rig.write(0, BLOCK, value);
        rig.cache.flush().unwrap();
    }
    rig.drain();
    let mut rig = rig.restart();
    rig.reclaim_everything();
    assert_eq!(rig.cache.status().free_segments, rig.cache.status().segments, "no record is left");
    let used = rig.cache.status().epoch;
    // Both slots of drained.
    for page in [1, 2] {
        rig.poison(rig.segment(0) + page * PAGE, PAGE);
    }
    let rig = rig.restart();
    let begun = rig.cache.status().epoch;
    assert!(begun.0 + 1 >= used.0, "epochs up to {used} were used, and they begin again at {begun}");
}
