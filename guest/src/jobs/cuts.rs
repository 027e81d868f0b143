//! The guest's power is cut, and another guest examines its devices.
//!
//! Why this proves durability: QEMU is killed, so the guest's kernel writes nothing more; what a later guest
//! finds was on the device at that moment. A guest does not learn that its output has arrived, so what it had
//! printed before the cut is a lower bound of what it was promised.

use super::memory::{DAEMON, shipped};
use super::{Ended, Given, Host, LIMIT, Ran};
use crate::plan::{Disk, MIB, Plan, SharedFile};
use std::path::Path;

/// Converts the guest's NVDIMM to a form that can be mapped, as `ndctl create-namespace --mode fsdax` does;
/// it keeps that form.
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

/// Converts it to a device that can be mapped itself, as `ndctl create-namespace --mode devdax` does; it
/// keeps that form. Its kernel keeps the descriptions of its pages in it, or with `pages=ram` in ordinary memory.
pub const DEVDAX: &str = "
    cd /sys/bus/nd/devices
    seed=$(cat region0/dax_seed)
    if [ -e namespace0.0/driver ]; then
        echo namespace0.0 >/sys/bus/nd/drivers/nd_pmem/unbind
    fi
    echo ${pages:-pmem} >$seed/mode
    cat /proc/sys/kernel/random/uuid >$seed/uuid
    echo namespace0.0 >$seed/namespace
    echo $seed >/sys/bus/nd/drivers/dax_pmem/bind
    cd /
";

/// Makes the guest's CXL memory a region, as `cxl create-region` does; its label, if it has one, restores its
/// former state.
const CXL_REGION: &str = "
    cd /sys/bus/cxl/devices
    region=$(cat decoder0.0/create_pmem_region)
    echo $region >decoder0.0/create_pmem_region
    decoder=$(basename endpoint*/decoder*.0)
    echo pmem >$decoder/mode
    echo 0x10000000 >$decoder/dpa_size
    cd $region
    echo 256 >interleave_granularity
    echo 1 >interleave_ways
    cat /proc/sys/kernel/random/uuid >uuid
    echo 0x10000000 >size
    echo $decoder >target0
    echo 1 >commit
    echo $region >/sys/bus/cxl/drivers/cxl_region/bind
    cd /
    for each in $(seq 100); do
        if [ -e /sys/bus/nd/devices/namespace0.0 ]; then break; fi
        sleep 0.1
    done
";

/// Assigns the whole region to a namespace, and writes its label.
const CXL_LABEL: &str = "
    cat /proc/sys/kernel/random/uuid >/sys/bus/nd/devices/namespace0.0/uuid
    echo 268435456 >/sys/bus/nd/devices/namespace0.0/size
";

/// A disk for the daemon's state, beside a region that is not a file system.
const STATE_MADE: &str = "mkfs.ext4 -q /dev/vdb; mkdir /state; mount -t ext4 /dev/vdb /state";
const STATE: &str = "mkdir /state; mount -t ext4 /dev/vdb /state";

/// The location of a region.
struct Home {
    /// Whether the memory is that of a CXL device, instead of an NVDIMM.
    is_cxl: bool,
    /// The scripts that prepare it in the first guest, and in each later one.
    made: String,
    found: String,
    /// The region, the options of its registration, and the folder of the daemon's state.
    region: &'static str,
    options: &'static str,
    state: &'static str,
}

/// Minimum number of writes of a block in each round; the guest prints each completed one.
const WRITES: usize = 60;

/// Number of blocks of the device; a step that is coprime to it reaches each block once.
const BLOCKS: usize = 4096;
const STEP: usize = 1031;

/// A synchronised file is there in the next guest; the guest's kernel could not write anything more.
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

/// On a file of a file system that maps the NVDIMM itself.
pub fn acknowledged(host: &Host, given: &Given) -> Result<(), String> {
    let home = Home {
        is_cxl: false,
        made: format!("{MAPPABLE}\n{MKFS}\n{MOUNT}"),
        found: MOUNT.to_owned(),
        region: "/mnt/region",
        options: "--size 256M",
        state: "/mnt/state",
    };
    outlive_cuts(host, given, given.cuts, &home)
}

/// On an NVDIMM that is a device of its own.
pub fn acknowledged_on_devdax(host: &Host, given: &Given) -> Result<(), String> {
    let home = Home {
        is_cxl: false,
        made: format!("{DEVDAX}\n{STATE_MADE}"),
        found: STATE.to_owned(),
        region: "/dev/dax0.0",
        options: "",
        state: "/state/cbd",
    };
    outlive_cuts(host, given, given.cuts.div_ceil(2), &home)
}

/// On a CXL device with persistent memory.
pub fn acknowledged_on_cxl(host: &Host, given: &Given) -> Result<(), String> {
    let home = Home {
        is_cxl: true,
        made: format!("{CXL_REGION}\n{CXL_LABEL}\n{DEVDAX}\n{STATE_MADE}"),
        found: format!("{CXL_REGION}\n{STATE}"),
        region: "/dev/dax0.0",
        options: "",
        state: "/state/cbd",
    };
    outlive_cuts(host, given, given.cuts.div_ceil(2), &home)
}

/// The guest writes blocks to a device of CBD with a region at `home` until the power is cut. The daemon of
/// the next guest brings the device back, and each write that the former guest had reported as complete must
/// be there. Then the next round begins.
fn outlive_cuts(host: &Host, given: &Given, cuts: usize, home: &Home) -> Result<(), String> {
    let (disk, state) = (given.folder.join("disk"), given.folder.join("state"));
    for (path, size) in [(&disk, (BLOCKS * 4096) as u64), (&state, 32 * MIB)] {
        std::fs::File::create(path)
            .and_then(|file| file.set_len(size))
            .map_err(|error| format!("cannot make {}: {error}", path.display()))?;
    }
    let memory = |size| Some(SharedFile { path: given.folder.join("memory"), size });
    let plan = |script: &str| -> Result<Plan, String> {
        Ok(Plan {
            nvdimm: if home.is_cxl { None } else { memory(512 * MIB) },
            cxl: if home.is_cxl { memory(256 * MIB) } else { None },
            disks: vec![Disk::File(disk.clone()), Disk::File(state.clone())],
            modules: vec!["loop".to_owned()],
            cbd: true,
            files: shipped(&["mkfs.ext4"])?,
            timeout: LIMIT,
            ..Plan::of_script(script)
        })
    };
    let Home { made, found, region, options, state, .. } = home;
    let begin = format!(
        "{made}
        state={state}
        {DAEMON}
        cbdctrl tp-reg --path {region} {options} --host guest --format >/dev/null
        cbdctrl --json status | tr -d ' ' | grep -o '\"durability\":\"power-fail\"'
        cbdctrl backend-start --path /dev/vda --cache-size 128M --start-dev
        # A low rate of writeback keeps data in the region that the disk does not have.
        cbdctrl set --backend 0 writeback_rate=32K >/dev/null"
    );
    let again = format!(
        "{found}
        state={state}
        {DAEMON}
        for each in $(seq 100); do
            if [ -b /dev/cbd0 ]; then break; fi
            sleep 0.1
        done
        if [ ! -b /dev/cbd0 ]; then cat /tmp/cbdd.log >&2; exit 1; fi"
    );
    let mut written = 0;
    for round in 0..cuts {
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
    // No block is written twice, so what any cut lost is still missing.
    let script = format!("{again}\ndd if=/dev/cbd0 of=/out/device bs=1M iflag=direct");
    let plan = Plan { out: Some(given.folder.clone()), ..plan(&script)? };
    let ran = Ran::of(host, &plan, None)?;
    ran.expect(Ended::Exited(0), &[])?;
    match missing(&given.folder.join("device"), written)? {
        Some(number) => Err(ran.complaint(&format!("write {number} of {written} was complete and is lost"))),
        None => Ok(()),
    }
}

/// Writes block after block, each with its number in each of its lines, and prints the number when the write
/// is complete.
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

/// The first write up to `last` that is not there completely.
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
