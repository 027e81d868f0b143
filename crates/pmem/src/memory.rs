//! A range of mapped memory: mapped, advised, extended, unmapped.
//!
//! Invariants: the memory stays mapped at its address while its [`Memory`] lives, and no Rust reference to its bytes is ever created,
//! because other processes may change them. A pointer is returned only after a bounds check.
//!
//! Elsewhere: the choice of the file (`open`), copying (`copy`).

use crate::routines::processor::guard::{self, Registration};
use cbd_sys::memory::{Hint, Mapped};
use cbd_types::Result;
use rustix::process::{Resource, getrlimit};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

pub(crate) use cbd_sys::memory::Sharing;

/// Mapped memory whose failures are handled (see `guard`).
#[derive(Debug)]
pub(crate) struct Memory {
    /// Ends before the memory is unmapped, since fields are dropped in their order: the range may belong to another
    /// mapping as soon as munmap returns.
    _registration: Registration,
    mapped: Mapped,
    sharing: Sharing,
}

/// How much address space is reserved behind the memory of a region for its growth: so many times its size, within these bounds. It
/// costs no memory; a process has 128 TiB.
const RESERVED_TIMES: usize = 15;
const RESERVED_MIN: usize = 64 << 30;
const RESERVED_MAX: usize = 1 << 40;

/// Bytes of a huge page, on all processors that CBD supports.
const HUGE_PAGE: usize = 2 << 20;

impl Memory {
    /// Maps the first `length` bytes of a file, at an address that is suitable for huge pages.
    pub fn of_file(file: BorrowedFd<'_>, length: usize, sharing: Sharing) -> io::Result<Result<Self>> {
        let mapped = Mapped::file(file, 0, length, sharing, place_for_huge_pages(length))?;
        Ok(Self::register(mapped, sharing))
    }

    /// Maps the first `length` bytes of a device, which itself chooses a suitable address.
    pub fn of_device(file: BorrowedFd<'_>, length: usize, sharing: Sharing) -> io::Result<Result<Self>> {
        Ok(Self::register(Mapped::file(file, 0, length, sharing, 0)?, sharing))
    }

    /// Maps the first `length` bytes of a file or device at a multiple of `alignment`, with room to grow behind them. `None` if the
    /// system refuses this: the address space of the process may be limited.
    pub fn that_grows(
        file: BorrowedFd<'_>,
        length: usize,
        sharing: Sharing,
        alignment: usize,
    ) -> Option<Result<Self>> {
        // What is reserved would count there, and something else would lack it.
        if getrlimit(Resource::As).current.is_some() {
            return None;
        }
        let alignment = alignment.max(HUGE_PAGE);
        let wanted = length.saturating_mul(RESERVED_TIMES).clamp(RESERVED_MIN, RESERVED_MAX);
        // A sixteenth, and a sixteenth of that, where there is less.
        let mapped = [wanted, wanted >> 4, wanted >> 8].into_iter().find_map(|more| {
            let reserved = length.checked_add(more)?.checked_next_multiple_of(alignment)?;
            Mapped::file_that_grows(file, length, sharing, reserved, alignment).ok()
        })?;
        Some(Self::register(mapped, sharing))
    }

    /// Maps the file that it was made of, which has at least `length` bytes now, up to there.
    pub fn extend(&self, file: BorrowedFd<'_>, length: usize) -> io::Result<()> {
        self.mapped.extend(file, length, self.sharing)
    }

    /// Replaces the memory with nothing: each later access fails, and none reaches what was mapped.
    pub fn give_up(&self) -> io::Result<()> {
        self.mapped.give_up(crate::file::unnamed(c"cbd-given-up")?.as_fd())
    }

    /// Bytes that it can have.
    pub fn len_max(&self) -> usize {
        self.mapped.length_max()
    }

    /// Private memory of this process.
    pub fn scratch(length: usize) -> io::Result<Result<Self>> {
        Ok(Self::register(Mapped::anonymous(length)?, Sharing::Shared))
    }

    /// With the addresses into which it can grow: a fault there is one in this memory when something is mapped there.
    fn register(mapped: Mapped, sharing: Sharing) -> Result<Self> {
        let registration = guard::register(mapped.base().as_ptr() as usize, mapped.length_max())?;
        Ok(Self { _registration: registration, mapped, sharing })
    }

    /// Number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
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
        self.advise_from(0, hint)
    }

    /// Gives the kernel a hint about the memory from byte `from` on.
    pub fn advise_from(&self, from: usize, hint: Hint) -> io::Result<()> {
        self.mapped.advise(from..self.len(), hint)
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
