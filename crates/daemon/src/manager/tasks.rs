//! Work that may wait for a disk or a file system without end: each piece on a thread of its own, waited for until a deadline.
//!
//! Invariants: a piece that waits delays no other; where the system starts no further thread, a piece runs when another one has
//! ended, and on the caller's thread when none is left to wait for.

use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// How often [`poll_until`] checks.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Polls until `done` holds, for something that has no condition to wait on. False if it does not hold at `end`.
pub(super) fn poll_until(end: Instant, done: impl Fn() -> bool) -> bool {
    while !done() {
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    true
}

/// What a piece of work waits for at the moment, in words.
#[derive(Clone, Debug)]
pub(super) struct Stage(Arc<Mutex<&'static str>>);

impl Stage {
    /// One that is not shown.
    pub fn nowhere() -> Self {
        Self(Arc::new(Mutex::new("")))
    }

    /// From here on the work may wait for `what`.
    pub fn set(&self, what: &'static str) {
        *self.0.lock() = what;
    }
}

/// The stage of work that no thread runs.
const NO_THREAD: &str = "no thread could be started for it";

/// A piece of work.
pub(super) struct Task {
    /// What it is about, in words.
    name: String,
    stage: Stage,
    /// None once it runs.
    work: Arc<Mutex<Option<Work>>>,
}

type Work = Box<dyn FnOnce(&Stage) + Send>;

impl Task {
    pub fn new(name: String, work: impl FnOnce(&Stage) + Send + 'static) -> Self {
        let stage = Stage(Arc::new(Mutex::new(NO_THREAD)));
        Self { name, stage, work: Arc::new(Mutex::new(Some(Box::new(work)))) }
    }

    /// Starts it on a thread of its own, which tells `number` at the end. A task that no thread could be started for stays as it is.
    fn spawn(&self, number: usize, tell: &Sender<usize>) -> std::io::Result<()> {
        let (work, stage, tell) = (Arc::clone(&self.work), self.stage.clone(), tell.clone());
        // Before the thread runs, which says more.
        self.stage.set("it has just begun");
        let run = move || {
            let work = work.lock().take();
            if let Some(work) = work {
                work(&stage);
            }
            // After the deadline there is no receiver.
            let _ = tell.send(number);
        };
        let spawned = std::thread::Builder::new().name("cbd-task".to_owned()).spawn(run);
        spawned.map(drop).inspect_err(|_| self.stage.set(NO_THREAD))
    }

    fn run_here(&self) {
        let work = self.work.lock().take();
        if let Some(work) = work {
            work(&self.stage);
        }
    }

    fn words(&self) -> String {
        format!("{}: {}", self.name, *self.stage.0.lock())
    }
}

/// Runs all tasks at once, and waits for them until `deadline`. What has not ended by then continues on its own; the result names it, and
/// what it waits for.
pub(super) fn run_until(deadline: Instant, tasks: Vec<Task>) -> Vec<String> {
    let (tell, told) = channel();
    let mut waiting: VecDeque<(usize, Task)> = tasks.into_iter().enumerate().collect();
    let mut running = BTreeMap::new();
    while !waiting.is_empty() || !running.is_empty() {
        while let Some((number, task)) = waiting.pop_front() {
            match task.spawn(number, &tell) {
                Ok(()) => drop(running.insert(number, task)),
                Err(error) if running.is_empty() => {
                    tracing::warn!("no thread can be started ({error}): {} continues without one", task.name);
                    task.run_here();
                }
                Err(_) => {
                    waiting.push_front((number, task));
                    break;
                }
            }
        }
        if running.is_empty() {
            continue;
        }
        match told.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(number) => drop(running.remove(&number)),
            Err(_) => break,
        }
    }
    running.into_values().chain(waiting.into_iter().map(|(_, task)| task)).map(|task| task.words()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_task_that_waits_delays_no_other_and_is_named_with_what_it_waits_for() {
        static DONE: AtomicU32 = AtomicU32::new(0);
        let (_end, ended) = channel::<()>();
        let hangs = Task::new("the first".to_owned(), move |stage| {
            stage.set("its disk does not answer");
            let _ = ended.recv();
        });
        let others = (0..3).map(|number| {
            Task::new(format!("task {number}"), |_| {
                DONE.fetch_add(1, Ordering::SeqCst);
            })
        });
        let tasks = std::iter::once(hangs).chain(others).collect();
        let late = run_until(Instant::now() + Duration::from_secs(2), tasks);
        assert_eq!(late, ["the first: its disk does not answer"]);
        assert_eq!(DONE.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn tasks_that_all_end_are_not_waited_for_until_the_deadline() {
        let begun = Instant::now();
        let tasks = (0..3).map(|number| Task::new(format!("task {number}"), |_| ())).collect();
        assert_eq!(run_until(begun + Duration::from_secs(600), tasks), [""; 0]);
        assert!(begun.elapsed() < Duration::from_secs(300));
    }
}
