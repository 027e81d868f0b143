//! Files that a front end hands over besides the guest's memory, mapped: the log of dirty pages, the requests in flight.
//!
//! Invariants: a mapping is no larger than its file was when it was mapped; a later truncation is detected
//! ([`MappedFile::is_lost`]); the bytes are accessed only by atomics, since the front end may change them at any time.

use crate::malformed;
use crate::threads::name_of;
use cbd_guard::Registration;
use cbd_types::Result;
use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

/// The type of the file system of huge pages (`HUGETLBFS_MAGIC`).
const HUGETLBFS: i64 = 0x9584_58F6;

/// A part of a file.
#[derive(Debug)]
pub(crate) struct MappedFile {
    // In this order: the address range is deregistered before it is unmapped.
    guard: Registration,
    mapping: MmapRegion,
}

impl MappedFile {
    /// Maps `size` bytes at `offset` of `file`, which is `what` in errors.
    pub(crate) fn open(file: File, offset: u64, size: u64, what: &str) -> Result<Self> {
        let refused = |why: String| malformed(format!("{what} cannot be used: {why}"));
        let bytes = usize::try_from(size).ok().filter(|&bytes| bytes > 0);
        let bytes = bytes.ok_or_else(|| refused(format!("it has {size} bytes")))?;
        check_size(&file, offset, size).map_err(refused)?;
        let mapping = MmapRegion::from_file(FileOffset::new(file, offset), bytes)
            .map_err(|error| refused(error.to_string()))?;
        // SAFETY: `MappedFile` drops the mapping after this; all accesses are atomic, and the front end may change the
        // memory at any time.
        let guard = unsafe { Registration::of_zeroes(mapping.as_ptr() as usize, mapping.size()) }?;
        Ok(Self { guard, mapping })
    }

    /// The bytes.
    pub(crate) fn bytes(&self) -> VolatileSlice<'_> {
        self.mapping.as_volatile_slice()
    }

    /// Number of bytes.
    pub(crate) fn size(&self) -> usize {
        self.mapping.size()
    }

    /// Whether the file was truncated: since then all bytes are zeroes of this process.
    pub(crate) fn is_lost(&self) -> bool {
        self.guard.is_lost()
    }

    /// The name of the file, from the kernel.
    pub(crate) fn name(&self) -> Option<String> {
        self.mapping.file_offset().map(|mapped| name_of(mapped.file()))
    }
}

/// Checks that a file has `size` bytes at `offset`, in whole huge pages if it has these: the kernel maps no part of one, and does
/// not unmap or replace one either. Devices, which do not report a size, are not checked.
pub(crate) fn check_size(file: &File, offset: u64, size: u64) -> std::result::Result<(), String> {
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    let end = offset.checked_add(size).ok_or("its range in the file overflows")?;
    let system = rustix::fs::fstatfs(file).map_err(|error| error.to_string())?;
    let page = u64::try_from(system.f_bsize).unwrap_or(0).max(1);
    if system.f_type == HUGETLBFS && !(offset.is_multiple_of(page) && size.is_multiple_of(page)) {
        return Err(format!(
            "its file has huge pages of {page} bytes, and its offset {offset} and size {size} are no multiples of that"
        ));
    }
    if metadata.file_type().is_char_device() || end <= metadata.len() {
        return Ok(());
    }
    Err(format!("its file has {} bytes and it ends at {end}", metadata.len()))
}
