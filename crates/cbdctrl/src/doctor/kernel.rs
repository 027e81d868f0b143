//! The kernel: its version, io_uring, and the drivers by which clients reach a device.
//!
//! Invariants: nothing is loaded or mounted to find out; the commands that would do so are named.

use super::finding::Finding;
use super::look::Look;
use super::machine::Machine;

/// The earliest kernel that CBD supports.
const MINIMUM: (u32, u32) = (5, 10);
/// From here on a ublk device can be handed from a daemon to the next.
const UBLK: (u32, u32) = (6, 5);
/// From here on a FUSE device can outlive its daemon.
const FUSE_OUTLIVES: (u32, u32) = (6, 9);
/// Where the driver of ublk is controlled.
pub const UBLK_CONTROL: &str = "/dev/ublk-control";
/// Pages of a FUSE request that the daemon asks the kernel for.
const FUSE_PAGES: u64 = 257;

/// Where a driver is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Module {
    /// In the kernel.
    Present,
    /// In a file, which is not loaded.
    Loadable,
    /// Nowhere.
    Missing,
    /// The kernel's modules cannot be listed here.
    Unknown,
}

fn release(machine: &Machine) -> String {
    machine.line("/proc/sys/kernel/osrelease").unwrap_or_default()
}

/// Major and minor number of the kernel's version.
fn version(machine: &Machine) -> Option<(u32, u32)> {
    let release = release(machine);
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

fn module(machine: &Machine, name: &str) -> Module {
    if machine.exists(&format!("/sys/module/{name}")) {
        return Module::Present;
    }
    let folders = ["/lib/modules", "/usr/lib/modules"].map(|folder| format!("{folder}/{}", release(machine)));
    let lists = |file: &str| folders.iter().find_map(|folder| machine.read(&format!("{folder}/{file}")).ok());
    let file = format!("/{name}.ko");
    if lists("modules.builtin").is_some_and(|list| list.contains(&file)) {
        return Module::Present;
    }
    match lists("modules.dep") {
        Some(list) if list.contains(&file) => Module::Loadable,
        Some(_) => Module::Missing,
        None => Module::Unknown,
    }
}

/// All checks of the kernel. `ublk` is what a command to the driver of ublk has shown, if its device is there.
pub fn check(machine: &Machine, ublk: Option<&Look<()>>, findings: &mut Vec<Finding>) {
    let version = version(machine).unwrap_or_default();
    findings.push(check_version(version, &release(machine)));
    findings.push(io_uring(machine));
    let drivers = [check_ublk(machine, version, ublk), fuse(machine, version), loop_device(machine)];
    let works = |finding: &Finding| finding.verdict <= super::finding::Verdict::Note;
    let has_device = works(&drivers[0]) || (works(&drivers[1]) && works(&drivers[2]));
    findings.extend(drivers);
    findings.extend(fuse_timeout(machine));
    let why = "clients reach devices as /dev/cbdN by ublk, or by FUSE and a loop device; otherwise by NBD, vhost-user or \
               in a program";
    findings.push(if has_device {
        Finding::ok("kernel.block-device", "kernel block devices can be made, if the daemon runs as root")
    } else {
        Finding::warning("kernel.block-device", "no kernel block device can be made as it is now", why)
            .fix("modprobe ublk_drv")
    });
    findings.push(match module(machine, "nbd") {
        Module::Present | Module::Unknown => {
            Finding::ok("kernel.nbd", "NBD exports need no driver on this machine")
        }
        Module::Loadable | Module::Missing => Finding::note(
            "kernel.nbd",
            "the driver nbd is not loaded",
            "only a client of the kernel needs it to connect to an NBD export; the daemon does not",
        )
        .fix("modprobe nbd"),
    });
}

fn check_version(version: (u32, u32), release: &str) -> Finding {
    let check = "kernel.version";
    let found = format!("Linux {release}");
    if version == (0, 0) {
        return Finding::note(check, "not known", "CBD needs Linux 5.10");
    }
    if version < MINIMUM {
        let why = "CBD needs Linux 5.10: io_uring and its operations";
        return Finding::problem(check, found, why).fix("install a later kernel");
    }
    if version < UBLK {
        let why = "from Linux 6.5 on devices by ublk outlive their daemon, from 6.9 on those by FUSE, too: before, their \
                   users see errors when the daemon ends";
        return Finding::note(check, found, why);
    }
    Finding::ok(check, found)
}

fn io_uring(machine: &Machine) -> Finding {
    let check = "kernel.io-uring";
    let fix = "sysctl kernel.io_uring_disabled=0   # and in /etc/sysctl.d, to keep it";
    let why = "without io_uring each request of a disk takes system calls of its own, and there is no ublk";
    match machine.number("/proc/sys/kernel/io_uring_disabled") {
        Some(0) => Finding::ok(check, "permitted"),
        Some(1) => {
            Finding::note(check, "permitted for root and the group kernel.io_uring_group", why).fix(fix)
        }
        Some(_) => Finding::warning(check, "forbidden by kernel.io_uring_disabled", why).fix(fix),
        // The setting came with Linux 6.6.
        None => Finding::ok(check, "this kernel has no setting that forbids it"),
    }
}

fn check_ublk(machine: &Machine, version: (u32, u32), look: Option<&Look<()>>) -> Finding {
    let check = "kernel.ublk";
    let why = "ublk is the fastest way to a kernel block device, and one that outlives its daemon";
    match look {
        Some(Look::Seen(())) => return Finding::ok(check, "the driver is there, with all that CBD needs"),
        Some(Look::NotPermitted) => {
            return Finding::note(check, "the driver is there; its features are shown to root only", why);
        }
        Some(Look::Failed(error)) => {
            return if version < UBLK {
                Finding::warning(check, error.as_str(), why).fix("install Linux 6.5 or later")
            } else {
                Finding::warning(check, error.as_str(), why)
            };
        }
        Some(Look::Silent | Look::NotTried) => {
            return Finding::problem(check, "the driver does not answer", "a device by ublk may hang")
                .fix("journalctl -k | grep ublk");
        }
        None => {}
    }
    let load = [
        "modprobe ublk_drv",
        "echo ublk_drv > /etc/modules-load.d/cbd.conf   # after each start of the machine",
    ];
    let (found, fixes): (_, &[&str]) = match module(machine, "ublk_drv") {
        Module::Present => {
            ("the driver is in the kernel, but /dev/ublk-control is not there", &["udevadm trigger"])
        }
        Module::Loadable => ("the driver ublk_drv is not loaded", &load),
        Module::Unknown => {
            ("the driver ublk_drv is not loaded; whether there is one is not known here", &load[..1])
        }
        Module::Missing => (
            "this kernel has no driver ublk_drv (CONFIG_BLK_DEV_UBLK)",
            &[
                "install a kernel with CONFIG_BLK_DEV_UBLK (Debian and Ubuntu: linux-modules-extra, or a later kernel)",
            ],
        ),
    };
    fixes.iter().fold(Finding::warning(check, found, why), |finding, fix| finding.fix(*fix))
}

fn fuse(machine: &Machine, version: (u32, u32)) -> Finding {
    let check = "kernel.fuse";
    let why = "where there is no ublk, /dev/cbdN is a loop device over a FUSE file";
    let systems = machine.text("/proc/filesystems");
    let is_there = systems.lines().any(|line| line.split_whitespace().last() == Some("fuse"));
    if !is_there || !machine.exists("/dev/fuse") {
        return match module(machine, "fuse") {
            Module::Missing => Finding::warning(check, "this kernel has no FUSE (CONFIG_FUSE_FS)", why),
            _ if is_there => {
                Finding::warning(check, "FUSE is there, but /dev/fuse is not", why).fix("udevadm trigger")
            }
            _ => Finding::warning(check, "FUSE is not loaded", why).fix("modprobe fuse"),
        };
    }
    if version < FUSE_OUTLIVES {
        let why =
            "from Linux 6.9 on a FUSE device outlives its daemon; before, its users see errors when it ends";
        return Finding::note(check, "the driver is there; devices end with their daemon", why);
    }
    match machine.number("/proc/sys/fs/fuse/max_pages_limit") {
        Some(pages) if pages < FUSE_PAGES => {
            let why = "a write of 1 MiB from memory that is not aligned to pages can be cut short; the daemon raises the \
                       limit if it runs as root";
            Finding::note(check, format!("the driver is there; at most {pages} pages for a request"), why)
                .fix(format!("sysctl fs.fuse.max_pages_limit={FUSE_PAGES}"))
        }
        _ => Finding::ok(check, "the driver is there; devices can outlive their daemon"),
    }
}

fn fuse_timeout(machine: &Machine) -> Option<Finding> {
    let seconds = ["default_request_timeout", "max_request_timeout"]
        .iter()
        .filter_map(|name| machine.number(&format!("/proc/sys/fs/fuse/{name}")))
        .filter(|seconds| *seconds > 0)
        .min()?;
    let why = "the kernel ends a FUSE device whose daemon is away for longer: its users see errors";
    Some(
        Finding::warning("kernel.fuse-timeout", format!("requests to FUSE end after {seconds} s"), why)
            .fix("sysctl fs.fuse.default_request_timeout=0 fs.fuse.max_request_timeout=0"),
    )
}

fn loop_device(machine: &Machine) -> Finding {
    let check = "kernel.loop";
    let why = "where there is no ublk, /dev/cbdN is a loop device over a FUSE file";
    if machine.exists("/dev/loop-control") {
        return Finding::ok(check, "loop devices can be made");
    }
    match module(machine, "loop") {
        Module::Missing => {
            Finding::warning(check, "this kernel has no loop devices (CONFIG_BLK_DEV_LOOP)", why)
        }
        _ => Finding::warning(check, "the driver loop is not loaded", why).fix("modprobe loop"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::super::machine::made::Made;
    use super::*;

    fn finding(name: &str, files: &[(&str, &str)], ublk: Option<&Look<()>>) -> Option<Finding> {
        let mut findings = Vec::new();
        check(&Made::with(files).machine(), ublk, &mut findings);
        findings.into_iter().find(|finding| finding.check == name)
    }

    fn verdict(name: &str, files: &[(&str, &str)], ublk: Option<&Look<()>>) -> Option<Verdict> {
        finding(name, files, ublk).map(|finding| finding.verdict)
    }

    const RELEASE: &str = "/proc/sys/kernel/osrelease";

    #[test]
    fn the_version_is_compared_with_what_needs_it() {
        for (release, expected) in [
            ("5.4.0-200-generic\n", Verdict::Problem),
            ("5.10.0\n", Verdict::Note),
            ("6.4.16\n", Verdict::Note),
            ("6.12.41+deb13-amd64\n", Verdict::Ok),
            ("10.0\n", Verdict::Ok),
        ] {
            assert_eq!(verdict("kernel.version", &[(RELEASE, release)], None), Some(expected), "{release}");
        }
    }

    #[test]
    fn io_uring_may_be_forbidden() {
        for (value, expected) in [("0\n", Verdict::Ok), ("1\n", Verdict::Note), ("2\n", Verdict::Warning)] {
            let files = [("/proc/sys/kernel/io_uring_disabled", value)];
            assert_eq!(verdict("kernel.io-uring", &files, None), Some(expected), "{value}");
        }
        assert_eq!(verdict("kernel.io-uring", &[], None), Some(Verdict::Ok));
    }

    #[test]
    fn a_driver_that_is_not_loaded_has_its_command() {
        let dep = "/lib/modules/6.8.0/modules.dep";
        let release = (RELEASE, "6.8.0");
        let loadable =
            [release, (dep, "kernel/drivers/block/ublk_drv.ko.zst:\nkernel/drivers/block/loop.ko:\n")];
        let found = finding("kernel.ublk", &loadable, None).unwrap();
        assert_eq!((found.verdict, found.fix[0].as_str()), (Verdict::Warning, "modprobe ublk_drv"));
        let found = finding("kernel.loop", &loadable, None).unwrap();
        assert_eq!((found.verdict, found.fix[0].as_str()), (Verdict::Warning, "modprobe loop"));
        let missing = finding("kernel.ublk", &[release, (dep, "")], None).unwrap();
        assert!(missing.found.contains("CONFIG_BLK_DEV_UBLK"), "{missing:?}");
        assert_eq!(verdict("kernel.block-device", &loadable, None), Some(Verdict::Warning));
    }

    #[test]
    fn the_driver_of_ublk_says_whether_it_suffices() {
        let release = [(RELEASE, "6.8.0")];
        for (look, expected) in [
            (Look::Seen(()), Verdict::Ok),
            (Look::NotPermitted, Verdict::Note),
            (Look::Failed("cannot hand a device over".to_owned()), Verdict::Warning),
            (Look::Silent, Verdict::Problem),
        ] {
            assert_eq!(verdict("kernel.ublk", &release, Some(&look)), Some(expected), "{look:?}");
        }
        assert_eq!(verdict("kernel.block-device", &release, Some(&Look::Seen(()))), Some(Verdict::Ok));
    }

    #[test]
    fn fuse_needs_its_device_and_no_timeout() {
        let there = [("/proc/filesystems", "nodev\tfuse\n"), ("/dev/fuse", ""), ("/dev/loop-control", "")];
        let with = |more: &[(&'static str, &'static str)]| [&there[..], more].concat();
        for (files, expected) in [
            (with(&[(RELEASE, "6.9.0")]), Verdict::Ok),
            (with(&[(RELEASE, "6.8.0")]), Verdict::Note),
            (with(&[(RELEASE, "6.14.0"), ("/proc/sys/fs/fuse/max_pages_limit", "256")]), Verdict::Note),
            (vec![(RELEASE, "6.9.0")], Verdict::Warning),
            (there[..1].to_vec(), Verdict::Warning),
        ] {
            assert_eq!(verdict("kernel.fuse", &files, None), Some(expected), "{files:?}");
        }
        assert_eq!(verdict("kernel.block-device", &with(&[(RELEASE, "6.9.0")]), None), Some(Verdict::Ok));
        let timeout = "/proc/sys/fs/fuse/default_request_timeout";
        assert_eq!(verdict("kernel.fuse-timeout", &[(timeout, "60")], None), Some(Verdict::Warning));
        assert_eq!(verdict("kernel.fuse-timeout", &[(timeout, "0")], None), None);
    }
}
