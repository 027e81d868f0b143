//! A queue without a cache: the operations that a request is converted to, and the requests that are refused.

mod cached;

use super::*;
use alloc::vec;
use cbd_types::{BackingGeometry, Durability, MediaError, Pmem};

/// Not used by any cache.
struct NoMemory;

impl Pmem for NoMemory {
    fn len(&self) -> u64 {
        0
    }
    fn durability(&self) -> Durability {
        Durability::ProcessCrash
    }
    fn store(&self, _: u64, _: &[u8]) {}
    fn store_summed(&self, _: u64, _: &[u8], _: usize, _: &mut [u32]) {}
    fn store_line(&self, _: u64, _: &[u8; 64]) {}
    fn fence(&self) {}
    fn load(&self, at: u64, _: &mut [u8]) -> core::result::Result<(), MediaError> {
        Err(MediaError { at })
    }
    fn load_summed(&self, at: u64, _: &mut [u8]) -> core::result::Result<u32, MediaError> {
        Err(MediaError { at })
    }
    fn write_back(&self, _: u64, _: u64) {}
}

struct NoEnvironment;

impl Environment for NoEnvironment {
    type Memory = NoMemory;
    type Lock = parking_lot::RawMutex;

    fn random(&self) -> u64 {
        0
    }
    fn wall_ms(&self) -> u64 {
        0
    }
    fn monotonic_ms(&self) -> u64 {
        0
    }
}

/// Completes each operation at the next poll; reads and writes from offset `bad` on fail, and flushes if all is bad.
struct Disk {
    submitted: Vec<(OpToken, BackingOp)>,
    asked: Vec<(&'static str, u64, u64)>,
    bad: u64,
    /// The byte that reads return.
    value: u8,
    /// Nothing completes.
    is_hung: bool,
}

impl BackingQueue for Disk {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        self.asked.push(match &op {
            BackingOp::Read { offset, buffer } => ("read", *offset, buffer.len() as u64),
            BackingOp::Write { offset, buffer } => ("write", *offset, buffer.len() as u64),
            BackingOp::WriteZeroes { range } => ("zeroes", range.start, range.len()),
            BackingOp::Discard { range } => ("discard", range.start, range.len()),
            BackingOp::Verify { range } => ("verify", range.start, range.len()),
            BackingOp::Compare { range, .. } => ("compare", range.start, range.len()),
            BackingOp::Flush => ("flush", 0, 0),
        });
        self.submitted.push((token, op));
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        if self.is_hung {
            return;
        }
        for (token, mut op) in self.submitted.drain(..) {
            let mut result = Ok(());
            match &mut op {
                BackingOp::Read { offset, .. } | BackingOp::Write { offset, .. } if *offset >= self.bad => {
                    result = Err(Error::new(ErrorKind::Backing, "it is bad"));
                }
                BackingOp::Read { buffer, .. } => buffer.fill(self.value),
                BackingOp::Flush if self.bad == 0 => {
                    result = Err(Error::new(ErrorKind::Backing, "it is bad"));
                }
                _ => {}
            }
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
        8
    }
}

type Tested = Queue<NoEnvironment, Disk>;

const SIZE: u64 = 1 << 20;

fn queue(discard_zeroes: bool) -> Tested {
    let geometry = BackingGeometry {
        size: SIZE,
        sector: 512,
        physical_sector: 4096,
        rotational: true,
        volatile_cache: true,
        discard_zeroes,
        discard_granularity: 4096,
    };
    let disk = Disk { submitted: Vec::new(), asked: Vec::new(), bad: SIZE / 2, value: 7, is_hung: false };
    Queue::new(Arc::new(Device::uncached(geometry)), disk, Waker::noop().clone())
}

fn request(operation: Operation, start: u64, length: u64, fua: bool) -> Request {
    let bytes = if matches!(operation, Operation::Read | Operation::Write) { length } else { 0 };
    let buffer = AlignedBuffer::zeroed(bytes as usize);
    Request::unmarked(9, operation, ByteRange::at(start, length), fua, buffer)
}

/// Polls until no request is parked; returns the completions, and the operations that the disk received.
fn run(queue: &mut Tested, mut done: Vec<Completion>) -> (Vec<Completion>, Vec<(&'static str, u64, u64)>) {
    for _ in 0..4 {
        queue.poll(&mut done);
    }
    assert_eq!((queue.parked(), queue.changes()), (0, 0));
    (done, core::mem::take(&mut queue.backing.asked))
}

fn asked(queue: &mut Tested, request: Request) -> Vec<(&'static str, u64, u64)> {
    let mut done = Vec::new();
    queue.submit(request, &mut done);
    let (done, asked) = run(queue, done);
    assert!(done.len() == 1 && done[0].id == 9 && done[0].result.is_ok());
    asked
}

#[test]
fn each_request_is_one_operation_and_fua_a_flush_behind_a_change() {
    let mut queue = queue(true);
    for (operation, name) in
        [(Operation::Write, "write"), (Operation::Discard, "discard"), (Operation::WriteZeroes, "zeroes")]
    {
        let one = (name, 4096, 8192);
        assert_eq!(asked(&mut queue, request(operation, 4096, 8192, false)), [one]);
        assert_eq!(asked(&mut queue, request(operation, 4096, 8192, true)), [one, ("flush", 0, 0)]);
    }
    assert_eq!(asked(&mut queue, request(Operation::Read, 0, 512, true)), [("read", 0, 512)]);
    assert_eq!(asked(&mut queue, request(Operation::Flush, 0, 0, true)), [("flush", 0, 0)]);
    assert_eq!(asked(&mut queue, request(Operation::Write, 512, 0, true)), [], "nothing to do");
}

#[test]
fn a_discard_is_zeroing_where_the_disk_promises_no_zeroes() {
    let mut queue = queue(false);
    assert_eq!(asked(&mut queue, request(Operation::Discard, 0, 4096, false)), [("zeroes", 0, 4096)]);
}

#[test]
fn a_read_returns_the_bytes_and_a_write_its_error_without_a_flush() {
    let mut queue = queue(true);
    let mut done = Vec::new();
    queue.submit(request(Operation::Read, 512, 1024, false), &mut done);
    assert_eq!((queue.parked(), queue.changes()), (1, 0));
    queue.submit(request(Operation::Write, SIZE / 2, 512, true), &mut done);
    assert_eq!((queue.parked(), queue.changes()), (2, 1));
    let (done, asked) = run(&mut queue, done);
    assert_eq!(asked, [("read", 512, 1024), ("write", SIZE / 2, 512)]);
    assert_eq!(&done[0].buffer[..], [7; 1024]);
    assert_eq!(done[1].result.as_ref().map_err(Error::kind), Err(ErrorKind::Backing));
    assert_eq!(done[1].buffer.len(), 512, "the buffer comes back");
}

#[test]
fn a_request_is_whole_sectors_inside_the_device_with_a_buffer_that_fits() {
    let mut queue = queue(true);
    let mut refused = |request: Request| {
        let mut done = Vec::new();
        queue.submit(request, &mut done);
        let completion = done.pop().expect("it is refused at once");
        completion.result.map_err(|error| error.kind())
    };
    let read = |start, length| request(Operation::Read, start, length, false);
    assert_eq!(refused(read(SIZE - 512, 1024)), Err(ErrorKind::OutOfRange));
    assert_eq!(refused(read(SIZE, 512)), Err(ErrorKind::OutOfRange));
    assert_eq!(refused(read(100, 412)), Err(ErrorKind::InvalidArgument));
    assert_eq!(refused(read(512, 100)), Err(ErrorKind::InvalidArgument));
    let backwards = Request { range: ByteRange { start: 1024, end: 512 }, ..read(0, 0) };
    assert_eq!(refused(backwards), Err(ErrorKind::OutOfRange));
    let short = Request { buffer: AlignedBuffer::zeroed(512), ..read(0, 1024) };
    assert_eq!(refused(short), Err(ErrorKind::InvalidArgument));
    let with_bytes =
        Request { buffer: AlignedBuffer::zeroed(512), ..request(Operation::Discard, 0, 512, false) };
    assert_eq!(refused(with_bytes), Err(ErrorKind::InvalidArgument));
    assert_eq!(refused(read(SIZE, 0)), Ok(()));
    let zeroes = request(Operation::WriteZeroes, SIZE - 512, 512, false);
    assert_eq!(asked(&mut queue, zeroes), [("zeroes", SIZE - 512, 512)]);
}

#[test]
fn the_callers_own_memory_is_read_and_written_through_a_copy() {
    let mut queue = queue(true);
    assert!(queue.write_from(9, ByteRange::at(0, 512), &[1; 512], true).is_none());
    let (done, asked) = run(&mut queue, Vec::new());
    assert_eq!(asked, [("write", 0, 512), ("flush", 0, 0)]);
    assert_eq!(&done[0].buffer[..], [1; 512]);
    assert!(queue.read_into(9, ByteRange::at(0, 512), &mut [0; 512]).is_none());
    let (done, asked) = run(&mut queue, Vec::new());
    assert_eq!((asked, &done[0].buffer[..]), (vec![("read", 0, 512)], &[7; 512][..]));
    assert!(matches!(queue.write_from(9, ByteRange::at(0, 0), &[], false), Some(Ok(()))));
    assert!(matches!(queue.read_into(9, ByteRange::at(0, 0), &mut []), Some(Ok(()))));
    assert!(matches!(queue.write_from(9, ByteRange::at(SIZE, 512), &[1; 512], false), Some(Err(_))));
    assert!(matches!(queue.read_into(9, ByteRange::at(SIZE, 512), &mut [0; 512]), Some(Err(_))));
}

#[test]
fn without_a_cache_nothing_is_held_back_and_what_the_disk_has_is_not_given_up() {
    let mut queue = queue(true);
    let mut done = Vec::new();
    queue.submit_plugged(request(Operation::Write, 0, 512, false), &mut done);
    assert_eq!(queue.backing().in_flight(), 1);
    queue.give_up(&mut done);
    assert!(done.is_empty() && queue.parked() == 1);
    let (done, _) = run(&mut queue, done);
    assert!(done.len() == 1 && done[0].result.is_ok());
}

#[test]
fn the_geometry_of_a_bare_disk_is_its_own() {
    let queue = queue(true);
    let geometry = queue.device.geometry();
    assert_eq!((geometry.size, geometry.sector, geometry.physical_sector), (SIZE, 512, 4096));
    assert_eq!((geometry.atomic_unit, geometry.discard_granularity), (512, 4096));
    assert!(geometry.discard && geometry.rotational && !geometry.fast_zeroes);
    let extents = queue.device.extents(ByteRange::at(0, 512));
    assert!(extents.len() == 1 && !extents[0].cached && !extents[0].zeroes && !extents[0].dirty);
}
