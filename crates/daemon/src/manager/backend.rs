//! Running backends: backing device, cache and background worker; restoring them at the start and changing their
//! settings.
//!
//! Invariants: a backing device is served only if it is the recorded disk.

use super::beneath::{Accepts, Beneath, DiskTrace, with_caches};
use super::blkdev::BlkdevSlot;
use super::conditions::SharedConditions;
use super::down;
use super::figures::SharedTrend;
use super::probe::{Probes, StartTime, answers};
use super::retry::Retry;
use super::services::{ServedSlot, ServiceError};
use super::slots::{SlotWork, TakenSlot, TransportHandle};
use super::status::state;
use super::tasks::Stage;
use super::transport::{Running, running};
use super::{Fixed, Manager, conditions, promise};
use crate::api::{self, BackendInfo, HeldInfo, SettingsChange};
use crate::events::EventName;
use crate::exports::prepare_data_thread;
use crate::scrub::{self, schedule};
use crate::settings::changed_name;
use cbd_backing::{Backing, Change};
use cbd_engine::{BackendEntry, CacheMode, Pages, Settings};
use cbd_remote::Changes;
use cbd_runtime::{Count, RunOptions, RunningBackend, wall_ms};
use cbd_types::{BackendId, BlkdevId, Error, ErrorKind, Name, Result, uuid_text};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// A backend of this host; it may have failed to come up.
pub(super) struct BackendSlot {
    pub path: String,
    pub entry: BackendEntry,
    pub run: Option<Arc<RunningBackend>>,
    /// The conditions of its present run, or of its last one.
    pub conditions: SharedConditions,
    /// The dirty data of its present run.
    pub trend: SharedTrend,
    pub error: Option<String>,
    pub warnings: Vec<String>,
    /// The path of its former disk, if a rescue has moved the backend.
    pub moved_from: Option<String>,
    /// How its file has changed since it was opened.
    pub file_change: Option<Change>,
    /// Whether it is not up because another process holds its disk.
    pub is_busy: bool,
    /// The contents of its cache while it is not up, or why the cache cannot be examined; none until it was examined.
    pub held: Option<std::result::Result<HeldInfo, String>>,
    /// The schedule of retries while it is not up.
    pub retry: Option<Retry>,
    /// Whether a stop, or a move to another host, is in progress.
    pub stopping: bool,
    /// The host that it is being moved to.
    pub moving_to: Option<String>,
    /// Threads that still end a former run, whose stop has taken too long.
    pub ending: Count,
    /// The work of the worker that has taken the slot; this value is the placeholder in the tables then.
    pub work: Option<SlotWork>,
    pub blkdevs: BTreeMap<BlkdevId, BlkdevSlot>,
    /// The block devices of other hosts on it that are served.
    pub services: BTreeMap<BlkdevId, ServedSlot>,
    /// The requests in flight of its block devices on all hosts, as far as those share it.
    pub changes: Arc<Changes>,
    /// Why that is not served.
    pub service_error: Option<ServiceError>,
    /// How the footprint of its disk is left when it ends; none before it was up.
    pub trace: Option<DiskTrace>,
    /// The threads that did not end when its block devices were closed by force, and what they wait for; they may still
    /// use the cache.
    pub unended: Vec<String>,
}

impl std::fmt::Debug for BackendSlot {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("BackendSlot")
            .field("path", &self.path)
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}

/// A backend that has started.
struct Started {
    run: RunningBackend,
    warnings: Vec<String>,
    /// Why it could not be told whether its disk was written without its cache.
    unchecked: Option<String>,
}

impl BackendSlot {
    pub fn new(entry: BackendEntry) -> Self {
        Self {
            path: entry.path.clone(),
            entry,
            run: None,
            conditions: SharedConditions::default(),
            trend: SharedTrend::default(),
            error: None,
            warnings: Vec::new(),
            moved_from: None,
            file_change: None,
            is_busy: false,
            held: None,
            retry: None,
            stopping: false,
            moving_to: None,
            ending: Count::default(),
            work: None,
            blkdevs: BTreeMap::new(),
            services: BTreeMap::new(),
            changes: Arc::default(),
            service_error: None,
            trace: None,
            unended: Vec::new(),
        }
    }

    /// Starts the backend; on failure the slot stores the reason.
    pub fn start(&mut self, fixed: &Fixed, running: &TransportHandle) -> Result<()> {
        self.start_if(fixed, running, Accepts::default())
    }

    /// As [`start`](Self::start), with what the user accepts.
    pub fn start_if(&mut self, fixed: &Fixed, running: &TransportHandle, accepts: Accepts) -> Result<()> {
        match self.run(fixed, running, accepts) {
            Ok(Started { run, mut warnings, unchecked }) => {
                let mut trace = DiskTrace::of(fixed, running, &self.entry);
                if accepts.changed_disk && self.entry.cache_segments > 0 {
                    warnings.extend(trace.begin());
                }
                if let Some(why) = unchecked {
                    trace.was_unchecked(running.id, &self.path, why);
                }
                self.trace = Some(trace);
                for warning in &warnings {
                    tracing::warn!(backend = self.entry.id.0, "{warning}");
                }
                if let Some(found) = conditions::recovered(&run) {
                    let (event, transport) = (EventName::CacheRecovered.name(), running.id);
                    let (ms, path) = (run.recovered().map(|it| it.elapsed.as_millis() as u64), &self.path);
                    tracing::info!(backend = self.entry.id.0, event, transport, path, ms, "{path}: {found}");
                }
                promise::restore(&run, fixed.state.path(), self.entry.uuid);
                (self.run, self.error, self.warnings) = (Some(Arc::new(run)), None, warnings);
                self.conditions = SharedConditions::default();
                self.trend = SharedTrend::default();
                (self.retry, self.file_change, self.is_busy) = (None, None, false);
                self.held = None;
                self.unended.clear();
                self.wait_for_channels(running);
                self.resume_blkdevs();
                Ok(())
            }
            Err(error) => {
                (self.error, self.is_busy) = (Some(error.line()), error.kind() == ErrorKind::Busy);
                Err(error)
            }
        }
    }

    fn run(&self, fixed: &Fixed, running: &TransportHandle, accepts: Accepts) -> Result<Started> {
        if running.living.is_some() && !running.transport.has_backend(self.entry.id)? {
            let text = format!("backend {} is another host's: it was moved there", self.entry.id);
            return Err(Error::new(ErrorKind::Stopped, text));
        }
        running.refuse_elsewhere(&self.entry)?;
        answers(&self.path)?;
        fixed.guard.check(Path::new(&self.path), "a backing device")?;
        // For a region with pages of mixed age after a crash of the machine, the engine's error names the user's
        // options.
        let pages = running.transport.pages_of(self.entry.id)?;
        let unknown = match pages {
            Pages::MixedClean | Pages::MixedDirty => None,
            Pages::Whole | Pages::Unknown if accepts.older_region => None,
            Pages::Whole | Pages::Unknown => down::refuse_older(fixed, running, &self.entry, &self.path)?,
        };
        let beneath = Beneath::new(fixed, running, &self.entry, &self.path, accepts);
        let options = RunOptions {
            region: &running.path,
            offload: scrub::settings_of(fixed.state.path(), &uuid_text(self.entry.uuid)).offload.into(),
            decorate: &|file| fixed.decorate(file),
            prepare_disk: &|file| beneath.prepare(file),
            prepare_thread: prepare_data_thread,
        };
        let started =
            RunningBackend::start(&running.transport, &fixed.environment, &self.entry, &self.path, options);
        let (run, mut warnings) = started.inspect_err(|_| beneath.failed())?;
        warnings.extend(unknown);
        warnings.extend(super::pins::lost_pins(&running.transport, self.entry.id));
        Ok(Started { run, warnings, unchecked: beneath.unchecked() })
    }

    /// Closes its exports and ends its background worker.
    pub fn stop(mut self, transport: u32, id: BackendId) {
        if let Err(error) = self.end_services(false) {
            tracing::warn!(backend = id.0, "{error}");
        }
        for (_, mut blkdev) in std::mem::take(&mut self.blkdevs) {
            if let Err(error) = blkdev.close(true) {
                tracing::warn!(backend = id.0, "{error}");
            }
        }
        if let Some(run) = self.run.take() {
            run.stop();
            let (event, path) = (EventName::BackendStopped.name(), &self.path);
            tracing::info!(backend = id.0, event, transport, path, "stopped: {path}");
        }
    }

    /// Ends the backend with the daemon: closes its block devices, or leaves them to the next daemon, then closes its
    /// cache and its file. `stage` records what this waits for.
    pub fn end(mut self, transport: u32, id: BackendId, stage: &Stage) {
        stage.set("the block device of another host does not end");
        if let Err(error) = self.end_services(false) {
            tracing::warn!(backend = id.0, "{error}");
        }
        stage.set("its block device does not close");
        for mut blkdev in std::mem::take(&mut self.blkdevs).into_values() {
            blkdev.end();
        }
        if let Some(run) = self.run.take() {
            stage.set("its backing device does not complete requests; what is dirty stays in the region");
            conditions::log_now(&self.conditions, transport, id, &self.path, &run);
            run.stop();
            conditions::log_after_stop(&self.conditions, transport, id, &self.path, &run);
            if let Some(trace) = &self.trace {
                stage.set("its backing device cannot be read");
                trace.leave(&run);
            }
            stage.set("its backing device does not close");
            drop(run);
            let (event, path) = (EventName::BackendStopped.name(), &self.path);
            tracing::info!(backend = id.0, event, transport, path, "stopped: {path}");
        }
    }

    /// The row of `backend-list`.
    pub fn info(&self, id: BackendId, segment_size: u64) -> BackendInfo {
        let bytes = |segments: u32| u64::from(segments) * segment_size;
        let status = self.run.as_ref().and_then(|run| run.cache()).map(|cache| cache.status());
        let held = self.held.as_ref().and_then(|held| Some(held.as_ref().ok()?.dirty_bytes));
        BackendInfo {
            backend_id: id.0,
            host_id: self.entry.host.0,
            name: self.entry.name.as_ref().map(Name::to_string),
            uuid: uuid_text(self.entry.uuid),
            backend_path: self.path.clone(),
            alive: self.run.is_some(),
            cache_segs: u64::from(
                status.as_ref().map_or_else(|| self.entry.log_segments(), |status| status.segments),
            ),
            cache_gc_percent: u32::from(self.entry.settings.gc_percent),
            cache_used_segs: status.as_ref().map_or(0, |status| u64::from(status.used_segments())),
            cache_size: bytes(self.entry.cache_segments),
            cache_min: self.entry.shared.map(|shared| bytes(shared.min)),
            cache_max: self.entry.shared.map(|shared| bytes(shared.max)),
            size: self.entry.size,
            dirty_bytes: status.as_ref().map(|status| status.dirty_bytes).or(held),
            state: state(self, status.as_ref()),
            blkdevs: self.blkdevs.iter().map(|(blkdev, slot)| slot.info(*blkdev)).collect(),
            error: self.error.clone(),
            retry_in_s: self.retry.as_ref().map(Retry::in_s),
            moved_from: self.moved_from.clone().filter(|_| self.entry.is_moved),
        }
    }
}

impl Fixed {
    /// Wraps the backing device with the decorator that the daemon was started with, if any.
    fn decorate(&self, file: Arc<dyn Backing>) -> Arc<dyn Backing> {
        match &self.decorator {
            Some(decorator) => decorator.wrap(file),
            None => file,
        }
    }
}

impl Running {
    /// Restores the backends and block devices of this host. A failure of one does not affect the others. It does not
    /// wait for a disk that is in use; `time` bounds the wait for all file systems and disks that do not respond.
    pub(super) fn restore_backends(&mut self, fixed: &Fixed, transport: u32, time: &mut StartTime) {
        let handle = self.handle(transport);
        self.former_part = handle.settle_blkdevs();
        let (entries, damaged) = handle.entries();
        for reason in &damaged {
            tracing::error!(transport, "{reason}");
        }
        if damaged.is_empty() {
            fixed.seals.sweep(&uuid_text(self.transport.info().uuid), &with_caches(&entries));
        }
        self.damaged = damaged;
        let ours: Vec<BackendEntry> = entries.into_iter().filter(|entry| entry.host == self.host).collect();
        let mut probes = Probes::default();
        let answering = time.reading(&mut probes, ours.iter().map(|entry| entry.path.clone()).collect());
        for entry in ours {
            let id = entry.id;
            let mut slot = BackendSlot::new(entry);
            if slot.entry.is_moved {
                let former = self.transport.former_disk(id).map(|former| former.path);
                slot.moved_from =
                    Some(former.unwrap_or_else(|| "a disk that is not known any more".to_owned()));
            }
            let started = if answering.contains_key(&slot.path) {
                slot.start(fixed, &handle)
            } else {
                let error = probes.no_answer(&slot.path);
                slot.error = Some(error.line());
                Err(error)
            };
            let path = &slot.path;
            match started {
                Ok(()) => {
                    let event = EventName::BackendStarted.name();
                    tracing::info!(transport, backend = id.0, event, path, "restored: {path}");
                }
                Err(error) => {
                    let event = EventName::BackendDown.name();
                    tracing::error!(backend = id.0, event, transport, path, "the backend is not up: {error}");
                }
            }
            self.backends.insert(id, slot);
        }
        handle.inherit_permissions(fixed);
        handle.remove_former_links(fixed);
        for entry in self.transport.blkdevs() {
            if let Some(slot) = self.backends.get_mut(&entry.backend).filter(|_| entry.host == self.host) {
                slot.restore_blkdev(fixed, &handle, &entry);
            }
        }
    }

    /// Rows for the backends of this host and for `others`, those of other hosts.
    pub(super) fn backend_infos(&self, others: Vec<BackendEntry>) -> Vec<BackendInfo> {
        let segment_size = self.transport_segment_size();
        let mut list: Vec<BackendInfo> =
            self.backends.iter().map(|(&id, slot)| slot.info(id, segment_size)).collect();
        list.extend(others.into_iter().map(|entry| {
            let id = entry.id;
            BackendSlot::new(entry).info(id, segment_size)
        }));
        list.sort_by_key(|info| info.backend_id);
        list
    }

    /// Bytes of a segment.
    pub(super) fn transport_segment_size(&self) -> u64 {
        self.tables_copy.info.layout.segment_size
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

impl Manager {
    pub(super) fn change_settings(
        &self,
        transport: u32,
        id: BackendId,
        change: &SettingsChange,
    ) -> Result<api::Settings> {
        crate::settings::check(change)?;
        self.check_promise(transport, id, change)?;
        let others = schedule::others(change);
        let has_scrubs = schedule::has_any(change);
        let settings = if has_scrubs && others == SettingsChange::default() {
            let tables = self.tables()?;
            let slot = running(&tables, transport)?.backends.get(&id).ok_or_else(|| unknown(id))?;
            slot.entry.settings.into()
        } else {
            let mut taken = self.take_slot(transport, id, "its settings are being changed")?;
            let result = taken.change_settings(&others);
            self.put_back(taken);
            result?
        };
        if has_scrubs {
            self.set_scrub_settings(transport, id, change)?;
        }
        Ok(settings)
    }
}

impl BackendSlot {
    /// The error of a command while the backend is being stopped, or moved to another host.
    pub(super) fn being_stopped(&self) -> Error {
        let host = self.moving_to.as_ref();
        let what = host.map_or_else(|| "stopped".to_owned(), |host| format!("moved to host {host}"));
        Error::new(ErrorKind::Busy, format!("backend {} is being {what} already", self.entry.id))
    }
}

impl TakenSlot {
    fn change_settings(&mut self, change: &SettingsChange) -> Result<api::Settings> {
        if let Some(host) = &self.slot.moving_to {
            // The other host has a copy of the settings already.
            let text =
                format!("backend {} is being moved to host {host}; change it there after that", self.id);
            return Err(Error::new(ErrorKind::Busy, text));
        }
        let name = changed_name(change.name.as_deref())?;
        let is_name_only =
            name.is_some() && SettingsChange { name: None, ..change.clone() } == SettingsChange::default();
        if is_name_only {
            self.name_backend(name.flatten().as_ref())?;
            return Ok(self.slot.entry.settings.into());
        }
        let Self { handle, id, slot, .. } = self;
        let id = *id;
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
            on_write_error: change.on_write_error.map_or(now.on_write_error, Into::into),
            write_error_after_s: change.write_error_after_s.unwrap_or(now.write_error_after_s),
            cache_mode: change.cache_mode.map_or(now.cache_mode, Into::into),
            read_fill: change.read_fill.map_or(now.read_fill, Into::into),
            sequential_read_cutoff: change.sequential_read_cutoff.unwrap_or(now.sequential_read_cutoff),
            readahead: change.readahead.map_or(now.readahead, Into::into),
            sequential_write_cutoff: change.sequential_write_cutoff.unwrap_or(now.sequential_write_cutoff),
            when_full: change.when_full.map_or(now.when_full, Into::into),
            congestion_read_us: change.congestion_read_us.unwrap_or(now.congestion_read_us),
            congestion_write_us: change.congestion_write_us.unwrap_or(now.congestion_write_us),
            read_latency_target_us: change.read_latency_target_us.unwrap_or(now.read_latency_target_us),
            writeback_paused_until_ms: match change.writeback_pause_s {
                None => now.writeback_paused_until_ms,
                Some(0) => 0,
                Some(seconds) => wall_ms() + u64::from(seconds) * 1000,
            },
            pin_percent: percent(change.pin_percent, now.pin_percent),
            metadata_min_percent: percent(change.metadata_min_percent, now.metadata_min_percent),
            metadata_max_percent: percent(change.metadata_max_percent, now.metadata_max_percent),
        }
        .validated()?;
        handle.transport.check_pins(id, None, Some(new.pin_percent))?;
        handle.transport.update_settings(id, new)?;
        slot.entry.settings = new;
        let cache = slot.run.as_ref().and_then(|run| run.cache());
        if let Some(cache) = &cache {
            cache.set_settings(new)?;
        }
        let (settings_mode, mode_before) = (new.cache_mode, now.cache_mode);
        let new = new.into();
        let typed = crate::settings::typed(&new);
        let event = EventName::SettingsChanged.name();
        tracing::info!(transport = handle.id, backend = id.0, event, settings = typed, "settings: {typed}");
        if let (Some(run), Some(cache)) = (&slot.run, &cache)
            && settings_mode != mode_before
        {
            // Now, since a change may be done before the next sample.
            if cache.is_changing_mode() {
                conditions::log_now(&slot.conditions, handle.id, id, &slot.path, run);
            } else {
                log_mode(handle.id, id, &slot.path, settings_mode);
            }
        }
        if let Some(name) = name {
            self.name_backend(name.as_ref())
                .map_err(|error| error.while_doing("the other settings are changed"))?;
        }
        Ok(new)
    }
}

/// Logs that a mode is in force from its setting on.
fn log_mode(transport: u32, id: BackendId, path: &str, mode: CacheMode) {
    let (event, mode) = (EventName::ModeChanged.name(), mode.name());
    tracing::info!(transport, backend = id.0, event, mode, path, "{path}: cache_mode={mode} is in force");
}

impl From<Settings> for api::Settings {
    fn from(settings: Settings) -> Self {
        Self {
            gc_percent: u32::from(settings.gc_percent),
            consistency: settings.consistency.into(),
            writeback_rate: settings.writeback_rate,
            writeback_percent: u32::from(settings.dirty_target_percent),
            on_write_error: settings.on_write_error.into(),
            write_error_after_s: settings.write_error_after_s,
            cache_mode: settings.cache_mode.into(),
            read_fill: settings.read_fill.into(),
            sequential_read_cutoff: settings.sequential_read_cutoff,
            readahead: settings.readahead.into(),
            sequential_write_cutoff: settings.sequential_write_cutoff,
            when_full: settings.when_full.into(),
            congestion_read_us: settings.congestion_read_us,
            congestion_write_us: settings.congestion_write_us,
            read_latency_target_us: settings.read_latency_target_us,
            writeback_paused_until_ms: settings.writeback_paused_until_ms,
            pin_percent: u32::from(settings.pin_percent),
            metadata_min_percent: u32::from(settings.metadata_min_percent),
            metadata_max_percent: u32::from(settings.metadata_max_percent),
        }
    }
}
