//! The file, mounted and served: the connection, its threads, and their end.
//!
//! Invariants: started parts are stopped in reverse order, whichever step of the start failed. An end takes no
//! longer than its timeout, even if the device below never answers. If a [descriptor store](crate::session)
//! holds the channels, or may hold them, a thread that closes its channel ends nothing: so a thread that fails
//! aborts the connection, and an end is an explicit abort.
//!
//! Elsewhere: the users of the file ([`crate::export`]), the work of a thread ([`crate::worker`]).

use crate::connection;
use crate::export::{Options, ThreadSetup};
use crate::filesystem::Filesystem;
use crate::handshake;
use crate::mounts;
use crate::shared::Shared;
use crate::worker::Worker;
use cbd_export::folders::{own_folder, own_subfolder};
use cbd_export::{BlockDevice, system_error};
use cbd_types::{Error, ErrorKind, Result};
use rustix::mount::{UnmountFlags, unmount};
use std::cell::Cell;
use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

mod handover;

pub use handover::Handover;

/// Timeout of the threads' end after the connection was aborted.
pub const ABORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time that a dropped service grants to requests in flight.
const DROP_TIMEOUT: Duration = Duration::from_secs(5);

/// A mounted file system of one file with the threads that serve it. Dropping a service that was not ended
/// aborts it.
pub struct Service {
    name: String,
    mount_dir: PathBuf,
    shared: Arc<Shared>,
    /// The file system that the threads serve, once they have started.
    filesystem: Option<Arc<Filesystem>>,
    threads: Vec<JoinHandle<()>>,
    mounted: bool,
    /// The number of the connection, where it is known.
    connection: Option<u32>,
    /// Whether the kernel sends messages again that were read and not answered.
    resends: bool,
    /// A duplicate of each channel, until they are in the descriptor store.
    channels: Vec<OwnedFd>,
    /// Set before the first attempt to store the session.
    handover: Option<Arc<Handover>>,
}

impl Service {
    /// Mounts the file and serves it.
    ///
    /// # Errors
    /// The refused step, as text; nothing is left behind then.
    pub fn start(device: &Arc<dyn BlockDevice>, options: &Options) -> Result<Self> {
        let shared = Arc::new(Shared::new()?);
        let mut service = Self {
            name: options.name.clone(),
            mount_dir: prepare_mount_dir(&options.mount_dir)?,
            shared,
            filesystem: None,
            threads: Vec::new(),
            mounted: false,
            connection: None,
            resends: false,
            channels: Vec::new(),
            handover: None,
        };
        // On an error, the drop of `service` undoes the completed steps.
        service.mount(device, options)?;
        Ok(service)
    }

    fn mount(&mut self, device: &Arc<dyn BlockDevice>, options: &Options) -> Result<()> {
        let first = connection::open_channel()?;
        connection::mount(&first, &self.mount_dir)?;
        self.mounted = true;
        self.connection = cbd_export::mounts::at(&self.mount_dir)?.as_ref().map(mounts::connection);
        self.resends = handshake::negotiate(&first, &self.filesystem(device, options))?;
        let mut channels = Vec::with_capacity(options.queues);
        for _ in 0..options.queues {
            let channel = connection::clone_channel(&first)?;
            if options.store.is_some() {
                self.channels.push(duplicate(&channel)?);
            }
            channels.push(channel);
        }
        drop(first);
        self.start_threads(device, options, channels, options.store.is_some())
    }

    fn filesystem(&self, device: &Arc<dyn BlockDevice>, options: &Options) -> Filesystem {
        Filesystem::new(self.name.clone(), device.geometry(), options.read_only)
    }

    /// Starts a thread for each channel. Each opens its queue itself, and serves once it has one; an error of
    /// one thread fails the start. If the connection is preserved, or may be, a thread that fails later aborts
    /// it.
    fn start_threads(
        &mut self,
        device: &Arc<dyn BlockDevice>,
        options: &Options,
        channels: Vec<File>,
        is_preserved: bool,
    ) -> Result<()> {
        let filesystem = Arc::clone(self.filesystem.insert(Arc::new(Filesystem::new(
            self.name.clone(),
            device.geometry(),
            options.read_only,
        ))));
        let expected = channels.len();
        let mut starting = Vec::with_capacity(expected);
        for channel in channels {
            let guard = self.thread_guard(is_preserved.then_some(&channel))?;
            starting.push(Starting {
                channel,
                device: Arc::clone(device),
                filesystem: Arc::clone(&filesystem),
                guard,
                setup: options.thread_setup.clone(),
            });
        }
        let (ready, all_ready) = mpsc::channel();
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

    /// Registers a thread that is about to start. To abort a preserved connection, it has a duplicate of its
    /// channel.
    fn thread_guard(&self, preserved: Option<&File>) -> Result<ThreadGuard> {
        let channel = preserved.map(duplicate).transpose()?;
        let connection = channel.map(|channel| PreservedConnection {
            number: self.connection,
            mount_dir: self.mount_dir.clone(),
            channel,
        });
        Ok(ThreadGuard::new(&self.shared, connection))
    }

    fn still_waiting(&self, and: &str) -> Error {
        let serving = self.shared.lock().serving;
        let text = format!("{}: {serving} threads still wait for requests in flight; {and}", self.name);
        Error::new(ErrorKind::TimedOut, text)
    }

    /// The shared state of the threads.
    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    /// The path of the file.
    pub fn file_path(&self) -> PathBuf {
        self.mount_dir.join(&self.name)
    }

    /// Lets the file reach to `size`; the kernel has the former size until it is told.
    pub fn grow(&self, size: u64) {
        if let Some(filesystem) = &self.filesystem {
            filesystem.grow(size);
        }
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
        let state = self.shared.lock();
        let failed = state.failure.as_ref().map(Error::line);
        failed.or_else(|| (state.serving == 0).then(|| "the FUSE connection was ended from outside".into()))
    }

    /// Unmounts the file, which has no user any more, and ends the threads.
    ///
    /// # Errors
    /// As for [`Self::end`].
    pub fn unmount(&mut self, end: Instant) -> Result<()> {
        // The message that the loop device has closed the file arrives asynchronously.
        self.shared.wait(left(end), |state| state.open_files == 0 || state.serving == 0);
        if mounts::ours_at(self.connection, &self.mount_dir).is_some()
            && unmount(&self.mount_dir, UnmountFlags::NOFOLLOW).is_ok()
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
        self.shared.stop();
        let all_gone = self.shared.wait(left(end), |state| state.serving == 0);
        let handover = self.handover.take();
        if !all_gone || handover.is_some() {
            let channel = handover.as_ref().and_then(|handover| handover.channel());
            mounts::abort_ours(self.connection, &self.mount_dir, channel.as_ref());
            self.shared.disconnect();
        } else if self.mounted && mounts::ours_at(self.connection, &self.mount_dir).is_some() {
            let _ = unmount(&self.mount_dir, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        }
        self.mounted = false;
        handover.iter().for_each(|handover| handover.end());
        // Fails if another process has put a file into the directory, which must not be deleted then.
        let _ = fs::remove_dir(&self.mount_dir);
        if !all_gone && !self.shared.wait(ABORT_TIMEOUT, |state| state.serving == 0) {
            return Err(self.still_waiting("clients see errors meanwhile"));
        }
        self.join();
        Ok(())
    }

    fn join(&mut self) {
        for thread in self.threads.drain(..) {
            // A panic is recorded as the failure of the connection.
            let _ = thread.join();
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if self.mounted {
            // There is no caller to report an error to.
            let _ = self.end(Instant::now() + DROP_TIMEOUT);
        } else if !self.is_preserved() {
            let _ = fs::remove_dir(&self.mount_dir);
        }
    }
}

/// The parameters of a starting thread.
struct Starting {
    channel: File,
    device: Arc<dyn BlockDevice>,
    filesystem: Arc<Filesystem>,
    guard: ThreadGuard,
    setup: Option<ThreadSetup>,
}

impl Starting {
    fn run(self, ready: Sender<Result<()>>) {
        // Dropped last: the channel is closed by then, also after a panic.
        let guard = self.guard;
        let (channel, filesystem, shared) = (self.channel, self.filesystem, Arc::clone(&guard.shared));
        if let Some(setup) = &self.setup {
            setup();
        }
        let queue = self.device.open_queue();
        let worker = queue.and_then(|queue| Worker::new(filesystem, channel, queue, shared));
        let (worker, answer) = match worker {
            Ok(worker) => (Some(worker), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let _ = ready.send(answer);
        // The start waits until the last of these senders is dropped.
        drop(ready);
        if let Some(Err(error)) = worker.map(Worker::serve) {
            guard.fail(error);
        }
    }
}

/// Reports that a thread has closed its channel, however it ended.
struct ThreadGuard {
    shared: Arc<Shared>,
    /// Set for a connection that is preserved, or may be. If this thread fails, the requests that it has read
    /// would wait forever, since its channel stays open.
    preserved: Option<PreservedConnection>,
    failed: Cell<bool>,
}

/// The identity of a connection, so that an abort hits no other one.
struct PreservedConnection {
    number: Option<u32>,
    mount_dir: PathBuf,
    channel: OwnedFd,
}

impl ThreadGuard {
    /// Registers a thread that is about to start.
    fn new(shared: &Arc<Shared>, preserved: Option<PreservedConnection>) -> Self {
        shared.change(|state| state.serving += 1);
        Self { shared: Arc::clone(shared), preserved, failed: Cell::new(false) }
    }

    /// Records why the thread ends.
    fn fail(&self, error: Error) {
        self.failed.set(true);
        self.shared.change(|state| {
            state.failure.get_or_insert(error);
        });
    }
}

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail(Error::new(ErrorKind::System, "a thread that serves a FUSE file panicked"));
        }
        // The duplicate is closed before the thread is reported as ended.
        if let Some(PreservedConnection { number, mount_dir, channel }) = self.preserved.take()
            && self.failed.get()
        {
            mounts::abort_ours(number, &mount_dir, Some(&channel));
        }
        self.shared.change(|state| state.serving = state.serving.saturating_sub(1));
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
    let invalid =
        || Error::new(ErrorKind::InvalidArgument, format!("{} is no directory for a mount", dir.display()));
    let (parent, name) = (dir.parent().ok_or_else(invalid)?, dir.file_name().ok_or_else(invalid)?);
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
        let dir = tempfile::tempdir().expect("a folder");
        fs::create_dir(dir.path().join("precious")).expect("made");
        fs::create_dir(dir.path().join("fuse")).expect("made");
        std::os::unix::fs::symlink("../precious", dir.path().join("fuse/cbd0")).expect("made");
        let error = prepare_mount_dir(&dir.path().join("fuse/cbd0")).expect_err("it is a link");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        prepare_mount_dir(&dir.path().join("fuse/cbd1")).expect("nothing is there");
    }

    #[test]
    fn a_mount_directory_that_other_users_may_write_is_restricted() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path().join("fuse");
        fs::create_dir(&folder).expect("made");
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("changed");
        prepare_mount_dir(&folder.join("cbd0")).expect("it is ours");
        for path in [folder.clone(), folder.join("cbd0")] {
            let mode = fs::metadata(&path).expect("there").permissions().mode();
            assert_eq!(mode & 0o022, 0, "{}", path.display());
        }
    }
}
