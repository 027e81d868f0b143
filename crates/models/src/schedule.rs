//! The scheduler. One seed is one execution: it chooses a scheduling policy, and then every step.
//!
//! There are several policies, because each finds bugs that the others rarely find. Uniform choice finds races with wide windows.
//! A policy that stays with one thread for a long time finds bugs that need many steps of another thread in between (a segment is
//! reclaimed and reused during a fill). Priorities that change at few moments (probabilistic concurrency testing: Burckhardt et
//! al., ASPLOS 2010) find a race of depth d with a probability that falls only polynomially with the number of steps. A sweep is
//! exhaustive: it plays every schedule in which one thread is interrupted once at a step at which it could have continued.
//!
//! Invariants: a thread that spins does not prevent the other threads from running.

use crate::points;
use cbd_sim::Seeded;
use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

enum Policy {
    /// The same thread continues unless another one is chosen, with a probability of `permille` in a
    /// thousand.
    Switch { permille: u64 },
    /// Each thread continues for as long as it can, in the order of the thread numbers or in the reverse order. At one step
    /// another thread is chosen.
    Once { backwards: bool, at: u64, other: usize },
    /// The thread with the highest priority continues; at these steps the running thread gets the lowest one.
    Priorities { of: BTreeMap<usize, u64>, lowest: u64, changes: Vec<u64> },
}

/// The scheduler of a scene.
pub(crate) struct Seeds {
    next: u64,
    left: u64,
    /// Number of steps of a usual execution.
    usual: u64,
    step: u64,
    random: Seeded,
    policy: Policy,
    /// The seed of the present execution.
    running: Rc<Cell<u64>>,
    /// In a sweep, which plays all schedules of [`Policy::Once`] one after the other: the number of steps of the longest
    /// execution so far.
    sweep: Option<u64>,
}

/// Number of threads among which a sweep chooses.
const OTHERS: u64 = 4;

impl Seeds {
    pub(crate) fn new(first: u64, iterations: u64, usual: u64, sweep: bool, running: Rc<Cell<u64>>) -> Self {
        Self {
            next: first,
            left: iterations,
            usual,
            step: 0,
            random: Seeded::new(first),
            policy: Policy::Switch { permille: 1000 },
            running,
            sweep: sweep.then_some(0),
        }
    }

    fn choose_policy(&mut self, number: u64) -> Policy {
        if self.sweep.is_some() {
            let (at, rest) = (number / (2 * OTHERS), number % (2 * OTHERS));
            return Policy::Once { backwards: rest.is_multiple_of(2), at, other: (rest / 2) as usize };
        }
        let random = &mut self.random;
        match random.below(4) {
            0 => Policy::Switch { permille: 1000 },
            1 => Policy::Switch { permille: *random.pick(&[10, 30, 100, 300]) },
            _ => {
                let depth = random.below(5);
                let changes = (0..depth).map(|_| random.below(self.usual)).collect();
                Policy::Priorities { of: BTreeMap::new(), lowest: 1 << 32, changes }
            }
        }
    }
}

impl Scheduler for Seeds {
    fn new_execution(&mut self) -> Option<Schedule> {
        self.left = self.left.checked_sub(1)?;
        if let Some(longest) = &mut self.sweep {
            *longest = self.step.max(*longest);
            // The first executions give the number of steps of the later ones.
            if self.next >= 2 * OTHERS && *longest > 0 && self.next / (2 * OTHERS) > *longest {
                return None;
            }
        }
        self.running.set(self.next);
        self.random = Seeded::new(self.next ^ 0x7363_6865_6475_6c65);
        self.next += 1;
        self.step = 0;
        self.policy = self.choose_policy(self.running.get());
        Some(Schedule::new(self.running.get()))
    }

    fn next_task(&mut self, runnable: &[&Task], current: Option<TaskId>, _: bool) -> Option<TaskId> {
        self.step += 1;
        let spins = points::spins();
        let current = current.filter(|current| runnable.iter().any(|task| task.id() == *current));
        let random = &mut self.random;
        match &mut self.policy {
            Policy::Switch { permille } => {
                if let Some(current) = current
                    && !spins
                    && !random.chance(*permille)
                {
                    return Some(current);
                }
                let others: Vec<TaskId> = runnable
                    .iter()
                    .map(|task| task.id())
                    .filter(|id| !spins || Some(*id) != current || runnable.len() == 1)
                    .collect();
                Some(*random.pick(&others))
            }
            Policy::Once { backwards, at, other } => {
                let mut others: Vec<TaskId> =
                    runnable.iter().map(|task| task.id()).filter(|id| Some(*id) != current).collect();
                if *backwards {
                    others.reverse();
                }
                match current {
                    _ if self.step == *at && !others.is_empty() => Some(others[*other % others.len()]),
                    Some(current) if !spins || others.is_empty() => Some(current),
                    // A thread that spins yields to the next one in order, so that all others run, too.
                    Some(current) => others
                        .iter()
                        .find(|id| (usize::from(**id) > usize::from(current)) != *backwards)
                        .or_else(|| others.first())
                        .copied(),
                    None => others.first().copied(),
                }
            }
            Policy::Priorities { of, lowest, changes } => {
                for task in runnable {
                    of.entry(task.id().into()).or_insert_with(|| (1 << 33) + random.below(1 << 20));
                }
                if let Some(current) = current
                    && (spins || changes.contains(&self.step))
                {
                    *lowest -= 1;
                    of.insert(current.into(), *lowest);
                }
                runnable.iter().map(|task| task.id()).max_by_key(|id| of.get(&usize::from(*id)).copied())
            }
        }
    }

    fn next_u64(&mut self) -> u64 {
        self.random.next()
    }
}
