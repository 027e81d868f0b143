//! Stopping a daemon and its backends while a disk hangs: in bounded time, and without a delay for other backends.

use crate::fixture::{Fixture, MIB, Running, cache_of, dirty, refused, stop};
use crate::silent::SilentFile;
use cbd_daemon::api::{Drain, RegisterTransport, SettingsChange, StartBackend, StopBackend, StopBlkdev};
use cbd_daemon::control::{Control, Flow};
use cbd_daemon::manager::Manager;
use cbd_nbd::Listen;
use cbd_testkit::Client;
use cbd_types::{BootId, ErrorKind};
use std::sync::Arc;
use std::sync::mpsc::{TryRecvError, channel};
use std::time::{Duration, Instant};

/// Writes to these bytes of a disk do not return.
const HANGS: &str = "fault:op=write,range=4194304-8388608,how=stall";

/// Timeout, far above the expected duration of each wait.
const LIMIT: Duration = Duration::from_secs(120);

/// Starts the backends 0 and 1 over the disks "hung" and "disk"; a block of each is dirty or written, and writeback of
/// the first hangs.
fn beside_a_disk_that_hangs(fixture: &Fixture, daemon: &Manager) -> String {
    let (hung, disk) = (fixture.disk("hung", 8 * MIB), fixture.disk("disk", 8 * MIB));
    let small = |path| StartBackend { cache_size: Some(12 * MIB), ..fixture.backend(path) };
    let export = Some(format!("nbd:unix:{}", fixture.text("hung.sock")));
    daemon.start_backend(0, &StartBackend { export, ..small(&hung) }).unwrap();
    daemon.start_backend(0, &small(&disk)).unwrap();
    let mut client = Client::connect(&Listen::Unix(fixture.path("hung.sock"))).unwrap();
    client.write(5 * MIB, &[7; 4096], true).unwrap();
    fixture.write_block();
    // After a second without progress the disk has received the write.
    refused(
        stop(daemon, StopBackend { force: true, timeout_s: Some(1), ..StopBackend::default() }),
        ErrorKind::TimedOut,
        "the backing device does not answer: a write has had no answer",
    );
    hung
}

#[test]
fn a_disk_that_hangs_does_not_prevent_the_sync_of_other_caches_at_the_end() {
    let mut fixture = Fixture::new();
    fixture.boot = Some(BootId([1; 16]));
    fixture.decorate = Some(HANGS.into());
    let daemon = fixture.daemon_with_region();
    let hung = beside_a_disk_that_hangs(&fixture, &daemon);
    let (tell, told) = channel();
    std::thread::spawn(move || tell.send(daemon.end().sync()).unwrap());
    let late = told.recv_timeout(LIMIT).expect("it ends in bounded time");
    assert!(late.len() == 2 && late[0].contains("backend 0") && late[0].contains(&hung), "{late:?}");
    assert!(
        late[1].contains("1 caches in the region") && late[1].contains("the others were synced"),
        "{late:?}"
    );
    // The thread that hangs holds the region and its disk until this process ends: the next boot uses copies.
    for name in ["region", "hung"] {
        std::fs::copy(fixture.path(name), fixture.path("copy")).unwrap();
        std::fs::rename(fixture.path("copy"), fixture.path(name)).unwrap();
    }
    fixture.boot = Some(BootId([2; 16]));
    fixture.decorate = None;
    let daemon = fixture.daemon();
    let backends = daemon.backends(0, false).unwrap();
    assert_eq!((backends[0].alive, backends[1].alive), (false, true), "{backends:?}");
    fixture.block_is_there();
}

#[test]
fn a_drain_that_writeback_rate_delays_names_the_setting_and_not_the_disk() {
    let fixture = Fixture::new();
    let (_disk, daemon) = fixture.disk_and_daemon();
    let slow = SettingsChange { writeback_rate: Some(32 << 10), ..SettingsChange::default() };
    daemon.set(0, 0, &slow).unwrap();
    // The first request is sent before the limit has effect, the second waits for it.
    for start in [0, 2 * MIB, 4 * MIB] {
        fixture.client().write(start, &vec![7; MIB as usize], true).unwrap();
    }
    let drain = Drain { wait: true, timeout_s: Some(3), ..Drain::default() };
    let stop = || stop(&daemon, StopBackend { force: true, timeout_s: Some(3), ..StopBackend::default() });
    for result in [daemon.drain(0, &drain, &mut |_| Flow::Continue), stop()] {
        let error = refused(result, ErrorKind::TimedOut, "set -b 0 writeback_rate=auto");
        let line = error.line();
        assert!(!line.contains("disk right") && !line.contains("discard-dirty"), "{line}");
    }
    daemon.set(0, 0, &SettingsChange { writeback_rate: Some(0), ..slow }).unwrap();
    daemon.drain(0, &Drain { wait: true, ..Drain::default() }, &mut |_| Flow::Continue).unwrap();
}

#[test]
fn a_stop_that_waits_for_a_disk_that_hangs_keeps_no_other_command_waiting_and_drops_nothing() {
    let mut fixture = Fixture::new();
    fixture.decorate = Some(HANGS.into());
    let daemon = Arc::new(fixture.daemon_with_region());
    let hung = beside_a_disk_that_hangs(&fixture, &daemon);
    let give_up =
        StopBackend { discard_dirty: Some(dirty(&daemon)), timeout_s: Some(30), ..StopBackend::default() };
    let (tell, told) = channel();
    let stopping = Arc::clone(&daemon);
    std::thread::spawn(move || tell.send(stop(&stopping, give_up)).unwrap());
    let is_hung = || {
        let backend = daemon.status().unwrap().transports[0].backends[0].clone();
        backend.info.state == "stopping" && backend.cache.is_none()
    };
    let end = Instant::now() + LIMIT;
    while !is_hung() {
        assert!(Instant::now() < end, "{:?}", daemon.status());
        std::thread::sleep(Duration::from_millis(20));
    }
    // Commands for the other backend complete meanwhile.
    fixture.block_is_there();
    daemon.set(0, 1, &SettingsChange { gc_percent: Some(42), ..SettingsChange::default() }).unwrap();
    daemon.stop_backend(0, 1, &StopBackend::default(), &mut |_| Flow::Continue).unwrap();
    assert_eq!(told.try_recv().err(), Some(TryRecvError::Empty), "the stop has not ended");
    let error = refused(
        told.recv_timeout(LIMIT).expect("it ends"),
        ErrorKind::TimedOut,
        "does not complete requests",
    );
    assert!(error.line().contains(&hung) && error.line().contains("nothing was dropped"), "{error}");
    let backend = daemon.backends(0, false).unwrap().remove(0);
    assert!(!backend.alive && backend.error.is_some(), "{backend:?}");
}

#[test]
fn a_backend_without_a_cache_is_removed_only_when_its_disk_has_completed_the_requests_of_its_clients() {
    let mut fixture = Fixture::new();
    fixture.decorate = Some(HANGS.into());
    let daemon = fixture.daemon_with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    daemon.start_backend(0, &StartBackend { cache_size: None, ..fixture.backend(&disk) }).unwrap();
    let mut client = fixture.client();
    let (tell, told) = channel();
    std::thread::spawn(move || {
        tell.send(()).unwrap();
        client.write(5 * MIB, &[7; 4096], false)
    });
    told.recv_timeout(LIMIT).unwrap();
    let requests = || daemon.status().unwrap().transports[0].backends[0].info.clone();
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        // The write has reached the disk long before.
        assert!(requests().alive);
        std::thread::sleep(Duration::from_millis(50));
    }
    let request = StopBackend { force: true, timeout_s: Some(1), ..StopBackend::default() };
    refused(stop(&daemon, request), ErrorKind::TimedOut, "does not complete requests");
    refused(stop(&daemon, request), ErrorKind::Busy, "still being ended");
    assert_eq!(daemon.backends(0, false).unwrap().len(), 1);
    assert_eq!(daemon.blkdevs(0, false).unwrap().len(), 1, "the row of its block device is there");
}

#[test]
fn a_region_whose_opening_hangs_delays_no_other_command() {
    if std::env::var_os("CBD_SYSTEM_TESTS").is_none() {
        return println!("not run: it mounts a file system; CBD_SYSTEM_TESTS=1 runs it, as root");
    }
    let fixture = Fixture::new();
    let (_disk, daemon) = fixture.disk_and_daemon();
    let daemon = Arc::new(daemon);
    let folder = fixture.path("far");
    std::fs::create_dir(&folder).unwrap();
    let silent = SilentFile::over(&folder);
    let far = RegisterTransport {
        path: fixture.text("far/region"),
        format: false,
        size: None,
        ..fixture.region(0)
    };
    let (tell, told) = channel();
    let registering = Arc::clone(&daemon);
    std::thread::spawn(move || tell.send(registering.register_transport(&far)).unwrap());
    let end = Instant::now() + LIMIT;
    while daemon.transports().unwrap().len() < 2 {
        assert!(Instant::now() < end, "it is not being registered");
        std::thread::sleep(Duration::from_millis(20));
    }
    let error = daemon.transports().unwrap()[1].error.clone();
    assert_eq!(error.as_deref(), Some("it is being registered"));
    stop(&daemon, StopBackend::default()).unwrap();
    assert_eq!(told.try_recv().err(), Some(TryRecvError::Empty), "it is still being opened");
    drop(silent);
    assert!(told.recv_timeout(LIMIT).expect("it ends").is_err());
    assert_eq!(daemon.transports().unwrap().len(), 1);
}

#[test]
fn a_daemon_starts_with_a_disk_whose_opening_hangs_and_serves_it_when_it_can() {
    if std::env::var_os("CBD_SYSTEM_TESTS").is_none() {
        return println!("not run: it mounts a file system; CBD_SYSTEM_TESTS=1 runs it, as root");
    }
    let fixture = Fixture::new();
    let folder = fixture.path("far");
    std::fs::create_dir(&folder).unwrap();
    let (far, disk) = (fixture.disk("far/disk", 8 * MIB), fixture.disk("disk", 8 * MIB));
    {
        let daemon = fixture.daemon_with_region();
        let small = |path| StartBackend { cache_size: Some(12 * MIB), ..fixture.backend(path) };
        let export = Some(format!("nbd:unix:{}", fixture.text("far.sock")));
        daemon.start_backend(0, &StartBackend { export, ..small(&far) }).unwrap();
        daemon.start_backend(0, &small(&disk)).unwrap();
    }
    let silent = SilentFile::over(&folder);
    let (tell, told) = channel();
    let starting = std::thread::spawn(move || {
        let daemon = fixture.daemon();
        tell.send(daemon.backends(0, false).unwrap()).unwrap();
        (fixture, daemon)
    });
    let backends = told.recv_timeout(LIMIT);
    drop(silent);
    let backends = backends.expect("the daemon starts");
    assert_eq!((backends[0].alive, backends[1].alive), (false, true), "{backends:?}");
    assert!(
        backends[0].error.as_ref().is_some_and(|error| error.contains("does not answer")),
        "{backends:?}"
    );
    let (_place, daemon) = starting.join().unwrap();
    let end = Instant::now() + LIMIT;
    while !daemon.backends(0, false).unwrap()[0].alive {
        assert!(Instant::now() < end, "{:?}", daemon.backends(0, false));
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A client of backend 0 that waits for a read of its disk, which never completes it.
fn client_that_waits() -> (Fixture, Running) {
    let mut fixture = Fixture::new();
    fixture.decorate = Some("fault:op=read,how=stall".into());
    let (_, daemon) = fixture.disk_and_daemon();
    let mut client = fixture.client();
    let (tell, told) = channel();
    std::thread::spawn(move || {
        tell.send(()).unwrap();
        let mut data = [0; 4096];
        client.read(MIB, &mut data).expect_err("the disk never answers")
    });
    told.recv_timeout(LIMIT).expect("a client");
    let end = Instant::now() + LIMIT;
    while cache_of(&daemon).read_miss_bytes == 0 {
        assert!(Instant::now() < end, "the disk is not read");
        std::thread::sleep(Duration::from_millis(5));
    }
    (fixture, daemon)
}

#[test]
fn a_forced_stop_that_fails_names_the_export_whose_requests_still_wait() {
    let (fixture, daemon) = client_that_waits();
    let request =
        StopBackend { force: true, discard_dirty: Some(0), timeout_s: Some(1), ..StopBackend::default() };
    let error = refused(stop(&daemon, request), ErrorKind::TimedOut, "did not close completely");
    assert!(error.line().contains(&fixture.text("nbd.sock")), "{error}");
}

#[test]
fn a_forced_stop_of_a_block_device_names_the_export_whose_requests_still_wait() {
    let (fixture, daemon) = client_that_waits();
    let stopped = daemon.stop_blkdev(0, 0, StopBlkdev { force: true }).unwrap();
    assert_eq!(daemon.blkdevs(0, false).unwrap().len(), 0);
    let [warning] = &stopped.warnings[..] else { panic!("{stopped:?}") };
    assert!(
        warning.contains("did not close completely") && warning.contains(&fixture.text("nbd.sock")),
        "{warning}"
    );
}
