//! The answer to `backend-grow`, and the request and the answer of `tp-grow`.

use serde::{Deserialize, Serialize};

/// A backend uses its backing device to its present end.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct BackendGrown {
    /// Number of the backend.
    pub backend_id: u32,
    /// Path of the backing device.
    pub backend_path: String,
    /// The size in bytes before.
    pub before: u64,
    /// The size in bytes now; the same if the backing device has not become larger.
    pub now: u64,
    /// Its block devices that are served.
    pub blkdevs: Vec<BlkdevGrown>,
    /// Warnings.
    pub warnings: Vec<String>,
}

/// Lets the region of a transport grow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GrowTransport {
    /// Bytes that the region is to have: its file is extended to this size. If absent, the file or device has become larger already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

/// A transport uses its region to the present end.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TransportGrown {
    /// Number of the transport.
    pub transport_id: u32,
    /// Path of the region.
    pub path: String,
    /// The size in bytes before.
    pub before: u64,
    /// The size in bytes now; the same if neither the file nor the device has become larger.
    pub now: u64,
    /// Segments that it has more.
    pub new_segments: u32,
    /// Bytes of one segment.
    pub bytes_per_segment: u64,
    /// Segments that belong to no cache now.
    pub free_segments: u32,
}

/// What clients of a block device see of its new size.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct BlkdevGrown {
    /// Number of the block device.
    pub blkdev_id: u32,
    /// Its path or URI.
    pub dev_name: String,
    /// Whether its clients see the size now.
    pub is_seen: bool,
    /// Otherwise when they see it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pending: Option<String>,
}
