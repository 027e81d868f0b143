//! Requests that wait while the route of the device is held.
//!
//! Invariants: nothing begins while the route is held; what waited begins in the order of its submission, before what is submitted
//! later.
//!
//! Elsewhere: who holds the route, and why (`route`).

use super::Queue;
use crate::route::Seen;
use alloc::{sync::Arc, vec::Vec};
use cbd_engine::Environment;
use cbd_types::{BackingQueue, Completion, Request};

impl<E: Environment, Q: BackingQueue, const COUNTS: bool> Queue<E, Q, COUNTS> {
    /// Whether nothing may begin, because the route of the device is being changed. If the route has changed since the queue last
    /// asked, it follows the new one, and begins with the requests that arrived meanwhile.
    #[inline]
    pub(super) fn is_held(&mut self, done: &mut Vec<Completion>) -> bool {
        !self.follows_route() && self.ask_for_route(done)
    }

    #[cold]
    #[inline(never)]
    pub(super) fn ask_for_route(&mut self, done: &mut Vec<Completion>) -> bool {
        let is_quiet = self.parked.len() == 0
            && self.plugged.is_empty()
            && self.verifications.is_quiet()
            && self.fills.is_empty()
            && self.backing.in_flight() == 0;
        if let (true, Some(cache)) = (is_quiet, &*self.cache) {
            // What was read ahead is registered in the cache that the route may leave.
            self.ahead.clear(cache);
        }
        match self.device.route.look(self.membership.number(), is_quiet) {
            Seen::Held => return true,
            Seen::Route(number, cache, reported) => {
                // A queue that has followed no route yet has changed nothing that could be lost.
                let is_new = core::mem::replace(&mut self.route, number) == u64::MAX;
                let is_other =
                    cache.as_ref().map(Arc::as_ptr) != self.cache.as_ref().as_ref().map(Arc::as_ptr);
                if is_other {
                    let left = (*self.cache).as_ref();
                    self.owes_failure |=
                        left.is_some_and(|left| left.reported_failures() > self.reported_failures);
                    let now = cache.as_ref().map_or(0, |cache| cache.reported_failures());
                    self.reported_failures = if is_new { now } else { reported };
                    self.cache = Arc::new(cache);
                }
            }
        }
        for request in core::mem::take(&mut self.held) {
            self.submit(request, done);
        }
        false
    }

    /// Whether the route is the one that the queue follows.
    #[inline]
    pub(super) fn follows_route(&self) -> bool {
        self.device.route.number() == self.route
    }

    /// Submits a request of a device without a cache, or keeps it for [`poll`](Self::poll) if the route is another one now.
    pub(super) fn submit_to_disk(&mut self, request: Request) {
        if self.follows_route() {
            return self.submit_uncached(request);
        }
        self.hold(request);
        self.waker.wake_by_ref();
    }

    /// Keeps a request until the route is no longer held.
    #[cold]
    #[inline(never)]
    pub(super) fn hold(&mut self, request: Request) {
        self.held.push_back(request);
    }
}
