//! Damage that recovery meets: it marks bad everything that later evidence proves to be lost, and nothing more; all
//! other data is present.

use crate::rig::{BLOCK, Log, PAGE, Rig, SECTOR, SLOTS_PER_PAIR, Seen, Shape, value_of};
use cbd_types::{ByteRange, ErrorKind};
use std::time::{Duration, Instant};

const WRITTEN: u64 = 70;

/// Loses the first page pair of the first segment and restarts. Expects all other data, also on the disk.
fn expect_the_rest_of_a_lost_pair(rig: Rig) {
    rig.lose_pair(rig.first_log(), 0);
    let mut rig = rig.restart();
    for drained in [false, true] {
        for sector in 0..SLOTS_PER_PAIR {
            rig.expect_lost(sector * SECTOR);
        }
        for sector in SLOTS_PER_PAIR..WRITTEN {
            rig.expect_value(sector * SECTOR, value_of(sector));
            assert!(!rig.is_listed(sector * SECTOR));
            if drained {
                assert_eq!(rig.on_disk(sector * SECTOR), Seen::All(value_of(sector)), "sector {sector}");
            }
        }
        rig.drain();
    }
    rig.expect_that_overwriting_heals();
}

#[test]
fn records_behind_a_failed_page_pair_prove_it_and_are_recovered() {
    let rig = Rig::new();
    rig.write_sectors(0, WRITTEN);
    expect_the_rest_of_a_lost_pair(rig);
}

#[test]
fn records_behind_a_failed_page_pair_are_recovered_where_a_mark_proves_it() {
    let rig = Rig::new();
    rig.write_sectors(0, WRITTEN);
    rig.cache.flush().unwrap();
    expect_the_rest_of_a_lost_pair(rig);
}

#[test]
fn records_behind_a_failed_page_pair_are_recovered_where_a_later_segment_proves_it() {
    let mut rig = Rig::new();
    rig.write_sectors(0, WRITTEN);
    rig.leave_the_segment(1 << 20);
    expect_the_rest_of_a_lost_pair(rig);
}

#[test]
fn a_lost_last_record_that_a_flush_has_marked_is_marked_bad() {
    let rig = Rig::new();
    rig.write_sectors(0, 3);
    rig.cache.flush().unwrap();
    rig.lose_slots(rig.first_log(), &[2]);
    let rig = rig.restart();
    rig.expect_lost(2 * SECTOR);
    rig.restart().expect_lost(2 * SECTOR);
}

#[test]
fn a_lane_whose_only_segment_lost_both_headers_is_marked_bad_as_far_as_it_was_flushed() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 40);
    rig.cache.flush().unwrap();
    let log = rig.first_log();
    rig.poison(log.base, PAGE);
    rig.poison(log.base + log.size - PAGE, PAGE);
    for _ in 0..2 {
        rig = rig.restart();
        for sector in 0..40 {
            rig.expect_lost(sector * SECTOR);
        }
    }
    // The lane continues, and a restart finds the new writes.
    rig.write(8 * BLOCK, BLOCK, 3);
    let rig = rig.restart();
    rig.expect_value(8 * BLOCK, 3);
    rig.expect_that_overwriting_heals();
}

/// No record has the sequence number of the loss that was marked bad.
#[test]
fn what_is_written_after_a_lane_lost_its_only_segment_is_found_again() {
    let rig = Rig::new();
    rig.write_sectors(0, 40);
    rig.cache.flush().unwrap();
    let log = rig.first_log();
    rig.poison(log.base, PAGE);
    rig.poison(log.base + log.size - PAGE, PAGE);
    let rig = rig.restart();
    rig.write_sectors(1000, 60);
    let rig = rig.restart();
    for sector in 1000..1060 {
        rig.expect_value(sector * SECTOR, value_of(sector));
    }
}

/// The dropped record and the proven one have the same sequence number.
#[test]
fn a_flushed_write_whose_segment_lost_both_headers_is_not_taken_for_a_dropped_one() {
    let rig = Rig::new();
    assert!(rig.try_write(0, BLOCK, 1));
    rig.cache.flush().unwrap();
    // Torn by a power cut: the record is there, but not all of its data.
    assert!(rig.try_write(8 * BLOCK, BLOCK, 2));
    let log = rig.first_log();
    rig.memory.flip(log.base + log.size - PAGE - 2 * BLOCK + 17, 3);
    let rig = rig.restart();
    assert_eq!(rig.see(8 * BLOCK), Seen::Initial, "a write that was never acknowledged");
    assert!(rig.try_write(20 * BLOCK, BLOCK, 3));
    rig.cache.flush().unwrap();
    let log = *rig.logs().last().unwrap();
    rig.poison(log.base, 128);
    rig.poison(log.base + log.size - PAGE, 128);
    let rig = rig.restart();
    rig.expect_lost(20 * BLOCK);
    rig.expect_that_overwriting_heals();
}

/// Recovery begins a new run, and still marks a lane that has not written since.
#[test]
fn a_mark_of_a_lane_that_wrote_nothing_since_it_was_opened_proves_its_last_record() {
    let rig = Rig::new();
    assert!(rig.try_write(0, BLOCK, 1));
    assert!(rig.try_write(8 * BLOCK, BLOCK, 2));
    let rig = rig.restart();
    rig.cache.flush().unwrap();
    let log = rig.first_log();
    rig.memory.flip(log.base + log.size - PAGE - 2 * BLOCK + 17, 3);
    let rig = rig.restart();
    assert_eq!(rig.see(8 * BLOCK), Seen::Media, "it was acknowledged and flushed");
    rig.expect_value(0, 1);
}

#[test]
fn what_recovery_found_lost_stays_so_when_it_can_be_read_again() {
    let rig = Rig::new();
    rig.write_sectors(0, 3);
    rig.cache.flush().unwrap();
    let log = rig.first_log();
    rig.flip_slots(log, &[1]);
    let rig = rig.restart();
    rig.expect_lost(0);
    rig.flip_slots(log, &[1]);
    let rig = rig.restart();
    rig.expect_lost(0);
    rig.expect_lost(SECTOR);
    rig.expect_value(2 * SECTOR, value_of(2));
}

#[test]
fn the_oldest_segment_that_lost_both_headers_marks_bad_what_it_may_have_held() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 3);
    let log = rig.first_log();
    rig.leave_the_segment(1 << 20);
    rig.poison(log.base, PAGE);
    rig.poison(log.base + log.size - PAGE, PAGE);
    let rig = rig.restart();
    rig.expect_lost(0);
    rig.expect_value(1 << 20, 99);
}

#[test]
fn a_segment_in_the_middle_that_lost_both_headers_marks_bad_what_is_older() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 3);
    rig.leave_the_segment(1 << 20);
    rig.write_sectors(100, 3);
    rig.leave_the_segment(1 << 20);
    rig.write_sectors(200, 3);
    let middle = rig.logs()[1];
    rig.poison(middle.base, PAGE);
    rig.poison(middle.base + middle.size - PAGE, PAGE);
    for _ in 0..2 {
        rig = rig.restart();
        for sector in [0, 1, 2, 100, 101, 102] {
            rig.expect_lost(sector * SECTOR);
        }
        for sector in 200..203 {
            rig.expect_value(sector * SECTOR, value_of(sector));
        }
    }
    rig.expect_that_overwriting_heals();
}

#[test]
fn a_record_that_is_older_than_a_loss_does_not_heal_it() {
    let rig = Rig::new();
    // Slot 0: another block. Slot 1: the block. Slot 2: the block again; that record is acknowledged and then lost.
    rig.write_sectors(64, 1);
    assert!(rig.try_write(0, BLOCK, 5) && rig.try_write(0, BLOCK, 6));
    rig.cache.flush().unwrap();
    let log = rig.first_log();
    rig.lose_slots(log, &[2]);
    let rig = rig.restart();
    rig.expect_lost(0);
    // Then an older record is lost, too: the block is newer than that loss, but not newer than the first one.
    rig.lose_slots(log, &[0]);
    let mut rig = rig.restart();
    rig.expect_lost(0);
    rig.drain();
    rig.expect_lost(0);
    rig.restart().expect_lost(0);
}

#[test]
fn recovery_ends_in_bounded_time_however_many_quarantines_there_are() {
    const COUNT: u64 = 4000;
    let mut rig = Rig::of(Shape { segment: 1 << 20, ..Shape::default() });
    rig.write_sectors(0, COUNT);
    rig.cache.flush().unwrap();
    for log in rig.logs() {
        rig.lose_data(log, 26);
    }
    rig.drain();
    assert_eq!(rig.see(0), Seen::Media);
    let begin = Instant::now();
    let rig = rig.restart();
    let taken = begin.elapsed();
    assert!(taken < Duration::from_secs(20), "{taken:?}: a replay for each of {COUNT} quarantines?");
    for sector in (0..COUNT).step_by(97) {
        assert_eq!(rig.see(sector * SECTOR), Seen::Media, "sector {sector}");
    }
    assert_eq!(rig.see(COUNT * SECTOR), Seen::Initial);
}

#[test]
fn a_cache_that_has_lost_most_of_its_segments_is_refused() {
    let rig = Rig::new();
    rig.write_sectors(0, 3);
    let layout = rig.transport.info().layout;
    // Both slots, of 64 bytes each, of all rows but the first four.
    let copy = (u64::from(layout.segment_count) * 64).next_multiple_of(PAGE);
    for at in [layout.segment_table, layout.segment_table + copy] {
        rig.poison(at + 4 * 64, (u64::from(layout.segment_count) - 4) * 64);
    }
    let error = rig.try_restart().err().expect("too few segments for a lane");
    assert_eq!(error.kind(), ErrorKind::Damaged, "{}", error.line());
}

#[test]
fn a_forged_mark_that_has_counted_too_far_is_refused() {
    const END: u64 = 1 << 62;
    for (lane_sequence, epoch) in [(END - 1, 1), (1, END - 1)] {
        let rig = Rig::new();
        rig.write_sectors(0, 3);
        // The first slots of the marks: behind the header, two pages of drained, and two pages of tails.
        let mut slot = [0; 64];
        slot[4..8].copy_from_slice(&18u32.to_le_bytes());
        slot[8..16].copy_from_slice(&9u64.to_le_bytes());
        slot[16..24].copy_from_slice(&u64::to_le_bytes(lane_sequence));
        slot[24..32].copy_from_slice(&u64::to_le_bytes(epoch));
        let mut summed = [0; 72];
        summed[..4].copy_from_slice(&18u32.to_le_bytes());
        summed[12..].copy_from_slice(&slot[4..]);
        slot[..4].copy_from_slice(&crc_fast::crc32_iscsi(&summed).to_le_bytes());
        rig.overwrite(rig.segment(0) + 5 * PAGE, &slot);
        let error = rig.try_restart().err().expect("no machine has counted that far");
        assert_eq!(error.kind(), ErrorKind::Damaged, "{}", error.line());
    }
}

/// Sectors 0 to 9, all on the disk. Sector 5 was written and sector 6 zeroed before; the newest records of
/// both are lost.
fn drained_with_a_lost_record() -> Rig {
    let mut rig = Rig::new();
    assert!(rig.try_write(5 * SECTOR, SECTOR, 200));
    rig.zero(ByteRange::at(6 * SECTOR, SECTOR));
    rig.write_sectors(0, 10);
    rig.drain();
    rig.lose_slots(rig.first_log(), &[7, 8]);
    rig
}

fn expect_all_of_it(rig: &Rig) {
    for sector in 0..10 {
        rig.expect_value(sector * SECTOR, value_of(sector));
    }
    assert_eq!(rig.see(100 * SECTOR), Seen::Initial);
    assert_eq!(rig.cache.status().damaged, [], "the disk has all of it");
}

#[test]
fn a_clean_record_that_is_lost_is_read_from_the_backing_device_after_a_restart() {
    let mut rig = drained_with_a_lost_record();
    for _ in 0..2 {
        rig = rig.restart();
        expect_all_of_it(&rig);
    }
    rig.expect_that_overwriting_heals();
}

#[test]
fn a_clean_record_that_is_lost_costs_nothing_where_a_later_segment_is_clean_too() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 10);
    rig.leave_the_segment(1 << 20);
    rig.drain();
    // The last record of its segment: only the header of the next segment proves the sequence number behind it.
    let logs = rig.logs();
    let first_sequence = |log: &Log| {
        let at = log.base as usize + 72;
        u64::from_le_bytes(rig.memory.image()[at..at + 8].try_into().unwrap())
    };
    let records = first_sequence(&logs[1]) - first_sequence(&logs[0]);
    rig.lose_slots(logs[0], &[records - 1]);
    let rig = rig.restart();
    expect_all_of_it(&rig);
    rig.expect_value(1 << 20, 99);
}

#[test]
fn dirty_data_behind_a_clean_record_that_is_lost_is_there_after_a_restart() {
    let mut rig = drained_with_a_lost_record();
    rig.write_sectors(20, 3);
    for _ in 0..2 {
        rig = rig.restart();
        expect_all_of_it(&rig);
        (20..23).for_each(|sector| rig.expect_value(sector * SECTOR, value_of(sector)));
    }
    rig.drain();
    assert_eq!(rig.on_disk(21 * SECTOR), Seen::All(value_of(21)));
}

#[test]
fn a_lost_record_without_a_clean_one_behind_it_is_marked_bad() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 3);
    rig.drain();
    rig.write_sectors(10, 3);
    // The first record after what was drained: the record before it is clean, those behind it are not.
    rig.lose_slots(rig.first_log(), &[3]);
    let rig = rig.restart();
    rig.expect_lost(10 * SECTOR);
    rig.expect_value(11 * SECTOR, value_of(11));
}

#[test]
fn a_lost_quarantine_is_not_taken_for_a_clean_record() {
    let mut rig = Rig::new();
    assert!(rig.try_write(0, BLOCK, 7));
    rig.lose_data(rig.first_log(), 1);
    rig.drain();
    rig.expect_lost(0);
    rig.write_sectors(20, 3);
    rig.drain();
    rig.lose_slots(rig.first_log(), &[1]);
    for _ in 0..2 {
        rig = rig.restart();
        rig.expect_lost(0);
        rig.expect_value(21 * SECTOR, value_of(21));
    }
    rig.expect_that_overwriting_heals();
}
