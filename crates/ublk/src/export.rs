//! The export: a device in the kernel, the threads that serve it, and the link by which users know it.
//!
//! Always true here: what was started is stopped in the opposite order, whichever step of the start failed; a stop ends within its
//! time, even if the device below never answers; a device in use is stopped only by force. A device whose process is killed, or
//! that is [left](Ublk::leave), stays, and its clients wait for the next [start](Ublk::start) with the same mark.
//!
//! Left to others: which devices there are and what they are called.

use crate::abi;
use crate::device::{Device, Wish, disk_path};
use crate::life::Order;
use crate::parameters::{self, TRANSFER_BYTES_MAX};
use crate::service::{Service, ThreadSetup};
use crate::tag::Tag;
use cbd_export::BlockDevice;
use cbd_export::link::{self, Link};
use cbd_export::users::{self, BlockNode};
use cbd_types::{Context, Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// [`Options::depth`] for most.
pub const DEPTH: usize = 64;
/// How long a dropped export gets for what is in flight.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// How a device is exported.
#[derive(Clone)]
pub struct Options {
    /// The name of the device, such as `cbd0`.
    pub name: String,
    /// The mark by which a later process knows the device.
    pub tag: Tag,
    /// The link to make, such as `/dev/cbd0`.
    pub link: Option<PathBuf>,
    /// A folder in which a link with the name of the disk leads to [`link`](Self::link), made before the disk appears: from it a rule of udev
    /// learns which device the disk is.
    pub names: Option<PathBuf>,
    /// Queues at most, each with a thread. The kernel makes no more than there are processors, and shares them out.
    pub queues: usize,
    /// Requests of each queue that are in our hands at a time. Each takes 1 MiB of address space, and as much memory as was touched of it by
    /// then.
    pub depth: usize,
    /// Runs at the beginning of each thread.
    pub thread_setup: Option<ThreadSetup>,
    /// Whether writes are refused.
    pub read_only: bool,
}

/// Whether a device in use is stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopMode {
    /// Only if nobody uses it.
    WhenUnused,
    /// In any case: what is in flight completes, after that clients see errors.
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
    /// Makes a device, or takes the one over that a process before this left with the same mark, serves it and makes the link.
    ///
    /// # Errors
    /// What the system refused, in words. A new device is gone then; one that was left waits on.
    pub fn start(device: &Arc<dyn BlockDevice>, options: &Options) -> Result<Self> {
        let what = || format!("{} could not be exported through ublk", options.name);
        Self::bring_up(device, options).context(what)
    }

    fn bring_up(device: &Arc<dyn BlockDevice>, options: &Options) -> Result<Self> {
        let wish = wish(device.as_ref(), options)?;
        let kernel = Device::take_over_or_make(&wish)?;
        let disk = disk_path(kernel.number());
        let undo = Undo(Some(&kernel));
        if let Some(link) = &options.link {
            link::may_be_made(link, Some(&disk))?;
        }
        let name_link = note_name(options, &disk)?;
        let service = Service::start(&kernel, device, options.read_only, options.thread_setup.as_ref())?;
        let started = kernel.start().and_then(|()| kernel.disk_numbers());
        let numbers = match started {
            Ok(numbers) => numbers,
            Err(error) => {
                if !kernel.is_taken_over() {
                    // The kernel may wait for an answer that does not come; and without a disk all slots are over.
                    service.order(Order::Fail);
                    drop(undo);
                }
                return Err(service
                    .failure()
                    .map_or(error, |failure| Error::new(ErrorKind::System, failure)));
            }
        };
        undo.forget();
        let node = BlockNode { path: disk, device: numbers };
        let mut export = Self { device: kernel, service, node, link: None, name_link, running: true };
        match options.link.as_ref().map(|link| Link::create(link, &export.node.path)).transpose() {
            Ok(link) => export.link = link,
            Err(error) => {
                if export.is_taken_over() {
                    // Whoever waited for it waits on; else the drop takes it away.
                    let _ = export.leave(DROP_PATIENCE);
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

    /// By what users know the device: the link if there is one, else the disk.
    #[must_use]
    pub fn device_path(&self) -> &Path {
        self.link.as_ref().map_or_else(|| self.disk_path(), Link::path)
    }

    /// Whether clients of a process before this go on with it.
    #[must_use]
    pub const fn is_taken_over(&self) -> bool {
        self.device.is_taken_over()
    }

    /// Queues, and requests that each can have in our hands.
    #[must_use]
    pub const fn queues(&self) -> (u16, u16) {
        let (queues, depth, _) = self.device.shape();
        (queues, depth)
    }

    /// Whether the disk is gone.
    #[must_use]
    pub const fn is_stopped(&self) -> bool {
        !self.running
    }

    /// Why the export does not serve any more, although it was not stopped.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.service.failure()
    }

    /// By whom the device is used, as a sentence: mounted, stacked upon, used as swap space, open in a process.
    ///
    /// # Errors
    /// When the system cannot be asked.
    pub fn is_busy(&self) -> Result<Option<String>> {
        is_busy(&self.node, self.link.as_ref().map(Link::path))
    }

    /// Takes the device away: link, disk and device, within about `timeout`.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if somebody uses it and `mode` is not force; then it goes on as before. By force, [`ErrorKind::TimedOut`] says that
    /// threads still wait for the device below; clients see errors all the same.
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
            // The link goes first, so that it never points to what may be somebody else's device.
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
            return self.clear_away(end).and(stopped);
        }
        self.clear_away(end)
    }

    /// What is in flight gets half of the time; then it is answered with errors.
    fn stop_by_force(&self, end: Instant) -> Result<()> {
        let patience = end.saturating_duration_since(Instant::now());
        std::thread::scope(|scope| {
            let (stopped, stop) = std::sync::mpsc::channel();
            let device = &self.device;
            let stopping = std::thread::Builder::new().name("cbd-ublk-stop".to_owned());
            if stopping.spawn_scoped(scope, move || stopped.send(device.stop(patience))).is_err() {
                // Without a thread nobody would notice that the time is half over, so what is in flight gets none.
                self.service.order(Order::Fail);
                return device.stop(patience);
            }
            if let Ok(result) = stop.recv_timeout(patience / 2) {
                return result;
            }
            self.service.order(Order::Fail);
            stop.recv().unwrap_or(Ok(()))
        })
    }

    /// The disk is gone, and with it all slots: so are the threads, if the device below has nothing more.
    fn clear_away(&mut self, end: Instant) -> Result<()> {
        self.running = false;
        let ended = self.service.join(end);
        self.device.delete();
        if let Some(name) = self.name_link.take() {
            // One that stays is replaced when another disk gets its name.
            let _ = std::fs::remove_file(name);
        }
        if ended {
            return Ok(());
        }
        let text = format!("threads of {} still wait for the device below", self.node.path.display());
        Err(Error::new(ErrorKind::TimedOut, text))
    }

    /// Ends the threads and leaves the device: its clients wait until a process takes it over. What the device below has is answered
    /// first, if that does not take longer than `timeout`; else the next process is asked for it again.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if threads still wait for the device below: only the end of the process leaves the device then.
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
        // Nobody is left to be told.
        let _ = self.stop(StopMode::Force, DROP_PATIENCE);
    }
}

/// Takes a device back whose start did not come to its end. One that was taken over is left.
struct Undo<'a>(Option<&'a Device>);

impl Undo<'_> {
    fn forget(mut self) {
        self.0 = None;
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if let Some(device) = self.0.filter(|device| !device.is_taken_over()) {
            let _ = device.stop(DROP_PATIENCE);
            device.delete();
        }
    }
}

/// By whom a device or a partition of it is used, as a sentence.
///
/// # Errors
/// When the system cannot be asked.
pub fn is_busy(node: &BlockNode, link: Option<&Path>) -> Result<Option<String>> {
    for part in node.with_partitions() {
        let link = link.filter(|_| part == *node);
        if let Some(sentence) = users::mounted_or_held(&part, link)? {
            return Ok(Some(sentence));
        }
        if let Some(sentence) = users::mounted_in_another_namespace(&part, link) {
            return Ok(Some(sentence));
        }
        if let Some(who) = users::opened_by(part.device) {
            return Ok(Some(format!("{} is open in {who}", link.unwrap_or(&part.path).display())));
        }
    }
    Ok(None)
}

fn wish(device: &dyn BlockDevice, options: &Options) -> Result<Wish> {
    let wrong = |text: String| Error::new(ErrorKind::InvalidArgument, text);
    let number = |value: usize, largest: usize, what: &str| {
        u16::try_from(value)
            .ok()
            .filter(|&value| value > 0 && usize::from(value) <= largest)
            .ok_or_else(|| wrong(format!("{value} is no number of {what}; take 1 to {largest}")))
    };
    let name = &options.name;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > 63 || name.starts_with('.') || !name.bytes().all(plain) {
        return Err(wrong(format!(
            "{name:?} is no name for a device; take letters, digits, '-', '_' and '.'"
        )));
    }
    Ok(Wish {
        tag: options.tag,
        queues: number(options.queues, abi::QUEUES_MAX, "queues")?,
        depth: number(options.depth, abi::DEPTH_MAX, "requests of a queue")?,
        buffer_bytes: TRANSFER_BYTES_MAX as u32,
        parameters: parameters::of(&device.geometry(), options.read_only)?,
    })
}

/// Says which device the disk will be, for udev.
fn note_name(options: &Options, disk: &Path) -> Result<Option<PathBuf>> {
    let (Some(folder), Some(link), Some(name)) = (&options.names, &options.link, disk.file_name()) else {
        return Ok(None);
    };
    let note = folder.join(name);
    let failed = |error: &std::io::Error| cbd_export::system_error(note.display(), error);
    cbd_export::folders::own_folder(folder, 0o755)?;
    match std::fs::remove_file(&note) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(&error)),
        _ => std::os::unix::fs::symlink(link, &note).map_err(|error| failed(&error))?,
    }
    Ok(Some(note))
}
