//! File systems, a volume of LVM and an array of md on cached disks of a Debian: a power cut leaves newer data in the region than
//! on the disks below, which nothing may take then.
//!
//! Invariants: before the cut all disks were written back and writeback is paused since, so each disk has a whole file system with
//! old content, and the region has the new content. No boot afterwards may write one byte to a disk, except where a job ends the
//! caches, or shows what happens without the seal.
//!
//! Elsewhere: which rules the seal writes, and for which disks (`cbd-daemon`).

use super::debian::{INSTALL, REGION, machine};
use super::{Ended, Given, Host, Ran};
use crate::debian::copy_sparse;
use crate::plan::{Disk, Plan, SharedFile, System};
use crate::store;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The disks: of a file system, of a volume, and two of an array.
const DISKS: usize = 4;

/// The mounts, which the machine makes itself at each boot.
const FSTAB: &str = "
    options=_netdev,nofail,x-systemd.after=cbdd.service,x-systemd.device-timeout=600
    mkdir -p /srv/plain /srv/volume /srv/array
    echo \"UUID=$(blkid -o value -s UUID /dev/cbd0) /srv/plain ext4 $options 0 0
        /dev/group/volume /srv/volume ext4 $options 0 0
        UUID=$(blkid -o value -s UUID /dev/md0) /srv/array ext4 $options 0 0\" >>/etc/fstab
    systemctl daemon-reload
";

/// Lines about each mount: the kinds of devices below it, and what is in its files.
const LOOK: &str = "
    # Mounts with nofail may come after everything else; each has a time limit.
    systemctl is-system-running --wait >/dev/null || true
    for name in plain volume array; do
        source=$(findmnt --noheadings --output SOURCE /srv/$name || echo none)
        below=$(lsblk --inverse --list --noheadings --output NAME $source 2>/dev/null | tr -d '[0-9]' | sort -u)
        echo below $name: $below
        echo checksum $name: $(cd /srv/$name && find . -type f | sort | xargs cat 2>/dev/null | md5sum)
        echo content $name: $(cat /srv/$name/content 2>/dev/null)
    done
    for number in 0 1 2 3; do
        disk=$(basename $(readlink -f /dev/disk/by-id/virtio-disk$number))
        echo written $number: $(awk '{ print $7 }' /sys/block/$disk/stat) sectors
    done
";

/// What that prints when everything is on the cached devices, and when no disk was written.
const CACHED: [&str; 3] =
    ["below plain: ublkb\n", "below volume: group-volume ublkb\n", "below array: md ublkb\n"];
const UNTOUCHED: [&str; 4] = ["written 0: 0 ", "written 1: 0 ", "written 2: 0 ", "written 3: 0 "];

/// The longest that the machine may take to shut down. A device in use whose daemon has ended delays it by minutes.
const SHUTDOWN: Duration = Duration::from_secs(90);

/// The state of a machine whose power was cut.
struct Machine {
    folder: PathBuf,
    /// With an initramfs that has the seal.
    system: System,
    /// An initramfs from before the installation.
    unsealed: PathBuf,
    /// The lines about the content of its files.
    checksums: Vec<String>,
}

impl Machine {
    fn disk(folder: &Path, number: usize) -> PathBuf {
        folder.join(format!("disk{number}"))
    }

    /// A copy of the machine after its power was cut, which happens once for all jobs of a host.
    fn cut(host: &Host, given: &Given) -> Result<Self, String> {
        let kept = host.folder().join("sealed");
        if !kept.join("checksums").exists() {
            store::remove(&kept)?;
            store::make(&kept)?;
            set_up(host, &Given { folder: kept.clone(), cuts: given.cuts })?;
        }
        let folder = given.folder.clone();
        for name in (0..DISKS).map(|number| format!("disk{number}")).chain(["nvdimm".to_owned()]) {
            copy_sparse(&kept.join(&name), &folder.join(&name))?;
        }
        let initramfs = kept.join("out/initramfs");
        let system = System { disk: kept.join("system/root"), initramfs }.copy(&folder)?;
        let file = kept.join("checksums");
        let text =
            fs::read_to_string(&file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
        let checksums = text.lines().map(|line| format!("{line}\n")).collect();
        Ok(Self { system, unsealed: kept.join("system/initramfs"), checksums, folder })
    }

    /// A boot of it.
    fn plan(&self, script: &str) -> Plan {
        Plan {
            nvdimm: Some(SharedFile { path: self.folder.join("nvdimm"), size: super::debian::NVDIMM }),
            disks: (0..DISKS).map(|number| Disk::File(Self::disk(&self.folder, number))).collect(),
            system: Some(self.system.clone()),
            timeout: super::debian::LIMIT,
            ..Plan::of_script(script)
        }
    }

    /// The numbers of the disks that are not as the power cut left them.
    fn changed(&self, host: &Host) -> Result<Vec<usize>, String> {
        let kept = host.folder().join("sealed");
        let mut changed = Vec::new();
        for number in 0..DISKS {
            if !is_same(&Self::disk(&kept, number), &Self::disk(&self.folder, number))? {
                changed.push(number);
            }
        }
        Ok(changed)
    }

    /// Checks that the disks are as the power cut left them.
    fn expect_unchanged(&self, host: &Host, ran: &Ran) -> Result<(), String> {
        let changed = self.changed(host)?;
        if changed.is_empty() {
            Ok(())
        } else {
            Err(ran.complaint(&format!("the disks {changed:?} were written")))
        }
    }
}

/// Installs the package, makes everything, and cuts the power when the region has newer data than each disk.
fn set_up(host: &Host, given: &Given) -> Result<(), String> {
    let script = format!(
        "{INSTALL}
        {REGION}
        for number in 0 1 2 3; do
            cbdctrl backend-start --path /dev/disk/by-id/virtio-disk$number --cache-size 48M --start-dev
        done
        mkfs.ext4 -q /dev/cbd0
        # Once LVM's label is written back, its commands find the volume on the disk, too, and change nothing (docs/operations.md).
        cbdctrl set --backend 1 writeback=paused:1d
        vgcreate -q group /dev/cbd1
        lvcreate -q --name volume --extents 100%FREE group
        cbdctrl set --backend 1 writeback=on
        mkfs.ext4 -q /dev/group/volume
        mdadm --create /dev/md0 --quiet --run --level=1 --raid-devices=2 --assume-clean --bitmap=none /dev/cbd2 /dev/cbd3
        mdadm --detail --scan >>/etc/mdadm/mdadm.conf
        mkfs.ext4 -q /dev/md0
        {FSTAB}
        for name in plain volume array; do
            mount /srv/$name
            echo old >/srv/$name/content
        done
        # Before the system starts, these remove the seal, and wait no longer for devices that will not come.
        echo 'rm -f /etc/udev/rules.d/*cbd-sealed*; exec /sbin/init' >/srv/without-seal
        echo 'sed -i s/device-timeout=600/device-timeout=60/ /etc/fstab; exec /sbin/init' >/srv/without-region
        sed -i '1i #!/bin/sh' /srv/without-seal /srv/without-region
        chmod 755 /srv/without-seal /srv/without-region
        update-initramfs -u
        cp /boot/initrd.img-$(uname -r) /out/initramfs
        sync
        cbdctrl drain
        for number in 0 1 2 3; do cbdctrl set --backend $number writeback=paused:1d; done
        for name in plain volume array; do
            echo new >/srv/$name/content
            head -c 4M /dev/urandom >/srv/$name/data
        done
        sync
        {LOOK}
        echo dirty: $(cbdctrl status | grep -c '^ *dirty  *[1-9]')
        tar -c -f /dev/virtio-ports/files -C /out .
        echo now
        sleep 1000"
    );
    let plan = Plan { out: Some(given.folder.join("out")), ..machine(host, given, DISKS, &script)? };
    let ran = Ran::of(host, &plan, Some("now"))?;
    ran.expect(
        Ended::Cut,
        &[
            "below plain: ublkb\n",
            "below volume: group-volume ublkb\n",
            "below array: md ublkb\n",
            "content plain: new\n",
            "content volume: new\n",
            "content array: new\n",
            "dirty: 4\n",
        ],
    )?;
    let checksums: Vec<_> = ran.output.lines().filter(|line| line.starts_with("checksum ")).collect();
    let file = given.folder.join("checksums");
    fs::write(&file, checksums.join("\n"))
        .map_err(|error| format!("cannot write {}: {error}", file.display()))
}

/// The machine comes back with its mounts on the cached devices, and nothing touches a disk. After another power cut, the same.
/// Then the caches are ended, and the disks alone are mounted with the same content.
pub fn comes_back(host: &Host, given: &Given) -> Result<(), String> {
    let machine = Machine::cut(host, given)?;
    let checksums: Vec<_> = machine.checksums.iter().map(String::as_str).collect();
    let ran = Ran::of(host, &machine.plan(&format!("{LOOK}\necho now; sleep 1000")), Some("now"))?;
    for parts in [&CACHED[..], &checksums, &UNTOUCHED] {
        ran.expect(Ended::Cut, parts)?;
    }
    machine.expect_unchanged(host, &ran)?;
    let script = format!(
        "{LOOK}
        for number in 0 1 2 3; do cbdctrl set --backend $number writeback=on; done
        umount /srv/plain /srv/volume /srv/array
        vgchange -q -an group
        mdadm --quiet --stop /dev/md0
        for number in 0 1 2 3; do cbdctrl backend-stop --backend $number; done
        udevadm settle
        # LVM activates a group by itself once in a boot.
        vgchange -q -ay group
        echo ended
        for name in plain volume array; do
            for each in $(seq 60); do mount /srv/$name 2>/dev/null && break; sleep 0.5; done
        done
        {LOOK}"
    );
    let ran = Ran::of(host, &machine.plan(&script), None)?;
    for parts in [&CACHED[..], &checksums, &UNTOUCHED] {
        ran.expect(Ended::Exited(0), parts)?;
    }
    let Some((_, after)) = ran.output.split_once("ended\n") else {
        return Err(ran.complaint("the caches were not ended"));
    };
    let plain = ["below plain: vda\n", "below volume: group-volume vdb\n", "below array: md vdc vdd\n"];
    match plain.iter().chain(&checksums).find(|part| !after.contains(**part)) {
        Some(part) => Err(ran.complaint(&format!("it did not print '{part}' behind 'ended'"))),
        None => Ok(()),
    }
}

/// The machine shuts down in time while everything is mounted, and comes back with all that was written; the daemon has found the
/// disks as it left them.
pub fn shuts_down(host: &Host, given: &Given) -> Result<(), String> {
    let machine = Machine::cut(host, given)?;
    let script = format!(
        "systemctl is-system-running --wait >/dev/null || true
        for name in plain volume array; do
            echo newest >/srv/$name/content
            head -c 2M /dev/urandom >/srv/$name/more
        done
        {LOOK}
        touch /run/guest-shuts-down"
    );
    let before = Ran::of(host, &machine.plan(&script), None)?;
    before.expect(Ended::Exited(0), &CACHED)?;
    before.expect(Ended::Exited(0), &UNTOUCHED)?;
    let took = before.after_its_job();
    println!("    the machine shut down in {:.0} s", took.as_secs_f64());
    if took > SHUTDOWN {
        return Err(before.complaint(&format!("it shut down in {} s", took.as_secs())));
    }
    let script = format!("{LOOK}\necho flaws: $(cbdctrl status | grep -c -e ERROR -e UNCHECKED)");
    let ran = Ran::of(host, &machine.plan(&script), None)?;
    let checksums: Vec<_> = before.output.lines().filter(|line| line.starts_with("checksum ")).collect();
    for parts in [&CACHED[..], &checksums, &UNTOUCHED, &["content array: newest\n", "flaws: 0\n"]] {
        ran.expect(Ended::Exited(0), parts)?;
    }
    machine.expect_unchanged(host, &ran)
}

/// Without its region the machine starts, too; then nothing is mounted, activated or assembled, and nothing touches a disk.
pub fn without_its_region(host: &Host, given: &Given) -> Result<(), String> {
    let machine = Machine::cut(host, given)?;
    let script = format!(
        "udevadm settle
        {LOOK}
        echo volumes: $(ls /dev/mapper | grep -v control)
        echo arrays: $(grep -c ^md /proc/mdstat)
        cbdctrl status || true"
    );
    let append = vec!["init=/srv/without-region".to_owned()];
    let plan = Plan { nvdimm: None, append, ..machine.plan(&script) };
    let ran = Ran::of(host, &plan, None)?;
    ran.expect(
        Ended::Exited(0),
        &[
            "below plain:\n",
            "below volume:\n",
            "below array:\n",
            "volumes:\n",
            "arrays: 0\n",
            "written 0: 0 ",
            "written 1: 0 ",
            "written 2: 0 ",
            "written 3: 0 ",
        ],
    )?;
    machine.expect_unchanged(host, &ran)
}

/// What the seal is for: without its rules and without the daemon the machine mounts the disks themselves, with their old content,
/// and writes to each.
pub fn without_the_seal(host: &Host, given: &Given) -> Result<(), String> {
    let mut machine = Machine::cut(host, given)?;
    machine.system.initramfs = machine.unsealed.clone();
    let append = ["init=/srv/without-seal", "systemd.mask=cbdd.service"];
    let plan = Plan { append: append.map(str::to_owned).to_vec(), ..machine.plan(LOOK) };
    let ran = Ran::of(host, &plan, None)?;
    ran.expect(
        Ended::Exited(0),
        &[
            "below plain: vda\n",
            "below volume: group-volume vdb\n",
            "below array: md vdc vdd\n",
            "content plain: old\n",
            "content volume: old\n",
            "content array: old\n",
        ],
    )?;
    match machine.changed(host)? {
        changed if changed.len() == DISKS => Ok(()),
        changed => Err(ran.complaint(&format!("only the disks {changed:?} were written"))),
    }
}

/// Whether two files have the same content.
fn is_same(one: &Path, other: &Path) -> Result<bool, String> {
    let open =
        |path: &Path| File::open(path).map_err(|error| format!("cannot open {}: {error}", path.display()));
    let (mut one, mut other) = (open(one)?, open(other)?);
    let (mut bytes, mut others) = (Vec::new(), Vec::new());
    loop {
        for (file, bytes) in [(&mut one, &mut bytes), (&mut other, &mut others)] {
            bytes.clear();
            file.take(1 << 20).read_to_end(bytes).map_err(|error| format!("cannot read a disk: {error}"))?;
        }
        if bytes != others || bytes.is_empty() {
            return Ok(bytes == others);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_the_same_if_each_byte_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        let mut bytes = vec![7; (2 << 20) + 5];
        fs::write(&one, &bytes).expect("a file");
        fs::write(&other, &bytes).expect("a file");
        assert_eq!(is_same(&one, &other), Ok(true));
        bytes[2 << 20] ^= 1;
        fs::write(&other, &bytes).expect("a file");
        assert_eq!(is_same(&one, &other), Ok(false));
        bytes.truncate(1 << 20);
        fs::write(&other, &bytes).expect("a file");
        assert_eq!(is_same(&one, &other), Ok(false));
        assert!(is_same(&one, &folder.path().join("none")).is_err());
    }
}
