//! A page of numbers that two processes share.
//!
//! Invariants: the page cannot become shorter under a process that has it mapped, so no access raises SIGBUS. The other process may
//! store anything at any time: a number is only a hint.

use crate::memory::{Mapped, Sharing, sealed};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU32;

/// Bytes of the page, and of the line that each number has of its own.
const PAGE: usize = 4096;
const LINE: usize = 64;

/// Numbers in the page.
pub const WORDS: usize = PAGE / LINE;

/// The page, mapped.
#[derive(Debug)]
pub struct SharedWords {
    mapped: Mapped,
    file: OwnedFd,
}

impl SharedWords {
    /// A page of zeroes, in anonymous memory with a descriptor.
    ///
    /// # Errors
    /// The system error.
    pub fn new() -> io::Result<Self> {
        Self::map(sealed(c"cbd-words", PAGE as u64)?.into())
    }

    /// The page that another process has made.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a file that is none; the system error.
    pub fn from_descriptor(file: OwnedFd) -> io::Result<Self> {
        let is_sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if !is_sealed || fstat(&file)?.st_size < PAGE as i64 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Self::map(file)
    }

    fn map(file: OwnedFd) -> io::Result<Self> {
        Ok(Self { mapped: Mapped::file(file.as_fd(), 0, PAGE, Sharing::Shared, 0)?, file })
    }

    /// A number, on a line of its own. There are [`WORDS`], and behind the last one the first one follows again.
    #[must_use]
    pub fn word(&self, index: usize) -> &AtomicU32 {
        let at = index % WORDS * LINE;
        // SAFETY: the offset is within the page, which is mapped as long as `self` lives and begins at a multiple of its size, so the
        // number is aligned. It is accessed by atomic operations alone in this process, and in others of this project.
        unsafe { AtomicU32::from_ptr(self.mapped.base().as_ptr().add(at).cast()) }
    }

    /// The descriptor, for the other process.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::sync::atomic::Ordering;

    #[test]
    fn both_sides_see_the_numbers_each_on_its_line() {
        let one = SharedWords::new().unwrap();
        let other = SharedWords::from_descriptor(one.descriptor().try_clone_to_owned().unwrap()).unwrap();
        for index in 0..WORDS {
            one.word(index).store(index as u32 + 1, Ordering::Relaxed);
        }
        for index in 0..WORDS {
            assert_eq!(other.word(index).load(Ordering::Relaxed), index as u32 + 1);
        }
        assert_eq!(one.word(WORDS + 3).load(Ordering::Relaxed), 4);
        let (first, second) = (std::ptr::from_ref(one.word(0)), std::ptr::from_ref(one.word(1)));
        assert_eq!(second.addr() - first.addr(), LINE);
    }

    #[test]
    fn files_that_can_become_shorter_and_short_ones_are_refused() {
        let refused = |file: OwnedFd| SharedWords::from_descriptor(file).unwrap_err().kind();
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE as u64).unwrap();
        assert_eq!(refused(file.into()), io::ErrorKind::InvalidInput);
        let memory = memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&memory, PAGE as u64).unwrap();
        assert_eq!(refused(memory), io::ErrorKind::InvalidInput);
        let short = sealed(c"test", PAGE as u64 - 1).unwrap();
        assert_eq!(refused(short.into()), io::ErrorKind::InvalidInput);
        let page = SharedWords::new().unwrap();
        assert!(rustix::fs::ftruncate(page.descriptor(), 0).is_err());
    }
}
