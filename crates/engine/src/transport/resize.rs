//! Caches that grow and shrink while they are in use.
//!
//! The row of a backend says how many segments its cache has, and is the commit point of both:
//! - growing: the new segments name the cache, durably; then the row has the new number; then the cache uses them;
//! - shrinking: the cache has collected free segments that no lane can take; then the row has the new number; then the segments name
//!   no cache.
//!
//! A crash between these steps leaves more segments that name the cache than its row says. When the cache is opened, free segments
//! beyond that number are released: the cache has its former size, or its new one. Earlier programs go by the segments, and use
//! all of them.
//!
//! Invariants: a segment that a lane uses names its cache durably; it names another one only after no lane uses it, and after the row
//! of the former cache says so.
//!
//! Elsewhere: which segments are given up, and when (`cache::resize`).

use super::{Tables, Transport};
use crate::{Cache, Environment, cache::Shrink};
use alloc::{format, sync::Arc, vec::Vec};
use cbd_format::{SegmentEntry, layout::Extent, tables::NO_BACKEND};
use cbd_types::{BackendId, Error, ErrorKind, MutationPoint, Result, SegmentId, Size};

/// The mutation points of a change of segment entries.
pub(super) const ENTRIES: [MutationPoint; 2] =
    [MutationPoint::BackendSegmentsFirstFence, MutationPoint::BackendSegmentsFence];

impl<E: Environment> Transport<E> {
    /// Gives an open cache `segments` more segments.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] if fewer are free; [`ErrorKind::Busy`] if `cache` is not the open cache of backend `id`;
    /// [`ErrorKind::System`] without memory, and system errors of a sync.
    pub fn grow_cache(&self, id: BackendId, cache: &Arc<Cache<E>>, segments: u32) -> Result<()> {
        let mut tables = self.tables.lock();
        tables.check_is_open(id, cache)?;
        self.take_segments(&mut tables, segments as usize)?;
        let free = tables.free_segments();
        let size = self.segment_size;
        let Some(new) = free.get(..segments as usize) else {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "the cache cannot grow by {}: only {} of the transport are free",
                    Size(u64::from(segments) * size),
                    Size(free.len() as u64 * size)
                ),
            ));
        };
        cache.prepare_segments(&self.layout(), new)?;
        // 1. They name the cache.
        self.store_entries(&mut tables, new, SegmentEntry::of_cache(id.0, cache.id()))?;
        // 2. The row. From here on they are the cache's.
        self.update_row(&mut tables, id, |row| row.segments = (row.segments.get() + segments).into())?;
        // 3. They are used.
        cache.add_segments(new);
        Ok(())
    }

    /// Ends a [`Shrink`] that lacks no segment: its segments are free for other caches.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if segments are still missing, or the cache is not the open cache of backend `id`; system errors of a
    /// sync. The cache has its former size then, or the new one.
    pub fn finish_shrink(&self, id: BackendId, shrink: Shrink<E>) -> Result<()> {
        let mut tables = self.tables.lock();
        tables.check_is_open(id, shrink.cache())?;
        let missing = shrink.missing();
        if missing > 0 {
            return Err(Error::new(ErrorKind::Busy, format!("{missing} segments are still in use")));
        }
        let segments = shrink.segments();
        // 1. The row. From here on they are not the cache's.
        self.update_row(&mut tables, id, |row| {
            row.segments = row.segments.get().saturating_sub(segments).into();
        })?;
        // 2. No cache owns them.
        let given_up = shrink.take();
        self.store_entries(&mut tables, &given_up, SegmentEntry::of_cache(NO_BACKEND, 0))?;
        self.release_unused(&mut tables);
        Ok(())
    }

    /// Releases the free segments that a cache owns beyond the number in its row, because a change of its size did not end.
    ///
    /// # Errors
    /// System errors of a sync, or of the memory.
    pub(super) fn return_surplus(
        &self,
        tables: &mut Tables<E>,
        id: BackendId,
        cache: &Arc<Cache<E>>,
    ) -> Result<()> {
        let recorded = tables.backends[id.index()].content().map_or(0, |row| row.segments.get());
        let surplus = (tables.segments_of(id).len() as u32).saturating_sub(recorded);
        if surplus == 0 {
            return Ok(());
        }
        let given_up = cache.give_up_free(surplus);
        self.store_entries(tables, &given_up, SegmentEntry::of_cache(NO_BACKEND, 0))
    }

    /// Durably stores `entry` for `segments`. In both slots of each entry, so that one
    /// failed page returns no segment to an earlier owner.
    pub(super) fn store_entries(
        &self,
        tables: &mut Tables<E>,
        segments: &[SegmentId],
        entry: SegmentEntry,
    ) -> Result<()> {
        let layout = self.layout();
        let is_changed =
            |extent: &Extent| segments.iter().any(|id| (extent.first..extent.end()).contains(&id.0));
        for fence in ENTRIES {
            let mut stored = self.region.nothing_in_flight();
            for segment in segments {
                stored = stored.and(tables.segments[segment.index()].store(&self.region, entry));
            }
            self.region.fence(fence, stored);
            for extent in layout.extents().filter(is_changed) {
                let (at, length) = (extent.segment_table, extent.table_length());
                self.region.sync(MutationPoint::BackendSegmentsSync, at, length)?;
            }
        }
        self.region.check_stores(MutationPoint::TableStoreCheck)
    }
}

impl<E: Environment> Tables<E> {
    fn check_is_open(&self, id: BackendId, cache: &Arc<Cache<E>>) -> Result<()> {
        let open: Vec<Arc<Cache<E>>> = self.open_caches(id).collect();
        if open.iter().any(|open| Arc::ptr_eq(open, cache)) && cache.is_running() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Busy, format!("the cache of backend {id} is not open")))
    }
}
