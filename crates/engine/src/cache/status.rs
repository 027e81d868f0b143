//! The status of a cache.

use super::{Cache, Pace};
use crate::{
    CacheMode, Consistency, Environment,
    bypass::Bypassed,
    epochs::CaughtUp,
    lane::{LaneReport, Source},
    rare::RarePaths,
};
use alloc::{format, string::String, vec::Vec};
use cbd_types::{ByteRange, Epoch};

/// Most damaged ranges, and most parked ones, that are listed one by one.
pub(crate) const LISTED_MAX: usize = 1024;

/// Trouble with the backing device that writeback has at present.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BackingTrouble {
    /// The last error.
    pub error: String,
    /// When it began, in milliseconds since 1970 UTC.
    pub since_wall_ms: u64,
    /// Failed attempts since it began.
    pub attempts: u64,
}

/// A range that reads with an error.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DamagedRange {
    /// The range; bytes that were overwritten since read without an error.
    pub range: ByteRange,
    /// The error that was found.
    pub reason: String,
}

/// Counters since the cache was opened, and its present state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CacheStatus {
    /// Segments of the cache that hold a log; the state segment is not counted.
    pub segments: u32,
    /// Free segments.
    pub free_segments: u32,
    /// Number of lanes.
    pub lanes: u32,
    /// Bytes of a segment.
    pub segment_size: u64,
    /// Records in the logs.
    pub records: u64,
    /// Bytes of data that the backing device does not have yet, overwritten versions included.
    pub dirty_bytes: u64,
    /// Records that the backing device does not have yet.
    pub dirty_records: u64,
    /// Bytes that clients wrote.
    pub written_bytes: u64,
    /// Bytes that reads found in the cache.
    pub read_hit_bytes: u64,
    /// Bytes that reads had to take from the backing device.
    pub read_missed_bytes: u64,
    /// Bytes cached after a miss.
    pub filled_bytes: u64,
    /// Bytes that went past the cache, by reason.
    pub bypassed: Bypassed,
    /// Bytes that settings would have sent past the cache, and that were cached because it was not legal: an earlier epoch was not
    /// drained, or the range was dirty, or the backing device was failing.
    pub refused_bypass_bytes: u64,
    /// Bytes stored into the region for records and data.
    pub stored_bytes: u64,
    /// Requests that found the lock of a lane taken.
    pub lane_waits: u64,
    /// Nanoseconds that they waited for it.
    pub lane_waited_ns: u64,
    /// Bytes written to the backing device.
    pub written_back_bytes: u64,
    /// Flushes sent to the backing device.
    pub backing_flushes: u64,
    /// The present epoch.
    pub epoch: Epoch,
    /// Everything up to this epoch is durable on the backing device.
    pub drained_epoch: Epoch,
    /// The recovery point, in milliseconds since 1970 UTC: every write that completed and was flushed before this time is on the
    /// backing device, except for ranges that are or were damaged or parked while the backing device is not crash-consistent. A
    /// lower bound: the time at which the drained epoch was closed, or an earlier one. 0 if it is not known.
    pub drained_wall_ms: u64,
    /// Whether the backing device alone is crash-consistent at this moment.
    pub backing_is_consistent: bool,
    /// The reason, if it is not.
    pub void_reason: Option<String>,
    /// Milliseconds since the oldest write that the backing device may lack; 0 if it lacks none. What is parked or quarantined does not
    /// count.
    pub recovery_point_age_ms: u64,
    /// The maximum of that age in milliseconds that writeback keeps; 0 for none.
    pub recovery_point_max_ms: u64,
    /// The pace of writeback.
    pub pace: Pace,
    /// Bytes that writeback lets be dirty.
    pub dirty_target_bytes: u64,
    /// Bytes of all log segments.
    pub capacity: u64,
    /// Order of writeback.
    pub consistency: Consistency,
    /// How writes go.
    pub cache_mode: CacheMode,
    /// The mode is not in force yet: the backing device gets what it lacks first.
    pub is_changing_mode: bool,
    /// Something has gone past the cache that no flush of the backing device has covered: a power failure may take it there, as
    /// on any disk.
    pub has_unflushed: bool,
    /// Blocks of 4 KiB in the index.
    pub index_blocks: u64,
    /// Bytes of metadata of file systems, as far as whole 4 KiB blocks of it were marked so.
    pub metadata_bytes: u64,
    /// Bytes of memory of the index, of the admission that decides which blocks it gets, and of the model of other sizes.
    pub index_bytes: u64,
    /// Ranges known to be damaged; only some if there are very many.
    pub damaged: Vec<DamagedRange>,
    /// Bytes of the quarantined ranges, listed or not; not part of `dirty_bytes`. Damage that reads have found is included once
    /// writeback has recorded it: until then it counts as dirty.
    pub quarantined_bytes: u64,
    /// Damaged records that reads and writeback have found since the cache was opened: a dirty one counts once, a clean one at
    /// each read of it until it is cached again.
    pub damage_found: u64,
    /// The number of them that were clean, and were read from the backing device instead.
    pub damage_healed: u64,
    /// Trouble with the backing device, if any.
    pub backing_trouble: Option<BackingTrouble>,
    /// Attempts of writeback that failed since the cache was opened, whether or not later ones succeeded.
    pub backing_failures: u64,
    /// The error of the last failed attempt.
    pub last_backing_failure: Option<String>,
    /// Parked ranges, which the backing device refuses; only some if there are very many.
    pub parked: Vec<ByteRange>,
    /// Bytes that are parked; part of `dirty_bytes`.
    pub parked_bytes: u64,
    /// How often a range was parked since the cache was opened, and how often the backing device then accepted one.
    pub parked_total: u64,
    /// See `parked_total`.
    pub unparked_total: u64,
    /// How often parked ranges were retried since the cache was opened: soon after each [`request_drain`](Cache::request_drain),
    /// otherwise rarely.
    pub parked_attempts: u64,
    /// The error of the backing device at the last retry of a parked range.
    pub parked_error: Option<String>,
    /// The backing device has refused writes for longer than the settings allow: requests that find no space fail.
    pub is_stalled: bool,
    /// Whether a request waits for space.
    pub writers_waiting: bool,
    /// How often rare paths were taken.
    pub rare: RarePaths,
    /// The reason if the region accepts no more writes.
    pub region_failed: Option<String>,
}

impl CacheStatus {
    /// Segments of the cache in use: those that hold records, or are open for the next ones.
    #[must_use]
    pub const fn used_segments(&self) -> u32 {
        self.segments.saturating_sub(self.free_segments)
    }

    /// Bytes that the backing device alone does not have: dirty data, parked ranges included, and quarantined data. Removing the
    /// cache loses this data.
    #[must_use]
    pub const fn missing_bytes(&self) -> u64 {
        self.dirty_bytes.saturating_add(self.quarantined_bytes)
    }

    /// By how much the dirty data that can be written back exceeds its target, in thousandths of the cache; negative below it.
    #[must_use]
    pub fn dirty_error_permille(&self) -> i64 {
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let dirty = self.dirty_bytes.saturating_sub(self.parked_bytes);
        let error = signed(dirty) - signed(self.dirty_target_bytes);
        error.saturating_mul(1000) / signed(self.capacity.max(1))
    }

    /// Whether the backing device alone has everything that was written.
    #[must_use]
    pub const fn is_all_on_backing(&self) -> bool {
        self.missing_bytes() == 0 && self.dirty_records == 0
    }
}

/// The state of a range of bytes, for block status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CachedState {
    /// The range.
    pub range: ByteRange,
    /// Reads as zeroes.
    pub zeroes: bool,
    /// The cache has its newest bytes.
    pub cached: bool,
    /// The backing device does not have them yet.
    pub dirty: bool,
}

/// Why the backing device alone is not crash-consistent, if it is not. `behind`: an epoch up to which it must be drained.
fn void_reason(damaged: &[DamagedRange], parked: &[ByteRange], behind: Option<u64>) -> Option<String> {
    if !damaged.is_empty() {
        return Some(format!("{} ranges are quarantined", damaged.len()));
    }
    if !parked.is_empty() {
        return Some(format!("{} ranges are parked", parked.len()));
    }
    behind.map(|epoch| format!("not all epochs up to {epoch} are on the backing device"))
}

impl<E: Environment> Cache<E> {
    /// The state of the cache.
    pub fn status(&self) -> CacheStatus {
        let lanes = self.add_up_lanes();
        let mut damaged: Vec<DamagedRange> = lanes
            .quarantined
            .iter()
            .map(|range| DamagedRange { range: *range, reason: String::from("quarantined") })
            .collect();
        for (range, reason) in self.damage_met() {
            if !damaged.iter().any(|known| known.range.contains(&range)) {
                damaged.push(DamagedRange { range, reason });
            }
        }
        let (damage_found, damage_healed) = self.damage_log().counted();
        let base = self.base();
        let parked = self.parked_ranges();
        let parked_bytes = self.parked_bytes();
        let CaughtUp { epoch: drained_epoch, void_until, dated_ms: drained_wall_ms } =
            base.epochs().caught_up();
        let is_behind = void_until > drained_epoch.0;
        let void_reason = void_reason(&damaged, &parked, is_behind.then_some(void_until));
        let (lane_waits, lane_waited_ns) = base.lane_waits().read();
        let (backing, counted) = (self.backing().report(), self.parked_counters().report());
        CacheStatus {
            segments: base.segment_count(),
            free_segments: base.pool().free(),
            lanes: base.identity().lanes.lanes,
            segment_size: base.shape().size,
            records: lanes.records,
            dirty_bytes: lanes.dirty_bytes + parked_bytes,
            dirty_records: lanes.dirty_records,
            written_bytes: lanes.written,
            read_hit_bytes: lanes.read_hit,
            read_missed_bytes: lanes.read_missed,
            filled_bytes: lanes.filled,
            bypassed: base.bypassed().read(),
            refused_bypass_bytes: self.refused_bypass_bytes(),
            stored_bytes: lanes.stored,
            lane_waits,
            lane_waited_ns,
            written_back_bytes: backing.written_back_bytes,
            backing_flushes: backing.flushes,
            epoch: Epoch(base.epochs().present()),
            drained_epoch,
            drained_wall_ms,
            backing_is_consistent: void_reason.is_none(),
            void_reason,
            recovery_point_age_ms: self.pace.recovery_point_age_ms(base.environment().monotonic_ms()),
            recovery_point_max_ms: self.pace.recovery_point_max_ms(),
            pace: self.pace.pace(),
            dirty_target_bytes: self.settings().dirty_target(base.capacity()),
            capacity: base.capacity(),
            consistency: self.settings().consistency,
            cache_mode: self.base().mode().get().0,
            is_changing_mode: self.is_changing_mode(),
            has_unflushed: self.has_unflushed_bypass(),
            index_blocks: lanes.index_blocks,
            metadata_bytes: lanes.metadata_bytes,
            index_bytes: lanes.index_bytes,
            damaged,
            quarantined_bytes: self.quarantined_bytes(),
            damage_found,
            damage_healed,
            backing_trouble: backing.trouble,
            backing_failures: backing.failures,
            last_backing_failure: backing.last_failure,
            parked,
            parked_bytes,
            parked_total: counted.parked,
            unparked_total: counted.unparked,
            parked_attempts: counted.attempts,
            parked_error: counted.error,
            is_stalled: backing.is_stalled,
            writers_waiting: base.pool().has_waiters(),
            rare: base.rare().read(),
            region_failed: base.region().store_failure().map(|error| error.line()),
        }
    }

    #[inline(never)]
    fn add_up_lanes(&self) -> LaneReport {
        let mut report = LaneReport::default();
        self.lanes().iter().for_each(|lane| lane.add_to(self.base(), &mut report, LISTED_MAX));
        report
    }

    /// The states of `range`, in order and without holes.
    pub fn extents(&self, range: ByteRange) -> Vec<CachedState> {
        let mut found: Vec<CachedState> = Vec::new();
        let drained = self.drained_epoch();
        for chunk in range.split_at_multiples(cbd_types::CHUNK) {
            let state = self.lane_of(chunk.start).lock();
            state.look_up(self.base(), chunk, &mut |range, source| {
                let (zeroes, cached, dirty) = match source {
                    Source::Backing => (false, false, false),
                    Source::Zeroes => (true, true, false),
                    Source::Damaged => (false, true, true),
                    Source::Record(location) => {
                        let dirty = self.base().load_record(location).map_or(true, |record| {
                            record.kind().is_parked()
                                || (record.kind().is_dirty() && Epoch(record.epoch.get()) > drained)
                        });
                        (false, true, dirty)
                    }
                };
                match found.last_mut() {
                    Some(last) if (last.zeroes, last.cached, last.dirty) == (zeroes, cached, dirty) => {
                        last.range.end = range.end;
                    }
                    _ => found.push(CachedState { range, zeroes, cached, dirty }),
                }
            });
        }
        found
    }
}
