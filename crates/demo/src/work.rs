//! Checksummed writes by several threads at once, while another thread watches them and kills the daemon.
//!
//! Invariants: each thread has blocks of its own and one write in flight, so the legal content after a crash is
//! known exactly. A write was in flight at the kill if it was issued before the kill and never acknowledged.

use crate::block::{BLOCK, Log, Random};
use crate::files::Files;
use crate::target::{Io, Sync, Target};
use cbd_types::{AlignedBuffer, Error, Result};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Threads that write.
pub const WRITERS: u32 = 8;

/// The logs of all writes to a device.
#[derive(Debug)]
pub struct Logs {
    /// The blocks of the working set.
    pub blocks: Log,
    /// The files, where there is a file system.
    pub files: Files,
}

impl Logs {
    /// Logs without writes.
    pub fn new(slots: u32, seed: u64) -> Self {
        Self { blocks: Log::new(slots, seed), files: Files::new(!seed) }
    }

    /// Restarts the count of acknowledged writes.
    pub fn count_from_here(&self) {
        self.blocks.count_from_here();
        self.files.log().count_from_here();
    }

    /// Acknowledged writes and saves.
    pub fn acknowledged(&self) -> u64 {
        self.blocks.acknowledged_total() + self.files.log().acknowledged_total()
    }
}

/// The state that the writing threads and the watching thread share.
#[derive(Debug, Default)]
pub struct Gauge {
    stop: AtomicBool,
    acknowledged: AtomicU64,
    in_flight: AtomicU32,
    failed: AtomicU32,
    slowest_ns: AtomicU64,
}

impl Gauge {
    /// Stops the threads when the result is dropped.
    pub const fn stop_on_drop(&self) -> StopOnDrop<'_> {
        StopOnDrop(self)
    }

    /// The duration of the slowest step that has succeeded since the last call.
    pub fn take_slowest(&self) -> Duration {
        Duration::from_nanos(self.slowest_ns.swap(0, Ordering::SeqCst))
    }

    /// Writes acknowledged so far.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// Writes in flight now.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.load(Ordering::SeqCst)
    }

    /// Threads that ended with an error.
    pub fn failed(&self) -> u32 {
        self.failed.load(Ordering::SeqCst)
    }
}

/// The end of a writing thread.
#[derive(Debug)]
pub struct Ended {
    /// The write that was never acknowledged: the time of its issue, and its error.
    pub unacknowledged: Option<(Instant, Error)>,
}

/// Writes until `watch` returns; returns its result and the end of each thread.
///
/// # Errors
/// The error of `watch`, or of a device that cannot be opened.
pub fn write_while<T>(
    target: &Target,
    logs: &Logs,
    seed: u64,
    watch: impl FnOnce(&Gauge) -> Result<T>,
) -> Result<(T, Vec<Ended>)> {
    let gauge = Gauge::default();
    let paths: Vec<Io> = (0..WRITERS).map(|_| target.open(Sync::Durable)).collect::<Result<_>>()?;
    let (watched, ended) = std::thread::scope(|scope| {
        // Stops the threads also if `watch` panics: the scope would wait for them forever.
        let stop = gauge.stop_on_drop();
        let gauge = &gauge;
        let saver = target.root().map(|root| scope.spawn(|| repeat(gauge, || logs.files.save(root))));
        let writers: Vec<_> = (0..WRITERS)
            .zip(paths)
            .map(|(writer, io)| scope.spawn(move || write(io, &logs.blocks, seed, writer, gauge)))
            .collect();
        let watched = watch(gauge);
        drop(stop);
        let ended: Vec<_> = writers.into_iter().chain(saver).map(|writer| writer.join()).collect();
        (watched, ended)
    });
    let watched = watched?;
    let ended = ended
        .into_iter()
        .map(|ended| {
            ended.map_err(|_| {
                Error::new(cbd_types::ErrorKind::System, "a thread of the demonstration panicked")
            })
        })
        .collect::<Result<_>>()?;
    Ok((watched, ended))
}

/// Stops the threads of a [`Gauge`] when it is dropped.
pub struct StopOnDrop<'a>(&'a Gauge);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::SeqCst);
    }
}

fn write(mut io: Io, log: &Log, seed: u64, writer: u32, gauge: &Gauge) -> Ended {
    let mut random = Random::new(seed.wrapping_add(u64::from(writer) << 40));
    let mut buffer = AlignedBuffer::zeroed(BLOCK);
    repeat(gauge, || {
        let slot = random.below(log.slots() / WRITERS) * WRITERS + writer;
        log.issue(slot, &mut buffer);
        io.write(slot, &buffer)?;
        log.acknowledge(slot);
        Ok(())
    })
}

/// Repeats `step` until it fails or the threads are told to stop.
pub fn repeat(gauge: &Gauge, mut step: impl FnMut() -> Result<()>) -> Ended {
    while !gauge.stop.load(Ordering::SeqCst) {
        gauge.in_flight.fetch_add(1, Ordering::SeqCst);
        let issued = Instant::now();
        let result = step();
        match &result {
            Ok(()) => {
                let duration = u64::try_from(issued.elapsed().as_nanos()).unwrap_or(u64::MAX);
                gauge.slowest_ns.fetch_max(duration, Ordering::SeqCst);
                gauge.acknowledged.fetch_add(1, Ordering::SeqCst)
            }
            Err(_) => u64::from(gauge.failed.fetch_add(1, Ordering::SeqCst)),
        };
        gauge.in_flight.fetch_sub(1, Ordering::SeqCst);
        if let Err(error) = result {
            return Ended { unacknowledged: Some((issued, error)) };
        }
    }
    Ended { unacknowledged: None }
}
