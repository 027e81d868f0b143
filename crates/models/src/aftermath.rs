//! Copies of the world that end by a power cut or a process crash at one moment. The engine opens the copy again, and
//! its contents are compared with the oracle. The scene itself continues.
//!
//! Invariants: one thread runs, so the scheduler has no influence here.

use crate::setup::must;
use crate::stage::Written;
use cbd_engine::{CacheStatus, CachedState};
use cbd_sim::process::{Outlook, Process};
use cbd_sim::{CrashMemory, Keep, Oracle, Seeded, SimDisk, SimEnvironment, Violation};
use cbd_types::{AlignedBuffer, BackendId, ByteRange, Completion, ErrorKind, Operation, Request, Result};
use std::sync::Arc;

/// Maximum number of rounds that a correct engine takes; the limit is far above the need of any scene.
const ROUNDS_MAX: u32 = 100_000;

/// A process of one thread over a region and a disk.
pub(crate) struct Life {
    environment: Arc<SimEnvironment>,
    memory: CrashMemory,
    disk: SimDisk,
    process: Process,
    backend: BackendId,
}

impl Life {
    /// Opens the cache, which recovers it.
    pub(crate) fn open(memory: CrashMemory, disk: SimDisk, backend: BackendId, seed: u64) -> Self {
        let environment = Arc::new(SimEnvironment::new(seed, 0));
        let process = must(Process::open(Arc::clone(&environment), &memory, &disk, backend, 1, 4));
        Self { environment, memory, disk, process, backend }
    }

    pub(crate) const fn memory(&self) -> &CrashMemory {
        &self.memory
    }

    pub(crate) const fn disk(&self) -> &SimDisk {
        &self.disk
    }

    pub(crate) fn status(&self) -> CacheStatus {
        self.process.cache().status()
    }

    pub(crate) fn extents(&self, range: ByteRange) -> Vec<CachedState> {
        self.process.cache().extents(range)
    }

    /// Cuts the power, and opens the region in another process.
    fn after_power_cut(self, seed: u64) -> Self {
        self.disk.power_cut(seed);
        Self::open(self.memory.power_cut(seed, Keep::Any), self.disk, self.backend, seed)
    }

    /// Submits a request and waits until it completes; returns what it read.
    pub(crate) fn ask(&mut self, operation: Operation, range: ByteRange, data: &[u8]) -> Result<Vec<u8>> {
        let buffer = match operation {
            Operation::Read => AlignedBuffer::zeroed(range.len() as usize),
            _ => AlignedBuffer::from_slice(data),
        };
        let mut done: Vec<Completion> = Vec::new();
        self.process.submit(0, Request::unmarked(1, operation, range, false, buffer), &mut done);
        for _ in 0..ROUNDS_MAX {
            if let Some(completion) = done.pop() {
                // The engine caches the data only after it has sent the answer.
                self.process.poll(0, &mut done);
                return completion.result.map(|()| completion.buffer.to_vec());
            }
            self.turn(&mut done);
        }
        panic!("{operation:?} of {range} never ends: {}", self.process.describe());
    }

    fn turn(&mut self, done: &mut Vec<Completion>) {
        let moved = self.process.poll(0, done);
        if !self.process.maintain() && !moved {
            match self.process.outlook() {
                Outlook::Work => {}
                Outlook::Sleeps(until) => {
                    self.environment.advance(until.saturating_sub(self.environment.clock_ms()));
                }
                Outlook::Stuck => panic!("no thread can continue: {}", self.process.describe()),
            }
        }
    }

    /// Writes all dirty data back, and continues until no work is left.
    pub(crate) fn drain(&mut self) {
        self.process.cache().request_drain();
        for _ in 0..ROUNDS_MAX {
            self.process.maintain();
            let rests = !matches!(self.process.outlook(), Outlook::Work);
            if rests && self.status().dirty_records == 0 {
                return;
            }
            if rests {
                self.turn(&mut Vec::new());
            }
        }
        panic!("the cache is never drained: {}", self.process.describe());
    }
}

/// Ends a copy of the world and checks the recovered contents.
///
/// # Panics
/// When the contents are not legal.
pub(crate) fn check(
    memory: &CrashMemory,
    disk: &SimDisk,
    oracle: &Oracle,
    backend: BackendId,
    flushed: &[Written],
    seed: u64,
) -> &'static str {
    let mut random = Seeded::new(seed);
    let mut oracle = oracle.clone();
    let by_power = random.chance(600);
    let (memory, disk) = (memory.fork(), disk.fork());
    let memory = if by_power {
        disk.power_cut(seed);
        memory.power_cut(seed, Keep::Any)
    } else {
        disk.process_crash(seed);
        memory.process_crash()
    };
    if !flushed.is_empty() && random.chance(300) {
        check_damage(memory, disk, &mut oracle, backend, *random.pick(flushed));
        return "damaged";
    }
    let image = disk.contents();
    let mut life = Life::open(memory, disk, backend, seed);
    let status = life.status();
    assert!(status.damaged.is_empty(), "recovery found damage: {:?}", status.damaged);
    if status.backing_is_consistent {
        hold(oracle.moment_of(&image, 0).map(|_| ()));
    }
    hold(settle(&mut oracle, &mut life));
    if !by_power {
        // Recovery has made all data durable that it relied on: a power cut at this moment loses none of it.
        let mut life = life.after_power_cut(seed);
        hold(settle(&mut oracle, &mut life));
    }
    if by_power { "power cuts" } else { "process crashes" }
}

/// Damages the data of a write that a flush has covered. The damage must be detected and not be taken for a write
/// that was never acknowledged, even if it is the last write.
fn check_damage(
    memory: CrashMemory,
    disk: SimDisk,
    oracle: &mut Oracle,
    backend: BackendId,
    written: Written,
) {
    let (range, content) = written;
    let sector = oracle.payload(ByteRange::at(range.start, 512), content);
    if let Some(offset) = offset_of(&memory, &sector) {
        memory.flip(offset + 100, 3);
    }
    let mut life = Life::open(memory, disk, backend, 1);
    let submitted = oracle.now();
    match life.ask(Operation::Read, range, &[]) {
        Ok(bytes) => hold(oracle.check_read(range, submitted, &bytes)),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Media, "{error}"),
    }
}

/// The offset at which the region holds `sector`.
pub(crate) fn offset_of(memory: &CrashMemory, sector: &[u8]) -> Option<u64> {
    let image = memory.image();
    image.chunks_exact(512).position(|bytes| bytes == sector).map(|number| number as u64 * 512)
}

/// Decides the open changes, and reads everything that was ever changed.
fn settle(oracle: &mut Oracle, life: &mut Life) -> std::result::Result<(), Violation> {
    oracle.settle(|range| must(life.ask(Operation::Read, range, &[])))?;
    // After megabytes were zeroed, reading block by block would dominate the time of the scene.
    let blocks = oracle.changed(4096);
    let ranges = if blocks.len() > 256 { oracle.changed(256 << 10) } else { blocks };
    for range in ranges {
        let submitted = oracle.now();
        let bytes = must(life.ask(Operation::Read, range, &[]));
        oracle.check_read(range, submitted, &bytes)?;
    }
    Ok(())
}

/// Ends the model on a violation.
pub(crate) fn hold(verdict: std::result::Result<(), Violation>) {
    if let Err(violation) = verdict {
        panic!("{violation}");
    }
}
