//! Exclusive locks of backing devices.
//!
//! Invariants: a block device is locked by `O_EXCL`, which mounts, swap, device mapper and md use, too, and by claims
//! on its underlying devices (`beneath`); a file is locked by a lock of the open description; no loop device uses
//! either. The lock ends with the last descriptor, so also when the process is killed; the lock of a file ends with its
//! [`Held`].
//!
//! Not provided: programs that open a file without a lock cannot be detected. A claim of a block device cannot be
//! released while a child process has a copy of the descriptor: a new open waits ([`after_predecessor`]).

use crate::beneath::OPEN_TIMEOUT;
use crate::claims::{Chain, Claim, ClaimRequest, Claims, Object, Step, is_locked, registry};
use crate::query::{self, Query};
use crate::sys::{self, LoopFile, Status};
use crate::sysfs::{self, BlockDirectory, LoopDevice};
use cbd_sys::DeviceNumber;
use cbd_sys::mounts::{self, Mount};
use cbd_types::{ByteRange, Error, ErrorKind, Result};
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the lock of a disk may outlive the process that held it. The kernel releases the lock of a killed process
/// after its last write, which can take long on a slow disk; without the lock that write could overwrite a later one.
pub const DISK_TIMEOUT: Duration = Duration::from_secs(20);

const FUSE_MAGIC: u64 = 0x6573_5546;

/// An open file or device, and its lock.
///
/// A forked process has a copy of every descriptor until it executes another program, or until it ends: a close
/// would not release the lock, so it is released explicitly. A child that drops its copy does not release the lock of
/// its parent.
#[derive(Debug)]
pub(crate) struct Held {
    file: File,
    locked: AtomicBool,
    process: u32,
    /// Claims on the underlying devices and files.
    pub beneath: Claims,
    /// Of a file: its entry in the registry of this process. It also excludes a claim through a loop device that cannot
    /// check the lock.
    registered: Option<Claim>,
}

impl Held {
    /// A file that has no lock yet ([`hold_file`]), or needs none.
    pub(crate) fn new(file: File) -> Self {
        let (locked, process) = (AtomicBool::new(false), std::process::id());
        Self { file, locked, process, beneath: Claims::default(), registered: None }
    }

    /// Locks these bytes for this open description, exclusively or shared with other readers.
    pub(crate) fn lock(&self, exclusive: bool, bytes: ByteRange) -> io::Result<()> {
        sys::lock_range(self.file.as_fd(), exclusive, bytes)?;
        self.locked.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Leaves the release of the lock to the close of the last descriptor: the kernel still has operations in flight
    /// and its own reference. It has no reference to the underlying files: these stay open until the process ends.
    pub(crate) fn release_on_close(&self) {
        self.locked.store(false, Ordering::SeqCst);
        self.beneath.iter().for_each(Claim::keep_until_exit);
    }
}

impl Deref for Held {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Dropped before the lock, so that the next owner of the lock finds no other user.
        self.registered = None;
        if *self.locked.get_mut() && self.process == std::process::id() {
            // A lock that cannot be released explicitly ends with the descriptor.
            let _ = sys::unlock_whole(self.file.as_fd());
        }
    }
}

/// Opens a file or device that a process killed a moment ago may still have locked. Retries: the kernel has no event
/// for the release of the lock.
///
/// # Errors
/// Those of `open`; [`ErrorKind::Busy`] only after `timeout`.
pub fn after_predecessor<T>(timeout: Duration, mut open: impl FnMut() -> Result<T>) -> Result<T> {
    let end = Instant::now() + timeout;
    loop {
        match open() {
            Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(50));
            }
            result => return result,
        }
    }
}

/// Locks an open file and checks that no loop device uses it.
pub(crate) fn hold_file(file: &mut Held, status: &Status, path: &Path, read_only: bool) -> Result<()> {
    let name = path.display();
    let whole = ByteRange { start: 0, end: u64::MAX };
    if let Err(error) = file.lock(!read_only, whole) {
        if is_locked(&error) {
            let user = lock_holder(file);
            return Err(Error::new(ErrorKind::Busy, format!("{name} is in use: {user} holds a lock on it")));
        }
        let text = format!("{name} cannot be held exclusively, its file system refuses a lock: {error}");
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let step = Step { object: Object::File(status.device, status.inode), bytes: whole };
    file.registered = Some(register(vec![step], path, !read_only)?);
    refuse_loop_device(file, status, path)
}

/// Registers the user of a file that is already locked.
fn register(chain: Chain, path: &Path, exclusive: bool) -> Result<Claim> {
    let mut registry = registry();
    let owner = registry.number();
    if let Some(other) = registry.other(owner, &chain, exclusive) {
        let text = format!("{} is in use: {}", path.display(), user_in_this_process(other));
        return Err(Error::new(ErrorKind::Busy, text));
    }
    let request = ClaimRequest {
        owner,
        top: path,
        chain,
        exclusive,
        held_object: None,
        path: path.to_owned(),
        length: None,
        mapping: None,
    };
    let (claim, _) = registry.claim(request).map_err(|error| {
        Error::new(ErrorKind::Busy, format!("{} is in use", path.display())).caused_by(error)
    })?;
    Ok(claim)
}

/// Refuses a file or block device of which a loop device uses bytes.
pub(crate) fn refuse_loop_device(file: &File, status: &Status, path: &Path) -> Result<()> {
    let whole = ByteRange { start: 0, end: u64::MAX };
    let Some(device) = loop_devices_on(file, status, whole).into_iter().next() else { return Ok(()) };
    let text = format!(
        "{} is in use: the loop device /dev/{} stands on it{}; detach it first (losetup -d)",
        path.display(),
        device.name,
        mounted_on(&device.name)
    );
    Err(Error::new(ErrorKind::Busy, text))
}

/// Refuses a regular file that a loop device uses. Does not open or change the file. If nothing, or no regular file, is
/// at `path`, this succeeds.
///
/// # Errors
/// [`ErrorKind::Busy`] with the name of the loop device, and where it is mounted.
pub fn refuse_file_beneath_loop_device(path: &Path) -> Result<()> {
    let Ok(file) = sys::name_only(path) else { return Ok(()) };
    match sys::status(file.as_fd()) {
        Ok(status) if status.is_regular() => refuse_loop_device(&file, &status, path),
        _ => Ok(()),
    }
}

/// A text that names a loop device other than `own` that uses these bytes and is mounted, used as swap space, or a
/// member of another device.
pub(crate) fn loop_device_in_use(
    file: &File,
    status: &Status,
    bytes: ByteRange,
    own: &str,
) -> Option<String> {
    let others = loop_devices_on(file, status, bytes).into_iter().filter(|device| device.name != own);
    others.into_iter().find_map(|device| {
        let number = sysfs::attribute(&Path::new("/sys/block").join(&device.name).join("dev"))?;
        let user = user_of(DeviceNumber::parse(&number)?)?;
        Some(format!("the loop device /dev/{} stands on the same bytes: {user}", device.name))
    })
}

/// A text that names this process, and the backing device for which it uses the same bytes.
pub(crate) fn user_in_this_process(other: &Path) -> String {
    let process = PathBuf::from(format!("/proc/{}", std::process::id()));
    let process = cbd_holder::name_of(&process, ", this one");
    format!("{process} uses the same bytes of it for {}", other.display())
}

/// The process that has a lock on a file, as far as the kernel reports it.
pub(crate) fn lock_holder(file: &File) -> String {
    cbd_holder::of_lock(file.as_fd()).unwrap_or_else(|| String::from("another program"))
}

fn mounted_on(name: &str) -> String {
    let number = sysfs::attribute(&Path::new("/sys/block").join(name).join("dev"));
    let mount = number.and_then(|number| {
        let number = DeviceNumber::parse(&number)?;
        mounts::of_this_thread().unwrap_or_default().into_iter().find(|mount| mount.device == number)
    });
    mount.map(|mount| format!(", mounted on {}", mount.target.display())).unwrap_or_default()
}

/// The loop devices that use these bytes of a file or block device, whichever path opened it: also those on the disk
/// that it is a part of, or on a part of it. A loop device whose query times out is on a file system that hangs (FUSE
/// in another mount namespace, a network), so not on the file system of `file`, which has responded.
fn loop_devices_on(file: &File, status: &Status, bytes: ByteRange) -> Vec<LoopDevice> {
    let devices = sysfs::loop_devices();
    if devices.is_empty() {
        return devices;
    }
    let on_fuse = sys::file_system(file.as_fd()).is_ok_and(|(magic, _, _)| magic == FUSE_MAGIC);
    let mounts = mounts::of_this_thread().unwrap_or_default();
    let ours = in_disk(status.special, bytes);
    // A file on FUSE is not the same object as one on another file system, and a query of its server may hang.
    let may_be = |device: &LoopDevice| on_fuse || !on_fuse_mount(&device.file, &mounts);
    let devices: Vec<LoopDevice> = devices.into_iter().filter(may_be).collect();
    let query_of = |device: &LoopDevice| -> Query<Option<LoopFile>> {
        let copy = device.clone();
        (format!("loop {}", device.name), Box::new(move || backing_file(&copy)))
    };
    let answers = query::run_all(OPEN_TIMEOUT, devices.iter().map(query_of).collect());
    let answered = devices.into_iter().zip(answers).filter_map(|(device, answer)| Some((device, answer??)));
    let is_it = |(device, found): &(LoopDevice, LoopFile)| {
        if !status.is_block() {
            return found.is(status) && bytes.intersection(&device.bytes).is_some();
        }
        // For a file, `device` would be the device number of its file system.
        let theirs = in_disk(found.special, device.bytes);
        found.is_block() && theirs.0 == ours.0 && theirs.1.intersection(&ours.1).is_some()
    };
    answered.filter(is_it).map(|(device, _)| device).collect()
}

/// Translates bytes of a partition to its disk; bytes of another device stay as they are.
fn in_disk(device: DeviceNumber, bytes: ByteRange) -> (DeviceNumber, ByteRange) {
    let place = || {
        let directory = BlockDirectory::of(device).filter(BlockDirectory::is_partition)?;
        Some((directory.disk_number()?, directory.within_disk(bytes)?))
    };
    place().unwrap_or((device, bytes))
}

/// The backing file of a loop device: from the device itself, or by path if the device cannot be opened.
fn backing_file(device: &LoopDevice) -> Option<LoopFile> {
    let open = File::open(Path::new("/dev").join(&device.name));
    if let Some(found) = open.ok().and_then(|file| sys::loop_file(file.as_fd()).ok()) {
        return Some(found);
    }
    let status = sys::status_of(&device.file).ok()?;
    let special = if status.is_block() { status.special } else { status.device };
    Some(LoopFile { device: status.device, inode: status.inode, special })
}

fn on_fuse_mount(path: &Path, mounts: &[Mount]) -> bool {
    let nearest = mounts::containing(mounts, path);
    nearest.is_some_and(|mount| mount.kind.starts_with("fuse") && mount.kind != "fuseblk")
}

/// The error for a block device with a known user; if it is `claimed`, there is always an error.
pub(crate) fn busy_block_device(status: &Status, path: &Path, claimed: bool) -> Option<Error> {
    let otherwise = || claimed.then(|| String::from("another program holds it exclusively"));
    let user = if claimed { device_user(status) } else { user_of(status.special) };
    let user = user.or_else(otherwise)?;
    Some(Error::new(ErrorKind::Busy, format!("{} is in use: {user}", path.display())))
}

/// The known user of a block device, or the process that has it open.
pub(crate) fn device_user(status: &Status) -> Option<String> {
    let opened = || cbd_holder::of_block_device((status.special.major, status.special.minor));
    user_of(status.special).or_else(|| opened().map(|user| format!("{user} has it open")))
}

fn user_of(device: DeviceNumber) -> Option<String> {
    let directory = BlockDirectory::of(device)?;
    let relatives = directory.relatives();
    let mounted = mounts::of_this_thread()
        .unwrap_or_default()
        .into_iter()
        .find(|mount| relatives.contains(&mount.device));
    if let Some(mount) = mounted {
        let which = if mount.device == device { "it is" } else { "a part of its disk is" };
        return Some(format!("{which} mounted on {}; unmount it first", mount.target.display()));
    }
    // Swap files are skipped: they are not block devices, and their file systems may hang.
    for swap in mounts::swaps().into_iter().filter(|path| path.starts_with("/dev")) {
        if sys::status_of(&swap).is_ok_and(|found| relatives.contains(&found.special) && found.is_block()) {
            return Some(format!("{} is swap space; turn it off first (swapoff)", swap.display()));
        }
    }
    let mut holders: Vec<_> = directory.holders().iter().map(|name| format!("/dev/{name}")).collect();
    holders.sort();
    let verb = if holders.len() == 1 { "stands" } else { "stand" };
    (!holders.is_empty()).then(|| format!("{} {verb} on it", holders.join(", ")))
}

/// Whether an open block device may be written.
pub(crate) fn is_writable(file: &File, status: &Status) -> io::Result<bool> {
    let attribute = BlockDirectory::of(status.special).and_then(|directory| directory.own("ro"));
    Ok(attribute.as_deref() != Some("1") && !cbd_sys::ioctl::block_read_only(file.as_fd())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(path: &Path) -> Result<Held> {
        let mut file = Held::new(File::options().read(true).write(true).open(path).expect("it opens"));
        let status = sys::status(file.as_fd()).expect("its status");
        hold_file(&mut file, &status, path, false)?;
        Ok(file)
    }

    #[test]
    fn a_lock_ends_with_its_holder_even_if_a_copy_of_the_descriptor_exists() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let first = held(file.path()).expect("free");
        let _copy_of_a_child = first.try_clone().expect("a copy");
        assert_eq!(held(file.path()).expect_err("it has a holder").kind(), ErrorKind::Busy);
        drop(first);
        held(file.path()).expect("free again");
    }

    #[test]
    fn a_child_that_drops_its_copy_of_a_lock_does_not_release_its_parents() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let ours = held(file.path()).expect("free");
        // SAFETY: the child drops a file and ends; it takes no lock that another thread may have held.
        #[allow(unsafe_code)]
        match unsafe { libc::fork() } {
            0 => {
                drop(ours);
                // SAFETY: it ends the child here.
                unsafe { libc::_exit(0) }
            }
            child => {
                assert!(child > 0, "a child");
                // SAFETY: the child is one of this process, and its status is not used.
                assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
            }
        }
        assert_eq!(held(file.path()).expect_err("we have it").kind(), ErrorKind::Busy);
        drop(ours);
        held(file.path()).expect("free again");
    }

    #[test]
    fn a_lock_that_is_released_on_close_ends_with_the_last_descriptor() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let first = held(file.path()).expect("free");
        let of_the_kernel = first.try_clone().expect("a copy");
        first.release_on_close();
        drop(first);
        assert_eq!(held(file.path()).expect_err("not yet").kind(), ErrorKind::Busy);
        drop(of_the_kernel);
        held(file.path()).expect("free again");
    }
}
