//! A moment that two caches have in common: what is refused, what ends it, and that it is reached and kept.

use super::rig::{Options, Rig};
use super::{Still, bell};
use crate::{Bypass, BypassReason, CacheMode, CommonMoment, Consistency, Settings, Step, WhenFull};
use alloc::{sync::Arc, vec::Vec};
use cbd_types::{ByteRange, ErrorKind};

const BLOCK: u64 = 4096;
const WALL_MS: u64 = 5_000_000;

fn block(number: u64) -> ByteRange {
    ByteRange::at(number * BLOCK, BLOCK)
}

fn rigs(settings: Settings) -> [Rig; 2] {
    let make = || Rig::new(Options { settings, ..Options::default() });
    let rigs = [make(), make()];
    rigs.iter().for_each(|rig| rig.environment.set_wall(WALL_MS));
    rigs
}

fn close(rigs: &[Rig; 2]) -> CommonMoment<Still> {
    CommonMoment::close(&rigs.each_ref().map(|rig| Arc::clone(&rig.cache))).expect("nothing is in the way")
}

/// Both workers run until they wait.
fn run(rigs: &mut [Rig; 2]) {
    for rig in rigs {
        rig.run();
    }
}

fn pause(rigs: &[Rig; 2], ms: u64) {
    for rig in rigs {
        let settings = Settings { writeback_paused_until_ms: WALL_MS + ms, ..rig.cache.settings() };
        rig.cache.set_settings(settings).expect("it is valid");
    }
}

/// A moment that is held for a minute: of block 1 the disks have 1, and the caches 2.
fn held(settings: Settings) -> [Rig; 2] {
    let mut rigs = rigs(settings);
    rigs.iter().for_each(|rig| assert!(rig.write(block(1), 1)));
    let moment = close(&rigs);
    rigs.iter().for_each(|rig| assert!(rig.write(block(1), 2)));
    run(&mut rigs);
    pause(&rigs, 60_000);
    moment.hold().expect("the disks are at the moment");
    assert_eq!(shown(&rigs), [1, 1]);
    rigs
}

/// What the disks have of block 1.
fn shown(rigs: &[Rig; 2]) -> [u8; 2] {
    rigs.each_ref().map(|rig| rig.disk.with(|state| state.bytes[BLOCK as usize]))
}

#[test]
fn the_disks_stay_at_the_moment_until_it_is_dropped() {
    for consistency in [Consistency::Strict, Consistency::Checkpoint] {
        let mut rigs = rigs(Settings { consistency, ..Settings::default() });
        rigs.iter().for_each(|rig| assert!(rig.write(block(1), 1)));
        let moment = close(&rigs);
        assert_eq!(moment.check().map_err(|error| error.kind()), Err(ErrorKind::Busy));
        // Epochs behind the moment are closed, and their flushes, too.
        for value in 2..5 {
            rigs.iter().for_each(|rig| {
                assert!(rig.write(block(1), value));
                rig.cache.flush().expect("it runs");
            });
        }
        run(&mut rigs);
        assert!(moment.check().is_ok(), "{consistency:?}");
        assert_eq!(shown(&rigs), [1, 1], "{consistency:?}");
        assert!(rigs.iter().zip(moment.cuts()).all(|(rig, cut)| rig.cache.drained_epoch() == cut));
        for rig in &mut rigs {
            let epoch = rig.cache.status().epoch;
            rig.environment.set_monotonic(10_000);
            assert!((0..20).any(|_| matches!(rig.worker.step(), Step::Idle { .. })), "it sleeps");
            assert!(rig.cache.status().epoch.0 <= epoch.0 + 1, "it closes no epochs in vain");
        }
        assert_eq!(shown(&rigs), [1, 1], "{consistency:?}");
        drop(moment);
        rigs.iter_mut().for_each(Rig::drain);
        assert_eq!(shown(&rigs), [4, 4], "{consistency:?}");
    }
}

#[test]
fn a_cache_with_nothing_to_drain_is_at_the_moment_whatever_is_written_behind_it() {
    let mut rigs = rigs(Settings::default());
    let moment = close(&rigs);
    assert!(rigs[0].write(block(1), 1));
    run(&mut rigs);
    assert!(moment.check().is_ok());
    assert!(rigs[1].write(block(1), 1));
    assert!(moment.check().is_ok(), "what is behind the moment does not count");
    run(&mut rigs);
    assert!(moment.check().is_ok());
    assert!(shown(&rigs).iter().all(|byte| *byte > 127), "the disks are fresh");
}

#[test]
fn a_moment_that_is_not_reached_yet_is_not_reached_because_nothing_is_dirty() {
    let rigs = rigs(Settings::default());
    let moment = close(&rigs);
    assert_eq!(moment.check().map_err(|error| error.kind()), Err(ErrorKind::Busy));
    assert_eq!(moment.hold().map_err(|error| error.kind()), Err(ErrorKind::Busy));
    assert!(rigs.iter().all(|rig| !rig.cache.has_common_moment()), "a moment that is not held ends");
}

#[test]
fn a_full_cache_does_not_end_a_moment_that_is_held() {
    let mut rigs = held(Settings::default());
    for rig in &mut rigs {
        while rig.write(block(1), 3) {}
        rig.run();
        assert!(!rig.write(block(1), 3), "it waits for space");
    }
    assert_eq!(shown(&rigs), [1, 1]);
    rigs.iter_mut().for_each(|rig| {
        rig.environment.set_wall(WALL_MS + 60_000);
        rig.settle();
        assert!(rig.write(block(1), 4), "there is space behind the moment");
    });
    assert_eq!(shown(&rigs), [3, 3]);
}

#[test]
fn a_moment_that_is_held_ends_with_the_pause() {
    let mut rigs = held(Settings::default());
    for rig in &mut rigs {
        let woken = rig.run().expect("it looks for the end of the pause");
        assert!(woken <= 60_000);
        rig.environment.set_wall(WALL_MS + 60_000);
        rig.environment.set_monotonic(60_000);
        rig.settle();
        assert!(!rig.cache.has_common_moment());
    }
    assert_eq!(shown(&rigs), [2, 2]);
}

#[test]
fn a_clean_cache_ends_its_moment_with_the_pause() {
    let mut rigs = rigs(Settings::default());
    let moment = close(&rigs);
    run(&mut rigs);
    pause(&rigs, 60_000);
    moment.hold().expect("the disks are at the moment");
    for rig in &mut rigs {
        assert!(rig.run().is_some_and(|woken| woken <= 60_000), "it looks for the end of the pause");
        rig.environment.set_wall(WALL_MS + 60_000);
        rig.environment.set_monotonic(60_000);
        rig.run();
        assert!(!rig.cache.has_common_moment());
    }
}

#[test]
fn a_changed_pause_and_a_drain_end_a_moment_that_is_held() {
    let mut rigs = held(Settings::default());
    let settings = Settings { writeback_paused_until_ms: 0, ..rigs[0].cache.settings() };
    rigs[0].cache.set_settings(settings).expect("it is valid");
    assert!(!rigs[0].cache.has_common_moment(), "at once");
    let settings = Settings { gc_percent: 50, ..rigs[1].cache.settings() };
    rigs[1].cache.set_settings(settings).expect("it is valid");
    assert!(rigs[1].cache.has_common_moment(), "another setting does not");
    rigs.iter_mut().for_each(Rig::drain_without_clock);
    assert_eq!(shown(&rigs), [2, 2]);
    assert!(!rigs[1].cache.has_common_moment());
}

#[test]
fn a_drain_that_is_requested_before_the_moment_is_held_ends_it() {
    let mut rigs = rigs(Settings::default());
    let moment = close(&rigs);
    run(&mut rigs);
    rigs[1].cache.request_drain();
    run(&mut rigs);
    assert!(moment.check().is_ok(), "it waits until the moment ends");
    pause(&rigs, 60_000);
    let error = moment.hold().expect_err("the other drain waits");
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.line().starts_with("backend 0: another drain"), "{error}");
}

#[test]
fn nothing_goes_past_the_cache_behind_the_moment() {
    let rigs = held(Settings::default());
    let rig = &rigs[0];
    let around = Settings { when_full: WhenFull::Around, ..rig.cache.settings() };
    rig.transport.update_settings(rig.backend, around).expect("it is valid");
    rig.cache.set_settings(around).expect("it is valid");
    let begin = |waker| rig.cache.begin_bypass(block(7), BypassReason::Full, waker).expect("it runs");
    assert!(matches!(begin(&rig.waker), Bypass::Cached));
    // With another mode it waits, and is woken at the end of the moment.
    let mode = Settings { cache_mode: CacheMode::Writearound, ..around };
    rig.cache.set_settings(mode).expect("it is valid");
    assert!(matches!(begin(&rig.waker), Bypass::Cached), "what is dirty is drained first");
    let mut rigs = rigs;
    run(&mut rigs);
    assert!(!rigs[0].cache.has_common_moment(), "a change of the mode is a drain");
}

#[test]
fn a_change_that_waits_for_the_end_of_the_moment_is_woken() {
    let settings = Settings { cache_mode: CacheMode::Writearound, ..Settings::default() };
    let mut rig = Rig::new(Options { settings, ..Options::default() });
    rig.run();
    assert!(!rig.cache.status().is_changing_mode);
    // The command refuses such a cache; one whose mode changes meanwhile gets here.
    assert!(rig.cache.base().epochs().claim_limit());
    let (room, waker) = bell();
    let begun = rig.cache.begin_bypass(block(7), BypassReason::Mode, &waker).expect("it runs");
    assert!(matches!(begun, Bypass::Wait));
    assert_eq!(room.rings(), 0);
    let limit = rig.cache.base().epochs().limit().expect("it was claimed");
    rig.cache.lift_limit(limit);
    assert_eq!(room.rings(), 1);
}

#[test]
fn caches_that_cannot_have_a_common_moment_are_refused_and_nothing_is_held_up() {
    let [first, second] = rigs(Settings::default());
    let kind = |caches: &[&Rig]| {
        let caches: Vec<_> = caches.iter().map(|rig| Arc::clone(&rig.cache)).collect();
        CommonMoment::close(&caches).map(drop).map_err(|error| error.kind())
    };
    assert_eq!(kind(&[]), Err(ErrorKind::InvalidArgument));
    assert_eq!(kind(&[&first]), Err(ErrorKind::InvalidArgument));
    assert_eq!(kind(&[&first, &second, &first]), Err(ErrorKind::Busy));
    for settings in [
        Settings { consistency: Consistency::None, ..Settings::default() },
        Settings { cache_mode: CacheMode::Writethrough, ..Settings::default() },
        Settings { when_full: WhenFull::Around, ..Settings::default() },
        Settings { sequential_write_cutoff: 4096, ..Settings::default() },
        Settings { congestion_write_us: 1, ..Settings::default() },
    ] {
        let other = Rig::new(Options { settings, ..Options::default() });
        assert_eq!(kind(&[&first, &other]), Err(ErrorKind::InvalidArgument), "{settings:?}");
    }
    let [third, fourth] = rigs(Settings::default());
    let rigs = [third, fourth];
    let moment = close(&rigs);
    assert_eq!(kind(&[&first, &rigs[1]]), Err(ErrorKind::Busy));
    assert!(rigs[1].cache.has_common_moment(), "it is still that of the others");
    drop(moment);
    assert_eq!(kind(&[&first, &rigs[1]]), Ok(()));
    second.cache.stop();
    assert_eq!(kind(&[&first, &second]), Err(ErrorKind::Stopped));
    assert!(!first.cache.has_common_moment());
}

#[test]
fn a_disk_that_lacks_something_is_not_at_the_moment() {
    let settings =
        Settings { on_write_error: crate::OnWriteError::Park, write_error_after_s: 0, ..Settings::default() };
    let mut rigs = rigs(settings);
    rigs[1].disk.with(|state| state.unwritable = alloc::vec![block(1)]);
    rigs.iter().for_each(|rig| assert!(rig.write(block(1), 1)));
    let moment = close(&rigs);
    run(&mut rigs);
    let error = moment.check().expect_err("a range is parked");
    assert_eq!(error.kind(), ErrorKind::Backing);
    assert!(error.line().contains("not crash-consistent"), "{error}");
}
