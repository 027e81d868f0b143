//! One open descriptor of a process, from `/proc`.
//!
//! Invariants: the open file itself is not queried. Only a device node is queried, and only if its file system is the
//! kernel's own or on a local disk.

use cbd_sys::mounts::Mount;
use rustix::fs::{AtFlags, CWD, FileType, Statx, StatxFlags, statx};
use rustix::path::Arg;
use std::cell::OnceCell;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// A file as the kernel's table of locks names it: the device of its file system, and its inode number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Inode {
    device: (u32, u32),
    number: u64,
}

impl Inode {
    /// The file of a descriptor of this process. The numbers are those that `/proc` shows for the descriptor and its
    /// mount; they differ from those of `stat` on file systems with their own device numbers (btrfs, NFS).
    pub fn of(file: BorrowedFd<'_>) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", file.as_raw_fd())).ok()?;
        let status = status_at(file, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC).ok()?;
        let mounts = Mounts::of(Path::new("/proc/thread-self"));
        let mounted = field(&text, "mnt_id:").and_then(|id| Some(mounts.get(id)?.device.pair()));
        Some(Self {
            device: mounted.unwrap_or((status.stx_dev_major, status.stx_dev_minor)),
            number: field(&text, "ino:").unwrap_or(status.stx_ino),
        })
    }

    /// Parses a line of `fdinfo`: `lock: 1: OFDLCK ADVISORY WRITE -1 fe:00:131 0 EOF`.
    fn of_lock(line: &str) -> Option<Self> {
        let fixture =
            line.strip_prefix("lock:")?.split_whitespace().find(|word| word.split(':').count() == 3)?;
        let mut parts = fixture.split(':');
        let mut hexadecimal = || u32::from_str_radix(parts.next()?, 16).ok();
        let device = (hexadecimal()?, hexadecimal()?);
        Some(Self { device, number: parts.next()?.parse().ok()? })
    }
}

/// An open descriptor of a process.
#[derive(Debug)]
pub(crate) struct Descriptor {
    path: PathBuf,
    target: PathBuf,
    information: OnceCell<String>,
}

impl Descriptor {
    /// The descriptor of an entry of a process's directory `fd`; `None` if it is not accessible, or already closed.
    pub fn new(entry: &fs::DirEntry) -> Option<Self> {
        let path = entry.path();
        let target = fs::read_link(&path).ok()?;
        Some(Self { path, target, information: OnceCell::new() })
    }

    /// The target of the descriptor's link.
    pub fn target(&self) -> &Path {
        &self.target
    }

    fn information(&self) -> &str {
        self.information.get_or_init(|| {
            let number = self.path.file_name().unwrap_or_default();
            let folder = self.path.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
            fs::read_to_string(folder.join("fdinfo").join(number)).unwrap_or_default()
        })
    }

    /// The files on which this open file description holds locks.
    pub fn locks(&self) -> impl Iterator<Item = Inode> {
        self.information().lines().filter_map(Inode::of_lock)
    }

    /// The number of the block device, if the descriptor is that of a block device.
    pub fn block_device(&self, mounts: &Mounts) -> Option<(u32, u32)> {
        if !self.target.is_absolute() {
            return None;
        }
        let mount = field(self.information(), "mnt_id:").and_then(|id| mounts.get(id))?;
        if may_wait(&mount.kind) {
            return None;
        }
        let status = status_at(CWD, &self.path, AtFlags::STATX_DONT_SYNC).ok()?;
        let block = FileType::from_raw_mode(status.stx_mode.into()).is_block_device();
        block.then_some((status.stx_rdev_major, status.stx_rdev_minor))
    }
}

/// The mounts that are visible to a thread, read on demand.
#[derive(Debug)]
pub(crate) struct Mounts {
    thread: PathBuf,
    mounts: OnceCell<Vec<Mount>>,
}

impl Mounts {
    pub fn of(thread: &Path) -> Self {
        Self { thread: thread.to_owned(), mounts: OnceCell::new() }
    }

    fn get(&self, id: u64) -> Option<&Mount> {
        let mounts = self.mounts.get_or_init(|| cbd_sys::mounts::of(&self.thread).unwrap_or_default());
        mounts.iter().find(|mount| mount.id == id)
    }
}

/// Whether another machine or process serves file systems of this type. Unknown types count as such.
fn may_wait(kind: &str) -> bool {
    const LOCAL: [&str; 12] = [
        "devtmpfs", "tmpfs", "ramfs", "rootfs", "overlay", "ext4", "ext3", "ext2", "xfs", "btrfs", "f2fs",
        "zfs",
    ];
    !LOCAL.contains(&kind)
}

/// The number after `name` in the text of an `fdinfo` file.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok()
}

/// The type, inode number, number of links and size of `path` in the directory `folder`. Queries the file's server unless the
/// flags prevent it.
pub(crate) fn status_at(folder: impl AsFd, path: impl Arg, flags: AtFlags) -> io::Result<Statx> {
    let wanted = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::NLINK | StatxFlags::SIZE;
    Ok(statx(folder, path, flags, wanted)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_read_with_the_file_that_it_is_on() {
        let expected = Some(Inode { device: (0xfe, 0x10), number: 131 });
        for line in [
            "lock:\t1: OFDLCK ADVISORY  WRITE -1 fe:10:131 0 EOF",
            "lock:\t1: POSIX  ADVISORY  READ 77 fe:10:131 0 4095",
            "lock:\t2: FLOCK  ADVISORY  WRITE 77 fe:10:131 0 EOF",
        ] {
            assert_eq!(Inode::of_lock(line), expected, "{line}");
        }
        for line in ["", "lock:", "pos:\t0", "lock:\t1: OFDLCK ADVISORY  WRITE -1 <none>:0 0 EOF"] {
            assert_eq!(Inode::of_lock(line), None, "{line}");
        }
    }

    #[test]
    fn only_a_known_local_file_system_does_not_wait() {
        assert!(!may_wait("ext4"));
        assert!(["nfs4", "fuse.sshfs", "9p", "cifs", ""].into_iter().all(may_wait));
    }
}
