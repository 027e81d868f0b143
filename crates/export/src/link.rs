//! The link `/dev/cbdN` to a block device of the kernel.
//!
//! Invariants: only a symbolic link to a loop or ublk device is ever replaced or removed, and no link to another device that
//! exists. A link is created and changed atomically.

use crate::system_error;
use cbd_types::{Error, ErrorKind, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// A link that this process created.
#[derive(Debug)]
pub struct Link {
    path: PathBuf,
    target: PathBuf,
}

impl Link {
    /// Creates a link from `path` to `target`. Replaces a link whose device does not exist any more.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] if another file exists at `path`.
    pub fn create(path: &Path, target: &Path) -> Result<Self> {
        may_be_made(path, Some(target))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.{}", std::process::id()));
        // A file of this name can only be left over from an ended process with the same id.
        let _ = fs::remove_file(&temporary);
        std::os::unix::fs::symlink(target, &temporary).and_then(|()| fs::rename(&temporary, path)).map_err(
            |error| {
                let _ = fs::remove_file(&temporary);
                system_error(path.display(), &error)
            },
        )?;
        Ok(Self { path: path.into(), target: target.into() })
    }

    /// The path of the link.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the link if it still points to its target.
    pub fn remove(&self) {
        if fs::read_link(&self.path).is_ok_and(|target| target == self.target) {
            // Errors are ignored: a link that remains is replaced at the next start.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Checks that a link can be created at `path`: no file exists at `path`, or a link to an unused loop or ublk device, or one to
/// `target` itself. A loop device that now stands on a file of another name is of a program that took its number when the device
/// of a killed daemon was gone: that link is left over as well.
///
/// # Errors
/// [`ErrorKind::AlreadyExists`] if another file exists at `path`.
pub fn may_be_made(path: &Path, target: Option<&Path>) -> Result<()> {
    let taken = |what: String| {
        let text = format!("{} exists already and {what}; remove it or choose another name", path.display());
        Err(Error::new(ErrorKind::AlreadyExists, text))
    };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(system_error(path.display(), &error)),
        Ok(found) if !found.is_symlink() => return taken("is no symbolic link".into()),
        Ok(_) => {}
    }
    let there = fs::read_link(path).map_err(|error| system_error(path.display(), &error))?;
    if target == Some(&there) {
        return Ok(());
    }
    let lives = match (number(&there, "/dev/loop"), number(&there, "/dev/ublkb")) {
        (Some(number), _) => fs::read_to_string(format!("/sys/block/loop{number}/loop/backing_file"))
            .is_ok_and(|backing| stands_on(backing.trim_end(), path)),
        (_, Some(number)) => Path::new(&format!("/sys/block/ublkb{number}")).exists(),
        (None, None) => {
            return taken(format!("points to {}, which is no loop or ublk device", there.display()));
        }
    };
    if lives { taken(format!("points to {}, which is used", there.display())) } else { Ok(()) }
}

/// Whether the backing file of a loop device is a file that is served as the device with this link: it has its name.
fn stands_on(backing: &str, link: &Path) -> bool {
    let backing = backing.strip_suffix(" (deleted)").unwrap_or(backing);
    Path::new(backing).file_name() == link.file_name()
}

/// The number N in a path of exactly the form `prefixN`, such as `/dev/loopN`.
#[must_use]
pub fn number(path: &Path, prefix: &str) -> Option<u32> {
    let digits = path.to_str()?.strip_prefix(prefix)?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_loop_devices_have_a_number() {
        assert_eq!(number(Path::new("/dev/loop17"), "/dev/loop"), Some(17));
        for other in
            ["/dev/loop", "/dev/loop1p1", "/dev/loop-control", "/dev/sda", "loop1", "/dev/loop99999999999"]
        {
            assert_eq!(number(Path::new(other), "/dev/loop"), None, "{other}");
        }
    }

    #[test]
    fn a_loop_device_on_a_file_of_another_name_is_of_another_program() {
        let link = Path::new("/dev/cbd1");
        for backing in ["/run/cbd/fuse/cbd1/cbd1", "/cbd1", "/cbd1 (deleted)"] {
            assert!(stands_on(backing, link), "{backing}");
        }
        for backing in ["/run/cbd/fuse/cbd0/cbd0", "/home/cbd1/image", "/cbd10", ""] {
            assert!(!stands_on(backing, link), "{backing}");
        }
    }

    #[test]
    fn a_link_to_the_target_itself_may_be_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cbd0");
        // The target itself is not checked.
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        assert!(may_be_made(&path, None).is_err());
        assert!(may_be_made(&path, Some(Path::new("/dev/null"))).is_ok());
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
    fn a_link_to_an_unused_device_is_replaced_and_only_the_own_link_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cbd0");
        let first = Link::create(&path, Path::new("/dev/loop1048001")).unwrap();
        Link::create(&path, Path::new("/dev/ublkb1048001")).unwrap();
        let second = Link::create(&path, Path::new("/dev/loop1048002")).unwrap();
        first.remove();
        assert_eq!(fs::read_link(&path).unwrap(), Path::new("/dev/loop1048002"));
        second.remove();
        assert!(fs::symlink_metadata(&path).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
