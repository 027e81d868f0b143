//! The words of the system, and the ports through which the outside world comes in.
//!
//! Always true here: nothing in this crate starts a thread, reads a clock, knows a file descriptor or
//! is `unsafe`. The engine is written against these traits alone, so the very same engine runs over
//! real memory and over a simulator that owns crashes, faults and time.
//!
//! Left to others: the bytes on media (`cbd-format`), what the words do (`cbd-engine`).
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(feature = "mutants")]
extern crate std;

pub mod backing;
pub mod buffer;
pub mod error;
pub mod ids;
pub mod pmem;
pub mod range;
pub mod request;
pub mod safeguard;
pub mod size;

pub use backing::{BackingGeometry, BackingOp, BackingQueue, OpToken};
pub use buffer::{AlignedBuffer, SpareBuffers};
pub use error::{Context, Error, ErrorKind, Result};
pub use ids::{BackendId, BlkdevId, BootId, Epoch, HostId, LaneId, Ordinal, SegmentId, Sequence, uuid_text};
pub use pmem::{Durability, Durable, InFlight, MediaError, Pmem, Region};
pub use range::ByteRange;
pub use request::{Completion, Geometry, Operation, Request};
pub use safeguard::Safeguard;
pub use size::Size;

/// The granule of checksums and of the index: data is checked and found in blocks of this many bytes,
/// aligned as the device is.
pub const CHECKSUM_BLOCK: u64 = 4096;

/// The device's address space is cut into chunks of this many bytes; a chunk belongs to one lane.
pub const CHUNK: u64 = 4 << 20;

/// The smallest logical sector that any backing device or client may have.
pub const SECTOR: u64 = 512;
