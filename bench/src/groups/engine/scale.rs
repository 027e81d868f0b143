//! How large everything is, and what is written.

use crate::options::Options;
use cbd_types::AlignedBuffer;
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};

/// Sizes in bytes and counts.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// The region of each contestant; far above any last-level cache.
    pub region: u64,
    /// The cached device.
    pub device: u64,
    /// Operations in a turn: about half a millisecond.
    pub turn: usize,
    /// Turns between two rests, in which maintenance makes the cache clean and reclaims. What they write is more than
    /// the last-level cache and less than the free part of the region.
    pub turns_between_rests: usize,
    /// The region whose index is weighed.
    pub index_region: u64,
}

impl Scale {
    /// Operations between two rests.
    pub const fn between_rests(&self) -> usize {
        self.turn * self.turns_between_rests
    }

    /// The sizes that the options ask for.
    pub fn of(options: &Options) -> Self {
        const MIB: u64 = 1 << 20;
        if options.quick {
            Self {
                region: 128 * MIB,
                device: 512 * MIB,
                turn: 500,
                turns_between_rests: 8,
                index_region: 256 * MIB,
            }
        } else {
            Self {
                region: 2048 * MIB,
                device: 3072 * MIB,
                turn: 2_000,
                turns_between_rests: 32,
                index_region: 4096 * MIB,
            }
        }
    }
}

/// What is written: as many pages as a client has under way, warm in the processor's cache, as data is that a client
/// has just made. Both contestants copy from the same.
#[derive(Debug)]
pub struct Sources(Vec<AlignedBuffer>);

impl Sources {
    const COUNT: usize = 64;

    /// Random pages of `length` bytes.
    pub fn new(length: usize) -> Self {
        let mut random = SmallRng::seed_from_u64(1);
        Self(
            (0..Self::COUNT)
                .map(|_| {
                    let mut page = AlignedBuffer::zeroed(length);
                    random.fill_bytes(&mut page);
                    page
                })
                .collect(),
        )
    }

    /// The source of write `number`.
    pub fn get(&self, number: usize) -> &[u8] {
        &self.0[number % Self::COUNT]
    }
}

/// Random places of `length` bytes on a device of `size`.
pub fn random_places(random: &mut SmallRng, size: u64, length: u64, count: usize) -> Vec<u64> {
    (0..count).map(|_| random.random_range(0..size / length) * length).collect()
}
