//! How much is dirty: what the lanes' records have dirtied, less what batches have cleaned.

use crate::{Cache, Environment};
use core::sync::atomic::Ordering;

impl<E: Environment> Cache<E> {
    /// Bytes of data that the backing device does not have.
    pub fn dirty_bytes(&self) -> u64 {
        self.unwritten_bytes() + self.parked_bytes()
    }

    /// The same without what is parked.
    pub(super) fn unwritten_bytes(&self) -> u64 {
        self.lanes
            .iter()
            .map(|lane| {
                let dirtied = lane.state.lock().counters.dirtied;
                dirtied.saturating_sub(lane.cleaned_bytes.load(Ordering::Relaxed))
            })
            .sum()
    }

    /// Nothing is dirty: records that were counted and then lost are not to be counted for ever.
    pub(super) fn forget_dirty_that_was_lost(&self) {
        let drained = self.drained_epoch().0;
        for lane in &self.lanes {
            let state = lane.state.lock();
            if state.segments().all(|segment| segment.last_dirty_epoch <= drained) {
                lane.cleaned_bytes.store(state.counters.dirtied, Ordering::Relaxed);
                lane.cleaned_records.store(state.counters.dirty_records, Ordering::Relaxed);
            }
        }
    }
}
