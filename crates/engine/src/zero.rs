//! Discard and write-zeroes: a record without data, one for each lane that the range covers.

use crate::{Admission, Cache, Environment, overlay::Meaning, pool::Asker};
use cbd_format::record::{Record, RecordKind};
use cbd_types::{ByteRange, MutationPoint, Result};
use core::task::Waker;

/// How far a request that covers several lanes has come; it goes on there after it had to wait.
#[derive(Clone, Copy, Default, Debug)]
pub struct ZeroProgress {
    next_lane: u32,
}

impl<E: Environment> Cache<E> {
    /// Makes `range` read as zeroes. `discard` says that the backing device may give the space back.
    ///
    /// On [`Admission::Full`] call again with the same `progress`.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn zero(
        &self,
        range: ByteRange,
        discard: bool,
        progress: &mut ZeroProgress,
        waker: &Waker,
    ) -> Result<Admission> {
        self.check_writable()?;
        let kind = if discard { RecordKind::Discard } else { RecordKind::WriteZeroes };
        let mut durable =
            self.region().fence(MutationPoint::ZeroNothingFence, self.region().nothing_in_flight());
        for lane_id in self.identity().lanes.touched_by(range, progress.next_lane) {
            let lane = &self.lanes[lane_id.index()];
            let mut state = lane.state.lock();
            self.region().check_stores(MutationPoint::RecordAfterFailure)?;
            if MutationPoint::ZeroTouch.is_active() {
                self.announce(lane);
            }
            // 1. Reserve.
            if !self.make_room(&mut state, 1, 0, Asker::Client, Some(waker)) {
                self.backing().check_not_stalled()?;
                return Ok(Admission::Full);
            }
            // 4. The record names the whole range; what of it belongs to the lane follows from the lane.
            let (location, stored) = self.append(&mut state, Record::new(kind, range), &[]);
            if !MutationPoint::ZeroTouch.is_active() {
                self.announce(lane);
            }
            state.overlay.insert(range, Meaning::Zeroes, self.place_of(location));
            if MutationPoint::ParkedSuperseded.is_active() {
                state.parked.forget(range);
            }
            if MutationPoint::ZeroCancelsFills.is_active() {
                state.cancel_fills(range);
            }
            // 5. Fence before the lane is let go.
            durable = self.region().fence(MutationPoint::ZeroFence, stored);
            progress.next_lane = lane_id.next().0;
        }
        self.region().check_stores(MutationPoint::ZeroStoreCheck)?;
        Ok(Admission::Done(durable))
    }
}
