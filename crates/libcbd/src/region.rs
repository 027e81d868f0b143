//! Regions: opening and formatting, their content, attaching disks.
//!
//! Invariants: a region is locked as long as a [`Region`], a device or a queue of it lives. A disk that has a row never gets a
//! second one, whichever path is used.
//!
//! Elsewhere: the implementation (`cbd-runtime`, `cbd-engine`).

use crate::Device;
use crate::device::Running;
use cbd_backing::{DISK_TIMEOUT, after_predecessor, refuse_file_beneath_loop_device};
use cbd_engine::{BackendEntry, Consistency, FormatOptions, Settings, Transport};
use cbd_pmem::{Info, Mapping, OpenOptions};
use cbd_runtime::disk::{default_handlers, entries, refuse_overlap};
use cbd_runtime::moved::{refuse_former, settle};
use cbd_runtime::presence::{Presence, machine_name};
use cbd_runtime::region::{
    self, Before, REGION_TIMEOUT, bytes_used, check_host_name, open_transport, require_persistent,
    sync_region_at_end,
};
use cbd_runtime::{Disk, NewBackend, ProcessEnvironment, RequestedSettings, RunOptions, RunningBackend};
use cbd_types::{
    BackendId, Context, Durability, Error, ErrorKind, HostId, Pmem, Region as Memory, Result, uuid_text,
};
use parking_lot::Mutex;
use std::path::Path;
use std::sync::{Arc, Weak};

/// The parameters with which a region is opened. The default opens an existing one.
#[derive(Clone, Default, Debug)]
pub struct RegionOptions {
    /// Format the region with a new transport. Its content is lost.
    pub format: Option<Format>,
    /// The minimum size of the region in bytes; a file that is created gets this size.
    pub size: Option<u64>,
    /// The host to act as: a daemon that will serve the same backends later needs the same name. `None`: the
    /// host of the region, or the machine's name if it has none yet.
    pub host: Option<String>,
    /// Refuse a region that does not survive a power failure.
    pub require_persistent: bool,
}

/// The parameters with which a region is formatted.
#[derive(Clone, Copy, Default, Debug)]
pub struct Format {
    /// Bytes of a segment, a power of two; `None`: derived from the region's size.
    pub segment_size: Option<u64>,
    /// Format even if the region holds a transport or other data, which is then lost.
    pub force: bool,
}

impl RegionOptions {
    /// A new region of at least `size` bytes.
    #[must_use]
    pub fn format(size: u64) -> Self {
        Self { format: Some(Format::default()), size: Some(size), ..Self::default() }
    }
}

/// The parameters with which a disk is attached to a region. Options that are set must match those of a cache that the disk
/// already has.
#[derive(Clone, Copy, Default, Debug)]
pub struct DeviceOptions {
    /// Bytes of its cache; 0 for none. `None`: all free space for a new disk.
    pub cache_size: Option<u64>,
    /// Whether data has checksums; `None`: a new cache has them.
    pub data_crc: Option<bool>,
    /// The order of writeback to the disk.
    pub consistency: Option<Consistency>,
}

/// The properties of a region.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegionInfo {
    /// The transport's identity.
    pub uuid: String,
    /// Bytes of the mapping.
    pub size: u64,
    /// Bytes of a segment.
    pub segment_size: u64,
    /// Bytes that are free for new caches.
    pub free_bytes: u64,
    /// This process's host: its row and its name.
    pub host: (u32, String),
    /// The failures that a completed write survives.
    pub durability: Durability,
    /// The kind of the mapping and its copy methods, in one line.
    pub description: String,
    /// Warnings for the user.
    pub warnings: Vec<String>,
}

/// The devices that are open in this process.
pub(crate) type OpenDevices = Vec<(BackendId, Weak<Running>)>;

/// The state that a region, its devices and its queues share.
pub(crate) struct Held {
    /// Dropped before the transport.
    _presence: Option<Presence>,
    pub(crate) transport: Arc<Transport<ProcessEnvironment>>,
    environment: Arc<ProcessEnvironment>,
    path: String,
    /// The id of the process that opened the region.
    process: u32,
    host: HostId,
    mapping: Info,
    description: String,
    /// The devices that are open in this process. The list is locked while a disk is attached, so that one disk gets one row.
    open: Mutex<OpenDevices>,
}

/// An open region.
pub struct Region {
    held: Arc<Held>,
}

impl std::fmt::Debug for Region {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Region({})", self.held.path)
    }
}

impl Region {
    /// Opens, locks and maps the region at `path`, and formats it on request.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] with the present owner, also on another machine, or the loop device that uses the file as its backing file;
    /// [`ErrorKind::NotFound`]; [`ErrorKind::AlreadyExists`] or [`ErrorKind::Foreign`] when the region to be formatted holds
    /// data; [`ErrorKind::Damaged`]; [`ErrorKind::Unsupported`] for a region that does not survive a power failure although the
    /// options require it; [`ErrorKind::InvalidArgument`].
    pub fn open(path: impl AsRef<Path>, options: &RegionOptions) -> Result<Self> {
        let path = text_of(path.as_ref())?;
        if let Some(host) = &options.host {
            check_host_name(host)?;
        }
        let before = Before::look(&path);
        let opened = Self::open_at(&path, options);
        if options.format.is_some() && opened.as_ref().is_err_and(|error| error.kind() != ErrorKind::Busy) {
            before.restore(&path);
        }
        opened
    }

    fn open_at(path: &str, options: &RegionOptions) -> Result<Self> {
        let how = OpenOptions {
            size: options.size,
            create: options.format.is_some(),
            needed: bytes_used(Path::new(path)),
            ..OpenOptions::default()
        };
        refuse_file_beneath_loop_device(Path::new(path))?;
        let mapping = after_predecessor(REGION_TIMEOUT, || Mapping::open(path, &how))?;
        let info = mapping.info();
        if options.require_persistent {
            require_persistent(path, &info)?;
        }
        let description = mapping.describe();
        let format = options.format.map(|format| region::Format {
            options: FormatOptions {
                segment_size: format.segment_size,
                force: format.force,
                ..FormatOptions::default()
            },
            shared: false,
        });
        let environment = Arc::new(ProcessEnvironment::new());
        let region = Memory::new(mapping);
        if format.is_none() && Transport::<ProcessEnvironment>::is_shared(&region).is_ok_and(|shared| shared)
        {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the region {path} is shared by several hosts: it is reached through the daemon of one of them"
                ),
            ));
        }
        let name = options.host.clone().unwrap_or_else(machine_name);
        let region::OpenTransport { transport, presence, .. } =
            open_transport(Arc::clone(&environment), region, path, &name, format.as_ref())?;
        let host = act_as(&transport, options.host.as_deref())?;
        let path = path.to_owned();
        let open = Mutex::new(Vec::new());
        let process = std::process::id();
        let held = Held {
            _presence: presence,
            transport,
            environment,
            path,
            process,
            host,
            mapping: info,
            description,
            open,
        };
        Ok(Self { held: Arc::new(held) })
    }

    /// The properties of the region.
    #[must_use]
    pub fn info(&self) -> RegionInfo {
        let held = &*self.held;
        let info = held.transport.info();
        let name = held.transport.hosts().into_iter().find(|host| host.id == held.host);
        let mut warnings = held.mapping.warnings.clone();
        warnings.extend(entries(&held.transport).1);
        if held.mapping.durability != Durability::PowerFail {
            warnings.push(
                "this region does not survive a power failure: what is dirty in it is lost with the machine"
                    .to_owned(),
            );
        }
        RegionInfo {
            uuid: uuid_text(info.uuid),
            size: held.mapping.size,
            segment_size: info.layout.segment_size,
            free_bytes: u64::from(info.free_segments) * info.layout.segment_size,
            host: (held.host.0, name.map(|host| host.name).unwrap_or_default()),
            durability: held.mapping.durability,
            description: held.description.clone(),
            warnings,
        }
    }

    /// The disks that are recorded in the region, including those of other hosts. Unreadable rows are left out;
    /// [`info`](Self::info) warns of them.
    #[must_use]
    pub fn backends(&self) -> Vec<BackendEntry> {
        entries(&self.held.transport).0
    }

    /// Attaches the disk at `path` to the region. If the region already has a backend of this disk, the call opens it, whichever
    /// process created it.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] when the disk, or its cache, is in use; [`ErrorKind::Exchanged`] when another disk is at the path of
    /// the recorded one; [`ErrorKind::NoSpace`] when the region has no space for the cache; [`ErrorKind::InvalidArgument`] for
    /// options that differ from the recorded ones.
    pub fn attach(&self, path: impl AsRef<Path>, options: &DeviceOptions) -> Result<Device> {
        let path = text_of(path.as_ref())?;
        let mut open = self.held.open.lock();
        let mut known = self.backends();
        if let Some(entry) = known.iter_mut().find(|entry| entry.path == path) {
            settle(&self.held.transport, entry, &path)?;
            return self.take_up(entry, &path, options, &mut open);
        }
        let disk = Disk::inspect(&path)?;
        refuse_former(&self.held.transport, &disk, &path)?;
        if let Some(place) = known.iter().position(|entry| disk.is_of(entry)) {
            let mut entry = known.swap_remove(place);
            settle(&self.held.transport, &mut entry, &path)?;
            let device = self.take_up(&entry, &path, options, &mut open)?;
            // The disk has another path than the recorded one: record the new path for the next start.
            self.held.transport.update_path(entry.id, &path)?;
            return Ok(device);
        }
        refuse_overlap(&path, &disk, &known)?;
        self.create(&path, &disk, options, &mut open)
    }

    /// Opens the backend `id`, with the disk at its recorded path.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], and the errors of [`attach`](Self::attach).
    pub fn open_device(&self, id: BackendId) -> Result<Device> {
        let entry = self.held.transport.backend(id)?;
        self.take_up(&entry, &entry.path, &DeviceOptions::default(), &mut self.held.open.lock())
    }

    fn take_up(
        &self,
        entry: &BackendEntry,
        path: &str,
        options: &DeviceOptions,
        open: &mut OpenDevices,
    ) -> Result<Device> {
        let held = &self.held;
        open.retain(|(_, running)| running.strong_count() > 0);
        if open.iter().any(|(id, _)| *id == entry.id) {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("backend {} ({path}) is open in this program already", entry.id),
            ));
        }
        if entry.host != held.host {
            let hosts = held.transport.hosts();
            let name = hosts.into_iter().find(|host| host.id == entry.host).map(|host| host.name);
            return Err(Error::new(
                ErrorKind::Stopped,
                format!(
                    "backend {} ({path}) belongs to host {} ({}); open the region as that host",
                    entry.id,
                    entry.host,
                    name.unwrap_or_default()
                ),
            ));
        }
        let requested = RequestedSettings {
            data_crc: options.data_crc,
            cache_bytes: options.cache_size,
            shared: None,
            handlers: None,
            consistency: options.consistency,
            cache_mode: None,
            name: None,
        };
        requested.check(entry, held.transport.info().layout.segment_size)?;
        // A predecessor that was just killed may still have writes in flight in the kernel.
        let started = after_predecessor(DISK_TIMEOUT, || held.start(entry, path))?;
        Ok(Device::new(Arc::clone(held), entry.id, path, started, open))
    }

    fn create(
        &self,
        path: &str,
        disk: &Disk,
        options: &DeviceOptions,
        open: &mut OpenDevices,
    ) -> Result<Device> {
        let held = &self.held;
        let info = held.transport.info();
        let free = u64::from(info.free_segments) * info.layout.segment_size;
        let new = NewBackend {
            host: held.host,
            path: path.to_owned(),
            cache_bytes: Some(options.cache_size.unwrap_or(free)).filter(|&bytes| bytes > 0),
            handlers: default_handlers(),
            data_crc: options.data_crc.unwrap_or(true),
            settings: Settings {
                consistency: options.consistency.unwrap_or_default(),
                ..Settings::default()
            },
            name: None,
        };
        let id = new.create(&held.transport, disk).context(|| format!("attaching {path}"))?;
        match held.transport.backend(id).and_then(|entry| held.start(&entry, path)) {
            Ok(started) => Ok(Device::new(Arc::clone(held), id, path, started, open)),
            // No data was written yet.
            Err(error) => Err(match held.transport.remove_backend(id) {
                Ok(()) => error,
                Err(second) => error.while_doing(format!(
                    "backend {id} did not start, and cannot be removed either ({})",
                    second.line()
                )),
            }),
        }
    }

    /// The number of devices and queues on the region.
    #[must_use]
    pub fn users(&self) -> usize {
        Arc::strong_count(&self.held) - 1
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // No device or queue is left, since each holds a reference to this value. In a forked child they belong to its parent.
        if self.process == std::process::id() {
            sync_region_at_end(&self.transport, &self.path);
        }
    }
}

impl Held {
    fn start(&self, entry: &BackendEntry, path: &str) -> Result<(RunningBackend, Vec<String>)> {
        RunningBackend::start(&self.transport, &self.environment, entry, path, RunOptions::plain(&self.path))
    }

    /// The failure of the region's memory, or the loss of the region to another host, if any.
    pub(crate) fn failed(&self) -> Option<Error> {
        let region = self.transport.region();
        let failed = |at| {
            let text = format!(
                "the region's memory failed at byte {at}: what is written from now on may not be durable; replace it"
            );
            Error::new(ErrorKind::Media, text)
        };
        region.memory().failed().map(|at| region.taken().unwrap_or_else(|| failed(at)))
    }

    /// Removes a backend whose cache is closed from the region, with the block devices that a daemon created
    /// on it.
    pub(crate) fn remove(&self, id: BackendId) -> Result<()> {
        for blkdev in self.transport.blkdevs().iter().filter(|blkdev| blkdev.backend == id) {
            self.transport.remove_blkdev(blkdev.id)?;
        }
        self.transport.remove_backend(id)
    }
}

/// The row of this process's host.
fn act_as(transport: &Transport<ProcessEnvironment>, wanted: Option<&str>) -> Result<HostId> {
    if let Some(name) = wanted {
        return transport.register_host(name, None);
    }
    match &transport.hosts()[..] {
        [] => transport.register_host(&machine_name(), None),
        [only] => Ok(only.id),
        several => {
            let names: Vec<&str> = several.iter().map(|host| host.name.as_str()).collect();
            Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("the region has several hosts ({}): say as which to open it", names.join(", ")),
            ))
        }
    }
}

/// A path as the tables store it: absolute, UTF-8, without control characters.
fn text_of(path: &Path) -> Result<String> {
    let malformed = |why: &str| {
        Error::new(ErrorKind::InvalidArgument, format!("the path {} is no path: {why}", path.display()))
    };
    let absolute = std::path::absolute(path).map_err(|error| malformed(&error.to_string()))?;
    let text = absolute.to_str().ok_or_else(|| malformed("it is not UTF-8"))?;
    if text.bytes().any(|byte| byte.is_ascii_control()) {
        return Err(malformed("it has control characters"));
    }
    Ok(text.to_owned())
}

#[cfg(test)]
#[path = "closed_queues_tests.rs"]
mod closed_queues;
