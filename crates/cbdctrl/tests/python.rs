//! The Python package in `python/`: its types and operations are those of `docs/openapi.yaml`, it passes the type checker, and its
//! own tests pass with a daemon.
//!
//! Requires `CBD_SYSTEM_TESTS`: Debian's python3, python3-yaml and mypy.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::{Fixture, Ran, run_for, system_tests, text_of};

/// The folder of the package.
fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python").canonicalize().expect("the package")
}

/// Debian's Python, whose libraries those of its packages are; it leaves no file in the tree.
fn python(arguments: &[&str]) -> Command {
    let mut command = Command::new("/usr/bin/python3");
    command.args(arguments).current_dir(package()).env("PYTHONPATH", package().join("src"));
    command.env("PYTHONDONTWRITEBYTECODE", "1").env("PATH", "/usr/bin:/bin");
    command
}

#[track_caller]
fn succeeds(command: Command) -> Ran {
    let shown = format!("{command:?}");
    let ran = run_for(command, Duration::from_secs(120));
    assert_eq!(ran.code, 0, "{shown}\n{}\n{}", ran.stdout, ran.stderr);
    ran
}

#[test]
fn types_and_operations_are_those_of_the_control_interface() {
    if !system_tests("types_and_operations_are_those_of_the_control_interface") {
        return;
    }
    succeeds(python(&["generate.py", "--check"]));
    let version = succeeds(python(&["-c", "import cbd; print(cbd.__version__)"]));
    assert_eq!(version.stdout.trim(), env!("CARGO_PKG_VERSION"));
    let project = std::fs::read_to_string(package().join("pyproject.toml")).expect("the project");
    assert!(project.contains(&format!("version = \"{}\"", env!("CARGO_PKG_VERSION"))), "{project}");
}

#[test]
fn the_package_passes_the_type_checker() {
    if !system_tests("the_package_passes_the_type_checker") {
        return;
    }
    let cache = tempfile::tempdir().expect("a folder");
    succeeds(python(&["-m", "mypy", "--strict", "--cache-dir", &text_of(cache.path())]));
}

#[test]
fn answers_of_other_versions_and_of_no_daemon_are_understood_or_refused() {
    if !system_tests("answers_of_other_versions_and_of_no_daemon_are_understood_or_refused") {
        return;
    }
    succeeds(python(&["-m", "unittest", "tests/test_codec.py"]));
}

#[test]
fn every_operation_works_with_a_daemon_and_no_field_is_unknown() {
    if !system_tests("every_operation_works_with_a_daemon_and_no_field_is_unknown") {
        return;
    }
    let mut fixture = Fixture::new();
    fixture.start();
    let mut command = python(&["-m", "unittest", "tests/test_daemon.py"]);
    command.env("CBD_SOCKET", fixture.socket()).env("CBD_TEST_FOLDER", fixture.path("."));
    command.env("CBD_TEST_REGION", fixture.region()).env("CBD_TEST_PID", fixture.pid().to_string());
    succeeds(command);
}

/// The cells of the notebook, as a script, over a run with a load.
#[test]
#[ignore = "needs python3-matplotlib; cargo xtask nightly installs it and runs this test"]
fn the_notebook_plots_a_run() {
    let fixture = Fixture::with_region();
    fixture.start_backend(&fixture.disk("disk", 64 * support::MIB));
    let folder = std::env::var_os("CBD_NOTEBOOK_FOLDER").map_or_else(|| fixture.path("."), PathBuf::from);
    let picture = folder.join("run.png");
    let mut command = python(&["tests/run_notebook.py", "examples/plot-a-run.ipynb"]);
    command.env("CBD_SOCKET", fixture.socket()).env("CBD_RUN_SECONDS", "2").env("CBD_RUN_PICTURE", &picture);
    command.env("MPLCONFIGDIR", fixture.path("."));
    let client = &mut fixture.client();
    let stopped = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let data = vec![7; 64 << 10];
            for turn in 0_u64.. {
                let at = turn * 7 % 512 * (64 << 10);
                if stopped.load(std::sync::atomic::Ordering::Relaxed) {
                    return;
                }
                client.write(at, &data, false).expect("a write");
                client.read(at / 2, &mut [0; 4096]).expect("a read");
            }
        });
        let ran = run_for(command, Duration::from_secs(120));
        stopped.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(ran.code, 0, "{}\n{}", ran.stdout, ran.stderr);
    });
    let bytes = std::fs::read(&picture).expect("a picture");
    assert!(bytes.starts_with(b"\x89PNG") && bytes.len() > 10_000, "{} bytes", bytes.len());
}
