//! A running backend: its backing device, its cache, the background worker of the cache, and the device for clients.
//!
//! Invariants: a backing device is used only if it is the recorded disk; however a run ends, dirty data stays in the region.
//!
//! Elsewhere: the set of backends and the requests to start them, and the exports of their devices.

use crate::drain::{DrainProgress, DrainRequest, NotDrained, until_drained};
use crate::region::with_tools;
use crate::{ProcessEnvironment, Rounds, ServedDevice, Worker};
use cbd_backing::{Backing, BackingFile, Identity, Oldest, Options, Outstanding, Watch};
use cbd_device::Device;
use cbd_engine::{BackendEntry, Cache, CacheStatus, Pages, Transport};
use cbd_types::{Context, Error, Result};
use parking_lot::Mutex;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Options of a run that the region does not record.
#[derive(Clone, Copy)]
pub struct RunOptions<'a> {
    /// The region's path, for error messages.
    pub region: &'a str,
    /// Wraps the backing device in decorators of a test or a demonstration.
    pub decorate: &'a dyn Fn(Arc<dyn Backing>) -> Arc<dyn Backing>,
    /// Called first on the thread of the background worker.
    pub prepare_thread: fn(),
}

impl RunOptions<'_> {
    /// Options without decorators.
    #[must_use]
    pub const fn plain(region: &str) -> RunOptions<'_> {
        RunOptions { region, decorate: &|backing| backing, prepare_thread: || () }
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

/// The parts of a running backend.
pub struct RunningBackend {
    // The cache's owners are dropped before the backing device's owners: the close of the device may block.
    worker: Mutex<Option<Worker>>,
    cache: Option<Arc<Cache<ProcessEnvironment>>>,
    rounds: Arc<Rounds>,
    device: Arc<ServedDevice<ProcessEnvironment>>,
    backing: Arc<dyn Backing>,
    outstanding: Outstanding,
    recovered: Option<Recovered>,
    watch: Watch,
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
        let disk = Options { sector: Some(entry.sector), size: Some(entry.size), ..Options::default() };
        let (file, mut warnings) = BackingFile::open_recorded(path, disk, &recorded)?;
        let watch = file.watch();
        let (backing, outstanding) = Outstanding::over((options.decorate)(Arc::new(file)));
        let geometry = backing.geometry();
        let (device, cache, recovered, worker) = if entry.cache_segments == 0 {
            (Device::uncached(geometry), None, None, None)
        } else {
            let begun = Instant::now();
            let pages = transport.pages_of(entry.id)?;
            let cache = transport
                .open_cache(entry.id)
                .map_err(|error| with_tools(error, options.region))
                .context(|| format!("opening the cache of {path}"))?;
            let recovered = Recovered { elapsed: begun.elapsed(), status: Box::new(cache.status()) };
            warnings.extend(note_of(pages, path));
            let name = entry.id.to_string();
            let worker =
                Worker::start(&name, Arc::clone(environment), &cache, &*backing, options.prepare_thread)?;
            (Device::cached(Arc::clone(&cache), geometry), Some(cache), Some(recovered), Some(worker))
        };
        let device = Arc::new(ServedDevice::new(Arc::new(device), Arc::clone(&backing)));
        let rounds = worker.as_ref().map(|worker| Arc::clone(worker.rounds())).unwrap_or_default();
        let worker = Mutex::new(worker);
        Ok((Self { backing, outstanding, cache, rounds, device, recovered, worker, watch }, warnings))
    }

    /// The backing device.
    #[must_use]
    pub fn backing(&self) -> &dyn Backing {
        &*self.backing
    }

    /// The oldest operation in flight to the backing device.
    #[must_use]
    pub fn oldest_operation(&self) -> Option<Oldest> {
        self.outstanding.oldest()
    }

    /// Watches the file of the backing device for changes.
    #[must_use]
    pub const fn watch(&self) -> &Watch {
        &self.watch
    }

    /// The cache, if it has one.
    #[must_use]
    pub const fn cache(&self) -> Option<&Arc<Cache<ProcessEnvironment>>> {
        self.cache.as_ref()
    }

    /// The result of recovery when this run began.
    #[must_use]
    pub const fn recovered(&self) -> Option<&Recovered> {
        self.recovered.as_ref()
    }

    /// The device for clients.
    #[must_use]
    pub const fn device(&self) -> &Arc<ServedDevice<ProcessEnvironment>> {
        &self.device
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
        match &self.cache {
            Some(cache) => {
                let silence = || {
                    let oldest = self.outstanding.oldest().filter(|oldest| oldest.age * 2 >= timeout)?;
                    Some(format!("a {} has had no answer for {} s", oldest.name, oldest.age.as_secs()))
                };
                until_drained(cache, &self.rounds, request, timeout, &silence, report)
            }
            None => Ok(0),
        }
    }

    /// Stops the background worker and stores marks of the cache; dirty data stays in the region.
    pub fn stop(&self) {
        if let Some(mut worker) = self.worker.lock().take() {
            worker.stop();
        }
        if let Some(cache) = &self.cache {
            cache.stop();
        }
    }
}
