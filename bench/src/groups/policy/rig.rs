//! The engine with a small cache, to which a trace is put.
//!
//! Always true here: time passes with the requests and salts come from the seed, so that nothing depends on the machine; the
//! maintainer runs whenever it is woken, until it has nothing to do.

use super::trace::{DEVICE, Request};
use crate::instant_disk::InstantDisk;
use cbd_backing::{Backing, PollableQueue};
use cbd_engine::{
    Admission, BackendSpec, Cache, Environment, FormatOptions, Maintainer, Settings, Step, Transport,
};
use cbd_pmem::Mapping;
use cbd_types::{AlignedBuffer, ByteRange, CHECKSUM_BLOCK, Error, ErrorKind, Region, Result};
use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Wake, Waker};

/// Requests in a millisecond of the rig's clock.
const REQUESTS_IN_A_MS: u64 = 50;
/// Operations that writeback keeps going on the disk.
const DEPTH: usize = 64;
/// Bounds against an endless loop.
const ATTEMPTS: usize = 1000;
const STEPS: usize = 1_000_000;

/// How large the cache is.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    region: u64,
    segment: u64,
    lanes: u32,
}

impl Scale {
    /// A sixty-fourth of 16 GiB with segments of 16 MiB, or less if it is to be quick.
    pub const fn of(quick: bool) -> Self {
        if quick {
            Self { region: 32 << 20, segment: 64 << 10, lanes: 16 }
        } else {
            Self { region: 256 << 20, segment: 256 << 10, lanes: 32 }
        }
    }
}

/// What the engine needs from the outside.
struct Surroundings {
    requests: AtomicU64,
    random: Mutex<SmallRng>,
}

impl Environment for Surroundings {
    type Memory = Mapping;
    type Lock = parking_lot::RawMutex;

    fn random(&self) -> u64 {
        self.random.lock().random()
    }

    fn wall_ms(&self) -> u64 {
        self.monotonic_ms()
    }

    fn monotonic_ms(&self) -> u64 {
        self.requests.load(Ordering::Relaxed) / REQUESTS_IN_A_MS
    }
}

/// Notes that the maintainer is wanted.
#[derive(Default)]
struct Wanted(AtomicBool);

impl Wake for Wanted {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A cache with what keeps it going.
pub struct Rig {
    surroundings: Arc<Surroundings>,
    cache: Arc<Cache<Surroundings>>,
    maintainer: Maintainer<Surroundings, Box<dyn PollableQueue>>,
    wanted: Arc<Wanted>,
    capacity: u32,
}

impl Rig {
    /// An empty cache.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn new(scale: Scale, seed: u64) -> Result<Self> {
        let surroundings = Arc::new(Surroundings {
            requests: AtomicU64::new(0),
            random: Mutex::new(SmallRng::seed_from_u64(seed)),
        });
        let region = Region::new(Mapping::anonymous(scale.region)?);
        let format = FormatOptions { segment_size: Some(scale.segment), ..FormatOptions::default() };
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
            lanes_max: scale.lanes,
            handlers: 1,
            data_crc: true,
            settings: Settings::default(),
        })?;
        let cache = transport.open_cache(backend)?;
        let wanted = Arc::new(Wanted::default());
        cache.set_maintenance_waker(Waker::from(Arc::clone(&wanted)));
        let disk = InstantDisk::new(device)?;
        let maintainer = Maintainer::new(Arc::clone(&cache), disk.open_queue(DEPTH)?, disk.geometry());
        Ok(Self { surroundings, cache, maintainer, wanted, capacity })
    }

    /// Blocks of 4 KiB in as many bytes as the cache has.
    pub const fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Blocks that it holds now.
    pub fn held(&self) -> u64 {
        self.cache.status().index_blocks
    }

    /// The share of reads that hit. What is missing is cached as a blkdev does it.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn hit_ratio(&mut self, requests: &[Request]) -> Result<f64> {
        let mut buffer = AlignedBuffer::zeroed(CHECKSUM_BLOCK as usize);
        let (mut reads, mut hits) = (0_u64, 0_u64);
        for request in requests {
            self.surroundings.requests.fetch_add(1, Ordering::Relaxed);
            let range = ByteRange::at(u64::from(request.block) * CHECKSUM_BLOCK, CHECKSUM_BLOCK);
            if request.is_write {
                self.write(range, &buffer)?;
            } else {
                reads += 1;
                hits += u64::from(self.read(range, &mut buffer)?);
            }
            if self.wanted.0.swap(false, Ordering::Relaxed) {
                self.maintain()?;
            }
        }
        Ok(hits as f64 / reads as f64)
    }

    /// Whether it hit.
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
        Err(Error::new(ErrorKind::NoSpace, "maintenance makes no space although all is written back"))
    }

    fn maintain(&mut self) -> Result<()> {
        for _ in 0..STEPS {
            if matches!(self.maintainer.step(), Step::Idle { .. }) {
                return Ok(());
            }
        }
        Err(Error::new(ErrorKind::TimedOut, "maintenance does not come to an end"))
    }
}
