//! The state that the passes of flushes share.
//!
//! Invariants: one pass at a time; a mark is replaced only by one of a later record.
//!
//! Elsewhere: the pass itself, over the lanes (`cache::flush`).

use super::{Epochs, closings::Closings};
use crate::{
    Environment,
    context::Context,
    position::Reached,
    slots::{Object, TwoSlots},
};
use alloc::vec::Vec;
use cbd_format::LaneMark;
use cbd_types::{InFlight, LaneId, Structure, VerifiedMetadata};
use lock_api::MutexGuard;

/// The state that passes share.
pub(crate) struct Pass {
    /// The epoch counter when the last completed pass began: all epochs below it are closed, and no record of them follows.
    covered: u64,
    marks: Vec<TwoSlots<LaneMark>>,
    /// The times at which epochs were closed.
    closings: Closings,
    /// When the last pass ended.
    ended_ms: u64,
}

impl Pass {
    pub(super) fn new(marks: Vec<TwoSlots<LaneMark>>, now_ms: u64) -> Self {
        Self { covered: 0, marks, closings: Closings::new(), ended_ms: now_ms }
    }

    /// All epochs below `epoch` are complete: recovery, which began at `wall_ms`, has read their records. `last` is the last
    /// epoch of a record that may be dirty. The time at which each was closed is not known, but everything that completed before
    /// `wall_ms` is in `last` or an earlier epoch.
    pub(super) fn begin_at(&mut self, epoch: u64, last: u64, wall_ms: u64) {
        self.covered = epoch;
        self.closings.note(last, wall_ms);
    }

    /// Notes that `epoch` was closed at `wall_ms` or later.
    pub(crate) fn note_closing(&mut self, epoch: u64, wall_ms: u64) {
        self.closings.note(epoch, wall_ms);
    }

    /// Whether a completed pass began after `epoch` was closed.
    pub(crate) fn covers(&self, epoch: u64) -> bool {
        self.covered > epoch
    }

    /// Stores the mark of a lane, if it is of a later record than the present one. In flight until the caller fences.
    pub(crate) fn store_mark<E: Environment>(
        &mut self,
        context: &Context<E>,
        lane: LaneId,
        last: Reached,
        epoch: u64,
    ) -> InFlight {
        let mark = &mut self.marks[lane.index()];
        if mark.content().is_some_and(|mark| mark.lane_sequence.get() >= last.lane_sequence) {
            return context.region().nothing_in_flight();
        }
        mark.store(
            context.region(),
            LaneMark {
                lane_sequence: last.lane_sequence.into(),
                epoch: epoch.into(),
                ownership: context.identity().ownership.into(),
                run: last.run.into(),
                reserved: [0; 16],
            },
        )
    }

    /// Looks at both slots of the mark of a lane, and stores damaged ones again. The two have marks of different moments.
    pub(crate) fn verify_mark<E: Environment>(
        &mut self,
        context: &Context<E>,
        lane: LaneId,
        scratch: &mut [u8],
        found: &mut VerifiedMetadata,
    ) {
        let object = Object { structure: Structure::Mark, number: u64::from(lane.0), is_synced: false };
        self.marks[lane.index()].verify(context.region(), object, scratch, found);
    }

    /// Stores marks again of which a crash has torn the slot that is not the newest one. In flight until the caller fences.
    pub(super) fn complete_torn<E: Environment>(&mut self, context: &Context<E>) -> InFlight {
        let mut stored = context.region().nothing_in_flight();
        for mark in &mut self.marks {
            stored = stored.and(mark.complete_torn(context.region()));
        }
        stored
    }

    /// A pass that began when the epoch counter was `covered` has ended.
    pub(crate) fn end(&mut self, covered: u64, now_ms: u64) {
        self.covered = covered;
        self.ended_ms = now_ms;
    }
}

impl<E: Environment> Epochs<E> {
    /// Waits until no other pass runs.
    pub(crate) fn pass(&self) -> MutexGuard<'_, E::Lock, Pass> {
        self.pass.lock()
    }

    /// A time before which no write of a later epoch than `epoch` completed, if one is known. Entries of earlier epochs are
    /// dropped.
    pub(super) fn take_closing(&self, epoch: u64) -> Option<u64> {
        self.pass.lock().closings.take(epoch)
    }

    /// The epoch below which all are closed and complete.
    pub(crate) fn covered(&self) -> u64 {
        self.pass.lock().covered
    }

    /// When the last pass ended, by the monotonic clock in milliseconds.
    pub(crate) fn pass_ended_ms(&self) -> u64 {
        self.pass.lock().ended_ms
    }
}
