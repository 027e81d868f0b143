//! The connection to the kernel: opened, mounted, and opened again for each thread.
//!
//! Always true here: every descriptor closes when a program is executed, so the connection ends with the daemon and no
//! child keeps it; a mount of ours has the type and source by which [`crate::mounts`] knows it.

use crate::errors::system_error;
use crate::filesystem::TRANSFER_BYTES_MAX;
use crate::mounts::{KIND, SOURCE};
use crate::system;
use cbd_types::Result;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// A door to the kernel that belongs to no connection yet.
pub fn open() -> Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/fuse").map_err(
        |error| {
            system_error(
                "/dev/fuse (a FUSE file system needs root and the kernel's fuse module: modprobe fuse)",
                &error,
            )
        },
    )
}

/// Mounts a file system at `target` whose server is `connection`.
pub fn mount(connection: &File, target: &Path) -> Result<()> {
    let data = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,max_read={TRANSFER_BYTES_MAX}",
        connection.as_raw_fd()
    );
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC | libc::MS_NOATIME;
    system::mount(SOURCE, target, KIND, flags, &data).map_err(|error| {
        system_error(format!("a FUSE file system cannot be mounted at {}", target.display()), &error)
    })
}

/// One more door to the same connection, for one more thread.
pub fn another(connection: &File) -> Result<File> {
    let door = open()?;
    system::clone_connection(door.as_fd(), connection.as_fd())
        .map_err(|error| system_error("the FUSE connection cannot be opened for one more thread", &error))?;
    Ok(door)
}
