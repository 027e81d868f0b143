//! Requests to verify a range once, and scrubs: verifications of a whole device in the background.

use serde::{Deserialize, Serialize};

/// Which copies a verification looks at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VerifyLevel {
    /// The newest data: what a read would return.
    #[default]
    Newest,
    /// Each copy, whether it can be read.
    All,
    /// Each copy, and whether the copies of clean blocks have the same content.
    Agree,
}

impl From<VerifyLevel> for cbd_types::VerifyLevel {
    fn from(level: VerifyLevel) -> Self {
        match level {
            VerifyLevel::Newest => Self::Newest,
            VerifyLevel::All => Self::All,
            VerifyLevel::Agree => Self::Agree,
        }
    }
}

/// Whether a backing device verifies ranges by commands of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// By NVMe Verify alone.
    #[default]
    Auto,
    /// By every command that the device has.
    On,
    /// By reads.
    Never,
}

impl From<Offload> for cbd_backing::Offload {
    fn from(offload: Offload) -> Self {
        match offload {
            Offload::Auto => Self::Auto,
            Offload::On => Self::On,
            Offload::Never => Self::Never,
        }
    }
}

/// Verifies a range of a backend once, with progress until the response.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerifyRange {
    /// First byte of the range.
    #[serde(default)]
    pub offset: u64,
    /// Bytes of the range; to the end of the device if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
    /// Which copies are looked at.
    #[serde(default)]
    pub level: VerifyLevel,
    /// Make clean blocks dirty again whose copy on the backing device is lost, so that writeback repairs it.
    #[serde(default)]
    pub repair: bool,
}

/// A range with a flaw.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FindingInfo {
    /// First byte of the range.
    pub start: u64,
    /// Bytes of the range.
    pub length: u64,
    /// The name of the flaw: `unreadable`, `cache_damaged`, `dirty_damaged`, `both_damaged`, `backing_unreadable`,
    /// `backing_differs`, `backing_changed`, `quarantined` or `record_copy`.
    pub flaw: String,
    /// Whether the copy in the cache is whole again, or the range is dirty again.
    pub repaired: bool,
}

/// A copy of a structure of the region that was found to be damaged.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CopyInfo {
    /// The structure: `superblock`, `host_row`, `backend_row`, `blkdev_row`, `segment_row`, `state_header`, `drained`, `former_disk`,
    /// `pins`, `tail`, `mark` or `segment_header`.
    pub structure: String,
    /// Its row, lane, segment or index.
    pub number: u64,
    /// First byte of the copy in the region.
    pub at: u64,
    /// Whether the memory can be read.
    pub readable: bool,
    /// Whether the copy is whole again.
    pub repaired: bool,
}

/// The result of a verification of the metadata of a region.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct MetadataInfo {
    /// Structures that were looked at.
    pub structures: u64,
    /// Copies that were damaged and are whole again.
    pub repaired: u64,
    /// Copies that are damaged or cannot be read, and stay so.
    pub unrepaired: u64,
    /// The first of these copies, at most 64.
    pub copies: Vec<CopyInfo>,
}

/// The result of a verification.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct VerifiedInfo {
    /// Bytes that were looked at.
    pub verified_bytes: u64,
    /// The part of them whose copy in the cache was checked.
    pub cache_bytes: u64,
    /// Bytes that the backing device read, for the cache or in itself.
    pub backing_bytes: u64,
    /// Bytes that clients changed while they were looked at.
    pub changed_bytes: u64,
    /// The number of findings. Adjacent blocks with the same flaw are one.
    pub found: u64,
    /// The part of them that is repaired.
    pub repaired: u64,
    /// The first findings, at most 1024.
    pub findings: Vec<FindingInfo>,
    /// The metadata of the region; absent if it was not looked at.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub metadata: Option<MetadataInfo>,
    /// How the backing device was asked, and why not better.
    #[serde(default)]
    pub method: String,
    /// Why a part could not be looked at or repaired; the first such error.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<String>,
}
