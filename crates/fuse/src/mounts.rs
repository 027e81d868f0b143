//! The mounts of this process's namespace, as the kernel lists them, and what of them is ours.
//!
//! Always true here: a mount is ours only if both its type and its source say so; looking at the list asks no
//! file system for anything, so it cannot hang on one whose server is gone.

use crate::errors::system_error;
use crate::system;
use cbd_types::Result;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

/// The source of our mounts.
pub const SOURCE: &str = "cbd";
/// The type of our mounts.
pub const KIND: &str = "fuse.cbd";

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

impl Mount {
    /// Whether it is one of our FUSE file systems.
    pub fn is_ours(&self) -> bool {
        self.kind == KIND && self.source == SOURCE
    }

    /// The number of the FUSE connection behind it.
    pub const fn connection(&self) -> u32 {
        self.device.1
    }

    /// Whether the server behind this FUSE mount is gone. One that does not answer within `patience` is not: it may
    /// answer yet.
    pub fn is_dead(&self, patience: Duration) -> bool {
        let (answered, answer) = mpsc::channel();
        let target = self.target.clone();
        // A thread of its own, since the question cannot be taken back; it ends when the server does.
        let asked = std::thread::Builder::new().name("cbd-fuse-ask".into()).spawn(move || {
            let _ = answered.send(system::ask_file_system(&target));
        });
        // The last: it was served by io_uring, its threads are gone, and the kernel is about to end the connection.
        let gone = [libc::ENOTCONN, libc::ECONNABORTED, libc::ECANCELED];
        match asked.ok().and_then(|_| answer.recv_timeout(patience).ok()) {
            Some(Err(error)) => error.raw_os_error().is_some_and(|errno| gone.contains(&errno)),
            Some(Ok(())) | None => false,
        }
    }

    /// Ends the connection: every request in it, and every later one, is answered with an error. Needs no answer
    /// of the server.
    pub fn abort(&self) {
        abort_connection(Some(self.connection()), &self.target);
    }
}

/// Ends the FUSE connection with this number, which is mounted at `target`, and takes the mount away.
pub fn abort_connection(connection: Option<u32>, target: &Path) {
    let abort = |number| fs::write(format!("/sys/fs/fuse/connections/{number}/abort"), "1");
    if connection.is_none_or(|number| abort(number).is_err()) {
        // A forced umount does the same where the mount can still be reached; that it fails means it is gone.
        let _ = system::umount(target, libc::MNT_FORCE | libc::UMOUNT_NOFOLLOW);
    }
    let _ = system::umount(target, libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW);
}

/// All mounts that the calling process sees.
pub fn list() -> Result<Vec<Mount>> {
    read(Path::new("/proc/self/mountinfo"))
}

/// All mounts that the process sees whose `mountinfo` this is.
pub fn read(mountinfo: &Path) -> Result<Vec<Mount>> {
    let text =
        fs::read(mountinfo).map_err(|error| system_error(format!("{}", mountinfo.display()), &error))?;
    Ok(text.split(|&byte| byte == b'\n').filter_map(parse).collect())
}

/// The mount at exactly this place, the topmost if there are several.
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
            assert!(mount.is_ours());
        }
    }

    #[test]
    fn a_mount_of_another_type_or_source_is_not_ours() {
        for rest in ["fuse.cbd other", "fuse cbd", "fuse.sshfs cbd"] {
            let line = format!("36 35 0:45 / /run/cbd rw - {rest} rw");
            assert!(!parse(line.as_bytes()).unwrap().is_ours());
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
