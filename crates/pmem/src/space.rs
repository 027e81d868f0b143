//! The space of a region's file.
//!
//! Invariants: a file whose space cannot be allocated has its bytes and its size as before. Space is refused before the allocation
//! where the file system says that it has too little.
//!
//! Elsewhere: what is mapped then (`open`, `extend`).

use crate::errors::from_io;
use crate::file;
use crate::open::refuse;
use cbd_types::{ErrorKind, Result, Size};
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A file whose space is allocated.
pub(crate) struct Space<'a> {
    pub path: &'a Path,
    pub file: &'a File,
    /// The file as it was found.
    pub looked: &'a Metadata,
    /// What its file system has left, if it has a limit.
    pub free: Option<u64>,
}

impl Space<'_> {
    /// Allocates the first `length` bytes.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`], [`ErrorKind::Unsupported`] for holes in a file whose file system cannot allocate them, and system errors.
    pub fn allocate(&self, length: u64) -> Result<()> {
        let Self { path, looked, .. } = self;
        let region = path.display();
        let missing = length.saturating_sub(looked.blocks().saturating_mul(512));
        if missing == 0 && looked.len() >= length {
            return Ok(());
        }
        if let Some(free) = self.free.filter(|&free| missing > free) {
            // If the allocation filled up the file system and then failed, it would disturb all its users.
            return Err(refuse(
                ErrorKind::NoSpace,
                format!(
                    "the region {region} of {} needs {} MiB more, and its file system has {} MiB left",
                    Size(length),
                    missing.div_ceil(1 << 20),
                    free >> 20
                ),
            ));
        }
        self.allocate_now(length)
    }

    /// Allocates the first `length` bytes, or only those that are needed if the file system lacks space for the others, by which the user
    /// made the file larger. Returns how many bytes are allocated, and a warning if these are not all.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_or_needed(&self, length: u64, needed: Option<u64>) -> Result<(u64, Option<String>)> {
        let Err(error) = self.allocate(length) else { return Ok((length, None)) };
        let Some(needed) = needed.filter(|needed| *needed < length && error.kind() == ErrorKind::NoSpace)
        else {
            return Err(error);
        };
        self.allocate_now(needed)?;
        let warning = format!(
            "{}; only its first {needed} bytes are used, as before its file was made larger",
            error.line()
        );
        Ok((needed, Some(warning)))
    }

    fn allocate_now(&self, length: u64) -> Result<()> {
        let Self { path, file, looked, .. } = self;
        let region = path.display();
        let allocated = match file::allocate(file, length) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) && looked.len() == 0 => {
                write_zeroes(file, length)
            }
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                return Err(refuse(
                    ErrorKind::Unsupported,
                    format!(
                        "the file system of {region} cannot allocate space for the holes in it; copy it whole first"
                    ),
                ));
            }
            other => other,
        };
        allocated.map_err(|error| {
            let _ = file.set_len(looked.len());
            from_io(&error, format!("cannot allocate {length} bytes for the region {region}"))
        })
    }
}

/// Writes the blocks, for file systems that allocate only written blocks.
fn write_zeroes(file: &File, length: u64) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    let zeroes = vec![0; 1 << 20];
    let mut at = 0;
    while at < length {
        let piece = zeroes.len().min(usize::try_from(length - at).unwrap_or(zeroes.len()));
        file.write_all_at(&zeroes[..piece], at)?;
        at += piece as u64;
    }
    Ok(())
}
