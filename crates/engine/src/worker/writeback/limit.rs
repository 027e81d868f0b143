//! The limit of writeback: the backing device stays at a moment that several caches have in common.
//!
//! Invariants:
//! - while there is a limit, no batch is of a later epoch, and the log behind it is not collected, however full the cache is;
//! - the epoch of the limit is drained as soon as nothing up to it is dirty, also if it has no record of its own;
//! - a limit that is held ends with the pause of writeback, and when something behind it is requested to be drained.
//!
//! Elsewhere: why (`cache::moment`).

use super::{Progress, Writeback};
use crate::{Cache, Environment};

impl Writeback {
    /// The limit, if there is one; lifts it if it was held until now.
    pub(super) fn limit<E: Environment>(&mut self, cache: &Cache<E>, now: u64) -> Option<u64> {
        let epochs = cache.base().epochs();
        let limit = epochs.limit()?;
        let ends = limit.is_held && (epochs.requested() > limit.epoch || !self.pacer.is_paused(cache, now));
        if ends {
            cache.lift_limit(limit);
            return None;
        }
        Some(limit.epoch)
    }

    /// Nothing up to `limit` is dirty. All epochs up to `closed` were closed before the logs were read.
    pub(super) fn reach_limit<E: Environment>(&mut self, cache: &Cache<E>, closed: u64, limit: u64) {
        if closed < limit || cache.drained_epoch().0 >= limit || self.has_lost {
            return;
        }
        self.reach(cache, limit, false);
        cache.wake_waiting_for_drained();
    }

    /// Whatever is dirty is behind the limit; nothing is if `clean_since` is given, the last epoch that was closed then. Who lifts the
    /// limit wakes the worker; the end of a pause is looked for.
    pub(super) fn rest_at_limit<E: Environment>(
        &mut self,
        cache: &Cache<E>,
        clean_since: Option<u64>,
        now: u64,
    ) -> Progress {
        let pause_ends = self.pacer.pause_ends_at(cache, now);
        let Some(closed) = clean_since else {
            self.pacer.rest(cache, now);
            return Progress::Nothing(pause_ends);
        };
        match self.rest(cache, closed, now) {
            Progress::Nothing(until) => Progress::Nothing(until.into_iter().chain(pause_ends).min()),
            progress => progress,
        }
    }
}
