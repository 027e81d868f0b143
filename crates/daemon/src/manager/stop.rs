//! Removing a backend from its transport, so that its disk is a plain disk again.
//!
//! Invariants: a backend is removed only when its cache has no dirty and no quarantined data, or when the user typed
//! exactly how many bytes are to be dropped; a stop that fails leaves the backend and its block devices as they were.

use super::Manager;
use super::backend::BackendSlot;
use super::beneath::forget;
use super::conditions::{self, SharedConditions};
use super::drain::Wait;
use super::slots::TakenSlot;
use super::tasks::{Task, poll_until, run_until};
use super::transport::running_mut;
use super::watch::check_file;
use crate::api::{Done, StopBackend};
use crate::control::Report;
use crate::events::EventName;
use cbd_engine::{CacheStatus, Mixed, Pages};
use cbd_runtime::{DrainRequest, RunningBackend, lacking};
use cbd_types::{BackendId, Error, ErrorKind, Result};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Timeout for other threads to release a cache that is being removed.
const RELEASE_LIMIT: Duration = Duration::from_secs(5);

impl Manager {
    pub(super) fn backend_stop(
        &self,
        transport: u32,
        id: BackendId,
        request: &StopBackend,
        report: Report<'_>,
    ) -> Result<Done> {
        if request.verify && request.discard_dirty.is_some() {
            let text = "a stop that drops data verifies nothing: leave verify out, or discard_dirty";
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        let run = self.begin_backend_stop(transport, id, request.force)?;
        let result = match (run, request.discard_dirty) {
            (None, discard) => self.check_down(transport, id, discard),
            (Some(run), Some(bytes)) => self.check_discard(transport, id, &run, request.force, bytes),
            (Some(run), None) => self.drain(transport, id, &run, request, report),
        };
        let limit = self.timeout(request.timeout_s);
        let result = result.and_then(|mut done| {
            // Of a backend that was never up nothing has asked for its scrub yet, whose file is removed, too.
            self.open_scrub(transport, id);
            let unended = self.remove(transport, id, limit)?;
            self.scrubs.remove(transport, id);
            log_dropped(id, &done);
            done.warnings.extend(unended);
            Ok(done)
        });
        result.map_err(|error| self.end_failed_stop(transport, id, error))
    }

    /// Marks the backend as being stopped, so that no block device is added to it. Refuses if it is in use and `force`
    /// is not set.
    pub(super) fn begin_backend_stop(
        &self,
        transport: u32,
        id: BackendId,
        force: bool,
    ) -> Result<Option<Arc<RunningBackend>>> {
        let mut taken = self.take_slot(transport, id, "its use is being checked")?;
        // Ends first what another host has stopped since the last look. A backend that is down serves nothing, and may be in use all the
        // same.
        let used_by_others = if force {
            Ok(())
        } else {
            taken.refuse_served(&self.fixed).and_then(|()| taken.handle.refuse_used_by_others(id))
        };
        let slot = &mut taken.slot;
        let result = if slot.stopping {
            Err(slot.being_stopped())
        } else if force {
            Ok(())
        } else {
            slot.refuse_if_used().and(used_by_others)
        };
        slot.stopping |= result.is_ok();
        let run = slot.run.clone();
        self.put_back(taken);
        result.map(|()| run)
    }

    /// Ends a stop that failed: the backend continues, and its exports are opened again.
    fn end_failed_stop(&self, transport: u32, id: BackendId, error: Error) -> Error {
        let Ok(mut taken) = self.take_slot_until(
            Instant::now() + RELEASE_LIMIT,
            transport,
            id,
            "its block device is being opened",
        ) else {
            self.unmark_stop(transport, id);
            return error;
        };
        taken.slot.stopping = false;
        let error = taken.slot.with_unended(error);
        if taken.slot.run.is_some() && !self.stopping.load(std::sync::atomic::Ordering::SeqCst) {
            let _opening = self.opening.read();
            taken.handle.open_exports(&self.fixed, &mut taken.slot);
        }
        self.put_back(taken);
        error
    }

    /// Ends a stop that failed while another worker has the slot; the background thread opens the exports later.
    pub(super) fn unmark_stop(&self, transport: u32, id: BackendId) {
        let mut tables = self.tables.lock();
        let slot = running_mut(&mut tables, transport).and_then(|running| running.backend_mut(id));
        if let Ok(slot) = slot {
            (slot.stopping, slot.moving_to) = (false, None);
            if let Some(work) = &mut slot.work {
                work.stop_ended = true;
            }
        }
    }

    fn drain(
        &self,
        transport: u32,
        id: BackendId,
        run: &Arc<RunningBackend>,
        request: &StopBackend,
        report: Report<'_>,
    ) -> Result<Done> {
        let mut done = Done { warnings: check_file(id, run)?.into_iter().collect(), ..Done::default() };
        // The first drain runs with the exports open: if it fails, no client is affected. With force the exports are
        // closed first, because a client that continues to write would keep the drain from ending.
        if request.force {
            self.close(transport, id, true)?;
        }
        done.written_bytes += self.drain_run(id, run, request, report)?;
        if !request.force {
            self.close(transport, id, false)?;
            // Drains the writes between the first drain and the close.
            done.written_bytes += self.drain_run(id, run, request, report)?;
        }
        if request.verify {
            self.verify_drained(transport, id, run, report)?;
        }
        // The check after the drain: the last writes went to the file that was opened, and the file still has a name.
        let after = check_file(id, run)?;
        done.warnings.extend(after.filter(|warning| !done.warnings.contains(warning)));
        Ok(done)
    }

    fn drain_run(
        &self,
        id: BackendId,
        run: &RunningBackend,
        request: &StopBackend,
        report: Report<'_>,
    ) -> Result<u64> {
        let Some(cache) = run.cache() else { return Ok(0) };
        let wait = Wait { id, run, timeout: self.timeout(request.timeout_s), stopping: &self.stopping };
        wait.until_drained(DrainRequest::new(&cache), report)
    }

    /// Closes the exports of the backend.
    fn close(&self, transport: u32, id: BackendId, force: bool) -> Result<()> {
        let mut taken = self.take_slot(transport, id, "its block device is being closed")?;
        let slot = &mut taken.slot;
        let used = if force { Ok(()) } else { slot.refuse_if_used() };
        let result = used.and_then(|()| slot.close_all(force));
        self.put_back(taken);
        result
    }

    fn check_discard(
        &self,
        transport: u32,
        id: BackendId,
        run: &RunningBackend,
        force: bool,
        bytes: u64,
    ) -> Result<Done> {
        self.close(transport, id, force)?;
        let Some(status) = run.cache().map(|cache| cache.status()) else {
            compare(id, 0, bytes)?;
            return Ok(Done::default());
        };
        compare(id, status.missing_bytes(), bytes)?;
        Ok(dropped(&status))
    }

    /// Checks a backend that is not up: it cannot be drained, but the amount of its dirty data is known.
    fn check_down(&self, transport: u32, id: BackendId, discard: Option<u64>) -> Result<Done> {
        let taken = self.take_slot(transport, id, "its cache is being examined")?;
        let result = taken.check_down(discard);
        self.put_back(taken);
        result
    }

    /// Removes the backend and its block devices from the region. Returns warnings about threads that have not ended.
    fn remove(&self, transport: u32, id: BackendId, limit: Duration) -> Result<Vec<String>> {
        let mut taken = self.take_slot(transport, id, "it is being removed")?;
        let _held = self.scrubs.hold(transport, id);
        match self.end_and_remove(&mut taken, limit) {
            Ok(()) => {
                let (event, path) = (EventName::BackendRemoved.name(), &taken.slot.path);
                tracing::info!(
                    transport,
                    backend = id.0,
                    event,
                    path,
                    "removed: {path} is a plain disk again"
                );
                let unended = std::mem::take(&mut taken.slot.unended);
                self.remove_backend(taken);
                Ok(unended)
            }
            Err(error) => {
                self.put_back(taken);
                Err(error)
            }
        }
    }

    /// Ends the backend first, which may wait for its disk up to `limit`; removes its rows only when no thread uses its
    /// cache.
    fn end_and_remove(&self, taken: &mut TakenSlot, limit: Duration) -> Result<()> {
        let id = taken.id;
        if taken.slot.ending.get() > 0 {
            let text = format!(
                "backend {id} is still being ended by an earlier stop: {} does not complete requests; nothing was dropped: repeat the stop \
                 when that has ended, or end the daemon",
                taken.slot.path
            );
            return Err(Error::new(ErrorKind::Busy, text));
        }
        taken.slot.end_services(true)?;
        for blkdev in taken.slot.blkdevs.values_mut() {
            taken.slot.unended.extend(blkdev.close_for_good(true)?);
        }
        self.end_run(taken, limit)?;
        taken.slot.unended.extend(taken.handle.revoke(&self.fixed, &taken.slot.entry, None));
        for blkdev in std::mem::take(&mut taken.slot.blkdevs).into_keys() {
            taken.handle.transport.remove_blkdev(blkdev)?;
        }
        let served = taken.handle.transport.served_blkdevs();
        for served in served.iter().filter(|served| served.backend == id) {
            taken.handle.transport.end_serving(served)?;
        }
        taken.handle.transport.remove_backend(id)?;
        forget(&self.fixed, &taken.slot.entry);
        Ok(())
    }

    /// Ends the run of a backend whose exports are closed, which may wait for its disk up to `limit`; no thread uses its cache then.
    pub(super) fn end_run(&self, taken: &mut TakenSlot, limit: Duration) -> Result<()> {
        let id = taken.id;
        if let Some(run) = taken.slot.run.take() {
            let (transport, path) = (taken.handle.id, taken.slot.path.clone());
            let conditions = SharedConditions::clone(&taken.slot.conditions);
            conditions::log_now(&conditions, transport, id, &path, &run);
            self.drop_run_of_placeholder(taken);
            taken.slot.error = Some("it was stopped, but not removed".to_owned());
            let cache = run.cache().map(|cache| Arc::downgrade(&cache));
            let ending = taken.slot.ending.add();
            let task = Task::new(format!("backend {id} ({path})"), move |stage| {
                stage.set("its backing device does not complete requests");
                run.stop();
                // Threads of a block device that was closed by force have requests of their own.
                run.device().wait_for_all_queues();
                conditions::log_after_stop(&conditions, transport, id, &path, &run);
                stage.set("its backing device does not close");
                drop((run, ending));
                let event = EventName::BackendStopped.name();
                tracing::info!(transport, backend = id.0, event, path, "stopped: {path}");
            });
            if let Some(hung) = run_until(Instant::now() + limit.max(RELEASE_LIMIT), vec![task]).pop() {
                let text = format!(
                    "{hung}; nothing was dropped. It is not served until that has ended, and comes back then; repeat the stop then, or end the \
                     daemon"
                );
                return Err(taken.not_removed(ErrorKind::TimedOut, text));
            }
            if !wait_until_unused(&cache.unwrap_or_default()) {
                let text = format!(
                    "backend {id} is stopped, and another command (drain, checkpoint) still has its cache; nothing was dropped: repeat \
                     the stop when that command has ended"
                );
                return Err(taken.not_removed(ErrorKind::Busy, text));
            }
        }
        Ok(())
    }
}

impl TakenSlot {
    /// The error of a stop that has ended the backend and could not remove it. Status and log show it, too: its block
    /// devices are closed, and the client that sent the command may have disconnected.
    fn not_removed(&mut self, kind: ErrorKind, text: String) -> Error {
        tracing::error!(transport = self.handle.id, backend = self.id.0, "its stop has not ended: {text}");
        self.slot.error = Some(text.clone());
        Error::new(kind, text)
    }

    fn check_down(&self, discard: Option<u64>) -> Result<Done> {
        let Self { handle, id, slot, .. } = self;
        let id = *id;
        let why = slot.error.clone().unwrap_or_default();
        let cached = slot.entry.cache_segments > 0;
        if !cached {
            compare(id, 0, discard.unwrap_or_default())?;
            return Ok(Done::default());
        }
        let is_mixed = handle.transport.pages_of(id)? == Pages::MixedDirty;
        let status = handle.transport.open_cache_if(id, Mixed::Look)?.status();
        let missing = status.missing_bytes();
        match discard {
            Some(bytes) => compare(id, missing, bytes)?,
            None if is_mixed => {
                return Err(Error::new(
                    ErrorKind::Torn,
                    format!(
                        "backend {id} is not up ({why}); the contents of its cache are not certain, {missing} bytes of them look dirty. To drop \
                         them type backend-stop -b {id} --discard-dirty {missing}"
                    ),
                ));
            }
            // Ranges that are zero in the cache only are dirty, too, and count no bytes.
            None if !status.is_all_on_backing() => {
                let lacking = match status.quarantined_bytes {
                    0 => String::new(),
                    _ => format!("; {}", lacking(&status).join("; and ")),
                };
                return Err(Error::new(
                    ErrorKind::Stopped,
                    format!(
                        "backend {id} is not up ({why}) and {} bytes of it are dirty{lacking}; bring its disk back and start it \
                         with backend-start, or give these bytes up with backend-stop -b {id} --discard-dirty {missing}",
                        status.dirty_bytes
                    ),
                ));
            }
            None => return Ok(Done::default()),
        }
        Ok(dropped(&status))
    }
}

/// Waits until no thread uses the cache: threads that have just ended and status requests release it soon. False if it
/// is still in use after [`RELEASE_LIMIT`].
pub(super) fn wait_until_unused<T>(cache: &Weak<T>) -> bool {
    poll_until(Instant::now() + RELEASE_LIMIT, || cache.strong_count() == 0)
}

impl BackendSlot {
    /// Adds the threads that may still use the cache to the error of a stop.
    fn with_unended(&mut self, error: Error) -> Error {
        if self.run.as_ref().is_some_and(|run| run.device().all_queues() == 0) {
            // Those threads have ended meanwhile.
            self.unended.clear();
        }
        if self.unended.is_empty() {
            return error;
        }
        Error::new(error.kind(), format!("{}; {}", error.line(), self.unended.join("; ")))
    }

    fn close_all(&mut self, force: bool) -> Result<()> {
        if let Err(error) = self.end_services(true) {
            self.unended.push(error.line());
        }
        for blkdev in self.blkdevs.values_mut() {
            self.unended.extend(blkdev.close(force)?);
        }
        Ok(())
    }

    fn refuse_if_used(&self) -> Result<()> {
        self.refuse_served()?;
        self.blkdevs.values().try_for_each(|blkdev| blkdev.refuse_if_used())
    }
}

/// Logs the data that was dropped, if any.
fn log_dropped(id: BackendId, done: &Done) {
    if done.discarded_bytes == 0 {
        return;
    }
    tracing::warn!(
        backend = id.0,
        "dropped {} bytes that were dirty or quarantined, at the user's command",
        done.discarded_bytes
    );
    for warning in &done.warnings {
        tracing::warn!(backend = id.0, "{warning}");
    }
}

/// The result of a stop that drops data at the user's command, with the ranges.
fn dropped(status: &CacheStatus) -> Done {
    let missing = status.missing_bytes();
    let parked =
        status.parked.iter().map(|range| format!("dropped {range}, which the backing device refused"));
    let damaged = status.damaged.iter().map(|damaged| {
        format!("dropped {}, which is damaged in the cache: the disk has older data there", damaged.range)
    });
    Done { discarded_bytes: missing, warnings: parked.chain(damaged).collect(), ..Done::default() }
}

/// Refuses unless the user typed the number of bytes that the disk alone does not have.
fn compare(id: BackendId, missing: u64, typed: u64) -> Result<()> {
    if missing == typed {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidArgument,
        format!(
            "backend {id} has {missing} bytes that are dirty or quarantined, not {typed}; nothing was dropped. To drop them type \
             --discard-dirty {missing}"
        ),
    ))
}
