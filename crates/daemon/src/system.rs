//! System interfaces of the daemon beyond the standard library.
//!
//! Elsewhere: the system calls themselves (`cbd-sys`, `rustix`).

use cbd_types::{Error, ErrorKind, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::TryLockError;
use std::os::fd::OwnedFd;

pub use cbd_sys::process::{alarm, exit_now, peer_groups, return_freed_memory};

/// The effective user of this process.
#[must_use]
pub fn user_id() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether this process runs as root.
#[must_use]
pub fn is_root() -> bool {
    user_id() == 0
}

/// The number of the group `name`, which may be a number itself.
///
/// # Errors
/// [`ErrorKind::NotFound`] when there is no such group.
pub fn group_id(name: &str) -> Result<u32> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    // The file and not getgrnam: name services may block, and the daemon comes up before the network.
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    groups
        .lines()
        .filter_map(|line| {
            let mut fields = line.split(':');
            (fields.next()? == name).then(|| fields.nth(1)?.parse().ok())?
        })
        .next()
        .ok_or_else(|| Error::new(ErrorKind::NotFound, format!("there is no group \"{name}\" in /etc/group")))
}

/// Changes the group of a file.
///
/// # Errors
/// The system's error.
pub fn set_group(path: &std::path::Path, group: u32) -> Result<()> {
    std::os::unix::fs::chown(path, None, Some(group)).map_err(|error| {
        Error::new(ErrorKind::System, format!("{} cannot be given to group {group}", path.display()))
            .caused_by(error)
    })
}

/// Takes the advisory lock on an open file; false if another process holds it. The lock ends with the file.
///
/// # Errors
/// The system's error.
pub fn try_lock(file: &std::fs::File) -> std::io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The descriptors that a service manager passed to this process, with their names, by the protocol of
/// `sd_listen_fds(3)`; none after the first call. They are made close-on-exec.
#[must_use]
pub fn handed_over_descriptors() -> Vec<(String, OwnedFd)> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    if variable("LISTEN_PID").parse() != Ok(std::process::id()) {
        return Vec::new();
    }
    let count = variable("LISTEN_FDS").parse().unwrap_or(0).min(1 << 16);
    let names = variable("LISTEN_FDNAMES");
    let names: Vec<&str> = names.split(':').collect();
    let name = |index: usize| names.get(index).copied().unwrap_or_default().to_owned();
    let descriptors = cbd_sys::process::inherited_descriptors(count);
    descriptors.into_iter().map(|(index, descriptor)| (name(index), descriptor)).collect()
}

/// Whether this process may lock memory without a limit.
#[must_use]
pub fn may_lock_without_limit() -> bool {
    /// Number of the capability CAP_IPC_LOCK.
    const IPC_LOCK: u32 = 14;
    let capable = std::fs::read_to_string("/proc/self/status").is_ok_and(|status| {
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let set = effective.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0);
        set >> IPC_LOCK & 1 == 1
    });
    capable || getrlimit(Resource::Memlock).current.is_none()
}

/// The limit on the address space of this process, if there is one.
#[must_use]
pub fn address_space_limit() -> Option<u64> {
    getrlimit(Resource::As).current
}

/// Raises the limit of descriptors to its maximum: each queue of each device has some of its own.
pub fn raise_descriptor_limit() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    // If the kernel refuses it, the limit is unchanged.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// Unblocks the signals that end the daemon: the process inherits the signal mask of its parent.
pub fn unblock_end_signals() {
    cbd_sys::process::Signals::of(&[libc::SIGTERM, libc::SIGINT, libc::SIGHUP]).unblock();
}

/// Ignores SIGXFSZ: a write beyond the limit on file sizes then returns an error.
pub fn ignore_file_size_signal() {
    cbd_sys::process::ignore_signal(libc::SIGXFSZ);
}
