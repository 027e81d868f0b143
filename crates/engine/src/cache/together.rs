//! Writes to different lanes that a client submits together: their index lines are prefetched before the first of them is stored,
//! and one fence serves all of them.
//!
//! Invariants:
//! - a lane has at most one record that is not fenced, so what recovery assumes about the last record of a lane holds;
//! - only a thread that holds no lane waits for one, so no cycle of waits can form;
//! - the result of a write is reported after its fence, and writes to one lane are done in the order of submission, except for
//!   one that has to wait for space.
//!
//! Elsewhere: a single write (`write`), requests that wait (`cbd-device`).

use super::{
    Admission, Cache,
    write::{class_of, no_memory, other_data},
};
use crate::{
    Environment,
    base::{Lack, Requester},
    lane::{Content, FEW_BLOCKS, LaneGuard, LaneState, MANY_BLOCKS},
};
use cbd_format::record::{RecordKind, blocks_in};
use cbd_types::{ByteRange, Class, Durable, Error, InFlight, MutationPoint, Result};
use core::task::Waker;

/// Most writes that share a fence. Each holds its lane until the fence, so they are few compared to the lanes.
pub const TOGETHER: usize = 8;

/// One of the writes that are submitted together.
#[derive(Clone, Copy, Debug)]
pub struct BatchedWrite<'a> {
    /// Where.
    pub range: ByteRange,
    /// As long as `range`. It does not change meanwhile.
    pub data: &'a [u8],
    /// The CRC32C that the data must have; otherwise the write fails with [`ErrorKind::Mismatch`](cbd_types::ErrorKind::Mismatch), and
    /// nothing has changed.
    pub data_crc: Option<u32>,
}

impl BatchedWrite<'_> {
    /// A write of nothing.
    pub const EMPTY: Self = Self { range: ByteRange { start: 0, end: 0 }, data: &[], data_crc: None };
}

impl<'a> From<(ByteRange, &'a [u8])> for BatchedWrite<'a> {
    fn from((range, data): (ByteRange, &'a [u8])) -> Self {
        Self { range, data, data_crc: None }
    }
}

impl<E: Environment> Cache<E> {
    /// Does `writes`, none of which is empty, in order, each as [`write`](Self::write) does, and calls `done` with the number and
    /// the result of each. If one finds no space, the others continue. The data of all is of `class`.
    pub fn write_together(
        &self,
        class: Class,
        writes: &[BatchedWrite<'_>],
        waker: &Waker,
        mut done: impl FnMut(usize, Result<Admission>),
    ) {
        // Before any lane is locked: recording the first write takes the lock of the tables.
        if let Err(error) = self.base().gate().check_writable() {
            (0..writes.len()).for_each(|number| done(number, Err(Error::new(error.kind(), error.line()))));
            return;
        }
        let mut first = 0;
        while first < writes.len() {
            let mut held = [const { None }; TOGETHER];
            let count = self.hold(&writes[first..], &mut held);
            self.write_held(class, &writes[first..first + count], held, waker, |number, result| {
                done(first + number, result);
            });
            first += count;
        }
    }

    /// Locks the lanes of as many of `writes` as possible while waiting only for the first, announces the writes there and
    /// prefetches what they access in the index. Returns the number of these writes.
    fn hold<'a>(
        &'a self,
        writes: &[BatchedWrite<'_>],
        held: &mut [Option<LaneGuard<'a, E>>; TOGETHER],
    ) -> usize {
        for write in writes.iter().take(held.len()) {
            self.prefetched_lane(write.range);
        }
        let mut count = 0;
        for (place, BatchedWrite { range, .. }) in held.iter_mut().zip(writes) {
            let lane = self.lane_of(range.start);
            let guard = match count {
                0 => lane.lock_for_request(self.base()),
                // This also refuses a lane that this thread has locked already.
                _ => match lane.try_lock() {
                    Some(guard) => guard,
                    None => break,
                },
            };
            // Before the first of them stores: a locked instruction behind a store costs as much as a fence. If a write fails,
            // the next pass visits its lane needlessly.
            lane.announce(self.base());
            guard.prefetch(self.base(), *range);
            *place = Some(guard);
            count += 1;
        }
        count
    }

    /// Does `writes`, whose lanes are locked, and unlocks them after one fence.
    fn write_held(
        &self,
        class: Class,
        writes: &[BatchedWrite<'_>],
        mut held: [Option<LaneGuard<'_, E>>; TOGETHER],
        waker: &Waker,
        mut done: impl FnMut(usize, Result<Admission>),
    ) {
        let content = Content { class: class_of(class), ..RecordKind::Write.into() };
        let mut outcomes = [Held::Full; TOGETHER];
        let mut stored = self.base().region().nothing_in_flight();
        for ((guard, outcome), BatchedWrite { range, data, data_crc }) in
            held.iter_mut().zip(&mut outcomes).zip(writes)
        {
            let Some(state) = guard else { break };
            let content = Content { data_crc: *data_crc, ..content };
            *outcome = self.store_held(state, content, (*range, data), waker, &mut stored);
        }
        // One fence for all; only then are the lanes unlocked.
        let durable = self.base().region().fence(MutationPoint::WriteTogetherFence, stored);
        drop(held);
        for (number, outcome) in outcomes.into_iter().take(writes.len()).enumerate() {
            done(number, self.admission(outcome, &durable, waker));
        }
    }

    /// Does a write whose lane is locked; the caller fences it with everything in `stored`.
    fn store_held(
        &self,
        state: &mut LaneState,
        content: Content,
        (range, data): (ByteRange, &[u8]),
        waker: &Waker,
        stored: &mut InFlight,
    ) -> Held {
        if self.base().gate().check_running().is_err() {
            return Held::Stopped;
        }
        if self.base().region().check_stores(MutationPoint::WriteTogetherAfterFailure).is_err() {
            return Held::RegionFailed;
        }
        if self.base().mode().refuses_dirty() {
            return Held::Past;
        }
        if state.is_being_bypassed(range) {
            return if state.wait_for_bypass(waker).is_some() { Held::Full } else { Held::NoMemory };
        }
        let requester = Requester::Client;
        let in_flight = if blocks_in(range) <= FEW_BLOCKS {
            state.store::<E, FEW_BLOCKS>(self.base(), content, range, data, requester, Some(waker))
        } else {
            state.store::<E, MANY_BLOCKS>(self.base(), content, range, data, requester, Some(waker))
        };
        match in_flight {
            Ok((in_flight, _)) => {
                stored.join(in_flight);
                Held::Stored
            }
            Err(Lack::Space) => Held::Full,
            Err(Lack::Memory) => Held::NoMemory,
            Err(Lack::Data) => Held::OtherData,
        }
    }

    /// The result of a write, after the fence.
    fn admission(&self, outcome: Held, durable: &Durable, waker: &Waker) -> Result<Admission> {
        match outcome {
            Held::Stored => {
                self.base().region().check_stores(MutationPoint::WriteTogetherStoreCheck)?;
                Ok(Admission::Done(durable.share()))
            }
            Held::Full => {
                self.backing().check_not_stalled()?;
                Ok(Admission::Full)
            }
            Held::Past => Self::goes_past(waker),
            Held::NoMemory => no_memory(),
            Held::OtherData => other_data(),
            // Both conditions are permanent, so the error is still set.
            Held::Stopped => self.base().gate().check_running().map(|()| Admission::Full),
            Held::RegionFailed => self.base().region().store_failure().map_or(Ok(Admission::Full), Err),
        }
    }
}

/// The outcome of a write whose lane was locked. It holds no error: errors are larger, and are created after the fence.
#[derive(Clone, Copy)]
enum Held {
    Stored,
    /// There was no space; nothing has changed.
    Full,
    /// The mode has changed: the write is to go past the cache; nothing has changed.
    Past,
    /// There was no memory for the request; nothing has changed.
    NoMemory,
    /// The data is not what its checksum is of; nothing has changed.
    OtherData,
    Stopped,
    RegionFailed,
}
