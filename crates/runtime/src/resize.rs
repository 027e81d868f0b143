//! A running backend's cache grows and shrinks while clients use it.
//!
//! Invariants: no request waits for it; a change that does not end leaves the cache with its former size.
//!
//! Elsewhere: the crash order (`cbd-engine`).

use crate::{ProcessEnvironment, RunningBackend};
use cbd_engine::{Shrink, Transport};
use cbd_types::{Error, ErrorKind, Result, Size};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// The longest time between two looks for segments that were freed.
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
        let Some(cache) = self.cache() else {
            let text = format!("backend {} has no cache to resize; cache-attach gives it one", self.id);
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        };
        let size = transport.info().layout.segment_size;
        let before = transport.backend(self.id)?.cache_segments;
        let wanted = u32::try_from(bytes / size).unwrap_or(u32::MAX);
        if wanted > before {
            transport.grow_cache(self.id, &cache, wanted - before)?;
        } else if wanted < before {
            let shrink = cache.begin_shrink(before - wanted)?;
            self.wait_for_segments(&shrink, size, timeout, report)?;
            transport.finish_shrink(self.id, shrink)?;
        }
        if wanted != before {
            // Only speed depends on the size of the index.
            let blocks = cache.index_blocks_per_lane(wanted.saturating_sub(1));
            if let Err(error) = cache.resize_index(blocks, std::thread::yield_now) {
                tracing::warn!(backend = self.id.0, "the index of the cache has its former size: {error}");
            }
        }
        Ok(Resized { before: u64::from(before) * size, now: u64::from(wanted) * size })
    }

    /// Waits until the cache has freed the segments that it gives up.
    fn wait_for_segments(
        &self,
        shrink: &Shrink<ProcessEnvironment>,
        size: u64,
        timeout: Duration,
        report: &mut dyn FnMut(&ShrinkProgress) -> ControlFlow<Error>,
    ) -> Result<()> {
        let begun = Instant::now();
        let rounds = self.rounds();
        let watch = rounds.watch();
        let (mut least, mut progressed) = (u32::MAX, begun);
        loop {
            let round = watch.ended();
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
            // The background worker ends a round when it has no work left; it frees segments meanwhile.
            watch.wait_for_next(round, LOOK_INTERVAL);
        }
    }
}
