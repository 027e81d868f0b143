//! What the demonstration requests of the system beyond the standard library.
//!
//! Elsewhere: the system calls themselves (`cbd-sys`, `rustix`).

use cbd_sys::process::Signals;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, kill_process};
use std::io;
use std::path::Path;
use std::process::Command;

pub use cbd_sys::process::unshare_mounts as own_mounts;

fn ending_signals() -> Signals {
    Signals::of(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP])
}

/// Takes a mount away; `detach` at once, whoever uses it.
pub fn unmount(path: &Path, detach: bool) -> io::Result<()> {
    let detach = if detach { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    Ok(rustix::mount::unmount(path, UnmountFlags::NOFOLLOW | detach)?)
}

/// Bytes that whoever asks may still write to the file system at `path`.
pub fn room(path: &Path) -> io::Result<u64> {
    let room = rustix::fs::statvfs(path)?;
    Ok(room.f_bavail.saturating_mul(room.f_frsize))
}

/// The user that this process acts as.
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Sends a signal to a child that has not been waited for.
pub fn signal(process: u32, signal: libc::c_int) {
    let process = i32::try_from(process).ok().and_then(Pid::from_raw);
    if let (Some(process), Some(signal)) = (process, Signal::from_named_raw(signal)) {
        let _ = kill_process(process, signal);
    }
}

/// Keeps the ending signals from this thread and those that it starts, so that [`next_ending_signal`] gets them.
pub fn hold_ending_signals() {
    ending_signals().block();
}

/// Waits for an ending signal.
pub fn next_ending_signal() -> libc::c_int {
    ending_signals().wait()
}

/// Makes a child die with the thread that starts it. A Ctrl-C at the terminal does not reach it, so that whoever started it
/// ends it in order; to the ending signals it listens, although this thread may hold them.
pub fn bind_to_parent(command: &mut Command) {
    cbd_sys::process::bind_to_parent(command, ending_signals());
}

/// Lets a child have mounts of its own, too.
///
/// Who serves a file system's device must never be in a mount namespace in which that file system is mounted: if it is killed
/// as the last process there, the kernel unmounts before it closes the server's files, waits for answers of the very process
/// that is ending, and never ends.
pub fn apart_from_mounts(command: &mut Command) {
    cbd_sys::process::unshare_mounts_of(command);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_has_some_room() {
        assert!(room(Path::new("/")).unwrap() < u64::MAX);
        assert!(room(Path::new("/nonexistent/x")).is_err());
    }
}
