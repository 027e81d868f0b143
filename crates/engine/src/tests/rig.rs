//! A small cache on memory in a vector, in front of a disk in a vector.

use super::std::sync::Mutex;
use super::{Bell, Ram, Still, bell};
use crate::{
    Admission, BackendSpec, BackgroundWorker, Cache, FormatOptions, LogEntry, LogSegmentView, Settings, Step,
    Transport, ZeroProgress, base::Requester,
};
use alloc::{collections::VecDeque, sync::Arc, vec, vec::Vec};
use cbd_format::Record;
use cbd_types::{
    BackendId, BackingGeometry, BackingOp, BackingQueue, ByteRange, Error, ErrorKind, LaneId, OpToken,
    Region, Result, backing::BackingDone,
};
use core::task::Waker;

pub(crate) const SECTOR: u64 = 512;

pub(crate) const SEGMENT: u64 = 64 << 10;

/// What the disk was asked to do, without the data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Asked {
    Read(ByteRange),
    Write(ByteRange),
    Zeroes(ByteRange),
    Discard(ByteRange),
    Verify(ByteRange),
    Compare(ByteRange),
    Flush,
}

/// What a disk holds, and what it refuses.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) bytes: Vec<u8>,
    pub(crate) asked: Vec<Asked>,
    /// Changes that touch one of these fail.
    pub(crate) unwritable: Vec<ByteRange>,
    pub(crate) refuses_flushes: bool,
    /// Completes nothing while it is set.
    pub(crate) is_slow: bool,
    /// The most operations that were in flight at a time.
    pub(crate) deepest: usize,
}

/// A disk in a vector; what is submitted is complete at the next poll.
#[derive(Clone, Default)]
pub(crate) struct Disk(pub(crate) Arc<Mutex<State>>);

impl Disk {
    pub(crate) fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.0.lock().expect("no panic"))
    }

    /// What it was asked since the last call.
    pub(crate) fn take_asked(&self) -> Vec<Asked> {
        self.with(|state| core::mem::take(&mut state.asked))
    }

    fn execute(&self, op: &mut BackingOp) -> Result<()> {
        self.with(|state| {
            let (asked, range) = match &*op {
                BackingOp::Read { offset, buffer } => {
                    let range = ByteRange::at(*offset, buffer.len() as u64);
                    (Asked::Read(range), None)
                }
                BackingOp::Write { offset, buffer } => {
                    let range = ByteRange::at(*offset, buffer.len() as u64);
                    (Asked::Write(range), Some(range))
                }
                BackingOp::WriteZeroes { range } => (Asked::Zeroes(*range), Some(*range)),
                BackingOp::Discard { range } => (Asked::Discard(*range), Some(*range)),
                BackingOp::Verify { range } => (Asked::Verify(*range), None),
                BackingOp::Compare { range, .. } => (Asked::Compare(*range), None),
                BackingOp::Flush => (Asked::Flush, None),
            };
            state.asked.push(asked);
            let is_refused = match range {
                Some(range) => state.unwritable.iter().any(|bad| bad.overlaps(&range)),
                None => asked == Asked::Flush && state.refuses_flushes,
            };
            if is_refused {
                return Err(Error::new(ErrorKind::Backing, "the disk refuses it"));
            }
            match op {
                BackingOp::Read { offset, buffer } => {
                    let length = buffer.len();
                    buffer.copy_from_slice(&state.bytes[*offset as usize..][..length]);
                }
                BackingOp::Write { offset, buffer } => {
                    state.bytes[*offset as usize..][..buffer.len()].copy_from_slice(buffer);
                }
                BackingOp::WriteZeroes { range } | BackingOp::Discard { range } => {
                    state.bytes[range.start as usize..range.end as usize].fill(0);
                }
                BackingOp::Compare { range, expected } => {
                    let bytes = &state.bytes[range.start as usize..range.end as usize];
                    if let Some(found) = expected.first_difference(0, bytes, 512) {
                        let found = ByteRange::at(range.start + found.start, found.len());
                        return Err(Error::new(ErrorKind::Mismatch, "it has other content").at_range(found));
                    }
                }
                BackingOp::Verify { .. } | BackingOp::Flush => {}
            }
            Ok(())
        })
    }
}

/// A queue of it.
pub(crate) struct Queue {
    disk: Disk,
    submitted: VecDeque<(OpToken, BackingOp)>,
    depth: usize,
}

impl Queue {
    /// Bytes of the writes in flight.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes = |op: &BackingOp| match op {
            BackingOp::Write { buffer, .. } => buffer.len() as u64,
            _ => 0,
        };
        self.submitted.iter().map(|(_, op)| bytes(op)).sum()
    }
}

impl BackingQueue for Queue {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        self.submitted.push_back((token, op));
        let count = self.submitted.len();
        self.disk.with(|state| state.deepest = state.deepest.max(count));
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        if self.disk.with(|state| state.is_slow) {
            return;
        }
        for (token, mut op) in self.submitted.drain(..) {
            let result = self.disk.execute(&mut op);
            done.push(BackingDone { token, op, result });
        }
    }

    fn wait(&mut self, done: &mut Vec<BackingDone>) {
        self.poll(done);
    }

    fn in_flight(&self) -> usize {
        self.submitted.len()
    }

    fn depth(&self) -> usize {
        self.depth
    }
}

/// How a rig is made.
#[derive(Clone, Copy)]
pub(crate) struct Options {
    pub(crate) device: u64,
    pub(crate) lanes: u32,
    /// With the state segment.
    pub(crate) segments: u64,
    pub(crate) data_crc: bool,
    pub(crate) settings: Settings,
    pub(crate) discard_zeroes: bool,
    pub(crate) volatile_cache: bool,
    /// Of the queue to the disk.
    pub(crate) depth: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            device: 4 << 20,
            lanes: 1,
            segments: 9,
            data_crc: true,
            settings: Settings::default(),
            discard_zeroes: true,
            volatile_cache: true,
            depth: 8,
        }
    }
}

/// The cache and what is around it.
pub(crate) struct Rig {
    pub(crate) environment: Arc<Still>,
    pub(crate) transport: Arc<Transport<Still>>,
    pub(crate) backend: BackendId,
    pub(crate) cache: Arc<Cache<Still>>,
    pub(crate) worker: BackgroundWorker<Still, Queue>,
    pub(crate) disk: Disk,
    pub(crate) room: Arc<Bell>,
    pub(crate) waker: Waker,
    pub(crate) options: Options,
}

impl Rig {
    pub(crate) fn new(options: Options) -> Self {
        let environment = Arc::new(Still::default());
        let size = (options.segments + 4) * SEGMENT + (256 << 10);
        let format = FormatOptions {
            segment_size: Some(SEGMENT),
            force: true,
            host_rows: 4,
            backend_rows: 4,
            blkdev_rows: 4,
        };
        let region = Ram::region(size as usize);
        let transport = Transport::format(Arc::clone(&environment), region, &format).expect("there is room");
        let host = transport.register_host("host", None).expect("there is room");
        let spec = BackendSpec {
            host,
            path: "/dev/vector".into(),
            identity: "vector".into(),
            size: options.device,
            sector: SECTOR as u32,
            cache_bytes: Some(options.segments * SEGMENT),
            lanes_max: options.lanes,
            handlers: 1,
            data_crc: options.data_crc,
            settings: options.settings,
        };
        let backend = transport.create_backend(&spec).expect("there is room");
        let disk = Disk::default();
        disk.with(|state| state.bytes = (0..options.device).map(|at| (at / SECTOR) as u8 | 128).collect());
        Self::open(environment, transport, backend, disk, options)
    }

    fn open(
        environment: Arc<Still>,
        transport: Arc<Transport<Still>>,
        backend: BackendId,
        disk: Disk,
        options: Options,
    ) -> Self {
        let cache = transport.open_cache(backend).expect("it opens");
        let geometry = BackingGeometry {
            size: options.device,
            sector: SECTOR as u32,
            physical_sector: 4096,
            rotational: false,
            volatile_cache: options.volatile_cache,
            discard_zeroes: options.discard_zeroes,
            discard_granularity: 512,
        };
        let queue = Queue { disk: disk.clone(), submitted: VecDeque::new(), depth: options.depth };
        let worker = BackgroundWorker::new(Arc::clone(&cache), queue, geometry);
        let (room, waker) = bell();
        Self { environment, transport, backend, cache, worker, disk, room, waker, options }
    }

    /// The next process: it finds the memory as it is.
    pub(crate) fn reopened(self) -> Self {
        let Self { environment, transport, backend, cache, worker, disk, options, .. } = self;
        let memory = transport.region().memory().copy();
        drop((worker, cache, transport));
        let transport = Transport::open(Arc::clone(&environment), Region::new(memory)).expect("it opens");
        Self::open(environment, transport, backend, disk, options)
    }

    /// The next process with other memory, and with a disk of its own that has the same bytes.
    pub(crate) fn in_memory(&self, memory: Ram) -> Self {
        let environment = Arc::clone(&self.environment);
        let transport = Transport::open(Arc::clone(&environment), Region::new(memory)).expect("it opens");
        let disk = Disk::default();
        disk.with(|state| state.bytes = self.disk.with(|state| state.bytes.clone()));
        Self::open(environment, transport, self.backend, disk, self.options)
    }

    /// A copy of the memory as it is now.
    pub(crate) fn memory(&self) -> Ram {
        self.transport.region().memory().copy()
    }

    /// Another process in the memory as it is now, which changes nothing of this one.
    pub(crate) fn recovered(&self) -> Arc<Cache<Still>> {
        let region = Region::new(self.transport.region().memory().copy());
        let transport = Transport::open(Arc::new(Still::default()), region).expect("it opens");
        transport.open_cache(self.backend).expect("it opens")
    }

    /// Writes bytes of `value`; false without space.
    pub(crate) fn write(&self, range: ByteRange, value: u8) -> bool {
        let data = vec![value; range.len() as usize];
        matches!(self.cache.write(range, &data, &self.waker).expect("it runs"), Admission::Done(_))
    }

    /// Zeroes; false without space.
    pub(crate) fn zero(&self, range: ByteRange, discard: bool) -> bool {
        let zeroed = self.cache.zero(range, discard, &mut ZeroProgress::default(), &self.waker);
        matches!(zeroed.expect("it runs"), Admission::Done(_))
    }

    /// Reads; what is missed comes from the disk and is given to the cache.
    pub(crate) fn read(&self, range: ByteRange) -> Vec<u8> {
        let (mut bytes, mut misses) = (vec![0xee; range.len() as usize], Vec::new());
        self.cache.read(range, &mut bytes, &mut misses).expect("nothing is damaged");
        for miss in misses {
            let (start, end) = (miss.range.start as usize, miss.range.end as usize);
            let data = self.disk.with(|state| state.bytes[start..end].to_vec());
            let at = start - range.start as usize;
            bytes[at..at + data.len()].copy_from_slice(&data);
            self.cache.complete_fill(miss, &data);
        }
        bytes
    }

    /// One step of the background worker, and the wait that it asks for.
    pub(crate) fn step(&mut self) -> Step {
        let step = self.worker.step();
        if let Step::Idle { until_ms: Some(until) } = step {
            self.environment.set_monotonic(until);
        }
        step
    }

    /// Runs the background worker until it has nothing to do.
    pub(crate) fn settle(&mut self) {
        for _ in 0..20_000 {
            if self.step() == (Step::Idle { until_ms: None }) {
                return;
            }
        }
        panic!("the background worker never becomes idle: {:?}", self.cache.status());
    }

    /// Runs the background worker until it waits for something after `ms`.
    pub(crate) fn settle_until(&mut self, ms: u64) {
        for _ in 0..20_000 {
            match self.worker.step() {
                Step::Idle { until_ms: Some(until) } if until <= ms => self.environment.set_monotonic(until),
                Step::Idle { .. } => return,
                Step::Busy | Step::WaitBacking => {}
            }
        }
        panic!("the background worker never waits: {:?}", self.cache.status());
    }

    pub(crate) fn drain(&mut self) {
        self.cache.request_drain();
        self.settle();
    }

    /// Runs the background worker until it waits for time or for nothing, without moving the clock.
    pub(crate) fn run(&mut self) -> Option<u64> {
        for _ in 0..1_000_000 {
            if let Step::Idle { until_ms } = self.worker.step() {
                return until_ms;
            }
        }
        panic!("the background worker never waits: {:?}", self.cache.status());
    }

    /// Drains without moving the clock.
    pub(crate) fn drain_without_clock(&mut self) {
        self.cache.request_drain();
        while matches!(self.worker.step(), Step::Busy | Step::WaitBacking) {}
    }

    /// The records of a lane that can be read, in order, each with its segment and slot.
    pub(crate) fn records_of(&self, lane: LaneId) -> Vec<(LogSegmentView, u32, Record)> {
        let mut records = Vec::new();
        for segment in self.cache.log().segments(lane) {
            self.cache.log().visit(&segment, &mut |slot, entry| {
                if let LogEntry::Record(record) = entry {
                    records.push((segment, slot, record));
                }
            });
        }
        records
    }

    /// The record with the newest data of the sector at `at`.
    pub(crate) fn newest(&self, at: u64) -> (LogSegmentView, u32, Record) {
        let lane = self.cache.base().identity().lanes.lane_of(at);
        let holds = |(segment, slot, _): &(LogSegmentView, u32, Record)| {
            !self.cache.log().newest_parts(segment, *slot, ByteRange::at(at, SECTOR)).is_empty()
        };
        self.records_of(lane).into_iter().find(holds).expect("a record holds it")
    }

    /// Changes a byte of the memory without the knowledge of the cache.
    pub(crate) fn flip(&self, at: u64) {
        let mut byte = [0];
        self.transport.region().load(at, &mut byte).expect("it can be read");
        let _ = self.transport.region().store(at, &[byte[0] ^ 1]);
    }

    /// Damages the newest data of the sector at `at`.
    pub(crate) fn damage(&self, at: u64) {
        let (segment, _, record) = self.newest(at);
        self.flip(segment.base + u64::from(record.data_offset.get()) + at - record.range().start);
    }

    /// Damages both copies of the record with the newest data of the sector at `at`.
    pub(crate) fn lose_record(&self, at: u64) {
        let (segment, slot, _) = self.newest(at);
        self.cache.log().shape().slot(slot).iter().for_each(|at| self.flip(segment.base + at + 20));
    }

    /// Damages the data of each record of the first lane for which `which` is true of its first sector.
    pub(crate) fn damage_sectors(&self, which: impl Fn(u64) -> bool) {
        for (segment, _, record) in self.records_of(LaneId(0)) {
            if record.kind().has_data() && which(record.range().start / SECTOR) {
                self.flip(segment.base + u64::from(record.data_offset.get()));
            }
        }
    }

    /// Writes sectors until the cache is full, and zeroes until no record of a client finds room. Returns the number of
    /// sectors; they begin at the first one.
    pub(crate) fn fill_up(&self) -> u64 {
        self.fill_up_from(0)
    }

    /// As [`fill_up`](Self::fill_up), from another sector on.
    pub(crate) fn fill_up_from(&self, first: u64) -> u64 {
        let mut count = first;
        while self.write(ByteRange::at(count * SECTOR, SECTOR), 1 + count as u8 % 100) {
            count += 1;
        }
        while self.zero(ByteRange { start: self.options.device - SECTOR, end: self.options.device }, false) {}
        count
    }

    /// Takes the segments that are kept back, as if other lanes had needed them.
    pub(crate) fn take_reserve(&self) -> Vec<u32> {
        core::iter::from_fn(|| self.cache.base().pool().take(Requester::Essential, None).ok()).collect()
    }

    pub(crate) fn give_space(&self, taken: Vec<u32>) {
        taken.into_iter().for_each(|segment| self.cache.base().pool().release(segment));
    }
}
