//! The controller that holds the dirty data near its target: proportional and integral, with the rate of the load fed forward.
//!
//! Invariants:
//! - the rate is within its bounds, whatever the clock and the load do;
//! - the integral never grows in a direction in which the rate is at its bound or the backing device takes no more (no wind-up),
//!   and it is never larger than the rate of the load.

/// The rate of the load is averaged over this time, in milliseconds. It decides how smooth the rate is.
const LOAD_MS: u64 = 15_000;
/// A load that has just begun is averaged over the time since then, but at least over this.
const LOAD_LEAST_MS: u64 = 1000;
/// An error of so many bytes changes the rate by that many bytes in this time.
const ERROR_MS: i64 = 15_000;
/// The time in which a constant error moves the integral by as much as the error itself changes the rate. Four times the time
/// above: the rate then approaches its end without swinging over it.
const INTEGRAL_MS: i64 = 4 * ERROR_MS;
/// The longest interval that the integral counts: after a sleep the error was not the present one all the time.
const INTERVAL_MAX_MS: u64 = 1000;
/// The integral may always be so large, in bytes a second, also when the load is smaller.
const INTEGRAL_LEAST: u64 = 1 << 20;

/// What has happened since the last step of the controller.
#[derive(Clone, Copy, Debug)]
pub(super) struct Interval {
    /// Its length in milliseconds.
    pub ms: u64,
    /// Bytes that requests have made dirty.
    pub dirtied: u64,
    /// Bytes that are dirty above the target; negative below it.
    pub error: i64,
    /// The lowest rate, in bytes a second.
    pub least: u64,
    /// The highest rate; `u64::MAX` if there is none.
    pub most: u64,
    /// The backing device has taken less than the rate permitted.
    pub is_limited: bool,
}

/// The state of the controller.
#[derive(Default, Debug)]
pub(super) struct Controller {
    /// Bytes a second that requests make dirty.
    load: u64,
    /// For how long the load is known.
    known_ms: u64,
    /// What past errors add to the rate, in bytes a second.
    integral: i64,
    rate: u64,
}

impl Controller {
    /// The rate, in bytes a second.
    pub(super) const fn rate(&self) -> u64 {
        self.rate
    }

    /// Bytes a second that requests make dirty, averaged.
    pub(super) const fn load(&self) -> u64 {
        self.load
    }

    /// A load begins: the former one says nothing about it.
    pub(super) const fn begin_load(&mut self) {
        self.known_ms = 0;
    }

    /// Computes the rate for the next interval.
    pub(super) fn step(&mut self, interval: Interval) {
        let fade_ms = self.known_ms.clamp(LOAD_LEAST_MS, LOAD_MS);
        self.load = averaged(self.load, interval.dirtied, interval.ms, fade_ms);
        self.known_ms = self.known_ms.saturating_add(interval.ms);
        let by_error = per_second(interval.error, ERROR_MS);
        let wanted = clamped(self.load).saturating_add(by_error).saturating_add(self.integral);
        let (least, most) = (clamped(interval.least), clamped(interval.most.max(interval.least)));
        let is_high = wanted >= most || interval.is_limited;
        let is_low = wanted <= least;
        if !(is_high && interval.error > 0 || is_low && interval.error < 0) {
            let ms = interval.ms.min(INTERVAL_MAX_MS) as i64;
            let bound = clamped(self.load.max(INTEGRAL_LEAST));
            let more = self.integral.saturating_add(by_error.saturating_mul(ms) / INTEGRAL_MS);
            self.integral = more.clamp(-bound, bound);
        }
        self.rate = wanted.clamp(least, most).unsigned_abs();
    }
}

/// `average`, in bytes a second, after `ms` milliseconds in which there were `bytes`; earlier ones fade in `fade_ms`.
pub(in crate::worker) fn averaged(average: u64, bytes: u64, ms: u64, fade_ms: u64) -> u64 {
    if ms == 0 {
        return average;
    }
    let sum = u128::from(average) * u128::from(fade_ms) + u128::from(bytes) * 1000;
    u64::try_from(sum / (u128::from(fade_ms) + u128::from(ms))).unwrap_or(u64::MAX)
}

fn per_second(bytes: i64, ms: i64) -> i64 {
    bytes.saturating_mul(1000) / ms
}

fn clamped(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
