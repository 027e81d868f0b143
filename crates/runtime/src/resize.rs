//! A running backend's cache grows and shrinks while clients use it.
//!
//! Invariants: no request waits for it; a change that does not end leaves the cache with its former size.
//!
//! Elsewhere: the crash order (`cbd-engine`).

use crate::{ProcessEnvironment, RunningBackend};
use cbd_engine::{Cache, SharedSpace, Shrink, Transport};
use cbd_types::{Error, ErrorKind, Result, Size};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a shrink looks for segments that were freed.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Progress of a cache that shrinks.
#[derive(Clone, Copy, Debug)]
pub struct ShrinkProgress {
    /// Bytes that the cache gives up.
    pub bytes: u64,
    /// Those of them that are still in use.
    pub missing_bytes: u64,
    /// Time since the shrink began.
    pub elapsed: Duration,
}

/// The result of a resize, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Resized {
    /// The former size of the cache.
    pub before: u64,
    /// Its size, in whole segments.
    pub now: u64,
}

impl RunningBackend {
    /// Changes the size of the cache to `bytes`, rounded down to whole segments. `timeout` is the longest time in which a cache
    /// that shrinks frees nothing.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a backend without a cache; those of [`Transport::grow_cache`] and
    /// [`Cache::begin_shrink`](cbd_engine::Cache::begin_shrink); [`ErrorKind::TimedOut`]; the error of `report`.
    pub fn resize_cache(
        &self,
        transport: &Transport<ProcessEnvironment>,
        bytes: u64,
        timeout: Duration,
        report: &mut dyn FnMut(&ShrinkProgress) -> ControlFlow<Error>,
    ) -> Result<Resized> {
        self.resize_to(transport, None, bytes, timeout, report)
    }

    /// Lets the cache share its space from now on. Its size changes only if it is outside the bounds. `timeout` and `report` as in
    /// [`resize_cache`](Self::resize_cache).
    ///
    /// # Errors
    /// As [`resize_cache`](Self::resize_cache), and those of [`Transport::share_cache`].
    pub fn share_cache(
        &self,
        transport: &Transport<ProcessEnvironment>,
        shared: SharedSpace,
        timeout: Duration,
        report: &mut dyn FnMut(&ShrinkProgress) -> ControlFlow<Error>,
    ) -> Result<Resized> {
        let before = transport.backend(self.id)?.cache_segments;
        let within = before.max(shared.min).min(shared.max);
        let bytes = u64::from(within) * transport.info().layout.segment_size;
        self.resize_to(transport, Some(shared), bytes, timeout, report)
    }

    /// Gives the cache `segments` more segments; see [`Transport::grow_cache`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a backend without a cache, and those of [`Transport::grow_cache`].
    pub fn grow_cache(&self, transport: &Transport<ProcessEnvironment>, segments: u32) -> Result<()> {
        transport.grow_cache(self.id, &self.cache_to_resize()?, segments)
    }

    /// Takes up to `segments` segments from the cache: those that are free, or become free within `timeout` because reclaim drops
    /// what the backing device has. With `drains`, writeback writes what is dirty at once. Returns the number of segments.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for a backend without a cache; those of
    /// [`Cache::begin_shrink`](cbd_engine::Cache::begin_shrink) and [`Transport::finish_shrink`]; the error of `report`.
    pub fn take_segments(
        &self,
        transport: &Transport<ProcessEnvironment>,
        segments: u32,
        drains: bool,
        timeout: Duration,
        report: &mut dyn FnMut(&ShrinkProgress) -> ControlFlow<Error>,
    ) -> Result<u32> {
        let cache = self.cache_to_resize()?;
        let mut shrink =
            if drains { cache.begin_shrink(segments)? } else { cache.begin_clean_shrink(segments)? };
        let size = transport.info().layout.segment_size;
        if let Err(error) = wait_for_segments(&shrink, size, timeout, report)
            && error.kind() != ErrorKind::TimedOut
        {
            return Err(error);
        }
        let taken = shrink.settle();
        if taken > 0 {
            transport.finish_shrink(self.id, shrink)?;
        }
        Ok(taken)
    }

    fn cache_to_resize(&self) -> Result<Arc<Cache<ProcessEnvironment>>> {
        self.cache().ok_or_else(|| {
            let text = format!("backend {} has no cache to resize; cache-attach gives it one", self.id);
            Error::new(ErrorKind::InvalidArgument, text)
        })
    }

    /// Changes the size of the cache, and stores then whether it shares its space.
    fn resize_to(
        &self,
        transport: &Transport<ProcessEnvironment>,
        shared: Option<SharedSpace>,
        bytes: u64,
        timeout: Duration,
        report: &mut dyn FnMut(&ShrinkProgress) -> ControlFlow<Error>,
    ) -> Result<Resized> {
        let cache = self.cache_to_resize()?;
        let size = transport.info().layout.segment_size;
        let entry = transport.backend(self.id)?;
        let before = entry.cache_segments;
        let wanted = u32::try_from(bytes / size).unwrap_or(u32::MAX);
        if wanted > before {
            transport.grow_cache(self.id, &cache, wanted - before)?;
        } else if wanted < before {
            let shrink = cache.begin_shrink(before - wanted)?;
            wait_for_segments(&shrink, size, timeout, report)?;
            transport.finish_shrink(self.id, shrink)?;
        }
        if shared != entry.shared {
            transport.share_cache(self.id, shared)?;
        }
        if shared.map(|shared| shared.max) != entry.shared.map(|shared| shared.max) || shared.is_none() {
            transport.recount_hits(self.id, &cache)?;
        }
        Ok(Resized { before: u64::from(before) * size, now: u64::from(wanted) * size })
    }
}

/// Waits until the cache has freed the segments that it gives up.
fn wait_for_segments(
    shrink: &Shrink<ProcessEnvironment>,
    size: u64,
    timeout: Duration,
    report: &mut dyn FnMut(&ShrinkProgress) -> ControlFlow<Error>,
) -> Result<()> {
    let begun = Instant::now();
    let (mut least, mut progressed) = (u32::MAX, begun);
    loop {
        let missing = shrink.missing();
        if missing == 0 {
            return Ok(());
        }
        if missing < least {
            (least, progressed) = (missing, Instant::now());
        }
        let (bytes, missing_bytes) = (u64::from(shrink.segments()) * size, u64::from(missing) * size);
        let progress = ShrinkProgress { bytes, missing_bytes, elapsed: begun.elapsed() };
        if let ControlFlow::Break(error) = report(&progress) {
            return Err(error);
        }
        if progressed.elapsed() >= timeout {
            return Err(Error::new(
                ErrorKind::TimedOut,
                format!(
                    "the cache did not shrink, and has its former size: {} of {} could not be freed, and nothing progressed for {} s; \
                     status says whether the backing device fails",
                    Size(missing_bytes),
                    Size(bytes),
                    timeout.as_secs()
                ),
            ));
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
}
