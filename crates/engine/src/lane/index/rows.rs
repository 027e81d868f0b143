//! The rows of the chunks in a table of the index: which buckets the blocks of a chunk use.
//!
//! The hash of a chunk is the begin of its row: a fraction of the table, whatever the table's size ([`Start`]). So the rows of two
//! tables are in the same order, and an index that changes its size moves them in this order (`tables`).
//!
//! Invariants: the begin of a row never falls as the start grows. A row is [`ROW`] buckets long; one that passes the end of the
//! table continues at its first bucket.
//!
//! Elsewhere: what a bucket holds (`table`).

use super::table::{LINE, PLACES};
use crate::{
    Environment,
    sync::{SharedU32, SharedU64},
};
use cbd_types::{CHECKSUM_BLOCK, CHUNK};
use core::{ops::RangeInclusive, sync::atomic::Ordering};

/// Buckets of a row.
pub(super) const ROW: usize = (BLOCKS_PER_CHUNK as usize).div_ceil(PLACES);
const BLOCKS_PER_CHUNK: u32 = (CHUNK / CHECKSUM_BLOCK) as u32;
/// Consecutive chunks that share the table evenly.
const NEIGHBOURS: u32 = 64;

/// The begin of the row of a chunk: a fraction of any table, in units of 2^-32.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Start(u32);

impl Start {
    /// The begin of the row of the chunk of `key`. `seed` determines which chunks collide, so that a client that does not know
    /// the seed cannot choose blocks that do.
    #[inline]
    pub(super) const fn new(key: u32, seed: u32) -> Self {
        let chunk = key / BLOCKS_PER_CHUNK;
        // A multiplication by the golden ratio spaces any number of neighbouring chunks evenly. Some strides are bad for it, so
        // each group of `NEIGHBOURS` chunks starts at a pseudo-random bucket of its own.
        let mut turn = ((chunk / NEIGHBOURS) ^ seed).wrapping_mul(0x85eb_ca6b);
        turn = (turn ^ turn >> 15).wrapping_add(seed).wrapping_mul(0xc2b2_ae35);
        turn ^= turn >> 13;
        // Not 0, which is the boundary below all starts.
        Self(chunk.wrapping_mul(0x9e37_79b1).wrapping_add(turn) | 1)
    }

    /// Whether it is up to `boundary`.
    #[inline]
    pub(super) fn is_up_to(self, boundary: u32) -> bool {
        self.0 <= boundary
    }

    /// The first bucket of the row, in a table of `count` buckets. Never falls as the start grows.
    #[inline]
    pub(super) const fn of(self, count: usize) -> usize {
        ((self.0 as u64 * count as u64) >> 32) as usize
    }
}

/// Addresses of the buckets of a table, for a thread that has not locked the lane yet: only for prefetches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Lines {
    at: usize,
    count: usize,
    seed: u32,
}

/// The [`Lines`] of an index, which change when it gets another table. A thread may load parts of two values: it prefetches
/// lines of no use then.
pub(crate) struct SharedLines<E: Environment> {
    at: SharedU64<E>,
    count: SharedU32<E>,
    seed: u32,
}

/// The buckets of one chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Row {
    first: usize,
    count: usize,
}

impl Lines {
    /// The address of the first bucket, the number of buckets, and the seed of the starts.
    pub(super) const fn new(at: usize, count: usize, seed: u32) -> Self {
        Self { at, count, seed }
    }

    /// Prefetches the buckets of `keys`, which lie in one chunk. No instruction waits for a prefetch.
    #[inline]
    pub(crate) fn prefetch<E: Environment>(self, keys: RangeInclusive<u32>) {
        self.prefetch_at::<E>(Start::new(*keys.start(), self.seed), keys);
    }

    /// As [`prefetch`](Self::prefetch); the chunk is at `start`.
    #[inline]
    pub(super) fn prefetch_at<E: Environment>(self, start: Start, keys: RangeInclusive<u32>) {
        for bucket in Row::new(start, self.count).buckets(keys) {
            E::prefetch(core::ptr::without_provenance(self.at.wrapping_add(bucket * LINE)));
        }
    }
}

impl<E: Environment> SharedLines<E> {
    pub(crate) const fn new(lines: Lines) -> Self {
        Self {
            at: SharedU64::new(lines.at as u64),
            count: SharedU32::new(lines.count as u32),
            seed: lines.seed,
        }
    }

    /// The addresses, of which some may be of an earlier table.
    #[inline]
    pub(crate) fn load(&self) -> Lines {
        let (at, count) = (self.at.load(Ordering::Relaxed), self.count.load(Ordering::Relaxed));
        Lines { at: at as usize, count: count as usize, seed: self.seed }
    }

    /// Sets the addresses, which have the seed of those before.
    pub(crate) fn store(&self, lines: Lines) {
        self.at.store(lines.at as u64, Ordering::Relaxed);
        self.count.store(lines.count as u32, Ordering::Relaxed);
    }
}

impl Row {
    /// The row of the chunk at `start` in a table of `count` buckets.
    #[inline]
    pub(super) const fn new(start: Start, count: usize) -> Self {
        Self { first: start.of(count), count }
    }

    /// The index of the bucket of block `key` among those of its chunk.
    pub(super) const fn offset(key: u32) -> usize {
        (key % BLOCKS_PER_CHUNK) as usize / PLACES
    }

    pub(super) const fn at(self, offset: usize) -> usize {
        let at = self.first + offset;
        if at < self.count { at } else { at % self.count }
    }

    /// Each bucket of `keys`, which lie in the chunk.
    #[inline]
    pub(super) fn buckets(self, keys: RangeInclusive<u32>) -> impl Iterator<Item = usize> {
        debug_assert_eq!(keys.start() / BLOCKS_PER_CHUNK, keys.end() / BLOCKS_PER_CHUNK, "one chunk");
        (Self::offset(*keys.start())..=Self::offset(*keys.end())).map(move |offset| self.at(offset))
    }
}

#[cfg(test)]
mod tests;
