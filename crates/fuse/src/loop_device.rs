//! The loop device over the file, and the thread that alone holds it open.
//!
//! Always true here: the device is bound with direct I/O, without a partition scan, and lets its file go by itself when its
//! last opener closes it (AUTOCLEAR). The keeper's descriptor of it lies in a table of the keeper's own, never in
//! the daemon's: when the daemon is killed, the kernel closes tables in any order, and closing a block device
//! waits for its I/O. In one table with the FUSE connection that wait could be for the very connection that
//! is closed next, and the process would never die. So nobody else in this process opens the device.
//!
//! A device that is to outlive the process is *entrusted* to the kernel: it does not let its file go by itself, and nobody here holds
//! it open. For whoever closes a block device last writes its pages out first, and a process that is killed would wait for pages
//! that only its successor can take. For the same reason the thread touches an entrusted device only to release it, to give it up, to ask
//! whether it is held, and to take a wish from it that a stop has left; for the first two nobody else holds the connection by then, so it ends with the process,
//! and every wait with it.
//!
//! A device is only touched while it stands on our file: somebody may have let an idle one go by hand (`losetup -d`), and its number is
//! another's then.
//!
//! Left to others: the file beneath ([`crate::worker`]), the link to the device ([`crate::link`]).

use crate::errors::system_error;
use crate::system::{self, LO_FLAGS_AUTOCLEAR, LO_FLAGS_DIRECT_IO, LO_FLAGS_READ_ONLY, LO_NAME_SIZE};
use cbd_types::{Context, Error, ErrorKind, Geometry, Result};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Loop devices tried before it is given up: another process may take the free one first.
const ATTEMPTS: usize = 64;
/// How long binding may take; the kernel asks the file for its size and flushes it once.
const BIND_PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks whether the last other opener (most often udev) has closed the device, or whether it is still: there is no event for it.
const RELEASE_INTERVAL: Duration = Duration::from_millis(20);
/// Looks in a row that find nothing in flight: between two requests of one writer there can be a moment.
const QUIET_LOOKS: u32 = 2;
/// Before the path in the name that a loop device carries.
pub const MARK: &str = "cbd:";
/// The most that goes through the loop device in one request: what one message carries.
const REQUEST_KIB_MAX: u64 = 1024;

/// What is bound to what.
#[derive(Clone, Debug)]
pub struct Binding {
    /// The file.
    pub file: PathBuf,
    /// What is in it.
    pub geometry: Geometry,
    /// Whether the device may not be written.
    pub read_only: bool,
}

/// A bound loop device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoopDevice {
    /// Its number.
    pub number: u32,
    /// Its node.
    pub path: PathBuf,
    /// Its device number, (major, minor).
    pub device: (u32, u32),
    /// What it tells its users.
    pub limits: QueueLimits,
}

impl LoopDevice {
    /// Whether it lets its file go when its last user closes it.
    pub fn goes_by_itself(&self) -> bool {
        read_setting(self.number, "loop/autoclear").is_some_and(|flag| flag == "1")
    }
}

/// What the kernel tells users of the loop device, and how it queues.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct QueueLimits {
    /// Logical sector in bytes.
    pub logical_block_size: u64,
    /// Largest discard in bytes; 0 where none is offered.
    pub discard_max_bytes: u64,
    /// Granularity of discards in bytes.
    pub discard_granularity: u64,
    /// Largest write of zeroes without data in bytes.
    pub write_zeroes_max_bytes: u64,
    /// Whether flushes are sent.
    pub write_back: bool,
    /// Whether forced writes are sent as such; otherwise as a write and a flush.
    pub fua: bool,
    /// Largest request in KiB.
    pub max_sectors_kb: u64,
    /// Requests in flight at most.
    pub nr_requests: u64,
}

enum Command {
    /// Whether somebody uses the device exclusively: a mount, a volume manager.
    ExclusiveElsewhere(Sender<Result<bool>>),
    /// Write out what the kernel still holds, and let the file go, if nobody else uses the device.
    Release { end: Instant, reply: Sender<Result<()>> },
    /// The device stays without anybody here that holds it.
    Entrust(Sender<Result<()>>),
    /// Close the device, whoever uses it.
    Abandon(Sender<Result<()>>),
}

/// Why a device was not released.
#[derive(Debug)]
pub struct NotReleased {
    /// In words.
    pub error: Error,
    /// The thread still waits for the device, and tells here when it is as it was.
    pub later: Option<Receiver<Result<()>>>,
}

/// The thread that holds a loop device.
#[derive(Debug)]
pub struct Keeper {
    commands: Sender<Command>,
    thread: Option<JoinHandle<()>>,
    /// Disconnected when the thread has ended.
    ended: Mutex<Receiver<()>>,
    device: LoopDevice,
    /// What it stands on.
    file: PathBuf,
}

impl Keeper {
    /// Binds a free loop device. Whoever serves the file must be serving already.
    ///
    /// # Errors
    /// When there is no loop device to be had, or the kernel can't bind one as it must be.
    pub fn start(binding: Binding) -> Result<Self> {
        let (bound, waiting) = mpsc::channel();
        let (commands, received) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let file = binding.file.clone();
        let thread = std::thread::Builder::new()
            .name("cbd-loop".into())
            .spawn(move || {
                // Dropped last.
                let _end: Sender<()> = end;
                match bind(&binding) {
                    Ok((file, device)) => {
                        let kept = device.clone();
                        if bound.send(Ok(device)).is_ok() {
                            keep(Some(file), &kept, &binding.file, &received);
                        }
                    }
                    Err(error) => {
                        let _ = bound.send(Err(error));
                    }
                }
            })
            .map_err(|error| system_error("no thread for the loop device", &error))?;
        let device = waiting.recv_timeout(BIND_PATIENCE).unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::TimedOut, "the loop device could not be bound within 30 seconds"))
        })?;
        Ok(Self { commands, thread: Some(thread), ended: Mutex::new(ended), device, file })
    }

    /// Takes care of a device that a process before this has entrusted to the kernel. Asks nothing of the file, which nobody may
    /// serve yet.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] when it is not bound to `file` any more.
    pub fn adopt(number: u32, file: &Path) -> Result<Self> {
        let path = PathBuf::from(format!("/dev/loop{number}"));
        if !is_bound_to(number, file) {
            let text = format!("{} is not bound to {} any more", path.display(), file.display());
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        let device = describe(path, number)?;
        let (commands, received) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let (kept, stands_on) = (device.clone(), file.to_owned());
        let thread = std::thread::Builder::new()
            .name("cbd-loop".into())
            .spawn(move || {
                // Dropped last.
                let _end: Sender<()> = end;
                match system::unshare_descriptors() {
                    Ok(()) => keep(None, &kept, &stands_on, &received),
                    // Whoever asks it for something is told that it is gone.
                    Err(_) => drop(received),
                }
            })
            .map_err(|error| system_error("no thread for the loop device", &error))?;
        let file = file.to_owned();
        Ok(Self { commands, thread: Some(thread), ended: Mutex::new(ended), device, file })
    }

    /// Lets the device outlive this process: it stays bound until it is released, and nobody here holds it open.
    ///
    /// # Errors
    /// When the kernel refuses; it is as it was.
    pub fn entrust(&self, patience: Duration) -> Result<()> {
        self.ask(patience, Command::Entrust)
    }

    /// The thread ends. A device that was entrusted stays.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if the thread still waits for the device after `patience`.
    pub fn leave(self, patience: Duration) -> Result<()> {
        let Self { commands, thread, ended, device, .. } = self;
        drop(commands);
        let ended = ended.into_inner().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(patience) == Err(mpsc::RecvTimeoutError::Timeout) {
            let text = format!("{} does not answer; I/O to it hangs", device.path.display());
            return Err(Error::new(ErrorKind::TimedOut, text));
        }
        if let Some(thread) = thread {
            // As in `join`.
            let _ = thread.join();
        }
        Ok(())
    }

    /// Waits until the kernel has no request in flight to the device; whether that came before `end`. What somebody has written who has
    /// closed the device since is in flight then: he is not seen to have it open any more, and his close waits.
    pub fn wait_until_still(&self, end: Instant) -> bool {
        let mut quiet_looks = 0;
        while quiet_looks < QUIET_LOOKS {
            quiet_looks = if is_still(self.device.number) { quiet_looks + 1 } else { 0 };
            if quiet_looks < QUIET_LOOKS {
                if Instant::now() >= end {
                    return false;
                }
                std::thread::sleep(RELEASE_INTERVAL);
            }
        }
        true
    }

    /// The device.
    pub const fn device(&self) -> &LoopDevice {
        &self.device
    }

    /// Whether it stands on its file still.
    pub fn is_bound(&self) -> bool {
        stands_on(self.device.number, &self.file)
    }

    /// Whether somebody uses the device exclusively, here or in another mount namespace.
    ///
    /// # Errors
    /// When the device cannot be opened, or does not answer within `patience`.
    pub fn exclusive_elsewhere(&self, patience: Duration) -> Result<bool> {
        self.ask(patience, Command::ExclusiveElsewhere)
    }

    /// Writes out what the kernel still holds for the device and lets the file go. After an error the device is as
    /// it was, or will be.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if somebody still uses the device at `end`.
    pub fn release(&self, end: Instant) -> std::result::Result<(), NotReleased> {
        let patience = end.saturating_duration_since(Instant::now()) + Duration::from_secs(1);
        let (reply, answer) = mpsc::channel();
        let refused = |error| NotReleased { error, later: None };
        self.commands.send(Command::Release { end, reply }).map_err(|_| refused(self.gone()))?;
        match answer.recv_timeout(patience) {
            Ok(released) => released.map_err(refused),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(refused(self.gone())),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                Err(NotReleased { error: self.hangs(), later: Some(answer) })
            }
        }
    }

    /// Closes the device: its file is let go when the last other user closes it too.
    ///
    /// # Errors
    /// When closing takes longer than `patience`.
    pub fn abandon(&self, patience: Duration) -> Result<()> {
        self.ask(patience, Command::Abandon)
    }

    /// Waits for the thread, which has ended or is about to.
    pub fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic of it was printed when it happened; there is nothing left to undo.
            let _ = thread.join();
        }
    }

    fn ask<T>(&self, patience: Duration, command: impl FnOnce(Sender<Result<T>>) -> Command) -> Result<T> {
        let (reply, answer) = mpsc::channel();
        self.commands.send(command(reply)).map_err(|_| self.gone())?;
        match answer.recv_timeout(patience) {
            Ok(answer) => answer,
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(self.gone()),
            Err(mpsc::RecvTimeoutError::Timeout) => Err(self.hangs()),
        }
    }

    fn gone(&self) -> Error {
        Error::new(ErrorKind::Stopped, format!("{} is released already", self.device.path.display()))
    }

    fn hangs(&self) -> Error {
        let text = format!("{} does not answer; I/O to it hangs", self.device.path.display());
        Error::new(ErrorKind::TimedOut, text)
    }
}

/// Whether a loop device stands on this file. Asks the kernel alone, not the file's server.
pub fn is_bound_to(number: u32, file: &Path) -> bool {
    read_setting(number, "loop/backing_file").is_some_and(|bound| Path::new(&bound) == file)
}

/// The same, also where the mount with the file is out of sight: then its path begins there.
fn stands_on(number: u32, file: &Path) -> bool {
    let out_of_sight = file.file_name().map(|name| Path::new("/").join(name));
    is_bound_to(number, file) || out_of_sight.is_some_and(|file| is_bound_to(number, &file))
}

/// Holds the device, unless it is entrusted, until it is told to let go, or whoever could tell is gone.
fn keep(mut held: Option<File>, device: &LoopDevice, file: &Path, commands: &Receiver<Command>) {
    let path = &device.path;
    while let Ok(command) = commands.recv() {
        match command {
            Command::ExclusiveElsewhere(reply) => {
                let answer = match open_exclusively(path) {
                    Ok(_) => Ok(false),
                    Err(_) if !stands_on(device.number, file) => Ok(false),
                    Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(true),
                    Err(error) => Err(system_error(path.display(), &error)),
                };
                let _ = reply.send(answer);
            }
            Command::Release { end, reply } => {
                let was_entrusted = held.is_none();
                let opened = match held.take() {
                    Some(held) => Ok(Some(held)),
                    None => {
                        open_ours(device, file).map_err(|error| (None, system_error(path.display(), &error)))
                    }
                };
                let released = opened.and_then(|opened| match opened {
                    Some(opened) => release(opened, device, end),
                    None => Ok(()),
                });
                match released {
                    Ok(()) => {
                        let _ = reply.send(Ok(()));
                        return;
                    }
                    Err((kept, error)) => {
                        // The attempt to clear it has left it with the wish to let go by itself.
                        if let Some(kept) = kept
                            && !(was_entrusted && entrust(&kept).is_ok())
                        {
                            held = Some(kept);
                        }
                        let _ = reply.send(Err(error));
                        if held.is_none() && !was_entrusted {
                            return;
                        }
                    }
                }
            }
            Command::Entrust(reply) => {
                let entrusted = match &held {
                    Some(held) => entrust(held),
                    None => {
                        open_ours(device, file).and_then(|opened| opened.as_ref().map_or(Ok(()), entrust))
                    }
                };
                if entrusted.is_ok() {
                    held = None;
                }
                let _ = reply.send(entrusted.map_err(|error| system_error(path.display(), &error)));
            }
            Command::Abandon(reply) => {
                let ours = held.take().map_or_else(|| open_ours(device, file), |held| Ok(Some(held)));
                if let Ok(Some(ours)) = ours {
                    reset(device.number);
                    // One that was entrusted does not go by itself.
                    let _ = system::loop_clear(ours.as_fd());
                }
                let _ = reply.send(Ok(()));
                return;
            }
        }
    }
}

/// Whether nothing is in flight to a loop device. Asks the kernel alone.
fn is_still(number: u32) -> bool {
    read_setting(number, "inflight").is_none_or(|text| text.split_whitespace().all(|count| count == "0"))
}

/// Takes the wish from a device to let its file go by itself.
fn entrust(device: &File) -> io::Result<()> {
    let mut info = system::loop_status(device.as_fd())?;
    info.flags &= !LO_FLAGS_AUTOCLEAR;
    system::loop_set_status(device.as_fd(), &info)
}

/// Lets the file of a device go that nobody of ours holds, at once or when its last user closes it. Its file has to be served, or its
/// connection to have ended.
pub fn let_go(number: u32) -> io::Result<()> {
    system::loop_clear(open_node(Path::new(&format!("/dev/loop{number}")))?.as_fd())
}

/// Lets the file go if nobody else uses the device; with an error comes what goes on holding it.
fn release(held: File, device: &LoopDevice, end: Instant) -> std::result::Result<(), (Option<File>, Error)> {
    let path = &device.path;
    if let Err(error) = held.sync_all() {
        let text = format!(
            "{}: what the kernel still held for it could not be written, and is lost",
            path.display()
        );
        return Err((Some(held), system_error(text, &error)));
    }
    if Instant::now() > end {
        // Nobody waits for the answer any more, and the device goes on as before.
        let text = format!("{}: what the kernel still held for it took too long to write", path.display());
        return Err((Some(held), Error::new(ErrorKind::TimedOut, text)));
    }
    let exclusive = match open_exclusively(path) {
        Ok(exclusive) => exclusive,
        Err(error) => return Err((Some(held), system_error(path.display(), &error))),
    };
    // 1. Nobody can mount it from here on. 2. As the only opener, clearing it also keeps new ones out.
    drop(held);
    loop {
        let cleared =
            system::loop_clear(exclusive.as_fd()).and_then(|()| system::loop_status(exclusive.as_fd()));
        match cleared {
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
                reset(device.number);
                return Ok(());
            }
            Ok(_) if Instant::now() < end => std::thread::sleep(RELEASE_INTERVAL),
            Ok(_) => {
                let held = open_node(path).ok();
                let text = format!("{} is open in another process", path.display());
                return Err((held, Error::new(ErrorKind::Busy, text)));
            }
            Err(error) => return Err((open_node(path).ok(), system_error(path.display(), &error))),
        }
    }
}

fn open_node(path: &Path) -> io::Result<File> {
    // Read-write, so that udev looks at the device anew only after it was let go for good.
    OpenOptions::new().read(true).open(path)
}

/// Opens a device if it stands on our file: as long as it is open it can come to stand on no other.
fn open_ours(device: &LoopDevice, file: &Path) -> io::Result<Option<File>> {
    if !stands_on(device.number, file) {
        return Ok(None);
    }
    let opened = open_node(&device.path)?;
    Ok(stands_on(device.number, file).then_some(opened))
}

fn open_exclusively(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path)
}

fn bind(binding: &Binding) -> Result<(File, LoopDevice)> {
    system::unshare_descriptors().map_err(|error| {
        system_error(
            "the loop device's thread cannot have descriptors of its own (it needs Linux 5.9)",
            &error,
        )
    })?;
    let file = OpenOptions::new()
        .read(true)
        .write(!binding.read_only)
        .custom_flags(libc::O_DIRECT)
        .open(&binding.file)
        .map_err(|error| system_error(binding.file.display(), &error))?;
    let control = open_control()?;
    for _ in 0..ATTEMPTS {
        let number = system::loop_get_free(control.as_fd()).map_err(|error| no_device(&error))?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = match open_or_make_node(&path, number) {
            Ok(device) => device,
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => continue,
            Err(error) => return Err(system_error(path.display(), &error)),
        };
        match configure(&device, &file, binding) {
            Ok(()) => return finish(device, path, number, binding),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => {
                let text = format!("{} cannot be bound to {}", path.display(), binding.file.display());
                return Err(system_error(text, &error)
                    .while_doing("a loop device with direct I/O, Linux 5.8 or newer"));
            }
        }
    }
    Err(Error::new(ErrorKind::Busy, "other processes took every free loop device first; try again"))
}

/// The door to loop devices.
pub fn open_control() -> Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/loop-control").map_err(|error| {
        system_error(
            "/dev/loop-control (loop devices need root and the kernel's loop module: modprobe loop)",
            &error,
        )
    })
}

fn no_device(error: &io::Error) -> Error {
    let text = "the kernel has no free loop device; let unused ones go with losetup -d";
    let error = system_error(text, error);
    if error.kind() == ErrorKind::System { Error::new(ErrorKind::NoSpace, error.line()) } else { error }
}

/// Opens the node; where /dev is not the kernel's own, a node for a device that was just made has to be made.
pub fn open_or_make_node(path: &Path, number: u32) -> io::Result<File> {
    let open = || OpenOptions::new().read(true).write(true).open(path);
    match open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let (major, minor) = device_number(number).ok_or(error)?;
            match system::make_block_node(path, major, minor) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
                _ => open(),
            }
        }
        opened => opened,
    }
}

fn configure(device: &File, file: &File, binding: &Binding) -> io::Result<()> {
    let read_only = if binding.read_only { LO_FLAGS_READ_ONLY } else { 0 };
    let flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO | read_only;
    system::loop_configure(
        device.as_fd(),
        file.as_fd(),
        binding.geometry.sector,
        flags,
        marked(&binding.file),
    )
}

/// The name that our loop devices carry: a mark and as much of the path as there is room for.
fn marked(file: &Path) -> [u8; LO_NAME_SIZE] {
    let mut name = [0; LO_NAME_SIZE];
    let text = MARK.as_bytes().iter().chain(file.as_os_str().as_bytes());
    name.iter_mut().take(LO_NAME_SIZE - 1).zip(text).for_each(|(place, &byte)| *place = byte);
    name
}

/// Sets what can be set, and looks at what became of it.
fn finish(device: File, path: PathBuf, number: u32, binding: &Binding) -> Result<(File, LoopDevice)> {
    let Binding { geometry, read_only, .. } = binding;
    if read_setting(number, "loop/dio").as_deref() != Some("1") {
        let text = format!("the kernel does not do direct I/O between {} and a FUSE file", path.display());
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    if !geometry.discard && !read_only {
        // The file system refuses this one, and with that the kernel offers no discards any more. (A setting would
        // do it too, but can't be taken back, and outlives the binding.) Where it goes on offering them, each is refused.
        let _ =
            system::discard(device.as_fd(), 0, u64::from(geometry.discard_granularity.max(geometry.sector)));
    }
    let largest = read_number(number, "queue/max_hw_sectors_kb").min(REQUEST_KIB_MAX);
    write_setting(number, "queue/max_sectors_kb", largest)?;
    let described = describe(path, number)?;
    // From here on it is held open for reading only: closing a device that was open for writing makes udev read it.
    let held = open_node(&described.path).map_err(|error| system_error(described.path.display(), &error))?;
    drop(device);
    Ok((held, described))
}

/// What the kernel shows of a device that is bound.
fn describe(path: PathBuf, number: u32) -> Result<LoopDevice> {
    let numbers = device_number(number).ok_or_else(|| {
        Error::new(ErrorKind::System, format!("/sys/block/loop{number}/dev cannot be read"))
    })?;
    let limits = QueueLimits {
        logical_block_size: read_number(number, "queue/logical_block_size"),
        discard_max_bytes: read_number(number, "queue/discard_max_bytes"),
        discard_granularity: read_number(number, "queue/discard_granularity"),
        write_zeroes_max_bytes: read_number(number, "queue/write_zeroes_max_bytes"),
        write_back: read_setting(number, "queue/write_cache").as_deref() == Some("write back"),
        fua: read_number(number, "queue/fua") == 1,
        max_sectors_kb: read_number(number, "queue/max_sectors_kb"),
        nr_requests: read_number(number, "queue/nr_requests"),
    };
    Ok(LoopDevice { number, path, device: numbers, limits })
}

/// The device number of a loop device, (major, minor).
pub fn device_number(number: u32) -> Option<(u32, u32)> {
    let text = read_setting(number, "dev")?;
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Puts back what [`finish`] has set, which outlives the binding, for whoever gets the loop device next. A kernel that
/// refuses keeps it: what is left then is slower, not wrong.
fn reset(number: u32) {
    // Zero stands for the kernel's own choice.
    let _ = write_setting(number, "queue/max_sectors_kb", 0);
}

/// A line that the kernel shows of a loop device.
pub fn read_setting(number: u32, name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/sys/block/loop{number}/{name}")).ok()?;
    Some(text.trim_end_matches('\n').to_owned())
}

fn read_number(number: u32, name: &str) -> u64 {
    read_setting(number, name).and_then(|text| text.parse().ok()).unwrap_or_default()
}

fn write_setting(number: u32, name: &str, value: u64) -> Result<()> {
    let path = format!("/sys/block/loop{number}/{name}");
    fs::write(&path, value.to_string())
        .map_err(|error| system_error(path, &error))
        .context(|| format!("a setting of /dev/loop{number} could not be set"))
}
