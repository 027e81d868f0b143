//! A few of the worlds, sequences and flips that `cargo xtask sim` explores by the thousand.
//!
//! `CBD_SEED` is the first seed, `CBD_ROUNDS` the number of seeds.

use cbd_sim::campaign::{self, Plan};
use cbd_sim::explorer::Tally;
use cbd_sim::from_environment;

/// Explores the kind of world `name`. Returns the counts if there was no violation.
fn explore(name: &str, seeds: u64) -> Tally {
    // The number of batches of sequences is finite, and they begin with batch 1.
    let is_endless = !name.starts_with("sequences");
    let seeds = if is_endless { from_environment("CBD_ROUNDS", seeds).min(50) } else { seeds };
    let seed = if is_endless { from_environment("CBD_SEED", 1) } else { 1 };
    let plan = Plan::of_world(name, seed, seeds);
    let tally = campaign::run(&plan, |_, _| {}).tally;
    assert_eq!(tally.findings, [], "{name}");
    assert!(tally.histories >= seeds);
    tally
}

#[test]
fn a_history_can_crash_at_any_moment() {
    let tally = explore("strict", 4);
    let seen = |kind| tally.states.get(kind).copied().unwrap_or(0) > 0;
    for kind in ["subset", "torn", "process crash", "process crash, then power cut", "power cut twice"] {
        assert!(seen(kind), "{kind}: {:?}", tally.states);
    }
    assert!(tally.distinct.len() > 20 && tally.points_exhausted > 0);
}

#[test]
fn the_same_seed_gives_the_same_states() {
    let (one, other) = (explore("flushing", 1), explore("flushing", 1));
    assert_eq!((one.points, one.states, one.distinct), (other.points, other.states, other.distinct));
}

#[test]
fn a_single_act_can_crash_at_any_moment() {
    let tally = explore("sequences-1", 1);
    assert!(tally.crash_states() > 100);
}

#[test]
fn a_flipped_bit_gives_no_wrong_data() {
    let tally = explore("flips", 1);
    for fate in
        ["read, and made good", "found, and healed from the disk", "found, and answered with an error"]
    {
        let count = tally.faults.iter().find(|(name, _)| name.ends_with(fate)).map_or(0, |(_, count)| *count);
        assert!(count > 0, "{fate}: {:?}", tally.faults);
    }
}
