//! The counts of explorers, for the report of a run.

use crate::world::Happened;
use cbd_engine::RarePaths;
use std::collections::{BTreeMap, HashSet};

/// A violation that was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// The name of the world.
    pub world: String,
    /// The seed of the world.
    pub seed: u64,
    /// The number of the moment in the history, from 1; `None` if the history itself failed.
    pub point: Option<u64>,
    /// How the state was produced.
    pub state: String,
    /// The description of the violation.
    pub text: String,
}

/// Counts by name.
pub type Counts = BTreeMap<&'static str, u64>;

/// The counts and findings.
#[derive(Clone, Default, Debug)]
pub struct Tally {
    /// Histories played.
    pub histories: u64,
    /// Moments that were explored.
    pub points: u64,
    /// Moments of which every subset of the open lines was tried.
    pub points_exhausted: u64,
    /// States that were recovered and compared, by the method that produced them.
    pub states: Counts,
    /// States that were skipped because they differ from a tried state only in bytes that its recovery never read.
    pub equivalent_states: u64,
    /// Faults that the worlds met, by kind.
    pub faults: Counts,
    /// How often each rare path was taken.
    pub rare: Counts,
    /// Sequences played, by their length.
    pub sequences: BTreeMap<u32, u64>,
    /// One digest for each distinct outcome of a recovery.
    pub distinct: HashSet<u64>,
    /// The violations.
    pub findings: Vec<Finding>,
}

impl Tally {
    /// Counts one more state of a kind.
    pub fn state(&mut self, kind: &'static str) {
        *self.states.entry(kind).or_default() += 1;
    }

    /// Counts a fault.
    pub fn fault(&mut self, kind: &'static str, count: u64) {
        *self.faults.entry(kind).or_default() += count;
    }

    /// Counts a rare path.
    pub fn rare(&mut self, path: &'static str, count: u64) {
        *self.rare.entry(path).or_default() += count;
    }

    /// Counts the rare paths that an engine has taken.
    pub fn engine(&mut self, paths: &RarePaths) {
        for (path, count) in paths.named() {
            self.rare(path, count);
        }
    }

    /// Adds the counts of a world.
    pub fn count_world(&mut self, happened: &Happened) {
        self.fault("process_crash", happened.process_crashes);
        self.fault("power_cut", happened.power_cuts);
        self.fault("failed_read", happened.failed_reads);
        self.rare("crash_in_recovery", happened.crashes_in_recovery);
        self.rare("waited_for_space", happened.waited_for_space);
        self.rare("orderly_stop", happened.stops);
        self.rare("drain", happened.drains);
        self.rare("parked", happened.parked);
        self.rare("past_sequential_bytes", happened.past_sequential);
        self.rare("attached", happened.attached);
        self.rare("detached", happened.detached);
        self.rare("grown", happened.grown);
        self.rare("shrunk", happened.shrunk);
        self.rare("change_given_up", happened.given_up);
        self.engine(&happened.rare);
    }

    /// Number of all states that were recovered and compared.
    #[must_use]
    pub fn crash_states(&self) -> u64 {
        self.states.values().sum()
    }

    /// Adds the counts of another tally.
    pub fn add(&mut self, other: Self) {
        self.histories += other.histories;
        self.points += other.points;
        self.points_exhausted += other.points_exhausted;
        self.equivalent_states += other.equivalent_states;
        for (mine, others) in
            [(&mut self.states, other.states), (&mut self.faults, other.faults), (&mut self.rare, other.rare)]
        {
            for (name, count) in others {
                *mine.entry(name).or_default() += count;
            }
        }
        for (length, count) in other.sequences {
            *self.sequences.entry(length).or_default() += count;
        }
        self.distinct.extend(other.distinct);
        self.findings.extend(other.findings);
    }
}
