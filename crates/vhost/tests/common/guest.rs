//! A guest and its front end: messages are sent by the front end of the `vhost` crate, rings are written by hand, so
//! that they can be invalid.

use super::TIMEOUT;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

pub const FLUSH: u64 = 1 << 9;
pub const CACHE_MODE: u64 = 1 << 11;
/// Stores to the guest's memory are logged.
pub const LOG_ALL: u64 = 1 << 26;
pub const INDIRECT_DESCRIPTORS: u64 = 1 << 28;
pub const EVENT_INDEX: u64 = 1 << 29;
pub const PROTOCOL: u64 = 1 << 30;
pub const VERSION_1: u64 = 1 << 32;
/// The features that a typical guest negotiates.
pub const TYPICAL: u64 = FLUSH | PROTOCOL | VERSION_1 | INDIRECT_DESCRIPTORS;

pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const DO_FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

/// Guest address at which the memory begins.
pub const BASE: u64 = 0x10_0000;
pub const SIZE: u64 = 32 << 20;
/// Distance in bytes between the areas of two rings (the ring, heads and statuses).
const RING: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x5000;
const HEADS: u64 = 0x8000;
/// Data begins here.
pub const DATA: u64 = BASE + (8 << 20);

/// A guest's memory, which outlives connections.
pub struct Ram {
    pub file: File,
    pub memory: GuestMemoryMmap,
}

pub fn memory_file(size: u64) -> File {
    // SAFETY: the name is a string with a closing zero; the descriptor is new and not owned by another object.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"guest".as_ptr(), libc::MFD_CLOEXEC)) };
    file.set_len(size).expect("its size");
    file
}

/// A part of a huge page, which need not exist: nothing touches it.
pub fn part_of_huge_page() -> (File, VhostUserMemoryRegionInfo) {
    let flags = libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB;
    // SAFETY: the name is a string with a closing zero; the descriptor is new and not owned by another object.
    let file = unsafe { File::from_raw_fd(libc::memfd_create(c"huge".as_ptr(), flags)) };
    file.set_len(2 << 20).expect("its size");
    let region = VhostUserMemoryRegionInfo {
        memory_size: 65536,
        userspace_addr: 1 << 40,
        mmap_handle: file.as_raw_fd(),
        ..Default::default()
    };
    (file, region)
}

/// A piece of 1 MiB, far above all other memory, that can be added.
pub fn more_memory() -> (File, VhostUserMemoryRegionInfo) {
    let file = memory_file(1 << 20);
    let plugged = VhostUserMemoryRegionInfo {
        guest_phys_addr: 1 << 32,
        memory_size: 1 << 20,
        userspace_addr: 1 << 40,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    (file, plugged)
}

impl Ram {
    pub fn new() -> Self {
        let file = memory_file(SIZE);
        let range =
            (GuestAddress(BASE), SIZE as usize, Some(FileOffset::new(file.try_clone().expect("a file"), 0)));
        let memory = GuestMemoryMmap::from_ranges_with_files([range]).expect("mapped");
        Self { file, memory }
    }

    pub fn host(&self) -> u64 {
        self.memory.get_host_address(GuestAddress(BASE)).expect("mapped") as u64
    }

    pub fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: BASE,
            memory_size: SIZE,
            userspace_addr: self.host(),
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_slice(bytes, GuestAddress(at)).expect("inside");
    }

    pub fn get(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.memory.read_slice(&mut bytes, GuestAddress(at)).expect("inside");
        bytes
    }

    fn load(&self, at: u64) -> u16 {
        self.memory.load(GuestAddress(at), Ordering::Acquire).expect("inside")
    }

    fn store(&self, at: u64, value: u16) {
        self.memory.store(value, GuestAddress(at), Ordering::Release).expect("inside");
    }
}

/// A descriptor: address, length, flags.
pub type Piece = (u64, u32, u16);

/// The guest's half of a ring; it outlives connections.
pub struct Ring {
    pub index: usize,
    pub size: u16,
    next_available: u16,
    seen_used: u16,
    pub kick: EventFd,
    pub call: EventFd,
    pub error: EventFd,
}

impl Ring {
    pub fn new(index: usize, size: u16) -> Self {
        let event = || EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        Self { index, size, next_available: 0, seen_used: 0, kick: event(), call: event(), error: event() }
    }

    fn base(&self) -> u64 {
        BASE + self.index as u64 * RING
    }

    pub fn table(&self) -> u64 {
        self.base()
    }

    /// Address of the used ring, which has a page of its own.
    pub fn used_ring(&self) -> u64 {
        self.base() + USED
    }

    /// Address of the head and status of the request at descriptor `at`.
    pub fn head(&self, at: u16) -> u64 {
        self.base() + HEADS + u64::from(at) * 64
    }

    /// Writes consecutive descriptors from `at`.
    pub fn write_descriptors(&self, ram: &Ram, at: u16, pieces: &[Piece]) {
        self.write_table(ram, self.table(), at, pieces);
    }

    pub fn write_table(&self, ram: &Ram, table: u64, at: u16, pieces: &[Piece]) {
        for (index, &(address, length, flags)) in pieces.iter().enumerate() {
            let here = at + index as u16;
            let (flags, next) = if index + 1 < pieces.len() { (flags | NEXT, here + 1) } else { (flags, 0) };
            self.write_descriptor(ram, table, here, (address, length, flags), next);
        }
    }

    pub fn write_descriptor(
        &self,
        ram: &Ram,
        table: u64,
        at: u16,
        (address, length, flags): Piece,
        next: u16,
    ) {
        let mut raw = [0; 16];
        raw[..8].copy_from_slice(&address.to_le_bytes());
        raw[8..12].copy_from_slice(&length.to_le_bytes());
        raw[12..14].copy_from_slice(&flags.to_le_bytes());
        raw[14..].copy_from_slice(&next.to_le_bytes());
        ram.put(table + 16 * u64::from(at), &raw);
    }

    /// Offers the chain that begins at `head`, without a kick.
    pub fn offer(&mut self, ram: &Ram, head: u16) {
        let available = self.base() + AVAILABLE;
        ram.put(available + 4 + 2 * u64::from(self.next_available % self.size), &head.to_le_bytes());
        self.next_available = self.next_available.wrapping_add(1);
        ram.store(available + 2, self.next_available);
    }

    /// Advances the available index beyond the entries that were written.
    pub fn advance_available(&mut self, ram: &Ram, count: u16) {
        ram.store(self.base() + AVAILABLE + 2, self.next_available.wrapping_add(count));
    }

    pub fn kick(&self) {
        self.kick.write(1).expect("kicked");
    }

    /// Whether the device wants a kick for the request that was added last.
    pub fn wants_kick(&self, ram: &Ram, with_events: bool) -> bool {
        fence(Ordering::SeqCst);
        if with_events {
            let event = ram.load(self.base() + USED + 4 + 8 * u64::from(self.size));
            event == self.next_available.wrapping_sub(1)
        } else {
            ram.load(self.base() + USED) & 1 == 0
        }
    }

    /// Sets the index of the answer for which the guest wants a notification.
    pub fn notify_after(&self, ram: &Ram, used: u16) {
        ram.store(self.base() + AVAILABLE + 4 + 2 * u64::from(self.size), used);
        fence(Ordering::SeqCst);
    }

    /// Sets whether the guest wants notifications (without event indexes).
    pub fn enable_notifications(&self, ram: &Ram, wanted: bool) {
        ram.store(self.base() + AVAILABLE, u16::from(!wanted));
        fence(Ordering::SeqCst);
    }

    /// Index of the used ring.
    pub fn used(&self, ram: &Ram) -> u16 {
        ram.load(self.base() + USED + 2)
    }

    /// The next answer, if there is one: head of the chain, and length.
    pub fn answer(&mut self, ram: &Ram) -> Option<(u16, u32)> {
        if self.used(ram) == self.seen_used {
            return None;
        }
        let at = self.base() + USED + 4 + 8 * u64::from(self.seen_used % self.size);
        self.seen_used = self.seen_used.wrapping_add(1);
        let raw = ram.get(at, 8);
        let word = |at: usize| u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        Some((word(0) as u16, word(4)))
    }

    /// Waits for the next answer.
    pub fn wait(&mut self, ram: &Ram) -> (u16, u32) {
        let end = Instant::now() + TIMEOUT;
        loop {
            if let Some(answer) = self.answer(ram) {
                return answer;
            }
            assert!(Instant::now() < end, "ring {} does not answer", self.index);
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Writes a request at descriptors from `at`: head, data, status.
    pub fn write_request(&self, ram: &Ram, at: u16, kind: u32, sector: u64, data: &[Piece]) {
        let head = self.head(at);
        ram.put(head, &kind.to_le_bytes());
        ram.put(head + 4, &[0; 4]);
        ram.put(head + 8, &sector.to_le_bytes());
        ram.put(head + 16, &[0xFF]);
        let mut pieces = vec![(head, 16, 0)];
        pieces.extend_from_slice(data);
        pieces.push((head + 16, 1, WRITE));
        self.write_descriptors(ram, at, &pieces);
    }

    /// The status of the request at `at`.
    pub fn status(&self, ram: &Ram, at: u16) -> u8 {
        ram.get(self.head(at) + 16, 1)[0]
    }

    /// Executes a request and returns its status.
    pub fn execute(&mut self, ram: &Ram, kind: u32, sector: u64, data: &[Piece]) -> u8 {
        self.write_request(ram, 0, kind, sector, data);
        self.offer(ram, 0);
        self.kick();
        assert_eq!(self.wait(ram).0, 0);
        self.status(ram, 0)
    }
}

/// A connection.
pub struct Link {
    pub front_end: Frontend,
}

impl Link {
    /// Connects and negotiates `features`; does not set up memory and rings.
    pub fn open(path: &Path, features: u64) -> Self {
        let mut front_end = Frontend::connect(path, 64).expect("connected");
        front_end.set_owner().expect("owned");
        let offered = front_end.get_features().expect("features");
        assert_eq!(features & !offered, 0, "offered is {offered:#x}");
        let protocol = front_end.get_protocol_features().expect("features of the protocol");
        front_end.set_protocol_features(protocol & protocol_features()).expect("negotiated");
        front_end.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        front_end.set_features(features).expect("negotiated");
        Self { front_end }
    }

    pub fn share_memory(&self, ram: &Ram) {
        self.front_end.set_mem_table(&[ram.region()]).expect("memory");
    }

    pub fn start(&mut self, ram: &Ram, ring: &Ring, base: u16) {
        self.set_up(ram, ring, base).expect("a ring");
    }

    pub fn set_up(&mut self, ram: &Ram, ring: &Ring, base: u16) -> vhost::Result<()> {
        let (front_end, index) = (&mut self.front_end, ring.index);
        front_end.set_vring_num(index, ring.size)?;
        front_end.set_vring_base(index, base)?;
        self.set_addresses(ram, ring, false)?;
        let front_end = &mut self.front_end;
        front_end.set_vring_kick(index, &ring.kick)?;
        front_end.set_vring_call(index, &ring.call)?;
        front_end.set_vring_err(index, &ring.error)?;
        front_end.set_vring_enable(index, true)
    }

    /// Sets the addresses of a ring; `is_logged` if stores to its used ring are to be logged.
    pub fn set_addresses(&mut self, ram: &Ram, ring: &Ring, is_logged: bool) -> vhost::Result<()> {
        let host = ram.host() + ring.index as u64 * RING;
        let addresses = VringConfigData {
            queue_max_size: ring.size,
            queue_size: ring.size,
            flags: u32::from(is_logged),
            desc_table_addr: host,
            used_ring_addr: host + USED,
            avail_ring_addr: host + AVAILABLE,
            log_addr: is_logged.then(|| ring.used_ring()),
        };
        self.front_end.set_vring_addr(ring.index, &addresses)
    }

    /// Memory for requests in flight, from the server.
    pub fn make_inflight(&mut self, queues: u16, size: u16) -> (VhostUserInflight, File) {
        let wanted = VhostUserInflight { num_queues: queues, queue_size: size, ..Default::default() };
        let (given, file) = self.front_end.get_inflight_fd(&wanted).expect("memory for the record");
        self.front_end.set_inflight_fd(&given, file.as_raw_fd()).expect("taken");
        (given, file)
    }
}

fn protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::LOG_SHMFD
}

/// A guest with `queues` rings of 256 that run.
pub fn start_guest(path: &Path, features: u64, queues: usize) -> (Link, Ram, Vec<Ring>) {
    let ram = Ram::new();
    let mut link = Link::open(path, features);
    link.share_memory(&ram);
    let rings = (0..queues).map(|index| Ring::new(index, 256)).collect::<Vec<_>>();
    for ring in &rings {
        link.start(&ram, ring, 0);
    }
    (link, ram, rings)
}
