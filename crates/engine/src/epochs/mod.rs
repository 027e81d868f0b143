//! Epochs: the counter, the passes that close them, their marks, and the epoch up to which the backing device is complete.
//!
//! Invariants:
//! - the counter never falls; a write loads it after it has set the touched bit of its lane;
//! - one pass at a time runs over the lanes, and what it has covered is complete (`pass`);
//! - other threads see a drained epoch only when it is durable (`drained`);
//! - nothing of an epoch above the limit is written to the backing device (`limit`).
//!
//! Elsewhere: which epoch is written to the backing device next (`writeback`).

mod closings;
mod drained;
mod limit;
mod pass;

use crate::{Environment, Mutex, context::Context, slots::TwoSlots, sync::SharedU64};
use alloc::vec::Vec;
use cbd_format::{Drained, LaneMark};
use cbd_types::Epoch;
use core::sync::atomic::Ordering;
pub(crate) use drained::CaughtUp;
pub(crate) use limit::Limit;
use limit::Limited;
pub(crate) use pass::Pass;

/// An atomic number with a cache line of its own: every write reads it, every flush writes it.
#[repr(align(64))]
struct Alone<E>(SharedU64<E>);

impl<E> core::ops::Deref for Alone<E> {
    type Target = SharedU64<E>;

    fn deref(&self) -> &SharedU64<E> {
        &self.0
    }
}

/// The epochs of a cache. The counter, which every write reads, comes first and has its cache line to itself.
#[repr(C)]
pub(crate) struct Epochs<E: Environment> {
    /// The present epoch.
    counter: Alone<E>,
    pass: Mutex<E, Pass>,
    drained: Mutex<E, TwoSlots<Drained>>,
    /// The epoch that `drained` holds, to read without the lock.
    drained_now: SharedU64<E>,
    /// The recovery point; see `CacheStatus::drained_wall_ms`.
    dated_ms: SharedU64<E>,
    /// Everything up to this epoch is to be drained at once, as fast as `writeback_rate` lets it.
    requested: SharedU64<E>,
    /// The last epoch that a flush or a FUA write of a client closed, or that a former process left: what follows is in order
    /// with it. What the cache itself closes orders nothing.
    ordered: SharedU64<E>,
    limit: Limited<E>,
}

impl<E: Environment> Epochs<E> {
    /// The state before recovery has read a record: no epoch is complete. `drained` and `marks` are the contents of the region.
    pub(crate) fn new(drained: TwoSlots<Drained>, marks: Vec<TwoSlots<LaneMark>>, now_ms: u64) -> Self {
        let drained_now = drained.content().map_or(0, |drained| drained.epoch.get());
        let dated_ms = drained.content().map_or(0, |drained| drained.closed_ms.get());
        Self {
            counter: Alone(SharedU64::new(1)),
            pass: Mutex::<E, _>::new(Pass::new(marks, now_ms)),
            drained: Mutex::<E, _>::new(drained),
            drained_now: SharedU64::new(drained_now),
            dated_ms: SharedU64::new(dated_ms),
            requested: SharedU64::new(0),
            ordered: SharedU64::new(0),
            limit: Limited::new(),
        }
    }

    /// The present epoch.
    #[inline]
    pub(crate) fn present(&self) -> u64 {
        self.counter.load(Ordering::SeqCst)
    }

    /// Continues above `highest`, the highest epoch that recovery has seen. `last_dirty` is the last epoch of a record that may
    /// be dirty; recovery began at `opened_ms`.
    pub(crate) fn resume(&self, highest: u64, last_dirty: u64, opened_ms: u64) {
        self.counter.store(highest + 1, Ordering::SeqCst);
        self.ordered.store(highest, Ordering::SeqCst);
        self.pass.lock().begin_at(highest + 1, last_dirty, opened_ms);
    }

    /// Closes the present epoch. Returns it, and a time before which no write of a later epoch completed.
    pub(crate) fn raise(&self, context: &Context<E>) -> (u64, u64) {
        // The clock is read first: a write that loads the new epoch completes later.
        let closed_ms = context.environment().wall_ms();
        let closed = self.counter.fetch_add(1, Ordering::SeqCst);
        (closed, closed_ms)
    }

    /// A client has closed `epoch`; called before its request completes.
    pub(crate) fn order(&self, epoch: u64) {
        self.ordered.fetch_max(epoch, Ordering::SeqCst);
    }

    /// The last epoch that is in order with what follows it.
    pub(crate) fn ordered(&self) -> u64 {
        self.ordered.load(Ordering::SeqCst)
    }

    /// Requests that everything up to `epoch` be drained at once.
    pub(crate) fn request(&self, epoch: Epoch) {
        self.requested.fetch_max(epoch.0, Ordering::SeqCst);
    }

    /// The highest epoch that was requested to be drained.
    pub(crate) fn requested(&self) -> u64 {
        self.requested.load(Ordering::SeqCst)
    }
}
