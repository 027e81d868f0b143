//! Names of backends and block devices: given at the start and later, kept over restarts, and resolved on their transport.

use crate::fixture::{Fixture, MIB, Running, refused, stop};
use cbd_daemon::api::{
    BlkdevChange, BlkdevClass, NumberOrName, RegisterTransport, SettingsChange, StartBackend, StartBlkdev,
    StopBackend, StopBlkdev,
};
use cbd_daemon::control::Control;
use cbd_types::{ErrorKind, Result};

/// A request for a backend with a small cache, without a block device.
fn plain(fixture: &Fixture, disk: &str, name: Option<&str>) -> StartBackend {
    let disk = fixture.disk(disk, 8 * MIB);
    let small = StartBackend { start_dev: false, export: None, cache_size: None, ..fixture.backend(&disk) };
    StartBackend { name: name.map(str::to_owned), ..small }
}

fn rename(daemon: &Running, backend: u32, name: &str) -> Result<()> {
    let change = SettingsChange { name: Some(name.into()), ..SettingsChange::default() };
    daemon.set(0, backend, &change).map(drop)
}

fn rename_blkdev(daemon: &Running, blkdev: u32, name: &str) -> Result<()> {
    daemon.set_blkdev(0, blkdev, &BlkdevChange { name: Some(name.into()), class: None }).map(drop)
}

fn backend_number(daemon: &Running, transport: u32, name: &str) -> Result<u32> {
    daemon.backend_number(transport, &name.parse::<NumberOrName>().unwrap())
}

fn blkdev_number(daemon: &Running, name: &str) -> Result<u32> {
    daemon.blkdev_number(0, &name.parse::<NumberOrName>().unwrap())
}

fn names(daemon: &Running) -> Vec<Option<String>> {
    daemon.backends(0, false).unwrap().into_iter().map(|backend| backend.name).collect()
}

fn blkdev_names(daemon: &Running) -> Vec<Option<String>> {
    let listed: Vec<_> = daemon.blkdevs(0, false).unwrap().into_iter().map(|blkdev| blkdev.name).collect();
    let of_backends = daemon.backends(0, false).unwrap().into_iter().flat_map(|backend| backend.blkdevs);
    assert_eq!(of_backends.map(|blkdev| blkdev.name).collect::<Vec<_>>(), listed);
    listed
}

fn some(name: &str) -> Option<String> {
    Some(name.to_owned())
}

#[test]
fn a_backend_started_with_a_name_keeps_it_over_a_restart() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    {
        let daemon = fixture.daemon_with_region();
        let request = StartBackend { name: some("db-data"), ..fixture.backend(&disk) };
        let started = daemon.start_backend(0, &request).unwrap();
        assert_eq!(started.blkdev.unwrap().name, some("db-data"), "its block device has its name");
        assert_eq!(backend_number(&daemon, 0, "db-data").unwrap(), 0);
        assert_eq!(blkdev_number(&daemon, "db-data").unwrap(), 0);
        rename_blkdev(&daemon, 0, "db-disk").unwrap();
    }
    let daemon = fixture.daemon();
    assert_eq!((names(&daemon), blkdev_names(&daemon)), (vec![some("db-data")], vec![some("db-disk")]));
    refused(blkdev_number(&daemon, "db-data"), ErrorKind::NotFound, "there are db-disk");
    // Without its own name it has that of its backend again.
    rename_blkdev(&daemon, 0, "").unwrap();
    assert_eq!(blkdev_names(&daemon), [some("db-data")]);
    rename(&daemon, 0, "").unwrap();
    assert_eq!((names(&daemon), blkdev_names(&daemon)), (vec![None], vec![None]));
    refused(
        backend_number(&daemon, 0, "db-data"),
        ErrorKind::NotFound,
        "none has a name; backend-list shows all",
    );
}

#[test]
fn the_class_of_a_block_device_survives_a_restart_and_changes_its_name_not() {
    let fixture = Fixture::new();
    let set = |daemon: &Running, class| {
        let change = BlkdevChange { name: None, class: Some(class) };
        daemon.set_blkdev(0, 0, &change).map(|info| info.class)
    };
    {
        let daemon = fixture.daemon_with_region();
        daemon.start_backend(0, &plain(&fixture, "a", Some("data"))).unwrap();
        refused(set(&daemon, BlkdevClass::Metadata), ErrorKind::NotFound, "no block device 0");
        let export = Some(format!("nbd:unix:{}", fixture.text("0.sock")));
        daemon
            .start_blkdev(
                0,
                &StartBlkdev { backend: 0, export, allow_remote: false, ..StartBlkdev::default() },
            )
            .unwrap();
        assert_eq!(daemon.blkdevs(0, false).unwrap()[0].class, BlkdevClass::None);
        assert_eq!(set(&daemon, BlkdevClass::Metadata).unwrap(), BlkdevClass::Metadata);
    }
    let daemon = fixture.daemon();
    let found = &daemon.blkdevs(0, false).unwrap()[0];
    assert_eq!((found.class, found.name.clone()), (BlkdevClass::Metadata, some("data")));
    assert_eq!(set(&daemon, BlkdevClass::None).unwrap(), BlkdevClass::None);
}

#[test]
fn a_name_that_is_taken_is_refused_and_nothing_is_created() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    daemon.start_backend(0, &plain(&fixture, "a", Some("data"))).unwrap();
    let second = plain(&fixture, "b", Some("data"));
    refused(
        daemon.start_backend(0, &second),
        ErrorKind::AlreadyExists,
        "backend 0 of this transport has the name data already",
    );
    assert_eq!(names(&daemon), [some("data")]);
    daemon.start_backend(0, &StartBackend { name: some("other"), ..second }).unwrap();
    refused(rename(&daemon, 1, "data"), ErrorKind::AlreadyExists, "the name data already");
    // Of block devices.
    let start = |backend, name: Option<&str>| {
        let export = Some(format!("nbd:unix:{}", fixture.text(&format!("{backend}.sock"))));
        daemon.start_blkdev(
            0,
            &StartBlkdev {
                backend,
                export,
                allow_remote: false,
                name: name.map(str::to_owned),
                shared: false,
            },
        )
    };
    refused(start(1, Some("data")), ErrorKind::AlreadyExists, "backend 0");
    assert!(daemon.blkdevs(0, false).unwrap().is_empty());
    start(0, Some("disk")).unwrap();
    start(1, None).unwrap();
    assert_eq!(blkdev_names(&daemon), [some("disk"), some("other")]);
    refused(rename_blkdev(&daemon, 1, "disk"), ErrorKind::AlreadyExists, "blkdev 0");
    refused(rename(&daemon, 1, "disk"), ErrorKind::AlreadyExists, "blkdev 0");
    refused(rename_blkdev(&daemon, 7, "free"), ErrorKind::NotFound, "no block device 7");
    // A stopped backend frees its name.
    daemon.stop_blkdev(0, 0, StopBlkdev::default()).unwrap();
    stop(&daemon, StopBackend::default()).unwrap();
    rename(&daemon, 1, "data").unwrap();
    assert_eq!((names(&daemon), blkdev_names(&daemon)), (vec![some("data")], vec![some("data")]));
}

#[test]
fn what_is_no_name_is_refused_before_anything_is_created() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    let free = plain(&fixture, "disk", None);
    for name in ["", "7", "a/b", "-a", "..", "a b", "a\n", "\u{fc}", &"x".repeat(33)] {
        let request = StartBackend { name: some(name), ..free.clone() };
        refused(daemon.start_backend(0, &request), ErrorKind::InvalidArgument, "is no name: ");
    }
    assert!(daemon.backends(0, false).unwrap().is_empty());
    daemon.start_backend(0, &free).unwrap();
    for name in ["7", "a/b", &"x".repeat(33)] {
        refused(rename(&daemon, 0, name), ErrorKind::InvalidArgument, "is no name: ");
        let request = StartBlkdev { backend: 0, name: some(name), ..StartBlkdev::default() };
        refused(daemon.start_blkdev(0, &request), ErrorKind::InvalidArgument, "is no name: ");
    }
    assert_eq!(names(&daemon), [None]);
}

#[test]
fn a_name_is_set_with_other_settings_and_of_a_backend_without_a_cache() {
    let fixture = Fixture::new();
    let (_disk, daemon) = fixture.disk_and_daemon();
    let change = SettingsChange { gc_percent: Some(33), name: some("db"), ..SettingsChange::default() };
    assert_eq!(daemon.set(0, 0, &change).unwrap().gc_percent, 33);
    daemon.start_backend(0, &plain(&fixture, "other", None)).unwrap();
    rename(&daemon, 1, "bare").unwrap();
    assert_eq!(names(&daemon), [some("db"), some("bare")]);
    // A taken name says what was changed nevertheless.
    let change = SettingsChange { gc_percent: Some(44), name: some("bare"), ..SettingsChange::default() };
    refused(daemon.set(0, 0, &change), ErrorKind::AlreadyExists, "the other settings are changed");
    assert_eq!(daemon.backends(0, false).unwrap()[0].cache_gc_percent, 44);
}

#[test]
fn a_backend_that_is_not_up_has_its_name_and_is_started_with_it_or_without_one() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let request = StartBackend { name: some("db"), ..fixture.backend(&disk) };
    {
        let daemon = fixture.daemon_with_region();
        daemon.start_backend(0, &request).unwrap();
    }
    std::fs::rename(&disk, fixture.path("away")).unwrap();
    let daemon = fixture.daemon();
    assert_eq!(names(&daemon), [some("db")]);
    assert_eq!(backend_number(&daemon, 0, "db").unwrap(), 0);
    rename(&daemon, 0, "db-2").unwrap();
    std::fs::rename(fixture.path("away"), &disk).unwrap();
    let error = daemon.start_backend(0, &request);
    if error.as_ref().err().is_none_or(|error| error.kind() != ErrorKind::AlreadyExists) {
        // The daemon has not started it by itself meanwhile.
        refused(
            error,
            ErrorKind::InvalidArgument,
            "backend 0 has the name db-2; start it without that option",
        );
        daemon.start_backend(0, &StartBackend { name: some("db-2"), ..request }).unwrap();
    }
    assert_eq!((names(&daemon), blkdev_names(&daemon)), (vec![some("db-2")], vec![some("db-2")]));
}

#[test]
fn two_transports_may_have_the_same_name() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    let other = RegisterTransport { path: fixture.text("region-1"), ..fixture.region(32 * MIB) };
    let second = daemon.register_transport(&other).unwrap().transport_id;
    daemon.start_backend(0, &plain(&fixture, "x", None)).unwrap();
    daemon.start_backend(0, &plain(&fixture, "a", Some("data"))).unwrap();
    daemon.start_backend(second, &plain(&fixture, "b", Some("data"))).unwrap();
    assert_eq!(
        (backend_number(&daemon, 0, "data").unwrap(), backend_number(&daemon, second, "data").unwrap()),
        (1, 0)
    );
    refused(backend_number(&daemon, 7, "data"), ErrorKind::NotFound, "transport 7");
}

#[test]
fn an_unknown_name_is_answered_with_some_of_the_names_that_exist() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    for number in 0..10 {
        let name = (number > 0).then(|| format!("data-{number}"));
        daemon.start_backend(0, &plain(&fixture, &format!("d{number}"), name.as_deref())).unwrap();
    }
    let error =
        refused(backend_number(&daemon, 0, "data"), ErrorKind::NotFound, "no backend with the name data");
    let line = error.line();
    assert!(
        line.contains("there are data-1, data-2") && line.contains("data-8 and 1 more; backend-list"),
        "{line}"
    );
    refused(blkdev_number(&daemon, "data-1"), ErrorKind::NotFound, "none has a name; dev-list shows all");
    assert_eq!(backend_number(&daemon, 0, "77").unwrap(), 77, "a number is not looked up");
}
