//! The guest's power is cut, and another guest looks at what its devices hold.
//!
//! Why it proves what it says: QEMU is killed, so the guest's kernel writes nothing more; what a later guest finds was on the device
//! at that moment. A guest cannot be told that it has said something, so what it had said before the cut is a lower bound of what
//! it was promised.

use super::memory::{DAEMON, shipped};
use super::{Ended, Given, Host, LIMIT, Ran};
use crate::vm::plan::{Disk, MIB, Plan, SharedFile};
use std::path::Path;

/// Gives the guest's NVDIMM the form in which it can be mapped, as `ndctl create-namespace --mode fsdax` does; it keeps it.
pub const MAPPABLE: &str = "
    cd /sys/bus/nd/devices
    seed=$(cat region0/pfn_seed)
    echo namespace0.0 >/sys/bus/nd/drivers/nd_pmem/unbind
    echo pmem >$seed/mode
    cat /proc/sys/kernel/random/uuid >$seed/uuid
    echo namespace0.0 >$seed/namespace
    echo $seed >/sys/bus/nd/drivers/nd_pmem/bind
    cd /
";

/// Makes a file system on it.
const MKFS: &str = "mkfs.ext4 -q -b 4096 /dev/pmem0";

/// Mounts it for mapping.
const MOUNT: &str = "mount -t ext4 -o dax /dev/pmem0 /mnt";

/// Writes of a block each, of which the guest says when one is complete; so many at least in each round.
const WRITES: usize = 60;

/// The device has so many blocks, and a step that has no divisor in common with it meets each once.
const BLOCKS: usize = 4096;
const STEP: usize = 1031;

/// A file that was synchronised is there in the next guest; the guest's kernel did not get to write anything more.
pub fn synchronised(host: &Host, given: &Given) -> Result<(), String> {
    let nvdimm = Some(SharedFile { path: given.folder.join("nvdimm"), size: 512 * MIB });
    let script = format!(
        "{MAPPABLE}
        {MKFS}
        {MOUNT}
        dd if=/dev/urandom of=/mnt/kept bs=1M count=16 conv=fsync 2>/dev/null
        md5sum </mnt/kept
        echo now
        sleep 1000"
    );
    let plan = Plan {
        nvdimm: nvdimm.clone(),
        files: shipped(&["mkfs.ext4"])?,
        timeout: LIMIT,
        ..Plan::of_script(&script)
    };
    let before = Ran::of(host, &plan, Some("now"))?;
    before.expect(Ended::Cut, &[])?;
    let plan = Plan {
        nvdimm,
        timeout: LIMIT,
        ..Plan::of_script(
            "cat /sys/block/pmem0/queue/dax; mount -t ext4 -o dax /dev/pmem0 /mnt; md5sum </mnt/kept",
        )
    };
    let after = Ran::of(host, &plan, None)?;
    let sum = before.output.lines().next().unwrap_or("no sum");
    after.expect(Ended::Exited(0), &["1\n", sum])
}

/// Blocks are written to a device of CBD, whose region lies on the NVDIMM, until the power goes; the next guest's daemon brings the
/// device back, and each write that the one before had said to be complete is there. Then the next round.
pub fn acknowledged(host: &Host, given: &Given) -> Result<(), String> {
    let disk = given.folder.join("disk");
    std::fs::File::create(&disk)
        .and_then(|file| file.set_len((BLOCKS * 4096) as u64))
        .map_err(|error| format!("cannot make {}: {error}", disk.display()))?;
    let plan = |script: &str| -> Result<Plan, String> {
        Ok(Plan {
            nvdimm: Some(SharedFile { path: given.folder.join("nvdimm"), size: 512 * MIB }),
            disks: vec![Disk::File(disk.clone())],
            modules: vec!["loop".to_owned()],
            cbd: true,
            files: shipped(&["mkfs.ext4"])?,
            timeout: LIMIT,
            ..Plan::of_script(script)
        })
    };
    let begin = format!(
        "{MAPPABLE}
        {MKFS}
        {MOUNT}
        state=/mnt/state
        {DAEMON}
        cbdctrl tp-reg --path /mnt/region --size 256M --host guest --format >/dev/null
        cbdctrl --json status | tr -d ' ' | grep -o '\"durability\":\"power-fail\"'
        cbdctrl backend-start --path /dev/vda --cache-size 128M --start-dev
        # What is not on the disk yet is what the region is for.
        cbdctrl set --backend 0 writeback_rate=4K >/dev/null"
    );
    let again = format!(
        "{MOUNT}
        state=/mnt/state
        {DAEMON}
        for each in $(seq 100); do
            if [ -b /dev/cbd0 ]; then break; fi
            sleep 0.1
        done
        test -b /dev/cbd0"
    );
    let mut written = 0;
    for round in 0..given.cuts {
        let (first, said) = if round == 0 { (&begin, "power-fail") } else { (&again, "") };
        let last = written + WRITES;
        let script = format!("{first}\n{}", writing(written + 1));
        let ran = Ran::of(host, &plan(&script)?, Some(&last.to_string()))?;
        ran.expect(Ended::Cut, &[said])?;
        written = last;
        if missing(&disk, written)?.is_none() {
            return Err(ran.complaint("the disk alone has all that was written: the region proved nothing"));
        }
    }
    // No block is written twice, so what any cut took is missing still.
    let script = format!("{again}\ndd if=/dev/cbd0 of=/out/device bs=1M iflag=direct");
    let plan = Plan { out: Some(given.folder.clone()), ..plan(&script)? };
    let ran = Ran::of(host, &plan, None)?;
    ran.expect(Ended::Exited(0), &[])?;
    match missing(&given.folder.join("device"), written)? {
        Some(number) => Err(ran.complaint(&format!("write {number} of {written} was complete and is lost"))),
        None => Ok(()),
    }
}

/// Writes block after block, each with its number in each of its lines, and says the number when the write is complete.
fn writing(from: usize) -> String {
    format!(
        "number={from}
        while [ $number -le {BLOCKS} ]; do
            yes \"write $number\" | head -c 4096 >/tmp/block
            dd if=/tmp/block of=/dev/cbd0 bs=4096 count=1 seek=$((number * {STEP} % {BLOCKS})) \\
                oflag=direct conv=notrunc 2>/dev/null
            echo $number
            number=$((number + 1))
        done"
    )
}

/// The first write up to a number that is not there, whole.
fn missing(device: &Path, last: usize) -> Result<Option<usize>, String> {
    let content =
        std::fs::read(device).map_err(|error| format!("cannot read {}: {error}", device.display()))?;
    Ok((1..=last).find(|&number| {
        let at = number * STEP % BLOCKS * 4096;
        let block: Vec<u8> =
            format!("write {number}\n").into_bytes().into_iter().cycle().take(4096).collect();
        content.get(at..at + 4096) != Some(block.as_slice())
    }))
}
