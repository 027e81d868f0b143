//! What the unit tests of several modules share: memory in a vector that records its operations, and an environment.

extern crate std;

mod bypass;
mod classes;
mod damaged;
mod index_size;
mod log;
mod losses;
mod map;
mod metadata;
mod mode;
mod model;
mod moment;
mod requests;
pub(crate) mod rig;
mod states;
mod trouble;
mod verify;
mod writeback;

use crate::Environment;
use alloc::{string::String, sync::Arc, vec, vec::Vec};
use cbd_format::crc32c;
use cbd_types::{BootId, ByteRange, Durability, Error, ErrorKind, MediaError, Pmem, Region, Result};
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use core::task::Waker;
pub(crate) use model::marked;
use std::sync::Mutex;
use std::task::Wake;

/// What the memory was asked to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Op {
    /// So many bytes were stored there.
    Store(u64, u64),
    Fence,
    WriteBack(u64, u64),
    Sync(u64, u64),
}

/// Memory in a vector.
pub(crate) struct Ram {
    bytes: Mutex<Vec<u8>>,
    ops: Mutex<Vec<Op>>,
    /// What was loaded: where, and how many bytes.
    loads: Mutex<Vec<(u64, u64)>>,
    unreadable: Mutex<Vec<ByteRange>>,
    /// How many of the next syncs fail.
    failing_syncs: AtomicUsize,
    /// So many syncs succeed, and the one behind them fails.
    good_syncs: AtomicUsize,
    /// So many stores succeed; all later ones count as failed.
    good_stores: AtomicUsize,
    has_failed: AtomicBool,
    boot: AtomicU8,
    mixes_pages: bool,
}

impl Ram {
    pub(crate) fn region(size: usize) -> Region<Self> {
        Region::new(Self::new(size, false))
    }

    pub(crate) fn new(size: usize, mixes_pages: bool) -> Self {
        Self {
            bytes: Mutex::new(vec![0; size]),
            ops: Mutex::default(),
            loads: Mutex::default(),
            unreadable: Mutex::default(),
            failing_syncs: AtomicUsize::new(0),
            good_syncs: AtomicUsize::new(usize::MAX),
            good_stores: AtomicUsize::new(usize::MAX),
            has_failed: AtomicBool::new(false),
            boot: AtomicU8::new(1),
            mixes_pages,
        }
    }

    /// The operations since the last call.
    pub(crate) fn take_ops(&self) -> Vec<Op> {
        core::mem::take(&mut *self.ops.lock().expect("no panic"))
    }

    /// The loads since the last call.
    pub(crate) fn take_loads(&self) -> Vec<(u64, u64)> {
        core::mem::take(&mut *self.loads.lock().expect("no panic"))
    }

    /// Loads that touch `range` fail from now on.
    pub(crate) fn fail(&self, range: ByteRange) {
        self.unreadable.lock().expect("no panic").push(range);
    }

    pub(crate) fn fail_syncs(&self, count: usize) {
        self.failing_syncs.store(count, Ordering::Relaxed);
    }

    /// The sync behind the next `count` fails.
    pub(crate) fn fail_sync_after(&self, count: usize) {
        self.good_syncs.store(count, Ordering::Relaxed);
    }

    /// The memory becomes larger; the new bytes are `byte`.
    pub(crate) fn extend(&self, size: u64, byte: u8) {
        self.bytes.lock().expect("no panic").resize(size as usize, byte);
    }

    /// Memory with the same bytes.
    pub(crate) fn copy(&self) -> Self {
        self.copy_to(self.mixes_pages)
    }

    /// Another kind of memory with the same bytes.
    pub(crate) fn copy_to(&self, mixes_pages: bool) -> Self {
        let copy = Self::new(0, mixes_pages);
        *copy.bytes.lock().expect("no panic") = self.bytes.lock().expect("no panic").clone();
        copy
    }

    /// The machine was started again.
    pub(crate) fn set_boot(&self, boot: u8) {
        self.boot.store(boot, Ordering::Relaxed);
    }

    /// All stores but the next `count` fail.
    pub(crate) fn fail_stores_after(&self, count: usize) {
        self.good_stores.store(count, Ordering::Relaxed);
    }

    fn note(&self, op: Op) {
        self.ops.lock().expect("no panic").push(op);
    }
}

impl Pmem for Ram {
    fn len(&self) -> u64 {
        self.bytes.lock().expect("no panic").len() as u64
    }

    fn durability(&self) -> Durability {
        Durability::ProcessCrash
    }

    fn store(&self, at: u64, from: &[u8]) {
        self.note(Op::Store(at, from.len() as u64));
        let left = self.good_stores.load(Ordering::Relaxed);
        if left == 0 {
            self.has_failed.store(true, Ordering::Relaxed);
            return;
        }
        if left < usize::MAX {
            self.good_stores.store(left - 1, Ordering::Relaxed);
        }
        self.bytes.lock().expect("no panic")[at as usize..][..from.len()].copy_from_slice(from);
    }

    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        self.store(at, from);
        let (head, rest) = from.split_at(first.min(from.len()));
        let blocks = core::iter::once(head).chain(rest.chunks(4096));
        checksums.iter_mut().zip(blocks).for_each(|(sum, block)| *sum = crc32c(block));
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        self.store(at, line);
    }

    fn fence(&self) {
        self.note(Op::Fence);
    }

    fn load(&self, at: u64, into: &mut [u8]) -> core::result::Result<(), MediaError> {
        let range = ByteRange::at(at, into.len() as u64);
        self.loads.lock().expect("no panic").push((at, range.len()));
        if self.unreadable.lock().expect("no panic").iter().any(|failed| failed.overlaps(&range)) {
            return Err(MediaError { at });
        }
        into.copy_from_slice(&self.bytes.lock().expect("no panic")[at as usize..][..into.len()]);
        Ok(())
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> core::result::Result<u32, MediaError> {
        self.load(at, into)?;
        Ok(crc32c(into))
    }

    fn write_back(&self, at: u64, length: u64) {
        self.note(Op::WriteBack(at, length));
    }

    fn failed_at(&self) -> Option<u64> {
        self.has_failed.load(Ordering::Relaxed).then_some(0)
    }

    fn boot(&self) -> BootId {
        BootId([self.boot.load(Ordering::Relaxed); 16])
    }

    fn mixes_pages(&self) -> bool {
        self.mixes_pages
    }

    fn sync(&self, at: u64, length: u64) -> Result<()> {
        self.note(Op::Sync(at, length));
        let left = self.failing_syncs.load(Ordering::Relaxed);
        self.failing_syncs.store(left.saturating_sub(1), Ordering::Relaxed);
        // Down to the one that fails, and below 0 to MAX: never again.
        let good = self.good_syncs.load(Ordering::Relaxed);
        if good < usize::MAX {
            self.good_syncs.store(good.wrapping_sub(1), Ordering::Relaxed);
        }
        let left = left.max(usize::from(good == 0));
        if left > 0 { Err(Error::new(ErrorKind::System, "the test fails it")) } else { Ok(()) }
    }

    fn describe(&self) -> String {
        String::from("a vector")
    }
}

/// An environment whose clocks stand still until they are set.
pub(crate) struct Still {
    random: AtomicU64,
    wall_ms: AtomicU64,
    monotonic_ms: AtomicU64,
}

/// What the wall clock shows at first.
pub(crate) const WALL_MS: u64 = 1_780_000_000_000;

/// The first random number; each is two more than the one before it.
pub(crate) const FIRST_RANDOM: u64 = 1000;

impl Default for Still {
    fn default() -> Self {
        Self {
            random: AtomicU64::new(FIRST_RANDOM),
            wall_ms: AtomicU64::new(WALL_MS),
            monotonic_ms: AtomicU64::new(0),
        }
    }
}

impl Still {
    pub(crate) fn set_wall(&self, ms: u64) {
        self.wall_ms.store(ms, Ordering::Relaxed);
    }

    pub(crate) fn set_monotonic(&self, ms: u64) {
        self.monotonic_ms.store(ms, Ordering::Relaxed);
    }
}

impl Environment for Still {
    type Memory = Ram;
    type Lock = parking_lot::RawMutex;

    fn random(&self) -> u64 {
        self.random.fetch_add(2, Ordering::Relaxed)
    }

    fn wall_ms(&self) -> u64 {
        self.wall_ms.load(Ordering::Relaxed)
    }

    fn monotonic_ms(&self) -> u64 {
        self.monotonic_ms.load(Ordering::Relaxed)
    }
}

/// Counts its wakeups.
#[derive(Default)]
pub(crate) struct Bell(AtomicUsize);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Bell {
    pub(crate) fn rings(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// A bell and a waker that rings it.
pub(crate) fn bell() -> (Arc<Bell>, Waker) {
    let bell = Arc::new(Bell::default());
    (Arc::clone(&bell), Waker::from(bell))
}
