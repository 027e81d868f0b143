//! The map from bytes of the device to lanes.
//!
//! Invariants: each block has one lane and a number of its own there; the map is a value and never changes.

use cbd_types::{ByteRange, CHECKSUM_BLOCK, CHUNK, LaneId};
use core::ops::RangeInclusive;

/// Minimum number of segments for each lane.
pub(crate) const SEGMENTS_PER_LANE: u32 = 8;

/// The lane of each byte of the device, and the number of its block there.
///
/// Chunks are assigned to the lanes in rows; each row starts at another lane, so that accesses of a constant stride do not all
/// fall into one lane.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneMap {
    /// A power of two: every request divides by it, and uses a shift where possible.
    pub lanes: u32,
}

const BLOCKS_PER_CHUNK: u64 = CHUNK / CHECKSUM_BLOCK;

impl LaneMap {
    /// The largest device that the block numbers of this many lanes reach, in bytes.
    pub(crate) const fn device_max(&self) -> u64 {
        (u32::MAX as u64 / BLOCKS_PER_CHUNK) * CHUNK * self.lanes as u64
    }

    pub(crate) const fn lane_of(&self, at: u64) -> LaneId {
        let chunk = at / CHUNK;
        LaneId(self.column(chunk + Self::turn(self.row(chunk))) as u32)
    }

    const fn row(&self, chunk: u64) -> u64 {
        chunk >> self.lanes.trailing_zeros()
    }

    const fn column(&self, number: u64) -> u64 {
        number & (self.lanes as u64 - 1)
    }

    /// Number of the block in its lane.
    pub(crate) const fn key(&self, at: u64) -> u32 {
        let row = self.row(at / CHUNK);
        (row * BLOCKS_PER_CHUNK + at % CHUNK / CHECKSUM_BLOCK) as u32
    }

    /// Whether `range` lies in one chunk, and so in one lane.
    pub(crate) const fn is_in_one_chunk(&self, range: ByteRange) -> bool {
        range.end - range.start <= CHUNK - range.start % CHUNK
    }

    /// The numbers in their lane of the blocks that `range`, which lies in one chunk, touches.
    pub(crate) const fn keys(&self, range: ByteRange) -> RangeInclusive<u32> {
        self.key(range.start)..=self.key(range.end - 1)
    }

    /// The first byte of a lane's block: the inverse of [`key`](Self::key).
    pub(crate) const fn offset_of(&self, lane: LaneId, key: u32) -> u64 {
        let lanes = self.lanes as u64;
        let row = key as u64 / BLOCKS_PER_CHUNK;
        let column = (lane.0 as u64 + lanes - Self::turn(row) % lanes) % lanes;
        (row * lanes + column) * CHUNK + key as u64 % BLOCKS_PER_CHUNK * CHECKSUM_BLOCK
    }

    /// The parts of `range` that belong to `lane`, in order.
    pub(crate) fn of_lane(self, lane: LaneId, range: ByteRange) -> impl Iterator<Item = ByteRange> {
        let lanes = u64::from(self.lanes);
        let row_bytes = lanes * CHUNK;
        let rows = if range.is_empty() || lanes == 1 {
            0..0
        } else {
            range.start / row_bytes..(range.end - 1) / row_bytes + 1
        };
        // A single lane has all of the range, in one part.
        let whole = (lanes == 1 && !range.is_empty()).then_some(range);
        whole.into_iter().chain(rows.filter_map(move |row| {
            let column = (u64::from(lane.0) + lanes - Self::turn(row) % lanes) % lanes;
            ByteRange::at((row * lanes + column) * CHUNK, CHUNK).intersection(&range)
        }))
    }

    /// How many bytes of `range` belong to `lane`.
    pub(crate) fn bytes_of(self, lane: LaneId, range: ByteRange) -> u64 {
        let row_bytes = u64::from(self.lanes) * CHUNK;
        let (first, end) = (range.start.div_ceil(row_bytes), range.end / row_bytes);
        let counted = |part: ByteRange| self.of_lane(lane, part).map(|part| part.len()).sum::<u64>();
        if first >= end {
            return counted(range);
        }
        // Each whole row has one chunk of each lane: a device can have millions of rows.
        let head = ByteRange { start: range.start, end: first * row_bytes };
        let rest = ByteRange { start: end * row_bytes, end: range.end };
        (end - first) * CHUNK + counted(head) + counted(rest)
    }

    /// The lanes that `range` touches, each once, in order of their numbers from `from` on.
    pub(crate) fn touched_by(self, range: ByteRange, from: u32) -> impl Iterator<Item = LaneId> {
        (from..self.lanes).map(LaneId).filter(move |lane| self.of_lane(*lane, range).next().is_some())
    }

    const fn turn(row: u64) -> u64 {
        (row.wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> 40
    }
}

#[cfg(test)]
mod tests;
