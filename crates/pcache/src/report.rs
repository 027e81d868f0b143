//! What was found, in forms that can be listed and printed.
//!
//! Always true here: lists are bounded, counts are not.
//!
//! Left to others: how it is printed.

use cbd_types::ByteRange;
use serde::Serialize;
use std::fmt;

/// Most entries of a list.
const LISTED_MAX: usize = 10_000;

/// Something about the image itself that is not as it should be.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// First byte of the image that it is about.
    pub at: u64,
    /// Bytes there.
    pub length: u64,
    /// Whether dirty data may be lost by it; if not, something else serves in its place.
    pub harmful: bool,
    /// What is wrong, and what was made of it.
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} (image bytes {}..{})", self.what, self.at, self.at.saturating_add(self.length))
    }
}

/// Why dirty data of a range cannot be had.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The data do not match their checksum.
    Checksum,
    /// The image cannot be read there, or ends before.
    Unreadable,
    /// The key names a place that the cache does not have.
    Outside,
    /// The key's segment was given to newer data since, or nobody knows whether.
    Replaced,
    /// The key has marks or numbers that dm-pcache never writes.
    Implausible,
}

impl Reason {
    /// In words.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Checksum => "its data do not match their checksum",
            Self::Unreadable => "its data cannot be read from the cache device",
            Self::Outside => "its key names a place that the cache does not have",
            Self::Replaced => "its data were replaced, or nothing proves that they were not",
            Self::Implausible => "its key says what dm-pcache never writes",
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
    /// Why it is listed, if that is not plain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
}

/// Ranges in ascending order; neighbours of the same reason are one.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize)]
pub struct RangeList {
    /// Bytes of all.
    pub bytes: u64,
    /// How many there are.
    pub count: u64,
    /// The first of them.
    pub ranges: Vec<DeviceRange>,
    /// Where the last one ends, and its reason.
    #[serde(skip)]
    last: Option<(u64, Option<Reason>)>,
}

impl RangeList {
    /// Adds a range that begins where the last one ended, or behind it.
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

/// Findings, the first of them listed.
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
    fn neighbours_of_one_reason_are_one_range() {
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
