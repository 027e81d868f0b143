//! Status of files, and the calls of rustix that several modules use.
//!
//! Invariants: a failed call is an [`io::Error`] with the system's errno.

use cbd_sys::loop_device::{self, LoopInfo};
use cbd_sys::{DeviceNumber, Lock, set_lock};
use cbd_types::ByteRange;
use rustix::fs::{
    AtFlags, FallocateFlags, OFlags, StatxFlags, fcntl_getfl, fcntl_setfl, fstatfs, fstatvfs, statx,
};
use rustix::process::{Resource, getrlimit};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

const STATX_SUBVOL: StatxFlags = StatxFlags::from_bits_retain(0x8000);

/// The result of `statx`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Status {
    pub mode: u32,
    pub device: DeviceNumber,
    pub special: DeviceNumber,
    pub inode: u64,
    pub links: u32,
    pub size: u64,
    pub block: u32,
    /// Birth time in seconds and nanoseconds.
    pub born: Option<(i64, u32)>,
    /// Alignment of memory and of offsets for direct I/O; zeroes if direct I/O is not supported.
    pub direct: Option<(u32, u32)>,
    pub subvolume: Option<u64>,
}

impl Status {
    fn is(&self, kind: u32) -> bool {
        self.mode & libc::S_IFMT == kind
    }

    pub fn is_regular(&self) -> bool {
        self.is(libc::S_IFREG)
    }

    pub fn is_block(&self) -> bool {
        self.is(libc::S_IFBLK)
    }

    pub fn type_name(&self) -> &'static str {
        match self.mode & libc::S_IFMT {
            libc::S_IFDIR => "a directory",
            libc::S_IFIFO => "a FIFO",
            libc::S_IFCHR => "a character device",
            libc::S_IFSOCK => "a socket",
            libc::S_IFREG => "a regular file",
            libc::S_IFBLK => "a block device",
            _ => "of an unknown type",
        }
    }

    /// Whether both are the same object within this boot of the machine.
    pub fn same_object(&self, other: &Self) -> bool {
        self.mode & libc::S_IFMT == other.mode & libc::S_IFMT
            && self.device == other.device
            && self.inode == other.inode
            && self.special == other.special
    }
}

pub(crate) fn status(file: BorrowedFd<'_>) -> io::Result<Status> {
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::DIOALIGN | STATX_SUBVOL;
    let raw = statx(file, c"", AtFlags::EMPTY_PATH, mask)?;
    let has = |flag: StatxFlags| raw.stx_mask & flag.bits() != 0;
    Ok(Status {
        mode: u32::from(raw.stx_mode),
        device: DeviceNumber { major: raw.stx_dev_major, minor: raw.stx_dev_minor },
        special: DeviceNumber { major: raw.stx_rdev_major, minor: raw.stx_rdev_minor },
        inode: raw.stx_ino,
        links: raw.stx_nlink,
        size: raw.stx_size,
        block: raw.stx_blksize,
        born: has(StatxFlags::BTIME).then_some((raw.stx_btime.tv_sec, raw.stx_btime.tv_nsec)),
        direct: has(StatxFlags::DIOALIGN).then_some((raw.stx_dio_mem_align, raw.stx_dio_offset_align)),
        subvolume: has(STATX_SUBVOL).then_some(raw.stx_subvol),
    })
}

/// The status of the file at `path`; does not open it.
pub(crate) fn status_of(path: &Path) -> io::Result<Status> {
    status(name_only(path)?.as_fd())
}

/// Opens the file at `path` with `O_PATH`, which only names the object: it does not spin up a device or block on a
/// FIFO.
pub(crate) fn name_only(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path)
}

/// The size of an open file that the kernel has cached: no server is queried.
pub(crate) fn remembered_size(file: BorrowedFd<'_>) -> io::Result<u64> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    Ok(statx(file, c"", flags, StatxFlags::SIZE)?.stx_size)
}

/// File system magic, `f_fsid`, and block size.
pub(crate) fn file_system(file: BorrowedFd<'_>) -> io::Result<(u64, u64, u64)> {
    let raw = fstatfs(file)?;
    Ok((raw.f_type as u64, fstatvfs(file)?.f_fsid, raw.f_bsize as u64))
}

/// The backing file of a loop device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LoopFile {
    /// The device of the file system that has the file, or the device node.
    pub device: DeviceNumber,
    pub inode: u64,
    /// The number of a block device; for a file 0:0 or, from some kernels, `device` again.
    pub special: DeviceNumber,
}

impl LoopFile {
    /// Whether it is a block device.
    pub fn is_block(&self) -> bool {
        self.special != self.device && self.special != DeviceNumber { major: 0, minor: 0 }
    }
}

/// The backing file of a loop device. The kernel queries the file for it, which may take long.
pub(crate) fn loop_file(file: BorrowedFd<'_>) -> io::Result<LoopFile> {
    let info: LoopInfo = loop_device::status(file)?;
    Ok(LoopFile { device: info.device(), inode: info.inode, special: info.special() })
}

/// Locks these bytes of a file for this open description; does not wait. An end of `u64::MAX` means the largest
/// possible file.
pub(crate) fn lock_range(file: BorrowedFd<'_>, exclusive: bool, bytes: ByteRange) -> io::Result<()> {
    set_lock(file, if exclusive { Lock::Exclusive } else { Lock::Shared }, bytes.start..bytes.end)
}

/// Unlocks these bytes of a lock of [`lock_range`].
pub(crate) fn unlock_range(file: BorrowedFd<'_>, bytes: ByteRange) -> io::Result<()> {
    set_lock(file, Lock::None, bytes.start..bytes.end)
}

/// Releases the lock of [`lock_range`], even if other processes have a descriptor of this open description.
pub(crate) fn unlock_whole(file: BorrowedFd<'_>) -> io::Result<()> {
    set_lock(file, Lock::None, 0..u64::MAX)
}

/// Clears `O_DIRECT` of an open description.
pub(crate) fn clear_direct(file: BorrowedFd<'_>) -> io::Result<()> {
    Ok(fcntl_setfl(file, fcntl_getfl(file)?.difference(OFlags::DIRECT))?)
}

/// `fallocate`; the ranges that are used here are below 2^63.
pub(crate) fn fallocate(file: BorrowedFd<'_>, mode: i32, at: u64, length: u64) -> io::Result<()> {
    if at.max(length) > i64::MAX as u64 {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    Ok(rustix::fs::fallocate(file, FallocateFlags::from_bits_retain(mode as u32), at, length)?)
}

/// The largest file offset that this process may write; `u64::MAX` where there is no limit.
pub(crate) fn file_size_limit() -> u64 {
    getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX)
}
