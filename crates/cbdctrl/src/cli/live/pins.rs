//! The commands that pin ranges of a device in its cache.

use super::OfBackend;
use cbd_daemon::size::parse_size;
use cbd_types::{ByteRange, Error, ErrorKind};
use clap::{ArgGroup, Args, Subcommand};
use std::path::PathBuf;

/// What is pinned.
#[derive(Args, Debug)]
pub struct Pinned {
    /// Files on the block device of the backend
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// A range of the device, e.g. 1G+64M; can be repeated
    #[arg(short, long, value_name = "OFFSET+LENGTH", value_parser = parse_range)]
    pub range: Vec<ByteRange>,
    /// The metadata of the file system that is mounted there, ext4 or XFS; can be repeated
    #[arg(short, long, value_name = "MOUNTPOINT")]
    pub metadata: Vec<PathBuf>,
}

/// The arguments of [`Pinned`].
const WHAT: [&str; 3] = ["files", "range", "metadata"];

/// Something is named, or `other` is given.
fn named(other: &'static str) -> ArgGroup {
    ArgGroup::new("named").args(WHAT).arg(other).multiple(true).required(true)
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum PinCommand {
    /// Keep files, ranges or the metadata of a file system in the cache, although no program reads them
    #[command(group = named("list"))]
    Pin {
        /// Backend
        #[command(flatten)]
        of: OfBackend,
        /// What
        #[command(flatten)]
        pinned: Pinned,
        /// Show what is pinned, and how much of it is in the cache
        #[arg(short, long, conflicts_with_all = WHAT)]
        list: bool,
    },
    /// End pins
    #[command(group = named("all"))]
    Unpin {
        /// Backend
        #[command(flatten)]
        of: OfBackend,
        /// What
        #[command(flatten)]
        pinned: Pinned,
        /// All pins
        #[arg(short, long, conflicts_with_all = WHAT)]
        all: bool,
    },
}

/// A range as `OFFSET+LENGTH`.
fn parse_range(text: &str) -> Result<ByteRange, Error> {
    let wrong = || {
        let text = format!("a range is OFFSET+LENGTH in bytes or with units, e.g. 1G+64M, not \"{text}\"");
        Error::new(ErrorKind::InvalidArgument, text)
    };
    let (start, length) = text.split_once('+').ok_or_else(wrong)?;
    let (start, length) = (parse_size(start).map_err(|_| wrong())?, parse_size(length).map_err(|_| wrong())?);
    let end = start.checked_add(length).filter(|end| *end > start).ok_or_else(wrong)?;
    Ok(ByteRange { start, end })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_has_an_offset_and_a_length() {
        assert_eq!(parse_range("0+4096").expect("a range"), ByteRange::at(0, 4096));
        assert_eq!(parse_range("1G+64M").expect("a range"), ByteRange::at(1 << 30, 64 << 20));
        for text in ["", "4096", "+", "1G+", "+1G", "1G+0", "1G+x", "1G-1M", "-1+4096", "16E+1E"] {
            let error = parse_range(text).expect_err(text);
            assert!(error.line().contains("a range is OFFSET+LENGTH"), "{error}");
        }
    }
}
