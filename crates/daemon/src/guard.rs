//! Keeps a region, a backing device or the state folder from standing on a device that this daemon serves: it would wait for
//! itself.
//!
//! Elsewhere: how a path's layers are found (`cbd-pmem`).

use cbd_types::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

/// What is ours.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Guard {
    /// Where the FUSE files are that loop devices show.
    pub fuse_dir: PathBuf,
    /// Where the names of our ublk disks are.
    pub ublk_dir: PathBuf,
}

impl Guard {
    /// Refuses `path` (`what` it is to be) where it stands on a device of ours.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] with the device. A path that cannot be examined is not refused here: the code that opens
    /// it says why.
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
    fn a_file_of_ours_is_refused_and_another_is_not() {
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
