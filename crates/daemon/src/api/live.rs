//! Requests that give a backend a cache, take it away, and change its size, while it is in use.

use super::CacheMode;
use serde::{Deserialize, Serialize};

/// Gives a backend a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachCache {
    /// Bytes of the cache, rounded down to whole segments.
    pub cache_size: u64,
    /// Bytes up to which a cache that shares the space of its transport grows; `cache_size` is its minimum then. Absent for a cache of
    /// fixed size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_max: Option<u64>,
    /// With `cache_max`: how much a hit of this cache counts among those that share the space, 1 to 1000; 1 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u16>,
    /// How writes go; as stored for the backend if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_mode: Option<CacheMode>,
}

/// Takes the cache of a backend away, when the backing device has everything.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DetachCache {
    /// Seconds without progress after which the backend keeps its cache.
    #[serde(default)]
    pub timeout_s: Option<u64>,
}

/// Moves a backend to another host of a region that several share.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveBackend {
    /// Name or number of the host. Either it or the host that has the backend is that of this daemon.
    pub to: String,
    /// Seconds without progress of the drain after which the backend stays where it is.
    #[serde(default)]
    pub timeout_s: Option<u64>,
}

/// Changes the size of the cache of a backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResizeCache {
    /// Bytes that the cache is to have, rounded down to whole segments.
    pub cache_size: u64,
    /// Bytes up to which a cache that shares the space of its transport grows; `cache_size` is its minimum then. Absent for a cache of
    /// fixed size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_max: Option<u64>,
    /// With `cache_max`: how much a hit of this cache counts among those that share the space, 1 to 1000; 1 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u16>,
    /// Seconds without progress after which a cache that shrinks keeps its size.
    #[serde(default)]
    pub timeout_s: Option<u64>,
}
