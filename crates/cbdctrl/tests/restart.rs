//! The daemon ends or is killed, and the next one restores all objects.

mod support;

use cbd_nbd::Listen;
use cbd_testkit::Command;
use serde_json::Value;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;
use support::sandbox::{Mounted, in_sandbox};
use support::{Fixture, MIB, text_of, tool, until};

/// The lists in JSON.
fn lists(fixture: &Fixture) -> Vec<Value> {
    let mut all: Vec<Value> =
        [&["tp-list"][..], &["host-list"], &["backend-list", "--all"], &["dev-list", "--all"]]
            .iter()
            .map(|arguments| fixture.json(arguments))
            .collect();
    // The usage of a cache changes without commands, and each start measures the copy methods again.
    for transport in all[0].as_array_mut().expect("a list") {
        transport["copy"] = Value::Null;
    }
    for backend in all[2].as_array_mut().expect("a list") {
        backend["cache_used_segs"] = Value::Null;
    }
    all
}

#[test]
fn all_objects_are_restored_ten_times_in_a_row() {
    let mut fixture = Fixture::with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    fixture.start_backend(&disk);
    let second = fixture.disk("second", 4 * MIB);
    let socket = format!("nbd:unix:{}", fixture.text("second.sock"));
    fixture.ok(&["backend-start", "-p", &second, "-D", "-e", &socket, "-c", "12M", "-n", "3"]);
    let other = fixture.in_memory("other-region");
    fixture.ok(&["tp-reg", "-p", &other, "-s", "16M", "-H", "node1", "--format"]);
    fixture.ok(&["set", "-b", "0", "gc_percent=33", "consistency=checkpoint", "writeback_rate=7M"]);
    fixture.client().write(MIB, &[7; 4096], false).expect("written");
    let before = lists(&fixture);
    for _ in 0..10 {
        fixture.terminate();
        fixture.start();
        assert_eq!(lists(&fixture), before);
    }
    let cache = fixture.cache();
    assert_eq!(cache["gc_percent"], 33);
    assert_eq!(cache["consistency"], "checkpoint");
    assert_eq!(cache["writeback_rate"], 7 * MIB);
    let mut data = [0; 4096];
    fixture.client().read(MIB, &mut data).expect("read");
    assert_eq!(data, [7; 4096]);
    assert_eq!(fixture.client_of("second.sock").size(), 4 * MIB);
}

#[test]
fn sigterm_ends_it_in_seconds_while_clients_write() {
    ends_while_clients_write("throttle:mib_per_s=1,latency_us=20000,flush_us=300000");
}

#[test]
fn sigterm_ends_it_in_seconds_however_slow_the_disk_is() {
    ends_while_clients_write("throttle:mib_per_s=0.25,flush_us=300000");
}

/// The disk is so slow that the cache stays full and writers wait. What is on its way to the disk at the signal has to end.
fn ends_while_clients_write(disk_model: &str) {
    let mut fixture = Fixture::new();
    fixture.decorate = Some(disk_model.to_owned());
    fixture.start();
    fixture.register("32M");
    let disk = fixture.disk("disk", 64 * MIB);
    fixture.start_backend(&disk);
    let (sender, ends) = mpsc::channel();
    for number in 0..3_u64 {
        let (mut client, sender) = (fixture.client(), sender.clone());
        std::thread::spawn(move || {
            let mut acknowledged = Vec::new();
            let mut offsets = std::collections::HashMap::new();
            for at in (0..).map(|index: u64| (index * 3 + number) * 65536 % (64 * MIB)) {
                let data = [(at >> 16) as u8 | 1; 65536];
                match client.submit(Command::Write { offset: at, data: &data, fua: false }) {
                    Ok(cookie) => offsets.insert(cookie, at),
                    Err(_) => break,
                };
                if client.in_flight() < 8 {
                    continue;
                }
                match client.complete() {
                    Ok(Some(completed)) if completed.result.is_ok() => {
                        acknowledged.extend(offsets.remove(&completed.cookie));
                    }
                    _ => break,
                }
            }
            let _ = sender.send(acknowledged);
        });
    }
    until("a full cache", || fixture.cache()["writers_waiting"] == true);
    let took = fixture.terminate();
    assert!(took < Duration::from_secs(10), "SIGTERM took {took:?}");
    // Clients see the end as errors.
    let acknowledged: Vec<u64> = (0..3)
        .flat_map(|_| ends.recv_timeout(Duration::from_secs(20)).expect("the client sees the end"))
        .collect();
    assert!(acknowledged.len() > 100, "{} writes", acknowledged.len());
    fixture.decorate = None;
    fixture.start();
    let mut client = fixture.client();
    for at in acknowledged {
        let mut data = [0; 65536];
        client.read(at, &mut data).expect("read");
        assert_eq!(data, [(at >> 16) as u8 | 1; 65536], "at {at}");
    }
    drop(client);
    fixture.ok(&["backend-stop", "-b", "0"]);
}

#[test]
fn a_socket_of_a_killed_daemon_is_taken_over() {
    let mut fixture = Fixture::with_region();
    let disk = fixture.disk("disk", 8 * MIB);
    fixture.start_backend(&disk);
    fixture.kill();
    assert!(fixture.path("run/control.sock").exists(), "a killed daemon leaves its socket");
    fixture.start();
    assert_eq!(fixture.json(&["dev-list"])[0]["alive"], true);
    cbd_testkit::Client::connect(&Listen::Unix(fixture.path("nbd.sock"))).expect("the device is back");
}

/// The loop device that is the target of the link.
fn loop_of(link: &Path) -> String {
    text_of(&std::fs::canonicalize(link).expect("a device"))
}

fn mounts_under(folder: &Path) -> usize {
    let all = std::fs::read_to_string("/proc/self/mounts").expect("the mounts");
    all.lines().filter(|line| line.contains(&*folder.to_string_lossy())).count()
}

#[test]
fn devices_and_mounts_that_a_killed_daemon_left_are_removed() {
    let name = "devices_and_mounts_that_a_killed_daemon_left_are_removed";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let mut fixture = Fixture::under(folder);
        fixture.start();
        fixture.register("64M");
        let disk = fixture.disk("disk", 64 * MIB);
        let device = fixture.start_block_device(&disk, "16M");
        tool("mkfs.ext4", &["-q", &device]);
        for round in 0..3 {
            let mounted = Mounted::new(&device, &folder.join("mnt"), "rw");
            let file = mounted.path(&format!("round-{round}"));
            std::fs::write(&file, b"kept").expect("written");
            tool("sync", &["-f", &text_of(&file)]);
            let dead = loop_of(&fixture.link(0));
            fixture.kill();
            mounted.unmount();
            fixture.start();
            // There is one mount of the daemon and one link, to a device that works.
            assert_eq!(mounts_under(&fixture.path("run")), 1, "in round {round}");
            until("the loop device of the killed daemon is free", || {
                let bound = tool("losetup", &["--list", "--noheadings", "--output", "NAME"]);
                bound.lines().filter(|line| line.trim() == dead).count()
                    <= usize::from(dead == loop_of(&fixture.link(0)))
            });
            let mounted = Mounted::new(&device, &folder.join("mnt"), "rw");
            assert_eq!(std::fs::read(mounted.path(&format!("round-{round}"))).expect("read"), b"kept");
            mounted.unmount();
        }
        fixture.ok(&["backend-stop", "-b", "0"]);
        fixture.terminate();
        assert_eq!(mounts_under(&fixture.path("run")), 0);
        assert!(fixture.link(0).symlink_metadata().is_err(), "the link is gone");
        tool("e2fsck", &["-fn", &disk]);
    });
}

#[test]
fn sigterm_ends_it_in_seconds_while_a_file_system_is_mounted() {
    let name = "sigterm_ends_it_in_seconds_while_a_file_system_is_mounted";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let mut fixture = Fixture::under(folder);
        fixture.start();
        fixture.register("64M");
        let disk = fixture.disk("disk", 64 * MIB);
        let device = fixture.start_block_device(&disk, "16M");
        tool("mkfs.ext4", &["-q", &device]);
        let mounted = Mounted::new(&device, &folder.join("mnt"), "rw");
        std::fs::write(mounted.path("file"), vec![5; 3 << 20]).expect("written");
        tool("sync", &["-f", &text_of(&mounted.path("file"))]);
        let took = fixture.terminate();
        assert!(took < Duration::from_secs(10), "SIGTERM took {took:?}");
        mounted.unmount();
        fixture.start();
        let mounted = Mounted::new(&device, &folder.join("mnt"), "rw");
        assert!(std::fs::read(mounted.path("file")).expect("read") == vec![5; 3 << 20]);
        mounted.unmount();
        fixture.ok(&["backend-stop", "-b", "0"]);
        tool("e2fsck", &["-fn", &disk]);
    });
}

#[test]
fn a_log_on_a_full_file_system_ends_nothing() {
    let fixture = Fixture::new();
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").expect("it is there");
    let mut command = fixture.daemon_command();
    command.stdout(full()).stderr(full());
    let mut daemon = command.spawn().expect("it starts");
    until("the daemon responds", || fixture.run(&["status"]).code == 0);
    fixture.register("64M");
    fixture.start_backend(&fixture.disk("disk", 8 * MIB));
    fixture.client().write(0, &[1; 4096], true).expect("it is served");
    fixture.ok(&["backend-stop", "-b", "0", "--force"]);
    assert!(daemon.try_wait().expect("it is ours").is_none(), "it still runs");
    support::child::terminate(&daemon);
    let ended = support::wait(&mut daemon, Duration::from_secs(20)).expect("it ends");
    assert!(ended.success(), "{ended}");
}
