//! The file, mounted and served: the connection, its threads, and their end.
//!
//! Always true here: what was started is stopped in the opposite order, whichever step of the start failed; an end takes no
//! longer than it may, even if the device below never answers.
//!
//! Left to others: who uses the file ([`crate::export`]), what a thread does ([`crate::worker`]).

use crate::connection;
use crate::door;
use crate::errors::system_error;
use crate::export::{Options, ThreadSetup};
use crate::filesystem::Filesystem;
use crate::life::Life;
use crate::mounts;
use crate::system;
use crate::worker::Worker;
use cbd_export::BlockDevice;
use cbd_types::{Error, ErrorKind, Result};
use std::fs::{self, File};
use std::io::PipeReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long threads get to end after the connection was aborted.
pub const ABORT_PATIENCE: Duration = Duration::from_secs(2);
/// How long a dropped service gets for what is in flight.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// A mounted file system of one file with the threads that serve it. Dropping one that was not ended aborts it.
pub struct Service {
    name: String,
    mount_dir: PathBuf,
    life: Arc<Life>,
    threads: Vec<JoinHandle<()>>,
    mounted: bool,
    /// The number of the connection, where it could be found out.
    connection: Option<u32>,
}

impl Service {
    /// Mounts the file and serves it.
    ///
    /// # Errors
    /// What the system refused, in words; then nothing is left behind.
    pub fn start(device: &Arc<dyn BlockDevice>, options: &Options) -> Result<Self> {
        let (stopped, stop) =
            std::io::pipe().map_err(|error| system_error("no pipe for the FUSE threads", &error))?;
        let mut service = Self {
            name: options.name.clone(),
            mount_dir: prepare_mount_dir(&options.mount_dir)?,
            life: Arc::new(Life::new(stop)),
            threads: Vec::new(),
            mounted: false,
            connection: None,
        };
        // On an error the drop of what there is undoes it.
        service.bring_up(device, options, Arc::new(stopped))?;
        Ok(service)
    }

    fn bring_up(
        &mut self,
        device: &Arc<dyn BlockDevice>,
        options: &Options,
        stop: Arc<PipeReader>,
    ) -> Result<()> {
        let first = connection::open()?;
        connection::mount(&first, &self.mount_dir)?;
        self.mounted = true;
        self.connection = mounts::at(&self.mount_dir)?.map(|mount| mount.connection());
        let filesystem = Arc::new(Filesystem {
            name: options.name.clone(),
            geometry: device.geometry(),
            read_only: options.read_only,
        });
        let mut doors = Vec::with_capacity(options.queues);
        for _ in 1..options.queues {
            doors.push(connection::another(&first)?);
        }
        doors.push(first);
        let starting = doors.into_iter().map(|connection| Starting {
            connection,
            device: Arc::clone(device),
            filesystem: Arc::clone(&filesystem),
            stop: Arc::clone(&stop),
            leaving: Leaving::enter(&self.life),
            setup: options.thread_setup.clone(),
        });
        self.start_threads(starting.collect())
    }

    /// Each thread opens its queue itself, and serves once it has; an error of any is an error of all.
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

    /// What the threads tell.
    pub fn life(&self) -> &Life {
        &self.life
    }

    /// Where the file is.
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

    /// Why it does not serve any more, although it was not ended.
    pub fn failure(&self) -> Option<String> {
        if !self.mounted {
            return None;
        }
        let state = self.life.look();
        let failed = state.failure.as_ref().map(Error::line);
        failed.or_else(|| (state.serving == 0).then(|| "the FUSE connection was ended from outside".into()))
    }

    /// Nobody uses the file any more: unmounts it and ends the threads.
    ///
    /// # Errors
    /// As for [`Self::end`].
    pub fn unmount(&mut self, end: Instant) -> Result<()> {
        // The message that the loop device has closed the file comes on its own.
        self.life.wait(left(end), |state| state.open_files == 0 || state.serving == 0);
        if system::umount(&self.mount_dir, libc::UMOUNT_NOFOLLOW).is_err() {
            // Somebody looks at the directory; the connection ends all the same, with the threads.
            let _ = system::umount(&self.mount_dir, libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW);
        }
        self.end(end)
    }

    /// What is in flight completes, then the threads let go and the connection ends with the last; at `end` it is
    /// aborted.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if threads still wait for the device below; users of the file see errors all the same.
    pub fn end(&mut self, end: Instant) -> Result<()> {
        self.life.stop();
        let all_gone = self.life.wait(left(end), |state| state.serving == 0);
        if !all_gone {
            mounts::abort_connection(self.connection, &self.mount_dir);
        } else if self.mounted {
            // If it is unmounted already, all the better.
            let _ = system::umount(&self.mount_dir, libc::MNT_DETACH | libc::UMOUNT_NOFOLLOW);
        }
        self.mounted = false;
        // Not ours to remove if somebody put something into it.
        let _ = fs::remove_dir(&self.mount_dir);
        if !all_gone && !self.life.wait(ABORT_PATIENCE, |state| state.serving == 0) {
            let serving = self.life.look().serving;
            let text = format!(
                "{}: {serving} threads still wait for requests in flight; clients see errors meanwhile",
                self.name
            );
            return Err(Error::new(ErrorKind::TimedOut, text));
        }
        for thread in self.threads.drain(..) {
            // A panic of it is in `failure`.
            let _ = thread.join();
        }
        Ok(())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if self.mounted {
            // Nobody is left to be told.
            let _ = self.end(Instant::now() + DROP_PATIENCE);
        } else {
            let _ = fs::remove_dir(&self.mount_dir);
        }
    }
}

/// What a thread needs to begin.
struct Starting {
    connection: File,
    device: Arc<dyn BlockDevice>,
    filesystem: Arc<Filesystem>,
    stop: Arc<PipeReader>,
    leaving: Leaving,
    setup: Option<ThreadSetup>,
}

impl Starting {
    fn run(self, ready: Sender<Result<()>>) {
        // Dropped last: then the connection is closed.
        let leaving = self.leaving;
        if let Some(setup) = &self.setup {
            setup();
        }
        let queue = match self.device.open_queue() {
            Ok(queue) => queue,
            Err(error) => {
                let _ = ready.send(Err(error));
                return;
            }
        };
        let life = Arc::clone(&leaving.0);
        let worker = Worker { filesystem: self.filesystem, queue, stop: self.stop, life };
        let _ = ready.send(Ok(()));
        // Whoever waits for all threads waits until the last of these is gone.
        drop(ready);
        if let Err(error) = door::serve(worker, self.connection) {
            leaving.fail(error);
        }
    }
}

/// Says that a thread has let go of its connection, however it ended.
struct Leaving(Arc<Life>);

impl Leaving {
    /// A thread is about to begin.
    fn enter(life: &Arc<Life>) -> Self {
        life.change(|state| state.serving += 1);
        Self(Arc::clone(life))
    }

    /// Why the thread ends.
    fn fail(&self, error: Error) {
        self.0.change(|state| {
            state.failure.get_or_insert(error);
        });
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail(Error::new(ErrorKind::System, "a thread that serves a FUSE file panicked"));
        }
        self.0.change(|state| state.serving = state.serving.saturating_sub(1));
    }
}

/// What is left of a time.
pub fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
}

/// Makes the directory, and says where it is without any link.
fn prepare_mount_dir(dir: &Path) -> Result<PathBuf> {
    let wrong =
        || Error::new(ErrorKind::InvalidArgument, format!("{} is no place for a mount", dir.display()));
    let (parent, name) = (dir.parent().ok_or_else(wrong)?, dir.file_name().ok_or_else(wrong)?);
    let failed = |error| system_error(dir.display(), &error);
    fs::create_dir_all(parent).map_err(failed)?;
    let dir = fs::canonicalize(parent).map_err(failed)?.join(name);
    // Looked up before it is touched: a mount whose server is gone answers every touch with an error.
    if mounts::at(&dir)?.is_some() {
        let text = format!("something is mounted at {} already; unmount it first", dir.display());
        return Err(Error::new(ErrorKind::AlreadyExists, text));
    }
    match fs::create_dir(&dir) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(failed(error)),
        _ => Ok(dir),
    }
}
