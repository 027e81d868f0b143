//! libcbd in a Python program by ctypes: the tests of the package in `python/` pass with the installed library, and its structures
//! are those of the installed header.
//!
//! Requires `CBD_SYSTEM_TESTS`: Debian's python3 and a C compiler.

mod support;

use std::path::Path;
use std::process::Command;
use support::Place;

#[track_caller]
fn succeeds(command: &mut Command) {
    let ran = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{command:?}: {}\n{stdout}\n{stderr}", ran.status);
}

#[test]
fn the_tests_of_the_package_pass_with_the_installed_library() {
    if std::env::var_os("CBD_SYSTEM_TESTS").is_none_or(|value| value != "1") {
        eprintln!("python: not run, it needs python3 and cc; CBD_SYSTEM_TESTS=1 runs it");
        return;
    }
    let place = Place::new();
    let prefix = place.path("prefix");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().parent().unwrap();
    let mut install = Command::new(env!("CARGO"));
    succeeds(install.args(["xtask", "install", "--debug", "--prefix"]).arg(&prefix).current_dir(root));
    let mut command = Command::new("timeout");
    command.args(["120", "/usr/bin/python3", "-m", "unittest", "tests/test_device.py"]);
    command.current_dir(root.join("python")).env("PYTHONPATH", "src").env("PYTHONDONTWRITEBYTECODE", "1");
    command.env("CBD_LIBRARY", prefix.join("lib/libcbd.so.0")).env("CBD_TEST_FOLDER", place.path("."));
    succeeds(command.env("CBD_TEST_INCLUDE", prefix.join("include")));
}
