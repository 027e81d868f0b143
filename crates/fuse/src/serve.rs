//! Serving a connection that the caller has set up.
//!
//! Elsewhere: opening and mounting it ([`crate::export`] does both for itself).

use crate::door;
use crate::errors::system_error;
use crate::filesystem::Filesystem;
use crate::life::Life;
use crate::worker::Worker;
use cbd_export::BlockDevice;
use cbd_types::Result;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Serves `device` as the file `name` on a FUSE connection that the caller passes in, as `fusermount3` does,
/// on the calling thread, until the connection ends. `connection` must be non-blocking, return one whole
/// message for each read, and accept one whole reply for each write, as `/dev/fuse` does.
///
/// # Errors
/// When the device provides no queue, or a system call fails that serving needs.
pub fn serve_connection(
    device: &dyn BlockDevice,
    connection: OwnedFd,
    name: &str,
    read_only: bool,
) -> Result<()> {
    let (stop, stopper) =
        std::io::pipe().map_err(|error| system_error("no pipe for the FUSE connection", &error))?;
    let worker = Worker {
        filesystem: Arc::new(Filesystem {
            name: name.to_owned(),
            geometry: device.geometry(),
            read_only,
            over_ring: false,
        }),
        queue: device.open_queue()?,
        stop: Arc::new(stop),
        life: Arc::new(Life::new(stopper)?),
    };
    door::serve(worker, File::from(connection))
}
