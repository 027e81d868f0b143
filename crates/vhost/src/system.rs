//! Descriptors that are shared with the front end.
//!
//! Invariants: no call here blocks.

use cbd_types::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Write};

/// Makes a kick descriptor non-blocking. The flag is shared with the front end, which only writes the descriptor.
pub(crate) fn set_nonblocking(file: &File) -> Result<()> {
    fcntl_setfl(file, flags(file)? | OFlags::NONBLOCK)
        .map_err(|error| refused("set a descriptor of the front end to non-blocking", error))
}

fn flags(file: &File) -> Result<OFlags> {
    fcntl_getfl(file).map_err(|error| refused("read the flags of a descriptor of the front end", error))
}

/// A descriptor that the front end waits on. Its flags are not changed, since they also apply to the front end.
#[derive(Debug)]
pub(crate) struct Notifier {
    file: File,
    /// Whether a write could block.
    may_wait: bool,
}

impl Notifier {
    pub(crate) fn new(file: File) -> Result<Self> {
        let may_wait = !flags(&file)?.contains(OFlags::NONBLOCK);
        Ok(Self { file, may_wait })
    }

    /// Signals the front end; if an earlier signal is still pending, this succeeds.
    pub(crate) fn signal(&self) -> io::Result<()> {
        if self.may_wait {
            let mut entry = [PollFd::new(&self.file, PollFlags::OUT)];
            if poll(&mut entry, Some(&Timespec::default())) == Ok(0) {
                return Ok(());
            }
        }
        match (&self.file).write(&1_u64.to_ne_bytes()) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(()),
        }
    }
}

/// Memory with a descriptor: `size` bytes of zeroes, with a sealed size.
pub(crate) fn sealed_memory(size: u64) -> Result<File> {
    let failed = |error| {
        Error::new(ErrorKind::System, "cannot create shared memory for requests in flight").caused_by(error)
    };
    cbd_sys::memory::sealed(c"cbd-vhost-in-flight", size).map_err(failed)
}

fn refused(what: &str, error: Errno) -> Error {
    Error::new(ErrorKind::System, format!("cannot {what}: {}", io::Error::from(error)))
}
