//! Properties of loop devices: whether one is bound, and whether it carries the project's mark.

use crate::loop_device::{MARK, read_setting};
use crate::system;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

/// N of exactly `/dev/loopN`.
pub fn loop_number(path: &Path) -> Option<u32> {
    cbd_export::link::number(path, "/dev/loop")
}

/// Whether a loop device has a backing file.
pub fn is_bound(number: u32) -> bool {
    read_setting(number, "loop/backing_file").is_some()
}

/// Whether a loop device carries the project's mark: it belongs to a CBD daemon, which may run in another
/// namespace.
pub fn is_marked(number: u32) -> bool {
    let marked = |device: File| {
        let info = system::loop_status(device.as_fd()).ok()?;
        Some(system::loop_name(&info).starts_with(MARK.as_bytes()))
    };
    File::open(format!("/dev/loop{number}")).ok().and_then(marked).unwrap_or(false)
}
