//! The system calls that std has no safe way to.
//!
//! Always true here: nothing waits, and no memory is handed to the system but what a call fills while it lasts.

use cbd_types::{Error, ErrorKind, Result};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Makes reads of a kick descriptor return instead of waiting. That is shared with the front end, which only writes it.
pub(crate) fn never_wait(file: &File) -> Result<()> {
    let flags = flags(file)?;
    // SAFETY: the call takes integers only; the descriptor is open while `file` is borrowed.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(refused("set a descriptor of the front end to not wait"));
    }
    Ok(())
}

fn flags(file: &File) -> Result<i32> {
    // SAFETY: the call takes integers only; the descriptor is open while `file` is borrowed.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 { Err(refused("look at a descriptor of the front end")) } else { Ok(flags) }
}

/// A descriptor that the front end listens on. How it waits there is its own affair, so its flags are left alone.
#[derive(Debug)]
pub(crate) struct Bell {
    file: File,
    /// Whether writing it could wait.
    may_wait: bool,
}

impl Bell {
    pub(crate) fn new(file: File) -> Result<Self> {
        let may_wait = flags(&file)? & libc::O_NONBLOCK == 0;
        Ok(Self { file, may_wait })
    }

    /// Tells the front end; that it has not heard the last time is no failure.
    pub(crate) fn ring(&self) -> io::Result<()> {
        if self.may_wait {
            let mut entry = libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
            // SAFETY: the pointer is that of one structure, which lives through the call.
            if unsafe { libc::poll(&raw mut entry, 1, 0) } == 0 {
                return Ok(());
            }
        }
        match (&self.file).write(&1_u64.to_ne_bytes()) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(()),
        }
    }
}

/// Anonymous memory with a descriptor, `size` bytes of zeroes, whose size nobody can change.
pub(crate) fn sealed_memory(size: u64) -> Result<File> {
    // SAFETY: the name is a string with a closing zero, and nothing else is handed over.
    let descriptor = unsafe {
        libc::memfd_create(c"cbd-vhost-in-flight".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
    };
    if descriptor < 0 {
        return Err(refused("make shared memory for requests in flight"));
    }
    // SAFETY: the descriptor is fresh, valid, and nobody else has it.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(descriptor) });
    file.set_len(size).map_err(|error| {
        Error::new(ErrorKind::System, format!("cannot size the memory for requests in flight: {error}"))
    })?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: the call takes integers only.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(refused("seal the memory for requests in flight"));
    }
    Ok(file)
}

fn refused(what: &str) -> Error {
    Error::new(ErrorKind::System, format!("cannot {what}: {}", io::Error::last_os_error()))
}
