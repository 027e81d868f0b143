//! The engine with a small cache that serves a trace.
//!
//! Invariants: time passes with the requests and salts come from the seed, so that nothing depends on the
//! machine; the background worker runs whenever it is woken, until it has nothing to do.

use super::trace::{DEVICE, Request};
use crate::instant_disk::InstantDisk;
use cbd_advise::simulated_time::{Surroundings, Wanted};
use cbd_backing::{Backing, PollableQueue};
use cbd_engine::{Admission, BackendSpec, BackgroundWorker, Cache, FormatOptions, Settings, Step, Transport};
use cbd_pmem::Mapping;
use cbd_runtime::disk;
use cbd_types::{AlignedBuffer, ByteRange, CHECKSUM_BLOCK, Error, ErrorKind, LaneId, Region, Result};
use std::sync::Arc;
use std::task::Waker;

/// The machine for which the tools create the cache, so that the figures do not depend on this one.
const PROCESSORS: u32 = 2;
/// Microseconds of the rig's clock in which a request arrives.
const REQUEST_US: u64 = 20;
/// Operations that writeback keeps in flight on the disk.
const DEPTH: usize = 64;
/// Requests between two samples of the number of held blocks.
const SAMPLED: usize = 4096;
/// Limits against an endless loop.
const ATTEMPTS: usize = 1000;
const STEPS: usize = 1_000_000;

/// The size of the cache.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    region: u64,
    /// The segment size; `None` for the size that the tools choose.
    segment: Option<u64>,
}

impl Scale {
    /// 256 MiB, as the tools create it on a machine with two processors, or less for a quick run.
    pub const fn of(quick: bool) -> Self {
        if quick {
            Self { region: 32 << 20, segment: Some(64 << 10) }
        } else {
            Self { region: 256 << 20, segment: None }
        }
    }

    /// 4 GiB, or less for a quick run.
    pub const fn large(quick: bool) -> Self {
        if quick {
            Self { region: 64 << 20, segment: Some(64 << 10) }
        } else {
            Self { region: 4 << 30, segment: None }
        }
    }
}

/// The results of the cache.
pub struct Served {
    /// The hit ratio of reads.
    pub hit: f64,
    /// Blocks that it held on average during the second half.
    pub held: u64,
}

/// The use of the bytes of the cache, as shares of all.
pub struct Space {
    /// The newest data of blocks.
    pub blocks: f64,
    /// Data of blocks whose newest data is elsewhere or does not exist any more.
    pub overwritten: f64,
    /// Records and headers, both with their copies, and the state of the cache.
    pub records: f64,
    /// Segments that are not full yet, and unused space in full segments.
    pub unused: f64,
    /// Free segments.
    pub free: f64,
}

/// A cache with its background worker.
pub struct Rig {
    surroundings: Arc<Surroundings>,
    cache: Arc<Cache<Surroundings>>,
    worker: BackgroundWorker<Surroundings, Box<dyn PollableQueue>>,
    wanted: Arc<Wanted>,
    capacity: u32,
}

impl Rig {
    /// Creates an empty cache.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn new(scale: Scale, seed: u64) -> Result<Self> {
        let surroundings = Arc::new(Surroundings::new(seed));
        let region = Region::new(Mapping::anonymous(scale.region)?);
        let format = FormatOptions { segment_size: scale.segment, ..FormatOptions::default() };
        let transport = Transport::format(Arc::clone(&surroundings), region, &format)?;
        let info = transport.info();
        let cache_bytes = u64::from(info.free_segments) * info.layout.segment_size;
        let capacity = (cache_bytes / CHECKSUM_BLOCK) as u32;
        let device = u64::from(DEVICE) * u64::from(capacity) * CHECKSUM_BLOCK;
        let backend = transport.create_backend(&BackendSpec {
            host: transport.register_host("bench", None)?,
            path: "instant".into(),
            identity: "instant".into(),
            size: device,
            sector: 512,
            cache_bytes: Some(cache_bytes),
            lanes_max: disk::lanes_max(u64::from(info.free_segments), PROCESSORS),
            handlers: 1,
            data_crc: true,
            settings: Settings::default(),
        })?;
        let cache = transport.open_cache(backend)?;
        let wanted = Arc::new(Wanted::default());
        cache.set_worker_waker(Waker::from(Arc::clone(&wanted)));
        let disk = InstantDisk::new(device)?;
        let worker = BackgroundWorker::new(Arc::clone(&cache), disk.open_queue(DEPTH)?, disk.geometry());
        Ok(Self { surroundings, cache, worker, wanted, capacity })
    }

    /// The number of 4 KiB blocks that fit in the bytes of the cache.
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Serves the trace. Misses are cached as a blkdev does it.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn serve(&mut self, requests: &[Request]) -> Result<Served> {
        let mut buffer = AlignedBuffer::zeroed(CHECKSUM_BLOCK as usize);
        let (mut reads, mut hits) = (0_u64, 0_u64);
        let mut held = Vec::new();
        for (number, request) in requests.iter().enumerate() {
            if number >= requests.len() / 2 && number % SAMPLED == 0 {
                held.push(self.cache.status().index_blocks);
            }
            self.surroundings.set_us(self.surroundings.now_us() + REQUEST_US);
            let range = ByteRange::at(u64::from(request.block) * CHECKSUM_BLOCK, CHECKSUM_BLOCK);
            if request.is_write {
                self.write(range, &buffer)?;
            } else {
                reads += 1;
                hits += u64::from(self.read(range, &mut buffer)?);
            }
            if self.wanted.take() {
                self.maintain()?;
            }
        }
        Ok(Served {
            hit: hits as f64 / reads as f64,
            held: held.iter().sum::<u64>() / held.len().max(1) as u64,
        })
    }

    /// The present use of the bytes of the cache.
    pub fn space(&self) -> Space {
        let status = self.cache.status();
        let (shape, size) = (self.cache.log().shape(), status.segment_size);
        let (mut records, mut data, mut unused) = (0, 0, 0);
        for lane in (0..status.lanes).map(LaneId) {
            for segment in self.cache.log().segments(lane) {
                // Each record describes one block, and has no continuation lines.
                let of_data = u64::from(segment.slots) * CHECKSUM_BLOCK;
                let of_records = shape.records_end(segment.slots) + (size - shape.data_top());
                records += of_records;
                data += of_data;
                unused += size - of_records - of_data;
            }
        }
        let all = u64::from(self.capacity) * CHECKSUM_BLOCK;
        let blocks = status.index_blocks * CHECKSUM_BLOCK;
        let free = u64::from(status.free_segments) * size;
        let share = |bytes: u64| bytes as f64 / all as f64;
        Space {
            blocks: share(blocks),
            overwritten: share(data - blocks),
            records: share(records + all - u64::from(status.segments) * size),
            unused: share(unused),
            free: share(free),
        }
    }

    /// Reads; returns whether the read hit.
    fn read(&self, range: ByteRange, buffer: &mut [u8]) -> Result<bool> {
        let mut misses = Vec::new();
        self.cache.read(range, buffer, &mut misses)?;
        let is_hit = misses.is_empty();
        misses.into_iter().for_each(|miss| self.cache.complete_fill(miss, buffer));
        Ok(is_hit)
    }

    fn write(&mut self, range: ByteRange, data: &[u8]) -> Result<()> {
        for _ in 0..ATTEMPTS {
            if let Admission::Done(_) = self.cache.write(range, data, Waker::noop())? {
                return Ok(());
            }
            self.cache.request_drain();
            self.maintain()?;
        }
        Err(Error::new(ErrorKind::NoSpace, "background work frees no space although all is written back"))
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
