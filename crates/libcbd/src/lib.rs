//! The engine as a library: open a region of persistent memory, attach a disk, read and write.
//!
//! A write is durable in the region when the call returns, some hundreds of nanoseconds later, and reaches
//! the disk in the background. There is no daemon, no system call and no copy between the program and the
//! engine. `cbd.h` offers the same to C ([`c`]).
//!
//! Invariants:
//! - a region has one owner: an open is refused, with the owner's name, if a daemon or another process has
//!   the region;
//! - tables and logs are those of the daemon: the library and the daemon can open each other's regions, one
//!   after the other;
//! - any number of threads may use a [`Device`]; one thread at a time may use a [`Queue`];
//! - a drop marks the cache, and leaves dirty data in the region; after a crash the next process that opens
//!   it recovers every acknowledged write, whichever process wrote it;
//! - when a thread panics inside the library, the device refuses every later request, and marks nothing that
//!   may be incomplete.
//!
//! Elsewhere: the execution of requests (`cbd-engine`), exports for other processes (the daemon).
//!
//! ```
//! # fn main() -> cbd::Result<()> {
//! # let dir = tempfile::tempdir().unwrap();
//! # let disk = dir.path().join("disk");
//! # std::fs::File::create(&disk).unwrap().set_len(64 << 20).unwrap();
//! # let path = dir.path().join("region");
//! use cbd::{DeviceOptions, Region, RegionOptions};
//!
//! let region = Region::open(&path, &RegionOptions::format(64 << 20))?;
//! let options = DeviceOptions { cache_size: Some(32 << 20), ..DeviceOptions::default() };
//! let device = region.attach(&disk, &options)?;
//! device.write_at(&[7; 4096], 8192)?; // durable now
//! let mut block = [0; 4096];
//! device.read_at(&mut block, 8192)?;
//! assert_eq!(block, [7; 4096]);
//! device.close()?; // dirty data stays in the region; `detach` drains it to the disk instead
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod c;
mod device;
mod queue;
mod region;
mod verify;

pub use cbd_engine::{
    BackendEntry, BackingTrouble, CacheStatus, Consistency, DamagedRange, OnWriteError, Settings,
};
pub use cbd_pmem::Kind as RegionKind;
pub use cbd_runtime::DrainProgress;
pub use cbd_types::{
    AlignedBuffer, BackendId, ByteRange, Completion, Durability, Error, ErrorKind, Finding, Flaw, Geometry,
    Operation, Request, Result, Verified, Verify, VerifyLevel,
};
pub use device::{DRAIN_TIMEOUT, Device};
pub use queue::Queue;
pub use region::{DeviceOptions, Format, Region, RegionInfo, RegionOptions};
pub use verify::QUEUED_VERIFY_MAX;
