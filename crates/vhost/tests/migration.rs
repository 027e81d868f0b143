//! A guest migrates: its front end transfers the pages that the log of dirty pages names, as QEMU does.

mod common;

use cbd_vhost::Options;
use common::guest::{self, *};
use common::{memory, serve, serve_with};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::{VhostBackend, VhostUserDirtyLogRegion};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

const DONE: u8 = 0;
const PAGE: u64 = 4096;
/// Bytes of a bitmap for the memory of the guest.
const LOG: u64 = (BASE + SIZE).div_ceil(64 * PAGE) * 8;

/// The bitmap of a front end.
struct Log {
    file: File,
    memory: MmapRegion,
}

impl Log {
    fn new(bytes: u64) -> Self {
        let file = guest::memory_file(bytes);
        let mapped = FileOffset::new(file.try_clone().expect("a file"), 0);
        Self { file, memory: MmapRegion::from_file(mapped, bytes as usize).expect("mapped") }
    }

    fn hand_over(&self, link: &Link) -> vhost::Result<()> {
        let region = VhostUserDirtyLogRegion {
            mmap_size: self.memory.size() as u64,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        };
        link.front_end.set_log_base(0, Some(region))
    }

    /// Hands the bitmap over and turns the log on, in the order of QEMU.
    fn begin(&self, link: &mut Link, ram: &Ram, rings: &[Ring]) {
        self.hand_over(link).expect("a log");
        link.front_end.set_features(TYPICAL | LOG_ALL).expect("turned on");
        for ring in rings {
            link.set_addresses(ram, ring, true).expect("the same addresses");
        }
    }

    /// Takes and clears the bits: the addresses of dirty pages.
    fn take(&self) -> BTreeSet<u64> {
        let bitmap = self.memory.as_volatile_slice();
        let mut pages = BTreeSet::new();
        for word in 0..self.memory.size() / 8 {
            let taken = bitmap.get_atomic_ref::<std::sync::atomic::AtomicU64>(word * 8).expect("inside");
            let bits = taken.swap(0, Ordering::AcqRel);
            pages.extend(
                (0..64).filter(|bit| bits >> bit & 1 != 0).map(|bit| (word as u64 * 64 + bit) * PAGE),
            );
        }
        pages
    }
}

fn copy_page(from: &Ram, to: &Ram, page: u64) {
    let mut bytes = [0; PAGE as usize];
    from.file.read_exact_at(&mut bytes, page - BASE).expect("read");
    to.file.write_all_at(&bytes, page - BASE).expect("written");
}

#[test]
fn what_is_stored_in_the_guests_memory_is_logged_while_the_log_is_on() {
    let served = serve(memory(16 << 20));
    let (mut link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    let log = Log::new(LOG);
    assert_eq!(rings[0].execute(&ram, IN, 0, &[(DATA, 4096, WRITE)]), DONE);
    log.begin(&mut link, &ram, &rings);
    // A ring that begins turns notifications off in its used ring.
    let used = rings[0].used_ring();
    assert!(log.take().is_subset(&BTreeSet::from([used])));

    // Data over the borders of pages; the status behind it in a page of its own.
    let status = DATA + (1 << 20);
    ram.put(rings[0].head(0), &[0; 16]);
    rings[0].write_descriptors(
        &ram,
        0,
        &[(rings[0].head(0), 16, 0), (DATA + 2048, 8192, WRITE), (status, 1, WRITE)],
    );
    rings[0].offer(&ram, 0);
    rings[0].kick();
    rings[0].wait(&ram);
    let wanted = [used, DATA, DATA + 4096, DATA + 8192, status];
    // The answer is seen before the bit of its page is set.
    link.front_end.set_vring_enable_again(&rings[0]);
    assert_eq!(log.take(), BTreeSet::from(wanted));

    // A write stores a status and an answer.
    assert_eq!(rings[0].execute(&ram, OUT, 8, &[(DATA, 4096, 0)]), DONE);
    link.front_end.set_vring_enable_again(&rings[0]);
    assert_eq!(log.take(), BTreeSet::from([used, rings[0].head(0) / PAGE * PAGE]));

    link.front_end.set_features(TYPICAL).expect("turned off");
    link.set_addresses(&ram, &rings[0], false).expect("the same addresses");
    log.take();
    assert_eq!(rings[0].execute(&ram, IN, 0, &[(DATA, 4096, WRITE)]), DONE);
    link.front_end.set_vring_enable_again(&rings[0]);
    assert!(log.take().is_empty(), "the log is off");
}

/// Pauses a ring and continues it: afterwards everything that its thread did has happened.
trait Again {
    fn set_vring_enable_again(&mut self, ring: &Ring);
}

impl Again for vhost::vhost_user::Frontend {
    fn set_vring_enable_again(&mut self, ring: &Ring) {
        self.set_vring_enable(ring.index, true).expect("enabled");
    }
}

/// Numbers that look random.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
}

/// Two rings read into pages next to each other, all the time; the other server has the same device.
#[test]
fn a_guest_whose_dirty_pages_are_transferred_while_it_reads_has_the_same_memory_on_the_other_side() {
    let device = memory(16 << 20);
    let (from, to) = (serve(Arc::clone(&device)), serve(device));
    let (mut link, ram, mut rings) = start_guest(&from.path, TYPICAL, 2);
    let pages = (SIZE - (DATA - BASE)) / PAGE;
    let mut numbers = Numbers(7);
    for sector in (0..16 << 11).step_by(8) {
        ram.put(DATA, &[numbers.next(256) as u8; 4096]);
        assert_eq!(rings[0].execute(&ram, OUT, sector, &[(DATA, 4096, 0)]), DONE);
    }

    let log = Log::new(LOG);
    log.begin(&mut link, &ram, &rings);
    let other = Ram::new();
    (0..SIZE / PAGE).for_each(|page| copy_page(&ram, &other, BASE + page * PAGE));
    let mut transferred = 0;
    for _ in 0..200 {
        // Reads are in flight while the bits are taken.
        for each in 0..16 {
            let page = DATA + numbers.next(pages) / 2 * 2 * PAGE;
            for (ring, page) in rings.iter_mut().zip([page, page + PAGE]) {
                let sector = numbers.next(16 << 8) * 8;
                ring.write_request(&ram, each * 3, IN, sector, &[(page, 4096, WRITE)]);
                ring.offer(&ram, each * 3);
                ring.kick();
            }
        }
        let dirty = log.take();
        transferred += dirty.len();
        dirty.into_iter().for_each(|page| copy_page(&ram, &other, page));
        for ring in &mut rings {
            for _ in 0..16 {
                let (head, _) = ring.wait(&ram);
                assert_eq!(ring.status(&ram, head), DONE);
            }
        }
    }
    assert!(transferred > 0, "no page was dirty while requests were in flight");

    // The guest stops. What it wrote itself is transferred without the log: all before the data but the used rings.
    let bases = [0, 1].map(|ring| link.front_end.get_vring_base(ring).expect("stopped"));
    drop(link);
    let of_device: BTreeSet<u64> = rings.iter().map(Ring::used_ring).collect();
    let own = (BASE..DATA).step_by(PAGE as usize).filter(|page| !of_device.contains(page));
    own.chain(log.take()).for_each(|page| copy_page(&ram, &other, page));
    let (mut here, mut there) = (vec![0; SIZE as usize], vec![0; SIZE as usize]);
    ram.file.read_exact_at(&mut here, 0).expect("read");
    other.file.read_exact_at(&mut there, 0).expect("read");
    let differ = here.chunks(4096).zip(there.chunks(4096)).position(|(here, there)| here != there);
    assert_eq!(differ, None, "a page that was not transferred");

    // It goes on with the other server.
    let mut link = Link::open(&to.path, TYPICAL);
    link.share_memory(&other);
    for (ring, base) in rings.iter_mut().zip(bases) {
        link.start(&other, ring, base as u16);
        assert_eq!(ring.execute(&other, IN, 0, &[(DATA, 4096, WRITE)]), DONE);
    }
}

/// As when a server is killed while its guest migrates: what it stored last may have no bit.
#[test]
fn a_front_end_that_connects_while_the_log_is_on_finds_all_pages_in_it() {
    let served = serve(memory(1 << 20));
    let (mut link, ram) = (Link::open(&served.path, TYPICAL | LOG_ALL), Ram::new());
    link.share_memory(&ram);
    let mut ring = Ring::new(0, 256);
    link.start(&ram, &ring, 0);
    assert_eq!(ring.execute(&ram, IN, 0, &[(DATA, 4096, WRITE)]), DONE);
    let log = Log::new(LOG);
    log.hand_over(&link).expect("a log");
    assert_eq!(log.take().len() as u64, SIZE / PAGE);
    assert_eq!(ring.execute(&ram, IN, 0, &[(DATA, 4096, WRITE)]), DONE);
    link.front_end.set_vring_enable_again(&ring);
    assert_eq!(log.take(), BTreeSet::from([ring.used_ring(), ring.head(0) / PAGE * PAGE, DATA]));

    // Another bitmap of the same front end has what is left in this one, and memory that is added has to be covered.
    assert_eq!(ring.execute(&ram, IN, 0, &[(DATA + 4096, 4096, WRITE)]), DONE);
    let larger = Log::new(LOG + 8);
    larger.hand_over(&link).expect("a larger one");
    assert_eq!(larger.take(), BTreeSet::from([ring.used_ring(), DATA + 4096, ring.head(0) / PAGE * PAGE]));
    let (_more, plugged) = guest::more_memory();
    link.front_end.add_mem_region(&plugged).expect_err("memory far above the bitmap");
    assert!(served.reports("ended: a vhost-user").contains("the log of dirty pages ends at"));
}

/// The guest is reset while it migrates: the front end frees the bitmap with the rings, starts them again, and passes another one
/// last, as QEMU before 7.2 does.
#[test]
fn what_a_ring_stores_before_its_front_end_has_passed_another_bitmap_is_in_that_one() {
    let served = serve(memory(1 << 20));
    let (mut link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    let ring = &mut rings[0];
    let former = Log::new(LOG);
    former.begin(&mut link, &ram, std::slice::from_ref(ring));
    assert_eq!(ring.execute(&ram, IN, 0, &[(DATA, 4096, WRITE)]), DONE);
    let base = link.front_end.get_vring_base(0).expect("stopped");
    former.take();
    link.front_end.set_features(TYPICAL | LOG_ALL).expect("as before");
    link.share_memory(&ram);
    link.start(&ram, ring, base as u16);
    assert_eq!(ring.execute(&ram, IN, 0, &[(DATA + 8192, 4096, WRITE)]), DONE);
    let next = Log::new(LOG);
    next.hand_over(&link).expect("another one");
    let wanted = BTreeSet::from([ring.used_ring(), DATA + 8192, ring.head(0) / PAGE * PAGE]);
    assert!(next.take().is_superset(&wanted));

    // The same with memory that the former bitmap does not cover.
    let base = link.front_end.get_vring_base(0).expect("stopped");
    link.front_end.set_features(TYPICAL | LOG_ALL).expect("as before");
    let (_more, plugged) = guest::more_memory();
    link.front_end.set_mem_table(&[ram.region(), plugged]).expect("another bitmap follows");
    link.start(&ram, ring, base as u16);
    assert_eq!(ring.execute(&ram, IN, 0, &[(DATA, 4096, WRITE)]), DONE);
    let larger = Log::new(((1 << 32) + (1 << 20)) / PAGE / 8);
    larger.hand_over(&link).expect("a larger one");
    assert_eq!(larger.take().len() as u64, (SIZE + (1 << 20)) / PAGE);
}

#[test]
fn a_log_that_is_too_small_ends_the_connection() {
    let served = serve(memory(1 << 20));
    let (link, _ram, _rings) = start_guest(&served.path, TYPICAL, 1);
    Log::new(LOG / 8 * 8 - 64).hand_over(&link).expect("the log is off");
    link.front_end.set_features(TYPICAL | LOG_ALL).expect("another one follows");
    Log::new(LOG / 8 * 8 - 64).hand_over(&link).expect_err("it does not cover the memory");
    assert!(served.reports("ended: a vhost-user").contains("the log of dirty pages ends at"));
}

/// The kernel maps whole huge pages, and unmaps or replaces no part of one.
#[test]
fn parts_of_huge_pages_are_refused_wherever_a_front_end_hands_over_memory() {
    let served = serve(memory(1 << 20));
    let (file, region) = guest::part_of_huge_page();
    let log = VhostUserDirtyLogRegion { mmap_size: 4096, mmap_offset: 0, mmap_handle: file.as_raw_fd() };
    let kept = VhostUserInflight { mmap_size: 4096, mmap_offset: 0, num_queues: 1, queue_size: 64 };
    let hand_over: [&dyn Fn(&mut Link) -> bool; 3] = [
        &|link| link.front_end.set_mem_table(&[region]).is_err(),
        &|link| link.front_end.set_log_base(0, Some(log)).is_err(),
        &|link| link.front_end.set_inflight_fd(&kept, file.as_raw_fd()).is_err(),
    ];
    for hand_over in hand_over {
        served.events.lock().expect("no thread panicked with the lock").clear();
        let mut link = Link::open(&served.path, TYPICAL);
        assert!(hand_over(&mut link));
        let ended = served.reports("ended: a vhost-user front end was disconnected");
        assert!(ended.contains("huge pages of 2097152 bytes, and its offset 0"), "{ended}");
    }
}

#[test]
fn a_log_counts_as_memory_of_its_front_end() {
    let limited =
        |bytes| serve_with(memory(1 << 20), Options { guest_memory_max: bytes, ..Options::default() });
    let served = limited(SIZE + 8192);
    let (link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    Log::new(4096).hand_over(&link).expect("there is room for it");
    Log::new(8192).hand_over(&link).expect("another one in its place");
    link.share_memory(&ram);
    assert_eq!(rings[0].execute(&ram, IN, 0, &[(DATA, 4096, WRITE)]), DONE);
    Log::new(8193).hand_over(&link).expect_err("too large");
    assert!(served.reports("ended: a vhost-user").contains("bytes of memory; one front end may hand over"));

    // There would be room for more memory without the log.
    let served = limited(SIZE + (1 << 20) + 4096);
    let (mut link, _ram, _rings) = start_guest(&served.path, TYPICAL, 1);
    Log::new(8192).hand_over(&link).expect("there is room for it");
    let (_more, plugged) = guest::more_memory();
    link.front_end.add_mem_region(&plugged).expect_err("too large");
    assert!(served.reports("ended: a vhost-user").contains("bytes of memory; one front end may hand over"));
}

/// A front end that never reads a bitmap again once it has passed another one.
#[test]
fn no_bit_is_lost_when_one_bitmap_follows_another_one_while_rings_run() {
    let served = serve(memory(1 << 20));
    let (mut link, ram, mut rings) = start_guest(&served.path, TYPICAL, 2);
    let mut log = Log::new(LOG);
    log.begin(&mut link, &ram, &rings);
    let pages: Vec<u64> = (DATA..BASE + SIZE).step_by(PAGE as usize).collect();
    // Each page is stored to once, so nothing but its one bit tells of it.
    for pages in pages.chunks(2 * 64) {
        for (ring, pages) in rings.iter_mut().zip(pages.chunks(64)) {
            for (each, page) in (0..).zip(pages) {
                ring.write_request(&ram, each * 3, IN, 0, &[(*page, 4096, WRITE)]);
                ring.offer(&ram, each * 3);
            }
            ring.kick();
        }
        for _ in 0..4 {
            let next = Log::new(LOG);
            next.hand_over(&link).expect("another one");
            log = next;
        }
        for (ring, pages) in rings.iter_mut().zip(pages.chunks(64)) {
            pages.iter().for_each(|_| assert_eq!(ring.wait(&ram).0 % 3, 0));
        }
    }
    rings.iter().for_each(|ring| link.front_end.set_vring_enable_again(ring));
    let marked = log.take();
    let lost: Vec<_> = pages.iter().filter(|page| !marked.contains(page)).collect();
    assert!(lost.is_empty(), "{} of {} pages have no bit", lost.len(), pages.len());
}

#[test]
fn a_ring_whose_log_is_truncated_stops() {
    let served = serve(memory(1 << 20));
    let (mut link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    let log = Log::new(LOG.next_multiple_of(PAGE));
    log.begin(&mut link, &ram, &rings);
    assert_eq!(rings[0].execute(&ram, IN, 0, &[(DATA, 4096, WRITE)]), DONE);
    log.file.set_len(0).expect("truncated");
    rings[0].write_request(&ram, 0, IN, 0, &[(DATA, 4096, WRITE)]);
    rings[0].offer(&ram, 0);
    rings[0].kick();
    assert!(served.reports("ring 0").contains("the log of dirty pages was removed"));
}
