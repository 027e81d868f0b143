//! The lines of a log: records, checksum lines, and the data that they describe.

use super::chain::{History, location_of};
use super::{Checker, DataChecked, NOTHING_TO_DO, PrivateCache, REPAIR, SECOND_COPY, Subject};
use crate::Bytes;
use crate::finding::{Location, Repair, Severity, Structure};
use crate::report::{BackendSummary, RangeSummary};
use cbd_engine::{LogEntry, LogSegmentView};
use cbd_format::{
    CHECKSUMS_PER_LINE, ChecksumLine, Record, RecordKind, SegmentShape,
    record::{blocks_in, bytes_of},
};
use cbd_types::ByteRange;

/// A record and its location.
struct Entry<'a> {
    segment: &'a LogSegmentView,
    slot: u32,
    record: &'a Record,
}

impl Checker<'_> {
    /// Checks the lines of a segment.
    #[expect(clippy::too_many_arguments, reason = "what is known of the lane, and what is summed up")]
    pub(super) fn lines(
        &mut self,
        subject: &Subject<'_>,
        cache: &PrivateCache,
        segment: &LogSegmentView,
        history: &mut History,
        has_damage: bool,
        dirty: &mut Vec<(u64, u64)>,
        summary: &mut BackendSummary,
    ) {
        let shape = subject.layout.segment_shape();
        let mut entries = Vec::new();
        cache.log().visit(segment, &mut |slot, entry| entries.push((slot, entry)));
        let mut data_low = shape.data_top();
        for (slot, entry) in entries {
            let at = segment.base + shape.slot(slot)[0];
            let location = Location { at: Some(at), slot: Some(slot), ..location_of(subject, segment) };
            let record = match entry {
                LogEntry::Record(record) => record,
                LogEntry::Lost { end } => {
                    self.lost(Structure::Record, location, lost_slots(slot, end), has_damage);
                    history.sequence = None;
                    continue;
                }
            };
            // A record that recovery would add to record a loss is not on the medium.
            if valid_copies(&*self.bytes, cache, segment, &record, (slot, 0)) == [None; 2] {
                continue;
            }
            let location =
                Location { sequence: Some(record.sequence.get()), ..location }.of_range(record.range());
            let entry = Entry { segment, slot, record: &record };
            self.history(&entry, location, history, has_damage);
            self.copies(subject, cache, &entry, location);
            if record.kind().has_data() {
                self.bounds(&shape, &entry, location, &mut data_low);
                summary.data_bytes += record.length.get();
            }
            summary.records += 1;
            if !cache.log().is_on_backing(segment, slot, &record) {
                dirty.push((record.range().start, record.range().end));
            }
            let verify = match self.data {
                DataChecked::None => false,
                DataChecked::Dirty => !cache.log().is_on_backing(segment, slot, &record),
                DataChecked::All => true,
            };
            if verify && record.kind().has_data() {
                self.data(cache, &entry, location);
            }
            self.report.add_to_fingerprint(u64::from(cbd_format::crc32c(bytes_of(&record))));
        }
    }

    /// Checks the record's position in the history of its lane.
    fn history(&mut self, entry: &Entry<'_>, location: Location, history: &mut History, has_damage: bool) {
        let (sequence, epoch) = (entry.record.sequence.get(), entry.record.epoch.get());
        if let Some(expected) = history.sequence.filter(|expected| *expected != sequence) {
            let what = format!("the record has sequence {sequence}, but {expected} was expected");
            self.lost(Structure::Record, location, what, has_damage);
        }
        if epoch < history.epoch {
            let what = format!(
                "the record has epoch {epoch}, an earlier one had {}: they must not decrease",
                history.epoch
            );
            self.contradiction(Structure::Record, location, what);
        }
        history.sequence = Some(sequence + 1);
        history.epoch = history.epoch.max(epoch);
    }

    /// Checks both copies of the record and of each of its lines.
    fn copies(&mut self, subject: &Subject<'_>, cache: &PrivateCache, entry: &Entry<'_>, location: Location) {
        let Entry { segment, slot, record } = entry;
        let shape = subject.layout.segment_shape();
        for number in 0..record.slots() {
            let slot = slot + number;
            if slot >= shape.slots_max() {
                break;
            }
            let at = shape.slot(slot).map(|at| segment.base + at);
            self.report.counted.lines += 2;
            let good = valid_copies(&*self.bytes, cache, segment, record, (slot, number));
            let (bad, what) = match good {
                [Some(primary), Some(mirror)] if primary == mirror => continue,
                // The power failed between the two stores of a record that overwrites a dropped one.
                [Some(_), Some(_)] => (1, "the mirror of a line is valid and differs from the primary"),
                [Some(_), None] => (1, "the mirror of a line is damaged"),
                [None, Some(_)] => (0, "the primary of a line is damaged"),
                [None, None] => {
                    self.checksums_lost(cache, entry, number, location);
                    continue;
                }
            };
            let structure = if number == 0 { Structure::Record } else { Structure::ChecksumLine };
            let location = Location { at: Some(at[bad]), length: Some(64), slot: Some(slot), ..location };
            let repair = Repair::Copy {
                what: format!("line in slot {slot} of segment {}", segment.segment),
                from: at[1 - bad],
                to: at[bad],
                length: 64,
            };
            self.add(Severity::Corrected, structure, location, what, SECOND_COPY, REPAIR, Some(repair));
        }
    }

    /// Both copies of a checksum line are lost: the blocks that it covers cannot be verified.
    fn checksums_lost(&mut self, cache: &PrivateCache, entry: &Entry<'_>, number: u32, location: Location) {
        if entry.record.kind() == RecordKind::Quarantine {
            return self.add(
                Severity::Affected,
                Structure::ChecksumLine,
                Location { slot: Some(entry.slot + number), ..location }.of_range(entry.record.range()),
                "both copies of a line of a quarantine's map are damaged",
                "all of its range counts as damaged, including parts that were overwritten and reclaimed since",
                "overwrite the ranges whose reads fail",
                None,
            );
        }
        let first = 1 + (number as usize - 1) * CHECKSUMS_PER_LINE;
        let last = (first + CHECKSUMS_PER_LINE).min(blocks_in(entry.record.range())) - 1;
        let range = ByteRange {
            start: entry.record.block_range(first).start,
            end: entry.record.block_range(last).end,
        };
        let location = Location { slot: Some(entry.slot + number), ..location };
        self.unreadable(
            cache,
            entry,
            Structure::ChecksumLine,
            location,
            range,
            "both copies of a line of checksums are damaged",
        );
    }

    /// Checks the location of the data: inside the segment, below all earlier data.
    fn bounds(&mut self, shape: &SegmentShape, entry: &Entry<'_>, location: Location, data_low: &mut u64) {
        let start = u64::from(entry.record.data_offset.get());
        let end = start + SegmentShape::data_bytes(entry.record.length.get());
        let records_end = shape.records_end(entry.slot + entry.record.slots());
        if end > *data_low || start < records_end {
            self.contradiction(
                Structure::Record,
                location,
                format!(
                    "the record's data at bytes {start}..{end} of the segment overlaps other data or records; \
                     {records_end}..{data_low} was free"
                ),
            );
        }
        *data_low = start.min(*data_low);
    }

    /// Verifies the data of a record.
    fn data(&mut self, cache: &PrivateCache, entry: &Entry<'_>, location: Location) {
        if entry.record.has_checksums() {
            self.report.counted.verified_records += 1;
            self.report.counted.verified_bytes += entry.record.length.get();
        }
        for (range, error) in cache.log().damaged_blocks(entry.segment, entry.slot, entry.record) {
            let start =
                u64::from(entry.record.data_offset.get()) + (range.start - entry.record.range().start);
            let location =
                Location { at: Some(entry.segment.base + start), length: Some(range.len()), ..location };
            self.unreadable(cache, entry, Structure::Data, location, range, &error.line());
        }
    }

    /// Reports data of a record that cannot be read or verified: the consequence depends on other copies of
    /// the data.
    fn unreadable(
        &mut self,
        cache: &PrivateCache,
        entry: &Entry<'_>,
        structure: Structure,
        location: Location,
        range: ByteRange,
        what: &str,
    ) {
        let location = location.of_range(range);
        let newest = cache.log().newest_parts(entry.segment, entry.slot, range);
        let (severity, cost, advice) = match (
            cache.log().is_on_backing(entry.segment, entry.slot, entry.record),
            newest.is_empty(),
        ) {
            (true, _) => (
                Severity::Corrected,
                "nothing: the backing device has it, reads take it from there and cache it again",
                NOTHING_TO_DO,
            ),
            (false, true) => (
                Severity::Corrected,
                "nothing is lost: a later write covers it. The backing device alone is not crash-consistent from when this epoch is \
                 written until that later write is",
                NOTHING_TO_DO,
            ),
            (false, false) => (
                Severity::Affected,
                "its newest bytes are lost: reads of it fail, and it is not written to the backing device",
                "overwrite the range in full; rescue leaves it out",
            ),
        };
        if severity == Severity::Affected {
            self.lost.extend(newest.into_iter().map(|part| RangeSummary::new(part, what)));
        }
        self.add(severity, structure, location, what, cost, advice, None);
    }
}

/// The valid copies of a line of `record`: primary and mirror of its `number`-th line, which is in `slot`.
pub(crate) fn valid_copies(
    bytes: &dyn Bytes,
    cache: &PrivateCache,
    segment: &LogSegmentView,
    record: &Record,
    (slot, number): (u32, u32),
) -> [Option<[u8; 64]>; 2] {
    let shape = cache.log().shape();
    let seed = cache.log().place(segment, slot);
    shape.slot(slot).map(|at| {
        let mut line = [0; 64];
        bytes.load(segment.base + at, &mut line).ok()?;
        let is_good = match number.checked_sub(1) {
            None => Record::decode(&line)
                .verify(&seed, segment.generation, shape.size)
                .is_some_and(|read| cache.log().accepts(segment, &read)),
            Some(further) => ChecksumLine::decode(&line)
                .verify_of(record, &seed, u8::try_from(further).unwrap_or(u8::MAX))
                .is_some(),
        };
        is_good.then_some(line)
    })
}

fn lost_slots(first: u32, end: u32) -> String {
    if end - first == 1 {
        format!("both copies of slot {first} are damaged")
    } else {
        format!("both copies of slots {first} to {} are damaged", end - 1)
    }
}
