//! A virtual machine whose disk is a device of CBD on this machine, through vhost-user-blk.
//!
//! Invariants: the daemon is killed as by a crash, while the machine writes; the machine itself checks
//! whether its disk ever failed, lost or changed anything.

use super::daemon::Daemon;
use super::memory::shipped;
use super::{Ended, Given, Host, LIMIT, Ran};
use crate::plan::{MIB, Plan};
use std::fs::File;
use std::path::Path;

/// The size of the disk; the cache holds a part of it, so that writeback and reclaim have work.
const DISK: u64 = 256 * MIB;
const CACHE: &str = "64M";

/// The size that the disk grows to.
const GROWN: u64 = DISK + 64 * MIB;

/// Number of kills of the daemon.
const KILLS: usize = 3;

/// What the machine prints before the numbers of its reads and writes that are unanswered because the daemon
/// is dead.
const WAITS: &str = "waits:";

/// A file system is made on the disk and used by fio, which reads back and compares what it wrote, while the
/// daemon behind the disk is killed and restarted. The machine sees no error, and its file system is intact.
/// At least one kill meets writes in flight, whose outcome is unknown. Then the disk and its file system grow while they are in use.
/// Before that, the test checks that
/// discarded data reads as zeroes.
pub fn disk(host: &Host, given: &Given) -> Result<(), String> {
    let file = given.folder.join("disk");
    sized(&file, DISK)?;
    let mut daemon = Daemon::new(&given.folder)?;
    daemon.start()?;
    daemon.control(&["tp-reg", "--path", "region", "--size", "128M", "--host", "host", "--format"])?;
    let socket = given.folder.join("machine.sock");
    let export = format!("vhost-user:{}", socket.display());
    daemon.control(&["backend-start", "-p", "disk", "-c", CACHE, "-D", "-e", &export])?;
    let script = script();
    let plan = Plan {
        vhost_user: vec![socket],
        files: shipped(&["mkfs.ext4", "fsck.ext4", "resize2fs", "fio"])?,
        out: Some(given.folder.clone()),
        timeout: LIMIT,
        ..Plan::of_script(&script)
    };
    let (mut waiting, mut failed) = (Vec::new(), Ok(()));
    let ran = Ran::of_watched(host, &plan, |line| {
        if line == "kill" && failed.is_ok() {
            failed = daemon.kill();
        } else if line == "grow" && failed.is_ok() {
            // Makes the disk larger and lets the daemon use it, which tells the machine.
            failed = sized(&file, GROWN).and_then(|()| daemon.control(&["backend-grow", "-b", "0"]));
        } else if let Some(writes) = writes_that_wait(line) {
            waiting.push(writes);
            failed = daemon.start();
        }
        failed.is_err()
    });
    failed?;
    let ran = ran?;
    ran.expect(Ended::Exited(0), &["verified\n", "grown\n", "trimmed"]).map_err(|text| {
        let fio = std::fs::read_to_string(given.folder.join("fio")).unwrap_or_default();
        format!("{text}\nfio:\n{fio}\nthe daemon:\n{}", daemon.log())
    })?;
    let mut checksums = ran.output.lines().filter(|line| line.ends_with("  -"));
    if checksums.next().is_none_or(|first| checksums.next() != Some(first)) {
        return Err(ran.complaint("what was discarded does not read as zeroes, or the rest is not as it was"));
    }
    let met = met_writes(&waiting).map_err(|text| ran.complaint(&text))?;
    println!("    {met} of {KILLS} kills met writes in flight: {waiting:?}");
    // Writes everything back.
    daemon.control(&["backend-stop", "-b", "0", "-F"])?;
    daemon.kill()
}

/// Makes a file, or makes it larger.
fn sized(path: &Path, size: u64) -> Result<(), String> {
    let file = File::options().write(true).create(true).truncate(false).open(path);
    file.and_then(|file| file.set_len(size))
        .map_err(|error| format!("cannot make {} of {size} bytes: {error}", path.display()))
}

/// What the machine does.
fn script() -> String {
    format!(
        "test $(cat /sys/block/vda/size) = {}
        test \"$(cat /sys/block/vda/queue/write_cache)\" = 'write back'
        yes | head -c 4194304 >/tmp/pattern
        dd if=/tmp/pattern of=/dev/vda bs=1M oflag=direct 2>/dev/null
        blkdiscard -o 1048576 -l 1048576 /dev/vda
        dd if=/dev/vda bs=1M iflag=direct count=4 2>/dev/null | md5sum
        (head -c 1048576 /tmp/pattern; head -c 1048576 /dev/zero; tail -c 2097152 /tmp/pattern) | md5sum
        mkfs.ext4 -q /dev/vda
        mount -t ext4 /dev/vda /mnt
        load() {{
            round=0
            while [ ! -e /tmp/enough ]; do
                round=$((round + 1))
                fio --name=verify --directory=/mnt --size=96M --bsrange=4k-64k --bs_unaligned=0 --rw=randwrite --ioengine=io_uring \\
                    --iodepth=8 --direct=1 --verify=crc32c --verify_fatal=1 --fsync=64 --randseed=$round >/out/fio 2>&1 || return 1
            done
        }}
        load &
        load=$!
        completed() {{ awk '{{ print $1, $5, $16 }}' /sys/block/vda/stat; }}
        for each in $(seq {KILLS}); do
            sleep 4
            until [ $(awk '{{ print $2 }}' /sys/block/vda/inflight) -gt 0 ]; do kill -0 $load; done
            echo kill
            before=
            until [ \"$before\" = \"$(completed)\" ]; do before=$(completed); sleep 1; done
            echo {WAITS} $(cat /sys/block/vda/inflight)
        done
        touch /tmp/enough
        wait $load
        echo verified
        echo grow
        for second in $(seq 60); do
            test $(cat /sys/block/vda/size) = {} && break
            sleep 1
        done
        test $(cat /sys/block/vda/size) = {}
        resize2fs /dev/vda >/out/resize2fs 2>&1
        echo grown
        rm /mnt/verify*
        fstrim -v /mnt
        umount /mnt
        fsck.ext4 -f -n /dev/vda >/dev/null 2>&1
        ! dmesg | grep 'I/O error\\|EXT4-fs error\\|blocked for more'",
        DISK / 512,
        GROWN / 512,
        GROWN / 512
    )
}

/// The number of writes that the machine reports as waiting.
fn writes_that_wait(line: &str) -> Option<usize> {
    line.strip_prefix(WAITS)?.split_whitespace().nth(1)?.parse().ok()
}

/// The number of kills that met writes in flight; for each kill the number of writes must be known.
fn met_writes(waiting: &[usize]) -> Result<usize, String> {
    let met = waiting.iter().filter(|&&writes| writes > 0).count();
    match (waiting.len(), met) {
        (KILLS, 0) => Err("no kill met a write in flight".to_owned()),
        (KILLS, met) => Ok(met),
        (kills, _) => Err(format!("of {kills} kills, not {KILLS}, it is known what they met")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_in_which_no_kill_met_a_write_fails() {
        let lines = ["waits: 3 8", "kill", "waits: 5 0", "waits:", "verified", "waits: 0 1"];
        let waiting: Vec<_> = lines.into_iter().filter_map(writes_that_wait).collect();
        assert_eq!(waiting, [8, 0, 1]);
        assert_eq!(met_writes(&waiting), Ok(2));
        assert!(met_writes(&[0; KILLS]).is_err_and(|text| text.contains("no kill met a write")));
        assert!(met_writes(&waiting[..2]).is_err_and(|text| text.contains("of 2 kills")));
    }
}
