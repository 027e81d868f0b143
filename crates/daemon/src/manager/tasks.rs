//! Tasks that may wait for a disk or a file system indefinitely: each runs on a thread of its own, and the caller waits
//! until a deadline.
//!
//! Invariants: a task that waits delays no other task. If no further thread can be started, a task runs when another
//! one has ended, or on the caller's thread if none is running.

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

/// What a task waits for at this moment, in words.
#[derive(Clone, Debug)]
pub(super) struct Stage(Arc<Mutex<&'static str>>);

impl Stage {
    /// A stage that is not reported.
    pub fn nowhere() -> Self {
        Self(Arc::new(Mutex::new("")))
    }

    /// Records that the task may wait for `what` from here on.
    pub fn set(&self, what: &'static str) {
        *self.0.lock() = what;
    }
}

/// The stage of a task that no thread runs.
const NO_THREAD: &str = "no thread could be started for it";

/// Work with a name and a stage.
pub(super) struct Task {
    /// Its object, in words.
    name: String,
    stage: Stage,
    /// None once the task runs.
    work: Arc<Mutex<Option<Work>>>,
}

type Work = Box<dyn FnOnce(&Stage) + Send>;

impl Task {
    pub fn new(name: String, work: impl FnOnce(&Stage) + Send + 'static) -> Self {
        let stage = Stage(Arc::new(Mutex::new(NO_THREAD)));
        Self { name, stage, work: Arc::new(Mutex::new(Some(Box::new(work)))) }
    }

    /// Starts the task on a thread of its own, which sends `number` when it ends. The task is unchanged if no thread
    /// can be started.
    fn spawn(&self, number: usize, sender: &Sender<usize>) -> std::io::Result<()> {
        let (work, stage, sender) = (Arc::clone(&self.work), self.stage.clone(), sender.clone());
        // Before the thread runs and sets a later stage.
        self.stage.set("it has just begun");
        let run = move || {
            let work = work.lock().take();
            if let Some(work) = work {
                work(&stage);
            }
            // The receiver is dropped after the deadline.
            let _ = sender.send(number);
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

/// Runs all tasks in parallel and waits for them until `deadline`. A task that has not ended by then continues on its
/// thread; the result names it and its stage.
pub(super) fn run_until(deadline: Instant, tasks: Vec<Task>) -> Vec<String> {
    let (sender, ended) = channel();
    let mut waiting: VecDeque<(usize, Task)> = tasks.into_iter().enumerate().collect();
    let mut running = BTreeMap::new();
    while !waiting.is_empty() || !running.is_empty() {
        while let Some((number, task)) = waiting.pop_front() {
            match task.spawn(number, &sender) {
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
        match ended.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
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
