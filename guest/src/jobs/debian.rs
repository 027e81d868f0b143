//! Packages on a Debian of their own: what the jobs about them have in common, and the installation.
//!
//! Elsewhere: the Debian itself (`crate::debian`), the same scripts of packages without systemd, many more cases (`cargo xtask
//! package`'s checks).

use super::{Ended, Given, Host, Ran};
use crate::debian::{self, fresh};
use crate::plan::{Disk, MIB, Plan, SharedFile, Shipped};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Ten times what the longest of these guests takes on two idle processors.
pub const LIMIT: Duration = Duration::from_secs(900);

/// The size of the NVDIMM.
pub const NVDIMM: u64 = 512 * MIB;

/// The size of each disk.
pub const DISK: u64 = 256 * MIB;

/// Where the package is in the guest.
pub const PACKAGE: &str = "/srv/cbd.deb";

/// Installs the package; its messages are shown if that fails.
pub const INSTALL: &str = "
    apt-get install --yes /srv/cbd.deb >/tmp/apt.log 2>&1 || { cat /tmp/apt.log; exit 1; }
";

/// A region in the NVDIMM, whose file system is mounted at each boot before the daemon starts.
pub const REGION: &str = "
    ndctl create-namespace -f -e namespace0.0 -m fsdax >/dev/null
    mkfs.ext4 -q -b 4096 /dev/pmem0
    mkdir -p /mnt/pmem
    echo '/dev/pmem0 /mnt/pmem ext4 dax,nofail,x-systemd.before=cbdd.service,x-systemd.device-timeout=600 0 0' >>/etc/fstab
    mount /mnt/pmem
    cbdctrl tp-reg --path /mnt/pmem/region --size 256M --host guest --format
";

/// The package `name` among those that were built.
///
/// # Errors
/// If it is not there.
pub fn package(host: &Host, name: &str) -> Result<PathBuf, String> {
    let folder = debian::packages_of_cbd(host)?;
    let begin = format!("{name}_");
    let entries =
        fs::read_dir(&folder).map_err(|error| format!("cannot read {}: {error}", folder.display()))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    let is_it =
        |path: &PathBuf| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&begin));
    paths.find(is_it).ok_or_else(|| format!("there is no package {name} in {}", folder.display()))
}

/// A fresh Debian with an NVDIMM and some disks, and a script that runs there when its services have started.
///
/// # Errors
/// What cannot be made.
pub fn machine(host: &Host, given: &Given, disks: usize, script: &str) -> Result<Plan, String> {
    let disks = (0..disks).map(|number| new_disk(&given.folder.join(format!("disk{number}"))));
    Ok(Plan {
        nvdimm: Some(SharedFile { path: given.folder.join("nvdimm"), size: NVDIMM }),
        disks: disks.collect::<Result<_, _>>()?,
        system: Some(fresh(host, &given.folder.join("system"))?),
        files: vec![Shipped { from: package(host, "cbd")?, to: PACKAGE.into() }],
        timeout: LIMIT,
        ..Plan::of_script(script)
    })
}

fn new_disk(path: &Path) -> Result<Disk, String> {
    let made = File::create(path).and_then(|file| file.set_len(DISK));
    made.map_err(|error| format!("cannot make {}: {error}", path.display()))?;
    Ok(Disk::File(path.to_owned()))
}

/// The package starts its daemon, lets members of its group control it and no other user, brings its documents, and keeps a disk off
/// limits from the initramfs on.
pub fn install(host: &Host, given: &Given) -> Result<(), String> {
    let script = format!(
        "{INSTALL}
        echo unit $(systemctl is-enabled cbdd) $(systemctl is-active cbdd)
        echo socket $(stat -c '%A %U %G' /run/cbd/control.sock)
        useradd --groups cbd member
        useradd stranger
        runuser -u member -- cbdctrl status >/dev/null && echo a member may
        runuser -u stranger -- cbdctrl --socket /run/cbd/control.sock status >/dev/null 2>&1 || echo a stranger may not
        cbdctrl doctor >/tmp/doctor || true
        cat /tmp/doctor
        grep -q '^0 problems' /tmp/doctor && echo no problem after the installation
        for file in man/man1/cbdctrl.1.gz man/man8/cbdd.8.gz bash-completion/completions/cbdctrl \\
            zsh/vendor-completions/_cbdctrl fish/vendor_completions.d/cbdctrl.fish; do
            test -s /usr/share/$file && echo there is $file
        done
        {REGION}
        cbdctrl backend-start --path /dev/disk/by-id/virtio-disk0 --cache-size 64M --start-dev
        udevadm settle
        echo sealed $(lsblk --nodeps --noheadings --output FSTYPE /dev/disk/by-id/virtio-disk0)
        old='is older than the rules that seal cached disks'
        cbdctrl status | grep -q \"$old\" && echo the initramfs is old
        update-initramfs -u
        lsinitramfs /boot/initrd.img-$(uname -r) >/tmp/initramfs
        for rule in /etc/udev/rules.d/*cbd-sealed*; do
            grep -q \"/$(basename $rule)\\$\" /tmp/initramfs && echo in the initramfs: $(basename $rule | sed 's/-[0-9a-f-]*\\.rules/-UUID.rules/')
        done
        # The daemon looks every few seconds.
        for each in $(seq 60); do
            if ! cbdctrl status | grep -q \"$old\"; then echo the initramfs is new; break; fi
            sleep 0.5
        done
        cbdctrl doctor
        "
    );
    let ran = Ran::of(host, &machine(host, given, 1, &script)?, None)?;
    ran.expect(
        Ended::Exited(0),
        &[
            "unit enabled active\n",
            "socket srw-rw---- root cbd\n",
            "a member may\na stranger may not\n",
            "no problem after the installation\n",
            "there is man/man1/cbdctrl.1.gz\nthere is man/man8/cbdd.8.gz\n",
            "there is bash-completion/completions/cbdctrl\n",
            "there is zsh/vendor-completions/_cbdctrl\nthere is fish/vendor_completions.d/cbdctrl.fish\n",
            "/dev/cbd0\n",
            "sealed cbd_member\n",
            "the initramfs is old\n",
            "in the initramfs: 12-cbd-sealed-UUID.rules\nin the initramfs: 63-zz-cbd-sealed.rules\n",
            "the initramfs is new\n",
            "0 problems, 0 warnings",
        ],
    )
}

/// Under a load that verifies what it writes: an upgrade, refused removals, and the removal after the end of the cache.
pub fn upgrade_and_removal(host: &Host, given: &Given) -> Result<(), String> {
    let script = format!("{INSTALL}\n{REGION}\n{LOADED}\n{UPGRADED}\n{REMOVED}");
    let plan = Plan { out: Some(given.folder.clone()), ..machine(host, given, 1, &script)? };
    let ran = Ran::of(host, &plan, None)?;
    ran.expect(
        Ended::Exited(0),
        &[
            "installed 9.0.0\nanother daemon: active\nthe load goes on\n",
            "in use: the removal is REFUSED for these reasons.\n",
            "in use: no: block device 0 is in use: /dev/cbd0 is mounted at /srv/fs; end that first\n",
            "the load goes on\nthe load has verified everything\n",
            "dirty: the removal is REFUSED for these reasons.\n",
            "dirty: no: backend 0 of transport 0 (/dev/disk/by-id/virtio-disk0) has 4.0 MiB dirty",
            "cbdctrl backend-stop -t 0 -b 0 writes it to the disk\n",
            "daemon: active\n",
            "removed: config-files inactive, 0 devices, 0 rules\n",
            "the disk: ext4\nthe disk has everything\n",
            "purged: none\n",
        ],
    )
}

/// A file system on a device, fio writing to it, and ways to see it.
const LOADED: &str = "
    cbdctrl backend-start --path /dev/disk/by-id/virtio-disk0 --cache-size 48M --start-dev
    mkfs.ext4 -q /dev/cbd0
    mkdir /srv/fs
    mount /dev/cbd0 /srv/fs
    load() {
        round=0
        while [ ! -e /tmp/enough ]; do
            round=$((round + 1))
            fio --name=verify --directory=/srv/fs --size=16M --bsrange=4k-64k --bs_unaligned=0 --rw=randwrite --ioengine=io_uring \\
                --iodepth=8 --direct=1 --verify=crc32c --verify_fatal=1 --verify_state_save=0 --fsync=64 --randseed=$round \\
                >/out/fio 2>&1 || return 1
        done
    }
    load &
    load=$!
    writes() { awk '{ print $5 }' /sys/block/ublkb0/stat; }
    goes_on() {
        enough=$(($(writes) + 500))
        until [ $(writes) -gt $enough ]; do
            kill -0 $load || { cat /out/fio; exit 1; }
            sleep 0.2
        done
    }
    daemon() { systemctl show --property MainPID --value cbdd; }
    goes_on
";

/// The same package with a higher version.
const UPGRADED: &str = "
    dpkg-deb --raw-extract /srv/cbd.deb /tmp/newer
    sed -i 's/^Version: .*/Version: 9.0.0/' /tmp/newer/DEBIAN/control
    dpkg-deb -Znone --build /tmp/newer /srv/newer.deb >/dev/null
    before=$(daemon)
    apt-get install --yes /srv/newer.deb >/tmp/apt.log 2>&1 || { cat /tmp/apt.log; exit 1; }
    dpkg-query --show --showformat '${db:Status-Status} ${Version}\\n' cbd
    test $(daemon) != $before && echo another daemon: $(systemctl is-active cbdd)
    goes_on
    echo the load goes on
";

/// Removals that are refused, and one that is not.
const REMOVED: &str = "
    refused() {
        apt-get remove --yes cbd >/tmp/apt.log 2>&1 && { cat /tmp/apt.log; exit 1; }
        sed -n \"s/^cbd:/$1:/p\" /tmp/apt.log
    }
    before=$(daemon)
    refused 'in use'
    goes_on
    echo the load goes on
    touch /tmp/enough
    wait $load || { cat /out/fio; exit 1; }
    echo the load has verified everything
    test $(daemon) = $before
    cbdctrl drain
    cbdctrl set --backend 0 writeback=paused:1h
    head -c 4M /dev/urandom >/srv/fs/data
    (cd /srv/fs && md5sum verify* data) >/tmp/checksums
    umount /srv/fs
    cbdctrl dev-stop --dev 0
    refused dirty
    echo daemon: $(systemctl is-active cbdd)
    cbdctrl backend-stop --backend 0
    apt-get remove --yes cbd >/tmp/apt.log 2>&1 || { cat /tmp/apt.log; exit 1; }
    echo removed: $(dpkg-query --show --showformat '${db:Status-Status}' cbd) $(systemctl is-active cbdd), \\
        $(ls -d /dev/cbd? /dev/ublkb* 2>/dev/null | wc -l) devices, $(ls /etc/udev/rules.d | grep -c cbd) rules
    udevadm settle
    disk=/dev/disk/by-id/virtio-disk0
    echo the disk: $(lsblk --nodeps --noheadings --output FSTYPE $disk)
    e2fsck -f -n $disk >/dev/null 2>&1
    mount -o ro $disk /srv/fs
    (cd /srv/fs && md5sum --quiet --check /tmp/checksums && test $(wc -l </tmp/checksums) = 2) && echo the disk has everything
    apt-get purge --yes cbd >/tmp/apt.log 2>&1 || { cat /tmp/apt.log; exit 1; }
    echo purged: $(ls -d /etc/cbd /var/lib/cbd 2>/dev/null || echo none)
";
