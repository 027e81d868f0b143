//! What the engine needs from the outside: random numbers, clocks, and how its memory and locks are made.

use cbd_engine::Environment;
use cbd_pmem::Mapping;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The environment of an engine that runs in a process on a real machine.
#[derive(Debug)]
pub struct ProcessEnvironment {
    started: Instant,
}

impl ProcessEnvironment {
    /// An environment whose monotonic clock begins now.
    #[must_use]
    pub fn new() -> Self {
        Self { started: Instant::now() }
    }
}

impl Default for ProcessEnvironment {
    fn default() -> Self {
        Self::new()
    }
}

impl Environment for ProcessEnvironment {
    type Memory = Mapping;
    type Lock = parking_lot::RawMutex;

    fn random(&self) -> u64 {
        rand::random()
    }

    fn wall_ms(&self) -> u64 {
        wall_ms()
    }

    fn monotonic_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// Milliseconds since 1970.
#[must_use]
pub fn wall_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}
