//! What reads, the status and the tools get to see of damage.

use super::rig::{Options, Rig, SECTOR};
use crate::{CachedState, LogEntry, OnWriteError, Settings};
use alloc::{vec, vec::Vec};
use cbd_types::{ByteRange, CHUNK, Error, ErrorKind, LaneId};

const BLOCK: u64 = 4096;

fn blocks(first: u64, count: u64) -> ByteRange {
    ByteRange::at(first * BLOCK, count * BLOCK)
}

fn read(rig: &Rig, range: ByteRange) -> Result<Vec<ByteRange>, Error> {
    let (mut bytes, mut misses) = (vec![0; range.len() as usize], Vec::new());
    let result = rig.cache.read(range, &mut bytes, &mut misses);
    assert!(result.is_ok() || misses.is_empty(), "what fails leaves nothing to be read");
    let missed = misses.iter().map(|miss| miss.range).collect();
    misses.into_iter().for_each(|miss| rig.cache.cancel_fill(miss));
    result.map(|()| missed)
}

/// Damaged records found, those that were healed, and the ranges that are listed.
fn found(rig: &Rig) -> (u64, u64, Vec<ByteRange>) {
    let status = rig.cache.status();
    let listed = status.damaged.iter().map(|damaged| damaged.range).collect();
    (status.damage_found, status.damage_healed, listed)
}

#[test]
fn a_read_fails_with_the_first_damage_that_it_meets_wherever_that_stands() {
    for damaged in [vec![0], vec![1], vec![2], vec![1, 2]] {
        let rig = Rig::new(Options::default());
        (0..3).for_each(|block| assert!(rig.write(blocks(block, 1), 1)));
        damaged.iter().for_each(|block| rig.damage(block * BLOCK));
        // The fourth block is not cached.
        let error = read(&rig, blocks(0, 4)).expect_err("it is damaged");
        assert_eq!(error.kind(), ErrorKind::Media);
        assert!(
            error.line().contains(&alloc::format!("data of {}", blocks(damaged[0], 1))),
            "{}",
            error.line()
        );
        assert_eq!(rig.cache.lanes()[0].lock().pending_fills(), 0, "nothing waits for a fill");
        assert_eq!(read(&rig, blocks(3, 1)).expect("it is whole"), [blocks(3, 1)]);
    }
}

#[test]
fn a_damaged_record_counts_once_and_its_ranges_are_listed_one_by_one() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(blocks(0, 3), 1));
    for block in [0, 2, 0] {
        if found(&rig).2.len() < 2 {
            rig.damage(block * BLOCK);
        }
        assert!(read(&rig, blocks(block, 1)).is_err());
    }
    assert_eq!(found(&rig), (1, 0, vec![blocks(0, 1), blocks(2, 1)]));
    // The same range of another record is other damage.
    assert!(rig.write(blocks(0, 1), 2));
    rig.damage(0);
    assert!(read(&rig, blocks(0, 1)).is_err());
    assert_eq!(found(&rig), (2, 0, vec![blocks(2, 1), blocks(0, 1)]));
    rig.drain();
    let status = rig.cache.status();
    assert_eq!((status.damage_found, status.quarantined_bytes), (2, 2 * BLOCK), "writeback finds the same");
    assert_eq!(status.damaged.len(), 2);
    assert!(status.damaged.iter().all(|damaged| damaged.reason == "quarantined"), "listed once");
}

#[test]
fn a_lost_record_is_read_from_the_disk_only_if_its_segment_is_clean() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(blocks(0, 2), 1));
    rig.drain();
    rig.lose_record(0);
    assert_eq!(rig.read(blocks(0, 2)), [1; 2 * BLOCK as usize]);
    assert_eq!(found(&rig), (1, 1, vec![]));
    assert_eq!(rig.read(blocks(0, 2)), [1; 2 * BLOCK as usize]);
    assert_eq!(found(&rig), (1, 1, vec![]), "it is cached again");
    // There is a clean segment, but the next record is in another one.
    let before = rig.cache.log().segments(LaneId(0)).len();
    while rig.cache.log().segments(LaneId(0)).len() == before {
        assert!(rig.write(blocks(4, 2), 2));
        rig.drain();
    }
    assert!(rig.write(blocks(6, 2), 3));
    rig.lose_record(6 * BLOCK);
    assert_eq!(read(&rig, blocks(6, 2)).expect_err("the disk has it not").kind(), ErrorKind::Media);
    let dirty = CachedState { range: blocks(6, 2), zeroes: false, cached: true, dirty: true };
    assert_eq!(rig.cache.extents(blocks(6, 2)), [dirty]);
    assert_eq!(found(&rig), (2, 1, vec![blocks(6, 2)]));
}

#[test]
fn a_record_of_another_range_than_the_index_says_is_no_data() {
    let mut rig = Rig::new(Options::default());
    assert!(rig.write(blocks(0, 2), 1));
    rig.drain();
    let (segment, slot, mut record) = rig.newest(0);
    record.offset = (8 * BLOCK).into();
    let line = record.encode(&rig.cache.log().place(&segment, slot));
    for at in rig.cache.log().shape().slot(slot) {
        let _ = rig.transport.region().store(segment.base + at, &line);
    }
    let error = read(&rig, blocks(0, 2)).expect_err("the index and the log disagree");
    assert_eq!(error.kind(), ErrorKind::Damaged);
}

#[test]
fn extents_show_damage_and_what_is_parked_as_dirty_and_fills_as_clean() {
    let settings =
        Settings { on_write_error: OnWriteError::Park, write_error_after_s: 0, ..Settings::default() };
    let options = Options { device: 2 * CHUNK, lanes: 2, segments: 19, settings, ..Options::default() };
    let mut rig = Rig::new(options);
    rig.disk.with(|state| state.unwritable = vec![ByteRange::at(2 * BLOCK, SECTOR)]);
    (0..3).for_each(|block| assert!(rig.write(blocks(block, 1), 1)));
    assert!(rig.write(ByteRange::at(CHUNK, SECTOR), 2));
    rig.damage(BLOCK);
    rig.drain_without_clock();
    rig.read(ByteRange::at(CHUNK - BLOCK, BLOCK));
    let state = |start, length, cached, dirty| CachedState {
        range: ByteRange::at(start, length),
        zeroes: false,
        cached,
        dirty,
    };
    let expected = [
        state(0, BLOCK, true, false),
        state(BLOCK, BLOCK + SECTOR, true, true),
        state(2 * BLOCK + SECTOR, BLOCK - SECTOR, true, false),
        state(3 * BLOCK, CHUNK - 4 * BLOCK, false, false),
        state(CHUNK - BLOCK, BLOCK + SECTOR, true, false),
        state(CHUNK + SECTOR, BLOCK, false, false),
    ];
    assert_eq!(rig.cache.extents(ByteRange { start: 0, end: CHUNK + SECTOR + BLOCK }), expected);
    let status = rig.cache.status();
    assert_eq!((status.dirty_bytes, rig.cache.dirty_bytes()), (SECTOR, SECTOR));
    assert!(rig.write(blocks(5, 1), 1));
    assert_eq!(rig.cache.dirty_bytes(), SECTOR + BLOCK);
}

#[test]
fn a_cache_holds_nothing_dirty_only_if_the_disk_alone_has_all() {
    let parks =
        Settings { on_write_error: OnWriteError::Park, write_error_after_s: 0, ..Settings::default() };
    let rig = || Rig::new(Options { settings: parks, ..Options::default() });
    let mut clean = rig();
    assert!(clean.cache.holds_nothing_dirty() && clean.write(blocks(0, 1), 1));
    clean.drain();
    assert!(clean.cache.holds_nothing_dirty());
    let zeroed = rig();
    assert!(zeroed.zero(blocks(0, 1), true) && !zeroed.cache.holds_nothing_dirty());
    let mut parked = rig();
    parked.disk.with(|state| state.unwritable = vec![blocks(0, 1)]);
    assert!(parked.write(blocks(0, 1), 1));
    parked.drain_without_clock();
    assert_eq!(parked.cache.status().dirty_records, 0);
    assert!(!parked.cache.holds_nothing_dirty());
    let mut damaged = rig();
    assert!(damaged.write(blocks(0, 1), 1));
    damaged.damage(0);
    damaged.drain();
    assert_eq!((damaged.cache.dirty_bytes(), damaged.cache.holds_nothing_dirty()), (0, false));
}

#[test]
fn the_log_shows_each_record_and_each_gap() {
    let rig = Rig::new(Options::default());
    (0..6).for_each(|block| assert!(rig.write(blocks(block, 1), 1)));
    let segment = rig.cache.log().segments(LaneId(0))[0];
    for block in [1, 2, 4] {
        rig.lose_record(block * BLOCK);
    }
    let mut seen = Vec::new();
    rig.cache.log().visit(&segment, &mut |slot, entry| {
        seen.push(match entry {
            LogEntry::Record(record) => (slot, record.range().start / BLOCK),
            LogEntry::Lost { end } => (slot, 100 + u64::from(end)),
        });
    });
    assert_eq!(seen, [(0, 0), (1, 103), (3, 3), (4, 105), (5, 5)]);
    assert!(rig.cache.log().record(&segment, 1).is_none() && rig.cache.log().record(&segment, 6).is_none());
}

#[test]
fn a_tool_finds_a_record_in_any_slot_of_a_segment_and_in_no_other() {
    let rig = Rig::new(Options::default());
    assert!(rig.write(blocks(0, 1), 1));
    let log = rig.cache.log();
    let (segment, _, record) = rig.newest(0);
    let slots = log.shape().slots_max();
    for slot in [1, slots - 1] {
        let line = record.encode(&log.place(&segment, slot));
        let _ = rig.transport.region().store(segment.base + log.shape().slot(slot)[0], &line);
        assert_eq!(
            log.record(&segment, slot).map(|record| record.range()),
            Some(blocks(0, 1)),
            "slot {slot}"
        );
    }
    // Behind the last slot is no record, whatever stands there.
    let line = record.encode(&log.place(&segment, slots));
    let _ = rig.transport.region().store(segment.base + log.shape().slot(slots)[0], &line);
    assert!(log.record(&segment, slots).is_none());
    let mut beyond = record;
    beyond.offset = rig.options.device.into();
    assert!(log.accepts(&segment, &record) && !log.accepts(&segment, &beyond));
}

#[test]
fn a_tool_is_told_which_blocks_are_damaged_which_are_newest_and_which_the_disk_has() {
    let settings =
        Settings { on_write_error: OnWriteError::Park, write_error_after_s: 0, ..Settings::default() };
    let options = Options { device: 2 * CHUNK, lanes: 2, segments: 19, settings, ..Options::default() };
    let mut rig = Rig::new(options);
    assert!(rig.write(blocks(0, 3), 1) && rig.zero(blocks(8, 1), false));
    let (segment, slot, record) = rig.newest(0);
    for block in 0..2 {
        rig.damage(block * BLOCK);
        let damaged = rig.cache.log().damaged_blocks(&segment, slot, &record);
        let damaged: Vec<_> = damaged.iter().map(|(range, error)| (*range, error.kind())).collect();
        let expected: Vec<_> = (0..=block).map(|block| (blocks(block, 1), ErrorKind::Media)).collect();
        assert_eq!(damaged, expected);
    }
    let (_, zeroes, record_of_zeroes) = rig.records_of(segment.lane)[1];
    assert!(rig.cache.log().damaged_blocks(&segment, zeroes, &record_of_zeroes).is_empty());
    assert!(rig.write(ByteRange::at(BLOCK, SECTOR), 2));
    let parts = rig.cache.log().newest_parts(&segment, slot, blocks(0, 4));
    assert_eq!(parts, [blocks(0, 1), ByteRange { start: BLOCK + SECTOR, end: 3 * BLOCK }]);
    // A record at the begin of the next chunk, in a lane of its own.
    assert!(rig.write(ByteRange::at(CHUNK, SECTOR), 3));
    let (other, there, _) = rig.newest(CHUNK);
    let around = ByteRange { start: CHUNK - BLOCK, end: CHUNK + BLOCK };
    assert_eq!(rig.cache.log().newest_parts(&other, there, around), [ByteRange::at(CHUNK, SECTOR)]);
    assert!(other.lane != segment.lane);

    let is_on_backing = |rig: &Rig, at: u64| {
        let (segment, slot, record) = rig.newest(at);
        rig.cache.log().is_on_backing(&segment, slot, &record)
    };
    assert!(!is_on_backing(&rig, 2 * BLOCK) && !is_on_backing(&rig, CHUNK));
    rig.disk.with(|state| state.unwritable = vec![ByteRange::at(CHUNK, SECTOR)]);
    rig.drain_without_clock();
    assert!(is_on_backing(&rig, 2 * BLOCK) && !is_on_backing(&rig, CHUNK), "that is parked");
}

#[test]
fn as_many_damaged_ranges_are_listed_as_the_status_has_room_for() {
    let mut rig = Rig::new(Options { segments: 30, ..Options::default() });
    let count = 1200;
    (0..count).for_each(|number| assert!(rig.write(ByteRange::at(2 * number * SECTOR, SECTOR), 1)));
    rig.damage_sectors(|_| true);
    for _ in 0..2 {
        (0..count)
            .for_each(|number| assert!(read(&rig, ByteRange::at(2 * number * SECTOR, SECTOR)).is_err()));
    }
    let (damage, healed, listed) = found(&rig);
    assert_eq!((damage, healed, listed.len()), (1024, 0, 1024));
    rig.drain();
    let (damage, _, listed) = found(&rig);
    assert_eq!((damage, listed.len()), (count, 1024), "writeback counts the others");
    assert_eq!(rig.cache.quarantined_bytes(), count * SECTOR);
}

#[test]
fn as_many_parked_ranges_are_listed_as_the_status_has_room_for_by_address() {
    let settings =
        Settings { on_write_error: OnWriteError::Park, write_error_after_s: 0, ..Settings::default() };
    let options = Options { device: 16 * CHUNK, lanes: 16, segments: 140, settings, ..Options::default() };
    let mut rig = Rig::new(options);
    rig.disk.with(|state| state.unwritable = vec![ByteRange { start: 0, end: options.device }]);
    let ranges: Vec<_> = (0..16 * 80)
        .map(|number| ByteRange::at(number % 16 * CHUNK + number / 16 * 2 * SECTOR, SECTOR))
        .collect();
    ranges.iter().for_each(|range| assert!(rig.zero(*range, false)));
    rig.drain_without_clock();
    let status = rig.cache.status();
    assert_eq!((status.parked_bytes, status.dirty_records), (ranges.len() as u64 * SECTOR, 0));
    let mut expected = ranges;
    expected.sort_unstable_by_key(|range| range.start);
    expected.truncate(1024);
    assert_eq!(status.parked, expected);
}

#[test]
fn a_lane_parks_as_many_zeroes_as_a_quarter_of_a_segment_has_records_for() {
    let settings =
        Settings { on_write_error: OnWriteError::Park, write_error_after_s: 0, ..Settings::default() };
    for (count, parked) in [(128, 128), (129, 0)] {
        let mut rig = Rig::new(Options { settings, ..Options::default() });
        rig.disk.with(|state| state.unwritable = vec![ByteRange { start: 0, end: rig.options.device }]);
        (0..count).for_each(|number| assert!(rig.zero(ByteRange::at(2 * number * SECTOR, SECTOR), false)));
        rig.drain_without_clock();
        assert_eq!(rig.cache.status().parked_total, parked);
    }
}

#[test]
fn damaged_data_that_is_parked_is_not_read_from_the_disk() {
    let settings =
        Settings { on_write_error: OnWriteError::Park, write_error_after_s: 0, ..Settings::default() };
    let mut rig = Rig::new(Options { settings, ..Options::default() });
    rig.disk.with(|state| state.unwritable = vec![blocks(0, 1)]);
    assert!(rig.write(blocks(0, 1), 1));
    rig.drain_without_clock();
    assert_eq!((rig.cache.parked_bytes(), rig.cache.status().dirty_records), (BLOCK, 0));
    rig.damage(0);
    for range in [blocks(0, 2), blocks(0, 1)] {
        assert_eq!(read(&rig, range).expect_err("the disk has it not").kind(), ErrorKind::Media);
    }
}

#[test]
fn a_block_is_read_through_the_index_though_its_record_is_lost() {
    let rig = Rig::new(Options::default());
    (0..4).for_each(|block| assert!(rig.write(blocks(block, 1), block as u8 + 1)));
    for block in 0..4 {
        rig.lose_record(block * BLOCK);
        assert_eq!(rig.read(blocks(block, 1)), [block as u8 + 1; BLOCK as usize]);
        assert_eq!(
            rig.read(ByteRange::at(block * BLOCK + SECTOR, SECTOR)),
            [block as u8 + 1; SECTOR as usize]
        );
    }
}
