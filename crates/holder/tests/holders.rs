//! Who is found, who is not, and that nobody's open file is asked.
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
fn who_has_the_lock_is_found_and_who_merely_has_the_file_open_is_not() {
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
fn a_file_without_a_name_says_so() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().canonicalize().expect("there");
    assert_eq!(cbd_holder::name_now(file.as_fd()), Some(path));
    std::fs::remove_file(file.path()).expect("removed");
    let name = cbd_holder::name_now(file.as_fd()).expect("a name");
    assert!(name.to_string_lossy().ends_with(" (deleted)"), "{name:?}");
}

#[test]
fn an_open_file_that_does_not_answer_holds_up_no_search() {
    if std::env::var_os("CBD_SYSTEM_TESTS").is_none() {
        return println!("not run: it mounts a file system; CBD_SYSTEM_TESTS=1 runs it, as root");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let silent = silent::Silent::over(folder.path());
    // Only a name for it: opened without a question.
    let open = File::options().read(true).custom_flags(libc::O_PATH).open(folder.path()).expect("its root");
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let file = tempfile::tempfile().expect("a file");
        let again = File::options().write(true).open(cbd_holder::path_of(file.as_fd())).expect("it opens");
        lock(&again);
        let found = cbd_holder::of_lock(file.as_fd());
        let device = cbd_holder::of_block_device((1, 4711));
        tell.send((found, device)).expect("somebody waits");
    });
    let said = told.recv_timeout(Duration::from_secs(30));
    drop((open, silent));
    let (found, device) = said.expect("an answer");
    assert!(this_process(found) && device.is_none());
}
