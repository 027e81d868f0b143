//! Disks that fill up, fail, are truncated, or disappear and reappear: the cache keeps the data that they refuse,
//! reports it, and continues without a command where it can.

mod support;

use cbd_types::AlignedBuffer;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Duration;
use support::sandbox::in_sandbox;
use support::{Fixture, MIB, text_of, tool, until};

const TIMEOUT: Duration = Duration::from_secs(100);
const SIZE: u64 = 16 * MIB;

/// The byte that fills piece `piece` of 64 KiB in version `version`.
fn value(piece: u64, version: u8) -> u8 {
    (piece % 100) as u8 + version * 100 + 1
}

fn write_pieces(fixture: &Fixture, pieces: std::ops::Range<u64>, version: u8) {
    let mut client = fixture.client();
    for piece in pieces {
        client.write(piece * 65536, &[value(piece, version); 65536], false).expect("the cache takes it");
    }
    client.flush().expect("flushed");
}

#[track_caller]
fn expect_pieces(fixture: &Fixture, pieces: std::ops::Range<u64>, version: u8) {
    let mut client = fixture.client();
    for piece in pieces {
        let mut bytes = [0; 65536];
        client.read(piece * 65536, &mut bytes).expect("read");
        assert!(bytes == [value(piece, version); 65536], "piece {piece}");
    }
}

#[track_caller]
fn expect_on_disk(disk: &str, pieces: std::ops::Range<u64>, version: u8) {
    let bytes = std::fs::read(disk).expect("the disk");
    assert_eq!(bytes.len() as u64, SIZE);
    for piece in pieces {
        let at = piece as usize * 65536;
        assert!(bytes[at..at + 65536] == [value(piece, version); 65536], "piece {piece} of the plain disk");
    }
}

/// Waits until the status reports failing writeback with the error `why`.
#[track_caller]
fn until_writeback_fails(fixture: &Fixture, why: &str) {
    until("an error", || fixture.cache()["last_error"].as_str().is_some_and(|text| text.contains(why)));
}

#[track_caller]
fn until_drained(fixture: &Fixture) {
    until("a drained cache", || fixture.cache()["dirty_bytes"] == 0);
    assert!(fixture.cache()["last_error"].is_null());
}

#[test]
fn a_file_system_that_fills_up_loses_no_data_once_space_is_free() {
    in_sandbox("a_file_system_that_fills_up_loses_no_data_once_space_is_free", TIMEOUT, |folder| {
        let small = folder.join("small");
        std::fs::create_dir(&small).expect("a folder");
        tool("mount", &["-t", "tmpfs", "-o", "size=4M", "none", &text_of(&small)]);
        let disk = text_of(&small.join("disk"));
        // Sparse: it fills the file system as it is written.
        File::create(&disk).and_then(|file| file.set_len(SIZE)).expect("a disk");
        let mut fixture = Fixture::under(folder);
        fixture.start();
        fixture.register("64M");
        fixture.start_backend(&disk);
        write_pieces(&fixture, 0..128, 0);
        let ran = fixture.run(&["drain", "-b", "0", "--timeout", "2"]);
        assert_eq!(ran.code, 1, "{ran:?}");
        until_writeback_fails(&fixture, "No space left");
        expect_pieces(&fixture, 0..128, 0);
        write_pieces(&fixture, 0..32, 1);
        // A kill of the daemon does not change that.
        fixture.kill();
        fixture.start();
        expect_pieces(&fixture, 0..32, 1);
        expect_pieces(&fixture, 32..128, 0);
        until_writeback_fails(&fixture, "No space left");
        tool("mount", &["-o", "remount,size=64M", &text_of(&small)]);
        until_drained(&fixture);
        fixture.ok(&["backend-stop", "-b", "0"]);
        expect_on_disk(&disk, 0..32, 1);
        expect_on_disk(&disk, 32..128, 0);
        fixture.terminate();
        tool("umount", &[&text_of(&small)]);
    });
}

#[test]
fn a_file_that_is_truncated_and_restored_loses_no_dirty_data() {
    let mut fixture = Fixture::with_region();
    let disk = fixture.disk("disk", SIZE);
    fixture.start_backend(&disk);
    write_pieces(&fixture, 0..64, 0);
    fixture.ok(&["drain", "-b", "0"]);
    let copy = std::fs::read(&disk).expect("the disk");
    let file = File::options().write(true).open(&disk).expect("the disk");
    file.set_len(0).expect("cut");
    write_pieces(&fixture, 32..96, 1);
    until_writeback_fails(&fixture, &SIZE.to_string());
    // Cached data is served; a read of data that only the disk had fails, and returns no zeroes.
    expect_pieces(&fixture, 32..96, 1);
    let mut bytes = [0; 65536];
    let error = fixture.client().read(SIZE - 65536, &mut bytes).expect_err("the disk has no such bytes");
    assert_eq!(error.errno(), 5, "{error}");
    // The disk is restored. The daemon cannot tell restored data from a hole, so a restart opens the file again.
    std::os::unix::fs::FileExt::write_all_at(&file, &copy, 0).expect("restored");
    until_writeback_fails(&fixture, "was cut short");
    fixture.terminate();
    fixture.start();
    until_drained(&fixture);
    fixture.ok(&["backend-stop", "-b", "0"]);
    expect_on_disk(&disk, 0..32, 0);
    expect_on_disk(&disk, 32..96, 1);
    fixture.terminate();
}

/// A daemon that serves a plain disk as a kernel block device, used as a disk that can fail and disappear.
fn lower_daemon(folder: &std::path::Path, decorate: Option<&str>) -> (Fixture, String) {
    let mut lower_daemon = Fixture::under(folder);
    lower_daemon.decorate = decorate.map(str::to_owned);
    lower_daemon.start();
    lower_daemon.register("16M");
    let disk = lower_daemon.disk("disk", SIZE);
    let printed = lower_daemon.ok(&["backend-start", "-p", &disk, "--start-dev", "--export", "fuse-loop"]);
    (lower_daemon, printed.trim().to_owned())
}

fn upper_daemon(folder: &std::path::Path, device: &str) -> Fixture {
    let mut fixture = Fixture::under(folder);
    fixture.start();
    fixture.register("128M");
    // So large that what the tests write is one epoch: then many requests fail at a time.
    let export = fixture.nbd();
    fixture.ok(&["backend-start", "-p", device, "-c", "96M", "--start-dev", "--export", &export]);
    fixture
}

#[test]
fn a_block_device_that_fails_for_a_while_finally_gets_all_data() {
    let name = "a_block_device_that_fails_for_a_while_finally_gets_all_data";
    in_sandbox(name, TIMEOUT, |folder| {
        let (lower_daemon, device) = lower_daemon(folder, Some("fault:op=write,after=5,times=20"));
        let mut fixture = upper_daemon(folder, &device);
        write_pieces(&fixture, 0..128, 0);
        until_writeback_fails(&fixture, "Input/output error");
        expect_pieces(&fixture, 0..128, 0);
        until_drained(&fixture);
        write_pieces(&fixture, 0..32, 1);
        fixture.ok(&["backend-stop", "-b", "0"]);
        fixture.terminate();
        lower_daemon.ok(&["backend-stop", "-b", "0"]);
        expect_on_disk(&lower_daemon.text("disk"), 0..32, 1);
        expect_on_disk(&lower_daemon.text("disk"), 32..128, 0);
    });
}

#[test]
fn a_disk_that_disappears_and_reappears_gets_all_data_after_a_restart() {
    let name = "a_disk_that_disappears_and_reappears_gets_all_data_after_a_restart";
    in_sandbox(name, TIMEOUT, |folder| {
        let (mut lower_daemon, device) = lower_daemon(folder, None);
        let mut fixture = upper_daemon(folder, &device);
        write_pieces(&fixture, 0..64, 0);
        fixture.ok(&["drain", "-b", "0"]);
        lower_daemon.kill();
        // Writes are acknowledged, and cached data is served.
        write_pieces(&fixture, 32..96, 1);
        until_writeback_fails(&fixture, "error");
        expect_pieces(&fixture, 0..32, 0);
        expect_pieces(&fixture, 32..96, 1);
        let mut bytes = [0; 65536];
        let error = fixture.client().read(SIZE - 65536, &mut bytes).expect_err("only the disk had it");
        assert_eq!(error.errno(), 5, "{error}");
        let ran = fixture.run(&["backend-stop", "-b", "0", "--timeout", "2"]);
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(fixture.terminate() < Duration::from_secs(20), "it ends without its disk");
        // Without the disk the daemon starts, and reports the missing disk.
        fixture.start();
        assert_eq!(fixture.json(&["backend-list"])[0]["alive"], false);
        lower_daemon.start();
        fixture.ok(&["backend-start", "-p", &device]);
        expect_pieces(&fixture, 0..32, 0);
        expect_pieces(&fixture, 32..96, 1);
        until_drained(&fixture);
        fixture.ok(&["backend-stop", "-b", "0"]);
        fixture.terminate();
        lower_daemon.ok(&["backend-stop", "-b", "0"]);
        expect_on_disk(&lower_daemon.text("disk"), 0..32, 0);
        expect_on_disk(&lower_daemon.text("disk"), 32..96, 1);
    });
}

/// A late request must not overwrite data that another export has acknowledged.
#[test]
fn no_export_is_opened_after_a_failed_stop_while_requests_of_the_last_wait_for_the_disk() {
    let name = "no_export_is_opened_after_a_failed_stop_while_requests_of_the_last_wait_for_the_disk";
    in_sandbox(name, TIMEOUT, |folder| {
        let mut fixture = Fixture::under(folder);
        // The disk executes one request at a time.
        fixture.decorate = Some("throttle:latency_us=10000000".to_owned());
        fixture.start();
        fixture.register("64M");
        let disk = fixture.disk("disk", SIZE);
        let device = fixture.start_block_device(&disk, "16M");
        let block = |at: u64| {
            let file = File::options().read(true).write(true).custom_flags(libc::O_DIRECT).open(&device);
            (file.expect("the device"), AlignedBuffer::zeroed(4096), at)
        };
        let (file, bytes, at) = block(0);
        file.write_all_at(&bytes, at).expect("written");
        drop(file);
        let reads: Vec<_> = (1..3)
            .map(|number| {
                let (file, mut bytes, at) = block(number * MIB);
                std::thread::spawn(move || file.read_exact_at(&mut bytes, at))
            })
            .collect();
        until("the reads", || fixture.cache()["read_miss_bytes"].as_u64() >= Some(8192));
        let refused = fixture.run(&["backend-stop", "-b", "0", "--force", "--timeout", "1"]);
        assert_eq!(refused.code, 1, "{}", refused.stdout);
        let listed = fixture.json(&["dev-list", "--all"])[0].clone();
        assert_eq!(listed["alive"], false, "{listed}");
        assert!(listed["error"].to_string().contains("still have requests that wait for"), "{listed}");
        reads
            .into_iter()
            .for_each(|read| drop(read.join().expect("it ends").expect_err("its export is gone")));
        until("the device", || fixture.json(&["dev-list"])[0]["alive"] == true);
    });
}
