//! A lock among the tests of all programs that bind loop devices.
//!
//! The kernel gives a new loop device the lowest free number. A test that checks whether a device has gone must therefore run
//! while no other test binds one: it could find the device of the other test under the number of its own.
//!
//! Invariants: the lock is a file in the directory of temporary files, so it holds between the programs of one run of tests. It
//! ends with the process that holds it.

use std::env::temp_dir;
use std::fs::File;

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
