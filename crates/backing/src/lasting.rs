//! How a rule of udev recognizes a block device after the next boot: by attributes in `/sys`, not by a name.
//!
//! Invariants: the marks are those of [`Identity`](crate::Identity), as the kernel shows them; the strongest one is
//! chosen. A disk that only has a port is recognized by the port, as the identity does.
//!
//! Elsewhere: the text of the rule, and what it does (the daemon).

use crate::identity::Kind;
use crate::sysfs::BlockDirectory;
use crate::{BackingFile, sys};
use std::os::fd::AsFd;
use std::path::PathBuf;

/// Attributes of a disk that identify it, from the strongest to the weakest, with those that must be the same, too: one
/// maker's serial number may be another's.
const MARKS: [(&str, &[&str]); 11] = [
    ("wwid", &[]),
    ("device/wwid", &[]),
    ("nguid", &[]),
    ("eui", &[]),
    ("dm/uuid", &[]),
    ("md/uuid", &[]),
    ("loop/backing_file", &["loop/offset"]),
    ("serial", &["device/model"]),
    ("device/serial", &["device/model"]),
    ("device/cid", &[]),
    ("dm/name", &[]),
];

/// A partition of a disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Partition {
    /// Its number.
    pub number: String,
    /// Its first sector of 512 bytes.
    pub start: String,
}

/// What a block device is recognized by.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lasting {
    /// Attributes of the whole disk below its folder in `/sys`, and their values; empty if the port is all that is known.
    pub attributes: Vec<(&'static str, Vec<u8>)>,
    /// The port that the disk is plugged into, below `/sys/devices`; none for a virtual device.
    pub port: Option<String>,
    /// The partition, if the device is one.
    pub partition: Option<Partition>,
    /// Its folder in `/sys`, in this boot.
    pub folder: PathBuf,
}

impl Lasting {
    /// Whether anything distinguishes it from other disks after the next boot.
    #[must_use]
    pub const fn is_known(&self) -> bool {
        !self.attributes.is_empty() || self.port.is_some()
    }

    fn of(directory: &BlockDirectory) -> Self {
        let value = |name: &str| directory.disk_bytes(name);
        let found = MARKS.iter().find_map(|(mark, others)| Some((*mark, value(mark)?, *others)));
        let attributes = found.map_or_else(Vec::new, |(mark, bytes, others)| {
            let others = others.iter().filter_map(|other| Some((*other, value(other)?)));
            std::iter::once((mark, bytes)).chain(others).collect()
        });
        let own = |name: &str| directory.own(name);
        let partition = directory
            .is_partition()
            .then(|| Some(Partition { number: own("partition")?, start: own("start")? }));
        Self {
            attributes,
            // NVMe and others have no folder "block" on the way, by which the disk is found below its port.
            port: directory.port().filter(|_| directory.folder().to_string_lossy().contains("/block/")),
            partition: partition.flatten(),
            folder: directory.folder().to_owned(),
        }
    }
}

impl BackingFile {
    /// What a rule of udev recognizes the device by; `None` for a file, and where `/sys` does not show the device.
    #[must_use]
    pub fn lasting(&self) -> Option<Lasting> {
        if self.target.kind == Kind::File {
            return None;
        }
        let status = sys::status(self.target.file.as_fd()).ok()?;
        let directory = BlockDirectory::of(status.special)?;
        let lasting = Lasting::of(&directory);
        // A partition that cannot be told from its disk is not recognized: a rule would take the whole disk.
        (!directory.is_partition() || lasting.partition.is_some()).then_some(lasting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_sys::DeviceNumber;
    use std::fs;
    use std::path::Path;

    /// A disk and its second partition in a made-up `/sys`.
    fn disk(sys: &Path, attributes: &[(&str, &str)]) -> [Lasting; 2] {
        let disk = sys.join("devices/pci0/virtio3/block/vdb");
        fs::create_dir_all(disk.join("vdb2")).unwrap();
        fs::create_dir_all(disk.join("device")).unwrap();
        fs::create_dir_all(sys.join("dev/block")).unwrap();
        for (name, value) in attributes {
            fs::write(disk.join(name), value).unwrap();
        }
        fs::write(disk.join("vdb2/partition"), "2\n").unwrap();
        fs::write(disk.join("vdb2/start"), "2048\n").unwrap();
        let link =
            |number: &str, to: &Path| std::os::unix::fs::symlink(to, sys.join("dev/block").join(number));
        link("254:16", &disk).unwrap();
        link("254:18", &disk.join("vdb2")).unwrap();
        ["254:16", "254:18"].map(|number| {
            let number = DeviceNumber::parse(number).unwrap();
            Lasting::of(&BlockDirectory::below(sys, number).unwrap())
        })
    }

    #[test]
    fn the_strongest_mark_is_chosen_and_a_partition_has_its_number_and_start() {
        let sys = tempfile::tempdir().unwrap();
        let marks = [("device/serial", "S1 \n"), ("device/wwid", "naa.5000c500\n"), ("device/model", "M\n")];
        let [whole, partition] = disk(sys.path(), &marks);
        assert_eq!(whole.attributes, [("device/wwid", b"naa.5000c500".to_vec())]);
        assert_eq!(whole.partition, None);
        assert_eq!(partition.attributes, whole.attributes);
        assert_eq!(partition.partition, Some(Partition { number: "2".into(), start: "2048".into() }));
    }

    #[test]
    fn a_serial_number_goes_with_the_model_and_bytes_are_kept_as_they_are() {
        let sys = tempfile::tempdir().unwrap();
        let [whole, _] = disk(sys.path(), &[("device/serial", "  S\"1 \n"), ("device/model", "M x\n")]);
        let wanted = [("device/serial", b"  S\"1".to_vec()), ("device/model", b"M x".to_vec())];
        assert_eq!(whole.attributes, wanted);
    }

    #[test]
    fn a_disk_without_a_mark_is_not_known_without_a_port() {
        let sys = tempfile::tempdir().unwrap();
        let [whole, _] = disk(sys.path(), &[("device/serial", "\n")]);
        // The made-up folder is not below /sys/devices, so there is no port either.
        assert!(!whole.is_known() && whole.attributes.is_empty(), "{whole:?}");
    }
}
