//! Caches that share the space of a transport: the bounds of their sizes.
//!
//! Invariants: a cache of shared size has at least its minimum; the bounds in the row are those of the last command that ended.
//! Earlier programs do not know them, and use the present size.
//!
//! Elsewhere: the division of space among such caches (`cbd-runtime`), how they change their size (`resize`).

use super::{BackendEntry, SEGMENTS_PER_LANE, Transport};
use crate::{Cache, Environment};
use alloc::{format, sync::Arc};
use cbd_format::BackendEntry as BackendRow;
use cbd_types::{BackendId, Error, ErrorKind, Result, Size};

/// The bounds of a cache that shares the space of its transport with others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SharedSpace {
    /// Segments that it keeps, the state segment included.
    pub min: u32,
    /// Segments up to which it grows, the state segment included.
    pub max: u32,
    /// Its weight among other such caches, 1 to [`WEIGHT_MAX`](Self::WEIGHT_MAX): a hit of a cache of weight 2 is worth two hits
    /// of a cache of weight 1.
    pub weight: u16,
}

impl SharedSpace {
    /// The largest weight.
    pub const WEIGHT_MAX: u16 = 1000;
}

/// Writes the bounds into a row; `None` for a cache of fixed size.
pub(super) fn write_shared(row: &mut BackendRow, shared: Option<SharedSpace>) {
    row.cache_min = shared.map_or(0, |shared| shared.min).into();
    row.cache_max = shared.map_or(0, |shared| shared.max).into();
    row.weight = shared.map_or(0, |shared| shared.weight).into();
}

/// The bounds in a row. Of impossible ones, only speed depends on them, so they are corrected instead of refused.
pub(super) fn read_shared(row: &BackendRow) -> Option<SharedSpace> {
    let (min, max) = (row.cache_min.get(), row.cache_max.get());
    (max > 0 && row.cache_id.get() != 0).then(|| SharedSpace {
        min: min.min(max),
        max,
        weight: row.weight.get().clamp(1, SharedSpace::WEIGHT_MAX),
    })
}

impl<E: Environment> Transport<E> {
    /// Stores whether the cache of a backend shares its space, and its bounds. Its size does not change.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::InvalidArgument`] for a backend without a cache, a weight of 0 or above
    /// [`SharedSpace::WEIGHT_MAX`], a minimum above the maximum or below what the lanes of the cache need, and bounds between
    /// which the present size is not; system errors of a sync.
    pub fn share_cache(&self, id: BackendId, shared: Option<SharedSpace>) -> Result<()> {
        let entry = self.backend(id)?;
        if entry.cache_segments == 0 {
            let text = format!("backend {id} has no cache to share space with");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        self.check_shared(shared, entry.cache_segments, entry.lanes)?;
        self.update_backend(id, |row| write_shared(row, shared))
    }

    /// Refuses bounds that a cache of `segments` segments and `lanes` lanes cannot have.
    pub(super) fn check_shared(&self, shared: Option<SharedSpace>, segments: u32, lanes: u32) -> Result<()> {
        let Some(SharedSpace { min, max, weight }) = shared else { return Ok(()) };
        let size = |segments: u32| Size(u64::from(segments) * self.segment_size);
        let invalid = |text| Err(Error::new(ErrorKind::InvalidArgument, text));
        if !(1..=SharedSpace::WEIGHT_MAX).contains(&weight) {
            return invalid(format!("a weight is 1 to {}, not {weight}", SharedSpace::WEIGHT_MAX));
        }
        if min > max {
            let text =
                format!("the minimum of the cache, {}, is above its maximum, {}", size(min), size(max));
            return invalid(text);
        }
        let least = lanes * SEGMENTS_PER_LANE + 1;
        if min < least {
            let (min, least) = (size(min), size(least));
            return invalid(format!(
                "the minimum of {min} is too small: the {lanes} lanes of the cache need {least} at least"
            ));
        }
        if !(min..=max).contains(&segments) {
            let (min, max, now) = (size(min), size(max), size(segments));
            return invalid(format!("the cache has {now}, which is not from {min} to {max}"));
        }
        Ok(())
    }

    /// Bytes of the largest size for which the hits of a cache are counted: its maximum, as far as the region has it, or twice a
    /// fixed size.
    pub(super) fn largest_size(&self, entry: &BackendEntry, cache: &Arc<Cache<E>>) -> u64 {
        let region = u64::from(self.segment_count()) * self.segment_size;
        match entry.shared {
            Some(shared) => u64::from(shared.max).saturating_mul(self.segment_size).min(region),
            None => cache.capacity() * 2,
        }
    }

    /// Begins again to count hits, for the sizes that the row of an open cache permits now.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], and as [`Cache::count_hits_up_to`].
    pub fn restart_hit_counts(&self, id: BackendId, cache: &Arc<Cache<E>>) -> Result<()> {
        cache.count_hits_up_to(self.largest_size(&self.backend(id)?, cache))
    }
}
