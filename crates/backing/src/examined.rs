//! A disk or file that is opened to be verified, while others use it.
//!
//! Invariants: it is open for reading only, without a lock and without a claim, so it may be mounted or be the backing
//! device of a daemon; only operations that change nothing are executed; bytes after the last whole sector are never
//! accessed.
//!
//! Elsewhere: what a difference means while other programs write; a difference that is not found again was a change.

use crate::file::{self, Engine, Opened, Options};
use crate::identity::{self, Identity, Kind};
use crate::length::Length;
use crate::ring::RingQueue;
use crate::sync::SyncQueue;
use crate::sys;
use crate::{Offload, PollableQueue, geometry, job};
use cbd_types::{BackingGeometry, Error, ErrorKind, Result};
use std::path::Path;
use std::sync::{Arc, RwLock};

/// An open disk or file that others may use.
#[derive(Debug)]
pub struct Examined {
    target: Arc<job::Target>,
    ring: bool,
    unused_tail: u64,
}

impl Examined {
    /// Opens the block device or regular file at `path`.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::Permission`], [`ErrorKind::InvalidArgument`] (a directory, a pipe, a
    /// character device, less than one sector), [`ErrorKind::Unsupported`].
    pub fn open(path: impl AsRef<Path>, offload: Offload) -> Result<Self> {
        let options = Options { read_only: true, offload, ..Options::default() };
        let path = std::path::absolute(path.as_ref())
            .map_err(|error| file::open_error(path.as_ref(), None, &options, &error))?;
        let status =
            sys::status_of(&path).map_err(|error| file::open_error(&path, None, &options, &error))?;
        let kind = if status.is_block() {
            Kind::Block
        } else if status.is_regular() {
            Kind::File
        } else {
            let text = format!(
                "{} is {}; only block devices and regular files can be verified",
                path.display(),
                status.type_name()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text).at_path(path.to_string_lossy()));
        };
        let mut opened = Opened::shared(&path, &status, &options)?;
        let whole = match kind {
            Kind::Block => geometry::block_size(&opened.file, &path)?,
            Kind::File => opened.status.size,
        };
        if whole == 0 {
            let text = format!("{} is empty: there is nothing to verify", path.display());
            return Err(Error::new(ErrorKind::InvalidArgument, text).at_path(path.to_string_lossy()));
        }
        let mut geometry = match kind {
            Kind::Block => geometry::of_block_device(&opened.file, &opened.status, whole, &path)?,
            Kind::File => file::file_geometry(&mut opened, &path, &options)?,
        };
        file::apply_recorded_geometry(&path, whole, &mut geometry, &options)?;
        let (ring, _) = file::engine(Engine::Auto)?;
        let (commands, buffered) = (file::commands_of(kind, &opened, offload), opened.buffered());
        let target = job::Target {
            file: opened.file,
            path,
            kind,
            geometry,
            size: geometry.size.into(),
            read_only: true,
            is_named: opened.status.links > 0,
            length: Length::new(geometry.size),
            no_zero_range: false.into(),
            no_punch: false.into(),
            buffered,
            commands: RwLock::new(Arc::new(commands)),
        };
        Ok(Self { target: Arc::new(target), ring, unused_tail: whole - geometry.size })
    }

    /// Its geometry when it was opened.
    #[must_use]
    pub fn geometry(&self) -> BackingGeometry {
        self.target.geometry
    }

    /// Bytes after the last whole sector of a file, which no operation accesses.
    #[must_use]
    pub const fn unused_tail(&self) -> u64 {
        self.unused_tail
    }

    /// Opens a queue for one thread, with at most `depth` operations in flight. It reads, verifies and compares; other
    /// operations complete with [`ErrorKind::ReadOnly`].
    ///
    /// # Errors
    /// The system refuses a resource of the queue (a ring, descriptors).
    pub fn open_queue(&self, depth: usize) -> Result<Box<dyn PollableQueue>> {
        let target = Arc::clone(&self.target);
        if self.ring {
            Ok(Box::new(RingQueue::new(target, depth)?))
        } else {
            Ok(Box::new(SyncQueue::new(target)?))
        }
    }

    /// How verifications and comparisons are executed, and why not better, in one line.
    #[must_use]
    pub fn method(&self) -> String {
        self.target.verify_method()
    }
}

/// The identity of the block device or regular file at `path`, which others may use. A loop device has the identity of
/// its file only as a backing device: here only that of the device.
///
/// # Errors
/// As [`Examined::open`], without those of its geometry.
pub fn identity_of(path: &Path) -> Result<Identity> {
    let options = Options { read_only: true, ..Options::default() };
    let status = sys::status_of(path).map_err(|error| file::open_error(path, None, &options, &error))?;
    let opened = Opened::shared(path, &status, &options)?;
    let (kind, size) = if opened.status.is_block() {
        (Kind::Block, geometry::block_size(&opened.file, path)?)
    } else {
        (Kind::File, opened.status.size)
    };
    Ok(identity::of_open(&opened.file, &opened.status, kind, size))
}

/// Refuses a disk or file that this process could not open as a backing device, because it may not write to it; with `is_ours`, also a
/// block device that another program of this machine uses.
///
/// # Errors
/// [`ErrorKind::ReadOnly`] or [`ErrorKind::Permission`]; [`ErrorKind::Busy`]; [`ErrorKind::NotFound`].
pub fn check_writable(path: &Path, is_ours: bool) -> Result<()> {
    let options = Options::default();
    let status = sys::status_of(path).map_err(|error| file::open_error(path, None, &options, &error))?;
    if !status.is_block() {
        file::refuse_without_write_bit(path, &status)?;
    }
    let exclusive = if is_ours && status.is_block() { libc::O_EXCL } else { 0 };
    let opened = file::open_flags(&options, exclusive | libc::O_NONBLOCK).open(path);
    let opened = opened.map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => {
            let text = format!("{} is in use by another program of this machine", path.display());
            Error::new(ErrorKind::Busy, text)
        }
        _ => file::open_error(path, Some(&status), &options, &error),
    })?;
    if status.is_block() { file::refuse_set_read_only(path, &opened, &status) } else { Ok(()) }
}
