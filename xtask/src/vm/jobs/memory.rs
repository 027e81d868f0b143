//! Regions on persistent memory that a kernel drives.

use super::{Ended, Given, Host, LIMIT, Ran};
use crate::vm::plan::{GIB, Plan, Shipped};
use crate::vm::programs;

/// Starts a daemon, whose state lies in `$state`, and waits until it answers.
pub const DAEMON: &str = "
    cbdd --state-dir $state >/tmp/cbdd.log 2>&1 &
    daemon=$!
    for each in $(seq 100); do
        if cbdctrl tp-list >/dev/null 2>&1; then break; fi
        sleep 0.1
    done
";

/// Programs of this machine, at their places.
pub fn shipped(names: &[&str]) -> Result<Vec<Shipped>, String> {
    let found = names.iter().map(|name| programs::find(name));
    found.map(|path| path.map(|path| Shipped { from: path.clone(), to: path })).collect()
}

/// A region on a file system mounted with dax is said to survive a power failure; on the same one without, it is not.
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
        Err(ran.complaint("it said something else of what the regions survive"))
    }
}
