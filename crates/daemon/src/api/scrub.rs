//! Requests to scrub a backend, and the state of its scrub.

use super::{Offload, VerifiedInfo, VerifyLevel};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What is to happen with the scrub of a backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScrubAction {
    /// A pass over the device begins.
    #[default]
    Start,
    /// The pass stays where it is.
    Pause,
    /// A paused pass continues.
    Resume,
    /// The pass ends where it is.
    Stop,
}

/// Changes the scrub of a backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScrubRequest {
    /// What is to happen.
    pub action: ScrubAction,
    /// Of a start: bytes a second; the setting `scrub_rate` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Of a start: make clean blocks dirty again whose copy on the backing device is lost, so that writeback repairs it.
    #[serde(default)]
    pub repair: bool,
    /// Of a start: which copies are looked at; `agree` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<VerifyLevel>,
    /// Of a start: respond when the pass has ended, with progress until then. It continues if the client disconnects.
    #[serde(default)]
    pub wait: bool,
}

/// The settings of scrubs, and others that are in the daemon's state folder, not in the region.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ScrubSettings {
    /// Seconds from the beginning of a pass to that of the next one; 0 is never.
    pub scrub_every_s: u64,
    /// When scheduled passes run, `HH:MM-HH:MM` in UTC; always if empty.
    pub scrub_window: String,
    /// Bytes a second; 0 is no limit.
    pub scrub_rate: u64,
    /// Whether a pass waits while clients use the cache.
    pub scrub_idle_only: bool,
    /// Whether the backing device verifies ranges by commands of its own.
    pub offload: Offload,
    /// Seconds that the recovery point is old at most, if writeback can keep that; 0 is no promise.
    pub recovery_point_max_age_s: u32,
}

/// The state of a scrub.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScrubState {
    /// There is no pass.
    #[default]
    Idle,
    /// A pass is looking at the device.
    Running,
    /// A pass is looking at the device, and leaves the disk to clients that use it: it has no rate.
    BesideClients,
    /// A user has paused the pass.
    Paused,
    /// The pass waits until clients make no requests (`scrub_idle_only`).
    WaitingForLoad,
    /// The pass waits for the window of the day (`scrub_window`).
    WaitingForWindow,
    /// The pass waits until the backend is up, until a command that changes it has ended, or for the next attempt after an error.
    WaitingForBackend,
}

impl ScrubState {
    /// The state in words.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Running => "running",
            Self::BesideClients => "running slowly beside clients that use the disk",
            Self::Paused => "paused",
            Self::WaitingForLoad => "waiting until clients are idle",
            Self::WaitingForWindow => "waiting for its window of the day",
            Self::WaitingForBackend => "waiting for the backend",
        }
    }
}

/// A complete pass.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ScrubPass {
    /// When it began, in seconds since 1970 UTC.
    pub began: u64,
    /// When it ended.
    pub ended: u64,
    /// Which copies were looked at.
    pub level: VerifyLevel,
    /// Whether copies on the backing device were repaired.
    pub repair: bool,
    /// What was found.
    pub results: VerifiedInfo,
}

/// The scrub of a backend.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ScrubInfo {
    /// Number of the backend.
    pub backend_id: u32,
    /// Its state.
    pub state: ScrubState,
    /// Bytes from the beginning of the device that the pass has looked at.
    pub position: u64,
    /// Bytes of the device.
    pub size: u64,
    /// The part of them in percent, rounded down.
    pub percent: u32,
    /// Bytes a second at present.
    pub bytes_per_s: u64,
    /// The limit of the pass in bytes a second; 0 is none.
    pub rate: u64,
    /// Which copies the pass looks at.
    pub level: VerifyLevel,
    /// Whether it repairs copies on the backing device.
    pub repair: bool,
    /// When the pass began, in seconds since 1970 UTC; absent without one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub began: Option<u64>,
    /// What the pass has found so far; absent without one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub results: Option<VerifiedInfo>,
    /// The last complete pass.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub last: Option<ScrubPass>,
    /// When the next pass begins by the schedule, in seconds since 1970 UTC; absent without a schedule.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub next: Option<u64>,
    /// How the backing device is asked, and why not better; absent while the backend is not up.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub method: Option<String>,
    /// The settings.
    #[serde(flatten)]
    pub settings: ScrubSettings,
    /// Findings of all passes by the name of the flaw.
    #[serde(default)]
    pub found_total: BTreeMap<String, u64>,
    /// The part of them that was repaired.
    #[serde(default)]
    pub repaired_total: u64,
    /// Bytes that all passes have looked at.
    #[serde(default)]
    pub verified_bytes_total: u64,
    /// Copies of structures of the region that all passes have repaired.
    #[serde(default)]
    pub metadata_repaired_total: u64,
    /// Why the scrub does not run or is not recorded.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<String>,
}
