//! A request for which the system has no memory: it fails, nothing has changed, and no client waits for an event that never
//! comes.
//!
//! Invariants: only allocations of one size, or one allocation of a request, are refused, by a thread that asks for it. An
//! allocation that may not fail would end this process.
#![allow(unsafe_code, reason = "an allocator that refuses has to be one")]

use cbd_engine::{
    Admission, BackendSpec, Cache, Environment, FormatOptions, Settings, Transport, ZeroProgress,
};
use cbd_sim::{CrashMemory, SimEnvironment, act_as};
use cbd_types::{ByteRange, CHUNK, Durability, ErrorKind, LaneId, MediaError, Pmem, Region, Result};
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
    /// The number of allocations until the one that is refused.
    static UNTIL_REFUSED: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// The system's allocator, which refuses what a thread has set for itself.
struct Scarce;

// SAFETY: it returns what the system's allocator returns, or null, which an allocator may return.
unsafe impl GlobalAlloc for Scarce {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() == REFUSED.with(Cell::get) && layout.size() > 0 {
            return core::ptr::null_mut();
        }
        let until = UNTIL_REFUSED.with(Cell::get);
        UNTIL_REFUSED.with(|left| left.set(if until == usize::MAX { until } else { until.wrapping_sub(1) }));
        if until == 0 {
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

/// Does what the simulated memory does, whose allocations are not those of a request.
fn not_counted<T>(work: impl FnOnce() -> T) -> T {
    let left = UNTIL_REFUSED.with(|left| left.replace(usize::MAX));
    let result = work();
    UNTIL_REFUSED.with(|until| until.set(left));
    result
}

impl Pmem for Panicking {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn durability(&self) -> Durability {
        Durability::PowerFail
    }

    fn store(&self, at: u64, from: &[u8]) {
        not_counted(|| self.inner.store(at, from));
    }

    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        assert!(!self.armed.swap(false, Ordering::SeqCst), "the thread is killed");
        not_counted(|| self.inner.store_summed(at, from, first, checksums));
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        not_counted(|| self.inner.store_line(at, line));
    }

    fn fence(&self) {
        not_counted(|| self.inner.fence());
    }

    fn load(&self, at: u64, into: &mut [u8]) -> core::result::Result<(), MediaError> {
        not_counted(|| self.inner.load(at, into))
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> core::result::Result<u32, MediaError> {
        not_counted(|| self.inner.load_summed(at, into))
    }

    fn write_back(&self, at: u64, length: u64) {
        not_counted(|| self.inner.write_back(at, length));
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
    let writes =
        [(ByteRange::at(0, LONG as u64), &long[..]).into(), (ByteRange::at(CHUNK, 4096), &short[..]).into()];
    let mut results = Vec::with_capacity(2);
    without(SCRATCH, || {
        cache.write_together(cbd_types::Class::Unmarked, &writes, Waker::noop(), |number, result| {
            results.push((number, result))
        })
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

/// Does `work`, whose allocation `number`, from 0, is refused. Also returns whether it made so many.
fn with_refused<T>(number: usize, work: impl FnOnce() -> T) -> (T, bool) {
    UNTIL_REFUSED.with(|left| left.set(number));
    let result = work();
    // Behind the refused one the count has passed 0.
    let left = UNTIL_REFUSED.with(|left| left.replace(usize::MAX));
    (result, left > number)
}

/// A cache with blocks that are written, blocks that are zero in every second sector, and blocks that it does not hold.
fn mixed() -> Arc<Cache<Outside>> {
    let (cache, _) = cache();
    let write = |at: ByteRange, data: &[u8]| {
        assert!(matches!(cache.write(at, data, Waker::noop()), Ok(Admission::Done(_))));
    };
    write(ByteRange::at(0, 8192), &[1; 8192]);
    for sector in (1..64).step_by(2) {
        let at = ByteRange::at(sector * 512, 512);
        let zeroed = cache.zero(at, false, &mut ZeroProgress::default(), Waker::noop());
        assert!(matches!(zeroed, Ok(Admission::Done(_))));
    }
    for block in (16..32).step_by(2) {
        write(ByteRange::at(block * 4096, 4096), &[2; 4096]);
    }
    cache
}

/// Refuses each allocation of a request in turn. The request completes, or fails and succeeds when it is repeated. Returns the
/// number of refusals that made it fail.
fn refuse_each(
    make: impl Fn() -> Arc<Cache<Outside>>,
    request: impl Fn(&Cache<Outside>) -> Result<bool>,
) -> usize {
    let mut failed = 0;
    for number in 0..200 {
        let cache = make();
        let before = cache.status();
        let (result, was_refused) = with_refused(number, || request(&cache));
        match result {
            Ok(_) if !was_refused => return failed,
            Ok(_) => {}
            Err(error) => {
                assert!(was_refused, "{error}");
                assert_eq!(error.kind(), ErrorKind::System, "{error}");
                assert!(error.line().contains("no memory"), "{error}");
                let after = cache.status();
                assert_eq!(
                    (before.written_bytes, before.dirty_records, before.free_segments),
                    (after.written_bytes, after.dirty_records, after.free_segments)
                );
                assert_eq!(before.writers_waiting, after.writers_waiting);
                request(&cache).expect("there is memory again");
                failed += 1;
            }
        }
    }
    panic!("the request makes more allocations than expected");
}

fn is_done(admission: Result<Admission>) -> Result<bool> {
    admission.map(|admission| matches!(admission, Admission::Done(_)))
}

#[test]
fn every_allocation_of_a_write_can_be_refused() {
    let mut failures = 0;
    for at in [
        // A block of its own, a part of a block, and ranges that cut extents of zeroes in two.
        ByteRange::at(48 * 4096, 4096),
        ByteRange::at(48 * 4096 + 512, 512),
        ByteRange::at(16 << 10, 16 << 10),
        ByteRange::at(512, 1024),
    ] {
        let data = vec![9; at.len() as usize];
        let write = |cache: &Cache<Outside>| {
            let is_written = is_done(cache.write(at, &data, Waker::noop()))?;
            assert!(is_written, "there is space");
            Ok(true)
        };
        failures += refuse_each(mixed, write);
        let cache = mixed();
        write(&cache).unwrap();
        let mut read = vec![0; data.len()];
        cache.read(at, &mut read, &mut Vec::new()).unwrap();
        assert_eq!(read, data);
    }
    assert!(failures >= 2, "{failures}");
}

#[test]
fn a_write_that_seals_a_segment_without_memory_fails() {
    let write = |cache: &Cache<Outside>, block: u64| {
        is_done(cache.write(ByteRange::at(block * 4096, 4096), &[1; 4096], Waker::noop()))
    };
    let failed = (0..24).map(|blocks| {
        let filled = || {
            let (cache, _) = cache();
            (0..blocks).for_each(|block| assert!(write(&cache, block).expect("there is space")));
            cache
        };
        refuse_each(filled, |cache| write(cache, blocks))
    });
    // The list of sealed segments grows at the first one.
    assert!(failed.sum::<usize>() >= 1);
}

#[test]
fn every_allocation_of_a_request_for_zeroes_can_be_refused() {
    for at in
        [ByteRange::at(256 << 10, 512), ByteRange::at(512 * 3 + 100 * 512, 512), ByteRange::at(0, 64 << 10)]
    {
        let zero = |cache: &Cache<Outside>| {
            is_done(cache.zero(at, true, &mut ZeroProgress::default(), Waker::noop()))
        };
        refuse_each(mixed, zero);
        // The first extent of a lane always needs memory.
        assert!(refuse_each(|| cache().0, zero) >= 1, "{at}");
    }
}

#[test]
fn every_allocation_of_a_read_can_be_refused() {
    let at = ByteRange::at(16 * 4096, 16 * 4096);
    let read = |cache: &Cache<Outside>| {
        let (mut data, mut misses) = ([0; 16 * 4096], Vec::new());
        let result = cache.read(at, &mut data, &mut misses);
        assert_eq!(misses.len(), if result.is_ok() { 8 } else { 0 });
        for miss in misses {
            cache.cancel_fill(miss);
        }
        // A segment that stays pinned is never free again.
        not_counted(|| {
            let log = cache.log();
            for segment in (0..LANES as u32).flat_map(|lane| log.segments(LaneId(lane))) {
                assert_eq!(log.readers(&segment), 0, "{segment:?}");
            }
        });
        result.map(|()| data[..4096] == [2; 4096])
    };
    let failed = refuse_each(mixed, read);
    // The list of more than four pieces, and that of the misses.
    assert!(failed >= 2, "{failed}");
}

#[test]
fn every_allocation_of_a_resize_of_the_index_can_be_refused() {
    // Far too small, so that steps need nodes, and far larger.
    for blocks in [1, 9000] {
        let failed = refuse_each(mixed, |cache| {
            let result = cache.resize_index(blocks, || {});
            let mut data = [0; 4096];
            not_counted(|| cache.read(ByteRange::at(18 * 4096, 4096), &mut data, &mut Vec::new())).unwrap();
            assert_eq!(data, [2; 4096], "the cache serves requests as before");
            result.map(|()| true)
        });
        assert!(failed >= 2 * LANES as usize, "{failed}");
    }
}

#[test]
fn a_write_that_cannot_be_added_to_the_wait_list_fails() {
    let full = || {
        let (cache, _) = cache();
        let mut block = 0;
        while let Ok(Admission::Done(_)) =
            cache.write(ByteRange::at(block * 4096, 4096), &[1; 4096], Waker::noop())
        {
            block += 2;
        }
        // The list has memory for four.
        cache.stop_waiting(Waker::noop());
        for _ in 0..4 {
            let waker = Waker::from(Arc::new(Called::default()));
            let waiting = cache.write(ByteRange::at(4096, 4096), &[2; 4096], &waker);
            assert!(matches!(waiting, Ok(Admission::Full)));
        }
        cache
    };
    let write = |cache: &Cache<Outside>| {
        let is_done = is_done(cache.write(ByteRange::at(4096, 4096), &[2; 4096], Waker::noop()))?;
        assert!(!is_done, "it is full");
        cache.stop_waiting(Waker::noop());
        Ok(false)
    };
    assert!(refuse_each(full, write) >= 1);
}
