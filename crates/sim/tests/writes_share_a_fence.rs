//! Writes that a client submits at once share a fence if they go to different lanes, and no write completes before
//! it.

use cbd_device::{Device, Queue};
use cbd_engine::{BackendSpec, BackgroundWorker, Cache, FormatOptions, Settings, Step, TOGETHER, Transport};
use cbd_sim::{CrashMemory, DiskFaults, Keep, SimDisk, SimEnvironment, SimQueue, act_as};
use cbd_types::{
    AlignedBuffer, BackendId, ByteRange, CHUNK, Completion, ErrorKind, Operation, Region, Request,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

const SEGMENT: u64 = 64 << 10;
const SEGMENTS: u64 = 1 + 8 * LANES;
const LANES: u64 = 16;
const BLOCK: u64 = 4096;

/// Whether the waker was called.
#[derive(Default)]
struct Called(AtomicBool);

impl Wake for Called {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

struct Rig {
    memory: CrashMemory,
    disk: SimDisk,
    environment: Arc<SimEnvironment>,
    backend: BackendId,
    cache: Arc<Cache<SimEnvironment>>,
    queue: Queue<SimEnvironment, SimQueue>,
    done: Vec<Completion>,
}

impl Rig {
    fn new() -> Self {
        Self::with_segments_of(SEGMENT)
    }

    fn with_segments_of(segment: u64) -> Self {
        act_as(0);
        let memory = CrashMemory::new((SEGMENTS + 4) * segment + (256 << 10));
        let disk = SimDisk::new(SimDisk::ordinary(LANES * CHUNK, 512), 3);
        let options = FormatOptions {
            segment_size: Some(segment),
            host_rows: 4,
            backend_rows: 4,
            blkdev_rows: 4,
            ..FormatOptions::default()
        };
        let environment = Arc::new(SimEnvironment::new(5, 0));
        let region = Region::new(memory.clone());
        let transport = Transport::format(Arc::clone(&environment), region, &options).unwrap();
        let backend = transport
            .create_backend(&BackendSpec {
                host: transport.register_host("host", None).unwrap(),
                path: "/dev/simulated".into(),
                identity: "simulated".into(),
                size: LANES * CHUNK,
                sector: 512,
                cache_bytes: Some(SEGMENTS * segment),
                lanes_max: LANES as u32,
                handlers: 1,
                data_crc: true,
                settings: Settings::default(),
            })
            .unwrap();
        let cache = transport.open_cache(backend).unwrap();
        assert_eq!(cache.lane_count(), LANES as u32);
        let device = Arc::new(Device::cached(Arc::clone(&cache), disk.geometry()));
        let queue = Queue::new(device, disk.queue(4), Waker::noop().clone());
        let mut rig = Self { memory, disk, environment, backend, cache, queue, done: Vec::new() };
        // The first record of a lane opens a segment, which has fences of its own.
        for chunk in 0..LANES {
            rig.write(chunk, chunk * CHUNK + 8 * BLOCK, false);
        }
        rig.answered(LANES as usize);
        rig
    }

    /// Submits a write of a block, plugged.
    fn write(&mut self, id: u64, at: u64, fua: bool) {
        self.write_range(id, ByteRange::at(at, BLOCK), fua);
    }

    fn write_range(&mut self, id: u64, range: ByteRange, fua: bool) {
        let buffer = AlignedBuffer::from_slice(&vec![(id as u8).wrapping_add(1); range.len() as usize]);
        let request = Request::unmarked(id, Operation::Write, range, fua, buffer);
        self.queue.submit_plugged(request, &mut self.done);
    }

    /// The content of `range`, all of which is in the cache.
    fn read(&mut self, range: ByteRange) -> Vec<u8> {
        let mut bytes = vec![0; range.len() as usize];
        self.queue.read_into(0, range, &mut bytes).expect("a hit").unwrap();
        bytes
    }

    /// Fills the cache without reclaim: lane 0 takes all free segments, and the other lanes keep their open ones.
    fn fill(&mut self) {
        let mut number = 0;
        while self.queue.parked() == 0 {
            self.write(number, number % 1000 * BLOCK, false);
            self.queue.unplug(&mut self.done);
            number += 1;
        }
        self.done.clear();
    }

    fn worker(&self) -> BackgroundWorker<SimEnvironment, SimQueue> {
        BackgroundWorker::new(Arc::clone(&self.cache), self.disk.queue(4), self.disk.geometry())
    }

    /// Unplugs, and expects that `count` requests complete without an error; returns their completions.
    fn answered(&mut self, count: usize) -> Vec<Completion> {
        self.queue.unplug(&mut self.done);
        assert_eq!((self.done.len(), self.queue.parked()), (count, 0));
        assert!(self.done.iter().all(|completion| completion.result.is_ok()));
        std::mem::take(&mut self.done)
    }

    /// The results of the requests, by their numbers.
    fn ends(&mut self) -> Vec<(u64, Option<ErrorKind>)> {
        let kind = |done: &Completion| done.result.as_ref().err().map(cbd_types::Error::kind);
        let mut ends: Vec<_> = self.done.iter().map(|done| (done.id, kind(done))).collect();
        ends.sort_unstable_by_key(|(id, _)| *id);
        ends
    }

    /// The cache as another process finds it after a power cut.
    fn reopened(&self) -> Arc<Cache<SimEnvironment>> {
        let memory = self.memory.power_cut(11, Keep::Nothing);
        let environment = Arc::new(SimEnvironment::new(6, 0));
        Transport::open(environment, Region::new(memory)).unwrap().open_cache(self.backend).unwrap()
    }

    fn fences(&self) -> u64 {
        self.memory.counters().fences
    }
}

#[test]
fn the_maximum_number_of_writes_to_different_lanes_shares_one_fence() {
    let mut rig = Rig::new();
    let before = rig.fences();
    for number in 0..TOGETHER as u64 {
        rig.write(number, number * CHUNK, false);
    }
    rig.answered(TOGETHER);
    assert_eq!(rig.fences() - before, 1);
}

#[test]
fn fua_writes_share_the_fence_of_their_marks_as_well() {
    let mut rig = Rig::new();
    let (before, epoch) = (rig.fences(), rig.cache.status().epoch.0);
    // Every other one is FUA.
    for number in 0..TOGETHER as u64 {
        rig.write(100 + number, number * CHUNK, number % 2 == 0);
    }
    rig.answered(TOGETHER);
    assert_eq!((rig.fences() - before, rig.cache.status().epoch.0 - epoch), (2, 1));
    assert_eq!(rig.memory.counters().stores_over_unfenced, 0);
    // Each of their lanes is marked: damage there is detected, and damage in other lanes counts as an incomplete
    // write.
    let image = rig.memory.image();
    for number in 0..TOGETHER {
        let written = [101 + number as u8; BLOCK as usize];
        let at = image.windows(BLOCK as usize).position(|bytes| bytes == written).expect("it was written");
        rig.memory.flip(at as u64, 5);
    }
    let cache = rig.reopened();
    for number in 0..TOGETHER as u64 {
        let range = ByteRange::at(number * CHUNK, BLOCK);
        let read = cache.read(range, &mut vec![0; BLOCK as usize], &mut Vec::new());
        let wanted = (number % 2 == 0).then_some(ErrorKind::Media);
        assert_eq!(read.err().map(|error| error.kind()), wanted, "number {number}");
    }
}

#[test]
fn a_lane_has_one_record_behind_a_fence() {
    let mut rig = Rig::new();
    let before = rig.fences();
    // Lanes 0, 1 and 2 together, then 1 and 3.
    for (number, chunk) in [0, 1, 2, 1, 3].into_iter().enumerate() {
        rig.write(number as u64, chunk * CHUNK + number as u64 * BLOCK, false);
    }
    rig.answered(5);
    assert_eq!(rig.fences() - before, 2);
    assert_eq!(rig.memory.counters().stores_over_unfenced, 0);
}

#[test]
fn nothing_is_answered_before_the_fence_and_nothing_is_held_forever() {
    let mut rig = Rig::new();
    let before = rig.fences();
    for number in 0..3 {
        rig.write(number, number * CHUNK, false);
    }
    assert_eq!((rig.done.len(), rig.queue.parked(), rig.fences() - before), (0, 3, 0));
    rig.queue.poll(&mut rig.done);
    assert_eq!((rig.done.len(), rig.queue.parked(), rig.fences() - before), (3, 0, 1));
}

#[test]
fn a_write_that_finds_no_space_waits_and_the_others_are_answered() {
    let mut rig = Rig::new();
    rig.fill();
    for (id, chunk) in [(1, 1), (2, 0), (3, 2)] {
        rig.write(id, chunk * CHUNK, false);
    }
    rig.queue.unplug(&mut rig.done);
    let mut answered: Vec<_> = rig.done.iter().map(|completion| completion.id).collect();
    answered.sort_unstable();
    assert_eq!((answered, rig.queue.parked()), (vec![1, 3], 2));
}

#[test]
fn fua_writes_that_wait_for_space_together_are_woken_and_made_durable() {
    let mut rig = Rig::new();
    rig.fill();
    // A queue that already waits would be woken in any case.
    let device = Arc::new(Device::cached(Arc::clone(&rig.cache), rig.disk.geometry()));
    let called = Arc::new(Called::default());
    let other = Queue::new(device, rig.disk.queue(4), Waker::from(Arc::clone(&called)));
    let _first = std::mem::replace(&mut rig.queue, other);
    for id in 0..2 {
        rig.write(id, (id + 1) * BLOCK, true);
    }
    rig.queue.unplug(&mut rig.done);
    assert_eq!((rig.done.len(), rig.queue.parked()), (0, 2));
    let mut worker = rig.worker();
    rig.cache.request_drain();
    for _ in 0..10_000 {
        if called.0.load(Ordering::SeqCst) {
            break;
        }
        if matches!(worker.step(), Step::Idle { .. }) {
            rig.environment.advance(1000);
        }
    }
    assert!(called.0.load(Ordering::SeqCst), "the waker was not called");
    let epoch = rig.cache.status().epoch.0;
    rig.queue.poll(&mut rig.done);
    rig.answered(2);
    assert_eq!(rig.cache.status().epoch.0, epoch + 2, "each was a FUA write");
}

#[test]
fn a_write_that_finds_no_space_fails_where_the_disk_has_refused_for_long() {
    let mut rig = Rig::new();
    rig.fill();
    rig.disk.set_faults(DiskFaults { change_permille: 1000, ..DiskFaults::default() });
    let mut worker = rig.worker();
    rig.cache.request_drain();
    for _ in 0..10_000 {
        if rig.cache.status().is_stalled {
            break;
        }
        if matches!(worker.step(), Step::Idle { .. }) {
            rig.environment.advance(1000);
        }
    }
    assert!(rig.cache.status().is_stalled, "it has refused for {} ms", rig.environment.clock_ms());
    for (id, chunk) in [(1, 1), (2, 0), (3, 2)] {
        rig.write(id, chunk * CHUNK, false);
    }
    rig.queue.unplug(&mut rig.done);
    assert_eq!(rig.ends(), [(1, None), (2, Some(ErrorKind::Backing)), (3, None)]);
    // The write that waited before fails, too.
    rig.queue.poll(&mut rig.done);
    assert_eq!(rig.queue.parked(), 0);
}

#[test]
fn writes_behind_a_stop_are_refused_and_leave_nothing() {
    let mut rig = Rig::new();
    rig.write(0, 0, false);
    rig.write(1, CHUNK, false);
    rig.cache.stop();
    let before = rig.memory.counters().stores;
    rig.queue.unplug(&mut rig.done);
    assert_eq!(rig.ends(), [(0, Some(ErrorKind::Stopped)), (1, Some(ErrorKind::Stopped))]);
    assert_eq!(rig.memory.counters().stores, before);
}

#[test]
fn long_writes_are_not_held() {
    // They still consist of one piece.
    let mut rig = Rig::with_segments_of(4 * SEGMENT);
    let range = ByteRange::at(0, 32 << 10);
    assert!(range.len() <= u64::from(rig.cache.atomic_unit()));
    rig.write_range(0, range, false);
    assert_eq!((rig.done.len(), rig.queue.parked()), (1, 0));
}

#[test]
fn empty_writes_are_done_and_store_nothing() {
    let mut rig = Rig::new();
    for id in 0..3 {
        rig.write_range(id, ByteRange::at(0, 0), false);
    }
    let before = rig.memory.counters().stores;
    rig.answered(3);
    assert_eq!(rig.memory.counters().stores, before);
}

#[test]
fn the_last_of_many_writes_to_a_block_survives_a_power_cut() {
    let mut rig = Rig::new();
    let block = ByteRange::at(BLOCK, BLOCK);
    // More than TOGETHER, to the same and to other lanes in between, some FUA, and each a block or a sector
    // long.
    for id in 0..2 * TOGETHER as u64 + 3 {
        rig.write_range(id, if id % 3 == 1 { ByteRange::at(BLOCK, 512) } else { block }, id % 4 == 2);
        rig.write(100, (1 + id % (LANES - 1)) * CHUNK, false);
    }
    rig.answered(2 * (2 * TOGETHER + 3));
    let mut last = vec![19; BLOCK as usize];
    assert_eq!(rig.read(block), last);
    for (id, discard) in [(30, true), (40, false)] {
        rig.write(id, BLOCK, false);
        let operation = if discard { Operation::Discard } else { Operation::WriteZeroes };
        let request = Request::unmarked(id, operation, block, false, AlignedBuffer::default());
        rig.queue.submit_plugged(request, &mut rig.done);
        rig.write_range(id + 1, ByteRange::at(BLOCK, 512), true);
        rig.write(100, CHUNK, false);
        rig.answered(4);
        last.fill(0);
        last[..512].fill(id as u8 + 2);
        assert_eq!(rig.read(block), last);
    }
    let cache = rig.reopened();
    let mut found = vec![1; BLOCK as usize];
    cache.read(block, &mut found, &mut Vec::new()).unwrap();
    assert_eq!(found, last);
}

#[test]
fn requests_other_than_single_piece_writes_follow_held_writes() {
    let mut rig = Rig::new();
    rig.write(0, 0, false);
    rig.write(1, CHUNK, false);
    let buffer = AlignedBuffer::zeroed(BLOCK as usize);
    let range = ByteRange::at(CHUNK, BLOCK);
    let read = Request::unmarked(2, Operation::Read, range, false, buffer);
    rig.queue.submit_plugged(read, &mut rig.done);
    let done = rig.answered(3);
    assert_eq!((done[2].id, &done[2].buffer[..]), (2, &[2; BLOCK as usize][..]));
}

#[test]
fn the_last_of_two_overlapping_writes_determines_the_content() {
    let mut rig = Rig::new();
    rig.write(0, 0, false);
    rig.write(1, 512, false);
    rig.answered(2);
    let range = ByteRange::at(0, BLOCK + 512);
    let buffer = AlignedBuffer::zeroed(range.len() as usize);
    let read = Request::unmarked(2, Operation::Read, range, false, buffer);
    rig.queue.submit(read, &mut rig.done);
    let done = rig.answered(1);
    assert!(done[0].buffer[..512].iter().all(|byte| *byte == 1));
    assert!(done[0].buffer[512..].iter().all(|byte| *byte == 2));
}

#[test]
fn a_write_past_the_end_fails_alone() {
    let mut rig = Rig::new();
    rig.write(0, 0, false);
    rig.write(1, LANES * CHUNK, false);
    rig.write(2, CHUNK, true);
    rig.queue.unplug(&mut rig.done);
    assert_eq!(rig.ends(), [(0, None), (1, Some(ErrorKind::OutOfRange)), (2, None)]);
}
