//! The limit of writeback in bytes a second.
//!
//! Always true here: over any time no more is sent than the rate allows, but for what one second or one request may be ahead. A
//! request larger than what is left is sent whole, and what it took too much is owed.

use super::REQUEST_MAX;

/// Longest that the next look is put off: the rate may change meanwhile.
const LOOK_MAX_MS: u64 = 1000;

/// Thousandths of a byte: what a rate of one byte a second earns in a millisecond.
const BYTE: i128 = 1000;

/// How much may be sent now.
pub(super) struct Allowance {
    /// In thousandths of a byte, so that no part of what is earned is lost; what is owed where it is negative.
    left: i128,
    since_ms: u64,
}

impl Allowance {
    pub(super) const fn new(now_ms: u64) -> Self {
        Self { left: 0, since_ms: now_ms }
    }

    /// Adds what `rate` bytes a second have earned until now; 0 is no limit.
    pub(super) fn earn(&mut self, rate: u64, now_ms: u64) {
        if rate == 0 {
            *self = Self::new(now_ms);
            return;
        }
        let gained = i128::from(rate) * i128::from(now_ms.saturating_sub(self.since_ms));
        // A second's worth can be saved up, or a request.
        let most = i128::from(rate.max(REQUEST_MAX)) * BYTE;
        self.left = self.left.saturating_add(gained).min(most);
        self.since_ms = now_ms;
    }

    pub(super) fn spend(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(i128::from(bytes) * BYTE);
    }

    /// When to look again; `None` where something may be sent now.
    pub(super) fn due_ms(&self, rate: u64, now_ms: u64) -> Option<u64> {
        if rate == 0 || self.left > 0 {
            return None;
        }
        let wait = self.left.unsigned_abs() / u128::from(rate) + 1;
        Some(now_ms.saturating_add(u64::try_from(wait).unwrap_or(LOOK_MAX_MS).min(LOOK_MAX_MS)))
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
    }

    #[test]
    fn parts_of_bytes_are_not_lost() {
        let mut allowance = Allowance::new(0);
        (1..=1000).for_each(|now| allowance.earn(1, now));
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
