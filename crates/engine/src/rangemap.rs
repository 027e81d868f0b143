//! A map from disjoint ranges of bytes to values, in order.

use alloc::{collections::BTreeMap, vec::Vec};
use cbd_types::ByteRange;

/// A map from disjoint ranges to values.
pub(crate) struct RangeMap<V> {
    extents: BTreeMap<u64, (u64, V)>,
}

impl<V> Default for RangeMap<V> {
    fn default() -> Self {
        Self { extents: BTreeMap::new() }
    }
}

impl<V: Copy> RangeMap<V> {
    pub(crate) fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// Sets the value of `range`, except in parts whose present value `keep` accepts.
    pub(crate) fn insert(&mut self, range: ByteRange, value: V, keep: impl Fn(&V) -> bool) {
        let covered: Vec<_> = self.touching(range).collect();
        let mut start = range.start;
        for (part, present) in covered {
            if keep(&present) {
                self.put(ByteRange { start, end: part.start }, value);
                start = part.end;
            } else {
                self.cut(part);
            }
        }
        self.put(ByteRange { start, end: range.end }, value);
    }

    /// The parts of `range` that have a value.
    pub(crate) fn touching(&self, range: ByteRange) -> impl Iterator<Item = (ByteRange, V)> + '_ {
        let from = self.extents.range(..=range.start).next_back().map_or(range.start, |(start, _)| *start);
        self.extents.range(from..range.end.max(from)).filter_map(move |(start, (end, value))| {
            Some((ByteRange { start: *start, end: *end }.intersection(&range)?, *value))
        })
    }

    /// All ranges in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (ByteRange, V)> + '_ {
        self.extents.iter().map(|(start, (end, value))| (ByteRange { start: *start, end: *end }, *value))
    }

    /// Removes the parts of `range` whose value `goes` accepts.
    pub(crate) fn remove(&mut self, range: ByteRange, goes: impl Fn(&V) -> bool) {
        if self.is_empty() {
            return;
        }
        let parts: Vec<_> =
            self.touching(range).filter(|(_, value)| goes(value)).map(|(part, _)| part).collect();
        for part in parts {
            self.cut(part);
        }
    }

    /// Removes `part`, which lies inside one extent, from it.
    fn cut(&mut self, part: ByteRange) {
        let Some((start, (end, value))) =
            self.extents.range(..=part.start).next_back().map(|(s, e)| (*s, *e))
        else {
            return;
        };
        self.extents.remove(&start);
        self.put(ByteRange { start, end: part.start }, value);
        self.put(ByteRange { start: part.end, end }, value);
    }

    fn put(&mut self, range: ByteRange, value: V) {
        if !range.is_empty() {
            self.extents.insert(range.start, (range.end, value));
        }
    }
}

#[cfg(test)]
mod tests;
