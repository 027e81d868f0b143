//! The metrics of requests, of operations of the disk, and of what requests wait for.
//!
//! Invariants: a histogram has a bounded number of buckets, the same for all: powers of two from about a microsecond
//! to about half a minute.

use super::text::Page;
use super::{backends_of, remotes_of};
use crate::api::{BackendStatus, BlkdevInfo, Histogram, RemoteBlkdevStatus, Status};
use std::time::Duration;

/// The bounds of the buckets of histograms are 2 to the power of these, in nanoseconds: 1 us to 34 s.
const BOUNDS: std::ops::RangeInclusive<u32> = 10..=35;

type Labels = Vec<(&'static str, String)>;

#[expect(clippy::cast_precision_loss, reason = "numbers of this format are floating-point numbers")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn with(labels: &Labels, label: &'static str, value: &str) -> Labels {
    let mut labels = labels.clone();
    labels.push((label, value.to_owned()));
    labels
}

fn histogram(page: &mut Page<'_>, name: &str, labels: &Labels, histogram: &Histogram) {
    let mut buckets = histogram.buckets.iter().peekable();
    let mut counted = 0;
    for bound in BOUNDS.map(|bit| 1_u64 << bit) {
        // Each bound is one of the buckets of the histogram.
        while let Some(bucket) = buckets.next_if(|bucket| bucket.upper_ns <= bound) {
            counted += bucket.count;
        }
        page.line(&format!("{name}_bucket"), &with(labels, "le", &seconds(bound).to_string()), counted);
    }
    page.line(&format!("{name}_bucket"), &with(labels, "le", "+Inf"), histogram.count);
    page.line(&format!("{name}_sum"), labels, seconds(histogram.sum_ns));
    page.line(&format!("{name}_count"), labels, histogram.count);
}

/// The metrics of block devices and disks, which follow from the figures of their queues.
pub(super) fn add(page: &mut Page<'_>, status: &Status) {
    of_blkdevs(page, status);
    of_remote_blkdevs(page, status);
    of_disks(page, status);
    of_waits(page, status);
    times(page, status);
}

/// The block devices, each with its labels.
fn blkdevs(status: &Status) -> Vec<(Labels, &BlkdevInfo)> {
    let of_backend = |([transport, id, _], backend): ([(&'static str, String); 3], _)| {
        let backend: &BackendStatus = backend;
        backend.info.blkdevs.iter().map(move |blkdev| {
            let number = ("blkdev", blkdev.blkdev_id.to_string());
            (vec![transport.clone(), id.clone(), number], blkdev)
        })
    };
    let of_remote = |([transport, backend, blkdev, ..], remote): ([(&'static str, String); 5], _)| {
        let remote: &RemoteBlkdevStatus = remote;
        (vec![transport, backend, blkdev], &remote.info)
    };
    let remote = remotes_of(status).map(of_remote);
    backends_of(status).flat_map(of_backend).chain(remote).collect()
}

fn of_blkdevs(page: &mut Page<'_>, status: &Status) {
    let blkdevs = blkdevs(status);
    let operations = || {
        blkdevs.iter().flat_map(|(labels, blkdev)| {
            blkdev.operations.iter().map(|(name, of)| (with(labels, "operation", name), of))
        })
    };
    page.head(
        "cbd_blkdev_requests_total",
        "counter",
        "Requests of clients that have succeeded, by operation and outcome: hit, miss, cached, disk, uncached, remote, or past- and the \
         reason.",
    );
    for (labels, of) in operations() {
        for (name, outcome) in &of.outcomes {
            page.line("cbd_blkdev_requests_total", &with(&labels, "outcome", name), outcome.requests);
        }
    }
    page.head(
        "cbd_blkdev_bytes_total",
        "counter",
        "Bytes of these requests, each byte with its own outcome.",
    );
    for (labels, of) in operations() {
        for (name, outcome) in &of.outcomes {
            page.line("cbd_blkdev_bytes_total", &with(&labels, "outcome", name), outcome.bytes);
        }
    }
    page.head("cbd_blkdev_failed_total", "counter", "Requests of clients that have failed.");
    for (labels, of) in operations() {
        page.line("cbd_blkdev_failed_total", &labels, of.failed);
    }
    page.head(
        "cbd_blkdev_request_seconds",
        "histogram",
        "Latency of the requests that have succeeded; of those that end at once some are timed, and count for the others.",
    );
    for (labels, of) in operations() {
        histogram(page, "cbd_blkdev_request_seconds", &labels, &of.latency);
    }
}

/// The block devices on backends of other hosts.
fn of_remote_blkdevs(page: &mut Page<'_>, status: &Status) {
    page.head(
        "cbd_remote_blkdev_in_flight",
        "gauge",
        "Requests that another host executes, or that wait for it.",
    );
    for (labels, remote) in remotes_of(status) {
        page.line("cbd_remote_blkdev_in_flight", &labels, remote.in_flight);
    }
    page.head(
        "cbd_remote_blkdev_waiting_seconds",
        "gauge",
        "For how long none of these requests has completed; 0 without any.",
    );
    for (labels, remote) in remotes_of(status) {
        let waiting = Duration::from_millis(remote.waiting_ms).as_secs_f64();
        page.line("cbd_remote_blkdev_waiting_seconds", &labels, waiting);
    }
}

fn of_disks(page: &mut Page<'_>, status: &Status) {
    let operations = || {
        backends_of(status).flat_map(|(labels, backend)| {
            let labels = labels.to_vec();
            backend.disk.iter().map(move |(name, of)| (with(&labels, "operation", name), of))
        })
    };
    page.head("cbd_disk_operations_total", "counter", "Operations of the backing device that have ended.");
    for (labels, of) in operations() {
        page.line("cbd_disk_operations_total", &labels, of.operations);
    }
    page.head("cbd_disk_bytes_total", "counter", "Bytes of those that have succeeded.");
    for (labels, of) in operations() {
        page.line("cbd_disk_bytes_total", &labels, of.bytes);
    }
    let origins = || {
        operations().flat_map(|(labels, of)| {
            of.origins.iter().map(move |(name, origin)| (with(&labels, "origin", name), origin))
        })
    };
    page.head(
        "cbd_disk_origin_operations_total",
        "counter",
        "The same operations by origin: client (misses, and what goes past the cache), readahead, writeback, verify.",
    );
    for (labels, origin) in origins() {
        page.line("cbd_disk_origin_operations_total", &labels, origin.operations);
    }
    page.head("cbd_disk_origin_bytes_total", "counter", "Bytes of those that have succeeded, by origin.");
    for (labels, origin) in origins() {
        page.line("cbd_disk_origin_bytes_total", &labels, origin.bytes);
    }
    page.head("cbd_disk_failed_total", "counter", "Operations of the backing device that have failed.");
    for (labels, of) in operations() {
        page.line("cbd_disk_failed_total", &labels, of.failed);
    }
    page.head("cbd_disk_operation_seconds", "histogram", "Latency of operations of the backing device.");
    for (labels, of) in operations() {
        histogram(page, "cbd_disk_operation_seconds", &labels, &of.latency);
    }
}

fn of_waits(page: &mut Page<'_>, status: &Status) {
    let waits = || {
        backends_of(status).flat_map(|(labels, backend)| {
            let labels = labels.to_vec();
            backend.waits.iter().map(move |(name, wait)| (with(&labels, "for", name), wait))
        })
    };
    page.head(
        "cbd_backend_waits_total",
        "counter",
        "Waits of requests that have ended: for space, for what precedes a bypass (order), for a flush, for a lock (lane).",
    );
    for (labels, wait) in waits() {
        page.line("cbd_backend_waits_total", &labels, wait.count);
    }
    page.head("cbd_backend_wait_seconds_total", "counter", "Time of these waits.");
    for (labels, wait) in waits() {
        page.line("cbd_backend_wait_seconds_total", &labels, seconds(wait.total_ns));
    }
}

type Time = fn(&BackendStatus) -> Option<f64>;

#[expect(clippy::cast_precision_loss, reason = "numbers of this format are floating-point numbers")]
const TIMES: [(&str, &str, &str, Time); 5] = [
    (
        "cbd_cache_time_to_empty_seconds",
        "gauge",
        "Time until nothing is dirty, if writeback goes on as at present; absent while it rests.",
        |it| it.time_to_empty_s.map(|seconds| seconds as f64),
    ),
    (
        "cbd_cache_time_to_full_seconds",
        "gauge",
        "Time until the cache is full of dirty data, if it goes on as in the last seconds; absent if it does not fill.",
        |it| it.time_to_full_s.map(|seconds| seconds as f64),
    ),
    (
        "cbd_cache_recovery_point_age_seconds",
        "gauge",
        "How much of the past the backing device alone lacks; absent while that is not known.",
        |it| it.recovery_point_age_ms.map(|ms| ms as f64 / 1e3),
    ),
    ("cbd_cache_recovery_seconds", "gauge", "How long recovery took when the cache was opened.", |it| {
        it.recovery_ms.map(|ms| ms as f64 / 1e3)
    }),
    (
        "cbd_cache_region_written_bytes_total",
        "counter",
        "Bytes written to the region for records and data since the cache was opened.",
        |it| it.region_written_bytes.map(|bytes| bytes as f64),
    ),
];

fn times(page: &mut Page<'_>, status: &Status) {
    for (name, kind, help, value) in TIMES {
        page.head(name, kind, help);
        for (labels, backend) in backends_of(status) {
            if let Some(value) = value(backend) {
                page.line(name, &labels, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Bucket;
    use crate::metrics::text::Format;

    #[test]
    fn the_buckets_of_a_histogram_are_bounded_and_add_up() {
        let bucket = |upper_ns, count| Bucket { upper_ns, count };
        let buckets =
            vec![bucket(8, 1), bucket(1024, 2), bucket(1152, 4), bucket(1 << 35, 8), bucket(1 << 40, 16)];
        let latency = Histogram { count: 31, sum_ns: 2_500_000_000, buckets };
        let mut text = String::new();
        let mut sink = |part: String| {
            text.push_str(&part);
            true
        };
        let mut page = Page::new(Format::Prometheus, &mut sink);
        histogram(&mut page, "cbd_x_seconds", &vec![("a", "b".to_owned())], &latency);
        page.end();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 26 + 3);
        assert_eq!(lines[0], "cbd_x_seconds_bucket{a=\"b\",le=\"0.000001024\"} 3");
        assert_eq!(lines[1], "cbd_x_seconds_bucket{a=\"b\",le=\"0.000002048\"} 7");
        assert_eq!(lines[25], "cbd_x_seconds_bucket{a=\"b\",le=\"34.359738368\"} 15");
        assert_eq!(lines[26], "cbd_x_seconds_bucket{a=\"b\",le=\"+Inf\"} 31");
        assert_eq!(lines[27..], ["cbd_x_seconds_sum{a=\"b\"} 2.5", "cbd_x_seconds_count{a=\"b\"} 31"]);
    }
}
