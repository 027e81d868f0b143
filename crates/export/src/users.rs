//! Who uses the device: so that a stop can be refused with a name.
//!
//! Always true here: looking changes nothing and asks no file system's server, so it cannot hang on one that is gone.
//! What is found was true a moment ago; the kernel's own exclusion decides in the end.

use crate::mounts::{self, Mount};
use cbd_types::Result;
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// A block device of the kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockNode {
    /// Its node, `/dev/loopN` or `/dev/ublkbN`.
    pub path: PathBuf,
    /// Its device number, (major, minor).
    pub device: (u32, u32),
}

impl BlockNode {
    /// The device and its partitions.
    #[must_use]
    pub fn with_partitions(&self) -> Vec<Self> {
        let folder = Path::new("/sys/block").join(self.path.file_name().unwrap_or_default());
        let partition = |entry: fs::DirEntry| {
            let inside = entry.path();
            let number =
                fs::read_to_string(inside.join("dev")).ok().filter(|_| inside.join("partition").exists())?;
            let (major, minor) = number.trim_end().split_once(':')?;
            let device = (major.parse().ok()?, minor.parse().ok()?);
            Some(Self { path: self.path.with_file_name(entry.file_name()), device })
        };
        let partitions = fs::read_dir(folder).into_iter().flatten().flatten().filter_map(partition);
        std::iter::once(self.clone()).chain(partitions).collect()
    }
}

/// A sentence that says who has the device mounted or stacked something on it, as far as this process sees.
///
/// # Errors
/// When the system cannot be asked.
pub fn mounted_or_held(device: &BlockNode, link: Option<&Path>) -> Result<Option<String>> {
    let name = link.unwrap_or(&device.path).display();
    if let Some(mount) = mount_of(&mounts::list()?, device, link) {
        return Ok(Some(format!("{name} is mounted at {}", mount.target.display())));
    }
    let holders = fs::read_dir(
        Path::new("/sys/class/block").join(device.path.file_name().unwrap_or_default()).join("holders"),
    );
    if let Some(holder) = holders.ok().and_then(|mut entries| entries.next()?.ok()) {
        return Ok(Some(format!("{name} is held by {}", holder.file_name().to_string_lossy())));
    }
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let is_swap =
        |line: &str| line.split_whitespace().next().is_some_and(|path| Path::new(path) == device.path);
    Ok(swaps.lines().any(is_swap).then(|| format!("{name} is used as swap space")))
}

/// A sentence that says in which process's mount namespace the device is mounted.
#[must_use]
pub fn mounted_in_another_namespace(device: &BlockNode, link: Option<&Path>) -> Option<String> {
    let name = link.unwrap_or(&device.path).display();
    for process in processes() {
        let Ok(list) = mounts::read(&process.join("mountinfo")) else { continue };
        if let Some(mount) = mount_of(&list, device, link) {
            let (target, who) = (mount.target.display(), name_of(&process));
            return Some(format!("{name} is mounted at {target} in the mount namespace of {who}"));
        }
    }
    None
}

/// A sentence for a device that somebody has exclusively, whom this process's own mounts don't show.
#[must_use]
pub fn mounted_elsewhere(device: &BlockNode, link: Option<&Path>) -> String {
    if let Some(sentence) = mounted_in_another_namespace(device, link) {
        return sentence;
    }
    let name = link.unwrap_or(&device.path).display();
    match opened_by(device.device) {
        Some(who) => format!("{name} is exclusively open in {who}"),
        None => format!("{name} is exclusively held, by the kernel or in another container"),
    }
}

/// The process that has the block device with this number open.
#[must_use]
pub fn opened_by(device: (u32, u32)) -> Option<String> {
    find_descriptor(|descriptor, target| target.is_absolute() && device_of_node(descriptor) == Some(device))
}

/// The process that has the file at `path` open.
#[must_use]
pub fn file_opened_by(path: &Path) -> Option<String> {
    find_descriptor(|_, target| target == path)
}

/// Some file systems show a device number of their own, and what they stand on only by its name.
fn mount_of<'a>(list: &'a [Mount], device: &BlockNode, link: Option<&Path>) -> Option<&'a Mount> {
    list.iter().find(|mount| {
        let source = Path::new(&mount.source);
        mount.device == device.device || source == device.path || Some(source) == link
    })
}

fn find_descriptor(is_it: impl Fn(&Path, &Path) -> bool) -> Option<String> {
    processes().find_map(|process| {
        let descriptors = fs::read_dir(process.join("fd")).ok()?;
        let found = descriptors.flatten().any(|entry| {
            let descriptor = entry.path();
            fs::read_link(&descriptor).is_ok_and(|target| is_it(&descriptor, &target))
        });
        found.then(|| name_of(&process))
    })
}

fn processes() -> impl Iterator<Item = PathBuf> {
    let is_process =
        |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit);
    fs::read_dir("/proc").into_iter().flatten().flatten().filter(is_process).map(|entry| entry.path())
}

fn name_of(process: &Path) -> String {
    let number = process.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match fs::read_to_string(process.join("comm")) {
        Ok(name) => format!("process {number} ({})", name.trim_end()),
        Err(_) => format!("process {number}"),
    }
}

/// The device number that a device node at `path` stands for, links followed. Never asks a file system's server.
fn device_of_node(path: &Path) -> Option<(u32, u32)> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: all zeroes are a valid value of this structure of plain numbers.
    let mut status: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is a C string, and the kernel writes a `struct statx` through the pointer.
    let result = unsafe {
        let flags = libc::AT_STATX_DONT_SYNC;
        libc::statx(libc::AT_FDCWD, path.as_ptr(), flags, libc::STATX_TYPE, &raw mut status)
    };
    let block = u32::from(status.stx_mode) & libc::S_IFMT == libc::S_IFBLK;
    (result == 0 && block).then_some((status.stx_rdev_major, status.stx_rdev_minor))
}
