//! Regions: formatting, registering, refusing and unregistering.

use crate::fixture::{Fixture, MIB, refused, stop, wait_until_served};
use crate::silent::Silent;
use cbd_daemon::api::{Drain, RegisterTransport, StartBackend, StopBackend};
use cbd_daemon::control::{Control, Flow};
use cbd_daemon::{config::Config, manager::Manager, state::StateDir};
use cbd_types::{BootId, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

#[test]
fn a_region_is_formatted_over_only_by_force() {
    let fixture = Fixture::new();
    {
        fixture.daemon_with_region().unregister_transport(0).unwrap();
    }
    let daemon = fixture.daemon();
    assert_eq!(daemon.summary, "0 transports, 0 backends, 0 block devices");
    refused(daemon.register_transport(&fixture.region(32 * MIB)), ErrorKind::AlreadyExists, "--force");
    daemon.register_transport(&RegisterTransport { force: true, ..fixture.region(32 * MIB) }).unwrap();
}

#[test]
fn a_request_during_the_start_is_answered_after_the_restore() {
    let fixture = Fixture::new();
    drop(fixture.daemon_with_region());
    let options = fixture.options();
    let state = StateDir::open(&options.paths.state_dir).unwrap();
    let manager = Arc::new(Manager::new(&options, Config::default(), state).unwrap());
    let asked = Arc::clone(&manager);
    let request = std::thread::spawn(move || asked.status().unwrap().transports.len());
    std::thread::sleep(Duration::from_millis(50));
    assert!(!request.is_finished());
    manager.restore().unwrap();
    assert_eq!(request.join().expect("an answer"), 1);
    manager.stop();
}

#[test]
fn a_region_that_appears_after_the_start_is_served_without_a_command() {
    let fixture = Fixture::new();
    fixture.disk_left_with_a_block();
    std::fs::rename(fixture.path("region"), fixture.path("elsewhere")).unwrap();
    let daemon = fixture.daemon();
    let transport = || daemon.status().unwrap().transports[0].info.clone();
    assert!(!transport().alive && transport().error.is_some());
    // Another file at the path does not end the retries.
    fixture.disk("region", 32 * MIB);
    let end = Instant::now() + Duration::from_secs(10);
    while !transport().error.is_some_and(|error| error.contains("does not hold a CBD transport")) {
        assert!(Instant::now() < end, "{:?}", transport());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(transport().retry_in_s.is_some());
    std::fs::rename(fixture.path("elsewhere"), fixture.path("region")).unwrap();
    while !transport().alive {
        assert!(Instant::now() < end + Duration::from_secs(10), "{:?}", transport());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!((transport().error, transport().retry_in_s), (None, None));
    wait_until_served(&daemon);
    fixture.block_is_there();
}

#[test]
fn a_file_in_place_of_a_registered_region_is_not_advised_to_be_formatted() {
    for size in [0, 32 * MIB] {
        let fixture = Fixture::new();
        let uuid = fixture.daemon_with_region().transports().unwrap()[0].uuid.clone();
        std::fs::remove_file(fixture.path("region")).unwrap();
        fixture.disk("region", size);
        let daemon = fixture.daemon();
        let at_start = daemon.transports().unwrap()[0].error.clone().expect("it is not up");
        let open = RegisterTransport { format: false, size: None, ..fixture.region(0) };
        let opened = daemon.register_transport(&open).unwrap_err().line();
        let formatted = daemon.register_transport(&fixture.region(32 * MIB)).unwrap_err().line();
        for error in [at_start, opened, formatted] {
            for part in [&uuid, "is not the region", "mount", "tp-unreg -t 0"] {
                assert!(error.contains(part), "{part} is missing with {size} bytes: {error}");
            }
            assert!(!error.contains("--format") && !error.contains("--force"), "{size} bytes: {error}");
        }
        assert_eq!(std::fs::metadata(fixture.path("region")).unwrap().len(), size);
        assert_eq!(daemon.transports().unwrap()[0].uuid, uuid, "it is registered as before");
    }
}

#[test]
fn a_size_beyond_a_registered_region_is_not_reported_as_another_file() {
    let fixture = Fixture::new();
    drop(fixture.daemon_with_region());
    std::fs::rename(fixture.path("region"), fixture.path("elsewhere")).unwrap();
    let daemon = fixture.daemon();
    std::fs::rename(fixture.path("elsewhere"), fixture.path("region")).unwrap();
    let length = std::fs::metadata(fixture.path("region")).unwrap().len();
    let open = RegisterTransport { format: false, size: Some(2 * length), ..fixture.region(0) };
    let error = refused(daemon.register_transport(&open), ErrorKind::InvalidArgument, "fewer than").line();
    assert!(!error.contains("is not the region"), "{error}");
    assert_eq!(std::fs::metadata(fixture.path("region")).unwrap().len(), length);
}

#[test]
fn another_region_in_place_of_a_registered_one_is_not_registered_under_its_number() {
    let fixture = Fixture::new();
    let uuid = fixture.daemon_with_region().transports().unwrap()[0].uuid.clone();
    std::fs::rename(fixture.path("region"), fixture.path("elsewhere")).unwrap();
    let other = Fixture::new();
    drop(other.daemon_with_region());
    std::fs::copy(other.path("region"), fixture.path("region")).unwrap();
    let daemon = fixture.daemon();
    let open = RegisterTransport { format: false, size: None, ..fixture.region(0) };
    let error = refused(daemon.register_transport(&open), ErrorKind::Exchanged, "tp-unreg -t 0");
    assert!(error.line().contains(&uuid), "{error}");
    std::fs::rename(fixture.path("elsewhere"), fixture.path("region")).unwrap();
    daemon.register_transport(&open).unwrap();
    assert_eq!(daemon.transports().unwrap()[0].uuid, uuid);
}

#[test]
fn a_backing_disk_is_not_registered_as_a_region_and_is_named() {
    let fixture = Fixture::new();
    let (disk, daemon) = fixture.disk_and_daemon();
    std::fs::hard_link(&disk, fixture.path("other-name")).unwrap();
    for path in [disk.clone(), fixture.text("other-name")] {
        for format in [false, true] {
            let size = format.then_some(32 * MIB);
            let request =
                RegisterTransport { path: path.clone(), size, format, force: format, ..fixture.region(0) };
            let error = refused(
                daemon.register_transport(&request),
                ErrorKind::InvalidArgument,
                "is the backing disk of backend 0 of transport 0",
            );
            assert!(!error.line().contains("the region"), "{error}");
        }
    }
    assert_eq!(std::fs::metadata(&disk).unwrap().len(), 8 * MIB);
    drop(daemon);
    // Of a backend that is not served, too: nothing locks its disk.
    std::fs::rename(fixture.path("other-name"), fixture.path("again")).unwrap();
    std::fs::remove_file(&disk).unwrap();
    let daemon = fixture.daemon();
    assert!(!daemon.backends(0, true).unwrap()[0].alive);
    let request = RegisterTransport { path: disk.clone(), force: true, ..fixture.region(32 * MIB) };
    refused(daemon.register_transport(&request), ErrorKind::InvalidArgument, "backing disk of backend 0");
    assert!(!fixture.path("disk").exists());
}

/// A folder of its own for a region that a daemon registered before it ended.
fn folder_of_a_region(fixture: &Fixture) -> PathBuf {
    let folder = fixture.path("far");
    std::fs::create_dir(&folder).unwrap();
    let region = RegisterTransport { path: fixture.text("far/region"), ..fixture.region(32 * MIB) };
    fixture.daemon().register_transport(&region).unwrap();
    folder
}

#[test]
fn a_region_on_a_file_system_that_does_not_respond_delays_no_other_command() {
    if std::env::var_os("CBD_SYSTEM_TESTS").is_none() {
        return println!("not run: it mounts a file system; CBD_SYSTEM_TESTS=1 runs it, as root");
    }
    let fixture = Fixture::new();
    let folder = folder_of_a_region(&fixture);
    std::fs::remove_file(folder.join("region")).unwrap();
    let daemon = fixture.daemon();
    let silent = Silent::over(&folder);
    silent.wait_for_request();
    let beside = RegisterTransport { path: fixture.text("beside"), ..fixture.region(32 * MIB) };
    let below = RegisterTransport { path: fixture.text("far/other"), ..fixture.region(32 * MIB) };
    let disk = fixture.backend(&fixture.text("far/disk"));
    let (tell, told) = channel();
    let asking = std::thread::spawn(move || {
        tell.send(daemon.transports().unwrap().len()).unwrap();
        // No command waits, neither for an object beside the region nor for one on it.
        assert_eq!(daemon.register_transport(&beside).unwrap().transport_id, 1);
        refused(daemon.register_transport(&below), ErrorKind::TimedOut, "far/other is on a file system");
        refused(daemon.start_backend(1, &disk), ErrorKind::TimedOut, "far/disk is on a file system");
        tell.send(daemon.transports().unwrap().len()).unwrap();
        drop(daemon);
        tell.send(0).unwrap();
    });
    let said = [(); 3].map(|()| told.recv_timeout(Duration::from_secs(30)));
    drop(silent);
    assert_eq!(said, [Ok(1), Ok(2), Ok(0)], "what there is, also after commands, and the end");
    asking.join().unwrap();
}

#[test]
fn a_daemon_starts_with_a_region_that_does_not_respond_and_serves_it_when_it_does() {
    if std::env::var_os("CBD_SYSTEM_TESTS").is_none() {
        return println!("not run: it mounts a file system; CBD_SYSTEM_TESTS=1 runs it, as root");
    }
    let fixture = Fixture::new();
    let folder = folder_of_a_region(&fixture);
    let silent = Silent::over(&folder);
    let (tell, told) = channel();
    let starting = std::thread::spawn(move || {
        let daemon = fixture.daemon();
        tell.send(daemon.transports().unwrap()[0].error.clone()).unwrap();
        (fixture, daemon)
    });
    let said = told.recv_timeout(Duration::from_secs(30));
    drop(silent);
    let error = said.expect("it starts").expect("the region is not up");
    assert!(error.contains("does not answer"), "{error}");
    let (_place, daemon) = starting.join().unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while !daemon.transports().unwrap()[0].alive {
        assert!(Instant::now() < end, "{:?}", daemon.transports());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_refused_format_does_not_change_the_file() {
    let fixture = Fixture::new();
    {
        fixture.daemon_with_region().unregister_transport(0).unwrap();
    }
    let daemon = fixture.daemon();
    refused(daemon.register_transport(&fixture.region(64 * MIB)), ErrorKind::AlreadyExists, "--force");
    assert_eq!(std::fs::metadata(fixture.path("region")).unwrap().len(), 32 * MIB);
    let missing = RegisterTransport { path: fixture.text("new"), ..fixture.region(128 << 10) };
    assert!(daemon.register_transport(&missing).is_err());
    assert!(!fixture.path("new").exists());
}

#[test]
fn bad_regions_are_refused() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon();
    let plain = |path: String| RegisterTransport { format: false, size: None, path, ..fixture.region(0) };
    refused(daemon.register_transport(&plain(fixture.text("missing"))), ErrorKind::NotFound, "--format");
    let zeroes = fixture.disk("zeroes", 32 * MIB);
    refused(daemon.register_transport(&plain(zeroes)), ErrorKind::Foreign, "");
    std::fs::write(fixture.path("text"), "hello, world ".repeat(1 << 20)).unwrap();
    let text = RegisterTransport { path: fixture.text("text"), size: None, ..fixture.region(0) };
    refused(daemon.register_transport(&text), ErrorKind::Foreign, "--force");
    let small = RegisterTransport { size: Some(MIB), ..fixture.region(0) };
    refused(daemon.register_transport(&small), ErrorKind::NoSpace, "");
    let folder =
        RegisterTransport { path: fixture.folder.path().to_str().unwrap().into(), ..fixture.region(MIB) };
    refused(daemon.register_transport(&folder), ErrorKind::InvalidArgument, "");
    for host in ["", "a b", "ü"] {
        let request = RegisterTransport { host: host.into(), ..fixture.region(32 * MIB) };
        refused(daemon.register_transport(&request), ErrorKind::InvalidArgument, "host");
    }
    for path in ["", "relative"] {
        let request = RegisterTransport { path: path.into(), ..fixture.region(32 * MIB) };
        refused(daemon.register_transport(&request), ErrorKind::InvalidArgument, "path");
    }
    assert!(daemon.transports().unwrap().is_empty());
    assert!(!fixture.path("region").exists());
}

#[test]
fn a_region_is_registered_once_and_locked() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    std::fs::hard_link(fixture.path("region"), fixture.path("other-name")).unwrap();
    for path in ["region", "other-name"] {
        let again =
            RegisterTransport { path: fixture.text(path), format: false, size: None, ..fixture.region(0) };
        refused(daemon.register_transport(&again), ErrorKind::AlreadyExists, "transport 0");
    }
    let second = Fixture::new();
    let other = second.daemon();
    let again = RegisterTransport { format: false, size: None, ..fixture.region(0) };
    refused(other.register_transport(&again), ErrorKind::Busy, "");
}

#[test]
fn a_transport_with_backends_is_not_unregistered() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let daemon = fixture.daemon_with_region();
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    refused(daemon.unregister_transport(0), ErrorKind::Busy, "backend 0");
    stop(&daemon, StopBackend::default()).unwrap();
    daemon.unregister_transport(0).unwrap();
    refused(daemon.unregister_transport(0), ErrorKind::NotFound, "no transport 0");
}

#[test]
fn the_transport_of_a_lost_region_is_kept_with_the_reason() {
    let fixture = Fixture::new();
    {
        fixture.daemon_with_region();
    }
    let region = std::fs::read(fixture.path("region")).unwrap();
    std::fs::remove_file(fixture.path("region")).unwrap();
    {
        let daemon = fixture.daemon();
        let transport = &daemon.transports().unwrap()[0];
        assert!(!transport.alive);
        assert!(transport.error.is_some());
        refused(daemon.backends(0, false), ErrorKind::Stopped, "transport 0 is not up");
        // The region exists again: registering it continues under its number.
        std::fs::write(fixture.path("region"), &region).unwrap();
        let again = RegisterTransport { format: false, size: None, ..fixture.region(0) };
        assert_eq!(daemon.register_transport(&again).unwrap().transport_id, 0);
    }
    assert_eq!(fixture.daemon().summary, "1 transports, 0 backends, 0 block devices");
}

#[test]
fn a_damaged_region_never_ends_the_daemon() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    {
        let daemon = fixture.daemon_with_region();
        daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
        fixture.client().write(0, &[9; 65536], true).unwrap();
    }
    let good = std::fs::read(fixture.path("region")).unwrap();
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    for round in 0..20 {
        let mut bad = good.clone();
        for _ in 0..=round {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Mostly the tables and the first segments.
            let at = usize::try_from(seed >> 20).unwrap() % (4 << 20);
            let end = (at + 4096).min(bad.len());
            bad[at..end].fill((seed >> 8) as u8);
        }
        std::fs::write(fixture.path("region"), &bad).unwrap();
        let daemon = fixture.daemon();
        assert_eq!(daemon.status().unwrap().transports.len(), 1, "round {round}");
    }
}

#[test]
fn require_persistent_refuses_a_region_that_power_loss_destroys() {
    let mut fixture = Fixture::new();
    {
        fixture.daemon_with_region();
    }
    fixture.require_persistent = true;
    let error = fixture.try_daemon().err().expect("the daemon started");
    assert!(error.line().contains("does not survive a power failure"), "{error}");
    let fresh = Fixture { require_persistent: true, ..Fixture::new() };
    let daemon = fresh.daemon();
    refused(daemon.register_transport(&fresh.region(32 * MIB)), ErrorKind::Unsupported, "power failure");
    assert!(!fresh.path("region").exists());
}

/// A daemon on a region with a block written, in boot 1; the daemon dies with its machine, or ends properly.
fn left_in_another_boot(orderly: bool) -> (Fixture, String) {
    let mut fixture = Fixture::new();
    fixture.boot = Some(BootId([1; 16]));
    fixture.decorate = Some("fault:op=write".into());
    let (disk, daemon) = fixture.disk_and_daemon();
    fixture.write_block();
    let ended = daemon.end();
    if orderly {
        assert_eq!(ended.sync(), [""; 0]);
    }
    fixture.boot = Some(BootId([2; 16]));
    fixture.decorate = None;
    (fixture, disk)
}

#[test]
fn a_region_that_was_closed_properly_is_served_in_the_next_boot() {
    let (fixture, _disk) = left_in_another_boot(true);
    let daemon = fixture.daemon();
    assert_eq!(daemon.summary, "1 transports, 1 backends, 1 block devices");
    fixture.block_is_there();
}

#[test]
fn a_region_whose_machine_crashed_is_not_served_and_the_error_has_advice() {
    let (fixture, disk) = left_in_another_boot(false);
    let daemon = fixture.daemon();
    let backend = daemon.backends(0, false).unwrap().remove(0);
    let error = backend.error.expect("it is refused");
    for part in ["was in use in boot", "--discard-dirty", "--after-crash"] {
        assert!(error.contains(part), "{error}");
    }
    let again = StartBackend { start_dev: false, export: None, ..fixture.backend(&disk) };
    refused(daemon.start_backend(0, &again), ErrorKind::Torn, "--after-crash");
    refused(stop(&daemon, StopBackend::default()), ErrorKind::Torn, "--discard-dirty 4096");
    let give_up = StopBackend { discard_dirty: Some(4096), ..StopBackend::default() };
    assert_eq!(stop(&daemon, give_up).unwrap().discarded_bytes, 4096);
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    let mut data = [1; 4096];
    fixture.client().read(0, &mut data).unwrap();
    assert_eq!(data, [0; 4096], "the dropped data is gone");
}

#[test]
fn a_region_without_dirty_data_begins_empty_after_a_crash_of_the_machine() {
    let mut fixture = Fixture::new();
    fixture.boot = Some(BootId([1; 16]));
    {
        let (_disk, daemon) = fixture.disk_and_daemon();
        fixture.write_block();
        drain_all(&daemon);
    }
    drop(fixture.daemon().end());
    fixture.boot = Some(BootId([2; 16]));
    let daemon = fixture.daemon();
    assert_eq!(daemon.summary, "1 transports, 1 backends, 1 block devices");
    let warnings = daemon.status().unwrap().transports[0].backends[0].warnings.clone();
    assert!(warnings.iter().any(|warning| warning.contains("it begins empty")), "{warnings:?}");
    fixture.block_is_there();
}

/// Drains all backends.
fn drain_all(daemon: &Manager) {
    let all = Drain { wait: true, ..Drain::default() };
    daemon.drain(0, &all, &mut |_| Flow::Continue).unwrap();
}

#[test]
fn a_missing_region_of_a_registered_transport_is_re_created_only_by_force() {
    let fixture = Fixture::new();
    drop(fixture.disk_left_with_a_block());
    std::fs::rename(fixture.path("region"), fixture.path("elsewhere")).unwrap();
    let daemon = fixture.daemon();
    let error = daemon.transports().unwrap()[0].error.clone().expect("it is not there");
    assert!(error.contains("mount") && !error.contains("format"), "{error}");
    let open = RegisterTransport { format: false, size: None, ..fixture.region(0) };
    let error = refused(daemon.register_transport(&open), ErrorKind::NotFound, "of transport 0");
    assert!(!error.line().contains("--format"), "{error}");
    refused(daemon.register_transport(&fixture.region(32 * MIB)), ErrorKind::AlreadyExists, "tp-unreg -t 0");
    assert!(!fixture.path("region").exists());
    std::fs::rename(fixture.path("elsewhere"), fixture.path("region")).unwrap();
    assert_eq!(daemon.register_transport(&open).unwrap().transport_id, 0);
    wait_until_served(&daemon);
    fixture.block_is_there();
}

#[test]
fn a_file_that_begins_with_zeroes_and_holds_data_is_formatted_only_by_force() {
    use std::os::unix::fs::FileExt;
    let fixture = Fixture::new();
    let daemon = fixture.daemon();
    for at in [11 * MIB, 32 * MIB - 512] {
        fixture.disk("region", 32 * MIB);
        let file = std::fs::File::options().read(true).write(true).open(fixture.path("region")).unwrap();
        file.write_all_at(b"EFI PART", at).unwrap();
        refused(daemon.register_transport(&fixture.region(32 * MIB)), ErrorKind::Foreign, "--force");
        let mut there = [0; 8];
        file.read_exact_at(&mut there, at).unwrap();
        assert_eq!(&there, b"EFI PART");
    }
    daemon.register_transport(&RegisterTransport { force: true, ..fixture.region(32 * MIB) }).unwrap();
}

#[test]
fn a_size_below_that_of_the_file_is_refused() {
    let fixture = Fixture::new();
    fixture.disk("region", 64 * MIB);
    let daemon = fixture.daemon();
    refused(daemon.register_transport(&fixture.region(32 * MIB)), ErrorKind::InvalidArgument, "32 MiB");
    let open = RegisterTransport { format: false, ..fixture.region(32 * MIB) };
    refused(daemon.register_transport(&open), ErrorKind::InvalidArgument, "leave --size out");
    daemon.register_transport(&fixture.region(64 * MIB)).unwrap();
}

#[test]
fn a_region_that_others_may_write_is_refused_unless_the_configuration_allows_it() {
    use std::os::unix::fs::PermissionsExt;
    let fixture = Fixture::new();
    drop(fixture.daemon_with_region());
    std::fs::set_permissions(fixture.path("region"), std::fs::Permissions::from_mode(0o666)).unwrap();
    let error = fixture.daemon().transports().unwrap()[0].error.clone().expect("it is refused");
    assert!(error.contains("chmod go-w") && error.contains("allow_shared_regions = true"), "{error}");
    let options = fixture.options();
    let mut config = Config::default();
    config.daemon.allow_shared_regions = true;
    let state = StateDir::open(&options.paths.state_dir).unwrap();
    let manager = Arc::new(Manager::new(&options, config, state).unwrap());
    manager.restore().unwrap();
    assert!(manager.transports().unwrap()[0].alive);
    manager.stop();
}

#[test]
fn a_region_of_another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return println!("not run: it changes the owner of a file, as root");
    }
    let fixture = Fixture::new();
    drop(fixture.daemon_with_region());
    std::os::unix::fs::chown(fixture.path("region"), Some(4711), None).unwrap();
    let error = fixture.daemon().transports().unwrap()[0].error.clone().expect("it is refused");
    assert!(error.contains("belongs to user 4711"), "{error}");
}

#[test]
fn the_caches_of_another_host_in_a_region_are_reported() {
    let mut fixture = Fixture::new();
    fixture.disk_left_with_a_dirty_block();
    std::fs::remove_dir_all(fixture.path("state")).unwrap();
    let daemon = fixture.daemon();
    let other = RegisterTransport { host: "node1".into(), format: false, size: None, ..fixture.region(0) };
    let warnings = daemon.register_transport(&other).unwrap().warnings;
    let said = warnings.iter().find(|warning| warning.contains("belongs to host node0")).expect("it is said");
    assert!(said.contains("4 KiB of dirty data") && said.contains("--host node0"), "{said}");
}
