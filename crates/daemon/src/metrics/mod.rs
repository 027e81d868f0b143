//! The status as metrics, for Prometheus and others that read its text formats.
//!
//! Invariants: a metric's name begins with `cbd_`, ends with its unit, and never changes its meaning, and neither do
//! its labels. `docs/metrics.txt` lists the names, types and labels; a test compares it with a page.
//!
//! Elsewhere: the formats ([`text`]), the listener that serves them ([`crate::web`]).

mod answer;
mod figures;
mod scrubs;
pub mod text;

pub(crate) use answer::answer;

use crate::api::{
    BackendStatus, BlkdevInfo, CacheInfo, EventsInfo, HeldInfo, HostInfo, RemoteBlkdevStatus, SharedInfo,
    Status, TransportStatus,
};
use std::time::Duration;
use text::{Format, Page, Sink};

/// All metrics in the text format of Prometheus.
#[must_use]
pub fn render(status: &Status) -> String {
    let mut text = String::new();
    render_to(status, Format::Prometheus, &mut |part| {
        text.push_str(&part);
        true
    });
    text
}

/// All metrics in `format`, in parts.
pub fn render_to(status: &Status, format: Format, sink: Sink<'_>) {
    let mut page = Page::new(format, sink);
    page.head("cbd_build_info", "gauge", "Version of the daemon.");
    page.line("cbd_build_info", &[("version", status.version.clone())], 1);
    page.head("cbd_uptime_seconds", "gauge", "Time since the daemon started.");
    page.line("cbd_uptime_seconds", &[], status.uptime_s);
    for_front_ends(&mut page, status);
    for_events(&mut page, &status.events);
    for_transports(&mut page, status);
    for_hosts(&mut page, status);
    for_backends(&mut page, status);
    figures::add(&mut page, status);
    page.end();
}

/// The number of events by name, and what became of the command for events.
fn for_events(page: &mut Page<'_>, events: &EventsInfo) {
    page.head("cbd_events_total", "counter", "Events since the daemon started, by name.");
    for (name, count) in &events.counts {
        page.line("cbd_events_total", &[("event", name.clone())], count);
    }
    let Some(command) = &events.command else { return };
    page.head(
        "cbd_event_command_total",
        "counter",
        "Events for the command that the configuration names, by result.",
    );
    for (result, count) in [
        ("succeeded", command.succeeded),
        ("failed", command.failed),
        ("timed_out", command.timed_out),
        ("dropped", command.dropped),
    ] {
        page.line("cbd_event_command_total", &[("result", result.to_owned())], count);
    }
}

fn for_front_ends(page: &mut Page<'_>, status: &Status) {
    let it = &status.front_ends;
    for (name, kind, help, value) in [
        (
            "cbd_guest_memory_bytes",
            "gauge",
            "Memory that virtual machines have shared with the daemon.",
            it.guest_memory_bytes,
        ),
        (
            "cbd_guest_memory_limit_bytes",
            "gauge",
            "Memory that virtual machines may share together.",
            it.guest_memory_limit,
        ),
        (
            "cbd_guest_memory_refused_total",
            "counter",
            "Requests to share memory that were refused by the limit.",
            it.guest_memory_refused,
        ),
        (
            "cbd_nbd_memory_bytes",
            "gauge",
            "Memory that NBD connections have taken, or that is reserved for the first ones of each device.",
            it.nbd_memory_bytes,
        ),
        (
            "cbd_nbd_memory_limit_bytes",
            "gauge",
            "Memory that NBD connections may allocate together.",
            it.nbd_memory_limit,
        ),
        ("cbd_nbd_refused_total", "counter", "NBD clients that were refused.", it.nbd_refused),
        (
            "cbd_nbd_gave_way_total",
            "counter",
            "NBD clients in the handshake that were disconnected for newer ones.",
            it.nbd_gave_way,
        ),
        ("cbd_nbd_failed_total", "counter", "NBD connections that ended with an error.", it.nbd_failed),
        (
            "cbd_vhost_refused_total",
            "counter",
            "Front ends of virtual machines that were refused.",
            it.vhost_refused,
        ),
        (
            "cbd_vhost_failed_total",
            "counter",
            "Front ends and rings of virtual machines that violated the protocol or a bound.",
            it.vhost_failed,
        ),
        ("cbd_control_connections", "gauge", "Connections to the control socket.", it.control_connections),
        (
            "cbd_control_refused_total",
            "counter",
            "Connections to the control socket that were refused.",
            it.control_refused,
        ),
        ("cbd_web_connections", "gauge", "Connections of the listener for metrics.", it.web_connections),
        (
            "cbd_web_refused_total",
            "counter",
            "Requests for metrics that were refused, and connections that were closed for newer ones.",
            it.web_refused,
        ),
    ] {
        page.head(name, kind, help);
        page.line(name, &[], value);
    }
}

fn for_transports(page: &mut Page<'_>, status: &Status) {
    type Value = fn(&TransportStatus) -> u64;
    let metrics: [(&str, &str, Value); 4] = [
        ("cbd_transport_up", "Whether the region is mapped.", |it| u64::from(it.info.alive)),
        ("cbd_transport_size_bytes", "Size of the region.", |it| it.size),
        ("cbd_transport_free_bytes", "Bytes of the region that belong to no cache.", |it| {
            it.info.free_segments.saturating_mul(it.info.bytes_per_segment)
        }),
        ("cbd_transport_power_fail_safe", "Whether the region survives a power failure.", |it| {
            u64::from(it.info.durability == "power-fail")
        }),
    ];
    for (name, help, value) in metrics {
        page.head(name, "gauge", help);
        for transport in &status.transports {
            let labels = [("transport", transport.info.transport_id.to_string())];
            page.line(name, &labels, value(transport));
        }
    }
    page.head(
        "cbd_transport_failing",
        "gauge",
        "Whether the region is not mapped, its memory has failed, or its file was deleted, moved or cut short.",
    );
    for TransportStatus { info, .. } in &status.transports {
        let labels = [("transport", info.transport_id.to_string()), ("path", info.path.clone())];
        page.line("cbd_transport_failing", &labels, u64::from(info.error.is_some()));
    }
}

/// The hosts of regions that several share. The daemon's own one is silent for 0 s.
fn for_hosts(page: &mut Page<'_>, status: &Status) {
    let each = |page: &mut Page<'_>, name: &str, value: fn(&HostInfo) -> Option<f64>| {
        for TransportStatus { info, hosts, .. } in &status.transports {
            for host in hosts {
                let labels = [
                    ("transport", info.transport_id.to_string()),
                    ("host", host.host_id.to_string()),
                    ("name", host.hostname.clone()),
                ];
                if let Some(value) = value(host) {
                    page.line(name, &labels, value);
                }
            }
        }
    };
    page.head(
        "cbd_host_up",
        "gauge",
        "Whether a host of a shared region is alive, as far as this daemon sees.",
    );
    each(page, "cbd_host_up", |host| Some(f64::from(u8::from(host.alive))));
    page.head(
        "cbd_host_silent_seconds",
        "gauge",
        "Time since the last sign of life of a host that this daemon has seen; absent if it has seen none.",
    );
    each(page, "cbd_host_silent_seconds", |host| {
        let seen = host.seen_ms.map(|ms| Duration::from_millis(ms).as_secs_f64());
        if host.this { Some(0.0) } else { seen }
    });
}

/// The metrics of a cache whose backend is not served.
fn of_held(name: &str, held: &HeldInfo) -> Option<u64> {
    match name {
        "cbd_cache_dirty_bytes" => Some(held.dirty_bytes),
        "cbd_cache_quarantined_bytes" => Some(held.quarantined_bytes),
        "cbd_cache_parked_bytes" => Some(held.parked_bytes),
        "cbd_cache_drained_epoch" => Some(held.drained_epoch),
        _ => None,
    }
}

/// Name, help and value of a gauge that each backend has.
type Gauge = (&'static str, &'static str, fn(&BackendStatus) -> u64);

const GAUGES: [Gauge; 4] = [
    ("cbd_backend_up", "Whether the backend is served.", |it| u64::from(it.info.alive)),
    (
        "cbd_backend_file_changed",
        "Whether the file of the backing device was deleted, cut short or renamed since it was opened.",
        |it| u64::from(it.file_change.is_some()),
    ),
    (
        "cbd_backend_oldest_operation_ms",
        "For how long the oldest operation of the backing device has had no answer; 0: none is older than 1 ms.",
        |it| it.oldest_operation_ms,
    ),
    ("cbd_backend_blkdevs", "Block devices on the backend.", |it| it.info.blkdevs.len() as u64),
];

/// Name, help and value of the metrics of caches that share space.
type OfSharer = (&'static str, &'static str, fn(&SharedInfo) -> Option<f64>);

#[expect(clippy::cast_precision_loss, reason = "numbers of this format are floating-point numbers")]
const OF_SHARERS: [OfSharer; 5] = [
    ("cbd_cache_min_bytes", "Bytes that a cache keeps that shares space.", |it| Some(it.min as f64)),
    ("cbd_cache_max_bytes", "Bytes up to which it grows.", |it| Some(it.max as f64)),
    ("cbd_cache_target_bytes", "Bytes that it is to have by its load.", |it| {
        it.target.map(|target| target as f64)
    }),
    ("cbd_cache_weight", "How much one of its hits counts among such caches.", |it| Some(it.weight.into())),
    (
        "cbd_cache_gain_at_max_ratio",
        "Share of its reads that would hit besides, if it had its maximum.",
        |it| it.gain_at_max,
    ),
];

type OfCache = fn(&BackendStatus, &CacheInfo) -> u64;

/// Name, kind, help and value of the metrics of caches.
const OF_CACHES: [(&str, &str, &str, OfCache); 27] = [
    ("cbd_cache_segments", "gauge", "Segments for the log.", |backend, _| backend.info.cache_segs),
    ("cbd_cache_used_segments", "gauge", "Segments for the log that are in use.", |backend, _| {
        backend.info.cache_used_segs
    }),
    ("cbd_cache_size_bytes", "gauge", "Size of the cache.", |_, cache| cache.size),
    ("cbd_cache_metadata_bytes", "gauge", "Bytes of metadata of file systems.", |_, cache| {
        cache.metadata_bytes
    }),
    ("cbd_cache_pinned_bytes", "gauge", "Bytes that are pinned.", |_, cache| cache.pinned_bytes),
    ("cbd_cache_pin_limit_bytes", "gauge", "Bytes that may be pinned.", |_, cache| cache.pin_limit_bytes),
    ("cbd_cache_dirty_bytes", "gauge", "Bytes that are not on the backing device yet.", |_, cache| {
        cache.dirty_bytes
    }),
    ("cbd_cache_dirty_target_bytes", "gauge", "Bytes that writeback lets be dirty.", |_, cache| {
        cache.pace.target_bytes
    }),
    (
        "cbd_cache_writeback_bytes_per_second",
        "gauge",
        "Bytes a second that are written to the backing device at present.",
        |_, cache| cache.pace.bytes_per_s,
    ),
    ("cbd_cache_read_hit_bytes_total", "counter", "Bytes read from the cache.", |_, cache| {
        cache.read_hit_bytes
    }),
    ("cbd_cache_read_miss_bytes_total", "counter", "Bytes read from the backing device.", |_, cache| {
        cache.read_miss_bytes
    }),
    ("cbd_cache_epoch", "gauge", "The epoch that is open.", |_, cache| cache.epoch),
    ("cbd_cache_drained_epoch", "gauge", "All epochs up to this are on the backing device.", |_, cache| {
        cache.drained_epoch
    }),
    (
        "cbd_cache_recovery_point_ms",
        "gauge",
        "All that was flushed before this time is on the backing device; ms since 1970, 0: not known.",
        |_, cache| cache.drained_ms,
    ),
    (
        "cbd_cache_recovery_point_max_age_seconds",
        "gauge",
        "The age that the recovery point has at most, as promised; 0: no promise.",
        |_, cache| cache.recovery_point_max_age_s.into(),
    ),
    ("cbd_cache_written_bytes_total", "counter", "Bytes that clients wrote.", |_, cache| cache.written_bytes),
    ("cbd_cache_written_back_bytes_total", "counter", "Bytes written to the backing device.", |_, cache| {
        cache.written_back_bytes
    }),
    ("cbd_cache_index_bytes", "gauge", "Memory of the index.", |_, cache| cache.index_bytes),
    (
        "cbd_cache_failed_attempts",
        "gauge",
        "Attempts of writeback that failed since it last worked.",
        |_, cache| cache.backing_errors,
    ),
    ("cbd_cache_parked_bytes", "gauge", "Bytes that the backing device refuses.", |_, cache| {
        cache.parked_bytes
    }),
    (
        "cbd_cache_stalled",
        "gauge",
        "Whether the backing device has refused writes for longer than the settings allow.",
        |_, cache| u64::from(cache.stalled),
    ),
    (
        "cbd_cache_void",
        "gauge",
        "Whether the backing device alone is not crash-consistent: status shows VOID and why.",
        |_, cache| u64::from(cache.void.is_some()),
    ),
    (
        "cbd_cache_quarantined_bytes",
        "gauge",
        "Bytes whose newest data is lost: reads of them fail.",
        |_, cache| cache.quarantined_bytes,
    ),
    (
        "cbd_cache_damage_found_total",
        "counter",
        "Damaged records that reads and writeback have found: a dirty one once, a clean one at each read.",
        |_, cache| cache.damage_found,
    ),
    (
        "cbd_cache_damage_healed_total",
        "counter",
        "Damaged records that were clean, and were read from the backing device instead.",
        |_, cache| cache.damage_healed,
    ),
    (
        "cbd_cache_bypass_refused_bytes_total",
        "counter",
        "Bytes that a setting would have sent past the cache, and that were cached because it was not legal.",
        |_, cache| cache.bypass_refused_bytes,
    ),
    ("cbd_cache_quarantined_ranges", "gauge", "Ranges whose data is damaged.", |_, cache| {
        cache.quarantined.len() as u64
    }),
];

/// 1 for each backend and each block device, with its name: other metrics have it by a join over the numbers.
fn for_names(page: &mut Page<'_>, status: &Status) {
    let backends = || {
        status.transports.iter().flat_map(|transport| {
            let id = transport.info.transport_id.to_string();
            transport.backends.iter().map(move |backend| (id.clone(), &backend.info))
        })
    };
    page.head(
        "cbd_backend_info",
        "gauge",
        "1, with the name and the UUID of the backend; the name is empty without one.",
    );
    for (transport, backend) in backends() {
        let labels = [
            ("transport", transport),
            ("backend", backend.backend_id.to_string()),
            ("name", backend.name.clone().unwrap_or_default()),
            ("uuid", backend.uuid.clone()),
        ];
        page.line("cbd_backend_info", &labels, 1);
    }
    page.head("cbd_blkdev_info", "gauge", "1, with the name of the block device; it is empty without one.");
    for (transport, blkdev) in blkdevs_of(status) {
        let labels = [
            ("transport", transport.to_string()),
            ("backend", blkdev.backend_id.to_string()),
            ("blkdev", blkdev.blkdev_id.to_string()),
            ("name", blkdev.name.clone().unwrap_or_default()),
        ];
        page.line("cbd_blkdev_info", &labels, 1);
    }
}

fn for_backends(page: &mut Page<'_>, status: &Status) {
    let backends = || backends_of(status);
    for (name, help, value) in GAUGES {
        page.head(name, "gauge", help);
        for (labels, backend) in backends() {
            page.line(name, &labels, value(backend));
        }
    }
    for_names(page, status);
    page.head("cbd_blkdev_up", "gauge", "Whether the block device is served.");
    for (transport, blkdev) in blkdevs_of(status) {
        let labels = [
            ("transport", transport.to_string()),
            ("backend", blkdev.backend_id.to_string()),
            ("blkdev", blkdev.blkdev_id.to_string()),
            ("device", blkdev.dev_name.clone()),
            ("method", blkdev.method.clone().unwrap_or_else(|| blkdev.export.clone())),
        ];
        page.line("cbd_blkdev_up", &labels, u64::from(blkdev.alive));
    }
    for_caches(page, status);
    scrubs::for_scrubs(page, status);
}

/// The labels of each backend, and the backend.
fn backends_of(status: &Status) -> impl Iterator<Item = ([(&'static str, String); 3], &BackendStatus)> {
    status.transports.iter().flat_map(|transport| {
        transport.backends.iter().map(|backend| {
            let labels = [
                ("transport", transport.info.transport_id.to_string()),
                ("backend", backend.info.backend_id.to_string()),
                ("path", backend.info.backend_path.clone()),
            ];
            (labels, backend)
        })
    })
}

/// The block devices on backends of other hosts, each with its labels: `host` and `name` are those of the host of the backend.
fn remotes_of(status: &Status) -> impl Iterator<Item = ([(&'static str, String); 5], &RemoteBlkdevStatus)> {
    status.transports.iter().flat_map(|transport| {
        transport.remote_blkdevs.iter().map(|remote| {
            let labels = [
                ("transport", transport.info.transport_id.to_string()),
                ("backend", remote.info.backend_id.to_string()),
                ("blkdev", remote.info.blkdev_id.to_string()),
                ("host", remote.backend_host_id.to_string()),
                ("name", remote.backend_host.clone()),
            ];
            (labels, remote)
        })
    })
}

/// All block devices of this host, each with the numbers of its transport and its backend.
fn blkdevs_of(status: &Status) -> impl Iterator<Item = (u32, &BlkdevInfo)> {
    status.transports.iter().flat_map(|transport| {
        let local = transport.backends.iter().flat_map(|backend| &backend.info.blkdevs);
        let remote = transport.remote_blkdevs.iter().map(|remote| &remote.info);
        local.chain(remote).map(|blkdev| (transport.info.transport_id, blkdev))
    })
}

/// The metrics of caches.
fn for_caches(page: &mut Page<'_>, status: &Status) {
    let backends = || backends_of(status);
    for (name, kind, help, value) in OF_CACHES {
        page.head(name, kind, help);
        for (labels, backend) in backends() {
            if let Some(cache) = &backend.cache {
                page.line(name, &labels, value(backend, cache));
            } else if let Some(value) = backend.held.as_ref().and_then(|held| of_held(name, held)) {
                page.line(name, &labels, value);
            }
        }
    }
    for (name, help, value) in OF_SHARERS {
        page.head(name, "gauge", help);
        for (labels, backend) in backends() {
            let shared = backend.cache.iter().flat_map(|cache| &cache.shared);
            shared.filter_map(value).for_each(|value| page.line(name, &labels, value));
        }
    }
    page.head("cbd_cache_bypassed_bytes_total", "counter", "Bytes that went past the cache, by reason.");
    for (labels, backend) in backends() {
        for (reason, bytes) in backend.cache.iter().flat_map(|cache| &cache.bypassed_bytes) {
            let [transport, id, place] = labels.clone();
            let labels = [transport, id, place, ("reason", reason.clone())];
            page.line("cbd_cache_bypassed_bytes_total", &labels, bytes);
        }
    }
    page.head("cbd_cache_writeback_pace", "gauge", "1, with the reason of the present pace of writeback.");
    for (labels, backend) in backends() {
        if let Some(cache) = &backend.cache {
            let [transport, id, place] = labels.clone();
            // The end of a pause would be a label of its own each time.
            let reason = match &cache.pace.reason {
                reason if reason.starts_with("paused") => "paused".to_owned(),
                reason => reason.clone(),
            };
            page.line("cbd_cache_writeback_pace", &[transport, id, place, ("reason", reason)], 1);
        }
    }
    page.head(
        "cbd_cache_rare_paths_total",
        "counter",
        "Executions of rare code paths: second copies read, torn records dropped and others.",
    );
    for (labels, backend) in backends() {
        for (path, count) in backend.cache.iter().flat_map(|cache| &cache.rare_paths) {
            let [transport, id, place] = labels.clone();
            page.line(
                "cbd_cache_rare_paths_total",
                &[transport, id, place, ("rare_path", path.clone())],
                count,
            );
        }
    }
}
