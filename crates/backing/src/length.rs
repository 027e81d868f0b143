//! The length of a file that holds data of a backing device.
//!
//! A write after the end of a truncated file extends it again, and the hole reads as zeroes. So the required length of
//! the file is stored, and the least length that was seen since.
//!
//! Invariants: bytes that were once missing count as missing until the file is opened again, whatever its length is
//! then.

use crate::sys;
use cbd_holder::Change;
use cbd_types::{Error, ErrorKind, Result};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// The length of one file, in bytes.
#[derive(Debug)]
pub(crate) struct Length {
    expected: u64,
    /// The least length that was seen; at most `expected`.
    least: AtomicU64,
}

impl Length {
    pub(crate) const fn new(expected: u64) -> Self {
        Self { expected, least: AtomicU64::new(expected) }
    }

    /// The required length.
    pub(crate) const fn expected(&self) -> u64 {
        self.expected
    }

    /// Reads the length that the kernel has cached, and refuses a range that ends after the least length that was seen.
    pub(crate) fn check(&self, file: BorrowedFd<'_>, path: &Path, end: u64) -> Result<()> {
        if let Ok(size) = sys::remembered_size(file) {
            self.least.fetch_min(size, Ordering::Relaxed);
        }
        self.check_known(path, end)
    }

    /// As [`check`](Self::check), without reading the length.
    pub(crate) fn check_known(&self, path: &Path, end: u64) -> Result<()> {
        match self.short(path) {
            Some((found, change)) if found < end => Err(Error::new(ErrorKind::Backing, change.to_string())),
            _ => Ok(()),
        }
    }

    /// The change to report, given the `change` that a check found.
    pub(crate) fn change(&self, path: &Path, change: Option<Change>) -> Option<Change> {
        match change {
            Some(Change::Deleted { .. }) => return change,
            Some(Change::Short { found, .. }) => {
                self.least.fetch_min(found, Ordering::Relaxed);
            }
            Some(Change::Linked { .. } | Change::Moved { .. }) | None => {}
        }
        self.short(path).map(|(_, change)| change).or(change)
    }

    fn short(&self, path: &Path) -> Option<(u64, Change)> {
        let (expected, found) = (self.expected, self.least.load(Ordering::Relaxed));
        (found < expected).then(|| (found, Change::Short { path: path.to_owned(), expected, found }))
    }
}
