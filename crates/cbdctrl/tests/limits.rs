//! A daemon with few threads, few descriptors, umask 0, or a disk that hangs: operations that lack a resource are
//! refused and logged, and all others continue.

mod support;

use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::sandbox::in_sandbox;
use support::{Fixture, MIB, child, system_tests, until};

/// A user whose number of threads is limited, unlike root's.
const USER: u32 = 4711;

/// All files below `folder`.
fn all_below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut todo = vec![folder.to_owned()];
    while let Some(path) = todo.pop() {
        if path.symlink_metadata().expect("it is there").is_dir() {
            todo.extend(
                std::fs::read_dir(&path).expect("a folder").map(|entry| entry.expect("an entry").path()),
            );
        }
        found.push(path);
    }
    found
}

/// A client that wrote a block, reads it.
fn serves(client: &mut cbd_testkit::Client) {
    let mut block = [0; 4096];
    client.read(MIB, &mut block).expect("it is served");
    assert_eq!(block, [9; 4096]);
}

#[test]
fn a_daemon_that_can_start_no_thread_refuses_operations_that_need_one_and_continues() {
    if !system_tests("a_daemon_that_can_start_no_thread_refuses_operations_that_need_one_and_continues") {
        return;
    }
    let program = env!("CARGO_BIN_EXE_cbdctrl");
    if let Err(error) = Command::new(program).arg("--version").uid(USER).gid(USER).output() {
        return println!("not run: user {USER} cannot run {program}: {error}");
    }
    let mut fixture = Fixture::new();
    fixture.user = Some(USER);
    for path in fixture.folders() {
        all_below(&path).iter().for_each(|path| chown(path, Some(USER), Some(USER)).expect("given away"));
    }
    fixture.start();
    fixture.register("64M");
    let (disk, other) = (fixture.disk("disk", 8 * MIB), fixture.disk("other", 8 * MIB));
    [&disk, &other].iter().for_each(|path| chown(path, Some(USER), Some(USER)).expect("given away"));
    fixture.start_backend(&disk);
    let mut client = fixture.client();
    client.write(MIB, &[9; 4096], true).expect("written");
    child::limit_threads(fixture.pid(), USER, 1);
    // Running devices continue, and the status is available.
    serves(&mut client);
    fixture.ok(&["status"]);
    let refused = fixture.run(&["backend-start", "-p", &other, "-c", "10M"]);
    assert!(refused.code == 1 && refused.stderr.contains("thread"), "{refused:?}");
    let refused = fixture.run(&["drain"]);
    assert!(refused.code == 1 && refused.stderr.contains("thread"), "{refused:?}");
    fixture.ok(&["status"]);
    serves(&mut client);
    child::limit_threads(fixture.pid(), USER, 10_000);
    fixture.ok(&["drain"]);
    until("the other disk is served", || {
        fixture.run(&["backend-start", "-p", &other, "-c", "10M"]).code == 0
    });
    serves(&mut client);
    drop(client);
    // The daemon ends properly without a further thread.
    child::limit_threads(fixture.pid(), USER, 1);
    fixture.terminate();
    assert!(!fixture.log().contains("panicked"), "{}", fixture.log());
}

#[test]
fn a_daemon_with_few_descriptors_refuses_operations_that_need_more_and_continues() {
    let mut fixture = Fixture::new();
    fixture.start();
    fixture.register("256M");
    let disk = fixture.disk("disk", 8 * MIB);
    fixture.start_backend(&disk);
    let mut client = fixture.client();
    client.write(MIB, &[9; 4096], true).expect("written");
    let user = rustix::process::geteuid().as_raw();
    let open = std::fs::read_dir(format!("/proc/{}/fd", fixture.pid())).expect("its descriptors").count();
    child::limit_descriptors(fixture.pid(), user, open as u64 + 8);
    let mut started = Vec::new();
    let refused = (0..20).find_map(|number| {
        let disk = fixture.disk(&format!("disk-{number}"), MIB);
        let ran = fixture.run(&["backend-start", "-p", &disk, "-c", "10M"]);
        if ran.code == 0 {
            started.push(disk);
            return None;
        }
        Some((disk, ran))
    });
    let (disk, ran) = refused.expect("one is refused");
    assert!(ran.code == 1 && ran.stderr.contains("(ulimit -n)"), "{ran:?}");
    serves(&mut client);
    fixture.ok(&["status"]);
    assert_eq!(fixture.json(&["backend-list"]).as_array().map(Vec::len), Some(started.len() + 1));
    child::limit_descriptors(fixture.pid(), user, 4096);
    fixture.ok(&["backend-start", "-p", &disk, "-c", "10M"]);
    serves(&mut client);
    drop(client);
    fixture.terminate();
    assert!(!fixture.log().contains("panicked"), "{}", fixture.log());
}

/// A daemon with umask 0 and a region.
fn without_umask(folder: &Path) -> Fixture {
    let mut fixture = Fixture::under(folder);
    fixture.umask = Some(0);
    fixture.start();
    fixture.register("64M");
    fixture
}

/// Asserts that other users may not write any file in the folders of the daemon.
fn check_modes(fixture: &Fixture) {
    fixture.ok(&["drain"]);
    until("the recovery points are logged", || fixture.path("state/recovery-points").is_dir());
    for path in ["state", "run"].iter().flat_map(|folder| all_below(&fixture.path(folder))) {
        let metadata = path.symlink_metadata().expect("it is there");
        let mode = metadata.mode();
        assert!(metadata.is_symlink() || mode & 0o022 == 0, "{} {mode:o}", path.display());
    }
    assert_eq!(fixture.path("state").metadata().expect("a folder").mode() & 0o7777, 0o700);
}

#[test]
fn a_daemon_with_umask_0_makes_sockets_that_only_its_user_may_connect_to() {
    let mut fixture = without_umask(&std::env::temp_dir());
    for (name, export) in [("nbd", "nbd:unix"), ("vm", "vhost-user")] {
        let (disk, socket) = (fixture.disk(name, 8 * MIB), fixture.path(&format!("{name}.sock")));
        let export = format!("{export}:{}", socket.display());
        fixture.ok(&["backend-start", "-p", &disk, "-c", "10M", "-D", "-e", &export]);
    }
    fixture.client().write(MIB, &[9; 4096], true).expect("written");
    for socket in ["nbd.sock", "vm.sock", "run/control.sock"] {
        let metadata = fixture.path(socket).metadata().expect("a socket");
        assert!(metadata.file_type().is_socket(), "{socket}");
        assert_eq!(metadata.mode() & 0o777, 0o600, "{socket}");
    }
    check_modes(&fixture);
    fixture.terminate();
}

#[test]
fn a_daemon_with_umask_0_and_a_fuse_device_makes_nothing_that_others_may_write() {
    let test = "a_daemon_with_umask_0_and_a_fuse_device_makes_nothing_that_others_may_write";
    in_sandbox(test, Duration::from_secs(120), |folder| {
        let mut fixture = without_umask(folder);
        let device = fixture.start_block_device(&fixture.disk("disk", 8 * MIB), "10M");
        let device = std::fs::File::options().write(true).open(device).expect("opened");
        device.write_all_at(&[9; 4096], MIB).and_then(|()| device.sync_all()).expect("written");
        drop(device);
        check_modes(&fixture);
        fixture.terminate();
    });
}

#[test]
fn a_daemon_with_a_disk_that_hangs_ends_and_names_the_disk() {
    let mut fixture = Fixture::new();
    fixture.decorate = Some("fault:op=write,how=stall".to_owned());
    fixture.start();
    fixture.register("64M");
    let disk = fixture.disk("disk", 8 * MIB);
    fixture.start_backend(&disk);
    fixture.client().write(MIB, &[9; 4096], true).expect("written");
    assert_eq!(fixture.run(&["drain", "--timeout", "1"]).code, 1);
    let took = fixture.terminate_with_a_disk_that_hangs();
    assert!(took < Duration::from_secs(35), "{took:?}");
    let log = fixture.log();
    let named = |line: &&str| line.contains("not ended in time: backend 0") && line.contains(&disk);
    assert!(log.lines().any(|line| named(&line)), "{log}");
    // No data is lost.
    fixture.decorate = None;
    fixture.start();
    until("it is served", || fixture.json(&["backend-list"])[0]["alive"] == true);
    serves(&mut fixture.client());
    fixture.terminate();
}
