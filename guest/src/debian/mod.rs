//! A Debian with systemd on a disk: for jobs about packages, units, rules of udev and the initramfs.
//!
//! Invariants: it is made of Debian's packages, fetched and verified by apt with this machine's settings, once
//! for each release and kernel, and kept in the cache; a job changes a copy. Nothing of CBD is in it.
//!
//! Elsewhere: QEMU and the kernel (`store`), the devices of a guest (`machine`).

use crate::guest::Host;
use crate::machine::Paths;
use crate::packages;
use crate::plan::{Plan, System};
use crate::programs;
use crate::shell::{self, Stream};
use crate::store::{self, Store};
use crate::{image, workspace};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The packages beside the smallest Debian.
const PACKAGES: &str =
    "systemd-sysv,udev,dbus,libpam-systemd,kmod,initramfs-tools,zstd,e2fsprogs,lvm2,mdadm,ndctl,fio";
/// Makes it a guest.
const BASE: &str = include_str!("base.sh");
/// Runs the job of a boot.
const JOB: &str = include_str!("job.sh");
/// The release for a machine that does not run Debian.
const RELEASE: &str = "bookworm";
/// The size of its root, of which a third is used.
const SIZE: &str = "2G";
/// Written last; all that it is made of.
const STAMP: &str = "made-of";
/// Ten times what it takes on two idle processors, packages not yet fetched.
const LIMIT: Duration = Duration::from_secs(900);

/// A fresh Debian: a copy of that in the cache, which is made first if it is not there.
///
/// # Errors
/// Why it cannot be made.
pub fn fresh(host: &Host, folder: &Path) -> Result<System, String> {
    let store = host.store();
    let _lock = store::lock(store.cache())?;
    let kept = store.cache().join("debian");
    let release = store::codename().unwrap_or_else(|| RELEASE.to_owned());
    let made_of = [&release, store.kernel_release(), PACKAGES, BASE, JOB, SIZE].join("\n");
    if fs::read_to_string(kept.join(STAMP)).ok().as_deref() != Some(&made_of) {
        let new = store.cache().join("debian.new");
        store::remove(&new)?;
        store::make(&new)?;
        make(store, &release, &new)?;
        write(&new.join(STAMP), &made_of)?;
        store::remove(&kept)?;
        fs::rename(&new, &kept).map_err(|error| format!("cannot make {}: {error}", kept.display()))?;
    }
    at(&kept).copy(folder)
}

/// The files of a system in a folder.
fn at(folder: &Path) -> System {
    System { disk: folder.join("root"), initramfs: folder.join("initramfs") }
}

impl System {
    /// A copy in another folder.
    ///
    /// # Errors
    /// What cannot be copied.
    pub fn copy(&self, folder: &Path) -> Result<Self, String> {
        store::make(folder)?;
        let copy = at(folder);
        copy_sparse(&self.disk, &copy.disk)?;
        copy_sparse(&self.initramfs, &copy.initramfs)?;
        Ok(copy)
    }
}

/// Copies a file; blocks of zeroes take no space.
///
/// # Errors
/// The message of cp.
pub fn copy_sparse(from: &Path, to: &Path) -> Result<(), String> {
    run(Command::new("cp").args(["--reflink=auto", "--sparse=always", "--"]).arg(from).arg(to))
}

/// Makes the root and its initramfs in a folder.
fn make(store: &Store, release: &str, folder: &Path) -> Result<(), String> {
    if !workspace::is_root() {
        return Err("a Debian with its users' files can be made by root alone".to_owned());
    }
    packages::install_programs(&["mmdebstrap", "mke2fs"])?;
    eprintln!("    making a Debian {release} in {}", folder.display());
    let (hook, job) = (folder.join("base.sh"), folder.join("job.sh"));
    write(&hook, BASE)?;
    write(&job, JOB)?;
    let (system, tree) = (at(folder), folder.join("tree"));
    let mut bootstrap = Command::new("mmdebstrap");
    bootstrap
        .args(["--mode=root", "--variant=minbase", "--format=directory"])
        .arg(format!("--include={PACKAGES}"))
        .args(store::apt_settings()?.iter().map(|setting| format!("--aptopt={setting}")))
        .arg(format!("--customize-hook=sh {} \"$1\"", image::quoted(&hook.to_string_lossy())))
        .arg(release)
        .arg(&tree)
        .arg(store::source(release)?)
        .env("GUEST_KERNEL", store.kernel_release())
        .env("GUEST_MODULES", store.modules())
        .env("GUEST_JOB", &job)
        .env("GUEST_INITRAMFS", &system.initramfs)
        .env("LC_ALL", "C.UTF-8")
        .env_remove("TMPDIR");
    run(&mut bootstrap)?;
    let mke2fs = programs::find("mke2fs")?;
    run(Command::new(mke2fs)
        .args(["-q", "-t", "ext4", "-L", "root", "-d"])
        .arg(&tree)
        .arg(&system.disk)
        .arg(SIZE))?;
    store::remove(&tree)
}

/// Writes the disk from which a guest takes its job and the files that are shipped: an archive.
///
/// # Errors
/// What cannot be read or written.
pub fn write_job(plan: &Plan, paths: &Paths) -> Result<(), String> {
    let tree = paths.folder().join("job");
    store::make(&tree)?;
    let script = tree.join("job");
    write(&script, &image::job(&plan.command))?;
    run(Command::new("chmod").arg("755").arg(&script))?;
    for file in &plan.files {
        let place = tree.join(file.to.strip_prefix("/").unwrap_or(&file.to));
        if let Some(parent) = place.parent() {
            store::make(parent)?;
        }
        fs::copy(&file.from, &place)
            .map_err(|error| format!("cannot copy {}: {error}", file.from.display()))?;
    }
    // The folders of the archive are the guest's own: their owners and modes stay.
    run(Command::new("tar")
        .args(["-c", "--owner=root", "--group=root", "--no-recursion", "-f"])
        .arg(paths.image())
        .arg("-C")
        .arg(&tree)
        .arg("job")
        .args(plan.files.iter().map(|file| file.to.strip_prefix("/").unwrap_or(&file.to))))
}

/// The folder with the packages of this project, which are built once for all jobs of a host.
///
/// # Errors
/// Why they cannot be built.
pub fn packages_of_cbd(host: &Host) -> Result<PathBuf, String> {
    let output = host.folder().join("packages");
    if output.is_dir() {
        return Ok(output);
    }
    packages::install_programs(&["dpkg-buildpackage", "dh"])?;
    let this = std::env::current_exe().map_err(|error| format!("where is this program? {error}"))?;
    // Half of the time goes into packages with debug information, which no guest needs.
    run(Command::new(this)
        .args(["package", "--output"])
        .arg(&output)
        .env("DEB_BUILD_OPTIONS", "noautodbgsym"))?;
    Ok(output)
}

/// Runs a program, whose last lines are the error if it fails.
///
/// # Errors
/// How it ended.
pub fn run(command: &mut Command) -> Result<(), String> {
    let mut said = Vec::new();
    let end = shell::run(command, LIMIT, |_: Stream, line| said.push(line.to_owned()));
    if end.is_success() {
        return Ok(());
    }
    let last: Vec<_> = said.iter().rev().take(20).rev().map(|line| format!("\n    {line}")).collect();
    Err(format!("{}: {end}{}", command.get_program().display(), last.concat()))
}

fn write(file: &Path, text: &str) -> Result<(), String> {
    fs::write(file, text).map_err(|error| format!("cannot write {}: {error}", file.display()))
}
