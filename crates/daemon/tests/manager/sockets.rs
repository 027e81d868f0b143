//! Sockets that cannot be created: each is refused with one line, and no data or file is lost, changed or left behind.

use crate::place::{MIB, Place, Running, refused};
use crate::silent::Silent;
use cbd_daemon::api::{StartBackend, StartBlkdev, StopBlkdev};
use cbd_daemon::control::Control;
use cbd_types::{Error, ErrorKind};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

const KINDS: [&str; 2] = ["vhost-user", "nbd:unix"];

/// A disk with a cache in front of it, and no block device yet.
fn without_an_export(place: &Place) -> Running {
    let daemon = place.daemon_with_region();
    let disk = place.disk("disk", 8 * MIB);
    let request = StartBackend { start_dev: false, export: None, ..place.backend(&disk) };
    daemon.start_backend(0, &request).unwrap();
    daemon
}

/// Requests a block device with each kind of socket at `path`. Each is refused with one line, nothing else has changed, and a
/// valid name works immediately.
#[track_caller]
fn is_refused_as_a_socket(place: &Place, daemon: &Running, path: &str, kind: ErrorKind, part: &str) {
    let before = files(place);
    for export in KINDS {
        let request =
            StartBlkdev { backend: 0, export: Some(format!("{export}:{path}")), ..StartBlkdev::default() };
        let error = refused(daemon.start_blkdev(0, &request), kind, part);
        assert!(!error.line().contains('\n'), "{error}");
        assert!(daemon.blkdevs(0, true).unwrap().is_empty(), "{export}:{path}");
        assert_eq!(files(place), before, "{export}:{path}");
    }
    works(place, daemon);
}

/// The files in the folder, except those of the daemon itself.
fn files(place: &Place) -> Vec<String> {
    let entries = std::fs::read_dir(place.folder.path()).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A block device at a valid name can be started and stopped.
#[track_caller]
fn works(place: &Place, daemon: &Running) {
    for export in KINDS {
        let socket = place.text("good.sock");
        let request =
            StartBlkdev { backend: 0, export: Some(format!("{export}:{socket}")), ..StartBlkdev::default() };
        let number = daemon.start_blkdev(0, &request).unwrap().blkdev_id;
        UnixStream::connect(&socket).unwrap();
        daemon.stop_blkdev(0, number, StopBlkdev::default()).unwrap();
        assert!(!Path::new(&socket).exists());
    }
}

#[test]
fn a_relative_path_is_refused() {
    let place = Place::new();
    let daemon = without_an_export(&place);
    for path in ["vm.sock", "./vm.sock", ""] {
        is_refused_as_a_socket(&place, &daemon, path, ErrorKind::InvalidArgument, "not absolute");
    }
}

#[test]
fn a_path_that_is_too_long_for_a_socket_is_refused() {
    let place = Place::new();
    let daemon = without_an_export(&place);
    let path = place.text(&"x".repeat(120));
    is_refused_as_a_socket(&place, &daemon, &path, ErrorKind::InvalidArgument, "107 bytes at most");
}

#[test]
fn a_directory_is_refused_and_stays() {
    let place = Place::new();
    let daemon = without_an_export(&place);
    std::fs::create_dir(place.path("folder")).unwrap();
    std::fs::write(place.path("folder/precious"), "data").unwrap();
    is_refused_as_a_socket(&place, &daemon, &place.text("folder"), ErrorKind::AlreadyExists, "is no socket");
    assert_eq!(std::fs::read(place.path("folder/precious")).unwrap(), b"data");
}

#[test]
fn a_file_that_is_no_socket_is_refused_and_stays() {
    let place = Place::new();
    let daemon = without_an_export(&place);
    std::fs::write(place.path("precious"), "data").unwrap();
    is_refused_as_a_socket(
        &place,
        &daemon,
        &place.text("precious"),
        ErrorKind::AlreadyExists,
        "is no socket",
    );
    assert_eq!(std::fs::read(place.path("precious")).unwrap(), b"data");
    std::os::unix::fs::symlink(place.path("precious"), place.path("link")).unwrap();
    is_refused_as_a_socket(&place, &daemon, &place.text("link"), ErrorKind::AlreadyExists, "is no socket");
    assert!(place.path("link").is_symlink());
}

#[test]
fn a_missing_folder_is_refused_and_not_created() {
    let place = Place::new();
    let daemon = without_an_export(&place);
    is_refused_as_a_socket(&place, &daemon, &place.text("missing/vm.sock"), ErrorKind::NotFound, "missing");
    assert!(!place.path("missing").exists());
}

#[test]
fn the_socket_of_another_server_is_refused_and_the_server_continues() {
    let place = Place::new();
    let daemon = without_an_export(&place);
    let other = UnixListener::bind(place.path("other.sock")).unwrap();
    is_refused_as_a_socket(
        &place,
        &daemon,
        &place.text("other.sock"),
        ErrorKind::Busy,
        "a running server listens",
    );
    other.set_nonblocking(true).unwrap();
    // The check for a listener has connected; a client can still connect.
    while other.accept().is_ok() {}
    let _client = UnixStream::connect(place.path("other.sock")).unwrap();
    other.accept().unwrap();
}

#[test]
fn the_socket_of_a_server_that_has_ended_is_replaced() {
    let place = Place::new();
    let daemon = without_an_export(&place);
    for _ in KINDS {
        drop(UnixListener::bind(place.path("good.sock")).unwrap());
        assert!(place.path("good.sock").symlink_metadata().unwrap().file_type().is_socket());
        works(&place, &daemon);
    }
}

#[test]
fn a_socket_of_this_daemon_is_not_used_twice() {
    let place = Place::new();
    let daemon = without_an_export(&place);
    let first = StartBlkdev {
        backend: 0,
        export: Some(format!("vhost-user:{}", place.text("vm.sock"))),
        ..StartBlkdev::default()
    };
    daemon.start_blkdev(0, &first).unwrap();
    let disk = place.disk("second", 8 * MIB);
    let second = StartBackend {
        path: disk,
        cache_size: Some(10 * MIB),
        start_dev: true,
        export: first.export,
        ..StartBackend::default()
    };
    for _ in 0..2 {
        refused(daemon.start_backend(0, &second), ErrorKind::Busy, "a running server listens");
        assert_eq!(daemon.backends(0, true).unwrap().len(), 1, "the second backend is taken back");
    }
    UnixStream::connect(place.path("vm.sock")).unwrap();
    let free = format!("vhost-user:{}", place.text("second.sock"));
    daemon.start_backend(0, &StartBackend { export: Some(free), ..second }).unwrap();
}

#[test]
fn a_backend_whose_socket_cannot_be_created_is_removed_and_its_disk_is_free() {
    let place = Place::new();
    let daemon = place.daemon_with_region();
    let disk = place.disk("disk", 8 * MIB);
    let free = daemon.transports().unwrap()[0].free_segments;
    let mut request = place.backend(&disk);
    for (path, named) in [
        ("relative", "relative"),
        (&place.text("missing/vm.sock"), &place.text("missing")),
        ("/dev/null", "/dev/null"),
    ] {
        request.export = Some(format!("vhost-user:{path}"));
        let error: Error = daemon.start_backend(0, &request).err().unwrap();
        assert!(!error.line().contains('\n') && error.line().contains(named), "{error}");
        assert!(daemon.backends(0, true).unwrap().is_empty());
        assert_eq!(daemon.transports().unwrap()[0].free_segments, free);
    }
    daemon.start_backend(0, &place.backend(&disk)).unwrap();
    place.client().write(0, &[9; 4096], true).unwrap();
}

/// The path was free when the device was created; at the next start another file exists there.
#[test]
fn a_device_whose_socket_path_is_in_use_loses_nothing_and_is_served_when_the_path_is_free() {
    let place = Place::new();
    let (socket, export) = (place.path("vm.sock"), format!("vhost-user:{}", place.text("vm.sock")));
    {
        let disk = place.disk("disk", 8 * MIB);
        let daemon = place.daemon_with_region();
        daemon.start_backend(0, &place.backend(&disk)).unwrap();
        place.write_block();
        daemon.stop_blkdev(0, 0, StopBlkdev::default()).unwrap();
        daemon
            .start_blkdev(0, &StartBlkdev { backend: 0, export: Some(export), ..StartBlkdev::default() })
            .unwrap();
    }
    std::fs::write(&socket, "data").unwrap();
    {
        let daemon = place.daemon();
        assert_eq!(daemon.backends(0, true).unwrap().len(), 1);
        assert_eq!(std::fs::read(&socket).unwrap(), b"data");
    }
    std::fs::remove_file(&socket).unwrap();
    {
        let daemon = place.daemon();
        crate::place::wait_until_served(&daemon);
        UnixStream::connect(&socket).unwrap();
        let blkdev = daemon.blkdevs(0, true).unwrap()[0].blkdev_id;
        daemon.stop_blkdev(0, blkdev, StopBlkdev { force: true }).unwrap();
        daemon
            .start_blkdev(
                0,
                &StartBlkdev { backend: 0, export: Some(place.export()), ..StartBlkdev::default() },
            )
            .unwrap();
        place.block_is_there();
    }
}

#[test]
fn a_socket_on_a_file_system_that_does_not_respond_delays_no_other_command() {
    if std::env::var_os("CBD_SYSTEM_TESTS").is_none() {
        return println!("not run: it mounts a file system; CBD_SYSTEM_TESTS=1 runs it, as root");
    }
    let place = Place::new();
    let daemon = without_an_export(&place);
    std::fs::create_dir(place.path("far")).unwrap();
    let silent = Silent::over(&place.path("far"));
    let export = Some(format!("nbd:unix:{}", place.text("far/nbd.sock")));
    let (tell, told) = channel();
    let asking = std::thread::spawn(move || {
        let request = StartBlkdev { backend: 0, export, ..StartBlkdev::default() };
        refused(daemon.start_blkdev(0, &request), ErrorKind::TimedOut, "far/nbd.sock is on a file system");
        tell.send(daemon.blkdevs(0, true).unwrap().len()).unwrap();
    });
    let said = told.recv_timeout(Duration::from_secs(30));
    drop(silent);
    assert_eq!(said, Ok(0));
    asking.join().unwrap();
}

#[test]
fn nbd_that_other_machines_can_reach_must_be_allowed_and_has_a_warning() {
    let place = Place::new();
    let daemon = without_an_export(&place);
    let remote =
        |allow_remote| StartBlkdev { backend: 0, export: Some("nbd:tcp:0.0.0.0:0".to_owned()), allow_remote };
    refused(daemon.start_blkdev(0, &remote(false)), ErrorKind::InvalidArgument, "--allow-remote");
    assert!(daemon.blkdevs(0, true).unwrap().is_empty());
    let blkdev = daemon.start_blkdev(0, &remote(true)).unwrap();
    assert!(blkdev.note.unwrap().contains("neither encrypted nor authenticated"));
    assert!(!blkdev.dev_name.contains("0.0.0.0"), "{}", blkdev.dev_name);
}

#[test]
fn a_backend_with_a_device_that_other_machines_can_reach_must_be_allowed() {
    let place = Place::new();
    let daemon = place.daemon_with_region();
    let disk = place.disk("disk", 8 * MIB);
    let export = Some("nbd:tcp:[::]:0".to_owned());
    let request = StartBackend { export, ..place.backend(&disk) };
    refused(daemon.start_backend(0, &request), ErrorKind::InvalidArgument, "--allow-remote");
    assert!(daemon.backends(0, true).unwrap().is_empty());
}

#[test]
fn memory_of_clients_and_refusals_are_in_the_status_and_the_metrics() {
    let place = Place::new();
    let daemon = place.daemon_with_region();
    daemon.start_backend(0, &place.backend(&place.disk("disk", 8 * MIB))).unwrap();
    let mut client = place.client();
    client.write(0, &[1; 4096], false).unwrap();
    let status = daemon.status().unwrap();
    assert!(status.front_ends.nbd_memory_bytes >= 2 * MIB);
    assert_eq!(status.front_ends.nbd_memory_limit, 1 << 30);
    let text = cbd_daemon::metrics::render(&status);
    for line in
        ["cbd_nbd_memory_limit_bytes 1073741824", "cbd_nbd_refused_total 0", "cbd_control_refused_total 0"]
    {
        assert!(text.lines().any(|found| found == line), "{line}");
    }
}
