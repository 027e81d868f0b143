//! Damage is noted once, however often a batch is retried and the cache is opened: retries take no space. If there is
//! no room to note all damage at once, it is noted segment by segment.

use crate::rig::{BLOCK, Rig, SECTOR, Seen, Shape, value_of};
use cbd_engine::{OnWriteError, Settings};
use cbd_sim::DiskFaults;
use cbd_types::ByteRange;

/// An intact block, so that there is something to flush.
const WHOLE: u64 = 1 << 20;
/// Failed flushes in a row; each one restarts the batch.
const RETRIES: u64 = 300;
/// The last sector that [`full_of_rot`] writes.
const LAST: u64 = 8192 + 1400;

fn flushes_fail(rig: &Rig) {
    rig.disk.set_faults(DiskFaults { flush_permille: 1000, ..DiskFaults::default() });
}

/// Runs the background worker until this many attempts have failed.
fn fail(rig: &mut Rig, attempts: u64) {
    flushes_fail(rig);
    rig.cache.request_drain();
    for _ in 0..200_000 {
        rig.step();
        if rig.cache.status().backing_trouble.is_some_and(|trouble| trouble.attempts >= attempts) {
            return;
        }
    }
    panic!("the flush is not tried again: {:?}", rig.cache.status());
}

fn repair(rig: &mut Rig) {
    rig.disk.set_faults(DiskFaults::default());
    rig.drain();
    let status = rig.cache.status();
    assert_eq!((status.dirty_records, status.dirty_bytes), (0, 0), "{status:?}");
    assert_eq!(status.backing_trouble, None);
}

/// A cache with some damaged dirty blocks and one intact block.
fn with_damaged_blocks(blocks: u64) -> Rig {
    let rig = Rig::new();
    for block in 0..blocks {
        assert!(rig.try_write(block * BLOCK, BLOCK, 7));
    }
    rig.logs().into_iter().for_each(|log| rig.lose_data(log, 1));
    assert!(rig.try_write(WHOLE, BLOCK, 8));
    rig
}

/// A cache that has lost a record with short writes behind it.
fn with_a_lost_record() -> Rig {
    let rig = Rig::new();
    for sector in (0..160).step_by(2) {
        assert!(rig.try_write(sector * SECTOR, SECTOR, value_of(sector)));
    }
    assert!(rig.try_write(WHOLE, BLOCK, 8));
    rig.lose_slots(rig.first_log(), &[1]);
    rig
}

/// A cache full of short writes, in descending order of their addresses; the oldest `rotten` segments have lost their
/// data. Returns the number of sectors up to the last, of which every other one was written, and the number of
/// damaged ones.
fn full_of_rot(rig: &mut Rig, rotten: impl Fn(usize) -> usize) -> (u64, u64) {
    // Across the border of two chunks, which is one of two lanes.
    let mut sector = LAST;
    while rig.try_write(sector * SECTOR, SECTOR, value_of(sector)) {
        sector -= 2;
    }
    let logs = rig.logs();
    logs[..rotten(logs.len())].iter().for_each(|log| rig.lose_data(*log, 2));
    let written: Vec<u64> = (sector + 2..=LAST).step_by(2).collect();
    let damaged = written.iter().filter(|sector| rig.see(**sector * SECTOR) == Seen::Media).count();
    (written.len() as u64, damaged as u64)
}

#[test]
fn a_disk_that_does_not_flush_for_long_uses_up_no_space() {
    for blocks in [1, 8] {
        let mut rig = with_damaged_blocks(blocks);
        let before = rig.cache.status().free_segments;
        fail(&mut rig, RETRIES);
        let status = rig.cache.status();
        assert!(status.free_segments + 1 >= before, "{blocks}: {before} -> {}", status.free_segments);
        assert!(status.rare.quarantine_records <= blocks, "{blocks}: {}", status.rare.quarantine_records);
    }
}

#[test]
fn damage_is_counted_once_by_reads_and_retries_of_writeback_and_after_it_was_overwritten() {
    let mut rig = with_damaged_blocks(2);
    let counted = |rig: &Rig| {
        let status = rig.cache.status();
        (status.damage_found, status.damage_healed, status.damaged.len())
    };
    rig.expect_lost(0);
    rig.expect_lost(0);
    assert_eq!(counted(&rig), (1, 0, 1));
    fail(&mut rig, 3);
    assert_eq!((counted(&rig).0, counted(&rig).1), (2, 0));
    fail(&mut rig, RETRIES);
    assert_eq!((counted(&rig).0, counted(&rig).1), (2, 0));
    repair(&mut rig);
    assert!(rig.try_write(0, 2 * BLOCK, 9));
    rig.drain();
    assert_eq!(counted(&rig), (2, 0, 0));
}

#[test]
fn reads_count_damage_once_though_it_does_not_fit_the_list() {
    let mut rig = Rig::of(Shape { segments: 25, ..Shape::default() });
    // The list has 1024 ranges at most.
    let (_, damaged) = full_of_rot(&mut rig, |logs| logs);
    assert!(damaged > 1024, "{damaged} damaged records fit the list");
    let found = rig.cache.status().damage_found;
    for sector in (0..=LAST).step_by(2) {
        let _ = rig.see(sector * SECTOR);
    }
    assert_eq!((found, rig.cache.status().damage_found), (1024, 1024));
}

#[test]
fn damage_that_a_read_has_met_is_in_each_of_several_statuses_that_are_taken_at_once() {
    let rig = with_damaged_blocks(64);
    (0..64).for_each(|block| rig.expect_lost(block * BLOCK));
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| {
                for _ in 0..2000 {
                    let status = rig.cache.status();
                    assert_eq!((status.damaged.len(), status.damage_found), (64, 64));
                    assert!(!status.backing_is_consistent);
                    rig.expect_lost(0);
                }
            });
        }
    });
}

#[test]
fn after_a_flush_succeeds_everything_is_drained_and_writers_continue() {
    let mut rig = with_damaged_blocks(8);
    fail(&mut rig, RETRIES);
    repair(&mut rig);
    assert_eq!(rig.on_disk(WHOLE), Seen::All(8));
    assert!(rig.try_write(2 << 20, SECTOR, 9));
    for block in 0..8 {
        rig.expect_lost(block * BLOCK);
    }
}

#[test]
fn a_lost_record_is_noted_once_while_the_disk_does_not_flush() {
    let mut rig = with_a_lost_record();
    fail(&mut rig, 2);
    let noted = rig.cache.status().rare.quarantine_records;
    let before = rig.cache.status().free_segments;
    fail(&mut rig, RETRIES);
    let status = rig.cache.status();
    assert_eq!((status.rare.quarantine_records, status.free_segments), (noted, before));
    repair(&mut rig);
    rig.expect_lost(SECTOR);
    rig.expect_value(158 * SECTOR, value_of(158));
    assert!(rig.try_write(2 << 20, SECTOR, 9));
}

#[test]
fn restarts_note_nothing_again_while_the_disk_does_not_flush() {
    for make in [|| with_damaged_blocks(8), with_a_lost_record] {
        let mut rig = make();
        fail(&mut rig, 3);
        let before = rig.cache.status().free_segments;
        for _ in 0..30 {
            rig = rig.restart();
            fail(&mut rig, 3);
            assert_eq!(rig.cache.status().rare.quarantine_records, 0, "it was noted before");
        }
        let status = rig.cache.status();
        assert!(status.free_segments + 1 >= before, "{before} -> {}", status.free_segments);
        repair(&mut rig);
        rig.expect_that_overwriting_heals();
    }
}

#[test]
fn a_loss_at_the_end_of_a_segment_is_marked_bad_at_the_same_offset_each_time() {
    let mut rig = Rig::new();
    rig.write_sectors(0, 20);
    rig.cache.flush().unwrap();
    // The last record of the lane; no record behind it shows the end of the gap.
    rig.lose_slots(rig.first_log(), &[19]);
    assert!(rig.try_write(100 * SECTOR, SECTOR, 7));
    rig.lose_slots(rig.first_log(), &[20]);
    fail(&mut rig, 2);
    let noted = rig.cache.status().rare.quarantine_records;
    fail(&mut rig, RETRIES / 3);
    assert_eq!(rig.cache.status().rare.quarantine_records, noted);
    // Later writes are newer than the loss.
    assert!(rig.try_write(0, SECTOR, 9));
    fail(&mut rig, RETRIES / 2);
    repair(&mut rig);
    let rig = rig.restart();
    rig.expect_value(0, 9);
    rig.expect_lost(SECTOR);
}

#[test]
fn reclaim_carries_only_damage_that_nothing_later_notes() {
    let rig = with_a_lost_record();
    rig.cache.flush().unwrap();
    let mut rig = rig.restart();
    assert!(rig.cache.status().free_segments > 2);
    let noted = rig.cache.status().rare.quarantine_records;
    rig.leave_the_segment(3 << 20);
    let log = rig.first_log();
    while rig.first_log().ordinal == log.ordinal && rig.cache.status().rare.segments_reclaimed == 0 {
        rig.reclaim_at(0);
        rig.cache.request_drain();
        rig.step();
    }
    // Reclaim frees the segment that has lost the record; its quarantine is in a later segment.
    assert_eq!(rig.cache.status().rare.quarantine_records, noted);
    let rig = rig.restart();
    rig.expect_lost(SECTOR);
}

/// The data of a record is lost and noted; then the record itself is lost, and the rest of what its loss marks bad is
/// noted with a map that spans the record without naming it. The reclaim of the older note carries its damage.
#[test]
fn a_note_that_spans_older_noted_damage_does_not_replace_the_older_note() {
    let mut rig = Rig::new();
    let block = |number| number * BLOCK;
    assert!(rig.try_write(block(15), BLOCK, 7));
    let log = rig.first_log();
    rig.lose_data(log, 1);
    assert!(rig.try_write(WHOLE, BLOCK, 8));
    fail(&mut rig, 2);
    assert_eq!(rig.cache.status().rare.quarantine_records, 1);
    rig.leave_the_segment(WHOLE);
    // All but four pieces around the block is newer than the record, and in later segments.
    rig.zero(ByteRange { start: 0, end: block(10) });
    rig.zero(ByteRange { start: block(20), end: rig.cache.size() });
    for number in [12, 18] {
        assert!(rig.try_write(block(number), BLOCK, 9));
    }
    rig.lose_slots(log, &[0]);
    repair(&mut rig);
    assert_eq!(rig.cache.status().rare.quarantine_records, 2, "one record with a map");
    // Only the segment with the record and its own note.
    rig.reclaim_at(0);
    while rig.cache.status().rare.segments_reclaimed == 0 {
        rig.step();
    }
    assert_eq!(rig.cache.status().rare.segments_reclaimed, 1);
    let rig = rig.restart();
    for number in [10, 13, 15, 16, 19] {
        rig.expect_lost(block(number));
    }
    for number in [12, 18] {
        rig.expect_value(block(number), 9);
    }
}

#[test]
fn a_cache_full_of_damaged_short_writes_is_drained() {
    for lanes_max in [1, 2] {
        let mut rig = Rig::of(Shape { segments: 17, lanes_max, device: 8 << 20, ..Shape::default() });
        let (written, damaged) = full_of_rot(&mut rig, |logs| logs);
        assert!(damaged > 500 && damaged * 10 > written * 9, "{damaged} of {written}");
        let before = rig.cache.status().rare.quarantine_records;
        repair(&mut rig);
        let noted = rig.cache.status().rare.quarantine_records - before;
        assert!(noted <= damaged * 2, "{damaged} damaged sectors take {noted} records");
        let sectors: Vec<u64> = (0..=LAST).filter(|sector| rig.see(sector * SECTOR) == Seen::Media).collect();
        assert_eq!(sectors.len() as u64, damaged);
        let rig = rig.restart();
        assert!(sectors.iter().all(|sector| rig.see(sector * SECTOR) == Seen::Media), "forgotten");
        rig.expect_that_overwriting_heals();
    }
}

#[test]
fn progress_adds_up_over_restarts() {
    let mut rig = Rig::of(Shape { segments: 17, device: 8 << 20, ..Shape::default() });
    let (_, damaged) = full_of_rot(&mut rig, |logs| logs);
    let mut lives = 0;
    loop {
        rig.cache.request_drain();
        for _ in 0..6 {
            rig.step();
        }
        if rig.cache.status().dirty_records == 0 {
            break;
        }
        lives += 1;
        assert!(lives < 500, "{:?}", rig.cache.status());
        rig = rig.restart();
    }
    assert!(lives > 1, "the cache drained too fast to show anything");
    let found = (0..=LAST).filter(|sector| rig.see(sector * SECTOR) == Seen::Media).count();
    assert_eq!(found as u64, damaged);
}

#[test]
fn a_cache_half_of_whose_short_writes_are_damaged_is_drained() {
    let mut rig = Rig::of(Shape { segments: 17, device: 8 << 20, ..Shape::default() });
    let (written, damaged) = full_of_rot(&mut rig, |logs| logs * 6 / 10);
    assert!(damaged > 0 && damaged < written);
    repair(&mut rig);
    let good =
        (0..=LAST).filter(|sector| rig.on_disk(sector * SECTOR) == Seen::All(value_of(*sector))).count();
    assert_eq!(good as u64, written - damaged);
}

#[test]
fn what_is_reclaimed_before_its_epoch_is_drained_is_on_the_disk_for_good() {
    let mut rig = Rig::of(Shape { segments: 17, device: 8 << 20, ..Shape::default() });
    // The newest segments are damaged, so that writeback begins with the oldest.
    let (_, damaged) = full_of_rot(&mut rig, |_| 0);
    assert_eq!(damaged, 0);
    let logs = rig.logs();
    logs[3..].iter().for_each(|log| rig.lose_data(*log, 2));
    let drained = rig.cache.status().drained_epoch;
    rig.cache.request_drain();
    let mut early = 0;
    while rig.cache.status().drained_epoch == drained {
        rig.step();
        if rig.cache.status().rare.segments_reclaimed == early {
            continue;
        }
        early = rig.cache.status().rare.segments_reclaimed;
        let durable = rig.disk.durable();
        for sector in
            (0..=LAST).step_by(2).filter(|sector| rig.see(*sector * SECTOR) == Seen::All(value_of(*sector)))
        {
            let is_cached = rig.cache.extents(ByteRange::at(sector * SECTOR, SECTOR))[0].cached;
            let byte = durable.sector(sector, SECTOR)[0];
            assert!(is_cached || byte == value_of(sector), "sector {sector} is nowhere");
        }
    }
    assert!(early > 3, "{early} segments were reclaimed early");
}

/// A full cache whose lane has used the reserve segment to note losses in `log`.
fn with_no_segment_free(log: usize) -> Rig {
    let mut rig = Rig::new();
    let mut sector = 4000;
    while rig.try_write(sector * SECTOR, SECTOR, value_of(sector)) {
        sector -= 2;
    }
    rig.cache.flush().unwrap();
    for slot in 0..40 {
        let at = rig.logs()[log];
        rig.lose_slots(at, &[10 + slot]);
        rig = rig.restart();
    }
    assert_eq!(rig.cache.status().free_segments, 0);
    rig
}

#[test]
fn a_cache_without_a_free_segment_opens_with_a_lost_record() {
    let mut rig = with_no_segment_free(3);
    rig.expect_lost(SECTOR);
    rig = rig.restart();
    rig.expect_lost(SECTOR);
    // Intact older data is written back, its segments become free, and the loss is noted.
    repair(&mut rig);
    rig.expect_lost(SECTOR);
    rig.reclaim_everything();
    let rig = rig.restart();
    rig.expect_lost(SECTOR);
    rig.expect_that_overwriting_heals();
}

#[test]
fn zeroes_are_parked_once_while_the_disk_does_not_flush() {
    let mut rig = Rig::new();
    let settings =
        Settings { on_write_error: OnWriteError::Park, write_error_after_s: 0, ..rig.cache.settings() };
    rig.cache.set_settings(settings).unwrap();
    let refused = ByteRange::at(64 * BLOCK, 2 * BLOCK);
    rig.zero(refused);
    assert!(rig.try_write(WHOLE, BLOCK, 8));
    rig.disk.set_faults(DiskFaults {
        flush_permille: 1000,
        unwritable: vec![refused],
        ..DiskFaults::default()
    });
    rig.cache.request_drain();
    let mut parked = 0;
    for _ in 0..20_000 {
        rig.step();
        let status = rig.cache.status();
        if parked == 0 && status.parked_bytes == refused.len() {
            parked = status.parked_total;
        }
        if status.backing_trouble.is_some_and(|trouble| trouble.attempts >= RETRIES / 3) {
            break;
        }
    }
    assert!(parked > 0, "{:?}", rig.cache.status());
    assert_eq!(rig.cache.status().parked_total, parked, "parked again and again");
}
