//! Ranges of bytes of a device.

use core::fmt;

/// A half-open range of bytes `[start, end)`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ByteRange {
    /// First byte.
    pub start: u64,
    /// One past the last byte; never below `start`.
    pub end: u64,
}

impl ByteRange {
    /// The range of `length` bytes from `start`; it ends at the last addressable byte at most.
    #[must_use]
    pub const fn at(start: u64, length: u64) -> Self {
        Self { start, end: start.saturating_add(length) }
    }

    /// Number of bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Whether the range is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.start >= self.end
    }

    /// Whether the two ranges have a byte in common.
    #[must_use]
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// The bytes that both ranges contain, if any.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let both = Self { start: self.start.max(other.start), end: self.end.min(other.end) };
        (both.start < both.end).then_some(both)
    }

    /// Whether every byte of `other` is in this range.
    #[must_use]
    pub const fn contains(&self, other: &Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// Splits the range at every multiple of `unit`, in order.
    pub fn split_at_multiples(self, unit: u64) -> impl Iterator<Item = Self> {
        let mut rest = self;
        core::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let border = (rest.start / unit).saturating_add(1).saturating_mul(unit);
            let piece = Self { start: rest.start, end: rest.end.min(border) };
            rest.start = piece.end;
            Some(piece)
        })
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "bytes {}..{}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    #[test]
    fn a_range_is_split_exactly_at_multiples() {
        let pieces: Vec<_> = ByteRange::at(1000, 9000).split_at_multiples(4096).collect();
        assert_eq!(
            pieces,
            [
                ByteRange { start: 1000, end: 4096 },
                ByteRange { start: 4096, end: 8192 },
                ByteRange { start: 8192, end: 10000 },
            ]
        );
    }

    #[test]
    fn adjacent_ranges_do_not_overlap() {
        assert!(!ByteRange::at(0, 512).overlaps(&ByteRange::at(512, 512)));
        assert_eq!(ByteRange::at(0, 512).intersection(&ByteRange::at(512, 512)), None);
    }
}
