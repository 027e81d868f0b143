//! Refuses a region, a backing device or a state folder on a device that this daemon serves: the daemon would deadlock.
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
}

impl Guard {
    /// Refuses `path`, to be used as `what`, if it is on a device that this daemon serves.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] with the device. A path that cannot be examined is not refused here: opening it reports the
    /// error.
    pub fn check(&self, path: &Path, what: &str) -> Result<()> {
        let refused = |through: &str| {
            Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "{} cannot be {what}: it stands on {through}, a device that this daemon serves, and would wait for itself",
                    path.display()
                ),
            ))
        };
        let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
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
        let guard = Guard { fuse_dir: fuse_dir.clone(), ublk_dir: dir.path().join("ublk") };
        let error = guard.check(&fuse_dir.join("cbd0/cbd0"), "a backing device").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(guard.check(&dir.path().join("disk"), "a backing device").is_ok());
    }
}
