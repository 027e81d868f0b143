//! A client of another project: the virtio driver of libblkio's vhost-user driver, an independent implementation of the
//! protocol.

mod common;

use common::{TIMEOUT, memory, serve};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Instant;
use virtio_driver::{
    VhostUser, VirtioBlkConfig, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkReqBuf, VirtioFeatureFlags,
    VirtioTransport,
};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

const SIZE: usize = 8 << 20;

/// Memory that the client and the device share.
struct Shared(MmapRegion);

impl Shared {
    fn new() -> (Self, std::fs::File) {
        let file = common::guest::memory_file(SIZE as u64);
        let mapping = MmapRegion::from_file(FileOffset::new(file.try_clone().expect("a file"), 0), SIZE)
            .expect("mapped");
        (Self(mapping), file)
    }

    fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < SIZE);
        self.0.as_ptr().wrapping_add(offset)
    }

    fn put(&self, offset: usize, bytes: &[u8]) {
        self.0.as_volatile_slice().write_slice(bytes, offset).expect("inside");
    }

    fn get(&self, offset: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.0.as_volatile_slice().read_slice(&mut bytes, offset).expect("inside");
        bytes
    }
}

type Transport = VhostUser<VirtioBlkConfig, VirtioBlkReqBuf>;

struct Client {
    transport: Box<Transport>,
    queues: Vec<VirtioBlkQueue<'static, usize>>,
    shared: Shared,
}

impl Client {
    fn connect(path: &Path, features: VirtioFeatureFlags, queues: usize) -> Self {
        let features = features.bits()
            | VirtioFeatureFlags::VERSION_1.bits()
            | (VirtioBlkFeatureFlags::FLUSH | VirtioBlkFeatureFlags::MQ).bits()
            | (VirtioBlkFeatureFlags::DISCARD | VirtioBlkFeatureFlags::WRITE_ZEROES).bits();
        let mut transport =
            Box::new(Transport::new(path.to_str().expect("a path"), features).expect("connected"));
        assert_eq!(transport.get_features() & features, features);
        let (shared, file) = Shared::new();
        transport.map_mem_region(shared.at(0) as usize, SIZE, file.as_raw_fd(), 0).expect("memory");
        let queues = VirtioBlkQueue::setup_queues(&mut *transport, queues, 128).expect("rings");
        Self { transport, queues, shared }
    }

    /// Waits for `count` answers of ring `queue`.
    fn answers(&mut self, queue: usize, count: usize) -> Vec<(usize, i32)> {
        self.transport.get_submission_notifier(queue).notify().expect("kicked");
        let end = Instant::now() + TIMEOUT;
        let mut answers = Vec::new();
        while answers.len() < count {
            answers.extend(self.queues[queue].completions().map(|done| (done.context, done.ret)));
            assert!(Instant::now() < end, "{} of {count} answers", answers.len());
            std::hint::spin_loop();
        }
        answers
    }

    fn write(&mut self, queue: usize, offset: u64, length: usize) -> i32 {
        let buffer = self.shared.at(0);
        // SAFETY: the buffer lies in the shared memory, and lives until the answer.
        unsafe { self.queues[queue].write_raw(offset, buffer, length, 0) }.expect("queued");
        self.answers(queue, 1)[0].1
    }

    fn read(&mut self, queue: usize, offset: u64, length: usize) -> Vec<u8> {
        let buffer = self.shared.at(SIZE / 2);
        // SAFETY: the buffer lies in the shared memory, and lives until the answer.
        unsafe { self.queues[queue].read_raw(offset, buffer, length, 0) }.expect("queued");
        assert_eq!(self.answers(queue, 1)[0].1, 0);
        self.shared.get(SIZE / 2, length)
    }
}

fn assert_served(features: VirtioFeatureFlags) {
    let served = serve(memory(16 << 20));
    let mut client = Client::connect(&served.path, features, 2);
    client.shared.put(0, &[3; 65536]);
    assert_eq!(client.write(0, 4096, 65536), 0);
    assert_eq!(client.read(1, 4096, 65536), [3; 65536]);
    client.queues[0].flush(1).expect("queued");
    client.queues[0].write_zeroes(8192, 4096, true, 2).expect("queued");
    client.queues[0].discard(16384, 4096, 3).expect("queued");
    let mut answers = client.answers(0, 3);
    answers.sort_unstable();
    assert_eq!(answers, [(1, 0), (2, 0), (3, 0)]);
    let read = client.read(1, 4096, 20480);
    for (page, bytes) in read.chunks(4096).enumerate() {
        let expected = if page == 1 || page == 3 { 0 } else { 3 };
        assert!(bytes.iter().all(|&byte| byte == expected), "page {page}");
    }
    assert_eq!(client.write(1, 16 << 20, 512), -libc::EIO);
}

#[test]
fn a_client_without_optional_features_is_served() {
    assert_served(VirtioFeatureFlags::empty());
}

#[test]
fn a_client_with_event_indexes_is_served() {
    assert_served(VirtioFeatureFlags::RING_EVENT_IDX);
}

#[test]
fn a_client_with_indirect_descriptors_is_served() {
    assert_served(VirtioFeatureFlags::RING_INDIRECT_DESC | VirtioFeatureFlags::RING_EVENT_IDX);
}

#[test]
fn many_writes_on_several_rings_are_read_back() {
    let served = serve(memory(64 << 20));
    let mut client = Client::connect(&served.path, VirtioFeatureFlags::RING_EVENT_IDX, 4);
    const BLOCK: usize = 4096;
    for round in 0..50_usize {
        for queue in 0..4 {
            for slot in 0..16 {
                let place = (queue * 16 + slot) * BLOCK;
                client.shared.put(place, &[(round * 31 + queue * 7 + slot) as u8; BLOCK]);
                let (buffer, offset) =
                    (client.shared.at(place), ((round * 64 + queue * 16 + slot) * BLOCK) as u64);
                // SAFETY: the buffer lies in the shared memory, and lives until the answer.
                unsafe { client.queues[queue].write_raw(offset, buffer, BLOCK, slot) }.expect("queued");
            }
        }
        for queue in 0..4 {
            assert!(client.answers(queue, 16).iter().all(|&(_, result)| result == 0));
        }
    }
    for block in 0..50 * 64_usize {
        let (round, queue, slot) = (block / 64, block / 16 % 4, block % 16);
        let read = client.read(block % 4, (block * BLOCK) as u64, BLOCK);
        assert!(read.iter().all(|&byte| byte == (round * 31 + queue * 7 + slot) as u8), "block {block}");
    }
}

#[test]
fn a_client_that_reconnects_is_served_again() {
    let served = serve(memory(16 << 20));
    for round in 1..=5_u8 {
        let mut client = Client::connect(&served.path, VirtioFeatureFlags::RING_EVENT_IDX, 1);
        if round > 1 {
            assert_eq!(client.read(0, 0, 512), [round - 1; 512]);
        }
        client.shared.put(0, &[round; 512]);
        assert_eq!(client.write(0, 0, 512), 0);
    }
}
