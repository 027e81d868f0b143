//! A running backend: its backing device, its cache if it has one, the background worker of the cache, and the device for clients.
//!
//! Invariants: a backing device is used only if it is the recorded disk; however a run ends, dirty data stays in the region.
//!
//! Elsewhere: caches that come and go while it runs (`attach`); the set of backends and the requests to start them, and the exports of their devices.

use crate::drain::{DrainProgress, DrainRequest, NotDrained, until_drained};
use crate::environment::{coarse_ns, monotonic_ns};
use crate::region::with_tools;
use crate::{ProcessEnvironment, Rounds, ServedDevice, Worker};
use cbd_backing::{Backing, BackingFile, Ended, Identity, Offload, Oldest, Options, Outstanding, Watch};
use cbd_device::Device;
use cbd_engine::{BackendEntry, Cache, CacheStatus, Pages, Transport};
use cbd_types::{BackendId, BlkdevId, Context, Error, Result};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

/// Options of a run that the region does not record.
#[derive(Clone, Copy)]
pub struct RunOptions<'a> {
    /// The region's path, for error messages.
    pub region: &'a str,
    /// Whether the backing device verifies ranges in itself.
    pub offload: Offload,
    /// Wraps the backing device in decorators of a test or a demonstration.
    pub decorate: &'a dyn Fn(Arc<dyn Backing>) -> Arc<dyn Backing>,
    /// Called when the backing device is open and held, before its cache is opened, and so before the first write to it. An error
    /// ends the start. The notes are for the user.
    pub prepare_disk: &'a dyn Fn(&BackingFile) -> Result<Vec<String>>,
    /// Called first on the thread of the background worker.
    pub prepare_thread: fn(),
}

impl RunOptions<'_> {
    /// Options without decorators.
    #[must_use]
    pub const fn plain(region: &str) -> RunOptions<'_> {
        RunOptions {
            region,
            offload: Offload::Auto,
            decorate: &|backing| backing,
            prepare_disk: &|_| Ok(Vec::new()),
            prepare_thread: || (),
        }
    }
}

/// The result of recovering a cache.
#[derive(Clone, Debug)]
pub struct Recovered {
    /// The status of the cache right after recovery.
    pub status: Box<CacheStatus>,
    /// How long recovery took.
    pub elapsed: Duration,
}

/// A cache, and the background worker that it has.
pub(crate) struct Caching {
    worker: Mutex<Option<Worker>>,
    pub(crate) cache: Arc<Cache<ProcessEnvironment>>,
    /// The segments for which the index was resized last; 0 if that was when the cache was opened.
    pub(crate) index_segments: AtomicU32,
    rounds: Arc<Rounds>,
    recovered: Arc<Recovered>,
}

/// The parts of a running backend.
pub struct RunningBackend {
    // The cache's owners are dropped before the backing device's owners: the close of the device may block.
    pub(crate) caching: Mutex<Option<Arc<Caching>>>,
    pub(crate) device: Arc<ServedDevice<ProcessEnvironment>>,
    /// The same device for each blkdev that was ever open in this run.
    blkdevs: Mutex<BTreeMap<BlkdevId, Arc<ServedDevice<ProcessEnvironment>>>>,
    pub(crate) backing: Arc<dyn Backing>,
    /// The backing device without its decorators.
    pub(crate) file: Arc<BackingFile>,
    outstanding: Outstanding,
    watch: Watch,
    pub(crate) id: BackendId,
    region: String,
    prepare_thread: fn(),
}

impl std::fmt::Debug for RunningBackend {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "RunningBackend({})", self.backing.describe())
    }
}

/// A note to the user on the state of a cache's pages, if one is needed.
fn note_of(pages: Pages, path: &str) -> Option<String> {
    match pages {
        Pages::Unknown => Some(format!(
            "nothing says in which boot of the machine the cache of {path} was used last (an earlier version of CBD, or a copy of a region): it was \
             recovered, which is right unless the machine crashed since"
        )),
        Pages::MixedClean => Some(format!(
            "the machine crashed or was restarted while the cache of {path} was in use; nothing in it was dirty, and it begins empty"
        )),
        Pages::Whole | Pages::MixedDirty => None,
    }
}

impl RunningBackend {
    /// Opens the backing device at `path`, verifies that it is the one that `entry` records, and starts its cache. Also
    /// returns notes for the user.
    ///
    /// # Errors
    /// Those of [`BackingFile::open_recorded`] and [`Transport::open_cache`],
    /// [`ErrorKind::Exchanged`](cbd_types::ErrorKind::Exchanged) for a backend that a rescue has moved, and a system error if
    /// no thread can be started.
    pub fn start(
        transport: &Transport<ProcessEnvironment>,
        environment: &Arc<ProcessEnvironment>,
        entry: &BackendEntry,
        path: &str,
        options: RunOptions<'_>,
    ) -> Result<(Self, Vec<String>)> {
        crate::moved::refuse_moved(transport, entry)?;
        let recorded = Identity::parse(&entry.identity)?;
        let disk = Options {
            sector: Some(entry.sector),
            size: Some(entry.size),
            offload: options.offload,
            ..Options::default()
        };
        let (file, mut warnings) = BackingFile::open_recorded(path, disk, &recorded)?;
        warnings.extend((options.prepare_disk)(&file)?);
        let watch = file.watch();
        let file = Arc::new(file);
        let decorated = (options.decorate)(Arc::clone(&file) as Arc<dyn Backing>);
        let (backing, outstanding) = Outstanding::over(decorated);
        let geometry = backing.geometry();
        let (region, prepare_thread) = (options.region.to_owned(), options.prepare_thread);
        let (device, caching) = if entry.cache_segments == 0 {
            (Device::uncached(geometry), None)
        } else {
            let pages = transport.pages_of(entry.id)?;
            let caching = Caching::open(transport, environment, entry.id, &*backing, &region, prepare_thread)
                .context(|| format!("opening the cache of {path}"))?;
            warnings.extend(note_of(pages, path));
            (Device::cached(Arc::clone(&caching.cache), geometry), Some(Arc::new(caching)))
        };
        let device = Arc::new(device.with_clock(monotonic_ns).with_sample(coarse_ns));
        let device = Arc::new(ServedDevice::new(device, Arc::clone(&backing)));
        let (caching, id) = (Mutex::new(caching), entry.id);
        Ok((
            Self {
                caching,
                device,
                blkdevs: Mutex::default(),
                backing,
                file,
                outstanding,
                watch,
                id,
                region,
                prepare_thread,
            },
            warnings,
        ))
    }

    /// Opens the cache that the backend has now, and starts its background worker.
    pub(crate) fn open_cache(
        &self,
        transport: &Transport<ProcessEnvironment>,
        environment: &Arc<ProcessEnvironment>,
    ) -> Result<Caching> {
        Caching::open(transport, environment, self.id, &*self.backing, &self.region, self.prepare_thread)
    }

    /// The backing device.
    #[must_use]
    pub fn backing(&self) -> &dyn Backing {
        &*self.backing
    }

    /// The backing device without its decorators.
    #[must_use]
    pub fn file(&self) -> &BackingFile {
        &self.file
    }

    /// Permits other commands of the backing device, of the queues that are opened from now on.
    ///
    /// # Errors
    /// Those of [`BackingFile::set_offload`].
    pub fn set_offload(&self, offload: Offload) -> Result<()> {
        self.file.set_offload(offload)
    }

    /// The oldest operation in flight to the backing device.
    #[must_use]
    pub fn oldest_operation(&self) -> Option<Oldest> {
        self.outstanding.oldest()
    }

    /// The operations of the backing device that have ended since it was opened, each with its name.
    #[must_use]
    pub fn ended_operations(&self) -> Vec<(&'static str, Ended)> {
        self.outstanding.ended()
    }

    /// Watches the file of the backing device for changes.
    #[must_use]
    pub const fn watch(&self) -> &Watch {
        &self.watch
    }

    /// The cache, if it has one.
    #[must_use]
    pub fn cache(&self) -> Option<Arc<Cache<ProcessEnvironment>>> {
        self.caching.lock().as_ref().map(|caching| Arc::clone(&caching.cache))
    }

    /// The result of recovery when the cache was opened.
    #[must_use]
    pub fn recovered(&self) -> Option<Arc<Recovered>> {
        self.caching.lock().as_ref().map(|caching| Arc::clone(&caching.recovered))
    }

    /// The device for clients.
    #[must_use]
    pub const fn device(&self) -> &Arc<ServedDevice<ProcessEnvironment>> {
        &self.device
    }

    /// The device for clients of a blkdev, with queues, figures and a class of its own.
    pub fn device_of(&self, blkdev: BlkdevId) -> Arc<ServedDevice<ProcessEnvironment>> {
        let mut blkdevs = self.blkdevs.lock();
        Arc::clone(blkdevs.entry(blkdev).or_insert_with(|| Arc::new(self.device.for_blkdev(blkdev))))
    }

    /// Number of queues of blkdevs that are not `open`: each has requests that wait for the backing device. Waits until `end`
    /// for them to be closed.
    pub fn former_queues(&self, open: &dyn Fn(BlkdevId) -> bool, end: Instant) -> usize {
        let blkdevs = self.blkdevs.lock();
        let former = blkdevs.iter().filter(|(id, _)| !open(**id)).map(|(_, device)| Arc::clone(device));
        let former: Vec<_> = former.collect();
        drop(blkdevs);
        former.iter().filter(|device| !device.wait_for_queues(end)).map(|device| device.queues()).sum()
    }

    /// The notifier of the background worker's progress.
    pub(crate) fn rounds(&self) -> Arc<Rounds> {
        self.caching.lock().as_ref().map(|caching| Arc::clone(&caching.rounds)).unwrap_or_default()
    }

    /// Waits until everything up to `request` is on the backing device; see [`until_drained`].
    ///
    /// # Errors
    /// [`NotDrained`] with the reason.
    pub fn until_drained(
        &self,
        request: DrainRequest,
        timeout: Duration,
        report: &mut dyn FnMut(&DrainProgress) -> ControlFlow<Error>,
    ) -> std::result::Result<u64, NotDrained> {
        let Some(caching) = self.caching.lock().clone() else { return Ok(0) };
        let silence = || {
            let oldest = self.outstanding.oldest().filter(|oldest| oldest.age * 2 >= timeout)?;
            Some(format!("a {} has had no answer for {} s", oldest.name, oldest.age.as_secs()))
        };
        until_drained(&caching.cache, &caching.rounds, request, timeout, &silence, report)
    }

    /// Stops the background worker and stores marks of the cache; dirty data stays in the region.
    pub fn stop(&self) {
        let caching = self.caching.lock().clone();
        if let Some(caching) = caching {
            caching.stop();
        }
    }
}

impl Caching {
    /// Opens the cache of backend `id` and starts its background worker.
    fn open(
        transport: &Transport<ProcessEnvironment>,
        environment: &Arc<ProcessEnvironment>,
        id: BackendId,
        backing: &dyn Backing,
        region: &str,
        prepare_thread: fn(),
    ) -> Result<Self> {
        let begun = Instant::now();
        let cache = transport.open_cache(id).map_err(|error| with_tools(error, region))?;
        let recovered = Recovered { elapsed: begun.elapsed(), status: Box::new(cache.status()) };
        let worker =
            Worker::start(&id.to_string(), Arc::clone(environment), &cache, backing, prepare_thread)?;
        let rounds = Arc::clone(worker.rounds());
        Ok(Self {
            worker: Mutex::new(Some(worker)),
            cache,
            index_segments: AtomicU32::new(0),
            rounds,
            recovered: Arc::new(recovered),
        })
    }

    /// Stops the background worker and the cache; dirty data stays in the region.
    pub(crate) fn stop(&self) {
        if let Some(mut worker) = self.worker.lock().take() {
            worker.stop();
        }
        self.cache.stop();
    }
}
