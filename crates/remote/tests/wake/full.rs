//! A device that has no space for writes: they wait in the channel, and other requests do not.

use super::support::{LIMIT, Rig, read, wait_for, write};
use super::{address, connect, wait_until};
use cbd_export::{BlockDevice, RequestQueue};
use cbd_remote::WakeListener;
use cbd_types::{
    AlignedBuffer, ByteRange, Completion, ErrorKind, Geometry, Operation, Request, Result, TakeBack,
};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const BLOCK: u64 = 4096;
/// More than the channel has places.
const WRITES: u64 = 100;

/// A device on which writes wait while it is full.
struct Full {
    device: Arc<dyn BlockDevice>,
    is_full: Arc<AtomicBool>,
    /// Its disk has a part of each request.
    has_part: Arc<AtomicBool>,
}

impl BlockDevice for Full {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        let (queue, is_full) = (self.device.open_queue()?, Arc::clone(&self.is_full));
        Ok(Box::new(FullQueue { queue, is_full, has_part: Arc::clone(&self.has_part), waiting: Vec::new() }))
    }
}

struct FullQueue {
    queue: Box<dyn RequestQueue>,
    is_full: Arc<AtomicBool>,
    has_part: Arc<AtomicBool>,
    waiting: Vec<Request>,
}

impl RequestQueue for FullQueue {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        if self.is_full.load(Ordering::Relaxed) && request.operation == Operation::Write {
            self.waiting.push(request);
        } else {
            self.queue.submit(request, done);
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        if !self.is_full.load(Ordering::Relaxed) {
            self.waiting.drain(..).for_each(|request| self.queue.submit(request, done));
        }
        self.queue.poll(done);
    }

    fn parked(&self) -> usize {
        self.queue.parked() + self.waiting.len()
    }

    /// Every second request counts as one that has begun.
    fn take_back(&mut self, which: TakeBack<'_>, returned: &mut Vec<Request>) {
        if self.has_part.load(Ordering::Relaxed) {
            return;
        }
        let has_begun = |request: &Request| !(request.range.start / BLOCK).is_multiple_of(2);
        returned.extend(
            self.waiting
                .extract_if(.., |one| !has_begun(one) || which.begun_writes || (which.is_given_up)(one.id)),
        );
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        self.queue.wait_descriptors()
    }
}

fn full() -> (Rig, Arc<AtomicBool>) {
    full_with(Arc::default())
}

fn full_with(has_part: Arc<AtomicBool>) -> (Rig, Arc<AtomicBool>) {
    let mut rig = Rig::new();
    let is_full = Arc::new(AtomicBool::new(true));
    rig.device = Arc::new(Full { device: Arc::clone(&rig.device), is_full: Arc::clone(&is_full), has_part });
    (rig, is_full)
}

fn flush(queue: &mut dyn RequestQueue) {
    let (range, buffer) = (ByteRange::at(0, 0), AlignedBuffer::default());
    let request = Request::unmarked(0, Operation::Flush, range, false, buffer);
    let mut done = Vec::new();
    queue.submit(request, &mut done);
    wait_for(queue, 1).pop().expect("one").result.expect("a flush");
}

#[test]
fn reads_and_flushes_go_on_while_writes_wait_for_space() {
    for is_woken in [false, true] {
        let (rig, is_full) = full();
        let address = address(20);
        let mut listener = WakeListener::bind(&address).expect("a socket");
        let (service, device) = (rig.serve(), rig.open(LIMIT).expect("a device"));
        if is_woken {
            connect(&device, &service, (&address, &mut listener));
        }
        let queue = || device.open_queue().expect("a queue");
        let (mut writer, mut reader) = (queue(), queue());
        for block in 0..WRITES {
            assert!(write(&mut *writer, block * BLOCK, 1, BLOCK as usize).is_empty());
        }
        let begun = Instant::now();
        // The ring has entries for 60 requests: each of the writes gets another one again and again.
        for block in 0..500 {
            let at = (WRITES + block) * BLOCK;
            assert_eq!(read(&mut *reader, at, BLOCK as usize)[..], [0; BLOCK as usize]);
            flush(&mut *reader);
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "woken: {is_woken}, {:?}", begun.elapsed());
        assert_eq!((writer.changes(), reader.changes()), (WRITES as usize, 0));
        is_full.store(false, Ordering::Relaxed);
        let done = wait_for(&mut *writer, WRITES as usize);
        assert!(done.iter().all(|done| done.result.is_ok()));
        for block in 0..WRITES {
            assert_eq!(read(&mut *reader, block * BLOCK, BLOCK as usize)[..], [1; BLOCK as usize]);
        }
    }
}

#[test]
fn writes_that_wait_for_space_are_given_up_with_their_client() {
    for drops in [false, true] {
        let (mut rig, is_full) = full();
        // The blkdev may have others beside it: what has begun is not executed once more, but can be given up.
        rig.is_exclusive = false;
        let (_service, device) = (rig.serve(), rig.open(LIMIT).expect("a device"));
        let queue = || device.open_queue().expect("a queue");
        let (mut gone, mut other) = (queue(), queue());
        for block in 0..WRITES {
            assert!(write(&mut *gone, block * BLOCK, 1, BLOCK as usize).is_empty());
        }
        assert!(write(&mut *other, WRITES * BLOCK, 2, BLOCK as usize).is_empty());
        if drops {
            drop(gone);
        } else {
            let mut done = Vec::new();
            gone.give_up(&mut done);
            let left = WRITES as usize - done.len();
            done.extend(wait_for(&mut *gone, left));
            let kinds: Vec<_> =
                done.drain(..).map(|done| done.result.map_err(|error| error.kind())).collect();
            assert_eq!(kinds, [Err(ErrorKind::Stopped); WRITES as usize]);
            assert_eq!((gone.parked(), gone.changes()), (0, 0));
        }
        wait_until(|| {
            other.poll(&mut Vec::new());
            device.in_flight() == 1
        });
        is_full.store(false, Ordering::Relaxed);
        wait_for(&mut *other, 1).pop().expect("one").result.expect("it is written");
        for block in 0..WRITES {
            assert_eq!(read(&mut *other, block * BLOCK, BLOCK as usize)[..], [0; BLOCK as usize]);
        }
    }
}

#[test]
fn what_could_not_be_given_up_at_once_is_asked_for_again() {
    let has_part = Arc::new(AtomicBool::new(true));
    let (rig, _is_full) = full_with(Arc::clone(&has_part));
    let (_service, device) = (rig.serve(), rig.open(LIMIT).expect("a device"));
    let mut queue = device.open_queue().expect("a queue");
    for block in 0..5 {
        assert!(write(&mut *queue, block * BLOCK, 1, BLOCK as usize).is_empty());
    }
    let mut done = Vec::new();
    queue.give_up(&mut done);
    std::thread::sleep(Duration::from_millis(300));
    queue.poll(&mut done);
    assert_eq!((done.len(), queue.changes()), (0, 5), "the disk has a part of each");
    has_part.store(false, Ordering::Relaxed);
    let done = wait_for(&mut *queue, 5);
    assert!(done.iter().all(|done| done.result.is_err()));
    assert_eq!(queue.changes(), 0);
}
