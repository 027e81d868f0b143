//! The export: a device in the kernel, the threads that serve it, and the link by which users access it.
//!
//! Invariants: started parts are stopped in reverse order, whichever step of the start failed; a stop ends within its
//! timeout, even if the device below never responds; a device in use is stopped only with force. A device whose process
//! is killed, or that is [left](Ublk::leave), stays, and its clients wait for the next [start](Ublk::start) with the
//! same mark.
//!
//! Elsewhere: the list of devices and their names.

use crate::abi;
use crate::device::{Device, DeviceRequest, disk_path};
use crate::parameters::{self, SECTOR, TRANSFER_BYTES_MAX};
use crate::service::{Service, ThreadSetup};
use crate::tag::Tag;
use crate::thread_control::Order;
use cbd_export::BlockDevice;
use cbd_export::link::{self, Link};
use cbd_export::users::{self, BlockNode};
use cbd_types::{Context, Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The default of [`Options::depth`].
pub const DEPTH: usize = 64;
/// Time that a dropped export grants to requests in flight.
const DROP_TIMEOUT: Duration = Duration::from_secs(5);

/// How a device is exported.
#[derive(Clone)]
pub struct Options {
    /// The name of the device, such as `cbd0`.
    pub name: String,
    /// The mark by which a later process recognizes the device.
    pub tag: Tag,
    /// The link to create, such as `/dev/cbd0`.
    pub link: Option<PathBuf>,
    /// A folder with a symbolic link from the name of the disk to [`link`](Self::link), created before the disk
    /// appears: a udev rule finds there which device the disk is.
    pub names: Option<PathBuf>,
    /// Queues at most, each with a thread. The kernel creates no more than there are processors, and distributes the
    /// processors among the queues.
    pub queues: usize,
    /// Requests of each queue that the daemon accepts at a time. Each takes 1 MiB of address space, and as much memory
    /// as was accessed of it.
    pub depth: usize,
    /// Runs at the beginning of each thread.
    pub thread_setup: Option<ThreadSetup>,
    /// Whether writes are refused.
    pub read_only: bool,
}

/// How a device in use is treated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopMode {
    /// Stop only if the device is not in use.
    WhenUnused,
    /// Stop in any case: requests in flight complete, after that clients see errors.
    Force,
}

/// A device that is exported through ublk.
///
/// Dropping one that was neither stopped nor left stops it by force.
pub struct Ublk {
    device: Device,
    service: Service,
    node: BlockNode,
    link: Option<Link>,
    name_link: Option<PathBuf>,
    running: bool,
}

impl std::fmt::Debug for Ublk {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Ublk").field("disk", &self.node.path).finish_non_exhaustive()
    }
}

impl Ublk {
    /// Creates a device, or takes over the one that an earlier process left with the same mark, serves it and creates
    /// the link.
    ///
    /// # Errors
    /// The refused step, as text. A new device is then removed; a device that was taken over keeps its clients waiting.
    pub fn start(device: &Arc<dyn BlockDevice>, options: &Options) -> Result<Self> {
        let what = || format!("{} could not be exported through ublk", options.name);
        Self::start_device(device, options).context(what)
    }

    fn start_device(device: &Arc<dyn BlockDevice>, options: &Options) -> Result<Self> {
        let request = request(device.as_ref(), options)?;
        let kernel = Device::take_over_or_create(&request)?;
        let disk = disk_path(kernel.number());
        let removal = RemoveOnFailure(Some(&kernel));
        if let Some(link) = &options.link {
            link::may_be_made(link, Some(&disk))?;
        }
        let name_link = record_name(options, &disk)?;
        let service = Service::start(&kernel, device, options.read_only, options.thread_setup.as_ref())?;
        let started = kernel.start().and_then(|()| kernel.disk_numbers());
        let numbers = match started {
            Ok(numbers) => numbers,
            Err(error) => {
                if !kernel.is_taken_over() {
                    // The start command may wait for replies that do not arrive; without a disk all slots end.
                    service.order(Order::Fail);
                    drop(removal);
                }
                return Err(service
                    .failure()
                    .map_or(error, |failure| Error::new(ErrorKind::System, failure)));
            }
        };
        removal.cancel();
        if kernel.sectors() < request.parameters.basic.sectors {
            // It has grown while it had no server, or its former server could not change the size. If the driver refuses,
            // users see the former size, and their requests continue.
            let _ = kernel.grow(request.parameters.basic.sectors);
        }
        let node = BlockNode { path: disk, device: numbers };
        let mut export = Self { device: kernel, service, node, link: None, name_link, running: true };
        match options.link.as_ref().map(|link| Link::create(link, &export.node.path)).transpose() {
            Ok(link) => export.link = link,
            Err(error) => {
                if export.is_taken_over() {
                    // Clients of a device that was taken over keep waiting; the drop removes a new device.
                    let _ = export.leave(DROP_TIMEOUT);
                }
                return Err(error);
            }
        }
        Ok(export)
    }

    /// The node of the disk, `/dev/ublkbN`.
    #[must_use]
    pub fn disk_path(&self) -> &Path {
        &self.node.path
    }

    /// The path by which users know the device: the link if there is one, else the disk.
    #[must_use]
    pub fn device_path(&self) -> &Path {
        self.link.as_ref().map_or_else(|| self.disk_path(), Link::path)
    }

    /// Whether it was taken over with the clients of an earlier process.
    #[must_use]
    pub const fn is_taken_over(&self) -> bool {
        self.device.is_taken_over()
    }

    /// Queues, and the slots of each.
    #[must_use]
    pub const fn queues(&self) -> (u16, u16) {
        let (queues, depth, _) = self.device.dimensions();
        (queues, depth)
    }

    /// Whether the disk was removed.
    #[must_use]
    pub const fn is_stopped(&self) -> bool {
        !self.running
    }

    /// The error of a thread that stopped serving without an order.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.service.failure()
    }

    /// Serves the device to its new end, `size` bytes, and tells its users. Returns whether they see that now: a driver
    /// before Linux 6.16 cannot change the size of a disk.
    ///
    /// # Errors
    /// The kernel's error; users see the former size then.
    pub fn grow(&self, size: u64) -> Result<bool> {
        self.service.grow(size);
        self.device.grow(size / SECTOR)
    }

    /// The use of the device, as a sentence: mounted, stacked upon, used as swap space, open in a process.
    ///
    /// # Errors
    /// When a query to the system fails.
    pub fn is_busy(&self) -> Result<Option<String>> {
        is_busy(&self.node, self.link.as_ref().map(Link::path))
    }

    /// Removes the device: link, disk and device, within about `timeout`.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if the device is in use and `mode` is not force; it then stays available. With force,
    /// [`ErrorKind::TimedOut`] if threads still wait for the device below; clients see errors nevertheless.
    pub fn stop(&mut self, mode: StopMode, timeout: Duration) -> Result<()> {
        if !self.running {
            return Ok(());
        }
        let end = Instant::now() + timeout;
        if mode == StopMode::WhenUnused {
            let path = self.device_path().display().to_string();
            let refused = |sentence: String| {
                let text = format!("{sentence}; {path} cannot be stopped while it is used");
                Error::new(ErrorKind::Busy, text)
            };
            if let Some(sentence) = self.is_busy()? {
                return Err(refused(sentence));
            }
            // The link first, so that it never points to a device of another owner.
            let removed = self.link.take();
            removed.iter().for_each(Link::remove);
            if let Err(error) = self.device.stop_if_unused(timeout) {
                self.link = removed.and_then(|link| Link::create(link.path(), &self.node.path).ok());
                return Err(match self.is_busy() {
                    Ok(Some(sentence)) if error.kind() == ErrorKind::Busy => refused(sentence),
                    _ => error,
                });
            }
        } else {
            self.link.take().iter().for_each(Link::remove);
            let stopped = self.stop_by_force(end);
            return self.remove_device(end).and(stopped);
        }
        self.remove_device(end)
    }

    /// Lets requests in flight complete for half of the time; then they are answered with errors.
    fn stop_by_force(&self, end: Instant) -> Result<()> {
        let timeout = end.saturating_duration_since(Instant::now());
        std::thread::scope(|scope| {
            let (stopped, stop) = std::sync::mpsc::channel();
            let device = &self.device;
            let stopping = std::thread::Builder::new().name("cbd-ublk-stop".to_owned());
            if stopping.spawn_scoped(scope, move || stopped.send(device.stop(timeout))).is_err() {
                // Without a thread there is no wait for half of the time, so requests in flight fail at once.
                self.service.order(Order::Fail);
                return device.stop(timeout);
            }
            if let Ok(result) = stop.recv_timeout(timeout / 2) {
                return result;
            }
            self.service.order(Order::Fail);
            stop.recv().unwrap_or(Ok(()))
        })
    }

    /// Removes the device after its disk. Without the disk all slots have ended, so the threads end as well, once the
    /// device below has no request in flight.
    fn remove_device(&mut self, end: Instant) -> Result<()> {
        self.running = false;
        let ended = self.service.join(end);
        self.device.delete();
        if let Some(name) = self.name_link.take() {
            // An entry that cannot be removed is replaced when another disk gets the name.
            let _ = std::fs::remove_file(name);
        }
        if ended {
            return Ok(());
        }
        let text = format!("threads of {} still wait for the device below", self.node.path.display());
        Err(Error::new(ErrorKind::TimedOut, text))
    }

    /// Ends the threads and leaves the device: its clients wait until a process takes it over. Requests that the device
    /// below executes are answered first, if that takes no longer than `timeout`; otherwise the next process receives
    /// them again.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if threads still wait for the device below; then the device is left only when the
    /// process ends. the device then.
    pub fn leave(mut self, timeout: Duration) -> Result<()> {
        self.running = false;
        self.service.order(Order::Leave);
        if self.service.join(Instant::now() + timeout) {
            return Ok(());
        }
        let text = format!("threads of {} still wait for the device below", self.node.path.display());
        Err(Error::new(ErrorKind::TimedOut, text))
    }
}

impl Drop for Ublk {
    fn drop(&mut self) {
        // There is no caller to report an error to.
        let _ = self.stop(StopMode::Force, DROP_TIMEOUT);
    }
}

/// Removes a device whose start failed, unless it was taken over.
struct RemoveOnFailure<'a>(Option<&'a Device>);

impl RemoveOnFailure<'_> {
    fn cancel(mut self) {
        self.0 = None;
    }
}

impl Drop for RemoveOnFailure<'_> {
    fn drop(&mut self) {
        if let Some(device) = self.0.filter(|device| !device.is_taken_over()) {
            let _ = device.stop(DROP_TIMEOUT);
            device.delete();
        }
    }
}

/// The use of a device or of a partition of it, as a sentence.
///
/// # Errors
/// When a query to the system fails.
pub fn is_busy(node: &BlockNode, link: Option<&Path>) -> Result<Option<String>> {
    for part in node.with_partitions() {
        let link = link.filter(|_| part == *node);
        if let Some(sentence) = users::mounted_or_held(&part, link)? {
            return Ok(Some(sentence));
        }
        if let Some(sentence) = users::mounted_in_another_namespace(&part, link) {
            return Ok(Some(sentence));
        }
        if let Some(process) = users::opened_by(part.device) {
            return Ok(Some(format!("{} is open in {process}", link.unwrap_or(&part.path).display())));
        }
    }
    Ok(None)
}

fn request(device: &dyn BlockDevice, options: &Options) -> Result<DeviceRequest> {
    let wrong = |text: String| Error::new(ErrorKind::InvalidArgument, text);
    let number = |value: usize, largest: usize, what: &str| {
        u16::try_from(value)
            .ok()
            .filter(|&value| value > 0 && usize::from(value) <= largest)
            .ok_or_else(|| wrong(format!("{value} is not a number of {what}; use 1 to {largest}")))
    };
    let name = &options.name;
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > 63 || name.starts_with('.') || !name.bytes().all(allowed) {
        return Err(wrong(format!(
            "{name:?} is not a name for a device; use letters, digits, '-', '_' and '.'"
        )));
    }
    Ok(DeviceRequest {
        tag: options.tag,
        queues: number(options.queues, abi::QUEUES_MAX, "queues")?,
        depth: number(options.depth, abi::DEPTH_MAX, "requests of a queue")?,
        buffer_bytes: TRANSFER_BYTES_MAX as u32,
        parameters: parameters::of(&device.geometry(), options.read_only)?,
    })
}

/// Records which device the disk will be, for udev.
fn record_name(options: &Options, disk: &Path) -> Result<Option<PathBuf>> {
    let (Some(folder), Some(link), Some(name)) = (&options.names, &options.link, disk.file_name()) else {
        return Ok(None);
    };
    let entry = folder.join(name);
    let failed = |error: &std::io::Error| cbd_export::system_error(entry.display(), error);
    cbd_export::folders::own_folder(folder, 0o755)?;
    match std::fs::remove_file(&entry) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(&error)),
        _ => std::os::unix::fs::symlink(link, &entry).map_err(|error| failed(&error))?,
    }
    Ok(Some(entry))
}
