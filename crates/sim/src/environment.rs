//! The outside of a simulated engine: numbers and clocks that a seed and a test own.

use crate::baton::{self, TurnLock};
use crate::memory::CrashMemory;
use crate::random::Seeded;
use cbd_engine::Environment;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Random numbers from a seed, and a clock that only [`advance`](Self::advance) moves.
#[derive(Debug)]
pub struct SimEnvironment {
    random: Mutex<Seeded>,
    clock_ms: AtomicU64,
}

impl SimEnvironment {
    /// The environment of one simulated process.
    #[must_use]
    pub const fn new(seed: u64, clock_ms: u64) -> Self {
        Self { random: Mutex::new(Seeded::new(seed)), clock_ms: AtomicU64::new(clock_ms) }
    }

    /// Time passes.
    pub fn advance(&self, ms: u64) {
        self.clock_ms.fetch_add(ms, Ordering::Relaxed);
    }

    /// The time, in milliseconds.
    pub fn clock_ms(&self) -> u64 {
        self.clock_ms.load(Ordering::Relaxed)
    }
}

impl Environment for SimEnvironment {
    type Memory = CrashMemory;
    type Lock = TurnLock;

    fn random(&self) -> u64 {
        self.random.lock().next()
    }

    fn wall_ms(&self) -> u64 {
        // Some day in 2026.
        1_780_000_000_000 + self.clock_ms()
    }

    fn monotonic_ms(&self) -> u64 {
        self.clock_ms()
    }

    fn before_shared_access() {
        baton::may_switch();
    }
}
