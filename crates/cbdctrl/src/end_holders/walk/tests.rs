//! The walk over made-up machines.

use super::*;
use crate::doctor::machine::made::Made;

const RUN: &str = "/run/cbd";

fn found(files: &[(&str, &str)]) -> Vec<String> {
    let made = Made::with(files);
    let machine = made.machine();
    let devices = devices(&machine, Path::new(RUN));
    holders(&machine, &devices).iter().map(ToString::to_string).collect()
}

fn mounts(lines: &[(&str, &str, &str)]) -> String {
    let line = |(id, (number, target, source)): (usize, &(&str, &str, &str))| {
        format!("{id} 1 {number} / {target} rw - ext4 {source} rw\n")
    };
    lines.iter().enumerate().map(line).collect()
}

#[test]
fn nothing_is_found_where_nothing_stands_on_the_devices() {
    assert_eq!(found(&[]), [""; 0]);
    let table = mounts(&[("8:1", "/", "/dev/sda1"), ("0:5", "/dev", "udev")]);
    let files = [
        ("/run/cbd/ublk/ublkb0", "->/dev/cbd0"),
        ("/run/cbd/ublk/ublkb7", "->/dev/cbd7"),
        ("/sys/class/block/ublkb0/dev", "259:0\n"),
        ("/sys/class/block/ublkb0/holders", "/"),
        ("/sys/class/block/sda/holders/dm-9", "/"),
        ("/sys/class/block/dm-9/dm/name", "other\n"),
        ("/proc/self/mountinfo", &table),
    ];
    let made = Made::with(&files);
    assert_eq!(devices(&made.machine(), Path::new(RUN)), ["ublkb0"]);
    assert_eq!(found(&files), [""; 0]);
}

#[test]
fn a_mounted_volume_and_an_array_over_two_devices_end_from_the_top() {
    let table = mounts(&[
        ("8:1", "/", "/dev/sda1"),
        ("252:0", "/srv/lv", "/dev/mapper/vg-lv"),
        ("8:17", "/srv/lv/inner", "/dev/sdb1"),
        ("9:0", "/srv/a\\040b", "/dev/md0"),
    ]);
    let files = [
        ("/run/cbd/ublk/ublkb0", "->/dev/cbd0"),
        ("/run/cbd/ublk/ublkb1", "->/dev/cbd1"),
        ("/run/cbd/ublk/ublkb2", "->/dev/cbd2"),
        ("/sys/class/block/ublkb0/holders/md0", "/"),
        ("/sys/class/block/ublkb1/holders/dm-0", "/"),
        ("/sys/class/block/ublkb2/holders/md0", "/"),
        ("/sys/class/block/md0/md/level", "raid1\n"),
        ("/sys/class/block/md0/dev", "9:0\n"),
        ("/sys/class/block/dm-0/dm/name", "vg-lv\n"),
        ("/sys/class/block/dm-0/dev", "252:0\n"),
        ("/proc/self/mountinfo", &table),
    ];
    assert_eq!(
        found(&files),
        ["mount /srv/a b", "array md0", "mount /srv/lv/inner", "mount /srv/lv", "mapped device vg-lv (dm-0)"]
    );
}

#[test]
fn devices_of_device_mapper_end_before_those_that_they_stand_on() {
    let name = |node: &str, text: &str| (format!("/sys/class/block/{node}/dm/name"), format!("{text}\n"));
    let names = [
        name("dm-0", "vg-p_tmeta"),
        name("dm-1", "vg-p_tdata"),
        name("dm-2", "vg-p-tpool"),
        name("dm-3", "vg-thin"),
    ];
    let mut files = vec![
        ("/run/cbd/ublk/ublkb0", "->/dev/cbd0"),
        ("/sys/class/block/ublkb0/ublkb0p1/partition", "1"),
        ("/sys/class/block/ublkb0p1/holders/dm-0", "/"),
        ("/sys/class/block/ublkb0p1/holders/dm-1", "/"),
        ("/sys/class/block/dm-0/holders/dm-2", "/"),
        ("/sys/class/block/dm-1/holders/dm-2", "/"),
        ("/sys/class/block/dm-2/holders/dm-3", "/"),
        ("/sys/class/block/dm-3/holders/bcache0", "/"),
        ("/sys/class/block/bcache0/dev", "250:0"),
        ("/proc/swaps", "Filename Type Size Used Priority\n/dev/dm-3 partition 8 0 -2\n/swap file 8 0 -3\n"),
    ];
    files.extend(names.iter().map(|(path, text)| (path.as_str(), text.as_str())));
    assert_eq!(
        found(&files),
        [
            "device bcache0, of a kind that is not known here",
            "swap /dev/dm-3",
            "mapped device vg-thin (dm-3)",
            "mapped device vg-p-tpool (dm-2)",
            "mapped device vg-p_tmeta (dm-0)",
            "mapped device vg-p_tdata (dm-1)"
        ]
    );
}

#[test]
fn loop_devices_over_a_device_or_its_files_end_with_what_is_on_them() {
    let table = mounts(&[
        ("8:1", "/", "/dev/sda1"),
        ("7:0", "/srv", "/dev/loop0"),
        ("7:4", "/mnt", "/dev/loop4"),
        ("0:50", "/bind", "/dev/cbd0"),
    ]);
    let files = [
        ("/dev/cbd0", "->loop0"),
        ("/sys/class/block/loop0/loop/backing_file", "/run/cbd/fuse/cbd0/cbd0\n"),
        ("/sys/class/block/loop0/dev", "7:0\n"),
        ("/sys/class/block/loop3/loop/backing_file", "/dev/loop0\n"),
        ("/sys/class/block/loop4/loop/backing_file", "/srv/image\n"),
        ("/sys/class/block/loop4/dev", "7:4\n"),
        ("/sys/class/block/loop5/loop/backing_file", "/home/image\n"),
        ("/proc/self/mountinfo", &table),
    ];
    assert_eq!(
        found(&files),
        ["loop device loop3", "mount /bind", "mount /mnt", "loop device loop4", "mount /srv"]
    );
}

#[test]
fn what_the_system_runs_from_stays() {
    let table = mounts(&[
        ("259:0", "/", "/dev/ublkb0"),
        ("259:0", "/usr", "/dev/ublkb0"),
        ("259:0", "/home", "/dev/ublkb0"),
        ("259:0", "/home", "/dev/ublkb0"),
    ]);
    let files = [
        ("/run/cbd/ublk/ublkb0", "->/dev/cbd0"),
        ("/sys/class/block/ublkb0/dev", "259:0\n"),
        ("/proc/self/mountinfo", &table),
    ];
    assert_eq!(found(&files), ["mount /home", "mount /home"]);
}

#[test]
fn a_circle_of_holders_ends() {
    let files = [
        ("/run/cbd/ublk/ublkb0", "->/dev/cbd0"),
        ("/sys/class/block/ublkb0/holders/dm-0", "/"),
        ("/sys/class/block/dm-0/holders/dm-1", "/"),
        ("/sys/class/block/dm-0/dm/name", "a"),
        ("/sys/class/block/dm-1/holders/dm-0", "/"),
        ("/sys/class/block/dm-1/dm/name", "b"),
    ];
    assert_eq!(found(&files).len(), 2);
}
