//! A small cache between whose steps other operations can run.

use crate::meeting::{Meeting, MeetingMemory, forget};
use cbd_engine::{Admission, BackendSpec, BackgroundWorker, Cache, FormatOptions, Settings, Step, Transport};
use cbd_sim::{CrashMemory, Keep, SimDisk, SimEnvironment, SimQueue, Watchdog, act_as};
use cbd_types::{BackendId, ByteRange, Epoch, Region};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

pub const BLOCK: u64 = 4096;
const SEGMENT: u64 = 64 << 10;
/// More moments than any operation here has.
pub const MOMENTS_MAX: u32 = 2000;

/// Actors of stores and fences.
pub const READER: u32 = 1;
pub const WRITER: u32 = 2;
const WORKER: u32 = 3;

pub struct Rig {
    pub environment: Arc<Meeting>,
    pub memory: CrashMemory,
    pub disk: SimDisk,
    pub backend: BackendId,
    pub cache: Arc<Cache<Meeting>>,
    /// Shared, so that the worker can step while a client is between two steps.
    pub worker: Rc<RefCell<BackgroundWorker<Meeting, SimQueue>>>,
    _watchdog: Watchdog,
}

impl Rig {
    /// A cache with `lanes` lanes in front of a device of twice as many chunks.
    pub fn new(lanes: u32) -> Self {
        act_as(0);
        let environment = Arc::new(Meeting(SimEnvironment::new(5, 0)));
        let segments = 1 + 8 * u64::from(lanes);
        let memory = CrashMemory::new((segments + 3) * SEGMENT + (256 << 10));
        let size = 2 * u64::from(lanes) * cbd_types::CHUNK;
        let disk = SimDisk::new(SimDisk::ordinary(size, 512), 3);
        let options = FormatOptions {
            segment_size: Some(SEGMENT),
            force: false,
            host_rows: 2,
            backend_rows: 2,
            blkdev_rows: 2,
        };
        let region = Region::new(MeetingMemory(memory.clone()));
        let transport = Transport::format(Arc::clone(&environment), region, &options).expect("fresh memory");
        let host = transport.register_host("host", None).expect("an empty table");
        let backend = transport
            .create_backend(&BackendSpec {
                host,
                path: "/simulated".into(),
                identity: "simulated".into(),
                size,
                sector: 512,
                cache_bytes: Some(segments * SEGMENT),
                lanes_max: lanes,
                handlers: 1,
                data_crc: true,
                settings: Settings { gc_percent: 90, ..Settings::default() },
            })
            .expect("there is space");
        Self::open(environment, memory, disk, backend)
    }

    fn open(environment: Arc<Meeting>, memory: CrashMemory, disk: SimDisk, backend: BackendId) -> Self {
        let region = Region::new(MeetingMemory(memory.clone()));
        let transport = Transport::open(Arc::clone(&environment), region).expect("a transport");
        let cache = transport.open_cache(backend).expect("a cache");
        let worker = BackgroundWorker::new(Arc::clone(&cache), disk.queue(1), disk.geometry());
        let worker = Rc::new(RefCell::new(worker));
        let _watchdog = Watchdog::new(Duration::from_secs(60), "a small cache with interleaved operations");
        Self { environment, memory, disk, backend, cache, worker, _watchdog }
    }

    /// Cuts the power now, or at the moment at which an operation was interrupted.
    pub fn restart(self) -> Self {
        forget();
        act_as(0);
        let Self { environment, memory, disk, backend, .. } = self;
        disk.process_crash(7);
        Self::open(environment, memory.power_cut(11, Keep::Nothing), disk, backend)
    }

    pub fn write(&self, at: u64, value: u8) {
        assert!(try_write(&self.cache, at, value), "there is space");
    }

    /// Expects that a client reads the byte `value` throughout the block at `at`, from the cache or from the disk.
    #[track_caller]
    pub fn expect(&self, at: u64, value: u8) {
        assert_eq!(self.see(at), Ok(value), "the block at {at}");
    }

    pub fn see(&self, at: u64) -> Result<u8, String> {
        let (mut bytes, mut misses) = (vec![0xee; BLOCK as usize], Vec::new());
        self.cache.read(ByteRange::at(at, BLOCK), &mut bytes, &mut misses).map_err(|error| error.line())?;
        if !misses.is_empty() {
            self.disk.contents().read(at, &mut bytes);
        }
        misses.into_iter().for_each(|miss| self.cache.cancel_fill(miss));
        same(&bytes)
    }

    /// Writes everything back to the disk.
    pub fn drain(&self) {
        act_as(0);
        self.cache.request_drain();
        settle(&self.environment, &self.worker);
    }

    pub fn set_gc(&self, gc_percent: u8) {
        self.cache.set_settings(Settings { gc_percent, ..self.cache.settings() }).expect("in range");
    }
}

/// Writes a block of `value`; false without space.
pub fn try_write(cache: &Cache<Meeting>, at: u64, value: u8) -> bool {
    let data = vec![value; BLOCK as usize];
    let admission = cache.write(ByteRange::at(at, BLOCK), &data, Waker::noop()).expect("the cache runs");
    matches!(admission, Admission::Done(_))
}

/// The byte that all elements of `bytes` have.
pub fn same(bytes: &[u8]) -> Result<u8, String> {
    match bytes.iter().find(|byte| **byte != bytes[0]) {
        None => Ok(bytes[0]),
        Some(other) => Err(format!("a mixture of {} and {other}", bytes[0])),
    }
}

/// Runs one step of the background worker, and the wait that it requests. Returns whether there is more to do.
pub fn step(environment: &Meeting, worker: &RefCell<BackgroundWorker<Meeting, SimQueue>>) -> bool {
    act_as(WORKER);
    match worker.borrow_mut().step() {
        Step::Idle { until_ms: None } => false,
        Step::Idle { until_ms: Some(until) } => {
            environment.0.advance(until.saturating_sub(environment.0.clock_ms()).max(1));
            true
        }
        Step::Busy | Step::WaitBacking => true,
    }
}

/// Runs the background worker until it has nothing to do.
pub fn settle(environment: &Meeting, worker: &RefCell<BackgroundWorker<Meeting, SimQueue>>) {
    for _ in 0..20_000 {
        if !step(environment, worker) {
            return;
        }
    }
    panic!("the background worker never becomes idle");
}

/// The drained epoch of a cache that is opened on `memory`.
pub fn drained_of(environment: Arc<Meeting>, memory: CrashMemory, backend: BackendId) -> Epoch {
    act_as(0);
    let transport = Transport::open(environment, Region::new(MeetingMemory(memory))).expect("a transport");
    transport.open_cache(backend).expect("a cache").drained_epoch()
}
