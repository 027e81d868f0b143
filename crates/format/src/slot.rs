//! Two slots, the newest valid one wins: the only method of updating anything in place.
//!
//! An object has two slots in different pages. An update writes the slot that does not hold the newest valid content, with a
//! sequence number that is higher by one, and is durable after one fence. A crash at any moment leaves the old or the new
//! content. The checksum covers the sequence number and the object's place, so a slot that was copied to another place, or
//! belongs to another kind of object, is invalid.

use crate::{Unverified, checksum::crc32c, layout::on_media};
use alloc::{boxed::Box, vec::Vec};
use cbd_types::MutationPoint;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, little_endian::U32, little_endian::U64,
};

on_media! {
    /// The header of every slot, before the content.
    pub struct SlotHeader, size 16 {
        /// CRC32C over kind, place, and all bytes of the slot behind this field.
        0 crc: U32,
        /// The type of the content; see [`SlotContent::KIND`].
        4 kind: U32,
        /// Raised by one with every update; the larger of two valid slots is the newest.
        8 sequence: U64,
    }
}

/// A content that lives in two slots.
pub trait SlotContent: FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned + Copy {
    /// Distinguishes the types on media.
    const KIND: u32;
    /// Bytes of a slot, header included; bytes after the content are zero.
    const SLOT_SIZE: usize;

    /// Makes all bytes zero, in place.
    fn clear(&mut self) {
        self.zero();
    }

    /// Whether its numbers are possible; an implausible content is invalid even with a valid checksum.
    fn is_plausible(&self) -> bool {
        true
    }
}

/// A content of zeroes on the heap. It is never on the stack: the largest content has about a kibibyte.
#[must_use]
pub fn zeroed<T: SlotContent>() -> Box<T> {
    let failed = |_| alloc::alloc::handle_alloc_error(alloc::alloc::Layout::new::<T>());
    T::new_box_zeroed().unwrap_or_else(failed)
}

/// A content with its sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot<T> {
    /// Number of updates of the object.
    pub sequence: u64,
    /// The content.
    pub content: T,
}

impl<T: SlotContent> Slot<T> {
    const HEADER: usize = size_of::<SlotHeader>();

    /// The slot's bytes for the object at `place` (its row or its lane).
    #[must_use]
    pub fn encode(&self, place: u64) -> Vec<u8> {
        Self::encode_content(self.sequence, &self.content, place)
    }

    /// As [`encode`](Self::encode), for a borrowed content.
    #[must_use]
    pub fn encode_content(sequence: u64, content: &T, place: u64) -> Vec<u8> {
        let mut bytes = alloc::vec![0; T::SLOT_SIZE];
        Self::encode_into(sequence, content, place, &mut bytes);
        bytes
    }

    /// As [`encode_content`](Self::encode_content), into `bytes`.
    ///
    /// # Panics
    /// If there are fewer bytes than a slot has.
    pub fn encode_into(sequence: u64, content: &T, place: u64, bytes: &mut [u8]) {
        let bytes = &mut bytes[..T::SLOT_SIZE];
        bytes.fill(0);
        bytes[Self::HEADER..Self::HEADER + size_of::<T>()].copy_from_slice(content.as_bytes());
        let mut header = SlotHeader { crc: U32::ZERO, kind: U32::new(T::KIND), sequence: U64::new(sequence) };
        bytes[..Self::HEADER].copy_from_slice(header.as_bytes());
        header.crc = U32::new(Self::sum(place, bytes));
        bytes[..Self::HEADER].copy_from_slice(header.as_bytes());
    }

    /// The same for a slot of one line, without an allocation.
    ///
    /// # Panics
    /// If a slot of `T` is not a line.
    #[must_use]
    pub fn encode_line(&self, place: u64) -> [u8; 64] {
        Self::encode_content_line(self.sequence, &self.content, place)
    }

    /// As [`encode_line`](Self::encode_line), for a borrowed content.
    ///
    /// # Panics
    /// If a slot of `T` is not a line.
    #[must_use]
    pub fn encode_content_line(sequence: u64, content: &T, place: u64) -> [u8; 64] {
        assert!(T::SLOT_SIZE == 64 && size_of::<T>() == 48, "slots of one line only");
        let mut bytes = [0; 64];
        bytes[Self::HEADER..Self::HEADER + size_of::<T>()].copy_from_slice(content.as_bytes());
        bytes[4..8].copy_from_slice(&T::KIND.to_le_bytes());
        bytes[8..16].copy_from_slice(&sequence.to_le_bytes());
        let crc = Self::sum(place, &bytes);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// The slot in `bytes`, if it is a valid slot of this type at this place.
    #[must_use]
    pub fn decode(place: u64, bytes: &[u8]) -> Option<Self> {
        Self::decode_in_place(place, bytes)
            .map(|slot| Self { sequence: slot.sequence, content: *slot.content })
    }

    /// As [`decode`](Self::decode), without a copy of the content.
    #[must_use]
    pub fn decode_in_place(place: u64, bytes: &[u8]) -> Option<Slot<&T>> {
        let bytes = bytes.get(..T::SLOT_SIZE)?;
        let (header, rest) = SlotHeader::read_from_prefix(bytes).ok()?;
        let (content, _) = T::ref_from_prefix(rest).ok()?;
        let slot = Unverified::new(Slot { sequence: header.sequence.get(), content })
            .demand(MutationPoint::SlotKind, |_| header.kind.get() == T::KIND)?
            .demand(MutationPoint::SlotChecksum, |_| header.crc.get() == Self::sum(place, bytes))?
            .demand(MutationPoint::SlotSequenceBound, |slot| slot.sequence < crate::COUNTER_END)?
            .demand(MutationPoint::SlotContent, |slot| slot.content.is_plausible())?
            .accept();
        Some(slot)
    }

    fn sum(place: u64, bytes: &[u8]) -> u32 {
        // A line is the common case and must not allocate; the checksum of a longer slot is computed in two steps.
        let mut seeded = [0u8; 12 + 60];
        seeded[..4].copy_from_slice(&T::KIND.to_le_bytes());
        seeded[4..12].copy_from_slice(&place.to_le_bytes());
        let body = &bytes[4..];
        if body.len() == 60 {
            seeded[12..].copy_from_slice(body);
            return crc32c(&seeded);
        }
        seeded[12..16].copy_from_slice(&crc32c(body).to_le_bytes());
        crc32c(&seeded[..16])
    }
}

impl<T> Slot<T> {
    /// The newer valid one of two slots: its index, 0 or 1, and its value.
    #[must_use]
    pub fn newest(first: Option<Self>, second: Option<Self>) -> Option<(usize, Self)> {
        match (first, second) {
            (Some(a), Some(b)) if b.sequence > a.sequence => Some((1, b)),
            (Some(a), _) => Some((0, a)),
            (None, Some(b)) => Some((1, b)),
            (None, None) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{FormerDisk, LaneTail};
    use zerocopy::FromZeros;

    fn tail(ordinal: u64) -> LaneTail {
        LaneTail {
            ordinal: U64::new(ordinal),
            ownership: U64::ZERO,
            first_sequence: U64::new(1),
            reserved: [0; 24],
        }
    }

    #[test]
    fn the_newest_valid_slot_wins() {
        let old = Slot { sequence: 4, content: tail(1) };
        let new = Slot { sequence: 5, content: tail(2) };
        assert_eq!(Slot::newest(Some(new), Some(old)), Some((0, new)));
        assert_eq!(Slot::newest(Some(old), Some(new)), Some((1, new)));
        assert_eq!(Slot::newest(Some(old), Some(old)), Some((0, old)));
        assert_eq!(Slot::newest(None, Some(old)), Some((1, old)));
        assert_eq!(Slot::<LaneTail>::newest(None, None), None);
    }

    #[test]
    fn the_checksum_of_a_slot_is_of_kind_place_and_all_that_follows_it() {
        let seed = |kind: u32| [&kind.to_le_bytes()[..], &7_u64.to_le_bytes()].concat();
        let line = Slot { sequence: 9, content: tail(77) }.encode_line(7);
        let expected = crc32c(&[&seed(LaneTail::KIND)[..], &line[4..]].concat());
        assert_eq!(line[..4], expected.to_le_bytes());
        // The checksum of a longer slot covers the checksum of the bytes after the field.
        let long = Slot { sequence: 9, content: FormerDisk::new_zeroed() }.encode(7);
        let body = crc32c(&long[4..]).to_le_bytes();
        let expected = crc32c(&[&seed(FormerDisk::KIND)[..], &body].concat());
        assert_eq!(long[..4], expected.to_le_bytes());
    }

    #[test]
    fn a_long_slot_counts_only_at_its_place_and_with_every_bit() {
        let content = FormerDisk { number: U64::new(3), ..FormerDisk::new_zeroed() };
        let slot = Slot { sequence: 9, content };
        let bytes = slot.encode(7);
        assert_eq!(bytes.len(), 1024);
        assert_eq!(Slot::decode(7, &bytes), Some(slot));
        assert_eq!(Slot::<FormerDisk>::decode(8, &bytes), None);
        for bit in 0..1024 * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Slot::<FormerDisk>::decode(7, &damaged), None, "bit {bit}");
        }
    }

    /// The bytes of a slot after `change`, with a matching checksum.
    fn forged(sequence: u64, content: LaneTail, change: impl Fn(&mut [u8])) -> Vec<u8> {
        let mut bytes = Slot { sequence, content }.encode(3);
        change(&mut bytes);
        let crc = Slot::<LaneTail>::sum(3, &bytes);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    #[test]
    fn a_slot_that_says_it_is_something_else_does_not_count() {
        assert!(Slot::<LaneTail>::decode(3, &forged(1, tail(1), |_| {})).is_some());
        assert_eq!(Slot::<LaneTail>::decode(3, &forged(1, tail(1), |bytes| bytes[4] += 1)), None);
    }

    #[test]
    fn a_slot_with_numbers_that_cannot_be_does_not_count() {
        assert!(Slot::<LaneTail>::decode(3, &forged(crate::COUNTER_END - 1, tail(1), |_| {})).is_some());
        assert_eq!(Slot::<LaneTail>::decode(3, &forged(crate::COUNTER_END, tail(1), |_| {})), None);
        assert_eq!(Slot::<LaneTail>::decode(3, &forged(1, tail(crate::COUNTER_END), |_| {})), None);
    }

    #[test]
    fn a_slot_counts_only_at_its_place_and_with_every_bit() {
        let slot = Slot { sequence: 9, content: tail(77) };
        let bytes = slot.encode_line(3);
        assert_eq!(bytes.as_slice(), slot.encode(3));
        assert_eq!(Slot::decode(3, &bytes), Some(slot));
        assert_eq!(Slot::<LaneTail>::decode(4, &bytes), None);
        for bit in 0..512 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Slot::<LaneTail>::decode(3, &damaged), None, "bit {bit}");
        }
        assert_eq!(Slot::<LaneTail>::decode(3, &bytes[..40]), None);
    }
}
