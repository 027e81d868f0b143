//! Backends that are not served: the contents of their caches, and regions that are older than their disks.
//!
//! Invariants: a cache is examined once each time its backend goes down, not at each status; the examination changes
//! nothing in the region. If the log of recovery points shows that a disk is newer than its region, the region is not
//! served unless the user accepts it.

use super::backend::BackendSlot;
use super::slots::TransportHandle;
use super::{Fixed, Manager, status};
use crate::api::HeldInfo;
use crate::size::format_time;
use crate::state::RecoveryPoint;
use cbd_engine::BackendEntry;
use cbd_types::{BackendId, Error, ErrorKind, Result, uuid_text};

impl Manager {
    /// Examines the cache of one backend that is not served and was not examined since it went down. One per call, so
    /// that commands do not wait long.
    pub(super) fn examine_one_that_is_down(&self) {
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
        let Some(mut taken) =
            next.and_then(|(transport, id)| self.try_take_slot(transport, id, "its cache is being examined"))
        else {
            return;
        };
        if is_next(&taken.slot) {
            let held = taken.handle.held(taken.id);
            match &held {
                Ok(held) if held.dirty_bytes + held.quarantined_bytes > 0 => tracing::warn!(
                    backend = taken.id.0,
                    "{}: not served, and its cache holds {} bytes that are dirty and {} that are quarantined",
                    taken.slot.path,
                    held.dirty_bytes,
                    held.quarantined_bytes
                ),
                _ => {}
            }
            taken.slot.held = Some(held.map_err(|error| error.line()));
        }
        self.put_back(taken);
    }
}

impl TransportHandle {
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

/// A backend's last logged recovery point compared with that of its region.
struct Compared {
    /// The last logged point if its epoch is later than the region's, with the epoch and recovery point (ms) of the
    /// region.
    newer: Option<(RecoveryPoint, u64, u64)>,
    /// The parts of the log that cannot be read.
    unreadable: Vec<String>,
}

fn compare(fixed: &Fixed, handle: &TransportHandle, entry: &BackendEntry) -> Compared {
    let Some((epoch, at_ms)) = handle.transport.drained(entry.id) else {
        return Compared { newer: None, unreadable: Vec::new() };
    };
    let log = fixed.state.recovery_points(&uuid_text(handle.transport.info().uuid));
    let logged = log.last_of(&uuid_text(entry.uuid)).filter(|logged| logged.drained_epoch > epoch.0).cloned();
    Compared { newer: logged.map(|logged| (logged, epoch.0, at_ms)), unreadable: log.unreadable }
}

/// A recovery point in words.
fn words(at_ms: u64) -> String {
    if at_ms == 0 { "a time that is not known".to_owned() } else { format_time(at_ms) }
}

/// Refuses a region that is older than its disk: writeback would overwrite newer data with older. Returns a warning if
/// the log of recovery points cannot be read completely.
///
/// # Errors
/// [`ErrorKind::Exchanged`].
pub(super) fn refuse_older(
    fixed: &Fixed,
    handle: &TransportHandle,
    entry: &BackendEntry,
    path: &str,
) -> Result<Option<String>> {
    let Compared { newer, unreadable } = compare(fixed, handle, entry);
    let Some((logged, epoch, at_ms)) = newer else {
        return Ok((!unreadable.is_empty()).then(|| {
            format!(
                "the log of recovery points cannot be read completely ({}): whether the region {} is older than {path} is not known",
                unreadable.join("; "),
                handle.path
            )
        }));
    };
    let id = entry.id;
    Err(Error::new(
        ErrorKind::Exchanged,
        format!(
            "the region {} is older than {path}: in the region the disk has epoch {epoch} ({}), in the log of recovery points it has \
             epoch {} ({}); the region was restored from an old copy, or has lost stores, and would overwrite newer data with older. \
             Restore the right region; or serve this one with backend-start -p {path} --older-region; or drop its data with \
             backend-stop -b {id} --discard-dirty BYTES",
            handle.path,
            words(at_ms),
            logged.drained_epoch,
            words(logged.drained_ms)
        ),
    ))
}

/// A region that the user accepts although it is older than its disk; determined before its backend is started.
pub(super) struct Accepted(RecoveryPoint);

impl Accepted {
    /// The region of this backend, if it is older than the disk.
    pub fn find(fixed: &Fixed, handle: &TransportHandle, entry: &BackendEntry) -> Option<Self> {
        let (logged, epoch, at_ms) = compare(fixed, handle, entry).newer?;
        tracing::info!(
            backend = entry.id.0,
            "the disk had epoch {}, the region has {epoch}",
            logged.drained_epoch
        );
        Some(Self(RecoveryPoint {
            time: words(at_ms),
            drained_epoch: epoch,
            drained_ms: at_ms,
            void: None,
            ..logged
        }))
    }

    /// Logs the region's recovery point as the current one, after the backend was started.
    ///
    /// # Errors
    /// When the log cannot be written: the next start refuses the region again.
    pub fn log(&self, fixed: &Fixed, handle: &TransportHandle) -> Result<()> {
        let Self(point) = self;
        tracing::warn!(
            backend = point.backend_id,
            "{}: the user serves a region that is older than its disk, with epoch {}",
            point.path,
            point.drained_epoch
        );
        fixed.state.log_recovery_point(&uuid_text(handle.transport.info().uuid), point)
    }
}
