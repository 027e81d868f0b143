//! The status as text for a terminal.

use cbd_daemon::api::{
    BackendStatus, BlkdevInfo, CacheInfo, DiskFigures, OnWriteError, OperationFigures, PaceInfo,
    RemoteBlkdevStatus, ScrubInfo, SharedInfo, Status, TransportStatus,
};
use cbd_daemon::size::{format_size, format_time};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

/// The status as text.
pub fn page(status: &Status) -> String {
    let mut page =
        format!("cbdd {}, process {}, up {}\n", status.version, status.pid, duration(status.uptime_s));
    for warning in &status.warnings {
        let _ = writeln!(page, "  warning        {warning}");
    }
    if status.transports.is_empty() {
        page.push_str(
            "no transports; make one: cbdctrl tp-reg --host NAME --path REGION --size SIZE --format\n",
        );
    }
    for transport in &status.transports {
        add_transport(&mut page, transport);
    }
    page
}

fn line(page: &mut String, indent: usize, name: &str, text: impl std::fmt::Display) {
    let _ = writeln!(page, "{:indent$}{name:<width$} {text}", "", width = 18 - indent.min(8));
}

fn add_transport(page: &mut String, transport: &TransportStatus) {
    let info = &transport.info;
    let _ = writeln!(
        page,
        "\ntransport {}: {} (host {} \"{}\")",
        info.transport_id, info.path, info.host_id, info.host
    );
    if let Some(error) = &info.error {
        line(page, 2, "ERROR", error);
        add_next_attempt(page, 2, info.retry_in_s);
    }
    if info.alive {
        line(
            page,
            2,
            "region",
            format!(
                "{}, {} segments of {}, {} free",
                format_size(transport.size),
                info.segment_num,
                format_size(info.bytes_per_segment),
                info.free_segments
            ),
        );
        let meaning = if info.durability == "power-fail" {
            "acknowledged writes survive a power failure"
        } else {
            "acknowledged writes survive a crash of the daemon, NOT of the machine"
        };
        line(page, 2, "durability", format!("{}: {meaning}", info.durability));
        line(page, 2, "memory", &info.copy);
    }
    for warning in &info.warnings {
        line(page, 2, "warning", warning);
    }
    for backend in &transport.backends {
        add_backend(page, backend);
    }
    for remote in &transport.remote_blkdevs {
        add_remote_blkdev(page, remote);
    }
}

fn add_next_attempt(page: &mut String, indent: usize, retry_in_s: Option<u64>) {
    if let Some(seconds) = retry_in_s {
        line(
            page,
            indent,
            "next attempt",
            format!("in {seconds} s, or when another file appears at the path"),
        );
    }
}

fn add_backend(page: &mut String, backend: &BackendStatus) {
    let info = &backend.info;
    let name = info.name.as_ref().map_or_else(String::new, |name| format!(" ({name})"));
    let _ = writeln!(page, "\n  backend {}{name}: {}", info.backend_id, info.backend_path);
    if let Some(from) = &info.moved_from {
        line(page, 4, "MOVED", format!("by a rescue, from {from}, which lacks data now"));
    }
    if let Some(error) = &info.error {
        line(page, 4, "ERROR", error);
    }
    add_next_attempt(page, 4, info.retry_in_s);
    line(
        page,
        4,
        "device",
        format!(
            "{}, sectors of {} B, {} queues{}",
            format_size(info.size),
            backend.sector,
            backend.handlers,
            backend
                .atomic_unit
                .map_or_else(String::new, |unit| format!(", atomic unit {}", format_size(u64::from(unit))))
        ),
    );
    if !backend.backing.is_empty() {
        line(page, 4, "backing", &backend.backing);
    }
    if let Some(why) = &backend.unchecked {
        line(page, 4, "UNCHECKED", why);
    }
    if let Some(silent) = &backend.silent {
        line(page, 4, "SILENT", silent);
    }
    for warning in &backend.warnings {
        line(page, 4, "warning", warning);
    }
    for blkdev in &info.blkdevs {
        line(page, 4, &format!("blkdev {}", blkdev.blkdev_id), blkdev_words(blkdev));
    }
    add_latency(page, &backend.operations, &backend.disk);
    if let Some(scrub) = &backend.scrub {
        line(page, 4, "scrub", scrub_words(scrub));
    }
    match &backend.cache {
        Some(cache) => add_cache(page, backend, cache),
        None if info.cache_segs == 0 => line(page, 4, "cache", "none"),
        None => add_held(page, backend),
    }
}

/// Where a block device is, how it is reached, and what is wrong with it.
fn blkdev_words(blkdev: &BlkdevInfo) -> String {
    let state = if blkdev.alive { "" } else { ", NOT SERVED" };
    let reason = blkdev.error.as_ref().or(blkdev.note.as_ref());
    format!(
        "{}{} ({}{state}){}",
        blkdev.dev_name,
        blkdev.name.as_ref().map_or_else(String::new, |name| format!(", {name}")),
        blkdev.method.as_ref().unwrap_or(&blkdev.export),
        reason.map_or_else(String::new, |reason| format!(": {reason}"))
    )
}

/// Adds a block device on a backend of another host.
fn add_remote_blkdev(page: &mut String, remote: &RemoteBlkdevStatus) {
    let RemoteBlkdevStatus { info, backend_host, in_flight, waiting_ms, woken, atomic_unit, .. } = remote;
    let _ =
        writeln!(page, "\n  blkdev {} on backend {} of host {backend_host}", info.blkdev_id, info.backend_id);
    line(page, 4, "device", blkdev_words(info));
    if let Some(unit) = atomic_unit {
        line(page, 4, "atomic unit", format_size(u64::from(*unit)));
    }
    let waiting = Duration::from_millis(*waiting_ms).as_secs_f64();
    let waiting = (*in_flight > 0).then(|| format!(", none has completed for {waiting:.1} s"));
    let failed: u64 = info.operations.values().map(|of| of.failed).sum();
    let requests = format!("{in_flight} in flight{}; {failed} have failed", waiting.unwrap_or_default());
    line(page, 4, "requests", requests);
    let channel =
        if *woken { "both hosts wake each other" } else { "both hosts look from time to time for requests" };
    line(page, 4, "channel", channel);
    add_latency(page, &info.operations, &BTreeMap::new());
}

/// Adds the latency of requests and of the disk, if there were any.
fn add_latency(
    page: &mut String,
    requests: &BTreeMap<String, OperationFigures>,
    disk: &BTreeMap<String, DiskFigures>,
) {
    let requests = requests.iter().map(|(name, of)| (name, "s", &of.latency));
    let disk = disk.iter().map(|(name, of)| (name, "s of the disk", &of.latency));
    let shown: Vec<String> = requests
        .chain(disk)
        .filter(|(name, ..)| matches!(name.as_str(), "read" | "write"))
        .filter_map(|(name, whose, latency)| {
            let (half, most) = (latency.percentile(0.5)?, latency.percentile(0.99)?);
            Some(format!("{name}{whose} {} ({})", short(half), short(most)))
        })
        .collect();
    if !shown.is_empty() {
        line(page, 4, "latency", format!("median (99 %): {}", shown.join(", ")));
    }
}

/// A latency in the unit that fits it.
fn short(ns: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "shown with three digits at most")]
    let of = |unit: u64| ns as f64 / unit as f64;
    match ns {
        0..1000 => format!("{ns} ns"),
        1000..10_000 => format!("{:.1} us", of(1000)),
        10_000..1_000_000 => format!("{:.0} us", of(1000)),
        1_000_000..10_000_000 => format!("{:.1} ms", of(1_000_000)),
        10_000_000..1_000_000_000 => format!("{:.0} ms", of(1_000_000)),
        _ => format!("{:.1} s", of(1_000_000_000)),
    }
}

/// When nothing is dirty, and when everything is, if that is foreseeable.
fn prospects(backend: &BackendStatus) -> String {
    let empty = backend.time_to_empty_s.filter(|seconds| *seconds > 0);
    let full = backend.time_to_full_s.filter(|seconds| *seconds < 3600);
    let mut text = String::new();
    if let Some(seconds) = empty {
        let _ = write!(text, "; nothing is dirty in {}", duration(seconds));
    }
    if let Some(seconds) = full {
        let _ = write!(text, "; all of it is dirty in {}", duration(seconds));
    }
    text
}

/// The state of a scrub, and what the last pass has found; `scrub --status` lists it.
fn scrub_words(scrub: &ScrubInfo) -> String {
    let mut text = scrub.state.words().to_owned();
    if scrub.began.is_some() {
        let _ = write!(text, ", at {} %", scrub.percent);
    }
    if let Some(last) = &scrub.last {
        let (at, results) = (format_time(last.ended * 1000), &last.results);
        let _ = write!(text, "; {} found, {} repaired by {at}", results.found, results.repaired);
        if let Some(metadata) = results.metadata.as_ref().filter(|it| it.repaired + it.unrepaired > 0) {
            let (repaired, unrepaired) = (metadata.repaired, metadata.unrepaired);
            let _ = write!(text, "; of the metadata {repaired} copies repaired, {unrepaired} damaged");
        }
    }
    if let Some(error) = &scrub.error {
        let _ = write!(text, "; ERROR: {error}");
    }
    text
}

/// Adds the contents of the cache of a backend that is not served.
fn add_held(page: &mut String, backend: &BackendStatus) {
    let Some(held) = &backend.held else {
        return match &backend.held_error {
            Some(why) => line(page, 4, "dirty", format!("not known: {why}")),
            None => line(page, 4, "dirty", "not known yet: the daemon is reading its cache"),
        };
    };
    line(page, 4, "dirty", format!("{} ({} bytes)", format_size(held.dirty_bytes), held.dirty_bytes));
    if held.quarantined_bytes > 0 {
        line(page, 4, "QUARANTINED", format!("{} bytes are lost", held.quarantined_bytes));
    }
    line(page, 4, "recovery point", &held.recovery_point);
}

/// Why bytes went past the cache, if any did.
fn add_bypassed(page: &mut String, cache: &CacheInfo) {
    let mut bypassed: Vec<String> = cache
        .bypassed_bytes
        .iter()
        .filter(|(_, bytes)| **bytes > 0)
        .map(|(reason, bytes)| format!("{} {}", reason.replace('_', " "), format_size(*bytes)))
        .collect();
    if cache.bypass_refused_bytes > 0 {
        bypassed.push(format!("not legal, so cached: {}", format_size(cache.bypass_refused_bytes)));
    }
    if !bypassed.is_empty() {
        line(page, 4, "bypassed", bypassed.join(", "));
    }
}

fn add_cache(page: &mut String, backend: &BackendStatus, cache: &CacheInfo) {
    let settings = &cache.settings;
    line(
        page,
        4,
        "cache",
        format!(
            "{}, {} of {} segments used, reclaim from {} %, {} lanes, data_crc {}",
            format_size(cache.size),
            backend.info.cache_used_segs,
            backend.info.cache_segs,
            settings.gc_percent,
            cache.lanes,
            if cache.data_crc { "on" } else { "off" }
        ),
    );
    let ratio = cache.read_hit_ratio.map_or_else(
        || "no reads yet".to_owned(),
        |ratio| {
            format!(
                "{:.1} % of the bytes read ({} of {})",
                ratio * 100.0,
                format_size(cache.read_hit_bytes),
                format_size(cache.read_hit_bytes + cache.read_miss_bytes)
            )
        },
    );
    line(page, 4, "hit ratio", ratio);
    cache.shared.iter().for_each(|shared| line(page, 4, "share", share(shared)));
    add_bypassed(page, cache);
    line(page, 4, "dirty", format!("{} ({} bytes)", format_size(cache.dirty_bytes), cache.dirty_bytes));
    let rate = match settings.writeback_rate {
        0 => format!("automatic towards {} % dirty", settings.writeback_percent),
        rate => format!("{}/s", format_size(rate)),
    };
    let on_error = match settings.on_write_error {
        OnWriteError::Stop => "stops",
        OnWriteError::Park => "parks what is refused",
    };
    let after = settings.write_error_after_s;
    let order = settings.consistency.name();
    let changing =
        if cache.is_changing_mode { ", not in force until the backing device has what is dirty" } else { "" };
    line(page, 4, "mode", format!("{}{changing}", settings.cache_mode.name()));
    line(page, 4, "writeback", format!("{order}, {rate}, {on_error} after {after} s of errors"));
    line(page, 4, "pace", pace(&cache.pace) + &prospects(backend));
    add_recovery_point(page, backend, cache);
    add_metadata(page, cache);
    add_pinned(page, backend, cache);
    if cache.writers_waiting {
        let limit = if settings.writeback_rate == 0 { "" } else { ", or writeback_rate," };
        line(page, 4, "FULL", format!("writes wait for space: the backing device{limit} is the limit now"));
    }
    if cache.stalled {
        line(
            page,
            4,
            "STALLED",
            "the backing device refuses writes for long: writes that find no space fail",
        );
    }
    if let Some(void) = &cache.void {
        line(page, 4, "VOID", void);
    }
    add_errors(page, cache);
    for range in cache.parked.iter().take(20) {
        let refused = cache.parked_error.as_deref().unwrap_or("not tried since the start");
        let text =
            format!("bytes {}..{}: the backing device refuses them ({refused})", range.start, range.end);
        line(page, 4, "PARKED", text);
    }
    if cache.parked.len() > 20 {
        line(page, 4, "", format!("and {} more (--json shows all)", cache.parked.len() - 20));
    }
    add_damage(page, cache);
}

/// The recovery point, its age, and whether it is younger than promised.
fn add_recovery_point(page: &mut String, backend: &BackendStatus, cache: &CacheInfo) {
    let (age_ms, max_s) = (backend.recovery_point_age_ms.unwrap_or(0), cache.recovery_point_max_age_s);
    let age = match age_ms / 1000 {
        0 => String::new(),
        seconds => format!("; the disk lacks the last {} at most", duration(seconds)),
    };
    line(page, 4, "recovery point", format!("{}{age}", cache.recovery_point));
    if max_s == 0 {
        return;
    }
    let seconds = Duration::from_millis(age_ms).as_secs_f64();
    if age_ms > u64::from(max_s) * 1000 {
        let text = format!("the recovery point is {seconds:.1} s old, and {max_s} s are promised");
        line(page, 4, "LATE", text);
    } else {
        line(page, 4, "", format!("{seconds:.1} s old, at most {max_s} s as promised"));
    }
}

/// How much metadata there is, if there is any or it has bounds.
fn add_metadata(page: &mut String, cache: &CacheInfo) {
    let settings = &cache.settings;
    let (min, max) = (settings.metadata_min_percent, settings.metadata_max_percent);
    let has_bounds = min > 0 || (1..100).contains(&max);
    if cache.metadata_bytes == 0 && !has_bounds {
        return;
    }
    let bounds =
        if has_bounds { format!("; {min} % of the cache stay, {max} % at most") } else { String::new() };
    line(page, 4, "metadata", format!("{}{bounds}", format_size(cache.metadata_bytes)));
}

/// How much is pinned, if anything is.
fn add_pinned(page: &mut String, backend: &BackendStatus, cache: &CacheInfo) {
    if cache.pinned_bytes > 0 {
        let (pinned, limit) = (format_size(cache.pinned_bytes), format_size(cache.pin_limit_bytes));
        let list = format!("pin -b {} --list shows what", backend.info.backend_id);
        line(page, 4, "pinned", format!("{pinned} of at most {limit}; {list}"));
    }
}

/// The bounds of a cache that shares space, and what more space would bring.
fn share(shared: &SharedInfo) -> String {
    let bounds =
        format!("{} to {}, weight {}", format_size(shared.min), format_size(shared.max), shared.weight);
    let target =
        shared.target.map_or_else(String::new, |target| format!(", on the way to {}", format_size(target)));
    let gain = shared.gain_at_max.map_or_else(
        || ", no reads lately".to_owned(),
        |gain| format!(", with its maximum {:.1} % more of its reads would hit", gain * 100.0),
    );
    format!("{bounds}{target}{gain}")
}

fn pace(pace: &PaceInfo) -> String {
    let rate = format_size(pace.bytes_per_s);
    let permitted = pace
        .permitted_bytes_per_s
        .map_or_else(String::new, |permitted| format!(" of {}/s that are permitted", format_size(permitted)));
    let side = if pace.error_points < 0.0 { "below" } else { "above" };
    let (points, target) = (pace.error_points.abs(), format_size(pace.target_bytes));
    format!("{}: {rate}/s{permitted}, {points:.1} points {side} the target of {target} dirty", pace.reason)
}

/// Adds the errors of writeback.
fn add_errors(page: &mut String, cache: &CacheInfo) {
    if cache.backing_errors > 0 {
        line(page, 4, "ERRORS", format!("{} failed attempts of writeback", cache.backing_errors));
    }
    if let Some(error) = &cache.last_error {
        line(page, 4, "last error", error);
    }
}

fn add_damage(page: &mut String, cache: &CacheInfo) {
    if cache.damage_found > 0 {
        let lost = if cache.quarantined.is_empty() {
            "nothing is lost now"
        } else {
            "QUARANTINED lists what is lost"
        };
        let text = format!(
            "{} records found since the start, {} of them clean and read from the backing device instead; {lost}",
            cache.damage_found, cache.damage_healed
        );
        line(page, 4, "DAMAGE", text);
    }
    if cache.quarantined_bytes > 0 {
        line(
            page,
            4,
            "QUARANTINED",
            format!("{} bytes are lost, unless they are overwritten", cache.quarantined_bytes),
        );
    }
    for range in cache.quarantined.iter().take(20) {
        line(
            page,
            4,
            "QUARANTINED",
            format!("bytes {}..{} ({}): reads answer with an error", range.start, range.end, range.reason),
        );
    }
    if cache.quarantined.len() > 20 {
        line(page, 4, "", format!("and {} more (--json shows all)", cache.quarantined.len() - 20));
    }
}

fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds / 3600 % 24),
    }
}

#[cfg(test)]
mod tests;
