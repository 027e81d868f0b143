//! The process, its threads and their children: signals, namespaces, descriptors, allocator.

use crate::checked;
use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A set of signals.
#[derive(Clone, Copy)]
pub struct Signals(libc::sigset_t);

impl std::fmt::Debug for Signals {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Signals")
    }
}

impl Signals {
    /// These signals; numbers that are no signals are left out.
    #[must_use]
    pub fn of(signals: &[libc::c_int]) -> Self {
        let mut set = MaybeUninit::zeroed();
        // SAFETY: the first call initializes the set, which the others only change; they ignore wrong numbers.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for &signal in signals {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            Self(set.assume_init())
        }
    }

    /// Blocks the signals in the calling thread, and in threads and children that it starts from now on.
    pub fn block(&self) {
        // It fails only for an operation that does not exist.
        let _ = self.change(libc::SIG_BLOCK);
    }

    /// Unblocks the signals in the calling thread, and in threads and children that it starts from now on.
    pub fn unblock(&self) {
        let _ = self.change(libc::SIG_UNBLOCK);
    }

    fn change(&self, operation: libc::c_int) -> io::Result<()> {
        // SAFETY: the set is initialized and outlives the call; the old mask is not requested.
        match unsafe { libc::pthread_sigmask(operation, &raw const self.0, null_mut()) } {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Waits for one of the signals, which the calling thread has blocked, and returns it.
    #[must_use]
    pub fn wait(&self) -> libc::c_int {
        let mut signal = 0;
        loop {
            // SAFETY: both point to values that outlive the call.
            if unsafe { libc::sigwait(&raw const self.0, &raw mut signal) } == 0 {
                return signal;
            }
        }
    }
}

/// Ignores a signal from now on.
pub fn ignore_signal(signal: libc::c_int) {
    // SAFETY: sets a signal's disposition to "ignored", which runs no code of this process.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}

/// Has the kernel end the process by SIGALRM after `limit`, rounded down to seconds.
pub fn alarm(limit: Duration) {
    // SAFETY: takes an integer; the signal has the default action, which runs no code of this process.
    unsafe { libc::alarm(u32::try_from(limit.as_secs()).unwrap_or(u32::MAX)) };
}

/// Ends the process at once, without running destructors or exit handlers.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: never returns and runs no code of this process.
    unsafe { libc::_exit(code) }
}

/// Configures glibc's allocator so that freed memory returns to the system, also while the memory of the process is
/// locked: glibc returns the middle of its heaps by `madvise`, which the kernel refuses for locked memory. So large
/// allocations are mappings of their own, and all others share one heap that can shrink. Called before any thread is
/// started. Does nothing with another C library.
pub fn return_freed_memory() {
    // glibc's own threshold grows with each large buffer that is freed, up to 32 MiB, unless it is set. What answers to a few clients
    // at once leave at the end of the heap is returned (docs/performance.md, "Memory").
    #[cfg(target_env = "gnu")]
    for (parameter, value) in
        [(libc::M_MMAP_THRESHOLD, 128 << 10), (libc::M_TRIM_THRESHOLD, 256 << 10), (libc::M_ARENA_MAX, 1)]
    {
        // SAFETY: sets a number of the allocator; an unsupported value changes nothing.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// Moves the calling thread, and those that it starts from now on, into a mount namespace of its own, out of which no
/// mount propagates; it ends with the last of them.
///
/// # Errors
/// The system error.
pub fn unshare_mounts() -> io::Result<()> {
    own_mount_namespace()?;
    Ok(mount_change(c"/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?)
}

fn own_mount_namespace() -> io::Result<()> {
    // SAFETY: descriptors stay shared; only what mounts the thread sees changes.
    Ok(unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?)
}

/// Gives the calling thread, which has just begun and has no descriptor of its own, a descriptor table of its own, with
/// `/dev/null` three times as its only content.
///
/// # Errors
/// The system error.
pub fn unshare_descriptors() -> io::Result<()> {
    const CLOSE_RANGE_UNSHARE: libc::c_int = 1 << 1;
    // Through syscall(2): not every C library has a function for it. SAFETY: takes no pointer. The descriptors that it
    // closes are copies in the new table of this thread; those of other threads stay open.
    let result = unsafe { libc::syscall(libc::SYS_close_range, 0, u32::MAX, CLOSE_RANGE_UNSHARE) };
    checked(result as libc::c_int)?;
    // So that no message on standard output or standard error can be written to a block device. They stay open for good.
    for expected in 0..3 {
        let null = File::options().read(true).write(true).open("/dev/null")?.into_raw_fd();
        if null != expected {
            return Err(io::Error::other("descriptors were opened at the same time"));
        }
    }
    Ok(())
}

/// Makes a child end with the thread that starts it. A Ctrl-C at the terminal does not reach it, so that the parent can
/// end it; `signals` are not blocked in it, even if they are in this thread.
pub fn bind_to_parent(command: &mut Command, signals: Signals) {
    let parent = std::process::id();
    command.process_group(0);
    let bind = move || {
        signals.change(libc::SIG_UNBLOCK)?;
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the child was bound.
        if getppid().is_some_and(|now| now.as_raw_nonzero().get().unsigned_abs() == parent) {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(libc::ESRCH))
        }
    };
    // SAFETY: between fork and exec the closure makes three system calls and allocates nothing.
    unsafe { command.pre_exec(bind) };
}

/// Gives a child no descriptor of this process but the standard ones, whoever has opened it. The descriptors of this program are closed
/// by the kernel anyway; those that its own parent has left open are, from Linux 5.11 on.
pub fn close_inherited(command: &mut Command) {
    const CLOSE_RANGE_CLOEXEC: libc::c_int = 1 << 2;
    const FIRST: libc::c_uint = 3;
    let close = || {
        // SAFETY: takes no pointer, and closes nothing before the child becomes another program. Older kernels refuse it.
        let _ =
            unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, CLOSE_RANGE_CLOEXEC) };
        Ok(())
    };
    // SAFETY: the closure makes one system call, which may be made between fork and exec, and allocates nothing.
    unsafe { command.pre_exec(close) };
}

/// Gives a child a mount namespace of its own.
pub fn unshare_mounts_of(command: &mut Command) {
    // SAFETY: the closure makes one system call, which may be made between fork and exec, and allocates nothing.
    unsafe { command.pre_exec(own_mount_namespace) };
}

/// All groups of the process at the other end of a Unix socket, at the time of its connection. Empty if the kernel does not
/// report them.
#[must_use]
pub fn peer_groups(socket: BorrowedFd<'_>) -> Vec<u32> {
    let mut groups = vec![0_u32; 256];
    let mut length = libc::socklen_t::try_from(size_of_val(groups.as_slice())).unwrap_or(0);
    // SAFETY: the kernel writes at most `length` bytes to the vector, which is that long and initialized.
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

/// The open descriptors among `count` from number 3 on, which a service manager has handed to this process, each with
/// its index. Returned once; empty from then on. From here on they are closed when a program is executed.
#[must_use]
pub fn inherited_descriptors(count: usize) -> Vec<(usize, OwnedFd)> {
    /// The number of the first.
    const FIRST: RawFd = 3;
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::SeqCst) {
        return Vec::new();
    }
    let owned = |(index, number): (usize, RawFd)| {
        // SAFETY: takes no pointer; for a number that is not open it fails. An open one is this process's to own by
        // the protocol, and this code, which runs once, is its only owner.
        unsafe {
            (libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) == 0)
                .then(|| (index, OwnedFd::from_raw_fd(number)))
        }
    };
    (FIRST..).take(count).enumerate().filter_map(owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn a_bound_child_receives_signals_that_its_parent_blocks() {
        let ended = std::thread::spawn(|| {
            let signals = Signals::of(&[libc::SIGTERM, libc::SIGINT]);
            signals.block();
            let mut command = Command::new("sleep");
            command.arg("100");
            bind_to_parent(&mut command, signals);
            let mut child = command.spawn().unwrap();
            let process = rustix::process::Pid::from_child(&child);
            rustix::process::kill_process(process, Signal::TERM).unwrap();
            child.wait().unwrap()
        });
        assert_eq!(ended.join().unwrap().signal(), Some(libc::SIGTERM));
    }

    #[test]
    fn a_bound_child_runs() {
        let mut command = Command::new("true");
        bind_to_parent(&mut command, Signals::of(&[]));
        assert!(command.status().unwrap().success());
    }

    #[test]
    fn a_blocked_signal_is_waited_for() {
        let received = std::thread::spawn(|| {
            let signals = Signals::of(&[libc::SIGUSR1]);
            signals.block();
            // SAFETY: the signal is blocked in this thread, to which alone it is sent.
            unsafe { libc::raise(libc::SIGUSR1) };
            signals.wait()
        });
        assert_eq!(received.join().unwrap(), libc::SIGUSR1);
    }
}
