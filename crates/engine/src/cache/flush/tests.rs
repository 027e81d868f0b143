//! What a flush stores, what FUA adds, and how the recovery point moves.

use super::*;
use crate::{
    Settings,
    base::Base,
    context::{Context, Identity},
    epochs::Epochs,
    lane::LogSegment,
    slots::TwoSlots,
    tests::{Op, Ram, Still, WALL_MS},
};
use alloc::{sync::Arc, vec, vec::Vec};
use cbd_format::{Drained, LaneMark, SegmentShape, StateShape};
use cbd_types::{BackendId, CHUNK, Region};

const LANES: u32 = 4;
const SHAPE: StateShape = StateShape { lanes: LANES };

struct Rig {
    environment: Arc<Still>,
    region: Arc<Region<Ram>>,
    cache: Arc<Cache<Still>>,
}

fn log(run: u64) -> LogSegment {
    LogSegment {
        segment: 0,
        ordinal: 1,
        first_sequence: 1,
        run,
        slots: 0,
        data_low: 0,
        first_unwritten_epoch: 0,
        last_unwritten_epoch: 0,
        last_dirty_epoch: 0,
        holds_dropped: false,
    }
}

fn map() -> LaneMap {
    LaneMap { lanes: LANES }
}

/// The epochs as a region holds them.
fn read(region: &Region<Ram>) -> Epochs<Still> {
    let marks = (0..LANES).map(|lane| TwoSlots::read(region, SHAPE.mark(LaneId(lane)), u64::from(lane)));
    Epochs::new(TwoSlots::read(region, SHAPE.drained(), 0), marks.collect(), 5)
}

fn rig() -> Rig {
    let environment = Arc::new(Still::default());
    let region = Arc::new(Ram::region(64 << 10));
    let identity = Identity {
        backend: BackendId(0),
        cache_id: 1,
        ownership: 9,
        lanes: map(),
        size_when_opened: 1 << 30,
        sector: 512,
        data_crc: true,
        state_base: 0,
    };
    let shape = SegmentShape { size: 64 << 10 };
    let context = Context::new(Arc::clone(&environment), Arc::clone(&region), shape, identity);
    let lanes = (0..LANES).map(|id| Lane::empty(LaneId(id), 16, 1)).collect();
    let base = Base::new(context, Vec::new(), 0, read(&region), Settings::default());
    Rig { environment, region, cache: Cache::new(base, lanes, Vec::new()) }
}

impl Rig {
    fn lanes(&self) -> &[Lane<Still>] {
        self.cache.lanes()
    }

    fn epochs(&self) -> &Epochs<Still> {
        self.cache.base().epochs()
    }

    /// A record of this sequence number is in lane `id`.
    fn record(&self, id: usize, sequence: u64) {
        self.lanes()[id].touch();
        self.lanes()[id].lock().set_last_sequence(sequence);
    }

    fn close(&self) -> u64 {
        self.cache.close_epoch().0
    }

    fn force(&self, ranges: &[ByteRange]) {
        self.cache.force_unit_access(ranges).expect("no store fails");
    }

    fn ops(&self) -> Vec<Op> {
        self.region.memory().take_ops()
    }

    /// Sequence number, epoch, run and owner of a lane's mark.
    fn mark(&self, lane: u32) -> Option<[u64; 4]> {
        let at = SHAPE.mark(LaneId(lane));
        let slots = TwoSlots::<LaneMark>::read(&self.region, at, u64::from(lane));
        let of = |mark: &LaneMark| [mark.lane_sequence, mark.epoch, mark.run, mark.ownership];
        slots.content().map(|mark| of(mark).map(|number| number.get()))
    }

    fn reach(&self, epoch: u64, void_until: u64) {
        self.epochs().reach(self.cache.base().context(), epoch, void_until);
    }

    /// What the region says of drained.
    fn drained(&self) -> Drained {
        *TwoSlots::<Drained>::read(&self.region, SHAPE.drained(), 0).content().expect("it was stored")
    }
}

/// The first byte of a chunk of lane `id`.
fn chunk_of(id: u32) -> u64 {
    (0..)
        .map(|chunk| chunk * CHUNK)
        .find(|at| map().lane_of(*at) == LaneId(id))
        .expect("each lane has chunks")
}

#[test]
fn a_flush_closes_the_epoch_and_marks_the_lanes_that_were_touched() {
    let rig = rig();
    assert_eq!(rig.epochs().present(), 1);
    rig.record(0, 7);
    rig.record(2, 9);
    rig.lanes()[0].lock().set_segments([], Some(log(3)));
    rig.lanes()[2].lock().set_segments([log(2)], None);
    assert_eq!((rig.close(), rig.epochs().present(), rig.epochs().covered()), (1, 2, 2));
    let slot = |lane| Op::Store(SHAPE.mark(LaneId(lane))[0], 64);
    assert_eq!(rig.ops(), [slot(0), slot(2), Op::Fence]);
    let marks = [Some([7, 2, 3, 9]), None, Some([9, 2, 2, 9]), None];
    assert_eq!([0, 1, 2, 3].map(|lane| rig.mark(lane)), marks);
    assert!(rig.lanes().iter().all(|lane| !lane.is_touched()));
    assert_eq!(rig.close(), 2);
    assert_eq!(rig.ops(), [], "nothing was touched since");
}

#[test]
fn the_run_of_a_mark_is_that_of_the_last_segment_with_records() {
    let rig = rig();
    rig.record(1, 4);
    rig.lanes()[1].lock().set_segments([log(1), log(2)], Some(log(5)));
    rig.close();
    assert_eq!(rig.mark(1), Some([4, 2, 5, 9]));
    rig.record(3, 1);
    rig.close();
    assert_eq!(rig.mark(3), Some([1, 3, 0, 9]), "no segment, no run");
}

#[test]
fn a_lane_that_was_touched_without_a_new_record_keeps_its_mark() {
    let rig = rig();
    rig.record(0, 7);
    rig.close();
    rig.ops();
    rig.record(0, 7);
    rig.close();
    assert_eq!(rig.ops(), [Op::Fence]);
    assert!(!rig.lanes()[0].is_touched());
    rig.record(0, 8);
    rig.close();
    let [first, second] = SHAPE.mark(LaneId(0));
    assert_eq!(rig.ops(), [Op::Store(second, 64), Op::Fence]);
    rig.record(0, 9);
    rig.close();
    assert_eq!(rig.ops()[0], Op::Store(first, 64));
}

#[test]
fn the_end_of_a_pass_is_known_by_the_monotonic_clock() {
    let rig = rig();
    assert_eq!(rig.epochs().pass_ended_ms(), 5);
    rig.environment.set_monotonic(77);
    rig.close();
    assert_eq!(rig.epochs().pass_ended_ms(), 77);
}

#[test]
fn fua_marks_the_lanes_of_its_ranges_by_one_fence_and_covers_no_epoch() {
    let rig = rig();
    (0..4).for_each(|id| rig.record(id, 10 + id as u64));
    let ranges = [ByteRange::at(chunk_of(1) + 512, 512), ByteRange::at(chunk_of(1), 512)];
    rig.force(&ranges);
    assert_eq!((rig.epochs().present(), rig.epochs().covered()), (2, 0));
    assert_eq!(rig.ops(), [Op::Store(SHAPE.mark(LaneId(1))[0], 64), Op::Fence]);
    assert_eq!(rig.mark(1), Some([11, 2, 0, 9]));
    assert!(rig.lanes().iter().all(Lane::is_touched), "the pass over the other lanes is still to come");
    // Four rows have a chunk of each lane.
    rig.force(&[
        ByteRange { start: chunk_of(1), end: chunk_of(1) + 512 },
        ByteRange { start: 0, end: 16 * CHUNK },
    ]);
    let stores = rig.ops().iter().filter(|op| matches!(op, Op::Store(..))).count();
    assert_eq!(stores, 3, "the lane of the first range has its mark already");
    assert_eq!([0, 2, 3].map(|lane| rig.mark(lane).map(|mark| mark[0])), [10, 12, 13].map(Some));
}

#[test]
fn a_range_that_ends_with_its_chunk_has_one_lane() {
    let rig = rig();
    let (at, lane) = (chunk_of(2), 2);
    (0..4).for_each(|id| rig.record(id, 5));
    rig.force(&[ByteRange { start: at + 512, end: at + CHUNK }]);
    assert_eq!([0, 1, 2, 3].map(|id| rig.mark(id).is_some()), [0, 1, 2, 3].map(|id| id == lane));
    rig.force(&[ByteRange { start: at + CHUNK - 512, end: at + CHUNK + 512 }]);
    let next = map().lane_of(at + CHUNK);
    assert!(rig.mark(next.0).is_some());
    assert_eq!((0..4).filter(|id| rig.mark(*id).is_some()).count(), if next.0 == lane { 1 } else { 2 });
}

#[test]
fn recovery_resumes_above_the_highest_epoch() {
    let rig = rig();
    rig.epochs().resume(41, 30, WALL_MS - 5);
    assert_eq!((rig.epochs().present(), rig.epochs().covered()), (42, 42));
    rig.reach(29, 0);
    assert_eq!(rig.epochs().dated_ms(), 0, "when it was closed is not known");
    rig.reach(30, 0);
    assert_eq!(rig.epochs().dated_ms(), WALL_MS - 5);
}

#[test]
fn the_highest_requested_epoch_counts() {
    let rig = rig();
    assert_eq!(rig.epochs().requested(), 0);
    [3, 7, 5].into_iter().for_each(|epoch| rig.epochs().request(Epoch(epoch)));
    assert_eq!(rig.epochs().requested(), 7);
}

#[test]
fn drained_is_stored_in_both_slots_and_read_back() {
    let rig = rig();
    assert_eq!((rig.epochs().drained(), rig.epochs().void_until()), (Epoch(0), 0));
    assert!(rig.epochs().is_crash_consistent());
    rig.close();
    rig.ops();
    rig.environment.set_wall(WALL_MS + 9);
    rig.reach(1, 4);
    let stores = SHAPE.drained().map(|at| Op::Store(at, 64));
    assert_eq!(rig.ops(), [stores[0], Op::Fence, stores[1], Op::Fence]);
    let stored = rig.drained();
    assert_eq!((stored.epoch.get(), stored.void_until.get(), stored.ownership.get()), (1, 4, 9));
    assert_eq!((stored.wall_ms.get(), stored.closed_ms.get()), (WALL_MS + 9, WALL_MS));
    assert!(!rig.epochs().is_crash_consistent());
    let now = rig.epochs().caught_up();
    assert_eq!((now.epoch, now.void_until, now.dated_ms), (Epoch(1), 4, WALL_MS));
    let again = read(&rig.region);
    assert_eq!((again.drained(), again.void_until(), again.dated_ms()), (Epoch(1), 4, WALL_MS));
    rig.reach(4, 0);
    assert!(rig.epochs().is_crash_consistent(), "it is reached");
}

#[test]
fn void_until_only_rises() {
    let rig = rig();
    rig.epochs().void_until_epoch(rig.cache.base().context(), 6);
    rig.epochs().void_until_epoch(rig.cache.base().context(), 3);
    assert_eq!((rig.epochs().void_until(), rig.drained().epoch.get()), (6, 0));
    rig.epochs().resume(8, 0, 0);
    rig.epochs().void_until_now(rig.cache.base().context());
    assert_eq!(rig.epochs().void_until(), 9);
}

#[test]
fn the_recovery_point_is_when_the_epoch_was_closed_and_never_falls_by_itself() {
    let rig = rig();
    for epoch in 1..=3 {
        rig.environment.set_wall(WALL_MS + 100 * epoch);
        assert_eq!(rig.close(), epoch);
    }
    rig.environment.set_wall(WALL_MS + 900);
    rig.reach(2, 0);
    assert_eq!(rig.epochs().dated_ms(), WALL_MS + 200);
    rig.reach(2, 0);
    assert_eq!(rig.epochs().dated_ms(), WALL_MS + 200);
}

#[test]
fn a_clock_that_is_set_back_behind_the_recovery_point_takes_it_back() {
    let rig = rig();
    rig.close();
    rig.reach(1, 0);
    assert_eq!(rig.epochs().dated_ms(), WALL_MS);
    rig.environment.set_wall(WALL_MS);
    rig.close();
    assert_eq!(rig.epochs().dated_ms(), WALL_MS, "the same time is not behind it");
    rig.environment.set_wall(WALL_MS - 50);
    rig.close();
    assert_eq!((rig.epochs().dated_ms(), rig.drained().closed_ms.get()), (WALL_MS - 50, WALL_MS - 50));
    rig.environment.set_wall(WALL_MS - 80);
    rig.force(&[ByteRange::at(0, 512)]);
    assert_eq!((rig.epochs().dated_ms(), rig.drained().closed_ms.get()), (WALL_MS - 80, WALL_MS - 80));
    rig.epochs().set_back(rig.cache.base().context(), WALL_MS - 90);
    assert_eq!((rig.epochs().dated_ms(), rig.drained().closed_ms.get()), (WALL_MS - 90, WALL_MS - 90));
    assert_eq!(rig.epochs().drained(), Epoch(1), "nothing else has changed");
}

#[test]
fn a_slot_of_drained_that_a_crash_left_behind_is_completed() {
    let rig = rig();
    rig.reach(3, 0);
    let _ = rig.region.store(SHAPE.drained()[0], &[0; 64]);
    rig.ops();
    let again = read(&rig.region);
    let _ = again.complete_slots(rig.cache.base().context());
    assert_eq!(rig.ops(), [Op::Store(SHAPE.drained()[0], 64)]);
}

#[test]
fn the_first_content_of_drained_is_zero_but_for_what_changes() {
    let rig = rig();
    let now = rig.epochs().caught_up();
    assert_eq!((now.epoch, now.void_until, now.dated_ms), (Epoch(0), 0, 0));
    rig.epochs().set_back(rig.cache.base().context(), 0);
    let stored = rig.drained();
    let numbers = [stored.epoch, stored.void_until, stored.wall_ms, stored.closed_ms];
    assert_eq!((numbers.map(|number| number.get()), stored.ownership.get()), ([0; 4], 9));
}

#[test]
fn what_could_not_be_stored_is_not_seen_but_an_earlier_recovery_point_is() {
    let failing = rig();
    failing.close();
    failing.region.memory().fail_stores_after(0);
    failing.reach(1, 0);
    assert_eq!((failing.epochs().drained(), failing.epochs().dated_ms()), (Epoch(0), 0));
    let rig = rig();
    rig.close();
    rig.reach(1, 0);
    rig.region.memory().fail_stores_after(0);
    rig.epochs().set_back(rig.cache.base().context(), WALL_MS - 10);
    assert_eq!((rig.epochs().drained(), rig.epochs().dated_ms()), (Epoch(1), WALL_MS - 10));
    rig.ops();
    rig.reach(2, 0);
    assert_eq!((rig.ops(), rig.epochs().drained()), (vec![], Epoch(1)), "nothing is stored any more");
}

#[test]
fn an_epoch_that_fua_closed_has_the_time_of_that() {
    let rig = rig();
    rig.environment.set_wall(WALL_MS + 100);
    rig.force(&[ByteRange::at(0, 512)]);
    rig.environment.set_wall(WALL_MS + 300);
    rig.reach(1, 0);
    assert_eq!(rig.epochs().dated_ms(), WALL_MS + 100);
}

#[test]
fn no_lane_is_marked_after_a_store_that_failed() {
    let rig = rig();
    (0..4).for_each(|id| rig.record(id, 7));
    rig.region.memory().fail_stores_after(0);
    let _ = rig.region.store(0, &[1]);
    rig.ops();
    rig.close();
    assert!(rig.cache.force_unit_access(&[ByteRange::at(0, 512)]).is_err());
    assert_eq!(rig.ops(), [Op::Fence]);
    assert!(rig.lanes().iter().all(Lane::is_touched));
}
