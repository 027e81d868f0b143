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
}
