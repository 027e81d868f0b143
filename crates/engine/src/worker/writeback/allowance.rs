//! The rate limit of writeback in bytes per second.
//!
//! Invariants: over any period writeback sends no more than the rate allows, plus what may be saved up and one request. A request
//! larger than the remaining allowance is sent whole, and the excess becomes a debt.

use super::REQUEST_MAX;

/// The longest time until the next check: the rate may change meanwhile.
const CHECK_MAX_MS: u64 = 1000;

/// One byte, in thousandths: a rate of one byte per second earns one thousandth of a byte in a millisecond.
const BYTE: i128 = 1000;

/// The number of bytes that may be sent at this moment.
pub(super) struct Allowance {
    /// In thousandths of a byte, so that no fraction is lost; a debt if negative.
    left: i128,
    since_ms: u64,
    /// What is not sent is saved up for this time, or up to these bytes.
    saved_ms: u64,
    saved_bytes: u64,
}

impl Allowance {
    /// Saves up what a second earns, or a request.
    pub(super) const fn new(now_ms: u64) -> Self {
        Self { left: 0, since_ms: now_ms, saved_ms: 1000, saved_bytes: REQUEST_MAX }
    }

    /// Saves up what a quarter of a second earns, or 64 KiB: the rate is to be smooth.
    pub(super) const fn smooth(now_ms: u64) -> Self {
        Self { left: 0, since_ms: now_ms, saved_ms: 250, saved_bytes: 64 << 10 }
    }

    /// The most that is saved up.
    fn most(&self, rate: u64) -> i128 {
        (i128::from(rate) * i128::from(self.saved_ms)).max(i128::from(self.saved_bytes) * BYTE)
    }

    /// Adds the bytes that a `rate` in bytes per second has earned since the last call; a rate of 0 means no limit.
    pub(super) fn earn(&mut self, rate: u64, now_ms: u64) {
        if rate == 0 {
            (self.left, self.since_ms) = (0, now_ms);
            return;
        }
        let gained = i128::from(rate) * i128::from(now_ms.saturating_sub(self.since_ms));
        self.left = self.left.saturating_add(gained).min(self.most(rate));
        self.since_ms = now_ms;
    }

    pub(super) fn spend(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(i128::from(bytes) * BYTE);
    }

    /// Whether as much is saved up as can be: what was permitted was not sent. With a rate of 0 nothing is saved up.
    pub(super) fn is_saved_up(&self, rate: u64) -> bool {
        rate > 0 && self.left >= self.most(rate)
    }

    /// When to check again; `None` if a request may be sent now.
    pub(super) fn due_ms(&self, rate: u64, now_ms: u64) -> Option<u64> {
        if rate == 0 || self.left > 0 {
            return None;
        }
        let wait = self.left.unsigned_abs() / u128::from(rate) + 1;
        Some(now_ms.saturating_add(u64::try_from(wait).unwrap_or(CHECK_MAX_MS).min(CHECK_MAX_MS)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_requests_take_as_long_as_small_ones() {
        for request in [4096, 1 << 20, REQUEST_MAX] {
            let (rate, total) = (1 << 20, 64 << 20);
            let mut allowance = Allowance::new(0);
            let (mut now, mut sent) = (0, 0);
            while sent < total {
                allowance.earn(rate, now);
                match allowance.due_ms(rate, now) {
                    Some(due) => now = due,
                    None => {
                        allowance.spend(request);
                        sent += request;
                    }
                }
            }
            let expected = (total - request.max(rate)) * 1000 / rate;
            assert!(now >= expected - 1000 && now <= 65_000, "{request} bytes at a time: {now} ms");
        }
    }

    #[test]
    fn a_higher_rate_pays_what_is_owed_and_none_forgives_it() {
        let mut allowance = Allowance::new(0);
        allowance.earn(1, 1000);
        allowance.spend(1 << 20);
        assert_eq!(allowance.due_ms(1, 1000), Some(2000));
        allowance.earn(1 << 20, 3000);
        assert_eq!(allowance.due_ms(1 << 20, 3000), None);
        allowance.spend(1 << 30);
        allowance.earn(0, 3001);
        assert_eq!(allowance.due_ms(0, 3001), None);
        allowance.earn(1000, 4001);
        assert_eq!(allowance.due_ms(1000, 4001), None);
    }

    #[test]
    fn what_is_earned_and_not_sent_is_saved_up_to_a_second_or_a_request() {
        for (rate, most) in [(1000, REQUEST_MAX), (4 * REQUEST_MAX, 4 * REQUEST_MAX)] {
            let mut allowance = Allowance::new(0);
            allowance.earn(rate, 1_000_000_000);
            allowance.spend(most - 1);
            assert_eq!(allowance.due_ms(rate, 1_000_000_000), None, "a byte is left");
            allowance.spend(1);
            assert_eq!(allowance.due_ms(rate, 1_000_000_000), Some(1_000_000_001));
        }
    }

    #[test]
    fn a_smooth_rate_saves_up_a_quarter_of_a_second_or_64_kibibytes() {
        for (rate, most) in [(1000, 64 << 10), (4 * REQUEST_MAX, REQUEST_MAX)] {
            let mut allowance = Allowance::smooth(0);
            allowance.earn(rate, 1_000_000_000);
            assert!(allowance.is_saved_up(rate) && !allowance.is_saved_up(0));
            allowance.spend(most - 1);
            assert_eq!(allowance.due_ms(rate, 1_000_000_000), None, "a byte is left");
            assert!(!allowance.is_saved_up(rate));
            allowance.spend(1);
            assert_eq!(allowance.due_ms(rate, 1_000_000_000), Some(1_000_000_001));
        }
    }

    #[test]
    fn the_next_look_is_when_what_is_owed_has_been_earned() {
        let mut allowance = Allowance::new(500);
        assert_eq!(allowance.due_ms(1000, 500), Some(501));
        allowance.spend(100);
        assert_eq!(allowance.due_ms(1000, 500), Some(601));
        allowance.earn(1000, 600);
        assert_eq!(allowance.due_ms(1000, 600), Some(601), "nothing is left");
        allowance.earn(1000, 601);
        assert_eq!(allowance.due_ms(1000, 601), None);
        allowance.spend(1_000_000);
        assert_eq!(allowance.due_ms(1000, 601), Some(1601), "the rate may change meanwhile");
        allowance.spend(u64::MAX);
        assert_eq!(allowance.due_ms(1, 601), Some(1601), "however long that is");
    }

    #[test]
    fn parts_of_bytes_are_not_lost() {
        let mut allowance = Allowance::new(0);
        allowance.earn(1, 1);
        assert_eq!(allowance.due_ms(1, 1), None, "something is earned");
        (2..=1000).for_each(|now| allowance.earn(1, now));
        assert_eq!(allowance.due_ms(1, 1000), None);
        allowance.spend(1);
        assert_eq!(allowance.due_ms(1, 1000), Some(1001));
    }

    #[test]
    fn a_clock_that_stands_still_earns_nothing() {
        let mut allowance = Allowance::new(1000);
        allowance.earn(1 << 20, 1000);
        allowance.earn(1 << 20, 999);
        assert!(allowance.due_ms(1 << 20, 1000).is_some());
    }
}
