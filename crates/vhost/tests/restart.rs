//! Servers that are killed and restarted, and front ends that disconnect and reconnect: no request is lost, and none is
//! answered twice.

mod common;

use cbd_export::{BlockDevice, MemoryDevice};
use cbd_pmem::{Mapping, OpenOptions};
use cbd_vhost::{Options, Server};
use common::device::Gate;
use common::guest::*;
use common::{TIMEOUT, memory, serve, until};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;

const REGION: u64 = 16 << 20;

/// The server of the tests below, as a separate process: it serves a region in a file until it is killed, or its
/// standard input ends. It holds writes of one sector while a file named `hold` exists.
#[test]
#[ignore = "this is the process that other tests start and kill"]
fn a_process_that_serves() {
    let Some(directory) = std::env::var_os("CBD_VHOST_TEST_DIRECTORY") else { return };
    let directory = Path::new(&directory);
    let region =
        Arc::new(Mapping::open(directory.join("region"), &OpenOptions::default()).expect("a region"));
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(region, 512).expect("a device"));
    let gate = Gate::over(device);
    if directory.join("hold").exists() {
        gate.hold();
    }
    let served: Arc<dyn BlockDevice> = gate;
    let server = Server::start(served, &directory.join("vhost.sock"), Options::default()).expect("a server");
    println!("\nserving");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    server.stop().expect("it ends");
}

struct Process(Child);

impl Process {
    fn start(directory: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this"))
            .args(["--exact", "a_process_that_serves", "--ignored", "--nocapture"])
            .env("CBD_VHOST_TEST_DIRECTORY", directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let output = child.stdout.take().expect("piped");
        let mut lines = BufReader::new(output).lines();
        assert!(lines.any(|line| line.is_ok_and(|line| line == "serving")), "it does not serve");
        // Its later output is discarded.
        std::mem::forget(lines);
        Self(child)
    }

    fn kill(mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("gone");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    File::create(directory.path().join("region")).and_then(|file| file.set_len(REGION)).expect("a region");
    directory
}

/// A guest with one ring, and a record of requests in flight.
struct Guest {
    ram: Ram,
    ring: Ring,
    /// The ring size that the front end announces when it requests the record of requests in flight.
    announced_size: u16,
    record: Option<(vhost::vhost_user::message::VhostUserInflight, File)>,
}

impl Guest {
    fn new(size: u16) -> Self {
        Self { ram: Ram::new(), ring: Ring::new(0, size), announced_size: size, record: None }
    }

    /// Connects as a front end whose server has ended: it knows only the indices in the ring.
    fn connect(&mut self, path: &Path) -> Link {
        let end = Instant::now() + TIMEOUT;
        while UnixStream::connect(path).is_err() {
            assert!(Instant::now() < end, "no server listens");
            std::thread::sleep(Duration::from_millis(2));
        }
        // The connection was refused or closed; the server may need a moment to detect that the previous one ended.
        std::thread::sleep(Duration::from_millis(5));
        let mut link = Link::open(path, TYPICAL | EVENT_INDEX);
        match &self.record {
            Some((given, file)) => link.front_end.set_inflight_fd(given, file.as_raw_fd()).expect("taken"),
            None => self.record = Some(link.make_inflight(1, self.announced_size)),
        }
        link.share_memory(&self.ram);
        link.start(&self.ram, &self.ring, self.ring.used(&self.ram));
        link
    }

    fn write(&mut self, slot: u16, sector: u64, fill: u8) {
        let data = DATA + u64::from(slot) * 512;
        self.ram.put(data, &[fill; 512]);
        self.ring.write_request(&self.ram, slot * 3, OUT, sector, &[(data, 512, 0)]);
        self.ring.offer(&self.ram, slot * 3);
    }
}

#[test]
fn requests_in_flight_when_the_server_is_killed_are_executed_by_the_next() {
    assert_executed_by_the_next_server(Guest::new(64), 0);
}

#[test]
fn requests_in_flight_of_a_ring_larger_than_announced_are_executed_by_the_next_server() {
    // The last descriptors of the ring are used.
    assert_executed_by_the_next_server(Guest { announced_size: 64, ..Guest::new(256) }, 256 / 3 - 16);
}

/// Requests in sixteen slots from `first` on.
fn assert_executed_by_the_next_server(mut guest: Guest, first: u16) {
    let slots = first..first + 16;
    let directory = directory();
    let path = directory.path().join("vhost.sock");
    File::create(directory.path().join("hold")).expect("a file");
    let process = Process::start(directory.path());
    let link = guest.connect(&path);
    for slot in slots.clone() {
        guest.write(slot, u64::from(slot), slot as u8 + 1);
    }
    guest.ring.kick();
    // All are recorded, none is executed.
    let (given, file) = guest.record.as_ref().expect("a record");
    let recorded = || {
        use std::os::unix::fs::FileExt;
        let mut record = vec![0; given.mmap_size as usize];
        file.read_exact_at(&mut record, 0).expect("read");
        record[16..].chunks(16).filter(|entry| entry[0] == 1).count()
    };
    until("all are taken", || recorded() == 16);
    process.kill();
    std::fs::remove_file(directory.path().join("hold")).expect("removed");
    drop(link);

    // The next server listens at the same path, replacing the old socket file.
    assert!(path.exists());
    let _process = Process::start(directory.path());
    let _link = guest.connect(&path);
    let mut answered = (0..16).map(|_| guest.ring.wait(&guest.ram).0 / 3).collect::<Vec<_>>();
    answered.sort_unstable();
    assert_eq!(answered, slots.clone().collect::<Vec<_>>());
    until("no request is recorded", || {
        use std::os::unix::fs::FileExt;
        let (given, file) = guest.record.as_ref().expect("a record");
        let mut record = vec![0; given.mmap_size as usize];
        file.read_exact_at(&mut record, 0).expect("read");
        record[16..].chunks(16).all(|entry| entry[0] == 0)
    });
    for slot in slots {
        assert_eq!(guest.ring.status(&guest.ram, slot * 3), 0);
        assert_eq!(guest.ring.execute(&guest.ram, IN, u64::from(slot), &[(DATA + 0x8000, 512, WRITE)]), 0);
        assert_eq!(guest.ram.get(DATA + 0x8000, 512), [slot as u8 + 1; 512]);
    }
}

/// A guest that keeps writing, and a server that is killed at any time: each request is answered once, and its data is
/// stored.
#[test]
fn no_request_is_lost_or_answered_twice_over_many_kills() {
    const SLOTS: u16 = 20;
    let directory = directory();
    let path = directory.path().join("vhost.sock");
    let mut guest = Guest::new(64);
    let mut process = Process::start(directory.path());
    let mut link = guest.connect(&path);
    // The request in flight of each slot, and the acknowledged data of each sector.
    let mut in_flight = [None::<(u64, u8)>; SLOTS as usize];
    let mut acknowledged = vec![0_u8; 2000];
    let mut busy = std::collections::HashSet::new();
    let mut state = 12345_u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    for kills in 0..12 {
        let began = Instant::now();
        let end = began + Duration::from_millis(20 + next() % 60);
        let mut answered = 0;
        // On a busy machine it may take longer.
        while Instant::now() < end || (answered == 0 && began.elapsed() < TIMEOUT) {
            for slot in 0..SLOTS {
                if in_flight[usize::from(slot)].is_none() {
                    let sector = next() % acknowledged.len() as u64;
                    if busy.insert(sector) {
                        let fill = next() as u8 | 1;
                        guest.write(slot, sector, fill);
                        in_flight[usize::from(slot)] = Some((sector, fill));
                    }
                }
            }
            guest.ring.kick();
            while let Some((head, _)) = guest.ring.answer(&guest.ram) {
                let (sector, fill) = in_flight[usize::from(head / 3)].take().expect("it was in flight");
                assert_eq!(guest.ring.status(&guest.ram, head), 0);
                acknowledged[sector as usize] = fill;
                busy.remove(&sector);
                answered += 1;
            }
        }
        assert!(answered > 0, "nothing was done before kill {kills}");
        process.kill();
        drop(link);
        process = Process::start(directory.path());
        link = guest.connect(&path);
    }
    while in_flight.iter().any(Option::is_some) {
        let (head, _) = guest.ring.wait(&guest.ram);
        let (sector, fill) = in_flight[usize::from(head / 3)].take().expect("it was in flight");
        assert_eq!(guest.ring.status(&guest.ram, head), 0);
        acknowledged[sector as usize] = fill;
    }
    for (sector, fill) in acknowledged.iter().enumerate() {
        assert_eq!(guest.ring.execute(&guest.ram, IN, sector as u64, &[(DATA + 0x8000, 512, WRITE)]), 0);
        assert_eq!(guest.ram.get(DATA + 0x8000, 512), [*fill; 512], "sector {sector}");
    }
    drop(link);
    process.kill();
}

#[test]
fn a_front_end_that_reconnects_continues_at_its_index() {
    let gate = Gate::over(memory(1 << 20));
    let served = serve(Arc::clone(&gate) as Arc<dyn BlockDevice>);
    let mut guest = Guest::new(64);
    let mut link = guest.connect(&served.path);
    for round in 0..5_u8 {
        guest.write(0, u64::from(round), round + 1);
        guest.ring.kick();
        assert_eq!(guest.ring.wait(&guest.ram), (0, 1));
        // The connection is closed while a request is in flight: it is completed and answered nevertheless.
        gate.hold();
        guest.write(1, 100 + u64::from(round), round + 1);
        guest.ring.kick();
        let operations = usize::from(round) * 3 + 2;
        until("it is parked", || gate.operations().len() == operations);
        drop(link);
        // Time in which the server sees that, also beside other work.
        std::thread::sleep(Duration::from_millis(100));
        // A request that was added while no server was connected waits.
        guest.write(2, 200 + u64::from(round), round + 1);
        gate.release();
        assert_eq!(guest.ring.wait(&guest.ram), (3, 1));
        link = guest.connect(&served.path);
        assert_eq!(guest.ring.wait(&guest.ram), (6, 1));
    }
}

#[test]
fn a_request_waiting_for_space_is_given_up_with_its_front_end_and_executed_once_by_the_next_connection() {
    let gate = Gate::over(memory(1 << 20));
    let served = serve(Arc::clone(&gate) as Arc<dyn BlockDevice>);
    let mut guest = Guest::new(64);
    let link = guest.connect(&served.path);
    gate.hold_for_space();
    guest.write(0, 7, 9);
    guest.ring.kick();
    until("it waits", || gate.operations().len() == 1);
    drop(link);
    // The device still holds requests: the connection ends without waiting for the device.
    served.reports("ended");
    assert_eq!(guest.ring.answer(&guest.ram), None);
    let _link = guest.connect(&served.path);
    until("it is submitted again", || gate.operations().len() == 2);
    gate.release();
    assert_eq!(guest.ring.wait(&guest.ram), (0, 1));
    assert_eq!(gate.operations().len(), 2);
}

#[test]
fn a_ring_that_is_being_stopped_gives_up_waiting_requests_when_its_front_end_disconnects() {
    let gate = Gate::over(memory(1 << 20));
    let served = serve(Arc::clone(&gate) as Arc<dyn BlockDevice>);
    let mut guest = Guest::new(64);
    let link = guest.connect(&served.path);
    gate.hold_for_space();
    guest.write(0, 7, 9);
    guest.ring.kick();
    until("it waits", || gate.operations().len() == 1);
    // A message whose reply waits for the request.
    let socket = link.front_end.as_raw_fd();
    let closer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        // SAFETY: the front end lives until this thread has been joined.
        unsafe { libc::shutdown(socket, libc::SHUT_RDWR) };
    });
    assert!(link.front_end.get_vring_base(0).is_err());
    closer.join().expect("closed");
    drop(link);
    served.reports("ended");
}

#[test]
fn a_server_that_stops_answers_requests_in_flight_and_removes_its_socket() {
    let gate = Gate::over(memory(1 << 20));
    let served = serve(Arc::clone(&gate) as Arc<dyn BlockDevice>);
    let mut guest = Guest::new(64);
    let _link = guest.connect(&served.path);
    gate.hold();
    guest.write(0, 0, 1);
    guest.ring.kick();
    until("it is parked", || gate.operations().len() == 1);
    let releaser = {
        let gate = Arc::clone(&gate);
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            gate.release();
        })
    };
    served.server.stop().expect("it ends");
    releaser.join().expect("released");
    assert_eq!(guest.ring.answer(&guest.ram), Some((0, 1)));
    assert!(!served.path.exists());
}

#[test]
fn a_server_whose_device_hangs_stops_in_time_and_the_next_executes_its_requests() {
    let gate = Gate::over(memory(1 << 20));
    let options = Options { stop_timeout: Duration::from_millis(100), ..Options::default() };
    let served = common::serve_with(Arc::clone(&gate) as Arc<dyn BlockDevice>, options);
    let mut guest = Guest::new(64);
    let link = guest.connect(&served.path);
    gate.hold();
    guest.write(0, 7, 9);
    guest.ring.kick();
    until("it is parked", || gate.operations().len() == 1);
    let began = Instant::now();
    served.server.stop().expect("it gives up");
    assert!(began.elapsed() < Duration::from_secs(3));
    let events = served.events.lock().expect("no thread panicked with the lock").join("\n");
    assert!(events.contains("did not complete in time"), "{events}");
    drop(link);
    assert_eq!(guest.ring.answer(&guest.ram), None);

    gate.release();
    let again = serve(Arc::clone(&gate) as Arc<dyn BlockDevice>);
    let _link = guest.connect(&again.path);
    assert_eq!(guest.ring.wait(&guest.ram), (0, 1));
    assert_eq!(gate.operations().len(), 2);
}

#[test]
fn a_front_end_without_a_record_of_requests_in_flight_continues_at_its_base() {
    let served = serve(memory(1 << 20));
    let ram = Ram::new();
    let mut ring = Ring::new(0, 16);
    for round in 0..40_u16 {
        let mut link = Link::open(&served.path, TYPICAL);
        link.share_memory(&ram);
        link.start(&ram, &ring, ring.used(&ram));
        assert_eq!(ring.execute(&ram, DO_FLUSH, 0, &[]), 0);
        assert_eq!(link.front_end.get_vring_base(0).expect("stopped"), u32::from(round) + 1);
        drop(link);
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_connection_without_a_valid_first_message_does_not_exclude_others() {
    let served = serve(memory(1 << 20));
    let mut silent = UnixStream::connect(&served.path).expect("connected");
    served.reports("connected");
    silent.write_all(&[1]).expect("sent");
    drop(silent);
    served.reports("ended");
    let (_link, ram, mut rings) = start_guest(&served.path, TYPICAL, 1);
    assert_eq!(rings[0].execute(&ram, DO_FLUSH, 0, &[]), 0);
}
