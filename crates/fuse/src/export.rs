//! The export: a mounted file system of one file, its threads, a loop device over it and a link to the loop
//! device.
//!
//! Invariants: started parts are stopped in reverse order, whichever step of the start failed; a stop ends
//! within its timeout, even if the device below never answers; a device in use is stopped only with force.
//!
//! Elsewhere: the list of devices and their names; the sweep at the start ([`crate::sweep`]).

use crate::loop_device::{Binding, LoopThread, NotReleased, QueueLimits, size};
use crate::service::{ABORT_TIMEOUT, Handover, Service};
use crate::session::{Session, SessionState, SessionStore};
use cbd_export::BlockDevice;
use cbd_export::link::{self, Link};
use cbd_export::users::{self, BlockNode};
use cbd_types::{Context, Error, ErrorKind, Geometry, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// The most threads that serve one device.
pub const QUEUES_MAX: usize = 128;
/// Timeout of a query about the loop device.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that the message of a closed file may take to arrive.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// Time that a dropped export grants to requests in flight.
const DROP_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs at the beginning of each thread that serves the file.
pub type ThreadSetup = Arc<dyn Fn() + Send + Sync>;

/// How a device is exported.
#[derive(Clone)]
pub struct Options {
    /// The name of the file, such as `cbd0`.
    pub name: String,
    /// Where the file system is mounted, such as `/run/cbd/fuse/cbd0`; created if missing, removed at the
    /// end.
    pub mount_dir: PathBuf,
    /// The link to create, such as `/dev/cbd0`.
    pub link: Option<PathBuf>,
    /// Threads that serve the file, each with a queue of its own.
    pub queues: usize,
    /// Runs at the beginning of each thread that serves the file.
    pub thread_setup: Option<ThreadSetup>,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The descriptor store that preserves the device beyond the life of this process.
    pub store: Option<Arc<dyn SessionStore>>,
}

/// How a device in use is treated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StopMode {
    /// Stop only if the device is not in use.
    WhenUnused,
    /// Stop in any case: requests in flight complete, after that clients see errors.
    Force,
}

/// A device that is exported as a FUSE file with a loop device over it.
///
/// Dropping one that was not stopped stops it by force.
pub struct FuseLoop {
    service: Service,
    loop_thread: Option<LoopThread>,
    link: Option<Link>,
    /// Why the device does not outlive this process, although it was requested.
    not_preserved: Option<Error>,
    taken_over: bool,
}

impl std::fmt::Debug for FuseLoop {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("FuseLoop")
            .field("mount_dir", &self.service.mount_dir())
            .field("loop", &self.loop_thread.as_ref().map(LoopThread::device))
            .finish_non_exhaustive()
    }
}

impl FuseLoop {
    /// Mounts the file, serves it, binds a loop device to it and makes the link.
    ///
    /// # Errors
    /// The refused step, as text; nothing is left behind then.
    pub fn start(device: Arc<dyn BlockDevice>, options: Options) -> Result<Self> {
        let geometry = device.geometry();
        check(&options, &geometry)?;
        if let Some(link) = &options.link {
            link::may_be_made(link, None)?;
        }
        let what = || format!("{} could not be exported as a block device", options.name);
        let service = Service::start(&device, &options).context(what)?;
        let mut export =
            Self { service, loop_thread: None, link: None, not_preserved: None, taken_over: false };
        // On an error, the drop of `export` undoes the completed steps.
        export.bind(&options, geometry).context(what)?;
        if let Some(store) = &options.store {
            export.not_preserved = export.preserve(store, &options, &geometry).err();
        }
        Ok(export)
    }

    /// Takes over a device that an earlier process has handed over, or that lost its process by a kill. Its
    /// clients have waited, and their requests in flight are executed now. Only one process may call this, and
    /// only when no thread works on requests of the previous process any more.
    ///
    /// # Errors
    /// [`ErrorKind::Exchanged`] if the device has changed, and the errors of refused system calls. The device
    /// is unchanged then, and its clients keep waiting.
    pub fn take_over(device: &Arc<dyn BlockDevice>, options: &Options, session: &Session) -> Result<Self> {
        let what = || format!("{} waits for its daemon, and cannot be taken over", session.state.name);
        let geometry = device.geometry();
        check(options, &geometry)?;
        session.check_geometry(&geometry, options.read_only).context(what)?;
        Self::resume(device, options, session).context(what)
    }

    fn resume(device: &Arc<dyn BlockDevice>, options: &Options, session: &Session) -> Result<Self> {
        let state = &session.state;
        let loop_thread = LoopThread::take_over(state.loop_number, &state.file())?;
        let loop_path = &loop_thread.device().path;
        let link = options.link.as_deref().map(|link| Link::create(link, loop_path)).transpose()?;
        let service = Service::take_over(device, options, session)?;
        if loop_thread.device().has_autoclear() {
            // An interrupted stop has left AUTOCLEAR set. The device is served; if the flag cannot be
            // cleared, the kernel releases the device with its last user, and it is reported as gone then.
            let _ = loop_thread.make_persistent(QUERY_TIMEOUT);
        }
        let export =
            Self { service, loop_thread: Some(loop_thread), link, not_preserved: None, taken_over: true };
        let size = device.geometry().size;
        if export.size_seen().is_some_and(|seen| seen < size) {
            // It has grown, and its process ended before the kernel knew. If the kernel refuses, its users see the
            // former size ([`size_seen`](Self::size_seen)), and their requests continue.
            let _ = export.grow(size);
        }
        Ok(export)
    }

    /// Closes the loop device, then hands the descriptors over to the descriptor store. A process that is
    /// killed between the two steps leaves a device whose connection has ended, for the sweep of the next
    /// process. In the other order the killed process, as the last opener, would write out pages that only
    /// the next process can accept, and the next process would wait for the end of the killed one.
    fn preserve(
        &mut self,
        store: &Arc<dyn SessionStore>,
        options: &Options,
        geometry: &Geometry,
    ) -> Result<()> {
        let Some(loop_thread) = &self.loop_thread else { return Ok(()) };
        // Also where the device cannot be preserved: one more descriptor of the channels would keep them
        // open.
        let channels = self.service.take_channels();
        let connection = self.service.check_may_be_preserved()?;
        let state = SessionState {
            name: options.name.clone(),
            mount_dir: self.service.mount_dir().to_owned(),
            link: options.link.clone(),
            connection,
            loop_number: loop_thread.device().number,
            size: geometry.size,
            sector: geometry.sector,
            read_only: options.read_only,
        };
        let session = Session::new(state, channels)?;
        loop_thread.make_persistent(QUERY_TIMEOUT)?;
        self.service.preserve(store, session)
    }

    /// Shows users of the device that it has `size` bytes now. The device below reaches so far already.
    ///
    /// # Errors
    /// When the kernel does not take the new size; users see the former one then.
    pub fn grow(&self, size: u64) -> Result<()> {
        // 1. The file, so that requests up to there are executed. 2. What the kernel knows of it, and the loop device.
        self.service.grow(size);
        self.loop_thread.as_ref().map_or(Ok(()), |thread| thread.grow(size, QUERY_TIMEOUT))
    }

    /// The size in bytes that users of the device see, where the kernel reports it.
    #[must_use]
    pub fn size_seen(&self) -> Option<u64> {
        size(self.loop_thread.as_ref()?.device().number)
    }

    /// Why the device does not outlive this process although [`Options::store`] was set.
    #[must_use]
    pub const fn not_preserved(&self) -> Option<&Error> {
        self.not_preserved.as_ref()
    }

    /// Whether the device was taken over with the clients of an earlier process.
    #[must_use]
    pub const fn is_taken_over(&self) -> bool {
        self.taken_over
    }

    /// Whether it outlives this process.
    #[must_use]
    pub fn is_preserved(&self) -> bool {
        self.service.is_preserved()
    }

    /// Whether it was stopped or handed over.
    #[must_use]
    pub const fn is_ended(&self) -> bool {
        !self.service.is_mounted()
    }

    /// Stops serving and leaves the device as it is: its clients wait for the process that
    /// [takes it over](Self::take_over). Requests that were read are answered first, as far as the device below
    /// completes them within `timeout`; the next process executes the rest. A device that is not preserved,
    /// or whose loop device this process itself still waits for, is ended: otherwise this process could not
    /// end.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] if threads still wait for the device below. They must have ended, by the end
    /// of this process, before another process takes the device over.
    pub fn hand_over(&mut self, timeout: Duration) -> Result<()> {
        let end = Instant::now() + timeout;
        if !self.service.is_preserved() {
            return self.end_by_force(end);
        }
        let waits = self.loop_thread.take().and_then(|thread| thread.end(timeout / 2).err());
        if let Some(waits) = waits {
            let _ = self.end_by_force(end);
            return Err(waits);
        }
        self.link = None;
        self.service.hand_over(end)
    }

    fn bind(&mut self, options: &Options, geometry: Geometry) -> Result<()> {
        let file = self.file_path();
        let loop_thread = LoopThread::start(Binding { file, geometry, read_only: options.read_only })
            .map_err(|error| self.service.shared().lock().failure.take().unwrap_or(error))?;
        let loop_thread = self.loop_thread.insert(loop_thread);
        if let Some(link) = &options.link {
            self.link = Some(Link::create(link, &loop_thread.device().path)?);
        }
        Ok(())
    }

    /// The node of the loop device, `/dev/loopN`.
    #[must_use]
    pub fn loop_path(&self) -> &Path {
        self.loop_thread.as_ref().map_or(Path::new(""), |thread| &thread.device().path)
    }

    /// The path by which users know the device: the link if there is one, else the loop device.
    #[must_use]
    pub fn device_path(&self) -> &Path {
        self.link.as_ref().map_or_else(|| self.loop_path(), Link::path)
    }

    /// The file under the loop device. It can also be read and written directly, with direct I/O.
    #[must_use]
    pub fn file_path(&self) -> PathBuf {
        self.service.file_path()
    }

    /// The limits that the kernel reports to users of the loop device.
    #[must_use]
    pub fn queue_limits(&self) -> Option<&QueueLimits> {
        self.loop_thread.as_ref().map(|thread| &thread.device().limits)
    }

    /// Why the export has stopped serving although it was not asked to.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.service.failure().or_else(|| {
            let unbound = self.loop_thread.as_ref().filter(|thread| !thread.is_bound())?;
            let path = unbound.device().path.display();
            Some(format!(
                "{path} was detached by another process (losetup -d); stop the device and start it again"
            ))
        })
    }

    /// The use of the device, as a sentence: mounted, stacked upon, used as swap space, open in a process.
    ///
    /// # Errors
    /// When a query to the system fails.
    pub fn is_busy(&self) -> Result<Option<String>> {
        let Some(loop_thread) = &self.loop_thread else { return Ok(None) };
        if !loop_thread.is_bound() {
            // The number may belong to a foreign device by now, so the loop device is not queried.
            let file = self.file_path();
            let user = users::file_opened_by(&file);
            return Ok(user.map(|process| format!("{} is open in {process}", file.display())));
        }
        let (device, link) = (loop_thread.device(), self.link.as_ref().map(Link::path));
        let node = BlockNode { path: device.path.clone(), device: device.device };
        if let Some(sentence) = users::mounted_or_held(&node, link)? {
            return Ok(Some(sentence));
        }
        if loop_thread.is_held_exclusively(QUERY_TIMEOUT)? {
            return Ok(Some(users::mounted_elsewhere(&node, link)));
        }
        if let Some(process) = users::opened_by(device.device) {
            return Ok(Some(format!("{} is open in {process}", self.device_path().display())));
        }
        // Opens by clients of a predecessor were not counted by this process.
        if self.taken_over
            && let Some(process) = users::file_opened_by(&self.file_path())
        {
            return Ok(Some(format!("{} is open in {process}", self.file_path().display())));
        }
        // The kernel sends the message of a closed file after the close has returned.
        if !self.service.shared().wait(CLOSE_TIMEOUT, |state| state.open_files <= 1) {
            let file = self.file_path();
            let process =
                users::file_opened_by(&file).unwrap_or_else(|| "a process that is not visible here".into());
            return Ok(Some(format!("{} is open in {process}", file.display())));
        }
        Ok(None)
    }

    /// Removes the device: link, loop device, file and mount, within about `timeout`.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if the device is in use and `mode` is not force, or [`ErrorKind::TimedOut`] if I/O
    /// to it hangs; the device stays available then. With force, [`ErrorKind::TimedOut`] says that threads
    /// still wait for the device below; clients see errors all the same.
    pub fn stop(&mut self, mode: StopMode, timeout: Duration) -> Result<()> {
        if !self.service.is_mounted() {
            return Ok(());
        }
        let end = Instant::now() + timeout;
        // With force, the requests in flight need a part of the time too.
        let release_end = if mode == StopMode::Force { Instant::now() + timeout / 2 } else { end };
        let released = self.release(release_end);
        match (released, mode) {
            (Ok(()), _) => self.service.unmount(end),
            (Err(error), StopMode::WhenUnused) => Err(error),
            (Err(_), StopMode::Force) => self.end_by_force(end),
        }
    }

    /// Removes the link and releases the loop device, or leaves both as they are.
    fn release(&mut self, end: Instant) -> Result<()> {
        let Some(loop_thread) = &self.loop_thread else { return Ok(()) };
        let device_path = self.device_path().display().to_string();
        let refused = |sentence: String| {
            let text = format!("{sentence}; {device_path} cannot be stopped while it is used");
            Error::new(ErrorKind::Busy, text)
        };
        if let Some(sentence) = self.is_busy()? {
            return Err(refused(sentence));
        }
        if self.service.is_preserved() && loop_thread.is_bound() && !loop_thread.wait_until_idle(end) {
            let text = format!("requests to {device_path} are still in flight");
            return Err(refused(text));
        }
        // 1. From here on the connection ends with this process: the wait below must not depend on a later
        //    process.
        let handover = self.service.withdraw();
        // 2. The link, so that it never points to a device of another owner. 3. The device.
        let removed = self.link.take();
        removed.iter().for_each(Link::remove);
        if let Err(NotReleased { error, later }) = loop_thread.release(end) {
            if let Some(handover) = handover {
                store_later(handover, later);
            }
            let loop_path = loop_thread.device().path.clone();
            self.link = removed.and_then(|link| Link::create(link.path(), &loop_path).ok());
            // The user of a device that hangs cannot be determined.
            let user = if error.kind() == ErrorKind::Busy { self.is_busy().ok().flatten() } else { None };
            return Err(user.map_or(error, refused));
        }
        if let Some(mut loop_thread) = self.loop_thread.take() {
            loop_thread.join();
        }
        Ok(())
    }

    /// Ends the export; users of the device see errors from here on.
    fn end_by_force(&mut self, end: Instant) -> Result<()> {
        self.link.take().iter().for_each(Link::remove);
        let ended = self.service.end(end);
        if let Some(mut loop_thread) = self.loop_thread.take() {
            // With the connection gone nothing can hold up the close; if something does, the kernel ends it
            // later.
            if loop_thread.abandon(ABORT_TIMEOUT).is_ok() {
                loop_thread.join();
            }
        }
        ended
    }
}

/// Stores the session of a device again after its release has failed, once no thread of this process waits for the
/// device.
fn store_later(handover: Arc<Handover>, later: Option<Receiver<Result<()>>>) {
    // If the descriptor store refuses, the device ends with this process, like one that was never preserved.
    let Some(later) = later else { return drop(handover.put()) };
    // A thread of its own: the thread that waits has none of the descriptors.
    let _ = std::thread::Builder::new().name("cbd-fuse-store".into()).spawn(move || {
        if let Ok(Err(_)) = later.recv() {
            let _ = handover.put();
        }
    });
}

impl Drop for FuseLoop {
    fn drop(&mut self) {
        if self.service.is_mounted() {
            // There is no caller to report an error to.
            let _ = self.end_by_force(Instant::now() + DROP_TIMEOUT);
        }
    }
}

/// Refuses names that are not plain file names.
pub fn check_name(name: &str) -> Result<()> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > 63 || name.starts_with('.') || !name.bytes().all(plain) {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("{name:?} is no name for a device; take letters, digits, '-', '_' and '.'"),
        ));
    }
    Ok(())
}

fn check(options: &Options, geometry: &Geometry) -> Result<()> {
    let invalid = |text: String| Err(Error::new(ErrorKind::InvalidArgument, text));
    check_name(&options.name)?;
    if options.queues == 0 || options.queues > QUEUES_MAX {
        return invalid(format!("{} is no number of queues; take 1 to {QUEUES_MAX}", options.queues));
    }
    let Geometry { size, sector, .. } = *geometry;
    if !sector.is_power_of_two()
        || !(512..=4096).contains(&sector)
        || size == 0
        || size % u64::from(sector) != 0
    {
        return invalid(format!(
            "a device of {size} bytes with sectors of {sector} bytes cannot be exported"
        ));
    }
    Ok(())
}
