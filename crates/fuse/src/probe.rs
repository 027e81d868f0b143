//! Probes by trying whether this machine permits creating a block device.
//!
//! Invariants: the probe leaves nothing behind, even after a crash: the mount lives in a private namespace of
//! a thread, invisible to other processes; the loop device is opened and not bound.

use crate::connection;
use crate::loop_device::{open_control, open_or_make_node};
use cbd_types::{ErrorKind, Result};
use std::os::fd::AsFd;
use std::path::PathBuf;

/// Tries whether a FUSE file system can be mounted and a loop device is available.
///
/// # Errors
/// The missing requirement, in one sentence.
pub fn probe() -> std::result::Result<(), String> {
    let tried = std::thread::Builder::new().name("cbd-fuse-probe".into()).spawn(|| {
        try_mount()?;
        try_loop()
    });
    let tried = tried.map_err(|error| format!("no thread to try a mount in: {error}"))?;
    match tried.join() {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) if error.kind() == ErrorKind::Permission => {
            Err(format!("a block device needs root (CAP_SYS_ADMIN): {error}"))
        }
        Ok(Err(error)) => Err(error.line()),
        Err(_) => Err("trying a mount panicked".into()),
    }
}

/// The namespace ends with the thread, and the mount with the namespace.
fn try_mount() -> Result<()> {
    let channel = connection::open_channel()?;
    cbd_sys::process::unshare_mounts()
        .map_err(|error| cbd_export::system_error("no mount namespace to try a mount in", &error))?;
    connection::mount(&channel, &std::env::temp_dir())
}

fn try_loop() -> Result<()> {
    let control = open_control()?;
    let no_loop_device = |error| cbd_export::system_error("the kernel has no free loop device", &error);
    let number = cbd_sys::loop_device::free(control.as_fd()).map_err(no_loop_device)?;
    let path = PathBuf::from(format!("/dev/loop{number}"));
    match open_or_make_node(&path, number) {
        // Another process has just taken or removed it: loop devices are available.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::EBUSY)) => Ok(()),
        Err(error) => Err(cbd_export::system_error(path.display(), &error)),
        Ok(_) => Ok(()),
    }
}
