//! The loop device over the file: binding it, its settings and its reported limits.
//!
//! Invariants: the device is bound with direct I/O and without a partition scan, and with AUTOCLEAR: the
//! kernel unbinds it when its last opener closes it.
//!
//! Elsewhere: the thread that holds it open and releases it ([`thread`]), the file beneath
//! ([`crate::worker`]), the link to the device ([`cbd_export::link`]).

mod thread;

pub use thread::{LoopThread, NotReleased};

use cbd_export::system_error;
use cbd_sys::loop_device::{self, LO_FLAGS_AUTOCLEAR, LO_FLAGS_DIRECT_IO, LO_FLAGS_READ_ONLY, LO_NAME_SIZE};
use cbd_types::{Context, Error, ErrorKind, Geometry, Result};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Loop devices tried before the attempt fails: another process may take the free one first.
const ATTEMPTS: usize = 64;
/// The prefix of the path in the name of a loop device.
pub const NAME_PREFIX: &str = "cbd:";
/// The largest request of the loop device: the payload of one message.
const REQUEST_KIB_MAX: u64 = 1024;
/// Read-ahead of sequential reads: two of the largest requests, as the kernel chooses for devices that report
/// an optimal request size. A loop device cannot report one; without this setting it keeps the value of its
/// previous user, or one that the kernel derives from the disk beneath.
const READ_AHEAD_KIB: u64 = 2 * REQUEST_KIB_MAX;
/// The kernel's default read-ahead.
const DEFAULT_READ_AHEAD_KIB: u64 = 128;

/// A backing file to bind a loop device to.
#[derive(Clone, Debug)]
pub struct Binding {
    /// The backing file.
    pub file: PathBuf,
    /// The device in it.
    pub geometry: Geometry,
    /// Whether the device may not be written.
    pub read_only: bool,
}

/// A bound loop device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoopDevice {
    /// Its number.
    pub number: u32,
    /// Its node.
    pub path: PathBuf,
    /// Its device number, (major, minor).
    pub device: (u32, u32),
    /// The limits that its users see.
    pub limits: QueueLimits,
}

impl LoopDevice {
    /// Whether the kernel unbinds it when its last user closes it (AUTOCLEAR).
    pub fn has_autoclear(&self) -> bool {
        read_setting(self.number, "loop/autoclear").is_some_and(|flag| flag == "1")
    }
}

/// The limits that the kernel reports to users of the loop device, and its queue settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QueueLimits {
    /// Logical sector in bytes.
    pub logical_block_size: u64,
    /// Largest discard in bytes; 0 where none is offered.
    pub discard_max_bytes: u64,
    /// Granularity of discards in bytes.
    pub discard_granularity: u64,
    /// Largest write of zeroes without data in bytes.
    pub write_zeroes_max_bytes: u64,
    /// Whether flushes are sent.
    pub write_back: bool,
    /// Whether FUA writes are sent as such; otherwise as a write and a flush.
    pub fua: bool,
    /// Largest request in KiB.
    pub max_sectors_kb: u64,
    /// Read-ahead of sequential reads in KiB.
    pub read_ahead_kb: u64,
    /// Smallest efficient request in bytes: the sector, on a loop device.
    pub minimum_io_size: u64,
    /// Optimal request in bytes; 0, since a loop device offers no setting for it.
    pub optimal_io_size: u64,
    /// Whether it is reported as rotational: never, since the cache serves reads and writes without seeks.
    pub rotational: bool,
    /// Requests in flight at most.
    pub nr_requests: u64,
}

/// N of exactly `/dev/loopN`.
pub fn loop_number(path: &Path) -> Option<u32> {
    cbd_export::link::number(path, "/dev/loop")
}

/// Whether a loop device has a backing file.
pub fn is_bound(number: u32) -> bool {
    read_setting(number, "loop/backing_file").is_some()
}

/// Whether a loop device carries the project's mark: it belongs to a CBD daemon, which may run in another
/// namespace.
pub fn is_marked(number: u32) -> bool {
    let marked = |device: File| {
        let info = loop_device::status(device.as_fd()).ok()?;
        Some(info.name().starts_with(NAME_PREFIX.as_bytes()))
    };
    File::open(format!("/dev/loop{number}")).ok().and_then(marked).unwrap_or(false)
}

/// Whether a loop device is bound to this file. Queries the kernel alone, not the server of the file.
pub fn is_bound_to(number: u32, file: &Path) -> bool {
    read_setting(number, "loop/backing_file").is_some_and(|bound| Path::new(&bound) == file)
}

/// As [`is_bound_to`], also where the mount with the file is detached from this namespace: its path then
/// begins at that mount.
fn may_be_bound_to(number: u32, file: &Path) -> bool {
    let detached = file.file_name().map(|name| Path::new("/").join(name));
    is_bound_to(number, file) || detached.is_some_and(|file| is_bound_to(number, &file))
}

/// Whether no request is in flight to a loop device. Queries the kernel alone.
fn is_idle(number: u32) -> bool {
    read_setting(number, "inflight").is_none_or(|text| text.split_whitespace().all(|count| count == "0"))
}

/// Unbinds a device that no thread of this process holds open, at once or when its last user closes it. Its
/// file must be served, or its connection must have ended.
pub fn unbind(number: u32) -> io::Result<()> {
    loop_device::clear(open_node(Path::new(&format!("/dev/loop{number}")))?.as_fd())
}

fn open_node(path: &Path) -> io::Result<File> {
    // Not for writing: udev would read the device again at every close.
    OpenOptions::new().read(true).open(path)
}

fn bind(binding: &Binding) -> Result<(File, LoopDevice)> {
    cbd_sys::process::unshare_descriptors().map_err(|error| {
        system_error(
            "the loop device's thread cannot have descriptors of its own (it needs Linux 5.9)",
            &error,
        )
    })?;
    let file = OpenOptions::new()
        .read(true)
        .write(!binding.read_only)
        .custom_flags(libc::O_DIRECT)
        .open(&binding.file)
        .map_err(|error| system_error(binding.file.display(), &error))?;
    let control = open_control()?;
    for _ in 0..ATTEMPTS {
        let number = loop_device::free(control.as_fd()).map_err(|error| no_loop_device(&error))?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = match open_or_make_node(&path, number) {
            Ok(device) => device,
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => continue,
            Err(error) => return Err(system_error(path.display(), &error)),
        };
        match configure(&device, &file, binding) {
            Ok(()) => return finish(device, path, number, binding),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => {
                let text = format!("{} cannot be bound to {}", path.display(), binding.file.display());
                return Err(system_error(text, &error)
                    .while_doing("a loop device with direct I/O, Linux 5.8 or newer"));
            }
        }
    }
    Err(Error::new(ErrorKind::Busy, "other processes took every free loop device first; try again"))
}

/// Opens the control device of the loop driver.
pub fn open_control() -> Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/loop-control").map_err(|error| {
        system_error(
            "/dev/loop-control (loop devices need root and the kernel's loop module: modprobe loop)",
            &error,
        )
    })
}

fn no_loop_device(error: &io::Error) -> Error {
    let text = "the kernel has no free loop device; detach unused ones with losetup -d";
    let error = system_error(text, error);
    if error.kind() == ErrorKind::System { Error::new(ErrorKind::NoSpace, error.line()) } else { error }
}

/// Opens the node. Where /dev is no devtmpfs, the node of a device that was just created has to be created
/// first.
pub fn open_or_make_node(path: &Path, number: u32) -> io::Result<File> {
    let open = || OpenOptions::new().read(true).write(true).open(path);
    match open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let (major, minor) = device_number(number).ok_or(error)?;
            let mode = Mode::RUSR | Mode::WUSR;
            match mknodat(CWD, path, FileType::BlockDevice, mode, makedev(major, minor)) {
                Err(error) if error != Errno::EXIST => Err(error.into()),
                _ => open(),
            }
        }
        opened => opened,
    }
}

fn configure(device: &File, file: &File, binding: &Binding) -> io::Result<()> {
    let read_only = if binding.read_only { LO_FLAGS_READ_ONLY } else { 0 };
    let flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO | read_only;
    loop_device::configure(
        device.as_fd(),
        file.as_fd(),
        binding.geometry.sector,
        flags,
        marked(&binding.file),
    )
}

/// The name of a loop device of this project: a mark and as much of the path as fits.
fn marked(file: &Path) -> [u8; LO_NAME_SIZE] {
    let mut name = [0; LO_NAME_SIZE];
    let text = NAME_PREFIX.as_bytes().iter().chain(file.as_os_str().as_bytes());
    name.iter_mut().take(LO_NAME_SIZE - 1).zip(text).for_each(|(to, &from)| *to = from);
    name
}

/// Applies the settings, and reads back the resulting limits.
fn finish(device: File, path: PathBuf, number: u32, binding: &Binding) -> Result<(File, LoopDevice)> {
    let Binding { geometry, read_only, .. } = binding;
    if read_setting(number, "loop/dio").as_deref() != Some("1") {
        let text = format!("the kernel does not do direct I/O between {} and a FUSE file", path.display());
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    if !geometry.discard && !read_only {
        // The file system refuses this discard, and the kernel then stops offering discards. (A setting would
        // have the same effect, but cannot be undone, and outlives the binding.) If the kernel still offers
        // discards, each one is refused.
        let length = u64::from(geometry.discard_granularity.max(geometry.sector));
        let _ = cbd_sys::ioctl::block_discard(device.as_fd(), 0, length);
    }
    let largest = read_number(number, "queue/max_hw_sectors_kb").min(REQUEST_KIB_MAX);
    write_setting(number, "queue/max_sectors_kb", largest)?;
    // After the other settings: the kernel may recompute this one with each of them. Without it reads are
    // slower, not wrong.
    let _ = write_setting(number, "queue/read_ahead_kb", READ_AHEAD_KIB);
    let described = describe(path, number)?;
    // From here on the device is held open for reading only: closing a device that was open for writing makes
    // udev read it.
    let held = open_node(&described.path).map_err(|error| system_error(described.path.display(), &error))?;
    drop(device);
    Ok((held, described))
}

/// The description of a bound device, from the kernel.
fn describe(path: PathBuf, number: u32) -> Result<LoopDevice> {
    let numbers = device_number(number).ok_or_else(|| {
        Error::new(ErrorKind::System, format!("/sys/block/loop{number}/dev cannot be read"))
    })?;
    let limits = QueueLimits {
        logical_block_size: read_number(number, "queue/logical_block_size"),
        discard_max_bytes: read_number(number, "queue/discard_max_bytes"),
        discard_granularity: read_number(number, "queue/discard_granularity"),
        write_zeroes_max_bytes: read_number(number, "queue/write_zeroes_max_bytes"),
        write_back: read_setting(number, "queue/write_cache").as_deref() == Some("write back"),
        fua: read_number(number, "queue/fua") == 1,
        max_sectors_kb: read_number(number, "queue/max_sectors_kb"),
        read_ahead_kb: read_number(number, "queue/read_ahead_kb"),
        minimum_io_size: read_number(number, "queue/minimum_io_size"),
        optimal_io_size: read_number(number, "queue/optimal_io_size"),
        rotational: read_number(number, "queue/rotational") == 1,
        nr_requests: read_number(number, "queue/nr_requests"),
    };
    Ok(LoopDevice { number, path, device: numbers, limits })
}

/// The device number of a loop device, (major, minor).
pub fn device_number(number: u32) -> Option<(u32, u32)> {
    let text = read_setting(number, "dev")?;
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Restores the settings of [`finish`], which outlive the binding, for the next user of the loop device. If
/// the kernel refuses, they stay: the device is slower then, not wrong.
fn reset(number: u32) {
    // Zero selects the kernel's default.
    let _ = write_setting(number, "queue/max_sectors_kb", 0);
    let _ = write_setting(number, "queue/read_ahead_kb", DEFAULT_READ_AHEAD_KIB);
}

/// Reads one sysfs attribute of a loop device.
pub fn read_setting(number: u32, name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/sys/block/loop{number}/{name}")).ok()?;
    Some(text.trim_end_matches('\n').to_owned())
}

/// The size of a loop device in bytes, as its users see it.
pub fn size(number: u32) -> Option<u64> {
    // In units of 512 bytes, whatever the sector of the device is.
    read_setting(number, "size")?.parse::<u64>().ok()?.checked_mul(512)
}

fn read_number(number: u32, name: &str) -> u64 {
    read_setting(number, name).and_then(|text| text.parse().ok()).unwrap_or_default()
}

fn write_setting(number: u32, name: &str, value: u64) -> Result<()> {
    let path = format!("/sys/block/loop{number}/{name}");
    fs::write(&path, value.to_string())
        .map_err(|error| system_error(path, &error))
        .context(|| format!("a setting of /dev/loop{number} could not be set"))
}
