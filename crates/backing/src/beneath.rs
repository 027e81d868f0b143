//! What a block device stands on, claimed together with it: the same bytes are not to be had by another way.
//!
//! A loop device stands on a part of a file or of another block device; a partition on a part of its disk; device mapper and md on
//! their members. The kernel's exclusive open covers partitions and members. It does not cover what a loop device stands on: so a
//! file there gets the lock that a file gets that is opened directly, over the bytes that the loop device shows, and a block device
//! is opened exclusively.
//!
//! Always true here: bytes of a file or disk are claimed by one backing device, whichever devices lead to it. Two loop devices,
//! partitions or mapped devices over parts that have no byte in common do not exclude each other: within this process whatever they
//! stand on, with other processes where it is a file in the end. Where it is not known which bytes a device uses, it uses all. Nothing
//! waits longer than [`ANSWER`] for a file system.
//!
//! Left to others: a file that has no name here, which is a warning; programs that take no lock.

use crate::claims::{Chain, Claim, Ground, Object, Shown, Step, Wanted, registry};
use crate::hold::{self, Held};
use crate::length::Length;
use crate::mapper::{self, MadeOf};
use crate::patient;
use crate::sys::{self, DeviceNumber, LoopFile, Status};
use crate::sysfs::{BlockDirectory, within};
use cbd_types::{ByteRange, Error, ErrorKind, Result};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long a file that a loop device stands on may take to be opened.
pub(crate) const ANSWER: Duration = Duration::from_secs(1);

/// More parts than any sane machine makes one device of.
const PARTS_MAX: usize = 4096;

/// More devices on top of each other than any sane machine has.
const LAYERS_MAX: usize = 64;

const WHOLE: ByteRange = ByteRange { start: 0, end: u64::MAX };

/// What is claimed beneath a backing device, and what could not be.
#[derive(Debug, Default)]
pub(crate) struct Beneath {
    pub claims: Vec<Claim>,
    pub warnings: Vec<String>,
}

/// Claims all that the block device at `path` stands on.
///
/// # Errors
/// [`ErrorKind::Busy`] with who has it; [`ErrorKind::TimedOut`] for what does not answer; [`ErrorKind::Unsupported`] for a device of more
/// parts than are looked through.
pub(crate) fn claim(path: &Path, device: DeviceNumber, read_only: bool) -> Result<Beneath> {
    // One at a time, so that no thread finds a ground that is open here but not known yet.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let owner = registry().number();
    let mut walk = Walk::new(path, owner, read_only, Machine::of_this_system());
    walk.run(device)?;
    Ok(walk.found)
}

/// What the kernel tells of its devices.
struct Machine {
    sys: PathBuf,
    table: fn(DeviceNumber) -> io::Result<Vec<mapper::Target>>,
}

impl Machine {
    fn of_this_system() -> Self {
        Self { sys: PathBuf::from("/sys"), table: mapper::table }
    }
}

/// A part of a block device that is to be looked through.
#[derive(Clone, Debug)]
struct Part {
    device: DeviceNumber,
    bytes: ByteRange,
    /// What leads here.
    chain: Chain,
    shown: Option<Shown>,
    /// Why it is not known which bytes are used here.
    unsure: Option<String>,
}

struct Walk<'a> {
    top: &'a Path,
    owner: u64,
    read_only: bool,
    machine: Machine,
    next: Vec<Part>,
    found: Beneath,
}

/// What a loop device stands on, opened or in use by this process already.
struct Opened {
    ground: Arc<Ground>,
    status: Status,
    /// An exclusive lock takes the right to write.
    writable: bool,
}

impl<'a> Walk<'a> {
    fn new(top: &'a Path, owner: u64, read_only: bool, machine: Machine) -> Self {
        Self { top, owner, read_only, machine, next: Vec::new(), found: Beneath::default() }
    }

    fn run(&mut self, device: DeviceNumber) -> Result<()> {
        let shown = Some(Shown { top: WHOLE, at: 0 });
        self.next.push(Part { device, bytes: WHOLE, chain: Chain::new(), shown, unsure: None });
        let mut visited = 0;
        while let Some(part) = self.next.pop() {
            visited += 1;
            if visited > PARTS_MAX || part.chain.len() > LAYERS_MAX {
                let text = format!("{} is made of too many parts to be claimed", self.top.display());
                return Err(Error::new(ErrorKind::Unsupported, text));
            }
            self.visit(part)?;
        }
        Ok(())
    }

    fn visit(&mut self, mut part: Part) -> Result<()> {
        part.chain.push(Step { object: Object::Device(part.device), bytes: part.bytes });
        let Some(directory) = BlockDirectory::below(&self.machine.sys, part.device) else {
            let name = format!("block device {}", part.device);
            return self.bottom(part, PathBuf::from(name));
        };
        let node = Path::new("/dev").join(directory.name());
        if directory.is_partition() {
            let (Some(disk), Some(place)) = (directory.disk_number(), directory.within_disk(WHOLE)) else {
                return self.bottom(part, node);
            };
            part.lies_in(place);
            part.device = disk;
            part.chain.push(Step { object: Object::Device(disk), bytes: part.bytes });
        }
        if let Some(path) = directory.loop_backing() {
            return self.loop_device(&directory, &path, part);
        }
        let slaves = directory.slaves();
        if slaves.is_empty() {
            return self.bottom(part, node);
        }
        self.members(&directory, &slaves, &part);
        Ok(())
    }

    /// Goes on to what device mapper, md and the like made a device of.
    fn members(&mut self, directory: &BlockDirectory, slaves: &[DeviceNumber], part: &Part) {
        let name = directory.name().to_owned();
        let unknown = if directory.disk("dm/name").is_none() {
            format!("which parts {name} uses is not known")
        } else {
            match (self.machine.table)(part.device) {
                Ok(table) => {
                    let targets: Vec<_> = table
                        .into_iter()
                        .filter(|target| !meet_of(target.bytes, part.bytes).is_empty())
                        .collect();
                    let unknown = targets.iter().find_map(|target| match &target.made_of {
                        MadeOf::Unknown(kind) => Some(kind.clone()),
                        _ => None,
                    });
                    match unknown {
                        None => return targets.iter().for_each(|target| self.target(target, slaves, part)),
                        Some(kind) => format!("which parts {name} uses is not known, it is of type {kind}"),
                    }
                }
                Err(error) => {
                    format!("which parts {name} uses is not known, its table cannot be read ({error})")
                }
            }
        };
        for device in slaves {
            self.next.push(Part {
                device: *device,
                bytes: WHOLE,
                chain: part.chain.clone(),
                shown: None,
                unsure: Some(unknown.clone()),
            });
        }
    }

    /// Goes on to what one line of a table names.
    fn target(&mut self, target: &mapper::Target, slaves: &[DeviceNumber], part: &Part) {
        let bytes = meet_of(target.bytes, part.bytes);
        // Known to be of these bytes of the device alone.
        let mut chain = part.chain.clone();
        chain.extend(chain.last().copied().map(|last| Step { bytes, ..last }));
        let mut go = |device, bytes, chain: &Chain, shown| {
            let (chain, unsure) = (chain.clone(), part.unsure.clone());
            self.next.push(Part { device, bytes, chain, shown, unsure });
        };
        match &target.made_of {
            MadeOf::Linear { device, start } => {
                let from = start.saturating_add(bytes.start - target.bytes.start);
                let shown = part.shown.map(|shown| {
                    let skipped = bytes.start - part.bytes.start;
                    let top = shown.top.start.saturating_add(skipped);
                    let end = top.saturating_add(bytes.len()).min(shown.top.end);
                    Shown { top: ByteRange { start: top, end }, at: from }
                });
                go(*device, ByteRange { start: from, end: from.saturating_add(bytes.len()) }, &chain, shown);
            }
            MadeOf::Striped { length, parts } => {
                for (device, start) in parts {
                    go(
                        *device,
                        ByteRange { start: *start, end: start.saturating_add(*length) },
                        &chain,
                        None,
                    );
                }
            }
            MadeOf::Thin { pool, id } => {
                let bytes = ByteRange { start: *id, end: id.saturating_add(1) };
                chain.push(Step { object: Object::Shared(*pool), bytes });
                go(*pool, WHOLE, &chain, None);
            }
            MadeOf::Snapshot => {
                for device in slaves {
                    let mut chain = chain.clone();
                    let own = u64::from(part.device.minor);
                    let bytes = ByteRange { start: own, end: own + 1 };
                    chain.push(Step { object: Object::Shared(*device), bytes });
                    go(*device, WHOLE, &chain, None);
                }
            }
            MadeOf::Nothing | MadeOf::Unknown(_) => {}
        }
    }

    /// Nothing is known to be below: the bytes are this device's.
    fn bottom(&mut self, part: Part, path: PathBuf) -> Result<()> {
        let claim = self.note(part, None, path, None)?;
        self.found.claims.extend(claim);
        Ok(())
    }

    fn loop_device(&mut self, directory: &BlockDirectory, path: &Path, mut part: Part) -> Result<()> {
        part.lies_in(directory.loop_bytes());
        let (node, file) = (Path::new("/dev").join(directory.name()), path.to_owned());
        let read_only = self.read_only;
        let asked = patient::ask(&format!("ground {}", node.display()), ANSWER, move || {
            ground(&node, &file, read_only)
        });
        let opened = match asked {
            Some(Ok(opened)) => opened,
            Some(Err(error)) if error.raw_os_error() == Some(libc::EBUSY) => {
                return Err(self.busy_device(path));
            }
            Some(Err(error)) => {
                self.found.warnings.push(format!(
                    "{} stands on {}, which cannot be claimed ({error}): that it has no other user is not known",
                    self.top.display(),
                    path.display()
                ));
                return Ok(());
            }
            None => {
                let text = format!(
                    "{} stands on {}, which does not answer; put its file system right and try again",
                    self.top.display(),
                    path.display()
                );
                return Err(Error::new(ErrorKind::TimedOut, text));
            }
        };
        let held = &opened.ground.held;
        if !self.read_only
            && let Some(other) = hold::loop_device_in_use(held, &opened.status, part.bytes, directory.name())
        {
            let text =
                format!("{} is in use: it stands on {}, and {other}", self.top.display(), path.display());
            return Err(Error::new(ErrorKind::Busy, text));
        }
        if opened.status.is_block() {
            let device = opened.status.special;
            let mut claimed = part.clone();
            claimed.chain.push(Step { object: Object::Device(device), bytes: part.bytes });
            let claim = self.note(claimed, Some(opened.ground), path.to_owned(), None)?;
            self.found.claims.extend(claim);
            self.next.push(Part { device, ..part });
            return Ok(());
        }
        self.file(opened, path, part)
    }

    fn file(&mut self, opened: Opened, path: &Path, mut part: Part) -> Result<()> {
        if !self.read_only && !opened.writable {
            self.found.warnings.push(format!(
                "{} stands on {}, which this user may not write: that no other loop device shows it is not known",
                self.top.display(),
                path.display()
            ));
        }
        part.chain.push(Step { object: opened.ground.object, bytes: part.bytes });
        let end = part.bytes.end.min(opened.status.size);
        // A file that has no name already cannot be deleted.
        let length = (opened.status.links > 0).then(|| Length::new(end));
        let claim = self.note(part, Some(opened.ground), path.to_owned(), length)?;
        self.found.claims.extend(claim);
        Ok(())
    }

    /// Claims what a part has led to, unless something else has bytes of it.
    fn note(
        &mut self,
        part: Part,
        ground: Option<Arc<Ground>>,
        path: PathBuf,
        length: Option<Length>,
    ) -> Result<Option<Claim>> {
        let exclusive = !self.read_only;
        let unsure = part.unsure.map(|why| format!("; {why}, so it counts as using all")).unwrap_or_default();
        let busy = |who: String| {
            let text = format!(
                "{} is in use: it stands on {}, and {who}{unsure}",
                self.top.display(),
                path.display()
            );
            Error::new(ErrorKind::Busy, text)
        };
        let mut registry = registry();
        if let Some(other) = registry.other(self.owner, &part.chain, exclusive) {
            let process = PathBuf::from(format!("/proc/{}", std::process::id()));
            let process = cbd_holder::name_of(&process, ", this one");
            return Err(busy(format!("{process} uses the same bytes of it for {}", other.display())));
        }
        let held = ground.clone();
        let wanted = Wanted {
            owner: self.owner,
            top: self.top,
            chain: part.chain,
            exclusive,
            ground,
            path: path.clone(),
            length,
            shown: part.shown,
        };
        match (registry.claim(wanted), held) {
            (Ok(claim), _) => Ok(Some(claim)),
            (Err(error), Some(ground))
                if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) =>
            {
                drop(registry);
                let who = hold::lock_holder(&ground.held);
                Err(busy(format!("{who} holds a lock on that")))
            }
            (Err(error), _) => {
                self.found.warnings.push(format!(
                    "{} stands on {}, which cannot be locked ({error}): that it has no other user is not known",
                    self.top.display(),
                    path.display()
                ));
                Ok(None)
            }
        }
    }

    fn busy_device(&self, path: &Path) -> Error {
        let status = sys::status_of(path).ok();
        let who = status.and_then(|status| hold::device_user(&status));
        let who = who.unwrap_or_else(|| "another program holds it exclusively".to_owned());
        let text = format!(
            "{} is in use: it stands on {}, and {who}; only one process at a time can use parts of a block device through loop devices",
            self.top.display(),
            path.display()
        );
        Error::new(ErrorKind::Busy, text)
    }
}

impl Part {
    /// Its bytes are from here on those of something larger, where it is at `place`.
    fn lies_in(&mut self, place: ByteRange) {
        self.bytes = within(self.bytes, place.start, place.len());
        self.shown = self.shown.map(|shown| Shown { at: shown.at.saturating_add(place.start), ..shown });
    }
}

/// What two ranges have in common.
fn meet_of(one: ByteRange, other: ByteRange) -> ByteRange {
    let start = one.start.max(other.start);
    ByteRange { start, end: one.end.min(other.end).max(start) }
}

/// Opens what the loop device `node` stands on, which the kernel says to be at `path`. May wait for its file system.
fn ground(node: &Path, path: &Path, read_only: bool) -> io::Result<Opened> {
    let expected = File::open(node).and_then(|device| sys::loop_file(device.as_fd()));
    let before = sys::status_of(path)?;
    if let Ok(expected) = &expected
        && !expected.is(&before)
    {
        return Err(io::Error::other("another file has this name here"));
    }
    let is_block = before.is_block();
    let object =
        if is_block { Object::Device(before.special) } else { Object::File(before.device, before.inode) };
    let known = |exclusive| {
        let ground = registry().ground(object, exclusive)?;
        Some(Opened { ground, status: before, writable: exclusive })
    };
    if let Some(known) = known(!read_only) {
        return Ok(known);
    }
    // A claim of a block device says nothing of writing it.
    let write = !read_only && !is_block;
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | if is_block { libc::O_EXCL } else { 0 };
    let open = |write: bool| OpenOptions::new().read(true).write(write).custom_flags(flags).open(path);
    let (file, writable) = match open(write) {
        Ok(file) => (file, write || is_block),
        Err(error)
            if write && matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM | libc::EROFS)) =>
        {
            if let Some(known) = known(false) {
                return Ok(known);
            }
            (open(false)?, false)
        }
        Err(error) => return Err(error),
    };
    let status = sys::status(file.as_fd())?;
    if !status.same_object(&before) {
        return Err(io::Error::other("it was exchanged for something else meanwhile"));
    }
    let ground = Ground { object, exclusive: writable && !read_only, held: Held::new(file) };
    Ok(Opened { ground: Arc::new(ground), status, writable })
}

impl LoopFile {
    /// Whether a file or block device is what the loop device stands on.
    pub fn is(&self, status: &Status) -> bool {
        if status.is_block() {
            return self.special == status.special;
        }
        self.device == status.device && self.inode == status.inode
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapper::Line;
    use std::os::unix::fs::symlink;

    const fn number(minor: u32) -> DeviceNumber {
        DeviceNumber { major: 253, minor }
    }

    const fn range(start: u64, end: u64) -> ByteRange {
        ByteRange { start, end }
    }

    /// A tree as `/sys` has it: mapped devices `dm-0` to `dm-9` over one disk, number 20, with a partition of it, number 21.
    fn tree() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
            std::fs::write(path, text).expect("written");
        };
        write("devices/disk/dev", "253:20\n");
        write("devices/disk/slaves/.none", "");
        std::fs::remove_file(root.join("devices/disk/slaves/.none")).expect("removed");
        write("devices/disk/part/dev", "253:21\n");
        write("devices/disk/part/partition", "1\n");
        write("devices/disk/part/start", "2048\n");
        write("devices/disk/part/size", "2048\n");
        let node = |minor: u32, at: &str| {
            let link = root.join(format!("dev/block/253:{minor}"));
            std::fs::create_dir_all(link.parent().expect("a parent")).expect("a folder");
            symlink(root.join(at), link).expect("a link");
        };
        node(20, "devices/disk");
        node(21, "devices/disk/part");
        for minor in 0..10 {
            let name = format!("devices/dm-{minor}");
            write(&format!("{name}/dev"), &format!("253:{minor}\n"));
            write(&format!("{name}/dm/name"), "mapped\n");
            std::fs::create_dir_all(root.join(&name).join("slaves")).expect("a folder");
            symlink(root.join("devices/disk"), root.join(&name).join("slaves/disk")).expect("a link");
            node(minor, &name);
        }
        folder
    }

    /// The tables: 0 to 2 are linear, 1 and 2 overlap; 3 and 4 are of a type that is not known; the table of 5 cannot be read; 6 and 7
    /// are thin; 8 is of two parts, on both sides of what 9 has.
    fn table(device: DeviceNumber) -> io::Result<Vec<mapper::Target>> {
        let lines: &[(u64, u64, &str, &str)] = match device.minor {
            0 => &[(0, 100, "linear", "253:20 0")],
            1 => &[(0, 100, "linear", "253:20 100")],
            2 => &[(0, 100, "linear", "253:20 150")],
            3 | 4 => &[(0, 100, "raid", "")],
            5 => return Err(io::Error::from_raw_os_error(libc::EACCES)),
            6 => &[(0, 100, "thin", "253:20 1")],
            7 => &[(0, 100, "thin", "253:20 2")],
            8 => &[(0, 50, "linear", "253:20 1000"), (50, 50, "linear", "253:20 1100")],
            _ => &[(0, 50, "linear", "253:20 1050")],
        };
        let target = |(start, length, kind, parameters): &(u64, u64, &str, &str)| {
            let (kind, parameters) = ((*kind).to_owned(), (*parameters).to_owned());
            mapper::target(&Line { start: *start, length: *length, kind, parameters })
        };
        Ok(lines.iter().map(target).collect())
    }

    /// Claims a device of the tree.
    fn claim_in(tree: &Path, minor: u32) -> Result<Vec<Claim>> {
        let owner = registry().number();
        let top = PathBuf::from(format!("/dev/dm-{minor}"));
        let machine = Machine { sys: tree.to_owned(), table };
        let mut walk = Walk::new(&top, owner, false, machine);
        walk.run(number(minor))?;
        Ok(walk.found.claims)
    }

    #[track_caller]
    fn refused(tree: &Path, minor: u32, parts: &[&str]) {
        let error = claim_in(tree, minor).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Busy);
        let line = error.line();
        let process = format!("process {} (", std::process::id());
        assert!(parts.iter().all(|part| line.contains(part)) && line.contains(&process), "{line}");
    }

    /// One test, since all share the registry of the process.
    #[test]
    fn mapped_devices_exclude_each_other_where_their_tables_overlap_or_are_not_known() {
        let tree = tree();
        let tree = tree.path();
        // Apart: both. Overlapping: refused with who has it.
        let (first, second) = (claim_in(tree, 0).expect("free"), claim_in(tree, 1).expect("free"));
        refused(tree, 2, &["/dev/disk", "for /dev/dm-1"]);
        // A type that is not known uses all, and so does a table that cannot be read; the message says so.
        refused(tree, 3, &["for /dev/dm-0", "of type raid"]);
        refused(tree, 5, &["its table cannot be read (Permission denied"]);
        drop((first, second));
        let raid = claim_in(tree, 3).expect("free");
        refused(tree, 4, &["for /dev/dm-3", "of type raid"]);
        refused(tree, 0, &["for /dev/dm-3"]);
        drop(raid);
        // Two thin devices of one pool share it, and nothing else does.
        let thin = [claim_in(tree, 6).expect("free"), claim_in(tree, 7).expect("free")];
        refused(tree, 6, &["for /dev/dm-6"]);
        refused(tree, 0, &["for /dev/dm-"]);
        drop(thin);
        // A device of two parts does not use what lies between them.
        let around = claim_in(tree, 8).expect("free");
        assert_eq!(around.iter().filter(|claim| claim.shown.is_some()).count(), 2);
        let between = claim_in(tree, 9).expect("free");
        refused(tree, 8, &["for /dev/dm-8"]);
        drop((around, between));
        // A partition of the disk, and what is mapped into it.
        let partition = claim_in(tree, 21).expect("free");
        claim_in(tree, 0).expect("it lies before the partition");
        refused(tree, 20, &["for /dev/dm-21"]);
        drop(partition);
        claim_in(tree, 20).expect("free");
    }

    #[test]
    fn the_bytes_of_a_mapped_device_are_where_its_table_says() {
        let tree = tree();
        let machine = Machine { sys: tree.path().to_owned(), table: |_| table(number(8)) };
        let mut walk = Walk::new(Path::new("/dev/dm-8"), 0, false, machine);
        let shown = Some(Shown { top: WHOLE, at: 0 });
        let part = Part { device: number(8), bytes: WHOLE, chain: Chain::new(), shown, unsure: None };
        walk.visit(part).expect("nothing is claimed yet");
        let mut found: Vec<_> = walk.next.iter().map(|part| (part.bytes, part.shown)).collect();
        found.sort_by_key(|(bytes, _)| bytes.start);
        let sectors = |start: u64, end: u64| range(start * 512, end * 512);
        let expected = |top, at: u64| Some(Shown { top, at: at * 512 });
        assert_eq!(
            found,
            [
                (sectors(1000, 1050), expected(sectors(0, 50), 1000)),
                (sectors(1100, 1150), expected(sectors(50, 100), 1100)),
            ]
        );
    }

    #[test]
    fn a_part_of_a_part_is_where_it_lies_in_the_whole() {
        assert_eq!(within(WHOLE, 0, u64::MAX), WHOLE);
        assert_eq!(within(WHOLE, 1024, 4096), range(1024, 5120));
        // A partition of a loop device that begins in its file.
        assert_eq!(within(within(WHOLE, 512, 1024), 4096, u64::MAX), range(4608, 5632));
        // A partition that says to be longer than what it lies on.
        assert_eq!(within(range(1024, 9999), 0, 2048), range(1024, 2048));
        assert_eq!(within(range(4096, 8192), 0, 2048), range(2048, 2048));
    }
}
