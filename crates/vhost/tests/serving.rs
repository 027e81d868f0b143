//! Requests of a guest are executed. The rings are written by hand, so that their contents can be checked.

mod common;

use cbd_export::BlockDevice;
use cbd_types::{ByteRange, Operation};
use cbd_vhost::Options;
use common::device::Gate;
use common::guest::{self, *};
use common::{memory, serve, serve_with, until};
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;

const DONE: u8 = 0;
const FAILED: u8 = 1;
const UNSUPPORTED: u8 = 2;

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut raw = sector.to_le_bytes().to_vec();
    raw.extend(sectors.to_le_bytes());
    raw.extend(flags.to_le_bytes());
    raw
}

#[test]
fn written_data_is_read_back() {
    let served = serve(memory(16 << 20));
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    ram.put(DATA, &[7; 4096]);
    assert_eq!(rings[0].execute(&ram, OUT, 8, &[(DATA, 4096, 0)]), DONE);
    assert_eq!(rings[0].execute(&ram, IN, 8, &[(DATA + 8192, 4096, WRITE)]), DONE);
    assert_eq!(ram.get(DATA + 8192, 4096), [7; 4096]);
    assert_eq!(rings[0].execute(&ram, DO_FLUSH, 0, &[]), DONE);
}

#[test]
fn scattered_data_and_a_head_in_pieces_are_one_request() {
    let served = serve(memory(1 << 20));
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    let ring = &mut rings[0];
    let head = ring.head(0);
    ram.put(head, &OUT.to_le_bytes());
    ram.put(head + 8, &2_u64.to_le_bytes());
    let data = (0..1024).map(|at| at as u8).collect::<Vec<_>>();
    ram.put(DATA, &data);
    // Head and data share a descriptor; the status is the last byte of a longer one.
    ram.put(head + 16, &data[..16]);
    let pieces =
        [(head, 3, 0), (head + 3, 29, 0), (DATA + 16, 500, 0), (DATA + 516, 508, 0), (head + 40, 4, WRITE)];
    ring.write_descriptors(&ram, 0, &pieces);
    ring.offer(&ram, 0);
    ring.kick();
    assert_eq!(ring.wait(&ram), (0, 4));
    assert_eq!(ram.get(head + 43, 1), [DONE]);
    let scattered = [(DATA + 0x2000, 1, WRITE), (DATA + 0x3000, 1023, WRITE)];
    assert_eq!(ring.execute(&ram, IN, 2, &scattered), DONE);
    assert_eq!(ram.get(DATA + 0x2000, 1), data[..1]);
    assert_eq!(ram.get(DATA + 0x3000, 1023), data[1..]);
}

#[test]
fn a_front_end_with_a_channel_is_told_that_the_device_has_grown() {
    let served = serve(memory(1 << 20));
    assert!(!served.server.grow(2 << 20), "there is no front end");
    let (mut link, _ram, _rings) = start_guest(&served.path, TYPICAL, 1);
    assert!(!served.server.grow(3 << 20), "it has passed no channel");
    let (mut ours, theirs) = UnixStream::pair().expect("a pair");
    link.front_end.set_backend_request_fd(&theirs).expect("accepted");
    drop(theirs);
    assert!(served.server.grow(4 << 20));
    let mut message = [0; 12];
    ours.read_exact(&mut message).expect("a message");
    // VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, version 1, without a body.
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    let (flags, space) = (VhostUserConfigFlags::empty(), [0; 8]);
    let (_, space) = link.front_end.get_config(0, 8, flags, &space).expect("the configuration space");
    assert_eq!(space, ((4_u64 << 20) / 512).to_le_bytes());
    // A front end that reads nothing holds nothing up.
    let told = (0..100_000).take_while(|_| served.server.grow(4 << 20)).count();
    assert!((1..100_000).contains(&told), "{told} messages");
    drop(ours);
    assert!(!served.server.grow(4 << 20), "the front end has closed it");
    drop(link);
    until("the front end has disconnected", || !served.server.is_connected());
    assert!(!served.server.grow(4 << 20));
}

#[test]
fn an_indirect_request_is_executed() {
    let served = serve(memory(1 << 20));
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    let ring = &mut rings[0];
    let head = ring.head(0);
    ram.put(head, &[0; 17]);
    let table = DATA + 0x10_0000;
    ring.write_table(&ram, table, 0, &[(head, 16, 0), (DATA, 512, WRITE), (head + 16, 1, WRITE)]);
    ring.write_descriptors(&ram, 9, &[(table, 48, INDIRECT)]);
    ram.put(DATA, &[1; 512]);
    ring.offer(&ram, 9);
    ring.kick();
    assert_eq!(ring.wait(&ram), (9, 513));
    assert_eq!(ram.get(DATA, 512), [0; 512]);
}

#[test]
fn a_request_larger_than_a_piece_is_executed_completely() {
    let served = serve(memory(16 << 20));
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    let length = (5 << 20) + 512;
    let data = (0..length).map(|at: u32| (at / 512 * 7) as u8).collect::<Vec<_>>();
    ram.put(DATA, &data);
    assert_eq!(rings[0].execute(&ram, OUT, 1, &[(DATA, 12345, 0), (DATA + 12345, length - 12345, 0)]), DONE);
    ram.put(DATA, &vec![0; length as usize]);
    assert_eq!(rings[0].execute(&ram, IN, 1, &[(DATA, length, WRITE)]), DONE);
    assert!(ram.get(DATA, length as usize) == data);
}

#[test]
fn zeroes_and_discards_read_as_zeroes() {
    let served = serve(memory(1 << 20));
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    let ring = &mut rings[0];
    ram.put(DATA, &[9; 8192]);
    for (kind, flags) in [(DISCARD, 0), (WRITE_ZEROES, 0), (WRITE_ZEROES, 1)] {
        assert_eq!(ring.execute(&ram, OUT, 0, &[(DATA, 8192, 0)]), DONE);
        let mut ranges = range(2, 1, flags);
        ranges.extend(range(4, 8, flags));
        ram.put(DATA + 0x10000, &ranges);
        assert_eq!(ring.execute(&ram, kind, 0, &[(DATA + 0x10000, 32, 0)]), DONE);
        assert_eq!(ring.execute(&ram, IN, 0, &[(DATA + 0x20000, 8192, WRITE)]), DONE);
        let read = ram.get(DATA + 0x20000, 8192);
        for (sector, bytes) in read.chunks(512).enumerate() {
            let zero = sector == 2 || (4..12).contains(&sector);
            assert!(bytes.iter().all(|&byte| byte == if zero { 0 } else { 9 }), "sector {sector} of {kind}");
        }
    }
}

#[test]
fn an_invalid_request_is_answered_with_an_error_and_the_ring_continues() {
    let served = serve(memory(1 << 20));
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    let ring = &mut rings[0];
    let end = (1 << 20) / 512;
    assert_eq!(ring.execute(&ram, OUT, end, &[(DATA, 512, 0)]), FAILED);
    assert_eq!(ring.execute(&ram, OUT, end - 1, &[(DATA, 1024, 0)]), FAILED);
    assert_eq!(ring.execute(&ram, IN, u64::MAX, &[(DATA, 512, WRITE)]), FAILED);
    assert_eq!(ring.execute(&ram, IN, u64::MAX / 512, &[(DATA, 512, WRITE)]), FAILED);
    assert_eq!(ring.execute(&ram, OUT, 0, &[(DATA, 511, 0)]), FAILED);
    assert_eq!(ring.execute(&ram, 77, 0, &[]), UNSUPPORTED);
    for (ranges, kind, expected) in [
        (range(0, 1, 1), DISCARD, UNSUPPORTED),
        (range(0, 1, 2), WRITE_ZEROES, UNSUPPORTED),
        (range(end, 1, 0), DISCARD, FAILED),
        (range(0, u32::MAX, 0), WRITE_ZEROES, FAILED),
        (range(0, 1, 0)[..15].to_vec(), DISCARD, FAILED),
        (range(0, 0, 0).repeat(33), DISCARD, FAILED),
    ] {
        ram.put(DATA, &ranges);
        assert_eq!(ring.execute(&ram, kind, 0, &[(DATA, ranges.len() as u32, 0)]), expected, "{ranges:?}");
    }
    assert_eq!(ring.execute(&ram, IN, 0, &[(DATA, 512, WRITE)]), DONE);
}

#[test]
fn the_name_is_the_serial_number() {
    let served = serve(memory(1 << 20));
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    ram.put(DATA, &[0xEE; 24]);
    assert_eq!(rings[0].execute(&ram, GET_ID, 0, &[(DATA, 20, WRITE)]), DONE);
    assert_eq!(ram.get(DATA, 24), *b"cbd-test\0\0\0\0\0\0\0\0\0\0\0\0\xEE\xEE\xEE\xEE");
}

#[test]
fn the_configuration_describes_the_device() {
    let served = serve(memory(3 << 20));
    let mut link = Link::open(&served.path, TYPICAL);
    let (_, space) =
        link.front_end.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]).expect("a space");
    assert_eq!(space[..8], ((3_u64 << 20) / 512).to_le_bytes());
    assert_eq!(space[20..24], 512_u32.to_le_bytes());
    assert_eq!(space[34..36], 64_u16.to_le_bytes());
}

/// The operations that the device received from a guest that negotiated `features`.
fn operations(features: u64, mode: Option<u8>) -> Vec<(Operation, bool)> {
    let gate = Gate::over(memory(1 << 20));
    let served = serve(Arc::clone(&gate) as Arc<dyn BlockDevice>);
    let (mut link, ram, mut rings) = start_guest(&served.path, features, 1);
    if let Some(mode) = mode {
        link.front_end.set_config(32, VhostUserConfigFlags::WRITABLE, &[mode]).expect("it is written");
        let (_, read) =
            link.front_end.get_config(32, 1, VhostUserConfigFlags::empty(), &[0]).expect("a space");
        assert_eq!(read, [mode]);
    }
    ram.put(DATA, &range(0, 8, 0));
    for kind in [OUT, WRITE_ZEROES, DISCARD] {
        let length = if kind == OUT { 4096 } else { 16 };
        assert_eq!(rings[0].execute(&ram, kind, 0, &[(DATA, length, 0)]), DONE);
        ram.put(DATA, &range(0, 8, 0));
    }
    assert_eq!(rings[0].execute(&ram, IN, 0, &[(DATA, 512, WRITE)]), DONE);
    gate.operations().into_iter().map(|(operation, _, fua)| (operation, fua)).collect()
}

#[test]
fn a_guest_that_cannot_flush_has_every_change_durable_at_once() {
    let with = |fua: bool| {
        [
            (Operation::Write, fua),
            (Operation::WriteZeroes, fua),
            (Operation::Discard, fua),
            (Operation::Read, false),
        ]
    };
    assert_eq!(operations(PROTOCOL | VERSION_1, None), with(true));
    assert_eq!(operations(TYPICAL, None), with(false));
    assert_eq!(operations(TYPICAL | CACHE_MODE, Some(0)), with(true));
    assert_eq!(operations(TYPICAL | CACHE_MODE, Some(1)), with(false));
}

#[test]
fn other_bytes_of_the_configuration_cannot_be_written() {
    let served = serve(memory(1 << 20));
    let mut link = Link::open(&served.path, TYPICAL);
    link.front_end.set_config(0, VhostUserConfigFlags::WRITABLE, &[0xFF; 32]).expect("it is ignored");
    link.front_end.set_config(33, VhostUserConfigFlags::WRITABLE, &[0xFF; 27]).expect("it is ignored");
    let (_, space) =
        link.front_end.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]).expect("a space");
    assert_eq!(space[..8], ((1_u64 << 20) / 512).to_le_bytes());
    assert_eq!((space[32], &space[34..36]), (1, &64_u16.to_le_bytes()[..]));
}

#[test]
fn a_read_only_device_is_marked_and_refuses_changes() {
    let served = serve_with(memory(1 << 20), Options { read_only: true, ..Options::default() });
    let read_only = 1 << 5;
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL | read_only, 1);
    ram.put(DATA, &range(0, 8, 0));
    assert_eq!(rings[0].execute(&ram, OUT, 0, &[(DATA, 512, 0)]), FAILED);
    assert_eq!(rings[0].execute(&ram, WRITE_ZEROES, 0, &[(DATA, 16, 0)]), FAILED);
    assert_eq!(rings[0].execute(&ram, DISCARD, 0, &[(DATA, 16, 0)]), UNSUPPORTED);
    assert_eq!(rings[0].execute(&ram, IN, 0, &[(DATA, 512, WRITE)]), DONE);
}

#[test]
fn rings_are_served_concurrently() {
    let gate = Gate::over(memory(1 << 20));
    let served = serve(Arc::clone(&gate) as Arc<dyn BlockDevice>);
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 3);
    gate.hold();
    for ring in &mut rings {
        ring.write_request(&ram, 0, OUT, ring.index as u64, &[(DATA, 512, 0)]);
        ring.offer(&ram, 0);
        ring.kick();
    }
    // No ring waits for another.
    common::until("all three are submitted", || gate.operations().len() == 3);
    gate.release();
    for ring in &mut rings {
        assert_eq!(ring.wait(&ram).0, 0);
        assert_eq!(ring.status(&ram, 0), DONE);
    }
}

#[test]
fn requests_are_answered_in_the_order_in_which_the_device_completes_them() {
    let gate = Gate::over(memory(1 << 20));
    let served = serve(Arc::clone(&gate) as Arc<dyn BlockDevice>);
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    let ring = &mut rings[0];
    gate.hold();
    ring.write_request(&ram, 0, OUT, 0, &[(DATA, 512, 0)]);
    ring.offer(&ram, 0);
    ring.kick();
    common::until("the first is parked", || gate.operations().len() == 1);
    // A request that needs no device overtakes them.
    ring.write_request(&ram, 8, GET_ID, 0, &[(DATA, 20, WRITE)]);
    ring.offer(&ram, 8);
    ring.kick();
    assert_eq!(ring.wait(&ram).0, 8);
    gate.release();
    assert_eq!(ring.wait(&ram).0, 0);
}

#[test]
fn requests_beyond_the_limit_of_bytes_wait_and_are_executed() {
    let gate = Gate::over(memory(1 << 20));
    let options = Options { bytes_max: 2 * 4096, ..Options::default() };
    let served = serve_with(Arc::clone(&gate) as Arc<dyn BlockDevice>, options);
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    gate.hold();
    for number in 0..6_u16 {
        rings[0].write_request(&ram, 4 * number, OUT, 8 * u64::from(number), &[(DATA, 4096, 0)]);
        rings[0].offer(&ram, 4 * number);
    }
    rings[0].kick();
    until("the device has two", || gate.operations().len() == 2);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(gate.operations().len(), 2);
    gate.release();
    let mut answered = (0..6).map(|_| rings[0].wait(&ram).0).collect::<Vec<_>>();
    answered.sort_unstable();
    assert_eq!(answered, [0, 4, 8, 12, 16, 20]);
    assert_eq!(gate.operations().len(), 6);
}

/// Whether the guest was notified since the last call.
fn was_notified(ring: &guest::Ring) -> bool {
    ring.call.read().is_ok()
}

#[test]
fn with_event_indexes_guest_and_device_notify_only_when_requested() {
    let served = serve_with(memory(1 << 20), Options { spin_max: Duration::ZERO, ..Options::default() });
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL | EVENT_INDEX, 1);
    let ring = &mut rings[0];
    ring.notify_after(&ram, 0);
    assert_eq!(ring.execute(&ram, DO_FLUSH, 0, &[]), DONE);
    common::until("the guest is notified of the first answer", || was_notified(ring));
    // The guest wants a notification for the fourth answer from here.
    ring.notify_after(&ram, 4);
    for _ in 0..2 {
        assert_eq!(ring.execute(&ram, DO_FLUSH, 0, &[]), DONE);
    }
    common::until("the device sleeps", || {
        ring.wants_kick(&ram, true) || ram.get(BASE + 0x5000 + 4 + 8 * 256, 2) == 3_u16.to_le_bytes()
    });
    assert!(!was_notified(ring));
    assert_eq!(ring.execute(&ram, DO_FLUSH, 0, &[]), DONE);
    common::until("the device sleeps", || ram.get(BASE + 0x5000 + 4 + 8 * 256, 2) == 4_u16.to_le_bytes());
    assert!(!was_notified(ring), "one early");
    assert_eq!(ring.execute(&ram, DO_FLUSH, 0, &[]), DONE);
    common::until("the guest is notified of the fourth", || was_notified(ring));
    // A sleeping device wants a kick for exactly the next request.
    ring.write_request(&ram, 0, DO_FLUSH, 0, &[]);
    common::until("the device sleeps", || ram.get(BASE + 0x5000 + 4 + 8 * 256, 2) == 5_u16.to_le_bytes());
    ring.offer(&ram, 0);
    assert!(ring.wants_kick(&ram, true));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(ring.answer(&ram), None, "the guest did not kick");
    ring.kick();
    ring.wait(&ram);
}

#[test]
fn without_event_indexes_flags_enable_notifications() {
    let served = serve(memory(1 << 20));
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    let ring = &mut rings[0];
    ring.enable_notifications(&ram, true);
    assert_eq!(ring.execute(&ram, DO_FLUSH, 0, &[]), DONE);
    common::until("the guest is notified", || was_notified(ring));
    ring.enable_notifications(&ram, false);
    assert_eq!(ring.execute(&ram, DO_FLUSH, 0, &[]), DONE);
    common::until("the device sleeps", || ring.wants_kick(&ram, false));
    assert!(!was_notified(ring));
}

#[test]
fn a_ring_that_is_stopped_completes_its_requests_and_returns_its_index() {
    let gate = Gate::over(memory(1 << 20));
    let served = serve(Arc::clone(&gate) as Arc<dyn BlockDevice>);
    let (mut link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    for _ in 0..3 {
        assert_eq!(rings[0].execute(&ram, OUT, 0, &[(DATA, 512, 0)]), DONE);
    }
    gate.hold();
    rings[0].write_request(&ram, 0, OUT, 4, &[(DATA, 512, 0)]);
    rings[0].offer(&ram, 0);
    rings[0].kick();
    common::until("it is parked", || gate.operations().len() == 4);
    let releaser = {
        let gate = Arc::clone(&gate);
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            gate.release();
        })
    };
    use vhost::VhostBackend;
    assert_eq!(link.front_end.get_vring_base(0).expect("stopped"), 4);
    releaser.join().expect("released");
    assert_eq!(rings[0].answer(&ram), Some((0, 1)), "it was answered before the ring stopped");
    // A request that is added now waits until the ring runs again.
    rings[0].write_request(&ram, 0, OUT, 5, &[(DATA, 512, 0)]);
    rings[0].offer(&ram, 0);
    rings[0].kick();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(rings[0].answer(&ram), None);
    link.start(&ram, &rings[0], 4);
    assert_eq!(rings[0].wait(&ram), (0, 1));
}

#[test]
fn a_ring_that_is_disabled_waits() {
    let served = serve(memory(1 << 20));
    let (mut link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    link.front_end.set_vring_enable(0, false).expect("disabled");
    rings[0].write_request(&ram, 0, DO_FLUSH, 0, &[]);
    rings[0].offer(&ram, 0);
    rings[0].kick();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(rings[0].answer(&ram), None);
    link.front_end.set_vring_enable(0, true).expect("enabled");
    assert_eq!(rings[0].wait(&ram).0, 0);
}

#[test]
fn memory_can_change_under_a_running_ring() {
    use vhost::VhostBackend;
    let gate = Gate::over(memory(1 << 20));
    let served = serve(Arc::clone(&gate) as Arc<dyn BlockDevice>);
    let (mut link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    ram.put(DATA, &[5; 512]);
    assert_eq!(rings[0].execute(&ram, OUT, 0, &[(DATA, 512, 0)]), DONE);
    gate.hold();
    rings[0].write_request(&ram, 0, IN, 0, &[(DATA + 4096, 512, WRITE)]);
    rings[0].offer(&ram, 0);
    rings[0].kick();
    common::until("it is parked", || gate.operations().len() == 2);
    // A second piece is added and removed again while a read is in flight.
    let (more, plugged) = guest::more_memory();
    link.front_end.add_mem_region(&plugged).expect("plugged in");
    link.front_end.set_mem_table(&[ram.region(), plugged]).expect("a whole table");
    gate.release();
    assert_eq!(rings[0].wait(&ram).0, 0);
    assert_eq!(ram.get(DATA + 4096, 512), [5; 512]);
    // The new piece can be written to.
    assert_eq!(rings[0].execute(&ram, IN, 0, &[(1 << 32, 512, WRITE)]), DONE);
    use std::os::unix::fs::FileExt;
    let mut read = [0; 512];
    more.read_exact_at(&mut read, 0).expect("read");
    assert_eq!(read, [5; 512]);
    link.front_end.remove_mem_region(&plugged).expect("plugged out");
    assert_eq!(rings[0].execute(&ram, DO_FLUSH, 0, &[]), DONE);
}

#[test]
fn ranges_of_a_discard_are_submitted_one_by_one() {
    let gate = Gate::over(memory(1 << 20));
    let served = serve(Arc::clone(&gate) as Arc<dyn BlockDevice>);
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    let mut ranges = range(8, 8, 1);
    ranges.extend(range(32, 8, 0));
    ram.put(DATA, &ranges);
    // One of them lacks the UNMAP flag, so none is unmapped.
    assert_eq!(rings[0].execute(&ram, WRITE_ZEROES, 0, &[(DATA, 32, 0)]), DONE);
    let zeroes = |start: u64| (Operation::WriteZeroes, ByteRange::at(start * 512, 4096), false);
    assert_eq!(gate.operations(), [zeroes(8), zeroes(32)]);
}

#[test]
fn a_device_with_work_but_without_requests_is_polled_once() {
    let gate = Gate::over(memory(1 << 20));
    let served = serve(Arc::clone(&gate) as Arc<dyn BlockDevice>);
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    assert_eq!(rings[0].execute(&ram, DO_FLUSH, 0, &[]), DONE);
    common::until("the device sleeps", || rings[0].wants_kick(&ram, false));
    let before = gate.polls();
    gate.wake_queues();
    common::until("it is polled", || gate.polls() > before);
    std::thread::sleep(Duration::from_millis(20));
    assert!(gate.polls() < before + 10, "{} times", gate.polls() - before);
}
