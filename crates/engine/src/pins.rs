//! The ranges of a device that are pinned: they stay in its cache.
//!
//! Invariants: the ranges are in order, disjoint, not adjacent, and whole checksum blocks; a list is made once and never changes.
//!
//! Elsewhere: what a pin does (`lane`, `worker::reclaim`), and where pins are stored (`transport::pins`).

use alloc::vec::Vec;
use cbd_types::{ByteRange, CHECKSUM_BLOCK, heap_sort_by_key};

/// Ranges that are pinned.
#[derive(Debug, Default)]
pub(crate) struct PinnedRanges(Vec<ByteRange>);

impl PinnedRanges {
    /// The union of `ranges`, widened to whole checksum blocks. `None` if there is no memory.
    pub(crate) fn new(ranges: impl Iterator<Item = ByteRange>) -> Option<Self> {
        let mut sorted = Vec::new();
        for range in ranges.filter(|range| !range.is_empty()) {
            sorted.try_reserve(1).ok()?;
            let start = range.start / CHECKSUM_BLOCK * CHECKSUM_BLOCK;
            let end = range.end.checked_next_multiple_of(CHECKSUM_BLOCK).unwrap_or(range.end);
            sorted.push(ByteRange { start, end });
        }
        heap_sort_by_key(&mut sorted, |range| range.start);
        let mut count = 0;
        for at in 0..sorted.len() {
            let next = sorted[at];
            match sorted[..count].last_mut() {
                Some(last) if next.start <= last.end => last.end = last.end.max(next.end),
                _ => {
                    sorted[count] = next;
                    count += 1;
                }
            }
        }
        sorted.truncate(count);
        Some(Self(sorted))
    }

    /// Whether nothing is pinned.
    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes that are pinned.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(ByteRange::len).sum()
    }

    /// The end of the last range; 0 if there is none.
    pub(crate) fn end(&self) -> u64 {
        self.0.last().map_or(0, |last| last.end)
    }

    /// The ranges in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = ByteRange> + '_ {
        self.0.iter().copied()
    }

    /// Whether some of `range` is pinned.
    pub(crate) fn touches(&self, range: ByteRange) -> bool {
        let first = self.0.partition_point(|pinned| pinned.end <= range.start);
        self.0.get(first).is_some_and(|pinned| pinned.start < range.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn ranges_are_sorted_joined_and_widened_to_blocks() {
        let range = |start, end| ByteRange { start, end };
        let ranges = [range(20_000, 20_001), range(0, 4096), range(4096, 5000), range(7, 7), range(0, 100)];
        let pins = PinnedRanges::new(ranges.into_iter()).expect("there is memory");
        assert_eq!(pins.0, vec![range(0, 8192), range(16_384, 20_480)]);
        assert_eq!((pins.bytes(), pins.end(), pins.is_empty()), (12_288, 20_480, false));
        for (range, touches) in [
            (range(0, 1), true),
            (range(8191, 8192), true),
            (range(8192, 16_384), false),
            (range(8192, 16_385), true),
            (range(20_480, u64::MAX), false),
        ] {
            assert_eq!(pins.touches(range), touches, "{range}");
        }
        assert!(PinnedRanges::default().is_empty() && !PinnedRanges::default().touches(range(0, 4096)));
    }
}
