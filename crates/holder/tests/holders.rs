//! Searches find the holder of a lock, do not find other processes, and query no open file.
#![allow(missing_docs, unsafe_code)]

#[allow(dead_code)]
#[path = "../../daemon/tests/manager/silent.rs"]
mod silent;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Locks all of a file for this open description alone.
fn lock(file: &File) {
    // SAFETY: all zeroes are a valid value of this structure of plain numbers.
    let mut whole: libc::flock = unsafe { std::mem::zeroed() };
    whole.l_type = libc::F_WRLCK as libc::c_short;
    // SAFETY: the descriptor is open, and `whole` is what the command reads.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const whole) }, 0);
}

fn this_process(found: Option<String>) -> bool {
    let own = format!("process {} (", std::process::id());
    found.is_some_and(|found| found.starts_with(&own) && found.ends_with(", this one)"))
}

#[test]
fn the_holder_of_a_lock_is_found_and_a_process_that_only_has_the_file_open_is_not() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    assert_eq!(cbd_holder::of_lock(file.as_fd()), None);
    let again = File::options().write(true).open(file.path()).expect("it opens");
    lock(&again);
    assert!(this_process(cbd_holder::of_lock(file.as_fd())));
    assert!(this_process(cbd_holder::of_file(&file.path().canonicalize().expect("there"))));
}

#[test]
fn the_lock_of_one_file_is_not_taken_for_that_of_another() {
    let (file, other) = (tempfile::tempfile().expect("a file"), tempfile::tempfile().expect("a file"));
    lock(&other);
    assert_eq!(cbd_holder::of_lock(file.as_fd()), None);
}

#[test]
fn a_file_without_a_name_is_reported_as_deleted() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().canonicalize().expect("there");
    assert_eq!(cbd_holder::name_now(file.as_fd()), Some(path));
    std::fs::remove_file(file.path()).expect("removed");
    let name = cbd_holder::name_now(file.as_fd()).expect("a name");
    assert!(name.to_string_lossy().ends_with(" (deleted)"), "{name:?}");
}

#[test]
fn an_open_file_that_hangs_does_not_block_a_search() {
    if std::env::var_os("CBD_SYSTEM_TESTS").is_none() {
        return println!("not run: it mounts a file system; CBD_SYSTEM_TESTS=1 runs it, as root");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let silent = silent::Silent::over(folder.path());
    // `O_PATH`: opened without a query.
    let open = File::options().read(true).custom_flags(libc::O_PATH).open(folder.path()).expect("its root");
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let file = tempfile::tempfile().expect("a file");
        let again = File::options().write(true).open(cbd_holder::path_of(file.as_fd())).expect("it opens");
        lock(&again);
        let found = cbd_holder::of_lock(file.as_fd());
        let device = cbd_holder::of_block_device((1, 4711));
        tell.send((found, device)).expect("the test waits");
    });
    let said = told.recv_timeout(Duration::from_secs(30));
    drop((open, silent));
    let (found, device) = said.expect("an answer");
    assert!(this_process(found) && device.is_none());
}

/// The child of the next test: it locks the file, ends its first thread, and waits.
fn hold_without_a_first_thread(path: &str) {
    extern "C" fn end_this_thread(_: libc::c_int) {
        // SAFETY: it ends the calling thread alone, and returns to nothing.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    let file = File::options().write(true).open(path).expect("it opens");
    lock(&file);
    // SAFETY: the handler makes one system call. The first thread of a process has its number, and waits for this one.
    unsafe {
        let handler = end_this_thread as extern "C" fn(libc::c_int);
        libc::signal(libc::SIGUSR1, handler as libc::sighandler_t);
        let process = libc::getpid();
        assert_eq!(libc::syscall(libc::SYS_tgkill, process, process, libc::SIGUSR1), 0);
    }
    loop {
        std::thread::park();
    }
}

#[test]
fn a_process_whose_first_thread_has_ended_is_named() {
    const TEST: &str = "a_process_whose_first_thread_has_ended_is_named";
    if let Ok(path) = std::env::var("CBD_HOLDER_TEST_FILE") {
        return hold_without_a_first_thread(&path);
    }
    let file = tempfile::NamedTempFile::new().expect("a file");
    let mut child = std::process::Command::new(std::env::current_exe().expect("known"))
        .args(["--exact", TEST, "--test-threads=2"])
        .env("CBD_HOLDER_TEST_FILE", file.path())
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("a child");
    let status = || std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while !status().contains("State:\tZ") {
        assert!(std::time::Instant::now() < end, "its first thread does not end: {}", status());
        std::thread::sleep(Duration::from_millis(10));
    }
    let of_lock = cbd_holder::of_lock(file.as_fd());
    // This process has closed it.
    let path = file.into_temp_path();
    let of_file = cbd_holder::of_file(&path.canonicalize().expect("there"));
    child.kill().expect("it can be killed");
    child.wait().expect("it is ours");
    let expected = format!("process {} (", child.id());
    for found in [of_lock, of_file] {
        assert!(
            found.as_ref().is_some_and(|found| found.starts_with(&expected)),
            "{found:?}, not {expected}"
        );
    }
}
