//! Memory that fails during a store, such as a page that is unavailable or poisoned: data that was not stored is
//! never acknowledged, and no acknowledged data is lost.

use cbd_device::{Device, Queue};
use cbd_engine::{
    Admission, BackendSpec, BackgroundWorker, Cache, Environment, FormatOptions, Settings, Step, Transport,
    ZeroProgress,
};
use cbd_sim::{CrashMemory, Keep, SimDisk, SimEnvironment, SimQueue, act_as};
use cbd_types::{
    AlignedBuffer, BackendId, BackingGeometry, ByteRange, Durability, ErrorKind, MediaError, Operation, Pmem,
    Region, Request, Result,
};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::task::Waker;

const PAGE: u64 = 4096;
const BLOCK: u64 = 4096;
const SEGMENT: u64 = 64 << 10;
const SEGMENTS: u64 = 9;
const DEVICE: u64 = 4 << 20;

/// A memory with pages that fail stores and write-backs, as the kernel leaves a poisoned page. Clones share it.
#[derive(Clone)]
struct FailingMemory {
    inner: CrashMemory,
    failing: Arc<Mutex<BTreeSet<u64>>>,
    failed: Arc<Mutex<Option<u64>>>,
}

impl FailingMemory {
    fn new(inner: CrashMemory) -> Self {
        Self { inner, failing: Arc::default(), failed: Arc::default() }
    }

    fn fail(&self, range: ByteRange) {
        self.failing.lock().extend(range.split_at_multiples(PAGE).map(|page| page.start / PAGE));
    }

    /// Whether an access of `length` bytes at `at` succeeds; a failure is recorded, as a mapping does.
    fn takes(&self, at: u64, length: u64) -> bool {
        let failing = self.failing.lock();
        let touches_failing = ByteRange::at(at, length)
            .split_at_multiples(PAGE)
            .any(|page| failing.contains(&(page.start / PAGE)));
        if touches_failing {
            self.failed.lock().get_or_insert(at);
        }
        !touches_failing
    }
}

impl Pmem for FailingMemory {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn durability(&self) -> Durability {
        Durability::PowerFail
    }

    fn store(&self, at: u64, from: &[u8]) {
        if self.takes(at, from.len() as u64) {
            self.inner.store(at, from);
        }
    }

    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        if self.takes(at, from.len() as u64) {
            self.inner.store_summed(at, from, first, checksums);
        }
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        if self.takes(at, 64) {
            self.inner.store_line(at, line);
        }
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
        if self.takes(at, length) {
            self.inner.write_back(at, length);
        }
    }

    fn failed_at(&self) -> Option<u64> {
        *self.failed.lock()
    }
}

/// The simulated environment on such a memory.
struct Outside(SimEnvironment);

impl Environment for Outside {
    type Memory = FailingMemory;
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

struct Small {
    environment: Arc<Outside>,
    memory: FailingMemory,
    disk: SimDisk,
    transport: Arc<Transport<Outside>>,
    backend: BackendId,
    cache: Arc<Cache<Outside>>,
}

impl Small {
    fn new() -> Self {
        Self::with_lanes(1)
    }

    /// A cache with a chunk and eight segments for each lane.
    fn with_lanes(lanes: u64) -> Self {
        act_as(0);
        let segments = 1 + lanes * (SEGMENTS - 1);
        let memory = FailingMemory::new(CrashMemory::new((segments + 4) * SEGMENT + (256 << 10)));
        let disk = SimDisk::new(SimDisk::ordinary(lanes * DEVICE, 512), 3);
        let environment = Arc::new(Outside(SimEnvironment::new(5, 0)));
        let options = FormatOptions { segment_size: Some(SEGMENT), ..FormatOptions::default() };
        let transport =
            Transport::format(Arc::clone(&environment), Region::new(memory.clone()), &options).unwrap();
        let host = transport.register_host("host", None).unwrap();
        let backend = transport
            .create_backend(&BackendSpec {
                host,
                path: "/dev/simulated".into(),
                identity: "simulated".into(),
                size: lanes * DEVICE,
                sector: 512,
                cache_bytes: Some(segments * SEGMENT),
                lanes_max: lanes as u32,
                handlers: 1,
                data_crc: true,
                settings: Settings::default(),
            })
            .unwrap();
        let cache = transport.open_cache(backend).unwrap();
        Self { environment, memory, disk, transport, backend, cache }
    }

    /// A background worker whose disk needs no flush, so it marks data clean in the step that has written it.
    fn worker(&self) -> BackgroundWorker<Outside, SimQueue> {
        let geometry = BackingGeometry { volatile_cache: false, ..self.disk.geometry() };
        BackgroundWorker::new(Arc::clone(&self.cache), self.disk.queue(4), geometry)
    }

    fn write(&self, at: u64, value: u8) -> Result<()> {
        let data = vec![value; BLOCK as usize];
        let admission = self.cache.write(ByteRange::at(at, BLOCK), &data, Waker::noop())?;
        assert!(matches!(admission, Admission::Done(_)), "there is space");
        Ok(())
    }

    /// The first byte of the block at `at`; a miss is read from the disk.
    fn read(&self, at: u64) -> Result<u8> {
        let (mut bytes, mut misses) = (vec![0; BLOCK as usize], Vec::new());
        self.cache.read(ByteRange::at(at, BLOCK), &mut bytes, &mut misses)?;
        let is_missed = !misses.is_empty();
        misses.into_iter().for_each(|miss| self.cache.cancel_fill(miss));
        Ok(if is_missed { self.disk.contents().sector(at / 512, 512)[0] } else { bytes[0] })
    }

    /// First byte of the segment that holds the only log.
    fn log(&self) -> u64 {
        let image = self.memory.inner.image();
        let area = self.transport.info().layout.segment_area;
        (1..SEGMENTS)
            .map(|segment| area + segment * SEGMENT)
            .find(|base| &image[*base as usize + 4..*base as usize + 8] == b"CBDl")
            .expect("something was written")
    }

    /// Cuts the power; afterwards no store fails.
    fn restart(self) -> Self {
        let failing = BTreeSet::new();
        self.restart_with(failing)
    }

    /// Cuts the power; stores to these pages still fail.
    fn restart_with(self, failing: BTreeSet<u64>) -> Self {
        let Self { memory, disk, transport, backend, cache, .. } = self;
        drop((cache, transport));
        disk.process_crash(7);
        let memory = FailingMemory::new(memory.inner.power_cut(11, Keep::Nothing));
        *memory.failing.lock() = failing;
        let environment = Arc::new(Outside(SimEnvironment::new(6, 0)));
        let transport = Transport::open(Arc::clone(&environment), Region::new(memory.clone())).unwrap();
        let cache = transport.open_cache(backend).unwrap();
        Self { environment, memory, disk, transport, backend, cache }
    }
}

#[test]
fn a_write_whose_record_was_not_stored_costs_nothing_else() {
    let small = Small::new();
    for block in 0..3 {
        small.write(block * BLOCK, 1 + block as u8).unwrap();
    }
    small.cache.flush().unwrap();
    // Both copies of all further records of the first page pair fail; a record in the next pair would be
    // stored.
    let log = small.log();
    small.memory.fail(ByteRange::at(log + PAGE, 2 * PAGE));
    for sector in 100..170 {
        let range = ByteRange::at(sector * 512, 512);
        assert_eq!(small.cache.write(range, &[9; 512], Waker::noop()).unwrap_err().kind(), ErrorKind::Media);
        assert_eq!(small.cache.flush().unwrap_err().kind(), ErrorKind::Media);
    }
    assert!(small.cache.force_unit_access(&[ByteRange::at(0, BLOCK)]).is_err());
    small.cache.stop();
    let small = small.restart();
    assert_eq!(small.cache.status().damaged, [], "nothing that was acknowledged is lost");
    for block in 0..3 {
        assert_eq!(small.read(block * BLOCK).unwrap(), 1 + block as u8);
    }
    small.read(100 * BLOCK).unwrap();
}

#[test]
fn writes_that_share_a_fence_with_one_whose_record_was_not_stored_are_not_acknowledged() {
    let small = Small::with_lanes(3);
    for lane in 0..3 {
        small.write(lane * DEVICE, 1 + lane as u8).unwrap();
    }
    small.cache.flush().unwrap();
    // The first segment with a log belongs to lane 0, which is second in the batch.
    small.memory.fail(ByteRange::at(small.log() + PAGE, 2 * PAGE));
    let data = [9; BLOCK as usize];
    let writes = [1, 0, 2].map(|lane| (ByteRange::at(lane * DEVICE + BLOCK, BLOCK), &data[..]).into());
    let mut results = Vec::new();
    small.cache.write_together(cbd_types::Class::Unmarked, &writes, Waker::noop(), |number, result| {
        results.push((number, result.unwrap_err().kind()));
    });
    assert_eq!(results, [0, 1, 2].map(|number| (number, ErrorKind::Media)));
    small.cache.stop();
    let small = small.restart();
    assert_eq!(small.cache.status().damaged, [], "nothing that was acknowledged is lost");
    for lane in 0..3 {
        assert_eq!(small.read(lane * DEVICE).unwrap(), 1 + lane as u8);
    }
}

#[test]
fn no_record_follows_a_record_of_a_write_batch_that_was_not_stored() {
    let small = Small::with_lanes(2);
    for lane in 0..2 {
        small.write(lane * DEVICE, 1 + lane as u8).unwrap();
    }
    small.cache.flush().unwrap();
    // As above: a record in the next page pair of lane 0 would be stored.
    small.memory.fail(ByteRange::at(small.log() + PAGE, 2 * PAGE));
    for sector in 100..170 {
        let writes =
            [0, 1].map(|lane| (ByteRange::at(lane * DEVICE + sector * 512, 512), &[9; 512][..]).into());
        small.cache.write_together(cbd_types::Class::Unmarked, &writes, Waker::noop(), |_, result| {
            assert_eq!(result.unwrap_err().kind(), ErrorKind::Media);
        });
    }
    small.cache.stop();
    let small = small.restart();
    assert_eq!(small.cache.status().damaged, [], "nothing that was acknowledged is lost");
    for lane in 0..2 {
        assert_eq!(small.read(lane * DEVICE).unwrap(), 1 + lane as u8);
    }
}

/// The results of a FUA write, a plain write and another FUA write of a client, submitted at once, while stores to
/// `failing` fail.
fn fua_at_once(failing: impl Fn(&Small) -> ByteRange) -> [Option<ErrorKind>; 3] {
    let small = Small::with_lanes(3);
    for lane in 0..3 {
        small.write(lane * DEVICE, 7).unwrap();
    }
    small.memory.fail(failing(&small));
    let device = Arc::new(Device::cached(Arc::clone(&small.cache), small.disk.geometry()));
    let mut queue = Queue::new(device, small.disk.queue(4), Waker::noop().clone());
    let mut done = Vec::new();
    for lane in 0..3 {
        let range = ByteRange::at(lane * DEVICE + BLOCK, BLOCK);
        let buffer = AlignedBuffer::zeroed(BLOCK as usize);
        let request = Request::unmarked(lane, Operation::Write, range, lane != 1, buffer);
        queue.submit_plugged(request, &mut done);
    }
    queue.unplug(&mut done);
    assert_eq!((done.len(), queue.parked()), (3, 0));
    done.sort_unstable_by_key(|completion| completion.id);
    [0, 1, 2].map(|id| done[id].result.as_ref().err().map(cbd_types::Error::kind))
}

#[test]
fn a_client_gets_an_error_for_each_write_of_a_batch_that_was_not_stored() {
    let ends = fua_at_once(|small| ByteRange::at(small.log() + PAGE, 2 * PAGE));
    assert_eq!(ends, [Some(ErrorKind::Media); 3]);
}

#[test]
fn a_client_gets_an_error_for_each_fua_write_of_a_batch_whose_mark_was_not_stored() {
    // The state of the cache is in its first segment.
    let ends = fua_at_once(|small| ByteRange::at(small.transport.info().layout.segment_area, SEGMENT));
    assert_eq!(ends, [Some(ErrorKind::Media), None, Some(ErrorKind::Media)], "the plain write needs none");
}

#[test]
fn zeroes_whose_record_was_not_stored_are_not_acknowledged() {
    for discard in [false, true] {
        let small = Small::new();
        small.write(0, 7).unwrap();
        small.memory.fail(ByteRange::at(small.log() + PAGE, 2 * PAGE));
        let range = ByteRange::at(0, BLOCK);
        let zeroed = small.cache.zero(range, discard, &mut ZeroProgress::default(), Waker::noop());
        assert_eq!(zeroed.unwrap_err().kind(), ErrorKind::Media);
    }
}

#[test]
fn a_fua_write_whose_mark_was_not_stored_is_not_acknowledged() {
    let small = Small::new();
    small.write(0, 7).unwrap();
    // The state of the cache is in its first segment.
    small.memory.fail(ByteRange::at(small.transport.info().layout.segment_area, SEGMENT));
    let forced = small.cache.force_unit_access(&[ByteRange::at(0, BLOCK)]);
    assert_eq!(forced.unwrap_err().kind(), ErrorKind::Media);
}

#[test]
fn damage_that_cannot_be_noted_is_not_declared_clean() {
    let small = Small::new();
    small.write(0, 7).unwrap();
    let log = small.log();
    // The data is damaged, and the page pair accepts no further record.
    small.memory.inner.flip(log + SEGMENT - PAGE - BLOCK + 100, 3);
    small.memory.fail(ByteRange::at(log + PAGE, 2 * PAGE));
    let mut worker = small.worker();
    small.cache.request_drain();
    for _ in 0..1000 {
        if worker.step() == (Step::Idle { until_ms: None }) {
            break;
        }
    }
    let small = small.restart();
    assert_eq!(small.read(0).unwrap_err().kind(), ErrorKind::Media, "the disk has the old content");
}

#[test]
fn damage_that_cannot_be_carried_keeps_its_segment() {
    let small = Small::new();
    small.write(0, 7).unwrap();
    let log = small.log();
    small.memory.inner.flip(log + SEGMENT - PAGE - BLOCK + 100, 3);
    let mut worker = small.worker();
    let mut settle = |gc_percent| {
        small.cache.set_settings(Settings { gc_percent, ..Settings::default() }).unwrap();
        small.cache.request_drain();
        let mut is_at_rest = || match worker.step() {
            Step::Idle { until_ms } => {
                small.environment.0.advance(1000);
                until_ms.is_none()
            }
            Step::Busy | Step::WaitBacking => false,
        };
        (0..1000).find(|_| is_at_rest()).expect("it becomes idle");
    };
    settle(90);
    for block in 1..20 {
        small.write(block * BLOCK, 8).unwrap();
    }
    // Only the segment with the quarantine is behind the open one, which accepts no records now.
    small.memory.fail(ByteRange::at(log + SEGMENT, SEGMENTS * SEGMENT));
    settle(0);
    let small = small.restart();
    assert_eq!(small.read(0).unwrap_err().kind(), ErrorKind::Media, "the disk has the old content");
}

#[test]
fn a_change_of_a_table_that_was_not_stored_is_an_error() {
    let small = Small::new();
    let layout = small.transport.info().layout;
    small.memory.fail(ByteRange::at(layout.backend_area, layout.blkdev_area - layout.backend_area));
    let changed =
        small.transport.update_settings(small.backend, Settings { gc_percent: 3, ..Settings::default() });
    assert_eq!(changed.unwrap_err().kind(), ErrorKind::Media);
}

/// Whichever page of the cache fails, a cache that could not be emptied counts as moved, or is as it was.
#[test]
fn a_cache_that_could_not_be_emptied_is_not_served() {
    let mut failed = 0;
    for segment in 0..SEGMENTS + 4 {
        for page in [0, SEGMENT / PAGE - 1] {
            let small = Small::new();
            small.write(0, 1).unwrap();
            small.cache.flush().unwrap();
            small.cache.stop();
            let Small { memory, transport, backend, cache, .. } = small;
            drop(cache);
            let area = transport.info().layout.segment_area;
            let at = area + segment * SEGMENT + page * PAGE;
            if at + PAGE > memory.len() {
                continue;
            }
            memory.fail(ByteRange::at(at, PAGE));
            if transport.empty_backend(backend).is_ok() {
                continue;
            }
            failed += 1;
            drop(transport);
            memory.failing.lock().clear();
            *memory.failed.lock() = None;
            let environment = Arc::new(Outside(SimEnvironment::new(6, 0)));
            let transport = Transport::open(environment, Region::new(memory)).unwrap();
            assert!(
                transport.backend(backend).unwrap().is_moved,
                "segment {segment}, page {page}: it would be served"
            );
        }
    }
    assert!(failed > 1, "{failed}");
}

#[test]
fn a_page_that_fails_loads_and_stores_leaves_the_cache_writable_after_a_restart() {
    let small = Small::new();
    for block in 0..3 {
        small.write(block * BLOCK, 1 + block as u8).unwrap();
    }
    small.cache.flush().unwrap();
    // The mirrors of the last records, which recovery relies on and writes back.
    let mirrors = ByteRange::at(small.log() + 2 * PAGE, PAGE);
    small.memory.inner.poison(mirrors);
    let small = small.restart_with(BTreeSet::from([mirrors.start / PAGE]));
    small.write(10 * BLOCK, 8).unwrap();
    for (block, value) in [(0, 1), (1, 2), (2, 3), (10, 8)] {
        assert_eq!(small.read(block * BLOCK).unwrap(), value);
    }
}
