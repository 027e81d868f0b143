//! The thread that alone holds the loop device open.
//!
//! Invariants: the thread's descriptor of the device lies in a descriptor table of the thread's own, never in
//! the daemon's. When the daemon is killed, the kernel closes the descriptors of a table in any order, and
//! closing a block device waits for its I/O. In one table with the FUSE connection that wait could depend on
//! the very connection that is closed next, and the process would never die. So no other thread of this
//! process opens the device.
//!
//! A device that must outlive the process is *persistent*: its AUTOCLEAR flag is cleared, and no thread of
//! this process holds it open. The last closer of a block device writes its pages out first, and a killed
//! process would wait for pages that only its successor can accept. For the same reason the thread opens a
//! persistent device only to release it, to abandon it, to query whether it is held exclusively, and to clear
//! an AUTOCLEAR flag that an interrupted stop has left. For the first two no other process holds the
//! connection by then, so the connection ends with this process, and every wait with it.
//!
//! A device is only touched while it is bound to its file: an administrator may have detached an idle one
//! (`losetup -d`), and its number then belongs to another user.
//!
//! Elsewhere: the settings of the device ([`super`]).

use super::{Binding, LoopDevice, bind, describe, is_bound_to, is_idle, may_be_bound_to, open_node, reset};
use cbd_export::system_error;
use cbd_sys::loop_device::{self, LO_FLAGS_AUTOCLEAR};
use cbd_types::{Error, ErrorKind, Result};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{self, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Timeout of binding; the kernel queries the file for its size and flushes it once.
const BIND_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval of the checks whether the last other opener (most often udev) has closed the device, and whether
/// requests are in flight: the kernel has no event for either.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Checks in a row that must find no request in flight: between two requests of one writer there can be a
/// short gap.
const IDLE_CHECKS: u32 = 2;

enum Command {
    /// Query whether another opener holds the device exclusively: a mount, a volume manager.
    IsHeldExclusively(Sender<Result<bool>>),
    /// Write out the kernel's dirty pages and unbind the device, if it has no other user.
    Release { end: Instant, reply: Sender<Result<()>> },
    /// Make the file, as the kernel sees it, and the device so large.
    Grow { size: u64, reply: Sender<Result<()>> },
    /// Leave the device bound without an opener in this process.
    MakePersistent(Sender<Result<()>>),
    /// Close the device, whether it is in use or not.
    Abandon(Sender<Result<()>>),
}

/// Why a device was not released.
#[derive(Debug)]
pub struct NotReleased {
    /// In words.
    pub error: Error,
    /// Set if the thread still waits for the device; receives the result when the device is back in its
    /// former state.
    pub later: Option<Receiver<Result<()>>>,
}

/// The handle of the thread that holds a loop device.
#[derive(Debug)]
pub struct LoopThread {
    commands: Sender<Command>,
    thread: Option<JoinHandle<()>>,
    /// Disconnected when the thread has ended.
    ended: Mutex<Receiver<()>>,
    device: LoopDevice,
    /// The backing file.
    file: PathBuf,
}

impl LoopThread {
    /// Binds a free loop device. The file must be served already.
    ///
    /// # Errors
    /// When there is no free loop device, or the kernel cannot bind one with the required settings.
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
                        let described = device.clone();
                        if bound.send(Ok(device)).is_ok() {
                            run(Some(file), &described, &binding.file, &received);
                        }
                    }
                    Err(error) => {
                        let _ = bound.send(Err(error));
                    }
                }
            })
            .map_err(|error| system_error("no thread for the loop device", &error))?;
        let device = waiting.recv_timeout(BIND_TIMEOUT).unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::TimedOut, "the loop device could not be bound within 30 seconds"))
        })?;
        Ok(Self { commands, thread: Some(thread), ended: Mutex::new(ended), device, file })
    }

    /// Manages a device that an earlier process has made persistent. Sends no request to the file,
    /// which may have no server yet.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if it is no longer bound to `file`.
    pub fn take_over(number: u32, file: &Path) -> Result<Self> {
        let path = PathBuf::from(format!("/dev/loop{number}"));
        if !is_bound_to(number, file) {
            let text = format!("{} is no longer bound to {}", path.display(), file.display());
            return Err(Error::new(ErrorKind::NotFound, text));
        }
        let device = describe(path, number)?;
        let (commands, received) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let (described, backing_file) = (device.clone(), file.to_owned());
        let thread = std::thread::Builder::new()
            .name("cbd-loop".into())
            .spawn(move || {
                // Dropped last.
                let _end: Sender<()> = end;
                match cbd_sys::process::unshare_descriptors() {
                    Ok(()) => run(None, &described, &backing_file, &received),
                    // Later commands are answered with the error that the device is released.
                    Err(_) => drop(received),
                }
            })
            .map_err(|error| system_error("no thread for the loop device", &error))?;
        let file = file.to_owned();
        Ok(Self { commands, thread: Some(thread), ended: Mutex::new(ended), device, file })
    }

    /// Lets the device outlive this process: it stays bound until it is released, and no thread of this
    /// process holds it open.
    ///
    /// # Errors
    /// When the kernel refuses; the device is unchanged then.
    pub fn make_persistent(&self, timeout: Duration) -> Result<()> {
        self.request(timeout, Command::MakePersistent)
    }

    /// Shows the users of the device that it has `size` bytes now, as the server of the file says already.
    ///
    /// # Errors
    /// When the kernel refuses, or the file is not answered within `timeout`. Users see the former size, or the new one.
    pub fn grow(&self, size: u64, timeout: Duration) -> Result<()> {
        self.request(timeout, |reply| Command::Grow { size, reply })
    }

    /// Ends the thread. A persistent device stays bound.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if the thread still waits for the device after `timeout`.
    pub fn end(self, timeout: Duration) -> Result<()> {
        let Self { commands, thread, ended, device, .. } = self;
        drop(commands);
        let ended = ended.into_inner().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(timeout) == Err(mpsc::RecvTimeoutError::Timeout) {
            let text = format!("{} does not answer; I/O to it hangs", device.path.display());
            return Err(Error::new(ErrorKind::TimedOut, text));
        }
        if let Some(thread) = thread {
            // As in `join`.
            let _ = thread.join();
        }
        Ok(())
    }

    /// Waits until the kernel has no request in flight to the device; returns whether that happened before
    /// `end`. Data of a client that has closed the device is in flight then: the client is no longer listed
    /// as an opener, and its close waits.
    pub fn wait_until_idle(&self, end: Instant) -> bool {
        let mut idle_checks = 0;
        while idle_checks < IDLE_CHECKS {
            idle_checks = if is_idle(self.device.number) { idle_checks + 1 } else { 0 };
            if idle_checks < IDLE_CHECKS {
                if Instant::now() >= end {
                    return false;
                }
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        true
    }

    /// The device.
    pub const fn device(&self) -> &LoopDevice {
        &self.device
    }

    /// Whether it is still bound to its file.
    pub fn is_bound(&self) -> bool {
        may_be_bound_to(self.device.number, &self.file)
    }

    /// Whether another opener holds the device exclusively, in this or another mount namespace.
    ///
    /// # Errors
    /// When the device cannot be opened, or does not answer within `timeout`.
    pub fn is_held_exclusively(&self, timeout: Duration) -> Result<bool> {
        self.request(timeout, Command::IsHeldExclusively)
    }

    /// Writes out the kernel's dirty pages of the device and unbinds it. After an error the device is in its
    /// former state, or returns to it.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if the device still has another user at `end`.
    pub fn release(&self, end: Instant) -> std::result::Result<(), NotReleased> {
        let timeout = end.saturating_duration_since(Instant::now()) + Duration::from_secs(1);
        let (reply, answer) = mpsc::channel();
        let refused = |error| NotReleased { error, later: None };
        self.commands.send(Command::Release { end, reply }).map_err(|_| refused(self.released_error()))?;
        match answer.recv_timeout(timeout) {
            Ok(released) => released.map_err(refused),
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(refused(self.released_error())),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                Err(NotReleased { error: self.timeout_error(), later: Some(answer) })
            }
        }
    }

    /// Closes the device: the kernel unbinds it when its last other user closes it too.
    ///
    /// # Errors
    /// When closing takes longer than `timeout`.
    pub fn abandon(&self, timeout: Duration) -> Result<()> {
        self.request(timeout, Command::Abandon)
    }

    /// Joins the thread, which has ended or is about to.
    pub fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // Its panic was printed when it happened; there is nothing left to undo.
            let _ = thread.join();
        }
    }

    fn request<T>(&self, timeout: Duration, command: impl FnOnce(Sender<Result<T>>) -> Command) -> Result<T> {
        let (reply, answer) = mpsc::channel();
        self.commands.send(command(reply)).map_err(|_| self.released_error())?;
        match answer.recv_timeout(timeout) {
            Ok(answer) => answer,
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(self.released_error()),
            Err(mpsc::RecvTimeoutError::Timeout) => Err(self.timeout_error()),
        }
    }

    fn released_error(&self) -> Error {
        Error::new(ErrorKind::Stopped, format!("{} is released already", self.device.path.display()))
    }

    fn timeout_error(&self) -> Error {
        let text = format!("{} does not answer; I/O to it hangs", self.device.path.display());
        Error::new(ErrorKind::TimedOut, text)
    }
}

/// Executes commands and holds the device, unless it is persistent, until the device is released or abandoned
/// or all senders are gone.
fn run(mut held: Option<File>, device: &LoopDevice, file: &Path, commands: &Receiver<Command>) {
    let path = &device.path;
    while let Ok(command) = commands.recv() {
        match command {
            Command::IsHeldExclusively(reply) => {
                let answer = match open_exclusively(path) {
                    Ok(_) => Ok(false),
                    Err(_) if !may_be_bound_to(device.number, file) => Ok(false),
                    Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(true),
                    Err(error) => Err(system_error(path.display(), &error)),
                };
                let _ = reply.send(answer);
            }
            Command::Release { end, reply } => {
                let was_persistent = held.is_none();
                let opened = match held.take() {
                    Some(held) => Ok(Some(held)),
                    None => open_if_bound(device, file)
                        .map_err(|error| (None, system_error(path.display(), &error))),
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
                    Err((still_held, error)) => {
                        // The attempt to clear it has left AUTOCLEAR set.
                        if let Some(file) = still_held
                            && !(was_persistent && clear_autoclear(&file).is_ok())
                        {
                            held = Some(file);
                        }
                        let _ = reply.send(Err(error));
                        if held.is_none() && !was_persistent {
                            return;
                        }
                    }
                }
            }
            Command::Grow { size, reply } => {
                let opened = match &held {
                    Some(held) => held.try_clone().map(Some),
                    None => open_if_bound(device, file),
                };
                let grown = opened
                    .map_err(|error| system_error(path.display(), &error))
                    .and_then(|opened| opened.map_or(Ok(()), |opened| grow(&opened, device, file, size)));
                let _ = reply.send(grown);
            }
            Command::MakePersistent(reply) => {
                let made = match &held {
                    Some(held) => clear_autoclear(held),
                    None => open_if_bound(device, file)
                        .and_then(|opened| opened.as_ref().map_or(Ok(()), clear_autoclear)),
                };
                if made.is_ok() {
                    held = None;
                }
                let _ = reply.send(made.map_err(|error| system_error(path.display(), &error)));
            }
            Command::Abandon(reply) => {
                let ours = held.take().map_or_else(|| open_if_bound(device, file), |held| Ok(Some(held)));
                if let Ok(Some(ours)) = ours {
                    reset(device.number);
                    // The kernel does not unbind a persistent device by itself.
                    let _ = loop_device::clear(ours.as_fd());
                }
                let _ = reply.send(Ok(()));
                return;
            }
        }
    }
}

/// Changes the size of a file that this process serves, in another process. A process that is killed while one of its threads has read
/// its own request, and has not replied, waits for that reply and does not end. The other process ends when the next one serves the file.
fn set_len(file: &Path, size: u64) -> io::Result<()> {
    let mut tool = process::Command::new("truncate");
    tool.args(["--no-create", &format!("--size={size}"), "--"]).arg(file);
    match tool.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(io::Error::other(format!("truncate ended with {status}"))),
        // A system without the tool.
        Err(_) => OpenOptions::new().write(true).open(file).and_then(|file| file.set_len(size)),
    }
}

/// Tells the kernel the size of the file, then lets it take that size for the device.
fn grow(opened: &File, device: &LoopDevice, file: &Path, size: u64) -> Result<()> {
    let failed = |error: &io::Error| {
        let text = format!("{} cannot be made larger: {}", device.path.display(), file.display());
        system_error(text, error)
    };
    // 1. The kernel ignores a size in a reply to GETATTR while writes complete. It takes the one in a reply to SETATTR.
    set_len(file, size).map_err(|error| failed(&error))?;
    // 2. This notifies the users of the device.
    loop_device::set_capacity(opened.as_fd()).map_err(|error| failed(&error))?;
    let found = super::size(device.number);
    if found == Some(size) {
        return Ok(());
    }
    let found = found.map_or_else(|| "an unknown number of".to_owned(), |bytes| bytes.to_string());
    let text = format!("{} has {found} bytes for the kernel, and not {size}", device.path.display());
    Err(Error::new(ErrorKind::System, text))
}

/// Clears the AUTOCLEAR flag of a device.
fn clear_autoclear(device: &File) -> io::Result<()> {
    let mut info = loop_device::status(device.as_fd())?;
    info.flags &= !LO_FLAGS_AUTOCLEAR;
    loop_device::set_status(device.as_fd(), &info)
}

/// Unbinds the device if it has no other user; an error comes with the descriptor that still holds it.
fn release(held: File, device: &LoopDevice, end: Instant) -> std::result::Result<(), (Option<File>, Error)> {
    let path = &device.path;
    if let Err(error) = held.sync_all() {
        let text =
            format!("{}: dirty pages of the kernel could not be written, and are lost", path.display());
        return Err((Some(held), system_error(text, &error)));
    }
    if Instant::now() > end {
        // The caller's timeout has passed; the device stays in use.
        let text = format!("{}: writing dirty pages of the kernel took too long", path.display());
        return Err((Some(held), Error::new(ErrorKind::TimedOut, text)));
    }
    let exclusive = match open_exclusively(path) {
        Ok(exclusive) => exclusive,
        Err(error) => return Err((Some(held), system_error(path.display(), &error))),
    };
    // 1. From here on the device cannot be mounted. 2. As the only opener, clearing it also keeps new openers
    //    out.
    drop(held);
    loop {
        let cleared =
            loop_device::clear(exclusive.as_fd()).and_then(|()| loop_device::status(exclusive.as_fd()));
        match cleared {
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
                reset(device.number);
                return Ok(());
            }
            Ok(_) if Instant::now() < end => std::thread::sleep(POLL_INTERVAL),
            Ok(_) => {
                let held = open_node(path).ok();
                let text = format!("{} is open in another process", path.display());
                return Err((held, Error::new(ErrorKind::Busy, text)));
            }
            Err(error) => return Err((open_node(path).ok(), system_error(path.display(), &error))),
        }
    }
}

/// Opens a device if it is bound to the given file: while it is open it cannot be bound to another one.
fn open_if_bound(device: &LoopDevice, file: &Path) -> io::Result<Option<File>> {
    if !may_be_bound_to(device.number, file) {
        return Ok(None);
    }
    let opened = open_node(&device.path)?;
    Ok(may_be_bound_to(device.number, file).then_some(opened))
}

fn open_exclusively(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path)
}
