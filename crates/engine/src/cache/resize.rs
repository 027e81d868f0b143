//! Segments that an open cache gets and gives up.
//!
//! A cache gives up free segments only. While it is to give up more than are free, reclaim runs as if it were above `gc_percent`,
//! and of the segments that are released each second one goes to waiting writers, so that these go on.
//!
//! Invariants: a segment that is given up belongs to no lane, and no lane can take it; until the transport has stored that it is not
//! the cache's any more, it can be taken back.
//!
//! Elsewhere: the tables (`transport::resize`), the list of free segments (`base::pool`).

use super::Cache;
use crate::{
    Environment,
    base::{Lack, claimed_generation},
    lane_map::SEGMENTS_PER_LANE,
};
use alloc::{format, sync::Arc, vec::Vec};
use cbd_format::Layout;
use cbd_types::{Error, ErrorKind, Result, SegmentId, Size};

/// Segments that a cache is giving up. Its drop takes them back.
#[must_use = "the segments are taken back when it is dropped"]
pub struct Shrink<E: Environment> {
    cache: Arc<Cache<E>>,
    segments: u32,
}

impl<E: Environment> Cache<E> {
    /// Bytes of all log segments.
    pub fn capacity(&self) -> u64 {
        self.base().capacity()
    }

    /// Bytes of the log segments that the lanes of the cache need.
    pub fn capacity_min(&self) -> u64 {
        let lanes = self.base().identity().lanes.lanes;
        u64::from(lanes * SEGMENTS_PER_LANE) * self.base().shape().size
    }

    /// Begins to give up `segments` segments. It has ended when [`Shrink::missing`] is 0; the background worker frees what is
    /// missing.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for none; [`ErrorKind::Busy`] if the cache is giving up segments already;
    /// [`ErrorKind::NoSpace`] if its lanes need more than it would keep, or it holds more than that which the backing device does
    /// not take; [`ErrorKind::System`] without memory.
    pub fn begin_shrink(self: &Arc<Self>, segments: u32) -> Result<Shrink<E>> {
        let shrink = self.begin_clean_shrink(segments)?;
        if shrink.missing() > 0 {
            // What is dirty cannot be reclaimed, and a pause of writeback would keep it so.
            let _ = self.request_drain();
        }
        Ok(shrink)
    }

    /// As [`begin_shrink`](Self::begin_shrink), but writeback keeps its pace: reclaim frees only what the backing device has.
    ///
    /// # Errors
    /// As [`begin_shrink`](Self::begin_shrink).
    pub fn begin_clean_shrink(self: &Arc<Self>, segments: u32) -> Result<Shrink<E>> {
        let (base, size) = (self.base(), self.base().shape().size);
        if segments == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "a cache shrinks by one segment at least"));
        }
        let kept = self.capacity().saturating_sub(u64::from(segments) * size);
        let least = self.capacity_min();
        if kept < least {
            let text = format!(
                "the cache cannot shrink to {}: its {} lanes need {} at least",
                Size(kept + size),
                base.identity().lanes.lanes,
                Size(least + size)
            );
            return Err(Error::new(ErrorKind::NoSpace, text));
        }
        self.check_pinned(self.pinned_bytes(), (kept / size) as u32, self.settings().pin_percent)?;
        let status = self.status();
        // What is dirty is written first, unless the backing device does not take it.
        let is_failing = status.backing_trouble.is_some();
        let stuck =
            if is_failing { status.missing_bytes() } else { status.parked_bytes + status.quarantined_bytes };
        if stuck > kept {
            let text = format!(
                "the cache cannot shrink to {}: it holds {} that the backing device refuses or lacks; status lists the ranges",
                Size(kept + size),
                Size(stuck)
            );
            return Err(Error::new(ErrorKind::NoSpace, text));
        }
        base.pool().give_up(segments).map_err(|lack| match lack {
            Lack::Memory | Lack::Data => {
                Error::new(ErrorKind::System, "no memory for the list of segments that are given up")
            }
            Lack::Space => Error::new(ErrorKind::Busy, "the cache is giving up segments already"),
        })?;
        base.wakeups().wake();
        Ok(Shrink { cache: Arc::clone(self), segments })
    }

    /// Gives up free segments, at most `segments` and only those that are not left to writers. From here on they are not segments
    /// of the cache.
    pub(crate) fn give_up_free(&self, segments: u32) -> Vec<SegmentId> {
        let base = self.base();
        let spare = (self.capacity() - self.capacity_min().min(self.capacity())) / base.shape().size;
        if base.pool().give_up(segments.min(spare as u32)).is_err() {
            return Vec::new();
        }
        let given_up = base.pool().take_given_up();
        base.count_fewer_segments(given_up.len() as u32);
        given_up.into_iter().map(SegmentId).collect()
    }

    /// Notes the state of `segments` of a region with this layout, which no cache owns, before they become those of this one. The
    /// caller has the lock of the tables.
    ///
    /// # Errors
    /// [`ErrorKind::System`] without memory for them; nothing has changed then.
    pub(crate) fn prepare_segments(&self, layout: &Layout, segments: &[SegmentId]) -> Result<()> {
        let base = self.base();
        base.add_segments_of(layout).map_err(|_| {
            Error::new(ErrorKind::System, "no memory for the segments that the region has got")
        })?;
        base.pool()
            .reserve_for(base.segment_count() + segments.len() as u32)
            .map_err(|_| Error::new(ErrorKind::System, "no memory for the list of free segments"))?;
        for id in segments {
            let segment = base.segment(id.0);
            // A record of an earlier life of the segment has a lower generation.
            segment.set_claimed_generation(claimed_generation(base.region(), base.shape(), segment.base()));
        }
        Ok(())
    }

    /// Begins to use [prepared](Self::prepare_segments) segments, which are durably those of this cache.
    pub(crate) fn add_segments(&self, segments: &[SegmentId]) {
        self.base().count_more_segments(segments.len() as u32);
        segments.iter().for_each(|id| self.base().pool().release(id.0));
    }
}

impl<E: Environment> Shrink<E> {
    /// The number of segments that are not free yet.
    pub fn missing(&self) -> u32 {
        self.cache.base().pool().owed()
    }

    /// The number of segments that the cache gives up.
    pub const fn segments(&self) -> u32 {
        self.segments
    }

    /// Gives up no more segments than are free already; returns their number.
    pub fn settle(&mut self) -> u32 {
        self.segments = self.cache.base().pool().give_up_no_more();
        self.segments
    }

    /// The cache.
    pub(crate) const fn cache(&self) -> &Arc<Cache<E>> {
        &self.cache
    }

    /// Ends with what is given up: from here on these are not segments of the cache. The caller makes that durable before another
    /// cache gets them.
    pub(crate) fn take(mut self) -> Vec<SegmentId> {
        // Its drop has nothing to take back, and must not take what another one collects.
        self.segments = 0;
        let base = self.cache.base();
        let given_up = base.pool().take_given_up();
        base.count_fewer_segments(given_up.len() as u32);
        given_up.into_iter().map(SegmentId).collect()
    }
}

impl<E: Environment> Drop for Shrink<E> {
    fn drop(&mut self) {
        if self.segments == 0 {
            return;
        }
        let pool = self.cache.base().pool();
        pool.take_given_up().into_iter().for_each(|segment| pool.release(segment));
    }
}
