//! What a block device stands on, claimed together with it: the same bytes are not to be had by another way.
//!
//! A loop device stands on a part of a file or of another block device; a partition on a part of its disk; device mapper and md on
//! their members. The kernel's exclusive open covers partitions and members. It does not cover what a loop device stands on: so a
//! file there gets the lock that a file gets that is opened directly, over the bytes that the loop device shows, and a block device
//! is opened exclusively.
//!
//! Always true here: bytes of a file are claimed by one backing device, whichever loop devices lead to it. Two loop devices, or two
//! partitions, over parts that have no byte in common do not exclude each other. Nothing waits longer than [`ANSWER`] for a file
//! system.
//!
//! Left to others: devices of device mapper that share a loop device (its tables are not read: they share the lock, and exclude
//! only what comes by another way); a file that has no name here, which is a warning; programs that take no lock.

use crate::hold::{self, Held};
use crate::length::Length;
use crate::patient;
use crate::sys::{self, DeviceNumber, LoopFile, Status};
use crate::sysfs::BlockDirectory;
use cbd_types::{ByteRange, Error, ErrorKind, Result};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a file that a loop device stands on may take to be opened.
pub(crate) const ANSWER: Duration = Duration::from_secs(1);

/// More devices on top of each other than any sane machine has.
const LAYERS: usize = 64;

/// Bytes of a sector in sysfs.
const SYSFS_SECTOR: u64 = 512;

/// Something that is claimed because a backing device stands on it.
#[derive(Debug)]
pub(crate) struct Claim {
    pub held: Held,
    pub path: PathBuf,
    /// Of a file with a name, how long it has to be.
    pub length: Option<Length>,
    /// Where the backing device begins in it; none where that is not known.
    pub start: Option<u64>,
}

/// What is claimed beneath a backing device, and what could not be.
#[derive(Debug, Default)]
pub(crate) struct Beneath {
    pub claims: Vec<Claim>,
    pub warnings: Vec<String>,
}

/// Claims all that the block device at `path` stands on.
///
/// # Errors
/// [`ErrorKind::Busy`] with who has it; [`ErrorKind::TimedOut`] for what does not answer.
pub(crate) fn claim(path: &Path, device: DeviceNumber, read_only: bool) -> Result<Beneath> {
    let whole = ByteRange { start: 0, end: u64::MAX };
    let first = Place { device, bytes: whole, shared: false };
    let mut walk = Walk { top: path, read_only, next: vec![first], found: Beneath::default() };
    let mut visited = 0;
    while let Some(place) = walk.next.pop() {
        visited += 1;
        if visited > LAYERS {
            break;
        }
        walk.visit(&place)?;
    }
    Ok(walk.found)
}

/// A part of a block device that is to be looked through.
#[derive(Clone, Copy)]
struct Place {
    device: DeviceNumber,
    bytes: ByteRange,
    /// Others may stand on the same bytes for all that is known.
    shared: bool,
}

struct Walk<'a> {
    top: &'a Path,
    read_only: bool,
    next: Vec<Place>,
    found: Beneath,
}

/// What a loop device stands on, opened.
struct Ground {
    file: File,
    status: Status,
    /// An exclusive lock takes the right to write.
    writable: bool,
}

impl Walk<'_> {
    fn visit(&mut self, place: &Place) -> Result<()> {
        let Some(directory) = BlockDirectory::of(place.device) else { return Ok(()) };
        let mut bytes = place.bytes;
        if directory.is_partition() {
            let number = |name: &str| directory.own(name).and_then(|text| text.parse::<u64>().ok());
            let (Some(start), Some(size)) = (number("start"), number("size")) else { return Ok(()) };
            bytes = within(bytes, start.saturating_mul(SYSFS_SECTOR), size.saturating_mul(SYSFS_SECTOR));
        }
        for device in directory.slaves() {
            let whole = ByteRange { start: 0, end: u64::MAX };
            self.next.push(Place { device, bytes: whole, shared: true });
        }
        match directory.disk("loop/backing_file") {
            Some(path) => self.loop_device(&directory, Path::new(&path), bytes, place.shared),
            None => Ok(()),
        }
    }

    fn loop_device(
        &mut self,
        directory: &BlockDirectory,
        path: &Path,
        bytes: ByteRange,
        shared: bool,
    ) -> Result<()> {
        let number = |name: &str| directory.disk(name).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
        let (offset, limit) = (number("loop/offset"), number("loop/sizelimit"));
        let bytes = within(bytes, offset, if limit == 0 { u64::MAX } else { limit });
        let (node, file) = (Path::new("/dev").join(directory.name()), path.to_owned());
        let read_only = self.read_only;
        let asked = patient::ask(&format!("ground {}", node.display()), ANSWER, move || {
            ground(&node, &file, read_only)
        });
        let ground = match asked.answer() {
            Some(Ok(ground)) => ground,
            Some(Err(error)) if error.raw_os_error() == Some(libc::EBUSY) => {
                return Err(self.busy_device(path));
            }
            Some(Err(error)) => {
                self.found.warnings.push(format!(
                    "{} stands on {}, which cannot be claimed ({error}): that nobody else uses it is not known",
                    self.top.display(),
                    path.display()
                ));
                return Ok(());
            }
            None => {
                let text = format!(
                    "{} stands on {}, which does not answer; put its file system right and try again",
                    self.top.display(),
                    path.display()
                );
                return Err(Error::new(ErrorKind::TimedOut, text));
            }
        };
        if ground.status.is_block() {
            self.next.push(Place { device: ground.status.special, bytes, shared });
            self.found.claims.push(Claim {
                held: Held::new(ground.file),
                path: path.to_owned(),
                length: None,
                start: None,
            });
            return Ok(());
        }
        self.file(ground, path, bytes, shared)
    }

    fn file(&mut self, ground: Ground, path: &Path, bytes: ByteRange, shared: bool) -> Result<()> {
        let held = Held::new(ground.file);
        let exclusive = !self.read_only && !shared && ground.writable;
        if !self.read_only && !ground.writable {
            self.found.warnings.push(format!(
                "{} stands on {}, which this user may not write: that no other loop device shows it is not known",
                self.top.display(),
                path.display()
            ));
        }
        match held.lock(exclusive, bytes) {
            Ok(()) => {}
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                let who = hold::lock_holder(&held);
                let text = format!(
                    "{} is in use: it stands on {}, and {who} holds a lock on that",
                    self.top.display(),
                    path.display()
                );
                return Err(Error::new(ErrorKind::Busy, text));
            }
            Err(error) => self.found.warnings.push(format!(
                "{} stands on {}, which cannot be locked ({error}): that nobody else uses it is not known",
                self.top.display(),
                path.display()
            )),
        }
        let end = if bytes.end == u64::MAX { ground.status.size } else { bytes.end };
        // A file that has no name already cannot be deleted.
        let length = (ground.status.links > 0).then(|| Length::new(end.min(ground.status.size)));
        let start = (!shared).then_some(bytes.start);
        self.found.claims.push(Claim { held, path: path.to_owned(), length, start });
        Ok(())
    }

    fn busy_device(&self, path: &Path) -> Error {
        let status = sys::status_of(path).ok();
        let who = status.and_then(|status| hold::device_user(&status));
        let who = who.unwrap_or_else(|| "another program holds it exclusively".to_owned());
        let text = format!("{} is in use: it stands on {}, and {who}", self.top.display(), path.display());
        Error::new(ErrorKind::Busy, text)
    }
}

/// `bytes` of what begins at `start` in something larger and has `length` bytes.
fn within(bytes: ByteRange, start: u64, length: u64) -> ByteRange {
    let end = start.saturating_add(bytes.end.min(length));
    ByteRange { start: start.saturating_add(bytes.start).min(end), end }
}

/// Opens what the loop device `node` stands on, which the kernel says to be at `path`. May wait for its file system.
fn ground(node: &Path, path: &Path, read_only: bool) -> io::Result<Ground> {
    let expected = File::open(node).and_then(|device| sys::loop_file(device.as_fd()));
    let before = sys::status_of(path)?;
    if let Ok(expected) = &expected
        && !expected.is(&before)
    {
        return Err(io::Error::other("another file has this name here"));
    }
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | if before.is_block() { libc::O_EXCL } else { 0 };
    let open = |write: bool| OpenOptions::new().read(true).write(write).custom_flags(flags).open(path);
    let (file, writable) = match open(!read_only) {
        Ok(file) => (file, !read_only),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS)) => {
            (open(false)?, false)
        }
        Err(error) => return Err(error),
    };
    let status = sys::status(file.as_fd())?;
    if !status.same_object(&before) {
        return Err(io::Error::other("it was exchanged for something else meanwhile"));
    }
    Ok(Ground { file, status, writable })
}

impl LoopFile {
    /// Whether a file or block device is what the loop device stands on.
    pub fn is(&self, status: &Status) -> bool {
        if status.is_block() {
            return self.special == status.special;
        }
        self.device == status.device && self.inode == status.inode
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_part_is_where_it_lies_in_the_whole() {
        let range = |start, end| ByteRange { start, end };
        let whole = range(0, u64::MAX);
        assert_eq!(within(whole, 0, u64::MAX), whole);
        assert_eq!(within(whole, 1024, 4096), range(1024, 5120));
        // A partition of a loop device that begins in its file.
        assert_eq!(within(within(whole, 512, 1024), 4096, u64::MAX), range(4608, 5632));
        // A partition that says to be longer than what it lies on.
        assert_eq!(within(range(1024, 9999), 0, 2048), range(1024, 2048));
        assert_eq!(within(range(4096, 8192), 0, 2048), range(2048, 2048));
    }
}
