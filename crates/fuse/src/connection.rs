//! The connection to the kernel: opened, mounted, and opened again for each thread.
//!
//! Invariants: every descriptor closes when a program is executed, so the connection ends with the daemon and
//! no child process inherits it, unless its channels were handed to a descriptor store ([`crate::session`]).
//! A mount made here has the type and source by which [`crate::mounts`] recognizes it.

use crate::filesystem::{TRANSFER_BYTES_MAX, TRANSFER_PAGES_MAX};
use crate::mounts::{KIND, SOURCE};
use crate::wire::{self, OutHeader};
use cbd_export::system_error;
use cbd_types::Result;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::MountFlags;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use zerocopy::IntoBytes;

/// Opens a channel (`/dev/fuse`) that belongs to no connection yet.
pub fn open_channel() -> Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/fuse").map_err(
        |error| {
            system_error(
                "/dev/fuse (a FUSE file system needs root and the kernel's fuse module: modprobe fuse)",
                &error,
            )
        },
    )
}

/// The kernel's limit of the pages of one message (Linux 6.13). A connection keeps the value of the moment at
/// which it is mounted.
const PAGES_LIMIT: &str = "/proc/sys/fs/fuse/max_pages_limit";

/// Raises the kernel's limit so that the largest write fits even from unaligned memory. Where the process
/// lacks the permission, or the kernel has no such limit, a large write from unaligned memory is cut.
fn raise_pages_limit() {
    let limit = std::fs::read_to_string(PAGES_LIMIT).ok().and_then(|text| text.trim().parse::<u16>().ok());
    if limit.is_some_and(|limit| limit < TRANSFER_PAGES_MAX) {
        // Everything else works without it.
        let _ = std::fs::write(PAGES_LIMIT, TRANSFER_PAGES_MAX.to_string());
    }
}

/// Mounts a file system at `target` whose messages come through `channel`.
pub fn mount(channel: &File, target: &Path) -> Result<()> {
    raise_pages_limit();
    let data = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions,max_read={TRANSFER_BYTES_MAX}",
        channel.as_raw_fd()
    );
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
    let data = CString::new(data).unwrap_or_default();
    rustix::mount::mount(SOURCE, target, KIND, flags, &*data).map_err(|error| {
        system_error(format!("a FUSE file system cannot be mounted at {}", target.display()), &error.into())
    })
}

/// Opens one more channel to the same connection, for one more thread.
pub fn clone_channel(channel: &File) -> Result<File> {
    let clone = open_channel()?;
    cbd_sys::ioctl::clone_fuse_channel(clone.as_fd(), channel.as_fd())
        .map_err(|error| system_error("the FUSE connection cannot be opened for one more thread", &error))?;
    Ok(clone)
}

/// Requests the kernel to send again every message that was read through any channel of the connection and
/// not answered. Call it only while no thread reads from the connection and no thread works on a message that
/// was read: such requests would be executed twice at the same time.
pub fn resend(channel: &File) -> Result<()> {
    let message = OutHeader { len: size_of::<OutHeader>() as u32, error: wire::NOTIFY_RESEND, unique: 0 };
    (&*channel).write_all(message.as_bytes()).map_err(|error| {
        system_error(
            "the kernel does not send the requests in flight of a predecessor again (it needs Linux 6.9)",
            &error,
        )
    })
}

/// Whether the connection of a channel has ended: unmounted, or aborted.
pub fn has_ended(channel: &impl AsFd) -> Result<bool> {
    let mut polled = [PollFd::new(channel, PollFlags::empty())];
    poll(&mut polled, Some(&Timespec::default()))
        .map(|_| !polled[0].revents().is_empty())
        .map_err(|error| system_error("the state of a FUSE connection cannot be queried", &error.into()))
}
