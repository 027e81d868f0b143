//! A map from disjoint ranges of bytes to values, in order.
//!
//! Invariants: the extents are in order in runs, none of which is empty or has more than `RUN` of them; the change for which
//! [`RangeMap::reserve`] was called allocates nothing.

use alloc::vec::Vec;
use cbd_types::ByteRange;

/// The most extents of a run. A change moves at most this many of them.
const RUN: usize = 64;

/// Empty runs that are kept for later changes.
const SPARE: usize = 4;

#[derive(Clone, Copy)]
struct Extent<V> {
    range: ByteRange,
    value: V,
}

/// The position of an extent.
#[derive(Clone, Copy)]
struct Position {
    run: usize,
    index: usize,
}

/// A map from disjoint ranges to values.
pub(crate) struct RangeMap<V> {
    runs: Vec<Vec<Extent<V>>>,
    /// Empty runs.
    spare: Vec<Vec<Extent<V>>>,
}

impl<V> Default for RangeMap<V> {
    fn default() -> Self {
        Self { runs: Vec::new(), spare: Vec::new() }
    }
}

impl<V: Copy> RangeMap<V> {
    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Reserves memory for one [`insert`](Self::insert) or [`remove`](Self::remove) of `range`, or of a part of it. `None` if
    /// there is none.
    pub(crate) fn reserve(&mut self, range: ByteRange) -> Option<()> {
        // Each extent that stays splits the new one, and an extent that contains the range is split itself. A full run of those
        // that the range touches is split at the first new extent, and then at the 33rd.
        let more = self.touching(range).count() + 2;
        let runs = more.div_ceil(RUN / 4) + 2;
        self.runs.try_reserve(runs).ok()?;
        self.spare.try_reserve(runs.saturating_sub(self.spare.len())).ok()?;
        while self.spare.len() < runs {
            let mut run = Vec::new();
            run.try_reserve_exact(RUN).ok()?;
            self.spare.push(run);
        }
        Some(())
    }

    /// Sets the value of `range`, except in parts whose present value `keep` accepts.
    pub(crate) fn insert(&mut self, range: ByteRange, value: V, keep: impl Fn(&V) -> bool) {
        let (mut start, mut next) = (range.start, range.start);
        while let Some((position, part, present)) = self.first_in(ByteRange { start: next, end: range.end }) {
            next = part.end;
            if keep(&present) {
                self.put(ByteRange { start, end: part.start }, value);
                start = part.end;
            } else {
                self.cut(position, part);
            }
        }
        self.put(ByteRange { start, end: range.end }, value);
        self.spare.truncate(SPARE);
    }

    /// Removes the parts of `range` whose value `goes` accepts.
    pub(crate) fn remove(&mut self, range: ByteRange, goes: impl Fn(&V) -> bool) {
        let mut next = range.start;
        while let Some((position, part, present)) = self.first_in(ByteRange { start: next, end: range.end }) {
            next = part.end;
            if goes(&present) {
                self.cut(position, part);
            }
        }
        self.spare.truncate(SPARE);
    }

    /// The parts of `range` that have a value.
    pub(crate) fn touching(&self, range: ByteRange) -> impl Iterator<Item = (ByteRange, V)> + '_ {
        let Position { run, index } = self.position(range.start);
        let (first, rest) = match self.runs.get(run..) {
            Some([first, rest @ ..]) => (&first[index..], rest),
            _ => Default::default(),
        };
        first
            .iter()
            .chain(rest.iter().flatten())
            .take_while(move |extent| extent.range.start < range.end)
            .filter_map(move |extent| Some((extent.range.intersection(&range)?, extent.value)))
    }

    /// All ranges in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (ByteRange, V)> + '_ {
        self.runs.iter().flatten().map(|extent| (extent.range, extent.value))
    }

    /// The first extent of which `range` touches a part, with that part and the value.
    fn first_in(&self, range: ByteRange) -> Option<(Position, ByteRange, V)> {
        let position = self.position(range.start);
        let extent = self.runs.get(position.run)?.get(position.index)?;
        Some((position, extent.range.intersection(&range)?, extent.value))
    }

    /// The position of the first extent that ends after `at`, or the end of the map.
    fn position(&self, at: u64) -> Position {
        let is_before = |extent: &Extent<V>| extent.range.end <= at;
        let run = self.runs.partition_point(|run| run.last().is_some_and(is_before));
        Position { run, index: self.runs.get(run).map_or(0, |run| run.partition_point(is_before)) }
    }

    /// Removes `part` from the extent at `position`, which contains it.
    fn cut(&mut self, position: Position, part: ByteRange) {
        let extent = &mut self.runs[position.run][position.index];
        let before = ByteRange { start: extent.range.start, end: part.start };
        let after = ByteRange { start: part.end, end: extent.range.end };
        if before.is_empty() && after.is_empty() {
            self.take(position);
        } else if before.is_empty() {
            extent.range = after;
        } else {
            extent.range = before;
            let value = extent.value;
            self.put(after, value);
        }
    }

    /// Adds an extent where there is none, unless it is empty.
    fn put(&mut self, range: ByteRange, value: V) {
        if range.is_empty() {
            return;
        }
        let Position { mut run, mut index } = self.position(range.start);
        if run == self.runs.len() {
            // Behind all others: in the last run.
            if run == 0 {
                let first = self.new_run();
                self.runs.push(first);
            }
            run = self.runs.len() - 1;
            index = self.runs[run].len();
        }
        if self.runs[run].len() == RUN {
            let mut second = self.new_run();
            second.extend(self.runs[run].drain(RUN / 2..));
            self.runs.insert(run + 1, second);
            if index > RUN / 2 {
                (run, index) = (run + 1, index - RUN / 2);
            }
        }
        self.runs[run].insert(index, Extent { range, value });
    }

    /// Removes the extent at `position`.
    fn take(&mut self, Position { run, index }: Position) {
        self.runs[run].remove(index);
        let length = self.runs[run].len();
        if length == 0 {
            let empty = self.runs.remove(run);
            self.recycle(empty);
        } else if length < RUN / 4 {
            self.join(run);
            if let Some(before) = run.checked_sub(1) {
                self.join(before);
            }
        }
    }

    /// Joins a run with the next one if both together are half a run.
    fn join(&mut self, run: usize) {
        if let Some([first, second]) = self.runs.get_mut(run..run + 2)
            && first.len() + second.len() <= RUN / 2
        {
            first.append(second);
            let emptied = self.runs.remove(run + 1);
            self.recycle(emptied);
        }
    }

    fn new_run(&mut self) -> Vec<Extent<V>> {
        self.spare.pop().unwrap_or_else(|| Vec::with_capacity(RUN))
    }

    fn recycle(&mut self, run: Vec<Extent<V>>) {
        if self.spare.len() < self.spare.capacity() {
            self.spare.push(run);
        }
    }
}

#[cfg(test)]
mod tests;
