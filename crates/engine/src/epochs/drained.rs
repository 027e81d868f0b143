//! Drained: the epoch up to which the backing device is complete, durably, and the recovery point.
//!
//! Invariants: other threads see a drained epoch only when it is durable.

use super::Epochs;
use crate::{
    Environment,
    context::Context,
    slots::{InBoth, Object},
};
use cbd_format::Drained;
use cbd_types::{Epoch, InFlight, MutationPoint, Structure, VerifiedMetadata};
use core::sync::atomic::Ordering;

/// Drained and the recovery point at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CaughtUp {
    /// Everything up to this epoch is durable on the backing device.
    pub epoch: Epoch,
    /// Until this epoch is reached the backing device alone is not crash-consistent.
    pub void_until: u64,
    /// The recovery point, by the wall clock in milliseconds.
    pub dated_ms: u64,
}

impl<E: Environment> Epochs<E> {
    /// Everything up to this epoch is durable on the backing device.
    #[inline]
    pub(crate) fn drained(&self) -> Epoch {
        Epoch(self.drained_now.load(Ordering::Acquire))
    }

    /// The recovery point, by the wall clock in milliseconds.
    pub(crate) fn dated_ms(&self) -> u64 {
        self.dated_ms.load(Ordering::Relaxed)
    }

    /// Until this epoch is drained the backing device alone is not crash-consistent.
    pub(crate) fn void_until(&self) -> u64 {
        self.drained.lock().content().map_or(0, |drained| drained.void_until.get())
    }

    /// Whether the backing device alone is crash-consistent, according to the stored content.
    pub(crate) fn is_crash_consistent(&self) -> bool {
        let slots = self.drained.lock();
        slots.content().is_none_or(|drained| drained.void_until.get() <= drained.epoch.get())
    }

    /// All values at one moment.
    pub(crate) fn caught_up(&self) -> CaughtUp {
        let slots = self.drained.lock();
        CaughtUp {
            epoch: self.drained(),
            void_until: slots.content().map_or(0, |now| now.void_until.get()),
            dated_ms: self.dated_ms(),
        }
    }

    /// Repairs the slot of drained that does not hold the newest content, and slots of marks that a crash has torn. In flight until the
    /// caller fences.
    pub(crate) fn complete_slots(&self, context: &Context<E>) -> InFlight {
        let stored = self.drained.lock().complete(context.region());
        stored.and(self.pass().complete_torn(context))
    }

    /// Looks at both slots of drained, and stores damaged ones again.
    pub(crate) fn verify_drained(
        &self,
        context: &Context<E>,
        scratch: &mut [u8],
        found: &mut VerifiedMetadata,
    ) {
        let object = Object { structure: Structure::Drained, number: 0, is_synced: false };
        self.drained.lock().verify(context.region(), object, scratch, found);
    }

    /// Records that the backing device is not crash-consistent until everything that is written now is drained: a version of a
    /// range was skipped because it is damaged, even if a later version covers the damage.
    pub(crate) fn void_until_now(&self, context: &Context<E>) {
        self.void_until_epoch(context, self.present());
    }

    /// Records durably that the backing device is not crash-consistent until `epoch` is drained.
    pub(crate) fn void_until_epoch(&self, context: &Context<E>, epoch: u64) {
        self.store_drained(context, |drained| {
            drained.void_until = drained.void_until.get().max(epoch).into()
        });
    }

    /// The clock was set back to `now_ms`: writes that complete from now on would be dated before the recovery point, so it is
    /// set back too.
    pub(crate) fn set_back(&self, context: &Context<E>, now_ms: u64) {
        self.store_drained(context, |drained| drained.closed_ms = now_ms.into());
    }

    /// Stores a changed *drained*, fences, and only then publishes it. Does nothing once a store to the region has failed:
    /// *drained* may rely on the failed store.
    fn store_drained(&self, context: &Context<E>, change: impl FnOnce(&mut Drained)) {
        let mut slots = self.drained.lock();
        if context.region().check_stores(MutationPoint::DrainedStoreCheck).is_err() {
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
        // A time that is known to be too late is not stored again.
        drained.closed_ms = drained.closed_ms.get().min(self.dated_ms.load(Ordering::Relaxed)).into();
        change(&mut drained);
        drained.ownership = context.identity().ownership.into();
        // A later recovery point is published when it is durable, an earlier one at once.
        if drained.closed_ms.get() < self.dated_ms.load(Ordering::Relaxed) {
            self.dated_ms.store(drained.closed_ms.get(), Ordering::Relaxed);
        }
        // In both slots, so that one failed page does not take the backing device back to an older epoch.
        let names = InBoth {
            first_fence: MutationPoint::DrainedFirstFence,
            second: MutationPoint::DrainedSecond,
            fence: MutationPoint::DrainedFence,
        };
        slots.store_in_both(context.region(), names, drained);
        if context.region().check_stores(MutationPoint::DrainedStoreCheck).is_err() {
            return;
        }
        self.drained_now.store(drained.epoch.get(), Ordering::Release);
        self.dated_ms.store(drained.closed_ms.get(), Ordering::Relaxed);
    }

    /// Everything up to `epoch` is on the backing device: drained and the recovery point advance.
    pub(crate) fn reach(&self, context: &Context<E>, epoch: u64, void_until: u64) {
        // The recovery point is the time at which the epoch was closed, never the time at which its writeback ended: the backing
        // device lacks what completed and was flushed in between.
        let now_ms = context.environment().wall_ms();
        let closed_ms = self.closed_ms(epoch);
        self.store_drained(context, |drained| {
            drained.void_until = drained.void_until.get().max(void_until).into();
            drained.epoch = epoch.into();
            drained.wall_ms = now_ms.into();
            // The clock may have been set back since it was read.
            drained.closed_ms = closed_ms.min(context.environment().wall_ms()).into();
        });
    }

    /// If the clock was set back behind the recovery point, the recovery point is set back too, durably, before a flush completes
    /// that makes writes durable which completed since: by the clock these writes are older than the recovery point.
    pub(crate) fn check_clock(&self, context: &Context<E>, read_ms: u64) {
        if read_ms >= self.dated_ms() {
            return;
        }
        // Not if this thread was only slow.
        let now_ms = context.environment().wall_ms();
        if now_ms < self.dated_ms() {
            self.store_drained(context, |drained| {
                drained.closed_ms = drained.closed_ms.get().min(now_ms).into();
            });
        }
    }

    /// A time before which no write of a later epoch than `epoch` completed; `epoch` is drained. If no better time is known, the
    /// present recovery point. No caller passes an earlier epoch afterwards.
    fn closed_ms(&self, epoch: u64) -> u64 {
        let known_ms = self.dated_ms();
        self.take_closing(epoch).map_or(known_ms, |closed_ms| closed_ms.max(known_ms))
    }
}
