//! The interface to backing devices: queues that accept operations and return them when they are complete.
//!
//! A queue belongs to one thread. An operation owns its buffer from submission to completion, so no other code can
//! access it meanwhile. The engine never has two overlapping changes in flight, so a queue may execute them in any
//! order. A read may overlap a change; each sector then has its content before the change or after it.

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
    /// Everything completed so far is durable when this completes.
    Flush,
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

/// A queue of operations to one backing device, used by one thread.
pub trait BackingQueue: Send {
    /// Submits an operation. It is always accepted: operations beyond the depth wait in the queue in the
    /// order of submission; callers limit their submissions to [`depth`](Self::depth).
    fn submit(&mut self, token: OpToken, op: BackingOp);

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
