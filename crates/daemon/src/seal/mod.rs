//! The disk below a cache: rules of udev that keep other programs off it while newer data is in the region, and the
//! record by which a disk that was written without its cache is noticed.
//!
//! Invariants: nothing is written to the disk. A rule is durable before the cache of its disk is opened, and is gone when
//! the backend has no cache any more. A rule that cannot be written is a warning, never a reason not to serve.
//!
//! Elsewhere: what udev recognizes a disk by, and what a disk shows of writes (`cbd-backing`).

pub mod initramfs;
pub mod look;
pub mod record;
pub mod rules;
pub mod udev;

use cbd_backing::BackingFile;
use look::Known;
use rules::{Rule, Subject};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// The rules of one daemon.
#[derive(Debug)]
pub struct Seals {
    /// The folder of the rules; none if this daemon is no part of the system's devices.
    folder: Option<PathBuf>,
    /// Whether disks are sealed; otherwise the rules of this daemon's backends are removed.
    is_enabled: bool,
    state_dir: PathBuf,
    /// Whether the initramfs is older than a rule, at the last look.
    is_initramfs_old: AtomicBool,
    initramfs: OnceLock<Option<PathBuf>>,
}

impl Seals {
    /// The rules in `folder` of the daemon with this state folder.
    #[must_use]
    pub fn new(folder: Option<&Path>, is_enabled: bool, state_dir: &Path) -> Self {
        Self {
            folder: folder.map(Path::to_owned),
            is_enabled,
            state_dir: state_dir.to_owned(),
            is_initramfs_old: AtomicBool::new(false),
            initramfs: OnceLock::new(),
        }
    }

    /// Seals an open disk; returns warnings. A disk that is sealed already stays as it is. Of a file, there is nothing to
    /// seal.
    pub(crate) fn seal(&self, file: &BackingFile, subject: Subject) -> Vec<String> {
        let Some(folder) = &self.folder else { return Vec::new() };
        if !self.is_enabled {
            self.unseal(&subject.backend);
            return Vec::new();
        }
        let Some(lasting) = file.lasting() else { return Vec::new() };
        // Without udev there is nothing that could act on the disk.
        let is_there = folder.parent().is_some_and(Path::exists);
        if !is_there {
            return Vec::new();
        }
        let subject = Subject { state_dir: self.state_dir.display().to_string(), ..subject };
        let not_sealed = |why: &str| {
            vec![format!(
                "{} is not sealed: {why}; while no daemon serves it, nothing keeps file systems, LVM and others off it",
                subject.disk
            )]
        };
        let Some(rule) = Rule::of(subject.clone(), &lasting) else {
            return not_sealed("nothing distinguishes it from another disk after a restart of the machine");
        };
        match rule.write(folder) {
            Ok(true) => {
                let file = rules::file_of(folder, &subject.backend);
                tracing::info!("{} is sealed: {}", subject.disk, file.display());
                udev::apply_soon(folder, &lasting.folder);
                self.look_at_initramfs();
            }
            Ok(false) => {}
            Err(error) => return not_sealed(&format!("its rule of udev cannot be written: {error}")),
        }
        rules::unstable_link(&subject.disk).into_iter().collect()
    }

    /// Removes the rule of the backend `uuid`, if there is one, and lets udev look at the disk again.
    pub(crate) fn unseal(&self, uuid: &str) {
        let Some(folder) = &self.folder else { return };
        let disk = rules::read(&rules::file_of(folder, uuid)).map(|subject| subject.disk);
        match rules::remove(folder, uuid) {
            Ok(true) => {
                let disk = disk.unwrap_or_default();
                tracing::info!("{disk} is no longer sealed");
                if let Some(folder_of_disk) = udev::folder_of(&disk) {
                    udev::apply_soon(folder, &folder_of_disk);
                }
            }
            Ok(false) => {}
            Err(error) => tracing::error!(
                "the rule {} cannot be removed, so udev keeps the disk out of reach: {error}; remove it by hand, and run \
                 udevadm control --reload and udevadm trigger",
                rules::file_of(folder, uuid).display()
            ),
        }
        let _ = std::fs::remove_file(rules::marker_of(folder, uuid));
    }

    /// What is known of the disk of this backend.
    pub(crate) fn known(&self, uuid: &str) -> Known {
        Known::of(&self.state_dir, self.folder.as_deref(), uuid)
    }

    /// Forgets that a user has unsealed the disk: that is recorded elsewhere now.
    pub(crate) fn forget_unsealed(&self, uuid: &str) {
        if let Some(folder) = &self.folder {
            let _ = std::fs::remove_file(rules::marker_of(folder, uuid));
        }
    }

    /// Removes rules of this daemon for backends of the transport `transport` that are not among `backends`: a crash
    /// between the removal of a backend and that of its rule leaves one.
    pub(crate) fn sweep(&self, transport: &str, backends: &[String]) {
        let Some(folder) = &self.folder else { return };
        let state_dir = self.state_dir.display().to_string();
        for subject in rules::all(folder) {
            let is_ours = subject.state_dir == state_dir && subject.transport == transport;
            if is_ours && !backends.contains(&subject.backend) {
                self.unseal(&subject.backend);
            }
        }
    }

    /// Compares the times of the rules and of the running kernel's initramfs.
    pub(crate) fn look_at_initramfs(&self) {
        let Some(folder) = self.folder.as_ref().filter(|folder| udev::is_read(folder)) else { return };
        let image = self.initramfs.get_or_init(|| initramfs::of_running_kernel(Path::new("/boot")));
        let is_old = image.as_ref().is_some_and(|image| initramfs::is_older(image, &rules::files(folder)));
        self.is_initramfs_old.store(is_old, Ordering::Relaxed);
    }

    /// A warning if the initramfs lacks a rule.
    pub(crate) fn warning(&self) -> Option<String> {
        let image = self.initramfs.get()?.as_ref()?;
        self.is_initramfs_old.load(Ordering::Relaxed).then(|| {
            format!(
                "{} is older than the rules that seal cached disks: until it is made again (update-initramfs -u, or dracut --force), \
                 programs in it can take such a disk at the next boot",
                image.display()
            )
        })
    }
}
