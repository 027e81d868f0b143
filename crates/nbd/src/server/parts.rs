//! A read or write that is longer than the memory that its connection can have: it goes on in parts, one behind the other.
//!
//! A write is submitted part by part as its payload comes, and answered when all parts are done. A read is sent part by part:
//! with structured replies each part is a chunk, otherwise the parts follow each other behind one head, and no other reply
//! comes between them.
//!
//! Always true here: parts begin and end at multiples of [`PART`] in the device, so what the device does atomically is never
//! cut; a request has one reply, which says the first error; after the head of a reply that has no place for an error, a
//! part that fails ends the connection.
//!
//! Left to others: memory, the socket and the device (`connection`).

use super::handshake::Agreed;
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

impl Agreed {
    /// How the data of a read in parts is sent.
    pub(super) const fn framing(&self, header: &RequestHeader) -> Framing {
        if self.structured && header.flags & command_flag::DF == 0 {
            Framing::Chunks
        } else {
            Framing::OneHead
        }
    }
}

/// What is done in parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    Read(Framing),
    Write { fua: bool },
}

/// The request.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) cookie: u64,
    pub(super) way: Way,
    structured: bool,
    all: ByteRange,
    /// What has not begun.
    left: ByteRange,
    /// Parts that the device has, or whose payload is being received.
    running: usize,
    error: Option<Error>,
    /// Whether some of a reply is on its way.
    answered: bool,
}

/// What is to be done after a part.
#[derive(Debug)]
pub(super) enum Next {
    /// This reply goes out; others may, too, unless parts of one head are to follow.
    Send(Reply),
    /// The request is over with this reply.
    End(Reply),
    /// Nothing yet. The buffer is not needed any more.
    Wait(AlignedBuffer),
    /// The connection ends: what was promised cannot be sent.
    Broken(Error),
}

impl Parts {
    pub(super) const fn new(cookie: u64, structured: bool, way: Way, all: ByteRange) -> Self {
        Self { cookie, way, structured, all, left: all, running: 0, error: None, answered: false }
    }

    /// Whether it is a read.
    pub(super) const fn is_read(&self) -> bool {
        matches!(self.way, Way::Read(_))
    }

    /// Bytes of the next part.
    pub(super) fn next_length(&self) -> usize {
        // At most a part, which fits.
        self.next().len() as usize
    }

    fn next(&self) -> ByteRange {
        let end = (self.left.start / PART * PART + PART).min(self.left.end);
        ByteRange { start: self.left.start, end }
    }

    /// Whether a part can begin. Parts of a read come one at a time, in order.
    pub(super) const fn has_next(&self) -> bool {
        !self.left.is_empty() && (matches!(self.way, Way::Write { .. }) || self.running == 0)
    }

    /// The next part.
    pub(super) fn begin(&mut self) -> ByteRange {
        let part = self.next();
        self.left.start = part.end;
        self.running += 1;
        part
    }

    /// Whether only parts of this request may be sent now.
    pub(super) fn is_alone(&self) -> bool {
        self.answered && matches!(self.way, Way::Read(Framing::OneHead))
    }

    /// Whether no other request may begin now: it could take the memory that the next part of a read waits for, for as long as there
    /// are requests. Behind a read with one head it would even keep that memory, since its reply waits for the last part.
    pub(super) const fn comes_first(&self) -> bool {
        match self.way {
            Way::Read(Framing::OneHead) => true,
            Way::Read(Framing::Chunks) => self.has_next(),
            Way::Write { .. } => false,
        }
    }

    /// A part is done.
    pub(super) fn done(&mut self, part: ByteRange, result: Result<(), Error>, buffer: AlignedBuffer) -> Next {
        self.running -= 1;
        match self.way {
            Way::Write { .. } => self.written(result, buffer),
            Way::Read(framing) => self.read(framing, part, result, buffer),
        }
    }

    fn written(&mut self, result: Result<(), Error>, buffer: AlignedBuffer) -> Next {
        if let Err(error) = result {
            self.error.get_or_insert(error);
        }
        if !self.left.is_empty() || self.running > 0 {
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
            if self.is_alone() {
                let text = "a read failed whose reply was on its way and has no place for an error";
                return Next::Broken(error.while_doing(text));
            }
            self.left.start = self.left.end;
            return Next::End(Reply::error(self.cookie, self.structured, &error));
        }
        let (first, last) = (!self.answered, self.left.is_empty());
        self.answered = true;
        let reply = match framing {
            Framing::Chunks => Reply::chunk_of_data(self.cookie, part.start, buffer, last),
            Framing::OneHead if first => {
                // A request's length came in 32 bits.
                let length = self.all.len() as usize;
                Reply::head_of_data(self.cookie, self.structured, self.all.start, length, buffer)
            }
            Framing::OneHead => Reply::more_data(buffer),
        };
        if last { Next::End(reply) } else { Next::Send(reply.goes_on()) }
    }
}
