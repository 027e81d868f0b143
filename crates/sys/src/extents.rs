//! Where a file, and the metadata of a file system, are on the device: the requests FIEMAP and GETFSMAP.
//!
//! Invariants: a list that the kernel does not end is an error, so the memory for it is bounded; what the kernel says of an extent
//! is handed on unchanged.
//!
//! Elsewhere: which extents can be pinned, and messages for users.

use crate::DeviceNumber;
use crate::ioctl::{Request, call};
use std::io;
use std::os::fd::BorrowedFd;

/// `_IOWR('f', 11, struct fiemap)`: reads and fills as many extents as the argument has room for.
const FS_IOC_FIEMAP: Request<[u64]> = Request::new(0xC020_660B);
/// `_IOWR('X', 59, struct fsmap_head)`: as above.
const FS_IOC_GETFSMAP: Request<[u64]> = Request::new(0xC0C0_583B);

/// `_IOR('X', 31, struct fsxattr)`: fills 28 bytes, flags first.
const FS_IOC_FSGETXATTR: Request<[u32; 7]> = Request::new(0x801C_581F);

/// Entries of one request.
const BATCH: usize = 512;
/// The most entries of a list.
const ENTRIES_MAX: usize = 1 << 22;

/// An extent of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileExtent {
    /// First byte in the file.
    pub logical: u64,
    /// First byte on the device of the file system.
    pub physical: u64,
    /// Bytes.
    pub length: u64,
    /// `FIEMAP_EXTENT_*`.
    pub flags: u32,
}

impl FileExtent {
    /// `FIEMAP_EXTENT_UNKNOWN`: the place is not known.
    pub const UNKNOWN: u32 = 1 << 1;
    /// `FIEMAP_EXTENT_DELALLOC`: it has no place yet.
    pub const NOT_ALLOCATED: u32 = 1 << 2;
    /// `FIEMAP_EXTENT_ENCODED`: the data is compressed or encrypted.
    pub const ENCODED: u32 = 1 << 3;
    /// `FIEMAP_EXTENT_DATA_ENCRYPTED`: the data is encrypted by the file system.
    pub const ENCRYPTED: u32 = 1 << 7;
    /// `FIEMAP_EXTENT_NOT_ALIGNED`: its place is not that of whole blocks.
    pub const NOT_ALIGNED: u32 = 1 << 8;
    /// `FIEMAP_EXTENT_DATA_INLINE`: the data is among metadata.
    pub const INLINE: u32 = 1 << 9;
    /// `FIEMAP_EXTENT_DATA_TAIL`: the data is in a block with that of other files.
    pub const TAIL: u32 = 1 << 10;
    /// `FIEMAP_EXTENT_UNWRITTEN`: it has a place, and reads as zeroes.
    pub const UNWRITTEN: u32 = 1 << 11;

    const LAST: u32 = 1;
}

/// The extents of a file in order, once its data is written to the file system's blocks (`FIEMAP_FLAG_SYNC`).
///
/// # Errors
/// The system error: [`io::ErrorKind::Unsupported`] on a file system that does not know the request;
/// [`io::ErrorKind::InvalidData`] for a list without an end.
pub fn of_file(file: BorrowedFd<'_>) -> io::Result<Vec<FileExtent>> {
    // struct fiemap: start, length, flags and mapped_extents, extent_count and reserved; then extents of 7 words: logical,
    // physical, length, two reserved ones, flags and a reserved half, a reserved one.
    const HEADER: usize = 4;
    const WORDS: usize = 7;
    const SYNC: u64 = 1;
    let mut extents: Vec<FileExtent> = Vec::new();
    let mut start = 0;
    loop {
        let mut words = vec![0_u64; HEADER + BATCH * WORDS];
        (words[0], words[1]) = (start, u64::MAX - start);
        words[2] = joined(SYNC as u32, 0);
        words[3] = joined(BATCH as u32, 0);
        call(file, &FS_IOC_FIEMAP, words.as_mut_slice())?;
        let count = (halves(words[2])[1] as usize).min(BATCH);
        let mut is_last = count == 0;
        for entry in words[HEADER..].chunks_exact(WORDS).take(count) {
            let [flags, _] = halves(entry[5]);
            let extent = FileExtent { logical: entry[0], physical: entry[1], length: entry[2], flags };
            is_last |= flags & FileExtent::LAST != 0;
            start = extent.logical.saturating_add(extent.length);
            extents.push(extent);
        }
        if is_last {
            return Ok(extents);
        }
        if extents.len() > ENTRIES_MAX {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
    }
}

/// Whether the extents of a file are on the real-time device of an XFS, and not on the device that is mounted.
#[must_use]
pub fn is_of_realtime_device(file: BorrowedFd<'_>) -> bool {
    const REALTIME: u32 = 1;
    let mut attributes = [0; 7];
    call(file, &FS_IOC_FSGETXATTR, &mut attributes).is_ok() && attributes[0] & REALTIME != 0
}

/// A range of a file system's device, and what owns it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OwnedRange {
    /// The device: a file system can have several.
    pub device: DeviceNumber,
    /// First byte on the device.
    pub physical: u64,
    /// Bytes.
    pub length: u64,
    /// The owner: an inode, or what `flags` say.
    pub owner: u64,
    /// `FMR_OF_*`.
    pub flags: u32,
}

impl OwnedRange {
    /// Whether it holds metadata that is read while the file system is used. Free space, data of files, space that is kept for
    /// larger tables, and the log, which is only written, do not count.
    #[must_use]
    pub const fn is_metadata(&self) -> bool {
        // FMR_OF_EXTENT_MAP: blocks of the map of a file's extents; FMR_OF_SPECIAL_OWNER. 0x8, FMR_OF_SHARED, is data of several files.
        const EXTENT_MAP: u32 = 0x4;
        const SPECIAL_OWNER: u32 = 0x10;
        // FMR_OWNER(type, code).
        const FREE: u64 = 1;
        const UNKNOWN: u64 = 2;
        const LOG: u64 = ('X' as u64) << 32 | 2;
        const COPIES_IN_PROGRESS: u64 = ('X' as u64) << 32 | 7;
        const DEFECTIVE: u64 = ('X' as u64) << 32 | 8;
        const RESERVED_DESCRIPTORS: u64 = ('f' as u64) << 32 | 2;
        if self.flags & EXTENT_MAP != 0 {
            return true;
        }
        self.flags & SPECIAL_OWNER != 0
            && !matches!(
                self.owner,
                FREE | UNKNOWN | LOG | COPIES_IN_PROGRESS | DEFECTIVE | RESERVED_DESCRIPTORS
            )
    }
}

/// The ranges of the devices of the file system that `file` is on, with their owners.
///
/// # Errors
/// The system error: [`io::ErrorKind::Unsupported`] or `ENOTTY` on a file system that does not know the request (ext4 and XFS do);
/// [`io::ErrorKind::InvalidData`] for a list without an end.
pub fn of_file_system(file: BorrowedFd<'_>) -> io::Result<Vec<OwnedRange>> {
    // struct fsmap_head: iflags and oflags, count and entries, six reserved words, two keys; a key and an entry have 8 words:
    // device and flags, physical, owner, offset, length, three reserved ones.
    const KEYS: usize = 8;
    const WORDS: usize = 8;
    const HEADER: usize = KEYS + 2 * WORDS;
    const LAST: u32 = 0x20;
    let mut ranges = Vec::new();
    let mut low = [0_u64; WORDS];
    loop {
        let mut words = vec![0_u64; HEADER + BATCH * WORDS];
        words[1] = joined(BATCH as u32, 0);
        words[KEYS..KEYS + WORDS].copy_from_slice(&low);
        words[KEYS + WORDS..HEADER].copy_from_slice(&[u64::MAX, u64::MAX, u64::MAX, u64::MAX, 0, 0, 0, 0]);
        call(file, &FS_IOC_GETFSMAP, words.as_mut_slice())?;
        let count = (halves(words[1])[1] as usize).min(BATCH);
        let mut is_last = count < BATCH;
        for entry in words[HEADER..].chunks_exact(WORDS).take(count) {
            let [device, flags] = halves(entry[0]);
            is_last |= flags & LAST != 0;
            ranges.push(OwnedRange {
                device: DeviceNumber::decode(device.into()),
                physical: entry[1],
                length: entry[4],
                owner: entry[2],
                flags,
            });
            // The next request goes on behind this entry, as its length in the lower key says.
            low.copy_from_slice(entry);
        }
        if is_last {
            return Ok(ranges);
        }
        if ranges.len() > ENTRIES_MAX {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
    }
}

/// Two halves of a word, in the order in which a structure has them.
fn joined(first: u32, second: u32) -> u64 {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&first.to_ne_bytes());
    bytes[4..].copy_from_slice(&second.to_ne_bytes());
    u64::from_ne_bytes(bytes)
}

/// The inverse of [`joined`].
fn halves(word: u64) -> [u32; 2] {
    let bytes = word.to_ne_bytes();
    let half = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    [half(0), half(4)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;

    #[test]
    fn what_two_halves_make_has_both() {
        assert_eq!(halves(joined(7, 9)), [7, 9]);
    }

    #[test]
    fn free_space_data_also_shared_data_and_the_log_are_no_metadata() {
        let range = |owner, flags| OwnedRange {
            device: DeviceNumber { major: 7, minor: 0 },
            physical: 0,
            length: 4096,
            owner,
            flags,
        };
        let special = |kind: char, code: u64| (kind as u64) << 32 | code;
        for (owner, flags, expected) in [
            (1, 0x10, false),
            (2, 0x10, false),
            (3, 0x10, true),
            (1234, 0, false),
            (1234, 0x4, true),
            (1234, 0x6, true),
            (1234, 0x2, false),
            (1234, 0x8, false),
            (special('X', 2), 0x10, false),
            (special('X', 1), 0x10, true),
            (special('X', 5), 0x10, true),
            (special('f', 1), 0x10, true),
            (special('f', 2), 0x10, false),
            (special('f', 3), 0x10, true),
        ] {
            assert_eq!(range(owner, flags).is_metadata(), expected, "{owner:#x} {flags:#x}");
        }
    }

    #[test]
    fn the_extents_of_a_file_are_those_of_its_bytes_or_an_error() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 10_000]).unwrap();
        // Not every file system knows the request.
        if let Ok(extents) = of_file(file.as_fd()) {
            assert!(extents.iter().map(|extent| extent.length).sum::<u64>() >= 10_000, "{extents:?}");
        }
        let _ = of_file_system(file.as_fd());
        assert!(!is_of_realtime_device(file.as_fd()));
        let (reader, _writer) = std::io::pipe().unwrap();
        assert!(of_file(reader.as_fd()).is_err() && of_file_system(reader.as_fd()).is_err());
    }
}
