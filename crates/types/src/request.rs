//! A client's request to a block device, through any export.

use crate::{AlignedBuffer, ByteRange, Error, ErrorKind, Result};

/// The operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Operation {
    /// Read into the request's buffer.
    Read,
    /// Write the request's buffer.
    Write,
    /// Everything that completed before this was submitted becomes durable, and nothing that was submitted later
    /// reaches the backing device before it.
    Flush,
    /// Discard the range; it reads as zeroes from now on.
    Discard,
    /// Zero the range.
    WriteZeroes,
}

impl Operation {
    /// All operations, each at the place of its number.
    pub const ALL: [Self; 5] = [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes];
}

/// What a request's data is, as far as its client says so. Only the decision what stays in the cache depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Class {
    /// The client says nothing.
    #[default]
    Unmarked,
    /// Metadata of a file system.
    Metadata,
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
    /// A FUA request: durable at its completion, and nothing later reaches the backing device before it. Only for
    /// writes, zeroing and discards.
    pub fua: bool,
    /// The class of its data.
    pub class: Class,
    /// The CRC32C of a write's data, if whoever has sent it has computed one: other data is not stored.
    pub data_crc: Option<u32>,
    /// As long as `range` for reads and writes, empty otherwise. The completion returns the buffer.
    pub buffer: AlignedBuffer,
}

impl Request {
    /// A request without a class and without a checksum.
    #[must_use]
    pub const fn unmarked(
        id: u64,
        operation: Operation,
        range: ByteRange,
        fua: bool,
        buffer: AlignedBuffer,
    ) -> Self {
        Self { id, operation, range, fua, class: Class::Unmarked, data_crc: None, buffer }
    }

    /// Compares the data with the checksum that has come with it, which is then of no interest any more.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`]: the data must not be stored.
    pub fn check_data(&mut self, crc32c: impl FnOnce(&[u8]) -> u32) -> Result<()> {
        match self.data_crc.take() {
            Some(sum) if sum != crc32c(&self.buffer) => Err(Self::other_data()),
            _ => Ok(()),
        }
    }

    /// The error of a write whose data is not what its checksum is of.
    #[cold]
    #[must_use]
    pub fn other_data() -> Error {
        Error::new(
            ErrorKind::Mismatch,
            "the data of the write differs from its checksum; nothing was written",
        )
    }
}

/// Which requests a queue returns as if they had not been submitted, of those that wait for space or for what must precede them. Those of
/// which nothing was done it returns in any case.
#[derive(Clone, Copy)]
pub struct TakeBack<'a> {
    /// Also writes of which a part was done and that wait for space: no one sees that they are executed once more later.
    pub begun_writes: bool,
    /// Whether the client has given up the request with this identifier: of such ones also others of which a part was done, unless the
    /// backing device has one.
    pub is_given_up: &'a dyn Fn(u64) -> bool,
}

/// The completion of a request.
#[derive(Debug)]
pub struct Completion {
    /// The identifier of the request.
    pub id: u64,
    /// Success only if all of the request was executed.
    pub result: Result<()>,
    /// The request's buffer; filled after a successful read.
    pub buffer: AlignedBuffer,
}

/// The properties of a block device, as an export reports them to its clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Size in bytes, whole logical sectors.
    pub size: u64,
    /// Logical sector in bytes: every request consists of whole sectors.
    pub sector: u32,
    /// Physical sector in bytes: writing a part of it is inefficient.
    pub physical_sector: u32,
    /// A write of at most this many bytes inside one 4 MiB-aligned chunk is recovered completely or not at all.
    pub atomic_unit: u32,
    /// Whether discards are supported.
    pub discard: bool,
    /// Granularity of discards in bytes; the sector if the device has no larger one.
    pub discard_granularity: u32,
    /// Whether seeks of the backing device are expensive.
    pub rotational: bool,
    /// Whether zeroing a range of any length costs no more than writing one block.
    pub fast_zeroes: bool,
}
