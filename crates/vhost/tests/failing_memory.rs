//! A region and a guest's memory in one process, both truncated: a fault in the region is an error of the load, a fault
//! in the guest's memory stops the guest's ring, and any other fault goes to the signal handler that was installed
//! before.

mod common;

use cbd_pmem::{Mapping, OpenOptions};
use cbd_types::Pmem;
use common::guest::*;
use common::{Served, memory, serve};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

const REMAINING: u64 = 8192;

/// A region of which only the first two pages are left.
fn truncated_region() -> (Mapping, tempfile::TempDir) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("region");
    let options = OpenOptions { size: Some(1 << 20), create: true, ..OpenOptions::default() };
    let mapping = Mapping::open(&path, &options).expect("a region");
    mapping.store(0, &[7; 4096]);
    mapping.fence();
    File::options().write(true).open(&path).and_then(|file| file.set_len(REMAINING)).expect("truncated");
    (mapping, directory)
}

/// The offset at which a load of the region's lost bytes fails.
fn fails_at(mapping: &Mapping) -> u64 {
    mapping.load(REMAINING, &mut [0; 4096]).expect_err("it is truncated").at
}

/// Truncates the memory of a guest while the server polls its ring.
fn lose_a_guest(served: &Served) {
    served.events.lock().expect("no thread panicked with the lock").clear();
    let (link, ram, rings) = start_guest(&served.path, TYPICAL, 1);
    ram.file.set_len(0).expect("truncated");
    rings[0].kick();
    let events = served.reports("ring 0: ");
    assert!(events.contains("the guest's memory at 0x100000 was removed"), "{events}");
    drop(link);
    served.reports("ended");
}

#[test]
fn a_fault_in_a_region_is_a_media_error_while_guests_lose_their_memory() {
    let ((mapping, _directory), served) = (truncated_region(), serve(memory(1 << 20)));
    let spared = serve(memory(1 << 20));
    let (_link, ram, mut rings) = start_guest(&spared.path, TYPICAL, 1);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                assert_eq!(fails_at(&mapping), REMAINING);
            }
        });
        for _ in 0..20 {
            lose_a_guest(&served);
            assert_eq!(rings[0].execute(&ram, DO_FLUSH, 0, &[]), 0);
        }
        over.store(true, Ordering::Relaxed);
    });
    let mut left = [0; 4096];
    assert_eq!(mapping.load(0, &mut left), Ok(()));
    assert_eq!(left, [7; 4096], "a fault of a guest puts no zeroes into a region");
}

/// Set for the tests that end their process; without it, a run of the ignored tests skips them.
const CHILD: &str = "CBD_TEST_CHILD";

/// Runs this test binary again, only for the test `name`, in a process of its own.
fn in_a_child(name: &str) -> ExitStatus {
    Command::new(std::env::current_exe().expect("known"))
        .env(CHILD, "1")
        .args([name, "--exact", "--ignored", "--test-threads=1"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .expect("started")
}

#[test]
fn a_fault_in_other_memory_goes_to_the_handler_that_was_installed_before() {
    assert_eq!(in_a_child("child_with_a_handler_of_its_own").code(), Some(42));
}

#[test]
fn a_fault_in_other_memory_ends_a_process_without_a_handler() {
    assert_eq!(in_a_child("child_without_a_handler").signal(), Some(libc::SIGBUS));
}

extern "C" fn leave(_signal: i32) {
    // SAFETY: allowed in a signal handler.
    unsafe { libc::_exit(42) };
}

#[test]
#[ignore = "run by its parent test"]
fn child_with_a_handler_of_its_own() {
    touch_all_three(leave as *const () as libc::sighandler_t);
}

#[test]
#[ignore = "run by its parent test"]
fn child_without_a_handler() {
    touch_all_three(libc::SIG_DFL);
}

/// Touches truncated memory of a region, of a guest, and then of neither, with the handler `before` installed.
fn touch_all_three(before: libc::sighandler_t) {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    // SAFETY: the handler only ends the process.
    unsafe { libc::signal(libc::SIGBUS, before) };
    let ((mapping, _directory), served) = (truncated_region(), serve(memory(1 << 20)));
    for _ in 0..2 {
        assert_eq!(fails_at(&mapping), REMAINING);
        lose_a_guest(&served);
    }
    let file = memory_file(4096);
    // SAFETY: a new mapping; the test reads it after its page is gone, in a process of its own.
    unsafe {
        let flags = (libc::PROT_READ, libc::MAP_SHARED);
        let base = libc::mmap(std::ptr::null_mut(), 4096, flags.0, flags.1, file.as_raw_fd(), 0);
        assert_ne!(base, libc::MAP_FAILED);
        file.set_len(0).expect("truncated");
        std::hint::black_box(base.cast::<u8>().read_volatile());
    }
    std::process::exit(1);
}
