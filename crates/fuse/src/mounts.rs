//! Recognizes the project's mounts, and whether their server is alive.
//!
//! Invariants: a mount is treated as the project's only if both its type and its source match.
//!
//! Elsewhere: listing mounts ([`cbd_export::mounts`]).

use crate::connection;
use cbd_export::mounts::Mount;
use rustix::fs::statfs;
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

/// The source of the project's mounts.
pub const SOURCE: &str = "cbd";
/// The type of the project's mounts.
pub const KIND: &str = "fuse.cbd";

/// Whether it is a FUSE file system of this project.
pub fn is_ours(mount: &Mount) -> bool {
    mount.kind == KIND && mount.source == Path::new(SOURCE)
}

/// The number of the FUSE connection behind it.
pub const fn connection(mount: &Mount) -> u32 {
    mount.device.minor
}

/// Whether the server behind this FUSE mount is gone. A server that does not answer within `timeout` counts as
/// alive.
pub fn is_dead(mount: &Mount, timeout: Duration) -> bool {
    let target = mount.target.clone();
    // No file system answers this from a cache.
    match within(timeout, move || statfs(target)) {
        Some(Err(error)) => matches!(error, Errno::NOTCONN | Errno::CONNABORTED),
        Some(Ok(_)) | None => false,
    }
}

/// Runs a query that may block on a server; `None` if there is no answer within `timeout`.
pub fn within<T: Send + 'static>(timeout: Duration, query: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (answered, answer) = mpsc::channel();
    // A thread of its own, since the query cannot be cancelled; the thread ends when the server does.
    let queried = std::thread::Builder::new().name("cbd-fuse-query".into()).spawn(move || {
        let _ = answered.send(query());
    });
    queried.ok().and_then(|_| answer.recv_timeout(timeout).ok())
}

/// Aborts the connection: the kernel answers every request in it, and every later one, with an error. Needs
/// no action of the server.
pub fn abort(mount: &Mount) {
    if abort_number(connection(mount)).is_err() {
        // A forced umount has the same effect where the mount can still be reached; an error means that it is
        // gone.
        let _ = unmount(&mount.target, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW);
    }
    let _ = unmount(&mount.target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
}

/// Aborts the FUSE connection with this number that is mounted at `target`, and removes the mount: each only
/// if the number or the mount point does not belong to another connection by now, which is possible once the
/// connection has ended, for example by an administrator. `channel` is one of the connection, where there is
/// one.
pub fn abort_ours(number: Option<u32>, target: &Path, channel: Option<&OwnedFd>) {
    let mount = ours_at(number, target);
    // A live connection owns its number, whether it is still mounted at `target` or not.
    let lives = channel.is_some_and(|channel| matches!(connection::has_ended(channel), Ok(false)));
    match (mount, number) {
        (Some(mount), _) => abort(&mount),
        (None, Some(number)) if lives => drop(abort_number(number)),
        (None, _) => {}
    }
}

/// The mount at `target`, if it is the project's, with this number where it is known.
pub fn ours_at(number: Option<u32>, target: &Path) -> Option<Mount> {
    let mount = cbd_export::mounts::at(target).ok().flatten()?;
    (is_ours(&mount) && number.is_none_or(|number| number == connection(&mount))).then_some(mount)
}

fn abort_number(number: u32) -> std::io::Result<()> {
    fs::write(format!("/sys/fs/fuse/connections/{number}/abort"), "1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_sys::DeviceNumber;

    #[test]
    fn a_mount_of_another_type_or_source_is_not_ours() {
        for (kind, source, ours) in [
            (KIND, SOURCE, true),
            (KIND, "other", false),
            ("fuse", SOURCE, false),
            ("fuse.sshfs", SOURCE, false),
        ] {
            let mount = Mount {
                id: 36,
                device: DeviceNumber { major: 0, minor: 45 },
                target: "/run/cbd".into(),
                kind: kind.into(),
                source: source.into(),
            };
            assert_eq!(is_ours(&mount), ours, "{kind} {source}");
        }
    }
}
