//! A blkdev: requests of any size are split into pieces that the cache accepts, and executed to completion or parked.
//!
//! Invariants: the thread that submits a request executes it as far as possible. A request that has to wait for space or for
//! the backing device is parked in that thread's [`Queue`], and continues in [`Queue::poll`]; no code sleeps and retries. A
//! request completes once, and its completion returns its buffer.
//!
//! Elsewhere: the execution of a piece (`cbd-engine`), protocols and descriptors (exports).
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod around;
mod figures;
mod parked;
mod queue;
mod readahead;
mod route;
mod sample;
mod streams;

pub use figures::{Clock, Counted, DeviceFigures, OperationFigures, Outcome, WaitFor};
pub use queue::{Queue, VERIFY_MAX};
pub use route::Hold;
pub use sample::{LastSampled, SAMPLE_BYTES, SAMPLED_MAX, Sampled};
pub use streams::Streams;

use alloc::{sync::Arc, vec, vec::Vec};
use cbd_engine::{Cache, CachedState, Environment};
use cbd_types::{BackingGeometry, BlkdevId, ByteRange, Class, Geometry};
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use route::Route;
use sample::Sample;

/// The class of the requests of a blkdev that have none. It can change while queues use it.
#[derive(Debug, Default)]
pub struct BlkdevClass {
    is_metadata: AtomicBool,
}

impl BlkdevClass {
    /// The class, from the next request on.
    pub fn set(&self, class: Class) {
        self.is_metadata.store(class == Class::Metadata, Ordering::Relaxed);
    }

    fn get(&self) -> Class {
        if self.is_metadata.load(Ordering::Relaxed) { Class::Metadata } else { Class::Unmarked }
    }
}

/// The cache, if there is one, and the backing device of blkdevs.
pub struct Device<E: Environment> {
    route: Route<E>,
    backing: BackingGeometry,
    /// What clients see, but for the size: it stays as it is when the route changes.
    geometry: Geometry,
    /// Size in bytes.
    size: AtomicU64,
    /// Requests that went to the backing device without a cache.
    uncached: AtomicU64,
    /// The clock of latencies; without one no request is timed.
    clock: Option<Clock>,
    /// A sample of its requests.
    sample: Sample,
    /// The sequential streams of reads, over all queues.
    streams: lock_api::Mutex<E::Lock, Streams>,
    /// The same of writes.
    write_streams: lock_api::Mutex<E::Lock, Streams>,
}

impl<E: Environment> Device<E> {
    /// A blkdev over a cache in front of a backing device.
    pub fn cached(cache: Arc<Cache<E>>, backing: BackingGeometry) -> Self {
        Self::new(Some(cache), backing)
    }

    /// A blkdev that sends everything to the backing device.
    pub fn uncached(backing: BackingGeometry) -> Self {
        Self::new(None, backing)
    }

    fn new(cache: Option<Arc<Cache<E>>>, backing: BackingGeometry) -> Self {
        let streams = || lock_api::Mutex::<E::Lock, _>::new(Streams::new());
        let geometry = seen_by_clients(cache.as_deref(), &backing);
        Self {
            route: Route::new(cache),
            backing,
            geometry,
            size: AtomicU64::new(geometry.size),
            uncached: AtomicU64::new(0),
            clock: None,
            sample: Sample::none(),
            streams: streams(),
            write_streams: streams(),
        }
    }

    /// The same with a clock, by which its requests are timed.
    #[must_use]
    pub fn with_clock(self, clock: Clock) -> Self {
        Self { clock: Some(clock), ..self }
    }

    /// The same with memory for a sample of its requests. `clock` gives their time: milliseconds suffice, and a less expensive clock than that
    /// of latencies, which may lag behind by some of them.
    #[must_use]
    pub fn with_sample(self, clock: Clock) -> Self {
        Self { sample: Sample::new(clock), ..self }
    }

    /// Notes a sample of the requests, for a cache of `bytes`; 0: notes nothing. Called again with another size. It begins
    /// again when the size becomes much larger or smaller.
    pub fn sample_for(&self, bytes: u64) {
        self.sample.set_cache(bytes);
    }

    /// The last requests of the sample, from number `from` on: at most [`SAMPLED_MAX`].
    pub fn last_sampled(&self, from: u64) -> LastSampled {
        self.sample.last(from)
    }

    /// Calls `visit` with the requests of the sample of these numbers, as far as they are kept, in order. Returns the blocks of a
    /// group; 0 if nothing is noted.
    pub fn visit_sampled(&self, numbers: Range<u64>, visit: &mut dyn FnMut(Sampled)) -> u64 {
        self.sample.visit(numbers, visit)
    }

    /// The number of requests that the sample has had.
    pub fn sampled_count(&self) -> u64 {
        self.sample.count()
    }

    /// What its queues have counted.
    pub fn figures(&self) -> DeviceFigures {
        self.route.figures(None)
    }

    /// What the queues of one blkdev have counted.
    pub fn figures_of(&self, blkdev: BlkdevId) -> DeviceFigures {
        self.route.figures(Some(blkdev))
    }

    /// The cache, if requests go through one.
    pub fn cache(&self) -> Option<Arc<Cache<E>>> {
        self.route.cache()
    }

    /// The cache state of `range`, in order and without holes, for block status.
    pub fn extents(&self, range: ByteRange) -> Vec<CachedState> {
        match self.cache() {
            Some(cache) => cache.extents(range),
            None => vec![CachedState { range, zeroes: false, cached: false, dirty: false }],
        }
    }

    /// The geometry that exports report to their clients. The size is the recorded one of the backend: if the backing device
    /// grows, the blkdev does not until [`grow`](Self::grow).
    pub fn geometry(&self) -> Geometry {
        Geometry { size: self.size.load(Ordering::Acquire), ..self.geometry }
    }

    /// Requests that went to the backing device while there was no cache.
    pub fn uncached_requests(&self) -> u64 {
        self.uncached.load(Ordering::Relaxed)
    }

    /// Sets the size in bytes, which never falls. The backing device and the cache reach so far already.
    pub fn grow(&self, size: u64) {
        // Whoever sees the new size sees what was raised before it.
        self.size.fetch_max(size, Ordering::AcqRel);
    }
}

/// The geometry of a blkdev that is served through `cache`, if there is one.
fn seen_by_clients<E: Environment>(cache: Option<&Cache<E>>, backing: &BackingGeometry) -> Geometry {
    let (size, atomic_unit, physical) = match cache {
        Some(cache) => (cache.size(), cache.atomic_unit(), backing.physical_sector.max(4096)),
        None => (backing.size, backing.sector, backing.physical_sector),
    };
    Geometry {
        size,
        sector: backing.sector,
        physical_sector: physical,
        atomic_unit,
        discard: backing.discard_zeroes,
        discard_granularity: backing.discard_granularity.max(backing.sector),
        rotational: backing.rotational && cache.is_none(),
        // Zeroing is a record in the cache. A disk may write every sector.
        fast_zeroes: cache.is_some(),
    }
}
