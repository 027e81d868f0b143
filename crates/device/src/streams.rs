//! Sequential streams: of reads, recognized by their misses, and of writes.
//!
//! A request that continues where an earlier one ended belongs to its stream. A new stream is a candidate until enough bytes were
//! read in sequence, so random requests do not displace streams. All queues of a device share one table: a stream that alternates
//! between queues is one stream.
//!
//! Invariants: only speed depends on this table; a lookup takes bounded time and allocates nothing. A stream is read ahead only
//! for the queue that has read its last [`CONFIRMED`] bytes: the data is in buffers of that queue.
//!
//! Elsewhere: the data that was read ahead (`readahead`), and hits, which each queue follows itself (`queue`).

use alloc::{vec, vec::Vec};
use cbd_types::ByteRange;

/// A stream has at least this many bytes, and has been continued so often: of long random requests now and then one continues
/// another.
const CONFIRMED: u64 = 128 << 10;
const CONTINUATIONS: u32 = 2;
/// Streams that are followed at a time.
const STREAMS: usize = 16;
/// Requests that may be the first ones of a stream.
const CANDIDATES: usize = 64;
/// Requests of a stream may be out of order by this many bytes, since queues run on different threads, while there are at most so
/// many lookups between two of them.
const SLACK: u64 = 256 << 10;
const SLACK_LOOKUPS: u64 = 256;
/// Bytes of the first step of readahead, and of the longest one. A step is twice as long as the one before.
pub(crate) const STEP_MIN: u64 = 128 << 10;
pub(crate) const STEP_MAX: u64 = 1 << 20;
/// Steps begin and end at whole checksum blocks.
const BLOCK: u64 = cbd_types::CHECKSUM_BLOCK;

/// A request that may be the first one of a stream.
#[derive(Clone, Copy)]
struct Candidate {
    /// The offset at which it would continue; `u64::MAX` if there is none.
    next: u64,
    bytes: u64,
    /// How often it was continued.
    continuations: u32,
    queue: u32,
}

/// A stream.
#[derive(Clone, Copy)]
struct Stream {
    /// The end of its last request; `u64::MAX` if there is none.
    next: u64,
    /// Bytes read in sequence, hits included.
    bytes: u64,
    /// Bytes that were skipped on the way.
    skipped: u64,
    /// The queue of the last request, and the bytes that the stream has read there without a change of the queue.
    queue: u32,
    bytes_in_queue: u64,
    /// The end of what was read ahead, the start of the last step, and its length.
    ahead: u64,
    last_step: u64,
    step: u64,
    /// The number of its last lookup.
    seen: u64,
}

const NO_CANDIDATE: Candidate = Candidate { next: u64::MAX, bytes: 0, continuations: 0, queue: 0 };
const NO_STREAM: Stream = Stream {
    next: u64::MAX,
    bytes: 0,
    skipped: 0,
    queue: 0,
    bytes_in_queue: 0,
    ahead: 0,
    last_step: 0,
    step: 0,
    seen: 0,
};

/// What a request is in its stream.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Followed {
    /// Bytes that the stream had read before this request; 0 for the first request.
    pub(crate) before: u64,
    /// It continues its stream, instead of changing or reading again what the stream has passed.
    pub(crate) advances: bool,
    /// The range to read ahead, if it is time for the next step, and the bytes of the stream before that range.
    pub(crate) step: Option<(ByteRange, u64)>,
}

/// The streams of a device.
pub struct Streams {
    streams: Vec<Stream>,
    candidates: Vec<Candidate>,
    /// The candidate that is replaced next.
    oldest: usize,
    lookups: u64,
}

impl Default for Streams {
    fn default() -> Self {
        Self::new()
    }
}

impl Streams {
    /// No streams.
    #[must_use]
    pub fn new() -> Self {
        Self {
            streams: vec![NO_STREAM; STREAMS],
            candidates: vec![NO_CANDIDATE; CANDIDATES],
            oldest: 0,
            lookups: 0,
        }
    }

    /// Notes that a client reads `range`. Returns the bytes that the stream of this read had read before, 0 if it belongs to none, and
    /// the range to read ahead up to `limit`, if it is time for that, with the bytes of the stream before that range. For a
    /// simulation, which has no queues.
    pub fn follow_alone(&mut self, range: ByteRange, limit: u64) -> (u64, Option<(ByteRange, u64)>) {
        let followed = self.follow(0, range.start, range, limit);
        (followed.before, followed.step)
    }

    /// Notes that `queue` reads `asked`, part of which missed, or writes it. `run_start`: where the hits began that end at its start,
    /// or its start. `limit`: the end of what may be read ahead; 0 if nothing may.
    pub(crate) fn follow(&mut self, queue: u32, run_start: u64, asked: ByteRange, limit: u64) -> Followed {
        self.lookups += 1;
        let lookups = self.lookups;
        let continued = |stream: &&mut Stream| stream.is_continued_by(run_start, asked, lookups);
        if let Some(stream) = self.streams.iter_mut().find(continued) {
            let before = stream.bytes;
            // Only a request that continues exactly is evidence that the data behind it will be wanted.
            let is_exact = run_start <= stream.next && stream.next < asked.end;
            let advances = stream.next < asked.end;
            stream.seen = lookups;
            stream.advance(queue, run_start, asked);
            if stream.skipped > SLACK + stream.bytes / 8 {
                *stream = NO_STREAM;
                return Followed::default();
            }
            let step = if is_exact { stream.next_step(asked.len(), limit) } else { None };
            return Followed { before, advances, step };
        }
        let continued = |candidate: &&mut Candidate| (run_start..=asked.start).contains(&candidate.next);
        let (mut before, mut is_same) = (asked.start - run_start, true);
        let mut continuations = if before > 0 { CONTINUATIONS } else { 0 };
        let place = match self.candidates.iter_mut().find(continued) {
            Some(candidate) => {
                before = candidate.bytes + (asked.start - candidate.next);
                is_same = candidate.queue == queue;
                continuations += candidate.continuations + 1;
                candidate
            }
            None => {
                self.oldest = (self.oldest + 1) % CANDIDATES;
                &mut self.candidates[self.oldest]
            }
        };
        let bytes = before + asked.len();
        if continuations < CONTINUATIONS || bytes < CONFIRMED {
            *place = Candidate { next: asked.end, bytes, continuations, queue };
            return Followed { before, advances: true, step: None };
        }
        *place = NO_CANDIDATE;
        let bytes_in_queue = if is_same { bytes } else { asked.len() };
        let stream =
            Stream { next: asked.end, bytes, queue, bytes_in_queue, seen: self.lookups, ..NO_STREAM };
        let Some(place) = self.streams.iter_mut().min_by_key(|stream| stream.seen) else {
            return Followed { before, advances: true, step: None };
        };
        *place = stream;
        Followed { before, advances: true, step: place.next_step(asked.len(), limit) }
    }
}

impl Stream {
    fn is_continued_by(&self, run_start: u64, asked: ByteRange, lookups: u64) -> bool {
        let slack = if lookups - self.seen <= SLACK_LOOKUPS { SLACK } else { 0 };
        self.next != u64::MAX
            && run_start <= self.next.saturating_add(slack)
            && self.next <= asked.start.saturating_add(slack)
    }

    fn advance(&mut self, queue: u32, run_start: u64, asked: ByteRange) {
        if self.queue != queue {
            (self.queue, self.bytes_in_queue) = (queue, 0);
            (self.ahead, self.last_step, self.step) = (0, 0, 0);
        }
        self.bytes_in_queue += asked.len();
        if asked.end <= self.next {
            // A request that was overtaken: what was skipped has come.
            self.skipped = self.skipped.saturating_sub(asked.len());
            return;
        }
        self.skipped += run_start.saturating_sub(self.next);
        self.bytes += asked.end - run_start.max(self.next);
        self.next = asked.end;
    }

    /// The next step, if the stream has used all but the last one. `length`: that of the request.
    fn next_step(&mut self, length: u64, limit: u64) -> Option<(ByteRange, u64)> {
        if self.bytes_in_queue < CONFIRMED {
            return None;
        }
        let start = self.next.max(self.ahead).next_multiple_of(BLOCK);
        if start >= limit {
            return None;
        }
        if self.ahead < self.next || self.ahead == 0 {
            // Nothing is read ahead at present.
            self.step = self.step.max(length.next_multiple_of(BLOCK)).clamp(STEP_MIN, STEP_MAX);
        } else if self.next > self.last_step {
            self.step = (2 * self.step).min(STEP_MAX);
        } else {
            return None;
        }
        let range = ByteRange { start, end: (start + self.step).min(limit) };
        (self.last_step, self.ahead) = (range.start, range.end);
        Some((range, self.bytes + (range.start - self.next)))
    }
}

#[cfg(test)]
mod tests;
