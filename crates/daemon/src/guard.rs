//! Refuses a region, a backing device or a state folder on a device that this daemon serves: the daemon would deadlock.
//! Refuses files of the daemon's own state as a region or a backing device: they would be overwritten, and replaced
//! while in use.
//!
//! Elsewhere: finding the devices below a path (`cbd-pmem`).

use cbd_types::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

/// The folders of this daemon's devices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Guard {
    /// Folder of the FUSE files behind loop devices.
    pub fuse_dir: PathBuf,
    /// Folder of the names of ublk disks.
    pub ublk_dir: PathBuf,
    /// The state folder, resolved.
    pub state_dir: PathBuf,
}

/// Names in the state folder, without what follows the dot, of the daemon's own files and folders.
const OWN: [&str; 5] = ["transports", "remote-exports", "daemon-id", "lock", "recovery-points"];

/// `path` without links; the last part of it need not exist.
fn resolved(path: &Path) -> PathBuf {
    std::fs::canonicalize(path).unwrap_or_else(|_| match (path.parent(), path.file_name()) {
        (Some(folder), Some(name)) => {
            std::fs::canonicalize(folder).map_or_else(|_| path.to_owned(), |folder| folder.join(name))
        }
        _ => path.to_owned(),
    })
}

impl Guard {
    fn is_own_state(&self, real: &Path) -> bool {
        let within = real.strip_prefix(&self.state_dir).ok().and_then(|within| within.iter().next());
        let stem = within.and_then(|first| Path::new(first).file_stem());
        stem.is_some_and(|stem| OWN.iter().any(|own| stem == *own))
    }

    /// Refuses `path`, to be used as `what`, if it is a file of the daemon's state or on a device that this daemon
    /// serves.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] with the device. A path that cannot be examined is not refused here: opening it
    /// reports the error.
    pub fn check(&self, path: &Path, what: &str) -> Result<()> {
        let refused = |through: &str| {
            Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "{} cannot be {what}: it is on {through}, a device that this daemon serves, and the daemon would deadlock",
                    path.display()
                ),
            ))
        };
        let real = resolved(path);
        if self.is_own_state(&real) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "{} cannot be {what}: it is a file of the state of this daemon; give another path",
                    path.display()
                ),
            ));
        }
        if real.starts_with(&self.fuse_dir) {
            return refused(&real.display().to_string());
        }
        let Ok(identity) = cbd_pmem::backing_identity(&real) else { return Ok(()) };
        let is_ours = |file: &PathBuf| file.starts_with(&self.fuse_dir);
        let ours = identity.layers.iter().find(|layer| {
            layer.file.as_ref().is_some_and(is_ours) || self.ublk_dir.join(&layer.name).is_symlink()
        });
        match ours {
            Some(layer) => refused(&format!("/dev/{}", layer.name)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_on_a_device_of_this_daemon_is_refused_and_another_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let fuse_dir = dir.path().canonicalize().unwrap().join("fuse");
        std::fs::create_dir_all(fuse_dir.join("cbd0")).unwrap();
        std::fs::write(fuse_dir.join("cbd0/cbd0"), b"").unwrap();
        std::fs::write(dir.path().join("disk"), b"").unwrap();
        let guard = Guard {
            fuse_dir: fuse_dir.clone(),
            ublk_dir: dir.path().join("ublk"),
            state_dir: dir.path().join("state"),
        };
        let error = guard.check(&fuse_dir.join("cbd0/cbd0"), "a backing device").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(guard.check(&dir.path().join("disk"), "a backing device").is_ok());
    }
}
