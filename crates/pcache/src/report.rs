//! Findings, in forms that can be listed and printed.
//!
//! Invariants: lists are bounded, counts are not.

use cbd_types::ByteRange;
use serde::Serialize;
use std::fmt;

/// Most entries of a list.
const LISTED_MAX: usize = 10_000;

/// Damage of the image itself.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// First affected byte of the image.
    pub at: u64,
    /// Bytes there.
    pub length: u64,
    /// Whether it may mean a loss of dirty data; if not, a substitute is used.
    pub harmful: bool,
    /// The damage, and the reaction to it.
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} (image bytes {}..{})", self.what, self.at, self.at.saturating_add(self.length))
    }
}

/// Why dirty data of a range is not available.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The data does not match its checksum.
    Checksum,
    /// The image cannot be read there, or is shorter.
    Unreadable,
    /// The key names a location that the cache does not have.
    Outside,
    /// The key's segment was reused for newer data, or may have been.
    Replaced,
    /// The key has flags or numbers that dm-pcache never writes.
    Implausible,
}

impl Reason {
    /// The reason as text.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Checksum => "its data does not match its checksum",
            Self::Unreadable => "its data cannot be read from the cache device",
            Self::Outside => "its key refers to a location that the cache does not have",
            Self::Replaced => "its data was replaced, or it cannot be proved that it was not",
            Self::Implausible => "its key has values that dm-pcache never writes",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.text())
    }
}

/// A range of the device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct DeviceRange {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
    /// The reason of the entry, if it is not obvious.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
}

/// Ranges in ascending order; adjacent ones with the same reason are one.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize)]
pub struct RangeList {
    /// Bytes of all.
    pub bytes: u64,
    /// Their number.
    pub count: u64,
    /// The first of them.
    pub ranges: Vec<DeviceRange>,
    /// The end of the last one, and its reason.
    #[serde(skip)]
    last: Option<(u64, Option<Reason>)>,
}

impl RangeList {
    /// Adds a range that begins at the end of the last one, or behind it.
    pub(crate) fn add(&mut self, range: ByteRange, reason: Option<Reason>) {
        self.bytes = self.bytes.saturating_add(range.len());
        let continues = self.last == Some((range.start, reason));
        self.last = Some((range.end, reason));
        if !continues {
            self.count += 1;
            if self.ranges.len() < LISTED_MAX {
                self.ranges.push(DeviceRange { offset: range.start, bytes: range.len(), reason });
            }
        } else if self.count == self.ranges.len() as u64
            && let Some(last) = self.ranges.last_mut()
        {
            last.bytes += range.len();
        }
    }
}

/// Findings; the first ones are listed.
#[derive(Clone, Default, Debug)]
pub(crate) struct Findings {
    pub listed: Vec<Finding>,
    pub harmful: u64,
}

impl Findings {
    pub fn add(&mut self, at: u64, length: u64, harmful: bool, what: impl Into<String>) {
        self.harmful += u64::from(harmful);
        if self.listed.len() < LISTED_MAX {
            self.listed.push(Finding { at, length, harmful, what: what.into() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_ranges_with_the_same_reason_are_one() {
        let mut list = RangeList::default();
        list.add(ByteRange::at(0, 512), None);
        list.add(ByteRange::at(512, 512), None);
        list.add(ByteRange::at(1024, 512), Some(Reason::Checksum));
        list.add(ByteRange::at(2048, 512), Some(Reason::Checksum));
        let range = |offset, bytes, reason| DeviceRange { offset, bytes, reason };
        assert_eq!((list.bytes, list.count), (2048, 3));
        let checksum = Some(Reason::Checksum);
        assert_eq!(
            list.ranges,
            [range(0, 1024, None), range(1024, 512, checksum), range(2048, 512, checksum)]
        );
    }

    #[test]
    fn a_list_is_bounded_and_its_counts_are_not() {
        let mut list = RangeList::default();
        for number in 0..20_000 {
            list.add(ByteRange::at(number * 1024, 512), None);
        }
        list.add(ByteRange::at(19_999 * 1024 + 512, 512), None);
        assert_eq!((list.ranges.len(), list.count, list.bytes), (LISTED_MAX, 20_000, 20_001 * 512));
        assert_eq!(list.ranges.last().map(|range| range.bytes), Some(512));
    }
}
