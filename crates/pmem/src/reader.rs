//! A region that is opened for reading only: mapped without write permission.
//!
//! Invariants: nothing in the region changes: no byte, not its size, not its holes. Other readers may open it at the same
//! time. No daemon can open the region meanwhile. If a daemon has it, the open is refused, and the daemon is not disturbed.
//!
//! Elsewhere: the meaning of the bytes.

use crate::boot::this_boot;
use crate::copy::{self, Fault};
use crate::errors::from_io;
use crate::file::{self, Locked};
use crate::identity::TMPFS;
use crate::mapping::available;
use crate::memory::{Memory, Sharing};
use crate::methods::{CopyMethod, Methods};
use crate::open::{address_space, check_minimum, check_type, device_length};
use cbd_sys::memory::Hint;
use cbd_types::{BootId, Error, ErrorKind, MediaError, Reach, Result};
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// A region, locked against daemons and mapped for reading.
#[derive(Debug)]
pub struct Reader {
    memory: Memory,
    methods: Methods,
    reach: Reach,
    /// Holds the lock of the region.
    _file: Locked,
}

impl Reader {
    /// Opens the region at `path`: a file or a device-DAX device.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] while a daemon has it; [`ErrorKind::NotFound`]; [`ErrorKind::InvalidArgument`] for
    /// objects that cannot be a region or are too small; and system errors.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let region = path.display();
        let not_opened =
            |error: io::Error| from_io(&error, format!("cannot open the region {region} for reading"));
        check_type(path, &fs::metadata(path).map_err(not_opened)?)?;
        let file = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
            .map_err(not_opened)?;
        let looked = file.metadata().map_err(not_opened)?;
        check_type(path, &looked)?;
        let file = match Locked::take_for_reading(file) {
            Ok(Ok(locked)) => locked,
            Ok(Err(file)) => {
                let who = cbd_holder::of_lock(file.as_fd()).unwrap_or_else(|| {
                    "a daemon that serves it, or a program or tool that changes it".to_owned()
                });
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!("the region {region} is in use by {who}; stop that first"),
                ));
            }
            Err(error) => return Err(from_io(&error, format!("cannot lock the region {region}"))),
        };
        let length = if looked.file_type().is_char_device() {
            device_length(path, &looked)?.1
        } else {
            // Checked before rounding: the error of a small file names its actual size.
            check_minimum(path, looked.len())?;
            looked.len() / file::page_size() * file::page_size()
        };
        check_minimum(path, length)?;
        let memory = Memory::of_file(file.as_fd(), address_space(path, length)?, Sharing::ReadOnly)
            .map_err(|error| from_io(&error, format!("cannot map the region {region}")))??;
        let _ = memory.advise(Hint::DontDump);
        let is_tmpfs = || file::file_system(&file).is_ok_and(|system| system.magic == TMPFS);
        let reach = if looked.file_type().is_char_device() || file::is_dax(&file) {
            Reach::Machines
        } else if is_tmpfs() {
            Reach::Guests
        } else {
            Reach::Kernel
        };
        // Only loads are used, and all store methods share them: nothing is measured.
        let first = available().stores.first().map_or(CopyMethod::Portable, |store| store.method);
        let methods = available().forced(first)?;
        Ok(Self { memory, methods, reach, _file: file })
    }

    /// The boot identifier of the machine that reads the region.
    #[must_use]
    pub fn boot(&self) -> BootId {
        this_boot()
    }

    /// Who may have the same memory, as in [`Pmem`](cbd_types::Pmem).
    #[must_use]
    pub const fn reach(&self) -> Reach {
        self.reach
    }

    /// The next loads of these bytes get what other machines have stored, as in [`Pmem`](cbd_types::Pmem).
    pub fn observe(&self, at: u64, length: usize) {
        // A line that cannot be evicted cannot be loaded either, which the load reports.
        let _ = copy::evict(&self.memory, available(), at, length);
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Bytes of the region.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Whether the size of the region is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies from the region; unreadable memory becomes an error.
    ///
    /// # Errors
    /// The offset at which the memory could not be read, or which is outside of the region.
    pub fn load(&self, at: u64, into: &mut [u8]) -> core::result::Result<(), MediaError> {
        copy::load(&self.memory, &self.methods, at, into).map_err(|fault| self.media_error(fault, at))
    }

    /// As [`load`](Self::load), and returns the CRC32C of the bytes that were copied.
    ///
    /// # Errors
    /// The offset at which the memory could not be read, or which is outside of the region.
    pub fn load_summed(&self, at: u64, into: &mut [u8]) -> core::result::Result<u32, MediaError> {
        copy::load_summed(&self.memory, &self.methods, at, into).map_err(|fault| self.media_error(fault, at))
    }

    fn media_error(&self, fault: Fault, at: u64) -> MediaError {
        let at = match fault {
            Fault::Failed(failure) => {
                (failure.address.saturating_sub(self.memory.base()) as u64).clamp(at, self.len())
            }
            Fault::Outside => at,
        };
        MediaError { at }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mapping, OpenOptions};

    fn region(size: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(size).expect("its size");
        file
    }

    #[test]
    fn data_is_read_and_holes_stay_holes() {
        use std::os::unix::fs::{FileExt, MetadataExt};
        let file = region(1 << 20);
        file.as_file().write_all_at(b"here", 5000).expect("written");
        let blocks = file.as_file().metadata().expect("known").blocks();
        let reader = Reader::open(file.path()).expect("opened");
        assert_eq!(reader.len(), 1 << 20);
        let mut read = [0; 4];
        reader.load(5000, &mut read).expect("read");
        assert_eq!(&read, b"here");
        assert_eq!(reader.load((1 << 20) - 2, &mut read), Err(MediaError { at: (1 << 20) - 2 }));
        drop(reader);
        let after = file.as_file().metadata().expect("known");
        assert_eq!((after.len(), after.blocks()), (1 << 20, blocks));
    }

    #[test]
    fn a_region_has_many_readers_or_one_owner() {
        let file = region(1 << 20);
        let first = Reader::open(file.path()).expect("opened");
        let second = Reader::open(file.path()).expect("opened");
        let held = Mapping::open(file.path(), &OpenOptions::default());
        assert_eq!(held.expect_err("is being read").kind(), ErrorKind::Busy);
        drop((first, second));
        let held = Mapping::open(file.path(), &OpenOptions::default()).expect("no reader");
        assert_eq!(Reader::open(file.path()).expect_err("is held").kind(), ErrorKind::Busy);
        drop(held);
        assert!(Reader::open(file.path()).is_ok());
    }

    #[test]
    fn objects_that_are_no_region_are_refused() {
        let kind = |path: &Path| Reader::open(path).expect_err("is no region").kind();
        assert_eq!(kind(Path::new("/no/such/region")), ErrorKind::NotFound);
        assert_eq!(kind(Path::new("/dev")), ErrorKind::InvalidArgument);
        assert_eq!(kind(Path::new("/dev/null")), ErrorKind::InvalidArgument);
        assert_eq!(kind(region(0).path()), ErrorKind::InvalidArgument);
        assert_eq!(kind(region(5000).path()), ErrorKind::InvalidArgument);
    }

    #[test]
    fn a_load_from_a_truncated_region_is_an_error() {
        let file = region(1 << 20);
        let reader = Reader::open(file.path()).expect("opened");
        file.as_file().set_len(64 << 10).expect("cut");
        let mut read = [0; 64];
        assert!(reader.load(512 << 10, &mut read).is_err());
        assert!(reader.load(0, &mut read).is_ok());
    }
}
