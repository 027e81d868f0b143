//! Tests that the harness works as specified, and that its kernel has what other tests need.

use super::{Ended, Given, Host, LIMIT, Ran};
use crate::plan::{MIB, Mode, Plan, SharedFile, Shipped};
use std::fs;
use std::time::Duration;

/// Files arrive at their paths; output, errors, files and exit code come back as the job wrote them.
pub fn returns_output(host: &Host, given: &Given) -> Result<(), String> {
    let shipped = given.folder.join("shipped");
    fs::write(&shipped, "came along\n")
        .map_err(|error| format!("cannot write {}: {error}", shipped.display()))?;
    let script = format!(
        "echo \"it's $(uname -s)\"; cat {}; echo wrong >&2; mkdir /out/deep; echo kept >/out/deep/file; exit 7",
        shipped.display()
    );
    let plan = Plan {
        files: vec![Shipped { from: shipped.clone(), to: shipped }],
        out: Some(given.folder.clone()),
        timeout: LIMIT,
        ..Plan::of_script(&script)
    };
    let ran = Ran::of(host, &plan, None)?;
    ran.expect(Ended::Exited(7), &["it's Linux\ncame along\n"])?;
    if ran.errors != "wrong\n" {
        return Err(ran.complaint("its errors are not what the job wrote there"));
    }
    let file = given.folder.join("deep/file");
    match fs::read_to_string(&file) {
        Ok(text) if text == "kept\n" => Ok(()),
        Ok(text) => Err(format!("{} holds {text:?}", file.display())),
        Err(error) => Err(ran.complaint(&format!("{}: {error}", file.display()))),
    }
}

/// The guest is killed soon after its time limit, and reported as such.
pub fn over_time(host: &Host, _: &Given) -> Result<(), String> {
    let plan = Plan { timeout: Duration::from_secs(3), ..Plan::of_script("sleep 1000") };
    let ran = Ran::of(host, &plan, None)?;
    ran.expect(Ended::TimedOut, &[])?;
    if ran.outcome.all > Duration::from_secs(20) {
        return Err(ran.complaint("it outlived its time"));
    }
    Ok(())
}

/// A kernel that panics ends its guest, and its last messages are shown.
pub fn last_words(host: &Host, _: &Given) -> Result<(), String> {
    let plan = Plan { timeout: LIMIT, ..Plan::of_script("echo c >/proc/sysrq-trigger; sleep 1000") };
    let ran = Ran::of(host, &plan, None)?;
    ran.expect(Ended::Died, &[])?;
    if ran.outcome.console.iter().any(|line| line.contains("Kernel panic")) {
        Ok(())
    } else {
        Err(ran.complaint("its console does not say that it panicked"))
    }
}

/// Two guests count the same instructions for the same work, to a thousandth. In its first seconds a kernel
/// has work of its own, which would be counted, too; idle time passes at once. The least of several counts is
/// used.
pub fn counting(host: &Host, _: &Given) -> Result<(), String> {
    let script = "now() { sed -n 's/^now at \\([0-9]*\\) nsecs/\\1/p' /proc/timer_list; }
                  count() {
                      begun=$(now)
                      dd if=/dev/zero of=/dev/null bs=512 count=20000 2>/dev/null
                      echo $(($(now) - begun))
                  }
                  sleep 20
                  for each in 1 2 3 4 5 6; do count; done | sort -n | head -n 1";
    let plan = Plan { mode: Mode::Counting, timeout: LIMIT, ..Plan::of_script(script) };
    let mut counts = Vec::new();
    for _ in 0..2 {
        let ran = Ran::of(host, &plan, None)?;
        ran.expect(Ended::Exited(0), &[])?;
        let count: f64 = ran.output.trim().parse().map_err(|_| ran.complaint("it printed no number"))?;
        counts.push(count);
    }
    let ratio = counts[0] / counts[1];
    if (0.999..=1.001).contains(&ratio) { Ok(()) } else { Err(format!("{counts:?}: a ratio of {ratio}")) }
}

/// A CXL device has the persistent memory that it was given.
pub fn cxl(host: &Host, given: &Given) -> Result<(), String> {
    let plan = Plan {
        cxl: Some(SharedFile { path: given.folder.join("cxl"), size: 256 * MIB }),
        timeout: LIMIT,
        ..Plan::of_script("test -c /dev/cxl/mem0; cat /sys/bus/cxl/devices/mem0/pmem/size")
    };
    Ran::of(host, &plan, None)?.expect(Ended::Exited(0), &["0x10000000"])
}
