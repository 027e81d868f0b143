//! CBD's own block devices through ublk: what they say of themselves, what they do, and what becomes of them when the daemon goes.

use super::memory::shipped;
use super::{Ended, Given, Host, LIMIT, Ran};
use crate::vm::plan::{Disk, GIB, MIB, Plan};
use std::time::Duration;

/// A region on persistent memory and a device over `/dev/vda`, in `/dev/cbd0`; a daemon that ends, however, is started again by `begin`.
const BEGIN: &str = "
    begin() {
        cbdd --state-dir $state >>/tmp/cbdd.log 2>&1 &
        daemon=$!
        for each in $(seq 300); do
            if cbdctrl tp-list >/dev/null 2>&1; then break; fi
            sleep 0.1
        done
    }
    trap 'cat /tmp/cbdd.log >&2' EXIT
    state=/var/lib/cbd
    mkfs.ext4 -q -b 4096 /dev/pmem0
    mount -t ext4 -o dax /dev/pmem0 /mnt
    begin
    cbdctrl tp-reg --path /mnt/region --size 256M --host guest --format >/dev/null
";

fn plan(script: &str, programs: &[&str]) -> Result<Plan, String> {
    Ok(Plan {
        pmem: Some(GIB),
        disks: vec![Disk::New(256 * MIB), Disk::New(64 * MIB)],
        modules: vec!["ublk_drv".to_owned(), "loop".to_owned()],
        cbd: true,
        files: shipped(&[&["mkfs.ext4"], programs].concat())?,
        timeout: LIMIT,
        ..Plan::of_script(&format!("set -e\n{script}"))
    })
}

/// What the kernel says of the device is what it is; a file system, flushes, discards and writes of zeroes work on it; it is not
/// stopped while it is used, and is gone when it was stopped.
pub fn is_a_disk(host: &Host, _: &Given) -> Result<(), String> {
    let script = format!(
        "{BEGIN}
        cbdctrl backend-start --path /dev/vda --cache-size 128M --start-dev
        cbdctrl dev-list | tr -d ' ' | grep way
        cbdctrl status | grep 'blkdev 0'
        (cd /sys/block/ublkb0/queue; grep . write_cache fua logical_block_size physical_block_size optimal_io_size \\
            discard_granularity discard_max_bytes write_zeroes_max_bytes max_sectors_kb)
        readlink /run/cbd/ublk/ublkb0
        mkfs.ext4 -q /dev/cbd0
        mkdir /fs
        mount /dev/cbd0 /fs
        dd if=/dev/urandom of=/tmp/random bs=1M count=24 2>/dev/null
        dd if=/tmp/random of=/fs/file bs=1M conv=fsync 2>/dev/null
        fstrim -v /fs
        if cbdctrl dev-stop --dev 0 2>&1; then echo stopped while mounted; fi
        umount /fs
        mount /dev/cbd0 /fs
        cmp /tmp/random /fs/file && echo the file is whole
        umount /fs
        dd if=/tmp/random of=/dev/cbd0 bs=1M oflag=direct 2>/dev/null
        /usr/sbin/blkdiscard -o 1M -l 1M /dev/cbd0
        /usr/sbin/blkdiscard -z -o 5M -l 1M /dev/cbd0
        for hole in 1 5; do dd if=/dev/zero of=/tmp/random bs=1M seek=$hole count=1 conv=notrunc 2>/dev/null; done
        dd if=/dev/cbd0 of=/tmp/back bs=1M count=24 iflag=direct 2>/dev/null
        cmp /tmp/random /tmp/back && echo holes are zeroes
        dd if=/dev/cbd0 of=/dev/null bs=512 skip=524288 count=1 2>&1 | grep '0+0 records in'
        cbdctrl dev-stop --dev 0
        ls /dev | grep -e ublkb -e ublkc -e cbd0 || echo nothing is left
        cbdctrl dev-start --backend 0 >/dev/null
        kill $daemon
        wait $daemon
        ls /dev | grep ublkb || echo an unused one does not wait
        begin
        cbdctrl backend-stop --backend 0
        cmp -n 25165824 /tmp/random /dev/vda && echo the disk has all of it"
    );
    let ran = Ran::of(host, &plan(&script, &["fstrim", "blkdiscard"])?, None)?;
    ran.expect(
        Ended::Exited(0),
        &[
            "/dev/cbd0\n",
            "\"way\":\"ublk,/dev/ublkb0,2queuesof64\"",
            "(ublk, /dev/ublkb0, 2 queues of 64)",
            "write_cache:write back\n",
            "fua:1\n",
            "logical_block_size:512\n",
            "physical_block_size:4096\n",
            // The atomic unit of segments of 1 MiB.
            "optimal_io_size:262144\n",
            "discard_granularity:4096\n",
            "discard_max_bytes:2147483648\n",
            "write_zeroes_max_bytes:2147483648\n",
            "max_sectors_kb:1024\n",
            "\n/dev/cbd0\n",
            "bytes trimmed",
            "/dev/cbd0 is mounted at /fs",
            "the file is whole",
            "holes are zeroes",
            "0+0 records in",
            "nothing is left",
            "an unused one does not wait",
            "the disk has all of it",
        ],
    )?;
    if ran.output.contains("stopped while mounted") {
        return Err(ran.complaint("a mounted device was stopped"));
    }
    Ok(())
}

/// The daemon is killed and ended in turns, at moments that nobody chose, its start included, while fio writes and verifies: fio sees no
/// error and no wrong byte. In the end the disk alone has what the device had.
pub fn outlives_its_daemon(host: &Host, given: &Given) -> Result<(), String> {
    let script = format!(
        "{BEGIN}
        cbdctrl backend-start --path /dev/vda --cache-size 128M --start-dev >/dev/null
        load() {{
            rounds=0
            while [ ! -e /tmp/enough ]; do
                fio --name=load --filename=/dev/cbd0 --direct=1 --ioengine=io_uring --iodepth=16 --rw=randwrite \\
                    --bsrange=4k-64k --size=32M --verify=crc32c --verify_fatal=1 --randseed=$rounds >/tmp/fio.log 2>&1 ||
                    {{ echo fio failed in round $rounds; cat /tmp/fio.log; return; }}
                rounds=$((rounds + 1))
                echo $rounds >/tmp/rounds
            done
            echo \"fio is content\"
        }}
        load &
        load=$!
        until [ -e /tmp/rounds ]; do sleep 0.1; done
        for each in $(seq {cuts}); do
            sleep $((each * 7 % 3)).$((each * 37 % 10))
            if [ $((each % 2)) = 1 ]; then kill -9 $daemon; else kill $daemon; fi
            wait $daemon || true
            cbdd --state-dir $state >>/tmp/cbdd.log 2>&1 &
            daemon=$!
        done
        before=$(cat /tmp/rounds)
        until [ $(cat /tmp/rounds) -gt $((before + 1)) ] || ! kill -0 $load 2>/dev/null; do sleep 0.1; done
        touch /tmp/enough
        wait $load
        dd if=/dev/cbd0 of=/tmp/device bs=1M count=32 iflag=direct 2>/dev/null
        cbdctrl backend-stop --backend 0
        cmp -n 33554432 /tmp/device /dev/vda && echo the disk has all of it
        grep -c 'its clients go on' /tmp/cbdd.log
        # No file has these words: a read past the end, an answer that the kernel did not take, a device that was lost.
        dmesg | grep -e 'I/O error' -e 'WARNING' || echo the kernel is content",
        cuts = given.cuts,
    );
    let mut plan = plan(&script, &["fio"])?;
    // What a daemon and a round of fio take, slowly.
    plan.timeout += Duration::from_secs(20) * u32::try_from(given.cuts).unwrap_or(u32::MAX);
    let ran = Ran::of(host, &plan, None)?;
    ran.expect(Ended::Exited(0), &["fio is content", "the disk has all of it", "the kernel is content"])
}

/// A device that nobody wants any more goes when its daemon starts; that of another daemon, which is not running either, waits on
/// and is taken over by that one alone. Without the driver there is another way, and the user is told.
pub fn belongs_to_one_daemon(host: &Host, _: &Given) -> Result<(), String> {
    let script = format!(
        "{BEGIN}
        cbdctrl backend-start --path /dev/vda --cache-size 64M --start-dev
        other=\"--state-dir /var/lib/other --run-dir /run/other --dev-dir /tmp/other\"
        mkdir /tmp/other
        begin_other() {{
            cbdd $other >>/tmp/cbdd.log 2>&1 &
            second=$!
            for each in $(seq 300); do
                if cbdctrl --socket /run/other/control.sock tp-list >/dev/null 2>&1; then break; fi
                sleep 0.1
            done
        }}
        begin_other
        cbdctrl --socket /run/other/control.sock tp-reg --path /mnt/other --size 128M --host other --format >/dev/null
        cbdctrl --socket /run/other/control.sock backend-start --path /dev/vdb --cache-size 64M --start-dev
        dd if=/dev/urandom of=/tmp/random bs=1M count=4 2>/dev/null
        dd if=/tmp/random of=/tmp/other/cbd0 bs=1M oflag=direct 2>/dev/null
        kill -9 $daemon $second
        wait $daemon $second || true
        ls /dev | grep -c ublkb
        rm $state/transports.json
        begin
        ls /dev | grep ublkb
        # Its clients wait.
        dd if=/tmp/other/cbd0 of=/tmp/back bs=1M count=4 iflag=direct 2>/dev/null &
        reader=$!
        sleep 1
        kill -0 $reader && echo the reader waits
        begin_other
        wait $reader
        cmp /tmp/random /tmp/back && echo the reader got it
        cbdctrl --socket /run/other/control.sock backend-stop --backend 0
        kill $second
        wait $second
        ls /dev | grep ublkb || echo none is left
        rmmod ublk_drv
        cbdctrl tp-reg --path /mnt/region --host guest >/dev/null
        cbdctrl backend-list | grep -c backend_path
        cbdctrl dev-list | tr -d ' ' | grep -e way -e note"
    );
    let ran = Ran::of(host, &plan(&script, &[])?, None)?;
    ran.expect(
        Ended::Exited(0),
        &[
            "\n2\nublkb1\n",
            "the reader waits",
            "the reader got it",
            "none is left",
            "\"way\":\"FUSEand/dev/loop0\"",
            "modprobeublk_drv",
        ],
    )
}
