//! Writeback of what is parked, and parking of what the backing device refuses.
//!
//! Always true here:
//! - what is parked is tried again when nothing else of writeback is in flight, and only what is still the newest;
//! - it is parked no longer when the backing device has taken and flushed it;
//! - an idle cache stores nothing because of it: attempts change nothing on media.
//!
//! Left to others: what parking is (`parking`), what counts as refused (`failing`).

use super::{Batch, Content, Piece, REQUEST_MAX, Writeback};
use crate::{Cache, Environment, lane::Outcome};
use alloc::{collections::VecDeque, vec::Vec};
use cbd_types::{CHECKSUM_BLOCK, CHUNK, Error, ErrorKind, heap_sort_by_key};

/// What is parked is tried again after this time, doubled each time that the device takes none of it, up to the limit.
const RETRY_FIRST_MS: u64 = 30_000;
const RETRY_MAX_MS: u64 = 600_000;
/// When somebody asks for a drain it is tried at once, but not before this time has passed since it was tried last.
const RETRY_ASKED_MS: u64 = 1000;
/// So many refusals, and nothing taken, end the attempt.
const REFUSALS_MAX: usize = 8;

/// When what is parked is tried again.
pub(super) struct Attempts {
    due_ms: u64,
    delay_ms: u64,
    tried_ms: u64,
    /// Refusals in the present batch of what is parked, and in all of them.
    refusals: usize,
    turn: usize,
    /// The last drain that was asked for, and whether the present batch is for it.
    requested: u64,
    is_asked: bool,
}

impl Attempts {
    pub(super) const fn new(now_ms: u64) -> Self {
        Self {
            due_ms: now_ms,
            delay_ms: RETRY_FIRST_MS,
            tried_ms: now_ms,
            refusals: 0,
            turn: 0,
            requested: 0,
            is_asked: false,
        }
    }

    /// When what is parked is tried again.
    pub(super) const fn due_ms(&self) -> u64 {
        self.due_ms
    }

    /// The attempt failed as a whole: the next one is due after the present delay.
    pub(super) const fn put_off(&mut self, now_ms: u64) {
        self.due_ms = now_ms + self.delay_ms;
    }
}

impl Writeback {
    /// Begins a batch of what is parked, if it is time for that.
    pub(super) fn begin_parked<E: Environment>(&mut self, cache: &Cache<E>, now: u64) -> bool {
        let requested = cache.base().epochs().requested();
        if requested > self.parked.requested {
            self.parked.requested = requested;
            self.parked.is_asked = true;
            self.parked.due_ms = self.parked.due_ms.min(self.parked.tried_ms + RETRY_ASKED_MS);
        }
        if now < self.parked.due_ms {
            return false;
        }
        let mut pieces: Vec<Piece> = cache
            .parked()
            .into_iter()
            .map(|(range, parked)| match parked.zeroes {
                true => (range, Content::Zeroes),
                false => {
                    let lane = cache.base().identity().lanes.lane_of(range.start);
                    (range, Content::Data { location: parked.location, lane, sequence: parked.sequence })
                }
            })
            .collect();
        if pieces.is_empty() {
            return false;
        }
        heap_sort_by_key(&mut pieces, |(range, _)| range.start);
        // Not always the same first, since few are tried while none is taken.
        let turn = self.parked.turn % pieces.len();
        pieces.rotate_left(turn);
        self.parked.refusals = 0;
        self.batch =
            Some(Batch { pieces: pieces.into(), complete: true, ..Batch::new(None, cache.lanes().len()) });
        self.parked.tried_ms = now;
        true
    }

    /// What the device has refused sector by sector is parked, once the rest of the part is written, so that the batch can
    /// be drained. `false` when there is none.
    pub(super) fn park_refused<E: Environment>(&mut self, cache: &Cache<E>, now: u64) -> bool {
        if self.failing.refused().is_empty() {
            return false;
        }
        let refused = self.failing.refused().iter().map(|(range, content)| (*range, content.refused()));
        if !cache.can_park(refused) {
            self.failing.too_much(now, REQUEST_MAX);
            return true;
        }
        if let Some(batch) = &mut self.batch {
            // Also of what newer data covers: the backing device never shows it.
            batch.lacks_something = true;
            batch.has_parked = true;
        }
        let mut refused: VecDeque<Piece> = together(self.failing.take_refused()).into();
        while let Some((range, content)) = refused.pop_front() {
            match cache.park(range, content.refused()) {
                Outcome::Done => self.failing.parked(range),
                // It is loaded again, and quarantined.
                Outcome::Damaged => {
                    if let Some(batch) = &mut self.batch {
                        batch.pieces.push_front((range, content));
                    }
                }
                Outcome::NoSpace => {
                    let error = Error::new(
                        ErrorKind::NoSpace,
                        "no segment is free to park what the backing device refuses",
                    );
                    cache.backing().note_failure(cache.base().environment(), &error);
                    refused.push_front((range, content));
                    self.failing.no_space(refused.into(), now, REQUEST_MAX);
                    break;
                }
            }
        }
        true
    }

    /// The same for a batch of what is parked: what the device has taken, and flushed, is parked no longer.
    pub(super) fn finish_parked<E: Environment>(&mut self, cache: &Cache<E>, now: u64) {
        let Some(batch) = self.batch.take() else { return };
        self.parked.delay_ms = if batch.taken.is_empty() {
            (self.parked.delay_ms * 2).min(RETRY_MAX_MS)
        } else {
            RETRY_FIRST_MS
        };
        self.parked.due_ms = now + self.parked.delay_ms;
        self.parked.is_asked = false;
        cache.parked_counters().count_attempt();
        if !batch.taken.is_empty() && self.failing.flush_worked() {
            cache.backing().end_trouble();
        }
        for (range, content) in batch.taken {
            cache.unpark(range, content.refused());
        }
        if !cache.has_parked() {
            cache.parked_counters().forget_refusal();
        }
    }

    /// What is parked was refused once more.
    pub(super) fn stays_parked<E: Environment>(&mut self, cache: &Cache<E>, error: &Error) {
        cache.parked_counters().note_refusal(error);
        self.parked.turn = self.parked.turn.wrapping_add(1);
        self.parked.refusals += 1;
        if let Some(batch) = &mut self.batch
            && batch.taken.is_empty()
            && !self.parked.is_asked
            && self.parked.refusals >= REFUSALS_MAX
        {
            // A device can take half a minute to refuse a sector, and the rest of the writeback waits meanwhile.
            batch.pieces.clear();
        }
    }
}

/// Neighbouring sectors of one content, but for data no more than a checksum block: what one parked record takes.
fn together(refused: Vec<Piece>) -> Vec<Piece> {
    let mut joined: Vec<Piece> = Vec::new();
    for (range, content) in refused {
        let unit = if matches!(content, Content::Data { .. }) { CHECKSUM_BLOCK } else { CHUNK };
        match joined.last_mut() {
            Some((last, same))
                if last.end == range.start && *same == content && last.start / unit == range.start / unit =>
            {
                last.end = range.end;
            }
            _ => joined.push((range, content)),
        }
    }
    joined
}
