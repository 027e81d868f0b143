//! Rescue: writes the dirty data of a region to its backing devices, without a daemon and its configuration.
//!
//! Invariants: the engine's own recovery and writeback do the work, in the configured consistency mode of the backend,
//! so a daemon or the next rescue can continue with the region at any moment. A disk gets no data unless it is the
//! recorded one, or the user names it as its replacement, and none if the caller's [`DiskRecords`] refuse it. Before a
//! disk other than the recorded one gets any data, the region durably records that the backend was moved to that disk.
//! Damaged data is not written but listed.
//!
//! Elsewhere: previewing the result (`check` reports it); asking for confirmation, and what a daemon has recorded of a
//! disk outside the region (`cbdctrl`).

use crate::report::RangeSummary;
use crate::{Bytes, PrivateMemory, Progress};
use cbd_backing::{
    Backing, BackingFile, DISK_TIMEOUT, Identity, Options as DiskOptions, PollableQueue, after_predecessor,
};
use cbd_engine::{
    BackendEntry, BackgroundWorker, Cache, CacheStatus, Environment, Mixed, Pages, Settings, Step, Transport,
};
use cbd_export::wake::{Interest, WaitSet};
use cbd_pmem::Mapping;
use cbd_runtime::disk::Disk;
use cbd_runtime::moved::refuse_target;
use cbd_runtime::presence::{self, Timing, machine_name};
use cbd_runtime::{ProcessEnvironment, region::sync_region};
use cbd_types::{BackendId, Epoch, Error, ErrorKind, Pmem, Region, Result};
use serde::Serialize;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Operations in flight on the backing device.
const DEPTH: usize = 64;

/// The source and the destination.
#[derive(Clone, Debug)]
pub struct Options {
    /// Only this backend.
    pub backend: Option<BackendId>,
    /// The present path of its disk, if it differs from the recorded one.
    pub to: Option<PathBuf>,
    /// That disk replaces the recorded one although its identity differs: it is a copy.
    pub other_disk: bool,
    /// A former disk of the backend that is not refused any more after the move, because it does not exist any more or
    /// was reused as another disk.
    pub forget_disk: Option<PathBuf>,
    /// Recover a cache although the machine crashed while it was in use, and some of its pages may be old.
    pub after_crash: bool,
    /// Timeout without progress on the disk.
    pub timeout: Duration,
    /// What is recorded of the disks outside the region; none if that does not matter.
    pub records: Option<Arc<dyn DiskRecords>>,
}

/// What is recorded of disks outside the region, such as that one was written without its cache.
pub trait DiskRecords: Debug + Send + Sync {
    /// Looks at the disk of a backend before its cache is opened, and changes nothing. Returns warnings.
    ///
    /// # Errors
    /// [`ErrorKind::Exchanged`], and others, if nothing may be written to it.
    fn look(&self, backend: &BackendEntry, disk: &OpenDisk<'_>) -> Result<Vec<String>>;

    /// The first write to the disk follows. Returns warnings.
    fn begin(&self, backend: &BackendEntry) -> Vec<String>;

    /// All is on the disk, and the cache is empty. Returns warnings.
    fn emptied(&self, backend: &BackendEntry) -> Vec<String>;
}

/// The open disk of a backend whose cache is not open.
#[derive(Clone, Copy, Debug)]
pub struct OpenDisk<'a> {
    /// The disk.
    pub file: &'a BackingFile,
    /// Checksum of the state of the cache in the region ([`Transport::state_sum`]).
    pub cache: Option<u64>,
    /// It is not the recorded disk, but a copy.
    pub is_copy: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            backend: None,
            to: None,
            other_disk: false,
            forget_disk: None,
            after_crash: false,
            timeout: Duration::from_secs(60),
            records: None,
        }
    }
}

impl Options {
    /// Whether the backend is selected.
    #[must_use]
    pub fn concerns(&self, backend: u32) -> bool {
        self.backend.is_none_or(|only| only.0 == backend)
    }

    /// Opens and locks the disk of a backend, and checks that it is the right one.
    ///
    /// # Errors
    /// As [`BackingFile::open_recorded`]; [`ErrorKind::Exchanged`] for another disk.
    pub fn open_disk(&self, disk: &RecordedDisk<'_>, read_only: bool) -> Result<(BackingFile, Vec<String>)> {
        let path = self.to.as_deref().unwrap_or_else(|| Path::new(disk.path));
        let options =
            DiskOptions { read_only, sector: disk.sector, size: Some(disk.size), ..DiskOptions::default() };
        if self.other_disk && self.to.is_some() {
            let file = BackingFile::open(path, options).map_err(|error| match error.kind() {
                // `open` words this error for the recorded disk: it reports that the disk has shrunk.
                ErrorKind::OutOfRange => Error::new(
                    ErrorKind::InvalidArgument,
                    format!(
                        "{} is smaller than the {} bytes of {}, and so no copy of it; give another disk",
                        path.display(),
                        disk.size,
                        disk.path
                    ),
                ),
                _ => error,
            })?;
            let warning = format!(
                "{} is used in place of {} because the user named it as a copy",
                path.display(),
                disk.path
            );
            return Ok((file, vec![warning]));
        }
        BackingFile::open_recorded(path, options, &Identity::parse(disk.identity)?)
    }

    /// Opens the disk of a backend as [`open_disk`](Self::open_disk) does, without a lasting effect, and checks that a
    /// rescue of `region` would write to it.
    ///
    /// # Errors
    /// As [`open_disk`](Self::open_disk), [`refuse_target`](Self::refuse_target) and [`DiskRecords::look`].
    pub fn preview_disk(
        &self,
        region: &Arc<dyn Bytes>,
        backend: BackendId,
        disk: &RecordedDisk<'_>,
    ) -> Result<Vec<String>> {
        let (file, mut warnings) = self.open_disk(disk, true)?;
        let environment = Arc::new(ProcessEnvironment::<PrivateMemory>::new());
        let memory = PrivateMemory::new(Arc::clone(region));
        let transports = Transport::open_each(&environment, Arc::new(Region::new(memory)))?;
        let owner = transports.iter().find(|transport| transport.backend(backend).is_ok());
        let Some(transport) = owner.or(transports.first()) else {
            return Err(Error::new(ErrorKind::NotFound, "the region has no host, and no backend"));
        };
        let entry = transport.backend(backend)?;
        warnings.extend(self.check_target(transport, &entry, &file)?);
        Ok(warnings)
    }

    /// Refuses a disk as [`refuse_target`](Self::refuse_target) does, and one that the records refuse; returns warnings.
    fn check_target<P: Pmem + 'static>(
        &self,
        transport: &Transport<ProcessEnvironment<P>>,
        entry: &BackendEntry,
        file: &BackingFile,
    ) -> Result<Vec<String>> {
        self.refuse_target(transport, entry, file)?;
        let Some(records) = &self.records else { return Ok(Vec::new()) };
        let cache = transport.state_sum(entry.id);
        let is_copy = is_other(entry, file)?;
        records.look(entry, &OpenDisk { file, cache, is_copy })
    }

    /// Refuses `disk`, to which `entry` would be moved, if it has data of its own or is recorded as lacking data.
    ///
    /// # Errors
    /// As [`refuse_target`].
    pub fn refuse_target<P: Pmem + 'static>(
        &self,
        transport: &Transport<ProcessEnvironment<P>>,
        entry: &BackendEntry,
        disk: &BackingFile,
    ) -> Result<()> {
        let path = self.to.as_deref().unwrap_or_else(|| Path::new(&entry.path)).display().to_string();
        let forgotten = self.forget_disk.as_deref().map(|gone| forgotten_name(transport, entry.id, gone));
        refuse_target(transport, entry, &Disk::of(disk)?, &path, forgotten.transpose()?.as_deref())
    }
}

/// Whether `disk` is another one than the region records.
fn is_other(entry: &BackendEntry, disk: &BackingFile) -> Result<bool> {
    Ok(Identity::parse(&entry.identity)?.same_disk(&disk.identity()).is_err())
}

/// A backing device as recorded in the region.
#[derive(Clone, Copy, Debug)]
pub struct RecordedDisk<'a> {
    /// Its recorded path.
    pub path: &'a str,
    /// Its identity.
    pub identity: &'a str,
    /// Bytes.
    pub size: u64,
    /// Bytes of a sector, if they matter.
    pub sector: Option<u32>,
}

impl<'a> From<&'a BackendEntry> for RecordedDisk<'a> {
    fn from(entry: &'a BackendEntry) -> Self {
        Self { path: &entry.path, identity: &entry.identity, size: entry.size, sector: Some(entry.sector) }
    }
}

/// The result of the rescue of a backend.
#[derive(Clone, Default, Debug, Serialize)]
pub struct Rescued {
    /// Its row.
    pub backend: u32,
    /// The destination.
    pub disk: String,
    /// Whether its disk and its cache could be opened; if not, nothing was written.
    pub opened: bool,
    /// Whether all dirty data is on the disk, except damaged data.
    pub complete: bool,
    /// The disk is not the recorded one, and the region records it from now on: the former disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved_from: Option<String>,
    /// Bytes written to the disk.
    pub written_bytes: u64,
    /// Bytes that are still dirty; unknown if nothing was opened.
    pub dirty_bytes: Option<u64>,
    /// The last epoch that is completely on the disk.
    pub drained_epoch: u64,
    /// The recovery point, in milliseconds since 1970 UTC: everything flushed before is on the disk. 0 when
    /// it is not known.
    pub drained_wall_ms: u64,
    /// Whether the disk without the cache is in a state that a plain disk could have after a power failure.
    pub backing_is_consistent: bool,
    /// Whether the cache was emptied, so that the disk can be written without it from now on.
    pub emptied: bool,
    /// Ranges that were not written because they are damaged.
    pub damaged: Vec<RangeSummary>,
    /// Ranges that the disk refuses; they stay in the region.
    pub parked: Vec<RangeSummary>,
    /// The reason for which the rescue is not complete.
    pub error: Option<String>,
    /// Warnings for the user.
    pub warnings: Vec<String>,
}

impl Rescued {
    fn add_status(&mut self, status: CacheStatus) {
        self.written_bytes = status.written_back_bytes;
        self.dirty_bytes = Some(status.dirty_bytes);
        self.drained_epoch = status.drained_epoch.0;
        self.drained_wall_ms = status.drained_wall_ms;
        self.backing_is_consistent = status.backing_is_consistent;
        self.parked = status.parked.iter().copied().map(RangeSummary::parked).collect();
        let damaged = status.damaged.into_iter();
        self.damaged = damaged.map(|damage| RangeSummary::new(damage.range, damage.reason)).collect();
    }
}

/// Writes the dirty data of `region` to the backing devices.
///
/// # Errors
/// When the transport cannot be opened, a host of another machine has the region, or it lacks the selected backend. An error of one backend is in its [`Rescued`].
pub fn rescue(
    region: Mapping,
    options: &Options,
    progress: &mut dyn FnMut(Progress),
) -> Result<Vec<Rescued>> {
    let environment = Arc::new(ProcessEnvironment::<Mapping>::new());
    let region = Region::new(region);
    if !Transport::<ProcessEnvironment>::is_shared(&region).is_ok_and(|is_shared| is_shared) {
        // Dropped in the opposite order.
        let names = ("of this rescue", machine_name());
        let (transport, _presence) =
            presence::open(Arc::clone(&environment), region, (names.0, &names.1), &Timing::default(), None)?;
        return rescue_each(&[transport], &environment, options, progress);
    }
    let region = Arc::new(region);
    cbd_runtime::hosts::refuse_living(&environment, &region)?;
    let transports = Transport::open_each(&environment, region)?;
    rescue_each(&transports, &environment, options, progress)
}

/// Rescues the selected backends of these hosts of a region.
fn rescue_each(
    transports: &[Arc<Transport<ProcessEnvironment>>],
    environment: &Arc<ProcessEnvironment>,
    options: &Options,
    progress: &mut dyn FnMut(Progress),
) -> Result<Vec<Rescued>> {
    let mut done = Vec::new();
    for transport in transports {
        let from = done.len();
        rescue_all(transport, environment, options, &mut done, progress);
        if let Err(error) = sync_region(transport, "of this rescue") {
            done[from..].iter_mut().for_each(|rescued| rescued.warnings.push(error.line()));
        }
    }
    match options.backend {
        Some(id) if done.is_empty() => {
            Err(Error::new(ErrorKind::NotFound, format!("the region has no backend {id}")))
        }
        _ => Ok(done),
    }
}

/// Rescues the selected backends of one host.
fn rescue_all(
    transport: &Arc<Transport<ProcessEnvironment>>,
    environment: &Arc<ProcessEnvironment>,
    options: &Options,
    done: &mut Vec<Rescued>,
    progress: &mut dyn FnMut(Progress),
) {
    let rows = transport.info().layout.backend_rows;
    for id in (0..rows).map(BackendId).filter(|id| options.concerns(id.0)) {
        let entry = match transport.backend(id) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            entry => entry,
        };
        let mut rescued = Rescued { backend: id.0, ..Rescued::default() };
        let result = entry.and_then(|entry| {
            rescued.disk =
                options.to.as_ref().map_or_else(|| entry.path.clone(), |to| to.display().to_string());
            rescue_backend(transport, &entry, environment, options, &mut rescued, progress)
        });
        match result {
            Ok(()) => rescued.complete = true,
            Err(error) => rescued.error = Some(error.line()),
        }
        done.push(rescued);
    }
}

/// A path as the tables store it.
fn absolute(path: &Path) -> Result<String> {
    let malformed = |why: String| {
        Error::new(ErrorKind::InvalidArgument, format!("the path {} is no path: {why}", path.display()))
    };
    let absolute = std::path::absolute(path).map_err(|error| malformed(error.to_string()))?;
    absolute.into_os_string().into_string().map_err(|_| malformed("it is not UTF-8".to_owned()))
}

/// The name under which the tables record the former disk `gone`: its identity, or a path.
fn forgotten_name<P: Pmem + 'static>(
    transport: &Transport<ProcessEnvironment<P>>,
    backend: BackendId,
    gone: &Path,
) -> Result<String> {
    let identities = transport.former_disks(backend).into_iter().map(|former| former.identity);
    let named = identities.into_iter().find(|identity| gone.as_os_str() == identity.as_str());
    named.map_or_else(|| absolute(gone), Ok)
}

/// Records the move to `disk`, if the backend moves. Returns the path of the disk from which the backend was moved, now
/// or before.
fn record_move(
    transport: &Transport<ProcessEnvironment>,
    entry: &BackendEntry,
    disk: &BackingFile,
    options: &Options,
    moves: bool,
) -> Result<Option<String>> {
    let former = || transport.former_disk(entry.id).map(|former| former.path);
    if moves {
        let to = options.to.as_deref().unwrap_or_else(|| Path::new(&entry.path));
        if let Some(gone) = &options.forget_disk {
            transport.forget_former_disk(entry.id, &forgotten_name(transport, entry.id, gone)?)?;
        }
        transport.move_backend(entry.id, &absolute(to)?, &disk.identity().to_token())?;
        Ok(Some(former().unwrap_or_else(|| entry.path.clone())))
    } else if entry.is_moved {
        Ok(former())
    } else {
        Ok(None)
    }
}

type ToolCache = Cache<ProcessEnvironment>;

fn rescue_backend(
    transport: &Transport<ProcessEnvironment>,
    entry: &BackendEntry,
    environment: &Arc<ProcessEnvironment>,
    options: &Options,
    rescued: &mut Rescued,
    progress: &mut dyn FnMut(Progress),
) -> Result<()> {
    if entry.cache_segments == 0 {
        (rescued.opened, rescued.backing_is_consistent, rescued.dirty_bytes) = (true, true, Some(0));
        return Ok(());
    }
    // 1. Open the disk first: once it is locked, the writes that a killed predecessor left in the kernel have
    //    completed.
    let (disk, warnings) = after_predecessor(DISK_TIMEOUT, || options.open_disk(&entry.into(), false))?;
    rescued.warnings = warnings;
    rescued.warnings.extend(options.check_target(transport, entry, &disk)?);
    // 2. The engine's recovery.
    let mixed = if options.after_crash { Mixed::Recover } else { Mixed::Refuse };
    if transport.pages_of(entry.id)? == Pages::MixedDirty && options.after_crash {
        rescued.warnings.push(
            "the machine crashed while the cache was in use: some of its pages may be old, and the data written may be older than the data \
             on the disk"
                .to_owned(),
        );
    }
    let cache = transport.open_cache_if(entry.id, mixed)?;
    rescued.opened = true;
    let drained = cache.drained_epoch();
    // 3. Allocate the resources of writeback first, so that it cannot fail for lack of them once the region
    //    records a move. A rate limit protects clients, and a rescue has none; the region keeps the setting.
    cache.set_settings(Settings { writeback_rate: 0, ..cache.settings() })?;
    let queue = disk.open_queue(DEPTH)?;
    let descriptor = queue.wait_descriptor();
    // 4. If it is not the recorded disk, the region records the move; from now on no daemon serves the
    //    recorded disk.
    let moves = is_other(entry, &disk)?;
    rescued.moved_from = record_move(transport, entry, &disk, options, moves)?;
    rescued.warnings.extend(options.records.iter().flat_map(|records| records.begin(entry)));
    // 5. The engine's writeback.
    let worker = BackgroundWorker::new(Arc::clone(&cache), queue, disk.geometry());
    let mut drain =
        Drain { cache: &cache, worker, environment, waiting: WaitSet::new(), timeout: options.timeout };
    drain.waiting.add(descriptor, Interest::Read);
    let result = drain.run(progress);
    // 6. Marks, as at a clean stop.
    drop(drain);
    cache.stop();
    let status = cache.status();
    let is_all_in_region = status.drained_epoch == drained && status.rare.segments_reclaimed == 0;
    if moves && result.is_err() && is_all_in_region {
        // Whatever the other disk contains, the region still holds all data that the recorded disk lacks, including
        // data that was parked, or written in part.
        transport.move_backend_back(entry)?;
        rescued.moved_from = None;
    }
    let (parked_bytes, parked_error) = (status.parked_bytes, status.parked_error.clone());
    rescued.add_status(status);
    result?;
    if parked_bytes == 0 {
        // 7. The disk is a plain disk now. What is written to it from here on must not be hidden by older data in the
        //    cache. Only the cache knows what is damaged: that stays.
        if rescued.damaged.is_empty() {
            drop(cache);
            transport.empty_backend(entry.id)?;
            rescued.emptied = true;
            rescued.warnings.extend(options.records.iter().flat_map(|records| records.emptied(entry)));
        }
        return Ok(());
    }
    let why = parked_error.unwrap_or_else(|| "it refused them before".to_owned());
    Err(Error::new(
        ErrorKind::Backing,
        format!(
            "the disk refuses {} bytes ({why}); the region keeps them, and all else is on the disk: rescue to a copy of the \
             disk (--to, --other-disk), or copy them by hand",
            parked_bytes
        ),
    ))
}

struct Drain<'a> {
    cache: &'a Arc<ToolCache>,
    worker: BackgroundWorker<ProcessEnvironment, Box<dyn PollableQueue>>,
    environment: &'a Arc<ProcessEnvironment>,
    waiting: WaitSet,
    timeout: Duration,
}

impl Drain<'_> {
    /// Runs the background worker until everything is on the disk, or until the timeout without progress.
    fn run(&mut self, progress: &mut dyn FnMut(Progress)) -> Result<()> {
        let of = self.cache.dirty_bytes();
        let target = self.cache.request_drain();
        let mut moved = Instant::now();
        let mut seen = (Epoch(0), u64::MAX, 0);
        loop {
            let step = self.worker.step();
            if matches!(step, Step::Idle { .. }) && self.cache.is_drained(target) {
                return Ok(());
            }
            let timeout = match step {
                Step::Busy => continue,
                Step::WaitBacking => None,
                Step::Idle { until_ms } => {
                    until_ms.map(|until| until.saturating_sub(self.environment.monotonic_ms()))
                }
            };
            let status = self.cache.status();
            progress(Progress {
                doing: "writing to the disk",
                done: of.saturating_sub(status.dirty_bytes),
                of,
            });
            let now = (status.drained_epoch, status.dirty_bytes, status.written_back_bytes);
            // Bytes count as progress only while the disk does not fail: retries of failing writes write
            // bytes, too.
            let writes = now.2 > seen.2 && status.backing_trouble.is_none();
            if now.0 > seen.0 || now.1 < seen.1 || writes {
                moved = Instant::now();
            }
            seen = now;
            let left = self.timeout.saturating_sub(moved.elapsed());
            if left.is_zero() {
                return Err(self.timeout_error(status.backing_trouble.map(|trouble| trouble.error)));
            }
            let timeout = timeout.map_or(left, |ms| left.min(Duration::from_millis(ms.max(1))));
            self.waiting.wait(Some(timeout))?;
        }
    }

    fn timeout_error(&self, trouble: Option<String>) -> Error {
        let seconds = self.timeout.as_secs();
        let text = match (trouble, self.cache.status().region_failed) {
            (_, Some(failed)) => failed,
            (Some(trouble), None) => format!("nothing has reached the disk for {seconds} s: {trouble}"),
            (None, None) => format!("nothing has reached the disk for {seconds} s"),
        };
        Error::new(
            ErrorKind::Backing,
            format!(
                "{text}; the region records the data that is on the disk, so rescue can be run again and continues from there"
            ),
        )
    }
}
