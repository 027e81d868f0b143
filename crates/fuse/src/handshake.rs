//! The negotiation with the kernel before anything is served: versions and capabilities.
//!
//! Invariants: it ends within its timeout, with a result or an error.
//!
//! Elsewhere: the requested features ([`crate::filesystem`]).

use crate::call::{Call, Malformed};
use crate::channel::Channel;
use crate::filesystem::{Answer, Filesystem};
use crate::wire;
use cbd_export::system_error;
use cbd_sys::event::Poller;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::File;
use std::time::{Duration, Instant};

/// Timeout of the kernel's first message, which it sends with the mount.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Answers the first message of a connection. Returns whether the kernel, on request, sends messages again
/// that were read and not answered.
///
/// # Errors
/// When the kernel speaks another protocol, or sends no message.
pub fn negotiate(channel: &File, filesystem: &Filesystem) -> Result<bool> {
    let failed = |error| system_error("the FUSE connection cannot be begun", &error);
    let poller = Poller::new().map_err(failed)?;
    let mut channel = Channel::new(channel.try_clone().map_err(failed)?);
    poller.add(channel.descriptor(), 0, false).map_err(failed)?;
    let end = Instant::now() + TIMEOUT;
    while channel.is_connected() && Instant::now() < end {
        match channel.receive(filesystem.name.as_bytes())? {
            None => poller.wait(TIMEOUT.as_millis() as i32, |_| {}).map_err(failed)?,
            Some(Ok((header, call @ Call::Init { major, flags2, .. }))) => {
                match filesystem.answer(&header, call) {
                    Answer::Bytes(bytes) => channel.reply(header.unique, 0, &bytes),
                    _ => {
                        channel.reply(header.unique, libc::EPROTO, &[]);
                        let text = "this kernel's FUSE protocol is too old; it needs Linux 5.4";
                        return Err(Error::new(ErrorKind::Unsupported, text));
                    }
                }
                // A kernel of a later major version repeats INIT with the daemon's version.
                if major == wire::MAJOR {
                    return Ok(flags2 & wire::HAS_RESEND != 0);
                }
            }
            Some(Ok((header, _))) => channel.reply(header.unique, libc::EIO, &[]),
            Some(Err(Malformed { unique: Some(unique) })) => channel.reply(unique, libc::EIO, &[]),
            Some(Err(Malformed { unique: None })) => {}
        }
    }
    Err(Error::new(ErrorKind::TimedOut, "the kernel did not begin the FUSE connection"))
}
