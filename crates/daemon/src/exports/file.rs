//! The unix socket or the symbolic link by which clients find an export, and whether it is still the one that the
//! export created.
//!
//! Invariant: this module only reads the file system. Reading may wait for a file system that does not respond, so the
//! caller reads on a thread that may wait.
//!
//! Elsewhere: when the files are checked (`manager/watch`), and what `dev-list` shows (`manager/blkdev`).

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The socket or link of one export, as it was when the export was opened.
#[derive(Debug)]
pub struct ExportFile {
    path: PathBuf,
    original: Identity,
}

/// What distinguishes a socket or link from another one at the same path.
#[derive(PartialEq, Eq, Debug)]
enum Identity {
    /// Device number of the file system, and inode number. A listening socket holds its inode, so no other file has the
    /// number while the export is open.
    File(u64, u64),
    /// The target of a symbolic link. A link that was created again with the same target is the same link.
    Link(PathBuf),
}

impl ExportFile {
    /// The socket or link at `path`; `None` if there is none or it cannot be read.
    #[must_use]
    pub fn at(path: &Path) -> Option<Self> {
        let original = identity(path).ok()?;
        Some(Self { path: path.to_owned(), original })
    }

    /// The path of the socket or link.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A sentence for the user if the socket or link was removed or replaced; `None` while it is unchanged. May wait
    /// for the file system.
    #[must_use]
    pub fn change(&self) -> Option<String> {
        let change = self.what_changed()?;
        Some(format!(
            "{change}: connected clients continue, new clients cannot find the device; dev-stop and dev-start create the path again"
        ))
    }

    /// As [`change`](Self::change), without the consequence for clients of a device.
    #[must_use]
    pub fn what_changed(&self) -> Option<String> {
        let path = self.path.display();
        match identity(&self.path) {
            Ok(now) if now == self.original => None,
            Ok(_) => Some(format!("{path} was replaced by another file")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Some(format!("{path} was removed")),
            Err(error) => Some(format!("{path} cannot be read ({error})")),
        }
    }
}

fn identity(path: &Path) -> io::Result<Identity> {
    let metadata = fs::symlink_metadata(path)?;
    if metadata.is_symlink() {
        return fs::read_link(path).map(Identity::Link);
    }
    Ok(Identity::File(metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_link_with_another_target_is_reported_and_one_with_the_same_target_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cbd0");
        assert!(ExportFile::at(&path).is_none());
        symlink("/dev/loop7", &path).unwrap();
        let link = ExportFile::at(&path).unwrap();
        assert_eq!(link.change(), None);
        fs::remove_file(&path).unwrap();
        assert!(link.change().unwrap().contains("cbd0 was removed"));
        symlink("/dev/loop8", &path).unwrap();
        assert!(link.change().unwrap().contains("cbd0 was replaced by another file"));
        fs::remove_file(&path).unwrap();
        symlink("/dev/loop7", &path).unwrap();
        assert_eq!(link.change(), None);
    }

    #[test]
    fn a_path_that_cannot_be_read_is_reported_as_such() {
        let folder = tempfile::tempdir().unwrap();
        let (inner, path) = (folder.path().join("inner"), folder.path().join("inner/socket"));
        fs::create_dir(&inner).unwrap();
        fs::write(&path, "").unwrap();
        let file = ExportFile::at(&path).unwrap();
        fs::remove_dir_all(&inner).unwrap();
        fs::write(&inner, "").unwrap();
        assert!(file.change().unwrap().contains("socket cannot be read (Not a directory"));
    }
}
