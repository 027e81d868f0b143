//! Other operations run between the steps in which writeback retries parked data.

use crate::rig::{BLOCK, Rig, settle, step};
use cbd_engine::{OnWriteError, Settings};
use cbd_sim::{DiskFaults, act_as};
use cbd_types::ByteRange;

/// Number of blocks with one sector each that the disk refuses.
const REFUSED: u64 = 4;
const SECTOR: u64 = 512;

#[test]
fn parked_data_that_was_overwritten_before_its_retry_is_not_marked_bad() {
    expect_nothing_marked_bad(&[0, 1, 2, 3]);
}

#[test]
fn parked_data_that_was_carried_before_its_retry_is_not_marked_bad() {
    expect_nothing_marked_bad(&[]);
}

/// Between the collection of parked data and its write to the disk, a client overwrites the data, or reclaim carries
/// it forward. Its segment is reused at a later position of the log than the valid data. Writeback must not take the
/// new content of the segment for damage of the parked data: it would mark the newer data bad.
fn expect_nothing_marked_bad(overwritten: &[u64]) {
    let rig = rig_with_parked_sectors();
    // The first range is in flight for a long time, and the others wait for it: the queue depth is one.
    rig.disk.set_latency(10_000);
    let is_tried = |rig: &Rig| rig.disk.in_flight_of(rig.worker.borrow().queue().number()) > 0;
    step_until(&rig, is_tried);
    rig.disk.set_faults(DiskFaults::default());
    rig.disk.set_latency(0);

    act_as(0);
    overwritten.iter().for_each(|block| rig.write(block * BLOCK, 2));
    rig.set_gc(0);
    step_until(&rig, |rig| rig.cache.status().rare.segments_reclaimed >= 2);
    rig.set_gc(90);
    act_as(0);
    let mut filler = 64;
    while rig.cache.status().rare.segment_reuses == 0 {
        rig.write(filler * BLOCK, 3);
        filler += 1;
    }
    assert!(is_tried(&rig), "the first completed too early for the others to wait");

    settle(&rig.environment, &rig.worker);
    let status = rig.cache.status();
    assert_eq!((&status.damaged[..], status.damage_found, &status.parked[..]), (&[][..], 0, &[][..]));
    let expect_all = |rig: &Rig| {
        for block in 0..REFUSED {
            rig.expect(block * BLOCK, if overwritten.contains(&block) { 2 } else { 1 });
        }
        (64..filler).for_each(|block| rig.expect(block * BLOCK, 3));
    };
    expect_all(&rig);
    for block in 0..REFUSED {
        let mut bytes = [0; BLOCK as usize];
        rig.disk.contents().read(block * BLOCK, &mut bytes);
        assert_eq!(bytes, [if overwritten.contains(&block) { 2 } else { 1 }; BLOCK as usize]);
    }
    expect_all(&rig.restart());
}

/// Parked sectors in a segment in which nothing else is dirty; the log continues behind it.
fn rig_with_parked_sectors() -> Rig {
    let rig = Rig::new(1);
    let settings = rig.cache.settings();
    let settings = Settings { on_write_error: OnWriteError::Park, write_error_after_s: 0, ..settings };
    rig.cache.set_settings(settings).expect("in range");
    let unwritable = (0..REFUSED).map(|block| ByteRange::at(block * BLOCK + SECTOR, SECTOR)).collect();
    rig.disk.set_faults(DiskFaults { unwritable, ..DiskFaults::default() });
    for blocks in [0..REFUSED, REFUSED..36] {
        blocks.for_each(|block| rig.write(block * BLOCK, 1));
        rig.cache.request_drain();
        step_until(&rig, |rig| rig.cache.status().dirty_bytes == REFUSED * SECTOR);
        act_as(0);
    }
    assert_eq!(rig.cache.parked_bytes(), REFUSED * SECTOR);
    assert_eq!(rig.cache.status().rare.segments_reclaimed, 0);
    rig
}

fn step_until(rig: &Rig, is_so: impl Fn(&Rig) -> bool) {
    for _ in 0..2000 {
        if is_so(rig) {
            return;
        }
        let _ = step(&rig.environment, &rig.worker);
    }
    panic!("the condition is never met: {:?}", rig.cache.status());
}
