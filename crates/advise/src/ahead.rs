//! What a small cache reads ahead: the windows of sequential streams, as far as they are in the sample.
//!
//! A queue of a blkdev reads a stream ahead in windows, and records what a window has once a client has read all of it. A window that
//! is never read to its end is not recorded. So of a file that is read in sequence its last part misses again, and a full cache admits
//! what belongs to a window together. A sample follows the same rules.
//!
//! Invariants: the windows have at most the bytes, in the sample, that those of a queue have.
//!
//! Elsewhere: the windows of a queue, and when they are read (`cbd-device`).

use crate::Sample;
use crate::cache::Simulated;
use cbd_engine::{Cache, Miss};
use cbd_types::ByteRange;

/// Bytes of all windows of a queue.
const BYTES_MAX: u64 = 4 << 20;
/// Windows of a queue.
const WINDOWS_MAX: usize = 16;
/// A window that no read has touched during this many misses may be removed for another one.
const IDLE_MISSES: u64 = 256;

struct Window {
    range: ByteRange,
    misses: Vec<Miss>,
    is_behind_cutoff: bool,
    /// Bytes that were read.
    used: u64,
    /// The number of the miss that touched it last.
    touched: u64,
}

/// The windows of a cache.
pub(crate) struct Windows {
    windows: Vec<Window>,
    misses: u64,
    bytes_max: u64,
    idle_misses: u64,
}

/// A miss that ended, and whether it is behind the cutoff of its stream.
pub(crate) type Ended = (Miss, bool);

impl Windows {
    pub(crate) fn new(sample: Sample) -> Self {
        let shift = sample.shift.min(63);
        let (bytes_max, idle_misses) = (BYTES_MAX >> shift, (IDLE_MISSES >> shift).max(4));
        Self { windows: Vec::new(), misses: 0, bytes_max, idle_misses }
    }

    /// Ends a miss of a read: what a window has is taken from it. Adds what is to be recorded to `ended`.
    pub(crate) fn end(
        &mut self,
        cache: &Cache<Simulated>,
        mut miss: Miss,
        is_behind_cutoff: bool,
        ended: &mut Vec<Ended>,
    ) {
        self.misses += 1;
        let mut at = miss.range.start;
        while at < miss.range.end {
            let has = |window: &Window| window.range.start <= at && at < window.range.end;
            let Some(place) = self.windows.iter().position(has) else { break };
            let window = &mut self.windows[place];
            let part = ByteRange { start: at, end: miss.range.end.min(window.range.end) };
            let of_part = |miss: &&Miss| miss.range.overlaps(&part);
            if !window.misses.iter().filter(of_part).all(|miss| cache.may_use(miss)) {
                self.remove(cache, place);
                break;
            }
            window.used += part.len();
            window.touched = self.misses;
            // The last bytes end a window even if a few were read otherwise.
            let is_last = part.end == window.range.end && window.used >= window.range.len() / 8 * 7;
            if is_last || window.used >= window.range.len() {
                let window = self.windows.remove(place);
                ended.extend(window.misses.into_iter().map(|miss| (miss, window.is_behind_cutoff)));
            }
            at = part.end;
        }
        if at == miss.range.end {
            return cache.cancel_fill(miss);
        }
        if at > miss.range.start {
            cache.narrow(&mut miss, at);
        }
        ended.push((miss, is_behind_cutoff));
    }

    /// Reads `range` ahead, as far as the cache does not hold it.
    pub(crate) fn read(&mut self, cache: &Cache<Simulated>, mut range: ByteRange, is_behind_cutoff: bool) {
        self.make_room(cache, range.len());
        let held: u64 = self.windows.iter().map(|window| window.range.len()).sum();
        let room = self.bytes_max.saturating_sub(held);
        if room == 0 || self.windows.iter().any(|window| window.range.overlaps(&range)) {
            return;
        }
        range.end = range.end.min(range.start + room);
        let mut misses = Vec::new();
        cache.pieces(range).for_each(|piece| cache.read_ahead(piece, &mut misses));
        let mut run: Vec<Miss> = Vec::new();
        let mut misses = misses.into_iter().peekable();
        while let Some(miss) = misses.next() {
            let end = miss.range.end;
            run.push(miss);
            if misses.peek().is_none_or(|next| next.range.start != end) {
                self.begin(cache, std::mem::take(&mut run), is_behind_cutoff);
            }
        }
    }

    fn begin(&mut self, cache: &Cache<Simulated>, misses: Vec<Miss>, is_behind_cutoff: bool) {
        if self.windows.len() >= WINDOWS_MAX {
            return misses.into_iter().for_each(|miss| cache.cancel_fill(miss));
        }
        let (Some(first), Some(last)) = (misses.first(), misses.last()) else { return };
        let range = ByteRange { start: first.range.start, end: last.range.end };
        self.windows.push(Window { range, misses, is_behind_cutoff, used: 0, touched: self.misses });
    }

    fn make_room(&mut self, cache: &Cache<Simulated>, bytes: u64) {
        let held = |windows: &[Window]| windows.iter().map(|window| window.range.len()).sum::<u64>();
        while held(&self.windows) + bytes > self.bytes_max || self.windows.len() >= WINDOWS_MAX {
            let is_idle = |window: &Window| window.touched + self.idle_misses < self.misses;
            let Some(place) = self.windows.iter().position(is_idle) else { break };
            self.remove(cache, place);
        }
    }

    fn remove(&mut self, cache: &Cache<Simulated>, place: usize) {
        self.windows.remove(place).misses.into_iter().for_each(|miss| cache.cancel_fill(miss));
    }
}
