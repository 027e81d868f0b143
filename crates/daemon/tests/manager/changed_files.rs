//! Files that are deleted, replaced or cut short while a daemon uses them.

use crate::fixture::{Fixture, MIB, cache_of, dirty, refused, stop};
use cbd_daemon::api::{AttachCache, Drain, SettingsChange, StartBlkdev, StopBackend, StopBlkdev};
use cbd_daemon::control::{Control, Flow};
use cbd_daemon::manager::Manager;
use cbd_types::{ErrorKind, Result};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

fn drain(daemon: &Manager) -> Result<cbd_daemon::api::Done> {
    daemon.drain(0, &Drain { wait: true, ..Drain::default() }, &mut |_| Flow::Continue)
}

/// Waits until the first backend, or its region, is reported with a text that contains `part`.
fn wait_until_reported(daemon: &Manager, part: &str) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let transport = daemon.status().unwrap().transports.remove(0);
        let mut told = transport.backends[0].warnings.clone();
        told.extend(transport.info.error);
        if told.iter().any(|line| line.contains(part)) {
            return;
        }
        assert!(Instant::now() < end, "{told:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The state of the first backend in `backend-list`.
fn state(daemon: &Manager) -> String {
    daemon.backends(0, true).unwrap().remove(0).state
}

#[test]
fn a_deleted_disk_is_reported_and_neither_drained_nor_stopped() {
    let fixture = Fixture::new();
    let (disk, daemon) = fixture.disk_and_daemon();
    drain(&daemon).unwrap();
    std::fs::remove_file(&disk).unwrap();
    fixture.write_block();
    let error = refused(drain(&daemon), ErrorKind::Backing, "was deleted while it is in use");
    assert!(error.line().contains(&format!("/proc/{}/fd/", std::process::id())), "{error}");
    refused(stop(&daemon, StopBackend::default()), ErrorKind::Backing, "was deleted while it is in use");
    wait_until_reported(&daemon, "was deleted while it is in use");
    assert!(state(&daemon).contains("the file was deleted"), "{}", state(&daemon));
    let metrics = cbd_daemon::metrics::render(&daemon.status().unwrap());
    let changed = format!("cbd_backend_file_changed{{transport=\"0\",backend=\"0\",path=\"{disk}\"}} 1");
    assert!(metrics.contains(&changed), "{metrics}");
    // The backend continues and has all data.
    fixture.block_is_there();
    let bytes = dirty(&daemon);
    assert!(bytes >= 4096, "what was written since is not counted as being on the disk");
    stop(&daemon, StopBackend { discard_dirty: Some(bytes), ..StopBackend::default() }).unwrap();
    assert!(daemon.backends(0, true).unwrap().is_empty());
}

#[test]
fn a_deleted_disk_with_another_hard_link_is_drained_and_told_with_how_to_rename_it_back() {
    let fixture = Fixture::new();
    let (disk, daemon) = fixture.disk_and_daemon();
    std::fs::hard_link(&disk, fixture.path("other")).unwrap();
    std::fs::remove_file(&disk).unwrap();
    fixture.write_block();
    let done = drain(&daemon).unwrap();
    assert!(format!("{done:?}").contains("rename it back"), "{done:?}");
    let mut block = [0; 4096];
    std::fs::File::open(fixture.path("other")).unwrap().read_exact_at(&mut block, 0).unwrap();
    assert_eq!(block, [9; 4096], "the data is in the file that is left");
    wait_until_reported(&daemon, "1 other name");
}

#[test]
fn a_disk_without_a_cache_that_was_deleted_is_not_stopped_in_silence() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    let uncached = cbd_daemon::api::StartBackend { cache_size: None, ..fixture.backend(&disk) };
    daemon.start_backend(0, &uncached).unwrap();
    std::fs::remove_file(&disk).unwrap();
    refused(stop(&daemon, StopBackend::default()), ErrorKind::Backing, "--discard-dirty 0");
    stop(&daemon, StopBackend { discard_dirty: Some(0), ..StopBackend::default() }).unwrap();
}

#[test]
fn a_disk_that_another_file_was_renamed_over_is_reported_and_not_drained() {
    let fixture = Fixture::new();
    let (disk, daemon) = fixture.disk_and_daemon();
    fixture.disk("other", 8 * MIB);
    std::fs::rename(fixture.path("other"), &disk).unwrap();
    refused(drain(&daemon), ErrorKind::Backing, "was deleted while it is in use");
}

#[test]
fn a_disk_that_was_renamed_is_drained_and_stopped_with_its_new_name() {
    let fixture = Fixture::new();
    let (disk, daemon) = fixture.disk_and_daemon();
    fixture.write_block();
    std::fs::rename(&disk, fixture.path("elsewhere")).unwrap();
    let now = fixture.path("elsewhere").canonicalize().unwrap();
    let now = now.to_str().unwrap();
    wait_until_reported(&daemon, now);
    assert_eq!(state(&daemon), "serving, the file was renamed");
    let done = drain(&daemon).unwrap();
    assert!(done.warnings.iter().any(|line| line.contains(now)), "{done:?}");
    let done = stop(&daemon, StopBackend::default()).unwrap();
    assert!(done.warnings.iter().any(|line| line.contains(now)), "{done:?}");
    assert_eq!(std::fs::read(now).unwrap()[..4096], [9; 4096]);
}

#[test]
fn a_disk_that_was_cut_short_keeps_its_length_and_its_dirty_data_until_it_is_restored_and_opened_again() {
    let fixture = Fixture::new();
    let (disk, daemon) = fixture.disk_and_daemon();
    let file = std::fs::File::options().read(true).write(true).open(&disk).unwrap();
    fixture.client().write(7 * MIB, &[5; 4096], true).unwrap();
    drain(&daemon).unwrap();
    file.set_len(4 * MIB).unwrap();
    fixture.client().write(6 * MIB, &[6; 4096], true).unwrap();
    refused(drain(&daemon), ErrorKind::Backing, "was cut short");
    wait_until_reported(&daemon, "was cut short");
    assert!(state(&daemon).contains("the file was cut short"), "{}", state(&daemon));
    refused(stop(&daemon, StopBackend::default()), ErrorKind::Backing, "was cut short");
    assert_eq!(file.metadata().unwrap().len(), 4 * MIB);
    assert!(cache_of(&daemon).dirty_bytes >= 4096);
    // A read of data that neither the cache nor the file has fails; it does not return zeroes.
    let mut data = [0; 4096];
    let read = fixture.client().read(5 * MIB, &mut data);
    assert!(read.is_err(), "{:?}", &data[..8]);
    fixture.client().read(6 * MIB, &mut data).unwrap();
    assert_eq!(data, [6; 4096]);
    // Restoring the length does not restore the data that was cut off.
    file.set_len(8 * MIB).unwrap();
    refused(drain(&daemon), ErrorKind::Backing, "was cut short");
    refused(stop(&daemon, StopBackend::default()), ErrorKind::Backing, "was cut short");
    assert!(fixture.client().read(5 * MIB, &mut data).is_err(), "{:?}", &data[..8]);
    drop(daemon);
    file.write_all_at(&[5; 4096], 7 * MIB).unwrap();
    let daemon = fixture.daemon();
    stop(&daemon, StopBackend::default()).unwrap();
    file.read_exact_at(&mut data, 6 * MIB).unwrap();
    assert_eq!(data, [6; 4096]);
}

#[test]
fn a_deleted_region_is_reported_and_its_dirty_data_can_be_drained() {
    let fixture = Fixture::new();
    let (disk, daemon) = fixture.disk_and_daemon();
    fixture.write_block();
    std::fs::remove_file(fixture.path("region")).unwrap();
    wait_until_reported(&daemon, "was deleted while it is in use: what is dirty in it is lost");
    stop(&daemon, StopBackend::default()).unwrap();
    assert_eq!(std::fs::read(disk).unwrap()[..4096], [9; 4096]);
}

#[test]
fn a_disk_that_is_renamed_and_replaced_during_a_drain_is_reported() {
    let mut fixture = Fixture::new();
    fixture.decorate = Some("throttle:latency_us=300000".into());
    let (disk, daemon) = fixture.disk_and_daemon();
    fixture.write_block();
    let mut is_renamed = false;
    let wait = Drain { wait: true, ..Drain::default() };
    let done = daemon.drain(0, &wait, &mut |_| {
        if !is_renamed {
            std::fs::rename(&disk, fixture.path("elsewhere")).unwrap();
            std::fs::write(&disk, b"another file").unwrap();
            is_renamed = true;
        }
        Flow::Continue
    });
    assert!(is_renamed);
    let now = fixture.path("elsewhere").canonicalize().unwrap();
    let now = now.to_str().unwrap();
    let done = done.unwrap();
    assert!(done.warnings.iter().any(|line| line.contains(now)), "{done:?}");
}

/// Whether the first backend has a cache.
fn has_cache(daemon: &Manager) -> bool {
    daemon.status().unwrap().transports[0].backends[0].cache.is_some()
}

#[test]
fn a_cache_whose_disk_is_deleted_while_it_is_detached_stays_and_a_warning_says_it_of_one_that_is_gone() {
    for reports in [1, usize::MAX] {
        let mut fixture = Fixture::new();
        fixture.decorate = Some("throttle:latency_us=300000".into());
        let (disk, daemon) = fixture.disk_and_daemon();
        fixture.write_block();
        let mut seen = 0;
        let result = daemon.detach_cache(0, 0, &Default::default(), &mut |_| {
            seen += 1;
            // At the first report, or at the last one that may come.
            if seen == 1 && reports == 1 || seen > 1 && reports > 1 {
                let _ = std::fs::remove_file(&disk);
            }
            Flow::Continue
        });
        match result {
            Ok(done) if std::path::Path::new(&disk).exists() => assert_eq!(done.warnings, [""; 0]),
            Ok(done) => assert!(done.warnings.iter().any(|line| line.contains("was deleted")), "{done:?}"),
            Err(error) => {
                refused::<()>(Err(error), ErrorKind::Backing, "the cache was not detached");
                assert!(has_cache(&daemon), "an error says that it stays");
                continue;
            }
        }
        assert!(!has_cache(&daemon), "a success says that it is gone");
    }
}

#[test]
fn a_detach_whose_record_cannot_be_stored_has_succeeded_with_a_warning() {
    let fixture = Fixture::new();
    let (_disk, daemon) = fixture.disk_and_daemon();
    let promise = SettingsChange { recovery_point_max_age_s: Some(60), ..SettingsChange::default() };
    daemon.set(0, 0, &promise).unwrap();
    let stored = std::fs::read_dir(fixture.path("state/scrub")).unwrap().flatten().next().unwrap().path();
    // A folder is at the path of the new file.
    std::fs::create_dir(stored.with_extension("new")).unwrap();
    let done = daemon.detach_cache(0, 0, &Default::default(), &mut |_| Flow::Continue).unwrap();
    let part = "recovery_point_max_age of backend 0 has ended";
    assert!(done.warnings.iter().any(|line| line.contains(part)), "{done:?}");
    assert!(!has_cache(&daemon));
    std::fs::remove_dir(stored.with_extension("new")).unwrap();
    daemon.attach_cache(0, 0, &AttachCache { cache_size: 16 * MIB, ..AttachCache::default() }).unwrap();
    assert_eq!(cache_of(&daemon).recovery_point_max_age_s, 0);
}

/// Waits until `dev-list` shows a note on the first block device that contains `part`.
fn wait_for_note(daemon: &Manager, part: &str) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let note = daemon.blkdevs(0, false).unwrap()[0].note.clone().unwrap_or_default();
        if note.contains(part) {
            return;
        }
        assert!(Instant::now() < end, "{part}: {note:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_socket_that_was_removed_or_replaced_is_reported_until_the_device_has_a_new_one() {
    let fixture = Fixture::new();
    let (_disk, daemon) = fixture.disk_and_daemon();
    let mut client = fixture.client();
    let socket = fixture.path("nbd.sock");
    std::fs::rename(&socket, fixture.path("renamed.sock")).unwrap();
    wait_for_note(&daemon, "nbd.sock was removed");
    // A connected client continues.
    client.write(0, &[9; 4096], true).unwrap();
    std::fs::write(&socket, "of another program").unwrap();
    wait_for_note(&daemon, "nbd.sock was replaced by another file");
    std::fs::rename(fixture.path("renamed.sock"), &socket).unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while let Some(note) = daemon.blkdevs(0, false).unwrap().remove(0).note {
        assert!(Instant::now() < end, "{note}");
        std::thread::sleep(Duration::from_millis(50));
    }

    std::fs::remove_file(&socket).unwrap();
    std::fs::write(&socket, "of another program").unwrap();
    wait_for_note(&daemon, "nbd.sock was replaced by another file");
    drop(client);
    daemon.stop_blkdev(0, 0, StopBlkdev { force: true }).unwrap();
    assert_eq!(std::fs::read(&socket).unwrap(), b"of another program");

    std::fs::remove_file(&socket).unwrap();
    let again = StartBlkdev { backend: 0, export: Some(fixture.export()), ..StartBlkdev::default() };
    assert_eq!(daemon.start_blkdev(0, &again).unwrap().note, None);
    fixture.block_is_there();
}

#[test]
fn a_removed_vhost_user_socket_is_reported() {
    let fixture = Fixture::new();
    let (_disk, daemon) = fixture.disk_and_daemon();
    daemon.stop_blkdev(0, 0, StopBlkdev { force: true }).unwrap();
    let export = Some(format!("vhost-user:{}", fixture.text("vm.sock")));
    daemon.start_blkdev(0, &StartBlkdev { backend: 0, export, ..StartBlkdev::default() }).unwrap();
    std::fs::remove_file(fixture.path("vm.sock")).unwrap();
    wait_for_note(&daemon, "vm.sock was removed");
}
