//! One interval as a line of JSON.
//!
//! Invariants: counts are those of the interval and whole numbers; a value that is not known is null, never left out.

use super::rates::{BackendRates, Rates, Row};
use super::sample::Region;
use cbd_daemon::api::{ErrorAnswer, ErrorBody, Histogram, Outcome};
use cbd_types::Error;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// The line.
pub fn line(rates: &Rates) -> String {
    let value = json!({
        "version": rates.version,
        "pid": rates.pid,
        "uptime_s": rates.uptime_s,
        "at_ms": rates.wall_ms,
        "interval_s": rates.seconds,
        "restarted": rates.restarted,
        "notes": rates.notes,
        "warnings": rates.warnings,
        "regions": rates.regions.iter().map(region).collect::<Vec<_>>(),
        "devices": rates.rows.iter().map(|row| device(rates, row)).collect::<Vec<_>>(),
    });
    format!("{value}\n")
}

/// The line of an interval without an answer of the daemon.
pub fn failure(error: &Error, wall_ms: u64) -> String {
    let ErrorAnswer { error } = ErrorAnswer { error: ErrorBody::from(error) };
    format!("{}\n", json!({ "at_ms": wall_ms, "error": error }))
}

fn region(region: &Region) -> Value {
    json!({
        "transport_id": region.transport,
        "path": region.path,
        "alive": region.alive,
        "size": region.size,
        "free_bytes": region.free_bytes,
        "durability": region.durability,
        "error": region.error,
    })
}

fn device(rates: &Rates, row: &Row) -> Value {
    let BackendRates { now, disk, waits, written_back_bytes, region_written_bytes, troubles } = &*row.backend;
    let (device, cache) = (row.device.as_ref(), now.cache.as_ref());
    let operations = row.operations.as_ref().map(|operations| {
        each(operations, |it| {
            json!({
                "requests": it.requests,
                "bytes": it.bytes,
                "failed": it.failed,
                "requests_per_s": rates.per_second(it.requests),
                "bytes_per_s": rates.per_second(it.bytes),
                "outcomes": each(&it.outcomes, outcome),
                "latency_ns": latency(&it.latency),
            })
        })
    });
    let disk = disk.as_ref().map(|disk| {
        each(disk, |it| {
            json!({
                "operations": it.operations,
                "bytes": it.bytes,
                "failed": it.failed,
                "origins": each(&it.origins, |it| json!({ "operations": it.operations, "bytes": it.bytes })),
                "operations_per_s": rates.per_second(it.operations),
                "bytes_per_s": rates.per_second(it.bytes),
                "latency_ns": latency(&it.latency),
            })
        })
    });
    let waits = waits
        .as_ref()
        .map(|waits| each(waits, |wait| json!({ "count": wait.count, "total_ns": wait.total_ns })));
    json!({
        "transport_id": now.transport,
        "backend_id": now.id,
        "blkdev_id": device.map(|device| device.id),
        "name": device.map_or(&now.name, |device| &device.name),
        "dev_name": device.map(|device| &device.dev_name),
        "backend_path": now.path,
        "backend_host": now.other_host.as_ref().map(|host| &host.name),
        "in_flight": now.other_host.as_ref().map(|host| host.in_flight),
        "waiting_ms": now.other_host.as_ref().map(|host| host.waiting_ms),
        "method": device.map(|device| &device.method),
        "alive": device.map_or(now.alive, |device| device.alive && now.alive),
        "state": row.state(),
        "error": device.and_then(|device| device.error.as_ref()).or(now.error.as_ref()),
        "operations": operations,
        "read_hit_ratio": row.hit_ratio(),
        "disk": disk,
        "waits": waits,
        "waiting_for": troubles.iter().map(|it| json!({ "what": it.word, "text": it.text })).collect::<Vec<_>>(),
        "cache_bytes": cache.map(|cache| cache.size),
        "dirty_bytes": now.dirty_bytes,
        "target_bytes": cache.map(|cache| cache.target_bytes),
        "writeback_bytes_per_s": cache.map(|cache| cache.pace_bytes_per_s),
        "writeback_permitted_bytes_per_s": cache.and_then(|cache| cache.permitted_bytes_per_s),
        "writeback_reason": cache.map(|cache| &cache.pace_reason),
        "written_back_bytes": written_back_bytes,
        "region_written_bytes": region_written_bytes,
        "time_to_empty_s": now.time_to_empty_s,
        "time_to_full_s": now.time_to_full_s,
        "recovery_point_age_ms": now.recovery_point_age_ms,
        "recovery_ms": now.recovery_ms,
    })
}

fn each<T>(map: &BTreeMap<String, T>, value: impl Fn(&T) -> Value) -> Value {
    Value::Object(map.iter().map(|(name, it)| (name.clone(), value(it))).collect::<Map<_, _>>())
}

fn outcome(outcome: &Outcome) -> Value {
    json!({ "requests": outcome.requests, "bytes": outcome.bytes })
}

fn latency(histogram: &Histogram) -> Value {
    json!({
        "count": histogram.count,
        "mean": histogram.mean(),
        "p50": histogram.percentile(0.5),
        "p90": histogram.percentile(0.9),
        "p99": histogram.percentile(0.99),
        "p999": histogram.percentile(0.999),
    })
}
