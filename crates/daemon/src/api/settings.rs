//! The settings of a backend: what `set` changes and answers.

use super::{CacheMode, Consistency, Offload, OnWriteError, ReadFill, Readahead, ScrubSettings, WhenFull};
use serde::{Deserialize, Serialize};

/// Changes settings of a running backend; an absent one is unchanged.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SettingsChange {
    /// Share of used segments in percent above which reclaim runs, 0 to 98.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gc_percent: Option<i64>,
    /// Write order of writeback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consistency: Option<Consistency>,
    /// Bytes a second that writeback may write; 0 is automatic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writeback_rate: Option<u64>,
    /// Share of the cache in percent that the automatic rate allows to be dirty, 0 to 90.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writeback_percent: Option<i64>,
    /// Action when write errors of the backing device persist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_write_error: Option<OnWriteError>,
    /// Seconds after which write errors count as persistent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_error_after_s: Option<u32>,
    /// How writes go. The change takes effect when the backing device has everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_mode: Option<CacheMode>,
    /// The misses that are recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_fill: Option<ReadFill>,
    /// Bytes of a sequential stream of reads behind which it is not recorded; 0 is never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequential_read_cutoff: Option<u64>,
    /// Whether sequential reads are read ahead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub readahead: Option<Readahead>,
    /// Bytes of a sequential stream of writes behind which it goes to the backing device alone; 0 is never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequential_write_cutoff: Option<u64>,
    /// What a write does in a full cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when_full: Option<WhenFull>,
    /// Latency of the cache in microseconds above which reads go past it; 0 is never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub congestion_read_us: Option<u32>,
    /// The same for writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub congestion_write_us: Option<u32>,
    /// Latency in microseconds of reads of the backing device above which writeback slows down; 0 is never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_latency_target_us: Option<u32>,
    /// Seconds for which writeback is paused from now on; 0 ends a pause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writeback_pause_s: Option<u32>,
    /// Share of the cache in percent that pins may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin_percent: Option<i64>,
    /// Share of the cache in percent that metadata of file systems keeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata_min_percent: Option<i64>,
    /// Share of the cache in percent above which metadata of file systems gets no preference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata_max_percent: Option<i64>,
    /// Seconds from the beginning of a scrub to that of the next one; 0 is never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub_every_s: Option<u64>,
    /// When scheduled scrubs run, `HH:MM-HH:MM` in UTC; empty: always.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub_window: Option<String>,
    /// Bytes a second of scrubs; 0 is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub_rate: Option<u64>,
    /// Whether scrubs wait while clients use the cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scrub_idle_only: Option<bool>,
    /// Whether the backing device verifies ranges by commands of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offload: Option<Offload>,
    /// Seconds that the recovery point is old at most, if writeback can keep that; 0 is no promise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery_point_max_age_s: Option<u32>,
    /// The name of the backend; empty: it has none any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// The answer to a change of settings.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SettingsChanged {
    /// Number of the backend.
    pub backend_id: u32,
    /// All its settings now.
    #[serde(flatten)]
    pub settings: Settings,
    /// The settings of its scrubs, and others that the daemon stores outside the region.
    #[serde(flatten)]
    pub scrubs: ScrubSettings,
}

/// The settings of a backend.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// Share of used segments in percent above which reclaim runs.
    pub gc_percent: u32,
    /// Write order of writeback.
    pub consistency: Consistency,
    /// Bytes a second that writeback may write; 0 is automatic.
    pub writeback_rate: u64,
    /// Share of the cache in percent that the automatic rate allows to be dirty.
    pub writeback_percent: u32,
    /// Action when write errors of the backing device persist.
    pub on_write_error: OnWriteError,
    /// Seconds after which write errors count as persistent.
    pub write_error_after_s: u32,
    /// How writes go.
    pub cache_mode: CacheMode,
    /// The misses that are recorded.
    pub read_fill: ReadFill,
    /// Bytes of a sequential stream of reads behind which it is not recorded; 0 is never.
    pub sequential_read_cutoff: u64,
    /// Whether sequential reads are read ahead.
    pub readahead: Readahead,
    /// Bytes of a sequential stream of writes behind which it goes to the backing device alone; 0 is never.
    pub sequential_write_cutoff: u64,
    /// What a write does in a full cache.
    pub when_full: WhenFull,
    /// Latency of the cache in microseconds above which reads go past it; 0 is never.
    pub congestion_read_us: u32,
    /// The same for writes.
    pub congestion_write_us: u32,
    /// Latency in microseconds of reads of the backing device above which writeback slows down; 0 is never.
    pub read_latency_target_us: u32,
    /// Until when writeback is paused, in milliseconds since 1970 UTC; 0 if it is not.
    pub writeback_paused_until_ms: u64,
    /// Share of the cache in percent that pins may take.
    pub pin_percent: u32,
    /// Share of the cache in percent that metadata of file systems keeps.
    #[serde(default)]
    pub metadata_min_percent: u32,
    /// Share of the cache in percent above which metadata of file systems gets no preference.
    #[serde(default)]
    pub metadata_max_percent: u32,
}
