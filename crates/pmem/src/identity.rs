//! The layers under a path, so that a caller can refuse a region, a backing file or a log on a device that this daemon
//! serves: requests to it would wait for themselves.
//!
//! Invariants: the result describes the system at the time of the call. Layers that cannot be resolved (a network file
//! system, a FUSE file system) end the chain.
//!
//! Elsewhere: the decision to refuse a path.

use crate::sysfs::{self, SYS};
use crate::{errors, file};
use cbd_sys::DeviceNumber;
use cbd_sys::mounts::{self, Mount};
use cbd_types::Result;
use std::collections::VecDeque;
use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A path, and the layers under it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Device number of the file system that holds the file.
    pub device: DeviceNumber,
    /// The inode number of the file there.
    pub inode: u64,
    /// The type of that file system.
    pub file_system: String,
    /// Block devices under it, and under the files that back those devices: the nearest first, each once.
    pub layers: Vec<Layer>,
}

/// A block device under a path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layer {
    /// Its device number.
    pub number: DeviceNumber,
    /// Its name in /dev, as the kernel reports it.
    pub name: String,
    /// Its backing file, if it is a loop device.
    pub file: Option<PathBuf>,
}

/// The directory of device nodes. Its file system is the kernel's own, so queries to it do not block.
const NODES: &str = "/dev";

/// An upper bound above any realistic number of layers.
const LAYERS: usize = 64;

/// The layers under `path`. A path that does not exist yet has the layers of its directory.
///
/// # Errors
/// When the path, or its directory, cannot be queried.
pub fn backing_identity(path: &Path) -> Result<Identity> {
    let existing = if path.exists() { path } else { directory_of(path) };
    let metadata = fs::metadata(existing)
        .map_err(|error| errors::from_io(&error, format!("cannot look at {}", existing.display())))?;
    // O_PATH does not open the device itself.
    let file_system = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(existing)
        .and_then(|file: File| file::file_system(&file))
        .map_or_else(|_| "unknown".to_owned(), |system| file_system_name(system.magic));
    let mounts = mounts::list().unwrap_or_default();
    let mut walk = Walk { mounts: &mounts, layers: Vec::new(), next: VecDeque::new() };
    let device = DeviceNumber::from_stat(metadata.dev());
    if metadata.file_type().is_block_device() {
        walk.next.push_back(DeviceNumber::from_stat(metadata.rdev()));
    } else if !metadata.file_type().is_char_device() {
        walk.push_file_system(device);
    }
    walk.run();
    Ok(Identity { device, inode: metadata.ino(), file_system, layers: walk.layers })
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

struct Walk<'a> {
    mounts: &'a [Mount],
    layers: Vec<Layer>,
    next: VecDeque<DeviceNumber>,
}

impl Walk<'_> {
    fn run(&mut self) {
        while let Some(number) = self.next.pop_front() {
            if self.layers.len() < LAYERS && !self.layers.iter().any(|layer| layer.number == number) {
                self.visit(number);
            }
        }
    }

    /// The device under a file system is the one with its device number. If that number is virtual (btrfs, overlay), it is
    /// the device from which the file system was mounted.
    fn push_file_system(&mut self, device: DeviceNumber) {
        if device.major != 0 {
            self.next.push_back(device);
            return;
        }
        for mount in self.mounts.iter().filter(|mount| mount.device == device) {
            self.push_block_device(&mount.source);
        }
    }

    /// The file behind a loop device may be on a foreign file system, which may not respond: only its path is evaluated.
    fn push_file_of_others(&mut self, path: &Path) {
        if path.starts_with(NODES) {
            return self.push_block_device(path);
        }
        if let Some(mount) = mounts::containing(self.mounts, path) {
            self.push_file_system(mount.device);
        }
    }

    /// A path outside `/dev` is not queried: it may be on any file system, and it is not a block device from which a file
    /// system is mounted.
    fn push_block_device(&mut self, path: &Path) {
        if path.starts_with(NODES)
            && let Ok(metadata) = fs::metadata(path)
            && metadata.file_type().is_block_device()
        {
            self.next.push_back(DeviceNumber::from_stat(metadata.rdev()));
        }
    }

    fn visit(&mut self, number: DeviceNumber) {
        let Some(directory) = sysfs::of_block_device(Path::new(SYS), number) else { return };
        let name = directory.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let file = sysfs::loop_backing(&directory);
        if let Some(file) = &file {
            self.push_file_of_others(file);
        }
        self.layers.push(Layer { number, name, file });
        // The components of device mapper and md devices, and the disk of a partition.
        for slave in fs::read_dir(directory.join("slaves")).into_iter().flatten().flatten() {
            self.push_directory(&slave.path());
        }
        if directory.join("partition").exists()
            && let Some(disk) = directory.parent()
        {
            self.push_directory(disk);
        }
    }

    fn push_directory(&mut self, directory: &Path) {
        self.next.extend(sysfs::read_line(&directory.join("dev")).as_deref().and_then(DeviceNumber::parse));
    }
}

/// The name of a file system by its magic number.
pub(crate) fn file_system_name(magic: u64) -> String {
    let name = match magic {
        TMPFS => "tmpfs",
        HUGETLBFS => "hugetlbfs",
        0x8584_58F6 => "ramfs",
        0xEF53 => "ext4",
        0x5846_5342 => "xfs",
        0x9123_683E => "btrfs",
        0xF2F5_2010 => "f2fs",
        0x2FC1_2FC1 => "zfs",
        0x794C_7630 => "overlay",
        0x6969 => "nfs",
        0x6573_5546 => "fuse",
        0x0102_1997 => "9p",
        0xFF53_4D42 => "cifs",
        0xFE53_4D42 => "smb",
        0x00C3_6400 => "ceph",
        0x1373 => "devfs",
        _ => return format!("{magic:#x}"),
    };
    name.to_owned()
}

pub(crate) const TMPFS: u64 = 0x0102_1994;
pub(crate) const HUGETLBFS: u64 = 0x9584_58F6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_does_not_exist_has_the_layers_of_its_directory() {
        let directory = tempfile::tempdir().expect("a directory");
        let there = backing_identity(directory.path()).expect("known");
        let not_yet = backing_identity(&directory.path().join("region")).expect("known");
        assert_eq!(there, not_yet);
    }

    #[test]
    fn the_block_device_beneath_a_file_is_named() {
        let identity = backing_identity(&std::env::current_exe().expect("known")).expect("known");
        if identity.device.major != 0 {
            assert_eq!(identity.layers.first().map(|layer| layer.number), Some(identity.device));
        }
    }

    #[test]
    fn a_missing_directory_is_an_error_that_names_it() {
        let error = backing_identity(Path::new("/no/such/place")).expect_err("is missing");
        assert!(error.line().contains("/no/such"), "{error}");
    }
}
