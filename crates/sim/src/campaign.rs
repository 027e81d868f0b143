//! Explores many worlds on all processors, within a budget.
//!
//! Invariants: the number of a world decides its kind and its seed. The findings in a world do not depend on other
//! worlds, on the budget or on the number of threads; these decide only how many worlds are explored.
//!
//! Elsewhere: the exploration of one world ([`crate::explorer`]).

mod worlds;

use crate::explorer::{Effort, Explorer, Tally, quietly};
use crate::flips;
use crate::reconnect;
use crate::sequences;
use crate::watchdog::Watchdog;
use crate::world::{World, WorldOptions};
use crate::{channels, group, hosts, moves};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
pub use worlds::{Kind, Work, kinds};

/// Interval at which a campaign reports its progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);

/// Time limit for one world. The longest world takes a small fraction of it.
const WORLD_LIMIT: Duration = Duration::from_secs(1200);

/// The worlds to explore, and the limits.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The first seed.
    pub seed: u64,
    /// Maximum number of seeds for each kind of world; `None` if only the other limits apply.
    pub seeds: Option<u64>,
    /// No world begins after this time.
    pub limit: Option<Duration>,
    /// No world begins after this number of states was tried.
    pub states: Option<u64>,
    /// No world begins after this number of histories was played.
    pub histories: Option<u64>,
    /// The limit on states applies only after this number of distinct outcomes was seen.
    pub distinct: u64,
    /// The name of the only kind of world to explore, if set.
    pub world: Option<String>,
    /// The only moment to explore, if set.
    pub point: Option<u64>,
    /// Whether this is a long run: every sequence of four acts instead of three.
    pub is_long: bool,
    /// The effort at each moment.
    pub effort: Effort,
    /// Number of threads.
    pub threads: usize,
}

impl Plan {
    /// Every moment of `seeds` worlds of one kind.
    #[must_use]
    pub fn of_world(name: &str, seed: u64, seeds: u64) -> Self {
        Self {
            seed,
            seeds: Some(seeds),
            limit: None,
            states: None,
            histories: None,
            distinct: 0,
            world: Some(name.to_owned()),
            point: None,
            is_long: false,
            effort: Effort { exhausted_permille: 20, ..Effort::default() },
            threads: 1,
        }
    }

    /// The kinds of worlds that are explored.
    fn kinds(&self) -> Vec<Kind> {
        let mut kinds = kinds();
        match &self.world {
            Some(name) => kinds.retain(|kind| kind.name == name),
            // Histories of several connections or caches are counted in histories, not in crash states, so they have a
            // run of their own.
            None => kinds.retain(|kind| {
                !matches!(
                    kind.work,
                    Work::Reconnect | Work::Group | Work::Hosts | Work::Channels | Work::Moves
                ) && kind.is_long.is_none_or(|is_long| is_long == self.is_long)
            }),
        }
        kinds
    }
}

/// The result of a campaign.
#[derive(Debug)]
pub struct Outcome {
    /// The counts and findings.
    pub tally: Tally,
    /// The first and the last seed.
    pub seeds: (u64, u64),
    /// The duration of the campaign.
    pub elapsed: Duration,
}

/// State that the threads of a campaign share.
struct Campaign<'a> {
    plan: &'a Plan,
    kinds: Vec<Kind>,
    begun: Instant,
    /// The number of the next world.
    next: AtomicU64,
    last_seed: AtomicU64,
    tally: Mutex<Tally>,
}

/// Explores worlds according to `plan`. `progress` is called every few seconds with the counts so far.
pub fn run(plan: &Plan, mut progress: impl FnMut(&Tally, Duration)) -> Outcome {
    let campaign = Campaign {
        plan,
        kinds: plan.kinds(),
        begun: Instant::now(),
        next: AtomicU64::new(0),
        last_seed: AtomicU64::new(plan.seed),
        tally: Mutex::new(Tally::default()),
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..plan.threads.max(1)).map(|_| scope.spawn(|| campaign.work())).collect();
        let mut said = Instant::now();
        while workers.iter().any(|worker| !worker.is_finished()) {
            std::thread::sleep(Duration::from_millis(50));
            if said.elapsed() > PROGRESS_EVERY {
                said = Instant::now();
                progress(&campaign.tally.lock(), campaign.begun.elapsed());
            }
        }
    });
    Outcome {
        seeds: (plan.seed, campaign.last_seed.into_inner()),
        elapsed: campaign.begun.elapsed(),
        tally: campaign.tally.into_inner(),
    }
}

impl Campaign<'_> {
    fn is_over(&self) -> bool {
        let tally = self.tally.lock();
        self.plan.limit.is_some_and(|limit| self.begun.elapsed() >= limit)
            || self.plan.histories.is_some_and(|histories| tally.histories >= histories)
            || self.plan.states.is_some_and(|states| {
                tally.crash_states() >= states && tally.distinct.len() as u64 >= self.plan.distinct
            })
    }

    fn work(&self) {
        while !self.is_over() {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let (round, kind) =
                (number / self.kinds.len() as u64, &self.kinds[number as usize % self.kinds.len()]);
            let seed = self.plan.seed + round;
            let is_there = |kind: &Kind| kind.work.has_seed(seed);
            if self.plan.seeds.is_some_and(|seeds| round >= seeds) || !self.kinds.iter().any(is_there) {
                return;
            }
            if is_there(kind) {
                self.last_seed.fetch_max(seed, Ordering::Relaxed);
                let seen = explore(kind, seed, self.plan);
                self.tally.lock().add(seen);
            }
        }
    }
}

fn explore(kind: &Kind, seed: u64, plan: &Plan) -> Tally {
    match kind.work {
        Work::History(options) => explore_history(kind.name, options(seed), plan),
        Work::Flips => flips::explore(seed, plan.point),
        Work::Reconnect => reconnect::explore(seed, plan.point),
        Work::Group => group::explore(seed, plan.point),
        Work::Hosts => hosts::explore(seed, plan.point),
        Work::Channels => channels::explore(seed, plan.point),
        Work::Moves => moves::explore(seed, plan.point),
        Work::Sequences(length) => sequences::explore(kind.name, length, seed, plan.effort, plan.point),
    }
}

fn explore_history(name: &'static str, options: WorldOptions, plan: &Plan) -> Tally {
    let seed = options.seed;
    let _watchdog = Watchdog::new(WORLD_LIMIT, format!("world {name}, seed {seed}"));
    let mut explorer = Explorer::new(name, seed, plan.effort, plan.point);
    let warmed_up = quietly(|| {
        let mut world = World::new(options);
        world.run(worlds::warm_up(seed));
        world
    });
    let mut tally = match warmed_up {
        Ok(world) => {
            let (_, explored) = world.explore(worlds::TURNS, explorer);
            explored.into_tally()
        }
        Err(text) => {
            explorer.history_failed(text);
            explorer.into_tally()
        }
    };
    tally.histories = 1;
    tally
}
