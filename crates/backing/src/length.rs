//! The length of a file that holds data of a backing device.
//!
//! A write after the end of a truncated file extends it again, and the hole reads as zeroes. So the required length of
//! the file is stored, and the least length that was seen since.
//!
//! Invariants: bytes that were once missing count as missing until the file is opened again, whatever its length is
//! then; the required length never falls. A length that was read counts as missing bytes only if it is less than the
//! length that was required before it was read: so a file that is extended meanwhile never seems truncated.

use crate::sys;
use cbd_holder::Change;
use cbd_types::{Error, ErrorKind, Result};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// The length of one file, in bytes.
#[derive(Debug)]
pub(crate) struct Length {
    expected: AtomicU64,
    /// The least length that was seen, of those that were too short; the maximum if none was.
    least: AtomicU64,
}

impl Length {
    pub(crate) const fn new(expected: u64) -> Self {
        Self { expected: AtomicU64::new(expected), least: AtomicU64::new(u64::MAX) }
    }

    /// The required length.
    pub(crate) fn expected(&self) -> u64 {
        self.expected.load(Ordering::Acquire)
    }

    /// Raises the required length to one that the file has. Bytes that were once missing stay missing.
    pub(crate) fn raise(&self, to: u64) {
        self.expected.fetch_max(to, Ordering::AcqRel);
    }

    /// Reads the length that the kernel has cached, and refuses a range that ends after the least length that was seen.
    pub(crate) fn check(&self, file: BorrowedFd<'_>, path: &Path, end: u64) -> Result<()> {
        let expected = self.expected();
        if let Ok(size) = sys::remembered_size(file)
            && size < expected
        {
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
        let (expected, found) = (self.expected(), self.least.load(Ordering::Relaxed));
        (found < expected).then(|| (found, Change::Short { path: path.to_owned(), expected, found }))
    }
}
