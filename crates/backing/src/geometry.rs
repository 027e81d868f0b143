//! The geometry of a backing device.
//!
//! Invariants: a property that the system does not report gets the safe value, even if it is slower: a volatile cache
//! is assumed, and discarded ranges are not assumed to read as zeroes.
//!
//! Elsewhere: whether the device is free to be used (`hold`).

use crate::sys::{self, Status};
use crate::sysfs::BlockDirectory;
use cbd_types::{AlignedBuffer, BackingGeometry, Error, ErrorKind, Result};
use rustix::fs::{ioctl_blkpbszget, ioctl_blksszget};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The sector of a file for which no larger one is required, in bytes.
pub(crate) const FILE_SECTOR: u32 = 512;
const SECTOR_MAX: u32 = 4096;
/// Alignment of buffers for direct I/O in bytes; file systems that require more are refused.
const MEMORY_ALIGNMENT: u32 = 4096;

/// The size of an open block device in bytes.
pub(crate) fn block_size(file: &File, path: &Path) -> Result<u64> {
    cbd_sys::ioctl::block_size(file.as_fd()).map_err(|error| unreadable(path, &error))
}

fn unreadable(path: &Path, error: &io::Error) -> Error {
    let text = format!("cannot read the geometry of {}", path.display());
    Error::new(ErrorKind::System, text)
        .caused_by(cbd_sys::errors::copy_of(error))
        .at_path(path.to_string_lossy())
}

/// The geometry of an open block device of `size` bytes.
pub(crate) fn of_block_device(
    file: &File,
    status: &Status,
    size: u64,
    path: &Path,
) -> Result<BackingGeometry> {
    let sector = ioctl_blksszget(file).map_err(|error| unreadable(path, &error.into()))?;
    if !(FILE_SECTOR..=SECTOR_MAX).contains(&sector) || !sector.is_power_of_two() {
        let text = format!("{} has sectors of {sector} bytes; 512 to 4096 are supported", path.display());
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let physical_sector = ioctl_blkpbszget(file).unwrap_or(sector).max(sector);
    let directory = BlockDirectory::of(status.special);
    let queue = |name: &str| directory.as_ref().and_then(|directory| directory.queue(name));
    let write_cache = directory.as_ref().and_then(|directory| directory.disk("queue/write_cache"));
    let discard_zeroes = promises_zeroes(queue);
    let granularity = u32::try_from(queue("discard_granularity").unwrap_or(0)).unwrap_or(0);
    Ok(BackingGeometry {
        size: size - size % u64::from(sector),
        sector,
        physical_sector,
        rotational: queue("rotational").unwrap_or(0) > 0,
        volatile_cache: is_volatile(write_cache.as_deref()),
        discard_zeroes,
        discard_granularity: if discards(queue) { granularity.max(sector) } else { 0 },
    })
}

/// Whether a disk has a cache that a power cut empties, by its `write_cache` attribute: assumed unless the system
/// reports "write through".
fn is_volatile(write_cache: Option<&str>) -> bool {
    write_cache != Some("write through")
}

fn discards(queue: impl Fn(&str) -> Option<u64>) -> bool {
    queue("discard_max_bytes").unwrap_or(0) > 0
}

/// Whether discarded ranges read as zeroes. A discard is executed as a punched hole, which the kernel implements by the
/// device's "write zeroes, may unmap"; so zeroes are promised if the device supports that, and discards are offered
/// only if the device supports discards.
fn promises_zeroes(queue: impl Fn(&str) -> Option<u64>) -> bool {
    discards(&queue) && queue("write_zeroes_max_bytes").unwrap_or(0) > 0
}

/// The sector that direct I/O to a regular file requires, or the reason why direct I/O is not possible.
pub(crate) fn direct_sector(file: &File, status: &Status) -> std::result::Result<u32, String> {
    let (memory, offset) = match status.direct {
        Some((0, _) | (_, 0)) => return Err(String::from("the file system has no direct I/O for this file")),
        Some((memory, offset)) => (memory, offset),
        // Before Linux 6.1, and on file systems that do not report it, the alignment is determined by trials.
        None => (MEMORY_ALIGNMENT, tried_alignment(file)?),
    };
    let sector = offset.max(FILE_SECTOR);
    if memory > MEMORY_ALIGNMENT || sector > SECTOR_MAX || !sector.is_power_of_two() {
        return Err(format!("the file system requires direct I/O aligned to {} bytes", memory.max(sector)));
    }
    Ok(sector)
}

fn tried_alignment(file: &File) -> std::result::Result<u32, String> {
    let mut buffer = AlignedBuffer::zeroed(SECTOR_MAX as usize);
    let mut length = FILE_SECTOR;
    loop {
        // One read at an odd sector, to test the alignment of the offset as well.
        match file.read_at(&mut buffer[..length as usize], u64::from(length)) {
            Ok(_) => return Ok(length),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && length < SECTOR_MAX => length *= 2,
            Err(error) => return Err(format!("a test of direct I/O failed: {error}")),
        }
    }
}

/// The geometry of an open regular file whose sector is decided.
pub(crate) fn of_file(file: &File, status: &Status, sector: u32, read_only: bool) -> BackingGeometry {
    let (_, _, block) = sys::file_system(file.as_fd()).unwrap_or((0, 0, 4096));
    let block = u32::try_from(block).unwrap_or(4096).clamp(sector, 1 << 20);
    let holes = !read_only && (is_known_to_punch(file, status) || punches_holes(file, status.size));
    let rotational = BlockDirectory::of(status.device).and_then(|directory| directory.queue("rotational"));
    BackingGeometry {
        size: status.size - status.size % u64::from(sector),
        sector,
        physical_sector: if status.block.is_power_of_two() {
            status.block.clamp(sector, SECTOR_MAX)
        } else {
            sector
        },
        rotational: rotational.unwrap_or(0) > 0,
        // The page cache and the disk's cache are volatile.
        volatile_cache: true,
        discard_zeroes: holes,
        discard_granularity: if holes { block } else { 0 },
    }
}

/// Whether the file system punches holes in each of its files, so that no test has to change a time stamp: XFS, btrfs,
/// f2fs, tmpfs, and ext where the driver of ext4 has it.
pub(crate) fn is_known_to_punch(file: &File, status: &Status) -> bool {
    const EXT: u64 = 0xEF53;
    const PUNCH: [u64; 4] = [0x5846_5342, 0x9123_683E, 0xF2F5_2010, 0x0102_1994];
    let Ok((magic, ..)) = sys::file_system(file.as_fd()) else { return false };
    let has_driver = || {
        let directory = BlockDirectory::of(status.device)?;
        Path::new("/sys/fs/ext4").join(directory.folder().file_name()?).exists().then_some(())
    };
    PUNCH.contains(&magic) || (magic == EXT && has_driver().is_some())
}

/// Whether the file system punches holes: tested far after the end of the file, where there is no data to lose.
fn punches_holes(file: &File, size: u64) -> bool {
    let at = size.next_multiple_of(1 << 20).saturating_add(1 << 30);
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    match sys::fallocate(file.as_fd(), mode, at, 1 << 20) {
        Ok(()) => true,
        Err(error) => matches!(error.raw_os_error(), Some(libc::EFBIG | libc::ENOSPC)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_without_a_reported_cache_mode_has_a_volatile_cache() {
        assert!(is_volatile(None));
        assert!(is_volatile(Some("write back")));
        assert!(is_volatile(Some("something new")));
        assert!(!is_volatile(Some("write through")));
    }

    #[test]
    fn zeroes_are_promised_only_where_the_disk_discards_and_writes_zeroes_itself() {
        let disk = |discard: Option<u64>, zeroes: Option<u64>| {
            move |name: &str| match name {
                "discard_max_bytes" => discard,
                "write_zeroes_max_bytes" => zeroes,
                _ => None,
            }
        };
        assert!(promises_zeroes(disk(Some(1 << 30), Some(1 << 20))));
        for (discard, zeroes) in [(None, None), (Some(0), Some(1 << 20)), (Some(1 << 30), Some(0))] {
            assert!(!promises_zeroes(disk(discard, zeroes)), "discard {discard:?}, zeroes {zeroes:?}");
        }
        assert!(!promises_zeroes(disk(Some(1 << 30), None)), "only discards");
        assert!(!promises_zeroes(disk(None, Some(1 << 20))), "only write zeroes");
    }
}
