//! Requests that leave the queue before their end.
//!
//! Invariants: what the backing device has of a request stays until it returns.

use super::{Queue, ending::complete};
use crate::parked::{Parked, Progress};
use alloc::vec::Vec;
use cbd_engine::Environment;
use cbd_types::{BackingQueue, Completion, Error, ErrorKind, Request, TakeBack};

impl<E: Environment, Q: BackingQueue, const COUNTS: bool> Queue<E, Q, COUNTS> {
    /// Cancels, with an error, each request that the backing device does not have: requests that were held back, and requests
    /// that wait for space, of which some pieces may be written. Used when a client has disconnected; [`poll`](Self::poll)
    /// still completes the operations that the backing device has.
    pub fn give_up(&mut self, done: &mut Vec<Completion>) {
        for request in self.plugged.drain(..).chain(self.held.drain(..)) {
            self.meter.count_failed(request.operation);
            complete(request, Err(given_up()), done);
        }
        for parked in self.parked.iter_mut() {
            if let Progress::Around(around) = &mut parked.progress {
                around.given_up = true;
            }
        }
        for place in core::mem::take(&mut self.waiting) {
            match self.parked.get_mut(place) {
                // The backing device has a part of it, and it completes when that returns.
                Some(parked) if parked.outstanding > 0 => {
                    parked.error.get_or_insert(given_up());
                    if let Progress::Around(around) = &mut parked.progress {
                        around.next = parked.request.range.end;
                    }
                }
                _ => self.end_parked(place, Some(Err(given_up())), done),
            }
        }
        if let Some(cache) = &*self.cache {
            cache.stop_waiting(&self.waker);
            self.ahead.clear(cache);
        }
        self.give_up_verifications();
    }

    /// Moves to `returned` requests that were held back, and requests that wait for space or for what must precede them. They count as if
    /// they had not been submitted.
    pub fn take_back(&mut self, which: TakeBack<'_>, returned: &mut Vec<Request>) {
        returned.extend(self.plugged.drain(..).chain(self.held.drain(..)));
        for _ in 0..self.waiting.len() {
            let Some(place) = self.waiting.pop_front() else { break };
            let is_returned = |parked: &&mut Parked| {
                let is_write = matches!(parked.progress, Progress::Written(_));
                let may_have_begun = which.begun_writes && is_write || (which.is_given_up)(parked.request.id);
                let is_whole = parked.outstanding == 0 && parked.error.is_none();
                !parked.has_begun() || may_have_begun && is_whole
            };
            let parked = self.parked.get_mut(place).filter(is_returned);
            if parked.is_none() {
                self.waiting.push_back(place);
            } else if let Some(mut parked) = self.parked.remove(place) {
                self.meter.end_wait(&mut parked.tally);
                returned.push(parked.request);
            }
        }
        if let (true, Some(cache)) = (self.waiting.is_empty(), &*self.cache) {
            cache.stop_waiting(&self.waker);
        }
    }
}

pub(crate) fn given_up() -> Error {
    Error::new(ErrorKind::Stopped, "the request was given up: its client is gone")
}
