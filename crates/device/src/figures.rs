//! The figures of a blkdev: requests and bytes by operation and outcome, latencies, waits.
//!
//! Each queue has cells of its own, which its thread alone writes, with plain stores. Two looks at the clock cost more than is
//! permitted for a request that ends at once. So one of them is timed about every fifth of a millisecond, after a random number of
//! others, and counts for those before it: all of a queue with few requests, one of 512 where there are millions in a second. A
//! request that waits for space or for the backing device is timed from the moment at which it begins to wait. Requests and bytes
//! are counted exactly.
//!
//! Invariants: no counter of a device ever decreases: when a queue ends, its figures stay with the device; a request is counted once,
//! when it ends.
//!
//! Elsewhere: where requests end (`queue`), the queues of a device (`route`).

use alloc::{borrow::Cow, format, sync::Arc, vec, vec::Vec};
use cbd_engine::BypassReason;
use cbd_types::{
    Operation,
    figures::{Histogram, HistogramCounts, add},
};
use core::sync::atomic::{AtomicU64, Ordering};

/// A clock in nanoseconds that never decreases.
pub type Clock = fn() -> u64;

/// Outcomes besides the reasons to go past the cache.
const BESIDES: usize = 3;
/// Outcomes of an operation, and failures.
const OUTCOMES: usize = BESIDES + BypassReason::ALL.len();
/// Bits of the random number of requests between two that are timed, at most: 511.5 on average.
const GAP_BITS_MAX: u32 = 10;
/// If less time than this passes between two requests that are timed, more requests pass between the next two.
const SOON_NS: u64 = 128_000;
/// If more time than this passes, fewer requests do.
const LATE_NS: u64 = 512_000;

/// What became of a request that succeeded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The cache alone executed it.
    Cached,
    /// A read whose data the cache did not have; a flush that flushed the backing device.
    Disk,
    /// There is no cache.
    Uncached,
    /// It went past the cache.
    Past(BypassReason),
}

impl Outcome {
    /// All of them, in the order of their cells.
    fn all() -> impl Iterator<Item = Self> {
        let past = BypassReason::ALL.into_iter().map(Self::Past);
        [Self::Cached, Self::Disk, Self::Uncached].into_iter().chain(past)
    }

    #[inline]
    const fn cell(self) -> usize {
        match self {
            Self::Cached => 0,
            Self::Disk => 1,
            Self::Uncached => 2,
            Self::Past(reason) => BESIDES + reason as usize,
        }
    }

    /// The name in status and metrics.
    #[must_use]
    pub fn name(self, operation: Operation) -> Cow<'static, str> {
        match (self, operation) {
            (Self::Cached, Operation::Read) => "hit".into(),
            (Self::Cached, _) => "cached".into(),
            (Self::Disk, Operation::Read) => "miss".into(),
            (Self::Disk, _) => "disk".into(),
            (Self::Uncached, _) => "uncached".into(),
            (Self::Past(reason), _) => format!("past-{}", reason.name()).into(),
        }
    }
}

/// What a request waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitFor {
    /// Space in the cache.
    Space,
    /// What must precede a change that goes past the cache.
    Order,
    /// A flush of the backing device.
    Flush,
}

impl WaitFor {
    /// All of them, in the order of their cells.
    pub const ALL: [Self; 3] = [Self::Space, Self::Order, Self::Flush];

    /// The name in status and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Space => "space",
            Self::Order => "order",
            Self::Flush => "flush",
        }
    }
}

/// A count and its sum: of bytes, or of nanoseconds.
#[derive(Default, Debug)]
struct Pair {
    count: AtomicU64,
    sum: AtomicU64,
}

impl Pair {
    #[inline]
    fn count(&self, sum: u64) {
        add(&self.count, 1);
        add(&self.sum, sum);
    }

    fn read(&self) -> Counted {
        Counted { count: self.count.load(Ordering::Relaxed), sum: self.sum.load(Ordering::Relaxed) }
    }

    fn add(&self, other: Counted) {
        add(&self.count, other.count);
        add(&self.sum, other.sum);
    }
}

/// The cells of one operation. Aligned, so that no other thread writes their cache lines; what a request that the cache alone
/// executes needs comes first, in one of them.
#[repr(C, align(64))]
#[derive(Default, Debug)]
struct OfOperation {
    /// The queue's own, here because its thread has the line: the request that is timed next, as a number of requests that the
    /// cache alone has executed.
    next: AtomicU64,
    latency: Histogram,
    failed: AtomicU64,
    outcomes: [Pair; OUTCOMES],
}

const _: () = assert!(core::mem::offset_of!(OfOperation, outcomes) + size_of::<Pair>() <= 64);

impl OfOperation {
    const fn cached(&self) -> &Pair {
        let [cached, ..] = &self.outcomes;
        cached
    }

    /// Whether one of the next requests that end at once is timed, of which there are `more` and one.
    #[inline]
    fn is_due(&self, more: u64) -> bool {
        let next = self.next.load(Ordering::Relaxed);
        self.cached().count.load(Ordering::Relaxed) >= next.saturating_sub(more)
    }
}

/// The cells of one queue.
#[derive(Debug)]
pub(crate) struct Cells {
    operations: Arc<[OfOperation; Operation::ALL.len()]>,
    waits: [Pair; WaitFor::ALL.len()],
}

impl Cells {
    pub(crate) fn new() -> Self {
        Self { operations: Arc::default(), waits: Default::default() }
    }

    /// Adds all that is counted in `other`. Called by one thread at a time, after the queue of these cells has ended.
    pub(crate) fn add(&self, other: &Self) {
        for (cells, other) in self.operations.iter().zip(&*other.operations) {
            let outcomes = cells.outcomes.iter().zip(&other.outcomes);
            outcomes.for_each(|(pair, other)| pair.add(other.read()));
            add(&cells.failed, other.failed.load(Ordering::Relaxed));
            cells.latency.add(&other.latency);
        }
        self.waits.iter().zip(&other.waits).for_each(|(pair, other)| pair.add(other.read()));
    }

    /// Adds what is counted to `figures`.
    pub(crate) fn read(&self, figures: &mut DeviceFigures) {
        figures.operations.resize_with(Operation::ALL.len(), OperationFigures::default);
        for (of_operation, cells) in figures.operations.iter_mut().zip(&*self.operations) {
            of_operation.outcomes.resize(OUTCOMES, Counted::default());
            let outcomes = of_operation.outcomes.iter_mut().zip(&cells.outcomes);
            outcomes.for_each(|(counted, pair)| counted.add(pair.read()));
            of_operation.failed += cells.failed.load(Ordering::Relaxed);
            cells.latency.read(&mut of_operation.latency);
        }
        figures.waits.iter_mut().zip(&self.waits).for_each(|(counted, pair)| counted.add(pair.read()));
    }
}

/// A count, and the sum of what was counted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counted {
    /// The number of requests or waits.
    pub count: u64,
    /// Bytes of the requests, or nanoseconds of the waits.
    pub sum: u64,
}

impl Counted {
    const fn add(&mut self, other: Self) {
        self.count += other.count;
        self.sum += other.sum;
    }
}

/// The figures of an operation.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct OperationFigures {
    outcomes: Vec<Counted>,
    /// Requests that failed.
    pub failed: u64,
    /// The latency of those that succeeded.
    pub latency: HistogramCounts,
}

impl OperationFigures {
    /// The requests that succeeded, and their bytes, by outcome.
    pub fn outcomes(&self) -> impl Iterator<Item = (Outcome, Counted)> {
        Outcome::all().zip(self.outcomes.iter().copied())
    }

    /// The requests that had this outcome, and their bytes.
    #[must_use]
    pub fn of(&self, outcome: Outcome) -> Counted {
        self.outcomes.get(outcome.cell()).copied().unwrap_or_default()
    }

    /// The requests that succeeded, and their bytes.
    #[must_use]
    pub fn total(&self) -> Counted {
        let mut total = Counted::default();
        self.outcomes.iter().for_each(|counted| total.add(*counted));
        total
    }
}

/// The figures of a blkdev since it was created, of all its queues, ended ones included.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct DeviceFigures {
    operations: Vec<OperationFigures>,
    waits: [Counted; WaitFor::ALL.len()],
}

impl DeviceFigures {
    /// The figures of each operation.
    pub fn operations(&self) -> impl Iterator<Item = (Operation, &OperationFigures)> {
        Operation::ALL.into_iter().zip(&self.operations)
    }

    /// The figures of one operation; `None` if the device has never had a queue.
    #[must_use]
    pub fn of(&self, operation: Operation) -> Option<&OperationFigures> {
        self.operations.get(operation as usize)
    }

    /// The number of waits of requests, and their nanoseconds.
    pub fn waits(&self) -> impl Iterator<Item = (WaitFor, Counted)> {
        WaitFor::ALL.into_iter().zip(self.waits)
    }
}

/// Which of the requests that end at once are timed.
#[derive(Clone, Copy, Default)]
struct Sampling {
    /// Those before this one are counted in the histogram; a number as [`OfOperation::next`].
    counted: u64,
    /// Bits of the next gap.
    bits: u32,
    /// When the last one was timed.
    last_ns: u64,
}

/// Counts the requests of a queue, or nothing.
pub(crate) struct Meter<const COUNTS: bool> {
    cells: Arc<Cells>,
    /// Those of the cells: the common path has one pointer less to follow.
    operations: Arc<[OfOperation; Operation::ALL.len()]>,
    clock: Option<Clock>,
    /// Behind a pointer, because a queue is moved as a value.
    sampling: Vec<Sampling>,
    random: u32,
}

impl<const COUNTS: bool> Meter<COUNTS> {
    /// A meter that counts in `cells`; without a clock nothing is timed. Of meters with different numbers different requests are
    /// timed.
    pub(crate) fn new(cells: Arc<Cells>, clock: Option<Clock>, number: u32) -> Self {
        let random = number.wrapping_mul(0x9e37_79b9) | 1;
        let sampling = vec![Sampling::default(); Operation::ALL.len()];
        let operations = Arc::clone(&cells.operations);
        let first = if clock.is_some() { 0 } else { u64::MAX };
        operations.iter().for_each(|operation| operation.next.store(first, Ordering::Relaxed));
        Self { cells, operations, clock, sampling, random }
    }

    /// The time in nanoseconds, which is not 0; 0 without a clock.
    #[cold]
    #[inline(never)]
    pub(crate) fn now(&self) -> u64 {
        if COUNTS { self.clock.map_or(0, |clock| clock().max(1)) } else { 0 }
    }

    /// When a request begins that may end at once: the time if it is to be timed, otherwise 0.
    #[inline]
    pub(crate) fn begin(&self, operation: Operation) -> u64 {
        self.begin_together(operation, 1)
    }

    /// As [`begin`](Self::begin), for `count` requests that end together.
    #[inline]
    pub(crate) fn begin_together(&self, operation: Operation, count: u32) -> u64 {
        let more = u64::from(count.saturating_sub(1));
        if COUNTS && self.operations[operation as usize].is_due(more) { self.now() } else { 0 }
    }

    /// A request has succeeded at once, within the cache. It is timed if it has begun with the time.
    #[inline]
    pub(crate) fn count_at_once(&mut self, operation: Operation, bytes: u64, begun: u64) {
        if !COUNTS {
            return;
        }
        self.operations[operation as usize].cached().count(bytes);
        if begun > 0 {
            self.sample(operation, begun);
        }
    }

    /// A request has succeeded at once; `elsewhere` of its bytes had this outcome, the rest was cached.
    #[inline(never)]
    pub(crate) fn count_partly(
        &mut self,
        operation: Operation,
        (bytes, elsewhere): (u64, u64),
        outcome: Outcome,
        begun: u64,
    ) {
        if !COUNTS {
            return;
        }
        self.count(operation, (bytes, elsewhere), outcome);
        if outcome != Outcome::Cached {
            // It ended at once, though the cache alone did not execute it.
            self.shift(operation, u64::wrapping_sub);
        }
        if begun > 0 {
            self.sample(operation, begun);
        }
    }

    /// `count` requests that began together have succeeded at once. Times them if they have begun with the time.
    pub(crate) fn count_together(&mut self, operation: Operation, bytes: u64, count: u32, begun: u64) {
        if !COUNTS || count == 0 {
            return;
        }
        let cached = self.operations[operation as usize].cached();
        cached.add(Counted { count: u64::from(count), sum: bytes });
        if begun > 0 {
            self.sample(operation, begun);
        }
    }

    fn count(&self, operation: Operation, (bytes, elsewhere): (u64, u64), outcome: Outcome) {
        let cells = &self.operations[operation as usize];
        cells.outcomes[outcome.cell()].count(elsewhere);
        add(&cells.cached().sum, bytes - elsewhere);
    }

    /// A request has ended at once and not as one that the cache alone executed, or the other way round: the numbers of those
    /// move by one.
    fn shift(&mut self, operation: Operation, by: fn(u64, u64) -> u64) {
        let next = &self.operations[operation as usize].next;
        let number = next.load(Ordering::Relaxed);
        if self.clock.is_some() && number > 0 {
            next.store(by(number, 1), Ordering::Relaxed);
        }
        let counted = &mut self.sampling[operation as usize].counted;
        *counted = by(*counted, 1);
    }

    /// A request that began at this time has ended at once: it counts for those since the last one, and the next one is chosen.
    #[cold]
    #[inline(never)]
    fn sample(&mut self, operation: Operation, begun: u64) {
        let cells = &self.operations[operation as usize];
        let sampling = &mut self.sampling[operation as usize];
        let now = self.clock.map_or(0, |clock| clock());
        match now.saturating_sub(sampling.last_ns) {
            0..SOON_NS => sampling.bits = GAP_BITS_MAX.min(sampling.bits + 1),
            LATE_NS.. => sampling.bits = sampling.bits.saturating_sub(1),
            _ => {}
        }
        sampling.last_ns = now;
        // Xorshift.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        let gap = self.random & ((1 << sampling.bits) - 1);
        let ended = cells.cached().count.load(Ordering::Relaxed);
        cells.next.store(ended + u64::from(gap), Ordering::Relaxed);
        cells.latency.count(now.saturating_sub(begun), ended.wrapping_sub(sampling.counted));
        sampling.counted = ended;
    }

    /// A request has failed.
    #[cold]
    pub(crate) fn count_failed(&self, operation: Operation) {
        if !COUNTS {
            return;
        }
        add(&self.operations[operation as usize].failed, 1);
    }

    /// A request that waited has ended.
    pub(crate) fn count_parked(&mut self, operation: Operation, bytes: u64, mut tally: Tally, is_good: bool) {
        if !COUNTS {
            return;
        }
        self.end_wait(&mut tally);
        if !is_good {
            return self.count_failed(operation);
        }
        self.count(operation, (bytes, tally.elsewhere.min(bytes)), tally.outcome);
        if tally.outcome == Outcome::Cached {
            // It did not end at once, though the cache alone executed it.
            self.shift(operation, u64::wrapping_add);
        }
        if tally.begun > 0 {
            let took = self.now().saturating_sub(tally.begun);
            self.operations[operation as usize].latency.count(took, 1);
        }
    }

    /// The request of this tally begins to wait, unless it waits already.
    pub(crate) fn begin_wait(&self, tally: &mut Tally, what: WaitFor) {
        if COUNTS && tally.wait.is_none() {
            tally.wait = Some((what, self.now()));
        }
    }

    /// The request of this tally waits no longer.
    pub(crate) fn end_wait(&self, tally: &mut Tally) {
        if let Some((what, since)) = tally.wait.take() {
            self.cells.waits[what as usize].count(self.now().saturating_sub(since));
        }
    }
}

/// What is noted of a request while it waits.
#[derive(Clone, Copy)]
pub(crate) struct Tally {
    /// When it began; 0 without a clock.
    begun: u64,
    /// What has become of it so far.
    pub(crate) outcome: Outcome,
    /// The bytes that had this outcome; the others were cached.
    pub(crate) elsewhere: u64,
    wait: Option<(WaitFor, u64)>,
}

impl Tally {
    /// Of a request that began at this time.
    pub(crate) const fn new(begun: u64, outcome: Outcome, elsewhere: u64) -> Self {
        Self { begun, outcome, elsewhere, wait: None }
    }
}

#[cfg(test)]
mod tests;
