//! The encoding of replies, and the queue in which they wait for the socket.
//!
//! Invariants: a reply is sent completely and in the order of the queue; sending never waits. The queue itself has no
//! bound; the number of requests has one (`connection`), and each has one reply, which may consist of parts (`parts`).

use super::memory::cost_of;
use super::status::ContextStatus;
use crate::protocol::{SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk, wire_error_of};
use cbd_types::{AlignedBuffer, Error};
use socket2::Socket;
use std::collections::VecDeque;
use std::io::{self, IoSlice};

/// Replies that are sent with one system call.
const BATCH: usize = 32;
/// Longest error text that is sent, in bytes.
const TEXT_MAX: usize = 512;
/// Longest head: a chunk's 20 bytes and an 8-byte offset.
const HEAD_MAX: usize = 28;

/// One reply.
#[derive(Debug)]
pub(super) struct Reply {
    head: [u8; HEAD_MAX],
    head_length: usize,
    body: Body,
    sent: usize,
    /// Bytes counted for it besides its buffer.
    cost: usize,
    /// Whether it completes the reply to its request.
    ends: bool,
}

/// A reply that was sent.
#[derive(Debug)]
pub(super) struct Sent {
    /// Whether the reply to its request is complete.
    pub(super) ends: bool,
    /// Bytes that were counted for it.
    pub(super) cost: usize,
    /// Its buffer.
    pub(super) buffer: Option<AlignedBuffer>,
}

#[derive(Debug)]
enum Body {
    None,
    Data(AlignedBuffer),
    Bytes(Vec<u8>),
}

impl Body {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::None => &[],
            Self::Data(buffer) => buffer,
            Self::Bytes(bytes) => bytes,
        }
    }
}

impl Reply {
    const fn empty() -> Self {
        Self { head: [0; HEAD_MAX], head_length: 0, body: Body::None, sent: 0, cost: 0, ends: true }
    }

    fn simple(cookie: u64, error: u32) -> Self {
        let mut reply = Self::empty();
        reply.put(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        reply.put(&error.to_be_bytes());
        reply.put(&cookie.to_be_bytes());
        reply
    }

    /// A chunk whose payload is `front` and then `body` bytes, which the caller sets.
    fn chunk(cookie: u64, flags: u16, kind: u16, front: &[u8], body: usize) -> Self {
        // Bounded by the longest payload of a request, which fits in `u32`.
        let length = (front.len() + body) as u32;
        let mut reply = Self::empty();
        reply.put(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
        reply.put(&flags.to_be_bytes());
        reply.put(&kind.to_be_bytes());
        reply.put(&cookie.to_be_bytes());
        reply.put(&length.to_be_bytes());
        reply.put(front);
        reply
    }

    fn put(&mut self, bytes: &[u8]) {
        self.head[self.head_length..self.head_length + bytes.len()].copy_from_slice(bytes);
        self.head_length += bytes.len();
    }

    /// Success of a request without data in its reply.
    pub(super) fn done(cookie: u64) -> Self {
        Self::simple(cookie, 0)
    }

    /// Data that was read from `offset`.
    pub(super) fn data(cookie: u64, structured: bool, offset: u64, buffer: AlignedBuffer) -> Self {
        let mut reply = if structured {
            Self::chunk(cookie, chunk::FLAG_DONE, chunk::OFFSET_DATA, &offset.to_be_bytes(), buffer.len())
        } else {
            Self::simple(cookie, 0)
        };
        reply.body = Body::Data(buffer);
        reply
    }

    /// A part of a read's data, as a chunk.
    pub(super) fn chunk_of_data(cookie: u64, offset: u64, buffer: AlignedBuffer, last: bool) -> Self {
        let flags = if last { chunk::FLAG_DONE } else { 0 };
        let mut reply = Self::chunk(cookie, flags, chunk::OFFSET_DATA, &offset.to_be_bytes(), buffer.len());
        reply.body = Body::Data(buffer);
        reply
    }

    /// The first part of the data read from `offset`, `length` bytes in all; the other parts follow without a head.
    pub(super) fn head_of_data(
        cookie: u64,
        structured: bool,
        offset: u64,
        length: usize,
        buffer: AlignedBuffer,
    ) -> Self {
        let mut reply = if structured {
            Self::chunk(cookie, chunk::FLAG_DONE, chunk::OFFSET_DATA, &offset.to_be_bytes(), length)
        } else {
            Self::simple(cookie, 0)
        };
        reply.body = Body::Data(buffer);
        reply
    }

    /// A further part of the data, without a head.
    pub(super) fn continued_data(buffer: AlignedBuffer) -> Self {
        Self { body: Body::Data(buffer), ..Self::empty() }
    }

    /// The same reply, which further parts follow.
    pub(super) fn continued(self) -> Self {
        Self { ends: false, ..self }
    }

    /// Whether it holds a buffer.
    pub(super) const fn has_buffer(&self) -> bool {
        matches!(self.body, Body::Data(_))
    }

    /// Block status: a chunk for each context. `contexts` is not empty. `cost` bytes are counted for it until it is
    /// sent.
    pub(super) fn status(cookie: u64, contexts: &[ContextStatus], cost: usize) -> Self {
        let mut bytes = Vec::new();
        for (place, ContextStatus { context, descriptors }) in contexts.iter().enumerate() {
            let last = place + 1 == contexts.len();
            let head = Self::chunk(
                cookie,
                if last { chunk::FLAG_DONE } else { 0 },
                chunk::BLOCK_STATUS,
                &context.to_be_bytes(),
                descriptors.len() * 8,
            );
            bytes.extend_from_slice(&head.head[..head.head_length]);
            for (length, flags) in descriptors {
                bytes.extend_from_slice(&length.to_be_bytes());
                bytes.extend_from_slice(&flags.to_be_bytes());
            }
        }
        Self { body: Body::Bytes(bytes), cost, ..Self::empty() }
    }

    /// Failure of a request; a structured reply contains the text of the error.
    pub(super) fn error(cookie: u64, structured: bool, error: &Error) -> Self {
        let number = wire_error_of(error);
        if !structured {
            return Self::simple(cookie, number);
        }
        let mut text = error.line();
        let end = (0..=TEXT_MAX.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
        let mut front = [0; 6];
        front[..4].copy_from_slice(&number.to_be_bytes());
        // At most TEXT_MAX, which fits in `u16`.
        front[4..].copy_from_slice(&(text.len() as u16).to_be_bytes());
        let mut reply = Self::chunk(cookie, chunk::FLAG_DONE, chunk::ERROR, &front, text.len());
        reply.body = Body::Bytes(text.into_bytes());
        reply
    }

    fn len(&self) -> usize {
        self.head_length + self.body.bytes().len()
    }

    /// The bytes that are not sent yet, in up to two slices.
    fn rest(&self) -> (&[u8], &[u8]) {
        let head = &self.head[..self.head_length];
        let body = self.body.bytes();
        match self.sent.checked_sub(head.len()) {
            None => (&head[self.sent..], body),
            Some(sent) => (&[], &body[sent..]),
        }
    }
}

/// Replies that wait for the socket, in order.
#[derive(Default)]
pub(super) struct Output {
    queue: VecDeque<Reply>,
    /// Replies that wait until all parts of a read are sent.
    held: VecDeque<Reply>,
    waiting: usize,
}

impl Output {
    pub(super) fn push(&mut self, reply: Reply) {
        self.waiting += reply.len();
        self.queue.push_back(reply);
    }

    /// As [`push`](Self::push), but not before [`release`](Self::release).
    pub(super) fn hold(&mut self, reply: Reply) {
        self.held.push_back(reply);
    }

    /// Queues the replies that were held.
    pub(super) fn release(&mut self) {
        while let Some(reply) = self.held.pop_front() {
            self.push(reply);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Number of queued bytes.
    pub(super) const fn waiting(&self) -> usize {
        self.waiting
    }

    /// Sends as much as the socket accepts without waiting. `sent` is called for each reply that was sent.
    ///
    /// # Errors
    /// When the socket fails; not when it is full.
    pub(super) fn send(&mut self, socket: &Socket, mut sent: impl FnMut(Sent)) -> io::Result<()> {
        while !self.queue.is_empty() {
            let written = match self.send_some(socket) {
                Ok(written) => written,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            self.advance(written, &mut sent);
        }
        Ok(())
    }

    fn send_some(&self, socket: &Socket) -> io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); 2 * BATCH];
        let mut count = 0;
        for reply in self.queue.iter().take(BATCH) {
            let (head, body) = reply.rest();
            for piece in [head, body] {
                if !piece.is_empty() {
                    slices[count] = IoSlice::new(piece);
                    count += 1;
                }
            }
        }
        // A closed connection is an error of this call, not a SIGPIPE for the process.
        match &slices[..count] {
            [one] => socket.send_with_flags(one, libc::MSG_NOSIGNAL),
            many => socket.send_vectored_with_flags(many, libc::MSG_NOSIGNAL),
        }
    }

    fn advance(&mut self, mut written: usize, sent: &mut impl FnMut(Sent)) {
        self.waiting -= written;
        while let Some(reply) = self.queue.front_mut() {
            let left = reply.len() - reply.sent;
            if written < left {
                reply.sent += written;
                return;
            }
            written -= left;
            let Some(Reply { body, cost, ends, .. }) = self.queue.pop_front() else { return };
            sent(match body {
                Body::Data(buffer) => Sent { ends, cost: cost + cost_of(buffer.len()), buffer: Some(buffer) },
                Body::None | Body::Bytes(_) => Sent { ends, cost, buffer: None },
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_types::ErrorKind;
    use socket2::{Domain, Type};
    use std::io::Read;

    #[test]
    fn replies_arrive_in_order_and_whole_over_a_socket_that_is_often_full() {
        let (ours, theirs) = Socket::pair(Domain::UNIX, Type::STREAM, None).expect("a pair");
        ours.set_nonblocking(true).expect("it can be set");
        let mut output = Output::default();
        let mut expected = Vec::new();
        for number in 0..100_u64 {
            let data = AlignedBuffer::from_slice(&vec![number as u8; 10_000]);
            expected.extend_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
            expected.extend_from_slice(&[0; 4]);
            expected.extend_from_slice(&number.to_be_bytes());
            expected.extend_from_slice(&data);
            output.push(Reply::data(number, false, 0, data));
        }
        assert_eq!(output.waiting(), expected.len());
        let (mut received, mut returned) = (Vec::new(), 0);
        while received.len() < expected.len() {
            output.send(&ours, |sent| returned += usize::from(sent.buffer.is_some())).expect("it is open");
            let mut piece = [0; 7_001];
            let count = (&theirs).read(&mut piece).expect("something was sent");
            received.extend_from_slice(&piece[..count]);
        }
        assert!(received == expected);
        assert!(output.is_empty());
        assert_eq!((output.waiting(), returned), (0, 100));
    }

    #[test]
    fn an_error_in_a_structured_reply_has_a_text_of_bounded_length() {
        let error = Error::new(ErrorKind::NoSpace, "ü".repeat(400));
        let reply = Reply::error(1, true, &error);
        assert_eq!(reply.head_length, 26);
        assert_eq!(reply.head[20..24], 28_u32.to_be_bytes());
        let text = std::str::from_utf8(reply.body.bytes()).expect("whole characters");
        assert_eq!(text.len(), TEXT_MAX);
        assert_eq!(reply.head[24..26], 512_u16.to_be_bytes());
        assert_eq!(reply.head[16..20], (6 + 512_u32).to_be_bytes());
    }

    #[test]
    fn a_reply_to_a_closed_connection_is_an_error() {
        let (ours, theirs) = Socket::pair(Domain::UNIX, Type::STREAM, None).expect("a pair");
        drop(theirs);
        let mut output = Output::default();
        output.push(Reply::done(1));
        assert_eq!(output.send(&ours, |_| ()).expect_err("closed").kind(), io::ErrorKind::BrokenPipe);
    }
}
