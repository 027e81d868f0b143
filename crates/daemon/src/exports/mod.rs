//! The exports of a block device: their kinds, their names, and how they are opened and closed.
//!
//! Invariant: the printed name of a device is what its user opens: `/dev/cbdN`, an NBD URI, or the socket for a virtual
//! machine.

mod choice;
mod file;
mod grow;
pub mod labels;
mod notices;

pub use choice::ExportChoice;
pub use file::ExportFile;
pub use labels::{Described, Labels};

use crate::front_ends::FrontEnds;
use crate::handover::PreservedSessions;
use crate::left::LeftDevice;
use cbd_export::BlockDevice;
use cbd_export::folders::reach_folder;
use cbd_fuse::{FuseLoop, StopMode};
use cbd_nbd::{Listen, Server};
use cbd_types::{Context, Error, ErrorKind, Result};
use cbd_ublk::{LeftBehind, Tag, Ublk};
use notices::{nbd_observer, vhost_observer};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Timeout for the last user of a device to close it: a client that has just disconnected, or udev's scan of a device
/// that was just written.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(500);

/// Time for which a ring's thread spins for the next request before it sleeps, unless the configuration sets another: a
/// few times the cost of a wakeup.
const SPIN: Duration = Duration::from_micros(50);

/// Timeout for an export to end.
pub const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Folders, shared state and settings of exports.
#[derive(Clone, Debug)]
pub struct ExportContext {
    /// Mounts and sockets.
    pub run_dir: PathBuf,
    /// Links to block devices.
    pub dev_dir: PathBuf,
    /// The daemon's own number, which marks its ublk devices.
    pub daemon_id: u64,
    /// The sessions of FUSE devices in the descriptor store.
    pub preserved: Arc<PreservedSessions>,
    /// The state that all front ends share.
    pub front_ends: Arc<FrontEnds>,
    /// Longest time for which a vhost-user ring's thread spins for the next request before it sleeps.
    pub vhost_spin: Option<Duration>,
}

impl ExportContext {
    /// The folder of FUSE mounts.
    #[must_use]
    pub fn fuse_dir(&self) -> PathBuf {
        self.run_dir.join("fuse")
    }

    /// The folder with the names of ublk disks.
    #[must_use]
    pub fn ublk_dir(&self) -> PathBuf {
        self.run_dir.join("ublk")
    }

    /// The tag of the ublk device with this identity.
    #[must_use]
    pub fn tag(&self, identity: &[u8]) -> Tag {
        Tag::new(self.daemon_id, identity)
    }

    /// The kernel devices that a predecessor may have left of the device with this identity.
    #[must_use]
    pub fn left(&self, identity: &[u8]) -> LeftDevice {
        LeftDevice {
            tag: self.tag(identity),
            preserved: Arc::clone(&self.preserved),
            identity: identity.to_vec(),
        }
    }

    fn default_socket(&self, name: &str) -> PathBuf {
        self.run_dir.join("nbd").join(format!("{name}.sock"))
    }
}

/// The name of a block device: `cbdN` on transport 0, and `cbdT-N` on transport T, since numbers begin at 0 on each
/// transport. The number is the same after a restart.
#[must_use]
pub fn device_name(transport: u32, blkdev: u32) -> String {
    if transport == 0 { format!("cbd{blkdev}") } else { format!("cbd{transport}-{blkdev}") }
}

/// The server or the kernel device of an export that is open.
#[derive(Debug)]
enum OpenServer {
    Nbd(Server),
    VhostUser(cbd_vhost::Server),
    FuseLoop(Box<FuseLoop>),
    Ublk(Box<Ublk>),
}

/// A running export.
#[derive(Debug)]
pub struct Export {
    open: OpenServer,
    name: String,
    /// The path or URI that its user opens.
    pub device_path: String,
    /// The method by which clients reach it, in words, at the time at which it was opened.
    method: String,
    /// Why `auto` did not choose a better export.
    pub note: Option<String>,
    /// The socket or link by which clients find it; none at a network address.
    pub file: Option<Arc<ExportFile>>,
    /// Its further links, if it is a kernel block device that has any.
    labels: Option<Labels>,
}

/// The device that an export is to serve.
#[derive(Clone, Copy, Debug)]
pub struct DeviceToExport<'a> {
    /// Name of the device.
    pub name: &'a str,
    /// The identity of the device across restarts.
    pub identity: &'a [u8],
    /// Number of threads, each with a queue.
    pub queues: usize,
}

impl Export {
    /// Opens the export that `choice` names to `device`.
    ///
    /// # Errors
    /// When the system refuses a resource; resources that were already created are released.
    pub fn start(
        choice: &ExportChoice,
        place: DeviceToExport<'_>,
        device: &Arc<dyn BlockDevice>,
        context: &ExportContext,
    ) -> Result<Self> {
        match choice {
            ExportChoice::Nbd(listen) => Self::nbd(listen.clone(), place.name, Arc::clone(device), context),
            ExportChoice::VhostUser(path) => Self::vhost_user(path, place.name, Arc::clone(device), context),
            ExportChoice::Ublk => Self::ublk(place, device, context),
            ExportChoice::FuseLoop => Self::fuse_loop(place, device, context),
            ExportChoice::Auto => Self::best(place, device, context, true),
            ExportChoice::Kernel => Self::best(place, device, context, false),
        }
    }

    /// Opens the best export that this machine supports; NBD only if the choice does not require a kernel block device.
    fn best(
        place: DeviceToExport<'_>,
        device: &Arc<dyn BlockDevice>,
        context: &ExportContext,
        allow_nbd: bool,
    ) -> Result<Self> {
        if context.preserved.has(place.identity) {
            // Clients of a predecessor wait for the session: another export would not serve them.
            return Self::fuse_loop(place, device, context);
        }
        refuse_if_predecessor_waits(place.name, context)?;
        let no_ublk = match Self::ublk(place, device, context) {
            // As with a session, for an existing ublk device.
            Err(error) if LeftBehind::find(context.tag(place.identity)).is_some() => return Err(error),
            Err(error) => error.line(),
            Ok(export) => return Ok(export),
        };
        let started = cbd_fuse::probe()
            .and_then(|()| Self::fuse_loop(place, device, context).map_err(|error| error.line()));
        match started {
            Ok(mut export) => {
                export.note = Some(match export.note {
                    None => format!("a loop device over a FUSE file; ublk would be faster: {no_ublk}"),
                    Some(not_preserved) => {
                        format!("{not_preserved}; with ublk they would wait for the next daemon: {no_ublk}")
                    }
                });
                Ok(export)
            }
            Err(reason) if !allow_nbd => {
                let text = format!(
                    "no kernel block device can be made: {no_ublk}; {reason}; without --require-kernel it is reached by NBD"
                );
                Err(Error::new(ErrorKind::Unsupported, text))
            }
            Err(reason) => {
                let socket = context.default_socket(place.name);
                create_folder(&socket)?;
                let mut export = Self::nbd(Listen::Unix(socket), place.name, Arc::clone(device), context)?;
                export.note = Some(format!("reached by NBD, not as a kernel block device: {reason}"));
                Ok(export)
            }
        }
    }

    fn ublk(
        place: DeviceToExport<'_>,
        device: &Arc<dyn BlockDevice>,
        context: &ExportContext,
    ) -> Result<Self> {
        let link = context.dev_dir.join(place.name);
        let options = cbd_ublk::Options {
            name: place.name.to_owned(),
            tag: context.tag(place.identity),
            link: Some(link.clone()),
            names: Some(context.ublk_dir()),
            queues: place.queues,
            depth: cbd_ublk::DEPTH,
            thread_setup: Some(Arc::new(prepare_data_thread)),
            read_only: false,
        };
        let export = Ublk::start(device, &options)?;
        let (queues, depth) = export.queues();
        let method = format!("ublk, {}, {queues} queues of {depth}", export.disk_path().display());
        let taken =
            if export.is_taken_over() { "; taken over from a predecessor, its clients continue" } else { "" };
        tracing::info!("{}: {method}{taken}", place.name);
        let opened = Self {
            open: OpenServer::Ublk(Box::new(export)),
            name: place.name.to_owned(),
            device_path: link.display().to_string(),
            method,
            note: None,
            file: ExportFile::at(&link).map(Arc::new),
            labels: None,
        };
        opened.warn_of_former_size(device.geometry().size);
        Ok(opened)
    }

    fn nbd(
        listen: Listen,
        name: &str,
        device: Arc<dyn BlockDevice>,
        context: &ExportContext,
    ) -> Result<Self> {
        let note = listen.is_remote().then(|| {
            format!("reached over the network at {listen}: NBD is neither encrypted nor authenticated")
        });
        let options = cbd_nbd::Options {
            export_name: name.to_owned(),
            thread_setup: Some(Arc::new(prepare_data_thread)),
            observer: Some(nbd_observer(name.to_owned(), &context.front_ends)),
            memory: Arc::clone(&context.front_ends.nbd_memory),
            stop_timeout: STOP_TIMEOUT,
            ..cbd_nbd::Options::default()
        };
        let server = Server::start(device, listen, options)?;
        let file = match server.address() {
            Listen::Unix(path) => ExportFile::at(path).map(Arc::new),
            Listen::Tcp(_) => None,
        };
        let device_path = server.uri();
        let method = "NBD".to_owned();
        let (open, name) = (OpenServer::Nbd(server), name.to_owned());
        Ok(Self { open, name, device_path, method, note, file, labels: None })
    }

    fn vhost_user(
        path: &Path,
        name: &str,
        device: Arc<dyn BlockDevice>,
        context: &ExportContext,
    ) -> Result<Self> {
        let options = cbd_vhost::Options {
            name: name.to_owned(),
            spin_max: context.vhost_spin.unwrap_or(SPIN),
            thread_setup: Some(Arc::new(prepare_data_thread)),
            observer: Some(vhost_observer(name.to_owned(), &context.front_ends)),
            guest_memory_max: context.front_ends.guest_memory_max,
            guest_memory: Arc::clone(&context.front_ends.guest_memory),
            stop_timeout: STOP_TIMEOUT,
            ..cbd_vhost::Options::default()
        };
        let server = cbd_vhost::Server::start(device, path, options)?;
        let device_path = path.display().to_string();
        let method = "vhost-user-blk".to_owned();
        Ok(Self {
            open: OpenServer::VhostUser(server),
            name: name.to_owned(),
            device_path,
            method,
            note: None,
            file: ExportFile::at(path).map(Arc::new),
            labels: None,
        })
    }

    fn fuse_loop(
        place: DeviceToExport<'_>,
        device: &Arc<dyn BlockDevice>,
        context: &ExportContext,
    ) -> Result<Self> {
        let DeviceToExport { name, queues, identity } = place;
        let preserved = &context.preserved;
        let link = context.dev_dir.join(name);
        let options = cbd_fuse::Options {
            name: name.to_owned(),
            mount_dir: context.fuse_dir().join(name),
            link: Some(link.clone()),
            queues,
            thread_setup: Some(Arc::new(prepare_data_thread)),
            read_only: false,
            store: if preserved.has(identity) {
                preserved.store_for(identity)
            } else {
                preserved.store_for_new(identity)
            },
        };
        let export = match preserved.session(identity).context(|| not_taken_over(name))? {
            Some(session) if session.is_usable() => {
                let export = FuseLoop::take_over(device, &options, &session)?;
                preserved.mark_served(identity);
                export
            }
            // Its removal had begun, or another process has unmounted it: no client can use it.
            Some(_) => {
                preserved.end(identity);
                FuseLoop::start(Arc::clone(device), options)?
            }
            None => FuseLoop::start(Arc::clone(device), options)?,
        };
        let taken =
            if export.is_taken_over() { "; taken over from a predecessor, its clients continue" } else { "" };
        tracing::info!("{name}: FUSE and {}{taken}", export.loop_path().display());
        let method = format!(
            "FUSE and {}, outlives the daemon, descriptors held by {}",
            export.loop_path().display(),
            preserved.store_name()
        );
        let note = (!export.is_preserved()).then(|| {
            let reason = export.not_preserved().map_or_else(|| preserved.unavailable_reason(), Error::line);
            format!("a loop device over a FUSE file, whose users see errors when the daemon ends ({reason})")
        });
        let opened = Self {
            open: OpenServer::FuseLoop(Box::new(export)),
            name: name.to_owned(),
            device_path: link.display().to_string(),
            method,
            note,
            file: ExportFile::at(&link).map(Arc::new),
            labels: None,
        };
        opened.warn_of_former_size(device.geometry().size);
        Ok(opened)
    }

    /// Makes the further links of a kernel block device; other exports have none.
    #[must_use]
    pub fn with_labels(mut self, mut labels: Labels) -> Self {
        if matches!(self.open, OpenServer::FuseLoop(_) | OpenServer::Ublk(_)) {
            labels.publish();
            self.labels = Some(labels);
        }
        self
    }

    /// Its further links, if it has any.
    #[must_use]
    pub const fn labels(&self) -> Option<&Labels> {
        self.labels.as_ref()
    }

    /// Its further links, to change them.
    pub const fn labels_mut(&mut self) -> Option<&mut Labels> {
        self.labels.as_mut()
    }

    /// The method by which clients reach the device, in words.
    #[must_use]
    pub fn method(&self) -> String {
        match &self.open {
            // This may be temporary: the store does not hold its descriptors while a stop waits for it.
            OpenServer::FuseLoop(export) if !export.is_preserved() => {
                format!("FUSE and {}, ends with the daemon", export.loop_path().display())
            }
            _ => self.method.clone(),
        }
    }

    /// The user of the device, in words; none while it is not in use.
    ///
    /// # Errors
    /// When the system does not report the users of the device.
    pub fn user(&self) -> Result<Option<String>> {
        match &self.open {
            OpenServer::Nbd(server) => Ok(match server.connections() {
                0 => None,
                1 => Some(format!("an NBD client is connected to {}", self.device_path)),
                clients => Some(format!("{clients} NBD clients are connected to {}", self.device_path)),
            }),
            OpenServer::VhostUser(server) => Ok(server
                .is_connected()
                .then(|| format!("a virtual machine or a program is connected to {}", self.device_path))),
            OpenServer::FuseLoop(export) => export.is_busy(),
            OpenServer::Ublk(export) => export.is_busy(),
        }
    }

    /// Whether its users wait while no daemon runs; otherwise they see errors.
    #[must_use]
    pub fn outlives_daemon(&self) -> bool {
        match &self.open {
            OpenServer::Nbd(_) | OpenServer::VhostUser(_) => false,
            OpenServer::FuseLoop(export) => export.is_preserved(),
            OpenServer::Ublk(_) => true,
        }
    }

    /// Refuses if the device is in use.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] that names the user of the device.
    pub fn refuse_if_used(&self) -> Result<()> {
        let end = Instant::now() + RELEASE_TIMEOUT;
        loop {
            let Some(user) = self.user()? else { return Ok(()) };
            if Instant::now() >= end {
                return Err(Error::new(ErrorKind::Busy, format!("{user}; end that first, or use --force")));
            }
            std::thread::sleep(RELEASE_TIMEOUT / 10);
        }
    }

    /// A reason other than the device for which clients wait, in words.
    #[must_use]
    pub fn wait_reason(&self) -> Option<String> {
        let OpenServer::Nbd(server) = &self.open else { return None };
        let clients = match server.waiting() {
            0 => return None,
            1 => "an NBD client waits".to_owned(),
            waiting => format!("{waiting} NBD clients wait"),
        };
        Some(format!(
            "{clients} until the backing device has completed requests of connections that have ended"
        ))
    }

    /// Why the export has ended without a command.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        match &self.open {
            OpenServer::Nbd(_) | OpenServer::VhostUser(_) => None,
            OpenServer::FuseLoop(export) => export.failure(),
            OpenServer::Ublk(export) => export.failure(),
        }
    }

    /// Closes the export: requests in flight complete, later ones fail.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if it is in use and `force` is not set; the export is returned and continues. Other errors
    /// name the part that did not end properly; the export is closed in that case.
    pub fn stop(mut self, force: bool) -> std::result::Result<(), (Option<Box<Self>>, Error)> {
        if !force && let Err(error) = self.refuse_if_used() {
            return Err((Some(Box::new(self)), error));
        }
        match self.open {
            OpenServer::Nbd(server) => server.stop().map_err(|error| (None, error)),
            OpenServer::VhostUser(server) => server.stop().map_err(|error| (None, error)),
            OpenServer::FuseLoop(ref mut export) => {
                let mode = if force { StopMode::Force } else { StopMode::WhenUnused };
                match export.stop(mode, STOP_TIMEOUT) {
                    Ok(()) => Ok(()),
                    Err(error) if force => Err((None, error)),
                    Err(error) => Err((Some(Box::new(self)), error)),
                }
            }
            OpenServer::Ublk(ref mut export) => {
                let mode = if force { cbd_ublk::StopMode::Force } else { cbd_ublk::StopMode::WhenUnused };
                match export.stop(mode, STOP_TIMEOUT) {
                    Ok(()) => Ok(()),
                    Err(error) if force => Err((None, error)),
                    Err(error) => Err((Some(Box::new(self)), error)),
                }
            }
        }
    }

    /// Ends the export with the daemon, even if the device is in use. A device in use that the kernel preserves for the
    /// next daemon is left, and its clients wait; any other export is closed by force.
    ///
    /// # Errors
    /// When a part of it does not end properly.
    pub fn end(self) -> Result<()> {
        let Self { open, name, device_path, method, note, file, labels } = self;
        let left = |reason: Error| {
            tracing::info!("{name}: {reason}; it is left, and its clients wait for the next daemon");
        };
        // If its users cannot be determined, it is not closed by force: a client may have requests in flight.
        match open {
            OpenServer::Ublk(mut export) => match export.stop(cbd_ublk::StopMode::WhenUnused, STOP_TIMEOUT) {
                Err(reason) if !export.is_stopped() => {
                    left(reason);
                    export.leave(STOP_TIMEOUT)
                }
                ended => ended,
            },
            OpenServer::FuseLoop(mut export) if export.is_preserved() => {
                match export.stop(StopMode::WhenUnused, STOP_TIMEOUT) {
                    Err(reason) if !export.is_ended() => {
                        left(reason);
                        export.hand_over(STOP_TIMEOUT)
                    }
                    ended => ended,
                }
            }
            open => {
                let export = Self { open, name, device_path, method, note, file, labels };
                export.stop(true).map_err(|(_, error)| error)
            }
        }
    }

    /// The name of the device.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// Refuses a new export while clients of a predecessor wait at one that this daemon cannot take over: their delayed
/// requests would overwrite later writes.
fn refuse_if_predecessor_waits(name: &str, context: &ExportContext) -> Result<()> {
    let folder = context.fuse_dir().join(name);
    if cbd_export::mounts::at(&folder)?.is_none() {
        return Ok(());
    }
    let text = format!(
        "{} is mounted: clients of a former daemon wait, and this daemon cannot reach the store that holds the descriptors ({}); start \
         the daemon as it was started before, or give the clients errors with umount -f {}",
        folder.display(),
        context.preserved.unavailable_reason(),
        folder.display()
    );
    Err(Error::new(ErrorKind::Busy, text))
}

fn not_taken_over(name: &str) -> String {
    format!("{name} waits for its daemon, and cannot be taken over; dev-stop --force gives its users errors")
}

fn create_folder(file: &Path) -> Result<()> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    reach_folder(folder).map(drop)
}

/// Why threads of the data path cannot be exempted from memory reclaim (`PR_SET_IO_FLUSHER`); none if they can.
#[must_use]
pub fn io_flusher_error() -> Option<String> {
    // On a thread of its own: the attribute stays with the thread.
    match std::thread::Builder::new().spawn(cbd_fuse::flusher::become_io_flusher) {
        Ok(thread) => thread.join().ok()?.err(),
        Err(error) => Some(format!("no thread could be started to test PR_SET_IO_FLUSHER: {error}")),
    }
}

/// Marks the calling thread of the data path as an I/O flusher: its allocations do not wait for writeback that only
/// this thread can complete.
pub fn prepare_data_thread() {
    // The status has a warning already if the kernel refuses it.
    let _ = cbd_fuse::flusher::become_io_flusher();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_other_transports_have_names_of_their_own() {
        assert_eq!(device_name(0, 0), "cbd0");
        assert_eq!(device_name(0, 12), "cbd12");
        assert_eq!(device_name(1, 2), "cbd1-2");
    }
}
