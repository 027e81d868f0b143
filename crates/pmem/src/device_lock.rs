//! Locks of a character device that hold for every node through which it is opened.
//!
//! A file lock belongs to an inode, and each `mknod` creates another inode for the same device. So two more files are locked
//! besides the opened node: the node that the kernel itself created (the name in the device's `uevent`, in `/dev`), and the
//! file `resource` of the device in `/sys`, which only root may open. A user who may not open the device cannot lock either
//! file.
//!
//! Invariants: no owner locks an inode twice; a file that is missing or cannot be opened is left out.
//!
//! Elsewhere: the lock of the node itself (`file`). Containers with their own `/dev` and their own network namespace have
//! other inodes for both files: a device must be given to one container only.

use crate::file;
use crate::sysfs;
use cbd_sys::{DeviceNumber, Lock};
use rustix::fs::FlockOperation;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// One of the locks of a device. As with the lock of the node itself, the drop releases it, except in a forked child, which
/// has only a copy.
#[derive(Debug)]
pub(crate) struct DeviceLock {
    file: File,
    process: u32,
    /// The lock of a node belongs to the open file description; a file that can only be opened for reading has the other kind
    /// of lock.
    is_node: bool,
}

impl DeviceLock {
    const fn new(file: File, process: u32, is_node: bool) -> Self {
        Self { file, process, is_node }
    }
}

impl DeviceLock {
    /// Lets other owners lock it who do the same.
    pub(crate) fn share(&self) -> io::Result<()> {
        let shared = if self.is_node {
            file::lock_as(&self.file, Lock::Shared)
        } else {
            file::lock_all(&self.file, FlockOperation::NonBlockingLockShared)
        };
        shared.map(drop)
    }
}

impl Drop for DeviceLock {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // If the unlock fails, the lock ends when the descriptor is closed.
            let _ = if self.is_node {
                file::lock_as(&self.file, Lock::None)
            } else {
                file::lock_all(&self.file, FlockOperation::NonBlockingUnlock)
            };
        }
    }
}

/// Locks the files that represent the character device whose open node has this metadata. If another owner has locked one of
/// them, the inner error is that file.
pub(crate) fn take(
    (sys, dev): (&Path, &Path),
    node: &Metadata,
    exclusive: bool,
) -> io::Result<Result<Vec<DeviceLock>, File>> {
    let number = DeviceNumber::from_stat(node.rdev());
    let mut locks = Vec::new();
    let Some(directory) = sysfs::of_character_device(sys, number) else { return Ok(Ok(locks)) };
    if let Some(file) = own_node(&directory, dev, node, exclusive) {
        if !file::lock_as(&file, if exclusive { Lock::Exclusive } else { Lock::Shared })? {
            return Ok(Err(file));
        }
        locks.push(DeviceLock::new(file, std::process::id(), true));
    }
    if let Ok(file) = File::open(directory.join("resource")) {
        let operation = if exclusive {
            FlockOperation::NonBlockingLockExclusive
        } else {
            FlockOperation::NonBlockingLockShared
        };
        if !file::lock_all(&file, operation)? {
            return Ok(Err(file));
        }
        locks.push(DeviceLock::new(file, std::process::id(), false));
    }
    Ok(Ok(locks))
}

/// The node that the kernel created for the device, unless it is the opened node.
fn own_node(directory: &Path, dev: &Path, node: &Metadata, exclusive: bool) -> Option<File> {
    let event = fs::read_to_string(directory.join("uevent")).ok()?;
    let name = event.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
    let path = dev.join(name);
    let is_device = |found: &Metadata| found.file_type().is_char_device() && found.rdev() == node.rdev();
    if !fs::metadata(&path).is_ok_and(|found| is_device(&found)) {
        return None;
    }
    let mut options = fs::OpenOptions::new();
    options.read(true).write(exclusive).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let file = options.open(&path).ok()?;
    let found = file.metadata().ok()?;
    let is_other = (found.dev(), found.ino()) != (node.dev(), node.ino());
    (is_device(&found) && is_other).then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::Locked;
    use std::process::Command;

    /// A second node of a device; it is deleted with its directory.
    fn second_node(folder: &Path, name: &str) -> File {
        let path = folder.join(name);
        let made = Command::new("mknod").arg(&path).args(["c", "1", "7"]).status();
        assert!(made.expect("mknod is there").success());
        File::options().read(true).write(true).open(path).expect("it opens")
    }

    #[test]
    fn a_device_that_was_made_twice_has_one_owner() {
        if !rustix::process::geteuid().is_root() {
            return println!("not run: it makes device nodes, as root");
        }
        let folder = tempfile::tempdir_in("/dev").expect("a folder where nodes can be opened");
        let (one, other) = (second_node(folder.path(), "one"), second_node(folder.path(), "other"));
        let kernels = || File::options().read(true).write(true).open("/dev/full").expect("always there");
        let owner = Locked::take(one).expect("asked").expect("free");
        assert!(Locked::take(other.try_clone().expect("a copy")).expect("asked").is_err(), "the other node");
        assert!(Locked::take(kernels()).expect("asked").is_err(), "the kernel's node");
        drop(owner);
        let owner = Locked::take(kernels()).expect("asked").expect("free");
        assert!(Locked::take(other).expect("asked").is_err(), "a node of ours");
        drop(owner);
    }

    #[test]
    fn a_device_without_a_kernel_node_has_one_owner_or_several_readers() {
        let folder = tempfile::tempdir().expect("a folder");
        let directory = folder.path().join("dev/char/1:7");
        fs::create_dir_all(&directory).expect("made");
        fs::write(directory.join("resource"), "0x1000").expect("written");
        fs::write(directory.join("uevent"), "DEVNAME=missing\n").expect("written");
        let places = (folder.path(), folder.path());
        let node = fs::metadata("/dev/full").expect("always there");
        let take = |exclusive| take(places, &node, exclusive).expect("asked");
        let owner = take(true).expect("free");
        assert_eq!(owner.len(), 1);
        let somebodys = take(true).expect_err("it has an owner");
        let holder = cbd_holder::of_lock(std::os::fd::AsFd::as_fd(&somebodys)).expect("told");
        assert!(holder.contains(&std::process::id().to_string()), "{holder}");
        assert!(take(false).is_err(), "it has an owner");
        drop(owner);
        let readers = [take(false).expect("free"), take(false).expect("free for readers")];
        assert!(take(true).is_err(), "it has readers");
        drop(readers);
        take(true).expect("free");
    }
}
