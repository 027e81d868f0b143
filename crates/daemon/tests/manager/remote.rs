//! NBD at an address that other machines can reach is served only where a user of this machine has allowed it.

use crate::fixture::{Fixture, MIB, Running, refused};
use cbd_daemon::api::{BlkdevInfo, RegisterTransport, StartBackend, StartBlkdev, StopBlkdev};
use cbd_daemon::control::Control;
use cbd_types::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;

/// An export at all addresses of this machine, at a port that was free, and the port.
fn remote_export() -> (String, u16) {
    let port = TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port();
    (format!("nbd:tcp:0.0.0.0:{port}"), port)
}

fn request(export: &str, allow_remote: bool) -> StartBlkdev {
    StartBlkdev { backend: 0, export: Some(export.to_owned()), allow_remote, ..StartBlkdev::default() }
}

fn is_reached(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_ok()
}

/// A region whose block device is served at `export`, which was allowed; no daemon runs.
fn left_with(export: &str) -> Fixture {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    daemon
        .start_backend(0, &StartBackend { start_dev: false, export: None, ..fixture.backend(&disk) })
        .unwrap();
    daemon.start_blkdev(0, &request(export, true)).unwrap();
    fixture
}

fn permissions(fixture: &Fixture) -> PathBuf {
    fixture.options().paths.state_dir.join("remote-exports.json")
}

/// Removes the state folder: a daemon that starts then is one of another machine.
fn remove_state_folder(fixture: &Fixture) {
    std::fs::remove_dir_all(fixture.options().paths.state_dir).unwrap();
}

fn again(fixture: &Fixture) -> RegisterTransport {
    RegisterTransport { format: false, size: None, ..fixture.region(0) }
}

fn blkdev(daemon: &Running) -> BlkdevInfo {
    daemon.blkdevs(0, true).unwrap().remove(0)
}

#[test]
fn a_region_from_elsewhere_opens_no_address_that_was_not_allowed_here() {
    let (export, port) = remote_export();
    let fixture = left_with(&export);
    remove_state_folder(&fixture);
    let daemon = fixture.daemon();
    let registered = daemon.register_transport(&again(&fixture)).unwrap();
    assert!(!is_reached(port), "registering the region has opened its address");
    let reason = blkdev(&daemon).error.unwrap();
    assert!(!blkdev(&daemon).alive);
    let command = format!("dev-start -t 0 -b 0 -e {export} --allow-remote");
    assert!(reason.contains(&command) && reason.contains("not encrypted"), "{reason}");
    assert!(registered.warnings.iter().any(|warning| warning.contains(&command)), "{registered:?}");
    drop(daemon);

    let daemon = fixture.daemon();
    assert!(!is_reached(port), "the restart has opened the address");
    assert_eq!(blkdev(&daemon).error.unwrap(), reason);
    assert!(daemon.summary.contains("1 NOT SERVED"), "{}", daemon.summary);
    // Without the option, and with another address, the command opens nothing.
    refused(daemon.start_blkdev(0, &request(&export, false)), ErrorKind::InvalidArgument, "--allow-remote");
    refused(
        daemon.start_blkdev(0, &request("nbd:tcp:0.0.0.0:1", true)),
        ErrorKind::Busy,
        "has a block device already",
    );
    assert!(!is_reached(port));
    let number = blkdev(&daemon).blkdev_id;
    let served = daemon.start_blkdev(0, &request(&export, true)).unwrap();
    assert_eq!((served.blkdev_id, served.alive, &served.error), (number, true, &None));
    assert!(is_reached(port));
    drop(daemon);

    let daemon = fixture.daemon();
    assert!(blkdev(&daemon).alive && is_reached(port), "an orderly restart asks again");
}

#[test]
fn starting_a_backend_that_is_down_can_allow_the_address_of_its_block_device() {
    let (export, port) = remote_export();
    let fixture = left_with(&export);
    remove_state_folder(&fixture);
    std::fs::rename(fixture.path("disk"), fixture.path("moved")).unwrap();
    let daemon = fixture.daemon();
    daemon.register_transport(&again(&fixture)).unwrap();
    let request = |allow_remote| StartBackend {
        cache_size: None,
        export: Some(export.clone()),
        allow_remote,
        ..fixture.backend(&fixture.text("moved"))
    };
    refused(daemon.start_backend(0, &request(false)), ErrorKind::InvalidArgument, "--allow-remote");
    let started = daemon.start_backend(0, &request(true)).unwrap();
    assert!(started.blkdev.unwrap().alive && is_reached(port));
}

#[test]
fn a_permission_ends_with_its_block_device() {
    let (export, port) = remote_export();
    let fixture = left_with(&export);
    // A region that returns as it was before the stop: its row names the address again.
    std::fs::copy(fixture.path("region"), fixture.path("before")).unwrap();
    {
        let daemon = fixture.daemon();
        assert!(is_reached(port));
        daemon.stop_blkdev(0, blkdev(&daemon).blkdev_id, StopBlkdev::default()).unwrap();
    }
    std::fs::copy(fixture.path("before"), fixture.path("region")).unwrap();
    let daemon = fixture.daemon();
    assert!(!is_reached(port));
    assert!(blkdev(&daemon).error.unwrap().contains("--allow-remote"));
}

#[test]
fn a_permission_does_not_end_with_another_block_device_on_the_backend() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let shared = |export: &str| StartBlkdev { shared: true, ..request(export, true) };
    let [(kept, port), (ended, ended_port)] = [remote_export(), remote_export()];
    {
        let daemon = fixture.daemon_with_region();
        let request = StartBackend { start_dev: false, export: None, ..fixture.backend(&disk) };
        daemon.start_backend(0, &request).unwrap();
        daemon.start_blkdev(0, &shared(&kept)).unwrap();
        // One that does not start, since the address is in use, ends nothing either.
        daemon.start_blkdev(0, &shared(&kept)).expect_err("the address is in use");
        let second = daemon.start_blkdev(0, &shared(&ended)).unwrap();
        assert!(is_reached(port) && is_reached(ended_port));
        daemon.stop_blkdev(0, second.blkdev_id, StopBlkdev::default()).unwrap();
    }
    let recorded = std::fs::read_to_string(permissions(&fixture)).unwrap();
    assert!(recorded.contains(&kept) && !recorded.contains(&ended), "{recorded}");
    let daemon = fixture.daemon();
    assert!(blkdev(&daemon).alive && is_reached(port) && !is_reached(ended_port));
}

#[test]
fn a_permission_ends_when_its_region_is_unregistered() {
    let (export, port) = remote_export();
    let fixture = left_with(&export);
    std::fs::rename(fixture.path("region"), fixture.path("away")).unwrap();
    {
        let daemon = fixture.daemon();
        daemon.unregister_transport(0).unwrap();
        std::fs::rename(fixture.path("away"), fixture.path("region")).unwrap();
        daemon.register_transport(&again(&fixture)).unwrap();
        assert!(!is_reached(port));
    }
    assert!(!std::fs::read_to_string(permissions(&fixture)).unwrap().contains(&export));
}

#[test]
fn what_was_served_before_permissions_were_recorded_is_served_after_an_upgrade_and_recorded() {
    let (export, port) = remote_export();
    let fixture = left_with(&export);
    std::fs::remove_file(permissions(&fixture)).unwrap();
    // The region is not there at the first start of the new version.
    std::fs::rename(fixture.path("region"), fixture.path("away")).unwrap();
    drop(fixture.daemon());
    std::fs::rename(fixture.path("away"), fixture.path("region")).unwrap();
    for _ in 0..2 {
        let daemon = fixture.daemon();
        assert!(blkdev(&daemon).alive && is_reached(port), "{:?}", blkdev(&daemon));
    }
    let recorded = std::fs::read_to_string(permissions(&fixture)).unwrap();
    assert!(recorded.contains(&export), "{recorded}");
}

#[test]
fn a_damaged_record_of_permissions_allows_nothing_and_is_replaced_by_the_next() {
    let (export, port) = remote_export();
    let fixture = left_with(&export);
    std::fs::write(permissions(&fixture), b"{\0").unwrap();
    {
        let daemon = fixture.daemon();
        assert!(!is_reached(port));
        let warnings = daemon.status().unwrap().warnings;
        assert!(warnings.iter().any(|warning| warning.contains("remote-exports.json")), "{warnings:?}");
        daemon.start_blkdev(0, &request(&export, true)).unwrap();
        let warnings = daemon.status().unwrap().warnings;
        assert!(!warnings.iter().any(|warning| warning.contains("remote-exports.json")), "{warnings:?}");
    }
    let daemon = fixture.daemon();
    assert!(is_reached(port));
    let warnings = daemon.status().unwrap().warnings;
    assert!(!warnings.iter().any(|warning| warning.contains("remote-exports.json")), "{warnings:?}");
}
