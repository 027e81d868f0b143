//! The daemon: whether it runs, its version, its unit, its udev rules, what it warns of, and what holds its descriptors.

use super::finding::Finding;
use super::machine::Machine;
use cbd_daemon::api::{BackendStatus, BlkdevInfo, Status};
use cbd_types::{Error, ErrorKind};

/// systemd holds descriptors over a stop of a unit from here on.
const SYSTEMD_PRESERVES: u32 = 254;
const UNIT_FOLDERS: [&str; 3] = ["/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];
const RULE_FOLDERS: [&str; 3] = ["/etc/udev/rules.d", "/usr/lib/udev/rules.d", "/lib/udev/rules.d"];

/// All checks of the daemon, by its answer.
pub fn check(
    machine: &Machine,
    answer: &Result<Status, Error>,
    findings: &mut Vec<Finding>,
    unseen: &mut Vec<String>,
) {
    let is_enabled = unit(machine, findings);
    match answer {
        Ok(status) => of_status(status, findings),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let why = "no device is served; data of earlier daemons waits in their regions";
            findings.push(if is_enabled {
                Finding::warning("daemon.running", "no daemon runs, though its unit is enabled", why)
                    .fix("systemctl start cbdd; journalctl -u cbdd")
            } else {
                Finding::note("daemon.running", "no daemon runs", why)
                    .fix("systemctl enable --now cbdd, or cbdd")
            });
            unseen.push("which disks are cached (no daemon runs)".to_owned());
        }
        Err(error) if error.kind() == ErrorKind::Permission => {
            unseen.push(format!("the daemon, and which disks are cached ({})", error.line()));
        }
        Err(error) => {
            let why = "its clients may wait, and no command works";
            findings.push(Finding::problem("daemon.running", error.line(), why).fix("journalctl -u cbdd"));
            unseen.push("which disks are cached (the daemon does not answer)".to_owned());
        }
    }
    let has_devices = answer.as_ref().is_ok_and(|status| blkdevs(status).next().is_some());
    rules(machine, has_devices, findings);
    store(machine, answer.as_ref().ok(), findings);
}

fn backends(status: &Status) -> impl Iterator<Item = &BackendStatus> {
    status.transports.iter().flat_map(|transport| &transport.backends)
}

fn blkdevs(status: &Status) -> impl Iterator<Item = &BlkdevInfo> {
    let remote = status.transports.iter().flat_map(|transport| &transport.remote_blkdevs);
    let local = backends(status).flat_map(|backend| &backend.info.blkdevs);
    local.chain(remote.map(|remote| &remote.info))
}

/// Whether the unit is enabled.
fn unit(machine: &Machine, findings: &mut Vec<Finding>) -> bool {
    if !machine.exists("/run/systemd/system") {
        return false;
    }
    let why = "the daemon has to run before file systems on its devices are mounted";
    if !UNIT_FOLDERS.iter().any(|folder| machine.exists(&format!("{folder}/cbdd.service"))) {
        findings.push(Finding::note("daemon.unit", "the unit cbdd.service is not installed", why).fix(
            "install -m 644 packaging/cbdd.service /usr/lib/systemd/system/ && systemctl daemon-reload",
        ));
        return false;
    }
    let wants = machine.names(UNIT_FOLDERS[0]).into_iter().filter(|name| name.ends_with(".wants"));
    let mut links = wants.map(|folder| format!("{}/{folder}/cbdd.service", UNIT_FOLDERS[0]));
    let is_enabled = links.any(|link| machine.exists(&link));
    findings.push(if is_enabled {
        Finding::ok("daemon.unit", "cbdd.service is installed and enabled")
    } else {
        Finding::warning("daemon.unit", "cbdd.service is not enabled", why).fix("systemctl enable cbdd")
    });
    is_enabled
}

fn rules(machine: &Machine, has_devices: bool, findings: &mut Vec<Finding>) {
    if !machine.exists("/run/udev") {
        return;
    }
    if RULE_FOLDERS.iter().any(|folder| machine.exists(&format!("{folder}/60-cbd.rules"))) {
        findings.push(Finding::ok("daemon.udev-rules", "60-cbd.rules is installed"));
        return;
    }
    let why = "without it mount units for /dev/cbdN do not find their device, and links by UUID may lead to the raw disk";
    let found = "60-cbd.rules is not installed";
    let finding = if has_devices {
        Finding::warning("daemon.udev-rules", found, why)
    } else {
        Finding::note("daemon.udev-rules", found, why)
    };
    findings.push(
        finding
            .fix("install -m 644 packaging/60-cbd.rules /usr/lib/udev/rules.d/ && udevadm control --reload"),
    );
}

fn of_status(status: &Status, findings: &mut Vec<Finding>) {
    findings
        .push(Finding::ok("daemon.running", format!("process {}, for {} s", status.pid, status.uptime_s)));
    let own = env!("CARGO_PKG_VERSION");
    findings.push(if status.version == own {
        Finding::ok("daemon.version", own)
    } else {
        let found = format!("the daemon is {}, this program {own}", status.version);
        Finding::warning("daemon.version", found, "commands and fields may be missing in one of both")
            .fix("systemctl restart cbdd   # devices outlive that where `cbdctrl dev-list` says so")
    });
    let before = findings.len();
    let see = "cbdctrl status";
    let warn = |text: &str, subject: Option<String>| {
        let finding =
            Finding::warning("daemon.warnings", text, "the daemon reports it in its status").fix(see);
        match subject {
            Some(subject) => finding.of(subject),
            None => finding,
        }
    };
    findings.extend(status.warnings.iter().map(|text| warn(text, None)));
    for transport in &status.transports {
        let subject = format!("transport {}", transport.info.transport_id);
        let texts = transport.info.warnings.iter().chain(&transport.info.error);
        findings.extend(texts.map(|text| warn(text, Some(subject.clone()))));
    }
    for backend in backends(status) {
        let subject = format!("backend {}, {}", backend.info.backend_id, backend.info.backend_path);
        let cache = backend.cache.as_ref();
        let texts = backend.warnings.iter().chain(&backend.info.error).chain(&backend.file_change);
        let texts = texts
            .chain(&backend.unchecked)
            .chain(&backend.silent)
            .chain(cache.and_then(|cache| cache.last_error.as_ref()));
        findings.extend(texts.map(|text| warn(text, Some(subject.clone()))));
    }
    if findings.len() == before {
        findings.push(Finding::ok("daemon.warnings", "none"));
    }
}

/// Major version of the systemd that is installed, by the name of its library.
fn systemd(machine: &Machine) -> Option<u32> {
    let mut folders: Vec<String> = ["/usr/lib/systemd", "/lib/systemd"].map(str::to_owned).to_vec();
    let inside = |root: &str| {
        let root = root.to_owned();
        machine
            .names(&root)
            .into_iter()
            .filter(|name| name.contains("-linux-gnu"))
            .map(move |name| format!("{root}/{name}/systemd"))
    };
    folders.extend(inside("/usr/lib"));
    let mut names = folders.iter().flat_map(|folder| machine.names(folder));
    names.find_map(|name| {
        let rest = name.strip_prefix("libsystemd-shared-")?;
        rest.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
    })
}

fn store(machine: &Machine, status: Option<&Status>, findings: &mut Vec<Finding>) {
    let check = "daemon.descriptor-store";
    let why = "users of such a device see errors when the daemon ends, and file systems on it must be mounted again";
    for device in status.into_iter().flat_map(blkdevs) {
        if device.method.as_ref().is_some_and(|method| method.contains("ends with the daemon")) {
            let note = device.note.clone().unwrap_or_else(|| "it ends with the daemon".to_owned());
            findings.push(Finding::warning(check, note, why).of(&device.dev_name).fix(
                "modprobe ublk_drv, or FileDescriptorStoreMax=4096 in the unit; then dev-stop and dev-start",
            ));
        }
    }
    if !machine.exists("/run/systemd/system") {
        return;
    }
    if let Some(version) = systemd(machine) {
        findings.push(if version >= SYSTEMD_PRESERVES {
            Finding::ok(check, format!("systemd {version} holds descriptors, also over a stop of the daemon"))
        } else {
            let found = format!("systemd {version} closes descriptors at systemctl stop");
            Finding::note(check, found, "FUSE devices outlive systemctl restart and a crash, but not a stop")
                .fix("use systemctl restart, or devices by ublk")
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::super::machine::made::Made;
    use super::*;

    fn found(
        files: &[(&str, &str)],
        answer: &Result<Status, Error>,
    ) -> (Vec<(&'static str, Verdict)>, Vec<String>) {
        let (mut findings, mut unseen) = (Vec::new(), Vec::new());
        check(&Made::with(files).machine(), answer, &mut findings, &mut unseen);
        (findings.into_iter().map(|finding| (finding.check, finding.verdict)).collect(), unseen)
    }

    fn status(version: &str, warnings: &[&str]) -> Result<Status, Error> {
        let warnings = warnings.iter().map(|&warning| warning.to_owned()).collect();
        Ok(Status { version: version.to_owned(), warnings, ..Status::default() })
    }

    fn refused(kind: ErrorKind) -> Result<Status, Error> {
        Err(Error::new(kind, "refused"))
    }

    const SYSTEMD: (&str, &str) = ("/run/systemd/system", "/");
    const UNIT: (&str, &str) = ("/usr/lib/systemd/system/cbdd.service", "[Unit]");
    const ENABLED: (&str, &str) =
        ("/etc/systemd/system/multi-user.target.wants/cbdd.service", "->/usr/lib/x");

    #[test]
    fn a_daemon_that_does_not_run_is_a_warning_where_it_should() {
        let running = |files: &[(&str, &str)], kind| {
            let (findings, unseen) = found(files, &refused(kind));
            assert_eq!(unseen.len(), 1);
            findings.into_iter().find(|(check, _)| *check == "daemon.running").map(|(_, verdict)| verdict)
        };
        assert_eq!(running(&[], ErrorKind::NotFound), Some(Verdict::Note));
        assert_eq!(running(&[SYSTEMD, UNIT, ENABLED], ErrorKind::NotFound), Some(Verdict::Warning));
        assert_eq!(running(&[], ErrorKind::TimedOut), Some(Verdict::Problem));
        assert_eq!(running(&[], ErrorKind::Permission), None);
    }

    #[test]
    fn version_and_warnings_of_the_daemon_are_reported() {
        let own = env!("CARGO_PKG_VERSION");
        let (findings, unseen) = found(&[], &status(own, &[]));
        let ok = ["daemon.running", "daemon.version", "daemon.warnings"].map(|check| (check, Verdict::Ok));
        assert_eq!((findings, unseen), (ok.to_vec(), vec![]));
        let (findings, _) = found(&[], &status("0.0.9", &["no memory is locked"]));
        assert_eq!(
            findings[1..],
            [("daemon.version", Verdict::Warning), ("daemon.warnings", Verdict::Warning)]
        );
    }

    #[test]
    fn unit_rules_and_store_are_checked_where_systemd_and_udev_are() {
        let no_daemon = refused(ErrorKind::Permission);
        assert_eq!(found(&[], &no_daemon).0, []);
        let library =
            |version: &str| format!("/usr/lib/x86_64-linux-gnu/systemd/libsystemd-shared-{version}.so");
        for (files, expected) in [
            (vec![SYSTEMD], vec![("daemon.unit", Verdict::Note)]),
            (vec![SYSTEMD, UNIT], vec![("daemon.unit", Verdict::Warning)]),
            (vec![SYSTEMD, UNIT, ENABLED], vec![("daemon.unit", Verdict::Ok)]),
            (vec![("/run/udev/data", "/")], vec![("daemon.udev-rules", Verdict::Note)]),
            (
                vec![("/run/udev/data", "/"), ("/usr/lib/udev/rules.d/60-cbd.rules", "#")],
                vec![("daemon.udev-rules", Verdict::Ok)],
            ),
            (
                vec![SYSTEMD, UNIT, ENABLED, (&library("257"), "")],
                vec![("daemon.unit", Verdict::Ok), ("daemon.descriptor-store", Verdict::Ok)],
            ),
            (
                vec![SYSTEMD, UNIT, ENABLED, (&library("252"), "")],
                vec![("daemon.unit", Verdict::Ok), ("daemon.descriptor-store", Verdict::Note)],
            ),
        ] {
            assert_eq!(found(&files, &no_daemon).0, expected, "{files:?}");
        }
    }
}
