//! Damage of parked data: the backing device does not have the data, so it is lost as dirty data is, and the old
//! content of the device never replaces it.

use crate::rig::{BLOCK, Rig, SECTOR, Seen};
use cbd_engine::{OnWriteError, Settings, Step};
use cbd_sim::DiskFaults;
use cbd_types::ByteRange;

/// A drained cache with the first block parked, and another block that is clean.
fn with_a_parked_block() -> Rig {
    let mut rig = Rig::new();
    let settings = rig.cache.settings();
    let park = Settings { on_write_error: OnWriteError::Park, write_error_after_s: 0, ..settings };
    rig.cache.set_settings(park).unwrap();
    refuse(&rig, &[ByteRange::at(0, BLOCK)]);
    assert!(rig.try_write(0, BLOCK, 7) && rig.try_write(2 * BLOCK, BLOCK, 8));
    write_back(&mut rig);
    assert_eq!(rig.cache.status().parked, [ByteRange::at(0, BLOCK)]);
    rig
}

fn refuse(rig: &Rig, ranges: &[ByteRange]) {
    rig.disk.set_faults(DiskFaults { unwritable: ranges.to_vec(), ..DiskFaults::default() });
}

/// Runs the background worker until only parked data is left to do.
fn write_back(rig: &mut Rig) {
    rig.cache.request_drain();
    for _ in 0..10_000 {
        let status = rig.cache.status();
        if rig.step() != Step::Busy && status.dirty_bytes == status.parked_bytes && status.dirty_records == 0
        {
            return;
        }
    }
    panic!("never drained: {:?}", rig.cache.status());
}

/// Fails all data of the lane. Parked data is then lost, and clean data is read from the disk.
fn lose_all_data(rig: &Rig) {
    rig.logs().into_iter().for_each(|log| rig.lose_data(log, 1));
}

#[test]
fn parked_data_that_is_damaged_is_not_read_from_the_backing_device() {
    let rig = with_a_parked_block();
    lose_all_data(&rig);
    rig.expect_lost(0);
    rig.expect_value(2 * BLOCK, 8);
    assert_eq!(rig.on_disk(0), Seen::Initial);
}

#[test]
fn a_parked_record_that_is_lost_is_not_read_from_the_backing_device() {
    let rig = with_a_parked_block();
    let log = rig.first_log();
    // The two writes are in slots 0 and 1, the parked record behind them.
    rig.lose_slots(log, &[2]);
    // The data is intact; while the cache runs, the index still refers to it.
    rig.expect_value(0, 7);
    assert_eq!(rig.see_by_record(0), Seen::Media);
    assert!(rig.is_listed(0));
    let rig = rig.restart();
    rig.expect_lost(0);
}

#[test]
fn a_carried_record_that_is_lost_is_not_read_from_the_backing_device_after_a_restart() {
    let mut rig = with_a_parked_block();
    let first = rig.first_log();
    rig.leave_the_segment(3 * BLOCK);
    write_back(&mut rig);
    // Reclaim frees the tail; no other event follows.
    rig.reclaim_at(0);
    while rig.logs().iter().all(|log| log.base != first.base || log.ordinal != first.ordinal) {
        rig.step();
    }
    let before = rig.cache.status().free_segments;
    for _ in 0..1000 {
        rig.worker.step();
        if rig.cache.status().free_segments > before {
            break;
        }
    }
    let head = *rig.logs().last().unwrap();
    let records = (0..200).rev().filter(|slot| !is_blank(&rig, head.slot(*slot)[0]));
    let last = records.max().unwrap();
    rig.lose_slots(head, &[last]);
    rig.restart().expect_lost(0);
}

fn is_blank(rig: &Rig, at: u64) -> bool {
    rig.memory.image()[at as usize..at as usize + 64].iter().all(|byte| *byte == 0)
}

#[test]
fn parked_data_that_is_damaged_is_marked_bad_at_a_retry_and_stays_so() {
    let mut rig = with_a_parked_block();
    lose_all_data(&rig);
    rig.cache.request_drain();
    rig.environment.advance(2_000_000);
    rig.settle();
    assert_eq!(rig.cache.status().parked, []);
    for restarted in [false, true] {
        rig.expect_lost(0);
        assert!(!rig.cache.status().backing_is_consistent);
        if !restarted {
            rig = rig.restart();
        }
    }
    refuse(&rig, &[]);
    rig.expect_that_overwriting_heals();
}

#[test]
fn parked_data_that_is_damaged_is_marked_bad_when_it_is_carried_and_stays_so() {
    let mut rig = with_a_parked_block();
    lose_all_data(&rig);
    for _ in 0..40 {
        rig.write(10 * BLOCK, 4 * BLOCK, 9);
        write_back(&mut rig);
    }
    assert_eq!(rig.cache.status().parked, []);
    rig.expect_lost(0);
    let rig = rig.restart();
    rig.expect_lost(0);
    refuse(&rig, &[]);
    rig.expect_that_overwriting_heals();
}

#[test]
fn a_parked_range_that_was_written_later_is_clean() {
    let mut rig = with_a_parked_block();
    refuse(&rig, &[]);
    rig.drain();
    assert_eq!(rig.cache.status().parked, []);
    lose_all_data(&rig);
    rig.expect_value(0, 7);
    assert_eq!(rig.on_disk(0), Seen::All(7));
}

#[test]
fn a_lost_record_behind_a_parked_one_ends_it_where_the_backing_device_has_all() {
    let mut rig = with_a_parked_block();
    refuse(&rig, &[]);
    rig.drain();
    // Newer data over the parked range is on the disk, and its record is lost: the parked data must not return.
    assert!(rig.try_write(0, BLOCK, 9));
    rig.drain();
    assert!(rig.try_write(2 * BLOCK, SECTOR, 5));
    rig.drain();
    rig.lose_slots(rig.first_log(), &[3]);
    let mut rig = rig.restart();
    rig.expect_value(0, 9);
    rig.drain();
    rig.expect_value(0, 9);
    assert_eq!(rig.on_disk(0), Seen::All(9));
}
