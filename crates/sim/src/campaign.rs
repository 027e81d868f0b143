//! Many worlds explored on all cores, within a budget.
//!
//! Always true here: a world's number decides which world it is and its seed; what is found in it does not depend on the
//! others, on the budget or on the number of threads. Only how many worlds are explored does.
//!
//! Left to others: what is tried in one world ([`crate::explorer`]).

mod worlds;

use crate::explorer::{Effort, Explorer, Tally};
use crate::watchdog::Watchdog;
use crate::world::World;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
pub use worlds::{Kind, kinds};

/// No world takes nearly as long.
const WORLD_LIMIT: Duration = Duration::from_secs(1200);

/// What to explore, and how much.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The first seed.
    pub seed: u64,
    /// Most seeds for each kind of world; none for as many as the other limits allow.
    pub seeds: Option<u64>,
    /// No world is begun after this time.
    pub limit: Option<Duration>,
    /// No world is begun when so many states were tried.
    pub states: Option<u64>,
    /// The only kind of world, by its name.
    pub world: Option<String>,
    /// The only moment that is looked at.
    pub point: Option<u64>,
    /// What is tried at each moment.
    pub effort: Effort,
    /// Threads.
    pub threads: usize,
}

/// What a campaign has come to.
#[derive(Debug)]
pub struct Outcome {
    /// What was seen.
    pub tally: Tally,
    /// Seeds begun, by the first and the last.
    pub seeds: (u64, u64),
    /// How long it took.
    pub elapsed: Duration,
}

/// Explores worlds as `plan` says; `progress` is called every few seconds with what was seen so far.
pub fn run(plan: &Plan, mut progress: impl FnMut(&Tally, Duration)) -> Outcome {
    let kinds: Vec<Kind> =
        kinds().into_iter().filter(|kind| plan.world.as_ref().is_none_or(|name| kind.name == name)).collect();
    let begun = Instant::now();
    let next = AtomicU64::new(0);
    let last_seed = AtomicU64::new(plan.seed);
    let tally = Mutex::new(Tally::default());
    let is_over = || {
        plan.limit.is_some_and(|limit| begun.elapsed() >= limit)
            || plan.states.is_some_and(|states| tally.lock().crash_states() >= states)
    };
    let work = || {
        while !is_over() {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let (round, kind) = (number / kinds.len() as u64, &kinds[number as usize % kinds.len()]);
            if plan.seeds.is_some_and(|seeds| round >= seeds) {
                return;
            }
            let seed = plan.seed + round;
            last_seed.fetch_max(seed, Ordering::Relaxed);
            let seen = explore(kind, seed, plan);
            tally.lock().add(seen);
        }
    };
    if !kinds.is_empty() {
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..plan.threads.max(1)).map(|_| scope.spawn(work)).collect();
            let mut said = Instant::now();
            while workers.iter().any(|worker| !worker.is_finished()) {
                std::thread::sleep(Duration::from_millis(100));
                if said.elapsed() > Duration::from_secs(10) {
                    said = Instant::now();
                    progress(&tally.lock(), begun.elapsed());
                }
            }
        });
    }
    Outcome {
        tally: tally.into_inner(),
        seeds: (plan.seed, last_seed.into_inner()),
        elapsed: begun.elapsed(),
    }
}

fn explore(kind: &Kind, seed: u64, plan: &Plan) -> Tally {
    let _watchdog = Watchdog::new(WORLD_LIMIT, format!("world {}, seed {seed}", kind.name));
    let mut explorer = Explorer::new(kind.name, seed, plan.effort, plan.point);
    let options = (kind.options)(seed);
    match crate::explorer::quietly(|| {
        let mut world = World::new(options);
        world.run(kind.warm_up(seed));
        world
    }) {
        Ok(world) => {
            let (happened, explored) = world.explore(kind.turns, explorer);
            let mut tally = explored.into_tally();
            tally.histories = 1;
            tally.count_world(&happened);
            tally
        }
        Err(text) => {
            explorer.history_failed(text);
            explorer.into_tally()
        }
    }
}
