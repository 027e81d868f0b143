//! The findings of a check: location, description, cost, advice, and whether a second copy can repair it.

use cbd_types::ByteRange;
use serde::Serialize;
use std::fmt;

/// The severity of a finding. The worst one determines the result of a check.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// A normal consequence of a crash; nothing is wrong.
    Note,
    /// Damage without loss: a second copy serves, or the backing device has the data.
    Corrected,
    /// Data, or the order in which it reaches the backing device, is affected.
    Affected,
    /// The region or one of its caches cannot be opened.
    Fatal,
}

impl Severity {
    /// The name in texts and in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Corrected => "corrected",
            Self::Affected => "affected",
            Self::Fatal => "fatal",
        }
    }
}

/// The structure with the finding.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Structure {
    /// One of the two superblocks.
    Superblock,
    /// A row of the host table.
    Host,
    /// A row of the backend table.
    Backend,
    /// A row of the blkdev table.
    Blkdev,
    /// A row of the segment table.
    SegmentEntry,
    /// What a host of a shared region knows of a decision.
    Vote,
    /// The header of the area of a host in a shared region.
    AreaHeader,
    /// The header of a state segment.
    StateHeader,
    /// The drained epoch of a cache.
    Drained,
    /// The beginning of a lane's log.
    Tail,
    /// The last position up to which a lane was complete.
    Mark,
    /// The list of pins of a cache.
    Pins,
    /// The header of a log segment.
    SegmentHeader,
    /// The chain of a lane's segments.
    Chain,
    /// A record.
    Record,
    /// A checksum line.
    ChecksumLine,
    /// Data.
    Data,
    /// A range whose reads fail.
    Range,
    /// A cache as a whole.
    Cache,
}

/// The location of a finding; fields that do not apply are absent.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize)]
pub struct Location {
    /// First byte in the region.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<u64>,
    /// Its length in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
    /// The row of a table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub row: Option<u32>,
    /// The backend.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend: Option<u32>,
    /// The lane of its cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lane: Option<u32>,
    /// The segment of the transport.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub segment: Option<u32>,
    /// The slot in the segment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<u32>,
    /// The sequence number of the record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence: Option<u64>,
    /// First byte on the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// Bytes of the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

impl Location {
    /// `length` bytes of the region from `at`.
    #[must_use]
    pub fn bytes(at: u64, length: u64) -> Self {
        Self { at: Some(at), length: Some(length), ..Self::default() }
    }

    /// The same location with the affected range of the device.
    #[must_use]
    pub const fn of_range(mut self, range: ByteRange) -> Self {
        self.offset = Some(range.start);
        self.bytes = Some(range.len());
        self
    }
}

impl fmt::Display for Location {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        let mut sink = |name: &str, value: Option<u64>| -> fmt::Result {
            if let Some(value) = value {
                write!(out, "{comma}{name} {value}")?;
                comma = ", ";
            }
            Ok(())
        };
        sink("byte", self.at)?;
        sink("row", self.row.map(u64::from))?;
        sink("backend", self.backend.map(u64::from))?;
        sink("lane", self.lane.map(u64::from))?;
        sink("segment", self.segment.map(u64::from))?;
        sink("slot", self.slot.map(u64::from))?;
        sink("sequence", self.sequence)?;
        if let (Some(offset), Some(bytes)) = (self.offset, self.bytes) {
            write!(out, "{comma}device bytes {offset}..{}", offset.saturating_add(bytes))?;
        }
        Ok(())
    }
}

/// One finding of a check.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// Its severity.
    pub severity: Severity,
    /// The structure.
    pub structure: Structure,
    /// Its location.
    #[serde(flatten)]
    pub location: Location,
    /// The description.
    pub what: String,
    /// The consequence.
    pub cost: String,
    /// The advice.
    pub advice: String,
}

/// Objects that are stored in two slots.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SlotKind {
    /// A row of the host table.
    Host,
    /// A row of the backend table.
    Backend,
    /// A row of the blkdev table.
    Blkdev,
    /// A row of the segment table.
    SegmentEntry,
    /// What a host of a shared region knows of a decision.
    Vote,
    /// The header of the area of a host in a shared region.
    AreaHeader,
    /// The drained epoch of a cache.
    Drained,
    /// The beginning of a lane's log.
    Tail,
    /// The last position up to which a lane was complete.
    Mark,
    /// The disk that a backend had before a rescue moved it.
    Former,
}

/// The repair of a finding, which does not change the result of recovery.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Repair {
    /// Store the good copy over the damaged one, byte for byte.
    Copy {
        /// Its name.
        what: String,
        /// The good copy.
        from: u64,
        /// The damaged one.
        to: u64,
        /// Bytes.
        length: u32,
    },
    /// Store the newest content into the other slot, as an update does.
    Slot {
        /// Its name.
        what: String,
        /// The kind of the content.
        kind: SlotKind,
        /// The two slots.
        at: [u64; 2],
        /// The seed of its checksum.
        seed: u64,
    },
}

impl fmt::Display for Repair {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Copy { what, from, to, length } => {
                write!(
                    out,
                    "{what}: store the good copy ({length} bytes at byte {from}) over the one at byte {to}"
                )
            }
            Self::Slot { what, at: [a, b], .. } => {
                write!(
                    out,
                    "{what}: store the content of the newest slot into the other one (bytes {a} and {b})"
                )
            }
        }
    }
}
