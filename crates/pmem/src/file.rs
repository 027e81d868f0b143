//! Operations on files that std does not provide.
//!
//! Invariants: a call returns the system's result; this module makes no decision.
//!
//! Elsewhere: the meaning of an error for the user (`open`).

use crate::device_lock::{self, DeviceLock};
use crate::sysfs::SYS;
use cbd_sys::{Lock, set_lock};
use rustix::fs::{
    AtFlags, FallocateFlags, FlockOperation, MemfdFlags, StatxAttributes, StatxFlags, fallocate, flock,
    fstatfs, memfd_create, statx,
};
use rustix::io::{Errno, retry_on_intr};
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// The first of the bytes that stand for hosts, behind the end of every file.
const HOST_LOCKS: u64 = i64::MAX as u64 - 1024;

/// A file that is completely locked while this value lives. However the process ends, the lock ends with the last descriptor
/// of this open file description. The drop unlocks explicitly, since a child process that is being started, or was forked to
/// stay, has a copy of the descriptor. In a forked child the drop releases nothing: the lock belongs to the parent.
#[derive(Debug)]
pub(crate) struct Locked {
    file: File,
    process: u32,
    /// Locks of a device that hold for every node of it.
    _device: Vec<DeviceLock>,
}

impl Locked {
    /// Locks the whole file for writing, for this open file description alone. If another owner has the lock, the inner error
    /// is the locked file: this one, or for a device another file that represents it.
    pub fn take(file: File) -> io::Result<Result<Self, File>> {
        Self::take_as(file, Lock::Exclusive, 0..u64::MAX)
    }

    /// As [`take`](Self::take), but shared with other readers.
    pub fn take_for_reading(file: File) -> io::Result<Result<Self, File>> {
        Self::take_as(file, Lock::Shared, 0..u64::MAX)
    }

    /// As [`take`](Self::take), but together with other hosts that lock it in this way. Readers and owners are kept out once a host
    /// [has its number](HostLocks::take).
    pub fn take_with_hosts(file: File) -> io::Result<Result<Self, File>> {
        Self::take_as(file, Lock::Shared, 0..HOST_LOCKS)
    }

    /// Lets other hosts lock the file as [`take_with_hosts`](Self::take_with_hosts) does.
    pub fn share_with_hosts(&self) -> io::Result<()> {
        set_lock(self.file.as_fd(), Lock::Shared, 0..HOST_LOCKS)?;
        set_lock(self.file.as_fd(), Lock::None, HOST_LOCKS..u64::MAX)?;
        self._device.iter().try_for_each(DeviceLock::share)
    }

    fn take_as(file: File, kind: Lock, bytes: Range<u64>) -> io::Result<Result<Self, File>> {
        if !lock_bytes(&file, kind, bytes)? {
            return Ok(Err(file));
        }
        let mut locked = Self { file, process: std::process::id(), _device: Vec::new() };
        let looked = locked.metadata()?;
        if looked.file_type().is_char_device() {
            let places = (Path::new(SYS), Path::new("/dev"));
            match device_lock::take(places, &looked, kind == Lock::Exclusive)? {
                Ok(locks) => locked._device = locks,
                Err(somebodys) => return Ok(Err(somebodys)),
            }
        }
        Ok(Ok(locked))
    }
}

impl Deref for Locked {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // If the unlock fails, the lock ends when the descriptor is closed.
            let _ = lock_as(&self.file, Lock::None);
        }
    }
}

/// The locks of the hosts of a shared region in its file: one byte for each host. They end with the process, so on one machine they
/// prove that no process is a host any more.
#[derive(Debug)]
pub struct HostLocks {
    /// The open file description of the mapping.
    file: File,
}

impl HostLocks {
    pub(crate) fn of(locked: &Locked) -> io::Result<Self> {
        Ok(Self { file: locked.file.try_clone()? })
    }

    /// Locks the number of a host for this mapping. `false` if another process of this machine has it.
    ///
    /// # Errors
    /// The system error.
    pub fn take(&self, host: u32) -> io::Result<bool> {
        lock_bytes(&self.file, Lock::Exclusive, Self::byte(host))
    }

    /// Unlocks the number of a host.
    pub fn release(&self, host: u32) {
        // If it fails, the lock ends with the mapping.
        let _ = lock_bytes(&self.file, Lock::None, Self::byte(host));
    }

    const fn byte(host: u32) -> Range<u64> {
        let at = HOST_LOCKS + host as u64;
        at..at + 1
    }
}

/// Locks or unlocks a file that need not be open for writing; false if another owner has the lock.
pub(crate) fn lock_all(file: &File, operation: FlockOperation) -> io::Result<bool> {
    match flock(file, operation) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// As [`lock_all`], for this open file description alone.
pub(crate) fn lock_as(file: &File, kind: Lock) -> io::Result<bool> {
    lock_bytes(file, kind, 0..u64::MAX)
}

fn lock_bytes(file: &File, kind: Lock, bytes: Range<u64>) -> io::Result<bool> {
    match set_lock(file.as_fd(), kind, bytes) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Allocates the first `length` bytes; afterwards the file is at least this long, and its bytes are unchanged.
pub(crate) fn allocate(file: &File, length: u64) -> io::Result<()> {
    if length > i64::MAX as u64 {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    Ok(retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, length))?)
}

/// An unnamed file in memory.
pub(crate) fn unnamed(name: &CStr) -> io::Result<File> {
    Ok(memfd_create(name, MemfdFlags::CLOEXEC)?.into())
}

/// The file system of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileSystem {
    /// Its magic number.
    pub magic: u64,
    /// Its unit of allocation in bytes; for hugetlbfs the size of its pages.
    pub block: u64,
    /// Bytes that may still be allocated; `None` if the file system has no limit.
    pub free: Option<u64>,
}

/// The file system of `file`.
pub(crate) fn file_system(file: &File) -> io::Result<FileSystem> {
    let answer = fstatfs(file)?;
    let block = answer.f_bsize as u64;
    // Memory file systems without a limit report zero blocks.
    let limited = answer.f_blocks > 0 && answer.f_blocks < u64::MAX;
    let free = limited.then(|| answer.f_bavail.saturating_mul(block));
    Ok(FileSystem { magic: answer.f_type as u64, block, free })
}

/// Whether the file's pages are those of the medium itself (DAX), as its file system reports.
pub(crate) fn is_dax(file: &File) -> bool {
    statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::empty())
        .is_ok_and(|status| status.stx_attributes.contains(StatxAttributes::DAX))
}

/// The system's page in bytes.
pub(crate) fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_ends_with_its_holder_whoever_has_a_copy_of_the_descriptor() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let open = || File::options().read(true).write(true).open(file.path()).expect("it opens");
        let first = Locked::take(open()).expect("asked").expect("free");
        let _copy_of_a_child = first.try_clone().expect("a copy");
        assert!(Locked::take(open()).expect("asked").is_err(), "it has a holder");
        assert!(Locked::take_for_reading(open()).expect("asked").is_err(), "it has a holder");
        drop(first);
        let second = Locked::take_for_reading(open()).expect("asked").expect("free again");
        let _copy_of_a_child = second.try_clone().expect("a copy");
        Locked::take_for_reading(open()).expect("asked").expect("free for other readers");
        drop(second);
        Locked::take(open()).expect("asked").expect("free again");
    }

    #[test]
    fn hosts_share_a_file_and_keep_owners_and_readers_out() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let open = || File::options().read(true).write(true).open(file.path()).expect("it opens");
        let first = Locked::take(open()).expect("asked").expect("free");
        assert!(Locked::take_with_hosts(open()).expect("asked").is_err(), "it has an owner");
        first.share_with_hosts().expect("it has the lock");
        let second = Locked::take_with_hosts(open()).expect("asked").expect("it is shared");
        assert!(Locked::take(open()).expect("asked").is_err(), "it has hosts");
        let [of_first, of_second] = [&first, &second].map(|locked| HostLocks::of(locked).expect("a copy"));
        assert!(of_first.take(0).expect("asked") && of_second.take(1).expect("asked"));
        assert!(!of_second.take(0).expect("asked"), "another process is host 0");
        assert!(of_first.take(0).expect("asked"), "it has it already");
        assert!(Locked::take_for_reading(open()).expect("asked").is_err(), "hosts change it");
        drop(first);
        assert!(of_second.take(0).expect("asked"), "host 0 has ended");
        of_second.release(0);
        assert!(of_first.take(0).expect("asked"));
        drop((second, of_first, of_second));
        Locked::take(open()).expect("asked").expect("free again");
    }

    #[test]
    fn a_child_that_drops_its_copy_of_a_lock_leaves_its_parents() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let open = || File::options().read(true).write(true).open(file.path()).expect("it opens");
        let ours = Locked::take(open()).expect("asked").expect("free");
        // SAFETY: the child drops a file and exits; it takes no lock that another thread may have held.
        match unsafe { libc::fork() } {
            0 => {
                drop(ours);
                // SAFETY: this ends the child.
                unsafe { libc::_exit(0) }
            }
            child => {
                assert!(child > 0, "a child");
                // SAFETY: it is a child of this process, and its status is not needed.
                assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
            }
        }
        assert!(Locked::take(open()).expect("asked").is_err(), "the parent has it");
        drop(ours);
        Locked::take(open()).expect("asked").expect("free again");
    }
}
