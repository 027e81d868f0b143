//! The requests of clients in a world, and their results.
//!
//! Invariants: the oracle records a request before the engine gets it, and its completion as soon as the client gets
//! it.

use super::World;
use crate::oracle::{Moment, OpenChange};
use crate::pattern::Content;
use crate::workload::Wish;
use cbd_types::{AlignedBuffer, ByteRange, Completion, ErrorKind, Operation, Request};
use std::collections::BTreeMap;

/// A request with a client that waits for it.
pub(super) struct PendingRequest {
    wish: Wish,
    pub(super) client: usize,
    submitted: Moment,
    /// The number of changes of the cache when it was submitted, if all writes were cached.
    cached_at: Option<u64>,
    pub(super) change: Option<OpenChange>,
    /// The content of a write whose client changes its buffer during the copy.
    fickle: Option<Content>,
}

/// How often a client submits several requests at once.
const AT_ONCE_PERMILLE: u64 = 100;

impl World {
    /// A client submits one request, or several at once.
    pub(super) fn ask(&mut self) {
        if self.random.chance(AT_ONCE_PERMILLE) {
            return self.ask_at_once();
        }
        let wish = self.workload.next(&mut self.random);
        self.submit(wish);
    }

    fn ask_at_once(&mut self) {
        let client = self.random.below(self.options.clients as u64) as usize;
        let requests = self.requests(client, 12);
        let mut done = std::mem::take(&mut self.done);
        self.process().submit_at_once(client, requests, &mut done);
        self.deliver(done);
    }

    /// Up to `most` requests that a client submits at once.
    fn requests(&mut self, client: usize, most: u64) -> Vec<Request> {
        (0..self.random.between(1, most))
            .filter_map(|_| {
                let wish = self.workload.next(&mut self.random);
                self.request(wish, client)
            })
            .collect()
    }

    /// A client submits `wish`, unless too many requests are in flight or it would overlap an open change.
    pub fn submit(&mut self, wish: Wish) -> bool {
        let client = self.random.below(self.options.clients as u64) as usize;
        self.submit_to(client, wish)
    }

    /// As [`submit`](Self::submit), for this client.
    pub(super) fn submit_to(&mut self, client: usize, wish: Wish) -> bool {
        let Some(request) = self.request(wish, client) else { return false };
        let mut done = std::mem::take(&mut self.done);
        self.process().submit(client, request, &mut done);
        self.deliver(done);
        true
    }

    /// The request of `client` for this wish; the oracle records it here.
    fn request(&mut self, wish: Wish, client: usize) -> Option<Request> {
        let changes = !matches!(wish.operation, Operation::Read | Operation::Flush);
        if self.asked.len() >= self.options.in_flight_max
            || (changes && self.oracle.overlaps_open(wish.range))
        {
            return None;
        }
        let mut buffer = AlignedBuffer::default();
        let (mut change, mut fickle) = (None, None);
        match wish.operation {
            Operation::Write => {
                let content = self.oracle.fresh_content();
                buffer = AlignedBuffer::from_slice(&self.oracle.payload(wish.range, content));
                change = Some(self.oracle.submit(wish.range, content));
                if self.random.chance(self.options.fickle_permille) {
                    self.memory.set_fickle(content, true);
                    fickle = Some(content);
                }
            }
            Operation::Discard | Operation::WriteZeroes => {
                change = Some(self.oracle.submit(wish.range, Content::ZEROES));
            }
            Operation::Read => buffer = AlignedBuffer::from_slice(&vec![0xdd; wish.range.len() as usize]),
            Operation::Flush => {}
        }
        let submitted = self.oracle.now();
        let id = self.next_id;
        self.next_id += 1;
        let cached_at = self.cached_at();
        self.asked.insert(id, PendingRequest { wish, client, submitted, cached_at, change, fickle });
        Some(Request::unmarked(id, wish.operation, wish.range, wish.fua, buffer))
    }

    /// The number of changes of the cache so far, if all writes are cached: a write that begins and ends with the same number is
    /// durable when it has ended.
    fn cached_at(&self) -> Option<u64> {
        let process = self.process.as_ref().filter(|_| self.options.varies_caches())?;
        process.caches_writes().then_some(self.route_changes)
    }

    /// All clients submit requests and the background worker steps, on interleaved threads. The clients get the
    /// completions when all threads have ended.
    pub(super) fn ask_together(&mut self) {
        let mut requests = BTreeMap::new();
        for client in 0..self.options.clients {
            let wanted = if self.random.chance(200) {
                let wish = Wish { operation: Operation::Flush, range: ByteRange::at(0, 0), fua: false };
                self.request(wish, client).into_iter().collect()
            } else {
                self.requests(client, 3)
            };
            if !wanted.is_empty() {
                requests.insert(client, wanted);
            }
        }
        let (seed, permille) = (self.random.next(), *self.random.pick(&[50, 200, 500]));
        let advances = self.options.varies_caches() && self.random.chance(500);
        let done = self.process().together(seed, permille, requests, advances);
        self.deliver(done);
        if advances {
            let advanced = self.process().note_ended();
            self.note_advanced(Ok(advanced));
        }
        self.note_drained();
    }

    pub(super) fn poll(&mut self, client: usize) -> bool {
        let mut done = std::mem::take(&mut self.done);
        let polled = self.process().poll(client, &mut done);
        self.deliver(done);
        polled
    }

    /// The clients receive completions.
    fn deliver(&mut self, mut done: Vec<Completion>) {
        // Stores up to here happened before the clients received these completions.
        self.check_points();
        self.read_clock();
        for Completion { id, result, buffer } in done.drain(..) {
            let Some(asked) = self.asked.remove(&id) else {
                self.fail(format!("request {id} completed twice, or was never asked for"));
            };
            if let Some(content) = asked.fickle {
                self.memory.set_fickle(content, false);
            }
            if let Err(error) = result {
                if error.kind() == ErrorKind::Backing && self.expects_refusals && asked.change.is_some() {
                    // The oracle determines later, as after a crash, how much of it took effect.
                    self.happened.refused += 1;
                    if asked.wish.fua && self.options.varies_route {
                        // Without a cache its flush may be the one that failed, and that covered other changes too.
                        self.oracle.flush_failed();
                    }
                    continue;
                }
                let is_flush = asked.wish.operation == Operation::Flush;
                if error.kind() == ErrorKind::Backing
                    && self.expects_refusals
                    && is_flush
                    && self.options.can_bypass()
                {
                    self.happened.refused += 1;
                    self.oracle.flush_failed();
                    continue;
                }
                // Only a miss on a failing disk and a hit on damaged data may fail.
                let is_damage =
                    matches!(error.kind(), ErrorKind::Media | ErrorKind::Damaged) && self.is_damaged;
                let may_fail = is_damage || self.options.read_errors_permille > 0;
                if asked.wish.operation != Operation::Read || !may_fail {
                    self.fail(format!("{:?} failed: {error}", asked.wish));
                }
                self.happened.failed_reads += 1;
                continue;
            }
            self.happened.completed += 1;
            match asked.wish.operation {
                Operation::Read => {
                    let verdict = self.oracle.check_read(asked.wish.range, asked.submitted, &buffer);
                    self.expect(verdict);
                }
                Operation::Flush => self.oracle.flushed(asked.submitted),
                Operation::Write | Operation::Discard | Operation::WriteZeroes => {
                    if asked.wish.operation == Operation::Write {
                        self.happened.written_bytes += asked.wish.range.len();
                    }
                    let was_cached = asked.cached_at.is_some() && asked.cached_at == self.cached_at();
                    if let (Some(change), true) = (asked.change, was_cached) {
                        self.oracle.complete_in_cache(change, asked.wish.fua);
                    } else if let Some(change) = asked.change {
                        self.oracle.complete(change, asked.wish.fua);
                    }
                }
            }
        }
        self.done = done;
    }
}
