//! What the engine needs from the outside: random numbers, clocks, and how its memory and locks are made.

use cbd_engine::Environment;
use cbd_pmem::Mapping;
use cbd_types::Pmem;
use std::marker::PhantomData;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The environment of an engine that runs in a process on a real machine, over memory `P`.
#[derive(Debug)]
pub struct ProcessEnvironment<P = Mapping> {
    started: Instant,
    memory: PhantomData<fn() -> P>,
}

impl<P> ProcessEnvironment<P> {
    /// An environment whose monotonic clock begins now.
    #[must_use]
    pub fn new() -> Self {
        Self { started: Instant::now(), memory: PhantomData }
    }
}

impl<P> Default for ProcessEnvironment<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P: Pmem + 'static> Environment for ProcessEnvironment<P> {
    type Memory = P;
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
