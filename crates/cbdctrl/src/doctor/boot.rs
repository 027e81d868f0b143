//! What would take a cached disk at a start of the machine, before the daemon or without it: `/etc/fstab`, units of
//! systemd, swap space, LVM and md.
//!
//! Invariants: a name by UUID or label counts as a name of the disk, whichever device has it at this moment: the disk and
//! the device over it carry the same one.

use super::disks::{self, Looks};
use super::finding::Finding;
use super::look::Look;
use super::machine::Machine;
use cbd_daemon::api::Status;
use std::collections::{BTreeMap, BTreeSet};

const RAW: &str = "the disk itself could be used instead of the device over it, while newer data is in the cache: both \
                   become inconsistent";

/// A cached disk or one of its partitions, and what leads to it.
#[derive(Clone, Debug, Default)]
struct Cached {
    /// The device over the disk, for `/etc/fstab`.
    device: String,
    /// Whether udev hides the disk itself from systemd.
    is_hidden: bool,
    /// `UUID=…` and the like, in lower case.
    tags: BTreeSet<String>,
}

/// The kernel's names of the daemon's backing devices, each with the path of the device over it.
pub fn cached(machine: &Machine, status: &Status) -> BTreeMap<String, String> {
    let backends = status.transports.iter().flat_map(|transport| &transport.backends);
    let of = |backend: &cbd_daemon::api::BackendStatus| {
        let name = machine.block_device(&backend.info.backend_path)?;
        let device = backend.info.blkdevs.first();
        let device = match (device, device.and_then(|device| device.name.as_ref())) {
            (Some(_), Some(name)) => format!("/dev/cbd/by-name/{name}"),
            (Some(device), None) => device.dev_name.clone(),
            (None, _) => "/dev/cbdN".to_owned(),
        };
        Some((name, device))
    };
    backends.filter_map(of).collect()
}

/// All checks of what happens at a start of the machine.
pub fn check(
    machine: &Machine,
    cached: &BTreeMap<String, String>,
    looks: &Looks,
    findings: &mut Vec<Finding>,
) {
    let before = findings.len();
    let mut all: BTreeMap<String, Cached> = BTreeMap::new();
    for (name, device) in cached {
        let whole = std::iter::once((name.clone(), device.clone()));
        // The partitions of the device over it have names of their own, which are not known before it is there.
        let parts = disks::partitions(machine, name)
            .into_iter()
            .map(|part| (part, format!("a partition of {device}")));
        all.extend(whole.chain(parts).map(|(name, device)| {
            let known = describe(machine, looks, &name, device);
            (name, known)
        }));
    }
    for entry in entries(machine) {
        findings.extend(check_entry(machine, &all, &entry));
    }
    for (name, device) in &all {
        let Some(Look::Seen(disk)) = looks.get(name) else { continue };
        findings.extend(disk.signatures.iter().filter_map(|it| scanner(name, device, &it.what)));
    }
    if findings.len() == before && !cached.is_empty() {
        findings.push(Finding::ok("boot", "nothing in /etc/fstab or a unit names a cached disk"));
    }
}

fn describe(machine: &Machine, looks: &Looks, name: &str, device: String) -> Cached {
    let number = machine.line(&format!("/sys/class/block/{name}/dev")).unwrap_or_default();
    let udev = machine.text(&format!("/run/udev/data/b{number}"));
    let property = |key: &str| {
        udev.lines().find_map(|line| line.strip_prefix("E:")?.strip_prefix(key)?.strip_prefix('='))
    };
    let known = [
        ("uuid", property("ID_FS_UUID")),
        ("label", property("ID_FS_LABEL")),
        ("partuuid", property("ID_PART_ENTRY_UUID")),
        ("partlabel", property("ID_PART_ENTRY_NAME")),
    ];
    let tag = |key: &str, value: &str| format!("{key}={}", value.to_lowercase());
    let mut tags: BTreeSet<String> =
        known.into_iter().filter_map(|(key, value)| Some(tag(key, value?))).collect();
    if let Some(Look::Seen(disk)) = looks.get(name) {
        for signature in &disk.signatures {
            tags.extend(signature.uuid.as_ref().map(|uuid| tag("uuid", uuid)));
            tags.extend(signature.label.as_ref().map(|label| tag("label", label)));
        }
    }
    Cached { device, is_hidden: property("SYSTEMD_READY") == Some("0"), tags }
}

/// A mount or swap space that is configured.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Entry {
    /// Where it is configured.
    place: String,
    source: String,
    target: String,
    kind: String,
    options: String,
}

fn entries(machine: &Machine) -> Vec<Entry> {
    let table = machine.text("/etc/fstab");
    let lines = table.lines().enumerate().filter_map(|(index, line)| {
        let mut fields = line.split_whitespace().map(str::to_owned);
        let source = fields.next().filter(|source| !source.starts_with('#'))?;
        let (target, kind) = (fields.next()?, fields.next().unwrap_or_default());
        let options = fields.next().unwrap_or_default();
        Some(Entry { place: format!("/etc/fstab:{}", index + 1), source, target, kind, options })
    });
    let folder = "/etc/systemd/system";
    let units = machine.names(folder).into_iter().filter_map(|name| {
        let kind = name.strip_suffix(".swap").map(|_| "swap").or(name.strip_suffix(".mount").map(|_| ""))?;
        let place = format!("{folder}/{name}");
        let text = machine.text(&place);
        let value = |key: &str| {
            let found = text.lines().find_map(|line| line.trim().strip_prefix(key)?.strip_prefix('='));
            found.unwrap_or_default().trim().to_owned()
        };
        let options = value("Options");
        Some(Entry { source: value("What"), target: value("Where"), kind: kind.to_owned(), options, place })
    });
    lines.chain(units).collect()
}

/// The tag that a source names, in lower case: `UUID=X`, or a link to it in `/dev/disk`.
fn tag_of(source: &str) -> Option<String> {
    let (key, value) = match source.strip_prefix("/dev/disk/by-") {
        Some(link) => link.split_once('/')?,
        None => source.split_once('=')?,
    };
    let key = key.to_lowercase();
    let is_tag = ["uuid", "label", "partuuid", "partlabel"].contains(&key.as_str());
    is_tag.then(|| format!("{key}={}", value.trim_matches('"').to_lowercase()))
}

fn check_entry(machine: &Machine, all: &BTreeMap<String, Cached>, entry: &Entry) -> Option<Finding> {
    let check = if entry.kind == "swap" { "boot.swap" } else { "boot.fstab" };
    if entry.source.starts_with("/dev/cbd") {
        return order(check, entry);
    }
    let by_tag = tag_of(&entry.source);
    let by_name = machine.block_device(&entry.source).filter(|_| by_tag.is_none());
    let (name, disk) = all.iter().find(|(name, disk)| {
        by_tag.as_ref().is_some_and(|tag| disk.tags.contains(tag)) || by_name.as_ref() == Some(name)
    })?;
    let what = if entry.kind == "swap" { "swap space" } else { entry.target.as_str() };
    let found = format!("{} names {} for {what}, which is cached", entry.place, entry.source);
    let finding = if disk.is_hidden && by_tag.is_some() {
        Finding::note(check, format!("{found}; udev hides the disk itself"), RAW)
    } else {
        Finding::problem(check, found, RAW)
    };
    let kind = if entry.kind.is_empty() { "auto" } else { &entry.kind };
    let line = format!(
        "{}  {}  {kind}  _netdev,nofail,x-systemd.requires=cbdd.service  0 0",
        disk.device, entry.target
    );
    Some(finding.of(disks::node(name)).fix(line))
}

/// A mount of a device of the daemon has to wait for it.
fn order(check: &'static str, entry: &Entry) -> Option<Finding> {
    let options: Vec<&str> = entry.options.split(',').collect();
    if options.contains(&"_netdev") || options.contains(&"noauto") {
        return None;
    }
    let found = format!("{} names {} without _netdev", entry.place, entry.source);
    let why = "the daemon waits for local file systems, and this one would wait for the daemon: the machine does not start";
    let fix = format!(
        "{}  {}  {}  _netdev,nofail,x-systemd.requires=cbdd.service  0 0",
        entry.source, entry.target, entry.kind
    );
    Some(Finding::problem(check, found, why).fix(fix))
}

/// Programs that look for their members on all disks.
fn scanner(name: &str, disk: &Cached, what: &str) -> Option<Finding> {
    let node = disks::node(name);
    let finding = match what {
        "lvm" => Finding::warning("boot.lvm", "a physical volume of LVM on a cached disk", RAW)
            .fix(format!("/etc/lvm/lvm.conf: devices {{ global_filter = [ \"r|^{node}$|\" ] }}"))
            .fix("update-initramfs -u   # or dracut -f: the start of the machine scans, too"),
        "md" => Finding::warning("boot.md", "a member of an array of md on a cached disk", RAW)
            .fix(format!("/etc/mdadm/mdadm.conf: DEVICE {}", disk.device))
            .fix("update-initramfs -u   # or dracut -f: the start of the machine scans, too"),
        _ => return None,
    };
    Some(finding.of(node))
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::super::look::Disk;
    use super::super::machine::made::Made;
    use super::super::signature::Signature;
    use super::*;

    const UUID: &str = "01020304-0506-0708-090a-0b0c0d0e0f10";

    fn machine(files: &[(&str, &str)]) -> Made {
        let made = Made::with(&[
            ("/sys/class/block/sdb/dev", "8:16"),
            ("/sys/class/block/sdb/sdb1/partition", "1"),
            ("/sys/class/block/sdb1/dev", "8:17"),
            ("/sys/class/block/sdc/dev", "8:32"),
            ("/dev/disk/by-id/ata-x", "->../../sdb"),
        ]);
        files.iter().for_each(|(path, text)| made.add(path, text));
        made
    }

    fn found(files: &[(&str, &str)], signatures: &[&str]) -> Vec<Finding> {
        let cached = BTreeMap::from([("sdb".to_owned(), "/dev/cbd0".to_owned())]);
        let named = |what: &&str| Signature { what: (*what).to_owned(), ..Signature::default() };
        let mut all: Vec<Signature> = signatures.iter().map(named).collect();
        all.push(Signature {
            what: "ext".to_owned(),
            uuid: Some(UUID.to_owned()),
            label: Some("Data".to_owned()),
        });
        let disk = Disk { signatures: all, ..Disk::default() };
        let looks = BTreeMap::from([("sdb".to_owned(), Look::Seen(disk))]);
        let mut findings = Vec::new();
        check(&machine(files).machine(), &cached, &looks, &mut findings);
        findings
    }

    fn of_fstab(line: &str) -> (&'static str, Verdict) {
        let udev = ("/run/udev/data/b8:17", "E:ID_FS_UUID=aa-bb\nE:ID_PART_ENTRY_UUID=cc-dd\n");
        let findings = found(&[("/etc/fstab", &format!("# a comment\n\n{line}\n")), udev], &[]);
        assert_eq!(findings.len(), 1, "{line}: {findings:?}");
        (findings[0].check, findings[0].verdict)
    }

    #[test]
    fn each_name_of_a_cached_disk_in_fstab_is_a_problem() {
        for source in [
            &format!("UUID={UUID}"),
            &format!("UUID=\"{}\"", UUID.to_uppercase()),
            "LABEL=Data",
            &format!("/dev/disk/by-uuid/{UUID}"),
            "/dev/sdb",
            "/dev/sdb1",
            "/dev/disk/by-id/ata-x",
            "UUID=AA-BB",
            "PARTUUID=cc-dd",
        ] {
            let expected = ("boot.fstab", Verdict::Problem);
            assert_eq!(of_fstab(&format!("{source} /srv ext4 defaults 0 2")), expected, "{source}");
        }
        assert_eq!(of_fstab(&format!("UUID={UUID} none swap sw 0 0")), ("boot.swap", Verdict::Problem));
        for source in
            ["UUID=other", "LABEL=other", "/dev/sdc", "/dev/disk/by-id/other", "tmpfs", "host:/export"]
        {
            assert_eq!(
                of_fstab(&format!("{source} /srv ext4 defaults 0 2")),
                ("boot", Verdict::Ok),
                "{source}"
            );
        }
    }

    #[test]
    fn the_line_to_use_names_the_device_and_its_order() {
        let findings = found(&[("/etc/fstab", "LABEL=Data /srv xfs noatime 0 2\n")], &[]);
        assert_eq!(
            findings[0].fix,
            ["/dev/cbd0  /srv  xfs  _netdev,nofail,x-systemd.requires=cbdd.service  0 0"]
        );
        assert!(findings[0].found.starts_with("/etc/fstab:1 names LABEL=Data"), "{findings:?}");
    }

    #[test]
    fn a_device_of_the_daemon_has_to_wait_for_it() {
        let verdict = |options: &str| of_fstab(&format!("/dev/cbd0 /srv xfs {options} 0 0")).1;
        assert_eq!(verdict("defaults"), Verdict::Problem);
        assert_eq!(verdict("_netdev,nofail"), Verdict::Ok);
        assert_eq!(verdict("noauto"), Verdict::Ok);
    }

    #[test]
    fn a_disk_that_udev_hides_is_only_noted() {
        let files = [
            ("/etc/fstab", "LABEL=Data /srv xfs noatime 0 2\n"),
            ("/run/udev/data/b8:16", "E:SYSTEMD_READY=0\n"),
        ];
        assert_eq!(found(&files, &[])[0].verdict, Verdict::Note);
    }

    #[test]
    fn units_of_systemd_count_like_fstab() {
        let unit = "[Mount]\nWhat=/dev/disk/by-label/Data\nWhere=/srv\n";
        let findings = found(&[("/etc/systemd/system/srv.mount", unit)], &[]);
        assert_eq!((findings[0].check, findings[0].verdict), ("boot.fstab", Verdict::Problem));
        let findings = found(&[("/etc/systemd/system/dev-sdb.swap", "[Swap]\nWhat=/dev/sdb\n")], &[]);
        assert_eq!((findings[0].check, findings[0].verdict), ("boot.swap", Verdict::Problem));
        assert_eq!(found(&[("/etc/systemd/system/x.service", "What=/dev/sdb")], &[])[0].verdict, Verdict::Ok);
    }

    #[test]
    fn lvm_and_md_on_a_cached_disk_are_found() {
        for (what, check) in [("lvm", "boot.lvm"), ("md", "boot.md")] {
            let findings = found(&[], &[what]);
            assert_eq!((findings[0].check, findings[0].verdict), (check, Verdict::Warning));
        }
    }
}
