//! Files that are deleted, replaced or truncated while they are in use.
#![allow(missing_docs)]

mod common;

use cbd_backing::{Change, PollableQueue};
use cbd_types::{BackingOp, Error, ErrorKind};
use common::*;
use std::path::Path;

fn fails(queue: &mut dyn PollableQueue, op: BackingOp) -> Error {
    let error = run(queue, op).result.expect_err("failed");
    assert_eq!(error.kind(), ErrorKind::Backing, "{error}");
    error
}

fn truncate(path: &Path, size: u64) {
    let file = std::fs::OpenOptions::new().write(true).open(path).expect("there");
    file.set_len(size).expect("another size");
}

/// Runs the test with io_uring and without.
fn with_and_without_ring(test: fn(&Path, &mut dyn PollableQueue)) {
    for opened in [open, open_synchronous] {
        let directory = directory();
        let path = file(directory.path(), "disk", MIB);
        let backing = opened(&path);
        test(&path, &mut *queue(&backing, 4));
    }
}

#[test]
fn a_truncated_file_is_not_extended_again() {
    with_and_without_ring(|path, queue| {
        run_ok(queue, write(MIB - 4096, &[7; 4096]));
        truncate(path, MIB / 2);
        for op in [write(MIB - 4096, &[8; 4096]), write(MIB / 2 - 512, &[8; 1024])] {
            let line = fails(queue, op).line();
            assert!(
                line.contains("was cut short") && line.contains(path.to_str().expect("a name")),
                "{line}"
            );
        }
        fails(queue, zero(MIB - 8192, 8192));
        fails(queue, discard(MIB - 8192, 8192));
        assert_eq!(std::fs::metadata(path).expect("there").len(), MIB / 2);
        // A read of the truncated part is an error, and returns no zeroes.
        fails(queue, read(MIB - 4096, 4096));
        // The rest of the file is served, but no flush succeeds.
        run_ok(queue, write(0, &[9; 4096]));
        assert!(run_ok(queue, read(0, 4096)).iter().all(|byte| *byte == 9));
        assert!(fails(queue, BackingOp::Flush).line().contains("was cut short"));
        // Restoring the length does not restore the lost data.
        truncate(path, MIB);
        fails(queue, write(MIB - 4096, &[8; 4096]));
        fails(queue, read(MIB - 4096, 4096));
        assert!(fails(queue, BackingOp::Flush).line().contains("was cut short"));
    });
}

#[test]
fn a_truncated_file_is_written_again_after_it_was_restored_and_reopened() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let backing = open(&path);
    truncate(&path, MIB / 2);
    assert!(matches!(backing.watch().check(), Some(Change::Short { .. })));
    truncate(&path, MIB);
    assert!(
        matches!(backing.watch().check(), Some(Change::Short { .. })),
        "it is reported until the device is closed"
    );
    drop(backing);
    let mut queue = queue(&open(&path), 4);
    run_ok(&mut *queue, write(MIB - 4096, &[8; 4096]));
    run_ok(&mut *queue, BackingOp::Flush);
}

#[test]
fn a_deleted_file_is_not_flushed_and_the_error_names_the_path_of_its_data() {
    with_and_without_ring(|path, queue| {
        run_ok(queue, write(0, &[7; 4096]));
        run_ok(queue, BackingOp::Flush);
        std::fs::remove_file(path).expect("removed");
        let line = fails(queue, BackingOp::Flush).line();
        assert!(line.contains("was deleted"), "{line}");
        let at = line.rsplit(' ').next().expect("a path");
        assert_eq!(std::fs::read(at).expect("readable")[..4096], [7; 4096]);
        assert!(run_ok(queue, read(0, 4096)).iter().all(|byte| *byte == 7));
    });
}

#[test]
fn a_watch_reports_changes_of_a_file_until_it_is_closed() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let backing = open(&path);
    let watch = backing.watch();
    assert_eq!((watch.check(), watch.path()), (None, &path));
    std::fs::rename(&path, directory.path().join("moved")).expect("renamed");
    assert!(matches!(watch.check(), Some(Change::Moved { replaced: false, .. })));
    file(directory.path(), "disk", MIB);
    assert!(matches!(watch.check(), Some(Change::Moved { replaced: true, .. })));
    std::fs::remove_file(directory.path().join("moved")).expect("removed");
    assert!(matches!(watch.check(), Some(Change::Deleted { .. })));
    drop(backing);
    assert_eq!(watch.check(), None);
}

#[test]
fn a_file_that_never_had_a_name_is_not_reported_as_deleted() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let nameless = std::fs::OpenOptions::new().read(true).write(true).open(&path).expect("there");
    std::fs::remove_file(&path).expect("removed");
    let backing = open(&cbd_holder::path_of(std::os::fd::AsFd::as_fd(&nameless)));
    assert_eq!(backing.watch().check(), None);
    run_ok(&mut *queue(&backing, 4), BackingOp::Flush);
}

#[test]
fn a_watch_reports_changes_of_the_file_beneath_a_loop_device() {
    if !is_root() {
        return;
    }
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", MIB);
        let device = LoopDevice::new(&path, 512, false);
        let backing = open(&device.path);
        let mut queue = queue(&backing, 4);
        run_ok(&mut *queue, BackingOp::Flush);
        assert_eq!(backing.watch().check(), None);
        std::fs::remove_file(&path).expect("removed");
        assert!(matches!(backing.watch().check(), Some(Change::Deleted { .. })));
        fails(&mut *queue, BackingOp::Flush);
    });
}

/// Tests a loop device over these bytes of a file of four MiB that is truncated to `length` bytes. `kept` and `lost`
/// are offsets of blocks of the device before and after the new end.
fn truncate_beneath(bytes: std::ops::Range<u64>, length: u64, kept: u64, lost: u64) {
    for opened in [open, open_synchronous] {
        let directory = directory();
        let path = file(directory.path(), "disk", 4 * MIB);
        std::fs::write(&path, vec![7; 4 << 20]).expect("filled");
        let device = LoopDevice::on_part(&path, 512, false, bytes.clone());
        let backing = opened(&device.path);
        let mut queue = queue(&backing, 4);
        run_ok(&mut *queue, write(lost, &[8; 4096]));
        run_ok(&mut *queue, BackingOp::Flush);
        truncate(&path, length);
        for op in [write(lost, &[9; 4096]), zero(lost, 4096), discard(lost, 4096), read(lost, 4096)] {
            let line = fails(&mut *queue, op).line();
            assert!(
                line.contains(path.to_str().expect("a name")) && line.contains("was cut short"),
                "{line}"
            );
        }
        assert_eq!(std::fs::metadata(&path).expect("there").len(), length, "the file was extended again");
        run_ok(&mut *queue, write(kept, &[9; 4096]));
        assert!(run_ok(&mut *queue, read(kept, 4096)).iter().all(|byte| *byte == 9));
        // Another program extends the file: the hole is not the lost data.
        truncate(&path, 4 * MIB);
        fails(&mut *queue, read(lost, 4096));
        fails(&mut *queue, write(lost, &[9; 4096]));
        assert!(fails(&mut *queue, BackingOp::Flush).line().contains("was cut short"));
        let short = Change::Short { path: path.clone(), expected: bytes.end, found: length };
        assert_eq!(backing.watch().check(), Some(short));
        drop((queue, backing));
        let again = open_again(&device.path);
        run_ok(&mut *self::queue(&again, 4), BackingOp::Flush);
    }
}

#[test]
fn the_file_beneath_a_loop_device_is_not_extended_again_after_it_was_truncated() {
    if is_root() {
        in_time(|| truncate_beneath(0..4 * MIB, MIB, 0, 3 * MIB));
    }
}

#[test]
fn the_offset_of_a_loop_device_counts_when_the_file_beneath_is_truncated() {
    if is_root() {
        in_time(|| truncate_beneath(MIB..3 * MIB, 2 * MIB + 8192, MIB + 4096, MIB + 8192));
    }
}

#[test]
fn a_file_that_is_truncated_after_the_last_byte_of_a_loop_device_has_lost_no_data() {
    if !is_root() {
        return;
    }
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", 4 * MIB);
        let device = LoopDevice::on_part(&path, 512, false, MIB..2 * MIB);
        let backing = open(&device.path);
        let mut queue = queue(&backing, 4);
        truncate(&path, 2 * MIB);
        run_ok(&mut *queue, write(MIB - 4096, &[8; 4096]));
        run_ok(&mut *queue, BackingOp::Flush);
        assert_eq!(backing.watch().check(), None);
    });
}
