//! File systems on a cached block device: created, loaded, trimmed, checked, and read from the plain disk afterwards.

#[path = "../../../xtask/src/fsstress.rs"]
mod fsstress;
#[path = "../../../xtask/src/fsx.rs"]
mod fsx;
#[path = "../../../harness/src/random.rs"]
mod random;
mod support;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use support::sandbox::{Mounted, in_sandbox};
use support::{Fixture, MIB, text_of, tool};

const TIMEOUT: Duration = Duration::from_secs(120);

/// Names, sizes and contents of all files.
fn summary(mounted: &Mounted) -> String {
    let root = text_of(&mounted.path(""));
    tool("sh", &["-c", &format!("cd {root} && find . -type f -print0 | sort -z | xargs -0 sha256sum")])
}

fn write_files(mounted: &Mounted) {
    for number in 0..200_u32 {
        let folder = mounted.path(&format!("folder-{}", number % 7));
        std::fs::create_dir_all(&folder).expect("a folder");
        let bytes: Vec<u8> = (0..number * 211).map(|at| (at * 31 + number) as u8).collect();
        std::fs::write(folder.join(number.to_string()), bytes).expect("a file");
    }
    for number in (0..200_u32).step_by(3) {
        let _ = std::fs::remove_file(mounted.path(&format!("folder-{}/{number}", number % 7)));
    }
}

fn fio(mounted: &Mounted, arguments: &[&str]) {
    let file = format!("--filename={}", text_of(&mounted.path("fio")));
    let common = ["--name=cached", &file, "--size=96M", "--direct=1", "--ioengine=libaio", "--iodepth=16"];
    let verify = ["--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0", "--output-format=terse"];
    let text = tool("fio", &[&common[..], &verify, arguments].concat());
    assert!(!text.contains("verify:") && !text.contains("err="), "{text}");
}

/// Commands that send writes past the cache, one behind the other, and back.
const MODES: [&[&str]; 8] = [
    &["set", "-b", "0", "cache_mode=writethrough"],
    &["set", "-b", "0", "cache_mode=writeback", "sequential_write_cutoff=64K", "when_full=around"],
    &["set", "-b", "0", "cache_mode=writearound"],
    &["set", "-b", "0", "cache_mode=passthrough"],
    &["set", "-b", "0", "cache_mode=writeback", "sequential_write_cutoff=off", "congestion_write_us=1"],
    &["set", "-b", "0", "cache_mode=writethrough", "consistency=none"],
    &["set", "-b", "0", "cache_mode=passthrough", "consistency=checkpoint"],
    &["set", "-b", "0", "cache_mode=writeback", "consistency=strict"],
];

/// Commands that change the size of the cache, and take it away.
const SIZES: [&[&str]; 4] = [
    &["cache-resize", "-b", "0", "-c", "80M"],
    &["cache-resize", "-b", "0", "-c", "20M"],
    &["cache-detach", "-b", "0"],
    &["cache-attach", "-b", "0", "-c", "32M"],
];

/// Commands that run beside the load, in turns.
#[derive(Clone, Copy)]
struct Changes {
    commands: &'static [&'static [&'static str]],
    /// How many of them, at least.
    count: u32,
}

const NO_CHANGES: Changes = Changes { commands: &MODES, count: 0 };

/// Says so when the load has ended, however it did.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Runs the commands until `ended`, and counts them.
fn change(fixture: &Fixture, changes: Changes, ended: &AtomicBool, done: &AtomicU32) {
    for command in changes.commands.iter().cycle() {
        if ended.load(Ordering::SeqCst) {
            break;
        }
        fixture.ok(command);
        done.fetch_add(1, Ordering::SeqCst);
        // The load goes on in each way for a moment.
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Files, random writes with verification, and fsx and fsstress, on a file system with this device.
fn load(mounted: &Mounted) {
    fio(mounted, &["--rw=randwrite", "--bs=4k", "--io_size=24M", "--fsync=256"]);
    fio(mounted, &["--rw=randrw", "--bsrange=4k-256k", "--io_size=96M", "--fsync=64"]);
    write_files(mounted);
    for (seed, direct) in [(1, None), (2, Some(4096))] {
        let path = mounted.path(&format!("fsx-{seed}"));
        let plan = fsx::Plan { path, seed, operations: 800, size: 4 * MIB, direct };
        fsx::run(&plan).unwrap_or_else(|text| panic!("{text}"));
    }
    let plan = fsstress::Plan { path: mounted.path(""), seed: 3, operations: 1500, threads: 3 };
    fsstress::run(&plan).unwrap_or_else(|text| panic!("{text}"));
}

/// Tests a file system that `make` creates and `check` verifies, both with the device as their last argument, while `changes` run.
fn works(folder: &Path, make: &[&str], check: &[&str], size: u64, changes: Changes) {
    let on = |command: &[&str], device: &str| tool(command[0], &[&command[1..], &[device]].concat());
    let mut fixture = Fixture::under(folder);
    fixture.start();
    fixture.register("128M");
    let disk = fixture.disk("disk", size);
    // Much smaller than the written data, so that writeback and reclaim run continuously.
    let device = fixture.start_block_device(&disk, "32M");
    on(make, &device);
    let mounted = Mounted::new(&device, &folder.join("mnt"), "rw");
    let (ended, done) = (AtomicBool::new(changes.count == 0), AtomicU32::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| change(&fixture, changes, &ended, &done));
        let _ended = Ended(&ended);
        load(&mounted);
        while done.load(Ordering::SeqCst) < changes.count {
            fio(&mounted, &["--rw=randrw", "--bsrange=4k-256k", "--io_size=96M", "--fsync=64"]);
        }
    });
    std::fs::remove_file(mounted.path("fio")).expect("removed");
    tool("fstrim", &["-v", &text_of(&mounted.path(""))]);
    let before = summary(&mounted);
    assert!(before.lines().count() > 100, "{before}");
    mounted.unmount();
    on(check, &device);
    // Data is read from the device, not from the page cache of the previous mount.
    let mounted = Mounted::new(&device, &folder.join("mnt"), "ro");
    assert_eq!(summary(&mounted), before, "read through the cache");
    mounted.unmount();
    fixture.ok(&["dev-stop", "--dev", "0"]);
    fixture.ok(&["backend-stop", "--backend", "0"]);
    fixture.terminate();
    on(check, &disk);
    let mounted = Mounted::new(&disk, &folder.join("plain"), "loop,ro");
    assert_eq!(summary(&mounted), before, "read from the plain disk");
    mounted.unmount();
}

#[test]
fn ext4_works_on_a_cached_device_and_on_the_plain_disk_afterwards() {
    in_sandbox("ext4_works_on_a_cached_device_and_on_the_plain_disk_afterwards", TIMEOUT, |folder| {
        works(folder, &["mkfs.ext4", "-q"], &["e2fsck", "-fn"], 256 * MIB + 5 * 512, NO_CHANGES);
    });
}

#[test]
fn xfs_works_on_a_cached_device_and_on_the_plain_disk_afterwards() {
    in_sandbox("xfs_works_on_a_cached_device_and_on_the_plain_disk_afterwards", TIMEOUT, |folder| {
        works(folder, &["mkfs.xfs", "-q"], &["xfs_repair", "-n"], 512 * MIB, NO_CHANGES);
    });
}

#[test]
fn btrfs_works_on_a_cached_device_and_on_the_plain_disk_afterwards() {
    in_sandbox("btrfs_works_on_a_cached_device_and_on_the_plain_disk_afterwards", TIMEOUT, |folder| {
        works(folder, &["mkfs.btrfs", "-q"], &["btrfs", "check", "--check-data-csum"], 512 * MIB, NO_CHANGES);
    });
}

#[test]
fn ext4_works_while_what_goes_past_the_cache_changes() {
    in_sandbox("ext4_works_while_what_goes_past_the_cache_changes", TIMEOUT, |folder| {
        let count = if std::env::var_os("CBD_ROUNDS").is_some() { 100 } else { 20 };
        let changes = Changes { commands: &MODES, count };
        works(folder, &["mkfs.ext4", "-q"], &["e2fsck", "-fn"], 256 * MIB + 5 * 512, changes);
    });
}

#[test]
fn ext4_works_while_its_cache_grows_shrinks_is_detached_and_is_attached() {
    let name = "ext4_works_while_its_cache_grows_shrinks_is_detached_and_is_attached";
    in_sandbox(name, TIMEOUT, |folder| {
        let count = if std::env::var_os("CBD_ROUNDS").is_some() { 200 } else { 24 };
        let changes = Changes { commands: &SIZES, count };
        works(folder, &["mkfs.ext4", "-q"], &["e2fsck", "-fn"], 256 * MIB + 5 * 512, changes);
    });
}
