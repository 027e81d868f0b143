//! What the engine needs from the outside when a tool runs it.

use cbd_engine::Environment;
use cbd_types::Pmem;
use std::marker::PhantomData;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The environment of an engine in a tool, over memory `P`.
#[derive(Debug)]
pub struct ToolEnvironment<P> {
    started: Instant,
    memory: PhantomData<fn() -> P>,
}

impl<P> ToolEnvironment<P> {
    /// An environment whose monotonic clock begins now.
    #[must_use]
    pub fn new() -> Self {
        Self { started: Instant::now(), memory: PhantomData }
    }
}

impl<P> Default for ToolEnvironment<P> {
    fn default() -> Self {
        Self::new()
    }
}

impl<P: Pmem + 'static> Environment for ToolEnvironment<P> {
    type Memory = P;
    type Lock = parking_lot::RawMutex;

    fn random(&self) -> u64 {
        rand::random()
    }

    fn wall_ms(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        since.map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
    }

    fn monotonic_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}
