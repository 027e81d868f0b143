//! The free segments of a cache, and the list of requests that wait for one.
//!
//! Invariants: a few segments are reserved from clients, for what must make progress in a full cache; a client that
//! found no segment is woken when one is released.
//!
//! The reserve belongs to all lanes together. It is enough because of how it is used:
//! 1. Whatever a lane must record before its oldest segment can be reclaimed fits in one segment: the notes of the
//!    damage of one segment, the lane's parked ranges (a quarter of a segment), and its damage (a quarter of the
//!    slots). So a lane that has taken a segment of the reserve needs no other one before it frees one.
//! 2. Until then the pool is below the reserve, and nothing else may use the rest of that segment (`has_room_in_open`).
//! 3. Nothing needs room in two lanes at once: writeback that finds no room goes segment by segment, one lane at a
//!    time, and takes another lane if one has no room; reclaim skips a lane that has none.
//!
//! So if the pool is empty, some lane has taken its last segment, has room for all it needs, and is reached by
//! writeback and reclaim. One segment would do. With two, reclaim of one lane need not wait for the writeback of
//! another.
//!
//! While blocks are kept, pinned ones or metadata with a minimum, clients leave two more segments, for what is appended again
//! ([`Requester::Kept`]), by the same rule: while the pool is below that, clients and fills use no open segment. These appends
//! leave the reserve, so 1 to 3 hold with them. They go on in a lane only as long as a pass through its log frees more than
//! they take (`worker::reclaim`).

use crate::{
    Environment, Mutex,
    sync::{SharedBool, SharedU32},
};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use core::task::Waker;

/// Most segments that are reserved from clients.
const RESERVE_MAX: u32 = 2;
/// Segments beside the reserve for kept blocks that are appended again, while there are any: reclaim of
/// a segment full of them needs one before it frees one, and records that it writes can take more lines than those it replaces.
const KEPT_RESERVE: u32 = 2;
/// One segment more for each so many lanes is left to writers by fills and second chances.
const LANES_PER_SPARE: u32 = 8;

/// An epoch with fewer segments is not large.
const LARGE_EPOCH_MIN: u64 = 4;

/// The priority of an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Requester {
    /// A client's write or discard: it waits if no segment is free.
    Client,
    /// A fill or a second chance: it is skipped if space is short, and leaves the last free segments to writers.
    Optional,
    /// Work that must make progress so that other work can continue; it may use the reserve.
    Essential,
    /// The same, but with an alternative: it leaves the reserve.
    Frugal,
    /// A kept block that reclaim appends again: clients leave a few segments to it, and it leaves the reserve.
    Kept,
}

/// The resource that a record could not get. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lack {
    /// Segments. A client's waker is on the wait list of the pool.
    Space,
    /// Memory.
    Memory,
    /// The data that the checksum is of which has come with it.
    Data,
}

struct State {
    free: Vec<u32>,
    waiting: Vec<Waker>,
    /// Segments that the cache gives up: they belong to no lane, and nothing takes them.
    given_up: Vec<u32>,
    /// The last segment that was released while requests waited was given up: the next one is for them.
    is_turn_of_requests: bool,
}

/// The pool.
pub(crate) struct Pool<E: Environment> {
    state: Mutex<E, State>,
    /// The number of reserved segments.
    reserve: u32,
    /// The number of segments that fills and second chances leave beside the reserve.
    spare: u32,
    /// The number of free segments that clients leave: the reserve, and a few more for kept blocks. Only speed depends on the
    /// latter.
    left_by_clients: AtomicU32,
    /// The value of `free.len()`, to read without the lock.
    free_count: SharedU32<E>,
    /// The number of segments that the cache is still to give up.
    owed: SharedU32<E>,
    /// Whether a request waits, to read without the lock.
    has_waiters: SharedBool<E>,
    /// Segments that were taken and released since the cache was opened. Only speed depends on them.
    taken: AtomicU64,
    released: AtomicU64,
    /// Number of lanes.
    lanes: u32,
}

impl<E: Environment> Pool<E> {
    /// The pool of a cache of `lanes` lanes.
    pub(crate) fn new(free: Vec<u32>, lanes: u32) -> Self {
        let free_count = SharedU32::new(free.len() as u32);
        Self {
            state: Mutex::<E, _>::new(State {
                free,
                waiting: Vec::new(),
                given_up: Vec::new(),
                is_turn_of_requests: false,
            }),
            owed: SharedU32::new(0),
            reserve: lanes.min(RESERVE_MAX),
            spare: lanes.div_ceil(LANES_PER_SPARE),
            left_by_clients: AtomicU32::new(lanes.min(RESERVE_MAX)),
            free_count,
            has_waiters: SharedBool::new(false),
            taken: AtomicU64::new(0),
            released: AtomicU64::new(0),
            lanes,
        }
    }

    /// Takes a free segment.
    ///
    /// # Errors
    /// [`Lack::Space`] if there is none for `requester`; a client is on the wait list then. [`Lack::Memory`] if it could not be
    /// added to the list.
    pub(crate) fn take(&self, requester: Requester, waker: Option<&Waker>) -> Result<u32, Lack> {
        let mut state = self.state.lock();
        let keep = match requester {
            Requester::Essential => 0,
            Requester::Kept | Requester::Frugal => self.reserve,
            Requester::Client => self.left_by_clients(),
            Requester::Optional => self.left_to_writers(),
        } as usize;
        let may_take = state.free.len() > keep;
        if let Some(taken) = state.free.pop_if(|_| may_take) {
            self.free_count.store(state.free.len() as u32, Ordering::Relaxed);
            self.taken.fetch_add(1, Ordering::Relaxed);
            return Ok(taken);
        }
        if let Some(waker) = waker {
            if !state.waiting.iter().any(|known| known.will_wake(waker)) {
                state.waiting.try_reserve(1).map_err(|_| Lack::Memory)?;
                state.waiting.push(waker.clone());
            }
            self.has_waiters.store(true, Ordering::Relaxed);
        }
        Err(Lack::Space)
    }

    /// Segments that were taken since the cache was opened.
    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Segments after which an epoch is large: one for each lane, since an epoch that is shorter frees few whole segments.
    pub(crate) fn large_epoch(&self) -> u64 {
        u64::from(self.lanes).max(LARGE_EPOCH_MIN)
    }

    /// Segments that were released since the cache was opened.
    pub(crate) fn released(&self) -> u64 {
        self.released.load(Ordering::Relaxed)
    }

    /// Returns a segment to the pool, and wakes all waiting requests.
    pub(crate) fn release(&self, segment: u32) {
        self.released.fetch_add(1, Ordering::Relaxed);
        let woken = {
            let mut state = self.state.lock();
            debug_assert!(!state.free.contains(&segment), "segment {segment} is released twice");
            if self.is_to_be_given_up(&mut state) {
                state.given_up.push(segment);
                self.owed.fetch_sub(1, Ordering::Relaxed);
                return;
            }
            // The segment that was released first is used last: wear spreads, and stale bytes remain for a post-mortem.
            state.free.insert(0, segment);
            self.free_count.store(state.free.len() as u32, Ordering::Relaxed);
            // At what they leave, requests can use the open segments again; above it, a new one.
            if state.free.len() >= self.left_by_clients() as usize {
                self.has_waiters.store(false, Ordering::Relaxed);
                core::mem::take(&mut state.waiting)
            } else {
                Vec::new()
            }
        };
        woken.into_iter().for_each(Waker::wake);
    }

    /// Whether a segment that is released is given up. Each second one is, while requests wait.
    fn is_to_be_given_up(&self, state: &mut State) -> bool {
        if self.owed() == 0 || state.free.len() < self.reserve as usize {
            return false;
        }
        state.is_turn_of_requests = !state.waiting.is_empty() && !state.is_turn_of_requests;
        state.is_turn_of_requests || state.waiting.is_empty()
    }

    /// Begins to give up `count` segments: free ones at once, except those that are left to writers, and others when they are
    /// released.
    ///
    /// # Errors
    /// [`Lack::Memory`], and [`Lack::Space`] while segments are being given up already; nothing changes then.
    pub(crate) fn give_up(&self, count: u32) -> Result<(), Lack> {
        let mut state = self.state.lock();
        if self.owed() > 0 || !state.given_up.is_empty() {
            return Err(Lack::Space);
        }
        state.given_up.try_reserve(count as usize).map_err(|_| Lack::Memory)?;
        let kept = self.left_to_writers() as usize;
        let at_once = state.free.len().saturating_sub(kept).min(count as usize);
        for _ in 0..at_once {
            let segment = state.free.pop();
            state.given_up.extend(segment);
        }
        self.free_count.store(state.free.len() as u32, Ordering::Relaxed);
        self.owed.store(count - at_once as u32, Ordering::Relaxed);
        Ok(())
    }

    /// The number of segments that are still to be given up.
    pub(crate) fn owed(&self) -> u32 {
        self.owed.load(Ordering::Relaxed)
    }

    /// Gives up no more than what was given up so far; returns that number.
    pub(crate) fn give_up_no_more(&self) -> u32 {
        let state = self.state.lock();
        self.owed.store(0, Ordering::Relaxed);
        state.given_up.len() as u32
    }

    /// Ends what [`give_up`](Self::give_up) began; returns the segments that were given up.
    pub(crate) fn take_given_up(&self) -> Vec<u32> {
        let mut state = self.state.lock();
        self.owed.store(0, Ordering::Relaxed);
        core::mem::take(&mut state.given_up)
    }

    /// Reserves memory for `total` free segments.
    ///
    /// # Errors
    /// [`Lack::Memory`].
    pub(crate) fn reserve_for(&self, total: u32) -> Result<(), Lack> {
        let mut state = self.state.lock();
        let more = (total as usize).saturating_sub(state.free.len());
        state.free.try_reserve(more).map_err(|_| Lack::Memory)
    }

    /// Removes `waker` from the wait list.
    pub(crate) fn forget(&self, waker: &Waker) {
        let mut state = self.state.lock();
        state.waiting.retain(|known| !known.will_wake(waker));
        self.has_waiters.store(!state.waiting.is_empty(), Ordering::Relaxed);
    }

    /// Wakes all waiting requests, regardless of free segments: the cache is being stopped.
    pub(crate) fn wake_all(&self) {
        let woken = {
            let mut state = self.state.lock();
            self.has_waiters.store(false, Ordering::Relaxed);
            core::mem::take(&mut state.waiting)
        };
        woken.into_iter().for_each(Waker::wake);
    }

    /// Number of free segments.
    pub(crate) fn free(&self) -> u32 {
        self.free_count.load(Ordering::Relaxed)
    }

    /// Number of segments that are reserved from clients.
    pub(crate) const fn reserve(&self) -> u32 {
        self.reserve
    }

    /// Number of free segments that a client leaves: the reserve, and a few more for kept blocks.
    #[inline]
    pub(crate) fn left_by_clients(&self) -> u32 {
        self.left_by_clients.load(Ordering::Relaxed)
    }

    /// What [`left_by_clients`](Self::left_by_clients) is while blocks are kept.
    pub(crate) const fn reserve_with_kept(&self) -> u32 {
        self.reserve + KEPT_RESERVE
    }

    /// Reserves segments from clients for kept blocks, or not any more.
    pub(crate) fn reserve_for_kept(&self, is_any_kept: bool) {
        let left = if is_any_kept { self.reserve_with_kept() } else { self.reserve };
        if self.left_by_clients.swap(left, Ordering::Relaxed) > left {
            // Those that wait may have what they need.
            self.wake_all();
        }
    }

    /// Number of free segments that a fill or a second chance leaves: the reserve, and a few more for writers.
    pub(crate) fn left_to_writers(&self) -> u32 {
        self.left_by_clients() + self.spare
    }

    /// Number of free segments beside the reserve that a fill or a second chance leaves.
    pub(crate) const fn spare(&self) -> u32 {
        self.spare
    }

    /// Whether a request waits for a segment.
    pub(crate) fn has_waiters(&self) -> bool {
        self.has_waiters.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
