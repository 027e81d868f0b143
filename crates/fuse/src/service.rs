//! The file, mounted and served: the connection, its threads, and their end.
//!
//! Invariants: requests come by io_uring for all processors, or through `/dev/fuse` for all: if any part of
//! the former fails, that mount is removed and another one is made. Started parts are stopped in reverse
//! order, whichever step of the start failed. An end takes no longer than its timeout, even if the device
//! below never answers. If a [descriptor store](crate::kept) holds the descriptors, or may hold them, a
//! thread that closes its channel ends nothing: so a thread that fails aborts the connection, and an end is
//! an explicit abort.
//!
//! Elsewhere: the users of the file ([`crate::export`]), the work of a thread ([`crate::worker`]).

use crate::connection;
use crate::door;
use crate::errors::system_error;
use crate::export::{Options, ThreadSetup};
use crate::filesystem::Filesystem;
use crate::handshake;
use crate::life::Life;
use crate::mounts;
use crate::ring::processors::Processors;
use crate::ring::raw::{self, Lent};
use crate::ring::{self, Rings};
use crate::system;
use crate::worker::Worker;
use cbd_export::BlockDevice;
use cbd_export::folders::{own_folder, own_subfolder};
use cbd_types::{Error, ErrorKind, Result};
use std::cell::Cell;
use std::fs::{self, File};
use std::io::PipeReader;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

mod kept;

pub use kept::Kept;

/// Timeout of the threads' end after the connection was aborted.
pub const ABORT_PATIENCE: Duration = Duration::from_secs(2);
/// Timeout of the first request that the kernel delivers by io_uring.
const RING_PATIENCE: Duration = Duration::from_secs(5);
/// Slots for a processor that is offline now; it may come online.
const OFFLINE_DEPTH: usize = 4;
/// Time that a dropped service grants to requests in flight.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// The transport of requests from the kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Way {
    /// By io_uring.
    Ring {
        /// A queue for each possible processor.
        queues: usize,
        /// Threads that serve them.
        threads: usize,
        /// Slots of each queue.
        depth: usize,
    },
    /// Through `/dev/fuse`.
    Door {
        /// Why io_uring is not used.
        reason: String,
    },
}

impl std::fmt::Display for Way {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ring { queues, threads, depth } => {
                write!(out, "FUSE over io_uring: {queues} queues of {depth} requests, {threads} threads")
            }
            Self::Door { reason } => write!(out, "FUSE through /dev/fuse: {reason}"),
        }
    }
}

/// A mounted file system of one file with the threads that serve it. Dropping a service that was not ended
/// aborts it.
pub struct Service {
    name: String,
    mount_dir: PathBuf,
    life: Arc<Life>,
    threads: Vec<JoinHandle<Lent>>,
    mounted: bool,
    /// The number of the connection, where it is known.
    connection: Option<u32>,
    way: Way,
    /// The requirement that is missing for a later process to take the connection over.
    cannot_be_kept: Option<&'static str>,
    /// A duplicate of each channel, until they are in the descriptor store.
    doors: Vec<OwnedFd>,
    /// The preserved session, set before the first attempt to store it.
    kept: Option<Arc<Kept>>,
}

/// Why `/dev/fuse` is used for a device that is to be preserved.
const KEPT_REASON: &str = "what comes by io_uring could not outlive the daemon, and this can";

impl Service {
    /// Mounts the file and serves it.
    ///
    /// # Errors
    /// The refused step, as text; nothing is left behind then.
    pub fn start(device: &Arc<dyn BlockDevice>, options: &Options) -> Result<Self> {
        let mut reason = "that is not wanted".to_owned();
        if options.keep.is_some() {
            KEPT_REASON.clone_into(&mut reason);
        } else if options.ring_depth > 0 {
            match Self::attempt(device, options, true) {
                Ok(service) => return Ok(service),
                Err(error) => reason = error.line(),
            }
        }
        let mut service = Self::attempt(device, options, false)?;
        service.way = Way::Door { reason };
        Ok(service)
    }

    fn attempt(device: &Arc<dyn BlockDevice>, options: &Options, over_ring: bool) -> Result<Self> {
        let (stopped, stop) =
            std::io::pipe().map_err(|error| system_error("no pipe for the FUSE threads", &error))?;
        let reason = "the kernel does not offer io_uring (the parameter enable_uring of its fuse module is off, \
                      or it is older than Linux 6.14)";
        let mut service = Self {
            name: options.name.clone(),
            mount_dir: prepare_mount_dir(&options.mount_dir)?,
            life: Arc::new(Life::new(stop)?),
            threads: Vec::new(),
            mounted: false,
            connection: None,
            way: Way::Door { reason: reason.into() },
            cannot_be_kept: Some("it is not served through /dev/fuse"),
            doors: Vec::new(),
            kept: None,
        };
        // On an error, the drop of `service` undoes the completed steps.
        service.bring_up(device, options, over_ring, Arc::new(stopped))?;
        Ok(service)
    }

    fn bring_up(
        &mut self,
        device: &Arc<dyn BlockDevice>,
        options: &Options,
        over_ring: bool,
        stop: Arc<PipeReader>,
    ) -> Result<()> {
        let first = connection::open()?;
        connection::mount(&first, &self.mount_dir)?;
        self.mounted = true;
        self.connection = cbd_export::mounts::at(&self.mount_dir)?.as_ref().map(mounts::connection);
        let filesystem = Arc::new(Filesystem {
            name: options.name.clone(),
            geometry: device.geometry(),
            read_only: options.read_only,
            over_ring,
        });
        let agreed = handshake::agree(&first, &filesystem, &self.life)?;
        if !agreed.over_ring {
            self.cannot_be_kept = (!agreed.resends).then_some("the kernel is older than Linux 6.9");
        }
        let agreed = agreed.over_ring;
        let duties = if agreed { self.share_out(options)? } else { vec![Duty::Door; options.queues] };
        let mut starting = Vec::with_capacity(duties.len());
        for duty in duties {
            let connection = connection::another(&first)?;
            let mut door = None;
            if options.keep.is_some() {
                self.doors.push(duplicate(&connection)?);
                door = Some(duplicate(&connection)?);
            }
            starting.push(Starting {
                connection,
                device: Arc::clone(device),
                filesystem: Arc::clone(&filesystem),
                stop: Arc::clone(&stop),
                leaving: self.entering(duty != Duty::Door, door),
                setup: options.thread_setup.clone(),
                duty,
            });
        }
        drop(first);
        self.start_threads(starting)?;
        if agreed { self.wait_for_ring() } else { Ok(()) }
    }

    /// Registers a thread that is about to start. A thread of a preserved connection aborts the connection
    /// when it fails, and has a duplicate of its channel for that.
    fn entering(&self, with_all: bool, kept: Option<OwnedFd>) -> Leaving {
        let connection = kept.map(|door| KeptConnection {
            number: self.connection,
            mount_dir: self.mount_dir.clone(),
            door,
        });
        Leaving::enter(&self.life, with_all, connection)
    }

    fn still_waiting(&self, and: &str) -> Error {
        let serving = self.life.look().serving;
        let text = format!("{}: {serving} threads still wait for requests in flight; {and}", self.name);
        Error::new(ErrorKind::TimedOut, text)
    }

    /// Assigns queues and depths to the threads.
    fn share_out(&mut self, options: &Options) -> Result<Vec<Duty>> {
        let processors = Processors::of_this_machine()?;
        let shares = processors.share_out(options.queues);
        let (queues, threads) = (processors.possible, shares.len());
        self.way = Way::Ring { queues, threads, depth: options.ring_depth };
        let depth = |queue: u16| {
            let online = processors.is_online(usize::from(queue));
            if online { options.ring_depth } else { options.ring_depth.min(OFFLINE_DEPTH) }
        };
        let slots = |share: Vec<u16>| {
            share.into_iter().flat_map(|queue| std::iter::repeat_n(queue, depth(queue))).collect()
        };
        let duties = shares.into_iter().map(slots).enumerate();
        Ok(duties.map(|(index, slots)| Duty::Queues { slots, with_door: index == 0 }).collect())
    }

    /// The kernel delivers requests through the ring only when it has slots for all its queues, and holds
    /// them back until then. So this makes one request and waits for it.
    fn wait_for_ring(&self) -> Result<()> {
        let (answered, answer) = mpsc::channel();
        let target = self.mount_dir.clone();
        // A thread of its own, since the query cannot be cancelled; it ends when the connection does.
        let asked = std::thread::Builder::new().name("cbd-fuse-ask".into()).spawn(move || {
            let _ = answered.send(system::ask_file_system(&target));
        });
        asked.map_err(|error| system_error("no thread to try FUSE over io_uring with", &error))?;
        match answer.recv_timeout(RING_PATIENCE) {
            Ok(answer) => answer.map_err(|error| system_error("FUSE over io_uring", &error)),
            Err(_) => Err(Error::new(ErrorKind::TimedOut, "the kernel hands no request over by io_uring")),
        }
    }

    /// Each thread opens its queue itself, and serves once it has one; an error of one thread fails the
    /// start.
    fn start_threads(&mut self, starting: Vec<Starting>) -> Result<()> {
        let (ready, all_ready) = mpsc::channel();
        let expected = starting.len();
        for (index, starting) in starting.into_iter().enumerate() {
            let ready = ready.clone();
            let thread = std::thread::Builder::new()
                .name(format!("cbd-fuse-{index}"))
                .spawn(move || starting.run(ready))
                .map_err(|error| system_error("no thread to serve the file", &error))?;
            self.threads.push(thread);
        }
        drop(ready);
        let mut count = 0;
        for answer in all_ready {
            answer?;
            count += 1;
        }
        if count == expected {
            return Ok(());
        }
        Err(Error::new(ErrorKind::System, "a thread that was to serve the file ended before it began"))
    }

    /// The transport of requests.
    pub const fn way(&self) -> &Way {
        &self.way
    }

    /// The shared state of the threads.
    pub fn life(&self) -> &Life {
        &self.life
    }

    /// The path of the file.
    pub fn file_path(&self) -> PathBuf {
        self.mount_dir.join(&self.name)
    }

    /// Where the file system is mounted.
    pub fn mount_dir(&self) -> &Path {
        &self.mount_dir
    }

    /// Whether it has not been ended.
    pub const fn is_mounted(&self) -> bool {
        self.mounted
    }

    /// Why it has stopped serving although it was not ended.
    pub fn failure(&self) -> Option<String> {
        if !self.mounted {
            return None;
        }
        let state = self.life.look();
        let failed = state.failure.as_ref().map(Error::line);
        failed.or_else(|| (state.serving == 0).then(|| "the FUSE connection was ended from outside".into()))
    }

    /// Unmounts the file, which has no user any more, and ends the threads.
    ///
    /// # Errors
    /// As for [`Self::end`].
    pub fn unmount(&mut self, end: Instant) -> Result<()> {
        // The message that the loop device has closed the file arrives asynchronously.
        self.life.wait(left(end), |state| state.open_files == 0 || state.serving == 0);
        if mounts::ours_at(self.connection, &self.mount_dir).is_some()
            && system::umount(&self.mount_dir, libc::UMOUNT_NOFOLLOW).is_ok()
        {
            // The unmount has ended the connection, and its number may belong to another one from here on.
            self.mounted = false;
        }
        self.end(end)
    }

    /// Completes requests in flight, then the threads close their channels and the connection ends with the
    /// last one; at `end` it is aborted.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if threads still wait for the device below; users of the file see errors all
    /// the same.
    pub fn end(&mut self, end: Instant) -> Result<()> {
        self.life.stop();
        let all_gone = self.life.wait(left(end), |state| state.serving == 0);
        let kept = self.kept.take();
        if !all_gone || kept.is_some() {
            let door = kept.as_ref().and_then(|kept| kept.door());
            mounts::abort_ours(self.connection, &self.mount_dir, door.as_ref());
            self.life.desert();
        } else if self.mounted && mounts::ours_at(self.connection, &self.mount_dir).is_some() {
            let _ = system::umount(&self.mount_dir, libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW);
        }
        self.mounted = false;
        kept.iter().for_each(|kept| kept.end());
        // Fails if another process has put a file into the directory, which must not be deleted then.
        let _ = fs::remove_dir(&self.mount_dir);
        if !all_gone && !self.life.wait(ABORT_PATIENCE, |state| state.serving == 0) {
            return Err(self.still_waiting("clients see errors meanwhile"));
        }
        self.threads.drain(..).for_each(raw::join);
        Ok(())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if self.mounted {
            // There is no caller to report an error to.
            let _ = self.end(Instant::now() + DROP_PATIENCE);
        } else if !self.is_kept() {
            let _ = fs::remove_dir(&self.mount_dir);
        }
    }
}

/// The parameters of a starting thread.
struct Starting {
    connection: File,
    device: Arc<dyn BlockDevice>,
    filesystem: Arc<Filesystem>,
    stop: Arc<PipeReader>,
    leaving: Leaving,
    setup: Option<ThreadSetup>,
    duty: Duty,
}

/// The transport that a thread serves.
#[derive(Clone, PartialEq, Eq)]
enum Duty {
    /// A channel of its own.
    Door,
    /// Queues of the kernel.
    Queues {
        /// The queue of each slot.
        slots: Vec<u16>,
        /// Whether it reads the messages that are not delivered through the ring.
        with_door: bool,
    },
}

impl Starting {
    fn run(self, ready: Sender<Result<()>>) -> Lent {
        // Dropped last: the connection is closed by then.
        let leaving = self.leaving;
        if let Some(setup) = &self.setup {
            setup();
        }
        let worker = self.device.open_queue().map(|queue| Worker {
            filesystem: self.filesystem,
            queue,
            stop: self.stop,
            life: Arc::clone(&leaving.life),
        });
        let (served, lent) = match (worker, self.duty) {
            (Ok(worker), Duty::Door) => {
                let _ = ready.send(Ok(()));
                // The start waits until the last of these senders is dropped.
                drop(ready);
                (door::serve(worker, self.connection), Lent::default())
            }
            (Ok(worker), Duty::Queues { slots, with_door }) => {
                // Requests are then made and answered on one processor. Without the affinity they are slower.
                let _ = system::run_on(slots.iter().map(|&queue| usize::from(queue)));
                let watches = worker.queue.wait_descriptors().len();
                let life = with_door.then_some(&worker.life);
                match Rings::register(self.connection, &slots, watches, life) {
                    Ok(rings) => {
                        let _ = ready.send(Ok(()));
                        drop(ready);
                        ring::serve(worker, rings)
                    }
                    Err(error) => {
                        let _ = ready.send(Err(error));
                        return Lent::default();
                    }
                }
            }
            (Err(error), _) => {
                let _ = ready.send(Err(error));
                return Lent::default();
            }
        };
        if let Err(error) = served {
            leaving.fail(error);
        }
        lent
    }
}

/// Reports that a thread has closed its connection, however it ended.
struct Leaving {
    life: Arc<Life>,
    /// Whether the other threads end with this one: its queues have no server then.
    with_all: bool,
    /// Set for a connection that is preserved, or may be. If this thread fails, the requests that it has read
    /// would wait forever, since its channel stays open.
    kept: Option<KeptConnection>,
    failed: Cell<bool>,
}

/// The identity of a connection, so that an abort hits no other one.
struct KeptConnection {
    number: Option<u32>,
    mount_dir: PathBuf,
    door: OwnedFd,
}

impl Leaving {
    /// Registers a thread that is about to start.
    fn enter(life: &Arc<Life>, with_all: bool, kept: Option<KeptConnection>) -> Self {
        life.change(|state| state.serving += 1);
        Self { life: Arc::clone(life), with_all, kept, failed: Cell::new(false) }
    }

    /// Records why the thread ends.
    fn fail(&self, error: Error) {
        self.failed.set(true);
        self.life.change(|state| {
            state.failure.get_or_insert(error);
        });
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail(Error::new(ErrorKind::System, "a thread that serves a FUSE file panicked"));
        }
        if self.with_all {
            self.life.stop();
        }
        // The duplicate is closed before the thread is reported as ended.
        if let Some(KeptConnection { number, mount_dir, door }) = self.kept.take()
            && self.failed.get()
        {
            mounts::abort_ours(number, &mount_dir, Some(&door));
        }
        self.life.change(|state| state.serving = state.serving.saturating_sub(1));
    }
}

/// One more descriptor of the same open file.
fn duplicate(file: &impl AsFd) -> Result<OwnedFd> {
    file.as_fd()
        .try_clone_to_owned()
        .map_err(|error| system_error("one more descriptor of a FUSE connection", &error))
}

/// The time that is left until `end`.
pub fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
}

/// Creates the directory, and returns its path without links.
fn prepare_mount_dir(dir: &Path) -> Result<PathBuf> {
    let wrong =
        || Error::new(ErrorKind::InvalidArgument, format!("{} is no place for a mount", dir.display()));
    let (parent, name) = (dir.parent().ok_or_else(wrong)?, dir.file_name().ok_or_else(wrong)?);
    let parent = own_folder(parent, 0o755)?;
    let dir = parent.join(name);
    // Looked up before it is touched: a mount whose server is gone answers every access with an error.
    if cbd_export::mounts::at(&dir)?.is_some() {
        let text = format!("something is mounted at {} already; unmount it first", dir.display());
        return Err(Error::new(ErrorKind::AlreadyExists, text));
    }
    // Through a link of another user the mount would cover a directory of that user's choice.
    own_subfolder(&parent, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_never_made_through_a_symbolic_link() {
        let place = tempfile::tempdir().expect("a folder");
        fs::create_dir(place.path().join("precious")).expect("made");
        fs::create_dir(place.path().join("fuse")).expect("made");
        std::os::unix::fs::symlink("../precious", place.path().join("fuse/cbd0")).expect("made");
        let error = prepare_mount_dir(&place.path().join("fuse/cbd0")).expect_err("it is a link");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        prepare_mount_dir(&place.path().join("fuse/cbd1")).expect("nothing is there");
    }

    #[test]
    fn a_mount_directory_that_other_users_may_write_is_restricted() {
        use std::os::unix::fs::PermissionsExt;
        let place = tempfile::tempdir().expect("a folder");
        let folder = place.path().join("fuse");
        fs::create_dir(&folder).expect("made");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("changed");
        prepare_mount_dir(&folder.join("cbd0")).expect("it is ours");
        for path in [folder.clone(), folder.join("cbd0")] {
            let mode = fs::metadata(&path).expect("there").permissions().mode();
            assert_eq!(mode & 0o022, 0, "{}", path.display());
        }
    }
}
