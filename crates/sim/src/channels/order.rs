//! Whether there is an order of all reads and writes of a sector, by several clients, that explains what the reads have found: each
//! takes effect at one moment between its submission and its completion.
//!
//! The theory is that of Gibbons and Korach, "Testing shared memories" (1997), for values that are written once: a value's reads and
//! its write are neighbours in the order. So one value is before another one if any operation with it was complete before one with the
//! other began, and there is an order unless two values are before each other.

use std::collections::BTreeMap;

/// The operations on one sector with one value.
#[derive(Clone, Copy, Debug)]
struct Uses {
    /// When its write began.
    written: Option<u64>,
    /// When the first operation was complete.
    first_end: u64,
    /// When the last operation began.
    last_begin: u64,
    is_read: bool,
}

const BLANK: Uses = Uses { written: None, first_end: u64::MAX, last_begin: 0, is_read: false };

/// The operations on all sectors. Moments count from 1.
#[derive(Default, Debug)]
pub struct Order {
    sectors: BTreeMap<u64, BTreeMap<u64, Uses>>,
}

impl Order {
    fn uses(&mut self, sector: u64, value: u64) -> &mut Uses {
        let initial = BTreeMap::from([(0, Uses { written: Some(0), first_end: 0, ..BLANK })]);
        self.sectors.entry(sector).or_insert(initial).entry(value).or_insert(BLANK)
    }

    /// A write was submitted.
    pub fn write_begins(&mut self, sector: u64, value: u64, begin: u64) {
        let uses = self.uses(sector, value);
        uses.written = Some(begin);
        uses.last_begin = uses.last_begin.max(begin);
    }

    /// It is complete. One that never is may have been executed or not.
    pub fn write_ends(&mut self, sector: u64, value: u64, end: u64) {
        let uses = self.uses(sector, value);
        uses.first_end = uses.first_end.min(end);
    }

    /// A read is complete.
    pub fn read(&mut self, sector: u64, value: u64, begin: u64, end: u64) {
        let uses = self.uses(sector, value);
        uses.first_end = uses.first_end.min(end);
        uses.last_begin = uses.last_begin.max(begin);
        uses.is_read = true;
    }

    /// What contradicts every order.
    pub fn contradiction(&self) -> Option<String> {
        for (sector, values) in &self.sectors {
            // A write that is not complete, and of which no read has found anything, can be left out.
            let known = |uses: &&Uses| uses.is_read || uses.first_end != u64::MAX;
            let known: Vec<_> = values.iter().filter(|(_, uses)| known(uses)).collect();
            for (index, (value, one)) in known.iter().enumerate() {
                if one.written.is_none_or(|begin| begin > one.first_end) {
                    return Some(format!("sector {sector}: {value:#x} was read before it was written"));
                }
                for (other_value, other) in &known[..index] {
                    if one.first_end < other.last_begin && other.first_end < one.last_begin {
                        return Some(format!(
                            "sector {sector} had {value:#x} before and after {other_value:#x}: {one:?}, {other:?}"
                        ));
                    }
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sector with writes of values in spans, and reads of them.
    fn is_possible(writes: &[(u64, u64, u64)], reads: &[(u64, u64, u64)]) -> bool {
        let mut order = Order::default();
        for (value, begin, end) in writes {
            order.write_begins(7, *value, *begin);
            if *end > 0 {
                order.write_ends(7, *value, *end);
            }
        }
        reads.iter().for_each(|(value, begin, end)| order.read(7, *value, *begin, *end));
        order.contradiction().is_none()
    }

    #[test]
    fn reads_that_no_order_explains_are_found() {
        let apart = [(1, 1, 10), (2, 11, 20)];
        assert!(is_possible(&apart, &[(1, 5, 12), (2, 15, 16), (2, 21, 22)]));
        assert!(!is_possible(&apart, &[(1, 21, 22)]), "it was overwritten");
        assert!(!is_possible(&apart, &[(0, 11, 12)]), "it was overwritten");
        assert!(!is_possible(&apart, &[(3, 1, 2)]), "it was never written");
        assert!(!is_possible(&apart, &[(2, 1, 5)]), "it was written later");
        let together = [(1, 1, 30), (2, 1, 30)];
        assert!(is_possible(&together, &[(0, 1, 2), (1, 3, 4), (2, 5, 6), (2, 31, 32)]));
        assert!(is_possible(&together, &[(2, 3, 4), (1, 5, 6)]));
        assert!(!is_possible(&together, &[(1, 3, 4), (2, 5, 6), (1, 7, 8)]), "it was written twice");
        assert!(!is_possible(&together, &[(1, 3, 4), (0, 5, 6)]));
        // Nothing is known of a write without an end, until a read has found it.
        let open = [(1, 1, 0), (2, 11, 20)];
        assert!(is_possible(&open, &[(0, 5, 6), (2, 25, 26), (1, 27, 28)]));
        assert!(!is_possible(&open, &[(1, 5, 6), (2, 25, 26), (1, 27, 28)]));
    }
}
