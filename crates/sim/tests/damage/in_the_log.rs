//! Damage that writeback meets: records that lost both copies, and data that does not match its checksum.

use crate::rig::{BLOCK, PAGE, Rig, SECTOR, SLOTS_PER_PAIR, Seen, Shape, value_of};
use cbd_engine::Step;
use cbd_types::{ByteRange, ErrorKind};

const WRITTEN: u64 = 70;

/// Seventy acknowledged sectors, one record each, of which the first sixty-four lose both copies.
fn with_a_lost_pair() -> Rig {
    let mut rig = Rig::new();
    rig.write_sectors(0, WRITTEN);
    rig.lose_pair(rig.first_log(), 0);
    rig.drain();
    rig
}

#[test]
fn records_behind_a_failed_page_pair_reach_the_backing_device() {
    let rig = with_a_lost_pair();
    for sector in SLOTS_PER_PAIR..WRITTEN {
        rig.expect_value(sector * SECTOR, value_of(sector));
        assert_eq!(rig.on_disk(sector * SECTOR), Seen::All(value_of(sector)), "sector {sector}");
    }
}

#[test]
fn records_behind_a_failed_page_pair_are_not_marked_bad_with_it() {
    let rig = with_a_lost_pair();
    for sector in SLOTS_PER_PAIR..WRITTEN {
        assert!(!rig.is_listed(sector * SECTOR), "sector {sector} is intact");
    }
}

#[test]
fn every_record_of_a_failed_page_pair_is_marked_bad() {
    let rig = with_a_lost_pair();
    for sector in 0..SLOTS_PER_PAIR {
        rig.expect_lost(sector * SECTOR);
        assert_eq!(rig.on_disk(sector * SECTOR), Seen::Initial, "nothing was written for sector {sector}");
    }
}

#[test]
fn every_record_of_a_failed_page_pair_stays_bad_after_a_restart() {
    let rig = with_a_lost_pair().restart();
    for sector in 0..WRITTEN {
        if sector < SLOTS_PER_PAIR {
            rig.expect_lost(sector * SECTOR);
        } else {
            rig.expect_value(sector * SECTOR, value_of(sector));
        }
    }
}

#[test]
fn every_record_of_a_failed_page_pair_stays_marked_bad_after_reclaim_and_a_restart() {
    let mut rig = with_a_lost_pair();
    rig.leave_the_segment(1 << 20);
    rig.reclaim_everything();
    for restarted in [false, true] {
        for sector in 0..SLOTS_PER_PAIR {
            rig.expect_lost(sector * SECTOR);
        }
        for sector in SLOTS_PER_PAIR..WRITTEN {
            let seen = rig.see(sector * SECTOR);
            // The backing device has it. A restart may have marked bad data that is no longer in the cache.
            assert!(
                seen == Seen::All(value_of(sector)) || restarted && seen == Seen::Media,
                "sector {sector} shows {seen:?}"
            );
        }
        if !restarted {
            rig = rig.restart();
        }
    }
}

#[test]
fn damage_of_a_failed_page_pair_is_repaired_by_an_overwrite() {
    with_a_lost_pair().expect_that_overwriting_heals();
}

#[test]
fn lost_records_do_not_count_as_dirty_for_ever() {
    let status = with_a_lost_pair().cache.status();
    assert_eq!((status.dirty_bytes, status.dirty_records), (0, 0));
}

#[test]
fn a_backing_device_that_lacks_lost_records_is_not_called_consistent() {
    let rig = with_a_lost_pair();
    assert!(!rig.cache.status().backing_is_consistent);
    assert!(!rig.restart().cache.status().backing_is_consistent, "after a restart");
}

#[test]
fn two_neighbours_that_were_lost_together_are_both_marked_bad() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 3);
    let log = rig.first_log();
    rig.lose_slots(log, &[0, 1]);
    rig.drain();
    rig.leave_the_segment(1 << 20);
    rig.reclaim_everything();
    let rig = rig.restart();
    rig.expect_lost(0);
    rig.expect_lost(SECTOR);
}

#[test]
fn each_gap_between_readable_records_is_marked_bad() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 10);
    let log = rig.first_log();
    rig.lose_slots(log, &[2, 3, 6]);
    rig.drain();
    for restarted in [false, true] {
        for sector in 0..10 {
            if [2, 3, 6].contains(&sector) {
                rig.expect_lost(sector * SECTOR);
                assert_eq!(rig.on_disk(sector * SECTOR), Seen::Initial);
            } else if sector > 6 {
                rig.expect_value(sector * SECTOR, value_of(sector));
            } else {
                // It is on the disk. The range that the lost records behind it overwrote is unknown.
                assert_eq!(rig.on_disk(sector * SECTOR), Seen::All(value_of(sector)));
                assert!([Seen::Media, Seen::All(value_of(sector))].contains(&rig.see(sector * SECTOR)));
            }
        }
        if !restarted {
            rig = rig.restart();
        }
    }
    rig.expect_that_overwriting_heals();
}

#[test]
fn a_newer_write_is_not_marked_bad_with_an_older_lost_record() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 2);
    assert!(rig.try_write(0, SECTOR, 200));
    rig.lose_slots(rig.first_log(), &[0]);
    rig.drain();
    for restarted in [false, true] {
        rig.expect_value(0, 200);
        assert_eq!(rig.on_disk(0), Seen::All(200));
        if !restarted {
            rig = rig.restart();
        }
    }
}

#[test]
fn lost_records_that_can_be_read_again_after_a_restart_stay_bad() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 4);
    let log = rig.first_log();
    rig.flip_slots(log, &[0, 1]);
    rig.drain();
    rig.flip_slots(log, &[0, 1]);
    let mut rig = rig.restart();
    // They never reached the backing device, and drained is past them: if reads returned them now, the next reclaim
    // would lose them.
    rig.expect_lost(0);
    rig.expect_lost(SECTOR);
    rig.leave_the_segment(1 << 20);
    rig.reclaim_everything();
    rig.expect_lost(0);
    rig.expect_lost(SECTOR);
}

#[test]
fn a_record_that_fails_between_collecting_and_writing_stays_bad_when_it_can_be_read_again() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 4);
    let log = rig.first_log();
    rig.cache.request_drain();
    // The first step collects, the next one writes.
    assert_eq!(rig.step(), Step::Busy);
    rig.flip_slots(log, &[1]);
    rig.settle();
    assert_eq!(rig.on_disk(SECTOR), Seen::Initial, "it was not written");
    rig.flip_slots(log, &[1]);
    let rig = rig.restart();
    rig.expect_lost(SECTOR);
    for sector in [0, 2, 3] {
        rig.expect_value(sector * SECTOR, value_of(sector));
        assert_eq!(rig.on_disk(sector * SECTOR), Seen::All(value_of(sector)));
    }
}

#[test]
fn damaged_data_costs_its_own_blocks_only() {
    let mut rig = Rig::new();
    assert!(rig.try_write(0, 3 * BLOCK, 7));
    let log = rig.first_log();
    // Data grows down from the last page: this is the second of three blocks.
    rig.memory.flip(log.base + log.size - 4096 - 2 * BLOCK + 17, 5);
    rig.drain();
    for restarted in [false, true] {
        rig.expect_value(0, 7);
        rig.expect_lost(BLOCK);
        rig.expect_value(2 * BLOCK, 7);
        assert_eq!(
            [0, BLOCK, 2 * BLOCK].map(|at| rig.on_disk(at)),
            [Seen::All(7), Seen::Initial, Seen::All(7)]
        );
        if !restarted {
            rig = rig.restart();
        }
    }
    rig.expect_that_overwriting_heals();
}

/// A lost record may have described any range, also one that a client is reading from the backing device.
#[test]
fn what_was_read_before_the_loss_was_found_does_not_hide_it() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 3);
    let (range, mut misses) = (ByteRange::at(1 << 20, SECTOR), Vec::new());
    rig.cache.read(range, &mut [0; SECTOR as usize], &mut misses).unwrap();
    rig.lose_slots(rig.first_log(), &[1]);
    rig.drain();
    rig.expect_lost(range.start);
    misses.into_iter().for_each(|miss| rig.cache.complete_fill(miss, &[1; SECTOR as usize]));
    rig.expect_lost(range.start);
}

/// Without room to note damage, writeback starts over, segment by segment. It does not write data again that is in
/// flight until that write has completed.
#[test]
fn damage_without_room_for_a_note_restarts_writeback_and_is_noted_later() {
    let mut rig = Rig::of(Shape { segments: 17, ..Shape::default() });
    rig.disk.set_latency(50);
    let mut sector = 0;
    // Every other sector, so that no two are written together.
    while rig.try_write(sector * SECTOR, SECTOR, value_of(sector)) {
        sector += 2;
    }
    let logs = rig.logs();
    logs[1..].iter().for_each(|log| rig.lose_data(*log, 2));
    // The first three are intact: they are being written when writeback meets the damage.
    let begin = 5 * PAGE;
    rig.poison(logs[0].base + begin, logs[0].size - PAGE - begin - 3 * SECTOR);
    let damaged: Vec<u64> =
        (0..sector).step_by(2).filter(|sector| rig.see(sector * SECTOR) == Seen::Media).collect();
    assert!(damaged.len() > 500);
    rig.drain();
    assert_eq!(rig.cache.status().dirty_records, 0);
    assert_eq!(rig.on_disk(0), Seen::All(value_of(0)));
    let rig = rig.restart();
    for sector in damaged {
        assert_eq!(rig.see(sector * SECTOR), Seen::Media, "sector {sector} counts as clean and is not noted");
    }
}

/// An epoch of more parts than one batch holds; the last part overwrites the first.
#[test]
fn a_long_epoch_is_written_in_parts_one_after_the_other() {
    let mut rig = Rig::of(Shape { segment: 1 << 20, segments: 24, ..Shape::default() });
    rig.disk.set_latency(50);
    for _ in 0..(128 << 10) {
        rig.zero(ByteRange::at(5 * SECTOR, SECTOR));
    }
    rig.write(5 * SECTOR, SECTOR, 7);
    rig.drain();
    assert_eq!(rig.on_disk(5 * SECTOR), Seen::All(7));
    assert_eq!(rig.cache.status().dirty_records, 0);
}

#[test]
fn a_read_that_fails_leaves_nothing_of_what_is_damaged() {
    let rig = Rig::new();
    assert!(rig.try_write(0, BLOCK, 7));
    let log = rig.first_log();
    rig.memory.flip(log.base + log.size - 4096 - BLOCK + 17, 5);
    for range in [ByteRange::at(0, BLOCK), ByteRange::at(SECTOR, SECTOR)] {
        let mut bytes = vec![0xee; range.len() as usize];
        let error = rig.cache.read(range, &mut bytes, &mut Vec::new()).expect_err("it is damaged");
        assert_eq!(error.kind(), ErrorKind::Media);
        assert!(bytes.iter().all(|byte| *byte != 7), "what was damaged is in the reader's memory");
    }
}

#[test]
fn a_damaged_overwritten_version_makes_the_backing_device_inconsistent_until_the_newer_one_is_on_it() {
    for restart in [false, true] {
        let mut rig = Rig::new();
        assert!(rig.try_write(0, BLOCK, 5) && rig.try_write(2 * BLOCK, BLOCK, 5));
        let log = rig.first_log();
        rig.memory.flip(log.base + log.size - 4096 - BLOCK + 9, 1);
        rig.cache.flush().unwrap();
        assert!(rig.try_write(0, BLOCK, 6));
        rig.cache.flush().unwrap();
        let (mut voids, mut restarted) = (0, false);
        for _ in 0..200 {
            let step = rig.step();
            // The data that the flush covered together, and the content of the disk: one without the other is not
            // crash-consistent.
            let is_torn = rig.on_disk(2 * BLOCK) == Seen::All(5) && rig.on_disk(0) != Seen::All(6);
            if is_torn {
                voids += 1;
                let status = rig.cache.status();
                assert!(!status.backing_is_consistent, "drained to {:?}", status.drained_epoch);
                if restart && !restarted && status.drained_epoch.0 > 0 {
                    restarted = true;
                    rig = rig.restart();
                    assert!(!rig.cache.status().backing_is_consistent, "after a restart");
                }
            }
            if step == (Step::Idle { until_ms: None }) {
                break;
            }
        }
        assert!(voids > 0, "the disk showed one without the other");
        rig.settle();
        assert_eq!(rig.on_disk(0), Seen::All(6));
        rig.expect_value(0, 6);
        assert!(rig.cache.status().backing_is_consistent, "restart: {restart}");
    }
}

#[test]
fn a_quarantine_that_is_lost_before_anything_else_happened_is_not_forgotten() {
    let mut rig = Rig::new();
    rig.write(0, BLOCK, 7);
    let log = rig.first_log();
    rig.lose_data(log, 1);
    rig.cache.request_drain();
    for _ in 0..1000 {
        rig.step();
        if rig.cache.status().dirty_records == 0 {
            break;
        }
    }
    assert_eq!(rig.cache.status().dirty_records, 0, "drained has passed the damage");
    // The write is in slot 0, its quarantine behind it, and there was no flush since.
    rig.lose_slots(log, &[1]);
    let rig = rig.restart();
    rig.expect_lost(0);
}
