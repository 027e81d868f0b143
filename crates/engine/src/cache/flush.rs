//! Flushes: close an epoch, ensure that no record of it follows, and leave durable marks.
//!
//! Data and records are durable already when a write completes. A flush adds the order in which the backing device catches up,
//! and evidence of how far each lane is complete. The time at which an epoch was closed dates the recovery point.

use crate::{Cache, Environment, epochs::Pass, lane::Lane, lane_map::LaneMap, position::Reached};
use cbd_types::{ByteRange, Epoch, LaneId, MutationPoint, Result};

impl<E: Environment> Cache<E> {
    /// Closes the present epoch: writes that completed before are in it or in an earlier one, and no write that is submitted
    /// after this returns is.
    ///
    /// # Errors
    /// When the cache was stopped.
    pub fn flush(&self) -> Result<()> {
        self.base().gate().check_running()?;
        let closed = self.close_epoch();
        self.base().epochs().order(closed.0);
        self.base().region().check_stores(MutationPoint::FlushStoreCheck)
    }

    /// Closes the epoch even if the cache is stopped. Returns the epoch that it closed.
    pub(crate) fn close_epoch(&self) -> Epoch {
        let base = self.base();
        // 1. Later writes load a later epoch.
        let (closed, closed_ms) = base.epochs().raise(base.context());
        self.complete_closing(closed, closed_ms);
        Epoch(closed)
    }

    /// Completes a flush behind step 1: no record of `closed` or an earlier epoch follows, and the lanes are marked.
    pub(super) fn complete_closing(&self, closed: u64, closed_ms: u64) {
        let base = self.base();
        let mut pass = base.epochs().pass();
        pass.note_closing(closed, closed_ms);
        // A pass that began after the line above, while this one waited for the lock, serves it too.
        if !pass.covers(closed) {
            self.run_pass(&mut pass);
        }
        drop(pass);
        base.epochs().check_clock(base.context(), closed_ms);
    }

    /// 2. and 3. of a flush.
    fn run_pass(&self, pass: &mut Pass) {
        let base = self.base();
        let covered = base.epochs().present();
        let mut stored = base.region().nothing_in_flight();
        let mut any = false;
        for (id, lane) in (0..).map(LaneId).zip(self.lanes()) {
            if !lane.is_touched() {
                continue;
            }
            // 2. Under the lane's lock: no record of a closed epoch follows in this lane.
            let last = {
                let state = lane.lock();
                if base.region().check_stores(MutationPoint::MarkStoreCheck).is_err() {
                    // The lane's last record may be the failed store: a mark would prove it.
                    break;
                }
                lane.clear_touched();
                state.reached()
            };
            // 3. The mark is stored without the lock, whose locked instruction would drain it.
            stored = stored.and(pass.store_mark(base.context(), id, last, covered));
            any = true;
        }
        if any {
            base.region().fence(MutationPoint::FlushFence, stored);
        }
        pass.end(covered, base.environment().monotonic_ms());
    }

    /// Completes FUA writes once their last pieces have committed: closes the epoch and marks the lanes of the writes, with one
    /// fence for all of them.
    ///
    /// # Errors
    /// When the cache was stopped; [`ErrorKind::Media`](cbd_types::ErrorKind::Media) when a store to the region has failed.
    pub fn force_unit_access(&self, ranges: &[ByteRange]) -> Result<()> {
        let base = self.base();
        base.gate().check_running()?;
        let map = base.identity().lanes;
        let (closed, closed_ms) = base.epochs().raise(base.context());
        let mut pass = base.epochs().pass();
        pass.note_closing(closed, closed_ms);
        let epoch = base.epochs().present();
        let mut stored = base.region().nothing_in_flight();
        let mut mark = |id: LaneId| {
            let Some(last) = self.reached(id) else { return };
            stored.join(pass.store_mark(base.context(), id, last, epoch));
        };
        for (number, range) in ranges.iter().enumerate() {
            // A lane gets no second mark before the fence: it would overwrite the last mark that is durable.
            let is_marked =
                |lane: LaneId| ranges[..number].iter().any(|earlier| touches(map, *earlier, lane));
            match only_lane(map, *range) {
                Some(lane) if is_marked(lane) => {}
                Some(lane) => mark(lane),
                None => {
                    let touched = map.touched_by(*range, 0);
                    touched.filter(|lane| !is_marked(*lane)).for_each(&mut mark);
                }
            }
        }
        base.region().fence(MutationPoint::FuaFence, stored);
        drop(pass);
        base.epochs().order(closed);
        base.epochs().check_clock(base.context(), closed_ms);
        base.region().check_stores(MutationPoint::FuaStoreCheck)
    }

    /// How far a lane is complete; `None` if a store to the region has failed. Every commit was fenced before its lane was
    /// unlocked. The touched bit stays set, since no pass over the other lanes was made for this epoch.
    fn reached(&self, id: LaneId) -> Option<Reached> {
        let state = self.lane(id).lock();
        let checked = self.base().region().check_stores(MutationPoint::MarkStoreCheck);
        checked.is_ok().then(|| state.reached())
    }

    /// Milliseconds since the last pass, if a lane was touched since.
    pub(crate) fn unmarked_for_ms(&self, now_ms: u64) -> Option<u64> {
        let ended = self.base().epochs().pass_ended_ms();
        self.lanes().iter().any(Lane::is_touched).then(|| now_ms.saturating_sub(ended))
    }
}

/// The lane of a range that lies in one chunk, as nearly all do.
const fn only_lane(map: LaneMap, range: ByteRange) -> Option<LaneId> {
    if map.is_in_one_chunk(range) { Some(map.lane_of(range.start)) } else { None }
}

fn touches(map: LaneMap, range: ByteRange, lane: LaneId) -> bool {
    match only_lane(map, range) {
        Some(only) => only == lane,
        None => map.of_lane(lane, range).next().is_some(),
    }
}

#[cfg(test)]
mod tests;
