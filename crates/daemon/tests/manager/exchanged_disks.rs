//! Disks that are missing, at another path, shrunk, or replaced by another disk at the same path.

use crate::fixture::{Fixture, MIB, cache_of, refused, stop, wait_until_served};
use cbd_daemon::api::{RegisterTransport, StopBackend};
use cbd_daemon::control::Control;
use cbd_types::ErrorKind;
use std::time::{Duration, Instant};

#[test]
fn another_disk_at_the_path_of_a_backend_is_refused_with_both_identities() {
    let fixture = Fixture::new();
    let disk = fixture.disk_left_with_a_block();
    std::fs::rename(&disk, fixture.path("ours")).unwrap();
    fixture.disk("disk", 8 * MIB);
    {
        let daemon = fixture.daemon();
        assert_eq!(
            daemon.summary,
            "1 transports, 0 backends, 0 block devices, 2 NOT SERVED (see cbdctrl status)"
        );
        let backend = &daemon.backends(0, false).unwrap()[0];
        assert!(!backend.alive);
        let error = backend.error.clone().unwrap();
        assert!(error.contains("is not the disk that it was"), "{error}");
        assert!(error.matches("size=").count() >= 2, "{error}");
        refused(daemon.start_backend(0, &fixture.backend(&disk)), ErrorKind::Exchanged, "is not the disk");
        // The recorded disk is back: a start continues with its cache.
        std::fs::rename(fixture.path("ours"), &disk).unwrap();
        let started = daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
        assert_eq!((started.backend_id, started.blkdev.unwrap().alive), (0, true));
        fixture.block_is_there();
    }
}

#[test]
fn dirty_data_of_a_missing_disk_is_kept_until_the_disk_is_back_or_the_data_is_dropped() {
    let mut fixture = Fixture::new();
    fixture.decorate = Some("fault:op=write".into());
    let disk = fixture.disk_left_with_a_block();
    std::fs::remove_file(&disk).unwrap();
    let daemon = fixture.daemon();
    let error = refused(stop(&daemon, StopBackend::default()), ErrorKind::Stopped, "--discard-dirty");
    let line = error.line();
    let bytes: u64 = line.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(bytes >= 4096);
    stop(&daemon, StopBackend { discard_dirty: Some(bytes), ..StopBackend::default() }).unwrap();
    assert!(daemon.backends(0, true).unwrap().is_empty());
}

#[test]
fn a_stop_does_not_drop_zeroes_that_a_missing_disk_lacks() {
    let mut fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    fixture.decorate = Some("fault:".into());
    {
        let daemon = fixture.daemon_with_region();
        daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
        fixture.client().write_zeroes(0, 4096, true, false).unwrap();
        assert_eq!(cache_of(&daemon).dirty_bytes, 0);
    }
    std::fs::remove_file(&disk).unwrap();
    let daemon = fixture.daemon();
    refused(stop(&daemon, StopBackend::default()), ErrorKind::Stopped, "--discard-dirty 0");
    stop(&daemon, StopBackend { discard_dirty: Some(0), ..StopBackend::default() }).unwrap();
    assert!(daemon.backends(0, true).unwrap().is_empty());
}

#[test]
fn a_shrunk_disk_is_refused() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    {
        let daemon = fixture.daemon_with_region();
        daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    }
    std::fs::OpenOptions::new().write(true).open(&disk).unwrap().set_len(4 * MIB).unwrap();
    let daemon = fixture.daemon();
    let error = daemon.backends(0, false).unwrap()[0].error.clone().unwrap();
    assert!(error.contains("shrunk"), "{error}");
}

#[test]
fn a_disk_at_another_path_is_recognised_and_never_gets_a_second_cache() {
    let mut fixture = Fixture::new();
    fixture.decorate = Some("fault:op=write".into());
    let disk = fixture.disk_left_with_a_block();
    std::fs::rename(&disk, fixture.path("moved")).unwrap();
    fixture.decorate = None;
    let daemon = fixture.daemon();
    let started = daemon.start_backend(0, &fixture.backend(&fixture.text("moved"))).unwrap();
    assert_eq!((started.backend_id, started.warnings.len()), (0, 0), "{:?}", started.warnings);
    fixture.block_is_there();
}

#[test]
fn a_disk_at_another_path_is_found_there_after_the_next_restart() {
    let fixture = Fixture::new();
    let disk = fixture.disk_left_with_a_block();
    std::fs::rename(&disk, fixture.path("moved")).unwrap();
    {
        let daemon = fixture.daemon();
        daemon.start_backend(0, &fixture.backend(&fixture.text("moved"))).unwrap();
    }
    let daemon = fixture.daemon();
    let backend = &daemon.backends(0, false).unwrap()[0];
    assert_eq!((backend.alive, backend.backend_path.as_str()), (true, fixture.text("moved").as_str()));
    fixture.block_is_there();
}

#[test]
fn a_disk_that_appears_after_the_start_is_served_without_a_command() {
    let fixture = Fixture::new();
    let disk = fixture.disk_left_with_a_block();
    std::fs::rename(&disk, fixture.path("elsewhere")).unwrap();
    let daemon = fixture.daemon();
    let backend = &daemon.backends(0, false).unwrap()[0];
    assert!(!backend.alive && backend.error.is_some());
    // Another disk at the path does not end the retries.
    fixture.disk("disk", 8 * MIB);
    let end = Instant::now() + Duration::from_secs(10);
    while !daemon.backends(0, false).unwrap()[0]
        .error
        .as_ref()
        .is_some_and(|error| error.contains("is not the disk"))
    {
        assert!(Instant::now() < end, "{:?}", daemon.backends(0, false));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(daemon.backends(0, false).unwrap()[0].retry_in_s.is_some());
    std::fs::rename(fixture.path("elsewhere"), &disk).unwrap();
    wait_until_served(&daemon);
    let backend = &daemon.backends(0, false).unwrap()[0];
    assert_eq!((backend.error.as_ref(), backend.retry_in_s, backend.blkdevs[0].alive), (None, None, true));
    fixture.block_is_there();
}

#[test]
fn a_disk_that_another_transport_knows_is_refused() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    {
        let daemon = fixture.daemon_with_region();
        let second = RegisterTransport { path: fixture.text("second"), ..fixture.region(32 * MIB) };
        assert_eq!(daemon.register_transport(&second).unwrap().transport_id, 1);
        daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
        refused(daemon.start_backend(1, &fixture.backend(&disk)), ErrorKind::AlreadyExists, "of transport 0");
    }
    std::fs::rename(&disk, fixture.path("moved")).unwrap();
    let daemon = fixture.daemon();
    let moved = fixture.backend(&fixture.text("moved"));
    refused(daemon.start_backend(1, &moved), ErrorKind::AlreadyExists, "start it there");
}
