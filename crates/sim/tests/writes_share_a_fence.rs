//! Writes that a client submits at once share a fence where they go to different lanes, and none is answered before it.

use cbd_device::{Device, Queue};
use cbd_engine::{BackendSpec, FormatOptions, Settings, TOGETHER, Transport};
use cbd_sim::{CrashMemory, SimDisk, SimEnvironment, SimQueue, act_as};
use cbd_types::{AlignedBuffer, ByteRange, CHUNK, Completion, Operation, Region, Request};
use std::sync::Arc;
use std::task::Waker;

const SEGMENT: u64 = 64 << 10;
const SEGMENTS: u64 = 1 + 8 * LANES;
const LANES: u64 = 16;
const BLOCK: u64 = 4096;

struct Rig {
    memory: CrashMemory,
    queue: Queue<SimEnvironment, SimQueue>,
    done: Vec<Completion>,
}

impl Rig {
    fn new() -> Self {
        act_as(0);
        let memory = CrashMemory::new((SEGMENTS + 4) * SEGMENT + (256 << 10));
        let disk = SimDisk::new(SimDisk::ordinary(LANES * CHUNK, 512), 3);
        let options = FormatOptions {
            segment_size: Some(SEGMENT),
            host_rows: 4,
            backend_rows: 4,
            blkdev_rows: 4,
            ..FormatOptions::default()
        };
        let environment = Arc::new(SimEnvironment::new(5, 0));
        let transport = Transport::format(environment, Region::new(memory.clone()), &options).unwrap();
        let backend = transport
            .create_backend(&BackendSpec {
                host: transport.register_host("host", None).unwrap(),
                path: "/dev/simulated".into(),
                identity: "simulated".into(),
                size: LANES * CHUNK,
                sector: 512,
                cache_bytes: Some(SEGMENTS * SEGMENT),
                lanes_max: LANES as u32,
                handlers: 1,
                data_crc: true,
                settings: Settings::default(),
            })
            .unwrap();
        let cache = transport.open_cache(backend).unwrap();
        assert_eq!(cache.lane_count(), LANES as u32);
        let device = Arc::new(Device::cached(cache, disk.geometry()));
        let queue = Queue::new(device, disk.queue(4), Waker::noop().clone());
        let mut rig = Self { memory, queue, done: Vec::new() };
        // The first record of a lane opens a segment, which has fences of its own.
        for chunk in 0..LANES {
            rig.write(chunk, chunk * CHUNK + 8 * BLOCK, false);
        }
        rig.answered(LANES as usize);
        rig
    }

    /// Submits a write of a block with others behind it.
    fn write(&mut self, id: u64, at: u64, fua: bool) {
        let buffer = AlignedBuffer::from_slice(&[(id as u8).wrapping_add(1); BLOCK as usize]);
        let range = ByteRange::at(at, BLOCK);
        let request = Request { id, operation: Operation::Write, range, fua, buffer };
        self.queue.submit_plugged(request, &mut self.done);
    }

    /// That so many requests are answered when no more come, all of them well; what they are.
    fn answered(&mut self, count: usize) -> Vec<Completion> {
        self.queue.unplug(&mut self.done);
        assert_eq!((self.done.len(), self.queue.parked()), (count, 0));
        assert!(self.done.iter().all(|completion| completion.result.is_ok()));
        std::mem::take(&mut self.done)
    }

    fn fences(&self) -> u64 {
        self.memory.counters().fences
    }
}

#[test]
fn as_many_as_may_go_to_as_many_lanes_with_one_fence() {
    let mut rig = Rig::new();
    let before = rig.fences();
    for number in 0..TOGETHER as u64 {
        rig.write(number, number * CHUNK, false);
    }
    rig.answered(TOGETHER);
    assert_eq!(rig.fences() - before, 1);
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
fn nothing_is_answered_before_the_fence_and_nothing_kept_back_for_good() {
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
    // Nobody reclaims: lane 0 takes all that there is, and the others have what they have begun.
    let mut number = 0;
    while rig.queue.parked() == 0 {
        rig.write(number, number % 1000 * BLOCK, false);
        rig.queue.unplug(&mut rig.done);
        number += 1;
    }
    rig.done.clear();
    for (id, chunk) in [(1, 1), (2, 0), (3, 2)] {
        rig.write(id, chunk * CHUNK, false);
    }
    rig.queue.unplug(&mut rig.done);
    let mut answered: Vec<_> = rig.done.iter().map(|completion| completion.id).collect();
    answered.sort_unstable();
    assert_eq!((answered, rig.queue.parked()), (vec![1, 3], 2));
}

#[test]
fn long_writes_are_not_kept_back() {
    let mut rig = Rig::new();
    let buffer = AlignedBuffer::zeroed(32 << 10);
    let range = ByteRange::at(0, 32 << 10);
    let request = Request { id: 0, operation: Operation::Write, range, fua: false, buffer };
    rig.queue.submit_plugged(request, &mut rig.done);
    assert_eq!((rig.done.len(), rig.queue.parked()), (1, 0));
}

#[test]
fn what_is_not_a_write_of_one_piece_comes_behind_what_was_kept_back() {
    let mut rig = Rig::new();
    rig.write(0, 0, false);
    rig.write(1, CHUNK, false);
    let buffer = AlignedBuffer::zeroed(BLOCK as usize);
    let range = ByteRange::at(CHUNK, BLOCK);
    let read = Request { id: 2, operation: Operation::Read, range, fua: false, buffer };
    rig.queue.submit_plugged(read, &mut rig.done);
    let done = rig.answered(3);
    assert_eq!((done[2].id, &done[2].buffer[..]), (2, &[2; BLOCK as usize][..]));
}

#[test]
fn the_last_of_two_that_overlap_stays() {
    let mut rig = Rig::new();
    rig.write(0, 0, false);
    rig.write(1, 512, false);
    rig.answered(2);
    let range = ByteRange::at(0, BLOCK + 512);
    let buffer = AlignedBuffer::zeroed(range.len() as usize);
    let read = Request { id: 2, operation: Operation::Read, range, fua: false, buffer };
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
    let mut ends: Vec<_> =
        rig.done.iter().map(|completion| (completion.id, completion.result.is_ok())).collect();
    ends.sort_unstable();
    assert_eq!(ends, [(0, true), (1, false), (2, true)]);
}
