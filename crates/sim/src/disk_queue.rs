//! One thread's queue to a simulated disk. Operations complete in any order.
//!
//! Invariants: an operation completes after a bounded number of polls; at most `depth` operations of a queue
//! are in progress, the others wait in the order of submission; a queue of a crashed process does nothing.

use crate::disk::{Flying, SimDisk, State};
use cbd_types::backing::BackingDone;
use cbd_types::{BackingOp, BackingQueue, OpToken};

/// A queue; see [`SimDisk::queue`].
#[derive(Debug)]
pub struct SimQueue {
    disk: SimDisk,
    number: u64,
    depth: usize,
}

impl SimQueue {
    pub(crate) const fn new(disk: SimDisk, number: u64, depth: usize) -> Self {
        Self { disk, number, depth }
    }

    /// The number by which [`SimDisk::in_flight_of`] identifies the queue.
    #[must_use]
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// Returns the operations that have completed; at least one if `now` is set and any are in flight.
    fn gather(&self, now: bool, done: &mut Vec<BackingDone>) {
        self.disk.with(|state| {
            if self.number < state.first_living_queue {
                return;
            }
            let working: Vec<OpToken> =
                self.mine(state).take(self.depth).map(|flying| flying.token).collect();
            if working.is_empty() {
                return;
            }
            let number = self.number;
            let in_work = |flying: &Flying| flying.queue == number && working.contains(&flying.token);
            for flying in state.flying.iter_mut().filter(|flying| in_work(flying)) {
                flying.delay = flying.delay.saturating_sub(1);
            }
            let mut ready: Vec<usize> = (0..state.flying.len())
                .filter(|&at| in_work(&state.flying[at]) && state.flying[at].delay == 0)
                .collect();
            if ready.is_empty() && now {
                let candidates: Vec<usize> =
                    (0..state.flying.len()).filter(|&at| in_work(&state.flying[at])).collect();
                ready.push(*state.random.pick(&candidates));
            }
            // In any order, and sometimes not all of them.
            let mut random = state.random.fork();
            let mut give =
                if random.chance(250) { random.between(1, ready.len().max(1) as u64) } else { u64::MAX };
            while give > 0 && !ready.is_empty() {
                let at = ready.swap_remove(random.below(ready.len() as u64) as usize);
                let mut flying = state.flying.remove(at);
                ready.iter_mut().filter(|other| **other > at).for_each(|other| *other -= 1);
                let result = state.complete(&mut flying);
                done.push(BackingDone { token: flying.token, op: flying.op, result });
                give -= 1;
            }
        });
    }

    fn mine<'a>(&'a self, state: &'a State) -> impl Iterator<Item = &'a Flying> {
        state.flying.iter().filter(|flying| flying.queue == self.number)
    }
}

impl BackingQueue for SimQueue {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        self.disk.with(|state| {
            if self.number >= state.first_living_queue && !state.user_has_crashed() {
                assert!(
                    self.mine(state).all(|flying| flying.token != token),
                    "the token {token:?} is in flight already"
                );
                state.submit(self.number, token, op);
            }
        });
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        self.gather(false, done);
    }

    fn wait(&mut self, done: &mut Vec<BackingDone>) {
        self.gather(true, done);
    }

    fn in_flight(&self) -> usize {
        self.disk.with(
            |state| {
                if self.number < state.first_living_queue { 0 } else { self.mine(state).count() }
            },
        )
    }

    fn depth(&self) -> usize {
        self.depth
    }
}

impl Drop for SimQueue {
    /// Completes the operations in flight, as closing a ring does; the results are lost.
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight() > 0 {
            self.wait(&mut done);
        }
    }
}
