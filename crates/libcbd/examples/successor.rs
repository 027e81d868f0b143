//! A program to be killed while requests of it wait, and to be started again: what one process of it left, the next one
//! reports.
//!
//! `successor REGION DISK FIRST paused|running` opens the region and the disk, and repeats that while the kernel still
//! has requests of a killed process. Then it prints
//! - `found BLOCK VERSION` for each block, as it was left;
//! - `wrote BLOCK VERSION` for each acknowledged write: version FIRST of the even blocks, which it drains;
//! - `kept BLOCK VERSION` for each block after that;
//! - `wrote BLOCK VERSION` for further versions of all blocks, until it is killed;
//! - `waiting COUNT` when that many writes wait and none completes. With `paused` next to nothing is written back meanwhile,
//!   so they wait for space; with `running` they wait for a disk that is slow.

use cbd::{Device, DeviceOptions, Error, ErrorKind, Queue, Region, RegionOptions, Result, Settings};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
/// More than a cache of 1 MiB holds.
const BLOCKS: u64 = 320;
/// The killed process may have requests in flight on a slow disk for this time.
const BUSY: Duration = Duration::from_secs(60);
/// Writes of which none completes in this time wait.
const WAITING: Duration = Duration::from_millis(500);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, region, disk, first, mode] = &arguments[..] else {
        eprintln!("usage: successor REGION DISK FIRST paused|running");
        std::process::exit(2);
    };
    let first = first.parse().unwrap_or(1);
    let region = while_busy(|| Region::open(region, &RegionOptions::default()))?;
    let device = while_busy(|| region.attach(Path::new(disk), &DeviceOptions::default()))?;
    report(&device, "found")?;
    pace(&device, 0)?;
    for block in (0..BLOCKS).step_by(2) {
        device.write_at(&pattern(block, first), block * BLOCK as u64)?;
        say("wrote", block, first);
    }
    device.drain(BUSY, &mut |_| ControlFlow::Continue(()))?;
    report(&device, "kept")?;
    if mode == "paused" {
        // The least rate: after one request, which may be as large as the cache, the next is half a minute away.
        pace(&device, 32 << 10)?;
    }
    let mut queue = device.queue()?;
    for version in first + 1.. {
        write_all(&mut queue, version)?;
    }
    Ok(())
}

/// Tries again while another process has what is opened.
fn while_busy<T>(mut open: impl FnMut() -> Result<T>) -> Result<T> {
    let end = Instant::now() + BUSY;
    loop {
        match open() {
            Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other,
        }
    }
}

fn pace(device: &Device, writeback_rate: u64) -> Result<()> {
    device.set_settings(Settings { writeback_rate, ..device.settings() })
}

fn report(device: &Device, word: &str) -> Result<()> {
    let mut bytes = vec![0; BLOCK];
    for block in 0..BLOCKS {
        device.read_at(&mut bytes, block * BLOCK as u64)?;
        let number = |place: usize| u64::from_le_bytes(bytes[place..place + 8].try_into().unwrap_or([0; 8]));
        let version = number(8);
        if bytes.iter().any(|&byte| byte != 0) && bytes != pattern(block, version) {
            return Err(Error::new(ErrorKind::Media, format!("block {block} has no valid version")));
        }
        say(word, block, version);
    }
    Ok(())
}

/// Writes a version of all blocks, and returns when all writes have completed.
fn write_all(queue: &mut Queue, version: u64) -> Result<()> {
    let mut done = Vec::new();
    for block in 0..BLOCKS {
        queue.write_at(block, &pattern(block, version), block * BLOCK as u64, false)?;
        queue.poll(&mut done)?;
        acknowledge(&mut done, version)?;
    }
    while queue.in_flight() > 0 {
        queue.wait(&mut done, 1, Some(WAITING))?;
        if done.is_empty() {
            line(&format!("waiting {}\n", queue.in_flight()));
        }
        acknowledge(&mut done, version)?;
    }
    Ok(())
}

fn acknowledge(done: &mut Vec<cbd::Completion>, version: u64) -> Result<()> {
    for done in done.drain(..) {
        done.result?;
        say("wrote", done.id, version);
    }
    Ok(())
}

fn say(word: &str, block: u64, version: u64) {
    line(&format!("{word} {block} {version}\n"));
}

/// One write of a whole line: a program that is killed has printed it completely or not at all.
fn line(text: &str) {
    // An error means that the reader has closed the pipe.
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}

fn pattern(block: u64, version: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    for (place, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = match place {
            0 => block,
            1 => version,
            _ => (block << 40 ^ version << 8 ^ place as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}
