//! The server: one device at one socket, one front end at a time.
//!
//! Invariants: after a front end disconnected the next can connect, and waits for a limited time if the disconnection
//! is not complete; a front end that connects while another is connected is refused; [`Server::stop`] is bounded in
//! time and completes the requests in flight.
//!
//! Elsewhere: the messages of a front end (`messages`, `session`).

use crate::back_channel::BackChannel;
use crate::memory::MemoryLimits;
use crate::session::Session;
use crate::threads::Threads;
use cbd_export::budget::Budget;
use cbd_export::descriptors::{Spare, check_reserve};
use cbd_export::socket::{self, SocketFile};
use cbd_export::wake::{Interest, WaitSet};
use cbd_export::{BlockDevice, Event, start_thread};
use cbd_types::{Error, ErrorKind, Result};
use socket2::Socket;
use std::fmt;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;
use vhost::vhost_user::{BackendReqHandler, Error as Refusal};

/// Timeout for the first message of a front end.
const FIRST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a front end waits for the end of the previous one.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of attempts to accept while the process has no free descriptor.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);
/// Time that a stop waits for threads beyond the time that rings have to finish.
const STOP_GRACE: Duration = Duration::from_secs(1);
/// Most rings of a device: messages name a ring with eight bits.
const QUEUES_MAX: u16 = 256;

/// Default for the bytes of memory that one front end may hand over.
pub const GUEST_MEMORY_MAX: u64 = 16 << 40;
/// Default for the bytes of memory that all front ends may hand over together: half of the address space that a process
/// has on x86-64.
pub const GUEST_MEMORY_TOTAL: u64 = 64 << 40;
/// Bytes of memory that a front end hands over at least: the rings and the first requests of any guest need more.
pub const GUEST_MEMORY_MIN: u64 = 1 << 20;

/// Called on each thread that serves data, before it does anything else.
pub type ThreadSetup = Arc<dyn Fn() + Send + Sync>;

/// Callback for events; it must not block.
pub type Observer = Arc<dyn Fn(&Notice<'_>) + Send + Sync>;

/// An event of a server.
#[derive(Debug)]
#[non_exhaustive]
pub enum Notice<'a> {
    /// A front end connected.
    Connected,
    /// A front end connected while another was connected; it was refused.
    Refused,
    /// A front end was refused because the backing device still has requests of the previous one, which has
    /// disconnected.
    DeviceBusy,
    /// A front end disconnected; in order if there is no error.
    Ended {
        /// The error, if it did not disconnect in order.
        error: Option<&'a Error>,
    },
    /// A front end turned the log of dirty pages on or off: it begins to migrate its guest, or has stopped that. After a migration that
    /// succeeds it disconnects, or turns the log off.
    DirtyLog {
        /// Whether it is on now.
        on: bool,
    },
    /// A ring violated the protocol or lost its memory; it stays stopped until the guest sets it up again.
    RingFailed {
        /// Index of the ring.
        ring: usize,
        /// The reason.
        error: &'a Error,
    },
    /// Front ends cannot be accepted for now.
    CannotAccept {
        /// The reason.
        error: &'a Error,
    },
}

/// How a device is served.
#[derive(Clone)]
pub struct Options {
    /// The device's name; its first 20 bytes are the serial number in the guest.
    pub name: String,
    /// Refuse requests that change the device.
    pub read_only: bool,
    /// Most rings of a front end; each has a thread while it is in use.
    pub queues_max: u16,
    /// Longest time that a ring's thread polls for the next request before it sleeps; zero disables polling. The actual
    /// time adapts below that: the thread of an idle ring sleeps.
    pub spin_max: Duration,
    /// Most bytes of buffers of one ring's requests.
    pub bytes_max: usize,
    /// Most bytes of memory that the front end may hand over.
    pub guest_memory_max: u64,
    /// Most bytes of memory that front ends of all servers with this budget may hand over together. While a front end
    /// replaces its memory, both the old and the new memory are accounted.
    pub guest_memory: Arc<Budget>,
    /// Time that requests in flight have to complete when the server stops.
    pub stop_timeout: Duration,
    /// Called on each thread that serves data.
    pub thread_setup: Option<ThreadSetup>,
    /// Called for events of the server.
    pub observer: Option<Observer>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: String::new(),
            read_only: false,
            queues_max: 64,
            spin_max: Duration::from_micros(50),
            bytes_max: 64 << 20,
            guest_memory_max: GUEST_MEMORY_MAX,
            guest_memory: Budget::new(GUEST_MEMORY_TOTAL),
            stop_timeout: Duration::from_secs(5),
            thread_setup: None,
            observer: None,
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Options")
            .field("name", &self.name)
            .field("read_only", &self.read_only)
            .field("queues_max", &self.queues_max)
            .field("spin_max", &self.spin_max)
            .finish_non_exhaustive()
    }
}

impl Options {
    pub(crate) fn memory_limits(&self) -> MemoryLimits {
        MemoryLimits { each: self.guest_memory_max, all: Arc::clone(&self.guest_memory) }
    }

    pub(crate) fn notify(&self, notice: &Notice<'_>) {
        if let Some(observer) = &self.observer {
            observer(notice);
        }
    }
}

/// A running server. Dropping it stops it.
pub struct Server {
    shared: Arc<Shared>,
    path: PathBuf,
    acceptor: Option<thread::JoinHandle<()>>,
}

struct Shared {
    device: Arc<dyn BlockDevice>,
    /// The size of the device in bytes, which can grow.
    size: Arc<AtomicU64>,
    options: Arc<Options>,
    /// Signalled when the server stops, and never cleared.
    stop: Event,
    /// Signalled when a front end has disconnected.
    ended: Event,
    /// Signalled when serving has ended, and never cleared.
    finished: Event,
    connected: AtomicBool,
    /// The front end has disconnected, and the device still has its requests.
    completing: AtomicBool,
    /// The running threads, to report what they wait for if they do not end in time.
    threads: Arc<Threads>,
    /// The front end's socket, to shut it down.
    front_end: Mutex<Option<UnixStream>>,
    /// The channel on which the front end takes messages, if it has passed one.
    back_channel: Mutex<Option<BackChannel>>,
}

impl fmt::Debug for Server {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Server").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Server {
    /// Starts to serve `device` at the socket `path`. A front end can connect when this returns.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] where another server listens, [`ErrorKind::InvalidArgument`] for a path that is too
    /// long or a number of rings that is not possible, and errors of the system.
    pub fn start(device: Arc<dyn BlockDevice>, path: &Path, options: Options) -> Result<Self> {
        let shared = Shared::new(device, options)?;
        let (socket, file) = socket::listen(path, "vhost-user front ends")?;
        let acceptor = {
            let shared = Arc::clone(&shared);
            let listener = Listener { socket: socket.into(), _file: file };
            start_thread("vhost-accept", move || {
                accept(&shared, listener);
                shared.finished.signal();
            })?
        };
        Ok(Self { shared, path: path.to_owned(), acceptor: Some(acceptor) })
    }

    /// Whether a front end is connected.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.shared.connected.load(Ordering::Acquire)
    }

    /// Serves the device to its new end, `size` bytes: requests may reach so far, and the configuration space shows it. Returns
    /// whether the front end was told, which then tells its guest; otherwise it reads the size when it connects, or when its guest
    /// asks.
    pub fn grow(&self, size: u64) -> bool {
        // Before the message: whoever reads the configuration space because of it sees the new size.
        self.shared.size.fetch_max(size, Ordering::AcqRel);
        self.shared.back_channel().as_ref().is_some_and(BackChannel::tell_config_changed)
    }

    /// Stops the server: accepts no more front ends and removes the socket's file, completes and answers the requests
    /// in flight, and disconnects the front end. Requests that the device does not complete within `stop_timeout` are
    /// given up; if the front end preserves the record of requests in flight, they are executed when it reconnects.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if a thread is blocked inside the device even then.
    pub fn stop(mut self) -> Result<()> {
        self.shut_down()
    }

    fn shut_down(&mut self) -> Result<()> {
        let Some(acceptor) = self.acceptor.take() else { return Ok(()) };
        self.shared.stop.signal();
        self.shared.shut_down_front_end();
        let timeout = self.shared.options.stop_timeout + STOP_GRACE;
        if cbd_export::wait_any(&[self.shared.finished.descriptor()], Some(timeout))?.is_none() {
            return Err(Error::new(
                ErrorKind::TimedOut,
                format!(
                    "the vhost-user server at {} did not end in time: {}",
                    self.path.display(),
                    self.shared.threads.describe_waits()
                ),
            ));
        }
        // If the acceptor panicked, it has ended already.
        let _ = acceptor.join();
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.shut_down();
    }
}

/// The socket and its file. The file is removed first, so a front end that connects meanwhile gets ENOENT, not
/// ECONNREFUSED.
struct Listener {
    _file: SocketFile,
    socket: Socket,
}

/// Serves one front end on a connected socket, on the calling thread until the front end disconnects; it cannot be
/// stopped.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for options that [`Server::start`] refuses; otherwise why the connection did not end
/// in order.
pub fn serve_connected(device: Arc<dyn BlockDevice>, socket: UnixStream, options: Options) -> Result<()> {
    let shared = Shared::new(device, options)?;
    serve_front_end(&shared, socket)
}

impl Shared {
    fn new(device: Arc<dyn BlockDevice>, options: Options) -> Result<Arc<Self>> {
        if options.queues_max == 0 || options.queues_max > QUEUES_MAX {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "a device with {} rings: it has at least 1 and at most {QUEUES_MAX}",
                    options.queues_max
                ),
            ));
        }
        Ok(Arc::new(Self {
            size: Arc::new(device.geometry().size.into()),
            device,
            options: Arc::new(options),
            stop: Event::new()?,
            ended: Event::new()?,
            finished: Event::new()?,
            connected: AtomicBool::new(false),
            completing: AtomicBool::new(false),
            threads: Arc::default(),
            front_end: Mutex::default(),
            back_channel: Mutex::default(),
        }))
    }

    fn front_end(&self) -> std::sync::MutexGuard<'_, Option<UnixStream>> {
        self.front_end.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn back_channel(&self) -> std::sync::MutexGuard<'_, Option<BackChannel>> {
        self.back_channel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shuts down the front end's connection, which wakes its thread.
    fn shut_down_front_end(&self) {
        if let Some(socket) = &*self.front_end() {
            // The connection may be closed already.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn cannot_accept(&self, text: String) {
        self.options.notify(&Notice::CannotAccept { error: &Error::new(ErrorKind::System, text) });
    }
}

/// Accepts front ends until the server stops.
fn accept(shared: &Arc<Shared>, listener: Listener) {
    let mut waits = WaitSet::new();
    let stop = waits.add(shared.stop.descriptor(), Interest::Read);
    let incoming = waits.add(listener.socket.as_raw_fd(), Interest::Read);
    let mut front_end: Option<thread::JoinHandle<()>> = None;
    let mut spare = Spare::default();
    loop {
        if let Err(error) = waits.wait(None) {
            shared.options.notify(&Notice::CannotAccept { error: &error });
            break;
        }
        if waits.readable(stop) {
            break;
        }
        if !waits.readable(incoming) {
            continue;
        }
        match listener.socket.accept() {
            Ok((socket, _)) if has_no_front_end(shared, &mut front_end) => match check_reserve(&socket) {
                Ok(()) => front_end = admit(shared, socket.into()),
                Err(error) => {
                    shared.cannot_accept(format!("a vhost-user front end was refused: {error}"));
                }
            },
            Ok(_) if shared.completing.load(Ordering::Acquire) => shared.options.notify(&Notice::DeviceBusy),
            Ok(_) => shared.options.notify(&Notice::Refused),
            Err(error) if socket::is_momentary(&error) => {}
            Err(error) => {
                shared.cannot_accept(format!("cannot accept a vhost-user front end: {error}"));
                if !spare.turn_away(&listener.socket) {
                    let _ = cbd_export::wait_any(&[shared.stop.descriptor()], Some(ACCEPT_AGAIN));
                }
            }
        }
    }
    // The file is removed before the front end is disconnected, so that the front end does not reconnect to this
    // server.
    drop(listener);
    if let Some(front_end) = front_end {
        // The thread sees the stop event and ends. If it panicked, it has ended already.
        let _ = front_end.join();
    }
}

/// Whether no front end is connected; waits for a front end that is disconnecting.
fn has_no_front_end(shared: &Shared, front_end: &mut Option<thread::JoinHandle<()>>) -> bool {
    let Some(thread) = front_end.take() else { return true };
    if !thread.is_finished() {
        let wait = [shared.stop.descriptor(), shared.ended.descriptor()];
        let ended = cbd_export::wait_any(&wait, Some(DISCONNECT_TIMEOUT));
        if !matches!(ended, Ok(Some(1))) {
            *front_end = Some(thread);
            return false;
        }
    }
    let _ = thread.join();
    true
}

fn admit(shared: &Arc<Shared>, socket: UnixStream) -> Option<thread::JoinHandle<()>> {
    shared.ended.clear();
    match socket.try_clone() {
        Ok(clone) => *shared.front_end() = Some(clone),
        Err(error) => {
            shared.cannot_accept(format!("cannot duplicate the socket of a front end: {error}"));
            return None;
        }
    }
    let connected = Connected(Arc::clone(shared));
    shared.connected.store(true, Ordering::Release);
    let spawned = start_thread("vhost-control", move || {
        let connected = connected;
        let shared = &*connected.0;
        let _running = shared.threads.register("the front end's connection".to_owned());
        shared.options.notify(&Notice::Connected);
        let outcome = serve_front_end(shared, socket);
        shared.options.notify(&Notice::Ended { error: outcome.as_ref().err() });
    });
    spawned.map_err(|error| shared.options.notify(&Notice::CannotAccept { error: &error })).ok()
}

/// Marks a front end as connected; dropped when its thread ends, even by a panic.
struct Connected(Arc<Shared>);

impl Drop for Connected {
    fn drop(&mut self) {
        *self.0.front_end() = None;
        *self.0.back_channel() = None;
        self.0.connected.store(false, Ordering::Release);
        self.0.completing.store(false, Ordering::Release);
        self.0.ended.signal();
    }
}

/// Serves a front end from its first message to its last.
fn serve_front_end(shared: &Shared, socket: UnixStream) -> Result<()> {
    let mut waits = WaitSet::new();
    let stop = waits.add(shared.stop.descriptor(), Interest::Read);
    let incoming = waits.add(socket.as_raw_fd(), Interest::Read);
    let session = Session::new(
        Arc::clone(&shared.device),
        Arc::clone(&shared.options),
        Arc::clone(&shared.threads),
        Arc::clone(&shared.size),
        shared.stop.descriptor(),
        socket.as_raw_fd(),
    );
    let session = Arc::new(Mutex::new(session));
    let messages = socket.try_clone().map_err(|error| {
        Error::new(ErrorKind::System, "the socket of a front end cannot be duplicated").caused_by(error)
    })?;
    let mut handler = BackendReqHandler::from_stream(socket, Arc::clone(&session));
    let mut timeout = Some(FIRST_MESSAGE_TIMEOUT);
    let outcome = loop {
        match waits.wait(timeout) {
            Err(error) => break Err(error),
            Ok(0) => {
                break Err(Error::new(
                    ErrorKind::TimedOut,
                    "a vhost-user front end connected and sent no message",
                ));
            }
            Ok(_) if waits.readable(stop) => break Ok(()),
            Ok(_) if !waits.readable(incoming) => continue,
            Ok(_) => {}
        }
        timeout = None;
        // Before the message is answered. If it is refused, the session ends, and the channel with it.
        if let Some(back_channel) = BackChannel::peek(&messages) {
            *shared.back_channel() = Some(back_channel);
        }
        match handler.handle_request() {
            Ok(()) => {}
            Err(Refusal::Disconnected) => break Ok(()),
            Err(error) => {
                let text = format!("a vhost-user front end was disconnected: {error}");
                break Err(Error::new(ErrorKind::InvalidArgument, text));
            }
        }
    };
    // The server signals its stop before it closes the connection itself.
    let is_disconnected =
        !matches!(cbd_export::wait_any(&[shared.stop.descriptor()], Some(Duration::ZERO)), Ok(Some(_)));
    shared.completing.store(is_disconnected, Ordering::Release);
    let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
    let outcome = session
        .fault
        .take()
        .map_or(outcome, |fault| Err(fault.while_doing("a vhost-user front end was disconnected")));
    session.end(is_disconnected).and(outcome)
}
