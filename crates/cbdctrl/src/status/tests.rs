//! The page of statuses as the daemon sends them.

use super::*;

/// A status as the daemon sends it.
fn status(cache: serde_json::Value) -> Status {
    let mut base = serde_json::json!({
        "size": 1 << 24, "free_segments": 3, "lanes": 2, "data_crc": true, "gc_percent": 70, "consistency": "strict",
        "writeback_rate": 0, "writeback_percent": 10, "dirty_bytes": 4096,
        "read_hit_bytes": 3, "read_miss_bytes": 1,
        "read_hit_ratio": 0.75, "epoch": 9, "drained_epoch": 8, "drained_ms": 1, "recovery_point": "as of then",
        "void": null, "backing_errors": 0, "last_error": null, "writers_waiting": false, "written_bytes": 0,
        "written_back_bytes": 0, "index_bytes": 0, "on_write_error": "stop", "write_error_after_s": 60,
        "stalled": false, "parked": [], "parked_bytes": 0, "parked_error": null, "damage_found": 0, "damage_healed": 0, "quarantined": [],
    });
    base["pace"] = serde_json::json!({
        "reason": "holding the target", "bytes_per_s": 2048, "permitted_bytes_per_s": 3072,
        "target_bytes": 8192, "error_points": -1.25,
    });
    let further = serde_json::json!({
        "cache_mode": "writeback", "is_changing_mode": false, "read_fill": "admit",
        "sequential_read_cutoff": 4194304, "readahead": "auto", "sequential_write_cutoff": 0,
        "when_full": "wait", "congestion_read_us": 0, "congestion_write_us": 0, "read_latency_target_us": 0,
        "writeback_paused_until_ms": 0, "pin_percent": 50, "metadata_min_percent": 0, "metadata_max_percent": 100,
    });
    for more in [&further, &cache] {
        if let (Some(base), Some(more)) = (base.as_object_mut(), more.as_object()) {
            base.extend(more.clone());
        }
    }
    let mut transport = serde_json::to_value(cbd_daemon::api::TransportInfo {
        alive: true,
        path: "/mnt/pmem/r".into(),
        durability: "process-crash".into(),
        ..Default::default()
    })
    .unwrap();
    transport["size"] = (1 << 26).into();
    transport["backends"] = serde_json::json!([{
        "backend_id": 0, "host_id": 0, "backend_path": "/dev/sdb", "alive": true, "cache_segs": 16,
        "cache_gc_percent": 70, "cache_used_segs": 13, "blkdevs": [{
            "blkdev_id": 0, "host_id": 0, "backend_id": 0, "dev_name": "/dev/cbd0", "alive": true, "export": "auto",
        }],
        "size": 1 << 30, "sector": 512, "handlers": 2, "backing": "", "atomic_unit": 1 << 18, "cache": base,
    }]);
    let page = serde_json::json!({
        "version": "1", "pid": 7, "uptime_s": 90_000, "warnings": [], "transports": [transport],
    });
    serde_json::from_value(page).unwrap()
}

#[test]
fn the_page_has_durability_hit_ratio_dirty_bytes_and_recovery_point() {
    let page = page(&status(serde_json::json!({})));
    for part in [
        "up 1 d 1 h",
        "process-crash: acknowledged writes survive a crash of the daemon, NOT of the machine",
        "75.0 % of the bytes read",
        "4 KiB (4096 bytes)",
        "holding the target: 2 KiB/s of 3 KiB/s that are permitted, 1.2 points below the target of 8 KiB dirty",
        "as of then",
        "atomic unit 256 KiB",
        "/dev/cbd0 (auto)",
    ] {
        assert!(page.contains(part), "{part} is missing:\n{page}");
    }
    for part in ["VOID", "ERRORS", "QUARANTINED", "FULL", "DAMAGE", "STALLED", "PARKED"] {
        assert!(!page.contains(part), "{part} is there:\n{page}");
    }
}

#[test]
fn the_bytes_that_went_past_the_cache_are_shown_by_reason() {
    let bypassed = serde_json::json!({
        "bypassed_bytes": { "not_admitted": 4096, "sequential": 0 }, "bypass_refused_bytes": 512,
    });
    let page = page(&status(bypassed));
    assert!(page.contains("bypassed") && page.contains("not admitted 4 KiB"), "{page}");
    assert!(page.contains("not legal, so cached: 512"), "{page}");
    assert!(!page.contains("sequential 0"), "{page}");
}

#[test]
fn a_block_device_on_another_host_is_shown_with_what_waits_for_that_host() {
    let mut status = status(serde_json::json!({}));
    let remote = serde_json::json!([{
        "blkdev_id": 3, "host_id": 0, "backend_id": 7, "dev_name": "/dev/cbd3", "alive": true, "export": "auto",
        "error": "requests wait", "operations": { "write": {
            "requests": 3, "bytes": 4096, "failed": 2, "outcomes": {},
            "latency": { "count": 1, "sum_ns": 9000, "buckets": [{ "upper_ns": 9216, "count": 1 }] },
        } },
        "backend_host_id": 1, "backend_host": "b", "in_flight": 2, "waiting_ms": 5500,
        "atomic_unit": 65536,
    }]);
    status.transports[0].remote_blkdevs = serde_json::from_value(remote).unwrap();
    let page = page(&status);
    for part in [
        "\n  blkdev 3 on backend 7 of host b\n",
        "/dev/cbd3 (auto): requests wait\n",
        "atomic unit    64 KiB\n",
        "2 in flight, none has completed for 5.5 s; 2 have failed\n",
        "median (99 %): writes 8.7 us",
    ] {
        assert!(page.contains(part), "{part} is missing:\n{page}");
    }
}

#[test]
fn the_atomic_unit_of_a_backend_that_is_not_served_is_left_out() {
    let mut status = status(serde_json::json!({}));
    let backend = &mut status.transports[0].backends[0];
    (backend.info.alive, backend.cache, backend.atomic_unit) = (false, None, None);
    let page = page(&status);
    assert!(page.contains("sectors of 512 B, 2 queues\n"), "{page}");
    assert!(!page.contains("atomic unit"), "{page}");
}

#[test]
fn errors_are_shown_in_capitals() {
    let page = page(&status(serde_json::json!({
        "void": "a batch is being written", "backing_errors": 4, "last_error": "EIO", "writers_waiting": true,
        "stalled": true, "parked": [{"start": 512, "end": 1024}], "parked_error": "EIO",
        "damage_found": 3, "damage_healed": 2, "quarantined": [{"start": 0, "end": 4096, "reason": "checksum"}],
    })));
    for part in [
        "VOID",
        "ERRORS",
        "QUARANTINED",
        "FULL",
        "3 records found since the start, 2 of them clean and read from the backing device instead; QUARANTINED lists",
        "bytes 0..4096 (checksum)",
        "STALLED",
        "PARKED",
        "bytes 512..1024: the backing device refuses them (EIO)",
    ] {
        assert!(page.contains(part), "{part} is missing:\n{page}");
    }
}
