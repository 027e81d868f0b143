//! Checks for processes, mounts and loop devices that tests left behind.
//!
//! Invariants: only files in the tests' own directory are considered, so another CBD on the same machine is neither reported nor
//! touched.

use crate::processes;
use rustix::process::{Pid, test_kill_process};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// Time that the kernel may take to release the resources of a dead process.
const GRACE: Duration = Duration::from_secs(3);

/// The directory's name before the id of the process that created it.
const PREFIX: &str = "cbd-xtask-";

/// A directory in which tests put their files; removed at the end.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Creates the directory, after removing the directories of runs that were killed.
    ///
    /// # Errors
    /// The reason for which it cannot be created, as text.
    pub fn new() -> Result<Self, String> {
        let parent = std::env::temp_dir();
        sweep(&parent);
        let path = parent.join(format!("{PREFIX}{}", std::process::id()));
        fs::create_dir_all(&path).map_err(|error| format!("cannot make {}: {error}", path.display()))?;
        Ok(Self { path })
    }

    /// The path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Remaining processes, mounts and loop devices, one line each. The remaining processes are killed.
    pub fn leftovers(&self) -> Vec<String> {
        let mut left = self.look();
        let mut waited = Duration::ZERO;
        while !left.is_empty() && waited < GRACE {
            thread::sleep(Duration::from_millis(100));
            waited += Duration::from_millis(100);
            left = self.look();
        }
        processes::kill_descendants();
        left
    }

    fn look(&self) -> Vec<String> {
        processes::reap_orphans();
        let mut left: Vec<String> = processes::descendants()
            .into_iter()
            .map(|process| format!("process {} {}", process.pid.as_raw_nonzero(), process.command))
            .collect();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        left.extend(mount_points_under(&mounts, &self.path).map(|point| format!("mount {point}")));
        left.extend(loop_devices_under(Path::new("/sys/block"), &self.path));
        left
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A directory that cannot be removed (because of a stuck mount) has been reported; the next run tries again.
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn mount_points_under<'a>(mountinfo: &'a str, directory: &Path) -> impl Iterator<Item = &'a str> {
    mountinfo
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .filter(move |point| Path::new(point).starts_with(directory))
}

fn loop_devices_under(block_devices: &Path, directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(block_devices) else { return Vec::new() };
    entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let file = fs::read_to_string(entry.path().join("loop/backing_file")).ok()?;
            let file = file.trim_end();
            Path::new(file)
                .starts_with(directory)
                .then(|| format!("loop device {} on {file}", entry.file_name().to_string_lossy()))
        })
        .collect()
}

/// Removes the directories of runs whose process has ended.
fn sweep(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(id) =
            name.to_str().and_then(|name| name.strip_prefix(PREFIX)).and_then(|id| id.parse().ok())
        else {
            continue;
        };
        let gone =
            Pid::from_raw(id).is_some_and(|pid| test_kill_process(pid) == Err(rustix::io::Errno::SRCH));
        if gone {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_in_the_directory_are_reported() {
        let mountinfo = "36 35 98:0 / /tmp/cbd-xtask-7/m rw,noatime shared:1 - ext4 /dev/loop0 rw\n\
                         37 35 98:0 / /tmp/cbd-xtask-77 rw - fuse cbd rw\n";
        let found: Vec<_> = mount_points_under(mountinfo, Path::new("/tmp/cbd-xtask-7")).collect();
        assert_eq!(found, ["/tmp/cbd-xtask-7/m"]);
    }

    #[test]
    fn the_directory_of_a_living_process_is_kept() {
        let parent = std::env::temp_dir().join(format!("cbd-sweep-{}", std::process::id()));
        let ours = parent.join(format!("{PREFIX}{}", std::process::id()));
        let dead = parent.join(format!("{PREFIX}{}", i32::MAX));
        fs::create_dir_all(&ours).expect("a directory can be made");
        fs::create_dir_all(&dead).expect("a directory can be made");
        sweep(&parent);
        let kept = (ours.exists(), dead.exists());
        fs::remove_dir_all(&parent).expect("it can be removed");
        assert_eq!(kept, (true, false));
    }
}
