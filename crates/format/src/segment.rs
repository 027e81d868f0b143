//! A segment of a cache: a header at both ends, records in pairs of pages from the front, data from the back.

use crate::{LINE, PAGE, Unverified, checksum::crc32c, layout::on_media};
use cbd_types::{MutationPoint, SegmentId};
use zerocopy::{FromBytes, IntoBytes, little_endian::U32, little_endian::U64};

/// First bytes of a segment of a log.
pub const LOG_MAGIC: u32 = u32::from_le_bytes(*b"CBDl");
/// First bytes of the state segment of a cache.
pub const STATE_MAGIC: u32 = u32::from_le_bytes(*b"CBDs");

on_media! {
    /// The header of a segment. Stored before its first record, and durable before that record.
    pub struct SegmentHeader, size 128 {
        /// CRC32C over all bytes of the structure behind this field.
        0 crc: U32,
        /// [`LOG_MAGIC`] or [`STATE_MAGIC`].
        4 magic: U32,
        /// The cache it belongs to.
        8 cache_id: U64,
        /// Its own number: a copy of the header in another segment is invalid.
        16 segment: U32,
        /// Raised whenever the segment is reused; records carry it.
        20 generation: U32,
        /// Random; seeds the checksums of the records.
        24 salt: U64,
        /// Lane of the cache.
        32 lane: U32,
        /// Number of lanes of the cache.
        36 lanes: U32,
        /// Position of the segment in the history of the lane.
        40 ordinal: U64,
        /// Number of the owner that opened it.
        48 ownership: U64,
        /// Raised by every recovery.
        56 run: U64,
        /// Last sequence number accepted from earlier runs; limits only records of earlier runs.
        64 cut: U64,
        /// Sequence number of its first record.
        72 first_sequence: U64,
        /// The epoch at which the segment was opened: no later segment holds records of an earlier epoch.
        80 epoch: U64,
        /// Zero.
        88 reserved: [u8; 40],
    }
}

impl SegmentHeader {
    /// The same header with its checksum.
    #[must_use]
    pub fn sealed(mut self) -> Self {
        self.crc = U32::new(self.sum());
        self
    }

    /// The structure in the first bytes of a page; `None` if there are too few bytes.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Unverified<Self>> {
        Some(Unverified::new(Self::read_from_prefix(bytes).ok()?.0))
    }

    fn sum(&self) -> u32 {
        crc32c(&self.as_bytes()[4..])
    }
}

impl Unverified<SegmentHeader> {
    /// The unverified generation of any header, valid or not. Only for choosing a higher one.
    #[must_use]
    pub fn claimed_generation(&self) -> u32 {
        self.claim(|header| header.generation.get())
    }

    /// Whether it has the magic number of a header, valid or not.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.claim(|header| [LOG_MAGIC, STATE_MAGIC].contains(&header.magic.get()))
    }

    /// The header, if it belongs to `segment` and to the cache `cache_id` with `lanes` lanes.
    #[must_use]
    pub fn verify(&self, segment: SegmentId, cache_id: u64, lanes: u32) -> Option<SegmentHeader> {
        let header = self
            .demand(MutationPoint::HeaderChecksum, |header| header.crc.get() == header.sum())?
            .demand(MutationPoint::HeaderMagic, |header| {
                [LOG_MAGIC, STATE_MAGIC].contains(&header.magic.get())
            })?
            .demand(MutationPoint::HeaderSegment, |header| header.segment.get() == segment.0)?
            .demand(MutationPoint::HeaderCache, |header| header.cache_id.get() == cache_id)?
            .demand(MutationPoint::HeaderLanes, |header| header.lanes.get() == lanes)?
            .demand(MutationPoint::HeaderLane, |header| header.lane.get() < lanes)?
            .demand(MutationPoint::HeaderCounters, |header| {
                [header.ordinal, header.run, header.cut, header.first_sequence, header.epoch]
                    .iter()
                    .all(|counter| counter.get() < crate::COUNTER_END)
            })?
            .accept();
        Some(header)
    }
}

/// The layout of a segment, in bytes from its base.
///
/// Page 0 holds the header, the last page its copy. Slots of 64 bytes fill pages 1, 3, 5 ..., each with its mirror in the
/// next page. Data grows down from the last page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentShape {
    /// Bytes of the segment.
    pub size: u64,
}

impl SegmentShape {
    /// Slots in a page.
    pub const SLOTS_PER_PAGE: u32 = (PAGE / LINE) as u32;

    /// Offset of the copy of the header.
    #[must_use]
    pub const fn header_copy(&self) -> u64 {
        self.size - PAGE
    }

    /// Offset from which data grows down.
    #[must_use]
    pub const fn data_top(&self) -> u64 {
        self.size - PAGE
    }

    /// Offsets of a slot and of its mirror.
    #[must_use]
    pub const fn slot(&self, slot: u32) -> [u64; 2] {
        let pair = (slot / Self::SLOTS_PER_PAGE) as u64;
        let primary = PAGE + pair * 2 * PAGE + (slot % Self::SLOTS_PER_PAGE) as u64 * LINE;
        [primary, primary + PAGE]
    }

    /// Offset of the end of the page pairs that `slots` slots need.
    #[must_use]
    pub const fn records_end(&self, slots: u32) -> u64 {
        PAGE + slots.div_ceil(Self::SLOTS_PER_PAGE) as u64 * 2 * PAGE
    }

    /// Maximum number of slots in any segment of this size; a slot number at or above it is invalid.
    #[must_use]
    pub const fn slots_max(&self) -> u32 {
        ((self.size - 2 * PAGE) / (2 * PAGE)) as u32 * Self::SLOTS_PER_PAGE
    }

    /// Bytes that data of `length` occupies: whole lines.
    #[must_use]
    pub const fn data_bytes(length: u64) -> u64 {
        length.next_multiple_of(LINE)
    }

    /// Whether `slots` more slots from `next_slot` on and `length` more bytes of data below `data_low` fit.
    #[must_use]
    pub const fn fits(&self, next_slot: u32, data_low: u64, slots: u32, length: u64) -> bool {
        self.records_end(next_slot + slots) + Self::data_bytes(length) <= data_low
    }

    /// The atomic unit: 1 MiB, or a quarter of a segment if that is less.
    #[must_use]
    pub const fn atomic_unit(&self) -> u32 {
        let quarter = self.size / 4;
        if quarter < 1 << 20 { quarter as u32 } else { 1 << 20 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> SegmentHeader {
        SegmentHeader {
            crc: U32::ZERO,
            magic: U32::new(LOG_MAGIC),
            cache_id: U64::new(7),
            segment: U32::new(3),
            generation: U32::new(1),
            salt: U64::new(9),
            lane: U32::new(1),
            lanes: U32::new(2),
            ordinal: U64::new(5),
            ownership: U64::new(1),
            run: U64::new(1),
            cut: U64::ZERO,
            first_sequence: U64::new(1),
            epoch: U64::new(1),
            reserved: [0; 40],
        }
    }

    fn counts(header: SegmentHeader) -> bool {
        let bytes = header.sealed();
        SegmentHeader::decode(bytes.as_bytes()).is_some_and(|read| read.verify(SegmentId(3), 7, 2).is_some())
    }

    #[test]
    fn a_header_counts_only_with_every_bit() {
        let sealed = header().sealed();
        for bit in 0..size_of::<SegmentHeader>() * 8 {
            let mut bytes = sealed.as_bytes().to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let read = SegmentHeader::decode(&bytes).expect("there are enough");
            assert!(read.verify(SegmentId(3), 7, 2).is_none(), "bit {bit}");
        }
    }

    #[test]
    fn the_checksum_of_a_header_is_of_all_that_follows_it() {
        let sealed = header().sealed();
        assert_eq!(sealed.crc.get(), crc32c(&sealed.as_bytes()[4..128]));
    }

    #[test]
    fn a_header_of_something_else_does_not_count_whatever_its_checksum() {
        assert!(counts(header()));
        assert!(counts(SegmentHeader { magic: U32::new(STATE_MAGIC), ..header() }));
        assert!(!counts(SegmentHeader { magic: U32::new(LOG_MAGIC + 1), ..header() }));
        assert!(!counts(SegmentHeader { segment: U32::new(4), ..header() }));
        assert!(!counts(SegmentHeader { cache_id: U64::new(8), ..header() }));
        assert!(!counts(SegmentHeader { lanes: U32::new(4), ..header() }));
        assert!(!counts(SegmentHeader { lane: U32::new(2), ..header() }));
    }

    #[test]
    fn a_header_that_has_counted_too_far_does_not_count() {
        let (last, end) = (U64::new(crate::COUNTER_END - 1), U64::new(crate::COUNTER_END));
        assert!(counts(SegmentHeader { ordinal: last, run: last, cut: last, ..header() }));
        assert!(counts(SegmentHeader { first_sequence: last, epoch: last, ..header() }));
        assert!(!counts(SegmentHeader { ordinal: end, ..header() }));
        assert!(!counts(SegmentHeader { run: end, ..header() }));
        assert!(!counts(SegmentHeader { cut: end, ..header() }));
        assert!(!counts(SegmentHeader { first_sequence: end, ..header() }));
        assert!(!counts(SegmentHeader { epoch: end, ..header() }));
    }

    #[test]
    fn copies_of_a_record_never_share_a_page_nor_meet_another() {
        let shape = SegmentShape { size: 64 << 10 };
        let mut used = alloc::collections::BTreeSet::new();
        for slot in 0..shape.slots_max() {
            let [primary, mirror] = shape.slot(slot);
            assert_ne!(primary / PAGE, mirror / PAGE);
            assert!(used.insert(primary) && used.insert(mirror));
            assert!(mirror + LINE <= shape.records_end(slot + 1));
        }
        assert!(shape.records_end(shape.slots_max()) <= shape.header_copy());
    }

    #[test]
    fn the_atomic_unit_always_fits_an_empty_segment() {
        for size in [64 << 10, 1 << 20, 4 << 20, 64 << 20] {
            let shape = SegmentShape { size };
            assert!(shape.fits(0, shape.data_top(), 23, u64::from(shape.atomic_unit())));
        }
    }
}
