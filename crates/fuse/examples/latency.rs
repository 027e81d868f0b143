//! Measures 4 KiB random writes and reads over plain memory: on the file and on the loop device over it, with
//! requests through `/dev/fuse` and through io_uring, in turns.
//!
//! `cargo run --release -p cbd-fuse --example latency [rounds [writes]]`, as root. Run it in a mount
//! namespace of its own (`unshare -m`) to hide the mounts from other processes. The io_uring transport is
//! used only where the kernel's parameter enables it (`/sys/module/fuse/parameters/enable_uring`). Depth 16
//! is 16 threads, each with one request at a time.
#![allow(missing_docs)]

#[path = "../tests/support/mod.rs"]
mod support;

use cbd_fuse::{FuseLoop, Options, RING_DEPTH, StopMode, Way};
use cbd_types::AlignedBuffer;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZE: u64 = 256 * support::MIB;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Applies the same load to each transport. Returns the latency of each request and the requests per second.
fn load(path: &Path, write: bool, depth: usize, requests: usize) -> Result<(Vec<Duration>, f64), Failure> {
    let client = |seed: usize| -> Result<Vec<Duration>, Failure> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path)?;
        let mut buffer = AlignedBuffer::zeroed(4096);
        let mut times = Vec::with_capacity(requests / depth);
        let mut place = seed as u64 + 1;
        for _ in 0..requests / depth {
            place = place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let offset = (place >> 33) % (SIZE / 4096) * 4096;
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

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn main() -> Result<(), Failure> {
    let argument = |index| std::env::args().nth(index).map(|text| text.parse::<usize>()).transpose();
    let (rounds, requests) = (argument(1)?.unwrap_or(5), argument(2)?.unwrap_or(20_000));
    let dir = tempfile::tempdir()?;
    let queues = std::thread::available_parallelism()?.get();
    let start = |name: &str, ring_depth| {
        let device = Arc::new(support::Exported(Arc::new(support::TestDevice::new(SIZE, 512))));
        let link = Some(dir.path().join(name));
        let options = support::options(&dir.path().join(name), queues);
        let mount_dir = dir.path().join("fuse").join(name);
        FuseLoop::start(device, Options { name: name.into(), mount_dir, link, ring_depth, ..options })
    };
    let mut exports = vec![start("door", 0)?, start("ring", RING_DEPTH)?];
    exports.iter().for_each(|export| println!("{}", export.way()));
    if matches!(exports.last().map(FuseLoop::way), Some(Way::Door { .. })) {
        return Err("there is nothing to compare".into());
    }
    for depth in [1, 16] {
        for (target, looped) in [("file", false), ("loop", true)] {
            for write in [true, false] {
                let mut figures = [[const { Vec::new() }; 4], [const { Vec::new() }; 4]];
                for _ in 0..rounds {
                    for (export, figures) in exports.iter().zip(&mut figures) {
                        let path = if looped { export.loop_path().to_owned() } else { export.file_path() };
                        let (times, rate) = load(&path, write, depth, requests)?;
                        let at =
                            |share: usize| times.get(times.len() * share / 1000).copied().unwrap_or_default();
                        let us = |share| at(share).as_secs_f64() * 1e6;
                        let values = [us(500), us(990), us(999), rate];
                        figures.iter_mut().zip(values).for_each(|(list, value)| list.push(value));
                    }
                }
                let [door, ring] = figures.map(|lists| lists.map(|mut list| median(&mut list)));
                let operation = if write { "write" } else { "read" };
                println!(
                    "{target} {operation} depth {depth}: p50 {:.2} -> {:.2} us (x{:.2}), p99 {:.1} -> {:.1} us, p99.9 {:.1} -> {:.1} \
                     us, requests/s {:.0} -> {:.0} (x{:.2})",
                    door[0],
                    ring[0],
                    ring[0] / door[0],
                    door[1],
                    ring[1],
                    door[2],
                    ring[2],
                    door[3],
                    ring[3],
                    ring[3] / door[3],
                );
            }
        }
    }
    for export in &mut exports {
        export.stop(StopMode::WhenUnused, Duration::from_secs(10))?;
    }
    Ok(())
}
