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
    /// Flushes.
    Flush,
}

impl OpKind {
    /// All kinds.
    pub const ALL: [Self; 5] = [Self::Read, Self::Write, Self::WriteZeroes, Self::Discard, Self::Flush];

    /// The kind of an operation.
    #[must_use]
    pub const fn of(op: &BackingOp) -> Self {
        match op {
            BackingOp::Read { .. } => Self::Read,
            BackingOp::Write { .. } => Self::Write,
            BackingOp::WriteZeroes { .. } => Self::WriteZeroes,
            BackingOp::Discard { .. } => Self::Discard,
            BackingOp::Flush => Self::Flush,
        }
    }

    /// Its name in specifications.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::WriteZeroes => "zero",
            Self::Discard => "discard",
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
        BackingOp::WriteZeroes { range } | BackingOp::Discard { range } => *range,
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
