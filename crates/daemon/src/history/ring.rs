//! The last points of a backend, in memory that is taken as they come.
//!
//! Invariants: the point of a tick has one place, so that a gap needs none, and no point is older than the ring is long.
//! Memory is taken in blocks; a point for which there is none is left out.

use super::point::Point;

/// Blocks of a ring.
const BLOCKS: u32 = 10;

/// The points of the last ticks.
#[derive(Debug)]
pub(super) struct Ring {
    length: u32,
    blocks: [Option<Box<[Point]>>; BLOCKS as usize],
}

impl Ring {
    /// A ring for `length` ticks, a multiple of the number of blocks.
    pub(super) const fn new(length: u32) -> Self {
        assert!(length.is_multiple_of(BLOCKS));
        Self { length, blocks: [const { None }; BLOCKS as usize] }
    }

    /// The block and the place in it of a tick.
    const fn place(&self, tick: u32) -> (usize, usize) {
        let (at, block) = (tick % self.length, self.length / BLOCKS);
        ((at / block) as usize, (at % block) as usize)
    }

    /// Keeps a point, in place of the one that is as old as the ring is long.
    pub(super) fn put(&mut self, point: Point) {
        let (block, place) = self.place(point.tick);
        let block = &mut self.blocks[block];
        if block.is_none() {
            let length = (self.length / BLOCKS) as usize;
            let mut points = Vec::new();
            if points.try_reserve_exact(length).is_err() {
                return;
            }
            points.resize(length, Point::default());
            *block = Some(points.into_boxed_slice());
        }
        if let Some(kept) = block.as_mut().and_then(|points| points.get_mut(place)) {
            *kept = point;
        }
    }

    /// Up to `limit` points behind the tick `since` and up to `last`, the oldest first.
    pub(super) fn after(&self, since: u32, last: u32, limit: usize) -> Vec<Point> {
        let first = since.saturating_add(1).max(last.saturating_sub(self.length - 1));
        (first..=last).filter_map(|tick| self.get(tick)).take(limit).collect()
    }

    fn get(&self, tick: u32) -> Option<Point> {
        let (block, place) = self.place(tick);
        self.blocks[block].as_ref()?.get(place).copied().filter(|point| point.tick == tick)
    }

    /// The memory of the points.
    pub(super) fn bytes(&self) -> usize {
        self.blocks.iter().flatten().map(|block| size_of_val(&**block)).sum()
    }
}
