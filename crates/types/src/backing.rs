//! The interface to backing devices: queues that accept operations and return them when they are complete.
//!
//! A queue belongs to one thread. An operation owns its buffer from submission to completion, so no other code can
//! access it meanwhile. The engine never has two overlapping changes in flight, so a queue may execute them in any
//! order. A read, a verification or a comparison may overlap a change; each sector then has its content before the change
//! or after it.

use crate::{AlignedBuffer, ByteRange, Result};
use alloc::vec::Vec;

/// The submitter's identifier of an operation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpToken(pub u64);

/// An operation of a backing device. Ranges are whole logical sectors.
#[derive(Debug)]
pub enum BackingOp {
    /// Read into `buffer` from `offset`.
    Read {
        /// First byte on the device.
        offset: u64,
        /// Its length is the length of the read.
        buffer: AlignedBuffer,
    },
    /// Write `buffer` to `offset`. Durable after a later flush.
    Write {
        /// First byte on the device.
        offset: u64,
        /// The data.
        buffer: AlignedBuffer,
    },
    /// Make the range read as zeroes, with the fastest method; it may stay allocated.
    WriteZeroes {
        /// The range.
        range: ByteRange,
    },
    /// Discard the range; only if [`BackingGeometry::discard_zeroes`] states that it reads as zeroes afterwards.
    Discard {
        /// The range.
        range: ByteRange,
    },
    /// Check that all of the range can be read; the device may do it in itself and move no data.
    Verify {
        /// The range.
        range: ByteRange,
    },
    /// Check that the device has this content. It is read and compared by this process, unless the device was opened to
    /// be trusted with comparisons. If it has other content, the error is [`Mismatch`](crate::ErrorKind), and
    /// its range is that of the first sectors that differ.
    Compare {
        /// The range.
        range: ByteRange,
        /// What the device should have.
        expected: Expected,
    },
    /// Everything completed so far is durable when this completes.
    Flush,
}

impl BackingOp {
    /// Whether it changes the content of the device.
    #[must_use]
    pub const fn changes(&self) -> bool {
        match self {
            Self::Write { .. } | Self::WriteZeroes { .. } | Self::Discard { .. } => true,
            Self::Read { .. } | Self::Verify { .. } | Self::Compare { .. } | Self::Flush => false,
        }
    }
}

/// The content that [`BackingOp::Compare`] compares a range with.
#[derive(Debug)]
pub enum Expected {
    /// These bytes, as many as the range has.
    Bytes(AlignedBuffer),
    /// Zeroes.
    Zeroes,
}

impl Expected {
    /// Whether `bytes`, which begin at `offset` of the range, are as expected. Bytes past the end are not.
    #[must_use]
    pub fn is(&self, offset: usize, bytes: &[u8]) -> bool {
        match self {
            Self::Bytes(expected) => {
                expected.get(offset..).and_then(|rest| rest.get(..bytes.len())) == Some(bytes)
            }
            Self::Zeroes => bytes.iter().all(|&byte| byte == 0),
        }
    }

    /// The first run of sectors of `bytes` that are not as expected, in bytes from the start of `bytes`; `None` if all
    /// are. `bytes` begin at `offset` of the range.
    #[must_use]
    pub fn first_difference(&self, offset: usize, bytes: &[u8], sector: usize) -> Option<ByteRange> {
        if self.is(offset, bytes) {
            return None;
        }
        let mut differing = bytes
            .chunks(sector.max(1))
            .enumerate()
            .map(|(index, chunk)| (index * sector.max(1), chunk.len()))
            .skip_while(|&(at, length)| self.is(offset + at, &bytes[at..at + length]));
        let (start, length) = differing.next()?;
        let end = differing
            .take_while(|&(at, length)| !self.is(offset + at, &bytes[at..at + length]))
            .last()
            .map_or(start + length, |(at, length)| at + length);
        Some(ByteRange { start: start as u64, end: end as u64 })
    }
}

/// A completed operation.
#[derive(Debug)]
pub struct BackingDone {
    /// The identifier of the submitter.
    pub token: OpToken,
    /// The operation with its buffer; after a failed read the content of the buffer is undefined.
    pub op: BackingOp,
    /// Whether all of it was executed.
    pub result: Result<()>,
}

/// The properties of a backing device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackingGeometry {
    /// Size in bytes, whole logical sectors.
    pub size: u64,
    /// Logical sector in bytes: the smallest unit of I/O, a power of two from 512 to 4096.
    pub sector: u32,
    /// Physical sector in bytes.
    pub physical_sector: u32,
    /// Whether seeks are expensive.
    pub rotational: bool,
    /// Whether a power failure before a flush may lose a write.
    pub volatile_cache: bool,
    /// Whether a discarded range reads as zeroes from then on.
    pub discard_zeroes: bool,
    /// Granularity of discards in bytes; 0 if the device supports none.
    pub discard_granularity: u32,
}

/// Why an operation is executed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Origin {
    /// A request of a client: a read that missed, or what goes past the cache.
    #[default]
    Client,
    /// A read of what a client is expected to read next.
    ReadAhead,
    /// Dirty data, and the flushes that make it durable.
    Writeback,
    /// A scrub, or a verification that a client asked for.
    Verify,
}

impl Origin {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::Client, Self::ReadAhead, Self::Writeback, Self::Verify];

    /// The name in status and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::ReadAhead => "readahead",
            Self::Writeback => "writeback",
            Self::Verify => "verify",
        }
    }
}

/// A queue of operations to one backing device, used by one thread.
pub trait BackingQueue: Send {
    /// Submits an operation. It is always accepted: operations beyond the depth wait in the queue in the
    /// order of submission; callers limit their submissions to [`depth`](Self::depth).
    fn submit(&mut self, token: OpToken, op: BackingOp);

    /// The operations that are submitted from now on have this origin; [`Origin::Client`] before the first call. It is only
    /// counted, by a queue that counts.
    fn set_origin(&mut self, origin: Origin) {
        let _ = origin;
    }

    /// Moves completed operations to `done`; does not block.
    fn poll(&mut self, done: &mut Vec<BackingDone>);

    /// Waits until an operation in flight completes, then as [`poll`](Self::poll). Returns at once when
    /// nothing is in flight.
    fn wait(&mut self, done: &mut Vec<BackingDone>);

    /// Operations submitted and not yet returned.
    fn in_flight(&self) -> usize;

    /// The number of operations in flight that the device executes efficiently.
    fn depth(&self) -> usize;
}

impl<Q: BackingQueue + ?Sized> BackingQueue for alloc::boxed::Box<Q> {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        (**self).submit(token, op);
    }

    fn set_origin(&mut self, origin: Origin) {
        (**self).set_origin(origin);
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        (**self).poll(done);
    }

    fn wait(&mut self, done: &mut Vec<BackingDone>) {
        (**self).wait(done);
    }

    fn in_flight(&self) -> usize {
        (**self).in_flight()
    }

    fn depth(&self) -> usize {
        (**self).depth()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_a_run_of_sectors() {
        let mut bytes = alloc::vec![0; 4096];
        assert_eq!(Expected::Zeroes.first_difference(0, &bytes, 512), None);
        for at in [1030, 1540, 3000] {
            bytes[at] = 1;
        }
        let found = Expected::Zeroes.first_difference(0, &bytes, 512);
        assert_eq!(found, Some(ByteRange { start: 1024, end: 2048 }));
    }

    #[test]
    fn bytes_are_compared_at_their_offset() {
        let expected = Expected::Bytes(AlignedBuffer::from_slice(&[[1; 512], [2; 512]].concat()));
        assert_eq!(expected.first_difference(512, &[2; 512], 512), None);
        assert_eq!(expected.first_difference(0, &[2; 512], 512), Some(ByteRange::at(0, 512)));
        assert_eq!(expected.first_difference(512, &[2; 1024], 512), Some(ByteRange::at(512, 512)));
    }
}
