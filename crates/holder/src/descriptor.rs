//! One open descriptor of a process, as `/proc` describes it.
//!
//! Always true here: nothing is asked of the open file itself. Only a device node is looked at, and only where its file system is
//! the kernel's own or on a local disk.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// A file as the kernel's table of locks names it: the device of its file system, and its number there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Inode {
    device: (u32, u32),
    number: u64,
}

impl Inode {
    /// The file of a descriptor of this process. The numbers are not those of `stat` where a file system makes up its own (btrfs,
    /// NFS): they are the ones that `/proc` shows of the descriptor and of its mount.
    pub fn of(file: BorrowedFd<'_>) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", file.as_raw_fd())).ok()?;
        let (status, mut mounts) = (status_of_open(file)?, Mounts::of(Path::new("/proc/thread-self")));
        let mounted = field(&text, "mnt_id:").and_then(|id| Some(mounts.get(id)?.device));
        Some(Self {
            device: mounted.unwrap_or((status.stx_dev_major, status.stx_dev_minor)),
            number: field(&text, "ino:").unwrap_or(status.stx_ino),
        })
    }

    /// From a line of `fdinfo`: `lock: 1: OFDLCK ADVISORY WRITE -1 fe:00:131 0 EOF`.
    fn of_lock(line: &str) -> Option<Self> {
        let place =
            line.strip_prefix("lock:")?.split_whitespace().find(|word| word.split(':').count() == 3)?;
        let mut parts = place.split(':');
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
    /// The descriptor that an entry of a process's folder `fd` stands for; none where it may not be seen, or is closed by now.
    pub fn new(entry: &fs::DirEntry) -> Option<Self> {
        let path = entry.path();
        let target = fs::read_link(&path).ok()?;
        Some(Self { path, target, information: OnceCell::new() })
    }

    /// What the link of the descriptor says.
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

    /// The files that this description has locks on: its own.
    pub fn locks(&self) -> impl Iterator<Item = Inode> {
        self.information().lines().filter_map(Inode::of_lock)
    }

    /// The number of the block device that is open, if it is one.
    pub fn block_device(&self, mounts: &mut Mounts) -> Option<(u32, u32)> {
        if !self.target.is_absolute() {
            return None;
        }
        let mount = field(self.information(), "mnt_id:").and_then(|id| mounts.get(id))?;
        if mount.may_wait {
            return None;
        }
        let path = CString::new(self.path.as_os_str().as_bytes()).ok()?;
        let status = status_at(libc::AT_FDCWD, &path, libc::AT_STATX_DONT_SYNC).ok()?;
        let block = u32::from(status.stx_mode) & libc::S_IFMT == libc::S_IFBLK;
        block.then_some((status.stx_rdev_major, status.stx_rdev_minor))
    }
}

/// One mount.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mount {
    device: (u32, u32),
    /// A look at a file there may wait for another machine or process.
    may_wait: bool,
}

/// The mounts that a process sees, read when they are needed.
#[derive(Debug)]
pub(crate) struct Mounts {
    table: PathBuf,
    mounts: Option<BTreeMap<u64, Mount>>,
}

impl Mounts {
    pub fn of(process: &Path) -> Self {
        Self { table: process.join("mountinfo"), mounts: None }
    }

    fn get(&mut self, id: u64) -> Option<Mount> {
        let table = &self.table;
        let mounts = self.mounts.get_or_insert_with(|| {
            let text = fs::read(table).unwrap_or_default();
            String::from_utf8_lossy(&text).lines().filter_map(mount).collect()
        });
        mounts.get(&id).copied()
    }
}

/// `36 35 98:0 /root /point rw,options optional... - type source super-options`
fn mount(line: &str) -> Option<(u64, Mount)> {
    let mut words = line.split(' ');
    let id = words.next()?.parse().ok()?;
    let (major, minor) = words.nth(1)?.split_once(':')?;
    let device = (major.parse().ok()?, minor.parse().ok()?);
    let kind = words.skip_while(|word| *word != "-").nth(1)?;
    Some((id, Mount { device, may_wait: may_wait(kind) }))
}

/// Whether a file system of this type is served by another machine or process. What is not known here is taken to be.
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

/// What the kernel remembers of an open file; its server is not asked.
fn status_of_open(file: BorrowedFd<'_>) -> Option<libc::statx> {
    status_at(file.as_raw_fd(), c"", libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC).ok()
}

/// What is true of an open file now; its server may be asked.
pub(crate) fn status_of_open_now(file: BorrowedFd<'_>) -> io::Result<libc::statx> {
    status_at(file.as_raw_fd(), c"", libc::AT_EMPTY_PATH)
}

pub(crate) fn status_at(
    folder: libc::c_int,
    path: &std::ffi::CStr,
    flags: libc::c_int,
) -> io::Result<libc::statx> {
    // SAFETY: all zeroes are a valid value of this structure of plain numbers.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    let wanted = libc::STATX_TYPE | libc::STATX_INO | libc::STATX_NLINK | libc::STATX_SIZE;
    // SAFETY: the path is a C string, and the kernel writes a `struct statx` through the pointer.
    let result = unsafe { libc::statx(folder, path.as_ptr(), flags, wanted, &raw mut status) };
    if result == 0 { Ok(status) } else { Err(io::Error::last_os_error()) }
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
    fn a_mount_tells_its_device_and_whether_it_may_wait() {
        let read = |kind: &str| mount(&format!("36 35 0:44 / /mnt rw shared:1 - {kind} source rw"));
        let (id, local) = read("ext4").expect("well formed");
        assert_eq!((id, local.device, local.may_wait), (36, (0, 44), false));
        assert!(
            ["nfs4", "fuse.sshfs", "9p", "cifs"]
                .iter()
                .all(|kind| read(kind).is_some_and(|it| it.1.may_wait))
        );
        assert!(mount("36 35 x:y / / rw - a b").is_none() && mount("").is_none());
    }
}
