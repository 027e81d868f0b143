//! Disks that refuse writes: dirty data is kept, listed, and dropped only by its exact size.

use crate::fixture::{Fixture, MIB, cache_of, dirty, refused, stop};
use cbd_backing::{BackingFile, DISK_TIMEOUT};
use cbd_daemon::api::{Drain, OnWriteError, SettingsChange, StartBackend, StopBackend};
use cbd_daemon::control::{Control, Flow};
use cbd_daemon::{config::Config, manager::Manager, state::StateDir};
use cbd_nbd::Listen;
use cbd_testkit::Client;
use cbd_types::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn a_stop_with_a_failing_disk_ends_in_time_and_keeps_dirty_data() {
    let mut fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    fixture.decorate = Some("fault:op=write".into());
    let bytes = {
        let daemon = fixture.daemon_with_region();
        daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
        fixture.client().write(MIB, &[9; 8192], true).unwrap();
        let request = StopBackend { timeout_s: Some(1), ..StopBackend::default() };
        let error = refused(stop(&daemon, request), ErrorKind::Backing, "--discard-dirty");
        let bytes = dirty(&daemon);
        assert!(bytes >= 8192, "{bytes}");
        assert!(error.line().contains(&bytes.to_string()), "{error}");
        // The backend and its device continue.
        let mut data = [0; 8192];
        fixture.client().read(MIB, &mut data).unwrap();
        assert_eq!(data, [9; 8192]);
        let status = daemon.status().unwrap();
        let cache = status.transports[0].backends[0].cache.clone().unwrap();
        assert!(cache.backing_errors > 0);
        assert!(cache.last_error.is_some());
        bytes
    };
    assert!(bytes > 0);
    // The disk was repaired.
    fixture.decorate = None;
    let daemon = fixture.daemon();
    stop(&daemon, StopBackend::default()).unwrap();
    let offset = usize::try_from(MIB).unwrap();
    assert_eq!(std::fs::read(&disk).unwrap()[offset..offset + 8192], [9; 8192]);
}

#[test]
fn dirty_data_is_dropped_only_when_its_exact_size_is_typed() {
    let mut fixture = Fixture::new();
    fixture.decorate = Some("fault:op=write".into());
    let (disk, daemon) = fixture.disk_and_daemon();
    fixture.write_block();
    let bytes = dirty(&daemon);
    for wrong in [0, bytes - 1, bytes + 1] {
        let request = StopBackend { discard_dirty: Some(wrong), ..StopBackend::default() };
        refused(stop(&daemon, request), ErrorKind::InvalidArgument, &bytes.to_string());
    }
    assert_eq!(dirty(&daemon), bytes);
    fixture.client().write(4096, &[9; 4096], true).unwrap();
    let bytes = dirty(&daemon);
    let done = stop(&daemon, StopBackend { discard_dirty: Some(bytes), ..StopBackend::default() }).unwrap();
    assert_eq!(done.discarded_bytes, bytes);
    assert!(daemon.backends(0, true).unwrap().is_empty());
    assert_eq!(std::fs::read(&disk).unwrap()[..4096], [0; 4096]);
}

#[test]
fn a_cancelled_stop_does_not_change_the_backend() {
    let mut fixture = Fixture::new();
    fixture.decorate = Some("fault:op=write".into());
    let (_, daemon) = fixture.disk_and_daemon();
    fixture.write_block();
    let cancelled = daemon.stop_backend(0, 0, &StopBackend::default(), &mut |_| Flow::Cancel);
    refused(cancelled, ErrorKind::Stopped, "cancelled");
    fixture.write_block();
    assert!(daemon.backends(0, false).unwrap()[0].alive);
}

#[test]
fn a_sector_that_can_never_be_written_is_parked_listed_and_dropped_only_by_name() {
    let mut fixture = Fixture::new();
    fixture.decorate = Some("fault:op=write,range=1049088-1049600".into());
    let (disk, daemon) = fixture.disk_and_daemon();
    let park = SettingsChange {
        on_write_error: Some(OnWriteError::Park),
        write_error_after_s: Some(0),
        ..SettingsChange::default()
    };
    daemon.set(0, 0, &park).unwrap();
    fixture.client().write(MIB, &[9; 8192], true).unwrap();
    let begun = Instant::now();
    let error = refused(stop(&daemon, StopBackend::default()), ErrorKind::Backing, "bytes 1049088..1049600");
    assert!(begun.elapsed() < Duration::from_secs(30));
    assert!(error.line().contains("--discard-dirty 512"), "{error}");
    let wait = Drain { wait: true, ..Drain::default() };
    refused(daemon.drain(0, &wait, &mut |_| Flow::Continue), ErrorKind::Backing, "refuses 1 ranges");
    // All other data is on the disk, and the device continues.
    let offset = usize::try_from(MIB).unwrap();
    let bytes = std::fs::read(&disk).unwrap();
    assert_eq!(
        (&bytes[offset..offset + 512], &bytes[offset + 1024..offset + 8192]),
        (&[9; 512][..], &[9; 7168][..])
    );
    let mut data = [0; 8192];
    fixture.client().read(MIB, &mut data).unwrap();
    assert_eq!(data, [9; 8192]);
    let cache = cache_of(&daemon);
    assert_eq!((cache.parked_bytes, cache.dirty_bytes, cache.parked[0].start), (512, 512, 1_049_088));
    assert!(cache.void.is_some() && cache.parked_error.is_some() && !cache.stalled);
    // The log outside the region does not call the disk crash-consistent either.
    let uuid = daemon.transports().unwrap()[0].uuid.clone();
    let state = StateDir::open(&fixture.path("state")).unwrap();
    let has_void = || state.recovery_points(&uuid).points.last().is_some_and(|point| point.void.is_some());
    while !has_void() {
        assert!(begun.elapsed() < Duration::from_secs(90), "{:?}", state.recovery_points(&uuid));
        std::thread::sleep(Duration::from_millis(50));
    }
    let request = StopBackend { discard_dirty: Some(512), ..StopBackend::default() };
    let done = stop(&daemon, request).unwrap();
    assert_eq!(done.discarded_bytes, 512);
    assert!(done.warnings[0].contains("bytes 1049088..1049600"), "{:?}", done.warnings);
    assert!(daemon.backends(0, true).unwrap().is_empty());
}

#[test]
fn parked_data_is_written_when_the_disk_is_repaired() {
    let mut fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    fixture.decorate = Some("fault:op=write,range=1049088-1049600".into());
    {
        let daemon = fixture.daemon_with_region();
        daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
        let park = SettingsChange {
            on_write_error: Some(OnWriteError::Park),
            write_error_after_s: Some(0),
            ..SettingsChange::default()
        };
        daemon.set(0, 0, &park).unwrap();
        fixture.client().write(MIB, &[9; 8192], true).unwrap();
        let wait = Drain { wait: true, ..Drain::default() };
        refused(daemon.drain(0, &wait, &mut |_| Flow::Continue), ErrorKind::Backing, "parked");
    }
    {
        let daemon = fixture.daemon();
        assert_eq!(cache_of(&daemon).parked_bytes, 512);
    }
    fixture.decorate = None;
    let daemon = fixture.daemon();
    stop(&daemon, StopBackend::default()).unwrap();
    let offset = usize::try_from(MIB).unwrap();
    assert_eq!(std::fs::read(&disk).unwrap()[offset..offset + 8192], [9; 8192]);
}

#[test]
fn a_disk_that_another_process_holds_at_the_start_delays_no_other() {
    let fixture = Fixture::new();
    let (disk, other) = (fixture.disk("disk", 8 * MIB), fixture.disk("other", 8 * MIB));
    {
        let daemon = fixture.daemon_with_region();
        let plain = StartBackend { start_dev: false, export: None, ..fixture.backend(&other) };
        // The first backend is the one whose disk will be busy.
        daemon.start_backend(0, &StartBackend { cache_size: Some(12 * MIB), ..plain }).unwrap();
        daemon
            .start_backend(0, &StartBackend { cache_size: Some(12 * MIB), ..fixture.backend(&disk) })
            .unwrap();
        fixture.write_block();
    }
    let held = BackingFile::open(&other, Default::default()).unwrap();
    let options = fixture.options();
    let state = StateDir::open(&options.paths.state_dir).unwrap();
    let manager = Arc::new(Manager::new(&options, Config::default(), state).unwrap());
    let restoring = Arc::clone(&manager);
    let begun = Instant::now();
    let restore = std::thread::spawn(move || restoring.restore().unwrap());
    let alive: Vec<bool> = manager.backends(0, false).unwrap().iter().map(|slot| slot.alive).collect();
    let answered = begun.elapsed();
    assert_eq!(alive, [false, true]);
    assert!(answered < DISK_TIMEOUT / 2, "the first answer came after {answered:?}");
    fixture.block_is_there();
    // The daemon waits for the disk, and serves it when it is free.
    assert!(!restore.is_finished());
    drop(held);
    let summary = restore.join().expect("all is back");
    assert_eq!(summary, "1 transports, 2 backends, 1 block devices");
    manager.stop();
}

#[test]
fn a_drain_of_two_disks_that_refuse_ranges_reports_both_at_once() {
    let mut fixture = Fixture::new();
    fixture.decorate = Some("fault:op=write,range=1049088-1049600".into());
    let daemon = fixture.daemon();
    daemon.register_transport(&fixture.region(64 * MIB)).unwrap();
    let park = SettingsChange {
        on_write_error: Some(OnWriteError::Park),
        write_error_after_s: Some(0),
        ..SettingsChange::default()
    };
    for (id, name) in [(0, "disk"), (1, "second")] {
        let socket = fixture.path(&format!("{name}.sock"));
        let request = StartBackend {
            export: Some(format!("nbd:unix:{}", socket.display())),
            ..fixture.backend(&fixture.disk(name, 8 * MIB))
        };
        daemon.start_backend(0, &request).unwrap();
        daemon.set(0, id, &park).unwrap();
        Client::connect(&Listen::Unix(socket)).unwrap().write(MIB, &[9; 8192], true).unwrap();
    }
    let drain = || {
        let request = Drain { wait: true, timeout_s: Some(20), ..Drain::default() };
        refused(daemon.drain(0, &request, &mut |_| Flow::Continue), ErrorKind::Backing, "2 of 2 backends")
    };
    drain();
    // Both have parked their ranges. The retry of the second ends while the first is waited for.
    let begun = Instant::now();
    let error = drain();
    assert_eq!(error.line().matches("refuses 1 ranges").count(), 2, "{error}");
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
}
