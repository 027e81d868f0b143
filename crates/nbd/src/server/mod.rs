//! The NBD server: one device on one socket, a thread for each connection.
//!
//! Invariants: connections are bounded in number, handshakes in number and time, and all connections in the memory that
//! they take together (`memory`); a client that sends nothing does not exclude other clients: the oldest handshake is
//! closed for a new one; [`Server::stop`] is bounded in time and completes the requests in flight; a panic or an error
//! in one connection ends that connection only.

mod client_entry;
mod connection;
mod ending;
mod handshake;
mod incoming;
mod memory;
mod parts;
mod receive;
mod reply;
mod request;
mod slots;
mod status;
mod stream;
mod verify;
mod waits;

use crate::listen::{Listen, Listener, tune};
use crate::protocol::STRING_MAX;
use cbd_export::budget::{Budget, Guarantee};
use cbd_export::descriptors::{Spare, check_reserve};
use cbd_export::socket::is_momentary;
use cbd_export::wake::{Interest, WaitSet};
use cbd_export::{BlockDevice, Clients, Event, start_thread};
use cbd_types::{Error, ErrorKind, Result};
use client_entry::ClientEntry;
use connection::Connection;
use handshake::{Offer, negotiate};
use memory::Memory;
use request::Rules;
use socket2::Socket;
use std::collections::VecDeque;
use std::fmt;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use stream::BoundedStream;

/// Longest read or write that is accepted, in bytes.
const PAYLOAD_MAX: u32 = 32 << 20;
/// Default for the bytes of buffers that all connections may have together.
pub const MEMORY: u64 = 1 << 30;
/// Bytes of buffers that one connection takes at least; if all connections together may have less, no client is
/// accepted.
pub const MEMORY_MIN: u64 = memory::CONNECTION;
/// Interval of attempts to accept while the process has no free descriptor and no connection of this server ends.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);
/// Time that connections closed during their handshake have to end before further clients are refused.
const CLOSED_HANDSHAKES_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that a stop waits for threads beyond the time that connections have to finish.
const STOP_GRACE: Duration = Duration::from_secs(1);

/// Called on each thread that serves data, before it does anything else.
pub type ThreadSetup = Arc<dyn Fn() + Send + Sync>;

/// Callback for events of connections; it must not block.
pub type Observer = Arc<dyn Fn(&Notice<'_>) + Send + Sync>;

/// An event of a connection.
#[derive(Debug)]
#[non_exhaustive]
pub enum Notice<'a> {
    /// A client finished its handshake.
    Connected {
        /// The connection's number.
        connection: u64,
    },
    /// A client was refused: the maximum of clients is connected, or there is no descriptor, thread or memory for it.
    Refused {
        /// The reason.
        error: &'a Error,
    },
    /// A client had not finished its handshake when further clients connected; the server closed its connection for
    /// them.
    HandshakeClosed {
        /// The connection's number.
        connection: u64,
    },
    /// A connection ended: in order if there is no error, or refused after its handshake, as [`Notice::Refused`]
    /// reported.
    Ended {
        /// The connection's number.
        connection: u64,
        /// The error, if it did not end in order.
        error: Option<&'a Error>,
    },
    /// The first request of a client waits, because the device still has requests of connections that have ended.
    Waits {
        /// The connection's number.
        connection: u64,
        /// Number of connections that it waits for.
        clients: usize,
    },
    /// The wait reported by [`Notice::Waits`] is over.
    Admitted {
        /// The connection's number.
        connection: u64,
        /// Duration of the wait.
        waited: Duration,
    },
    /// Clients cannot be accepted for now.
    CannotAccept {
        /// The reason.
        error: &'a Error,
    },
}

/// How a device is served.
#[derive(Clone)]
pub struct Options {
    /// The export's name; clients may also select the default export, whose name is empty.
    pub export_name: String,
    /// Description for users, shown in lists of exports.
    pub description: String,
    /// Refuse requests that change the device.
    pub read_only: bool,
    /// Called on each thread that serves data.
    pub thread_setup: Option<ThreadSetup>,
    /// Called for events of connections.
    pub observer: Option<Observer>,
    /// Connections at a time, past their handshake.
    pub connections_max: usize,
    /// Handshakes at a time. One more closes the oldest.
    pub handshakes_max: usize,
    /// Requests of one connection that are read and not yet answered.
    pub requests_max: usize,
    /// Bytes of buffers that the requests of one connection may have.
    pub bytes_max: usize,
    /// Bytes that the connections of all servers with this budget may have together. A server reserves those of its
    /// first clients when it starts.
    pub memory: Arc<Budget>,
    /// Time limit of a handshake.
    pub handshake_timeout: Duration,
    /// Time that connections have to complete requests in flight when the server stops.
    pub stop_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            export_name: String::new(),
            description: String::new(),
            read_only: false,
            thread_setup: None,
            observer: None,
            connections_max: 256,
            handshakes_max: 64,
            requests_max: 128,
            bytes_max: 64 << 20,
            memory: Budget::new(MEMORY),
            handshake_timeout: Duration::from_secs(10),
            stop_timeout: Duration::from_secs(5),
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Options")
            .field("export_name", &self.export_name)
            .field("read_only", &self.read_only)
            .field("connections_max", &self.connections_max)
            .finish_non_exhaustive()
    }
}

/// A running server. Dropping it stops it.
pub struct Server {
    shared: Arc<Shared>,
    address: Listen,
    acceptor: Option<thread::JoinHandle<()>>,
}

/// What the threads share.
struct Shared {
    device: Arc<dyn BlockDevice>,
    options: Options,
    /// What the first clients may take of the memory of all servers, and the rest of that memory.
    memory: Arc<Guarantee>,
    /// Signalled when the server stops, and never cleared.
    stop: Event,
    /// Signalled when a connection ends, so that the server tries again to accept a waiting client.
    ended: Event,
    live: Mutex<Live>,
    changed: Condvar,
    numbers: AtomicU64,
    /// Connected clients, and disconnected ones whose requests can still change the device.
    clients: Clients,
}

#[derive(Default)]
struct Live {
    /// The server stops: no client begins a handshake any more.
    stopping: bool,
    /// Threads that serve a client, those in their handshake included.
    threads: usize,
    /// Clients past their handshake.
    connections: usize,
    /// Clients in their handshake, with their numbers, the oldest first.
    handshakes: VecDeque<(u64, Arc<Socket>)>,
}

impl fmt::Debug for Server {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Server").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Server {
    /// Starts to serve `device` at `listen`. Clients can connect when this returns.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] where another server listens, [`ErrorKind::InvalidArgument`] for a name that the
    /// protocol cannot carry or bounds of zero, and errors of the system.
    pub fn start(device: Arc<dyn BlockDevice>, listen: Listen, options: Options) -> Result<Self> {
        let shared = Shared::new(device, options)?;
        let listener = Listener::bind(&listen)?;
        let address = listener.address.clone();
        let acceptor = {
            let shared = Arc::clone(&shared);
            start_thread("nbd-accept", move || accept(&shared, &listener))?
        };
        Ok(Self { shared, address, acceptor: Some(acceptor) })
    }

    /// The server's address, with the port that the system chose.
    #[must_use]
    pub const fn address(&self) -> &Listen {
        &self.address
    }

    /// The export's NBD URI.
    #[must_use]
    pub fn uri(&self) -> String {
        self.address.uri(&self.shared.options.export_name)
    }

    /// Number of clients that are connected and past their handshake.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.live().connections
    }

    /// Number of clients whose first request waits until no request of a connection that has ended can change the
    /// device.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.shared.clients.waiting()
    }

    /// Stops the server: accepts no more clients and removes the socket's file, completes and answers the requests in
    /// flight, closes all connections. Requests still in flight after `stop_timeout` are given up.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if a connection's thread is blocked inside the device even then; it ends by
    /// itself when the device returns.
    pub fn stop(mut self) -> Result<()> {
        self.shut_down()
    }

    fn shut_down(&mut self) -> Result<()> {
        let Some(acceptor) = self.acceptor.take() else { return Ok(()) };
        let shared = &self.shared;
        let until = Instant::now() + shared.options.stop_timeout + STOP_GRACE;
        shared.stop.signal();
        shared.live().stopping = true;
        shared.changed.notify_all();
        // The acceptor waits only for the event and for `changed`; if it panicked, it has already ended.
        let _ = acceptor.join();
        let mut live = shared.live();
        while live.threads > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::new(
                    ErrorKind::TimedOut,
                    format!(
                        "{} connections of the NBD server at {} did not end: the device does not respond",
                        live.threads, self.address
                    ),
                ));
            }
            live = shared.changed.wait_timeout(live, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.shut_down();
    }
}

/// Serves one client on a socket that the caller has accepted, on the calling thread until the client disconnects.
/// Handshake, bounds and replies are those of [`Server`]; it cannot be stopped.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for options that [`Server::start`] refuses; otherwise why the connection did not end
/// in order.
pub fn serve_connected(device: Arc<dyn BlockDevice>, socket: OwnedFd, options: Options) -> Result<()> {
    let shared = Shared::new(device, options)?;
    shared.live().threads += 1;
    let mut registration =
        Registration { shared: Arc::clone(&shared), number: 0, serving: false, refused: false };
    let socket = Arc::new(Socket::from(socket));
    let client_entry = ClientEntry::enter(&shared.clients, &socket)?;
    serve_client(&shared, &socket, 0, &mut registration, client_entry)
}

impl Shared {
    fn new(device: Arc<dyn BlockDevice>, options: Options) -> Result<Arc<Self>> {
        check(&options)?;
        Ok(Arc::new(Self {
            device,
            memory: memory::guarantee(&options.memory),
            options,
            stop: Event::new()?,
            ended: Event::new()?,
            live: Mutex::default(),
            changed: Condvar::new(),
            numbers: AtomicU64::new(0),
            clients: Clients::new(),
        }))
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify(&self, notice: &Notice<'_>) {
        if let Some(observer) = &self.options.observer {
            observer(notice);
        }
    }
}

/// The limit on requests of a connection, and on the time that its end may take.
#[derive(Clone, Copy, Debug)]
struct Limits {
    requests: usize,
    stop: Duration,
    /// Readable when the server stops.
    stop_descriptor: RawFd,
}

fn check(options: &Options) -> Result<()> {
    let invalid = |text: String| Err(Error::new(ErrorKind::InvalidArgument, text));
    for (what, text) in [("name", &options.export_name), ("description", &options.description)] {
        if text.len() > STRING_MAX || text.contains('\0') {
            return invalid(format!(
                "the {what} of an NBD export has at most {STRING_MAX} bytes, none of which is zero"
            ));
        }
    }
    if options.connections_max == 0 || options.handshakes_max == 0 || options.requests_max == 0 {
        return invalid("an NBD server must allow at least one connection, handshake and request".into());
    }
    Ok(())
}

/// Accepts clients until the server stops; then the listener removes the socket's file.
fn accept(shared: &Arc<Shared>, listener: &Listener) {
    let mut waits = WaitSet::new();
    let stop = waits.add(shared.stop.descriptor(), Interest::Read);
    let incoming = waits.add(listener.socket.as_raw_fd(), Interest::Read);
    let ended = waits.add(shared.ended.descriptor(), Interest::Nothing);
    let mut no_descriptor = false;
    let mut spare = Spare::default();
    loop {
        // Without a free descriptor the socket stays readable; then the thread waits for the end of another connection.
        waits.set(incoming, if no_descriptor { Interest::Nothing } else { Interest::Read });
        waits.set(ended, if no_descriptor { Interest::Read } else { Interest::Nothing });
        if let Err(error) = waits.wait(no_descriptor.then_some(ACCEPT_AGAIN)) {
            shared.notify(&Notice::CannotAccept { error: &error });
            return;
        }
        if waits.readable(stop) {
            return;
        }
        if no_descriptor {
            shared.ended.clear();
        }
        no_descriptor = false;
        match listener.socket.accept() {
            Ok((socket, _)) => admit(shared, socket, &listener.address),
            Err(error) if is_momentary(&error) => {}
            Err(error) => {
                let text = format!("cannot accept an NBD client at {}: {error}", listener.address);
                shared.notify(&Notice::CannotAccept { error: &Error::new(ErrorKind::System, text) });
                no_descriptor = !spare.turn_away(&listener.socket);
            }
        }
    }
}

fn admit(shared: &Arc<Shared>, socket: Socket, address: &Listen) {
    let refused = |error: &Error| shared.notify(&Notice::Refused { error });
    if let Err(error) = check_reserve(&socket) {
        return refused(&error);
    }
    let number = shared.numbers.fetch_add(1, Ordering::Relaxed);
    let socket = Arc::new(socket);
    match shared.enter(number, &socket) {
        Err(error) => return refused(&error),
        Ok(Some(oldest)) => shared.notify(&Notice::HandshakeClosed { connection: oldest }),
        Ok(None) => {}
    }
    let registration = Registration { shared: Arc::clone(shared), number, serving: false, refused: false };
    // Entered in the order of connection, so that a later client finds the earlier ones.
    let client_entry = match ClientEntry::enter(&shared.clients, &socket) {
        Ok(client_entry) => client_entry,
        Err(error) => return refused(&error),
    };
    tune(&socket, address);
    let spawned = start_thread(format!("nbd-{number}"), move || {
        let mut registration = registration;
        let shared = Arc::clone(&registration.shared);
        if let Some(setup) = &shared.options.thread_setup {
            setup();
        }
        let outcome = serve_client(&shared, &socket, number, &mut registration, client_entry);
        // Closed before it counts as ended.
        registration.leave_handshake();
        drop(socket);
        let mut error = outcome.as_ref().err();
        if registration.refused
            && let Some(error) = error.take()
        {
            shared.notify(&Notice::Refused { error });
        }
        shared.notify(&Notice::Ended { connection: number, error });
    });
    if let Err(error) = spawned {
        refused(&error);
    }
}

impl Shared {
    /// Counts a client that begins its handshake. If the maximum is reached, the oldest handshake is closed and its
    /// number returned.
    fn enter(&self, number: u64, socket: &Arc<Socket>) -> Result<Option<u64>> {
        let Options { connections_max, handshakes_max, .. } = self.options;
        let mut live = self.live();
        // The threads of closed handshakes end soon, but not immediately.
        let is_crowded = |live: &Live| {
            live.threads.saturating_sub(live.connections + live.handshakes.len()) > handshakes_max
        };
        if is_crowded(&live) {
            let waits = |live: &mut Live| is_crowded(live) && !live.stopping;
            let waited = self.changed.wait_timeout_while(live, CLOSED_HANDSHAKES_TIMEOUT, waits);
            live = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if live.stopping {
            return Err(Error::new(ErrorKind::Stopped, "the NBD server stops"));
        }
        if live.connections >= connections_max {
            return Err(too_many(connections_max));
        }
        if is_crowded(&live) {
            let text =
                format!("more than {handshakes_max} closed handshakes of NBD clients have not ended yet");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        let oldest = if live.handshakes.len() >= handshakes_max { live.handshakes.pop_front() } else { None };
        if let Some((_, socket)) = &oldest {
            // The client may have closed it already.
            let _ = socket.shutdown(Shutdown::Both);
        }
        live.handshakes.push_back((number, Arc::clone(socket)));
        live.threads += 1;
        Ok(oldest.map(|(number, _)| number))
    }
}

fn too_many(most: usize) -> Error {
    Error::new(ErrorKind::Busy, format!("{most} NBD clients are connected, and more are not allowed"))
}

/// Counts a connection against the maximum; dropped when its thread ends, even by a panic.
struct Registration {
    shared: Arc<Shared>,
    number: u64,
    serving: bool,
    /// The client was refused after its handshake.
    refused: bool,
}

impl Registration {
    /// The handshake is over and the transmission phase begins; false if the maximum of connections was reached
    /// meanwhile.
    fn begin_serving(&mut self) -> bool {
        let mut live = self.shared.live();
        live.handshakes.retain(|(number, _)| *number != self.number);
        self.serving = live.connections < self.shared.options.connections_max;
        live.connections += usize::from(self.serving);
        self.serving
    }

    fn leave_handshake(&self) {
        self.shared.live().handshakes.retain(|(number, _)| *number != self.number);
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut live = self.shared.live();
        live.threads -= 1;
        live.connections -= usize::from(self.serving);
        live.handshakes.retain(|(number, _)| *number != self.number);
        drop(live);
        self.shared.ended.signal();
        self.shared.changed.notify_all();
    }
}

/// Serves a client from the handshake to the end of the connection.
fn serve_client(
    shared: &Shared,
    socket: &Socket,
    number: u64,
    registration: &mut Registration,
    client_entry: ClientEntry,
) -> Result<()> {
    let options = &shared.options;
    let setup_error = |error: std::io::Error| {
        Error::new(ErrorKind::System, "cannot set up the socket of an NBD client").caused_by(error)
    };
    socket.set_nonblocking(true).map_err(setup_error)?;
    let until = Instant::now() + options.handshake_timeout;
    // The protocol cannot tell a client that a device has grown: a connection keeps the size that it was told.
    let rules = Rules::new(&shared.device.geometry(), options.read_only, PAYLOAD_MAX);
    let (name, description) = (&options.export_name, &options.description);
    let offer = Offer { name, description, rules: &rules, verifies: shared.device.verifies() };
    let mut stream = BoundedStream::new(socket, shared.stop.descriptor(), until);
    let mut is_registered = true;
    let mut accepted = || {
        is_registered = registration.begin_serving();
        if is_registered {
            shared.notify(&Notice::Connected { connection: number });
        }
    };
    let Some(negotiated) = negotiate(&mut stream, &offer, &mut accepted)? else { return Ok(()) };
    registration.refused = true;
    if !is_registered {
        return Err(too_many(options.connections_max));
    }
    let memory = Memory::new(&shared.memory, options.bytes_max)?;
    registration.refused = false;
    let stop = shared.stop.descriptor();
    if !client_entry.admit(number, socket, stop, &|notice| shared.notify(notice))? {
        return Ok(());
    }
    let limits = Limits { requests: options.requests_max, stop: options.stop_timeout, stop_descriptor: stop };
    Connection::new(socket, &*shared.device, rules, negotiated, limits, memory, client_entry)?.serve()
}
