//! The length of a file that holds data of a backing device.
//!
//! A write behind the end of a file that was cut short makes it longer again, and the hole reads as zeroes. So the length that the file
//! has to have is remembered, and the least that was seen since.
//!
//! Always true here: what was seen to be missing is missing until the file is opened again, whatever length it has by then.
//!
//! Left to others: when to look.

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
    /// At most what is expected.
    least: AtomicU64,
}

impl Length {
    pub(crate) const fn new(expected: u64) -> Self {
        Self { expected, least: AtomicU64::new(expected) }
    }

    /// Bytes that the file has to have.
    pub(crate) const fn expected(&self) -> u64 {
        self.expected
    }

    /// Looks at the length that the kernel remembers, and refuses what ends behind the least length that was seen.
    pub(crate) fn check(&self, file: BorrowedFd<'_>, path: &Path, end: u64) -> Result<()> {
        if let Ok(size) = sys::remembered_size(file) {
            self.least.fetch_min(size, Ordering::Relaxed);
        }
        self.check_known(path, end)
    }

    /// As [`check`](Self::check), without a look.
    pub(crate) fn check_known(&self, path: &Path, end: u64) -> Result<()> {
        match self.short(path) {
            Some((found, change)) if found < end => Err(Error::new(ErrorKind::Backing, change.to_string())),
            _ => Ok(()),
        }
    }

    /// What has become of the file, where a look found `change`.
    pub(crate) fn change(&self, path: &Path, change: Option<Change>) -> Option<Change> {
        match change {
            Some(Change::Deleted { .. }) => return change,
            Some(Change::Short { found, .. }) => {
                self.least.fetch_min(found, Ordering::Relaxed);
            }
            Some(Change::Moved { .. }) | None => {}
        }
        self.short(path).map(|(_, change)| change).or(change)
    }

    fn short(&self, path: &Path) -> Option<(u64, Change)> {
        let (expected, found) = (self.expected, self.least.load(Ordering::Relaxed));
        (found < expected).then(|| (found, Change::Short { path: path.to_owned(), expected, found }))
    }
}
