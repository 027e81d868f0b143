//! What Linux's dm-pcache leaves on a cache device: what of it is dirty, what is damaged, and the way of the rest to where it belongs.
//!
//! The format is described in `docs/dm-pcache.md`; this crate is written from that page.
//!
//! Always true here:
//! - the image is only read;
//! - any bytes give an answer: every number of the image is checked before it is used, every checksum that there is is verified,
//!   memory and time are bounded by [`Options::pieces_max`] and by the size of the image;
//! - bytes that could not be read, or that their checksum contradicts, are never handed on; they are listed. What is newer hides
//!   what is older even where the newer is damaged.
//!
//! Left to others: files and devices ([`Image`], [`Sink`]), what is printed (`cbdctrl`).
#![forbid(unsafe_code)]

mod format;
pub mod image;
mod log;
mod open;
mod pieces;
pub mod report;
#[cfg(feature = "sample")]
pub mod sample;
mod scan;

pub use image::{Image, Unreadable};
pub use log::{LogEnd, Survey};
pub use open::Cache;
pub use report::{DeviceRange, Finding, RangeList, Reason};
pub use scan::{Scanned, Sink};

/// How an image is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Go on behind a damaged key set where the log visibly does, although nobody knows what that key set was about.
    pub past_damage: bool,
    /// So many pieces of the device are held in memory at a time; the log is read again for the next ones.
    pub pieces_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        // 100 MB or so; 4 GiB that is dirty in blocks of 4 KiB are read in one go.
        Self { past_damage: false, pieces_max: 1 << 20 }
    }
}

/// What takes long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// The log is read: segments.
    Surveying,
    /// Data are held against their checksums: keys.
    Verifying,
    /// Data are handed on: bytes.
    HandingOn,
}

/// How far something is that takes long: so much is done, of so much.
pub type Progress<'a> = &'a mut dyn FnMut(Stage, u64, u64);
