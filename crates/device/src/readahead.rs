//! Readahead: data of a sequential stream that a queue reads before a client asks for it.
//!
//! A window is a range that is read in one operation into a buffer of the queue. Its misses are registered as fills while it is
//! in flight and while its data waits for the client, so a write to it is seen: data whose fill was cancelled is not used.
//! When the client has read all of a window, its misses are completed as any other: until then nothing of it is recorded.
//!
//! Invariants: the windows of a queue have at most [`BYTES_MAX`] bytes; the misses of a window end when it is removed.
//!
//! Elsewhere: when to read ahead (`streams`), operations and requests (`queue`).

use crate::streams::STEP_MIN;
use alloc::vec::Vec;
use cbd_engine::{Cache, Environment, Miss};
use cbd_types::{AlignedBuffer, BackingOp, BackingQueue, ByteRange, OpToken, Origin, SpareBuffers};

/// Bytes of all windows of a queue.
pub(crate) const BYTES_MAX: u64 = 4 << 20;
/// Windows of a queue: what is cached in parts is read in small windows.
const WINDOWS_MAX: usize = 16;
/// A window that no read has touched during this many misses of its queue may be removed for another one.
const IDLE_MISSES: u64 = 256;
/// The tokens of operations of readahead.
pub(crate) const TOKENS: u64 = 1 << 63;

/// Data that was read for misses, and that is cached after the completions have been sent.
pub(crate) struct Fill {
    pub(crate) misses: Vec<Miss>,
    pub(crate) range: ByteRange,
    pub(crate) buffer: AlignedBuffer,
    /// The data is behind the cutoff of its stream.
    pub(crate) is_behind_cutoff: bool,
}

/// A request that waits for a window in flight.
pub(crate) struct Waiting {
    /// Its index among the parked ones.
    pub(crate) parked: usize,
    pub(crate) range: ByteRange,
}

/// A range that is read ahead.
struct Window {
    token: u64,
    range: ByteRange,
    misses: Vec<Miss>,
    /// The data; `None` while the operation is in flight.
    buffer: Option<AlignedBuffer>,
    is_behind_cutoff: bool,
    /// Bytes that clients have read.
    used: u64,
    waiting: Vec<Waiting>,
    /// The number of the miss that touched it last.
    touched: u64,
}

impl Window {
    /// Whether nothing was written to `part` since the window was registered.
    fn is_current<E: Environment>(&self, cache: &Cache<E>, part: ByteRange) -> bool {
        self.misses.iter().filter(|miss| miss.range.overlaps(&part)).all(|miss| cache.may_use(miss))
    }

    fn cancel<E: Environment>(&mut self, cache: &Cache<E>) {
        self.misses.drain(..).for_each(|miss| cache.cancel_fill(miss));
    }
}

/// What a queue reads ahead.
#[derive(Default)]
pub(crate) struct ReadAhead {
    /// In the order of their operations.
    windows: Vec<Window>,
    bytes: u64,
    submitted: u64,
    misses: u64,
}

impl ReadAhead {
    /// The number of windows, the bytes of all, and the number of their misses.
    #[cfg(test)]
    pub(crate) fn held(&self) -> (usize, u64, usize) {
        (self.windows.len(), self.bytes, self.windows.iter().map(|window| window.misses.len()).sum())
    }

    /// Counts a request that missed.
    pub(crate) const fn count_miss(&mut self) {
        self.misses += 1;
    }

    /// Copies the first bytes of `range` that windows have to `into`, which has room for `range`. Returns the end of these bytes.
    /// A window that was read to its end is added to `fills`.
    pub(crate) fn take<E: Environment>(
        &mut self,
        cache: &Cache<E>,
        range: ByteRange,
        into: &mut [u8],
        fills: &mut Vec<Fill>,
    ) -> u64 {
        let mut at = range.start;
        while at < range.end {
            let has = |window: &Window| {
                window.buffer.is_some() && window.range.start <= at && at < window.range.end
            };
            let Some(place) = self.windows.iter().position(has) else { break };
            let part = ByteRange { start: at, end: range.end.min(self.windows[place].range.end) };
            if !self.windows[place].is_current(cache, part) {
                self.remove(cache, place);
                break;
            }
            let window = &mut self.windows[place];
            if let Some(buffer) = &window.buffer {
                let (from, to) = (part.start - window.range.start, part.start - range.start);
                into[to as usize..][..part.len() as usize]
                    .copy_from_slice(&buffer[from as usize..][..part.len() as usize]);
            }
            window.used += part.len();
            window.touched = self.misses;
            // The last bytes end a window even if a few were read otherwise.
            let is_last = part.end == window.range.end && window.used >= window.range.len() / 8 * 7;
            if is_last || window.used >= window.range.len() {
                self.finish(cache, place, fills);
            }
            at = part.end;
        }
        at
    }

    /// Lets the request `parked` wait for the first bytes of `range` that windows in flight will have. Returns the end of these
    /// bytes, and how often the request waits in addition.
    pub(crate) fn wait(&mut self, parked: usize, range: ByteRange) -> (u64, usize) {
        let (mut at, mut count) = (range.start, 0);
        while at < range.end {
            let will_have = |window: &&mut Window| {
                window.buffer.is_none() && window.range.start <= at && at < window.range.end
            };
            let Some(window) = self.windows.iter_mut().find(will_have) else { break };
            if window.misses.is_empty() || window.waiting.try_reserve(1).is_err() {
                break;
            }
            let part = ByteRange { start: at, end: range.end.min(window.range.end) };
            window.touched = self.misses;
            match window.waiting.last_mut() {
                Some(last) if last.parked == parked && last.range.end == at => last.range.end = part.end,
                _ => {
                    window.waiting.push(Waiting { parked, range: part });
                    count += 1;
                }
            }
            at = part.end;
        }
        (at, count)
    }

    /// Reads `range` ahead, as far as the cache does not hold it, there is memory for it, and `backing` has no other work
    /// waiting.
    pub(crate) fn read<E: Environment>(
        &mut self,
        cache: &Cache<E>,
        backing: &mut impl BackingQueue,
        spare: &mut SpareBuffers,
        mut range: ByteRange,
        is_behind_cutoff: bool,
    ) {
        self.make_room(cache, spare, range.len());
        let room = BYTES_MAX - self.bytes;
        if room < STEP_MIN || self.windows.iter().any(|window| window.range.overlaps(&range)) {
            return;
        }
        range.end = range.end.min(range.start + room);
        let mut misses = Vec::new();
        for piece in cache.pieces(range) {
            cache.read_ahead(piece, &mut misses);
        }
        let mut run: Vec<Miss> = Vec::new();
        let mut misses = misses.into_iter().peekable();
        while let Some(miss) = misses.next() {
            let end = miss.range.end;
            if run.try_reserve(1).is_err() {
                cache.cancel_fill(miss);
            } else {
                run.push(miss);
            }
            if misses.peek().is_none_or(|next| next.range.start != end) {
                self.submit(cache, backing, spare, core::mem::take(&mut run), is_behind_cutoff);
            }
        }
    }

    /// Submits the operation of a window with these misses, which are adjacent, or cancels them.
    fn submit<E: Environment>(
        &mut self,
        cache: &Cache<E>,
        backing: &mut impl BackingQueue,
        spare: &mut SpareBuffers,
        misses: Vec<Miss>,
        is_behind_cutoff: bool,
    ) {
        let (Some(first), Some(last)) = (misses.first(), misses.last()) else { return };
        let range = ByteRange { start: first.range.start, end: last.range.end };
        let token = TOKENS | self.submitted;
        let touched = self.misses;
        let mut window = Window {
            token,
            range,
            misses,
            buffer: None,
            is_behind_cutoff,
            used: 0,
            waiting: Vec::new(),
            touched,
        };
        let is_idle = may_read_ahead(backing) && self.windows.len() < WINDOWS_MAX;
        let buffer = if is_idle && self.windows.try_reserve(1).is_ok() {
            spare.try_take(range.len() as usize)
        } else {
            None
        };
        let Some(buffer) = buffer else { return window.cancel(cache) };
        self.submitted += 1;
        self.bytes += range.len();
        self.windows.push(window);
        backing.set_origin(Origin::ReadAhead);
        backing.submit(OpToken(token), BackingOp::Read { offset: range.start, buffer });
    }

    /// Ends the operation of a window; `buffer` is `None` if it failed. Returns the requests that wait for it.
    pub(crate) fn finished<E: Environment>(
        &mut self,
        cache: &Cache<E>,
        token: OpToken,
        buffer: Option<AlignedBuffer>,
    ) -> Vec<Waiting> {
        let Some(place) = self.windows.iter().position(|window| window.token == token.0) else {
            return Vec::new();
        };
        let window = &mut self.windows[place];
        let waiting = core::mem::take(&mut window.waiting);
        // The misses of a window that is not wanted any more are cancelled.
        if buffer.is_none() || window.misses.is_empty() {
            self.remove(cache, place);
        } else {
            window.buffer = buffer;
        }
        waiting
    }

    /// Removes the windows whose data no request waits for, and lets those in flight end without use.
    pub(crate) fn clear<E: Environment>(&mut self, cache: &Cache<E>) {
        self.windows.iter_mut().for_each(|window| window.cancel(cache));
        self.windows.retain(|window| window.buffer.is_none());
        self.bytes = self.windows.iter().map(|window| window.range.len()).sum();
    }

    fn make_room<E: Environment>(&mut self, cache: &Cache<E>, spare: &mut SpareBuffers, bytes: u64) {
        while self.bytes + bytes > BYTES_MAX || self.windows.len() >= WINDOWS_MAX {
            let is_idle =
                |window: &Window| window.buffer.is_some() && window.touched + IDLE_MISSES < self.misses;
            let Some(place) = self.windows.iter().position(is_idle) else { break };
            if let Some(buffer) = self.remove(cache, place) {
                spare.give(buffer);
            }
        }
    }

    fn remove<E: Environment>(&mut self, cache: &Cache<E>, place: usize) -> Option<AlignedBuffer> {
        let mut window = self.windows.remove(place);
        self.bytes -= window.range.len();
        window.cancel(cache);
        window.buffer
    }

    /// Removes a window that was read to its end.
    fn finish<E: Environment>(&mut self, cache: &Cache<E>, place: usize, fills: &mut Vec<Fill>) {
        let mut window = self.windows.remove(place);
        self.bytes -= window.range.len();
        let Window { range, is_behind_cutoff, .. } = window;
        match window.buffer.take() {
            Some(buffer) if fills.try_reserve(1).is_ok() => {
                let misses = core::mem::take(&mut window.misses);
                fills.push(Fill { misses, range, buffer, is_behind_cutoff });
            }
            _ => window.cancel(cache),
        }
    }
}

/// Whether the backing device has room for an operation of readahead, and for the next one that a client waits for.
pub(crate) fn may_read_ahead(backing: &impl BackingQueue) -> bool {
    backing.in_flight() + 2 <= backing.depth()
}
