//! Caches that come, go and change their size while their block devices are in use.
//!
//! Invariants: a command that fails leaves the backend as it was, and what fails after its point of no return is a warning; other
//! commands that change the backend are refused meanwhile.
//!
//! Elsewhere: how it is done (`cbd-runtime`), and in what order (`cbd-engine`).

use super::Manager;
use super::beneath::{Accepts, Beneath, DiskTrace, forget};
use super::drain::{REPORT_INTERVAL, Wait};
use super::sharing::{bounds_of, too_large};
use super::slots::{TakenSlot, TransportHandle};
use super::start::loses_writes;
use super::stopping;
use super::watch::check_file;
use crate::api::{AttachCache, DetachCache, Done, Progress, ResizeCache};
use crate::control::{Flow, Report};
use crate::events::EventName;
use crate::size::format_size;
use cbd_engine::Settings;
use cbd_runtime::{DrainProgress, NotDetached, RunningBackend, ShrinkProgress};
use cbd_types::{BackendId, Epoch, Error, ErrorKind, Result, uuid_text};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Manager {
    pub(super) fn cache_attach(&self, number: u32, id: BackendId, request: &AttachCache) -> Result<Done> {
        self.with_running(number, id, "a cache is being attached to it", |taken, run| {
            let mut warnings: Vec<String> = check_file(id, run)?.into_iter().collect();
            let after = self.last_drained(&taken.handle, &taken.slot.entry.uuid);
            let bounds = bounds_of(&taken.handle, request.cache_size, request.cache_max, request.weight)?;
            let _space = self.make_room(&taken.handle, request.cache_size)?;
            let stored = taken.slot.entry.settings;
            // A backend with a cache refuses another one, and keeps its mode.
            let mode = request.cache_mode.filter(|_| taken.slot.entry.cache_segments == 0);
            let settings = Settings { cache_mode: mode.map_or(stored.cache_mode, Into::into), ..stored };
            let (transport, environment) = (&taken.handle.transport, &self.fixed.environment);
            // Before the cache is there: its first write goes by its mode.
            transport.update_settings(id, settings)?;
            let is_first = taken.slot.entry.cache_segments == 0;
            if is_first {
                warnings.extend(self.seal_for_cache(taken, run));
            }
            if let Err(error) = run.attach_cache(transport, environment, request.cache_size, after, bounds) {
                let restored = transport.update_settings(id, stored);
                if is_first {
                    forget(&self.fixed, &taken.slot.entry);
                }
                taken.read_entry()?;
                return restored.and(Err(error));
            }
            self.restore_promise(number, &taken.slot.entry, run);
            let size = taken.read_entry()?;
            warnings.extend(too_large(&taken.handle, bounds));
            warnings.extend(loses_writes(&taken.handle, id.0, settings));
            tracing::info!(
                transport = number,
                backend = id.0,
                event = EventName::CacheAttached.name(),
                bytes = size,
                "{}: a cache of {} was attached",
                taken.slot.path,
                format_size(size)
            );
            Ok(Done { warnings, ..Done::default() })
        })
    }

    pub(super) fn cache_detach(
        &self,
        transport: u32,
        id: BackendId,
        request: &DetachCache,
        report: Report<'_>,
    ) -> Result<Done> {
        self.with_running(transport, id, "its cache is being detached", |taken, run| {
            let mut warnings: Vec<String> = check_file(id, run)?.into_iter().collect();
            let (cache, path) = (run.cache(), taken.slot.path.clone());
            if let Some(cache) = &cache {
                let dirty = cache.dirty_bytes();
                tracing::info!(
                    transport,
                    backend = id.0,
                    "{path}: its cache is being detached when the backing device has everything; {dirty} bytes are dirty, and writes go past it"
                );
            }
            let wait = Wait { id, run, timeout: self.timeout(request.timeout_s), stopping: &self.stopping };
            let (transport_of, environment) = (&taken.handle.transport, &self.fixed.environment);
            let mut watch = wait.watch(report);
            // The cache stays if the file has lost bytes or its last name: the disk would be all that is left.
            let mut look = |now: &DrainProgress| match check_file(id, run) {
                Err(error) => ControlFlow::Break(error),
                Ok(_) => watch(now),
            };
            let written = run.detach_cache(transport_of, environment, wait.timeout, &mut look);
            let written_bytes = written.map_err(|why| match why {
                NotDetached::NotDrained(why) => {
                    let error = why.into_error(id, |_| String::new());
                    Error::new(error.kind(), format!("the cache was not detached: {}", error.line()))
                }
                NotDetached::Other(error) => error,
            });
            // Read in any case: after an error of the region the row decides.
            let read = taken.read_entry();
            let written_bytes = written_bytes.inspect_err(|error| {
                if cache.is_some() {
                    tracing::warn!(transport, backend = id.0, "{path}: its cache stays: {error}");
                }
            })?;
            // The cache is gone. What fails from here on is a warning.
            if let Err(error) = read {
                taken.slot.entry.cache_segments = 0;
                warnings.push(error.line());
            }
            let after = check_file(id, run).unwrap_or_else(|error| Some(error.line()));
            warnings.extend(after.filter(|warning| !warnings.contains(warning)));
            forget(&self.fixed, &taken.slot.entry);
            if let Some(trace) = &mut taken.slot.trace {
                trace.forget_unchecked();
            }
            warnings.extend(self.forget_promise(transport, &taken.slot.entry));
            let event = EventName::CacheDetached.name();
            tracing::info!(transport, backend = id.0, event, written_bytes, "{path}: its cache was detached");
            Ok(Done { written_bytes, warnings, ..Done::default() })
        })
    }

    pub(super) fn cache_resize(
        &self,
        transport: u32,
        id: BackendId,
        request: &ResizeCache,
        report: Report<'_>,
    ) -> Result<Done> {
        self.with_running(transport, id, "its cache is being resized", |taken, run| {
            let mut reported = None::<Instant>;
            let mut look = |now: &ShrinkProgress| {
                if self.stopping.load(Ordering::SeqCst) {
                    return ControlFlow::Break(stopping());
                }
                if reported.is_some_and(|at| at.elapsed() < REPORT_INTERVAL) {
                    return ControlFlow::Continue(());
                }
                reported = Some(Instant::now());
                match report(progress_of(id, now)) {
                    Flow::Cancel => ControlFlow::Break(cancelled()),
                    Flow::Continue => ControlFlow::Continue(()),
                }
            };
            let timeout = self.timeout(request.timeout_s);
            let (handle, path) = (&taken.handle, taken.slot.path.clone());
            let bounds = bounds_of(handle, request.cache_size, request.cache_max, request.weight)?;
            let present =
                u64::from(taken.slot.entry.cache_segments) * handle.transport.info().layout.segment_size;
            if request.cache_size == 0 && present > 0 {
                let text = format!("a cache of no size is none: cbdctrl cache-detach -b {id} takes it away");
                return Err(Error::new(ErrorKind::InvalidArgument, text));
            }
            // A cache that shares its space keeps its minimum only, and its pins must fit into that.
            let log = (request.cache_size / handle.transport.info().layout.segment_size).saturating_sub(1);
            handle.transport.check_pins(id, Some(u32::try_from(log).unwrap_or(u32::MAX)), None)?;
            let wanted_max = request.cache_max.unwrap_or(request.cache_size);
            let shrinks = wanted_max < present;
            if shrinks {
                let (before, after) = (format_size(present), format_size(wanted_max));
                tracing::info!(
                    transport,
                    backend = id.0,
                    "{path}: its cache of {before} is being shrunk to {after}"
                );
            }
            let _space = self.make_room(handle, request.cache_size.saturating_sub(present))?;
            let resized = match bounds {
                None => run.resize_cache(&handle.transport, request.cache_size, timeout, &mut look),
                Some(bounds) => run.share_cache(&handle.transport, bounds, timeout, &mut look),
            };
            let warnings = too_large(handle, bounds).into_iter().collect();
            // Read in any case: the size may have changed before the bounds were refused.
            taken.read_entry()?;
            let resized = resized.inspect_err(|error| {
                if shrinks {
                    tracing::warn!(transport, backend = id.0, "{path}: its cache was not shrunk: {error}");
                }
            })?;
            let (before, now) = (format_size(resized.before), format_size(resized.now));
            let shared = bounds.map_or("", |_| ", and shares the space of the transport");
            tracing::info!(
                transport,
                backend = id.0,
                event = EventName::CacheResized.name(),
                bytes_before = resized.before,
                bytes = resized.now,
                "{path}: its cache of {before} has {now} now{shared}"
            );
            Ok(Done { warnings, ..Done::default() })
        })
    }

    /// Runs `change` on a backend that is up, with its slot taken.
    pub(super) fn with_running<T>(
        &self,
        transport: u32,
        id: BackendId,
        why: &'static str,
        change: impl FnOnce(&mut TakenSlot, &Arc<RunningBackend>) -> Result<T>,
    ) -> Result<T> {
        let mut taken = self.take_slot(transport, id, why)?;
        let _held = self.scrubs.hold(transport, id);
        let result = match taken.slot.run.clone() {
            _ if taken.slot.stopping => Err(taken.slot.being_stopped()),
            Some(run) if run.cache().is_some_and(|cache| cache.has_common_moment()) => Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "the disk of backend {id} is at a moment that it has in common with others: wait until that ends, or end it with \
                     cbdctrl set -b {id} writeback=on"
                ),
            )),
            Some(run) => change(&mut taken, &run),
            None => Err(Error::new(
                ErrorKind::Stopped,
                format!(
                    "backend {id} is not up ({}); correct that and start it again with backend-start",
                    taken.slot.error.as_deref().unwrap_or("stopped")
                ),
            )),
        };
        self.put_back(taken);
        result
    }

    /// Seals the disk of a backend that is about to get a cache, and records that it is in use; returns warnings.
    fn seal_for_cache(&self, taken: &TakenSlot, run: &RunningBackend) -> Vec<String> {
        let (entry, path) = (&taken.slot.entry, taken.slot.path.as_str());
        let mut warnings =
            Beneath::new(&self.fixed, &taken.handle, entry, path, Accepts::default()).seal(run.file());
        warnings.extend(DiskTrace::of(&self.fixed, &taken.handle, entry).begin());
        warnings
    }

    /// The last epoch that an earlier cache of the backend is known to have drained, from the log of recovery points.
    pub(super) fn last_drained(&self, handle: &TransportHandle, backend: &[u8; 16]) -> Epoch {
        let log = self.fixed.state.recovery_points(&uuid_text(handle.transport.info().uuid));
        Epoch(log.last_of(&uuid_text(*backend)).map_or(0, |point| point.drained_epoch))
    }
}

impl TakenSlot {
    /// Reads the row of the backend again; returns the bytes of its cache.
    pub(super) fn read_entry(&mut self) -> Result<u64> {
        let path = std::mem::take(&mut self.slot.entry.path);
        self.slot.entry = self.handle.transport.backend(self.id).inspect_err(|_| {
            self.slot.entry.path = path;
        })?;
        let size = self.handle.transport.info().layout.segment_size;
        Ok(u64::from(self.slot.entry.cache_segments) * size)
    }
}

fn progress_of(id: BackendId, now: &ShrinkProgress) -> Progress {
    Progress {
        backend_id: id.0,
        given_up_bytes: Some(now.bytes - now.missing_bytes),
        to_give_up_bytes: Some(now.bytes),
        elapsed_ms: now.elapsed.as_millis() as u64,
        ..Progress::default()
    }
}

fn cancelled() -> Error {
    Error::new(ErrorKind::Stopped, "cancelled; the cache has its former size")
}
