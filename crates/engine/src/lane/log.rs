//! The log of a lane: reserves space for records and stores records into slots.
//!
//! Invariants: a segment's header is durable before its first record; a record is stored twice.
//!
//! Elsewhere: reads of the log (`base::load`).

use super::{LaneState, LogSegment};
use crate::{
    Environment,
    base::{Base, Lack, Requester},
    position::Location,
    rare,
};
use cbd_format::record::{FLAG_DATA_CRC, bytes_of};
use cbd_format::{
    CHECKSUMS_PER_LINE, ChecksumLine, Record, RecordKind, RecordPlace, SegmentHeader, SegmentShape, segment,
};
use cbd_types::{InFlight, MutationPoint};
use core::task::Waker;

/// The most slots that one record takes.
pub(crate) const SLOTS_MAX_OF_RECORD: u32 = 1 + cbd_format::MAX_CHECKSUM_LINES;

/// While no segment is left for clients, writes that can go past the cache leave this part of the open segment's slots, one
/// sixteenth, to invalidations.
const SLOTS_PART_KEPT: u32 = 16;

// A large record must always fit an empty segment.
const _: () = assert!(SLOTS_MAX_OF_RECORD <= 64);

impl LaneState {
    /// Makes room in the lane's open segment for a record of `slots` slots and `length` bytes of data. Opens another segment if
    /// the record does not fit.
    ///
    /// # Errors
    /// The missing resource. If the pool has no segment, the client's waker is on its wait list.
    pub(super) fn make_room<E: Environment>(
        &mut self,
        base: &Base<E>,
        slots: u32,
        length: u64,
        requester: Requester,
        waker: Option<&Waker>,
    ) -> Result<(), Lack> {
        if self.has_room_in_open(base, slots, length, requester) {
            return Ok(());
        }
        // For the segment that is sealed below.
        self.sealed.try_reserve(1).map_err(|_| Lack::Memory)?;
        let segment = match base.pool().take(requester, waker) {
            Ok(segment) => segment,
            Err(lack) => return self.wait_for_room(base, slots, length, requester, waker, lack),
        };
        if base.pool().taken().is_multiple_of(base.pool().large_epoch()) || base.is_above_gc() {
            base.wakeups().wake();
        }
        if let Some(full) = self.open.take() {
            self.sealed.push_back(full);
        }
        self.open_segment(base, segment);
        Ok(())
    }

    /// Whether a record with `length` bytes of data would take the last space: no segment is left for clients, and the open one
    /// would keep too little for the invalidations of changes that go past the cache.
    pub(crate) fn is_short_of_space<E: Environment>(&self, base: &Base<E>, length: u64) -> bool {
        let (shape, pool) = (base.shape(), base.pool());
        let kept = shape.slots_max() / SLOTS_PART_KEPT;
        let has_room = |open: &LogSegment| shape.fits(open.slots, open.data_low, 1 + kept, length);
        pool.free() <= pool.left_by_clients() && !self.open.as_ref().is_some_and(has_room)
    }

    /// The end of [`make_room`](Self::make_room) if the pool has given no segment.
    #[cold]
    fn wait_for_room<E: Environment>(
        &mut self,
        base: &Base<E>,
        slots: u32,
        length: u64,
        requester: Requester,
        waker: Option<&Waker>,
        lack: Lack,
    ) -> Result<(), Lack> {
        // A segment may have been released between the first check and `take` without waking a client. A release from now on
        // wakes the wait list. A client that continues here stays on the list, gets one spurious wakeup, and counts as a waiting
        // writer until then.
        if self.has_room_in_open(base, slots, length, requester) {
            return Ok(());
        }
        base.wakeups().wake();
        if let Some(waker) = waker
            && base.gate().check_running().is_err()
        {
            // The wait list was woken before this waker was added to it.
            waker.wake_by_ref();
        }
        Err(lack)
    }

    /// Whether the lane's open segment has room for such a record and `requester` may use it. If so, the segment is ready for the
    /// record.
    fn has_room_in_open<E: Environment>(
        &mut self,
        base: &Base<E>,
        slots: u32,
        length: u64,
        requester: Requester,
    ) -> bool {
        // While the reserve is incomplete, the open segment may have been taken from it. The rest of such a segment is
        // for what the lane must record before it can free a segment, and everything else waits.
        let pool = base.pool();
        let may_use_open = pool.free() >= pool.left_by_clients()
            || match requester {
                Requester::Essential => true,
                Requester::Kept | Requester::Frugal => pool.free() >= pool.reserve(),
                Requester::Client | Requester::Optional => false,
            };
        if let Some(open) = &mut self.open
            && may_use_open
            && base.shape().fits(open.slots, open.data_low, slots, length)
        {
            if open.holds_dropped && length > 0 {
                Self::erase_dropped(base, open);
            }
            return true;
        }
        false
    }

    /// Erases the next slot of a reopened segment, durably, because it may hold a record that recovery dropped: a record that
    /// is torn because its data is missing. Data that is stored now could complete it.
    fn erase_dropped<E: Environment>(base: &Base<E>, open: &mut LogSegment) {
        let at = base.segment(open.segment).base();
        let [primary, mirror] = base.shape().slot(open.slots);
        let region = base.region();
        let stored = region.store_line(at + primary, &[0; 64]).and(region.store_line(at + mirror, &[0; 64]));
        base.region().fence(MutationPoint::RecoveryReopenEraseFence, stored);
        open.holds_dropped = false;
    }

    /// Opens a segment. Crash order: both copies of the header are durable before a record can be stored after them. Until then
    /// recovery treats the segment as free.
    fn open_segment<E: Environment>(&mut self, base: &Base<E>, segment: u32) {
        let runtime = base.segment(segment);
        let generation = runtime.generation().wrapping_add(1).max(1);
        let salt = base.environment().random();
        runtime.begin(self.id, generation, salt, self.next_ordinal);
        if generation > 1 {
            rare::count(&base.rare().segment_reuses);
        }
        let header = SegmentHeader {
            crc: 0.into(),
            magic: segment::LOG_MAGIC.into(),
            cache_id: base.identity().cache_id.into(),
            segment: runtime.id().0.into(),
            generation: generation.into(),
            salt: salt.into(),
            lane: self.id.0.into(),
            lanes: base.identity().lanes.lanes.into(),
            ordinal: self.next_ordinal.into(),
            ownership: base.identity().ownership.into(),
            run: self.run.into(),
            cut: self.cut.into(),
            first_sequence: self.next_sequence.into(),
            epoch: base.epochs().present().into(),
            reserved: [0; 40],
        }
        .sealed();
        let mut stored = base.region().store(runtime.base(), bytes_of(&header));
        let copy = runtime.base() + base.shape().header_copy();
        stored = stored.and(base.region().store(copy, bytes_of(&header)));
        base.region().fence(MutationPoint::HeaderFence, stored);
        self.open = Some(LogSegment {
            segment,
            ordinal: self.next_ordinal,
            first_sequence: self.next_sequence,
            run: self.run,
            slots: 0,
            data_low: base.shape().data_top(),
            first_unwritten_epoch: 0,
            last_unwritten_epoch: 0,
            last_dirty_epoch: 0,
            holds_dropped: false,
        });
        self.next_ordinal += 1;
    }

    /// Takes `length` bytes of data space in the open segment, after [`make_room`](Self::make_room). Returns their offset from
    /// the segment's base.
    pub(super) fn take_data(&mut self, length: u64) -> u64 {
        let Some(open) = &mut self.open else { return 0 };
        open.data_low -= SegmentShape::data_bytes(length);
        open.data_low
    }

    /// Returns what was taken last.
    pub(super) fn return_data(&mut self, length: u64) {
        if let Some(open) = &mut self.open {
            open.data_low += SegmentShape::data_bytes(length);
        }
    }

    /// Stores a record in the open segment, after [`make_room`](Self::make_room), with the next sequence number and the current
    /// epoch. The stores are in flight until the caller fences, which it does before it unlocks the lane.
    pub(super) fn append<E: Environment>(
        &mut self,
        base: &Base<E>,
        mut record: Record,
        checksums: &[u32],
    ) -> (Location, InFlight) {
        if let Some((first, _)) = checksums.split_first() {
            record.flags |= FLAG_DATA_CRC;
            record.first_sum = (*first).into();
        }
        self.append_with(base, record, checksums.get(1..).unwrap_or_default(), ChecksumLine::new)
    }

    /// As [`append`](Self::append), for a quarantine with a map of the sectors that it marks bad. Without a map it marks all of
    /// its range bad.
    pub(super) fn append_quarantine<E: Environment>(
        &mut self,
        base: &Base<E>,
        record: Record,
        map: &[u32],
    ) -> (Location, InFlight) {
        self.append_with(base, record, map, ChecksumLine::map)
    }

    fn append_with<E: Environment>(
        &mut self,
        base: &Base<E>,
        mut record: Record,
        words: &[u32],
        line: impl Fn(u8, u64, &[u32]) -> ChecksumLine,
    ) -> (Location, InFlight) {
        let epoch = base.epochs().present();
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let open = self.open.as_mut().unwrap_or_else(|| unreachable!("room was made"));
        let runtime = base.segment(open.segment);
        record.sequence = sequence.into();
        record.epoch = epoch.into();
        record.generation = runtime.generation().into();
        record.lines = words.len().div_ceil(CHECKSUMS_PER_LINE) as u8;
        let slot = open.slots;
        let stored = store_slot(base, open.segment, slot, |place| record.encode(place));
        let mut stored = stored;
        for (index, words) in words.chunks(CHECKSUMS_PER_LINE).enumerate() {
            let line = line(index as u8, sequence, words);
            stored = stored
                .and(store_slot(base, open.segment, slot + 1 + index as u32, |place| line.encode(place)));
        }
        open.slots += record.slots();
        debug_assert!(
            base.shape().fits(open.slots, open.data_low, 0, 0),
            "a record and data overlap: room was not made"
        );
        if base.epochs().present() != epoch {
            rare::count(&base.rare().stragglers);
        }
        if record.kind().awaits_flush() {
            open.last_dirty_epoch = epoch;
        }
        if record.kind() == RecordKind::WriteThrough {
            self.bypass.note(epoch);
        }
        if record.kind().is_dirty() {
            open.note_unwritten(epoch);
            self.counters.dirty_records += 1;
            if record.kind().has_data() {
                self.counters.dirtied += record.length.get();
            }
        }
        self.counters.stored +=
            u64::from(record.slots()) * 128 + if record.kind().has_data() { record.length.get() } else { 0 };
        (Location { segment: open.segment, slot }, stored)
    }
}

/// Stores both copies of a line.
fn store_slot<E: Environment>(
    base: &Base<E>,
    segment: u32,
    slot: u32,
    encode: impl Fn(&RecordPlace) -> [u8; 64],
) -> InFlight {
    let runtime = base.segment(segment);
    let [primary, mirror] = base.shape().slot(slot);
    let line = encode(&runtime.place(slot));
    let stored = base.region().store_line(runtime.base() + primary, &line);
    stored.and(base.region().store_line(runtime.base() + mirror, &line))
}
