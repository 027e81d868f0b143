//! Processes that the tests start: they die with us, and end when they are told to.
//!
//! Always true here: this is the only unsafe code of the tests.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

/// The kernel kills the process when the thread that starts it is gone, however that ends.
pub fn dies_with_us(command: &mut Command) {
    // SAFETY: between fork and exec only a system call is made that touches no memory of ours.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
}

/// The process begins in a mount namespace of its own, from which nothing comes back to ours.
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

/// Sends SIGTERM.
pub fn terminate(process: &Child) {
    send(process, libc::SIGTERM);
}

/// Stops the process where it is, until [`go_on`].
pub fn stop(process: &Child) {
    send(process, libc::SIGSTOP);
}

/// Lets a stopped process go on.
pub fn go_on(process: &Child) {
    send(process, libc::SIGCONT);
}

fn send(process: &Child, signal: i32) {
    // SAFETY: sends a signal to a child of ours that nobody has waited for, so the number is still its own.
    let sent = unsafe { libc::kill(process.id().cast_signed(), signal) };
    assert_eq!(sent, 0, "signal {signal} cannot be sent");
}
