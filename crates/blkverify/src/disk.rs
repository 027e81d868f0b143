//! Disks and files that are looked at by this process.
//!
//! Invariants: they are opened for reading, shared with all others.

use crate::cli::Offload;
use crate::look::{Look, Readers};
use crate::queue::{DEPTH, Queue};
use cbd_backing::Examined;
use cbd_sys::DeviceNumber;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::{File, FileType};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

/// The alignment that every file system accepts for direct I/O.
const FILE_SECTOR: u64 = 4096;

/// A block device.
pub struct Disk {
    /// Its number.
    pub number: DeviceNumber,
    /// Bytes, in whole sectors.
    pub size: u64,
    /// Bytes of a sector.
    pub sector: u64,
    /// Looks at it.
    pub look: Box<dyn Look>,
    examined: Examined,
}

impl Disk {
    /// Opens the block device at `path`.
    ///
    /// # Errors
    /// The error says what is wrong and what to do.
    pub fn open(path: &Path, offload: Offload, name: &str) -> Result<Self> {
        let status = std::fs::metadata(path).map_err(|error| refused(name, error))?;
        if !status.file_type().is_block_device() {
            return Err(Error::new(ErrorKind::InvalidArgument, format!("{name} is no block device")));
        }
        let examined = Examined::open(path, offload.into())?;
        let geometry = examined.geometry();
        Ok(Self {
            number: DeviceNumber::from_stat(status.rdev()),
            size: geometry.size,
            sector: u64::from(geometry.sector),
            look: Box::new(Queue::new(examined.open_queue(DEPTH)?)),
            examined,
        })
    }

    /// How it is looked at, and why not better; a command that fails is not used any more, so this changes.
    #[must_use]
    pub fn method(&self) -> String {
        self.examined.method()
    }
}

/// A regular file, which is looked at through its file system.
pub struct Through {
    /// The file.
    pub file: Arc<File>,
    /// The smallest request.
    pub sector: u64,
    /// How it is looked at.
    pub method: String,
    /// Looks at it.
    pub look: Box<dyn Look>,
}

impl Through {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// The error says what is wrong and what to do.
    pub fn open(path: &Path, name: &str) -> Result<Self> {
        let opened = open_direct(path, FileType::is_file).map_err(|error| refused(name, error))?;
        let no_file = || Error::new(ErrorKind::InvalidArgument, format!("{name} is no file any more"));
        let (file, _, is_direct) = opened.ok_or_else(no_file)?;
        let file = Arc::new(file);
        let look = Box::new(Readers::new(&file)?);
        Ok(Self { file, sector: FILE_SECTOR, method: method(is_direct), look })
    }
}

fn method(is_direct: bool) -> String {
    let text = match is_direct {
        true => "reads past the page cache",
        false => {
            "reads through the page cache, since its file system has no direct I/O: what is in memory is not read from the disk"
        }
    };
    text.to_owned()
}

/// Opens for direct I/O, or else without; says which.
fn open_direct(
    path: &Path,
    is_wanted: impl Fn(&FileType) -> bool,
) -> io::Result<Option<(File, std::fs::Metadata, bool)>> {
    let (opened, is_direct) = match cbd_sys::files::open_if(path, libc::O_DIRECT, &is_wanted) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            (cbd_sys::files::open_if(path, 0, &is_wanted)?, false)
        }
        other => (other?, true),
    };
    Ok(opened.map(|(file, status)| (file, status, is_direct)))
}

/// The error of an object that cannot be opened, with what to do.
#[must_use]
pub fn refused(name: &str, error: io::Error) -> Error {
    let (kind, advice) = match error.kind() {
        io::ErrorKind::NotFound => (ErrorKind::NotFound, "; check the name"),
        io::ErrorKind::PermissionDenied => {
            (ErrorKind::Permission, "; run the command as root, or as the owner")
        }
        _ => (ErrorKind::System, ""),
    };
    Error::new(kind, format!("{name} cannot be opened{advice}")).caused_by(error)
}
