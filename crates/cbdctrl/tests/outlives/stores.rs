//! Descriptor stores of FUSE devices: the store process, and systemd.

use crate::support::manager::Manager;
use crate::support::sandbox::in_sandbox;
use crate::support::{Fixture, child, text_of, until};
use crate::*;

#[test]
fn a_store_process_that_dies_alone_is_replaced_and_the_device_still_outlives_the_daemon() {
    let name = "stores::a_store_process_that_dies_alone_is_replaced_and_the_device_still_outlives_the_daemon";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let (mut fixture, _, device) = fixture_with_device(folder);
        let first = store_process(&fixture).expect("a store process");
        // And the end of the list; the daemon waits for seconds at the silent mounts.
        std::thread::sleep(Duration::from_millis(500));
        child::signal(&first, libc::SIGKILL);
        until("another store process", || store_process(&fixture).is_some_and(|now| now != first));
        until("the log line", || fixture.log().contains("a new one holds all descriptors"));
        in_time(write_block(&device, 0, 1)).expect("nothing has changed");
        fixture.kill();
        let write = write_block(&device, 4096, 2);
        std::thread::sleep(Duration::from_millis(50));
        assert!(!write.is_finished());
        fixture.start();
        in_time(write).expect("no error");
    });
}

#[test]
fn devices_of_a_daemon_that_was_killed_with_its_store_process_are_removed() {
    let name = "stores::devices_of_a_daemon_that_was_killed_with_its_store_process_are_removed";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let (mut fixture, _, device) = fixture_with_device(folder);
        in_time(write_block(&device, 0, 5)).expect("written");
        let loop_device: PathBuf = std::fs::read_link(&device).expect("a link");
        child::signal(&store_process(&fixture).expect("a store process"), libc::SIGKILL);
        fixture.kill();
        assert!(in_time(write_block(&text_of(&loop_device), 4096, 2)).is_err(), "it has ended");
        fixture.start();
        assert_eq!(mounts_under(&fixture.path("run")), 1);
        let mut byte = [0];
        File::open(&device).expect("open").read_exact_at(&mut byte, 0).expect("read");
        assert_eq!(byte, [5]);
        in_time(write_block(&device, 4096, 6)).expect("written");
    });
}

#[test]
fn a_device_whose_descriptors_systemd_holds_outlives_the_daemon_and_is_not_held_when_it_is_stopped() {
    let name = "stores::a_device_whose_descriptors_systemd_holds_outlives_the_daemon_and_is_not_held_when_it_is_stopped";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let mut fixture = Fixture::preserving(folder);
        fixture.manager = Some(Manager::new(folder));
        fixture.start();
        fixture.register("64M");
        let disk = fixture.disk("disk", SIZE);
        let device = fixture.start_block_device(&disk, "16M");
        let method = fixture.json(&["dev-list"])[0]["method"].to_string();
        assert!(method.contains("outlives the daemon, descriptors held by systemd"), "{method}");
        let stored = || fixture.manager.as_ref().expect("a manager").stored();
        let [(_, descriptors)] = stored()[..] else { panic!("{:?}", stored()) };
        // The channels and the state.
        assert!(descriptors >= 2, "{descriptors}");
        assert_eq!(store_process(&fixture), None);
        for number in 0..4_u64 {
            if number == 3 {
                let used = File::open(&device).expect("open");
                fixture.terminate();
                drop(used);
            } else {
                fixture.kill();
            }
            let write = write_block(&device, number * 4096, 8);
            std::thread::sleep(Duration::from_millis(50));
            assert!(!write.is_finished());
            fixture.start();
            in_time(write).expect("no error");
        }
        let file = File::options().write(true).custom_flags(libc::O_DIRECT).open(&device).expect("open");
        assert_eq!(fixture.run(&["dev-stop", "-d", "0"]).code, 1);
        drop(file);
        fixture.ok(&["backend-stop", "-b", "0"]);
        let stored = || fixture.manager.as_ref().expect("a manager").stored();
        until("an empty store", || stored().is_empty());
        assert_eq!(mounts_under(&fixture.path("run")), 0);
    });
}

#[test]
fn the_status_reports_a_unit_whose_descriptor_store_has_no_capacity() {
    let name = "stores::the_status_reports_a_unit_whose_descriptor_store_has_no_capacity";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let mut fixture = Fixture::preserving(folder);
        fixture.manager = Some(Manager::with_capacity(folder, 0));
        fixture.start();
        fixture.register("64M");
        let disk = fixture.disk("disk", SIZE);
        let device = fixture.start_block_device(&disk, "16M");
        let listed = fixture.json(&["dev-list"])[0].clone();
        assert!(listed["method"].to_string().contains("ends with the daemon"), "{listed}");
        assert!(listed["note"].to_string().contains("FileDescriptorStoreMax= is missing"), "{listed}");
        fixture.kill();
        assert!(in_time(write_block(&device, 0, 1)).is_err(), "as before");
        fixture.start();
        in_time(write_block(&device, 0, 1)).expect("it is back");
    });
}

/// Requests that wait at the preserved export would overwrite later writes through a new one.
#[test]
fn while_the_store_process_is_silent_no_new_export_is_opened_and_then_the_preserved_one_is_served() {
    let name = "stores::while_the_store_process_is_silent_no_new_export_is_opened_and_then_the_preserved_one_is_served";
    in_sandbox(name, Duration::from_secs(90), |folder| {
        let mut fixture = Fixture::preserving(folder);
        fixture.start();
        fixture.register("64M");
        let disk = fixture.disk("disk", SIZE);
        fixture.ok(&["backend-start", "-p", &disk, "-c", "16M", "--start-dev", "--export", "auto"]);
        let method = fixture.json(&["dev-list"])[0]["method"].to_string();
        assert!(method.contains("outlives the daemon, descriptors held by a store process"), "{method}");
        let store_process = store_process(&fixture).expect("a store process");
        fixture.kill();
        let write = write_block(&text_of(&fixture.link(0)), 0, 8);
        child::signal(&store_process, libc::SIGSTOP);
        fixture.start();
        let device = fixture.json(&["dev-list", "--all"])[0].clone();
        assert_eq!(device["alive"], false, "{device}");
        assert!(device["error"].to_string().contains("this daemon cannot reach the store"), "{device}");
        assert!(!write.is_finished(), "it waits");
        child::signal(&store_process, libc::SIGCONT);
        in_time(write).expect("no error");
        until("the device", || fixture.json(&["dev-list"])[0]["alive"] == true);
        let method = fixture.json(&["dev-list"])[0]["method"].to_string();
        assert!(method.contains("outlives the daemon, descriptors held by a store process"), "{method}");
        fixture.ok(&["backend-stop", "-b", "0"]);
    });
}

#[test]
fn an_export_that_is_blocked_at_the_start_is_opened_later() {
    let name = "stores::an_export_that_is_blocked_at_the_start_is_opened_later";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let (mut fixture, _, device) = fixture_with_device(folder);
        fixture.terminate();
        std::fs::write(&device, "no link").expect("a file");
        fixture.start();
        let listed = fixture.json(&["dev-list", "--all"])[0].clone();
        assert!(listed["error"].to_string().contains("exists already"), "{listed}");
        std::fs::remove_file(&device).expect("removed");
        until("the device", || fixture.json(&["dev-list"])[0]["alive"] == true);
        in_time(write_block(&device, 0, 1)).expect("written");
    });
}

#[test]
fn entries_of_a_store_process_move_to_systemd_when_systemd_starts_the_daemon() {
    let name = "stores::entries_of_a_store_process_move_to_systemd_when_systemd_starts_the_daemon";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let (mut fixture, _, device) = fixture_with_device(folder);
        fixture.kill();
        let write = write_block(&device, 0, 1);
        fixture.manager = Some(Manager::new(folder));
        fixture.start();
        in_time(write).expect("no error");
        let method = fixture.json(&["dev-list"])[0]["method"].to_string();
        assert!(method.contains("outlives the daemon, descriptors held by systemd"), "{method}");
        let stored = || fixture.manager.as_ref().expect("a manager").stored().len();
        until("the store", || stored() == 1);
        until("the store process's end", || store_process(&fixture).is_none());
        fixture.kill();
        let write = write_block(&device, 4096, 1);
        fixture.start();
        in_time(write).expect("no error");
        fixture.ok(&["backend-stop", "-b", "0"]);
    });
}

/// A mounted FUSE file system that no process serves: at its start the daemon waits for a response of each.
fn mount_silent(at: &Path) -> File {
    std::fs::create_dir_all(at).expect("a folder");
    let server = File::options().read(true).write(true).open("/dev/fuse").expect("FUSE");
    let data = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
    let text = |text: &str| CString::new(text).expect("no zero");
    let (at, data) = (text(&text_of(at)), text(&data));
    // SAFETY: all are C strings that live until the call is over.
    let mounted =
        unsafe { libc::mount(c"cbd".as_ptr(), at.as_ptr(), c"fuse.cbd".as_ptr(), 0, data.as_ptr().cast()) };
    assert_eq!(mounted, 0, "{}", std::io::Error::last_os_error());
    server
}

/// Whether a daemon is connected to the store process's socket.
fn has_a_daemon(fixture: &Fixture) -> bool {
    let (path, all) = (fixture.text("run/keeper.sock"), std::fs::read_to_string("/proc/net/unix"));
    let is_connected = |line: &str| line.ends_with(&path) && !line.contains(" 00010000 ");
    all.expect("the sockets").lines().any(is_connected)
}

#[test]
fn a_store_process_that_dies_while_the_daemon_still_starts_is_replaced() {
    let name = "stores::a_store_process_that_dies_while_the_daemon_still_starts_is_replaced";
    in_sandbox(name, Duration::from_secs(90), |folder| {
        let (mut fixture, _, device) = fixture_with_device(folder);
        let first = store_process(&fixture).expect("a store process");
        fixture.kill();
        until("no daemon", || !has_a_daemon(&fixture));
        let silent: Vec<File> =
            (0..8).map(|number| mount_silent(&fixture.path(&format!("run/fuse/silent{number}")))).collect();
        let write = write_block(&device, 0, 1);
        fixture.start_without_waiting();
        until("the daemon", || has_a_daemon(&fixture));
        // Before it has listed them, the store process is the only holder of the descriptors.
        let files = format!("/proc/{}/fd", fixture.pid());
        let is_fuse = |file: std::fs::DirEntry| {
            std::fs::read_link(file.path()).is_ok_and(|path| path == Path::new("/dev/fuse"))
        };
        until("the daemon has the descriptors", || {
            std::fs::read_dir(&files).is_ok_and(|mut files| files.any(|file| file.is_ok_and(&is_fuse)))
        });
        child::signal(&first, libc::SIGKILL);
        until("another store process", || store_process(&fixture).is_some_and(|now| now != first));
        let is_ready = || fixture.log().matches("ready: ").count() == 2;
        assert!(!is_ready() && !write.is_finished(), "{}", fixture.log());
        until("the daemon has started", is_ready);
        in_time(write).expect("no error");
        drop(silent);
        fixture.ok(&["backend-stop", "-b", "0"]);
    });
}

#[test]
fn a_store_process_is_not_woken_by_requests_of_its_descriptors() {
    let name = "stores::a_store_process_is_not_woken_by_requests_of_its_descriptors";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let (fixture, _, device) = fixture_with_device(folder);
        let status = format!("/proc/{}/status", store_process(&fixture).expect("a store process"));
        let wakes = || {
            let text = std::fs::read_to_string(&status).expect("it lives");
            let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            line.and_then(|count| count.trim().parse::<u64>().ok()).expect("a number")
        };
        let before = wakes();
        let file = File::options().write(true).custom_flags(libc::O_DIRECT).open(&device).expect("open");
        let block = cbd_types::AlignedBuffer::zeroed(4096);
        (0..500).for_each(|number| file.write_all_at(&block, number * 4096).expect("written"));
        assert_eq!(wakes(), before);
        drop(file);
        fixture.ok(&["backend-stop", "-b", "0"]);
    });
}
