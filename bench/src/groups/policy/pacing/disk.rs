//! A disk of a fixed bandwidth that works by a simulated clock.
//!
//! Invariants: the disk works on one operation at a time and stores nothing; time passes only when the clock is set.

use cbd_advise::simulated_time::Surroundings;
use cbd_types::backing::BackingDone;
use cbd_types::{BackingOp, BackingQueue, OpToken};
use std::collections::VecDeque;
use std::sync::Arc;

/// The time of a flush.
const FLUSH_US: u64 = 500;

/// A queue of the disk.
pub struct SlowQueue {
    clock: Arc<Surroundings>,
    /// Bytes a second.
    bandwidth: u64,
    depth: usize,
    /// When the disk has done all that was submitted.
    free_us: u64,
    working: VecDeque<(u64, OpToken, BackingOp)>,
}

impl SlowQueue {
    /// A queue of an idle disk.
    pub fn new(clock: Arc<Surroundings>, bandwidth: u64, depth: usize) -> Self {
        Self { clock, bandwidth, depth, free_us: 0, working: VecDeque::new() }
    }

    /// When the next operation completes, if any is in flight.
    pub fn next_us(&self) -> Option<u64> {
        self.working.front().map(|(us, ..)| *us)
    }
}

impl BackingQueue for SlowQueue {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        let us = match &op {
            BackingOp::Write { buffer, .. } | BackingOp::Read { buffer, .. } => {
                buffer.len() as u64 * 1_000_000 / self.bandwidth
            }
            BackingOp::Verify { range } | BackingOp::Compare { range, .. } => {
                range.len() * 1_000_000 / self.bandwidth
            }
            BackingOp::Flush => FLUSH_US,
            BackingOp::WriteZeroes { .. } | BackingOp::Discard { .. } => 0,
        };
        self.free_us = self.free_us.max(self.clock.now_us()) + us;
        self.working.push_back((self.free_us, token, op));
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        while self.next_us().is_some_and(|us| us <= self.clock.now_us())
            && let Some((_, token, op)) = self.working.pop_front()
        {
            done.push(BackingDone { token, op, result: Ok(()) });
        }
    }

    fn wait(&mut self, done: &mut Vec<BackingDone>) {
        if let Some(us) = self.next_us() {
            self.clock.set_us(us.max(self.clock.now_us()));
        }
        self.poll(done);
    }

    fn in_flight(&self) -> usize {
        self.working.len()
    }

    fn depth(&self) -> usize {
        self.depth
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_types::AlignedBuffer;

    #[test]
    fn operations_take_their_time_one_after_the_other() {
        let clock = Arc::new(Surroundings::new(1));
        let mut queue = SlowQueue::new(Arc::clone(&clock), 4096 * 1000, 8);
        for token in 0..2 {
            let buffer = AlignedBuffer::zeroed(4096);
            queue.submit(OpToken(token), BackingOp::Write { offset: 0, buffer });
        }
        let mut done = Vec::new();
        for (us, count) in [(999, 0), (1000, 1), (1999, 1), (2000, 2)] {
            clock.set_us(us);
            queue.poll(&mut done);
            assert_eq!(done.len(), count, "{us}");
        }
    }
}
