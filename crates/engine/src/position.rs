//! Positions in the log of a lane.

/// The location of a record: the number of its segment within the cache, and its slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Location {
    pub segment: u32,
    pub slot: u32,
}

/// No location.
pub(crate) const NONE: Location = Location { segment: u32::MAX, slot: u32::MAX };

/// A position in the history of a lane: ordinal of the segment, then slot.
pub(crate) type Place = (u64, u32);

/// A position in a lane's log at which a scan continues.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(crate) struct Cursor {
    pub ordinal: u64,
    pub slot: u32,
}

/// Up to which record a lane is complete: the content of its mark.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reached {
    pub lane_sequence: u64,
    /// The run of the segment that holds the last record.
    pub run: u64,
}
