//! What writeback asks the disk for, and when.

use super::rig::{Asked, Options, Rig, SECTOR};
use crate::{OnWriteError, Settings, Step};
use alloc::{vec, vec::Vec};
use cbd_types::{BackingQueue, ByteRange};

const KIB: u64 = 1024;
const MIB: u64 = 1 << 20;

fn large() -> Options {
    Options { device: 8 * MIB, segments: 60, ..Options::default() }
}

fn write(rig: &Rig, start: u64, length: u64, value: u8) {
    for piece in rig.cache.pieces(ByteRange::at(start, length)).collect::<Vec<_>>() {
        assert!(rig.write(piece, value), "there is space");
    }
}

/// Runs until the worker waits for time or for nothing, without moving the clock.
fn run(rig: &mut Rig) -> Step {
    loop {
        match rig.worker.step() {
            Step::Idle { until_ms } => return Step::Idle { until_ms },
            Step::Busy | Step::WaitBacking => {}
        }
    }
}

fn until(ms: u64) -> Step {
    Step::Idle { until_ms: Some(ms) }
}

#[test]
fn neighbours_go_in_requests_of_at_most_a_mebibyte_and_a_flush_ends_the_batch() {
    let mut rig = Rig::new(large());
    rig.worker.assume_a_fast_disk();
    write(&rig, 4096, MIB + 3 * 4096, 1);
    write(&rig, 2 * MIB, 4096, 2);
    rig.cache.flush().expect("it runs");
    rig.drain();
    let expected = [
        Asked::Write(ByteRange::at(4096, MIB)),
        Asked::Write(ByteRange::at(4096 + MIB, 3 * 4096)),
        Asked::Write(ByteRange::at(2 * MIB, 4096)),
        Asked::Flush,
    ];
    assert_eq!(rig.disk.take_asked(), expected);
    let status = rig.cache.status();
    assert_eq!((status.written_back_bytes, status.backing_flushes), (MIB + 4 * 4096, 1));
    assert_eq!((status.dirty_bytes, status.backing_failures), (0, 0));
}

#[test]
fn requests_are_small_until_the_disk_has_shown_that_it_is_fast() {
    let mut rig = Rig::new(large());
    write(&rig, 0, 2 * MIB, 1);
    rig.disk.with(|state| state.is_slow = true);
    rig.cache.request_drain();
    run_until_it_waits_for_the_disk(&mut rig);
    let in_flight = |rig: &Rig| rig.worker.queue().in_flight();
    assert_eq!(in_flight(&rig), 2, "256 KiB in requests of half as much");
    rig.disk.with(|state| state.is_slow = false);
    rig.drain();
    let asked = rig.disk.take_asked();
    let mut end = 0;
    for asked in &asked[..asked.len() - 1] {
        let Asked::Write(range) = asked else { panic!("{asked:?}") };
        assert!(range.start == end && range.len() >= 128 * KIB && range.len() <= MIB, "{asked:?}");
        end = range.end;
    }
    assert_eq!((end, asked[asked.len() - 1]), (2 * MIB, Asked::Flush));
    assert!(rig.disk.with(|state| (0..2 * MIB as usize).all(|at| state.bytes[at] == 1)));
}

#[test]
fn a_slow_disk_gets_no_more_than_it_completes_in_some_seconds() {
    let mut rig = Rig::new(Options { device: 32 * MIB, segments: 700, ..Options::default() });
    rig.worker.assume_a_fast_disk();
    write(&rig, 0, 24 * MIB, 1);
    let epoch = rig.cache.request_drain();
    let (mut now, mut most) = (0, 0);
    while !rig.cache.is_drained(epoch) {
        rig.disk.with(|state| state.is_slow = true);
        run_until_it_waits_for_the_disk(&mut rig);
        let bytes = rig.worker.queue().bytes();
        if now > 20_000 {
            most = most.max(bytes);
        }
        // 512 KiB a second.
        now += bytes * 1000 / (512 * KIB);
        rig.environment.set_monotonic(now);
        rig.disk.with(|state| state.is_slow = false);
        rig.worker.step();
    }
    assert!((512 * KIB..=2 * MIB).contains(&most), "{most} bytes in flight");
    assert!((48_000..50_000).contains(&now), "it took {now} ms");
}

/// Runs the background worker until it waits for a completion.
fn run_until_it_waits_for_the_disk(rig: &mut Rig) {
    while rig.worker.step() == Step::Busy {}
}

#[test]
fn data_zeroes_and_discards_are_requests_of_their_own() {
    for (discard_zeroes, expected) in [
        (true, Asked::Discard(ByteRange::at(32 * KIB, 8 * KIB))),
        (false, Asked::Zeroes(ByteRange::at(32 * KIB, 8 * KIB))),
    ] {
        let mut rig = Rig::new(Options { discard_zeroes, volatile_cache: false, ..large() });
        write(&rig, 0, 16 * KIB, 1);
        assert!(rig.zero(ByteRange::at(16 * KIB, 16 * KIB), false));
        assert!(rig.zero(ByteRange::at(32 * KIB, 8 * KIB), true));
        rig.drain();
        let data = Asked::Write(ByteRange::at(0, 16 * KIB));
        let zeroes = Asked::Zeroes(ByteRange::at(16 * KIB, 16 * KIB));
        assert_eq!(rig.disk.take_asked(), [data, zeroes, expected], "without a volatile cache no flush");
        assert_eq!(rig.cache.status().backing_flushes, 0);
    }
}

#[test]
fn what_is_not_urgent_waits_a_second_and_uses_a_quarter_of_the_depth() {
    let mut rig = Rig::new(large());
    (0..20).for_each(|number| write(&rig, number * 64 * KIB, 4096, 1));
    assert_eq!(run(&mut rig), until(1000));
    assert_eq!(rig.disk.take_asked(), []);
    rig.environment.set_monotonic(999);
    assert_eq!(run(&mut rig), until(1000));
    rig.environment.set_monotonic(1000);
    rig.disk.with(|state| state.is_slow = true);
    while rig.worker.step() == Step::Busy {}
    assert_eq!(rig.disk.with(|state| state.deepest), 2);
    rig.disk.with(|state| state.is_slow = false);
    run(&mut rig);
    assert_eq!(rig.disk.take_asked().len(), 21);
    assert_eq!(rig.disk.with(|state| state.deepest), 2);
}

#[test]
fn a_requested_drain_uses_the_whole_depth_at_once() {
    let mut rig = Rig::new(large());
    (0..20).for_each(|number| write(&rig, number * 64 * KIB, 4096, 1));
    let epoch = rig.cache.request_drain();
    assert!(!rig.cache.is_drained(epoch));
    run(&mut rig);
    assert_eq!(rig.disk.with(|state| state.deepest), 8);
    assert!(rig.cache.is_drained(epoch) && rig.cache.drained_epoch() == epoch);
}

#[test]
fn a_lane_that_is_left_alone_is_marked_after_a_second() {
    let mut rig = Rig::new(large());
    rig.environment.set_monotonic(100);
    rig.cache.flush().expect("it runs");
    assert_eq!(run(&mut rig), until(105), "a pass was not long ago");
    rig.environment.set_monotonic(105);
    assert_eq!(run(&mut rig), Step::Idle { until_ms: None });
    let miss = {
        let (mut bytes, mut misses) = (vec![0; 4096], Vec::new());
        rig.cache.read(ByteRange::at(0, 4096), &mut bytes, &mut misses).expect("it runs");
        misses.pop().expect("it is not cached")
    };
    // A fill is clean: only the mark is missing.
    rig.cache.complete_fill(miss, &[1; 4096]);
    assert_eq!(run(&mut rig), until(1100));
    let epoch = rig.cache.status().epoch;
    rig.environment.set_monotonic(1099);
    assert_eq!((run(&mut rig), rig.cache.status().epoch), (until(1100), epoch));
    rig.environment.set_monotonic(1100);
    run(&mut rig);
    assert_eq!(rig.cache.status().epoch.0, epoch.0 + 1);
}

#[test]
fn in_strict_order_one_epoch_after_the_other_is_written_and_flushed() {
    let mut rig = Rig::new(large());
    for value in 1..=3 {
        write(&rig, 0, 4096, value);
        write(&rig, value as u64 * MIB, 4096, value);
        rig.cache.flush().expect("it runs");
    }
    rig.drain();
    let block = |at| Asked::Write(ByteRange::at(at, 4096));
    let expected: Vec<Asked> =
        (1..=3).flat_map(|value| [block(0), block(value * MIB), Asked::Flush]).collect();
    assert_eq!(rig.disk.take_asked(), expected);
}

#[test]
fn in_a_checkpoint_only_the_newest_of_all_epochs_is_written() {
    let settings = Settings { consistency: crate::Consistency::Checkpoint, ..Settings::default() };
    let mut rig = Rig::new(Options { settings, ..large() });
    for value in 1..=3 {
        write(&rig, 0, 4096, value);
        rig.cache.flush().expect("it runs");
    }
    rig.cache.request_drain();
    rig.disk.with(|state| state.is_slow = true);
    while rig.worker.step() == Step::Busy {}
    let status = rig.cache.status();
    assert!(!status.backing_is_consistent && status.void_reason.is_some(), "until the batch is through");
    rig.disk.with(|state| state.is_slow = false);
    rig.settle();
    assert_eq!(rig.disk.take_asked(), [Asked::Write(ByteRange::at(0, 4096)), Asked::Flush]);
    assert!(rig.cache.status().backing_is_consistent);
}

#[test]
fn the_rate_limits_data_and_nothing_else() {
    let settings = Settings { writeback_rate: MIB, ..Settings::default() };
    let mut rig = Rig::new(Options { settings, ..large() });
    rig.worker.assume_a_fast_disk();
    write(&rig, 0, 2 * MIB, 1);
    rig.cache.request_drain();
    assert_eq!(run(&mut rig), until(1), "nothing is earned yet");
    rig.environment.set_monotonic(1);
    run(&mut rig);
    assert_eq!(rig.disk.take_asked(), [Asked::Write(ByteRange::at(0, MIB))]);
    rig.environment.set_monotonic(1001);
    run(&mut rig);
    assert_eq!(rig.disk.take_asked().first(), Some(&Asked::Write(ByteRange::at(MIB, MIB))));
}

#[test]
fn a_refused_flush_makes_all_dirty_again() {
    let mut rig = Rig::new(large());
    write(&rig, 0, 4096, 1);
    rig.disk.with(|state| state.refuses_flushes = true);
    let epoch = rig.cache.request_drain();
    run(&mut rig);
    let once = [Asked::Write(ByteRange::at(0, 4096)), Asked::Flush];
    assert_eq!(rig.disk.take_asked(), once);
    rig.environment.set_monotonic(249);
    assert_eq!((run(&mut rig), rig.disk.take_asked()), (until(250), vec![]));
    let status = rig.cache.status();
    assert_eq!((status.backing_failures, status.dirty_bytes, status.backing_flushes), (1, 4096, 0));
    assert!(status.backing_trouble.is_some() && !rig.cache.is_drained(epoch));
    rig.disk.with(|state| state.refuses_flushes = false);
    rig.environment.set_monotonic(250);
    run(&mut rig);
    assert_eq!(rig.disk.take_asked(), once);
    let status = rig.cache.status();
    assert!(status.backing_trouble.is_none() && rig.cache.is_drained(epoch));
    // The next trouble begins with the shortest pause again.
    rig.disk.with(|state| state.refuses_flushes = true);
    write(&rig, 0, 4096, 2);
    rig.cache.request_drain();
    run(&mut rig);
    rig.environment.set_monotonic(400);
    assert_eq!(run(&mut rig), until(500));
}

#[test]
fn zeroes_go_in_longer_requests_than_data() {
    let mut rig = Rig::new(large());
    rig.worker.assume_a_fast_disk();
    for number in 0..3 {
        assert!(rig.zero(ByteRange::at(number * MIB, MIB), false));
    }
    rig.drain();
    assert_eq!(rig.disk.take_asked()[0], Asked::Zeroes(ByteRange::at(0, 3 * MIB)));
}

#[test]
fn what_is_parked_of_one_record_takes_a_record_for_each_block() {
    let mut rig = parking(0);
    rig.disk.with(|state| state.unwritable = vec![ByteRange::at(7 * SECTOR, 2 * SECTOR)]);
    write(&rig, 0, 8 * KIB, 1);
    rig.drain_without_clock();
    let status = rig.cache.status();
    assert_eq!((status.parked_total, status.parked_bytes), (2, 1024));
    assert_eq!(status.parked, [ByteRange::at(7 * SECTOR, 2 * SECTOR)], "neighbours are listed together");
}

#[test]
fn few_of_what_is_parked_are_tried_while_none_is_taken_unless_a_client_asks() {
    let mut rig = parking(0);
    let bad = |number: u64| ByteRange::at(number * 4096, SECTOR);
    rig.disk.with(|state| state.unwritable = (0..20).map(bad).collect());
    (0..20).for_each(|number| write(&rig, number * 4096, 4096, 1));
    rig.drain_without_clock();
    run(&mut rig);
    assert_eq!(rig.cache.status().parked_total, 20);
    let mut firsts = Vec::new();
    for _ in 0..3 {
        let Step::Idle { until_ms: Some(due) } = run(&mut rig) else { panic!("it is tried again") };
        rig.disk.take_asked();
        rig.environment.set_monotonic(due);
        run(&mut rig);
        let asked = rig.disk.take_asked();
        if !asked.is_empty() {
            assert!((8..12).contains(&asked.len()), "{asked:?}");
            firsts.push(asked[0]);
        }
    }
    assert!(firsts.len() >= 2 && firsts[0] != firsts[1], "{firsts:?}");
    let Step::Idle { until_ms: Some(due) } = run(&mut rig) else { panic!("it is tried again") };
    rig.environment.set_monotonic(due - 1000);
    rig.cache.request_drain();
    run(&mut rig);
    assert_eq!(rig.disk.take_asked().len(), 20, "all are tried for a drain");
}

/// A disk that refuses a sector of a block, and a cache that parks what is refused after `after_s`.
fn parking(after_s: u32) -> Rig {
    let settings =
        Settings { on_write_error: OnWriteError::Park, write_error_after_s: after_s, ..Settings::default() };
    let rig = Rig::new(Options { settings, ..large() });
    rig.disk.with(|state| state.unwritable = vec![ByteRange::at(3 * SECTOR, 2 * SECTOR)]);
    rig
}

#[test]
fn a_refused_sector_is_parked_and_the_rest_of_the_batch_is_drained() {
    let mut rig = parking(0);
    write(&rig, 0, 8 * KIB, 1);
    let epoch = rig.cache.request_drain();
    run(&mut rig);
    let status = rig.cache.status();
    assert_eq!(status.parked, [ByteRange::at(3 * SECTOR, 2 * SECTOR)]);
    assert_eq!((status.parked_bytes, status.dirty_bytes, status.parked_total), (1024, 1024, 1));
    assert!(rig.cache.is_drained(epoch) && !status.backing_is_consistent);
    assert!(status.void_reason.is_some_and(|reason| reason.contains("1 ranges are parked")));
    assert_eq!(rig.read(ByteRange::at(0, 4096)), [1; 4096]);
    let recovered = rig.recovered().status();
    assert_eq!((recovered.parked, recovered.dirty_bytes), (status.parked, 1024));
    // The blocks, the sectors of the first one, and what stands beside the refused ones is on the disk.
    let bytes = rig.disk.with(|state| state.bytes[..8192].to_vec());
    let on_disk: Vec<bool> = bytes.chunks(512).map(|sector| sector == [1; 512]).collect();
    assert_eq!(on_disk, (0..16).map(|sector| sector != 3 && sector != 4).collect::<Vec<_>>());
}

#[test]
fn what_is_parked_is_tried_again_after_half_a_minute_and_then_more_rarely() {
    let mut rig = parking(0);
    write(&rig, 0, 4096, 1);
    rig.cache.request_drain();
    run(&mut rig);
    let begun = rig.cache.status().parked_attempts;
    let mut due = Vec::new();
    for _ in 0..8 {
        let Step::Idle { until_ms: Some(until) } = run(&mut rig) else { panic!("it is tried again") };
        rig.environment.set_monotonic(until);
        run(&mut rig);
        if due.last() != Some(&until) && rig.cache.status().parked_attempts > begun + due.len() as u64 {
            due.push(until);
        }
    }
    let pauses: Vec<u64> = due.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses.is_sorted() && pauses.last() <= Some(&600_000), "{due:?}");
    assert!(pauses.contains(&120_000) && pauses.contains(&240_000), "{due:?}");
    let status = rig.cache.status();
    assert!(status.parked_error.is_some() && status.unparked_total == 0);
    rig.disk.with(|state| state.unwritable.clear());
    rig.cache.request_drain();
    let now = due.last().copied().unwrap_or(0);
    rig.environment.set_monotonic(now + 1000);
    run(&mut rig);
    let status = rig.cache.status();
    assert_eq!((status.parked_bytes, status.unparked_total, status.parked_error), (0, 1, None));
    assert_eq!(rig.disk.with(|state| state.bytes[..4096].to_vec()), [1; 4096]);
    rig.settle();
    assert!(rig.cache.status().backing_is_consistent);
}

#[test]
fn newer_data_ends_what_is_parked() {
    let mut rig = parking(0);
    write(&rig, 0, 4096, 1);
    rig.drain_without_clock();
    assert_eq!(rig.cache.status().parked_bytes, 1024);
    write(&rig, 3 * SECTOR, SECTOR, 2);
    assert_eq!(rig.cache.status().parked, [ByteRange::at(4 * SECTOR, SECTOR)]);
    assert!(rig.zero(ByteRange::at(0, 4096), false));
    assert_eq!(rig.cache.status().parked_bytes, 0);
}

#[test]
fn a_device_that_stops_makes_requests_without_space_fail() {
    let settings = Settings { write_error_after_s: 10, ..Settings::default() };
    let mut rig = Rig::new(Options { segments: 9, settings, ..Options::default() });
    rig.disk.with(|state| state.unwritable = vec![ByteRange { start: 0, end: 4 * MIB }]);
    let mut at = 0;
    while rig.write(ByteRange::at(at, 4096), 1) {
        at += 4096;
    }
    run(&mut rig);
    assert!(!rig.cache.status().is_stalled && rig.cache.status().writers_waiting);
    rig.environment.set_monotonic(10_000);
    run(&mut rig);
    assert!(rig.cache.status().is_stalled);
    assert_eq!(rig.room.rings(), 1, "who waits is told");
    let refused = rig.cache.write(ByteRange::at(at, 4096), &[1; 4096], &rig.waker);
    assert_eq!(refused.map(|_| ()).map_err(|error| error.kind()), Err(cbd_types::ErrorKind::Backing));
    rig.disk.with(|state| state.unwritable.clear());
    rig.settle();
    assert!(!rig.cache.status().is_stalled && rig.write(ByteRange::at(at, 4096), 1));
}
