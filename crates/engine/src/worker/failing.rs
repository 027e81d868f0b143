//! What the backing device refuses of a batch: tried again, and after a bound narrowed down to what it really refuses.
//!
//! Always true here:
//! - nothing is forgotten: what was added is given out again, or is among what is refused, until the batch ends;
//! - what is refused is no larger than a sector, or a known bad range, and was tried by itself.
//!
//! Left to others: what a refused range becomes (`parking`), and when an operation may be issued (`writeback`).

use super::writeback::Piece;
use crate::{OnWriteError, Settings, rangemap::RangeMap};
use alloc::{
    collections::{BTreeMap, VecDeque},
    vec::Vec,
};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, OpToken, heap_sort_by_key};

/// What failed is tried again after this time, doubled each time up to the limit.
const RETRY_FIRST_MS: u64 = 250;
const RETRY_MAX_MS: u64 = 8000;
/// When more is refused than can be parked, it is found out again after this time whether that is still so.
const TOO_MUCH_MS: u64 = 60_000;
/// Most known bad ranges that are remembered; knowing them only saves time.
const KNOWN_MAX: usize = 4096;

/// So many flushes in a row fail before it is the device that does not flush, and not chance.
const FLUSHES_MIN: u32 = 8;

/// Into what a failing request has been cut.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Cut {
    /// As it was first sent.
    Request,
    Blocks,
    Sectors,
}

/// Neighbouring pieces of a batch as one request.
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

    /// The same in requests of at most `unit` bytes.
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
    /// Ranges that were refused before, and not taken since: for them nobody waits.
    known: RangeMap<()>,
    /// Since when no batch came through because of a failure.
    since_ms: Option<u64>,
    /// When the device last took what it had refused.
    progress_ms: u64,
    /// Flushes that failed since then: it is not a matter of single ranges.
    flushes: u32,
    /// Until when more is refused than can be parked.
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

    /// Something was submitted.
    pub(crate) fn submitted(&mut self, token: OpToken, flight: Flight) {
        self.flying.insert(token, flight);
    }

    /// It came back.
    pub(crate) fn returned(&mut self, token: OpToken) -> Option<Flight> {
        self.flying.remove(&token)
    }

    /// The device has taken a request. One that it had refused before shows that it is not stuck.
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

    /// The device has refused a flush: the batch is begun again.
    pub(crate) fn flush_failed(&mut self, now: u64) {
        self.note(now);
        self.flushes = self.flushes.saturating_add(1);
    }

    /// Something did not go, whatever it was; it is tried again after a time.
    pub(crate) fn note(&mut self, now: u64) {
        self.since_ms.get_or_insert(now);
        if now >= self.retry_at_ms {
            self.retry_at_ms = now + self.retry_delay_ms;
            self.retry_delay_ms = (self.retry_delay_ms * 2).min(RETRY_MAX_MS);
        }
    }

    /// A batch has come through.
    pub(crate) fn recovered(&mut self) {
        self.forget_batch();
        self.since_ms = None;
        self.flushes = 0;
        self.too_much_until_ms = 0;
        self.retry_delay_ms = RETRY_FIRST_MS;
    }

    /// The batch is given up; what is in flight still comes back.
    pub(crate) fn forget_batch(&mut self) {
        self.flying.clear();
        self.again.clear();
        self.refused.clear();
    }

    /// The device has flushed what it took; whether that is news.
    pub(crate) fn flush_worked(&mut self) -> bool {
        let is_news = self.flushes > 0;
        if is_news {
            self.recovered();
        }
        is_news
    }

    /// When a batch may be begun after one failed.
    pub(crate) const fn retry_at_ms(&self) -> u64 {
        self.retry_at_ms
    }

    fn is_past_bound(&self, settings: &Settings, now: u64) -> bool {
        self.since_ms.is_some_and(|since| {
            now >= since.max(self.progress_ms) + u64::from(settings.write_error_after_s) * 1000
        })
    }

    /// Whether the device has flushed nothing for long.
    fn flushes_nothing(&self, settings: &Settings, now: u64) -> bool {
        let bound_ms = u64::from(settings.write_error_after_s) * 1000;
        self.flushes >= FLUSHES_MIN && self.since_ms.is_some_and(|since| now >= since + bound_ms)
    }

    /// Whether what fails is to be narrowed down now.
    fn narrows(&self, flight: &Flight, settings: &Settings, now: u64) -> bool {
        settings.on_write_error == OnWriteError::Park
            && now >= self.too_much_until_ms
            && (self.is_past_bound(settings, now) || flight.range().is_some_and(|range| self.is_known(range)))
    }

    /// Whether requests that find no space are to fail instead of waiting.
    pub(crate) fn is_stalled(&self, settings: &Settings, now: u64) -> bool {
        let is_for_parking = settings.on_write_error == OnWriteError::Park && now >= self.too_much_until_ms;
        self.flushes_nothing(settings, now) || self.is_past_bound(settings, now) && !is_for_parking
    }

    /// What is to be tried again now, if anything.
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

    /// Requests that wait to be tried again.
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

    /// The same, to be dealt with.
    pub(crate) fn take_refused(&mut self) -> Vec<Piece> {
        let mut refused = core::mem::take(&mut self.refused);
        heap_sort_by_key(&mut refused, |(range, _)| range.start);
        refused
    }

    /// What was refused is parked: nobody waits for it any more.
    pub(crate) fn parked(&mut self, range: ByteRange) {
        if self.known.iter().count() < KNOWN_MAX {
            self.known.insert(range, (), |()| false);
        }
    }

    /// More is refused than can be parked: the device is to be waited for.
    pub(crate) fn too_much(&mut self, now: u64, request_max: u64) {
        let refused = core::mem::take(&mut self.refused);
        self.put_back(refused, now, now + TOO_MUCH_MS, request_max);
    }

    /// There is no space to park these at present.
    pub(crate) fn no_space(&mut self, refused: Vec<Piece>, now: u64, request_max: u64) {
        self.put_back(refused, now, now + RETRY_FIRST_MS, request_max);
    }

    /// Everything that fails is tried again in few requests, and narrowed down not before `until`.
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
    pub(crate) fn knows_any(&self) -> bool {
        !self.known.is_empty()
    }

    /// Cuts `piece` at the borders of what was refused before, so that the rest is written without it.
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
