//! The temporary folders of the demonstration, and their removal.
//!
//! Invariants: all files are in folders of the demonstration, each with a file that is locked while the demonstration
//! runs. Only folders whose lock is free are swept: their demonstration was killed.

use crate::system;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const PREFIX: &str = "cbd-demo-";
const LOCK: &str = "cbd-demo.lock";
/// Longest path of the parent folder in bytes, since the path of a socket has 107 bytes at most.
const PARENT_PATH_MAX: usize = 60;

/// A folder that is removed when this value is dropped.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    _lock: File,
}

impl Folder {
    /// Creates a folder in `parent` that only this user can read.
    ///
    /// # Errors
    /// The system error.
    pub fn create(parent: &Path) -> Result<Self> {
        let failed = |error: std::io::Error| {
            Error::new(ErrorKind::System, format!("no folder can be created in {}", parent.display()))
                .caused_by(error)
        };
        loop {
            // Without symbolic links: mounts are found by their path.
            let parent = parent.canonicalize().map_err(failed)?;
            let path = tempfile::Builder::new().prefix(PREFIX).tempdir_in(&parent).map_err(failed)?.keep();
            let lock = File::create(path.join(LOCK)).and_then(|lock| {
                lock.try_lock().map_err(std::io::Error::from)?;
                let still_ours = lock.metadata()?.ino() == fs::metadata(path.join(LOCK))?.ino();
                if still_ours { Ok(lock) } else { Err(std::io::ErrorKind::WouldBlock.into()) }
            });
            match lock {
                Ok(lock) => return Ok(Self { path, _lock: lock }),
                // Another demonstration has swept the folder before it was locked.
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

    /// A folder in it, created if it does not exist.
    ///
    /// The system error.
    /// What the system says.
    pub fn subfolder(&self, name: &str) -> Result<PathBuf> {
        let path = self.path.join(name);
        fs::create_dir_all(&path).map_err(|error| {
            Error::new(ErrorKind::System, format!("{} cannot be created", path.display())).caused_by(error)
        })?;
        Ok(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// The folder for temporary files.
pub fn temporary() -> PathBuf {
    let path = std::env::temp_dir();
    if path.as_os_str().len() > PARENT_PATH_MAX { PathBuf::from("/tmp") } else { path }
}

/// The folder of shared memory, if there is one.
pub fn shared_memory() -> PathBuf {
    PathBuf::from("/dev/shm")
}

/// A folder for a region of `bytes`: in shared memory if there is space, else among temporary files, with the reason.
///
/// # Errors
/// The system error.
pub fn for_region(bytes: u64) -> Result<(Folder, Option<String>)> {
    let shared = shared_memory();
    let reason = match system::free_bytes(&shared) {
        Err(error) => format!("there is no {}: {error}", shared.display()),
        Ok(free_bytes) if free_bytes < bytes + (bytes >> 3) => format!(
            "{} has room for {} MiB, and {} MiB are needed",
            shared.display(),
            free_bytes >> 20,
            (bytes + (bytes >> 3)) >> 20
        ),
        Ok(_) if available_memory().is_some_and(|available| available < 2 * bytes) => {
            "there is too little memory".to_owned()
        }
        Ok(_) => match Folder::create(&shared) {
            Ok(folder) => return Ok((folder, None)),
            Err(error) => error.line(),
        },
    };
    Ok((Folder::create(&temporary())?, Some(reason)))
}

fn available_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Removes the folders that killed demonstrations left, and returns them.
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

/// Whether a folder belongs to a demonstration that has ended.
fn is_dead(path: &Path) -> bool {
    let Ok(metadata) = fs::symlink_metadata(path) else { return false };
    if !metadata.is_dir() || metadata.uid() != system::user() {
        return false;
    }
    let Ok(lock) = File::open(path.join(LOCK)) else { return false };
    !matches!(lock.try_lock(), Err(TryLockError::WouldBlock | TryLockError::Error(_)))
}

/// Removes a folder of a demonstration with all mounts in it.
fn remove(path: &Path) {
    unmount_beneath(path);
    // The lock is removed last, so that the next sweep continues an interrupted removal.
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

/// Unmounts all file systems beneath `path` that are visible to this process.
pub fn unmount_beneath(path: &Path) {
    let mounts = cbd_sys::mounts::list().unwrap_or_default();
    // The last mount is the innermost.
    for mount in mounts.iter().rev().filter(|mount| mount.target.starts_with(path)) {
        let _ = system::unmount(&mount.target, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_removed_with_its_content() {
        let parent = tempfile::tempdir().unwrap();
        let folder = Folder::create(parent.path()).unwrap();
        let run = folder.subfolder("run").unwrap();
        fs::write(run.join("file"), b"x").unwrap();
        drop(folder);
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_is_alive_while_its_lock_is_held() {
        let parent = tempfile::tempdir().unwrap();
        let folder = Folder::create(parent.path()).unwrap();
        let path = folder.path().to_owned();
        assert!(!is_dead(&path));
        // As after SIGKILL: the lock is free, and the folder exists.
        let Folder { path: _, _lock } = &folder;
        _lock.unlock().unwrap();
        assert!(is_dead(&path));
        drop(folder);
    }

    #[test]
    fn a_folder_without_a_lock_is_not_swept() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("cbd-demo-x");
        fs::create_dir(&path).unwrap();
        assert!(!is_dead(&path));
    }
}
