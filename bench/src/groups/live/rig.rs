//! Caches on one transport that serve reads, and the rule that divides the space among them.
//!
//! Invariants: the first cache has no minimum beyond what its lanes need, like the second; the third one has a minimum of an eighth of
//! the space; each background worker runs whenever it was woken, until it has nothing to do.

use super::CACHES;
use crate::instant_disk::InstantDisk;
use cbd_advise::simulated_time::{Surroundings, Wanted};
use cbd_backing::{Backing, PollableQueue};
use cbd_engine::{
    BackendSpec, BackgroundWorker, Cache, FormatOptions, Settings, SharedSpace, Step, Transport,
};
use cbd_pmem::Mapping;
use cbd_runtime::share::{Member, Tracker, grow, plan};
use cbd_types::{AlignedBuffer, BackendId, ByteRange, CHECKSUM_BLOCK, Error, ErrorKind, Region, Result};
use std::sync::Arc;
use std::task::Waker;

/// Seconds between two divisions, as in the daemon.
pub const ROUND_S: f64 = 2.0;

/// Lanes of a cache.
const LANES: u32 = 4;
const SEGMENT: u64 = 64 << 10;
const DEPTH: usize = 64;
/// Requests in a millisecond of the clock.
const REQUESTS_IN_A_MS: u64 = 12;
/// The share of the space that the third cache keeps, one in so many.
const MINIMUM_ONE_IN: u32 = 8;
/// Limit against an endless loop.
const STEPS: usize = 1_000_000;

/// The sizes of the caches.
#[derive(Clone, Copy)]
pub enum Sizes {
    /// By their loads.
    Shared,
    /// So many of so many parts.
    Fixed([u32; CACHES], u32),
}

/// A cache with its background worker.
struct Cached {
    id: BackendId,
    cache: Arc<Cache<Surroundings>>,
    worker: BackgroundWorker<Surroundings, Box<dyn PollableQueue>>,
    wanted: Arc<Wanted>,
    tracker: Tracker,
    segments: u32,
    bounds: SharedSpace,
}

/// The caches.
pub struct Pool {
    surroundings: Arc<Surroundings>,
    requests: u64,
    transport: Arc<Transport<Surroundings>>,
    caches: Vec<Cached>,
    buffer: AlignedBuffer,
    all: u32,
    is_shared: bool,
    is_moving: bool,
    least: f64,
}

impl Pool {
    const fn region(quick: bool) -> u64 {
        if quick { 12 << 20 } else { 64 << 20 }
    }

    /// Blocks of 4 KiB in the space.
    pub const fn blocks(quick: bool) -> u32 {
        (Self::region(quick) / CHECKSUM_BLOCK) as u32
    }

    /// Creates empty caches.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn new(quick: bool, seed: u64, sizes: Sizes) -> Result<Self> {
        let surroundings = Arc::new(Surroundings::new(seed));
        let region = Region::new(Mapping::anonymous(Self::region(quick))?);
        let format = FormatOptions { segment_size: Some(SEGMENT), ..FormatOptions::default() };
        let transport = Transport::format(Arc::clone(&surroundings), region, &format)?;
        let all = transport.info().free_segments;
        let host = transport.register_host("bench", None)?;
        let least = LANES * 8 + 1;
        let mut caches = Vec::new();
        for number in 0..CACHES {
            let min = if number == CACHES - 1 { (all / MINIMUM_ONE_IN).max(least) } else { least };
            let bounds = SharedSpace { min, max: all, weight: 1 };
            let (segments, shared) = match sizes {
                Sizes::Shared => (min, Some(bounds)),
                Sizes::Fixed(parts, of) => (all * parts[number] / of, None),
            };
            let size = 2 * Self::region(quick);
            let spec = BackendSpec {
                host,
                path: "instant".into(),
                identity: "instant".into(),
                size,
                sector: 512,
                cache_bytes: Some(u64::from(segments) * SEGMENT),
                lanes_max: LANES,
                handlers: 1,
                data_crc: true,
                settings: Settings::default(),
            };
            let id = transport.create_sharing_backend(&spec, None, shared)?;
            let cache = transport.open_cache(id)?;
            let wanted = Arc::new(Wanted::default());
            cache.set_worker_waker(Waker::from(Arc::clone(&wanted)));
            let disk = InstantDisk::new(size)?;
            let worker = BackgroundWorker::new(Arc::clone(&cache), disk.open_queue(DEPTH)?, disk.geometry());
            caches.push(Cached { id, cache, worker, wanted, tracker: Tracker::default(), segments, bounds });
        }
        let buffer = AlignedBuffer::zeroed(CHECKSUM_BLOCK as usize);
        let is_shared = matches!(sizes, Sizes::Shared);
        let least = f64::INFINITY;
        Ok(Self {
            surroundings,
            requests: 0,
            transport,
            caches,
            buffer,
            all,
            is_shared,
            is_moving: false,
            least,
        })
    }

    /// Segments of each cache.
    pub fn segments(&self) -> [u32; CACHES] {
        std::array::from_fn(|number| self.caches[number].segments)
    }

    /// Segments of all.
    pub const fn all_segments(&self) -> u32 {
        self.all
    }

    /// The least size of the cache with a minimum so far, over that minimum.
    pub const fn least_over_minimum(&self) -> f64 {
        self.least
    }

    /// Reads a block of a device; returns whether the read hit.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn read(&mut self, number: usize, block: u32) -> Result<bool> {
        self.requests += 1;
        self.surroundings.set_us(self.requests * 1000 / REQUESTS_IN_A_MS);
        let cached = &mut self.caches[number];
        let range = ByteRange::at(u64::from(block) * CHECKSUM_BLOCK, CHECKSUM_BLOCK);
        let mut misses = Vec::new();
        cached.cache.read(range, &mut self.buffer, &mut misses)?;
        let is_hit = misses.is_empty();
        misses.into_iter().for_each(|miss| cached.cache.complete_fill(miss, &self.buffer));
        if cached.wanted.take() {
            cached.maintain()?;
        }
        Ok(is_hit)
    }

    /// Divides the space by the rule of the daemon, if it is shared.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn divide(&mut self) -> Result<()> {
        if !self.is_shared {
            return Ok(());
        }
        let mut members = Vec::new();
        for cached in &mut self.caches {
            cached.tracker.note(&cached.cache.hit_curve(), ROUND_S);
            members.push(Member {
                segments: cached.segments,
                min: cached.bounds.min,
                max: cached.bounds.max,
                weight: cached.bounds.weight,
                curve: cached.tracker.curve(SEGMENT),
                is_waiting: false,
            });
        }
        let next = plan(&members, self.transport.info().free_segments, self.is_moving);
        self.is_moving = next.shrinks.iter().any(|segments| *segments > 0);
        for ((cached, member), segments) in self.caches.iter_mut().zip(&mut members).zip(&next.shrinks) {
            if *segments > 0 {
                let mut shrink = cached.cache.begin_clean_shrink(*segments)?;
                cached.maintain()?;
                let taken = shrink.settle();
                self.transport.finish_shrink(cached.id, shrink)?;
                cached.segments -= taken;
                member.segments -= taken;
            }
        }
        let more = grow(&members, &next.targets, self.transport.info().free_segments);
        for (cached, more) in self.caches.iter_mut().zip(more).filter(|(_, more)| *more > 0) {
            self.transport.grow_cache(cached.id, &cached.cache, more)?;
            cached.segments += more;
        }
        let last = &self.caches[CACHES - 1];
        self.least = self.least.min(f64::from(last.segments) / f64::from(last.bounds.min));
        Ok(())
    }
}

impl Cached {
    fn maintain(&mut self) -> Result<()> {
        for _ in 0..STEPS {
            if matches!(self.worker.step(), Step::Idle { .. }) {
                return Ok(());
            }
        }
        Err(Error::new(ErrorKind::TimedOut, "background work does not end"))
    }
}
