//! Discard and write-zeroes: a record without data, one for each lane that the range covers.

use super::{
    Admission, Cache,
    write::{no_memory, other_data},
};
use crate::{Environment, base::Lack};
use cbd_format::record::RecordKind;
use cbd_types::{ByteRange, MutationPoint, Result};
use core::task::Waker;

/// The progress of a request that covers several lanes; a request that had to wait continues from there.
#[derive(Clone, Copy, Default, Debug)]
pub struct ZeroProgress {
    next_lane: u32,
}

impl ZeroProgress {
    /// Whether part of the range is zeroes.
    #[must_use]
    pub const fn has_begun(&self) -> bool {
        self.next_lane > 0
    }
}

impl<E: Environment> Cache<E> {
    /// Makes `range` read as zeroes. `discard`: the backing device may free the space.
    ///
    /// On [`Admission::Full`], call again with the same `progress`.
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
        let base = self.base();
        base.gate().check_writable()?;
        let kind = if discard { RecordKind::Discard } else { RecordKind::WriteZeroes };
        let mut durable =
            base.region().fence(MutationPoint::ZeroNothingFence, base.region().nothing_in_flight());
        for id in base.identity().lanes.touched_by(range, progress.next_lane) {
            let lane = self.lane(id);
            let mut state = lane.lock();
            if base.mode().refuses_dirty() {
                drop(state);
                return Self::goes_past(waker);
            }
            if let Some(outcome) = Self::waits_for_bypass(&mut state, range, waker) {
                return outcome;
            }
            base.region().check_stores(MutationPoint::RecordAfterFailure)?;
            lane.announce(base);
            let stored = match state.commit_zeroes(base, kind, range, waker) {
                Ok(stored) => stored,
                Err(Lack::Space) => {
                    self.backing().check_not_stalled()?;
                    return Ok(Admission::Full);
                }
                Err(Lack::Data) => return other_data(),
                Err(Lack::Memory) => return no_memory(),
            };
            durable = stored;
            progress.next_lane = id.next().0;
        }
        base.region().check_stores(MutationPoint::ZeroStoreCheck)?;
        Ok(Admission::Done(durable))
    }
}
