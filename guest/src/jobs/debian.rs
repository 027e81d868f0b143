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
    echo '/dev/pmem0 /mnt/pmem ext4 dax,nofail,x-systemd.before=cbdd.service,x-systemd.device-timeout=10 0 0' >>/etc/fstab
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
    let entries = fs::read_dir(&folder).map_err(|error| format!("cannot read {}: {error}", folder.display()))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    let is_it = |path: &PathBuf| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&begin));
    paths.find(is_it).ok_or_else(|| format!("there is no package {name} in {}", folder.display()))
}

/// A fresh Debian with an NVDIMM and some disks, and a script that runs there when its services have started.
///
/// # Errors
/// What cannot be made.
pub fn machine(host: &Host, given: &Given, disks: usize, script: &str) -> Result<Plan, String> {
    let disks = (0..disks).map(|number| new_disk(&given.folder.join(format!("disk{number}"))));
    Ok(Plan {
        nvdimm: Some(SharedFile { path: given.folder.join("nvdimm"), size: 512 * MIB }),
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

/// The package starts its daemon, lets members of its group control it and nobody else, brings its documents, and keeps a disk off
/// limits from the initramfs on.
pub fn install(host: &Host, given: &Given) -> Result<(), String> {
    let script = format!(
        "{INSTALL}
        echo unit $(systemctl is-enabled cbdd) $(systemctl is-active cbdd) $(systemctl show -P StatusText cbdd)
        echo socket $(stat -c '%A %U %G' /run/cbd/control.sock)
        useradd --groups cbd member
        useradd stranger
        runuser -u member -- cbdctrl tp-list && echo a member may
        runuser -u stranger -- cbdctrl tp-list 2>&1 || echo a stranger may not
        cbdctrl doctor || echo doctor $?
        for file in man/man1/cbdctrl.1.gz man/man8/cbdd.8.gz bash-completion/completions/cbdctrl \\
            zsh/vendor-completions/_cbdctrl fish/vendor_completions.d/cbdctrl.fish; do
            test -s /usr/share/$file || echo there is no $file
        done
        {REGION}
        cbdctrl backend-start --path /dev/disk/by-id/virtio-disk0 --cache-size 64M --start-dev
        udevadm settle
        ls -l /etc/udev/rules.d
        cbdctrl status
        lsblk -o NAME,FSTYPE,MODEL
        cbdctrl doctor || echo doctor $?
        update-initramfs -u
        lsinitramfs /boot/initrd.img-$(uname -r) | grep cbd
        cbdctrl status
        systemctl --failed
        "
    );
    let ran = Ran::of(host, &machine(host, given, 1, &script)?, None)?;
    println!("{}", ran.complaint("all"));
    ran.expect(Ended::Exited(0), &["unit enabled active"])
}
