//! Verification of a range: every copy is looked at where it is, and no data is moved to the client.

use crate::{ByteRange, Error};
use alloc::vec::Vec;

/// Which copies of a range are looked at.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum VerifyLevel {
    /// The newest data: what a read would return can be read, and has its checksum if the cache holds it.
    #[default]
    Newest,
    /// Each copy: also the one that the backing device has of clean blocks can be read.
    All,
    /// Each copy, and whether the copies of clean blocks have the same content.
    Agree,
}

impl VerifyLevel {
    /// All levels, the weakest first.
    pub const ALL: [Self; 3] = [Self::Newest, Self::All, Self::Agree];

    /// The name in commands and in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Newest => "newest",
            Self::All => "all",
            Self::Agree => "agree",
        }
    }
}

/// A request to verify a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Verify {
    /// The range, in whole logical sectors.
    pub range: ByteRange,
    /// Which copies are looked at.
    pub level: VerifyLevel,
    /// Whether a copy on the backing device that is lost is repaired from the one in the cache. Copies in the cache are
    /// always repaired.
    pub repair: bool,
}

/// What is wrong with a range.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Flaw {
    /// The backing device alone has the range, and cannot read it.
    Unreadable,
    /// The copy of clean data in the cache is damaged; the backing device has the data.
    CacheDamaged,
    /// Dirty data, of which no other copy exists, is damaged: reads fail until it is overwritten.
    DirtyDamaged,
    /// Clean data is damaged in the cache, and what the backing device has is unreadable or different, too: reads fail
    /// until it is overwritten.
    BothDamaged,
    /// The backing device cannot read clean data that the cache holds undamaged.
    BackingUnreadable,
    /// The backing device has other data than clients wrote; the cache holds it undamaged.
    BackingDiffers,
    /// The backing device has other data than it had when the cache read it: another program has written to it.
    BackingChanged,
    /// The range was quarantined before: reads fail until it is overwritten.
    Quarantined,
    /// One of the two copies of a record was damaged. The range is that of its data.
    RecordCopy,
}

impl Flaw {
    /// All flaws.
    pub const ALL: [Self; 9] = [
        Self::Unreadable,
        Self::CacheDamaged,
        Self::DirtyDamaged,
        Self::BothDamaged,
        Self::BackingUnreadable,
        Self::BackingDiffers,
        Self::BackingChanged,
        Self::Quarantined,
        Self::RecordCopy,
    ];

    /// The name in JSON, metrics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unreadable => "unreadable",
            Self::CacheDamaged => "cache_damaged",
            Self::DirtyDamaged => "dirty_damaged",
            Self::BothDamaged => "both_damaged",
            Self::BackingUnreadable => "backing_unreadable",
            Self::BackingDiffers => "backing_differs",
            Self::BackingChanged => "backing_changed",
            Self::Quarantined => "quarantined",
            Self::RecordCopy => "record_copy",
        }
    }

    /// Whether a client that reads the range now gets an error.
    #[must_use]
    pub const fn is_lost(self) -> bool {
        matches!(self, Self::Unreadable | Self::DirtyDamaged | Self::BothDamaged | Self::Quarantined)
    }
}

/// A range with a flaw.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Finding {
    /// The range, in whole logical sectors.
    pub range: ByteRange,
    /// What is wrong with it.
    pub flaw: Flaw,
    /// Whether it is repaired: the copy in the cache is whole again, or the range is dirty again, so that writeback repairs the
    /// backing device.
    pub repaired: bool,
}

/// The result of a verification.
#[derive(Default, Debug)]
pub struct Verified {
    /// Bytes whose copy in the cache was checked.
    pub cache_bytes: u64,
    /// Bytes that the backing device read, for the cache or in itself.
    pub backing_bytes: u64,
    /// Bytes that clients changed while they were looked at, so that nothing is said about their former copies. What they hold now
    /// was written after the request.
    pub changed_bytes: u64,
    /// The ranges of these bytes, in no order.
    pub changed: Vec<ByteRange>,
    /// What was found, in the order of the ranges.
    pub findings: Vec<Finding>,
    /// Why a part of the range could not be looked at or repaired; the first such error.
    pub error: Option<Error>,
}
