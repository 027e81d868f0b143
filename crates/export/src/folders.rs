//! Folders that CBD owns: created with their modes, never reached through a link of another user.
//!
//! Invariants: each component of a path is opened by its name in the parent folder, never by the whole path. A symbolic link is
//! followed only if root or this user created it. A folder that CBD owns belongs to this user or to root, and no other user may
//! write to it, whatever the umask is.
//!
//! Elsewhere: the names of the folders.

use crate::system_error;
use cbd_types::{Error, ErrorKind, Result};
use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat, readlinkat};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

/// Maximum number of symbolic links in one path, as in the kernel.
const LINKS_MAX: u32 = 40;
/// The mode of parent folders that are created.
const PARENT_MODE: u32 = 0o755;
/// The write bits of group and others.
const OTHERS_WRITE: u32 = 0o022;
/// The sticky bit: every user may create files in the folder, but may remove only files that he owns.
const STICKY: u32 = 0o1000;

/// Creates the folder at `path` and its missing parents, and ensures that it belongs to this user or to root, and that
/// only its owner may write to it. Returns its path without symbolic links.
///
/// # Errors
/// [`ErrorKind::Permission`] if another user owns a link in the path or the folder; [`ErrorKind::InvalidArgument`] for a file
/// that is no folder; and errors of the system.
pub fn own_folder(path: &Path, mode: u32) -> Result<PathBuf> {
    let (folder, resolved) = walk(path, mode)?;
    let found = File::from(folder);
    let failed = |error: io::Error| system_error(resolved.display(), &error);
    let metadata = found.metadata().map_err(failed)?;
    refuse_foreign(&resolved, &metadata, "the folder")?;
    if metadata.mode() & STICKY != 0 {
        let text = format!(
            "the folder {} is shared by all users (mode {:04o}): name a folder in it that only CBD uses, such as {}",
            resolved.display(),
            metadata.mode() & 0o7777,
            resolved.join("cbd").display()
        );
        return Err(Error::new(ErrorKind::Permission, text));
    }
    if metadata.mode() & OTHERS_WRITE != 0 && !is_of_own_group(&metadata) {
        if metadata.uid() != user_id() {
            let text = format!(
                "others than its owner may write to the folder {} (mode {:04o}): chmod go-w {0}",
                resolved.display(),
                metadata.mode() & 0o7777
            );
            return Err(Error::new(ErrorKind::Permission, text));
        }
        // The folder was created with another umask. The mode is changed through the descriptor, so that the change applies to
        // the folder that was checked.
        let by_descriptor = format!("/proc/self/fd/{}", found.as_raw_fd());
        let narrow = std::fs::Permissions::from_mode(metadata.mode() & 0o7777 & !OTHERS_WRITE);
        std::fs::set_permissions(by_descriptor, narrow).map_err(failed)?;
    }
    Ok(resolved)
}

/// Whether the folder belongs to root, and only root and the group of this process may write to it. An administrator prepares
/// such a folder for a daemon of another user.
fn is_of_own_group(metadata: &Metadata) -> bool {
    let group = rustix::process::getegid().as_raw();
    metadata.uid() == 0 && user_id() != 0 && metadata.gid() == group && metadata.mode() & 0o002 == 0
}

/// Creates the folder at `path` and its missing parents, without a check of the users that may write to existing ones: for
/// folders that the user names. Returns its path without symbolic links.
///
/// # Errors
/// As [`own_folder`], except for the folder's owner.
pub fn reach_folder(path: &Path) -> Result<PathBuf> {
    walk(path, PARENT_MODE).map(|(_, resolved)| resolved)
}

/// Creates the folder `name` in `parent`, a path of own folders without links. An existing `name` must be an own folder.
///
/// # Errors
/// As [`own_folder`]; a link is refused even if this user owns it.
pub fn own_subfolder(parent: &Path, name: &OsStr) -> Result<PathBuf> {
    let path = parent.join(name);
    match std::fs::symlink_metadata(&path) {
        Ok(metadata) if metadata.is_dir() => {
            refuse_foreign(&path, &metadata, "the folder")?;
            Ok(path)
        }
        Ok(_) => Err(no_folder(&path, "")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let made = std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), PARENT_MODE)
                .create(&path);
            made.map_err(|error| system_error(path.display(), &error))?;
            Ok(path)
        }
        Err(error) => Err(system_error(path.display(), &error)),
    }
}

/// Opens a file in an own folder. The file must be a regular file of this user or root with one name, and not one that another
/// user created under this name. Opening never blocks.
///
/// # Errors
/// Errors of the system; [`io::ErrorKind::PermissionDenied`] for any other kind of file.
pub fn open_own_file(path: &Path, how: &mut std::fs::OpenOptions) -> io::Result<File> {
    let file = how.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY).open(path).map_err(
        |error| {
            if error.raw_os_error() == Some(libc::ELOOP) { wrong("a symbolic link") } else { error }
        },
    )?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(wrong("no ordinary file"));
    }
    if metadata.uid() != user_id() && metadata.uid() != 0 {
        return Err(wrong(&format!("a file of user {}", metadata.uid())));
    }
    if metadata.nlink() > 1 {
        return Err(wrong("a file with other names"));
    }
    Ok(file)
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("it is {what}; look who put it there, and move it away"),
    )
}

/// Opens the folder, component by component.
fn walk(path: &Path, mode: u32) -> Result<(OwnedFd, PathBuf)> {
    let failed = |error: &io::Error, at: &Path| system_error(at.display(), error);
    let absolute = std::path::absolute(path).map_err(|error| failed(&error, path))?;
    let mut todo: VecDeque<OsString> = names(&absolute);
    let root = || open_in(CWD, OsStr::new("/"), OFlags::DIRECTORY).map_err(|error| failed(&error, path));
    let (mut folder, mut resolved, mut links) = (root()?, PathBuf::from("/"), 0);
    while let Some(name) = todo.pop_front() {
        if name == ".." {
            folder = open_in(&folder, &name, OFlags::DIRECTORY).map_err(|error| failed(&error, &resolved))?;
            resolved.pop();
            continue;
        }
        let here = resolved.join(&name);
        let opened = match open_in(&folder, &name, OFlags::NOFOLLOW) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let mode = if todo.is_empty() { mode } else { PARENT_MODE };
                make_in(&folder, &name, mode).map_err(|error| failed(&error, &here))?;
                open_in(&folder, &name, OFlags::NOFOLLOW)
            }
            other => other,
        };
        let opened = File::from(opened.map_err(|error| failed(&error, &here))?);
        let metadata = opened.metadata().map_err(|error| failed(&error, &here))?;
        if metadata.is_symlink() {
            refuse_foreign(&here, &metadata, "the symbolic link")?;
            links += 1;
            if links > LINKS_MAX {
                return Err(no_folder(&here, ": it leads through too many links"));
            }
            let target = read_link(&opened).map_err(|error| failed(&error, &here))?;
            if target.is_absolute() {
                (folder, resolved) = (root()?, PathBuf::from("/"));
            }
            for name in names(&target).into_iter().rev() {
                todo.push_front(name);
            }
            continue;
        }
        if !metadata.is_dir() {
            return Err(no_folder(&here, ""));
        }
        (folder, resolved) = (opened.into(), here);
    }
    Ok((folder, resolved))
}

fn names(path: &Path) -> VecDeque<OsString> {
    path.components()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        })
        .collect()
}

fn no_folder(path: &Path, why: &str) -> Error {
    let text = format!("{} is no folder{why}; move it away, or choose another folder", path.display());
    Error::new(ErrorKind::InvalidArgument, text)
}

fn refuse_foreign(path: &Path, metadata: &Metadata, what: &str) -> Result<()> {
    let owner = metadata.uid();
    if owner == user_id() || owner == 0 {
        return Ok(());
    }
    let text = format!(
        "{what} {} belongs to user {owner}, who can put anything in its place; remove it, or choose another folder",
        path.display()
    );
    Err(Error::new(ErrorKind::Permission, text))
}

fn user_id() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Opens the file of this name in `folder` with `O_PATH`.
fn open_in(folder: impl AsFd, name: &OsStr, flags: OFlags) -> io::Result<OwnedFd> {
    Ok(openat(folder, name, OFlags::PATH | OFlags::CLOEXEC | flags, Mode::empty())?)
}

/// Creates a folder; one that another process has just created is accepted.
fn make_in(folder: &OwnedFd, name: &OsStr, mode: u32) -> io::Result<()> {
    match mkdirat(folder, name, Mode::from_raw_mode(mode)) {
        Err(Errno::EXIST) => Ok(()),
        other => Ok(other?),
    }
}

/// The target of an open link.
fn read_link(link: &File) -> io::Result<PathBuf> {
    Ok(OsString::from_vec(readlinkat(link, c"", Vec::new())?.into_bytes()).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn mode_of(path: &Path) -> u32 {
        fs::symlink_metadata(path).expect("it is there").mode() & 0o7777
    }

    fn is_root() -> bool {
        user_id() == 0
    }

    #[test]
    fn folders_are_created_with_their_modes_and_an_own_one_with_a_wide_mode_is_restricted() {
        let place = tempfile::tempdir().expect("a folder");
        let path = place.path().join("a/b/c");
        let made = own_folder(&path, 0o700).expect("made");
        assert_eq!((mode_of(&made), mode_of(made.parent().expect("a parent")) & OTHERS_WRITE), (0o700, 0));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).expect("changed");
        own_folder(&path, 0o700).expect("ours");
        assert_eq!(mode_of(&path), 0o755);
    }

    #[test]
    fn a_folder_that_all_users_share_is_refused_and_keeps_its_mode() {
        let place = tempfile::tempdir().expect("a folder");
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o1777)).expect("changed");
        let error = own_folder(place.path(), 0o700).expect_err("others make files there");
        assert_eq!((error.kind(), mode_of(place.path())), (ErrorKind::Permission, 0o1777));
        own_folder(&place.path().join("cbd"), 0o700).expect("a folder of our own in it");
    }

    #[test]
    fn an_own_link_is_followed_and_the_returned_path_is_without_it() {
        let place = tempfile::tempdir().expect("a folder");
        let real = place.path().canonicalize().expect("there").join("real");
        fs::create_dir(&real).expect("made");
        symlink("./x/../real", place.path().join("link")).expect("made");
        fs::create_dir(place.path().join("x")).expect("made");
        assert_eq!(own_folder(&place.path().join("link/sub"), 0o700).expect("made"), real.join("sub"));
        symlink("loop", place.path().join("loop")).expect("made");
        let error = own_folder(&place.path().join("loop/sub"), 0o700).expect_err("it has no end");
        assert!(error.line().contains("too many links"), "{error}");
    }

    #[test]
    fn a_file_that_is_no_folder_is_refused() {
        let place = tempfile::tempdir().expect("a folder");
        fs::write(place.path().join("file"), "x").expect("written");
        for path in ["file", "file/below"] {
            let error = own_folder(&place.path().join(path), 0o700).expect_err("a file is in the way");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        }
    }

    #[test]
    fn a_subfolder_is_never_reached_through_a_link() {
        let place = tempfile::tempdir().expect("a folder");
        fs::create_dir(place.path().join("outside")).expect("made");
        symlink("outside", place.path().join("link")).expect("made");
        let error = own_subfolder(place.path(), OsStr::new("link")).expect_err("it is a link");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        let made = own_subfolder(place.path(), OsStr::new("new")).expect("made");
        assert_eq!(own_subfolder(place.path(), OsStr::new("new")).expect("it is there"), made);
    }

    #[test]
    fn files_of_another_user_are_refused() {
        if !is_root() {
            return println!("not run: it makes things of another user, as root");
        }
        let place = tempfile::tempdir().expect("a folder");
        fs::create_dir(place.path().join("real")).expect("made");
        symlink("real", place.path().join("link")).expect("made");
        std::os::unix::fs::lchown(place.path().join("link"), Some(4711), None).expect("given away");
        let error = own_folder(&place.path().join("link/sub"), 0o700).expect_err("another's link");
        assert_eq!(error.kind(), ErrorKind::Permission, "{error}");
        assert!(error.line().contains("user 4711"), "{error}");
        assert!(!place.path().join("real/sub").exists());
        std::os::unix::fs::chown(place.path().join("real"), Some(4711), None).expect("given away");
        for refused in
            [own_folder(&place.path().join("real"), 0o700), own_subfolder(place.path(), OsStr::new("real"))]
        {
            assert_eq!(refused.expect_err("another's folder").kind(), ErrorKind::Permission);
        }
    }

    #[test]
    fn only_an_own_regular_file_is_opened() {
        let place = tempfile::tempdir().expect("a folder");
        let at = |name: &str| place.path().join(name);
        fs::write(at("file"), "x").expect("written");
        let open = |name: &str| open_own_file(&at(name), fs::OpenOptions::new().read(true));
        assert!(open("file").is_ok());
        symlink("file", at("link")).expect("made");
        rustix::fs::mkfifoat(CWD, at("fifo"), Mode::from_raw_mode(0o600)).expect("made");
        fs::create_dir(at("folder")).expect("made");
        for name in ["link", "fifo", "folder"] {
            assert_eq!(open(name).expect_err(name).kind(), io::ErrorKind::PermissionDenied);
        }
        fs::hard_link(at("file"), at("second")).expect("made");
        assert!(open("file").is_err(), "it has two names");
    }
}
