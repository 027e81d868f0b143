//! Tests that start other processes.

mod support;

use cbd_pmem::Mapping;
use cbd_types::ErrorKind;
use std::path::Path;
use support::{MIB, create, directory, existing, refusal};

#[test]
fn a_region_in_use_by_another_process_is_busy() {
    let directory = directory();
    let path = directory.path().join("region");
    drop(Mapping::open(&path, &create(MIB)).expect("made"));
    let status = || {
        std::process::Command::new(std::env::current_exe().expect("known"))
            .args(["child_finds_the_region_busy", "--exact", "--ignored"])
            .env("CBD_TEST_REGION", &path)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .status()
            .expect("started")
    };
    assert!(!status().success(), "it is free");
    let _held = Mapping::open(&path, &existing()).expect("opened");
    assert!(status().success(), "this process has it");
}

#[test]
#[ignore = "run by its parent test"]
fn child_finds_the_region_busy() {
    let Some(path) = std::env::var_os("CBD_TEST_REGION") else { return };
    assert_eq!(refusal(Path::new(&path), &existing()).kind(), ErrorKind::Busy);
}

#[test]
fn objects_that_are_no_file_are_refused_by_type() {
    let directory = directory();
    let fifo = directory.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().expect("ran").success());
    let socket = directory.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("bound");
    for (path, word) in [
        (directory.path(), "directory"),
        (&fifo, "pipe"),
        (&socket, "socket"),
        (Path::new("/dev/null"), "character device"),
        (Path::new("/dev/zero"), "character device"),
    ] {
        let error = refusal(path, &create(MIB));
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.line().contains(word), "{error}");
    }
}
