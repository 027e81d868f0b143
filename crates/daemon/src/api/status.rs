//! The response to `status` on the control socket.

use super::{
    BackendInfo, BlkdevInfo, DiskFigures, EventsInfo, HostInfo, OperationFigures, ScrubInfo, Settings,
    TransportInfo, Wait,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The status of the daemon and its objects.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Status {
    /// Version of the daemon.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_s: u64,
    /// Warnings about the daemon itself.
    pub warnings: Vec<String>,
    /// Memory of clients of all devices together, and counters of refused clients.
    #[serde(default)]
    pub front_ends: FrontEndStatus,
    /// The record of events.
    #[serde(default)]
    pub events: EventsInfo,
    /// Its transports.
    pub transports: Vec<TransportStatus>,
}

/// Memory of clients of all devices together, and counters of refused clients since the daemon started.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct FrontEndStatus {
    /// Bytes of memory that virtual machines have shared with the daemon.
    pub guest_memory_bytes: u64,
    /// Bytes that they may share together.
    pub guest_memory_limit: u64,
    /// Requests to share memory that were refused by this limit.
    pub guest_memory_refused: u64,
    /// Bytes that NBD connections have allocated or reserved.
    pub nbd_memory_bytes: u64,
    /// Bytes that they may allocate together.
    pub nbd_memory_limit: u64,
    /// NBD clients that were refused.
    pub nbd_refused: u64,
    /// NBD clients in the handshake that were disconnected in favour of newer ones.
    pub nbd_gave_way: u64,
    /// NBD connections that ended with an error.
    pub nbd_failed: u64,
    /// Front ends of virtual machines that were refused.
    pub vhost_refused: u64,
    /// Front ends and rings of virtual machines that broke a rule or a bound.
    pub vhost_failed: u64,
    /// Connections to the control socket.
    pub control_connections: u64,
    /// Connections to the control socket that were refused.
    pub control_refused: u64,
    /// Connections of the listener for metrics.
    #[serde(default)]
    pub web_connections: u64,
    /// Requests for metrics that were refused, and connections that were closed for newer ones.
    #[serde(default)]
    pub web_refused: u64,
}

/// A transport in the status.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TransportStatus {
    /// The row of `tp-list`.
    #[serde(flatten)]
    pub info: TransportInfo,
    /// Bytes of the region.
    pub size: u64,
    /// The hosts of a region that several share, as this daemon sees them.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub hosts: Vec<HostInfo>,
    /// Its backends.
    pub backends: Vec<BackendStatus>,
    /// The block devices of this host on backends of other hosts.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub remote_blkdevs: Vec<RemoteBlkdevStatus>,
}

/// A block device of this host on a backend of another host, in the status.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RemoteBlkdevStatus {
    /// As in `dev-list`, whose note has the host besides. Its requests are counted since it was opened.
    #[serde(flatten)]
    pub info: BlkdevInfo,
    /// Number of the host that has the backend.
    pub backend_host_id: u32,
    /// Name of that host.
    pub backend_host: String,
    /// Requests that wait for that host, or are executed there.
    pub in_flight: u64,
    /// Milliseconds for which none of these requests has completed; 0 without any.
    pub waiting_ms: u64,
    /// A write of at most this many bytes is atomic, also for clients of other hosts; none while it is not served.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub atomic_unit: Option<u32>,
    /// Whether both hosts wake each other: they are processes of one kernel. Otherwise they look from time to time for what the other one
    /// has stored.
    #[serde(default)]
    pub woken: bool,
}

/// A backend in the status.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct BackendStatus {
    /// The row of `backend-list`.
    #[serde(flatten)]
    pub info: BackendInfo,
    /// Logical sector in bytes.
    pub sector: u32,
    /// Number of queues.
    pub handlers: u32,
    /// How the backing device is locked and driven.
    pub backing: String,
    /// How verifications ask the backing device, and why not better; absent while the backend is not served.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub verify_method: Option<String>,
    /// A write of at most this many bytes within one 4 MiB chunk is atomic across a crash; absent while the backend is
    /// not served.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub atomic_unit: Option<u32>,
    /// Warnings.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub warnings: Vec<String>,
    /// How the file of the backing device has changed since it was opened: deleted, cut short, renamed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub file_change: Option<String>,
    /// Why it cannot be told whether the disk was written without its cache before the backend was started. It stays until
    /// the disk was left by a stop of the daemon and found unchanged by the next.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub unchecked: Option<String>,
    /// Age in ms of the oldest operation that the backing device has not answered; 0 where none is older than 1 ms.
    #[serde(default)]
    pub oldest_operation_ms: u64,
    /// The operation that the backing device has not answered for 10 s or longer.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub silent: Option<String>,
    /// The requests of clients of all hosts and all its block devices since it was opened, by operation.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub operations: BTreeMap<String, OperationFigures>,
    /// The operations of the backing device since it was opened, by name: `read`, `write`, `flush`, `discard`,
    /// `write_zeroes`, `verify` and `compare`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub disk: BTreeMap<String, DiskFigures>,
    /// What requests have waited for since the backend was opened: `space`, `lane` (the lock of a part of the cache) and
    /// `flush` (of the backing device).
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub waits: BTreeMap<String, Wait>,
    /// Seconds until nothing is dirty, if writeback goes on as at present and no client writes; absent while writeback rests.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub time_to_empty_s: Option<u64>,
    /// Seconds until the cache is full of dirty data, if clients and writeback go on as in the last seconds; absent if it does
    /// not fill.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub time_to_full_s: Option<u64>,
    /// Age of the recovery point in milliseconds: the time since the oldest write that the backing device may lack. 0 if it
    /// lacks none; absent without a cache.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub recovery_point_age_ms: Option<u64>,
    /// Milliseconds that recovery of the cache took when it was opened; absent without a cache.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub recovery_ms: Option<u64>,
    /// Bytes that the cache has written to the region since it was opened: data, records and their second copies; absent
    /// without a cache.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub region_written_bytes: Option<u64>,
    /// Its scrub; absent without a pass, a result of one and a schedule.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub scrub: Option<ScrubInfo>,
    /// The cache; absent without one, or while the backend is not served.
    pub cache: Option<CacheInfo>,
    /// Contents of the cache while the backend is not served; absent without a cache, and until the cache was examined.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub held: Option<HeldInfo>,
    /// Why the cache cannot be examined.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub held_error: Option<String>,
}

/// Contents of the cache of a backend that is not served.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HeldInfo {
    /// Bytes that are not on the backing device yet.
    pub dirty_bytes: u64,
    /// Bytes that are lost because they are damaged in the cache; not counted in the dirty bytes.
    pub quarantined_bytes: u64,
    /// Bytes that the backing device refuses; part of the dirty bytes.
    pub parked_bytes: u64,
    /// Records that the backing device does not have, those without bytes (zeroes, discards) included.
    pub dirty_records: u64,
    /// All epochs up to this are on the backing device.
    pub drained_epoch: u64,
    /// State of the backing device without its cache, in words.
    pub recovery_point: String,
}

/// A cache in the status.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct CacheInfo {
    /// Bytes of the cache.
    pub size: u64,
    /// The bounds of its size and what it gains, if it shares the space of the transport.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub shared: Option<SharedInfo>,
    /// Segments of the cache that are free; with `cache_used_segs` they are `cache_segs`.
    pub free_segments: u64,
    /// Lanes.
    pub lanes: u32,
    /// Whether data has checksums.
    pub data_crc: bool,
    /// The settings.
    #[serde(flatten)]
    pub settings: Settings,
    /// `cache_mode` is not in force yet: the backing device gets what it lacks first.
    pub is_changing_mode: bool,
    /// Bytes that are not on the backing device yet.
    pub dirty_bytes: u64,
    /// The pace of writeback.
    #[serde(default)]
    pub pace: PaceInfo,
    /// Bytes read that were in the cache.
    pub read_hit_bytes: u64,
    /// Bytes read that were not.
    pub read_miss_bytes: u64,
    /// Share of the bytes read that came from the cache, 0 to 1; absent before the first read.
    pub read_hit_ratio: Option<f64>,
    /// Bytes that went past the cache since it was opened, by reason; reasons without bytes are included.
    #[serde(default)]
    pub bypassed_bytes: BTreeMap<String, u64>,
    /// Bytes that a setting would have sent past the cache, and that were cached because it was not legal: an earlier epoch was
    /// not drained, the range was dirty, or the backing device was failing.
    #[serde(default)]
    pub bypass_refused_bytes: u64,
    /// The epoch that is open.
    pub epoch: u64,
    /// All epochs up to this are on the backing device.
    pub drained_epoch: u64,
    /// When the drained epoch was closed, milliseconds since 1970: every write that completed and was flushed before this
    /// time is on the backing device. 0 when it is not known. A lower bound of the recovery point, which is later if nothing
    /// was written for a time after it: the age is `recovery_point_age_ms`.
    pub drained_ms: u64,
    /// State of the backing device without its cache at this moment, in words.
    pub recovery_point: String,
    /// Seconds that the recovery point is old at most by the setting `recovery_point_max_age`; 0 without one.
    #[serde(default)]
    pub recovery_point_max_age_s: u32,
    /// Why the backing device alone is not crash-consistent; absent if it is.
    pub void: Option<String>,
    /// Failed writeback attempts since the last success; 0 while writeback works.
    pub backing_errors: u64,
    /// The error of the latest of them.
    pub last_error: Option<String>,
    /// Whether a write waits for space.
    pub writers_waiting: bool,
    /// The backing device has refused writes for longer than the settings allow: writes that find no space fail.
    pub stalled: bool,
    /// Ranges that the backing device refuses; the cache keeps them.
    pub parked: Vec<RangeInfo>,
    /// Their bytes; part of the dirty bytes.
    pub parked_bytes: u64,
    /// The error of the last attempt to write them.
    pub parked_error: Option<String>,
    /// Bytes that clients wrote since the cache was opened.
    pub written_bytes: u64,
    /// Bytes written to the backing device since then.
    pub written_back_bytes: u64,
    /// Bytes of metadata of file systems, in whole blocks of 4 KiB that were marked so.
    #[serde(default)]
    pub metadata_bytes: u64,
    /// Bytes that are pinned.
    #[serde(default)]
    pub pinned_bytes: u64,
    /// Bytes that may be pinned.
    #[serde(default)]
    pub pin_limit_bytes: u64,
    /// Bytes of memory of the index.
    pub index_bytes: u64,
    /// Bytes of the quarantined ranges, listed or not; not counted in the dirty bytes.
    #[serde(default)]
    pub quarantined_bytes: u64,
    /// Damaged records that reads and writeback have found since the cache was opened: a dirty one once, a clean one at
    /// each read that meets it until it is cached again.
    pub damage_found: u64,
    /// The number of them that were clean, and were read from the backing device instead.
    pub damage_healed: u64,
    /// Executions of rare code paths since the cache was opened, by name.
    #[serde(default)]
    pub rare_paths: BTreeMap<String, u64>,
    /// Ranges of the device whose data is damaged: reads answer with an error.
    pub quarantined: Vec<DamagedInfo>,
}

/// A cache that shares the space of its transport with others.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct SharedInfo {
    /// Bytes that it keeps.
    pub min: u64,
    /// Bytes up to which it grows.
    pub max: u64,
    /// How much one of its hits counts among the caches that share the space.
    pub weight: u16,
    /// Bytes that it is to have by its present load; it comes nearer in small steps. Absent until the load was seen.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub target: Option<u64>,
    /// Share of its reads, 0 to 1, that would hit besides those that do if it had its maximum; absent without reads lately.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gain_at_max: Option<f64>,
}

/// The pace of writeback.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct PaceInfo {
    /// Why writeback runs at this pace, in words.
    pub reason: String,
    /// Bytes a second that are written to the backing device at present.
    pub bytes_per_s: u64,
    /// Bytes a second that the pace permits; absent if there is no limit.
    pub permitted_bytes_per_s: Option<u64>,
    /// Bytes that are to be dirty.
    pub target_bytes: u64,
    /// By how many points, in percent of the cache, the dirty data exceeds its target; negative below it.
    pub error_points: f64,
}

/// A range of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RangeInfo {
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
}

/// A range whose data is damaged.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DamagedInfo {
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    /// The error that was found.
    pub reason: String,
}
