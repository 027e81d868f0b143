//! A blkdev with a real cache of some size, through the queue that clients use: what the advice foretells.
//!
//! Invariants: time passes with the requests, and random numbers come from the seed, so that nothing depends on the machine.

use super::super::policy::model_disk::{Model, ModelDisk};
use cbd_advise::simulated_time::{Surroundings, Wanted};
use cbd_advise::{Action, CacheForm, Request, geometry};
use cbd_device::{Device, LastSampled, Queue, Sampled};
use cbd_engine::{BackendSpec, BackgroundWorker, Cache, FormatOptions, Settings, Step, Transport};
use cbd_pmem::Mapping;
use cbd_runtime::sampled::{Moment, earlier::Earlier};
use cbd_types::{
    AlignedBuffer, Class, Completion, Error, ErrorKind, Operation, Region, Request as Submitted, Result,
};
use std::cell::Cell;
use std::sync::Arc;
use std::task::Waker;

/// Space for the tables of the region.
const TABLES: u64 = 4 << 20;
/// Limits against an endless loop.
const STEPS: usize = 1_000_000;
const ATTEMPTS: usize = 1000;

thread_local! {
    /// The clock of the blkdevs that this thread serves.
    static NOW_NS: Cell<u64> = const { Cell::new(0) };
}

/// The blkdev.
pub struct Real {
    surroundings: Arc<Surroundings>,
    cache: Arc<Cache<Surroundings>>,
    device: Arc<Device<Surroundings>>,
    queue: Queue<Surroundings, ModelDisk>,
    worker: BackgroundWorker<Surroundings, ModelDisk>,
    wanted: Arc<Wanted>,
    buffer: AlignedBuffer,
    done: Vec<Completion>,
    read_bytes: u64,
}

impl Real {
    /// An empty cache of this form, in front of a disk of `size` bytes.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn new(form: &CacheForm, size: u64, seed: u64) -> Result<Self> {
        let surroundings = Arc::new(Surroundings::new(seed));
        let region = Region::new(Mapping::anonymous(form.bytes + form.segment + TABLES)?);
        let format = FormatOptions { segment_size: Some(form.segment), ..FormatOptions::default() };
        let transport = Transport::format(Arc::clone(&surroundings), region, &format)?;
        let backend = transport.create_backend(&BackendSpec {
            host: transport.register_host("bench", None)?,
            path: "model".into(),
            identity: "model".into(),
            size,
            sector: 512,
            cache_bytes: Some(form.bytes),
            lanes_max: form.lanes_max,
            handlers: 1,
            data_crc: true,
            settings: Settings::default(),
        })?;
        let cache = transport.open_cache(backend)?;
        let wanted = Arc::new(Wanted::default());
        cache.set_worker_waker(Waker::from(Arc::clone(&wanted)));
        let instant = || ModelDisk::new(Model::INSTANT);
        let worker = BackgroundWorker::new(Arc::clone(&cache), instant(), geometry(size));
        let device = Device::cached(Arc::clone(&cache), geometry(size)).with_clock(|| NOW_NS.get());
        let device = Arc::new(device.with_sample(|| NOW_NS.get()));
        device.sample_for(form.bytes);
        let queue = Queue::new(Arc::clone(&device), instant(), Waker::noop().clone());
        let (buffer, done) = (AlignedBuffer::default(), Vec::new());
        Ok(Self { surroundings, cache, device, queue, worker, wanted, buffer, done, read_bytes: 0 })
    }

    /// Serves a request that reads or writes.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn serve(&mut self, request: &Request) -> Result<()> {
        self.surroundings.set_us(request.us);
        NOW_NS.set(request.us * 1000);
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(request.range.len() as usize);
        let operation = match request.action {
            Action::Read => Operation::Read,
            _ => Operation::Write,
        };
        self.read_bytes += if operation == Operation::Read { request.range.len() } else { 0 };
        let (range, class) = (request.range, Class::Unmarked);
        let submitted = Submitted { id: 1, operation, range, fua: false, class, data_crc: None, buffer };
        self.queue.submit(submitted, &mut self.done);
        for _ in 0..ATTEMPTS {
            self.queue.poll(&mut self.done);
            if let Some(completion) = self.done.pop() {
                completion.result?;
                self.buffer = completion.buffer;
                // What the disk has read is cached behind the completion.
                self.queue.poll(&mut self.done);
                return if self.wanted.take() { self.maintain() } else { Ok(()) };
            }
            self.maintain()?;
        }
        Err(Error::new(ErrorKind::TimedOut, "a request does not end"))
    }

    /// What was read so far.
    pub fn moment(&self) -> Moment {
        Moment {
            sampled: self.device.sampled_count(),
            read_bytes: self.read_bytes,
            hit_bytes: self.cache.status().read_hit_bytes,
        }
    }

    /// The sample of its requests, from number `from` on.
    pub fn last_sampled(&self, from: u64) -> LastSampled {
        self.device.last_sampled(from)
    }

    /// Takes what the sample will not keep much longer, as the daemon does.
    pub fn take_earlier(&self, earlier: &mut Earlier) {
        let visit = |numbers, each: &mut dyn FnMut(Sampled)| self.device.visit_sampled(numbers, each);
        earlier.take(self.device.sampled_count(), true, visit);
    }

    fn maintain(&mut self) -> Result<()> {
        for _ in 0..STEPS {
            if matches!(self.worker.step(), Step::Idle { .. }) {
                return Ok(());
            }
        }
        Err(Error::new(ErrorKind::TimedOut, "background work does not end"))
    }
}
