//! Describes the machine on which the figures were measured.

use serde_json::{Value, json};
use std::fs;

/// Processor, number of processors, size of the last-level cache, kernel, and the configuration of the
/// system's allocator.
pub fn describe() -> Value {
    json!({
        "processor": field_of("/proc/cpuinfo", "model name"),
        "processors": std::thread::available_parallelism().map_or(0, usize::from),
        "last_level_cache": last_level_cache(),
        "kernel": read("/proc/sys/kernel/osrelease"),
        "allocator": std::env::var("GLIBC_TUNABLES").unwrap_or_default(),
        "load_1_minute": read("/proc/loadavg").split(' ').next().and_then(|load| load.parse::<f64>().ok()),
    })
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn field_of(path: &str, name: &str) -> String {
    let text = read(path);
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
    line.split_once(':').map_or("", |(_, value)| value).trim().to_owned()
}

fn last_level_cache() -> String {
    let mut caches =
        (0..8).map(|index| read(&format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size")));
    caches.rfind(|size| !size.is_empty()).unwrap_or_default()
}
