//! Recovers one crash state and compares the recovered contents with the expected ones.

use crate::actor::act_as;
use crate::disk::SimDisk;
use crate::environment::SimEnvironment;
use crate::memory::CrashMemory;
use crate::oracle::{Expectation, Violation};
use crate::process::recover_if_cached;
use crate::random::mix;
use cbd_engine::{Cache, CacheStatus, Transport};
use cbd_types::{BackendId, ByteRange, Epoch};
use std::sync::Arc;

/// The expected contents, independent of the outcome of the open lines.
pub(crate) struct Expected<'a> {
    pub(crate) backend: BackendId,
    pub(crate) contents: &'a Expectation,
    /// The last drained epoch that a status had reported: the backing device held everything up to it.
    pub(crate) drained: Epoch,
    pub(crate) clock_ms: u64,
    /// Another backend with a cache, if there is one.
    pub(crate) beside: Option<Beside>,
}

/// The result of a recovery.
pub(super) struct Recovered {
    /// Without a cache there is none.
    pub(super) status: Option<CacheStatus>,
    /// A digest of all bytes that were compared.
    pub(super) contents: u64,
}

impl Recovered {
    /// A digest of everything that a client can observe.
    pub(super) fn digest(&self) -> u64 {
        let Some(status) = &self.status else { return self.contents };
        let seen = [
            status.epoch.0,
            status.drained_epoch.0,
            status.dirty_bytes,
            status.dirty_records,
            u64::from(status.free_segments),
            u64::from(status.backing_is_consistent),
            status.damaged.len() as u64,
        ];
        seen.into_iter().fold(self.contents, |digest, number| mix(digest ^ mix(number.wrapping_add(1))))
    }
}

impl Expected<'_> {
    /// Recovers the cache in `memory` over `disk`, and compares.
    pub(super) fn check(
        &self,
        seed: u64,
        memory: &CrashMemory,
        disk: &SimDisk,
    ) -> Result<Recovered, Violation> {
        let environment = Arc::new(SimEnvironment::new(seed, self.clock_ms));
        let (transport, cache) = recover_if_cached(&environment, memory, self.backend)
            .map_err(|error| Violation(format!("the cache does not open: {error}")))?;
        if let Some(beside) = &self.beside {
            beside.check(&transport, disk)?;
        }
        let Some(cache) = cache else {
            let contents = self.contents.compare(|range, into| {
                disk.peek(range.start, into);
                Ok(())
            })?;
            return Ok(Recovered { status: None, contents });
        };
        let status = cache.status();
        if status.drained_epoch < self.drained {
            return Err(Violation(format!("drained fell from {} to {}", self.drained, status.drained_epoch)));
        }
        if !status.damaged.is_empty() {
            return Err(Violation(format!("recovery found damage: {:?}", status.damaged)));
        }
        let contents = self.contents.compare(|range, into| read_all(&cache, range, into, disk))?;
        Ok(Recovered { status: Some(status), contents })
    }
}

/// The expected contents of another backend on the region.
pub(crate) struct Beside {
    pub(crate) backend: BackendId,
    pub(crate) contents: Expectation,
}

impl Beside {
    fn check(&self, transport: &Transport<SimEnvironment>, disk: &SimDisk) -> Result<(), Violation> {
        let Some(disk) = disk.beside() else { return Ok(()) };
        act_as(0);
        let cache = transport
            .open_cache(self.backend)
            .map_err(|error| Violation(format!("the other cache does not open: {error}")))?;
        let read = |range, into: &mut [u8]| read_all(&cache, range, into, &disk);
        let checked = self.contents.compare(read).map(drop);
        checked.map_err(|Violation(text)| Violation(format!("in the other cache: {text}")))
    }
}

/// Reads through the engine; misses are read from the disk, and not cached.
fn read_all(
    cache: &Cache<SimEnvironment>,
    range: ByteRange,
    into: &mut [u8],
    disk: &SimDisk,
) -> Result<(), Violation> {
    // The reader acts as a different processor than the recovery: recovery must have fenced what the reader loads.
    act_as(1);
    let mut misses = Vec::new();
    cache
        .read(range, into, &mut misses)
        .map_err(|error| Violation(format!("after recovery {range} cannot be read: {error}")))?;
    for miss in misses {
        let part = (miss.range.start - range.start) as usize..(miss.range.end - range.start) as usize;
        disk.peek(miss.range.start, &mut into[part]);
        cache.cancel_fill(miss);
    }
    Ok(())
}
