//! The cache in front of a backing device: lanes with a log and an index each, reads, writes, flushes, discards, writeback,
//! reclaim and recovery; and the tables of the transport on which caches are.
//!
//! Invariants:
//! - the engine starts no thread, waits for no time and uses no descriptor: it reaches the outside through [`Environment`] and
//!   the ports in `cbd-types`, so a simulator runs the very same engine;
//! - code that acknowledges a request holds a [`Durable`](cbd_types::Durable), and only a fence makes one;
//! - a lane's lock is taken before the pool's and after the flush pass's; besides, only leaf locks are taken inside it (the
//!   settings, the waker of the background worker, the last result of the backing device), under which no other lock is taken.
//!
//! Elsewhere: bytes on media (`cbd-format`), requests that wait (`cbd-device`), threads (`cbd-daemon`).
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod agreement;
mod base;
mod bypass;
mod cache;
mod context;
mod epochs;
mod lane;
mod lane_map;
mod members;
mod metadata;
mod pins;
mod position;
mod rangemap;
mod rare;
mod recovery;
mod repair;
mod settings;
mod slots;
mod sync;
#[cfg(test)]
mod tests;
mod transport;
mod worker;

pub use bypass::{BypassReason, Bypassed};
pub use cache::{
    Admission, BYPASS_MAX, BackingTrouble, BatchedWrite, Bypass, BypassTicket, Cache, CacheMap, CacheStatus,
    CachedState, CommonMoment, Comparison, DamagedRange, FlushTicket, Holding, IndexResize, LogEntry,
    LogSegmentView, LogView, MAP_CELLS_MAX, MapCell, Miss, Pace, PaceReason, Part, Repair, Shrink, TOGETHER,
    ZeroProgress,
};
pub use cbd_format::{Pin, PinKind, crc32c};
pub use lane::{HitCurve, RANKS};
pub use members::{Beat, Host, Life, Member, Members, Proof};
pub use metadata::MetadataPlace;
pub use rare::RarePaths;
pub use repair::copy_over;
pub use settings::{CacheMode, Consistency, OnWriteError, ReadFill, Readahead, Settings, WhenFull};
pub use slots::TwoSlots;
pub use transport::{
    BackendEntry, BackendSpec, BlkdevEntry, BlkdevSpec, CACHE_SIZE_MIN, ChannelArea, FormatOptions,
    FormerDisk, HostEntry, Mixed, MoveAnswer, MoveOffer, MoveRefusal, MoveState, MoveWish, Pages,
    RemoteBlkdev, RemoteState, ServedBlkdev, SharedSpace, StoredPins, Transport, TransportInfo, owner,
};
pub use worker::{BackgroundWorker, REQUEST_MAX, Step};

use cbd_types::Pmem;

/// What the engine needs from the outside besides disks.
pub trait Environment: Send + Sync + 'static {
    /// The region's memory.
    type Memory: Pmem + 'static;
    /// The lock of lanes, pool and tables.
    type Lock: lock_api::RawMutex + Send + Sync + 'static;

    /// A random number, for salts, identities and the seed of indexes. It must not repeat, and clients must not be able to predict it.
    fn random(&self) -> u64;

    /// Milliseconds since 1970 UTC; only to report to people when something happened. It may be set back.
    fn wall_ms(&self) -> u64;

    /// Milliseconds since an arbitrary moment; never decreases.
    fn monotonic_ms(&self) -> u64;

    /// The same in microseconds, as exactly as the environment knows; only to measure latencies.
    fn monotonic_us(&self) -> u64 {
        self.monotonic_ms().saturating_mul(1000)
    }

    /// The same in nanoseconds; only to measure short waits.
    fn monotonic_ns(&self) -> u64 {
        self.monotonic_us().saturating_mul(1000)
    }

    /// Calls `work` with each number below `count` and returns when all calls have returned. Runs on several threads at once if
    /// the environment has them.
    fn each(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(work);
    }

    /// How often a client's request tries to lock a lane that another thread holds before it sleeps.
    const SPINS: u32 = 0;

    /// Prefetches the line of ordinary memory at `at`. A hint: no instruction waits for it.
    #[inline(always)]
    fn prefetch(_at: *const u8) {}

    /// Called before each access to a number that threads share without a lock. A model that schedules threads lets another
    /// thread run first here; in other environments it does nothing and costs nothing.
    #[inline(always)]
    fn before_shared_access() {}
}

/// A mutex of the environment.
pub(crate) type Mutex<E, T> = lock_api::Mutex<<E as Environment>::Lock, T>;
