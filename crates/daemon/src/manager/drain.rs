//! Waiting for writeback: with progress reports, with a timeout, and without the lock of the tables.
//!
//! Invariants: a wait ends when the goal is reached, when writeback has made no progress for the user's timeout, when
//! the client has disconnected, or when the daemon stops; in each case no dirty data is dropped.

use super::transport::running;
use super::watch::check_file;
use super::{Manager, backend, stopping};
use crate::api::{Done, Drain, Progress};
use crate::control::{Flow, Report};
use crate::events::EventName;
use cbd_runtime::{DrainProgress, DrainRequest, RunningBackend};
use cbd_types::{BackendId, Error, ErrorKind, Result};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Seconds without progress after which a wait ends with an error, unless the request sets another timeout.
const TIMEOUT_S: u64 = 60;

/// Interval of progress reports to the client.
pub(super) const REPORT_INTERVAL: Duration = Duration::from_millis(200);

/// The goal of a drain or checkpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Goal {
    /// Earlier writes reach the backing device; the client need not wait for it.
    Checkpoint,
    /// Earlier writes reach the backing device, and the client waits for it.
    Drained,
}

impl Goal {
    const fn name(self) -> &'static str {
        match self {
            Self::Checkpoint => "checkpoint",
            Self::Drained => "drain",
        }
    }
}

/// Logs the end of a drain or checkpoint of one backend, `only`, or of all of a transport.
fn log_end(transport: u32, only: Option<u32>, goal: Goal, done: &Done, failed: &[Error]) {
    let (what, event, written_bytes) = (goal.name(), EventName::DrainEnded.name(), done.written_bytes);
    match failed.first() {
        None => {
            let text = format!("the {what} is done: {written_bytes} bytes were written");
            tracing::info!(transport, backend = only, event, written_bytes, "{text}");
        }
        Some(error) => {
            let failed = failed.len();
            let more = if failed == 1 { String::new() } else { format!(" (and {} more)", failed - 1) };
            let text = format!("the {what} has failed: {}{more}", error.line());
            tracing::warn!(transport, backend = only, event, written_bytes, failed, "{text}");
        }
    }
}

/// Upper bound of a timeout, so that the clock can represent it.
const TIMEOUT_MAX: Duration = Duration::from_secs(365 * 86_400);

impl Manager {
    /// The timeout of a drain: that of the request, else the default.
    pub(super) fn timeout(&self, timeout_s: Option<u64>) -> Duration {
        let seconds = timeout_s.or(self.fixed.config.defaults.drain_timeout_s).unwrap_or(TIMEOUT_S);
        Duration::from_secs(seconds).min(TIMEOUT_MAX)
    }

    /// Drains one backend or all of a transport.
    pub(super) fn drain_backends(
        &self,
        transport: u32,
        request: &Drain,
        goal: Goal,
        report: Report<'_>,
    ) -> Result<Done> {
        let Selected { runs, mut failed } = self.runs(transport, request.backend.map(BackendId))?;
        let all = runs.len() + failed.len();
        let only = request.backend;
        let (what, started) = (goal.name(), EventName::DrainStarted.name());
        let of = only.map_or_else(|| format!("all {all} backends"), |id| format!("backend {id}"));
        tracing::info!(transport, backend = only, event = started, "a {what} of {of} begins");
        let mut done = Done::default();
        let mut asked = Vec::new();
        for (id, run) in &runs {
            match check_file(*id, run) {
                Ok(warning) => {
                    done.warnings.extend(warning);
                    asked.extend(run.cache().map(|cache| (*id, run, DrainRequest::new(&cache))));
                }
                Err(error) => failed.push(error),
            }
        }
        let waits = goal == Goal::Drained || request.wait;
        if waits {
            for (id, run, asked) in asked {
                let wait =
                    Wait { id, run, timeout: self.timeout(request.timeout_s), stopping: &self.stopping };
                let drained = wait.until_drained(asked, report).and_then(|bytes| {
                    if request.verify {
                        self.verify_drained(transport, id, run, report)?;
                    }
                    Ok((bytes, check_file(id, run)?))
                });
                match drained {
                    Ok((bytes, after)) => {
                        done.written_bytes += bytes;
                        done.warnings.extend(after.filter(|warning| !done.warnings.contains(warning)));
                    }
                    // The client has disconnected, or the daemon is stopping.
                    Err(error) if error.kind() == ErrorKind::Stopped => {
                        log_end(transport, only, goal, &done, std::slice::from_ref(&error));
                        return Err(error);
                    }
                    Err(error) => failed.push(error),
                }
            }
        }
        // A checkpoint that no client waits for goes on.
        if waits || !failed.is_empty() {
            log_end(transport, only, goal, &done, &failed);
        }
        match failed.len() {
            0 => Ok(done),
            _ if all == 1 => Err(failed.remove(0)),
            count => {
                let lines: Vec<String> = failed.iter().map(Error::line).collect();
                Err(Error::new(
                    failed[0].kind(),
                    format!(
                        "{count} of {all} backends were not drained, all others were: {}",
                        lines.join(" | ")
                    ),
                ))
            }
        }
    }

    fn runs(&self, transport: u32, only: Option<BackendId>) -> Result<Selected> {
        let tables = self.tables()?;
        let running = running(&tables, transport)?;
        if let Some(id) = only.filter(|id| !running.backends.contains_key(id)) {
            return Err(backend::unknown(id));
        }
        let (mut runs, mut failed) = (Vec::new(), Vec::new());
        for (&id, slot) in running.backends.iter().filter(|(id, _)| only.is_none_or(|only| only == **id)) {
            match &slot.run {
                Some(run) => runs.push((id, Arc::clone(run))),
                None => {
                    failed.push(Error::new(
                        ErrorKind::Stopped,
                        format!(
                            "backend {id} is not up ({}); correct that and start it again with backend-start",
                            slot.error.as_deref().unwrap_or("stopped")
                        ),
                    ));
                }
            }
        }
        Ok(Selected { runs, failed })
    }
}

/// The backends that a command applies to.
struct Selected {
    runs: Vec<(BackendId, Arc<RunningBackend>)>,
    /// Why the others cannot be drained.
    failed: Vec<Error>,
}

/// A wait for one cache.
pub(super) struct Wait<'a> {
    pub id: BackendId,
    pub run: &'a RunningBackend,
    pub timeout: Duration,
    pub stopping: &'a AtomicBool,
}

impl Wait<'_> {
    /// Waits until everything up to `request` is on the backing device; returns the bytes that were written meanwhile.
    pub fn until_drained(&self, request: DrainRequest, report: Report<'_>) -> Result<u64> {
        let mut look = self.watch(report);
        self.run.until_drained(request, self.timeout, &mut look).map_err(|why| {
            let id = self.id;
            why.into_error(id, |bytes| {
                format!("; or drop these bytes with backend-stop -b {id} --discard-dirty {bytes}")
            })
        })
    }

    /// Passes progress on to `report`, not too often; ends the wait when the client or the daemon does.
    pub fn watch<'b>(
        &'b self,
        report: Report<'b>,
    ) -> impl FnMut(&DrainProgress) -> ControlFlow<Error> + use<'b> {
        let mut reported = None::<Instant>;
        move |now| {
            if self.stopping.load(Ordering::SeqCst) {
                return ControlFlow::Break(stopping());
            }
            if reported.is_some_and(|at| at.elapsed() < REPORT_INTERVAL) {
                return ControlFlow::Continue(());
            }
            reported = Some(Instant::now());
            match report(self.progress(now)) {
                Flow::Cancel => {
                    let text = "cancelled; dirty data stays in the cache";
                    ControlFlow::Break(Error::new(ErrorKind::Stopped, text))
                }
                Flow::Continue => ControlFlow::Continue(()),
            }
        }
    }

    fn progress(&self, now: &DrainProgress) -> Progress {
        Progress {
            backend_id: self.id.0,
            dirty_bytes_at_start: now.dirty_bytes_at_start,
            dirty_bytes: now.dirty_bytes,
            written_bytes: now.written_bytes,
            elapsed_ms: u64::try_from(now.elapsed.as_millis()).unwrap_or(u64::MAX),
            error: now.trouble.clone(),
            ..Progress::default()
        }
    }
}
