//! The same bytes by two ways: a file and loop devices over it, loop devices over each other, partitions.
#![allow(missing_docs)]

mod common;

use cbd_backing::{Backing, BackingFile, Options};
use cbd_types::{Error, ErrorKind};
use common::*;
use std::path::{Path, PathBuf};

fn refused(path: &Path) -> Error {
    let error = BackingFile::open(path, Options::default()).map(|backing| backing.describe());
    let error = error.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    error
}

/// Refused because somebody has the file or device `beneath`, and this process is named.
#[track_caller]
fn assert_refused_for(path: &Path, beneath: &Path) {
    let line = refused(path).line();
    let process = format!("process {} (", std::process::id());
    let names = [path, beneath].map(|path| path.to_str().expect("a name").to_owned());
    assert!(names.iter().all(|name| line.contains(name)) && line.contains(&process), "{line}");
}

#[test]
fn a_file_that_is_held_is_not_held_again_through_a_loop_device() {
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
fn a_file_is_held_through_one_loop_device_at_a_time() {
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

#[test]
fn a_loop_device_is_not_held_below_and_above_another() {
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
        // Free, but for the loop device that stands on it.
        let line = refused(&below.path).line();
        assert!(line.contains(above.path.to_str().expect("a name")), "{line}");
    }
    open_again(&below.path);
}

#[test]
fn parts_of_a_file_are_held_apart_and_never_together_where_they_overlap() {
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
fn partitions_of_a_loop_device_are_held_side_by_side_and_their_disk_is_not() {
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
fn a_disk_is_not_held_below_a_loop_device_over_its_partition() {
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
fn a_file_and_a_loop_device_over_it_are_told_to_overlap() {
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
