//! Backends: bringing a backing device onto a transport, bringing it back after a restart, changing its settings.
//!
//! Always true here: a backing device is served only if it is the disk that was recorded; options of a backend that is there
//! already are never changed silently by starting it again.

use super::blkdev::BlkdevSlot;
use super::transport::{Running, absolute, running_mut, same_file};
use super::{Fixed, Manager};
use crate::api::{self, BackendInfo, BackendStarted, SettingsChange, StartBackend};
use crate::environment::ProcessEnvironment;
use crate::exports::ExportChoice;
use crate::queue::ServedDevice;
use crate::worker::Worker;
use cbd_backing::{Backing, BackingFile, Identity, Options};
use cbd_device::Device;
use cbd_engine::{BackendEntry, BackendSpec, Cache, Settings};
use cbd_types::{BackendId, BlkdevId, Context, Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Lanes are many, so that threads seldom meet in one.
const LANES_PER_PROCESSOR: u32 = 16;

/// Queues of a backend where nobody says how many: one for each processor, at most this many.
const HANDLERS_MAX: u32 = 8;

/// A backend of this host; it may have failed to come up.
pub(super) struct BackendSlot {
    pub path: String,
    pub entry: BackendEntry,
    pub run: Option<Arc<BackendRun>>,
    pub error: Option<String>,
    pub warnings: Vec<String>,
    /// A stop is draining it.
    pub stopping: bool,
    pub blkdevs: BTreeMap<BlkdevId, BlkdevSlot>,
}

impl std::fmt::Debug for BackendSlot {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("BackendSlot")
            .field("path", &self.path)
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}

/// What runs for a backend.
pub(super) struct BackendRun {
    pub backing: Arc<dyn Backing>,
    pub cache: Option<Arc<Cache<ProcessEnvironment>>>,
    pub device: Arc<ServedDevice<ProcessEnvironment>>,
    worker: Mutex<Option<Worker>>,
}

impl BackendRun {
    /// Opens the backing device, checks that it is the right one, and starts its cache.
    fn start(
        fixed: &Fixed,
        running: &Running,
        entry: &BackendEntry,
        path: &str,
    ) -> Result<(Self, Vec<String>)> {
        fixed.guard.check(Path::new(path), "a backing device")?;
        let recorded = Identity::parse(&entry.identity)?;
        let options = Options { sector: Some(entry.sector), size: Some(entry.size), ..Options::default() };
        let (file, warnings) = BackingFile::open_recorded(path, options, &recorded)?;
        let backing = fixed.decorate(Arc::new(file));
        let geometry = backing.geometry();
        let environment = &fixed.environment;
        let (device, cache, worker) = if entry.cache_segments == 0 {
            (Device::uncached(geometry), None, None)
        } else {
            let cache =
                running.transport.open_cache(entry.id).context(|| format!("opening the cache of {path}"))?;
            let worker = Worker::start(&entry.id.to_string(), Arc::clone(environment), &cache, &*backing)?;
            (Device::cached(Arc::clone(&cache), geometry), Some(cache), Some(worker))
        };
        let device = Arc::new(ServedDevice::new(Arc::new(device), Arc::clone(&backing)));
        Ok((Self { backing, cache, device, worker: Mutex::new(worker) }, warnings))
    }

    /// Ends the upkeep and marks the cache; what is dirty stays in the region.
    pub fn stop(&self) {
        if let Some(mut worker) = self.worker.lock().take() {
            worker.stop();
        }
        if let Some(cache) = &self.cache {
            cache.stop();
        }
    }
}

impl BackendSlot {
    fn new(entry: BackendEntry) -> Self {
        Self {
            path: entry.path.clone(),
            entry,
            run: None,
            error: None,
            warnings: Vec::new(),
            stopping: false,
            blkdevs: BTreeMap::new(),
        }
    }

    /// Starts what the entry says; on failure the reason is kept.
    fn start(&mut self, fixed: &Fixed, running: &Running) -> Result<()> {
        match BackendRun::start(fixed, running, &self.entry, &self.path) {
            Ok((run, warnings)) => {
                for warning in &warnings {
                    tracing::warn!(backend = self.entry.id.0, "{warning}");
                }
                (self.run, self.error, self.warnings) = (Some(Arc::new(run)), None, warnings);
                Ok(())
            }
            Err(error) => {
                self.error = Some(error.line());
                Err(error)
            }
        }
    }

    /// Closes its doors and ends its upkeep.
    pub fn stop(mut self, id: BackendId) {
        for (_, mut blkdev) in std::mem::take(&mut self.blkdevs) {
            if let Err(error) = blkdev.close(true) {
                tracing::warn!(backend = id.0, "{error}");
            }
        }
        if let Some(run) = self.run.take() {
            run.stop();
            tracing::info!(backend = id.0, "stopped: {}", self.path);
        }
    }

    /// What `backend-list` shows.
    pub fn info(&self, id: BackendId) -> BackendInfo {
        let status = self.run.as_ref().and_then(|run| run.cache.as_ref()).map(|cache| cache.status());
        BackendInfo {
            backend_id: id.0,
            host_id: self.entry.host.0,
            backend_path: self.path.clone(),
            alive: self.run.is_some(),
            cache_segs: u64::from(self.entry.cache_segments),
            cache_gc_percent: u32::from(self.entry.settings.gc_percent),
            cache_used_segs: status.map_or(0, |status| u64::from(status.segments - status.free_segments)),
            blkdevs: self.blkdevs.iter().map(|(blkdev, slot)| slot.info(*blkdev)).collect(),
            error: self.error.clone(),
        }
    }
}

impl Fixed {
    /// The backing device with the decorators that the daemon was started with.
    fn decorate(&self, file: Arc<dyn Backing>) -> Arc<dyn Backing> {
        self.decorators.iter().fold(file, |inner, decorator| decorator.clone().wrap(inner))
    }
}

impl Running {
    /// Brings back the backends and block devices of this host, each as far as it can.
    pub(super) fn bring_backends_back(&mut self, fixed: &Fixed, transport: u32) {
        let (entries, damaged) = self.entries();
        for reason in &damaged {
            tracing::error!(transport, "{reason}");
        }
        self.damaged = damaged;
        for entry in entries.into_iter().filter(|entry| entry.host == self.host) {
            let id = entry.id;
            let mut slot = BackendSlot::new(entry);
            if let Err(error) = slot.start(fixed, self) {
                tracing::error!(backend = id.0, "the backend is not up: {error}");
            }
            self.backends.insert(id, slot);
        }
        for entry in self.transport.blkdevs() {
            if let Some(slot) = self.backends.get_mut(&entry.backend).filter(|_| entry.host == self.host) {
                slot.bring_blkdev_back(fixed, transport, &entry);
            }
        }
    }

    /// The rows of the backend table, one by one, so that a damaged one hides no other; and what is damaged.
    fn entries(&self) -> (Vec<BackendEntry>, Vec<String>) {
        let rows = self.transport.info().layout.backend_rows;
        let (mut entries, mut damaged) = (Vec::new(), Vec::new());
        for row in 0..rows {
            match self.transport.backend(BackendId(row)) {
                Ok(entry) => entries.push(entry),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => damaged.push(error.line()),
            }
        }
        (entries, damaged)
    }

    /// The backends of this host, or of all hosts.
    pub(super) fn backend_infos(&self, all: bool) -> Vec<BackendInfo> {
        let mut list: Vec<BackendInfo> = self.backends.iter().map(|(&id, slot)| slot.info(id)).collect();
        if all {
            let others = self.entries().0.into_iter().filter(|entry| entry.host != self.host);
            list.extend(others.map(|entry| BackendSlot::new(entry.clone()).info(entry.id)));
            list.sort_by_key(|info| info.backend_id);
        }
        list
    }

    /// The backend `id` of this host.
    pub(super) fn backend_mut(&mut self, id: BackendId) -> Result<&mut BackendSlot> {
        self.backends.get_mut(&id).ok_or_else(|| unknown(id))
    }
}

pub(super) fn unknown(id: BackendId) -> Error {
    Error::new(
        ErrorKind::NotFound,
        format!("there is no backend {id} of this host on the transport; backend-list shows which there are"),
    )
}

/// What a request asks for, with the defaults of the configuration.
struct Wanted {
    cache_bytes: Option<u64>,
    handlers: u32,
    data_crc: bool,
    settings: Settings,
    export: Option<ExportChoice>,
}

impl Wanted {
    fn of(request: &StartBackend, fixed: &Fixed) -> Result<Self> {
        let defaults = &fixed.config.defaults;
        let handlers =
            request.handlers.or(defaults.handlers).unwrap_or_else(|| processors().min(HANDLERS_MAX));
        if !(1..=128).contains(&handlers) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("handlers is 1 to 128, not {handlers}"),
            ));
        }
        let export = request.export.as_deref().or(defaults.export.as_deref()).unwrap_or("auto");
        let consistency = request.consistency.or(defaults.consistency).unwrap_or(api::Consistency::Strict);
        Ok(Self {
            cache_bytes: request.cache_size.or(defaults.cache_size).filter(|&bytes| bytes > 0),
            handlers,
            data_crc: request.data_crc.or(defaults.data_crc).unwrap_or(true),
            settings: Settings { consistency: consistency.into(), ..Settings::default() },
            export: request.start_dev.then(|| export.parse()).transpose()?,
        })
    }
}

impl Manager {
    pub(super) fn backend_start(&self, transport: u32, request: &StartBackend) -> Result<BackendStarted> {
        absolute(&request.path, "a backing device")?;
        let wanted = Wanted::of(request, &self.fixed)?;
        let mut tables = self.tables()?;
        for (id, slot) in &*tables {
            let Ok(running) = &slot.running else { continue };
            let known = running
                .backends
                .iter()
                .find(|(_, slot)| slot.run.is_some() && same_file(&slot.path, &request.path));
            if let Some((backend, _)) = known {
                return Err(Error::new(
                    ErrorKind::AlreadyExists,
                    format!("{} is backend {backend} of transport {id} already", request.path),
                ));
            }
        }
        let running = running_mut(&mut tables, transport)?;
        let down = running.backends.iter().find(|(_, slot)| slot.path == request.path).map(|(&id, _)| id);
        match down {
            Some(id) => self.backend_resume(running, transport, id, request, &wanted),
            None => self.backend_create(running, transport, &request.path, &wanted),
        }
    }

    /// Starts a backend that is on the transport but did not come up.
    fn backend_resume(
        &self,
        running: &mut Running,
        transport: u32,
        id: BackendId,
        request: &StartBackend,
        wanted: &Wanted,
    ) -> Result<BackendStarted> {
        let mut slot = running.backends.remove(&id).ok_or_else(|| unknown(id))?;
        let result = check_unchanged(&slot.entry, request, running.transport.info().layout.segment_size)
            .and_then(|()| slot.start(&self.fixed, running));
        if result.is_ok() {
            for entry in running.transport.blkdevs().iter().filter(|entry| entry.backend == id) {
                if slot.blkdevs.get(&entry.id).is_none_or(|blkdev| blkdev.export.is_none()) {
                    slot.bring_blkdev_back(&self.fixed, transport, entry);
                }
            }
        }
        let blkdev = slot.blkdevs.iter().next().map(|(&blkdev, blkdev_slot)| blkdev_slot.info(blkdev));
        let warnings = slot.warnings.clone();
        running.backends.insert(id, slot);
        result?;
        let blkdev = match (&wanted.export, blkdev) {
            (Some(export), None) => Some(self.blkdev_create(running, transport, id, export)?),
            (Some(_), there) => there,
            (None, _) => None,
        };
        Ok(BackendStarted { backend_id: id.0, blkdev, warnings })
    }

    fn backend_create(
        &self,
        running: &mut Running,
        transport: u32,
        path: &str,
        wanted: &Wanted,
    ) -> Result<BackendStarted> {
        self.fixed.guard.check(Path::new(path), "a backing device")?;
        // Held only while it is looked at: starting it holds it for good, and checks that it is still the same.
        let (identity, geometry) = {
            let file = BackingFile::open(path, Options::default())?;
            (file.identity().to_token(), file.geometry())
        };
        let same = running.entries().0.into_iter().find(|entry| entry.identity == identity);
        if let Some(entry) = same {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("{path} is the disk of backend {} ({}) already", entry.id, entry.path),
            ));
        }
        let spec = BackendSpec {
            host: running.host,
            path: path.to_owned(),
            identity,
            size: geometry.size,
            sector: geometry.sector,
            cache_bytes: wanted.cache_bytes,
            lanes_max: LANES_PER_PROCESSOR * processors(),
            handlers: wanted.handlers,
            data_crc: wanted.data_crc,
            settings: wanted.settings,
        };
        let id = running.transport.create_backend(&spec).context(|| format!("starting {path}"))?;
        let started = self.backend_first_start(running, transport, id, wanted);
        if started.is_err() {
            // Nobody has written anything yet.
            if let Some(slot) = running.backends.remove(&id) {
                slot.stop(id);
            }
            if let Err(error) = running.transport.remove_backend(id) {
                tracing::error!(backend = id.0, "the backend that did not start cannot be removed: {error}");
            }
        }
        started
    }

    fn backend_first_start(
        &self,
        running: &mut Running,
        transport: u32,
        id: BackendId,
        wanted: &Wanted,
    ) -> Result<BackendStarted> {
        let mut slot = BackendSlot::new(running.transport.backend(id)?);
        slot.start(&self.fixed, running)?;
        let warnings = slot.warnings.clone();
        tracing::info!(transport, backend = id.0, "started: {}", slot.path);
        running.backends.insert(id, slot);
        let blkdev = match &wanted.export {
            Some(export) => Some(self.blkdev_create(running, transport, id, export)?),
            None => None,
        };
        Ok(BackendStarted { backend_id: id.0, blkdev, warnings })
    }

    pub(super) fn change_settings(
        &self,
        transport: u32,
        id: BackendId,
        change: &SettingsChange,
    ) -> Result<api::Settings> {
        crate::settings::check(change)?;
        let mut tables = self.tables()?;
        let running = running_mut(&mut tables, transport)?;
        let engine = Arc::clone(&running.transport);
        let slot = running.backend_mut(id)?;
        if slot.entry.cache_segments == 0 {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("backend {id} has no cache to set anything of"),
            ));
        }
        let percent =
            |value: Option<i64>, now: u8| value.and_then(|value| u8::try_from(value).ok()).unwrap_or(now);
        let now = slot.entry.settings;
        let new = Settings {
            gc_percent: percent(change.gc_percent, now.gc_percent),
            consistency: change.consistency.map_or(now.consistency, Into::into),
            writeback_rate: change.writeback_rate.unwrap_or(now.writeback_rate),
            dirty_target_percent: percent(change.writeback_percent, now.dirty_target_percent),
        }
        .validated()?;
        engine.update_settings(id, new)?;
        slot.entry.settings = new;
        if let Some(cache) = slot.run.as_ref().and_then(|run| run.cache.as_ref()) {
            cache.set_settings(new)?;
        }
        tracing::info!(transport, backend = id.0, "settings: {new:?}");
        Ok(new.into())
    }
}

/// Refuses options that differ from what the backend was made with.
fn check_unchanged(entry: &BackendEntry, request: &StartBackend, segment_size: u64) -> Result<()> {
    let differs = |what: &str, was: String| {
        Err(Error::new(
            ErrorKind::InvalidArgument,
            format!(
                "backend {} was made with {what} {was}; start it without that option, or stop it and make it anew",
                entry.id
            ),
        ))
    };
    if request.data_crc.is_some_and(|wanted| wanted != entry.data_crc) {
        return differs("data-crc", if entry.data_crc { "on" } else { "off" }.to_owned());
    }
    if let Some(wanted) = request.cache_size {
        let segments = u64::from(entry.cache_segments);
        if wanted.abs_diff(segments * segment_size) > 2 * segment_size {
            return differs("a cache of", crate::size::format_size(segments * segment_size));
        }
    }
    if request.handlers.is_some_and(|wanted| wanted != entry.handlers) {
        return differs("handlers", entry.handlers.to_string());
    }
    if request
        .consistency
        .is_some_and(|wanted| cbd_engine::Consistency::from(wanted) != entry.settings.consistency)
    {
        return differs("consistency", format!("{} (change it with set)", entry.settings.consistency.name()));
    }
    Ok(())
}

fn processors() -> u32 {
    std::thread::available_parallelism().map_or(1, |count| u32::try_from(count.get()).unwrap_or(1).min(4096))
}

impl From<api::Consistency> for cbd_engine::Consistency {
    fn from(consistency: api::Consistency) -> Self {
        match consistency {
            api::Consistency::Strict => Self::Strict,
            api::Consistency::Checkpoint => Self::Checkpoint,
            api::Consistency::None => Self::None,
        }
    }
}

impl From<cbd_engine::Consistency> for api::Consistency {
    fn from(consistency: cbd_engine::Consistency) -> Self {
        match consistency {
            cbd_engine::Consistency::Strict => Self::Strict,
            cbd_engine::Consistency::Checkpoint => Self::Checkpoint,
            cbd_engine::Consistency::None => Self::None,
        }
    }
}

impl From<Settings> for api::Settings {
    fn from(settings: Settings) -> Self {
        Self {
            gc_percent: u32::from(settings.gc_percent),
            consistency: settings.consistency.into(),
            writeback_rate: settings.writeback_rate,
            writeback_percent: u32::from(settings.dirty_target_percent),
        }
    }
}
