//! The region is lost and the power fails at any moment. In `strict`, the disk alone holds a state that a plain disk
//! could have shown; in `checkpoint`, it does whenever the status reports the disk as consistent.

use cbd_engine::Consistency;
use cbd_sim::{Happened, Mix, Watchdog, World, WorldOptions, from_environment};
use std::time::Duration;

/// Mostly small writes and many flushes, so that many epochs are in progress.
const FLUSHING: Mix =
    Mix { write: 60, read: 4, flush: 20, discard: 3, write_zeroes: 4, fua_permille: 150, large_permille: 10 };

fn run(name: &str, rounds: u64, options: impl Fn(u64) -> WorldOptions) -> Happened {
    let first = from_environment("CBD_SEED", 1);
    let mut all = Happened::default();
    for seed in first..first + from_environment("CBD_ROUNDS", rounds) {
        let _watchdog = Watchdog::new(Duration::from_secs(120), format!("{name}, seed {seed}"));
        let mut world = World::new(options(seed));
        for _ in 0..from_environment("CBD_TURNS", 300) {
            world.run(3);
            world.check_backing();
        }
        all = all.and(world.finish());
    }
    println!("{name}: {all:?}");
    all
}

#[test]
fn strict_is_legal_at_any_moment() {
    let all = run("strict", 6, |seed| WorldOptions {
        mix: FLUSHING,
        crash_permille: 0,
        ..WorldOptions::small(seed, Consistency::Strict)
    });
    assert!(all.images_checked >= 300 && all.images_inconsistent == 0);
}

#[test]
fn strict_is_legal_at_any_moment_through_crashes() {
    let all = run("strict with crashes", 6, |seed| WorldOptions {
        mix: FLUSHING,
        ..WorldOptions::small(seed, Consistency::Strict)
    });
    assert!(all.images_checked >= 300 && all.images_inconsistent == 0);
}

#[test]
fn checkpoint_is_legal_whenever_it_says_so() {
    let all = run("checkpoint", 6, |seed| WorldOptions {
        mix: FLUSHING,
        ..WorldOptions::small(seed, Consistency::Checkpoint)
    });
    assert!(all.images_checked > 0 && all.images_inconsistent > 0);
}

#[test]
fn a_disk_without_volatile_cache_is_legal_without_flushes() {
    let all = run("no volatile cache", 3, |seed| WorldOptions {
        mix: FLUSHING,
        volatile_cache: false,
        ..WorldOptions::small(seed, Consistency::Strict)
    });
    assert!(all.images_checked > 0);
}

#[test]
fn a_disk_that_promises_no_zeroes_is_given_them() {
    let all = run("no zeroes from discard", 3, |seed| WorldOptions {
        mix: Mix { discard: 15, ..FLUSHING },
        discard_zeroes: false,
        ..WorldOptions::small(seed, Consistency::Strict)
    });
    assert!(all.images_checked > 0);
}
