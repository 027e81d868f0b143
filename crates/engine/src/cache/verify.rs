//! Verification: what the cache holds of a range is checked where it is, and compared with what the backing device has.
//!
//! The caller reads the backing device, and looks twice: [`Cache::inspect`] before it reads, and one of the other operations with what
//! was read.
//!
//! Invariants:
//! - what is said about a part was true at one moment: a part that was written, discarded or reclaimed between two looks is reported
//!   as changed, never as damaged. The sequence number of a record is its identity: a record that is clean at the first look and in the
//!   index at the second one was the newest content of its range in between, and nothing may change that on the backing device;
//! - a look counts as no read, and takes no space in the cache;
//! - only the checksum of a record, or two copies that agree, shows that data is right. Content of the backing device that fails the
//!   checksum of clean data never becomes a record, and is never returned instead of it.
//!
//! Elsewhere: requests to the backing device (`cbd-device`), reads (`read`).

use super::{Admission, Cache, Miss};
use crate::{
    Environment,
    base::{Base, Damage, Lack, Requester},
    lane::{Content, FEW_BLOCKS, LaneState, LogSegment, MANY_BLOCKS, Source},
    position::Location,
};
use alloc::{format, vec::Vec};
use cbd_format::{
    Record, crc32c, crc32c_joined,
    record::{RecordKind, blocks_in},
};
use cbd_types::{ByteRange, CHECKSUM_BLOCK, Error, ErrorKind, MutationPoint, Result, SECTOR};
use core::task::Waker;

/// What the cache holds of a part of a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Holding {
    /// Nothing: the backing device alone has it.
    Nothing,
    /// Data or zeroes that the backing device does not have yet, or refuses.
    Dirty,
    /// Data or zeroes that the backing device has, too.
    Clean,
    /// Data that the backing device has, too; the copy in the cache is damaged.
    CleanDamaged,
    /// Data that the backing device does not have, and it is damaged.
    DirtyDamaged,
    /// It was quarantined before.
    Quarantined,
    /// It changed while it was checked.
    Changed,
}

/// The record that a part comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Origin {
    source: Source,
    /// Where the record is: also that of zeroes, if it is known.
    location: Option<Location>,
    /// Its sequence number; 0 if both its copies are damaged.
    sequence: u64,
    /// A client wrote it; otherwise it was read from the backing device.
    is_written: bool,
}

/// A part of a range, as [`Cache::inspect`] has found it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// Its bytes on the device.
    pub range: ByteRange,
    /// What the cache holds of it.
    pub holding: Holding,
    /// One of the two copies of its record was damaged, and is repaired.
    pub repaired_record: bool,
    origin: Origin,
}

impl Part {
    /// The same for a part of its range.
    #[must_use]
    pub const fn narrowed(self, range: ByteRange) -> Self {
        Self { range, ..self }
    }

    /// Whether the data was written by a client, as opposed to read from the backing device.
    #[must_use]
    pub const fn is_written(&self) -> bool {
        self.origin.is_written
    }
}

/// Whether the backing device has the same content as the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Comparison {
    /// It has.
    Same,
    /// The range changed since it was inspected.
    Changed,
    /// It has other content in this range.
    Differs(ByteRange),
}

/// The result of a repair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Repair {
    /// It is done.
    Done,
    /// The range changed since it was inspected: there is nothing to repair.
    Changed,
    /// There is no space. The waker of the request is called when there may be, if it has given one.
    Full,
    /// No copy that has the checksum can be read.
    Lost,
}

impl<E: Environment> Cache<E> {
    /// Checks what the cache holds of `range`, which lies in one chunk, and adds its parts in order to `parts`. `scratch` has at least
    /// [`CHECKSUM_BLOCK`] bytes.
    ///
    /// # Errors
    /// If the cache was stopped, and [`ErrorKind::System`] if there is no memory.
    pub fn inspect(&self, range: ByteRange, scratch: &mut [u8], parts: &mut Vec<Part>) -> Result<()> {
        debug_assert!(self.base().identity().lanes.is_in_one_chunk(range), "{range} is in several chunks");
        self.base().gate().check_running()?;
        let first = parts.len();
        self.find_parts(range, parts)?;
        let mut damaged = false;
        for part in &mut parts[first..] {
            damaged |= !self.check_part(part, scratch);
        }
        for part in &parts[first..] {
            if let Source::Record(location) = part.origin.source {
                self.base().unpin(location.segment);
            }
        }
        if damaged {
            self.split_damaged(first, scratch, parts)?;
        }
        Ok(())
    }

    /// Splits the damaged parts from number `first` on into blocks, most of which are good.
    fn split_damaged(&self, first: usize, scratch: &mut [u8], parts: &mut Vec<Part>) -> Result<()> {
        let mut at = first;
        while let Some(part) = parts.get(at).copied() {
            if part.holding != Holding::CleanDamaged {
                at += 1;
                continue;
            }
            let count = blocks_in(part.range);
            if parts.try_reserve(count).is_err() {
                parts.truncate(first);
                return Err(no_memory());
            }
            parts.remove(at);
            for range in part.range.split_at_multiples(CHECKSUM_BLOCK) {
                parts.push(part.narrowed(range));
            }
            parts[at..].rotate_right(count);
            parts[at..at + count].iter_mut().for_each(|block| self.settle_damage(block, scratch));
            at += count;
        }
        Ok(())
    }

    /// Adds the parts of `range` to `parts`, with their records pinned.
    fn find_parts(&self, range: ByteRange, parts: &mut Vec<Part>) -> Result<()> {
        let (first, mut is_complete) = (parts.len(), true);
        let base = self.base();
        let state = self.lane_of(range.start).lock();
        state.look_up(base, range, &mut |range, source| {
            let mut add = |range: ByteRange, source, location| {
                match parts[first..].last_mut() {
                    Some(last)
                        if last.range.end == range.start
                            && (last.origin.source, last.origin.location) == (source, location) =>
                    {
                        last.range.end = range.end;
                        return;
                    }
                    _ => {}
                }
                if parts.try_reserve(1).is_err() {
                    is_complete = false;
                    return;
                }
                let origin = Origin { source, location, sequence: 0, is_written: true };
                parts.push(Part { range, holding: Holding::Changed, repaired_record: false, origin });
            };
            match source {
                Source::Record(location) => add(range, source, Some(location)),
                Source::Zeroes => state.zeroes_of(range, &mut |part, location| add(part, source, location)),
                Source::Damaged | Source::Backing => add(range, source, None),
            }
        });
        if !is_complete {
            parts.truncate(first);
            return Err(no_memory());
        }
        for part in &mut parts[first..] {
            part.holding = match part.origin.source {
                Source::Record(location) => {
                    base.segment(location.segment).pin();
                    Holding::Changed
                }
                Source::Zeroes => self.holding_of_zeroes(&state, part),
                Source::Damaged => Holding::Quarantined,
                Source::Backing => Holding::Nothing,
            };
        }
        Ok(())
    }

    /// Whether the backing device has the zeroes of `part`. Without their record it counts as dirty: nothing is compared then.
    fn holding_of_zeroes(&self, state: &LaneState, part: &mut Part) -> Holding {
        let base = self.base();
        let record = part.origin.location.and_then(|location| base.find_record(location));
        let Some(record) = record else { return Holding::Dirty };
        part.origin.sequence = record.sequence.get();
        let is_parked = state.parked_in(part.range).next().is_some();
        if is_parked || !base.is_clean(&record) { Holding::Dirty } else { Holding::Clean }
    }

    /// Checks the data of a part whose record is pinned, and both copies of the record. `false` if it is damaged; its holding is
    /// [`Holding::CleanDamaged`] then, until the lane has been asked.
    fn check_part(&self, part: &mut Part, scratch: &mut [u8]) -> bool {
        let Source::Record(location) = part.origin.source else { return true };
        let base = self.base();
        part.holding = Holding::CleanDamaged;
        let Some(record) = base.find_record(location) else { return false };
        if !record.range().contains(&part.range) {
            return false;
        }
        part.origin.sequence = record.sequence.get();
        part.origin.is_written = record.kind() != RecordKind::Fill;
        if base.region().check_stores(MutationPoint::RecordAfterFailure).is_ok()
            && let Some(stored) = base.repair_copies(location, &record)
        {
            base.region().fence(MutationPoint::RepairCopyFence, stored);
            part.repaired_record = true;
        }
        if base.check_data(location, &record, part.range, scratch).is_err() {
            return false;
        }
        let state = self.lane_of(part.range.start).lock();
        let is_dirty = !has_backing(base, &state, part.range, location, &record);
        part.holding = if is_dirty { Holding::Dirty } else { Holding::Clean };
        true
    }

    /// Decides what the damage of a part means. The lane is locked: no client overwrites the part meanwhile, and writeback does not mark
    /// it bad.
    fn settle_damage(&self, part: &mut Part, scratch: &mut [u8]) {
        let Source::Record(location) = part.origin.source else { return };
        let base = self.base();
        let state = self.lane_of(part.range.start).lock();
        if !self.is_same(&state, part) {
            part.holding = Holding::Changed;
            return;
        }
        let found = match base.find_record(location) {
            Some(record) if !record.range().contains(&part.range) => {
                let text = format!("the index and the log disagree about {}", part.range);
                Err((false, Error::new(ErrorKind::Damaged, text)))
            }
            Some(record) => base
                .check_data(location, &record, part.range, scratch)
                .map(|()| has_backing(base, &state, part.range, location, &record))
                .map_err(|Damage { error, .. }| {
                    (has_backing(base, &state, part.range, location, &record), error)
                }),
            None => {
                let drained = base.drained_epoch().0;
                let is_clean = |segment: &LogSegment| {
                    segment.segment == location.segment && segment.last_dirty_epoch <= drained
                };
                let is_clean = state.segments().any(is_clean) && !state.is_parked_at(part.range, location);
                let text = format!("both copies of the record of {} are damaged", part.range);
                Err((is_clean, Error::new(ErrorKind::Media, text)))
            }
        };
        part.holding = match found {
            Ok(true) => Holding::Clean,
            Ok(false) => Holding::Dirty,
            Err((true, _)) => Holding::CleanDamaged,
            Err((_, error)) => {
                drop(state);
                self.damage_log().note(part.range, location, &error);
                Holding::DirtyDamaged
            }
        };
    }

    /// Whether the newest content of the part is the one that was inspected.
    pub fn is_unchanged(&self, part: &Part) -> bool {
        self.is_same(&self.lane_of(part.range.start).lock(), part)
    }

    fn is_same(&self, state: &LaneState, part: &Part) -> bool {
        let base = self.base();
        let mut is_same = true;
        state.look_up(base, part.range, &mut |_, source| is_same &= source == part.origin.source);
        if !is_same || base.gate().check_running().is_err() {
            return false;
        }
        if part.origin.source == Source::Zeroes {
            state.zeroes_of(part.range, &mut |_, location| is_same &= location == part.origin.location);
        }
        let sequence = |location| base.find_record(location).map_or(0, |record| record.sequence.get());
        is_same && part.origin.location.is_none_or(|location| sequence(location) == part.origin.sequence)
    }

    /// Compares a clean part with `found`, which was read from the backing device after it was inspected. `scratch` is as long as the
    /// part.
    pub fn compare(&self, part: &Part, found: &[u8], scratch: &mut [u8]) -> Comparison {
        debug_assert_eq!(part.range.len(), found.len() as u64);
        let base = self.base();
        let scratch = &mut scratch[..found.len()];
        let state = self.lane_of(part.range.start).lock();
        if !self.is_same(&state, part) {
            return Comparison::Changed;
        }
        let Source::Record(location) = part.origin.source else {
            return difference(part.range, found, |_| 0);
        };
        let record = base.find_record(location);
        if !record.is_some_and(|record| has_backing(base, &state, part.range, location, &record)) {
            // A flush of the backing device has failed: what went past the cache is written again.
            return Comparison::Changed;
        }
        base.segment(location.segment).pin();
        drop(state);
        let is_loaded = self.load_again(location, part, scratch);
        base.unpin(location.segment);
        // It was good at the first look: it is looked at again.
        if is_loaded { difference(part.range, found, |at| scratch[at]) } else { Comparison::Changed }
    }

    /// Loads a part whose segment is pinned, verified.
    fn load_again(&self, location: Location, part: &Part, into: &mut [u8]) -> bool {
        let record = self.base().find_record(location);
        record.is_some_and(|record| self.base().load_data(location, &record, part.range, into).is_ok())
    }

    /// Registers a read of the backing device that is to repair a part whose copy in the cache is damaged. `None` if it has changed.
    pub fn begin_repair(&self, part: &Part) -> Option<Miss> {
        let id = self.base().identity().lanes.lane_of(part.range.start);
        let mut state = self.lane(id).lock();
        self.is_same(&state, part).then(|| Miss::new(part.range, id, state.register_fill(part.range)))
    }

    /// Repairs a part whose copy in the cache is damaged with `found`, which was read from the backing device for `miss`; `None` if the
    /// backing device cannot read it at this moment. If `found` does not have the checksum either, which `is_confirmed` by a read before,
    /// reads of the part fail from now on.
    pub fn end_repair(
        &self,
        part: &Part,
        miss: Miss,
        found: Option<&[u8]>,
        is_confirmed: bool,
        scratch: &mut [u8],
    ) -> Repair {
        let base = self.base();
        let lane = self.lane(miss.lane());
        let mut state = lane.lock();
        if !state.end_fill(miss.id()) || !self.is_same(&state, part) {
            return Repair::Changed;
        }
        let Source::Record(location) = part.origin.source else { return Repair::Changed };
        let Some(found) = found else { return Repair::Lost };
        if base.region().check_stores(MutationPoint::RecordAfterFailure).is_err() {
            return Repair::Full;
        }
        let record = base.find_record(location);
        let proof =
            record.as_ref().and_then(|record| proves(base, location, record, part.range, found, scratch));
        if proof == Some(false) {
            if !is_confirmed {
                return Repair::Changed;
            }
            lane.announce(base);
            let (sequence, place) = (part.origin.sequence, base.place_of(location));
            let is_noted = state.quarantine(base, part.range, sequence, place, Requester::Frugal);
            drop(state);
            let text = "the data is damaged in the cache and on the backing device";
            self.damage_log().note(part.range, location, &Error::new(ErrorKind::Media, text));
            return if is_noted { Repair::Lost } else { Repair::Full };
        }
        // Without a proof it is what a read of the part returns, too: the backing device has acknowledged and flushed it.
        lane.announce(base);
        let content: Content = RecordKind::Fill.into();
        let content = record.map_or(content, |record| Content { class: record.class(), ..content });
        let is_recorded = self.record_clean(&mut state, content, part.range, found, Requester::Frugal);
        drop(state);
        self.damage_log().count_healed(1);
        if is_recorded { Repair::Done } else { Repair::Full }
    }

    /// Makes a clean part dirty, as if a client had written the same bytes, so that writeback repairs the backing device. `scratch` is as
    /// long as the part.
    ///
    /// # Errors
    /// As [`write`](Self::write); [`ErrorKind::Unsupported`] in a mode in which the cache holds nothing dirty.
    pub fn write_again(&self, part: &Part, scratch: &mut [u8], waker: &Waker) -> Result<Repair> {
        let base = self.base();
        base.gate().check_writable()?;
        let lane = self.lane_of(part.range.start);
        let mut state = lane.lock();
        if !self.is_same(&state, part) {
            return Ok(Repair::Changed);
        }
        if base.mode().refuses_dirty() {
            let text = "the cache holds nothing dirty in its mode: set cache_mode=writeback to repair the backing device";
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if let Some(outcome) = Self::waits_for_bypass(&mut state, part.range, waker) {
            return outcome.map(|_| Repair::Full);
        }
        base.region().check_stores(MutationPoint::RecordAfterFailure)?;
        let stored = match part.origin.source {
            Source::Record(location) => {
                let data = &mut scratch[..part.range.len() as usize];
                let record = base.find_record(location);
                let Some(record) = record.filter(|_| self.load_again(location, part, data)) else {
                    return Ok(Repair::Changed);
                };
                lane.announce(base);
                let content = Content { class: record.class(), ..RecordKind::Write.into() };
                let requester = Requester::Client;
                if blocks_in(part.range) <= FEW_BLOCKS {
                    state.commit::<E, FEW_BLOCKS>(base, content, part.range, data, requester, Some(waker))
                } else {
                    state.commit::<E, MANY_BLOCKS>(base, content, part.range, data, requester, Some(waker))
                }
                .map(|_| ())
            }
            Source::Zeroes => {
                lane.announce(base);
                state.commit_zeroes(base, RecordKind::WriteZeroes, part.range, waker).map(|_| ())
            }
            Source::Damaged | Source::Backing => return Ok(Repair::Changed),
        };
        match stored {
            Ok(()) => base.region().check_stores(MutationPoint::WriteStoreCheck).map(|()| Repair::Done),
            Err(Lack::Space) => self.backing().check_not_stalled().map(|()| Repair::Full),
            Err(Lack::Memory) => super::write::no_memory().map(|_: Admission| Repair::Full),
            Err(Lack::Data) => super::write::other_data(),
        }
    }
}

#[cold]
fn no_memory() -> Error {
    Error::new(ErrorKind::System, "there is no memory to verify the range")
}

/// Whether the backing device has the content of `range` of the record, which the index names.
fn has_backing<E: Environment>(
    base: &Base<E>,
    state: &LaneState,
    range: ByteRange,
    location: Location,
    record: &Record,
) -> bool {
    base.is_clean(record) && !state.is_unwritten(base, record) && !state.is_parked_at(range, location)
}

/// Where `found` differs from `expected`, which returns the byte at an offset, in whole sectors.
fn difference(range: ByteRange, found: &[u8], expected: impl Fn(usize) -> u8) -> Comparison {
    let differs = |(at, byte): (usize, &u8)| *byte != expected(at);
    let Some(first) = found.iter().enumerate().position(differs) else { return Comparison::Same };
    let last = found.iter().enumerate().rposition(differs).unwrap_or(first);
    let start = range.start + first as u64 / SECTOR * SECTOR;
    let end = range.start + (last as u64 / SECTOR + 1) * SECTOR;
    Comparison::Differs(ByteRange { start, end: end.min(range.end) })
}

/// Whether `found` is the data of `range` that the checksums of its record are of. Where the range is a part of a block, the rest of
/// the block is that in the cache: if that is what is damaged, the part is right where both copies have the same bytes. `None` if
/// the record has no checksums, or they cannot be read.
fn proves<E: Environment>(
    base: &Base<E>,
    location: Location,
    record: &Record,
    range: ByteRange,
    found: &[u8],
    scratch: &mut [u8],
) -> Option<bool> {
    if !record.has_checksums() {
        return None;
    }
    let at = base.segment(location.segment).base() + u64::from(record.data_offset.get());
    let load = |part: ByteRange, into: &mut [u8]| {
        base.region().load(at + (part.start - record.range().start), into).is_ok()
    };
    let mut line = None;
    for block in record.block_of(range.start)..=record.block_of(range.end - 1) {
        let covered = record.block_range(block);
        let wanted = covered.intersection(&range)?;
        let expected = base.checksum_of(location, record, block, &mut line).ok()?;
        let found = &found[(wanted.start - range.start) as usize..][..wanted.len() as usize];
        if wanted == covered {
            if crc32c(found) != expected {
                return Some(false);
            }
            continue;
        }
        let scratch = &mut scratch[..covered.len() as usize];
        let is_readable = load(covered, scratch);
        let (from, to) = ((wanted.start - covered.start) as usize, (wanted.end - covered.start) as usize);
        if is_readable && scratch[from..to] == *found {
            continue;
        }
        if !is_readable {
            return None;
        }
        let before = crc32c(&scratch[..from]);
        let joined = crc32c_joined(before, crc32c(found), found.len() as u64);
        let whole = crc32c_joined(joined, crc32c(&scratch[to..]), (scratch.len() - to) as u64);
        if whole != expected {
            return Some(false);
        }
    }
    Some(true)
}
const _: () = assert!(CHECKSUM_BLOCK.is_multiple_of(SECTOR));
