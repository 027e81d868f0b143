//! The free segments of a cache, and who waits for one.
//!
//! Always true here: as many segments as there are lanes are kept back from clients, so that a quarantine record,
//! reclaim and a takeover always find one; and who was told "none" is woken when one comes back.

use crate::{
    Environment, Mutex,
    sync::{SharedBool, SharedU32},
};
use alloc::vec::Vec;
use core::sync::atomic::Ordering;
use core::task::Waker;

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Asker {
    /// A client's write or discard: waits when there is none.
    Client,
    /// A fill or a second chance: goes without, and leaves the last free ones to writers.
    Optional,
    /// What must make progress for others to go on.
    Essential,
    /// The same where there is another way: it leaves what is kept back.
    Frugal,
}

struct State {
    free: Vec<u32>,
    waiting: Vec<Waker>,
}

/// The pool.
pub(crate) struct Pool<E: Environment> {
    state: Mutex<E, State>,
    /// Segments kept back.
    reserve: u32,
    /// As `free.len()`, to look at without the lock.
    free_count: SharedU32<E>,
    /// Whether somebody waits, to look at without the lock.
    has_waiters: SharedBool<E>,
}

impl<E: Environment> Pool<E> {
    pub(crate) fn new(free: Vec<u32>, reserve: u32) -> Self {
        let free_count = SharedU32::new(free.len() as u32);
        Self {
            state: Mutex::<E, _>::new(State { free, waiting: Vec::new() }),
            reserve,
            free_count,
            has_waiters: SharedBool::new(false),
        }
    }

    /// A free segment, or none. A client that gets none is on the wait list when this returns.
    pub(crate) fn take(&self, asker: Asker, waker: Option<&Waker>) -> Option<u32> {
        let mut state = self.state.lock();
        let keep = match asker {
            Asker::Essential => 0,
            Asker::Client | Asker::Frugal => self.reserve,
            Asker::Optional => self.left_to_writers(),
        } as usize;
        if state.free.len() > keep {
            let taken = state.free.pop();
            self.free_count.store(state.free.len() as u32, Ordering::Relaxed);
            return taken;
        }
        if let Some(waker) = waker {
            if !state.waiting.iter().any(|known| known.will_wake(waker)) {
                state.waiting.push(waker.clone());
            }
            self.has_waiters.store(true, Ordering::Relaxed);
        }
        None
    }

    /// A segment comes back; all who wait are woken.
    pub(crate) fn release(&self, segment: u32) {
        let woken = {
            let mut state = self.state.lock();
            // Oldest released is used last: wear spreads, and stale bytes stay around for a post-mortem.
            state.free.insert(0, segment);
            self.free_count.store(state.free.len() as u32, Ordering::Relaxed);
            // At the reserve, an open segment can be used again; above it, a new one.
            if state.free.len() >= self.reserve as usize {
                self.has_waiters.store(false, Ordering::Relaxed);
                core::mem::take(&mut state.waiting)
            } else {
                Vec::new()
            }
        };
        woken.into_iter().for_each(Waker::wake);
    }

    /// Whoever `waker` wakes does not wait any more.
    pub(crate) fn forget(&self, waker: &Waker) {
        let mut state = self.state.lock();
        state.waiting.retain(|known| !known.will_wake(waker));
        self.has_waiters.store(!state.waiting.is_empty(), Ordering::Relaxed);
    }

    /// Wakes all who wait, whatever is free: the cache is being stopped.
    pub(crate) fn wake_all(&self) {
        let woken = {
            let mut state = self.state.lock();
            self.has_waiters.store(false, Ordering::Relaxed);
            core::mem::take(&mut state.waiting)
        };
        woken.into_iter().for_each(Waker::wake);
    }

    /// Free segments.
    pub(crate) fn free(&self) -> u32 {
        self.free_count.load(Ordering::Relaxed)
    }

    /// Segments kept back from clients.
    pub(crate) const fn reserve(&self) -> u32 {
        self.reserve
    }

    /// Free segments that a fill or a second chance does not touch: what is kept back, and a quarter of it more for writers.
    pub(crate) const fn left_to_writers(&self) -> u32 {
        self.reserve + self.reserve.div_ceil(4)
    }

    /// Whether somebody waits for a segment.
    pub(crate) fn has_waiters(&self) -> bool {
        self.has_waiters.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
