//! Flushes: close an epoch, ensure that no record of it can follow, and leave durable marks.
//!
//! Data and records are durable already when a write completes. A flush adds the order in which the backing device
//! catches up, and evidence of how far each lane was complete. When an epoch was closed dates the recovery point.

use super::{Epochs, closings::Closings};
use crate::{
    Environment,
    context::Context,
    lane::{Lane, LaneMap, LaneState},
    slots::TwoSlots,
};
use alloc::vec::Vec;
use cbd_format::LaneMark;
use cbd_types::{ByteRange, CHUNK, Epoch, InFlight, LaneId, MutationPoint, Result};

/// What passes share; one pass at a time.
pub(super) struct Pass {
    /// The epoch counter when the last completed pass began: all epochs below it are closed, and nothing of them is still
    /// to come.
    covered: u64,
    marks: Vec<TwoSlots<LaneMark>>,
    /// When epochs were closed.
    closings: Closings,
    /// When the last pass ended.
    ended_ms: u64,
}

/// How far a lane is complete: what its mark says.
#[derive(Clone, Copy)]
struct Reached {
    lane_sequence: u64,
    run: u64,
}

impl Reached {
    fn by(state: &LaneState) -> Self {
        // Of the segment with the last record: recovery begins a run, and the lane may have written nothing since.
        let run = state.open.as_ref().or(state.sealed.back()).map_or(0, |segment| segment.run);
        let run = if MutationPoint::MarkNamesRun.is_active() { run } else { 0 };
        Self { lane_sequence: state.next_sequence - 1, run }
    }
}

impl Pass {
    pub(super) fn new(marks: Vec<TwoSlots<LaneMark>>, now_ms: u64) -> Self {
        Self { covered: 0, marks, closings: Closings::new(), ended_ms: now_ms }
    }

    /// All epochs below `epoch` are complete: recovery, which began at `wall_ms`, has seen their records. `last` is the last epoch of
    /// one that may be dirty. When each was closed is not known, but all that completed before `wall_ms` is of it or earlier.
    pub(super) fn begin_at(&mut self, epoch: u64, last: u64, wall_ms: u64) {
        self.covered = epoch;
        self.closings.note(if MutationPoint::ClosingsAfterRestart.is_active() { last } else { 0 }, wall_ms);
    }

    fn store_mark<E: Environment>(
        &mut self,
        context: &Context<E>,
        lane: usize,
        last: Reached,
        epoch: u64,
    ) -> InFlight {
        let mark = &mut self.marks[lane];
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
}

impl<E: Environment> Epochs<E> {
    /// Closes the present epoch, whether the cache runs or not: what completed before is in it or in an earlier one, and nothing that
    /// is submitted after this returns is. Returns it.
    pub(crate) fn close(&self, context: &Context<E>, lanes: &[Lane<E>]) -> Epoch {
        // 1. Later writes load a later epoch.
        let (closed, closed_ms) = self.raise(context, MutationPoint::FlushEpoch);
        let mut pass = self.pass.lock();
        pass.closings.note(closed, closed_ms);
        // A pass that began after the line above, while this one waited for the lock, serves it too.
        if pass.covered < closed || (pass.covered == closed && MutationPoint::FlushPass.is_active()) {
            self.run_pass(context, lanes, &mut pass);
        }
        drop(pass);
        self.look_at_clock(context, closed_ms);
        Epoch(closed)
    }

    /// 2. and 3. of a flush.
    fn run_pass(&self, context: &Context<E>, lanes: &[Lane<E>], pass: &mut Pass) {
        let covered = self.present();
        let mut stored = context.region().nothing_in_flight();
        let mut any = false;
        for (id, lane) in lanes.iter().enumerate() {
            if !lane.is_touched() {
                continue;
            }
            // 2. Under the lane's lock: nothing of a closed epoch is still to come from here.
            let last = {
                let state = lane.state.lock();
                if context.region().check_stores(MutationPoint::MarkStoreCheck).is_err() {
                    // The lane's last record may be what failed: a mark would prove it.
                    break;
                }
                if MutationPoint::FlushClear.is_active() {
                    lane.clear_touched();
                }
                Reached::by(&state)
            };
            // 3. The mark is stored without the lock, whose locked instruction would drain it.
            if MutationPoint::FlushMark.is_active() {
                stored = stored.and(pass.store_mark(context, id, last, covered));
            }
            if !MutationPoint::FlushClear.is_active() {
                lane.clear_touched();
            }
            any = true;
        }
        if any {
            context.region().fence(MutationPoint::FlushFence, stored);
        }
        pass.covered = covered;
        pass.ended_ms = context.environment().monotonic_ms();
    }

    /// What FUA adds when the last pieces of its writes have committed: the epoch ends, and the writes' own lanes are marked, by one
    /// fence for all of them.
    ///
    /// # Errors
    /// [`ErrorKind::Media`](cbd_types::ErrorKind::Media) when a store to the region has failed.
    pub(crate) fn force_unit_access(
        &self,
        context: &Context<E>,
        lanes: &[Lane<E>],
        ranges: &[ByteRange],
    ) -> Result<()> {
        let map = context.identity().lanes;
        let (closed, closed_ms) = self.raise(context, MutationPoint::FuaEpoch);
        let mut pass = self.pass.lock();
        pass.closings.note(closed, closed_ms);
        let epoch = self.present();
        let mut stored = context.region().nothing_in_flight();
        let mut mark = |id: LaneId| {
            // All that was committed was fenced before its lock was let go; the bit stays, since the epoch
            // has had no pass over the other lanes.
            let last = {
                let state = lanes[id.index()].state.lock();
                if context.region().check_stores(MutationPoint::MarkStoreCheck).is_err() {
                    return;
                }
                Reached::by(&state)
            };
            if !MutationPoint::FuaMark.is_active() {
                return;
            }
            stored.join(pass.store_mark(context, id.index(), last, epoch));
        };
        for (number, range) in ranges.iter().enumerate() {
            // A mark that is not fenced is not followed by another of its lane, which would go over the last one that is durable.
            let is_marked = |lane: LaneId| {
                MutationPoint::FuaMarkOnce.is_active()
                    && ranges[..number].iter().any(|earlier| touches(map, *earlier, lane))
            };
            match only_lane(map, *range) {
                Some(lane) if is_marked(lane) => {}
                Some(lane) => mark(lane),
                None => {
                    let touched = map.touched_by(*range, 0);
                    touched.filter(|lane| !is_marked(*lane)).for_each(&mut mark);
                }
            }
        }
        context.region().fence(MutationPoint::FuaFence, stored);
        drop(pass);
        self.look_at_clock(context, closed_ms);
        context.region().check_stores(MutationPoint::FuaStoreCheck)
    }

    /// A time before which nothing completed that is of a later epoch than `epoch`, if one is known; what is known of earlier epochs is
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

/// The lane of a range that lies in one chunk, as nearly all do.
const fn only_lane(map: LaneMap, range: ByteRange) -> Option<LaneId> {
    let is_in_one = range.end - range.start <= CHUNK - range.start % CHUNK;
    if is_in_one { Some(map.lane_of(range.start)) } else { None }
}

fn touches(map: LaneMap, range: ByteRange, lane: LaneId) -> bool {
    match only_lane(map, range) {
        Some(only) => only == lane,
        None => map.of_lane(lane, range).next().is_some(),
    }
}
