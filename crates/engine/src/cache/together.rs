//! Writes that a client has submitted at once and that go to different lanes: what they will visit in the index is asked for
//! before the first of them is stored, and one fence serves them all.
//!
//! Always true here:
//! - a lane has at most one record that is not fenced, so what recovery knows of the last record of a lane holds;
//! - only who holds no lane waits for one, so nobody waits in a circle;
//! - the result of a write is told after the fence behind it, and writes to one lane are done in the order in which they came, but for one that has to
//!   wait for space.
//!
//! Left to others: one write (`write`), requests that wait (`cbd-device`).

use super::{Admission, Cache, write::no_memory};
use crate::{
    Environment,
    base::Asker,
    lane::{FEW_BLOCKS, Lack, LaneGuard, LaneState, MANY_BLOCKS},
};
use cbd_format::record::{RecordKind, blocks_in};
use cbd_types::{ByteRange, Durable, Error, InFlight, MutationPoint, Result};
use core::task::Waker;

/// Most writes that share a fence. Each holds its lane until then, so they are few beside the lanes.
pub const TOGETHER: usize = 8;

impl<E: Environment> Cache<E> {
    /// Does `writes`, none of which is empty, in their order, each as [`write`](Self::write) does it, and tells `done` the number and the result of each. Where
    /// one finds no space the others go on.
    pub fn write_together(
        &self,
        writes: &[(ByteRange, &[u8])],
        waker: &Waker,
        mut done: impl FnMut(usize, Result<Admission>),
    ) {
        // Before any lane is held: noting the first write takes the lock of the tables.
        if let Err(error) = self.base().gate().check_writable() {
            (0..writes.len()).for_each(|number| done(number, Err(Error::new(error.kind(), error.line()))));
            return;
        }
        let mut first = 0;
        while first < writes.len() {
            let mut held = [const { None }; TOGETHER];
            let count = self.hold(&writes[first..], &mut held);
            self.write_held(&writes[first..first + count], held, waker, |number, result| {
                done(first + number, result);
            });
            first += count;
        }
    }

    /// Takes the lanes of as many of `writes` as can be taken without waiting for any but the first, announces the writes there and asks for
    /// what they will visit. How many that is.
    fn hold<'a>(
        &'a self,
        writes: &[(ByteRange, &[u8])],
        held: &mut [Option<LaneGuard<'a, E>>; TOGETHER],
    ) -> usize {
        for (range, _) in writes.iter().take(held.len()) {
            self.prefetched_lane(*range);
        }
        let mut count = 0;
        for (place, (range, _)) in held.iter_mut().zip(writes) {
            let lane = self.lane_of(range.start);
            let guard = match count {
                0 => lane.lock_for_request(),
                // A lane that is ours already is refused as well.
                _ => match lane.try_lock() {
                    Some(guard) => guard,
                    None => break,
                },
            };
            // Before the first of them stores: a locked instruction behind a store costs what a fence does. A lane that is announced
            // for nothing, where its write fails, is looked at once too often.
            lane.announce(self.base());
            guard.prefetch(self.base(), *range);
            *place = Some(guard);
            count += 1;
        }
        count
    }

    /// Does `writes`, whose lanes are held, and lets them go after one fence.
    fn write_held(
        &self,
        writes: &[(ByteRange, &[u8])],
        mut held: [Option<LaneGuard<'_, E>>; TOGETHER],
        waker: &Waker,
        mut done: impl FnMut(usize, Result<Admission>),
    ) {
        let mut outcomes = [Held::Full; TOGETHER];
        let mut stored = self.base().region().nothing_in_flight();
        for ((guard, outcome), (range, data)) in held.iter_mut().zip(&mut outcomes).zip(writes) {
            let Some(state) = guard else { break };
            *outcome = self.store_held(state, *range, data, waker, &mut stored);
        }
        // One fence for all, and only then is any lane let go.
        let durable = self.base().region().fence(MutationPoint::WriteTogetherFence, stored);
        drop(held);
        for (number, outcome) in outcomes.into_iter().take(writes.len()).enumerate() {
            done(number, self.admission(outcome, &durable));
        }
    }

    /// A write to a lane that is held, which the caller fences with all that is `stored`.
    fn store_held(
        &self,
        state: &mut LaneState,
        range: ByteRange,
        data: &[u8],
        waker: &Waker,
        stored: &mut InFlight,
    ) -> Held {
        if self.base().gate().check_running().is_err() {
            return Held::Stopped;
        }
        if self.base().region().check_stores(MutationPoint::WriteTogetherAfterFailure).is_err() {
            return Held::RegionFailed;
        }
        let (kind, asker) = (RecordKind::Write, Asker::Client);
        let in_flight = if blocks_in(range) <= FEW_BLOCKS {
            state.store::<E, FEW_BLOCKS>(self.base(), kind, range, data, asker, Some(waker))
        } else {
            state.store::<E, MANY_BLOCKS>(self.base(), kind, range, data, asker, Some(waker))
        };
        match in_flight {
            Ok((in_flight, _)) => {
                stored.join(in_flight);
                Held::Stored
            }
            Err(Lack::Space) => Held::Full,
            Err(Lack::Memory) => Held::NoMemory,
        }
    }

    /// The result of a write, after the fence.
    fn admission(&self, outcome: Held, durable: &Durable) -> Result<Admission> {
        match outcome {
            Held::Stored => {
                self.base().region().check_stores(MutationPoint::WriteTogetherStoreCheck)?;
                Ok(Admission::Done(durable.share()))
            }
            Held::Full => {
                self.backing().check_not_stalled()?;
                Ok(Admission::Full)
            }
            Held::NoMemory => no_memory(),
            // Neither ends, so the error is still there.
            Held::Stopped => self.base().gate().check_running().map(|()| Admission::Full),
            Held::RegionFailed => self.base().region().store_failure().map_or(Ok(Admission::Full), Err),
        }
    }
}

/// What became of a write whose lane was held. Errors are larger, and their reasons last: they are made after the fence.
#[derive(Clone, Copy)]
enum Held {
    Stored,
    /// There was no space; nothing has changed.
    Full,
    /// There was no memory for it; nothing has changed.
    NoMemory,
    Stopped,
    RegionFailed,
}
