//! A process and a mount namespace for each test that mounts, with an end in time.
//!
//! Invariants: nothing of such a test is left when its process ends. A process that waits for a file system of
//! its own cannot be killed, so a watchdog in it aborts the FUSE connections first; the parent kills what is left.

use super::{child, system_tests, wait};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const CHILD_VARIABLE: &str = "CBD_E2E_INSIDE";
/// Shows that the test was found in its process.
const RAN_FILE: &str = "ran";
/// A tmpfs in the folder of a sandbox, removed with it.
pub const MEMORY: &str = "memory";

/// Runs `body` alone, with a folder that is removed afterwards. `test` is the test's own name, by which it is found
/// again.
pub fn in_sandbox(test: &str, timeout: Duration, body: impl FnOnce(&Path)) {
    if !system_tests(test) {
        return;
    }
    if let Some(folder) = std::env::var_os(CHILD_VARIABLE) {
        let folder = PathBuf::from(folder);
        std::fs::write(folder.join(RAN_FILE), "").expect("a file");
        watch(&folder, timeout);
        let memory = folder.join(MEMORY);
        std::fs::create_dir(&memory).expect("a folder");
        super::tool("mount", &["-t", "tmpfs", "none", &super::text_of(&memory)]);
        body(&folder);
        return;
    }
    // One after the other: they share the loop devices and the processors.
    let _alone = cbd_testkit::loop_devices::alone();
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command.args(["--exact", test, "--nocapture"]).env(CHILD_VARIABLE, folder.path()).stdin(Stdio::null());
    child::dies_with_the_test(&mut command);
    child::mounts_alone(&mut command);
    let mut process = command.spawn().expect("the test's process (it needs root)");
    let Some(status) = wait(&mut process, timeout + Duration::from_secs(15)) else {
        let _ = process.kill();
        panic!("{test} took too long and was killed");
    };
    assert!(status.success(), "{test} failed in its process: {status}");
    // A process without a test of that name succeeds, too.
    assert!(folder.path().join(RAN_FILE).exists(), "there is no test of the name {test}: it was not run");
}

fn watch(folder: &Path, timeout: Duration) {
    let folder = folder.to_owned();
    std::thread::spawn(move || {
        std::thread::sleep(timeout);
        let aborted = cbd_fuse::abort_connections(&folder);
        eprintln!("the test takes more than {timeout:?}; its FUSE connections are aborted: {aborted:?}");
        std::thread::sleep(Duration::from_secs(2));
        std::process::abort();
    });
}

/// A file system that is mounted until this is dropped.
#[derive(Debug)]
pub struct Mounted {
    at: PathBuf,
    mounted: bool,
}

impl Mounted {
    /// Mounts `device` (or a plain image, through an autoclear loop device) at a new folder.
    #[track_caller]
    pub fn new(device: &str, at: &Path, options: &str) -> Self {
        std::fs::create_dir_all(at).expect("a folder");
        super::tool("mount", &["-o", options, device, &super::text_of(at)]);
        Self { at: at.to_owned(), mounted: true }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.at.join(name)
    }

    /// Something else has unmounted it.
    pub fn was_unmounted(mut self) {
        self.mounted = false;
    }

    #[track_caller]
    pub fn unmount(mut self) {
        self.mounted = false;
        super::tool("umount", &[&super::text_of(&self.at)]);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.mounted {
            let _ = Command::new("umount").arg("-l").arg(&self.at).status();
        }
    }
}
