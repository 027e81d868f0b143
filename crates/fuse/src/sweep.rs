//! Removes what a killed daemon left behind.
//!
//! Invariants: only objects that are provably the project's and dead are touched: a mount of its type and
//! source under the given directory whose server is gone and whose session is not preserved, a loop device
//! bound to a file on such a mount, a link with its name to a loop device that is unbound, foreign or was
//! cleared. So the sweep is safe at every start, beside other daemons too.
//!
//! Elsewhere: preventing that two daemons share a directory.

use crate::loop_device::{NAME_PREFIX, is_bound, is_marked, loop_number, read_setting};
use crate::mounts::{self, within};
use cbd_export::mounts::Mount;
use cbd_export::system_error;
use cbd_sys::loop_device::{self, LoopInfo};
use cbd_types::{AlignedBuffer, Result};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Timeout of the answer of a mount's server.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The removed objects.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Swept {
    /// Mounts whose server was gone.
    pub mounts: Vec<PathBuf>,
    /// Loop devices over them. A device that is still mounted is unbound when it is unmounted.
    pub loops: Vec<PathBuf>,
    /// Dangling links.
    pub links: Vec<PathBuf>,
    /// Mounts of the project that were left alone, since their server is alive.
    pub alive: Vec<PathBuf>,
}

/// Removes what a killed daemon left under `run_dir`, and its links in `dev_dir`. The mounts in `preserved`
/// wait for a server, and are neither queried nor touched.
///
/// # Errors
/// When the mounts or the links cannot be listed.
pub fn sweep(run_dir: &Path, dev_dir: &Path, preserved: &[PathBuf]) -> Result<Swept> {
    let mut swept = Swept::default();
    let is_dead = |mount: &Mount| !preserved.contains(&mount.target) && mounts::is_dead(mount, TIMEOUT);
    let (dead, alive): (Vec<_>, Vec<_>) = ours_under(run_dir)?.into_iter().partition(is_dead);
    swept.alive = alive.into_iter().map(|mount| mount.target).collect();
    // Before the mounts, whose paths identify the files of the loop devices.
    for number in bound_loops() {
        if clear_if_over(number, &dead) {
            swept.loops.push(PathBuf::from(format!("/dev/loop{number}")));
        }
    }
    for number in bound_loops() {
        if clear_if_orphaned(number, run_dir) {
            swept.loops.push(PathBuf::from(format!("/dev/loop{number}")));
        }
    }
    for mount in dead {
        mounts::abort(&mount);
        // The next daemon needs an absent directory; one with foreign files in it stays.
        let _ = fs::remove_dir(&mount.target);
        swept.mounts.push(mount.target);
    }
    sweep_links(dev_dir, &mut swept)?;
    Ok(swept)
}

/// Aborts every FUSE connection of the project under `run_dir`, alive or not, and returns how many: for a
/// watchdog, when a process that serves one hangs and cannot be killed.
///
/// # Errors
/// When the mounts cannot be listed.
pub fn abort_connections(run_dir: &Path) -> Result<usize> {
    let ours = ours_under(run_dir)?;
    ours.iter().for_each(mounts::abort);
    Ok(ours.len())
}

fn ours_under(run_dir: &Path) -> Result<Vec<Mount>> {
    let run_dir = match fs::canonicalize(run_dir) {
        Ok(path) => path,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(system_error(run_dir.display(), &error)),
    };
    let mut ours = cbd_export::mounts::list()?;
    ours.retain(|mount| mounts::is_ours(mount) && mount.target.starts_with(&run_dir));
    Ok(ours)
}

fn bound_loops() -> impl Iterator<Item = u32> {
    let number = |entry: fs::DirEntry| {
        let name = entry.file_name();
        loop_number(&Path::new("/dev").join(name)).filter(|&number| is_bound(number))
    };
    fs::read_dir("/sys/block").into_iter().flatten().flatten().filter_map(number)
}

/// Unbinds a loop device whose file lies on one of these mounts.
fn clear_if_over(number: u32, dead: &[Mount]) -> bool {
    let Some(file) = read_setting(number, "loop/backing_file") else { return false };
    let Some(mount) = dead.iter().find(|mount| Path::new(&file).starts_with(&mount.target)) else {
        return false;
    };
    let connection = mount.device;
    // Paths can be equal in two namespaces; the number of the file system cannot.
    let over = move |info: &LoopInfo| info.device() == connection;
    // A device of another namespace may wait for its daemon, so the query has a timeout.
    let answer = within(TIMEOUT, move || {
        let device = File::open(format!("/dev/loop{number}")).ok()?;
        loop_device::status(device.as_fd()).is_ok_and(|info| over(&info)).then_some(device)
    });
    answer.flatten().is_some_and(|device| loop_device::clear(device.as_fd()).is_ok())
}

/// Unbinds a persistent loop device of the project whose connection has ended although its mount is not
/// visible here: an administrator has unmounted it. A device that can be read, or waits for its daemon,
/// belongs to another namespace.
fn clear_if_orphaned(number: u32, run_dir: &Path) -> bool {
    let is_persistent = read_setting(number, "loop/autoclear").is_some_and(|flag| flag == "0");
    let is_detached = read_setting(number, "loop/backing_file")
        .is_some_and(|file| Path::new(&file).parent() == Some(Path::new("/")));
    let Ok(run_dir) = fs::canonicalize(run_dir) else { return false };
    if !is_persistent || !is_detached {
        return false;
    }
    let path = format!("/dev/loop{number}");
    let answer = within(TIMEOUT, move || {
        let device = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).ok()?;
        let info = loop_device::status(device.as_fd()).ok()?;
        let (file, folder) = (info.name(), run_dir.as_os_str().as_bytes());
        let file = file.strip_prefix(NAME_PREFIX.as_bytes())?;
        // The stored name is the beginning of a path, cut at the size of the field.
        if !file.starts_with(folder) && !folder.starts_with(file) {
            // A device of another daemon may wait for it, and a read would wait with it.
            return None;
        }
        let is_dead = device.read_at(&mut AlignedBuffer::zeroed(4096), 0).is_err();
        is_dead.then_some(device)
    });
    answer.flatten().is_some_and(|device| loop_device::clear(device.as_fd()).is_ok())
}

fn sweep_links(dev_dir: &Path, swept: &mut Swept) -> Result<()> {
    let entries = match fs::read_dir(dev_dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(system_error(dev_dir.display(), &error)),
    };
    for entry in entries.flatten().filter(|entry| has_our_name(&entry.file_name().to_string_lossy())) {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let dead = match (loop_number(&target), cbd_export::link::number(&target, "/dev/ublkb")) {
            (Some(number), _) => swept.loops.contains(&target) || !is_bound(number) || !may_be_marked(number),
            (None, Some(number)) => !Path::new(&format!("/sys/block/ublkb{number}")).exists(),
            (None, None) => continue,
        };
        if dead && fs::remove_file(entry.path()).is_ok() {
            swept.links.push(entry.path());
        }
    }
    Ok(())
}

/// Whether a loop device carries the project's mark. A device that does not answer waits for its daemon, and
/// counts as marked.
fn may_be_marked(number: u32) -> bool {
    within(TIMEOUT, move || is_marked(number)).unwrap_or(true)
}

/// Whether a name is that of a blkdev: `cbd` and a number, or `cbd`, the number of the transport, `-` and a number.
fn has_our_name(name: &str) -> bool {
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    name.strip_prefix("cbd").is_some_and(|rest| rest.splitn(2, '-').all(is_number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_dangling_links_with_the_projects_name_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let link = |name: &str, target: &str| {
            std::os::unix::fs::symlink(target, dir.path().join(name)).unwrap();
        };
        link("cbd0", "/dev/loop1048003");
        link("cbd1", "/dev/null");
        link("cbd3", "/dev/ublkb1048003");
        link("cbd2-5", "/dev/loop1048003");
        link("cbdx", "/dev/loop1048003");
        link("other", "/dev/loop1048003");
        fs::write(dir.path().join("cbd2"), "").unwrap();
        let mut swept = sweep(&dir.path().join("none"), dir.path(), &[]).unwrap();
        swept.links.sort();
        assert_eq!(swept.links, ["cbd0", "cbd2-5", "cbd3"].map(|name| dir.path().join(name)));
        assert!(swept.mounts.is_empty() && swept.loops.is_empty());
        let left = fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(left, 4);
    }

    #[test]
    fn missing_directories_are_swept_without_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let none = dir.path().join("none");
        assert_eq!(sweep(&none, &none, &[]).unwrap(), Swept::default());
        assert_eq!(abort_connections(&none).unwrap(), 0);
    }
}
