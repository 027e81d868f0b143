//! Regions: formatting, registering, refusing and unregistering.

use crate::place::{MIB, Place, refused, stop, wait_until_served};
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
    let place = Place::new();
    {
        place.daemon_with_region().unregister_transport(0).unwrap();
    }
    let daemon = place.daemon();
    assert_eq!(daemon.summary, "0 transports, 0 backends, 0 block devices");
    refused(daemon.register_transport(&place.region(32 * MIB)), ErrorKind::AlreadyExists, "--force");
    daemon.register_transport(&RegisterTransport { force: true, ..place.region(32 * MIB) }).unwrap();
}

#[test]
fn a_request_during_the_start_is_answered_after_the_restore() {
    let place = Place::new();
    drop(place.daemon_with_region());
    let options = place.options();
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
    let place = Place::new();
    place.disk_left_with_a_block();
    std::fs::rename(place.path("region"), place.path("elsewhere")).unwrap();
    let daemon = place.daemon();
    let transport = || daemon.status().unwrap().transports[0].info.clone();
    assert!(!transport().alive && transport().error.is_some());
    // Another file at the path does not end the retries.
    place.disk("region", 32 * MIB);
    let end = Instant::now() + Duration::from_secs(10);
    while !transport().error.is_some_and(|error| error.contains("does not hold a CBD transport")) {
        assert!(Instant::now() < end, "{:?}", transport());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(transport().retry_in_s.is_some());
    std::fs::rename(place.path("elsewhere"), place.path("region")).unwrap();
    while !transport().alive {
        assert!(Instant::now() < end + Duration::from_secs(10), "{:?}", transport());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!((transport().error, transport().retry_in_s), (None, None));
    wait_until_served(&daemon);
    place.block_is_there();
}

#[test]
fn a_file_in_place_of_a_remembered_region_is_not_advised_to_be_formatted() {
    for size in [0, 32 * MIB] {
        let place = Place::new();
        let uuid = place.daemon_with_region().transports().unwrap()[0].uuid.clone();
        std::fs::remove_file(place.path("region")).unwrap();
        place.disk("region", size);
        let daemon = place.daemon();
        let at_start = daemon.transports().unwrap()[0].error.clone().expect("it is not up");
        let open = RegisterTransport { format: false, size: None, ..place.region(0) };
        let opened = daemon.register_transport(&open).unwrap_err().line();
        let formatted = daemon.register_transport(&place.region(32 * MIB)).unwrap_err().line();
        for error in [at_start, opened, formatted] {
            for part in [&uuid, "is not the region", "mount", "tp-unreg -t 0"] {
                assert!(error.contains(part), "{part} is missing with {size} bytes: {error}");
            }
            assert!(!error.contains("--format") && !error.contains("--force"), "{size} bytes: {error}");
        }
        assert_eq!(std::fs::metadata(place.path("region")).unwrap().len(), size);
        assert_eq!(daemon.transports().unwrap()[0].uuid, uuid, "it is remembered as before");
    }
}

#[test]
fn a_size_beyond_a_remembered_region_is_not_reported_as_another_file() {
    let place = Place::new();
    drop(place.daemon_with_region());
    std::fs::rename(place.path("region"), place.path("elsewhere")).unwrap();
    let daemon = place.daemon();
    std::fs::rename(place.path("elsewhere"), place.path("region")).unwrap();
    let length = std::fs::metadata(place.path("region")).unwrap().len();
    let open = RegisterTransport { format: false, size: Some(2 * length), ..place.region(0) };
    let error = refused(daemon.register_transport(&open), ErrorKind::InvalidArgument, "fewer than").line();
    assert!(!error.contains("is not the region"), "{error}");
    assert_eq!(std::fs::metadata(place.path("region")).unwrap().len(), length);
}

#[test]
fn another_region_in_place_of_a_remembered_one_is_not_registered_under_its_number() {
    let place = Place::new();
    let uuid = place.daemon_with_region().transports().unwrap()[0].uuid.clone();
    std::fs::rename(place.path("region"), place.path("elsewhere")).unwrap();
    let other = Place::new();
    drop(other.daemon_with_region());
    std::fs::copy(other.path("region"), place.path("region")).unwrap();
    let daemon = place.daemon();
    let open = RegisterTransport { format: false, size: None, ..place.region(0) };
    let error = refused(daemon.register_transport(&open), ErrorKind::Exchanged, "tp-unreg -t 0");
    assert!(error.line().contains(&uuid), "{error}");
    std::fs::rename(place.path("elsewhere"), place.path("region")).unwrap();
    daemon.register_transport(&open).unwrap();
    assert_eq!(daemon.transports().unwrap()[0].uuid, uuid);
}

#[test]
fn a_backing_disk_is_not_registered_as_a_region_and_is_named() {
    let place = Place::new();
    let (disk, daemon) = place.disk_and_daemon();
    std::fs::hard_link(&disk, place.path("other-name")).unwrap();
    for path in [disk.clone(), place.text("other-name")] {
        for format in [false, true] {
            let size = format.then_some(32 * MIB);
            let request =
                RegisterTransport { path: path.clone(), size, format, force: format, ..place.region(0) };
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
    std::fs::rename(place.path("other-name"), place.path("again")).unwrap();
    std::fs::remove_file(&disk).unwrap();
    let daemon = place.daemon();
    assert!(!daemon.backends(0, true).unwrap()[0].alive);
    let request = RegisterTransport { path: disk.clone(), force: true, ..place.region(32 * MIB) };
    refused(daemon.register_transport(&request), ErrorKind::InvalidArgument, "backing disk of backend 0");
    assert!(!place.path("disk").exists());
}

/// A folder of its own for a region that a daemon registered before it ended.
fn folder_of_a_region(place: &Place) -> PathBuf {
    let folder = place.path("far");
    std::fs::create_dir(&folder).unwrap();
    let region = RegisterTransport { path: place.text("far/region"), ..place.region(32 * MIB) };
    place.daemon().register_transport(&region).unwrap();
    folder
}

#[test]
fn a_region_on_a_file_system_that_does_not_respond_delays_no_other_command() {
    if std::env::var_os("CBD_SYSTEM_TESTS").is_none() {
        return println!("not run: it mounts a file system; CBD_SYSTEM_TESTS=1 runs it, as root");
    }
    let place = Place::new();
    let folder = folder_of_a_region(&place);
    std::fs::remove_file(folder.join("region")).unwrap();
    let daemon = place.daemon();
    let silent = Silent::over(&folder);
    silent.is_asked();
    let beside = RegisterTransport { path: place.text("beside"), ..place.region(32 * MIB) };
    let below = RegisterTransport { path: place.text("far/other"), ..place.region(32 * MIB) };
    let disk = place.backend(&place.text("far/disk"));
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
    let place = Place::new();
    let folder = folder_of_a_region(&place);
    let silent = Silent::over(&folder);
    let (tell, told) = channel();
    let starting = std::thread::spawn(move || {
        let daemon = place.daemon();
        tell.send(daemon.transports().unwrap()[0].error.clone()).unwrap();
        (place, daemon)
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
    let place = Place::new();
    {
        place.daemon_with_region().unregister_transport(0).unwrap();
    }
    let daemon = place.daemon();
    refused(daemon.register_transport(&place.region(64 * MIB)), ErrorKind::AlreadyExists, "--force");
    assert_eq!(std::fs::metadata(place.path("region")).unwrap().len(), 32 * MIB);
    let missing = RegisterTransport { path: place.text("new"), ..place.region(128 << 10) };
    assert!(daemon.register_transport(&missing).is_err());
    assert!(!place.path("new").exists());
}

#[test]
fn bad_regions_are_refused() {
    let place = Place::new();
    let daemon = place.daemon();
    let plain = |path: String| RegisterTransport { format: false, size: None, path, ..place.region(0) };
    refused(daemon.register_transport(&plain(place.text("missing"))), ErrorKind::NotFound, "--format");
    let zeroes = place.disk("zeroes", 32 * MIB);
    refused(daemon.register_transport(&plain(zeroes)), ErrorKind::Foreign, "");
    std::fs::write(place.path("text"), "hello, world ".repeat(1 << 20)).unwrap();
    let text = RegisterTransport { path: place.text("text"), size: None, ..place.region(0) };
    refused(daemon.register_transport(&text), ErrorKind::Foreign, "--force");
    let small = RegisterTransport { size: Some(MIB), ..place.region(0) };
    refused(daemon.register_transport(&small), ErrorKind::NoSpace, "");
    let folder =
        RegisterTransport { path: place.folder.path().to_str().unwrap().into(), ..place.region(MIB) };
    refused(daemon.register_transport(&folder), ErrorKind::InvalidArgument, "");
    for host in ["", "a b", "ü"] {
        let request = RegisterTransport { host: host.into(), ..place.region(32 * MIB) };
        refused(daemon.register_transport(&request), ErrorKind::InvalidArgument, "host");
    }
    for path in ["", "relative"] {
        let request = RegisterTransport { path: path.into(), ..place.region(32 * MIB) };
        refused(daemon.register_transport(&request), ErrorKind::InvalidArgument, "path");
    }
    assert!(daemon.transports().unwrap().is_empty());
    assert!(!place.path("region").exists());
}

#[test]
fn a_region_is_registered_once_and_locked() {
    let place = Place::new();
    let daemon = place.daemon_with_region();
    std::fs::hard_link(place.path("region"), place.path("other-name")).unwrap();
    for path in ["region", "other-name"] {
        let again =
            RegisterTransport { path: place.text(path), format: false, size: None, ..place.region(0) };
        refused(daemon.register_transport(&again), ErrorKind::AlreadyExists, "transport 0");
    }
    let second = Place::new();
    let other = second.daemon();
    let again = RegisterTransport { format: false, size: None, ..place.region(0) };
    refused(other.register_transport(&again), ErrorKind::Busy, "");
}

#[test]
fn a_transport_with_backends_is_not_unregistered() {
    let place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    let daemon = place.daemon_with_region();
    daemon.start_backend(0, &place.backend(&disk)).unwrap();
    refused(daemon.unregister_transport(0), ErrorKind::Busy, "backend 0");
    stop(&daemon, StopBackend::default()).unwrap();
    daemon.unregister_transport(0).unwrap();
    refused(daemon.unregister_transport(0), ErrorKind::NotFound, "no transport 0");
}

#[test]
fn the_transport_of_a_lost_region_is_kept_with_the_reason() {
    let place = Place::new();
    {
        place.daemon_with_region();
    }
    let region = std::fs::read(place.path("region")).unwrap();
    std::fs::remove_file(place.path("region")).unwrap();
    {
        let daemon = place.daemon();
        let transport = &daemon.transports().unwrap()[0];
        assert!(!transport.alive);
        assert!(transport.error.is_some());
        refused(daemon.backends(0, false), ErrorKind::Stopped, "transport 0 is not up");
        // The region exists again: registering it continues under its number.
        std::fs::write(place.path("region"), &region).unwrap();
        let again = RegisterTransport { format: false, size: None, ..place.region(0) };
        assert_eq!(daemon.register_transport(&again).unwrap().transport_id, 0);
    }
    assert_eq!(place.daemon().summary, "1 transports, 0 backends, 0 block devices");
}

#[test]
fn a_damaged_region_never_ends_the_daemon() {
    let place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    {
        let daemon = place.daemon_with_region();
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
        place.client().write(0, &[9; 65536], true).unwrap();
    }
    let good = std::fs::read(place.path("region")).unwrap();
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
        std::fs::write(place.path("region"), &bad).unwrap();
        let daemon = place.daemon();
        assert_eq!(daemon.status().unwrap().transports.len(), 1, "round {round}");
    }
}

#[test]
fn require_persistent_refuses_a_region_that_power_loss_destroys() {
    let mut place = Place::new();
    {
        place.daemon_with_region();
    }
    place.require_persistent = true;
    let error = place.try_daemon().err().expect("the daemon started");
    assert!(error.line().contains("does not survive a power failure"), "{error}");
    let fresh = Place { require_persistent: true, ..Place::new() };
    let daemon = fresh.daemon();
    refused(daemon.register_transport(&fresh.region(32 * MIB)), ErrorKind::Unsupported, "power failure");
    assert!(!fresh.path("region").exists());
}

/// A daemon on a region with a block written, in boot 1; the daemon dies with its machine, or ends properly.
fn left_in_another_boot(orderly: bool) -> (Place, String) {
    let mut place = Place::new();
    place.boot = Some(BootId([1; 16]));
    place.decorate = Some("fault:op=write".into());
    let (disk, daemon) = place.disk_and_daemon();
    place.write_block();
    let ended = daemon.end();
    if orderly {
        assert_eq!(ended.sync(), [""; 0]);
    }
    place.boot = Some(BootId([2; 16]));
    place.decorate = None;
    (place, disk)
}

#[test]
fn a_region_that_was_closed_properly_is_served_in_the_next_boot() {
    let (place, _disk) = left_in_another_boot(true);
    let daemon = place.daemon();
    assert_eq!(daemon.summary, "1 transports, 1 backends, 1 block devices");
    place.block_is_there();
}

#[test]
fn a_region_whose_machine_crashed_is_not_served_and_the_error_has_advice() {
    let (place, disk) = left_in_another_boot(false);
    let daemon = place.daemon();
    let backend = daemon.backends(0, false).unwrap().remove(0);
    let error = backend.error.expect("it is refused");
    for part in ["was in use in boot", "--discard-dirty", "--after-crash"] {
        assert!(error.contains(part), "{error}");
    }
    let again = StartBackend { start_dev: false, export: None, ..place.backend(&disk) };
    refused(daemon.start_backend(0, &again), ErrorKind::Torn, "--after-crash");
    refused(stop(&daemon, StopBackend::default()), ErrorKind::Torn, "--discard-dirty 4096");
    let give_up = StopBackend { discard_dirty: Some(4096), ..StopBackend::default() };
    assert_eq!(stop(&daemon, give_up).unwrap().discarded_bytes, 4096);
    daemon.start_backend(0, &place.backend(&disk)).unwrap();
    let mut data = [1; 4096];
    place.client().read(0, &mut data).unwrap();
    assert_eq!(data, [0; 4096], "what was given up is gone");
}

#[test]
fn a_region_without_dirty_data_begins_empty_after_a_crash_of_the_machine() {
    let mut place = Place::new();
    place.boot = Some(BootId([1; 16]));
    {
        let (_disk, daemon) = place.disk_and_daemon();
        place.write_block();
        drain_all(&daemon);
    }
    drop(place.daemon().end());
    place.boot = Some(BootId([2; 16]));
    let daemon = place.daemon();
    assert_eq!(daemon.summary, "1 transports, 1 backends, 1 block devices");
    let warnings = daemon.status().unwrap().transports[0].backends[0].warnings.clone();
    assert!(warnings.iter().any(|warning| warning.contains("it begins empty")), "{warnings:?}");
    place.block_is_there();
}

/// Drains all backends.
fn drain_all(daemon: &Manager) {
    let all = Drain { wait: true, ..Drain::default() };
    daemon.drain(0, &all, &mut |_| Flow::Continue).unwrap();
}

#[test]
fn a_missing_region_of_a_registered_transport_is_re_created_only_by_force() {
    let place = Place::new();
    drop(place.disk_left_with_a_block());
    std::fs::rename(place.path("region"), place.path("elsewhere")).unwrap();
    let daemon = place.daemon();
    let error = daemon.transports().unwrap()[0].error.clone().expect("it is not there");
    assert!(error.contains("mount") && !error.contains("format"), "{error}");
    let open = RegisterTransport { format: false, size: None, ..place.region(0) };
    let error = refused(daemon.register_transport(&open), ErrorKind::NotFound, "of transport 0");
    assert!(!error.line().contains("--format"), "{error}");
    refused(daemon.register_transport(&place.region(32 * MIB)), ErrorKind::AlreadyExists, "tp-unreg -t 0");
    assert!(!place.path("region").exists());
    std::fs::rename(place.path("elsewhere"), place.path("region")).unwrap();
    assert_eq!(daemon.register_transport(&open).unwrap().transport_id, 0);
    wait_until_served(&daemon);
    place.block_is_there();
}

#[test]
fn a_file_that_begins_with_zeroes_and_holds_data_is_formatted_only_by_force() {
    use std::os::unix::fs::FileExt;
    let place = Place::new();
    let daemon = place.daemon();
    for at in [11 * MIB, 32 * MIB - 512] {
        place.disk("region", 32 * MIB);
        let file = std::fs::File::options().read(true).write(true).open(place.path("region")).unwrap();
        file.write_all_at(b"EFI PART", at).unwrap();
        refused(daemon.register_transport(&place.region(32 * MIB)), ErrorKind::Foreign, "--force");
        let mut there = [0; 8];
        file.read_exact_at(&mut there, at).unwrap();
        assert_eq!(&there, b"EFI PART");
    }
    daemon.register_transport(&RegisterTransport { force: true, ..place.region(32 * MIB) }).unwrap();
}

#[test]
fn a_size_below_that_of_the_file_is_refused() {
    let place = Place::new();
    place.disk("region", 64 * MIB);
    let daemon = place.daemon();
    refused(daemon.register_transport(&place.region(32 * MIB)), ErrorKind::InvalidArgument, "32 MiB");
    let open = RegisterTransport { format: false, ..place.region(32 * MIB) };
    refused(daemon.register_transport(&open), ErrorKind::InvalidArgument, "leave --size out");
    daemon.register_transport(&place.region(64 * MIB)).unwrap();
}

#[test]
fn a_region_that_others_may_write_is_refused_unless_the_configuration_allows_it() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    drop(place.daemon_with_region());
    std::fs::set_permissions(place.path("region"), std::fs::Permissions::from_mode(0o666)).unwrap();
    let error = place.daemon().transports().unwrap()[0].error.clone().expect("it is refused");
    assert!(error.contains("chmod go-w") && error.contains("allow_shared_regions = true"), "{error}");
    let options = place.options();
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
        return println!("not run: it gives a file away, as root");
    }
    let place = Place::new();
    drop(place.daemon_with_region());
    std::os::unix::fs::chown(place.path("region"), Some(4711), None).unwrap();
    let error = place.daemon().transports().unwrap()[0].error.clone().expect("it is refused");
    assert!(error.contains("belongs to user 4711"), "{error}");
}

#[test]
fn the_caches_of_another_host_in_a_region_are_reported() {
    let mut place = Place::new();
    place.disk_left_with_a_dirty_block();
    std::fs::remove_dir_all(place.path("state")).unwrap();
    let daemon = place.daemon();
    let other = RegisterTransport { host: "node1".into(), format: false, size: None, ..place.region(0) };
    let warnings = daemon.register_transport(&other).unwrap().warnings;
    let said = warnings.iter().find(|warning| warning.contains("belongs to host node0")).expect("it is said");
    assert!(said.contains("4 KiB of dirty data") && said.contains("--host node0"), "{said}");
}
