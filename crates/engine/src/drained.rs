//! *Drained*: how far the backing device has caught up, durably.
//!
//! Always true here: what others see of it is durable already.

use crate::{Cache, Environment, slots::InBoth};
use cbd_format::Drained;
use cbd_types::MutationPoint;
use core::sync::atomic::Ordering;

/// A version of something was skipped because it is damaged: until everything that is written now is on the backing
/// device, it is no crash state, even if a later version covers the damage.
pub(crate) fn void_until_now<E: Environment>(cache: &Cache<E>) {
    let now = cache.epoch.load(Ordering::SeqCst);
    store_drained(cache, |drained| drained.void_until = drained.void_until.get().max(now).into());
}

/// Stores a changed *drained*, fences, and only then lets others see it. Does nothing once a store to the region has
/// failed: what *drained* would rely on may be what failed.
pub(crate) fn store_drained<E: Environment>(cache: &Cache<E>, change: impl FnOnce(&mut Drained)) {
    let mut slots = cache.drained.lock();
    if cache.region().check_stores(MutationPoint::DrainedStoreCheck).is_err() {
        return;
    }
    let mut drained = slots.content().copied().unwrap_or(Drained {
        epoch: 0.into(),
        void_until: 0.into(),
        wall_ms: 0.into(),
        ownership: 0.into(),
        closed_ms: 0.into(),
        reserved: [0; 8],
    });
    // What is known to be too late is not stored again.
    drained.closed_ms = drained.closed_ms.get().min(cache.dated_ms.load(Ordering::Relaxed)).into();
    change(&mut drained);
    drained.ownership = cache.identity.ownership.into();
    // A later recovery point is seen when it is durable, an earlier one at once.
    if drained.closed_ms.get() < cache.dated_ms.load(Ordering::Relaxed) {
        cache.dated_ms.store(drained.closed_ms.get(), Ordering::Relaxed);
    }
    if !MutationPoint::DrainedVisible.is_active() {
        cache.drained_now.store(drained.epoch.get(), Ordering::Release);
    }
    // Twice, so that one failed page does not take the backing device back to an older epoch.
    let names = InBoth {
        first_fence: MutationPoint::DrainedFirstFence,
        second: MutationPoint::DrainedSecond,
        fence: MutationPoint::DrainedFence,
    };
    slots.store_in_both(cache.region(), names, drained);
    if cache.region().check_stores(MutationPoint::DrainedStoreCheck).is_err() {
        return;
    }
    cache.drained_now.store(drained.epoch.get(), Ordering::Release);
    cache.dated_ms.store(drained.closed_ms.get(), Ordering::Relaxed);
}

/// All up to `epoch` is on the backing device: the recovery point moves.
pub(crate) fn reach<E: Environment>(cache: &Cache<E>, epoch: u64, void_until: u64) {
    // The time at which the epoch was closed, never that at which its writeback ended: what completed and was flushed in between is
    // not there.
    let now_ms = cache.environment().wall_ms();
    let closed_ms = if MutationPoint::DrainedDated.is_active() { cache.closed_ms(epoch) } else { now_ms };
    store_drained(cache, |drained| {
        drained.void_until = drained.void_until.get().max(void_until).into();
        drained.epoch = epoch.into();
        drained.wall_ms = now_ms.into();
        // The clock may have been set back since that time was read.
        drained.closed_ms = closed_ms.min(cache.environment().wall_ms()).into();
    });
}
