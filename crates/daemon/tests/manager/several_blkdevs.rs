//! Several block devices of a host on one backend.

use crate::fixture::{Fixture, MIB, Running, refused};
use crate::hosts::{Host, Shared, wait_until};
use cbd_daemon::api::{BlkdevInfo, StartBackend, StartBlkdev, StopBackend, StopBlkdev};
use cbd_daemon::control::Control;
use cbd_nbd::Listen;
use cbd_testkit::Client;
use cbd_types::{ErrorKind, Result};
use std::collections::BTreeMap;

fn start(host: (&Fixture, &Running), socket: &str, shared: bool, name: Option<&str>) -> Result<BlkdevInfo> {
    let (fixture, daemon) = host;
    let export = Some(format!("nbd:unix:{}", fixture.text(socket)));
    let name = name.map(str::to_owned);
    daemon.start_blkdev(0, &StartBlkdev { backend: 0, export, name, shared, ..StartBlkdev::default() })
}

fn client(fixture: &Fixture, socket: &str) -> Client {
    Client::connect(&Listen::Unix(fixture.path(socket))).unwrap()
}

/// A client writes what the others then read.
fn each_sees_what_the_others_write(clients: &mut [Client], first: u8) {
    for writer in 0..clients.len() {
        let value = first + writer as u8;
        clients[writer].write(8192, &[value; 4096], writer % 2 == 0).unwrap();
        for reader in &mut *clients {
            let mut found = [0; 4096];
            reader.read(8192, &mut found).unwrap();
            assert_eq!(found, [value; 4096]);
        }
    }
}

/// Writes by block device, and those of the backend.
fn writes(daemon: &Running) -> (BTreeMap<u32, u64>, u64) {
    let status = daemon.status().unwrap();
    let backend = &status.transports[0].backends[0];
    let writes = |blkdev: &BlkdevInfo| blkdev.operations.get("write").map_or(0, |of| of.requests);
    let each = backend.info.blkdevs.iter().map(|blkdev| (blkdev.blkdev_id, writes(blkdev))).collect();
    (each, backend.operations.get("write").map_or(0, |of| of.requests))
}

fn names(daemon: &Running) -> Vec<(u32, Option<String>)> {
    let list = daemon.blkdevs(0, false).unwrap().into_iter();
    list.map(|blkdev| (blkdev.blkdev_id, blkdev.name)).collect()
}

#[test]
fn block_devices_on_one_backend_are_one_disk_and_have_figures_and_names_of_their_own() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let daemon = fixture.daemon_with_region();
    let named = Some("data".to_owned());
    let request = StartBackend { start_dev: false, export: None, name: named, ..fixture.backend(&disk) };
    daemon.start_backend(0, &request).unwrap();
    let host = (&fixture, &daemon);
    start(host, "0.sock", true, None).unwrap();
    refused(
        start(host, "1.sock", false, None),
        ErrorKind::Busy,
        "beside it others are started with --shared",
    );
    refused(start(host, "0.sock", true, None), ErrorKind::Busy, "0.sock");
    assert_eq!(daemon.blkdevs(0, false).unwrap().len(), 1, "what did not start is not there");
    start(host, "1.sock", true, None).unwrap();
    refused(start(host, "2.sock", true, Some("data")), ErrorKind::AlreadyExists, "the name data already");
    start(host, "2.sock", true, Some("backup")).unwrap();
    let some = |name: &str| Some(name.to_owned());
    assert_eq!(names(&daemon), [(0, some("data")), (1, None), (2, some("backup"))]);
    let mut clients = ["0.sock", "1.sock", "2.sock"].map(|socket| client(&fixture, socket));
    each_sees_what_the_others_write(&mut clients, 1);
    clients[1].write(0, &[7; 4096], false).unwrap();
    assert_eq!(writes(&daemon), (BTreeMap::from([(0, 1), (1, 2), (2, 1)]), 4));
    // One ends by itself; what it has done is still counted for the backend.
    daemon.stop_blkdev(0, 1, StopBlkdev::default()).expect_err("it is in use");
    drop(clients);
    wait_until("its client is gone", || daemon.stop_blkdev(0, 1, StopBlkdev::default()).is_ok());
    assert_eq!(writes(&daemon), (BTreeMap::from([(0, 1), (2, 1)]), 4));
    drop(daemon);
    let daemon = fixture.daemon();
    assert_eq!(names(&daemon), [(0, some("data")), (2, some("backup"))]);
    let mut clients = ["0.sock", "2.sock"].map(|socket| client(&fixture, socket));
    let mut found = [0; 4096];
    clients[0].read(0, &mut found).unwrap();
    assert_eq!(found, [7; 4096]);
    each_sees_what_the_others_write(&mut clients, 20);
}

#[test]
fn a_host_has_several_block_devices_on_a_backend_of_another_one() {
    let shared = Shared::new();
    let (a, b) = (Host::join(&shared, "a", true), Host::join(&shared, "b", false));
    let disk = a.fixture.disk("disk", 8 * MIB);
    let request = StartBackend { start_dev: false, export: None, ..a.fixture.backend(&disk) };
    a.daemon.start_backend(0, &request).unwrap();
    for host in [&a, &b] {
        for socket in ["0.sock", "1.sock"] {
            start((&host.fixture, &host.daemon), socket, true, None).unwrap();
        }
    }
    refused(start((&b.fixture, &b.daemon), "2.sock", false, None), ErrorKind::Busy, "it shares it");
    let connect = |host: &Host| ["0.sock", "1.sock"].map(|socket| client(&host.fixture, socket));
    let mut clients: Vec<Client> = connect(&a).into_iter().chain(connect(&b)).collect();
    each_sees_what_the_others_write(&mut clients, 1);
    assert_eq!(writes(&a.daemon), (BTreeMap::from([(0, 1), (1, 1)]), 4), "those of other hosts, too");
    drop(clients);
    // The other host's devices go on with the next process of the first one.
    let Host { daemon, fixture } = a;
    drop(daemon);
    let a = Host { daemon: fixture.daemon(), fixture };
    let mut clients: Vec<Client> = connect(&a).into_iter().chain(connect(&b)).collect();
    each_sees_what_the_others_write(&mut clients, 11);
    drop(clients);
    // And one goes on without the other one.
    wait_until("its client is gone", || b.daemon.stop_blkdev(0, 2, StopBlkdev::default()).is_ok());
    let mut clients = [client(&a.fixture, "0.sock"), client(&b.fixture, "1.sock")];
    each_sees_what_the_others_write(&mut clients, 21);
    drop(clients);
    // The backend stops as soon as all are gone, also before the next look.
    let stop = |host: &Host, id| host.daemon.stop_blkdev(0, id, StopBlkdev { force: true });
    stop(&a, 0).unwrap();
    stop(&a, 1).unwrap();
    refused(
        crate::fixture::stop(&a.daemon, StopBackend::default()),
        ErrorKind::Busy,
        "block device 3 of host b",
    );
    stop(&b, 3).unwrap();
    crate::fixture::stop(&a.daemon, StopBackend::default()).unwrap();
}

#[test]
fn a_backend_that_is_down_is_not_stopped_while_another_host_has_a_block_device_on_it() {
    let shared = Shared::new();
    let (a, b) = (Host::join(&shared, "a", true), Host::join(&shared, "b", false));
    let disk = a.fixture.disk("disk", 8 * MIB);
    let request = StartBackend { start_dev: false, export: None, ..a.fixture.backend(&disk) };
    a.daemon.start_backend(0, &request).unwrap();
    start((&b.fixture, &b.daemon), "0.sock", false, None).unwrap();
    let Host { daemon, fixture } = a;
    drop(daemon);
    std::fs::rename(&disk, fixture.path("away")).unwrap();
    let a = Host { daemon: fixture.daemon(), fixture };
    assert!(!a.daemon.backends(0, false).unwrap()[0].alive);
    let stopped = crate::fixture::stop(&a.daemon, StopBackend::default());
    refused(stopped, ErrorKind::Busy, "block device 0 of host b stands on backend 0");
    std::fs::rename(a.fixture.path("away"), &disk).unwrap();
    wait_until("it is served again", || a.daemon.backends(0, false).unwrap()[0].alive);
    each_sees_what_the_others_write(&mut [client(&b.fixture, "0.sock")], 1);
}
