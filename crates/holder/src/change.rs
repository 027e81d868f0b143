//! Changes of a file since it was opened: deleted, truncated, or renamed.
//!
//! Invariants: a reported change was observed; a file that cannot be checked has no change.
//!
//! Elsewhere: a thread that may block: a check queries the file's server, which may hang.

use crate::descriptor::status_at;
use crate::{name_now, path_of};
use rustix::fs::{AtFlags, CWD, FileType, Statx};
use rustix::io::Errno;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

/// A change of a file that this process has open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// It no longer has a name: its data exists as long as a process has it open.
    Deleted {
        /// The name that it had.
        path: PathBuf,
        /// The name under which other processes can still read it.
        descriptor: PathBuf,
    },
    /// It has, or had at some time, fewer bytes than when it was opened.
    Short {
        /// Its name.
        path: PathBuf,
        /// The required length in bytes.
        expected: u64,
        /// The smallest length in bytes that was observed.
        found: u64,
    },
    /// Its former name was removed, and it has other hard links. The kernel reports their number, not their names.
    Linked {
        /// The name that it had.
        path: PathBuf,
        /// The number of names that it has.
        links: u32,
        /// Its inode number.
        inode: u64,
        /// Another file now has the name that it had.
        replaced: bool,
    },
    /// It is complete, and has another name.
    Moved {
        /// The name that it had.
        path: PathBuf,
        /// The name that it has.
        now: PathBuf,
        /// Another file now has the name that it had.
        replaced: bool,
    },
}

impl Change {
    /// Whether data is lost, or will be lost when this process ends.
    #[must_use]
    pub const fn is_loss(&self) -> bool {
        matches!(self, Self::Deleted { .. } | Self::Short { .. })
    }

    /// A description of the change in three or four words, for a table.
    #[must_use]
    pub const fn in_short(&self) -> &'static str {
        match self {
            Self::Deleted { .. } => "the file was deleted",
            Self::Short { .. } => "the file was cut short",
            Self::Linked { .. } => "the file has another name",
            Self::Moved { .. } => "the file was renamed",
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deleted { path, descriptor } => write!(
                out,
                "{} was deleted while it is in use: its bytes exist only as long as process {} has it open, and can be read as {}",
                path.display(),
                std::process::id(),
                descriptor.display()
            ),
            Self::Short { path, expected, found } => write!(
                out,
                "{} was cut short: it had {expected} bytes and was found with {found}. Data beyond that length is lost, and nothing is \
                 read or written there until the file is restored and opened again (restart the daemon)",
                path.display()
            ),
            Self::Linked { path, links, inode, replaced } => {
                let what = if *replaced { "names another file now" } else { "was deleted" };
                let names = if *links == 1 { "1 other name" } else { "other names" };
                write!(
                    out,
                    "{} {what}, and the file in use is complete: it has {names} (hard links; find MOUNTPOINT -xdev -inum {inode} shows \
                     them); rename it back, mv OTHER {}",
                    path.display(),
                    path.display()
                )
            }
            Self::Moved { path, now, replaced } => {
                let what = if *replaced { "names another file now" } else { "does not exist any more" };
                write!(out, "{} {what}: the file in use is {}", path.display(), now.display())
            }
        }
    }
}

/// The change of the open `file`, which was opened by `path` with at least `expected` bytes. `None` for a file that is
/// not regular.
#[must_use]
pub fn of(file: BorrowedFd<'_>, path: &Path, expected: u64) -> Option<Change> {
    of_open(file, path, expected).or_else(|| moved(file, path))
}

/// As [`of`], without a check of the path.
#[must_use]
pub fn of_open(file: BorrowedFd<'_>, path: &Path, expected: u64) -> Option<Change> {
    let deleted = || Change::Deleted { path: path.to_owned(), descriptor: path_of(file) };
    let status = match status_at(file, c"", AtFlags::EMPTY_PATH) {
        Ok(status) => status,
        // A network file system reports a deleted file with this error.
        Err(error) if error.raw_os_error() == Some(Errno::STALE.raw_os_error()) => return Some(deleted()),
        Err(_) => return None,
    };
    if !FileType::from_raw_mode(status.stx_mode.into()).is_file() {
        return None;
    }
    if status.stx_nlink == 0 {
        return Some(deleted());
    }
    let found = status.stx_size;
    (found < expected).then(|| Change::Short { path: path.to_owned(), expected, found })
}

fn moved(file: BorrowedFd<'_>, path: &Path) -> Option<Change> {
    let ours = status_at(file, c"", AtFlags::EMPTY_PATH).ok()?;
    if !FileType::from_raw_mode(ours.stx_mode.into()).is_file() {
        return None;
    }
    let replaced = match status_at(CWD, path, AtFlags::empty()) {
        Ok(found) => {
            let number = |status: &Statx| (status.stx_dev_major, status.stx_dev_minor, status.stx_ino);
            if number(&found) == number(&ours) {
                return None;
            }
            true
        }
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => false,
        Err(_) => return None,
    };
    let now = name_now(file)?;
    // FUSE and NFS give these names to a file that was deleted while a process has it open.
    let name = now.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let is_hidden = name.starts_with(".nfs") || name.starts_with(".fuse_hidden");
    let has_lost_its_name = name.ends_with(" (deleted)");
    if has_lost_its_name && !is_hidden && ours.stx_nlink > 0 {
        let (links, inode) = (ours.stx_nlink, ours.stx_ino);
        return Some(Change::Linked { path: path.to_owned(), links, inode, replaced });
    }
    if is_hidden || has_lost_its_name {
        return Some(Change::Deleted { path: path.to_owned(), descriptor: path_of(file) });
    }
    Some(Change::Moved { path: path.to_owned(), now, replaced })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;

    struct Fixture {
        folder: tempfile::TempDir,
        file: File,
    }

    impl Fixture {
        fn new() -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            fs::write(folder.path().join("file"), [1; 8192]).expect("written");
            let file = File::options().read(true).write(true).open(folder.path().join("file"));
            Self { folder, file: file.expect("it opens") }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().canonicalize().expect("there").join(name)
        }

        fn change(&self) -> Option<Change> {
            of(self.file.as_fd(), &self.path("file"), 8192)
        }
    }

    #[test]
    fn an_unchanged_file_and_a_longer_one_have_no_change() {
        let fixture = Fixture::new();
        assert_eq!(fixture.change(), None);
        fixture.file.set_len(9000).expect("longer");
        fs::hard_link(fixture.path("file"), fixture.path("link")).expect("a link");
        assert_eq!(fixture.change(), None);
    }

    #[test]
    fn a_deleted_file_can_be_read_under_the_reported_name() {
        let fixture = Fixture::new();
        fs::remove_file(fixture.path("file")).expect("removed");
        let Some(Change::Deleted { path, descriptor }) = fixture.change() else {
            panic!("{:?}", fixture.change());
        };
        assert_eq!(path, fixture.path("file"));
        assert_eq!(fs::read(descriptor).expect("read"), [1; 8192]);
    }

    #[test]
    fn a_file_that_another_was_renamed_over_is_deleted() {
        let fixture = Fixture::new();
        fs::write(fixture.path("other"), [2; 8192]).expect("written");
        fs::rename(fixture.path("other"), fixture.path("file")).expect("replaced");
        assert!(matches!(fixture.change(), Some(Change::Deleted { .. })));
    }

    #[test]
    fn a_file_whose_other_hard_link_is_left_is_not_lost() {
        let fixture = Fixture::new();
        fs::hard_link(fixture.path("file"), fixture.path("other")).expect("a link");
        fs::remove_file(fixture.path("file")).expect("removed");
        let change = fixture.change().expect("it has another name");
        assert!(!change.is_loss(), "{change}");
        let inode = fs::metadata(fixture.path("other")).expect("there").ino();
        let text = change.to_string();
        let parts = ["1 other name", "rename it back", &format!("-inum {inode}")];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        fs::write(fixture.path("file"), [2; 8192]).expect("written");
        let text = fixture.change().expect("another file has its name").to_string();
        assert!(text.contains("names another file now") && text.contains("1 other name"), "{text}");
        fs::rename(fixture.path("other"), fixture.path("file")).expect("renamed back");
        assert_eq!(fixture.change(), None);
    }

    #[test]
    fn a_renamed_file_is_reported_with_its_new_name() {
        let fixture = Fixture::new();
        fs::rename(fixture.path("file"), fixture.path("elsewhere")).expect("renamed");
        let moved = |replaced| {
            Some(Change::Moved { path: fixture.path("file"), now: fixture.path("elsewhere"), replaced })
        };
        assert_eq!(fixture.change(), moved(false));
        fs::write(fixture.path("file"), [2; 8192]).expect("written");
        assert_eq!(fixture.change(), moved(true));
        assert!(!fixture.change().is_some_and(|change| change.is_loss()));
    }

    #[test]
    fn a_truncated_file_is_reported_with_both_sizes() {
        let fixture = Fixture::new();
        fixture.file.set_len(4096).expect("cut");
        let short = Change::Short { path: fixture.path("file"), expected: 8192, found: 4096 };
        assert_eq!(fixture.change(), Some(short));
        fixture.file.set_len(8192).expect("restored");
        assert_eq!(fixture.change(), None);
    }

    #[test]
    fn a_device_is_no_file_that_could_be_deleted() {
        let null = File::open("/dev/null").expect("always there");
        assert_eq!(of(null.as_fd(), Path::new("/no/such/file"), 1), None);
    }
}
