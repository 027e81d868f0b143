//! The walk from the block devices of the daemon upwards: what stands on them, in the order in which it can be ended.
//!
//! Invariants: only the kernel's own files are read, so no device and no file system is asked, and nothing can wait. What
//! uses an object comes before the object, and each comes once. The file systems at `/` and `/usr` are in no list: they
//! run what is to end them.
//!
//! Elsewhere: ending what was found ([`super::system`]).

use crate::doctor::machine::Machine;
use cbd_sys::DeviceNumber;
use cbd_sys::mounts::Mount;
use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

/// File systems that stay, as they do for systemd.
const STAYS: [&str; 2] = ["/", "/usr"];

/// Something to end.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Holder {
    /// A mount, by its mount point.
    Mount(PathBuf),
    /// Swap space, by its path.
    Swap(String),
    /// A loop device, by the kernel's name.
    Loop(String),
    /// A device of device mapper: its own name, and the kernel's.
    Mapped {
        /// As `dmsetup` knows it.
        name: String,
        /// `dm-0`
        node: String,
    },
    /// An md array, by the kernel's name.
    Array(String),
    /// Another device, by the kernel's name; nothing here can end it.
    Other(String),
}

impl fmt::Display for Holder {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mount(target) => write!(out, "mount {}", target.display()),
            Self::Swap(path) => write!(out, "swap {path}"),
            Self::Loop(name) => write!(out, "loop device {name}"),
            Self::Mapped { name, node } => write!(out, "mapped device {name} ({node})"),
            Self::Array(name) => write!(out, "array {name}"),
            Self::Other(name) => write!(out, "device {name}, of a kind that is not known here"),
        }
    }
}

/// The block devices of the daemon with this run folder, by the kernel's names.
pub fn devices(machine: &Machine, run_dir: &Path) -> Vec<String> {
    let exists = |name: &String| machine.exists(&format!("/sys/class/block/{name}"));
    let ublk = machine.names(&run_dir.join("ublk").display().to_string()).into_iter().filter(exists);
    let fuse = run_dir.join("fuse");
    let loops = loops(machine).into_iter().filter(|(_, file)| file.starts_with(&fuse)).map(|(name, _)| name);
    ublk.chain(loops).collect()
}

/// What stands on `devices`: what uses an object comes before it.
pub fn holders(machine: &Machine, devices: &[String]) -> Vec<Holder> {
    let mounts = machine.mounts();
    let mut walk = Walk {
        machine,
        mounts,
        loops: loops(machine),
        swaps: swaps(machine),
        seen: BTreeSet::new(),
        found: Vec::new(),
    };
    devices.iter().for_each(|device| walk.device(device));
    walk.found
}

/// The loop devices with their files.
fn loops(machine: &Machine) -> Vec<(String, PathBuf)> {
    let names = machine.names("/sys/class/block").into_iter().filter(|name| name.starts_with("loop"));
    names
        .filter_map(|name| {
            let file = machine.line(&format!("/sys/class/block/{name}/loop/backing_file"))?;
            Some((name, PathBuf::from(file)))
        })
        .collect()
}

/// Swap space on devices: the path, and the kernel's name.
fn swaps(machine: &Machine) -> Vec<(String, String)> {
    let text = machine.text("/proc/swaps");
    let paths = text.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    paths.filter_map(|path| Some((path.to_owned(), machine.block_device(path)?))).collect()
}

struct Walk<'a> {
    machine: &'a Machine,
    mounts: Vec<Mount>,
    loops: Vec<(String, PathBuf)>,
    swaps: Vec<(String, String)>,
    seen: BTreeSet<String>,
    found: Vec<Holder>,
}

impl Walk<'_> {
    /// What stands on a device, and on its partitions.
    fn device(&mut self, name: &str) {
        if !self.seen.insert(name.to_owned()) {
            return;
        }
        let folder = format!("/sys/class/block/{name}");
        for part in self.machine.names(&folder) {
            if self.machine.exists(&format!("{folder}/{part}/partition")) {
                self.device(&part);
            }
        }
        for holder in self.machine.names(&format!("{folder}/holders")) {
            self.device(&holder);
            let holder = self.holder(holder);
            self.add(holder);
        }
        let swaps: Vec<_> = self.swaps.iter().filter(|(_, device)| device == name).cloned().collect();
        swaps.into_iter().for_each(|(path, _)| self.add(Holder::Swap(path)));
        self.loops_where(|machine, file| {
            file.to_str().is_some_and(|file| machine.block_device(file).as_deref() == Some(name))
        });
        let number = self.machine.line(&format!("{folder}/dev")).and_then(|text| DeviceNumber::parse(&text));
        let is_on_it = |mount: &Mount| {
            // Some file systems have a number of their own (btrfs).
            let is_source = || {
                let source = mount.source.to_str();
                source.is_some_and(|source| self.machine.block_device(source).as_deref() == Some(name))
            };
            Some(mount.device) == number || (mount.device.major == 0 && is_source())
        };
        let on_it: Vec<u64> =
            self.mounts.iter().filter(|mount| is_on_it(mount)).map(|mount| mount.id).collect();
        on_it.into_iter().rev().for_each(|id| self.mount(id));
    }

    fn holder(&self, node: String) -> Holder {
        let folder = format!("/sys/class/block/{node}");
        if let Some(name) = self.machine.line(&format!("{folder}/dm/name")) {
            return Holder::Mapped { name, node };
        }
        if self.machine.exists(&format!("{folder}/md")) { Holder::Array(node) } else { Holder::Other(node) }
    }

    /// A mount, after those within it and the loop devices over its files.
    fn mount(&mut self, id: u64) {
        let Some(place) = self.mounts.iter().position(|mount| mount.id == id) else { return };
        let target = self.mounts[place].target.clone();
        if STAYS.iter().any(|stays| Path::new(stays) == target) {
            return;
        }
        // Later mounts at the same place cover this one.
        let covers = |mount: &&Mount| mount.target.starts_with(&target);
        let inside: Vec<u64> =
            self.mounts.iter().skip(place + 1).filter(covers).map(|mount| mount.id).collect();
        inside.into_iter().rev().for_each(|id| self.mount(id));
        if !self.seen.insert(format!("mount {id}")) {
            return;
        }
        self.loops_where(|_, file| file.starts_with(&target));
        self.found.push(Holder::Mount(target));
    }

    /// The loop devices over these files.
    fn loops_where(&mut self, is_it: impl Fn(&Machine, &Path) -> bool) {
        let all = self.loops.iter().filter(|(_, file)| is_it(self.machine, file));
        let names: Vec<String> = all.map(|(name, _)| name.clone()).collect();
        for name in names {
            self.device(&name);
            self.add(Holder::Loop(name));
        }
    }

    fn add(&mut self, holder: Holder) {
        if !self.found.contains(&holder) {
            self.found.push(holder);
        }
    }
}

#[cfg(test)]
mod tests;
