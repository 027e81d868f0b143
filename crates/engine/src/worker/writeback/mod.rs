//! Writeback: the backing device catches up, in the order that the consistency asks for.
//!
//! Always true here:
//! - an epoch is collected only after a flush's pass over every touched lane, so no record of it comes later;
//! - operations of one part of a batch do not overlap, and the next part is issued when all of them have returned, so two
//!   overlapping operations are never in flight together;
//! - data is verified before it is written; what fails is quarantined and not written;
//! - damage that does not find room to be noted at once is noted segment by segment, oldest first, and each segment is reclaimed
//!   before the next one needs room: any amount of damage comes to an end;
//! - what was refused for long is parked, durably, before the batch that it belongs to is drained (`parking`);
//! - *drained* is durable after the backing device's flush and before anything of a later epoch is submitted.
//!
//! It reads the logs, not the index, and holds no lane's lock while it writes.

use super::failing::Failing;
use crate::{
    Cache, Consistency, Environment,
    lane::Refused,
    position::{Cursor, Location},
    rangemap::RangeMap,
};
use alloc::{collections::VecDeque, vec::Vec};
use allowance::Allowance;
use cbd_types::{
    BackingGeometry, BackingOp, BackingQueue, ByteRange, Error, ErrorKind, LaneId, OpToken, SpareBuffers,
    backing::BackingDone,
};

mod allowance;
mod collect;
mod newest;
mod parked;
mod requests;

/// Adjacent blocks go to the backing device in requests of at most this many bytes.
pub const REQUEST_MAX: u64 = 1 << 20;
/// Bytes of buffers kept for the next requests while there is something to write back.
const SPARE_BYTES: usize = 64 * REQUEST_MAX as usize;
/// Dirty data is left alone this long while nothing presses, so that overwrites merge.
const DELAY_MS: u64 = 1000;

/// What a range of a batch becomes on the backing device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Content {
    Data { location: Location, lane: LaneId, sequence: u64 },
    Zeroes,
    Discard,
}

impl Content {
    /// Whether neighbours with these contents can be one request.
    pub(crate) fn joins(&self, next: &Self) -> bool {
        matches!((self, next), (Self::Data { .. }, Self::Data { .. })) || self == next
    }

    const fn refused(&self) -> Refused {
        match self {
            Self::Data { location, .. } => Refused::Data(*location),
            Self::Zeroes | Self::Discard => Refused::Zeroes,
        }
    }
}

/// A range of a batch and what it becomes.
pub(crate) type Piece = (ByteRange, Content);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Writing,
    Flushing,
}

/// Epochs on their way to the backing device, or what is parked.
struct Batch {
    /// The last epoch of the batch; `None` for one of parked ranges.
    target: Option<u64>,
    phase: Phase,
    /// By address; none overlaps another.
    pieces: VecDeque<Piece>,
    /// Whether the part in `pieces` is the last.
    complete: bool,
    /// What was collected until now is settled: see [`Writeback::settle`].
    settled: bool,
    /// What the device has taken of parked ranges.
    taken: Vec<Piece>,
    /// Dirty bytes and records that become clean with the batch, for each lane.
    cleaned: Vec<(u64, u64)>,
    /// Something of the batch was parked.
    has_parked: bool,
    /// The backing device does not get something of the batch: it is damaged, or was refused.
    lacks_something: bool,
}

impl Batch {
    fn new(target: Option<u64>, lanes: usize) -> Self {
        Self {
            target,
            phase: Phase::Writing,
            pieces: VecDeque::new(),
            complete: false,
            settled: false,
            taken: Vec::new(),
            cleaned: alloc::vec![(0, 0); lanes],
            has_parked: false,
            lacks_something: false,
        }
    }
}

/// What a step came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// There is more to do now.
    Busy,
    /// Operations are in flight.
    InFlight,
    /// Nothing to do until this moment, or until something changes.
    Nothing(Option<u64>),
}

/// The state of writeback; the background worker's thread owns it.
pub(crate) struct Writeback {
    geometry: BackingGeometry,
    /// Where collecting goes on in each lane.
    cursors: Vec<Cursor>,
    /// Where it begins again when a flush failed: everything before is durable on the backing device.
    safe: Vec<Cursor>,
    batch: Option<Batch>,
    failing: Failing,
    /// The target of the batches that go segment by segment, because not all damage that they hold finds room to be noted
    /// at once.
    by_segment: Option<u64>,
    /// Recovery has found losses that it had no room to note.
    has_lost: bool,
    /// The backing device lacked something when the last batch ended; after a restart, perhaps.
    lacked_something: bool,
    buffers: SpareBuffers,
    done: Vec<BackingDone>,
    next_token: u64,
    last_end_ms: u64,
    parked: parked::Attempts,
    allowance: Allowance,
    /// When it was looked last whether the batch is urgent, and what was found.
    looked: (u64, bool),
    /// When the last batch was urgent.
    urgent_ms: u64,
}

impl Writeback {
    /// `was_void`: the last process left the backing device as no crash state, perhaps because of damage. `parked`: what
    /// is parked; it is tried at once.
    pub(crate) fn new(
        geometry: BackingGeometry,
        cursors: Vec<Cursor>,
        was_void: bool,
        has_lost: bool,
        parked: &[ByteRange],
        now_ms: u64,
    ) -> Self {
        let mut known = RangeMap::default();
        parked.iter().for_each(|range| known.insert(*range, (), |()| false));
        Self {
            failing: Failing::new(geometry.sector, known),
            geometry,
            safe: cursors.clone(),
            cursors,
            batch: None,
            by_segment: None,
            has_lost,
            lacked_something: was_void,
            buffers: SpareBuffers::new(SPARE_BYTES),
            done: Vec::new(),
            next_token: 0,
            last_end_ms: now_ms,
            parked: parked::Attempts::new(now_ms),
            allowance: Allowance::new(now_ms),
            looked: (now_ms, false),
            urgent_ms: now_ms,
        }
    }

    /// Moves writeback forward as far as it goes without waiting. `is_reclaiming`: reclaim has found something to do.
    pub(crate) fn step<E: Environment, Q: BackingQueue>(
        &mut self,
        cache: &Cache<E>,
        queue: &mut Q,
        is_reclaiming: bool,
    ) -> Progress {
        let progress = self.go_on(cache, queue, is_reclaiming);
        let now = cache.base().environment().monotonic_ms();
        cache.set_stalled(self.failing.is_stalled(&cache.settings(), now));
        match progress {
            Progress::Nothing(until) => Progress::Nothing(self.rest_of_buffers(until, now)),
            Progress::Busy | Progress::InFlight => progress,
        }
    }

    /// Buffers are given up when nothing urgent was written back for a while. Returns when to look next, if not at `until`.
    fn rest_of_buffers(&mut self, until: Option<u64>, now: u64) -> Option<u64> {
        let due = self.urgent_ms + DELAY_MS;
        if self.buffers.held() == 0 {
            return until;
        }
        if now >= due {
            self.buffers.trim();
            return until;
        }
        Some(until.map_or(due, |until| until.min(due)))
    }

    fn go_on<E: Environment, Q: BackingQueue>(
        &mut self,
        cache: &Cache<E>,
        queue: &mut Q,
        is_reclaiming: bool,
    ) -> Progress {
        let now = cache.base().environment().monotonic_ms();
        let mut done = core::mem::take(&mut self.done);
        queue.poll(&mut done);
        for finished in done.drain(..) {
            self.complete(cache, finished, now);
        }
        self.done = done;
        let Some(batch) = &self.batch else {
            // What a batch that was given up left in flight comes back first: it must not meet its successor.
            return if queue.in_flight() > 0 { Progress::InFlight } else { self.begin(cache, now) };
        };
        let (phase, target) = (batch.phase, batch.target);
        if phase == Phase::Flushing {
            return if queue.in_flight() > 0 { Progress::InFlight } else { self.flush(cache, queue, now) };
        }
        if let Some(target) = target
            && self.looked.0 != now
        {
            // Not in every step: it takes the lanes' locks, which writers want.
            self.look(cache, target, now);
        }
        let urgent = target.is_some() && self.looked.1;
        if let Some(until) = self.submit(cache, queue, now, urgent) {
            return if queue.in_flight() > 0 { Progress::InFlight } else { Progress::Nothing(Some(until)) };
        }
        if self.batch.is_none() {
            return Progress::Busy;
        }
        if queue.in_flight() > 0 {
            return Progress::InFlight;
        }
        if self.park_refused(cache, now) {
            return Progress::Busy;
        }
        let Some(batch) = &mut self.batch else { return Progress::Busy };
        if batch.target.is_none() && batch.taken.is_empty() {
            // Nothing of what is parked was taken: there is nothing to flush.
            self.finish_parked(cache, now);
            return Progress::Busy;
        }
        let settles = self.by_segment.is_some() && !batch.settled;
        if !batch.complete && !settles {
            // The next part; nothing of this one is in flight any more. What is settled goes back to the pool first: the next part
            // may need it.
            if !(batch.settled && is_reclaiming) {
                self.collect(cache);
            }
            return Progress::Busy;
        }
        batch.phase = Phase::Flushing;
        self.flush(cache, queue, now)
    }

    /// Begins a batch if there is reason to.
    fn begin<E: Environment>(&mut self, cache: &Cache<E>, now: u64) -> Progress {
        // Before the scan: what is closed now is complete, so an oldest epoch that is closed is the oldest of all. A
        // record of an epoch that is still open may appear behind the scan's back.
        let closed = cache.base().epochs().covered() - 1;
        if self.has_lost {
            self.has_lost = !cache.note_lost();
        }
        if self.begin_parked(cache, now) {
            return Progress::Busy;
        }
        if let Some(target) = self.by_segment {
            // It was begun, so all that has to be durable before is.
            if now < self.failing.retry_at_ms() {
                return Progress::Nothing(Some(self.failing.retry_at_ms()));
            }
            self.batch = Some(Batch::new(Some(target), cache.lanes().len()));
            self.collect(cache);
            return Progress::Busy;
        }
        let Some(oldest) = self.oldest_epoch(cache) else { return self.rest(cache, closed) };
        if now < self.failing.retry_at_ms() {
            return Progress::Nothing(Some(self.failing.retry_at_ms()));
        }
        let due = self.last_end_ms + DELAY_MS;
        if !self.is_urgent(cache, oldest) && now < due {
            return Progress::Nothing(Some(due));
        }
        if oldest > closed {
            // Only epochs that are not known to be complete are dirty. Closing the open one is always legal.
            cache.close_epoch();
            return Progress::Busy;
        }
        let consistency = cache.settings().consistency;
        let alone = consistency == Consistency::Strict;
        let target = if alone { oldest } else { closed };
        if target > oldest || consistency == Consistency::None {
            // 1. Before anything of a batch of several epochs is written, it is durable that the backing device alone is
            //    no crash state until the batch is through.
            cache.base().epochs().void_until_epoch(cache.base().context(), target);
        }
        self.look(cache, target, now);
        self.batch = Some(Batch::new(Some(target), cache.lanes().len()));
        self.collect(cache);
        Progress::Busy
    }

    /// Nothing is dirty. What made the backing device void is over then, unless something is damaged that nobody has
    /// overwritten: all that is closed is on it.
    fn rest<E: Environment>(&mut self, cache: &Cache<E>, closed: u64) -> Progress {
        let void_until = cache.base().epochs().void_until();
        if cache.has_parked() {
            return Progress::Nothing(Some(self.parked.due_ms()));
        }
        if void_until <= cache.drained_epoch().0 || cache.has_damage() {
            return Progress::Nothing(None);
        }
        if closed < void_until {
            cache.close_epoch();
            return Progress::Busy;
        }
        self.lacked_something = false;
        cache.base().epochs().reach(cache.base().context(), closed, 0);
        Progress::Nothing(None)
    }

    /// Notes whether the batch up to `target` is urgent.
    fn look<E: Environment>(&mut self, cache: &Cache<E>, target: u64, now: u64) {
        let is_urgent = self.is_urgent(cache, target);
        self.looked = (now, is_urgent);
        if is_urgent {
            self.urgent_ms = now;
        }
    }

    /// Whether writeback should use all the depth and wait for nothing but `writeback_rate`: somebody waits for space or for a drain, or much is dirty.
    fn is_urgent<E: Environment>(&self, cache: &Cache<E>, epoch: u64) -> bool {
        let base = cache.base();
        let (dirty, total) = (cache.unwritten_bytes(), base.capacity());
        base.pool().has_waiters()
            || base.epochs().requested() >= epoch
            || base.is_above_gc()
            || dirty * 100 > u64::from(cache.settings().dirty_target_percent) * total
    }

    /// 2. Everything of the batch has been written: flush the backing device, unless it has no cache that could lose it.
    fn flush<E: Environment, Q: BackingQueue>(
        &mut self,
        cache: &Cache<E>,
        queue: &mut Q,
        now: u64,
    ) -> Progress {
        if !self.geometry.volatile_cache {
            self.flushed(cache, now);
            return Progress::Busy;
        }
        self.next_token += 1;
        queue.submit(OpToken(self.next_token), BackingOp::Flush);
        Progress::InFlight
    }

    /// The backing device has flushed what was written of the batch.
    fn flushed<E: Environment>(&mut self, cache: &Cache<E>, now: u64) {
        let Some(mut batch) = self.batch.take() else { return };
        match batch.target {
            None => {
                self.batch = Some(batch);
                self.finish_parked(cache, now);
            }
            Some(target) if batch.complete => self.finish(cache, batch, target, now),
            Some(_) => {
                self.settle(cache, &mut batch);
                self.batch = Some(batch);
            }
        }
    }

    /// Lost without evidence, parked records and quarantines would look like writes that were never acknowledged.
    fn mark_what_is_relied_on<E: Environment>(cache: &Cache<E>, batch: &Batch) {
        if batch.has_parked || batch.lacks_something {
            cache.close_epoch();
        }
    }

    /// A part of a batch that goes segment by segment is through: of what was collected the backing device lacks nothing but what is
    /// noted, durably. Nothing of it is collected again, whatever fails later, and its segments can be reclaimed although
    /// the epoch is not drained: within an epoch any order is legal, and before a batch of several epochs it is durable that
    /// the backing device is void.
    fn settle<E: Environment>(&mut self, cache: &Cache<E>, batch: &mut Batch) {
        Self::mark_what_is_relied_on(cache, batch);
        self.lacked_something |= batch.lacks_something;
        self.safe.clone_from(&self.cursors);
        for ((lane, cursor), cleaned) in cache.lanes().iter().zip(&self.cursors).zip(&mut batch.cleaned) {
            let (bytes, records) = core::mem::take(cleaned);
            lane.count_cleaned(bytes, records);
            lane.lock().settle(*cursor);
        }
        batch.settled = true;
        batch.phase = Phase::Writing;
        self.failing.recovered();
        cache.backing().end_trouble();
    }

    /// 3. All that the batch holds is durable on the backing device: say so, durably, before anything later is submitted.
    fn finish<E: Environment>(&mut self, cache: &Cache<E>, batch: Batch, target: u64, now: u64) {
        Self::mark_what_is_relied_on(cache, &batch);
        // The backing device lacks what is damaged or parked until an overwrite of it has been drained. One that came since
        // the last batch ended has at most the present epoch.
        let lacks_something = cache.has_damage() || cache.has_parked();
        let lacked_something = lacks_something || self.lacked_something || batch.lacks_something;
        let void_until = if lacked_something { cache.base().epochs().present() } else { 0 };
        self.lacked_something = lacks_something;
        cache.base().epochs().reach(cache.base().context(), target, void_until);
        self.by_segment = None;
        self.safe.clone_from(&self.cursors);
        for (lane, (bytes, records)) in cache.lanes().iter().zip(batch.cleaned) {
            lane.count_cleaned(bytes, records);
        }
        self.last_end_ms = now;
        self.failing.recovered();
        cache.backing().end_trouble();
    }

    /// Damage could not be noted durably: nothing may be declared clean past it. The batch is begun again and goes segment by
    /// segment from then on, so that each segment is free again before the next one needs room. If it does so already it waits
    /// until reclaim has had a chance to free a segment. What was noted stays noted in either case.
    fn give_up<E: Environment>(&mut self, cache: &Cache<E>) {
        let target = self.batch.as_ref().and_then(|batch| batch.target);
        if self.by_segment.is_none() && target.is_some() {
            self.by_segment = target;
            self.failing.forget_batch();
            self.batch = None;
            self.cursors.clone_from(&self.safe);
            return;
        }
        let error = Error::new(ErrorKind::NoSpace, "no segment is free to note damaged data");
        self.failing.note(cache.base().environment().monotonic_ms());
        self.begin_again(cache, &error);
    }

    fn begin_again<E: Environment>(&mut self, cache: &Cache<E>, error: &Error) {
        cache.backing().note_failure(cache.base().environment(), error);
        self.failing.forget_batch();
        if self.batch.take().is_some_and(|batch| batch.target.is_none()) {
            self.parked.put_off(cache.base().environment().monotonic_ms());
        }
        self.cursors.clone_from(&self.safe);
    }
}
