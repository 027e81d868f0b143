//! The system calls on files that std does not have.
//!
//! Always true here: a call returns what the system said; nothing is decided.
//!
//! Left to others: what an error means to the user (`open`).

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

/// A file that is locked whole, as long as this lives. However the process ends, the lock ends with the last descriptor of this
/// open description; it does not wait for that here, since a child process that is being started, or forked to stay, has a copy. What
/// the child drops is such a copy: the lock is its parent's.
#[derive(Debug)]
pub(crate) struct Locked {
    file: File,
    process: u32,
    /// Of a device, whatever node it was opened by.
    _device: Vec<DeviceLock>,
}

impl Locked {
    /// Takes the whole file for writing, for this open description alone; when somebody else has it, the file comes back that he
    /// has: this one, or of a device another one that stands for it.
    pub fn take(file: File) -> io::Result<Result<Self, File>> {
        Self::take_as(file, libc::F_WRLCK)
    }

    /// As [`take`](Self::take), but others may have the file for reading too.
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
            // What can't be given back ends with the descriptor.
            let _ = lock_as(&self.file, libc::F_UNLCK);
        }
    }
}

/// Takes or gives back the lock of a file that need not be open for writing; false where somebody else has it.
pub(crate) fn lock_all(file: &File, operation: libc::c_int) -> io::Result<bool> {
    // SAFETY: the descriptor is open.
    match checked(unsafe { libc::flock(file.as_raw_fd(), operation | libc::LOCK_NB) }) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EWOULDBLOCK) => Ok(false),
        Err(error) => Err(error),
    }
}

/// As [`lock_all`], of this open description alone.
pub(crate) fn lock_as(file: &File, kind: libc::c_int) -> io::Result<bool> {
    let whole = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and `whole` is what the command reads.
    match checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const whole) }) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Allocates the first `length` bytes; the file is at least that long afterwards, and its bytes are as before.
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

/// A file that has no name and lives in memory.
pub(crate) fn unnamed(name: &CStr) -> io::Result<File> {
    // SAFETY: the name ends with a zero byte.
    let descriptor = checked(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) })?;
    // SAFETY: the descriptor was just made, and nobody else knows it.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

/// What a file lies on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileSystem {
    /// Its magic number.
    pub magic: u64,
    /// The unit in which it allocates, in bytes; for hugetlbfs the size of its pages.
    pub block: u64,
    /// Bytes that may still be allocated; none where the file system does not say (it has no limit).
    pub free: Option<u64>,
}

/// What `file` lies on.
pub(crate) fn file_system(file: &File) -> io::Result<FileSystem> {
    let mut answer = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the descriptor is open and `answer` has room for what the call writes.
    checked(unsafe { libc::fstatfs(file.as_raw_fd(), answer.as_mut_ptr()) })?;
    // SAFETY: the call succeeded, so it wrote all of it.
    let answer = unsafe { answer.assume_init() };
    let block = answer.f_bsize as u64;
    // Memory file systems without a limit say that they have no blocks at all.
    let limited = answer.f_blocks > 0 && answer.f_blocks < u64::MAX;
    let free = limited.then(|| answer.f_bavail.saturating_mul(block));
    Ok(FileSystem { magic: answer.f_type as u64, block, free })
}

/// Whether the file's pages are the medium's own (DAX), as its file system says.
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
    // SAFETY: the call reads nothing of ours.
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
        // SAFETY: the child gives back a file and ends; it takes no lock that another thread may have held.
        match unsafe { libc::fork() } {
            0 => {
                drop(ours);
                // SAFETY: it ends the child here.
                unsafe { libc::_exit(0) }
            }
            child => {
                assert!(child > 0, "a child");
                // SAFETY: the child is ours, and nobody wants its status.
                assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
            }
        }
        assert!(Locked::take(open()).expect("asked").is_err(), "we have it");
        drop(ours);
        Locked::take(open()).expect("asked").expect("free again");
    }
}
