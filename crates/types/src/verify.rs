//! Verification of a range: every copy is looked at where it is, and no data is moved to the client. Verification of the metadata
//! of a region: both copies of each structure are looked at.

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

/// A structure of a region that has two copies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Structure {
    /// The superblock.
    Superblock,
    /// A row of the host table.
    HostRow,
    /// A row of the backend table.
    BackendRow,
    /// A row of the blkdev table.
    BlkdevRow,
    /// A row of the segment table.
    SegmentRow,
    /// The header of the segment with the state of a cache.
    StateHeader,
    /// The epoch up to which the backing device has everything.
    Drained,
    /// A former backing device of a backend.
    FormerDisk,
    /// The list of pins.
    Pins,
    /// The tail of a lane.
    Tail,
    /// The mark of a lane.
    Mark,
    /// The header of a segment of a log.
    SegmentHeader,
}

impl Structure {
    /// The name in JSON and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Superblock => "superblock",
            Self::HostRow => "host_row",
            Self::BackendRow => "backend_row",
            Self::BlkdevRow => "blkdev_row",
            Self::SegmentRow => "segment_row",
            Self::StateHeader => "state_header",
            Self::Drained => "drained",
            Self::FormerDisk => "former_disk",
            Self::Pins => "pins",
            Self::Tail => "tail",
            Self::Mark => "mark",
            Self::SegmentHeader => "segment_header",
        }
    }
}

/// A copy of a structure that is damaged or cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DamagedCopy {
    /// The structure.
    pub structure: Structure,
    /// Its row, lane, segment or index; 0 if there is one only.
    pub number: u64,
    /// The first byte of the copy in the region.
    pub at: u64,
    /// Whether the memory can be read.
    pub is_readable: bool,
    /// Whether the copy is whole again.
    pub is_repaired: bool,
}

/// The result of a verification of the metadata of a region.
#[derive(Default, Debug)]
pub struct VerifiedMetadata {
    /// Structures that were looked at.
    pub structures: u64,
    /// Copies that were damaged and are whole again.
    pub repaired: u64,
    /// Copies that are damaged or cannot be read, and stay so.
    pub unrepaired: u64,
    /// The first of these copies, at most [`COPIES_LISTED_MAX`](Self::COPIES_LISTED_MAX).
    pub copies: Vec<DamagedCopy>,
    /// Why a copy could not be repaired; the first such error.
    pub error: Option<Error>,
}

impl VerifiedMetadata {
    /// The most copies that are listed; all are counted.
    pub const COPIES_LISTED_MAX: usize = 64;

    /// Adds a copy that was found to be damaged. Without memory it is only counted.
    pub fn add(&mut self, copy: DamagedCopy) {
        *(if copy.is_repaired { &mut self.repaired } else { &mut self.unrepaired }) += 1;
        if self.copies.len() < Self::COPIES_LISTED_MAX && self.copies.try_reserve(1).is_ok() {
            self.copies.push(copy);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_damaged_copies_are_counted_and_the_first_ones_are_listed() {
        let mut found = VerifiedMetadata::default();
        for number in 0..100 {
            let structure = Structure::HostRow;
            let is_repaired = number % 4 > 0;
            found.add(DamagedCopy { structure, number, at: 0, is_readable: true, is_repaired });
        }
        assert_eq!((found.repaired, found.unrepaired), (75, 25));
        assert_eq!(found.copies.len(), VerifiedMetadata::COPIES_LISTED_MAX);
        assert!(found.copies.iter().zip(0..).all(|(copy, number)| copy.number == number));
    }
}
