//! What writeback does when there is no room for what it must record.

use super::*;
use crate::BackgroundWorker;
use cbd_format::RecordKind;

/// The kinds of the records of the first lane that are none of clients.
fn notes(rig: &Rig) -> Vec<RecordKind> {
    let kinds = rig.records_of(LaneId(0)).into_iter().map(|(.., record)| record.kind());
    kinds.filter(|kind| !kind.is_dirty()).collect()
}

#[test]
fn without_room_to_park_writeback_waits_and_parks_when_there_is_room() {
    let mut rig = Rig::new(Options { settings: parks(0), ..Options::default() });
    refuse(&rig, &[sector(0), sector(1)]);
    rig.fill_up();
    let taken = rig.take_reserve();
    rig.cache.request_drain();
    assert_eq!(rig.run(), Some(250), "it is tried again, segment by segment");
    rig.environment.set_monotonic(250);
    let due = rig.run();
    let status = rig.cache.status();
    assert_eq!((status.parked_total, status.drained_epoch.0), (0, 0));
    assert!(status.backing_trouble.is_some_and(|trouble| trouble.error.contains("free to park")));
    assert_eq!(due, Some(750));
    rig.environment.set_monotonic(749);
    rig.run();
    assert_eq!(rig.cache.status().parked_total, 0);
    rig.give_space(taken);
    rig.settle_until(2000);
    let status = rig.cache.status();
    assert_eq!(
        (status.parked, status.dirty_bytes),
        (vec![ByteRange { start: 0, end: 2 * SECTOR }], 2 * SECTOR)
    );
    assert!(status.backing_trouble.is_none());
}

#[test]
fn without_room_to_record_damage_writeback_waits_and_declares_nothing_clean() {
    let mut rig = Rig::new(Options::default());
    let count = rig.fill_up();
    rig.damage_sectors(|_| true);
    let taken = rig.take_reserve();
    rig.cache.request_drain();
    for (now, due, failures) in [(0, 250, 1), (250, 750, 2), (750, 1750, 3)] {
        rig.environment.set_monotonic(now);
        rig.run();
        rig.environment.set_monotonic(due - 1);
        assert_eq!(rig.run(), Some(due));
        let status = rig.cache.status();
        assert_eq!((status.backing_failures, status.drained_epoch.0), (failures, 0));
        assert_eq!(status.dirty_bytes, count * SECTOR);
        assert!(status.backing_trouble.is_some_and(|trouble| trouble.error.contains("note damaged data")));
    }
    assert_eq!(notes(&rig), []);
    rig.give_space(taken);
    rig.settle();
    let status = rig.cache.status();
    assert_eq!((status.quarantined_bytes, status.dirty_bytes), (count * SECTOR, 0));
    assert!(status.backing_trouble.is_none());
}

#[test]
fn the_first_failure_to_record_damage_leaves_the_reserve_alone() {
    let mut rig = Rig::new(Options::default());
    rig.fill_up();
    let reserve = rig.cache.status().free_segments;
    rig.damage_sectors(|number| number == 3);
    rig.cache.request_drain();
    rig.worker.step();
    while rig.worker.writeback.by_segment.is_none() {
        assert_eq!((rig.cache.status().free_segments, notes(&rig)), (reserve, vec![]));
        rig.worker.step();
    }
    assert_eq!(rig.cache.status().backing_failures, 0, "it goes on segment by segment");
    rig.settle();
    assert_eq!((rig.cache.quarantined_bytes(), rig.cache.dirty_bytes()), (SECTOR, 0));
}

#[test]
fn what_is_parked_leaves_the_reserve_until_a_batch_goes_segment_by_segment() {
    let mut rig = Rig::new(Options { settings: parks(0), ..Options::default() });
    refuse(&rig, &[sector(3)]);
    rig.fill_up();
    let reserve = rig.cache.status().free_segments;
    rig.cache.request_drain();
    for now in [0, 250, 750, 1750] {
        rig.environment.set_monotonic(now);
        while rig.worker.writeback.by_segment.is_none() && !matches!(rig.worker.step(), Step::Idle { .. }) {}
        let status = rig.cache.status();
        assert_eq!((status.free_segments, status.parked_bytes, status.drained_epoch.0), (reserve, 0, 0));
    }
    assert!(rig.worker.writeback.by_segment.is_some());
    rig.settle_until(9000);
    let status = rig.cache.status();
    assert_eq!((status.parked_bytes, status.dirty_bytes), (SECTOR, SECTOR));
}

#[test]
fn more_than_can_be_parked_is_put_together_again_into_few_requests() {
    let mut rig = Rig::new(Options { settings: parks(0), ..large() });
    refuse(&rig, &[ByteRange { start: 0, end: MIB }]);
    rig.cache.pieces(ByteRange { start: 0, end: MIB + BLOCK }).collect::<Vec<_>>().into_iter().for_each(
        |piece| {
            assert!(rig.write(piece, 1));
        },
    );
    rig.cache.request_drain();
    rig.run();
    changes(&rig);
    rig.settle_until(10_000);
    let whole = Asked::Write(ByteRange { start: 0, end: MIB });
    let asked = changes(&rig);
    assert!(!asked.is_empty() && asked.iter().all(|asked| *asked == whole), "{asked:?}");
    assert_eq!(rig.cache.status().parked_total, 0);
    assert_eq!(rig.disk.with(|state| state.deepest), 8, "never deeper than the queue");
}

#[test]
fn what_recovery_had_no_room_to_record_is_recorded_when_there_is_room() {
    let mut rig = Rig::new(Options::default());
    let count = rig.fill_up();
    rig.drain_without_clock();
    while rig.write(sector(count), 1) {}
    while rig.zero(sector(count + 1), false) {}
    let taken = rig.take_reserve();
    let (segment, slot, record) = *rig.records_of(LaneId(0)).first().expect("there are records");
    let (place, sequence) = ((segment.ordinal.0, slot), record.sequence.get());
    let everything = ByteRange { start: 0, end: u64::MAX };
    rig.cache.lane(LaneId(0)).lock().set_lost(everything, sequence, place);
    rig.worker.writeback.has_lost = true;
    rig.cache.flush().expect("it runs");
    rig.cache.lane(LaneId(0)).clear_touched();
    rig.run();
    assert!(rig.worker.writeback.has_lost && rig.cache.lane(LaneId(0)).lock().has_lost());
    assert_eq!(notes(&rig), []);
    rig.give_space(taken);
    rig.cache.lane(LaneId(0)).clear_touched();
    // Without reclaim, which records the loss, too, before its segment goes.
    let BackgroundWorker { cache, queue, writeback, .. } = &mut rig.worker;
    writeback.step(cache, queue, false);
    assert!(rig.cache.lane(LaneId(0)).is_touched(), "the record gets a mark");
    assert!(!rig.cache.lane(LaneId(0)).lock().has_lost());
    assert!(!rig.worker.writeback.has_lost);
    let last =
        rig.records_of(LaneId(0)).into_iter().find(|(.., record)| record.kind() == RecordKind::Quarantine);
    let last = last.expect("it is recorded");
    assert_eq!(last.2.reference.get(), sequence);
}

#[test]
fn the_quarantine_of_a_lost_record_names_its_sequence_number_wherever_it_stands() {
    for lost in [0, 1, 2] {
        let mut rig = Rig::new(Options::default());
        let mut count = 0;
        while rig.cache.status().used_segments() < 2 {
            assert!(rig.write(block(count), 1));
            count += 1;
        }
        // In the middle of a segment, at its end with another one behind it, at the end of the log.
        let number = [1, count - 2, count - 1][lost];
        let sequence = rig.newest(number * BLOCK).2.sequence.get();
        assert_eq!(sequence, number + 1);
        rig.lose_record(number * BLOCK);
        rig.drain();
        let mut quarantines: Vec<u64> = rig
            .records_of(LaneId(0))
            .into_iter()
            .filter(|(.., record)| record.kind() == RecordKind::Quarantine)
            .map(|(.., record)| record.reference.get())
            .collect();
        quarantines.dedup();
        assert_eq!(quarantines, [sequence]);
        assert_eq!(rig.cache.quarantined_bytes(), rig.options.device - (count - 1 - number) * BLOCK);
    }
}

#[test]
fn a_lost_record_of_data_that_the_disk_has_is_no_damage() {
    let mut rig = Rig::new(Options::default());
    // Nothing but fills, in two segments.
    let mut number = 0;
    while rig.cache.status().used_segments() < 2 {
        rig.read(block(number));
        number += 1;
    }
    rig.read(block(number));
    rig.lose_record(0);
    rig.lose_record((number - 1) * BLOCK);
    rig.drain();
    assert_eq!(rig.cache.quarantined_bytes(), 0);
    assert!(rig.write(block(number + 1), 1));
    rig.drain();
    assert_eq!((rig.cache.quarantined_bytes(), rig.cache.status().damage_found), (0, 0));
    assert!(rig.cache.status().backing_is_consistent);
}

#[test]
fn a_range_that_is_overwritten_while_parked_ranges_are_tried_is_not_tried_any_more() {
    let mut rig = Rig::new(Options { settings: parks(0), ..large() });
    let bad: Vec<ByteRange> = (0..6).map(|number| sector(number * 8)).collect();
    refuse(&rig, &bad);
    bad.iter().for_each(|range| assert!(rig.write(*range, 1)));
    rig.drain_without_clock();
    refuse(&rig, &[]);
    changes(&rig);
    rig.disk.with(|state| state.is_slow = true);
    rig.environment.set_monotonic(60_000);
    while rig.worker.step() == Step::Busy {}
    assert!(rig.write(bad[5], 2));
    rig.disk.with(|state| state.is_slow = false);
    while rig.cache.status().unparked_total == 0 {
        rig.worker.step();
    }
    assert_eq!(changes(&rig), bad[..5].iter().map(|range| Asked::Write(*range)).collect::<Vec<_>>());
    rig.drain();
    assert_eq!(rig.disk.with(|state| state.bytes[bad[5].start as usize]), 2);
}
