//! Loop devices of tests, and a lock among the tests of all programs that bind them.
//!
//! The kernel gives a new loop device the lowest free number. A test that checks whether a device has gone must therefore run
//! while no other test binds one: it could find the device of the other test under the number of its own.
//!
//! Invariants: the lock is a file in the directory of temporary files, so it holds between the programs of one run of tests. It
//! ends with the process that holds it.

use std::env::temp_dir;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Time in which a detached loop device must have released its file.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

/// A loop device over a file, detached when it is dropped.
#[derive(Debug)]
pub struct LoopDevice {
    /// `/dev/loopN`.
    pub path: String,
    file: String,
    _lock: File,
}

impl LoopDevice {
    /// Binds a free loop device to `file`, an absolute path.
    ///
    /// # Panics
    /// When `losetup` cannot do it.
    #[must_use]
    pub fn over(file: &str) -> Self {
        let lock = with_others();
        let output =
            Command::new("losetup").args(["--find", "--show", file]).output().expect("losetup is there");
        assert!(output.status.success(), "{output:?}");
        let path = String::from_utf8(output.stdout).expect("a name").trim().to_owned();
        Self { path, file: file.to_owned(), _lock: lock }
    }

    /// Detaches it, and waits until the kernel has released the file.
    ///
    /// # Panics
    /// When the file is not released within 10 seconds.
    pub fn detach(self) {
        let (path, file) = (self.path.clone(), self.file.clone());
        drop(self);
        wait_for_release(Path::new(&path), Path::new(&file));
    }
}

/// Waits until the detached loop device `/dev/loopN` has released `file`. The kernel does so when the last descriptor of the
/// device is closed, and a daemon of another test that looks at all loop devices may hold one for a moment.
///
/// # Panics
/// When the file is not released within 10 seconds.
pub fn wait_for_release(device: &Path, file: &Path) {
    let name = device.file_name().expect("a device").display();
    let setting = format!("/sys/block/{name}/loop/backing_file");
    let begin = Instant::now();
    while fs::read_to_string(&setting).is_ok_and(|bound| Path::new(bound.trim_end()) == file) {
        assert!(begin.elapsed() < RELEASE_TIMEOUT, "{} is still bound to {name}", file.display());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Detaches it when its last user closes it.
impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.path]).status();
    }
}

/// While it exists, [`alone`] waits: for a test that binds a loop device, and checks nothing about devices that were released.
///
/// # Panics
/// When the file cannot be created or locked.
#[must_use]
pub fn with_others() -> File {
    let lock = open();
    lock.lock_shared().expect("the lock of the loop devices");
    lock
}

/// While it exists, no other test that takes the lock runs.
///
/// # Panics
/// When the file cannot be created or locked.
#[must_use]
pub fn alone() -> File {
    let lock = open();
    lock.lock().expect("the lock of the loop devices");
    lock
}

fn open() -> File {
    File::create(temp_dir().join("cbd-loop-devices.lock"))
        .expect("a file in the directory of temporary files")
}
