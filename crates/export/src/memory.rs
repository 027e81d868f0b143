//! A block device over plain persistent memory, as the reference for measurements of exports.
//!
//! A write stores and fences, a read loads; there is no index, no log, no checksum. The cost of an export over this device is the
//! export's own, so the difference to the same export over a cached device is the cost of the cache.
//!
//! Invariants: a request outside the memory, or with a buffer that does not fit its range, is refused and changes no data. A
//! write is fenced before it completes: when `submit` returns, or `unplug` after plugged writes. Writes are not atomic: a crash
//! may leave part of one.

use crate::{BlockDevice, RequestQueue};
use cbd_format::crc32c;
use cbd_types::{ByteRange, Completion, Error, ErrorKind, Geometry, Operation, Pmem, Request, Result};
use std::os::fd::RawFd;
use std::sync::Arc;

/// Zeroes are stored in pieces of this many bytes.
const ZEROES: usize = 64 << 10;

/// A block device over plain persistent memory.
pub struct MemoryDevice<P: ?Sized> {
    memory: Arc<P>,
    geometry: Geometry,
}

impl<P: Pmem + ?Sized + 'static> MemoryDevice<P> {
    /// A device over all whole sectors of `memory`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] unless `sector` is a power of two from 512 to 4096.
    pub fn new(memory: Arc<P>, sector: u32) -> Result<Self> {
        if !sector.is_power_of_two() || !(512..=4096).contains(&sector) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("a sector of {sector} bytes: it must be a power of two from 512 to 4096"),
            ));
        }
        let geometry = Geometry {
            size: memory.len() / u64::from(sector) * u64::from(sector),
            sector,
            physical_sector: sector.max(4096),
            atomic_unit: sector,
            discard: true,
            discard_granularity: sector,
            rotational: false,
            fast_zeroes: true,
        };
        Ok(Self { memory, geometry })
    }
}

impl<P: Pmem + ?Sized + 'static> BlockDevice for MemoryDevice<P> {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        let memory = Arc::clone(&self.memory);
        Ok(Box::new(MemoryQueue { memory, geometry: self.geometry, unfenced: Vec::new() }))
    }
}

struct MemoryQueue<P: ?Sized> {
    memory: Arc<P>,
    geometry: Geometry,
    /// Writes that are stored and wait for the fence.
    unfenced: Vec<Completion>,
}

impl<P: Pmem + ?Sized> MemoryQueue<P> {
    /// Executes a request except for the fence after its stores.
    fn run(&self, request: &mut Request) -> Result<()> {
        check(&self.geometry, request)?;
        request.check_data(crc32c)?;
        let ByteRange { start, end } = request.range;
        match request.operation {
            Operation::Read => self.memory.load(start, &mut request.buffer)?,
            Operation::Write => self.memory.store(start, &request.buffer),
            Operation::Flush => {}
            Operation::Discard | Operation::WriteZeroes => {
                static ZERO: [u8; ZEROES] = [0; ZEROES];
                let mut at = start;
                while at < end {
                    // The length is at most that of the piece, so the conversion keeps the value.
                    let length = (end - at).min(ZEROES as u64) as usize;
                    self.memory.store(at, &ZERO[..length]);
                    at += length as u64;
                }
            }
        }
        Ok(())
    }
}

impl<P: Pmem + ?Sized> RequestQueue for MemoryQueue<P> {
    fn submit(&mut self, request: Request, done: &mut Vec<Completion>) {
        let is_read = request.operation == Operation::Read;
        self.submit_plugged(request, done);
        if !is_read {
            self.unplug(done);
        }
    }

    fn submit_plugged(&mut self, mut request: Request, done: &mut Vec<Completion>) {
        let result = self.run(&mut request);
        let completion = Completion { id: request.id, result, buffer: request.buffer };
        match request.operation {
            Operation::Read => done.push(completion),
            _ => self.unfenced.push(completion),
        }
    }

    fn unplug(&mut self, done: &mut Vec<Completion>) {
        if !self.unfenced.is_empty() {
            self.memory.fence();
            done.append(&mut self.unfenced);
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.unplug(done);
    }

    fn parked(&self) -> usize {
        self.unfenced.len()
    }

    fn wait_descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }
}

fn check(geometry: &Geometry, request: &Request) -> Result<()> {
    let range = request.range;
    if request.operation == Operation::Flush {
        return Ok(());
    }
    if range.start > range.end || range.end > geometry.size {
        return Err(Error::new(
            ErrorKind::OutOfRange,
            format!("{range} is not inside a device of {} bytes", geometry.size),
        ));
    }
    let sector = u64::from(geometry.sector);
    if !range.start.is_multiple_of(sector) || !range.end.is_multiple_of(sector) {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("{range} is not whole sectors of {sector} bytes"),
        ));
    }
    let carries = matches!(request.operation, Operation::Read | Operation::Write);
    if carries && request.buffer.len() as u64 != range.len() {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("a buffer of {} bytes for {range}", request.buffer.len()),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_types::{AlignedBuffer, Durability, MediaError};
    use std::sync::Mutex;

    /// Memory on the heap that counts the bytes that are not fenced yet.
    struct Heap {
        bytes: Mutex<Vec<u8>>,
        in_flight: Mutex<u64>,
        poisoned: Option<u64>,
    }

    impl Heap {
        fn new(size: usize) -> Self {
            Self { bytes: Mutex::new(vec![0xAA; size]), in_flight: Mutex::new(0), poisoned: None }
        }

        fn in_flight(&self) -> u64 {
            *self.in_flight.lock().expect("no thread panicked with the lock")
        }
    }

    impl Pmem for Heap {
        fn len(&self) -> u64 {
            self.bytes.lock().expect("no thread panicked with the lock").len() as u64
        }

        fn durability(&self) -> Durability {
            Durability::ProcessCrash
        }

        fn store(&self, at: u64, from: &[u8]) {
            *self.in_flight.lock().expect("no thread panicked with the lock") += from.len() as u64;
            let at = at as usize;
            self.bytes.lock().expect("no thread panicked with the lock")[at..at + from.len()]
                .copy_from_slice(from);
        }

        fn store_summed(&self, _at: u64, _from: &[u8], _first: usize, _checksums: &mut [u32]) {
            unreachable!("a bare copy computes no checksum");
        }

        fn store_line(&self, at: u64, line: &[u8; 64]) {
            self.store(at, line);
        }

        fn fence(&self) {
            *self.in_flight.lock().expect("no thread panicked with the lock") = 0;
        }

        fn load(&self, at: u64, into: &mut [u8]) -> core::result::Result<(), MediaError> {
            let first = at as usize;
            if let Some(at) = self.poisoned.filter(|bad| (at..at + into.len() as u64).contains(bad)) {
                return Err(MediaError { at });
            }
            into.copy_from_slice(
                &self.bytes.lock().expect("no thread panicked with the lock")[first..first + into.len()],
            );
            Ok(())
        }

        fn load_summed(&self, _at: u64, _into: &mut [u8]) -> core::result::Result<u32, MediaError> {
            unreachable!("a bare copy computes no checksum");
        }

        fn write_back(&self, _at: u64, _length: u64) {}
    }

    fn ask(
        device: &MemoryDevice<Heap>,
        operation: Operation,
        start: u64,
        length: u64,
        buffer: AlignedBuffer,
    ) -> Completion {
        let mut queue = device.open_queue().expect("a queue");
        let mut done = Vec::new();
        let range = ByteRange::at(start, length);
        queue.submit(Request::unmarked(7, operation, range, false, buffer), &mut done);
        assert_eq!(queue.parked(), 0);
        assert_eq!(done.len(), 1);
        done.remove(0)
    }

    #[test]
    fn data_that_differs_from_its_checksum_is_not_stored() {
        let memory = Arc::new(Heap::new(1 << 20));
        let device = MemoryDevice::new(memory, 512).expect("a device");
        let (mut queue, mut done) = (device.open_queue().expect("a queue"), Vec::new());
        for (flipped, value) in [(0, 3), (1, 4)] {
            let buffer = AlignedBuffer::from_slice(&[value; 512]);
            let data_crc = Some(crc32c(&buffer) ^ flipped);
            let request = Request::unmarked(7, Operation::Write, ByteRange::at(0, 512), false, buffer);
            queue.submit(Request { data_crc, ..request }, &mut done);
        }
        let kinds: Vec<_> =
            done.iter().map(|done| done.result.as_ref().map_err(cbd_types::Error::kind)).collect();
        assert_eq!(kinds, [Ok(&()), Err(ErrorKind::Mismatch)]);
        assert_eq!(ask(&device, Operation::Read, 0, 512, AlignedBuffer::zeroed(512)).buffer[..], [3; 512]);
    }

    #[test]
    fn written_data_is_fenced_and_read_back() {
        let memory = Arc::new(Heap::new(1 << 20));
        let device = MemoryDevice::new(Arc::clone(&memory), 512).expect("a device");
        let written = ask(&device, Operation::Write, 1024, 512, AlignedBuffer::from_slice(&[3; 512]));
        assert!(written.result.is_ok());
        assert_eq!(memory.in_flight(), 0);
        let read = ask(&device, Operation::Read, 512, 1536, AlignedBuffer::zeroed(1536));
        assert!(read.result.is_ok());
        assert_eq!(read.id, 7);
        assert_eq!(read.buffer[..512], [0xAA; 512]);
        assert_eq!(read.buffer[512..1024], [3; 512]);
        assert_eq!(read.buffer[1024..], [0xAA; 512]);
    }

    #[test]
    fn plugged_writes_complete_when_they_are_fenced() {
        let memory = Arc::new(Heap::new(1 << 20));
        let device = MemoryDevice::new(Arc::clone(&memory), 512).expect("a device");
        let mut queue = device.open_queue().expect("a queue");
        let mut done = Vec::new();
        for id in 0..3 {
            let (range, buffer) = (ByteRange::at(id * 512, 512), AlignedBuffer::from_slice(&[1; 512]));
            let request = Request::unmarked(id, Operation::Write, range, false, buffer);
            queue.submit_plugged(request, &mut done);
        }
        assert_eq!((done.len(), queue.parked(), memory.in_flight()), (0, 3, 1536));
        queue.unplug(&mut done);
        assert_eq!((done.len(), queue.parked(), memory.in_flight()), (3, 0, 0));
    }

    #[test]
    fn zeroes_and_discards_read_as_zeroes() {
        for operation in [Operation::WriteZeroes, Operation::Discard] {
            let memory = Arc::new(Heap::new(1 << 20));
            let device = MemoryDevice::new(Arc::clone(&memory), 512).expect("a device");
            let length = 2 * ZEROES as u64 + 512;
            assert!(ask(&device, operation, 512, length, AlignedBuffer::default()).result.is_ok());
            assert_eq!(memory.in_flight(), 0);
            let read = ask(
                &device,
                Operation::Read,
                0,
                length + 1024,
                AlignedBuffer::zeroed(length as usize + 1024),
            );
            let (inside, after) = (512, 512 + length as usize);
            assert!(read.buffer[..inside].iter().all(|&byte| byte == 0xAA));
            assert!(read.buffer[inside..after].iter().all(|&byte| byte == 0));
            assert!(read.buffer[after..].iter().all(|&byte| byte == 0xAA));
        }
    }

    #[test]
    fn requests_that_do_not_fit_the_device_are_refused() {
        let device = MemoryDevice::new(Arc::new(Heap::new(10_000)), 512).expect("a device");
        assert_eq!(device.geometry().size, 9728);
        let kind = |start, length, buffer| {
            let buffer = AlignedBuffer::zeroed(buffer);
            ask(&device, Operation::Read, start, length, buffer).result.expect_err("it is refused").kind()
        };
        assert_eq!(kind(9216, 1024, 1024), ErrorKind::OutOfRange);
        assert_eq!(kind(u64::MAX - 511, 512, 512), ErrorKind::OutOfRange);
        assert_eq!(kind(100, 512, 512), ErrorKind::InvalidArgument);
        assert_eq!(kind(0, 512, 1024), ErrorKind::InvalidArgument);
    }

    #[test]
    fn a_media_error_is_an_error_of_the_read() {
        let memory = Heap { poisoned: Some(5000), ..Heap::new(1 << 16) };
        let device = MemoryDevice::new(Arc::new(memory), 512).expect("a device");
        let read = ask(&device, Operation::Read, 4096, 4096, AlignedBuffer::zeroed(4096));
        assert_eq!(read.result.expect_err("poison").kind(), ErrorKind::Media);
        assert!(ask(&device, Operation::Read, 0, 4096, AlignedBuffer::zeroed(4096)).result.is_ok());
    }

    #[test]
    fn a_sector_that_no_disk_has_is_refused() {
        for sector in [0, 256, 513, 8192] {
            let refused = MemoryDevice::new(Arc::new(Heap::new(10_000)), sector).err().expect("refused");
            assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
        }
    }
}
