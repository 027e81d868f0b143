//! Changes that go past the lane, to the backing device alone.
//!
//! Invariants:
//! - before the backing device gets the change, an invalidation is durable: the lane holds nothing of the range, also after a crash;
//! - until the change has returned, no fill of the range begins or is recorded, and no request changes the range in this lane, so
//!   writeback has nothing of it that could be in flight together with the change;
//! - a range is bypassed only while the backing device has everything that the lane holds of it. So nothing older than an
//!   invalidation is ever written back over what the bypass has written.
//!
//! Elsewhere: the order among lanes, modes, and flushes of the backing device (`cache::bypass`).

use super::{LaneState, blocks, fills::PendingFill, look_up::Source};
use crate::{
    Environment,
    base::{Base, Lack, Requester},
    rangemap::RangeMap,
};
use alloc::vec::Vec;
use cbd_format::record::{Record, RecordKind};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, Durable, MutationPoint};
use core::task::Waker;

/// The number of a bypass in its lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BypassId(u64);

/// Why a range cannot be bypassed at present.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Obstacle {
    /// A change that overlaps it is on its way to the backing device.
    InFlight,
    /// The backing device lacks some of it until writeback has written it.
    Dirty,
    /// The backing device lacks some of it for an unknown time: it is parked or damaged.
    Kept,
}

/// What the backing device does for a lane: bypasses, and reads that may become fills.
#[derive(Default)]
pub(super) struct Bypasses {
    pub(super) fills: Vec<PendingFill>,
    pub(super) next_fill: u64,
    in_flight: Vec<(BypassId, ByteRange)>,
    next: u64,
    /// The requests that wait for the end of a bypass.
    waiting: Vec<Waker>,
    /// Sequence number from which on write-through records hold data that the backing device has accepted since the cache was
    /// opened, and since its last failed flush. Earlier ones may be lost there and are written again.
    written_from: u64,
    /// The last epoch of a write-through record, and of one that may have to be written again.
    last_epoch: u64,
    unwritten_epoch: u64,
    /// Where a bypass came behind a record that a flush of the backing device must cover. What is older is not written back there.
    superseded: RangeMap<Superseded>,
    /// The drained epoch when what counts no more was last removed from it.
    pruned_at: u64,
}

/// The invalidation of a bypass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Superseded {
    sequence: u64,
    /// All older records are of this epoch or an earlier one: once it is drained, none of them is written back.
    epoch: u64,
}

impl Bypasses {
    /// The state before replay.
    #[inline(never)]
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Notes that a write-through record of `epoch` is in the log.
    pub(super) fn note(&mut self, epoch: u64) {
        self.last_epoch = self.last_epoch.max(epoch);
    }

    fn overlaps(&self, range: ByteRange) -> bool {
        self.in_flight.iter().any(|(_, known)| known.overlaps(&range))
    }
}

impl LaneState {
    /// Whether a change of `range` is on its way to the backing device.
    #[inline]
    pub(crate) fn is_being_bypassed(&self, range: ByteRange) -> bool {
        self.bypassing > 0 && self.bypass.overlaps(range)
    }

    /// Adds a request to those that are woken at the end of each bypass. `None` if there is no memory for it.
    pub(crate) fn wait_for_bypass(&mut self, waker: &Waker) -> Option<()> {
        if !self.bypass.waiting.iter().any(|known| known.will_wake(waker)) {
            self.bypass.waiting.try_reserve(1).ok()?;
            self.bypass.waiting.push(waker.clone());
        }
        Some(())
    }

    /// Removes `waker` from the requests that wait for the end of a bypass.
    pub(crate) fn stop_waiting_for_bypass(&mut self, waker: &Waker) {
        self.bypass.waiting.retain(|known| !known.will_wake(waker));
    }

    /// Why `range` cannot be bypassed at present, apart from the order among epochs.
    pub(crate) fn obstacle<E: Environment>(&self, base: &Base<E>, range: ByteRange) -> Option<Obstacle> {
        if self.is_being_bypassed(range) {
            return Some(Obstacle::InFlight);
        }
        if self.parked.touching(range).next().is_some()
            || self.overlay.damaged_in(range).next().is_some()
            || self.has_lost()
        {
            return Some(Obstacle::Kept);
        }
        let is_dirty = base.identity().lanes.of_lane(self.id, range).any(|part| self.holds_dirty(base, part));
        is_dirty.then_some(Obstacle::Dirty)
    }

    /// Whether the backing device lacks some of what the lane holds of `range`.
    fn holds_dirty<E: Environment>(&self, base: &Base<E>, range: ByteRange) -> bool {
        let drained = base.drained_epoch().0;
        let has_all = |segment: u32| {
            self.segments().any(|known| known.segment == segment && known.last_dirty_epoch <= drained)
        };
        let mut is_dirty = false;
        let mut known_clean = u32::MAX;
        self.look_up(base, range, &mut |_, source| {
            let segment = match source {
                Source::Record(location) => location.segment,
                // The record of zeroes is not known here, only that its segment may be dirty.
                Source::Zeroes => {
                    is_dirty |= self.segments().any(|known| known.last_unwritten_epoch > drained);
                    return;
                }
                Source::Damaged => {
                    is_dirty = true;
                    return;
                }
                Source::Backing => return,
            };
            if is_dirty || segment == known_clean {
                return;
            }
            if has_all(segment) {
                known_clean = segment;
                return;
            }
            let Source::Record(location) = source else { return };
            is_dirty |= base.load_record(location).map_or(true, |record| self.is_unwritten(base, &record));
        });
        is_dirty
    }

    /// Whether the backing device may lack the content of a record that is not parked.
    pub(crate) fn is_unwritten<E: Environment>(&self, base: &Base<E>, record: &Record) -> bool {
        let is_written = match record.kind() {
            RecordKind::WriteThrough => self.is_written_through(record),
            kind => !kind.is_dirty(),
        };
        !is_written && record.epoch.get() > base.drained_epoch().0
    }

    /// Whether the backing device has accepted the data of a write-through record, and no failed flush since puts it in doubt.
    pub(crate) fn is_written_through(&self, record: &Record) -> bool {
        record.kind() == RecordKind::WriteThrough && record.sequence.get() >= self.bypass.written_from
    }

    /// Whether parts of older records may not be written back.
    pub(crate) fn has_superseded(&self) -> bool {
        !self.bypass.superseded.is_empty()
    }

    /// The parts of a record that no bypass came behind.
    pub(crate) fn not_superseded(&self, record: &Record) -> Vec<ByteRange> {
        let (mut parts, range) = (Vec::new(), record.range());
        let mut start = range.start;
        for (part, since) in self.bypass.superseded.touching(range) {
            if since.sequence > record.sequence.get() {
                if start < part.start {
                    parts.push(ByteRange { start, end: part.start });
                }
                start = part.end;
            }
        }
        if start < range.end {
            parts.push(ByteRange { start, end: range.end });
        }
        parts
    }

    /// Whether a flush of the backing device must still cover some of what the lane holds of `range`.
    fn awaits_flush<E: Environment>(&self, base: &Base<E>, range: ByteRange) -> bool {
        let drained = base.drained_epoch().0;
        // Which record has set zeroes is not known here.
        let mut awaits = !self.overlay.is_empty();
        for part in base.identity().lanes.of_lane(self.id, range) {
            if !awaits {
                self.look_up(base, part, &mut |_, source| {
                    if let Source::Record(location) = source
                        && !awaits
                    {
                        awaits = base.find_record(location).is_none_or(|record| {
                            record.kind().awaits_flush() && record.epoch.get() > drained
                        });
                    }
                });
            }
        }
        awaits
    }

    /// The first epoch, after `drained`, of which the backing device may lack something that the lane holds; `None` if it has
    /// everything. It may be earlier than the real one.
    pub(crate) fn oldest_unwritten_epoch(&self, drained: u64) -> Option<u64> {
        let dirty = self.segments().filter(|segment| segment.last_unwritten_epoch > drained);
        let dirty = dirty.map(|segment| segment.first_unwritten_epoch.max(drained + 1)).min();
        let again = (self.bypass.unwritten_epoch > drained).then_some(drained + 1);
        dirty.into_iter().chain(again).min()
    }

    /// What the lane's write-through records hold may be lost on the backing device: they are written again.
    pub(crate) fn distrust_write_through(&mut self) {
        self.bypass.written_from = self.next_sequence;
        self.bypass.unwritten_epoch = self.bypass.last_epoch;
    }

    /// Begins a bypass of `range`, which has no obstacle: when this returns, the lane holds nothing of it, durably. The caller has
    /// set the lane's touched bit.
    ///
    /// # Errors
    /// The missing resource; nothing has changed then.
    pub(crate) fn begin_bypass<E: Environment>(
        &mut self,
        base: &Base<E>,
        range: ByteRange,
        requester: Requester,
        waker: Option<&Waker>,
    ) -> Result<(BypassId, Durable), Lack> {
        // 1. Reserve.
        self.bypass.in_flight.try_reserve(1).map_err(|_| Lack::Memory)?;
        self.index.reserve(0).ok_or(Lack::Memory)?;
        if !self.overlay.is_empty() {
            self.overlay.reserve(range).ok_or(Lack::Memory)?;
        }
        self.prune_superseded(base.drained_epoch().0);
        let supersedes = self.last_dirty_epoch() > base.drained_epoch().0 && self.awaits_flush(base, range);
        if supersedes {
            self.bypass.superseded.reserve(range).ok_or(Lack::Memory)?;
        }
        self.make_room(base, 1, 0, requester, waker)?;
        // 2. From here on no fill of the range is recorded, and none begins.
        let id = BypassId(self.bypass.next);
        self.bypass.next += 1;
        self.bypass.in_flight.push((id, range));
        self.bypassing += 1;
        self.cancel_fills(range);
        // 3. The invalidation, and the index.
        let (_, stored) = self.append(base, Record::new(RecordKind::Invalidate, range), &[]);
        if supersedes {
            let (sequence, epoch) = (self.next_sequence - 1, base.epochs().present());
            self.bypass.superseded.insert(range, Superseded { sequence, epoch }, |_| false);
        }
        self.invalidate(base, range);
        // 4. Fence before the lane is unlocked, and before the backing device gets the change.
        Ok((id, base.region().fence(MutationPoint::InvalidateFence, stored)))
    }

    /// Removes what does not count any more, at most once for each drained epoch: without it, a load that never pauses would let
    /// the map grow for ever.
    fn prune_superseded(&mut self, drained: u64) {
        if self.has_superseded() && self.bypass.pruned_at < drained {
            self.bypass.pruned_at = drained;
            let everything = ByteRange { start: 0, end: u64::MAX };
            self.bypass.superseded.remove(everything, |known| known.epoch <= drained);
        }
    }

    /// Ends a bypass: the change has returned from the backing device, or was not submitted. Returns the requests that waited.
    pub(crate) fn end_bypass(&mut self, id: BypassId) -> Vec<Waker> {
        self.bypass.in_flight.retain(|(known, _)| *known != id);
        self.bypassing = self.bypass.in_flight.len() as u32;
        core::mem::take(&mut self.bypass.waiting)
    }

    /// Removes what the lane holds of `range` from index and overlay; damage stays.
    pub(super) fn invalidate<E: Environment>(&mut self, base: &Base<E>, range: ByteRange) {
        for part in base.identity().lanes.of_lane(self.id, range) {
            for (block, first, end) in blocks(part) {
                self.index.remove_parts(base.identity().lanes.key(block * CHECKSUM_BLOCK), first, end);
            }
        }
        if !self.overlay.is_empty() {
            self.overlay.forget_zeroes_in(range);
        }
    }

    /// Replays an invalidation with this sequence number and epoch. `are_unflushed`: a flush must still cover some record before it. Out
    /// of line: the frame of replay has no room for it.
    #[inline(never)]
    pub(super) fn replay_invalidation<E: Environment>(
        &mut self,
        base: &Base<E>,
        range: ByteRange,
        (sequence, epoch): (u64, u64),
        are_unflushed: bool,
    ) {
        if are_unflushed && self.awaits_flush(base, range) {
            self.bypass.superseded.insert(range, Superseded { sequence, epoch }, |_| false);
        }
        self.invalidate(base, range);
    }
}
