//! The server: one device at one socket, one front end at a time.
//!
//! Always true here: a front end that goes makes room for the next, which waits for a moment if it is early; one that
//! comes while another is there is turned away; [`Server::stop`] is bounded in time and completes what is in flight.
//!
//! Left to others: what a front end says (`messages`, `session`), and when a server is started or stopped.

use crate::memory::Bounds;
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
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;
use vhost::vhost_user::{BackendReqHandler, Error as Refusal};

/// How long a front end may take to say its first word.
const FIRST_WORD: Duration = Duration::from_secs(10);
/// How long a front end waits for the one before it to be gone.
const HANDOVER: Duration = Duration::from_secs(2);
/// When the process has no descriptor left for a front end, it is tried again after this.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);
/// What a stop grants beyond the time that rings have to finish.
const STOP_GRACE: Duration = Duration::from_secs(1);
/// Rings that a device may have: a message names one with eight bits.
const QUEUES_MAX: u16 = 256;

/// Bytes of memory that one front end may hand over, unless it is said otherwise.
pub const GUEST_MEMORY_MAX: u64 = 16 << 40;
/// Bytes of memory that all front ends may hand over together, unless it is said otherwise: half of the address space that a
/// process has on x86-64.
pub const GUEST_MEMORY_TOTAL: u64 = 64 << 40;

/// Called on each thread that serves data, before it does anything else.
pub type ThreadSetup = Arc<dyn Fn() + Send + Sync>;

/// Told what happens; must not wait.
pub type Observer = Arc<dyn Fn(&Notice<'_>) + Send + Sync>;

/// Something that happened.
#[derive(Debug)]
#[non_exhaustive]
pub enum Notice<'a> {
    /// A front end connected.
    Connected,
    /// A front end came while another was there; it was turned away.
    Refused,
    /// A front end was turned away because the backing device still has requests of the last one, which is gone.
    TooEarly,
    /// A front end is gone; in order if there is no error.
    Ended {
        /// What went wrong.
        error: Option<&'a Error>,
    },
    /// A ring broke the rules, or its memory went; it stands still until the guest sets it up again.
    RingFailed {
        /// Which ring.
        ring: usize,
        /// What was wrong.
        error: &'a Error,
    },
    /// Front ends cannot be accepted for now.
    CannotAccept {
        /// Why not.
        error: &'a Error,
    },
}

/// How a device is served.
#[derive(Clone)]
pub struct Options {
    /// The device's name; a guest sees the first 20 bytes as its serial number.
    pub name: String,
    /// Refuse what changes the device.
    pub read_only: bool,
    /// Rings that a front end may have; each has a thread while it is in use.
    pub queues_max: u16,
    /// How long a ring's thread looks for the next request, at most, before it sleeps; zero for not at all. It adapts
    /// below that: an idle ring costs nothing.
    pub spin_max: Duration,
    /// Bytes of buffers that one ring's requests may have.
    pub bytes_max: usize,
    /// Bytes of memory that the front end may hand over.
    pub guest_memory_max: u64,
    /// Bytes of memory that front ends of all servers that share this may hand over together. While a front end replaces
    /// its memory, what it had counts besides what it hands over.
    pub guest_memory: Arc<Budget>,
    /// How long requests in flight may take when the server stops.
    pub stop_timeout: Duration,
    /// Called on each thread that serves data.
    pub thread_setup: Option<ThreadSetup>,
    /// Told what happens.
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
    pub(crate) fn bounds(&self) -> Bounds {
        Bounds { each: self.guest_memory_max, all: Arc::clone(&self.guest_memory) }
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
    options: Arc<Options>,
    /// Signalled for good when the server stops.
    stop: Event,
    /// Signalled when a front end is gone.
    ended: Event,
    /// Signalled for good when nothing is served any more.
    finished: Event,
    connected: AtomicBool,
    /// The front end is gone, and the device still has requests of it.
    settling: AtomicBool,
    /// What runs, to say what it waits for.
    threads: Arc<Threads>,
    /// The front end's socket, to shut it down by.
    present: Mutex<Option<UnixStream>>,
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
    /// [`ErrorKind::Busy`] where another server listens, [`ErrorKind::InvalidArgument`] for a path that is too long or a
    /// number of rings that cannot be, and what the system says.
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

    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a front end is connected.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.shared.connected.load(Ordering::Acquire)
    }

    /// Stops: nobody is accepted any more and the socket's file is removed, what is in flight is completed and answered, and
    /// the front end is let go. What the device does not complete within `stop_timeout` is given up; where the front end keeps
    /// notes of it, it is done when it comes back.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if a thread is stuck inside the device even then.
    pub fn stop(mut self) -> Result<()> {
        self.shut_down()
    }

    fn shut_down(&mut self) -> Result<()> {
        let Some(acceptor) = self.acceptor.take() else { return Ok(()) };
        self.shared.stop.signal();
        self.shared.hang_up();
        let timeout = self.shared.options.stop_timeout + STOP_GRACE;
        if cbd_export::wait_any(&[self.shared.finished.descriptor()], Some(timeout))?.is_none() {
            return Err(Error::new(
                ErrorKind::TimedOut,
                format!(
                    "the vhost-user server at {} did not end in time: {}",
                    self.path.display(),
                    self.shared.threads.what_they_wait_for()
                ),
            ));
        }
        // If it panicked there is nothing left to stop.
        let _ = acceptor.join();
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.shut_down();
    }
}

/// The socket, and its file, which goes first: whoever looks meanwhile finds nobody, not a refusal.
struct Listener {
    _file: SocketFile,
    socket: Socket,
}

/// Serves one front end on a socket that is connected already, on the calling thread until the front end goes; nobody can
/// order it to stop.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for options that [`Server::start`] refuses; otherwise why the connection did not end in order.
pub fn serve_connected(device: Arc<dyn BlockDevice>, socket: UnixStream, options: Options) -> Result<()> {
    let shared = Shared::new(device, options)?;
    converse(&shared, socket)
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
            device,
            options: Arc::new(options),
            stop: Event::new()?,
            ended: Event::new()?,
            finished: Event::new()?,
            connected: AtomicBool::new(false),
            settling: AtomicBool::new(false),
            threads: Arc::default(),
            present: Mutex::default(),
        }))
    }

    fn present(&self) -> std::sync::MutexGuard<'_, Option<UnixStream>> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the front end's connection, wherever its thread is waiting.
    fn hang_up(&self) {
        if let Some(socket) = &*self.present() {
            // It may be gone already.
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
    let mut present: Option<thread::JoinHandle<()>> = None;
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
            Ok((socket, _)) if is_gone(shared, &mut present) => match check_reserve(&socket) {
                Ok(()) => present = admit(shared, socket.into()),
                Err(error) => {
                    shared.cannot_accept(format!("a vhost-user front end was turned away: {error}"));
                }
            },
            Ok(_) if shared.settling.load(Ordering::Acquire) => shared.options.notify(&Notice::TooEarly),
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
    // The file goes before the front end is let go, so that it does not come back here.
    drop(listener);
    if let Some(present) = present {
        // It has heard of the stop. If it failed there is nothing left to end.
        let _ = present.join();
    }
}

/// Whether there is no front end any more; one that is going is waited for.
fn is_gone(shared: &Shared, present: &mut Option<thread::JoinHandle<()>>) -> bool {
    let Some(thread) = present.take() else { return true };
    if !thread.is_finished() {
        let wait = [shared.stop.descriptor(), shared.ended.descriptor()];
        let ended = cbd_export::wait_any(&wait, Some(HANDOVER));
        if !matches!(ended, Ok(Some(1))) {
            *present = Some(thread);
            return false;
        }
    }
    let _ = thread.join();
    true
}

fn admit(shared: &Arc<Shared>, socket: UnixStream) -> Option<thread::JoinHandle<()>> {
    shared.ended.clear();
    match socket.try_clone() {
        Ok(clone) => *shared.present() = Some(clone),
        Err(error) => {
            shared.cannot_accept(format!("cannot keep hold of a front end: {error}"));
            return None;
        }
    }
    let place = Place(Arc::clone(shared));
    shared.connected.store(true, Ordering::Release);
    let spawned = start_thread("vhost-control", move || {
        let place = place;
        let shared = &*place.0;
        let _running = shared.threads.enter("the front end's connection".to_owned());
        shared.options.notify(&Notice::Connected);
        let outcome = converse(shared, socket);
        shared.options.notify(&Notice::Ended { error: outcome.as_ref().err() });
    });
    spawned.map_err(|error| shared.options.notify(&Notice::CannotAccept { error: &error })).ok()
}

/// The front end's place; free again when its thread ends, however it ends.
struct Place(Arc<Shared>);

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.present() = None;
        self.0.connected.store(false, Ordering::Release);
        self.0.settling.store(false, Ordering::Release);
        self.0.ended.signal();
    }
}

/// A front end from its first message to its last.
fn converse(shared: &Shared, socket: UnixStream) -> Result<()> {
    let mut waits = WaitSet::new();
    let stop = waits.add(shared.stop.descriptor(), Interest::Read);
    let incoming = waits.add(socket.as_raw_fd(), Interest::Read);
    let session = Session::new(
        Arc::clone(&shared.device),
        Arc::clone(&shared.options),
        Arc::clone(&shared.threads),
        shared.stop.descriptor(),
        socket.as_raw_fd(),
    );
    let session = Arc::new(Mutex::new(session));
    let mut handler = BackendReqHandler::from_stream(socket, Arc::clone(&session));
    let mut timeout = Some(FIRST_WORD);
    let outcome = loop {
        match waits.wait(timeout) {
            Err(error) => break Err(error),
            Ok(0) => {
                break Err(Error::new(
                    ErrorKind::TimedOut,
                    "a vhost-user front end connected and said nothing",
                ));
            }
            Ok(_) if waits.readable(stop) => break Ok(()),
            Ok(_) if !waits.readable(incoming) => continue,
            Ok(_) => {}
        }
        timeout = None;
        match handler.handle_request() {
            Ok(()) => {}
            Err(Refusal::Disconnected) => break Ok(()),
            Err(error) => {
                let text = format!("a vhost-user front end was let go: {error}");
                break Err(Error::new(ErrorKind::InvalidArgument, text));
            }
        }
    };
    // Before it closes the connection itself, the server says that it stops.
    let is_gone =
        !matches!(cbd_export::wait_any(&[shared.stop.descriptor()], Some(Duration::ZERO)), Ok(Some(_)));
    shared.settling.store(is_gone, Ordering::Release);
    let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
    let outcome = session
        .fault
        .take()
        .map_or(outcome, |fault| Err(fault.while_doing("a vhost-user front end was let go")));
    session.end(is_gone).and(outcome)
}
