//! The link by which users know the device: `/dev/cbdN`, which points to a loop device.
//!
//! Always true here: only a symbolic link to a loop device is ever replaced or removed, and none through which a
//! device that lives is reached; a link appears and changes in one step.

use crate::errors::system_error;
use crate::loop_device::{MARK, read_setting};
use crate::system;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// A link that is there.
#[derive(Debug)]
pub struct Link {
    path: PathBuf,
    target: PathBuf,
}

impl Link {
    /// Makes `path` point to `target`, in the place of a link that points to no device any more.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] if something else is there.
    pub fn create(path: &Path, target: &Path) -> Result<Self> {
        may_be_made(path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.{}", std::process::id()));
        // One of this name can only be left over of a dead process with our number.
        let _ = fs::remove_file(&temporary);
        std::os::unix::fs::symlink(target, &temporary).and_then(|()| fs::rename(&temporary, path)).map_err(
            |error| {
                let _ = fs::remove_file(&temporary);
                system_error(path.display(), &error)
            },
        )?;
        Ok(Self { path: path.into(), target: target.into() })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it, if it is still ours.
    pub fn remove(&self) {
        if fs::read_link(&self.path).is_ok_and(|target| target == self.target) {
            // If it is gone meanwhile, so much the better; one that stays is replaced at the next start.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Whether a link can be made at `path`: nothing is there, or a link to a loop device that is nobody's.
///
/// # Errors
/// [`ErrorKind::AlreadyExists`] if something else is there.
pub fn may_be_made(path: &Path) -> Result<()> {
    let taken = |what: String| {
        let text = format!("{} exists already and {what}; remove it or choose another name", path.display());
        Err(Error::new(ErrorKind::AlreadyExists, text))
    };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(system_error(path.display(), &error)),
        Ok(found) if !found.is_symlink() => taken("is no symbolic link".into()),
        Ok(_) => {
            let target = fs::read_link(path).map_err(|error| system_error(path.display(), &error))?;
            match loop_number(&target) {
                None => taken(format!("points to {}, which is no loop device", target.display())),
                Some(number) if is_bound(number) => {
                    taken(format!("points to {}, which is used", target.display()))
                }
                Some(_) => Ok(()),
            }
        }
    }
}

/// N of exactly `/dev/loopN`.
pub fn loop_number(path: &Path) -> Option<u32> {
    let digits = path.to_str()?.strip_prefix("/dev/loop")?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

/// Whether a loop device has a file.
pub fn is_bound(number: u32) -> bool {
    read_setting(number, "loop/backing_file").is_some()
}

/// Whether a loop device carries our mark: it belongs to a daemon of ours, which may live in another namespace.
pub fn is_marked(number: u32) -> bool {
    let marked = |device: File| {
        let info = system::loop_status(device.as_fd()).ok()?;
        Some(system::loop_name(&info).starts_with(MARK.as_bytes()))
    };
    File::open(format!("/dev/loop{number}")).ok().and_then(marked).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_loop_devices_have_a_number() {
        assert_eq!(loop_number(Path::new("/dev/loop17")), Some(17));
        for other in
            ["/dev/loop", "/dev/loop1p1", "/dev/loop-control", "/dev/sda", "loop1", "/dev/loop99999999999"]
        {
            assert_eq!(loop_number(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn a_file_or_a_link_to_something_else_is_never_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        for path in [&file, &link] {
            let error = Link::create(path, Path::new("/dev/loop1048000")).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::AlreadyExists);
        }
        assert!(file.is_file());
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("/dev/null"));
    }

    #[test]
    fn a_link_to_a_loop_device_that_is_nobodys_is_replaced_and_only_ours_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cbd0");
        let first = Link::create(&path, Path::new("/dev/loop1048001")).unwrap();
        let second = Link::create(&path, Path::new("/dev/loop1048002")).unwrap();
        first.remove();
        assert_eq!(fs::read_link(&path).unwrap(), Path::new("/dev/loop1048002"));
        second.remove();
        assert!(fs::symlink_metadata(&path).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
