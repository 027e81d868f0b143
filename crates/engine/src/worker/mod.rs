//! The background worker: writeback, reclaim and idle marks of one cache, run by one thread.
//!
//! Always true here: a step does bounded work and never waits; what it says it waits for is all that can give it work; a
//! write wakes it only from a sleep of unknown length, so while clients flush each write it is woken by the clock.

mod failing;
mod reclaim;
mod writeback;

use crate::{Cache, Environment};
use alloc::sync::Arc;
use cbd_types::{BackingGeometry, BackingQueue, MutationPoint};
use reclaim::Reclaim;
pub use writeback::REQUEST_MAX;
use writeback::{Progress, Writeback};

/// A lane that was written and then left alone is marked after this time.
const IDLE_MARK_MS: u64 = 1000;
/// While flushes go on, the background worker looks again after this time, and no write wakes it for what is not urgent.
const PACE_MS: u64 = 5;
/// Units of reclaim in one step.
const RECLAIM_PER_STEP: usize = 16;

/// What the caller of [`BackgroundWorker::step`] waits for before the next step. The cache's worker waker ends each of
/// these waits too.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Nothing: there is more to do.
    Busy,
    /// A completion of the queue to the backing device.
    WaitBacking,
    /// This moment of [`Environment::monotonic_ms`], if any.
    Idle {
        /// When the next step is due; `None` when only the waker gives work.
        until_ms: Option<u64>,
    },
}

/// Writeback, reclaim and idle marks of one cache.
pub struct BackgroundWorker<E: Environment, Q: BackingQueue> {
    cache: Arc<Cache<E>>,
    queue: Q,
    writeback: Writeback,
    reclaim: Reclaim,
    /// The epochs that were covered by a pass when it last had nothing to do.
    rested: u64,
}

impl<E: Environment, Q: BackingQueue> BackgroundWorker<E, Q> {
    /// The background worker of `cache`; `queue` is its own. One for each cache: it takes the place where recovery says that
    /// writeback begins.
    pub fn new(cache: Arc<Cache<E>>, queue: Q, geometry: BackingGeometry) -> Self {
        let cursors = cache.writeback_start();
        let base = cache.base();
        let was_void = !base.epochs().is_crash_consistent();
        let now = base.environment().monotonic_ms();
        let has_lost = cache.lanes().iter().any(|lane| lane.lock().has_lost());
        Self {
            writeback: Writeback::new(geometry, cursors, was_void, has_lost, &cache.parked_ranges(), now),
            reclaim: Reclaim::default(),
            rested: base.epochs().covered(),
            cache,
            queue,
        }
    }

    /// The queue to the backing device, to wait on.
    pub const fn queue(&self) -> &Q {
        &self.queue
    }

    /// Does what there is to do, in bounded time and without waiting.
    pub fn step(&mut self) -> Step {
        let cache = &*self.cache;
        if cache.base().region().check_stores(MutationPoint::BackgroundWorkerStoreCheck).is_err() {
            // Nothing that is stored now can be relied on, a new tail or drained least of all.
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

    /// There is nothing to write back before `until`, if ever. `covered`: what a pass had covered when the step began.
    fn rest(&mut self, covered: u64, until: Option<u64>) -> Step {
        let cache = &*self.cache;
        // What writeback has just made clean can be reclaimed now: nobody else would say so.
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
        if core::mem::replace(&mut self.rested, covered) != covered {
            // A pass has cleared the lanes since the last rest, so the next write would wake it, and the next one again. What
            // is urgent wakes it all the same; the rest waits for the clock until a whole pause goes by without a pass.
            let pause = now + PACE_MS;
            return Step::Idle { until_ms: Some(until_ms.map_or(pause, |until| until.min(pause))) };
        }
        // Say that it sleeps, if only until something parked is due, which may be minutes. Then look again. A write that came between has
        // seen that, or its lane is still touched, or a pass has cleared the lane since this step began.
        cache.base().wakeups().announce_sleep();
        let has_changed = cache.unmarked_for_ms(now).is_some() || cache.base().epochs().covered() != covered;
        if has_changed {
            return Step::Busy;
        }
        Step::Idle { until_ms }
    }
}
