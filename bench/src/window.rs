//! Two contestants in one mapping, and a record of the offsets at which the first one stored its data.
//!
//! A copy that is to be the limit of an engine must use the offsets that the engine chose, since a sequential and a random
//! sequence of destinations differ in cost. The engine's half of the mapping can therefore record its data stores during a turn
//! that is not timed, and the copy repeats them in the other half.
//!
//! Invariants: while no stores are recorded, a store through a window costs one addition and one plain load more than the store
//! itself.

use cbd_types::pmem::MediaError;
use cbd_types::{Durability, Pmem};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A part of a mapping that acts as a memory of its own.
#[derive(Debug)]
pub struct Window<M> {
    memory: Arc<M>,
    base: u64,
    length: u64,
    log: Arc<StoreLog>,
}

/// The data stores of one window.
#[derive(Debug, Default)]
pub struct StoreLog {
    on: AtomicBool,
    stores: Mutex<Vec<Store>>,
}

/// A data store: offset in the window, and length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Store {
    /// The offset of the first byte in the window.
    pub at: u64,
    /// Number of bytes.
    pub length: usize,
}

impl StoreLog {
    /// Records the stores that are executed while `work` runs.
    pub fn record<T>(&self, work: impl FnOnce() -> T) -> (T, Vec<Store>) {
        self.on.store(true, Ordering::Relaxed);
        let done = work();
        self.on.store(false, Ordering::Relaxed);
        (done, std::mem::take(&mut self.stores.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    #[cold]
    fn note(&self, at: u64, length: usize) {
        self.stores.lock().unwrap_or_else(PoisonError::into_inner).push(Store { at, length });
    }
}

impl<M: Pmem> Window<M> {
    /// Creates a window of the `length` bytes of `memory` at `base`.
    ///
    /// # Panics
    /// If the window extends past the end of the memory, which is a bug of the benchmark.
    pub fn new(memory: Arc<M>, base: u64, length: u64) -> Self {
        assert!(base + length <= memory.len(), "a window lies inside its memory");
        Self { memory, base, length, log: Arc::default() }
    }

    /// Stores to every page once, so that no turn includes page faults.
    pub fn fill(&self) {
        let page = [0; 4096];
        for at in (0..self.length).step_by(page.len()) {
            self.store(at, &page);
        }
        self.fence();
    }

    /// The log that records data stores.
    pub fn log(&self) -> Arc<StoreLog> {
        Arc::clone(&self.log)
    }
}

impl<M: Pmem> Pmem for Window<M> {
    fn len(&self) -> u64 {
        self.length
    }

    fn durability(&self) -> Durability {
        self.memory.durability()
    }

    fn store(&self, at: u64, from: &[u8]) {
        self.memory.store(self.base + at, from);
    }

    fn store_summed(&self, at: u64, from: &[u8], first: usize, checksums: &mut [u32]) {
        if self.log.on.load(Ordering::Relaxed) {
            self.log.note(at, from.len());
        }
        self.memory.store_summed(self.base + at, from, first, checksums);
    }

    fn store_line(&self, at: u64, line: &[u8; 64]) {
        self.memory.store_line(self.base + at, line);
    }

    fn fence(&self) {
        self.memory.fence();
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MediaError> {
        self.memory.load(self.base + at, into)
    }

    fn load_summed(&self, at: u64, into: &mut [u8]) -> Result<u32, MediaError> {
        self.memory.load_summed(self.base + at, into)
    }

    fn write_back(&self, at: u64, length: u64) {
        self.memory.write_back(self.base + at, length);
    }

    fn prefetch(&self, at: u64) {
        self.memory.prefetch(self.base + at);
    }

    fn describe(&self) -> String {
        self.memory.describe()
    }
}
