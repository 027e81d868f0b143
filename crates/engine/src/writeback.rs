//! Writeback: the backing device catches up, in the order that the consistency asks for.
//!
//! Always true here:
//! - an epoch is collected only after a flush's pass over every touched lane, so no record of it comes later;
//! - operations of one part of a batch do not overlap, and the next part is issued when all of them have returned, so two
//!   overlapping operations are never in flight together;
//! - data is verified before it is written; what fails is quarantined and not written;
//! - *drained* is durable after the backing device's flush and before anything of a later epoch is submitted.
//!
//! It reads the logs, not the index, and holds no lane's lock while it writes.

use crate::{
    Cache, Consistency, Environment,
    drained::{store_drained, void_until_now},
    index::Location,
    logscan::Cursor,
    overlay::Place,
    rangemap::RangeMap,
    status::BackingTrouble,
};
use alloc::{collections::VecDeque, vec::Vec};
use cbd_format::RecordKind;
use cbd_types::{
    AlignedBuffer, BackingGeometry, BackingOp, BackingQueue, ByteRange, Error, ErrorKind, LaneId, OpToken,
    Safeguard, backing::BackingDone,
};
use core::ops::ControlFlow;
use core::sync::atomic::Ordering;

/// Adjacent blocks go to the backing device in requests of at most this many bytes.
const REQUEST_MAX: u64 = 1 << 20;
/// Zeroes are written, and space is given back, in pieces of at most this many bytes.
const ZERO_MAX: u64 = 64 << 20;
/// Most records that one part of a batch is made of; bounds the memory that a batch takes.
const PART_RECORDS_MAX: usize = 128 << 10;
/// Dirty data is left alone this long while nothing presses, so that overwrites merge.
const DELAY_MS: u64 = 1000;
/// A failed operation is tried again after this time, doubled each time up to the limit.
const RETRY_FIRST_MS: u64 = 250;
const RETRY_MAX_MS: u64 = 8000;

/// What a range of a batch becomes on the backing device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Content {
    Data { location: Location, lane: LaneId, sequence: u64 },
    Zeroes,
    Discard,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Writing,
    Flushing,
}

/// Epochs on their way to the backing device.
struct Batch {
    /// The last epoch of the batch.
    target: u64,
    phase: Phase,
    /// By address; none overlaps another.
    pieces: VecDeque<(ByteRange, Content)>,
    /// Whether the part in `pieces` is the last.
    complete: bool,
    /// Failed operations, to be tried again.
    failed: Vec<BackingOp>,
    /// Dirty bytes and records that become clean with the batch, for each lane.
    cleaned: Vec<(u64, u64)>,
    /// Something of the batch is damaged: the backing device does not get it.
    has_damage: bool,
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

/// The state of writeback; the maintainer's thread owns it.
pub(crate) struct Writeback {
    geometry: BackingGeometry,
    /// Where collecting goes on in each lane.
    cursors: Vec<Cursor>,
    /// Where it begins anew when a flush failed: everything before is durable on the backing device.
    safe: Vec<Cursor>,
    batch: Option<Batch>,
    /// Something was damaged when the last batch ended; after a restart, perhaps.
    had_damage: bool,
    buffers: Vec<AlignedBuffer>,
    done: Vec<BackingDone>,
    next_token: u64,
    last_end_ms: u64,
    retry_at_ms: u64,
    retry_delay_ms: u64,
    /// Bytes that the rate limit allows now, and when that was computed.
    allowance: u64,
    allowance_ms: u64,
}

impl Writeback {
    /// `was_void`: the last process left the backing device as no crash state, perhaps because of damage.
    pub(crate) fn new(geometry: BackingGeometry, cursors: Vec<Cursor>, was_void: bool, now_ms: u64) -> Self {
        Self {
            geometry,
            safe: cursors.clone(),
            cursors,
            batch: None,
            had_damage: was_void,
            buffers: Vec::new(),
            done: Vec::new(),
            next_token: 0,
            last_end_ms: now_ms,
            retry_at_ms: 0,
            retry_delay_ms: RETRY_FIRST_MS,
            allowance: 0,
            allowance_ms: now_ms,
        }
    }

    /// Moves writeback forward as far as it goes without waiting.
    pub(crate) fn step<E: Environment, Q: BackingQueue>(
        &mut self,
        cache: &Cache<E>,
        queue: &mut Q,
    ) -> Progress {
        let now = cache.environment().monotonic_ms();
        let mut done = core::mem::take(&mut self.done);
        queue.poll(&mut done);
        for finished in done.drain(..) {
            self.complete(cache, finished, now);
        }
        self.done = done;
        let Some(batch) = &self.batch else {
            // What a batch that was given up left in flight comes back first: it must not meet its successor.
            let waits = Safeguard::WritebackGivenUp.is_kept() && queue.in_flight() > 0;
            return if waits { Progress::InFlight } else { self.begin(cache, now) };
        };
        if batch.phase == Phase::Flushing {
            return if queue.in_flight() > 0 { Progress::InFlight } else { self.flush(cache, queue, now) };
        }
        let urgent = self.is_urgent(cache, batch.target);
        if let Some(until) = self.submit(cache, queue, now, urgent) {
            return if queue.in_flight() > 0 { Progress::InFlight } else { Progress::Nothing(Some(until)) };
        }
        let Some(batch) = &mut self.batch else { return Progress::Busy };
        let may_go_on =
            if batch.complete { Safeguard::WritebackFlushLast } else { Safeguard::WritebackParts };
        if !may_go_on.holds(queue.in_flight() == 0) {
            return Progress::InFlight;
        }
        if !batch.complete {
            // The next part; nothing of this one is in flight any more.
            self.collect(cache);
            return Progress::Busy;
        }
        batch.phase = Phase::Flushing;
        self.flush(cache, queue, now)
    }

    /// Begins a batch if there is reason to.
    fn begin<E: Environment>(&mut self, cache: &Cache<E>, now: u64) -> Progress {
        // Before the scan: what is closed now is complete, so an oldest epoch that is closed is the oldest of all. A
        // record of an epoch that is still open may appear behind the scan's back.
        let mut closed = cache.covered() - 1;
        let Some(oldest) = self.oldest_epoch(cache) else { return self.rest(cache, closed) };
        if !Safeguard::WritebackClosedFirst.is_kept() {
            closed = cache.covered() - 1;
        }
        if now < self.retry_at_ms {
            return Progress::Nothing(Some(self.retry_at_ms));
        }
        let due = self.last_end_ms + DELAY_MS;
        if !self.is_urgent(cache, oldest) && now < due {
            return Progress::Nothing(Some(due));
        }
        if !Safeguard::WritebackComplete.holds(oldest <= closed) {
            // Only epochs that are not known to be complete are dirty. Closing the open one is always legal.
            cache.close_epoch();
            return Progress::Busy;
        }
        let consistency = cache.settings().consistency;
        let alone = consistency == Consistency::Strict && Safeguard::WritebackOldest.is_kept();
        let target = if alone { oldest } else { closed };
        if (target > oldest || consistency == Consistency::None) && Safeguard::WritebackVoid.is_kept() {
            // 1. Before anything of a batch of several epochs is written, it is durable that the backing device alone is
            //    no crash state until the batch is through.
            store_drained(cache, |drained| drained.void_until = drained.void_until.get().max(target).into());
        }
        self.batch = Some(Batch {
            target,
            phase: Phase::Writing,
            pieces: VecDeque::new(),
            complete: false,
            failed: Vec::new(),
            cleaned: alloc::vec![(0, 0); cache.lanes.len()],
            has_damage: false,
        });
        self.collect(cache);
        Progress::Busy
    }

    /// Nothing is dirty. What made the backing device void is over then, unless something is damaged that nobody has
    /// overwritten: all that is closed is on it.
    fn rest<E: Environment>(&mut self, cache: &Cache<E>, closed: u64) -> Progress {
        let void_until = cache.drained.lock().content().map_or(0, |drained| drained.void_until.get());
        if void_until <= cache.drained_epoch().0 || !Safeguard::WritebackRestDamage.holds(!cache.has_damage())
        {
            return Progress::Nothing(None);
        }
        if closed < void_until {
            cache.close_epoch();
            return Progress::Busy;
        }
        self.had_damage = false;
        store_drained(cache, |drained| {
            drained.epoch = closed.into();
            drained.wall_ms = cache.environment().wall_ms().into();
        });
        Progress::Nothing(None)
    }

    /// Whether writeback should go at full speed: somebody waits for space or for a drain, or much is dirty.
    fn is_urgent<E: Environment>(&self, cache: &Cache<E>, epoch: u64) -> bool {
        let (dirty, total) = (cache.dirty_bytes(), cache.segments.len() as u64 * cache.shape().size);
        cache.pool.has_waiters()
            || cache.requested.load(Ordering::SeqCst) >= epoch
            || cache.is_above_gc()
            || dirty * 100 > u64::from(cache.settings().dirty_target_percent) * total
    }

    /// The oldest epoch that the backing device must still learn of.
    fn oldest_epoch<E: Environment>(&mut self, cache: &Cache<E>) -> Option<u64> {
        let mut oldest = None;
        for lane in (0..cache.lanes.len() as u32).map(LaneId) {
            let mut cursor = self.cursors[lane.index()];
            cache.scan_log(lane, &mut cursor, &mut |_, record, _| {
                if record.is_some_and(|record| !record.kind().is_dirty()) {
                    return ControlFlow::Continue(());
                }
                // A record that cannot be read is dealt with when it is collected, with the oldest epoch there is.
                let epoch = record.map_or(cache.drained_epoch().0 + 1, |record| record.epoch.get());
                oldest = Some(oldest.map_or(epoch, |known: u64| known.min(epoch)));
                ControlFlow::Break(())
            });
            self.cursors[lane.index()] = cursor;
        }
        if oldest.is_none() {
            self.safe.clone_from(&self.cursors);
            cache.forget_dirty_that_was_lost();
        }
        oldest
    }

    /// Collects the next part of the batch from the logs: only the newest version of each block within it.
    fn collect<E: Environment>(&mut self, cache: &Cache<E>) {
        let Some(batch) = &mut self.batch else { return };
        let mut map: RangeMap<Content> = RangeMap::default();
        let mut records = 0;
        batch.complete = true;
        for lane in (0..cache.lanes.len() as u32).map(LaneId) {
            let cleaned = &mut batch.cleaned[lane.index()];
            let target = batch.target;
            let mut cursor = self.cursors[lane.index()];
            let mut full = false;
            // Lost records, with the last sequence number of each gap.
            let mut lost: Vec<(Option<u64>, Place)> = Vec::new();
            cache.scan_log(lane, &mut cursor, &mut |location, record, place| {
                let Some(record) = record else {
                    lost.push((None, place));
                    return ControlFlow::Continue(());
                };
                let sequence = record.sequence.get();
                if let Some((gap @ None, _)) = lost.last_mut() {
                    *gap = Some(sequence - 1);
                }
                if !Safeguard::WritebackTarget.holds(record.epoch.get() <= target) {
                    return ControlFlow::Break(());
                }
                let range = record.range();
                let content = match record.kind() {
                    RecordKind::Write => Content::Data { location, lane, sequence },
                    RecordKind::WriteZeroes => Content::Zeroes,
                    RecordKind::Discard => Content::Discard,
                    RecordKind::Fill | RecordKind::Quarantine => return ControlFlow::Continue(()),
                };
                if records >= PART_RECORDS_MAX {
                    full = true;
                    return ControlFlow::Break(());
                }
                cleaned.1 += 1;
                if let Content::Data { .. } = content {
                    cleaned.0 += range.len();
                    records += 1;
                    map.insert(range, content, |_| !Safeguard::WritebackNewest.is_kept());
                } else {
                    for part in cache.identity.lanes.of_lane(lane, range) {
                        records += 1;
                        map.insert(part, content, |_| false);
                    }
                }
                ControlFlow::Continue(())
            });
            self.cursors[lane.index()] = cursor;
            let whole = ByteRange { start: 0, end: cache.identity.size };
            let mut noted = true;
            for (sequence, place) in lost {
                batch.has_damage = true;
                let sequence =
                    sequence.unwrap_or_else(|| cache.lanes[lane.index()].state.lock().next_sequence - 1);
                if Safeguard::WritebackLost.is_kept() {
                    noted &= cache.quarantine(lane, whole, sequence, place);
                }
                if Safeguard::WritebackDamageVoid.is_kept() {
                    void_until_now(cache);
                }
            }
            if !Safeguard::WritebackGiveUp.holds(noted) {
                return self.give_up(cache);
            }
            if full {
                batch.complete = false;
                break;
            }
        }
        batch.pieces.extend(map.iter());
    }

    /// Submits what the depth and the rate allow. Returns a moment when something that has to wait may go on.
    fn submit<E: Environment, Q: BackingQueue>(
        &mut self,
        cache: &Cache<E>,
        queue: &mut Q,
        now: u64,
        urgent: bool,
    ) -> Option<u64> {
        let depth = if urgent { queue.depth() } else { (queue.depth() / 4).max(1) };
        let rate = cache.settings().writeback_rate;
        if rate > 0 {
            let gained = rate.saturating_mul(now.saturating_sub(self.allowance_ms)) / 1000;
            if gained > 0 {
                // A second's worth can be saved up.
                self.allowance = self.allowance.saturating_add(gained).min(rate.max(REQUEST_MAX));
                self.allowance_ms = now;
            }
        }
        if now >= self.retry_at_ms {
            while queue.in_flight() < depth
                && let Some(op) = self.batch.as_mut().and_then(|batch| batch.failed.pop())
            {
                self.send(queue, op);
            }
        }
        while queue.in_flight() < depth && self.batch.as_ref().is_some_and(|batch| !batch.pieces.is_empty()) {
            if rate > 0 && self.allowance == 0 {
                return Some(now + 10);
            }
            let Some(op) = self.next_op(cache) else { continue };
            if let BackingOp::Write { buffer, .. } = &op {
                self.allowance = self.allowance.saturating_sub(buffer.len() as u64);
            }
            self.send(queue, op);
        }
        let batch = self.batch.as_ref()?;
        (!batch.failed.is_empty()).then_some(self.retry_at_ms)
    }

    fn send<Q: BackingQueue>(&mut self, queue: &mut Q, op: BackingOp) {
        self.next_token += 1;
        queue.submit(OpToken(self.next_token), op);
    }

    /// The next request: neighbours of one kind together. `None` when nothing of what was taken can be written.
    fn next_op<E: Environment>(&mut self, cache: &Cache<E>) -> Option<BackingOp> {
        let pieces = &mut self.batch.as_mut()?.pieces;
        let (range, content) = pieces.pop_front()?;
        let Content::Data { location, lane, sequence } = content else {
            return Some(self.zero_op(range, content));
        };
        let mut run = alloc::vec![(range, location, lane, sequence)];
        let mut end = range.end;
        while let Some((next, Content::Data { location, lane, sequence })) = pieces.front().copied()
            && next.start == end
            && next.end - range.start <= REQUEST_MAX
        {
            pieces.pop_front();
            run.push((next, location, lane, sequence));
            end = next.end;
        }
        let mut buffer = self.buffers.pop().unwrap_or_default();
        buffer.resize((end - range.start) as usize);
        for (number, (piece, location, lane, sequence)) in run.iter().enumerate() {
            let out = &mut buffer[(piece.start - range.start) as usize..(piece.end - range.start) as usize];
            let damaged = match cache.load_for_writeback(*lane, *location, *sequence, *piece, out) {
                Ok(()) => continue,
                Err(Some(damaged)) => damaged,
                Err(None) => {
                    self.buffers.push(buffer);
                    self.give_up(cache);
                    return None;
                }
            };
            if Safeguard::WritebackDamageVoid.is_kept() {
                void_until_now(cache);
            }
            // What stands before the damage is written; the damage is quarantined; the rest is looked at again.
            let batch = self.batch.as_mut()?;
            batch.has_damage = true;
            let pieces = &mut batch.pieces;
            for (later, location, lane, sequence) in run[number + 1..].iter().rev() {
                pieces.push_front((
                    *later,
                    Content::Data { location: *location, lane: *lane, sequence: *sequence },
                ));
            }
            if damaged.end < piece.end {
                let rest = ByteRange { start: damaged.end.max(piece.start), end: piece.end };
                pieces.push_front((
                    rest,
                    Content::Data { location: *location, lane: *lane, sequence: *sequence },
                ));
            }
            if damaged.start > piece.start {
                let before = ByteRange { start: piece.start, end: damaged.start };
                pieces.push_front((
                    before,
                    Content::Data { location: *location, lane: *lane, sequence: *sequence },
                ));
            }
            buffer.resize((piece.start - range.start) as usize);
            break;
        }
        if buffer.is_empty() {
            self.buffers.push(buffer);
            return None;
        }
        Some(BackingOp::Write { offset: range.start, buffer })
    }

    fn zero_op(&mut self, first: ByteRange, content: Content) -> BackingOp {
        let mut range = first;
        if let Some(batch) = &mut self.batch {
            while let Some((next, what)) = batch.pieces.front().copied()
                && what == content
                && next.start == range.end
                && range.len() < ZERO_MAX
            {
                batch.pieces.pop_front();
                range.end = next.end;
            }
            if range.len() > ZERO_MAX {
                let rest = ByteRange { start: range.start + ZERO_MAX, end: range.end };
                batch.pieces.push_front((rest, content));
                range.end = rest.start;
            }
        }
        if content == Content::Discard && Safeguard::WritebackZeroes.holds(self.geometry.discard_zeroes) {
            BackingOp::Discard { range }
        } else {
            // Old data must not come back where the device does not promise zeroes.
            BackingOp::WriteZeroes { range }
        }
    }

    /// 2. Everything of the batch has been written: flush the backing device, unless it has no cache that could lose it.
    fn flush<E: Environment, Q: BackingQueue>(
        &mut self,
        cache: &Cache<E>,
        queue: &mut Q,
        now: u64,
    ) -> Progress {
        if !self.geometry.volatile_cache || !Safeguard::WritebackFlush.is_kept() {
            self.finish(cache, now);
            return Progress::Busy;
        }
        self.send(queue, BackingOp::Flush);
        Progress::InFlight
    }

    /// 3. All that the batch holds is durable on the backing device: say so, durably, before anything later is submitted.
    fn finish<E: Environment>(&mut self, cache: &Cache<E>, now: u64) {
        let Some(batch) = self.batch.take() else { return };
        // The backing device lacks what is damaged until an overwrite of it has been drained. One that came since the
        // last batch ended has at most the present epoch.
        let has_damage = cache.has_damage();
        let was_damaged = has_damage || self.had_damage || batch.has_damage;
        let void_until = if was_damaged && Safeguard::WritebackDamageStays.is_kept() {
            cache.epoch.load(Ordering::SeqCst)
        } else {
            0
        };
        self.had_damage = has_damage;
        store_drained(cache, |drained| {
            drained.void_until = drained.void_until.get().max(void_until).into();
            drained.epoch = batch.target.into();
            drained.wall_ms = cache.environment().wall_ms().into();
        });
        self.safe.clone_from(&self.cursors);
        for (lane, (bytes, records)) in cache.lanes.iter().zip(batch.cleaned) {
            lane.cleaned_bytes.fetch_add(bytes, Ordering::Relaxed);
            lane.cleaned_records.fetch_add(records, Ordering::Relaxed);
        }
        self.last_end_ms = now;
        self.retry_delay_ms = RETRY_FIRST_MS;
        *cache.trouble.lock() = None;
    }

    fn complete<E: Environment>(&mut self, cache: &Cache<E>, done: BackingDone, now: u64) {
        match (done.result, done.op) {
            (Ok(()), BackingOp::Flush) => {
                cache.backing_flushes.fetch_add(1, Ordering::Relaxed);
                self.finish(cache, now);
            }
            (Ok(()), BackingOp::Write { buffer, .. }) => {
                cache.written_back.fetch_add(buffer.len() as u64, Ordering::Relaxed);
                self.buffers.push(buffer);
            }
            (Ok(()), _) => {}
            (Err(error), BackingOp::Flush) => {
                // The device may have dropped everything since its last good flush: all of it is dirty again.
                self.note_trouble(cache, &error, now);
                if Safeguard::WritebackFlushFailed.is_kept() {
                    self.batch = None;
                    self.cursors.clone_from(&self.safe);
                }
            }
            (Err(error), op) => {
                self.note_trouble(cache, &error, now);
                if Safeguard::WritebackRetry.is_kept()
                    && let Some(batch) = &mut self.batch
                {
                    batch.failed.push(op);
                }
            }
        }
    }

    /// Damage could not be noted durably: nothing may be declared clean past it. The batch is given up and begun anew when
    /// reclaim has had a chance to free a segment.
    fn give_up<E: Environment>(&mut self, cache: &Cache<E>) {
        let error = Error::new(ErrorKind::NoSpace, "no segment is free to note damaged data");
        self.note_trouble(cache, &error, cache.environment().monotonic_ms());
        self.batch = None;
        self.cursors.clone_from(&self.safe);
    }

    fn note_trouble<E: Environment>(&mut self, cache: &Cache<E>, error: &Error, now: u64) {
        if now >= self.retry_at_ms {
            self.retry_at_ms = now + self.retry_delay_ms;
            self.retry_delay_ms = (self.retry_delay_ms * 2).min(RETRY_MAX_MS);
        }
        let mut trouble = cache.trouble.lock();
        let since_wall_ms =
            trouble.as_ref().map_or_else(|| cache.environment().wall_ms(), |trouble| trouble.since_wall_ms);
        let attempts = trouble.as_ref().map_or(0, |trouble| trouble.attempts) + 1;
        *trouble = Some(BackingTrouble { error: error.line(), since_wall_ms, attempts });
    }
}

impl<E: Environment> Cache<E> {
    /// Whether anything is quarantined that nothing has healed.
    fn has_damage(&self) -> bool {
        self.lanes.iter().any(|lane| lane.state.lock().overlay.damaged().next().is_some())
    }

    /// Bytes of data that the backing device does not have.
    pub fn dirty_bytes(&self) -> u64 {
        self.lanes
            .iter()
            .map(|lane| {
                let dirtied = lane.state.lock().counters.dirtied;
                dirtied.saturating_sub(lane.cleaned_bytes.load(Ordering::Relaxed))
            })
            .sum()
    }

    /// Nothing is dirty: records that were counted and then lost are not to be counted for ever.
    fn forget_dirty_that_was_lost(&self) {
        let drained = self.drained_epoch().0;
        for lane in &self.lanes {
            let state = lane.state.lock();
            if state.segments().all(|segment| segment.last_dirty_epoch <= drained) {
                lane.cleaned_bytes.store(state.counters.dirtied, Ordering::Relaxed);
                lane.cleaned_records.store(state.counters.dirty_records, Ordering::Relaxed);
            }
        }
    }

    /// Loads what is to be written back, verified. Damage is quarantined, durably, and its range returned: it is not written.
    /// `None` when it could not be quarantined.
    fn load_for_writeback(
        &self,
        lane: LaneId,
        location: Location,
        sequence: u64,
        piece: ByteRange,
        out: &mut [u8],
    ) -> Result<(), Option<ByteRange>> {
        let place = self.place_of(location);
        let record = match self.load_record(location) {
            Ok(record) if record.range().contains(&piece) => record,
            _ => {
                return Err(self.condemn(lane, piece, sequence, place).then_some(piece));
            }
        };
        self.load_data(location, &record, piece, out).map_err(|damage| {
            self.note_damage(damage.range, location, &damage.error);
            self.condemn(lane, damage.range, record.sequence.get(), place).then_some(damage.range)
        })
    }

    /// Quarantines what writeback found damaged. `false` when that was not possible: then the batch is given up.
    fn condemn(&self, lane: LaneId, range: ByteRange, sequence: u64, place: Place) -> bool {
        if !Safeguard::WritebackQuarantine.is_kept() {
            return true;
        }
        Safeguard::WritebackGiveUp.holds(self.quarantine(lane, range, sequence, place))
    }
}
