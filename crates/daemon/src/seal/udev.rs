//! Telling udev that rules have changed, and that it is to look at one disk again.
//!
//! Invariants: udev is told only of rules that it reads. It is told with a time limit, and without waiting for what it
//! does; if that fails, the rules hold from the next event of the disk on, at the latest from the next boot on.

use std::fs;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Where udev reads rules that are not part of a package.
const READ: [&str; 2] = ["/etc/udev/rules.d", "/run/udev/rules.d"];

/// Longest time of one call of `udevadm`.
const LIMIT: Duration = Duration::from_secs(5);
/// How often its end is looked for: the standard library has no wait with a limit.
const POLL: Duration = Duration::from_millis(20);

/// Whether udev reads the rules in `folder`.
#[must_use]
pub fn is_read(folder: &Path) -> bool {
    READ.iter().any(|read| Path::new(read) == folder)
}

/// The folder in `/sys` of the block device at `path`.
#[must_use]
pub fn folder_of(path: &str) -> Option<PathBuf> {
    let status = fs::metadata(path).ok().filter(|status| status.file_type().is_block_device())?;
    let number = status.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()
}

/// Lets udev read the rules in `folder` again and apply them to a disk and its partitions, on a thread of its own.
pub fn apply_soon(folder: &Path, disk: &Path) {
    if !is_running(folder) {
        return;
    }
    let disk = disk.to_owned();
    let work = move || {
        if let Err(error) = tell(&disk) {
            tracing::warn!("udev did not apply the rules that seal disks to {}: {error}", disk.display());
        }
    };
    if let Err(error) = std::thread::Builder::new().name("cbd-udev".to_owned()).spawn(work) {
        tracing::warn!("udev was not told of the rules that seal disks: {error}");
    }
}

/// As [`apply_soon`], and waits until udev was told.
///
/// # Errors
/// If `udevadm` fails or does not end in time.
pub fn apply(folder: &Path, disk: Option<&Path>) -> Result<()> {
    if !is_running(folder) {
        return Ok(());
    }
    disk.map_or_else(|| run(&["control", "--reload"], &[]), tell)
}

/// Whether a udev runs that reads the rules in `folder`.
fn is_running(folder: &Path) -> bool {
    is_read(folder) && Path::new("/run/udev/control").exists()
}

fn tell(disk: &Path) -> Result<()> {
    run(&["control", "--reload"], &[])?;
    let mut devices = vec![disk.to_owned()];
    let inside = fs::read_dir(disk).into_iter().flatten().flatten().map(|entry| entry.path());
    devices.extend(inside.filter(|path| path.join("partition").exists()));
    run(&["trigger", "--action=change"], &devices)
}

fn run(arguments: &[&str], devices: &[PathBuf]) -> Result<()> {
    let mut command = Command::new("udevadm");
    command.args(arguments).args(devices);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let end = Instant::now() + LIMIT;
    loop {
        match child.try_wait()? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(Error::other(format!("udevadm {}: {status}", arguments.join(" ")))),
            None if Instant::now() < end => std::thread::sleep(POLL),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                let text = format!("udevadm {} took more than {} s", arguments.join(" "), LIMIT.as_secs());
                return Err(Error::new(ErrorKind::TimedOut, text));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn udev_is_not_told_of_rules_that_it_does_not_read() {
        assert!(is_read(Path::new("/etc/udev/rules.d")) && !is_read(Path::new("/tmp/rules.d")));
        apply(Path::new("/tmp/rules.d"), Some(Path::new("/no/such/disk"))).unwrap();
        assert_eq!(folder_of("/no/such/disk"), None);
        assert_eq!(folder_of("/dev/null"), None);
    }
}
