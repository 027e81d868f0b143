//! What the unit tests of several modules share: memory in a vector that records its operations, and an environment.

extern crate std;

use crate::Environment;
use alloc::{string::String, sync::Arc, vec, vec::Vec};
use cbd_format::crc32c;
use cbd_types::{ByteRange, Durability, Error, ErrorKind, MediaError, Pmem, Region, Result};
use core::sync::atomic::{AtomicUsize, Ordering};
use core::task::Waker;
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
    unreadable: Mutex<Vec<ByteRange>>,
    /// How many of the next syncs fail.
    failing_syncs: AtomicUsize,
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
            unreadable: Mutex::default(),
            failing_syncs: AtomicUsize::new(0),
            mixes_pages,
        }
    }

    /// The operations since the last call.
    pub(crate) fn take_ops(&self) -> Vec<Op> {
        core::mem::take(&mut *self.ops.lock().expect("no panic"))
    }

    /// Loads that touch `range` fail from now on.
    pub(crate) fn fail(&self, range: ByteRange) {
        self.unreadable.lock().expect("no panic").push(range);
    }

    pub(crate) fn fail_syncs(&self, count: usize) {
        self.failing_syncs.store(count, Ordering::Relaxed);
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

    fn mixes_pages(&self) -> bool {
        self.mixes_pages
    }

    fn sync(&self, at: u64, length: u64) -> Result<()> {
        self.note(Op::Sync(at, length));
        let left = self.failing_syncs.load(Ordering::Relaxed);
        self.failing_syncs.store(left.saturating_sub(1), Ordering::Relaxed);
        if left > 0 { Err(Error::new(ErrorKind::System, "the test fails it")) } else { Ok(()) }
    }

    fn describe(&self) -> String {
        String::from("a vector")
    }
}

/// An environment whose clocks stand still.
pub(crate) struct Still;

impl Environment for Still {
    type Memory = Ram;
    type Lock = parking_lot::RawMutex;

    fn random(&self) -> u64 {
        7
    }

    fn wall_ms(&self) -> u64 {
        1_780_000_000_000
    }

    fn monotonic_ms(&self) -> u64 {
        0
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
