//! The segments of a cache: the state of each while the cache is open, and the readers that use it.
//!
//! There is a state for every segment of the region, by its number there, so that segments can come and go. The cache uses those
//! that it owns. A region that grows while the cache is open gets further states; those that are there stay where they are.
//!
//! Invariants: a segment that a reader has pinned is not released to the pool; a segment is released once for each of its lives.

use super::Base;
use crate::{
    Environment,
    position::{Location, Place},
    sync::{SharedU32, SharedU64},
};
use alloc::{boxed::Box, collections::TryReserveError, vec::Vec};
use cbd_format::{Layout, RecordPlace, SegmentHeader, SegmentShape, record::bytes_of};
use cbd_types::{LaneId, Pmem, Region, SegmentId};
use core::sync::atomic::Ordering;
use once_cell::race::OnceBox;

/// Bit of [`Segment::pins`]: reclaim has finished with the segment; the last reader releases it.
const RETIRED: u32 = 1 << 31;

/// Bit of [`Segment::pins`]: the segment was released. A pin that is taken now is an error, and must not release it again.
const RELEASED: u32 = 1 << 30;

/// The state of a segment while the cache is open.
pub(crate) struct Segment<E> {
    id: SegmentId,
    /// First byte in the region.
    base: u64,
    generation: SharedU32<E>,
    salt: SharedU64<E>,
    ordinal: SharedU64<E>,
    /// The lane whose log holds it.
    lane: SharedU32<E>,
    /// Number of readers that copy from the segment at this moment, and [`RETIRED`].
    pins: SharedU32<E>,
}

impl<E: Environment> Segment<E> {
    pub(crate) const fn new(id: SegmentId, base: u64) -> Self {
        Self {
            id,
            base,
            generation: SharedU32::new(0),
            salt: SharedU64::new(0),
            ordinal: SharedU64::new(0),
            lane: SharedU32::new(0),
            pins: SharedU32::new(0),
        }
    }

    /// Its number on the transport.
    #[inline]
    pub(crate) const fn id(&self) -> SegmentId {
        self.id
    }

    /// Its first byte in the region.
    #[inline]
    pub(crate) const fn base(&self) -> u64 {
        self.base
    }

    /// The generation of its records.
    #[inline]
    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Relaxed)
    }

    /// The highest generation that a header of the segment claims, before recovery has validated the header.
    pub(crate) fn set_claimed_generation(&self, claimed: u32) {
        self.generation.store(claimed, Ordering::Relaxed);
    }

    /// The ordinal in its lane.
    #[inline]
    pub(crate) fn ordinal(&self) -> u64 {
        self.ordinal.load(Ordering::Relaxed)
    }

    /// The lane whose log holds it.
    #[inline]
    pub(crate) fn lane(&self) -> LaneId {
        LaneId(self.lane.load(Ordering::Relaxed))
    }

    /// A new life of the segment, in the log of `lane`. No thread reads it: it comes from the pool.
    pub(crate) fn begin(&self, lane: LaneId, generation: u32, salt: u64, ordinal: u64) {
        self.lane.store(lane.0, Ordering::Relaxed);
        self.generation.store(generation, Ordering::Relaxed);
        self.salt.store(salt, Ordering::Relaxed);
        self.ordinal.store(ordinal, Ordering::Relaxed);
        self.pins.store(0, Ordering::Release);
    }

    /// The seed of the checksum of a line in `slot`.
    #[inline]
    pub(crate) fn place(&self, slot: u32) -> RecordPlace {
        RecordPlace { salt: self.salt.load(Ordering::Relaxed), segment: self.id, slot }
    }

    /// The number of readers that have pinned it.
    pub(crate) fn readers(&self) -> u32 {
        self.pins.load(Ordering::Acquire) & !(RETIRED | RELEASED)
    }

    /// Keeps the segment from being reused. Under the lane's lock, while the index still names the segment.
    #[inline]
    pub(crate) fn pin(&self) {
        self.pins.fetch_add(1, Ordering::Acquire);
    }
}

/// The segments of the region, by their numbers.
pub(super) struct Segments<E> {
    /// Those that the region had when the cache was opened.
    first: Box<[Segment<E>]>,
    /// Those that it has got since then.
    later: OnceBox<[Later<E>; 1]>,
}

/// Segments that the region has got while the cache is open.
struct Later<E> {
    /// The number of the first one.
    first: u32,
    segments: Box<[Segment<E>]>,
    /// Those that it got after them.
    later: OnceBox<[Later<E>; 1]>,
}

fn one<T>(cell: &OnceBox<[T; 1]>) -> Option<&T> {
    cell.get().map(|[one]| one)
}

impl<E: Environment> Segments<E> {
    pub(super) fn new(segments: Vec<Segment<E>>) -> Self {
        Self { first: segments.into_boxed_slice(), later: OnceBox::new() }
    }

    fn later(&self) -> impl Iterator<Item = &Later<E>> {
        core::iter::successors(one(&self.later), |known| one(&known.later))
    }

    /// The segment with a number behind those of [`first`](Self::first).
    #[cold]
    #[inline(never)]
    fn in_later(&self, number: u32) -> Option<&Segment<E>> {
        self.later().find_map(|later| later.segments.get(number.checked_sub(later.first)? as usize))
    }

    /// Adds the segments that a region with this layout has beyond those that are there. Not concurrently with itself.
    fn add(&self, layout: &Layout) -> Result<(), TryReserveError> {
        let known = self.first.len() + self.later().map(|later| later.segments.len()).sum::<usize>();
        let all = known as u32..layout.segment_count;
        if all.is_empty() {
            return Ok(());
        }
        let free = self.later().last().map_or(&self.later, |last| &last.later);
        let mut segments = Vec::new();
        segments.try_reserve_exact(all.len())?;
        let mut later = Vec::new();
        later.try_reserve_exact(1)?;
        let first = all.start;
        segments.extend(all.map(SegmentId).map(|id| Segment::new(id, layout.segment_base(id))));
        later.push(Later { first, segments: segments.into_boxed_slice(), later: OnceBox::new() });
        if let Ok(later) = later.into_boxed_slice().try_into() {
            let _ = free.set(later);
        }
        Ok(())
    }
}

/// The highest generation that the headers at `base` claim, whatever they are of.
pub(crate) fn claimed_generation<P: Pmem>(region: &Region<P>, shape: SegmentShape, base: u64) -> u32 {
    let mut claimed = 0;
    for at in [base, base + shape.header_copy()] {
        let mut bytes = [0; size_of::<SegmentHeader>()];
        if region.load(at, &mut bytes).is_err() {
            continue;
        }
        let Some(header) = SegmentHeader::decode(&bytes) else { continue };
        if bytes_of(&[header.claimed_generation()]) != [0xff; 4] {
            claimed = claimed.max(header.claimed_generation());
        }
    }
    // A forged or torn header may claim any number; half of the range is always left.
    claimed & (u32::MAX >> 1)
}

impl<E: Environment> Base<E> {
    /// The segment with this number.
    #[inline]
    pub(crate) fn segment(&self, number: u32) -> &Segment<E> {
        match self.segments.first.get(number as usize) {
            Some(segment) => segment,
            None => self.segments.in_later(number).expect("a segment of the region"),
        }
    }

    /// Adds the segments that the region has got since the cache was opened. The caller has the lock of the transport's tables.
    ///
    /// # Errors
    /// Without memory for them; nothing has changed then.
    pub(crate) fn add_segments_of(&self, layout: &Layout) -> Result<(), TryReserveError> {
        self.segments.add(layout)
    }

    /// The position of a record in the history of its lane.
    #[inline]
    pub(crate) fn place_of(&self, location: Location) -> Place {
        (self.segment(location.segment).ordinal(), location.slot)
    }

    /// A reader has finished with a segment.
    #[inline]
    pub(crate) fn unpin(&self, segment: u32) {
        let pins = self.segment(segment).pins.fetch_sub(1, Ordering::AcqRel);
        debug_assert!(pins & !(RETIRED | RELEASED) > 0, "segment {segment} is not pinned");
        if pins == RETIRED | 1 {
            self.release(segment);
            if self.pool.free() <= self.pool.reserve() {
                // Reclaim may have found no space for what it must carry, and the pool wakes only clients.
                self.wakeups.wake();
            }
        }
    }

    /// Reclaim has finished with a segment: it returns to the pool now, or when its last reader unpins it.
    pub(crate) fn retire(&self, segment: u32) {
        let pins = self.segment(segment).pins.fetch_or(RETIRED, Ordering::AcqRel);
        if pins == 0 {
            self.release(segment);
        }
    }

    fn release(&self, segment: u32) {
        self.segment(segment).pins.fetch_or(RELEASED, Ordering::AcqRel);
        self.pool.release(segment);
    }
}

#[cfg(test)]
mod tests;
