//! What stays in a full cache although no client reads it, whatever else is read and written, and that writers go on.

mod classes;
mod pins;

use cbd_engine::{
    Admission, BackendSpec, BackgroundWorker, Cache, FormatOptions, Pin, PinKind, Settings, Step, Transport,
};
use cbd_sim::{CrashMemory, SimDisk, SimEnvironment, SimQueue, Watchdog, act_as};
use cbd_types::{BackendId, ByteRange, CHUNK, Class, Region};
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

const BLOCK: u64 = 4096;
const SEGMENT: u64 = 64 << 10;
/// Including the state segment.
const SEGMENTS: u64 = 65;
const DEVICE: u64 = 256 << 20;
/// Steps after which a background worker that is still busy, or a writer that still waits, counts as stuck.
const STEPS_MAX: usize = 50_000;

struct Rig {
    environment: Arc<SimEnvironment>,
    transport: Arc<Transport<SimEnvironment>>,
    backend: BackendId,
    cache: Arc<Cache<SimEnvironment>>,
    worker: BackgroundWorker<SimEnvironment, SimQueue>,
    random: u64,
    _watchdog: Watchdog,
}

impl Rig {
    fn new(lanes_max: u32, settings: Settings) -> Self {
        Self::with_segments(SEGMENTS, lanes_max, settings)
    }

    fn with_segments(segments: u64, lanes_max: u32, settings: Settings) -> Self {
        act_as(0);
        let environment = Arc::new(SimEnvironment::new(5, 0));
        let region = Region::new(CrashMemory::new((SEGMENTS + 4) * SEGMENT + (256 << 10)));
        let disk = SimDisk::new(SimDisk::ordinary(DEVICE, 512), 3);
        let options = FormatOptions {
            segment_size: Some(SEGMENT),
            host_rows: 4,
            backend_rows: 4,
            blkdev_rows: 4,
            ..FormatOptions::default()
        };
        let transport = Transport::format(Arc::clone(&environment), region, &options).unwrap();
        let backend = transport
            .create_backend(&BackendSpec {
                host: transport.register_host("host", None).unwrap(),
                path: "/dev/simulated".into(),
                identity: "simulated".into(),
                size: DEVICE,
                sector: 512,
                cache_bytes: Some(segments * SEGMENT),
                lanes_max,
                handlers: 1,
                data_crc: true,
                settings,
            })
            .unwrap();
        let cache = transport.open_cache(backend).unwrap();
        assert!(cache.status().lanes == lanes_max || segments < SEGMENTS);
        let worker = BackgroundWorker::new(Arc::clone(&cache), disk.queue(4), disk.geometry());
        let _watchdog = Watchdog::new(Duration::from_secs(240), "what stays");
        Self { environment, transport, backend, cache, worker, random: 88172645463325252, _watchdog }
    }

    /// A random number below `below`.
    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    fn pin(&self, range: ByteRange) {
        let pin = Pin { kind: PinKind::Range, text: range.to_string(), ranges: vec![range] };
        self.transport.set_pins(self.backend, &[pin]).unwrap();
    }

    /// Blocks of the most that can be pinned.
    fn most(&self) -> u64 {
        self.cache.pin_limit() / BLOCK
    }

    /// Reads `count` blocks from block `first` on as a blkdev does; returns the number of hits.
    fn read(&mut self, first: u64, count: u64) -> u64 {
        self.read_marked(Class::Unmarked, first, count)
    }

    /// As [`read`](Self::read), of data of this class.
    fn read_marked(&mut self, class: Class, first: u64, count: u64) -> u64 {
        let mut hits = 0;
        for block in first..first + count {
            let (mut bytes, mut misses) = (vec![0; BLOCK as usize], Vec::new());
            self.cache.read(ByteRange::at(block * BLOCK, BLOCK), &mut bytes, &mut misses).unwrap();
            hits += u64::from(misses.is_empty());
            for mut miss in misses {
                miss.set_class(class);
                self.cache.complete_fill(miss, &bytes);
            }
            self.step();
        }
        hits
    }

    /// Writes a block. Returns the steps of the background worker that it waited for.
    fn write(&mut self, block: u64) -> usize {
        let range = ByteRange::at(block * BLOCK, BLOCK);
        for steps in 0..STEPS_MAX {
            let admission = self.cache.write(range, &[1; BLOCK as usize], Waker::noop()).unwrap();
            if matches!(admission, Admission::Done(_)) {
                return steps;
            }
            self.step();
        }
        panic!("a writer never gets space: {:?}", self.cache.status());
    }

    fn step(&mut self) -> bool {
        match self.worker.step() {
            Step::Idle { until_ms: None } => return false,
            Step::Idle { until_ms: Some(until) } => {
                self.environment.advance(until.saturating_sub(self.environment.clock_ms()).max(1));
            }
            Step::Busy | Step::WaitBacking => {}
        }
        true
    }

    fn settle(&mut self) {
        for _ in 0..STEPS_MAX {
            if !self.step() {
                return;
            }
        }
        panic!("the background worker never becomes idle: {:?}", self.cache.status());
    }

    /// Blocks of a range that are in the cache.
    fn held(&self, first: u64, count: u64) -> u64 {
        self.cache.cached_bytes_of(ByteRange::at(first * BLOCK, count * BLOCK)) / BLOCK
    }

    fn cache_blocks(&self) -> u64 {
        self.cache.capacity() / BLOCK
    }
}

fn lane_of(block: u64, lanes: u64) -> u64 {
    let chunk = block * BLOCK / CHUNK;
    let turn = (chunk / lanes).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (chunk % lanes + turn) % lanes
}
