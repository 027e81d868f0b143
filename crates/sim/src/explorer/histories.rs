//! Worlds of which whole histories are checked, not crash states: a batch of histories for each seed.

use super::{Finding, Tally};
use crate::random::mix;
use crate::watchdog::Watchdog;
use std::collections::BTreeMap;
use std::time::Duration;

/// The longest time of a batch.
const LIMIT: Duration = Duration::from_secs(600);

/// Plays the histories 1 to `batch` of one seed; with `only`, only the one with that number. `play` returns what is wrong with a
/// history.
pub(crate) fn play_histories(
    world: &str,
    batch: u64,
    seed: u64,
    only: Option<u64>,
    play: impl Fn(u64, &mut Tally) -> Result<(), String>,
) -> Tally {
    let _watchdog = Watchdog::new(LIMIT, format!("world {world}, seed {seed}"));
    let mut tally = Tally::default();
    for number in (1..=batch).filter(|number| only.is_none_or(|only| only == *number)) {
        tally.histories += 1;
        if let Err(text) = play(number, &mut tally) {
            let state = String::from("the history itself");
            tally.findings.push(Finding { world: world.to_owned(), seed, point: Some(number), state, text });
        }
    }
    tally
}

/// As [`play_histories`], for worlds that count what has happened: `play` gets the seed of a history, and returns the counts, too.
pub(crate) fn play_counted(
    world: &str,
    batch: u64,
    seed: u64,
    only: Option<u64>,
    play: impl Fn(u64) -> (Result<(), String>, BTreeMap<&'static str, u64>),
) -> Tally {
    play_histories(world, batch, seed, only, |number, tally| {
        let (outcome, counts) = play(mix(seed ^ mix(number)));
        counts.iter().for_each(|(what, count)| tally.fault(what, *count));
        tally.state("history");
        outcome
    })
}
