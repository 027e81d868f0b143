//! The system calls on files that std does not have.
//!
//! Invariants: a call returns the system's result; this module makes no decision.
//!
//! Elsewhere: the meaning of an error for the user (`open`).

use crate::device_lock::{self, DeviceLock};
use crate::sysfs::SYS;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

fn checked(returned: libc::c_int) -> io::Result<libc::c_int> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(returned) }
}

/// A file that is locked completely while this value lives. However the process ends, the lock ends with the
/// last descriptor of this open file description. The drop unlocks explicitly, since a child process that is
/// being started, or was forked to stay, has a copy of the descriptor. In a forked child the drop releases
/// nothing: the lock belongs to the parent.
#[derive(Debug)]
pub(crate) struct Locked {
    file: File,
    process: u32,
    /// Of a device, whichever node it was opened through.
    _device: Vec<DeviceLock>,
}

impl Locked {
    /// Locks the whole file for writing, for this open file description alone. If another owner has it, the
    /// inner error is the locked file: this one, or, of a device, another one that stands for it.
    pub fn take(file: File) -> io::Result<Result<Self, File>> {
        Self::take_as(file, libc::F_WRLCK)
    }

    /// As [`take`](Self::take), but shared with other readers.
    pub fn take_for_reading(file: File) -> io::Result<Result<Self, File>> {
        Self::take_as(file, libc::F_RDLCK)
    }

    fn take_as(file: File, kind: libc::c_int) -> io::Result<Result<Self, File>> {
        if !lock_as(&file, kind)? {
            return Ok(Err(file));
        }
        let mut locked = Self { file, process: std::process::id(), _device: Vec::new() };
        let looked = locked.metadata()?;
        if looked.file_type().is_char_device() {
            let places = (Path::new(SYS), Path::new("/dev"));
            match device_lock::take(places, &looked, kind == libc::F_WRLCK)? {
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
            // If the unlock fails, the lock ends with the descriptor.
            let _ = lock_as(&self.file, libc::F_UNLCK);
        }
    }
}

/// Locks or unlocks a file that need not be open for writing; false if another owner has the lock.
pub(crate) fn lock_all(file: &File, operation: libc::c_int) -> io::Result<bool> {
    // SAFETY: the descriptor is open.
    match checked(unsafe { libc::flock(file.as_raw_fd(), operation | libc::LOCK_NB) }) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EWOULDBLOCK) => Ok(false),
        Err(error) => Err(error),
    }
}

/// As [`lock_all`], for this open file description alone.
pub(crate) fn lock_as(file: &File, kind: libc::c_int) -> io::Result<bool> {
    let whole = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and `whole` is the structure that the command reads.
    match checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const whole) }) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Allocates the first `length` bytes; the file is at least that long afterwards, and its bytes are
/// unchanged.
pub(crate) fn allocate(file: &File, length: u64) -> io::Result<()> {
    let length = libc::off_t::try_from(length).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    loop {
        // SAFETY: the descriptor is open.
        match checked(unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other.map(|_| ()),
        }
    }
}

/// A file without a name, in memory.
pub(crate) fn unnamed(name: &CStr) -> io::Result<File> {
    // SAFETY: the name ends with a zero byte.
    let descriptor = checked(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) })?;
    // SAFETY: the descriptor was just created, and has no other owner.
    Ok(unsafe { File::from_raw_fd(descriptor) })
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
    let mut answer = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the descriptor is open and `answer` has room for what the call writes.
    checked(unsafe { libc::fstatfs(file.as_raw_fd(), answer.as_mut_ptr()) })?;
    // SAFETY: the call succeeded, so it wrote all of it.
    let answer = unsafe { answer.assume_init() };
    let block = answer.f_bsize as u64;
    // Memory file systems without a limit report zero blocks.
    let limited = answer.f_blocks > 0 && answer.f_blocks < u64::MAX;
    let free = limited.then(|| answer.f_bavail.saturating_mul(block));
    Ok(FileSystem { magic: answer.f_type as u64, block, free })
}

/// Whether the file's pages are the medium's own (DAX), as its file system reports.
pub(crate) fn is_dax(file: &File) -> bool {
    let mut answer = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the descriptor is open, the path is empty and ends with a zero byte, and `answer` has room.
    let returned =
        unsafe { libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, 0, answer.as_mut_ptr()) };
    // SAFETY: all zeroes is a valid value, whether the call wrote it or not.
    let answer = unsafe { answer.assume_init() };
    returned == 0 && answer.stx_attributes & libc::STATX_ATTR_DAX as u64 != 0
}

/// The system's page in bytes.
pub(crate) fn page_size() -> u64 {
    // SAFETY: the call reads no memory of this program.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
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
    fn a_child_that_drops_its_copy_of_a_lock_leaves_its_parents() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let open = || File::options().read(true).write(true).open(file.path()).expect("it opens");
        let ours = Locked::take(open()).expect("asked").expect("free");
        // SAFETY: the child drops a file and ends; it takes no lock that another thread may have held.
        match unsafe { libc::fork() } {
            0 => {
                drop(ours);
                // SAFETY: it ends the child here.
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
