//! The block device that a file is on, and where its bytes are on the device of a backend.
//!
//! Invariants: a file system over several devices, or over another device, is on none.

use cbd_sys::DeviceNumber;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Bytes of a sector in sysfs.
const SECTOR: u64 = 512;

/// A block device of the backend.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    path: PathBuf,
    number: DeviceNumber,
}

impl Device {
    /// The device at `path`; none if there is no block device.
    pub fn open(path: &Path) -> Option<Self> {
        let status = fs::metadata(path).ok()?;
        let is_block = status.file_type().is_block_device();
        is_block.then(|| Self { path: path.to_owned(), number: DeviceNumber::from_stat(status.rdev()) })
    }
}

/// The first byte, on the device of the backend, of the file system that holds `file`.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] that names the device of the file and those of the backend.
pub fn start_of_file_system(
    file: &Path,
    status: &Metadata,
    devices: &[Device],
    backend: &str,
) -> Result<(u64, DeviceNumber)> {
    start_in(Path::new("/sys/dev/block"), DeviceNumber::from_stat(status.dev()), devices).map_err(|on| {
        let wanted: Vec<String> =
            devices.iter().map(|device| format!("{} ({})", device.path.display(), device.number)).collect();
        let text = format!(
            "{} is on {on}, and not on {}, the block device of backend {backend}, or a partition of it",
            super::shown(file),
            wanted.join(" or ")
        );
        Error::new(ErrorKind::InvalidArgument, text)
    })
}

/// As [`start_of_file_system`], with the folder of sysfs; the error names the device.
fn start_in(
    sysfs: &Path,
    number: DeviceNumber,
    devices: &[Device],
) -> core::result::Result<(u64, DeviceNumber), String> {
    if devices.iter().any(|device| device.number == number) {
        return Ok((0, number));
    }
    let folder = sysfs.join(number.to_string());
    if folder.join("partition").exists() {
        let read = |path: PathBuf| fs::read_to_string(path).ok();
        let whole = read(folder.join("../dev")).and_then(|text| DeviceNumber::parse(&text));
        let start = read(folder.join("start")).and_then(|text| text.trim().parse::<u64>().ok());
        if let (Some(whole), Some(start)) = (whole, start)
            && devices.iter().any(|device| device.number == whole)
        {
            return Ok((start * SECTOR, number));
        }
    }
    let target = fs::canonicalize(&folder).ok();
    let name = target.as_deref().and_then(Path::file_name).map(|name| format!("{} ", name.to_string_lossy()));
    Err(match name {
        Some(name) => format!("{name}({number})"),
        None => format!("device {number}, which is no block device"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_begins_behind_the_start_of_its_device() {
        let folder = tempfile::tempdir().expect("a folder");
        let partition = folder.path().join("disk/part");
        fs::create_dir_all(&partition).expect("a folder");
        fs::write(folder.path().join("disk/dev"), "7:3\n").expect("a file");
        fs::write(partition.join("partition"), "1\n").expect("a file");
        fs::write(partition.join("start"), "2048\n").expect("a file");
        std::os::unix::fs::symlink(&partition, folder.path().join("259:5")).expect("a link");
        let number = |major, minor| DeviceNumber { major, minor };
        let device = Device { path: "/dev/cbd0".into(), number: number(7, 3) };
        let start = |wanted| start_in(folder.path(), wanted, std::slice::from_ref(&device));
        assert_eq!(start(number(7, 3)), Ok((0, number(7, 3))));
        assert_eq!(start(number(259, 5)), Ok((1 << 20, number(259, 5))));
        let other = start(number(0, 45)).expect_err("it is another one");
        assert_eq!(other, "device 0:45, which is no block device");
        let elsewhere = Device { path: "/dev/cbd1".into(), number: number(7, 4) };
        assert_eq!(start_in(folder.path(), number(259, 5), &[elsewhere]), Err("part (259:5)".to_owned()));
    }

    #[test]
    fn what_is_no_block_device_is_no_device_of_a_backend() {
        assert_eq!(Device::open(Path::new("/dev/null")), None);
        assert_eq!(Device::open(Path::new("nbd:unix:/run/x")), None);
    }
}
