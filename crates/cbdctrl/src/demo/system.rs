//! The few calls to the system that the demonstration needs and the standard library does not have.
//!
//! Always true here: each function is a thin, safe layer over one call; what it means stands with its caller.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Signals that end the demonstration in order.
pub const ENDING_SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

fn checked(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn path_text(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

/// Gives this thread, and those it starts, mounts of their own, which end with the last of them.
pub fn own_mounts() -> io::Result<()> {
    // SAFETY: takes no pointers; it affects which mounts this thread sees and nothing else.
    checked(unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: the target is a string with its closing zero; the other pointers may be null for a change of propagation.
    checked(unsafe {
        libc::mount(std::ptr::null(), c"/".as_ptr(), std::ptr::null(), flags, std::ptr::null())
    })
}

/// Takes a mount away; `detach` at once, whoever uses it.
pub fn unmount(path: &Path, detach: bool) -> io::Result<()> {
    let path = path_text(path)?;
    let flags = libc::UMOUNT_NOFOLLOW | if detach { libc::MNT_DETACH } else { 0 };
    // SAFETY: the path is a string with its closing zero that outlives the call.
    checked(unsafe { libc::umount2(path.as_ptr(), flags) })
}

/// Bytes that whoever asks may still write to the file system at `path`.
pub fn room(path: &Path) -> io::Result<u64> {
    let path = path_text(path)?;
    let mut room = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: the path is a string with its closing zero, and `room` is writable memory of the right type.
    checked(unsafe { libc::statvfs(path.as_ptr(), room.as_mut_ptr()) })?;
    // SAFETY: all zeroes is a valid value, and the call has filled it.
    let room = unsafe { room.assume_init() };
    Ok(room.f_bavail.saturating_mul(room.f_frsize))
}

/// The user that this process acts as.
pub fn user() -> u32 {
    // SAFETY: the call takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// Sends a signal to a child that has not been waited for.
pub fn signal(process: u32, signal: libc::c_int) {
    if let Ok(process) = libc::pid_t::try_from(process) {
        // SAFETY: takes no pointers; the caller says that the process is its own child.
        unsafe { libc::kill(process, signal) };
    }
}

fn ending_set() -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `set` is writable memory of the right type, which the first call fills before the others read it; the
    // signals are valid numbers.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in ENDING_SIGNALS {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        set.assume_init()
    }
}

/// Keeps the ending signals from this thread and those that it starts, so that [`next_ending_signal`] gets them.
pub fn hold_ending_signals() {
    let set = ending_set();
    // SAFETY: `set` is filled and outlives the call; the old mask is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
}

/// Waits for an ending signal.
pub fn next_ending_signal() -> libc::c_int {
    let set = ending_set();
    let mut signal = 0;
    loop {
        // SAFETY: both point to values that outlive the call.
        if unsafe { libc::sigwait(&raw const set, &raw mut signal) } == 0 {
            return signal;
        }
    }
}

/// Makes a child die with the thread that starts it. A Ctrl-C at the terminal does not reach it, so that whoever started it
/// ends it in order; to the ending signals it listens, although this thread may hold them.
pub fn bind_to_parent(command: &mut Command) {
    let parent = std::process::id();
    command.process_group(0);
    let held = ending_set();
    let bind = move || {
        // SAFETY: `held` is filled and outlives the call; the old mask is not asked for.
        checked(unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const held, std::ptr::null_mut()) })?;
        // SAFETY: neither call takes pointers, and both may be made between fork and exec.
        let (bound, now) = unsafe { (libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL), libc::getppid()) };
        checked(bound)?;
        // The parent may have died before it was bound.
        if u32::try_from(now).is_ok_and(|now| now == parent) {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(libc::ESRCH))
        }
    };
    // SAFETY: between fork and exec the closure makes three system calls and allocates nothing.
    unsafe { command.pre_exec(bind) };
}

/// Lets a child have mounts of its own, too.
///
/// Who serves a file system's device must never be in a mount namespace in which that file system is mounted: if it is killed
/// as the last process there, the kernel unmounts before it closes the server's files, waits for answers of the very process
/// that is ending, and never ends.
pub fn apart_from_mounts(command: &mut Command) {
    // SAFETY: takes no pointers, and may be called between fork and exec; the closure allocates nothing.
    unsafe { command.pre_exec(|| checked(libc::unshare(libc::CLONE_NEWNS))) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_has_some_room() {
        assert!(room(Path::new("/")).unwrap() < u64::MAX);
        assert!(room(Path::new("/nonexistent/x")).is_err());
    }

    #[test]
    fn a_bound_child_hears_signals_that_its_parent_holds() {
        let ended = std::thread::spawn(|| {
            hold_ending_signals();
            let mut command = Command::new("sleep");
            command.arg("100");
            bind_to_parent(&mut command);
            let mut child = command.spawn().unwrap();
            signal(child.id(), libc::SIGTERM);
            child.wait().unwrap()
        });
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&ended.join().unwrap()),
            Some(libc::SIGTERM)
        );
    }

    #[test]
    fn a_bound_child_runs() {
        let mut command = Command::new("true");
        bind_to_parent(&mut command);
        assert!(command.status().unwrap().success());
    }
}
