//! The ranges of a device that a file or the metadata of a file system has.
//!
//! Invariants: each byte of a file has a place of its own in the ranges, or the file is refused; ranges are looked up twice, and
//! refused if they changed meanwhile.

use super::place::{Device, start_of_file_system};
use super::shown;
use crate::cli::OfBackend;
use cbd_sys::DeviceNumber;
use cbd_sys::extents::{self, FileExtent};
use cbd_types::{ByteRange, Error, ErrorKind, Result};
use std::fs::{self, File, Metadata};
use std::os::fd::AsFd;
use std::path::Path;

/// The ranges of `path`, a file on one of `devices`.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for what is no file, is on another device, is empty, or has bytes without a place of their own;
/// [`ErrorKind::Busy`] for a file that moves; the system error.
pub fn of_file(path: &Path, devices: &[Device], of: &OfBackend) -> Result<Vec<ByteRange>> {
    let no_file =
        || refused(path, "is no file: name files, or pin the metadata of its file system with --metadata");
    let (file, status) = opened(path, fs::FileType::is_file, &no_file)?;
    let (start, _) = start_of_file_system(path, &status, devices, &of.backend.to_string())?;
    if extents::is_of_realtime_device(file.as_fd()) {
        return Err(refused(path, "is on the real-time device of its file system, which is another one"));
    }
    let look = || extents::of_file(file.as_fd()).map_err(|error| no_answer(path, "where files are", &error));
    let first = look()?;
    let length = file.metadata().map_err(|error| failed(path, "cannot be examined", error))?.len();
    if look()? != first || length != status.len() {
        return Err(Error::new(
            ErrorKind::Busy,
            format!("{} is being written or moved: pin it when that has ended", shown(path)),
        ));
    }
    let ranges = ranges_of(&first, length).map_err(|why| refused(path, &why))?;
    Ok(moved_by(ranges, start))
}

/// The ranges of the metadata of the file system that is mounted at `path`.
///
/// # Errors
/// As [`of_file`]; [`ErrorKind::Unsupported`] for a file system that does not say where it is.
pub fn of_metadata(path: &Path, devices: &[Device], of: &OfBackend) -> Result<Vec<ByteRange>> {
    let no_folder = || refused(path, "is no mount point");
    let (folder, status) = opened(path, |kind| kind.is_dir() || kind.is_file(), &no_folder)?;
    let (start, device) = start_of_file_system(path, &status, devices, &of.backend.to_string())?;
    let look = || -> Result<Vec<ByteRange>> {
        let owned = extents::of_file_system(folder.as_fd())
            .map_err(|error| no_answer(path, "where its metadata is (ext4 and XFS do)", &error))?;
        Ok(metadata_of(&owned, device))
    };
    let ranges = look()?;
    if look()? != ranges {
        let text = format!("the metadata of {} changes at the moment: try again", shown(path));
        return Err(Error::new(ErrorKind::Busy, text));
    }
    if ranges.is_empty() {
        return Err(refused(
            path,
            "is on a file system that does not name its metadata: XFS does if it was made with -m rmapbt=1; pin a range (--range)",
        ));
    }
    Ok(moved_by(ranges, start))
}

/// Opens what `is_wanted`, and nothing else.
fn opened(
    path: &Path,
    is_wanted: impl Fn(&fs::FileType) -> bool,
    unwanted: &dyn Fn() -> Error,
) -> Result<(File, Metadata)> {
    let found = cbd_sys::files::open_if(path, 0, is_wanted);
    found.map_err(|error| failed(path, "cannot be opened", error))?.ok_or_else(unwanted)
}

fn failed(path: &Path, what: &str, error: std::io::Error) -> Error {
    Error::new(ErrorKind::System, format!("{} {what}", shown(path))).caused_by(error)
}

fn metadata_of(owned: &[extents::OwnedRange], device: DeviceNumber) -> Vec<ByteRange> {
    let metadata = owned.iter().filter(|range| range.device == device && range.is_metadata());
    joined(metadata.map(|range| ByteRange::at(range.physical, range.length)))
}

/// The ranges of a file of `length` bytes, or why it cannot be pinned.
fn ranges_of(extents: &[FileExtent], length: u64) -> core::result::Result<Vec<ByteRange>, String> {
    if length == 0 {
        return Err("is empty: there is nothing to pin".to_owned());
    }
    let mut end = 0;
    for extent in extents {
        let has = |flags: u32| extent.flags & flags != 0;
        let why = if has(FileExtent::INLINE | FileExtent::TAIL) {
            "has its data among metadata or that of other files (it is inline): pin the metadata with --metadata"
        } else if has(FileExtent::ENCODED) {
            "is compressed or encrypted by its file system, which does not say where its bytes are"
        } else if has(FileExtent::UNKNOWN | FileExtent::NOT_ALLOCATED) {
            "has bytes that have no place on the disk yet: write it out first (sync FILE)"
        } else if has(FileExtent::NOT_ALIGNED) {
            "has bytes that share blocks with others"
        } else {
            ""
        };
        if !why.is_empty() {
            return Err(why.to_owned());
        }
        if extent.logical > end {
            return Err(hole(end, extent.logical));
        }
        end = end.max(extent.logical.saturating_add(extent.length));
    }
    if end < length {
        return Err(hole(end, length));
    }
    Ok(joined(extents.iter().map(|extent| ByteRange::at(extent.physical, extent.length))))
}

fn hole(start: u64, end: u64) -> String {
    format!("has a hole, bytes {start} to {end}: what is written there later would not be pinned")
}

/// The ranges in order, adjacent ones joined.
fn joined(ranges: impl Iterator<Item = ByteRange>) -> Vec<ByteRange> {
    let mut sorted: Vec<ByteRange> = ranges.filter(|range| !range.is_empty()).collect();
    sorted.sort_by_key(|range| range.start);
    let mut joined: Vec<ByteRange> = Vec::new();
    for range in sorted {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

fn moved_by(ranges: Vec<ByteRange>, start: u64) -> Vec<ByteRange> {
    let moved = |range: ByteRange| ByteRange { start: range.start + start, end: range.end + start };
    ranges.into_iter().map(moved).collect()
}

fn refused(path: &Path, why: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("{} {why}", shown(path)))
}

/// The error of a request that a file system may not know.
fn no_answer(path: &Path, what: &str, error: &std::io::Error) -> Error {
    let text =
        format!("the file system of {} does not say {what}: {error}; pin a range (--range)", shown(path));
    Error::new(ErrorKind::Unsupported, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(logical: u64, physical: u64, length: u64, flags: u32) -> FileExtent {
        FileExtent { logical, physical, length, flags }
    }

    #[test]
    fn the_ranges_of_a_file_are_in_order_and_joined() {
        let unwritten = 0x800;
        let extents = [
            extent(0, 40_960, 8192, 0),
            extent(8192, 4096, 4096, unwritten),
            extent(12_288, 49_152, 4096, 1),
        ];
        let ranges = ranges_of(&extents, 16_000).expect("it can be pinned");
        assert_eq!(ranges, [ByteRange::at(4096, 4096), ByteRange::at(40_960, 12_288)]);
        assert_eq!(moved_by(ranges, 1 << 20)[0], ByteRange::at((1 << 20) + 4096, 4096));
    }

    #[test]
    fn a_file_with_bytes_without_a_place_is_refused_with_the_reason() {
        let whole = [extent(0, 4096, 4096, 1)];
        for (extents, length, why) in [
            (&whole[..0], 0, "is empty"),
            (&whole[..0], 4096, "has a hole, bytes 0 to 4096"),
            (&whole[..], 8192, "has a hole, bytes 4096 to 8192"),
            (&[extent(8192, 4096, 4096, 1)], 12_288, "has a hole, bytes 0 to 8192"),
            (&[extent(0, 0, 100, FileExtent::INLINE | 1)], 100, "inline"),
            (&[extent(0, 0, 4096, FileExtent::ENCODED)], 100, "compressed or encrypted"),
            (&[extent(0, 0, 4096, FileExtent::NOT_ALLOCATED | FileExtent::UNKNOWN)], 100, "no place"),
            (&[extent(0, 0, 4096, FileExtent::NOT_ALIGNED)], 100, "share blocks"),
        ] {
            let refused = ranges_of(extents, length).expect_err(why);
            assert!(refused.contains(why), "{refused}");
        }
    }
}
