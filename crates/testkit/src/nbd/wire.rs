//! The client's socket: sends whole requests and receives replies in pieces; both end after the timeout.
//!
//! Invariants: if a request cannot be sent because the server waits until its replies are read, the caller gets
//! [`Sent::ReadFirst`]. The client and the server therefore never wait for each other.

use cbd_export::wake::{Interest, WaitSet};
use cbd_types::{Error, ErrorKind, Result};
use socket2::Socket;
use std::io::{self, IoSlice, Read};
use std::os::fd::AsRawFd;
use std::time::Duration;

/// Size of the receive buffer in bytes.
const CAPACITY: usize = 128 << 10;

/// Outcome of an attempt to send.
pub(super) enum Sent {
    /// All bytes are sent.
    All,
    /// The socket's send buffer is full and a reply can be received; this many bytes are sent.
    ReadFirst(usize),
}

pub(super) struct Wire {
    socket: Socket,
    timeout: Duration,
    waits: WaitSet,
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Wire {
    /// `socket` blocks, and its reads end after `timeout`.
    pub(super) fn new(socket: Socket, timeout: Duration) -> Self {
        let mut waits = WaitSet::new();
        waits.add(socket.as_raw_fd(), Interest::ReadWrite);
        Self { socket, timeout, waits, bytes: vec![0; CAPACITY].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Sends `head` and `body`, except for the first `sent` bytes of both together.
    pub(super) fn send(&mut self, head: &[u8], body: &[u8], mut sent: usize) -> Result<Sent> {
        while sent < head.len() + body.len() {
            let (rest_of_head, rest_of_body) = match sent.checked_sub(head.len()) {
                None => (&head[sent..], body),
                Some(sent) => (&[][..], &body[sent..]),
            };
            let slices = [IoSlice::new(rest_of_head), IoSlice::new(rest_of_body)];
            match self.socket.send_vectored_with_flags(&slices, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.waits.wait(Some(self.timeout))? == 0 {
                        return Err(late());
                    }
                    if self.waits.readable(0) {
                        return Ok(Sent::ReadFirst(sent));
                    }
                }
                Err(error) => return Err(lost(&error)),
            }
        }
        Ok(Sent::All)
    }

    /// Waits for the next `N` bytes and returns them.
    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Fills `into`, and waits for the missing bytes.
    pub(super) fn fill(&mut self, into: &mut [u8]) -> Result<()> {
        let at_hand = into.len().min(self.end - self.start);
        into[..at_hand].copy_from_slice(&self.bytes[self.start..self.start + at_hand]);
        self.start += at_hand;
        let mut into = &mut into[at_hand..];
        while !into.is_empty() {
            // Long payloads are received directly into `into`.
            if into.len() >= CAPACITY {
                let count = receive(&self.socket, into)?;
                into = &mut into[count..];
            } else {
                let count = receive(&self.socket, &mut self.bytes)?;
                let piece = count.min(into.len());
                into[..piece].copy_from_slice(&self.bytes[..piece]);
                (self.start, self.end) = (piece, count);
                into = &mut into[piece..];
            }
        }
        Ok(())
    }

    /// Sends the last bytes of the connection without waiting; errors are ignored.
    pub(super) fn send_last(&self, bytes: &[u8]) {
        let _ = self.socket.send_with_flags(bytes, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
    }
}

fn receive(mut socket: &Socket, into: &mut [u8]) -> Result<usize> {
    loop {
        match socket.read(into) {
            Ok(0) => return Err(Error::new(ErrorKind::Stopped, "the NBD server closed the connection")),
            Ok(count) => return Ok(count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return Err(late());
            }
            Err(error) => return Err(lost(&error)),
        }
    }
}

fn late() -> Error {
    Error::new(ErrorKind::TimedOut, "the NBD server did not answer in time")
}

fn lost(error: &io::Error) -> Error {
    Error::new(ErrorKind::Stopped, format!("the connection to the NBD server failed: {error}"))
}
