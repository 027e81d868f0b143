//! A cache of 16 segments under a workload of a hundred times its size, with many flushes or none, completes all
//! requests. Reclaim, not the clock, wakes every client that waits for space, and the order of writeback is kept.

use cbd_engine::Consistency;
use cbd_sim::{Mix, Watchdog, World, WorldOptions, from_environment};
use std::time::Duration;

const WRITES: Mix =
    Mix { write: 100, read: 3, flush: 0, discard: 1, write_zeroes: 1, fua_permille: 0, large_permille: 60 };

fn press(name: &str, consistency: Consistency, mix: Mix, change: impl Fn(&mut WorldOptions)) {
    let first = from_environment("CBD_SEED", 1);
    for seed in first..first + from_environment("CBD_ROUNDS", 1) {
        let _watchdog = Watchdog::new(Duration::from_secs(200), format!("{name}, seed {seed}"));
        let mut options = WorldOptions { mix, in_flight_max: 16, ..WorldOptions::small(seed, consistency) };
        change(&mut options);
        let bytes = 100 * u64::from(options.segments) * options.segment_size;
        let mut world = World::new(options);
        world.press(bytes);
        let happened = world.finish();
        println!("{name}: {happened:?}");
        assert!(happened.written_bytes >= bytes && happened.waited_for_space > 0);
        assert_eq!(happened.rescued_by_clock, 0, "a client was woken by the clock");
    }
}

#[test]
fn without_flushes() {
    press("never flushed", Consistency::Strict, WRITES, |_| {});
}

#[test]
fn with_many_flushes() {
    let mix = Mix { flush: 30, fua_permille: 100, ..WRITES };
    press("flushed often", Consistency::Strict, mix, |_| {});
}

#[test]
fn with_many_flushes_in_checkpoint() {
    let mix = Mix { flush: 30, fua_permille: 100, ..WRITES };
    press("checkpoint", Consistency::Checkpoint, mix, |_| {});
}

#[test]
fn without_order() {
    press("none", Consistency::None, Mix { flush: 5, ..WRITES }, |_| {});
}

#[test]
fn with_the_smallest_cache() {
    press("smallest", Consistency::Strict, Mix { flush: 10, ..WRITES }, |options| options.segments = 9);
}

#[test]
fn with_hot_blocks_that_are_written_again_and_again() {
    let mix = Mix { read: 40, flush: 10, large_permille: 0, ..WRITES };
    press("hot blocks", Consistency::Strict, mix, |options| options.segments = 9);
}
