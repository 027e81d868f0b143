//! The pace of writeback in a small cache: what is written, when, and the reason that status shows.

extern crate std;

use crate::tests::WALL_MS;
use crate::tests::rig::{Asked, Options, Rig};
use crate::{Consistency, PaceReason, Settings, Step};
use alloc::vec::Vec;
use cbd_types::ByteRange;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

fn large(settings: Settings) -> Options {
    Options { device: 8 * MIB, segments: 201, settings, ..Options::default() }
}

fn checkpoint() -> Settings {
    Settings { consistency: Consistency::Checkpoint, ..Settings::default() }
}

fn paused(ms: u64) -> Settings {
    Settings { writeback_paused_until_ms: WALL_MS + ms, ..Settings::default() }
}

fn block(number: u64) -> ByteRange {
    ByteRange::at(number * BLOCK, BLOCK)
}

fn reason(rig: &Rig) -> PaceReason {
    rig.cache.status().pace.reason
}

fn writes(rig: &Rig) -> Vec<ByteRange> {
    let writes = rig.disk.take_asked().into_iter().filter_map(|asked| match asked {
        Asked::Write(range) => Some(range),
        _ => None,
    });
    writes.collect()
}

/// Both clocks.
fn set_clocks(rig: &Rig, ms: u64) {
    rig.environment.set_monotonic(ms);
    rig.environment.set_wall(WALL_MS + ms);
}

/// Writes a block each `every_ms` and flushes, until `end`; the background worker runs each time.
fn load(rig: &mut Rig, begin: u64, end: u64, every_ms: u64, mut next: impl FnMut() -> u64) {
    for ms in (begin..end).step_by(every_ms as usize) {
        set_clocks(rig, ms);
        assert!(rig.write(block(next()), 1), "there is space");
        rig.cache.flush().expect("it runs");
        rig.run();
    }
}

#[test]
fn under_a_steady_load_the_dirty_share_approaches_the_target() {
    let settings = Settings { dirty_target_percent: 20, ..Settings::default() };
    let mut rig = Rig::new(large(settings));
    let (mut number, mut farthest) = (0, 0);
    for second in 0..60 {
        load(&mut rig, second * 1000, (second + 1) * 1000, 5, || {
            number += 7;
            number % 2048
        });
        let status = rig.cache.status();
        if second >= 30 {
            farthest = farthest.max(status.dirty_error_permille().abs());
            assert_eq!(status.pace.reason, PaceReason::HoldingTarget);
            assert!(status.pace.permitted.is_some_and(|rate| rate.abs_diff(800 << 10) < 200 << 10));
        }
    }
    assert!(farthest <= 50, "{farthest} thousandths from the target");
}

#[test]
fn hot_blocks_are_written_back_once_a_minute_while_less_than_the_target_is_dirty() {
    let mut rig = Rig::new(large(checkpoint()));
    load(&mut rig, 0, 59_900, 200, || 0);
    assert_eq!((writes(&rig), reason(&rig)), (alloc::vec![], PaceReason::BelowTarget));
    load(&mut rig, 60_000, 61_000, 200, || 0);
    assert_eq!(writes(&rig), [block(0)]);
    load(&mut rig, 61_000, 119_000, 200, || 0);
    assert_eq!(writes(&rig), []);
}

#[test]
fn in_strict_order_the_recovery_point_follows_a_light_load_that_does_not_end() {
    let mut rig = Rig::new(large(Settings::default()));
    let mut number = 0;
    load(&mut rig, 0, 30_000, 200, || {
        number += 1;
        number % 2000
    });
    let status = rig.cache.status();
    assert!(status.epoch.0 - status.drained_epoch.0 < 10, "{} of {}", status.drained_epoch, status.epoch);
}

#[test]
fn a_cache_that_is_left_alone_is_drained_a_second_after_the_last_write() {
    for settings in [Settings::default(), checkpoint()] {
        let mut rig = Rig::new(large(settings));
        let mut number = 0;
        load(&mut rig, 0, 2000, 10, || {
            number += 1;
            number
        });
        assert!(rig.cache.dirty_bytes() > 0);
        for ms in (2000..3200).step_by(10) {
            set_clocks(&rig, ms);
            rig.run();
        }
        assert_eq!((rig.cache.dirty_bytes(), reason(&rig)), (0, PaceReason::Idle));
        assert_eq!(rig.run(), None, "nothing wakes it any more");
        let pace = rig.cache.status().pace;
        assert_eq!((pace.rate, pace.permitted), (0, None));
    }
}

#[test]
fn with_a_target_of_zero_everything_is_written_at_once() {
    let settings = Settings { dirty_target_percent: 0, ..Settings::default() };
    let mut rig = Rig::new(large(settings));
    (0..20).for_each(|number| assert!(rig.write(block(2 * number), 1)));
    rig.run();
    assert_eq!((writes(&rig).len(), rig.disk.with(|state| state.deepest)), (20, 8));
    assert_eq!(rig.cache.dirty_bytes(), 0);
}

#[test]
fn what_exceeds_the_target_by_far_is_written_at_once_in_a_checkpoint() {
    let mut rig = Rig::new(large(checkpoint()));
    // 15 percent of 200 segments of 16 blocks are 480 blocks.
    (0..480).for_each(|number| assert!(rig.write(block(number), 1)));
    rig.run();
    assert_eq!(writes(&rig), []);
    (480..490).for_each(|number| assert!(rig.write(block(number), 1)));
    set_clocks(&rig, 1);
    rig.run();
    assert_eq!(rig.cache.dirty_bytes(), 0);
}

#[test]
fn a_drain_is_not_slowed_by_an_epoch_that_was_closed_after_the_request() {
    let mut rig = Rig::new(large(checkpoint()));
    (0..200).for_each(|number| assert!(rig.write(block(2 * number), 1)));
    let epoch = rig.cache.request_drain();
    assert!(rig.write(block(0), 2));
    rig.cache.flush().expect("it runs");
    rig.run();
    assert!(rig.cache.is_drained(epoch) && rig.disk.with(|state| state.deepest) == 8);
}

#[test]
fn a_requested_drain_is_not_slowed() {
    for settings in [Settings::default(), checkpoint(), paused(1_000_000)] {
        let mut rig = Rig::new(large(settings));
        (0..200).for_each(|number| assert!(rig.write(block(number), 1)));
        rig.cache.flush().expect("it runs");
        rig.run();
        assert_eq!(writes(&rig), []);
        let epoch = rig.cache.request_drain();
        rig.run();
        assert!(rig.cache.is_drained(epoch) && rig.cache.dirty_bytes() == 0);
    }
}

#[test]
fn a_pause_ends_by_the_clock() {
    for consistency in Consistency::ALL {
        let mut rig = Rig::new(large(Settings { consistency, ..paused(90_000) }));
        for number in [1, 9] {
            assert!(rig.write(block(number), 1));
            rig.cache.flush().expect("it runs");
        }
        for ms in [0, 1000, 5000, 60_000, 89_999] {
            set_clocks(&rig, ms);
            rig.run();
            assert_eq!((writes(&rig), reason(&rig)), (alloc::vec![], PaceReason::Paused), "at {ms} ms");
        }
        assert_eq!(rig.run(), Some(90_000));
        set_clocks(&rig, 90_000);
        rig.run();
        assert_eq!((writes(&rig), reason(&rig)), (alloc::vec![block(1), block(9)], PaceReason::Idle));
    }
}

#[test]
fn a_pause_does_not_keep_requests_from_space() {
    let mut rig = Rig::new(Options { settings: paused(1_000_000), ..Options::default() });
    let mut number = 0;
    while rig.write(block(number % 1000), 1) {
        number += 1;
    }
    rig.run();
    assert!(rig.room.rings() > 0 && rig.write(block(0), 2), "it waited for space");
}

#[test]
fn a_pause_interrupts_what_may_be_interrupted() {
    for (settings, left) in [(Settings::default(), 38), (checkpoint(), 0)] {
        let mut rig = Rig::new(large(settings));
        (0..40).for_each(|number| {
            assert!(rig.write(block(2 * number), 1));
            if settings.consistency == Consistency::Checkpoint {
                rig.cache.flush().expect("it runs");
            }
        });
        rig.run();
        set_clocks(&rig, 1000);
        rig.disk.with(|state| state.is_slow = true);
        while rig.worker.step() == Step::Busy {}
        rig.cache
            .set_settings(Settings { writeback_paused_until_ms: WALL_MS + 60_000, ..settings })
            .expect("valid");
        rig.disk.with(|state| state.is_slow = false);
        for ms in 1000..1100 {
            set_clocks(&rig, ms);
            rig.run();
        }
        assert_eq!(writes(&rig).len(), 40 - left);
        assert!(rig.cache.status().backing_is_consistent, "it is so for all of the pause");
    }
}

#[test]
fn what_is_parked_is_tried_again_during_a_pause() {
    let settings =
        Settings { on_write_error: crate::OnWriteError::Park, write_error_after_s: 0, ..paused(1_000_000) };
    let mut rig = Rig::new(large(settings));
    rig.disk.with(|state| state.unwritable = alloc::vec![block(0)]);
    assert!(rig.write(block(0), 1));
    rig.drain_without_clock();
    assert!(rig.cache.status().parked_bytes > 0);
    rig.disk.with(|state| state.unwritable.clear());
    set_clocks(&rig, 600_000);
    rig.run();
    assert_eq!(rig.cache.status().parked_bytes, 0);
}

#[test]
fn writeback_yields_while_reads_of_the_disk_are_slow() {
    let settings = Settings { read_latency_target_us: 5000, ..Settings::default() };
    let mut rig = Rig::new(large(settings));
    let mut number = 0;
    let mut next = || {
        number += 7;
        number % 2048
    };
    load(&mut rig, 0, 30_000, 5, &mut next);
    let before = rig.cache.status().pace.permitted.expect("a rate");
    for tenth in 300..310 {
        rig.environment.set_monotonic(tenth * 100);
        // It took 9 ms.
        rig.cache.note_backing_read(BLOCK, tenth * 100_000 - 9000);
        load(&mut rig, tenth * 100, (tenth + 1) * 100, 5, &mut next);
    }
    let pace = rig.cache.status().pace;
    assert_eq!(pace.reason, PaceReason::YieldingToReads);
    assert!(pace.permitted.is_some_and(|rate| rate < before / 4), "{pace:?} after {before}");
    let epoch = rig.cache.request_drain();
    rig.run();
    assert!(rig.cache.is_drained(epoch), "a drain does not yield");
    load(&mut rig, 31_000, 45_000, 5, &mut next);
    assert_ne!(reason(&rig), PaceReason::YieldingToReads);
}

#[test]
fn the_limit_of_the_user_is_the_reason_where_it_binds() {
    let settings = Settings { writeback_rate: 32 << 10, ..Settings::default() };
    let mut rig = Rig::new(large(settings));
    (0..400).for_each(|number| assert!(rig.write(block(2 * number), 1)));
    rig.run();
    for ms in (0..3000).step_by(10) {
        set_clocks(&rig, ms);
        rig.run();
    }
    let pace = rig.cache.status().pace;
    assert_eq!((pace.reason, pace.permitted), (PaceReason::LimitedByRate, Some(32 << 10)));
    assert!(pace.rate > 0 && pace.rate < 2 * MIB);
}

#[test]
fn clean_segments_are_reclaimed_before_writeback_hurries() {
    let mut rig = Rig::new(Options { segments: 101, ..large(Settings::default()) });
    (0..1000).for_each(|number| assert!(rig.write(block(number), 1)));
    rig.drain();
    (0..20).for_each(|number| assert!(rig.write(block(number), 2)));
    let before = rig.cache.status();
    rig.cache.set_settings(Settings { gc_percent: 20, ..Settings::default() }).expect("valid");
    rig.run();
    let status = rig.cache.status();
    assert!(status.used_segments() <= 21 && before.used_segments() > 50, "it was above gc_percent");
    assert_eq!((status.written_back_bytes, status.dirty_bytes), (before.written_back_bytes, 20 * BLOCK));
}

#[test]
fn writeback_hurries_when_reclaim_finds_nothing_clean() {
    let settings = Settings { gc_percent: 5, dirty_target_percent: 90, ..Settings::default() };
    let mut rig = Rig::new(Options { segments: 21, ..large(settings) });
    (0..20).for_each(|number| assert!(rig.write(block(number), 1)));
    rig.run();
    assert_eq!((rig.cache.dirty_bytes(), writes(&rig).len()), (0, 1));
}

#[test]
fn a_checkpoint_that_a_restart_interrupted_is_finished_at_once() {
    let mut rig = Rig::new(large(checkpoint()));
    for number in 0..4 {
        assert!(rig.write(block(2 * number), 1));
        rig.cache.flush().expect("it runs");
    }
    rig.run();
    set_clocks(&rig, 1000);
    rig.disk.with(|state| state.is_slow = true);
    while rig.worker.step() == Step::Busy {}
    assert!(!rig.cache.status().backing_is_consistent);
    rig.disk.with(|state| state.is_slow = false);
    let mut rig = rig.reopened();
    assert!(!rig.cache.status().backing_is_consistent);
    rig.run();
    assert!(rig.cache.status().backing_is_consistent && rig.cache.dirty_bytes() == 0);
}

#[test]
fn an_open_epoch_is_closed_once_a_second() {
    let settings = Settings { dirty_target_percent: 90, ..Settings::default() };
    let mut rig = Rig::new(large(settings));
    let before = rig.cache.status().epoch.0;
    for ms in (0..10_000).step_by(10) {
        set_clocks(&rig, ms);
        assert!(rig.write(block(ms % 2000), 1));
        rig.run();
    }
    let closed = rig.cache.status().epoch.0 - before;
    assert!((8..=21).contains(&closed), "{closed} epochs in ten seconds without a flush");
}

/// A cache with a maximum for the age of its recovery point.
fn promising(settings: Settings, max_ms: u64) -> Rig {
    let rig = Rig::new(large(settings));
    rig.cache.set_recovery_point_max_ms(max_ms);
    rig
}

/// Writes every 10 ms until `end`, and flushes each `flush_every` writes; returns the greatest age of the recovery point.
fn oldest_under_load(rig: &mut Rig, end: u64, flush_every: u64) -> u64 {
    let mut oldest = 0;
    for number in 0..end / 10 {
        set_clocks(rig, number * 10);
        assert!(rig.write(block(number * 7 % 2000), 1), "there is space");
        if number % flush_every == flush_every - 1 {
            rig.cache.flush().expect("it runs");
        }
        rig.run();
        oldest = oldest.max(rig.cache.status().recovery_point_age_ms);
    }
    oldest
}

#[test]
fn the_recovery_point_stays_younger_than_its_maximum_whether_clients_flush_or_not() {
    let target = Settings { dirty_target_percent: 90, ..Settings::default() };
    for settings in [target, Settings { consistency: Consistency::Checkpoint, ..target }] {
        for flush_every in [1, 50, u64::MAX] {
            for max_ms in [1000, 4000, 10_000] {
                let mut rig = promising(settings, max_ms);
                let oldest = oldest_under_load(&mut rig, 30_000, flush_every);
                let case = (settings.consistency, flush_every, max_ms);
                assert!((max_ms / 8..max_ms).contains(&oldest), "{case:?}: {oldest} ms");
            }
        }
    }
}

#[test]
fn without_a_maximum_the_recovery_point_of_a_checkpoint_becomes_as_old_as_before() {
    let settings = Settings { dirty_target_percent: 90, ..checkpoint() };
    let mut rig = promising(settings, 0);
    let oldest = oldest_under_load(&mut rig, 20_000, 50);
    assert!(oldest > 18_000, "{oldest} ms");
}

#[test]
fn a_cache_with_nothing_dirty_has_a_recovery_point_of_no_age_however_long_it_rests() {
    let mut rig = promising(Settings::default(), 2000);
    assert!(rig.write(block(0), 1));
    rig.cache.flush().expect("it runs");
    for ms in (0..3000).step_by(10) {
        set_clocks(&rig, ms);
        rig.run();
    }
    set_clocks(&rig, 3_600_000);
    assert_eq!(rig.cache.status().recovery_point_age_ms, 0);
    // The age of the next write counts from itself, not from the last drained epoch.
    assert!(rig.write(block(1), 1));
    rig.run();
    set_clocks(&rig, 3_600_500);
    let age = rig.cache.status().recovery_point_age_ms;
    assert!((500..=600).contains(&age), "{age} ms");
}

#[test]
fn the_reason_says_that_writeback_runs_for_the_recovery_point() {
    let settings = Settings { dirty_target_percent: 90, ..checkpoint() };
    let mut rig = promising(settings, 4000);
    load(&mut rig, 0, 1990, 10, || 0);
    assert_eq!((writes(&rig), reason(&rig)), (alloc::vec![], PaceReason::RecoveryPoint));
    assert!(rig.cache.status().pace.permitted.is_some(), "it is in no hurry yet");
    set_clocks(&rig, 2010);
    rig.disk.with(|state| state.is_slow = true);
    while rig.worker.step() == Step::Busy {}
    let pace = rig.cache.status().pace;
    assert_eq!((pace.reason, pace.permitted), (PaceReason::RecoveryPoint, None), "without a limit");
    rig.disk.with(|state| state.is_slow = false);
    rig.run();
    assert_eq!(writes(&rig), [block(0)]);
}

#[test]
fn a_pause_of_writeback_is_obeyed_and_the_age_grows() {
    let mut rig = promising(paused(60_000), 2000);
    load(&mut rig, 0, 10_000, 100, || 0);
    assert_eq!((writes(&rig), reason(&rig)), (alloc::vec![], PaceReason::Paused));
    let age = rig.cache.status().recovery_point_age_ms;
    assert!((9_900..=10_000).contains(&age), "{age} ms");
}

#[test]
fn what_a_former_process_left_dirty_is_as_old_as_its_recovery_point_says() {
    let mut rig = promising(Settings::default(), 0);
    rig.write(block(0), 1);
    rig.cache.flush().expect("it runs");
    rig.drain();
    set_clocks(&rig, 5000);
    rig.write(block(1), 1);
    rig.cache.flush().expect("it runs");
    set_clocks(&rig, 100_000);
    rig.disk.with(|state| state.is_slow = true);
    let mut rig = rig.reopened();
    rig.worker.step();
    let age = rig.cache.status().recovery_point_age_ms;
    assert!(age >= 95_000, "{age} ms");
}
