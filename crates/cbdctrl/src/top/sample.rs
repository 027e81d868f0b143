//! A status of the daemon, as `top` uses it.
//!
//! Invariants: reading never fails. What a daemon of another version does not say, or says in another form, is absent,
//! and [`Sample::notes`] says so. No text has a character that controls a terminal.
//!
//! Elsewhere: the meaning of each value ([`cbd_daemon::api`]), rates ([`super::rates`]).

use cbd_daemon::api::{DiskFigures, DiskOrigin, Histogram, OperationFigures, Outcome, Wait, printable};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;

/// The version of this command.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The status at one moment.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// When it was received, by a clock that never goes back.
    pub at: Duration,
    /// The same in milliseconds since 1970.
    pub wall_ms: u64,
    /// Version of the daemon.
    pub version: String,
    /// Its process.
    pub pid: u64,
    /// Seconds since it started.
    pub uptime_s: u64,
    /// What this command lacks in the daemon's answer.
    pub notes: Vec<String>,
    /// Warnings of the daemon, its regions and its backends.
    pub warnings: Vec<String>,
    /// Its regions.
    pub regions: Vec<Region>,
    /// Its backends.
    pub backends: Vec<Backend>,
    /// Whether the daemon counts requests, operations of the disk and waits: what has no count did not happen then.
    pub counts: bool,
    /// The state of its record of events, if it has one.
    pub events: Option<Recorded>,
}

/// How many events a daemon has recorded.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Recorded {
    /// The run of the daemon.
    pub instance: String,
    /// Their number.
    pub count: u64,
}

/// A region.
#[derive(Clone, Debug, Default)]
pub struct Region {
    /// Number of its transport.
    pub transport: u64,
    /// Its path.
    pub path: String,
    /// Whether it is mapped.
    pub alive: bool,
    /// Its bytes.
    pub size: u64,
    /// Bytes that belong to no cache.
    pub free_bytes: u64,
    /// The failure that it survives.
    pub durability: String,
    /// Why it is not mapped.
    pub error: Option<String>,
}

/// A backend: a disk, its cache and its block devices.
#[derive(Clone, Debug, Default)]
pub struct Backend {
    /// Number of its transport.
    pub transport: u64,
    /// Its number.
    pub id: u64,
    /// What tells it from a later one with the same number.
    pub uuid: String,
    /// Its name.
    pub name: Option<String>,
    /// Path of its disk.
    pub path: String,
    /// Its state in a few words.
    pub state: String,
    /// Whether it is served.
    pub alive: bool,
    /// Why it is not served.
    pub error: Option<String>,
    /// Bytes of the device.
    pub size: u64,
    /// Age in ms of the oldest operation that the disk has not answered.
    pub oldest_operation_ms: u64,
    /// The operation that the disk has not answered for long.
    pub silent: Option<String>,
    /// Operations of the disk.
    pub disk: BTreeMap<String, DiskFigures>,
    /// Waits of requests.
    pub waits: BTreeMap<String, Wait>,
    /// Seconds until nothing is dirty.
    pub time_to_empty_s: Option<u64>,
    /// Seconds until the cache is full of dirty data.
    pub time_to_full_s: Option<u64>,
    /// Age of the recovery point in ms.
    pub recovery_point_age_ms: Option<u64>,
    /// What recovery took in ms.
    pub recovery_ms: Option<u64>,
    /// Bytes that the cache has written to the region.
    pub region_written_bytes: Option<u64>,
    /// Dirty bytes, also while it is not served; absent if not known.
    pub dirty_bytes: Option<u64>,
    /// The cache while it is served.
    pub cache: Option<Cache>,
    /// Its block devices.
    pub devices: Vec<Device>,
    /// The host that has it, if that is another one: then its disk and its cache are not known here.
    pub other_host: Option<OtherHost>,
}

/// The host that has the backend of a block device of this one.
#[derive(Clone, Debug, Default)]
pub struct OtherHost {
    /// Its name.
    pub name: String,
    /// Requests that it executes, or that wait for it.
    pub in_flight: u64,
    /// Time in ms for which none of them has completed.
    pub waiting_ms: u64,
}

/// A cache.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    /// Its bytes.
    pub size: u64,
    /// How writes go.
    pub mode: String,
    /// Bytes that are to be dirty.
    pub target_bytes: u64,
    /// Why writeback has its pace.
    pub pace_reason: String,
    /// Bytes a second that are written to the disk.
    pub pace_bytes_per_s: u64,
    /// Bytes a second that the pace permits.
    pub permitted_bytes_per_s: Option<u64>,
    /// Bytes that writeback has written to the disk.
    pub written_back_bytes: u64,
    /// Whether a write waits for space.
    pub writers_waiting: bool,
    /// Writes that find no space fail.
    pub stalled: bool,
    /// Bytes that the disk refuses.
    pub parked_bytes: u64,
    /// Bytes that are lost.
    pub quarantined_bytes: u64,
    /// Why the disk alone is not crash-consistent.
    pub void: Option<String>,
    /// The latest error of writeback while it fails.
    pub last_error: Option<String>,
    /// The state of the disk without its cache, in words.
    pub recovery_point: String,
}

/// A block device.
#[derive(Clone, Debug, Default)]
pub struct Device {
    /// Its number.
    pub id: u64,
    /// Its name.
    pub name: Option<String>,
    /// Its path or address.
    pub dev_name: String,
    /// How clients reach it.
    pub method: String,
    /// Whether it is served.
    pub alive: bool,
    /// Why it is not served, or what is wrong with it.
    pub error: Option<String>,
    /// Requests of clients; empty while they are not known.
    pub operations: BTreeMap<String, OperationFigures>,
}

impl Sample {
    /// Reads the answer to `GET /v1/status`, which came `at` this time.
    #[must_use]
    pub fn read(status: &Value, at: Duration, wall_ms: u64) -> Self {
        let mut sample = Self {
            at,
            wall_ms,
            version: text(status, "version"),
            pid: number(status, "pid"),
            uptime_s: number(status, "uptime_s"),
            warnings: texts(status, "warnings"),
            events: recorded(&status["events"]),
            ..Self::default()
        };
        for transport in list(status, "transports") {
            let id = number(transport, "transport_id");
            sample.regions.push(region(transport, id));
            let warnings = texts(transport, "warnings").into_iter();
            sample.warnings.extend(warnings.map(|warning| format!("transport {id}: {warning}")));
            for each in list(transport, "backends") {
                let read = backend(each, id);
                let warnings = texts(each, "warnings").into_iter();
                let warnings = warnings.chain(optional_text(each, "file_change"));
                let warnings = warnings.chain(optional_text(each, "unchecked"));
                let warnings: Vec<String> =
                    warnings.map(|warning| format!("backend {}: {warning}", read.id)).collect();
                sample.warnings.extend(warnings);
                sample.backends.push(read);
            }
            sample.backends.extend(list(transport, "remote_blkdevs").map(|each| remote(each, id)));
        }
        sample.counts = counts(&sample);
        sample.notes = notes(status, &sample);
        sample
    }
}

/// Whether the daemon reports counts at all: absent ones are 0 then.
fn counts(sample: &Sample) -> bool {
    let has_some = |backend: &Backend| {
        let of_device = |device: &Device| !device.operations.is_empty();
        !backend.waits.is_empty()
            || !backend.disk.is_empty()
            || backend.region_written_bytes.is_some()
            || backend.devices.iter().any(of_device)
    };
    sample.events.is_some() || sample.backends.iter().any(has_some)
}

/// What is missing because the daemon is of another version.
fn notes(status: &Value, sample: &Sample) -> Vec<String> {
    let mut notes = Vec::new();
    if !status["transports"].is_array() {
        notes.push("the daemon's answer has no transports: it is not understood".to_owned());
    }
    let version = &sample.version;
    if version != VERSION {
        let of = if version.is_empty() { "of an unknown version" } else { version };
        notes.push(format!("the daemon is {of}, this command {VERSION}: some figures may be missing"));
    }
    if !sample.counts && sample.backends.iter().any(|backend| backend.alive) {
        notes.push("the daemon does not count requests by device: their rates are missing".to_owned());
    }
    notes
}

fn recorded(value: &Value) -> Option<Recorded> {
    let count = value["recorded"].as_u64()?;
    Some(Recorded { instance: text(value, "instance"), count })
}

fn region(transport: &Value, id: u64) -> Region {
    Region {
        transport: id,
        path: text(transport, "path"),
        alive: flag(transport, "alive"),
        size: number(transport, "size"),
        free_bytes: number(transport, "free_segments").saturating_mul(number(transport, "bytes_per_segment")),
        durability: text(transport, "durability"),
        error: optional_text(transport, "error"),
    }
}

fn backend(value: &Value, transport: u64) -> Backend {
    let (cache, held) = (&value["cache"], &value["held"]);
    let dirty = [value, cache, held].into_iter().find_map(|part| part["dirty_bytes"].as_u64());
    let optional = |name: &str| value[name].as_u64();
    Backend {
        transport,
        id: number(value, "backend_id"),
        uuid: text(value, "uuid"),
        name: optional_text(value, "name"),
        path: text(value, "backend_path"),
        state: text(value, "state"),
        alive: flag(value, "alive"),
        error: optional_text(value, "error"),
        size: number(value, "size"),
        oldest_operation_ms: number(value, "oldest_operation_ms"),
        silent: optional_text(value, "silent"),
        disk: map(&value["disk"], disk_figures),
        waits: map(&value["waits"], |wait| Wait {
            count: number(wait, "count"),
            total_ns: number(wait, "total_ns"),
        }),
        time_to_empty_s: optional("time_to_empty_s"),
        time_to_full_s: optional("time_to_full_s"),
        recovery_point_age_ms: optional("recovery_point_age_ms"),
        recovery_ms: optional("recovery_ms"),
        region_written_bytes: optional("region_written_bytes"),
        dirty_bytes: dirty,
        cache: cache.is_object().then(|| self::cache(cache)),
        devices: list(value, "blkdevs").map(device).collect(),
        other_host: None,
    }
}

/// A block device on a backend of another host, as a backend of which only that is known.
fn remote(value: &Value, transport: u64) -> Backend {
    let (name, device) = (text(value, "backend_host"), device(value));
    let id = number(value, "backend_id");
    Backend {
        transport,
        id,
        path: format!("backend {id} of host {name}"),
        state: format!("on host {name}"),
        alive: device.alive,
        error: optional_text(value, "error"),
        other_host: Some(OtherHost {
            name,
            in_flight: number(value, "in_flight"),
            waiting_ms: number(value, "waiting_ms"),
        }),
        devices: vec![device],
        ..Backend::default()
    }
}

fn cache(value: &Value) -> Cache {
    let pace = &value["pace"];
    Cache {
        size: number(value, "size"),
        mode: text(value, "cache_mode"),
        target_bytes: number(pace, "target_bytes"),
        pace_reason: text(pace, "reason"),
        pace_bytes_per_s: number(pace, "bytes_per_s"),
        permitted_bytes_per_s: pace["permitted_bytes_per_s"].as_u64(),
        written_back_bytes: number(value, "written_back_bytes"),
        writers_waiting: flag(value, "writers_waiting"),
        stalled: flag(value, "stalled"),
        parked_bytes: number(value, "parked_bytes"),
        quarantined_bytes: number(value, "quarantined_bytes"),
        void: optional_text(value, "void"),
        last_error: optional_text(value, "last_error"),
        recovery_point: text(value, "recovery_point"),
    }
}

fn device(value: &Value) -> Device {
    let method = optional_text(value, "method").unwrap_or_else(|| text(value, "export"));
    Device {
        id: number(value, "blkdev_id"),
        name: optional_text(value, "name"),
        dev_name: text(value, "dev_name"),
        method,
        alive: flag(value, "alive"),
        error: optional_text(value, "error").or_else(|| optional_text(value, "note")),
        operations: map(&value["operations"], operation_figures),
    }
}

fn operation_figures(value: &Value) -> OperationFigures {
    OperationFigures {
        requests: number(value, "requests"),
        bytes: number(value, "bytes"),
        failed: number(value, "failed"),
        outcomes: map(&value["outcomes"], |outcome| Outcome {
            requests: number(outcome, "requests"),
            bytes: number(outcome, "bytes"),
        }),
        latency: histogram(value),
    }
}

fn disk_figures(value: &Value) -> DiskFigures {
    DiskFigures {
        operations: number(value, "operations"),
        bytes: number(value, "bytes"),
        failed: number(value, "failed"),
        origins: map(&value["origins"], |origin| DiskOrigin {
            operations: number(origin, "operations"),
            bytes: number(origin, "bytes"),
        }),
        latency: histogram(value),
    }
}

fn histogram(value: &Value) -> Histogram {
    parsed(&value["latency"]).unwrap_or_default()
}

fn parsed<T: DeserializeOwned>(value: &Value) -> Option<T> {
    T::deserialize(value).ok()
}

fn map<T>(value: &Value, read: fn(&Value) -> T) -> BTreeMap<String, T> {
    let entries = value.as_object().into_iter().flatten();
    entries.map(|(name, value)| (printable(name), read(value))).collect()
}

fn list<'a>(value: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    value[name].as_array().into_iter().flatten()
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(0)
}

fn flag(value: &Value, name: &str) -> bool {
    value[name].as_bool().unwrap_or(false)
}

fn text(value: &Value, name: &str) -> String {
    optional_text(value, name).unwrap_or_default()
}

fn optional_text(value: &Value, name: &str) -> Option<String> {
    value[name].as_str().map(printable)
}

fn texts(value: &Value, name: &str) -> Vec<String> {
    list(value, name).filter_map(Value::as_str).map(printable).collect()
}
