//! The engine in a program: open a region of persistent memory, put it in front of a disk, read and write.
//!
//! A write is durable in the region when the call returns, some hundreds of nanoseconds later, and reaches the disk in the
//! background. There is no daemon, no system call and no copy between the program and the engine. From C the same is in `cbd.h`
//! ([`c`]).
//!
//! Always true here:
//! - a region has one owner: a process that opens one that a daemon or another process has is refused, with who it is;
//! - tables and logs are the daemon's own: what the library made the daemon can open, and the reverse, one after the other;
//! - a [`Device`] may be used by any number of threads; a [`Queue`] belongs to one at a time;
//! - dropping marks, and leaves what is dirty in the region; after a crash the next who opens it recovers all that was
//!   acknowledged, whoever that is;
//! - when a thread panics inside, the device refuses everything from then on, and marks nothing that it cannot vouch for.
//!
//! Left to others: what a request does (`cbd-engine`), doors for other processes (the daemon).
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
//! let device = region.attach(&disk, &DeviceOptions { cache_size: Some(32 << 20), ..DeviceOptions::default() })?;
//! device.write_at(&[7; 4096], 8192)?; // durable now
//! let mut block = [0; 4096];
//! device.read_at(&mut block, 8192)?;
//! assert_eq!(block, [7; 4096]);
//! device.close()?; // what is dirty stays in the region; `detach` drains instead, and the disk is a plain disk again
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod c;
mod device;
mod queue;
mod region;

pub use cbd_engine::{
    BackendEntry, BackingTrouble, CacheStatus, Consistency, DamagedRange, OnWriteError, Settings,
};
pub use cbd_pmem::Kind as RegionKind;
pub use cbd_runtime::DrainProgress;
pub use cbd_types::{
    AlignedBuffer, BackendId, ByteRange, Completion, Durability, Error, ErrorKind, Geometry, Operation,
    Request, Result,
};
pub use device::{DRAIN_PATIENCE, Device};
pub use queue::Queue;
pub use region::{DeviceOptions, Format, Region, RegionInfo, RegionOptions};
