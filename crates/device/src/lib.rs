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

mod around;
mod parked;
mod queue;
mod readahead;
mod streams;

pub use queue::Queue;

use alloc::{sync::Arc, vec, vec::Vec};
use cbd_engine::{Cache, CachedState, Environment};
use cbd_types::{BackingGeometry, ByteRange, Geometry};
use core::sync::atomic::{AtomicU32, Ordering};
use streams::Streams;

/// The cache and the backing device of a blkdev.
pub struct Device<E: Environment> {
    cache: Option<Arc<Cache<E>>>,
    backing: BackingGeometry,
    /// The sequential streams of reads, over all queues.
    streams: lock_api::Mutex<E::Lock, Streams>,
    /// The same of writes.
    write_streams: lock_api::Mutex<E::Lock, Streams>,
    /// The number of the next queue.
    queues: AtomicU32,
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
        Self { cache, backing, streams: streams(), write_streams: streams(), queues: AtomicU32::new(0) }
    }

    /// The cache, if the blkdev has one.
    pub const fn cache(&self) -> Option<&Arc<Cache<E>>> {
        self.cache.as_ref()
    }

    /// A number for a queue: one that no other queue of the device has.
    fn number_queue(&self) -> u32 {
        self.queues.fetch_add(1, Ordering::Relaxed)
    }

    /// The cache state of `range`, in order and without holes, for block status.
    pub fn extents(&self, range: ByteRange) -> Vec<CachedState> {
        match &self.cache {
            Some(cache) => cache.extents(range),
            None => vec![CachedState { range, zeroes: false, cached: false, dirty: false }],
        }
    }

    /// The geometry that exports report to their clients. The size is the recorded one of the cache: if the backing device
    /// grows, the blkdev does not.
    pub fn geometry(&self) -> Geometry {
        let backing = &self.backing;
        let (size, atomic_unit, physical) = match &self.cache {
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
            rotational: backing.rotational && self.cache.is_none(),
            // Zeroing is a record in the cache. A disk may write every sector.
            fast_zeroes: self.cache.is_some(),
        }
    }
}
