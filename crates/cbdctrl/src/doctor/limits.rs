//! The processor, and the limits of a process: of the running daemon, or of one that this user would start.
//!
//! Elsewhere: what the daemon does with what it has (`cbd-pmem`, `cbd-daemon`).

use super::finding::Finding;
use super::machine::Machine;
use cbd_daemon::size::format_size;

/// Descriptors that the unit of the package asks for.
const DESCRIPTORS: u64 = 65_536;
/// Fewer are too few for a device of a few queues.
const DESCRIPTORS_MIN: u64 = 1024;
/// The number of the capability CAP_IPC_LOCK.
const IPC_LOCK: u32 = 14;

/// The processor.
pub fn processor(machine: &Machine, findings: &mut Vec<Finding>) {
    let text = machine.text("/proc/cpuinfo");
    let line = text.lines().find_map(|line| line.strip_prefix("flags")?.trim_start().strip_prefix(':'));
    let Some(line) = line else {
        let why =
            "no region is called power-fail, because no instruction is known that brings stores to memory";
        findings.push(Finding::warning("cpu.flush", "this is no x86-64 processor", why));
        return;
    };
    let has = |names: &[&str]| names.iter().all(|name| line.split_whitespace().any(|flag| flag == *name));
    let slower =
        "a line leaves the cache when it is written to memory, so the next access reads it from there";
    findings.push(if has(&["clwb"]) {
        Finding::ok("cpu.flush", "clwb")
    } else if has(&["clflushopt"]) {
        Finding::note("cpu.flush", "clflushopt, no clwb", slower)
    } else if has(&["clflush"]) {
        Finding::warning("cpu.flush", "only clflush, one line at a time", slower)
    } else {
        let why = "stores survive the process, not a power failure";
        Finding::warning("cpu.flush", "no instruction that brings stores to memory", why)
    });
    let narrow = "copies and checksums take more time";
    findings.push(match (has(&["avx512f", "avx512bw", "bmi2"]), has(&["avx2"])) {
        (true, _) => Finding::ok("cpu.copy", "AVX-512"),
        (false, true) => Finding::ok("cpu.copy", "AVX2, no AVX-512"),
        _ => Finding::note("cpu.copy", "neither AVX-512 nor AVX2", narrow),
    });
    findings.push(if has(&["pclmulqdq", "sse4_2"]) {
        let wide = if has(&["vpclmulqdq", "avx512f"]) { ", 512 bits wide" } else { "" };
        Finding::ok("cpu.checksum", format!("carry-less multiplication{wide}"))
    } else {
        Finding::note("cpu.checksum", "no carry-less multiplication (pclmulqdq)", narrow)
    });
}

/// The soft limit `name` of a process: `None` if it is not known, `Some(None)` without a limit.
fn limit(text: &str, name: &str) -> Option<Option<u64>> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let soft = line.split_whitespace().next()?;
    if soft == "unlimited" { Some(None) } else { soft.parse().ok().map(Some) }
}

/// The limits of the daemon with this process number, or of this process.
pub fn limits(machine: &Machine, daemon: Option<u32>, findings: &mut Vec<Finding>, unseen: &mut Vec<String>) {
    let (process, subject) = match daemon {
        Some(process) => (format!("/proc/{process}"), format!("daemon, process {process}")),
        None => ("/proc/self".to_owned(), "a daemon started here".to_owned()),
    };
    let Ok(text) = machine.read(&format!("{process}/limits")) else {
        unseen.push(format!("the limits of the {subject}: {process}/limits cannot be read by this user"));
        return;
    };
    // A daemon under systemd has the limits of its unit, not those of this shell.
    let mut found = vec![
        memlock(&text, may_lock(machine, &process)),
        descriptors(&text, daemon.is_some()),
        address_space(&text),
    ];
    found.extend(memory_of_group(machine, &process));
    findings.extend(found.into_iter().map(|finding| finding.of(&subject)));
}

fn may_lock(machine: &Machine, process: &str) -> bool {
    let status = machine.text(&format!("{process}/status"));
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = effective.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0);
    set >> IPC_LOCK & 1 == 1
}

fn memlock(text: &str, may_lock: bool) -> Finding {
    let check = "limits.locked-memory";
    match limit(text, "Max locked memory") {
        Some(None) => Finding::ok(check, "unlimited"),
        _ if may_lock => Finding::ok(check, "unlimited by CAP_IPC_LOCK"),
        Some(Some(bytes)) => {
            let why = "the kernel writes pages through the daemon to free memory: a daemon whose own memory is paged \
                       out can wait for itself, and a killed one can cause an I/O error";
            Finding::warning(check, format!("{} may be locked", format_size(bytes)), why).fix(
                "LimitMEMLOCK=infinity in the unit (systemctl edit cbdd), or ulimit -l unlimited before cbdd",
            )
        }
        None => Finding::note(check, "not known", "the daemon locks its memory"),
    }
}

fn descriptors(text: &str, is_daemon: bool) -> Finding {
    let check = "limits.descriptors";
    let fix = "LimitNOFILE=65536 in the unit (systemctl edit cbdd), or ulimit -Hn 65536 before cbdd";
    let hard = text.lines().find_map(|line| line.strip_prefix("Max open files")).and_then(|line| {
        let word = line.split_whitespace().nth(1)?;
        if word == "unlimited" { Some(u64::MAX) } else { word.parse().ok() }
    });
    // The daemon raises its soft limit to the hard one when it starts.
    match hard {
        Some(count) if count < DESCRIPTORS_MIN => {
            let why = "each queue of each device needs some, and each client one: the daemon refuses clients";
            Finding::warning(check, format!("{count}"), why).fix(fix)
        }
        Some(count) if count < DESCRIPTORS && is_daemon => {
            let why = "hundreds of devices and clients need more";
            Finding::note(check, format!("{count}"), why).fix(fix)
        }
        Some(u64::MAX) => Finding::ok(check, "unlimited"),
        Some(count) => Finding::ok(check, format!("{count}")),
        None => Finding::note(check, "not known", "each queue of each device needs some"),
    }
}

fn address_space(text: &str) -> Finding {
    let check = "limits.address-space";
    match limit(text, "Max address space") {
        Some(Some(bytes)) => {
            let why = "regions and the memory of virtual machines are mapped: with a limit no region can grow in place";
            Finding::warning(check, format_size(bytes), why)
                .fix("LimitAS=infinity in the unit (systemctl edit cbdd), or ulimit -v unlimited before cbdd")
        }
        Some(None) => Finding::ok(check, "unlimited"),
        None => Finding::note(check, "not known", "regions are mapped"),
    }
}

/// The least limit on memory of the control groups of a process.
fn memory_of_group(machine: &Machine, process: &str) -> Option<Finding> {
    let text = machine.text(&format!("{process}/cgroup"));
    let least = text.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next()?, parts.next()?);
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => return None,
        };
        let groups = std::path::Path::new(group).ancestors().filter_map(|group| {
            let group = group.to_str()?.trim_end_matches('/');
            // No limit is a word in one version, and a number near the largest in the other.
            machine.number(&format!("{root}{group}/{file}")).filter(|bytes| *bytes < 1 << 60)
        });
        groups.min()
    });
    let least = least.min()?;
    let found = format!("{} for its control group", format_size(least));
    let why = "a region in ordinary memory, the index (up to 16 MiB for each GiB of cache) and buffers count there: \
               beyond it the daemon is killed";
    Some(
        Finding::note("limits.group-memory", found, why)
            .fix("MemoryMax=infinity in the unit (systemctl edit cbdd)"),
    )
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::super::machine::made::Made;
    use super::*;

    fn verdict(findings: &[Finding], name: &str) -> Option<Verdict> {
        findings.iter().find(|finding| finding.check == name).map(|finding| finding.verdict)
    }

    #[test]
    fn the_processor_is_known_by_its_flags() {
        for (flags, flush, copy, checksum) in [
            (
                "clflush clflushopt clwb avx2 avx512f avx512bw bmi2 pclmulqdq sse4_2",
                Verdict::Ok,
                Verdict::Ok,
                Verdict::Ok,
            ),
            ("clflush clflushopt avx2 pclmulqdq sse4_2", Verdict::Note, Verdict::Ok, Verdict::Ok),
            ("clflush pclmulqdq", Verdict::Warning, Verdict::Note, Verdict::Note),
            ("fpu", Verdict::Warning, Verdict::Note, Verdict::Note),
        ] {
            let made = Made::with(&[("/proc/cpuinfo", &format!("processor\t: 0\nflags\t\t: {flags}\n"))]);
            let mut findings = Vec::new();
            processor(&made.machine(), &mut findings);
            let found = ["cpu.flush", "cpu.copy", "cpu.checksum"].map(|name| verdict(&findings, name));
            assert_eq!(found, [Some(flush), Some(copy), Some(checksum)], "{flags}");
        }
        let mut findings = Vec::new();
        processor(&Made::with(&[("/proc/cpuinfo", "Features : fp asimd\n")]).machine(), &mut findings);
        assert_eq!(verdict(&findings, "cpu.flush"), Some(Verdict::Warning));
    }

    fn of_limits(lock: &str, files: &str, space: &str, capabilities: &str) -> [Option<Verdict>; 3] {
        let text = format!(
            "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max open files            64                   {files}              files     \n\
             Max locked memory         {lock}               {lock}               bytes     \n\
             Max address space         {space}              unlimited            bytes     \n"
        );
        let status = format!("Name:\tcbdd\nCapEff:\t{capabilities}\n");
        let made = Made::with(&[("/proc/7/limits", &text), ("/proc/7/status", &status)]);
        let (mut findings, mut unseen) = (Vec::new(), Vec::new());
        limits(&made.machine(), Some(7), &mut findings, &mut unseen);
        assert!(unseen.is_empty());
        ["limits.locked-memory", "limits.descriptors", "limits.address-space"]
            .map(|name| verdict(&findings, name))
    }

    #[test]
    fn limits_of_the_daemon_are_those_of_its_process() {
        let (ok, note, warning) = (Some(Verdict::Ok), Some(Verdict::Note), Some(Verdict::Warning));
        for (arguments, expected) in [
            (["unlimited", "65536", "unlimited", "0"], [ok, ok, ok]),
            (["8388608", "4096", "unlimited", "0"], [warning, note, ok]),
            (["8388608", "unlimited", "unlimited", "0000000000004000"], [ok, ok, ok]),
            (["unlimited", "256", "1073741824", "0"], [ok, warning, warning]),
        ] {
            let [lock, files, space, capabilities] = arguments;
            assert_eq!(of_limits(lock, files, space, capabilities), expected, "{arguments:?}");
        }
    }

    #[test]
    fn limits_that_cannot_be_read_are_named() {
        let (mut findings, mut unseen) = (Vec::new(), Vec::new());
        limits(&Made::with(&[]).machine(), Some(7), &mut findings, &mut unseen);
        assert!(findings.is_empty() && unseen[0].contains("/proc/7/limits"), "{unseen:?}");
    }

    #[test]
    fn the_least_limit_of_all_control_groups_counts() {
        let group = ("/proc/self/cgroup", "0::/system.slice/cbdd.service\n");
        let outer = ("/sys/fs/cgroup/system.slice/memory.max", "1073741824\n");
        let inner = ("/sys/fs/cgroup/system.slice/cbdd.service/memory.max", "max\n");
        let machine = |files: &[(&str, &str)]| Made::with(files);
        let found = memory_of_group(&machine(&[group, outer, inner]).machine(), "/proc/self").unwrap();
        assert!(found.found.starts_with("1 GiB"), "{found:?}");
        assert_eq!(memory_of_group(&machine(&[group, inner]).machine(), "/proc/self"), None);
        let old = [
            ("/proc/self/cgroup", "4:cpu,memory:/a\n"),
            ("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n"),
        ];
        assert_eq!(memory_of_group(&machine(&old).machine(), "/proc/self"), None);
    }
}
