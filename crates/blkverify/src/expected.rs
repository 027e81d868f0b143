//! What the bytes should be, and the image that they are compared with.
//!
//! Invariants: an image is a file or a block device that reaches to the end of the range.

use cbd_daemon::api::printable;
use cbd_types::{AlignedBuffer, ByteRange, Error, ErrorKind, Result};
use std::fs::{File, FileType};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

/// What the bytes should be.
#[derive(Debug)]
pub enum Expected {
    /// Anything that can be read.
    Readable,
    /// Zeroes.
    Zeroes,
    /// The content of an image.
    Image(Image),
}

impl Expected {
    /// The name in JSON.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Readable => "readable",
            Self::Zeroes => "zeroes",
            Self::Image(_) => "compare",
        }
    }
}

/// An image: its byte N is that of the verified object.
#[derive(Debug)]
pub struct Image {
    file: File,
    name: String,
    length: u64,
}

impl Image {
    /// Opens the image at `path`.
    ///
    /// # Errors
    /// The error says what is wrong with it.
    pub fn open(path: &Path) -> Result<Self> {
        let name = printable(&path.display().to_string());
        let cannot = |error| {
            Error::new(ErrorKind::System, format!("the image {name} cannot be opened")).caused_by(error)
        };
        let wanted = |kind: &FileType| kind.is_file() || kind.is_block_device();
        let Some((file, status)) = cbd_sys::files::open_if(path, 0, wanted).map_err(cannot)? else {
            let text = format!("the image {name} is no file and no block device; copy it into a file first");
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        };
        let length = match status.is_file() {
            true => status.len(),
            false => cbd_sys::ioctl::block_size(file.as_fd()).map_err(cannot)?,
        };
        Ok(Self { file, name, length })
    }

    /// Checks that the image reaches to the end of `range` of an object with sectors of `sector` bytes, and ends there unless the user
    /// bounded the range.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] with both lengths.
    pub fn check(&self, range: ByteRange, is_bounded: bool, sector: u64, object: &str) -> Result<()> {
        let Self { name, length, .. } = self;
        let (start, end) = (range.start, range.end);
        let text = if *length < end && *length < start + sector {
            format!(
                "the image {name} has {length} bytes, less than a sector behind byte {start}, where the range begins: choose a smaller --offset, or an image of all of {object}"
            )
        } else if *length < end {
            format!(
                "the image {name} has {length} bytes and is shorter than {object}, byte {end} of which is to be compared: bound the range with --length {}",
                (*length - start) / sector * sector
            )
        } else if *length > end && !is_bounded {
            format!(
                "the image {name} has {length} bytes, of which {object} has room for {end}: bound the range with --length {}",
                range.len()
            )
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::InvalidArgument, text))
    }

    /// The content of `range`, followed by zeroes to a length of `capacity` bytes.
    ///
    /// # Errors
    /// The system error with the place.
    pub fn read(&self, range: ByteRange, capacity: u64) -> Result<AlignedBuffer> {
        let mut buffer = AlignedBuffer::zeroed(usize::try_from(capacity).unwrap_or(usize::MAX));
        let useful = usize::try_from(range.len()).unwrap_or(usize::MAX).min(buffer.len());
        self.file.read_exact_at(&mut buffer[..useful], range.start).map_err(|error| {
            let text = format!("the image {} cannot be read at byte {}", self.name, range.start);
            Error::new(ErrorKind::System, text).caused_by(error)
        })?;
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(length: usize) -> Image {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![7; length]).unwrap();
        Image::open(file.path()).unwrap()
    }

    #[test]
    fn a_shorter_or_longer_image_is_refused_unless_the_range_is_bounded() {
        let image = image(10_000);
        let check = |start, length, bounded| image.check(ByteRange::at(start, length), bounded, 512, "x");
        assert!(check(0, 10_000, false).is_ok() && check(0, 4096, true).is_ok());
        let shorter = check(4096, 8192, false).unwrap_err().line();
        assert!(shorter.contains("--length 5632") && shorter.contains("10000 bytes"), "{shorter}");
        assert!(check(16_384, 4096, true).unwrap_err().line().contains("--offset"));
        assert!(check(0, 4096, false).unwrap_err().line().contains("--length 4096"));
    }

    #[test]
    fn the_content_ends_with_zeroes() {
        let bytes = image(5000).read(ByteRange { start: 4096, end: 5000 }, 1024).unwrap();
        assert_eq!((bytes.len(), bytes[903], bytes[904]), (1024, 7, 0));
    }
}
