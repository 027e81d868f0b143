//! The state of receiving the stream of requests.

use super::receive::{Received, Receiver};
use super::slots::Kind;
use crate::protocol::RequestHeader;
use cbd_types::{AlignedBuffer, ByteRange, Error, Operation};
use socket2::Socket;
use std::{io, mem};

/// Position in the stream of requests.
pub(super) enum Incoming {
    /// Before the head of a request.
    Head,
    /// In the payload of a write.
    Payload(Payload),
    /// Before the next part of a write, which waits for memory.
    Part,
    /// In the payload of a write that was refused.
    Refused { cookie: u64, left: usize, error: Error },
}

/// A payload that is being received.
pub(super) struct Payload {
    pub(super) cookie: u64,
    pub(super) kind: Kind,
    pub(super) task: (Operation, ByteRange, bool),
    pub(super) buffer: AlignedBuffer,
    pub(super) filled: usize,
}

impl Incoming {
    /// Whether bytes must be received before processing continues; `buffered` were.
    pub(super) const fn wants_bytes(&self, buffered: usize) -> bool {
        match self {
            Self::Head => buffered < RequestHeader::SIZE,
            Self::Payload(_) | Self::Refused { .. } => true,
            Self::Part => false,
        }
    }

    /// Receives bytes: those of a payload into its buffer, others into that of `receiver`.
    pub(super) fn receive(&mut self, receiver: &mut Receiver, socket: &Socket) -> io::Result<Received> {
        match self {
            Self::Payload(payload) => payload.receive(receiver, socket),
            Self::Head | Self::Part | Self::Refused { .. } => receiver.receive(socket, &mut []),
        }
    }

    /// The payload, if it is complete; then the head of a request follows.
    pub(super) fn take_complete(&mut self) -> Option<Payload> {
        match mem::replace(self, Self::Head) {
            Self::Payload(payload) if payload.filled == payload.buffer.len() => Some(payload),
            other => {
                *self = other;
                None
            }
        }
    }
}

impl Payload {
    /// Receives bytes into the rest of the buffer, and further ones into that of `receiver`.
    fn receive(&mut self, receiver: &mut Receiver, socket: &Socket) -> io::Result<Received> {
        let rest = &mut self.buffer[self.filled..];
        let room = rest.len();
        let received = receiver.receive(socket, rest);
        if let Ok(Received::Bytes(count)) = received {
            self.filled += count.min(room);
        }
        received
    }
}
