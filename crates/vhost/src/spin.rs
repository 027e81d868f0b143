//! How long a ring's thread spins (polls for the next request) before it sleeps.
//!
//! A wake-up costs several times as much as a short request, and spinning occupies a processor. So the time adapts: it
//! doubles, up to a bound, if the bound covers the last wait, and is halved, down to zero, if it does not.
//!
//! Invariants: no thread spins longer than the bound, and the thread of an idle ring sleeps.

use std::time::Duration;

/// A shorter time becomes zero.
const MIN: Duration = Duration::from_micros(2);

/// The adaptive spin time.
#[derive(Debug)]
pub(crate) struct Spin {
    max: Duration,
    window: Duration,
}

impl Spin {
    /// A spin time of at most `max`, which is also its initial value.
    pub(crate) fn new(max: Duration) -> Self {
        Self { max, window: max }
    }

    /// The current spin time.
    pub(crate) fn time(&self) -> Duration {
        self.window
    }

    /// Adapts to a request that arrived after `waited`, whether the thread slept or not.
    pub(crate) fn adapt(&mut self, waited: Duration) {
        if waited <= self.window {
            return;
        }
        self.window = if waited <= self.max {
            (self.window * 2).clamp(MIN.min(self.max), self.max)
        } else {
            let half = self.window / 2;
            if half < MIN { Duration::ZERO } else { half }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_micros(50);

    #[test]
    fn waits_above_the_bound_reduce_the_time_to_zero() {
        let mut spin = Spin::new(MAX);
        for _ in 0..5 {
            assert!(spin.time() > Duration::ZERO);
            spin.adapt(Duration::from_millis(1));
        }
        assert_eq!(spin.time(), Duration::ZERO);
    }

    #[test]
    fn short_waits_raise_the_time_to_its_bound() {
        let mut spin = Spin { max: MAX, window: Duration::ZERO };
        for _ in 0..6 {
            spin.adapt(Duration::from_micros(40));
        }
        assert_eq!(spin.time(), MAX);
        spin.adapt(Duration::from_micros(10));
        assert_eq!(spin.time(), MAX);
    }

    #[test]
    fn a_bound_of_zero_disables_spinning() {
        let mut spin = Spin::new(Duration::ZERO);
        spin.adapt(Duration::ZERO);
        spin.adapt(Duration::from_micros(1));
        assert_eq!(spin.time(), Duration::ZERO);
    }
}
