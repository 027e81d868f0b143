//! Protocol violations of guests and front ends: the ring is stopped with a reason, and all other rings continue.

mod common;

use cbd_export::BlockDevice;
use cbd_export::budget::Budget;
use cbd_vhost::Options;
use common::device::Gate;
use common::guest::*;
use common::{Served, memory, serve, serve_with, until};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::{VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EFD_SEMAPHORE, EventFd};

/// Starts a guest with two rings, the first of which violates the protocol; the second must continue, and so must the
/// first after it is set up again.
fn assert_ring_stops(features: u64, reason: &str, wrong: impl FnOnce(&Ram, &mut Ring)) {
    let served = serve(memory(1 << 20));
    let (mut link, ram, mut rings) = start_guest(&served.path, features, 2);
    wrong(&ram, &mut rings[0]);
    rings[0].kick();
    let events = served.reports("ring 0: ");
    assert!(events.contains(reason), "{events}");
    until("the front end is notified", || rings[0].error.read().is_ok());
    assert_eq!(rings[1].execute(&ram, DO_FLUSH, 0, &[]), 0);
    rings[0].write_request(&ram, 0, DO_FLUSH, 0, &[]);
    rings[0].kick();
    // No request is taken from it until the guest sets it up again, as a driver does after a reset.
    std::thread::sleep(std::time::Duration::from_millis(5));
    assert_eq!(rings[0].used(&ram), 0);
    link.front_end.get_vring_base(0).expect("stopped");
    ram.put(BASE, &[0; 0x8000]);
    let mut again = Ring::new(0, 256);
    link.start(&ram, &again, 0);
    assert_eq!(again.execute(&ram, DO_FLUSH, 0, &[]), 0);
}

#[test]
fn a_chain_with_a_loop() {
    assert_ring_stops(TYPICAL, "loop", |ram, ring| {
        for at in 0..4 {
            ring.write_descriptor(ram, ring.table(), at, (DATA, 16, NEXT), (at + 1) % 4);
        }
        ring.offer(ram, 0);
    });
}

#[test]
fn an_indirect_table_that_names_itself() {
    assert_ring_stops(TYPICAL, "indirect", |ram, ring| {
        ring.write_descriptors(ram, 0, &[(ring.table(), 4096, INDIRECT)]);
        ring.offer(ram, 0);
    });
}

#[test]
fn an_indirect_table_that_was_not_negotiated() {
    assert_ring_stops(TYPICAL & !INDIRECT_DESCRIPTORS, "indirect", |ram, ring| {
        ring.write_descriptors(ram, 0, &[(DATA, 48, INDIRECT)]);
        ring.offer(ram, 0);
    });
}

#[test]
fn data_outside_of_memory() {
    for (address, length) in [(0, 512), (BASE + SIZE - 1, 2), (u64::MAX - 100, 4096), (DATA, u32::MAX)] {
        assert_ring_stops(TYPICAL, "not in the guest's memory", |ram, ring| {
            ring.write_request(ram, 0, OUT, 0, &[(address, length, 0)]);
            ring.offer(ram, 0);
        });
    }
}

#[test]
fn data_in_the_wrong_direction() {
    assert_ring_stops(TYPICAL, "behind a writable one", |ram, ring| {
        let head = ring.head(0);
        ring.write_descriptors(ram, 0, &[(head, 16, 0), (head + 16, 1, WRITE), (DATA, 512, 0)]);
        ring.offer(ram, 0);
    });
}

#[test]
fn a_request_without_room_for_its_status() {
    assert_ring_stops(TYPICAL, "no room for its status", |ram, ring| {
        ring.write_descriptors(ram, 0, &[(ring.head(0), 16, 0), (DATA, 512, 0)]);
        ring.offer(ram, 0);
    });
}

#[test]
fn a_request_without_a_head() {
    assert_ring_stops(TYPICAL, "too few for a head", |ram, ring| {
        ring.write_descriptors(ram, 0, &[(ring.head(0), 15, 0), (DATA, 512, WRITE)]);
        ring.offer(ram, 0);
    });
}

#[test]
fn more_requests_than_the_ring_has() {
    assert_ring_stops(TYPICAL, "ring is invalid", |ram, ring| ring.advance_available(ram, 257));
}

#[test]
fn a_descriptor_that_the_ring_does_not_have() {
    assert_ring_stops(TYPICAL, "descriptor 256 of a ring of 256", |ram, ring| ring.offer(ram, 256));
}

#[test]
fn a_request_that_is_offered_while_it_is_in_flight() {
    let gate = Gate::over(memory(1 << 20));
    let served = serve(Arc::clone(&gate) as Arc<dyn BlockDevice>);
    let (link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    gate.hold();
    rings[0].write_request(&ram, 0, OUT, 0, &[(DATA, 512, 0)]);
    rings[0].offer(&ram, 0);
    rings[0].offer(&ram, 0);
    rings[0].kick();
    assert!(served.reports("ring 0: ").contains("offered twice"));
    assert_eq!(gate.operations().len(), 1);
    // The requests of a stopped ring in the device are completed and not answered before the front end is disconnected.
    drop(link);
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(served.server.is_connected());
    gate.release();
    served.reports("ended: in order");
    assert_eq!(rings[0].used(&ram), 0);
}

#[test]
fn requests_before_an_invalid_one_are_executed() {
    let served = serve(memory(1 << 20));
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 2);
    ram.put(DATA, &[7; 512]);
    rings[0].write_request(&ram, 0, OUT, 0, &[(DATA, 512, 0)]);
    rings[0].write_request(&ram, 8, OUT, 1, &[(0, 512, 0)]);
    for head in [0, 8] {
        rings[0].offer(&ram, head);
    }
    rings[0].kick();
    served.reports("not in the guest's memory");
    assert_eq!((rings[0].used(&ram), rings[0].status(&ram, 0)), (1, 0));
    assert_eq!(rings[1].execute(&ram, IN, 0, &[(DATA + 4096, 512, WRITE)]), 0);
    assert_eq!(ram.get(DATA + 4096, 512), [7; 512]);
}

#[test]
fn data_that_overlaps_the_rings_affects_only_its_guest() {
    let served = serve(memory(1 << 20));
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 2);
    // A read over the descriptor table, the rings and its own head and answer.
    rings[0].write_request(&ram, 0, IN, 0, &[(BASE, 0x9000, WRITE)]);
    rings[0].offer(&ram, 0);
    rings[0].kick();
    served.reports("connected");
    for _ in 0..100 {
        assert_eq!(rings[1].execute(&ram, DO_FLUSH, 0, &[]), 0);
    }
}

/// Rings of random bytes do not affect other clients.
#[test]
fn rings_of_random_bytes() {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..200 {
        let served = serve(memory(1 << 20));
        let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL | EVENT_INDEX, 2);
        let ring = &mut rings[0];
        for at in 0..256 {
            let near = BASE + next() % (SIZE + 4096);
            let piece = (near, next() as u32 % 20_000, next() as u16 & 7);
            ring.write_descriptor(&ram, ring.table(), at, piece, next() as u16 % 300);
            ram.put(ring.head(at), &[next() as u8 % 14]);
        }
        for _ in 0..next() % 64 {
            ring.offer(&ram, next() as u16 % 256);
        }
        ring.kick();
        assert_eq!(rings[1].execute(&ram, DO_FLUSH, 0, &[]), 0);
        served.server.stop().expect("it ends");
    }
}

fn assert_served(served: &Served) {
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    assert_eq!(rings[0].execute(&ram, DO_FLUSH, 0, &[]), 0);
}

#[test]
fn a_file_of_memory_that_is_truncated_while_the_ring_runs() {
    let served = serve(memory(1 << 20));
    let (link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    // The rings remain, the data is truncated.
    ram.file.set_len(4 << 20).expect("truncated");
    rings[0].write_request(&ram, 0, OUT, 0, &[(DATA, 4096, 0)]);
    rings[0].offer(&ram, 0);
    rings[0].kick();
    let events = served.reports("ring 0: ");
    assert!(events.contains("removed"), "{events}");
    drop(link);
    assert_served(&served);
}

#[test]
fn data_from_memory_that_was_truncated_does_not_reach_the_device() {
    let gate = Gate::over(memory(1 << 20));
    let served = serve(Arc::clone(&gate) as Arc<dyn BlockDevice>);
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    ram.file.set_len(DATA - BASE + 4096).expect("truncated");
    // One half of it still exists.
    rings[0].write_request(&ram, 0, OUT, 0, &[(DATA, 8192, 0)]);
    rings[0].offer(&ram, 0);
    rings[0].kick();
    assert!(served.reports("ring 0: ").contains("removed"));
    assert_eq!(gate.operations(), []);
}

#[test]
fn a_ring_whose_memory_is_truncated_while_the_server_polls_it() {
    let served = serve(memory(1 << 20));
    let (link, ram, rings) = start_guest(&served.path, TYPICAL, 1);
    ram.file.set_len(0).expect("truncated");
    rings[0].kick();
    assert!(served.reports("ring 0: ").contains("removed"));
    drop(link);
    assert_served(&served);
}

#[test]
fn memory_for_requests_in_flight_that_is_truncated_while_the_ring_runs() {
    let served = serve(memory(1 << 20));
    let (ram, record) = (Ram::new(), Ram::new().file);
    let mut link = Link::open(&served.path, TYPICAL);
    // The server's memory is sealed; a file that the front end created can be truncated.
    let (given, _) = link.make_inflight(1, 256);
    record.set_len(given.mmap_size).expect("its size");
    link.front_end.set_inflight_fd(&given, record.as_raw_fd()).expect("taken");
    link.share_memory(&ram);
    let mut ring = Ring::new(0, 256);
    link.start(&ram, &ring, 0);
    assert_eq!(ring.execute(&ram, DO_FLUSH, 0, &[]), 0);
    record.set_len(0).expect("truncated");
    ring.write_request(&ram, 0, DO_FLUSH, 0, &[]);
    ring.offer(&ram, 0);
    ring.kick();
    let events = served.reports("ring 0: ");
    assert!(events.contains("requests in flight was removed"), "{events}");
    drop(link);
    assert_served(&served);
}

#[test]
fn memory_that_is_removed_while_a_ring_uses_it() {
    let served = serve(memory(1 << 20));
    let (mut link, ram, _rings) = start_guest(&served.path, TYPICAL, 1);
    link.front_end.remove_mem_region(&ram.region()).expect("taken back");
    assert!(served.reports("ring 0: ").contains("not in the guest's memory"));
    drop(link);
    assert_served(&served);
}

#[test]
fn data_whose_memory_is_removed_while_it_is_read() {
    let gate = Gate::over(memory(1 << 20));
    let served = serve(Arc::clone(&gate) as Arc<dyn BlockDevice>);
    let (mut link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    let (_more, plugged) = more_memory();
    link.front_end.add_mem_region(&plugged).expect("plugged in");
    gate.hold();
    rings[0].write_request(&ram, 0, IN, 0, &[(1 << 32, 4096, WRITE)]);
    rings[0].offer(&ram, 0);
    rings[0].kick();
    until("it is parked", || gate.operations().len() == 1);
    link.front_end.remove_mem_region(&plugged).expect("taken back");
    gate.release();
    assert!(served.reports("ring 0: ").contains("not in the guest's memory"));
}

type Wrong = fn(&mut Link, &Ram);

/// Each of these ends the connection, with a reason, and the next front end is served.
#[test]
fn front_ends_that_violate_the_protocol_are_disconnected() {
    let served = serve(memory(1 << 20));
    let cases: [(&str, Wrong); 13] = [
        ("power of two", |link, _| _ = link.front_end.set_vring_num(0, 1000)),
        ("power of two", |link, _| _ = link.front_end.set_vring_num(0, 2048)),
        ("features", |link, _| _ = link.front_end.set_features(TYPICAL | 1 << 34)),
        ("is not in memory that was handed over", |link, ram| _ = link.set_up(ram, &Ring::new(0, 256), 0)),
        ("its file has", |link, ram| {
            let mut region = ram.region();
            region.memory_size += 4096;
            _ = link.front_end.set_mem_table(&[region]);
        }),
        ("memory map is invalid", |link, ram| {
            _ = link.front_end.set_mem_table(&[ram.region(), ram.region()])
        }),
        ("has not handed over", |link, ram| _ = link.front_end.remove_mem_region(&ram.region())),
        ("rings of", |link, _| {
            let wanted = VhostUserInflight { num_queues: 65, queue_size: 256, ..Default::default() };
            _ = link.front_end.get_inflight_fd(&wanted);
        }),
        ("cannot be used", |link, ram| {
            let kept = VhostUserInflight {
                mmap_size: 1 << 40,
                mmap_offset: 1 << 40,
                num_queues: 1,
                queue_size: 256,
            };
            _ = link.front_end.set_inflight_fd(&kept, ram.file.as_raw_fd());
        }),
        ("while it runs", |link, ram| {
            link.share_memory(ram);
            let ring = Ring::new(0, 256);
            link.start(ram, &ring, 0);
            _ = link.front_end.set_vring_num(0, 128);
        }),
        ("changes ring 0 while it runs", |link, ram| {
            link.share_memory(ram);
            link.start(ram, &Ring::new(0, 256), 0);
            let mut elsewhere = ram.region();
            elsewhere.userspace_addr -= 0x1_0000;
            link.front_end.set_mem_table(&[elsewhere]).expect("the same memory at another address");
            _ = link.set_addresses(ram, &Ring::new(0, 256), false);
        }),
        ("the log of dirty pages cannot be used", |link, ram| {
            let region = VhostUserDirtyLogRegion {
                mmap_size: 1 << 40,
                mmap_offset: 0,
                mmap_handle: ram.file.as_raw_fd(),
            };
            _ = link.front_end.set_log_base(0, Some(region));
        }),
        ("is not in the guest's memory", |link, ram| {
            let mut region = ram.region();
            region.memory_size = 0x4000;
            link.front_end.set_mem_table(&[region]).expect("a small one");
            let mut region = ram.region();
            region.memory_size = 0x5800;
            link.front_end.set_mem_table(&[region]).expect("the rings do not end in it");
            _ = link.set_up(ram, &Ring::new(0, 256), 0);
        }),
    ];
    for (reason, wrong) in cases {
        served.events.lock().expect("no thread panicked with the lock").clear();
        let ram = Ram::new();
        let mut link = Link::open(&served.path, TYPICAL);
        wrong(&mut link, &ram);
        let events = served.reports("ended: a vhost-user front end was disconnected");
        assert!(events.contains(reason), "{reason}: {events}");
        assert_served(&served);
    }
}

#[test]
fn random_bytes_instead_of_messages() {
    let served = serve(memory(1 << 20));
    for noise in [&[0xFF; 64][..], &[1, 0, 0, 0, 1, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF], &[1, 0, 0]] {
        let mut socket = UnixStream::connect(&served.path).expect("connected");
        socket.write_all(noise).expect("said");
        drop(socket);
        assert_served(&served);
    }
}

#[test]
fn a_second_front_end_is_refused_and_the_first_continues() {
    let served = serve(memory(1 << 20));
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    let second = UnixStream::connect(&served.path).expect("connected");
    served.reports("refused");
    assert_eq!(rings[0].execute(&ram, DO_FLUSH, 0, &[]), 0);
    drop(second);
}

#[test]
fn kick_descriptors_that_are_not_events() {
    let served = serve(memory(1 << 20));
    // A kick descriptor that is always readable and never holds an event, or whose other end is closed.
    for descriptor in ["file", "pipe"] {
        let ram = Ram::new();
        let mut link = Link::open(&served.path, TYPICAL);
        link.share_memory(&ram);
        let mut ring = Ring::new(0, 256);
        use std::os::fd::{FromRawFd, IntoRawFd};
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let fake = if descriptor == "file" {
            std::fs::File::open("/dev/null").expect("a file").into_raw_fd()
        } else {
            reader.into_raw_fd()
        };
        // SAFETY: the descriptor was released just above, so no other object owns it.
        ring.kick = unsafe { EventFd::from_raw_fd(fake) };
        drop(writer);
        link.start(&ram, &ring, 0);
        let events = served.reports("ring 0: ");
        assert!(events.contains("kick descriptor"), "{descriptor}: {events}");
        served.events.lock().expect("no thread panicked with the lock").clear();
        drop(link);
        served.reports("ended");
    }
    assert_served(&served);
}

/// A sparse file that can be handed over as memory far above all other memory.
fn sparse(index: u64, size: u64) -> (std::fs::File, VhostUserMemoryRegionInfo) {
    let file = memory_file(size);
    let piece = VhostUserMemoryRegionInfo {
        guest_phys_addr: (1 << 44) + index * size,
        memory_size: size,
        userspace_addr: (1 << 45) + index * size,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    (file, piece)
}

/// Hands over sparse memory until the front end is disconnected; returns the number of accepted pieces.
fn hand_over_sparse(served: &Served, count: u64, size: u64) -> u64 {
    let mut link = Link::open(&served.path, TYPICAL);
    let pieces: Vec<_> = (0..count).map(|index| sparse(index, size)).collect();
    let mut taken = 0;
    for (_, piece) in &pieces {
        if link.front_end.add_mem_region(piece).is_err() {
            break;
        }
        taken += 1;
    }
    taken
}

#[test]
fn a_front_end_that_exceeds_its_memory_limit_is_disconnected() {
    let served = serve_with(memory(1 << 20), Options { guest_memory_max: 1 << 40, ..Options::default() });
    assert_eq!(hand_over_sparse(&served, 20, 256 << 30), 4);
    let events = served.reports("ended: a vhost-user front end was disconnected");
    assert!(events.contains("one front end may hand over 1099511627776"), "{events}");
    let ram = Ram::new();
    let link = Link::open(&served.path, TYPICAL);
    let mut region = ram.region();
    region.memory_size = 2 << 40;
    ram.file.set_len(2 << 40).expect("a sparse file");
    assert!(link.front_end.set_mem_table(&[region]).is_err());
    drop(link);
    assert_served(&served);
}

#[test]
fn a_front_end_that_exceeds_the_total_memory_limit_is_disconnected_and_others_continue() {
    let all = Budget::new(1 << 40);
    let options = Options { guest_memory: Arc::clone(&all), ..Options::default() };
    let (first, second) =
        (serve_with(memory(1 << 20), options.clone()), serve_with(memory(1 << 20), options));
    let (_link, ram, mut rings) = start_guest(&first.path, TYPICAL, 1);
    assert_eq!(all.used(), SIZE);
    assert_eq!(hand_over_sparse(&second, 20, 256 << 30), 3);
    let events = second.reports("ended: a vhost-user front end was disconnected");
    assert!(events.contains("all front ends of this process"), "{events}");
    until("its memory is not counted any more", || all.used() == SIZE);
    assert_eq!(all.refusals(), 1);
    assert_eq!(rings[0].execute(&ram, DO_FLUSH, 0, &[]), 0);
    assert_served(&second);
}

#[test]
fn the_default_limits_leave_half_of_the_address_space() {
    let served = serve(memory(1 << 20));
    // 80 TiB in pieces of 4 TiB: with all of them no further thread could start.
    assert_eq!(hand_over_sparse(&served, 20, 4 << 40), 4);
    served.reports("one front end may hand over");
    assert_served(&served);
}

/// Nanoseconds of processor time of the thread of this name.
fn processor_time(name: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("the threads of this process");
    let times = tasks.flatten().filter_map(|task| {
        let comm = std::fs::read_to_string(task.path().join("comm")).ok()?;
        (comm.trim() == name).then(|| std::fs::read_to_string(task.path().join("schedstat")).ok())?
    });
    let first = |text: String| text.split_whitespace().next().and_then(|number| number.parse::<u64>().ok());
    times.filter_map(first).max().expect("there is such a thread")
}

#[test]
fn a_ring_whose_kick_descriptor_is_always_readable_is_served_with_little_processor_time() {
    let served = serve(memory(1 << 20));
    let ram = Ram::new();
    let mut link = Link::open(&served.path, TYPICAL);
    link.share_memory(&ram);
    // No other test has a ring with this index.
    let mut ring = Ring::new(37, 256);
    ring.kick = EventFd::new(EFD_NONBLOCK | EFD_SEMAPHORE).expect("an eventfd");
    ring.kick.write(u64::MAX - 100_000).expect("it holds as much");
    link.start(&ram, &ring, 0);
    assert_eq!(ring.execute(&ram, DO_FLUSH, 0, &[]), 0);
    let (began, before) = (std::time::Instant::now(), processor_time("vhost-37"));
    std::thread::sleep(std::time::Duration::from_millis(400));
    let used = processor_time("vhost-37") - before;
    let passed = began.elapsed().as_nanos() as u64;
    assert!(used < passed / 10, "{used} ns of {passed} for a ring without requests");
    for _ in 0..10 {
        assert_eq!(ring.execute(&ram, DO_FLUSH, 0, &[]), 0);
    }
}

/// Pages of this process that are never filled: a thread that touches one waits until this is dropped.
struct MissingPages(std::fs::File);

impl MissingPages {
    /// Registers the pages that are mapped from the file named `name`, so that they are missing.
    fn of(name: &str) -> Self {
        use std::os::fd::FromRawFd;
        const USER_MODE_ONLY: i32 = 1;
        const API: libc::c_ulong = 0xc018_aa3f;
        const REGISTER: libc::c_ulong = 0xc020_aa00;
        // SAFETY: takes integers only.
        let raw = unsafe {
            libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY)
        };
        assert!(raw >= 0, "userfaultfd: {}", std::io::Error::last_os_error());
        // SAFETY: the descriptor is new and not owned by another object.
        let file = unsafe { std::fs::File::from_raw_fd(raw as i32) };
        let mut api = [0xaa_u64, 0, 0];
        // SAFETY: the structure has three words, which live through the call.
        assert_eq!(unsafe { libc::ioctl(file.as_raw_fd(), API, api.as_mut_ptr()) }, 0);
        let maps = std::fs::read_to_string("/proc/self/maps").expect("the mappings of this process");
        for line in maps.lines().filter(|line| line.contains(name)) {
            let (range, _) = line.split_once(' ').expect("a range");
            let (start, end) = range.split_once('-').expect("a range");
            let number = |text| u64::from_str_radix(text, 16).expect("a number");
            let mut register = [number(start), number(end) - number(start), 1, 0];
            // SAFETY: the structure has four words, which live through the call.
            assert_eq!(unsafe { libc::ioctl(file.as_raw_fd(), REGISTER, register.as_mut_ptr()) }, 0);
        }
        Self(file)
    }

    /// Waits until a thread has touched one of the pages.
    fn wait_until_touched(&self) {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure that lives through the call.
        let ready = unsafe { libc::poll(&raw mut poll, 1, 60_000) };
        assert_eq!((ready, poll.revents), (1, libc::POLLIN), "no thread touches the memory");
    }
}

#[test]
fn a_server_whose_guest_has_memory_that_is_never_filled_reports_it_and_stops_in_time() {
    let options = Options { stop_timeout: std::time::Duration::from_millis(200), ..Options::default() };
    let served = serve_with(memory(1 << 20), options);
    let (mut link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    // SAFETY: the name is a string with a closing zero; the descriptor is new and not owned by another object.
    let file = unsafe {
        use std::os::fd::FromRawFd;
        std::fs::File::from_raw_fd(libc::memfd_create(c"on-a-server-that-hangs".as_ptr(), libc::MFD_CLOEXEC))
    };
    file.set_len(1 << 20).expect("its size");
    let (_, mut piece) = more_memory();
    piece.mmap_handle = file.as_raw_fd();
    link.front_end.add_mem_region(&piece).expect("taken");
    let missing = MissingPages::of("on-a-server-that-hangs");
    rings[0].write_request(&ram, 0, OUT, 0, &[(piece.guest_phys_addr, 4096, 0)]);
    rings[0].offer(&ram, 0);
    rings[0].kick();
    missing.wait_until_touched();
    let began = std::time::Instant::now();
    let Served { server, events, .. } = served;
    let error = server.stop().expect_err("it cannot end").line();
    assert!(began.elapsed() < std::time::Duration::from_secs(10));
    assert!(error.contains("ring 0 waits for a page of the guest's memory"), "{error}");
    assert!(error.contains("on-a-server-that-hangs"), "{error}");
    drop(missing.0);
    until("the connection ends once the page is filled", || {
        events.lock().expect("no thread panicked with the lock").iter().any(|line| line.starts_with("ended"))
    });
}
