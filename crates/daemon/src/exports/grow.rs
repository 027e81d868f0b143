//! Exports whose device has grown: what their clients see of it, and when.
//!
//! Invariants: the device reaches to its new end before a client can learn of it; an export that cannot tell its clients goes on with
//! the former size for them.

use super::{Export, OpenServer};
use cbd_types::Result;
use std::path::Path;

impl Export {
    /// Serves the device to its new end, `size` bytes, and tells its clients. `None` if they see that now, otherwise when. `is_larger`
    /// is false if the device has not grown since the last call, which may have failed.
    ///
    /// # Errors
    /// When the kernel refuses the new size, or does not answer; clients see the former size then.
    pub fn grow(&self, size: u64, is_larger: bool) -> Result<Option<String>> {
        match &self.open {
            OpenServer::FuseLoop(export) => {
                if export.size_seen() != Some(size) {
                    export.grow(size)?;
                }
                Ok(None)
            }
            OpenServer::Ublk(export) => {
                let is_seen = kernel_size(export.disk_path()) == Some(size) || export.grow(size)?;
                Ok((!is_seen).then(|| {
                    "its users see it when the device is started again (dev-stop, dev-start), since the ublk driver of this kernel cannot \
                     change the size of a disk; Linux 6.16 or later can"
                        .to_owned()
                }))
            }
            OpenServer::Nbd(server) => Ok(match server.connections() {
                0 => None,
                _ if !is_larger => None,
                connections => Some(format!(
                    "clients see it when they connect again, since NBD cannot tell it to the {connections} that are connected"
                )),
            }),
            OpenServer::VhostUser(server) => {
                // Without the message the front end reads the size only when it connects.
                let is_told = server.grow(size);
                Ok((is_larger && !is_told && server.is_connected()).then(|| {
                    "the virtual machine sees it when it is started again, or its front end connects again, since the front end takes \
                     no messages of the device"
                        .to_owned()
                }))
            }
        }
    }

    /// Logs that users of a kernel device that was taken over see a smaller size than `size`, its own.
    pub(super) fn warn_of_former_size(&self, size: u64) {
        let seen = match &self.open {
            OpenServer::FuseLoop(export) => export.size_seen(),
            OpenServer::Ublk(export) => kernel_size(export.disk_path()),
            OpenServer::Nbd(_) | OpenServer::VhostUser(_) => None,
        };
        if let Some(seen) = seen.filter(|seen| *seen < size) {
            tracing::warn!(
                "{}: its users see {seen} bytes, and it has grown to {size}; repeat backend-grow, or start it again when it is not in use",
                self.name
            );
        }
    }
}

/// The size in bytes of the disk with the node `path`, as the kernel tells its users.
fn kernel_size(path: &Path) -> Option<u64> {
    let attribute = Path::new("/sys/class/block").join(path.file_name()?).join("size");
    // In units of 512 bytes, whatever the sector of the disk is.
    std::fs::read_to_string(attribute).ok()?.trim().parse::<u64>().ok()?.checked_mul(512)
}
