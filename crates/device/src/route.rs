//! The route of requests: through a cache, or straight to the backing device; and its change while queues are open.
//!
//! A thread that changes the route first holds it. Each queue is woken, submits nothing new, and reports that it is quiet when
//! everything that it has submitted has returned. Requests that arrive meanwhile wait in their queue. When all queues are quiet the
//! thread changes the route, or leaves it as it was, and the queues continue with the requests that wait.
//!
//! All queues must be quiet at one moment: a request that one queue has sent straight to the backing device and a request of another
//! queue that already goes through the cache would not see each other.
//!
//! Invariants: the route changes only while every queue is quiet; a queue that is quiet begins nothing before the hold has ended; a
//! queue is forgotten only after its queue of the backing device is closed.

use crate::{Device, DeviceFigures, figures::Cells};
use alloc::{sync::Arc, vec::Vec};
use cbd_engine::{Cache, Environment};
use cbd_types::BlkdevId;
use core::sync::atomic::{AtomicU64, Ordering};
use core::task::Waker;

/// A queue of the device.
struct Known {
    number: u32,
    /// The blkdev whose clients it serves, if it is known.
    blkdev: Option<BlkdevId>,
    waker: Waker,
    /// What it counts.
    cells: Arc<Cells>,
    /// It has nothing in flight, and knows of the hold.
    is_quiet: bool,
}

struct State<E: Environment> {
    cache: Option<Arc<Cache<E>>>,
    /// The number of the last failed flush that `cache` had to report when the route changed to it.
    reported: u64,
    queues: Vec<Known>,
    /// What queues have counted that have ended, by blkdev.
    ended: Vec<(Option<BlkdevId>, Arc<Cells>)>,
    /// The waker of the thread that holds the route.
    holder: Option<Waker>,
    /// The number of the next queue.
    next: u32,
}

/// The route of a device, and the queues that follow it.
#[repr(align(64))]
pub(crate) struct Route<E: Environment> {
    /// Raised at the begin and at the end of each hold. Every request reads it, so its cache line has nothing that is often written.
    number: AtomicU64,
    state: lock_api::Mutex<E::Lock, State<E>>,
}

/// What a queue learns of the route.
pub(crate) enum Seen<E: Environment> {
    /// The route is held: nothing may begin.
    Held,
    /// The route with this number, through this cache, and the number of the last failed flush that the cache had to report when the
    /// route changed to it.
    Route(u64, Option<Arc<Cache<E>>>, u64),
}

impl<E: Environment> Route<E> {
    pub(crate) fn new(cache: Option<Arc<Cache<E>>>) -> Self {
        let state =
            State { cache, reported: 0, queues: Vec::new(), ended: Vec::new(), holder: None, next: 0 };
        Self { number: AtomicU64::new(0), state: lock_api::Mutex::new(state) }
    }

    /// The number of the route. A queue that has seen another one asks with [`look`](Self::look).
    #[inline]
    pub(crate) fn number(&self) -> u64 {
        // Acquire is not needed: a queue that sees another number takes the lock.
        self.number.load(Ordering::Relaxed)
    }

    /// The cache that requests go through, if there is one.
    pub(crate) fn cache(&self) -> Option<Arc<Cache<E>>> {
        self.state.lock().cache.clone()
    }

    /// Adds a queue; returns its number. It asks for the route before its first request: no route has the number `u64::MAX`.
    fn add(&self, waker: Waker, cells: Arc<Cells>) -> u32 {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        // It has nothing in flight, and finds a hold before its first request.
        state.queues.push(Known { number, blkdev: None, waker, cells, is_quiet: true });
        number
    }

    /// The route for queue `number`; if it is held, notes whether the queue has nothing in flight.
    pub(crate) fn look(&self, number: u32, is_quiet: bool) -> Seen<E> {
        let mut state = self.state.lock();
        let is_held = state.holder.is_some();
        if let Some(known) = state.queues.iter_mut().find(|known| known.number == number) {
            known.is_quiet = is_held && is_quiet;
        }
        match &state.holder {
            None => Seen::Route(self.number(), state.cache.clone(), state.reported),
            Some(holder) => {
                if is_quiet {
                    holder.wake_by_ref();
                }
                Seen::Held
            }
        }
    }

    fn remove(&self, number: u32) {
        let mut state = self.state.lock();
        if let Some(at) = state.queues.iter().position(|known| known.number == number) {
            let Known { blkdev, cells, .. } = state.queues.remove(at);
            match state.ended.iter().find(|(of, _)| *of == blkdev) {
                Some((_, ended)) => ended.add(&cells),
                None => state.ended.push((blkdev, cells)),
            }
        }
        if let Some(holder) = &state.holder {
            holder.wake_by_ref();
        }
    }

    /// What queues have counted, ended ones included: those of one blkdev, or all.
    pub(crate) fn figures(&self, only: Option<BlkdevId>) -> DeviceFigures {
        let mut figures = DeviceFigures::default();
        let state = self.state.lock();
        let open = state.queues.iter().map(|known| (known.blkdev, &known.cells));
        let all = open.chain(state.ended.iter().map(|(blkdev, cells)| (*blkdev, cells)));
        let of_it = all.filter(|(blkdev, _)| only.is_none() || *blkdev == only);
        of_it.for_each(|(_, cells)| cells.read(&mut figures));
        figures
    }

    /// Raises the number, so that each queue asks for the route, and wakes all queues.
    fn announce(&self, state: &State<E>) {
        self.number.fetch_add(1, Ordering::Relaxed);
        state.queues.iter().for_each(|known| known.waker.wake_by_ref());
    }
}

/// A queue's entry in its device.
pub(crate) struct Membership<E: Environment> {
    device: Arc<Device<E>>,
    number: u32,
}

impl<E: Environment> Membership<E> {
    pub(crate) fn new(device: &Arc<Device<E>>, waker: &Waker, cells: &Arc<Cells>) -> Self {
        let number = device.route.add(waker.clone(), Arc::clone(cells));
        Self { device: Arc::clone(device), number }
    }

    /// Says whose clients the queue serves: what it counts is counted for that blkdev.
    pub(crate) fn set_blkdev(&self, blkdev: BlkdevId) {
        let mut state = self.device.route.state.lock();
        if let Some(known) = state.queues.iter_mut().find(|known| known.number == self.number) {
            known.blkdev = Some(blkdev);
        }
    }

    /// The number of the queue: one that no other queue of the device has.
    pub(crate) const fn number(&self) -> u32 {
        self.number
    }
}

impl<E: Environment> Drop for Membership<E> {
    fn drop(&mut self) {
        self.device.route.remove(self.number);
    }
}

/// A device whose route is held: its queues submit nothing new. Its drop ends the hold and leaves the route as it was.
#[must_use = "requests wait while the route is held"]
pub struct Hold<E: Environment> {
    device: Arc<Device<E>>,
}

impl<E: Environment> Device<E> {
    /// Holds the route of the device: from here on its queues submit nothing new. `waker` is called whenever a queue has become
    /// quiet. `None` if the route is held already.
    pub fn hold(self: &Arc<Self>, waker: Waker) -> Option<Hold<E>> {
        let mut state = self.route.state.lock();
        if state.holder.is_some() {
            return None;
        }
        state.holder = Some(waker);
        // A queue says itself that it is quiet: it may have begun a request since it last asked.
        state.queues.iter_mut().for_each(|known| known.is_quiet = false);
        self.route.announce(&state);
        drop(state);
        Some(Hold { device: Arc::clone(self) })
    }
}

impl<E: Environment> Hold<E> {
    /// The number of queues that have requests in flight, or have not noticed the hold yet.
    pub fn busy_queues(&self) -> usize {
        self.device.route.state.lock().queues.iter().filter(|known| !known.is_quiet).count()
    }

    /// Changes the route: requests go through `cache` from now on, or straight to the backing device. Gives the hold back, with
    /// nothing changed, unless all queues are quiet.
    ///
    /// # Errors
    /// The hold.
    pub fn change(self, cache: Option<Arc<Cache<E>>>) -> Result<(), Self> {
        let mut state = self.device.route.state.lock();
        if state.queues.iter().any(|known| !known.is_quiet) {
            drop(state);
            return Err(self);
        }
        // Before any queue goes on: the failures from here on concern each queue that has changed something before.
        state.reported = cache.as_ref().map_or(0, |cache| cache.reported_failures());
        let former = core::mem::replace(&mut state.cache, cache);
        drop(state);
        drop(former);
        Ok(())
    }
}

impl<E: Environment> Drop for Hold<E> {
    fn drop(&mut self) {
        let mut state = self.device.route.state.lock();
        state.holder = None;
        self.device.route.announce(&state);
    }
}
