//! Operations of backing devices, by kind and range.

use cbd_types::{BackingOp, ByteRange};

/// The kind of an operation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum OpKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Zeroes.
    WriteZeroes,
    /// Discards.
    Discard,
    /// Verifications.
    Verify,
    /// Comparisons.
    Compare,
    /// Flushes.
    Flush,
}

impl OpKind {
    /// All kinds.
    pub const ALL: [Self; 7] =
        [Self::Read, Self::Write, Self::WriteZeroes, Self::Discard, Self::Verify, Self::Compare, Self::Flush];

    /// The kind of an operation.
    #[must_use]
    pub const fn of(op: &BackingOp) -> Self {
        match op {
            BackingOp::Read { .. } => Self::Read,
            BackingOp::Write { .. } => Self::Write,
            BackingOp::WriteZeroes { .. } => Self::WriteZeroes,
            BackingOp::Discard { .. } => Self::Discard,
            BackingOp::Verify { .. } => Self::Verify,
            BackingOp::Compare { .. } => Self::Compare,
            BackingOp::Flush => Self::Flush,
        }
    }

    /// Whether its operations change the device.
    #[must_use]
    pub const fn changes(self) -> bool {
        matches!(self, Self::Write | Self::WriteZeroes | Self::Discard)
    }

    /// Its name in specifications.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::WriteZeroes => "zero",
            Self::Discard => "discard",
            Self::Verify => "verify",
            Self::Compare => "compare",
            Self::Flush => "flush",
        }
    }
}

/// The range of an operation; empty for a flush.
pub(crate) fn range_of(op: &BackingOp) -> ByteRange {
    match op {
        BackingOp::Read { offset, buffer } | BackingOp::Write { offset, buffer } => {
            ByteRange::at(*offset, buffer.len() as u64)
        }
        BackingOp::WriteZeroes { range }
        | BackingOp::Discard { range }
        | BackingOp::Verify { range }
        | BackingOp::Compare { range, .. } => *range,
        BackingOp::Flush => ByteRange::at(0, 0),
    }
}

/// A text for the operation that can follow "cannot" in a message.
pub(crate) fn words_of(op: &BackingOp) -> String {
    match OpKind::of(op) {
        OpKind::Flush => "flush the cache".to_owned(),
        kind => format!("{} {}", kind.name(), range_of(op)),
    }
}
