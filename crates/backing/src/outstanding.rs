//! The operations of a backing device: the age of those that are not complete, and the figures of those that are.
//!
//! A disk that hangs reports no error: an operation does not complete. [`Outstanding`] is a decorator whose queues
//! publish the age of their oldest operation, so that another thread can report how long the disk has not responded. They
//! count the operations that have ended, too, with their bytes and their latency.
//!
//! Invariants: an operation counts from before its submission until its completion is taken, also while `submit` or the
//! end of the queue blocks; reading takes no lock that a queue's thread holds during an operation, and a queue takes a lock
//! only when it is opened and when it ends; what a queue has counted stays when it ends.
//!
//! Elsewhere: the limit, and the report.

use crate::{Backing, Identity, PollableQueue};
use cbd_types::backing::{BackingDone, Origin};
use cbd_types::figures::{Histogram, HistogramCounts, add};
use cbd_types::{BackingGeometry, BackingOp, BackingQueue, OpToken, Result};
use std::collections::VecDeque;
use std::fmt;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Names of the operations in messages, by number.
const NAMES: [&str; OPERATIONS] = ["read", "write", "write-zeroes", "discard", "flush", "verify", "compare"];
/// Their names in figures.
const FIGURES: [&str; OPERATIONS] =
    ["read", "write", "write_zeroes", "discard", "flush", "verify", "compare"];
/// Number of operations.
const OPERATIONS: usize = 7;
/// Bits of a published value that hold the operation's number plus one; the higher bits are milliseconds.
const KIND_BITS: u32 = 3;

const fn kind_of(op: &BackingOp) -> usize {
    match op {
        BackingOp::Read { .. } => 0,
        BackingOp::Write { .. } => 1,
        BackingOp::WriteZeroes { .. } => 2,
        BackingOp::Discard { .. } => 3,
        BackingOp::Flush => 4,
        BackingOp::Verify { .. } => 5,
        BackingOp::Compare { .. } => 6,
    }
}

fn bytes_of(op: &BackingOp) -> u64 {
    match op {
        BackingOp::Read { buffer, .. } | BackingOp::Write { buffer, .. } => buffer.len() as u64,
        BackingOp::WriteZeroes { range }
        | BackingOp::Discard { range }
        | BackingOp::Verify { range }
        | BackingOp::Compare { range, .. } => range.len(),
        BackingOp::Flush => 0,
    }
}

/// The operations with the same name that have ended.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Ended {
    /// Their number, failed ones included.
    pub operations: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
    /// Those that failed.
    pub failed: u64,
    /// Time from the submission of each to when its completion was taken.
    pub latency: HistogramCounts,
    /// The operations and the bytes by origin, in the order of [`Origin::ALL`].
    origins: [OfOrigin; Origin::ALL.len()],
}

/// The operations with the same name and the same origin that have ended.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct OfOrigin {
    /// Their number, failed ones included.
    pub operations: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
}

impl Ended {
    /// The operations by origin.
    pub fn origins(&self) -> impl Iterator<Item = (Origin, OfOrigin)> {
        Origin::ALL.into_iter().zip(self.origins)
    }
}

/// The cells of one origin of one operation of one queue.
#[derive(Default, Debug)]
struct OriginCells {
    operations: AtomicU64,
    bytes: AtomicU64,
}

/// The cells of one operation of one queue.
#[derive(Default, Debug)]
struct Cells {
    origins: [OriginCells; Origin::ALL.len()],
    failed: AtomicU64,
    /// Few operations are of all kinds.
    latency: OnceLock<Histogram>,
}

impl Cells {
    fn count(&self, done: &BackingDone, origin: Origin, took_ns: u64) {
        let of_origin = &self.origins[origin as usize];
        add(&of_origin.operations, 1);
        self.latency.get_or_init(Histogram::default).count(took_ns, 1);
        match done.result {
            Ok(()) => add(&of_origin.bytes, bytes_of(&done.op)),
            Err(_) => add(&self.failed, 1),
        }
    }

    fn add(&self, other: &Self) {
        for (cells, other) in self.origins.iter().zip(&other.origins) {
            add(&cells.operations, other.operations.load(Ordering::Relaxed));
            add(&cells.bytes, other.bytes.load(Ordering::Relaxed));
        }
        add(&self.failed, other.failed.load(Ordering::Relaxed));
        if let Some(other) = other.latency.get() {
            self.latency.get_or_init(Histogram::default).add(other);
        }
    }

    fn read(&self, ended: &mut Ended) {
        for (of_origin, cells) in ended.origins.iter_mut().zip(&self.origins) {
            let operations = cells.operations.load(Ordering::Relaxed);
            let bytes = cells.bytes.load(Ordering::Relaxed);
            of_origin.operations += operations;
            of_origin.bytes += bytes;
            ended.operations += operations;
            ended.bytes += bytes;
        }
        ended.failed += self.failed.load(Ordering::Relaxed);
        if let Some(latency) = self.latency.get() {
            latency.read(&mut ended.latency);
        }
    }
}

/// What a queue publishes.
#[derive(Default, Debug)]
struct Published {
    /// Its oldest operation, or 0.
    oldest: AtomicU64,
    cells: [Cells; OPERATIONS],
}

/// The oldest operation that is not complete.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Oldest {
    /// The operation: `read`, `write`, `write-zeroes`, `discard`, `flush`, `verify` or `compare`.
    pub name: &'static str,
    /// Time since its submission.
    pub age: Duration,
}

/// The incomplete operations of all queues of a backing device.
#[derive(Clone, Debug)]
pub struct Outstanding(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    begun: Instant,
    queues: Mutex<Queues>,
}

/// What the queues publish.
#[derive(Default, Debug)]
struct Queues {
    open: Vec<Arc<Published>>,
    /// What queues have counted that have ended.
    ended: [Cells; OPERATIONS],
}

impl Outstanding {
    /// Wraps `inner`; operations are measured through the returned device.
    #[must_use]
    pub fn over(inner: Arc<dyn Backing>) -> (Arc<dyn Backing>, Self) {
        let outstanding = Self(Arc::new(Shared { begun: Instant::now(), queues: Mutex::default() }));
        (Arc::new(Measured { inner, outstanding: outstanding.clone() }), outstanding)
    }

    /// The oldest incomplete operation, if any.
    #[must_use]
    pub fn oldest(&self) -> Option<Oldest> {
        let queues = self.0.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let published = queues.open.iter().map(|queue| queue.oldest.load(Ordering::Relaxed));
        // Milliseconds are the higher bits, so the minimum is the oldest.
        let oldest = published.filter(|value| *value != 0).min()?;
        let kind = (oldest & ((1 << KIND_BITS) - 1)) as usize - 1;
        let age = Duration::from_millis(self.0.now_ms().saturating_sub(oldest >> KIND_BITS));
        Some(Oldest { name: NAMES[kind], age })
    }
}

impl Outstanding {
    /// The operations that have ended since the device was opened, each with its name.
    #[must_use]
    pub fn ended(&self) -> Vec<(&'static str, Ended)> {
        let queues = self.0.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let of_kind = |(kind, name): (usize, &&'static str)| {
            let mut ended = Ended::default();
            let open = queues.open.iter().map(|queue| &queue.cells[kind]);
            open.chain([&queues.ended[kind]]).for_each(|cells| cells.read(&mut ended));
            (*name, ended)
        };
        FIGURES.iter().enumerate().map(of_kind).collect()
    }
}

impl Shared {
    fn now_ns(&self) -> u64 {
        // 580 years fit.
        self.begun.elapsed().as_nanos() as u64
    }

    fn now_ms(&self) -> u64 {
        // 500 million years fit.
        self.begun.elapsed().as_millis() as u64
    }

    /// Where a queue publishes what it does, until it [ends](Self::end).
    fn publish(&self) -> Arc<Published> {
        let published = Arc::default();
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.open.push(Arc::clone(&published));
        published
    }

    /// A queue has ended: what it has counted stays.
    fn end(&self, published: &Arc<Published>) {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.open.retain(|queue| !Arc::ptr_eq(queue, published));
        queues.ended.iter().zip(&published.cells).for_each(|(ended, cells)| ended.add(cells));
    }
}

struct Measured {
    inner: Arc<dyn Backing>,
    outstanding: Outstanding,
}

impl Backing for Measured {
    fn geometry(&self) -> BackingGeometry {
        self.inner.geometry()
    }

    fn identity(&self) -> Identity {
        self.inner.identity()
    }

    fn open_queue(&self, depth: usize) -> Result<Box<dyn PollableQueue>> {
        let inner = self.inner.open_queue(depth)?;
        let shared = Arc::clone(&self.outstanding.0);
        let publishes = Publishes { published: shared.publish(), shared };
        let origin = Origin::default();
        Ok(Box::new(MeasuredQueue { inner, publishes, origin, begun: VecDeque::new() }))
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn verify_method(&self) -> String {
        self.inner.verify_method()
    }
}

struct MeasuredQueue {
    // Declared first: it may wait for its operations when it is dropped, and they count until then.
    inner: Box<dyn PollableQueue>,
    publishes: Publishes,
    /// That of the operations that are submitted next.
    origin: Origin,
    /// Operations in flight, the oldest first.
    begun: VecDeque<Begun>,
}

/// What a queue publishes, until it is dropped.
struct Publishes {
    shared: Arc<Shared>,
    published: Arc<Published>,
}

impl Drop for Publishes {
    fn drop(&mut self) {
        self.shared.end(&self.published);
    }
}

/// An operation in flight.
struct Begun {
    token: OpToken,
    kind: usize,
    origin: Origin,
    at_ns: u64,
}

impl Begun {
    /// The value to publish while it is the oldest one.
    const fn value(&self) -> u64 {
        ((self.at_ns / 1_000_000) << KIND_BITS) | (self.kind as u64 + 1)
    }
}

impl MeasuredQueue {
    fn ended(&mut self, done: &[BackingDone]) {
        if done.is_empty() {
            return;
        }
        let Publishes { shared, published } = &self.publishes;
        let now_ns = shared.now_ns();
        for one in done {
            let index = self.begun.iter().position(|begun| begun.token == one.token);
            if let Some(begun) = index.and_then(|index| self.begun.remove(index)) {
                published.cells[begun.kind].count(one, begun.origin, now_ns.saturating_sub(begun.at_ns));
            }
        }
        published.oldest.store(self.begun.front().map_or(0, Begun::value), Ordering::Relaxed);
    }
}

impl BackingQueue for MeasuredQueue {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        let Publishes { shared, published } = &self.publishes;
        let begun = Begun { token, kind: kind_of(&op), origin: self.origin, at_ns: shared.now_ns() };
        if self.begun.is_empty() {
            published.oldest.store(begun.value(), Ordering::Relaxed);
        }
        self.begun.push_back(begun);
        self.inner.submit(token, op);
    }

    fn set_origin(&mut self, origin: Origin) {
        self.origin = origin;
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        let before = done.len();
        self.inner.poll(done);
        self.ended(&done[before..]);
    }

    fn wait(&mut self, done: &mut Vec<BackingDone>) {
        let before = done.len();
        self.inner.wait(done);
        self.ended(&done[before..]);
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }
}

impl PollableQueue for MeasuredQueue {
    fn wait_descriptor(&self) -> RawFd {
        self.inner.wait_descriptor()
    }
}

impl fmt::Debug for Measured {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Measured({})", self.inner.describe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_queue_publishes_takes_a_bounded_memory() {
        let histogram = (1 + cbd_types::figures::BUCKETS) * size_of::<u64>();
        let bytes = size_of::<Published>() + OPERATIONS * histogram;
        assert!(bytes <= 19 << 10, "{bytes}");
    }
}
