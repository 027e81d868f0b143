//! Reads of the log: records, continuation lines and data out of segments.
//!
//! Invariants: every result was verified, or is an error; only `complete_record` and `repair_copies` change the region.

use super::Base;
use crate::{Environment, position::Location, rare};
use alloc::{format, vec::Vec};
use cbd_format::{
    CHECKSUMS_PER_LINE, ChecksumLine, Record, RecordKind, crc32c_joined, record::INVALIDATE_MAX,
};
use cbd_types::{ByteRange, Epoch, Error, ErrorKind, InFlight, LaneId, Result, SECTOR};

/// Data of a record that does not match its checksum, or memory that failed.
#[derive(Debug)]
pub(crate) struct Damage {
    /// The checksum block that is damaged.
    pub range: ByteRange,
    pub error: Error,
}

impl<E: Environment> Base<E> {
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
                    location.slot,
                    self.segment(location.segment).id()
                ),
            )
        })
    }

    /// As [`load_record`](Self::load_record), for a slot that may hold no record.
    pub(crate) fn find_record(&self, location: Location) -> Option<Record> {
        let runtime = self.segment(location.segment);
        let place = runtime.place(location.slot);
        let generation = runtime.generation();
        for (copy, at) in self.shape().slot(location.slot).into_iter().enumerate() {
            let mut line = [0; 64];
            if self.region().load(runtime.base() + at, &mut line).is_err() {
                continue;
            }
            if let Some(record) = Record::decode(&line).verify(&place, generation, self.shape().size)
                && self.accepts(runtime.lane(), &record)
            {
                if copy > 0 {
                    rare::count(&self.rare.mirror_reads);
                }
                return Some(record);
            }
        }
        None
    }

    /// Repairs the copies of a record's lines: stores those that can be read and differ from the valid ones. In flight until the
    /// caller fences.
    pub(crate) fn complete_record(&self, location: Location, record: &Record) -> InFlight {
        let runtime = self.segment(location.segment);
        let place = |slot| runtime.place(slot);
        let mut stored =
            self.complete_slot(location.segment, location.slot, &record.encode(&place(location.slot)));
        for number in 0..u32::from(record.lines) {
            if let Ok(line) = self.load_checksums(location, record, number as usize) {
                let slot = location.slot + 1 + number;
                stored = stored.and(self.complete_slot(location.segment, slot, &line.encode(&place(slot))));
            }
        }
        stored
    }

    /// Repairs damaged copies of the lines of a record that is in use. In flight until the caller fences; `None` if no copy was damaged.
    pub(crate) fn repair_copies(&self, location: Location, record: &Record) -> Option<InFlight> {
        let runtime = self.segment(location.segment);
        // Two equal copies are good ones: the record was verified, and its lines are as their data is checked.
        let is_whole = |slot: u32| {
            let copies = self.shape().slot(slot).map(|at| {
                let mut copy = [0; 64];
                self.region().load(runtime.base() + at, &mut copy).is_ok().then_some(copy)
            });
            matches!(copies, [Some(first), Some(second)] if first == second) || copies.contains(&None)
        };
        let are_whole = (0..=u32::from(record.lines)).all(|number| is_whole(location.slot + number));
        (!are_whole).then(|| self.complete_record(location, record))
    }

    fn complete_slot(&self, segment: u32, slot: u32, line: &[u8; 64]) -> InFlight {
        let mut stored = self.region().nothing_in_flight();
        for at in self.shape().slot(slot).map(|at| self.segment(segment).base() + at) {
            let mut copy = [0; 64];
            if self.region().load(at, &mut copy).is_ok() && copy != *line {
                stored = stored.and(self.region().store_line(at, line));
            }
        }
        stored
    }

    /// Whether the record's range lies on the device and belongs to `lane`, whose log holds the record. If it has data, all of
    /// the range must lie inside one chunk of the lane; otherwise the range must contain a part of one.
    pub(crate) fn accepts(&self, lane: LaneId, record: &Record) -> bool {
        let range = record.range();
        // A sector is a power of two: the mask avoids a division for each record of a log.
        let in_sector = u64::from(self.identity().sector) - 1;
        let on_device = range.end <= self.size() && (range.start | range.end) & in_sector == 0;
        let in_unit = !record.kind().has_data()
            || (range.start / cbd_types::CHUNK == (range.end - 1) / cbd_types::CHUNK
                && range.len() <= u64::from(self.shape().atomic_unit()));
        // A forged one would keep recovery busy for as long as the device is large.
        let is_bounded = record.kind() != RecordKind::Invalidate || range.len() <= INVALIDATE_MAX;
        on_device && in_unit && is_bounded && self.is_of_lane(lane, record)
    }

    fn is_of_lane(&self, lane: LaneId, record: &Record) -> bool {
        let map = self.identity().lanes;
        let range = record.range();
        if record.kind().has_data() {
            map.lane_of(range.start) == lane
        } else {
            map.of_lane(lane, range).next().is_some()
        }
    }

    /// Copies `range` of the record at `location` into `into`, and verifies it. If only a part of a block is requested, the whole
    /// block is verified, as it was written.
    pub(crate) fn load_data(
        &self,
        location: Location,
        record: &Record,
        range: ByteRange,
        into: &mut [u8],
    ) -> core::result::Result<(), Damage> {
        let base = self.segment(location.segment).base() + u64::from(record.data_offset.get());
        let whole = record.range();
        if !record.has_checksums() {
            return self
                .region()
                .load(base + (range.start - whole.start), into)
                .map_err(|error| Damage { range, error });
        }
        let mut line = None;
        let mut rest = into;
        for block in record.block_of(range.start)..=record.block_of(range.end - 1) {
            let covered = record.block_range(block);
            let wanted = ByteRange { start: covered.start.max(range.start), end: covered.end.min(range.end) };
            let damage = |error| Damage { range: covered, error };
            let expected = self.checksum_of(location, record, block, &mut line).map_err(damage)?;
            let at = base + (covered.start - whole.start);
            let (out, others) = rest.split_at_mut(wanted.len() as usize);
            rest = others;
            if !self.load_verified(at, covered, wanted, out, expected).map_err(damage)? {
                let id = self.segment(location.segment).id();
                return Err(damage(Error::new(
                    ErrorKind::Media,
                    format!("data of {covered} in segment {id} does not match its checksum"),
                )));
            }
        }
        Ok(())
    }

    /// Verifies the blocks of `range` of the record at `location`, a block after the other through `scratch`, which is as long as a
    /// block. Without checksums only memory that fails is damage.
    pub(crate) fn check_data(
        &self,
        location: Location,
        record: &Record,
        range: ByteRange,
        scratch: &mut [u8],
    ) -> core::result::Result<(), Damage> {
        let at = self.segment(location.segment).base() + u64::from(record.data_offset.get());
        let mut line = None;
        for block in record.block_of(range.start)..=record.block_of(range.end - 1) {
            let covered = record.block_range(block);
            let damage = |error| Damage { range: covered, error };
            let into = &mut scratch[..covered.len() as usize];
            let sum = self.region().load_summed(at + (covered.start - record.range().start), into);
            let sum = sum.map_err(damage)?;
            if record.has_checksums()
                && self.checksum_of(location, record, block, &mut line).map_err(damage)? != sum
            {
                let id = self.segment(location.segment).id();
                return Err(damage(Error::new(
                    ErrorKind::Media,
                    format!("data of {covered} in segment {id} does not match its checksum"),
                )));
            }
        }
        Ok(())
    }

    /// The checksum of a block of a record. `line` is the continuation line that was read last, with its number.
    ///
    /// # Errors
    /// [`ErrorKind::Media`] if the line of the checksum is lost.
    #[inline]
    pub(crate) fn checksum_of(
        &self,
        location: Location,
        record: &Record,
        block: usize,
        line: &mut Option<(usize, ChecksumLine)>,
    ) -> Result<u32> {
        let Some(further) = block.checked_sub(1) else { return Ok(record.first_sum.get()) };
        let (number, place) = (further / CHECKSUMS_PER_LINE, further % CHECKSUMS_PER_LINE);
        if line.as_ref().is_none_or(|(known, _)| *known != number) {
            *line = Some((number, self.load_checksums(location, record, number)?));
        }
        Ok(line.as_ref().map_or(0, |(_, line)| line.checksums[place].get()))
    }

    /// Copies `wanted` of the block `covered`, whose data is stored at offset `at`, into `out`. Returns `false`, with none of the
    /// data in `out`, if the checksum of the whole block is not `expected`.
    ///
    /// # Errors
    /// [`ErrorKind::Media`] if the memory fails.
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
        let is_good = sum == expected;
        if !is_good {
            out.fill(0);
        }
        Ok(is_good)
    }

    /// Copies `wanted` of the block `covered`, whose data is stored at offset `at`, into `out`. Returns the checksum of the whole
    /// block; the rest of the block is read into a small buffer.
    ///
    /// # Errors
    /// [`ErrorKind::Media`] if the memory fails; `out` may then have a part of the data.
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

    /// The map of the sectors that a quarantine marks bad; empty if the record has no map.
    ///
    /// # Errors
    /// [`ErrorKind::Media`] if one of its lines is lost.
    pub(crate) fn load_map(&self, location: Location, record: &Record) -> Result<Vec<u32>> {
        let mut words = Vec::new();
        for number in 0..usize::from(record.lines) {
            words.extend(self.load_checksums(location, record, number)?.checksums.map(|word| word.get()));
        }
        Ok(words)
    }

    /// The `number`-th continuation line of a record: checksums, or a quarantine's map.
    fn load_checksums(&self, location: Location, record: &Record, number: usize) -> Result<ChecksumLine> {
        let runtime = self.segment(location.segment);
        let slot = location.slot + 1 + number as u32;
        for (copy, at) in self.shape().slot(slot).into_iter().enumerate() {
            let mut line = [0; 64];
            if self.region().load(runtime.base() + at, &mut line).is_err() {
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
            format!("both copies of a continuation line of a record in segment {} are damaged", runtime.id()),
        ))
    }

    /// Whether the backing device has the content of the record, unless the range is parked.
    pub(crate) fn is_clean(&self, record: &Record) -> bool {
        !record.kind().is_dirty() || Epoch(record.epoch.get()) <= self.drained_epoch()
    }
}

#[cfg(test)]
mod tests;
