//! Measures 4 KiB random writes and reads over plain memory: on the file and on the loop device over it.
//!
//! `cargo run --release -p cbd-fuse --example latency [rounds [requests]]`, as root. Run it in a mount
//! namespace of its own (`unshare -m`) to hide the mount from other processes. Depth 16 is 16 threads, each
//! with one request at a time.
#![allow(missing_docs)]

#[path = "../tests/support/mod.rs"]
mod support;

use cbd_fuse::StopMode;
use cbd_types::AlignedBuffer;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZE: u64 = 256 * support::MIB;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Returns the latency of each request and the requests per second.
fn load(path: &Path, write: bool, depth: usize, requests: usize) -> Result<(Vec<Duration>, f64), Failure> {
    let client = |seed: usize| -> Result<Vec<Duration>, Failure> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path)?;
        let mut buffer = AlignedBuffer::zeroed(4096);
        let mut times = Vec::with_capacity(requests / depth);
        let mut random = seed as u64 + 1;
        for _ in 0..requests / depth {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let offset = (random >> 33) % (SIZE / 4096) * 4096;
            let before = Instant::now();
            if write {
                file.write_all_at(&buffer, offset)?;
            } else {
                file.read_exact_at(&mut buffer, offset)?;
            }
            times.push(before.elapsed());
        }
        Ok(times)
    };
    let began = Instant::now();
    let times: Result<Vec<_>, Failure> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..depth).map(|seed| scope.spawn(move || client(seed))).collect();
        clients.into_iter().map(|client| client.join().map_err(|_| "a client panicked")?).collect()
    });
    let mut times = times?.concat();
    let rate = times.len() as f64 / began.elapsed().as_secs_f64();
    times.sort_unstable();
    Ok((times, rate))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn main() -> Result<(), Failure> {
    let argument = |index| std::env::args().nth(index).map(|text| text.parse::<usize>()).transpose();
    let (rounds, requests) = (argument(1)?.unwrap_or(5), argument(2)?.unwrap_or(20_000));
    let dir = tempfile::tempdir()?;
    let queues = std::thread::available_parallelism()?.get();
    let device = Arc::new(support::TestDevice::new(SIZE, 512));
    let mut export = support::start_with(&device, support::options(dir.path(), queues));
    for depth in [1, 16] {
        for (target, path) in [("file", export.file_path()), ("loop", export.loop_path().to_owned())] {
            for write in [true, false] {
                let mut figures = [const { Vec::new() }; 4];
                for _ in 0..rounds {
                    let (times, rate) = load(&path, write, depth, requests)?;
                    let us = |share: usize| {
                        let time = times.get(times.len() * share / 1000).copied().unwrap_or_default();
                        time.as_secs_f64() * 1e6
                    };
                    let values = [us(500), us(990), us(999), rate];
                    figures.iter_mut().zip(values).for_each(|(list, value)| list.push(value));
                }
                let [p50, p99, p999, rate] = figures.map(median);
                let operation = if write { "write" } else { "read" };
                println!(
                    "{target} {operation} depth {depth}: p50 {p50:.2} us, p99 {p99:.1} us, p99.9 {p999:.1} us, \
                     {rate:.0} requests/s"
                );
            }
        }
    }
    Ok(export.stop(StopMode::WhenUnused, Duration::from_secs(10))?)
}
