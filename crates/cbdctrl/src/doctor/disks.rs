//! The block devices: what other caches have left on them, whether they keep their identity, and their other names.
//!
//! Invariants: a device whose requests a program serves (ublk, a loop device over a FUSE file) is not read.

use super::finding::Finding;
use super::look::{Disk, Look, for_root};
use super::machine::Machine;
use std::collections::{BTreeMap, BTreeSet};

/// Devices that hold no data of users, or whose requests a program serves.
const LEFT_OUT: [&str; 6] = ["ram", "zram", "ublkb", "sr", "fd", "mtdblock"];
/// Most devices that are read.
const READ_MAX: usize = 256;

/// Where the kernel shows a block device.
fn place(name: &str) -> String {
    format!("/sys/class/block/{name}")
}

/// The node of a block device.
pub fn node(name: &str) -> String {
    format!("/dev/{}", name.replace('!', "/"))
}

/// The names of the block devices to read.
pub fn to_read(machine: &Machine) -> Vec<String> {
    let table = machine.text("/proc/self/mountinfo");
    let is_wanted = |name: &String| {
        let is_left_out = LEFT_OUT.iter().any(|kind| {
            name.strip_prefix(kind)
                .is_some_and(|rest| rest.starts_with(|letter: char| letter.is_ascii_digit()))
        });
        let backing = machine.line(&format!("{}/loop/backing_file", place(name)));
        !is_left_out
            && machine.number(&format!("{}/size", place(name))).unwrap_or(0) > 0
            && !backing.is_some_and(|file| is_on_fuse(&table, &file))
    };
    machine.names("/sys/class/block").into_iter().filter(is_wanted).take(READ_MAX).collect()
}

/// Whether a path is on a FUSE file system, by the table of mounts. Blanks in mount points are written as `\040`.
fn is_on_fuse(table: &str, path: &str) -> bool {
    let mounts = table.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        Some((before.split(' ').nth(4)?.replace("\\040", " "), after.split(' ').next()?))
    });
    let around = mounts.filter(|(target, _)| std::path::Path::new(path).starts_with(target));
    around.max_by_key(|(target, _)| target.len()).is_some_and(|(_, kind)| kind.starts_with("fuse"))
}

/// A partition of a disk, or the disk itself.
pub fn is_partition(machine: &Machine, name: &str) -> bool {
    machine.exists(&format!("{}/partition", place(name)))
}

/// The partitions of a disk.
pub fn partitions(machine: &Machine, name: &str) -> Vec<String> {
    let inside = machine.names(&place(name)).into_iter();
    inside.filter(|part| machine.exists(&format!("{}/{part}/partition", place(name)))).collect()
}

/// What was seen of each device.
pub type Looks = BTreeMap<String, Look<Disk>>;

/// All checks of disks. `cached` are the backing devices of the daemon.
pub fn check(
    machine: &Machine,
    looks: &Looks,
    cached: &BTreeSet<String>,
    findings: &mut Vec<Finding>,
    unseen: &mut Vec<String>,
) {
    let before = findings.len();
    for (name, look) in looks {
        match look {
            Look::Seen(disk) => {
                findings.extend(disk.signatures.iter().filter_map(|it| other_cache(machine, name, &it.what)));
                findings.extend(identity(machine, name, disk, cached.contains(name)));
            }
            Look::Silent => {
                let why = "the daemon would wait for it; a disk that was spun down needs some seconds, then ask again";
                findings.push(
                    Finding::warning("disks.silent", "no answer within 2 s", why)
                        .of(node(name))
                        .fix(format!("dmesg | grep {name}")),
                );
            }
            _ => {}
        }
    }
    findings.extend(cache_of_lvm(machine));
    two_paths(machine, cached, findings);
    if findings.len() == before && looks.values().any(|look| matches!(look, Look::Seen(_))) {
        findings.push(Finding::ok(
            "disks",
            format!("{} block devices, nothing of other caches on them", looks.len()),
        ));
    }
    not_seen(looks, unseen);
}

fn not_seen(looks: &Looks, unseen: &mut Vec<String>) {
    let of = |is: fn(&Look<Disk>) -> bool| {
        let names = looks.iter().filter(|(_, look)| is(look)).map(|(name, _)| node(name));
        names.collect::<Vec<_>>().join(", ")
    };
    let not_permitted = format!("this user may not read them; {}", for_root("cbdctrl doctor"));
    for (names, why) in [
        (of(|look| matches!(look, Look::NotPermitted)), not_permitted.as_str()),
        (of(|look| matches!(look, Look::NotTried)), "not tried, because others took too long"),
    ] {
        if !names.is_empty() {
            unseen.push(format!("what is on {names} ({why})"));
        }
    }
    for (name, look) in looks {
        if let Look::Failed(error) = look {
            unseen.push(format!("what is on {} ({error})", node(name)));
        }
    }
}

/// What another cache has left on a device.
fn other_cache(machine: &Machine, name: &str, what: &str) -> Option<Finding> {
    let node = node(name);
    let check = "disks.other-cache";
    let lacks = "the disk that it caches may lack data: CBD over that disk would serve old data";
    let is_active = machine.exists(&format!("{}/bcache", place(name)));
    let finding = match what {
        "bcache-backing" => {
            let why = "its data begins behind a header, and newer data may be in the cache of bcache";
            let state = if is_active { "in use" } else { "not registered" };
            let found = Finding::warning(check, format!("a backing device of bcache, {state}"), why);
            let found =
                if is_active { found } else { found.fix(format!("echo {node} > /sys/fs/bcache/register")) };
            found.fix(format!(
                "echo 1 > /sys/class/block/{name}/bcache/detach   # writes the newer data to it first"
            ))
        }
        "bcache-cache" => Finding::warning(check, "a cache device of bcache", lacks)
            .fix("detach each of its backing devices first; wipefs -a then removes what is left of it"),
        "dm-writecache" => Finding::warning(check, "a cache of dm-writecache", lacks)
            .fix("lvconvert --splitcache VG/LV   # or dmsetup message NAME 0 flush, without LVM"),
        "dm-cache" => Finding::warning(check, "the metadata of a dm-cache", lacks)
            .fix("lvconvert --uncache VG/LV   # writes the newer data to the disk first"),
        "dm-pcache" => Finding::warning(check, "a cache of dm-pcache", lacks).fix(format!(
            "cbdctrl rescue --from dm-pcache {node} --to DISK   # shows what it would write; --yes writes"
        )),
        "open-cas" => Finding::warning(check, "a cache of Open CAS", lacks)
            .fix(format!("casadm --load-cache --cache-device {node}"))
            .fix("casadm --stop-cache --cache-id N   # writes the newer data to its disks first"),
        _ => return None,
    };
    Some(finding.of(node))
}

/// Caches of LVM that are active now.
fn cache_of_lvm(machine: &Machine) -> Vec<Finding> {
    let names = machine.names("/sys/class/block").into_iter().filter(|name| name.starts_with("dm-"));
    let of = |name: String| {
        let attribute = |what: &str| machine.line(&format!("{}/dm/{what}", place(&name))).unwrap_or_default();
        let (uuid, mapped) = (attribute("uuid"), attribute("name"));
        let part = ["cdata", "cmeta", "cvol"].into_iter().find(|part| uuid.ends_with(&format!("-{part}")));
        let is_origin = mapped.ends_with("_corig") || mapped.ends_with("_wcorig");
        if !uuid.starts_with("LVM-") || (part.is_none() && !is_origin) {
            return None;
        }
        let found = format!("part of a cache of LVM ({mapped})");
        let why =
            "below that cache the disk may lack data; over the logical volume itself CBD sees all of it";
        Some(
            Finding::note("disks.other-cache", found, why)
                .of(node(&name))
                .fix("lvconvert --uncache VG/LV   # writes the newer data to the disk first"),
        )
    };
    names.filter_map(of).collect()
}

fn identity(machine: &Machine, name: &str, disk: &Disk, is_cached: bool) -> Option<Finding> {
    let has = |what: &str| machine.exists(&format!("{}/{what}", place(name)));
    // A loop device has the identity of its file, which is known when it becomes a backing device.
    if !disk.is_weak || has("loop/backing_file") || (is_partition(machine, name) && !is_cached) {
        return None;
    }
    let check = "disks.identity";
    let found = "no serial number, WWN or UUID";
    let why = "after a restart of the machine only the port that it is plugged into distinguishes it from another disk";
    let finding =
        if is_cached { Finding::warning(check, found, why) } else { Finding::note(check, found, why) };
    let fix = if name.starts_with("vd") {
        "give it a serial number in the virtual machine's configuration (QEMU: -device virtio-blk-pci,serial=NAME)"
    } else {
        "cache a partition with a UUID (GPT) or a logical volume on it instead"
    };
    Some(finding.of(node(name)).fix(fix))
}

/// Disks that are reached by several names.
fn two_paths(machine: &Machine, cached: &BTreeSet<String>, findings: &mut Vec<Finding>) {
    let mut disks: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in machine.names("/sys/class/block") {
        let wwid =
            ["wwid", "device/wwid"].iter().find_map(|file| machine.line(&format!("{}/{file}", place(&name))));
        if let Some(wwid) = wwid.filter(|_| !is_partition(machine, &name)) {
            disks.entry(wwid).or_default().push(name);
        }
    }
    for (wwid, names) in disks.into_iter().filter(|(_, names)| names.len() > 1) {
        let nodes: Vec<String> = names.iter().map(|name| node(name)).collect();
        let holders = names.iter().flat_map(|name| machine.names(&format!("{}/holders", place(name))));
        let is_multipath = |holder: String| {
            let uuid = machine.line(&format!("{}/dm/uuid", place(&holder)));
            uuid.is_some_and(|uuid| uuid.starts_with("mpath-")).then_some(holder)
        };
        let multipath = holders.filter_map(is_multipath).next();
        let found = format!("{} are one disk ({wwid})", nodes.join(", "));
        let why = "a cache over one path serves old data to whoever writes by another one";
        let finding = match &multipath {
            _ if names.iter().any(|name| cached.contains(name)) => {
                Finding::warning("disks.two-paths", format!("{found}, and one of these paths is cached"), why)
                    .fix("cache the device of multipath (/dev/mapper/NAME) instead")
            }
            Some(device) => {
                Finding::ok("disks.two-paths", format!("{found}, used by multipath as {}", node(device)))
            }
            None => Finding::note("disks.two-paths", found, why)
                .fix("mpathconf --enable; then cache /dev/mapper/NAME"),
        };
        findings.push(finding);
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Verdict;
    use super::super::look::Disk;
    use super::super::machine::made::Made;
    use super::super::signature::{self, made::caches};
    use super::*;

    fn of(
        files: &[(&str, &str)],
        looks: &[(&str, Look<Disk>)],
        cached: &[&str],
    ) -> (Vec<Finding>, Vec<String>) {
        let (mut findings, mut unseen) = (Vec::new(), Vec::new());
        let looks = looks.iter().map(|(name, look)| ((*name).to_owned(), look.clone())).collect();
        let cached = cached.iter().map(|&name| name.to_owned()).collect();
        check(&Made::with(files).machine(), &looks, &cached, &mut findings, &mut unseen);
        (findings, unseen)
    }

    fn with(signatures: &[u8]) -> Look<Disk> {
        Look::Seen(Disk { signatures: signature::recognise(signatures), ..Disk::default() })
    }

    #[test]
    fn what_other_caches_left_is_found_with_the_command_that_writes_it_back() {
        let commands = [
            ("bcache-cache", "detach"),
            ("bcache-backing", "/sys/fs/bcache/register"),
            ("dm-writecache", "--splitcache"),
            ("dm-cache", "--uncache"),
            ("dm-pcache", "rescue --from dm-pcache /dev/sdb"),
            ("open-cas", "casadm --load-cache --cache-device /dev/sdb"),
        ];
        for ((what, bytes), (name, command)) in caches().into_iter().zip(commands) {
            assert_eq!(what, name);
            let (findings, _) = of(&[], &[("sdb", with(&bytes))], &[]);
            assert_eq!((findings[0].check, findings[0].verdict), ("disks.other-cache", Verdict::Warning));
            assert!(findings[0].fix[0].contains(command), "{findings:?}");
        }
        let (findings, unseen) = of(&[], &[("sdb", with(&[0; 8192]))], &[]);
        assert_eq!((findings[0].check, findings[0].verdict, findings.len()), ("disks", Verdict::Ok, 1));
        assert!(unseen.is_empty());
    }

    #[test]
    fn caches_that_are_active_are_known_by_the_kernel() {
        let place = "/sys/class/block/dm-1/dm";
        for (uuid, name, expected) in [
            ("LVM-abc-cdata", "vg-pool_cdata", 1),
            ("LVM-abc-cvol", "vg-cache_cvol", 1),
            ("LVM-abc-real", "vg-lv_corig", 1),
            ("LVM-abc", "vg-lv", 0),
            ("CRYPT-abc-cdata", "x", 0),
        ] {
            let files = [(&*format!("{place}/uuid"), uuid), (&*format!("{place}/name"), name)];
            assert_eq!(of(&files, &[], &[]).0.len(), expected, "{uuid} {name}");
        }
        let bcache = caches().swap_remove(1).1;
        let (findings, _) =
            of(&[("/sys/class/block/sdb/bcache/state", "dirty")], &[("sdb", with(&bcache))], &[]);
        assert!(findings[0].found.contains("in use") && findings[0].fix.len() == 1, "{findings:?}");
    }

    #[test]
    fn a_disk_without_an_identity_is_a_warning_once_it_is_cached() {
        let weak = Look::Seen(Disk { is_weak: true, ..Disk::default() });
        let strong = Look::Seen(Disk::default());
        let verdict = |files: &[(&str, &str)], look: &Look<Disk>, cached: &[&str]| {
            let (findings, _) = of(files, &[("vdb", look.clone())], cached);
            findings
                .into_iter()
                .find(|finding| finding.check == "disks.identity")
                .map(|finding| finding.verdict)
        };
        assert_eq!(verdict(&[], &weak, &[]), Some(Verdict::Note));
        assert_eq!(verdict(&[], &weak, &["vdb"]), Some(Verdict::Warning));
        assert_eq!(verdict(&[], &strong, &["vdb"]), None);
        assert_eq!(verdict(&[("/sys/class/block/vdb/loop/backing_file", "/f")], &weak, &["vdb"]), None);
        assert_eq!(verdict(&[("/sys/class/block/vdb/partition", "1")], &weak, &[]), None);
        assert_eq!(
            verdict(&[("/sys/class/block/vdb/partition", "1")], &weak, &["vdb"]),
            Some(Verdict::Warning)
        );
    }

    #[test]
    fn one_disk_with_two_paths_is_found() {
        let wwid = |name: &str| format!("/sys/class/block/{name}/device/wwid");
        let (one, two, other) = (wwid("sda"), wwid("sdb"), wwid("sdc"));
        let same = [(&*one, "naa.5"), (&*two, "naa.5"), (&*other, "naa.6")];
        let verdicts = |files: &[(&str, &str)], cached: &[&str]| {
            let (findings, _) = of(files, &[], cached);
            findings.into_iter().map(|finding| finding.verdict).collect::<Vec<_>>()
        };
        assert_eq!(verdicts(&same, &[]), [Verdict::Note]);
        assert_eq!(verdicts(&same, &["sda"]), [Verdict::Warning]);
        assert_eq!(verdicts(&same[1..], &[]), []);
        let multipath =
            [("/sys/class/block/sda/holders/dm-0", "/"), ("/sys/class/block/dm-0/dm/uuid", "mpath-3600")];
        assert_eq!(verdicts(&[&same[..], &multipath[..]].concat(), &[]), [Verdict::Ok]);
    }

    #[test]
    fn what_was_not_seen_is_said() {
        let looks = [
            ("sda", Look::NotPermitted),
            ("sdb", Look::Silent),
            ("sdc", Look::NotTried),
            ("sdd", Look::Failed("no medium".to_owned())),
        ];
        let (findings, unseen) = of(&[], &looks, &[]);
        assert_eq!((findings.len(), findings[0].check), (1, "disks.silent"));
        assert_eq!(unseen.len(), 3);
        assert!(
            unseen[0].contains("/dev/sda")
                && unseen[1].contains("/dev/sdc")
                && unseen[2].contains("no medium")
        );
    }

    #[test]
    fn devices_that_a_program_serves_are_not_read() {
        let made = Made::with(&[
            ("/sys/class/block/sda/size", "8"),
            ("/sys/class/block/sdb/size", "0"),
            ("/sys/class/block/ublkb0/size", "8"),
            ("/sys/class/block/ram0/size", "8"),
            ("/sys/class/block/loop0/size", "8"),
            ("/sys/class/block/loop0/loop/backing_file", "/run/cbd/fuse/cbd0/cbd0"),
            ("/sys/class/block/loop1/size", "8"),
            ("/sys/class/block/loop1/loop/backing_file", "/run/image"),
            (
                "/proc/self/mountinfo",
                "1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / /run/cbd/fuse/cbd0 rw - fuse.cbd cbd rw\n",
            ),
        ]);
        assert_eq!(to_read(&made.machine()), ["loop1", "sda"]);
    }
}
