//! Scrubs, requests to verify, and drains that verify, over a disk whose copy of a block differs.

use crate::fixture::{Fixture, MIB, refused, stop};
use cbd_daemon::api::{
    CacheMode, Drain, ScrubAction, ScrubInfo, ScrubRequest, ScrubState, SettingsChange, StopBackend,
    VerifiedInfo, VerifyLevel, VerifyRange,
};
use cbd_daemon::control::{Control, Flow};
use cbd_daemon::manager::Manager;
use cbd_types::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;

const ALL: Drain = Drain { backend: None, wait: true, timeout_s: None, verify: false };

/// The block at 1 MiB is clean, and the disk has other data than the client wrote.
fn damage_disk(fixture: &Fixture, daemon: &Manager, disk: &str) {
    fixture.client().write(MIB, &[9; 4096], true).unwrap();
    daemon.drain(0, &ALL, &mut |_| Flow::Continue).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(disk).unwrap();
    file.write_at(&[7; 512], MIB + 1024).unwrap();
}

/// The files of scrubs; one that is just replaced has another file beside it.
fn files(state: &Path) -> usize {
    let names = std::fs::read_dir(state).unwrap().map(|entry| entry.unwrap().path());
    names.filter(|name| name.extension().is_some_and(|extension| extension == "json")).count()
}

fn verify(daemon: &Manager, level: VerifyLevel) -> VerifiedInfo {
    let request = VerifyRange { level, ..VerifyRange::default() };
    daemon.verify(0, 0, request, &mut |_| Flow::Continue).unwrap().verified.unwrap()
}

fn scrub(daemon: &Manager, repair: bool) -> ScrubInfo {
    let request = ScrubRequest { repair, wait: true, ..ScrubRequest::default() };
    *daemon.set_scrub(0, 0, &request, &mut |_| Flow::Continue).unwrap().scrub.unwrap()
}

#[test]
fn a_block_that_differs_is_found_by_the_level_that_compares_and_repaired_on_request() {
    let fixture = Fixture::new();
    let (disk, daemon) = fixture.disk_and_daemon();
    damage_disk(&fixture, &daemon, &disk);
    let newest = verify(&daemon, VerifyLevel::Newest);
    assert_eq!((newest.verified_bytes, newest.found), (8 * MIB, 0), "reads are right");
    let agree = verify(&daemon, VerifyLevel::Agree);
    assert_eq!((agree.found, agree.repaired), (1, 0), "{agree:?}");
    assert_eq!(agree.findings[0].flaw, "backing_differs");
    assert!(agree.method.starts_with("reads (it is a file)"), "{agree:?}");
    let repaired = scrub(&daemon, true).last.unwrap().results;
    assert_eq!((repaired.found, repaired.repaired), (1, 1), "{repaired:?}");
    assert_eq!(repaired.method, agree.method);
    daemon.drain(0, &ALL, &mut |_| Flow::Continue).unwrap();
    assert_eq!(verify(&daemon, VerifyLevel::Agree).found, 0);
    assert_eq!(std::fs::read(&disk).unwrap()[MIB as usize..][..4096], [9; 4096]);
    let metrics = cbd_daemon::metrics::render(&daemon.status().unwrap());
    let line = metrics
        .lines()
        .find(|line| line.starts_with("cbd_scrub_findings_total") && line.contains("backing_differs"));
    assert!(line.unwrap().ends_with(" 1"), "{line:?}");
}

#[test]
fn a_drain_and_a_stop_that_verify_list_what_differs_and_the_backend_stays() {
    let fixture = Fixture::new();
    let (disk, daemon) = fixture.disk_and_daemon();
    damage_disk(&fixture, &daemon, &disk);
    let drain = Drain { verify: true, ..ALL };
    let error =
        refused(daemon.drain(0, &drain, &mut |_| Flow::Continue), ErrorKind::Damaged, "backing_differs");
    assert!(error.line().contains("at 1049"), "it names the place: {error}");
    refused(
        stop(&daemon, StopBackend { verify: true, ..StopBackend::default() }),
        ErrorKind::Damaged,
        "backing_differs",
    );
    assert!(daemon.backends(0, false).unwrap()[0].alive);
    scrub(&daemon, true);
    daemon.drain(0, &drain, &mut |_| Flow::Continue).unwrap();
    let state = fixture.options().paths.state_dir.join("scrub");
    assert_eq!(files(&state), 1);
    stop(&daemon, StopBackend { verify: true, ..StopBackend::default() }).unwrap();
    assert_eq!(files(&state), 0, "its file went with it");
}

#[test]
fn ranges_that_the_device_does_not_have_are_refused() {
    let fixture = Fixture::new();
    let (_disk, daemon) = fixture.disk_and_daemon();
    let verify = |offset, length| {
        let request = VerifyRange { offset, length, ..VerifyRange::default() };
        daemon.verify(0, 0, request, &mut |_| Flow::Continue)
    };
    refused(verify(9 * MIB, None), ErrorKind::OutOfRange, "past the end");
    refused(verify(0, Some(8 * MIB + 512)), ErrorKind::OutOfRange, "past the end");
    refused(verify(100, Some(412)), ErrorKind::InvalidArgument, "sectors");
    assert_eq!(verify(4 * MIB, Some(MIB)).unwrap().verified.unwrap().verified_bytes, MIB);
}

#[test]
fn a_verification_ends_when_its_client_disconnects() {
    let fixture = Fixture::new();
    let (_disk, daemon) = fixture.disk_and_daemon();
    let request = VerifyRange::default();
    refused(daemon.verify(0, 0, request, &mut |_| Flow::Cancel), ErrorKind::Stopped, "cancelled");
}

#[test]
fn a_slow_scrub_is_refused_a_second_time_and_goes_on_with_the_next_daemon() {
    let fixture = Fixture::new();
    let request = ScrubRequest { rate: Some(MIB), ..ScrubRequest::default() };
    let begun;
    {
        let (_disk, daemon) = fixture.disk_and_daemon();
        let done = daemon.set_scrub(0, 0, &request, &mut |_| Flow::Continue).unwrap();
        begun = done.scrub.unwrap().began;
        let again = daemon.set_scrub(0, 0, &request, &mut |_| Flow::Continue);
        refused(again, ErrorKind::Busy, "--stop");
    }
    let daemon = fixture.daemon();
    let info = daemon.scrub(0, 0).unwrap();
    assert_eq!((info.began, info.rate), (begun, MIB), "{info:?}");
    let stop = ScrubRequest { action: ScrubAction::Stop, ..ScrubRequest::default() };
    daemon.set_scrub(0, 0, &stop, &mut |_| Flow::Continue).unwrap();
    assert_eq!(daemon.scrub(0, 0).unwrap().state, ScrubState::Idle);
}

#[test]
fn a_backend_is_stopped_and_its_cache_detached_while_a_scrub_runs() {
    let fixture = Fixture::new();
    let (_disk, daemon) = fixture.disk_and_daemon();
    let request = ScrubRequest { rate: Some(MIB), ..ScrubRequest::default() };
    daemon.set_scrub(0, 0, &request, &mut |_| Flow::Continue).unwrap();
    daemon.detach_cache(0, 0, &cbd_daemon::api::DetachCache::default(), &mut |_| Flow::Continue).unwrap();
    assert_ne!(daemon.scrub(0, 0).unwrap().state, ScrubState::Idle, "it continues");
    stop(&daemon, StopBackend { force: true, ..StopBackend::default() }).unwrap();
}

#[test]
fn the_file_of_a_scrub_goes_with_a_backend_that_is_not_up() {
    let fixture = Fixture::new();
    let path;
    {
        let (disk, daemon) = fixture.disk_and_daemon();
        path = disk;
        let change = SettingsChange { scrub_every_s: Some(86_400), ..SettingsChange::default() };
        daemon.set(0, 0, &change).unwrap();
        daemon.drain(0, &ALL, &mut |_| Flow::Continue).unwrap();
    }
    std::fs::remove_file(path).unwrap();
    let daemon = fixture.daemon();
    assert!(!daemon.backends(0, false).unwrap()[0].alive);
    let state = fixture.options().paths.state_dir.join("scrub");
    assert_eq!(files(&state), 1);
    stop(&daemon, StopBackend { discard_dirty: Some(0), ..StopBackend::default() }).unwrap();
    assert_eq!(files(&state), 0);
}

#[test]
fn a_damaged_copy_of_the_metadata_is_repaired_while_the_daemon_runs() {
    let fixture = Fixture::new();
    let (_disk, daemon) = fixture.disk_and_daemon();
    let region = daemon.status().unwrap().transports[0].info.path.clone();
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&region).unwrap();
    // The second superblock is in the last page.
    let at = file.metadata().unwrap().len() - 4096;
    let mut good = [0; 192];
    file.read_exact_at(&mut good, at).unwrap();
    file.write_all_at(&[0xa5; 16], at + 32).unwrap();
    let info = scrub(&daemon, false);
    let results = info.last.unwrap().results;
    let metadata = results.metadata.unwrap();
    assert_eq!((metadata.repaired, metadata.unrepaired), (1, 0), "{metadata:?}");
    assert_eq!((metadata.copies[0].structure.as_str(), metadata.copies[0].at), ("superblock", at));
    assert!(metadata.structures > 20 && results.found == 0 && results.error.is_none(), "{metadata:?}");
    assert_eq!(info.metadata_repaired_total, 1);
    let mut now = [0; 192];
    file.read_exact_at(&mut now, at).unwrap();
    assert_eq!(now, good);
    let metrics = cbd_daemon::metrics::render(&daemon.status().unwrap());
    for (name, value) in
        [("cbd_scrub_metadata_repaired_total", " 1"), ("cbd_scrub_metadata_unrepaired", " 0")]
    {
        let line = metrics.lines().find(|line| line.starts_with(name));
        assert!(line.is_some_and(|line| line.ends_with(value)), "{name}: {line:?}");
    }
    assert_eq!(scrub(&daemon, false).last.unwrap().results.metadata.unwrap().repaired, 0);
}

#[test]
fn a_repair_is_refused_where_the_cache_holds_nothing_dirty() {
    let fixture = Fixture::new();
    let (_disk, daemon) = fixture.disk_and_daemon();
    let change = SettingsChange { cache_mode: Some(CacheMode::Writethrough), ..SettingsChange::default() };
    daemon.set(0, 0, &change).unwrap();
    let request = ScrubRequest { repair: true, ..ScrubRequest::default() };
    refused(
        daemon.set_scrub(0, 0, &request, &mut |_| Flow::Continue),
        ErrorKind::Unsupported,
        "cache_mode=writeback",
    );
    let request = VerifyRange { repair: true, ..VerifyRange::default() };
    refused(
        daemon.verify(0, 0, request, &mut |_| Flow::Continue),
        ErrorKind::Unsupported,
        "cache_mode=writethrough",
    );
}

#[test]
fn a_copy_in_the_cache_that_was_damaged_and_is_repaired_does_not_fail_a_drain() {
    let fixture = Fixture::new();
    let (_disk, daemon) = fixture.disk_and_daemon();
    fixture.client().write(MIB, &[9; 4096], true).unwrap();
    daemon.drain(0, &ALL, &mut |_| Flow::Continue).unwrap();
    let region = daemon.status().unwrap().transports[0].info.path.clone();
    let bytes = std::fs::read(&region).unwrap();
    let at = bytes.windows(4096).position(|window| window == [9; 4096]).unwrap() as u64;
    let file = std::fs::OpenOptions::new().write(true).open(&region).unwrap();
    file.write_all_at(&[8], at + 100).unwrap();
    daemon.drain(0, &Drain { verify: true, ..ALL }, &mut |_| Flow::Continue).unwrap();
    assert_eq!(verify(&daemon, VerifyLevel::Agree).found, 0, "it was repaired");
}
