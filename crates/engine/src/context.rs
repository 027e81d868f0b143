//! The context that every part of a cache needs and that is constant while the cache is open.
//!
//! Invariants: nothing here changes after recovery has assembled the cache.

use crate::{Environment, lane_map::LaneMap};
use alloc::sync::Arc;
use cbd_format::SegmentShape;
use cbd_types::{BackendId, Region};

/// The identity of a cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub backend: BackendId,
    pub cache_id: u64,
    pub ownership: u64,
    pub lanes: LaneMap,
    /// Size of the device in bytes when the cache was opened; it can grow since (`Base::size`).
    pub size_when_opened: u64,
    /// Sector of the device in bytes.
    pub sector: u32,
    pub data_crc: bool,
    /// First byte of the state segment.
    pub state_base: u64,
}

/// The environment and region of a cache, its identity, and the shape of its segments. Every request reads it; nothing writes
/// it.
#[repr(C)]
pub(crate) struct Context<E: Environment> {
    environment: Arc<E>,
    region: Arc<Region<E::Memory>>,
    shape: SegmentShape,
    identity: Identity,
}

impl<E: Environment> Context<E> {
    pub(crate) const fn new(
        environment: Arc<E>,
        region: Arc<Region<E::Memory>>,
        shape: SegmentShape,
        identity: Identity,
    ) -> Self {
        Self { environment, region, shape, identity }
    }

    /// Clock and random numbers.
    #[inline]
    pub(crate) fn environment(&self) -> &E {
        &self.environment
    }

    /// The region that the cache stores into.
    #[inline]
    pub(crate) fn region(&self) -> &Region<E::Memory> {
        &self.region
    }

    /// The shape of its log segments.
    #[inline]
    pub(crate) const fn shape(&self) -> SegmentShape {
        self.shape
    }

    /// The identity of the cache.
    #[inline]
    pub(crate) const fn identity(&self) -> &Identity {
        &self.identity
    }
}
