//! A cache against an array: what reads give, what reaches the disk, and what another process recovers.

use super::Still;
use super::rig::{Options, Rig, SECTOR};
use crate::lane::Source;
use crate::position::Cursor;
use crate::{Cache, Consistency, LogEntry, Settings, Step, TwoSlots};
use alloc::{vec, vec::Vec};
use cbd_format::{LaneMark, StateShape};
use cbd_types::{ByteRange, CHUNK, LaneId};

/// A lane's records, first of all: sequence number, epoch, whether it is dirty, where it stands, and where the next one does.
struct Seen {
    sequence: u64,
    epoch: u64,
    is_dirty: bool,
    at: Cursor,
    behind: Cursor,
}

fn records(cache: &Cache<Still>, lane: LaneId) -> Vec<Seen> {
    let mut seen = Vec::new();
    for segment in cache.log().segments(lane) {
        cache.log().visit(&segment, &mut |slot, entry| {
            let LogEntry::Record(record) = entry else { panic!("nothing is lost") };
            let cursor = |slot| Cursor { ordinal: segment.ordinal.0, slot };
            seen.push(Seen {
                sequence: record.sequence.get(),
                epoch: record.epoch.get(),
                is_dirty: record.kind().is_dirty(),
                at: cursor(slot),
                behind: cursor(slot + record.slots()),
            });
        });
    }
    seen
}

/// Where the newest bytes of the whole device are.
fn sources(cache: &Cache<Still>) -> Vec<(ByteRange, Source)> {
    let mut found = Vec::new();
    for chunk in (ByteRange { start: 0, end: cache.size() }).split_at_multiples(CHUNK) {
        let state = cache.lane_of(chunk.start).lock();
        state.look_up(cache.base(), chunk, &mut |piece, source| found.push((piece, source)));
    }
    found
}

/// The sequence number of a lane's mark.
pub(super) fn marked(cache: &Cache<Still>, lane: LaneId) -> u64 {
    let shape = StateShape { lanes: cache.lane_count() };
    let at = shape.mark(lane).map(|at| cache.base().identity().state_base + at);
    let slots = TwoSlots::<LaneMark>::read(cache.base().region(), at, u64::from(lane.0));
    slots.content().map_or(0, |mark| mark.lane_sequence.get())
}

/// What recovery has made of the memory is what this process knows of it.
fn compare(cache: &Cache<Still>, recovered: &Cache<Still>) {
    assert_eq!(sources(cache), sources(recovered));
    let (now, then) = (cache.status(), recovered.status());
    assert_eq!(
        (now.records, now.free_segments, now.index_blocks, now.dirty_bytes, now.dirty_records),
        (then.records, then.free_segments, then.index_blocks, then.dirty_bytes, then.dirty_records)
    );
    assert_eq!((now.drained_epoch, now.drained_wall_ms), (then.drained_epoch, then.drained_wall_ms));
    assert_eq!((now.void_reason, now.parked), (then.void_reason, then.parked));
    let mut highest = now.drained_epoch.0;
    for id in (0..cache.lane_count()).map(LaneId) {
        let (a, b) = (cache.lane(id).lock(), recovered.lane(id).lock());
        assert_eq!(a.blocks(), b.blocks());
        let last = a.segments().last().copied();
        let ((_, _, ordinal, _), (run, cut, recovered_ordinal, lost)) = (a.recovered(), b.recovered());
        assert_eq!((a.next_sequence(), ordinal), (b.next_sequence(), recovered_ordinal));
        assert_eq!((cut, lost), (b.next_sequence() - 1, 0));
        assert!(run > last.map_or(0, |last| last.run));
        let segments = |state: &crate::lane::LaneState| -> Vec<_> {
            state
                .segments()
                .map(|log| (log.segment, log.ordinal, log.first_sequence, log.run, log.slots))
                .collect()
        };
        assert_eq!(segments(&a), segments(&b));
        let ends = |state: &crate::lane::LaneState| -> Vec<_> {
            state.segments().map(|log| (log.data_low, log.last_dirty_epoch)).collect()
        };
        assert_eq!(ends(&a), ends(&b));
        drop((a, b));
        let seen = records(cache, id);
        assert!(seen.iter().zip(seen.iter().skip(1)).all(|(a, b)| a.sequence + 1 == b.sequence));
        highest = seen.iter().map(|record| record.epoch).max().unwrap_or(0).max(highest);
        let dirty = seen.iter().find(|record| record.is_dirty && record.epoch > now.drained_epoch.0);
        let start = recovered.writeback_start()[id.index()];
        match (dirty, seen.last()) {
            (Some(first), _) => assert_eq!(start, first.at, "writeback begins with the first dirty record"),
            (None, Some(last)) => assert_eq!(start, last.behind),
            (None, None) => assert_eq!(start, Cursor::default()),
        }
        let is_unmarked = recovered.log().next_sequence(id).0 - 1 > marked(cache, id);
        assert_eq!(recovered.lane(id).is_touched(), is_unmarked, "what is not marked is to be");
    }
    assert!(
        recovered.base().epochs().present() > highest
            && recovered.base().epochs().present() <= now.epoch.0 + 1
    );
    assert_eq!(recovered.base().epochs().covered(), recovered.base().epochs().present());
}

struct Play {
    rig: Rig,
    /// Each sector's byte; `None` is what the disk had at first.
    model: Vec<Option<u8>>,
    random: u64,
    written: u64,
    read: u64,
}

impl Play {
    fn new(options: Options, seed: u64) -> Self {
        let model = vec![None; (options.device / SECTOR) as usize];
        Self { rig: Rig::new(options), model, random: seed, written: 0, read: 0 }
    }

    fn next(&mut self, below: u64) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % below
    }

    /// A range of at most `sectors`; half of them begin in a small part of the device, and meet.
    fn range(&mut self, sectors: u64) -> ByteRange {
        let all = self.model.len() as u64;
        let near = if self.next(2) == 0 { 256.min(all) } else { all };
        // Around the border of the first two chunks, too.
        let base = if self.next(4) == 0 && all > 8192 + 64 { 8192 - 64 } else { 0 };
        let start = if base > 0 { base + self.next(128) } else { self.next(near) };
        let (length, aligned) = (1 + self.next(sectors), self.next(2) == 0);
        let (start, length) =
            if aligned { (start / 8 * 8, length.next_multiple_of(8)) } else { (start, length) };
        ByteRange { start: start * SECTOR, end: (start + length).min(all) * SECTOR }
    }

    fn sectors(range: ByteRange) -> core::ops::Range<usize> {
        (range.start / SECTOR) as usize..(range.end / SECTOR) as usize
    }

    fn expected(&self, sector: usize) -> u8 {
        self.model[sector].unwrap_or(sector as u8 | 128)
    }

    fn make_room(&mut self) {
        for _ in 0..1000 {
            if !self.rig.cache.base().pool().has_waiters() {
                return;
            }
            self.rig.step();
        }
        panic!("there is never room");
    }

    fn write(&mut self) {
        let range = self.range(40);
        let value = self.next(127) as u8;
        for piece in self.rig.cache.pieces(range).collect::<Vec<_>>() {
            while !self.rig.write(piece, value) {
                self.make_room();
            }
            self.written += piece.len();
        }
        self.model[Self::sectors(range)].fill(Some(value));
    }

    fn zero(&mut self) {
        let sectors = if self.next(8) == 0 { 4000 } else { 100 };
        let range = self.range(sectors);
        let discard = self.next(2) == 0;
        while !self.rig.zero(range, discard) {
            self.make_room();
        }
        self.model[Self::sectors(range)].fill(Some(0));
    }

    fn read(&mut self) {
        let range = self.range(50);
        for piece in self.rig.cache.pieces(range).collect::<Vec<_>>() {
            let bytes = self.rig.read(piece);
            for (number, sector) in Self::sectors(piece).enumerate() {
                let at = number * SECTOR as usize;
                let expected = [self.expected(sector); SECTOR as usize];
                assert!(bytes[at..at + SECTOR as usize] == expected, "sector {sector}");
            }
            self.read += piece.len();
        }
    }

    fn check_disk(&mut self) {
        self.rig.drain();
        let status = self.rig.cache.status();
        assert_eq!((status.dirty_bytes, status.dirty_records, status.void_reason), (0, 0, None));
        let bytes = self.rig.disk.with(|state| state.bytes.clone());
        for (sector, bytes) in bytes.chunks(SECTOR as usize).enumerate() {
            assert!(bytes == [self.expected(sector); SECTOR as usize], "sector {sector} of the disk");
        }
    }

    fn check_counters(&self) {
        let status = self.rig.cache.status();
        assert_eq!(status.written_bytes, self.written);
        assert_eq!(status.read_hit_bytes + status.read_missed_bytes, self.read);
        assert!(status.filled_bytes <= status.read_missed_bytes);
        assert!(!status.writers_waiting && status.damaged.is_empty() && status.damage_found == 0);
    }

    /// The background worker does what it can do without waiting.
    fn rest(&mut self) {
        while matches!(self.rig.worker.step(), Step::Busy | Step::WaitBacking) {}
    }

    fn turn(&mut self) {
        match self.next(100) {
            0..45 => self.write(),
            45..53 => self.zero(),
            53..78 => self.read(),
            78..84 => self.rig.cache.flush().expect("it runs"),
            84..86 => {
                let range = self.range(20);
                self.rig.cache.force_unit_access(&[range]).expect("it runs");
            }
            86..94 => {
                self.rig.step();
            }
            94..97 => {
                self.rest();
                let recovered = self.rig.recovered();
                compare(&self.rig.cache, &recovered);
            }
            97 => self.check_disk(),
            98 => self.check_counters(),
            _ => {
                self.rest();
                self.rig.cache.stop();
                let options = self.rig.options;
                let rig =
                    core::mem::replace(&mut self.rig, Rig::new(Options { segments: 9, lanes: 1, ..options }));
                self.rig = rig.reopened();
                (self.written, self.read) = (0, 0);
            }
        }
    }
}

fn play(options: Options, seeds: core::ops::Range<u64>, turns: usize) {
    for seed in seeds {
        let mut play = Play::new(options, seed);
        (0..turns).for_each(|_| play.turn());
        play.check_counters();
        play.check_disk();
        compare(&play.rig.cache, &play.rig.recovered());
    }
}

fn in_order(consistency: Consistency) -> Settings {
    Settings { consistency, ..Settings::default() }
}

#[test]
fn a_cache_of_one_lane_agrees_with_an_array() {
    play(Options::default(), 1..4, 300);
}

#[test]
fn a_cache_of_two_lanes_agrees_with_an_array() {
    let settings = in_order(Consistency::Checkpoint);
    let options =
        Options { device: 2 * CHUNK + 300 * SECTOR, lanes: 2, segments: 19, settings, ..Options::default() };
    play(options, 11..14, 300);
}

#[test]
fn a_cache_without_checksums_agrees_with_an_array() {
    let settings = in_order(Consistency::None);
    let options = Options { data_crc: false, discard_zeroes: false, settings, ..Options::default() };
    play(options, 21..23, 300);
}

#[test]
fn a_cache_that_reclaims_all_it_can_agrees_with_an_array() {
    let settings = Settings { gc_percent: 0, ..Settings::default() };
    play(Options { segments: 12, volatile_cache: false, settings, ..Options::default() }, 31..33, 300);
}
