//! Replay of one lane: its records in the order of their sequence numbers.
//!
//! Sequence numbers are contiguous. A record that cannot be read is *damage* if anything later proves that it was complete: a
//! successor segment, the lane's mark, a later record. Without such proof it is a write that was never acknowledged, and is
//! dropped; only the last record can be such a write, because every record is fenced before the next one is stored.
//!
//! Damage of data that is certainly clean does not count: the backing device has the data, and reads go there.

use super::{
    LaneState, LogSegment, SLOTS_MAX_OF_RECORD, damage::marked_bad_by, overlay::Meaning, parking::Parked,
};
use crate::{
    Environment,
    base::{Base, Records},
    position::{Cursor, Location, Place},
    rare,
};
use alloc::{collections::BTreeMap, vec, vec::Vec};
use cbd_format::{Drained, LaneMark, Record, RecordKind, SegmentHeader, SegmentShape};
use cbd_types::ByteRange;
use core::ops::ControlFlow;

/// A segment of a lane's log as its header describes it.
#[derive(Clone, Debug)]
pub(crate) struct ChainSegment {
    pub segment: u32,
    pub header: SegmentHeader,
}

/// A record of which both copies are lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Lost {
    /// The sequence number; the last one if several records were lost together.
    pub sequence: u64,
    pub place: Place,
}

/// Where a lane's log begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tail {
    pub ordinal: u64,
    pub first_sequence: u64,
}

/// The last record up to which a lane is known to have been complete.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Marked {
    pub sequence: u64,
    /// The run of the segment that held the record; 0 if it is not known.
    run: u64,
}

impl Marked {
    pub(crate) fn by(mark: Option<&LaneMark>) -> Self {
        mark.map_or_else(Self::default, |mark| Self {
            sequence: mark.lane_sequence.get(),
            run: mark.run.get(),
        })
    }

    /// The sequence number up to which it proves the records of a segment. 0 for a segment of an earlier run: its records may
    /// have been dropped, and the proved record may be another one with the same sequence number.
    fn proves(&self, segment: &SegmentHeader) -> u64 {
        let is_of_run = self.run == 0 || segment.run.get() >= self.run;
        if is_of_run { self.sequence } else { 0 }
    }
}

/// The results of replay besides the lane's state.
pub(crate) struct Outcome {
    /// The highest epoch of any record, dropped ones included.
    pub epoch: u64,
    /// The first record that the backing device does not have.
    pub cursor: Cursor,
    /// Lost records, in the order of the log.
    lost: Vec<Lost>,
}

/// The epochs up to which the backing device had caught up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CaughtUp {
    /// Records of this epoch and of earlier ones are on the backing device, except those that are marked bad.
    pub drained: u64,
    /// All of this epoch and of earlier ones is on the backing device. 0 while anything may be marked bad: the backing device
    /// alone is not crash-consistent then.
    pub complete: u64,
}

impl CaughtUp {
    pub(crate) fn new(drained: Option<&Drained>) -> Self {
        drained.map_or(Self { drained: 0, complete: 0 }, |now| {
            let epoch = now.epoch.get();
            let is_whole = now.void_until.get() <= epoch;
            Self { drained: epoch, complete: if is_whole { epoch } else { 0 } }
        })
    }
}

/// The quarantines that were found on media: the ranges that they mark bad, by sequence number. A quarantine takes effect at
/// the position of the record that it marks bad, which precedes its own position.
#[derive(Clone, Default)]
struct MarkedBad {
    /// Each range with the ordinal of the last segment that holds a quarantine for it.
    ranges: BTreeMap<u64, BTreeMap<ByteRange, u64>>,
}

impl MarkedBad {
    fn contains(&self, sequence: u64, range: ByteRange) -> bool {
        self.ranges.get(&sequence).is_some_and(|ranges| ranges.contains_key(&range))
    }

    fn insert(&mut self, sequence: u64, range: ByteRange, ordinal: u64) {
        let known = self.ranges.entry(sequence).or_default().entry(range).or_default();
        *known = ordinal.max(*known);
    }

    /// The damaged ranges of the record `sequence`, each with that ordinal.
    fn of(&self, sequence: u64) -> impl Iterator<Item = (ByteRange, u64)> + '_ {
        self.ranges.get(&sequence).into_iter().flatten().map(|(range, ordinal)| (*range, *ordinal))
    }
}

struct Replay<'a> {
    outcome: Outcome,
    caught_up: CaughtUp,
    cursor_found: bool,
    /// The quarantines that were known when this pass over the records began.
    marked_bad: &'a MarkedBad,
    /// The quarantines that this pass found and that were not known when it began: sequence number and range that are marked
    /// bad, and the ordinal of the segment that holds the quarantine.
    found: Vec<(u64, ByteRange, u64)>,
}

/// The progress of the replay of one segment.
struct Position {
    /// The segment, with the records that were applied so far.
    log: LogSegment,
    /// The first sequence number of the next segment, if there is one.
    limit: Option<u64>,
    /// The last sequence number that the lane's mark proves.
    marked: u64,
    /// Slot and sequence number of the next record.
    slot: u32,
    expected: u64,
    /// Read but not applied yet: the last record is applied only if it is known not to be torn.
    last: Option<(Location, Record)>,
}

impl Position {
    /// Advances past `count` records that were read; the last one is `record` in `slot`.
    fn read(&mut self, slot: u32, record: &Record, count: usize) {
        self.last = Some((Location { segment: self.log.segment, slot }, *record));
        self.slot = slot + record.slots();
        self.expected += count as u64;
    }
}

impl LaneState {
    /// Replays the lane from its chain of segments, ordered by ordinal.
    pub(crate) fn replay<E: Environment>(
        &mut self,
        base: &Base<E>,
        chain: &[ChainSegment],
        tail: Option<Tail>,
        marked: Marked,
        caught_up: CaughtUp,
    ) -> Outcome {
        let mut marked_bad = MarkedBad::default();
        // The first pass finds all quarantines, the second pass applies them. A lane without quarantines needs one pass.
        loop {
            self.reset();
            let mut replay = Replay {
                outcome: Outcome { epoch: 0, cursor: Cursor::default(), lost: Vec::new() },
                caught_up,
                cursor_found: false,
                marked_bad: &marked_bad,
                found: Vec::new(),
            };
            self.replay_chain(base, chain, tail, marked, &mut replay);
            let Replay { outcome, found, .. } = replay;
            if found.is_empty() {
                self.lost.extend(outcome.lost.iter().copied());
                return outcome;
            }
            for (sequence, range, ordinal) in found {
                marked_bad.insert(sequence, range, ordinal);
            }
        }
    }

    // Out of line: the frame of `replay` has no room for it.
    #[inline(never)]
    fn replay_chain<E: Environment>(
        &mut self,
        base: &Base<E>,
        chain: &[ChainSegment],
        tail: Option<Tail>,
        marked: Marked,
        replay: &mut Replay<'_>,
    ) {
        let mut expected_ordinal = tail.map(|tail| tail.ordinal);
        let mut expected = tail.map(|tail| tail.first_sequence);
        if let Some(first) = chain.first() {
            // Records that were marked bad and have been reclaimed since precede all remaining records.
            let first = first.header.first_sequence.get();
            for (range, ordinal) in replay.marked_bad.ranges.range(..first).flat_map(|(_, ranges)| ranges) {
                self.overlay.insert_noted(*range, (0, 0), *ordinal);
            }
        }
        for (number, segment) in chain.iter().enumerate() {
            let header = &segment.header;
            let (ordinal, first) = (header.ordinal.get(), header.first_sequence.get());
            replay.outcome.epoch = replay.outcome.epoch.max(header.epoch.get());
            let is_next = expected_ordinal.is_none_or(|expected| expected == ordinal)
                && expected.is_none_or(|expected| expected == first);
            if !is_next {
                // A segment in between is lost, or its records are.
                let place = (expected_ordinal.unwrap_or(ordinal).min(ordinal), 0);
                let lost = Lost { sequence: first.saturating_sub(1), place };
                self.lose(base, replay, lost, Some(header.epoch.get()));
            }
            let next = chain.get(number + 1).map(|next| &next.header);
            let end = self.replay_segment(base, segment, next, marked.proves(header), replay);
            expected = Some(end);
            expected_ordinal = Some(ordinal + 1);
            self.run = self.run.max(header.run.get() + 1);
        }
        // The run that a mark names has ended, even if all its segments are lost.
        self.run = self.run.max(marked.run + 1);
        let marked = marked.sequence;
        let next = expected.unwrap_or(marked + 1);
        if marked >= next {
            // The mark proves further records: the head segment is lost.
            let place = (expected_ordinal.unwrap_or(1), 0);
            // Nothing is known about the records after the mark, so nothing is known to be clean.
            self.lose(base, replay, Lost { sequence: marked, place }, None);
        }
        self.next_sequence = next.max(marked + 1);
        self.cut = self.next_sequence - 1;
        // A power failure may have taken from the backing device what no flush has covered.
        self.distrust_write_through();
        // A lost head segment keeps its ordinal; the next segment gets a higher one.
        self.next_ordinal = expected_ordinal.unwrap_or(1).max(1) + u64::from(marked >= next);
    }

    /// Replays one segment up to the first sequence number of its successor, whose header is `next`. Returns the sequence
    /// number that follows the replayed records.
    fn replay_segment<E: Environment>(
        &mut self,
        base: &Base<E>,
        segment: &ChainSegment,
        next: Option<&SegmentHeader>,
        marked: u64,
        replay: &mut Replay<'_>,
    ) -> u64 {
        let limit = next.map(|next| next.first_sequence.get());
        let mut position = Position {
            log: unread(base, segment),
            limit,
            marked,
            slot: 0,
            expected: segment.header.first_sequence.get(),
            last: None,
        };
        let mut records = base.records_of(segment.segment, base.shape().slots_max());
        while limit.is_none_or(|limit| position.expected < limit) {
            if self.replay_page(base, &mut position, &mut records, replay)
                || self.replay_record(base, &mut position, replay)
            {
                continue;
            }
            if self.pass_damage(base, &mut position, next, replay).is_break() {
                break;
            }
        }
        self.replay_last(base, &mut position, replay);
        let Position { mut log, slot, expected, .. } = position;
        log.slots = slot;
        self.sealed.push_back(log);
        expected
    }

    /// Replays the records that follow, as long as their first copies are good and lie in one page. `false` if there is none.
    fn replay_page<E: Environment>(
        &mut self,
        base: &Base<E>,
        position: &mut Position,
        records: &mut Records,
        replay: &mut Replay<'_>,
    ) -> bool {
        let lines = self.index.lines();
        let mut read = base.good_records(records, position.slot, |record| {
            let key = base.identity().lanes.key(record.range().start);
            lines.prefetch::<E>(key..=key);
        });
        let numbers = position.expected..position.limit.unwrap_or(u64::MAX);
        let in_order =
            read.iter().zip(numbers).take_while(|((_, record), expected)| record.sequence.get() == *expected);
        let count = in_order.count();
        read.truncate(count);
        let Some((last_slot, record)) = read.pop() else { return false };
        self.apply_last(base, position, replay);
        self.apply_all(base, &mut position.log, &read, replay);
        position.read(last_slot, record, count);
        true
    }

    /// Replays the record that follows, from its second copy if the first is damaged. `false` if neither can be read.
    fn replay_record<E: Environment>(
        &mut self,
        base: &Base<E>,
        position: &mut Position,
        replay: &mut Replay<'_>,
    ) -> bool {
        let Some(record) = record_at(base, position.log.segment, position.slot) else { return false };
        if record.sequence.get() != position.expected {
            return false;
        }
        self.apply_last(base, position, replay);
        position.read(position.slot, &record, 1);
        true
    }

    /// Handles a slot that cannot be read where the next record is expected. If anything later proves that the record was
    /// complete, the record is lost, and replay continues after it. Breaks if the segment has no more records.
    fn pass_damage<E: Environment>(
        &mut self,
        base: &Base<E>,
        position: &mut Position,
        next: Option<&SegmentHeader>,
        replay: &mut Replay<'_>,
    ) -> ControlFlow<()> {
        let Position { limit, marked, slot, expected, .. } = *position;
        let segment = position.log.segment;
        let later = next_record(base, segment, slot + 1, expected, limit, marked);
        let is_marked = marked >= expected;
        if limit.is_none() && !is_marked && later.is_none() {
            return ControlFlow::Break(());
        }
        // Damage: something later proves that the record was complete.
        self.apply_last(base, position, replay);
        // The loss is at the last slot that may be lost: everything before the next record is marked bad.
        let lost_slot = later.map_or(slot, |(later_slot, _)| later_slot - 1);
        let last_lost = later.map_or_else(|| limit.unwrap_or(marked + 1), |(_, sequence)| sequence) - 1;
        let behind = match later {
            Some((slot, _)) => record_at(base, segment, slot).map(|record| record.epoch.get()),
            None => next.map(|next| next.epoch.get()),
        };
        let lost = Lost { sequence: last_lost, place: (position.log.ordinal, lost_slot) };
        self.lose(base, replay, lost, behind);
        match later {
            Some((later_slot, sequence)) => {
                position.slot = later_slot;
                position.expected = sequence;
                ControlFlow::Continue(())
            }
            None => {
                position.expected = limit.unwrap_or(marked + 1);
                position.slot = slot.saturating_add(1);
                ControlFlow::Break(())
            }
        }
    }

    /// Applies the last record of a segment if it is known not to be torn. Drops it otherwise, as if replay had never read it.
    fn replay_last<E: Environment>(
        &mut self,
        base: &Base<E>,
        position: &mut Position,
        replay: &mut Replay<'_>,
    ) {
        let Some((location, record)) = position.last.take() else { return };
        let sequence = record.sequence.get();
        let is_marked = position.marked >= sequence;
        let is_proved = position.limit.is_some() || is_marked;
        if is_proved || is_whole(base, location, &record) {
            self.apply(base, &mut position.log, location, &record, replay);
            return;
        }
        // Torn: a write that was never acknowledged.
        rare::count(&base.rare().torn_records_dropped);
        replay.outcome.epoch = replay.outcome.epoch.max(record.epoch.get());
        position.expected = sequence;
        position.slot = location.slot;
    }

    /// Handles the loss of a record and of its range: no earlier content of the lane can be trusted. `behind` is the epoch of
    /// the record or segment that follows the lost record in the lane, if there is one: the lost record and all earlier records
    /// are of that epoch or an earlier one.
    fn lose<E: Environment>(
        &mut self,
        base: &Base<E>,
        replay: &mut Replay<'_>,
        lost: Lost,
        behind: Option<u64>,
    ) {
        let complete = replay.caught_up.complete;
        if behind.is_some_and(|epoch| epoch <= complete) {
            // The backing device has the record's content, whatever it was, and all older content: reads go there. The record
            // was not a quarantine.
            self.index.clear();
            self.parked.forget(ByteRange { start: 0, end: base.size() });
            self.overlay.forget_all_zeroes();
            return;
        }
        let whole = ByteRange { start: 0, end: base.size() };
        self.overlay.insert(whole, Meaning::Damaged, lost.place);
        self.parked.forget(whole);
        // The parts of this damage that are noted already.
        for (range, ordinal) in replay.marked_bad.of(lost.sequence) {
            self.overlay.insert_noted(range, lost.place, ordinal);
        }
        replay.outcome.lost.push(lost);
    }

    /// Applies records of the segment of `log` in order. Loads the index lines of all of them first: otherwise each record
    /// would wait for its own line.
    fn apply_all<E: Environment>(
        &mut self,
        base: &Base<E>,
        log: &mut LogSegment,
        records: &[(u32, &Record)],
        replay: &mut Replay<'_>,
    ) {
        let keys = records.iter().map(|(_, record)| base.identity().lanes.key(record.range().start));
        core::hint::black_box(self.index.touch_all(keys));
        for (slot, record) in records {
            self.apply(base, log, Location { segment: log.segment, slot: *slot }, record, replay);
        }
    }

    /// Applies the record that was the last one until replay read another.
    fn apply_last<E: Environment>(
        &mut self,
        base: &Base<E>,
        position: &mut Position,
        replay: &mut Replay<'_>,
    ) {
        if let Some((location, record)) = position.last.take() {
            self.apply(base, &mut position.log, location, &record, replay);
        }
    }

    fn apply<E: Environment>(
        &mut self,
        base: &Base<E>,
        log: &mut LogSegment,
        location: Location,
        record: &Record,
        replay: &mut Replay<'_>,
    ) {
        let (range, kind) = (record.range(), record.kind());
        let (sequence, epoch) = (record.sequence.get(), record.epoch.get());
        let place = (log.ordinal, location.slot);
        replay.outcome.epoch = replay.outcome.epoch.max(epoch);
        match kind {
            RecordKind::Write | RecordKind::Fill | RecordKind::ParkedWrite | RecordKind::WriteThrough => {
                let first_sum = [record.first_sum.get()];
                let known = if record.has_checksums() { &first_sum[..] } else { &[] };
                let start = self.index.start(base.identity().lanes.key(range.start));
                let indexed = super::Indexed {
                    location,
                    data_offset: record.data_offset.get().into(),
                    class: record.class(),
                };
                self.index_range(base, (start, range), indexed, known);
                if !self.overlay.is_empty() {
                    self.overlay.heal(range);
                }
                log.data_low = log.data_low.min(u64::from(record.data_offset.get()));
            }
            RecordKind::WriteZeroes | RecordKind::Discard | RecordKind::ParkedZeroes => {
                self.overlay.insert(range, Meaning::Zeroes, place);
            }
            RecordKind::Invalidate => {
                self.replay_invalidation(base, range, (sequence, epoch), replay.cursor_found)
            }
            RecordKind::Quarantine => {
                let marked_bad = record.reference.get();
                for range in marked_bad_by(base, location, record) {
                    if !replay.marked_bad.contains(marked_bad, range) {
                        replay.found.push((marked_bad, range, log.ordinal));
                    }
                }
            }
        }
        if !self.parked.is_empty() && kind != RecordKind::Quarantine {
            self.parked.forget(range);
        }
        if kind.is_parked() {
            self.parked.insert(range, Parked { location, sequence, zeroes: kind.is_zeroes() });
        }
        for (range, ordinal) in replay.marked_bad.of(sequence) {
            self.overlay.insert_noted(range, place, ordinal);
            self.parked.forget(range);
        }
        if kind.awaits_flush() {
            log.last_dirty_epoch = log.last_dirty_epoch.max(epoch);
            if kind.is_dirty() {
                log.note_unwritten(epoch);
            }
            if kind == RecordKind::WriteThrough {
                self.bypass.note(epoch);
            }
            if epoch > replay.caught_up.drained {
                if kind.is_dirty() {
                    self.counters.dirty_records += 1;
                    if kind.has_data() {
                        self.counters.dirtied += record.length.get();
                    }
                }
                if !replay.cursor_found {
                    replay.cursor_found = true;
                    replay.outcome.cursor = Cursor { ordinal: log.ordinal, slot: location.slot };
                }
            }
        }
        if !replay.cursor_found {
            replay.outcome.cursor = Cursor { ordinal: log.ordinal, slot: location.slot + record.slots() };
        }
    }
}

/// A segment of which no record has been replayed.
fn unread<E: Environment>(base: &Base<E>, segment: &ChainSegment) -> LogSegment {
    LogSegment {
        segment: segment.segment,
        ordinal: segment.header.ordinal.get(),
        first_sequence: segment.header.first_sequence.get(),
        run: segment.header.run.get(),
        slots: 0,
        data_low: base.shape().data_top(),
        first_unwritten_epoch: 0,
        last_unwritten_epoch: 0,
        last_dirty_epoch: 0,
        holds_dropped: false,
    }
}

/// The record in a slot, if the segment has that slot and a record can be read there.
fn record_at<E: Environment>(base: &Base<E>, segment: u32, slot: u32) -> Option<Record> {
    if slot >= base.shape().slots_max() {
        return None;
    }
    base.find_record(Location { segment, slot })
}

/// The next record after a damaged one: its slot and sequence number. If anything proves that more records follow, the whole
/// segment is searched. Otherwise the search covers only one failed pair of pages and a long record on either side of it, so
/// that it finds the end of a log in bounded time.
fn next_record<E: Environment>(
    base: &Base<E>,
    segment: u32,
    from: u32,
    expected: u64,
    limit: Option<u64>,
    marked: u64,
) -> Option<(u32, u64)> {
    let is_proved = limit.is_some() || marked >= expected;
    let window = 2 * (SegmentShape::SLOTS_PER_PAGE + SLOTS_MAX_OF_RECORD);
    let end = if is_proved { base.shape().slots_max() } else { from.saturating_add(window) };
    (from..end).find_map(|slot| {
        let sequence = record_at(base, segment, slot)?.sequence.get();
        let fits = sequence > expected && limit.is_none_or(|limit| sequence < limit);
        fits.then_some((slot, sequence))
    })
}

/// Whether all data of a record matches its checksums; for a quarantine, whether its map can be read.
fn is_whole<E: Environment>(base: &Base<E>, location: Location, record: &Record) -> bool {
    if record.kind() == RecordKind::Quarantine {
        return base.load_map(location, record).is_ok();
    }
    if !record.kind().has_data() || !record.has_checksums() {
        return true;
    }
    let mut scratch = vec![0; record.length.get() as usize];
    base.load_data(location, record, record.range(), &mut scratch).is_ok()
}

#[cfg(test)]
mod tests;
