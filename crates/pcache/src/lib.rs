//! Reads cache devices of Linux's dm-pcache: finds the dirty data and the damage, and passes the intact dirty data on.
//!
//! The format is described in `docs/dm-pcache.md`; this crate is written from that page.
//!
//! Invariants:
//! - the image is only read;
//! - any bytes give a result: every number of the image is checked before it is used, every existing checksum is
//!   verified, memory and time are bounded by [`Options::pieces_max`] and by the size of the image;
//! - bytes that could not be read, or whose checksum is wrong, are listed and never passed on. Newer data hides older
//!   data even if the newer data is damaged.
//!
//! Elsewhere: files and devices ([`Image`], [`Sink`]), printing (`cbdctrl`).
#![forbid(unsafe_code)]

mod format;
pub mod image;
mod log;
mod open;
mod pieces;
pub mod report;
mod scan;

pub use format::{SUPERBLOCK_AT, SUPERBLOCK_MAGIC};
pub use image::{Image, Unreadable};
pub use log::{LogEnd, Survey};
pub use open::Cache;
pub use report::{DeviceRange, Finding, RangeList, Reason};
pub use scan::{Scanned, Sink};

/// How an image is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Continue behind a damaged key set if the log visibly continues there, although the ranges of that key set are
    /// unknown.
    pub past_damage: bool,
    /// Maximum number of pieces of the device in memory at a time; the log is read again for the next ones.
    pub pieces_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        // About 100 MB; 4 GiB of dirty 4 KiB blocks are read in one pass.
        Self { past_damage: false, pieces_max: 1 << 20 }
    }
}

/// Long operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Reading the log: segments.
    Surveying,
    /// Verifying the checksums of data: keys.
    Verifying,
    /// Passing data on: bytes.
    PassingOn,
}

/// The progress of a long operation: the completed part, and the whole.
pub type Progress<'a> = &'a mut dyn FnMut(Stage, u64, u64);
