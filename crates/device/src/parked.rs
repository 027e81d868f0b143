//! Parked requests, and their operations on the backing device.

use crate::figures::Tally;
use alloc::vec::Vec;
use cbd_engine::{BypassReason, BypassTicket, FlushTicket, Miss, ZeroProgress};
use cbd_types::{ByteRange, Error, Request};

/// A request that has not completed.
pub(crate) struct Parked {
    pub(crate) request: Request,
    /// Its operations on the backing device that are in flight.
    pub(crate) outstanding: usize,
    /// The first error.
    pub(crate) error: Option<Error>,
    pub(crate) progress: Progress,
    pub(crate) tally: Tally,
}

impl Parked {
    /// Whether something of the request may have been done.
    pub(crate) fn has_begun(&self) -> bool {
        let has_progress = match &self.progress {
            Progress::Written(until) => *until > self.request.range.start,
            Progress::Zeroed(zeroed) => zeroed.has_begun(),
            Progress::Around(around) => {
                let is_at_start = around.next == self.request.range.start && !around.zeroed.has_begun();
                !is_at_start || around.went_past || around.cached
            }
            Progress::Reading | Progress::Forcing | Progress::Flushing(_) => true,
        };
        has_progress || self.outstanding > 0 || self.error.is_some()
    }
}

/// The progress of a request that changes the device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Progress {
    /// All bytes of the device range before this offset are written.
    Written(u64),
    Zeroed(ZeroProgress),
    /// The request waits only for the backing device.
    Reading,
    /// The request waits for the flush of its FUA.
    Forcing,
    /// The request may go past the cache.
    Around(Around),
    /// The request waits for a flush of the backing device below the cache.
    Flushing(FlushTicket),
}

/// The progress of a change that may go past the cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Around {
    /// All bytes of the device range before this offset are done, or in flight.
    pub(crate) next: u64,
    /// Why it is to go past the cache in writeback mode; `None` if it is to be cached there.
    pub(crate) reason: Option<BypassReason>,
    /// Its client is gone: what the backing device refuses is not done in another way.
    pub(crate) given_up: bool,
    /// Some of it went past the cache.
    pub(crate) went_past: bool,
    /// Some of it is in the cache.
    pub(crate) cached: bool,
    /// The progress of zeroes that are cached.
    pub(crate) zeroed: ZeroProgress,
}

impl Around {
    pub(crate) fn from(start: u64, reason: Option<BypassReason>) -> Self {
        Self {
            next: start,
            reason,
            given_up: false,
            went_past: false,
            cached: false,
            zeroed: ZeroProgress::default(),
        }
    }
}

/// An operation in flight.
pub(crate) struct InFlightOp {
    /// Index of its request among the parked ones.
    pub(crate) parked: usize,
    pub(crate) range: ByteRange,
    /// Its misses that may be cached.
    pub(crate) misses: Vec<Miss>,
    /// The misses are behind the cutoff of their stream.
    pub(crate) is_behind_cutoff: bool,
    /// The bypass that ends with it.
    pub(crate) bypass: Option<BypassTicket>,
    /// When it was submitted, in microseconds of the monotonic clock; only for reads of misses.
    pub(crate) begun_us: u64,
}

impl InFlightOp {
    /// An operation whose data is not cached.
    pub(crate) const fn without_misses(parked: usize, range: ByteRange) -> Self {
        Self { parked, range, misses: Vec::new(), is_behind_cutoff: false, bypass: None, begun_us: 0 }
    }
}

/// A table with reusable indices.
pub(crate) struct Slab<T> {
    items: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { items: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub(crate) fn insert(&mut self, item: T) -> usize {
        match self.free.pop() {
            Some(place) => {
                self.items[place] = Some(item);
                place
            }
            None => {
                self.items.push(Some(item));
                self.items.len() - 1
            }
        }
    }

    pub(crate) fn get_mut(&mut self, place: usize) -> Option<&mut T> {
        self.items.get_mut(place)?.as_mut()
    }

    pub(crate) fn remove(&mut self, place: usize) -> Option<T> {
        let item = self.items.get_mut(place)?.take()?;
        self.free.push(place);
        Some(item)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.items.iter_mut().flatten()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.items.iter().flatten()
    }

    pub(crate) fn len(&self) -> usize {
        self.items.len() - self.free.len()
    }
}
