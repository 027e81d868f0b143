//! The two exports through which the demonstration reaches a device: a file of an ext4 file system on a kernel
//! block device, or an NBD connection.
//!
//! Invariants: a write that returns was acknowledged by the device, not by a page cache. After an error the content
//! of the block is unknown.

use crate::block::BLOCK;
use crate::filesystem::{Mounted, Tools};
use crate::nbd::Connection;
use cbd_types::{AlignedBuffer, Context, Error, ErrorKind, Result};
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Timeout of one NBD request, more than the slow disk needs.
const NBD_TIMEOUT: Duration = Duration::from_secs(20);

/// The export through which the device is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ExportKind {
    /// ext4 on a kernel block device, made of a FUSE file and a loop device.
    FuseLoop,
    /// NBD on a unix socket.
    Nbd,
}

impl ExportKind {
    /// A description for people.
    pub const fn description(self) -> &'static str {
        match self {
            Self::FuseLoop => "a file of an ext4 file system on the kernel block device /dev/cbdN, O_DIRECT",
            Self::Nbd => "NBD on a unix socket",
        }
    }

    /// The value of the daemon's option `export`.
    pub fn option(self, socket: &Path) -> String {
        match self {
            Self::FuseLoop => "fuse-loop".to_owned(),
            Self::Nbd => format!("nbd:unix:{}", socket.display()),
        }
    }
}

/// The point at which a write is complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sync {
    /// When the device has completed it.
    Completed,
    /// When the device has completed it as a FUA write (`O_DSYNC` on a file).
    Durable,
}

/// A prepared device.
#[derive(Debug)]
pub enum Target {
    /// A file on a mounted file system.
    File {
        /// The file.
        path: PathBuf,
        /// Its file system.
        mounted: Mounted,
    },
    /// A server.
    Nbd(PathBuf),
}

impl Target {
    /// Prepares a new device: creates a file system with a file of `slots` blocks if the export needs one, and
    /// writes the blocks.
    ///
    /// # Errors
    /// The system error, with the device.
    pub fn create(export: ExportKind, device: &Path, folder: &Path, slots: u32) -> Result<Self> {
        if export == ExportKind::Nbd {
            let target = Self::open_existing(export, device, folder)?;
            let mut io = target.open(Sync::Completed)?;
            in_pieces(slots, |at, piece| io.write((at / BLOCK as u64) as u32, piece))?;
            return Ok(target);
        }
        let tools = Tools::find()?;
        tools.make_file_system(device)?;
        let target = Self::open_existing(export, device, folder)?;
        if let Self::File { path, .. } = &target {
            fill_with_zeroes(path, slots)?;
        }
        Ok(target)
    }

    /// Opens a prepared device.
    ///
    /// # Errors
    /// The system error, with the device.
    pub fn open_existing(export: ExportKind, device: &Path, folder: &Path) -> Result<Self> {
        if export == ExportKind::Nbd {
            return Ok(Self::Nbd(device.to_owned()));
        }
        let mounted =
            Mounted::mount(device, &folder.join("mnt"), "noatime,lazytime,noinit_itable,nosuid,nodev")?;
        Ok(Self::File { path: mounted.path().join(FILE), mounted })
    }

    /// Opens the device for one thread.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(&self, sync: Sync) -> Result<Io> {
        match self {
            Self::File { path, .. } => {
                let flags = libc::O_DIRECT | if sync == Sync::Durable { libc::O_DSYNC } else { 0 };
                let file = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .custom_flags(flags)
                    .open(path)
                    .map_err(|error| system(format!("{} cannot be opened", path.display()), &error))?;
                Ok(Io::File(file))
            }
            Self::Nbd(socket) => {
                let connection = Connection::open(socket, NBD_TIMEOUT)?;
                Ok(Io::Nbd { connection, fua: sync == Sync::Durable })
            }
        }
    }

    /// The root of the file system, if there is one.
    pub fn root(&self) -> Option<&Path> {
        match self {
            Self::File { mounted, .. } => Some(mounted.path()),
            Self::Nbd(_) => None,
        }
    }

    /// Closes the device; every [`Io`] must be closed before.
    ///
    /// # Errors
    /// When the file system cannot be unmounted.
    pub fn close(self) -> Result<()> {
        match self {
            Self::File { mounted, .. } => mounted.unmount(),
            Self::Nbd(_) => Ok(()),
        }
    }
}

/// The name of the file that has the blocks.
pub const FILE: &str = "work";

/// Writes the blocks, because the first write to a merely allocated block changes metadata of the file system.
fn fill_with_zeroes(path: &Path, slots: u32) -> Result<()> {
    let failed = |error: std::io::Error| system(format!("{} cannot be filled", path.display()), &error);
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .map_err(failed)?;
    in_pieces(slots, |at, piece| file.write_all_at(piece, at).map_err(failed))?;
    file.sync_all().map_err(failed)?;
    // The name must be durable, too.
    File::open(path.parent().unwrap_or(Path::new("/"))).and_then(|folder| folder.sync_all()).map_err(failed)
}

/// Zeroes for `slots` blocks, in pieces.
fn in_pieces(slots: u32, mut write: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
    let zeroes = AlignedBuffer::zeroed(1 << 20);
    let all = u64::from(slots) * BLOCK as u64;
    let mut at = 0;
    while at < all {
        crate::interrupt::check()?;
        let length = zeroes.len().min(usize::try_from(all - at).unwrap_or(usize::MAX));
        write(at, &zeroes[..length])?;
        at += length as u64;
    }
    Ok(())
}

/// One thread's open device.
#[derive(Debug)]
pub enum Io {
    /// A file.
    File(File),
    /// A connection.
    Nbd {
        /// The connection.
        connection: Connection,
        /// Whether writes are FUA writes.
        fua: bool,
    },
}

impl Io {
    /// A plain file, such as a backing device without its cache.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn plain(path: &Path) -> Result<Self> {
        File::open(path)
            .map(Self::File)
            .map_err(|error| system(format!("{} cannot be opened", path.display()), &error))
    }

    /// Reads block `slot`.
    ///
    /// # Errors
    /// The error of the device.
    pub fn read(&mut self, slot: u32, into: &mut [u8]) -> Result<()> {
        let at = u64::from(slot) * BLOCK as u64;
        match self {
            Self::File(file) => {
                file.read_exact_at(into, at).map_err(|error| system(format!("reading block {slot}"), &error))
            }
            Self::Nbd { connection, .. } => {
                connection.read(at, into).context(|| format!("reading block {slot}"))
            }
        }
    }

    /// Writes block `slot`.
    ///
    /// # Errors
    /// The error of the device; whether the block was written is unknown then.
    pub fn write(&mut self, slot: u32, data: &[u8]) -> Result<()> {
        let at = u64::from(slot) * BLOCK as u64;
        match self {
            Self::File(file) => {
                file.write_all_at(data, at).map_err(|error| system(format!("writing block {slot}"), &error))
            }
            Self::Nbd { connection, fua } => {
                connection.write(at, data, *fua).context(|| format!("writing block {slot}"))
            }
        }
    }
}

/// An error of the system with the operation that failed.
pub fn system(what: impl Into<String>, error: &std::io::Error) -> Error {
    let what: String = what.into();
    let kind =
        if error.kind() == std::io::ErrorKind::Interrupted { ErrorKind::Stopped } else { ErrorKind::System };
    Error::new(kind, what).caused_by(cbd_sys::errors::copy_of(error))
}
