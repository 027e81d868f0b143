//! The backing device of a simulated cache: it stores nothing, reads as zeroes, and takes as long as its rate says.
//!
//! Invariants: operations are transferred one after the other in the order of submission, in simulated time.

use crate::cache::Simulated;
use cbd_types::backing::BackingDone;
use cbd_types::{BackingGeometry, BackingOp, BackingQueue, OpToken};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// The geometry of a disk of `size` bytes with a volatile cache, as the engine sees it.
#[must_use]
pub const fn geometry(size: u64) -> BackingGeometry {
    BackingGeometry {
        size,
        sector: 512,
        physical_sector: 4096,
        rotational: false,
        volatile_cache: true,
        discard_zeroes: true,
        discard_granularity: 512,
    }
}

struct InFlight {
    token: OpToken,
    op: BackingOp,
    ends_us: u64,
}

#[derive(Default)]
struct State {
    free_us: f64,
    read_bytes: u64,
    in_flight: VecDeque<InFlight>,
}

/// The disk, whose clones are one disk; also its only queue.
#[derive(Clone)]
pub(crate) struct SimulatedDisk {
    clock: Arc<Simulated>,
    us_per_byte: f64,
    state: Arc<Mutex<State>>,
}

impl SimulatedDisk {
    /// A disk that transfers a byte in this time; 0 for one that needs no time.
    pub(crate) fn new(clock: Arc<Simulated>, us_per_byte: f64) -> Self {
        Self { clock, us_per_byte, state: Arc::default() }
    }

    /// Bytes that were read.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.state.lock().read_bytes
    }

    /// When the next operation completes, if any is in flight.
    pub(crate) fn next_end_us(&self) -> Option<u64> {
        self.state.lock().in_flight.front().map(|next| next.ends_us)
    }
}

impl BackingQueue for SimulatedDisk {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        let bytes = match &op {
            BackingOp::Read { buffer, .. } | BackingOp::Write { buffer, .. } => buffer.len() as u64,
            BackingOp::Verify { range } | BackingOp::Compare { range, .. } => range.len(),
            BackingOp::WriteZeroes { .. } | BackingOp::Discard { .. } | BackingOp::Flush => 0,
        };
        let mut state = self.state.lock();
        state.read_bytes += if matches!(op, BackingOp::Read { .. }) { bytes } else { 0 };
        let begins_us = state.free_us.max(self.clock.now_us() as f64);
        state.free_us = begins_us + bytes as f64 * self.us_per_byte;
        let ends_us = state.free_us as u64;
        state.in_flight.push_back(InFlight { token, op, ends_us });
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        let now_us = self.clock.now_us();
        let mut state = self.state.lock();
        while state.in_flight.front().is_some_and(|next| next.ends_us <= now_us)
            && let Some(InFlight { token, mut op, .. }) = state.in_flight.pop_front()
        {
            if let BackingOp::Read { buffer, .. } = &mut op {
                buffer.fill(0);
            }
            done.push(BackingDone { token, op, result: Ok(()) });
        }
    }

    fn wait(&mut self, done: &mut Vec<BackingDone>) {
        if let Some(end_us) = self.next_end_us() {
            self.clock.set_us(self.clock.now_us().max(end_us));
        }
        self.poll(done);
    }

    fn in_flight(&self) -> usize {
        self.state.lock().in_flight.len()
    }

    fn depth(&self) -> usize {
        32
    }
}
