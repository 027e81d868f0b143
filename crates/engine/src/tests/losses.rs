//! What recovery makes of a log of which something is lost: of some histories each record, header and line of data is
//! destroyed, one at a time, and all that can be read is compared with what must be readable.

use super::model::marked;
use super::rig::{Options, Rig, SECTOR, SEGMENT};
use crate::position::Cursor;
use crate::{LogEntry, LogSegmentView, Settings};
use alloc::{vec, vec::Vec};
use cbd_format::{PAGE, Record, SegmentHeader};
use cbd_types::{ByteRange, ErrorKind, LaneId, Region};

const LANE: LaneId = LaneId(0);

/// The sectors that are compared; the last ones are never written.
const SECTORS: u64 = 132;

/// First sector, number of sectors, and whether they are zeroed. Three segments hold these records.
const REQUESTS: [(u64, u64, bool); 14] = [
    (0, 32, false),
    (32, 32, false),
    (8, 8, true),
    (40, 1, false),
    (60, 16, false),
    (0, 32, false),
    (64, 32, false),
    (90, 8, false),
    (100, 20, true),
    (96, 8, false),
    (16, 32, false),
    (4, 1, false),
    (30, 10, true),
    (112, 16, false),
];

/// What happens behind a request.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    Flush,
    Drain,
}

/// What a sector reads as.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sector {
    Holds(u8),
    Damaged,
}

struct History {
    rig: Rig,
    /// Each with its segment and slot; the first has sequence number 1, and wrote bytes of that value.
    records: Vec<(usize, u32, Record)>,
    segments: Vec<(LogSegmentView, SegmentHeader)>,
    /// The last sequence number that the mark proves, and the last epoch that the disk has.
    marked: u64,
    drained: u64,
}

/// What must be known after something was lost.
struct Expected {
    /// The records up to this one, and whether they are damage.
    lost: Option<(u64, bool)>,
    /// The last record that counts.
    end: u64,
    /// Sequence number of the next record.
    next: u64,
    /// Records that cannot be read.
    unreadable: core::ops::RangeInclusive<u64>,
}

impl History {
    fn new(actions: &[(usize, Then)]) -> Self {
        let mut rig = Rig::new(Options::default());
        for (number, (first, count, is_zero)) in (1..).zip(REQUESTS) {
            let range = ByteRange::at(first * SECTOR, count * SECTOR);
            let is_done = if is_zero { rig.zero(range, false) } else { rig.write(range, number as u8) };
            assert!(is_done);
            match actions.iter().find(|(at, _)| *at == number) {
                Some((_, Then::Flush)) => rig.cache.flush().expect("it runs"),
                Some((_, Then::Drain)) => rig.drain(),
                None => {}
            }
        }
        let (mut records, mut segments) = (Vec::new(), Vec::new());
        for view in rig.cache.log().segments(LANE) {
            rig.cache.log().visit(&view, &mut |slot, entry| {
                let LogEntry::Record(record) = entry else { panic!("nothing is lost") };
                records.push((segments.len(), slot, record));
            });
            let mut bytes = [0; 128];
            rig.transport.region().load(view.base, &mut bytes).expect("it can be read");
            let cache_id = rig.cache.base().identity().cache_id;
            let header =
                SegmentHeader::decode(&bytes).expect("long enough").verify(view.segment, cache_id, 1);
            segments.push((view, header.expect("it is good")));
        }
        assert_eq!(records.iter().filter(|(segment, ..)| *segment == 2).count(), 4);
        assert_eq!((segments.len(), records.len()), (3, REQUESTS.len()));
        let (marked, drained) = (marked(&rig.cache, LANE), rig.cache.status().drained_epoch.0);
        Self { rig, records, segments, marked, drained }
    }

    /// The next process, where these bytes were overwritten.
    fn without(&self, destroyed: &[(u64, u64)]) -> Rig {
        let region = Region::new(self.rig.memory());
        for (at, length) in destroyed {
            let _ = region.store(*at, &vec![0xa5; *length as usize]);
        }
        self.rig.in_memory(region.memory().copy())
    }

    /// Both copies of a line.
    fn line(&self, segment: usize, slot: u32) -> [(u64, u64); 2] {
        let shape = self.rig.cache.base().shape();
        shape.slot(slot).map(|at| (self.segments[segment].0.base + at, 64))
    }

    /// Both copies of a header.
    fn header(&self, segment: usize) -> [(u64, u64); 2] {
        let base = self.segments[segment].0.base;
        [(base, 128), (base + SEGMENT - PAGE, 128)]
    }

    fn count(&self) -> u64 {
        self.records.len() as u64
    }

    /// Nothing is lost before `end`, which is the last record that counts.
    fn ends_with(&self, end: u64) -> Expected {
        Expected { lost: None, end, next: end + 1, unreadable: end + 1..=self.count() }
    }

    /// Record `last` and earlier ones are lost; `behind` is the epoch of what follows it.
    fn loses(&self, last: u64, behind: Option<u64>, unreadable: core::ops::RangeInclusive<u64>) -> Expected {
        let is_damage = behind.is_none_or(|epoch| epoch > self.drained);
        let end = self.count();
        Expected { lost: Some((last, is_damage)), end, next: end + 1, unreadable }
    }

    /// Both copies of a record are destroyed.
    fn without_record(&self, sequence: u64) -> Expected {
        let segment = self.records[sequence as usize - 1].0;
        let behind = match self.records.get(sequence as usize) {
            Some((next, _, record)) if *next == segment => record.epoch.get(),
            Some((next, ..)) => self.segments[*next].1.epoch.get(),
            None if self.marked >= sequence => return self.loses(sequence, None, sequence..=sequence),
            None => return self.ends_with(sequence - 1),
        };
        self.loses(sequence, Some(behind), sequence..=sequence)
    }

    /// Both copies of a header are destroyed.
    fn without_header(&self, segment: usize) -> Expected {
        let first = self.segments[segment].1.first_sequence.get();
        match self.segments.get(segment + 1) {
            Some((_, next)) => {
                let last = next.first_sequence.get() - 1;
                self.loses(last, Some(next.epoch.get()), first..=last)
            }
            None if self.marked >= first => {
                let lost = self.loses(self.marked, None, first..=self.count());
                Expected { end: self.marked, next: self.marked + 1, ..lost }
            }
            None => self.ends_with(first - 1),
        }
    }

    /// What each sector must read as.
    fn sectors(&self, expected: &Expected) -> Vec<Sector> {
        let bytes = self.rig.disk.with(|state| state.bytes.clone());
        let (lost, is_damage) = expected.lost.unwrap_or((0, false));
        let on_disk = |sector: u64| Sector::Holds(bytes[(sector * SECTOR) as usize]);
        let begin = |sector| if is_damage { Sector::Damaged } else { on_disk(sector) };
        let mut sectors: Vec<Sector> = (0..SECTORS).map(begin).collect();
        for (number, (first, count, is_zero)) in (1..).zip(REQUESTS) {
            if (lost + 1..=expected.end).contains(&number) {
                let value = Sector::Holds(if is_zero { 0 } else { number as u8 });
                sectors[first as usize..(first + count) as usize].fill(value);
            }
        }
        sectors
    }

    /// The records that recovery can read, with the position of each.
    fn readable(&self, expected: &Expected) -> Vec<(Cursor, &Record)> {
        let readable = self.records.iter().filter(|(.., record)| {
            let sequence = record.sequence.get();
            !expected.unreadable.contains(&sequence)
        });
        let cursor = |segment: usize, slot| Cursor { ordinal: self.segments[segment].1.ordinal.get(), slot };
        readable.map(|(segment, slot, record)| (cursor(*segment, *slot), record)).collect()
    }

    /// Compares what was recovered, and what the process after that recovers.
    fn check(&self, rig: &Rig, expected: &Expected) -> Rig {
        let sectors = self.sectors(expected);
        assert_eq!(read(rig), sectors);
        let (run, cut, ordinal, lost) = rig.cache.lane(LANE).lock().recovered();
        let last = self.segments.last().map_or(0, |(_, header)| header.ordinal.get());
        assert_eq!((cut, lost), (expected.next - 1, 0));
        let dirty =
            self.readable(expected).into_iter().filter(|(_, record)| record.epoch.get() > self.drained);
        let dirty: Vec<_> = dirty.collect();
        let status = rig.cache.status();
        let bytes: u64 = dirty
            .iter()
            .filter(|(_, record)| record.kind().has_data())
            .map(|(_, record)| record.range().len())
            .sum();
        assert_eq!((status.dirty_records, status.dirty_bytes), (dirty.len() as u64, bytes));
        if let Some((first, _)) = dirty.first() {
            assert_eq!(rig.cache.writeback_start(), [*first]);
        } else if let Some((at, record)) = self.readable(expected).last() {
            assert_eq!(rig.cache.writeback_start(), [Cursor { slot: at.slot + record.slots(), ..*at }]);
        }
        let is_damaged = sectors.contains(&Sector::Damaged);
        let notes = rig.cache.log().next_sequence(LANE).0 - expected.next;
        assert_eq!(notes > 0, is_damaged, "damage is noted");
        assert_eq!(status.rare.quarantine_records, notes);
        assert_eq!((status.quarantined_bytes > 0, status.backing_is_consistent), (is_damaged, !is_damaged));
        // A note takes a segment of the new run. A lost segment at the end leaves its ordinal to the next one.
        let is_head_lost = (11..=14).all(|sequence| expected.unreadable.contains(&sequence));
        let next_ordinal = last + u64::from(!is_head_lost) + u64::from(is_damaged);
        assert_eq!((run, ordinal), (2, next_ordinal));
        let again = rig.in_memory(rig.memory());
        assert_eq!(read(&again), sectors);
        assert_eq!(again.cache.log().next_sequence(LANE), rig.cache.log().next_sequence(LANE), "noted once");
        assert_eq!(again.cache.status().quarantined_bytes, status.quarantined_bytes);
        again
    }
}

/// What each sector reads as.
fn read(rig: &Rig) -> Vec<Sector> {
    let read = |sector| {
        let (mut bytes, mut misses) = ([0xee; SECTOR as usize], Vec::new());
        let range = ByteRange::at(sector * SECTOR, SECTOR);
        match rig.cache.read(range, &mut bytes, &mut misses) {
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Media);
                Sector::Damaged
            }
            Ok(()) => {
                for miss in misses.drain(..) {
                    rig.cache.cancel_fill(miss);
                    let start = range.start as usize;
                    rig.disk.with(|state| bytes.copy_from_slice(&state.bytes[start..][..SECTOR as usize]));
                }
                assert!(bytes.iter().all(|byte| *byte == bytes[0]));
                Sector::Holds(bytes[0])
            }
        }
    };
    (0..SECTORS).map(read).collect()
}

/// Histories that differ in what was marked and drained.
fn histories() -> Vec<History> {
    use Then::{Drain, Flush};
    let actions: [&[(usize, Then)]; 8] = [
        &[],
        &[(14, Flush)],
        &[(13, Flush)],
        &[(7, Flush)],
        &[(5, Drain)],
        &[(8, Drain), (14, Flush)],
        &[(12, Drain)],
        &[(14, Drain)],
    ];
    actions.into_iter().map(History::new).collect()
}

#[test]
fn nothing_is_lost_without_damage() {
    for history in histories() {
        let again = history.check(&history.without(&[]), &history.ends_with(history.count()));
        assert_eq!(read(&again), read(&history.rig));
    }
}

#[test]
fn a_lost_record_is_damage_of_all_before_it_unless_it_is_the_last_and_unproved_or_the_disk_has_it() {
    for history in histories() {
        for (sequence, (segment, slot, _)) in (1..).zip(&history.records) {
            let expected = history.without_record(sequence);
            history.check(&history.without(&history.line(*segment, *slot)), &expected);
        }
    }
}

#[test]
fn a_lost_segment_is_damage_of_all_before_it_unless_it_is_the_last_and_unproved_or_the_disk_has_it() {
    for history in histories() {
        for segment in 0..3 {
            let expected = history.without_header(segment);
            history.check(&history.without(&history.header(segment)), &expected);
        }
    }
}

#[test]
fn a_lane_of_which_all_segments_are_lost_is_damaged_if_its_mark_proves_records() {
    for history in histories() {
        let headers: Vec<_> = (0..3).flat_map(|segment| history.header(segment)).collect();
        let rig = history.without(&headers);
        let state = rig.cache.lane(LANE).lock();
        let (run, cut, ordinal, _) = state.recovered();
        let notes = state.next_sequence() - 1 - cut;
        drop(state);
        let (is_proved, sectors) = (history.marked > 0, read(&rig));
        assert_eq!((cut, notes > 0), (history.marked, is_proved));
        // Where records are proved, the run in which they were stored is over, and the next segment counts on.
        assert_eq!((run, ordinal), if is_proved { (2, 3) } else { (1, 1) });
        let is_damaged = |sector: &Sector| *sector == Sector::Damaged;
        assert!(if is_proved { sectors.iter().all(is_damaged) } else { !sectors.iter().any(is_damaged) });
        assert_eq!(read(&rig.in_memory(rig.memory())), sectors);
    }
}

#[test]
fn a_mark_of_a_later_run_does_not_prove_a_record_that_an_earlier_run_left_torn() {
    let history = History::new(&[]);
    // The last record is torn: the next run drops it, and its own first record has the same sequence number.
    let (segment, _, record) = history.records[13];
    let data = history.segments[segment].0.base + u64::from(record.data_offset.get());
    let next = history.without(&[(data, 1)]);
    assert_eq!(read(&next), history.sectors(&history.ends_with(13)));
    assert!(next.write(ByteRange::at(0, SECTOR), 99));
    next.cache.flush().expect("it runs");
    assert_eq!(marked(&next.cache, LANE), 14);
    let head = next.cache.log().segments(LANE).last().map_or(0, |segment| segment.base);
    let region = Region::new(next.memory());
    for at in [head, head + SEGMENT - PAGE] {
        let _ = region.store(at, &[0xa5; 128]);
    }
    let last = next.in_memory(region.memory().copy());
    assert_eq!(read(&last), vec![Sector::Damaged; SECTORS as usize]);
    let (run, cut, ordinal, _) = last.cache.lane(LANE).lock().recovered();
    assert_eq!((run, cut, ordinal), (3, 14, 6));
    assert_eq!(last.cache.status().rare.torn_records_dropped, 1);
}

/// The blocks of a record's data: each with the bytes of the device and its place in the region.
fn blocks_of(history: &History, segment: usize, record: &Record) -> Vec<(ByteRange, u64)> {
    let data = history.segments[segment].0.base + u64::from(record.data_offset.get());
    let blocks = record.range().split_at_multiples(4096);
    blocks.map(|block| (block, data + (block.start - record.range().start))).collect()
}

#[test]
fn a_damaged_block_is_lost_alone_unless_the_disk_has_it_and_stays_so_once_it_is_noted() {
    use Then::{Drain, Flush};
    for history in [&[][..], &[(14, Flush)], &[(8, Drain), (14, Flush)]].map(History::new) {
        for (segment, _, record) in &history.records {
            let sequence = record.sequence.get();
            let is_torn = sequence == 14 && history.marked < 14;
            if !record.kind().has_data() {
                continue;
            }
            for (block, at) in blocks_of(&history, *segment, record) {
                let mut rig = history.without(&[(at + block.len() - 1, 1)]);
                let end = if is_torn { 13 } else { 14 };
                let mut sectors = history.sectors(&history.ends_with(end));
                let is_on_disk = record.epoch.get() <= history.drained;
                let disk = rig.disk.with(|state| state.bytes.clone());
                for sector in block.start / SECTOR..block.end / SECTOR {
                    if sectors[sector as usize] == Sector::Holds(sequence as u8) {
                        let byte = disk[(sector * SECTOR) as usize];
                        sectors[sector as usize] =
                            if is_on_disk { Sector::Holds(byte) } else { Sector::Damaged };
                    }
                }
                assert_eq!(read(&rig), sectors);
                assert_eq!(rig.cache.lane(LANE).lock().recovered().1, end);
                rig.drain();
                assert_eq!(read(&rig), sectors);
                assert_eq!(read(&rig.in_memory(rig.memory())), sectors);
            }
        }
    }
}

#[test]
fn damage_outlasts_reclaim_and_ends_where_it_is_overwritten() {
    let history = History::new(&[(14, Then::Flush)]);
    let (segment, slot, _) = history.records[5];
    let mut rig = history.without(&history.line(segment, slot));
    let mut sectors = history.sectors(&history.without_record(6));
    let settings = Settings { gc_percent: 0, ..Settings::default() };
    rig.cache.set_settings(settings).expect("valid");
    for round in 0..6_u8 {
        // A part of the damage ends.
        let (first, count, is_zero) = [(0, 3, false), (56, 8, true), (127, 2, false)][usize::from(round % 3)];
        let range = ByteRange::at((first + u64::from(round / 3)) * SECTOR, count * SECTOR);
        assert!(if is_zero { rig.zero(range, true) } else { rig.write(range, 50 + round) });
        let value = Sector::Holds(if is_zero { 0 } else { 50 + round });
        sectors[(range.start / SECTOR) as usize..(range.end / SECTOR) as usize].fill(value);
        rig.drain();
        assert_eq!(read(&rig), sectors);
        let left = rig.options.device / SECTOR - SECTORS
            + sectors.iter().filter(|sector| **sector == Sector::Damaged).count() as u64;
        assert_eq!(rig.cache.status().quarantined_bytes, left * SECTOR);
        rig = rig.in_memory(rig.memory());
        assert_eq!(read(&rig), sectors);
        assert_eq!(rig.cache.status().quarantined_bytes, left * SECTOR);
    }
    assert!(rig.cache.log().segments(LANE).iter().all(|segment| segment.ordinal.0 > 3), "all are reclaimed");
    let everything = ByteRange { start: 0, end: rig.options.device };
    assert!(rig.zero(everything, false));
    assert_eq!(rig.cache.status().quarantined_bytes, 0);
    rig.drain();
    let recovered = rig.in_memory(rig.memory());
    assert_eq!(read(&recovered), vec![Sector::Holds(0); SECTORS as usize]);
    assert!(recovered.cache.status().is_all_on_backing());
}
