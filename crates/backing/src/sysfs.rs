//! Attributes of block devices and loop devices from the kernel's text files.
//!
//! Invariants: a missing or unreadable attribute is `None` or empty, never an error: attributes differ between kernels,
//! and `/sys` and `/proc` may not be mounted.

use cbd_sys::DeviceNumber;
use cbd_types::ByteRange;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// Bytes of a sector in `/sys`.
const SECTOR: u64 = 512;

/// A block device's directory below `/sys`.
#[derive(Clone, Debug)]
pub(crate) struct BlockDirectory {
    path: PathBuf,
    /// The directory of the whole disk; the same if the device is not a partition.
    disk: PathBuf,
}

impl BlockDirectory {
    pub fn of(device: DeviceNumber) -> Option<Self> {
        Self::below(Path::new("/sys"), device)
    }

    /// As [`of`](Self::of), in another directory tree than `/sys`.
    pub fn below(sys: &Path, device: DeviceNumber) -> Option<Self> {
        let path = fs::canonicalize(sys.join(format!("dev/block/{device}"))).ok()?;
        let disk = if path.join("partition").exists() { path.parent()?.to_path_buf() } else { path.clone() };
        Some(Self { path, disk })
    }

    pub fn is_partition(&self) -> bool {
        self.path != self.disk
    }

    /// The name of the whole disk, as in `/dev`.
    pub fn name(&self) -> &str {
        self.disk.file_name().and_then(|name| name.to_str()).unwrap_or_default()
    }

    /// The number of the whole disk.
    pub fn disk_number(&self) -> Option<DeviceNumber> {
        DeviceNumber::parse(&self.disk("dev")?)
    }

    /// Translates bytes of a partition to its disk.
    pub fn within_disk(&self, bytes: ByteRange) -> Option<ByteRange> {
        let sectors = |name: &str| Some(self.own(name)?.parse::<u64>().ok()?.saturating_mul(SECTOR));
        Some(within(bytes, sectors("start")?, sectors("size")?))
    }

    /// The path of a loop device's backing file, as the kernel reports it.
    pub fn loop_backing(&self) -> Option<PathBuf> {
        loop_backing(&self.disk)
    }

    /// The bytes of its file that a loop device maps.
    pub fn loop_bytes(&self) -> ByteRange {
        loop_bytes(&self.disk)
    }

    /// The members of a device of device mapper, md and the like.
    pub fn slaves(&self) -> Vec<DeviceNumber> {
        let folder = self.disk.join("slaves");
        names_in(&folder)
            .iter()
            .filter_map(|name| DeviceNumber::parse(&attribute(&folder.join(name).join("dev"))?))
            .collect()
    }

    /// The port that the disk is plugged into, without the name that the kernel assigned; `None` for a virtual device.
    pub fn port(&self) -> Option<String> {
        let path = self.disk.strip_prefix("/sys/devices").ok()?.to_str()?;
        let plugged = path.split("/block/").next()?;
        (!plugged.starts_with("virtual")).then(|| plugged.to_owned())
    }

    /// An attribute of the device itself, which may be a partition.
    pub fn own(&self, name: &str) -> Option<String> {
        attribute(&self.path.join(name))
    }

    /// An attribute of the whole disk.
    pub fn disk(&self, name: &str) -> Option<String> {
        attribute(&self.disk.join(name))
    }

    /// The bytes of an attribute of the whole disk, without line feeds and blanks at the end; `None` where it is empty.
    pub fn disk_bytes(&self, name: &str) -> Option<Vec<u8>> {
        let bytes = fs::read(self.disk.join(name)).ok()?;
        let bytes = bytes.trim_ascii_end().to_vec();
        (!bytes.trim_ascii().is_empty()).then_some(bytes)
    }

    /// The folder of the device itself.
    pub fn folder(&self) -> &Path {
        &self.path
    }

    /// Where the partitions of a disk begin, in bytes; of a partition none.
    pub fn partition_starts(&self) -> Vec<u64> {
        let start = |path: PathBuf| attribute(&path.join("start"))?.parse::<u64>().ok()?.checked_mul(SECTOR);
        let mut starts: Vec<u64> = self.partitions().into_iter().filter_map(start).collect();
        starts.sort_unstable();
        starts
    }

    /// A numeric attribute of the whole disk's queue.
    pub fn queue(&self, name: &str) -> Option<u64> {
        self.disk(&format!("queue/{name}"))?.parse().ok()
    }

    /// A field of the device's `uevent`.
    pub fn event(&self, name: &str) -> Option<String> {
        let text = fs::read_to_string(self.path.join("uevent")).ok()?;
        text.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
    }

    /// Devices that use this one, a partition of it, or, for a partition, the whole disk.
    pub fn holders(&self) -> Vec<String> {
        let mut directories = vec![self.path.clone(), self.disk.clone()];
        directories.extend(self.partitions());
        directories.dedup();
        directories.iter().flat_map(|path| names_in(&path.join("holders"))).collect()
    }

    /// Numbers of the device, of its partitions, and of the disk that it is a partition of.
    pub fn relatives(&self) -> Vec<DeviceNumber> {
        let mut paths = vec![self.path.clone(), self.disk.clone()];
        paths.extend(self.partitions());
        paths.iter().filter_map(|path| DeviceNumber::parse(&attribute(&path.join("dev"))?)).collect()
    }

    fn partitions(&self) -> Vec<PathBuf> {
        if self.is_partition() {
            return Vec::new();
        }
        let inside = names_in(&self.disk).into_iter().map(|name| self.disk.join(name));
        inside.filter(|path| path.join("partition").exists()).collect()
    }
}

fn names_in(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The trimmed text of a file; `None` where it is empty.
pub(crate) fn attribute(path: &Path) -> Option<String> {
    // Read as bytes: a serial number need not be UTF-8.
    let bytes = fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.trim_matches(|letter: char| letter.is_whitespace() || letter.is_control());
    (!text.is_empty()).then(|| text.to_owned())
}

/// The id of this boot.
pub(crate) fn boot() -> Option<String> {
    attribute(Path::new("/proc/sys/kernel/random/boot_id"))
}

/// A loop device and the path of its file as the kernel reports it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct LoopDevice {
    pub name: String,
    pub file: PathBuf,
    /// The bytes of the file that it maps.
    pub bytes: ByteRange,
}

/// Translates `bytes` of an object to the larger object in which it begins at `start` and has `length` bytes.
pub(crate) fn within(bytes: ByteRange, start: u64, length: u64) -> ByteRange {
    let end = start.saturating_add(bytes.end.min(length));
    ByteRange { start: start.saturating_add(bytes.start).min(end), end }
}

/// The path of the backing file of the loop device with this directory below `/sys`. A name may consist of any bytes,
/// including blanks at its end: the kernel appends one line feed.
fn loop_backing(directory: &Path) -> Option<PathBuf> {
    let mut path = fs::read(directory.join("loop/backing_file")).ok()?;
    if path.last() == Some(&b'\n') {
        path.pop();
    }
    (!path.is_empty()).then(|| PathBuf::from(OsString::from_vec(path)))
}

/// The bytes of its file that the loop device with this directory below `/sys` maps.
fn loop_bytes(directory: &Path) -> ByteRange {
    let number = |name: &str| attribute(&directory.join(name))?.parse::<u64>().ok();
    let limit = number("loop/sizelimit").filter(|limit| *limit > 0).unwrap_or(u64::MAX);
    within(ByteRange { start: 0, end: u64::MAX }, number("loop/offset").unwrap_or(0), limit)
}

/// All loop devices with a backing file.
pub(crate) fn loop_devices() -> Vec<LoopDevice> {
    let names = names_in(Path::new("/sys/block")).into_iter().filter(|name| name.starts_with("loop"));
    let with_file = |name: String| {
        let directory = Path::new("/sys/block").join(&name);
        Some(LoopDevice { file: loop_backing(&directory)?, bytes: loop_bytes(&directory), name })
    };
    names.filter_map(with_file).collect()
}
