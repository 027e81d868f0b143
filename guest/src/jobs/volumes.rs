//! Volumes of device mapper as backing devices: which bytes each of them uses, as this kernel says it.
//!
//! Invariants: each attempt to start a backend prints one line, `NAME: accepted` or `NAME: refused: MESSAGE`, and the
//! kernel is asked first: an attempt that the kernel itself refuses says nothing about CBD.
//!
//! Elsewhere: tables and devices that were written by hand (the tests of `cbd-backing`).

use super::memory::shipped;
use super::{Ended, Given, Host, LIMIT, Ran};
use crate::plan::{Disk, GIB, MIB, Plan};

/// A region on persistent memory, a daemon, and what the jobs share. Sizes and offsets of volumes are in sectors.
const BEGIN: &str = "
    trap 'cat /tmp/cbdd.log >&2' EXIT
    mkfs.ext4 -q -b 4096 /dev/pmem0
    mount -t ext4 -o dax /dev/pmem0 /mnt
    daemon() {
        control=/run/$1/control.sock
        mkdir -p /tmp/dev-$1
        cbdd --state-dir /var/lib/$1 --run-dir /run/$1 --dev-dir /tmp/dev-$1 >>/tmp/cbdd.log 2>&1 &
        for each in $(seq 300); do
            if cbdctrl --socket $control tp-list >/dev/null 2>&1; then break; fi
            sleep 0.1
        done
        cbdctrl --socket $control tp-reg --path /mnt/$1 --size 128M --host $1 --format >/dev/null
        echo $! >/tmp/$1.pid
    }
    volume() {
        name=$1
        shift
        dmsetup create $name --noudevrules --noudevsync --table \"$*\"
    }
    part() { volume $1 \"0 $2 linear $4 $3\"; }
    drop() { dmsetup remove --noudevrules --noudevsync $@; }
    # Attempts to start a backend with the daemon that was asked last.
    try() {
        if cbdctrl --socket $control backend-start --path $2 --cache-size 9M >/tmp/said 2>&1; then
            echo \"$1: accepted\"
        else
            echo \"$1: refused: $(tr '\\n' ' ' </tmp/said)\"
        fi
    }
    stop() { for each in $@; do cbdctrl --socket $control backend-stop --backend $each >/dev/null; done; }
    kernel() {
        label=$1
        shift
        if \"$@\" >/tmp/said 2>&1; then echo \"$label: the kernel allows it\"; else echo \"$label: the kernel refuses it\"; fi
    }
    export DM_DISABLE_UDEV=1
    daemon one
";

fn plan(script: &str, modules: &[&str], programs: &[&str]) -> Result<Plan, String> {
    Ok(Plan {
        pmem: Some(GIB),
        disks: vec![Disk::New(128 * MIB), Disk::New(64 * MIB)],
        modules: [&["dm_mod", "loop"], modules].concat().iter().map(|&name| name.to_owned()).collect(),
        cbd: true,
        files: shipped(&[&["mkfs.ext4", "dmsetup", "losetup"], programs].concat())?,
        timeout: LIMIT,
        ..Plan::of_script(&format!("set -e\n{BEGIN}\n{script}"))
    })
}

/// Linear volumes over a disk: the same bytes have one user, whichever of them comes first, and bytes that do not
/// overlap have one each.
pub fn over_a_disk(host: &Host, _: &Given) -> Result<(), String> {
    let script = "
        try 'a disk' /dev/vda
        kernel 'a volume over a cached disk' part late 8192 0 /dev/vda
        stop 0
        part first 65536 0 /dev/vda
        part second 65536 65536 /dev/vda
        part over 65536 32768 /dev/vda
        try 'a disk beneath volumes' /dev/vda
        try 'a volume' /dev/dm-0
        try 'a volume by its name' /dev/mapper/first
        try 'a disk beneath a cached volume' /dev/vda
        try 'a volume over some of the bytes' /dev/mapper/over
        try 'a volume over other bytes' /dev/mapper/second
        kernel 'a volume over a cached volume' part upper 4096 61440 /dev/mapper/second
        stop 0
        try 'a volume whose second half is used' /dev/mapper/over
        drop over first
        stop 1
        part layer 32768 0 /dev/mapper/second
        part beside 32768 32768 /dev/mapper/second
        part across 32768 16384 /dev/mapper/second
        try 'a layer' /dev/mapper/layer
        try 'what it stands on' /dev/mapper/second
        try 'a layer over some of the bytes' /dev/mapper/across
        try 'the layer beside it' /dev/mapper/beside
        # Two lines of a table, in the other order.
        printf '0 1024 linear /dev/vdb 2048\\n1024 1024 linear /dev/vdb 0\\n' | dmsetup create --noudevrules --noudevsync lines
        part hole 1024 1024 /dev/vdb
        part end 1024 2048 /dev/vdb
        try 'a volume of two lines' /dev/mapper/lines
        try 'the bytes between them' /dev/mapper/hole
        try 'the bytes of the first line' /dev/mapper/end";
    let ran = Ran::of(host, &plan(script, &[], &[])?, None)?;
    ran.expect(
        Ended::Exited(0),
        &[
            "a disk: accepted",
            "a volume over a cached disk: the kernel refuses it",
            "a disk beneath volumes: refused: cbdctrl: /dev/vda is in use: /dev/dm-0, /dev/dm-1, /dev/dm-2 stand on it",
            "a volume: accepted",
            "a volume by its name: refused: cbdctrl: /dev/mapper/first is backend 0 of transport 0 already",
            "a disk beneath a cached volume: refused: cbdctrl: /dev/vda is in use: /dev/dm-0, /dev/dm-1, /dev/dm-2 stand",
            "over some of the bytes: refused: cbdctrl: /dev/mapper/over is in use: it stands on /dev/vda, and process",
            "(cbdd, this one) uses the same bytes of it for /dev/dm-0",
            "a volume over other bytes: accepted",
            "a volume over a cached volume: the kernel refuses it",
            "a volume whose second half is used: refused: cbdctrl: /dev/mapper/over is in use: it stands on /dev/vda",
            "(cbdd, this one) uses the same bytes of it for /dev/mapper/second",
            "a layer: accepted",
            "what it stands on: refused: cbdctrl: /dev/mapper/second is in use: /dev/dm-0, /dev/dm-2, /dev/dm-3 stand",
            "a layer over some of the bytes: refused: cbdctrl: /dev/mapper/across is in use: it stands on /dev/vda",
            "(cbdd, this one) uses the same bytes of it for /dev/mapper/layer",
            "the layer beside it: accepted",
            "a volume of two lines: accepted",
            "the bytes between them: accepted",
            "the bytes of the first line: refused: cbdctrl: /dev/mapper/end is in use: it stands on /dev/vdb, and process",
            "(cbdd, this one) uses the same bytes of it for /dev/mapper/lines",
        ],
    )
}

/// Linear volumes over a loop device over a file, with two daemons: each byte of the file has one user, and volumes over
/// other bytes may belong to another daemon.
pub fn over_a_file(host: &Host, _: &Given) -> Result<(), String> {
    let script = "
        truncate -s 64M /mnt/file
        /usr/sbin/losetup /dev/loop0 /mnt/file
        part first 32768 0 /dev/loop0
        part second 32768 32768 /dev/loop0
        part over 32768 16384 /dev/loop0
        try 'a file beneath a loop device' /mnt/file
        try 'a volume' /dev/mapper/first
        try 'the loop device' /dev/loop0
        try 'another volume over some of the bytes' /dev/mapper/over
        daemon two
        try 'of the other daemon, over some of the bytes' /dev/mapper/over
        try 'of the other daemon, over other bytes' /dev/mapper/second
        control=/run/one/control.sock
        try 'over bytes of both daemons' /dev/mapper/over
        stop 0
        try 'over bytes of the other daemon alone' /dev/mapper/over";
    let ran = Ran::of(host, &plan(script, &[], &[])?, None)?;
    ran.expect(
        Ended::Exited(0),
        &[
            "a file beneath a loop device: refused: cbdctrl: /mnt/file is in use: the loop device /dev/loop0 stands on it",
            "a volume: accepted",
            "the loop device: refused: cbdctrl: /dev/loop0 is in use: /dev/dm-0, /dev/dm-1, /dev/dm-2 stand on it",
            "another volume over some of the bytes: refused: cbdctrl: /dev/mapper/over is in use: it stands on /mnt/file",
            "(cbdd, this one) uses the same bytes of it for /dev/mapper/first",
            "of the other daemon, over some of the bytes: refused: cbdctrl: /dev/mapper/over is in use: it stands on",
            "(cbdd) holds a lock on that",
            "of the other daemon, over other bytes: accepted",
            "over bytes of both daemons: refused",
            "over bytes of the other daemon alone: refused: cbdctrl: /dev/mapper/over is in use: it stands on /mnt/file",
        ],
    )
}

/// Volumes of other types: stripes and thin volumes use the bytes that their tables name; a volume of a type that CBD
/// does not know uses all of its members, and the refusal says so.
pub fn of_other_types(host: &Host, _: &Given) -> Result<(), String> {
    let script = "
        volume stripes '0 65536 striped 2 128 /dev/vda 0 /dev/vdb 0'
        part within 8192 16384 /dev/vdb
        part behind 8192 32768 /dev/vdb
        try 'stripes' /dev/mapper/stripes
        try 'a volume over bytes of a stripe' /dev/mapper/within
        try 'a volume behind the stripes' /dev/mapper/behind
        part metadata 8192 65536 /dev/vda
        part data 65536 98304 /dev/vda
        part origin 8192 81920 /dev/vda
        dd if=/dev/zero of=/dev/mapper/metadata bs=4k count=1 oflag=direct 2>/dev/null
        volume pool '0 65536 thin-pool /dev/mapper/metadata /dev/mapper/data 128 0'
        dmsetup message pool 0 'create_thin 0'
        dmsetup message pool 0 'create_thin 1'
        volume thin '0 131072 thin /dev/mapper/pool 0 /dev/mapper/origin'
        volume other '0 131072 thin /dev/mapper/pool 1 /dev/mapper/origin'
        volume same '0 65536 thin /dev/mapper/pool 1'
        try 'a thin volume' /dev/mapper/thin
        try 'another one of its pool, with the same origin' /dev/mapper/other
        try 'the pool' /dev/mapper/pool
        try 'the data of the pool' /dev/mapper/data
        try 'the origin' /dev/mapper/origin
        stop 0 1 2
        volume delay '0 8192 delay /dev/vdb 90112 0'
        part far 8192 122880 /dev/vdb
        try 'a volume of an unknown type' /dev/mapper/delay
        try 'another volume over its disk' /dev/mapper/far
        stop 0
        try 'far' /dev/mapper/far
        try 'a volume of an unknown type over a disk that is used' /dev/mapper/delay
        stop 0
        part base 8192 163840 /dev/vda
        part changes 8192 172032 /dev/vda
        volume below '0 8192 snapshot-origin /dev/mapper/base'
        volume snap '0 8192 snapshot /dev/mapper/base /dev/mapper/changes P 8'
        try 'a snapshot' /dev/mapper/snap
        try 'its origin' /dev/mapper/below
        try 'what both stand on' /dev/mapper/base";
    let ran = Ran::of(host, &plan(script, &["dm_thin_pool", "dm_snapshot", "dm_delay"], &[])?, None)?;
    ran.expect(
        Ended::Exited(0),
        &[
            "stripes: accepted",
            "a volume over bytes of a stripe: refused: cbdctrl: /dev/mapper/within is in use: it stands on /dev/vdb, and",
            "(cbdd, this one) uses the same bytes of it for /dev/mapper/stripes",
            "a volume behind the stripes: accepted",
            "a thin volume: accepted",
            "another one of its pool, with the same origin: accepted",
            "the pool: refused: cbdctrl: /dev/mapper/pool is in use: /dev/dm-7, /dev/dm-8, /dev/dm-9 stand on it",
            "the data of the pool: refused: cbdctrl: /dev/mapper/data is in use: /dev/dm-6 stands on it",
            "the origin: refused: cbdctrl: /dev/mapper/origin is in use: /dev/dm-7, /dev/dm-8 stand on it",
            "a volume of an unknown type: accepted",
            "another volume over its disk: refused: cbdctrl: /dev/mapper/far is in use: it stands on /dev/vdb, and process",
            "(cbdd, this one) uses the same bytes of it for /dev/mapper/delay",
            "a volume of an unknown type over a disk that is used: refused",
            "which parts dm-10 uses is not known, it is of type delay, so it counts as using all",
            "a snapshot: accepted",
            "its origin: accepted",
            "what both stand on: refused: cbdctrl: /dev/mapper/base is in use",
        ],
    )
}
