//! A daemon with few threads, few descriptors, umask 0, or a disk that hangs: operations that lack a resource are refused and
//! logged, and all others continue.

mod support;

use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::sandbox::in_sandbox;
use support::{MIB, Place, child, system_tests, until};

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
    let mut place = Place::new();
    place.user = Some(USER);
    for path in place.folders() {
        all_below(&path).iter().for_each(|path| chown(path, Some(USER), Some(USER)).expect("given away"));
    }
    place.start();
    place.register("64M");
    let (disk, other) = (place.disk("disk", 8 * MIB), place.disk("other", 8 * MIB));
    [&disk, &other].iter().for_each(|path| chown(path, Some(USER), Some(USER)).expect("given away"));
    place.start_backend(&disk);
    let mut client = place.client();
    client.write(MIB, &[9; 4096], true).expect("written");
    child::limit_threads(place.pid(), USER, 1);
    // Running devices continue, and the status is available.
    serves(&mut client);
    place.ok(&["status"]);
    let refused = place.run(&["backend-start", "-p", &other, "-c", "10M"]);
    assert!(refused.code == 1 && refused.stderr.contains("thread"), "{refused:?}");
    let refused = place.run(&["drain"]);
    assert!(refused.code == 1 && refused.stderr.contains("thread"), "{refused:?}");
    place.ok(&["status"]);
    serves(&mut client);
    child::limit_threads(place.pid(), USER, 10_000);
    place.ok(&["drain"]);
    until("the other disk is served", || place.run(&["backend-start", "-p", &other, "-c", "10M"]).code == 0);
    serves(&mut client);
    drop(client);
    // The daemon ends properly without a further thread.
    child::limit_threads(place.pid(), USER, 1);
    place.terminate();
    assert!(!place.log().contains("panicked"), "{}", place.log());
}

#[test]
fn a_daemon_with_few_descriptors_refuses_operations_that_need_more_and_continues() {
    let mut place = Place::new();
    place.start();
    place.register("256M");
    let disk = place.disk("disk", 8 * MIB);
    place.start_backend(&disk);
    let mut client = place.client();
    client.write(MIB, &[9; 4096], true).expect("written");
    let user = rustix::process::geteuid().as_raw();
    let open = std::fs::read_dir(format!("/proc/{}/fd", place.pid())).expect("its descriptors").count();
    child::limit_descriptors(place.pid(), user, open as u64 + 8);
    let mut started = Vec::new();
    let refused = (0..20).find_map(|number| {
        let disk = place.disk(&format!("disk-{number}"), MIB);
        let ran = place.run(&["backend-start", "-p", &disk, "-c", "10M"]);
        if ran.code == 0 {
            started.push(disk);
            return None;
        }
        Some((disk, ran))
    });
    let (disk, ran) = refused.expect("one is refused");
    assert!(ran.code == 1 && ran.stderr.contains("(ulimit -n)"), "{ran:?}");
    serves(&mut client);
    place.ok(&["status"]);
    assert_eq!(place.json(&["backend-list"]).as_array().map(Vec::len), Some(started.len() + 1));
    child::limit_descriptors(place.pid(), user, 4096);
    place.ok(&["backend-start", "-p", &disk, "-c", "10M"]);
    serves(&mut client);
    drop(client);
    place.terminate();
    assert!(!place.log().contains("panicked"), "{}", place.log());
}

/// A daemon with umask 0 and a region.
fn without_umask(folder: &Path) -> Place {
    let mut place = Place::under(folder);
    place.umask = Some(0);
    place.start();
    place.register("64M");
    place
}

/// Asserts that other users may not write any file in the folders of the daemon.
fn check_modes(place: &Place) {
    place.ok(&["drain"]);
    until("the recovery points are logged", || place.path("state/recovery-points").is_dir());
    for path in ["state", "run"].iter().flat_map(|folder| all_below(&place.path(folder))) {
        let metadata = path.symlink_metadata().expect("it is there");
        let mode = metadata.mode();
        assert!(metadata.is_symlink() || mode & 0o022 == 0, "{} {mode:o}", path.display());
    }
    assert_eq!(place.path("state").metadata().expect("a folder").mode() & 0o7777, 0o700);
}

#[test]
fn a_daemon_with_umask_0_makes_sockets_that_only_its_user_may_connect_to() {
    let mut place = without_umask(&std::env::temp_dir());
    for (name, export) in [("nbd", "nbd:unix"), ("vm", "vhost-user")] {
        let (disk, socket) = (place.disk(name, 8 * MIB), place.path(&format!("{name}.sock")));
        let export = format!("{export}:{}", socket.display());
        place.ok(&["backend-start", "-p", &disk, "-c", "10M", "-D", "-e", &export]);
    }
    place.client().write(MIB, &[9; 4096], true).expect("written");
    for socket in ["nbd.sock", "vm.sock", "run/control.sock"] {
        let metadata = place.path(socket).metadata().expect("a socket");
        assert!(metadata.file_type().is_socket(), "{socket}");
        assert_eq!(metadata.mode() & 0o777, 0o600, "{socket}");
    }
    check_modes(&place);
    place.terminate();
}

#[test]
fn a_daemon_with_umask_0_and_a_fuse_device_makes_nothing_that_others_may_write() {
    let test = "a_daemon_with_umask_0_and_a_fuse_device_makes_nothing_that_others_may_write";
    in_sandbox(test, Duration::from_secs(120), |folder| {
        let mut place = without_umask(folder);
        let device = place.start_block_device(&place.disk("disk", 8 * MIB), "10M");
        let device = std::fs::File::options().write(true).open(device).expect("opened");
        device.write_all_at(&[9; 4096], MIB).and_then(|()| device.sync_all()).expect("written");
        drop(device);
        check_modes(&place);
        place.terminate();
    });
}

#[test]
fn a_daemon_with_a_disk_that_hangs_ends_and_names_the_disk() {
    let mut place = Place::new();
    place.decorate = Some("fault:op=write,how=stall".to_owned());
    place.start();
    place.register("64M");
    let disk = place.disk("disk", 8 * MIB);
    place.start_backend(&disk);
    place.client().write(MIB, &[9; 4096], true).expect("written");
    assert_eq!(place.run(&["drain", "--timeout", "1"]).code, 1);
    let took = place.terminate_with_a_disk_that_hangs();
    assert!(took < Duration::from_secs(35), "{took:?}");
    let log = place.log();
    let named = |line: &&str| line.contains("not ended in time: backend 0") && line.contains(&disk);
    assert!(log.lines().any(|line| named(&line)), "{log}");
    // No data is lost.
    place.decorate = None;
    place.start();
    until("it is served", || place.json(&["backend-list"])[0]["alive"] == true);
    serves(&mut place.client());
    place.terminate();
}
