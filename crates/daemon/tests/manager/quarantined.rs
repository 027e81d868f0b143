//! Damaged data in the cache that the disk lacks: a drain and a stop report it, and a stop drops it only if the user
//! types its size.

use crate::fixture::{Fixture, MIB, Running, cache_of, refused, stop};
use cbd_daemon::api::{Drain, StopBackend};
use cbd_daemon::control::{Control, Flow};
use cbd_types::ErrorKind;
use std::os::unix::fs::FileExt;

/// Flips a bit in the only copy of this block in the region.
pub(crate) fn damage_block(fixture: &Fixture, block: &[u8; 4096]) {
    let region = std::fs::read(fixture.path("region")).unwrap();
    let at = region.windows(4096).step_by(64).position(|bytes| bytes == block).unwrap() * 64;
    let file = std::fs::OpenOptions::new().write(true).open(fixture.path("region")).unwrap();
    file.write_at(&[block[100] ^ 1], at as u64 + 100).unwrap();
}

/// A disk of 8 MiB, and a cache in which the block at 1 MiB was acknowledged, never reached the disk, and is damaged.
fn damaged() -> (Fixture, String) {
    let mut fixture = Fixture::new();
    fixture.decorate = Some("fault:op=write".into());
    let disk = {
        let (disk, _daemon) = fixture.disk_and_daemon();
        fixture.client().write(MIB, &[9; 4096], true).unwrap();
        disk
    };
    damage_block(&fixture, &[9; 4096]);
    fixture.decorate = None;
    (fixture, disk)
}

fn expect_refused(daemon: &Running, bytes: u64) {
    let error = refused(stop(daemon, StopBackend::default()), ErrorKind::Media, "quarantined");
    assert!(error.line().contains(&format!("--discard-dirty {bytes}")), "{error}");
    assert!(daemon.backends(0, true).unwrap()[0].alive);
}

#[test]
fn a_backend_with_quarantined_ranges_is_removed_only_when_their_number_is_typed() {
    let (fixture, disk) = damaged();
    let daemon = fixture.daemon();
    assert!(fixture.client().read(MIB, &mut [0; 4096]).is_err());
    expect_refused(&daemon, 4096);
    assert_eq!(cache_of(&daemon).quarantined_bytes, 4096);
    // Its clients are still connected.
    assert!(fixture.client().read(MIB, &mut [0; 4096]).is_err());
    for wrong in [0, 4095] {
        let request = StopBackend { discard_dirty: Some(wrong), ..StopBackend::default() };
        refused(stop(&daemon, request), ErrorKind::InvalidArgument, "--discard-dirty 4096");
    }
    let done = stop(&daemon, StopBackend { discard_dirty: Some(4096), ..StopBackend::default() }).unwrap();
    assert_eq!(done.discarded_bytes, 4096);
    assert!(done.warnings[0].contains("bytes 1048576..1052672"), "{:?}", done.warnings);
    assert!(daemon.backends(0, true).unwrap().is_empty());
    assert_eq!(std::fs::read(&disk).unwrap()[1 << 20], 0);
}

#[test]
fn a_drain_over_a_quarantined_range_fails_and_names_it() {
    let (fixture, _) = damaged();
    let daemon = fixture.daemon();
    let wait = Drain { wait: true, ..Drain::default() };
    let named = "1 ranges, 4096 bytes, are quarantined because their data in the cache is damaged: bytes 1048576..1052672";
    refused(daemon.drain(0, &wait, &mut |_| Flow::Continue), ErrorKind::Media, named);
    refused(daemon.checkpoint(0, &wait, &mut |_| Flow::Continue), ErrorKind::Media, named);
}

#[test]
fn overwritten_parts_of_a_quarantined_range_are_no_longer_missing() {
    let (fixture, disk) = damaged();
    let daemon = fixture.daemon();
    expect_refused(&daemon, 4096);
    fixture.client().write(MIB, &[7; 1024], true).unwrap();
    expect_refused(&daemon, 3072);
    fixture.client().write_zeroes(MIB + 1024, 3072, true, false).unwrap();
    let done = stop(&daemon, StopBackend::default()).unwrap();
    assert!(done.warnings.is_empty(), "{:?}", done.warnings);
    let bytes = std::fs::read(&disk).unwrap();
    assert_eq!(
        (&bytes[1 << 20..][..1024], &bytes[(1 << 20) + 1024..][..3072]),
        (&[7; 1024][..], &[0; 3072][..])
    );
}

#[test]
fn a_restarted_daemon_refuses_a_refused_stop_again() {
    let (fixture, _) = damaged();
    {
        let daemon = fixture.daemon();
        expect_refused(&daemon, 4096);
    }
    let daemon = fixture.daemon();
    assert_eq!(cache_of(&daemon).dirty_bytes, 0);
    expect_refused(&daemon, 4096);
}

#[test]
fn quarantined_data_of_a_missing_disk_is_dropped_only_by_number() {
    let (fixture, disk) = damaged();
    {
        let daemon = fixture.daemon();
        expect_refused(&daemon, 4096);
    }
    std::fs::remove_file(&disk).unwrap();
    let daemon = fixture.daemon();
    let error = refused(stop(&daemon, StopBackend::default()), ErrorKind::Stopped, "--discard-dirty 4096");
    assert!(error.line().contains("quarantined"), "{error}");
    stop(&daemon, StopBackend { discard_dirty: Some(4096), ..StopBackend::default() }).unwrap();
    assert!(daemon.backends(0, true).unwrap().is_empty());
}

#[test]
fn a_drain_of_all_backends_drains_those_that_are_up_and_lists_the_others() {
    let mut fixture = Fixture::new();
    let [first, second] = ["disk", "second"].map(|name| fixture.disk(name, 8 * MIB));
    fixture.decorate = Some("fault:op=write".into());
    {
        let daemon = fixture.daemon_with_region();
        for (disk, export) in [(&first, "other.sock"), (&second, "nbd.sock")] {
            let mut request = fixture.backend(disk);
            request.cache_size = Some(10 * MIB);
            request.export = Some(format!("nbd:unix:{}", fixture.text(export)));
            daemon.start_backend(0, &request).unwrap();
        }
        fixture.client().write(MIB, &[9; 4096], true).unwrap();
    }
    fixture.decorate = None;
    std::fs::remove_file(&first).unwrap();
    let daemon = fixture.daemon();
    let wait = Drain { wait: true, ..Drain::default() };
    let error = refused(
        daemon.drain(0, &wait, &mut |_| Flow::Continue),
        ErrorKind::Stopped,
        "1 of 2 backends were not drained, all others were: backend 0 is not up",
    );
    assert!(!error.line().contains("backend 1"), "{error}");
    assert_eq!(std::fs::read(&second).unwrap()[1 << 20], 9);
    let only = Drain { backend: Some(1), ..wait };
    daemon.drain(0, &only, &mut |_| Flow::Continue).unwrap();
}
