//! A lane's log: space for records, records into slots, records and data out of them.
//!
//! Always true here: a segment's header is durable before its first record; a record is stored twice; what is read was
//! verified, or is an error.

use crate::{
    Cache, Environment,
    index::Location,
    lane::{LaneState, LogSegment},
    pool::Asker,
    rare,
};
use alloc::{format, vec::Vec};
use cbd_format::record::{FLAG_DATA_CRC, bytes_of};
use cbd_format::{
    CHECKSUMS_PER_LINE, ChecksumLine, Record, RecordPlace, SegmentHeader, crc32c_joined, segment,
};
use cbd_types::{ByteRange, Epoch, Error, ErrorKind, InFlight, MutationPoint, Result, SECTOR};
use core::sync::atomic::Ordering;
use core::task::Waker;

/// Most slots that one record takes.
pub(crate) const SLOTS_MAX_OF_RECORD: u32 = 1 + cbd_format::MAX_CHECKSUM_LINES;

/// A record that has found its data damaged.
#[derive(Debug)]
pub(crate) struct Damage {
    /// The checksum block that is damaged.
    pub(crate) range: ByteRange,
    pub(crate) error: Error,
}

impl<E: Environment> Cache<E> {
    /// Makes room for a record of `slots` slots and `length` bytes of data in the lane's open segment, opening another
    /// one where it does not fit. `false` when the pool has none; a client is on its wait list then.
    pub(crate) fn make_room(
        &self,
        lane: &mut LaneState,
        slots: u32,
        length: u64,
        asker: Asker,
        waker: Option<&Waker>,
    ) -> bool {
        if self.has_room_in_open(lane, slots, length, asker) {
            return true;
        }
        let Some(segment) = self.pool.take(asker, waker) else {
            // A segment may have come back between the first look and `take`, and woken nobody. One that comes back from now on wakes
            // the wait list; a client that goes on here stays on it, is woken once too often, and until then it looks as if a writer waited.
            if self.has_room_in_open(lane, slots, length, asker) {
                return true;
            }
            self.wake_worker();
            if let Some(waker) = waker
                && !MutationPoint::PoolWakesAfterStop.holds(self.check_running().is_ok())
            {
                // The wait list was woken before this one was on it.
                waker.wake_by_ref();
            }
            return false;
        };
        if self.is_above_gc() {
            self.wake_worker();
        }
        if let Some(full) = lane.open.take() {
            lane.sealed.push_back(full);
        }
        self.open_segment(lane, segment);
        true
    }

    /// Whether the lane's open segment has room for such a record and `asker` may use it; it is ready for the record then.
    fn has_room_in_open(&self, lane: &mut LaneState, slots: u32, length: u64, asker: Asker) -> bool {
        // While the reserve is not whole, an open segment may be one that was taken from it for a quarantine: what is left
        // of it is for more of them, and clients wait.
        let may_use_open = matches!(asker, Asker::Essential | Asker::Frugal)
            || MutationPoint::PoolOpenFromReserve.holds(self.pool.free() >= self.pool.reserve());
        if let Some(open) = &mut lane.open
            && may_use_open
            && self.shape().fits(open.slots, open.data_low, slots, length)
        {
            if open.holds_dropped && length > 0 && MutationPoint::RecoveryReopenErase.is_active() {
                self.erase_dropped(open);
            }
            return true;
        }
        false
    }

    /// A record that recovery dropped may stand in the next slot of a segment that was opened again, torn for want of data.
    /// Data that is stored now could make it whole, so it is erased, durably, first.
    fn erase_dropped(&self, open: &mut LogSegment) {
        let base = self.segments[open.segment as usize].base;
        let [primary, mirror] = self.shape().slot(open.slots);
        let stored = self
            .region()
            .store_line(base + primary, &[0; 64])
            .and(self.region().store_line(base + mirror, &[0; 64]));
        self.region().fence(MutationPoint::RecoveryReopenEraseFence, stored);
        open.holds_dropped = false;
    }

    /// Opens a segment for the lane. In crash order: the header's two copies are durable before any record can be
    /// stored behind them; until then the segment is free for recovery.
    fn open_segment(&self, lane: &mut LaneState, segment: u32) {
        let runtime = &self.segments[segment as usize];
        let raised = u32::from(MutationPoint::GenerationRaised.is_active());
        let generation = runtime.generation.load(Ordering::Relaxed).wrapping_add(raised).max(1);
        let salt = if MutationPoint::SaltFresh.is_active() { self.environment().random() } else { 0 };
        runtime.begin(generation, salt, lane.next_ordinal);
        if generation > 1 {
            rare::count(&self.rare.segment_reuses);
        }
        let header = SegmentHeader {
            crc: 0.into(),
            magic: segment::LOG_MAGIC.into(),
            cache_id: self.identity().cache_id.into(),
            segment: runtime.id.0.into(),
            generation: generation.into(),
            salt: salt.into(),
            lane: lane.id.0.into(),
            lanes: self.identity().lanes.lanes.into(),
            ordinal: lane.next_ordinal.into(),
            ownership: self.identity().ownership.into(),
            run: lane.run.into(),
            cut: lane.cut.into(),
            first_sequence: lane.next_sequence.into(),
            epoch: self.epochs().present().into(),
            reserved: [0; 40],
        }
        .sealed();
        let mut stored = self.region().store(runtime.base, bytes_of(&header));
        if MutationPoint::HeaderCopyStore.is_active() {
            let copy = runtime.base + self.shape().header_copy();
            stored = stored.and(self.region().store(copy, bytes_of(&header)));
        }
        self.region().fence(MutationPoint::HeaderFence, stored);
        lane.open = Some(LogSegment {
            segment,
            ordinal: lane.next_ordinal,
            first_sequence: lane.next_sequence,
            run: lane.run,
            slots: 0,
            data_low: self.shape().data_top(),
            last_dirty_epoch: 0,
            holds_dropped: false,
        });
        lane.next_ordinal += 1;
    }

    /// Takes `length` bytes of data space in the open segment, in which room was made: where they begin, from the
    /// segment's base.
    pub(crate) fn take_data(&self, lane: &mut LaneState, length: u64) -> u64 {
        let Some(open) = &mut lane.open else { return 0 };
        open.data_low -= cbd_format::SegmentShape::data_bytes(length);
        open.data_low
    }

    /// Stores a record in the open segment, in which room was made, with the next sequence number and the present epoch.
    /// In flight until the caller fences, which it does before it lets the lane go.
    pub(crate) fn append(
        &self,
        lane: &mut LaneState,
        mut record: Record,
        checksums: &[u32],
    ) -> (Location, InFlight) {
        if let Some((first, _)) = checksums.split_first() {
            record.flags = FLAG_DATA_CRC;
            record.first_sum = (*first).into();
        }
        self.append_with(lane, record, checksums.get(1..).unwrap_or_default(), ChecksumLine::new)
    }

    /// As [`append`](Self::append), a quarantine with a map of the sectors that it marks bad; without a map it is all of its
    /// range.
    pub(crate) fn append_quarantine(
        &self,
        lane: &mut LaneState,
        record: Record,
        map: &[u32],
    ) -> (Location, InFlight) {
        self.append_with(lane, record, map, ChecksumLine::map)
    }

    fn append_with(
        &self,
        lane: &mut LaneState,
        mut record: Record,
        words: &[u32],
        line: impl Fn(u8, u64, &[u32]) -> ChecksumLine,
    ) -> (Location, InFlight) {
        let epoch = self.epochs().present();
        let sequence = lane.next_sequence;
        lane.next_sequence += 1;
        let open = lane.open.as_mut().unwrap_or_else(|| unreachable!("room was made"));
        let runtime = &self.segments[open.segment as usize];
        record.sequence = sequence.into();
        record.epoch = epoch.into();
        record.generation = runtime.generation.load(Ordering::Relaxed).into();
        record.lines = words.len().div_ceil(CHECKSUMS_PER_LINE) as u8;
        let slot = open.slots;
        let stored = self.store_slot(open.segment, slot, |place| record.encode(place));
        let mut stored = stored;
        for (index, words) in words.chunks(CHECKSUMS_PER_LINE).enumerate() {
            let line = line(index as u8, sequence, words);
            stored = stored
                .and(self.store_slot(open.segment, slot + 1 + index as u32, |place| line.encode(place)));
        }
        open.slots += record.slots();
        if self.epochs().present() != epoch {
            rare::count(&self.rare.stragglers);
        }
        if record.kind().is_dirty() {
            open.last_dirty_epoch = epoch;
            lane.counters.dirty_records += 1;
            if record.kind().has_data() {
                lane.counters.dirtied += record.length.get();
            }
        }
        lane.counters.stored +=
            u64::from(record.slots()) * 128 + if record.kind().has_data() { record.length.get() } else { 0 };
        (Location { segment: open.segment, slot }, stored)
    }

    fn store_slot(&self, segment: u32, slot: u32, encode: impl Fn(&RecordPlace) -> [u8; 64]) -> InFlight {
        let runtime = &self.segments[segment as usize];
        let [primary, mirror] = self.shape().slot(slot);
        let line = encode(&runtime.place(slot));
        let stored = self.region().store_line(runtime.base + primary, &line);
        if !MutationPoint::RecordMirrorStore.is_active() {
            return stored;
        }
        stored.and(self.region().store_line(runtime.base + mirror, &line))
    }

    /// The record at `location`, from its mirror where the primary fails.
    ///
    /// # Errors
    /// [`ErrorKind::Media`] when both copies are damaged.
    pub(crate) fn load_record(&self, location: Location) -> Result<Record> {
        self.find_record(location).ok_or_else(|| {
            Error::new(
                ErrorKind::Media,
                format!(
                    "both copies of the record in slot {} of segment {} are damaged",
                    location.slot, self.segments[location.segment as usize].id
                ),
            )
        })
    }

    /// As [`load_record`](Self::load_record), where it is no wonder if there is none.
    pub(crate) fn find_record(&self, location: Location) -> Option<Record> {
        let runtime = &self.segments[location.segment as usize];
        let place = runtime.place(location.slot);
        let generation = runtime.generation.load(Ordering::Relaxed);
        let copies = if MutationPoint::RecordMirrorRead.is_active() { 2 } else { 1 };
        for (copy, at) in self.shape().slot(location.slot).into_iter().take(copies).enumerate() {
            let mut line = [0; 64];
            if self.region().load(runtime.base + at, &mut line).is_err() {
                continue;
            }
            if let Some(record) = Record::decode(&line).verify(&place, generation, self.shape().size)
                && self.accepts(&record)
            {
                if copy > 0 {
                    rare::count(&self.rare.mirror_reads);
                }
                return Some(record);
            }
        }
        None
    }

    /// Stores the copies of a record's lines that can be read and differ from the ones that count. In flight until the caller
    /// fences.
    pub(crate) fn make_record_whole(&self, location: Location, record: &Record) -> InFlight {
        let runtime = &self.segments[location.segment as usize];
        let place = |slot| runtime.place(slot);
        let mut stored =
            self.make_slot_whole(location.segment, location.slot, &record.encode(&place(location.slot)));
        for number in 0..u32::from(record.lines) {
            if let Ok(line) = self.load_checksums(location, record, number as usize) {
                let slot = location.slot + 1 + number;
                stored = stored.and(self.make_slot_whole(location.segment, slot, &line.encode(&place(slot))));
            }
        }
        stored
    }

    fn make_slot_whole(&self, segment: u32, slot: u32, line: &[u8; 64]) -> InFlight {
        let mut stored = self.region().nothing_in_flight();
        for at in self.shape().slot(slot).map(|at| self.segments[segment as usize].base + at) {
            let mut copy = [0; 64];
            if self.region().load(at, &mut copy).is_ok() && copy != *line {
                stored = stored.and(self.region().store_line(at, line));
            }
        }
        stored
    }

    /// Whether the record's range lies on the device and, where it has data, inside one chunk.
    pub(crate) fn accepts(&self, record: &Record) -> bool {
        let range = record.range();
        // A sector is a power of two, and a division for each record of a log is many.
        let in_sector = u64::from(self.identity().sector) - 1;
        let on_device = range.end <= self.identity().size && (range.start | range.end) & in_sector == 0;
        let in_unit = !record.kind().has_data()
            || (range.start / cbd_types::CHUNK == (range.end - 1) / cbd_types::CHUNK
                && range.len() <= u64::from(self.shape().atomic_unit()));
        MutationPoint::RecordOnDevice.holds(on_device) && MutationPoint::RecordInUnit.holds(in_unit)
    }

    /// Copies the bytes of `range`, which the record at `location` holds, into `into`, verified. A block of which only a
    /// part is wanted is verified whole, as it was written.
    pub(crate) fn load_data(
        &self,
        location: Location,
        record: &Record,
        range: ByteRange,
        into: &mut [u8],
    ) -> core::result::Result<(), Damage> {
        let base = self.segments[location.segment as usize].base + u64::from(record.data_offset.get());
        let whole = record.range();
        if !record.has_checksums() {
            return self
                .region()
                .load(base + (range.start - whole.start), into)
                .map_err(|error| Damage { range, error });
        }
        let mut line: Option<(usize, ChecksumLine)> = None;
        let mut rest = into;
        for block in record.block_of(range.start)..=record.block_of(range.end - 1) {
            let covered = record.block_range(block);
            let wanted = ByteRange { start: covered.start.max(range.start), end: covered.end.min(range.end) };
            let damage = |error| Damage { range: covered, error };
            let expected = match block.checked_sub(1) {
                None => record.first_sum.get(),
                Some(further) => {
                    let (number, place) = (further / CHECKSUMS_PER_LINE, further % CHECKSUMS_PER_LINE);
                    if line.as_ref().is_none_or(|(known, _)| *known != number) {
                        line = Some((number, self.load_checksums(location, record, number).map_err(damage)?));
                    }
                    line.as_ref().map_or(0, |(_, line)| line.checksums[place].get())
                }
            };
            let at = base + (covered.start - whole.start);
            let (out, others) = rest.split_at_mut(wanted.len() as usize);
            rest = others;
            if !self.load_verified(at, covered, wanted, out, expected).map_err(damage)? {
                let id = self.segments[location.segment as usize].id;
                return Err(damage(Error::new(
                    ErrorKind::Media,
                    format!("data of {covered} in segment {id} does not match its checksum"),
                )));
            }
        }
        Ok(())
    }

    /// Copies `wanted` of the block `covered`, whose data stand at `at`, into `out`, unless the whole of it does not sum up to
    /// `expected`: then this is `false`, and none of it is in `out`.
    ///
    /// # Errors
    /// [`ErrorKind::Media`] where the memory fails.
    pub(crate) fn load_verified(
        &self,
        at: u64,
        covered: ByteRange,
        wanted: ByteRange,
        out: &mut [u8],
        expected: u32,
    ) -> Result<bool> {
        let sum = if wanted == covered {
            self.region().load_summed(at, out)?
        } else {
            self.load_part(at, covered, wanted, out).inspect_err(|_| out.fill(0))?
        };
        let is_good = MutationPoint::DataChecksum.holds(sum == expected);
        if !is_good && MutationPoint::DataErased.is_active() {
            out.fill(0);
        }
        Ok(is_good)
    }

    /// Copies `wanted` of the block `covered`, whose data stand at `at`, into `out`. Returns the checksum of the whole block; the
    /// rest of it is read into a small buffer.
    ///
    /// # Errors
    /// [`ErrorKind::Media`] where the memory fails; `out` may have a part of it then.
    fn load_part(&self, at: u64, covered: ByteRange, wanted: ByteRange, out: &mut [u8]) -> Result<u32> {
        let before = ByteRange { start: covered.start, end: wanted.start };
        let after = ByteRange { start: wanted.end, end: covered.end };
        let load = |range: ByteRange, into: &mut [u8]| {
            self.region().load_summed(at + (range.start - covered.start), into)
        };
        let load_rest = |mut sum: u32, range: ByteRange| -> Result<u32> {
            let mut scratch = [0; SECTOR as usize];
            for part in range.split_at_multiples(SECTOR) {
                let of_part = load(part, &mut scratch[..part.len() as usize])?;
                sum = crc32c_joined(sum, of_part, part.len());
            }
            Ok(sum)
        };
        let sum = load_rest(0, before)?;
        let sum = crc32c_joined(sum, load(wanted, out)?, wanted.len());
        load_rest(sum, after)
    }

    /// The sectors that a quarantine marks bad, as far as it has a map.
    ///
    /// # Errors
    /// [`ErrorKind::Media`] when a line of it is lost.
    pub(crate) fn load_map(&self, location: Location, record: &Record) -> Result<Vec<u32>> {
        let mut words = Vec::new();
        for number in 0..usize::from(record.lines) {
            words.extend(self.load_checksums(location, record, number)?.checksums.map(|word| word.get()));
        }
        Ok(words)
    }

    /// The `number`-th continuation line of a record: checksums, or a quarantine's map.
    fn load_checksums(&self, location: Location, record: &Record, number: usize) -> Result<ChecksumLine> {
        let runtime = &self.segments[location.segment as usize];
        let slot = location.slot + 1 + number as u32;
        let copies = if MutationPoint::ChecksumLineMirrorRead.is_active() { 2 } else { 1 };
        for (copy, at) in self.shape().slot(slot).into_iter().take(copies).enumerate() {
            let mut line = [0; 64];
            if self.region().load(runtime.base + at, &mut line).is_err() {
                continue;
            }
            let line = ChecksumLine::decode(&line).verify_of(record, &runtime.place(slot), number as u8);
            if let Some(line) = line {
                if copy > 0 {
                    rare::count(&self.rare.mirror_reads);
                }
                return Ok(line);
            }
        }
        Err(Error::new(
            ErrorKind::Media,
            format!("both copies of a continuation line of a record in segment {} are damaged", runtime.id),
        ))
    }

    /// Whether the backing device holds what the record says, unless it is parked.
    pub(crate) fn is_clean(&self, record: &Record) -> bool {
        !record.kind().is_dirty() || Epoch(record.epoch.get()) <= self.drained_epoch()
    }
}
