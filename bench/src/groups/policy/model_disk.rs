//! A disk in simulated time: operations take as long as a model says, and nothing waits.
//!
//! Invariants: operations are transferred one after the other in the order of submission; the same operations take the same time
//! on every machine. The disk stores nothing and reads as zeroes.

use cbd_types::backing::BackingDone;
use cbd_types::{BackingOp, BackingQueue, OpToken};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// The model of a disk.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    /// Latency of an operation; those of several operations in flight overlap.
    pub latency_us: f64,
    /// Time of an operation that does not begin where the one before ended, in addition; it does not overlap.
    pub seek_us: f64,
    /// Transfer rate.
    pub mib_per_s: f64,
}

impl Model {
    /// No time at all.
    pub const INSTANT: Self = Self { latency_us: 0.0, seek_us: 0.0, mib_per_s: f64::INFINITY };
    /// A hard disk of 7200 rotations a minute.
    pub const HARD_DISK: Self = Self { latency_us: 100.0, seek_us: 12_000.0, mib_per_s: 150.0 };
    /// A flash disk behind SATA.
    pub const FLASH_DISK: Self = Self { latency_us: 90.0, seek_us: 0.0, mib_per_s: 520.0 };

    /// The time to transfer `bytes`, in microseconds.
    pub fn transfer_us(self, bytes: u64) -> f64 {
        bytes as f64 / (self.mib_per_s * 1.048_576)
    }
}

/// An operation that has not completed yet.
struct Flying {
    token: OpToken,
    op: BackingOp,
    ends_us: f64,
}

struct State {
    model: Model,
    now_us: f64,
    /// When the transfer of the last operation ends, and where it ends.
    free_us: f64,
    position: u64,
    flying: VecDeque<Flying>,
    read_bytes: u64,
}

/// The disk, whose clones are one disk; also its only queue.
#[derive(Clone)]
pub struct ModelDisk(Arc<Mutex<State>>);

impl ModelDisk {
    /// A disk at time 0.
    pub fn new(model: Model) -> Self {
        let (now_us, free_us, position, read_bytes) = (0.0, 0.0, 0, 0);
        let flying = VecDeque::new();
        Self(Arc::new(Mutex::new(State { model, now_us, free_us, position, flying, read_bytes })))
    }

    /// The present time.
    pub fn now_us(&self) -> f64 {
        self.0.lock().now_us
    }

    /// Bytes read so far.
    pub fn read_bytes(&self) -> u64 {
        self.0.lock().read_bytes
    }

    /// Lets time pass.
    pub fn pass(&self, us: f64) {
        self.0.lock().now_us += us;
    }

    /// Lets time pass until the next operation completes, if any is in flight.
    pub fn pass_until_done(&self) {
        let mut state = self.0.lock();
        if let Some(next) = state.flying.front() {
            state.now_us = state.now_us.max(next.ends_us);
        }
    }
}

impl BackingQueue for ModelDisk {
    fn submit(&mut self, token: OpToken, op: BackingOp) {
        let mut state = self.0.lock();
        let (start, bytes) = match &op {
            BackingOp::Read { offset, buffer } => {
                state.read_bytes += buffer.len() as u64;
                (*offset, buffer.len() as u64)
            }
            BackingOp::Write { offset, buffer } => (*offset, buffer.len() as u64),
            BackingOp::WriteZeroes { range } | BackingOp::Discard { range } => (range.start, 0),
            BackingOp::Verify { range } | BackingOp::Compare { range, .. } => {
                state.read_bytes += range.len();
                (range.start, range.len())
            }
            BackingOp::Flush => (state.position, 0),
        };
        let seek_us = if start == state.position { 0.0 } else { state.model.seek_us };
        let begins_us = state.free_us.max(state.now_us + state.model.latency_us) + seek_us;
        let ends_us = begins_us + state.model.transfer_us(bytes);
        state.free_us = ends_us;
        state.position = start + bytes;
        state.flying.push_back(Flying { token, op, ends_us });
    }

    fn poll(&mut self, done: &mut Vec<BackingDone>) {
        let mut state = self.0.lock();
        while state.flying.front().is_some_and(|next| next.ends_us <= state.now_us)
            && let Some(Flying { token, mut op, .. }) = state.flying.pop_front()
        {
            if let BackingOp::Read { buffer, .. } = &mut op {
                buffer.fill(0);
            }
            done.push(BackingDone { token, op, result: Ok(()) });
        }
    }

    fn wait(&mut self, done: &mut Vec<BackingDone>) {
        self.pass_until_done();
        self.poll(done);
    }

    fn in_flight(&self) -> usize {
        self.0.lock().flying.len()
    }

    fn depth(&self) -> usize {
        32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_types::AlignedBuffer;

    fn read(disk: &mut ModelDisk, offset: u64, length: usize) {
        disk.submit(OpToken(offset), BackingOp::Read { offset, buffer: AlignedBuffer::zeroed(length) });
    }

    #[test]
    fn latencies_overlap_and_transfers_do_not() {
        let mut disk = ModelDisk::new(Model { latency_us: 100.0, seek_us: 1000.0, mib_per_s: 1.0 });
        read(&mut disk, 0, 1 << 20);
        read(&mut disk, 1 << 20, 1 << 20);
        read(&mut disk, 0, 1 << 20);
        let mut ends = Vec::new();
        while disk.in_flight() > 0 {
            disk.wait(&mut Vec::new());
            ends.push(disk.now_us().round());
        }
        assert_eq!(ends, [1_000_100.0, 2_000_100.0, 3_001_100.0]);
        assert_eq!(disk.read_bytes(), 3 << 20);
    }
}
