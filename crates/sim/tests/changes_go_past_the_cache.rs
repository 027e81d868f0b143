//! Changes that go past the cache: what a flush has covered survives any crash, with the region and without it.

use cbd_engine::{CacheMode, Consistency};
use cbd_sim::{Happened, Mix, World, WorldOptions};

fn run(options: WorldOptions, turns: u64) -> Happened {
    let mut world = World::new(options);
    world.run(turns);
    world.finish()
}

fn run_all(mode: CacheMode, vary_modes: bool) -> Happened {
    let mut happened = Happened::default();
    for seed in 1..=60_u64 {
        let consistency = Consistency::ALL[seed as usize % 3];
        let options = WorldOptions {
            cache_mode: mode,
            vary_modes,
            volatile_cache: !seed.is_multiple_of(5),
            discard_zeroes: !seed.is_multiple_of(7),
            ..WorldOptions::small(seed, consistency)
        };
        happened = happened.and(run(options, 1500));
    }
    happened
}

#[test]
fn what_is_written_through_is_on_the_disk_when_a_flush_completes() {
    let happened = run_all(CacheMode::Writethrough, false);
    assert!(happened.images_past > 100 && happened.power_cuts > 20, "{happened:?}");
}

fn run_by_choice(seeds: u64, change: fn(&mut WorldOptions)) -> Happened {
    let mut happened = Happened::default();
    for seed in 1..=seeds {
        let mut options = WorldOptions {
            bypasses: true,
            volatile_cache: !seed.is_multiple_of(5),
            ..WorldOptions::small(seed, Consistency::ALL[seed as usize % 3])
        };
        change(&mut options);
        happened = happened.and(run(options, 1500));
    }
    assert!(happened.images_checked > 500 && happened.power_cuts > 20, "{happened:?}");
    happened
}

#[test]
fn sequential_writes_go_past_the_cache_where_that_is_legal() {
    let happened = run_by_choice(240, |options| options.vary_modes = options.seed.is_multiple_of(6));
    assert!(happened.past_sequential > 10 << 20 && happened.past_refused > 1 << 20, "{happened:?}");
    assert!(happened.past_congested > 64 << 10, "{happened:?}");
}

#[test]
fn writes_that_find_the_cache_full_go_past_it_where_that_is_legal() {
    let happened = run_by_choice(60, |options| {
        options.mix = Mix { flush: 1, fua_permille: 10, ..Mix::ALL };
        options.worker_percent = 3;
    });
    assert!(happened.past_full > 64 << 10, "{happened:?}");
}

/// Worlds whose disk fails now and then.
fn run_with_errors(change: fn(&mut WorldOptions)) -> Happened {
    let mut happened = Happened::default();
    for seed in 1..=60_u64 {
        let mut options = WorldOptions {
            write_errors_permille: 15,
            // What a failed flush has lost is still read from the disk until the power is cut: no cache can know of it.
            power_cuts: false,
            ..WorldOptions::small(seed, Consistency::ALL[seed as usize % 3])
        };
        change(&mut options);
        let mut world = World::new(options);
        world.expect_refusals();
        world.run(800);
        world.settle_after_errors();
        happened = happened.and(world.finish());
    }
    happened
}

#[test]
fn what_a_failing_disk_refuses_of_a_bypass_by_choice_is_cached() {
    let happened = run_with_errors(|options| options.bypasses = true);
    assert!(happened.past_sequential > 1 << 20 && happened.images_checked > 100, "{happened:?}");
}

#[test]
fn a_disk_that_fails_loses_nothing_that_a_flush_has_covered() {
    let happened = run_with_errors(|options| {
        options.cache_mode = CacheMode::ALL[1 + options.seed as usize / 3 % 3];
        options.vary_modes = options.seed.is_multiple_of(4);
    });
    assert!(happened.refused > 100 && happened.images_checked > 100, "{happened:?}");
}

#[test]
fn what_is_written_around_is_on_the_disk_when_a_flush_completes() {
    let happened = run_all(CacheMode::Writearound, false);
    assert!(happened.images_past > 100 && happened.power_cuts > 20, "{happened:?}");
}

#[test]
fn reads_and_writes_pass_through() {
    let happened = run_all(CacheMode::Passthrough, false);
    assert!(happened.images_past > 100 && happened.power_cuts > 20, "{happened:?}");
}

#[test]
fn the_mode_changes_at_any_moment() {
    let happened = run_all(CacheMode::Writeback, true);
    assert!(happened.images_past > 20 && happened.images_checked > happened.images_past, "{happened:?}");
}
