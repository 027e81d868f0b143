//! Another backend on the region of a world: its own disk, cache and client. Segments change hands between both caches.
//!
//! Invariants: it has one request at a time, which completes before the next event of the world, unless the process crashes.

use super::WorldOptions;
use crate::actor::act_as;
use crate::disk::SimDisk;
use crate::environment::SimEnvironment;
use crate::explorer::Beside;
use crate::oracle::{Moment, OpenChange, Oracle, Violation};
use crate::process::{Caching, Client};
use crate::random::Seeded;
use cbd_device::Device;
use cbd_engine::{BackendSpec, Cache, Settings, Transport};
use cbd_types::{AlignedBuffer, BackendId, ByteRange, Error, HostId, Operation, Request};
use std::sync::Arc;

/// Size of its device in bytes.
const SIZE: u64 = 1 << 20;
/// Sector in bytes.
const SECTOR: u32 = 512;
/// Segments of its cache when it is made.
pub(super) const SEGMENTS: u32 = 14;
/// Segments of the region that no cache has at first.
pub(super) const SPARE: u32 = 2;
/// The actor of its client.
const CLIENT: u32 = 500;
/// Steps without an end after which a request counts as stuck.
const STEPS_MAX: u32 = 1_000_000;

/// The other backend.
pub(super) struct Neighbour {
    pub(super) backend: BackendId,
    disk: SimDisk,
    oracle: Oracle,
    running: Option<(Caching, Client)>,
    next_id: u64,
}

/// A request that has ended.
pub(super) enum Ended {
    Read,
    Flush(Moment),
    Write(OpenChange),
}

fn stuck() -> String {
    String::from("a request of the other backend does not complete")
}

impl Neighbour {
    /// The disk of such a backend.
    pub(super) fn new_disk(seed: u64) -> SimDisk {
        SimDisk::new(SimDisk::ordinary(SIZE, SECTOR), seed)
    }

    /// Makes the backend and its cache.
    pub(super) fn make(
        options: &WorldOptions,
        transport: &Transport<SimEnvironment>,
        disk: SimDisk,
    ) -> Result<Self, Error> {
        let backend = transport.create_backend(&BackendSpec {
            host: HostId(0),
            path: String::from("/simulated/other"),
            identity: String::from("other"),
            size: SIZE,
            sector: SECTOR,
            cache_bytes: Some(u64::from(SEGMENTS) * options.segment_size),
            lanes_max: 1,
            handlers: 1,
            data_crc: true,
            settings: Settings { consistency: options.consistency, ..Settings::default() },
        })?;
        let oracle = Oracle::new(SIZE, SECTOR, (options.segment_size / 4).min(1 << 20));
        Ok(Self { backend, disk, oracle, running: None, next_id: 0 })
    }

    /// The same backend in a world that goes on with `disk`.
    pub(super) fn branch(&self, disk: SimDisk) -> Self {
        Self { backend: self.backend, disk, oracle: self.oracle.clone(), running: None, next_id: 0 }
    }

    /// What must be there.
    pub(super) fn expected(&self, unit: u64) -> Beside {
        Beside { backend: self.backend, contents: self.oracle.expectation(unit) }
    }

    /// Opens the cache in a new process.
    pub(super) fn open(&mut self, transport: &Arc<Transport<SimEnvironment>>) -> Result<(), Error> {
        act_as(0);
        let cache = transport.open_cache(self.backend)?;
        let device = Arc::new(Device::cached(Arc::clone(&cache), self.disk.geometry()));
        let client = Client::new(&device, &self.disk, 4);
        self.running = Some((Caching::new(cache, &self.disk, 4), client));
        Ok(())
    }

    /// The process has ended.
    pub(super) fn end(&mut self) {
        self.running = None;
    }

    /// Its cache, while it is open.
    pub(super) fn cache(&self) -> Option<Arc<Cache<SimEnvironment>>> {
        self.running.as_ref().map(|(caching, _)| Arc::clone(caching.cache()))
    }

    /// The background worker takes a step, if it was woken.
    pub(super) fn maintain(&mut self, clock_ms: u64) -> bool {
        self.running.as_mut().is_some_and(|(caching, _)| caching.step_if_woken(&self.disk, clock_ms))
    }

    /// Submits a request, and waits for its end.
    fn ask(
        &mut self,
        environment: &SimEnvironment,
        operation: Operation,
        range: ByteRange,
        buffer: AlignedBuffer,
    ) -> Result<AlignedBuffer, String> {
        self.next_id += 1;
        let request = Request::unmarked(self.next_id, operation, range, false, buffer);
        let Some((caching, client)) = &mut self.running else { return Err(String::from("it does not run")) };
        let mut done = Vec::new();
        act_as(CLIENT);
        client.queue.submit(request, &mut done);
        for _ in 0..STEPS_MAX {
            if let Some(completion) = done.pop() {
                completion.result.map_err(|error| format!("{operation:?} of the other backend: {error}"))?;
                return Ok(completion.buffer);
            }
            act_as(CLIENT);
            let polled = client.poll(&self.disk, &mut done);
            if !polled && !caching.step_if_woken(&self.disk, environment.clock_ms()) {
                environment.advance(1);
            }
        }
        Err(stuck())
    }

    /// One random request of its client. [`note`](Self::note) notes its end.
    pub(super) fn turn(
        &mut self,
        environment: &SimEnvironment,
        random: &mut Seeded,
    ) -> Result<Ended, String> {
        let sector = u64::from(SECTOR);
        let length = *random.pick(&[512, 4096, 4096, 16 << 10]);
        let start = random.below((SIZE - length) / sector) * sector;
        let range = ByteRange::at(start, length);
        match random.below(10) {
            0 => {
                let submitted = self.oracle.now();
                self.ask(environment, Operation::Flush, ByteRange::at(0, 0), AlignedBuffer::default())?;
                Ok(Ended::Flush(submitted))
            }
            1 | 2 => self.check(environment, range).map(|()| Ended::Read),
            _ => {
                let content = self.oracle.fresh_content();
                let buffer = AlignedBuffer::from_slice(&self.oracle.payload(range, content));
                let change = self.oracle.submit(range, content);
                self.ask(environment, Operation::Write, range, buffer)?;
                Ok(Ended::Write(change))
            }
        }
    }

    /// Its client is told that a request has ended.
    pub(super) fn note(&mut self, ended: Ended) {
        match ended {
            Ended::Read => {}
            Ended::Flush(submitted) => self.oracle.flushed(submitted),
            Ended::Write(change) => self.oracle.complete(change, false),
        }
    }

    fn read(&mut self, environment: &SimEnvironment, range: ByteRange) -> Result<Vec<u8>, String> {
        let buffer = AlignedBuffer::zeroed(range.len() as usize);
        self.ask(environment, Operation::Read, range, buffer).map(|buffer| buffer.to_vec())
    }

    fn check(&mut self, environment: &SimEnvironment, range: ByteRange) -> Result<(), String> {
        let submitted = self.oracle.now();
        let bytes = self.read(environment, range)?;
        let verdict = self.oracle.check_read(range, submitted, &bytes);
        verdict.map_err(|Violation(text)| format!("in the other cache: {text}"))
    }

    /// Determines the outcome of the request that a crash interrupted, and compares everything.
    pub(super) fn settle(&mut self, environment: &SimEnvironment) -> Result<(), String> {
        let mut oracle = self.oracle.clone();
        let mut failed = None;
        let verdict = oracle.settle(|range| {
            self.read(environment, range).unwrap_or_else(|error| {
                failed = Some(error);
                vec![0; range.len() as usize]
            })
        });
        if let Some(error) = failed {
            return Err(error);
        }
        verdict.map_err(|Violation(text)| format!("in the other cache: {text}"))?;
        self.oracle = oracle;
        self.check_changed(environment)
    }

    /// Compares everything that was ever changed.
    pub(super) fn check_changed(&mut self, environment: &SimEnvironment) -> Result<(), String> {
        let changed = self.oracle.changed(32 << 10);
        changed.into_iter().try_for_each(|range| self.check(environment, range))
    }
}
