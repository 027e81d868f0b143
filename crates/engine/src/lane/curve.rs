//! The hit ratio that a lane would have with less or more space.
//!
//! A small model of the lane sees a sample of the blocks that clients read: sets of 32 blocks, in the order in which they were read
//! last. A place in that order stands for a part of the space of the cache: a read that finds its block at the first place hits in
//! a cache of a 32nd of the largest size, one that finds it at the last place hits in a cache of the largest size only. So the
//! number of reads at each place gives the hit ratio of every size at once, for a cache that evicts what was read longest ago
//! (Mattson's stack distances, on a sample of the addresses as in SHARDS).
//!
//! Invariants: a read outside the sample costs a multiplication and a comparison, which admission needs anyway; a place stands for
//! the same number of bytes as long as the model exists, whatever the present size of the cache; only speed depends on it.
//!
//! Elsewhere: what the cache really holds (`admission`, `reclaim`), the division of space among caches (`cbd-runtime`).

use super::LaneState;
use super::admission::{scaled, scatter};
use alloc::{boxed::Box, vec::Vec};
use cbd_types::CHECKSUM_BLOCK;

/// Sizes of the cache whose hits are counted.
pub const RANKS: usize = 32;
/// At least one block in this many is in the sample.
const SAMPLE_MAX: u64 = 64;
/// Minimum number of blocks in a model, if the lane has as many.
const MODEL_BLOCKS: u64 = 256;
/// Bytes of the log for each block: its data and its record.
const LOG_BYTES: u64 = CHECKSUM_BLOCK + 128;
/// No block, as in admission.
const NO_BLOCK: u32 = u32::MAX;

/// What was counted, of one lane or of several. Whether the few hottest blocks are in the sample is chance: they find themselves at
/// the first place, so that the differences between sizes are nearer to those of all blocks than the totals are.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HitCurve {
    /// Reads in the sample that found their block at each place.
    pub hits: [u64; RANKS],
    /// Bytes of cache that each place stands for; 0 if nothing is counted.
    pub rank_bytes: u64,
    /// Reads of blocks in the sample.
    pub reads: u64,
    /// One block of the device in so many is in the sample.
    pub sampled_one_of: u64,
}

/// The model of a lane.
pub(crate) struct Curve {
    /// Bits of a block's hash that are zero if it is in the sample.
    sample: u64,
    /// The counts, or none. Behind a pointer, because lanes are moved as values when a cache is opened; in a slice, because the
    /// allocation of a slice can fail.
    counts: Box<[Counts]>,
}

/// What the sample has shown.
#[derive(Clone)]
struct Counts {
    /// Sets of [`RANKS`] blocks, the block that was read last in front.
    blocks: Box<[u32]>,
    hits: Box<[u64]>,
    reads: u64,
}

impl Curve {
    /// A model that counts nothing.
    pub(crate) fn none() -> Self {
        Self { sample: u64::MAX, counts: Box::default() }
    }

    /// A model for caches up to the size at which the lane has `bytes` of log. `None` without memory.
    pub(crate) fn new(bytes: u64) -> Option<Self> {
        // An eighth is kept free, or is being filled.
        let held = (bytes - bytes / 8) / LOG_BYTES;
        let one_of = 1 << (held / MODEL_BLOCKS).clamp(1, SAMPLE_MAX).ilog2();
        let sets = (held / one_of).div_ceil(RANKS as u64).max(1) as usize;
        let (blocks, hits) = (filled(sets * RANKS, NO_BLOCK)?, filled(RANKS, 0)?);
        let mut counts = Vec::new();
        counts.try_reserve_exact(1).ok()?;
        counts.push(Counts { blocks, hits, reads: 0 });
        Some(Self { sample: one_of - 1, counts: counts.into_boxed_slice() })
    }

    /// Notes that a client reads block `key`.
    #[inline]
    pub(crate) fn note_read(&mut self, key: u32) {
        let hash = scatter(key);
        if hash & self.sample == 0 {
            self.count(key, hash);
        }
    }

    #[cold]
    #[inline(never)]
    fn count(&mut self, key: u32, hash: u64) {
        let [counts] = &mut *self.counts else { return };
        let first = scaled(hash >> 16, counts.blocks.len() / RANKS) * RANKS;
        let Some(set) = counts.blocks.get_mut(first..first + RANKS) else { return };
        counts.reads += 1;
        let found = set.iter().position(|known| *known == key);
        if let Some(hits) = found.and_then(|rank| counts.hits.get_mut(rank)) {
            *hits += 1;
        }
        set[..=found.unwrap_or(RANKS - 1)].rotate_right(1);
        set[0] = key;
    }

    /// Adds what was counted to `sum`.
    pub(crate) fn add_to(&self, sum: &mut HitCurve) {
        let [counts] = &*self.counts else { return };
        let one_of = self.sample + 1;
        sum.sampled_one_of = one_of;
        sum.reads += counts.reads;
        sum.rank_bytes += (counts.blocks.len() / RANKS) as u64 * one_of * LOG_BYTES * 8 / 7;
        sum.hits.iter_mut().zip(&counts.hits).for_each(|(sum, hits)| *sum += hits);
    }

    /// Memory of the model in bytes.
    pub(crate) fn bytes(&self) -> usize {
        let of = |counts: &Counts| size_of::<Counts>() + counts.blocks.len() * 4 + counts.hits.len() * 8;
        self.counts.iter().map(of).sum()
    }
}

/// A slice of `count` values; `None` without memory.
fn filled<T: Clone>(count: usize, value: T) -> Option<Box<[T]>> {
    let mut values = Vec::new();
    values.try_reserve_exact(count).ok()?;
    values.resize(count, value);
    Some(values.into_boxed_slice())
}

impl LaneState {
    /// Replaces the model; returns the former one.
    pub(crate) fn replace_curve(&mut self, curve: Curve) -> Curve {
        core::mem::replace(&mut self.curve, curve)
    }

    /// What was counted.
    pub(crate) const fn curve(&self) -> &Curve {
        &self.curve
    }
}

#[cfg(test)]
mod tests;
