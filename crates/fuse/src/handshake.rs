//! The negotiation with the kernel before anything is served: versions, capabilities, and the transport of
//! requests.
//!
//! Invariants: it ends within its timeout, with a result or an error.
//!
//! Elsewhere: the requested features ([`crate::filesystem`]).

use crate::call::{Call, Malformed};
use crate::door::{Connection, Door};
use crate::errors::system_error;
use crate::filesystem::{Answer, Filesystem};
use crate::life::Life;
use crate::system::Poller;
use crate::wire;
use crate::worker::Carrier;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Timeout of the kernel's first message, which it sends with the mount.
const PATIENCE: Duration = Duration::from_secs(5);

/// The result of the negotiation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Agreed {
    /// The kernel delivers requests through io_uring from here on: it offers this, and the file system
    /// requests it.
    pub over_ring: bool,
    /// On request, the kernel sends messages again that were read and not answered.
    pub resends: bool,
}

/// Answers the first message of a connection.
///
/// # Errors
/// When the kernel speaks another protocol, or sends no message.
pub fn agree(connection: &File, filesystem: &Filesystem, life: &Arc<Life>) -> Result<Agreed> {
    let failed = |error| system_error("the FUSE connection cannot be begun", &error);
    let poller = Poller::new().map_err(failed)?;
    let mut door = Door::new(connection.try_clone().map_err(failed)?, Arc::clone(life));
    poller.add(door.descriptor(), 0, false).map_err(failed)?;
    let end = Instant::now() + PATIENCE;
    while door.state() == Connection::Alive && Instant::now() < end {
        match door.receive(filesystem.name.as_bytes())? {
            None => poller.wait(PATIENCE.as_millis() as i32, |_| {}).map_err(failed)?,
            Some(Ok((header, call @ Call::Init { major, flags2, .. }))) => {
                match filesystem.answer(&header, call) {
                    Answer::Bytes(bytes) => door.answer(header.unique, 0, &bytes),
                    _ => {
                        door.answer(header.unique, libc::EPROTO, &[]);
                        let text = "this kernel's FUSE protocol is too old; it needs Linux 5.4";
                        return Err(Error::new(ErrorKind::Unsupported, text));
                    }
                }
                // A kernel of a later major version repeats INIT with the daemon's version.
                if major == wire::MAJOR {
                    return Ok(Agreed {
                        over_ring: filesystem.over_ring && flags2 & wire::OVER_IO_URING != 0,
                        resends: flags2 & wire::HAS_RESEND != 0,
                    });
                }
            }
            Some(Ok((header, _))) => door.answer(header.unique, libc::EIO, &[]),
            Some(Err(Malformed { unique: Some(unique) })) => door.answer(unique, libc::EIO, &[]),
            Some(Err(Malformed { unique: None })) => {}
        }
    }
    Err(Error::new(ErrorKind::TimedOut, "the kernel did not begin the FUSE connection"))
}
