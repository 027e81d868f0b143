//! A FUSE device outlives its daemon: however the daemon ends, users of the device see a pause and no error.

mod stores;
#[path = "../support/mod.rs"]
mod support;

use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use support::pattern::{Random, seed};
use support::region::RegionFile;
use support::sandbox::{Mounted, in_sandbox};
use support::{Fixture, MIB, child, store_process_at, text_of, tool, until, wait};

const SIZE: u64 = 64 * MIB;
/// Longest time that a client may wait once a daemon runs.
const LIMIT: Duration = Duration::from_secs(15);

/// A daemon with a device that outlives it, over a new disk.
fn fixture_with_device(folder: &Path) -> (Fixture, String, String) {
    let mut fixture = Fixture::preserving(folder);
    fixture.start();
    fixture.register("64M");
    let disk = fixture.disk("disk", SIZE);
    let device = fixture.start_block_device(&disk, "16M");
    let method = fixture.json(&["dev-list"])[0]["method"].to_string();
    assert!(method.contains("outlives the daemon, descriptors held by a store process"), "{method}");
    (fixture, disk, device)
}

/// Ends the daemon, by SIGKILL or SIGTERM, and restarts it a little later.
fn restart_daemon(fixture: &mut Fixture, random: &mut Random, round: u64) {
    if round % 3 == 2 {
        let took = fixture.terminate();
        assert!(took < Duration::from_secs(10), "SIGTERM took {took:?}");
    } else {
        fixture.kill();
    }
    std::thread::sleep(Duration::from_millis(random.below(150)));
    fixture.start();
}

/// Writes a block without the page cache.
fn write_block(device: &str, at: u64, value: u8) -> JoinHandle<std::io::Result<()>> {
    let device = device.to_owned();
    std::thread::spawn(move || {
        let file = File::options().write(true).custom_flags(libc::O_DIRECT).open(device)?;
        let mut block = cbd_types::AlignedBuffer::zeroed(4096);
        block.fill(value);
        file.write_all_at(&block, at)
    })
}

#[track_caller]
fn in_time<T>(thread: JoinHandle<T>) -> T {
    let end = Instant::now() + LIMIT;
    while !thread.is_finished() {
        assert!(Instant::now() < end, "the thread still waits");
        std::thread::sleep(Duration::from_millis(5));
    }
    thread.join().expect("it does not panic")
}

fn mounts_under(folder: &Path) -> usize {
    let all = std::fs::read_to_string("/proc/self/mounts").expect("the mounts");
    all.lines().filter(|line| line.contains(&*folder.to_string_lossy())).count()
}

/// The store process of the fixture's daemon.
fn store_process(fixture: &Fixture) -> Option<String> {
    store_process_at(&fixture.path("run/keeper.sock"))
}

fn same(one: &str, other: &str) -> bool {
    support::try_tool("cmp", &[one, other]).code == 0
}

/// Runs fio over all data of the device to its end, and ends and restarts the daemon meanwhile.
fn fio_through_restarts(
    fixture: &mut Fixture,
    device: &str,
    folder: &Path,
    random: &mut Random,
    rounds: &mut u64,
) {
    let mut fio = Command::new("fio");
    fio.args(["--name=load", "--thread", "--ioengine=libaio", "--direct=1", "--rw=randwrite"]);
    fio.args(["--bsrange=4k-64k", "--iodepth=16", "--verify=crc32c", "--verify_fatal=1"]);
    fio.args(["--verify_state_save=0", "--rate=6m", &format!("--size={}", 36 * MIB)]);
    fio.arg(format!("--filename={device}")).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    fio.current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null());
    child::dies_with_the_test(&mut fio);
    let mut fio = fio.spawn().expect("fio");
    // A daemon that ends removes a device that no process has open.
    let loop_device = std::fs::read_link(device).expect("a link");
    let is_opened =
        |file: std::fs::DirEntry| std::fs::read_link(file.path()).is_ok_and(|it| it == loop_device);
    until("fio opens the device", || {
        let files = std::fs::read_dir(format!("/proc/{}/fd", fio.id()));
        files.is_ok_and(|mut files| files.any(|file| file.is_ok_and(&is_opened)))
    });
    while fio.try_wait().expect("a child").is_none() {
        std::thread::sleep(Duration::from_millis(200 + random.below(300)));
        restart_daemon(fixture, random, *rounds);
        *rounds += 1;
        assert!(*rounds < 60, "fio does not end");
    }
    let status = wait(&mut fio, LIMIT).expect("fio ends");
    assert!(status.success(), "fio saw an error: {status}\n{}", fixture.log());
}

#[test]
fn fio_verifies_all_data_through_kills_and_stops_and_the_disk_finally_has_it() {
    let name = "fio_verifies_all_data_through_kills_and_stops_and_the_disk_finally_has_it";
    in_sandbox(name, Duration::from_secs(120), |folder| {
        let mut random = Random(seed());
        let (mut fixture, disk, device) = fixture_with_device(folder);
        let mut rounds = 0;
        // On a busy machine a daemon starts slowly, and one load ends after a few rounds.
        while rounds <= 5 {
            fio_through_restarts(&mut fixture, &device, folder, &mut random, &mut rounds);
        }
        println!("fio saw no error through {rounds} ends of the daemon");
        assert!(fixture.log().contains("its clients continue"));
        let seen = text_of(&fixture.path("seen"));
        tool("dd", &[&format!("if={device}"), &format!("of={seen}"), "bs=1M", "iflag=direct", "status=none"]);
        fixture.ok(&["backend-stop", "-b", "0"]);
        assert!(same(&seen, &disk), "the disk alone has what clients saw");
        assert_eq!(mounts_under(&fixture.path("run")), 0);
        fixture.terminate();
        until("the store process's end", || store_process(&fixture).is_none());
    });
}

#[test]
fn files_are_copied_to_an_ext4_through_kills_and_it_is_clean() {
    let name = "files_are_copied_to_an_ext4_through_kills_and_it_is_clean";
    in_sandbox(name, Duration::from_secs(120), |folder| {
        let mut random = Random(seed());
        let (mut fixture, disk, device) = fixture_with_device(folder);
        tool("mkfs.ext4", &["-q", &device]);
        let mounted = Mounted::new(&device, &folder.join("mnt"), "rw");
        for round in 0..4_u8 {
            let file = mounted.path(&format!("file-{round}"));
            let copying = std::thread::spawn(move || -> std::io::Result<()> {
                let file = File::create(file)?;
                for piece in 0..24_u64 {
                    file.write_all_at(&vec![round + 1; 256 << 10], piece * (256 << 10))?;
                    file.sync_data()?;
                }
                file.sync_all()
            });
            std::thread::sleep(Duration::from_millis(random.below(60)));
            restart_daemon(&mut fixture, &mut random, u64::from(round));
            in_time(copying).expect("no error");
        }
        // The device is mounted while no daemon runs.
        let took = fixture.terminate();
        assert!(took < Duration::from_secs(10), "SIGTERM took {took:?}");
        assert_eq!(mounts_under(&fixture.path("run")), 1);
        fixture.start();
        tool("sh", &["-c", "echo 3 > /proc/sys/vm/drop_caches"]);
        for round in 0..4_u8 {
            let data = std::fs::read(mounted.path(&format!("file-{round}"))).expect("read");
            assert!(data.len() == 6 << 20 && data.iter().all(|&byte| byte == round + 1), "file {round}");
        }
        mounted.unmount();
        fixture.ok(&["backend-stop", "-b", "0"]);
        tool("e2fsck", &["-fn", &disk]);
    });
}

/// No process has the device open, and some of its pages are only in the kernel's page cache.
#[test]
fn a_daemon_ends_although_pages_of_a_closed_device_wait_for_a_disk_that_hangs_and_the_next_writes_them() {
    let name =
        "a_daemon_ends_although_pages_of_a_closed_device_wait_for_a_disk_that_hangs_and_the_next_writes_them";
    in_sandbox(name, Duration::from_secs(90), |folder| {
        let mut fixture = Fixture::preserving(folder);
        // The disk executes one request at a time, and takes longer than a daemon takes to end.
        fixture.decorate = Some("throttle:latency_us=10000000".to_owned());
        fixture.start();
        fixture.register("64M");
        let disk = fixture.disk("disk", SIZE);
        // Without a cache.
        let started = fixture.ok(&["backend-start", "-p", &disk, "--start-dev", "--export", "fuse-loop"]);
        let device = started.trim().to_owned();
        let (loop_path, path) = (std::fs::read_link(&device).expect("a link"), device.clone());
        let close = std::thread::spawn(move || {
            let file = File::options().write(true).open(path).expect("open");
            (0..5).for_each(|number| file.write_all_at(&[9; 65536], number * 8 * MIB).expect("written"));
        });
        let name = loop_path.file_name().and_then(|name| name.to_str()).expect("a name");
        let in_flight = format!("/sys/block/{name}/inflight");
        until("the pages", || {
            !std::fs::read_to_string(&in_flight).expect("it is there").trim().ends_with(" 0")
        });
        let took = fixture.terminate_with_a_disk_that_hangs();
        assert!(took < Duration::from_secs(25), "{took:?}");
        assert!(!close.is_finished());
        fixture.decorate = None;
        fixture.start();
        in_time(close);
        let seen = std::fs::read(&disk).expect("the disk");
        assert!((0..5).all(|number| seen[number * 8 * MIB as usize..][..65536] == [9; 65536]));
        fixture.ok(&["backend-stop", "-b", "0"]);
    });
}

#[test]
fn the_method_of_a_device_shows_that_it_ends_with_the_daemon_while_a_stop_waits_for_its_disk() {
    let name = "the_method_of_a_device_shows_that_it_ends_with_the_daemon_while_a_stop_waits_for_its_disk";
    in_sandbox(name, Duration::from_secs(90), |folder| {
        let mut fixture = Fixture::preserving(folder);
        fixture.decorate = Some("throttle:flush_us=10000000".to_owned());
        fixture.start();
        fixture.register("64M");
        let disk = fixture.disk("disk", SIZE);
        fixture.ok(&["backend-start", "-p", &disk, "--start-dev", "--export", "fuse-loop"]);
        let method = || fixture.json(&["dev-list"])[0]["method"].to_string();
        assert!(method().contains("outlives the daemon"), "{}", method());
        let refused = fixture.run(&["dev-stop", "-d", "0"]);
        assert!(refused.code == 1 && refused.stderr.contains("I/O to it hangs"), "{}", refused.stderr);
        assert!(method().contains("ends with the daemon"), "{}", method());
        until("its return", || method().contains("outlives the daemon, descriptors held by a store process"));
        fixture.ok(&["dev-stop", "-d", "0", "--force"]);
    });
}

#[test]
fn an_unused_device_is_removed_by_a_daemon_that_ends_properly() {
    let name = "an_unused_device_is_removed_by_a_daemon_that_ends_properly";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let (mut fixture, _, device) = fixture_with_device(folder);
        let was = std::fs::read_link(&device).expect("a link");
        fixture.terminate();
        assert_eq!(mounts_under(&fixture.path("run")), 0);
        assert!(std::fs::symlink_metadata(&device).is_err());
        until("the store process's end", || store_process(&fixture).is_none());
        let bound = tool("losetup", &["--list", "--noheadings", "--output", "NAME,BACK-FILE"]);
        let ours = |line: &&str| line.starts_with(&format!("{} ", was.display())) && line.contains("cbd0");
        assert_eq!(bound.lines().find(ours), None);
        fixture.start();
        in_time(write_block(&device, 0, 1)).expect("it is back");
    });
}

#[test]
fn a_device_in_use_is_stopped_by_force_only_and_requests_of_its_users_then_fail() {
    let name = "a_device_in_use_is_stopped_by_force_only_and_requests_of_its_users_then_fail";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let (mut fixture, _, device) = fixture_with_device(folder);
        let file = File::options().write(true).custom_flags(libc::O_DIRECT).open(&device).expect("open");
        fixture.kill();
        fixture.start();
        let refused = fixture.run(&["dev-stop", "-d", "0"]);
        assert_eq!(refused.code, 1);
        assert!(refused.stderr.contains("is open in process"), "{}", refused.stderr);
        file.write_all_at(&cbd_types::AlignedBuffer::zeroed(4096), 0).expect("it continues");
        fixture.ok(&["dev-stop", "-d", "0", "--force"]);
        assert!(file.write_all_at(&cbd_types::AlignedBuffer::zeroed(4096), 0).is_err());
        drop(file);
        assert_eq!(mounts_under(&fixture.path("run")), 0);
        fixture.ok(&["dev-start", "-b", "0", "--export", "fuse-loop"]);
        fixture.terminate();
        until("the store process's end", || store_process(&fixture).is_none());
    });
}

#[test]
fn users_wait_for_a_region_and_for_a_disk_that_appear_late() {
    let name = "users_wait_for_a_region_and_for_a_disk_that_appear_late";
    in_sandbox(name, Duration::from_secs(90), |folder| {
        let (mut fixture, disk, device) = fixture_with_device(folder);
        in_time(write_block(&device, 0, 1)).expect("written");
        for (number, path) in [(1_u64, fixture.region()), (2, disk)] {
            fixture.kill();
            let away = format!("{path}.away");
            std::fs::rename(&path, &away).expect("moved");
            let write = write_block(&device, number * 4096, 7);
            fixture.start();
            std::thread::sleep(Duration::from_millis(300));
            assert!(!write.is_finished(), "it waits for {path}");
            std::fs::rename(&away, &path).expect("moved back");
            in_time(write).expect("no error");
        }
        let file = File::open(&device).expect("open");
        let mut byte = [0];
        file.read_exact_at(&mut byte, 4096).expect("read");
        assert_eq!(byte, [7]);
        file.read_exact_at(&mut byte, 0).expect("read");
        assert_eq!(byte, [1]);
    });
}

#[test]
fn a_device_whose_disk_does_not_come_back_is_stopped_by_force() {
    let name = "a_device_whose_disk_does_not_come_back_is_stopped_by_force";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let (mut fixture, disk, device) = fixture_with_device(folder);
        let used = File::open(&device).expect("open");
        fixture.kill();
        std::fs::rename(&disk, format!("{disk}.away")).expect("moved");
        let write = write_block(&device, 0, 1);
        fixture.start();
        assert_eq!(fixture.run(&["dev-stop", "-d", "0"]).code, 1);
        assert!(!write.is_finished());
        fixture.ok(&["dev-stop", "-d", "0", "--force"]);
        assert!(in_time(write).is_err(), "its user sees an error");
        drop(used);
        assert_eq!(mounts_under(&fixture.path("run")), 0);
    });
}

#[test]
fn a_device_whose_region_does_not_come_back_is_stopped_by_force() {
    let name = "a_device_whose_region_does_not_come_back_is_stopped_by_force";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let (mut fixture, _, device) = fixture_with_device(folder);
        let used = File::open(&device).expect("open");
        fixture.kill();
        let away = format!("{}.away", fixture.region());
        std::fs::rename(fixture.region(), &away).expect("moved");
        let write = write_block(&device, 0, 1);
        fixture.start();
        let ran = fixture.run(&["dev-stop", "-d", "0"]);
        assert!(ran.code == 1 && ran.stderr.contains("--force"), "{ran:?}");
        let ran = fixture.run(&["dev-stop", "-d", "1", "--force"]);
        assert!(ran.code == 1 && ran.stderr.contains("no device cbd1 waits"), "{ran:?}");
        assert!(!write.is_finished());
        fixture.ok(&["dev-stop", "-d", "0", "--force"]);
        assert!(in_time(write).is_err(), "its user sees an error");
        drop(used);
        assert_eq!(mounts_under(&fixture.path("run")), 0);
        let ran = fixture.run(&["dev-stop", "-d", "0", "--force"]);
        assert!(ran.code == 1 && ran.stderr.contains("no device cbd0 waits"), "{ran:?}");
        // The region reappears, and the daemon creates a new device.
        std::fs::rename(&away, fixture.region()).expect("moved back");
        until("the device", || fixture.path("dev/cbd0").exists());
        in_time(write_block(&device, 0, 2)).expect("written");
        until("its transport is in the tables", || fixture.run(&["backend-stop", "-b", "0"]).code == 0);
    });
}

#[test]
fn a_device_without_a_block_device_is_ended_at_the_start() {
    let name = "a_device_without_a_block_device_is_ended_at_the_start";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let (mut fixture, _, device) = fixture_with_device(folder);
        let used = File::open(&device).expect("open");
        fixture.kill();
        // The daemon loses its list of regions, and with it the device.
        std::fs::remove_file(fixture.path("state/transports.json")).expect("removed");
        let write = write_block(&device, 0, 1);
        fixture.start();
        assert!(in_time(write).is_err());
        assert!(fixture.log().contains("cbd0 was left by a predecessor and belongs to no block device"));
        drop(used);
        assert_eq!(mounts_under(&fixture.path("run")), 0);
        assert!(std::fs::symlink_metadata(&device).is_err());
    });
}

#[test]
fn a_device_whose_row_is_damaged_waits_and_is_not_swept_as_unwanted() {
    let name = "a_device_whose_row_is_damaged_waits_and_is_not_swept_as_unwanted";
    in_sandbox(name, Duration::from_secs(60), |folder| {
        let (mut fixture, _, device) = fixture_with_device(folder);
        in_time(write_block(&device, 0, 1)).expect("written");
        fixture.kill();
        let region = RegionFile::open(&fixture.region());
        let rows = region.pairs().into_iter().find(|(name, ..)| *name == "row of the block device");
        let (_, slots, length) = rows.expect("it has one");
        let damage = || slots.iter().for_each(|&at| region.damage(at, length));
        damage();
        let write = write_block(&device, 4096, 2);
        fixture.start();
        let status = fixture.ok(&["status"]);
        assert!(status.contains("both copies of row 0 of the block devices"), "{status}");
        assert!(!write.is_finished() && mounts_under(&fixture.path("run/fuse")) == 1);
        fixture.kill();
        // Applying the same damage again restores the row.
        damage();
        fixture.start();
        in_time(write).expect("no error");
        fixture.ok(&["backend-stop", "-b", "0"]);
    });
}
