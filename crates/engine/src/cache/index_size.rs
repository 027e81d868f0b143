//! The indexes and admissions of a running cache get another size.
//!
//! Invariants: a lane is locked for one bounded step at a time, and unlocked between steps; memory is allocated and freed only
//! while no lane is locked. A resize that ends early, at an error, leaves lanes that serve requests, and the next one goes on
//! from there.
//!
//! Elsewhere: a step in a locked lane (`lane::resize`).

use super::Cache;
use crate::{
    Environment,
    lane::{Resize, Stepped},
};
use alloc::format;
use cbd_types::{CHECKSUM_BLOCK, Error, ErrorKind, Result};

/// The overhead of a block in a segment in bytes: its record, with the mirror.
const RECORDS: u64 = 128;

/// The index of a cache on its way to another size; see [`Cache::step_index_resize`].
pub struct IndexResize {
    blocks_per_lane: usize,
    /// The lane that is being resized.
    lane: usize,
    memory: Option<Resize>,
}

impl IndexResize {
    /// A resize to indexes for `blocks_per_lane` blocks in each lane.
    #[must_use]
    pub const fn new(blocks_per_lane: usize) -> Self {
        Self { blocks_per_lane, lane: 0, memory: None }
    }

    fn no_memory(&self) -> Error {
        Error::new(
            ErrorKind::System,
            format!(
                "no memory to resize the index of lane {} to {} blocks: the cache goes on with the old size there; free memory, \
                 and resize again",
                self.lane, self.blocks_per_lane
            ),
        )
    }
}

impl core::fmt::Debug for IndexResize {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        out.debug_struct("IndexResize")
            .field("blocks_per_lane", &self.blocks_per_lane)
            .field("lane", &self.lane)
            .finish_non_exhaustive()
    }
}

impl<E: Environment> Cache<E> {
    /// The blocks for which a lane of this cache has an index if the cache has `segments` log segments: as many as fit if the lanes
    /// share them evenly, each block with a record of its own.
    pub fn index_blocks_per_lane(&self, segments: u32) -> usize {
        index_blocks_per_lane(u64::from(segments), self.base.shape().size, self.lanes.len() as u64)
    }

    /// Resizes the indexes and the admissions of all lanes to `blocks_per_lane` blocks each. A call for a thread that may work:
    /// it takes some milliseconds for each 64 MiB of cached data. Calls `between` after each step, while no lane is locked: the
    /// lock of a lane is not fair, so let a thread that waits for it go first, as `std::thread::yield_now` does.
    ///
    /// Concurrent calls are harmless; each lane ends with the size of one of them.
    ///
    /// # Errors
    /// Those of [`step_index_resize`](Self::step_index_resize).
    pub fn resize_index(&self, blocks_per_lane: usize, mut between: impl FnMut()) -> Result<()> {
        let mut resize = IndexResize::new(blocks_per_lane);
        while self.step_index_resize(&mut resize)? {
            between();
        }
        Ok(())
    }

    /// Takes a step of a resize; returns whether more are to follow. Requests wait for a step at most some tens of
    /// microseconds. A resize that is never stepped again costs memory, and nothing else; another one completes it first.
    ///
    /// # Errors
    /// [`ErrorKind::Stopped`] when the cache was stopped, and [`ErrorKind::System`] if the system refuses the memory. The cache
    /// then serves requests as before, and a further step continues.
    pub fn step_index_resize(&self, resize: &mut IndexResize) -> Result<bool> {
        self.base.gate().check_running()?;
        let Some(lane) = self.lanes.get(resize.lane) else { return Ok(false) };
        let Some(memory) = &mut resize.memory else {
            // A resize that another call has left on its way is completed first.
            let is_sized = lane.is_sized_for(resize.blocks_per_lane);
            let memory =
                if is_sized { Some(Resize::of_begun()) } else { Resize::new(resize.blocks_per_lane) };
            let mut memory = memory.ok_or_else(|| resize.no_memory())?;
            if !is_sized && !lane.begin_resize(&mut memory) {
                memory = Resize::of_begun();
            }
            resize.memory = Some(memory);
            return Ok(true);
        };
        let wanted = match lane.resize_step(memory) {
            Stepped::More => 1,
            Stepped::Lacks(blocks) => blocks,
            Stepped::Done => {
                resize.memory = None;
                if lane.is_sized_for(resize.blocks_per_lane) {
                    resize.lane += 1;
                }
                return Ok(resize.lane < self.lanes.len());
            }
        };
        // A spare slab is always there, so that few steps lack one.
        memory.add(wanted).ok_or_else(|| resize.no_memory())?;
        Ok(true)
    }
}

/// See [`Cache::index_blocks_per_lane`].
pub(crate) const fn index_blocks_per_lane(segments: u64, segment_size: u64, lanes: u64) -> usize {
    (segments * segment_size / (CHECKSUM_BLOCK + RECORDS) / lanes) as usize
}
