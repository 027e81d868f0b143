//! A blkdev: requests of any size, cut into pieces that the cache takes, run to completion or parked.
//!
//! Always true here: the thread that submits a request runs it as far as it goes; what has to wait, for space or for
//! the backing device, is parked in that thread's [`Queue`] and goes on in [`Queue::poll`]; nobody sleeps and tries
//! again. A request completes once, and gives its buffer back.
//!
//! Left to others: what a piece does (`cbd-engine`), wires and descriptors (exports).
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod parked;
mod queue;

pub use queue::Queue;

use alloc::{sync::Arc, vec, vec::Vec};
use cbd_engine::{Cache, CachedState, Environment};
use cbd_types::{BackingGeometry, ByteRange, Geometry};

/// What a blkdev stands on.
pub struct Device<E: Environment> {
    cache: Option<Arc<Cache<E>>>,
    backing: BackingGeometry,
}

impl<E: Environment> Device<E> {
    /// A blkdev over a cache in front of a backing device.
    pub const fn cached(cache: Arc<Cache<E>>, backing: BackingGeometry) -> Self {
        Self { cache: Some(cache), backing }
    }

    /// A blkdev that hands everything to the backing device.
    pub const fn uncached(backing: BackingGeometry) -> Self {
        Self { cache: None, backing }
    }

    /// The cache, if there is one.
    pub const fn cache(&self) -> Option<&Arc<Cache<E>>> {
        self.cache.as_ref()
    }

    /// What is known of `range`, in order and without holes, for block status.
    pub fn extents(&self, range: ByteRange) -> Vec<CachedState> {
        match &self.cache {
            Some(cache) => cache.extents(range),
            None => vec![CachedState { range, zeroes: false, cached: false, dirty: false }],
        }
    }

    /// What exports tell their clients. The size is what was recorded for the cache: a backing device that has grown
    /// does not grow the blkdev.
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
        }
    }
}
