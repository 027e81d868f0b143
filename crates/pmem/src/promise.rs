//! What a region survives: the durability of a file or device, and why it is no better.
//!
//! Invariants: durability is what the kernel and the platform report, never what a user assumes. The answer for a path
//! ([`promise`]) is that of opening it as a region, and changes nothing: no lock is taken, no byte is stored.
//!
//! Elsewhere: opening a region (`open`), the properties of devices (`sysfs`).

use crate::errors::from_io;
use crate::file;
use crate::identity::{HUGETLBFS, TMPFS, file_system_name};
use crate::mapping::{Kind, available};
use crate::memory::{Memory, Sharing};
use crate::open::{address_space, check_type, device_length};
use crate::processor::Flush;
use crate::sysfs::{self, PowerFailure, SYS};
use cbd_sys::DeviceNumber;
use cbd_types::{Durability, Result};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// What a region at a path would survive.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Promise {
    /// The kind of the region.
    pub kind: Kind,
    /// The failure that it survives.
    pub durability: Durability,
    /// The type of its file system, or `devdax`.
    pub file_system: String,
    /// Why it is no better, and what may be wrong.
    pub warnings: Vec<String>,
}

/// The durability that the region at `path` has, or would have, without opening it as a region: it may be in use.
///
/// # Errors
/// What cannot be a region, and system errors.
pub fn promise(path: &Path) -> Result<Promise> {
    let region = path.display();
    let not_looked = |error: io::Error| from_io(&error, format!("cannot look at the region {region}"));
    check_type(path, &fs::metadata(path).map_err(not_looked)?)?;
    // A synchronous mapping needs a file that is open for writing; nothing is stored through it.
    let (file, may_write) = match open(path, true) {
        Err(error) if refuses_writing(&error) => (open(path, false).map_err(not_looked)?, false),
        opened => (opened.map_err(not_looked)?, true),
    };
    let looked = file.metadata().map_err(not_looked)?;
    check_type(path, &looked)?;
    let flush = available().processor.flush;
    if looked.file_type().is_char_device() {
        let (directory, ..) = device_length(path, &looked)?;
        let (durability, warnings) = of_device(&directory, flush);
        return Ok(Promise { kind: Kind::DeviceDax, durability, file_system: "devdax".to_owned(), warnings });
    }
    let system = file::file_system(&file).map_err(not_looked)?;
    let dax = file::is_dax(&file);
    let synchronous = if may_write { is_synchronous(path, &file, &looked)? } else { dax };
    let kind = kind_of_file(synchronous, system.magic);
    let file_system = file_system_name(system.magic);
    let (durability, mut warnings) = of_file(path, kind, dax, &looked, &file_system, flush);
    if kind == Kind::DaxFile && !may_write {
        warnings.push(format!(
            "{region} may not be opened for writing by this user, so whether its mapping is synchronous could not be tried"
        ));
    }
    Ok(Promise { kind, durability, file_system, warnings })
}

fn open(path: &Path, write: bool) -> io::Result<File> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    fs::OpenOptions::new().read(true).write(write).custom_flags(flags).open(path)
}

fn refuses_writing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS | libc::ETXTBSY))
}

/// Whether the kernel maps the file so that stores reach the medium without a system call.
fn is_synchronous(path: &Path, file: &File, looked: &Metadata) -> Result<bool> {
    // An empty file has no page to map; the flag is checked all the same.
    let length = address_space(path, looked.len().clamp(1, file::page_size()))?;
    match Memory::of_file(file.as_fd(), length, Sharing::Synchronous) {
        Ok(memory) => memory.map(|_| true),
        Err(_) => Ok(false),
    }
}

/// The kind of a file that is mapped, synchronously or not, on a file system with this magic number.
pub(crate) fn kind_of_file(synchronous: bool, magic: u64) -> Kind {
    if synchronous {
        Kind::DaxFile
    } else if matches!(magic, TMPFS | HUGETLBFS) {
        Kind::Tmpfs
    } else {
        Kind::File
    }
}

/// The durability of a file, and warnings.
pub(crate) fn of_file(
    path: &Path,
    kind: Kind,
    dax: bool,
    looked: &Metadata,
    file_system: &str,
    flush: Flush,
) -> (Durability, Vec<String>) {
    let region = path.display();
    match kind {
        Kind::DaxFile => {
            let device = DeviceNumber::from_stat(looked.dev());
            let directory = sysfs::of_block_device(Path::new(SYS), device);
            // A synchronous mapping is only a guarantee of the file system; power-failure durability requires the platform's
            // own statement.
            let keeps = directory.map_or(PowerFailure::NotStated, |place| sysfs::power_failure(&place));
            of_memory(keeps, flush)
        }
        Kind::File if dax => {
            let text = format!(
                "{region} is a DAX file, but its device needs a system call to make stores durable (as virtio-pmem \
                 does): the region survives the process, not a power failure"
            );
            (Durability::ProcessCrash, vec![text])
        }
        Kind::File => {
            let text = format!(
                "{region} lies in the page cache of {file_system}: a power failure loses what is in it, and stores can \
                 stall while the kernel writes pages back; for a trial a file in /dev/shm is faster, for real use it \
                 has to be a DAX file or device"
            );
            (Durability::ProcessCrash, vec![text])
        }
        _ => (Durability::ProcessCrash, Vec::new()),
    }
}

/// The durability of the device with this directory in `/sys`, and warnings.
pub(crate) fn of_device(directory: &Path, flush: Flush) -> (Durability, Vec<String>) {
    of_memory(sysfs::power_failure(directory), flush)
}

/// Durability only if the platform ensures it.
fn of_memory(keeps: PowerFailure, flush: Flush) -> (Durability, Vec<String>) {
    if flush == Flush::None {
        let text = "the region is persistent memory, but this program knows no instruction that brings stores to it on \
                    this processor: they survive the process, not a power failure";
        return (Durability::ProcessCrash, vec![text.to_owned()]);
    }
    match keeps {
        PowerFailure::Kept => (Durability::PowerFail, Vec::new()),
        PowerFailure::NotStated => {
            let text = "the kernel treats the region as persistent memory, but the platform does not state that it keeps \
                        it when the power fails (memory set aside with memmap= is plain memory)";
            (Durability::PowerFail, vec![text.to_owned()])
        }
        PowerFailure::Lost => {
            let text = "the region's memory is volatile: it survives the process, not a power failure";
            (Durability::ProcessCrash, vec![text.to_owned()])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpenOptions;
    use crate::mapping::Mapping;
    use cbd_types::ErrorKind;

    #[test]
    fn the_promise_of_a_region_is_that_of_its_mapping_also_while_it_is_in_use() {
        for folder in [std::env::temp_dir(), "/dev/shm".into()] {
            let folder = tempfile::tempdir_in(folder).expect("a folder");
            let path = folder.path().join("region");
            let options = OpenOptions { size: Some(1 << 20), create: true, ..OpenOptions::default() };
            let mapping = Mapping::open(&path, &options).expect("a region");
            let (info, promised) = (mapping.info(), promise(&path).expect("known"));
            assert_eq!((promised.kind, promised.durability), (info.kind, info.durability));
            assert_eq!(promised.warnings, info.warnings);
        }
    }

    #[test]
    fn a_promise_changes_nothing_and_what_is_no_region_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("empty");
        fs::write(&path, "").expect("a file");
        assert_eq!(promise(&path).expect("known").durability, Durability::ProcessCrash);
        assert_eq!(fs::metadata(&path).expect("it is there").len(), 0);
        assert_eq!(promise(folder.path()).expect_err("a folder").kind(), ErrorKind::InvalidArgument);
        assert!(promise(&path.join("none")).is_err());
    }

    #[test]
    fn durability_is_what_the_platform_states() {
        for (keeps, flush, durability, warnings) in [
            (PowerFailure::Kept, Flush::Clwb, Durability::PowerFail, 0),
            (PowerFailure::NotStated, Flush::Clwb, Durability::PowerFail, 1),
            (PowerFailure::Lost, Flush::Clwb, Durability::ProcessCrash, 1),
            (PowerFailure::Kept, Flush::None, Durability::ProcessCrash, 1),
        ] {
            let found = of_memory(keeps, flush);
            assert_eq!((found.0, found.1.len()), (durability, warnings), "{keeps:?} {flush:?}");
        }
    }
}
