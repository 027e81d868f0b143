//! The pace of writeback: whether a batch may begin, at which rate its data is written, and why.
//!
//! Invariants:
//! - a requested drain and requests that wait for space are paced by `writeback_rate` alone;
//! - a cache to which nothing is written for [`QUIET_MS`] drains everything;
//! - while data is written, what is dirty is written back after about [`AGE_MS`] even if it is below the target;
//! - with a maximum for the age of the recovery point, what is dirty is written back after about half of it;
//! - only the background worker's thread has this state: a write pays nothing for it.
//!
//! Elsewhere: the order of writeback and its requests (`writeback`).

mod controller;
mod pause;
mod reads;

use crate::{
    Cache, Consistency, Environment, Settings,
    cache::{Pace, PaceReason},
};
pub(super) use controller::averaged;
use controller::{Controller, Interval};
use pause::Pause;
use reads::ReadLimit;

/// A cache to which nothing was written for this time is idle.
pub(super) const QUIET_MS: u64 = 1000;
/// Under load the dirty data below the target is written back at a rate that takes this time for all of it. With `checkpoint` and
/// `none` the next batch begins at the latest after this time.
const AGE_MS: u64 = 60_000;
/// The lowest rate in bytes a second, so that what one request owes is paid in seconds.
const RATE_LEAST: u64 = 64 << 10;
/// The controller takes a step after this time at the earliest.
const INTERVAL_MS: u64 = 100;
/// With `checkpoint` and `none`: a batch that is not urgent is written in about this time, if the backing device can.
const SPREAD_MS: u64 = 10_000;
/// How often a batch that waits for the target is considered.
const CHECK_MS: u64 = 250;
/// Writeback hurries while the dirty data exceeds its target by more than this share of the cache, in percent.
const MARGIN_PERCENT: u64 = 5;
/// What exceeds even that is written in this time, beside what the controller demands.
const HURRY_MS: u64 = 500;
/// The rate that status shows is averaged over this time.
const SHOWN_MS: u64 = 1000;

/// The pace at this moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Decision {
    /// Why.
    pub reason: PaceReason,
    /// Bytes a second that may be written; 0 for no limit. `writeback_rate` applies besides.
    pub rate: u64,
    /// Requests use the whole depth of the queue.
    pub is_deep: bool,
    /// A batch begins at once.
    pub is_urgent: bool,
    /// When the pause is checked again, if writeback is paused.
    pub paused_until_ms: Option<u64>,
}

/// The state that the pace depends on; the background worker's thread owns it.
pub(super) struct Pacer {
    controller: Controller,
    pause: Pause,
    reads: ReadLimit,
    /// Bytes that were ever dirtied, and those that are dirty, when they were last counted.
    dirtied: u64,
    dirty: u64,
    /// More than the target is dirty.
    is_above: bool,
    counted_ms: Option<u64>,
    /// When data was last seen to arrive.
    loaded_ms: u64,
    /// Since when something has waited to be written back: with `strict` since nothing was dirty, otherwise since the last batch.
    waiting_since_ms: Option<u64>,
    /// Since the last step of the controller: its time, and bytes that were dirtied and that were written.
    stepped_ms: u64,
    arrived: u64,
    written: u64,
    /// The backing device has taken less than the pace permitted.
    is_limited: bool,
    /// What is dirty is written back after about this time.
    age_ms: u64,
    /// Bytes a second that were written, smoothed.
    shown: u64,
    decision: Decision,
    published: Pace,
}

impl Pacer {
    pub(super) fn new<E: Environment>(cache: &Cache<E>, now: u64) -> Self {
        let (dirtied, dirty) = cache.dirtied_and_unwritten();
        Self {
            controller: Controller::default(),
            pause: Pause::default(),
            reads: ReadLimit::default(),
            dirtied,
            dirty,
            is_above: false,
            counted_ms: None,
            loaded_ms: now,
            waiting_since_ms: None,
            stepped_ms: now,
            arrived: 0,
            written: 0,
            is_limited: false,
            age_ms: AGE_MS,
            shown: 0,
            decision: Decision {
                reason: PaceReason::Idle,
                rate: 0,
                is_deep: false,
                is_urgent: false,
                paused_until_ms: None,
            },
            published: Pace::default(),
        }
    }

    /// The pace as it was last decided.
    pub(super) const fn decision(&self) -> Decision {
        self.decision
    }

    /// Counts `bytes` that were sent to the backing device.
    pub(super) const fn note_written(&mut self, bytes: u64) {
        self.written = self.written.saturating_add(bytes);
    }

    /// The backing device takes less than the pace permits.
    pub(super) const fn note_limited(&mut self) {
        self.is_limited = true;
    }

    /// A batch ended: what is dirty now may wait for the next one as long as that did.
    pub(super) fn note_batch_end(&mut self, consistency: Consistency) {
        if consistency != Consistency::Strict {
            self.waiting_since_ms = None;
        }
    }

    /// Decides the pace. `must`: why writeback may not wait for anything, if so. `counts`: count the dirty data again, for which
    /// the lanes are locked; otherwise it is counted in intervals.
    pub(super) fn decide<E: Environment>(
        &mut self,
        cache: &Cache<E>,
        must: Option<PaceReason>,
        counts: bool,
        now: u64,
    ) -> Decision {
        let settings = cache.settings();
        let max_ms = cache.pace_board().recovery_point_max_ms();
        self.age_ms = if max_ms == 0 { AGE_MS } else { AGE_MS.min(max_ms / 2).max(1) };
        let is_due = now.saturating_sub(self.stepped_ms) >= INTERVAL_MS;
        if is_due || (counts && self.counted_ms != Some(now)) {
            self.count(cache, now);
        }
        if is_due {
            self.step(cache, &settings, now);
        }
        let paused = self.check_pause(cache, settings.writeback_paused_until_ms, now);
        self.is_above = self.dirty > settings.dirty_target(cache.base().capacity());
        let decision = self.decided(&settings, cache.base().capacity(), must, paused, now);
        self.decision = decision;
        self.publish(cache, self.shown_pace(&settings));
        decision
    }

    /// Writeback rests: nothing is dirty.
    pub(super) fn rest<E: Environment>(&mut self, cache: &Cache<E>, now: u64) {
        self.waiting_since_ms = None;
        let until_wall_ms = cache.settings().writeback_paused_until_ms;
        let is_paused = self.check_pause(cache, until_wall_ms, now).is_some();
        let reason = if is_paused { PaceReason::Paused } else { PaceReason::Idle };
        self.publish(cache, Pace { reason, rate: 0, permitted: None });
    }

    /// When a batch may begin; `None` if it may now. The pace was just decided.
    pub(super) fn begins_at(&mut self, consistency: Consistency, now: u64) -> Option<u64> {
        let since = *self.waiting_since_ms.get_or_insert(now);
        if self.decision.is_urgent {
            return None;
        }
        if self.decision.paused_until_ms.is_some() {
            return self.decision.paused_until_ms;
        }
        let (quiet, delayed) = (self.loaded_ms.max(since) + QUIET_MS, since + QUIET_MS);
        let due = if consistency == Consistency::Strict { delayed } else { since + AGE_MS };
        if now >= quiet || now >= due || self.is_above {
            return None;
        }
        let check = if consistency == Consistency::Strict { due } else { now + CHECK_MS };
        Some(quiet.min(due).min(check))
    }

    fn count<E: Environment>(&mut self, cache: &Cache<E>, now: u64) {
        let (dirtied, dirty) = cache.dirtied_and_unwritten();
        let arrived = dirtied.saturating_sub(self.dirtied);
        self.arrived = self.arrived.saturating_add(arrived);
        if arrived > 0 {
            if now >= self.loaded_ms + QUIET_MS {
                self.controller.begin_load();
            }
            self.loaded_ms = now;
        }
        (self.dirtied, self.dirty, self.counted_ms) = (dirtied, dirty, Some(now));
    }

    fn step<E: Environment>(&mut self, cache: &Cache<E>, settings: &Settings, now: u64) {
        let ms = now.saturating_sub(self.stepped_ms);
        let least = self.least();
        let written_rate = averaged(0, self.written, ms, 0);
        self.shown = averaged(self.shown, self.written, ms, SHOWN_MS);
        let target_us = u64::from(settings.read_latency_target_us);
        self.reads.step(cache.pace_board().reads(), target_us, written_rate, least);
        let limit = if settings.writeback_rate == 0 { u64::MAX } else { settings.writeback_rate };
        self.controller.step(Interval {
            ms,
            dirtied: self.arrived,
            error: signed(self.dirty) - signed(settings.dirty_target(cache.base().capacity())),
            least,
            most: limit.min(self.reads.most()),
            is_limited: self.is_limited,
        });
        (self.stepped_ms, self.arrived, self.written, self.is_limited) = (now, 0, 0, false);
    }

    /// The lowest rate: it bounds the age of what is dirty.
    fn least(&self) -> u64 {
        (self.dirty.saturating_mul(1000) / self.age_ms).max(RATE_LEAST)
    }

    fn decided(
        &self,
        settings: &Settings,
        capacity: u64,
        must: Option<PaceReason>,
        paused: Option<u64>,
        now: u64,
    ) -> Decision {
        let whole =
            |reason| Decision { reason, rate: 0, is_deep: true, is_urgent: true, paused_until_ms: None };
        if let Some(reason) = must {
            return whole(reason);
        }
        if paused.is_some() {
            let paced = self.paced(settings, capacity, now);
            return Decision {
                reason: PaceReason::Paused,
                is_urgent: false,
                paused_until_ms: paused,
                ..paced
            };
        }
        self.paced(settings, capacity, now)
    }

    /// The pace if nothing is urgent and there is no pause.
    fn paced(&self, settings: &Settings, capacity: u64, now: u64) -> Decision {
        let target = settings.dirty_target(capacity);
        let excess = self.dirty.saturating_sub(target + capacity / 100 * MARGIN_PERCENT);
        let hurries = excess > 0 || target == 0;
        let is_strict = settings.consistency == Consistency::Strict;
        let (reason, rate) = if target == 0 {
            (PaceReason::CatchingUp, 0)
        } else if now >= self.loaded_ms + QUIET_MS {
            (PaceReason::Idle, 0)
        } else if hurries && !is_strict {
            (PaceReason::CatchingUp, 0)
        } else if is_strict {
            let (rate, least) = (self.controller.rate(), self.least());
            let more = excess.saturating_mul(1000) / HURRY_MS;
            let reason = if hurries { PaceReason::CatchingUp } else { self.steady(rate > least) };
            (reason, rate.max(least).saturating_add(more))
        } else {
            let rate = self.controller.load().saturating_mul(2).max(self.dirty / (SPREAD_MS / 1000));
            (self.steady(false), rate.max(RATE_LEAST))
        };
        let is_deep = self.is_above;
        let most = self.reads.most();
        if most < u64::MAX && (rate == 0 || rate > most) {
            let (reason, rate) = (PaceReason::YieldingToReads, most.max(1));
            return Decision { reason, rate, is_deep: false, is_urgent: false, paused_until_ms: None };
        }
        let is_urgent = hurries && reason == PaceReason::CatchingUp;
        Decision { reason, rate, is_deep, is_urgent, paused_until_ms: None }
    }

    /// The reason of a pace that neither hurries nor rests.
    const fn steady(&self, is_above_least: bool) -> PaceReason {
        if self.is_above || is_above_least {
            PaceReason::HoldingTarget
        } else if self.age_ms < AGE_MS {
            PaceReason::RecoveryPoint
        } else {
            PaceReason::BelowTarget
        }
    }

    /// Whether writeback is paused.
    pub(super) fn is_paused<E: Environment>(&mut self, cache: &Cache<E>, now: u64) -> bool {
        self.pause_ends_at(cache, now).is_some()
    }

    /// When to check the pause of writeback again, if there is one.
    pub(super) fn pause_ends_at<E: Environment>(&mut self, cache: &Cache<E>, now: u64) -> Option<u64> {
        self.check_pause(cache, cache.settings().writeback_paused_until_ms, now)
    }

    /// When the pause is checked again, if writeback is paused.
    fn check_pause<E: Environment>(&mut self, cache: &Cache<E>, until_wall_ms: u64, now: u64) -> Option<u64> {
        // No clock is read if there is no pause.
        let wall_ms = if until_wall_ms == 0 { 0 } else { cache.base().environment().wall_ms() };
        self.pause.check(until_wall_ms, wall_ms, now)
    }

    /// The decided pace as status shows it.
    fn shown_pace(&self, settings: &Settings) -> Pace {
        let Decision { reason, rate, .. } = self.decision;
        let limit = settings.writeback_rate;
        let is_limited = limit > 0 && (rate == 0 || limit < rate);
        let yields_to_limit = matches!(
            reason,
            PaceReason::HoldingTarget
                | PaceReason::CatchingUp
                | PaceReason::BelowTarget
                | PaceReason::RecoveryPoint
                | PaceReason::Idle
        );
        let reason = if is_limited && yields_to_limit { PaceReason::LimitedByRate } else { reason };
        let permitted = match (reason, rate, limit) {
            (PaceReason::Paused, ..) => Some(0),
            (_, 0, 0) => None,
            (_, 0, rate) | (_, rate, 0) => Some(rate),
            (_, rate, limit) => Some(rate.min(limit)),
        };
        Pace { reason, rate: self.shown, permitted }
    }

    fn publish<E: Environment>(&mut self, cache: &Cache<E>, pace: Pace) {
        if self.published != pace {
            self.published = pace;
            cache.pace_board().publish(pace);
        }
    }
}

/// Whether far more is dirty than the target: writeback hurries. Locks the lanes.
pub(super) fn is_far_above_target<E: Environment>(cache: &Cache<E>) -> bool {
    let capacity = cache.base().capacity();
    cache.unwritten_bytes() > cache.settings().dirty_target(capacity) + capacity / 100 * MARGIN_PERCENT
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
