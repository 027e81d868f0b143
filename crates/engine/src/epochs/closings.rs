//! The times at which epochs were closed; they date the recovery point.
//!
//! Invariants: for each entry, nothing that completed before its time is of a later epoch than its own. So the time is also a
//! lower bound for each later epoch, and entries can be dropped: the remaining ones are less precise, but not wrong. The times
//! are those of the wall clock: when it is set back, entries with a later time are lowered.
//!
//! Elsewhere: reading the clock before the epoch is closed (`Epochs::raise`).

use alloc::vec::Vec;

/// Most entries. Beyond this number some are dropped, so that the dates of a backlog of hours still have an error of a few
/// hundredths of it.
const KNOWN_MAX: usize = 256;

/// Entries in ascending order of their epochs, and of their times.
pub(super) struct Closings {
    known: Vec<(u64, u64)>,
}

impl Closings {
    pub(super) fn new() -> Self {
        // The final capacity: flushes allocate nothing.
        Self { known: Vec::with_capacity(KNOWN_MAX + 1) }
    }

    /// Adds an entry: nothing that completed before `wall_ms` is of a later epoch than `epoch`.
    pub(super) fn note(&mut self, epoch: u64, wall_ms: u64) {
        match self.known.last().copied() {
            // Another flush that closed a later epoch came first.
            Some((last, _)) if epoch <= last => return,
            Some((_, last_ms)) if wall_ms < last_ms => {
                self.set_back(wall_ms);
            }
            _ => {}
        }
        // Of two entries with the same time the earlier epoch is more precise.
        if self.known.last().is_none_or(|(_, last_ms)| *last_ms < wall_ms) {
            self.known.push((epoch, wall_ms));
        }
        if self.known.len() > KNOWN_MAX {
            self.thin_out();
        }
    }

    /// Drops about half of the entries, so that the remaining ones are about equally spaced in time.
    fn thin_out(&mut self) {
        let (Some((_, first_ms)), Some((_, last_ms))) = (self.known.first(), self.known.last()) else {
            return;
        };
        let space_ms = (last_ms - first_ms) / (KNOWN_MAX as u64 / 4) + 1;
        let mut kept = 0;
        for number in 1..self.known.len() {
            // Each remaining entry is the last one within `space_ms` of the one before it.
            let next_ms = self.known.get(number + 1).map(|(_, next_ms)| *next_ms);
            if next_ms.is_none_or(|next_ms| next_ms > self.known[kept].1 + space_ms) {
                kept += 1;
                self.known[kept] = self.known[number];
            }
        }
        self.known.truncate(kept + 1);
    }

    /// The clock was set back to `wall_ms`: writes that complete from now on must not be dated before existing entries.
    fn set_back(&mut self, wall_ms: u64) {
        for (_, known_ms) in &mut self.known {
            *known_ms = (*known_ms).min(wall_ms);
        }
        self.known.dedup_by_key(|(_, known_ms)| *known_ms);
    }

    /// The latest time that is known for `epoch`. No caller passes an earlier epoch afterwards.
    pub(super) fn take(&mut self, epoch: u64) -> Option<u64> {
        let behind = self.known.partition_point(|(known, _)| *known <= epoch);
        let (_, wall_ms) = self.known[..behind].last().copied()?;
        self.known.drain(..behind - 1);
        Some(wall_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn an_epoch_has_the_time_of_the_last_closing_that_is_known_for_it() {
        let mut closings = Closings::new();
        assert_eq!(closings.take(9), None);
        closings.note(3, 100);
        closings.note(5, 200);
        assert_eq!(closings.take(2), None);
        assert_eq!([3, 4, 5, 6].map(|epoch| closings.take(epoch)), [100, 100, 200, 200].map(Some));
    }

    #[test]
    fn a_slow_flush_says_nothing_new() {
        let mut closings = Closings::new();
        closings.note(3, 100);
        closings.note(6, 200);
        closings.note(5, 110);
        assert_eq!(closings.take(5), Some(100));
    }

    #[test]
    fn a_clock_that_was_set_back_sets_back_what_is_known() {
        let mut closings = Closings::new();
        closings.note(3, 100);
        closings.note(4, 200);
        closings.note(5, 50);
        closings.note(6, 60);
        assert_eq!([3, 4, 5, 6].map(|epoch| closings.take(epoch)), [50, 50, 50, 60].map(Some));
    }

    #[test]
    fn however_many_epochs_are_closed_few_are_remembered_and_none_is_dated_too_late() {
        let mut closings = Closings::new();
        for epoch in 1..=100_000 {
            closings.note(epoch, 1000 + epoch);
            assert!(closings.known.len() <= KNOWN_MAX && closings.known.capacity() <= KNOWN_MAX + 1);
        }
        for epoch in (1..=100_000).step_by(997) {
            let dated = closings.take(epoch).expect("the first is kept");
            assert!(dated <= 1000 + epoch, "epoch {epoch} is dated {dated}");
            assert!(dated + 2500 > 1000 + epoch, "epoch {epoch} is dated {dated}");
        }
        assert_eq!(closings.take(100_000), Some(101_000));
    }

    #[test]
    fn of_two_closings_at_one_time_the_earlier_epoch_is_known() {
        let mut closings = Closings::new();
        closings.note(3, 100);
        closings.note(4, 100);
        closings.note(5, 100);
        assert_eq!(closings.known, [(3, 100)]);
        closings.note(5, 101);
        closings.note(5, 102);
        assert_eq!(closings.known, [(3, 100), (5, 101)]);
    }

    #[test]
    fn what_was_taken_for_an_epoch_is_kept_and_what_is_earlier_is_dropped() {
        let mut closings = Closings::new();
        [(3, 100), (5, 200), (8, 300)].into_iter().for_each(|(epoch, at)| closings.note(epoch, at));
        assert_eq!(closings.take(6), Some(200));
        assert_eq!(closings.known, [(5, 200), (8, 300)]);
        assert_eq!(closings.take(8), Some(300));
        assert_eq!(closings.known, [(8, 300)]);
    }

    #[test]
    fn of_entries_that_are_later_than_a_clock_that_was_set_back_the_earliest_stays() {
        let mut closings = Closings::new();
        for (epoch, at) in [(3, 100), (4, 200), (5, 300), (6, 200)] {
            closings.note(epoch, at);
        }
        assert_eq!(closings.known, [(3, 100), (4, 200)]);
        closings.note(7, 200);
        assert_eq!(closings.known, [(3, 100), (4, 200)]);
        closings.note(8, 201);
        assert_eq!(closings.known, [(3, 100), (4, 200), (8, 201)]);
    }

    #[test]
    fn entries_are_dropped_only_beyond_the_limit_and_those_left_are_equally_far_apart() {
        let mut closings = Closings::new();
        (1..=KNOWN_MAX as u64).for_each(|epoch| closings.note(epoch, 10 * epoch));
        assert_eq!(closings.known.len(), KNOWN_MAX);
        closings.note(257, 2570);
        // A sixty-fourth of 2560 ms and one more.
        let times: Vec<u64> = closings.known.iter().map(|(_, at)| *at).collect();
        let expected: Vec<u64> = (0..).map(|number| 10 + 40 * number).take_while(|at| *at <= 2570).collect();
        assert_eq!(times, expected);
        assert!(closings.known.iter().all(|(epoch, at)| epoch * 10 == *at));
    }

    #[test]
    fn the_last_entry_stays_however_close_it_is() {
        let mut closings = Closings::new();
        (1..=KNOWN_MAX as u64).for_each(|epoch| closings.note(epoch, 1000 * epoch));
        closings.note(257, 256_001);
        assert_eq!(closings.known.first(), Some(&(1, 1000)));
        assert_eq!(closings.known.last(), Some(&(257, 256_001)));
    }

    #[test]
    fn each_entry_that_is_left_is_the_last_within_a_sixty_fourth_of_the_time() {
        let mut random = 5_u64;
        for round in 0..50 {
            let mut closings = Closings::new();
            let mut all = Vec::new();
            let mut at = 1000;
            for epoch in 1..=KNOWN_MAX as u64 + 1 {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                // Most are close, some are far apart.
                at += 1 + (random >> 33) % if random >> 60 == 0 { 40_000 } else { 30 + round };
                closings.note(epoch, at);
                all.push(at);
            }
            let space = (all[KNOWN_MAX] - all[0]) / 64 + 1;
            let mut expected = vec![0];
            for number in 1..all.len() {
                let begin = all[expected[expected.len() - 1]];
                if all.get(number + 1).is_none_or(|next| *next > begin + space) {
                    expected.push(number);
                }
            }
            let expected: Vec<_> = expected.iter().map(|number| (*number as u64 + 1, all[*number])).collect();
            assert_eq!(closings.known, expected, "round {round}");
        }
    }
}
