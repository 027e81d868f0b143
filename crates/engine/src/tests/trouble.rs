//! A cache whose memory loses data and whose disk refuses requests, against an array: what reads give meanwhile, and what
//! the cache, the disk and the next process have when the trouble is over.

use super::model::marked;
use super::rig::{Options, Rig, SECTOR};
use crate::{Admission, LogEntry, OnWriteError, Settings, Step, ZeroProgress};
use alloc::{sync::Arc, vec, vec::Vec};
use cbd_format::record::blocks_in;
use cbd_types::{ByteRange, CHUNK, ErrorKind, LaneId, Result};

/// The newest content of a sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sector {
    Holds(u8),
    /// It was damaged before the disk had it.
    Lost,
}

/// Whether a request got space; it fails if there is none and the disk has refused requests for long.
fn is_done(admission: Result<Admission>) -> bool {
    match admission {
        Ok(admission) => matches!(admission, Admission::Done(_)),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Backing);
            false
        }
    }
}

struct Play {
    rig: Rig,
    model: Vec<Sector>,
    random: u64,
}

impl Play {
    fn new(options: Options, seed: u64) -> Self {
        let model = (0..options.device / SECTOR).map(|sector| Sector::Holds(sector as u8 | 128)).collect();
        Self { rig: Rig::new(options), model, random: seed }
    }

    fn next(&mut self, below: u64) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % below
    }

    /// A range of at most `sectors` in the first 2000 sectors of the device or of its second chunk.
    fn range(&mut self, sectors: u64) -> ByteRange {
        let all = self.model.len() as u64;
        let base = if all > CHUNK / SECTOR && self.next(2) == 0 { CHUNK / SECTOR } else { 0 };
        let start = base + self.next(2000);
        ByteRange { start: start * SECTOR, end: (start + 1 + self.next(sectors)).min(all) * SECTOR }
    }

    fn sectors(range: ByteRange) -> core::ops::Range<usize> {
        (range.start / SECTOR) as usize..(range.end / SECTOR) as usize
    }

    /// Writes or zeroes as far as there is space; false if there was none.
    fn change(&mut self, sectors: u64) -> bool {
        let value = self.next(127) as u8 + 1;
        if self.next(8) == 0 {
            let range = self.range(sectors * 4);
            let (discard, mut progress) = (self.next(2) == 0, ZeroProgress::default());
            while !is_done(self.rig.cache.zero(range, discard, &mut progress, &self.rig.waker)) {
                // A part of it is zeroed already, in other lanes.
                self.end_trouble();
                self.rig.step();
            }
            self.model[Self::sectors(range)].fill(Sector::Holds(0));
            return true;
        }
        let range = self.range(sectors);
        for piece in self.rig.cache.pieces(range).collect::<Vec<_>>() {
            let data = vec![value; piece.len() as usize];
            if !is_done(self.rig.cache.write(piece, &data, &self.rig.waker)) {
                return false;
            }
            self.model[Self::sectors(piece)].fill(Sector::Holds(value));
        }
        true
    }

    /// Damages blocks of records that the disk does not have, `percent` of them.
    fn damage(&mut self, percent: u64) {
        for lane in (0..self.rig.cache.lane_count()).map(LaneId) {
            for (segment, slot, record) in self.rig.records_of(lane) {
                if !record.kind().has_data() || self.rig.cache.log().is_on_backing(&segment, slot, &record) {
                    continue;
                }
                for block in (0..blocks_in(record.range())).map(|block| record.block_range(block)) {
                    if self.next(100) < percent {
                        let at = u64::from(record.data_offset.get()) + block.start - record.range().start;
                        self.rig.flip(segment.base + at);
                        for part in self.rig.cache.log().newest_parts(&segment, slot, block) {
                            self.model[Self::sectors(part)].fill(Sector::Lost);
                        }
                    }
                }
            }
        }
    }

    /// What a client reads of a sector.
    fn read(&self, sector: usize) -> Sector {
        let range = ByteRange::at(sector as u64 * SECTOR, SECTOR);
        let (mut bytes, mut misses) = (vec![0; SECTOR as usize], Vec::new());
        match self.rig.cache.read(range, &mut bytes, &mut misses) {
            Err(error) if error.kind() == ErrorKind::Media => return Sector::Lost,
            result => result.expect("only what is lost fails"),
        }
        if let Some(miss) = misses.pop() {
            bytes =
                self.rig.disk.with(|state| state.bytes[range.start as usize..range.end as usize].to_vec());
            self.rig.cache.complete_fill(miss, &bytes);
        }
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "sector {sector}");
        Sector::Holds(bytes[0])
    }

    /// The next pass marks each lane that has records behind its mark.
    fn check_touched(&self) {
        for lane in (0..self.rig.cache.lane_count()).map(LaneId) {
            let is_unmarked = self.rig.cache.log().next_sequence(lane).0 - 1 > marked(&self.rig.cache, lane);
            assert!(
                !is_unmarked || self.rig.cache.lane(lane).is_touched(),
                "records of {lane:?} get no mark"
            );
        }
    }

    fn check_reads(&mut self, count: usize) {
        self.check_touched();
        for _ in 0..count {
            let sector = self.range(1).start / SECTOR;
            assert_eq!(self.read(sector as usize), self.model[sector as usize], "sector {sector}");
        }
    }

    fn trouble(&mut self, refused: u64) {
        let unwritable = (0..refused).map(|_| self.range(3)).collect();
        let refuses_flushes = self.next(4) == 0;
        self.rig.disk.with(|state| (state.unwritable, state.refuses_flushes) = (unwritable, refuses_flushes));
    }

    /// The disk takes everything again.
    fn end_trouble(&self) {
        self.rig.disk.with(|state| (state.unwritable, state.refuses_flushes) = (Vec::new(), false));
    }

    /// Without trouble all is drained but what is lost.
    fn recover(&mut self) {
        self.end_trouble();
        self.rig.cache.request_drain();
        let mut drained = self.rig.cache.drained_epoch();
        for steps in 0.. {
            let step = self.rig.step();
            assert!(self.rig.cache.drained_epoch() >= drained && steps < 20_000);
            drained = self.rig.cache.drained_epoch();
            if step == (Step::Idle { until_ms: None }) {
                break;
            }
        }
        let lost: Vec<usize> =
            (0..self.model.len()).filter(|sector| self.model[*sector] == Sector::Lost).collect();
        let status = self.rig.cache.status();
        assert_eq!((status.dirty_bytes, status.dirty_records, status.parked.len()), (0, 0, 0));
        assert_eq!(status.quarantined_bytes, lost.len() as u64 * SECTOR);
        assert_eq!(status.backing_is_consistent, lost.is_empty(), "{:?}", status.void_reason);
        assert!(status.backing_trouble.is_none() && !status.is_stalled);
        let mut listed = vec![false; self.model.len()];
        status.damaged.iter().for_each(|damaged| listed[Self::sectors(damaged.range)].fill(true));
        let all_listed = lost.iter().all(|sector| listed[*sector]);
        assert!(
            all_listed || status.damaged.len() >= 1024,
            "what is lost is listed, up to a number of ranges"
        );
        self.rig.disk.with(|state| {
            for (sector, bytes) in state.bytes.chunks(SECTOR as usize).enumerate() {
                if let Sector::Holds(value) = self.model[sector] {
                    assert!(bytes.iter().all(|byte| *byte == value), "sector {sector} on the disk");
                }
            }
        });
        let recovered = self.rig.recovered().status();
        // It does not know what the disk has accepted of parked ranges.
        assert_eq!((recovered.dirty_bytes, recovered.dirty_records), (recovered.parked_bytes, 0));
        assert_eq!(recovered.quarantined_bytes, status.quarantined_bytes);
        assert_eq!(recovered.drained_epoch, status.drained_epoch);
    }

    /// Damages both copies of the last record of a lane: no one knows what it held, so all that is not newer is lost.
    fn lose_last_record(&mut self, lane: LaneId) {
        let cache = Arc::clone(&self.rig.cache);
        let Some(segment) = cache.log().segments(lane).pop() else { return };
        let mut last = None;
        cache.log().visit(&segment, &mut |slot, entry| last = Some((slot, entry)));
        let Some((slot, LogEntry::Record(record))) = last else { return };
        if record.kind().is_dirty() && !cache.log().is_on_backing(&segment, slot, &record) {
            cache.log().shape().slot(slot).iter().for_each(|at| self.rig.flip(segment.base + at + 20));
            for sector in 0..self.model.len() {
                if cache.base().identity().lanes.lane_of(sector as u64 * SECTOR) == lane {
                    self.model[sector] = Sector::Lost;
                }
            }
        }
    }

    /// Some records of new data are lost.
    fn round_without_records(&mut self, sectors: u64) {
        for _ in 0..100 + self.next(600) {
            if self.next(40) == 0 {
                self.rig.cache.flush().expect("it runs");
            }
            if !self.change(sectors) {
                break;
            }
            if self.next(100) == 0 {
                let lane = self.next(u64::from(self.rig.cache.lane_count())) as u32;
                self.lose_last_record(LaneId(lane));
            }
        }
        self.recover();
        self.check_reads(20);
    }

    /// New data, of which some is damaged and some is refused, while clients continue.
    fn round(&mut self, sectors: u64, percent: u64, refused: u64) {
        for _ in 0..100 + self.next(900) {
            if self.next(40) == 0 {
                self.rig.cache.flush().expect("it runs");
            }
            if !self.change(sectors) {
                break;
            }
        }
        if sectors == 1 {
            // Not even records without data find room.
            let zeroed = self.range(1);
            while self.rig.zero(zeroed, false) {
                self.model[Self::sectors(zeroed)].fill(Sector::Holds(0));
            }
        }
        self.damage(percent);
        self.trouble(refused);
        self.check_reads(20);
        self.rig.cache.request_drain();
        for _ in 0..self.next(60) {
            for _ in 0..1 + self.next(20) {
                if self.rig.step() == (Step::Idle { until_ms: None }) {
                    break;
                }
            }
            if !self.rig.cache.base().pool().has_waiters() {
                self.change(sectors);
            }
            self.check_reads(3);
        }
        self.recover();
        self.check_reads(20);
    }
}

fn parks() -> Settings {
    Settings { on_write_error: OnWriteError::Park, write_error_after_s: 0, ..Settings::default() }
}

#[test]
fn any_amount_of_damage_is_recorded_and_the_rest_is_drained() {
    for seed in 0..3 {
        let mut play = Play::new(Options::default(), seed);
        for percent in [10, 95, 100] {
            play.round(1, percent, 0);
        }
    }
}

#[test]
fn damage_and_refusals_together_lose_only_what_is_damaged() {
    for seed in 0..4 {
        let mut play = Play::new(Options { settings: parks(), ..Options::default() }, seed);
        for (sectors, percent, refused) in [(12, 20, 3), (1, 90, 5), (3, 50, 40)] {
            play.round(sectors, percent, refused);
        }
    }
}

#[test]
fn damage_in_several_lanes_is_recorded_in_each() {
    let settings = Settings { consistency: crate::Consistency::Checkpoint, gc_percent: 0, ..parks() };
    for seed in 0..3 {
        let options = Options {
            device: 2 * CHUNK,
            lanes: 2,
            segments: 19,
            settings,
            volatile_cache: false,
            ..Options::default()
        };
        let mut play = Play::new(options, seed);
        for (sectors, percent, refused) in [(1, 95, 3), (6, 40, 4), (1, 100, 0)] {
            play.round(sectors, percent, refused);
        }
    }
}

#[test]
fn a_lost_record_takes_what_is_older_in_its_lane_and_nothing_newer() {
    for (seed, lanes) in [(0, 1), (1, 1), (2, 2), (3, 2)] {
        let (device, segments) = (u64::from(lanes) * CHUNK, 1 + 9 * u64::from(lanes));
        let mut play = Play::new(Options { device, lanes, segments, ..Options::default() }, seed);
        for sectors in [1, 12, 3] {
            play.round_without_records(sectors);
        }
        play.round(4, 20, 0);
    }
}
