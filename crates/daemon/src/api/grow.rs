//! The answer to `backend-grow`.

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
