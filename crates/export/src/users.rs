//! The users of a block device, so that a refused stop can name them.
//!
//! Invariants: a search changes no state and accesses no file system that may hang. Its result may be out of date; the kernel's
//! own exclusion decides in the end.

use crate::mounts::{self, Mount};
use cbd_types::Result;
use std::fs;
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
            let device = cbd_sys::DeviceNumber::parse(&number)?.pair();
            Some(Self { path: self.path.with_file_name(entry.file_name()), device })
        };
        let partitions = fs::read_dir(folder).into_iter().flatten().flatten().filter_map(partition);
        std::iter::once(self.clone()).chain(partitions).collect()
    }
}

/// A sentence that names a mount of the device or a device stacked on it, if this process can see one.
///
/// # Errors
/// When the system does not report them.
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
    let is_swap = cbd_sys::mounts::swaps().contains(&device.path);
    Ok(is_swap.then(|| format!("{name} is used as swap space")))
}

/// A sentence that names the process in whose mount namespace the device is mounted.
#[must_use]
pub fn mounted_in_another_namespace(device: &BlockNode, link: Option<&Path>) -> Option<String> {
    let name = link.unwrap_or(&device.path).display();
    for process in cbd_holder::processes() {
        let Ok(list) = cbd_sys::mounts::of(&process) else { continue };
        if let Some(mount) = mount_of(&list, device, link) {
            let (target, who) = (mount.target.display(), cbd_holder::name_of(&process, ""));
            return Some(format!("{name} is mounted at {target} in the mount namespace of {who}"));
        }
    }
    None
}

/// A sentence for a device with an exclusive user that is not among the mounts of this process.
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
    cbd_holder::of_block_device(device)
}

/// The process that has the file at `path` open.
#[must_use]
pub fn file_opened_by(path: &Path) -> Option<String> {
    cbd_holder::of_file(path)
}

/// Some file systems report a device number of their own, and the underlying device only by its name.
fn mount_of<'a>(list: &'a [Mount], device: &BlockNode, link: Option<&Path>) -> Option<&'a Mount> {
    list.iter().find(|mount| {
        mount.device.pair() == device.device || mount.source == device.path || Some(&*mount.source) == link
    })
}
