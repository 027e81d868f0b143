//! A cache in process, over one half of a mapping and a disk that does not matter.

use crate::instant_disk::{self, InstantDisk};
use crate::scale::Sources;
use crate::window::{StoreLog, Window};
use cbd_engine::{
    Admission, BackendSpec, Cache, CacheStatus, FormatOptions, LogEntry, LogSegmentView, Maintainer,
    Settings, Step, Transport,
};
use cbd_format::Record;
use cbd_pmem::Mapping;
use cbd_runtime::ProcessEnvironment;
use cbd_types::{BackendId, ByteRange, Error, ErrorKind, LaneId, Region, Result};
use std::collections::HashMap;
use std::sync::Arc;
use std::task::Waker;

/// The memory of the rig.
pub type Memory = Window<Mapping>;

/// What the engine of the rig lives in.
pub type Surroundings = ProcessEnvironment<Memory>;

/// A block that is cached.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// Where it is on the device.
    pub place: u64,
    /// Where its data is in the region.
    pub at: u64,
}

/// A cache with what keeps it going.
pub struct Rig {
    cache: Arc<Cache<Surroundings>>,
    maintainer: Maintainer<Surroundings, InstantDisk>,
    log: Arc<StoreLog>,
}

impl Rig {
    /// Formats `memory` and makes a cache of all of it, in front of a device of `device` bytes, with as many lanes as a
    /// daemon would give it.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn new(memory: Memory, device: u64) -> Result<Self> {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
        Self::with_lanes(memory, device, 16 * processors)
    }

    /// As [`new`](Self::new), with at most `lanes_max` lanes.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn with_lanes(memory: Memory, device: u64, lanes_max: u32) -> Result<Self> {
        let log = memory.log();
        let options = FormatOptions { force: true, ..FormatOptions::default() };
        let transport = Transport::format(surroundings(), Region::new(memory), &options)?;
        let info = transport.info();
        let backend = transport.create_backend(&BackendSpec {
            host: transport.register_host("bench", None)?,
            path: "instant".into(),
            identity: "instant".into(),
            size: device,
            sector: 512,
            cache_bytes: Some(u64::from(info.free_segments) * info.layout.segment_size),
            lanes_max,
            handlers: 1,
            data_crc: true,
            settings: Settings::default(),
        })?;
        Self::over(&transport, backend, log)
    }

    /// Opens what [`new`](Self::new) made, which means recovery.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn reopen(memory: Memory) -> Result<Self> {
        let log = memory.log();
        let transport = Transport::open(surroundings(), Region::new(memory))?;
        let backend = transport.backends()?.first().map_or(BackendId(0), |backend| backend.id);
        Self::over(&transport, backend, log)
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
            while !write(&self.cache, place, sources.get(number))? {
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

    /// Records in the logs.
    pub fn records(&self) -> u64 {
        let mut records = 0;
        self.visit(|_, _| records += 1);
        records
    }

    /// The blocks of 4 KiB that were written whole, each with where its newest data is: the last record of each in its
    /// lane's log. Nothing may be written meanwhile.
    pub fn held_blocks(&self) -> Vec<Held> {
        let mut newest = HashMap::new();
        self.visit(|segment, record| {
            if record.range().len() == 4096 {
                newest.insert(record.range().start, segment.base + u64::from(record.data_offset.get()));
            }
        });
        newest.into_iter().map(|(place, at)| Held { place, at }).collect()
    }

    /// Gives all records, those of a lane in the order of its log.
    fn visit(&self, mut give: impl FnMut(&LogSegmentView, Record)) {
        for lane in 0..self.cache.lane_count() {
            for segment in self.cache.log_segments(LaneId(lane)) {
                self.cache.visit_segment(&segment, &mut |_, entry| {
                    if let LogEntry::Record(record) = entry {
                        give(&segment, record);
                    }
                });
            }
        }
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

/// One write; false if there is no space.
///
/// # Errors
/// Those of the engine.
pub fn write(cache: &Cache<Surroundings>, place: u64, data: &[u8]) -> Result<bool> {
    let range = ByteRange::at(place, data.len() as u64);
    Ok(matches!(cache.write(range, data, Waker::noop())?, Admission::Done(_)))
}
