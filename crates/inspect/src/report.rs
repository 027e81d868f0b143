//! What a check came to.

use crate::finding::{Finding, Mend, Severity};
use cbd_types::ByteRange;
use serde::Serialize;

/// Most findings that are listed one by one; all are counted, and all are mended.
const LISTED_MAX: usize = 10_000;

/// How a check ended; the numbers are exit codes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Nothing is wrong.
    Clean = 0,
    /// Something is damaged; second copies serve, and nothing is lost.
    Corrected = 1,
    /// Data is affected.
    Affected = 2,
    /// The region, or a cache of it, cannot be opened.
    Unopenable = 3,
}

impl Outcome {
    /// The exit code that says so.
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
    /// Bytes that it uses.
    pub region_size: u64,
    /// Bytes of a segment.
    pub segment_size: u64,
    /// Segments.
    pub segments: u32,
    /// Segments that belong to nobody.
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
    /// Why it is listed.
    pub reason: String,
}

impl RangeSummary {
    pub(crate) fn new(range: ByteRange, reason: impl Into<String>) -> Self {
        Self { offset: range.start, bytes: range.len(), reason: reason.into() }
    }

    /// A range that the backing device did not take.
    pub(crate) fn parked(range: ByteRange) -> Self {
        Self::new(range, "the disk did not take it, the cache keeps it")
    }
}

/// A backend and what its cache holds, as a daemon would find it.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize)]
pub struct BackendSummary {
    /// Its row.
    pub backend: u32,
    /// Path of the backing device, as it was recorded.
    pub path: String,
    /// Which disk that is.
    pub identity: String,
    /// A rescue has moved it to that disk, and nobody has started it there yet: where it was.
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
    /// The machine crashed while the cache was in use, and it could hold dirty data: some of its pages may be old.
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
    /// The last epoch that is on the backing device.
    pub drained_epoch: u64,
    /// The recovery point, in milliseconds since 1970 UTC: all that was flushed before is on the backing device. 0 when it is not known.
    pub drained_wall_ms: u64,
    /// Order of writeback.
    pub consistency: String,
    /// Whether the backing device alone is a state that a plain disk could have shown after a power cut.
    pub backing_is_consistent: bool,
    /// Why not.
    pub void_reason: Option<String>,
    /// Ranges that answer with an error, at most some of very many.
    pub damaged: Vec<RangeSummary>,
    /// Ranges that the backing device did not take and that are kept in the cache, at most some of very many.
    pub parked: Vec<RangeSummary>,
    /// Why the cache cannot be opened.
    pub error: Option<String>,
}

/// What was looked at.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize)]
pub struct Counted {
    /// Superblocks, rows and state lines, copies counted one by one.
    pub slots: u64,
    /// Headers of segments, copies counted one by one.
    pub headers: u64,
    /// Lines of the log, copies counted one by one.
    pub lines: u64,
    /// Records of which the data was verified.
    pub verified_records: u64,
    /// Bytes of data that were verified.
    pub verified_bytes: u64,
}

/// What a check came to.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// How it ended.
    pub outcome: Outcome,
    /// The same as an exit code.
    pub exit_code: u8,
    /// Bytes of the region.
    pub size: u64,
    /// Whether all data was verified, and not only what the backing devices lack.
    pub data: bool,
    /// The transport, if it can be opened.
    pub transport: Option<TransportSummary>,
    /// Its backends.
    pub backends: Vec<BackendSummary>,
    /// How much was looked at.
    pub counted: Counted,
    /// Findings by severity, all of them: notes, corrected, affected, fatal.
    pub found: [u64; 4],
    /// The first findings.
    pub findings: Vec<Finding>,
    /// What would put findings right.
    #[serde(skip)]
    pub mends: Vec<Mend>,
    /// What recovery made of the logs: equal where it made the same.
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
            findings: Vec::new(),
            mends: Vec::new(),
            fingerprint: 0,
        }
    }

    /// Takes a finding, and what would put it right.
    pub(crate) fn add(&mut self, finding: Finding, mend: Option<Mend>) {
        let outcome = match finding.severity {
            Severity::Note => Outcome::Clean,
            Severity::Corrected => Outcome::Corrected,
            Severity::Affected => Outcome::Affected,
            Severity::Fatal => Outcome::Unopenable,
        };
        self.outcome = self.outcome.max(outcome);
        self.exit_code = self.outcome.exit_code();
        self.found[finding.severity as usize] += 1;
        self.mends.extend(mend);
        if self.findings.len() < LISTED_MAX {
            self.findings.push(finding);
        }
    }

    /// Folds a number into the fingerprint.
    pub(crate) const fn note_recovered(&mut self, value: u64) {
        // FNV-1a over whole numbers: only to compare two reports of one program.
        self.fingerprint = (self.fingerprint ^ value).wrapping_mul(0x0100_0000_01b3).rotate_left(23) ^ value;
    }
}
