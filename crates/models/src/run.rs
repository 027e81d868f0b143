//! Runs a scene: one execution after the other, each with a seed.
//!
//! Invariants: the same scene with the same seed is the same execution, step by step; a failure is reported
//! with its seed.

use crate::points;
use crate::scenes::{Ending, Scene};
use crate::schedule::Seeds;
use crate::setup::{Setup, Start};
use crate::stage::{Checked, Stage};
use parking_lot::Mutex;
use shuttle::{Config, FailurePersistence, MaxSteps, Runner};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Stack of a thread in bytes: enough for the engine, and for a recovery when the world ends on the thread.
const STACK: usize = 1 << 20;

/// The limits of a run.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Seed of the first execution.
    pub seed: u64,
    /// Instead of random schedules: every schedule that interrupts a thread once, in the execution with this seed;
    /// `seed` is then the number of the first schedule.
    pub sweep: Option<u64>,
    /// Maximum number of executions.
    pub iterations: u64,
    /// No execution begins after this time.
    pub time: Option<Duration>,
}

/// The result.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Executions without a failure.
    pub executions: u64,
    /// Number of points in all executions.
    pub points: u64,
    /// Number of points in the longest execution.
    pub points_max: u64,
    /// Number of checks: ends of the world by kind, and disks without their region.
    pub checked: Checked,
    /// The duration of the run.
    pub time: Duration,
    /// The execution that failed, if one did: its seed and the failure.
    pub failure: Option<(u64, String)>,
}

#[derive(Default)]
struct Tally {
    executions: u64,
    points: u64,
    points_max: u64,
    checked: Checked,
}

/// Runs executions of `scene` until one fails or the budget is used up.
#[must_use]
pub fn run(scene: &'static Scene, budget: &Budget) -> Outcome {
    let begun = Instant::now();
    let running = Rc::new(Cell::new(budget.seed));
    let tally = Arc::new(Mutex::new(Tally::default()));
    let ended = catch_unwind(AssertUnwindSafe(|| {
        let mut setup = Setup::new(&scene.shape);
        (scene.prepare)(&mut setup);
        let start = setup.finish();
        let seeds = Seeds::new(
            budget.seed,
            budget.iterations,
            scene.usual,
            budget.sweep.is_some(),
            Rc::clone(&running),
        );
        let mut config = Config::new();
        config.stack_size = STACK;
        config.failure_persistence = FailurePersistence::None;
        config.silence_warnings = true;
        config.max_steps = MaxSteps::FailAfter(200_000 + 100 * scene.usual as usize);
        config.max_time = budget.time;
        let (seed, counts) = (Arc::new(Mutex::new(budget.seed)), Arc::clone(&tally));
        let sweep = budget.sweep;
        Runner::new(seeds, config).run(move || {
            let seed = {
                let mut next = seed.lock();
                *next += 1;
                *next - 1
            };
            execute(scene, &start, sweep.unwrap_or(seed), &counts);
        });
    }));
    points::end();
    let tally = std::mem::take(&mut *tally.lock());
    Outcome {
        executions: tally.executions,
        points: tally.points,
        points_max: tally.points_max,
        checked: tally.checked,
        time: begun.elapsed(),
        failure: ended.err().map(|payload| (running.get(), text_of(&*payload))),
    }
}

/// One execution.
fn execute(scene: &Scene, start: &Start, seed: u64, tally: &Mutex<Tally>) {
    points::end();
    let stage = Stage::open(start, seed, scene.is_damaged, scene.is_uncached);
    points::begin();
    stage.plan(scene.crashes, scene.looks, scene.usual);
    let worker = stage.start_worker();
    (scene.play)(&stage);
    stage.wait();
    stage.end(worker);
    let points = points::end();
    let checked = match scene.ending {
        Ending::Rest => stage.check_rest(),
        Ending::Damage => stage.check_damage(),
        Ending::Stopped => stage.check_stopped(),
    };
    let mut tally = tally.lock();
    tally.executions += 1;
    tally.points += points;
    tally.points_max = tally.points_max.max(points);
    for (kind, count) in checked {
        *tally.checked.entry(kind).or_default() += count;
    }
}

fn text_of(payload: &(dyn std::any::Any + Send)) -> String {
    match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => String::from("a panic without text"),
    }
}
