//! The port for backing devices: queues that take operations and give them back when they are done.
//!
//! A queue belongs to one thread. An operation owns its buffer from submit to completion, so nobody can
//! touch it meanwhile. The engine never has two changes in flight that overlap, so a queue may run them in any
//! order. A read may overlap a change, and then each sector is as before it or as after it.

use crate::{AlignedBuffer, ByteRange, Result};
use alloc::vec::Vec;

/// What a submitter recognises its operation by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpToken(pub u64);

/// What a backing device is asked to do. Ranges are whole logical sectors.
#[derive(Debug)]
pub enum BackingOp {
    /// Fill `buffer` from `offset`.
    Read {
        /// First byte on the device.
        offset: u64,
        /// Its length says how much.
        buffer: AlignedBuffer,
    },
    /// Write `buffer` to `offset`. Durable after a later flush.
    Write {
        /// First byte on the device.
        offset: u64,
        /// What is written.
        buffer: AlignedBuffer,
    },
    /// Make the range read as zeroes, by whatever is fastest; it may stay allocated.
    WriteZeroes {
        /// What is zeroed.
        range: ByteRange,
    },
    /// Give the range back; only where [`BackingGeometry::discard_zeroes`] says that it reads as zeroes after.
    Discard {
        /// What is given back.
        range: ByteRange,
    },
    /// Everything completed so far is durable when this completes.
    Flush,
}

/// An operation that came back.
#[derive(Debug)]
pub struct BackingDone {
    /// What the submitter gave.
    pub token: OpToken,
    /// The operation with its buffer; after a failed read the buffer's bytes mean nothing.
    pub op: BackingOp,
    /// Whether it was done, all of it.
    pub result: Result<()>,
}

/// What the system says about a backing device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BackingGeometry {
    /// Size in bytes, whole logical sectors.
    pub size: u64,
    /// Logical sector in bytes: the smallest unit of I/O, a power of two from 512 to 4096.
    pub sector: u32,
    /// Physical sector in bytes.
    pub physical_sector: u32,
    /// Whether seeks are dear.
    pub rotational: bool,
    /// Whether a write may be lost by a power cut before a flush.
    pub volatile_cache: bool,
    /// Whether a discarded range reads as zeroes ever after.
    pub discard_zeroes: bool,
    /// Granularity of discards in bytes; 0 where there are none.
    pub discard_granularity: u32,
}

/// A queue of operations to one backing device, used by one thread.
pub trait BackingQueue: Send {
    /// Takes an operation. It is always taken: what exceeds the depth waits in the queue in the order of
    /// submission; callers bound what they submit by [`depth`](Self::depth).
    fn submit(&mut self, token: OpToken, op: BackingOp);

    /// Moves what has completed to `done`; does not wait.
    fn poll(&mut self, done: &mut Vec<BackingDone>);

    /// Waits until something in flight completes, then as [`poll`](Self::poll). Returns at once when nothing is
    /// in flight.
    fn wait(&mut self, done: &mut Vec<BackingDone>);

    /// Operations submitted and not yet given back.
    fn in_flight(&self) -> usize;

    /// How many operations the device works on at a time to good effect.
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
