//! What a client asks of a block device, whatever door it came through.

use crate::{AlignedBuffer, ByteRange, Result};

/// What is asked.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Operation {
    /// Fill the request's buffer.
    Read,
    /// Write the request's buffer.
    Write,
    /// What completed before this was submitted is durable, and on the backing device nothing that comes
    /// after it overtakes it.
    Flush,
    /// The range is not needed any more; it reads as zeroes from now on.
    Discard,
    /// The range reads as zeroes from now on.
    WriteZeroes,
}

/// One request.
#[derive(Debug)]
pub struct Request {
    /// The export's own number for it; it comes back with the completion.
    pub id: u64,
    /// What is asked.
    pub operation: Operation,
    /// Where, in whole logical sectors; empty for a flush.
    pub range: ByteRange,
    /// Durable when it completes, and nothing later overtakes it on the backing device. Writes, zeroes and
    /// discards only.
    pub fua: bool,
    /// As long as `range` for reads and writes, empty otherwise. It comes back with the completion.
    pub buffer: AlignedBuffer,
}

/// How a request ended.
#[derive(Debug)]
pub struct Completion {
    /// The request's number.
    pub id: u64,
    /// Whether all of it was done.
    pub result: Result<()>,
    /// The request's buffer; filled after a read that went well.
    pub buffer: AlignedBuffer,
}

/// What a block device is, as an export tells it to its clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Size in bytes, whole logical sectors.
    pub size: u64,
    /// Logical sector in bytes: every request is whole sectors.
    pub sector: u32,
    /// Physical sector in bytes: what is best not to write in part.
    pub physical_sector: u32,
    /// A write of at most this many bytes inside one 4 MiB-aligned chunk is recovered whole or not at all.
    pub atomic_unit: u32,
    /// Whether discard is offered.
    pub discard: bool,
    /// Granularity of discards in bytes; the sector where the device is not picky.
    pub discard_granularity: u32,
    /// Whether seeks are dear on what lies beneath.
    pub rotational: bool,
}
