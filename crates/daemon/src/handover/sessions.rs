//! Preserved sessions, the contents of the daemon's descriptor store. The entry of a FUSE device holds the channels of
//! its connection, and a sealed memory file with the state that the next daemon needs.
//!
//! Invariants: an entry holds the state together with the descriptors, so neither exists without the other and no file
//! can contradict them. Entries are validated when they are read: a device whose state cannot be read is neither served
//! nor ended. The sessions of a predecessor stay in the store until they are served or ended. If a store process does
//! not respond at the start, the request is repeated, and its sessions are available once it responds.
//!
//! Elsewhere: continuing a device's session (`cbd_fuse::session`), and which devices are wanted ([`crate::manager`]).

use super::process_store::ProcessStore;
use super::systemd_store::{self, SystemdStore};
use super::{DescriptorStore, Entry};
use cbd_fuse::{Session, SessionState, SessionStore};
use cbd_types::{Context, Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Version of the state that is written, and the only version that is read.
const VERSION: u32 = 1;
/// Most bytes of a state.
const STATE_BYTES_MAX: u64 = 16 << 10;
/// Interval of [`DescriptorStore::maintain`].
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Prefix of the name of an entry; the identity of the device follows.
const NAME_PREFIX: &str = "cbd-";
/// The seals of a state, which make it immutable.
const SEALS: SealFlags =
    SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

/// The JSON form of a state.
#[derive(Serialize, Deserialize)]
struct Document {
    version: u32,
    daemon_id: u64,
    name: String,
    mount_dir: String,
    link: Option<String>,
    connection: u32,
    loop_number: u32,
    size: u64,
    sector: u32,
    read_only: bool,
}

/// The descriptor store that a daemon requests.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions<'a> {
    /// Number of this daemon: only sessions with this number are ended if no block device uses them.
    pub daemon_id: u64,
    /// Folder of the store process's socket.
    pub run_dir: &'a Path,
    /// The program to run with the argument `store-process`; none if this daemon starts no store process.
    pub store_program: Option<&'a Path>,
    /// Whether new devices must survive the end of the daemon.
    pub preserves_new: bool,
}

/// The descriptor store of one daemon, and the sessions that its predecessor left there.
#[derive(Debug)]
pub struct PreservedSessions {
    daemon_id: u64,
    store: Mutex<Store>,
    preserves_new: bool,
    left: Mutex<BTreeMap<String, Vec<OwnedFd>>>,
    /// Set when a store process responded after the start and has further sessions.
    late_sessions: AtomicBool,
    /// The thread that maintains the store ends when this is dropped.
    maintenance_stop: Mutex<Option<Sender<()>>>,
}

/// The open store, and the one that does not respond.
#[derive(Debug)]
struct Store {
    /// The store, or why there is none.
    opened: std::result::Result<Arc<dyn DescriptorStore>, String>,
    /// A store process that has not responded yet: the store itself, or one with sessions of a daemon that systemd did
    /// not start.
    awaited: Option<Awaited>,
}

#[derive(Clone, Debug)]
struct Awaited {
    socket: PathBuf,
    program: PathBuf,
}

impl PreservedSessions {
    /// Opens the store of this machine and this process. To be called once, by a process that holds the locks of a
    /// daemon.
    #[must_use]
    pub fn open(options: StoreOptions<'_>) -> Self {
        let (store, entries) = open_store(options);
        Self {
            daemon_id: options.daemon_id,
            store: Mutex::new(store),
            preserves_new: options.preserves_new,
            left: Mutex::new(by_name(entries)),
            late_sessions: AtomicBool::new(false),
            maintenance_stop: Mutex::default(),
        }
    }

    /// No store, for `reason`.
    #[must_use]
    pub fn closed(reason: &str) -> Self {
        let store = Mutex::new(Store { opened: Err(reason.to_owned()), awaited: None });
        Self {
            daemon_id: 0,
            store,
            preserves_new: false,
            left: Mutex::default(),
            late_sessions: AtomicBool::new(false),
            maintenance_stop: Mutex::default(),
        }
    }

    fn store(&self) -> Option<Arc<dyn DescriptorStore>> {
        self.store.lock().opened.as_ref().ok().map(Arc::clone)
    }

    /// The store for a new device; none if the configuration disables it or the machine has none.
    #[must_use]
    pub fn store_for_new(&self, identity: &[u8]) -> Option<Arc<dyn SessionStore>> {
        if self.preserves_new { self.store_for(identity) } else { None }
    }

    /// The store for a device that the previous daemon preserved; none if no store is open.
    #[must_use]
    pub fn store_for(&self, identity: &[u8]) -> Option<Arc<dyn SessionStore>> {
        let store = self.store()?;
        Some(Arc::new(SessionEntry { store, name: entry_name(identity), daemon_id: self.daemon_id }))
    }

    /// Why [`store_for_new`](Self::store_for_new) returns none.
    #[must_use]
    pub fn unavailable_reason(&self) -> String {
        match &self.store.lock().opened {
            Ok(_) => "the configuration says so (preserve_fuse)".to_owned(),
            Err(reason) => reason.clone(),
        }
    }

    /// The name of the store, for status and log.
    #[must_use]
    pub fn store_name(&self) -> &'static str {
        self.store().map_or("no store", |store| store.store_name())
    }

    /// Whether a predecessor left a session of the device.
    #[must_use]
    pub fn has(&self, identity: &[u8]) -> bool {
        self.left.lock().contains_key(&entry_name(identity))
    }

    /// The session that a predecessor left of a device; none if it left none.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] and [`ErrorKind::Unsupported`] when it cannot be read.
    pub fn session(&self, identity: &[u8]) -> Result<Option<Session>> {
        let left = self.left.lock();
        left.get(&entry_name(identity)).map(|descriptors| Ok(read(descriptors)?.1)).transpose()
    }

    /// Marks the device as served by this daemon.
    pub fn mark_served(&self, identity: &[u8]) {
        self.left.lock().remove(&entry_name(identity));
    }

    /// Ends the session that a predecessor left of a device; its users see errors.
    pub fn end(&self, identity: &[u8]) {
        self.end_entry(&entry_name(identity));
    }

    /// The session of the device `device` that a predecessor of this daemon left, with the name of its entry; none if
    /// it left none.
    #[must_use]
    pub fn named(&self, device: &str) -> Option<(String, Session)> {
        let left = self.left.lock();
        left.iter().find_map(|(name, descriptors)| {
            let (daemon, session) = read(descriptors).ok()?;
            (daemon == self.daemon_id && session.state.name == device).then(|| (name.clone(), session))
        })
    }

    /// Ends the session that a predecessor left under the name of an entry; its users see errors.
    pub fn end_entry(&self, name: &str) {
        let Some(descriptors) = self.left.lock().remove(name) else { return };
        let session = read(&descriptors);
        drop(descriptors);
        if let Ok((_, session)) = session {
            session.end();
        }
        if let Some(store) = self.store() {
            store.remove(name);
        }
    }

    /// The mount points of the file systems that wait for this daemon.
    #[must_use]
    pub fn mounts(&self) -> Vec<PathBuf> {
        let left = self.left.lock();
        left.values().filter_map(|descriptors| Some(read(descriptors).ok()?.1.state.mount_dir)).collect()
    }

    /// Ends the sessions that a predecessor of this daemon left and that belong to no block device; returns the names
    /// of their devices.
    pub fn sweep(&self, wanted: &[Vec<u8>]) -> Vec<String> {
        let wanted: Vec<String> = wanted.iter().map(|identity| entry_name(identity)).collect();
        let unwanted: Vec<(String, String)> = {
            let left = self.left.lock();
            let not_wanted = left.iter().filter(|(name, _)| !wanted.contains(name));
            not_wanted
                .filter_map(|(name, descriptors)| match read(descriptors) {
                    Ok((daemon, session)) if daemon == self.daemon_id => {
                        Some((name.clone(), session.state.name))
                    }
                    Ok(_) => None,
                    Err(error) => {
                        tracing::warn!(
                            "the preserved session {name} of a former daemon cannot be used: {error}"
                        );
                        None
                    }
                })
                .collect()
        };
        unwanted.iter().for_each(|(name, _)| self.end_entry(name));
        unwanted.into_iter().map(|(_, device)| device).collect()
    }

    /// Starts the thread that maintains the store until this is dropped.
    pub fn start_maintenance(self: &Arc<Self>) {
        let (stop, stopped) = channel();
        *self.maintenance_stop.lock() = Some(stop);
        let preserved = Arc::downgrade(self);
        let work = move || {
            while stopped.recv_timeout(MAINTENANCE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let Some(preserved) = preserved.upgrade() else { return };
                preserved.maintain();
            }
        };
        if let Err(error) = std::thread::Builder::new().name("cbd-fd-store".to_owned()).spawn(work) {
            tracing::warn!(
                "no thread checks the descriptor store: FUSE devices end with the daemon once their store process dies: {error}"
            );
        }
    }

    /// Repairs the store if it has failed. The request runs without the lock, so that only this thread waits for the
    /// answer.
    fn maintain(&self) {
        let awaited = self.store.lock().awaited.clone();
        if let Some(Awaited { socket, program }) = awaited
            && let Ok((store_process, entries)) = ProcessStore::open(&socket, &program)
        {
            let is_there = store_process.is_connected();
            let mut store = self.store.lock();
            store.awaited = None;
            let entries = match &store.opened {
                Ok(opened) => take_over(&store_process, entries, &**opened),
                Err(_) => {
                    store.opened = Ok(Arc::new(store_process));
                    entries
                }
            };
            drop(store);
            if is_there {
                tracing::info!("the store process of the block devices answers now");
            } else {
                tracing::warn!(
                    "the store process of the block devices ended before it passed on what it held: devices of the former \
                     daemon are not continued, and their clients get errors"
                );
            }
            self.left.lock().append(&mut by_name(entries));
            self.late_sessions.store(true, Ordering::SeqCst);
        }
        if let Some(store) = self.store() {
            store.maintain();
        }
    }

    /// Whether sessions of a predecessor have been found since the last call.
    pub fn take_late_sessions(&self) -> bool {
        self.late_sessions.swap(false, Ordering::SeqCst)
    }
}

fn by_name(entries: Vec<Entry>) -> BTreeMap<String, Vec<OwnedFd>> {
    let ours = entries.into_iter().filter(|entry| entry.name.starts_with(NAME_PREFIX));
    ours.map(|entry| (entry.name, entry.descriptors)).collect()
}

/// Moves the entries of a store process into another store; returns those that were moved.
fn take_over(store_process: &ProcessStore, entries: Vec<Entry>, store: &dyn DescriptorStore) -> Vec<Entry> {
    let is_taken = |entry: &Entry| {
        let descriptors: Vec<_> = entry.descriptors.iter().map(AsFd::as_fd).collect();
        match store.put(&entry.name, &descriptors) {
            Ok(()) => {
                store_process.remove(&entry.name);
                true
            }
            Err(error) => {
                tracing::error!("{} stays with its store process: {error}", entry.name);
                false
            }
        }
    };
    entries.into_iter().filter(is_taken).collect()
}

fn open_store(options: StoreOptions<'_>) -> (Store, Vec<Entry>) {
    let socket = options.run_dir.join("keeper.sock");
    let awaited = || Some(Awaited { socket: socket.clone(), program: options.store_program?.to_owned() });
    let closed = |reason: String| (Store { opened: Err(reason), awaited: None }, Vec::new());
    if let Some(notify_socket) = std::env::var_os("NOTIFY_SOCKET") {
        let (store, mut entries) = match open_systemd(&notify_socket) {
            Ok(opened) => opened,
            Err(reason) => return closed(reason),
        };
        // A daemon that systemd did not start may have left sessions with a store process.
        let mut store = Store { opened: Ok(Arc::clone(&store)), awaited: None };
        if let (Some(program), Ok(opened)) =
            (options.store_program.filter(|_| socket.exists()), &store.opened)
        {
            match ProcessStore::open(&socket, program) {
                Ok((store_process, theirs)) => entries.extend(take_over(&store_process, theirs, &**opened)),
                Err(error) => {
                    tracing::warn!("{error}; the request is repeated");
                    store.awaited = awaited();
                }
            }
        }
        return (store, entries);
    }
    let Some(program) = options.store_program else {
        return closed("this program starts no store process".to_owned());
    };
    if !crate::system::is_root() {
        return closed("only root has block devices that can outlive the daemon".to_owned());
    }
    match ProcessStore::open(&socket, program) {
        Ok((store, entries)) => (Store { opened: Ok(Arc::new(store)), awaited: None }, entries),
        Err(error) => (Store { opened: Err(error.line()), awaited: awaited() }, Vec::new()),
    }
}

fn open_systemd(
    notify_socket: &std::ffi::OsStr,
) -> std::result::Result<(Arc<dyn DescriptorStore>, Vec<Entry>), String> {
    let variable = |name: &str| std::env::var(name).ok();
    let capacity = systemd_store::capacity(
        variable("FDSTORE").as_deref(),
        variable(systemd_store::CAPACITY_VARIABLE).as_deref(),
    )?;
    let entries = systemd_store::entries(crate::system::handed_over_descriptors());
    let store = SystemdStore::new(notify_socket, capacity, &entries).map_err(|error| error.line())?;
    Ok((Arc::new(store), entries))
}

fn entry_name(identity: &[u8]) -> String {
    use std::fmt::Write;
    identity.iter().fold(NAME_PREFIX.to_owned(), |mut name, byte| {
        // Writing to a string does not fail.
        let _ = write!(name, "{byte:02x}");
        name
    })
}

/// The entry of one device in the store.
struct SessionEntry {
    store: Arc<dyn DescriptorStore>,
    name: String,
    daemon_id: u64,
}

impl SessionStore for SessionEntry {
    fn put(&self, session: &Session) -> Result<()> {
        let state = write(self.daemon_id, &session.state).context(|| "its state".to_owned())?;
        // The state first: if a descriptor is lost, the state still has their number.
        let mut descriptors = vec![state.as_fd()];
        descriptors.extend(session.channels.iter().map(AsFd::as_fd));
        self.store.put(&self.name, &descriptors)
    }

    fn remove(&self) {
        self.store.remove(&self.name);
    }
}

/// A sealed file in memory with the state of a device.
fn write(daemon_id: u64, state: &SessionState) -> Result<OwnedFd> {
    let text = |path: &Path| {
        path.to_str()
            .map(str::to_owned)
            .ok_or_else(|| Error::new(ErrorKind::InvalidArgument, format!("{} is not UTF-8", path.display())))
    };
    let document = Document {
        version: VERSION,
        daemon_id,
        name: state.name.clone(),
        mount_dir: text(&state.mount_dir)?,
        link: state.link.as_deref().map(text).transpose()?,
        connection: state.connection,
        loop_number: state.loop_number,
        size: state.size,
        sector: state.sector,
        read_only: state.read_only,
    };
    let failed = |error: std::io::Error| {
        Error::new(ErrorKind::System, "a sealed file cannot be created").caused_by(error)
    };
    let bytes = serde_json::to_vec(&document).map_err(|error| failed(error.into()))?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create("cbd-kept", flags).map_err(|error| failed(error.into()))?);
    file.write_all(&bytes).map_err(failed)?;
    fcntl_add_seals(&file, SEALS).map_err(|error| failed(error.into()))?;
    Ok(file.into())
}

/// Separates the state from the channels and validates both; also returns the number of the daemon that stored them.
fn read(descriptors: &[OwnedFd]) -> Result<(u64, Session)> {
    let damaged =
        |problem: String| Error::new(ErrorKind::Damaged, format!("its preserved session {problem}"));
    let mut state = None;
    let mut channels = Vec::new();
    for descriptor in descriptors {
        let copy = descriptor.try_clone().map_err(|error| damaged(format!("cannot be used: {error}")))?;
        let file = File::from(copy);
        let found = file
            .metadata()
            .map_err(|error| damaged(format!("has a descriptor that cannot be read: {error}")))?;
        if found.is_file() {
            if state.replace((file, found.len())).is_some() {
                return Err(damaged("has two states".into()));
            }
        } else {
            channels.push(file.into());
        }
    }
    let (file, length) = state.ok_or_else(|| damaged("has no state".into()))?;
    let seals = fcntl_get_seals(&file)
        .map_err(|error| damaged(format!("has a state that is not in a sealed file: {error}")))?;
    if !seals.contains(SEALS) || length > STATE_BYTES_MAX {
        return Err(damaged("has a state that could be changed, or is too long".into()));
    }
    let mut bytes = vec![0; usize::try_from(length).unwrap_or_default()];
    file.read_exact_at(&mut bytes, 0)
        .map_err(|error| damaged(format!("has a state that cannot be read: {error}")))?;
    let (daemon, state) = parse(&bytes)?;
    Ok((daemon, Session::new(state, channels)?))
}

fn parse(bytes: &[u8]) -> Result<(u64, SessionState)> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let damaged = |error: serde_json::Error| {
        Error::new(ErrorKind::Damaged, "the state of its preserved session is damaged").caused_by(error)
    };
    let Version { version } = serde_json::from_slice(bytes).map_err(damaged)?;
    if version != VERSION {
        let text = format!(
            "the state of its preserved session is of version {version}, this program knows {VERSION}"
        );
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let Document {
        daemon_id, name, mount_dir, link, connection, loop_number, size, sector, read_only, ..
    } = serde_json::from_slice(bytes).map_err(damaged)?;
    let (mount_dir, link) = (PathBuf::from(mount_dir), link.map(PathBuf::from));
    let state = SessionState { name, mount_dir, link, connection, loop_number, size, sector, read_only };
    Ok((daemon_id, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(file: &OwnedFd) -> Vec<u8> {
        std::io::Read::bytes(File::from(file.try_clone().unwrap())).count();
        let file = File::from(file.try_clone().unwrap());
        let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    #[test]
    fn a_state_is_read_as_it_was_written_and_cannot_be_changed() {
        let file = write(7, &SessionState::example()).unwrap();
        assert_eq!(parse(&bytes_of(&file)).unwrap(), (7, SessionState::example()));
        let file = File::from(file);
        assert!(
            file.write_at(b"x", 0).is_err() && file.set_len(0).is_err() && file.set_len(1 << 20).is_err()
        );
    }

    #[test]
    fn a_state_cut_anywhere_or_of_another_version_is_refused() {
        let bytes = bytes_of(&write(7, &SessionState::example()).unwrap());
        for end in 0..bytes.len() {
            assert_eq!(parse(&bytes[..end]).unwrap_err().kind(), ErrorKind::Damaged, "{end}");
        }
        let text = String::from_utf8(bytes).unwrap().replace("\"version\":1", "\"version\":2");
        assert_eq!(parse(text.as_bytes()).unwrap_err().kind(), ErrorKind::Unsupported);
        for hostile in ["null", "[]", "{\"version\":-1}", "{\"version\":1}", "\u{0}"] {
            assert_eq!(parse(hostile.as_bytes()).unwrap_err().kind(), ErrorKind::Damaged, "{hostile}");
        }
    }

    #[test]
    fn an_entry_without_exactly_one_sealed_state_is_refused() {
        let sealed = || write(7, &SessionState::example()).unwrap();
        let plain = || OwnedFd::from(tempfile::tempfile().unwrap());
        let open = || {
            let file = memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
            File::from(file.try_clone().unwrap()).write_all(b"{}").unwrap();
            file
        };
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let hostile = [
            vec![],
            vec![plain()],
            vec![open()],
            vec![sealed(), sealed()],
            vec![null()],
            // A state that is valid, with channels that are none.
            vec![sealed()],
            vec![sealed(), null()],
        ];
        for descriptors in hostile {
            assert_eq!(read(&descriptors).unwrap_err().kind(), ErrorKind::Damaged);
        }
    }

    #[test]
    fn closed_sessions_preserve_nothing_and_give_the_reason() {
        let preserved = PreservedSessions::closed("it is a test");
        assert!(preserved.store_for_new(b"x").is_none() && !preserved.has(b"x"));
        assert_eq!(preserved.unavailable_reason(), "it is a test");
        assert!(preserved.session(b"x").unwrap().is_none());
        assert!(preserved.sweep(&[]).is_empty() && preserved.mounts().is_empty());
    }

    #[test]
    fn the_name_of_an_entry_contains_the_identity_of_the_device_and_fits_every_store() {
        let name = entry_name(&[0xab; 20]);
        assert_eq!(name, format!("cbd-{}", "ab".repeat(20)));
        assert!(super::super::is_name(&name));
    }
}
