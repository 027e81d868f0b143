//! Sequential and random reads through a blkdev: what a scan costs a hot set, how near readahead comes to the disk's own rate, and
//! what it reads in vain.
//!
//! Invariants: disk and client live in simulated time, and all random numbers come from the seed, so the figures are the same on
//! every machine.

use super::model_disk::{Model, ModelDisk};
use crate::instant_disk::geometry;
use crate::options::Options;
use crate::{Figures, rounded};
use cbd_device::{Device, Queue};
use cbd_engine::{
    BackendSpec, BackgroundWorker, Cache, Environment, FormatOptions, ReadFill, Readahead, Settings, Step,
    Transport,
};
use cbd_pmem::Mapping;
use cbd_types::{
    AlignedBuffer, ByteRange, CHECKSUM_BLOCK, Completion, Error, ErrorKind, Operation, Region, Request,
    Result,
};
use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::sync::Arc;
use std::task::Waker;

/// Size of the device over that of the cache.
const DEVICE: u64 = 12;
/// Size of the scan over that of the cache.
const SCAN: u64 = 10;
/// Time that a client and the cache use for a request: one in process.
const CLIENT_US: f64 = 2.0;
/// Bytes of a measured stream: much longer than the cutoff.
const STREAM: u64 = 64 << 20;
/// Lengths of the requests of streams.
const REQUESTS: [u64; 5] = [4 << 10, 16 << 10, 64 << 10, 128 << 10, 1 << 20];
/// Limit against an endless loop.
const STEPS: usize = 1_000_000;

/// Random numbers of the seed, and a clock that stands still: nothing here depends on time.
struct Surroundings(Mutex<SmallRng>);

impl Environment for Surroundings {
    type Memory = Mapping;
    type Lock = parking_lot::RawMutex;

    fn random(&self) -> u64 {
        self.0.lock().random()
    }

    fn wall_ms(&self) -> u64 {
        1
    }

    fn monotonic_ms(&self) -> u64 {
        0
    }
}

/// A blkdev with a cache over a disk in simulated time.
struct Blkdev {
    cache: Arc<Cache<Surroundings>>,
    queue: Queue<Surroundings, ModelDisk>,
    worker: BackgroundWorker<Surroundings, ModelDisk>,
    disk: ModelDisk,
    /// Bytes of the cache and of the device.
    capacity: u64,
    size: u64,
    buffer: AlignedBuffer,
    done: Vec<Completion>,
    requests: u64,
}

impl Blkdev {
    fn new(quick: bool, seed: u64, model: Model, settings: Settings) -> Result<Self> {
        let surroundings = Arc::new(Surroundings(Mutex::new(SmallRng::seed_from_u64(seed))));
        let (region, segment) = if quick { (32 << 20, Some(64 << 10)) } else { (256 << 20, None) };
        let format = FormatOptions { segment_size: segment, ..FormatOptions::default() };
        let region = Region::new(Mapping::anonymous(region)?);
        let transport = Transport::format(Arc::clone(&surroundings), region, &format)?;
        let info = transport.info();
        let capacity = u64::from(info.free_segments) * info.layout.segment_size;
        let size = DEVICE * capacity;
        let backend = transport.create_backend(&BackendSpec {
            host: transport.register_host("bench", None)?,
            path: "model".into(),
            identity: "model".into(),
            size,
            sector: 512,
            cache_bytes: Some(capacity),
            lanes_max: 32,
            handlers: 1,
            data_crc: true,
            settings,
        })?;
        let cache = transport.open_cache(backend)?;
        let geometry = geometry(size);
        let disk = ModelDisk::new(model);
        let worker = BackgroundWorker::new(Arc::clone(&cache), ModelDisk::new(Model::INSTANT), geometry);
        let device = Arc::new(Device::cached(Arc::clone(&cache), geometry));
        let queue = Queue::new(device, disk.clone(), Waker::noop().clone());
        let (buffer, done) = (AlignedBuffer::default(), Vec::new());
        Ok(Self { cache, queue, worker, disk, capacity, size, buffer, done, requests: 0 })
    }

    /// Reads `length` bytes at `start`, and lets the time pass that it takes.
    fn read(&mut self, start: u64, length: u64) -> Result<()> {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(length as usize);
        let range = ByteRange::at(start, length);
        let request = Request::unmarked(1, Operation::Read, range, false, buffer);
        self.disk.pass(CLIENT_US);
        // A thread is woken by what the disk has completed, and by its fills.
        self.queue.poll(&mut self.done);
        self.queue.submit(request, &mut self.done);
        while self.done.is_empty() {
            self.disk.pass_until_done();
            self.queue.poll(&mut self.done);
        }
        for completion in self.done.drain(..) {
            completion.result?;
            self.buffer = completion.buffer;
        }
        self.queue.poll(&mut self.done);
        self.requests += 1;
        if self.requests.is_multiple_of(16) { self.maintain() } else { Ok(()) }
    }

    fn maintain(&mut self) -> Result<()> {
        for _ in 0..STEPS {
            if matches!(self.worker.step(), Step::Idle { .. }) {
                return Ok(());
            }
        }
        Err(Error::new(ErrorKind::TimedOut, "background work does not end"))
    }

    /// Bytes that reads found in the cache.
    fn hits(&self) -> u64 {
        self.cache.status().read_hit_bytes
    }
}

/// Measures everything.
///
/// # Errors
/// The errors of the engine.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    let default = Settings::default();
    let loss = |settings| scan_loss(options, settings);
    figures.add("scan_loss", rounded(loss(default)?, 4));
    let off = Settings { sequential_read_cutoff: 0, ..default };
    figures.add("reads.scan_loss_without_cutoff", rounded(loss(off)?, 4));
    let all = Settings { read_fill: ReadFill::All, ..default };
    figures.add("reads.scan_loss_without_admission", rounded(loss(all)?, 4));
    let neither = Settings { read_fill: ReadFill::All, ..off };
    figures.add("reads.scan_loss_without_either", rounded(loss(neither)?, 4));
    for (name, settings) in [("default", default), ("without_cutoff", off)] {
        for (state, is_full) in [("new", false), ("full", true)] {
            let hit = second_read(options, settings, is_full)?;
            figures.add(format!("reads.file_read_again.{state}.{name}"), rounded(hit, 4));
        }
    }
    let mut worst = f64::INFINITY;
    for (name, model) in [("hard_disk", Model::HARD_DISK), ("flash_disk", Model::FLASH_DISK)] {
        for length in REQUESTS {
            let kib = length >> 10;
            let rate = |readahead| stream_rate(options, model, length, Settings { readahead, ..default });
            let (with, without) = (rate(Readahead::Auto)?, rate(Readahead::Off)?);
            figures.add(format!("reads.{name}.sequential_{kib}k"), rounded(with, 3));
            figures.add(format!("reads.{name}.sequential_{kib}k_without"), rounded(without, 3));
            worst = worst.min(with);
        }
    }
    figures.add("readahead_over_sequential", rounded(worst, 3));
    let mut most: f64 = 0.0;
    for (name, length, run) in [("4k", 4 << 10, 1), ("64k", 64 << 10, 1), ("runs_of_32k", 4 << 10, 8)] {
        let waste = waste(options, length, run)?;
        figures.add(format!("reads.waste.{name}"), rounded(waste, 4));
        most = most.max(waste);
    }
    figures.add("readahead_waste", rounded(most, 4));
    figures.add("reads.waste.runs_of_256k", rounded(waste(options, 4 << 10, 64)?, 4));
    figures.add("reads.waste.runs_of_4m", rounded(waste(options, 4 << 10, 1024)?, 4));
    Ok(())
}

/// By how much a scan of ten times the cache lowers the hit ratio of a hot set beside it.
fn scan_loss(options: &Options, settings: Settings) -> Result<f64> {
    let mut blkdev = Blkdev::new(options.quick, options.seed, Model::INSTANT, settings)?;
    let mut random = SmallRng::seed_from_u64(options.seed);
    // Half of the cache, behind the scan on the device.
    let hot = blkdev.capacity / 2 / CHECKSUM_BLOCK;
    let hot_start = blkdev.size - blkdev.capacity;
    let mut read_hot = |blkdev: &mut Blkdev, count: u64| {
        let before = blkdev.hits();
        for _ in 0..count {
            let block = random.random_range(0..hot);
            blkdev.read(hot_start + block * CHECKSUM_BLOCK, CHECKSUM_BLOCK)?;
        }
        Ok::<_, Error>((blkdev.hits() - before) as f64 / (count * CHECKSUM_BLOCK) as f64)
    };
    // The cache is full of other data when the hot set appears, as it is after days.
    let other = (blkdev.size - blkdev.capacity) / (64 << 10);
    let mut places = SmallRng::seed_from_u64(options.seed + 1);
    for _ in 0..2 * blkdev.capacity / (64 << 10) {
        blkdev.read(places.random_range(0..other) * (64 << 10), 64 << 10)?;
    }
    read_hot(&mut blkdev, 8 * hot)?;
    let before = read_hot(&mut blkdev, hot)?;
    let scan = SCAN * blkdev.capacity;
    let (length, mut at, mut hits, mut turns) = (256 << 10, 0, 0.0, 0.0);
    while at < scan {
        blkdev.read(at, length)?;
        at += length;
        hits += read_hot(&mut blkdev, 8)?;
        turns += 1.0;
    }
    Ok(before - hits / turns)
}

/// The hit ratio of a file of a quarter of the cache that is read sequentially a second time, in a new or in a full cache.
fn second_read(options: &Options, settings: Settings, is_full: bool) -> Result<f64> {
    let mut blkdev = Blkdev::new(options.quick, options.seed, Model::INSTANT, settings)?;
    if is_full {
        let mut places = SmallRng::seed_from_u64(options.seed + 1);
        let other = (blkdev.size / 2) / (64 << 10);
        for _ in 0..2 * blkdev.capacity / (64 << 10) {
            blkdev.read(blkdev.size / 2 + places.random_range(0..other) * (64 << 10), 64 << 10)?;
        }
    }
    let file = blkdev.capacity / 4 / (128 << 10);
    let mut hit = 0.0;
    for _ in 0..2 {
        let before = blkdev.hits();
        for number in 0..file {
            blkdev.read(number * (128 << 10), 128 << 10)?;
        }
        hit = (blkdev.hits() - before) as f64 / (file * (128 << 10)) as f64;
    }
    Ok(hit)
}

/// The rate at which a client reads a long stream at depth 1, as a share of the disk's own.
fn stream_rate(options: &Options, model: Model, length: u64, settings: Settings) -> Result<f64> {
    let mut blkdev = Blkdev::new(true, options.seed, model, settings)?;
    // The first request moves the arm.
    blkdev.read(0, length)?;
    let begun = blkdev.disk.now_us();
    for number in 1..=STREAM / length {
        blkdev.read(number * length, length)?;
    }
    Ok(model.transfer_us(STREAM) / (blkdev.disk.now_us() - begun))
}

/// The bytes that readahead adds to those that the disk reads for random runs of `run` requests, as a share of them.
fn waste(options: &Options, length: u64, run: u64) -> Result<f64> {
    let read_bytes = |readahead| {
        let settings = Settings { readahead, ..Settings::default() };
        let mut blkdev = Blkdev::new(true, options.seed, Model::INSTANT, settings)?;
        let mut random = SmallRng::seed_from_u64(options.seed);
        for _ in 0..(256 << 20) / (length * run) {
            let start = random.random_range(0..blkdev.size / length - run);
            for number in start..start + run {
                blkdev.read(number * length, length)?;
            }
        }
        Ok::<_, Error>(blkdev.disk.read_bytes() as f64)
    };
    Ok(read_bytes(Readahead::Auto)? / read_bytes(Readahead::Off)? - 1.0)
}
