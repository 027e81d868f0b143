//! Turns the pieces of a batch into requests to the backing device, and handles their completions.
//!
//! Invariants:
//! - at most as many requests are in flight as the queue is deep, and about as much as the backing device completes in two seconds;
//! - data is verified when it is loaded; damaged data is quarantined, durably, and not written;
//! - a failed flush makes everything dirty again that was written since the last successful one.
//!
//! Elsewhere: retries of refused requests (`failing`).

use super::{Batch, Content, NO_SPACE_TO_NOTE, Writeback};
use crate::{Cache, Environment, base::Requester, position::Location, worker::failing::Flight};
use cbd_format::{Record, RecordKind};
use cbd_types::{BackingOp, BackingQueue, ByteRange, CHECKSUM_BLOCK, LaneId, OpToken, backing::BackingDone};

/// Zeroes are written, and space is discarded, in requests of at most this many bytes.
pub(super) const ZERO_MAX: u64 = 64 << 20;

impl Writeback {
    /// As if the backing device had shown that it is fast.
    #[cfg(test)]
    pub(crate) fn assume_a_fast_disk(&mut self) {
        self.in_flight.assume_a_fast_disk();
    }

    /// Submits requests as far as the queue depth and the rate allow. Returns the time at which a request that waits may be
    /// submitted, if any.
    pub(super) fn submit<E: Environment, Q: BackingQueue>(
        &mut self,
        cache: &Cache<E>,
        queue: &mut Q,
        now: u64,
    ) -> Option<u64> {
        let settings = cache.settings();
        let (depth, paced_rate, paused_until) = self.pace_of_batch(queue.depth());
        let limit_rate = settings.writeback_rate;
        self.limit.earn(limit_rate, now);
        self.paced.earn(paced_rate, now);
        while queue.in_flight() < depth
            && self.in_flight.has_room(None)
            && let Some(mut flight) = self.failing.next(&settings, now)
        {
            if let Some(op) = self.load(cache, &mut flight) {
                self.send(cache, queue, op, flight, now);
            }
        }
        // When this many requests fail, the others would fail too.
        while queue.in_flight() < depth
            && self.failing.waiting() < queue.depth()
            && let Some((_, next)) = self.batch.as_ref().and_then(|batch| batch.pieces.front())
        {
            if !self.in_flight.has_room(Some(next)) {
                break;
            }
            let due =
                self.limit.due_ms(limit_rate, now).max(self.paced.due_ms(paced_rate, now)).max(paused_until);
            if due.is_some() {
                return due;
            }
            let Some(mut flight) = self.next_flight(cache) else { continue };
            let Some(op) = self.load(cache, &mut flight) else { continue };
            if let BackingOp::Write { buffer, .. } = &op {
                self.limit.spend(buffer.len() as u64);
                self.paced.spend(buffer.len() as u64);
            }
            self.send(cache, queue, op, flight, now);
        }
        let is_full = queue.in_flight() >= depth || !self.in_flight.has_room(None);
        if self.paced.is_saved_up(paced_rate) && is_full {
            self.pacer.note_limited();
        }
        self.failing.due_ms()
    }

    /// The number of requests that may be in flight, the rate of the pace, and when a pause is checked again. A retry of parked
    /// ranges is neither paced nor paused.
    fn pace_of_batch(&self, depth: usize) -> (usize, u64, Option<u64>) {
        let decision = self.pacer.decision();
        match &self.batch {
            Some(Batch { target: Some(_), leaves_inconsistent, .. }) => (
                if decision.is_deep { depth } else { (depth / 4).max(1) },
                decision.rate,
                decision.paused_until_ms.filter(|_| !leaves_inconsistent),
            ),
            _ => ((depth / 4).max(1), 0, None),
        }
    }

    fn send<E: Environment, Q: BackingQueue>(
        &mut self,
        cache: &Cache<E>,
        queue: &mut Q,
        op: BackingOp,
        flight: Flight,
        now: u64,
    ) {
        self.in_flight.begin(&op, cache.pace_board().moved(), now);
        if let Some(batch) = &mut self.batch {
            batch.needs_flush = true;
        }
        self.next_token += 1;
        let token = OpToken(self.next_token);
        self.failing.submitted(token, flight);
        queue.submit(token, op);
    }

    /// The next request: adjacent pieces of one kind. `None` if the next piece is obsolete.
    fn next_flight<E: Environment>(&mut self, cache: &Cache<E>) -> Option<Flight> {
        let batch = self.batch.as_mut()?;
        let (first, content) = batch.pieces.pop_front()?;
        if batch.target.is_none() {
            // Each parked range is a request of its own, so that none fails because of another. A range that was overwritten or
            // carried forward since it was collected is skipped: reclaim may have freed its segment, and another record may be
            // stored there.
            let is_newest = cache.is_still_parked(first, content.refused());
            return is_newest.then(|| Flight::new(alloc::vec![(first, content)]));
        }
        let limit = self.in_flight.request_max(&content);
        let is_known = self.failing.is_known(first);
        let mut end = first.end;
        if first.len() > limit {
            // A piece that is too long for the device is cut where a block ends.
            end = (first.start + limit) / CHECKSUM_BLOCK * CHECKSUM_BLOCK;
            batch.pieces.push_front((ByteRange { start: end, ..first }, content));
        }
        let mut pieces = alloc::vec![(ByteRange { end, ..first }, content)];
        while let Some((next, next_content)) = batch.pieces.front().copied()
            && next.start == end
            && content.joins(&next_content)
            && next.end - first.start <= limit
            && self.failing.is_known(next) == is_known
        {
            batch.pieces.pop_front();
            pieces.push((next, next_content));
            end = next.end;
        }
        Some(Flight::new(pieces))
    }

    /// The operation of a flight. The first damaged range is quarantined, and the flight ends before it; the pieces behind it
    /// return to the batch. `None` if nothing of the flight can be written.
    fn load<E: Environment>(&mut self, cache: &Cache<E>, flight: &mut Flight) -> Option<BackingOp> {
        let range = flight.range()?;
        match flight.pieces.first()?.1 {
            Content::Data { .. } => {}
            Content::Discard if self.geometry.discard_zeroes => {
                return Some(BackingOp::Discard { range });
            }
            // Old data must not reappear on a device that does not guarantee zeroes after a discard.
            Content::Discard | Content::Zeroes => return Some(BackingOp::WriteZeroes { range }),
        }
        let mut buffer = self.buffers.take(range.len() as usize);
        let requester = self.requester_of_notes();
        for number in 0..flight.pieces.len() {
            let (piece, content) = flight.pieces[number];
            let Content::Data { location, lane, sequence } = content else { continue };
            let out = &mut buffer[(piece.start - range.start) as usize..(piece.end - range.start) as usize];
            let damaged = match load_for_writeback(cache, lane, location, sequence, piece, out, requester) {
                Ok(()) => continue,
                Err(Some(damaged)) => damaged,
                Err(None) => {
                    self.buffers.give(buffer);
                    self.give_up(cache, NO_SPACE_TO_NOTE);
                    return None;
                }
            };
            cache.base().epochs().void_until_now(cache.base().context());
            // The data before the damage is written, the damaged range is quarantined, and the rest is loaded again.
            let batch = self.batch.as_mut()?;
            batch.lacks_something = true;
            let rest = flight.pieces.split_off(number);
            rest[1..].iter().rev().for_each(|later| batch.pieces.push_front(*later));
            for part in [
                ByteRange { start: damaged.end.max(piece.start), end: piece.end },
                ByteRange { start: piece.start, end: damaged.start },
            ] {
                if !part.is_empty() {
                    batch.pieces.push_front((part, content));
                }
            }
            buffer.resize((piece.start - range.start) as usize);
            break;
        }
        if buffer.is_empty() {
            self.buffers.give(buffer);
            return None;
        }
        Some(BackingOp::Write { offset: range.start, buffer })
    }

    pub(super) fn complete<E: Environment>(&mut self, cache: &Cache<E>, done: BackingDone, now: u64) {
        self.in_flight.end(&done.op);
        let flight = self.failing.returned(done.token);
        match (done.result, done.op) {
            (Ok(()), BackingOp::Flush) => {
                cache.backing().count_flush();
                let Some((covered, ends_batch)) = self.flushing.take() else { return };
                cache.backing_flushed(covered);
                if ends_batch {
                    self.flushed(cache, now);
                } else if self.batch.is_none() {
                    cache.backing().end_trouble();
                }
            }
            (Ok(()), op) => {
                if let BackingOp::Write { buffer, .. } = op {
                    cache.note_written_back(buffer.len() as u64);
                    self.pacer.note_written(buffer.len() as u64);
                    self.buffers.give(buffer);
                }
                let Some(flight) = flight else { return };
                self.failing.taken(&flight, now);
                if let Some(batch) = self.batch.as_mut().filter(|batch| batch.target.is_none()) {
                    batch.taken.extend(flight.pieces);
                }
            }
            (Err(error), BackingOp::Flush) => {
                // The device may have dropped everything since its last successful flush: all of it is dirty again.
                self.failing.flush_failed(now);
                cache.backing_flush_failed();
                self.flushing = None;
                self.restart(cache, &error);
            }
            (Err(error), op) => {
                if let BackingOp::Write { buffer, .. } = op {
                    self.buffers.give(buffer);
                }
                if self.batch.as_ref().is_some_and(|batch| batch.target.is_none()) {
                    self.stays_parked(cache, &error);
                    return;
                }
                cache.backing().note_failure(cache.base().environment(), &error);
                if let Some(flight) = flight {
                    self.failing.add(flight, &cache.settings(), now);
                }
            }
        }
    }
}

/// Loads data for writeback, verified. A damaged range is quarantined, durably, and returned as the error: it is not written. The
/// error is `None` if the range could not be quarantined.
fn load_for_writeback<E: Environment>(
    cache: &Cache<E>,
    lane: LaneId,
    location: Location,
    sequence: u64,
    piece: ByteRange,
    out: &mut [u8],
    requester: Requester,
) -> Result<(), Option<ByteRange>> {
    let place = cache.base().place_of(location);
    let quarantine = |range, sequence| {
        // The backing device had accepted the data of a write-through record, so what it has there counts.
        let is_through = |record: &Record| record.kind() == RecordKind::WriteThrough;
        cache.base().load_record(location).is_ok_and(|record| is_through(&record))
            || cache.quarantine(lane, range, sequence, place, requester)
    };
    let record = match cache.base().load_record(location) {
        Ok(record) if record.range().contains(&piece) => record,
        _ => {
            return Err(quarantine(piece, sequence).then_some(piece));
        }
    };
    cache
        .base()
        .load_data(location, &record, piece, out)
        .map_err(|damage| quarantine(damage.range, record.sequence.get()).then_some(damage.range))
}
