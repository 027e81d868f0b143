//! How steadily writeback holds the dirty data at its target, and how much of a Zipf load it sends to the disk.
//!
//! Invariants: clock and disk are simulated, so that the same seed gives the same figures on every machine. The background worker
//! takes a step when it was woken, when an operation of the disk has completed, and when its time has come.

mod disk;

use super::trace::Zipf;
use crate::instant_disk::geometry;
use crate::options::Options;
use crate::{Figures, rounded};
use cbd_advise::simulated_time::{Surroundings, Wanted};
use cbd_engine::{
    Admission, BackendSpec, BackgroundWorker, Cache, Consistency, FormatOptions, Settings, Step, Transport,
};
use cbd_pmem::Mapping;
use cbd_types::{AlignedBuffer, ByteRange, CHECKSUM_BLOCK, Error, ErrorKind, Region, Result};
use disk::SlowQueue;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::collections::HashSet;
use std::sync::Arc;
use std::task::Waker;

const MIB: u64 = 1 << 20;
/// The share of the cache that is to be dirty.
const TARGET_PERCENT: u8 = 20;
/// Blocks on the device for each block of the cache.
const DEVICE: u64 = 8;
/// Writes between two flushes.
const FLUSHED: u64 = 64;
/// Operations that writeback keeps in flight.
const DEPTH: usize = 64;
/// One period of the load that changes, in milliseconds.
const PERIOD_MS: u64 = 6000;
/// The length of a run in milliseconds; figures are of its second half.
const RUN_MS: u64 = 240_000;
/// Milliseconds between two samples of the dirty data.
const SAMPLED_MS: u64 = 100;
/// Milliseconds in which the bytes of the disk are added up for the rate.
const WINDOW_MS: u64 = 1000;
/// The delay of the former rule, after which all closed epochs were written back.
const FORMER_DELAY_MS: u64 = 1000;
/// Limit against an endless loop.
const STEPS: usize = 1_000_000;

/// The load in bytes a second at a time, for a disk of `bandwidth`.
type Load = fn(bandwidth: u64, ms: u64) -> f64;

/// Between nothing and 1.6 times what the disk takes, 0.8 times on average. It is nothing for 0.96 s in each period.
fn changing(bandwidth: u64, ms: u64) -> f64 {
    let phase = (ms % PERIOD_MS) as f64 / PERIOD_MS as f64 * std::f64::consts::TAU;
    let share = 0.8 * (1.0 - phase.cos());
    if share < 0.1 { 0.0 } else { share * bandwidth as f64 }
}

/// An eighth of what the disk takes.
fn light(bandwidth: u64, _: u64) -> f64 {
    bandwidth as f64 / 8.0
}

/// Half of what the disk takes.
fn heavy(bandwidth: u64, _: u64) -> f64 {
    bandwidth as f64 / 2.0
}

/// Runs the measurement.
///
/// # Errors
/// The errors of the engine.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    for consistency in [Consistency::Strict, Consistency::Checkpoint] {
        let mut run = Run::new(options, consistency)?;
        let blocks = DEVICE * run.blocks;
        let mut random = SmallRng::seed_from_u64(options.seed);
        let steady = run.serve(changing, || random.random_range(0..blocks))?;
        let prefix = if consistency == Consistency::Strict { "" } else { "checkpoint." };
        figures.add(format!("{prefix}dirty_error"), rounded(steady.dirty_error, 4));
        figures.add(format!("{prefix}rate_deviation"), rounded(steady.rate_deviation, 4));
    }
    for (name, load) in [("writeback_bytes", light as Load), ("heavy.writeback_bytes", heavy)] {
        let mut run = Run::new(options, Consistency::Checkpoint)?;
        let zipf = Zipf::new(run.blocks as usize);
        let mut random = SmallRng::seed_from_u64(options.seed);
        let steady = run.serve(load, || zipf.draw(&mut random) as u64)?;
        figures.add(name, rounded(steady.disk_bytes as f64 / steady.former_bytes as f64, 3));
        figures.add(
            format!("{name}_over_written"),
            rounded(steady.disk_bytes as f64 / steady.written_bytes as f64, 3),
        );
    }
    Ok(())
}

/// The results of the second half of a run.
struct Steady {
    /// The largest distance of the dirty share from its target.
    dirty_error: f64,
    /// The standard deviation of the bytes that the disk took in a window, over their mean.
    rate_deviation: f64,
    /// Bytes that were written to the disk.
    disk_bytes: u64,
    /// Bytes that clients wrote.
    written_bytes: u64,
    /// Bytes that the former rule would have written to the disk.
    former_bytes: u64,
}

/// The former rule: a second after the end of a batch, the newest version of all blocks written before is the next batch, which
/// the disk takes at its full speed. It holds while less than the target is dirty.
struct Former {
    blocks: HashSet<u64>,
    due_ms: u64,
    bytes: u64,
}

impl Former {
    fn pass(&mut self, ms: u64, bandwidth: u64) {
        if ms >= self.due_ms && !self.blocks.is_empty() {
            let bytes = self.blocks.len() as u64 * CHECKSUM_BLOCK;
            self.blocks.clear();
            self.bytes += bytes;
            self.due_ms = ms + bytes * 1000 / bandwidth + FORMER_DELAY_MS;
        }
    }
}

/// A cache with its background worker and a slow disk.
struct Run {
    clock: Arc<Surroundings>,
    cache: Arc<Cache<Surroundings>>,
    worker: BackgroundWorker<Surroundings, SlowQueue>,
    wanted: Arc<Wanted>,
    due_ms: Option<u64>,
    /// Blocks of 4 KiB that fit in the bytes of the cache.
    blocks: u64,
    /// Bytes a second of the disk: the cache is full of what it takes in 32 s.
    bandwidth: u64,
}

impl Run {
    fn new(options: &Options, consistency: Consistency) -> Result<Self> {
        let size = if options.quick { 32 * MIB } else { 256 * MIB };
        let clock = Arc::new(Surroundings::new(options.seed));
        let region = Region::new(Mapping::anonymous(size)?);
        let format = FormatOptions { segment_size: Some(256 << 10), ..FormatOptions::default() };
        let transport = Transport::format(Arc::clone(&clock), region, &format)?;
        let info = transport.info();
        let cache_bytes = u64::from(info.free_segments) * info.layout.segment_size;
        let device = DEVICE * cache_bytes;
        let settings = Settings { dirty_target_percent: TARGET_PERCENT, consistency, ..Settings::default() };
        let backend = transport.create_backend(&BackendSpec {
            host: transport.register_host("bench", None)?,
            path: "slow".into(),
            identity: "slow".into(),
            size: device,
            sector: 512,
            cache_bytes: Some(cache_bytes),
            lanes_max: 8,
            handlers: 1,
            data_crc: true,
            settings,
        })?;
        let cache = transport.open_cache(backend)?;
        let wanted = Arc::new(Wanted::default());
        cache.set_worker_waker(Waker::from(Arc::clone(&wanted)));
        let geometry = geometry(device);
        let bandwidth = size / 32;
        let queue = SlowQueue::new(Arc::clone(&clock), bandwidth, DEPTH);
        let worker = BackgroundWorker::new(Arc::clone(&cache), queue, geometry);
        Ok(Self {
            clock,
            cache,
            worker,
            wanted,
            due_ms: Some(0),
            blocks: cache_bytes / CHECKSUM_BLOCK,
            bandwidth,
        })
    }

    /// Serves a load of writes of the blocks that `next` gives.
    fn serve(&mut self, load: Load, mut next: impl FnMut() -> u64) -> Result<Steady> {
        let data = AlignedBuffer::zeroed(CHECKSUM_BLOCK as usize);
        let mut former = Former { blocks: HashSet::new(), due_ms: FORMER_DELAY_MS, bytes: 0 };
        let (mut owed, mut writes) = (0.0, 0_u64);
        let (mut errors, mut windows) = (Vec::new(), Vec::new());
        let (mut begin, mut window_begin) = ((0, 0, 0), 0);
        for ms in 0..RUN_MS {
            self.clock.set_us(ms * 1000);
            owed += load(self.bandwidth, ms) / 1000.0;
            while owed >= CHECKSUM_BLOCK as f64 {
                owed -= CHECKSUM_BLOCK as f64;
                let block = next();
                self.write(ByteRange::at(block * CHECKSUM_BLOCK, CHECKSUM_BLOCK), &data)?;
                former.blocks.insert(block);
                writes += 1;
                if writes.is_multiple_of(FLUSHED) {
                    self.cache.flush()?;
                }
            }
            former.pass(ms, self.bandwidth);
            self.maintain_until((ms + 1) * 1000)?;
            if ms + 1 == RUN_MS / 2 {
                window_begin = self.cache.status().written_back_bytes;
                begin = (window_begin, writes, former.bytes);
            } else if ms >= RUN_MS / 2 && (ms + 1).is_multiple_of(SAMPLED_MS) {
                let status = self.cache.status();
                let share = status.dirty_bytes as f64 / status.capacity as f64;
                errors.push((share - f64::from(TARGET_PERCENT) / 100.0).abs());
                if (ms + 1).is_multiple_of(WINDOW_MS) {
                    windows.push((status.written_back_bytes - window_begin) as f64);
                    window_begin = status.written_back_bytes;
                }
            }
        }
        let mean = windows.iter().sum::<f64>() / windows.len() as f64;
        let variance = windows.iter().map(|bytes| (bytes - mean).powi(2)).sum::<f64>() / windows.len() as f64;
        Ok(Steady {
            dirty_error: errors.into_iter().fold(0.0, f64::max),
            rate_deviation: variance.sqrt() / mean,
            disk_bytes: self.cache.status().written_back_bytes - begin.0,
            written_bytes: (writes - begin.1) * CHECKSUM_BLOCK,
            former_bytes: former.bytes - begin.2,
        })
    }

    fn write(&mut self, range: ByteRange, data: &[u8]) -> Result<()> {
        match self.cache.write(range, data, Waker::noop())? {
            Admission::Done(_) => Ok(()),
            Admission::Full => {
                Err(Error::new(ErrorKind::NoSpace, "the cache is full: the load is too large"))
            }
        }
    }

    /// The background worker works until this time, at the moments at which it has work.
    fn maintain_until(&mut self, end_us: u64) -> Result<()> {
        for _ in 0..STEPS {
            let now = self.clock.now_us();
            let done = self.worker.queue().next_us();
            let is_due = self.wanted.take()
                || done.is_some_and(|us| us <= now)
                || self.due_ms.is_some_and(|ms| ms * 1000 <= now);
            if is_due {
                self.due_ms = match self.worker.step() {
                    Step::Busy => Some(0),
                    Step::WaitBacking => None,
                    Step::Idle { until_ms } => until_ms,
                };
                continue;
            }
            let due = self.due_ms.map(|ms| ms * 1000).into_iter().chain(done).min();
            match due.filter(|us| *us < end_us) {
                Some(us) => self.clock.set_us(us),
                None => return Ok(()),
            }
        }
        Err(Error::new(ErrorKind::TimedOut, "background work does not end"))
    }
}
