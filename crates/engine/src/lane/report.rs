//! The figures of one or several lanes, for status.

use super::Lane;
use crate::{Environment, base::Base};
use alloc::vec::Vec;
use cbd_types::ByteRange;
use core::sync::atomic::Ordering;

/// The figures of lanes.
#[derive(Default)]
pub(crate) struct LaneReport {
    pub written: u64,
    pub read_hit: u64,
    pub read_missed: u64,
    pub filled: u64,
    pub stored: u64,
    pub waits: u64,
    pub waited_ns: u64,
    pub dirty_bytes: u64,
    pub dirty_records: u64,
    pub records: u64,
    pub index_blocks: u64,
    pub metadata_bytes: u64,
    pub index_bytes: u64,
    /// Quarantined ranges, at most as many as the caller requested.
    pub quarantined: Vec<ByteRange>,
}

impl<E: Environment> Lane<E> {
    /// Adds the figures of the lane to `report`, which lists at most `listed_max` quarantined ranges.
    pub(crate) fn add_to(&self, base: &Base<E>, report: &mut LaneReport, listed_max: usize) {
        let state = self.lock();
        let counters = &state.counters;
        report.written += counters.written;
        report.read_hit += counters.read_hit;
        report.read_missed += counters.read_missed;
        report.filled += counters.filled;
        report.stored += counters.stored;
        report.waits += counters.waits;
        report.waited_ns += counters.waited_ns;
        report.dirty_bytes += counters.dirtied.saturating_sub(self.cleaned_bytes.load(Ordering::Relaxed));
        report.dirty_records +=
            counters.dirty_records.saturating_sub(self.cleaned_records.load(Ordering::Relaxed));
        let first = state.segments().next().map_or(state.next_sequence, |segment| segment.first_sequence);
        report.records += state.next_sequence.saturating_sub(first);
        report.index_blocks += u64::from(state.index.live());
        report.metadata_bytes += state.metadata_bytes();
        report.index_bytes += (state.index.bytes() + state.admission.bytes() + state.curve.bytes()) as u64;
        let ranges = state.overlay.damaged().map(|(range, _)| range);
        let room = listed_max - report.quarantined.len();
        let own = ranges.flat_map(|range| base.identity().lanes.of_lane(state.id, range));
        report.quarantined.extend(own.take(room));
    }
}
