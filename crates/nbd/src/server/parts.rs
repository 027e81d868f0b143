//! A read or write that exceeds the memory of its connection: it is executed in parts, one after the other.
//!
//! A write is submitted part by part as its payload is received, and answered when all parts are done. A read is sent
//! part by part: with structured replies each part is a chunk, otherwise the parts follow one head, and no other reply
//! is sent between them.
//!
//! Invariants: parts begin and end at multiples of [`PART`] in the device, so a unit that the device writes
//! atomically is never split; a request has one reply, which reports the first error; after the head of a simple reply,
//! which cannot report an error any more, a part that fails ends the connection.
//!
//! Elsewhere: memory, the socket and the device (`connection`).

use super::handshake::Negotiated;
use super::reply::Reply;
use crate::protocol::{RequestHeader, command_flag};
use cbd_types::{AlignedBuffer, ByteRange, Error, ErrorKind};

/// Longest part; no atomic unit is longer.
pub(super) const PART: u64 = 1 << 20;

/// How a read is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Framing {
    /// A chunk for each part.
    Chunks,
    /// One head with the length of all parts.
    OneHead,
}

impl Negotiated {
    /// How the data of a read in parts is sent.
    pub(super) const fn framing(&self, header: &RequestHeader) -> Framing {
        if self.structured && header.flags & command_flag::DF == 0 {
            Framing::Chunks
        } else {
            Framing::OneHead
        }
    }
}

/// The operation that is executed in parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Direction {
    Read(Framing),
    Write { fua: bool },
}

/// The request.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) cookie: u64,
    pub(super) direction: Direction,
    structured: bool,
    all: ByteRange,
    /// The range that has not begun.
    remaining: ByteRange,
    /// Parts in the device, or whose payload is being received.
    running: usize,
    error: Option<Error>,
    /// Whether the head of the reply is queued.
    answered: bool,
}

/// The next step after a part.
#[derive(Debug)]
pub(super) enum Next {
    /// Send this reply; others may follow it unless parts of the same head are to follow.
    Send(Reply),
    /// Send this reply, which ends the request.
    End(Reply),
    /// Wait for other parts. The buffer is no longer needed.
    Wait(AlignedBuffer),
    /// End the connection: the data that the head announced cannot be sent.
    Broken(Error),
}

impl Parts {
    pub(super) const fn new(cookie: u64, structured: bool, direction: Direction, all: ByteRange) -> Self {
        Self { cookie, direction, structured, all, remaining: all, running: 0, error: None, answered: false }
    }

    /// Whether it is a read.
    pub(super) const fn is_read(&self) -> bool {
        matches!(self.direction, Direction::Read(_))
    }

    /// Bytes of the next part.
    pub(super) fn next_length(&self) -> usize {
        // At most [`PART`], which fits in `usize`.
        self.next().len() as usize
    }

    fn next(&self) -> ByteRange {
        let end = (self.remaining.start / PART * PART + PART).min(self.remaining.end);
        ByteRange { start: self.remaining.start, end }
    }

    /// Whether a part can begin. Parts of a read run one at a time, in order.
    pub(super) const fn has_next(&self) -> bool {
        !self.remaining.is_empty() && (matches!(self.direction, Direction::Write { .. }) || self.running == 0)
    }

    /// Begins the next part and returns its range.
    pub(super) fn begin(&mut self) -> ByteRange {
        let part = self.next();
        self.remaining.start = part.end;
        self.running += 1;
        part
    }

    /// Whether only parts of this request may be sent now.
    pub(super) fn excludes_replies(&self) -> bool {
        self.answered && matches!(self.direction, Direction::Read(Framing::OneHead))
    }

    /// Whether no other request may begin now: a stream of requests could take the memory that the next part of a read
    /// waits for. Behind a read with one head a request would even hold that memory, since its reply waits for the last
    /// part.
    pub(super) const fn blocks_requests(&self) -> bool {
        match self.direction {
            Direction::Read(Framing::OneHead) => true,
            Direction::Read(Framing::Chunks) => self.has_next(),
            Direction::Write { .. } => false,
        }
    }

    /// A part is done.
    pub(super) fn done(&mut self, part: ByteRange, result: Result<(), Error>, buffer: AlignedBuffer) -> Next {
        self.running -= 1;
        match self.direction {
            Direction::Write { .. } => self.written(result, buffer),
            Direction::Read(framing) => self.read(framing, part, result, buffer),
        }
    }

    fn written(&mut self, result: Result<(), Error>, buffer: AlignedBuffer) -> Next {
        if let Err(error) = result {
            self.error.get_or_insert(error);
        }
        if !self.remaining.is_empty() || self.running > 0 {
            return Next::Wait(buffer);
        }
        match self.error.take() {
            None => Next::End(Reply::done(self.cookie)),
            Some(error) => Next::End(Reply::error(self.cookie, self.structured, &error)),
        }
    }

    fn read(
        &mut self,
        framing: Framing,
        part: ByteRange,
        result: Result<(), Error>,
        buffer: AlignedBuffer,
    ) -> Next {
        let wrong_length = || Error::new(ErrorKind::System, "the device returned a read of another length");
        let result = result
            .and_then(|()| if buffer.len() as u64 == part.len() { Ok(()) } else { Err(wrong_length()) });
        if let Err(error) = result {
            if self.excludes_replies() {
                let text = "a read failed after the head of its reply, which cannot report an error any more";
                return Next::Broken(error.while_doing(text));
            }
            self.remaining.start = self.remaining.end;
            return Next::End(Reply::error(self.cookie, self.structured, &error));
        }
        let (first, last) = (!self.answered, self.remaining.is_empty());
        self.answered = true;
        let reply = match framing {
            Framing::Chunks => Reply::chunk_of_data(self.cookie, part.start, buffer, last),
            Framing::OneHead if first => {
                // A request's length has 32 bits on the wire.
                let length = self.all.len() as usize;
                Reply::head_of_data(self.cookie, self.structured, self.all.start, length, buffer)
            }
            Framing::OneHead => Reply::continued_data(buffer),
        };
        if last { Next::End(reply) } else { Next::Send(reply.continued()) }
    }
}
