//! The backing device of a mounted ext4 grows under load, and the daemon is killed while it does.

mod support;

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use support::pattern::{Random, seed};
use support::sandbox::{Mounted, in_sandbox};
use support::{Fixture, MIB, Ran, text_of, tool, try_tool};

const TIMEOUT: Duration = Duration::from_secs(200);
const SIZE: u64 = 64 * MIB;

fn extend(disk: &str, size: u64) {
    File::options().write(true).open(disk).and_then(|file| file.set_len(size)).expect("larger");
}

/// The bytes of a block device, as the kernel tells programs.
fn size_of(device: &str) -> u64 {
    tool("blockdev", &["--getsize64", device]).trim().parse().expect("a number")
}

fn fio(file: &Path, megabytes: u64, seconds: &str) {
    let (file, size) = (format!("--filename={}", text_of(file)), format!("--size={megabytes}M"));
    let text = tool(
        "fio",
        &[
            "--name=grows",
            &file,
            &size,
            "--direct=1",
            "--ioengine=libaio",
            "--iodepth=16",
            "--rw=randrw",
            "--bs=4k",
            "--time_based",
            "--runtime",
            seconds,
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_state_save=0",
            "--verify_backlog=64",
            "--output-format=terse",
        ],
    );
    assert!(!text.contains("verify:") && !text.contains("err="), "{text}");
}

fn write_file(mounted: &Mounted, name: &str, megabytes: u64) {
    let bytes: Vec<u8> = (0..megabytes * MIB).map(|at| (at / 4096 * 31 + at) as u8).collect();
    std::fs::write(mounted.path(name), bytes).expect("a file");
    File::open(mounted.path(name)).and_then(|file| file.sync_all()).expect("synced");
}

fn summary(mounted: &Mounted, names: &[&str]) -> String {
    let paths: Vec<String> = names.iter().map(|name| text_of(&mounted.path(name))).collect();
    tool("sha256sum", &paths.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Lets the mounted ext4 of a device use all of it; false where the test lacks CAP_SYS_RESOURCE, which the kernel demands.
fn grow_mounted(device: &str) -> bool {
    let Ran { code, stdout, stderr } = try_tool("resize2fs", &[device]);
    let is_denied = stderr.contains("Permission denied to resize");
    assert!(code == 0 || is_denied, "{stdout}{stderr}");
    !is_denied
}

/// Lets the ext4 of a device use all of it, mounted if that is possible.
fn grow_file_system(mounted: Mounted, device: &str) -> Mounted {
    if grow_mounted(device) {
        return mounted;
    }
    println!("grown unmounted: the test lacks CAP_SYS_RESOURCE");
    let at = mounted.path("");
    mounted.unmount();
    tool("e2fsck", &["-fy", device]);
    tool("resize2fs", &[device]);
    Mounted::new(device, &at, "rw")
}

/// Says so when the load has ended, however it did.
struct Ended<'a>(&'a AtomicBool);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn a_mounted_file_system_grows_with_its_disk_under_load() {
    in_sandbox("a_mounted_file_system_grows_with_its_disk_under_load", TIMEOUT, |folder| {
        for cache in ["32M", "0"] {
            let mut fixture = Fixture::preserving(folder);
            fixture.start();
            fixture.register("64M");
            let disk = fixture.disk("disk", SIZE);
            let device = fixture.start_block_device(&disk, cache);
            tool("mkfs.ext4", &["-q", "-E", "resize=1048576", &device]);
            let mounted = Mounted::new(&device, &fixture.path("mnt"), "rw");
            write_file(&mounted, "before", 4);
            let before = summary(&mounted, &["before"]);
            let ended = AtomicBool::new(false);
            let mut size = SIZE;
            std::thread::scope(|scope| {
                let load = scope.spawn(|| {
                    let _ended = Ended(&ended);
                    fio(&mounted.path("fio"), 24, "12");
                });
                for round in 0..20 {
                    assert!(
                        !ended.load(Ordering::SeqCst),
                        "the load ended before the disk had grown {round} times"
                    );
                    let former = size;
                    size += 8 * MIB + 512 * 8;
                    extend(&disk, size);
                    let grown = fixture.json(&["backend-grow", "-b", "0", "--json"]);
                    assert_eq!((grown["before"].as_u64(), grown["now"].as_u64()), (Some(former), Some(size)));
                    assert_eq!(grown["blkdevs"][0]["is_seen"].as_bool(), Some(true), "{grown}");
                    assert_eq!(size_of(&device), size);
                    if round % 5 == 4 {
                        grow_mounted(&device);
                    }
                }
                load.join().expect("the load found no error");
            });
            let mounted = grow_file_system(mounted, &device);
            assert!(fixture.ok(&["backend-grow", "-b", "0"]).contains("as before"));
            // More than the former disk holds.
            write_file(&mounted, "behind", 100);
            let behind = summary(&mounted, &["before", "behind"]);
            assert!(behind.starts_with(before.trim_end()), "{behind}\n{before}");
            fixture.terminate();
            fixture.start();
            assert_eq!(size_of(&device), size);
            tool("sh", &["-c", "echo 3 > /proc/sys/vm/drop_caches"]);
            assert_eq!(summary(&mounted, &["before", "behind"]), behind);
            mounted.unmount();
            tool("e2fsck", &["-fn", &device]);
            fixture.ok(&["dev-stop", "-d", "0"]);
            fixture.ok(&["backend-stop", "-b", "0"]);
            // The plain disk has all of it.
            tool("e2fsck", &["-fn", &disk]);
        }
    });
}

#[test]
fn a_daemon_that_is_killed_while_its_disk_grows_has_the_former_or_the_new_size() {
    in_sandbox(
        "a_daemon_that_is_killed_while_its_disk_grows_has_the_former_or_the_new_size",
        TIMEOUT,
        |folder| {
            let mut fixture = Fixture::preserving(folder);
            fixture.start();
            fixture.register("64M");
            let disk = fixture.disk("disk", SIZE);
            let device = fixture.start_block_device(&disk, "32M");
            tool("mkfs.ext4", &["-q", "-E", "resize=1048576", &device]);
            let mounted = Mounted::new(&device, &fixture.path("mnt"), "rw");
            write_file(&mounted, "before", 8);
            let before = summary(&mounted, &["before"]);
            let mut random = Random(seed());
            let (mut size, mut sizes) = (SIZE, [0; 2]);
            for round in 0..12 {
                let larger = size + 8 * MIB;
                extend(&disk, larger);
                let delay = Duration::from_micros(random.below(12_000));
                std::thread::scope(|scope| {
                    let (socket, binary) = (fixture.socket(), env!("CARGO_BIN_EXE_cbdctrl"));
                    scope.spawn(move || {
                        // It is refused, or done, or its daemon is gone.
                        let command = std::process::Command::new(binary)
                            .args(["backend-grow", "-b", "0"])
                            .env("CBD_SOCKET", socket)
                            .output();
                        command.expect("cbdctrl runs");
                    });
                    std::thread::sleep(delay);
                    fixture.kill();
                });
                fixture.start();
                let recorded =
                    fixture.json(&["backend-list", "--json"])[0]["size"].as_u64().expect("a number");
                assert!(recorded == size || recorded == larger, "round {round}: {recorded}");
                sizes[usize::from(recorded == larger)] += 1;
                assert_eq!(size_of(&device), recorded, "round {round}: what users see");
                write_file(&mounted, "round", 4);
                tool("sh", &["-c", "echo 3 > /proc/sys/vm/drop_caches"]);
                assert_eq!(summary(&mounted, &["before"]), before, "round {round}");
                let grown = fixture.json(&["backend-grow", "-b", "0", "--json"]);
                assert_eq!(grown["now"].as_u64(), Some(larger));
                assert_eq!(size_of(&device), larger);
                grow_mounted(&device);
                size = larger;
            }
            println!("killed with the former size {} times, with the new one {} times", sizes[0], sizes[1]);
            let mounted = grow_file_system(mounted, &device);
            assert_eq!(summary(&mounted, &["before"]), before);
            mounted.unmount();
            tool("e2fsck", &["-fn", &device]);
        },
    );
}
