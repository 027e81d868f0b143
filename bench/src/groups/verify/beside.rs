//! The latency of clients beside a scrub of the whole device, against that without one, in turns.
//!
//! Invariants: the verification is a scrub of the daemon, without a limit of its rate; both contestants are the same clients,
//! with the same requests in another order.

use super::add_latency;
use crate::figures::Figures;
use crate::options::Options;
use crate::served::{Served, complete};
use crate::statistics::percentile;
use crate::turns::since;
use cbd_backing::{Throttle, ThrottleParameters};
use cbd_daemon::api::{ScrubAction, ScrubRequest, ScrubState};
use cbd_daemon::scrub::{Scrub, Surroundings, now_s};
use cbd_runtime::{DeviceQueue, DrainRequest, ProcessEnvironment};
use cbd_types::{AlignedBuffer, ByteRange, Error, ErrorKind, Result, VerifiedMetadata};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// Bytes of the device. The first half is cached, the other one is not.
const DEVICE: u64 = 512 * MIB;
const CACHE: u64 = 384 * MIB;
/// One read in so many is one of what is not cached, and waits for the disk.
const MISS_ONE_IN: u32 = 20;

/// The latencies of a turn, in nanoseconds.
#[derive(Default)]
struct Latencies {
    /// Writes and reads that the cache serves.
    cached: Vec<u32>,
    /// Reads of the disk.
    missed: Vec<u32>,
}

/// Runs the measurement.
///
/// # Errors
/// The errors of the engine and of the system.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    let (turns, length) = if options.quick { (2, 300) } else { (16, 1000) };
    let throttled = |backing| Arc::new(Throttle::new(backing, ThrottleParameters::FLASH_DISK)) as Arc<_>;
    let served = Served::new(DEVICE, 2 * CACHE, Some(CACHE), &throttled)?;
    let mut client = Client::new(&served)?;
    client.fill()?;
    let (is_on, is_ended) = (AtomicBool::new(false), AtomicBool::new(false));
    let (rounds, scrubbed) = std::thread::scope(|scope| {
        let scrubbing = scope.spawn(|| scrub(&served, &is_on, &is_ended));
        let mut rounds = Vec::new();
        let result: Result<()> = (0..turns).try_for_each(|_| {
            let mut turn = |on| {
                is_on.store(on, Ordering::SeqCst);
                // The requests in flight of the turn before complete first.
                std::thread::sleep(Duration::from_millis(20));
                client.turn(Duration::from_millis(length))
            };
            rounds.push([turn(true)?, turn(false)?]);
            Ok(())
        });
        is_ended.store(true, Ordering::SeqCst);
        let panicked = |_| Error::new(ErrorKind::System, "the scrub panicked");
        let scrubbed = scrubbing.join().map_err(panicked)??;
        result.map(|()| (rounds, scrubbed))
    })?;
    figures.add("beside_clients_mib", scrubbed / MIB);
    for (name, of) in [
        ("p99_over_idle", (|turn| &turn.cached) as fn(&Latencies) -> &Vec<u32>),
        ("missed_p99_over_idle", |turn| &turn.missed),
    ] {
        let ratios: Vec<_> =
            rounds.iter().map(|turns| turns.each_ref().map(|turn| f64::from(p99(of(turn))))).collect();
        add_latency(figures, name, &ratios);
    }
    Ok(())
}

fn p99(latencies: &[u32]) -> u32 {
    let mut sorted = latencies.to_vec();
    sorted.sort_unstable();
    percentile(&sorted, 0.99)
}

/// Scrubs the device again and again while `is_on`; returns the bytes that were looked at.
fn scrub(served: &Served, is_on: &AtomicBool, is_ended: &AtomicBool) -> Result<u64> {
    let folder = tempfile::tempdir().map_err(|error| {
        Error::new(ErrorKind::System, "no folder for the state of a scrub").caused_by(error)
    })?;
    let scrub = Arc::new(Scrub::open(folder.path(), (0, 0), "bench".to_owned()));
    let act = |action| scrub.change(&ScrubRequest { action, ..ScrubRequest::default() }, DEVICE, now_s());
    std::thread::scope(|scope| {
        // The thread of a pass ends with a pause, and with the pass.
        scope.spawn(|| {
            let (open, load) = (|| served.run.verifier(), || served.run.load());
            // The metadata is looked at before the first turn.
            let metadata = |_: &mut VerifiedMetadata, _: &dyn Fn() -> bool| Ok(true);
            let method = &String::new;
            let around =
                Surroundings { open: &open, size: &|| DEVICE, load: &load, method, metadata: &metadata };
            while !is_ended.load(Ordering::SeqCst) {
                match scrub.take_turn(now_s()) {
                    Some(turn) => turn.run(&around),
                    None => std::thread::sleep(Duration::from_millis(1)),
                }
            }
        });
        let result = (|| -> Result<()> {
            act(ScrubAction::Start)?;
            let mut was_on = true;
            while !is_ended.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
                let info = scrub.info(DEVICE, now_s());
                let on = is_on.load(Ordering::SeqCst);
                if info.state == ScrubState::Idle {
                    act(ScrubAction::Start)?;
                    was_on = true;
                } else if on != was_on {
                    act(if on { ScrubAction::Resume } else { ScrubAction::Pause })?;
                    was_on = on;
                }
            }
            Ok(())
        })();
        is_ended.store(true, Ordering::SeqCst);
        scrub.begin_end();
        result
    })?;
    let info = scrub.info(DEVICE, now_s());
    match info.found_total.is_empty() {
        true => Ok(info.verified_bytes_total),
        false => Err(Error::new(ErrorKind::Damaged, "something is found on a good disk")),
    }
}

/// A client with one request at a time.
struct Client<'a> {
    served: &'a Served,
    queue: DeviceQueue<ProcessEnvironment>,
    random: SmallRng,
    bytes: AlignedBuffer,
    id: u64,
}

impl<'a> Client<'a> {
    fn new(served: &'a Served) -> Result<Self> {
        let (queue, random) = (served.run.device().device_queue()?, SmallRng::seed_from_u64(7));
        Ok(Self { served, queue, random, bytes: AlignedBuffer::zeroed(BLOCK as usize), id: 0 })
    }

    /// Writes the first half of the device, and waits until the disk has it.
    fn fill(&mut self) -> Result<()> {
        for at in (0..DEVICE / 2).step_by(BLOCK as usize) {
            self.write(at)?;
        }
        self.drain()
    }

    fn drain(&self) -> Result<()> {
        let run = &self.served.run;
        let Some(cache) = run.cache() else { return Ok(()) };
        let proceed = &mut |_: &_| ControlFlow::Continue(());
        let drained = run.until_drained(DrainRequest::new(&cache), Duration::from_secs(60), proceed);
        let failed = |why| Error::new(ErrorKind::Backing, format!("the cache was not drained: {why:?}"));
        drained.map(drop).map_err(failed)
    }

    fn turn(&mut self, length: Duration) -> Result<Latencies> {
        let (mut found, begun) = (Latencies::default(), Instant::now());
        while begun.elapsed() < length {
            let at = self.random.random_range(0..DEVICE / 2 / BLOCK) * BLOCK;
            let first = Instant::now();
            if self.random.random_ratio(3, 10) {
                self.write(at)?;
                found.cached.push(since(first));
            } else if self.random.random_ratio(1, MISS_ONE_IN) {
                self.read(at + DEVICE / 2)?;
                found.missed.push(since(first));
            } else {
                self.read(at)?;
                found.cached.push(since(first));
            }
            // A client has work of its own.
            std::thread::sleep(Duration::from_micros(20));
        }
        Ok(found)
    }

    fn write(&mut self, at: u64) -> Result<()> {
        self.id += 1;
        match self.queue.write_from(self.id, ByteRange::at(at, BLOCK), &self.bytes, false) {
            Some(result) => result,
            None => complete(&mut self.queue, self.id).map(drop),
        }
    }

    fn read(&mut self, at: u64) -> Result<()> {
        self.id += 1;
        match self.queue.read_into(self.id, ByteRange::at(at, BLOCK), &mut self.bytes) {
            Some(result) => result,
            None => complete(&mut self.queue, self.id).map(drop),
        }
    }
}
