//! Regions on persistent memory with a kernel driver.

use super::cuts::DEVDAX;
use super::{Ended, Given, Host, LIMIT, Ran};
use crate::packages;
use crate::plan::{Disk, GIB, MIB, Plan, SharedFile, Shipped};
use crate::programs;

/// Starts a daemon with its state in `$state`, and waits until it answers.
pub const DAEMON: &str = "
    cbdd --state-dir $state >/tmp/cbdd.log 2>&1 &
    daemon=$!
    for each in $(seq 100); do
        if cbdctrl tp-list >/dev/null 2>&1; then break; fi
        sleep 0.1
    done
";

/// Programs of this machine, at their paths.
pub fn shipped(names: &[&str]) -> Result<Vec<Shipped>, String> {
    packages::install_programs(names)?;
    let found = names.iter().map(|name| programs::find(name));
    found.map(|path| path.map(|path| Shipped { from: path.clone(), to: path })).collect()
}

/// A region on a file system mounted with dax is reported as surviving a power failure; on the same one
/// without dax, it is not.
pub fn dax_file(host: &Host, _: &Given) -> Result<(), String> {
    let script = format!(
        "state=/var/lib/cbd
        {DAEMON}
        mkfs.ext4 -q -b 4096 /dev/pmem0
        for how in dax nodax; do
            mount -t ext4 $([ $how = dax ] && echo -o dax) /dev/pmem0 /mnt
            cbdctrl tp-reg --path /mnt/$how --size 256M --host guest --format >/dev/null
            echo \"$how: $(cbdctrl --json status | grep -o '\"durability\": *\"[a-z-]*\"')\"
            cbdctrl tp-unreg --transport 0
            umount /mnt
        done"
    );
    let plan = Plan {
        pmem: Some(GIB),
        cbd: true,
        files: shipped(&["mkfs.ext4"])?,
        timeout: LIMIT,
        ..Plan::of_script(&script)
    };
    let ran = Ran::of(host, &plan, None)?;
    ran.expect(Ended::Exited(0), &[])?;
    let said: Vec<_> = ran.output.lines().map(|line| line.replace(' ', "")).collect();
    if said == ["dax:\"durability\":\"power-fail\"", "nodax:\"durability\":\"process-crash\""] {
        Ok(())
    } else {
        Err(ran.complaint("it reported another durability of the regions"))
    }
}

/// The kernel removes pages of a region because their memory has failed: it unmaps them and sends the daemon
/// a signal that would end an unprepared process. A guest cannot make a later load fail: its memory is
/// intact.
pub fn failed_pages(host: &Host, given: &Given) -> Result<(), String> {
    let script = format!(
        "{DEVDAX}
        state=/tmp/state
        {DAEMON}
        # Machines cannot share such a device.
        cbdctrl tp-reg --path /dev/dax0.0 --host guest --format --shared >/dev/null 2>/tmp/warned
        grep -q 'descriptions of the pages of /dev/dax0.0' /tmp/warned
        cbdctrl tp-unreg --transport 0 >/dev/null
        cbdctrl tp-reg --path /dev/dax0.0 --host guest --format --force >/dev/null 2>/tmp/warned
        ! grep -q 'descriptions of the pages' /tmp/warned
        cbdctrl backend-start --path /dev/vda --cache-size 128M --start-dev >/dev/null
        cbdctrl set --backend 0 writeback_rate=32K >/dev/null
        dd if=/dev/urandom of=/tmp/data bs=1M count=16 2>/dev/null
        dd if=/tmp/data of=/dev/cbd0 bs=1M oflag=direct 2>/dev/null
        # The kernel signals a process that maps a failed page at once, not at its next access.
        echo 1 >/proc/sys/vm/memory_failure_early_kill
        base=$(cat /sys/bus/dax/devices/dax0.0/resource)
        # One page in each megabyte of the cache, whose segments lie between the tables and a third of the device.
        for megabyte in $(seq 1 170); do
            echo $((base + megabyte * 1048576 + 524288)) >/sys/devices/system/memory/hard_offline_page
        done
        echo failed $(dmesg | grep -c 'recovery action for dax page: Recovered')
        dmesg | grep -q 'Sending SIGBUS to cbd'
        dd if=/dev/cbd0 bs=1M iflag=direct 2>/dev/null | cmp - /tmp/data
        kill -0 $daemon
        cbdctrl status >/dev/null
        echo whole"
    );
    let plan = Plan {
        nvdimm: Some(SharedFile { path: given.folder.join("memory"), size: 512 * MIB }),
        disks: vec![Disk::New(16 * MIB)],
        modules: vec!["loop".to_owned()],
        cbd: true,
        timeout: LIMIT,
        ..Plan::of_script(&script)
    };
    Ran::of(host, &plan, None)?.expect(Ended::Exited(0), &["failed 170\nwhole\n"])
}
