//! Tests the benchmarks themselves, in their quick form: every group completes, and its figures are at the
//! paths of the budgets. The values of the figures are not checked.
#![allow(missing_docs)]

use serde_json::Value;
use std::process::Command;

fn measure(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_cbd-bench"))
        .args(["--quick", "--json", "--rounds", "4"])
        .args(arguments)
        .output()
        .expect("the benchmarks start");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).expect("one JSON object on standard output")
}

/// The number at `path`, names separated by slashes.
fn number(figures: &Value, path: &str) -> f64 {
    let value = figures.pointer(path).and_then(Value::as_f64);
    value.unwrap_or_else(|| panic!("no number at {path} in {figures:#}"))
}

#[track_caller]
fn assert_has_verdict(figures: &Value, paths: &[&str]) {
    for path in paths {
        // A difference of two figures is negative where other programs disturb one of them.
        let is_difference = path.ends_with("_extra_us");
        assert!(number(figures, path) > 0.0 || is_difference, "{path}");
        let met = figures.pointer(&format!("{path}_detail/met"));
        assert!(met.is_some_and(Value::is_boolean), "no verdict beside {path}: {figures:#}");
    }
}

#[test]
fn the_engine_is_measured() {
    let figures = measure(&["engine"]);
    assert_has_verdict(
        &figures,
        &[
            "/engine/write_4k_over_copy",
            "/engine/write_512_over_copy",
            "/engine/write_64k_over_copy",
            "/engine/read_4k_over_copy_crc",
            "/engine/flush_extra_us",
            "/engine/fua_extra_us",
            "/engine/write_amplification",
        ],
    );
    if std::thread::available_parallelism().is_ok_and(|count| count.get() >= 2) {
        assert_has_verdict(&figures, &["/engine/scale_2_over_copy"]);
    }
}

#[test]
fn memory_and_recovery_are_measured() {
    let figures = measure(&["memory", "recovery"]);
    assert_has_verdict(&figures, &["/engine/index_bytes_per_block", "/recovery/records_per_core_second"]);
    if figures.pointer("/daemon/not_measured").is_none() {
        let paths = ["/daemon/rss_over_index_mib", "/daemon/rss_after_stop_mib"];
        assert_has_verdict(&figures, &paths);
        assert!(
            paths.iter().all(|path| figures.pointer(&format!("{path}_detail/met")) == Some(&true.into()))
        );
    }
}

#[test]
fn writeback_is_measured() {
    let figures = measure(&["writeback"]);
    assert_has_verdict(&figures, &["/writeback/over_sequential"]);
    for disk in ["hard_disk", "flash", "fast_flash", "instant"] {
        assert!(number(&figures, &format!("/writeback/{disk}/drain_mib_per_s")) > 0.0);
    }
}

#[test]
fn the_tail_is_measured_without_a_wait_for_space() {
    let figures = measure(&["tail"]);
    assert_has_verdict(&figures, &["/tail/p9999_over_copy"]);
    assert!(number(&figures, "/tail/max_ms") > 0.0);
    assert_eq!(number(&figures, "/tail/waited_for_space"), 0.0);
    assert!(number(&figures, "/tail/written_back_mib") > 0.0, "writeback ran meanwhile");
}

#[test]
fn exports_are_measured_or_the_reason_is_reported() {
    let figures = measure(&["export"]);
    assert_has_verdict(&figures, &["/export/nbd/qd1_over_copy", "/export/nbd/qd16_over_copy"]);
    assert_has_verdict(&figures, &["/export/vhost/qd1_over_copy", "/export/vhost/qd16_over_copy"]);
    assert!(number(&figures, "/export/vhost/write_4k_p50_us") > 0.0);
    for name in ["fuse", "loop"] {
        if figures.pointer(&format!("/export/{name}/not_measured")).is_none() {
            let path = |depth: usize| format!("/export/{name}/qd{depth}_over_copy");
            assert_has_verdict(&figures, &[&path(1), &path(16)]);
        } else {
            assert!(std::env::var_os("CBD_SYSTEM_TESTS").is_none(), "root can measure it: {figures:#}");
        }
    }
}

#[test]
fn the_cost_of_counting_is_measured_and_the_advice_compared_with_caches() {
    let figures = measure(&["cockpit"]);
    assert_has_verdict(&figures, &["/cockpit/cost"]);
    assert!(number(&figures, "/cockpit/advice_error") <= 0.02);
    // Samples are never exact, and the same seed gives the same errors on every machine.
    for kind in ["sampled", "live"] {
        let error = number(&figures, &format!("/cockpit/advice_{kind}_error"));
        assert!(error > 0.0 && error < 0.04, "{kind}: {error}");
    }
    assert!(number(&figures, "/cockpit/read_4k_over_uncounted") > 0.0);
    for trace in ["uniform", "zipf", "scans", "loops", "writes", "moving", "recent", "mixed"] {
        assert!(number(&figures, &format!("/cockpit/advice/{trace}/same/hit")) > 0.0);
    }
}

#[test]
fn a_channel_between_two_hosts_is_measured() {
    let figures = measure(&["hosts"]);
    assert_has_verdict(&figures, &["/hosts/channel_extra_us", "/hosts/channel_throughput"]);
    assert!(number(&figures, "/hosts/channel_read_4k_over_local") > 0.0);
    // Coherent memory keeps its promises.
    assert!(number(&figures, "/hosts/channel_repeated") == 0.0);
    assert_has_verdict(&figures, &["/hosts/shared_write_cost"]);
    assert!(number(&figures, "/hosts/shared_write_4k_over_unshared") > 0.0);
    assert_eq!(number(&figures, "/hosts/shared_hosts"), 4.0);
    assert_has_verdict(&figures, &["/hosts/idle_cpu_percent"]);
    assert_eq!(number(&figures, "/hosts/idle_cpu_percent_detail/threads/0"), 1.0, "one thread serves");
    for figure in ["", "_write_4k_qd1_over_plain", "_write_4k_qd32_over_plain"] {
        let path = if figure.is_empty() { "shared_device_cost" } else { &format!("shared_device{figure}") };
        assert!(number(&figures, &format!("/hosts/{path}")) > 0.0);
    }
    for figure in ["channel_over_nbd", "channel_polled_over_nbd"] {
        assert!(number(&figures, &format!("/hosts/{figure}")) > 0.0);
        for name in ["write_4k_qd1", "write_4k_qd32", "read_4k_qd1", "read_4k_qd32"] {
            assert!(number(&figures, &format!("/hosts/{figure}_{name}")) > 0.0);
            assert!(number(&figures, &format!("/hosts/{figure}_detail/{name}")) > 0.0);
        }
    }
}

#[test]
fn the_policy_is_measured_and_the_same_seed_gives_the_same_figures() {
    let figures = measure(&["policy", "--seed", "7", "--write-percent", "10"]);
    assert_has_verdict(&figures, &["/policy/worst_over_lru"]);
    for trace in ["uniform", "zipf", "scans", "loops"] {
        for figure in ["hit", "lru", "arc", "s3fifo", "over_lru", "over_arc", "over_s3fifo"] {
            assert!(number(&figures, &format!("/policy/{trace}/{figure}")) > 0.0);
        }
        let share = |of| number(&figures, &format!("/policy/{trace}/space/{of}"));
        let shares = ["blocks", "overwritten", "records", "unused", "free"].map(share);
        assert!(shares.iter().all(|share| (0.0..1.0).contains(share)), "{shares:?}");
        assert!((shares.iter().sum::<f64>() - 1.0).abs() < 0.001, "all bytes are accounted for: {shares:?}");
    }
    let again = measure(&["policy", "--seed", "7", "--write-percent", "10"]);
    assert_eq!(figures["policy"], again["policy"]);
}
