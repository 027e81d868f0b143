//! Queues that are closed with requests in flight: no such request is executed after a reply to the next user of the device.

use super::*;
use crate::{AlignedBuffer, ByteRange, Completion, DeviceOptions, Operation, Queue, Request};
use cbd_backing::Backing;
use cbd_testkit::{Fault, FaultHandle, FaultRule, Faulty, OpKind};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 4096;

struct Place {
    folder: tempfile::TempDir,
    region: Region,
    id: BackendId,
}

impl Place {
    fn new(cache_size: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::File::create(folder.path().join("disk")).unwrap().set_len(BLOCKS * BLOCK).unwrap();
        let format = Format { segment_size: Some(64 << 10), force: false };
        let options = RegionOptions { format: Some(format), ..RegionOptions::format(32 << 20) };
        let region = Region::open(folder.path().join("region"), &options).unwrap();
        let options = DeviceOptions { cache_size: Some(cache_size), ..DeviceOptions::default() };
        let device = region.attach(folder.path().join("disk"), &options).unwrap();
        let id = device.id();
        device.close().unwrap();
        Self { folder, region, id }
    }

    fn path(&self) -> String {
        self.folder.path().join("disk").to_str().unwrap().to_owned()
    }

    /// The device over a disk that stalls writes until the rules of the returned handle change.
    fn open_stalled(&self) -> (Device, FaultHandle) {
        let (held, path) = (&self.region.held, self.path());
        let entry = held.transport.backend(self.id).unwrap();
        let handle = std::cell::OnceCell::new();
        let decorate = |inner: Arc<dyn Backing>| {
            let faulty = Faulty::new(inner, vec![all_writes(Fault::Stall)]);
            handle.set(faulty.handle()).unwrap();
            Arc::new(faulty) as Arc<dyn Backing>
        };
        let options = RunOptions { decorate: &decorate, ..RunOptions::plain(&held.path) };
        let started =
            RunningBackend::start(&held.transport, &held.environment, &entry, &path, options).unwrap();
        let device = Device::new(Arc::clone(held), self.id, &path, started, &mut held.open.lock());
        (device, handle.into_inner().unwrap())
    }

    fn on_disk(&self, block: u64) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK as usize];
        let disk = std::fs::File::open(self.path()).unwrap();
        disk.read_exact_at(&mut bytes, block * BLOCK).unwrap();
        bytes
    }
}

fn all_writes(how: Fault) -> FaultRule {
    let kinds = vec![OpKind::Write, OpKind::WriteZeroes, OpKind::Discard];
    FaultRule { kinds, how, ..FaultRule::default() }
}

fn read(device: &Device, block: u64) -> Vec<u8> {
    let mut bytes = vec![0xee; BLOCK as usize];
    device.read_at(&mut bytes, block * BLOCK).unwrap();
    bytes
}

fn drain(device: &Device) {
    device.drain(Duration::from_secs(60), &mut |_| ControlFlow::Continue(())).unwrap();
}

fn submit(queue: &mut Queue, operation: Operation, first: u64, blocks: u64, byte: u8) {
    let range = ByteRange::at(first * BLOCK, blocks * BLOCK);
    let length = if operation == Operation::Write { (blocks * BLOCK) as usize } else { 0 };
    let buffer = AlignedBuffer::from_slice(&vec![byte; length]);
    queue.submit(Request::unmarked(first, operation, range, false, buffer)).unwrap();
}

/// Writes consecutive blocks until a write waits for space; returns the number of that block. The queue has
/// no other request in flight.
fn fill(device: &Device, queue: &mut Queue) -> u64 {
    let end = Instant::now() + Duration::from_secs(60);
    for block in 0..BLOCKS {
        submit(queue, Operation::Write, block, 1, 1);
        let mut done: Vec<Completion> = Vec::new();
        loop {
            queue.poll(&mut done).unwrap();
            match done.pop() {
                Some(completed) => break completed.result.unwrap(),
                None if device.status().unwrap().writers_waiting => return block,
                None => assert!(Instant::now() < end, "the write completes or waits"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    panic!("the cache takes the whole disk");
}

#[test]
fn requests_that_wait_for_space_when_their_queue_is_closed_are_never_executed() {
    let place = Place::new(1 << 20);
    let (device, disk) = place.open_stalled();
    let mut queue = device.queue().unwrap();
    let waiting = fill(&device, &mut queue);
    assert!(waiting > 8, "there is a cache");
    // A write of several pieces, a zeroing and a discard follow it and wait, too; no piece of them is executed.
    submit(&mut queue, Operation::Write, waiting + 1, 300, 1);
    submit(&mut queue, Operation::WriteZeroes, 0, 1, 0);
    submit(&mut queue, Operation::Discard, 1, 1, 0);
    assert_eq!(queue.in_flight(), 4);
    drop(queue);

    // The next user gets replies, and writes newer data. Then space is free.
    let mut next = device.queue().unwrap();
    let blocks = [0, 1, waiting, waiting + 1, waiting + 300];
    let before = blocks.map(|block| read(&device, block));
    assert!(before[2].iter().all(|&byte| byte == 0), "it waited for space, and was given up");
    disk.clear();
    submit(&mut next, Operation::Write, waiting + 2, 1, 2);
    next.wait(&mut Vec::new(), 1, Some(Duration::from_secs(60))).unwrap();
    drain(&device);
    assert!(blocks.map(|block| read(&device, block)) == before, "a request of a closed queue happened");
    assert_eq!(read(&device, waiting + 2), [2; BLOCK as usize]);
    drop(next);

    // They are not executed either when the device is opened again.
    device.close().unwrap();
    let device = place.region.open_device(place.id).unwrap();
    assert!(blocks.map(|block| read(&device, block)) == before);
    drain(&device);
    assert!(blocks.map(|block| place.on_disk(block)) == before);
}

#[test]
fn a_device_that_was_closed_with_a_full_cache_reopens_without_the_waiting_requests() {
    let place = Place::new(1 << 20);
    let (device, disk) = place.open_stalled();
    let mut queue = device.queue().unwrap();
    let waiting = fill(&device, &mut queue);
    // The device is closed first: it ends with its last queue.
    assert_eq!(device.close().unwrap_err().kind(), ErrorKind::Busy);
    // The background worker ends when the disk has completed its writes in flight. Writes that fail free no space.
    disk.set(vec![all_writes(Fault::Fail)]);
    drop(queue);
    let device = place.region.open_device(place.id).unwrap();
    for block in 0..waiting {
        assert_eq!(read(&device, block), [1; BLOCK as usize], "block {block}");
    }
    assert_eq!(read(&device, waiting), [0; BLOCK as usize]);
    drain(&device);
    assert_eq!(read(&device, waiting), [0; BLOCK as usize]);
    assert_eq!(place.on_disk(waiting), [0; BLOCK as usize]);
}

#[test]
fn requests_in_flight_at_the_disk_complete_before_their_queue_is_closed() {
    let place = Place::new(0);
    let (device, disk) = place.open_stalled();
    let mut queue = device.queue().unwrap();
    submit(&mut queue, Operation::Write, 0, 1, 1);
    submit(&mut queue, Operation::Write, 2, 1, 1);
    assert_eq!(queue.in_flight(), 2);
    let closing = std::thread::spawn(move || drop(queue));
    assert_eq!(read(&device, 0), [0; BLOCK as usize]);
    assert!(!closing.is_finished(), "the disk has not completed the requests");
    disk.clear();
    closing.join().unwrap();
    device.write_fua_at(&[2; BLOCK as usize], BLOCK).unwrap();
    device.write_fua_at(&[2; BLOCK as usize], 2 * BLOCK).unwrap();
    device.flush().unwrap();
    let is = |byte: u8| vec![byte; BLOCK as usize];
    assert_eq!([0, 1, 2].map(|block| read(&device, block)), [is(1), is(2), is(2)]);
    device.close().unwrap();
    assert_eq!([0, 1, 2].map(|block| place.on_disk(block)), [is(1), is(2), is(2)]);
}
