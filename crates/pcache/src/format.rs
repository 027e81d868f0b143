//! Offsets, sizes and decoders: `docs/dm-pcache.md` in code.
//!
//! Invariants: decoded data had a valid checksum; the caller checks that its values are plausible.

use crc_fast::{CrcAlgorithm, Digest};

/// The superblock.
pub const SUPERBLOCK_AT: u64 = 4096;
/// The two copies of the cache info.
pub const INFO_AT: [u64; 2] = [8192, 12288];
/// The two copies of the key tail.
pub const KEY_TAIL_AT: [u64; 2] = [16384, 16400];
/// The two copies of the dirty tail.
pub const DIRTY_TAIL_AT: [u64; 2] = [16416, 16432];
/// The first segment.
pub const SEGMENTS_AT: u64 = 20480;
/// Bytes of a segment, its header included.
pub const SEGMENT_SIZE: u64 = 16 << 20;
/// Bytes of a segment's header: two copies of its info, and a page with two copies of its generation.
pub const SEGMENT_HEAD: u64 = 12288;
/// Offsets of the two copies of a segment's info in the segment.
pub const SEGMENT_INFO_AT: [u64; 2] = [0, 4096];
/// Offsets of the two copies of a segment's generation in the segment.
pub const GENERATION_AT: [u64; 2] = [8192, 8208];
/// Bytes of a segment behind its header.
pub const SEGMENT_DATA: u32 = (SEGMENT_SIZE - SEGMENT_HEAD) as u32;
/// The maximum number of segments of dm-pcache.
pub const SEGMENTS_MAX: u64 = 1 << 20;

/// Used bytes of a superblock.
pub const SUPERBLOCK_SIZE: usize = 24;
/// Bytes of a cache info.
pub const INFO_SIZE: usize = 24;
/// Bytes of a tail, of a segment's info, and of a generation.
pub const SMALL_SIZE: usize = 16;
/// Bytes of a key set before its keys.
pub const SET_HEAD: usize = 24;
/// Bytes of a key.
pub const KEY_SIZE: usize = 40;
/// The maximum number of keys of a set.
pub const KEYS_MAX: u32 = 128;
/// Bytes of the largest key set.
pub const SET_MAX: usize = SET_HEAD + KEY_SIZE * KEYS_MAX as usize;

/// The magic of a superblock, behind checksum and flags.
pub const SUPERBLOCK_MAGIC: u64 = 0x65B0_5EFA_96C5_96EF;
/// The magic of a key set.
pub const SET_MAGIC: u64 = 0x6768_94A6_4E16_4F1A;

/// Flag of a superblock: its numbers are big-endian.
pub const BIG_ENDIAN: u32 = 1;
/// Flag of a cache info: keys have the checksum of their data.
pub const DATA_CRC: u32 = 1;
/// Flag of a cache info: the creation of the cache was completed.
pub const CREATED: u32 = 1 << 1;
/// Flag of a segment's info: it has a successor.
pub const HAS_NEXT: u32 = 1;
/// Flag of a key set: it has no keys, only the segment in which the log continues.
pub const LAST: u64 = 1;
/// Flag of a key: the backing device has its data.
pub const CLEAN: u32 = 1 << 1;

/// The initial value of every checksum of the format.
const SEED: u64 = 0x3_B15A;
/// XORed with a result of the algorithm to cancel its final XOR, which this format does not have.
const FINAL_XOR: u32 = u32::MAX;

/// A checksum of the format, over bytes that are added in parts: CRC32C with its own initial value and without the
/// final XOR.
#[derive(Clone, Debug)]
pub struct Checksum(Digest);

impl Checksum {
    pub fn new() -> Self {
        Self(Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, SEED))
    }

    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub fn value(&self) -> u32 {
        self.0.finalize() as u32 ^ FINAL_XOR
    }
}

/// The checksum of `bytes`.
pub fn checksum(bytes: &[u8]) -> u32 {
    let mut sum = Checksum::new();
    sum.add(bytes);
    sum.value()
}

/// Whether bytes that begin with their own checksum match it.
pub fn has_valid_checksum(bytes: &[u8]) -> bool {
    bytes.split_at_checked(4).is_some_and(|(sum, rest)| sum == checksum(rest).to_le_bytes())
}

pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut field = [0; 4];
    field.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(field)
}

pub fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(field)
}

/// The header of a key set; not verified.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SetHead {
    /// Number of keys, or the segment in which the log continues.
    pub number: u32,
    magic: u64,
    flags: u64,
}

impl SetHead {
    pub fn read(bytes: &[u8; SET_HEAD]) -> Self {
        Self { number: u32_at(bytes, 4), magic: u64_at(bytes, 8), flags: u64_at(bytes, 16) }
    }

    /// Whether it is a key set, by its magic.
    pub const fn is_set(&self) -> bool {
        self.magic == SET_MAGIC
    }

    /// Whether it ends the log's part in its segment.
    pub const fn is_last(&self) -> bool {
        self.flags & LAST != 0
    }

    /// Whether its store was interrupted: its magic and flags are still zero.
    pub const fn is_interrupted(&self) -> bool {
        self.magic == 0 && self.flags == 0
    }

    /// Bytes of the whole set, if its number of keys is valid.
    pub fn size(&self) -> Option<usize> {
        if self.is_last() {
            Some(SET_HEAD)
        } else {
            let keys = Some(self.number).filter(|keys| (1..=KEYS_MAX).contains(keys))?;
            Some(SET_HEAD + KEY_SIZE * keys as usize)
        }
    }
}

/// A key from its set, whose checksum was valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Key {
    /// First byte on the device.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
    pub flags: u32,
    /// The segment that has the data, by its position in the cache.
    pub segment: u32,
    /// The offset in the segment, behind its header.
    pub data_offset: u32,
    /// The segment's generation at that time.
    pub generation: u64,
    /// The checksum of the data, if the cache has checksums.
    pub data_crc: u32,
}

impl Key {
    pub fn read(bytes: &[u8; KEY_SIZE]) -> Self {
        Self {
            offset: u64_at(bytes, 0),
            length: u32_at(bytes, 8),
            flags: u32_at(bytes, 12),
            segment: u32_at(bytes, 16),
            data_offset: u32_at(bytes, 20),
            generation: u64_at(bytes, 24),
            data_crc: u32_at(bytes, 32),
        }
    }

    pub const fn is_clean(&self) -> bool {
        self.flags & CLEAN != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_has_its_own_initial_value_and_no_final_xor() {
        // The reflected polynomial, bit by bit.
        let slow = |bytes: &[u8]| {
            bytes.iter().fold(SEED as u32, |sum, &byte| {
                (0..8).fold(sum ^ u32::from(byte), |sum, _| (sum >> 1) ^ (0x82F6_3B78 * (sum & 1)))
            })
        };
        for length in [0, 1, 7, 20, 255, 4096, 10_000] {
            let bytes: Vec<u8> = (0..length).map(|index| (index * 7 + index / 256) as u8).collect();
            assert_eq!(checksum(&bytes), slow(&bytes), "{length} bytes");
            let mut parts = Checksum::new();
            bytes.chunks(100).for_each(|part| parts.add(part));
            assert_eq!(parts.value(), slow(&bytes), "{length} bytes in parts");
        }
    }

    #[test]
    fn a_set_with_an_invalid_number_of_keys_has_no_size() {
        let head = |number, flags| SetHead { number, magic: SET_MAGIC, flags };
        assert_eq!(head(1, 0).size(), Some(64));
        assert_eq!(head(128, 0).size(), Some(SET_MAX));
        assert_eq!((head(0, 0).size(), head(129, 0).size(), head(u32::MAX, 0).size()), (None, None, None));
        assert_eq!(head(u32::MAX, LAST).size(), Some(SET_HEAD));
    }
}
