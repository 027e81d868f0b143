//! Two machines that have the same memory mapped: one region with a host on each.
//!
//! Both guests have one file as their NVDIMM. The kernels know nothing of each other, so no lock keeps one out, and each sees the
//! other only by what it stores.

use super::cuts::DEVDAX;
use super::memory::DAEMON;
use super::{Ended, Given, Host, LIMIT, Ran};
use crate::plan::{Disk, MIB, Plan, SharedFile};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

/// Makes the memory a device that several machines map. Each of their kernels has its own descriptions of its pages: in the
/// memory itself they would overwrite each other's, and a kernel that then unmaps a page panics.
pub fn devdax() -> String {
    format!("pages=ram\n{DEVDAX}")
}

/// Waits up to a minute until a command succeeds.
const UNTIL: &str = "
    until_so() {
        for each in $(seq 120); do
            if eval \"$1\" >/tmp/last 2>&1; then return; fi
            sleep 0.5
        done
        echo \"not in time: $1\"; cat /tmp/last; cat /tmp/cbdd.log; exit 1
    }
    # Whether the list says of a host whether it is alive.
    alive() { cbdctrl --json host-list | tr -d ' \\n' | grep -q \"\\\"hostname\\\":\\\"$1\\\",\\\"alive\\\":$2\"; }
";

/// The first machine: it makes the region, caches a disk in it, and clears what the second one leaves when its power is cut.
const FIRST: &str = "
    cbdctrl tp-reg --path /dev/dax0.0 --host a --format --shared >/dev/null 2>/tmp/warned
    if grep 'descriptions of the pages' /tmp/warned; then exit 1; fi
    cbdctrl backend-start --path /dev/vda --cache-size 64M --start-dev >/dev/null
    dd if=/dev/urandom of=/tmp/data bs=1M count=8 2>/dev/null
    dd if=/tmp/data of=/dev/cbd0 bs=1M oflag=direct 2>/dev/null
    echo formatted
    until_so 'alive b true'
    until_so 'cbdctrl backend-list --all | grep -q vdb'
    echo sees b
    until_so 'alive b false'
    if cbdctrl host-clear --host 1 2>/tmp/refused; then echo cleared without a word; exit 1; fi
    bytes=$(sed -n 's/.*--discard-dirty \\([0-9]*\\).*/\\1/p' /tmp/refused)
    test \"$bytes\" -gt 0
    cbdctrl host-clear --host 1 --discard-dirty $bytes
    test $(cbdctrl --json host-list | grep -o '\"hostname\"' | wc -l) = 1
    dd if=/dev/cbd0 bs=1M count=8 iflag=direct 2>/dev/null | cmp - /tmp/data
    echo cleared b
";

/// The second machine: it is refused under the name of the first one, joins under its own, and has dirty data when its power is cut.
const SECOND: &str = "
    if cbdctrl tp-reg --path /dev/dax0.0 --host a 2>/tmp/refused; then echo joined as a; exit 1; fi
    grep -q 'alive on another machine' /tmp/refused || { cat /tmp/refused; exit 1; }
    if cbdctrl tp-reg --path /dev/dax0.0 --host c --format --shared --force 2>/tmp/refused; then exit 1; fi
    grep -q 'alive on another machine' /tmp/refused || { cat /tmp/refused; exit 1; }
    cbdctrl tp-reg --path /dev/dax0.0 --host b >/dev/null
    device=$(cbdctrl backend-start --path /dev/vdb --cache-size 64M --start-dev)
    cbdctrl set --backend 1 writeback_rate=32K >/dev/null
    dd if=/dev/urandom of=$device bs=1M count=16 oflag=direct 2>/dev/null
    until_so 'alive a true'
    sleep 5
    echo cut now
    sleep 1000
";

/// Two machines share a region, and one of them loses its power.
pub fn by_two_machines(host: &Host, given: &Given) -> Result<(), String> {
    let memory = || SharedFile { path: given.folder.join("memory"), size: 512 * MIB };
    // Disks have their serial numbers by their places: those of the two machines are two disks only at different ones.
    let plan = |script: &str, disks: usize| Plan {
        nvdimm: Some(memory()),
        disks: vec![Disk::New(64 * MIB); disks],
        modules: vec!["loop".to_owned(), "ublk_drv".to_owned()],
        cbd: true,
        timeout: LIMIT + Duration::from_secs(150),
        ..Plan::of_script(&format!("state=/tmp/state\n{UNTIL}\n{script}"))
    };
    let first = plan(&format!("{}\n{DAEMON}\n{FIRST}", devdax()), 1);
    let second = plan(&format!("{DAEMON}\n{SECOND}"), 2);
    let (formatted, is_formatted) = channel();
    std::thread::scope(|scope| {
        let running = scope.spawn(|| tell_at(host, &first, "formatted", formatted));
        // If the first one fails, no line comes.
        let ran = match is_formatted.recv() {
            Ok(()) => Some(Ran::of(host, &second, Some("cut now"))?),
            Err(_) => None,
        };
        let first = running.join().map_err(|_| "the thread of the first guest failed".to_owned())??;
        let ended = [
            first.expect(Ended::Exited(0), &["formatted\nsees b\ncleared b\n"]),
            ran.map_or(Ok(()), |ran| ran.expect(Ended::Cut, &["cut now\n"])),
        ];
        // Each says what the other one saw.
        let wrong: Vec<String> = ended.into_iter().filter_map(Result::err).collect();
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n")) }
    })
}

/// Boots a guest, and tells when it prints a line.
fn tell_at(host: &Host, plan: &Plan, line: &str, tell: Sender<()>) -> Result<Ran, String> {
    let mut tell = Some(tell);
    Ran::of_watched(host, plan, |printed| {
        if printed == line
            && let Some(tell) = tell.take()
        {
            // Who waits is there until it is told.
            let _ = tell.send(());
        }
        false
    })
}
