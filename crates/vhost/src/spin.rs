//! How long a ring's thread looks for the next request before it sleeps.
//!
//! Being woken costs several times what a short request does, and looking costs a processor. So it looks while that pays:
//! the time doubles, up to a bound, where the last wait would have been covered by the bound, and halves, down to
//! nothing, where it would not.
//!
//! Always true here: nobody looks longer than the bound, and an idle ring costs nothing.

use std::time::Duration;

/// Shorter times are none.
const LEAST: Duration = Duration::from_micros(2);

/// The adaptive time.
#[derive(Debug)]
pub(crate) struct Spin {
    max: Duration,
    window: Duration,
}

impl Spin {
    /// A time of at most `max`; it begins there.
    pub(crate) fn new(max: Duration) -> Self {
        Self { max, window: max }
    }

    /// How long to look now.
    pub(crate) fn window(&self) -> Duration {
        self.window
    }

    /// After a wait of `waited`, in sleep or not, something came.
    pub(crate) fn learn(&mut self, waited: Duration) {
        if waited <= self.window {
            return;
        }
        self.window = if waited <= self.max {
            (self.window * 2).clamp(LEAST.min(self.max), self.max)
        } else {
            let half = self.window / 2;
            if half < LEAST { Duration::ZERO } else { half }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_micros(50);

    #[test]
    fn waits_that_are_too_long_end_in_no_looking_at_all() {
        let mut spin = Spin::new(MAX);
        for _ in 0..5 {
            assert!(spin.window() > Duration::ZERO);
            spin.learn(Duration::from_millis(1));
        }
        assert_eq!(spin.window(), Duration::ZERO);
    }

    #[test]
    fn short_waits_bring_it_back_up_to_its_bound() {
        let mut spin = Spin { max: MAX, window: Duration::ZERO };
        for _ in 0..6 {
            spin.learn(Duration::from_micros(40));
        }
        assert_eq!(spin.window(), MAX);
        spin.learn(Duration::from_micros(10));
        assert_eq!(spin.window(), MAX);
    }

    #[test]
    fn a_bound_of_nothing_stays_nothing() {
        let mut spin = Spin::new(Duration::ZERO);
        spin.learn(Duration::ZERO);
        spin.learn(Duration::from_micros(1));
        assert_eq!(spin.window(), Duration::ZERO);
    }
}
