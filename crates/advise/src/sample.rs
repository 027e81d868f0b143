//! The sample of a device that a small cache stands for.
//!
//! The device is divided into groups of 2^n neighbouring blocks, and one block of each group, chosen by a hash, is in the sample. So a
//! cache of a 2^n-th of the size that serves the sample alone has about the hit ratio of the whole (Waldspurger et al., "Cache
//! Modeling and Optimization using Miniature Simulations", USENIX ATC 2017). One block of each group, instead of blocks whose own
//! hash is small, leaves less to chance, and keeps adjacent what is adjacent: a long request is a shorter one in the sample.
//!
//! The chosen blocks of a chunk are adjacent somewhere in the same chunk. So they belong to the lane to which all blocks of the chunk
//! belong: if the chunks moved together, a working set would be in fewer lanes than it is.
//!
//! Invariants: every block of the device is in the sample or not, whatever reads or writes it; no two of them share a place.

use cbd_types::{ByteRange, CHECKSUM_BLOCK, CHUNK};

/// Spreads the chosen blocks: without it a stride of the trace could hit or miss all of them.
const fn scatter(group: u64) -> u64 {
    let mixed = (group ^ (group >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ (mixed >> 32)
}

/// One block of 2^`shift` is in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sample {
    /// The logarithm of the blocks of a group.
    pub shift: u32,
}

impl Sample {
    /// Blocks of the device for each block of the sample.
    #[must_use]
    pub const fn one_of(self) -> u64 {
        1 << self.shift
    }

    /// The blocks of `range`, widened to whole blocks, that are in the sample, at their places: a range in each chunk that has some.
    pub fn of(self, range: ByteRange) -> impl Iterator<Item = ByteRange> {
        let groups = self.groups(range);
        let mut next = groups.start;
        std::iter::from_fn(move || {
            if next >= groups.end {
                return None;
            }
            let in_chunk = (self.groups_per_chunk() - next % self.groups_per_chunk()).min(groups.end - next);
            let place = ByteRange::at(self.place(next), in_chunk * CHECKSUM_BLOCK);
            next += in_chunk;
            Some(place)
        })
    }

    /// From the first place to the last of the blocks of `range` that are in the sample; nothing else of the sample is between them.
    #[must_use]
    pub fn span(self, range: ByteRange) -> Option<ByteRange> {
        let groups = self.groups(range);
        let last = groups.end.checked_sub(1).filter(|last| *last >= groups.start)?;
        Some(ByteRange { start: self.place(groups.start), end: self.place(last) + CHECKSUM_BLOCK })
    }

    /// The groups whose chosen blocks are in `range`.
    pub(crate) const fn groups(self, range: ByteRange) -> std::ops::Range<u64> {
        if range.is_empty() {
            return 0..0;
        }
        let (first, last) = (range.start / CHECKSUM_BLOCK, (range.end - 1) / CHECKSUM_BLOCK);
        let (mut start, mut end) = (first >> self.shift, (last >> self.shift) + 1);
        // Only the chosen blocks of the outer groups can be outside of the range.
        if self.chosen(start) < first {
            start += 1;
        }
        if end > start && self.chosen(end - 1) > last {
            end -= 1;
        }
        start..end
    }

    const fn groups_per_chunk(self) -> u64 {
        let groups = (CHUNK / CHECKSUM_BLOCK) >> self.shift;
        if groups == 0 { 1 } else { groups }
    }

    /// The first byte of the place of the chosen block of `group`.
    const fn place(self, group: u64) -> u64 {
        let (in_chunk, per_chunk) = (CHUNK / CHECKSUM_BLOCK, self.groups_per_chunk());
        let chunk = (group << self.shift) / in_chunk;
        // The part of the chunk is chosen by a hash: tables that depend on it are used evenly.
        let part = scatter(chunk + 1) % (in_chunk / per_chunk);
        (chunk * in_chunk + part * per_chunk + group % per_chunk) * CHECKSUM_BLOCK
    }

    /// The block of `group` that is in the sample.
    const fn chosen(self, group: u64) -> u64 {
        (group << self.shift) + (scatter(group) & (self.one_of() - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(sample: Sample, first: u64, count: u64) -> Vec<u64> {
        let ranges = sample.of(ByteRange::at(first * 4096, count * 4096));
        ranges.flat_map(|range| range.start / 4096..range.end / 4096).collect()
    }

    #[test]
    fn all_blocks_are_in_a_sample_of_one_of_one() {
        let whole = Sample { shift: 0 };
        let range = |start, end| ByteRange { start, end };
        assert_eq!(whole.of(range(4096, 12_288)).collect::<Vec<_>>(), [range(4096, 12_288)]);
        assert_eq!(whole.of(range(5000, 5001)).collect::<Vec<_>>(), [range(4096, 8192)]);
        assert_eq!(whole.span(range(4096, 99 << 20)), Some(range(4096, 99 << 20)));
        assert_eq!(whole.of(range(7, 7)).count(), 0);
    }

    #[test]
    fn of_each_group_one_block_is_in_the_sample_and_requests_of_any_length_agree_on_it() {
        for shift in [1, 4, 7, 10, 12] {
            let sample = Sample { shift };
            for group in 0..20 {
                let of_group = (group << shift)..((group + 1) << shift);
                assert_eq!(of_group.filter(|block| !blocks(sample, *block, 1).is_empty()).count(), 1);
            }
            for (first, count) in [(0, 20_000), (3, 7), (5, 40), (1023, 2), (999, 3333)] {
                let one_by_one: Vec<u64> =
                    (first..first + count).flat_map(|block| blocks(sample, block, 1)).collect();
                let at_once = blocks(sample, first, count);
                assert_eq!(at_once, one_by_one, "{shift}: {first}+{count}");
                let mut places = at_once.clone();
                places.sort_unstable();
                places.dedup();
                assert_eq!(places, at_once, "each has a place of its own, in order");
                let span = sample.span(ByteRange::at(first * 4096, count * 4096));
                let ends = span.map(|span| (span.start / 4096, span.end / 4096 - 1));
                assert_eq!(ends, at_once.first().copied().zip(at_once.last().copied()));
            }
        }
    }

    #[test]
    fn a_block_of_the_sample_is_in_the_chunk_of_its_group() {
        for shift in [1, 4, 10] {
            let sample = Sample { shift };
            for block in (0..100_000_u64).step_by(7) {
                assert!(blocks(sample, block, 1).iter().all(|place| place / 1024 == block / 1024));
            }
        }
    }
}
