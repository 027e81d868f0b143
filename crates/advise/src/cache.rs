//! The engine over memory of its own, in simulated time.
//!
//! Invariants: time passes with the requests, and the background worker runs whenever it is woken or due at a time that has come. So
//! nothing depends on the machine, and the same requests give the same figures. No data exists: what is written and read is zeroes.
//!
//! Elsewhere: which requests a cache gets, and which of them belong to a stream (`simulation`).

use crate::Sample;
use crate::ahead::{Ended, Windows};
use crate::disk::{SimulatedDisk, geometry};
use crate::memory::SimulatedMemory;
use crate::simulated_time::{Surroundings, Wanted};
use crate::size::CacheForm;
use cbd_device::{Device, Queue};
use cbd_engine::{
    Admission, BackendSpec, BackgroundWorker, Cache, FormatOptions, Miss, Settings, Step, Transport,
    ZeroProgress,
};
use cbd_types::{
    AlignedBuffer, ByteRange, CHUNK, Class, Completion, Error, ErrorKind, Operation, Region, Request, Result,
};
use std::sync::Arc;
use std::task::Waker;

/// Bytes of a region besides its segments.
const TABLES: u64 = 4 << 20;
/// The longest piece of a request.
const PIECE_MAX: usize = 1 << 20;
/// The longest request of a client.
const READ_MAX: u64 = 4 << 20;
/// The least time that the background worker waits.
const TICK_US: u64 = 1000;
/// Limits against an endless loop.
const STEPS: usize = 10_000_000;
const ATTEMPTS: usize = 100_000;

/// What the engine has here.
pub(crate) type Simulated = Surroundings<SimulatedMemory>;

/// A cache, its background worker and its disk.
pub struct SimulatedCache {
    surroundings: Arc<Simulated>,
    transport: Arc<Transport<Simulated>>,
    cache: Arc<Cache<Simulated>>,
    worker: BackgroundWorker<Simulated, SimulatedDisk>,
    disk: SimulatedDisk,
    queue: Queue<Simulated, SimulatedDisk>,
    /// The disk as the queue reads it: without any time, so that a request ends before the next one begins.
    read_disk: SimulatedDisk,
    done: Vec<Completion>,
    wanted: Arc<Wanted>,
    /// When the worker is due, if it is.
    due_us: Option<u64>,
    buffer: AlignedBuffer,
    misses: Vec<Miss>,
    /// What a sample reads ahead.
    windows: Windows,
    ended: Vec<Ended>,
}

impl SimulatedCache {
    /// An empty cache for `sample` in front of a disk of `size` bytes that transfers a byte in `us_per_byte`.
    ///
    /// # Errors
    /// The errors of the engine, and a lack of memory.
    pub fn new(
        form: &CacheForm,
        sample: Sample,
        size: u64,
        settings: Settings,
        us_per_byte: f64,
    ) -> Result<Self> {
        let surroundings = Arc::new(Surroundings::new(1));
        let region = Region::new(SimulatedMemory::new(form.bytes + form.segment + TABLES));
        let format = FormatOptions {
            segment_size: Some(form.segment),
            force: false,
            host_rows: 1,
            backend_rows: 1,
            blkdev_rows: 1,
        };
        let transport = Transport::format(Arc::clone(&surroundings), region, &format)?;
        let size = size.max(CHUNK).next_multiple_of(CHUNK);
        let backend = transport.create_backend(&BackendSpec {
            host: transport.register_host("advise", None)?,
            path: "simulated".into(),
            identity: "simulated".into(),
            size,
            sector: 512,
            cache_bytes: Some(form.bytes),
            lanes_max: form.lanes_max,
            handlers: 1,
            data_crc: true,
            settings,
        })?;
        let cache = transport.open_cache(backend)?;
        let wanted = Arc::new(Wanted::default());
        cache.set_worker_waker(Waker::from(Arc::clone(&wanted)));
        let disk = SimulatedDisk::new(Arc::clone(&surroundings), us_per_byte);
        let worker = BackgroundWorker::new(Arc::clone(&cache), disk.clone(), geometry(size));
        let read_disk = SimulatedDisk::new(Arc::clone(&surroundings), 0.0);
        let device = Arc::new(Device::cached(Arc::clone(&cache), geometry(size)));
        let queue = Queue::new(device, read_disk.clone(), Waker::noop().clone());
        let (buffer, misses, done) = (AlignedBuffer::zeroed(PIECE_MAX), Vec::new(), Vec::new());
        let due_us = Some(0);
        Ok(Self {
            surroundings,
            transport,
            cache,
            worker,
            disk,
            queue,
            read_disk,
            done,
            wanted,
            due_us,
            buffer,
            misses,
            windows: Windows::new(sample),
            ended: Vec::new(),
        })
    }

    /// Lets time pass until `us`, and the background worker work meanwhile. Time never goes back.
    ///
    /// # Errors
    /// If background work does not end.
    pub fn pass_until(&mut self, us: u64) -> Result<()> {
        for _ in 0..STEPS {
            if !self.wanted.take() {
                match self.next_event_us() {
                    Some(next) if next <= us.max(self.now_us()) => self.set_us(next),
                    _ => {
                        self.set_us(us);
                        return Ok(());
                    }
                }
            }
            self.step();
        }
        Err(Error::new(ErrorKind::TimedOut, "the background work of a simulated cache does not end"))
    }

    /// Reads `range`, places of a sample; what it misses is read from the disk and recorded as the engine decides, with what was read
    /// ahead. Returns the bytes that missed.
    ///
    /// # Errors
    /// The errors of the engine.
    pub(crate) fn read(&mut self, range: ByteRange, is_behind_cutoff: bool) -> Result<u64> {
        let (mut missed, mut ended) = (0, std::mem::take(&mut self.ended));
        for piece in self.cache.pieces(range) {
            let into = &mut self.buffer[..piece.len() as usize];
            self.cache.read(piece, into, &mut self.misses)?;
            for miss in self.misses.drain(..) {
                missed += miss.range.len();
                self.windows.end(&self.cache, miss, is_behind_cutoff, &mut ended);
            }
            for (miss, is_behind_cutoff) in ended.drain(..) {
                let data = &self.buffer[..miss.range.len() as usize];
                if is_behind_cutoff {
                    self.cache.complete_fill_behind_cutoff(miss, data);
                } else {
                    self.cache.complete_fill(miss, data);
                }
            }
        }
        self.ended = ended;
        Ok(missed)
    }

    /// Reads `range`, places of a sample, before it is asked for.
    pub(crate) fn read_ahead(&mut self, range: ByteRange, is_behind_cutoff: bool) {
        self.windows.read(&self.cache, range, is_behind_cutoff);
    }

    /// Reads `range` of a cache that is simulated whole, as a client of a blkdev reads: streams are recognized and read ahead.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn read_through_queue(&mut self, range: ByteRange) -> Result<()> {
        for part in range.split_at_multiples(READ_MAX) {
            let mut buffer = std::mem::take(&mut self.buffer);
            buffer.resize(part.len() as usize);
            let (operation, class) = (Operation::Read, Class::Unmarked);
            let request =
                Request { id: 1, operation, range: part, fua: false, class, data_crc: None, buffer };
            self.queue.submit(request, &mut self.done);
            let mut attempts = 0;
            while self.done.is_empty() {
                self.queue.poll(&mut self.done);
                attempts += 1;
                if attempts > ATTEMPTS {
                    return Err(Error::new(ErrorKind::TimedOut, "a read of a simulated cache does not end"));
                }
            }
            for completion in self.done.drain(..) {
                completion.result?;
                self.buffer = completion.buffer;
            }
            // What was read is recorded behind the completion.
            self.queue.poll(&mut self.done);
        }
        self.buffer.resize(PIECE_MAX);
        Ok(())
    }

    /// Bytes that reads have found in the cache.
    #[must_use]
    pub fn hit_bytes(&self) -> u64 {
        self.cache.status().read_hit_bytes
    }

    /// Bytes that reads through the queue have read from the disk.
    #[must_use]
    pub fn disk_read_bytes(&self) -> u64 {
        self.read_disk.read_bytes()
    }

    /// Writes `range`; where there is no space, time passes until there is.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn write(&mut self, range: ByteRange) -> Result<()> {
        for piece in self.cache.pieces(range) {
            let mut attempts = 0;
            loop {
                let data = &self.buffer[..piece.len() as usize];
                if let Admission::Done(_) = self.cache.write(piece, data, Waker::noop())? {
                    break;
                }
                self.make_room(&mut attempts)?;
            }
        }
        Ok(())
    }

    /// Discards `range`.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn discard(&mut self, range: ByteRange) -> Result<()> {
        let (mut attempts, mut progress) = (0, ZeroProgress::default());
        while !matches!(self.cache.zero(range, true, &mut progress, Waker::noop())?, Admission::Done(_)) {
            self.make_room(&mut attempts)?;
        }
        Ok(())
    }

    /// Flushes.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn flush(&self) -> Result<()> {
        self.cache.flush()
    }

    /// Bytes of memory that the region and the engine's index take.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.transport.region().memory().kept_bytes() + self.cache.status().index_bytes
    }

    /// Bytes that the disk does not have yet.
    #[must_use]
    pub fn dirty_bytes(&self) -> u64 {
        self.cache.dirty_bytes()
    }

    fn make_room(&mut self, attempts: &mut usize) -> Result<()> {
        *attempts += 1;
        if *attempts > ATTEMPTS {
            return Err(Error::new(
                ErrorKind::NoSpace,
                "background work frees no space in a simulated cache",
            ));
        }
        // A write that finds no space wakes the worker: that alone makes no progress while the disk is busy.
        self.wanted.take();
        self.step();
        match self.next_event_us() {
            Some(next) => self.set_us(next),
            None => {
                self.cache.request_drain();
            }
        }
        self.step();
        Ok(())
    }

    fn step(&mut self) {
        self.due_us = match self.worker.step() {
            Step::Busy => Some(self.now_us()),
            Step::WaitBacking => None,
            // The worker's clock has milliseconds: at a time that has come already it would find the same again.
            Step::Idle { until_ms } => {
                until_ms.map(|until| until.saturating_mul(1000).max(self.now_us() + TICK_US))
            }
        };
    }

    /// When the worker is due, or an operation of the disk completes.
    fn next_event_us(&self) -> Option<u64> {
        self.due_us.into_iter().chain(self.disk.next_end_us()).min()
    }

    fn now_us(&self) -> u64 {
        self.surroundings.now_us()
    }

    fn set_us(&self, us: u64) {
        self.surroundings.set_us(us.max(self.now_us()));
    }
}
