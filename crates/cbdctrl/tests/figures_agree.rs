//! What status, metrics and the disk say about the requests of fio agrees with what fio counted.

mod support;

use cbd_daemon::api::Histogram;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use support::{Fixture, MIB, run_for, system_tests};

/// Bytes of the device: four times the cache.
const SIZE: u64 = 64 * MIB;

/// Runs fio through NBD; returns its report of the job.
fn fio(fixture: &Fixture, arguments: &[&str]) -> Value {
    let mut command = Command::new("fio");
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").current_dir(&fixture.folders()[0]);
    command.args(["--name=load", "--thread", "--ioengine=nbd", "--output-format=json+"]);
    command.arg(format!("--uri={}", fixture.uri())).arg(format!("--size={SIZE}")).args(arguments);
    let ran = run_for(command, Duration::from_secs(60));
    assert_eq!(ran.code, 0, "fio {arguments:?}: {}\n{}", ran.stdout, ran.stderr);
    // Notes of fio precede the report.
    let report = &ran.stdout[ran.stdout.find('{').expect("a report")..];
    let report: Value = serde_json::from_str(report).expect("a report");
    report["jobs"][0].clone()
}

fn number(of: &Value, path: &str) -> u64 {
    of.pointer(path).and_then(Value::as_u64).unwrap_or_default()
}

fn backend(fixture: &Fixture) -> Value {
    fixture.json(&["status", "--json"])["transports"][0]["backends"][0].clone()
}

fn operation(backend: &Value, name: &str) -> Value {
    backend["blkdevs"][0]["operations"][name].clone()
}

/// The sum of a metric over the lines that have all of `labels`.
fn metric(metrics: &str, name: &str, labels: &[&str]) -> u64 {
    let lines = metrics.lines().filter(|line| line.starts_with(&format!("{name}{{")));
    let lines = lines.filter(|line| labels.iter().all(|label| line.contains(label)));
    lines.map(|line| line.rsplit(' ').next().expect("a value").parse::<u64>().expect("a number")).sum()
}

fn metrics(fixture: &Fixture) -> String {
    let socket = fixture.socket();
    let arguments = ["-s", "--unix-socket", &socket, "http://cbd/v1/metrics"];
    support::tool("curl", &arguments)
}

#[test]
fn requests_and_bytes_are_those_that_fio_counted() {
    if !system_tests("requests_and_bytes_are_those_that_fio_counted") {
        return;
    }
    let fixture = Fixture::with_region();
    let disk = fixture.disk("disk", SIZE);
    fixture.start_backend(&disk);
    let wanted = ["--rw=randrw", "--bsrange=4k-64k", "--iodepth=8", "--io_size=48M", "--fsync=16"];
    let job = fio(&fixture, &wanted);
    let backend = backend(&fixture);
    let page = metrics(&fixture);
    for name in ["read", "write"] {
        let of = operation(&backend, name);
        let counted = (number(&job[name], "/total_ios"), number(&job[name], "/io_bytes"));
        assert!(counted.0 > 100, "{job:#}");
        assert_eq!((number(&of, "/requests"), number(&of, "/bytes")), counted, "{name}: {of:#}");
        let outcomes = of["outcomes"].as_object().expect("outcomes").values();
        let sum = |field: &str| outcomes.clone().map(|outcome| number(outcome, field)).sum::<u64>();
        assert_eq!((sum("/requests"), sum("/bytes")), counted, "each has an outcome: {of:#}");
        let label = format!("operation=\"{name}\"");
        let of_metrics = ["cbd_blkdev_requests_total", "cbd_blkdev_bytes_total"]
            .map(|name| metric(&page, name, &[&label]));
        assert_eq!(of_metrics, [counted.0, counted.1]);
        // Of the few requests that come through a socket most are timed, and count for the others.
        let timed = number(&of, "/latency/count");
        assert!(timed <= counted.0 && timed * 2 >= counted.0, "{timed} of {}", counted.0);
        assert_eq!(metric(&page, "cbd_blkdev_request_seconds_count", &[&label]), timed);
    }
    let flushes = operation(&backend, "flush");
    assert!(number(&flushes, "/requests") >= number(&job, "/sync/total_ios"), "{flushes:#}");
    assert_eq!(number(&flushes, "/failed"), 0);
    assert!(number(&backend, "/region_written_bytes") >= number(&job["write"], "/io_bytes"));
    assert!(backend["recovery_ms"].is_u64() && backend["recovery_point_age_ms"].is_u64(), "{backend:#}");
    // What writeback has written is what the disk has got.
    fixture.ok(&["drain"]);
    let backend = self::backend(&fixture);
    let written = number(&backend, "/disk/write/bytes");
    assert!(written >= number(&backend, "/cache/written_back_bytes") && written > 0, "{backend:#}");
    assert_eq!(number(&backend, "/disk/write/latency/count"), number(&backend, "/disk/write/operations"));
    assert_eq!(
        number(&backend, "/disk/write/origins/writeback/bytes"),
        written,
        "nothing went past the cache"
    );
    assert_eq!((number(&backend, "/time_to_empty_s"), number(&backend, "/recovery_point_age_ms")), (0, 0));
    // They stay when the client is gone and the device is stopped and started.
    fixture.ok(&["dev-stop", "-d", "0"]);
    fixture.ok(&["dev-start", "-b", "0", "--export", &fixture.nbd()]);
    let again = operation(&self::backend(&fixture), "write");
    assert_eq!(again["requests"], operation(&backend, "write")["requests"]);
}

#[test]
fn no_hit_ratio_is_high_while_the_disk_is_read() {
    if !system_tests("no_hit_ratio_is_high_while_the_disk_is_read") {
        return;
    }
    let fixture = Fixture::with_region();
    let disk = fixture.disk("disk", SIZE);
    fixture.start_backend(&disk);
    let mut before = (0, 0, 0);
    // Scans of four times the cache: read ahead, by large requests, and twice over.
    for scan in [&["--rw=read", "--bs=4k"][..], &["--rw=read", "--bs=1M", "--iodepth=4", "--loops=2"]] {
        fio(&fixture, scan);
        let backend = backend(&fixture);
        let reads = operation(&backend, "read");
        let bytes = number(&reads, "/bytes") - before.0;
        let hit = number(&reads, "/outcomes/hit/bytes") - before.1;
        let from_disk = number(&backend, "/disk/read/bytes") - before.2;
        before = (before.0 + bytes, before.1 + hit, before.2 + from_disk);
        assert!(bytes >= SIZE);
        assert!(
            from_disk >= bytes - hit,
            "{from_disk} read from the disk for {bytes} less {hit}: {backend:#}"
        );
        let ratio = hit as f64 / bytes as f64;
        // What is read ahead for another one of several requests is read once, and asked for once.
        let from_cache = 1.0 - from_disk as f64 / bytes as f64;
        assert!(ratio <= from_cache + 0.05, "{ratio} hits, and {from_cache} did not come from the disk");
        assert!(ratio < 0.35, "a scan of four times the cache: {reads:#}");
        let cache = &backend["cache"];
        // Each byte that was no hit was read for a request or ahead of one.
        let origins = ["client", "readahead"]
            .map(|origin| number(&backend, &format!("/disk/read/origins/{origin}/bytes")));
        assert_eq!(origins.iter().sum::<u64>(), before.2, "{:#}", backend["disk"]);
        assert!(origins[1] > 0, "{:#}", backend["disk"]);
        assert_eq!(number(cache, "/read_hit_bytes"), before.1, "{cache:#}");
        assert_eq!(number(cache, "/read_miss_bytes"), before.0 - before.1, "{cache:#}");
    }
    let page = metrics(&fixture);
    let labels = ["operation=\"read\"", "outcome=\"hit\""];
    assert_eq!(metric(&page, "cbd_blkdev_bytes_total", &labels), before.1);
    assert_eq!(metric(&page, "cbd_disk_bytes_total", &labels[..1]), before.2);
    let text = fixture.ok(&["status"]);
    assert!(text.contains("latency"), "{text}");
    // Past the cache nothing is a hit.
    fixture.ok(&["set", "-b", "0", "cache_mode=passthrough"]);
    fio(&fixture, &["--rw=read", "--bs=64k"]);
    let reads = operation(&backend(&fixture), "read");
    assert_eq!(number(&reads, "/outcomes/hit/bytes"), before.1, "{reads:#}");
    assert_eq!(number(&reads, "/outcomes/past-mode/bytes"), SIZE, "{reads:#}");
}

/// The percentile `q` of a histogram of the status, as `cbdctrl` and the page compute it.
fn percentile(histogram: &Value, q: f64) -> u64 {
    let histogram: Histogram = serde_json::from_value(histogram.clone()).expect("a histogram");
    histogram.percentile(q).expect("durations were counted")
}

/// How many durations a page of metrics counts up to a bound of `bound_ns` nanoseconds, a power of two.
fn counted_up_to(metrics: &str, name: &str, label: &str, bound_ns: u64) -> u64 {
    let bound = format!("le=\"{}\"", bound_ns as f64 / 1e9);
    metric(metrics, &format!("{name}_bucket"), &[label, &bound])
}

#[test]
fn percentiles_are_within_an_eighth_of_those_that_fio_counted() {
    if !system_tests("percentiles_are_within_an_eighth_of_those_that_fio_counted") {
        return;
    }
    let mut fixture = Fixture::new();
    // The time that a request spends in the disk dwarfs what the protocol adds: seeks of some 10 ms, and several requests
    // that wait for each other.
    fixture.decorate = Some("throttle:seek_ms=8,rpm=7200,mib_per_s=150".to_owned());
    fixture.start();
    fixture.register("64M");
    fixture.start_backend(&fixture.disk("disk", SIZE));
    // Each block once, so that the disk is read for each.
    let job =
        fio(&fixture, &["--rw=randread", "--bs=4k", "--iodepth=6", "--io_size=1600k", "--randrepeat=1"]);
    let read = &job["read"];
    let backend = backend(&fixture);
    let of = operation(&backend, "read");
    let total = number(read, "/total_ios");
    assert!(total == 400 && number(&of, "/outcomes/miss/requests") > total * 9 / 10, "{of:#}");
    assert_eq!(number(&of, "/latency/count"), total, "a request that waits for the disk is timed itself");
    for (q, name) in [(0.5, "50.000000"), (0.9, "90.000000"), (0.99, "99.000000")] {
        let of_fio = number(&read["clat_ns"]["percentile"], &format!("/{name}"));
        let found = percentile(&of["latency"], q);
        assert!(of_fio > 5_000_000, "{name}: {of_fio} ns is not the disk's time: {read:#}");
        assert!(found.abs_diff(of_fio) * 8 <= of_fio, "{name}: {found} ns, and fio counted {of_fio} ns");
    }
    // The metrics have the same durations, in buckets of powers of two.
    let page = metrics(&fixture);
    let label = "operation=\"read\"";
    let buckets = of["latency"]["buckets"].as_array().expect("buckets");
    for bit in 10..=35 {
        let bound = 1_u64 << bit;
        let shorter = buckets.iter().filter(|bucket| number(bucket, "/upper_ns") <= bound);
        let counted: u64 = shorter.map(|bucket| number(bucket, "/count")).sum();
        assert_eq!(
            counted_up_to(&page, "cbd_blkdev_request_seconds", label, bound),
            counted,
            "up to {bound} ns:\n{page}"
        );
    }
    let sum =
        page.lines().find(|line| line.starts_with("cbd_blkdev_request_seconds_sum{") && line.contains(label));
    let sum: f64 = sum.and_then(|line| line.rsplit(' ').next()?.parse().ok()).expect("a sum");
    assert!((sum * 1e9 - number(&of, "/latency/sum_ns") as f64).abs() < 1000.0, "{sum}");
}

#[test]
fn top_metrics_and_status_of_a_quiet_daemon_say_the_same() {
    if !system_tests("top_metrics_and_status_of_a_quiet_daemon_say_the_same") {
        return;
    }
    let fixture = Fixture::with_region();
    let disk = fixture.disk("disk", SIZE);
    fixture.start_backend(&disk);
    let mut top = Command::new(env!("CARGO_BIN_EXE_cbdctrl"));
    top.args(["top", "--json", "-i", "0.1"]).env("CBD_SOCKET", fixture.socket()).stdout(Stdio::piped());
    let mut top = top.spawn().expect("it starts");
    let lines = BufReader::new(top.stdout.take().expect("a pipe")).lines();
    let mut lines = lines.map(|line| serde_json::from_str::<Value>(&line.expect("a line")).expect("JSON"));
    // The first interval has begun before the first request.
    let mut intervals: Vec<Value> = lines.by_ref().take(1).collect();
    fio(&fixture, &["--rw=randrw", "--bsrange=4k-64k", "--iodepth=8", "--io_size=24M", "--fsync=16"]);
    fixture.ok(&["drain"]);
    let backend = backend(&fixture);
    let page = metrics(&fixture);
    // Until an interval that has begun after them.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_millis();
    let is_later = |interval: &Value| u128::from(number(interval, "/at_ms")) > now;
    while !intervals.iter().rev().nth(1).is_some_and(is_later) {
        assert!(intervals.len() < 300, "half a minute: {:?}", intervals.last());
        intervals.push(lines.next().expect("a line"));
    }
    let _ = top.kill();
    let _ = top.wait();
    let sum =
        |path: &str| intervals.iter().map(|interval| number(&interval["devices"][0], path)).sum::<u64>();
    for name in ["read", "write", "flush"] {
        let of = operation(&backend, name);
        let label = format!("operation=\"{name}\"");
        for (field, counter) in
            [("requests", "cbd_blkdev_requests_total"), ("bytes", "cbd_blkdev_bytes_total")]
        {
            let counted = number(&of, &format!("/{field}"));
            assert_eq!(sum(&format!("/operations/{name}/{field}")), counted, "{field} of {name} in top");
            assert_eq!(metric(&page, counter, &[&label]), counted, "{field} of {name} in the metrics");
        }
        let timed = number(&of, "/latency/count");
        assert_eq!(sum(&format!("/operations/{name}/latency_ns/count")), timed, "{name}");
        assert_eq!(metric(&page, "cbd_blkdev_request_seconds_count", &[&label]), timed, "{name}");
        let of = &backend["disk"][name];
        for (field, counter) in
            [("operations", "cbd_disk_operations_total"), ("bytes", "cbd_disk_bytes_total")]
        {
            let counted = number(of, &format!("/{field}"));
            assert_eq!(
                sum(&format!("/disk/{name}/{field}")),
                counted,
                "{field} of {name} of the disk in top"
            );
            assert_eq!(
                metric(&page, counter, &[&label]),
                counted,
                "{field} of {name} of the disk in the metrics"
            );
            let by_origin = counter.replace("disk_", "disk_origin_");
            assert_eq!(metric(&page, &by_origin, &[&label]), counted, "{field} of {name} by origin");
        }
    }
    let last = &intervals.last().expect("some")["devices"][0];
    let gauge = |name: &str| metric(&page, name, &[]);
    let written = number(&backend, "/region_written_bytes");
    assert_eq!(sum("/region_written_bytes"), written);
    assert_eq!(gauge("cbd_cache_region_written_bytes_total"), written);
    let cache = &backend["cache"];
    assert_eq!(number(last, "/dirty_bytes"), number(cache, "/dirty_bytes"));
    assert_eq!(gauge("cbd_cache_dirty_bytes"), number(cache, "/dirty_bytes"));
    assert_eq!(number(last, "/cache_bytes"), number(cache, "/size"));
    for path in ["/recovery_point_age_ms", "/recovery_ms", "/time_to_empty_s"] {
        assert_eq!(last.pointer(path), backend.pointer(path), "{path}");
    }
}
