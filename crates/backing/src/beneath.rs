//! Claims on the devices and files beneath a block device, so that the same bytes cannot be used through another path.
//!
//! A loop device maps a part of a file or of another block device; a partition maps a part of its disk; device mapper
//! and md map their members. The kernel's exclusive open covers partitions and members. It does not cover the backing
//! file of a loop device: so the file gets the same lock as a file that is opened directly, over the bytes that the
//! loop device maps, and a block device is opened exclusively.
//!
//! Invariants: bytes of a file or disk are claimed by one backing device, whichever devices map them. Two loop devices,
//! partitions or mapped devices over disjoint parts do not exclude each other: within this process in all cases,
//! between processes if a file is beneath them. A device whose used bytes are not known counts as using all. No call
//! waits longer than [`OPEN_TIMEOUT`] for a file system.
//!
//! A file that cannot be opened or locked is claimed within this process only, and a warning says that other processes
//! are not excluded. Programs that do not lock are not excluded either.

use crate::claims::{Chain, Claim, ClaimRequest, Claims, HeldObject, Mapping, Object, Step, registry};
use crate::hold::{self, Held};
use crate::length::Length;
use crate::mapper::{self, TargetKind};
use crate::query;
use crate::sys::{self, LoopFile, Status};
use crate::sysfs::{BlockDirectory, within};
use cbd_sys::DeviceNumber;
use cbd_types::{ByteRange, Error, ErrorKind, Result};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Timeout for opening the backing file of a loop device.
pub(crate) const OPEN_TIMEOUT: Duration = Duration::from_secs(1);

/// Most parts of one device; real devices have fewer.
const PARTS_MAX: usize = 4096;

/// Most layers of devices; real stacks have fewer.
const LAYERS_MAX: usize = 64;

const WHOLE: ByteRange = ByteRange { start: 0, end: u64::MAX };

/// The claims beneath a backing device, and warnings.
#[derive(Debug, Default)]
pub(crate) struct Beneath {
    pub claims: Vec<Claim>,
    pub warnings: Vec<String>,
}

/// Claims all devices and files beneath the block device at `path`.
///
/// # Errors
/// [`ErrorKind::Busy`] with the user; [`ErrorKind::TimedOut`] for a file system that hangs;
/// [`ErrorKind::Unsupported`] for a device with too many parts.
pub(crate) fn claim(path: &Path, device: DeviceNumber, read_only: bool) -> Result<Beneath> {
    let owner = registry().number();
    claim_for(owner, path, device, read_only)
}

/// Claims what is beneath a device that has grown, for the backing device that has `claims` already: bytes that it did
/// not have are claimed as well, and files beneath must be as long as they are now. Returns warnings.
///
/// # Errors
/// As [`claim`]; nothing has changed then.
pub(crate) fn claim_growth(
    claims: &Claims,
    path: &Path,
    device: DeviceNumber,
    read_only: bool,
) -> Result<Vec<String>> {
    let owner = claims.iter().next().and_then(|claim| registry().owner_of(claim));
    let Some(owner) = owner else { return Ok(Vec::new()) };
    let found = claim_for(owner, path, device, read_only)?;
    for claim in &found.claims {
        let Some((length, object)) = claim.length.as_ref().zip(claim.held_object.as_ref()) else { continue };
        let is_same = |known: &&Claim| {
            known.held_object.as_ref().is_some_and(|held| Arc::ptr_eq(held, object))
                && known.mapping == claim.mapping
        };
        claims.iter().filter(is_same).filter_map(|known| known.length.as_ref()).for_each(|known| {
            known.raise(length.expected());
        });
    }
    claims.add(found.claims);
    Ok(found.warnings)
}

fn claim_for(owner: u64, path: &Path, device: DeviceNumber, read_only: bool) -> Result<Beneath> {
    // One thread at a time, so that no thread finds a file that another has opened but not registered yet.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let mut walk = Walk::new(path, owner, read_only, Sources::of_this_system());
    walk.run(device)?;
    Ok(walk.found)
}

/// The sources of information about devices; replaced in tests.
struct Sources {
    sys: PathBuf,
    table: fn(DeviceNumber) -> io::Result<Vec<mapper::Target>>,
}

impl Sources {
    fn of_this_system() -> Self {
        Self { sys: PathBuf::from("/sys"), table: mapper::table }
    }
}

/// A part of a block device whose underlying objects are claimed next.
#[derive(Clone, Debug)]
struct Part {
    device: DeviceNumber,
    bytes: ByteRange,
    /// The chain from the backing device to this part.
    chain: Chain,
    mapping: Option<Mapping>,
    /// The kernel only reads this part, even when it writes to the backing device.
    only_read: bool,
    /// Why it is not known which bytes are used.
    unknown: Option<String>,
}

struct Walk<'a> {
    top: &'a Path,
    owner: u64,
    read_only: bool,
    sources: Sources,
    next: Vec<Part>,
    found: Beneath,
}

/// A backing file of a loop device that cannot be opened.
struct Unopened {
    error: io::Error,
    /// The object as the loop driver reports it.
    object: Option<Object>,
}

/// The backing file of a loop device, opened now or in use by this process already.
struct Opened {
    held_object: Arc<HeldObject>,
    status: Status,
    /// Whether it is open for writing, which an exclusive lock requires.
    writable: bool,
}

impl<'a> Walk<'a> {
    fn new(top: &'a Path, owner: u64, read_only: bool, sources: Sources) -> Self {
        Self { top, owner, read_only, sources, next: Vec::new(), found: Beneath::default() }
    }

    fn run(&mut self, device: DeviceNumber) -> Result<()> {
        let mapping = Some(Mapping { top: WHOLE, at: 0 });
        let (chain, only_read, unknown) = (Chain::new(), false, None);
        self.next.push(Part { device, bytes: WHOLE, chain, mapping, only_read, unknown });
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
        let Some(directory) = BlockDirectory::below(&self.sources.sys, part.device) else {
            let name = format!("block device {}", part.device);
            return self.lowest(part, PathBuf::from(name));
        };
        let node = Path::new("/dev").join(directory.name());
        if directory.is_partition() {
            let (Some(disk), Some(place)) = (directory.disk_number(), directory.within_disk(WHOLE)) else {
                return self.lowest(part, node);
            };
            part.translate_to(place);
            part.device = disk;
            part.chain.push(Step { object: Object::Device(disk), bytes: part.bytes });
        }
        if let Some(path) = directory.loop_backing() {
            return self.loop_device(&directory, &path, part);
        }
        let slaves = directory.slaves();
        if slaves.is_empty() {
            return self.lowest(part, node);
        }
        self.members(&directory, &slaves, &part);
        Ok(())
    }

    /// Visits the members of a device of device mapper, md and the like.
    fn members(&mut self, directory: &BlockDirectory, slaves: &[DeviceNumber], part: &Part) {
        let name = directory.name().to_owned();
        let unknown = if directory.disk("dm/name").is_none() {
            format!("which parts {name} uses is not known")
        } else {
            match (self.sources.table)(part.device) {
                Ok(table) => {
                    let targets: Vec<_> = table
                        .into_iter()
                        .filter(|target| target.bytes.intersection(&part.bytes).is_some())
                        .collect();
                    let unknown = targets.iter().find_map(|target| match &target.kind {
                        TargetKind::Unknown(kind) => Some(kind.clone()),
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
                mapping: None,
                only_read: part.only_read,
                unknown: Some(unknown.clone()),
            });
        }
    }

    /// Visits the devices in one line of a table.
    fn target(&mut self, target: &mapper::Target, slaves: &[DeviceNumber], part: &Part) {
        let Some(bytes) = target.bytes.intersection(&part.bytes) else { return };
        // The chain is restricted to the bytes of this line.
        let mut chain = part.chain.clone();
        chain.extend(chain.last().copied().map(|last| Step { bytes, ..last }));
        let mut go = |device, bytes, chain: &Chain, mapping| {
            self.next.push(Part { device, bytes, chain: chain.clone(), mapping, ..part.clone() });
        };
        match &target.kind {
            TargetKind::Linear { device, start } => {
                let from = start.saturating_add(bytes.start - target.bytes.start);
                let mapping = part.mapping.map(|mapping| {
                    let skipped = bytes.start - part.bytes.start;
                    let top = mapping.top.start.saturating_add(skipped);
                    let end = top.saturating_add(bytes.len()).min(mapping.top.end);
                    Mapping { top: ByteRange { start: top, end }, at: from }
                });
                go(
                    *device,
                    ByteRange { start: from, end: from.saturating_add(bytes.len()) },
                    &chain,
                    mapping,
                );
            }
            TargetKind::Striped { length, parts } => {
                for (device, start) in parts {
                    go(
                        *device,
                        ByteRange { start: *start, end: start.saturating_add(*length) },
                        &chain,
                        None,
                    );
                }
            }
            TargetKind::Thin { pool, id, origin } => {
                let own = ByteRange { start: *id, end: id.saturating_add(1) };
                let mut shared = chain.clone();
                shared.push(Step { object: Object::Shared(*pool), bytes: own });
                go(*pool, WHOLE, &shared, None);
                if let Some(origin) = origin {
                    // The kernel never writes to an external origin, and many thin devices have the same one: as two
                    // readers they do not exclude each other. A writer of these bytes would change the contents of the
                    // thin device, and is excluded.
                    let from = bytes.start - target.bytes.start;
                    let bytes = ByteRange::at(from, bytes.len());
                    let (device, unknown) = (*origin, part.unknown.clone());
                    // Claimed last, when the bytes that the backing device writes are registered.
                    self.next
                        .insert(0, Part { device, bytes, chain, mapping: None, only_read: true, unknown });
                }
            }
            TargetKind::Snapshot => {
                for device in slaves {
                    let mut chain = chain.clone();
                    let own = u64::from(part.device.minor);
                    let bytes = ByteRange { start: own, end: own + 1 };
                    chain.push(Step { object: Object::Shared(*device), bytes });
                    go(*device, WHOLE, &chain, None);
                }
            }
            TargetKind::Nothing | TargetKind::Unknown(_) => {}
        }
    }

    /// Claims a part of the lowest device, which has no device beneath it.
    fn lowest(&mut self, part: Part, path: PathBuf) -> Result<()> {
        self.claim(part, None, path, None)
    }

    fn loop_device(&mut self, directory: &BlockDirectory, path: &Path, mut part: Part) -> Result<()> {
        part.translate_to(directory.loop_bytes());
        let (node, file) = (Path::new("/dev").join(directory.name()), path.to_owned());
        let read_only = self.only_reads(&part);
        let answer = query::run(&format!("backing file {}", node.display()), OPEN_TIMEOUT, move || {
            open_backing_file(&node, &file, read_only)
        });
        let opened = match answer {
            Some(Ok(opened)) => opened,
            Some(Err(unopened)) if unopened.error.raw_os_error() == Some(libc::EBUSY) => {
                return Err(self.busy_device(path));
            }
            Some(Err(unopened)) => return self.unopened(&unopened, path, part),
            None => {
                let text = format!(
                    "{} stands on {}, which does not answer; repair its file system and try again",
                    self.top.display(),
                    path.display()
                );
                return Err(Error::new(ErrorKind::TimedOut, text));
            }
        };
        let held = &opened.held_object.file;
        if !read_only
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
            self.claim(claimed, Some(opened.held_object), path.to_owned(), None)?;
            self.next.push(Part { device, ..part });
            return Ok(());
        }
        self.file(opened, path, part)
    }

    /// Claims a file that cannot be opened, as the object that the loop driver reports.
    fn unopened(&mut self, unopened: &Unopened, path: &Path, mut part: Part) -> Result<()> {
        self.warn_of_other_processes(path, &format!("cannot be claimed ({})", unopened.error));
        match unopened.object {
            Some(Object::Device(device)) => {
                self.next.push(Part { device, ..part });
                return Ok(());
            }
            Some(object) => part.chain.push(Step { object, bytes: part.bytes }),
            None => {}
        }
        self.claim(part, None, path.to_owned(), None)
    }

    fn file(&mut self, opened: Opened, path: &Path, mut part: Part) -> Result<()> {
        if !self.only_reads(&part) && !opened.writable {
            self.found.warnings.push(format!(
                "{} stands on {}, which this user may not write: whether another loop device maps it is not known",
                self.top.display(),
                path.display()
            ));
        }
        part.chain.push(Step { object: opened.held_object.object, bytes: part.bytes });
        let end = part.bytes.end.min(opened.status.size);
        // Without a name the file cannot be deleted or replaced.
        let length = (opened.status.links > 0).then(|| Length::new(end));
        self.claim(part, Some(opened.held_object), path.to_owned(), length)
    }

    /// Claims the object at the end of a part's chain, unless another user has bytes of it.
    fn claim(
        &mut self,
        part: Part,
        held_object: Option<Arc<HeldObject>>,
        path: PathBuf,
        length: Option<Length>,
    ) -> Result<()> {
        let exclusive = !self.only_reads(&part);
        let unknown =
            part.unknown.map(|why| format!("; {why}, so it counts as using all")).unwrap_or_default();
        let busy = |user: String| {
            let text = format!(
                "{} is in use: it stands on {}, and {user}{unknown}",
                self.top.display(),
                path.display()
            );
            Error::new(ErrorKind::Busy, text)
        };
        let mut registry = registry();
        if let Some(other) = registry.other(self.owner, &part.chain, exclusive) {
            return Err(busy(hold::user_in_this_process(other)));
        }
        // No shared lock: it would conflict with the exclusive lock of the same backing device.
        if part.only_read && part.chain.last().is_some_and(|step| registry.has(self.owner, step)) {
            return Ok(());
        }
        let held = held_object.clone();
        let request = ClaimRequest {
            owner: self.owner,
            top: self.top,
            chain: part.chain,
            exclusive,
            held_object,
            path: path.clone(),
            length,
            mapping: part.mapping,
        };
        let claimed = registry.claim(request);
        drop(registry);
        let (claim, unlocked) = claimed.map_err(|_| {
            let user = held.map(|held_object| hold::lock_holder(&held_object.file));
            busy(format!("{} holds a lock on that", user.as_deref().unwrap_or("another program")))
        })?;
        self.found.claims.push(claim);
        if let Some(error) = unlocked {
            self.warn_of_other_processes(&path, &format!("cannot be locked ({error})"));
        }
        Ok(())
    }

    fn only_reads(&self, part: &Part) -> bool {
        self.read_only || part.only_read
    }

    fn warn_of_other_processes(&mut self, path: &Path, why: &str) {
        self.found.warnings.push(format!(
            "{} stands on {}, which {why}: whether another process uses it is not known",
            self.top.display(),
            path.display()
        ));
    }

    fn busy_device(&self, path: &Path) -> Error {
        let status = sys::status_of(path).ok();
        let user = status.and_then(|status| hold::device_user(&status));
        let user = user.unwrap_or_else(|| "another program holds it exclusively".to_owned());
        let text = format!(
            "{} is in use: it stands on {}, and {user}; only one process at a time can use parts of a block device through loop devices",
            self.top.display(),
            path.display()
        );
        Error::new(ErrorKind::Busy, text)
    }
}

impl Part {
    /// Translates its bytes to the larger object in which it occupies `place`.
    fn translate_to(&mut self, place: ByteRange) {
        self.bytes = within(self.bytes, place.start, place.len());
        self.mapping =
            self.mapping.map(|mapping| Mapping { at: mapping.at.saturating_add(place.start), ..mapping });
    }
}

/// Opens the backing file of the loop device `node`, which the kernel reports at `path`. May block on its file system.
fn open_backing_file(node: &Path, path: &Path, read_only: bool) -> std::result::Result<Opened, Unopened> {
    let expected = File::open(node).and_then(|device| sys::loop_file(device.as_fd())).ok();
    let object = expected.map(|file| {
        if file.is_block() { Object::Device(file.special) } else { Object::File(file.device, file.inode) }
    });
    open_backing_file_at(path, expected, read_only).map_err(|error| Unopened { error, object })
}

fn open_backing_file_at(path: &Path, expected: Option<LoopFile>, read_only: bool) -> io::Result<Opened> {
    let before = sys::status_of(path)?;
    if let Some(expected) = expected
        && !expected.is(&before)
    {
        return Err(io::Error::other("another file has this name here"));
    }
    let is_block = before.is_block();
    let object =
        if is_block { Object::Device(before.special) } else { Object::File(before.device, before.inode) };
    let known = |exclusive| {
        let held_object = registry().held_object(object, exclusive)?;
        Some(Opened { held_object, status: before, writable: exclusive })
    };
    if let Some(known) = known(!read_only) {
        return Ok(known);
    }
    // A block device is opened read-only for the claim, so whether it is writable is not checked.
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
    let held_object = HeldObject { object, exclusive: writable && !read_only, file: Held::new(file) };
    Ok(Opened { held_object: Arc::new(held_object), status, writable })
}

impl LoopFile {
    /// Whether a file or block device is the backing file of the loop device.
    pub fn is(&self, status: &Status) -> bool {
        if status.is_block() {
            return self.special == status.special;
        }
        self.device == status.device && self.inode == status.inode
    }
}

#[cfg(test)]
mod tests;
