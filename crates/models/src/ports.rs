//! The environment of an engine whose threads are scheduled: the simulator's memory, disk and clock, with a
//! point before each step.
//!
//! Invariants: a store, a fence and a load belong to the thread that executes them, as if each thread had its own
//! processor; the simulation itself is that of `cbd-sim`.

use crate::lock::ModelLock;
use crate::points::{disk_step, point};
use cbd_engine::Environment;
use cbd_sim::{CrashMemory, SimEnvironment, SimQueue, act_as};
use cbd_types::backing::BackingDone;
use cbd_types::{BackingOp, BackingQueue, Durability, MediaError, OpToken, Pmem};
use std::sync::Arc;

/// The memory.
#[derive(Clone, Debug)]
pub struct ModelMemory(pub CrashMemory);

/// Bytes of one step of a large load: other threads may store between the steps.
const PART: usize = 1024;

/// Attributes the next steps of this OS thread to the scheduled thread.
fn step() {
    point();
    act_as(1 + usize::from(shuttle::current::me()) as u32);
}

impl Pmem for ModelMemory {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn durability(&self) -> Durability {
        self.0.durability()
    }

    fn store(&self, at: u64, from: &[u8]) {
        step();
        self.0.store(at, from);
    }

    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        step();
        self.0.store_summed(at, from, first, checksums);
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        step();
        self.0.store_line(at, line);
    }

    fn fence(&self) {
        step();
        self.0.fence();
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MediaError> {
        for (at, part) in (at..).step_by(PART).zip(into.chunks_mut(PART)) {
            step();
            self.0.load(at, part)?;
        }
        Ok(())
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> Result<u32, MediaError> {
        self.load(at, into)?;
        Ok(crc_fast::crc32_iscsi(into))
    }

    fn write_back(&self, at: u64, length: u64) {
        step();
        self.0.write_back(at, length);
    }

    fn failed_at(&self) -> Option<u64> {
        self.0.failed_at()
    }
}

/// A queue to the disk.
#[derive(Debug)]
pub struct ModelQueue(pub SimQueue);

impl BackingQueue for ModelQueue {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        point();
        self.0.submit(token, op);
        disk_step();
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        point();
        if self.0.in_flight() > 0 {
            disk_step();
        }
        self.0.poll(done);
    }

    fn wait(&mut self, done: &mut Vec<BackingDone>) {
        point();
        self.0.wait(done);
    }

    fn in_flight(&self) -> usize {
        self.0.in_flight()
    }

    fn depth(&self) -> usize {
        self.0.depth()
    }
}

/// The environment.
#[derive(Debug)]
pub struct ModelEnvironment(pub Arc<SimEnvironment>);

impl Environment for ModelEnvironment {
    type Memory = ModelMemory;
    type Lock = ModelLock;

    fn random(&self) -> u64 {
        self.0.random()
    }

    fn wall_ms(&self) -> u64 {
        self.0.wall_ms()
    }

    fn monotonic_ms(&self) -> u64 {
        self.0.monotonic_ms()
    }

    fn before_shared_access() {
        point();
    }
}
