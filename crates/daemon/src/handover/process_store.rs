//! The daemon's side of the [store process](super::run_store_process): it connects to a running store process, or
//! starts one.
//!
//! Invariants: a store process that has died is replaced while the daemon still has the descriptors. A store process
//! that does not respond to a request within seconds is regarded as silent. Only one call waits for a silent one: until
//! it has responded to [`DescriptorStore::maintain`], `put` and `remove` fail immediately. Commands that it executed
//! late are undone: it finally holds exactly the wanted entries.

use super::process::{conditions_of, listed};
use super::{DescriptorStore, Entry, is_name};
use cbd_export::folders::own_folder;
use cbd_sys::passing::{self, is_of_own_user};
use cbd_types::{Error, ErrorKind, Result};
use parking_lot::{Mutex, MutexGuard};
use rustix::io::retry_on_intr;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Timeout of an answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout for the previous daemon to disconnect from the store process.
const PREDECESSOR_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// A store process, which is started when it is needed.
#[derive(Debug)]
pub struct ProcessStore {
    socket: PathBuf,
    program: PathBuf,
    state: Mutex<State>,
    /// Whether it did not respond to the last request.
    is_unresponsive: AtomicBool,
    /// Names that were removed while it did not respond.
    removed_meanwhile: Mutex<Vec<String>>,
}

#[derive(Debug, Default)]
struct State {
    connection: Option<OwnedFd>,
    /// The entries that it must hold; they are put into a new store process if this one dies.
    entries: BTreeMap<String, Vec<OwnedFd>>,
    process: Option<Child>,
    /// Whether its entries may differ from `entries`, since it did not confirm a command.
    is_out_of_sync: bool,
    /// The error of the last [`DescriptorStore::maintain`].
    last_error: Option<String>,
}

impl ProcessStore {
    /// Connects to the store process at a socket; returns its entries, too. If none runs, starts `program
    /// store-process` when the first entry is stored.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] when another daemon is connected to it.
    pub fn open(socket: &Path, program: &Path) -> Result<(Self, Vec<Entry>)> {
        let mut state = State::default();
        let mut entries = Vec::new();
        if let Some(connection) = connect(socket)? {
            let failed = |error| system(socket, "does not list what it holds", &error);
            entries = list(&connection).map_err(failed)?;
            for entry in &entries {
                let copies = copies(entry.descriptors.iter().map(AsFd::as_fd)).map_err(failed)?;
                state.entries.insert(entry.name.clone(), copies);
            }
            state.connection = Some(connection);
        }
        let store = Self {
            socket: socket.to_owned(),
            program: program.to_owned(),
            state: Mutex::new(state),
            is_unresponsive: AtomicBool::new(false),
            removed_meanwhile: Mutex::default(),
        };
        Ok((store, entries))
    }

    /// Whether a store process was found.
    pub fn is_connected(&self) -> bool {
        self.state.lock().connection.is_some()
    }

    /// Starts a store process if none runs, and puts all wanted entries into it.
    fn connection<'a>(&self, state: &'a mut State) -> Result<&'a OwnedFd> {
        if let Some(mut dead) = state.process.take_if(|process| !matches!(process.try_wait(), Ok(None))) {
            let _ = dead.wait();
        }
        let connection = match state.connection.take() {
            Some(connection) => connection,
            None => {
                let connection = match connect(&self.socket)? {
                    Some(connection) => connection,
                    None => self.start(state)?,
                };
                let failed = |error| system(&self.socket, "does not accept what it is to hold", &error);
                synchronize(&connection, &state.entries).map_err(failed)?;
                state.is_out_of_sync = false;
                connection
            }
        };
        Ok(state.connection.insert(connection))
    }

    fn start(&self, state: &mut State) -> Result<OwnedFd> {
        let failed = |error: io::Error| system(&self.socket, "cannot be started", &error);
        let listener = listen(&self.socket).map_err(failed)?;
        let mut command = Command::new(&self.program);
        command.arg0("cbdctrl").arg("store-process").current_dir("/");
        command.stdin(Stdio::from(listener)).stdout(Stdio::null()).stderr(Stdio::null());
        state.process = Some(command.spawn().map_err(failed)?);
        connect(&self.socket)?.ok_or_else(|| failed(io::ErrorKind::ConnectionRefused.into()))
    }

    fn send_command(&self, state: &mut State, text: &str, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let result = match self.send_once(state, text, descriptors) {
            // It has died, or was about to exit because it held nothing.
            Err(error) if error.kind() != ErrorKind::TimedOut => self.send_once(state, text, descriptors),
            result => result,
        };
        state.is_out_of_sync |= result.is_err();
        result
    }

    fn send_once(&self, state: &mut State, text: &str, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let result = self.connection(state).and_then(|connection| {
            request(connection, text, descriptors)
                .map_err(|error| system(&self.socket, "does not execute a command", &error))
        });
        if let Err(error) = &result {
            state.connection = None;
            self.is_unresponsive.store(error.kind() == ErrorKind::TimedOut, Ordering::Relaxed);
        }
        result
    }

    /// Locks the state; fails if the store process is silent or another thread waits for it.
    fn lock(&self) -> Result<MutexGuard<'_, State>> {
        let locked = if self.is_unresponsive.load(Ordering::Relaxed) {
            None
        } else {
            self.state.try_lock_for(TIMEOUT)
        };
        let mut state = locked.ok_or_else(|| {
            system(&self.socket, "is in use by another thread", &io::ErrorKind::TimedOut.into())
        })?;
        self.forget_removed(&mut state);
        Ok(state)
    }

    fn forget_removed(&self, state: &mut State) {
        for name in std::mem::take(&mut *self.removed_meanwhile.lock()) {
            state.entries.remove(&name);
            state.is_out_of_sync = true;
        }
    }
}

impl DescriptorStore for ProcessStore {
    fn put(&self, name: &str, descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        if !is_name(name) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("{name:?} is no name for a descriptor store"),
            ));
        }
        let failed = |error| system(&self.socket, "cannot be given descriptors", &error);
        let mut state = self.lock()?;
        let copies = copies(descriptors.iter().copied()).map_err(failed)?;
        self.send_command(&mut state, &format!("put {name}"), descriptors)?;
        state.entries.insert(name.to_owned(), copies);
        Ok(())
    }

    fn remove(&self, name: &str) {
        let removed = match self.lock() {
            Ok(mut state) => {
                state.entries.remove(name);
                self.send_command(&mut state, &format!("remove {name}"), &[])
            }
            Err(error) => {
                self.removed_meanwhile.lock().push(name.to_owned());
                Err(error)
            }
        };
        if let Err(error) = removed {
            tracing::warn!("{error}; {name} is removed from it when it answers");
        }
    }

    fn maintain(&self) {
        let mut state = self.state.lock();
        self.forget_removed(&mut state);
        let is_connected =
            state.connection.as_ref().is_some_and(|connection| conditions_of(connection).is_empty());
        if !state.is_out_of_sync && (is_connected || state.entries.is_empty()) {
            self.is_unresponsive.store(false, Ordering::Relaxed);
            return;
        }
        state.connection = None;
        let was_out_of_sync = state.is_out_of_sync;
        let ensured = self.connection(&mut state).map(|_| ());
        self.is_unresponsive.store(
            ensured.as_ref().is_err_and(|error| error.kind() == ErrorKind::TimedOut),
            Ordering::Relaxed,
        );
        let last_error = ensured.err().map(|error| error.line());
        match &last_error {
            None if was_out_of_sync => tracing::info!("the store process of the block devices answers again"),
            None => tracing::warn!(
                "the store process of the block devices had ended; a new one holds all descriptors"
            ),
            Some(error) if state.last_error != last_error => {
                tracing::error!("no block device outlives the daemon now: {error}");
            }
            Some(_) => {}
        }
        state.last_error = last_error;
    }

    fn store_name(&self) -> &'static str {
        "a store process"
    }
}

impl Drop for ProcessStore {
    fn drop(&mut self) {
        // A store process that holds nothing exits when the connection closes.
        let state = self.state.get_mut();
        if state.entries.is_empty() && !state.is_out_of_sync && self.removed_meanwhile.get_mut().is_empty() {
            let _ = std::fs::remove_file(&self.socket);
        }
    }
}

fn system(socket: &Path, what: &str, error: &io::Error) -> Error {
    // The errors of a system call that timed out.
    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) {
        return Error::new(
            ErrorKind::TimedOut,
            format!("the store process at {} does not answer", socket.display()),
        );
    }
    Error::new(ErrorKind::System, format!("the store process at {} {what}", socket.display()))
        .caused_by(cbd_sys::errors::copy_of(error))
}

/// Makes a store process hold exactly the `wanted` entries.
fn synchronize(connection: &OwnedFd, wanted: &BTreeMap<String, Vec<OwnedFd>>) -> io::Result<()> {
    for entry in list(connection)?.into_iter().filter(|entry| !wanted.contains_key(&entry.name)) {
        request(connection, &format!("remove {}", entry.name), &[])?;
    }
    for (name, descriptors) in wanted {
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        request(connection, &format!("put {name}"), &descriptors)?;
    }
    Ok(())
}

fn copies<'a>(descriptors: impl Iterator<Item = BorrowedFd<'a>>) -> io::Result<Vec<OwnedFd>> {
    descriptors.map(|descriptor| descriptor.try_clone_to_owned()).collect()
}

fn new_socket() -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    Ok(socket)
}

/// A new socket; replaces one that has no listener.
fn listen(path: &Path) -> io::Result<OwnedFd> {
    if let Some(folder) = path.parent() {
        own_folder(folder, 0o755).map_err(io::Error::other)?;
    }
    remove_socket(path)?;
    let socket = new_socket()?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // The store process also checks the user of each client. No client can connect before `listen`.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, 4)?;
    Ok(socket)
}

/// Removes the socket at `path`, and nothing else.
fn remove_socket(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => std::fs::remove_file(path),
        Ok(_) => Err(io::Error::other("it is no socket; move it away")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Connects to the store process at the socket; none if no process listens. Waits for a previous daemon that is about
/// to end.
fn connect(path: &Path) -> Result<Option<OwnedFd>> {
    let failed = |error: io::Error| system(path, "cannot be reached", &error);
    let end = Instant::now() + PREDECESSOR_TIMEOUT;
    loop {
        let socket = new_socket().map_err(failed)?;
        for direction in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, direction, Some(TIMEOUT)).map_err(|error| failed(error.into()))?;
        }
        let address = SocketAddrUnix::new(path).map_err(|error| failed(error.into()))?;
        match retry_on_intr(|| rustix::net::connect(&socket, &address)) {
            Ok(()) => {}
            Err(rustix::io::Errno::CONNREFUSED | rustix::io::Errno::NOENT) => return Ok(None),
            Err(error) => return Err(failed(error.into())),
        }
        if !is_of_own_user(&socket) {
            return Err(failed(io::ErrorKind::PermissionDenied.into()));
        }
        match passing::receive(&socket) {
            Ok(Some((text, _))) if text == "welcome" => return Ok(Some(socket)),
            Ok(Some(_)) if Instant::now() < end => std::thread::sleep(RETRY_INTERVAL),
            Ok(Some(_)) => {
                let text =
                    format!("another daemon has the store process at {}; stop it first", path.display());
                return Err(Error::new(ErrorKind::Busy, text));
            }
            // It exited because it held nothing.
            Ok(None) => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(error) => return Err(failed(error)),
        }
    }
}

fn request(connection: &OwnedFd, text: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    passing::send(connection, None, text, descriptors)?;
    match passing::receive(connection)? {
        Some((answer, _)) if answer == "done" => Ok(()),
        Some(_) => Err(io::ErrorKind::InvalidData.into()),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn list(connection: &OwnedFd) -> io::Result<Vec<Entry>> {
    passing::send(connection, None, "list", &[])?;
    let mut entries = Vec::new();
    loop {
        let message = passing::receive(connection)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        match listed(message).ok_or(io::ErrorKind::InvalidData)? {
            Some(entry) => entries.push(entry),
            None => return Ok(entries),
        }
    }
}
