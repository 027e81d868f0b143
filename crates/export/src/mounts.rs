//! The mounts of a process's namespace, as the kernel lists them.
//!
//! Always true here: looking at the list asks no file system for anything, so it cannot hang on one whose server is gone.

use crate::system_error;
use cbd_types::Result;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One mount.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mount {
    /// Device number of its file system, (major, minor).
    pub device: (u32, u32),
    /// Where it is.
    pub target: PathBuf,
    /// Type, with the subtype.
    pub kind: String,
    /// What is mounted there.
    pub source: String,
}

/// All mounts that the calling process sees.
///
/// # Errors
/// When the system does not tell.
pub fn list() -> Result<Vec<Mount>> {
    read(Path::new("/proc/self/mountinfo"))
}

/// All mounts that the process sees whose `mountinfo` this is.
///
/// # Errors
/// When it cannot be read.
pub fn read(mountinfo: &Path) -> Result<Vec<Mount>> {
    let text =
        fs::read(mountinfo).map_err(|error| system_error(format!("{}", mountinfo.display()), &error))?;
    Ok(text.split(|&byte| byte == b'\n').filter_map(parse).collect())
}

/// The mount at exactly this place, the topmost if there are several.
///
/// # Errors
/// When the system does not tell.
pub fn at(target: &Path) -> Result<Option<Mount>> {
    Ok(list()?.into_iter().rev().find(|mount| mount.target == target))
}

/// One line: `36 35 98:0 /root /mnt rw,noatime master:1 - ext4 /dev/root rw`.
fn parse(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|&byte| byte == b' ');
    let (major, minor) = std::str::from_utf8(fields.nth(2)?).ok()?.split_once(':')?;
    let target = PathBuf::from(OsString::from_vec(unescape(fields.nth(1)?)));
    fields.find(|&field| field == b"-")?;
    let kind = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = String::from_utf8_lossy(&unescape(fields.next()?)).into_owned();
    Some(Mount { device: (major.parse().ok()?, minor.parse().ok()?), target, kind, source })
}

/// The kernel writes blanks and backslashes as a backslash and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let escaped = after.get(..3).filter(|_| first == b'\\').and_then(|digits| {
            let digits = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 8).ok()
        });
        match escaped {
            Some(byte) => {
                plain.push(byte);
                rest = after.get(3..).unwrap_or_default();
            }
            None => {
                plain.push(first);
                rest = after;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_comes_apart_with_and_without_optional_fields() {
        for optional in ["", "shared:1 master:2 "] {
            let line = format!("36 35 0:45 / /run/a\\040b rw,nosuid {optional}- fuse.cbd cbd rw,user_id=0");
            let mount = parse(line.as_bytes()).unwrap();
            assert_eq!(mount.device, (0, 45));
            assert_eq!(mount.target, Path::new("/run/a b"));
            assert_eq!((mount.kind.as_str(), mount.source.as_str()), ("fuse.cbd", "cbd"));
        }
    }

    #[test]
    fn a_line_cut_anywhere_is_a_mount_or_none() {
        let line = b"36 35 0:45 / /run/a\\040b rw shared:1 - fuse.cbd cbd rw";
        for end in 0..line.len() {
            let _ = parse(&line[..end]);
        }
    }
}
