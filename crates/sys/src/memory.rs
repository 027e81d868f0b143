//! Mapped memory, and hints about ranges of memory.
//!
//! Invariants: a mapping is unmapped when its [`Mapped`] is dropped, and no Rust reference to its bytes is created here:
//! other processes may change them. A hint changes no byte. A mapping that grows stays at its address: it grows into addresses that
//! were reserved when it was made.

use crate::checked;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::mm::{
    Advice, MapFlags, MsyncFlags, ProtFlags, madvise, mmap, mmap_anonymous, msync, munlock, munmap,
};
use rustix::param::page_size;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut, without_provenance_mut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// How memory is mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// Of a file: stores reach the medium without a system call, or the mapping is refused.
    Synchronous,
    /// Of a file: stores reach the page cache or the device.
    Shared,
    /// Of a file: no stores; no page becomes dirty.
    ReadOnly,
    /// As [`ReadOnly`](Self::ReadOnly), with all pages mapped at once.
    ReadOnlyPopulated,
}

impl Sharing {
    const fn flags(self) -> (ProtFlags, MapFlags) {
        let writable = ProtFlags::READ.union(ProtFlags::WRITE);
        match self {
            Self::Synchronous => (writable, MapFlags::SHARED_VALIDATE.union(MapFlags::SYNC)),
            Self::Shared => (writable, MapFlags::SHARED),
            Self::ReadOnly => (ProtFlags::READ, MapFlags::SHARED),
            Self::ReadOnlyPopulated => (ProtFlags::READ, MapFlags::SHARED.union(MapFlags::POPULATE)),
        }
    }
}

/// A hint to the kernel about pages of a mapping, which changes no byte of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hint {
    /// Use huge pages.
    HugePages,
    /// Map all pages now, for reading.
    PopulateForReading,
    /// Map all pages now, for writing.
    Populate,
    /// Leave them out of core dumps.
    DontDump,
    /// Leave them out of forked children.
    DontFork,
}

impl Hint {
    const fn advice(self) -> Advice {
        match self {
            Self::HugePages => Advice::LinuxHugepage,
            Self::PopulateForReading => Advice::LinuxPopulateRead,
            Self::Populate => Advice::LinuxPopulateWrite,
            Self::DontDump => Advice::LinuxDontDump,
            Self::DontFork => Advice::LinuxDontFork,
        }
    }
}

/// Anonymous memory with a descriptor, for other processes: `length` bytes of zeroes. The length cannot change, so no process that has it
/// mapped gets SIGBUS.
///
/// # Errors
/// The system error.
pub fn sealed(name: &CStr, length: u64) -> io::Result<File> {
    let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.set_len(length)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// A mapping, which this value owns.
#[derive(Debug)]
pub struct Mapped {
    base: NonNull<u8>,
    /// Bytes that can be accessed. Raised after more of them were mapped.
    length: AtomicUsize,
    /// Bytes of address space that belong to this value; those behind `length` cannot be accessed.
    reserved: AtomicUsize,
    /// Held while more is mapped.
    extending: Mutex<()>,
}

// SAFETY: the memory belongs to the process, not to a thread.
unsafe impl Send for Mapped {}
// SAFETY: this type only returns a pointer; an access through it is the caller's.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps `length` bytes of a file from offset `offset`, at the address `hint` if that is free; 0 is no hint.
    ///
    /// # Errors
    /// The system error.
    pub fn file(
        file: BorrowedFd<'_>,
        offset: u64,
        length: usize,
        sharing: Sharing,
        hint: usize,
    ) -> io::Result<Self> {
        let (protection, flags) = sharing.flags();
        let hint = without_provenance_mut(hint);
        // SAFETY: the address is only a hint: the mapping touches no memory that is in use.
        Self::new(unsafe { mmap(hint, length, protection, flags, file, offset) }?.cast(), length)
    }

    /// Maps the first `length` bytes of a file at the beginning of `reserved` bytes of address space, into which the mapping can
    /// [grow](Self::extend). The address is a multiple of `alignment`, which is one of the page.
    ///
    /// # Errors
    /// The system error.
    pub fn file_that_grows(
        file: BorrowedFd<'_>,
        length: usize,
        sharing: Sharing,
        reserved: usize,
        alignment: usize,
    ) -> io::Result<Self> {
        // A mapping that the system refuses for its kind is refused here, where it replaces nothing.
        drop(Self::file(file, 0, alignment.min(length), sharing, 0)?);
        let all = reserved.checked_add(alignment).ok_or(io::ErrorKind::InvalidInput)?;
        let place = Self::reserved(all)?;
        let first = place.base.as_ptr().addr();
        let head = first.next_multiple_of(alignment) - first;
        // SAFETY: the offset is within the range that was reserved.
        let base = unsafe { place.base.add(head) };
        // The range up to the aligned address is not needed, nor is what is behind the last byte.
        // SAFETY: parts of the range that was just reserved: nothing refers to them. The rest is owned by the value below.
        unsafe {
            if head > 0 {
                munmap(place.base.as_ptr().cast(), head)?;
            }
            munmap(base.as_ptr().add(reserved).cast(), alignment - head)?;
        }
        // If the process locks its memory, this is none of it.
        let _ = unlock(base.as_ptr().addr(), reserved);
        std::mem::forget(place);
        let (length_now, reserved) = (AtomicUsize::new(0), AtomicUsize::new(reserved));
        let mapped = Self { base, length: length_now, reserved, extending: Mutex::new(()) };
        mapped.extend(file, length, sharing)?;
        Ok(mapped)
    }

    /// Maps more of a file, up to its byte `length`, behind what is mapped of it. Both ends are those of pages.
    ///
    /// # Errors
    /// [`io::ErrorKind::OutOfMemory`] beyond the addresses that were reserved, [`io::ErrorKind::InvalidInput`] for a length that is
    /// not larger; the system error. What was mapped stays.
    pub fn extend(&self, file: BorrowedFd<'_>, length: usize, sharing: Sharing) -> io::Result<()> {
        let _extending = self.extending.lock().unwrap_or_else(PoisonError::into_inner);
        let from = self.length();
        if length > self.reserved.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let more = length.checked_sub(from).filter(|more| *more > 0).ok_or(io::ErrorKind::InvalidInput)?;
        let (protection, flags) = sharing.flags();
        // SAFETY: the range is reserved and nothing refers to it, since it is behind the length.
        let placed = unsafe {
            let at = self.base.as_ptr().add(from).cast();
            mmap(at, more, protection, flags | MapFlags::FIXED, file, from as u64)
        };
        if let Err(error) = placed {
            // The kernel may have removed the reservation. If it cannot be made again, its addresses may be those of another
            // mapping: they are given up.
            // SAFETY: this flag replaces nothing that is mapped.
            let again = unsafe {
                let at = self.base.as_ptr().add(from).cast();
                let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED_NOREPLACE;
                mmap_anonymous(at, more, ProtFlags::empty(), flags)
            };
            if again.is_err() {
                self.reserved.store(from, Ordering::Relaxed);
            }
            return Err(error.into());
        }
        self.length.store(length, Ordering::Release);
        Ok(())
    }

    /// Replaces the memory with that of `empty`, a file without a byte: from now on each access raises SIGBUS, and none reaches what
    /// was mapped.
    ///
    /// # Errors
    /// The system error; it is then not known which part was replaced.
    pub fn give_up(&self, empty: BorrowedFd<'_>) -> io::Result<()> {
        let _extending = self.extending.lock().unwrap_or_else(PoisonError::into_inner);
        let (protection, flags) = Sharing::Shared.flags();
        let length = self.reserved.load(Ordering::Relaxed);
        // SAFETY: the range belongs to this value, and no Rust reference to its bytes exists.
        unsafe { mmap(self.base.as_ptr().cast(), length, protection, flags | MapFlags::FIXED, empty, 0) }?;
        Ok(())
    }

    /// Bytes up to which it can grow.
    #[must_use]
    pub fn length_max(&self) -> usize {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Private memory of this process: zeroes.
    ///
    /// # Errors
    /// The system error.
    pub fn anonymous(length: usize) -> io::Result<Self> {
        Self::without_file(length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    }

    /// A range of addresses that cannot be accessed.
    ///
    /// # Errors
    /// The system error.
    pub fn reserved(length: usize) -> io::Result<Self> {
        Self::without_file(length, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)
    }

    fn without_file(length: usize, protection: ProtFlags, flags: MapFlags) -> io::Result<Self> {
        // SAFETY: a mapping at an address of the kernel's choice touches no memory that is in use.
        Self::new(unsafe { mmap_anonymous(null_mut(), length, protection, flags) }?.cast(), length)
    }

    fn new(base: *mut u8, length: usize) -> io::Result<Self> {
        let base = NonNull::new(base).ok_or_else(|| io::Error::other("the system mapped at address 0"))?;
        let (now, reserved) = (AtomicUsize::new(length), AtomicUsize::new(length));
        Ok(Self { base, length: now, reserved, extending: Mutex::new(()) })
    }

    /// The first byte; valid for [`length`](Self::length) bytes while this value lives.
    #[must_use]
    pub const fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes.
    #[inline]
    #[must_use]
    pub fn length(&self) -> usize {
        self.length.load(Ordering::Relaxed)
    }

    /// A pointer to `length` bytes at `offset`, if all of them are inside.
    #[inline]
    #[must_use]
    pub fn pointer(&self, offset: u64, length: usize) -> Option<*mut u8> {
        let end = offset.checked_add(length as u64)?;
        if end > self.length() as u64 {
            return None;
        }
        // SAFETY: the offset is at most the length of the mapping, so the pointer stays in or just past it.
        Some(unsafe { self.base.as_ptr().add(offset as usize) })
    }

    /// Gives the kernel a hint about a range, which begins a page.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a range that is not inside; the system error.
    pub fn advise(&self, range: Range<usize>, hint: Hint) -> io::Result<()> {
        let first = self.pointer(range.start as u64, range.len()).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the range is in this mapping; no hint changes a byte of it.
        Ok(unsafe { madvise(first.cast(), range.len(), hint.advice()) }?)
    }

    /// Returns when the present content of a range, which begins a page, is on the disk.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a range that is not inside; the system error.
    pub fn sync(&self, range: Range<usize>) -> io::Result<()> {
        let first = self.pointer(range.start as u64, range.len()).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the range is in this mapping; no byte changes.
        Ok(unsafe { msync(first.cast(), range.len(), MsyncFlags::SYNC) }?)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this value alone owns the mapping, and pointers into it live no longer than it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), *self.reserved.get_mut()) };
    }
}

/// Makes huge pages of the present pages of `length` bytes from `address`, which begins a page.
///
/// # Errors
/// The system error; ENOMEM for a range that is not mapped.
pub fn collapse(address: usize, length: usize) -> io::Result<()> {
    // SAFETY: changes no byte and no mapping.
    checked(unsafe { libc::madvise(without_provenance_mut(address), length, libc::MADV_COLLAPSE) })?;
    Ok(())
}

/// Unlocks the pages of a range.
///
/// # Errors
/// The system error; ENOMEM for a range that is not mapped.
pub fn unlock(address: usize, length: usize) -> io::Result<()> {
    // SAFETY: changes no byte and no mapping.
    Ok(unsafe { munlock(without_provenance_mut(address), length) }?)
}

/// Returns the whole pages of `zeroes`, which the allocator made, to the system until they are touched again, also while
/// they are locked (Linux 5.18). They read as zeroes afterwards. If the kernel refuses, nothing changes.
pub fn release_pages(zeroes: &mut [u8]) {
    let page = page_size();
    let bytes = zeroes.len() / page * page;
    if zeroes.as_ptr().addr().is_multiple_of(page) {
        // SAFETY: whole pages of a slice that is borrowed exclusively; any bytes are valid there.
        let _ = unsafe { madvise(zeroes.as_mut_ptr().cast(), bytes, Advice::LinuxDontneedLocked) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_file_is_mapped_at_a_free_hint() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let free = Mapped::reserved(1 << 20).unwrap().base().as_ptr().addr();
        let mapped = Mapped::file(file.as_fd(), 4096, 8192, Sharing::Shared, free).unwrap();
        // Another thread may have taken the address meanwhile.
        assert_eq!((mapped.base().as_ptr().addr() % 4096, mapped.length()), (0, 8192));
        mapped.advise(4096..8192, Hint::DontDump).unwrap();
        mapped.sync(0..8192).unwrap();
        assert_eq!(mapped.sync(4096..8193).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_mapping_grows_at_its_address_into_what_was_reserved() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 << 10).unwrap();
        let mapped =
            Mapped::file_that_grows(file.as_fd(), 8192, Sharing::Shared, 32 << 10, 16 << 10).unwrap();
        let base = mapped.base().as_ptr().addr();
        assert_eq!((base % (16 << 10), mapped.length(), mapped.length_max()), (0, 8192, 32 << 10));
        assert!(mapped.pointer(8192, 1).is_none());
        mapped.extend(file.as_fd(), 32 << 10, Sharing::Shared).unwrap();
        let last = mapped.pointer((32 << 10) - 1, 1).unwrap();
        // SAFETY: a byte of the mapping, which no other thread accesses.
        unsafe { last.write_volatile(7) };
        let mut read = [0];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut read, (32 << 10) - 1).unwrap();
        assert_eq!((read, mapped.base().as_ptr().addr(), mapped.length()), ([7], base, 32 << 10));
        let kind = |length| mapped.extend(file.as_fd(), length, Sharing::Shared).unwrap_err().kind();
        assert_eq!(kind((32 << 10) + 4096), io::ErrorKind::OutOfMemory);
        assert_eq!(kind(4096), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_mapping_that_the_system_does_not_let_grow_keeps_what_it_has() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 << 10).unwrap();
        let mapped = Mapped::file_that_grows(file.as_fd(), 8192, Sharing::Shared, 64 << 10, 4096).unwrap();
        let unreadable = std::fs::File::options().write(true).open("/dev/null").unwrap();
        mapped.extend(unreadable.as_fd(), 16 << 10, Sharing::Shared).unwrap_err();
        assert_eq!(mapped.length(), 8192);
        mapped.sync(0..8192).unwrap();
    }

    #[test]
    fn released_pages_read_as_zeroes_and_bytes_beyond_them_stay() {
        let mut bytes = vec![7_u8; 5 * 4096];
        let start = bytes.as_ptr().align_offset(4096);
        bytes[start..start + 8192].fill(0);
        release_pages(&mut bytes[start..start + 8192 + 100]);
        assert!(bytes[start..start + 8192].iter().all(|&byte| byte == 0));
        assert!(bytes[start + 8192..].iter().all(|&byte| byte == 7));
    }

    #[test]
    fn a_range_that_is_not_mapped_is_an_error() {
        assert!(collapse(4096, 4096).is_err());
        assert!(unlock(4096, 4096).is_err());
    }
}
