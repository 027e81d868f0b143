//! The sizes, and the data that is written.

use crate::options::Options;
use cbd_types::AlignedBuffer;
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};

/// Sizes in bytes and counts.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// The region of each contestant, far larger than any last-level cache.
    pub region: u64,
    /// The cached device.
    pub device: u64,
    /// Bytes that a turn moves, in operations that are no smaller than a page: about half a millisecond.
    pub turn_bytes: u64,
    /// Turns between two rests, in which background work cleans the cache and reclaims. These turns write
    /// more than the last-level cache and less than the free part of the region.
    pub turns_between_rests: usize,
    /// The device behind an export, and the memory that holds it.
    pub export_size: u64,
    /// Operations of each contestant in the measurement of the slowest operations.
    pub tail_operations: usize,
    /// The region that is filled completely, to measure its index and its recovery.
    pub full_region: u64,
    /// The region that is opened again as after a kill; smaller if the machine has too little memory.
    pub restart_region: u64,
}

impl Scale {
    /// Operations of `length` bytes in a turn. A small operation costs nearly as much as one of a page.
    pub const fn turn(&self, length: u64) -> usize {
        let length = if length < 4096 { 4096 } else { length };
        (self.turn_bytes / length) as usize
    }

    /// The sizes for the options.
    pub fn of(options: &Options) -> Self {
        const MIB: u64 = 1 << 20;
        if options.quick {
            Self {
                region: 128 * MIB,
                device: 512 * MIB,
                turn_bytes: 2 * MIB,
                turns_between_rests: 8,
                export_size: 128 * MIB,
                tail_operations: 50_000,
                full_region: 256 * MIB,
                restart_region: 256 * MIB,
            }
        } else {
            Self {
                region: 2048 * MIB,
                device: 3072 * MIB,
                turn_bytes: 8 * MIB,
                turns_between_rests: 32,
                export_size: 1024 * MIB,
                tail_operations: 4_000_000,
                full_region: 4096 * MIB,
                restart_region: 10240 * MIB,
            }
        }
    }
}

/// The data that is written: as many pages as a client has in flight. They are in the processor's cache, like data that a client
/// has just produced. Both contestants copy from the same pages.
#[derive(Debug)]
pub struct Sources(Vec<AlignedBuffer>);

impl Sources {
    /// Random pages of `length` bytes.
    pub fn new(length: usize) -> Self {
        let mut random = SmallRng::seed_from_u64(1);
        // The pages take at most half of a small second-level cache.
        let count = ((512 << 10) / length).clamp(8, 64);
        Self(
            (0..count)
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
        &self.0[number % self.0.len()]
    }
}

/// Random offsets of `length` bytes on a device of `size`.
pub fn random_places(random: &mut SmallRng, size: u64, length: u64, count: usize) -> Vec<u64> {
    (0..count).map(|_| random.random_range(0..size / length) * length).collect()
}
