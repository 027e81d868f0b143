//! Caches come and go, grow and shrink, while clients use the device and processes and the power end at any store. What a flush has
//! covered is there, whatever way it took; segments that change hands show nothing of their former owner.
//!
//! `CBD_SEED` is the first seed, `CBD_ROUNDS` the number of seeds.

use cbd_engine::Consistency;
use cbd_sim::campaign::{self, Plan, Work};
use cbd_sim::explorer::Tally;
use cbd_sim::{Happened, World, WorldOptions, from_environment};

/// The options of the world `name` with this seed.
fn options(name: &str, seed: u64) -> WorldOptions {
    let kinds = campaign::kinds();
    let kind = kinds.into_iter().find(|kind| kind.name == name).expect("it is a kind of world");
    let Work::History(options) = kind.work else { panic!("{name} has no history") };
    options(seed)
}

/// Lets worlds of this name run, and end with everything on the disks.
fn run(name: &str, rounds: u64, turns: u64) -> Happened {
    let first = from_environment("CBD_SEED", 1);
    let seeds = first..first + from_environment("CBD_ROUNDS", rounds);
    seeds.fold(Happened::default(), |sum, seed| {
        let mut world = World::new(options(name, seed));
        world.run(turns);
        sum.and(world.finish())
    })
}

/// Explores every moment of a few worlds of this name.
fn explore(name: &str, seeds: u64) -> Tally {
    let seeds = from_environment("CBD_ROUNDS", seeds).min(50);
    let plan = Plan::of_world(name, from_environment("CBD_SEED", 1), seeds);
    let tally = campaign::run(&plan, |_, _| {}).tally;
    assert_eq!(tally.findings, [], "{name}");
    tally
}

#[test]
fn what_a_flush_has_covered_is_there_whatever_way_it_took() {
    let happened = run("live", 12, 1500);
    assert!(happened.attached > 20 && happened.detached > 20 && happened.given_up > 5, "{happened:?}");
    assert!(happened.power_cuts > 20 && happened.images_checked > 50, "{happened:?}");
}

#[test]
fn segments_change_hands_between_two_caches_and_both_keep_what_they_hold() {
    let happened = run("live-sizes", 12, 1500);
    assert!(happened.grown > 50 && happened.shrunk > 50, "{happened:?}");
}

#[test]
fn caches_come_go_grow_and_shrink_in_any_order() {
    let happened = run("live-all", 12, 1500);
    let counts = [happened.attached, happened.detached, happened.grown, happened.shrunk];
    assert!(counts.iter().all(|count| *count > 10), "{happened:?}");
}

#[test]
fn every_moment_of_a_change_of_the_route_can_be_the_last() {
    let tally = explore("live", 3);
    assert!(tally.crash_states() > 300, "{:?}", tally.states);
}

#[test]
fn every_moment_of_a_change_of_the_size_can_be_the_last() {
    let tally = explore("live-sizes", 2);
    assert!(tally.crash_states() > 300, "{:?}", tally.states);
}

#[test]
fn a_failed_flush_is_reported_before_a_later_one_counts_across_a_change_of_the_route() {
    let tally = explore("live-failing-disk", 8);
    assert!(tally.crash_states() > 300, "{:?}", tally.states);
}

/// Without bypasses a write through the cache is durable when it has completed, with a flush or without one.
#[test]
fn a_write_through_an_attached_cache_is_durable_at_once() {
    let mut sum = Happened::default();
    for seed in 1..5 {
        let options = WorldOptions {
            consistency: Consistency::Strict,
            mix: cbd_sim::Mix { flush: 0, fua_permille: 0, ..cbd_sim::Mix::ALL },
            ..options("live", seed)
        };
        let mut world = World::new(options);
        world.run(1000);
        sum = sum.and(world.finish());
    }
    assert!(sum.power_cuts > 0 && sum.attached > 0, "{sum:?}");
}
