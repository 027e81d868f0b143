//! Files and block devices that become larger while they are in use.
#![allow(missing_docs)]

mod common;

use cbd_backing::{Backing, BackingFile, Identity, Options};
use cbd_types::{BackingOp, ErrorKind};
use common::*;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

fn set_size(path: &Path, size: u64) {
    let file = std::fs::OpenOptions::new().write(true).open(path).expect("there");
    file.set_len(size).expect("another size");
}

fn grown(backing: &BackingFile) -> (u64, u64) {
    let growth = backing.grow().expect("larger");
    assert!(growth.warnings.is_empty(), "{growth:?}");
    (growth.before, growth.now)
}

fn resize_loop(device: &Path) {
    assert!(Command::new("losetup").arg("-c").arg(device).status().expect("losetup is there").success());
}

#[test]
fn a_file_that_was_extended_is_used_to_its_new_end_behind_the_growth() {
    for opened in [open, open_synchronous] {
        let directory = directory();
        let path = file(directory.path(), "disk", MIB);
        let backing = opened(&path);
        let mut queue = queue(&backing, 4);
        set_size(&path, 3 * MIB + 100);
        let refused = run(&mut *queue, write(MIB, &[7; 4096])).result.expect_err("not grown yet");
        assert_eq!(refused.kind(), ErrorKind::OutOfRange);
        assert_eq!(grown(&backing), (MIB, 3 * MIB));
        run_ok(&mut *queue, write(3 * MIB - 4096, &[7; 4096]));
        assert!(run_ok(&mut *queue, read(3 * MIB - 4096, 4096)).iter().all(|byte| *byte == 7));
        run_ok(&mut *queue, BackingOp::Flush);
        assert_eq!(
            run(&mut *queue, read(3 * MIB, 512)).result.expect_err("its end").kind(),
            ErrorKind::OutOfRange
        );
        assert_eq!((backing.geometry().size, backing.identity().size()), (3 * MIB, 3 * MIB + 100));
        assert_eq!(grown(&backing), (3 * MIB, 3 * MIB));
        // What is beyond the former end is missing from now on, if it is cut off.
        set_size(&path, 2 * MIB);
        assert_eq!(
            run(&mut *queue, read(2 * MIB, 512)).result.map_err(|error| error.kind()),
            Err(ErrorKind::Backing)
        );
    }
}

#[test]
fn a_file_that_has_not_grown_or_has_shrunk_changes_nothing() {
    let directory = directory();
    let path = file(directory.path(), "disk", 2 * MIB);
    let backing = open(&path);
    assert_eq!(grown(&backing), (2 * MIB, 2 * MIB));
    // Less than a sector more.
    set_size(&path, 2 * MIB + 511);
    assert_eq!(grown(&backing), (2 * MIB, 2 * MIB));
    set_size(&path, MIB);
    let error = backing.grow().expect_err("shrunk");
    assert_eq!(error.kind(), ErrorKind::OutOfRange);
    for part in [path.to_str().expect("a name"), "1048576", "2097152"] {
        assert!(error.line().contains(part), "{error}");
    }
    assert_eq!(backing.geometry().size, 2 * MIB);
}

#[test]
fn a_file_that_was_truncated_and_extended_again_does_not_grow() {
    let directory = directory();
    let path = file(directory.path(), "disk", 2 * MIB);
    let backing = open(&path);
    let mut queue = queue(&backing, 4);
    set_size(&path, MIB);
    assert!(run(&mut *queue, write(MIB, &[1; 512])).result.is_err());
    set_size(&path, 4 * MIB);
    let error = backing.grow().expect_err("data is lost");
    assert!(error.kind() == ErrorKind::Backing && error.line().contains("was cut short"), "{error}");
    assert_eq!(backing.geometry().size, 2 * MIB);
}

#[test]
fn a_deleted_file_does_not_grow() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let backing = open(&path);
    let descriptor = std::fs::OpenOptions::new().write(true).open(&path).expect("there");
    std::fs::remove_file(&path).expect("deleted");
    descriptor.set_len(2 * MIB).expect("another size");
    assert_eq!(backing.grow().expect_err("deleted").kind(), ErrorKind::Backing);
}

#[test]
fn a_recorded_size_ends_with_the_growth_and_the_disk_stays_the_same() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let recorded = open(&path).identity();
    set_size(&path, 2 * MIB);
    let options = Options { size: Some(MIB), sector: Some(4096), ..Options::default() };
    let (backing, warnings) = BackingFile::open_recorded(&path, options, &recorded).expect("the same");
    assert!(warnings.iter().any(|warning| warning.contains("backend-grow")), "{warnings:?}");
    assert_eq!(backing.geometry().size, MIB);
    assert_eq!(grown(&backing), (MIB, 2 * MIB));
    let now = Identity::parse(&recorded.to_token()).expect("a token").with_size(backing.identity().size());
    drop(backing);
    let options = Options { size: Some(2 * MIB), ..options };
    let (_, warnings) = BackingFile::open_recorded(&path, options, &now).expect("the same");
    assert!(warnings.is_empty(), "{warnings:?}");
}

/// A length that is read while the file grows must not count as missing bytes.
#[test]
fn writes_go_on_while_a_file_is_extended_and_grows() {
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", MIB);
        let backing = open(&path);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut queue = queue(&backing, 4);
                let mut count = 0;
                while !done.load(Ordering::Relaxed) || count == 0 {
                    let end = backing.geometry().size;
                    run_ok(&mut *queue, write(end - 4096, &[count as u8; 4096]));
                    run_ok(&mut *queue, read(end - 4096, 4096));
                    run_ok(&mut *queue, BackingOp::Flush);
                    count += 1;
                }
            });
            for size in 2..200 {
                set_size(&path, size * MIB);
                assert_eq!(grown(&backing), ((size - 1) * MIB, size * MIB));
            }
            done.store(true, Ordering::Relaxed);
            writer.join().expect("no write failed");
        });
    });
}

#[test]
fn a_loop_device_grows_with_its_file() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let device = LoopDevice::new(&path, 512, false);
    let backing = open(&device.path);
    let mut queue = queue(&backing, 4);
    set_size(&path, 2 * MIB);
    assert_eq!(grown(&backing), (MIB, MIB), "the loop device has its former size");
    resize_loop(&device.path);
    assert_eq!(grown(&backing), (MIB, 2 * MIB));
    run_ok(&mut *queue, write(2 * MIB - 4096, &[7; 4096]));
    run_ok(&mut *queue, BackingOp::Flush);
    // The file beneath must be as long as it is now.
    set_size(&path, MIB + 4096);
    let error = run(&mut *queue, BackingOp::Flush).result.expect_err("cut short");
    assert!(error.line().contains("was cut short"), "{error}");
}

#[test]
fn a_partition_that_grows_into_bytes_of_another_user_is_refused_and_used_as_before() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", 8 * MIB);
    let disk = LoopDevice::new(&path, 512, false);
    let run_tool = |tool: &str, arguments: &[&str]| {
        let status = Command::new(tool).arg(&disk.path).args(arguments).status();
        assert!(status.expect("it is there").success(), "{tool}");
    };
    run_tool("addpart", &["1", "2048", "2048"]);
    let partition = format!("{}p1", disk.path.display());
    let backing = open(Path::new(&partition));
    let other = LoopDevice::on_part(&path, 512, false, 3 * MIB..4 * MIB);
    let held = open(&other.path);
    // Beside the other user.
    run_tool("resizepart", &["1", "4096"]);
    assert_eq!(grown(&backing), (MIB, 2 * MIB));
    // Into its bytes.
    run_tool("resizepart", &["1", "6144"]);
    let error = backing.grow().expect_err("another user has them");
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.line().contains(other.path.to_str().expect("a name")), "{error}");
    assert_eq!(backing.geometry().size, 2 * MIB);
    run_ok(&mut *queue(&backing, 4), write(2 * MIB - 4096, &[7; 4096]));
    // The bytes that it got first are its own.
    let met = LoopDevice::on_part(&path, 512, false, 2 * MIB..3 * MIB);
    assert_eq!(
        BackingFile::open(&met.path, Options::default()).map(|_| ()).expect_err("in use").kind(),
        ErrorKind::Busy
    );
    drop(held);
    // A child process of another test may have a copy of the descriptor for a moment.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while let Err(error) = backing.grow() {
        assert!(std::time::Instant::now() < end, "{error}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(backing.geometry().size, 3 * MIB);
}
