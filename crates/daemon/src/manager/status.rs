//! The result of the `status` command.

use super::backend::BackendSlot;
use super::conditions::silence;
use super::scrubs::Scrubs;
use super::sharing::Sharing;
use super::transport::TransportSlot;
use super::{Fixed, Tables, figures};
use crate::api::{
    BackendStatus, CacheInfo, DamagedInfo, HostInfo, PaceInfo, RangeInfo, ScrubInfo, Status, TransportStatus,
};
use crate::size::format_time;
use cbd_engine::{Bypassed, Cache, CacheStatus, DamagedRange, PaceReason, RarePaths};
use cbd_export::BlockDevice;
use cbd_runtime::{ProcessEnvironment, wall_ms};
use cbd_types::{BackendId, BlkdevId};
use std::collections::BTreeMap;
use std::time::Instant;

/// The status of the daemon.
pub(super) fn page(fixed: &Fixed, sharing: &Sharing, scrubs: &Scrubs, tables: &Tables) -> Status {
    Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        uptime_s: fixed.started.elapsed().as_secs(),
        warnings: fixed
            .warnings
            .iter()
            .cloned()
            .chain(fixed.remote.warning())
            .chain(fixed.context.front_ends.web_problems.warnings())
            .chain(fixed.seals.warning())
            .collect(),
        front_ends: fixed.context.front_ends.status(),
        events: fixed.events.info(),
        transports: tables.iter().map(|(&id, slot)| transport(id, slot, sharing, scrubs)).collect(),
    }
}

fn transport(number: u32, slot: &TransportSlot, sharing: &Sharing, scrubs: &Scrubs) -> TransportStatus {
    let info = slot.info();
    let Ok(running) = &slot.running else {
        let (hosts, backends, remote_blkdevs) = (Vec::new(), Vec::new(), Vec::new());
        return TransportStatus { info, size: 0, hosts, backends, remote_blkdevs };
    };
    let seen = running.living.as_ref().map(|living| living.last_seen()).unwrap_or_default();
    let segment_size = info.bytes_per_segment;
    TransportStatus {
        size: running.tables_copy.info.layout.region_size,
        hosts: seen.into_iter().map(HostInfo::of).collect(),
        remote_blkdevs: running.remote_status(number),
        backends: running
            .backends
            .iter()
            .map(|(&id, backend_slot)| {
                let mut status = backend(id, backend_slot, segment_size);
                let scrub = scrubs.info((number, id.0), backend_slot.entry.size);
                status.scrub = scrub.map(|scrub| ScrubInfo { method: status.verify_method.clone(), ..scrub });
                if let Some(cache) = &mut status.cache {
                    let shared = backend_slot.entry.shared;
                    cache.shared = shared.map(|shared| sharing.info((number, id), shared, segment_size));
                }
                status
            })
            .collect(),
        info,
    }
}

fn backend(id: BackendId, slot: &BackendSlot, segment_size: u64) -> BackendStatus {
    let run = slot.run.as_ref();
    let cache = run.and_then(|run| run.cache()).map(|cache| (cache.status(), cache));
    let of_cache = cache.as_ref().map(|(status, _)| status);
    let trend = slot.trend.lock();
    let mut info = slot.info(id, segment_size);
    if let Some(run) = run {
        let of = |id: u32| figures::operations(&run.device_of(BlkdevId(id)));
        info.blkdevs.iter_mut().for_each(|blkdev| blkdev.operations = of(blkdev.blkdev_id));
    }
    let file_change = slot.file_change.as_ref().map(ToString::to_string);
    BackendStatus {
        info,
        sector: slot.entry.sector,
        handlers: slot.entry.handlers,
        backing: run.map_or_else(String::new, |run| run.backing().describe()),
        verify_method: run.map(|run| run.backing().verify_method()),
        atomic_unit: run.map(|run| run.device().geometry().atomic_unit),
        warnings: slot.warnings.iter().cloned().chain(file_change.clone()).collect(),
        file_change,
        unchecked: slot.trace.as_ref().and_then(|trace| trace.unchecked()),
        oldest_operation_ms: run
            .and_then(|run| run.oldest_operation())
            .map_or(0, |oldest| u64::try_from(oldest.age.as_millis()).unwrap_or(u64::MAX)),
        silent: run.and_then(|run| silence(run)),
        operations: run.map(|run| figures::operations(run.device())).unwrap_or_default(),
        disk: run.map(|run| figures::disk(run)).unwrap_or_default(),
        waits: run.map(|run| figures::waits(run, of_cache)).unwrap_or_default(),
        time_to_empty_s: of_cache.and_then(figures::time_to_empty_s),
        time_to_full_s: of_cache.and_then(|status| trend.time_to_full_s(&status.into(), Instant::now())),
        recovery_point_age_ms: of_cache.map(|status| status.recovery_point_age_ms),
        recovery_ms: run
            .and_then(|run| run.recovered())
            .map(|recovered| u64::try_from(recovered.elapsed.as_millis()).unwrap_or(u64::MAX)),
        region_written_bytes: of_cache.map(|status| status.stored_bytes),
        held: slot.held.as_ref().and_then(|held| held.as_ref().ok()).cloned(),
        held_error: slot.held.as_ref().and_then(|held| held.as_ref().err()).cloned(),
        scrub: None,
        cache: cache.as_ref().map(|(status, cache)| cache_info(slot, status, cache, segment_size)),
    }
}

fn cache_info(
    slot: &BackendSlot,
    status: &CacheStatus,
    cache: &Cache<ProcessEnvironment>,
    segment_size: u64,
) -> CacheInfo {
    let read = status.read_hit_bytes + status.read_missed_bytes;
    CacheInfo {
        size: u64::from(slot.entry.cache_segments) * segment_size,
        shared: None,
        free_segments: u64::from(status.free_segments),
        lanes: status.lanes,
        data_crc: slot.entry.data_crc,
        settings: slot.entry.settings.into(),
        is_changing_mode: status.is_changing_mode,
        dirty_bytes: status.dirty_bytes,
        pace: pace(status, slot.entry.settings.writeback_paused_until_ms),
        read_hit_bytes: status.read_hit_bytes,
        read_miss_bytes: status.read_missed_bytes,
        #[expect(clippy::cast_precision_loss, reason = "a ratio")]
        read_hit_ratio: (read > 0).then(|| status.read_hit_bytes as f64 / read as f64),
        bypassed_bytes: bypassed(&status.bypassed),
        bypass_refused_bytes: status.refused_bypass_bytes,
        written_bytes: status.written_bytes,
        written_back_bytes: status.written_back_bytes,
        epoch: status.epoch.0,
        drained_epoch: status.drained_epoch.0,
        drained_ms: status.drained_wall_ms,
        recovery_point: recovery_point(status),
        recovery_point_max_age_s: max_age_s(status),
        void: status.void_reason.clone(),
        backing_errors: status.backing_trouble.as_ref().map_or(0, |trouble| trouble.attempts),
        last_error: status
            .backing_trouble
            .as_ref()
            .map(|trouble| format!("{} (since {})", trouble.error, format_time(trouble.since_wall_ms))),
        writers_waiting: status.writers_waiting,
        stalled: status.is_stalled,
        parked: status.parked.iter().map(|range| RangeInfo { start: range.start, end: range.end }).collect(),
        parked_bytes: status.parked_bytes,
        parked_error: status.parked_error.clone(),
        metadata_bytes: status.metadata_bytes,
        pinned_bytes: cache.pinned_bytes(),
        pin_limit_bytes: cache.pin_limit_with(slot.entry.shared),
        index_bytes: status.index_bytes,
        quarantined_bytes: status.quarantined_bytes,
        damage_found: status.damage_found,
        damage_healed: status.damage_healed,
        rare_paths: named(&status.rare),
        quarantined: quarantined(status),
    }
}

/// The pace of writeback, which may be paused until `paused_until_ms`.
fn pace(status: &CacheStatus, paused_until_ms: u64) -> PaceInfo {
    let reason = match status.pace.reason {
        PaceReason::Paused => format!("paused until {}", format_time(paused_until_ms)),
        reason => reason.name().to_owned(),
    };
    #[expect(clippy::cast_precision_loss, reason = "points with one decimal")]
    let error_points = status.dirty_error_permille() as f64 / 10.0;
    PaceInfo {
        reason,
        bytes_per_s: status.pace.rate,
        permitted_bytes_per_s: status.pace.permitted,
        target_bytes: status.dirty_target_bytes,
        error_points,
    }
}

fn named(rare: &RarePaths) -> BTreeMap<String, u64> {
    rare.named().into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
}

fn bypassed(bypassed: &Bypassed) -> BTreeMap<String, u64> {
    bypassed.each().map(|(reason, bytes)| (reason.name().to_owned(), bytes)).collect()
}

fn quarantined(status: &CacheStatus) -> Vec<DamagedInfo> {
    let info = |damaged: &DamagedRange| DamagedInfo {
        start: damaged.range.start,
        end: damaged.range.end,
        reason: damaged.reason.clone(),
    };
    status.damaged.iter().map(info).collect()
}

/// The maximum age of the recovery point in seconds.
fn max_age_s(status: &CacheStatus) -> u32 {
    u32::try_from(status.recovery_point_max_ms / 1000).unwrap_or(u32::MAX)
}

/// By how much the age of the recovery point can be too low: the background worker sees a write only when it runs.
const AGE_LAG_MS: u64 = 1000;

/// The recovery point in milliseconds since 1970 UTC: every write that completed and was flushed before is on the backing
/// device. That is when the drained epoch was closed, at `drained_ms`, or later, if nothing was written for a time: just
/// before the oldest write that may be missing, which is `age_ms` old. 0 if it is not known.
fn complete_to_ms(drained_ms: u64, age_ms: u64, now_ms: u64) -> u64 {
    match (drained_ms, age_ms) {
        // What a former process left dirty is older than the age says.
        (0, _) => 0,
        (_, 0) => drained_ms,
        _ => drained_ms.max(now_ms.saturating_sub(age_ms.saturating_add(AGE_LAG_MS))),
    }
}

/// The state of the backing device without its cache, in words.
pub(super) fn recovery_point(status: &CacheStatus) -> String {
    if !status.backing_is_consistent {
        return "the backing device alone is NOT consistent now".to_owned();
    }
    if status.dirty_records == 0 && status.parked.is_empty() {
        let what = if status.has_unflushed { "everything that a flush has covered" } else { "everything" };
        return format!("the backing device alone holds {what}");
    }
    match complete_to_ms(status.drained_wall_ms, status.recovery_point_age_ms, wall_ms()) {
        0 if status.drained_epoch.0 == 0 => {
            "the backing device alone is as it was before it was cached".to_owned()
        }
        0 => format!(
            "the backing device alone is at a recovery point of unknown time (epoch {})",
            status.drained_epoch
        ),
        at => {
            format!(
                "the backing device alone is at the recovery point {} (epoch {})",
                format_time(at),
                status.drained_epoch
            )
        }
    }
}

/// The state of a backend in a few words; of several conditions the most severe, and what happened to its file.
pub(super) fn state(slot: &BackendSlot, status: Option<&CacheStatus>) -> String {
    if slot.stopping {
        return slot
            .moving_to
            .as_ref()
            .map_or_else(|| "stopping".to_owned(), |host| format!("moving to host {host}"));
    }
    let Some(run) = &slot.run else {
        let down = if slot.entry.is_moved { "MOVED, not served" } else { "NOT SERVED" };
        return slot.work.as_ref().map_or(down, |work| work.why).to_owned();
    };
    let is_silent = silence(run).is_some();
    let condition = match status {
        Some(status) if status.is_stalled => "STALLED: writes fail",
        Some(status) if !status.damaged.is_empty() => "serving, with damage",
        _ if is_silent => "serving, the disk does not answer",
        Some(status) if status.backing_trouble.is_some() => "serving, the disk fails",
        Some(status) if !status.parked.is_empty() => "serving, parts parked",
        Some(status) if status.writers_waiting => "serving, full",
        _ => "serving",
    };
    match &slot.file_change {
        Some(change) => format!("{condition}, {}", change.in_short()),
        None => condition.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::complete_to_ms;

    #[test]
    fn the_recovery_point_is_just_before_the_oldest_write_that_is_missing() {
        // The last epoch was closed at 10 s, then nothing was written until 3,600 s.
        assert_eq!(complete_to_ms(10_000, 5000, 3_605_000), 3_599_000);
        // What is missing was written from then on.
        assert_eq!(complete_to_ms(10_000, 5000, 15_000), 10_000);
        // Nothing is missing but what is parked; a clock that was set back; a time that is not known.
        assert_eq!(complete_to_ms(10_000, 0, 3_605_000), 10_000);
        assert_eq!(complete_to_ms(10_000, 5000, 4000), 10_000);
        assert_eq!(complete_to_ms(0, 5000, 3_605_000), 0);
    }
}
