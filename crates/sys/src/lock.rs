//! Locks of bytes that belong to an open file description.

use crate::checked;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

/// A kind of lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lock {
    /// Together with other shared locks; the file must be open for reading.
    Shared,
    /// Alone; the file must be open for writing.
    Exclusive,
    /// None: unlocks.
    None,
}

/// Locks or unlocks these bytes for the open file description of `file`, without waiting. An end of `u64::MAX` is that
/// of the largest file; an empty range changes nothing.
///
/// # Errors
/// EAGAIN or EACCES if another owner has a lock that excludes it; EINVAL for an offset beyond 2^63.
pub fn set_lock(file: BorrowedFd<'_>, lock: Lock, bytes: Range<u64>) -> io::Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    let number = |value: u64| i64::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL));
    let kind = match lock {
        Lock::Shared => libc::F_RDLCK,
        Lock::Exclusive => libc::F_WRLCK,
        Lock::None => libc::F_UNLCK,
    };
    let wanted = libc::flock64 {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: number(bytes.start)?,
        // 0 is "to the end".
        l_len: if bytes.end == u64::MAX { 0 } else { number(bytes.end - bytes.start)? },
        l_pid: 0,
    };
    // SAFETY: F_OFD_SETLK reads the lock that is passed by address.
    checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const wanted) })?;
    Ok(())
}
