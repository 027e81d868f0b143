//! CBD's own block devices through ublk: their attributes, their operations, and what happens to them when
//! the daemon ends.

use super::memory::shipped;
use super::{Ended, Given, Host, LIMIT, Ran};
use crate::plan::{Disk, GIB, MIB, Plan};
use std::time::Duration;

/// A region on persistent memory, and a daemon that serves it; `begin` starts another daemon after it has
/// ended.
const BEGIN: &str = "
    begin() {
        cbdd --state-dir $state $@ >>/tmp/cbdd.log 2>&1 &
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

/// What the guest of [`is_a_disk`] prints.
const OF_A_DISK: [&str; 24] = [
    "/dev/cbd0\n",
    "\"method\":\"ublk,/dev/ublkb0,2queuesof64\"",
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
    "the file is intact",
    "holes are zeroes",
    "0+0 records in",
    "/dev/ublkb0p1 is mounted at /fs",
    "a partition keeps its disk",
    "the partition is served",
    "nothing is left",
    "an unused one does not wait",
    "the disk has all of it",
];

/// The kernel reports the device's attributes correctly; a file system, flushes, discards and writes of
/// zeroes work on it; it cannot be stopped while it is in use, and is gone after a stop.
pub fn is_a_disk(host: &Host, _: &Given) -> Result<(), String> {
    let script = format!(
        "{BEGIN}
        cbdctrl backend-start --path /dev/vda --cache-size 128M --start-dev
        cbdctrl dev-list | tr -d ' ' | grep method
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
        cmp /tmp/random /fs/file && echo the file is intact
        umount /fs
        dd if=/tmp/random of=/dev/cbd0 bs=1M oflag=direct 2>/dev/null
        /usr/sbin/blkdiscard -o 1M -l 1M /dev/cbd0
        /usr/sbin/blkdiscard -z -o 5M -l 1M /dev/cbd0
        for hole in 1 5; do dd if=/dev/zero of=/tmp/random bs=1M seek=$hole count=1 conv=notrunc 2>/dev/null; done
        dd if=/dev/cbd0 of=/tmp/back bs=1M count=24 iflag=direct 2>/dev/null
        cmp /tmp/random /tmp/back && echo holes are zeroes
        dd if=/dev/cbd0 of=/dev/null bs=512 skip=524288 count=1 2>&1 | grep '0+0 records in'
        printf 'n\\np\\n1\\n\\n\\nw\\n' | fdisk /dev/cbd0 >/dev/null 2>&1 || true
        mkfs.ext4 -q /dev/ublkb0p1
        mount /dev/ublkb0p1 /fs
        cbdctrl dev-stop --dev 0 2>&1 || echo a partition keeps its disk
        kill $daemon
        wait $daemon
        begin
        dd if=/dev/zero of=/fs/file bs=1M count=1 conv=fsync 2>/dev/null && echo the partition is served
        umount /fs
        dd if=/tmp/random of=/dev/cbd0 bs=1M oflag=direct 2>/dev/null
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
    ran.expect(Ended::Exited(0), &OF_A_DISK)?;
    if ran.output.contains("stopped while mounted") {
        return Err(ran.complaint("a mounted device was stopped"));
    }
    Ok(())
}

/// The daemon is killed and stopped in turns, at arbitrary moments, its start included, while fio writes and
/// verifies: fio sees no error and no wrong byte. At the end the disk alone has the content of the device.
pub fn outlives_its_daemon(host: &Host, given: &Given) -> Result<(), String> {
    let script = format!(
        "{BEGIN}
        cbdctrl backend-start --path /dev/vda --cache-size 128M --start-dev >/dev/null
        load() {{
            # Keeps the device in use between two rounds, so that a stopping daemon does not remove it.
            exec 9</dev/cbd0
            rounds=0
            while [ ! -e /tmp/enough ]; do
                fio --name=load --filename=/dev/cbd0 --direct=1 --ioengine=io_uring --iodepth=16 --rw=randwrite \\
                    --bsrange=4k-64k --size=16M --verify=crc32c --verify_fatal=1 --randseed=$rounds >/tmp/fio.log 2>&1 ||
                    {{ echo fio failed in round $rounds; cat /tmp/fio.log; return; }}
                rounds=$((rounds + 1))
                echo $rounds >/tmp/rounds
            done
            echo \"fio reports no error\"
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
        dd if=/dev/cbd0 of=/tmp/device bs=1M count=16 iflag=direct 2>/dev/null
        cbdctrl backend-stop --backend 0
        cmp -n 16777216 /tmp/device /dev/vda && echo the disk has all of it
        grep -c 'its clients continue' /tmp/cbdd.log
        dmesg | grep -e 'I/O error' -e 'WARNING' || echo the kernel reports no error",
        cuts = given.cuts,
    );
    let mut plan = plan(&script, &["fio"])?;
    // The time that a daemon and a round of fio take on a slow machine.
    plan.timeout += LIMIT + Duration::from_secs(20) * u32::try_from(given.cuts).unwrap_or(u32::MAX);
    let ran = Ran::of(host, &plan, None)?;
    ran.expect(
        Ended::Exited(0),
        &["fio reports no error", "the disk has all of it", "the kernel reports no error"],
    )
}

/// A device that no client uses any more is removed when its daemon starts, but not while another process
/// serves it. A device of another daemon that is not running stays, and only that daemon takes it over.
/// Without the driver there is another transport, and the user is told.
pub fn belongs_to_one_daemon(host: &Host, _: &Given) -> Result<(), String> {
    let script = format!(
        "{BEGIN}
        cbdctrl backend-start --path /dev/vda --cache-size 64M --start-dev
        # A daemon with a copy of the state has its marks, too.
        mkdir /tmp/copy
        cp -r $state /var/lib/copy
        rm /var/lib/copy/transports.json
        cbdd --state-dir /var/lib/copy --run-dir /run/copy --dev-dir /tmp/copy >>/tmp/cbdd.log 2>&1 &
        copy=$!
        for each in $(seq 300); do
            if cbdctrl --socket /run/copy/control.sock tp-list >/dev/null 2>&1; then break; fi
            sleep 0.1
        done
        kill $copy
        wait $copy
        dd if=/dev/cbd0 of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null && echo a copy takes nothing away
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
        # The clients of the device wait.
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
        cbdctrl dev-list | tr -d ' ' | grep -e method -e note"
    );
    let ran = Ran::of(host, &plan(&script, &[])?, None)?;
    ran.expect(
        Ended::Exited(0),
        &[
            "a copy takes nothing away",
            "\n2\nublkb1\n",
            "the reader waits",
            "the reader got it",
            "none is left",
            "\"method\":\"FUSEand/dev/loop0,outlivesthedaemon,descriptorsheldbyastoreprocess\"",
            "modprobeublk_drv",
        ],
    )
}

/// As [`outlives_its_daemon`], with a file system in between: copies equal their originals, and no repair is
/// needed.
pub fn keeps_a_file_system(host: &Host, given: &Given) -> Result<(), String> {
    let script = format!(
        "{BEGIN}
        cbdctrl backend-start --path /dev/vda --cache-size 128M --start-dev >/dev/null
        mkfs.ext4 -q /dev/cbd0
        mkdir /fs
        mount /dev/cbd0 /fs
        dd if=/dev/urandom of=/tmp/random bs=1M count=8 2>/dev/null
        load() {{
            copies=0
            while [ ! -e /tmp/enough ]; do
                dd if=/tmp/random of=/fs/copy bs=64k conv=fsync 2>/dev/null || {{ echo a write failed; return; }}
                echo 3 >/proc/sys/vm/drop_caches
                cmp /tmp/random /fs/copy || {{ echo a copy differs; return; }}
                mv /fs/copy /fs/$((copies % 8))
                copies=$((copies + 1))
                echo $copies >/tmp/copies
            done
            echo all copies are right
        }}
        load &
        load=$!
        until [ -e /tmp/copies ]; do sleep 0.1; done
        for each in $(seq {cuts}); do
            sleep $((each * 5 % 3)).$((each * 31 % 10))
            if [ $((each % 2)) = 1 ]; then kill -9 $daemon; else kill $daemon; fi
            wait $daemon || true
            begin
        done
        touch /tmp/enough
        wait $load
        umount /fs
        e2fsck -f -n /dev/cbd0
        cbdctrl backend-stop --backend 0
        e2fsck -f -n /dev/vda && echo the disk is intact
        dmesg | grep -e 'I/O error' -e 'EXT4-fs error' -e 'WARNING' || echo the kernel reports no error",
        cuts = given.cuts,
    );
    let mut plan = plan(&script, &["e2fsck"])?;
    plan.timeout += LIMIT + Duration::from_secs(20) * u32::try_from(given.cuts).unwrap_or(u32::MAX);
    let ran = Ran::of(host, &plan, None)?;
    ran.expect(
        Ended::Exited(0),
        &["all copies are right", "the disk is intact", "the kernel reports no error"],
    )
}

/// A read waits for a disk that takes ten seconds for each request. A daemon that stops does not wait for it,
/// and the next daemon receives the read again. A forced stop answers the read with an error, and ends long
/// before the disk does; then the device can be created again.
pub fn stops_over_what_hangs(host: &Host, _: &Given) -> Result<(), String> {
    let script = format!(
        "{BEGIN}
        now() {{ cut -d . -f 1 /proc/uptime; }}
        read_block() {{
            if dd if=/dev/cbd0 of=/dev/null bs=4k skip=$1 count=1 iflag=direct 2>/dev/null; then
                echo \"block $1 was read\"
            else
                echo \"block $1 cannot be read\"
            fi
        }}
        cbdctrl backend-start --path /dev/vda --cache-size 128M --start-dev >/dev/null
        # Caches what the kernel reads when the disk appears, so that these reads do not wait.
        dd if=/dev/urandom of=/dev/cbd0 bs=1M count=4 oflag=direct 2>/dev/null
        cbdctrl drain --backend 0 >/dev/null 2>&1
        kill $daemon
        wait $daemon
        begin --throttle latency_us=10000000
        read_block 30000 &
        reader=$!
        sleep 1
        begun=$(now)
        kill $daemon
        wait $daemon
        if [ $(($(now) - begun)) -lt 9 ]; then echo it ended in time; fi
        begin
        wait $reader
        kill $daemon
        wait $daemon
        begin --throttle latency_us=10000000
        read_block 40000 &
        reader=$!
        sleep 1
        begun=$(now)
        cbdctrl dev-stop --dev 0 --force
        if [ $(($(now) - begun)) -lt 9 ]; then echo it stopped in time; fi
        wait $reader
        ls /dev | grep ublkb || echo it is gone
        # The aborted request is still in flight: a write could reach the disk after later writes of a new device.
        if cbdctrl dev-start --backend 0 2>/tmp/refused; then echo served too early; fi
        grep -q 'closed by force still have requests' /tmp/refused && echo a new one is refused
        sleep 9
        cbdctrl dev-start --backend 0
        dd if=/dev/cbd0 of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null && echo it is back"
    );
    let ran = Ran::of(host, &plan(&script, &[])?, None)?;
    ran.expect(
        Ended::Exited(0),
        &[
            "it ended in time",
            "block 30000 was read",
            "block 40000 cannot be read",
            "it stopped in time",
            "it is gone",
            "a new one is refused",
            "/dev/cbd0\n",
            "it is back",
        ],
    )
}

/// Writes wait for space in a full cache. A forced stop answers them with errors, and the device is created again: from
/// the first answer of the new device on, no write of the old one takes effect, when there is space again and at the end.
pub fn gives_up_what_waits(host: &Host, _: &Given) -> Result<(), String> {
    let script = format!(
        "{BEGIN}
        cbdctrl backend-start --path /dev/vda --cache-size 16M --start-dev >/dev/null
        # Writeback makes space for one request in half a minute, and the writes that fill the cache wait for that first.
        cbdctrl set --backend 0 writeback_rate=32K >/dev/null
        for letter in o n; do head -c 4096 /dev/zero | tr '\\0' $letter >/tmp/$letter; done
        # The first chunk, and so the lane of the writes below, until no space is left: large writes, then small ones.
        fill() {{ while dd if=/dev/zero of=/dev/cbd0 bs=$1 seek=$((1048576 / $1)) count=32 oflag=direct; do :; done 2>/dev/null; }}
        written() {{ awk '{{ print $5 }}' /sys/block/ublkb0/stat; }}
        fills=
        for size in 65536 4096; do
            fill $size &
            fills=\"$fills $!\"
            for each in $(seq 200); do
                before=$(written)
                sleep 1
                if [ $(written) = $before ]; then break; fi
            done
        done
        writers=
        for block in 0 1 2 3 4 5 6 7; do
            dd if=/tmp/o of=/dev/cbd0 bs=4k seek=$block count=1 oflag=direct 2>/dev/null &
            writers=\"$writers $!\"
        done
        sleep 3
        echo \"waiting: $(awk '{{ print $2 }}' /sys/block/ublkb0/inflight)\"
        cbdctrl dev-stop --dev 0 --force
        failed=0
        for writer in $writers; do wait $writer || failed=$((failed + 1)); done
        echo \"failed: $failed\"
        wait $fills
        cbdctrl dev-start --backend 0
        blocks() {{ dd if=/dev/cbd0 of=/tmp/$1 bs=4k count=8 iflag=direct 2>/dev/null; }}
        blocks first
        cbdctrl set --backend 0 writeback_rate=auto >/dev/null
        for block in 0 2 4 6; do
            dd if=/tmp/n of=/dev/cbd0 bs=4k seek=$block count=1 oflag=direct conv=fsync 2>/dev/null
            dd if=/tmp/n of=/tmp/first bs=4k seek=$block count=1 conv=notrunc 2>/dev/null
        done
        sleep 2
        blocks later
        cmp /tmp/first /tmp/later && echo nothing came later
        cbdctrl drain --backend 0 >/dev/null 2>&1
        blocks drained
        cmp /tmp/first /tmp/drained && echo nothing came with the drain
        cbdctrl backend-stop --backend 0
        cmp -n 32768 /tmp/first /dev/vda && echo the disk has it"
    );
    let ran = Ran::of(host, &plan(&script, &[])?, None)?;
    ran.expect(
        Ended::Exited(0),
        &[
            "waiting: 10\n",
            "failed: 8\n",
            "/dev/cbd0\n",
            "nothing came later",
            "nothing came with the drain",
            "the disk has it",
        ],
    )
}
