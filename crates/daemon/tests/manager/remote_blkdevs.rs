//! Block devices on backends of other hosts.

use crate::fixture::{MIB, refused};
use crate::hosts::{Host, Shared, wait_until};
use cbd_daemon::api::{
    BlkdevChange, BlkdevClass, BlkdevInfo, ClearHost, NumberOrName, RemoteBlkdevStatus, SettingsChange,
    StartBackend, StartBlkdev, StopBackend, StopBlkdev,
};
use cbd_daemon::control::{Control, Flow};
use cbd_types::{ErrorKind, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Starts a backend of 8 MiB without a block device; returns the path of its disk.
fn backend(host: &Host) -> String {
    let disk = host.fixture.disk("disk", 8 * MIB);
    let request = StartBackend { start_dev: false, export: None, ..host.fixture.backend(&disk) };
    assert_eq!(host.daemon.start_backend(0, &request).unwrap().backend_id, 0);
    disk
}

/// Starts a block device on backend 0.
fn start(host: &Host) -> Result<BlkdevInfo> {
    let export = Some(host.fixture.export());
    host.daemon.start_blkdev(0, &StartBlkdev { backend: 0, export, ..StartBlkdev::default() })
}

fn stop(host: &Host, id: u32) -> Result<()> {
    host.daemon.stop_blkdev(0, id, StopBlkdev::default()).map(drop)
}

/// Two hosts: the first one has backend 0, the second one block device 0 on it.
fn two_hosts() -> (Shared, Host, Host) {
    let shared = Shared::new();
    let (a, b) = (Host::join(&shared, "a", true), Host::join(&shared, "b", false));
    backend(&a);
    assert_eq!(start(&b).unwrap().blkdev_id, 0);
    (shared, a, b)
}

#[test]
fn a_host_uses_a_backend_of_another_host_which_then_is_not_used_there() {
    let (_shared, a, b) = two_hosts();
    b.fixture.write_block();
    b.fixture.block_is_there();
    let shown = b.daemon.blkdevs(0, false).unwrap();
    assert_eq!(shown.len(), 1);
    assert_eq!((shown[0].backend_id, shown[0].alive, shown[0].error.as_deref()), (0, true, None));
    assert_eq!(shown[0].note.as_deref(), Some("on backend 0 of host a"));
    let seen = a.daemon.blkdevs(0, true).unwrap();
    assert_eq!((seen[0].note.as_deref(), seen[0].alive), (Some("of host b"), true));
    assert!(a.daemon.blkdevs(0, false).unwrap().is_empty());

    // The backend has this one block device.
    refused(start(&a), ErrorKind::Busy, "block device 0 of host b stands on backend 0");
    refused(start(&b), ErrorKind::Busy, "stands on backend 0 already");
    let stop_backend = StopBackend::default();
    let stopped = a.daemon.stop_backend(0, 0, &stop_backend, &mut |_| Flow::Continue);
    refused(stopped, ErrorKind::Busy, "block device 0 of host b stands on backend 0");
    refused(b.daemon.unregister_transport(0), ErrorKind::Busy, "stands on backend 0 of another host");
    b.fixture.block_is_there();

    stop(&b, 0).unwrap();
    assert!(b.daemon.blkdevs(0, true).unwrap().is_empty());
    wait_until("the first host has noticed it", || start(&a).is_ok());
    a.fixture.block_is_there();
    refused(start(&b), ErrorKind::Busy, "stands on backend 0 already");
    b.daemon.unregister_transport(0).unwrap();
}

#[test]
fn requests_wait_for_the_host_that_has_the_backend_and_none_fails() {
    let (_shared, mut a, b) = two_hosts();
    let (is_over, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let _a = std::thread::scope(|scope| {
        let (b, is_over, written) = (&b, &is_over, &written);
        scope.spawn(move || {
            let mut client = b.fixture.client();
            for round in 1_u64.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                let at = round % 256 * 16384;
                let data = [round as u8; 16384];
                client.write(at, &data, round % 16 == 0).expect("no request fails");
                let mut found = [0; 16384];
                client.read(at, &mut found).expect("no request fails");
                assert_eq!(found, data);
                written.store(round, Ordering::Relaxed);
            }
        });
        for _ in 0..4 {
            let before = written.load(Ordering::Relaxed);
            wait_until("requests complete", || written.load(Ordering::Relaxed) > before + 20);
            let Host { daemon, fixture } = a;
            drop(daemon);
            a = Host { daemon: fixture.daemon(), fixture };
        }
        let before = written.load(Ordering::Relaxed);
        wait_until("requests complete", || written.load(Ordering::Relaxed) > before + 20);
        is_over.store(true, Ordering::Relaxed);
        a
    });
    let last = written.load(Ordering::Relaxed);
    let mut client = b.fixture.client();
    for round in last.saturating_sub(255)..=last {
        let mut found = [0; 16384];
        client.read(round % 256 * 16384, &mut found).unwrap();
        assert_eq!(found, [round as u8; 16384], "round {round} of {last}");
    }
}

#[test]
fn a_host_that_comes_back_has_its_block_device_again() {
    let (_shared, a, b) = two_hosts();
    b.fixture.write_block();
    let Host { daemon, fixture } = b;
    drop(daemon);
    // The backend is not free while its user is away.
    let stopped = a.daemon.stop_backend(0, 0, &StopBackend::default(), &mut |_| Flow::Continue);
    refused(stopped, ErrorKind::Busy, "block device 0 of host b stands on backend 0");
    let b = Host { daemon: fixture.daemon(), fixture };
    wait_until("it is served again", || b.daemon.blkdevs(0, false).unwrap()[0].alive);
    b.fixture.block_is_there();
    // It is opened when the host that has the backend is there again, too.
    let (Host { daemon: of_b, fixture: files_b }, Host { daemon: of_a, fixture: files_a }) = (b, a);
    drop((of_b, of_a));
    let b = Host { daemon: files_b.daemon(), fixture: files_b };
    wait_until("its wait is shown", || {
        let shown = &b.daemon.blkdevs(0, false).unwrap()[0];
        !shown.alive && shown.error.as_ref().is_some_and(|error| error.contains("host a"))
    });
    let a = Host { daemon: files_a.daemon(), fixture: files_a };
    wait_until("it is served again", || b.daemon.blkdevs(0, false).unwrap()[0].alive);
    b.fixture.block_is_there();
    drop((a, b));
}

#[test]
fn what_cannot_be_used_is_refused_and_leaves_nothing() {
    let shared = Shared::new();
    let (a, b) = (Host::join(&shared, "a", true), Host::join(&shared, "b", false));
    refused(start(&b), ErrorKind::NotFound, "backend 0");
    backend(&a);
    // Its host is away.
    let Host { daemon, fixture } = a;
    drop(daemon);
    refused(start(&b), ErrorKind::TimedOut, "host a did not open backend 0");
    assert!(b.daemon.blkdevs(0, true).unwrap().is_empty());
    // An address that other machines reach needs the same word as ever.
    let a = Host { daemon: fixture.daemon(), fixture };
    let remote = Some("nbd:tcp:0.0.0.0:0".to_owned());
    let request = StartBlkdev { backend: 0, export: remote, ..StartBlkdev::default() };
    refused(b.daemon.start_blkdev(0, &request), ErrorKind::InvalidArgument, "allow-remote");
    // A stop by force is an error for the other host, and takes nothing else from it.
    start(&b).unwrap();
    b.fixture.write_block();
    let force = StopBackend { force: true, ..StopBackend::default() };
    a.daemon.stop_backend(0, 0, &force, &mut |_| Flow::Continue).unwrap();
    b.fixture.client().write(0, &[1; 4096], true).expect_err("its backend is gone");
    stop(&b, 0).unwrap();
    let disk = std::fs::read(a.fixture.path("disk")).unwrap();
    assert_eq!(disk[..4096], [9; 4096], "what was written before is on the disk");
}

/// Starts a block device on backend 0 beside those of other hosts.
fn start_shared(host: &Host) -> Result<BlkdevInfo> {
    let export = Some(host.fixture.export());
    host.daemon.start_blkdev(0, &StartBlkdev { backend: 0, export, shared: true, ..StartBlkdev::default() })
}

/// Two hosts, each with a block device on backend 0 of the first one.
fn two_that_share() -> (Shared, Host, Host) {
    let shared = Shared::new();
    let (a, b) = (Host::join(&shared, "a", true), Host::join(&shared, "b", false));
    backend(&a);
    start_shared(&a).unwrap();
    assert!(start_shared(&b).unwrap().shared);
    (shared, a, b)
}

/// Starts it once the host has noticed that the block device of another one is gone.
fn wait_for_start(host: &Host) -> u32 {
    let mut started = None;
    wait_until("the block device of the other host is gone", || {
        started = start_shared(host).ok();
        started.is_some()
    });
    started.unwrap().blkdev_id
}

#[test]
fn a_backend_is_shared_only_if_all_hosts_ask_for_it() {
    let (_shared, a, b) = two_hosts();
    refused(
        start_shared(&a),
        ErrorKind::Busy,
        "blkdev 0 of host 1 stands on backend 0 already; it does not share it: stop it there",
    );
    stop(&b, 0).unwrap();
    let id = wait_for_start(&a);
    refused(start(&a), ErrorKind::Busy, "beside it others are started with --shared");
    refused(start(&b), ErrorKind::Busy, "it shares it with those that are started with --shared");
    assert!(start_shared(&b).unwrap().shared);
    refused(start(&b), ErrorKind::Busy, "it shares it with those that are started with --shared");
    assert!(b.daemon.blkdevs(0, true).unwrap().iter().all(|blkdev| blkdev.shared));
    // Each ends by itself.
    stop(&a, id).unwrap();
    b.fixture.write_block();
    refused(start(&a), ErrorKind::Busy, "block device 1 of host b stands on backend 0");
    start_shared(&a).unwrap();
    a.fixture.block_is_there();
    stop(&b, 1).unwrap();
    a.fixture.block_is_there();
}

#[test]
fn clients_of_the_owner_do_not_wait_for_a_block_device_that_was_removed_while_it_was_away() {
    let (_shared, a, b) = two_that_share();
    b.fixture.write_block();
    let Host { daemon, fixture } = a;
    drop(daemon);
    stop(&b, 1).unwrap();
    let a = Host { daemon: fixture.daemon(), fixture };
    a.fixture.block_is_there();
    start_shared(&b).unwrap();
    b.fixture.block_is_there();
}

#[test]
fn hosts_that_share_a_backend_see_what_each_other_writes_and_the_owner_comes_back() {
    let (_shared, a, b) = two_that_share();
    let (mut of_a, mut of_b) = (a.fixture.client(), b.fixture.client());
    for round in 1..=50_u8 {
        let (writer, reader) = if round % 2 == 0 { (&mut of_a, &mut of_b) } else { (&mut of_b, &mut of_a) };
        writer.write(u64::from(round % 4) * 4096, &[round; 4096], round % 3 == 0).unwrap();
        let mut found = [0; 4096];
        reader.read(u64::from(round % 4) * 4096, &mut found).unwrap();
        assert_eq!(found, [round; 4096]);
    }
    drop(of_a);
    // What was in flight when the owner comes back is executed before what its own clients send then.
    let Host { daemon, fixture } = a;
    drop(daemon);
    let waiting = std::thread::spawn(move || {
        of_b.write(0, &[77; 16384], true).unwrap();
        of_b
    });
    wait_until("it is in flight", || remote(&b).in_flight == 1);
    let a = Host { daemon: fixture.daemon(), fixture };
    let mut of_a = a.fixture.client();
    of_a.write(0, &[78; 4096], false).unwrap();
    let mut of_b = waiting.join().unwrap();
    for client in [&mut of_a, &mut of_b] {
        let mut found = [0; 16384];
        client.read(0, &mut found).unwrap();
        assert!(found[..4096] == [78; 4096] && found[4096..] == [77; 12288]);
    }
    drop((of_a, of_b));
}

/// Waits until the block device of `host` shows this error.
fn wait_for_error(host: &Host, text: &str) {
    wait_until("its error is shown", || {
        let shown = host.daemon.blkdevs(0, false).unwrap();
        shown[0].error.as_ref().is_some_and(|error| error.contains(text))
    });
}

#[test]
fn an_idle_device_whose_backend_is_removed_gives_errors_and_does_not_wait() {
    let (_shared, a, b) = two_hosts();
    let mut client = b.fixture.client();
    client.write(0, &[1; 4096], true).unwrap();
    let force = StopBackend { force: true, ..StopBackend::default() };
    a.daemon.stop_backend(0, 0, &force, &mut |_| Flow::Continue).unwrap();
    // Its area is another cache's now.
    let other = a.fixture.disk("other", 8 * MIB);
    let request = StartBackend { start_dev: false, export: None, ..a.fixture.backend(&other) };
    assert_eq!(a.daemon.start_backend(0, &request).unwrap().backend_id, 0);
    wait_for_error(&b, "backend 0 of host a, on which it was made, is gone");
    assert!(!b.daemon.blkdevs(0, false).unwrap()[0].alive && !remote(&b).info.alive);
    client.read(0, &mut [0; 4096]).expect_err("its backend is gone");
    drop(client);
    stop(&b, 0).unwrap();
    assert_eq!(start(&b).unwrap().blkdev_id, 0);
}

#[test]
fn an_idle_device_whose_host_was_cleared_gives_errors_and_does_not_wait() {
    let (_shared, a, b) = two_hosts();
    let mut client = b.fixture.client();
    let Host { daemon, fixture } = a;
    drop(daemon);
    b.daemon.clear_host(0, 0, &ClearHost { discard_dirty: None }).unwrap();
    wait_for_error(&b, "is gone");
    client.read(0, &mut [0; 4096]).expect_err("its backend is gone");
    drop(client);
    stop(&b, 0).unwrap();
    drop(fixture);
}

#[test]
fn a_device_is_served_again_after_a_stop_by_force_that_failed() {
    let (_shared, a, b) = two_hosts();
    b.fixture.write_block();
    let request = StopBackend { force: true, discard_dirty: Some(1), ..StopBackend::default() };
    let stopped = a.daemon.stop_backend(0, 0, &request, &mut |_| Flow::Continue);
    refused(stopped, ErrorKind::InvalidArgument, "nothing was dropped");
    wait_until("it is served again", || {
        let mut found = [0; 4096];
        b.fixture.client().read(0, &mut found).is_ok() && found == [9; 4096]
    });
    let shown = &b.daemon.blkdevs(0, false).unwrap()[0];
    assert_eq!((shown.error.as_deref(), shown.alive), (None, true));
}

#[test]
fn a_transport_is_not_unregistered_while_a_block_device_is_being_started() {
    let shared = Shared::new();
    let (a, b) = (Host::join(&shared, "a", true), Host::join(&shared, "b", false));
    backend(&a);
    let Host { daemon, fixture } = a;
    drop(daemon);
    std::thread::scope(|scope| {
        // It waits for the other host for 5 s.
        let started = scope.spawn(|| start(&b));
        std::thread::sleep(Duration::from_secs(2));
        refused(b.daemon.unregister_transport(0), ErrorKind::Busy, "a block device is being started on it");
        refused(started.join().unwrap(), ErrorKind::TimedOut, "host a did not open backend 0");
    });
    b.daemon.unregister_transport(0).unwrap();
    drop(fixture);
}

#[test]
fn a_host_that_was_restarted_does_not_use_its_backend_beside_another_host() {
    let (_shared, a, b) = two_hosts();
    let Host { daemon, fixture } = a;
    drop(daemon);
    let a = Host { daemon: fixture.daemon(), fixture };
    // Before the background thread has looked.
    refused(start(&a), ErrorKind::Busy, "block device 0 of host b stands on backend 0");
    b.fixture.write_block();
    b.fixture.block_is_there();
}

fn change(host: &Host, name: Option<&str>, class: Option<BlkdevClass>) -> Result<BlkdevInfo> {
    host.daemon.set_blkdev(0, 0, &BlkdevChange { name: name.map(str::to_owned), class })
}

fn metadata_bytes(host: &Host) -> u64 {
    host.daemon.status().unwrap().transports[0].backends[0].cache.as_ref().unwrap().metadata_bytes
}

#[test]
fn its_name_and_class_are_changed_while_it_is_used_and_survive_a_restart() {
    let (_shared, a, b) = two_hosts();
    let mut client = b.fixture.client();
    client.write(0, &[1; 4096], true).unwrap();
    assert_eq!(metadata_bytes(&a), 0);
    let changed = change(&b, Some("db"), Some(BlkdevClass::Metadata)).unwrap();
    assert_eq!((changed.name.as_deref(), changed.class), (Some("db"), BlkdevClass::Metadata));
    assert_eq!(changed.note, None, "no warning");
    assert_eq!(b.daemon.blkdev_number(0, &"db".parse::<NumberOrName>().unwrap()).unwrap(), 0);
    // The host of the backend takes the class without a new session: the same connection goes on.
    let mut at = 0;
    wait_until("requests have the class", || {
        at += 4096;
        client.write(at, &[2; 4096], true).unwrap();
        metadata_bytes(&a) > 0
    });
    change(&b, None, Some(BlkdevClass::None)).unwrap();
    change(&b, None, Some(BlkdevClass::Metadata)).unwrap();
    let rename = SettingsChange { name: Some("db".into()), ..SettingsChange::default() };
    refused(a.daemon.set(0, 0, &rename), ErrorKind::AlreadyExists, "has the name db already");
    refused(
        b.daemon.set_blkdev(0, 1, &BlkdevChange::default()),
        ErrorKind::NotFound,
        "there is no block device 1",
    );

    // While the other host is away its row is changed, and that host takes the class when it is back.
    let Host { daemon, fixture } = a;
    drop(daemon);
    assert_eq!(change(&b, Some("db-2"), None).unwrap().name.as_deref(), Some("db-2"));
    let a = Host { daemon: fixture.daemon(), fixture };
    let before = metadata_bytes(&a);
    client.write(4 * MIB, &[3; 4096], true).unwrap();
    wait_until("it has the class from the beginning", || metadata_bytes(&a) >= before + 4096);
    let Host { daemon, fixture } = b;
    drop(daemon);
    let b = Host { daemon: fixture.daemon(), fixture };
    let shown = &b.daemon.blkdevs(0, false).unwrap()[0];
    assert_eq!((shown.name.as_deref(), shown.class), (Some("db-2"), BlkdevClass::Metadata));
}

#[test]
fn a_backend_of_another_host_is_found_by_its_name_for_a_block_device_and_for_nothing_else() {
    let shared = Shared::new();
    let (a, b) = (Host::join(&shared, "a", true), Host::join(&shared, "b", false));
    backend(&a);
    let rename = |name: &str| SettingsChange { name: Some(name.into()), ..SettingsChange::default() };
    a.daemon.set(0, 0, &rename("of-a")).unwrap();
    let name = |name: &str| name.parse::<NumberOrName>().unwrap();
    assert_eq!(b.daemon.any_backend_number(0, &name("of-a")).unwrap(), 0);
    assert_eq!(a.daemon.any_backend_number(0, &name("of-a")).unwrap(), 0);
    refused(
        b.daemon.any_backend_number(0, &name("of-b")),
        ErrorKind::NotFound,
        "there are of-a; backend-list --all shows all",
    );
    refused(
        b.daemon.backend_number(0, &name("of-a")),
        ErrorKind::NotFound,
        "backend of-a (0) is on host a: run the command there",
    );
    refused(
        b.daemon.backend_number(0, &name("of-b")),
        ErrorKind::NotFound,
        "none has a name; backend-list shows all",
    );
}

/// The status of the only block device on a backend of another host.
fn remote(host: &Host) -> RemoteBlkdevStatus {
    let mut status = host.daemon.status().unwrap();
    assert!(status.transports[0].backends.is_empty());
    status.transports[0].remote_blkdevs.pop().unwrap()
}

#[test]
fn the_status_and_the_metrics_have_its_requests_and_for_how_long_they_wait() {
    let (_shared, a, b) = two_hosts();
    wait_until("both hosts wake each other", || remote(&b).woken);
    let mut client = b.fixture.client();
    client.write(0, &[1; 16384], false).unwrap();
    client.read(0, &mut [0; 4096]).unwrap();
    let shown = remote(&b);
    assert_eq!((shown.info.blkdev_id, shown.info.backend_id, shown.info.alive), (0, 0, true));
    assert_eq!((shown.backend_host_id, shown.backend_host.as_str()), (0, "a"));
    assert_eq!((shown.in_flight, shown.waiting_ms), (0, 0));
    let (write, read) = (&shown.info.operations["write"], &shown.info.operations["read"]);
    assert_eq!((write.requests, write.bytes, write.failed), (1, 16384, 0));
    assert_eq!((read.requests, read.outcomes["remote"].bytes), (1, 4096));
    assert_eq!((write.latency.count, read.latency.count), (1, 1));
    assert!(a.daemon.status().unwrap().transports[0].remote_blkdevs.is_empty());

    let Host { daemon, fixture } = a;
    drop(daemon);
    let waiting = std::thread::spawn(move || {
        client.write(4096, &[2; 4096], true).unwrap();
    });
    wait_until("its wait is shown", || remote(&b).waiting_ms > 3000);
    let shown = remote(&b);
    assert_eq!((shown.in_flight, shown.woken), (1, false));
    assert!(shown.info.error.unwrap().contains("requests have waited for host a for "));
    let page = cbd_daemon::metrics::render(&b.daemon.status().unwrap());
    let labels = r#"{transport="0",backend="0",blkdev="0",host="0",name="a"}"#;
    assert!(page.contains(&format!("cbd_remote_blkdev_in_flight{labels} 1\n")), "{page}");
    assert!(page.contains(&format!("cbd_remote_blkdev_waiting_seconds{labels} ")), "{page}");
    assert!(
        page.contains(r#"cbd_blkdev_bytes_total{transport="0",backend="0",blkdev="0",operation="write",outcome="remote"} 16384"#),
        "{page}"
    );

    let _a = Host { daemon: fixture.daemon(), fixture };
    waiting.join().unwrap();
    let shown = remote(&b);
    assert_eq!((shown.in_flight, shown.waiting_ms, shown.info.error), (0, 0, None));
    assert!(shown.info.operations["write"].latency.sum_ns > 3_000_000_000);
    wait_until("both hosts wake each other again", || remote(&b).woken);
}

#[test]
fn it_is_a_user_of_the_host_of_the_backend_that_waits_while_that_is_away() {
    let (_shared, a, b) = two_hosts();
    let users = a.daemon.blkdev_users().unwrap();
    let [user] = &users[..] else { panic!("one user: {users:?}") };
    assert_eq!((user.transport_id, user.blkdev_id, user.outlives_daemon), (0, 0, true));
    assert_eq!(user.dev_name, "block device 0 of host b");
    assert!(user.user.starts_with("host b has it on backend 0"), "{user:?}");
    assert!(b.daemon.blkdev_users().unwrap().is_empty(), "it has no client");
    stop(&b, 0).unwrap();
    assert!(a.daemon.blkdev_users().unwrap().is_empty());
}
