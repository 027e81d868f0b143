//! The common types of the system, and its interfaces to the environment.
//!
//! Invariants: this crate starts no thread, reads no clock, uses no file descriptor and contains no `unsafe`. The
//! engine uses only these traits, so the same engine runs over real memory and over a simulator that controls crashes,
//! faults and time.
//!
//! Elsewhere: the bytes on media (`cbd-format`), the engine (`cbd-engine`).
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(any(test, feature = "mutants"))]
extern crate std;

pub mod backing;
pub mod buffer;
pub mod error;
pub mod figures;
pub mod ids;
pub mod mutation;
pub mod name;
pub mod pmem;
pub mod range;
pub mod request;
pub mod size;
pub mod sort;
pub mod verify;

pub use backing::{BackingGeometry, BackingOp, BackingQueue, Expected, OpToken, Origin};
pub use buffer::{AlignedBuffer, SpareBuffers};
pub use error::{Context, Error, ErrorKind, Result};
pub use ids::{BackendId, BlkdevId, BootId, Epoch, HostId, LaneId, Ordinal, SegmentId, Sequence, uuid_text};
pub use mutation::MutationPoint;
pub use name::Name;
pub use pmem::{Durability, Durable, InFlight, MediaError, Pmem, Reach, Region};
pub use range::ByteRange;
pub use request::{Class, Completion, Geometry, Operation, Request, TakeBack};
pub use size::Size;
pub use verify::{DamagedCopy, Finding, Flaw, Structure, Verified, VerifiedMetadata, Verify, VerifyLevel};

/// The granularity of checksums and of the index: data is verified and looked up in blocks of this many
/// bytes, aligned on the device.
pub const CHECKSUM_BLOCK: u64 = 4096;

/// The device's address space is divided into chunks of this many bytes; a chunk belongs to one lane.
pub const CHUNK: u64 = 4 << 20;

/// The smallest logical sector of a backing device or a client.
pub const SECTOR: u64 = 512;
pub use sort::heap_sort_by_key;
