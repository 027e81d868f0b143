//! The pace of writeback: for status, and the latency of reads of the backing device that the pace depends on.
//!
//! Invariants: only the background worker changes the published pace. A read that missed adds to two counters and takes no lock.

use crate::{Environment, Mutex, sync::SharedU64};
use core::sync::atomic::Ordering;

/// Why writeback runs at its present pace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PaceReason {
    /// Nothing was written for a second: what is dirty is written back at leisure, or nothing is dirty.
    #[default]
    Idle,
    /// Less than the target is dirty: only what has been dirty for long is written back.
    BelowTarget,
    /// The rate keeps the dirty data near its target.
    HoldingTarget,
    /// More than the target is dirty, or the target is zero.
    CatchingUp,
    /// A drain was requested, by a user or by a stop.
    DrainRequested,
    /// The backing device is not crash-consistent, although nothing is damaged any more: a healed range, or the rest of a batch that
    /// a former process had begun, is written back.
    Restoring,
    /// A request waits for space, or reclaim finds no clean segment.
    Full,
    /// What is dirty is written back so early, or so fast, that the recovery point stays younger than its maximum.
    RecoveryPoint,
    /// The setting `writeback` pauses it.
    Paused,
    /// Reads of the backing device take longer than `read_latency_target_us`.
    YieldingToReads,
    /// The setting `writeback_rate` limits it.
    LimitedByRate,
}

impl PaceReason {
    /// The reason in words.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::BelowTarget => "below the target",
            Self::HoldingTarget => "holding the target",
            Self::CatchingUp => "catching up",
            Self::DrainRequested => "drain requested",
            Self::Restoring => "restoring consistency",
            Self::Full => "full",
            Self::RecoveryPoint => "keeping the recovery point",
            Self::Paused => "paused",
            Self::YieldingToReads => "yielding to reads",
            Self::LimitedByRate => "limited by writeback_rate",
        }
    }
}

/// The pace of writeback as the background worker last published it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pace {
    /// Why.
    pub reason: PaceReason,
    /// Bytes a second that were written to the backing device, smoothed over about a second.
    pub rate: u64,
    /// Bytes a second that the pace permits; `None` if there is no limit.
    pub permitted: Option<u64>,
}

/// What requests of clients have moved to and from the backing device.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Moved {
    /// Operations of the backing device.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// The published pace, the age of the recovery point, and the latency of reads that missed.
pub(crate) struct PaceBoard<E: Environment> {
    pace: Mutex<E, Pace>,
    /// Since when the backing device may lack a write, by the monotonic clock.
    recovery_point: Mutex<E, Option<i64>>,
    /// The maximum age of the recovery point in milliseconds; 0 for none.
    recovery_point_max_ms: SharedU64<E>,
    reads: SharedU64<E>,
    reads_us: SharedU64<E>,
    moved: SharedU64<E>,
    moved_bytes: SharedU64<E>,
}

impl<E: Environment> PaceBoard<E> {
    pub(crate) fn new() -> Self {
        Self {
            pace: Mutex::<E, _>::new(Pace::default()),
            recovery_point: Mutex::<E, _>::new(None),
            recovery_point_max_ms: SharedU64::new(0),
            reads: SharedU64::new(0),
            reads_us: SharedU64::new(0),
            moved: SharedU64::new(0),
            moved_bytes: SharedU64::new(0),
        }
    }

    /// Publishes the pace.
    pub(crate) fn publish(&self, pace: Pace) {
        *self.pace.lock() = pace;
    }

    /// The pace as it was last published.
    pub(crate) fn pace(&self) -> Pace {
        *self.pace.lock()
    }

    /// Publishes since when the backing device may lack a write.
    pub(crate) fn publish_recovery_point(&self, since_ms: Option<i64>) {
        *self.recovery_point.lock() = since_ms;
    }

    /// The age of the recovery point at the monotonic time `now` in milliseconds; 0 if the backing device lacks nothing.
    pub(crate) fn recovery_point_age_ms(&self, now: u64) -> u64 {
        let now = i64::try_from(now).unwrap_or(i64::MAX);
        self.recovery_point.lock().map_or(0, |since| u64::try_from(now.saturating_sub(since)).unwrap_or(0))
    }

    /// Sets the maximum age of the recovery point in milliseconds; 0 for none.
    pub(crate) fn set_recovery_point_max_ms(&self, max_ms: u64) {
        self.recovery_point_max_ms.store(max_ms, Ordering::Relaxed);
    }

    /// The maximum age of the recovery point in milliseconds; 0 for none.
    pub(crate) fn recovery_point_max_ms(&self) -> u64 {
        self.recovery_point_max_ms.load(Ordering::Relaxed)
    }

    /// Counts a read of the backing device of `bytes` that took `us` microseconds.
    pub(crate) fn count_read(&self, bytes: u64, us: u64) {
        self.count_moved(bytes);
        self.reads_us.fetch_add(us, Ordering::Relaxed);
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of reads, and the sum of their microseconds.
    pub(crate) fn reads(&self) -> (u64, u64) {
        (self.reads.load(Ordering::Relaxed), self.reads_us.load(Ordering::Relaxed))
    }

    /// Counts an operation of the backing device that moved `bytes` for a client.
    pub(crate) fn count_moved(&self, bytes: u64) {
        self.moved_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.moved.fetch_add(1, Ordering::Relaxed);
    }

    /// What clients have moved.
    pub(crate) fn moved(&self) -> Moved {
        Moved {
            requests: self.moved.load(Ordering::Relaxed),
            bytes: self.moved_bytes.load(Ordering::Relaxed),
        }
    }
}
