//! Periodic records of a running daemon: recovery points in the state folder, error conditions in the log.
//!
//! Invariants: a recovery point that could not be logged is retried every second; no thread writes here while it holds
//! the lock of the tables.

use super::conditions::{self, Conditions, Line, Observed};
use super::figures::SharedTrend;
use super::transport::running;
use super::{Manager, backend};
use crate::api::RequestSample;
use crate::size::format_time;
use crate::state::RecoveryPoint;
use cbd_types::{BackendId, Error, ErrorKind, Result, uuid_text};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// The records that were written so far.
#[derive(Default, Debug)]
pub(super) struct Recorder {
    /// The last logged recovery point of each backend.
    logged: BTreeMap<(u32, BackendId), Logged>,
    /// Why the last recovery point of a transport could not be logged.
    failed: BTreeMap<u32, String>,
    /// The conditions of the regions.
    conditions: Conditions,
}

/// A logged recovery point: drained epoch, its time in ms, and whether the disk is not crash-consistent. A change of
/// any of them is logged: a clock that is set back lowers the time and not the epoch.
type Logged = (u64, u64, bool);

/// A recovery point that has changed and must be logged.
struct Moved {
    transport: u32,
    uuid: String,
    point: RecoveryPoint,
}

impl Manager {
    /// The sample of the requests of a backend.
    pub(super) fn request_sample(&self, transport: u32, id: BackendId) -> Result<RequestSample> {
        let tables = self.tables()?;
        let slot = running(&tables, transport)?.backends.get(&id).ok_or_else(|| backend::unknown(id))?;
        let run = slot.run.as_ref().and_then(|run| Some((Arc::clone(run), run.cache()?)));
        let trend = SharedTrend::clone(&slot.trend);
        drop(tables);
        let (run, cache) = run.ok_or_else(|| {
            let text =
                format!("backend {id} has no cache that is served, so that none of its requests is noted");
            Error::new(ErrorKind::Unsupported, text)
        })?;
        let sample = trend.lock().request_sample(id, &run, &cache.status());
        Ok(sample)
    }

    /// Samples all backends once; does nothing if another thread holds the lock of the tables.
    pub(super) fn record_changes(&self) {
        let mut recorder = self.recorder.lock();
        let Some(tables) = self.tables.try_lock() else { return };
        let (mut points, mut observed, mut regions) = (Vec::new(), Vec::<Observed>::new(), BTreeMap::new());
        let mut lines = Vec::<Line>::new();
        for (&transport, slot) in &*tables {
            let Ok(running) = &slot.running else { continue };
            regions.insert(transport, slot.entry.path.clone());
            let stores = || running.transport.region().store_failure().map(|error| error.line());
            let failed = running.failed().or_else(stores);
            observed.push(conditions::of_region(transport, &slot.entry.path, failed));
            if let Some(living) = &running.living {
                observed.push(conditions::of_hosts(transport, &slot.entry.path, &living.last_seen()));
            }
            observed.extend(running.observe_remotes(transport, &slot.entry.path));
            for (&id, backend) in &running.backends {
                let Some(run) = &backend.run else { continue };
                let status = run.cache().map(|cache| cache.status());
                let of_backend = conditions::of_backend(transport, id, &backend.path, run, status.as_ref());
                lines.extend(backend.conditions.lock().sample(&of_backend, Instant::now()));
                let Some(status) = status else {
                    run.device().sample_for(0);
                    continue;
                };
                let mut trend = backend.trend.lock();
                trend.sample(&(&status).into(), Instant::now());
                trend.note_reads(run, &status);
                drop(trend);
                let now = (status.drained_epoch.0, status.drained_wall_ms, !status.backing_is_consistent);
                let before = recorder.logged.get(&(transport, id));
                if (status.drained_wall_ms > 0 || before.is_some()) && before != Some(&now) {
                    let point = RecoveryPoint {
                        time: format_time(status.drained_wall_ms),
                        backend_id: id.0,
                        backend_uuid: uuid_text(backend.entry.uuid),
                        path: backend.path.clone(),
                        drained_epoch: status.drained_epoch.0,
                        drained_ms: status.drained_wall_ms,
                        void: status.void_reason,
                    };
                    points.push(Moved { transport, uuid: slot.entry.uuid.clone(), point });
                }
            }
        }
        drop(tables);
        for increased_at in points {
            let key = (increased_at.transport, BackendId(increased_at.point.backend_id));
            match self.fixed.state.log_recovery_point(&increased_at.uuid, &increased_at.point) {
                Ok(()) => {
                    let point = &increased_at.point;
                    recorder
                        .logged
                        .insert(key, (point.drained_epoch, point.drained_ms, point.void.is_some()));
                    recorder.failed.remove(&increased_at.transport);
                }
                Err(error) => drop(recorder.failed.insert(increased_at.transport, error.line())),
            }
        }
        for (transport, path) in regions {
            observed.push(conditions::of_recovery_points(transport, &path, recorder.failed.get(&transport)));
        }
        lines.extend(recorder.conditions.sample(&observed, Instant::now()));
        drop(recorder);
        lines.iter().for_each(Line::log);
    }

    /// Logs which conditions of regions are in force at the end of the daemon; does nothing if another thread still
    /// logs them.
    pub(super) fn end_conditions_of_regions(&self) {
        let Some(mut recorder) = self.recorder.try_lock() else { return };
        let lines = recorder.conditions.sample(&[], Instant::now());
        drop(recorder);
        lines.iter().for_each(Line::log);
    }
}
