//! What the daemon asks of the kernel beyond the standard library.
//!
//! Always true here: the only `unsafe` of the crate is in this file, each block with the reason that it is sound.

use cbd_types::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Sets up the system's allocator so that what is freed goes back to the system, also while the memory of the process is locked, as it is
/// once a FUSE device is served: glibc gives back what lies in the middle of its heaps by `madvise`, which the kernel refuses for locked memory. So buffers
/// of requests and parts of indexes are mappings of their own, and everything else shares the one heap that can shrink. Call it before any thread is started.
pub fn return_freed_memory() {
    // glibc's own threshold grows with each large buffer that is freed, up to 32 MiB, unless it is set.
    #[cfg(target_env = "gnu")]
    for (parameter, value) in
        [(libc::M_MMAP_THRESHOLD, 128 << 10), (libc::M_TRIM_THRESHOLD, 1 << 20), (libc::M_ARENA_MAX, 1)]
    {
        // SAFETY: sets a number of the allocator's; a value that it does not take changes nothing.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// The effective user of this process.
#[must_use]
pub fn user_id() -> u32 {
    // SAFETY: takes nothing, touches no memory of ours and cannot fail.
    unsafe { libc::geteuid() }
}

/// Whether this process runs as root.
#[must_use]
pub fn is_root() -> bool {
    user_id() == 0
}

/// The number of the group called `name`; a number stands for itself.
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

/// All groups of the process at the other end of a unix socket, as they were when it connected.
#[must_use]
pub fn peer_groups(socket: BorrowedFd<'_>) -> Vec<u32> {
    let mut groups = vec![0u32; 256];
    let mut length = libc::socklen_t::try_from(size_of_val(groups.as_slice())).unwrap_or(0);
    // SAFETY: the kernel writes at most `length` bytes to the vector, which is that long and initialised.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERGROUPS,
            groups.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    groups.truncate(if result == 0 { length as usize / size_of::<u32>() } else { 0 });
    groups
}

/// Gives a file a group; its owner stays.
///
/// # Errors
/// What the system says.
pub fn set_group(path: &std::path::Path, group: u32) -> Result<()> {
    std::os::unix::fs::chown(path, None, Some(group)).map_err(|error| {
        Error::new(ErrorKind::System, format!("{} cannot be given to group {group}: {error}", path.display()))
    })
}

/// Takes the advisory lock on an open file; false when another process has it. The lock ends with the file.
///
/// # Errors
/// What the system says.
pub fn try_lock(file: &std::fs::File) -> std::io::Result<bool> {
    // SAFETY: flock acts on the open descriptor that `file` holds.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(true);
    }
    let error = std::io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::EWOULDBLOCK) { Ok(false) } else { Err(error) }
}

/// The descriptors that a service manager has handed to this process, with their names, by the protocol of `sd_listen_fds(3)`; once, and
/// none from then on. From here on they are closed when a program is executed.
#[must_use]
pub fn handed_over_descriptors() -> Vec<(String, OwnedFd)> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::SeqCst) {
        return Vec::new();
    }
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    if variable("LISTEN_PID").parse() != Ok(std::process::id()) {
        return Vec::new();
    }
    /// The number of the first.
    const FIRST: i32 = 3;
    let count = variable("LISTEN_FDS").parse().unwrap_or(0).clamp(0, 1 << 16);
    let names = variable("LISTEN_FDNAMES");
    let mut names = names.split(':');
    let mut descriptors = Vec::new();
    for number in FIRST..FIRST + count {
        let name = names.next().unwrap_or_default().to_owned();
        // SAFETY: takes no pointer; of a number that is not open it says so.
        if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } == 0 {
            // SAFETY: it is open, and by the protocol this process's to own; nobody else takes it, since this is done once.
            descriptors.push((name, unsafe { OwnedFd::from_raw_fd(number) }));
        }
    }
    descriptors
}

/// Whether this process may lock as much memory as it likes.
#[must_use]
pub fn may_lock_without_limit() -> bool {
    /// Number of the capability CAP_IPC_LOCK.
    const IPC_LOCK: u32 = 14;
    let capable = std::fs::read_to_string("/proc/self/status").is_ok_and(|status| {
        let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let set = effective.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0);
        set >> IPC_LOCK & 1 == 1
    });
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one `rlimit` to the pointer, which is valid for that.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    capable || (result == 0 && limit.rlim_cur == libc::RLIM_INFINITY)
}

/// The limit on the address space of this process; none where there is none.
#[must_use]
pub fn address_space_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one `rlimit` to the pointer, which is valid for that.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) };
    (result == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Lets this process have as many descriptors as it may: each queue of each device has some of its own.
pub fn raise_descriptor_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one `rlimit` to the pointer, which is valid for that.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0 {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: the kernel reads one `rlimit` from the pointer, which is valid for that. Where it refuses, the limit stays.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    }
}

/// Lets the signals in that end the daemon: whoever started it may have had them blocked, and children inherit that.
pub fn unblock_end_signals() {
    let mut signals = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the whole set, which the other calls only read or change; the pointers are to a
    // local that outlives them, and no old mask is asked for.
    unsafe {
        libc::sigemptyset(signals.as_mut_ptr());
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::sigaddset(signals.as_mut_ptr(), signal);
        }
        libc::pthread_sigmask(libc::SIG_UNBLOCK, signals.as_ptr(), std::ptr::null_mut());
    }
}

/// A write beyond the limit on file sizes is an error from now on, not the end of the process.
pub fn ignore_file_size_signal() {
    // SAFETY: sets a signal's disposition to "ignored", which runs no code of ours.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Has the kernel end the process by SIGALRM after `limit`, to the second.
pub fn alarm(limit: std::time::Duration) {
    // SAFETY: takes an integer; the signal has the default action, which runs no code of ours.
    unsafe { libc::alarm(u32::try_from(limit.as_secs()).unwrap_or(u32::MAX)) };
}

/// Ends the process at once, without running anything: for a daemon that could not stop in time.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: never returns and runs no code of this process.
    unsafe { libc::_exit(code) }
}
