//! The disk beneath a file.
//!
//! Invariants: only a file system that is known to map its files onto the one device that is mounted has a disk beneath. Others
//! (Btrfs, overlays, several devices) name places that are none on the device.

use cbd_sys::DeviceNumber;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The numbers of the file systems: ext2 to ext4, XFS.
const KNOWN: [u64; 2] = [0xEF53, 0x5846_5342];

/// Why a file has no disk beneath that can be looked at.
pub type Why = &'static str;

/// The disk beneath `file`: its number, and the path of its node.
///
/// # Errors
/// Why there is none.
pub fn disk_of(file: &File) -> Result<(DeviceNumber, PathBuf), Why> {
    let kind = rustix::fs::fstatfs(file).map_err(|_| "its file system does not answer")?.f_type;
    if !KNOWN.contains(&u64::try_from(kind).unwrap_or(0)) {
        return Err("its file system is none whose files are known to be on one disk (ext4, XFS)");
    }
    if cbd_sys::extents::is_of_realtime_device(file.as_fd()) {
        return Err("it is on the real-time device of its file system");
    }
    let status = file.metadata().map_err(|_| "it cannot be examined")?;
    let number = DeviceNumber::from_stat(status.dev());
    node(Path::new("/sys"), number).map(|node| (number, node)).ok_or("the disk beneath has no node in /dev")
}

/// The node of a block device in `/dev`.
#[must_use]
pub fn node(sys: &Path, number: DeviceNumber) -> Option<PathBuf> {
    let text = fs::read_to_string(sys.join(format!("dev/block/{number}/uevent"))).ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
    let path = Path::new("/dev").join(name);
    let status = fs::metadata(&path).ok()?;
    (DeviceNumber::from_stat(status.rdev()) == number).then_some(path)
}

/// A block device in sysfs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Block {
    /// The whole disk.
    pub disk: DeviceNumber,
    /// The kernel's name of the whole disk.
    pub name: String,
    /// The first byte on the whole disk.
    pub start: u64,
    /// The folder of the whole disk.
    pub folder: PathBuf,
}

impl Block {
    /// The block device with this number; none without sysfs.
    #[must_use]
    pub fn of(sys: &Path, number: DeviceNumber) -> Option<Self> {
        /// Bytes of a sector in sysfs.
        const SECTOR: u64 = 512;
        let folder = fs::canonicalize(sys.join(format!("dev/block/{number}"))).ok()?;
        let (mut disk, mut start, mut whole) = (number, 0, folder.clone());
        if folder.join("partition").exists() {
            start = fs::read_to_string(folder.join("start")).ok()?.trim().parse::<u64>().ok()? * SECTOR;
            whole = folder.parent()?.to_owned();
            disk = DeviceNumber::parse(&fs::read_to_string(whole.join("dev")).ok()?)?;
        }
        let name = whole.file_name()?.to_str()?.to_owned();
        Some(Self { disk, name, start, folder: whole })
    }

    /// The disks that this one stands on, at any depth, for device mapper, md and loop devices.
    #[must_use]
    pub fn members(&self, sys: &Path) -> Vec<Self> {
        /// Real stacks have fewer.
        const MEMBERS_MAX: usize = 4096;
        let mut members: Vec<Self> = Vec::new();
        let mut next = 0;
        let mut of = self.clone();
        loop {
            let entries = fs::read_dir(of.folder.join("slaves")).into_iter().flatten().flatten();
            let slaves = entries
                .filter_map(|entry| DeviceNumber::parse(&fs::read_to_string(entry.path().join("dev")).ok()?));
            for member in slaves.chain(of.behind_loop()).filter_map(|number| Self::of(sys, number)) {
                if members.len() < MEMBERS_MAX && !members.contains(&member) {
                    members.push(member);
                }
            }
            let Some(member) = members.get(next) else { return members };
            of = member.clone();
            next += 1;
        }
    }

    /// The block device behind a loop device, or the one on which the file behind it is.
    fn behind_loop(&self) -> Option<DeviceNumber> {
        let path = fs::read_to_string(self.folder.join("loop/backing_file")).ok()?;
        let status = fs::metadata(path.strip_suffix('\n').unwrap_or(&path)).ok()?;
        let is_device = status.file_type().is_block_device();
        Some(DeviceNumber::from_stat(if is_device { status.rdev() } else { status.dev() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn device(sys: &Path, folder: &str, number: &str) -> PathBuf {
        let folder = sys.join(folder);
        fs::create_dir_all(folder.join("slaves")).unwrap();
        fs::create_dir_all(sys.join("dev/block")).unwrap();
        fs::write(folder.join("dev"), number).unwrap();
        symlink(&folder, sys.join("dev/block").join(number)).unwrap();
        folder
    }

    #[test]
    fn a_partition_begins_on_its_disk_and_a_stack_has_members() {
        let sys = tempfile::tempdir().unwrap();
        let sys = &sys.path().canonicalize().unwrap();
        let disk = device(sys, "block/ublkb0", "259:0");
        let partition = device(sys, "block/ublkb0/ublkb0p1", "259:1");
        fs::write(partition.join("partition"), "1").unwrap();
        fs::write(partition.join("start"), "2048\n").unwrap();
        let mapped = device(sys, "block/dm-0", "253:0");
        symlink(&partition, mapped.join("slaves/ublkb0p1")).unwrap();
        let number = |major, minor| DeviceNumber { major, minor };
        let block = Block::of(sys, number(259, 1)).unwrap();
        assert_eq!((block.disk, block.name.as_str(), block.start), (number(259, 0), "ublkb0", 1 << 20));
        assert_eq!(block.folder, disk);
        let whole = Block::of(sys, number(253, 0)).unwrap();
        assert_eq!(whole.members(sys), [block]);
        assert_eq!(Block::of(sys, number(1, 2)), None);
    }
}
