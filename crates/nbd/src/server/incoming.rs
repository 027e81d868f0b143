//! The state of receiving the stream of requests.

use super::slots::Kind;
use cbd_types::{AlignedBuffer, ByteRange, Error, Operation};

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
