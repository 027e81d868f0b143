//! A cache in process, over one half of a mapping and a disk that does not matter.

use super::scale::Sources;
use crate::instant_disk::{self, InstantDisk};
use crate::window::{StoreLog, Window};
use cbd_engine::{
    Admission, BackendSpec, Cache, CacheStatus, FormatOptions, Maintainer, Settings, Step, Transport,
};
use cbd_pmem::Mapping;
use cbd_runtime::ProcessEnvironment;
use cbd_types::{BackendId, ByteRange, Error, ErrorKind, Region, Result};
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

/// The memory of the rig.
pub type Memory = Window<Mapping>;

type Surroundings = ProcessEnvironment<Memory>;

/// A cache with what keeps it going.
pub struct Rig {
    cache: Arc<Cache<Surroundings>>,
    maintainer: Maintainer<Surroundings, InstantDisk>,
    log: Arc<StoreLog>,
}

impl Rig {
    /// Formats `memory` and makes a cache of all of it, in front of a device of `device` bytes.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn new(memory: Memory, device: u64) -> Result<Self> {
        let log = memory.log();
        let transport = Transport::format(surroundings(), Region::new(memory), &FormatOptions::default())?;
        let info = transport.info();
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
        let backend = transport.create_backend(&BackendSpec {
            host: transport.register_host("bench", None)?,
            path: "instant".into(),
            identity: "instant".into(),
            size: device,
            sector: 512,
            cache_bytes: Some(u64::from(info.free_segments) * info.layout.segment_size),
            lanes_max: 16 * processors,
            handlers: 1,
            data_crc: true,
            settings: Settings::default(),
        })?;
        Self::over(&transport, backend, log)
    }

    /// Opens what [`new`](Self::new) made, which means recovery; how long that took, in seconds.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn reopen(memory: Memory) -> Result<(Self, f64)> {
        let log = memory.log();
        let begun = Instant::now();
        let transport = Transport::open(surroundings(), Region::new(memory))?;
        let backend = transport.backends()?.first().map_or(BackendId(0), |backend| backend.id);
        let rig = Self::over(&transport, backend, log)?;
        Ok((rig, begun.elapsed().as_secs_f64()))
    }

    fn over(
        transport: &Arc<Transport<Surroundings>>,
        backend: BackendId,
        log: Arc<StoreLog>,
    ) -> Result<Self> {
        let cache = transport.open_cache(backend)?;
        let device = transport.backend(backend)?.size;
        let maintainer =
            Maintainer::new(Arc::clone(&cache), InstantDisk::default(), instant_disk::geometry(device));
        Ok(Self { cache, maintainer, log })
    }

    /// The cache alone, as it was filled.
    pub fn without_maintenance(self) -> Arc<Cache<Surroundings>> {
        self.cache
    }

    /// The cache.
    pub fn cache(&self) -> &Cache<Surroundings> {
        &self.cache
    }

    /// What the cache says of itself.
    pub fn status(&self) -> CacheStatus {
        self.cache.status()
    }

    /// Notes where the data of `work` goes.
    pub fn log(&self) -> Arc<StoreLog> {
        Arc::clone(&self.log)
    }

    /// Writes to all `places` in order. The maintenance that this makes necessary is done in between.
    ///
    /// # Errors
    /// Those of the engine, and when maintenance makes no space.
    pub fn write_all(&mut self, places: &[u64], sources: &Sources) -> Result<()> {
        for (number, &place) in places.iter().enumerate() {
            let mut attempts = 0;
            while !self.write(place, sources.get(number))? {
                attempts += 1;
                if attempts > 1000 {
                    let text = "maintenance makes no space although all is written back";
                    return Err(Error::new(ErrorKind::NoSpace, text));
                }
                self.settle()?;
            }
        }
        Ok(())
    }

    /// One write; false if there is no space.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn write(&self, place: u64, data: &[u8]) -> Result<bool> {
        let range = ByteRange::at(place, data.len() as u64);
        Ok(matches!(self.cache.write(range, data, Waker::noop())?, Admission::Done(_)))
    }

    /// Closes the epoch and lets writeback and reclaim do all that there is to do.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn settle(&mut self) -> Result<()> {
        self.cache.request_drain();
        // Nothing waits for time here, so what is idle now stays so; the bound is against an endless loop.
        for _ in 0..100_000_000_u64 {
            if let Step::Idle { .. } = self.maintainer.step() {
                return Ok(());
            }
        }
        Err(Error::new(ErrorKind::TimedOut, "maintenance does not come to an end"))
    }
}

fn surroundings() -> Arc<Surroundings> {
    Arc::new(ProcessEnvironment::new())
}
