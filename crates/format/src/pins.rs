//! The pins of a cache: ranges of the device that stay in it, under the names by which users know them.
//!
//! Two copies of the list are in the state segment of the cache, behind the areas of its lanes ([`StateShape::pins`]): a
//! [`PinListHeader`], and for each pin a [`PinHeader`], its text, and its [`PinnedRange`]s.
//!
//! Invariants: a list that is not whole, or is of another cache, does not count; decoding allocates no more than a few times the
//! bytes that were read.
//!
//! Elsewhere: the order of the two copies, and what a pin does (`cbd-engine`).
//!
//! [`StateShape::pins`]: crate::StateShape::pins

use crate::{COUNTER_END, Unverified, checksum::crc32c, layout::on_media};
use alloc::{borrow::ToOwned, string::String, vec::Vec};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, MutationPoint};
use zerocopy::{
    FromBytes, IntoBytes,
    little_endian::{U16, U32, U64},
};

/// First bytes of a list of pins.
pub const PINS_MAGIC: u32 = u32::from_le_bytes(*b"CBDp");

/// The longest text of a pin in bytes.
pub const PIN_TEXT_MAX: usize = 4096;

on_media! {
    /// The beginning of a list of pins.
    pub struct PinListHeader, size 48 {
        /// CRC32C over `cache_id` and the CRC32C of all bytes of the list after this field.
        0 crc: U32,
        /// [`PINS_MAGIC`].
        4 magic: U32,
        /// The cache it belongs to.
        8 cache_id: U64,
        /// Raised by one with every change; of two valid copies the one with the larger number counts.
        16 number: U64,
        /// Bytes of the list, this header included.
        24 length: U32,
        /// Number of pins.
        28 pins: U32,
        /// Zero.
        32 reserved: [u8; 16],
    }
}

on_media! {
    /// The beginning of a pin. Its text follows, zero-padded to a multiple of 8 bytes, and then its ranges.
    pub struct PinHeader, size 8 {
        /// 1 file, 2 range, 3 metadata of a file system.
        0 kind: U16,
        /// Bytes of the text.
        2 text_length: U16,
        /// Number of ranges.
        4 ranges: U32,
    }
}

on_media! {
    /// A range of the device that is pinned, in whole checksum blocks.
    pub struct PinnedRange, size 16 {
        /// First checksum block.
        0 first: U64,
        /// Number of checksum blocks.
        8 blocks: U64,
    }
}

/// What the user named to pin it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PinKind {
    /// A file, by its path.
    File,
    /// A range of the device.
    Range,
    /// The metadata of a file system, by its mount point.
    Metadata,
}

impl PinKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::File, Self::Range, Self::Metadata];

    /// The name in commands and status.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Range => "range",
            Self::Metadata => "metadata",
        }
    }

    /// The number on media.
    const fn code(self) -> u16 {
        self as u16 + 1
    }
}

/// Ranges that stay in the cache, and what they are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pin {
    /// What the user named.
    pub kind: PinKind,
    /// The path, the range or the mount point, as the user named it.
    pub text: String,
    /// The ranges: in order, disjoint, in whole checksum blocks.
    pub ranges: Vec<ByteRange>,
}

impl Pin {
    /// Bytes of the ranges.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(ByteRange::len).sum()
    }
}

/// What a copy of a list says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PinCopy {
    /// No list of this cache was ever stored there.
    Blank,
    /// A list of this cache that is not whole.
    Damaged,
    /// A list with its number.
    Valid(u64, Vec<Pin>),
}

/// Bytes of a list.
#[must_use]
pub fn encoded_length(pins: &[Pin]) -> usize {
    let of_pin = |pin: &Pin| {
        size_of::<PinHeader>()
            + pin.text.len().next_multiple_of(8)
            + pin.ranges.len() * size_of::<PinnedRange>()
    };
    size_of::<PinListHeader>() + pins.iter().map(of_pin).sum::<usize>()
}

/// The list with this number. Texts are at most [`PIN_TEXT_MAX`] bytes long.
#[must_use]
pub fn encode(cache_id: u64, number: u64, pins: &[Pin]) -> Vec<u8> {
    let length = encoded_length(pins);
    let mut bytes = Vec::with_capacity(length);
    let header = PinListHeader {
        crc: U32::ZERO,
        magic: U32::new(PINS_MAGIC),
        cache_id: U64::new(cache_id),
        number: U64::new(number),
        length: U32::new(length as u32),
        pins: U32::new(pins.len() as u32),
        reserved: [0; 16],
    };
    bytes.extend_from_slice(header.as_bytes());
    for pin in pins {
        debug_assert!(pin.text.len() <= PIN_TEXT_MAX);
        let header = PinHeader {
            kind: U16::new(pin.kind.code()),
            text_length: U16::new(pin.text.len() as u16),
            ranges: U32::new(pin.ranges.len() as u32),
        };
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(pin.text.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        for range in &pin.ranges {
            let range = PinnedRange {
                first: U64::new(range.start / CHECKSUM_BLOCK),
                blocks: U64::new(range.len() / CHECKSUM_BLOCK),
            };
            bytes.extend_from_slice(range.as_bytes());
        }
    }
    let crc = sum(cache_id, &bytes);
    bytes[..4].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// Bytes of the list that begins with `header`, if it is one of this cache and at most `most` bytes long: so many are to be read.
#[must_use]
pub fn claimed_length(cache_id: u64, header: &[u8], most: u64) -> Option<usize> {
    let (header, _) = PinListHeader::read_from_prefix(header).ok()?;
    let is_list = header.magic.get() == PINS_MAGIC && header.cache_id.get() == cache_id;
    let length = header.length.get();
    (is_list && length as usize >= size_of::<PinListHeader>() && u64::from(length) <= most)
        .then_some(length as usize)
}

/// Decodes a copy: `bytes` are as many as [`claimed_length`] says, or at least a header.
#[must_use]
pub fn decode(cache_id: u64, bytes: &[u8]) -> PinCopy {
    let Ok((header, _)) = PinListHeader::read_from_prefix(bytes) else { return PinCopy::Damaged };
    if header.magic.get() != PINS_MAGIC || header.cache_id.get() != cache_id {
        return PinCopy::Blank;
    }
    let Some(list) = bytes.get(..header.length.get() as usize) else { return PinCopy::Damaged };
    if list.len() < size_of::<PinListHeader>() {
        return PinCopy::Damaged;
    }
    let crc = sum(cache_id, list);
    let checked = Unverified::new(header)
        .demand(MutationPoint::PinsChecksum, |header| header.crc.get() == crc)
        .map(crate::unverified::Checked::accept);
    let Some(header) = checked.filter(|header| header.number.get() < COUNTER_END) else {
        return PinCopy::Damaged;
    };
    let pins = list.get(size_of::<PinListHeader>()..).and_then(|rest| decode_pins(header.pins.get(), rest));
    pins.map_or(PinCopy::Damaged, |pins| PinCopy::Valid(header.number.get(), pins))
}

fn decode_pins(count: u32, mut rest: &[u8]) -> Option<Vec<Pin>> {
    let mut pins = Vec::new();
    for _ in 0..count {
        let (header, behind) = PinHeader::read_from_prefix(rest).ok()?;
        let kind = PinKind::ALL.into_iter().find(|kind| kind.code() == header.kind.get())?;
        let length = usize::from(header.text_length.get());
        let text = core::str::from_utf8(behind.get(..length)?).ok()?.to_owned();
        rest = behind.get(length.next_multiple_of(8)..)?;
        let mut ranges = Vec::new();
        let mut end = 0;
        for _ in 0..header.ranges.get() {
            let (range, behind) = PinnedRange::read_from_prefix(rest).ok()?;
            let start = range.first.get().checked_mul(CHECKSUM_BLOCK)?;
            let length = range.blocks.get().checked_mul(CHECKSUM_BLOCK)?;
            let range = ByteRange { start, end: start.checked_add(length)? };
            if range.is_empty() || start < end {
                return None;
            }
            end = range.end;
            ranges.push(range);
            rest = behind;
        }
        pins.push(Pin { kind, text, ranges });
    }
    rest.is_empty().then_some(pins)
}

fn sum(cache_id: u64, list: &[u8]) -> u32 {
    let mut seeded = [0; 12];
    seeded[..8].copy_from_slice(&cache_id.to_le_bytes());
    seeded[8..].copy_from_slice(&crc32c(list.get(4..).unwrap_or_default()).to_le_bytes());
    crc32c(&seeded)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    fn pins() -> Vec<Pin> {
        let range = |first: u64, blocks: u64| ByteRange::at(first * CHECKSUM_BLOCK, blocks * CHECKSUM_BLOCK);
        vec![
            Pin {
                kind: PinKind::File,
                text: "/srv/db/index.ibd".into(),
                ranges: vec![range(3, 1), range(9, 4)],
            },
            Pin { kind: PinKind::Range, text: "1G+4K".into(), ranges: vec![range(1 << 18, 1)] },
            Pin { kind: PinKind::Metadata, text: String::new(), ranges: Vec::new() },
        ]
    }

    #[test]
    fn a_list_reads_back_and_no_pins_are_a_list_too() {
        for pins in [pins(), Vec::new()] {
            let bytes = encode(7, 9, &pins);
            assert_eq!(bytes.len(), encoded_length(&pins));
            assert_eq!(claimed_length(7, &bytes, bytes.len() as u64), Some(bytes.len()));
            assert_eq!(claimed_length(7, &bytes, bytes.len() as u64 - 1), None);
            assert_eq!(decode(7, &bytes), PinCopy::Valid(9, pins));
        }
    }

    #[test]
    fn a_list_of_another_cache_and_zeroes_are_blank() {
        let bytes = encode(7, 9, &pins());
        assert_eq!(decode(8, &bytes), PinCopy::Blank);
        assert_eq!(claimed_length(8, &bytes, 1 << 20), None);
        assert_eq!(decode(7, &[0; 64]), PinCopy::Blank);
    }

    #[test]
    fn a_list_with_any_wrong_bit_or_torn_at_any_byte_does_not_count() {
        let bytes = encode(7, 9, &pins());
        for bit in 0..bytes.len() * 8 {
            let mut wrong = bytes.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(!matches!(decode(7, &wrong), PinCopy::Valid(..)), "bit {bit}");
        }
        let older = encode(7, 8, &pins()[..1]);
        for torn in 0..bytes.len() {
            let mut wrong = older.clone();
            wrong.resize(bytes.len(), 0);
            wrong[..torn].copy_from_slice(&bytes[..torn]);
            if wrong == bytes {
                break;
            }
            assert!(!matches!(decode(7, &wrong), PinCopy::Valid(9, _)), "torn at {torn}");
            assert!(!matches!(decode(7, &bytes[..torn]), PinCopy::Valid(..)), "cut at {torn}");
        }
    }

    #[test]
    fn a_list_whose_content_is_impossible_does_not_count_though_its_checksum_is_right() {
        let block = CHECKSUM_BLOCK;
        let overlapping = vec![ByteRange::at(0, 2 * block), ByteRange::at(block, block)];
        let pin = |ranges| vec![Pin { kind: PinKind::File, text: "f".into(), ranges }];
        for ranges in [overlapping, vec![ByteRange::at(block, 0)]] {
            assert_eq!(decode(7, &encode(7, 9, &pin(ranges))), PinCopy::Damaged);
        }
        let good = encode(7, 9, &pin(vec![ByteRange::at(0, block)]));
        // The kind, the length of the text, the number of ranges, the number of pins, an end beyond 2^64, the number of the list.
        let far = (u64::MAX / block).to_le_bytes();
        let changes: [(usize, &[u8]); 7] = [
            (48, &[9, 0]),
            (50, &[0xff, 0xff]),
            (52, &[0xff, 0xff, 0xff, 0xff]),
            (28, &[2, 0]),
            (28, &[0, 0]),
            (64, &far),
            (16, &[0xff; 8]),
        ];
        for (at, with) in changes {
            let mut wrong = good.clone();
            wrong[at..at + with.len()].copy_from_slice(with);
            let crc = sum(7, &wrong);
            wrong[..4].copy_from_slice(&crc.to_le_bytes());
            assert_eq!(decode(7, &wrong), PinCopy::Damaged, "{with:?} at {at}");
        }
        let mut no_text = good.clone();
        no_text[56] = 0xff;
        let crc = sum(7, &no_text);
        no_text[..4].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(decode(7, &no_text), PinCopy::Damaged, "a text that is not UTF-8");
    }
}
