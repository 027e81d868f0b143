//! The JSON requests and responses of the control socket, `/v1`.
//!
//! Invariants: from version 1.0 on a field keeps its name and meaning for as long as the path begins with `/v1`; the
//! fields that the original `cbdctrl` printed have its names. An unknown field in a request is an error,
//! so a misspelt option is never ignored.
//!
//! Elsewhere: the operations ([`crate::control`]), the paths ([`crate::server`]).

mod classes;
mod drain;
mod errors;
mod events;
mod figures;
mod grow;
mod live;
mod map;
mod names;
mod pins;
mod sample;
mod scrub;
mod settings;
mod since;
mod status;
mod users;
mod verify;

pub use classes::BlkdevClass;
pub use drain::{CommonCheckpoint, Drain, StopBackend, StopBlkdev};
pub use errors::{ErrorAnswer, ErrorBody, kind_of};
pub use events::{
    Event, EventCommandInfo, EventLine, EventsBegin, EventsEnd, EventsGap, EventsInfo, Severity,
};
pub use figures::{Bucket, DiskFigures, DiskOrigin, Histogram, OperationFigures, Outcome, Wait};
pub use grow::{BackendGrown, BlkdevGrown, GrowTransport, TransportGrown};
pub use live::{AttachCache, DetachCache, MoveBackend, ResizeCache};
pub use map::{DeviceMap, MAP_CELLS_MAX, MapCell};
pub use names::NumberOrName;
pub use pins::{AddPins, NewPin, PinInfo, PinKind, PinName, PinsInfo, RemovePins, printable};
pub use sample::RequestSample;
pub use scrub::{ScrubAction, ScrubInfo, ScrubPass, ScrubRequest, ScrubSettings, ScrubState};
pub use settings::{Settings, SettingsChange, SettingsChanged};
pub use since::{Counted, have_fallen, since};
pub use status::{
    BackendStatus, CacheInfo, DamagedInfo, FrontEndStatus, HeldInfo, PaceInfo, RangeInfo, RemoteBlkdevStatus,
    SharedInfo, Status, TransportStatus,
};
pub use users::BlkdevUser;
pub use verify::{CopyInfo, FindingInfo, MetadataInfo, Offload, VerifiedInfo, VerifyLevel, VerifyRange};

use cbd_types::{Error, ErrorKind};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Defines the control plane's words for a choice of the engine, and converts both ways.
macro_rules! words {
    ($($(#[$doc:meta])* $name:ident($setting:literal) { $($(#[$value_doc:meta])* $value:ident),* $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
        #[serde(rename_all = "lowercase")]
        pub enum $name {
            $($(#[$value_doc])* $value,)*
        }

        impl $name {
            /// All values.
            pub const ALL: [Self; [$($name::$value),*].len()] = [$(Self::$value),*];

            /// The word in commands, JSON and configuration.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => cbd_engine::$name::$value.name(),)*
                }
            }
        }

        impl std::str::FromStr for $name {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self, Error> {
                Self::ALL.into_iter().find(|known| known.name() == text).ok_or_else(|| {
                    let names = Self::ALL.map(Self::name);
                    let (last, others) = names.split_last().unwrap_or((&"", &[]));
                    let text = format!("{} is {} or {last}, not \"{text}\"", $setting, others.join(", "));
                    Error::new(ErrorKind::InvalidArgument, text)
                })
            }
        }

        impl From<$name> for cbd_engine::$name {
            fn from(value: $name) -> Self {
                match value {
                    $($name::$value => Self::$value,)*
                }
            }
        }

        impl From<cbd_engine::$name> for $name {
            fn from(value: cbd_engine::$name) -> Self {
                match value {
                    $(cbd_engine::$name::$value => Self::$value,)*
                }
            }
        }
    )*};
}

words! {
    /// Write order of writeback.
    Consistency("consistency") {
        /// Epoch by epoch: the backing device alone is always crash-consistent, as a plain disk after a power cut.
        Strict,
        /// Many epochs in one batch: the backing device alone is crash-consistent between batches.
        Checkpoint,
        /// By address: the backing device alone is not crash-consistent.
        None,
    }

    /// Action when write errors of the backing device persist.
    OnWriteError("on_write_error") {
        /// Nothing later reaches the backing device, and writes fail when the cache is full.
        Stop,
        /// The refused ranges stay in the cache, and everything else continues.
        Park,
    }

    /// How writes go.
    CacheMode("cache_mode") {
        /// A write is complete when it is durable in the region.
        Writeback,
        /// A write is complete when the backing device has accepted it; the cache has its data too.
        Writethrough,
        /// The same, without its data in the cache.
        Writearound,
        /// The same, and reads neither use nor fill the cache.
        Passthrough,
    }

    /// The misses that are recorded.
    ReadFill("read_fill") {
        /// Those worth their space.
        Admit,
        /// All of them.
        All,
        /// None.
        Off,
    }

    /// Whether sequential reads are read ahead.
    Readahead("readahead") {
        /// In growing steps.
        Auto,
        /// Never.
        Off,
    }

    /// What a write does in a full cache.
    WhenFull("when_full") {
        /// It waits.
        Wait,
        /// It goes to the backing device alone where that is legal.
        Around,
    }
}

/// Registers this host on a region.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegisterTransport {
    /// Name of the host.
    pub host: String,
    /// Absolute path of the region: a file on a DAX file system, a devdax device, or a plain file.
    pub path: String,
    /// Size in bytes of a region that is created; an existing one has its own.
    #[serde(default)]
    pub size: Option<u64>,
    /// Segment size in bytes of a region that is formatted; if absent, derived from the region's size.
    #[serde(default)]
    pub segment_size: Option<u64>,
    /// Format the region with a new transport.
    #[serde(default)]
    pub format: bool,
    /// With `format`: even if the region holds a transport, whose data is lost then.
    #[serde(default)]
    pub force: bool,
    /// With `format`: several hosts share the region.
    #[serde(default)]
    pub shared: bool,
}

/// The response to a registration.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TransportRegistered {
    /// Number of the transport in this daemon.
    pub transport_id: u32,
    /// Number of this host on the transport.
    pub host_id: u32,
    /// Warnings, e.g. that the region does not survive a power failure.
    pub warnings: Vec<String>,
}

/// One transport, as `tp-list` shows it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TransportInfo {
    /// Magic number of the superblock, `0x` and hexadecimal digits.
    pub magic: String,
    /// Version of the format.
    pub version: u32,
    /// Incompatible feature flags, `0x` and eight hexadecimal digits.
    pub flags: String,
    /// First byte of the host table.
    pub host_area_off: u64,
    /// Bytes of one entry of the host table.
    pub bytes_per_host_info: u64,
    /// Entries of the host table.
    pub host_num: u64,
    /// First byte of the backend table.
    pub backend_area_off: u64,
    /// Bytes of one entry of the backend table.
    pub bytes_per_backend_info: u64,
    /// Entries of the backend table.
    pub backend_num: u64,
    /// First byte of the blkdev table.
    pub blkdev_area_off: u64,
    /// Bytes of one entry of the blkdev table.
    pub bytes_per_blkdev_info: u64,
    /// Entries of the blkdev table.
    pub blkdev_num: u64,
    /// First byte of the segments.
    pub segment_area_off: u64,
    /// Bytes of one segment.
    pub bytes_per_segment: u64,
    /// Number of segments.
    pub segment_num: u64,
    /// Number of the transport in this daemon.
    pub transport_id: u32,
    /// Number of this host on the transport.
    pub host_id: u32,
    /// Path of the region.
    pub path: String,
    /// Whether the region is mapped.
    pub alive: bool,
    /// Name of this host.
    pub host: String,
    /// UUID of the transport.
    pub uuid: String,
    /// Segments that belong to no cache.
    pub free_segments: u64,
    /// `power-fail` or `process-crash`: the failure that the region survives.
    pub durability: String,
    /// How the region is mapped and copied to.
    pub copy: String,
    /// Why the region is not mapped, or its error.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<String>,
    /// Seconds until the daemon retries it at the latest, while it is not mapped.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub retry_in_s: Option<u64>,
    /// Warnings.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub warnings: Vec<String>,
}

/// One host of a transport, as `host-list` shows it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HostInfo {
    /// Number of the host.
    pub host_id: u32,
    /// Its name.
    pub hostname: String,
    /// Whether it is known to be running.
    pub alive: bool,
    /// Whether it is the host of this daemon.
    #[serde(default)]
    pub this: bool,
    /// Milliseconds since its last sign of life that this daemon has seen come; absent if it has seen none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub seen_ms: Option<u64>,
    /// Whether what it had is being taken from it.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub clearing: bool,
}

/// Takes everything from a dead host of a transport that several share.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClearHost {
    /// Bytes of dirty and quarantined data that its caches hold, which are lost then; must be exactly that number.
    #[serde(default)]
    pub discard_dirty: Option<u64>,
}

/// Adds a backing device to a transport, or starts one that is not up.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartBackend {
    /// Absolute path of the block device or file.
    pub path: String,
    /// Bytes of cache; none or 0 creates a backend without a cache.
    #[serde(default)]
    pub cache_size: Option<u64>,
    /// Bytes up to which a cache that shares the space of its transport grows; `cache_size` is its minimum then. Absent for a cache of
    /// fixed size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_max: Option<u64>,
    /// With `cache_max`: how much a hit of this cache counts among those that share the space, 1 to 1000; 1 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u16>,
    /// Number of queues that serve the backend, 1 to 128.
    #[serde(default)]
    pub handlers: Option<u32>,
    /// Also create a block device on it.
    #[serde(default)]
    pub start_dev: bool,
    /// Allow clients of that block device to connect over the network.
    #[serde(default)]
    pub allow_remote: bool,
    /// The export of that block device; see [`StartBlkdev::export`].
    #[serde(default)]
    pub export: Option<String>,
    /// Write order of writeback.
    #[serde(default)]
    pub consistency: Option<Consistency>,
    /// How writes go.
    #[serde(default)]
    pub cache_mode: Option<CacheMode>,
    /// Whether data has checksums.
    #[serde(default)]
    pub data_crc: Option<bool>,
    /// Serve it although the log of recovery points shows that the disk is newer than the region.
    #[serde(default)]
    pub older_region: bool,
    /// Serve it although its disk was written while no daemon served it.
    #[serde(default)]
    pub changed_disk: bool,
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Seconds that its recovery point is old at most; 0 is no promise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery_point_max_age_s: Option<u32>,
}

/// The response to the start of a backend.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BackendStarted {
    /// Number of the backend.
    pub backend_id: u32,
    /// The block device, if one was requested.
    pub blkdev: Option<BlkdevInfo>,
    /// Warnings.
    pub warnings: Vec<String>,
}

/// One backend, as `backend-list` shows it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BackendInfo {
    /// Number of the backend.
    pub backend_id: u32,
    /// Number of the host that owns it.
    pub host_id: u32,
    /// Its name; absent without one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub name: Option<String>,
    /// Its UUID, which never changes.
    #[serde(default)]
    pub uuid: String,
    /// Path of the backing device.
    pub backend_path: String,
    /// Whether it is being served; of another host of a region that several share, whether that host is alive.
    pub alive: bool,
    /// Segments of its cache that can hold a log: all but the one that holds its state. 0 without a cache.
    pub cache_segs: u64,
    /// Share of used segments in percent above which reclaim runs.
    pub cache_gc_percent: u32,
    /// The part of `cache_segs` in use: segments with records, and those open for the next records. 0 while it is not
    /// served.
    pub cache_used_segs: u64,
    /// Bytes of the cache, the segment that holds its state included; 0 without one.
    #[serde(default)]
    pub cache_size: u64,
    /// Its minimum in bytes, if it shares the space of the transport.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cache_min: Option<u64>,
    /// Its maximum in bytes, if it shares the space of the transport.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cache_max: Option<u64>,
    /// Bytes of the device.
    #[serde(default)]
    pub size: u64,
    /// Bytes that are not on the backing device yet; absent if not known, and without a cache.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub dirty_bytes: Option<u64>,
    /// Its state in a few words; `serving` without errors.
    #[serde(default)]
    pub state: String,
    /// The block devices on it.
    pub blkdevs: Vec<BlkdevInfo>,
    /// Why it is not being served.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<String>,
    /// Seconds until the daemon retries it at the latest; absent while it is served.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub retry_in_s: Option<u64>,
    /// The former path of a backend that a rescue has moved to `backend_path`; it is not served before it is started by
    /// that path.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub moved_from: Option<String>,
}

/// Creates a block device on a backend. On the socket the backend is a [`NumberOrName`].
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StartBlkdev<B = u32> {
    /// The backend.
    pub backend: B,
    /// `auto`, `kernel` (`auto` without NBD), `ublk`, `fuse-loop`, `nbd:unix:PATH`, `nbd:tcp:ADDRESS:PORT` or
    /// `vhost-user:PATH`; `auto` where absent.
    #[serde(default)]
    pub export: Option<String>,
    /// Allow clients to connect over the network: NBD at an address that is not a loopback address.
    #[serde(default)]
    pub allow_remote: bool,
    /// Its own name; without one it has that of its backend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whether there may be other block devices on the backend, on this host and on others, all of which were started with this: they are
    /// the same disk.
    #[serde(default)]
    pub shared: bool,
}

impl<B> StartBlkdev<B> {
    /// The same request for the backend with this number.
    #[must_use]
    pub fn with_backend(self, backend: u32) -> StartBlkdev {
        let Self { backend: _, export, allow_remote, name, shared } = self;
        StartBlkdev { backend, export, allow_remote, name, shared }
    }
}

/// Changes a block device while it runs; an absent value is unchanged.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlkdevChange {
    /// Its own name; empty: it has that of its backend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The class of its requests that have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<BlkdevClass>,
}

/// One block device, as `dev-list` shows it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BlkdevInfo {
    /// Number of the block device.
    pub blkdev_id: u32,
    /// Number of the host that it belongs to.
    pub host_id: u32,
    /// Number of its backend.
    pub backend_id: u32,
    /// Its name: its own, else that of its backend; absent without one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub name: Option<String>,
    /// The class of its requests that have none.
    #[serde(default)]
    pub class: BlkdevClass,
    /// Whether there may be other block devices on its backend.
    #[serde(default)]
    pub shared: bool,
    /// `/dev/cbdN`, or the URI of an NBD export.
    pub dev_name: String,
    /// Whether it is being served; of another host of a region that several share, whether that host is alive.
    pub alive: bool,
    /// The export that the user requested.
    pub export: String,
    /// The method by which clients reach it, in words; absent while it is not served.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub method: Option<String>,
    /// Why it is not being served.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<String>,
    /// Its faults while it is served (its socket or link was removed or replaced, its clients wait); without faults,
    /// why `auto` did not choose the best export.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub note: Option<String>,
    /// The requests of its clients since its backend was opened, by operation: `read`, `write`, `flush`, `discard` and
    /// `write_zeroes`. Only in the status, while the backend is served.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub operations: BTreeMap<String, OperationFigures>,
}

/// Progress of a long operation.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Progress {
    /// Number of the backend.
    pub backend_id: u32,
    /// Dirty bytes when the operation began.
    pub dirty_bytes_at_start: u64,
    /// Dirty bytes that are still to be written.
    pub dirty_bytes: u64,
    /// Bytes that writeback has written since the operation began.
    pub written_bytes: u64,
    /// Bytes that a cache which shrinks has freed so far.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub given_up_bytes: Option<u64>,
    /// Bytes by which it shrinks.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub to_give_up_bytes: Option<u64>,
    /// Bytes that a verification has looked at.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub verified_bytes: Option<u64>,
    /// Bytes that it looks at in all.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub to_verify_bytes: Option<u64>,
    /// What it has found so far.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub found: Option<u64>,
    /// Milliseconds since the operation began.
    pub elapsed_ms: u64,
    /// The latest error of the backing device, if writeback fails.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<String>,
}

/// One line of the answer to a long operation: any number of `progress`, then one `done` or `error`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProgressLine {
    /// Progress.
    Progress(Progress),
    /// Completion.
    Done(Done),
    /// Failure; no data was dropped.
    Error(ErrorBody),
}

/// A block device was stopped and removed.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct BlkdevStopped {
    /// Parts that did not end properly, such as requests that wait for a disk.
    pub warnings: Vec<String>,
}

/// The end of a long operation.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Done {
    /// Bytes that were written to backing devices.
    pub written_bytes: u64,
    /// Dirty and quarantined bytes that were dropped at the user's command.
    pub discarded_bytes: u64,
    /// Warnings.
    pub warnings: Vec<String>,
    /// The moment that the backing devices have in common, of a checkpoint of several backends.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub moment: Option<Moment>,
    /// The result of a verification.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub verified: Option<VerifiedInfo>,
    /// The state of a scrub, after a change of it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub scrub: Option<Box<ScrubInfo>>,
}

/// A moment that several backing devices have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Moment {
    /// In milliseconds since 1970 UTC: everything that had completed before is on the backing devices.
    pub at_ms: u64,
    /// Until when nothing else is written to them, in milliseconds since 1970 UTC.
    pub held_until_ms: u64,
}
