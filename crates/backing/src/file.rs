//! A regular file or a block device as a backing device.
//!
//! Invariants: it is locked exclusively as long as a [`BackingFile`] or a queue of it exists; its size is whole
//! sectors, and bytes after them are never accessed; a device that does not match the request is refused before it is
//! changed.
//!
//! Elsewhere: checking its identity ([`Identity::check`]), and the operations (the queues).

use crate::claims::Claims;
use crate::commands::{Commands, Offload};
use crate::hold::Held;
use crate::identity::{self, Identity, Kind};
use crate::job::Target;
use crate::length::Length;
use crate::ring::{RingQueue, raw};
use crate::sync::SyncQueue;
use crate::sys::{self, Status};
use crate::watch::Watch;
use crate::{Backing, PollableQueue, beneath, geometry, hold};
use cbd_types::{BackingGeometry, Error, ErrorKind, Result};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Whether the page cache is bypassed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Direct {
    /// Bypassed if the file system supports it.
    #[default]
    Auto,
    /// Bypassed; opening fails if the file system does not support it.
    Always,
    /// Not bypassed.
    Never,
}

/// How operations reach the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Engine {
    /// io_uring, or plain system calls where it is forbidden.
    #[default]
    Auto,
    /// Plain system calls, one at a time.
    Synchronous,
}

/// How a backing device is opened.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Options {
    /// Open it read-only.
    pub read_only: bool,
    /// Whether the page cache is bypassed.
    pub direct: Direct,
    /// How operations reach the kernel.
    pub engine: Engine,
    /// Whether the device verifies and compares in itself.
    pub offload: Offload,
    /// The required logical sector, which clients use. A file on a file system that now requires larger sectors for
    /// direct I/O goes through the page cache; a block device with larger ones is refused.
    pub sector: Option<u32>,
    /// The required size, which clients use: a smaller device is refused; of a larger one, only this much is used.
    pub size: Option<u64>,
}

/// The properties of an open backing device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Info {
    /// The given path, made absolute; links are not resolved, since the name of their target may change.
    pub path: PathBuf,
    /// A file or a block device.
    pub kind: Kind,
    /// Whether the page cache is bypassed.
    pub direct: bool,
    /// Why the page cache is not bypassed, although that was requested.
    pub buffered_reason: Option<String>,
    /// Whether operations go through io_uring.
    pub ring: bool,
    /// Why operations do not go through io_uring, although that was requested.
    pub synchronous_reason: Option<String>,
    /// Whether it is open read-only.
    pub read_only: bool,
    /// Unused bytes at the end when it was opened: the rest of a partial sector, or the growth of a device.
    pub unused_tail: u64,
}

/// An open, exclusively held file or block device.
#[derive(Debug)]
pub struct BackingFile {
    pub(crate) target: Arc<Target>,
    /// But for its size, which is `whole`.
    identity: Identity,
    /// The size of the file or device in bytes, as it was read last.
    whole: AtomicU64,
    info: Info,
}

/// The result of [`BackingFile::grow`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Growth {
    /// The size in bytes that was in use.
    pub before: u64,
    /// The size in bytes that is in use now; the same if it has not grown.
    pub now: u64,
    /// Warnings for the user.
    pub warnings: Vec<String>,
}

/// A file or device that was opened a moment ago.
pub(crate) struct Opened {
    pub file: Held,
    pub status: Status,
    direct: bool,
    reason: Option<String>,
    warnings: Vec<String>,
}

impl Opened {
    /// Opens a file or device without a lock or a claim on it.
    pub fn shared(path: &Path, expected: &Status, options: &Options) -> Result<Self> {
        let what = if expected.is_block() { "the device" } else { "the file system" };
        let (mut direct, mut reason) = (options.direct != Direct::Never, None);
        let file = loop {
            match open_flags(options, if direct { libc::O_DIRECT } else { 0 }).open(path) {
                Ok(file) => break file,
                Err(error)
                    if direct
                        && options.direct == Direct::Auto
                        && error.raw_os_error() == Some(libc::EINVAL) =>
                {
                    (direct, reason) = (false, Some(format!("{what} refuses direct I/O")));
                }
                Err(error) => return Err(open_error(path, Some(expected), options, &error)),
            }
        };
        let status = checked_status(&file, path, expected, options)?;
        Ok(Self { file: Held::new(file), status, direct, reason, warnings: Vec::new() })
    }

    /// Why reads go through the page cache, if they do.
    pub fn buffered(&self) -> Option<String> {
        let why = || self.reason.clone().unwrap_or_else(|| String::from("direct I/O is not wanted"));
        (!self.direct).then(why)
    }
}

impl BackingFile {
    /// Opens and locks `path`.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::Busy`] (mounted, locked, used by a loop device), [`ErrorKind::ReadOnly`],
    /// [`ErrorKind::InvalidArgument`] (a directory, a character device, no whole sector), [`ErrorKind::OutOfRange`]
    /// (smaller than it must be), [`ErrorKind::Permission`], [`ErrorKind::Unsupported`].
    pub fn open(path: impl AsRef<Path>, options: Options) -> Result<Self> {
        Ok(Self::open_as(path.as_ref(), options, None)?.0)
    }

    /// Opens and locks `path`, which must be the disk with the identity `recorded`. Also returns the warnings of
    /// [`Identity::check`].
    ///
    /// # Errors
    /// Those of [`open`](Self::open) and of [`Identity::check`]. Another disk is reported before any other error.
    pub fn open_recorded(
        path: impl AsRef<Path>,
        options: Options,
        recorded: &Identity,
    ) -> Result<(Self, Vec<String>)> {
        Self::open_as(path.as_ref(), options, Some(recorded))
    }

    fn open_as(given: &Path, options: Options, recorded: Option<&Identity>) -> Result<(Self, Vec<String>)> {
        check_options(&options)?;
        let path = std::path::absolute(given).map_err(|error| open_error(given, None, &options, &error))?;
        let status = sys::status_of(&path).map_err(|error| open_error(&path, None, &options, &error))?;
        let (kind, mut opened) = if status.is_block() {
            (Kind::Block, open_block_device(&path, &status, &options)?)
        } else if status.is_regular() {
            (Kind::File, open_file(&path, &status, &options)?)
        } else {
            let text = format!(
                "{} is {}; a backing device is a block device or a regular file",
                path.display(),
                status.type_name()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        };
        // 1. Lock it, so that no other user changes what the next steps check.
        let whole = match kind {
            Kind::Block => geometry::block_size(&opened.file, &path)?,
            Kind::File => {
                hold::hold_file(&mut opened.file, &opened.status, &path, options.read_only)?;
                opened.status = checked_status(&opened.file, &path, &opened.status, &options)?;
                opened.status.size
            }
        };
        // 2. Check its identity, before any call that could change it, even a time stamp.
        let identity = identity::of_open(&opened.file, &opened.status, kind, whole);
        let mut warnings = recorded.map_or(Ok(Vec::new()), |recorded| recorded.check(&identity, &path))?;
        warnings.append(&mut opened.warnings);
        // 3. Check that its geometry fits the one that clients use.
        let mut geometry = match kind {
            Kind::Block => geometry::of_block_device(&opened.file, &opened.status, whole, &path)?,
            Kind::File => file_geometry(&mut opened, &path, &options)?,
        };
        apply_recorded_geometry(&path, whole, &mut geometry, &options)?;
        if kind == Kind::File && !options.read_only {
            check_file_size_limit(&path, geometry.size)?;
        }
        let (ring, synchronous_reason) = engine(options.engine)?;
        let (commands, buffered) = (commands_of(kind, &opened, options.offload), opened.buffered());
        let info = Info {
            path: path.clone(),
            kind,
            direct: opened.direct,
            buffered_reason: opened.reason,
            ring,
            synchronous_reason,
            read_only: options.read_only,
            unused_tail: whole - geometry.size,
        };
        let target = Target {
            file: opened.file,
            path,
            kind,
            geometry,
            size: geometry.size.into(),
            read_only: options.read_only,
            is_named: opened.status.links > 0,
            length: Length::new(geometry.size),
            no_zero_range: false.into(),
            no_punch: false.into(),
            buffered,
            commands: RwLock::new(Arc::new(commands)),
        };
        Ok((Self { target: Arc::new(target), identity, whole: whole.into(), info }, warnings))
    }

    /// Reads the size of the file or device again and uses all of it, if it has grown. Returns the size in bytes before
    /// and now, which are whole sectors. Operations in flight are not disturbed. May block on the file system.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] if it has shrunk; [`ErrorKind::Backing`] for a file that was deleted or truncated since
    /// it was opened; [`ErrorKind::Busy`] if another user has the bytes that it has got; [`ErrorKind::System`] for a file
    /// that this process may not write to its end. Nothing changes then.
    pub fn grow(&self) -> Result<Growth> {
        let target = &*self.target;
        let (path, before) = (&target.path, target.size());
        let status = sys::status(target.file.as_fd()).map_err(|error| {
            Error::new(ErrorKind::System, format!("cannot read the size of {}", path.display()))
                .caused_by(error)
        })?;
        let whole = match target.kind {
            Kind::Block => geometry::block_size(&target.file, path)?,
            Kind::File => status.size,
        };
        if whole < before {
            return Err(identity::shrunk(path, before, whole));
        }
        target.check_files()?;
        let now = whole - whole % u64::from(target.geometry.sector);
        if now == before {
            return Ok(Growth { before, now, warnings: Vec::new() });
        }
        let warnings = match target.kind {
            Kind::Block => {
                beneath::claim_growth(&target.file.beneath, path, status.special, target.read_only)?
            }
            Kind::File => {
                if !target.read_only {
                    check_file_size_limit(path, now)?;
                }
                Vec::new()
            }
        };
        // 1. The file must be so long from now on. 2. Operations reach so far.
        target.length.raise(now);
        self.whole.store(whole, Ordering::Relaxed);
        target.size.fetch_max(now, Ordering::AcqRel);
        Ok(Growth { before, now, warnings })
    }

    /// Permits other commands for verifications and comparisons, of the queues that are opened from now on. Asks the
    /// device, which may block.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if the number of the device cannot be read; nothing changes then.
    pub fn set_offload(&self, offload: Offload) -> Result<()> {
        let target = &*self.target;
        if target.kind == Kind::File || target.commands().offload() == offload {
            return Ok(());
        }
        let status = sys::status(target.file.as_fd()).map_err(|error| {
            let text = format!("cannot read the number of {}", target.path.display());
            Error::new(ErrorKind::System, text).caused_by(error)
        })?;
        let commands = Arc::new(Commands::of_block_device(&target.file, status.special, offload));
        *target.commands.write().unwrap_or_else(PoisonError::into_inner) = commands;
        Ok(())
    }

    /// Watches the file for changes.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch::new(&self.target)
    }

    /// The properties of an open backing device.
    #[must_use]
    pub const fn info(&self) -> &Info {
        &self.info
    }
}

impl Backing for BackingFile {
    fn geometry(&self) -> BackingGeometry {
        BackingGeometry { size: self.target.size(), ..self.target.geometry }
    }

    fn identity(&self) -> Identity {
        self.identity.clone().with_size(self.whole.load(Ordering::Relaxed))
    }

    fn open_queue(&self, depth: usize) -> Result<Box<dyn PollableQueue>> {
        let target = Arc::clone(&self.target);
        if self.info.ring {
            Ok(Box::new(RingQueue::new(target, depth)?))
        } else {
            Ok(Box::new(SyncQueue::new(target)?))
        }
    }

    fn describe(&self) -> String {
        self.info.to_string()
    }

    fn verify_method(&self) -> String {
        self.target.verify_method()
    }
}

impl fmt::Display for Info {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind.name();
        let direct = if self.direct { "direct" } else { "through the page cache" };
        let ring = if self.ring { "io_uring" } else { "system calls" };
        write!(out, "{} ({kind}, {direct}, {ring}", self.path.display())?;
        if self.read_only {
            out.write_str(", read-only")?;
        }
        out.write_str(")")
    }
}

/// The commands by which the open device verifies and compares in itself.
pub(crate) fn commands_of(kind: Kind, opened: &Opened, offload: Offload) -> Commands {
    match kind {
        Kind::Block => Commands::of_block_device(&opened.file, opened.status.special, offload),
        Kind::File => Commands::none("it is a file"),
    }
}

pub(crate) fn open_flags(options: &Options, extra: i32) -> OpenOptions {
    let mut open = OpenOptions::new();
    open.read(true).write(!options.read_only).custom_flags(extra);
    open
}

fn open_block_device(path: &Path, expected: &Status, options: &Options) -> Result<Opened> {
    let mut direct = options.direct != Direct::Never;
    let mut reason = None;
    let file = loop {
        let flag = if direct { libc::O_DIRECT } else { 0 };
        match open_flags(options, libc::O_EXCL | flag).open(path) {
            Ok(file) => break file,
            Err(error)
                if direct && options.direct == Direct::Auto && error.raw_os_error() == Some(libc::EINVAL) =>
            {
                (direct, reason) = (false, Some(String::from("the device refuses direct I/O")));
            }
            Err(error) => {
                let claimed = error.raw_os_error() == Some(libc::EBUSY);
                let busy = hold::busy_block_device(expected, path, claimed);
                return Err(busy.unwrap_or_else(|| open_error(path, Some(expected), options, &error)));
            }
        }
    };
    let status = checked_status(&file, path, expected, options)?;
    if !options.read_only {
        refuse_set_read_only(path, &file, &status)?;
    }
    let mut file = Held::new(file);
    hold::refuse_loop_device(&file, &status, path)?;
    let found = beneath::claim(path, status.special, options.read_only)?;
    file.beneath = Claims::new(found.claims);
    Ok(Opened { file, status, direct, reason, warnings: found.warnings })
}

fn open_file(path: &Path, expected: &Status, options: &Options) -> Result<Opened> {
    if !options.read_only {
        refuse_without_write_bit(path, expected)?;
    }
    Opened::shared(path, expected, options)
}

pub(crate) fn refuse_set_read_only(path: &Path, device: &File, status: &Status) -> Result<()> {
    if hold::is_writable(device, status).unwrap_or(true) {
        return Ok(());
    }
    let text = format!("{} is set read-only; make it writable (blockdev --setrw)", path.display());
    Err(Error::new(ErrorKind::ReadOnly, text))
}

/// Root could write a file without a write bit; the mode is respected nevertheless.
pub(crate) fn refuse_without_write_bit(path: &Path, status: &Status) -> Result<()> {
    if status.mode & 0o222 != 0 {
        return Ok(());
    }
    let text = format!("{} is read-only: its mode has no write bit (chmod u+w)", path.display());
    Err(Error::new(ErrorKind::ReadOnly, text))
}

/// The status of the open file, which must be the file that was checked before.
fn checked_status(file: &File, path: &Path, expected: &Status, options: &Options) -> Result<Status> {
    let status = sys::status(file.as_fd()).map_err(|error| open_error(path, None, options, &error))?;
    if status.same_object(expected) {
        return Ok(status);
    }
    let text = format!("another file replaced {} while it was opened; try again", path.display());
    Err(Error::new(ErrorKind::Busy, text))
}

/// The geometry of a locked file; turns direct I/O off if the file does not support it. The file stays locked.
pub(crate) fn file_geometry(opened: &mut Opened, path: &Path, options: &Options) -> Result<BackingGeometry> {
    let mut sector = geometry::FILE_SECTOR;
    if opened.direct {
        match direct_sector(opened, options.sector) {
            Ok(wanted) => sector = wanted,
            Err(why) if options.direct == Direct::Always => {
                let text = format!("{} cannot be used with direct I/O: {why}", path.display());
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
            Err(why) => {
                let cleared = sys::clear_direct(opened.file.as_fd());
                cleared.map_err(|error| open_error(path, None, options, &error))?;
                (opened.direct, opened.reason) = (false, Some(why));
            }
        }
    }
    Ok(geometry::of_file(&opened.file, &opened.status, sector, options.read_only))
}

fn direct_sector(opened: &Opened, recorded: Option<u32>) -> std::result::Result<u32, String> {
    let wanted = geometry::direct_sector(&opened.file, &opened.status)?;
    match recorded {
        Some(recorded) if recorded < wanted => {
            Err(format!("the file system requires sectors of {wanted} bytes, and clients use {recorded}"))
        }
        _ => Ok(wanted),
    }
}

fn check_options(options: &Options) -> Result<()> {
    let fits = |sector: u32| (512..=4096).contains(&sector) && sector.is_power_of_two();
    match options.sector {
        Some(sector) if !fits(sector) => {
            let text = format!("a sector is a power of two from 512 to 4096 bytes, not {sector}");
            Err(Error::new(ErrorKind::InvalidArgument, text))
        }
        _ => Ok(()),
    }
}

/// Adjusts the geometry to the one that clients use, or returns the reason why it does not fit.
pub(crate) fn apply_recorded_geometry(
    path: &Path,
    whole: u64,
    geometry: &mut BackingGeometry,
    options: &Options,
) -> Result<()> {
    if let Some(recorded) = options.sector {
        if recorded < geometry.sector {
            let text = format!(
                "{} has sectors of {} bytes, and {recorded} were recorded; use the recorded device",
                path.display(),
                geometry.sector
            );
            return Err(Error::new(ErrorKind::Exchanged, text));
        }
        geometry.sector = recorded;
        geometry.physical_sector = geometry.physical_sector.max(recorded);
    }
    let sector = u64::from(geometry.sector);
    if whole < sector {
        let text = format!("{} has {whole} bytes, less than one sector of {sector}", path.display());
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    match options.size {
        Some(recorded) if recorded > whole => return Err(identity::shrunk(path, recorded, whole)),
        recorded => geometry.size = recorded.unwrap_or(whole),
    }
    geometry.size -= geometry.size % sector;
    Ok(())
}

/// Checks the limit on file sizes: a write beyond it would raise a signal that ends the process.
fn check_file_size_limit(path: &Path, size: u64) -> Result<()> {
    let limit = sys::file_size_limit();
    if limit >= size {
        return Ok(());
    }
    let text = format!(
        "{} has {size} bytes, but this process may write files up to {limit} only; raise the limit (ulimit -f)",
        path.display()
    );
    Err(Error::new(ErrorKind::System, text))
}

pub(crate) fn engine(wanted: Engine) -> Result<(bool, Option<String>)> {
    if wanted == Engine::Synchronous {
        return Ok((false, None));
    }
    match raw::available() {
        Ok(()) => Ok((true, None)),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
            let text = format!("cannot open a queue: {error}; raise the limit of open files (ulimit -n)");
            Err(Error::new(ErrorKind::System, text))
        }
        Err(error) => Ok((false, Some(format!("io_uring is not available: {error}")))),
    }
}

pub(crate) fn open_error(
    path: &Path,
    status: Option<&Status>,
    options: &Options,
    error: &io::Error,
) -> Error {
    let name = path.display();
    let is_file = status.is_some_and(Status::is_regular);
    let no_write_bit = status.is_some_and(|status| status.mode & 0o222 == 0 || status.is_block());
    let (kind, text) = match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) => (ErrorKind::NotFound, format!("{name} does not exist")),
        Some(libc::ENXIO | libc::ENODEV | libc::ENOMEDIUM) => {
            (ErrorKind::NotFound, format!("{name} has no device behind it: {error}"))
        }
        Some(libc::EROFS) => {
            (ErrorKind::ReadOnly, format!("{name} is read-only, or lies on a read-only file system"))
        }
        Some(libc::EBUSY | libc::ETXTBSY) => {
            (ErrorKind::Busy, format!("{name} is in use, as swap space or as a running program: {error}"))
        }
        Some(libc::EPERM) if !options.read_only && is_file => {
            (ErrorKind::ReadOnly, format!("{name} may not be written: {error}; is it immutable (lsattr)?"))
        }
        Some(libc::EACCES) if !options.read_only && no_write_bit && is_readable(path) => {
            (ErrorKind::ReadOnly, format!("{name} may be read but not written"))
        }
        Some(libc::EACCES | libc::EPERM) => {
            let text = format!(
                "opening {name} is not permitted: {error}; run as a user, or in a container, with the permission"
            );
            (ErrorKind::Permission, text)
        }
        Some(libc::EINVAL) if options.direct == Direct::Always => {
            (ErrorKind::Unsupported, format!("{name} cannot be used with direct I/O"))
        }
        Some(libc::EINVAL | libc::ELOOP | libc::ENAMETOOLONG | libc::EISDIR) => {
            (ErrorKind::InvalidArgument, format!("{name} cannot be opened: {error}"))
        }
        _ => (ErrorKind::System, format!("{name} cannot be opened: {error}")),
    };
    Error::new(kind, text).at_path(name.to_string())
}

fn is_readable(path: &Path) -> bool {
    File::open(path).is_ok()
}
