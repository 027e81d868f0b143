//! System interfaces of the demonstration beyond the standard library.
//!
//! Elsewhere: the system calls themselves (`cbd-sys`, `rustix`).

use cbd_sys::process::Signals;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, kill_process};
use std::io;
use std::path::Path;
use std::process::Command;

pub use cbd_sys::process::unshare_mounts as unshare_own_mounts;

fn ending_signals() -> Signals {
    Signals::of(&[libc::SIGINT, libc::SIGTERM, libc::SIGHUP])
}

/// Unmounts; with `detach` lazily, immediately even if it is in use.
pub fn unmount(path: &Path, detach: bool) -> io::Result<()> {
    let detach = if detach { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    Ok(rustix::mount::unmount(path, UnmountFlags::NOFOLLOW | detach)?)
}

/// Bytes that this process may still write to the file system at `path`.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let free_bytes = rustix::fs::statvfs(path)?;
    Ok(free_bytes.f_bavail.saturating_mul(free_bytes.f_frsize))
}

/// The effective user of this process.
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

/// Blocks the ending signals in this thread and those that it starts, so that [`next_ending_signal`] gets them.
pub fn block_ending_signals() {
    ending_signals().block();
}

/// Waits for an ending signal.
pub fn next_ending_signal() -> libc::c_int {
    ending_signals().wait()
}

/// Makes a child end with the thread that starts it. A Ctrl-C at the terminal does not reach the child, so that its
/// parent ends it. The ending signals are unblocked in the child.
pub fn bind_to_parent(command: &mut Command) {
    cbd_sys::process::bind_to_parent(command, ending_signals());
}

/// Gives a child a mount namespace of its own.
///
/// The server of a device must not be in a mount namespace in which a file system on that device is mounted. If it
/// is killed as the last process there, the kernel unmounts before it closes the server's files, waits for answers
/// of the process that is ending, and deadlocks.
pub fn unshare_mounts(command: &mut Command) {
    cbd_sys::process::unshare_mounts_of(command);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_has_free_bytes() {
        assert!(free_bytes(Path::new("/")).unwrap() < u64::MAX);
        assert!(free_bytes(Path::new("/nonexistent/x")).is_err());
    }
}
