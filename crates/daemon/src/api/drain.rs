//! Requests for checkpoints, drains, and stops of backends and block devices.

use serde::{Deserialize, Serialize};

/// Requests a checkpoint or a drain. On the socket the backend is a [`NumberOrName`](super::NumberOrName).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, bound(deserialize = "B: Deserialize<'de>"))]
pub struct Drain<B = u32> {
    /// The backend; all of the transport if absent.
    #[serde(default)]
    pub backend: Option<B>,
    /// Respond at completion, with progress until then.
    #[serde(default)]
    pub wait: bool,
    /// Seconds without progress after which waiting ends with an error.
    #[serde(default)]
    pub timeout_s: Option<u64>,
    /// Of a drain: compare the backing device with the cache afterwards; findings are an error.
    #[serde(default)]
    pub verify: bool,
}

/// Requests a checkpoint of several backends at one moment, at which their backing devices then stay for a time. On the
/// socket the backends are [`NumberOrName`](super::NumberOrName)s.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, bound(deserialize = "B: Deserialize<'de>"))]
pub struct CommonCheckpoint<B = u32> {
    /// The backends, two or more.
    pub backends: Vec<B>,
    /// Seconds for which writeback is paused then, from 1 to a week; 30 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold_s: Option<u32>,
    /// Seconds without progress after which the command gives up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<u64>,
}

/// Drains a backend and removes it from its transport.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StopBackend {
    /// Even if its block devices are mounted or open: requests of their clients fail from then on. No data is dropped.
    #[serde(default)]
    pub force: bool,
    /// Seconds without progress after which the stop fails and the backend continues.
    #[serde(default)]
    pub timeout_s: Option<u64>,
    /// Drop dirty and quarantined data instead of draining it. The number must be exactly the present dirty and
    /// quarantined bytes.
    #[serde(default)]
    pub discard_dirty: Option<u64>,
    /// Compare the backing device with the cache after the drain; the backend is not removed if they differ.
    #[serde(default)]
    pub verify: bool,
}

/// Stops a block device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StopBlkdev {
    /// Even if it is mounted or open: requests of its clients fail from then on.
    #[serde(default)]
    pub force: bool,
}
