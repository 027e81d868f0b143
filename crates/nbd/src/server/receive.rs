//! Receives from the socket: heads of requests in batches, long payloads directly into their buffers.
//!
//! Invariants: at most [`CAPACITY`] bytes are buffered; receiving never waits.

use crate::protocol::RequestHeader;
use cbd_types::{Error, ErrorKind, Result};
use socket2::Socket;
use std::io::{self, IoSliceMut, Read};

/// Size of the receive buffer in bytes: enough for more than sixteen writes of 4 KiB.
const CAPACITY: usize = 128 << 10;

/// Outcome of an attempt to receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Received {
    /// Number of bytes received.
    Bytes(usize),
    /// No bytes are available yet.
    Nothing,
    /// The client shut down its sending half.
    End,
}

/// Bytes that were received and not yet processed.
pub(super) struct Receiver {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Receiver {
    pub(super) fn new() -> Self {
        Self { bytes: vec![0; CAPACITY].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Number of buffered bytes.
    pub(super) const fn len(&self) -> usize {
        self.end - self.start
    }

    /// The head of the next request, if it is complete; it remains in the buffer.
    ///
    /// # Errors
    /// The bytes are not a request: the position of the next request is unknown.
    pub(super) fn peek(&self) -> Result<Option<RequestHeader>> {
        let Some(bytes) = self.bytes[self.start..self.end].first_chunk() else { return Ok(None) };
        match RequestHeader::decode(bytes) {
            Some(header) => Ok(Some(header)),
            None => Err(Error::new(ErrorKind::InvalidArgument, "an NBD request begins with the wrong magic")),
        }
    }

    /// Discards up to `count` buffered bytes and returns their number.
    pub(super) fn consume(&mut self, count: usize) -> usize {
        let count = count.min(self.len());
        self.start += count;
        count
    }

    /// Copies buffered bytes to `into` and returns their number.
    pub(super) fn take(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.len());
        into[..count].copy_from_slice(&self.bytes[self.start..self.start + count]);
        self.start += count;
        count
    }

    /// Receives, first into `direct`, then into the buffer. `Bytes` counts both; the number of bytes in `direct` is the
    /// smaller of its length and the count. The buffer must be empty unless `direct` is empty.
    ///
    /// # Errors
    /// When the socket fails.
    pub(super) fn receive(&mut self, socket: &Socket, direct: &mut [u8]) -> io::Result<Received> {
        debug_assert!(direct.is_empty() || self.len() == 0, "buffered bytes come before new ones");
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        if self.end == self.bytes.len() {
            // With a full buffer, a result of 0 bytes would look like the end of the stream.
            return Ok(Received::Nothing);
        }
        let mut socket = socket;
        let outcome = if direct.is_empty() {
            socket.read(&mut self.bytes[self.end..])
        } else {
            socket.read_vectored(&mut [IoSliceMut::new(direct), IoSliceMut::new(&mut self.bytes)])
        };
        match outcome {
            Ok(0) => Ok(Received::End),
            Ok(count) => {
                self.end += count.saturating_sub(direct.len());
                Ok(Received::Bytes(count))
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Ok(Received::Nothing)
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Type};
    use std::io::Write;

    #[test]
    fn a_payload_is_received_directly_and_what_follows_is_buffered() {
        let (ours, mut theirs) = Socket::pair(Domain::UNIX, Type::STREAM, None).expect("a pair");
        ours.set_nonblocking(true).expect("it can be set");
        let mut receiver = Receiver::new();
        assert_eq!(receiver.receive(&ours, &mut []).expect("open"), Received::Nothing);

        let header = RequestHeader { flags: 0, command: 1, cookie: 9, offset: 512, length: 512 };
        theirs.write_all(&[7; 100]).expect("room");
        theirs.write_all(&header.encode()).expect("room");
        theirs.write_all(&[1, 2, 3]).expect("room");
        let mut payload = [0; 100];
        assert_eq!(receiver.receive(&ours, &mut payload).expect("open"), Received::Bytes(131));
        assert_eq!(payload, [7; 100]);
        assert_eq!(receiver.peek().expect("a request"), Some(header));
        assert_eq!(receiver.consume(RequestHeader::SIZE), 28);
        let mut rest = [0; 10];
        assert_eq!(receiver.take(&mut rest), 3);
        assert_eq!(rest[..3], [1, 2, 3]);

        drop(theirs);
        assert_eq!(receiver.receive(&ours, &mut []).expect("closed in order"), Received::End);
    }

    #[test]
    fn half_a_head_is_not_a_request_yet() {
        let (ours, mut theirs) = Socket::pair(Domain::UNIX, Type::STREAM, None).expect("a pair");
        let mut receiver = Receiver::new();
        let bytes = RequestHeader { flags: 0, command: 3, cookie: 1, offset: 0, length: 0 }.encode();
        for byte in bytes {
            assert_eq!(receiver.peek().expect("nothing wrong yet"), None);
            theirs.write_all(&[byte]).expect("room");
            receiver.receive(&ours, &mut []).expect("open");
        }
        assert!(receiver.peek().expect("a request").is_some());
    }

    #[test]
    fn bytes_that_are_no_request_are_an_error() {
        let (ours, mut theirs) = Socket::pair(Domain::UNIX, Type::STREAM, None).expect("a pair");
        let mut receiver = Receiver::new();
        theirs.write_all(&[0xFF; 28]).expect("room");
        receiver.receive(&ours, &mut []).expect("open");
        assert_eq!(receiver.peek().expect_err("no request").kind(), ErrorKind::InvalidArgument);
    }
}
