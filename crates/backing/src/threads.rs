//! Threads that run operations by blocking commands of the device, beside a ring.
//!
//! Invariants: an operation that was submitted is returned once; the number of threads has a bound, and they end when
//! the queue is dropped and their command has ended. The target, and with it the lock, lasts until then.

use crate::job::{Job, Target};
use crate::sync::run_to_end;
use cbd_sys::event::Signal;
use cbd_types::backing::BackingDone;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Most threads of a queue: the commands that a disk executes side by side.
const THREADS_MAX: usize = 8;

/// The threads of one queue; none before the first operation.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    limit: usize,
    started: usize,
    in_flight: usize,
}

struct Shared {
    target: Arc<Target>,
    state: Mutex<State>,
    arrived: Condvar,
    /// Raised while an operation can be returned.
    signal: Signal,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Job>,
    done: Vec<BackingDone>,
    idle: usize,
    is_closed: bool,
}

impl Shared {
    /// A panic cannot leave the lists inconsistent, so poisoning of the lock is ignored.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.state();
        while !state.is_closed {
            let Some(job) = state.waiting.pop_front() else {
                state.idle += 1;
                state = self.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            drop(state);
            let done = run_to_end(job, &self.target);
            state = self.state();
            state.done.push(done);
            self.signal.raise();
        }
    }
}

impl Threads {
    /// No threads yet; at most `depth` later.
    pub fn new(target: Arc<Target>, depth: usize) -> io::Result<Self> {
        let limit = if target.geometry.rotational { 1 } else { depth.clamp(1, THREADS_MAX) };
        let (state, arrived) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { target, state, arrived, signal: Signal::new()? });
        Ok(Self { shared, limit, started: 0, in_flight: 0 })
    }

    /// Readable while an operation can be returned.
    pub fn descriptor(&self) -> RawFd {
        self.shared.signal.as_raw_fd()
    }

    /// Operations submitted and not yet returned.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Runs the job on a thread; on this one if the system has no thread for it.
    pub fn submit(&mut self, job: Job) {
        self.in_flight += 1;
        let mut state = self.shared.state();
        state.waiting.push_back(job);
        if state.waiting.len() > state.idle && self.started < self.limit {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("cbd-verify".to_owned());
            if thread.spawn(move || shared.work()).is_ok() {
                self.started += 1;
            } else if self.started == 0
                && let Some(job) = state.waiting.pop_back()
            {
                drop(state);
                let done = run_to_end(job, &self.shared.target);
                self.shared.state().done.push(done);
                self.shared.signal.raise();
                return;
            }
        }
        drop(state);
        self.shared.arrived.notify_one();
    }

    /// Moves completed operations to `done`.
    pub fn collect(&mut self, done: &mut Vec<BackingDone>) {
        if self.in_flight == 0 {
            return;
        }
        let mut state = self.shared.state();
        if !state.done.is_empty() {
            self.in_flight -= state.done.len();
            done.append(&mut state.done);
            self.shared.signal.clear();
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.is_closed = true;
        state.waiting.clear();
        drop(state);
        self.shared.arrived.notify_all();
    }
}

#[cfg(test)]
mod tests;
