//! A write for which the system has no memory: it fails, nothing has changed, and no client waits for an event that never comes.
//!
//! Invariants: only allocations of one size, by a thread that requests it, are refused.
#![allow(unsafe_code, reason = "an allocator that refuses has to be one")]

use cbd_engine::{Admission, BackendSpec, Cache, Environment, FormatOptions, Settings, Transport};
use cbd_sim::{CrashMemory, SimEnvironment, act_as};
use cbd_types::{ByteRange, CHUNK, Durability, ErrorKind, MediaError, Pmem, Region, Result};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

const SEGMENT: u64 = 64 << 10;
const LANES: u64 = 2;
/// More blocks than those whose checksums are on the stack.
const LONG: usize = 16 << 10;
/// Bytes of a slab of the index for blocks that several records cover in parts.
const SLAB: usize = 64 * 64;
/// Bytes of the scratch for the checksums of a long write.
const SCRATCH: usize = 257 * 4;

thread_local! {
    /// The size of the allocations that are refused; 0 for none.
    static REFUSED: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, which refuses allocations of one size while a thread requests it.
struct Scarce;

// SAFETY: it returns what the system's allocator returns, or null, which an allocator may return.
unsafe impl GlobalAlloc for Scarce {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() == REFUSED.with(Cell::get) && layout.size() > 0 {
            return core::ptr::null_mut();
        }
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static SCARCE: Scarce = Scarce;

/// A memory whose next store of data can panic, as a killed thread of the simulator does.
#[derive(Clone)]
struct Panicking {
    inner: CrashMemory,
    armed: Arc<AtomicBool>,
}

impl Pmem for Panicking {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn durability(&self) -> Durability {
        Durability::PowerFail
    }

    fn store(&self, at: u64, from: &[u8]) {
        self.inner.store(at, from);
    }

    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        assert!(!self.armed.swap(false, Ordering::SeqCst), "the thread is killed");
        self.inner.store_summed(at, from, first, checksums);
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        self.inner.store_line(at, line);
    }

    fn fence(&self) {
        self.inner.fence();
    }

    fn load(&self, at: u64, into: &mut [u8]) -> core::result::Result<(), MediaError> {
        self.inner.load(at, into)
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> core::result::Result<u32, MediaError> {
        self.inner.load_summed(at, into)
    }

    fn write_back(&self, at: u64, length: u64) {
        self.inner.write_back(at, length);
    }
}

struct Outside(SimEnvironment);

impl Environment for Outside {
    type Memory = Panicking;
    type Lock = <SimEnvironment as Environment>::Lock;

    fn random(&self) -> u64 {
        self.0.random()
    }

    fn wall_ms(&self) -> u64 {
        self.0.wall_ms()
    }

    fn monotonic_ms(&self) -> u64 {
        self.0.monotonic_ms()
    }
}

#[derive(Default)]
struct Called(AtomicBool);

impl Wake for Called {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A cache with two lanes, and its memory.
fn cache() -> (Arc<Cache<Outside>>, Panicking) {
    act_as(0);
    let segments = 1 + 8 * LANES;
    let memory = Panicking {
        inner: CrashMemory::new((segments + 4) * SEGMENT + (256 << 10)),
        armed: Arc::new(AtomicBool::new(false)),
    };
    let options = FormatOptions {
        segment_size: Some(SEGMENT),
        host_rows: 4,
        backend_rows: 4,
        blkdev_rows: 4,
        ..FormatOptions::default()
    };
    let environment = Arc::new(Outside(SimEnvironment::new(5, 0)));
    let transport = Transport::format(environment, Region::new(memory.clone()), &options).unwrap();
    let backend = transport
        .create_backend(&BackendSpec {
            host: transport.register_host("host", None).unwrap(),
            path: "/dev/simulated".into(),
            identity: "simulated".into(),
            size: LANES * CHUNK,
            sector: 512,
            cache_bytes: Some(segments * SEGMENT),
            lanes_max: LANES as u32,
            handlers: 1,
            data_crc: true,
            settings: Settings::default(),
        })
        .unwrap();
    (transport.open_cache(backend).unwrap(), memory)
}

/// A cache whose lanes have one long write each, and have lost their scratch to writes that panicked.
fn without_scratch() -> Arc<Cache<Outside>> {
    let (cache, memory) = cache();
    for lane in 0..LANES {
        let at = ByteRange::at(lane * CHUNK, LONG as u64);
        assert!(matches!(cache.write(at, &[1; LONG], Waker::noop()), Ok(Admission::Done(_))));
        memory.armed.store(true, Ordering::SeqCst);
        let killed = catch_unwind(AssertUnwindSafe(|| drop(cache.write(at, &[2; LONG], Waker::noop()))));
        assert!(killed.is_err());
    }
    cache
}

/// Does `work` while allocations of `size` bytes are refused.
fn without<T>(size: usize, work: impl FnOnce() -> T) -> T {
    REFUSED.with(|refused| refused.set(size));
    let result = work();
    REFUSED.with(|refused| refused.set(0));
    result
}

#[track_caller]
fn assert_refused(result: Result<Admission>) {
    let error = result.expect_err("a write that waits for no event waits for ever");
    assert_eq!(error.kind(), ErrorKind::System, "{error}");
    assert!(error.line().contains("no memory"), "{error}");
}

#[test]
fn a_long_write_without_memory_for_its_checksums_fails_and_the_next_is_done() {
    let cache = without_scratch();
    let called = Arc::new(Called::default());
    let waker = Waker::from(Arc::clone(&called));
    let (written, at) = (cache.status().written_bytes, ByteRange::at(0, LONG as u64));
    assert_refused(without(SCRATCH, || cache.write(at, &[3; LONG], &waker)));
    // A short write needs none, also in the same lane.
    let short = without(SCRATCH, || cache.write(ByteRange::at(LONG as u64, 4096), &[4; 4096], &waker));
    assert!(matches!(short, Ok(Admission::Done(_))));
    assert_eq!(cache.status().written_bytes, written + 4096, "nothing else has changed");
    assert!(matches!(cache.write(at, &[5; LONG], &waker), Ok(Admission::Done(_))));
    assert!(!cache.status().writers_waiting && !called.0.load(Ordering::SeqCst));
}

#[test]
fn of_writes_that_are_submitted_at_once_only_those_without_memory_fail() {
    let cache = without_scratch();
    let (long, short) = ([6; LONG], [7; 4096]);
    let writes: [(ByteRange, &[u8]); 2] =
        [(ByteRange::at(0, LONG as u64), &long), (ByteRange::at(CHUNK, 4096), &short)];
    let mut results = Vec::with_capacity(2);
    without(SCRATCH, || {
        cache.write_together(&writes, Waker::noop(), |number, result| results.push((number, result)))
    });
    let mut results = results.into_iter();
    let (number, first) = results.next().unwrap();
    assert_eq!(number, 0);
    assert_refused(first);
    assert!(matches!(results.next(), Some((1, Ok(Admission::Done(_))))));
    assert!(!cache.status().writers_waiting);
}

#[test]
fn a_write_without_memory_for_the_index_fails_and_the_next_is_done() {
    let (cache, _) = cache();
    let called = Arc::new(Called::default());
    let waker = Waker::from(Arc::clone(&called));
    let at = ByteRange::at(512, 512);
    assert_refused(without(SLAB, || cache.write(at, &[3; 512], &waker)));
    assert_eq!((cache.status().written_bytes, cache.status().dirty_records), (0, 0), "nothing has changed");
    assert!(matches!(cache.write(at, &[5; 512], &waker), Ok(Admission::Done(_))));
    let mut read = [0; 512];
    cache.read(at, &mut read, &mut Vec::new()).unwrap();
    assert_eq!(read, [5; 512]);
    assert!(!cache.status().writers_waiting && !called.0.load(Ordering::SeqCst));
}
