//! Writes to a disk behind a cache until it is stopped, and reports the acknowledged writes: a program to
//! kill.
//!
//! `writer REGION DISK THREADS FIRST` writes version after version of 4 KiB blocks, beginning with version
//! FIRST, each thread to its own blocks, alternately through calls and through a queue, and prints "BLOCK
//! VERSION" for each acknowledged write.

use cbd::{Device, DeviceOptions, Region, RegionOptions};
use std::io::Write;

const BLOCK: usize = 4096;
const BLOCKS_OF_A_THREAD: u64 = 97;

fn main() -> cbd::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, region, disk, threads, first] = &arguments[..] else {
        eprintln!("usage: writer REGION DISK THREADS FIRST");
        std::process::exit(2);
    };
    let (threads, first) = (threads.parse().unwrap_or(1), first.parse().unwrap_or(1));
    let region = Region::open(region, &RegionOptions::default())?;
    let device = region.attach(disk, &DeviceOptions::default())?;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let device = &device;
            scope.spawn(move || {
                if let Err(error) = write_on(device, thread, first) {
                    eprintln!("{error}");
                    std::process::exit(1);
                }
            });
        }
    });
    Ok(())
}

fn write_on(device: &Device, thread: u64, first: u64) -> cbd::Result<()> {
    let mut queue = device.queue()?;
    let mut done = Vec::new();
    for version in first.. {
        for block in (0..BLOCKS_OF_A_THREAD).map(|block| thread * BLOCKS_OF_A_THREAD + block) {
            let data = pattern(block, version);
            if version % 2 == 1 {
                device.write_at(&data, block * BLOCK as u64)?;
                acknowledge(block, version);
            } else {
                queue.write_at(block, &data, block * BLOCK as u64, false)?;
                queue.poll(&mut done)?;
            }
            for done in done.drain(..) {
                done.result?;
                acknowledge(done.id, version);
            }
        }
        queue.wait(&mut done, usize::MAX, None)?;
        for done in done.drain(..) {
            done.result?;
            acknowledge(done.id, version);
        }
        if version % 3 == 0 {
            device.flush()?;
        }
    }
    Ok(())
}

/// One write of a whole line: a program that is killed has printed it completely or not at all.
fn acknowledge(block: u64, version: u64) {
    // An error means that the reader has closed the pipe.
    let _ = std::io::stdout().lock().write_all(format!("{block} {version}\n").as_bytes());
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
