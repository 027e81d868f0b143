//! The manager over regions in files, with NBD as the door: what comes, what comes back, what is refused.

use cbd_daemon::api::{
    BackendStarted, CacheInfo, Consistency, Drain, OnWriteError, RegisterTransport, SettingsChange,
    StartBackend, StartBlkdev, StopBackend, StopBlkdev,
};
use cbd_daemon::config::Config;
use cbd_daemon::control::{Control, Flow};
use cbd_daemon::logging::LogFormat;
use cbd_daemon::manager::Manager;
use cbd_daemon::paths::{PathChoices, Paths};
use cbd_daemon::run::Options;
use cbd_daemon::state::StateDir;
use cbd_nbd::{Client, Listen};
use cbd_types::{Error, ErrorKind, Result};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

struct Place {
    folder: tempfile::TempDir,
    decorate: Option<String>,
    require_persistent: bool,
}

impl Place {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), decorate: None, require_persistent: false }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn disk(&self, name: &str, size: u64) -> String {
        let file = std::fs::File::create(self.path(name)).unwrap();
        file.set_len(size).unwrap();
        self.text(name)
    }

    fn options(&self) -> Options {
        Options {
            paths: Paths::choose(PathChoices {
                config: Some(self.path("cbd.toml")),
                state_dir: Some(self.path("state")),
                run_dir: Some(self.path("run")),
                socket: None,
                dev_dir: Some(self.path("dev")),
            }),
            require_persistent: self.require_persistent,
            decorate: self.decorate.clone(),
            log_format: LogFormat::Text,
            verbose: false,
        }
    }

    fn try_daemon(&self) -> Result<Running> {
        std::fs::create_dir_all(self.path("dev")).unwrap();
        let options = self.options();
        let state = StateDir::open(&options.paths.state_dir)?;
        let manager = Arc::new(Manager::new(&options, Config::default(), state)?);
        let summary = manager.restore()?;
        Ok(Running { manager, summary })
    }

    fn daemon(&self) -> Running {
        self.try_daemon().unwrap()
    }

    /// A daemon with a region of 32 MiB.
    fn daemon_with_region(&self) -> Running {
        let daemon = self.daemon();
        daemon.register_transport(&self.region(32 * MIB)).unwrap();
        daemon
    }

    fn region(&self, size: u64) -> RegisterTransport {
        RegisterTransport {
            host: "node0".into(),
            path: self.text("region"),
            size: Some(size),
            segment_size: None,
            format: true,
            force: false,
        }
    }

    fn backend(&self, disk: &str) -> StartBackend {
        StartBackend {
            path: disk.to_owned(),
            cache_size: Some(16 * MIB),
            start_dev: true,
            export: Some(self.export()),
            ..StartBackend::default()
        }
    }

    fn export(&self) -> String {
        format!("nbd:unix:{}", self.text("nbd.sock"))
    }

    fn client(&self) -> Client {
        Client::connect(&Listen::Unix(self.path("nbd.sock"))).unwrap()
    }
}

/// A daemon that ends with its test.
struct Running {
    manager: Arc<Manager>,
    summary: String,
}

impl std::ops::Deref for Running {
    type Target = Manager;

    fn deref(&self) -> &Manager {
        &self.manager
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.manager.stop();
    }
}

fn stop(daemon: &Manager, request: StopBackend) -> Result<cbd_daemon::api::Done> {
    daemon.stop_backend(0, 0, &request, &mut |_| Flow::Continue)
}

fn dirty(daemon: &Manager) -> u64 {
    let status = daemon.status().unwrap();
    status.transports[0].backends[0].cache.as_ref().unwrap().dirty_bytes
}

#[track_caller]
fn refused<T>(result: Result<T>, kind: ErrorKind, part: &str) -> Error {
    let error = result.err().expect("it was not refused");
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.line().contains(part), "{error}");
    error
}

#[test]
fn what_is_written_is_on_the_plain_disk_after_the_backend_was_stopped() {
    let place = Place::new();
    let daemon = place.daemon_with_region();
    let disk = place.disk("disk", 20 * MIB);
    let started: BackendStarted = daemon.start_backend(0, &place.backend(&disk)).unwrap();
    assert!(started.blkdev.unwrap().dev_name.starts_with("nbd+unix:///cbd0?socket="));
    let mut client = place.client();
    for block in 0..1000u64 {
        client.write(block * 16384 % (20 * MIB - 4096), &[(block % 251) as u8; 4096], false).unwrap();
    }
    drop(client);
    let mut seen = 0;
    daemon
        .stop_backend(0, 0, &StopBackend::default(), &mut |progress| {
            seen = seen.max(progress.dirty_bytes_at_start);
            Flow::Continue
        })
        .unwrap();
    let file = std::fs::File::open(&disk).unwrap();
    let mut block = [0; 4096];
    file.read_exact_at(&mut block, 999 * 16384 % (20 * MIB - 4096)).unwrap();
    assert_eq!(block, [(999 % 251) as u8; 4096]);
    assert!(daemon.backends(0, true).unwrap().is_empty());
    assert!(daemon.blkdevs(0, true).unwrap().is_empty());
    assert_eq!(std::fs::metadata(&disk).unwrap().len(), 20 * MIB);
}

#[test]
fn everything_comes_back_after_a_restart_under_its_number() {
    let place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    {
        let daemon = place.daemon_with_region();
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
        place.client().write(4096, b"sixteen bytes...".repeat(32).as_slice(), true).unwrap();
    }
    for _ in 0..10 {
        let daemon = place.daemon();
        assert_eq!(daemon.summary, "1 transports, 1 backends, 1 block devices");
        let blkdevs = daemon.blkdevs(0, false).unwrap();
        assert_eq!((blkdevs[0].blkdev_id, blkdevs[0].alive), (0, true));
        let mut data = [0; 512];
        place.client().read(4096, &mut data).unwrap();
        assert_eq!(&data[..16], b"sixteen bytes...");
    }
}

#[test]
fn settings_survive_a_restart() {
    let place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    let change = SettingsChange {
        gc_percent: Some(42),
        consistency: Some(Consistency::Checkpoint),
        writeback_rate: Some(1 << 30),
        writeback_percent: Some(7),
        on_write_error: Some(OnWriteError::Park),
        write_error_after_s: Some(5),
    };
    {
        let daemon = place.daemon_with_region();
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
        daemon.set(0, 0, &change).unwrap();
    }
    let daemon = place.daemon();
    let settings = daemon.set(0, 0, &SettingsChange::default()).unwrap();
    assert_eq!(settings.gc_percent, 42);
    assert_eq!(settings.consistency, Consistency::Checkpoint);
    assert_eq!(settings.writeback_rate, 1 << 30);
    assert_eq!(settings.writeback_percent, 7);
    assert_eq!((settings.on_write_error, settings.write_error_after_s), (OnWriteError::Park, 5));
    assert_eq!(daemon.backends(0, false).unwrap()[0].cache_gc_percent, 42);
}

#[test]
fn a_setting_out_of_its_limits_changes_nothing() {
    let place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    let daemon = place.daemon_with_region();
    daemon.start_backend(0, &place.backend(&disk)).unwrap();
    for gc_percent in [91, -1, 256] {
        let change = SettingsChange { gc_percent: Some(gc_percent), ..SettingsChange::default() };
        refused(daemon.set(0, 0, &change), ErrorKind::InvalidArgument, "gc_percent");
    }
    assert_eq!(daemon.set(0, 0, &SettingsChange::default()).unwrap().gc_percent, 70);
}

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
fn a_refused_format_leaves_the_file_as_it_was() {
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
fn a_region_is_registered_once_and_held() {
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
fn a_transport_with_backends_is_not_left() {
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
fn ids_that_are_not_there_are_refused() {
    let place = Place::new();
    let daemon = place.daemon_with_region();
    let disk = place.disk("disk", 8 * MIB);
    refused(daemon.hosts(7), ErrorKind::NotFound, "no transport 7");
    refused(daemon.start_backend(7, &place.backend(&disk)), ErrorKind::NotFound, "no transport 7");
    refused(stop(&daemon, StopBackend::default()), ErrorKind::NotFound, "no backend 0");
    refused(daemon.set(0, 3, &SettingsChange::default()), ErrorKind::NotFound, "no backend 3");
    let blkdev = StartBlkdev { backend: 5, export: Some(place.export()) };
    refused(daemon.start_blkdev(0, &blkdev), ErrorKind::NotFound, "no backend 5");
    refused(daemon.stop_blkdev(0, 5, StopBlkdev::default()), ErrorKind::NotFound, "no block device 5");
    let drain = Drain { backend: Some(4), ..Drain::default() };
    refused(daemon.drain(0, &drain, &mut |_| Flow::Continue), ErrorKind::NotFound, "no backend 4");
}

#[test]
fn bad_backends_are_refused_and_leave_nothing() {
    let place = Place::new();
    let daemon = place.daemon_with_region();
    let disk = place.disk("disk", 8 * MIB);
    let free = daemon.transports().unwrap()[0].free_segments;
    let with = |change: fn(&mut StartBackend)| {
        let mut request = place.backend(&disk);
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
    std::fs::write(place.path("empty"), b"").unwrap();
    let empty = place.backend(&place.text("empty"));
    assert!(start(&empty).is_err());
    assert_eq!(daemon.transports().unwrap()[0].free_segments, free);
    assert!(daemon.backends(0, true).unwrap().is_empty());
    assert!(daemon.blkdevs(0, true).unwrap().is_empty());
    start(&place.backend(&disk)).unwrap();
}

#[test]
fn the_same_disk_is_a_backend_once() {
    let place = Place::new();
    let daemon = place.daemon_with_region();
    let disk = place.disk("disk", 8 * MIB);
    daemon
        .start_backend(0, &StartBackend { start_dev: false, export: None, ..place.backend(&disk) })
        .unwrap();
    std::fs::hard_link(&disk, place.path("other-name")).unwrap();
    for path in ["disk", "other-name"] {
        let again = place.backend(&place.text(path));
        refused(daemon.start_backend(0, &again), ErrorKind::AlreadyExists, "backend 0");
    }
}

#[test]
fn a_backend_has_one_block_device() {
    let place = Place::new();
    let daemon = place.daemon_with_region();
    let disk = place.disk("disk", 8 * MIB);
    daemon.start_backend(0, &place.backend(&disk)).unwrap();
    let second = StartBlkdev { backend: 0, export: Some(format!("nbd:unix:{}", place.text("second.sock"))) };
    refused(daemon.start_blkdev(0, &second), ErrorKind::Busy, "has a block device already");
    daemon.stop_blkdev(0, 0, StopBlkdev::default()).unwrap();
    refused(daemon.stop_blkdev(0, 0, StopBlkdev::default()), ErrorKind::NotFound, "no block device 0");
    daemon.start_blkdev(0, &second).unwrap();
}

#[test]
fn a_device_that_is_open_is_not_stopped_but_by_force() {
    let place = Place::new();
    let daemon = place.daemon_with_region();
    let disk = place.disk("disk", 8 * MIB);
    daemon.start_backend(0, &place.backend(&disk)).unwrap();
    let mut client = place.client();
    refused(daemon.stop_blkdev(0, 0, StopBlkdev::default()), ErrorKind::Busy, "NBD client");
    refused(stop(&daemon, StopBackend::default()), ErrorKind::Busy, "NBD client");
    client.write(0, &[7; 4096], true).unwrap();
    stop(&daemon, StopBackend { force: true, ..StopBackend::default() }).unwrap();
    assert!(client.write(0, &[8; 4096], false).is_err());
    assert_eq!(std::fs::read(&disk).unwrap()[..4096], [7; 4096]);
}

#[test]
fn a_disk_that_fails_ends_the_stop_in_time_and_keeps_what_is_dirty() {
    let mut place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    place.decorate = Some("fault:op=write".into());
    let bytes = {
        let daemon = place.daemon_with_region();
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
        place.client().write(MIB, &[9; 8192], true).unwrap();
        let request = StopBackend { timeout_s: Some(1), ..StopBackend::default() };
        let error = refused(stop(&daemon, request), ErrorKind::Backing, "--discard-dirty");
        let bytes = dirty(&daemon);
        assert!(bytes >= 8192, "{bytes}");
        assert!(error.line().contains(&bytes.to_string()), "{error}");
        // The backend goes on, and so does its device.
        let mut data = [0; 8192];
        place.client().read(MIB, &mut data).unwrap();
        assert_eq!(data, [9; 8192]);
        let status = daemon.status().unwrap();
        let cache = status.transports[0].backends[0].cache.clone().unwrap();
        assert!(cache.backing_errors > 0);
        assert!(cache.last_error.is_some());
        bytes
    };
    assert!(bytes > 0);
    // The disk was put right.
    place.decorate = None;
    let daemon = place.daemon();
    stop(&daemon, StopBackend::default()).unwrap();
    let offset = usize::try_from(MIB).unwrap();
    assert_eq!(std::fs::read(&disk).unwrap()[offset..offset + 8192], [9; 8192]);
}

#[test]
fn dirty_data_is_dropped_only_when_its_exact_size_is_typed() {
    let mut place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    place.decorate = Some("fault:op=write".into());
    let daemon = place.daemon_with_region();
    daemon.start_backend(0, &place.backend(&disk)).unwrap();
    place.client().write(0, &[9; 4096], true).unwrap();
    let bytes = dirty(&daemon);
    for wrong in [0, bytes - 1, bytes + 1] {
        let request = StopBackend { discard_dirty: Some(wrong), ..StopBackend::default() };
        refused(stop(&daemon, request), ErrorKind::InvalidArgument, &bytes.to_string());
    }
    assert_eq!(dirty(&daemon), bytes);
    place.client().write(4096, &[9; 4096], true).unwrap();
    let bytes = dirty(&daemon);
    let done = stop(&daemon, StopBackend { discard_dirty: Some(bytes), ..StopBackend::default() }).unwrap();
    assert_eq!(done.discarded_bytes, bytes);
    assert!(daemon.backends(0, true).unwrap().is_empty());
    assert_eq!(std::fs::read(&disk).unwrap()[..4096], [0; 4096]);
}

#[test]
fn a_cancelled_stop_leaves_the_backend_as_it_was() {
    let mut place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    place.decorate = Some("fault:op=write".into());
    let daemon = place.daemon_with_region();
    daemon.start_backend(0, &place.backend(&disk)).unwrap();
    place.client().write(0, &[9; 4096], true).unwrap();
    let cancelled = daemon.stop_backend(0, 0, &StopBackend::default(), &mut |_| Flow::Cancel);
    refused(cancelled, ErrorKind::Stopped, "cancelled");
    place.client().write(0, &[9; 4096], true).unwrap();
    assert!(daemon.backends(0, false).unwrap()[0].alive);
}

#[test]
fn another_disk_in_the_place_of_ours_is_refused_with_both_identities() {
    let place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    {
        let daemon = place.daemon_with_region();
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
        place.client().write(0, &[9; 4096], true).unwrap();
    }
    std::fs::rename(&disk, place.path("ours")).unwrap();
    place.disk("disk", 8 * MIB);
    {
        let daemon = place.daemon();
        assert_eq!(
            daemon.summary,
            "1 transports, 0 backends, 0 block devices, 2 NOT SERVED (see cbdctrl status)"
        );
        let backend = &daemon.backends(0, false).unwrap()[0];
        assert!(!backend.alive);
        let error = backend.error.clone().unwrap();
        assert!(error.contains("is not the disk that it was"), "{error}");
        assert!(error.matches("size=").count() >= 2, "{error}");
        refused(daemon.start_backend(0, &place.backend(&disk)), ErrorKind::Exchanged, "is not the disk");
        // Ours comes back: starting it again goes on where it was.
        std::fs::rename(place.path("ours"), &disk).unwrap();
        let started = daemon.start_backend(0, &place.backend(&disk)).unwrap();
        assert_eq!((started.backend_id, started.blkdev.unwrap().alive), (0, true));
        let mut data = [0; 4096];
        place.client().read(0, &mut data).unwrap();
        assert_eq!(data, [9; 4096]);
    }
}

#[test]
fn a_disk_that_is_not_there_keeps_what_is_dirty_until_it_is_back_or_given_up() {
    let mut place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    place.decorate = Some("fault:op=write".into());
    {
        let daemon = place.daemon_with_region();
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
        place.client().write(0, &[9; 4096], true).unwrap();
    }
    std::fs::remove_file(&disk).unwrap();
    let daemon = place.daemon();
    let error = refused(stop(&daemon, StopBackend::default()), ErrorKind::Stopped, "--discard-dirty");
    let line = error.line();
    let bytes: u64 = line.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(bytes >= 4096);
    stop(&daemon, StopBackend { discard_dirty: Some(bytes), ..StopBackend::default() }).unwrap();
    assert!(daemon.backends(0, true).unwrap().is_empty());
}

#[test]
fn a_shrunk_disk_is_refused() {
    let place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    {
        let daemon = place.daemon_with_region();
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
    }
    std::fs::OpenOptions::new().write(true).open(&disk).unwrap().set_len(4 * MIB).unwrap();
    let daemon = place.daemon();
    let error = daemon.backends(0, false).unwrap()[0].error.clone().unwrap();
    assert!(error.contains("shrunk"), "{error}");
}

#[test]
fn options_of_a_backend_are_not_changed_by_starting_it_again() {
    let place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    {
        let daemon = place.daemon_with_region();
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
    }
    std::fs::rename(&disk, place.path("away")).unwrap();
    let daemon = place.daemon();
    std::fs::rename(place.path("away"), &disk).unwrap();
    let other = StartBackend { data_crc: Some(false), ..place.backend(&disk) };
    refused(daemon.start_backend(0, &other), ErrorKind::InvalidArgument, "made with data-crc on");
    let other = StartBackend { cache_size: Some(24 * MIB), ..place.backend(&disk) };
    refused(daemon.start_backend(0, &other), ErrorKind::InvalidArgument, "a cache of 16 MiB");
    daemon.start_backend(0, &place.backend(&disk)).unwrap();
}

#[test]
fn a_region_that_is_lost_keeps_the_transport_and_says_why() {
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
        // It is there again: registering it goes on under its number.
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

#[test]
fn a_backend_without_a_cache_passes_everything_through() {
    let place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    let daemon = place.daemon_with_region();
    daemon.start_backend(0, &StartBackend { cache_size: None, ..place.backend(&disk) }).unwrap();
    let mut client = place.client();
    client.write(8192, &[5; 4096], true).unwrap();
    assert_eq!(std::fs::read(&disk).unwrap()[8192..12288], [5; 4096]);
    drop(client);
    assert!(daemon.status().unwrap().transports[0].backends[0].cache.is_none());
    refused(daemon.set(0, 0, &SettingsChange::default()), ErrorKind::InvalidArgument, "no cache");
    stop(&daemon, StopBackend::default()).unwrap();
}

#[test]
fn a_checkpoint_brings_the_backing_device_up_to_now() {
    let place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    let daemon = place.daemon_with_region();
    daemon.start_backend(0, &place.backend(&disk)).unwrap();
    place.client().write(12288, &[6; 4096], false).unwrap();
    let request = Drain { backend: None, wait: true, timeout_s: Some(20) };
    daemon.checkpoint(0, &request, &mut |_| Flow::Continue).unwrap();
    assert_eq!(std::fs::read(&disk).unwrap()[12288..16384], [6; 4096]);
}

#[test]
fn recovery_points_outlive_the_region() {
    let place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    let uuid = {
        let daemon = place.daemon_with_region();
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
        place.client().write(0, &[6; 4096], true).unwrap();
        daemon.drain(0, &Drain::default(), &mut |_| Flow::Continue).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(2500));
        daemon.transports().unwrap()[0].uuid.clone()
    };
    std::fs::remove_file(place.path("region")).unwrap();
    let points = StateDir::open(&place.path("state")).unwrap().recovery_points(&uuid);
    let last = points.last().expect("a recovery point");
    assert_eq!((last.backend_id, last.path.as_str()), (0, disk.as_str()));
    assert!(last.drained_epoch > 0);
}

#[test]
fn metrics_name_every_backend() {
    let place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    let daemon = place.daemon_with_region();
    daemon.start_backend(0, &place.backend(&disk)).unwrap();
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
fn a_disk_that_has_moved_is_recognised_and_never_gets_a_second_cache() {
    let mut place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    place.decorate = Some("fault:op=write".into());
    {
        let daemon = place.daemon_with_region();
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
        place.client().write(0, &[9; 4096], true).unwrap();
    }
    std::fs::rename(&disk, place.path("moved")).unwrap();
    place.decorate = None;
    let daemon = place.daemon();
    let started = daemon.start_backend(0, &place.backend(&place.text("moved"))).unwrap();
    assert_eq!((started.backend_id, started.warnings.len()), (0, 0), "{:?}", started.warnings);
    let mut data = [0; 4096];
    place.client().read(0, &mut data).unwrap();
    assert_eq!(data, [9; 4096]);
}

#[test]
fn a_disk_that_has_moved_is_found_at_its_new_place_after_the_next_restart() {
    let place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    {
        let daemon = place.daemon_with_region();
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
        place.client().write(0, &[9; 4096], true).unwrap();
    }
    std::fs::rename(&disk, place.path("moved")).unwrap();
    {
        let daemon = place.daemon();
        daemon.start_backend(0, &place.backend(&place.text("moved"))).unwrap();
    }
    let daemon = place.daemon();
    let backend = &daemon.backends(0, false).unwrap()[0];
    assert_eq!((backend.alive, backend.backend_path.as_str()), (true, place.text("moved").as_str()));
    let mut data = [0; 4096];
    place.client().read(0, &mut data).unwrap();
    assert_eq!(data, [9; 4096]);
}

/// Waits until the first backend is served, at most ten seconds.
fn wait_until_served(daemon: &Manager) {
    let end = Instant::now() + Duration::from_secs(10);
    while !daemon.backends(0, false).unwrap()[0].alive {
        assert!(Instant::now() < end, "{:?}", daemon.backends(0, false));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_disk_that_comes_later_than_the_daemon_is_served_by_itself() {
    let place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    {
        let daemon = place.daemon_with_region();
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
        place.client().write(0, &[9; 4096], true).unwrap();
    }
    std::fs::rename(&disk, place.path("elsewhere")).unwrap();
    let daemon = place.daemon();
    let backend = &daemon.backends(0, false).unwrap()[0];
    assert!(!backend.alive && backend.error.is_some());
    // Another disk at the path is no reason to give up.
    place.disk("disk", 8 * MIB);
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
    std::fs::rename(place.path("elsewhere"), &disk).unwrap();
    wait_until_served(&daemon);
    let backend = &daemon.backends(0, false).unwrap()[0];
    assert_eq!((backend.error.as_ref(), backend.retry_in_s, backend.blkdevs[0].alive), (None, None, true));
    let mut data = [0; 4096];
    place.client().read(0, &mut data).unwrap();
    assert_eq!(data, [9; 4096]);
}

/// What the first cache says of itself.
fn cache_of(daemon: &Manager) -> CacheInfo {
    daemon.status().unwrap().transports[0].backends[0].cache.clone().unwrap()
}

#[test]
fn a_sector_that_can_never_be_written_is_parked_listed_and_dropped_only_by_name() {
    let mut place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    place.decorate = Some("fault:op=write,range=1049088-1049600".into());
    let daemon = place.daemon_with_region();
    daemon.start_backend(0, &place.backend(&disk)).unwrap();
    let park = SettingsChange {
        on_write_error: Some(OnWriteError::Park),
        write_error_after_s: Some(0),
        ..SettingsChange::default()
    };
    daemon.set(0, 0, &park).unwrap();
    place.client().write(MIB, &[9; 8192], true).unwrap();
    let begun = Instant::now();
    let error = refused(stop(&daemon, StopBackend::default()), ErrorKind::Backing, "bytes 1049088..1049600");
    assert!(begun.elapsed() < Duration::from_secs(30));
    assert!(error.line().contains("--discard-dirty 512"), "{error}");
    let wait = Drain { wait: true, ..Drain::default() };
    refused(daemon.drain(0, &wait, &mut |_| Flow::Continue), ErrorKind::Backing, "refuses 1 ranges");
    // Everything else is on the disk, and the device goes on.
    let offset = usize::try_from(MIB).unwrap();
    let bytes = std::fs::read(&disk).unwrap();
    assert_eq!(
        (&bytes[offset..offset + 512], &bytes[offset + 1024..offset + 8192]),
        (&[9; 512][..], &[9; 7168][..])
    );
    let mut data = [0; 8192];
    place.client().read(MIB, &mut data).unwrap();
    assert_eq!(data, [9; 8192]);
    let cache = cache_of(&daemon);
    assert_eq!((cache.parked_bytes, cache.dirty_bytes, cache.parked[0].start), (512, 512, 1_049_088));
    assert!(cache.void.is_some() && cache.parked_error.is_some() && !cache.stalled);
    let request = StopBackend { discard_dirty: Some(512), ..StopBackend::default() };
    let done = stop(&daemon, request).unwrap();
    assert_eq!(done.discarded_bytes, 512);
    assert!(done.warnings[0].contains("bytes 1049088..1049600"), "{:?}", done.warnings);
    assert!(daemon.backends(0, true).unwrap().is_empty());
}

#[test]
fn what_is_parked_is_written_when_the_disk_is_put_right() {
    let mut place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    place.decorate = Some("fault:op=write,range=1049088-1049600".into());
    {
        let daemon = place.daemon_with_region();
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
        let park = SettingsChange {
            on_write_error: Some(OnWriteError::Park),
            write_error_after_s: Some(0),
            ..SettingsChange::default()
        };
        daemon.set(0, 0, &park).unwrap();
        place.client().write(MIB, &[9; 8192], true).unwrap();
        let wait = Drain { wait: true, ..Drain::default() };
        refused(daemon.drain(0, &wait, &mut |_| Flow::Continue), ErrorKind::Backing, "parked");
    }
    {
        let daemon = place.daemon();
        assert_eq!(cache_of(&daemon).parked_bytes, 512);
    }
    place.decorate = None;
    let daemon = place.daemon();
    stop(&daemon, StopBackend::default()).unwrap();
    let offset = usize::try_from(MIB).unwrap();
    assert_eq!(std::fs::read(&disk).unwrap()[offset..offset + 8192], [9; 8192]);
}

#[test]
fn zeroes_that_a_missing_disk_lacks_are_not_dropped_in_silence() {
    let mut place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    place.decorate = Some("fault:".into());
    {
        let daemon = place.daemon_with_region();
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
        place.client().write_zeroes(0, 4096, true, false).unwrap();
        assert_eq!(cache_of(&daemon).dirty_bytes, 0);
    }
    std::fs::remove_file(&disk).unwrap();
    let daemon = place.daemon();
    refused(stop(&daemon, StopBackend::default()), ErrorKind::Stopped, "--discard-dirty 0");
    stop(&daemon, StopBackend { discard_dirty: Some(0), ..StopBackend::default() }).unwrap();
    assert!(daemon.backends(0, true).unwrap().is_empty());
}

#[test]
fn a_disk_that_another_transport_knows_is_refused() {
    let place = Place::new();
    let disk = place.disk("disk", 8 * MIB);
    {
        let daemon = place.daemon_with_region();
        let second = RegisterTransport { path: place.text("second"), ..place.region(32 * MIB) };
        assert_eq!(daemon.register_transport(&second).unwrap().transport_id, 1);
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
        refused(daemon.start_backend(1, &place.backend(&disk)), ErrorKind::AlreadyExists, "of transport 0");
    }
    std::fs::rename(&disk, place.path("moved")).unwrap();
    let daemon = place.daemon();
    let moved = place.backend(&place.text("moved"));
    refused(daemon.start_backend(1, &moved), ErrorKind::AlreadyExists, "start it there");
}
