//! Changes that go past the cache: what a flush has covered survives any crash, with the region and without it.

use cbd_engine::{CacheMode, Consistency};
use cbd_sim::{Happened, World, WorldOptions};

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

#[test]
fn a_disk_that_fails_loses_nothing_that_a_flush_has_covered() {
    let mut happened = Happened::default();
    for seed in 1..=60_u64 {
        let options = WorldOptions {
            cache_mode: CacheMode::ALL[1 + seed as usize / 3 % 3],
            vary_modes: seed.is_multiple_of(4),
            write_errors_permille: 15,
            // What a failed flush has lost is still read from the disk until the power is cut: no cache can know of it.
            power_cuts: false,
            ..WorldOptions::small(seed, Consistency::ALL[seed as usize % 3])
        };
        let mut world = World::new(options);
        world.expect_refusals();
        world.run(800);
        world.settle_after_errors();
        happened = happened.and(world.finish());
    }
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
