//! Commands that are refused without a change.

use crate::fixture::{Fixture, MIB, refused, stop};
use cbd_daemon::api::{
    Drain, RegisterTransport, SettingsChange, StartBackend, StartBlkdev, StopBackend, StopBlkdev,
};
use cbd_daemon::control::{Control, Flow};
use cbd_types::ErrorKind;

#[test]
fn unknown_ids_are_refused() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    refused(daemon.hosts(7), ErrorKind::NotFound, "no transport 7");
    refused(daemon.start_backend(7, &fixture.backend(&disk)), ErrorKind::NotFound, "no transport 7");
    refused(stop(&daemon, StopBackend::default()), ErrorKind::NotFound, "no backend 0");
    refused(daemon.set(0, 3, &SettingsChange::default()), ErrorKind::NotFound, "no backend 3");
    let blkdev = StartBlkdev { backend: 5, export: Some(fixture.export()), ..StartBlkdev::default() };
    refused(daemon.start_blkdev(0, &blkdev), ErrorKind::NotFound, "no backend 5");
    refused(daemon.stop_blkdev(0, 5, StopBlkdev::default()), ErrorKind::NotFound, "no block device 5");
    let drain = Drain { backend: Some(4), ..Drain::default() };
    refused(daemon.drain(0, &drain, &mut |_| Flow::Continue), ErrorKind::NotFound, "no backend 4");
}

#[test]
fn bad_backends_are_refused_and_leave_no_state() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    let free = daemon.transports().unwrap()[0].free_segments;
    let with = |change: fn(&mut StartBackend)| {
        let mut request = fixture.backend(&disk);
        change(&mut request);
        request
    };
    let start = |request: &StartBackend| daemon.start_backend(0, request);
    refused(start(&with(|it| it.path = "/nonexistent".into())), ErrorKind::NotFound, "/nonexistent");
    refused(start(&with(|it| it.path = "/".into())), ErrorKind::InvalidArgument, "");
    refused(start(&with(|it| it.path = "/dev/null".into())), ErrorKind::InvalidArgument, "/dev/null");
    refused(start(&with(|it| it.cache_size = Some(MIB))), ErrorKind::NoSpace, "too small");
    refused(
        start(&with(|it| it.cache_size = Some(512 << 30))),
        ErrorKind::NoSpace,
        "larger than the free space",
    );
    refused(start(&with(|it| it.handlers = Some(0))), ErrorKind::InvalidArgument, "1 to 128");
    refused(start(&with(|it| it.handlers = Some(129))), ErrorKind::InvalidArgument, "1 to 128");
    refused(
        start(&with(|it| it.export = Some("carrier-pigeon".into()))),
        ErrorKind::InvalidArgument,
        "fuse-loop",
    );
    refused(start(&with(|it| it.export = Some("nbd:unix:/nonexistent/x".into()))), ErrorKind::NotFound, "");
    std::fs::write(fixture.path("empty"), b"").unwrap();
    let empty = fixture.backend(&fixture.text("empty"));
    assert!(start(&empty).is_err());
    assert_eq!(daemon.transports().unwrap()[0].free_segments, free);
    assert!(daemon.backends(0, true).unwrap().is_empty());
    assert!(daemon.blkdevs(0, true).unwrap().is_empty());
    start(&fixture.backend(&disk)).unwrap();
}

#[test]
fn the_same_disk_is_a_backend_once() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    daemon
        .start_backend(0, &StartBackend { start_dev: false, export: None, ..fixture.backend(&disk) })
        .unwrap();
    std::fs::hard_link(&disk, fixture.path("other-name")).unwrap();
    for path in ["disk", "other-name"] {
        let again = fixture.backend(&fixture.text(path));
        refused(daemon.start_backend(0, &again), ErrorKind::AlreadyExists, "backend 0");
    }
}

#[test]
fn a_backend_has_one_block_device() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    let second = StartBlkdev {
        backend: 0,
        export: Some(format!("nbd:unix:{}", fixture.text("second.sock"))),
        ..StartBlkdev::default()
    };
    refused(daemon.start_blkdev(0, &second), ErrorKind::Busy, "has a block device already");
    daemon.stop_blkdev(0, 0, StopBlkdev::default()).unwrap();
    refused(daemon.stop_blkdev(0, 0, StopBlkdev::default()), ErrorKind::NotFound, "no block device 0");
    daemon.start_blkdev(0, &second).unwrap();
}

#[test]
fn an_open_device_is_stopped_only_by_force() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    let mut client = fixture.client();
    refused(daemon.stop_blkdev(0, 0, StopBlkdev::default()), ErrorKind::Busy, "NBD client");
    refused(stop(&daemon, StopBackend::default()), ErrorKind::Busy, "NBD client");
    client.write(0, &[7; 4096], true).unwrap();
    stop(&daemon, StopBackend { force: true, ..StopBackend::default() }).unwrap();
    assert!(client.write(0, &[8; 4096], false).is_err());
    assert_eq!(std::fs::read(&disk).unwrap()[..4096], [7; 4096]);
}

#[test]
fn a_file_of_the_daemons_own_state_is_neither_a_region_nor_a_backing_device() {
    let fixture = Fixture::new();
    let (_disk, daemon) = fixture.disk_and_daemon();
    let state = fixture.options().paths.state_dir;
    std::fs::create_dir_all(state.join("recovery-points")).unwrap();
    std::os::unix::fs::symlink(state.join("transports.json"), fixture.path("link")).unwrap();
    let before = std::fs::read(state.join("transports.json")).unwrap();
    let own =
        ["transports.json", "transports.new", "remote-exports.json", "daemon-id", "recovery-points/x.log"];
    let paths = own.map(|name| state.join(name)).into_iter().chain([fixture.path("link")]);
    for path in paths.map(|path| path.to_str().unwrap().to_owned()) {
        let region = RegisterTransport { path: path.clone(), force: true, ..fixture.region(32 * MIB) };
        let part = "a file of the state of this daemon";
        refused(daemon.register_transport(&region), ErrorKind::InvalidArgument, part);
        let backend = StartBackend { start_dev: false, export: None, ..fixture.backend(&path) };
        refused(daemon.start_backend(0, &backend), ErrorKind::InvalidArgument, part);
    }
    assert_eq!(std::fs::read(state.join("transports.json")).unwrap(), before);
    assert!(!state.join("transports.new").exists());
    // The folder may hold a region of the user.
    let path = state.join("region").to_str().unwrap().to_owned();
    daemon.register_transport(&RegisterTransport { path, ..fixture.region(32 * MIB) }).unwrap();
}
