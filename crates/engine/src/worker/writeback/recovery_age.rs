//! The age of the recovery point, and the promise that it does not exceed a maximum.
//!
//! Invariants:
//! - the age is that of the oldest write that the backing device may lack, or more: it is never too low by more than
//!   the time until the worker runs after a write;
//! - while nothing is dirty there is no age;
//! - with a maximum, no epoch stays open for longer than a quarter of it while something is dirty, and from half of it
//!   on writeback hurries. It still obeys a pause and `writeback_rate`.
//!
//! Ages are those of the monotonic clock: the wall clock dates epochs ([`crate::epochs`]), and is read when one is
//! drained.

use crate::{Cache, Environment};

/// The age of the recovery point; the background worker's thread owns it.
pub(super) struct RecoveryAge {
    /// Since when the backing device may lack a write, by the monotonic clock; before the clock began, if it is
    /// negative.
    since_ms: Option<i64>,
    /// The recovery point at which `since_ms` was determined, by the wall clock.
    dated_ms: u64,
    /// The open epoch, and since when it is open, as the worker has seen it.
    epoch: u64,
    opened_ms: u64,
    /// Nothing has been looked at yet: what is dirty was left by a predecessor.
    is_first: bool,
}

impl RecoveryAge {
    pub(super) const fn new() -> Self {
        Self { since_ms: None, dated_ms: 0, epoch: 0, opened_ms: 0, is_first: true }
    }

    /// Takes over whether something is dirty, and which epochs have been drained.
    pub(super) fn update<E: Environment>(&mut self, cache: &Cache<E>, is_dirty: bool, now: u64) {
        let (before, dated_ms) = (self.since_ms, cache.base().epochs().dated_ms());
        self.since_ms = match before {
            _ if !is_dirty => None,
            Some(since) if dated_ms == self.dated_ms => Some(since),
            None if !self.is_first => Some(signed(now)),
            _ if dated_ms == 0 => Some(before.unwrap_or(signed(now))),
            // What completed before that time is on the backing device.
            _ => {
                let age_ms = cache.base().environment().wall_ms().saturating_sub(dated_ms);
                let since = signed(now) - signed(age_ms);
                Some(before.map_or(since, |before| before.max(since)))
            }
        };
        if before.is_none() && is_dirty {
            self.opened_ms = now;
        }
        (self.dated_ms, self.is_first) = (dated_ms, false);
        if self.since_ms != before {
            cache.pace_board().publish_recovery_point(self.since_ms);
        }
    }

    /// Closes the open epoch if it has been open for a quarter of the maximum.
    pub(super) fn close_epoch<E: Environment>(&mut self, cache: &Cache<E>, now: u64) {
        let epoch = cache.base().epochs().present();
        if epoch != self.epoch {
            (self.epoch, self.opened_ms) = (epoch, now);
        }
        let max_ms = cache.pace_board().recovery_point_max_ms();
        if self.since_ms.is_some() && max_ms > 0 && now >= self.opened_ms + max_ms / 4 {
            cache.close_epoch();
            self.opened_ms = now;
        }
    }

    /// Whether writeback must hurry to keep the age below the maximum.
    pub(super) fn is_due<E: Environment>(&self, cache: &Cache<E>, now: u64) -> bool {
        self.due_ms(cache.pace_board().recovery_point_max_ms()).is_some_and(|due| signed(now) >= due)
    }

    fn due_ms(&self, max_ms: u64) -> Option<i64> {
        self.since_ms.filter(|_| max_ms > 0).map(|since| since + signed(max_ms / 2))
    }

    /// When the worker looks again at the latest: `until`, or before.
    pub(super) fn look_again<E: Environment>(
        &self,
        cache: &Cache<E>,
        until: Option<u64>,
        now: u64,
    ) -> Option<u64> {
        let max_ms = cache.pace_board().recovery_point_max_ms();
        let Some(due) = self.due_ms(max_ms) else { return until };
        // What is due already waits for something that has a time of its own.
        let due = u64::try_from(due).ok().filter(|due| *due > now);
        let closes = Some(self.opened_ms + max_ms / 4).filter(|closes| *closes > now);
        until.into_iter().chain(due).chain(closes).min()
    }
}

fn signed(ms: u64) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}
