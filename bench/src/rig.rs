//! A cache in process, over a part of a mapping, with its background worker run between turns.

use crate::instant_disk::InstantDisk;
use crate::scale::Sources;
use crate::window::Window;
use cbd_backing::{Backing, PollableQueue};
use cbd_engine::{
    Admission, BackendSpec, BackgroundWorker, Cache, CacheStatus, FormatOptions, LogEntry, LogSegmentView,
    Settings, Step, Transport,
};
use cbd_export::wait_any;
use cbd_format::Record;
use cbd_pmem::Mapping;
use cbd_runtime::{ProcessEnvironment, disk};
use cbd_types::{BackendId, ByteRange, Error, ErrorKind, HostId, LaneId, Pmem, Region, Result};
use std::collections::HashMap;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

/// The memory of the rig.
pub type Memory = Window<Mapping>;

/// The environment of the rig's engine.
pub type Surroundings = ProcessEnvironment<Memory>;

/// A block that is cached.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// Its offset on the device.
    pub place: u64,
    /// The offset of its data in the region.
    pub at: u64,
}

/// Operations that writeback keeps in flight on the disk: as many as in a daemon.
const DEPTH: usize = 64;

/// Background work that takes longer than this has failed.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A cache with its background worker.
pub struct Rig<P: Pmem + 'static = Memory> {
    cache: Arc<Cache<ProcessEnvironment<P>>>,
    worker: BackgroundWorker<ProcessEnvironment<P>, Box<dyn PollableQueue>>,
    disk: Arc<dyn Backing>,
}

impl Rig {
    /// Formats `memory` and creates a cache in all of it, in front of a device of `device` bytes, with as many lanes as a daemon
    /// would use.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn new(memory: Memory, device: u64) -> Result<Self> {
        Self::with_lanes(memory, device, lanes_of_a_daemon())
    }

    /// As [`new`](Self::new), with at most `lanes_max` lanes.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn with_lanes(memory: Memory, device: u64, lanes_max: u32) -> Result<Self> {
        Self::before(memory, Arc::new(InstantDisk::new(device)?), lanes_max)
    }

    /// As [`new`](Self::new), in front of a backing device.
    ///
    /// # Errors
    /// The errors of the engine and of the device.
    pub fn before(memory: Memory, disk: Arc<dyn Backing>, lanes_max: u32) -> Result<Self> {
        let surroundings = Arc::new(ProcessEnvironment::new());
        let cache = format(&surroundings, memory, disk.geometry().size, lanes_max)?;
        Self::over(cache, disk)
    }

    /// Opens a cache that [`new`](Self::new) created; opening recovers it.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn reopen(memory: Memory) -> Result<Self> {
        let transport = Transport::open(Arc::new(Surroundings::new()), Region::new(memory))?;
        let backend = transport.backends()?.first().map_or(BackendId(0), |backend| backend.id);
        let disk = InstantDisk::new(transport.backend(backend)?.size)?;
        Self::over(transport.open_cache(backend)?, Arc::new(disk))
    }
}

impl<P: Pmem + 'static> Rig<P> {
    /// A background worker for a cache in front of a backing device.
    ///
    /// # Errors
    /// The errors of the device.
    pub fn over(cache: Arc<Cache<ProcessEnvironment<P>>>, disk: Arc<dyn Backing>) -> Result<Self> {
        let worker = BackgroundWorker::new(Arc::clone(&cache), disk.open_queue(DEPTH)?, disk.geometry());
        Ok(Self { cache, worker, disk })
    }

    /// Returns the filled cache without its background worker.
    pub fn without_worker(self) -> Arc<Cache<ProcessEnvironment<P>>> {
        self.cache
    }

    /// The cache.
    pub fn cache(&self) -> &Cache<ProcessEnvironment<P>> {
        &self.cache
    }

    /// A reference to the cache for other threads. They must have finished before background work runs.
    pub fn share(&self) -> Arc<Cache<ProcessEnvironment<P>>> {
        Arc::clone(&self.cache)
    }

    /// The disk.
    pub const fn disk(&self) -> &Arc<dyn Backing> {
        &self.disk
    }

    /// The status of the cache.
    pub fn status(&self) -> CacheStatus {
        self.cache.status()
    }

    /// Writes to all `places` in order, and runs the necessary background work in between.
    ///
    /// # Errors
    /// The errors of the engine, and an error if background work frees no space.
    pub fn write_all(&mut self, places: &[u64], sources: &Sources) -> Result<()> {
        for (number, &place) in places.iter().enumerate() {
            let mut attempts = 0;
            while !write(&self.cache, place, sources.get(number))? {
                attempts += 1;
                if attempts > 1000 {
                    let text = "background work frees no space although all is written back";
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

    /// The blocks of 4 KiB that were written whole, each with the offset of its newest data: the last record of the block in the
    /// log of its lane. No thread may write during the call.
    pub fn held_blocks(&self) -> Vec<Held> {
        let mut newest = HashMap::new();
        self.visit(|segment, record| {
            if record.range().len() == 4096 {
                newest.insert(record.range().start, segment.base + u64::from(record.data_offset.get()));
            }
        });
        newest.into_iter().map(|(place, at)| Held { place, at }).collect()
    }

    /// Calls `give` for all records, those of a lane in the order of its log.
    fn visit(&self, mut give: impl FnMut(&LogSegmentView, Record)) {
        for lane in 0..self.cache.lane_count() {
            for segment in self.cache.log().segments(LaneId(lane)) {
                self.cache.log().visit(&segment, &mut |_, entry| {
                    if let LogEntry::Record(record) = entry {
                        give(&segment, record);
                    }
                });
            }
        }
    }

    /// Closes the epoch, and runs writeback and reclaim until both are idle.
    ///
    /// # Errors
    /// The errors of the engine.
    pub fn settle(&mut self) -> Result<()> {
        let epoch = self.cache.request_drain();
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            match self.worker.step() {
                Step::Busy => {}
                Step::WaitBacking => {
                    wait_any(&[self.worker.queue().wait_descriptor()], Some(TIMEOUT))?;
                }
                // No work here depends on time, so an idle worker stays idle.
                Step::Idle { .. } if self.cache.is_drained(epoch) => return Ok(()),
                Step::Idle { .. } => break,
            }
        }
        Err(Error::new(ErrorKind::TimedOut, "background work does not end"))
    }
}

/// Formats `memory` and creates a cache in all of it, in front of a device of `device` bytes.
///
/// # Errors
/// The errors of the engine.
pub fn format<P: Pmem + 'static>(
    surroundings: &Arc<ProcessEnvironment<P>>,
    memory: P,
    device: u64,
    lanes_max: u32,
) -> Result<Arc<Cache<ProcessEnvironment<P>>>> {
    let options = FormatOptions { force: true, ..FormatOptions::default() };
    let transport = Transport::format(Arc::clone(surroundings), Region::new(memory), &options)?;
    let segments = transport.info().free_segments;
    create(&transport, transport.register_host("bench", None)?, segments, device, lanes_max)
}

/// Creates a cache of `host` of so many segments, in front of a device of `device` bytes.
///
/// # Errors
/// The errors of the engine.
pub fn create<P: Pmem + 'static>(
    transport: &Arc<Transport<ProcessEnvironment<P>>>,
    host: HostId,
    segments: u32,
    device: u64,
    lanes_max: u32,
) -> Result<Arc<Cache<ProcessEnvironment<P>>>> {
    let backend = transport.create_backend(&BackendSpec {
        host,
        path: "disk".into(),
        identity: "disk".into(),
        size: device,
        sector: 512,
        cache_bytes: Some(u64::from(segments) * transport.info().layout.segment_size),
        lanes_max: lanes_max.min(disk::lanes_max(u64::from(segments), processors())),
        handlers: 1,
        data_crc: true,
        // Writes between two rests find space without reclaim.
        settings: Settings { gc_percent: 70, ..Settings::default() },
    })?;
    transport.open_cache(backend)
}

/// The maximum number of lanes that a daemon gives a large cache.
pub fn lanes_of_a_daemon() -> u32 {
    disk::lanes_max(u64::MAX, processors())
}

fn processors() -> u32 {
    std::thread::available_parallelism().map_or(1, |count| count.get() as u32)
}

/// Executes one write; returns false if there is no space.
///
/// # Errors
/// The errors of the engine.
pub fn write<P: Pmem + 'static>(
    cache: &Cache<ProcessEnvironment<P>>,
    place: u64,
    data: &[u8],
) -> Result<bool> {
    let range = ByteRange::at(place, data.len() as u64);
    Ok(matches!(cache.write(range, data, Waker::noop())?, Admission::Done(_)))
}

/// The error of a turn that found no space.
pub fn no_space() -> Error {
    Error::new(
        ErrorKind::NoSpace,
        "the free part of the cache is too small for a turn without background work",
    )
}
