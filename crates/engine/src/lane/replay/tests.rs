//! Replay of a lane from given segments, marks and epochs: the place and the number of each loss, and where the log goes on.

use super::*;
use crate::tests::Still;
use crate::tests::rig::{Options, Rig, SECTOR};
use crate::{Cache, LogEntry, LogSegmentView, lane::overlay::Damage};
use alloc::sync::Arc;
use cbd_types::LaneId;

const LANE: LaneId = LaneId(0);
const BLOCK: u64 = 4096;
const FIRST: Option<Tail> = Some(Tail { ordinal: 1, first_sequence: 1 });
const NOTHING: CaughtUp = CaughtUp { drained: 0, complete: 0 };

/// A log, in memory that only this test changes.
struct Log {
    cache: Arc<Cache<Still>>,
    chain: Vec<ChainSegment>,
    views: Vec<LogSegmentView>,
    /// Each with its segment and slot; the sequence numbers begin with 1.
    records: Vec<(usize, u32, Record)>,
}

/// What replay makes of it.
#[derive(PartialEq, Eq, Debug)]
struct Found {
    lost: Vec<Lost>,
    epoch: u64,
    cursor: Cursor,
    /// Sequence number of the next record, ordinal of the next segment, and the run.
    next: (u64, u64, u64),
    /// Ordinal and slots of each segment.
    segments: Vec<(u64, u32)>,
    dirty_records: u64,
}

fn mark(sequence: u64, run: u64) -> Marked {
    Marked { sequence, run }
}

impl Log {
    fn of(rig: &Rig) -> Self {
        let cache = rig.recovered();
        let views = cache.log().segments(LANE);
        let segments: Vec<_> = cache.lane(LANE).lock().segments().map(|log| log.segment).collect();
        let (mut chain, mut records) = (Vec::new(), Vec::new());
        for (number, view) in views.iter().enumerate() {
            cache.log().visit(view, &mut |slot, entry| {
                let LogEntry::Record(record) = entry else { panic!("nothing is lost") };
                records.push((number, slot, record));
            });
            let mut bytes = [0; 128];
            cache.base().region().load(view.base, &mut bytes).expect("it can be read");
            let cache_id = cache.base().identity().cache_id;
            let header =
                SegmentHeader::decode(&bytes).expect("long enough").verify(view.segment, cache_id, 1);
            chain.push(ChainSegment { segment: segments[number], header: header.expect("it is good") });
        }
        Self { cache, chain, views, records }
    }

    /// Three segments of writes, each in an epoch of its own.
    fn of_writes() -> Self {
        let rig = Rig::new(Options::default());
        for number in 0..16 {
            assert!(rig.write(ByteRange::at(number * 2 * BLOCK, 2 * BLOCK), 1));
            rig.cache.flush().expect("it runs");
        }
        let log = Self::of(&rig);
        assert_eq!((log.chain.len(), log.records.len()), (3, 16));
        log
    }

    /// One segment that is full of records without data, and `more` records in the next one.
    fn of_zeroes(more: u32) -> Self {
        let rig = Rig::new(Options::default());
        let count = rig.cache.base().shape().slots_max() + more;
        for number in 0..u64::from(count) {
            assert!(rig.zero(ByteRange::at(number * SECTOR, SECTOR), false));
        }
        let log = Self::of(&rig);
        assert_eq!((log.chain.len(), log.records.len()), (1 + usize::from(more > 0), count as usize));
        log
    }

    fn replay(
        &self,
        chain: &[ChainSegment],
        tail: Option<Tail>,
        marked: Marked,
        caught_up: CaughtUp,
    ) -> Found {
        let mut state = self.cache.lane(LANE).lock();
        (state.run, state.next_sequence, state.next_ordinal) = (1, 99, 99);
        let outcome = state.replay(self.cache.base(), chain, tail, marked, caught_up);
        assert_eq!((state.cut, &state.lost), (state.next_sequence - 1, &outcome.lost));
        Found {
            epoch: outcome.epoch,
            cursor: outcome.cursor,
            next: (state.next_sequence, state.next_ordinal, state.run),
            segments: state.segments().map(|log| (log.ordinal, log.slots)).collect(),
            dirty_records: state.counters.dirty_records,
            lost: outcome.lost,
        }
    }

    /// Replay of the whole log without a mark, and without anything on the backing device.
    fn all(&self) -> Found {
        self.replay(&self.chain, FIRST, mark(0, 0), NOTHING)
    }

    /// The damage that the last replay found.
    fn damage(&self) -> Vec<(ByteRange, Damage)> {
        self.cache.lane(LANE).lock().overlay.damaged().collect()
    }

    fn whole(&self) -> ByteRange {
        ByteRange { start: 0, end: self.cache.size() }
    }

    /// Sequence numbers of the first and of the last record of a segment.
    fn sequences(&self, segment: usize) -> (u64, u64) {
        let of: Vec<_> = self.records.iter().filter(|(at, ..)| *at == segment).collect();
        (of[0].2.sequence.get(), of[of.len() - 1].2.sequence.get())
    }

    fn slot(&self, sequence: u64) -> u32 {
        self.records[sequence as usize - 1].1
    }

    /// Both copies of the lines in these slots are lost.
    fn destroy(&self, segment: usize, slots: core::ops::Range<u32>) {
        for at in slots.flat_map(|slot| self.cache.base().shape().slot(slot)) {
            let _ = self.cache.base().region().store(self.views[segment].base + at, &[0xa5; 64]);
        }
    }

    fn destroy_records(&self, sequences: core::ops::RangeInclusive<u64>) {
        for sequence in sequences {
            let (segment, slot, _) = self.records[sequence as usize - 1];
            self.destroy(segment, slot..slot + 1);
        }
    }

    /// Puts a record with another sequence number into a slot.
    fn forge(&self, segment: usize, slot: u32, sequence: u64) {
        let of_segment = self.records.iter().find(|(at, ..)| *at == segment);
        let mut record = of_segment.expect("it has a record").2;
        record.sequence = sequence.into();
        let line = record.encode(&self.cache.log().place(&self.views[segment], slot));
        for at in self.cache.base().shape().slot(slot) {
            let _ = self.cache.base().region().store(self.views[segment].base + at, &line);
        }
    }

    /// The one loss is of this last record, at this place, and the damage is there.
    fn expect_loss(&self, found: &Found, sequence: u64, place: Place) {
        assert_eq!(found.lost, [Lost { sequence, place }]);
        assert!(self.damage().iter().all(|(_, damage)| *damage == Damage { place, noted: 0 }));
        assert!(!self.damage().is_empty());
    }
}

#[test]
fn a_backing_device_has_caught_up_entirely_only_if_nothing_older_is_marked_bad() {
    let of = |epoch: u64, void: u64| {
        let mut drained = nothing_drained();
        (drained.epoch, drained.void_until) = (epoch.into(), void.into());
        let now = CaughtUp::new(Some(&drained));
        (now.drained, now.complete)
    };
    assert_eq!([of(5, 0), of(5, 4), of(5, 5), of(5, 6)], [(5, 5), (5, 5), (5, 5), (5, 0)]);
    let unknown = CaughtUp::new(None);
    assert_eq!((unknown.drained, unknown.complete), (0, 0));
}

fn nothing_drained() -> Drained {
    Drained {
        epoch: 0.into(),
        void_until: 0.into(),
        wall_ms: 0.into(),
        ownership: 1.into(),
        closed_ms: 0.into(),
        reserved: [0; 8],
    }
}

#[test]
fn a_mark_proves_records_of_its_run_and_of_later_runs() {
    let log = Log::of_writes();
    let proved = |marked: Marked, run: u64| {
        let mut header = log.chain[0].header;
        header.run = run.into();
        marked.proves(&header)
    };
    assert_eq!([0, 1, 2].map(|run| proved(mark(7, 0), run)), [7; 3]);
    assert_eq!([0, 1, 2].map(|run| proved(mark(7, 1), run)), [0, 7, 7]);
    assert_eq!([1, 2, 3].map(|run| proved(mark(7, 2), run)), [0, 7, 7]);
}

#[test]
fn a_whole_log_is_replayed_once_however_often() {
    let log = Log::of_writes();
    let epochs: Vec<u64> = log.records.iter().map(|(.., record)| record.epoch.get()).collect();
    assert!(epochs.iter().zip(1..).all(|(epoch, number)| *epoch == number));
    let slots = |segment: usize| {
        let last = log.sequences(segment).1;
        log.slot(last) + log.records[last as usize - 1].2.slots()
    };
    let expected = Found {
        lost: Vec::new(),
        epoch: 16,
        cursor: Cursor { ordinal: 1, slot: 0 },
        next: (17, 4, 2),
        segments: vec![(1, slots(0)), (2, slots(1)), (3, slots(2))],
        dirty_records: 16,
    };
    assert_eq!(log.all(), expected);
    assert_eq!(log.all(), expected, "the second replay forgets the first one");
    assert_eq!(log.replay(&log.chain, None, mark(16, 2), NOTHING).next, (17, 4, 3));
    let drained = CaughtUp { drained: 1, complete: 0 };
    let found = log.replay(&log.chain, FIRST, mark(0, 0), drained);
    assert_eq!((found.cursor, found.dirty_records), (Cursor { ordinal: 1, slot: log.slot(2) }, 15));
    // A header can have a later epoch than each record.
    let mut chain = log.chain.clone();
    chain[2].header.epoch = 1000.into();
    assert_eq!(log.replay(&chain, FIRST, mark(0, 0), NOTHING).epoch, 1000);
}

#[test]
fn an_empty_lane_begins_behind_what_its_mark_and_its_tail_say() {
    let log = Log::of_writes();
    let found = |tail, marked| log.replay(&[], tail, marked, NOTHING);
    let next = |tail, marked| {
        let found = found(tail, marked);
        assert_eq!((found.lost, found.epoch, found.cursor), (vec![], 0, Cursor::default()));
        found.next
    };
    assert_eq!(next(None, mark(0, 0)), (1, 1, 1));
    assert_eq!(next(None, mark(7, 4)), (8, 1, 5));
    assert_eq!(next(FIRST, mark(0, 0)), (1, 1, 1));
    assert_eq!(next(Some(Tail { ordinal: 6, first_sequence: 8 }), mark(7, 1)), (8, 6, 2));
    // Ordinals begin with 1.
    assert_eq!(next(Some(Tail { ordinal: 0, first_sequence: 1 }), mark(0, 0)), (1, 1, 1));
    let lost = found(FIRST, mark(7, 1));
    assert_eq!((lost.next, &lost.lost[..]), ((8, 2, 2), &[Lost { sequence: 7, place: (1, 0) }][..]));
    assert_eq!(log.damage(), [(log.whole(), Damage { place: (1, 0), noted: 0 })]);
}

#[test]
fn a_lost_segment_is_a_loss_at_its_place_of_the_records_in_front_of_the_next_one() {
    let log = Log::of_writes();
    let [zero, one, two] = [&log.chain[0], &log.chain[1], &log.chain[2]];
    let firsts = [0, 1, 2].map(|segment| log.sequences(segment).0);
    let replay = |chain: &[&ChainSegment], tail, marked| {
        let chain: Vec<_> = chain.iter().map(|segment| (*segment).clone()).collect();
        log.replay(&chain, tail, mark(marked, 0), NOTHING)
    };
    log.expect_loss(&replay(&[one, two], FIRST, 0), firsts[1] - 1, (1, 0));
    assert!(
        replay(&[one, two], None, 0).lost.is_empty(),
        "without a tail the log begins where it can be read"
    );
    assert!(replay(&[one, two], Some(Tail { ordinal: 2, first_sequence: firsts[1] }), 0).lost.is_empty());
    let as_old = Tail { ordinal: 2, first_sequence: 1 };
    log.expect_loss(&replay(&[one, two], Some(as_old), 0), firsts[1] - 1, (2, 0));
    // The segment in front of it ends early, too.
    let (sequence, end) = (firsts[2] - 1, log.all().segments[0].1);
    let lost = [Lost { sequence, place: (1, end) }, Lost { sequence, place: (2, 0) }];
    assert_eq!(replay(&[zero, two], FIRST, 0).lost, lost);
    assert!(log.damage().iter().all(|(_, damage)| damage.place == (2, 0)));
    // One of the two numbers is enough to show it.
    let (mut as_next, mut farther) = (two.clone(), two.clone());
    as_next.header.ordinal = 2.into();
    assert_eq!(replay(&[zero, &as_next], FIRST, 0).lost, lost[..1]);
    farther.header.ordinal = 7.into();
    log.expect_loss(&replay(&[zero, one, &farther], FIRST, 0), firsts[2] - 1, (3, 0));
    // The head: the mark proves more than there is.
    assert_eq!(replay(&[zero, one], FIRST, firsts[2] - 1).next, (firsts[2], 3, 2));
    for marked in [firsts[2], 16] {
        let end = log.all().segments[1].1;
        let found = replay(&[zero, one], FIRST, marked);
        log.expect_loss(&found, marked, (2, end));
        assert_eq!((found.next, found.segments[1]), ((marked + 1, 3, 2), (2, end + 1)));
        // The mark is of a later run than what is left.
        let found = log.replay(&log.chain[..2], FIRST, mark(marked, 2), NOTHING);
        log.expect_loss(&found, marked, (3, 0));
        assert_eq!((found.next, found.segments[1]), ((marked + 1, 4, 3), (2, end)));
    }
}

#[test]
fn lost_records_are_a_loss_at_the_last_slot_in_front_of_the_next_record() {
    for (segment, behind) in [(0, 0), (1, 1), (2, 0)] {
        let log = Log::of_writes();
        let first = log.sequences(segment).0 + behind;
        log.destroy_records(first..=first + 1);
        let found = log.all();
        log.expect_loss(&found, first + 1, (segment as u64 + 1, log.slot(first + 2) - 1));
        assert_eq!((found.next, found.dirty_records), ((17, 4, 2), 14));
    }
    // The last records of a segment, and of the log.
    let log = Log::of_writes();
    let last = log.sequences(1).1;
    log.destroy_records(last - 1..=last);
    let found = log.all();
    log.expect_loss(&found, last, (2, log.slot(last - 1)));
    assert_eq!((found.segments[1], found.dirty_records), ((2, log.slot(last - 1) + 1), 14));
    for (marked, next, slots) in [(14, 15, 0), (15, 16, 1), (16, 17, 1)] {
        let log = Log::of_writes();
        log.destroy_records(15..=16);
        let found = log.replay(&log.chain, FIRST, mark(marked, 0), NOTHING);
        if slots == 0 {
            assert!(found.lost.is_empty());
        } else {
            log.expect_loss(&found, marked, (3, log.slot(15)));
        }
        assert_eq!((found.next, found.segments[2]), ((next, 4, 2), (3, log.slot(15) + slots)));
    }
}

#[test]
fn records_behind_a_long_gap_are_found_where_anything_proves_them() {
    let window = 2 * (SegmentShape::SLOTS_PER_PAGE + SLOTS_MAX_OF_RECORD);
    // With a next segment, with a mark, and without either the number of slots that are searched.
    for (more, marked, gap, is_found) in [
        (3, 0, window + 30, true),
        (0, 11, window + 30, true),
        (0, 10, window + 1, false),
        (0, 10, window, true),
        (0, 0, window, true),
    ] {
        let log = Log::of_zeroes(more);
        let count = log.records.len() as u64;
        log.destroy(0, 10..10 + gap);
        let found = log.replay(&log.chain, FIRST, mark(marked, 0), NOTHING);
        if is_found {
            log.expect_loss(&found, 10 + u64::from(gap), (1, 9 + gap));
            assert_eq!((found.next.0, found.dirty_records), (count + 1, count - u64::from(gap)));
        } else {
            assert_eq!((found.lost.len(), found.next.0, found.dirty_records), (0, 11, 10));
        }
    }
    let log = Log::of_zeroes(0);
    let slots_max = log.cache.base().shape().slots_max();
    assert_eq!(
        log.all().dirty_records,
        u64::from(slots_max),
        "no record at the border of two pages is left out"
    );
    // Behind the last slot is no record, whatever stands there.
    log.destroy(0, slots_max - 5..slots_max);
    log.forge(0, slots_max, u64::from(slots_max) + 1);
    let found = log.all();
    assert_eq!((found.lost.len(), found.next.0), (0, u64::from(slots_max) - 4));
}

#[test]
fn a_record_with_another_number_than_the_next_does_not_count() {
    // Behind the last record are older ones, in the same page.
    let log = Log::of_zeroes(3);
    for sequence in [1, 450, 451] {
        log.forge(1, 3, sequence);
        let found = log.all();
        assert_eq!((found.lost.len(), found.next.0, found.segments[1]), (0, 452, (2, 3)), "{sequence}");
    }
    // Of a lost record, none but a later one that the segment can hold proves anything.
    for sequence in [1, 10, 11, 449, 450, 500] {
        let log = Log::of_zeroes(3);
        log.destroy(0, 10..448);
        log.forge(0, 100, sequence);
        let found = log.all();
        log.expect_loss(&found, 448, (1, 10));
        assert_eq!(found.segments[0], (1, 11));
    }
    // A segment whose records do not begin with the number that its header says.
    let log = Log::of_writes();
    let mut chain = log.chain.clone();
    let first = log.sequences(2).0;
    chain[2].header.first_sequence = (first + 1).into();
    let found = log.replay(&chain, FIRST, mark(0, 0), NOTHING);
    let numbers: Vec<_> = found.lost.iter().map(|lost| lost.sequence).collect();
    assert_eq!(numbers, [first, first + 1]);
}

#[test]
fn a_torn_record_ends_the_log_but_its_epoch_was_used() {
    let log = Log::of_writes();
    let (_, slot, record) = log.records[15];
    let at = log.views[2].base + u64::from(record.data_offset.get()) + BLOCK + 7;
    let _ = log.cache.base().region().store(at, &[99]);
    let found = log.all();
    assert_eq!((found.lost.len(), found.epoch, found.next), (0, 16, (16, 4, 2)));
    assert_eq!((found.segments[2], found.dirty_records), ((3, slot), 15));
    let proved = log.replay(&log.chain, FIRST, mark(16, 0), NOTHING);
    assert_eq!((proved.lost.len(), proved.next, proved.dirty_records), (0, (17, 4, 2), 16));
    assert_eq!(log.replay(&log.chain, FIRST, mark(15, 0), NOTHING), found);
}

#[test]
fn damage_of_reclaimed_records_is_older_than_all_that_is_left() {
    let rig = Rig::new(Options::default());
    (0..16).for_each(|number| assert!(rig.write(ByteRange::at(number * 2 * BLOCK, 2 * BLOCK), 1)));
    let damaged = ByteRange::at(0, BLOCK);
    let noted = rig.cache.lane(LANE).lock().quarantine(
        rig.cache.base(),
        damaged,
        1,
        (1, 0),
        crate::base::Requester::Essential,
    );
    assert!(noted);
    let log = Log::of(&rig);
    let tail = Tail { ordinal: 2, first_sequence: log.sequences(1).0 };
    let found = log.replay(&log.chain[1..], Some(tail), mark(0, 0), NOTHING);
    assert!(found.lost.is_empty());
    assert_eq!(log.damage(), [(damaged, Damage { place: (0, 0), noted: 3 })]);
    assert!(log.all().lost.is_empty());
    assert_eq!(log.damage(), [(damaged, Damage { place: (1, 0), noted: 3 })]);
}

#[test]
fn a_last_record_without_data_is_never_torn_and_a_quarantine_is_if_its_map_is() {
    let rig = Rig::new(Options::default());
    assert!(rig.zero(ByteRange { start: 0, end: rig.options.device }, false));
    assert_eq!(Log::of(&rig).all().next.0, 2);
    let parts: Vec<_> = (0..10).map(|number| ByteRange::at(2 * number * SECTOR, SECTOR)).collect();
    let mut state = rig.cache.lane(LANE).lock();
    parts.iter().for_each(|part| state.overlay.insert_noted(*part, (1, 0), 1));
    assert!(state.carry_damage(rig.cache.base(), &parts, 1));
    drop(state);
    let log = Log::of(&rig);
    assert_eq!((log.records.len(), log.records[1].2.slots(), log.all().next.0), (2, 2, 3));
    let slot = log.slot(2);
    log.destroy(0, slot + 1..slot + 2);
    let found = log.all();
    assert_eq!((found.next.0, found.segments, log.damage()), (2, vec![(1, slot)], vec![]));
    assert_eq!(log.replay(&log.chain, FIRST, mark(2, 0), NOTHING).next.0, 3);
}

#[test]
fn a_replayed_block_is_found_with_the_checksum_that_its_record_holds() {
    for data_crc in [true, false] {
        let rig = Rig::new(Options { data_crc, ..Options::default() });
        assert!(
            rig.write(ByteRange::at(BLOCK - SECTOR, 2 * BLOCK), 7)
                && rig.write(ByteRange::at(8 * BLOCK, BLOCK), 8)
        );
        let next = rig.recovered();
        for block in [1, 8] {
            let range = ByteRange::at(block * BLOCK, BLOCK);
            let (segment, _, record) = rig.newest(range.start);
            let at = segment.base + u64::from(record.data_offset.get()) + range.start - record.range().start;
            let pinned = [&rig.cache, &next].map(|cache| {
                let mut state = cache.lane(LANE).lock();
                state.pin_block(cache.base(), range).map(|found| (found.at, found.checksum))
            });
            let sum = cbd_format::crc32c(&[if block == 1 { 7 } else { 8 }; BLOCK as usize]);
            assert_eq!(pinned[0], data_crc.then_some((at, sum)));
            // A record line holds the checksum of its first block alone.
            assert_eq!(pinned[1], (data_crc && block == 8).then_some((at, sum)));
        }
    }
}
