//! A sample of the requests of a device, of which its last ones are kept: what caches of other sizes would do with them.
//!
//! The device is divided into groups of 2^n neighbouring blocks. One block of each group, chosen by a hash, is in the sample, so that
//! a cache of a 2^n-th of the size that serves the sample alone has about the hit ratio of the whole.
//!
//! Invariants: a request outside of the sample costs a load, a multiplication and two comparisons; memory is fixed, and allocated once;
//! only the advice depends on it. A reader may see requests of different threads in another order, and one that is being replaced
//! twice or not at all.
//!
//! Elsewhere: what is kept of the requests before (`cbd-runtime`), what is made of the sample (`cbd-advise`).

use crate::Clock;
use alloc::{boxed::Box, vec::Vec};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, Operation};
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};

/// Requests that are kept: 224 KiB.
pub const SAMPLED_MAX: usize = 28 << 10;
/// Bytes of memory that they take.
pub const SAMPLE_BYTES: usize = SAMPLED_MAX * size_of::<AtomicU64>();
/// The part of the cache that the sample stands for.
const PART_BYTES: u64 = 16 << 20;
/// The densest and the sparsest sample: one block of 2^`shift`.
const SHIFT_MIN: u32 = 3;
const SHIFT_MAX: u32 = 32;
/// The mask if no block is in the sample.
const OFF: u64 = u64::MAX;
/// Groups of one request that are noted; a longer request counts with its first ones.
const GROUPS_MAX: u64 = 4096;
/// Bits of a group's number, and of the time in milliseconds.
const GROUP_BITS: u32 = 40;
const TIME_BITS: u32 = 22;
const READ: u64 = 1;
const WRITE: u64 = 2;

/// A block that was read or written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sampled {
    /// When it came, in milliseconds of the sample's clock, of which only the lowest 22 bits are known.
    pub ms: u32,
    /// Whether it was written; otherwise it was read.
    pub is_write: bool,
    /// The group of blocks that it stands for.
    pub group: u64,
}

impl Sampled {
    /// The time after which [`ms`](Self::ms) begins again at 0.
    pub const PERIOD_MS: u32 = 1 << TIME_BITS;

    fn of(entry: u64) -> Option<Self> {
        let action = entry >> (GROUP_BITS + TIME_BITS);
        let ms = (entry >> GROUP_BITS) as u32 & (Self::PERIOD_MS - 1);
        let group = entry & ((1 << GROUP_BITS) - 1);
        (action != 0).then_some(Self { ms, is_write: action == WRITE, group })
    }
}

/// The last requests of the sample.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct LastSampled {
    /// Blocks of a group; 0 if nothing is noted.
    pub one_of: u64,
    /// The number of the first one, of all that the sample has had since it began.
    pub first: u64,
    /// The requests, oldest first.
    pub requests: Vec<Sampled>,
}

/// The sample.
pub(crate) struct Sample {
    entries: Box<[AtomicU64]>,
    /// Gives the time of a request.
    clock: Clock,
    /// The number of the next entry.
    next: AtomicU64,
    /// The bits of a block's number that tell it from the others of its group.
    mask: AtomicU64,
    /// The number of the entry with which the present sample began.
    begun: AtomicU64,
}

impl Sample {
    /// A sample without blocks, and without memory.
    pub(crate) fn none() -> Self {
        let (next, begun) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { entries: Box::default(), clock: || 0, next, mask: AtomicU64::new(OFF), begun }
    }

    /// A sample without blocks; [`none`](Self::none) without memory.
    pub(crate) fn new(clock: Clock) -> Self {
        let mut entries = Vec::new();
        if entries.try_reserve_exact(SAMPLED_MAX).is_err() {
            return Self::none();
        }
        entries.resize_with(SAMPLED_MAX, || AtomicU64::new(0));
        Self { entries: entries.into_boxed_slice(), clock, ..Self::none() }
    }

    /// Makes the sample one for a cache of `bytes`, 0 for none. It begins again unless it has about the right density.
    pub(crate) fn set_cache(&self, bytes: u64) {
        let wanted = match bytes {
            _ if self.entries.is_empty() => OFF,
            0 => OFF,
            bytes => (1 << (bytes / PART_BYTES).max(1).ilog2().clamp(SHIFT_MIN, SHIFT_MAX)) - 1,
        };
        let mask = self.mask.load(Ordering::Relaxed);
        let is_near = mask != OFF && wanted != OFF && mask.count_ones().abs_diff(wanted.count_ones()) <= 1;
        if mask != wanted && !is_near {
            self.begun.store(self.next.load(Ordering::Relaxed), Ordering::Relaxed);
            self.mask.store(wanted, Ordering::Relaxed);
        }
    }

    /// Notes a request that comes now.
    #[inline]
    pub(crate) fn note(&self, operation: Operation, range: ByteRange) {
        let mask = self.mask.load(Ordering::Relaxed);
        let (first, last) = (range.start / CHECKSUM_BLOCK, range.end.saturating_sub(1) / CHECKSUM_BLOCK);
        if first != last || chosen(first, mask) == first {
            self.note_blocks(operation, first, last, mask);
        }
    }

    #[cold]
    #[inline(never)]
    fn note_blocks(&self, operation: Operation, first: u64, last: u64, mask: u64) {
        if mask == OFF {
            return;
        }
        let shift = mask.count_ones();
        let action = match operation {
            Operation::Read => READ,
            Operation::Write => WRITE,
            _ => return,
        };
        let time = ((self.clock)() / 1_000_000) & u64::from(Sampled::PERIOD_MS - 1);
        for group in (first >> shift..=last >> shift).take(GROUPS_MAX as usize) {
            if !(first..=last).contains(&chosen(group << shift, mask)) || group >> GROUP_BITS != 0 {
                continue;
            }
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            if let Some(entry) = self.entries.get(number as usize % SAMPLED_MAX) {
                let noted = action << (GROUP_BITS + TIME_BITS) | time << GROUP_BITS | group;
                entry.store(noted, Ordering::Relaxed);
            }
        }
    }

    /// The last requests of the sample, from number `from` on.
    pub(crate) fn last(&self, from: u64) -> LastSampled {
        let mask = self.mask.load(Ordering::Relaxed);
        if mask == OFF {
            return LastSampled::default();
        }
        let kept = self.kept();
        let first = kept.start.max(from).min(kept.end);
        let mut requests = Vec::new();
        if requests.try_reserve_exact((kept.end - first) as usize).is_ok() {
            requests.extend((first..kept.end).filter_map(|number| self.entry(number)));
        }
        LastSampled { one_of: mask + 1, first: kept.end - requests.len() as u64, requests }
    }

    /// Calls `visit` with the requests of these numbers, as far as they are kept, in order. Returns the blocks of a group; 0 if nothing
    /// is noted.
    pub(crate) fn visit(&self, numbers: Range<u64>, visit: &mut dyn FnMut(Sampled)) -> u64 {
        let mask = self.mask.load(Ordering::Relaxed);
        if mask == OFF {
            return 0;
        }
        let kept = self.kept();
        let numbers = numbers.start.max(kept.start)..numbers.end.min(kept.end);
        numbers.filter_map(|number| self.entry(number)).for_each(visit);
        mask + 1
    }

    /// The numbers of the requests that are kept.
    fn kept(&self) -> Range<u64> {
        let (next, begun) = (self.next.load(Ordering::Relaxed), self.begun.load(Ordering::Relaxed));
        next.saturating_sub(SAMPLED_MAX as u64).max(begun.min(next))..next
    }

    fn entry(&self, number: u64) -> Option<Sampled> {
        let entry = self.entries.get(number as usize % SAMPLED_MAX)?;
        Sampled::of(entry.load(Ordering::Relaxed))
    }

    /// The number of requests that the sample has had.
    pub(crate) fn count(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }
}

/// The block in the sample, of those whose numbers differ from `block` in bits of `mask` alone. Shifts by a constant only: these are
/// for each request.
const fn chosen(block: u64, mask: u64) -> u64 {
    let group = block & !mask;
    // Of the lowest 32 bits of the group's number times this, the highest ones: the fractional part of a multiple of the golden ratio.
    group | (group.wrapping_mul(0x9e37_79b9) >> 32) & mask
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn sample(bytes: u64) -> Sample {
        let sample = Sample::new(|| 5_000_000);
        sample.set_cache(bytes);
        sample
    }

    fn note(sample: &Sample, operation: Operation, range: ByteRange) {
        sample.note(operation, range);
    }

    fn blocks(first: u64, count: u64) -> ByteRange {
        ByteRange::at(first * CHECKSUM_BLOCK, count * CHECKSUM_BLOCK)
    }

    #[test]
    fn one_block_of_each_group_is_in_the_sample_whatever_the_length_of_requests() {
        let (single, long) = (sample(1 << 30), sample(1 << 30));
        (0..6400).for_each(|block| note(&single, Operation::Read, blocks(block, 1)));
        (0..100).for_each(|request| note(&long, Operation::Read, blocks(request * 64, 64)));
        let of_single = single.last(0);
        assert_eq!((of_single.one_of, of_single.first, of_single.requests.len()), (64, 0, 100));
        assert_eq!(of_single, long.last(0));
        assert_eq!(of_single.requests[7], Sampled { ms: 5, is_write: false, group: 7 });
    }

    #[test]
    fn the_blocks_of_neighbouring_groups_are_in_all_parts_of_their_groups() {
        for shift in SHIFT_MIN..=16 {
            let mask = (1_u64 << shift) - 1;
            let eighth = |group: u64| ((chosen(group << shift, mask) & mask) << 3 >> shift) as usize;
            for first in (0..100_000).step_by(8) {
                let mut found = [0; 8];
                (first..first + 8).for_each(|group| found[eighth(group)] += 1);
                assert!(found.iter().filter(|count| **count > 0).count() >= 5, "{shift} {first}: {found:?}");
            }
        }
    }

    #[test]
    fn the_last_requests_are_kept_in_order() {
        let sample = sample(64 << 20);
        note(&sample, Operation::Flush, ByteRange { start: 0, end: 0 });
        note(&sample, Operation::Discard, blocks(0, 1 << 20));
        let count = SAMPLED_MAX as u64 + 1000;
        (0..count).for_each(|group| note(&sample, Operation::Write, blocks(group * 8, 8)));
        let last = sample.last(0);
        assert_eq!((last.first, last.requests.len(), sample.count()), (1000, SAMPLED_MAX, count));
        let groups: Vec<u64> = last.requests.iter().map(|sampled| sampled.group).collect();
        assert_eq!(groups, (1000..count).collect::<Vec<_>>());
        assert!(last.requests.iter().all(|sampled| sampled.is_write));
        let tail = sample.last(count - 5);
        assert_eq!((tail.first, &tail.requests[..]), (count - 5, &last.requests[SAMPLED_MAX - 5..]));
        let visited = |numbers| {
            let mut groups = Vec::new();
            assert_eq!(sample.visit(numbers, &mut |sampled| groups.push(sampled.group)), 8);
            groups
        };
        assert_eq!(visited(0..1003), [1000, 1001, 1002]);
        assert_eq!(visited(count - 2..u64::MAX), [count - 2, count - 1]);
    }

    #[test]
    fn a_cache_of_another_size_begins_another_sample_and_no_cache_ends_it() {
        let sample = sample(1 << 30);
        note(&sample, Operation::Read, blocks(0, 64));
        sample.set_cache(2 << 30);
        assert_eq!(sample.last(0).requests.len(), 1, "a size that is little larger keeps the sample");
        sample.set_cache(8 << 30);
        assert_eq!(sample.last(0), LastSampled { one_of: 512, first: 1, requests: vec![] });
        sample.set_cache(0);
        note(&sample, Operation::Read, blocks(0, 512));
        assert_eq!(sample.last(0), LastSampled::default());
        let none = Sample::none();
        none.set_cache(1 << 30);
        note(&none, Operation::Read, blocks(0, 512));
        assert_eq!(none.last(0), LastSampled::default());
    }
}
