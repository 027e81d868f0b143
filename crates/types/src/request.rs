//! A client's request to a block device, through any export.

use crate::{AlignedBuffer, ByteRange, Result};

/// The operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Operation {
    /// Read into the request's buffer.
    Read,
    /// Write the request's buffer.
    Write,
    /// Everything that completed before this was submitted is durable, and nothing later reaches the backing
    /// device before it.
    Flush,
    /// Discard the range; it reads as zeroes from now on.
    Discard,
    /// Zero the range.
    WriteZeroes,
}

/// One request.
#[derive(Debug)]
pub struct Request {
    /// The export's identifier; the completion returns it.
    pub id: u64,
    /// The operation.
    pub operation: Operation,
    /// The range, in whole logical sectors; empty for a flush.
    pub range: ByteRange,
    /// A FUA request: durable at its completion, and nothing later reaches the backing device before it.
    /// Writes, zeroing and discards only.
    pub fua: bool,
    /// As long as `range` for reads and writes, empty otherwise. The completion returns it.
    pub buffer: AlignedBuffer,
}

/// The completion of a request.
#[derive(Debug)]
pub struct Completion {
    /// The identifier of the request.
    pub id: u64,
    /// Whether all of it was executed.
    pub result: Result<()>,
    /// The request's buffer; filled after a successful read.
    pub buffer: AlignedBuffer,
}

/// The properties of a block device, as an export reports them to its clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Size in bytes, whole logical sectors.
    pub size: u64,
    /// Logical sector in bytes: every request is whole sectors.
    pub sector: u32,
    /// Physical sector in bytes: the unit that is best not written in part.
    pub physical_sector: u32,
    /// A write of at most this many bytes inside one 4 MiB-aligned chunk is recovered completely or not at
    /// all.
    pub atomic_unit: u32,
    /// Whether discards are supported.
    pub discard: bool,
    /// Granularity of discards in bytes; the sector where the device has no larger one.
    pub discard_granularity: u32,
    /// Whether seeks of the device beneath are expensive.
    pub rotational: bool,
    /// Whether zeroing a range costs no more than writing one block, whatever its length.
    pub fast_zeroes: bool,
}
