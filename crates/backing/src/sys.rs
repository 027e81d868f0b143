//! The system calls that the standard library has no safe form of.
//!
//! Always true here: every function is safe to call with any arguments; descriptors are borrowed, structures
//! that the kernel fills are plain numbers, and a failed call is an [`io::Error`].
//!
//! Left to others: what a result means, and words for people.
#![allow(unsafe_code)]

use crate::mapper::Line;
use cbd_types::ByteRange;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

// The numbers of <linux/fs.h> and <linux/loop.h> as the architectures with the generic ioctl layout have them.
const BLKROGET: libc::Ioctl = 0x125E;
const BLKSSZGET: libc::Ioctl = 0x1268;
const BLKPBSZGET: libc::Ioctl = 0x127B;
const BLKGETSIZE64: libc::Ioctl = 0x8008_1272;
const FS_IOC_GETFSUUID: libc::Ioctl = 0x8011_1500;
const LOOP_GET_STATUS64: libc::Ioctl = 0x4C05;
const STATX_DIOALIGN: u32 = 0x2000;
const STATX_SUBVOL: u32 = 0x8000;

/// Device numbers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct DeviceNumber {
    pub major: u32,
    pub minor: u32,
}

impl std::fmt::Display for DeviceNumber {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}:{}", self.major, self.minor)
    }
}

/// What `statx` knows.
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
    /// Alignment of memory and of offsets for direct I/O; zeroes where there is none.
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

    /// Whether both are the same object of this running system.
    pub fn same_object(&self, other: &Self) -> bool {
        self.mode & libc::S_IFMT == other.mode & libc::S_IFMT
            && self.device == other.device
            && self.inode == other.inode
            && self.special == other.special
    }
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

pub(crate) fn status(file: BorrowedFd<'_>) -> io::Result<Status> {
    // SAFETY: `statx` is a structure of integers, for which all zeroes is a value.
    let mut raw: libc::statx = unsafe { std::mem::zeroed() };
    let mask = libc::STATX_BASIC_STATS | libc::STATX_BTIME | STATX_DIOALIGN | STATX_SUBVOL;
    // SAFETY: the path is an empty C string, which with AT_EMPTY_PATH means the open descriptor; `raw` is
    // writable and of the size that the kernel fills.
    checked(unsafe { libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, mask, &raw mut raw) })?;
    let has = |bit: u32| raw.stx_mask & bit != 0;
    Ok(Status {
        mode: u32::from(raw.stx_mode),
        device: DeviceNumber { major: raw.stx_dev_major, minor: raw.stx_dev_minor },
        special: DeviceNumber { major: raw.stx_rdev_major, minor: raw.stx_rdev_minor },
        inode: raw.stx_ino,
        links: raw.stx_nlink,
        size: raw.stx_size,
        block: raw.stx_blksize,
        born: has(libc::STATX_BTIME).then_some((raw.stx_btime.tv_sec, raw.stx_btime.tv_nsec)),
        direct: has(STATX_DIOALIGN).then_some((raw.stx_dio_mem_align, raw.stx_dio_offset_align)),
        subvolume: has(STATX_SUBVOL).then_some(raw.stx_subvol),
    })
}

/// The size of an open file as the kernel remembers it: no server is asked.
pub(crate) fn remembered_size(file: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: `statx` is a structure of integers, for which all zeroes is a value.
    let mut raw: libc::statx = unsafe { std::mem::zeroed() };
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    // SAFETY: the path is an empty C string, which with AT_EMPTY_PATH means the open descriptor; `raw` is
    // writable and of the size that the kernel fills.
    checked(unsafe { libc::statx(file.as_raw_fd(), c"".as_ptr(), flags, libc::STATX_SIZE, &raw mut raw) })?;
    Ok(raw.stx_size)
}

/// File system magic, its own number for the file system, and its block size.
pub(crate) fn file_system(file: BorrowedFd<'_>) -> io::Result<(u64, u64, u64)> {
    // SAFETY: `statfs64` is a structure of integers, for which all zeroes is a value.
    let mut raw: libc::statfs64 = unsafe { std::mem::zeroed() };
    // SAFETY: `raw` is writable and of the type that the call fills.
    checked(unsafe { libc::fstatfs64(file.as_raw_fd(), &raw mut raw) })?;
    // SAFETY: `fsid_t` is two 32-bit integers without padding.
    let number: [u32; 2] = unsafe { std::mem::transmute(raw.f_fsid) };
    let number = u64::from(number[0]) | u64::from(number[1]) << 32;
    Ok((raw.f_type as u64, number, raw.f_bsize as u64))
}

/// The UUID of the file system that holds `file`, where the system tells it (Linux 6.9).
pub(crate) fn file_system_uuid(file: BorrowedFd<'_>) -> Option<[u8; 16]> {
    #[repr(C)]
    struct Answer {
        length: u8,
        uuid: [u8; 16],
    }
    let mut answer = Answer { length: 0, uuid: [0; 16] };
    // SAFETY: FS_IOC_GETFSUUID fills 17 bytes, which is what `answer` has.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_GETFSUUID, &raw mut answer) };
    (result == 0 && answer.length == 16 && answer.uuid != [0; 16]).then_some(answer.uuid)
}

/// The size of a block device in bytes.
pub(crate) fn block_size(file: BorrowedFd<'_>) -> io::Result<u64> {
    let mut size = 0_u64;
    // SAFETY: BLKGETSIZE64 fills one u64.
    checked(unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64, &raw mut size) })?;
    Ok(size)
}

fn block_number(file: BorrowedFd<'_>, what: libc::Ioctl) -> io::Result<u32> {
    let mut number: libc::c_int = 0;
    // SAFETY: the three requests that are passed here fill one int.
    checked(unsafe { libc::ioctl(file.as_raw_fd(), what, &raw mut number) })?;
    u32::try_from(number).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// The logical sector of a block device in bytes.
pub(crate) fn block_sector(file: BorrowedFd<'_>) -> io::Result<u32> {
    block_number(file, BLKSSZGET)
}

/// The physical sector of a block device in bytes.
pub(crate) fn block_physical_sector(file: BorrowedFd<'_>) -> io::Result<u32> {
    block_number(file, BLKPBSZGET)
}

/// Whether a block device is set read-only.
pub(crate) fn block_read_only(file: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(block_number(file, BLKROGET)? != 0)
}

/// What a loop device stands on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LoopFile {
    /// Of the file system that has the file, or the device's node.
    pub device: DeviceNumber,
    pub inode: u64,
    /// Of a block device its number; of a file, 0:0 or, from some kernels, `device` again.
    pub special: DeviceNumber,
}

impl LoopFile {
    /// Whether it is a block device.
    pub fn is_block(&self) -> bool {
        self.special != self.device && self.special != DeviceNumber { major: 0, minor: 0 }
    }
}

/// What a loop device stands on. The kernel asks the file for it, which may take long.
pub(crate) fn loop_file(file: BorrowedFd<'_>) -> io::Result<LoopFile> {
    // struct loop_info64 is 232 bytes and begins with lo_device, lo_inode and lo_rdevice.
    let mut raw = [0_u64; 29];
    // SAFETY: LOOP_GET_STATUS64 fills a struct loop_info64, which is as large as `raw` and no stricter aligned.
    checked(unsafe { libc::ioctl(file.as_raw_fd(), LOOP_GET_STATUS64, raw.as_mut_ptr()) })?;
    // The kernel's huge_encode_dev.
    let number = |device: u64| DeviceNumber {
        major: ((device >> 8) & 0xfff) as u32,
        minor: ((device & 0xff) | ((device >> 12) & 0xf_ff00)) as u32,
    };
    Ok(LoopFile { device: number(raw[0]), inode: raw[1], special: number(raw[2]) })
}

/// The table of a device of device mapper, asked of its control device; without parameters only ranges and types.
pub(crate) fn mapper_table(
    control: BorrowedFd<'_>,
    device: DeviceNumber,
    with_parameters: bool,
) -> io::Result<Vec<Line>> {
    // struct dm_ioctl of <linux/dm-ioctl.h>: version, data_size, data_start, target_count, open_count, flags, event_nr, padding,
    // dev, name, uuid, data.
    const HEADER: usize = 312;
    const DM_TABLE_STATUS: libc::Ioctl = 0xC138_FD0C_u32 as libc::Ioctl;
    const STATUS_TABLE: u32 = 1 << 4;
    const BUFFER_FULL: u32 = 1 << 8;
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let mut words = 8192;
    loop {
        // Of u64, so that it is aligned as the structure.
        let mut buffer = vec![0_u64; words];
        let flags = if with_parameters { STATUS_TABLE } else { 0 };
        let (major, minor) = (u64::from(device.major), u64::from(device.minor));
        // The kernel's huge_encode_dev.
        let number = (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12);
        let header = [4_u32, 0, 0, (words * 8) as u32, HEADER as u32, 0, 0, flags, 0, 0];
        for (word, pair) in buffer.iter_mut().zip(header.chunks_exact(2)) {
            let mut bytes = [0; 8];
            bytes[..4].copy_from_slice(&pair[0].to_ne_bytes());
            bytes[4..].copy_from_slice(&pair[1].to_ne_bytes());
            *word = u64::from_ne_bytes(bytes);
        }
        buffer[5] = number;
        // SAFETY: the request reads and fills at most the `data_size` bytes that the header names, which is what `buffer` has.
        checked(unsafe { libc::ioctl(control.as_raw_fd(), DM_TABLE_STATUS, buffer.as_mut_ptr()) })?;
        let bytes: Vec<u8> = buffer.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let field = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        if field(28) & BUFFER_FULL != 0 {
            words *= 4;
            if words > 1 << 22 {
                return Err(invalid());
            }
            continue;
        }
        let data = bytes.get(field(16) as usize..).ok_or_else(invalid)?;
        return crate::mapper::lines(data, field(20)).ok_or_else(invalid);
    }
}

/// Takes a lock on these bytes of a file that belongs to this open description; does not wait. An end of `u64::MAX` is that of
/// the largest file.
pub(crate) fn lock_range(file: BorrowedFd<'_>, exclusive: bool, bytes: ByteRange) -> io::Result<()> {
    set_lock(file, if exclusive { libc::F_WRLCK } else { libc::F_RDLCK }, bytes)
}

/// Gives back these bytes of what [`lock_range`] took.
pub(crate) fn unlock_range(file: BorrowedFd<'_>, bytes: ByteRange) -> io::Result<()> {
    set_lock(file, libc::F_UNLCK, bytes)
}

/// Gives back what [`lock_range`] took, whoever else has a descriptor of this open description.
pub(crate) fn unlock_whole(file: BorrowedFd<'_>) -> io::Result<()> {
    set_lock(file, libc::F_UNLCK, ByteRange { start: 0, end: u64::MAX })
}

fn set_lock(file: BorrowedFd<'_>, kind: libc::c_int, bytes: ByteRange) -> io::Result<()> {
    let number = |value: u64| i64::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL));
    // SAFETY: `flock` is a structure of integers, for which all zeroes is a value; length 0 is "to the end".
    let mut lock: libc::flock64 = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = number(bytes.start)?;
    lock.l_len = if bytes.end == u64::MAX { 0 } else { number(bytes.len())? };
    if bytes.is_empty() {
        return Ok(());
    }
    // SAFETY: F_OFD_SETLK reads the lock that is passed by address.
    checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) })?;
    Ok(())
}

/// Sends the I/O of an open description through the page cache from now on.
pub(crate) fn clear_direct(file: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: both commands take and give numbers only.
    let flags = checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: as above.
    checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_DIRECT) })?;
    Ok(())
}

/// `fallocate`; the ranges that are used here are below 2^63.
pub(crate) fn fallocate(file: BorrowedFd<'_>, mode: i32, at: u64, length: u64) -> io::Result<()> {
    let number = |value: u64| i64::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG));
    // SAFETY: the call takes numbers only.
    checked(unsafe { libc::fallocate64(file.as_raw_fd(), mode, number(at)?, number(length)?) })?;
    Ok(())
}

/// The largest file offset that this process may write; `u64::MAX` where there is no limit.
pub(crate) fn file_size_limit() -> u64 {
    let mut limit = libc::rlimit64 { rlim_cur: libc::RLIM64_INFINITY, rlim_max: libc::RLIM64_INFINITY };
    // SAFETY: `limit` is writable and of the type that the call fills.
    let result = unsafe { libc::getrlimit64(libc::RLIMIT_FSIZE, &raw mut limit) };
    if result == 0 { limit.rlim_cur } else { u64::MAX }
}

/// Sleeps until `descriptor` is readable.
pub(crate) fn wait_readable(descriptor: RawFd) -> io::Result<()> {
    let mut entry = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    loop {
        // SAFETY: one entry is passed, and one it is.
        match checked(unsafe { libc::poll(&raw mut entry, 1, -1) }) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn owned(result: libc::c_int) -> io::Result<OwnedFd> {
    let descriptor = checked(result)?;
    // SAFETY: the call that returned it has just made it, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// A flag that another descriptor's sleeper sees.
#[derive(Debug)]
pub(crate) struct Signal(File);

impl Signal {
    pub fn new() -> io::Result<Self> {
        // SAFETY: the call takes numbers only.
        let descriptor = owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        Ok(Self(File::from(descriptor)))
    }

    /// Makes the descriptor readable. It can fail only where it is readable already.
    pub fn raise(&self) {
        let _ = (&self.0).write(&1_u64.to_ne_bytes());
    }

    /// Makes the descriptor not readable.
    pub fn clear(&self) {
        let _ = (&self.0).read(&mut [0; 8]);
    }
}

impl AsRawFd for Signal {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// One descriptor that is readable when any of several is.
#[derive(Debug)]
pub(crate) struct Gathered(OwnedFd);

impl Gathered {
    pub fn new() -> io::Result<Self> {
        // SAFETY: the call takes numbers only.
        Ok(Self(owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?))
    }

    pub fn add(&self, descriptor: RawFd) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        // SAFETY: `event` is readable; a descriptor that is none is answered with an error.
        checked(unsafe {
            libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, descriptor, &raw mut event)
        })?;
        Ok(())
    }
}

impl AsRawFd for Gathered {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// An alarm that a sleeper sees.
#[derive(Debug)]
pub(crate) struct Timer(OwnedFd);

impl Timer {
    pub fn new() -> io::Result<Self> {
        // SAFETY: the call takes numbers only.
        let descriptor =
            unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) };
        Ok(Self(owned(descriptor)?))
    }

    /// Readable after `delay`, and not before; never where it is `None`.
    pub fn set(&self, delay: Option<Duration>) -> io::Result<()> {
        let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let value = delay.map_or(zero, |delay| libc::timespec {
            tv_sec: libc::time_t::try_from(delay.as_secs()).unwrap_or(libc::time_t::MAX),
            // All zeroes would disarm it.
            tv_nsec: (delay.subsec_nanos().max(u32::from(delay.as_secs() == 0))) as libc::c_long,
        });
        let new = libc::itimerspec { it_interval: zero, it_value: value };
        // SAFETY: `new` is readable, and no old value is asked for.
        checked(unsafe {
            libc::timerfd_settime(self.0.as_raw_fd(), 0, &raw const new, std::ptr::null_mut())
        })?;
        Ok(())
    }
}

impl AsRawFd for Timer {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// The status of what `path` leads to; opens nothing.
pub(crate) fn status_of(path: &std::path::Path) -> io::Result<Status> {
    use std::os::unix::fs::OpenOptionsExt;
    // Only a name for the object: no device is woken, no FIFO waits.
    let file = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path)?;
    status(file.as_fd())
}
