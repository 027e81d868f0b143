//! The pause of writeback, which ends by the wall clock.
//!
//! Invariants: a pause lasts at most seven days from when it was first seen, and no longer than was left of it then, whatever
//! the wall clock is set to.

/// The longest pause in milliseconds: seven days.
const LONGEST_MS: u64 = 7 * 86_400_000;
/// A pause is checked after this time, since the wall clock may be set.
const CHECK_MS: u64 = 60_000;

/// The pause that the settings ask for.
#[derive(Default, Debug)]
pub(super) struct Pause {
    /// The end by the wall clock, as in the settings.
    until_wall_ms: u64,
    /// The end by the monotonic clock.
    until_ms: u64,
}

impl Pause {
    /// Notes the setting. Returns when to check again, if writeback is paused.
    pub(super) fn check(&mut self, until_wall_ms: u64, wall_ms: u64, now: u64) -> Option<u64> {
        let left = until_wall_ms.saturating_sub(wall_ms).min(LONGEST_MS);
        if self.until_wall_ms != until_wall_ms {
            self.until_wall_ms = until_wall_ms;
            self.until_ms = now.saturating_add(left);
        }
        let due = self.until_ms.min(now.saturating_add(left));
        (due > now).then(|| due.min(now.saturating_add(CHECK_MS)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WALL: u64 = 1_780_000_000_000;

    #[test]
    fn a_pause_ends_by_the_wall_clock() {
        let mut pause = Pause::default();
        assert_eq!(pause.check(0, WALL, 5), None);
        assert_eq!(pause.check(WALL + 1000, WALL, 5), Some(1005));
        assert_eq!(pause.check(WALL + 1000, WALL + 999, 1004), Some(1005));
        assert_eq!(pause.check(WALL + 1000, WALL + 1000, 1005), None);
        assert_eq!(pause.check(WALL + 90_000, WALL, 1005), Some(61_005), "it is checked each minute");
        assert_eq!(pause.check(0, WALL, 1006), None, "writeback=on");
    }

    #[test]
    fn a_clock_that_is_set_back_does_not_lengthen_a_pause() {
        let mut pause = Pause::default();
        assert_eq!(pause.check(WALL + 10_000, WALL, 0), Some(10_000));
        assert_eq!(pause.check(WALL + 10_000, WALL - 1_000_000, 9_999), Some(10_000));
        assert_eq!(pause.check(WALL + 10_000, WALL - 1_000_000, 10_000), None);
        assert_eq!(pause.check(WALL + 10_000, 0, u64::MAX), None);
    }

    #[test]
    fn a_clock_that_is_set_forward_ends_a_pause() {
        let mut pause = Pause::default();
        assert_eq!(pause.check(WALL + 10_000, WALL, 0), Some(10_000));
        assert_eq!(pause.check(WALL + 10_000, WALL + 10_000, 1), None);
    }

    #[test]
    fn no_pause_is_longer_than_seven_days() {
        let mut pause = Pause::default();
        for days in 0..7 {
            assert!(pause.check(u64::MAX, 0, days * 86_400_000).is_some(), "day {days}");
        }
        assert_eq!(pause.check(u64::MAX, 0, 7 * 86_400_000), None);
        assert_eq!(pause.check(u64::MAX, 0, 9 * 86_400_000), None);
    }
}
