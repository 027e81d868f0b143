//! What happened between two samples: counts and rates by device, disk and cache.
//!
//! Invariants: a count of an interval is the difference of two counters that the same daemon reported for the same
//! object. Where there is no such pair (the first sample, an object that has come, a daemon or a backend that has begun
//! again) it is absent: no rate is negative, and none counts what was before.
//!
//! Elsewhere: the samples ([`super::sample`]), percentiles and differences ([`cbd_daemon::api`]).

use super::sample::{Backend, Device, Region, Sample};
use cbd_daemon::api::{DiskFigures, Histogram, OperationFigures, Wait, have_fallen, since};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Names a row: a block device, or a backend without one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Key {
    /// Number of the transport.
    pub transport: u64,
    /// Number of the backend.
    pub backend: u64,
    /// Number of the block device.
    pub device: Option<u64>,
}

/// The state at a sample, and what happened since the one before.
#[derive(Clone, Debug, Default)]
pub struct Rates {
    /// When the sample was received, in milliseconds since 1970.
    pub wall_ms: u64,
    /// Seconds between the samples; absent without an earlier one, and if no time has passed.
    pub seconds: Option<f64>,
    /// The daemon was started between the samples.
    pub restarted: bool,
    /// Version of the daemon.
    pub version: String,
    /// Its process.
    pub pid: u64,
    /// Seconds since it started.
    pub uptime_s: u64,
    /// What this command lacks in the daemon's answer.
    pub notes: Vec<String>,
    /// Warnings.
    pub warnings: Vec<String>,
    /// Regions.
    pub regions: Vec<Region>,
    /// Block devices, and backends without one, in order.
    pub rows: Vec<Row>,
}

/// A block device, or a backend without one.
#[derive(Clone, Debug)]
pub struct Row {
    /// Its name in this command.
    pub key: Key,
    /// The block device.
    pub device: Option<Device>,
    /// Requests of clients in the interval, by operation.
    pub operations: Option<BTreeMap<String, OperationFigures>>,
    /// Its backend.
    pub backend: Arc<BackendRates>,
}

/// A backend, and what happened to it.
#[derive(Clone, Debug, Default)]
pub struct BackendRates {
    /// Its state.
    pub now: Backend,
    /// Operations of the disk in the interval.
    pub disk: Option<BTreeMap<String, DiskFigures>>,
    /// Waits that ended in the interval.
    pub waits: Option<BTreeMap<String, Wait>>,
    /// Bytes that writeback has written.
    pub written_back_bytes: Option<u64>,
    /// Bytes written to the region.
    pub region_written_bytes: Option<u64>,
    /// What requests or the disk wait for, the worst first.
    pub troubles: Vec<Trouble>,
}

/// What requests or the disk wait for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Trouble {
    /// A stable word.
    pub word: &'static str,
    /// A few words for people.
    pub text: String,
}

impl Trouble {
    /// The words of waits that come with load.
    const OF_LOAD: [&'static str; 5] = ["space", "order", "flush", "lane", "other"];

    /// Whether it is a wait that comes with load, and needs no attention by itself.
    #[must_use]
    pub fn is_of_load(&self) -> bool {
        Self::OF_LOAD.contains(&self.word)
    }
}

impl Rates {
    /// The state at `later`, and what happened since `earlier`.
    #[must_use]
    pub fn between(earlier: Option<&Sample>, later: &Sample) -> Self {
        let restarted = earlier.is_some_and(|earlier| is_another_daemon(earlier, later));
        let passed = earlier.and_then(|earlier| later.at.checked_sub(earlier.at)).unwrap_or_default();
        let comparable =
            earlier.filter(|earlier| !restarted && !passed.is_zero() && earlier.counts && later.counts);
        let mut rows: Vec<Row> = Vec::new();
        for backend in &later.backends {
            let before = comparable.and_then(|earlier| same_backend(earlier, backend));
            rows.extend(rows_of(before, backend));
        }
        rows.sort_by_key(|row| row.key);
        Self {
            wall_ms: later.wall_ms,
            seconds: (!passed.is_zero()).then_some(passed.as_secs_f64()),
            restarted,
            version: later.version.clone(),
            pid: later.pid,
            uptime_s: later.uptime_s,
            notes: later.notes.clone(),
            warnings: later.warnings.clone(),
            regions: later.regions.clone(),
            rows,
        }
    }

    /// A count of the interval as a rate.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    pub fn per_second(&self, count: u64) -> Option<f64> {
        self.seconds.map(|seconds| count as f64 / seconds)
    }
}

impl Row {
    /// Requests with this operation in the interval; none if no rate is known.
    #[must_use]
    pub fn operation(&self, name: &str) -> Option<OperationFigures> {
        self.operations.as_ref().map(|operations| operations.get(name).cloned().unwrap_or_default())
    }

    /// The share of the bytes read that came from the cache, 0 to 1. That of another host does not say what did.
    #[must_use]
    pub fn hit_ratio(&self) -> Option<f64> {
        let reads = self.operation("read").filter(|_| self.backend.now.other_host.is_none())?;
        reads.share_of("hit")
    }

    /// Its name and path for people.
    #[must_use]
    pub fn title(&self) -> String {
        let named = |path: &str, name: Option<&String>| {
            name.map_or_else(|| path.to_owned(), |name| format!("{path} {name}"))
        };
        match &self.device {
            Some(device) => named(&device.dev_name, device.name.as_ref()),
            None => named(&self.backend.now.path, self.backend.now.name.as_ref()),
        }
    }

    /// A short name: that of the device or the backend, else the end of the path.
    #[must_use]
    pub fn short_name(&self) -> String {
        let backend = &self.backend.now;
        let (name, path) = match &self.device {
            Some(device) => (device.name.as_ref(), &device.dev_name),
            None => (backend.name.as_ref(), &backend.path),
        };
        let is_kernel_device = path.starts_with('/');
        let end = || match &self.device {
            Some(device) if !is_kernel_device => format!("cbd{}", device.id),
            _ => path.rsplit('/').find(|part| !part.is_empty()).unwrap_or(path).to_owned(),
        };
        name.cloned().unwrap_or_else(end)
    }

    /// The state in a few words.
    #[must_use]
    pub fn state(&self) -> String {
        match &self.device {
            Some(device) if !device.alive && self.backend.now.alive => "NOT SERVED".to_owned(),
            _ => self.backend.now.state.clone(),
        }
    }
}

/// Whether the samples are of different runs of the daemon.
fn is_another_daemon(earlier: &Sample, later: &Sample) -> bool {
    earlier.pid != later.pid || later.uptime_s < earlier.uptime_s
}

fn same_backend<'a>(earlier: &'a Sample, backend: &Backend) -> Option<&'a Backend> {
    let is_same = |other: &&Backend| {
        (other.transport, other.id, &other.uuid) == (backend.transport, backend.id, &backend.uuid)
    };
    earlier.backends.iter().find(is_same).filter(|earlier| !has_begun_again(earlier, backend))
}

/// Whether the counters of a backend began at 0 between two samples.
fn has_begun_again(earlier: &Backend, later: &Backend) -> bool {
    let disk = have_fallen(&earlier.disk, &later.disk);
    let waits = have_fallen(&earlier.waits, &later.waits);
    let written = |backend: &Backend| backend.cache.as_ref().map_or(0, |cache| cache.written_back_bytes);
    disk || waits
        || written(later) < written(earlier)
        || later.region_written_bytes.unwrap_or(0) < earlier.region_written_bytes.unwrap_or(0)
}

fn rows_of(before: Option<&Backend>, backend: &Backend) -> Vec<Row> {
    let disk = before.map(|before| since(&before.disk, &backend.disk));
    let waits = before.map(|before| since(&before.waits, &backend.waits));
    let written_back_bytes = before.and_then(|before| {
        let (now, then) = (backend.cache.as_ref()?, before.cache.as_ref()?);
        now.written_back_bytes.checked_sub(then.written_back_bytes)
    });
    let region_written_bytes =
        before.and_then(|before| backend.region_written_bytes?.checked_sub(before.region_written_bytes?));
    let troubles = troubles(backend, waits.as_ref());
    let now = backend.clone();
    let rates = BackendRates { now, disk, waits, written_back_bytes, region_written_bytes, troubles };
    let rates = Arc::new(rates);
    let key = |device| Key { transport: backend.transport, backend: backend.id, device };
    if backend.devices.is_empty() {
        return vec![Row { key: key(None), device: None, operations: None, backend: rates }];
    }
    let rows = backend.devices.iter().map(|device| Row {
        key: key(Some(device.id)),
        operations: before.and_then(|before| operations_of(before, device)),
        device: Some(device.clone()),
        backend: rates.clone(),
    });
    rows.collect()
}

/// The requests of a device since the earlier sample.
fn operations_of(before: &Backend, device: &Device) -> Option<BTreeMap<String, OperationFigures>> {
    let before = before.devices.iter().find(|other| other.id == device.id)?;
    let (then, now) = (&before.operations, &device.operations);
    let fell = have_fallen(then, now);
    (before.alive && device.alive && !fell).then(|| since(then, now))
}

/// What requests or the disk wait for now, and what they waited for in the interval.
fn troubles(backend: &Backend, waits: Option<&BTreeMap<String, Wait>>) -> Vec<Trouble> {
    /// From this age on in ms an operation of the disk is shown, though it does not count as silent yet.
    const SLOW_MS: u64 = 1000;
    use super::text::{bytes, milliseconds, nanoseconds};
    let mut troubles = Vec::new();
    let mut add = |word, text: String| troubles.push(Trouble { word, text });
    if !backend.alive {
        add("not_served", backend.error.clone().unwrap_or_else(|| "not served".to_owned()));
    }
    if let Some(cache) = &backend.cache {
        if cache.quarantined_bytes > 0 {
            add("quarantined", format!("QUARANTINED {}", bytes(cache.quarantined_bytes)));
        }
        if cache.stalled {
            add("stalled", "STALLED: writes fail".to_owned());
        }
        if cache.parked_bytes > 0 {
            add("parked", format!("PARKED {}", bytes(cache.parked_bytes)));
        }
    }
    if let Some(host) = backend.other_host.as_ref().filter(|host| host.waiting_ms >= SLOW_MS) {
        let waiting = milliseconds(host.waiting_ms);
        add("host_silent", format!("{} requests wait for host {} for {waiting}", host.in_flight, host.name));
    }
    let age = milliseconds(backend.oldest_operation_ms);
    if backend.silent.is_some() {
        add("disk_silent", format!("disk silent for {age}"));
    } else if backend.oldest_operation_ms >= SLOW_MS {
        add("disk_slow", format!("disk busy for {age}"));
    }
    if let Some(cache) = &backend.cache {
        if let Some(error) = &cache.last_error {
            add("disk_fails", format!("disk fails: {error}"));
        }
        if cache.void.is_some() {
            add("void", "VOID".to_owned());
        }
        if cache.writers_waiting {
            add("full", "writes wait".to_owned());
        }
    }
    let mut waited: Vec<_> = waits.into_iter().flatten().filter(|(_, wait)| wait.count > 0).collect();
    // Those that took longest first.
    waited.sort_by_key(|(_, wait)| std::cmp::Reverse(wait.total_ns));
    for (name, wait) in waited {
        let word = Trouble::OF_LOAD.into_iter().find(|word| word == name).unwrap_or("other");
        add(word, format!("{name} {} x {}", wait.count, nanoseconds(wait.total_ns / wait.count)));
    }
    troubles
}

/// The counts of a histogram by power of two of nanoseconds: the lower bound of each that has some, and its count.
#[must_use]
pub fn octaves(histogram: &Histogram) -> BTreeMap<u32, u64> {
    let mut counts = BTreeMap::new();
    for bucket in &histogram.buckets {
        let octave = bucket.upper_ns.saturating_sub(1).max(1).ilog2();
        *counts.entry(octave).or_default() += bucket.count;
    }
    counts
}
