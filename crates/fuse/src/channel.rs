//! A channel of the connection: an open `/dev/fuse`, from which a thread reads messages and to which it writes
//! the replies.
//!
//! Invariants: one read takes one whole message, and one write gives one whole reply. A write is executed in
//! the buffer that it was received into, without a copy, unless other requests are in flight.
//!
//! Elsewhere: the meaning of a message ([`crate::call`]), and when to read ([`crate::worker`]).

use crate::call::{self, Call, Malformed};
use crate::filesystem::TRANSFER_BYTES_MAX;
use crate::wire::{HEAD, InHeader, OutHeader};
use cbd_export::system_error;
use cbd_types::{AlignedBuffer, Result, SpareBuffers};
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use zerocopy::IntoBytes;

/// Bytes of buffers that a channel keeps for later requests.
const SPARE_BYTES: usize = 32 * TRANSFER_BYTES_MAX;
/// Data up to this size is copied out of its receive buffer when the write may be in flight for long.
const SMALL_BYTES_MAX: usize = 128 << 10;

/// The result of one read: no message, one message, or a malformed one.
type Received = Option<std::result::Result<(InHeader, Call), Malformed>>;

/// A channel, and the buffers of the thread that it belongs to.
pub struct Channel {
    file: File,
    spare: SpareBuffers,
    receive: AlignedBuffer,
    is_connected: bool,
}

impl Channel {
    /// Takes a non-blocking channel.
    pub fn new(file: File) -> Self {
        Self {
            file,
            spare: SpareBuffers::new(SPARE_BYTES),
            receive: AlignedBuffer::default(),
            is_connected: true,
        }
    }

    /// The descriptor to wait on.
    pub fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Whether the connection can still take replies. Once it was unmounted or aborted, requests in flight are
    /// completed without a reply.
    pub const fn is_connected(&self) -> bool {
        self.is_connected
    }

    /// Reads one message, if one is queued.
    ///
    /// # Errors
    /// When the channel cannot be read.
    pub fn receive(&mut self, name: &[u8]) -> Result<Received> {
        if self.receive.is_empty() {
            self.receive = self.spare.take(TRANSFER_BYTES_MAX);
        }
        let mut head = [0; HEAD];
        let mut parts = [IoSliceMut::new(&mut head), IoSliceMut::new(&mut self.receive)];
        let received = match (&self.file).read_vectored(&mut parts) {
            Ok(received) => received,
            Err(error) => return self.no_message(&error).map(|()| None),
        };
        if received == 0 {
            self.is_connected = false;
            return Ok(None);
        }
        let head = head.get(..received).unwrap_or(&head);
        let payload = self.receive.get(..received.saturating_sub(HEAD)).unwrap_or_default();
        Ok(Some(call::decode(head, payload, name)))
    }

    fn no_message(&mut self, error: &io::Error) -> Result<()> {
        match error.raw_os_error() {
            // Another thread read the message first, or the kernel withdrew it.
            Some(libc::EAGAIN | libc::EINTR | libc::ENOENT) => Ok(()),
            Some(libc::ENODEV | libc::ECONNABORTED) => {
                self.is_connected = false;
                Ok(())
            }
            _ => Err(system_error("/dev/fuse cannot be read", error)),
        }
    }

    /// Replies to the message with the number `unique`: an errno, 0 for success, and bytes.
    pub fn reply(&mut self, unique: u64, errno: i32, bytes: &[u8]) {
        // Replies also after the connection has reported its end: requests that were read before are
        // answered. A closed connection refuses the reply itself.
        let len = size_of::<OutHeader>() + bytes.len();
        let header = OutHeader { len: len as u32, error: -errno, unique };
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(bytes)];
        // The kernel takes a reply completely or not at all.
        let Err(error) = (&self.file).write_vectored(&parts) else { return };
        match error.raw_os_error() {
            // The requester no longer waits.
            Some(libc::ENOENT) => {}
            Some(libc::ENODEV | libc::ECONNABORTED | libc::EPERM) => self.is_connected = false,
            // An error reply, so that the requester does not wait forever for the refused one.
            _ if !bytes.is_empty() => self.reply(unique, libc::EIO, &[]),
            _ => {}
        }
    }

    /// Replies with a part of a buffer, and frees the buffer.
    pub fn reply_with(&mut self, unique: u64, buffer: AlignedBuffer, part: Range<usize>) {
        match buffer.get(part) {
            Some(bytes) => self.reply(unique, 0, bytes),
            None => self.reply(unique, libc::EIO, &[]),
        }
        self.free(buffer);
    }

    /// A buffer of `length` bytes.
    pub fn buffer(&mut self, length: usize) -> AlignedBuffer {
        self.spare.take(length)
    }

    /// The first `length` bytes of the data of the received write. With `copies`, a small write is copied:
    /// it may stay in flight for long, and would hold a large buffer meanwhile.
    pub fn take_data(&mut self, length: usize, copies: bool) -> AlignedBuffer {
        if copies
            && length <= SMALL_BYTES_MAX
            && let Some(data) = self.receive.get(..length)
        {
            let mut buffer = self.spare.take(length);
            buffer.copy_from_slice(data);
            return buffer;
        }
        let mut buffer = std::mem::take(&mut self.receive);
        buffer.resize(length);
        buffer
    }

    /// Frees a buffer, or keeps it for later requests.
    pub fn free(&mut self, buffer: AlignedBuffer) {
        self.spare.give(buffer);
    }

    /// Whether memory is kept for later messages.
    pub fn holds_memory(&self) -> bool {
        !self.receive.is_empty() || self.spare.held() > 0
    }

    /// Frees the memory that is kept for later messages.
    pub fn trim(&mut self) {
        self.receive = AlignedBuffer::default();
        self.spare.trim();
    }
}
