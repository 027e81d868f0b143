//! The base of a cache: everything that its lanes share.
//!
//! Invariants:
//! - nothing here depends on a lane: a request goes down from the cache to a lane and from there to the base, and never back;
//! - a lane's lock is taken before any lock here, and no lock here is held while another one is taken.
//!
//! Elsewhere: how a lane uses the base (`lane`), requests (`cache`).

mod gate;
mod load;
mod mode;
mod pool;
mod records;
mod segments;
mod space;
mod waits;
mod wakeups;

use crate::{
    Environment, Mutex, Settings,
    bypass::BypassCounters,
    context::{Context, Identity},
    epochs::Epochs,
    rare::RareCounters,
    sync::{SharedU32, SharedU64},
};
use alloc::boxed::Box;
use cbd_format::SegmentShape;
use cbd_types::{Epoch, Region, Result};
use core::sync::atomic::AtomicU64;
pub(crate) use gate::{ClosedGate, FirstWrite, Gate};
pub(crate) use load::Damage;
pub(crate) use mode::{Mode, Phase};
pub(crate) use pool::{Lack, Pool, Requester};
pub(crate) use records::Records;
use segments::Segments;
pub(crate) use segments::{Segment, claimed_generation};
use waits::LaneWaits;
pub(crate) use wakeups::Wakeups;

/// The state that the lanes of a cache share.
///
/// Field order: data that every request reads and that is rarely written comes before the first field that has its cache lines to
/// itself.
#[repr(C)]
pub(crate) struct Base<E: Environment> {
    context: Context<E>,
    segments: Segments<E>,
    gate: Gate<E>,
    mode: Mode<E>,
    wakeups: Wakeups<E>,
    pool: Pool<E>,
    /// The number of log segments that the cache owns.
    owned: SharedU32<E>,
    /// The size of the device in bytes, which can grow.
    size: SharedU64<E>,
    epochs: Epochs<E>,
    settings: Mutex<E, Settings>,
    /// Behind pointers, because the base is moved as a value when a cache is opened.
    rare: Box<RareCounters>,
    bypassed: Box<BypassCounters>,
    lane_waits: Box<LaneWaits>,
    /// Bytes that are pinned, and of metadata as last counted. Only speed depends on them.
    pinned: AtomicU64,
    metadata: AtomicU64,
}

impl<E: Environment> Base<E> {
    /// A base whose pool is empty. `segments` are those of the region, of which the cache owns `owned`.
    pub(crate) fn new(
        context: Context<E>,
        segments: alloc::vec::Vec<Segment<E>>,
        owned: u32,
        epochs: Epochs<E>,
        settings: Settings,
    ) -> Self {
        let (lanes, size) = (context.identity().lanes.lanes, context.identity().size_when_opened);
        let pool = Pool::new(alloc::vec::Vec::with_capacity(owned as usize), lanes);
        Self {
            context,
            segments: Segments::new(segments),
            gate: Gate::new(),
            mode: Mode::opened(&settings),
            wakeups: Wakeups::new(),
            pool,
            owned: SharedU32::new(owned),
            size: SharedU64::new(size),
            epochs,
            settings: Mutex::<E, _>::new(settings),
            rare: Box::default(),
            bypassed: Box::default(),
            lane_waits: Box::default(),
            pinned: AtomicU64::new(0),
            metadata: AtomicU64::new(0),
        }
    }

    /// Region, environment and identity in one.
    #[inline]
    pub(crate) const fn context(&self) -> &Context<E> {
        &self.context
    }

    /// Clock and random numbers.
    #[inline]
    pub(crate) fn environment(&self) -> &E {
        self.context.environment()
    }

    /// The region that the cache stores into.
    #[inline]
    pub(crate) fn region(&self) -> &Region<E::Memory> {
        self.context.region()
    }

    /// The shape of its log segments.
    #[inline]
    pub(crate) const fn shape(&self) -> SegmentShape {
        self.context.shape()
    }

    /// The identity of the cache.
    #[inline]
    pub(crate) const fn identity(&self) -> &Identity {
        self.context.identity()
    }

    /// The mode in which writes go.
    #[inline]
    pub(crate) const fn mode(&self) -> &Mode<E> {
        &self.mode
    }

    /// The gate that refuses requests.
    #[inline]
    pub(crate) const fn gate(&self) -> &Gate<E> {
        &self.gate
    }

    /// How the background worker is woken.
    #[inline]
    pub(crate) const fn wakeups(&self) -> &Wakeups<E> {
        &self.wakeups
    }

    /// The free segments.
    #[inline]
    pub(crate) const fn pool(&self) -> &Pool<E> {
        &self.pool
    }

    /// The epoch counter, and how far the backing device has caught up.
    #[inline]
    pub(crate) const fn epochs(&self) -> &Epochs<E> {
        &self.epochs
    }

    /// Counters of rare paths.
    #[inline]
    pub(crate) const fn rare(&self) -> &RareCounters {
        &self.rare
    }

    /// Counters of bytes that went past the cache.
    #[inline]
    pub(crate) const fn bypassed(&self) -> &BypassCounters {
        &self.bypassed
    }

    /// Waits of requests for lanes.
    pub(crate) const fn lane_waits(&self) -> &LaneWaits {
        &self.lane_waits
    }

    /// Everything up to this epoch is durable on the backing device.
    #[inline]
    pub(crate) fn drained_epoch(&self) -> Epoch {
        self.epochs.drained()
    }

    /// The settings in force.
    pub(crate) fn settings(&self) -> Settings {
        *self.settings.lock()
    }

    /// Changes the settings, which have effect at once.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](cbd_types::ErrorKind::InvalidArgument) for a value out of its range; nothing changes then.
    pub(crate) fn set_settings(&self, settings: Settings) -> Result<()> {
        *self.settings.lock() = settings.validated()?;
        self.mode.note(&settings);
        Ok(())
    }
}
