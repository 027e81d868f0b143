//! The channel on which a device sends messages to its front end: here, that its configuration space has changed.
//!
//! The front end passes the channel in a message (`SET_BACKEND_REQ_FD`). The `vhost` crate handles that message, but cannot send the
//! one that is needed here, and does not return the descriptor. So the descriptor is copied from the message before the crate
//! receives it.
//!
//! Invariants: nothing here waits for the front end.

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use vhost::vhost_user::message::{BackendReq, FrontendReq};

/// Bytes of the header of a message: the request, flags and the length of the body, 32 bits each.
const HEADER: usize = 12;
/// The flags of a message without a reply: the version of the protocol.
const VERSION: u32 = 1;

/// The channel of one front end.
#[derive(Debug)]
pub(crate) struct BackChannel(OwnedFd);

impl BackChannel {
    /// The channel in the next message on `front_end`, which stays to be received; `None` if the message passes none.
    pub(crate) fn peek(front_end: impl AsFd) -> Option<Self> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut descriptors = RecvAncillaryBuffer::new(&mut space);
        let mut header = [0; HEADER];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received =
            recvmsg(front_end, &mut [IoSliceMut::new(&mut header)], &mut descriptors, flags).ok()?;
        let request = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]);
        if received.bytes < size_of::<u32>() || request != u32::from(FrontendReq::SET_BACKEND_REQ_FD) {
            return None;
        }
        // All others are closed with the buffer.
        descriptors.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next().map(Self),
            _ => None,
        })
    }

    /// Tells the front end that the configuration space has changed; false if it has no room for the message, or has closed the
    /// channel.
    pub(crate) fn tell_config_changed(&self) -> bool {
        let words = [u32::from(BackendReq::CONFIG_CHANGE_MSG), VERSION, 0];
        let mut message = [0; HEADER];
        message.chunks_exact_mut(4).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_ne_bytes()));
        let sent = send(&self.0, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        sent == Ok(HEADER)
    }
}
