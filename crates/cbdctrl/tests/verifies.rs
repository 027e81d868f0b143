//! `blkverify` beside a daemon: a block device of CBD is recognized by whatever path, and never verified by reads of it.

mod support;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use support::region::RegionFile;
use support::sandbox::{Mounted, in_sandbox};
use support::{Fixture, MIB, Ran, run_for, text_of, tool};

const TIMEOUT: Duration = Duration::from_secs(100);

fn blkverify(fixture: &Fixture, arguments: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
    command.arg0("blkverify").args(arguments).args(["--socket", &fixture.socket()]);
    run_for(command, TIMEOUT)
}

/// A daemon with a block device of 64 MiB, whose disk is a file; also the paths of both.
fn with_block_device(folder: &Path) -> (Fixture, String, String) {
    let mut fixture = Fixture::preserving(folder);
    fixture.start();
    fixture.register("64M");
    let disk = fixture.disk("disk", 64 * MIB);
    let device = fixture.start_block_device(&disk, "20M");
    (fixture, disk, device)
}

#[test]
fn a_block_device_of_cbd_is_recognized_and_never_verified_by_reads() {
    let name = "a_block_device_of_cbd_is_recognized_and_never_verified_by_reads";
    in_sandbox(name, TIMEOUT, |folder| {
        let (mut fixture, _disk, device) = with_block_device(folder);
        let node = text_of(&Path::new(&device).canonicalize().expect("a node"));
        tool("mkfs.ext4", &["-q", "-b", "4096", &device]);
        let mounted = Mounted::new(&device, &fixture.path("mnt"), "rw");
        let file = text_of(&mounted.path("file"));
        tool("dd", &["if=/dev/urandom", &format!("of={file}"), "bs=1M", "count=2", "conv=fsync"]);
        for path in [&device, &node, &file] {
            let ran = blkverify(&fixture, &[path]);
            assert_eq!((ran.code, ran.stdout.contains("all right")), (0, true), "{path} {ran:?}");
        }
        // Contents are compared with the newest data, which the result says.
        let ran = blkverify(&fixture, &["--zero", &device]);
        assert!(ran.code == 2 && ran.stdout.contains("only the newest data"), "{ran:?}");
        // Another program's loop device is a plain disk.
        let image = fixture.disk("image", MIB);
        let plain = tool("losetup", &["--find", "--show", &image]);
        let ran = blkverify(&fixture, &["--zero", plain.trim()]);
        tool("losetup", &["--detach", plain.trim()]);
        assert_eq!((ran.code, ran.stdout.contains("all zero")), (0, true), "{ran:?}");
        // A loop device over the device of CBD is answered from the cache, too.
        let over = tool("losetup", &["--find", "--show", "--offset", "512K", &device]);
        let ran = blkverify(&fixture, &[over.trim()]);
        let all = blkverify(&fixture, &["--all", over.trim()]);
        tool("losetup", &["--detach", over.trim()]);
        assert!(ran.code == 0 && format!("{ran:?}").contains("answers from its cache"), "{ran:?}");
        assert!(all.code == 3 && all.stderr.contains("its copies are not looked at"), "{all:?}");
        fixture.kill();
        for path in [&device, &node, &file] {
            let ran = blkverify(&fixture, &[path]);
            assert!(
                ran.code == 3 && ran.stderr.contains("daemon that serves it is not found"),
                "{path} {ran:?}"
            );
        }
        fixture.start();
        drop(mounted);
    });
}

#[test]
fn what_is_wrong_is_found_repaired_and_right_afterwards() {
    let name = "what_is_wrong_is_found_repaired_and_right_afterwards";
    in_sandbox(name, TIMEOUT, |folder| {
        let (fixture, disk, device) = with_block_device(folder);
        tool("dd", &["if=/dev/urandom", &format!("of={device}"), "bs=64K", "count=16", "oflag=direct"]);
        fixture.ok(&["drain", "-b", "0"]);
        let before = std::fs::read(&disk).expect("the disk");
        let expect = |arguments: &[&str], code: i32, words: &str| {
            let ran = blkverify(&fixture, &[arguments, &[&device]].concat());
            assert!(ran.code == code && ran.stdout.contains(words), "{arguments:?} {ran:?}");
        };
        // The cache's copy is damaged, and the disk has the data: it is repaired by the look at it.
        RegionFile::open(&fixture.region()).damage_data(3 * 4096);
        expect(&[], 1, "bytes 12288 to 16384: cache_damaged, repaired");
        expect(&["--all"], 0, "all right");
        // The disk's copy is damaged: what a read returns is right, and only a repair writes it again.
        let file = File::options().write(true).open(&disk).expect("the disk");
        file.write_all_at(&[0xdd; 4096], 5 * 4096).and_then(|()| file.sync_all()).expect("written");
        expect(&[], 0, "all right");
        expect(&["--all"], 2, "bytes 20480 to 24576: backing_differs");
        expect(&["--all", "--repair"], 1, "backing_differs, repaired");
        fixture.ok(&["drain", "-b", "0", "--verify"]);
        expect(&["--all"], 0, "all right");
        assert!(std::fs::read(&disk).expect("the disk") == before, "the disk has what clients wrote");
    });
}
