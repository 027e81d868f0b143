//! File systems on CBD's ublk devices: common file-system tests, and power cuts during use.
//!
//! Afterwards every byte is what was written, no repair is needed, and what a program had synchronised before
//! the power cut is there. The same must hold for the disk alone after the cache is removed.
//!
//! Elsewhere: kills of the daemon under a file system (`ublk`), file systems on FUSE and a loop device (the
//! tests of `cbdctrl`).

use super::cuts::MAPPABLE;
use super::memory::{DAEMON, shipped};
use super::{Ended, Given, Host, LIMIT, Ran, between, seeded};
use crate::guest::small;
use crate::plan::{Disk, MIB, Plan, SharedFile, Shipped};
use crate::programs;
use std::time::Duration;

/// A kind of file system, and the programs that create and check it.
struct Kind {
    name: &'static str,
    make: &'static str,
    /// Ends with an error if any repair is needed.
    check: &'static str,
    tools: [&'static str; 2],
    module: Option<&'static str>,
}

const EXT4: Kind = Kind {
    name: "ext4",
    make: "mkfs.ext4 -q",
    check: "e2fsck -f -n",
    tools: ["mkfs.ext4", "e2fsck"],
    module: None,
};

const XFS: Kind = Kind {
    name: "xfs",
    make: "mkfs.xfs -q",
    check: "xfs_repair -n",
    tools: ["mkfs.xfs", "xfs_repair"],
    module: Some("xfs"),
};

/// xfs requires 300 MiB.
const DISK: u64 = 320 * MIB;

/// Files that a guest reports as synchronised before its power is cut: minimum and maximum.
const FILES: (u64, u64) = (4, 24);

/// ext4 through the suite.
pub fn ext4(host: &Host, given: &Given) -> Result<(), String> {
    suite(host, given, &EXT4)
}

/// xfs through the suite.
pub fn xfs(host: &Host, given: &Given) -> Result<(), String> {
    suite(host, given, &XFS)
}

/// ext4 through power cuts.
pub fn ext4_after_cuts(host: &Host, given: &Given) -> Result<(), String> {
    after_cuts(host, given, &EXT4)
}

/// xfs through power cuts.
pub fn xfs_after_cuts(host: &Host, given: &Given) -> Result<(), String> {
    after_cuts(host, given, &XFS)
}

fn plan(given: &Given, kind: &Kind, script: &str) -> Result<Plan, String> {
    let disk = given.folder.join("disk");
    if !disk.exists() {
        std::fs::File::create(&disk)
            .and_then(|file| file.set_len(DISK))
            .map_err(|error| format!("cannot make {}: {error}", disk.display()))?;
    }
    let this = std::env::current_exe().map_err(|error| format!("where is this program? {error}"))?;
    let mut files = shipped(&["mkfs.ext4", "fio", "fstrim"])?;
    files.extend(shipped(&kind.tools)?.into_iter().filter(|tool| !tool.to.ends_with("mkfs.ext4")));
    // busybox's sync synchronises everything, and its shell prefers it unless the path is given.
    files.push(Shipped { from: programs::find("sync")?, to: "/usr/bin/sync".into() });
    files.push(Shipped { from: small(&this, &given.folder), to: "/usr/bin/xtask".into() });
    let modules = ["ublk_drv", "loop"].into_iter().chain(kind.module);
    Ok(Plan {
        nvdimm: Some(SharedFile { path: given.folder.join("nvdimm"), size: 512 * MIB }),
        disks: vec![Disk::File(disk)],
        modules: modules.map(str::to_owned).collect(),
        cbd: true,
        files,
        timeout: LIMIT * 4,
        ..Plan::of_script(&format!("set -e\n{script}"))
    })
}

/// A region in the NVDIMM, a daemon, and a device with a cache much smaller than the disk.
fn made() -> String {
    format!(
        "{MAPPABLE}
        mkfs.ext4 -q -b 4096 /dev/pmem0
        mount -t ext4 -o dax /dev/pmem0 /mnt
        state=/mnt/state
        {DAEMON}
        cbdctrl tp-reg --path /mnt/region --size 128M --host guest --format >/dev/null
        cbdctrl backend-start --path /dev/vda --cache-size 48M --start-dev
        cbdctrl status | grep 'blkdev 0'
        mkdir /fs"
    )
}

/// fio's verification, the file exerciser with and without the page cache, the stress test with its model,
/// and fstrim, with a cache that is full and written back all the time. Then everything is read again through
/// the cache, and from the disk alone.
fn suite(host: &Host, given: &Given, kind: &Kind) -> Result<(), String> {
    let Kind { name, make, check, .. } = kind;
    let script = format!(
        "{}
        {make} /dev/cbd0
        mount -t {name} /dev/cbd0 /fs
        fio --name=verify --filename=/fs/fio --size=64M --direct=1 --ioengine=io_uring --iodepth=16 --rw=randrw \\
            --bsrange=4k-128k --io_size=48M --fsync=64 --verify=crc32c --verify_fatal=1 --verify_state_save=0 >/tmp/fio.log 2>&1 ||
            {{ cat /tmp/fio.log; exit 1; }}
        xtask fsx /fs/buffered --seed 1 --operations 600
        xtask fsx /fs/direct --seed 2 --operations 400 --direct 4096
        xtask fsstress /fs --seed 3 --operations 600 --threads 3
        rm /fs/fio
        fstrim -v /fs
        checksums() {{ (cd $1; find . -type f | sort | xargs -n 50 md5sum); }}
        checksums /fs >/tmp/checksums
        echo $(($(wc -l </tmp/checksums) > 40)) enough files
        umount /fs
        {check} /dev/cbd0
        mount -t {name} -o ro /dev/cbd0 /fs
        checksums /fs | cmp - /tmp/checksums && echo the cache has all of it
        umount /fs
        cbdctrl backend-stop --backend 0
        {check} /dev/vda
        mount -t {name} -o ro /dev/vda /fs
        checksums /fs | cmp - /tmp/checksums && echo the disk has all of it
        umount /fs
        dmesg | grep -e 'I/O error' -e 'WARNING' -e 'Corruption' || echo the kernel reports no error",
        made()
    );
    let ran = Ran::of(host, &plan(given, kind, &script)?, None)?;
    ran.expect(
        Ended::Exited(0),
        &[
            "(ublk, /dev/ublkb0",
            "bytes trimmed",
            "1 enough files",
            "the cache has all of it",
            "the disk has all of it",
            "the kernel reports no error",
        ],
    )
}

/// The power is cut while several threads change the file system and one synchronises files, whose numbers it
/// prints. The next guest mounts the file system as it is, no repair is needed, and each file that was
/// reported is there completely. Then the next round begins.
fn after_cuts(host: &Host, given: &Given, kind: &Kind) -> Result<(), String> {
    let mut random = seeded();
    let Kind { name, make, check, .. } = kind;
    let mut said = 0;
    for round in 0..given.cuts {
        let begin = if round == 0 {
            format!("{}\n{make} /dev/cbd0\nmount -t {name} /dev/cbd0 /fs\nmkdir /fs/kept", made())
        } else {
            found(kind, said)
        };
        let script = format!(
            "{begin}
            (xtask fsstress /fs --seed {round} --operations 1000000 --threads 2 >&2; echo the stress ended) &
            number={said}
            while true; do
                number=$((number + 1))
                {} >/fs/kept/$number
                /usr/bin/sync /fs/kept/$number /fs/kept
                echo $number
            done",
            content("$number")
        );
        let last = said + between(&mut random, FILES.0, FILES.1);
        let pause = Duration::from_millis(between(&mut random, 0, 400));
        let ran = Ran::of_watched(host, &plan(given, kind, &script)?, |line| {
            let goes = line.parse().is_ok_and(|number: u64| number >= last);
            if goes {
                std::thread::sleep(pause);
            }
            goes
        })?;
        ran.expect(Ended::Cut, &[])?;
        if ran.output.contains("the stress ended") {
            return Err(ran.complaint("nothing but a file was written when the power went"));
        }
        said = ran.output.lines().filter_map(|line| line.parse().ok()).max().unwrap_or(said);
    }
    let script = format!(
        "{}
        umount /fs
        cbdctrl backend-stop --backend 0
        {check} /dev/vda && echo the disk is intact
        dmesg | grep -e 'I/O error' -e 'WARNING' -e 'Corruption' || echo the kernel reports no error",
        found(kind, said)
    );
    let ran = Ran::of(host, &plan(given, kind, &script)?, None)?;
    ran.expect(Ended::Exited(0), &["all is there", "the disk is intact", "the kernel reports no error"])
}

/// Brings back the device of the former guest, checks it, and removes the files that were checked.
fn found(kind: &Kind, said: u64) -> String {
    let Kind { name, check, .. } = kind;
    format!(
        "mount -t ext4 -o dax /dev/pmem0 /mnt
        state=/mnt/state
        {DAEMON}
        for each in $(seq 300); do
            if [ -b /dev/cbd0 ]; then break; fi
            sleep 0.1
        done
        if [ ! -b /dev/cbd0 ]; then cat /tmp/cbdd.log >&2; exit 1; fi
        mkdir /fs
        mount -t {name} /dev/cbd0 /fs
        # The mount has replayed the journal: nothing is left to repair.
        umount /fs
        {check} /dev/cbd0 >/tmp/check 2>&1 || {{ cat /tmp/check; exit 1; }}
        mount -t {name} /dev/cbd0 /fs
        number=$(cat /fs/first 2>/dev/null || echo 1)
        while [ $number -le {said} ]; do
            {} | cmp - /fs/kept/$number
            number=$((number + 1))
        done
        echo all is there
        rm -r /fs/kept /fs/stress-*
        mkdir /fs/kept
        echo $(({said} + 1)) >/fs/first
        /usr/bin/sync /fs/first /fs/kept /fs",
        content("$number")
    )
}

/// The content of a file: lines with its number, from some hundred bytes to some pages.
fn content(number: &str) -> String {
    format!("(yes \"file {number}\" | head -c $(({number} * 7919 % 60000 + 1)))")
}
