//! A backing device that records its operations, for tests and for debugging.
//!
//! Invariants: operations and results pass unchanged; the record is bounded, and counts discarded entries; the first
//! operation that conflicts with another one in flight is always recorded.
//!
//! Elsewhere: the expected operations.

use crate::ops::{OpKind, range_of};
use cbd_backing::{Backing, Identity, PollableQueue};
use cbd_types::backing::BackingDone;
use cbd_types::{BackingGeometry, BackingOp, BackingQueue, ByteRange, ErrorKind, OpToken, Result};
use std::collections::{HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Default number of recorded entries.
pub const CAPACITY: usize = 1 << 16;

/// One event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceEntry {
    /// The operation's number, in order of submission over all queues.
    pub number: u64,
    /// Its kind.
    pub kind: OpKind,
    /// Its range; empty for a flush.
    pub range: ByteRange,
    /// `None` for its submission; for its completion, whether it succeeded.
    pub ended: Option<std::result::Result<(), ErrorKind>>,
}

#[derive(Debug, Default)]
struct Memory {
    entries: VecDeque<TraceEntry>,
    capacity: usize,
    forgotten: u64,
    next: u64,
    in_flight: HashMap<u64, (OpKind, ByteRange)>,
    conflict: Option<(TraceEntry, TraceEntry)>,
}

impl Memory {
    fn add(&mut self, entry: TraceEntry) {
        if self.entries.len() >= self.capacity {
            self.entries.pop_front();
            self.forgotten += 1;
        }
        self.entries.push_back(entry);
    }

    fn begin(&mut self, kind: OpKind, range: ByteRange) -> u64 {
        let entry = TraceEntry { number: self.next, kind, range, ended: None };
        self.next += 1;
        if self.conflict.is_none() {
            let other = self
                .in_flight
                .iter()
                .find(|(_, (other, taken))| taken.overlaps(&range) && (kind.changes() || other.changes()));
            self.conflict = other
                .map(|(&number, &(kind, range))| (TraceEntry { number, kind, range, ended: None }, entry));
        }
        self.in_flight.insert(entry.number, (kind, range));
        self.add(entry);
        entry.number
    }

    fn end(&mut self, number: u64, result: &Result<()>) {
        if let Some((kind, range)) = self.in_flight.remove(&number) {
            let ended = Some(result.as_ref().copied().map_err(cbd_types::Error::kind));
            self.add(TraceEntry { number, kind, range, ended });
        }
    }
}

/// Reads the record of a [`Traced`] device, during and after its use.
#[derive(Clone, Debug, Default)]
pub struct TraceHandle(Arc<Mutex<Memory>>);

impl TraceHandle {
    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The recorded events, in order.
    #[must_use]
    pub fn entries(&self) -> Vec<TraceEntry> {
        self.memory().entries.iter().copied().collect()
    }

    /// Number of entries that were discarded for later ones.
    #[must_use]
    pub fn forgotten(&self) -> u64 {
        self.memory().forgotten
    }

    /// Clears the record; operations in flight are still tracked.
    pub fn clear(&self) {
        let mut memory = self.memory();
        memory.entries.clear();
        memory.forgotten = 0;
        memory.conflict = None;
    }

    /// The first conflict: two overlapping operations in flight of which one changes the device.
    #[must_use]
    pub fn conflict(&self) -> Option<(TraceEntry, TraceEntry)> {
        self.memory().conflict
    }
}

/// A backing device that is traced.
pub struct Traced<B> {
    inner: B,
    handle: TraceHandle,
}

impl<B: Backing> Traced<B> {
    /// `inner`, recording the last [`CAPACITY`] events.
    pub fn new(inner: B) -> Self {
        Self::with_capacity(inner, CAPACITY)
    }

    /// `inner`, recording the last `capacity` events.
    pub fn with_capacity(inner: B, capacity: usize) -> Self {
        let handle = TraceHandle::default();
        handle.memory().capacity = capacity.max(1);
        Self { inner, handle }
    }

    /// A handle that reads the record.
    pub fn handle(&self) -> TraceHandle {
        self.handle.clone()
    }
}

impl<B: Backing> Backing for Traced<B> {
    fn geometry(&self) -> BackingGeometry {
        self.inner.geometry()
    }

    fn identity(&self) -> Identity {
        self.inner.identity()
    }

    fn open_queue(&self, depth: usize) -> Result<Box<dyn PollableQueue>> {
        let inner = self.inner.open_queue(depth)?;
        let (tokens, came) = (HashMap::new(), Vec::new());
        Ok(Box::new(TracedQueue { inner, handle: self.handle.clone(), tokens, came }))
    }

    fn describe(&self) -> String {
        format!("{}, traced", self.inner.describe())
    }
}

struct TracedQueue {
    inner: Box<dyn PollableQueue>,
    handle: TraceHandle,
    tokens: HashMap<u64, OpToken>,
    came: Vec<BackingDone>,
}

impl TracedQueue {
    fn complete(&mut self, done: &mut Vec<BackingDone>) {
        for mut one in self.came.drain(..) {
            let number = one.token.0;
            if let Some(token) = self.tokens.remove(&number) {
                self.handle.memory().end(number, &one.result);
                one.token = token;
                done.push(one);
            }
        }
    }
}

impl BackingQueue for TracedQueue {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        let number = self.handle.memory().begin(OpKind::of(&op), range_of(&op));
        self.tokens.insert(number, token);
        self.inner.submit(OpToken(number), op);
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        self.inner.poll(&mut self.came);
        self.complete(done);
    }

    fn wait(&mut self, done: &mut Vec<BackingDone>) {
        self.inner.wait(&mut self.came);
        self.complete(done);
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }
}

impl PollableQueue for TracedQueue {
    fn wait_descriptor(&self) -> RawFd {
        self.inner.wait_descriptor()
    }
}

impl Drop for TracedQueue {
    fn drop(&mut self) {
        let mut memory = self.handle.memory();
        for number in self.tokens.keys() {
            memory.in_flight.remove(number);
        }
    }
}
