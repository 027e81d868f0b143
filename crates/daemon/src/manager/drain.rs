//! Waiting for writeback: with progress, with an end, and without the manager's lock.
//!
//! Always true here: a wait ends when the goal is reached, when nothing has moved for as long as the user allows, when whoever
//! asked is gone, or when the daemon stops; whatever ends it, nothing dirty is dropped.

use super::backend::BackendRun;
use super::transport::running;
use super::{Manager, backend, stopping};
use crate::api::{Done, Drain, Progress};
use crate::control::{Flow, Report};
use cbd_engine::{Cache, CacheStatus};
use cbd_runtime::ProcessEnvironment;
use cbd_types::{BackendId, Epoch, Error, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Seconds without progress after which a wait gives up, where nobody says how many.
const TIMEOUT_S: u64 = 60;

/// How often the cache is looked at; a client learns of it every few looks.
const LOOK: Duration = Duration::from_millis(20);
const REPORT: Duration = Duration::from_millis(200);

/// What writeback is to reach.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Goal {
    /// What was written before is on the backing device; whoever asked may not wait for it.
    Checkpoint,
    /// The same, and who asked waits.
    Drained,
}

impl Manager {
    /// Seconds that a user gives a drain, with the default.
    pub(super) fn patience(&self, timeout_s: Option<u64>) -> Duration {
        Duration::from_secs(timeout_s.or(self.fixed.config.defaults.drain_timeout_s).unwrap_or(TIMEOUT_S))
    }

    /// Brings one backend or all of a transport up to date.
    pub(super) fn bring_up_to_date(
        &self,
        transport: u32,
        request: &Drain,
        goal: Goal,
        report: Report<'_>,
    ) -> Result<Done> {
        let runs = self.runs(transport, request.backend.map(BackendId))?;
        let asked: Vec<_> = runs
            .iter()
            .filter_map(|(id, run)| run.cache.as_ref().map(|cache| (*id, cache, cache.request_drain())))
            .collect();
        let mut done = Done::default();
        if goal == Goal::Checkpoint && !request.wait {
            return Ok(done);
        }
        for (id, cache, epoch) in asked {
            let wait =
                Wait { id, cache, patience: self.patience(request.timeout_s), stopping: &self.stopping };
            done.written_bytes += wait.until_drained(epoch, report)?;
        }
        Ok(done)
    }

    fn runs(&self, transport: u32, only: Option<BackendId>) -> Result<Vec<(BackendId, Arc<BackendRun>)>> {
        let tables = self.tables()?;
        let running = running(&tables, transport)?;
        if let Some(id) = only.filter(|id| !running.backends.contains_key(id)) {
            return Err(backend::unknown(id));
        }
        let mut runs = Vec::new();
        for (&id, slot) in running.backends.iter().filter(|(id, _)| only.is_none_or(|only| only == **id)) {
            match &slot.run {
                Some(run) => runs.push((id, Arc::clone(run))),
                None => {
                    return Err(Error::new(
                        ErrorKind::Stopped,
                        format!(
                            "backend {id} is not up ({}); put that right and start it again with backend-start",
                            slot.error.as_deref().unwrap_or("stopped")
                        ),
                    ));
                }
            }
        }
        Ok(runs)
    }
}

/// A wait for one cache.
pub(super) struct Wait<'a> {
    pub id: BackendId,
    pub cache: &'a Cache<ProcessEnvironment>,
    pub patience: Duration,
    pub stopping: &'a AtomicBool,
}

impl Wait<'_> {
    /// Waits until everything up to `epoch` is on the backing device; returns the bytes that were written meanwhile.
    pub fn until_drained(&self, epoch: Epoch, report: Report<'_>) -> Result<u64> {
        let begun = Instant::now();
        let start = self.cache.status();
        let (mut moved, mut reported) = (begun, None::<Instant>);
        let (mut least_dirty, mut written, mut drained) =
            (start.dirty_bytes, start.written_back_bytes, start.drained_epoch);
        loop {
            let status = self.cache.status();
            let written_bytes = status.written_back_bytes.saturating_sub(start.written_back_bytes);
            if self.cache.is_drained(epoch) {
                if status.parked.is_empty() {
                    return Ok(written_bytes);
                }
                // Asking for the drain has them tried again; that is over now.
                if status.parked_attempts > start.parked_attempts {
                    return Err(self.refused(&status));
                }
            }
            if self.stopping.load(Ordering::SeqCst) {
                return Err(stopping());
            }
            // Bytes count as progress only while the disk does not fail: retries of what fails write, too.
            let writes = status.written_back_bytes > written && status.backing_trouble.is_none();
            if status.drained_epoch > drained || status.dirty_bytes < least_dirty || writes {
                moved = Instant::now();
            }
            (drained, written) = (status.drained_epoch, status.written_back_bytes);
            least_dirty = least_dirty.min(status.dirty_bytes);
            let trouble = status.backing_trouble.as_ref().map(|trouble| trouble.error.clone());
            if moved.elapsed() >= self.patience {
                return Err(self.gave_up(status.dirty_bytes, trouble));
            }
            if reported.is_none_or(|at| at.elapsed() >= REPORT) {
                reported = Some(Instant::now());
                let progress = Progress {
                    backend_id: self.id.0,
                    dirty_bytes_at_start: start.dirty_bytes,
                    dirty_bytes: status.dirty_bytes,
                    written_bytes,
                    elapsed_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
                    error: trouble,
                };
                if report(progress) == Flow::Cancel {
                    return Err(Error::new(
                        ErrorKind::Stopped,
                        "cancelled; what is dirty stays in the cache",
                    ));
                }
            }
            std::thread::sleep(LOOK);
        }
    }

    fn refused(&self, status: &CacheStatus) -> Error {
        let first = status.parked.first().map(ToString::to_string).unwrap_or_default();
        Error::new(
            ErrorKind::Backing,
            format!(
                "backend {id} could not be drained: the backing device refuses {count} ranges, {bytes} bytes, the first {first} \
                 ({error}); they are parked in the cache, which keeps them, and all else is on the backing device. Put the \
                 disk right or overwrite them, and repeat; status lists them; or give these bytes up with backend-stop \
                 -b {id} --discard-dirty {bytes}",
                id = self.id,
                count = status.parked.len(),
                bytes = status.dirty_bytes,
                error = status.parked_error.as_deref().unwrap_or("not tried yet"),
            ),
        )
    }

    fn gave_up(&self, dirty_bytes: u64, trouble: Option<String>) -> Error {
        let (kind, why) = match trouble {
            Some(error) => (ErrorKind::Backing, format!("the backing device fails: {error}")),
            None => (ErrorKind::TimedOut, "the backing device has not taken anything".to_owned()),
        };
        Error::new(
            kind,
            format!(
                "backend {id} could not be drained: nothing moved for {} s ({why}); {dirty_bytes} bytes are dirty and \
                 stay in the cache, and the backend goes on. Put the disk right and repeat, with a longer --timeout if it \
                 is only slow; or give these bytes up with backend-stop -b {id} --discard-dirty {dirty_bytes}",
                self.patience.as_secs(),
                id = self.id,
            ),
        )
    }
}
