//! Both sides of a channel wake each other: the same rig, with threads that sleep.

mod full;
#[path = "../support/mod.rs"]
mod support;

use cbd_export::wake::is_closed_by_peer;
use cbd_export::{BlockDevice, RequestQueue, wait_any};
use cbd_pmem::Mapping;
use cbd_remote::{RemoteDevice, Service, WakeAddress, WakeListener};
use cbd_sys::event::Signal;
use cbd_sys::passing;
use cbd_sys::words::SharedWords;
use cbd_types::{BlkdevId, HostId};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::{AREA, BLKDEV, LIMIT, Rig, read, wait_for, write};

/// Time after which a service sleeps.
const REST: Duration = Duration::from_millis(3);

/// An address that no other test has.
fn address(test: u8) -> WakeAddress {
    let mut region = [test; 16];
    region[..4].copy_from_slice(&std::process::id().to_ne_bytes());
    WakeAddress { region, host: HostId(3) }
}

/// A device and its service, which do not wake each other yet, and where the service is reached.
struct Woken {
    rig: Rig,
    address: WakeAddress,
    listener: WakeListener,
    service: Service,
    device: RemoteDevice<Mapping>,
}

impl Woken {
    fn new(test: u8) -> Self {
        let (rig, address) = (Rig::new(), address(test));
        let listener = WakeListener::bind(&address).expect("a socket");
        let service = rig.serve_as(&format!("service-{test}"));
        let device = rig.open(LIMIT).expect("a device");
        Self { rig, address, listener, service, device }
    }
}

/// Connects a device, and gives the service the connection.
fn connect(
    device: &RemoteDevice<Mapping>,
    service: &Service,
    (address, listener): (&WakeAddress, &mut WakeListener),
) {
    let mut found = Vec::new();
    // Until it begins another program a child of this process, which another test has, keeps the end of a former connection open.
    wait_until(|| {
        device.connect_wake(address, BLKDEV).expect("a connection");
        found = listener.accept();
        !found.is_empty()
    });
    let wake = found.pop().expect("one has come");
    assert_eq!((wake.blkdev(), found.len()), (BLKDEV, 0));
    service.attach(wake);
    wait_until(|| device.is_woken());
}

fn wait_until(mut is_it: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !is_it() {
        assert!(Instant::now() < end, "it does not become so");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_service_and_a_queue_that_sleep_are_woken() {
    let Woken { rig, address, mut listener, service, device } = Woken::new(1);
    connect(&device, &service, (&address, &mut listener));
    let mut queue = device.open_queue().expect("a queue");
    // Both look only after a second, or a tenth of one, unless they are woken.
    let begun = Instant::now();
    for round in 0..200_u32 {
        if round % 2 == 0 {
            std::thread::sleep(REST);
        }
        write(&mut *queue, 0, round as u8, 4096);
        wait_for(&mut *queue, 1).pop().expect("one").result.expect("it is written");
        assert_eq!(read(&mut *queue, 0, 4096)[..], [round as u8; 4096]);
    }
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    // The end of a session wakes the service, too.
    std::thread::sleep(REST);
    let begun = Instant::now();
    device.end();
    wait_until(|| !service.is_used());
    assert!(begun.elapsed() < Duration::from_millis(800), "{:?}", begun.elapsed());
    // Another session has another connection.
    assert!(device.reopen(Arc::clone(&rig.region), rig.place()).expect("there is memory"));
    connect(&device, &service, (&address, &mut listener));
    assert_eq!(read(&mut *queue, 0, 4096)[..], [199; 4096]);
}

/// Whether a thread that waits for the queue would look.
fn is_readable(queue: &dyn RequestQueue) -> bool {
    wait_any(&queue.wait_descriptors(), Some(Duration::from_millis(20))).expect("a wait").is_some()
}

#[test]
fn a_queue_that_is_waited_on_without_another_look_is_woken() {
    let Woken { address, mut listener, service, device, .. } = Woken::new(6);
    connect(&device, &service, (&address, &mut listener));
    let (mut queue, other) = (device.open_queue().expect("a queue"), device.open_queue().expect("a queue"));
    let (begun, mut done) = (Instant::now(), Vec::new());
    for round in 0..40 {
        write(&mut *queue, 0, round, 4096);
        while done.is_empty() {
            wait_any(&queue.wait_descriptors(), Some(LIMIT)).expect("a wait");
            queue.poll(&mut done);
        }
        done.pop().expect("one").result.expect("it is written");
    }
    // Unless it is woken, each takes a tenth of a second.
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    queue.poll(&mut done);
    std::thread::sleep(2 * Duration::from_millis(100));
    queue.poll(&mut done);
    assert!(!is_readable(&*queue) && !is_readable(&*other), "nothing is to be done");
}

#[test]
fn a_service_without_requests_sleeps() {
    let Woken { address, mut listener, service, device, .. } = Woken::new(7);
    connect(&device, &service, (&address, &mut listener));
    let mut queue = device.open_queue().expect("a queue");
    read(&mut *queue, 0, 4096);
    let ticks = || {
        let tasks = std::fs::read_dir("/proc/self/task").expect("it is there");
        let stats = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("stat")).ok());
        let stat = stats.into_iter().find(|stat| stat.contains("(service-7)")).expect("it runs");
        let fields = stat.rsplit(')').next().expect("there is one").split_whitespace();
        // Behind the name: utime and stime.
        fields.skip(11).take(2).map(|field| field.parse::<u64>().expect("a number")).sum::<u64>()
    };
    for _is_connected in [true, false] {
        std::thread::sleep(REST);
        let before = ticks();
        std::thread::sleep(Duration::from_millis(500));
        // A tick is 10 ms.
        let used = ticks() - before;
        assert!(used < 10, "{used} ticks of processor time in half a second");
        device.close();
    }
}

#[test]
fn a_queue_that_sleeps_goes_on_when_the_service_ends_and_is_woken_by_the_next_one() {
    let Woken { rig, address, mut listener, mut service, device } = Woken::new(2);
    let mut queue = device.open_queue().expect("a queue");
    for round in 0..10 {
        connect(&device, &service, (&address, &mut listener));
        device.connect_wake(&address, BLKDEV).expect("it does nothing");
        assert_eq!(listener.accept().len(), 0, "there is one connection");
        std::thread::sleep(REST);
        service.stop(false, LIMIT).expect("it ends");
        assert!(!device.is_woken(), "the queue has not looked yet");
        write(&mut *queue, 0, round, 4096);
        service = rig.serve();
        wait_for(&mut *queue, 1).pop().expect("one").result.expect("it is written");
        assert!(!device.is_woken());
        assert_eq!(read(&mut *queue, 0, 4096)[..], [round; 4096]);
    }
    // Without a listener, too.
    drop(listener);
    device.connect_wake(&address, BLKDEV).expect("it is no error");
    assert!(!device.is_woken());
    assert_eq!(read(&mut *queue, 0, 4096)[..], [9; 4096]);
}

#[test]
fn several_queues_and_services_that_come_and_go_lose_no_wake_up() {
    let Woken { rig, address, mut listener, mut service, device } = Woken::new(3);
    let (is_over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let begun = Instant::now();
    let _service = std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (device, is_over, rounds) = (&device, &is_over, &rounds);
            scope.spawn(move || {
                let mut queue = device.open_queue().expect("a queue");
                let mut round = 0_u64;
                while !is_over.load(Ordering::Relaxed) {
                    round += 1;
                    let (at, byte, count) = (thread << 20, (round + thread) as u8, 1 + round % 7);
                    let missing =
                        (0..count).map(|index| 1 - write(&mut *queue, at + index * 4096, byte, 4096).len());
                    let missing = missing.sum();
                    for completion in wait_for(&mut *queue, missing) {
                        completion.result.expect("it is written");
                    }
                    assert_eq!(read(&mut *queue, at + (count - 1) * 4096, 4096)[..], [byte; 4096]);
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for _ in 0..10 {
            connect(&device, &service, (&address, &mut listener));
            let seen = rounds.load(Ordering::Relaxed);
            wait_until(|| rounds.load(Ordering::Relaxed) > seen + 200);
            service.stop(false, LIMIT).expect("it ends");
            service = rig.serve();
        }
        is_over.store(true, Ordering::Relaxed);
        service
    });
    assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
    assert_eq!(device.in_flight(), 0);
}

#[test]
fn a_connection_of_another_session_changes_nothing() {
    let Woken { address, mut listener, service, device, .. } = Woken::new(4);
    let mut queue = device.open_queue().expect("a queue");
    let (page, _events, _socket) = introduce(&address, &format!("wake {} 77", BLKDEV.0));
    service.attach(listener.accept().pop().expect("one has come"));
    let begun = Instant::now();
    for _ in 0..20 {
        std::thread::sleep(REST);
        read(&mut *queue, 0, 4096);
    }
    assert!(begun.elapsed() < Duration::from_secs(4), "the service looks: {:?}", begun.elapsed());
    // The third number says whether the service wakes the client.
    assert_eq!(page.word(2).load(Ordering::Relaxed), 0);
    // Nor does it take the place of the right one.
    device.connect_wake(&address, BLKDEV).expect("a connection");
    service.attach(listener.accept().pop().expect("one has come"));
    wait_until(|| device.is_woken());
    let (page, _events, _socket) = introduce(&address, &format!("wake {} 77", BLKDEV.0));
    service.attach(listener.accept().pop().expect("one has come"));
    for _ in 0..20 {
        std::thread::sleep(REST);
        read(&mut *queue, 0, 4096);
    }
    assert!(device.is_woken() && page.word(2).load(Ordering::Relaxed) == 0);
}

/// A connection with this text, and what it has passed.
fn introduce(address: &WakeAddress, text: &str) -> (SharedWords, [Signal; 2], OwnedFd) {
    let socket = connected(address);
    let page = SharedWords::new().expect("a page");
    let events = [0; 2].map(|_| Signal::new().expect("an eventfd"));
    let descriptors = [page.descriptor(), events[0].as_fd(), events[1].as_fd()];
    passing::send(&socket, None, text, &descriptors).expect("it is sent");
    (page, events, socket)
}

fn connected(address: &WakeAddress) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket");
    let name = format!("cbd-wake-{}-{}", cbd_types::uuid_text(address.region), address.host.0);
    let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a name");
    rustix::net::connect(&socket, &name).expect("it listens");
    socket
}

/// How often a thread that waits for a queue without requests looks in a while.
fn looks(queue: &mut dyn RequestQueue) -> u32 {
    let (mut count, end) = (0, Instant::now() + Duration::from_millis(200));
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        if wait_any(&queue.wait_descriptors(), Some(left)).expect("a wait").is_some() {
            count += 1;
            queue.poll(&mut Vec::new());
        }
    }
    count
}

#[test]
fn queues_do_not_look_all_the_time_when_a_connection_has_ended_or_other_queues_are_woken() {
    let Woken { rig, address, mut listener, mut service, device } = Woken::new(9);
    let held = BlkdevId(BLKDEV.0 + 1);
    let (mut queue, mut other) =
        (device.open_queue().expect("a queue"), device.open_queue().expect("a queue"));
    for _ in 0..3 {
        connect(&device, &service, (&address, &mut listener));
        read(&mut *queue, 0, 4096);
        read(&mut *other, 0, 4096);
        // A request that is not executed yet.
        rig.changes.wait_for(held);
        write(&mut *queue, 0, 1, 4096);
        assert!(looks(&mut *queue) < 10 && looks(&mut *other) < 10);
        rig.changes.settle(held);
        wait_for(&mut *queue, 1).pop().expect("one").result.expect("it is written");
        // One without a service: its queue looks from time to time.
        service.stop(false, LIMIT).expect("it ends");
        write(&mut *queue, 0, 2, 4096);
        assert!(looks(&mut *queue) < 1000 && looks(&mut *other) < 10);
        service = rig.serve();
        wait_for(&mut *queue, 1).pop().expect("one").result.expect("it is written");
        assert!(looks(&mut *queue) < 10 && looks(&mut *other) < 10);
    }
    // Refused.
    device.connect_wake(&address, BLKDEV).expect("a connection");
    listener.accept();
    assert!(looks(&mut *queue) < 10 && looks(&mut *other) < 10);
    connect(&device, &service, (&address, &mut listener));
    // They wait for the eventfd of this connection, and then for nothing any more.
    read(&mut *queue, 0, 4096);
    read(&mut *other, 0, 4096);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (device, over, changes) = (&device, &is_over, &rig.changes);
        // Its requests wait, so that it sleeps and is woken for each.
        let requests = scope.spawn(move || {
            let mut queue = device.open_queue().expect("a queue");
            while !over.load(Ordering::Relaxed) {
                changes.wait_for(held);
                write(&mut *queue, 0, 1, 4096);
                wait_for(&mut *queue, 1).pop().expect("one").result.expect("it is written");
            }
        });
        scope.spawn(move || {
            while !requests.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
                changes.settle(held);
            }
        });
        let counts = [looks(&mut *queue), looks(&mut *other)];
        is_over.store(true, Ordering::Relaxed);
        assert!(counts.iter().all(|count| *count < 20), "they have no requests: {counts:?}");
    });
}

#[test]
fn the_first_request_of_a_session_or_service_that_follows_another_one_does_not_wait() {
    let Woken { rig, address, mut listener, mut service, device } = Woken::new(10);
    let mut queue = device.open_queue().expect("a queue");
    let mut waited = Duration::ZERO;
    for round in 0..10 {
        if round % 2 == 0 {
            device.end();
            assert!(device.reopen(Arc::clone(&rig.region), rig.place()).expect("there is memory"));
        } else {
            service.stop(false, LIMIT).expect("it ends");
            let area = if round % 4 == 1 { 2 * AREA } else { AREA };
            rig.server.store(area, Ordering::Relaxed);
            service = rig.serve();
            device.follow(area);
        }
        connect(&device, &service, (&address, &mut listener));
        let begun = Instant::now();
        read(&mut *queue, 0, 4096);
        waited += begun.elapsed();
    }
    // Without a wake-up one waits for a tenth of a second at least.
    assert!(waited < Duration::from_millis(400), "{waited:?}");
}

/// Connects and introduces itself as a process of this user.
fn introduce_as(user: u32, address: &WakeAddress) {
    let script = format!(
        "import socket, os, fcntl\n\
         page = os.memfd_create('page', os.MFD_ALLOW_SEALING)\n\
         os.ftruncate(page, 4096)\n\
         fcntl.fcntl(page, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)\n\
         s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n\
         s.connect('\\0cbd-wake-{}-{}')\n\
         socket.send_fds(s, [b'wake 0 1'], [page, os.eventfd(0), os.eventfd(0)])\n",
        cbd_types::uuid_text(address.region),
        address.host.0
    );
    let mut python = std::process::Command::new("python3");
    let status = python.args(["-c", &script]).uid(user).current_dir("/").status().expect("python3");
    // It is disconnected while it sends, or later.
    assert!(status.success() || user != 0, "{status}");
}

#[test]
fn only_processes_of_the_own_user_are_heard() {
    let address = address(8);
    let mut listener = WakeListener::bind(&address).expect("a socket");
    let own = rustix::process::geteuid().as_raw();
    introduce_as(own, &address);
    assert_eq!(listener.accept().len(), 1);
    if own == 0 {
        introduce_as(65534, &address);
        assert_eq!(listener.accept().len(), 0);
    }
}

#[test]
fn a_process_of_another_user_that_has_taken_the_address_gets_nothing() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let Woken { address, listener, device, .. } = Woken::new(11);
    drop(listener);
    let script = format!(
        "import socket\n\
         s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n\
         s.bind('\\0cbd-wake-{}-{}')\n\
         s.listen()\n\
         print('listens', flush=True)\n\
         print(len(s.accept()[0].recv(100)), flush=True)\n",
        cbd_types::uuid_text(address.region),
        address.host.0
    );
    let mut python = std::process::Command::new("python3");
    python.args(["-c", &script]).uid(65534).current_dir("/").stdout(std::process::Stdio::piped());
    let mut python = python.spawn().expect("python3");
    let mut said = BufReader::new(python.stdout.take().expect("a pipe")).lines();
    assert_eq!(said.next().expect("a line").expect("text"), "listens");
    device.connect_wake(&address, BLKDEV).expect("it is no error");
    assert_eq!(said.next().expect("a line").expect("text"), "0");
    assert!(python.wait().expect("it ends").success());
}

#[test]
fn connections_that_say_nothing_or_nonsense_keep_no_one_away() {
    let address = address(5);
    let mut listener = WakeListener::bind(&address).expect("a socket");
    assert_eq!(
        WakeListener::bind(&address).map(drop).map_err(|error| error.kind()),
        Err(std::io::ErrorKind::AddrInUse)
    );
    let silent: Vec<OwnedFd> = (0..60).map(|_| connected(&address)).collect();
    assert_eq!(listener.accept().len(), 0);
    assert!(!is_closed_by_peer(silent[0].as_raw_fd()));
    let more: Vec<OwnedFd> = (0..60).map(|_| connected(&address)).collect();
    assert_eq!(listener.accept().len(), 0);
    assert!(is_closed_by_peer(silent[0].as_raw_fd()) && !is_closed_by_peer(more[59].as_raw_fd()));
    for text in ["wake 0", "wake 0 1 2", "wake x 1", "sleep 0 1", "wake -1 1", ""] {
        let _ends = (!text.is_empty()).then(|| introduce(&address, text));
        assert_eq!(listener.accept().len(), 0, "{text:?}");
    }
    // Descriptors that are too few, and a page that is none.
    let (page, event) = (SharedWords::new().expect("a page"), Signal::new().expect("an eventfd"));
    let zero = std::fs::File::open("/dev/zero").expect("it is there");
    for descriptors in
        [vec![page.descriptor(), event.as_fd()], vec![zero.as_fd(), event.as_fd(), event.as_fd()]]
    {
        passing::send(connected(&address), None, "wake 0 1", &descriptors).expect("it is sent");
        assert_eq!(listener.accept().len(), 0);
    }
    let _kept = introduce(&address, "wake 6 1");
    assert_eq!(listener.accept().pop().map(|wake| wake.blkdev().0), Some(6));
    drop((silent, more));
    assert_eq!(listener.accept().len(), 0);
}
