//! Measures the export itself: 4 KiB requests over a unix socket to a device that consists of memory.
//!
//! `cargo run --release -p cbd-nbd --example nbd_latency`
#[path = "../tests/common/mod.rs"]
mod common;

use cbd_testkit::{Client, Command};
use std::time::Instant;

const SIZE: usize = 256 << 20;
const BLOCK: u32 = 4096;
const SECONDS: u64 = 3;

fn main() -> cbd_types::Result<()> {
    let served = common::serve(common::memory(SIZE));
    let mut client = Client::connect(&served.listen)?;
    // Writes every page once, so that no page is touched for the first time during the measurement.
    let chunk = vec![1; 1 << 20];
    for offset in (0..SIZE as u64).step_by(chunk.len()) {
        client.write(offset, &chunk, false)?;
    }
    for write in [true, false] {
        for depth in [1, 4, 16, 64] {
            measure(&mut client, write, depth)?;
        }
    }
    bandwidth(&mut client)?;
    drop(client);
    served.server.stop()
}

/// A small generator; it suffices for a measurement.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state % (SIZE as u64 / u64::from(BLOCK)) * u64::from(BLOCK)
}

fn measure(client: &mut Client, write: bool, depth: usize) -> cbd_types::Result<()> {
    let data = vec![7; BLOCK as usize];
    let mut state = 0x9E37_79B9_7F4A_7C15;
    let mut begun = std::collections::HashMap::new();
    let mut nanoseconds = Vec::new();
    let start = Instant::now();
    while start.elapsed().as_secs() < SECONDS || client.in_flight() > 0 {
        while client.in_flight() < depth && start.elapsed().as_secs() < SECONDS {
            let offset = next(&mut state);
            let now = Instant::now();
            let command = if write {
                Command::Write { offset, data: &data, fua: false }
            } else {
                Command::Read { offset, length: BLOCK }
            };
            begun.insert(client.submit(command)?, now);
        }
        if let Some(completed) = client.complete()? {
            completed.result?;
            client.recycle(completed.data);
            if let Some(begun) = begun.remove(&completed.cookie) {
                nanoseconds.push(begun.elapsed().as_nanos() as u64);
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    nanoseconds.sort_unstable();
    let at = |share: f64| nanoseconds[((nanoseconds.len() - 1) as f64 * share) as usize] as f64 / 1000.0;
    let mean = nanoseconds.iter().sum::<u64>() as f64 / nanoseconds.len() as f64 / 1000.0;
    println!(
        "4 KiB {:5} depth {depth:2}: {:7.0} IOPS, mean {mean:6.1} us, p50 {:6.1}, p99 {:6.1}, p99.9 {:6.1}",
        if write { "write" } else { "read" },
        nanoseconds.len() as f64 / seconds,
        at(0.5),
        at(0.99),
        at(0.999),
    );
    Ok(())
}

fn bandwidth(client: &mut Client) -> cbd_types::Result<()> {
    let mut data = vec![7; 1 << 20];
    for write in [true, false] {
        let start = Instant::now();
        let rounds = 2000_u64;
        for round in 0..rounds {
            let offset = round * (1 << 20) % SIZE as u64;
            if write {
                client.write(offset, &data, false)?;
            } else {
                client.read(offset, &mut data)?;
            }
        }
        let rate = rounds as f64 / 1024.0 / start.elapsed().as_secs_f64();
        println!("1 MiB {} depth 1: {rate:.2} GiB/s", if write { "write" } else { "read " });
    }
    Ok(())
}
