//! The same bytes through two paths: a file and loop devices over it, loop devices over each other, partitions.
#![allow(missing_docs)]

mod common;

use cbd_backing::{Backing, BackingFile, Options, after_predecessor};
use cbd_types::{Error, ErrorKind};
use common::*;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn refused(path: &Path) -> Error {
    let error = BackingFile::open(path, Options::default()).map(|backing| backing.describe());
    let error = error.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    error
}

/// Checks that `path` is refused with an error that contains all of `parts`. A child process that a concurrent test is
/// starting has a copy of every descriptor, and so keeps the claim of a block device that was refused or closed a
/// moment ago: an error for that reason is retried until it ends.
#[track_caller]
fn assert_refused_with(path: &Path, parts: &[&str]) {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let line = refused(path).line();
        if parts.iter().all(|part| line.contains(part)) {
            return;
        }
        assert!(line.contains("has it open") && Instant::now() < end, "{line}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a name")
}

/// The name of this process in an error.
fn this_process() -> String {
    format!("process {} (", std::process::id())
}

/// Checks that `path` is refused because this process uses the file or device `beneath`.
#[track_caller]
fn assert_refused_for(path: &Path, beneath: &Path) {
    assert_refused_with(path, &[text(path), text(beneath), &this_process()]);
}

#[test]
fn a_locked_file_is_not_locked_again_through_a_loop_device() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let direct = open(&path);
    let device = LoopDevice::new(&path, 512, false);
    assert_refused_for(&device.path, &path);
    drop(direct);
    open_again(&device.path);
}

#[test]
fn a_file_is_locked_through_one_loop_device_at_a_time() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let (one, other) = (LoopDevice::new(&path, 512, false), LoopDevice::new(&path, 512, false));
    let queue = queue(&open(&one.path), 4);
    assert_refused_for(&other.path, &path);
    let link = directory.path().join("link");
    std::fs::hard_link(&path, &link).expect("a link");
    let third = LoopDevice::new(&link, 512, false);
    assert_refused_for(&third.path, &link);
    drop(queue);
    open_again(&other.path);
}

/// Opens a backing device and checks that a warning contains `part`.
#[track_caller]
fn open_with_warning(path: &Path, part: &str) -> BackingFile {
    let identity = open_again(path).identity();
    let opened = after_predecessor(Duration::from_secs(20), || {
        BackingFile::open_recorded(path, Options::default(), &identity)
    });
    let (backing, warnings) = opened.expect("free");
    assert!(warnings.iter().any(|warning| warning.contains(part)), "{warnings:?}");
    backing
}

#[test]
fn a_file_without_a_name_is_locked_through_one_loop_device_at_a_time() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", 2 * MIB);
    let part = |bytes| LoopDevice::on_part(&path, 512, false, bytes);
    let (one, other, apart) = (part(0..MIB), part(0..MIB), part(MIB..2 * MIB));
    std::fs::remove_file(&path).expect("removed");
    let held = open_with_warning(&one.path, "another process");
    assert_refused_with(&other.path, &[text(&one.path)]);
    drop(open_with_warning(&apart.path, "another process"));
    drop(held);
    open_again(&other.path);
}

#[test]
fn a_block_device_without_a_node_is_locked_through_one_loop_device_at_a_time() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let disk = LoopDevice::new(&file(directory.path(), "disk", 2 * MIB), 512, false);
    let node = directory.path().join("node");
    let made = std::process::Command::new("cp").arg("-a").arg(&disk.path).arg(&node).status();
    assert!(made.expect("cp is there").success());
    let part = |bytes| LoopDevice::on_part(&node, 512, false, bytes);
    let (one, other, apart) = (part(0..MIB), part(0..MIB), part(MIB..2 * MIB));
    std::fs::remove_file(&node).expect("removed");
    let held = open_with_warning(&one.path, "another process");
    assert_refused_with(&other.path, &[text(&one.path)]);
    drop(open_with_warning(&apart.path, "another process"));
    drop(held);
    open_again(&other.path);
}

#[test]
fn a_locked_file_is_not_locked_through_a_loop_device_after_it_lost_its_name() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let direct = open(&path);
    let device = LoopDevice::new(&path, 512, false);
    std::fs::remove_file(&path).expect("removed");
    let line = refused(&device.path).line();
    assert!(line.contains(&format!("process {} (", std::process::id())), "{line}");
    drop(direct);
    open_again(&device.path);
}

#[test]
fn a_loop_device_is_not_locked_below_and_above_another() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let below = LoopDevice::new(&path, 512, false);
    {
        let held = open(&below.path);
        let above = LoopDevice::new(&below.path, 512, false);
        assert_refused_for(&above.path, &below.path);
        drop(held);
        let held = open_again(&above.path);
        let line = refused(&below.path).line();
        assert!(line.contains("in use"), "{line}");
        drop(held);
        // Not locked, but in use by a loop device.
        assert_refused_with(&below.path, &[text(&above.path)]);
    }
    open_again(&below.path);
}

#[test]
fn disjoint_parts_of_a_file_are_locked_separately_and_overlapping_parts_are_refused() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", 4 * MIB);
    let part = |bytes| LoopDevice::on_part(&path, 512, false, bytes);
    let (first, second, over_both) = (part(0..MIB), part(MIB..2 * MIB), part(MIB / 2..MIB + MIB / 2));
    let rest = part(2 * MIB..4 * MIB);
    let held = [&first, &second, &rest].map(|device| open(&device.path));
    assert_refused_for(&over_both.path, &path);
    drop(held);
    open_again(&over_both.path);
}

/// A loop device over a file of four MiB, with two partitions of one MiB each, from the first MiB on.
fn with_partitions(file: &Path) -> (LoopDevice, [PathBuf; 2]) {
    let device = LoopDevice::new(file, 512, false);
    let partitions = [1_u32, 2].map(|number| {
        let start = (2048 * number).to_string();
        let mut command = std::process::Command::new("addpart");
        let made = command.arg(&device.path).arg(number.to_string()).args([start.as_str(), "2048"]).status();
        assert!(made.expect("addpart is there").success());
        PathBuf::from(format!("{}p{number}", device.path.display()))
    });
    (device, partitions)
}

#[test]
fn partitions_of_a_loop_device_are_locked_together_and_their_disk_is_refused() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", 4 * MIB);
    let (device, partitions) = with_partitions(&path);
    let held = partitions.map(|partition| open(&partition));
    assert!(refused(&device.path).line().contains("in use"));
    let again = LoopDevice::new(&path, 512, false);
    assert_refused_for(&again.path, &path);
    let of_the_first = LoopDevice::on_part(&path, 512, false, MIB / 2..MIB + 512);
    assert_refused_for(&of_the_first.path, &path);
    let outside = LoopDevice::on_part(&path, 512, false, 3 * MIB..4 * MIB);
    drop((open(&outside.path), held));
    open_again(&again.path);
}

#[test]
fn a_disk_is_not_locked_below_a_loop_device_over_its_partition() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", 4 * MIB);
    let (device, partitions) = with_partitions(&path);
    let above = LoopDevice::new(&partitions[0], 512, false);
    let line = refused(&device.path).line();
    assert!(line.contains(above.path.to_str().expect("a name")), "{line}");
    let held = open(&above.path);
    let again = LoopDevice::new(&path, 512, false);
    assert_refused_for(&again.path, &path);
    drop(held);
    open_again(&again.path);
}

#[test]
fn a_file_and_a_loop_device_over_it_are_reported_as_overlapping() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let of_file = open(&path).identity();
    let device = LoopDevice::new(&path, 512, false);
    let of_device = open(&device.path).identity();
    assert!(of_file.overlaps(&of_device), "{of_file} {of_device}");
    assert!(of_file.same_disk(&of_device).is_err());
    let other = LoopDevice::new(&file(directory.path(), "other", MIB), 512, false);
    assert!(!of_file.overlaps(&open(&other.path).identity()));
}

#[test]
fn two_readers_share_a_file_through_loop_devices() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", MIB);
    let (one, other) = (LoopDevice::new(&path, 512, false), LoopDevice::new(&path, 512, false));
    let reading = Options { read_only: true, ..Options::default() };
    let held =
        [&one, &other].map(|device| BackingFile::open(&device.path, reading).expect("free to be read"));
    assert_eq!(held.len(), 2);
    let third = LoopDevice::new(&path, 512, false);
    assert_refused_for(&third.path, &path);
}

/// Checks that `path` is refused because this process uses the same bytes for `other`.
#[track_caller]
fn assert_refused_beside(path: &Path, beneath: &Path, other: &Path) {
    assert_refused_with(path, &[text(path), text(beneath), text(other), &this_process()]);
}

#[test]
fn loop_devices_over_parts_of_a_block_device_are_locked_separately_and_refused_if_they_overlap() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let disk = LoopDevice::new(&file(directory.path(), "disk", 4 * MIB), 512, false);
    let part = |bytes| LoopDevice::on_part(&disk.path, 512, false, bytes);
    let (first, second, over_both) = (part(0..MIB), part(MIB..2 * MIB), part(MIB / 2..MIB + MIB / 2));
    let held = [&first, &second].map(|device| open_again(&device.path));
    assert_refused_for(&over_both.path, &disk.path);
    run_ok(&mut *queue(&held[0], 4), write(MIB - 4096, &[1; 4096]));
    run_ok(&mut *queue(&held[1], 4), write(0, &[2; 4096]));
    let [one, other] = held;
    drop(one);
    // The second one keeps its claim.
    assert_refused_beside(&over_both.path, &disk.path, &second.path);
    drop(other);
    open_again(&over_both.path);
    // Dropping the last one releases the claim of the disk itself; but loop devices use it.
    assert_refused_with(&disk.path, &["stands on it"]);
}

#[test]
fn partitions_of_a_loop_device_over_a_block_device_are_locked_together() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let disk = LoopDevice::new(&file(directory.path(), "disk", 4 * MIB), 512, false);
    let (_device, partitions) = with_partitions(&disk.path);
    let again = LoopDevice::on_part(&disk.path, 512, false, 2 * MIB..3 * MIB);
    let held = partitions.each_ref().map(|partition| open_again(partition));
    assert_refused_beside(&again.path, &disk.path, &partitions[1]);
    drop(held);
    open_again(&again.path);
}

#[test]
fn a_partition_is_locked_beside_a_loop_device_over_another_part_of_its_disk() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let path = file(directory.path(), "disk", 4 * MIB);
    let (device, partitions) = with_partitions(&path);
    let above = LoopDevice::on_part(&device.path, 512, false, 2 * MIB..3 * MIB);
    open_again(&partitions[0]);
    assert_refused_with(&partitions[1], &[text(&above.path)]);
    drop(above);
    open_again(&partitions[1]);
}

#[test]
fn a_block_device_that_another_process_uses_is_refused_with_the_reason() {
    if !is_root() {
        return;
    }
    let directory = directory();
    let disk = LoopDevice::new(&file(directory.path(), "disk", 4 * MIB), 512, false);
    let part = LoopDevice::on_part(&disk.path, 512, false, 0..MIB);
    // This process takes the role of the other user.
    let other =
        std::fs::File::options().read(true).custom_flags(libc::O_EXCL).open(&disk.path).expect("free");
    assert_refused_for(&part.path, &disk.path);
    assert_refused_with(&part.path, &["only one process at a time"]);
    drop(other);
    open_again(&part.path);
}

#[test]
fn a_file_is_not_locked_through_one_loop_device_while_another_over_the_same_bytes_is_mounted() {
    if !is_root() {
        return;
    }
    in_time(|| {
        let directory = directory();
        let path = file(directory.path(), "disk", 16 * MIB);
        let made = std::process::Command::new("mke2fs").args(["-q", "-F"]).arg(&path).arg("4M").status();
        assert!(made.expect("mke2fs is there").success());
        let (mounted, same) = (LoopDevice::new(&path, 512, false), LoopDevice::new(&path, 512, false));
        let apart = LoopDevice::on_part(&path, 512, false, 4 * MIB..16 * MIB);
        let first = LoopDevice::on_part(&path, 512, false, 0..4 * MIB);
        own_mounts();
        let point = directory.path().join("point");
        std::fs::create_dir(&point).expect("a folder");
        mount_read_only(&mounted.path, &point);
        for device in [&same, &first] {
            let line = refused(&device.path).line();
            let names = [&mounted.path, &point, &path].map(|path| path.to_str().expect("a name").to_owned());
            assert!(names.iter().all(|name| line.contains(name)), "{line}");
        }
        unmount(&point);
        open_again(&apart.path);
        open_again(&same.path);
    });
}

#[test]
fn a_file_whose_name_is_not_utf8_or_ends_in_a_blank_is_locked_through_one_loop_device_at_a_time() {
    if !is_root() {
        return;
    }
    let directory = directory();
    for name in [&b"disk\xff"[..], b"disk ", b" disk", b"disk\n"] {
        let path = directory.path().join(std::ffi::OsStr::from_bytes(name));
        std::fs::File::create(&path).and_then(|file| file.set_len(MIB)).expect("a file");
        let (one, other) = (LoopDevice::new(&path, 512, false), LoopDevice::new(&path, 512, false));
        let held = open(&one.path);
        let line = refused(&other.path).line();
        assert!(line.contains(&format!("process {} (", std::process::id())), "{line}");
        drop(held);
        open_again(&other.path);
    }
}
