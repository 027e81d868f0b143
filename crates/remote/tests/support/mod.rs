//! A service over memory, and what uses its device through a region of the same process.

use cbd_channel::Areas;
use cbd_export::{BlockDevice, MemoryDevice, RequestQueue, wait_any};
use cbd_pmem::Mapping;
use cbd_remote::{Changes, ChannelUse, RemoteDevice, Service, ServiceOptions};
use cbd_types::{AlignedBuffer, BlkdevId, ByteRange, Completion, Operation, Region, Request, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub const BLKDEV: BlkdevId = BlkdevId(0);
pub const AREA: u64 = 1 << 20;
pub const SIZE: u64 = 8 << 20;
pub const LIMIT: Duration = Duration::from_secs(20);

/// A region with both areas, and the device behind the service.
pub struct Rig {
    pub region: Arc<Region<Mapping>>,
    pub device: Arc<dyn BlockDevice>,
    pub changes: Arc<Changes>,
    pub is_exclusive: bool,
    pub server: AtomicU64,
    pub session: AtomicU64,
    pub is_lost: Arc<AtomicBool>,
}

impl Rig {
    pub fn new() -> Self {
        let memory = Arc::new(Mapping::anonymous(SIZE).expect("memory"));
        Self {
            region: Arc::new(Region::new(Mapping::anonymous(3 * AREA).expect("memory"))),
            device: Arc::new(MemoryDevice::new(memory, 512).expect("a device")),
            changes: Arc::default(),
            is_exclusive: true,
            server: AtomicU64::new(AREA),
            session: AtomicU64::new(1),
            is_lost: Arc::default(),
        }
    }

    pub fn place(&self) -> ChannelUse {
        ChannelUse {
            areas: Areas { client: 0, server: self.server.load(Ordering::Relaxed) },
            area_bytes: AREA,
            session: self.session.fetch_add(1, Ordering::Relaxed),
            is_lost: Arc::clone(&self.is_lost),
        }
    }

    pub fn serve(&self) -> Service {
        self.serve_as("service")
    }

    /// With this name of its thread.
    pub fn serve_as(&self, name: &str) -> Service {
        let options = ServiceOptions {
            name,
            place: self.place(),
            blkdev: BLKDEV,
            changes: Arc::clone(&self.changes),
            is_exclusive: self.is_exclusive,
            thread_setup: || (),
        };
        Service::start(Arc::clone(&self.region), Arc::clone(&self.device), &options).expect("a service")
    }

    pub fn open(&self, limit: Duration) -> Result<RemoteDevice<Mapping>> {
        RemoteDevice::open(Arc::clone(&self.region), self.place(), limit)
    }
}

/// Polls, and waits as an export does, until `wanted` requests have completed.
pub fn wait_for(queue: &mut dyn RequestQueue, wanted: usize) -> Vec<Completion> {
    let (mut done, end) = (Vec::new(), Instant::now() + LIMIT);
    loop {
        queue.poll(&mut done);
        if done.len() >= wanted {
            return done;
        }
        assert!(Instant::now() < end, "{} of {wanted} requests completed", done.len());
        wait_any(&queue.wait_descriptors(), Some(LIMIT)).expect("a wait");
    }
}

pub fn write(queue: &mut dyn RequestQueue, at: u64, byte: u8, length: usize) -> Vec<Completion> {
    let mut buffer = AlignedBuffer::zeroed(length);
    buffer.fill(byte);
    let mut done = Vec::new();
    let range = ByteRange::at(at, length as u64);
    queue.submit(Request::unmarked(at, Operation::Write, range, false, buffer), &mut done);
    done
}

pub fn read(queue: &mut dyn RequestQueue, at: u64, length: usize) -> AlignedBuffer {
    let mut done = Vec::new();
    let range = ByteRange::at(at, length as u64);
    let buffer = AlignedBuffer::zeroed(length);
    queue.submit(Request::unmarked(at, Operation::Read, range, false, buffer), &mut done);
    if done.is_empty() {
        done = wait_for(queue, 1);
    }
    let completion = done.pop().expect("one completion");
    completion.result.expect("it is read");
    completion.buffer
}
