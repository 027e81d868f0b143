//! The longest request of a writer and a reader while the cache of their device is attached, resized and detached.
//!
//! Invariants: every read is compared with what was written last; every request is timed; the same clients run as long without changes,
//! so that the figure of the machine stands beside that of the changes.

use crate::figures::Figures;
use crate::served::{Served, complete};
use crate::statistics::rounded;
use cbd_types::{AlignedBuffer, ByteRange, Epoch, Error, ErrorKind, Result};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// Bytes of the device; larger than the cache.
const DEVICE: u64 = 256 * MIB;
/// Rounds of four changes.
const ROUNDS: usize = 50;
/// The longest time without progress of a change.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The blocks of the device: the number of the last write of each.
type Versions = Vec<AtomicU64>;

/// Runs the measurement.
///
/// # Errors
/// The errors of the engine and of the system, and wrong data.
pub fn run(figures: &mut Figures) -> Result<()> {
    let rig = Rig::new()?;
    let begun = Instant::now();
    let with = rig.beside_clients(|| {
        for _ in 0..ROUNDS {
            rig.change()?;
        }
        Ok(())
    })?;
    let span = begun.elapsed();
    let without = rig.beside_clients(|| {
        std::thread::sleep(span);
        Ok(())
    })?;
    figures.add("stall_ms_max", rounded(with.as_secs_f64() * 1000.0, 2));
    figures.add("stall_ms_max_without_changes", rounded(without.as_secs_f64() * 1000.0, 2));
    Ok(())
}

struct Rig {
    served: Served,
    versions: Versions,
    /// The number of the last write of earlier clients.
    last: AtomicU64,
}

impl Rig {
    fn new() -> Result<Self> {
        let served = Served::new(DEVICE, 512 * MIB, None, &|backing| backing)?;
        let versions = (0..DEVICE / BLOCK).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { served, versions, last: AtomicU64::new(0) })
    }

    /// Attaches, grows, shrinks and detaches the cache, with pauses in which the clients use it.
    fn change(&self) -> Result<()> {
        let pause = || std::thread::sleep(Duration::from_millis(50));
        let proceed = &mut |_: &_| ControlFlow::Continue(());
        let Served { transport, environment, run, .. } = &self.served;
        run.attach_cache(transport, environment, 96 * MIB, Epoch(0), None)?;
        pause();
        run.resize_cache(transport, 192 * MIB, TIMEOUT, proceed)?;
        pause();
        run.resize_cache(transport, 64 * MIB, TIMEOUT, proceed)?;
        pause();
        let detached = run.detach_cache(transport, environment, TIMEOUT, &mut |_| ControlFlow::Continue(()));
        detached
            .map_err(|why| Error::new(ErrorKind::System, format!("the cache was not detached: {why:?}")))?;
        pause();
        Ok(())
    }

    /// The longest request of a writer and a reader beside `work`.
    fn beside_clients(&self, work: impl FnOnce() -> Result<()>) -> Result<Duration> {
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let clients = [true, false].map(|writes| {
                let ended = &ended;
                scope.spawn(move || self.client(writes, ended))
            });
            let worked = work();
            ended.store(true, Ordering::SeqCst);
            let mut longest = Duration::ZERO;
            for client in clients {
                let panicked = |_| Error::new(ErrorKind::System, "a client panicked");
                longest = longest.max(client.join().map_err(panicked)??);
            }
            worked.map(|()| longest)
        })
    }

    /// Writes, or reads and compares, random blocks until `ended`; returns the longest request.
    fn client(&self, writes: bool, ended: &AtomicBool) -> Result<Duration> {
        let mut queue = self.served.run.device().device_queue()?;
        let mut random = SmallRng::seed_from_u64(u64::from(writes));
        let mut bytes = AlignedBuffer::zeroed(BLOCK as usize);
        let (mut id, mut longest) = (self.last.load(Ordering::SeqCst), Duration::ZERO);
        while !ended.load(Ordering::SeqCst) {
            id += 1;
            let block = random.random_range(0..self.versions.len());
            let range = ByteRange::at(block as u64 * BLOCK, BLOCK);
            let version = &self.versions[block];
            let begun = Instant::now();
            if writes {
                bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&u64::to_le_bytes(id)));
                if let Some(result) = queue.write_from(id, range, &bytes, id % 64 == 0) {
                    result?;
                } else {
                    complete(&mut queue, id)?;
                }
                longest = longest.max(begun.elapsed());
                version.store(id, Ordering::SeqCst);
                continue;
            }
            let before = version.load(Ordering::SeqCst);
            match queue.read_into(id, range, &mut bytes) {
                Some(result) => result?,
                None => bytes.copy_from_slice(&complete(&mut queue, id)?),
            }
            longest = longest.max(begun.elapsed());
            let found = bytes[..8].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
            // The writer may be ahead of what it has noted.
            if found < before || bytes[8..] != bytes[..bytes.len() - 8] {
                let text = format!("block {block} is of write {found}, and write {before} had completed");
                return Err(Error::new(ErrorKind::Damaged, text));
            }
        }
        if writes {
            self.last.store(id, Ordering::SeqCst);
        }
        Ok(longest)
    }
}
