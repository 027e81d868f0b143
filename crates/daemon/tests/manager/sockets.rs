//! Sockets that cannot be created: each is refused with one line, and no data or file is lost, changed or left behind.

use crate::fixture::{Fixture, MIB, Running, refused};
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
fn without_an_export(fixture: &Fixture) -> Running {
    let daemon = fixture.daemon_with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    let request = StartBackend { start_dev: false, export: None, ..fixture.backend(&disk) };
    daemon.start_backend(0, &request).unwrap();
    daemon
}

/// Requests a block device with each kind of socket at `path`. Each is refused with one line, nothing else has changed,
/// and a valid name works immediately.
#[track_caller]
fn is_refused_as_a_socket(fixture: &Fixture, daemon: &Running, path: &str, kind: ErrorKind, part: &str) {
    let before = files(fixture);
    for export in KINDS {
        let request =
            StartBlkdev { backend: 0, export: Some(format!("{export}:{path}")), ..StartBlkdev::default() };
        let error = refused(daemon.start_blkdev(0, &request), kind, part);
        assert!(!error.line().contains('\n'), "{error}");
        assert!(daemon.blkdevs(0, true).unwrap().is_empty(), "{export}:{path}");
        assert_eq!(files(fixture), before, "{export}:{path}");
    }
    works(fixture, daemon);
}

/// The files in the folder, except those of the daemon itself.
fn files(fixture: &Fixture) -> Vec<String> {
    let entries = std::fs::read_dir(fixture.folder.path()).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A block device at a valid name can be started and stopped.
#[track_caller]
fn works(fixture: &Fixture, daemon: &Running) {
    for export in KINDS {
        let socket = fixture.text("good.sock");
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
    let fixture = Fixture::new();
    let daemon = without_an_export(&fixture);
    for path in ["vm.sock", "./vm.sock", ""] {
        is_refused_as_a_socket(&fixture, &daemon, path, ErrorKind::InvalidArgument, "not absolute");
    }
}

#[test]
fn a_path_that_is_too_long_for_a_socket_is_refused() {
    let fixture = Fixture::new();
    let daemon = without_an_export(&fixture);
    let path = fixture.text(&"x".repeat(120));
    is_refused_as_a_socket(&fixture, &daemon, &path, ErrorKind::InvalidArgument, "107 bytes at most");
}

#[test]
fn a_directory_is_refused_and_stays() {
    let fixture = Fixture::new();
    let daemon = without_an_export(&fixture);
    std::fs::create_dir(fixture.path("folder")).unwrap();
    std::fs::write(fixture.path("folder/precious"), "data").unwrap();
    is_refused_as_a_socket(
        &fixture,
        &daemon,
        &fixture.text("folder"),
        ErrorKind::AlreadyExists,
        "is no socket",
    );
    assert_eq!(std::fs::read(fixture.path("folder/precious")).unwrap(), b"data");
}

#[test]
fn a_file_that_is_no_socket_is_refused_and_stays() {
    let fixture = Fixture::new();
    let daemon = without_an_export(&fixture);
    std::fs::write(fixture.path("precious"), "data").unwrap();
    is_refused_as_a_socket(
        &fixture,
        &daemon,
        &fixture.text("precious"),
        ErrorKind::AlreadyExists,
        "is no socket",
    );
    assert_eq!(std::fs::read(fixture.path("precious")).unwrap(), b"data");
    std::os::unix::fs::symlink(fixture.path("precious"), fixture.path("link")).unwrap();
    is_refused_as_a_socket(
        &fixture,
        &daemon,
        &fixture.text("link"),
        ErrorKind::AlreadyExists,
        "is no socket",
    );
    assert!(fixture.path("link").is_symlink());
}

#[test]
fn a_missing_folder_is_refused_and_not_created() {
    let fixture = Fixture::new();
    let daemon = without_an_export(&fixture);
    is_refused_as_a_socket(
        &fixture,
        &daemon,
        &fixture.text("missing/vm.sock"),
        ErrorKind::NotFound,
        "missing",
    );
    assert!(!fixture.path("missing").exists());
}

#[test]
fn the_socket_of_another_server_is_refused_and_the_server_continues() {
    let fixture = Fixture::new();
    let daemon = without_an_export(&fixture);
    let other = UnixListener::bind(fixture.path("other.sock")).unwrap();
    is_refused_as_a_socket(
        &fixture,
        &daemon,
        &fixture.text("other.sock"),
        ErrorKind::Busy,
        "a running server listens",
    );
    other.set_nonblocking(true).unwrap();
    // The check for a listener has connected; a client can still connect.
    while other.accept().is_ok() {}
    let _client = UnixStream::connect(fixture.path("other.sock")).unwrap();
    other.accept().unwrap();
}

#[test]
fn the_socket_of_a_server_that_has_ended_is_replaced() {
    let fixture = Fixture::new();
    let daemon = without_an_export(&fixture);
    for _ in KINDS {
        drop(UnixListener::bind(fixture.path("good.sock")).unwrap());
        assert!(fixture.path("good.sock").symlink_metadata().unwrap().file_type().is_socket());
        works(&fixture, &daemon);
    }
}

#[test]
fn a_socket_of_this_daemon_is_not_used_twice() {
    let fixture = Fixture::new();
    let daemon = without_an_export(&fixture);
    let first = StartBlkdev {
        backend: 0,
        export: Some(format!("vhost-user:{}", fixture.text("vm.sock"))),
        ..StartBlkdev::default()
    };
    daemon.start_blkdev(0, &first).unwrap();
    let disk = fixture.disk("second", 8 * MIB);
    let second = StartBackend {
        path: disk,
        cache_size: Some(10 * MIB),
        start_dev: true,
        export: first.export,
        ..StartBackend::default()
    };
    for _ in 0..2 {
        refused(daemon.start_backend(0, &second), ErrorKind::Busy, "a running server listens");
        assert_eq!(daemon.backends(0, true).unwrap().len(), 1, "the second backend is removed again");
    }
    UnixStream::connect(fixture.path("vm.sock")).unwrap();
    let free = format!("vhost-user:{}", fixture.text("second.sock"));
    daemon.start_backend(0, &StartBackend { export: Some(free), ..second }).unwrap();
}

#[test]
fn a_backend_whose_socket_cannot_be_created_is_removed_and_its_disk_is_free() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    let free = daemon.transports().unwrap()[0].free_segments;
    let mut request = fixture.backend(&disk);
    for (path, named) in [
        ("relative", "relative"),
        (&fixture.text("missing/vm.sock"), &fixture.text("missing")),
        ("/dev/null", "/dev/null"),
    ] {
        request.export = Some(format!("vhost-user:{path}"));
        let error: Error = daemon.start_backend(0, &request).err().unwrap();
        assert!(!error.line().contains('\n') && error.line().contains(named), "{error}");
        assert!(daemon.backends(0, true).unwrap().is_empty());
        assert_eq!(daemon.transports().unwrap()[0].free_segments, free);
    }
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    fixture.client().write(0, &[9; 4096], true).unwrap();
}

/// The path was free when the device was created; at the next start another file exists there.
#[test]
fn a_device_whose_socket_path_is_in_use_loses_nothing_and_is_served_when_the_path_is_free() {
    let fixture = Fixture::new();
    let (socket, export) = (fixture.path("vm.sock"), format!("vhost-user:{}", fixture.text("vm.sock")));
    {
        let disk = fixture.disk("disk", 8 * MIB);
        let daemon = fixture.daemon_with_region();
        daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
        fixture.write_block();
        daemon.stop_blkdev(0, 0, StopBlkdev::default()).unwrap();
        daemon
            .start_blkdev(0, &StartBlkdev { backend: 0, export: Some(export), ..StartBlkdev::default() })
            .unwrap();
    }
    std::fs::write(&socket, "data").unwrap();
    {
        let daemon = fixture.daemon();
        assert_eq!(daemon.backends(0, true).unwrap().len(), 1);
        assert_eq!(std::fs::read(&socket).unwrap(), b"data");
    }
    std::fs::remove_file(&socket).unwrap();
    {
        let daemon = fixture.daemon();
        crate::fixture::wait_until_served(&daemon);
        UnixStream::connect(&socket).unwrap();
        let blkdev = daemon.blkdevs(0, true).unwrap()[0].blkdev_id;
        daemon.stop_blkdev(0, blkdev, StopBlkdev { force: true }).unwrap();
        daemon
            .start_blkdev(
                0,
                &StartBlkdev { backend: 0, export: Some(fixture.export()), ..StartBlkdev::default() },
            )
            .unwrap();
        fixture.block_is_there();
    }
}

#[test]
fn a_socket_on_a_file_system_that_does_not_respond_delays_no_other_command() {
    if std::env::var_os("CBD_SYSTEM_TESTS").is_none() {
        return println!("not run: it mounts a file system; CBD_SYSTEM_TESTS=1 runs it, as root");
    }
    let fixture = Fixture::new();
    let daemon = without_an_export(&fixture);
    std::fs::create_dir(fixture.path("far")).unwrap();
    let silent = Silent::over(&fixture.path("far"));
    let export = Some(format!("nbd:unix:{}", fixture.text("far/nbd.sock")));
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
    let fixture = Fixture::new();
    let daemon = without_an_export(&fixture);
    let remote = |allow_remote| StartBlkdev {
        backend: 0,
        export: Some("nbd:tcp:0.0.0.0:0".to_owned()),
        allow_remote,
        ..StartBlkdev::default()
    };
    refused(daemon.start_blkdev(0, &remote(false)), ErrorKind::InvalidArgument, "--allow-remote");
    assert!(daemon.blkdevs(0, true).unwrap().is_empty());
    let blkdev = daemon.start_blkdev(0, &remote(true)).unwrap();
    assert!(blkdev.note.unwrap().contains("neither encrypted nor authenticated"));
    assert!(!blkdev.dev_name.contains("0.0.0.0"), "{}", blkdev.dev_name);
}

#[test]
fn a_backend_with_a_device_that_other_machines_can_reach_must_be_allowed() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    let export = Some("nbd:tcp:[::]:0".to_owned());
    let request = StartBackend { export, ..fixture.backend(&disk) };
    refused(daemon.start_backend(0, &request), ErrorKind::InvalidArgument, "--allow-remote");
    assert!(daemon.backends(0, true).unwrap().is_empty());
}

#[test]
fn memory_of_clients_and_refusals_are_in_the_status_and_the_metrics() {
    let fixture = Fixture::new();
    let daemon = fixture.daemon_with_region();
    daemon.start_backend(0, &fixture.backend(&fixture.disk("disk", 8 * MIB))).unwrap();
    let mut client = fixture.client();
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
