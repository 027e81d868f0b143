//! The failure of one page, at any offset, loses no metadata of the region.

use crate::rig::{BLOCK, Log, PAGE, Rig, SECTOR, SLOTS_PER_PAIR, Seen, Shape, value_of};

/// Offsets in two lanes that all tests here write, and a block that none writes.
const LANES: [u64; 2] = [0, 4 << 20];
const UNTOUCHED: u64 = 3 << 20;

/// Two lanes with reclaimed tails, clean and dirty segments, marks, and a drained epoch.
fn busy() -> Rig {
    let mut rig = Rig::of(Shape { device: 8 << 20, lanes_max: 2, segments: 17, ..Shape::default() });
    for round in 0..3 {
        for base in LANES {
            for block in 0..60 {
                rig.write(base + block * BLOCK, BLOCK, value_of(block + round));
            }
        }
        rig.drain();
    }
    for base in LANES {
        for sector in 0..80 {
            rig.write(base + 70 * BLOCK + sector * SECTOR, SECTOR, value_of(sector));
        }
    }
    rig.cache.flush().unwrap();
    rig
}

#[track_caller]
fn expect_everything(rig: &Rig, what: &str) {
    for base in LANES {
        for block in 0..60 {
            assert_eq!(rig.see(base + block * BLOCK), Seen::All(value_of(block + 2)), "{what}");
        }
        for sector in 0..80 {
            let at = base + 70 * BLOCK + sector * SECTOR;
            assert_eq!(rig.see(at), Seen::All(value_of(sector)), "{what}");
        }
        assert_eq!(rig.see(base + UNTOUCHED), Seen::Initial, "{what}");
    }
    assert_eq!(rig.cache.status().damaged, [], "{what}");
}

#[track_caller]
fn expect_everything_on_disk(rig: &Rig, what: &str) {
    for base in LANES {
        for block in 0..60 {
            assert_eq!(rig.on_disk(base + block * BLOCK), Seen::All(value_of(block + 2)), "{what}");
        }
        for sector in 0..80 {
            let at = base + 70 * BLOCK + sector * SECTOR;
            assert_eq!(rig.on_disk(at), Seen::All(value_of(sector)), "{what}");
        }
    }
    assert!(rig.cache.status().backing_is_consistent, "{what}");
}

/// Fails the page at `at`, restarts, and expects that no data is missing, before and after a drain.
fn expect_no_loss(at: u64, what: &str) {
    let rig = busy();
    rig.poison(at, PAGE);
    let mut rig = rig.restart();
    expect_everything(&rig, what);
    rig.drain();
    expect_everything(&rig, what);
    expect_everything_on_disk(&rig, what);
}

#[test]
fn one_failed_page_of_superblock_or_tables_loses_nothing() {
    let layout = busy().transport.info().layout;
    for at in (0..layout.segment_area).step_by(PAGE as usize) {
        expect_no_loss(at, &format!("the page at {at}"));
    }
    expect_no_loss(layout.region_size - PAGE, "the second superblock");
}

#[test]
fn one_failed_page_of_the_state_loses_nothing() {
    let rig = busy();
    let state = rig.segment(0);
    // Header, drained twice, tails twice, marks twice, and the copy of the header.
    for page in (0..7).chain([15]) {
        expect_no_loss(state + page * PAGE, &format!("page {page} of the state"));
    }
}

#[test]
fn one_failed_page_of_drained_does_not_turn_back_what_was_drained() {
    for page in [1, 2] {
        let rig = busy();
        let before = rig.cache.status().drained_epoch;
        assert!(before.0 > 0);
        rig.poison(rig.segment(0) + page * PAGE, PAGE);
        assert_eq!(rig.restart().cache.status().drained_epoch, before, "page {page}");
    }
}

#[test]
fn one_failed_header_of_a_segment_loses_nothing() {
    for log in busy().logs() {
        expect_no_loss(log.base, &format!("the header of {log:?}"));
        expect_no_loss(log.base + log.size - PAGE, &format!("the copy of the header of {log:?}"));
    }
}

#[test]
fn one_failed_page_of_records_loses_nothing_after_a_restart() {
    for log in busy().logs() {
        for slot in [0, SLOTS_PER_PAIR] {
            // The second pair of pages holds records only if the records are of sectors.
            if !has_record(&busy(), log, slot) {
                continue;
            }
            for at in log.slot(slot) {
                expect_no_loss(at, &format!("the page of slot {slot} at {at} of {log:?}"));
            }
        }
    }
}

#[test]
fn one_failed_page_of_records_loses_nothing_while_the_cache_runs() {
    for log in busy().logs() {
        for at in log.slot(0) {
            let mut rig = busy();
            rig.poison(at, PAGE);
            let what = format!("the page at {at} of {log:?}");
            expect_everything(&rig, &what);
            rig.drain();
            rig.reclaim_everything();
            expect_everything(&rig, &what);
            expect_everything_on_disk(&rig, &what);
        }
    }
}

#[test]
fn a_page_that_fails_after_the_tails_have_moved_loses_nothing_that_is_not_in_the_cache() {
    // Both slots of a tail hold the same value, so the remaining one never names a segment that was reused.
    for page in [3, 4] {
        let mut rig = busy();
        rig.reclaim_everything();
        rig.poison(rig.segment(0) + page * PAGE, PAGE);
        let rig = rig.restart();
        expect_everything(&rig, &format!("page {page}"));
    }
}

/// Whether a slot was ever used, by the type byte of a record.
fn has_record(rig: &Rig, log: Log, slot: u64) -> bool {
    let at = log.slot(slot)[0] as usize;
    let line = &rig.memory.image()[at..at + 64];
    let offset = u64::from_le_bytes(line[16..24].try_into().unwrap());
    (1..=6).contains(&line[4]) && offset < 8 << 20 && line[7] == 0
}

#[test]
fn a_second_copy_is_read_only_where_the_first_one_fails() {
    let mut rig = busy();
    rig.try_write(80 * BLOCK, 4 * BLOCK, 5);
    for _ in 0..2 {
        expect_everything(&rig, "nothing is damaged");
        rig.see_by_record(80 * BLOCK);
        rig.drain();
        rig.reclaim_everything();
        assert_eq!(rig.cache.status().rare.mirror_reads, 0, "the first copies are good");
        rig = rig.restart();
    }
    // A record, and a continuation line with checksums of a record that is longer than a block.
    let mut rig = Rig::new();
    rig.write(0, BLOCK, 1);
    rig.write(8 * BLOCK, 4 * BLOCK, 2);
    let log = rig.first_log();
    for (slot, at) in [(0, 0), (2, 8 * BLOCK)] {
        let before = rig.cache.status().rare.mirror_reads;
        rig.poison(log.slot(slot)[0], 64);
        rig.see_by_record(at);
        assert!(rig.cache.status().rare.mirror_reads > before, "slot {slot}");
    }
}
