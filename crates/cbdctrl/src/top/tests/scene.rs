//! Statuses of a daemon with four backends: one under load, one that is full, one at rest, one whose disk is missing.

use crate::top::sample::Sample;
use crate::top::state::{Looks, Mapped, State};
use cbd_daemon::api::{DeviceMap, Histogram, MapCell};
use cbd_types::figures::{Histogram as Cells, HistogramCounts};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use serde_json::{Value, json};
use std::time::Duration;

pub const INTERVAL: Duration = Duration::from_secs(2);
/// When the first sample was taken: 2026-03-14 15:09:26 UTC.
pub const BEGAN_MS: u64 = 1_773_500_966_000;

/// A histogram with `count` durations around `middle_ns`, some of them far longer.
pub fn latency(count: u64, middle_ns: u64) -> Value {
    let (cells, mut counts) = (Cells::default(), HistogramCounts::default());
    for (factor, share) in [(50, 4), (75, 20), (100, 40), (140, 25), (220, 8), (900, 2), (6000, 1)] {
        cells.count(middle_ns * factor / 100, count * share / 100);
    }
    cells.read(&mut counts);
    serde_json::to_value(Histogram::from(&counts)).expect("JSON")
}

/// Requests of 4 KiB with these shares of outcomes in percent.
pub fn operation(requests: u64, middle_ns: u64, outcomes: &[(&str, u64)]) -> Value {
    let outcomes: serde_json::Map<String, Value> = outcomes
        .iter()
        .map(|(name, share)| {
            let requests = requests * share / 100;
            ((*name).to_owned(), json!({ "requests": requests, "bytes": requests * 4096 }))
        })
        .collect();
    json!({
        "requests": requests, "bytes": requests * 4096, "failed": 0, "outcomes": outcomes,
        "latency": latency(requests, middle_ns),
    })
}

pub fn disk(operations: u64, middle_ns: u64) -> Value {
    json!({
        "operations": operations, "bytes": operations * 65536, "failed": 0, "latency": latency(operations, middle_ns),
    })
}

fn device(id: u64, backend: u64, name: &str, operations: &Value) -> Value {
    json!({
        "blkdev_id": id, "host_id": 0, "backend_id": backend, "name": name, "dev_name": format!("/dev/cbd{id}"),
        "alive": true, "export": "auto", "method": "ublk", "operations": operations,
    })
}

/// What the backends have done after `steps` intervals.
fn backends(steps: u64) -> Vec<Value> {
    let n = steps;
    let busy = json!({
        "read": operation(62_000 * n, 14_000, &[("hit", 94), ("miss", 4), ("past-sequential", 2)]),
        "write": operation(22_400 * n, 31_000, &[("cached", 100)]),
        "flush": operation(400 * n, 44_000, &[]),
        "discard": operation(0, 1, &[]),
    });
    let full = json!({
        "read": operation(180 * n, 5_200_000, &[("hit", 31), ("miss", 69)]),
        "write": operation(5_100 * n, 2_900_000, &[("cached", 88), ("past-full", 12)]),
    });
    let resting = json!({ "read": operation(300, 16_000, &[("hit", 100)]), "write": operation(200, 29_000, &[("cached", 100)]) });
    let cache = |size: u64, target: u64, reason: &str, rate: u64, permitted: Value| {
        json!({
            "size": size, "cache_mode": "writeback", "written_back_bytes": rate * 2 * n,
            "pace": { "reason": reason, "bytes_per_s": rate, "permitted_bytes_per_s": permitted, "target_bytes": target },
            "recovery_point": "consistent as of 2026-03-14 15:09:25 UTC", "writers_waiting": reason == "full",
            "stalled": false, "parked_bytes": 0, "quarantined_bytes": 0, "void": null, "last_error": null,
        })
    };
    vec![
        json!({
            "backend_id": 0, "uuid": "0a", "name": "db-data", "backend_path": "/dev/disk/by-id/wwn-0x5000c500a1b2c3d4",
            "alive": true, "state": "serving", "size": 4_000_787_030_016_u64, "dirty_bytes": 871_000_000, "oldest_operation_ms": 4,
            "blkdevs": [device(0, 0, "db-data", &busy)],
            "disk": { "read": disk(3_700 * n, 6_800_000), "write": disk(1_500 * n, 3_100_000), "flush": disk(4 * n, 9_000_000) },
            "waits": { "space": { "count": 0, "total_ns": 0 }, "lane": { "count": 310 * n, "total_ns": 310 * 4_000 * n },
                       "flush": { "count": 4 * n, "total_ns": 4 * 9_000_000 * n } },
            "time_to_empty_s": 18, "recovery_point_age_ms": 3_150, "recovery_ms": 212, "region_written_bytes": 93_000_000 * n,
            "cache": cache(8 << 30, 858_993_459, "holding the target", 49_300_000, json!(75_000_000)),
        }),
        json!({
            "backend_id": 1, "uuid": "1a", "name": "vm-images", "backend_path": "/dev/disk/by-id/ata-ST8000NM0055-1RM112_ZA1",
            "alive": true, "state": "serving, full", "size": 8_001_563_222_016_u64, "dirty_bytes": 4_100_000_000_u64,
            "oldest_operation_ms": 1_740, "blkdevs": [device(1, 1, "vm-images", &full)],
            "disk": { "read": disk(124 * n, 8_100_000), "write": disk(330 * n, 12_400_000) },
            "waits": { "space": { "count": 96 * n, "total_ns": 96 * 21_000_000 * n }, "lane": { "count": 0, "total_ns": 0 },
                       "flush": { "count": 0, "total_ns": 0 } },
            "time_to_empty_s": 380, "time_to_full_s": 0, "recovery_point_age_ms": 61_000, "recovery_ms": 90,
            "region_written_bytes": 21_000_000 * n,
            "cache": cache(4 << 30, 429_496_729, "full", 10_800_000, Value::Null),
        }),
        json!({
            "backend_id": 2, "uuid": "2a", "name": "logs", "backend_path": "/dev/sdd", "alive": true, "state": "serving",
            "size": 500_107_862_016_u64, "dirty_bytes": 0, "oldest_operation_ms": 0, "blkdevs": [device(2, 2, "logs", &resting)],
            "disk": { "read": disk(40, 900_000), "write": disk(20, 700_000) },
            "waits": { "space": { "count": 0, "total_ns": 0 }, "lane": { "count": 0, "total_ns": 0 } },
            "time_to_empty_s": 0, "recovery_point_age_ms": 0, "recovery_ms": 12, "region_written_bytes": 900_000,
            "cache": cache(1 << 30, 107_374_182, "idle", 0, Value::Null),
        }),
        json!({
            "backend_id": 3, "uuid": "3a", "name": "archive", "backend_path": "/dev/sde", "alive": false, "state": "NOT SERVED",
            "size": 2_000_398_934_016_u64, "error": "the disk does not exist any more", "blkdevs": [],
            "held": { "dirty_bytes": 12_582_912 },
        }),
    ]
}

/// The status after `steps` intervals.
pub fn status(steps: u64) -> Value {
    json!({
        "version": env!("CARGO_PKG_VERSION"), "pid": 4711, "uptime_s": 262_800 + 2 * steps, "warnings": [],
        "transports": [{
            "transport_id": 0, "path": "/mnt/pmem/cbd.region", "alive": true, "size": 16_u64 << 30, "free_segments": 160,
            "bytes_per_segment": 16 << 20, "durability": "power-fail", "backends": backends(steps),
            "warnings": ["one of two copies of the superblock is damaged; repair it: cbdctrl scrub -b 0 --repair"],
        }],
    })
}

pub fn sample(steps: u64) -> Sample {
    read(&status(steps), steps)
}

/// The sample of a status that came after `steps` intervals.
pub fn read(status: &Value, steps: u64) -> Sample {
    let at = INTERVAL * u32::try_from(steps).expect("few");
    let since_ms = u64::try_from(at.as_millis()).expect("short");
    Sample::read(status, at, BEGAN_MS + since_ms)
}

/// The state after two samples.
pub fn state() -> State {
    let mut state = State::new(INTERVAL, Looks { styled: true, unicode: true });
    state.sampled(sample(1));
    state.sampled(sample(2));
    state
}

/// The lines of some events.
pub fn events() -> Vec<String> {
    let lines = [
        "15:01:12 daemon.started: ready: 1 transports, 4 backends, 3 block devices",
        "15:01:12 ERROR backend.down: /dev/sde: the disk does not exist any more",
        "15:08:40 WARNING writers.waiting.began: /dev/disk/by-id/ata-ST8000NM0055-1RM112_ZA1: writes wait for space",
    ];
    lines.map(str::to_owned).to_vec()
}

/// The page of a state as it is on a terminal of this size.
pub fn buffer(state: &State, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("memory");
    terminal.draw(|frame| crate::top::view::draw(state, frame.buffer_mut())).expect("memory");
    terminal.backend().buffer().clone()
}

/// The lines of a page.
pub fn page(state: &State, width: u16, height: u16) -> String {
    let buffer = buffer(state, width, height);
    let lines = (0..height).map(|y| {
        let line: String = (0..width).map(|x| buffer[(x, y)].symbol()).collect();
        line.trim_end().to_owned()
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// The map of the first backend: a hot begin, a part that is written, and a few blocks here and there.
pub fn map() -> (Mapped, DeviceMap) {
    let cell_bytes = 4_000_787_030_016_u64.div_ceil(256);
    let cell = |at: u64| {
        let cached = match at {
            0..40 => cell_bytes / 100 * (40 - at) / 40,
            120..170 => cell_bytes / 250,
            _ if at.is_multiple_of(17) => cell_bytes / 5000,
            _ => 0,
        };
        let (dirty, read) =
            if (140..170).contains(&at) { (cached / 2, cached / 8) } else { (0, cached / 3 * 2) };
        MapCell { cached_bytes: cached, dirty_bytes: dirty, read_bytes: read }
    };
    let cells = (0..256).map(cell).collect();
    let map = DeviceMap { backend_id: 0, size: 4_000_787_030_016, cell_bytes, sampled_one_of: 11, cells };
    (Mapped { transport: 0, backend: 0 }, map)
}
