//! The result of a check.

use crate::finding::{Finding, Repair, Severity};
use cbd_types::ByteRange;
use serde::Serialize;

/// Maximum number of findings that are listed individually; all findings are counted, and all are repaired.
const LISTED_MAX: usize = 10_000;

/// The outcome of a check; the numbers are exit codes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// No damage was found.
    Clean = 0,
    /// Damage without loss: second copies are valid.
    Corrected = 1,
    /// Data is affected.
    Affected = 2,
    /// The region, or a cache of it, cannot be opened.
    Unopenable = 3,
}

impl Outcome {
    /// Its exit code.
    #[must_use]
    pub const fn exit_code(self) -> u8 {
        self as u8
    }
}

/// The transport of a region.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct TransportSummary {
    /// Its identity.
    pub uuid: String,
    /// Format version.
    pub version: u32,
    /// Incompatible features, as bits: a program that does not know one of them refuses the region.
    pub features: u64,
    /// Bytes that it uses.
    pub region_size: u64,
    /// Bytes of a segment.
    pub segment_size: u64,
    /// Segments.
    pub segments: u32,
    /// Segments without an owner.
    pub free_segments: u32,
    /// Names of its hosts.
    pub hosts: Vec<String>,
}

/// A range of a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RangeSummary {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
    /// The reason of the entry.
    pub reason: String,
}

impl RangeSummary {
    pub(crate) fn new(range: ByteRange, reason: impl Into<String>) -> Self {
        Self { offset: range.start, bytes: range.len(), reason: reason.into() }
    }

    /// A range that the backing device refused.
    pub(crate) fn parked(range: ByteRange) -> Self {
        Self::new(range, "the disk refused it, the cache keeps it")
    }
}

/// A backend and the content of its cache, as a daemon would find it.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize)]
pub struct BackendSummary {
    /// Its row.
    pub backend: u32,
    /// Its UUID; empty if its row cannot be read.
    pub uuid: String,
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Recorded path of the backing device.
    pub path: String,
    /// The identity of that disk.
    pub identity: String,
    /// A rescue has moved it to that disk, where it has not been started yet: its former disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved_from: Option<String>,
    /// Bytes of the device.
    pub size: u64,
    /// Lanes; 0 without a cache.
    pub lanes: u32,
    /// Segments of the cache that may hold a log.
    pub segments: u32,
    /// Of these, free ones.
    pub free_segments: u32,
    /// The machine crashed while the cache was in use and could hold dirty data: some of its pages may be
    /// old.
    pub mixed_pages: bool,
    /// Records in the log.
    pub records: u64,
    /// Bytes of data in the log, older versions included.
    pub data_bytes: u64,
    /// Records that the backing device does not have.
    pub dirty_records: u64,
    /// Bytes of data of these records, older versions included.
    pub dirty_bytes: u64,
    /// Bytes of the device that these records cover, each counted once.
    pub dirty_device_bytes: u64,
    /// The last epoch that is completely on the backing device.
    pub drained_epoch: u64,
    /// The recovery point, in milliseconds since 1970 UTC: everything flushed before is on the backing
    /// device. 0 when it is not known.
    pub drained_wall_ms: u64,
    /// Order of writeback.
    pub consistency: String,
    /// Whether the backing device without the cache is in a state that a plain disk could have after a power
    /// failure.
    pub backing_is_consistent: bool,
    /// The reason for which it is not in such a state.
    pub void_reason: Option<String>,
    /// Ranges whose reads fail; if there are very many, only the first ones.
    pub damaged: Vec<RangeSummary>,
    /// Ranges that the backing device refused and that stay in the cache; if there are very many, only the first ones.
    pub parked: Vec<RangeSummary>,
    /// The reason for which the cache cannot be opened.
    pub error: Option<String>,
}

/// The extent of a check.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize)]
pub struct Counted {
    /// Superblocks, rows and state lines; each copy counts.
    pub slots: u64,
    /// Headers of segments; each copy counts.
    pub headers: u64,
    /// Lines of the log; each copy counts.
    pub lines: u64,
    /// Records whose data was verified.
    pub verified_records: u64,
    /// Bytes of verified data.
    pub verified_bytes: u64,
}

/// The result of a check.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The outcome.
    pub outcome: Outcome,
    /// The outcome as an exit code.
    pub exit_code: u8,
    /// Bytes of the region.
    pub size: u64,
    /// Whether all data was verified, not only the dirty data.
    pub data: bool,
    /// The transport, if it can be opened.
    pub transport: Option<TransportSummary>,
    /// Its backends.
    pub backends: Vec<BackendSummary>,
    /// The extent of the check.
    pub counted: Counted,
    /// Number of all findings by severity: notes, corrected, affected, fatal.
    pub found: [u64; 4],
    /// Reasons for which the result may be wrong.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// The first findings.
    pub findings: Vec<Finding>,
    /// The repairs of the findings.
    #[serde(skip)]
    pub repairs: Vec<Repair>,
    /// A hash of the recovered logs: equal if recovery had the same result.
    #[serde(skip)]
    pub fingerprint: u64,
}

impl Report {
    pub(crate) const fn new(size: u64, data: bool) -> Self {
        Self {
            outcome: Outcome::Clean,
            exit_code: 0,
            size,
            data,
            transport: None,
            backends: Vec::new(),
            counted: Counted { slots: 0, headers: 0, lines: 0, verified_records: 0, verified_bytes: 0 },
            found: [0; 4],
            warnings: Vec::new(),
            findings: Vec::new(),
            repairs: Vec::new(),
            fingerprint: 0,
        }
    }

    /// Adds a finding, and its repair.
    pub(crate) fn add(&mut self, finding: Finding, repair: Option<Repair>) {
        let outcome = match finding.severity {
            Severity::Note => Outcome::Clean,
            Severity::Corrected => Outcome::Corrected,
            Severity::Affected => Outcome::Affected,
            Severity::Fatal => Outcome::Unopenable,
        };
        self.outcome = self.outcome.max(outcome);
        self.exit_code = self.outcome.exit_code();
        self.found[finding.severity as usize] += 1;
        self.repairs.extend(repair);
        if self.findings.len() < LISTED_MAX {
            self.findings.push(finding);
        }
    }

    /// Folds a number into the fingerprint.
    pub(crate) const fn add_to_fingerprint(&mut self, value: u64) {
        // FNV-1a over whole numbers, which is only used to compare two reports of the same program.
        self.fingerprint = (self.fingerprint ^ value).wrapping_mul(0x0100_0000_01b3).rotate_left(23) ^ value;
    }
}
