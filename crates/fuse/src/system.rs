//! The system calls that the standard library does not have, each behind a safe function.
//!
//! Invariants: this is the only module of the crate with `unsafe`; every pointer that is passed to the kernel
//! is to a value that lives over the call and is as large as the call states.
//!
//! Elsewhere: the purpose of the calls.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_int, c_ulong};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// `_IOR(229, 0, u32)`: makes an opened `/dev/fuse` one more channel to the connection of another.
const FUSE_DEV_IOC_CLONE: c_ulong = 0x8004_e500;
const LOOP_CLR_FD: c_ulong = 0x4c01;
const LOOP_SET_STATUS64: c_ulong = 0x4c04;
const LOOP_GET_STATUS64: c_ulong = 0x4c05;
const LOOP_CONFIGURE: c_ulong = 0x4c0a;
/// `_IO(0x12, 119)`.
const BLKDISCARD: c_ulong = 0x1277;
const LOOP_CTL_GET_FREE: c_ulong = 0x4c82;

/// The loop device is read-only.
pub const LO_FLAGS_READ_ONLY: u32 = 1;
/// The kernel unbinds the loop device when the last opener closes it.
pub const LO_FLAGS_AUTOCLEAR: u32 = 4;
/// The loop device bypasses the page cache of its file.
pub const LO_FLAGS_DIRECT_IO: u32 = 16;
/// Size of a name in [`LoopInfo`].
pub const LO_NAME_SIZE: usize = 64;

/// `struct loop_info64` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct LoopInfo {
    /// Device number of the file system that the file is on, as the kernel encodes it.
    pub device: u64,
    /// Node number of the file.
    pub inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    /// `LO_FLAGS_*`.
    pub flags: u32,
    /// A name that the configuring process has set; ends with a zero.
    pub file_name: [u8; LO_NAME_SIZE],
    crypt_name: [u8; LO_NAME_SIZE],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopInfo>() == 232 && size_of::<LoopConfig>() == 304);

const NO_INFO: LoopInfo = LoopInfo {
    device: 0,
    inode: 0,
    rdevice: 0,
    offset: 0,
    size_limit: 0,
    number: 0,
    encrypt_type: 0,
    encrypt_key_size: 0,
    flags: 0,
    file_name: [0; LO_NAME_SIZE],
    crypt_name: [0; LO_NAME_SIZE],
    encrypt_key: [0; 32],
    init: [0; 2],
};

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn text(value: impl AsRef<[u8]>) -> io::Result<CString> {
    CString::new(value.as_ref()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

fn path_text(path: &Path) -> io::Result<CString> {
    text(path.as_os_str().as_bytes())
}

/// mount(2).
pub fn mount(source: &str, target: &Path, kind: &str, flags: c_ulong, data: &str) -> io::Result<()> {
    let (source, target, kind, data) = (text(source)?, path_text(target)?, text(kind)?, text(data)?);
    // SAFETY: all four are C strings that live until the call is over.
    check(unsafe {
        libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, data.as_ptr().cast())
    })?;
    Ok(())
}

/// umount2(2).
pub fn umount(target: &Path, flags: c_int) -> io::Result<()> {
    let target = path_text(target)?;
    // SAFETY: the path is a C string that lives until the call is over.
    check(unsafe { libc::umount2(target.as_ptr(), flags) })?;
    Ok(())
}

/// Moves the calling thread into a mount namespace of its own, out of which no mount propagates.
pub fn unshare_mounts() -> io::Result<()> {
    // SAFETY: takes no pointer; the calling thread alone changes its namespace.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    mount("none", Path::new("/"), "none", libc::MS_REC | libc::MS_PRIVATE, "")
}

/// Gives the calling thread a descriptor table of its own, with `/dev/null` three times as its only content.
pub fn unshare_descriptors() -> io::Result<()> {
    const CLOSE_RANGE_UNSHARE: c_int = 1 << 1;
    // Through syscall(2): not every C library has a function for it. SAFETY: takes no pointer. The
    // descriptors that it closes are copies in the new table of this thread; those of other threads stay
    // open, and this thread owns none: it has just begun.
    let result = unsafe { libc::syscall(libc::SYS_close_range, 0, u32::MAX, CLOSE_RANGE_UNSHARE) };
    check(result as c_int)?;
    // So that no message on standard output or standard error can be written to a block device.
    for expected in 0..3 {
        // SAFETY: the path is a C string; the descriptor becomes 0, 1 or 2 and stays open for good.
        let null = check(unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) })?;
        if null != expected {
            return Err(io::Error::other("descriptors were opened at the same time"));
        }
    }
    Ok(())
}

/// Makes `new`, a freshly opened `/dev/fuse`, one more channel to the connection of `old`.
pub fn clone_channel(new: BorrowedFd<'_>, old: BorrowedFd<'_>) -> io::Result<()> {
    let old = old.as_raw_fd() as u32;
    // SAFETY: the kernel reads a u32 through the pointer.
    check(unsafe { libc::ioctl(new.as_raw_fd(), FUSE_DEV_IOC_CLONE as _, &raw const old) })?;
    Ok(())
}

/// The number of a loop device that is free at this moment; the kernel creates one if there is none.
pub fn loop_get_free(control: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: takes no argument.
    check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _) }).map(|number| number as u32)
}

/// Binds a free loop device to a file.
pub fn loop_configure(
    device: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    block_size: u32,
    flags: u32,
    file_name: [u8; LO_NAME_SIZE],
) -> io::Result<()> {
    let info = LoopInfo { flags, file_name, ..NO_INFO };
    let config = LoopConfig { fd: file.as_raw_fd() as u32, block_size, info, reserved: [0; 8] };
    // SAFETY: the kernel reads a `struct loop_config` through the pointer, of the size asserted above.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as _, &raw const config) })?;
    Ok(())
}

/// The binding of a loop device; ENXIO if it is not bound.
pub fn loop_status(device: BorrowedFd<'_>) -> io::Result<LoopInfo> {
    let mut info = NO_INFO;
    // SAFETY: the kernel writes a `struct loop_info64` through the pointer, of the size asserted above; all
    // its fields are plain numbers.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64 as _, &raw mut info) })?;
    Ok(info)
}

/// Changes the setting of a bound loop device that may be changed: its flag [`LO_FLAGS_AUTOCLEAR`].
pub fn loop_set_status(device: BorrowedFd<'_>, info: &LoopInfo) -> io::Result<()> {
    let info = std::ptr::from_ref(info);
    // SAFETY: the kernel reads a `struct loop_info64` through the pointer, of the size asserted above.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_STATUS64 as _, info) })?;
    Ok(())
}

/// Unbinds a loop device: at once, or when its last opener closes it.
pub fn loop_clear(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes no argument.
    check(unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CLR_FD as _, 0) })?;
    Ok(())
}

/// Requests a block device to discard a range.
pub fn discard(device: BorrowedFd<'_>, start: u64, length: u64) -> io::Result<()> {
    let range = [start, length];
    // SAFETY: the kernel reads two u64 through the pointer.
    check(unsafe { libc::ioctl(device.as_raw_fd(), BLKDISCARD as _, range.as_ptr()) })?;
    Ok(())
}

/// Whether a descriptor is in an error state, as that of an ended FUSE connection is; does not block.
pub fn has_error(descriptor: BorrowedFd<'_>) -> io::Result<bool> {
    let mut polled = libc::pollfd { fd: descriptor.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: the kernel reads and writes one pollfd through the pointer.
    check(unsafe { libc::poll(&raw mut polled, 1, 0) })?;
    Ok(polled.revents != 0)
}

/// Makes an open file non-blocking, for all its descriptors.
pub fn do_not_block(descriptor: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes no pointer.
    let flags = check(unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: takes no pointer.
    check(unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) })?;
    Ok(())
}

/// Creates a block device node that only root can use.
pub fn make_block_node(path: &Path, major: u32, minor: u32) -> io::Result<()> {
    let path = path_text(path)?;
    // SAFETY: the path is a C string that lives until the call is over.
    check(unsafe { libc::mknod(path.as_ptr(), libc::S_IFBLK | 0o600, libc::makedev(major, minor)) })?;
    Ok(())
}

/// Queries the file system at `path` for its sizes, which no file system answers from a cache. Blocks as long
/// as the server does.
pub fn query_file_system(path: &Path) -> io::Result<()> {
    let path = path_text(path)?;
    // SAFETY: all zeroes are a valid value of this structure of plain numbers.
    let mut sizes: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a C string, and the kernel writes a `struct statfs` through the pointer.
    check(unsafe { libc::statfs(path.as_ptr(), &raw mut sizes) })?;
    Ok(())
}

/// Marks the calling thread as one that serves I/O: its allocations must not wait for memory that only its
/// own I/O can free.
pub fn set_io_flusher() -> io::Result<()> {
    const PR_SET_IO_FLUSHER: c_int = 57;
    // SAFETY: takes no pointer.
    check(unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) })?;
    Ok(())
}

/// Locks the pages that are in memory now, and later pages as soon as they are touched.
pub fn lock_all_memory() -> io::Result<()> {
    // SAFETY: takes no pointer.
    check(unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) })?;
    Ok(())
}

/// Unlocks the pages of a range.
pub fn unlock_memory(start: *const u8, length: usize) -> io::Result<()> {
    // SAFETY: changes no byte and no mapping; for a range that is not mapped the kernel answers ENOMEM.
    check(unsafe { libc::munlock(start.cast(), length) })?;
    Ok(())
}

/// A set of descriptors to wait on, each with a number.
#[derive(Debug)]
pub struct Poller(OwnedFd);

impl Poller {
    /// An empty set.
    pub fn new() -> io::Result<Self> {
        // SAFETY: takes no pointer.
        let raw = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: the descriptor is new and has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(raw) }))
    }

    /// Adds `descriptor`, for readability. Where several pollers wait exclusively for one descriptor, an
    /// event wakes one of them that is waiting.
    pub fn add(&self, descriptor: RawFd, number: u64, exclusive: bool) -> io::Result<()> {
        let events = if exclusive { libc::EPOLLIN | libc::EPOLLEXCLUSIVE } else { libc::EPOLLIN };
        let mut event = libc::epoll_event { events: events as u32, u64: number };
        // SAFETY: the kernel reads an epoll_event through the pointer.
        check(unsafe {
            libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, descriptor, &raw mut event)
        })?;
        Ok(())
    }

    /// Removes `descriptor`.
    pub fn remove(&self, descriptor: RawFd) -> io::Result<()> {
        // SAFETY: for this operation the kernel reads nothing through the pointer.
        check(unsafe {
            libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_DEL, descriptor, std::ptr::null_mut())
        })?;
        Ok(())
    }

    /// Waits until a descriptor is readable or in error, at most `timeout_ms` if that is not negative; calls
    /// `ready` with the number of each.
    pub fn wait(&self, timeout_ms: c_int, mut ready: impl FnMut(u64)) -> io::Result<()> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
        // SAFETY: the kernel writes at most as many events as the array has.
        let result = check(unsafe {
            libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), events.len() as c_int, timeout_ms)
        });
        match result {
            Ok(count) => events.iter().take(count as usize).for_each(|event| ready(event.u64)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// The name of a loop device, up to its zero.
pub fn loop_name(info: &LoopInfo) -> &[u8] {
    CStr::from_bytes_until_nul(&info.file_name).map_or(&info.file_name, CStr::to_bytes)
}
