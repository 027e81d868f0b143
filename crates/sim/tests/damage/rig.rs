//! A small cache on simulated memory, and functions that damage it.
//!
//! Invariants: the first lane's records go to slots 0, 1, 2 ... of its segments; the simulated disk answers a
//! read that misses the cache, as the device layer would.

use crate::outside::{Alarm, RigEnvironment};
use cbd_engine::{
    Admission, BackendSpec, BackgroundWorker, Cache, FormatOptions, Settings, Step, Transport, ZeroProgress,
};
use cbd_sim::{Content, CrashMemory, Keep, SimDisk, SimQueue, Watchdog, act_as};
use cbd_types::{BackendId, ByteRange, ErrorKind, Region, Result};
use parking_lot::Mutex;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

pub const PAGE: u64 = 4096;
pub const BLOCK: u64 = 4096;
pub const SECTOR: u64 = 512;
/// Slots whose two copies lie in one pair of pages.
pub const SLOTS_PER_PAIR: u64 = 64;
/// Steps after which a background worker that is still busy counts as stuck.
const STEPS_MAX: usize = 50_000;

/// The content of a sector that a reader gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Seen {
    /// This byte throughout.
    All(u8),
    /// The content of the disk before the first write.
    Initial,
    /// Neither: torn, or of another offset.
    Wrong,
    /// An error that reports a failed medium.
    Media,
}

#[derive(Clone, Copy)]
pub struct Shape {
    pub device: u64,
    pub lanes_max: u32,
    pub segment: u64,
    /// Including the state segment.
    pub segments: u64,
}

impl Default for Shape {
    fn default() -> Self {
        Self { device: 4 << 20, lanes_max: 1, segment: 64 << 10, segments: 9 }
    }
}

pub struct Rig {
    pub environment: Arc<RigEnvironment>,
    pub memory: CrashMemory,
    pub disk: SimDisk,
    pub transport: Arc<Transport<RigEnvironment>>,
    pub backend: BackendId,
    pub cache: Arc<Cache<RigEnvironment>>,
    pub worker: BackgroundWorker<RigEnvironment, SimQueue>,
    pub room: Arc<Alarm>,
    shape: Shape,
    _watchdog: Watchdog,
}

impl Rig {
    pub fn new() -> Self {
        Self::of(Shape::default())
    }

    pub fn of(shape: Shape) -> Self {
        act_as(0);
        let environment = Arc::new(RigEnvironment::new());
        let memory = CrashMemory::new((shape.segments + 4) * shape.segment + (256 << 10));
        let disk = SimDisk::new(SimDisk::ordinary(shape.device, SECTOR as u32), 3);
        let options = FormatOptions {
            segment_size: Some(shape.segment),
            force: true,
            host_rows: 4,
            backend_rows: 4,
            blkdev_rows: 4,
        };
        let region = Region::new(memory.clone());
        let transport = Transport::format(Arc::clone(&environment), region, &options).unwrap();
        let host = transport.register_host("host", None).unwrap();
        let backend = transport
            .create_backend(&BackendSpec {
                host,
                path: "/dev/simulated".into(),
                identity: "simulated".into(),
                size: shape.device,
                sector: SECTOR as u32,
                cache_bytes: Some(shape.segments * shape.segment),
                lanes_max: shape.lanes_max,
                handlers: 1,
                data_crc: true,
                settings: Settings::default(),
            })
            .unwrap();
        let cache = transport.open_cache(backend).unwrap();
        let worker = BackgroundWorker::new(Arc::clone(&cache), disk.queue(4), disk.geometry());
        let _watchdog = Watchdog::new(Duration::from_secs(240), "a small cache with damage");
        let room = Arc::default();
        Self { environment, memory, disk, transport, backend, cache, worker, room, shape, _watchdog }
    }

    fn waker(&self) -> Waker {
        Waker::from(Arc::clone(&self.room))
    }

    /// Writes; false without space.
    pub fn try_write(&self, at: u64, length: u64, value: u8) -> bool {
        let data = vec![value; length as usize];
        let admission = self.cache.write(ByteRange::at(at, length), &data, &self.waker());
        matches!(admission.unwrap(), Admission::Done(_))
    }

    /// Writes, and drains until there is space.
    pub fn write(&mut self, at: u64, length: u64, value: u8) {
        for _ in 0..100 {
            if self.try_write(at, length, value) {
                return;
            }
            self.drain();
        }
        panic!("a write at {at} finds no space, however often the cache is drained");
    }

    /// Writes `count` sectors, one record each, beginning with sector `first`; the content of a sector is its
    /// number.
    pub fn write_sectors(&self, first: u64, count: u64) {
        for sector in first..first + count {
            assert!(self.try_write(sector * SECTOR, SECTOR, value_of(sector)), "there is space");
        }
    }

    pub fn zero(&self, range: ByteRange) {
        assert!(self.try_zero(range), "there is space");
    }

    /// Zeroes; false without space.
    pub fn try_zero(&self, range: ByteRange) -> bool {
        let admission = self.cache.zero(range, false, &mut ZeroProgress::default(), &self.waker());
        matches!(admission.unwrap(), Admission::Done(_))
    }

    /// Fills the open segment of the lane with writes at `at`, until the next one is opened.
    pub fn leave_the_segment(&mut self, at: u64) {
        let before = self.logs().last().map(|log| log.ordinal);
        for _ in 0..64 {
            self.write(at, BLOCK, 99);
            if self.logs().last().map(|log| log.ordinal) > before {
                return;
            }
        }
        panic!("a segment is never full");
    }

    /// The content that a client reads in the sector at `at`.
    pub fn see(&self, at: u64) -> Seen {
        self.see_in(ByteRange::at(at, SECTOR))
    }

    /// The content of the block at `at` in a read of this block and the next one. Such a read uses the records; a
    /// read of one block finds its data through the index.
    pub fn see_by_record(&self, at: u64) -> Seen {
        self.see_in(ByteRange::at(at, 2 * BLOCK))
    }

    /// The content of the first sector of a read of `range`.
    fn see_in(&self, range: ByteRange) -> Seen {
        let (mut bytes, mut misses) = (vec![0xee; range.len() as usize], Vec::new());
        match self.cache.read(range, &mut bytes, &mut misses) {
            Err(error) if error.kind() == ErrorKind::Media => return Seen::Media,
            Err(error) => panic!("a read of {range} fails with {}", error.line()),
            Ok(()) => {}
        }
        let is_missed = misses.iter().any(|miss| miss.range.start == range.start);
        misses.into_iter().for_each(|miss| self.cache.cancel_fill(miss));
        if is_missed { self.on_disk(range.start) } else { seen(range.start, &bytes[..SECTOR as usize]) }
    }

    /// The content of the sector at `at` on the disk.
    pub fn on_disk(&self, at: u64) -> Seen {
        seen(at, self.disk.contents().sector(at / SECTOR, SECTOR))
    }

    /// Whether the status lists the byte at `at` as damaged.
    pub fn is_listed(&self, at: u64) -> bool {
        self.cache.status().damaged.iter().any(|damaged| damaged.range.contains(&ByteRange::at(at, SECTOR)))
    }

    #[track_caller]
    pub fn expect_lost(&self, at: u64) {
        assert_eq!(self.see(at), Seen::Media, "what was lost at {at} must fail to read");
        assert!(self.is_listed(at), "what was lost at {at} must be listed");
    }

    #[track_caller]
    pub fn expect_value(&self, at: u64, value: u8) {
        assert_eq!(self.see(at), Seen::All(value), "what was acknowledged at {at}");
    }

    /// Drains, and does all other background work.
    pub fn drain(&mut self) {
        self.cache.request_drain();
        self.settle();
    }

    /// Runs the background worker until no work is left; the clock advances as the worker requests.
    pub fn settle(&mut self) {
        for _ in 0..STEPS_MAX {
            let step = self.step();
            let status = self.cache.status();
            assert!(status.free_segments <= status.segments, "a segment is free twice");
            if step == (Step::Idle { until_ms: None }) {
                return;
            }
        }
        panic!("the background worker never becomes idle: {:?}", self.cache.status());
    }

    /// One step of the background worker, and the wait that it requests.
    pub fn step(&mut self) -> Step {
        let step = self.worker.step();
        if let Step::Idle { until_ms: Some(until) } = step {
            let now = self.environment.clock_ms();
            self.environment.advance(until.saturating_sub(now).max(1));
        }
        step
    }

    pub fn reclaim_at(&self, gc_percent: u8) {
        self.cache.set_settings(Settings { gc_percent, ..self.cache.settings() }).unwrap();
    }

    /// Drains, and reclaims everything but the open segment.
    pub fn reclaim_everything(&mut self) {
        let before = self.cache.settings().gc_percent;
        self.reclaim_at(0);
        self.drain();
        self.settle();
        self.reclaim_at(before);
    }

    /// Cuts the power; the disk loses nothing, because that does not matter here.
    pub fn restart(self) -> Self {
        self.try_restart().unwrap()
    }

    pub fn try_restart(self) -> Result<Self> {
        let Self { environment, memory, disk, transport, backend, cache, worker, shape, .. } = self;
        drop((worker, cache, transport));
        disk.process_crash(7);
        let memory = memory.power_cut(11, Keep::Nothing);
        let transport = Transport::open(Arc::clone(&environment), Region::new(memory.clone()))?;
        let cache = transport.open_cache(backend)?;
        let worker = BackgroundWorker::new(Arc::clone(&cache), disk.queue(4), disk.geometry());
        let _watchdog = Watchdog::new(Duration::from_secs(240), "a small cache with damage");
        let room = Arc::default();
        Ok(Self { environment, memory, disk, transport, backend, cache, worker, room, shape, _watchdog })
    }

    /// The memory at every store and fence of `work`.
    pub fn moments_of(&mut self, work: impl FnOnce(&mut Self)) -> Vec<CrashMemory> {
        let moments = Arc::new(Mutex::new(Vec::new()));
        let witness = Arc::clone(&moments);
        self.memory.watch(1000, 1, move |memory| witness.lock().push(memory));
        work(self);
        self.memory.unwatch();
        let moments = std::mem::take(&mut *moments.lock());
        assert!(!moments.is_empty(), "nothing was stored");
        moments
    }

    /// The only cache, as another process finds it in `memory`.
    pub fn opened(&self, memory: &CrashMemory) -> Arc<Cache<RigEnvironment>> {
        let region = Region::new(memory.clone());
        let transport = Transport::open(Arc::clone(&self.environment), region).unwrap();
        transport.open_cache(self.backend).unwrap()
    }

    /// Overwrites the whole device, and expects that no damage is left: in the cache, on the disk and after a
    /// restart.
    pub fn expect_that_overwriting_heals(mut self) {
        let piece = u64::from(self.cache.atomic_unit()).min(16 << 10);
        for at in (0..self.shape.device).step_by(piece as usize) {
            self.write(at, piece, value_of(at / piece));
        }
        self.drain();
        for restarted in [false, true] {
            let status = self.cache.status();
            assert_eq!(status.damaged, [], "restarted: {restarted}");
            assert!(status.backing_is_consistent, "{:?}", status.void_reason);
            assert_eq!((status.dirty_bytes, status.dirty_records), (0, 0));
            for at in (0..self.shape.device).step_by(piece as usize) {
                self.expect_value(at, value_of(at / piece));
                assert_eq!(self.on_disk(at), Seen::All(value_of(at / piece)), "at {at} on the disk");
            }
            if !restarted {
                self = self.restart();
            }
        }
    }

    /// First byte of segment `number` of the transport; the cache has the first segments, and its state is in
    /// segment 0.
    pub fn segment(&self, number: u64) -> u64 {
        self.transport.info().layout.segment_area + number * self.shape.segment
    }

    /// The segments that hold a log, including reclaimed ones, by ordinal.
    pub fn logs(&self) -> Vec<Log> {
        let image = self.memory.image();
        let number = |at: u64| u64::from_le_bytes(image[at as usize..at as usize + 8].try_into().unwrap());
        let mut logs: Vec<Log> = (1..self.shape.segments)
            .map(|segment| self.segment(segment))
            .filter(|base| &image[*base as usize + 4..*base as usize + 8] == b"CBDl")
            .map(|base| Log { base, ordinal: number(base + 40), size: self.shape.segment })
            .collect();
        logs.sort_by_key(|log| log.ordinal);
        logs
    }

    /// The oldest segment that holds a log.
    pub fn first_log(&self) -> Log {
        self.logs()[0]
    }

    pub fn poison(&self, at: u64, length: u64) {
        self.memory.poison(ByteRange::at(at, length));
    }

    /// Changes bytes of the region without the knowledge of the cache.
    pub fn overwrite(&self, at: u64, bytes: &[u8]) {
        let image = self.memory.image();
        for (offset, byte) in (at..).zip(bytes) {
            for bit in 0..8 {
                if (image[offset as usize] ^ byte) >> bit & 1 == 1 {
                    self.memory.flip(offset, bit);
                }
            }
        }
    }

    /// Both copies of 64 records fail at once: the page pair that holds the slots from 64 x `pair` on.
    pub fn lose_pair(&self, log: Log, pair: u64) {
        self.poison(log.base + PAGE + pair * 2 * PAGE, 2 * PAGE);
    }

    /// Both copies of each of these slots fail.
    pub fn lose_slots(&self, log: Log, slots: &[u64]) {
        slots.iter().flat_map(|slot| log.slot(*slot)).for_each(|at| self.poison(at, 64));
    }

    /// Damages both copies of each of these slots; a second call restores them.
    pub fn flip_slots(&self, log: Log, slots: &[u64]) {
        slots.iter().flat_map(|slot| log.slot(*slot)).for_each(|at| self.memory.flip(at + 20, 3));
    }

    /// All data in the segment fails, behind `pairs` page pairs of records.
    pub fn lose_data(&self, log: Log, pairs: u64) {
        let begin = PAGE + pairs * 2 * PAGE;
        self.poison(log.base + begin, log.size - PAGE - begin);
    }
}

/// A segment of a log.
#[derive(Clone, Copy, Debug)]
pub struct Log {
    pub base: u64,
    pub ordinal: u64,
    pub size: u64,
}

impl Log {
    /// The offsets of the two copies of a slot.
    pub fn slot(&self, slot: u64) -> [u64; 2] {
        let primary = self.base + PAGE + slot / SLOTS_PER_PAIR * 2 * PAGE + slot % SLOTS_PER_PAIR * 64;
        [primary, primary + PAGE]
    }
}

/// A value for write number `number`; never zero.
pub fn value_of(number: u64) -> u8 {
    (number % 251 + 2) as u8
}

fn seen(at: u64, sector: &[u8]) -> Seen {
    if sector.iter().all(|byte| *byte == sector[0]) {
        Seen::All(sector[0])
    } else if Content::of(at / SECTOR, sector) == Some(Content::INITIAL) {
        Seen::Initial
    } else {
        Seen::Wrong
    }
}
