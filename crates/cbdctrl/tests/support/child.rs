//! Processes that the tests start: they die with the test process, and are ended by signals.
//!
//! Invariants: this is the only unsafe code of the tests.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

/// The kernel kills the process when the thread that starts it ends.
pub fn dies_with_the_test(command: &mut Command) {
    // SAFETY: between fork and exec only a system call is made that accesses no memory of this process.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
}

/// The process begins in a mount namespace of its own, whose mounts do not propagate to that of the tests.
pub fn mounts_alone(command: &mut Command) {
    // SAFETY: between fork and exec only system calls are made; the strings are constants.
    unsafe {
        command.pre_exec(|| {
            let none = c"none".as_ptr();
            let flags = libc::MS_REC | libc::MS_PRIVATE;
            let done = libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(none, c"/".as_ptr(), none, flags, std::ptr::null()) == 0;
            if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
}

/// Passes duplicates of these descriptors to the process, from number 3 on.
pub fn hands_over(command: &mut Command, descriptors: &[OwnedFd]) {
    /// Above every target number.
    const TARGETS_END: i32 = 400;
    let copies = descriptors.iter().map(|descriptor| {
        // SAFETY: takes no pointer; the descriptor that comes is new and has no other owner, or is -1.
        let copy = unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_DUPFD_CLOEXEC, TARGETS_END) };
        assert!(copy >= TARGETS_END, "{}", std::io::Error::last_os_error());
        // SAFETY: as above.
        unsafe { OwnedFd::from_raw_fd(copy) }
    });
    let copies: Vec<OwnedFd> = copies.collect();
    // SAFETY: between fork and exec only system calls are made, with descriptors that live as long as the command.
    unsafe {
        command.pre_exec(move || {
            for (number, copy) in (3..).zip(&copies) {
                if libc::dup2(copy.as_raw_fd(), number) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
}

/// The process begins with this umask.
pub fn has_umask(command: &mut Command, umask: u32) {
    // SAFETY: between fork and exec only a system call is made that touches no memory and cannot fail.
    unsafe {
        command.pre_exec(move || {
            libc::umask(umask);
            Ok(())
        });
    }
}

/// Changes the limit of threads of a process's user, above which the process can start no other. The process must be of
/// this user.
#[track_caller]
pub fn limit_threads(process: u32, user: u32, threads: u64) {
    limit(process, user, &format!("--nproc={threads}:"));
}

/// Changes the limit of descriptors of a process of this user.
#[track_caller]
pub fn limit_descriptors(process: u32, user: u32, descriptors: u64) {
    limit(process, user, &format!("--nofile={descriptors}:"));
}

/// Changes a soft limit as the user of the process, which needs no capability.
#[track_caller]
fn limit(process: u32, user: u32, what: &str) {
    let mut command = Command::new("prlimit");
    command.args(["--pid", &process.to_string(), what]).uid(user).gid(user);
    let ran = super::run_for(command, std::time::Duration::from_secs(40));
    assert_eq!(ran.code, 0, "the limit cannot be set: {ran:?}");
}

/// Sends SIGTERM.
pub fn terminate(process: &Child) {
    send(process, libc::SIGTERM);
}

/// Stops the process by SIGSTOP, until [`resume`].
pub fn stop(process: &Child) {
    send(process, libc::SIGSTOP);
}

/// Continues a stopped process.
pub fn resume(process: &Child) {
    send(process, libc::SIGCONT);
}

fn send(process: &Child, signal: i32) {
    signal_number(process.id().cast_signed(), signal);
}

/// Sends a signal to a process that is not a child, e.g. a store process. It uses the system call because not every
/// machine has the program `kill`.
#[track_caller]
pub fn signal(process: &str, signal: i32) {
    signal_number(process.parse().expect("the number of a process"), signal);
}

/// Kills a child of the test that was not waited for, and the processes that it has started, which may have ended already.
pub fn kill_with_children(process: u32) {
    let children = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children"));
    let children = children.unwrap_or_default();
    let all =
        std::iter::once(process.cast_signed()).chain(children.split(' ').filter_map(|id| id.parse().ok()));
    for process in all.filter(|process| *process > 0) {
        // SAFETY: takes no pointer; the processes were started by the test.
        unsafe { libc::kill(process, libc::SIGKILL) };
    }
}

#[track_caller]
fn signal_number(process: i32, signal: i32) {
    assert!(process > 0, "process {process} would be a group of processes");
    // SAFETY: takes no pointer; the callers pass a process that they started or found by a socket of theirs.
    let sent = unsafe { libc::kill(process, signal) };
    assert_eq!(sent, 0, "signal {signal} cannot be sent: {}", std::io::Error::last_os_error());
}
