//! A range of mapped memory: mapped, advised, unmapped.
//!
//! Invariants: the memory stays mapped while its [`Memory`] lives, and no Rust reference to its bytes is ever created,
//! because other processes may change them. A pointer is returned only after a bounds check.
//!
//! Elsewhere: the choice of the file (`open`), copying (`copy`).

use crate::routines::processor::guard::{self, Registration};
use cbd_sys::memory::{Hint, Mapped};
use cbd_types::Result;
use std::io;
use std::os::fd::BorrowedFd;

pub(crate) use cbd_sys::memory::Sharing;

/// Mapped memory whose failures are handled (see `guard`).
#[derive(Debug)]
pub(crate) struct Memory {
    /// Ends before the memory is unmapped, since fields are dropped in their order: the range may belong to another
    /// mapping as soon as munmap returns.
    _registration: Registration,
    mapped: Mapped,
}

/// Bytes of a huge page, on all processors that CBD supports.
const HUGE_PAGE: usize = 2 << 20;

impl Memory {
    /// Maps the first `length` bytes of a file, at an address that is suitable for huge pages.
    pub fn of_file(file: BorrowedFd<'_>, length: usize, sharing: Sharing) -> io::Result<Result<Self>> {
        Mapped::file(file, 0, length, sharing, place_for_huge_pages(length)).map(Self::register)
    }

    /// Maps the first `length` bytes of a device, which itself chooses a suitable address.
    pub fn of_device(file: BorrowedFd<'_>, length: usize, sharing: Sharing) -> io::Result<Result<Self>> {
        Mapped::file(file, 0, length, sharing, 0).map(Self::register)
    }

    /// Private memory of this process.
    pub fn scratch(length: usize) -> io::Result<Result<Self>> {
        Mapped::anonymous(length).map(Self::register)
    }

    fn register(mapped: Mapped) -> Result<Self> {
        let registration = guard::register(mapped.base().as_ptr() as usize, mapped.length())?;
        Ok(Self { _registration: registration, mapped })
    }

    /// Number of bytes.
    pub const fn len(&self) -> usize {
        self.mapped.length()
    }

    /// The address of the first byte.
    pub fn base(&self) -> usize {
        self.mapped.base().as_ptr() as usize
    }

    /// A pointer to `length` mapped bytes, if all of them are inside the range.
    #[inline]
    pub fn pointer(&self, at: u64, length: usize) -> Option<*mut u8> {
        self.mapped.pointer(at, length)
    }

    /// Gives the kernel a hint about all of the memory.
    pub fn advise(&self, hint: Hint) -> io::Result<()> {
        self.mapped.advise(0..self.len(), hint)
    }

    /// Returns when the present content of the pages with these `length` bytes at `at` is on the disk.
    pub fn sync(&self, at: u64, length: u64) -> io::Result<()> {
        let page = crate::file::page_size();
        let start = at / page * page;
        let end = at.saturating_add(length).min(self.len() as u64).max(start);
        let offset = |at| usize::try_from(at).map_err(|_| io::ErrorKind::InvalidInput);
        self.mapped.sync(offset(start)?..offset(end)?)
    }
}

/// A free address for `length` bytes, aligned to a huge page, or 0. Another mapping can occupy it before it is used; the
/// kernel then chooses the address, and the pages are small.
fn place_for_huge_pages(length: usize) -> usize {
    let longer = length.checked_add(HUGE_PAGE).filter(|_| length >= HUGE_PAGE);
    let free = longer.and_then(|longer| Mapped::reserved(longer).ok());
    free.map_or(0, |free| free.base().addr().get().next_multiple_of(HUGE_PAGE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_file_is_mapped_at_a_huge_page_boundary() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(5 << 20).expect("its size");
        let map = || {
            let memory = Memory::of_file(file.as_fd(), 5 << 20, Sharing::Shared);
            memory.expect("mapped").expect("registered")
        };
        let memories = [map(), map(), map()];
        for memory in memories {
            assert_eq!(memory.base() % HUGE_PAGE, 0);
        }
    }

    #[test]
    fn a_pointer_is_returned_only_for_bytes_inside() {
        let memory = Memory::scratch(8192).expect("mapped").expect("registered");
        assert!(memory.pointer(0, 8192).is_some());
        assert!(memory.pointer(8192, 0).is_some());
        assert!(memory.pointer(1, 8192).is_none());
        assert!(memory.pointer(u64::MAX, 2).is_none());
        assert!(memory.pointer(8193, 0).is_none());
    }
}
