//! Measures 4 KiB random writes at depth 1 over plain memory: on the loop device and on the file beneath it.
//!
//! `cargo run --release -p cbd-fuse --example latency [queues]`, as root, in a mount namespace of its own if nobody shall see
//! the mount (`unshare -m`).
#![allow(missing_docs)]

#[path = "../tests/support/mod.rs"]
mod support;

use cbd_fuse::{FuseLoop, StopMode};
use cbd_types::AlignedBuffer;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::time::{Duration, Instant};

const WRITES: usize = 100_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let queues = std::env::args().nth(1).map_or(Ok(2), |text| text.parse())?;
    let dir = tempfile::tempdir()?;
    let size = 256 * support::MIB;
    let device = Arc::new(support::TestDevice::new(size, 512));
    let mut export =
        FuseLoop::start(Arc::new(support::Exported(device)), support::options(dir.path(), queues))?;
    for (name, path) in [("loop", export.device_path().to_owned()), ("file", export.file_path())] {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path)?;
        for operation in ["write", "read"] {
            let mut buffer = AlignedBuffer::zeroed(4096);
            let mut times = Vec::with_capacity(WRITES);
            let mut place = 1_u64;
            let began = Instant::now();
            for _ in 0..WRITES {
                place = place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let offset = (place >> 33) % (size / 4096) * 4096;
                let before = Instant::now();
                if operation == "write" {
                    file.write_all_at(&buffer, offset)?;
                } else {
                    file.read_exact_at(&mut buffer, offset)?;
                }
                times.push(before.elapsed());
            }
            let mean = began.elapsed() / WRITES as u32;
            times.sort_unstable();
            let at = |share: usize| times.get(WRITES * share / 1000).copied().unwrap_or_default();
            println!(
                "{name} {operation}: mean {mean:?}, p50 {:?}, p99 {:?}, p99.9 {:?}",
                at(500),
                at(990),
                at(999)
            );
        }
    }
    export.stop(StopMode::WhenUnused, Duration::from_secs(10))?;
    Ok(())
}
