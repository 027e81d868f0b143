//! Classes of data: how much metadata of file systems a cache keeps, and lets in.
//!
//! Invariants: together with what is pinned, the metadata that is kept is so little that reclaim always finds a lane in which it
//! frees space ([`Settings::validated`](crate::Settings::validated) and [`Cache::metadata_min`]).
//!
//! Elsewhere: the classes of records (`cbd-format`), what reclaim keeps (`lane::reclaim`, `worker::reclaim`).

use super::Cache;
use crate::{Environment, lane::OfMetadata, settings::METADATA_MAX_PERCENT_DEFAULT};

impl<E: Environment> Cache<E> {
    /// Bytes of metadata that reclaim keeps at the present size of the cache, read or not.
    pub fn metadata_min(&self) -> u64 {
        let percent = self.settings().metadata_min_percent;
        let segments = self.base().segment_count();
        // What pins may take at most, less what they take.
        let most = self.pin_limit_of(segments, 100).saturating_sub(self.pinned_bytes());
        self.pin_limit_of(segments, percent).min(most)
    }

    /// Bytes of metadata above which a full cache takes no more at misses, and reclaim keeps none.
    pub fn metadata_max(&self) -> u64 {
        self.metadata_max_of(self.settings().metadata_max_percent)
    }

    fn metadata_max_of(&self, percent: u8) -> u64 {
        let base = self.base();
        u64::from(base.segment_count()) * base.blocks_bytes_per_segment() / 100 * u64::from(percent)
    }

    /// Whether a miss of metadata is recorded before other data: it is not above its maximum.
    pub(super) fn prefers_metadata(&self) -> bool {
        let percent = self.settings().metadata_max_percent;
        percent == METADATA_MAX_PERCENT_DEFAULT
            || self.base().metadata_bytes() < self.metadata_max_of(percent)
    }

    /// What reclaim may append again of the metadata in the next segment.
    pub(crate) fn reclaim_of_metadata(&self) -> OfMetadata {
        let settings = self.settings();
        let (min, max) = (settings.metadata_min_percent, settings.metadata_max_percent);
        if (min, max) == (0, METADATA_MAX_PERCENT_DEFAULT) {
            return OfMetadata { above: u64::MAX, has_chances: true };
        }
        // The cache may have another size than before.
        self.begin_classes();
        let bytes = self.base().metadata_bytes();
        OfMetadata {
            above: if min == 0 { u64::MAX } else { bytes.saturating_sub(self.metadata_min()) },
            has_chances: bytes <= self.metadata_max(),
        }
    }

    /// Puts the bounds into force, in a cache that was opened or whose settings have changed.
    pub(crate) fn begin_classes(&self) {
        self.reserve_for_kept();
        self.count_metadata();
    }

    /// Counts the metadata in all lanes.
    fn count_metadata(&self) {
        let bytes = self.lanes().iter().map(|lane| lane.lock().metadata_bytes()).sum();
        self.base().note_metadata(bytes);
    }

    /// Reserves segments for what is kept, if anything is: a small cache has no space for that.
    pub(super) fn reserve_for_kept(&self) {
        let is_any = self.pinned_bytes() > 0 || self.metadata_min() > 0;
        self.base().pool().reserve_for_kept(is_any);
    }
}
