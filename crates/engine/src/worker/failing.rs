//! Requests of a batch that the backing device refuses: they are retried, and after a time limit narrowed down to the sectors
//! that the device really refuses.
//!
//! Invariants:
//! - no piece is lost: an added piece is returned for a retry, or is among the refused ones, until the batch ends;
//! - a refused piece is no larger than a sector or a known bad range, and was tried in a request of its own.
//!
//! Elsewhere: parking of refused ranges (`parking`), and when an operation may be issued (`writeback`).

use super::writeback::Piece;
use crate::{OnWriteError, Settings, rangemap::RangeMap};
use alloc::{
    collections::{BTreeMap, VecDeque},
    vec::Vec,
};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, OpToken, heap_sort_by_key};

/// The delay before a failed request is retried, doubled each time up to the limit.
const RETRY_FIRST_MS: u64 = 250;
const RETRY_MAX_MS: u64 = 8000;
/// If more is refused than can be parked, narrowing down begins again after this time.
const TOO_MUCH_MS: u64 = 60_000;
/// Most known bad ranges that are remembered; they only save time.
const KNOWN_MAX: usize = 4096;

/// After this number of failed flushes in a row the device counts as unable to flush.
const FLUSHES_MIN: u32 = 8;

/// The units into which a failing request has been split.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Cut {
    /// The request as it was first submitted.
    Request,
    Blocks,
    Sectors,
}

/// Adjacent pieces of a batch in one request.
pub(crate) struct Flight {
    pub pieces: Vec<Piece>,
    cut: Cut,
    due_ms: u64,
}

impl Flight {
    pub(crate) const fn new(pieces: Vec<Piece>) -> Self {
        Self { pieces, cut: Cut::Request, due_ms: 0 }
    }

    pub(crate) fn range(&self) -> Option<ByteRange> {
        let (first, last) = (self.pieces.first()?, self.pieces.last()?);
        Some(ByteRange { start: first.0.start, end: last.0.end })
    }

    /// Splits the flight into requests of at most `unit` bytes.
    fn cut_into(self, cut: Cut, unit: u64) -> impl DoubleEndedIterator<Item = Self> {
        let mut parts: Vec<Self> = Vec::new();
        for (range, content) in self.pieces {
            for part in range.split_at_multiples(unit) {
                match parts.last_mut() {
                    Some(last)
                        if last.range().is_some_and(|range| range.start / unit == part.start / unit) =>
                    {
                        last.pieces.push((part, content));
                    }
                    _ => parts.push(Self { pieces: alloc::vec![(part, content)], cut, due_ms: 0 }),
                }
            }
        }
        parts.into_iter()
    }
}

/// The operations of writeback that are in flight or have failed.
pub(crate) struct Failing {
    sector: u64,
    flying: BTreeMap<OpToken, Flight>,
    again: VecDeque<Flight>,
    /// Sectors that the device refused one by one.
    refused: Vec<Piece>,
    /// Ranges that the device refused before and has not accepted since: they are narrowed down without waiting for the time
    /// limit.
    known: RangeMap<()>,
    /// When failures began; `None` if a batch has completed since the last one.
    since_ms: Option<u64>,
    /// When the device last accepted a request that it had refused.
    progress_ms: u64,
    /// Flushes that failed since `since_ms`: the failure does not concern single ranges.
    flushes: u32,
    /// Until this time more is refused than can be parked.
    too_much_until_ms: u64,
    retry_at_ms: u64,
    retry_delay_ms: u64,
}

impl Failing {
    pub(crate) const fn new(sector: u32, known: RangeMap<()>) -> Self {
        Self {
            sector: sector as u64,
            flying: BTreeMap::new(),
            again: VecDeque::new(),
            refused: Vec::new(),
            known,
            since_ms: None,
            progress_ms: 0,
            flushes: 0,
            too_much_until_ms: 0,
            retry_at_ms: 0,
            retry_delay_ms: RETRY_FIRST_MS,
        }
    }

    /// Records a submitted operation.
    pub(crate) fn submitted(&mut self, token: OpToken, flight: Flight) {
        self.flying.insert(token, flight);
    }

    /// Removes a completed operation.
    pub(crate) fn returned(&mut self, token: OpToken) -> Option<Flight> {
        self.flying.remove(&token)
    }

    /// The device has accepted a request. If it had refused that request before, the device is not stuck.
    pub(crate) fn taken(&mut self, flight: &Flight, now: u64) {
        if let Some(range) = flight.range() {
            self.known.remove(range, |()| true);
        }
        if flight.due_ms > 0 {
            self.progress_ms = now;
        }
    }

    /// The device has refused a request.
    pub(crate) fn add(&mut self, mut flight: Flight, settings: &Settings, now: u64) {
        self.note(now);
        let is_smallest =
            flight.cut == Cut::Sectors || flight.range().is_some_and(|range| range.len() <= self.sector);
        if is_smallest && self.narrows(&flight, settings, now) {
            self.refused.append(&mut flight.pieces);
        } else {
            flight.due_ms = self.retry_at_ms;
            self.again.push_back(flight);
        }
    }

    /// The device has failed a flush: the batch restarts.
    pub(crate) fn flush_failed(&mut self, now: u64) {
        self.note(now);
        self.flushes = self.flushes.saturating_add(1);
    }

    /// An operation failed, of whatever kind; it is retried after a delay.
    pub(crate) fn note(&mut self, now: u64) {
        self.since_ms.get_or_insert(now);
        if now >= self.retry_at_ms {
            self.retry_at_ms = now + self.retry_delay_ms;
            self.retry_delay_ms = (self.retry_delay_ms * 2).min(RETRY_MAX_MS);
        }
    }

    /// A batch is complete.
    pub(crate) fn recovered(&mut self) {
        self.forget_batch();
        self.since_ms = None;
        self.flushes = 0;
        self.too_much_until_ms = 0;
        self.retry_delay_ms = RETRY_FIRST_MS;
    }

    /// The batch is abandoned; its operations in flight still complete.
    pub(crate) fn forget_batch(&mut self) {
        self.flying.clear();
        self.again.clear();
        self.refused.clear();
    }

    /// The device has completed a flush. Returns whether flushes had failed before.
    pub(crate) fn flush_worked(&mut self) -> bool {
        let is_news = self.flushes > 0;
        if is_news {
            self.recovered();
        }
        is_news
    }

    /// When a batch may begin after a failure.
    pub(crate) const fn retry_at_ms(&self) -> u64 {
        self.retry_at_ms
    }

    fn is_past_bound(&self, settings: &Settings, now: u64) -> bool {
        self.since_ms.is_some_and(|since| {
            now >= since.max(self.progress_ms) + u64::from(settings.write_error_after_s) * 1000
        })
    }

    /// Whether the device has completed no flush for longer than the time limit.
    fn flushes_nothing(&self, settings: &Settings, now: u64) -> bool {
        let bound_ms = u64::from(settings.write_error_after_s) * 1000;
        self.flushes >= FLUSHES_MIN && self.since_ms.is_some_and(|since| now >= since + bound_ms)
    }

    /// Whether a failing request is to be narrowed down now.
    fn narrows(&self, flight: &Flight, settings: &Settings, now: u64) -> bool {
        settings.on_write_error == OnWriteError::Park
            && now >= self.too_much_until_ms
            && (self.is_past_bound(settings, now) || flight.range().is_some_and(|range| self.is_known(range)))
    }

    /// Whether requests that find no space fail instead of waiting.
    pub(crate) fn is_stalled(&self, settings: &Settings, now: u64) -> bool {
        let is_for_parking = settings.on_write_error == OnWriteError::Park && now >= self.too_much_until_ms;
        self.flushes_nothing(settings, now) || self.is_past_bound(settings, now) && !is_for_parking
    }

    /// The next request to retry now, if any.
    pub(crate) fn next(&mut self, settings: &Settings, now: u64) -> Option<Flight> {
        for _ in 0..self.again.len() {
            let flight = self.again.pop_front()?;
            if flight.cut != Cut::Sectors && self.narrows(&flight, settings, now) {
                let (cut, unit) = match flight.cut {
                    Cut::Request if self.sector < CHECKSUM_BLOCK => (Cut::Blocks, CHECKSUM_BLOCK),
                    _ => (Cut::Sectors, self.sector),
                };
                flight.cut_into(cut, unit).rev().for_each(|part| self.again.push_front(part));
                return self.again.pop_front();
            }
            if flight.due_ms <= now {
                return Some(flight);
            }
            self.again.push_back(flight);
        }
        None
    }

    /// Number of requests that wait for a retry.
    pub(crate) fn waiting(&self) -> usize {
        self.again.len()
    }

    /// When the next of them is due.
    pub(crate) fn due_ms(&self) -> Option<u64> {
        self.again.iter().map(|flight| flight.due_ms).min()
    }

    /// Sectors that the device refused one by one.
    pub(crate) fn refused(&self) -> &[Piece] {
        &self.refused
    }

    /// Takes the refused sectors, sorted by address.
    pub(crate) fn take_refused(&mut self) -> Vec<Piece> {
        let mut refused = core::mem::take(&mut self.refused);
        heap_sort_by_key(&mut refused, |(range, _)| range.start);
        refused
    }

    /// A refused range was parked: writeback does not wait for it any more.
    pub(crate) fn parked(&mut self, range: ByteRange) {
        if self.known.iter().count() < KNOWN_MAX {
            self.known.insert(range, (), |()| false);
        }
    }

    /// More is refused than can be parked: writeback waits for the device.
    pub(crate) fn too_much(&mut self, now: u64, request_max: u64) {
        let refused = core::mem::take(&mut self.refused);
        self.put_back(refused, now, now + TOO_MUCH_MS, request_max);
    }

    /// All failing requests are retried, joined into few, and not narrowed down before `until`.
    fn put_back(&mut self, refused: Vec<Piece>, now: u64, until: u64, request_max: u64) {
        self.note(now);
        self.too_much_until_ms = until;
        let mut pieces: Vec<Piece> = self.again.drain(..).flat_map(|flight| flight.pieces).collect();
        pieces.extend(refused);
        heap_sort_by_key(&mut pieces, |(range, _)| range.start);
        for (range, content) in pieces {
            let joins = |flight: &Flight| {
                flight.range().is_some_and(|so_far| {
                    so_far.end == range.start && range.end - so_far.start <= request_max
                }) && flight.pieces.last().is_some_and(|(_, last)| last.joins(&content))
            };
            match self.again.back_mut() {
                Some(last) if joins(last) => last.pieces.push((range, content)),
                _ => {
                    let mut flight = Flight::new(alloc::vec![(range, content)]);
                    flight.due_ms = self.retry_at_ms;
                    self.again.push_back(flight);
                }
            }
        }
    }

    /// Whether all of `range` was refused before.
    pub(crate) fn is_known(&self, range: ByteRange) -> bool {
        let mut end = range.start;
        for (part, ()) in self.known.touching(range) {
            if part.start != end {
                return false;
            }
            end = part.end;
        }
        end == range.end
    }

    /// Whether anything was refused before.
    pub(crate) fn has_known(&self) -> bool {
        !self.known.is_empty()
    }

    /// Splits `piece` at the boundaries of the known bad ranges, so that the rest is written without them.
    pub(crate) fn cut_at_known(&self, piece: Piece) -> Vec<Piece> {
        let (range, content) = piece;
        let mut parts = Vec::new();
        let mut start = range.start;
        for (bad, ()) in self.known.touching(range) {
            for part in [ByteRange { start, end: bad.start }, bad] {
                if !part.is_empty() {
                    parts.push((part, content));
                }
            }
            start = bad.end;
        }
        if start < range.end {
            parts.push((ByteRange { start, end: range.end }, content));
        }
        parts
    }
}

#[cfg(test)]
mod tests;
