//! When writeback hurries, what it keeps in memory, and how it goes on after damage and refusals.

use super::*;
use crate::tests::rig::{Asked, Options, Rig, SECTOR};
use crate::{OnWriteError, Settings, Step};
use alloc::vec;
use cbd_types::CHUNK;

mod no_space;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

fn large() -> Options {
    Options { device: 8 * MIB, segments: 60, ..Options::default() }
}

fn parks(after_s: u32) -> Settings {
    Settings { on_write_error: OnWriteError::Park, write_error_after_s: after_s, ..Settings::default() }
}

fn block(number: u64) -> ByteRange {
    ByteRange::at(number * BLOCK, BLOCK)
}

fn sector(number: u64) -> ByteRange {
    ByteRange::at(number * SECTOR, SECTOR)
}

fn refuse(rig: &Rig, ranges: &[ByteRange]) {
    rig.disk.with(|state| state.unwritable = ranges.to_vec());
}

/// What the disk was asked to change since the last call.
fn changes(rig: &Rig) -> Vec<Asked> {
    let mut asked = rig.disk.take_asked();
    asked.retain(|asked| !matches!(asked, Asked::Read(_) | Asked::Flush));
    asked
}

fn held(rig: &Rig) -> usize {
    rig.worker.writeback.buffers.held()
}

/// The last sequence number that a mark of the first lane proves.
fn marked(rig: &Rig) -> u64 {
    crate::tests::marked(&rig.cache, LaneId(0))
}

#[test]
fn buffers_are_kept_for_a_second_after_the_last_urgent_batch() {
    let mut rig = Rig::new(large());
    rig.environment.set_monotonic(100);
    assert!(rig.write(block(1), 1));
    rig.cache.request_drain();
    rig.run();
    assert_eq!((rig.cache.dirty_bytes(), held(&rig)), (0, BLOCK as usize));
    rig.environment.set_monotonic(1099);
    assert_eq!((rig.run(), held(&rig)), (Some(1100), BLOCK as usize));
    rig.environment.set_monotonic(1100);
    assert_eq!((rig.run(), held(&rig)), (None, 0));
    // A batch that was never urgent keeps none.
    assert!(rig.write(block(1), 1));
    rig.run();
    rig.environment.set_monotonic(9000);
    rig.run();
    assert_eq!((rig.cache.dirty_bytes(), held(&rig)), (0, 0));
}

#[test]
fn buffers_of_requests_that_fail_and_of_damaged_data_are_kept_too() {
    let mut rig = Rig::new(large());
    refuse(&rig, &[block(1)]);
    assert!(rig.write(block(1), 1));
    rig.cache.request_drain();
    rig.run();
    assert_eq!((rig.cache.dirty_bytes(), held(&rig)), (BLOCK, BLOCK as usize));
    let mut rig = Rig::new(large());
    assert!(rig.write(block(1), 1));
    rig.damage(BLOCK);
    rig.cache.request_drain();
    rig.run();
    assert_eq!((rig.cache.quarantined_bytes(), held(&rig)), (BLOCK, BLOCK as usize));
    assert_eq!(changes(&rig), [], "nothing of it is written");
}

#[test]
fn a_batch_that_becomes_urgent_uses_the_whole_depth_at_once() {
    let mut rig = Rig::new(large());
    (0..20).for_each(|number| assert!(rig.write(block(2 * number), 1)));
    rig.run();
    rig.environment.set_monotonic(1000);
    rig.disk.with(|state| state.is_slow = true);
    let deepest = |rig: &mut Rig| {
        while rig.worker.step() == Step::Busy {}
        rig.disk.with(|state| state.deepest)
    };
    assert_eq!(deepest(&mut rig), 2);
    rig.cache.request_drain();
    assert_eq!(deepest(&mut rig), 8);
}

#[test]
fn a_batch_that_is_not_urgent_uses_a_quarter_of_the_depth_or_one_request_at_a_time() {
    for (depth, quarter) in [(2, 1), (4, 1), (15, 3), (16, 4)] {
        let mut rig = Rig::new(Options { depth, ..large() });
        (0..20).for_each(|number| assert!(rig.write(block(2 * number), 1)));
        rig.run();
        rig.environment.set_monotonic(1000);
        rig.run();
        assert_eq!(rig.disk.with(|state| state.deepest), quarter);
    }
    let mut rig = Rig::new(Options { depth: 2, ..large() });
    (0..5).for_each(|number| assert!(rig.write(block(2 * number), 1)));
    rig.run();
    rig.environment.set_monotonic(1000);
    rig.run();
    assert_eq!((rig.cache.dirty_bytes(), rig.disk.with(|state| state.deepest)), (0, 1));
    assert_eq!(changes(&rig).len(), 5);
    // The next batch waits for a second after the next write. The lane is marked a second after its last mark.
    rig.environment.set_monotonic(1500);
    assert!(rig.write(block(0), 2));
    assert_eq!((rig.run(), changes(&rig)), (Some(2000), vec![]));
    rig.environment.set_monotonic(2499);
    rig.run();
    assert_eq!(changes(&rig), []);
    rig.environment.set_monotonic(2500);
    rig.run();
    assert_eq!(changes(&rig), [Asked::Write(block(0))]);
}

#[test]
fn when_as_many_requests_fail_as_the_queue_is_deep_no_more_are_tried() {
    let mut rig = Rig::new(large());
    (0..20).for_each(|number| assert!(rig.write(block(2 * number), 1)));
    refuse(&rig, &[ByteRange { start: 0, end: 8 * MIB }]);
    rig.cache.request_drain();
    rig.run();
    assert_eq!(changes(&rig).len(), 8);
    rig.environment.set_monotonic(250);
    rig.run();
    assert_eq!((changes(&rig).len(), rig.disk.with(|state| state.deepest)), (8, 8));
    let status = rig.cache.status();
    assert_eq!(
        (status.backing_failures, status.backing_trouble.map(|trouble| trouble.attempts)),
        (16, Some(16))
    );
}

#[test]
fn zeroes_go_in_requests_of_at_most_64_mebibytes() {
    let (device, limit) = (17 * CHUNK, 64 * MIB);
    let mut rig = Rig::new(Options { device, volatile_cache: false, ..Options::default() });
    rig.worker.assume_a_fast_disk();
    // One record of all, then one of each half of the limit, which are joined again.
    assert!(rig.zero(ByteRange { start: 0, end: device }, false));
    for half in [0, limit / 2] {
        assert!(rig.zero(ByteRange::at(half, limit / 2), false));
    }
    rig.drain();
    let expected = [ByteRange { start: 0, end: limit }, ByteRange { start: limit, end: device }];
    assert_eq!(changes(&rig), expected.map(Asked::Zeroes));
}

#[test]
fn a_part_of_a_batch_has_at_most_131072_records() {
    for (zeroes, parts) in [(0, 1), (1, 2)] {
        let mut rig = Rig::new(Options { segments: 310, volatile_cache: false, ..Options::default() });
        (0..131_072 - 10).for_each(|_| assert!(rig.zero(block(0), false)));
        (8..18).for_each(|number| assert!(rig.write(sector(number), 1)));
        (0..zeroes).for_each(|_| assert!(rig.zero(block(0), false)));
        rig.drain();
        let first = [Asked::Zeroes(block(0)), Asked::Write(ByteRange { start: BLOCK, end: 18 * SECTOR })];
        let expected = [&first[..], &[Asked::Zeroes(block(0))][..]].concat();
        assert_eq!(changes(&rig), expected[..1 + parts]);
        assert_eq!((rig.cache.dirty_bytes(), rig.cache.status().dirty_records), (0, 0));
    }
}

#[test]
fn a_strict_batch_of_one_epoch_leaves_the_disk_consistent_all_the_time() {
    let mut rig = Rig::new(large());
    for value in 1..4 {
        assert!(rig.write(block(0), value) && rig.write(block(9), value));
        rig.cache.flush().expect("it runs");
    }
    rig.cache.request_drain();
    let (mut steps, mut drained) = (0, 0);
    while rig.worker.step() != (Step::Idle { until_ms: None }) && steps < 200 {
        assert!(rig.cache.status().backing_is_consistent);
        assert!(rig.cache.drained_epoch().0 - drained <= 1, "one epoch after the other");
        drained = rig.cache.drained_epoch().0;
        rig.environment.set_monotonic(steps);
        steps += 1;
    }
    assert_eq!(rig.cache.dirty_bytes(), 0);
}

#[test]
fn a_skipped_version_makes_the_disk_inconsistent_as_soon_as_its_damage_is_found() {
    let mut rig = Rig::new(large());
    assert!(rig.write(block(0), 1) && rig.write(block(5), 1));
    rig.damage(0);
    rig.cache.flush().expect("it runs");
    assert!(rig.write(block(0), 2));
    rig.disk.with(|state| state.is_slow = true);
    rig.cache.request_drain();
    while rig.worker.step() == Step::Busy {}
    let status = rig.cache.status();
    assert_eq!((status.damaged, status.damage_found), (vec![], 1), "newer data covers it");
    assert!(!status.backing_is_consistent);
    rig.disk.with(|state| state.is_slow = false);
    rig.drain();
    assert!(rig.cache.status().backing_is_consistent);
}

#[test]
fn a_lost_version_makes_the_disk_inconsistent_as_soon_as_it_is_found() {
    let mut rig = Rig::new(large());
    assert!(rig.write(block(0), 1));
    rig.lose_record(0);
    rig.cache.flush().expect("it runs");
    assert!(rig.zero(ByteRange { start: 0, end: 8 * MIB }, false));
    rig.disk.with(|state| state.is_slow = true);
    rig.cache.request_drain();
    while rig.worker.step() == Step::Busy {}
    let status = rig.cache.status();
    assert!(status.damaged.is_empty() && !status.backing_is_consistent);
}

#[test]
fn an_overwrite_heals_the_disk_only_when_it_is_drained() {
    let mut rig = Rig::new(large());
    assert!(rig.write(block(0), 1));
    rig.damage(0);
    rig.drain();
    assert!(!rig.cache.status().backing_is_consistent);
    // Two epochs, of which the second one heals.
    assert!(rig.write(block(5), 1));
    rig.cache.flush().expect("it runs");
    let first = rig.cache.status().epoch.0 - 1;
    assert!(rig.write(block(0), 2));
    rig.cache.flush().expect("it runs");
    rig.cache.request_drain();
    while rig.cache.drained_epoch().0 < first {
        rig.worker.step();
    }
    assert_eq!((rig.cache.drained_epoch().0, rig.cache.quarantined_bytes()), (first, 0));
    assert!(!rig.cache.status().backing_is_consistent, "the disk has the old content of the block");
    rig.drain();
    assert!(rig.cache.status().backing_is_consistent);
    // It was healed: later batches leave it consistent.
    assert!(rig.write(block(5), 2));
    rig.cache.flush().expect("it runs");
    assert!(rig.write(block(6), 2));
    rig.cache.request_drain();
    while rig.cache.dirty_bytes() > 0 {
        rig.worker.step();
        assert!(rig.cache.status().backing_is_consistent);
    }
}

#[test]
fn what_a_batch_relies_on_is_marked_before_it_is_drained() {
    type Trouble = fn(&Rig);
    let troubles: [Trouble; 2] = [|rig| rig.damage(0), |rig| refuse(rig, &[sector(0)])];
    for trouble in troubles {
        let mut rig = Rig::new(Options { settings: parks(0), ..large() });
        assert!(rig.write(block(0), 1));
        trouble(&rig);
        rig.drain_without_clock();
        assert_eq!(rig.records_of(LaneId(0)).len(), 2, "the write, and its damage or what is parked of it");
        assert_eq!(marked(&rig), 2);
    }
    // Where nothing is relied on, the drain closes one epoch.
    let mut rig = Rig::new(large());
    assert!(rig.write(block(0), 1));
    rig.drain();
    assert_eq!(rig.cache.status().epoch.0, 2);
}

#[test]
fn a_worker_without_work_stores_nothing() {
    let mut rig = Rig::new(large());
    for _ in 0..2 {
        rig.settle();
        rig.transport.region().memory().take_ops();
        (0..5).for_each(|_| rig.settle());
        assert_eq!(rig.transport.region().memory().take_ops(), []);
        assert!(rig.write(block(0), 1));
        rig.damage(0);
        rig.drain();
        assert!(rig.write(block(0), 1));
        rig.drain();
        assert!(rig.cache.status().backing_is_consistent);
    }
}

#[test]
fn damage_for_which_there_is_no_room_is_recorded_segment_by_segment() {
    let mut rig = Rig::new(Options::default());
    let count = rig.fill_up();
    let is_whole = |number: u64| number.is_multiple_of(50);
    rig.damage_sectors(|number| !is_whole(number));
    let segments = rig.cache.status().used_segments();
    rig.cache.request_drain();
    let (mut reclaimed_early, mut dirty) = (0, rig.cache.dirty_bytes());
    while rig.step() != (Step::Idle { until_ms: None }) {
        let status = rig.cache.status();
        assert!(status.dirty_bytes <= dirty, "nothing becomes dirty again");
        dirty = status.dirty_bytes;
        if status.drained_epoch.0 == 0 {
            reclaimed_early = reclaimed_early.max(status.rare.segments_reclaimed);
            assert!(status.backing_trouble.is_none());
        }
    }
    let asked = rig.disk.take_asked();
    assert_eq!(asked.iter().filter(|asked| **asked == Asked::Flush).count() as u32, segments);
    for number in (0..count).filter(|number| is_whole(*number)) {
        let asked = asked.iter().filter(|asked| **asked == Asked::Write(sector(number)));
        assert!(
            (1..=2).contains(&asked.count()),
            "sector {number} is written once, perhaps before damage was met"
        );
    }
    assert!(reclaimed_early > 0, "settled segments are reclaimed before their epoch is drained");
    let status = rig.cache.status();
    let lost = (0..count).filter(|number| !is_whole(*number)).count() as u64;
    assert_eq!((status.dirty_bytes, status.dirty_records, status.quarantined_bytes), (0, 0, lost * SECTOR));
    assert_eq!(rig.recovered().quarantined_bytes(), lost * SECTOR);
    assert!(rig.write(sector(0), 1));
    rig.drain();
    assert_eq!(rig.cache.status().quarantined_bytes, lost * SECTOR, "batches go on as before");
}

#[test]
fn what_is_settled_is_not_written_again_after_a_failed_flush() {
    let mut rig = Rig::new(Options::default());
    let count = rig.fill_up();
    rig.damage_sectors(|number| number % 50 != 0);
    rig.cache.request_drain();
    let tail = rig.cache.log().segments(LaneId(0))[0];
    let is_settled = |rig: &Rig| {
        let state = rig.cache.lane(LaneId(0)).lock();
        let segments: Vec<_> = state.segments().copied().collect();
        segments.first().is_none_or(|segment| segment.ordinal > tail.ordinal.0 || state.is_settled(segment))
    };
    while !is_settled(&rig) {
        rig.step();
    }
    assert_eq!(rig.cache.drained_epoch().0, 0);
    // What the first segment relies on is marked, and it does not count as dirty any more.
    let last = rig.records_of(LaneId(0)).last().map(|(.., record)| record.sequence.get());
    assert_eq!(Some(marked(&rig)), last);
    let held_by_tail = rig.cache.unwritten_bytes();
    assert!(held_by_tail < count * SECTOR);
    rig.disk.take_asked();
    rig.disk.with(|state| state.refuses_flushes = true);
    while rig.cache.status().backing_failures == 0 {
        rig.step();
    }
    rig.disk.with(|state| state.refuses_flushes = false);
    rig.settle();
    assert!(!changes(&rig).contains(&Asked::Write(sector(0))), "the first segment is done");
    assert_eq!((rig.cache.dirty_bytes(), rig.cache.status().dirty_records), (0, 0));
    assert!(rig.cache.status().backing_trouble.is_none());
}

#[test]
fn retries_of_parked_ranges_are_one_two_four_eight_and_then_ten_minutes_apart() {
    let mut rig = Rig::new(Options { settings: parks(0), ..large() });
    refuse(&rig, &[sector(3), sector(80)]);
    assert!(rig.write(block(0), 1) && rig.write(block(10), 1));
    rig.cache.request_drain();
    let mut now = 0;
    for minutes in [1, 2, 4, 8, 10, 10] {
        let due = now + minutes * 60_000;
        while rig.run() != Some(due) {
            now += 1000;
            assert!(now < due, "{minutes} minutes");
            rig.environment.set_monotonic(now);
        }
        let attempts = rig.cache.status().parked_attempts;
        rig.environment.set_monotonic(due - 1);
        assert_eq!((rig.run(), rig.cache.status().parked_attempts), (Some(due), attempts));
        rig.environment.set_monotonic(due);
        rig.run();
        assert_eq!(rig.cache.status().parked_attempts, attempts + 1);
        now = due;
    }
    // The disk takes one of them: the other one is tried again after half a minute.
    refuse(&rig, &[sector(80)]);
    now += 600_000;
    rig.environment.set_monotonic(now);
    assert_eq!((rig.run(), rig.cache.status().unparked_total), (Some(now + 30_000), 1));
    // A requested drain tries at once, but not within a second of the last attempt.
    rig.environment.set_monotonic(now + 100);
    rig.cache.request_drain();
    rig.run();
    changes(&rig);
    rig.environment.set_monotonic(now + 999);
    assert_eq!((rig.run(), changes(&rig)), (Some(now + 1000), vec![]));
    rig.environment.set_monotonic(now + 1000);
    assert_eq!((rig.run(), changes(&rig)), (Some(now + 61_000), vec![Asked::Write(sector(80))]));
}

#[test]
fn each_parked_range_is_tried_in_a_request_of_its_own_by_address() {
    let options =
        Options { device: 8 * CHUNK, lanes: 2, segments: 19, settings: parks(0), ..Options::default() };
    let mut rig = Rig::new(options);
    let bad: Vec<ByteRange> =
        (0..8).map(|chunk| ByteRange::at(chunk * CHUNK, SECTOR)).chain([sector(7), sector(8)]).collect();
    refuse(&rig, &bad);
    bad.iter().for_each(|range| assert!(rig.write(*range, 1)));
    rig.drain_without_clock();
    rig.disk.take_asked();
    refuse(&rig, &[]);
    rig.environment.set_monotonic(60_000);
    rig.run();
    let mut expected = bad;
    expected.sort_unstable_by_key(|range| range.start);
    assert_eq!(changes(&rig), expected.into_iter().map(Asked::Write).collect::<Vec<_>>());
    assert_eq!(rig.cache.status().parked_bytes, 0);
}

#[test]
fn a_retry_ends_after_eight_refusals_unless_the_disk_took_something() {
    let mut rig = Rig::new(Options { settings: parks(0), depth: 4, ..large() });
    let bad: Vec<ByteRange> = (0..20).map(|number| sector(number * 8)).collect();
    refuse(&rig, &bad);
    (0..20).for_each(|number| assert!(rig.write(block(number), 1)));
    rig.drain_without_clock();
    let mut attempt = |ms| {
        rig.disk.take_asked();
        rig.environment.set_monotonic(ms);
        rig.run();
        changes(&rig)
    };
    for (ms, first) in [(60_000, 0), (180_000, 8), (420_000, 16), (900_000, 4)] {
        let asked = attempt(ms);
        let expected: Vec<Asked> = (0..8).map(|number| Asked::Write(bad[(first + number) % 20])).collect();
        assert_eq!(asked, expected, "each retry begins with others");
    }
    refuse(&rig, &bad[1..]);
    // One of the first eight is taken, so the rest is worth a try.
    let mut rig_attempt = |ms| {
        rig.disk.take_asked();
        rig.environment.set_monotonic(ms);
        rig.run();
        changes(&rig)
    };
    assert_eq!(rig_attempt(1_500_000).len(), 8, "from the thirteenth on: the first one is not among them");
    assert_eq!(rig_attempt(2_100_000).len(), 20);
    assert_eq!(rig.cache.status().unparked_total, 1);
}

#[test]
fn a_retry_whose_flush_fails_leaves_all_parked_until_the_next_one() {
    let mut rig = Rig::new(Options { settings: parks(0), ..large() });
    refuse(&rig, &[sector(0)]);
    assert!(rig.write(block(0), 1));
    rig.drain_without_clock();
    refuse(&rig, &[]);
    rig.disk.with(|state| state.refuses_flushes = true);
    rig.environment.set_monotonic(60_000);
    assert_eq!(rig.run(), Some(120_000), "as long as since the attempt before");
    let status = rig.cache.status();
    assert_eq!((status.parked_bytes, status.unparked_total), (SECTOR, 0));
    assert!(status.backing_trouble.is_some());
    // While flushes fail an attempt of which nothing is taken ends no trouble.
    refuse(&rig, &[sector(0)]);
    rig.environment.set_monotonic(120_000);
    rig.run();
    assert!(rig.cache.status().backing_trouble.is_some());
    refuse(&rig, &[]);
    rig.disk.with(|state| state.refuses_flushes = false);
    rig.settle();
    let status = rig.cache.status();
    assert_eq!((status.parked_bytes, status.unparked_total), (0, 1));
    assert!(status.backing_trouble.is_none() && status.backing_is_consistent);
}

#[test]
fn after_a_restart_the_disk_is_asked_for_what_it_had_refused_apart_from_the_rest() {
    let mut rig = Rig::new(Options { settings: parks(0), ..large() });
    refuse(&rig, &[sector(3)]);
    assert!(rig.write(block(0), 1));
    rig.drain_without_clock();
    rig.cache.stop();
    let mut rig = rig.reopened();
    rig.cache.set_settings(parks(3600)).expect("valid");
    rig.run();
    rig.disk.take_asked();
    assert!(rig.write(ByteRange { start: 0, end: 2 * BLOCK }, 2));
    rig.drain_without_clock();
    let around =
        [ByteRange { start: 0, end: 3 * SECTOR }, sector(3), ByteRange { start: 4 * SECTOR, end: 2 * BLOCK }];
    let mut asked = changes(&rig);
    asked.truncate(3);
    assert_eq!(asked, around.map(Asked::Write));
    assert_eq!(rig.cache.status().parked, [sector(3)], "parked at once, long before the bound");
}

#[test]
fn more_than_a_lane_can_park_waits_for_the_disk() {
    let mut rig = Rig::new(Options { settings: parks(0), ..large() });
    // Each takes a record and a sector: 25 of them fit into a quarter of a segment.
    for (count, parked) in [(25, 25), (26, 0)] {
        rig = Rig::new(Options { settings: parks(0), ..large() });
        let bad: Vec<ByteRange> = (0..count).map(|number| sector(number * 8)).collect();
        refuse(&rig, &bad);
        (0..count).for_each(|number| assert!(rig.write(sector(number * 8), 1)));
        rig.drain_without_clock();
        assert_eq!(rig.cache.status().parked_total, parked, "{count} sectors");
    }
    assert!(rig.cache.status().is_stalled && rig.cache.dirty_bytes() == 26 * SECTOR);
    // In a minute they are narrowed down again.
    refuse(&rig, &[sector(0)]);
    rig.settle_until(60_000 + 8_000);
    assert_eq!(rig.cache.status().parked, [sector(0)]);
}

#[test]
fn batches_wait_for_the_clock_after_a_failure_and_begin_exactly_when_they_may() {
    let mut rig = Rig::new(large());
    assert!(rig.write(block(0), 1));
    rig.disk.with(|state| state.refuses_flushes = true);
    rig.cache.request_drain();
    for (now, due) in [(0, 250), (250, 750), (750, 1750), (1750, 3750)] {
        rig.environment.set_monotonic(now);
        rig.run();
        assert_eq!(changes(&rig).len(), 1, "at {now} ms");
        rig.environment.set_monotonic(due - 1);
        assert_eq!((rig.run(), changes(&rig).len()), (Some(due), 0));
    }
}

#[test]
fn each_request_and_each_flush_has_a_token_of_its_own() {
    let mut rig = Rig::new(large());
    for value in 1..5 {
        assert!(rig.write(block(0), value) && rig.write(block(9), value));
        rig.cache.flush().expect("it runs");
    }
    rig.drain();
    // Two writes and a flush for each epoch.
    assert_eq!(rig.worker.writeback.next_token, 4 * 3);
}

#[test]
fn epochs_stay_small_while_far_more_is_dirty_than_the_target() {
    // Blocks of 4 KiB in segments of 64 KiB, of which some hold records: 15 percent of 80 segments are 12.
    let mut rig = Rig::new(Options { segments: 81, ..Options::default() });
    rig.disk.with(|state| state.is_slow = true);
    let mut epochs = Vec::new();
    for number in 0..600 {
        assert!(rig.write(ByteRange::at(number * 4096, 4096), 1));
        rig.worker.step();
        epochs.push(rig.cache.status().epoch.0);
    }
    assert_eq!(epochs[180], 1, "it grows until then");
    let closed = epochs[599] - epochs[180];
    assert!((6..=9).contains(&closed), "one for about 60 blocks: {closed}");
}
