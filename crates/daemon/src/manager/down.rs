//! Backends that are not served: what their caches hold, and regions that are older than their disks.
//!
//! Always true here: a cache is looked into once for each time that its backend goes down, not at each status; that changes nothing that
//! anybody relies on. A region of which the log of recovery points knows that its disk is newer is not served unless the user says so.

use super::backend::BackendSlot;
use super::lent::Ground;
use super::{Fixed, Manager, status};
use crate::api::HeldInfo;
use crate::size::format_time;
use crate::state::RecoveryPoint;
use cbd_engine::BackendEntry;
use cbd_types::{BackendId, Error, ErrorKind, Result, uuid_text};

impl Manager {
    /// Looks into the cache of one backend that is not served and that nobody has looked into since it went down. One at a time, so that
    /// commands do not wait long.
    pub(super) fn look_into_what_is_down(&self) {
        let is_next =
            |slot: &BackendSlot| slot.is_down() && slot.held.is_none() && slot.entry.cache_segments > 0;
        let next = {
            let Some(tables) = self.tables_to_retry() else { return };
            let up =
                tables.iter().filter_map(|(&transport, slot)| Some((transport, slot.running.as_ref().ok()?)));
            let mut down = up.flat_map(|(transport, running)| {
                running.backends.iter().filter(|(_, slot)| is_next(slot)).map(move |(&id, _)| (transport, id))
            });
            down.next()
        };
        let Some(mut lent) =
            next.and_then(|(transport, id)| self.try_lend(transport, id, "its cache is looked into"))
        else {
            return;
        };
        if is_next(&lent.slot) {
            let held = lent.ground.held(lent.id);
            match &held {
                Ok(held) if held.dirty_bytes + held.quarantined_bytes > 0 => tracing::warn!(
                    backend = lent.id.0,
                    "{}: not served, and its cache holds {} bytes that are dirty and {} that are quarantined",
                    lent.slot.path,
                    held.dirty_bytes,
                    held.quarantined_bytes
                ),
                _ => {}
            }
            lent.slot.held = Some(held.map_err(|error| error.line()));
        }
        self.put_back(lent);
    }
}

impl Ground {
    fn held(&self, id: BackendId) -> Result<HeldInfo> {
        let status = self.transport.open_cache(id)?.status();
        Ok(HeldInfo {
            dirty_bytes: status.dirty_bytes,
            quarantined_bytes: status.quarantined_bytes,
            parked_bytes: status.parked_bytes,
            dirty_records: status.dirty_records,
            drained_epoch: status.drained_epoch.0,
            recovery_point: status::recovery_point(&status),
        })
    }
}

/// The last logged recovery point of a backend, if its disk is newer than the region says.
fn newer_point(fixed: &Fixed, running: &Ground, entry: &BackendEntry) -> Option<(RecoveryPoint, u64, u64)> {
    let (epoch, wall_ms) = running.transport.drained(entry.id)?;
    let transport = uuid_text(running.transport.info().uuid);
    let logged = fixed.state.last_recovery_point(&transport, &uuid_text(entry.uuid))?;
    (logged.drained_epoch > epoch.0).then_some((logged, epoch.0, wall_ms))
}

/// Refuses a region that is older than its disk: to serve it would write old data over newer.
///
/// # Errors
/// [`ErrorKind::Exchanged`].
pub(super) fn refuse_older(fixed: &Fixed, running: &Ground, entry: &BackendEntry, path: &str) -> Result<()> {
    let Some((logged, epoch, wall_ms)) = newer_point(fixed, running, entry) else { return Ok(()) };
    let id = entry.id;
    Err(Error::new(
        ErrorKind::Exchanged,
        format!(
            "the region {} is older than {path}: by the region that has epoch {epoch} ({}), by the log of recovery points it had epoch \
             {} at {}; the region was put back from an old copy, or has lost stores, and would write old data over newer. Put the \
             right region there; or serve it all the same with backend-start -p {path} --older-region; or give up what it holds with \
             backend-stop -b {id} --discard-dirty BYTES",
            running.path,
            format_time(wall_ms),
            logged.drained_epoch,
            format_time(logged.drained_ms)
        ),
    ))
}

/// The user says that a region that is older than its disk is to be served: from now on the log says what the region says.
///
/// # Errors
/// When that cannot be logged.
pub(super) fn accept_older(fixed: &Fixed, running: &Ground, entry: &BackendEntry) -> Result<()> {
    let Some((logged, epoch, wall_ms)) = newer_point(fixed, running, entry) else { return Ok(()) };
    tracing::warn!(
        backend = entry.id.0,
        "{}: the user serves a region that is older than its disk (epoch {epoch}, the disk had {})",
        logged.path,
        logged.drained_epoch
    );
    let transport = uuid_text(running.transport.info().uuid);
    let point =
        RecoveryPoint { time: format_time(wall_ms), drained_epoch: epoch, drained_ms: wall_ms, ..logged };
    fixed.state.log_recovery_point(&transport, &point)
}
