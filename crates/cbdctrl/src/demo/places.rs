//! Where the demonstration keeps its things, and how they go away.
//!
//! Always true here: everything lies in folders of our own, each with a file that is locked while their demonstration lives. So
//! what a killed one left behind is known by its lock that nobody holds, and only that is swept.

use super::system;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const PREFIX: &str = "cbd-demo-";
const LOCK: &str = "cbd-demo.lock";
/// The path of a socket has 107 bytes at most.
const SHORT: usize = 60;

/// A folder that goes away with this value.
#[derive(Debug)]
pub struct Place {
    path: PathBuf,
    _lock: File,
}

impl Place {
    /// Makes a folder in `parent` that only this user can look into.
    ///
    /// # Errors
    /// What the system says.
    pub fn make(parent: &Path) -> Result<Self> {
        let failed = |error: std::io::Error| {
            Error::new(ErrorKind::System, format!("no folder can be made in {}: {error}", parent.display()))
        };
        loop {
            // Never on a path with links: mounts are found by their path.
            let parent = parent.canonicalize().map_err(failed)?;
            let path = tempfile::Builder::new().prefix(PREFIX).tempdir_in(&parent).map_err(failed)?.keep();
            let lock = File::create(path.join(LOCK)).and_then(|lock| {
                lock.try_lock().map_err(std::io::Error::from)?;
                let still_ours = lock.metadata()?.ino() == fs::metadata(path.join(LOCK))?.ino();
                if still_ours { Ok(lock) } else { Err(std::io::ErrorKind::WouldBlock.into()) }
            });
            match lock {
                Ok(lock) => return Ok(Self { path, _lock: lock }),
                // Another demonstration swept it before it was locked.
                Err(error)
                    if matches!(
                        error.kind(),
                        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::NotFound
                    ) =>
                {
                    remove(&path);
                }
                Err(error) => {
                    remove(&path);
                    return Err(failed(error));
                }
            }
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A folder in it, made if it is not there.
    ///
    /// # Errors
    /// What the system says.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let path = self.path.join(name);
        fs::create_dir_all(&path).map_err(|error| {
            Error::new(ErrorKind::System, format!("{} cannot be made: {error}", path.display()))
        })?;
        Ok(path)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// The folder for temporary files.
pub fn temporary() -> PathBuf {
    let path = std::env::temp_dir();
    if path.as_os_str().len() > SHORT { PathBuf::from("/tmp") } else { path }
}

/// The shared memory, where there is one.
pub fn shared_memory() -> PathBuf {
    PathBuf::from("/dev/shm")
}

/// A folder for a region of `bytes`: in shared memory if there is room, else among temporary files, and why.
///
/// # Errors
/// What the system says.
pub fn for_region(bytes: u64) -> Result<(Place, Option<String>)> {
    let shared = shared_memory();
    let reason = match system::room(&shared) {
        Err(error) => format!("there is no {}: {error}", shared.display()),
        Ok(room) if room < bytes + (bytes >> 3) => format!(
            "{} has room for {} MiB, and {} MiB are needed",
            shared.display(),
            room >> 20,
            (bytes + (bytes >> 3)) >> 20
        ),
        Ok(_) if available_memory().is_some_and(|available| available < 2 * bytes) => {
            "memory is short".to_owned()
        }
        Ok(_) => match Place::make(&shared) {
            Ok(place) => return Ok((place, None)),
            Err(error) => error.line(),
        },
    };
    Ok((Place::make(&temporary())?, Some(reason)))
}

fn available_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Removes what demonstrations that were killed left behind, and says which folders.
pub fn sweep() -> Vec<PathBuf> {
    let mut swept = Vec::new();
    let mut parents = vec![temporary(), shared_memory()];
    parents.dedup();
    for parent in parents {
        let Ok(entries) = fs::read_dir(parent) else { continue };
        for entry in entries.flatten() {
            if entry.file_name().to_string_lossy().starts_with(PREFIX) && is_dead(&entry.path()) {
                remove(&entry.path());
                swept.push(entry.path());
            }
        }
    }
    swept
}

/// Whether a folder is one of ours whose demonstration is gone.
fn is_dead(path: &Path) -> bool {
    let Ok(metadata) = fs::symlink_metadata(path) else { return false };
    if !metadata.is_dir() || metadata.uid() != system::user() {
        return false;
    }
    let Ok(lock) = File::open(path.join(LOCK)) else { return false };
    !matches!(lock.try_lock(), Err(TryLockError::WouldBlock | TryLockError::Error(_)))
}

/// Removes a folder of ours with all that is mounted in it.
fn remove(path: &Path) {
    unmount_beneath(path);
    // Removed last, so that an interrupted removal is taken up by the next sweep.
    if let Ok(entries) = fs::read_dir(path) {
        for entry in entries.flatten().filter(|entry| entry.file_name() != LOCK) {
            let path = entry.path();
            let _ = match entry.file_type() {
                Ok(kind) if kind.is_dir() => fs::remove_dir_all(path),
                _ => fs::remove_file(path),
            };
        }
    }
    let _ = fs::remove_dir_all(path);
}

/// Unmounts whatever is mounted beneath `path` as far as this process sees it.
pub fn unmount_beneath(path: &Path) {
    let mounts = cbd_sys::mounts::list().unwrap_or_default();
    // The last is the innermost.
    for mount in mounts.iter().rev().filter(|mount| mount.target.starts_with(path)) {
        let _ = system::unmount(&mount.target, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_goes_away_with_what_is_in_it() {
        let parent = tempfile::tempdir().unwrap();
        let place = Place::make(parent.path()).unwrap();
        let folder = place.folder("run").unwrap();
        fs::write(folder.join("file"), b"x").unwrap();
        drop(place);
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_place_is_alive_while_its_lock_is_held_and_dead_after() {
        let parent = tempfile::tempdir().unwrap();
        let place = Place::make(parent.path()).unwrap();
        let path = place.path().to_owned();
        assert!(!is_dead(&path));
        // As after SIGKILL: the lock goes, the folder stays.
        let Place { path: _, _lock } = &place;
        _lock.unlock().unwrap();
        assert!(is_dead(&path));
        drop(place);
    }

    #[test]
    fn a_folder_without_a_lock_is_not_ours() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("cbd-demo-x");
        fs::create_dir(&path).unwrap();
        assert!(!is_dead(&path));
    }
}
