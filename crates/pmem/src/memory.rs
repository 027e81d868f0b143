//! A range of mapped memory: mapped, advised, unmapped.
//!
//! Invariants: the memory stays mapped while its [`Memory`] lives, and no Rust reference to its bytes is ever
//! created: other processes may change them. A pointer is returned only after a bounds check.
//!
//! Elsewhere: the choice of the file (`open`), copying (`copy`).

use crate::routines::processor::guard::{self, Registration};
use cbd_types::Result;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{NonNull, null_mut};

/// Mapped memory whose failures are handled (see `guard`).
#[derive(Debug)]
pub(crate) struct Memory {
    /// Ends before the memory is unmapped: the range may belong to another mapping as soon as munmap returns.
    registration: Option<Registration>,
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the memory belongs to the process, not to a thread.
unsafe impl Send for Memory {}
// SAFETY: the bytes are only accessed by the routines, through pointers; two that access the same bytes at
// once mix them, as two processes that share the region would, which the engine has to prevent.
unsafe impl Sync for Memory {}

/// How a file is mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sharing {
    /// Stores reach the medium without a system call, or the mapping is refused.
    Synchronous,
    /// Stores reach the page cache or the device.
    Shared,
    /// No stores: pages cannot be written, and none becomes dirty.
    ReadOnly,
}

/// Bytes of a huge page, on all processors that CBD supports.
const HUGE_PAGE: usize = 2 << 20;

const READ_AND_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

impl Memory {
    /// Maps the first `length` bytes of a file, at an address where huge pages fit.
    pub fn of_file(file: BorrowedFd<'_>, length: usize, sharing: Sharing) -> io::Result<Result<Self>> {
        Self::of(file, length, sharing, place_for_huge_pages(length))
    }

    /// Maps the first `length` bytes of a device, which itself chooses a suitable address.
    pub fn of_device(file: BorrowedFd<'_>, length: usize, sharing: Sharing) -> io::Result<Result<Self>> {
        Self::of(file, length, sharing, null_mut())
    }

    fn of(
        file: BorrowedFd<'_>,
        length: usize,
        sharing: Sharing,
        place: *mut libc::c_void,
    ) -> io::Result<Result<Self>> {
        let flags = match sharing {
            Sharing::Synchronous => libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC,
            Sharing::Shared | Sharing::ReadOnly => libc::MAP_SHARED,
        };
        let protection = match sharing {
            Sharing::ReadOnly => libc::PROT_READ,
            Sharing::Synchronous | Sharing::Shared => READ_AND_WRITE,
        };
        Self::map(place, length, protection, flags, file.as_raw_fd())
    }

    /// Private memory of this process.
    pub fn scratch(length: usize) -> io::Result<Result<Self>> {
        Self::map(null_mut(), length, READ_AND_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    /// Maps at `place` if that is free. The outer error is the mapping's, the inner one the handler's.
    fn map(
        place: *mut libc::c_void,
        length: usize,
        protection: libc::c_int,
        flags: libc::c_int,
        descriptor: libc::c_int,
    ) -> io::Result<Result<Self>> {
        // SAFETY: the address is only a hint: the mapping touches no memory that is in use.
        let base = unsafe { libc::mmap(place, length, protection, flags, descriptor, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let Some(base) = NonNull::new(base.cast::<u8>()) else {
            return Err(io::Error::other("the system mapped at address 0"));
        };
        match guard::register(base.as_ptr() as usize, length) {
            Ok(registration) => Ok(Ok(Self { registration: Some(registration), base, length })),
            Err(error) => {
                // SAFETY: the mapping was made above and has no other user.
                unsafe { libc::munmap(base.as_ptr().cast(), length) };
                Ok(Err(error))
            }
        }
    }

    /// Number of bytes.
    pub const fn len(&self) -> usize {
        self.length
    }

    /// The address of the first byte.
    pub fn base(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// A pointer to `length` mapped bytes, if all of them are inside.
    #[inline]
    pub fn pointer(&self, at: u64, length: usize) -> Option<*mut u8> {
        let end = at.checked_add(length as u64)?;
        if end > self.length as u64 {
            return None;
        }
        // SAFETY: `at` is at most the length of the mapping, so the pointer stays in or just past it.
        Some(unsafe { self.base.as_ptr().add(at as usize) })
    }

    /// Applies one of the kernel's `MADV_` hints to all of the memory.
    pub fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        self.advise_range(0..self.length, advice)
    }

    /// Returns when the present content of the pages with these `length` bytes at `at` is on the disk.
    pub fn sync(&self, at: u64, length: u64) -> io::Result<()> {
        let page = crate::file::page_size();
        let start = at / page * page;
        let end = at.saturating_add(length).min(self.length as u64);
        let length = usize::try_from(end.saturating_sub(start)).map_err(|_| io::ErrorKind::InvalidInput)?;
        let first = self.pointer(start, length).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the range is in this mapping and begins with a page; no byte changes.
        if unsafe { libc::msync(first.cast(), length, libc::MS_SYNC) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// As [`advise`](Self::advise), for a part of it that begins with a page.
    pub fn advise_range(&self, range: Range<usize>, advice: libc::c_int) -> io::Result<()> {
        let inside = self.pointer(range.start as u64, range.len()).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the range is in this mapping; only hints that change no byte are given (see the callers).
        if unsafe { libc::madvise(inside.cast(), range.len(), advice) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        drop(self.registration.take());
        // SAFETY: this value alone owns the mapping, and pointers into it live no longer than a call that
        // borrows it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// A free address for `length` bytes that begins with a huge page, or null. Another mapping can take it
/// before it is used; the kernel then chooses the address, and the pages are small.
fn place_for_huge_pages(length: usize) -> *mut libc::c_void {
    let Some(longer) = length.checked_add(HUGE_PAGE).filter(|_| length >= HUGE_PAGE) else {
        return null_mut();
    };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a mapping at an address of the kernel's choice touches no memory that is in use.
    let free = unsafe { libc::mmap(null_mut(), longer, libc::PROT_NONE, flags, -1, 0) };
    if free == libc::MAP_FAILED {
        return null_mut();
    }
    // SAFETY: the mapping was made above and has no other user.
    unsafe { libc::munmap(free, longer) };
    free.map_addr(|address| address.next_multiple_of(HUGE_PAGE))
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
