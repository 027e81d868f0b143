//! What status, metrics and the disk say about the requests of fio agrees with what fio counted.

mod support;

use serde_json::Value;
use std::process::Command;
use std::time::Duration;
use support::{Fixture, MIB, run_for, system_tests};

/// Bytes of the device: four times the cache.
const SIZE: u64 = 64 * MIB;

/// Runs fio through NBD; returns its report of the job.
fn fio(fixture: &Fixture, arguments: &[&str]) -> Value {
    let mut command = Command::new("fio");
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").current_dir(&fixture.folders()[0]);
    command.args(["--name=load", "--thread", "--ioengine=nbd", "--output-format=json"]);
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
