//! Regions by path: the permitted types, the lock, the size, and the durability.
//!
//! Invariants: if an open fails, the file is unchanged: its bytes, its size, and whether it exists. Space is allocated before
//! it is mapped, so that no store fails for lack of space in the file system. A region that another daemon holds is not
//! mapped.
//!
//! Elsewhere: the system calls (`file`), the space of a file (`space`), the mapping itself (`memory`), copying.

use crate::collapse::collapse_now;
use crate::errors::from_io;
use crate::file::{self, Locked};
use crate::identity::{HUGETLBFS, file_system_name};
use crate::mapping::{Coherence, Kind};
use crate::memory::{Memory, Sharing};
use crate::methods::CopyMethod;
use crate::processor::Flush;
use crate::promise;
use crate::space::Space;
use crate::sysfs::{self, SYS};
use cbd_sys::DeviceNumber;
use cbd_sys::memory::Hint;
use cbd_types::{BootId, Durability, Error, ErrorKind, Result};
use std::fs::{self, File, FileType, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The smallest region that is mapped, in bytes: one of the smallest segments.
pub const MINIMUM_SIZE: u64 = 64 << 10;

/// Options of opening a region.
#[derive(Clone, Default, Debug)]
pub struct OpenOptions {
    /// The minimum size of the region in bytes. A file that is created gets this size, in whole pages. An
    /// existing file is always mapped completely, so that a later open without a size sees the same region: a
    /// larger one keeps its size, a smaller one grows if `create` is set and is refused if not.
    pub size: Option<u64>,
    /// Create the file if it does not exist, and extend it if it is too small.
    pub create: bool,
    /// Touch every page now, so that no later store takes a page fault.
    pub populate: bool,
    /// Bytes that are needed of an existing file, if that is known: where the file system has no space for what is behind them, only
    /// these are mapped. Not with `create`.
    pub needed: Option<u64>,
    /// Use this as the boot identifier of the machine, and treat the region as one whose pages a crash of the machine mixes,
    /// whatever stores it: for tests of the behaviour after a reboot. `None`: the kernel's identifier, and the properties of
    /// the file.
    pub boot: Option<BootId>,
    /// Lock the region together with other hosts that do the same: for one that several hosts share.
    pub with_hosts: bool,
    /// Refuse a file if a user other than this one or root owns it or may write to it.
    pub only_own: bool,
    /// Copy with this method instead of the fastest; `CBD_COPY` in the environment overrides it.
    pub copy: Option<CopyMethod>,
    /// How hosts see what others store; `None`: as the memory is used for the most part.
    pub coherence: Option<Coherence>,
}

/// The duration of opening a region.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Opening {
    /// Time until the file was found and locked.
    pub lock: Duration,
    /// Time after that until its space was allocated and mapped.
    pub map: Duration,
}

/// A region that is locked and mapped.
#[derive(Debug)]
pub(crate) struct Opened {
    pub opening: Opening,
    pub memory: Memory,
    /// `None` if no other process can open the memory.
    pub file: Option<Locked>,
    pub kind: Kind,
    pub durability: Durability,
    pub file_system: String,
    /// See [`Info::pages_in_device`](crate::Info::pages_in_device).
    pub pages_in_device: bool,
    pub warnings: Vec<String>,
    /// Why not all of the file is mapped.
    pub no_space: Option<String>,
    pub populate: bool,
}

/// Opens the region at `path`.
pub(crate) fn open(path: &Path, options: &OpenOptions, flush: Flush) -> Result<Opened> {
    let region = Path::display(path);
    let begun = Instant::now();
    match fs::metadata(path) {
        Ok(metadata) => {
            check_type(path, &metadata)?;
            let file = open_existing(path)?;
            let again =
                file.metadata().map_err(|error| from_io(&error, format!("cannot look at {region}")))?;
            check_type(path, &again)?;
            if options.only_own {
                refuse_foreign(path, &again)?;
            }
            let file = hold(path, file, options.with_hosts)?;
            let lock = begun.elapsed();
            let mut opened = if again.file_type().is_char_device() {
                open_device(path, file, &again, options, flush)?
            } else {
                open_file(path, file, options, flush)?
            };
            opened.opening = Opening { lock, map: begun.elapsed().saturating_sub(lock) };
            Ok(opened)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound && options.create => {
            create(path, options, flush)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(from_io(
            &error,
            format!(
                "there is no region at {region}; if it lies on a file system of its own, see that this is mounted (a new region is made by \
                 formatting one, with its size)"
            ),
        )),
        Err(error) => Err(from_io(&error, format!("cannot look at the region {region}"))),
    }
}

pub(crate) fn refuse(kind: ErrorKind, text: String) -> Error {
    Error::new(kind, text)
}

pub(crate) fn check_type(path: &Path, metadata: &Metadata) -> Result<()> {
    let region = path.display();
    let kind: FileType = metadata.file_type();
    if kind.is_file() || kind.is_char_device() {
        return Ok(());
    }
    if kind.is_block_device() {
        return Err(block_device(path, DeviceNumber::from_stat(metadata.rdev())));
    }
    let what = if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "not a file"
    };
    Err(refuse(
        ErrorKind::InvalidArgument,
        format!("{region} is {what}; a region is a file or a device-DAX device such as /dev/dax0.0"),
    ))
}

/// Whether [`only_own`](OpenOptions::only_own) refuses this file.
#[must_use]
pub fn is_of_others(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| refuse_foreign(path, &metadata).is_err())
}

/// A user who may write to the file can change it while the daemon uses it, and truncate it.
fn refuse_foreign(path: &Path, metadata: &Metadata) -> Result<()> {
    const OTHERS_WRITE: u32 = 0o022;
    if !metadata.is_file() {
        return Ok(());
    }
    let user = rustix::process::geteuid().as_raw();
    let region = path.display();
    let owner = metadata.uid();
    if owner != user && owner != 0 {
        return Err(refuse(
            ErrorKind::Permission,
            format!(
                "the region {region} belongs to user {owner}, who can change it under the daemon: chown it to user {user}"
            ),
        ));
    }
    if metadata.mode() & OTHERS_WRITE != 0 {
        let mode = metadata.mode() & 0o7777;
        return Err(refuse(
            ErrorKind::Permission,
            format!(
                "others than its owner may write to the region {region} (mode {mode:04o}): chmod go-w {region}"
            ),
        ));
    }
    Ok(())
}

/// The error for a block device: the kernel maps it through its page cache, even that of an NVDIMM, so no store would be
/// durable.
fn block_device(path: &Path, number: DeviceNumber) -> Error {
    let region = path.display();
    let directory = sysfs::of_block_device(Path::new(SYS), number);
    let namespace = directory.as_deref().and_then(sysfs::namespace_of);
    let of_memory = namespace.is_some()
        || path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("pmem"));
    let text = if of_memory {
        let namespace = namespace.unwrap_or_else(|| "<namespace>".to_owned());
        format!(
            "{region} is a block device: what is stored through it waits in the page cache and is lost with the \
             power. Use its memory in one of two ways: a DAX file system (mkfs.ext4 {region} && mount -o dax=always \
             {region} /mnt/pmem), then give a file on it; or device-DAX mode (ndctl create-namespace --force \
             --reconfig={namespace} --mode=devdax), then give the /dev/daxN.M that it prints"
        )
    } else {
        format!(
            "{region} is a block device, not memory. A region is a file on a DAX file system, or a device-DAX \
             device (/dev/daxN.M, made by ndctl create-namespace --mode=devdax); for a trial a file in /dev/shm \
             will do. A disk is cached as a backing device"
        )
    };
    refuse(ErrorKind::InvalidArgument, text)
}

fn open_existing(path: &Path) -> Result<File> {
    fs::OpenOptions::new()
        .read(true)
        .write(true)
        // The open must not block on a device that waits for a carrier.
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
        .map_err(|error| from_io(&error, format!("cannot open the region {} for writing", path.display())))
}

fn hold(path: &Path, file: File, with_hosts: bool) -> Result<Locked> {
    let region = path.display();
    match if with_hosts { Locked::take_with_hosts(file) } else { Locked::take(file) } {
        Ok(Ok(locked)) => Ok(locked),
        Ok(Err(file)) => {
            let who = cbd_holder::of_lock(file.as_fd()).unwrap_or_else(|| {
                "another daemon, program or tool that this user may not look at".to_owned()
            });
            Err(refuse(
                ErrorKind::Busy,
                format!(
                    "the region {region} is in use by {who}; a region has one owner: end that one, reach the data through it, or \
                     choose another region"
                ),
            ))
        }
        Err(error) => Err(from_io(&error, format!("cannot lock the region {region}"))),
    }
}

fn create(path: &Path, options: &OpenOptions, flush: Flush) -> Result<Opened> {
    let region = path.display();
    let Some(size) = options.size else {
        return Err(refuse(
            ErrorKind::InvalidArgument,
            format!("there is no region at {region}, and no size was given to make one"),
        ));
    };
    check_minimum(path, size)?;
    let file = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|error| from_io(&error, format!("cannot make the region {region}")))?;
    let file = hold(path, file, false)?;
    let opened = open_file(path, file, options, flush);
    if opened.is_err() {
        // This open created the file, and no other process can use it. If the removal fails, an empty file remains.
        let _ = fs::remove_file(path);
    }
    opened
}

pub(crate) fn check_minimum(path: &Path, size: u64) -> Result<()> {
    if size >= MINIMUM_SIZE {
        return Ok(());
    }
    let region = path.display();
    Err(refuse(
        ErrorKind::InvalidArgument,
        format!(
            "the region {region} has {}; a region has at least {}",
            cbd_types::Size(size),
            cbd_types::Size(MINIMUM_SIZE)
        ),
    ))
}

fn open_file(path: &Path, file: Locked, options: &OpenOptions, flush: Flush) -> Result<Opened> {
    let region = path.display();
    let looked = file.metadata().map_err(|error| from_io(&error, format!("cannot look at {region}")))?;
    let system = file::file_system(&file)
        .map_err(|error| from_io(&error, format!("cannot look at the file system of {region}")))?;
    let page = if system.magic == HUGETLBFS { system.block } else { file::page_size() };
    let wanted = options.size.unwrap_or(0);
    if looked.len() < wanted && !options.create {
        return Err(refuse(
            ErrorKind::InvalidArgument,
            format!("the region {region} has {} bytes, fewer than the {wanted} asked for", looked.len()),
        ));
    }
    check_minimum(path, looked.len().max(wanted))?;
    // An existing file is never extended beyond the requested size; a partial page at its end is not used.
    let length = if looked.len() < wanted {
        wanted.checked_next_multiple_of(page).ok_or_else(|| {
            refuse(ErrorKind::InvalidArgument, format!("{wanted} bytes are too many for the region {region}"))
        })?
    } else {
        looked.len() / page * page
    };
    check_minimum(path, length)?;
    let needed = options
        .needed
        .filter(|needed| wanted <= *needed && !options.create)
        .and_then(|needed| needed.checked_next_multiple_of(page));
    let space = Space { path, file: &file, looked: &looked, free: system.free };
    let (length, no_space) = space.allocate_or_needed(length, needed)?;
    let mapped = map_file(path, &file, length, page);
    if mapped.is_err() && looked.len() < length {
        let _ = file.set_len(looked.len());
    }
    let (memory, synchronous) = mapped?;
    let dax = file::is_dax(&file);
    let kind = promise::kind_of_file(synchronous, system.magic);
    let file_system = file_system_name(system.magic);
    let (durability, warnings) = promise::of_file(path, kind, dax, &looked, &file_system, flush);
    let mut opened = Opened {
        opening: Opening::default(),
        memory,
        kind,
        durability,
        file_system,
        pages_in_device: false,
        warnings,
        no_space,
        populate: options.populate,
        file: Some(file),
    };
    opened.advise();
    Ok(opened)
}

/// The mapping, and whether stores reach the medium without a system call.
fn map_file(path: &Path, file: &File, length: u64, page: u64) -> Result<(Memory, bool)> {
    let (size, page) = (address_space(path, length)?, address_space(path, page)?);
    let not_mapped = |error: io::Error| from_io(&error, format!("cannot map the region {}", path.display()));
    for (sharing, is_synchronous) in [(Sharing::Synchronous, true), (Sharing::Shared, false)] {
        if let Some(memory) = Memory::that_grows(file.as_fd(), size, sharing, page) {
            return Ok((memory?, is_synchronous));
        }
    }
    match Memory::of_file(file.as_fd(), size, Sharing::Synchronous) {
        Ok(memory) => return Ok((memory?, true)),
        // Kernels that do not support the flag return EINVAL.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => {}
        Err(error) => return Err(not_mapped(error)),
    }
    Ok((Memory::of_file(file.as_fd(), size, Sharing::Shared).map_err(not_mapped)??, false))
}

pub(crate) fn address_space(path: &Path, length: u64) -> Result<usize> {
    usize::try_from(length).ok().filter(|&length| isize::try_from(length).is_ok()).ok_or_else(|| {
        refuse(
            ErrorKind::InvalidArgument,
            format!("the region {} is larger than the address space", path.display()),
        )
    })
}

fn open_device(
    path: &Path,
    file: Locked,
    looked: &Metadata,
    options: &OpenOptions,
    flush: Flush,
) -> Result<Opened> {
    let region = path.display();
    let (directory, length, align) = device_length(path, looked)?;
    check_minimum(path, length)?;
    if let Some(wanted) = options.size.filter(|&wanted| wanted > length) {
        return Err(refuse(
            ErrorKind::InvalidArgument,
            format!("the device {region} has {length} bytes, fewer than the {wanted} asked for"),
        ));
    }
    // Every mapping of device-DAX is synchronous; it has no page cache, and refuses the flag.
    let (size, align) = (address_space(path, length)?, address_space(path, align)?);
    let memory = match Memory::that_grows(file.as_fd(), size, Sharing::Shared, align) {
        Some(memory) => memory?,
        None => Memory::of_device(file.as_fd(), size, Sharing::Shared)
            .map_err(|error| from_io(&error, format!("cannot map the device {region}")))??,
    };
    let (durability, warnings) = promise::of_device(&directory, flush);
    let mut opened = Opened {
        opening: Opening::default(),
        memory,
        file: Some(file),
        kind: Kind::DeviceDax,
        durability,
        file_system: "devdax".to_owned(),
        pages_in_device: sysfs::has_pages_in_device(&directory),
        warnings,
        no_space: None,
        populate: options.populate,
    };
    opened.advise();
    Ok(opened)
}

/// The sysfs directory of a device-DAX device, the number of its bytes that can be mapped, and their alignment.
pub(crate) fn device_length(path: &Path, looked: &Metadata) -> Result<(PathBuf, u64, u64)> {
    let directory = sysfs::of_character_device(Path::new(SYS), DeviceNumber::from_stat(looked.rdev()));
    let found = directory.and_then(|place| {
        let device = sysfs::device_dax(&place)?;
        Some((place, device.size / device.align * device.align, device.align))
    });
    found.ok_or_else(|| {
        refuse(
            ErrorKind::InvalidArgument,
            format!(
                "{} is a character device, but not a device-DAX device such as /dev/dax0.0",
                path.display()
            ),
        )
    })
}

impl Opened {
    fn advise(&mut self) {
        if let Err(error) = advise(&self.memory, 0, self.kind, self.populate)
            && error.raw_os_error() != Some(libc::EINVAL)
        {
            self.warnings.push(format!("not all of the region could be touched beforehand: {error}"));
        }
    }
}

/// Gives hints about the memory from byte `from` on to the kernel; a kernel that does not support one behaves as without it. Returns
/// whether all pages were touched, if that is to be done.
pub(crate) fn advise(memory: &Memory, from: usize, kind: Kind, populate: bool) -> io::Result<()> {
    // The user's data is not needed in a core dump of the daemon, and a child process does not need the region.
    let _ = memory.advise_from(from, Hint::DontDump);
    let _ = memory.advise_from(from, Hint::DontFork);
    if matches!(kind, Kind::Tmpfs | Kind::Memfd) {
        let _ = memory.advise_from(from, Hint::HugePages);
    }
    if !populate {
        return Ok(());
    }
    memory.advise_from(
        from,
        match kind {
            // Populating for writing would make every page of a file on a disk dirty.
            Kind::File => Hint::PopulateForReading,
            _ => Hint::Populate,
        },
    )
}

/// A region in an unnamed memory file; it is freed with the process.
pub(crate) fn anonymous(size: u64) -> Result<Opened> {
    let path = Path::new("(memory)");
    check_minimum(path, size)?;
    let length = size.checked_next_multiple_of(file::page_size()).ok_or_else(|| {
        refuse(ErrorKind::InvalidArgument, format!("{size} bytes are too many for a region"))
    })?;
    let no_memory = |error: io::Error| from_io(&error, format!("cannot get {length} bytes of memory"));
    let file = file::unnamed(c"cbd-region").map_err(no_memory)?;
    file::allocate(&file, length).map_err(no_memory)?;
    let memory =
        Memory::of_file(file.as_fd(), address_space(path, length)?, Sharing::Shared).map_err(no_memory)??;
    let mut opened = Opened {
        opening: Opening::default(),
        memory,
        file: None,
        kind: Kind::Memfd,
        durability: Durability::ProcessCrash,
        file_system: "tmpfs".to_owned(),
        pages_in_device: false,
        warnings: Vec::new(),
        no_space: None,
        populate: false,
    };
    opened.advise();
    collapse_now(&opened.memory);
    Ok(opened)
}
