//! The map of a file: which of its bytes have a place on the disk.
//!
//! Invariants: a map covers every byte of the file once, in order.
//!
//! Elsewhere: the request FIEMAP (`cbd_sys::extents`).

use cbd_sys::extents::FileExtent;
use cbd_types::ByteRange;

/// Where bytes of a file are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// On the disk from this byte on.
    Disk(u64),
    /// Known to the file system alone: compressed, encrypted, not aligned, or not written yet.
    Inner,
    /// Among metadata or the data of other files.
    Inline,
    /// Allocated, and never written: reads as zeroes.
    Unwritten,
    /// Nowhere: reads as zeroes.
    Hole,
}

impl Place {
    /// The place of the byte that is `bytes` behind.
    const fn behind(self, bytes: u64) -> Self {
        match self {
            Self::Disk(start) => Self::Disk(start + bytes),
            other => other,
        }
    }

    /// Whether the bytes read as zeroes and are on no disk.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        matches!(self, Self::Unwritten | Self::Hole)
    }
}

/// Bytes of a file, and where they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapped {
    /// The bytes of the file.
    pub range: ByteRange,
    /// Where they are.
    pub place: Place,
}

impl Mapped {
    /// The part in `range`, if there is one.
    #[must_use]
    pub fn within(self, range: ByteRange) -> Option<Self> {
        let part = self.range.intersection(&range)?;
        Some(Self { range: part, place: self.place.behind(part.start - self.range.start) })
    }
}

/// The map of a file of `length` bytes with these extents.
#[must_use]
pub fn map(extents: &[FileExtent], length: u64) -> Vec<Mapped> {
    let mut sorted = extents.to_vec();
    sorted.sort_by_key(|extent| extent.logical);
    let mut map: Vec<Mapped> = Vec::new();
    let mut end = 0;
    let mut add = |start: u64, end: u64, place: Place| {
        if start >= end {
            return;
        }
        match map.last_mut() {
            Some(last) if last.range.end == start && last.place.behind(last.range.len()) == place => {
                last.range.end = end;
            }
            _ => map.push(Mapped { range: ByteRange { start, end }, place }),
        }
    };
    for extent in &sorted {
        let extent_end = extent.logical.saturating_add(extent.length).min(length);
        add(end, extent.logical.min(length), Place::Hole);
        let start = extent.logical.max(end);
        add(start, extent_end, place_of(extent).behind(start - extent.logical));
        end = end.max(extent_end);
    }
    add(end, length, Place::Hole);
    map
}

fn place_of(extent: &FileExtent) -> Place {
    let has = |flags: u32| extent.flags & flags != 0;
    if has(FileExtent::INLINE | FileExtent::TAIL) {
        Place::Inline
    } else if has(FileExtent::UNWRITTEN) {
        Place::Unwritten
    } else if has(FileExtent::UNKNOWN
        | FileExtent::NOT_ALLOCATED
        | FileExtent::ENCODED
        | FileExtent::ENCRYPTED
        | FileExtent::NOT_ALIGNED)
    {
        Place::Inner
    } else {
        Place::Disk(extent.physical)
    }
}

/// The bytes that `before` has elsewhere than `after`.
#[must_use]
pub fn moved(before: &[Mapped], after: &[Mapped]) -> Vec<ByteRange> {
    let mut moved: Vec<ByteRange> = Vec::new();
    let mut rest = after.iter().peekable();
    for old in before {
        let mut start = old.range.start;
        while start < old.range.end {
            while rest.peek().is_some_and(|new| new.range.end <= start) {
                rest.next();
            }
            let known = ByteRange { start, end: old.range.end };
            let new = rest.peek().and_then(|new| new.within(known));
            let end =
                new.map_or(
                    known.end,
                    |new| if new.range.start > start { new.range.start } else { new.range.end },
                );
            let part = ByteRange { start, end };
            let is_same =
                new.is_some_and(|new| old.within(part) == Some(Mapped { range: part, place: new.place }));
            match moved.last_mut() {
                _ if is_same => {}
                Some(last) if last.end == start => last.end = end,
                _ => moved.push(part),
            }
            start = end;
        }
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(logical: u64, physical: u64, length: u64, flags: u32) -> FileExtent {
        FileExtent { logical, physical, length, flags }
    }

    fn at(start: u64, end: u64, place: Place) -> Mapped {
        Mapped { range: ByteRange { start, end }, place }
    }

    #[test]
    fn holes_unwritten_inline_and_encoded_extents_are_told_apart() {
        let extents = [
            extent(16_384, 1 << 20, 4096, 0),
            extent(20_480, (1 << 20) + 4096, 8192, 0),
            extent(4096, 8192, 4096, FileExtent::UNWRITTEN),
            extent(32_768, 0, 4096, FileExtent::ENCODED),
            extent(36_864, 0, 4096, FileExtent::ENCRYPTED),
            extent(40_960, 0, 4096, FileExtent::INLINE | FileExtent::NOT_ALIGNED),
        ];
        let expected = [
            at(0, 4096, Place::Hole),
            at(4096, 8192, Place::Unwritten),
            at(8192, 16_384, Place::Hole),
            at(16_384, 28_672, Place::Disk(1 << 20)),
            at(28_672, 32_768, Place::Hole),
            at(32_768, 40_960, Place::Inner),
            at(40_960, 42_000, Place::Inline),
        ];
        assert_eq!(map(&extents, 42_000), expected);
        assert_eq!(map(&[], 100), [at(0, 100, Place::Hole)]);
        // Blocks behind the end of the file hold nothing of it.
        assert_eq!(map(&[extent(0, 4096, 65_536, 0)], 10), [at(0, 10, Place::Disk(4096))]);
    }

    #[test]
    fn what_moved_is_found_to_the_byte() {
        let before = map(&[extent(0, 1 << 20, 1 << 20, 0)], 2 << 20);
        assert_eq!(moved(&before, &before), []);
        let parts = [
            extent(0, 1 << 20, 4096, 0),
            extent(4096, 1 << 30, 4096, 0),
            extent(8192, (1 << 20) + 8192, (1 << 20) - 8192, 0),
        ];
        assert_eq!(moved(&before, &map(&parts, 2 << 20)), [ByteRange { start: 4096, end: 8192 }]);
        let grown = [extent(0, 1 << 20, 1 << 20, 0), extent(1 << 20, 7 << 20, 4096, 0)];
        assert_eq!(moved(&before, &map(&grown, 2 << 20)), [ByteRange::at(1 << 20, 4096)]);
        assert_eq!(moved(&before, &[]), [ByteRange { start: 0, end: 2 << 20 }]);
        let written = map(&[extent(0, 1 << 20, 1 << 20, FileExtent::UNWRITTEN)], 2 << 20);
        assert_eq!(moved(&written, &before), [ByteRange { start: 0, end: 1 << 20 }]);
    }

    #[test]
    fn a_part_of_a_map_keeps_its_place() {
        let whole = at(4096, 12_288, Place::Disk(1 << 20));
        let part = whole.within(ByteRange { start: 8192, end: 1 << 30 });
        assert_eq!(part, Some(at(8192, 12_288, Place::Disk((1 << 20) + 4096))));
        assert_eq!(whole.within(ByteRange { start: 0, end: 4096 }), None);
    }
}
