//! Pins of a cache: how much may be pinned, and how much of it is in the cache.
//!
//! Invariants: what is pinned is less than what the cache holds by so much that reclaim always finds a lane in which it frees
//! space ([`Cache::pin_limit`]).
//!
//! Elsewhere: where pins are stored (`transport::pins`), and what they do (`lane::pins`, `worker::reclaim`).

use super::Cache;
use crate::{Environment, lane::Source, pins::PinnedRanges};
use alloc::{format, sync::Arc};
use cbd_types::{ByteRange, CHUNK, Error, ErrorKind, Result, Size};

impl<E: Environment> Cache<E> {
    /// Bytes that may be pinned at the present size of the cache.
    pub fn pin_limit(&self) -> u64 {
        self.pin_limit_of(self.base().segment_count(), self.settings().pin_percent)
    }

    /// Bytes that may be pinned in `segments` log segments, of which pins may take `percent`.
    pub(crate) fn pin_limit_of(&self, segments: u32, percent: u8) -> u64 {
        let base = self.base();
        let lanes = u64::from(base.identity().lanes.lanes);
        // In each lane the open segment and one more; two in the lane in which reclaim frees space.
        let needed = 2 * lanes + 2 + u64::from(base.pool().reserve_with_kept());
        let share = u64::from(segments) * u64::from(percent) / 100;
        share.min(u64::from(segments).saturating_sub(needed)) * base.blocks_bytes_per_segment()
    }

    /// Bytes of a segment.
    pub(crate) fn segment_bytes(&self) -> u32 {
        self.base().shape().size as u32
    }

    /// Bytes that are pinned.
    pub fn pinned_bytes(&self) -> u64 {
        self.base().pinned_bytes()
    }

    /// Whether some of `range` is pinned.
    pub fn is_pinned(&self, range: ByteRange) -> bool {
        self.pinned_bytes() > 0 && self.lane_of(range.start).lock().is_pinned(range)
    }

    /// Bytes of `range` that are in the cache.
    pub fn cached_bytes_of(&self, range: ByteRange) -> u64 {
        let mut bytes = 0;
        let end = range.end.min(self.size());
        for part in (ByteRange { start: range.start.min(end), end }).split_at_multiples(CHUNK) {
            self.lane_of(part.start).lock().look_up(self.base(), part, &mut |piece, source| {
                if matches!(source, Source::Record(_) | Source::Zeroes) {
                    bytes += piece.len();
                }
            });
        }
        bytes
    }

    /// Refuses to pin more than the cache may hold with `segments` log segments and `percent` of them for pins.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] with the numbers.
    pub(crate) fn check_pinned(&self, bytes: u64, segments: u32, percent: u8) -> Result<()> {
        let limit = self.pin_limit_of(segments, percent);
        if bytes <= limit {
            return Ok(());
        }
        let text = format!(
            "pins of {} ({bytes} bytes) do not fit: with pin_percent={percent} pins may take {} ({limit} bytes) of a cache with \
             {} of log",
            Size(bytes),
            Size(limit),
            Size(u64::from(segments) * self.base().shape().size)
        );
        Err(Error::new(ErrorKind::NoSpace, text))
    }

    /// Whether the backing device takes what is dirty: it has not refused it for long, and is at no common moment with others.
    pub(crate) fn can_write_back(&self) -> bool {
        self.backing().check_not_stalled().is_ok() && self.base().epochs().limit().is_none()
    }

    /// Pins `ranges` and nothing else. The transport has stored them.
    pub(crate) fn set_pins(&self, ranges: &Arc<PinnedRanges>) {
        let base = self.base();
        let is_any = !ranges.is_empty();
        base.note_pinned(ranges.bytes());
        for (id, lane) in (0..).map(cbd_types::LaneId).zip(self.lanes()) {
            let of_lane = |range| base.identity().lanes.of_lane(id, range);
            let bytes = ranges.iter().flat_map(of_lane).map(|part| part.len()).sum();
            let new = is_any.then(|| Arc::clone(ranges));
            let former = lane.lock().set_pins(new, bytes);
            drop(former);
        }
        self.reserve_for_kept();
        base.wakeups().wake();
    }
}
