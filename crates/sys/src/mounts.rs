//! The kernel's tables of mounts and of swap space.
//!
//! Invariants: reading a table queries no file system, so it cannot block on one whose server does not answer. A name
//! may be any bytes: any user can mount at a name that is not text (FUSE), which must not hide other mounts.

use crate::DeviceNumber;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One mount.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mount {
    /// Its number, which `/proc` shows of each open file on it.
    pub id: u64,
    /// Device number of its file system.
    pub device: DeviceNumber,
    /// The mount point.
    pub target: PathBuf,
    /// The type of its file system, with the subtype.
    pub kind: String,
    /// The mounted device, or another source.
    pub source: PathBuf,
}

/// The mounts in the mount namespace of this process's first thread.
///
/// # Errors
/// The system error.
pub fn list() -> io::Result<Vec<Mount>> {
    of(Path::new("/proc/self"))
}

/// The mounts in the mount namespace of the calling thread.
///
/// # Errors
/// The system error.
pub fn of_this_thread() -> io::Result<Vec<Mount>> {
    of(Path::new("/proc/thread-self"))
}

/// The mounts in the mount namespace of a process or thread, by its directory below `/proc`. Lower mounts come before
/// those that cover them.
///
/// # Errors
/// The system error.
pub fn of(process: &Path) -> io::Result<Vec<Mount>> {
    let table = fs::read(process.join("mountinfo"))?;
    Ok(table.split(|&byte| byte == b'\n').filter_map(parse).collect())
}

/// The mount that contains `path`: the last of those with the longest mount point, since later mounts cover earlier
/// ones.
pub fn containing<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    let inside = mounts.iter().filter(|mount| path.starts_with(&mount.target));
    inside.max_by_key(|mount| mount.target.components().count())
}

/// The paths of all swap space. Empty if the system does not report it.
#[must_use]
pub fn swaps() -> Vec<PathBuf> {
    let table = fs::read("/proc/swaps").unwrap_or_default();
    let first = |line: &[u8]| line.split(u8::is_ascii_whitespace).next().map(path_of);
    table.split(|&byte| byte == b'\n').skip(1).filter_map(first).collect()
}

/// One line: `36 35 98:0 /root /point rw,options optional... - type source super-options`.
fn parse(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|&byte| byte == b' ');
    let text = |field| std::str::from_utf8(field).ok();
    let id = text(fields.next()?)?.parse().ok()?;
    let device = DeviceNumber::parse(text(fields.nth(1)?)?)?;
    let target = path_of(fields.nth(1)?);
    fields.find(|&field| field == b"-")?;
    let kind = String::from_utf8_lossy(fields.next()?).into_owned();
    Some(Mount { id, device, target, kind, source: path_of(fields.next()?) })
}

/// A path of a table: the kernel writes blanks, line feeds and backslashes as a backslash and three octal digits.
fn path_of(mut rest: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(rest.len());
    while let Some((&byte, after)) = rest.split_first() {
        let digits =
            after.get(..3).filter(|_| byte == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(escaped) => {
                path.push(escaped);
                rest = &after[3..];
            }
            None => {
                path.push(byte);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn a_line_is_read_with_and_without_optional_fields() {
        for optional in ["", "shared:1 master:2 "] {
            let line = format!("36 35 0:45 / /run/a\\040b rw,nosuid {optional}- fuse.cbd cbd rw,user_id=0");
            let mount = parse(line.as_bytes()).unwrap();
            assert_eq!((mount.id, mount.device.pair()), (36, (0, 45)));
            assert_eq!(mount.target, Path::new("/run/a b"));
            assert_eq!((mount.kind.as_str(), mount.source.as_path()), ("fuse.cbd", Path::new("cbd")));
        }
    }

    #[test]
    fn a_name_that_is_not_text_hides_no_mount() {
        let mount = parse(b"5 4 98:0 / /mnt/\xff\\134\\011 rw - ext4 /dev/\xfe rw").unwrap();
        assert_eq!(mount.target.as_os_str(), OsStr::from_bytes(b"/mnt/\xff\\\t"));
        assert_eq!(mount.source.as_os_str(), OsStr::from_bytes(b"/dev/\xfe"));
    }

    #[test]
    fn a_malformed_line_is_no_mount() {
        let line = b"36 35 0:45 / /run/a\\040b rw shared:1 - fuse.cbd cbd rw";
        assert!(parse(line).is_some());
        for end in 0..line.len() - 6 {
            assert_eq!(parse(&line[..end]), None, "{end}");
        }
        assert_eq!(parse(b"36 35 x:y / / rw - a b"), None);
    }

    #[test]
    fn the_mount_that_contains_a_path_is_the_last_of_the_longest() {
        let mount = |id, target: &str| Mount {
            id,
            device: DeviceNumber { major: 0, minor: 1 },
            target: target.into(),
            kind: String::new(),
            source: PathBuf::new(),
        };
        let mounts = [mount(1, "/"), mount(2, "/a/b"), mount(3, "/a/b"), mount(4, "/a")];
        let found = |path: &str| containing(&mounts, Path::new(path)).map(|mount| mount.id);
        assert_eq!((found("/a/b/c"), found("/a/bc"), found("/x")), (Some(3), Some(4), Some(1)));
    }

    #[test]
    fn the_root_is_mounted() {
        for mounts in [list(), of_this_thread()] {
            assert!(mounts.unwrap().iter().any(|mount| mount.target == Path::new("/")));
        }
        assert!(of(Path::new("/proc/0")).is_err());
    }
}
