//! Serving a connection that the caller has set up.
//!
//! Elsewhere: opening and mounting it ([`crate::export`] does both for itself).

use crate::filesystem::Filesystem;
use crate::shared::Shared;
use crate::worker::Worker;
use cbd_export::BlockDevice;
use cbd_types::Result;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Serves `device` as the file `name` on a FUSE connection that the caller passes in, as `fusermount3` does,
/// on the calling thread, until the connection ends. `channel` must be non-blocking, return one whole message
/// for each read, and accept one whole reply for each write, as `/dev/fuse` does.
///
/// # Errors
/// When the device provides no queue, or a system call fails that serving needs.
pub fn serve_connection(
    device: &dyn BlockDevice,
    channel: OwnedFd,
    name: &str,
    read_only: bool,
) -> Result<()> {
    let filesystem = Filesystem::new(name.to_owned(), device.geometry(), read_only);
    let (queue, shared) = (device.open_queue()?, Arc::new(Shared::new()?));
    Worker::new(Arc::new(filesystem), File::from(channel), queue, shared)?.serve()
}
