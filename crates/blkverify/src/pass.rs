//! One pass over pieces of a disk or a file.
//!
//! Invariants: every byte of every piece is looked at, or the pass says that it ended early; what cannot be read is narrowed to
//! sectors by halving; what differs is read and compared here, so a disk is never trusted for what differs. What cannot be read
//! never ends the pass, but a disk that is gone does.

use crate::expected::Expected;
use crate::findings::{Findings, What};
use crate::look::{Answer, Ask, Look, Request, UNIT, are_zero};
use cbd_types::{ByteRange, Error, ErrorKind};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// Failed requests after which failed ranges are not narrowed any more: a disk with a defective head would take weeks.
const NARROWED_MAX: u64 = 1 << 16;

/// Bytes that are looked at in one place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// First byte in the verified object.
    pub logical: u64,
    /// First byte where it is looked at; a whole sector.
    pub start: u64,
    /// Bytes. Only the last piece of a file is not whole sectors.
    pub length: u64,
}

/// The result of passes.
#[derive(Default, Debug)]
pub struct Seen {
    /// Bytes that were looked at.
    pub looked: u64,
    /// Bytes that changed while they were looked at.
    pub changed: u64,
    /// What is wrong.
    pub findings: Findings,
    /// Failed requests.
    failed: u64,
    /// Why the pass ended early.
    pub error: Option<Error>,
    /// Whether unreadable ranges are larger than what cannot be read.
    pub is_coarse: bool,
}

/// What a pass looks for, and what ends it.
pub struct Pass<'a> {
    /// What the bytes should be.
    pub expected: &'a Expected,
    /// The smallest request.
    pub sector: u64,
    /// Set to end the pass.
    pub stop: &'a AtomicBool,
    /// Called with the number of bytes that were looked at.
    pub progress: &'a mut dyn FnMut(u64),
}

/// A part of a piece, and whether its content is requested.
#[derive(Clone, Copy, Debug)]
struct Part {
    piece: Piece,
    content: bool,
}

impl Pass<'_> {
    /// Looks at all `pieces`.
    pub fn run(&mut self, look: &mut dyn Look, pieces: &[Piece], seen: &mut Seen) {
        let mut fresh = pieces.iter().flat_map(|piece| units(*piece));
        let mut again: Vec<Part> = Vec::new();
        let mut in_flight: HashMap<u64, Part> = HashMap::new();
        let mut answers = Vec::new();
        let mut token = 0;
        loop {
            while in_flight.len() < look.depth() && seen.error.is_none() && !self.stop.load(Ordering::Relaxed)
            {
                let whole = |piece| Part { piece, content: self.is_odd(piece) };
                let Some(part) = again.pop().or_else(|| fresh.next().map(whole)) else { break };
                match self.request(part) {
                    Ok(request) => {
                        in_flight.insert(token, part);
                        look.submit(token, request);
                        token += 1;
                    }
                    Err(error) => seen.error = Some(error),
                }
            }
            if in_flight.is_empty() {
                return;
            }
            look.wait(&mut answers);
            if answers.is_empty() {
                // Only when the threads that answer are gone.
                seen.error.get_or_insert_with(|| Error::new(ErrorKind::System, "requests are not answered"));
                return;
            }
            for (token, answer) in answers.drain(..) {
                let Some(part) = in_flight.remove(&token) else { continue };
                self.answered(part, answer, seen, &mut again);
            }
            (self.progress)(seen.looked);
        }
    }

    /// Whether a piece has more bytes on the disk than in the file, so that no disk can compare it.
    fn is_odd(&self, piece: Piece) -> bool {
        !piece.length.is_multiple_of(self.sector) && !matches!(self.expected, Expected::Readable)
    }

    fn request(&self, part: Part) -> cbd_types::Result<Request> {
        let Piece { logical, start, length } = part.piece;
        let range = ByteRange::at(start, length.next_multiple_of(self.sector));
        let ask = match self.expected {
            _ if part.content => Ask::Content,
            Expected::Readable => Ask::Readable,
            Expected::Zeroes => Ask::Zeroes,
            Expected::Image(image) => Ask::Bytes(image.read(ByteRange::at(logical, length), range.len())?),
        };
        Ok(Request { range, useful: length, ask })
    }

    fn answered(&self, part: Part, answer: Answer, seen: &mut Seen, again: &mut Vec<Part>) {
        let Piece { logical, start, length } = part.piece;
        match answer {
            Answer::Right => seen.looked += length,
            Answer::Differs => again.push(Part { content: true, ..part }),
            Answer::Content(content) => match self.compare(part.piece, &content, &mut seen.findings) {
                Ok(0) if self.is_odd(part.piece) => seen.looked += length,
                // The disk found a difference, and there is none any more.
                Ok(0) => {
                    seen.looked += length;
                    seen.changed += length;
                }
                Ok(_) => seen.looked += length,
                Err(error) => seen.error = Some(error),
            },
            Answer::Failed(error) if ends_all(&error) => {
                seen.error.get_or_insert(error);
            }
            Answer::Failed(_) => {
                seen.failed += 1;
                let is_narrowed = seen.failed <= NARROWED_MAX;
                if length > self.sector && is_narrowed {
                    let half = (length / 2).next_multiple_of(self.sector);
                    let left = Piece { length: half, ..part.piece };
                    let right = Piece { logical: logical + half, start: start + half, length: length - half };
                    again.extend([right, left].map(|piece| Part { piece, content: self.is_odd(piece) }));
                } else {
                    seen.is_coarse |= !is_narrowed && length > self.sector;
                    seen.looked += length;
                    seen.findings.add(ByteRange::at(logical, length), What::Unreadable);
                }
            }
        }
    }

    /// Compares sector by sector; returns the number of wrong sectors.
    fn compare(&self, piece: Piece, content: &[u8], findings: &mut Findings) -> cbd_types::Result<usize> {
        let range = ByteRange::at(piece.logical, piece.length);
        let content = &content[..content.len().min(usize::try_from(piece.length).unwrap_or(usize::MAX))];
        let image = match self.expected {
            Expected::Image(image) => Some(image.read(range, piece.length)?),
            _ => None,
        };
        let sector = usize::try_from(self.sector).unwrap_or(usize::MAX);
        let mut wrong = 0;
        for (number, bytes) in content.chunks(sector).enumerate() {
            let at = number * sector;
            let (is_right, what) = match (&image, self.expected) {
                (Some(image), _) => (image[at..at + bytes.len()] == *bytes, What::Differs),
                (None, Expected::Zeroes) => (are_zero(bytes), What::NotZero),
                (None, _) => (true, What::Differs),
            };
            if !is_right {
                wrong += 1;
                findings.add(ByteRange::at(range.start + at as u64, bytes.len() as u64), what);
            }
        }
        Ok(wrong)
    }
}

/// The piece in units, at multiples of their size where it is looked at.
fn units(piece: Piece) -> impl Iterator<Item = Piece> {
    let whole = ByteRange::at(piece.start, piece.length);
    whole.split_at_multiples(UNIT).map(move |part| Piece {
        logical: piece.logical + (part.start - piece.start),
        start: part.start,
        length: part.len(),
    })
}

/// Whether an error is none of the sectors that were read: a disk that was pulled, or a file that was cut.
fn ends_all(error: &Error) -> bool {
    let kind = error.kind();
    if matches!(
        kind,
        ErrorKind::OutOfRange | ErrorKind::Permission | ErrorKind::Unsupported | ErrorKind::InvalidArgument
    ) {
        return true;
    }
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = next {
        let errno = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
        if matches!(
            errno,
            Some(libc::EINVAL | libc::ENODEV | libc::ENXIO | libc::ENOMEDIUM | libc::ESHUTDOWN)
        ) {
            return true;
        }
        next = cause.source();
    }
    false
}

#[cfg(test)]
mod tests;
