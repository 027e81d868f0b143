//! The age of operations that a backing device has not completed.
//!
//! A disk that hangs reports no error: an operation does not complete. [`Outstanding`] is a decorator whose queues
//! publish the age of their oldest operation, so that another thread can report how long the disk has not responded.
//!
//! Invariants: an operation counts from before its submission until its completion is taken, also while `submit` or the
//! end of the queue blocks; reading the age takes no lock that a queue's thread holds during an operation, and a queue
//! takes no lock after it was opened.
//!
//! Elsewhere: the limit, and the report.

use crate::{Backing, Identity, PollableQueue};
use cbd_types::backing::BackingDone;
use cbd_types::{BackingGeometry, BackingOp, BackingQueue, OpToken, Result};
use std::collections::VecDeque;
use std::fmt;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Names of the operations in messages, by number.
const NAMES: [&str; 7] = ["read", "write", "write-zeroes", "discard", "flush", "verify", "compare"];
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
    /// The value that each queue publishes, until the queue is dropped.
    queues: Mutex<Vec<Weak<AtomicU64>>>,
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
        let published = queues.iter().filter_map(Weak::upgrade).map(|queue| queue.load(Ordering::Relaxed));
        // Milliseconds are the higher bits, so the minimum is the oldest.
        let oldest = published.filter(|value| *value != 0).min()?;
        let kind = (oldest & ((1 << KIND_BITS) - 1)) as usize - 1;
        let age = Duration::from_millis(self.0.now_ms().saturating_sub(oldest >> KIND_BITS));
        Some(Oldest { name: NAMES[kind], age })
    }
}

impl Shared {
    fn now_ms(&self) -> u64 {
        // 500 million years fit.
        self.begun.elapsed().as_millis() as u64
    }

    /// The value in which a queue publishes its oldest operation; 0 if it has none.
    fn publish(&self) -> Arc<AtomicU64> {
        let published = Arc::default();
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&published));
        published
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
        let published = shared.publish();
        Ok(Box::new(MeasuredQueue { inner, shared, published, begun: VecDeque::new() }))
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}

struct MeasuredQueue {
    // Declared first: it may wait for its operations when it is dropped, and they count until then.
    inner: Box<dyn PollableQueue>,
    shared: Arc<Shared>,
    published: Arc<AtomicU64>,
    /// Operations in flight with the values to publish, the oldest first.
    begun: VecDeque<(OpToken, u64)>,
}

impl MeasuredQueue {
    fn ended(&mut self, done: &[BackingDone]) {
        if done.is_empty() {
            return;
        }
        for one in done {
            if let Some(index) = self.begun.iter().position(|(token, _)| *token == one.token) {
                self.begun.remove(index);
            }
        }
        self.published.store(self.begun.front().map_or(0, |(_, value)| *value), Ordering::Relaxed);
    }
}

impl BackingQueue for MeasuredQueue {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        let value = (self.shared.now_ms() << KIND_BITS) | (kind_of(&op) as u64 + 1);
        if self.begun.is_empty() {
            self.published.store(value, Ordering::Relaxed);
        }
        self.begun.push_back((token, value));
        self.inner.submit(token, op);
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
