//! Persistent memory, and whether the platform keeps it; memory that can stand in for it; huge pages; regions that the
//! user names.

use super::finding::Finding;
use super::look::{Look, Region, for_root};
use super::machine::Machine;
use cbd_daemon::size::format_size;
use cbd_types::Durability;

/// Why persistent memory matters.
const PROMISE: &str = "only what the platform keeps over a power failure makes a completed write durable";

/// All checks of memory.
pub fn check(machine: &Machine, findings: &mut Vec<Finding>) {
    let before = findings.len();
    nvdimms(machine, findings);
    dax_devices(machine, findings);
    dax_file_systems(machine, findings);
    let has_memory = findings.len() > before;
    cxl(machine, findings);
    if !has_memory {
        let why = "a cache in ordinary memory loses the writes that are only there when the power fails; in the mode \
                   writethrough it loses none";
        findings.push(
            Finding::warning(
                "memory.persistent",
                "no NVDIMM region, no DAX device and no DAX file system",
                why,
            )
            .fix("cbdctrl backend-start --path DISK --cache-size SIZE --cache-mode writethrough"),
        );
        stand_in(machine, findings);
    }
    huge_pages(machine, findings);
}

fn nvdimms(machine: &Machine, findings: &mut Vec<Finding>) {
    let bus = "/sys/bus/nd/devices";
    for name in machine.names(bus) {
        let attribute = |what: &str| machine.line(&format!("{bus}/{name}/{what}"));
        if name.starts_with("region") && attribute("devtype").as_deref() != Some("nd_volatile") {
            findings.push(nvdimm(machine, &format!("{bus}/{name}")).of(name));
        } else if name.starts_with("namespace")
            && machine.number(&format!("{bus}/{name}/size")).unwrap_or(0) > 0
        {
            let mode = attribute("mode").unwrap_or_default();
            if matches!(mode.as_str(), "raw" | "safe") {
                findings.push(raw_namespace(&name, &mode));
            }
        }
    }
}

fn nvdimm(machine: &Machine, place: &str) -> Finding {
    let size = format_size(machine.number(&format!("{place}/size")).unwrap_or(0));
    let domain = machine.line(&format!("{place}/persistence_domain")).unwrap_or_default();
    let has_flush = machine.number(&format!("{place}/deep_flush")) == Some(1);
    let flush = if has_flush { ", deep flush" } else { "" };
    match domain.as_str() {
        "cpu_cache" => Finding::ok("memory.platform", format!("{size}, kept with the processors' caches (eADR){flush}")),
        "memory_controller" => {
            Finding::ok("memory.platform", format!("{size}, kept from the memory controller on (ADR){flush}"))
        }
        _ => Finding::warning(
            "memory.platform",
            format!("{size}, and the platform does not state that it keeps it"),
            "memory that is set aside with memmap= looks like this, and is plain memory: a power failure loses it",
        )
        .fix("ndctl list --regions --dimms --health"),
    }
}

fn raw_namespace(name: &str, mode: &str) -> Finding {
    let mode = if mode == "safe" { "sector" } else { mode };
    let found = format!("its mode is {mode}: neither a DAX file system nor a DAX device is possible on it");
    Finding::warning("memory.namespace", found, "a region needs memory that can be mapped").of(name).fix(
        format!("ndctl create-namespace --force --reconfig={name} --mode=fsdax   # destroys what is on it"),
    )
}

fn dax_devices(machine: &Machine, findings: &mut Vec<Finding>) {
    let bus = "/sys/bus/dax/devices";
    for name in machine.names(bus) {
        let size = machine.number(&format!("{bus}/{name}/size")).unwrap_or(0);
        if size == 0 {
            continue;
        }
        let shown = format!("{} at /dev/{name}", format_size(size));
        let driver = machine.link_name(&format!("{bus}/{name}/driver"));
        findings.push(
            match driver.as_deref() {
                Some("kmem") => Finding::note(
                    "memory.dax-device",
                    format!("{shown}, used by the kernel as ordinary memory"),
                    "a region cannot be on it meanwhile",
                )
                .fix(format!("daxctl reconfigure-device --mode=devdax {name}")),
                None => Finding::warning(
                    "memory.dax-device",
                    format!("{shown} has no driver"),
                    "there is no device node to map",
                )
                .fix("modprobe device_dax"),
                Some(_) => Finding::ok("memory.dax-device", shown),
            }
            .of(&name),
        );
    }
}

/// A line of a process's table of mounts, by its fields.
struct Mount<'a> {
    target: &'a str,
    kind: &'a str,
    source: &'a str,
    options: &'a str,
}

fn mounts(table: &str) -> impl Iterator<Item = Mount<'_>> {
    table.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut after = after.split(' ');
        let (kind, source, options) = (after.next()?, after.next()?, after.next().unwrap_or_default());
        Some(Mount { target: before.split(' ').nth(4)?, kind, source, options })
    })
}

fn dax_file_systems(machine: &Machine, findings: &mut Vec<Finding>) {
    for mount in mounts(&machine.text("/proc/self/mountinfo")) {
        let options: Vec<&str> = mount.options.split(',').collect();
        let is_dax = options.iter().any(|option| matches!(*option, "dax" | "dax=always"));
        let on_memory = mount.source.starts_with("/dev/pmem");
        let found = format!("{} on {}", mount.kind, mount.source);
        let finding = if is_dax {
            Finding::ok("memory.dax-file-system", format!("{found}, mounted with DAX"))
        } else if on_memory && matches!(mount.kind, "ext4" | "xfs") {
            let why = "a region on it would be in the page cache, and lose its data with the power";
            Finding::warning("memory.dax-file-system", format!("{found}, mounted without DAX"), why)
                .fix(format!("umount {0} && mount -o dax=always {1} {0}", mount.target, mount.source))
        } else {
            continue;
        };
        findings.push(finding.of(mount.target));
    }
}

fn cxl(machine: &Machine, findings: &mut Vec<Finding>) {
    let bus = "/sys/bus/cxl/devices";
    for name in machine.names(bus).into_iter().filter(|name| name.starts_with("mem")) {
        let size = |part: &str| machine.number(&format!("{bus}/{name}/{part}/size")).unwrap_or(0);
        let found =
            format!("{} persistent, {} volatile", format_size(size("pmem")), format_size(size("ram")));
        findings.push(
            if size("pmem") > 0 {
                Finding::ok("memory.cxl", found)
            } else {
                Finding::note(
                    "memory.cxl",
                    found,
                    "a region on volatile memory survives the daemon, not a power failure",
                )
            }
            .of(name),
        );
    }
}

fn meminfo(machine: &Machine, field: &str) -> Option<u64> {
    let text = machine.text("/proc/meminfo");
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

fn stand_in(machine: &Machine, findings: &mut Vec<Finding>) {
    let free = format_size(meminfo(machine, "MemAvailable").unwrap_or(0) << 10);
    let table = machine.text("/proc/self/mountinfo");
    let of_kind = |kind: &str| {
        let found: Vec<&str> =
            mounts(&table).filter(|mount| mount.kind == kind).map(|mount| mount.target).collect();
        found
    };
    let shm = of_kind("tmpfs").into_iter().find(|target| *target == "/dev/shm");
    let places: Vec<&str> = shm.into_iter().chain(of_kind("hugetlbfs")).collect();
    let places = if places.is_empty() { "none".to_owned() } else { places.join(", ") };
    findings.push(Finding::note(
        "memory.stand-in",
        format!("{free} of memory are available; file systems in memory for a region: {places}"),
        "such a region survives the daemon, not a crash of the machine",
    ));
}

fn huge_pages(machine: &Machine, findings: &mut Vec<Finding>) {
    let place = "/sys/kernel/mm/transparent_hugepage";
    let chosen = |file: &str| {
        let line = machine.line(&format!("{place}/{file}"))?;
        Some(line.split('[').nth(1)?.split(']').next()?.to_owned())
    };
    let (pages, shared) = (chosen("enabled"), chosen("shmem_enabled"));
    let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "not known".to_owned());
    let found = format!("transparent huge pages: {}; of shared memory: {}", shown(&pages), shown(&shared));
    let why = "the daemon asks for huge pages for a region in shared memory; without them each access costs more \
               address translation";
    let is_off = |value: &Option<String>| matches!(value.as_deref(), Some("never" | "deny"));
    let fixes = [(&shared, "shmem_enabled", "advise"), (&pages, "enabled", "madvise")];
    let mut fixes = fixes.into_iter().filter(|(value, ..)| is_off(value)).peekable();
    let finding = match fixes.peek() {
        Some(_) => Finding::note("memory.huge-pages", found, why),
        None => Finding::ok("memory.huge-pages", found),
    };
    findings.push(
        fixes.fold(finding, |finding, (_, file, word)| finding.fix(format!("echo {word} > {place}/{file}"))),
    );
}

/// The regions that the user named.
pub fn regions(looks: &[(String, Look<Region>)], findings: &mut Vec<Finding>) {
    for (path, look) in looks {
        let finding = match look {
            Look::Seen(region) => promise(region),
            Look::NotPermitted => Finding::warning("memory.region", "this user may not open it", PROMISE)
                .fix(for_root(&format!("cbdctrl doctor {path}"))),
            Look::Failed(why) => Finding::problem("memory.region", why.as_str(), "no region can be there"),
            Look::Silent => Finding::problem(
                "memory.region",
                "its file system, or its device, does not answer",
                "the daemon would wait for it, too",
            ),
            Look::NotTried => Finding::warning("memory.region", "not tried: others took too long", PROMISE),
        };
        findings.push(finding.of(path));
    }
}

fn promise(region: &Region) -> Finding {
    let found = format!("{} ({} on {})", region.durability, region.kind, region.file_system);
    let said = region.warnings.join("; ");
    if region.durability != Durability::PowerFail.name() {
        let why = if said.is_empty() { "it survives the daemon, not a crash of the machine" } else { &said };
        return Finding::warning("memory.region", found, why);
    }
    if said.is_empty() {
        Finding::ok("memory.region", found)
    } else {
        Finding::warning("memory.region", found, &said)
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::super::machine::made::Made;
    use super::*;

    /// The verdicts of the check `name` on a machine with these files.
    fn verdicts(name: &str, files: &[(&str, &str)]) -> Vec<Verdict> {
        let mut findings = Vec::new();
        check(&Made::with(files).machine(), &mut findings);
        findings.iter().filter(|finding| finding.check == name).map(|finding| finding.verdict).collect()
    }

    #[test]
    fn memory_is_kept_where_the_platform_states_it() {
        let region = "/sys/bus/nd/devices/region0";
        for (domain, verdict) in [
            ("cpu_cache\n", Verdict::Ok),
            ("memory_controller\n", Verdict::Ok),
            ("unknown\n", Verdict::Warning),
            ("\n", Verdict::Warning),
        ] {
            let domain = (&*format!("{region}/persistence_domain"), domain);
            let files = [(&*format!("{region}/size"), "1073741824"), domain];
            assert_eq!(verdicts("memory.platform", &files), [verdict], "{domain:?}");
            assert_eq!(verdicts("memory.persistent", &files), []);
        }
        assert_eq!(verdicts("memory.platform", &[(&format!("{region}/devtype"), "nd_volatile")]), []);
        assert_eq!(verdicts("memory.persistent", &[]), [Verdict::Warning]);
        assert_eq!(verdicts("memory.stand-in", &[]), [Verdict::Note]);
    }

    #[test]
    fn a_namespace_that_cannot_be_mapped_is_found() {
        let place = "/sys/bus/nd/devices/namespace0.0";
        for (mode, size, verdicts_expected) in [
            ("raw", "4096", &[Verdict::Warning][..]),
            ("safe", "4096", &[Verdict::Warning]),
            ("memory", "4096", &[]),
            ("raw", "0", &[]),
        ] {
            let files = [(&*format!("{place}/mode"), mode), (&*format!("{place}/size"), size)];
            assert_eq!(verdicts("memory.namespace", &files), verdicts_expected, "{mode} {size}");
        }
    }

    #[test]
    fn a_dax_device_needs_its_driver() {
        let place = "/sys/bus/dax/devices/dax0.0";
        let size = (&*format!("{place}/size"), "2097152");
        let driver = format!("{place}/driver");
        for (target, verdict) in [
            (Some("->../../drivers/device_dax"), Verdict::Ok),
            (Some("->../../drivers/kmem"), Verdict::Note),
            (None, Verdict::Warning),
        ] {
            let files: Vec<_> =
                std::iter::once(size).chain(target.map(|target| (&*driver, target))).collect();
            assert_eq!(verdicts("memory.dax-device", &files), [verdict], "{target:?}");
        }
    }

    #[test]
    fn a_file_system_on_persistent_memory_has_to_be_mounted_with_dax() {
        for (line, expected) in [
            ("36 1 259:0 / /mnt/pmem rw - ext4 /dev/pmem0 rw,dax=always", &[Verdict::Ok][..]),
            ("36 1 259:0 / /mnt/pmem rw shared:1 - xfs /dev/pmem0 rw,dax", &[Verdict::Ok]),
            ("36 1 259:0 / /mnt/pmem rw - ext4 /dev/pmem0 rw,dax=never", &[Verdict::Warning]),
            ("36 1 259:0 / /mnt/pmem rw - ext4 /dev/pmem0 rw", &[Verdict::Warning]),
            ("36 1 8:0 / / rw - ext4 /dev/sda rw", &[]),
            ("not a line", &[]),
        ] {
            assert_eq!(
                verdicts("memory.dax-file-system", &[("/proc/self/mountinfo", line)]),
                expected,
                "{line}"
            );
        }
    }

    #[test]
    fn memory_of_cxl_and_huge_pages_are_reported() {
        let place = "/sys/bus/cxl/devices/mem0";
        for (pmem, verdict) in [("0x40000000", Verdict::Ok), ("0x0", Verdict::Note)] {
            assert_eq!(verdicts("memory.cxl", &[(&format!("{place}/pmem/size"), pmem)]), [verdict]);
        }
        let pages = "/sys/kernel/mm/transparent_hugepage";
        let enabled = (&*format!("{pages}/enabled"), "always [madvise] never");
        for (shared, verdict) in
            [("always [advise] never deny", Verdict::Ok), ("always [never] deny", Verdict::Note)]
        {
            let files = [enabled, (&*format!("{pages}/shmem_enabled"), shared)];
            assert_eq!(verdicts("memory.huge-pages", &files), [verdict], "{shared}");
        }
    }

    #[test]
    fn a_region_has_the_durability_that_the_daemon_would_give_it() {
        let region = |durability: &str, warnings: &[&str]| {
            Look::Seen(Region {
                kind: "dax-file".to_owned(),
                durability: durability.to_owned(),
                file_system: "ext4".to_owned(),
                warnings: warnings.iter().map(|&warning| warning.to_owned()).collect(),
            })
        };
        for (look, verdict) in [
            (region("power-fail", &[]), Verdict::Ok),
            (region("power-fail", &["not stated"]), Verdict::Warning),
            (region("process-crash", &[]), Verdict::Warning),
            (Look::NotPermitted, Verdict::Warning),
            (Look::NotTried, Verdict::Warning),
            (Look::Failed("a directory".to_owned()), Verdict::Problem),
            (Look::Silent, Verdict::Problem),
        ] {
            let mut findings = Vec::new();
            regions(&[("/mnt/pmem/region".to_owned(), look.clone())], &mut findings);
            assert_eq!(findings[0].verdict, verdict, "{look:?}");
        }
    }
}
