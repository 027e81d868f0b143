//! A record: one line of the log, and the continuation lines that may follow it.

use crate::{Unverified, checksum::crc32c, layout::on_media};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, MutationPoint, SECTOR, SegmentId};
use zerocopy::{FromBytes, IntoBytes, little_endian::U32, little_endian::U64};

/// Checksums in one continuation line.
pub const CHECKSUMS_PER_LINE: usize = 12;

/// Maximum number of continuation lines of a record: 1 MiB that begins and ends inside a block covers 257 blocks, and the
/// record itself holds the checksum of the first.
pub const MAX_CHECKSUM_LINES: u32 = 256u32.div_ceil(CHECKSUMS_PER_LINE as u32);

/// Type byte of a continuation line with checksums.
const CHECKSUM_LINE: u8 = 0x80;

/// Type byte of a continuation line with a map of damaged sectors.
const MAP_LINE: u8 = 0x81;

/// Sectors in one line of a map.
pub const SECTORS_PER_LINE: u64 = CHECKSUMS_PER_LINE as u64 * 32;

/// The kind of a record.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RecordKind {
    /// A client wrote data.
    Write,
    /// The range reads as zeroes, by write-zeroes.
    WriteZeroes,
    /// The range reads as zeroes, by discard.
    Discard,
    /// Data that was read from the backing device; clean.
    Fill,
    /// The range is damaged; reads of it fail. Applies where the record that it marks bad is still the newest.
    Quarantine,
    /// Data that a client wrote and the backing device refuses. It stays dirty when *drained* passes its epoch, and is
    /// carried forward until the backing device accepts it or a newer record covers it.
    ParkedWrite,
    /// The same for a range that reads as zeroes.
    ParkedZeroes,
    /// The cache holds nothing of the range from here on: a write goes to the backing device alone. Durable before that write
    /// is submitted. Needs [`FEATURE_BYPASS`](crate::superblock::FEATURE_BYPASS).
    Invalidate,
    /// Data that the backing device had accepted before the record was stored, and that a flush of the backing device may not
    /// have covered yet: until *drained* has passed its epoch, a power failure may have taken it from the backing device. Needs
    /// [`FEATURE_BYPASS`](crate::superblock::FEATURE_BYPASS).
    WriteThrough,
}

impl RecordKind {
    const fn code(self) -> u8 {
        match self {
            Self::Write => 1,
            Self::WriteZeroes => 2,
            Self::Discard => 3,
            Self::Fill => 4,
            Self::ParkedWrite => 5,
            Self::Quarantine => 6,
            Self::ParkedZeroes => 7,
            Self::Invalidate => 8,
            Self::WriteThrough => 9,
        }
    }

    const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Write,
            2 => Self::WriteZeroes,
            3 => Self::Discard,
            4 => Self::Fill,
            5 => Self::ParkedWrite,
            6 => Self::Quarantine,
            7 => Self::ParkedZeroes,
            8 => Self::Invalidate,
            9 => Self::WriteThrough,
            _ => return None,
        })
    }

    /// Whether the record has data.
    #[must_use]
    pub const fn has_data(self) -> bool {
        matches!(self, Self::Write | Self::Fill | Self::ParkedWrite | Self::WriteThrough)
    }

    /// Whether the range reads as zeroes.
    #[must_use]
    pub const fn is_zeroes(self) -> bool {
        matches!(self, Self::WriteZeroes | Self::Discard | Self::ParkedZeroes)
    }

    /// Whether it must be written back before *drained* may pass its epoch.
    #[must_use]
    pub const fn is_dirty(self) -> bool {
        matches!(self, Self::Write | Self::WriteZeroes | Self::Discard)
    }

    /// Whether a flush of the backing device must cover it before *drained* may pass its epoch.
    #[must_use]
    pub const fn awaits_flush(self) -> bool {
        self.is_dirty() || matches!(self, Self::WriteThrough)
    }

    /// Whether the backing device lacks it, regardless of *drained*.
    #[must_use]
    pub const fn is_parked(self) -> bool {
        matches!(self, Self::ParkedWrite | Self::ParkedZeroes)
    }
}

/// Maximum length of an invalidation in bytes: the lane forgets the blocks of its range one by one.
pub const INVALIDATE_MAX: u64 = 64 << 20;

/// Bit of [`Record::flags`]: its data checksums are valid; without this bit data is not verified.
pub const FLAG_DATA_CRC: u8 = 1;

/// Bits of [`Record::flags`]: the [`RecordClass`].
const FLAGS_CLASS: u8 = 0b110;

/// What the data of a record is. Only the decision what stays in the cache depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RecordClass {
    /// Nothing is known of it.
    #[default]
    Unmarked = 0,
    /// Metadata of a file system.
    Metadata = 1,
    /// The same, appended again by reclaim although no client had read it.
    MetadataAgain = 2,
}

impl RecordClass {
    /// Whether it is metadata of a file system.
    #[must_use]
    pub const fn is_metadata(self) -> bool {
        !matches!(self, Self::Unmarked)
    }
}

on_media! {
    /// One entry of the log: a cache line, stored in two copies.
    pub struct Record, size 64 {
        /// CRC32C over the segment's salt and number, the slot, and the bytes behind this field.
        0 crc: U32,
        /// Its kind; see [`RecordKind`].
        4 kind: u8,
        /// [`FLAG_DATA_CRC`], and in bits 1 and 2 the [`RecordClass`].
        5 flags: u8,
        /// Number of continuation lines.
        6 lines: u8,
        /// Zero.
        7 reserved: u8,
        /// Sequence number in the lane, contiguous.
        8 sequence: U64,
        /// First byte on the device.
        16 offset: U64,
        /// Bytes on the device.
        24 length: U64,
        /// The epoch it belongs to.
        32 epoch: U64,
        /// Generation of the segment.
        40 generation: U32,
        /// First byte of the data in the segment; 0 without data.
        44 data_offset: U32,
        /// CRC32C of the first checksum block.
        48 first_sum: U32,
        /// Channel of the request; 0 for a local one.
        52 channel: U32,
        /// The request's id on its channel, or the sequence number that a quarantine marks bad.
        56 reference: U64,
    }
}

on_media! {
    /// A continuation line of a record: checksums of its second and later blocks, or a map of the sectors that a quarantine
    /// marks bad.
    pub struct ChecksumLine, size 64 {
        /// CRC32C over the segment's salt and number, the slot, and the bytes behind this field.
        0 crc: U32,
        /// 0x80; 0x81 for a map.
        4 kind: u8,
        /// Index among the lines of its record, from 0.
        5 index: u8,
        /// Checksums in use.
        6 count: u8,
        /// Zero.
        7 reserved: u8,
        /// Sequence number of its record.
        8 sequence: U64,
        /// CRC32C of each block; of a map, one bit for each sector.
        16 checksums: [U32; 12],
    }
}

/// The line's position, which seeds its checksum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordPlace {
    /// Salt of the segment.
    pub salt: u64,
    /// Number of the segment.
    pub segment: SegmentId,
    /// Slot in the segment.
    pub slot: u32,
}

/// The bytes under a line's checksum: aligned, since it is computed word by word.
#[repr(align(8))]
struct Seeded([u8; 16 + 60]);

impl RecordPlace {
    fn sum(&self, line: &[u8; 64]) -> u32 {
        let Seeded(seeded) = &mut Seeded([0; 16 + 60]);
        seeded[..8].copy_from_slice(&self.salt.to_le_bytes());
        seeded[8..12].copy_from_slice(&self.segment.0.to_le_bytes());
        seeded[12..16].copy_from_slice(&self.slot.to_le_bytes());
        // Copied in two parts: a load of a word that spans two stores would wait for both stores.
        seeded[16..72].copy_from_slice(&line[4..60]);
        seeded[72..].copy_from_slice(&line[60..]);
        crc32c(seeded)
    }

    fn seal(&self, mut line: [u8; 64]) -> [u8; 64] {
        let crc = self.sum(&line);
        line[..4].copy_from_slice(&crc.to_le_bytes());
        line
    }

    fn is_valid(&self, line: &[u8; 64]) -> bool {
        line[..4] == self.sum(line).to_le_bytes()
    }
}

impl Record {
    /// A record of `kind` for `range`; the rest is zero.
    #[must_use]
    pub fn new(kind: RecordKind, range: ByteRange) -> Self {
        Self {
            crc: U32::ZERO,
            kind: kind.code(),
            flags: 0,
            lines: 0,
            reserved: 0,
            sequence: U64::ZERO,
            offset: U64::new(range.start),
            length: U64::new(range.len()),
            epoch: U64::ZERO,
            generation: U32::ZERO,
            data_offset: U32::ZERO,
            first_sum: U32::ZERO,
            channel: U32::ZERO,
            reference: U64::ZERO,
        }
    }

    /// The record with the class of its data.
    #[must_use]
    pub const fn with_class(mut self, class: RecordClass) -> Self {
        self.flags = self.flags & !FLAGS_CLASS | (class as u8) << FLAGS_CLASS.trailing_zeros();
        self
    }

    /// The class of its data.
    #[must_use]
    pub const fn class(&self) -> RecordClass {
        match (self.flags & FLAGS_CLASS) >> FLAGS_CLASS.trailing_zeros() {
            1 => RecordClass::Metadata,
            2 => RecordClass::MetadataAgain,
            _ => RecordClass::Unmarked,
        }
    }

    /// The line to store, with its checksum.
    #[must_use]
    pub fn encode(&self, place: &RecordPlace) -> [u8; 64] {
        place.seal(zerocopy::transmute!(*self))
    }

    /// The bytes of a slot as an unverified record.
    #[must_use]
    pub fn decode(line: &[u8; 64]) -> Unverified<Self> {
        Unverified::new(zerocopy::transmute!(*line))
    }

    /// The same without a copy, for scans of many records.
    #[must_use]
    pub fn decode_in_place(line: &[u8; 64]) -> Unverified<&Self> {
        Unverified::new(zerocopy::transmute_ref!(line))
    }

    /// Its kind. Verified records have a known kind.
    #[must_use]
    pub fn kind(&self) -> RecordKind {
        RecordKind::from_code(self.kind).unwrap_or(RecordKind::Quarantine)
    }

    /// Bytes of the device.
    #[must_use]
    pub fn range(&self) -> ByteRange {
        ByteRange::at(self.offset.get(), self.length.get())
    }

    /// Number of slots that it occupies, including its continuation lines.
    #[must_use]
    pub const fn slots(&self) -> u32 {
        1 + self.lines as u32
    }

    /// Whether its data is checksummed.
    #[must_use]
    pub const fn has_checksums(&self) -> bool {
        self.flags & FLAG_DATA_CRC != 0
    }

    /// Index of the checksum block of the record that contains byte `at` of the device.
    #[must_use]
    pub fn block_of(&self, at: u64) -> usize {
        (at / CHECKSUM_BLOCK - self.offset.get() / CHECKSUM_BLOCK) as usize
    }

    /// The bytes that checksum block `block` of the record covers.
    #[must_use]
    pub fn block_range(&self, block: usize) -> ByteRange {
        let range = self.range();
        let start = (range.start / CHECKSUM_BLOCK + block as u64) * CHECKSUM_BLOCK;
        // The end of the last block exceeds the largest number.
        ByteRange { start: start.max(range.start), end: start.saturating_add(CHECKSUM_BLOCK).min(range.end) }
    }
}

/// Number of checksum blocks that `range` overlaps.
#[must_use]
pub const fn blocks_in(range: ByteRange) -> usize {
    if range.is_empty() {
        return 0;
    }
    ((range.end - 1) / CHECKSUM_BLOCK - range.start / CHECKSUM_BLOCK + 1) as usize
}

/// Number of continuation lines for the checksums of `range`.
#[must_use]
pub const fn checksum_lines(range: ByteRange) -> u32 {
    (blocks_in(range).saturating_sub(1)).div_ceil(CHECKSUMS_PER_LINE) as u32
}

/// Number of continuation lines for a map of the sectors of `range`; more than [`MAX_CHECKSUM_LINES`] if the range is too
/// long for a map.
#[must_use]
pub const fn map_lines(range: ByteRange) -> u32 {
    let lines = range.len().div_ceil(SECTOR).div_ceil(SECTORS_PER_LINE);
    if lines > MAX_CHECKSUM_LINES as u64 { MAX_CHECKSUM_LINES + 1 } else { lines as u32 }
}

impl Unverified<Record> {
    /// The record, if it has this position and generation and is consistent: its kind is known, its range does not wrap, its
    /// data and its lines lie inside a segment of `size` bytes, and the number of lines is the one that its blocks need. The
    /// caller checks that its range is inside the device.
    #[must_use]
    pub fn verify(&self, place: &RecordPlace, generation: u32, size: u64) -> Option<Record> {
        Unverified::new(&self.claim(|record| *record)).verify(place, generation, size).copied()
    }
}

impl<'a> Unverified<&'a Record> {
    /// The record without a copy, if it is valid; see [`Unverified::<Record>::verify`].
    #[must_use]
    pub fn verify(&self, place: &RecordPlace, generation: u32, size: u64) -> Option<&'a Record> {
        let record = self
            .demand(MutationPoint::RecordChecksum, |record| {
                place.is_valid(zerocopy::transmute_ref!(*record))
            })?
            .demand(MutationPoint::RecordGeneration, |record| record.generation.get() == generation)?
            .demand(MutationPoint::RecordKind, |record| RecordKind::from_code(record.kind).is_some())?
            .demand(MutationPoint::RecordReserved, |record| record.reserved == 0)?
            .demand(MutationPoint::RecordCounters, |record| {
                record.sequence.get() < crate::COUNTER_END && record.epoch.get() < crate::COUNTER_END
            })?
            .demand(MutationPoint::RecordRange, |record| {
                let (start, length) = (record.offset.get(), record.length.get());
                length > 0 && start.checked_add(length).is_some()
            })?
            .accept();
        let kind = record.kind();
        let range = record.range();
        let lines = match kind {
            RecordKind::Quarantine if record.lines > 0 => map_lines(range),
            _ if kind.has_data() && record.has_checksums() => checksum_lines(range),
            _ => 0,
        };
        let data_offset = u64::from(record.data_offset.get());
        let inside = !kind.has_data()
            || (data_offset >= crate::PAGE
                && data_offset.checked_add(range.len()).is_some_and(|end| end <= size - crate::PAGE));
        let hangs_together = u32::from(record.lines) == lines && lines <= MAX_CHECKSUM_LINES && inside;
        hangs_together.then_some(record)
    }
}

impl ChecksumLine {
    /// The `index`-th line of the record `sequence`, for at most [`CHECKSUMS_PER_LINE`] checksums.
    #[must_use]
    pub fn new(index: u8, sequence: u64, checksums: &[u32]) -> Self {
        Self::of_kind(CHECKSUM_LINE, index, sequence, checksums)
    }

    /// The `index`-th line of the map of the quarantine `sequence`.
    #[must_use]
    pub fn map(index: u8, sequence: u64, words: &[u32]) -> Self {
        Self::of_kind(MAP_LINE, index, sequence, words)
    }

    fn of_kind(kind: u8, index: u8, sequence: u64, checksums: &[u32]) -> Self {
        let mut line = Self {
            crc: U32::ZERO,
            kind,
            index,
            count: checksums.len() as u8,
            reserved: 0,
            sequence: U64::new(sequence),
            checksums: [U32::ZERO; 12],
        };
        for (place, sum) in line.checksums.iter_mut().zip(checksums) {
            *place = U32::new(*sum);
        }
        line
    }

    /// The line to store, with its checksum.
    #[must_use]
    pub fn encode(&self, place: &RecordPlace) -> [u8; 64] {
        place.seal(zerocopy::transmute!(*self))
    }

    /// The bytes of a slot as an unverified line.
    #[must_use]
    pub fn decode(line: &[u8; 64]) -> Unverified<Self> {
        Unverified::new(zerocopy::transmute!(*line))
    }
}

impl Unverified<ChecksumLine> {
    /// The checksum line, if it is the `index`-th one of the record `sequence` at this position.
    #[must_use]
    pub fn verify(&self, place: &RecordPlace, index: u8, sequence: u64) -> Option<ChecksumLine> {
        self.verify_kind(CHECKSUM_LINE, place, index, sequence)
    }

    /// The map line, if it is the `index`-th one of the quarantine `sequence` at this position.
    #[must_use]
    pub fn verify_map(&self, place: &RecordPlace, index: u8, sequence: u64) -> Option<ChecksumLine> {
        self.verify_kind(MAP_LINE, place, index, sequence)
    }

    /// The `index`-th continuation line of a record, of either kind.
    #[must_use]
    pub fn verify_of(&self, record: &Record, place: &RecordPlace, index: u8) -> Option<ChecksumLine> {
        let sequence = record.sequence.get();
        match record.kind() {
            RecordKind::Quarantine => self.verify_map(place, index, sequence),
            _ => self.verify(place, index, sequence),
        }
    }

    fn verify_kind(&self, kind: u8, place: &RecordPlace, index: u8, sequence: u64) -> Option<ChecksumLine> {
        let line = self
            .demand(MutationPoint::ChecksumLineChecksum, |line| place.is_valid(&zerocopy::transmute!(*line)))?
            .demand(MutationPoint::ChecksumLineKind, |line| line.kind == kind)?
            .demand(MutationPoint::ChecksumLineIndex, |line| line.index == index)?
            .demand(MutationPoint::ChecksumLineCount, |line| usize::from(line.count) <= CHECKSUMS_PER_LINE)?
            .demand(MutationPoint::ChecksumLineSequence, |line| line.sequence.get() == sequence)?
            .accept();
        Some(line)
    }
}

/// The bytes of a slot in a loaded page of slots.
#[must_use]
pub fn line_at(page: &[u8], slot_in_page: usize) -> Option<&[u8; 64]> {
    <[u8; 64]>::ref_from_bytes(page.get(slot_in_page * 64..slot_in_page * 64 + 64)?).ok()
}

/// The bytes of any structure on media.
#[must_use]
pub fn bytes_of<T: IntoBytes + zerocopy::Immutable>(value: &T) -> &[u8] {
    value.as_bytes()
}

#[cfg(test)]
mod tests;
