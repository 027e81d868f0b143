//! What is wrong: ranges of the verified object, joined where they are adjacent.
//!
//! Invariants: ranges do not overlap; the list is bounded, and what does not fit is counted.

use cbd_types::ByteRange;
use std::collections::BTreeMap;

/// The most ranges that are listed.
const LISTED_MAX: usize = 1 << 16;

/// What is wrong with a range of a disk or a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// It cannot be read.
    Unreadable,
    /// Its content is not that of the image.
    Differs,
    /// Some of its bytes are not zero.
    NotZero,
}

impl What {
    /// The name in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unreadable => "unreadable",
            Self::Differs => "differs",
            Self::NotZero => "not_zero",
        }
    }
}

/// The ranges that are wrong.
#[derive(Default, Debug)]
pub struct Findings {
    /// The end of each range, and what is wrong with it, by its start.
    ranges: BTreeMap<u64, (u64, What)>,
    beyond: u64,
}

impl Findings {
    /// Adds a range; one that overlaps another replaces that part of it.
    pub fn add(&mut self, range: ByteRange, what: What) {
        self.remove(range);
        let mut joined = range;
        if let Some((&start, &(end, before))) = self.ranges.range(..range.start).next_back()
            && end == range.start
            && before == what
        {
            joined.start = start;
        }
        if let Some(&(end, behind)) = self.ranges.get(&range.end)
            && behind == what
        {
            joined.end = end;
            self.ranges.remove(&range.end);
        }
        if joined.start == range.start && self.ranges.len() >= LISTED_MAX {
            self.beyond += 1;
            return;
        }
        self.ranges.insert(joined.start, (joined.end, what));
    }

    /// Forgets what is known of a range.
    pub fn remove(&mut self, range: ByteRange) {
        let first = self.ranges.range(..range.start).next_back().map(|(&start, _)| start);
        let inside = self.ranges.range(range.start..range.end).map(|(&start, _)| start);
        for start in first.into_iter().chain(inside).collect::<Vec<u64>>() {
            let Some((end, what)) = self.ranges.remove(&start) else { continue };
            let mut keep = |start: u64, end: u64| {
                if start < end {
                    self.ranges.insert(start, (end, what));
                }
            };
            keep(start, end.min(range.start));
            keep(start.max(range.end), end);
        }
    }

    /// The ranges in order.
    pub fn iter(&self) -> impl Iterator<Item = (ByteRange, What)> {
        self.ranges.iter().map(|(&start, &(end, what))| (ByteRange { start, end }, what))
    }

    /// The number of ranges, also of those that are not listed.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.ranges.len() as u64 + self.beyond
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(findings: &Findings) -> Vec<(u64, u64, What)> {
        findings.iter().map(|(range, what)| (range.start, range.end, what)).collect()
    }

    #[test]
    fn adjacent_ranges_with_the_same_flaw_are_one_in_any_order() {
        let mut findings = Findings::default();
        for start in [1024, 0, 512, 4096] {
            findings.add(ByteRange::at(start, 512), What::Unreadable);
        }
        findings.add(ByteRange::at(1536, 512), What::Differs);
        let expected =
            [(0, 1536, What::Unreadable), (1536, 2048, What::Differs), (4096, 4608, What::Unreadable)];
        assert_eq!(list(&findings), expected);
    }

    #[test]
    fn what_is_removed_leaves_the_parts_before_and_behind_it() {
        let mut findings = Findings::default();
        findings.add(ByteRange::at(0, 4096), What::Differs);
        findings.remove(ByteRange::at(1024, 512));
        assert_eq!(list(&findings), [(0, 1024, What::Differs), (1536, 4096, What::Differs)]);
        findings.remove(ByteRange::at(512, 8192));
        assert_eq!(list(&findings), [(0, 512, What::Differs)]);
    }

    #[test]
    fn the_list_is_bounded_and_the_rest_is_counted() {
        let mut findings = Findings::default();
        for number in 0..LISTED_MAX as u64 + 3 {
            findings.add(ByteRange::at(number * 1024, 512), What::Unreadable);
        }
        assert_eq!((findings.iter().count(), findings.count()), (LISTED_MAX, LISTED_MAX as u64 + 3));
    }
}
