//! Writeback: writes dirty data to the backing device, in the order that the consistency setting requires.
//!
//! Invariants:
//! - an epoch is collected only after the pass of a flush over every touched lane, so no record of it can follow;
//! - the operations of one part of a batch do not overlap, and the next part is issued when all of them have completed, so two
//!   overlapping operations are never in flight together;
//! - data is verified before it is written; data that fails verification is quarantined and not written;
//! - if not all damage of a batch can be recorded at once, or not all that is refused can be parked, it is written
//!   segment by segment, one lane at a time and oldest first, and each segment is reclaimed before the next one needs
//!   space: any amount of damage can be recorded, however few segments are reserved (`base::pool`);
//! - a range that the backing device keeps refusing is parked, durably, before its batch is drained (`parking`);
//! - *drained* is durable after the flush of the backing device and before any operation of a later epoch is submitted.
//!
//! Writeback reads the logs, not the index, and holds no lane's lock while it writes.

use super::{
    failing::Failing,
    pace::{Pacer, QUIET_MS, is_far_above_target},
};
use crate::{
    Cache, Consistency, Environment, PaceReason,
    cache::Covered,
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
use in_flight::InFlight;
use recovery_age::RecoveryAge;

mod allowance;
mod collect;
mod in_flight;
mod limit;
mod newest;
mod parked;
mod recovery_age;
mod requests;

/// Adjacent blocks are written to the backing device in requests of at most this many bytes.
pub const REQUEST_MAX: u64 = 1 << 20;
/// Bytes of buffers kept for later requests while writeback is active.
const SPARE_BYTES: usize = 64 * REQUEST_MAX as usize;

/// Why writeback waits for space.
const NO_SPACE_TO_NOTE: &str = "no segment is free to note damaged data";
const NO_SPACE_TO_PARK: &str = "no segment is free to park what the backing device refuses";

/// The content that a range of a batch gets on the backing device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Content {
    Data { location: Location, lane: LaneId, sequence: u64 },
    Zeroes,
    Discard,
}

impl Content {
    /// Whether adjacent ranges with these contents can be one request.
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

/// A range of a batch and the content that it gets.
pub(crate) type Piece = (ByteRange, Content);

/// Epochs that are being written to the backing device, or a retry of parked ranges.
struct Batch {
    /// The last epoch of the batch; `None` for a retry of parked ranges.
    target: Option<u64>,
    /// Its first epoch.
    oldest: u64,
    /// Sorted by address, without overlaps.
    pieces: VecDeque<Piece>,
    /// Whether the part in `pieces` is the last.
    complete: bool,
    /// Everything collected so far is settled: see [`Writeback::settle`].
    settled: bool,
    /// The parked ranges that the backing device has accepted.
    taken: Vec<Piece>,
    /// Dirty bytes and records that become clean with the batch, for each lane.
    cleaned: Vec<(u64, u64)>,
    /// The backing device does not get all content of the batch: some of it is damaged, or was refused and parked.
    lacks_something: bool,
    /// Something was sent to the backing device that a flush must cover.
    needs_flush: bool,
    /// Until the batch is through, the backing device alone is not crash-consistent: a pause does not interrupt it.
    leaves_inconsistent: bool,
}

impl Batch {
    fn new<E: Environment>(cache: &Cache<E>, target: Option<u64>) -> Self {
        Self {
            target,
            oldest: target.unwrap_or(0),
            pieces: VecDeque::new(),
            complete: false,
            settled: false,
            taken: Vec::new(),
            cleaned: alloc::vec![(0, 0); cache.lanes().len()],
            lacks_something: false,
            needs_flush: false,
            leaves_inconsistent: false,
        }
    }
}

/// The result of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Progress {
    /// There is more to do now.
    Busy,
    /// Operations are in flight.
    InFlight,
    /// No work until this time, or until something changes.
    Nothing(Option<u64>),
}

/// The state of writeback; the background worker's thread owns it.
pub(crate) struct Writeback {
    geometry: BackingGeometry,
    /// The next position to collect, for each lane.
    cursors: Vec<Cursor>,
    /// The positions from which collecting restarts after a failed flush: everything before them is durable on the backing
    /// device.
    safe: Vec<Cursor>,
    batch: Option<Batch>,
    failing: Failing,
    /// The target of the batches that are written segment by segment, because not all of their damage can be recorded at once.
    by_segment: Option<u64>,
    /// The lane with which such a batch begins.
    lane_first: u32,
    /// How often such a batch found no space since one did, and since the last wait.
    lanes_without_space: usize,
    /// Recovery found losses that it had no space to record.
    has_lost: bool,
    /// The backing device lacked some content when the last batch ended. After a restart this is assumed if the backing device
    /// was not crash-consistent.
    lacked_something: bool,
    /// Everything up to this epoch is to be drained at once: until then the backing device is not crash-consistent, for damage that
    /// was healed, or for a batch that the last process had begun.
    restored_at: u64,
    in_flight: InFlight,
    buffers: SpareBuffers,
    done: Vec<BackingDone>,
    next_token: u64,
    /// The flush in flight, and whether it ends the batch; otherwise it is for requests that went past the cache.
    flushing: Option<(Covered, bool)>,
    last_end_ms: u64,
    parked: parked::Attempts,
    /// What `writeback_rate` permits, and what the pace does.
    limit: Allowance,
    paced: Allowance,
    pacer: Pacer,
    recovery_age: RecoveryAge,
    /// Reclaim has found work in this step.
    is_reclaiming: bool,
    /// When a batch was last urgent.
    urgent_ms: u64,
    /// Segments that writers had ever taken when the size of the open epoch was last considered.
    taken: u64,
}

impl Writeback {
    /// `was_void`: the last process left the backing device not crash-consistent, perhaps because of damage. What is parked is
    /// retried at once.
    pub(crate) fn new<E: Environment>(
        geometry: BackingGeometry,
        cursors: Vec<Cursor>,
        was_void: bool,
        has_lost: bool,
        cache: &Cache<E>,
        now_ms: u64,
    ) -> Self {
        let mut known = RangeMap::default();
        cache.parked_ranges().iter().for_each(|range| known.insert(*range, (), |()| false));
        Self {
            failing: Failing::new(geometry.sector, known),
            geometry,
            safe: cursors.clone(),
            cursors,
            batch: None,
            by_segment: None,
            lane_first: 0,
            lanes_without_space: 0,
            has_lost,
            lacked_something: was_void,
            restored_at: if was_void { cache.base().epochs().void_until() } else { 0 },
            in_flight: InFlight::new(),
            buffers: SpareBuffers::new(SPARE_BYTES),
            done: Vec::new(),
            next_token: 0,
            flushing: None,
            last_end_ms: now_ms,
            parked: parked::Attempts::new(now_ms),
            limit: Allowance::new(now_ms),
            paced: Allowance::smooth(now_ms),
            pacer: Pacer::new(cache, now_ms),
            recovery_age: RecoveryAge::new(),
            is_reclaiming: false,
            urgent_ms: now_ms,
            taken: 0,
        }
    }

    /// Advances writeback as far as possible without waiting. `is_reclaiming`: reclaim has found work.
    pub(crate) fn step<E: Environment, Q: BackingQueue>(
        &mut self,
        cache: &Cache<E>,
        queue: &mut Q,
        is_reclaiming: bool,
    ) -> Progress {
        self.is_reclaiming = is_reclaiming;
        let progress = self.advance(cache, queue);
        cache.advance_mode();
        let now = cache.base().environment().monotonic_ms();
        cache.set_stalled(self.failing.is_stalled(&cache.settings(), now));
        match progress {
            Progress::Nothing(_) if queue.in_flight() > 0 => Progress::InFlight,
            Progress::Nothing(until) => {
                let until = self.trim_buffers(until, now);
                let until = self.recovery_age.look_again(cache, until, now);
                // A failed flush for requests is repeated then.
                let repeat = cache.wants_backing_flush().then(|| self.failing.retry_at_ms());
                Progress::Nothing(until.into_iter().chain(repeat).min())
            }
            Progress::Busy | Progress::InFlight => progress,
        }
    }

    /// Frees the spare buffers if no batch was urgent for a while. Returns when the next check is due: `until` or earlier.
    fn trim_buffers(&mut self, until: Option<u64>, now: u64) -> Option<u64> {
        let due = self.urgent_ms + QUIET_MS;
        if self.buffers.held() == 0 {
            return until;
        }
        if now >= due {
            self.buffers.trim();
            return until;
        }
        Some(until.map_or(due, |until| until.min(due)))
    }

    fn advance<E: Environment, Q: BackingQueue>(&mut self, cache: &Cache<E>, queue: &mut Q) -> Progress {
        let now = cache.base().environment().monotonic_ms();
        let mut done = core::mem::take(&mut self.done);
        queue.poll(&mut done);
        for finished in done.drain(..) {
            self.complete(cache, finished, now);
        }
        self.done = done;
        self.in_flight.measure(cache.pace_board().moved(), now);
        self.close_large_epoch(cache);
        self.recovery_age.close_epoch(cache, now);
        if self.flush_for_requests(cache, queue, now) {
            return Progress::Busy;
        }
        let Some(batch) = &self.batch else {
            // Operations of an abandoned batch complete first: they must not be in flight together with those of the next batch.
            return if queue.in_flight() > 0 { Progress::InFlight } else { self.begin(cache, now) };
        };
        if batch.target.is_some() {
            let oldest = batch.oldest;
            self.decide(cache, oldest, false, now);
        }
        if let Some(until) = self.submit(cache, queue, now) {
            return if queue.in_flight() > 0 { Progress::InFlight } else { Progress::Nothing(Some(until)) };
        }
        // Requests, or the flush behind them.
        if queue.in_flight() > 0 {
            return Progress::InFlight;
        }
        if self.park_refused(cache, now) {
            return Progress::Busy;
        }
        let Some(batch) = &mut self.batch else { return Progress::Busy };
        if batch.target.is_none() && batch.taken.is_empty() {
            // The device accepted none of the parked ranges: a flush would have no effect.
            self.finish_parked(cache, now);
            return Progress::Busy;
        }
        let settles = self.by_segment.is_some() && !batch.settled;
        if !batch.complete && !settles {
            // Collect the next part: no operation of this one is in flight any more. Reclaim frees the settled segments first:
            // the next part may need them.
            if !(batch.settled && self.is_reclaiming) {
                self.collect(cache);
            }
            return Progress::Busy;
        }
        self.flush(cache, queue, now)
    }

    /// Closes the open epoch now and then while far more is dirty than the target: space comes only with the end of a whole epoch,
    /// and writers that wait for it would wait for the whole cache otherwise.
    fn close_large_epoch<E: Environment>(&mut self, cache: &Cache<E>) {
        let pool = cache.base().pool();
        let taken = pool.taken();
        if taken < self.taken + pool.large_epoch() {
            return;
        }
        self.taken = taken;
        if is_far_above_target(cache) {
            cache.close_epoch();
        }
    }

    /// Begins a batch if one is due.
    fn begin<E: Environment>(&mut self, cache: &Cache<E>, now: u64) -> Progress {
        // Before the scan: all epochs that are closed at this point are complete, so if the oldest epoch found is closed, it is
        // the oldest of all. A record of an open epoch may be appended behind the position of the scan.
        let closed = cache.base().epochs().covered() - 1;
        if self.has_lost {
            self.has_lost = !cache.note_lost();
        }
        if self.begin_parked(cache, now) {
            return Progress::Busy;
        }
        if let Some(target) = self.by_segment {
            // This batch was begun before, so everything that must be durable before it is durable.
            if now < self.failing.retry_at_ms() {
                return Progress::Nothing(Some(self.failing.retry_at_ms()));
            }
            self.batch = Some(Batch::new(cache, Some(target)));
            self.collect(cache);
            return Progress::Busy;
        }
        let oldest = self.oldest_epoch(cache);
        self.recovery_age.update(cache, oldest.is_some(), now);
        // Read behind `closed`: a limit that is claimed later does not lie below what is closed now.
        let limit = self.limit(cache, now);
        if let Some(limit) = limit.filter(|limit| oldest.is_none_or(|oldest| oldest > *limit)) {
            self.reach_limit(cache, closed, limit);
            return self.rest_at_limit(cache, oldest.is_none().then_some(closed), now);
        }
        let closed = limit.map_or(closed, |limit| closed.min(limit));
        let Some(oldest) = oldest else { return self.rest(cache, closed, now) };
        if now < self.failing.retry_at_ms() {
            return Progress::Nothing(Some(self.failing.retry_at_ms()));
        }
        let consistency = cache.settings().consistency;
        self.decide(cache, oldest, true, now);
        if let Some(due) = self.pacer.begins_at(consistency, now) {
            return Progress::Nothing(Some(due));
        }
        if oldest > closed {
            let due = self.last_end_ms + QUIET_MS;
            if !self.pacer.decision().is_urgent && now < due {
                // Overwrites in the open epoch merge meanwhile.
                return Progress::Nothing(Some(due));
            }
            // Only epochs that are not known to be complete are dirty. It is always legal to close the open one.
            cache.close_epoch();
            return Progress::Busy;
        }
        let alone = consistency == Consistency::Strict;
        // Epochs of which the backing device has all data already, unflushed, are in order in any batch.
        let has_all = cache.has_written_before(closed + 1);
        let target = if alone && !has_all { oldest } else { closed };
        let leaves_inconsistent = target > oldest && !has_all || consistency == Consistency::None;
        if leaves_inconsistent {
            // 1. Before any data of a batch of several epochs is written, the region records durably that the backing device
            //    alone is not crash-consistent until the whole batch is drained.
            cache.base().epochs().void_until_epoch(cache.base().context(), target);
        }
        self.decide(cache, oldest, false, now);
        self.batch = Some(Batch { oldest, leaves_inconsistent, ..Batch::new(cache, Some(target)) });
        self.collect(cache);
        Progress::Busy
    }

    /// Nothing is dirty, so every closed epoch is on the backing device. It is crash-consistent again, unless a damaged range has
    /// not been overwritten.
    fn rest<E: Environment>(&mut self, cache: &Cache<E>, closed: u64, now: u64) -> Progress {
        self.pacer.rest(cache, now);
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
        cache.wake_waiting_for_drained();
        Progress::Nothing(None)
    }

    /// Decides the pace of a batch that begins with the epoch `oldest`. `counts`: the dirty data is counted again, for which the lanes are locked.
    fn decide<E: Environment>(&mut self, cache: &Cache<E>, oldest: u64, counts: bool, now: u64) {
        let base = cache.base();
        let must = if (base.pool().has_waiters() || base.is_above_gc()) && !self.is_reclaiming {
            // A request waits for space, or nothing is clean that reclaim could free.
            Some(PaceReason::Full)
        } else {
            let is_paused = self.pacer.is_paused(cache, now);
            let hurries = cache.wanted_order() >= oldest && !is_paused;
            // A change to another mode, and requests that wait until they may go past the cache, want the same as a drain.
            let is_requested = base.epochs().requested() >= oldest
                || cache.is_changing_mode()
                || cache.has_waiting_for_drained()
                || hurries;
            let restores = (self.restored_at >= oldest).then_some(PaceReason::Restoring);
            let promised = !is_paused && self.recovery_age.is_due(cache, now);
            let promised = promised.then_some(PaceReason::RecoveryPoint);
            is_requested.then_some(PaceReason::DrainRequested).or(restores).or(promised)
        };
        if self.pacer.decide(cache, must, counts, now).is_urgent {
            self.urgent_ms = now;
        }
    }

    /// 2. Everything of the batch has been written: flush the backing device, unless it has no volatile cache.
    fn flush<E: Environment, Q: BackingQueue>(
        &mut self,
        cache: &Cache<E>,
        queue: &mut Q,
        now: u64,
    ) -> Progress {
        let is_covered = self.batch.as_ref().is_some_and(|batch| {
            !batch.needs_flush && batch.target.is_some_and(|target| cache.has_flushed_through(target))
        });
        if is_covered {
            self.flushed(cache, now);
            return Progress::Busy;
        }
        if self.send_flush(cache, queue, true) {
            return Progress::InFlight;
        }
        self.flushed(cache, now);
        Progress::Busy
    }

    /// Sends a flush of everything that the backing device has accepted. Returns `false` if none is needed, because it has no
    /// volatile cache.
    fn send_flush<E: Environment, Q: BackingQueue>(
        &mut self,
        cache: &Cache<E>,
        queue: &mut Q,
        ends_batch: bool,
    ) -> bool {
        let covered = cache.covered_by_flush();
        if !self.geometry.volatile_cache {
            cache.backing_flushed(covered);
            return false;
        }
        self.next_token += 1;
        self.flushing = Some((covered, ends_batch));
        queue.submit(OpToken(self.next_token), BackingOp::Flush);
        true
    }

    /// Sends a flush that requests wait for, beside what is in flight of a batch. Returns true if none is needed, because the
    /// backing device has no volatile cache.
    fn flush_for_requests<E: Environment, Q: BackingQueue>(
        &mut self,
        cache: &Cache<E>,
        queue: &mut Q,
        now: u64,
    ) -> bool {
        if !cache.wants_backing_flush() || self.flushing.is_some() || now < self.failing.retry_at_ms() {
            return false;
        }
        !self.send_flush(cache, queue, false)
    }

    /// The backing device has flushed the data that was written of the batch.
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

    /// Closes an epoch, which marks the lanes. If parked records and quarantines were lost without a mark, recovery would take
    /// them for writes that were never acknowledged.
    fn mark_if_relied_on<E: Environment>(cache: &Cache<E>, batch: &Batch) {
        if batch.lacks_something {
            cache.close_epoch();
        }
    }

    /// Completes a part of a batch that is written segment by segment: of the collected data the backing device lacks only what
    /// is recorded, durably, as damaged or parked. This data is not collected again, even if a later operation fails, and its
    /// segments can be reclaimed although the epoch is not drained: within an epoch any order is legal, and before a batch of
    /// several epochs the region records durably that the backing device is not crash-consistent.
    fn settle<E: Environment>(&mut self, cache: &Cache<E>, batch: &mut Batch) {
        Self::mark_if_relied_on(cache, batch);
        self.lacked_something |= batch.lacks_something;
        self.safe.clone_from(&self.cursors);
        for ((lane, cursor), cleaned) in cache.lanes().iter().zip(&self.cursors).zip(&mut batch.cleaned) {
            let (bytes, records) = core::mem::take(cleaned);
            lane.count_cleaned(bytes, records);
            lane.lock().settle(*cursor);
        }
        batch.settled = true;
        self.lanes_without_space = 0;
        self.failing.recovered();
        cache.backing().end_trouble();
    }

    /// Everything up to `target` is durable on the backing device, except what is damaged or parked. `lacked_something`: it lacked
    /// some content of the batch.
    fn reach<E: Environment>(&mut self, cache: &Cache<E>, target: u64, lacked_something: bool) {
        // The backing device lacks a damaged or parked range until an overwrite of the range has been drained. An overwrite that
        // completed since the last batch ended has at most the present epoch.
        let lacks_something = cache.has_damage() || cache.has_parked();
        let lacked_something = lacks_something || self.lacked_something || lacked_something;
        let void_until = if lacked_something { cache.base().epochs().present() } else { 0 };
        self.lacked_something = lacks_something;
        self.restored_at = if lacks_something { 0 } else { void_until };
        cache.base().epochs().reach(cache.base().context(), target, void_until);
    }

    /// 3. All data of the batch is durable on the backing device: make drained durable before any later operation is submitted.
    fn finish<E: Environment>(&mut self, cache: &Cache<E>, batch: Batch, target: u64, now: u64) {
        Self::mark_if_relied_on(cache, &batch);
        self.reach(cache, target, batch.lacks_something);
        self.by_segment = None;
        self.lanes_without_space = 0;
        self.safe.clone_from(&self.cursors);
        for (lane, (bytes, records)) in cache.lanes().iter().zip(batch.cleaned) {
            lane.count_cleaned(bytes, records);
        }
        self.last_end_ms = now;
        self.pacer.note_batch_end(cache.settings().consistency);
        self.failing.recovered();
        cache.backing().end_trouble();
        cache.wake_waiting_for_drained();
    }

    /// Damage could not be recorded durably, or what is refused could not be parked, so nothing beyond it may be
    /// declared clean. The batch restarts and is written segment by segment, so that each segment is free again before
    /// the next one needs space. If the batch is written segment by segment already, it continues with the next lane,
    /// which may have room in its open segment. If no lane has, writeback waits until reclaim has had a chance to free
    /// a segment. What was recorded stays recorded in all cases.
    fn give_up<E: Environment>(&mut self, cache: &Cache<E>, why: &'static str) {
        let target = self.batch.as_ref().and_then(|batch| batch.target);
        if self.by_segment.is_none() && target.is_some() {
            self.by_segment = target;
            self.failing.forget_batch();
            self.batch = None;
            self.cursors.clone_from(&self.safe);
            return;
        }
        if target.is_some() {
            let lanes = cache.lanes().len();
            self.lane_first = (self.lane_first + 1) % lanes as u32;
            self.lanes_without_space += 1;
            if self.lanes_without_space < lanes {
                self.failing.forget_batch();
                self.batch = None;
                self.cursors.clone_from(&self.safe);
                return;
            }
            self.lanes_without_space = 0;
        }
        let error = Error::new(ErrorKind::NoSpace, why);
        self.failing.note(cache.base().environment().monotonic_ms());
        self.restart(cache, &error);
    }

    fn restart<E: Environment>(&mut self, cache: &Cache<E>, error: &Error) {
        cache.backing().note_failure(cache.base().environment(), error);
        self.failing.forget_batch();
        if self.batch.take().is_some_and(|batch| batch.target.is_none()) {
            self.parked.postpone(cache.base().environment().monotonic_ms());
        }
        self.cursors.clone_from(&self.safe);
    }
}

#[cfg(test)]
mod tests;
