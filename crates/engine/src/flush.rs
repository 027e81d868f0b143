//! Flushes: close an epoch, see to it that no record of it is still to come, and leave durable marks.
//!
//! Data and records are durable already when a write completes. A flush adds the order in which the backing device
//! catches up, and evidence of how far each lane was complete. When an epoch was closed dates the recovery point.

use crate::{
    Cache, Environment, closings::Closings, drained::store_drained, lane::LaneState, slots::TwoSlots,
};
use alloc::vec::Vec;
use cbd_format::LaneMark;
use cbd_types::{ByteRange, CHUNK, Epoch, LaneId, MutationPoint, Result};
use core::sync::atomic::Ordering;

/// What passes share; one pass at a time.
pub(crate) struct Pass {
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
    pub(crate) fn new(marks: Vec<TwoSlots<LaneMark>>, covered: u64, now_ms: u64) -> Self {
        Self { covered, marks, closings: Closings::new(), ended_ms: now_ms }
    }

    /// All epochs below `epoch` are complete: recovery, which began at `wall_ms`, has seen their records. `last` is the last epoch of
    /// one that may be dirty. When each was closed is not known, but all that completed before `wall_ms` is of it or earlier.
    pub(crate) fn begin_at(&mut self, epoch: u64, last: u64, wall_ms: u64) {
        self.covered = epoch;
        self.closings.note(if MutationPoint::ClosingsAfterRestart.is_active() { last } else { 0 }, wall_ms);
    }
}

impl<E: Environment> Cache<E> {
    /// Closes the present epoch: what completed before is in it or in an earlier one, and nothing that is submitted
    /// after this returns is.
    ///
    /// # Errors
    /// When the cache was stopped.
    pub fn flush(&self) -> Result<()> {
        self.check_running()?;
        self.close_epoch();
        self.region().check_stores(MutationPoint::FlushStoreCheck)
    }

    /// A flush without the question whether the cache runs. Returns the epoch that it closed.
    pub(crate) fn close_epoch(&self) -> Epoch {
        // 1. Later writes load a later epoch.
        let (closed, closed_ms) = self.raise_epoch(MutationPoint::FlushEpoch);
        let mut pass = self.pass.lock();
        pass.closings.note(closed, closed_ms);
        // A pass that began after the line above, while this one waited for the lock, serves it too.
        if pass.covered < closed || (pass.covered == closed && MutationPoint::FlushPass.is_active()) {
            self.run_pass(&mut pass);
        }
        drop(pass);
        self.look_at_clock(closed_ms);
        Epoch(closed)
    }

    /// Ends the present epoch. Returns it, and a time before which nothing completed that is of a later one.
    fn raise_epoch(&self, point: MutationPoint) -> (u64, u64) {
        // The clock is read first: a write that loads the new epoch completes later.
        let before_ms = MutationPoint::ClosingReadFirst.is_active().then(|| self.environment().wall_ms());
        let closed = self.epoch.fetch_add(u64::from(point.is_active()), Ordering::SeqCst);
        let closed_ms = before_ms.unwrap_or_else(|| self.environment().wall_ms());
        (closed, closed_ms)
    }

    /// Where the clock was set back behind the recovery point, that is set back too, durably, before a flush completes that makes
    /// writes durable which completed since: by the clock they are older than the recovery point.
    fn look_at_clock(&self, read_ms: u64) {
        if read_ms >= self.dated_ms.load(Ordering::Relaxed)
            || !MutationPoint::ClosingsClockSetBack.is_active()
        {
            return;
        }
        // Not where this thread was only slow.
        let now_ms = self.environment().wall_ms();
        if now_ms < self.dated_ms.load(Ordering::Relaxed) {
            store_drained(self, |drained| drained.closed_ms = drained.closed_ms.get().min(now_ms).into());
        }
    }

    /// A time before which nothing completed that is of a later epoch than `epoch`, which is drained; the time that was known before
    /// if nothing better is. Nobody asks for earlier epochs any more.
    pub(crate) fn closed_ms(&self, epoch: u64) -> u64 {
        let known_ms = self.dated_ms.load(Ordering::Relaxed);
        self.pass.lock().closings.take(epoch).map_or(known_ms, |closed_ms| closed_ms.max(known_ms))
    }

    /// 2. and 3. of a flush.
    fn run_pass(&self, pass: &mut Pass) {
        let covered = self.epoch.load(Ordering::SeqCst);
        let mut stored = self.region().nothing_in_flight();
        let mut any = false;
        for (id, lane) in self.lanes.iter().enumerate() {
            if !lane.is_touched() {
                continue;
            }
            // 2. Under the lane's lock: nothing of a closed epoch is still to come from here.
            let last = {
                let state = lane.state.lock();
                if self.region().check_stores(MutationPoint::MarkStoreCheck).is_err() {
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
                stored = stored.and(self.store_mark(pass, id, last, covered));
            }
            if !MutationPoint::FlushClear.is_active() {
                lane.clear_touched();
            }
            any = true;
        }
        if any {
            self.region().fence(MutationPoint::FlushFence, stored);
        }
        pass.covered = covered;
        pass.ended_ms = self.environment().monotonic_ms();
    }

    /// What FUA adds when the last pieces of its writes have committed: the epoch ends, and the writes' own lanes are marked, by one
    /// fence for all of them.
    ///
    /// # Errors
    /// When the cache was stopped.
    pub fn force_unit_access(&self, ranges: &[ByteRange]) -> Result<()> {
        self.check_running()?;
        let (closed, closed_ms) = self.raise_epoch(MutationPoint::FuaEpoch);
        let mut pass = self.pass.lock();
        pass.closings.note(closed, closed_ms);
        let epoch = self.epoch.load(Ordering::SeqCst);
        let mut stored = self.region().nothing_in_flight();
        let mut mark = |id: LaneId| {
            // All that was committed was fenced before its lock was let go; the bit stays, since the epoch
            // has had no pass over the other lanes.
            let last = {
                let state = self.lanes[id.index()].state.lock();
                if self.region().check_stores(MutationPoint::MarkStoreCheck).is_err() {
                    return;
                }
                Reached::by(&state)
            };
            if !MutationPoint::FuaMark.is_active() {
                return;
            }
            stored.join(self.store_mark(&mut pass, id.index(), last, epoch));
        };
        for (number, range) in ranges.iter().enumerate() {
            // A mark that is not fenced is not followed by another of its lane, which would go over the last one that is durable.
            let is_marked = |lane: LaneId| {
                MutationPoint::FuaMarkOnce.is_active()
                    && ranges[..number].iter().any(|earlier| self.touches(*earlier, lane))
            };
            match self.only_lane(*range) {
                Some(lane) if is_marked(lane) => {}
                Some(lane) => mark(lane),
                None => {
                    let touched = self.identity.lanes.touched_by(*range, 0);
                    touched.filter(|lane| !is_marked(*lane)).for_each(&mut mark);
                }
            }
        }
        self.region().fence(MutationPoint::FuaFence, stored);
        drop(pass);
        self.look_at_clock(closed_ms);
        self.region().check_stores(MutationPoint::FuaStoreCheck)
    }

    /// The lane of a range that lies in one chunk, as nearly all do.
    const fn only_lane(&self, range: ByteRange) -> Option<LaneId> {
        let is_in_one = range.end - range.start <= CHUNK - range.start % CHUNK;
        if is_in_one { Some(self.identity.lanes.lane_of(range.start)) } else { None }
    }

    fn touches(&self, range: ByteRange, lane: LaneId) -> bool {
        match self.only_lane(range) {
            Some(only) => only == lane,
            None => self.identity.lanes.of_lane(lane, range).next().is_some(),
        }
    }

    fn store_mark(&self, pass: &mut Pass, lane: usize, last: Reached, epoch: u64) -> cbd_types::InFlight {
        let mark = &mut pass.marks[lane];
        if mark.content().is_some_and(|mark| mark.lane_sequence.get() >= last.lane_sequence) {
            return self.region().nothing_in_flight();
        }
        mark.store(
            self.region(),
            LaneMark {
                lane_sequence: last.lane_sequence.into(),
                epoch: epoch.into(),
                ownership: self.identity.ownership.into(),
                run: last.run.into(),
                reserved: [0; 16],
            },
        )
    }

    /// The epoch below which all are closed and complete.
    pub(crate) fn covered(&self) -> u64 {
        self.pass.lock().covered
    }

    /// Milliseconds since the last pass, if a lane was touched since.
    pub(crate) fn unmarked_for_ms(&self, now_ms: u64) -> Option<u64> {
        let ended = self.pass.lock().ended_ms;
        self.lanes.iter().any(super::lane::Lane::is_touched).then(|| now_ms.saturating_sub(ended))
    }
}
