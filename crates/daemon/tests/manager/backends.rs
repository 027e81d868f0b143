//! Backends and block devices without errors: start, settings, stop, and restoring after a restart.

use crate::fixture::{Fixture, MIB, refused, stop};
use cbd_daemon::api::{
    BackendStarted, CacheMode, Consistency, Drain, Offload, OnWriteError, ReadFill, Readahead,
    SettingsChange, StartBackend, StopBackend, WhenFull,
};
use cbd_daemon::control::{Control, Flow};
use cbd_daemon::state::StateDir;
use cbd_engine::{Settings, Transport};
use cbd_pmem::{Mapping, OpenOptions};
use cbd_runtime::ProcessEnvironment;
use cbd_runtime::region::sync_region;
use cbd_types::{BackendId, ErrorKind, Region};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

#[test]
fn written_data_is_on_the_plain_disk_after_the_backend_was_stopped() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    let disk = fixture.disk("disk", 20 * MIB);
    let started: BackendStarted = daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    assert!(started.blkdev.unwrap().dev_name.starts_with("nbd+unix:///cbd0?socket="));
    let mut client = fixture.client();
    for block in 0..1000u64 {
        client.write(block * 16384 % (20 * MIB - 4096), &[(block % 251) as u8; 4096], false).unwrap();
    }
    drop(client);
    stop(&daemon, StopBackend::default()).unwrap();
    let file = std::fs::File::open(&disk).unwrap();
    let mut block = [0; 4096];
    file.read_exact_at(&mut block, 999 * 16384 % (20 * MIB - 4096)).unwrap();
    assert_eq!(block, [(999 % 251) as u8; 4096]);
    assert!(daemon.backends(0, true).unwrap().is_empty());
    assert!(daemon.blkdevs(0, true).unwrap().is_empty());
    assert_eq!(std::fs::metadata(&disk).unwrap().len(), 20 * MIB);
}

#[test]
fn all_objects_are_restored_after_a_restart_under_their_numbers() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    {
        let daemon = fixture.daemon_with_region();
        daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
        fixture.client().write(4096, b"sixteen bytes...".repeat(32).as_slice(), true).unwrap();
    }
    for _ in 0..10 {
        let daemon = fixture.daemon();
        assert_eq!(daemon.summary, "1 transports, 1 backends, 1 block devices");
        let blkdevs = daemon.blkdevs(0, false).unwrap();
        assert_eq!((blkdevs[0].blkdev_id, blkdevs[0].alive), (0, true));
        let mut data = [0; 512];
        fixture.client().read(4096, &mut data).unwrap();
        assert_eq!(&data[..16], b"sixteen bytes...");
    }
}

#[test]
fn settings_survive_a_restart() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let change = SettingsChange {
        gc_percent: Some(42),
        consistency: Some(Consistency::Checkpoint),
        writeback_rate: Some(1 << 30),
        writeback_percent: Some(7),
        on_write_error: Some(OnWriteError::Park),
        write_error_after_s: Some(5),
        cache_mode: Some(CacheMode::Writearound),
        read_fill: Some(ReadFill::All),
        sequential_read_cutoff: Some(0),
        readahead: Some(Readahead::Off),
        sequential_write_cutoff: Some(2 << 20),
        when_full: Some(WhenFull::Around),
        congestion_read_us: Some(2000),
        congestion_write_us: Some(20_000),
        pin_percent: Some(30),
        metadata_min_percent: Some(20),
        metadata_max_percent: Some(80),
        read_latency_target_us: Some(5000),
        writeback_pause_s: Some(600),
        scrub_every_s: Some(86_400),
        scrub_window: Some("22:00-06:00".into()),
        scrub_rate: Some(50 << 20),
        scrub_idle_only: Some(true),
        offload: Some(Offload::Never),
        recovery_point_max_age_s: Some(90),
        name: Some("db-data".into()),
    };
    {
        let daemon = fixture.daemon_with_region();
        daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
        daemon.set(0, 0, &change).unwrap();
    }
    let daemon = fixture.daemon();
    let settings = daemon.set(0, 0, &SettingsChange::default()).unwrap();
    assert_eq!(settings.gc_percent, 42);
    let scrub = daemon.scrub(0, 0).unwrap();
    assert_eq!(scrub.method.as_deref(), Some("reads (it is a file)"));
    let scrub = scrub.settings;
    assert_eq!((scrub.scrub_every_s, scrub.scrub_window.as_str()), (86_400, "22:00-06:00"));
    assert_eq!((scrub.scrub_rate, scrub.scrub_idle_only), (50 << 20, true));
    assert_eq!((scrub.offload, scrub.recovery_point_max_age_s), (Offload::Never, 90));
    assert_eq!(daemon.backends(0, false).unwrap()[0].name.as_deref(), Some("db-data"));
    assert_eq!(settings.consistency, Consistency::Checkpoint);
    assert_eq!(settings.writeback_rate, 1 << 30);
    assert_eq!(settings.writeback_percent, 7);
    assert_eq!((settings.on_write_error, settings.write_error_after_s), (OnWriteError::Park, 5));
    assert_eq!(settings.cache_mode, CacheMode::Writearound);
    assert_eq!((settings.read_fill, settings.readahead), (ReadFill::All, Readahead::Off));
    assert_eq!((settings.sequential_read_cutoff, settings.sequential_write_cutoff), (0, 2 << 20));
    assert_eq!(settings.when_full, WhenFull::Around);
    assert_eq!((settings.congestion_read_us, settings.congestion_write_us), (2000, 20_000));
    assert_eq!((settings.read_latency_target_us, settings.pin_percent), (5000, 30));
    assert!(settings.writeback_paused_until_ms > 0);
    let resumed = SettingsChange { writeback_pause_s: Some(0), ..SettingsChange::default() };
    assert_eq!(daemon.set(0, 0, &resumed).unwrap().writeback_paused_until_ms, 0);
    assert_eq!(daemon.backends(0, false).unwrap()[0].cache_gc_percent, 42);
}

#[test]
fn a_setting_out_of_its_limits_changes_nothing() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let daemon = fixture.daemon_with_region();
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    for gc_percent in [99, -1, 256] {
        let change = SettingsChange { gc_percent: Some(gc_percent), ..SettingsChange::default() };
        refused(daemon.set(0, 0, &change), ErrorKind::InvalidArgument, "gc_percent");
    }
    let change = SettingsChange { writeback_rate: Some(1), ..SettingsChange::default() };
    refused(daemon.set(0, 0, &change), ErrorKind::InvalidArgument, "writeback_rate is 1 ");
    let settings = daemon.set(0, 0, &SettingsChange::default()).unwrap();
    assert_eq!((settings.gc_percent, settings.writeback_rate), (97, 0));
}

#[test]
fn a_rate_that_an_earlier_version_stored_is_kept_although_it_would_be_refused_now() {
    let fixture = Fixture::new();
    fixture.disk_left_with_a_block();
    {
        let region = Region::new(Mapping::open(fixture.path("region"), &OpenOptions::default()).unwrap());
        let transport = Transport::open(Arc::new(ProcessEnvironment::new()), region).unwrap();
        let settings = transport.backend(BackendId(0)).unwrap().settings;
        transport.update_settings(BackendId(0), Settings { writeback_rate: 1, ..settings }).unwrap();
        sync_region(&transport, "of this test").unwrap();
    }
    let daemon = fixture.daemon();
    assert_eq!(daemon.summary, "1 transports, 1 backends, 1 block devices");
    fixture.block_is_there();
    let change = SettingsChange { gc_percent: Some(50), ..SettingsChange::default() };
    let settings = daemon.set(0, 0, &change).unwrap();
    assert_eq!((settings.gc_percent, settings.writeback_rate), (50, 1));
}

#[test]
fn options_of_a_backend_are_not_changed_by_starting_it_again() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    {
        let daemon = fixture.daemon_with_region();
        daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    }
    std::fs::rename(&disk, fixture.path("away")).unwrap();
    let daemon = fixture.daemon();
    std::fs::rename(fixture.path("away"), &disk).unwrap();
    let other = StartBackend { data_crc: Some(false), ..fixture.backend(&disk) };
    refused(daemon.start_backend(0, &other), ErrorKind::InvalidArgument, "made with data-crc on");
    let other = StartBackend { cache_size: Some(24 * MIB), ..fixture.backend(&disk) };
    refused(daemon.start_backend(0, &other), ErrorKind::InvalidArgument, "a cache of 16 MiB");
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
}

#[test]
fn a_backend_without_a_cache_passes_all_requests_through() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let daemon = fixture.daemon_with_region();
    daemon.start_backend(0, &StartBackend { cache_size: None, ..fixture.backend(&disk) }).unwrap();
    let mut client = fixture.client();
    client.write(8192, &[5; 4096], true).unwrap();
    assert_eq!(std::fs::read(&disk).unwrap()[8192..12288], [5; 4096]);
    drop(client);
    assert!(daemon.status().unwrap().transports[0].backends[0].cache.is_none());
    refused(daemon.set(0, 0, &SettingsChange::default()), ErrorKind::InvalidArgument, "no cache");
    stop(&daemon, StopBackend::default()).unwrap();
}

#[test]
fn a_checkpoint_writes_all_earlier_data_to_the_backing_device() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let daemon = fixture.daemon_with_region();
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    fixture.client().write(12288, &[6; 4096], false).unwrap();
    let request = Drain { backend: None, wait: true, timeout_s: Some(20), ..Drain::default() };
    daemon.checkpoint(0, &request, &mut |_| Flow::Continue).unwrap();
    assert_eq!(std::fs::read(&disk).unwrap()[12288..16384], [6; 4096]);
}

#[test]
fn recovery_points_outlive_the_region() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let uuid = {
        let daemon = fixture.daemon_with_region();
        daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
        fixture.client().write(0, &[6; 4096], true).unwrap();
        daemon.drain(0, &Drain::default(), &mut |_| Flow::Continue).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(2500));
        daemon.transports().unwrap()[0].uuid.clone()
    };
    std::fs::remove_file(fixture.path("region")).unwrap();
    let points = StateDir::open(&fixture.path("state")).unwrap().recovery_points(&uuid).points;
    let last = points.last().expect("a recovery point");
    assert_eq!((last.backend_id, last.path.as_str()), (0, disk.as_str()));
    assert!(last.drained_epoch > 0);
}

#[test]
fn metrics_name_every_backend() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let daemon = fixture.daemon_with_region();
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    let text = cbd_daemon::metrics::render(&daemon.status().unwrap());
    assert!(
        text.contains(&format!("cbd_backend_up{{transport=\"0\",backend=\"0\",path=\"{disk}\"}} 1")),
        "{text}"
    );
    assert!(text.contains("cbd_cache_dirty_bytes{"), "{text}");
    let names = text.lines().filter(|line| !line.starts_with('#')).all(|line| line.starts_with("cbd_"));
    assert!(names);
}

#[test]
fn the_segments_of_a_cache_are_those_that_can_hold_a_log_wherever_they_are_counted() {
    let fixture = Fixture::new();
    let (disk, daemon) = fixture.disk_and_daemon();
    fixture.write_block();
    let status = daemon.status().unwrap().transports.remove(0).backends.remove(0);
    let free = status.cache.as_ref().expect("a cache").free_segments;
    assert!(status.info.cache_used_segs > 0);
    assert_eq!(status.info.cache_used_segs + free, status.info.cache_segs);
    let unit = serde_json::to_value(&status).unwrap()["atomic_unit"].clone();
    assert!(unit.as_u64().is_some_and(|unit| unit >= 4096), "{unit}");
    drop(daemon);
    std::fs::rename(&disk, fixture.path("away")).unwrap();
    let daemon = fixture.daemon();
    let down = daemon.status().unwrap().transports.remove(0).backends.remove(0);
    assert!(!down.info.alive);
    assert_eq!(down.info.cache_segs, status.info.cache_segs);
    let unit = serde_json::to_value(&down).unwrap().get("atomic_unit").cloned();
    assert_eq!(unit, None, "it is not known while the disk is not open");
}
