//! Damage in very many pieces: a lane that has lost a record is repaired block by block. Notes of the remaining
//! damage never exhaust the space of the log, and never mark repaired data bad.

use crate::rig::{Rig, SECTOR, Seen, value_of};

const SECTORS: u64 = (4 << 20) / SECTOR;

/// A cache that does not know the content of its only lane.
fn with_a_lost_lane() -> Rig {
    let rig = Rig::new();
    rig.write_sectors(0, 3);
    rig.cache.flush().unwrap();
    rig.lose_slots(rig.first_log(), &[1]);
    rig.restart()
}

/// The same cache, with every other sector overwritten.
fn with_every_other_sector_healed() -> Rig {
    let mut rig = with_a_lost_lane();
    for sector in (0..SECTORS).step_by(2) {
        rig.write(sector * SECTOR, SECTOR, value_of(sector));
    }
    rig.drain();
    rig
}

#[track_caller]
fn expect_every_other_sector(rig: &Rig) {
    for sector in (0..SECTORS).step_by(37) {
        match sector % 2 {
            0 => rig.expect_value(sector * SECTOR, value_of(sector)),
            _ => assert_eq!(rig.see(sector * SECTOR), Seen::Media, "sector {sector}"),
        }
    }
}

#[test]
fn writers_continue_and_restarts_change_nothing_however_scattered_the_damage_is() {
    let mut rig = with_every_other_sector_healed();
    for _ in 0..3 {
        expect_every_other_sector(&rig);
        // The log wraps around.
        for _ in 0..12 {
            rig.leave_the_segment((SECTORS - 8) * SECTOR);
        }
        rig.reclaim_everything();
        rig = rig.restart();
    }
    rig.expect_that_overwriting_heals();
}

#[test]
fn what_is_newer_than_a_loss_reads_well_when_it_is_reclaimed_before_the_quarantine() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 3);
    rig.cache.flush().unwrap();
    for sector in (100..500).step_by(2) {
        rig.write(sector * SECTOR, SECTOR, value_of(sector));
    }
    rig.cache.flush().unwrap();
    rig.lose_slots(rig.first_log(), &[1]);
    let mut rig = rig.restart();
    // Reclaims all segments but the one that recovery has opened for the quarantine.
    rig.reclaim_everything();
    let rig = rig.restart();
    for sector in 100..500 {
        match sector % 2 {
            0 => rig.expect_value(sector * SECTOR, value_of(sector)),
            _ => assert_eq!(rig.see(sector * SECTOR), Seen::Media, "sector {sector}"),
        }
    }
}

#[test]
fn a_quarantine_that_lost_a_line_marks_all_of_its_range_bad() {
    let mut rig = with_every_other_sector_healed();
    rig.leave_the_segment((SECTORS - 8) * SECTOR);
    rig.reclaim_everything();
    let log = rig.logs().into_iter().last().unwrap();
    // Carried records are at the front: some line of the quarantine is in every one of these slots.
    rig.cache.flush().unwrap();
    let before = rig.cache.status().damaged.len();
    assert!(before > 1000, "{before} ranges");
    rig.lose_slots(log, &[20]);
    let rig = rig.restart();
    for sector in (1..SECTORS - 16).step_by(2) {
        assert_eq!(rig.see(sector * SECTOR), Seen::Media, "sector {sector}");
    }
    rig.expect_that_overwriting_heals();
}
