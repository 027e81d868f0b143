//! How far writeback yields to reads that miss: while they take too long its rate is halved, and otherwise it grows again.
//!
//! Invariants: the limit never falls below the lowest rate of the controller, so the backing device always catches up in the end.

/// The limit grows by this share in each interval without slow reads.
const GROWTH: u64 = 8;

/// The limit that slow reads set.
#[derive(Default, Debug)]
pub(super) struct ReadLimit {
    /// The limit in bytes a second, if there is one.
    limit: Option<u64>,
    /// The rate at which reads became slow: the limit ends at twice as much.
    before: u64,
    /// The number of reads at the last step, and the sum of their microseconds.
    seen: (u64, u64),
}

impl ReadLimit {
    /// The highest rate in bytes a second; `u64::MAX` if there is none.
    pub(super) fn most(&self) -> u64 {
        self.limit.unwrap_or(u64::MAX)
    }

    /// Adapts the limit. `reads`: the number of reads of the backing device and the sum of their microseconds. `target_us`: the
    /// latency above which they are slow, or 0. `rate`: the bytes a second that were written meanwhile. `least`: the lowest limit.
    pub(super) fn step(&mut self, reads: (u64, u64), target_us: u64, rate: u64, least: u64) {
        let (count, us) = (reads.0.saturating_sub(self.seen.0), reads.1.saturating_sub(self.seen.1));
        self.seen = reads;
        if target_us == 0 {
            self.limit = None;
        } else if count > 0 && us / count > target_us {
            let present = self.limit.unwrap_or_else(|| {
                self.before = rate.max(least);
                self.before
            });
            self.limit = Some((present / 2).max(least));
        } else if let Some(limit) = self.limit {
            let more = limit.saturating_add(limit / GROWTH).saturating_add(1).max(least);
            self.limit = (more / 2 < self.before).then_some(more);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn slow_reads_halve_the_rate_down_to_the_least() {
        let mut limit = ReadLimit::default();
        limit.step((1, 2000), 2000, 64 * MIB, MIB);
        assert_eq!(limit.most(), u64::MAX, "as fast as the target");
        let mut reads = (1, 2000);
        for most in [32, 16, 8, 4, 2, 1, 1, 1] {
            reads = (reads.0 + 2, reads.1 + 4002);
            limit.step(reads, 2000, 64 * MIB, MIB);
            assert_eq!(limit.most(), most * MIB);
        }
    }

    #[test]
    fn the_limit_grows_and_ends_when_reads_are_fast_or_there_are_none() {
        for fast in [0, 3] {
            let mut limit = ReadLimit::default();
            limit.step((1, 5000), 2000, 64 * MIB, MIB);
            let mut steps = 0;
            let mut most = limit.most();
            while most < u64::MAX {
                let (count, us) = limit.seen;
                limit.step((count + fast, us + fast * 100), 2000, MIB, MIB);
                assert!(limit.most() > most);
                most = limit.most();
                steps += 1;
            }
            assert!((10..20).contains(&steps), "{steps} steps from a half to twice the rate");
        }
    }

    #[test]
    fn without_a_target_there_is_no_limit() {
        let mut limit = ReadLimit::default();
        limit.step((1, 5000), 2000, MIB, 1);
        limit.step((2, 10_000), 0, MIB, 1);
        assert_eq!(limit.most(), u64::MAX);
    }

    #[test]
    fn a_limit_that_was_zero_grows() {
        let mut limit = ReadLimit::default();
        limit.step((1, 5000), 1, 0, 0);
        assert_eq!(limit.most(), 0);
        limit.step((1, 5000), 1, 0, 0);
        assert_eq!(limit.most(), u64::MAX, "nothing was written before");
    }
}
