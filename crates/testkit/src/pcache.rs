//! A writer of images in the layout of dm-pcache, for tests and the fuzzer. It writes any content, valid or not.
//!
//! Its constants come from `docs/dm-pcache.md`, not from the reader (`cbd-pcache`), so that a wrong constant of the reader fails
//! the tests.
//!
//! Invariants: pages that were never written take no memory, so an image can have any size.
//!
//! Elsewhere: the plausibility of the image.

use cbd_pcache::{Image, Unreadable};
use crc_fast::{CrcAlgorithm, Digest};
use std::collections::{BTreeMap, BTreeSet};

const PAGE: u64 = 4096;

/// The layout, from `docs/dm-pcache.md`.
mod format {
    /// The superblock.
    pub(super) const SUPERBLOCK_AT: u64 = 4096;
    /// The two copies of the cache info.
    pub(super) const INFO_AT: [u64; 2] = [8192, 12288];
    /// The two copies of the key tail.
    pub(super) const KEY_TAIL_AT: [u64; 2] = [16384, 16400];
    /// The two copies of the dirty tail.
    pub(super) const DIRTY_TAIL_AT: [u64; 2] = [16416, 16432];
    /// The first segment.
    pub(super) const SEGMENTS_AT: u64 = 20480;
    /// Bytes of a segment, its header included.
    pub(super) const SEGMENT_SIZE: u64 = 16 << 20;
    /// Bytes of a segment's header: two copies of its info, and a page with two copies of its generation.
    pub(super) const SEGMENT_HEAD: u64 = 12288;
    /// Offsets of the two copies of a segment's info in the segment.
    pub(super) const SEGMENT_INFO_AT: [u64; 2] = [0, 4096];
    /// Offsets of the two copies of a segment's generation in the segment.
    pub(super) const GENERATION_AT: [u64; 2] = [8192, 8208];
    /// Used bytes of a superblock.
    pub(super) const SUPERBLOCK_SIZE: usize = 24;
    /// Bytes of a tail, of a segment's info, and of a generation.
    pub(super) const SMALL_SIZE: usize = 16;
    /// Bytes of a key set before its keys.
    pub(super) const SET_HEAD: usize = 24;
    /// The magic number of a superblock, after the checksum and the flags.
    pub(super) const SUPERBLOCK_MAGIC: u64 = 0x65B0_5EFA_96C5_96EF;
    /// The magic number of a key set.
    pub(super) const SET_MAGIC: u64 = 0x6768_94A6_4E16_4F1A;
    /// Flag of a cache info: the creation of the cache was completed.
    pub(super) const MADE: u32 = 1 << 1;
    /// Flag of a key set: it has no keys, only the segment in which the log continues.
    pub(super) const LAST: u64 = 1;
}

/// A checksum of the format: CRC32C with its own initial value and without the final XOR.
fn checksum(bytes: &[u8]) -> u32 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, 0x3_B15A);
    digest.update(bytes);
    digest.finalize() as u32 ^ u32::MAX
}

/// An image in memory, most of it zeroes.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    size: u64,
    pages: BTreeMap<u64, Box<[u8; PAGE as usize]>>,
    poisoned: BTreeSet<u64>,
    /// The position of the next key set: the segment, and the offset after its header.
    head: (u32, u32),
}

/// The content of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SampleKey {
    /// First byte on the device.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
    /// 2 for clean.
    pub flags: u32,
    /// The segment with the data.
    pub segment: u32,
    /// The offset in the segment, counted from the end of its header.
    pub data_offset: u32,
    /// Generation of the segment.
    pub generation: u64,
    /// Checksum of the data.
    pub data_crc: u32,
}

impl Sample {
    /// An empty cache of `segments` segments.
    #[must_use]
    pub fn new(segments: u32, data_crc: bool) -> Self {
        let size = format::SEGMENTS_AT + u64::from(segments) * format::SEGMENT_SIZE;
        let mut sample = Self { size, ..Self::default() };
        let mut superblock = [0; format::SUPERBLOCK_SIZE];
        superblock[8..16].copy_from_slice(&format::SUPERBLOCK_MAGIC.to_le_bytes());
        superblock[16..20].copy_from_slice(&segments.to_le_bytes());
        sample.seal(format::SUPERBLOCK_AT, &superblock);
        let flags = format::MADE | u32::from(data_crc) | 70 << 6;
        let info: Vec<u8> = [0, 0, 0, segments, flags, 0].map(u32::to_le_bytes).concat();
        sample.copy(format::INFO_AT, 1, &info);
        for number in 0..segments {
            let at = Self::segment_at(number);
            let more = number + 1 < segments;
            sample.copy(format::SEGMENT_INFO_AT.map(|place| at + place), 1, &small(2, 0));
            if more {
                sample.copy(format::SEGMENT_INFO_AT.map(|place| at + place), 2, &small(3, number + 1));
            }
            sample.set_generation(number, 1, 0);
        }
        sample.set_dirty_tail(1, 0, 0);
        sample.set_key_tail(1, 0, 0);
        sample
    }

    /// The offset of a segment. The chain has ascending order.
    #[must_use]
    pub const fn segment_at(number: u32) -> u64 {
        format::SEGMENTS_AT + number as u64 * format::SEGMENT_SIZE
    }

    /// The offset of a segment's data, after its header.
    #[must_use]
    pub const fn data_at(number: u32) -> u64 {
        Self::segment_at(number) + format::SEGMENT_HEAD
    }

    /// Stores bytes; bytes past the end of the image are dropped.
    pub fn store(&mut self, at: u64, bytes: &[u8]) {
        for (index, &byte) in bytes.iter().enumerate() {
            let at = at + index as u64;
            if at < self.size {
                self.pages.entry(at / PAGE).or_insert_with(|| Box::new([0; PAGE as usize]))
                    [(at % PAGE) as usize] = byte;
            }
        }
    }

    /// Flips bits of a byte.
    pub fn flip(&mut self, at: u64, bits: u8) {
        let mut byte = [0];
        if self.read(at, &mut byte).is_ok() {
            self.store(at, &[byte[0] ^ bits]);
        }
    }

    /// Makes the page of a byte unreadable.
    pub fn poison(&mut self, at: u64) {
        self.poisoned.insert(at / PAGE);
    }

    /// Truncates the image.
    pub fn truncate(&mut self, size: u64) {
        self.size = self.size.min(size);
    }

    /// Stores bytes whose first four become the checksum of the rest.
    pub fn seal(&mut self, at: u64, bytes: &[u8]) {
        let mut bytes = bytes.to_vec();
        let sum = checksum(bytes.get(4..).unwrap_or_default());
        if let Some(field) = bytes.get_mut(..4) {
            field.copy_from_slice(&sum.to_le_bytes());
        }
        self.store(at, &bytes);
    }

    /// Corrects the checksum of `length` bytes.
    pub fn reseal(&mut self, at: u64, length: usize) {
        let mut bytes = vec![0; length];
        if self.read(at, &mut bytes).is_ok() {
            self.seal(at, &bytes);
        }
    }

    /// Stores an object with two copies and a sequence number. Odd numbers go to the second copy, as in dm-pcache.
    fn copy(&mut self, at: [u64; 2], sequence: u8, bytes: &[u8]) {
        let mut bytes = bytes.to_vec();
        bytes[4] = sequence;
        self.seal(at[usize::from(sequence % 2)], &bytes);
    }

    /// Sets the generation of a segment.
    pub fn set_generation(&mut self, number: u32, sequence: u8, generation: u64) {
        let mut bytes = small(0, 0);
        bytes[8..].copy_from_slice(&generation.to_le_bytes());
        self.copy(format::GENERATION_AT.map(|place| Self::segment_at(number) + place), sequence, &bytes);
    }

    /// Sets the dirty tail.
    pub fn set_dirty_tail(&mut self, sequence: u8, segment: u32, offset: u32) {
        self.copy(format::DIRTY_TAIL_AT, sequence, &small(segment, offset));
    }

    /// Sets the key tail.
    pub fn set_key_tail(&mut self, sequence: u8, segment: u32, offset: u32) {
        self.copy(format::KEY_TAIL_AT, sequence, &small(segment, offset));
    }

    /// The position of the next key set.
    #[must_use]
    pub const fn head(&self) -> (u32, u32) {
        self.head
    }

    /// Sets the position of the next key set.
    pub fn set_head(&mut self, segment: u32, offset: u32) {
        self.head = (segment, offset);
    }

    fn head_at(&self) -> u64 {
        Self::data_at(self.head.0) + u64::from(self.head.1)
    }

    /// Appends a key set, and zeroes after it; returns its offset.
    pub fn append(&mut self, keys: &[SampleKey]) -> u64 {
        let at = self.head_at();
        let mut bytes = vec![0; 4];
        bytes.extend((keys.len() as u32).to_le_bytes());
        bytes.extend(format::SET_MAGIC.to_le_bytes());
        bytes.extend(0_u64.to_le_bytes());
        for key in keys {
            bytes.extend(key.offset.to_le_bytes());
            for number in [key.length, key.flags, key.segment, key.data_offset] {
                bytes.extend(number.to_le_bytes());
            }
            bytes.extend(key.generation.to_le_bytes());
            bytes.extend(u64::from(key.data_crc).to_le_bytes());
        }
        self.store(at + bytes.len() as u64, &[0; format::SET_HEAD]);
        self.seal(at, &bytes);
        self.head.1 += bytes.len() as u32;
        at
    }

    /// Ends the log's part in its segment; the log continues in another one. Returns the offset of the end.
    pub fn append_last(&mut self, next: u32) -> u64 {
        let at = self.head_at();
        self.store(Self::data_at(next), &[0; format::SET_HEAD]);
        // The checksum, which is computed last, is the lower half of the first word.
        let words = [u64::from(next) << 32, format::SET_MAGIC, format::LAST].map(u64::to_le_bytes).concat();
        self.seal(at, &words);
        self.head = (next, 0);
        at
    }

    /// Stores data in a segment and returns the key for it.
    pub fn data(&mut self, offset: u64, segment: u32, data_offset: u32, bytes: &[u8]) -> SampleKey {
        self.store(Self::data_at(segment) + u64::from(data_offset), bytes);
        SampleKey {
            offset,
            length: bytes.len() as u32,
            segment,
            data_offset,
            data_crc: checksum(bytes),
            ..SampleKey::default()
        }
    }

    /// All written pages, with their offsets.
    pub fn pages(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.pages.iter().map(|(page, bytes)| (page * PAGE, &bytes[..]))
    }
}

/// Two numbers after a header.
fn small(first: u32, second: u32) -> [u8; format::SMALL_SIZE] {
    let mut bytes = [0; format::SMALL_SIZE];
    bytes[8..12].copy_from_slice(&first.to_le_bytes());
    bytes[12..].copy_from_slice(&second.to_le_bytes());
    bytes
}

impl Image for Sample {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let failed = Unreadable { at, length: into.len() as u64 };
        let end = at.checked_add(into.len() as u64).filter(|&end| end <= self.size).ok_or(failed)?;
        if self.poisoned.range(at / PAGE..end.div_ceil(PAGE)).next().is_some() {
            return Err(failed);
        }
        let mut done = 0;
        while done < into.len() {
            let from = at + done as u64;
            let inner = (from % PAGE) as usize;
            let length = (PAGE as usize - inner).min(into.len() - done);
            match self.pages.get(&(from / PAGE)) {
                Some(page) => into[done..done + length].copy_from_slice(&page[inner..inner + length]),
                None => into[done..done + length].fill(0),
            }
            done += length;
        }
        Ok(())
    }
}
