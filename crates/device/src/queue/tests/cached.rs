//! A queue with a cache: batches, fills, and requests that wait for space or are given up.

mod ahead;
mod around;
mod figures;
mod integrity;
mod returned;
mod route;
mod verify;

use super::*;
use crate::queue::{misses::READ_MAX, plugged::PLUGGED_BYTES_MAX};
use alloc::string::ToString;
use alloc::task::Wake;
use cbd_engine::{
    BackendSpec, BackgroundWorker, BypassReason, FormatOptions, LogEntry, Settings, Step, Transport, TwoSlots,
};
use cbd_format::{LaneMark, RecordKind, StateShape};
use cbd_types::{BackendId, Class, LaneId, Region};
use core::sync::atomic::{AtomicUsize, Ordering};
use parking_lot::Mutex;

/// Memory in a vector.
struct Ram {
    bytes: Mutex<Vec<u8>>,
    fences: AtomicUsize,
    /// So many stores succeed; if there are more, one has failed.
    good_stores: AtomicUsize,
}

impl Pmem for Ram {
    fn len(&self) -> u64 {
        self.bytes.lock().len() as u64
    }
    fn durability(&self) -> Durability {
        Durability::ProcessCrash
    }
    fn store(&self, at: u64, from: &[u8]) {
        self.good_stores.fetch_sub(1, Ordering::Relaxed);
        self.bytes.lock()[at as usize..][..from.len()].copy_from_slice(from);
    }
    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        self.store(at, from);
        let (head, rest) = from.split_at(first.min(from.len()));
        let blocks = core::iter::once(head).chain(rest.chunks(4096));
        checksums.iter_mut().zip(blocks).for_each(|(sum, block)| *sum = cbd_format::crc32c(block));
    }
    fn store_line(&self, at: u64, line: &[u8; 64]) {
        self.store(at, line);
    }
    fn fence(&self) {
        self.fences.fetch_add(1, Ordering::Relaxed);
    }
    fn load(&self, at: u64, into: &mut [u8]) -> core::result::Result<(), MediaError> {
        into.copy_from_slice(&self.bytes.lock()[at as usize..][..into.len()]);
        Ok(())
    }
    fn load_summed(&self, at: u64, into: &mut [u8]) -> core::result::Result<u32, MediaError> {
        self.load(at, into)?;
        Ok(cbd_format::crc32c(into))
    }
    fn write_back(&self, _: u64, _: u64) {}
    fn failed_at(&self) -> Option<u64> {
        (self.good_stores.load(Ordering::Relaxed) > usize::MAX / 2).then_some(0)
    }
}

/// Time passes only as a test says.
#[derive(Default)]
struct Still {
    random: AtomicUsize,
    now_us: AtomicUsize,
    /// So much time passes at each look at the clock.
    step_us: AtomicUsize,
}

impl Environment for Still {
    type Memory = Ram;
    type Lock = parking_lot::RawMutex;

    fn random(&self) -> u64 {
        self.random.fetch_add(1, Ordering::Relaxed) as u64 + 1
    }
    fn wall_ms(&self) -> u64 {
        1
    }
    fn monotonic_ms(&self) -> u64 {
        self.now_us.load(Ordering::Relaxed) as u64 / 1000
    }
    fn monotonic_us(&self) -> u64 {
        self.now_us.fetch_add(self.step_us.load(Ordering::Relaxed), Ordering::Relaxed) as u64
    }
}

const BLOCK: u64 = 4096;
const SEGMENT: u64 = 64 << 10;
const CHUNK: u64 = cbd_types::CHUNK;
const DEVICE: u64 = 2 * CHUNK;
/// Reads and writes of the disk from here on fail.
const BAD: u64 = DEVICE - CHUNK / 2;

/// Counts its wakeups.
#[derive(Default)]
struct Bell(AtomicUsize);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

struct Rig {
    environment: Arc<Still>,
    transport: Arc<Transport<Still>>,
    backend: BackendId,
    bell: Arc<Bell>,
    cache: Arc<Cache<Still>>,
    queue: Queue<Still, Disk>,
    geometry: BackingGeometry,
    done: Vec<Completion>,
}

fn disk() -> Disk {
    Disk { submitted: Vec::new(), asked: Vec::new(), bad: BAD, value: 7, is_hung: false }
}

fn rig() -> Rig {
    rig_of(DEVICE)
}

/// A rig with a device of `size` bytes.
fn rig_of(size: u64) -> Rig {
    rig_with(size, Settings::default())
}

fn rig_with(size: u64, settings: Settings) -> Rig {
    const SEGMENTS: u64 = 17;
    let format = FormatOptions {
        segment_size: Some(SEGMENT),
        force: true,
        host_rows: 4,
        backend_rows: 4,
        blkdev_rows: 4,
    };
    let memory = Ram {
        bytes: Mutex::new(vec![0; ((SEGMENTS + 8) * SEGMENT) as usize]),
        fences: AtomicUsize::new(0),
        good_stores: AtomicUsize::new(usize::MAX / 2),
    };
    let environment = Arc::new(Still::default());
    let transport =
        Transport::format(Arc::clone(&environment), Region::new(memory), &format).expect("there is room");
    let host = transport.register_host("host", None).expect("there is room");
    let spec = BackendSpec {
        host,
        path: "/dev/vector".to_string(),
        identity: "vector".to_string(),
        size,
        sector: 512,
        cache_bytes: Some(SEGMENTS * SEGMENT),
        lanes_max: 2,
        handlers: 1,
        data_crc: true,
        settings,
    };
    let backend = transport.create_backend(&spec).expect("there is room");
    let cache = transport.open_cache(backend).expect("it opens");
    let geometry = BackingGeometry {
        size,
        sector: 512,
        physical_sector: 512,
        rotational: true,
        volatile_cache: true,
        discard_zeroes: true,
        discard_granularity: 512,
    };
    let device = Arc::new(Device::cached(Arc::clone(&cache), geometry));
    let bell = Arc::new(Bell::default());
    let queue = Queue::new(device, disk(), Waker::from(Arc::clone(&bell)));
    Rig { environment, transport, backend, bell, cache, queue, geometry, done: Vec::new() }
}

fn write(id: u64, start: u64, length: u64, value: u8) -> Request {
    let buffer = AlignedBuffer::from_slice(&vec![value; length as usize]);
    Request::unmarked(id, Operation::Write, ByteRange::at(start, length), false, buffer)
}

fn read(id: u64, start: u64, length: u64) -> Request {
    Request { id, ..request(Operation::Read, start, length, false) }
}

impl Rig {
    /// Request and kind of error of each completion since the last call.
    fn completed(&mut self) -> Vec<(u64, Option<ErrorKind>)> {
        self.done.drain(..).map(|done| (done.id, done.result.err().map(|error| error.kind()))).collect()
    }

    fn poll(&mut self) -> Vec<(u64, Option<ErrorKind>)> {
        self.queue.poll(&mut self.done);
        self.completed()
    }

    fn asked(&mut self) -> Vec<(&'static str, u64, u64)> {
        core::mem::take(&mut self.queue.backing.asked)
    }

    fn plug(&mut self, request: Request) {
        self.queue.submit_plugged(request, &mut self.done);
    }

    fn submit(&mut self, request: Request) {
        self.queue.submit(request, &mut self.done);
    }

    fn pending_fills(&self) -> usize {
        (0..self.cache.lane_count()).map(|lane| self.cache.log().pending_fills(LaneId(lane))).sum()
    }

    /// The fences since the start.
    fn fences(&self) -> usize {
        self.transport.region().memory().fences.load(Ordering::Relaxed)
    }

    /// The sequence numbers that the marks of both lanes prove.
    fn marks(&self) -> [u64; 2] {
        let state = self.transport.segments_of(self.backend)[0];
        let base = self.transport.info().layout.segment_base(state);
        [0, 1].map(|lane: u32| {
            let at = (StateShape { lanes: 2 }).mark(LaneId(lane)).map(|at| base + at);
            let mark = TwoSlots::<LaneMark>::read(self.transport.region(), at, u64::from(lane));
            mark.content().map_or(0, |mark| mark.lane_sequence.get())
        })
    }

    /// From now on so much time passes at each look at the clock.
    fn pass_time(&self, step_us: usize) {
        self.environment.step_us.store(step_us, Ordering::Relaxed);
    }

    /// Bytes that went past the cache for this reason.
    fn past(&self, reason: BypassReason) -> u64 {
        self.cache.status().bypassed.of(reason)
    }

    fn rings(&self) -> usize {
        self.bell.0.load(Ordering::Relaxed)
    }

    fn epoch(&self) -> u64 {
        self.cache.status().epoch.0
    }

    /// Everything is written back and reclaimed as far as possible.
    fn make_room(&self) {
        let mut worker =
            BackgroundWorker::new(Arc::clone(&self.cache), Disk { bad: DEVICE, ..disk() }, self.geometry);
        self.cache.request_drain();
        for _ in 0..20_000 {
            if let Step::Idle { .. } = worker.step() {
                return;
            }
        }
        panic!("the background worker is never idle");
    }

    /// Writes until a request waits for space; returns its id.
    fn fill_up(&mut self) -> u64 {
        for id in 0..2 * 17 * 16 {
            self.submit(write(id, id % 1024 * BLOCK, BLOCK, 1));
            if !self.queue.waiting.is_empty() {
                self.completed();
                return id;
            }
        }
        panic!("the cache never becomes full");
    }
}

#[test]
fn short_writes_are_held_back_until_a_batch_is_full_or_no_more_follow() {
    let mut rig = rig();
    for id in 0..7 {
        rig.plug(write(id, id * BLOCK, BLOCK, id as u8));
    }
    assert_eq!((rig.completed().len(), rig.queue.parked(), rig.queue.changes()), (0, 7, 7));
    rig.plug(write(7, 0, PLUGGED_BYTES_MAX, 9));
    assert_eq!(rig.completed(), [0, 1, 2, 3, 4, 5, 6, 7].map(|id| (id, None)));
    assert_eq!(rig.queue.parked(), 0);
    rig.plug(write(8, 0, PLUGGED_BYTES_MAX, 1));
    assert!(rig.completed().is_empty());
    assert_eq!(rig.poll(), [(8, None)]);
    rig.plug(write(9, 0, 512, 1));
    rig.queue.unplug(&mut rig.done);
    assert_eq!(rig.completed(), [(9, None)]);
    assert!(rig.queue.plugged.capacity() >= TOGETHER && rig.queue.results.capacity() >= TOGETHER);
}

#[test]
fn what_is_not_a_short_write_of_one_piece_is_executed_behind_those_that_were_held_back() {
    let cases = [
        write(1, 0, PLUGGED_BYTES_MAX + 512, 1),
        write(1, CHUNK - 512, 1024, 1),
        write(1, 0, 0, 1),
        write(1, DEVICE, 512, 1),
        read(1, 0, 512),
        request(Operation::Discard, 0, 4096, false),
        request(Operation::Flush, 0, 0, false),
    ];
    for case in cases {
        let mut rig = rig();
        rig.plug(write(0, 0, BLOCK, 3));
        let (id, is_bad) = (case.id, case.range.end > DEVICE);
        rig.plug(case);
        let expected = is_bad.then_some(ErrorKind::OutOfRange);
        assert_eq!(rig.completed(), [(0, None), (id, expected)]);
    }
}

#[test]
fn the_writes_of_a_batch_share_a_fence_where_their_lanes_differ() {
    let mut rig = rig();
    rig.submit(write(0, 0, BLOCK, 1));
    rig.submit(write(1, CHUNK, BLOCK, 1));
    let before = rig.fences();
    rig.plug(write(2, 0, BLOCK, 2));
    rig.plug(write(3, CHUNK, BLOCK, 2));
    rig.queue.unplug(&mut rig.done);
    assert_eq!(rig.fences(), before + 1);
    assert_eq!(rig.completed().len(), 4);
}

#[test]
fn only_fua_writes_close_an_epoch_and_those_of_a_batch_close_one_together() {
    let mut rig = rig();
    let fua = |request| Request { fua: true, ..request };
    let begun = rig.epoch();
    (0..8).for_each(|id| rig.plug(write(id, id * BLOCK, BLOCK, 1)));
    assert_eq!((rig.completed().len(), rig.epoch()), (8, begun));
    (0..8).for_each(|id| rig.plug(fua(write(id, id * BLOCK, BLOCK, 1))));
    assert_eq!((rig.completed().len(), rig.epoch()), (8, begun + 1));
    rig.plug(write(0, 0, BLOCK, 1));
    rig.plug(fua(write(1, BLOCK, BLOCK, 1)));
    assert_eq!((rig.poll().len(), rig.epoch()), (2, begun + 2));
    rig.submit(write(0, 0, BLOCK, 1));
    rig.submit(fua(write(0, 0, BLOCK, 1)));
    assert_eq!((rig.completed().len(), rig.epoch()), (2, begun + 3));
    let zeroes = |fua| request(Operation::WriteZeroes, 0, 4096, fua);
    rig.submit(zeroes(false));
    assert_eq!(rig.epoch(), begun + 3);
    rig.submit(zeroes(true));
    assert_eq!((rig.completed().len(), rig.epoch()), (2, begun + 4));
    assert!(matches!(rig.queue.write_from(0, ByteRange::at(0, 512), &[1; 512], false), Some(Ok(()))));
    assert_eq!(rig.epoch(), begun + 4);
    assert!(matches!(rig.queue.write_from(0, ByteRange::at(0, 512), &[1; 512], true), Some(Ok(()))));
    assert_eq!((rig.epoch(), rig.queue.parked()), (begun + 5, 0));
}

#[test]
fn adjacent_misses_are_read_at_once_up_to_a_mebibyte_and_cached_after_the_completion() {
    let mut rig = rig();
    rig.submit(read(1, 0, READ_MAX));
    assert_eq!(rig.asked(), [("read", 0, READ_MAX)]);
    assert_eq!(rig.poll(), [(1, None)]);
    rig.submit(read(2, CHUNK, READ_MAX + 512));
    assert_eq!(rig.asked(), [("read", CHUNK, READ_MAX), ("read", CHUNK + READ_MAX, BLOCK)]);
    assert_eq!((rig.poll(), rig.pending_fills() > 0), (vec![(2, None)], true));
    rig.poll();
    assert_eq!(rig.pending_fills(), 0);
    assert!(rig.queue.misses.capacity() > 0 && rig.queue.finished.capacity() > 0, "they are used again");
}

#[test]
fn a_read_takes_from_the_cache_what_it_has_and_from_the_disk_the_rest() {
    let mut rig = rig();
    rig.submit(write(0, 2 * BLOCK, BLOCK, 3));
    rig.submit(read(1, 0, 5 * BLOCK));
    assert_eq!(rig.asked(), [("read", 0, 2 * BLOCK), ("read", 3 * BLOCK, 2 * BLOCK)]);
    assert_eq!((rig.queue.parked(), rig.queue.changes()), (1, 0));
    rig.queue.poll(&mut rig.done);
    let expected = [[7; 8192].as_slice(), &[3; 4096], &[7; 8192]].concat();
    assert!(rig.done[1].id == 1 && rig.done[1].buffer[..] == expected);
    assert_eq!(rig.cache.status().filled_bytes, 0, "the client is answered first");
    rig.done.clear();
    rig.poll();
    assert_eq!(rig.cache.status().filled_bytes, 4 * BLOCK);
    assert!(rig.queue.spare.held() > 0);
    rig.queue.trim();
    assert_eq!(rig.queue.spare.held(), 0);
    let mut out = [0; 5 * 4096];
    assert!(matches!(rig.queue.read_into(2, ByteRange::at(0, 5 * BLOCK), &mut out), Some(Ok(()))));
    assert!(out[..] == expected && rig.asked().is_empty());
    assert!(rig.queue.read_into(3, ByteRange::at(4 * BLOCK, 2 * BLOCK), &mut out[..8192]).is_none());
    assert_eq!(rig.asked(), [("read", 5 * BLOCK, BLOCK)]);
    rig.queue.poll(&mut rig.done);
    assert_eq!((rig.done[0].id, &rig.done[0].buffer[..]), (3, &[7; 8192][..]));
}

#[test]
fn what_the_disk_fails_to_read_fails_the_request_and_is_not_cached() {
    let mut rig = rig();
    rig.submit(write(0, BAD, BLOCK, 3));
    rig.submit(read(1, BAD - BLOCK, 3 * BLOCK));
    assert_eq!(rig.asked(), [("read", BAD - BLOCK, BLOCK), ("read", BAD + BLOCK, BLOCK)]);
    assert_eq!(rig.poll(), [(0, None), (1, Some(ErrorKind::Backing))]);
    rig.poll();
    assert_eq!((rig.pending_fills(), rig.cache.status().filled_bytes), (0, BLOCK));
    rig.submit(read(2, BAD + 4 * BLOCK, BLOCK));
    assert_eq!(rig.poll(), [(2, Some(ErrorKind::Backing))]);
    assert_eq!((rig.pending_fills(), rig.cache.status().filled_bytes), (0, BLOCK));
    assert!(rig.queue.fills.is_empty() && rig.queue.spare.held() > 0);
}

#[test]
fn a_read_that_meets_damage_leaves_no_fill_behind() {
    let mut rig = rig();
    rig.submit(write(0, 8 * BLOCK, BLOCK, 3));
    let lane = (0..2).find(|lane| !rig.cache.log().segments(LaneId(*lane)).is_empty()).expect("one has it");
    let base = rig.cache.log().segments(LaneId(lane))[0].base;
    let _ = rig.transport.region().store(base + SEGMENT - 4096 - BLOCK + 100, &[9]);
    rig.completed();
    rig.submit(read(1, 0, 12 * BLOCK));
    assert_eq!(rig.completed(), [(1, Some(ErrorKind::Media))]);
    assert_eq!((rig.pending_fills(), rig.queue.parked(), rig.asked().len()), (0, 0, 0));
    assert!(matches!(
        rig.queue.read_into(2, ByteRange::at(0, 12 * BLOCK), &mut [0; 12 * 4096]),
        Some(Err(_))
    ));
}

#[test]
fn a_request_that_waits_for_space_completes_when_there_is_some() {
    let mut rig = rig();
    let id = rig.fill_up();
    rig.submit(request(Operation::WriteZeroes, 0, DEVICE, true));
    assert!(rig.queue.write_from(77, ByteRange::at(0, 512), &[5; 512], false).is_none());
    rig.plug(write(78, 0, BLOCK, 5));
    rig.plug(write(79, CHUNK, BLOCK, 5));
    assert_eq!(rig.poll(), []);
    assert_eq!((rig.queue.parked(), rig.queue.changes()), (5, 5));
    assert!(rig.cache.status().writers_waiting);
    rig.make_room();
    assert_eq!(rig.poll(), [id, 9, 77, 78, 79].map(|id| (id, None)));
    assert_eq!((rig.queue.parked(), rig.queue.changes(), rig.asked().len()), (0, 0, 0));
}

#[test]
fn what_the_disk_does_not_have_is_given_up_when_the_client_is_gone() {
    let mut rig = rig();
    let id = rig.fill_up();
    rig.plug(write(78, 0, BLOCK, 5));
    assert!(rig.cache.status().writers_waiting);
    rig.queue.give_up(&mut rig.done);
    assert_eq!(rig.completed(), [78, id].map(|id| (id, Some(ErrorKind::Stopped))));
    assert_eq!(rig.queue.parked(), 0);
    assert!(!rig.cache.status().writers_waiting, "no client waits for space any more");
}

#[test]
fn a_queue_that_is_dropped_waits_for_no_space_and_leaves_no_fill() {
    let mut rig = rig();
    rig.submit(read(1, 0, BLOCK));
    rig.poll();
    rig.submit(read(2, 4 * BLOCK, BLOCK));
    rig.submit(read(3, CHUNK, BLOCK));
    assert_eq!((rig.queue.fills.len(), rig.pending_fills()), (1, 3));
    let before = rig.cache.status().writers_waiting;
    rig.fill_up();
    assert!(!before && rig.cache.status().writers_waiting);
    let Rig { cache, queue, transport, .. } = rig;
    drop(queue);
    assert!(!cache.status().writers_waiting);
    let pending: usize = (0..2).map(|lane| cache.log().pending_fills(LaneId(lane))).sum();
    assert_eq!(pending, 0);
    drop(transport);
}

#[test]
fn the_geometry_of_a_cached_disk_is_that_of_the_cache() {
    let rig = rig();
    let geometry = |backing| Device::cached(Arc::clone(&rig.cache), backing).geometry();
    let seen = geometry(rig.geometry);
    assert_eq!((seen.size, seen.sector, seen.physical_sector), (DEVICE, 512, 4096));
    assert_eq!((seen.atomic_unit, seen.discard_granularity), (16 << 10, 512));
    assert!(seen.discard && !seen.rotational && seen.fast_zeroes);
    let larger = geometry(BackingGeometry { size: 2 * DEVICE, physical_sector: 8192, ..rig.geometry });
    assert_eq!((larger.size, larger.physical_sector), (DEVICE, 8192));
}

#[test]
fn the_lanes_of_fua_writes_are_marked_and_only_these_writes_fail_without_a_mark() {
    let mut rig = rig();
    let starts = [0, CHUNK];
    starts.into_iter().for_each(|start| rig.submit(write(0, start, BLOCK, 1)));
    rig.completed();
    // Of the two lanes, one after the other, only that of the FUA write is marked.
    let before = rig.marks();
    rig.plug(write(1, starts[0], BLOCK, 1));
    rig.plug(Request { fua: true, ..write(2, starts[1], BLOCK, 1) });
    assert_eq!(rig.poll().len(), 2);
    let first = rig.marks();
    rig.plug(Request { fua: true, ..write(1, starts[0], BLOCK, 1) });
    rig.plug(write(2, starts[1], BLOCK, 1));
    assert_eq!(rig.poll().len(), 2);
    let second = rig.marks();
    let rises = [first, second].map(|marks| marks.iter().filter(|mark| **mark > 1).count());
    assert_eq!((before, rises), ([0, 0], [1, 2]));
    // The stores of both writes succeed, and the one of the mark fails.
    rig.transport.region().memory().good_stores.store(2 * 3, Ordering::Relaxed);
    rig.plug(write(1, starts[0], BLOCK, 1));
    rig.plug(Request { fua: true, ..write(2, starts[1], BLOCK, 1) });
    assert_eq!(rig.poll(), [(1, None), (2, Some(ErrorKind::Media))]);
}

#[test]
fn a_thread_with_data_to_cache_is_woken_to_poll_again_and_no_other() {
    let mut rig = rig();
    rig.submit(write(0, 0, BLOCK, 1));
    rig.poll();
    assert_eq!(rig.rings(), 0);
    rig.submit(read(1, 8 * BLOCK, BLOCK));
    rig.poll();
    assert_eq!(rig.rings(), 1);
    rig.poll();
    assert_eq!(rig.rings(), 1);
}

#[test]
fn a_discard_and_zeroes_are_records_of_their_kinds() {
    let mut rig = rig();
    rig.submit(request(Operation::Discard, 0, 4096, false));
    rig.submit(request(Operation::WriteZeroes, 0, 4096, false));
    let mut kinds = Vec::new();
    for lane in [0, 1].map(LaneId) {
        for segment in rig.cache.log().segments(lane) {
            rig.cache.log().visit(&segment, &mut |_, entry| {
                let LogEntry::Record(record) = entry else { panic!("nothing is lost") };
                kinds.push(record.kind());
            });
        }
    }
    assert_eq!(kinds, [RecordKind::Discard, RecordKind::WriteZeroes]);
}

#[test]
fn damaged_data_that_the_disk_has_is_read_together_with_what_is_beside_it() {
    let mut rig = rig();
    rig.submit(write(0, 2 * BLOCK, BLOCK, 3));
    rig.make_room();
    let segments = (0..2).flat_map(|lane| rig.cache.log().segments(LaneId(lane))).collect::<Vec<_>>();
    let _ = rig.transport.region().store(segments[0].base + SEGMENT - 4096 - BLOCK + 100, &[9]);
    rig.submit(read(1, 0, 5 * BLOCK));
    assert_eq!(rig.asked(), [("read", 0, 5 * BLOCK)]);
}
