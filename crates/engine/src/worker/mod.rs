//! The background worker: writeback, reclaim and idle marks of one cache, run by one thread.
//!
//! Invariants: a step does bounded work and never waits; the wait that it returns covers every event that can give it work; a
//! write wakes the worker only from an announced sleep, so while clients flush each write, the clock wakes it.

mod failing;
mod pace;
mod reclaim;
mod writeback;

use crate::{Cache, Environment};
use alloc::{sync::Arc, vec::Vec};
use cbd_types::{BackingGeometry, BackingOp, BackingQueue, MutationPoint};
use reclaim::Reclaim;
pub use writeback::REQUEST_MAX;
use writeback::{Progress, Writeback};

/// Touched lanes are marked this long after the last pass.
const IDLE_MARK_MS: u64 = 1000;
/// While flushes continue, the background worker checks for work after this time, and no write wakes it unless the work is
/// urgent.
const PACE_MS: u64 = 5;
/// Steps of reclaim in one step of the worker.
const RECLAIM_PER_STEP: usize = 16;

/// The condition that the caller of [`BackgroundWorker::step`] waits for before the next step. The cache's worker waker also ends
/// each of these waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// No wait: there is more work.
    Busy,
    /// A completion from the queue to the backing device.
    WaitBacking,
    /// This time of [`Environment::monotonic_ms`], if any.
    Idle {
        /// When the next step is due; `None` if only the waker ends the wait.
        until_ms: Option<u64>,
    },
}

/// Writeback, reclaim and idle marks of one cache.
pub struct BackgroundWorker<E: Environment, Q: BackingQueue> {
    cache: Arc<Cache<E>>,
    queue: Q,
    writeback: Writeback,
    reclaim: Reclaim,
    /// The epochs that a pass had covered when the worker last found no work.
    covered_at_rest: u64,
}

impl<E: Environment, Q: BackingQueue> BackgroundWorker<E, Q> {
    /// The background worker of `cache`, which uses `queue` alone. One for each cache. Writeback begins at the positions that
    /// recovery has set.
    pub fn new(cache: Arc<Cache<E>>, queue: Q, geometry: BackingGeometry) -> Self {
        let cursors = cache.writeback_start();
        let base = cache.base();
        let was_void = !base.epochs().is_crash_consistent();
        let now = base.environment().monotonic_ms();
        let has_lost = cache.lanes().iter().any(|lane| lane.lock().has_lost());
        Self {
            writeback: Writeback::new(geometry, cursors, was_void, has_lost, &cache, now),
            reclaim: Reclaim::default(),
            covered_at_rest: base.epochs().covered(),
            cache,
            queue,
        }
    }

    /// The queue to the backing device, for the caller to wait on.
    pub const fn queue(&self) -> &Q {
        &self.queue
    }

    /// As if the backing device had shown that it is fast.
    #[cfg(test)]
    pub(crate) fn assume_a_fast_disk(&mut self) {
        self.writeback.assume_a_fast_disk();
    }

    /// Does the work that is due, in bounded time and without waiting.
    pub fn step(&mut self) -> Step {
        let cache = &*self.cache;
        let has_failed =
            cache.base().region().check_stores(MutationPoint::BackgroundWorkerStoreCheck).is_err();
        if has_failed || cache.is_abandoned() {
            // No store since then can be relied on, least of all a new tail or a new drained epoch; and the process that opens an
            // abandoned cache next may do so while this one still runs. Requests that wait for the backing device learn it.
            cache.wake_waiting_for_drained();
            return Step::Idle { until_ms: None };
        }
        let covered = cache.base().epochs().covered();
        let mut reclaimed = false;
        for _ in 0..RECLAIM_PER_STEP {
            if !self.reclaim.step(cache) {
                break;
            }
            reclaimed = true;
        }
        let progress = self.writeback.step(cache, &mut self.queue, reclaimed);
        if reclaimed {
            return Step::Busy;
        }
        match progress {
            Progress::Busy => Step::Busy,
            Progress::InFlight => Step::WaitBacking,
            Progress::Nothing(until) => self.rest(covered, until),
        }
    }

    /// Writeback has no work before `until`, if it is given. `covered`: the epochs that a pass had covered when the step began.
    fn rest(&mut self, covered: u64, until: Option<u64>) -> Step {
        let cache = &*self.cache;
        // Data that writeback has just made clean can be reclaimed now: no other event would wake the worker for it.
        if self.reclaim.step(cache) {
            return Step::Busy;
        }
        let now = cache.base().environment().monotonic_ms();
        let mark = match cache.unmarked_for_ms(now) {
            Some(idle) if idle >= IDLE_MARK_MS => {
                cache.close_epoch();
                None
            }
            Some(idle) => Some(now + IDLE_MARK_MS - idle),
            None => None,
        };
        let until_ms = match (until, mark) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        if mark.is_some() {
            return Step::Idle { until_ms };
        }
        if core::mem::replace(&mut self.covered_at_rest, covered) != covered {
            // A pass has cleared the lanes since the last rest, so the next write would wake the worker, and so would the write
            // after the next pass. Urgent work wakes the worker in any case; other work waits for the clock until a whole pause
            // ends without a pass.
            let pause = now + PACE_MS;
            return Step::Idle { until_ms: Some(until_ms.map_or(pause, |until| until.min(pause))) };
        }
        // Announce the sleep, even if it lasts only until a retry of parked ranges is due, which may be minutes. Then check for
        // work again. A write in between has seen the announcement, or its lane is still touched, or a pass has cleared the lane
        // since this step began.
        cache.base().wakeups().announce_sleep();
        let has_changed = cache.unmarked_for_ms(now).is_some() || cache.base().epochs().covered() != covered;
        if has_changed {
            return Step::Busy;
        }
        Step::Idle { until_ms }
    }
}

impl<E: Environment, Q: BackingQueue> Drop for BackgroundWorker<E, Q> {
    /// Waits for the operations in flight. A flush of the backing device that fails now is noted too: whoever goes on without this
    /// cache must learn that changes that went past it may be lost.
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.queue.in_flight() > 0 {
            let before = done.len();
            self.queue.wait(&mut done);
            if done.len() == before {
                // The queue is that of a device that is gone.
                break;
            }
        }
        if done.iter().any(|done| matches!(done.op, BackingOp::Flush) && done.result.is_err()) {
            self.cache.backing_flush_failed();
        }
    }
}

#[cfg(test)]
mod tests;
